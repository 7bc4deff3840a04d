"""Decode and augment batches of images. One random number per image determines the augmentation, in any process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
import typer
from PIL import Image
from timm.data.auto_augment import posterize
from timm.data.transforms_factory import create_transform
from torch import Tensor

from .images import Images
from .streams import LabelledStream


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random number generators that augmentations use, and restore their states afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def build_transform(size: int | tuple[int, int], policy: str, scale: float) -> Any:
    """Return timm's random resized crop and automatic augmentation, which outputs uint8 (3, height, width).

    Args:
        size: height and width, or one number for both.
        policy: augmentation policy of timm, such as rand-m9-mstd0.5-inc1, or "" for none.
        scale: smallest area of a crop, as a fraction of the image's area. If it is 1, images are centre-cropped.

    Raises:
        typer.BadParameter: if timm does not know the policy.
    """
    shape = (size, size) if isinstance(size, int) else size
    ratio = shape[1] / shape[0]
    try:
        transform: Any = create_transform(
            shape, is_training=True, scale=(scale, 1.0),
            ratio=(ratio, ratio) if scale == 1 else (3 / 4 * ratio, 4 / 3 * ratio), hflip=0.0,
            color_jitter=0.0, auto_augment=policy or None, interpolation="bicubic", mean=(0.5, 0.5, 0.5),
            use_prefetcher=True,
        )  # fmt: skip
    except (AssertionError, ValueError, IndexError, KeyError) as error:
        raise typer.BadParameter(
            f"--augment: expected a timm policy, such as rand-m9-mstd0.5-inc1, got {policy!r} ({error})"
        ) from error
    for step in transform.transforms:
        for operation in (*getattr(step, "ops", ()), *chain.from_iterable(getattr(step, "policy", ()))):
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits_to_keep: int, **unused: Any) -> Image.Image:
    """Call timm's ``posterize``, or return a black image for 0 bits or fewer, which Pillow 13 rejects."""
    return posterize(image, bits_to_keep) if bits_to_keep > 0 else image.point(lambda _: 0)


def read_batch(
    data: Images | LabelledStream, transform: Callable[[Image.Image], Any], indices: np.ndarray, draws: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return uint8 images (B, C, size, size) and classes (B,), both on the CPU."""
    images, labels = [], []
    for index, draw in zip(indices.tolist(), draws.tolist(), strict=True):
        image, label = data[index] if isinstance(data, LabelledStream) else _as_image(data, index)
        with seeded(draw):
            x = torch.as_tensor(transform(image))
        grey = isinstance(data, Images) and data.images.shape[1] == 1
        images.append(x.float().mean(0, keepdim=True).round().byte() if grey else x)
        labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def _as_image(data: Images, index: int) -> tuple[Image.Image, int]:
    x = data.images[index].permute(1, 2, 0).numpy()
    return Image.fromarray(x[..., 0] if x.shape[-1] == 1 else x).convert("RGB"), int(data.labels[index])
