"""Explicit token positions, and operations that are shared with grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import as_integer, check_dense, check_precise, is_real, show_value
from ..engine.inductor.private import are_transforms_active, assert_async, num_dispatch_modes

__all__ = [
    "Bound", "Coordinates", "PerAxis", "Rules", "apply_affine", "as_tensor", "check_axes", "check_index", "check_reach",
    "larger", "per_axis", "read_counts", "smaller",
]  # fmt: skip

PerAxis = float | Sequence[float] | Tensor
Bound = float | Sequence[float | None] | None
Self = TypeVar("Self", bound="Rules")


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two sizes that may be symbolic, without adding a guard.

    Under Dynamo in torch 2.11, ``torch.sym_max`` rejects plain numbers.
    """
    return max(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_max(a, b)


def smaller(a: Any, b: Any) -> Any:
    """Return the smaller of two sizes that may be symbolic, without adding a guard."""
    return min(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_min(a, b)


class Rules:
    """Affine operations on each axis, shared by grids and coordinates."""

    def transform(self: Self, scale: PerAxis = 1.0, shift: PerAxis = 0.0) -> Self:
        """Change each position s to scale · s + shift.

        Pass each argument as a number, one number per axis, or a tensor (K,).
        """
        raise NotImplementedError  # overridden by Grid and Coordinates

    def offset(self: Self, by: PerAxis) -> Self:
        """Change each position s to s + by."""
        return self.transform(shift=by)

    def rescale(self: Self, by: PerAxis) -> Self:
        """Change each position s to s · by, for example to match a different frame rate or area."""
        return self.transform(by)

    def __eq__(self, other: object) -> bool:
        """Return whether all fields are equal. Tensors are compared by dtype, device and values."""
        if type(other) is not type(self):
            return NotImplemented
        theirs = vars(other)
        for name, value in vars(self).items():
            if value is not theirs[name] and not _equal(value, theirs[name]):
                return False
        return True


@dataclass(frozen=True, eq=False)
class Coordinates(Rules):
    """Explicit positions with one row per token, for tokens that don't form a grid.

    Args:
        coords: (N, K), or (B or 1, N, K) if samples differ. Integers, float32 and float64 are used at full precision.
            Floats of 16 bits or fewer are rejected, because they cannot tell distant tokens apart.
        prefix: number of unrotated tokens before the first row of ``coords``.
        suffix: number of unrotated tokens after the last row.
        rotated: mask (N,) or (B, N), which is False for tokens that have a row but are not rotated, such as padding.
            The coordinates of these tokens are set to zero, so Θ = 0, and they get no phase.
    """

    coords: Tensor
    prefix: int = 0
    suffix: int = 0
    rotated: Tensor | None = None

    def __post_init__(self) -> None:
        check_dense("coords", self.coords, "(N, K) or (B, N, K)")
        if self.coords.ndim not in (2, 3):
            raise ValueError(
                f"coords: expected shape (N, K) or (B, N, K), got {tuple(self.coords.shape)}"
                + "; for positions (N,) on one axis, pass coords[:, None]" * (self.coords.ndim == 1)
            )
        if not is_real(self.coords):
            raise TypeError(f"coords: expected real numbers, got {self.coords.dtype}")
        if self.coords.is_floating_point() and self.coords.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                "coords: expected an integer dtype, float32 or float64 (16 bits are too coarse for distant tokens), "
                f"got {self.coords.dtype}"
            )
        read_counts(self, "prefix", "suffix")
        if self.rotated is not None:
            if not isinstance(self.rotated, Tensor):
                raise TypeError(f"rotated: expected a boolean tensor, got {type(self.rotated).__name__}")
            if self.rotated.dtype != torch.bool or self.rotated.shape != self.coords.shape[:-1]:
                raise ValueError(
                    f"rotated: expected a boolean tensor of shape {tuple(self.coords.shape[:-1])}, one per row of "
                    f"coords, got {self.rotated.dtype} {tuple(self.rotated.shape)}"
                )
            if self.rotated.device != self.coords.device:
                raise ValueError(
                    f"rotated: expected a tensor on coords' device {self.coords.device}, got {self.rotated.device}"
                )
            coords = self.coords
            if not coords.dtype.is_signed:  # few operators in torch 2.11 support unsigned integers
                coords = coords.long()
            object.__setattr__(self, "coords", torch.where(self.rotated[..., None], coords, 0))

    def __hash__(self) -> int:
        return hash((self.prefix, self.suffix))

    @property
    def num_axes(self) -> int:
        return self.coords.shape[-1]

    @property
    def num_tokens(self) -> int:
        return self.prefix + self.coords.shape[-2] + self.suffix

    def transform(self, scale: PerAxis = 1.0, shift: PerAxis = 0.0) -> Coordinates:
        a, b = per_axis("scale", scale, self.num_axes), per_axis("shift", shift, self.num_axes)
        coords = self.coords if self.coords.is_floating_point() else self.coords.double()
        a, b = (as_tensor(t, coords.device, coords.dtype) for t in (a, b))
        return replace(self, coords=apply_affine(coords, a, b))

    def floor(self) -> Coordinates:
        """Round each position down, for models that round positions after scaling, such as Qwen2.5-VL with seconds."""
        return replace(self, coords=self.coords.floor())

    def clamp(self, low: Bound = None, high: Bound = None) -> Coordinates:
        """Clamp positions to [low, high]. Each bound is a number, one number per axis, or None for no bound.

        Raises:
            ValueError: if the number of axes is wrong, or low exceeds high.
        """
        bounds = []
        for name, given, missing in (("low", low, -math.inf), ("high", high, math.inf)):
            values = tuple(given) if isinstance(given, Sequence) else (given,) * self.num_axes
            if len(values) != self.num_axes or not all(v is None or isinstance(v, Real) for v in values):
                raise ValueError(
                    f"{name}: expected a number or None for each of the {self.num_axes} axes, got {given!r}"
                )
            bounds.append([missing if v is None else float(v) for v in values])
        if any(a > b for a, b in zip(*bounds, strict=True)):
            raise ValueError(f"low, high: expected low <= high on each axis, got {low}, {high}")
        coords = self.coords if self.coords.is_floating_point() else self.coords.double()
        least, most = (torch.tensor(b, dtype=coords.dtype, device=coords.device) for b in bounds)
        return replace(self, coords=coords.maximum(least).minimum(most))

    def select(self, axes: Sequence[int | None]) -> Coordinates:
        """Reorder, add or remove axes. New axis j is the old axis ``axes[j]``, or all zeros if ``axes[j]`` is None."""
        check_axes(axes, self.num_axes)
        zero = torch.zeros_like(self.coords[..., 0])
        return replace(
            self, coords=torch.stack([zero if axis is None else self.coords[..., axis] for axis in axes], dim=-1)
        )

    def take(self, index: Tensor) -> Coordinates:
        """Select rows by an index (n,) or (B, n), in the order of the index, and keep prefix and suffix.

        Raises:
            IndexError: if an index is out of range. On a GPU, this is a device-side assertion.
        """
        check_index(index, self.coords.shape[-2])
        where: Any = index
        if self.coords.ndim == 3:
            where = torch.arange(self.coords.shape[0], device=index.device)[:, None], index
        return replace(self, coords=self.coords[where], rotated=None if self.rotated is None else self.rotated[where])

    def explicit(self) -> Coordinates:
        """Give prefix and suffix tokens their own rows, marked as unrotated."""
        if self.prefix == self.suffix == 0:
            return self
        ends = (self.prefix, self.suffix)
        rotated = torch.ones_like(self.coords[..., 0], dtype=torch.bool) if self.rotated is None else self.rotated
        return Coordinates(
            torch.nn.functional.pad(self.coords, (0, 0, *ends)), rotated=torch.nn.functional.pad(rotated, ends)
        )

    def shard(self, start: int, length: int | None = None) -> Coordinates:
        """Return ``length`` tokens (default: all) from ``start`` on, counting prefix and suffix tokens as well."""
        length = self.num_tokens - start if length is None else length
        if not (start >= 0 and 0 <= length <= self.num_tokens - start):
            raise ValueError(
                f"start, length: expected a slice of the {self.num_tokens} tokens, got start={start}, length={length}"
            )
        whole, part = self.explicit(), slice(start, start + length)
        return Coordinates(
            whole.coords[..., part, :], rotated=None if whole.rotated is None else whole.rotated[..., part]
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Coordinates:
        """Convert to a different device or dtype (float32 or float64).

        Converting integers to float32 checks their values, which synchronises with a GPU.

        Raises:
            TypeError: for a 16-bit dtype, which cannot tell distant tokens apart.
            ValueError: for integers above 2^24, because float32 cannot represent all of them.
        """
        if dtype is not None:
            check_precise("dtype", dtype)
        if dtype == torch.float32 and not (self.coords.is_floating_point() or self.coords.is_meta):
            check_reach(int(self.coords.abs().max()) if self.coords.numel() else 0)
        soon = not self.coords.is_cuda  # a copy to the CPU must finish before the values are used
        rotated = None if self.rotated is None else self.rotated.to(device, non_blocking=soon)
        return replace(self, coords=self.coords.to(device, dtype, non_blocking=soon), rotated=rotated)


def apply_affine(positions: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return scale · s + shift, or the nearest integer if float64 rounding may have caused the difference from it.

    Positions that should be integers are therefore exact, and can be rounded down.
    """
    product = positions * scale
    moved = product + shift
    distance = (moved.round() - moved).detach()
    is_near = distance.abs() <= 2.0**-50 * (product.detach().abs() + shift.detach().abs())
    return moved + torch.where(is_near, distance, 0)


def read_counts(positions: Rules, *names: str) -> None:
    """Convert fields to non-negative integers."""
    for name in names:
        value = getattr(positions, name)
        number = as_integer(value)
        if number is None or number < 0:
            raise ValueError(f"{name}: expected a non-negative integer, got {show_value(value)}")
        object.__setattr__(positions, name, number)


def check_axes(axes: Sequence[int | None], num_axes: int) -> None:
    if not axes or not all(axis is None or 0 <= axis < num_axes for axis in axes):
        raise ValueError(f"axes: expected None or numbers from 0 to {num_axes - 1}, got {tuple(axes)}")


def _equal(a: Any, b: Any) -> bool:
    if type(a) is tuple is type(b):
        return a == b
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return not (isinstance(a, Tensor) or isinstance(b, Tensor)) and a == b
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and not a.is_meta and torch.equal(a, b)


def per_axis(name: str, value: Any, num_axes: int) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        check_dense(name, value, "(K,)")
        if value.ndim > 1 or (value.ndim == 1 and value.shape[0] not in (1, num_axes)) or not is_real(value):
            raise ValueError(
                f"{name}: expected a number for each of the {num_axes} axes, got {value.dtype} {tuple(value.shape)}"
            )
        return value.expand(num_axes)
    values = tuple(value) if isinstance(value, Sequence) else (value,) * num_axes
    numbers = (isinstance(v, (Real, torch.SymInt, torch.SymFloat)) and not isinstance(v, bool) for v in values)
    if len(values) != num_axes or not all(numbers):
        raise ValueError(f"{name}: expected a number for each of the {num_axes} axes, got {show_value(value)}")
    if not torch.compiler.is_compiling() and not all(math.isfinite(v) for v in values if isinstance(v, Real)):
        raise ValueError(f"{name}: expected finite numbers, got {show_value(value)}")
    # float() of a symbolic integer would make it a constant of an exported program.
    return tuple(torch.sym_float(v) if isinstance(v, (torch.SymInt, torch.SymFloat)) else float(v) for v in values)


def as_tensor(value: Any, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Convert like ``torch.as_tensor``, which would make symbolic numbers constants of an exported program."""
    return value.to(device, dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device=device)


def check_reach(position: float, where: str = "") -> None:
    """Check that float32 can represent every integer up to this position."""
    if position > 2**24:
        raise ValueError(
            f"dtype: expected float64 for positions up to {position:.0f}{where}, because float32 cannot "
            f"represent every integer above {2**24}"
        )


def check_index(index: Tensor, num: int, expected: str = "index: expected tokens") -> None:
    """Check indices into ``num`` tokens or places. If reading them would synchronise, assert on the device instead."""
    check_dense("index", index, "(n,) or (B, n)")
    if index.ndim not in (1, 2) or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"index: expected an integer tensor of shape (n,) or (B, n), got {index.dtype} {tuple(index.shape)}"
        )
    outside, text = (index < 0) | (index >= num), f"{expected} from 0 to {num - 1}"
    if torch.compiler.is_compiling() or index.is_cuda or num_dispatch_modes():
        assert_async(~outside.any(), text)
    elif not (index.is_meta or are_transforms_active()) and outside.any():
        raise IndexError(f"{text}, got {int(index[outside][0])}")
