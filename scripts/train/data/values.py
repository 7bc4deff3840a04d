"""Values that a diffusion model is trained on: pixels, latents, or clips of either."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from ...common.devices import sent
from ...common.folder import read_json
from .records import Records

LATENTS, RECORDS = "latents.json", "records.json"
FORMAT = 1  # of folders of latents


class Values(Protocol):
    """Interface of the values.

    Attributes:
        sizes: height and width in pixels, first those of training, then a larger one to test at if there is one.
        channels: of a sample.
        device: that of the batches.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def channels(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def shape(self, size: int) -> tuple[int, ...]:
        """Return ([frames,] height, width) of a sample at a size."""
        ...

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        """Return samples (B, channels, [frames,] height, width), float32.

        draws: (B,) int64, decide the augmentation; None: no augmentation, and the mean of latents.
        """
        ...


def mirrored(draws: np.ndarray) -> np.ndarray:
    """Return which samples are mirrored by their draws."""
    return draws % 2 == 1


def resize(images: Tensor, size: int) -> Tensor:
    """uint8 (N, 3, H, H) → (N, 3, size, size), bicubic."""
    if images.shape[-1] == size:
        return images
    parts = [F.interpolate(p.float(), size=(size, size), mode="bicubic", antialias=True) for p in images.split(256)]
    return torch.cat([p.round().clamp(0, 255).byte() for p in parts])


@dataclass(frozen=True)
class Pixels:
    """Images in memory.

    Args:
        images: uint8 (N, 3, S, S) by size, on the device.
        flip: mirror half of the samples of a training.
    """

    images: dict[int, Tensor]
    flip: bool = False

    @classmethod
    def at_sizes(cls, images: Tensor, sizes: tuple[int, ...], flip: bool, device: torch.device) -> Pixels:
        """Resize images (N, 3, S, S) to each size."""
        return cls({size: resize(images, size).to(device) for size in sizes}, flip)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.images)

    @property
    def channels(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return next(iter(self.images.values())).device

    def shape(self, size: int) -> tuple[int, ...]:
        return size, size

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        x = self.images[size][sent(indices, self.device)].float() / 127.5 - 1
        if not self.flip or draws is None:
            return x
        return torch.where(sent(mirrored(draws), self.device)[:, None, None, None], x.flip(-1), x)


def read_records(path: Path) -> Records:
    """Return the records of a folder of latents: of images, or of videos."""
    return Records.from_json(read_json(path / RECORDS))


class Latents:
    """Latents that ``train latents`` has written, memory-mapped.

    Args:
        path: the folder.
        flip: mirror half of the samples of a training; the folder must have been written with --flip.
        device: that of the batches.

    Attributes:
        about: the content of latents.json.
        records: of the images, or of the videos.
        lengths: frames of each video; None: images.

    Raises:
        typer.BadParameter: a damaged folder, or --flip without mirrored latents.
    """

    def __init__(self, path: Path, flip: bool, device: torch.device) -> None:
        self.about: dict[str, Any] = read_json(path / LATENTS)
        if self.about.get("format") != FORMAT:
            raise typer.BadParameter(f"--data {path}: written by another version; run `train latents` again")
        if flip and not self.about["flip"]:
            raise typer.BadParameter(f"--flip: {path} has no mirrored latents; run `train latents` with --flip")
        self.path, self.flip, self._device = path, flip, device
        self.records = read_records(path)
        self.lengths: list[int] | None = self.about["lengths"]
        self.mean = self._array("mean")
        self.std = None if self.about["sampled"] else self._array("std")

    def _array(self, name: str) -> np.ndarray:
        """(N, 1 or 2 views, C, h, w)."""
        try:
            found = np.load(self.path / f"{name}.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise typer.BadParameter(
                f"--data {self.path}: {name}.npy can't be read ({error}); run `train latents` again"
            ) from error
        if list(found.shape) != self.about["shape"]:
            raise typer.BadParameter(
                f"--data {self.path}: expected {name}.npy of shape {tuple(self.about['shape'])}, got {found.shape}; "
                "run `train latents` again"
            )
        return found

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.about["size"],)

    @property
    def channels(self) -> int:
        return self.mean.shape[2]

    @property
    def device(self) -> torch.device:
        return self._device

    def shape(self, size: int) -> tuple[int, ...]:
        return tuple(self.mean.shape[3:])

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        views = np.zeros(len(indices), np.int64)
        if self.flip and draws is not None:
            views = mirrored(draws).astype(np.int64)
        x = sent(self.mean[indices, views], self.device).float()
        if self.std is not None and draws is not None:
            # The seed is the first draw, so that threads that prepare batches ahead need no state.
            generator = torch.Generator(self.device).manual_seed(int(draws[0]))
            noise = torch.randn(x.shape, generator=generator, device=self.device)
            x = x + sent(self.std[indices, views], self.device).float() * noise
        return (x - self.about["shift"]) * self.about["scale"]


@dataclass(frozen=True)
class Clips:
    """Clips of frames: every ``every``-th frame from ``starts`` on, ``length`` of them."""

    frames: Pixels | Latents
    starts: np.ndarray
    length: int
    every: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.frames.sizes

    @property
    def channels(self) -> int:
        return self.frames.channels

    @property
    def device(self) -> torch.device:
        return self.frames.device

    def shape(self, size: int) -> tuple[int, ...]:
        return self.length, *self.frames.shape(size)

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        frames = self.starts[indices][:, None] + self.every * np.arange(self.length)
        repeated = None if draws is None else draws.repeat(self.length)  # a clip is mirrored as a whole
        x = self.frames.batch(frames.ravel(), size, repeated)
        return x.unflatten(0, frames.shape).transpose(1, 2).contiguous()


def hash_data(images: Tensor, records: Records) -> int:
    """Hash the training data."""
    return zlib.crc32(str(records.digest).encode(), zlib.crc32(images.numpy().tobytes()))
