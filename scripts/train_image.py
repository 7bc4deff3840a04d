"""Train a ViT on labelled images and test it at other resolutions.

    python -m scripts.train_image --data FASHION_MNIST --out runs/fashion --encoding rotate --precision bf16 --compile
    python -m scripts.train_image --data FOLDER --out runs/mine --size 64 --test-sizes 96,128,64x96 --patch 8
    torchrun --nproc-per-node 4 -m scripts.train_image --data ROOT --dataset torch/cifar10 --out runs/cifar --size 32

DATA holds the four idx files of Fashion-MNIST (Debian's package dataset-fashion-mnist, 31 MB: ``apt-get download`` and
``dpkg -x``) or of MNIST; or train/CLASS/*.png and val/CLASS/*.png; or, with ``--dataset``, a data set of timm's that is
there already. Writes checkpoint.pt, history.csv and result.json to the folder of the run; the same command goes on
where it was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from lrpe_md.models.vit import lrpe_vit_tiny_patch16_224
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md.integrations.timm import LrpeVisionTransformer

from .common import choose, sent
from .image_data import Images, Labelled, load_images, resized, shifted
from .outcome import placements, timed, write_result
from .training import Trainer, Training, begin, command, option, settings_of


def relative(encoding: str, **kwargs: Any) -> dict[str, Any]:
    return {"encoding": encoding, "encoding_kwargs": kwargs}


# Name → arguments of the model. The bases are RoPE-ViT's (arXiv 2403.13298): 100 axial, 10 mixed. The phase is PoPE's
# (arXiv 2509.10534), on the keys alone: on both it cancels in q·k.
ENCODINGS: dict[str, dict[str, Any]] = {
    "none": {"encoding": None},
    "learned": {"encoding": None, "absolute": "learned"},
    "sincos": {"encoding": None, "absolute": "sincos"},
    "rotate": relative("rotate", base=100.0),
    "rotate-learnable": relative("rotate", base=100.0, learnable=True),
    "rotate-mixed-fixed": relative("mixed", learnable=False),
    "rotate-mixed": relative("mixed"),
    "cosine": relative("cosine", base=100.0, act="none"),
    "cosine-relu": relative("cosine", base=100.0, act="relu"),
    "cosine-silu": relative("cosine", base=100.0, act="silu"),
    "cosine-softplus": relative("cosine", base=100.0, act="softplus"),
    "cosine-softplus-phase": relative("cosine", base=100.0, act="softplus", phase="k"),
    "cosine-learnable": relative("cosine", base=100.0, act="none", learnable=True),
    "cosine-softplus-learnable": relative("cosine", base=100.0, act="softplus", learnable=True),
    "cosine-mixed": relative("cosine", base=10.0, act="none", frequencies="mixed"),
    "cosine-mixed-learnable": relative("cosine", base=10.0, act="none", frequencies="mixed", learnable=True),
}
# Linear attention takes relu features where the encoding names no activation. A LayerNorm stands for the denominator,
# so that activations with negative values can be compared, too.
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "linear": {"attention": "linear", "normalizer": "none", "scale_attn_norm": True},
}


def parse_sizes(text: str, by: int) -> list[tuple[int, int]]:
    """ "20,28x40" → [(20, 20), (28, 40)], heights and widths."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        sides = part.split("x")
        if len(sides) > 2 or not all(s.isdecimal() and int(s) and int(s) % by == 0 for s in sides):
            raise typer.BadParameter(
                f"--test-sizes: expected sides, or HEIGHTxWIDTH, in multiples of {by}, with commas, got {part!r}"
            )
        found.append((int(sides[0]), int(sides[-1])))
    return found


@dataclass(frozen=True, kw_only=True)
class ImageTraining(Training):
    """Train a ViT on labelled images.

    Command: python -m scripts.train_image --data FASHION_MNIST --out runs/fashion --precision bf16 --compile

    Cost: 1,200 steps of 256 images of 14×14 patches are five epochs of Fashion-MNIST; 3.6 M parameters, 1.3e15
    floating-point operations: a minute and a half on an H200 that six trainings share, hours on a CPU.

    Expect: on Fashion-MNIST 89% at the trained size with the default rotation, 87 to 90% with the others, 83% with a
    learned table, 72 to 75% without positions; less at other sizes. At --lr 2e-3 rotation in softmax attention is
    unstable: its loss rises again after some 300 steps.
    """

    steps: int = option(1200, "Steps of the optimiser.")
    batch: int = option(256, "Images a step, over all processes and micro-batches.")
    warmup: int = option(120, "Steps of the warm-up.")
    data: Path = field(metadata={"help": "Folder of images; see the top of the file.", "free": True})
    dataset: str = option("", "A data set of timm's whose root is --data, such as torch/cifar10.")
    limit: int = option(0, "Take so many training and test images; 0: all.")
    encoding: str = option("rotate", f"One of: {', '.join(ENCODINGS)}.")
    attention: str = option("softmax", f"One of: {', '.join(ATTENTIONS)}.")
    size: int = option(28, "Height and width in training, pixels.")
    test_sizes: str = option("20,40,56,28x40", "Others to test at, pixels: sides, or HEIGHTxWIDTH.")
    patch: int = option(2, "Pixels.")
    dim: int = option(192, "Of the embedding.")
    depth: int = option(8, "Blocks.")
    heads: int = option(3, "Of attention.")
    qk_norm: bool = option(False, "Norms of q and k before the encoding, timm's.")
    shift: int = option(2, "Images are moved by up to so many pixels each way.")
    flip: bool = option(True, "Half of the images are mirrored.")
    erase: float = option(0.0, "Probability of timm's random erasing.")
    smoothing: float = option(0.1, "Of the labels.")

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("--encoding", [self.encoding], ENCODINGS)
        choose("--attention", [self.attention], ATTENTIONS)
        if self.size < 1 or self.size % self.patch:
            raise typer.BadParameter(f"--size: expected a multiple of {self.patch}, got {self.size}")
        if self.dim % self.heads:
            raise typer.BadParameter(f"--heads: expected a divisor of --dim {self.dim}, got {self.heads}")
        parse_sizes(self.test_sizes, self.patch)
        for name, most in (("erase", 1), ("smoothing", 1)):
            if not 0 <= getattr(self, name) < most:
                raise typer.BadParameter(f"--{name}: expected at least 0 and less than 1, got {getattr(self, name)}")
        for name in ("shift", "limit"):
            if getattr(self, name) < 0:
                raise typer.BadParameter(f"--{name}: expected at least 0, got {getattr(self, name)}")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """To test at, the trained one first."""
        return list(dict.fromkeys([(self.size, self.size), *parse_sizes(self.test_sizes, self.patch)]))


def model_arguments(config: ImageTraining, data: Labelled) -> dict[str, Any]:
    return {
        "img_size": config.size, "patch_size": config.patch, "embed_dim": config.dim, "depth": config.depth,
        "num_heads": config.heads, "qk_norm": config.qk_norm, "class_token": False, "global_pool": "avg",
        "in_chans": data.train.images.shape[1], "num_classes": data.num_classes,
        **ENCODINGS[config.encoding], **ATTENTIONS[config.attention],
    }  # fmt: skip


def build(config: ImageTraining, arguments: dict[str, Any]) -> LrpeVisionTransformer:
    # Not timm.create_model, which drops arguments that are None, encoding=None among them.
    try:
        return lrpe_vit_tiny_patch16_224(**arguments)
    except ValueError as error:
        raise typer.BadParameter(f"--dim {config.dim} --heads {config.heads}: {error}") from error


@lru_cache(maxsize=1)
def load(path: Path, size: int, dataset: str, limit: int) -> Labelled:
    """Once for all trainings of a process."""
    return load_images(path, size, dataset=dataset, limit=limit or None)


def batch(config: ImageTraining, train: Images, indices: np.ndarray, draws: np.ndarray) -> tuple[Tensor, Tensor]:
    """Images (B, C, size, size) in [-1, 1], moved and mirrored as their draws say, and labels (B,)."""
    index = sent(indices, train.labels.device)
    x = shifted(train.images[index], draws, shift=config.shift, flip=config.flip)
    return resized(x, (config.size, config.size)), train.labels[index]


def patches(config: ImageTraining) -> int:
    """Patches of a step."""
    return config.batch * (config.size // config.patch) ** 2


def loss(config: ImageTraining, model: nn.Module, images: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = images
    if config.erase:  # here, where the generators are seeded by the step
        x = RandomErasing(config.erase, mode="pixel", device=str(x.device))(x)
    return F.cross_entropy(model(x), labels, label_smoothing=config.smoothing)


@torch.no_grad()
def accuracy(model: nn.Module, test: Images, size: tuple[int, int], autocast: Any) -> float:
    """In %, of the images resized to ``size``."""
    right = torch.zeros((), dtype=torch.int64, device=test.labels.device)
    for x, labels in zip(test.images.split(500), test.labels.split(500), strict=True):
        with autocast():
            right += (model(resized(x, size)).argmax(-1) == labels).sum()
    return 100 * right.item() / len(test)


def evaluate(config: ImageTraining, test: Images, trainer: Trainer) -> dict[str, dict[str, float]]:
    """Accuracy at all sizes of the same images, positions one unit a patch, or laid over the trained grid."""
    model: Any = trainer.averaged
    model.eval()
    results = {}
    for positions in placements(model):
        results[positions] = {
            f"{height}x{width}": accuracy(model, test, (height, width), trainer.accelerator.autocast)
            for height, width in config.sizes
        }
    return results


def run(config: ImageTraining) -> dict[str, Any]:
    """One training and its tests; goes on where ``config.out`` has a checkpoint. Returns what result.json holds."""
    accelerator = begin(config)
    data = load(config.data, max(max(size) for size in config.sizes), config.dataset, config.limit)
    if config.batch > len(data.train):  # before anything is written
        raise typer.BadParameter(
            f"--batch {config.batch}: there are {len(data.train)} images to train on; make it smaller"
        )
    arguments = model_arguments(config, data)
    settings = settings_of(config, model=arguments, digest=data.digest)
    trainer = Trainer(config, accelerator, build(config, arguments), settings)
    data = data.to(accelerator.device)
    fit = partial(trainer.fit, len(data.train), partial(batch, config, data.train), partial(loss, config))
    common = timed(trainer, fit)
    result = {
        "encoding": config.encoding, "attention": config.attention, "seed": config.seed,
        "accuracy": evaluate(config, data.test, trainer), "train_images": len(data.train),
        "test_images": len(data.test), "chance": 100 / data.num_classes,
        "tokens": patches(config), **common,
    }  # fmt: skip
    write_result(trainer, result)
    return result


app = typer.Typer(add_completion=False)
command(app, ImageTraining)(run)

if __name__ == "__main__":
    app()
