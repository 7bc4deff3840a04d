"""Grids of token positions.

Positions s have one row for each token and one column for each axis. Axes are ordered like a tensor's shape, slowest
first: for a video (T, H, W), ``s[:, 0]`` is the frame and ``s[:, 2]`` the column.

A rule that is affine on each axis leaves a grid a grid, and no table of positions is stored, whatever the size:
``Grid((T, H, W)).interpolate((None, 16, 16)).offset((3, 0, 0))``. Rules apply one after the other, each to the
positions that those before it gave. Only true tables are coordinates: dropped or reordered tokens, rounding, several
grids in one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from ..checks import as_integer, check_at_least, check_dense, fleeting, is_real
from .coordinates import (
    Bound,
    Coordinates,
    PerAxis,
    Rules,
    check_axes,
    check_index,
    check_reach,
    larger,
    per_axis,
    smaller,
)

__all__ = ["Coordinates", "Grid", "PerAxis", "grid_coordinates", "offset_positions", "relative_times", "window_order"]


@dataclass(frozen=True, eq=False)
class Grid(Rules):
    """Tokens in row-major order on a grid, with unrotated tokens before and after them.

    The flat index s of a grid token maps to integer coordinates (i_1, .., i_k), the last axis fastest, and
    to the position ``s_j = scale_j * (i_j + origin_j) + shift_j``. Prefix tokens (class, registers, condition) and
    suffix tokens have the angle zero, and no phase.

    Args:
        shape: size of each axis, slowest first: ``(H, W)``, ``(T, H, W)``.
        prefix: number of unrotated tokens in front.
        suffix: number of unrotated tokens at the end.
        scale: a number, one number an axis, or a tensor (K,); default 1. Numbers and float64 tensors are used
            in float64. Under ``torch.compile`` a tensor avoids a recompile for each new value.
        shift: like ``scale``; default 0.
        start: first token of this shard, counted over prefix + grid + suffix (sequence parallelism, decoding).
        length: number of tokens of this shard; default: up to the end.
        origin: integers (K,), or (B, K) where each sample has its own, on x's device. They are read there: a new value
            costs no synchronisation, no copy and no other kernel (decoding at the length of a cache).

    Raises:
        ValueError: a size below zero or no integer, a scale, shift or origin that does not fit the number of axes, a
            shard beyond the end.
        TypeError: an origin that is not a tensor of integers.
    """

    shape: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0
    scale: PerAxis | None = None
    shift: PerAxis | None = None
    start: int = 0
    length: int | None = None
    origin: Tensor | None = None

    def __post_init__(self) -> None:
        given: Any = self.shape
        shape: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
        sizes = tuple(map(as_integer, shape))
        if len(sizes) == 0 or any(n is None or n < 0 for n in sizes):
            raise ValueError(f"shape: expected one integer of at least 0 for each axis, got {shape}")
        object.__setattr__(self, "shape", sizes)
        for name in ("prefix", "suffix", "start", "length"):
            value = getattr(self, name)
            if value is None and name == "length":
                continue
            number = as_integer(value)
            if number is None or (number < 0 and name != "length"):
                raise ValueError(f"{name}: expected an integer of at least 0, got {value!r}")
            object.__setattr__(self, name, number)
        for name in ("scale", "shift"):
            object.__setattr__(self, name, per_axis(name, getattr(self, name), len(shape)))
        if self.start > self.total or (self.length is not None and not 0 <= self.length <= self.total - self.start):
            raise ValueError(
                f"start, length: expected a slice of the {self.total} tokens (prefix + grid + suffix), "
                f"got start={self.start}, length={self.length}"
            )
        if self.origin is not None:
            _check_origin(self.origin, len(shape))

    def __hash__(self) -> int:
        return hash((self.shape, self.prefix, self.suffix, self.start, self.length))

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
        scale, shift = self._scale_and_shift
        if torch.compiler.is_compiling() or fleeting():
            return torch.tensor(list(zip(scale, shift, strict=True)), dtype=torch.float64, device=device)
        return affine_on(scale, shift, device)

    def coordinates(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
        """Positions (N, K), or (B, N, K) by the origin, of this shard's tokens; zero for prefix and suffix tokens."""
        return self._table(torch.device(device), dtype)[0]

    def _table(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exact = self._has_rules
        coords, rotated = grid_coordinates(
            self.num_tokens, self.shape, self.prefix, self.start, None if exact else self.affine(device),
            self.origin_row, device=device, dtype=torch.float64 if exact else dtype,
        )  # fmt: skip
        if exact:
            coords = torch.where(rotated[:, None], self._placed(coords), 0).to(dtype)
        return coords, rotated

    @property
    def _has_rules(self) -> bool:
        """A scale or shift, known to the host."""
        known = not isinstance(self.scale, Tensor) and not isinstance(self.shift, Tensor)
        return known and not (self.scale is None and self.shift is None)

    def _placed(self, index: Tensor) -> Tensor:
        """Positions of whole coordinates (.., K), in float64.

        Where scale and shift are n-ths, as a reference size over n is, (p i + r) / n is rounded once, so that it is
        whole where it should be (:meth:`floor`).
        """
        index = index.double()
        if not self._has_rules:
            affine = self.affine(index.device)
            return index if affine is None else index * affine[:, 0] + affine[:, 1]
        scale, shift = self._scale_and_shift
        fixed = all(type(n) is int for n in self.shape) and all(type(v) is float for t in (scale, shift) for v in t)
        if fixed and not torch.compiler.is_compiling():
            rows = tuple(_as_fraction(a, b, max(n, 1)) for a, b, n in zip(scale, shift, self.shape, strict=True))
            table = _rows_on.__wrapped__ if fleeting() else _rows_on
            p, r, n = table(rows, index.device).unbind(-1)
            return (index * p + r) / n
        affine: Any = self.affine(index.device)
        return _place_by_fractions(index, affine, torch.tensor(self._sizes, dtype=torch.float64, device=index.device))

    @property
    def origin_row(self) -> Tensor | None:
        """The origin as (1, K) or (B, 1, K), which the tokens share."""
        return None if self.origin is None else self.origin.unsqueeze(-2)

    def transform(self, scale: PerAxis = 1.0, shift: PerAxis = 0.0) -> Grid:
        a, b, u, v = _alike(
            per_axis("scale", scale, self.num_axes), per_axis("shift", shift, self.num_axes), *self._scale_and_shift
        )
        if isinstance(a, Tensor):
            return replace(self, scale=a * u, shift=a * v + b)
        rows = list(zip(a, b, u, v, strict=True))
        return replace(self, scale=[x * y for x, _, y, _ in rows], shift=[x * z + w for x, w, _, z in rows])

    def interpolate(self, reference: int | Sequence[int | None]) -> Grid:
        """s → s · reference_j / n_j: laid over a grid of the size ``reference``; None leaves an axis alone (EVA-02)."""
        sizes = (reference,) * self.num_axes if isinstance(reference, int) else tuple(reference)
        if len(sizes) != self.num_axes or not all(r is None or r > 0 for r in sizes):
            raise ValueError(
                f"reference: expected a size of at least 1, or None, for each of {self.num_axes} axes, got {reference}"
            )
        return self.rescale([1.0 if r is None else r / n for r, n in zip(sizes, self._sizes, strict=True)])

    def centre(self, axes: Sequence[int] | None = None, *, whole: bool = False) -> Grid:
        """Shift ``axes`` (default: all) so that the middle, index (n - 1) / 2, is at zero (Mochi).

        whole: index n - n // 2 instead, so that integers stay integers (Qwen-Image).
        """
        chosen = range(self.num_axes) if axes is None else axes
        if any(not 0 <= axis < self.num_axes for axis in chosen):
            raise ValueError(f"axes: expected numbers from 0 to {self.num_axes - 1}, got {tuple(chosen)}")
        middle = [(n - n // 2 if whole else (n - 1) / 2) for n in self.shape]
        here = [float(axis in chosen) for axis in range(self.num_axes)]
        scale, shift = _alike(*self._scale_and_shift)
        if isinstance(scale, Tensor):
            there = torch.tensor([here, middle], dtype=torch.float64, device=scale.device)
            return self.offset(-there[0] * (scale * there[1] + shift))
        return self.offset([-h * (a * m + b) for h, m, a, b in zip(here, middle, scale, shift, strict=True)])

    def cells(self, by: Literal["axis", "shorter", "longer"] = "axis") -> Grid:
        """s → 2 (s + ½) / m - 1: the centres of n cells that fill [-1, 1], m = n (DINOv3).

        by: "shorter" or "longer" takes for m the size of that axis on all, which keeps the aspect ratio.
        """
        choose: dict[str, Any] = {"axis": None, "shorter": smaller, "longer": larger}
        if by not in choose:
            raise ValueError(f"by: expected one of {tuple(choose)}, got {by!r}")
        sizes = self._sizes if by == "axis" else (reduce(choose[by], self._sizes),) * self.num_axes
        return self.transform([2 / m for m in sizes], [1 / m - 1 for m in sizes])

    def crop(self, start: Sequence[float], stop: Sequence[float]) -> Grid:
        """s → start_j + s · step_j, so that the n-th position is at stop_j (n_j - 1) / n_j: a crop of a larger grid.

        Where start is 0 these are n equal steps to ``stop``, without the end; elsewhere the steps differ a little from
        that, as they do in CogVideoX: ``rescale((stop - start) / n).offset(start)`` are n equal steps anywhere.

        Raises:
            ValueError: so few positions, so far from 0, that the n-th would lie in front of the first.
        """
        if not len(start) == len(stop) == self.num_axes:
            raise ValueError(f"start, stop: expected a number for each of {self.num_axes} axes, got {start}, {stop}")
        steps = []
        for a, b, n in zip(start, stop, self._sizes, strict=True):
            length = b * (n - 1) / n - a
            if 0 < a < b and n > 1 and length < 0:
                raise ValueError(
                    f"start, stop: expected the last of {n} positions, stop ({n} - 1) / {n} = {b * (n - 1) / n:g}, "
                    f"not to lie below start = {a:g}, got stop = {b:g}; "
                    "rescale((stop - start) / n).offset(start) has equal steps"
                )
            steps.append(length / larger(n - 1, 1))
        return self.transform(steps, start)

    def explicit(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Coordinates:
        """The same positions as a table."""
        return self._as_table(*self._table(torch.device(device), dtype))

    def along(self, places: Mapping[int, Tensor]) -> Coordinates:
        """Index i of an axis at ``places[axis][i]``, instead of where origin, scale and shift have it; a table.

        For times that are no affine map of a frame's index, or that the device alone knows. The others stay.

        Args:
            places: axis → numbers (n,), at least as many as the grid has on this axis.

        Raises:
            ValueError: an axis or a number of places that does not fit.
        """
        for axis, own in places.items():
            check_axes((axis,), self.num_axes)
            check_dense("places", own, "(n,)")
            if own.ndim != 1 or own.shape[0] < self.shape[axis] or not is_real(own):
                raise ValueError(
                    f"places: expected numbers (n,) for the {self.shape[axis]} tokens of axis {axis}, got {own.dtype} "
                    f"{tuple(own.shape)}"
                )
        device = next((own.device for own in places.values()), torch.device("cpu"))
        coords, rotated = self._table(device, torch.float64)
        index, _ = grid_coordinates(
            self.num_tokens, self.shape, self.prefix, self.start, None, device=device, dtype=torch.int64
        )
        columns = [
            torch.where(rotated, places[j].double()[index[:, j]], 0).expand_as(coords[..., j])
            if j in places
            else coords[..., j]
            for j in range(self.num_axes)
        ]
        return self._as_table(torch.stack(columns, dim=-1), rotated)

    def _as_table(self, coords: Tensor, rotated: Tensor) -> Coordinates:
        """Positions of this shard's tokens (.., N, K), with prefix and suffix where it is whole."""
        if self.whole:
            on_grid = slice(self.prefix, self.prefix + self.num_grid_tokens)
            return Coordinates(coords[..., on_grid, :], self.prefix, self.suffix)
        return Coordinates(coords, rotated=rotated.expand(coords.shape[:-1]))

    def take(self, index: Tensor) -> Coordinates:
        """The grid tokens with these indices, in this order: (n,) or (B, n). Prefix and suffix stay.

        For dropped tokens (MAE, PatchDropout) and other orders (:func:`window_order`). On the index's device.

        Raises:
            IndexError: an index below 0 or beyond the grid; on a GPU a device-side assertion.
        """
        if not self.whole:
            raise ValueError(f"take: expected a whole grid, got a shard (start={self.start}, length={self.length})")
        check_index(index, self.num_grid_tokens)
        coords = _unravel(index, self.shape)
        coords = coords if self.origin_row is None else coords + self.origin_row
        return Coordinates(self._placed(coords), self.prefix, self.suffix)

    def floor(self, device: torch.device | str = "cpu") -> Coordinates:
        """s → ⌊s⌋, a table. A reference size over n and the like are exact: i · r // n (CogView4)."""
        return self.explicit(device).floor()

    def clamp(self, low: Bound = None, high: Bound = None, device: torch.device | str = "cpu") -> Coordinates:
        """s → min(max(s, low), high), a table; a number, or one an axis, None where there is no bound."""
        return self.explicit(device).clamp(low, high)

    def select(self, axes: Sequence[int | None], device: torch.device | str = "cpu") -> Grid | Coordinates:
        """Axes in another order, or on more or fewer of them: axis j is axis ``axes[j]``, at 0 where that is None.

        Still a grid where all axes stay in their order, (None, 0, 1) makes an image a frame; else a table.
        """
        check_axes(axes, self.num_axes)
        if [axis for axis in axes if axis is not None] != list(range(self.num_axes)):
            return self.explicit(device).select(axes)
        scale, shift = self._scale_and_shift
        if self.origin is not None or isinstance(scale, Tensor) or isinstance(shift, Tensor):
            return self.explicit(device).select(axes)
        shape, scale, shift = (
            [none if axis is None else given[axis] for axis in axes]
            for given, none in ((self.shape, 1), (scale, 1.0), (shift, 0.0))
        )
        plain = self.scale is None and self.shift is None
        return replace(self, shape=tuple(shape), scale=None if plain else scale, shift=None if plain else shift)

    @property
    def _sizes(self) -> tuple[Any, ...]:
        """Return the divisors of normalised positions. An axis of size 0 has no positions."""
        return tuple(larger(n, 1) for n in self.shape)

    @property
    def _scale_and_shift(self) -> tuple[Any, Any]:
        ones, zeros = (1.0,) * self.num_axes, (0.0,) * self.num_axes
        return ones if self.scale is None else self.scale, zeros if self.shift is None else self.shift


def _as_fraction(scale: float, shift: float, n: int) -> tuple[float, float, float]:
    """The numbers as n-ths, where they are that but for the rounding of one rule after another; else over 1."""
    largest = 2.0**53 / n**2
    if abs(scale) < largest and abs(shift) < largest:
        p, r = float(round(scale * n)), float(round(shift * n))
        if all(math.isclose(a / n, b, rel_tol=2.0**-50) for a, b in ((p, scale), (r, shift))):
            return p, r, float(n)
    return scale, shift, 1.0


def _place_by_fractions(index: Tensor, affine: Tensor, n: Tensor) -> Tensor:
    """:func:`_as_fraction` for sizes of a trace."""
    scale, shift = affine.unbind(-1)
    p, r, largest = (scale * n).round(), (shift * n).round(), 2.0**53 / n**2
    near = ((p / n - scale).abs() <= 2.0**-50 * scale.abs()) & ((r / n - shift).abs() <= 2.0**-50 * shift.abs())
    near = near & (scale.abs() < largest) & (shift.abs() < largest)
    return torch.where(near, (index * p + r) / n, index * scale + shift)


def window_order(shape: Sequence[int], window: int | Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Grid indices window by window, row-major within each and among them: int64 (N,), for :meth:`Grid.take`.

    ``window=2`` on (H, W), or (1, 2, 2) on (T, H, W), is the 2×2-merge order of Qwen's vision towers. Windows at the
    far edges are smaller where they don't divide the grid.
    """
    windows = (window,) * len(shape) if isinstance(window, int) else tuple(window)
    if len(windows) != len(shape) or not all(w > 0 for w in windows):
        raise ValueError(f"window: expected a size of at least 1 for each of {len(shape)} axes, got {window}")
    for size in shape:
        check_at_least(0, shape=size)
    index = torch.arange(math.prod(shape), device=device)
    number = torch.zeros_like(index)
    for i, n, w in zip(_unravel(index, shape).unbind(-1), shape, windows, strict=True):
        number = number * -(-n // w) + i // w
    return number.argsort(stable=True)


def relative_times(num_frames: int, horizon: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Times (num_frames,) of the frames that a stream still holds, the newest last: those of a video of ``horizon``.

    Block-relativistic RoPE (∞-RoPE, Yesiltepe et al., arXiv 2511.20649, eq. 2 and 3): the newest is never later than
    horizon - 1, those before it are moved back with it, and what is further back than that shares time 0. For
    ``places`` of :meth:`Grid.along` and of the modules. A cut to another scene (eq. 4) is ``times[i:] += gap``.

    Raises:
        ValueError: less than one frame.
    """
    check_at_least(1, num_frames=num_frames, horizon=horizon)
    return (torch.arange(num_frames, device=device) - max(num_frames - horizon, 0)).clamp_min(0).double()


def grid_coordinates(
    num_tokens: int,
    sizes: Sequence[int],
    prefix: int,
    start: int,
    affine: Tensor | None,
    origin: Tensor | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The map from flat index to coordinates: positions (N, K) and which tokens are on the grid (N,).

    origin: (1, K), or (B, 1, K), which makes the positions (B, N, K).
    """
    if dtype == torch.float32 and affine is None:
        for size in sizes:
            check_reach(size - 1)
    index = torch.arange(num_tokens, device=device) + (start - prefix)
    rotated = (index >= 0) & (index < math.prod(sizes))
    coords = _unravel(torch.where(rotated, index, 0), sizes)
    if origin is not None:
        coords = coords + origin
    if affine is not None:
        coords = coords.to(affine.dtype) * affine[:, 0] + affine[:, 1]
    return torch.where(rotated[:, None], coords, 0).to(dtype), rotated


def _unravel(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Coordinates (.., K) of flat indices, the last axis fastest."""
    columns = []
    for size in reversed(sizes):
        rest = index // max(size, 1)
        columns.append(index - rest * max(size, 1))  # ONNX has no remainder by a size that varies
        index = rest
    return torch.stack(columns[::-1], dim=-1)


def offset_positions(num_tokens: int, offset: int | Tensor, device: torch.device) -> Grid:
    """Tokens t = 0 .. N - 1 at t + offset: an int, or integers (), (1,) or (B,) that are read on the device.

    An int is written to the device, so that a new one is not a new layout.
    """
    if isinstance(offset, Tensor):
        if offset.ndim > 1 or offset.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"offset: expected an int or int32 or int64 of shape (), (1,) or (B,), got {offset.dtype} "
                f"{tuple(offset.shape)}"
            )
        if offset.device != device:
            offset = offset.to(device, non_blocking=not offset.is_cuda)
        # One number holds for the whole batch.
        return Grid((num_tokens,), origin=offset.reshape(1) if offset.numel() == 1 else offset.unsqueeze(-1))
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise ValueError(f"offset: expected an int or integers (B,), got {offset!r}")
    if offset == 0:
        # Dynamo warns of a cache, and shows sizes that vary as ints.
        cached = type(num_tokens) is int and not torch.compiler.is_compiling()
        return _from_zero(num_tokens) if cached else Grid((num_tokens,))
    return Grid((num_tokens,), origin=torch.full((1,), offset, dtype=torch.int64, device=device))


@lru_cache(maxsize=4096)
def _from_zero(num_tokens: int) -> Grid:
    return Grid((num_tokens,))


def _alike(*values: Any) -> tuple[Any, ...]:
    """Convert all tensors to float64 if one of them is float64; otherwise return them as they are."""
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    return values if device is None else tuple(torch.as_tensor(v, dtype=torch.float64, device=device) for v in values)


def _check_origin(origin: Any, num_axes: int) -> None:
    if not isinstance(origin, Tensor):
        raise TypeError(f"origin: expected a tensor of integers (K,) or (B, K), got {type(origin).__name__}")
    check_dense("origin", origin, "(K,) or (B, K)")
    if origin.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"origin: expected int32 or int64, got {origin.dtype}; shift takes fractions")
    if origin.ndim not in (1, 2) or origin.shape[-1] != num_axes:
        raise ValueError(f"origin: expected ({num_axes},) or (B, {num_axes}), got {tuple(origin.shape)}")


def affine_on(scale: tuple[float, ...], shift: tuple[float, ...], device: torch.device) -> Tensor:
    return _rows_on(tuple(zip(scale, shift, strict=True)), device)


@cache  # for good: a CUDA graph may hold the address
def _rows_on(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor made there could never take part in training
        return torch.tensor(rows, dtype=torch.float64, device=device)
