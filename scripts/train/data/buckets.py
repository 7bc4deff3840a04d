"""Buckets of samples by aspect ratio. All samples in a batch come from one bucket, so they have the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import typer

from ..order import Steps, order_groups

Shape: TypeAlias = tuple[int, int]  # height and width in pixels
# Help texts of --mix-sizes, --max-ratio and --test-size.
MIX_SIZES = "Other sizes to train at, in pixels, separated by commas. Each batch has one size."
MAX_RATIO = (
    "Largest aspect ratio. 1 crops samples to squares. Above 1, samples keep their aspect ratio, and each batch "
    "comes from one bucket of about --size² pixels."
)
TEST_SIZE = "To test a finished run at another size, repeat its command with a different --test-size."
STEPS = 16  # short sides of neighbouring buckets differ by size / STEPS


@dataclass(frozen=True)
class Buckets:
    """Assignment of samples to buckets, and the shape of each bucket.

    Args:
        shapes: shapes of all buckets, for each size.
        of: bucket (N,) of each sample.
    """

    shapes: dict[int, list[Shape]]
    of: np.ndarray

    @cached_property
    def rows(self) -> np.ndarray:
        """Index (N,) of each sample within its bucket."""
        rows = np.empty(len(self.of), np.int64)
        for bucket in range(self.number):
            members = self.members(bucket)
            rows[members] = np.arange(len(members))
        return rows

    @property
    def number(self) -> int:
        """Number of buckets."""
        return len(next(iter(self.shapes.values())))

    def at_sizes(self, sizes: Sequence[int]) -> Buckets:
        """Return the same buckets with fewer sizes."""
        return Buckets({size: self.shapes[size] for size in sizes}, self.of)

    def members(self, bucket: int) -> np.ndarray:
        """Return the sorted indices of the samples in a bucket."""
        return np.flatnonzero(self.of == bucket)

    def order(self, batch: int, seed: int) -> Steps:
        """Return the steps of a training run. Within a step, all samples have the same size and bucket.

        A step contains one number per sample: the index of the sample + N · (the index of the step's size).
        """
        parts = [self.members(bucket) for bucket in np.unique(self.of)]
        groups = [part + i * len(self.of) for i in range(len(self.shapes)) for part in parts]
        return order_groups(groups, batch, seed)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, Shape]:
        """Convert numbers from :meth:`order` to sample indices. Return the indices, and the shape of the samples."""
        turn, indices = int(numbers[0]) // len(self.of), numbers % len(self.of)
        return indices, list(self.shapes.values())[turn][self.find(indices)]

    def find(self, indices: np.ndarray) -> int:
        """Return the bucket of a batch.

        Raises:
            ValueError: if the samples belong to several buckets.
        """
        found = np.unique(self.of[indices])
        if len(found) != 1:
            raise ValueError(f"indices: expected samples from one bucket, got samples from buckets {found.tolist()}")
        return int(found[0])


@dataclass(frozen=True)
class Sizes:
    """Image sizes for training and testing. A size is the square root of the area in pixels.

    Args:
        train: training sizes, one of which is used for each batch.
        test: additional test sizes.
        multiple: number that must divide all heights and widths.
        max_ratio: largest aspect ratio. If it is 1, images are cropped to squares.
    """

    train: tuple[int, ...]
    test: tuple[int, ...] = ()
    multiple: int = 1
    max_ratio: float = 1.0

    @property
    def values(self) -> tuple[int, ...]:
        """All sizes, starting with the training sizes."""
        return tuple(dict.fromkeys((*self.train, *self.test)))

    @property
    def only_test(self) -> tuple[int, ...]:
        """Test sizes that are not training sizes."""
        return self.values[len(self.train) :]

    def shapes(self, size: int) -> list[Shape]:
        """Return the shapes of all buckets at a size, from wide to tall."""
        base = self.train[0]
        if self.max_ratio == 1:
            return [(size, size)]
        step = max(1, round(base / STEPS / self.multiple)) * self.multiple
        sides = [(short, self._round(base**2 / short)) for short in range(base % step or step, base, step)]
        wide = [(short, long) for short, long in sides if short < long <= self.max_ratio * short]
        chosen = [*wide, (base, base), *((long, short) for short, long in reversed(wide))]
        return [(self._round(height * size / base), self._round(width * size / base)) for height, width in chosen]

    def _round(self, length: float) -> int:
        return max(1, round(length / self.multiple)) * self.multiple

    def sort(self, sides: np.ndarray) -> Buckets:
        """Assign each image to the bucket with the closest aspect ratio.

        ``sides`` (N, 2) contains the heights and widths of the images.
        """
        shapes = np.array(self.shapes(self.train[0]))
        ratios, wanted = np.log(sides[:, 0] / sides[:, 1]), np.log(shapes[:, 0] / shapes[:, 1])
        nearest = np.abs(ratios[:, None] - wanted).argmin(1)
        used, of = np.unique(nearest, return_inverse=True)
        return Buckets({size: [self.shapes(size)[i] for i in used] for size in self.values}, of)


def parse_size(option: str, text: str, by: int) -> Shape:
    """Parse a height and width, such as (28, 40) from "28x40", or (20, 20) from "20"."""
    sides = text.split("x")
    if len(sides) > 2 or not all(s.isdecimal() and int(s) and int(s) % by == 0 for s in sides):
        unit = f"multiples of {by}" if by > 1 else "pixels"
        raise typer.BadParameter(f"{option}: expected a side or HEIGHTxWIDTH in {unit}, got {text!r}")
    return int(sides[0]), int(sides[-1])


def parse_sizes(option: str, text: str, by: int) -> list[Shape]:
    """Parse heights and widths separated by commas; see :func:`parse_size`."""
    return [parse_size(option, part.strip(), by) for part in text.split(",") if part.strip()]


def show_size(height: int, width: int) -> str:
    """Format a height and width as an option's value; the inverse of :func:`parse_size`."""
    return str(height) if height == width else f"{height}x{width}"


def parse_mixed(text: str, size: int, multiple: int) -> tuple[int, ...]:
    """Return ``size`` and the sizes of --mix-sizes, such as (size, 24, 48) for "24,48"."""
    found = [size]
    for part in filter(None, (part.strip() for part in text.split(","))):
        if not part.isdecimal() or not int(part) or int(part) % multiple:
            raise typer.BadParameter(
                f"--mix-sizes: expected multiples of {multiple}, in pixels, separated by commas, got {part!r}"
            )
        found.append(int(part))
    return tuple(dict.fromkeys(found))
