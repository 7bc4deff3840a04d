"""Values that a diffusion model learns to generate: pixels, latents, or clips of pixels or latents."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
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
from .buckets import Buckets, Shape
from .captions import crop
from .pictures import Pictures
from .records import Records

LATENTS, RECORDS, BUCKETS = "latents.json", "records.json", "buckets.npy"
FORMAT = 2  # format version of latents folders


class Values(Protocol):
    """Interface for the values of a dataset.

    Attributes:
        sizes: training sizes, possibly followed by a test size of held-out samples. A size is the square root of
            height · width, in pixels.
        channels: number of channels of a sample.
        device: device of the batches.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def channels(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def buckets(self, indices: np.ndarray) -> np.ndarray:
        """Return the bucket of each sample. All samples in a bucket have the same shape."""
        ...

    def shape(self, size: int, bucket: int = 0) -> tuple[int, ...]:
        """Return the shape ([frames,] height, width) of the samples in a bucket at a size."""
        ...

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        """Return samples of one bucket as float32 (B, channels, [frames,] height, width).

        The random numbers ``draws`` (B,) determine the augmentation. None disables augmentation, and selects the mean
        of latents.
        """
        ...


def mirrored(draws: np.ndarray) -> np.ndarray:
    """Return a mask of the samples to mirror, based on the random numbers ``draws``."""
    return draws % 2 == 1


def resize(images: Tensor, shape: tuple[int, int]) -> Tensor:
    """Resize uint8 images (N, 3, H, W) to (N, 3, *shape), bicubically."""
    if images.shape[2:] == shape:
        return images
    parts = [F.interpolate(p.float(), size=shape, mode="bicubic", antialias=True) for p in images.split(256)]
    return torch.cat([p.round().clamp(0, 255).byte() for p in parts])


@dataclass(frozen=True)
class Pixels:
    """Images in memory that all have the same shape.

    Args:
        images: for each size, uint8 images (N, 3, height, width) on the device.
        flip: whether to mirror half of the training samples.
    """

    images: dict[int, Tensor]
    flip: bool = False

    @classmethod
    def at_sizes(cls, images: Tensor, shapes: dict[int, Shape], flip: bool, device: torch.device) -> Pixels:
        """Resize images (N, 3, H, W) to the shape of each size."""
        return cls({size: resize(images, shape).to(device) for size, shape in shapes.items()}, flip)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.images)

    @property
    def channels(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return next(iter(self.images.values())).device

    def buckets(self, indices: np.ndarray) -> np.ndarray:
        return np.zeros(len(indices), np.int64)

    def shape(self, size: int, bucket: int = 0) -> tuple[int, ...]:
        return tuple(self.images[size].shape[2:])

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        x = self.images[size][sent(indices, self.device)].float() / 127.5 - 1
        if not self.flip or draws is None:
            return x
        return torch.where(sent(mirrored(draws), self.device)[:, None, None, None], x.flip(-1), x)


@dataclass(frozen=True)
class BucketedPixels:
    """Images in memory with several shapes. ``parts`` contains the images of each bucket."""

    parts: list[Pixels]
    assignment: Buckets

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.parts[0].sizes

    @property
    def channels(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def buckets(self, indices: np.ndarray) -> np.ndarray:
        return self.assignment.of[indices]

    def shape(self, size: int, bucket: int = 0) -> tuple[int, ...]:
        return self.parts[bucket].shape(size)

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        return self.parts[self.assignment.find(indices)].batch(self.assignment.rows[indices], size, draws)


def load_pixels(
    parts: list[Tensor], buckets: Buckets, flip: bool, device: torch.device
) -> Pixels | BucketedPixels:  # fmt: skip
    """Resize the images of each bucket to all sizes."""
    found = []
    for number, images in enumerate(parts):
        shapes = {size: each[number] for size, each in buckets.shapes.items()}
        found.append(Pixels.at_sizes(images, shapes, flip, device))
    return found[0] if len(found) == 1 else BucketedPixels(found, buckets)


@dataclass(frozen=True)
class SplitPixels:
    """Images in memory, where only the held-out images have test sizes.

    Args:
        train: all images, at the training sizes.
        test: held-out images, at the test sizes.
        held_out: sorted indices of the images in ``test``.
    """

    train: Values
    test: Values
    held_out: np.ndarray

    @property
    def sizes(self) -> tuple[int, ...]:
        return *self.train.sizes, *self.test.sizes

    @property
    def channels(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return self.train.device

    def buckets(self, indices: np.ndarray) -> np.ndarray:
        return self.train.buckets(indices)

    def shape(self, size: int, bucket: int = 0) -> tuple[int, ...]:
        return (self.train if size in self.train.sizes else self.test).shape(size, bucket)

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        if size in self.train.sizes:
            return self.train.batch(indices, size, draws)
        return self.test.batch(np.searchsorted(self.held_out, indices), size, draws)


def add_tests(
    train: Values, read: Callable[[Shape, np.ndarray], Tensor], buckets: Buckets, held_out: np.ndarray
) -> Values:  # fmt: skip
    """Read held-out images at the test sizes, and return them together with the images at the training sizes.

    Args:
        train: all images, at the training sizes.
        read: function that returns the images with the given indices as uint8 (N, 3, height, width).
        buckets: buckets of all images, whose sizes are the test sizes.
        held_out: sorted indices of the held-out images.
    """
    if not buckets.shapes:
        return train
    chosen, parts = Buckets(buckets.shapes, buckets.of[held_out]), []
    for bucket in range(chosen.number):
        members, images = held_out[chosen.members(bucket)], {}
        for size, shapes in chosen.shapes.items():
            shape = shapes[bucket]
            found = read(shape, members) if len(members) else torch.empty(0, 3, *shape, dtype=torch.uint8)
            images[size] = found.to(train.device)
        parts.append(Pixels(images))
    return SplitPixels(train, parts[0] if len(parts) == 1 else BucketedPixels(parts, chosen), held_out)


@dataclass(frozen=True)
class Decoded:
    """Images that worker processes decode on demand, on the CPU."""

    pictures: Pictures
    assignment: Buckets
    flip: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.assignment.shapes)

    @property
    def channels(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def buckets(self, indices: np.ndarray) -> np.ndarray:
        return self.assignment.of[indices]

    def shape(self, size: int, bucket: int = 0) -> tuple[int, ...]:
        return self.assignment.shapes[size][bucket]

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        shape = self.assignment.shapes[size][self.assignment.find(indices)]
        found = np.stack([crop(self.pictures.open(int(i)), shape) for i in indices])
        x = torch.from_numpy(found).permute(0, 3, 1, 2).float() / 127.5 - 1
        if self.flip and draws is not None:
            x = torch.where(torch.from_numpy(mirrored(draws))[:, None, None, None], x.flip(-1), x)
        return x.contiguous()


def array_name(name: str, size: int, bucket: int, is_bucketed: bool) -> str:
    """Return the name of the file with the latents of a bucket at a size."""
    return f"{name}-{size}-{bucket}.npy" if is_bucketed else f"{name}.npy"


def read_records(path: Path) -> Records:
    """Read the records of the images or videos in a folder of latents."""
    return Records.from_json(read_json(path / RECORDS))


class Latents:
    """Memory-mapped latents written by ``train latents``.

    Args:
        path: folder of the latents.
        flip: whether to mirror half of the training samples. The folder must have been written with --flip.
        device: device of the batches.

    Attributes:
        about: content of latents.json.
        records: records of the images or videos.
        lengths: number of frames of each video, or None for images.
        assignment: buckets of the images or frames, with shapes in pixels.

    Raises:
        typer.BadParameter: if the folder is damaged, or ``flip`` is True but the folder contains no mirrored latents.
    """

    def __init__(self, path: Path, flip: bool, device: torch.device) -> None:
        self.about: dict[str, Any] = read_json(path / LATENTS)
        if self.about.get("format") != FORMAT:
            raise typer.BadParameter(f"--data {path} was written by a different version; run `train latents` again")
        if flip and not self.about["flip"]:
            raise typer.BadParameter(f"--flip: {path} has no mirrored latents; run `train latents` with --flip")
        self.path, self.flip, self._device = path, flip, device
        self.records = read_records(path)
        self.lengths: list[int] | None = self.about["lengths"]
        shapes = {int(size): [(h, w) for h, w in each] for size, each in self.about["shapes"].items()}
        is_bucketed = sum(map(len, shapes.values())) > 1
        of = self._load(BUCKETS) if is_bucketed else np.zeros(self.about["number"], np.int64)
        self.assignment = Buckets(shapes, of)
        names = ("mean",) if self.about["sampled"] else ("mean", "std")
        self.arrays = {
            (size, bucket): [
                self._array(array_name(name, size, bucket, is_bucketed), bucket, shapes[size][bucket]) for name in names
            ]
            for size in shapes
            for bucket in range(self.assignment.number)
        }

    def _load(self, name: str) -> np.ndarray:
        try:
            return np.load(self.path / name, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise typer.BadParameter(
                f"--data {self.path}: {name} can't be read ({error}); run `train latents` again"
            ) from error

    def _array(self, file: str, bucket: int, shape: Shape) -> np.ndarray:
        """Memory-map the array (N, 1 or 2 views, C, h, w) of a bucket."""
        factor, number = self.about["factor"], int((self.assignment.of == bucket).sum())
        found = self._load(file)
        wanted = (number, 1 + self.about["flip"], self.about["channels"], *(n // factor for n in shape))
        if found.shape != wanted:
            raise typer.BadParameter(
                f"--data {self.path}: expected {file} of shape {wanted}, got {found.shape}; run `train latents` again"
            )
        return found

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.assignment.shapes)

    @property
    def channels(self) -> int:
        return self.about["channels"]

    @property
    def device(self) -> torch.device:
        return self._device

    def buckets(self, indices: np.ndarray) -> np.ndarray:
        return self.assignment.of[indices]

    def shape(self, size: int, bucket: int = 0) -> tuple[int, ...]:
        return tuple(n // self.about["factor"] for n in self.assignment.shapes[size][bucket])

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        mean, *deviations = self.arrays[size, self.assignment.find(indices)]
        rows, views = self.assignment.rows[indices], np.zeros(len(indices), np.int64)
        if self.flip and draws is not None:
            views = mirrored(draws).astype(np.int64)
        x = sent(mean[rows, views], self.device).float()
        if deviations and draws is not None:
            # The first draw is the seed, so threads that prepare batches ahead need no shared state.
            generator = torch.Generator(self.device).manual_seed(int(draws[0]))
            noise = torch.randn(x.shape, generator=generator, device=self.device)
            x = x + sent(deviations[0][rows, views], self.device).float() * noise
        return (x - self.about["shift"]) * self.about["scale"]


@dataclass(frozen=True)
class Clips:
    """Clips of ``length`` frames. A clip takes every ``every``-th frame, beginning at one of ``starts``."""

    frames: Values
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

    def buckets(self, indices: np.ndarray) -> np.ndarray:
        return self.frames.buckets(self.starts[indices])

    def shape(self, size: int, bucket: int = 0) -> tuple[int, ...]:
        return self.length, *self.frames.shape(size, bucket)

    def locate(self, indices: np.ndarray) -> np.ndarray:
        """Return the frame numbers (B, length) of clips."""
        return self.starts[indices][:, None] + self.every * np.arange(self.length)

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> Tensor:
        frames = self.locate(indices)
        repeated = None if draws is None else draws.repeat(self.length)  # mirror all frames of a clip or none
        x = self.frames.batch(frames.ravel(), size, repeated)
        return x.unflatten(0, frames.shape).transpose(1, 2).contiguous()


def hash_data(parts: Sequence[Tensor], records: Records) -> int:
    """Return a hash of the training data. ``parts`` contains the images of each bucket."""
    value = 0
    for images in parts:
        value = zlib.crc32(images.numpy().tobytes(), value)
    return zlib.crc32(str(records.digest).encode(), value)
