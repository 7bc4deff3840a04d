"""Train a ViT on labelled images and test it at other resolutions.

    python -m scripts.train image --data FASHION_MNIST --out runs/fashion --encoding rotate --precision bf16 --compile
    python -m scripts.train image --data FOLDER --out runs/mine --size 64 --test-sizes 96,128,64x96 --patch 8
    torchrun --nproc-per-node 4 -m scripts.train image --data ROOT --dataset torch/cifar10 --out runs/cifar --size 32

DATA holds the four idx files of Fashion-MNIST (Debian's package dataset-fashion-mnist, 31 MB: ``apt-get download`` and
``dpkg -x``) or of MNIST; or, with ``--label``, images and a metadata.jsonl with file_name and that field; or
train/CLASS/*.png and val/CLASS/*.png; or, with ``--dataset``, a data set of timm's that is there already. Writes
checkpoint.pt, history.csv and result.json to the folder of the run; the same command goes on where it was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import typer
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md.integrations.timm import LrpeVisionTransformer

from ....models.vit import lrpe_vit_tiny_patch16_224
from ...common.devices import sent
from ...common.options import choose
from ..config import Training, describe, option
from ..data.captions import load_classes
from ..data.images import Images, Labelled, load_images, resized, shifted
from ..encodings import IMAGES, Backbone
from ..loop import Trainer
from ..order import shuffle
from ..outcome import placements
from ..work import Work, train


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

    Command: python -m scripts.train image --data FASHION_MNIST --out runs/fashion --precision bf16 --compile

    Cost: 1,200 steps of 256 images of 14×14 patches are five epochs of Fashion-MNIST; 3.6 M parameters, 1.3e15
    floating-point operations: a minute and a half on an H200 that six trainings share, hours on a CPU.

    Expect: on Fashion-MNIST 89% at the trained size with the default rotation, 87 to 90% with the others, 83% with a
    learned table, 72 to 75% without positions; less at other sizes. At --lr 2e-3 rotation in softmax attention is
    unstable: its loss rises again after some 300 steps.
    """

    backbone: ClassVar[Backbone] = IMAGES
    steps: int = option(1200, "Steps of the optimiser.", least=1)
    batch: int = option(256, "Images a step, over all processes and micro-batches.", least=1)
    warmup: int = option(120, "Steps of the warm-up.", least=0, off=True)
    data: Path = field(metadata=describe("Folder of images; see the top of the file.", free=True))
    dataset: str = option("", "A data set of timm's whose root is --data, such as torch/cifar10.")
    label: str = option("", "The field that is the class, of a folder or zip with metadata.jsonl: one in 5 is a test.")
    without: str = option("", "With --label: a field; rows where it is true are left out.")
    limit: int = option(0, "Take so many training and test images; 0: all.", least=0, off=True)
    encoding: str = option("rotate", IMAGES.help)
    attention: str = option("softmax", f"One of: {', '.join(IMAGES.attentions)}.")
    size: int = option(28, "Height and width in training, pixels.")
    test_sizes: str = option("20,40,56,28x40", "Others to test at, pixels: sides, or HEIGHTxWIDTH.")
    patch: int = option(2, "Pixels.", least=1)
    dim: int = option(192, "Of the embedding.", least=1)
    depth: int = option(8, "Blocks.", least=1)
    heads: int = option(3, "Of attention.", least=1)
    qk_norm: bool = option(False, "Norms of q and k before the encoding, timm's.")
    shift: int = option(2, "Images are moved by up to so many pixels each way.", least=0, off=True)
    flip: bool = option(True, "Half of the images are mirrored.")
    erase: float = option(0.0, "Probability of timm's random erasing.", least=0, below=1)
    smoothing: float = option(0.1, "Of the labels.", least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.without and not self.label:
            raise typer.BadParameter(f"--without {self.without}: expected --label with it")
        choose("--attention", [self.attention], IMAGES.attentions)
        if self.size < 1 or self.size % self.patch:
            raise typer.BadParameter(f"--size: expected a multiple of {self.patch}, got {self.size}")
        if self.dim % self.heads:
            raise typer.BadParameter(f"--heads: expected a divisor of --dim {self.dim}, got {self.heads}")
        parse_sizes(self.test_sizes, self.patch)
        self.check_encoding(lrpe_vit_tiny_patch16_224, shape_arguments(self))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Sizes to test at, the trained one first."""
        return list(dict.fromkeys([(self.size, self.size), *parse_sizes(self.test_sizes, self.patch)]))


def shape_arguments(config: ImageTraining) -> dict[str, Any]:
    """Return the arguments of the model that do not depend on the data."""
    return {
        "img_size": config.size, "patch_size": config.patch, "embed_dim": config.dim, "depth": config.depth,
        "num_heads": config.heads, "qk_norm": config.qk_norm, "class_token": False, "global_pool": "avg",
        **IMAGES.arguments(config.encoding, config.attention),
    }  # fmt: skip


def model_arguments(config: ImageTraining, data: Labelled) -> dict[str, Any]:
    return {
        **shape_arguments(config), "in_chans": data.train.images.shape[1], "num_classes": data.num_classes,
    }  # fmt: skip


def build(config: ImageTraining, arguments: dict[str, Any]) -> LrpeVisionTransformer:
    # Not timm.create_model, which drops arguments that are None, encoding=None among them.
    return lrpe_vit_tiny_patch16_224(**arguments)


@lru_cache(maxsize=1)
def load(path: Path, size: int, dataset: str, limit: int, label: str, without: str) -> Labelled:
    """Once for all trainings of a process."""
    if label:
        return load_classes(path, size, label=label, without=without, limit=limit or None)
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
    """Return the accuracy in %, on images resized to ``size``."""
    right = torch.zeros((), dtype=torch.int64, device=test.labels.device)
    for x, labels in zip(test.images.split(500), test.labels.split(500), strict=True):
        with autocast():
            right += (model(resized(x, size)).argmax(-1) == labels).sum()
    return 100 * right.item() / len(test)


def evaluate(config: ImageTraining, test: Images, trainer: Trainer) -> dict[str, dict[str, float]]:
    """Accuracy at all sizes of the same images, positions one unit a patch, or laid over the trained grid."""
    model: Any = trainer.averaged
    results = {}
    for positions in placements(model):
        results[positions] = {
            f"{height}x{width}": accuracy(model, test, (height, width), trainer.accelerator.autocast)
            for height, width in config.sizes
        }
    return results


def prepare(config: ImageTraining, device: torch.device) -> Work:
    size = max(max(size) for size in config.sizes)
    data = load(config.data, size, config.dataset, config.limit, config.label, config.without)
    if config.batch > len(data.train):  # before anything is written
        raise typer.BadParameter(
            f"--batch {config.batch}: there are {len(data.train)} images to train on; make it smaller"
        )
    arguments = model_arguments(config, data)
    model, settings = build(config, arguments), {"model": arguments, "digest": data.digest}
    data = data.to(device)

    def finish(trainer: Trainer) -> dict[str, Any]:
        return {
            "encoding": config.encoding, "attention": config.attention, "seed": config.seed,
            "accuracy": evaluate(config, data.test, trainer), "train_images": len(data.train),
            "test_images": len(data.test), "chance": 100 / data.num_classes, "tokens": patches(config),
        }  # fmt: skip

    def validate(trainer: Trainer) -> dict[str, float]:
        autocast = trainer.accelerator.autocast
        return {"accuracy": accuracy(trainer.averaged, data.test, (config.size, config.size), autocast)}

    steps = partial(shuffle, len(data.train), config.batch, config.seed)
    return Work(model, settings, steps, partial(batch, config, data.train), partial(loss, config), finish, validate)


run = partial(train, prepare)
