"""Train a ViT on labelled images and test it at other resolutions.

    lrpe-md train image --data FASHION_MNIST --out runs/fashion --encoding rotate --precision bf16 --compile
    lrpe-md train image --data FOLDER --out runs/mine --size 64x96 --patch 8 --test-sizes 64,96,96x144
    lrpe-md train image --data SHARDS --out runs/large --model vit_base_patch16_224 --workers 8 \\
        --augment rand-m9-mstd0.5-inc1 --crop 0.08 --mixup 0.8 --cutmix 1.0 --layer-decay 0.75
    lrpe-md train image --data ROOT --dataset torch/cifar10 --out runs/cifar --size 32
    torchrun --nproc-per-node 4 -m lrpe_md.scripts.train image --data FOLDER --out runs/mine

DATA is one of:
- a folder with the four idx files of Fashion-MNIST (Debian's package dataset-fashion-mnist, 31 MB: ``apt-get download``
  and ``dpkg -x``) or MNIST
- a folder with CLASS/*.png, where one in 5 images is held out for tests, or with train/CLASS/*.png and val/CLASS/*.png
- with ``--label FIELD``, images and a metadata.jsonl with file_name and FIELD
- webdataset shards: a folder, or a pattern such as train-{000..099}.tar
- a Hugging Face dataset: a save_to_disk folder, a folder of parquet files, or hf:OWNER/NAME
- with ``--dataset``, the root of a downloaded timm dataset

The command writes checkpoint.pt, history.csv, result.json and model.safetensors to the run's folder. Run the same
command again to resume an interrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import typer
from accelerate import PartialState
from timm import create_model, list_models
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.layers.hybrid_embed import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md.checks import suggest
from lrpe_md.integrations.timm import LrpeVisionTransformer, adapt

from ....models.vit import lrpe_vit_tiny_patch16_224
from ...common.devices import sent
from ..config import (
    MODEL,
    OPTIMISER,
    Training,
    changed,
    check_ignored,
    check_model_options,
    check_width,
    describe,
    option,
)
from ..data.augment import build_transform, read_batch
from ..data.buckets import MAX_RATIO, Buckets, Shape, Sizes, parse_size, parse_sizes, show_size
from ..data.captions import TABLES
from ..data.images import ImageError, Images, Labelled, is_idx, load_images, load_stream, resized, shifted
from ..data.pictures import load_classes
from ..data.records import average_by_class, describe_few, describe_held_out
from ..data.streams import LabelledStream, is_stream
from ..encodings import IMAGES, Backbone, explain_single_patch, has_coordinates
from ..loop import Trainer
from ..outcome import placements
from ..work import Work, report, train

# Arguments of a run's model that belong to adapt instead of timm.create_model, with adapt's defaults.
ADAPTED: dict[str, Any] = {"encoding_kwargs": None, "attention": "softmax", "normalizer": "unrotated"}

FLAGS = ("qk_norm", "scale_attn_norm")  # arguments to pass to timm only if they are True


@dataclass(frozen=True, kw_only=True)
class ImageTraining(Training):
    """Train a ViT on labelled images.

    Command: lrpe-md train image --data FASHION_MNIST --out runs/fashion --precision bf16 --compile

    Cost: 3.6 M parameters. 1,200 steps of 256 images with 14×14 patches are five epochs of Fashion-MNIST, or 1.3e15
    floating-point operations. The steps take a minute and a half on an H200 shared by six runs, and hours on a CPU.

    Expect: on Fashion-MNIST at the training size, an accuracy of 89% with the default rotation, 87% to 90% with
    other encodings, 83% with a learned table, and 72% to 75% without positions. At other sizes, the accuracy is lower.
    At --lr 2e-3, rotation in softmax attention is unstable: the loss rises again after about 300 steps.
    """

    backbone: ClassVar[Backbone] = IMAGES
    steps: int = changed("steps", 1200)
    batch: int = changed(
        "batch", 256, "Images per step, over all processes and micro-batches; at most the number of training images."
    )
    warmup: int = changed("warmup", 120)
    data: Path = field(
        metadata=describe("Folder of images, shards (.tar), or a Hugging Face dataset (hf:OWNER/NAME).", free=True)
    )
    dataset: str = option("", "Dataset from timm, such as torch/cifar10, with --data as its root.")
    label: str = option("", "Field that holds the class, in metadata.jsonl, in .json files of shards, or in a dataset.")
    without: str = option("", "Boolean field of metadata.jsonl; rows where it is true are left out.")
    limit: int = option(0, "Maximum number of training images, and of test images; 0 uses all.", least=0, off=True)
    stream: bool = option(False, "Decode a folder's images on demand, instead of decoding all of them before training.")
    size: str = option("", "Training size, in pixels: SIDE or HEIGHTxWIDTH. Default: 28 for idx files, 224 otherwise.")
    reference: str = option(
        "", "Interpolate positions to the patch grid of this image size, in pixels: SIDE or HEIGHTxWIDTH. To "
        "fine-tune at a different size, pass the size that --weights were trained at. Default: neighbouring patches "
        "are one unit apart.",
    )  # fmt: skip
    mix_sizes: str = option(
        "", "Other sizes to train at, in pixels: SIDE or HEIGHTxWIDTH, separated by commas. Each batch has one size."
    )
    max_ratio: float = option(
        1.0, f"{MAX_RATIO} Values above 1 require streamed data (for folders, --stream).", least=1
    )
    test_sizes: str = option(
        "auto",
        "Other sizes to test at, in pixels: SIDE or HEIGHTxWIDTH, separated by commas. With auto, images are tested "
        "with both sides 4 patches shorter, with both sides 4 patches longer, and with only the width 4 patches "
        "longer. For idx files, auto means 20,40,56,28x40. To test a finished run at other sizes, repeat its command "
        "with different --test-sizes.",
        free=True,
    )
    augment: str = option("", "Augmentation policy from timm, such as rand-m9-mstd0.5-inc1 (RandAugment).")
    crop: float = option(
        1.0, "Smallest fraction of the image in a random crop; 1 crops the centre.", least=0, below=1.001
    )
    shift: int = option(2, "Largest random shift of an image in each direction, in pixels.", least=0, off=True)
    flip: bool = option(True, "Mirror half of the images.")
    erase: float = option(0.0, "Probability of random erasing.", least=0, below=1)
    mixup: float = option(0.0, "Alpha of mixup; 0 disables it.", least=0, off=True)
    cutmix: float = option(0.0, "Alpha of cutmix; 0 disables it.", least=0, off=True)
    smoothing: float = option(0.1, "Label smoothing.", least=0, below=1)
    model: str = option(
        "",
        "Vision transformer from timm, such as vit_base_patch16_224, instead of --dim, --depth, --heads and --patch.",
        panel=MODEL,
    )  # fmt: skip
    encoding: str = option("rotate", IMAGES.help)
    attention: str = option("softmax", IMAGES.attention_help)
    patch: int = option(0, "Height and width of a patch, in pixels; 0 means 2 for idx files and 16 otherwise.", least=0)
    dim: int = option(192, "Embedding width.", least=1)
    depth: int = option(8, "Number of blocks.", least=1)
    heads: int = option(3, "Number of attention heads.", least=1)
    qk_norm: bool = option(False, "Normalise q and k before the encoding.")
    layer_decay: float = option(
        1.0, "Layer-wise learning rate decay: factor from each layer to the previous one; 1 disables it.", least=0,
        below=1.001, panel=OPTIMISER,
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._choose_sizes()
        super().__post_init__()
        if self.without and not self.label:
            raise typer.BadParameter(
                f"--without {self.without}: only works with --label; add --label, or leave out --without"
            )
        if self.dataset:
            check_ignored(self, "label without stream", "does not work with --dataset; leave out {option} or --dataset")
        elif self.stream or is_stream(self.data):
            check_ignored(self, "without", "does not work with streamed data; leave out {option}")
        if self.reference and max(parse_size("--reference", self.reference, self.patch)) == self.patch:
            raise typer.BadParameter(explain_single_patch(self.reference))
        if not self.model:
            check_width("--dim", self.dim, self.heads)
        if self.max_ratio > 1 and any(height != width for height, width in self.train_sizes):
            raise typer.BadParameter(
                f"--max-ratio {self.max_ratio}: expected square --size and --mix-sizes, got "
                f"{', '.join(show_size(*size) for size in self.train_sizes)}; leave out --max-ratio"
            )
        _ = self.test_shapes
        if self.augment:
            build_transform(self.shape, self.augment, self.crop)
        self.check_encoding(partial(build, self), {**shape_arguments(self), "in_chans": 3, "num_classes": 2})
        if self.reference and not has_coordinates(shape_arguments(self)):
            raise typer.BadParameter(
                f"--reference {self.reference}: --encoding {self.encoding} has no grid positions to interpolate; leave "
                "out --reference"
            )

    def _choose_sizes(self) -> None:
        """Replace default values that depend on the data and the model."""
        is_small = not self.model and not self.dataset and is_idx(self.data)
        own = find_patch(self.model) if self.model else 0
        if own:
            check_model_options(self, {"dim": None, "depth": None, "heads": None, "patch": own})
        patch = self.patch or own or (2 if is_small else 16)
        height, width = parse_size("--size", str(self.size or (28 if is_small else 224)), patch)
        reference = show_size(*parse_size("--reference", str(self.reference), patch)) if self.reference else ""
        tests = self.test_sizes
        if tests == "auto":
            near = [(height + more, width + more) for more in (-4 * patch, 4 * patch)] + [(height, width + 4 * patch)]
            tests = "20,40,56,28x40" if is_small else ",".join(show_size(*size) for size in near if min(size) > 0)
        chosen = {"patch": patch, "size": show_size(height, width), "reference": reference, "test_sizes": tests}
        for name, value in chosen.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @property
    def shape(self) -> Shape:
        """Height and width in training."""
        return parse_size("--size", self.size, self.patch)

    @property
    def train_sizes(self) -> list[Shape]:
        """Heights and widths in training, starting with those of --size."""
        return list(dict.fromkeys([self.shape, *parse_sizes("--mix-sizes", self.mix_sizes, self.patch)]))

    @property
    def test_shapes(self) -> list[Shape]:
        """Heights and widths in tests, starting with those of --size."""
        return list(dict.fromkeys([self.shape, *parse_sizes("--test-sizes", self.test_sizes, self.patch)]))

    @property
    def dynamic_shapes(self) -> bool | None:
        return None if self.max_ratio > 1 or len(self.train_sizes) > 1 else False

    @property
    def is_augmented(self) -> bool:
        """Return whether images are augmented on the CPU."""
        return bool(self.augment) or self.crop < 1

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def optimizer_arguments(self, model: nn.Module) -> dict[str, Any]:
        return {"layer_decay": self.layer_decay} if self.layer_decay < 1 else {}


def find_patch(name: str) -> int:
    """Return the patch size of a timm vision transformer.

    Raises:
        typer.BadParameter: if timm has no such model, or it is not a vision transformer.
    """
    known, architecture = list_models(), name.partition(".")[0]
    if architecture not in known:
        raise typer.BadParameter(
            f"--model: unknown {architecture!r}{suggest(architecture, known)}; pass a name from timm.list_models()"
        )
    try:
        with torch.device("meta"):
            model: Any = create_model(name, pretrained=False)
    except RuntimeError as error:  # the pretrained tag is unknown
        raise typer.BadParameter(f"--model {name}: {error}") from error
    family, embed = "", getattr(model, "patch_embed", None)
    if type(model) is not VisionTransformer and not isinstance(model, LrpeVisionTransformer):
        family = f"a model of the family {type(model).__module__.rpartition('.')[2]}"
        if getattr(model, "rope", None) is not None:
            family = "a model that already uses RoPE; to fine-tune it, use docs/examples/finetune_timm.py"
    elif isinstance(embed, HybridEmbed):  # its patch_size counts features instead of pixels
        family = "a hybrid model, whose patches come from a convolutional network"
    if family:
        raise typer.BadParameter(
            f"--model {name}: expected a plain timm ViT, such as vit_base_patch16_224, got {family}"
        )
    return model.patch_embed.patch_size[0]


def shape_arguments(config: ImageTraining) -> dict[str, Any]:
    """Return the model arguments that do not depend on the data."""
    encoding = IMAGES.arguments(config.encoding, config.attention)
    if config.reference:
        sides = parse_size("--reference", config.reference, config.patch)
        encoding["reference"] = [side // config.patch for side in sides]
    if config.model:
        return {"model": config.model, "img_size": config.shape, "qk_norm": config.qk_norm, **encoding}
    return {
        "img_size": config.shape, "patch_size": config.patch, "embed_dim": config.dim, "depth": config.depth,
        "num_heads": config.heads, "qk_norm": config.qk_norm, "class_token": False, "global_pool": "avg",
        **encoding,
    }  # fmt: skip


def list_export_lines(arguments: dict[str, Any], *, keep_table: bool = False) -> list[str]:
    """Return the lines of Python that build the model of :func:`build_model` with timm and ``adapt``.

    The state_dict of the built model has the same names. timm's ``resolve_model_data_config`` returns the preprocessing
    of the run. The list is empty for a model with a sinusoidal position table, which timm can't build.
    """
    given = dict(arguments)
    absolute, reference = given.pop("absolute", "none"), given.pop("reference", None)
    if absolute == "sincos":
        return []
    name, encoding = given.pop("model", "vit_tiny_patch16_224"), given.pop("encoding") or "none"
    adapted = {each: given.pop(each) for each in ADAPTED if given.get(each) not in (None, {}, ADAPTED[each])}
    given = {each: value for each, value in given.items() if each not in ADAPTED and (value or each not in FLAGS)}
    has_table = absolute == "learned" or ("model" in arguments and keep_table)
    given |= {"dynamic_img_size": True} if has_table else {"pos_embed": "none", "dynamic_img_size": True}
    channels = given.get("in_chans", 3)
    given["pretrained_cfg_overlay"] = {
        "input_size": (channels, *given["img_size"]), "mean": (0.5,) * channels, "std": (0.5,) * channels,
        "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bicubic",
    }  # fmt: skip
    lines = [
        "import timm",
        "from lrpe_md import adapt",
        f"model = timm.create_model({name!r}, {', '.join(f'{each}={value!r}' for each, value in given.items())})",
        f"model = adapt(model, {encoding!r}{''.join(f', {each}={value!r}' for each, value in adapted.items())})",
    ]
    return lines if reference is None else [*lines, f"model.reference = {tuple(reference)}"]


def model_arguments(config: ImageTraining, data: Labelled) -> dict[str, Any]:
    return {**shape_arguments(config), "in_chans": data.channels, "num_classes": data.num_classes}


def build(config: ImageTraining, arguments: dict[str, Any] | None = None, **more: Any) -> LrpeVisionTransformer:
    """Build the model of a training run. ``more`` contains additional arguments."""
    return build_model({**(arguments or {}), **more}, keep_table=bool(config.weights))


def build_model(arguments: dict[str, Any], *, keep_table: bool = False) -> LrpeVisionTransformer:
    """Build an LRPE ViT, or a timm model with the encoding added.

    Args:
        arguments: arguments of the model. ``model`` names a timm model, and ``reference`` sets the attribute of that
            name.
        keep_table: whether to keep the position table of a timm model whose initial weights were trained with it.
    """
    given = dict(arguments)
    reference = given.pop("reference", None)
    # Don't use timm.create_model for our models, because it drops arguments that are None, such as encoding=None.
    model = _adapt_timm_model(given, keep_table) if "model" in given else lrpe_vit_tiny_patch16_224(**given)
    model.reference = reference
    return model


def _adapt_timm_model(given: dict[str, Any], keep_table: bool) -> LrpeVisionTransformer:
    given = dict(given)
    absolute = given.pop("absolute", "none")
    if absolute == "sincos":
        raise ValueError(
            "absolute: expected 'none' or 'learned' for a timm model, which has a learned position table, got 'sincos'"
        )
    adapted = {name: given.pop(name) for name in ADAPTED if name in given}
    encoding, name = given.pop("encoding"), given.pop("model")
    flags = {flag: True for flag in FLAGS if given.pop(flag, False)}  # some models set these
    depth = {"depth": given.pop("depth")} if "depth" in given else {}
    model = create_model(name, pretrained=False, dynamic_img_size=True, **flags, **depth, **given)
    return adapt(model, encoding, "keep" if keep_table or absolute == "learned" else "drop", **adapted)


@lru_cache(maxsize=1)
def load(
    path: Path, size: Shape, test_size: Shape, dataset: str, limit: int, label: str, without: str, stream: bool = False
) -> Labelled:
    """Load the data. The data is cached for other runs in the same process."""
    if not dataset and (stream or is_stream(path)):
        return load_stream(path, test_size, label=label, limit=limit or None)
    if label:
        return load_classes(path, size, test_size, label=label, without=without, limit=limit or None)
    try:
        return load_images(path, size, test_size, dataset=dataset, limit=limit or None)
    except ImageError as error:
        is_zip = path.suffix == ".zip" and path.is_file()
        if dataset or not (is_zip or any(next(path.rglob(name), None) for name in TABLES)):
            raise
        raise ImageError(
            f"--data {path}: expected --label with a .zip or a table such as {TABLES[0]}, got none; pass --label "
            "FIELD, the field of the table that holds the class"
        ) from error


def sort_images(config: ImageTraining, train: Images | LabelledStream) -> Buckets:
    """Sort training images into buckets by aspect ratio.

    Raises:
        typer.BadParameter: for --max-ratio if images are cropped to squares.
    """
    if config.max_ratio == 1:
        return Buckets({i: [size] for i, size in enumerate(config.train_sizes)}, np.zeros(len(train), np.int64))
    if isinstance(train, Images):
        raise typer.BadParameter(
            f"--max-ratio {config.max_ratio}: these images are stored as squares in memory; pass --stream for a "
            "folder of images"
        )
    sizes = Sizes(tuple(side for side, _ in config.train_sizes), (), config.patch, config.max_ratio)
    with ThreadPoolExecutor(8) as pool:
        return sizes.sort(np.array(list(pool.map(train.stream.measure, range(len(train))))))


def group_by_ratio(sizes: Sequence[Shape]) -> list[list[Shape]]:
    """Group sizes by their aspect ratio. The first size is in the first group."""
    groups: dict[Fraction, list[Shape]] = {}
    for height, width in sizes:
        groups.setdefault(Fraction(height, width), []).append((height, width))
    return list(groups.values())


def batch(
    config: ImageTraining, data: tuple[dict[Shape, Images], Buckets], numbers: np.ndarray, draws: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return randomly shifted and mirrored images (B, C, height, width) in [-1, 1], and labels (B,).

    ``data`` contains the images for each training size, and their buckets. ``numbers`` come from
    :meth:`.buckets.Buckets.order`. ``draws`` are random numbers.
    """
    by_size, buckets = data
    indices, shape = buckets.locate(numbers)
    train = by_size[shape]
    index = sent(indices, train.labels.device)
    x = shifted(train.images[index], draws, shift=config.shift, flip=config.flip)
    return resized(x, shape), train.labels[index]


def augmented_batch(
    config: ImageTraining, data: tuple[dict[Shape, Images] | LabelledStream, Buckets], numbers: np.ndarray,
    draws: np.ndarray,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Like :func:`batch`, but decode and augment the images on the CPU, and return them as uint8."""
    found, buckets = data
    indices, shape = buckets.locate(numbers)
    train = found[shape] if isinstance(found, dict) else found
    x, labels = read_batch(train, transform_of(shape, config.augment, config.crop), indices, draws)
    return shifted(x, draws, shift=config.shift, flip=config.flip), labels


transform_of = lru_cache(maxsize=None)(build_transform)


def patches(config: ImageTraining) -> int:
    """Return the mean number of patches in a step. All training sizes are used equally often."""
    counts = [(height // config.patch) * (width // config.patch) for height, width in config.train_sizes]
    return round(config.batch * sum(counts) / len(counts))


def loss(
    config: ImageTraining, model: nn.Module, images: tuple[Tensor, Tensor], mix: Mixup | None = None
) -> Tensor:  # fmt: skip
    x, labels = images
    if x.dtype == torch.uint8:
        x = resized(x, (x.shape[2], x.shape[3]))
    # Augmentations that use the global random number generators run here, because the step seeds these generators.
    if config.erase:
        x = RandomErasing(config.erase, mode="pixel", device=str(x.device))(x)
    if mix is not None:
        x, labels = mix(x, labels)
        return F.cross_entropy(model(x), labels)
    return F.cross_entropy(model(x), labels, label_smoothing=config.smoothing)


def build_mixup(config: ImageTraining, num_classes: int) -> Mixup | None:
    """Return timm's mixup and cutmix, or None if both are disabled."""
    if not config.mixes:
        return None
    parts = config.accumulate * PartialState().num_processes
    if config.batch // parts % 2:
        raise typer.BadParameter(
            f"--batch {config.batch}: expected a multiple of {2 * parts} (two images per micro-batch and process), "
            "because mixup and cutmix mix pairs"
        )
    return Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=num_classes)


@torch.no_grad()
def find_right(model: nn.Module, test: Images, size: Shape, autocast: Any) -> Tensor:
    """Resize the test images to ``size``, and return a mask (N,) of those that the model classifies correctly."""
    right = []
    for x, labels in zip(test.images.split(500), test.labels.split(500), strict=True):
        with autocast():
            right.append(model(resized(x, size)).argmax(-1) == labels)
    return torch.cat(right)


def percentage(right: Tensor) -> float:
    """Return the accuracy in % from a result of :func:`find_right`."""
    return 100 * right.sum().item() / len(right)


def evaluate(config: ImageTraining, data: Labelled, trainer: Trainer) -> dict[str, Any]:
    """Return the accuracies in % at all sizes, for each way of placing tokens; see :func:`.outcome.placements`.

    If the classes are known, add their names, and the accuracy at the training size for each class with test images.
    """
    model: Any = trainer.averaged
    right: dict[str, dict[Shape, Tensor]] = {}
    for size in config.test_shapes:
        test = data.test_at(size).to(trainer.accelerator.device)
        for positions in placements(model):
            mask = find_right(model, test, size, trainer.accelerator.autocast)
            right.setdefault(positions, {})[size] = mask
    found: dict[str, Any] = {
        positions: {f"{height}x{width}": percentage(mask) for (height, width), mask in by_size.items()}
        for positions, by_size in right.items()
    }
    if not data.classes:
        return {"accuracy": found}
    trained = next(iter(right.values()))[config.shape].cpu().numpy()
    by_class = average_by_class(trained, data.test.labels.cpu().numpy(), data.classes)
    return {"accuracy": found, "classes": list(data.classes), "accuracy_by_class": by_class}


def enclose(sizes: Sequence[Shape]) -> Shape:
    """Return the smallest size that contains all sizes and has the aspect ratio of the first size."""
    height, width = sizes[0]
    return (
        max(max(h, math.ceil(w * height / width)) for h, w in sizes),
        max(max(w, math.ceil(h * width / height)) for h, w in sizes),
    )


def read_sizes(
    data: Labelled, train: Images, groups: Sequence[Sequence[Shape]], device: torch.device
) -> dict[Shape, Images]:  # fmt: skip
    """Return the training images for each size. Sizes with the same aspect ratio share the images of the largest one.

    ``train`` contains the images for the first group of sizes. Images from idx files stay unchanged.
    """
    found: dict[Shape, Images] = {}
    for group in groups:
        images = train if group is groups[0] or data.read_train is None else data.read_train(enclose(group))
        found |= dict.fromkeys(group, images.to(device))
    return found


def prepare(config: ImageTraining, device: torch.device) -> Work:
    groups = group_by_ratio(config.train_sizes)
    size, options = enclose(groups[0]), (config.dataset, config.limit, config.label, config.without)
    data = load(config.data, size, config.shape, *options, config.stream)
    data.check_memory(config.test_shapes)
    if config.is_new and config.batch > len(data.train):  # check before anything is written
        raise typer.BadParameter(
            f"--batch {config.batch}: expected at most {len(data.train)}, the number of training images; use a "
            "smaller batch"
        )
    held_out = np.arange(len(data.train) + len(data.test)) >= len(data.train)
    report(
        describe_held_out("image", held_out, data.labels, data.classes),
        describe_few("image", held_out, data.labels, data.classes, "add images"),
    )
    arguments, mix = model_arguments(config, data), build_mixup(config, data.num_classes)
    model, settings = build(config, arguments), {"model": arguments, "digest": data.train.digest}
    buckets = sort_images(config, data.train)
    in_processes, test = isinstance(data.train, LabelledStream) or config.is_augmented, data.test.to(device)
    if isinstance(data.train, LabelledStream):
        make_batch = partial(augmented_batch, config, (data.train, buckets))
    else:
        by_size = read_sizes(data, data.train, groups, torch.device("cpu") if in_processes else device)
        make_batch = partial(augmented_batch if in_processes else batch, config, (by_size, buckets))

    def finish(trainer: Trainer) -> dict[str, Any]:
        return {
            "encoding": config.encoding, "attention": config.attention, "seed": config.seed, "size": config.size,
            "reference": config.reference, "weights": config.weights,
            "train_images": len(data.train), "test_images": len(test), "chance": 100 / data.num_classes,
            "tokens": patches(config), **evaluate(config, data, trainer),
            "export": list_export_lines(arguments, keep_table=bool(config.weights)),
        }  # fmt: skip

    def validate(trainer: Trainer) -> dict[str, float]:
        autocast = trainer.accelerator.autocast
        return {"accuracy": percentage(find_right(trainer.averaged, test, config.shape, autocast))}

    steps = buckets.order(config.batch, config.seed)
    task_loss = partial(loss, config, mix=mix)
    return Work(
        model, settings, steps, make_batch, task_loss, finish, validate, in_processes=in_processes,
        test_digest=data.test.digest,
    )  # fmt: skip


run = partial(train, prepare)
