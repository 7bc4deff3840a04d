"""Where tokens are: grids and explicit coordinates.

Positions s have one row a token and one column an axis. Axes are ordered like a tensor's shape, slowest
first: for a video (T, H, W), ``s[:, 0]`` is the frame and ``s[:, 2]`` the column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

__all__ = ["Coordinates", "Grid", "grid_coordinates", "offset_positions"]


@dataclass(frozen=True)
class Grid:
    """Tokens in row-major order on a grid, with unrotated tokens before and after them.

    The flat index s of a grid token maps to integer coordinates (i_1, .., i_k), the last axis fastest, and
    to the position ``s_j = scale_j * i_j + shift_j``. Prefix tokens (class, registers, condition) and suffix
    tokens have the angle zero, and no phase.

    Args:
        shape: size of each axis, slowest first: ``(H, W)``, ``(T, H, W)``.
        prefix: number of unrotated tokens in front.
        suffix: number of unrotated tokens at the end.
        scale: a number, one number an axis, or a tensor (K,); default 1. Numbers and float64 tensors are used
            in float64. Under ``torch.compile`` a tensor avoids a recompile for each new value.
        shift: like ``scale``; default 0.
        start: first token of this shard, counted over prefix + grid + suffix (sequence parallelism, decoding).
        length: number of tokens of this shard; default: up to the end.

    Raises:
        ValueError: a size below zero, a scale or shift that does not fit the number of axes, a shard beyond
            the end.
    """

    shape: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0
    scale: float | Sequence[float] | Tensor | None = None
    shift: float | Sequence[float] | Tensor | None = None
    start: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.shape
        shape: tuple[Any, ...] = (given,) if isinstance(given, (int, torch.SymInt)) else tuple(given)
        if len(shape) == 0 or any(not isinstance(n, (int, torch.SymInt)) or n < 0 for n in shape):
            raise ValueError(f"shape: expected one integer of at least 0 for each axis, got {shape}")
        object.__setattr__(self, "shape", shape)
        for name in ("prefix", "suffix", "start"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        for name in ("scale", "shift"):
            object.__setattr__(self, name, _per_axis(name, getattr(self, name), len(shape)))
        if self.start > self.total or (self.length is not None and not 0 <= self.length <= self.total - self.start):
            raise ValueError(
                f"start, length: expected a slice of the {self.total} tokens (prefix + grid + suffix), "
                f"got start={self.start}, length={self.length}"
            )

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    @property
    def num_grid_tokens(self) -> int:
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """Tokens of the whole sequence: prefix + grid + suffix."""
        return self.prefix + math.prod(self.shape) + self.suffix

    @property
    def num_tokens(self) -> int:
        """Tokens of this shard."""
        return self.total - self.start if self.length is None else self.length

    @property
    def whole(self) -> bool:
        return self.num_tokens == self.total

    def affine(self, device: torch.device) -> Tensor | None:
        """Scale and shift as a float64 tensor (K, 2), None where they are 1 and 0."""
        if self.scale is None and self.shift is None:
            return None
        if isinstance(self.scale, Tensor) or isinstance(self.shift, Tensor):
            columns = [
                torch.full((self.num_axes,), default, dtype=torch.float64, device=device)
                if value is None
                else torch.as_tensor(value, dtype=torch.float64, device=device)
                for value, default in ((self.scale, 1.0), (self.shift, 0.0))
            ]
            return torch.stack(columns, dim=-1)
        scale: Any = self.scale or (1.0,) * self.num_axes
        shift: Any = self.shift or (0.0,) * self.num_axes
        special = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
        if torch.compiler.is_compiling() or special:  # whose tensors must not outlive them
            return torch.tensor(list(zip(scale, shift, strict=True)), dtype=torch.float64, device=device)
        return _affine_on(scale, shift, device)

    def coordinates(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
        """Positions (N, K) of this shard's tokens; zero for prefix and suffix tokens."""
        device = torch.device(device)
        return grid_coordinates(
            self.num_tokens, self.shape, self.prefix, self.start, self.affine(device), device=device, dtype=dtype
        )[0]


@dataclass(frozen=True)
class Coordinates:
    """Explicit positions: packed, dropped, warped or arbitrary tokens.

    Args:
        coords: (N, K), or (B, N, K) where each sample has its own; any real dtype, used at full precision.
        prefix: number of unrotated tokens in front, which have no row in ``coords``.
        suffix: number of unrotated tokens at the end, likewise.
    """

    coords: Tensor
    prefix: int = 0
    suffix: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.coords, Tensor):
            raise TypeError(f"coords: expected a tensor (N, K) or (B, N, K), got {type(self.coords).__name__}")
        if self.coords.ndim not in (2, 3):
            raise ValueError(f"coords: expected (N, K) or (B, N, K), got shape {tuple(self.coords.shape)}")
        if self.coords.dtype == torch.bool or self.coords.is_complex():
            raise TypeError(f"coords: expected real numbers, got {self.coords.dtype}")
        if self.prefix < 0 or self.suffix < 0:
            raise ValueError(f"prefix, suffix: expected at least 0, got {self.prefix}, {self.suffix}")

    @property
    def num_axes(self) -> int:
        return self.coords.shape[-1]

    @property
    def num_tokens(self) -> int:
        return self.prefix + self.coords.shape[-2] + self.suffix


def grid_coordinates(
    num_tokens: int,
    sizes: Sequence[int],
    prefix: int,
    start: int,
    affine: Tensor | None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The map from flat index to coordinates: positions (N, K) and which tokens are on the grid (N,)."""
    index = torch.arange(num_tokens, device=device) + (start - prefix)
    rotated = (index >= 0) & (index < math.prod(sizes))
    index = torch.where(rotated, index, 0)
    columns = []
    for size in reversed(sizes):
        columns.append(index % max(size, 1))
        index = index // max(size, 1)
    coords = torch.stack(columns[::-1], dim=-1)
    if affine is not None:
        coords = coords.to(affine.dtype) * affine[:, 0] + affine[:, 1]
    return torch.where(rotated[:, None], coords, 0).to(dtype), rotated


def offset_positions(num_tokens: int, offset: int | Tensor, device: torch.device) -> Grid | Tensor:
    """Tokens t = 0 .. N - 1 at t + offset: a grid for an int, coordinates (B, N, 1) for a tensor (B,)."""
    if isinstance(offset, Tensor):
        if offset.ndim > 1 or offset.is_floating_point():
            raise ValueError(f"offset: expected an int or integers (B,), got {offset.dtype} {tuple(offset.shape)}")
        steps = torch.arange(num_tokens, device=device)
        return (steps + offset.to(device)[..., None])[..., None]
    if not isinstance(offset, (int, torch.SymInt)):
        raise ValueError(f"offset: expected an int or integers (B,), got {offset!r}")
    if offset < 0:
        return Grid((num_tokens,), shift=offset)
    return _Offset((num_tokens + offset,), start=offset)


@dataclass(frozen=True)
class _Offset(Grid):
    """Tokens at offset, offset + 1, ..: a sequence of its own, where a grid with a start is a shard of one."""

    @property
    def whole(self) -> bool:
        return True


def _per_axis(name: str, value: Any, num_axes: int) -> tuple[float, ...] | Tensor | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.ndim > 1 or (value.ndim == 1 and value.shape[0] not in (1, num_axes)):
            raise ValueError(f"{name}: expected a number for each of {num_axes} axes, got {tuple(value.shape)}")
        return value.expand(num_axes)
    values = tuple(value) if isinstance(value, Sequence) else (value,) * num_axes
    if len(values) != num_axes or not all(isinstance(v, (Real, torch.SymInt, torch.SymFloat)) for v in values):
        raise ValueError(f"{name}: expected a number for each of {num_axes} axes, got {value!r}")
    return tuple(float(v) for v in values)


@lru_cache(maxsize=256)
def _affine_on(scale: tuple[float, ...], shift: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor made there could never take part in training
        return torch.tensor(list(zip(scale, shift, strict=True)), dtype=torch.float64, device=device)
