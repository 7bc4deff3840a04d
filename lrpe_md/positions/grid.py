"""Grids of token positions.

Positions s have one row per token and one column per axis. Axes are ordered like a tensor's shape, slowest first. For a
video (T, H, W), ``s[:, 0]`` is the frame and ``s[:, 2]`` is the column.

An operation that is affine on each axis turns a grid into another grid, so no table of positions is stored. For
example, ``Grid((T, H, W)).interpolate((None, 16, 16)).offset((3, 0, 0))`` first rescales and then shifts the positions.
Dropped or reordered tokens, rounding, and several grids in one sequence need a table of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from ..checks import (
    as_integer,
    can_read,
    check_at_least,
    check_dense,
    describe_positions,
    fleeting,
    is_real,
    plural,
    show_value,
)
from .coordinates import (
    Bound,
    Coordinates,
    PerAxis,
    Rules,
    apply_affine,
    as_tensor,
    check_axes,
    check_index,
    check_reach,
    larger,
    per_axis,
    read_counts,
    smaller,
)

__all__ = ["Coordinates", "Grid", "PerAxis", "grid_coordinates", "offset_positions", "relative_times", "window_order"]


@dataclass(frozen=True, eq=False)
class Grid(Rules):
    """Positions of tokens in row-major order on a grid, optionally with unrotated tokens before and after them.

    A token with integer coordinates (i_1, ..., i_k) has the position ``s_j = scale_j * (i_j + origin_j) + shift_j``.
    The last coordinate changes fastest from token to token. Prefix tokens (such as class, register and condition
    tokens) and suffix tokens have angle zero and no phase.

    Args:
        shape: size of each axis, slowest first, such as ``(H, W)`` or ``(T, H, W)``.
        prefix: number of unrotated tokens before the grid.
        suffix: number of unrotated tokens after the grid.
        scale: a number, one number per axis, or a tensor (K,). The default is 1. Numbers and float64 tensors are used
            in float64. Under ``torch.compile``, pass a tensor to avoid recompilation for each new value.
        shift: like ``scale``, but the default is 0.
        start: first token of this shard, counted from the first prefix token. Shards are used in sequence parallelism
            and decoding.
        length: number of tokens in this shard. By default, the shard extends to the end.
        origin: first integer coordinates, such as the current cache length in decoding, as an integer tensor (K,), or
            (B, K) if samples differ, on x's device. The kernel reads the tensor, so a new value needs no
            synchronisation, copy or recompile.

    Raises:
        ValueError: if a size is negative or not an integer, a scale, shift or origin has the wrong number of axes, or a
            shard exceeds the sequence.
        TypeError: if the origin is not an integer tensor.
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
        if not isinstance(given, Iterable) and (self.prefix or self.suffix):
            axes = ", ".join(str(n) for n in (given, self.prefix, self.suffix) if n)
            raise TypeError(
                f"shape: expected a tuple of sizes, got {given!r} with prefix={self.prefix!r}, suffix={self.suffix!r}; "
                f"pass Grid(({axes})) for several axes, or Grid(({given},), prefix=...) for one"
            )
        shape: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
        sizes = tuple(map(as_integer, shape))
        if len(sizes) == 0 or any(n is None or n < 0 for n in sizes):
            found = describe_positions(given) if isinstance(given, Tensor) and given.ndim > 1 else show_value(shape)
            raise ValueError(f"shape: expected a non-negative integer for each axis, got {found}")
        object.__setattr__(self, "shape", sizes)
        read_counts(self, "prefix", "suffix", "start", *(() if self.length is None else ("length",)))
        for name in ("scale", "shift"):
            object.__setattr__(self, name, per_axis(name, getattr(self, name), len(shape)))
        if self.start > self.total or (self.length is not None and self.length > self.total - self.start):
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
        """Number of tokens in the whole sequence, including prefix and suffix."""
        return self.prefix + math.prod(self.shape) + self.suffix

    @property
    def num_tokens(self) -> int:
        """Number of tokens in this shard."""
        return self.total - self.start if self.length is None else self.length

    @property
    def whole(self) -> bool:
        return self.num_tokens == self.total

    def affine(self, device: torch.device) -> Tensor | None:
        """Return scale and shift as a float64 tensor (K, 2), or None if the grid has neither."""
        if self.scale is None and self.shift is None:
            return None
        if isinstance(self.scale, Tensor) or isinstance(self.shift, Tensor):
            return torch.stack([as_tensor(value, device) for value in self._scale_and_shift], dim=-1)
        scale, shift = self._scale_and_shift
        if torch.compiler.is_compiling() or fleeting():
            return torch.tensor(list(zip(scale, shift, strict=True)), dtype=torch.float64, device=device)
        return affine_on(scale, shift, device)

    def coordinates(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
        """Return positions (N, K), or (B, N, K) with an origin per sample. Prefix and suffix tokens have position 0."""
        return self._table(torch.device(device), dtype)[0]

    def _table(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        is_plain = self.scale is None and self.shift is None
        coords, rotated = grid_coordinates(
            self.num_tokens, self.shape, self.prefix, self.start, None, self.origin, device=device,
            dtype=dtype if is_plain else torch.float64,
        )  # fmt: skip
        if not is_plain:
            coords = torch.where(rotated[:, None], self._placed(coords), 0).to(dtype)
        return coords, rotated

    @property
    def _has_rules(self) -> bool:
        """Return whether the values of the scale and shift are known on the host."""
        return not isinstance(self.scale, Tensor) and not isinstance(self.shift, Tensor)

    def _placed(self, index: Tensor) -> Tensor:
        """Return float64 positions of integer coordinates (..., K).

        If scale and shift are the fractions p / n and r / n up to rounding, as after :meth:`interpolate`, the position
        is computed as (p i + r) / n, with a single rounding.
        """
        index = index.double()
        affine = self.affine(index.device)
        if affine is None:
            return index
        scale, shift = affine.unbind(-1)
        positions = apply_affine(index, scale, shift)
        if not self._has_rules:
            return positions
        if any(type(n) is not int for n in self.shape) or torch.compiler.is_compiling() or fleeting():
            n = torch.tensor(self._sizes, dtype=torch.float64, device=index.device)
        else:
            n = _rows_on((tuple(map(float, self._sizes)),), index.device)[0]
        p, r, largest = (scale * n).round(), (shift * n).round(), 2.0**53 / n**2
        near = ((p / n - scale).abs() <= 2.0**-50 * scale.abs()) & ((r / n - shift).abs() <= 2.0**-50 * shift.abs())
        near = near & (scale.abs() < largest) & (shift.abs() < largest)
        return torch.where(near, (index * p + r) / n, positions)

    def transform(self, scale: PerAxis = 1.0, shift: PerAxis = 0.0) -> Grid:
        a, b, u, v = _alike(
            per_axis("scale", scale, self.num_axes), per_axis("shift", shift, self.num_axes), *self._scale_and_shift
        )
        if isinstance(a, Tensor):
            return replace(self, scale=a * u, shift=a * v + b)
        rows = list(zip(a, b, u, v, strict=True))
        return replace(self, scale=[x * y for x, _, y, _ in rows], shift=[x * z + w for x, w, _, z in rows])

    def interpolate(self, reference: int | Sequence[int | None]) -> Grid:
        """Rescale positions to a grid of size ``reference``, s → s · reference_j / n_j (EVA-02). None skips an axis."""
        if not isinstance(reference, (int, Iterable)) or isinstance(reference, str):
            found = "a Grid; pass its shape" if isinstance(reference, Grid) else type(reference).__name__
            raise TypeError(f"reference: expected a size, or one for each of the {self.num_axes} axes, got {found}")
        sizes = (reference,) * self.num_axes if isinstance(reference, int) else tuple(reference)
        if len(sizes) != self.num_axes or not all(r is None or r > 0 for r in sizes):
            raise ValueError(
                f"reference: expected a positive size, or None, for each of the {self.num_axes} axes, "
                f"got {show_value(reference)}"
            )
        return self.rescale([1.0 if r is None else r / n for r, n in zip(sizes, self._sizes, strict=True)])

    def centre(self, axes: Sequence[int] | None = None, *, whole: bool = False) -> Grid:
        """Shift ``axes`` (default: all) so that their middle, at index (n - 1) / 2, is at position zero, as in Mochi.

        whole: use index n - n // 2 as the middle, so that integer positions stay integers, as in Qwen-Image.
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
        """Place tokens at the centres of n cells that fill [-1, 1], s → 2 (s + ½) / m - 1 with m = n, as in DINOv3.

        by: "axis" uses each axis's own size as m. "shorter" and "longer" use the size of the shorter or longer axis for
        all axes, which keeps the aspect ratio.
        """
        choose: dict[str, Any] = {"axis": None, "shorter": smaller, "longer": larger}
        if by not in choose:
            raise ValueError(f"by: expected one of {tuple(choose)}, got {show_value(by)}")
        sizes = self._sizes if by == "axis" else (reduce(choose[by], self._sizes),) * self.num_axes
        return self.transform([2 / m for m in sizes], [1 / m - 1 for m in sizes])

    def crop(self, start: Sequence[float], stop: Sequence[float]) -> Grid:
        """Place tokens as in a crop of a larger grid: the first token at start_j, the last at stop_j (n_j - 1) / n_j.

        If ``start`` is 0, the step is stop / n. Otherwise, the step differs slightly from (stop - start) / n, as in
        CogVideoX. To get exactly the step (stop - start) / n, use ``rescale((stop - start) / n).offset(start)``.

        Raises:
            ValueError: if the crop is so small and so far from 0 that the last position would precede the first.
        """
        if not len(start) == len(stop) == self.num_axes:
            raise ValueError(
                f"start, stop: expected a number for each of the {self.num_axes} axes, got {start}, {stop}"
            )
        steps = []
        for a, b, n in zip(start, stop, self._sizes, strict=True):
            length = b * (n - 1) / n - a
            if length < 0 and 0 < a < b and n > 1:  # in this order, a symbolic start adds no guard
                raise ValueError(
                    f"start, stop: the last of {n} positions, stop * ({n} - 1) / {n} = {b * (n - 1) / n:g}, would "
                    f"precede start = {a:g}; increase stop, or use rescale((stop - start) / n).offset(start), "
                    "which has equal steps"
                )
            steps.append(length / larger(n - 1, 1))
        return self.transform(steps, start)

    def explicit(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Coordinates:
        """Return the same positions as a table of coordinates."""
        return self._as_table(*self._table(torch.device(device), dtype))

    def along(self, places: Mapping[int, Tensor]) -> Coordinates:
        """Return a table in which index i of an axis has the position ``places[axis][i]``. Other axes are unchanged.

        Use this for times that are not affine in the frame index, or whose values are only on the device.

        Args:
            places: dict from axis number to a tensor (n,) with at least one position for each index of this axis,
                counted from 0 even if the grid has an origin. Scale and shift don't apply to these positions.

        Raises:
            ValueError: for an invalid axis or too few places.
            IndexError: if there is no place for an index (including the origin). On a GPU, this is a device-side
                assertion.
        """
        for axis, own in places.items():
            check_axes((axis,), self.num_axes)
            check_dense("places", own, "(n,)")
            if own.ndim != 1 or own.shape[0] < self.shape[axis] or not is_real(own):
                raise ValueError(
                    f"places: expected a 1-D tensor with at least {self.shape[axis]} real numbers, one per token of "
                    f"axis {axis}, got {own.dtype} {tuple(own.shape)}"
                )
        device = next((own.device for own in places.values()), torch.device("cpu"))
        places = {axis: own for axis, own in places.items() if own.shape[0] > 0}  # an empty axis has no grid tokens
        coords, rotated = self._table(device, torch.float64)
        index, _ = grid_coordinates(
            self.num_tokens, self.shape, self.prefix, self.start, None, self.origin, device=device,
            dtype=torch.int64,
        )  # fmt: skip
        for axis, own in places.items() if self.origin is not None else ():
            check_index(
                index[..., axis], own.shape[0], f"places: expected indices of axis {axis}, including the origin,"
            )
        columns = [places[j].double()[index[..., j]] if j in places else coords[..., j] for j in range(self.num_axes)]
        return self._as_table(torch.stack(columns, dim=-1), rotated)

    def _as_table(self, coords: Tensor, rotated: Tensor) -> Coordinates:
        """Make a table from this shard's positions (..., N, K), with prefix and suffix if it is the whole sequence."""
        if self.whole:
            on_grid = slice(self.prefix, self.prefix + self.num_grid_tokens)
            return Coordinates(coords[..., on_grid, :], self.prefix, self.suffix)
        return Coordinates(coords, rotated=rotated.expand(coords.shape[:-1]))

    def take(self, index: Tensor) -> Coordinates:
        """Select grid tokens by an index (n,) or (B, n), in the order of the index, and keep prefix and suffix.

        Use this to drop tokens (MAE, PatchDropout) or to reorder them (:func:`window_order`). The result is on the
        index's device.

        Raises:
            IndexError: if an index is out of range. On a GPU, this is a device-side assertion.
        """
        if not self.whole:
            raise ValueError(f"take: expected a whole grid, got a shard (start={self.start}, length={self.length})")
        check_index(index, self.num_grid_tokens)
        coords = _unravel(index, self.shape)
        coords = coords if self.origin is None else coords + self.origin.unsqueeze(-2)
        return Coordinates(self._placed(coords), self.prefix, self.suffix)

    def floor(self, device: torch.device | str = "cpu") -> Coordinates:
        """Return a table of positions rounded down, such as i · reference // n after :meth:`interpolate` (CogView4)."""
        return self.explicit(device).floor()

    def clamp(self, low: Bound = None, high: Bound = None, device: torch.device | str = "cpu") -> Coordinates:
        """Return a table of positions clamped to [low, high]; see :meth:`Coordinates.clamp`."""
        return self.explicit(device).clamp(low, high)

    def select(self, axes: Sequence[int | None], device: torch.device | str = "cpu") -> Grid | Coordinates:
        """Reorder, add or remove axes. New axis j is the old axis ``axes[j]``, or all zeros if ``axes[j]`` is None.

        If all axes keep their order, the result is a grid, and otherwise a table. For example, ``axes=(None, 0, 1)``
        turns an image into a video frame.
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
        """Sizes to divide positions by, at least 1 to avoid dividing by zero."""
        return tuple(larger(n, 1) for n in self.shape)

    @property
    def _scale_and_shift(self) -> tuple[Any, Any]:
        ones, zeros = (1.0,) * self.num_axes, (0.0,) * self.num_axes
        return ones if self.scale is None else self.scale, zeros if self.shift is None else self.shift


def window_order(shape: Sequence[int], window: int | Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return the indices of a grid's tokens in window order, as int64 (N,) for :meth:`Grid.take`.

    Both the windows and the tokens in each window are in row-major order. ``window=2`` on (H, W), or (1, 2, 2) on (T,
    H, W), gives the 2×2 merge order of Qwen's vision towers. If the window does not divide the grid, the last windows
    on an axis are smaller.
    """
    shape = Grid(shape).shape  # pyright: ignore[reportArgumentType] # a Grid checks sizes of any type
    windows = tuple(window) if isinstance(window, Iterable) else (window,) * len(shape)
    if len(windows) != len(shape) or not all(as_integer(w) is not None and w > 0 for w in windows):
        raise ValueError(f"window: expected a positive size for each of the {len(shape)} axes, got {window}")
    index = torch.arange(math.prod(shape), device=device)
    number = torch.zeros_like(index)
    for i, n, w in zip(_unravel(index, shape).unbind(-1), shape, windows, strict=True):
        number = number * -(-n // w) + i // w
    return number.argsort(stable=True)


def relative_times(num_frames: int, horizon: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return times (num_frames,) for the frames that a video stream keeps, oldest first.

    This is block-relativistic RoPE (∞-RoPE, Yesiltepe et al., arXiv 2511.20649, eq. 2 and 3). The time of the newest
    frame is at most horizon - 1, earlier frames count back from there, and no time is below 0. Pass the result as
    ``places`` to :meth:`Grid.along` or to a module's ``set_places``. To cut to another scene (eq. 4), run ``times[i:]
    += gap``.

    Raises:
        ValueError: if num_frames or horizon is below 1.
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
    """Return the positions (N, K) of consecutive tokens from ``start`` on, and a mask (N,) of the tokens on the grid.

    origin: (K,), or (B, K) for positions (B, N, K).
    """
    if dtype == torch.float32 and affine is None:
        for size in sizes:
            check_reach(size - 1)
        if origin is not None and origin.numel() and can_read(origin):  # reading a GPU tensor would synchronise
            for size, first in zip(sizes, origin.reshape(-1, len(sizes)).unbind(-1), strict=True):
                check_reach(max(int(first.max()) + size - 1, -int(first.min())))
    index = torch.arange(num_tokens, device=device) + (start - prefix)
    rotated = (index >= 0) & (index < math.prod(sizes))
    coords = _unravel(torch.where(rotated, index, 0), sizes)
    if origin is not None:
        coords = coords + origin.unsqueeze(-2)
    if affine is not None:
        coords = coords.to(affine.dtype) * affine[:, 0] + affine[:, 1]
    return torch.where(rotated[:, None], coords, 0).to(dtype), rotated


def _unravel(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Convert flat indices to coordinates (..., K) in row-major order."""
    columns = []
    for size in reversed(sizes):
        rest = index // max(size, 1)
        columns.append(index - rest * max(size, 1))  # ONNX has no modulo by a dynamic size
        index = rest
    return torch.stack(columns[::-1], dim=-1)


def offset_positions(num_tokens: int, offset: int | Tensor, device: torch.device) -> Grid:
    """Place token t at t + offset, where the offset is an int or an integer tensor of shape (), (1,) or (B,).

    An int becomes a tensor on the device, so a new value does not create a new layout.
    """
    # Dynamo warns about caches, and represents dynamic sizes as ints.
    cached = type(num_tokens) is int and not torch.compiler.is_compiling()
    if isinstance(offset, Tensor):
        if offset.ndim > 1 or offset.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"offset: expected an int, or an int32 or int64 tensor of shape (), (1,) or (B,), got {offset.dtype} "
                f"{tuple(offset.shape)}"
            )
        if offset.device != device:
            offset = offset.to(device, non_blocking=not offset.is_cuda)
        # A single offset applies to the whole batch.
        origin = offset.reshape(1) if offset.numel() == 1 else offset.unsqueeze(-1)
        if not cached or type(offset) is not Tensor:
            return Grid((num_tokens,), origin=origin)
        # The fields are valid, and checking them at every decode step would cost CPU time.
        grid = object.__new__(Grid)
        vars(grid).update(vars(_from_zero(num_tokens)), origin=origin)
        return grid
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise ValueError(f"offset: expected an int or an integer tensor of shape (B,), got {offset!r}")
    if offset == 0:
        return _from_zero(num_tokens) if cached else Grid((num_tokens,))
    return Grid((num_tokens,), origin=torch.full((1,), offset, dtype=torch.int64, device=device))


@lru_cache(maxsize=4096)
def _from_zero(num_tokens: int) -> Grid:
    return Grid((num_tokens,))


def _alike(*values: Any) -> tuple[Any, ...]:
    """If one of the values is a tensor, convert all of them to float64 tensors. Otherwise, return them unchanged."""
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    return values if device is None else tuple(as_tensor(v, device) for v in values)


def _check_origin(origin: Any, num_axes: int) -> None:
    if not isinstance(origin, Tensor):
        raise TypeError(
            f"origin: expected an integer tensor of shape (K,) or (B, K), got {type(origin).__name__}; pass "
            f"torch.tensor([...], device=x.device) with {plural(num_axes, 'integer')}"
        )
    check_dense("origin", origin, "(K,) or (B, K)")
    if origin.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"origin: expected int32 or int64, got {origin.dtype}; for fractions, use shift")
    if origin.ndim not in (1, 2) or origin.shape[-1] != num_axes:
        raise ValueError(f"origin: expected shape ({num_axes},) or (B, {num_axes}), got {tuple(origin.shape)}")


def affine_on(scale: tuple[float, ...], shift: tuple[float, ...], device: torch.device) -> Tensor:
    return _rows_on(tuple(zip(scale, shift, strict=True)), device)


@cache  # never evicted: a CUDA graph may hold the address
def _rows_on(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be used in training later
        return torch.tensor(rows, dtype=torch.float64, device=device)
