"""Positions of sequences with several parts (text, images, videos), and of batches of such sequences.

:func:`compose` returns the layout of one sample, which contains the positions of its tokens. :func:`pack` and
:func:`pad` combine samples with different layouts, so you can encode them in a single call. Build the layout once
per batch, not once per layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..checks import (
    as_integer,
    check_at_least,
    check_boundaries,
    check_offsets,
    check_precise,
    describe_positions,
    show_value,
)
from .coordinates import check_reach, larger
from .grid import Coordinates, Grid, offset_positions

__all__ = ["After", "Before", "Packed", "Segment", "Tokens", "compose", "pack", "packed_positions", "pad", "zigzag"]

RULES = ("skip", "zero", "axis", "diagonal")


@dataclass(frozen=True)
class Tokens:
    """Tokens outside of grids, such as text, class tokens, registers and padding.

    Args:
        length: number of tokens.
        rule: where to place the tokens.

            - ``"skip"``: the tokens have no position, are not rotated and get no phase.
            - ``"zero"``: all tokens are at the origin, so they are not rotated, but get a phase and an amplitude.
            - ``"axis"``: the tokens follow one another along one axis, and are at zero on the other axes.
            - ``"diagonal"``: the tokens follow one another along all axes at once.
        axis: axis number for ``"axis"``.
        start: position of the first token. None means the running position of the sequence.
    """

    length: int
    rule: Literal["skip", "zero", "axis", "diagonal"] = "skip"
    axis: int = 0
    start: float | None = None

    def __post_init__(self) -> None:
        check_at_least(0, length=self.length, axis=self.axis)
        if self.rule not in RULES:
            raise ValueError(f"rule: expected one of {RULES}, got {show_value(self.rule)}")
        start = self.start
        if start is None or torch.compiler.is_compiling():  # values are symbolic while compiling
            return
        is_number = isinstance(start, (Real, Tensor)) and not isinstance(start, bool)
        if not is_number or (isinstance(start, float) and not math.isfinite(start)):
            raise ValueError(f"start: expected a finite number or None, got {start!r}")


@dataclass(frozen=True)
class After:
    """A grid that continues after the preceding segments. The running position is added to the grid's positions.

    Args:
        grid: a grid with positions that start at 0, or a table (N, K), for example of reordered tokens. For a table on
            a GPU, reading the largest positions synchronises.
        axes: axes on which to add the running position. None means all axes.
        advance: axes that determine how far the running position advances, which is 1 plus the grid's largest position
            on these axes, without the running position. None means the same as ``axes``. (1, 2) advances by the larger
            of height and width, regardless of the number of frames (Qwen2-VL in transformers 5).
        whole: round the next running position up to an integer. Use this with fractional positions (V2PE).
    """

    grid: Grid | Coordinates
    axes: tuple[int, ...] | None = None
    advance: tuple[int, ...] | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.grid, (Grid, Coordinates)):
            raise TypeError(f"grid: expected a Grid or Coordinates, got {describe_positions(self.grid)}")
        if self.advance is not None and not self.advance:
            raise ValueError("advance: expected at least one axis, or None, got ()")


@dataclass(frozen=True)
class Before:
    """A grid that ends just before the running position and does not advance it, such as earlier frames or a condition.

    The grid is shifted so that its largest position on each axis is the running position minus 1. At the start of a
    sequence, this largest position is -1.

    Args:
        grid: a grid or a table (N, K); see :class:`After`.
        axes: axes on which to shift the grid. None means all axes. Positions on other axes are unchanged.
    """

    grid: Grid | Coordinates
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.grid, (Grid, Coordinates)):
            raise TypeError(f"grid: expected a Grid or Coordinates, got {describe_positions(self.grid)}")


Segment = Tokens | Grid | After | Before | Coordinates


class Packed(NamedTuple):
    """Positions of samples packed end to end, and their boundaries. :func:`pack` returns this.

    If you have your own coordinates (N, K), pass ``positions=Packed(Coordinates(coords), cu_seqlens)``, for tokens (N,
    H, D) or (1, H, N, D).

    Args:
        positions: coordinates (N, K) of the tokens of all samples.
        cu_seqlens: boundaries (B + 1,) of the samples in int32, from 0 to N, as in flash-attn. On a GPU, values are not
            checked.
    """

    positions: Coordinates
    cu_seqlens: Tensor


def compose(
    *segments: Segment,
    num_axes: int | None = None,
    num_tokens: int | None = None,
    start: int = 0,
    length: int | None = None,
    order: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Coordinates:
    """Return the positions of one sample from its segments, in token order.

    A running position p starts at 0. :class:`Tokens` on an axis or the diagonal set p to their start plus their length.
    :class:`After` sets p to the grid's largest position plus 1, subject to its options, or leaves p unchanged if the
    grid is empty. :class:`Before` uses p without changing it. Plain grids and coordinates neither use nor change p.

    Args:
        segments: :class:`Tokens`, :class:`Grid` or :class:`Coordinates` (N, K) with fixed positions, and :class:`After`
            or :class:`Before` for a grid relative to p. A grid's prefix and suffix are unrotated tokens.
        num_axes: number of axes K, required if no grid determines K.
        num_tokens: total number of tokens to expect. None skips this check.
        start: first token of this shard of the sequence. Shards are used in sequence parallelism and decoding.
        length: number of tokens in this shard. By default, the shard extends to the end.
        order: indices of the segments in the order in which p visits them. The default is token order. With (1, 0),
            text after an image gets the earlier positions (Z-Image).
        device, dtype: device and dtype of the positions. float32 can represent all integers up to 2^24.

    Returns:
        coordinates (N, K), with a mask if some of the tokens are not rotated.

    Raises:
        ValueError: if segments have different numbers of axes, lengths don't add up, a shard exceeds the sequence, or
            float32 cannot represent a position.
        TypeError: for an invalid segment or dtype.
    """
    check_precise("dtype", dtype)
    if num_axes is not None:
        check_at_least(1, num_axes=num_axes)
    num_axes, lengths = _check_segments(segments, num_axes)
    total = sum(lengths)
    if num_tokens is not None and total != num_tokens:
        added = " + ".join(map(str, lengths))
        raise ValueError(f"num_tokens: expected the segments to add up to {num_tokens}, got {added} = {total}")
    end = total if length is None else start + length
    if not 0 <= start <= end <= total:
        raise ValueError(
            f"start, length: expected a slice of the {total} tokens ({' + '.join(map(str, lengths))}), "
            f"got start={start}, length={length}"
        )
    device = torch.device(device)
    if order is not None and sorted(order) != list(range(len(segments))):
        raise ValueError(f"order: expected each number from 0 to {len(segments) - 1} once, got {tuple(order)}")
    running, before = 0.0, 0
    everywhere: list[Any] = [None] * len(segments)
    for i in range(len(segments)) if order is None else order:
        everywhere[i], running = _place(segments[i], running, num_axes)
    parts = [Coordinates(torch.zeros(0, num_axes, dtype=dtype, device=device))]
    for i, (placed, count) in enumerate(zip(everywhere, lengths, strict=True)):
        if dtype == torch.float32:
            check_reach(_reach(segments[i], placed), f" in segment {i}")
        first, last = max(start - before, 0), min(end - before, count)
        before += count
        if first < last:
            parts.append(_rows(placed, first, last - first, num_axes, device).to(dtype=dtype))
    return _join(parts)


def pack(samples: Sequence[Grid | Coordinates], device: torch.device | str | None = None) -> Packed:
    """Concatenate the layouts of several samples, to encode x (N, H, D) or (1, H, N, D) with N = N_1 + ... + N_B.

    Softmax attention must also keep the samples apart, for example with the result's cu_seqlens in flash-attn. Linear
    attention keeps the samples apart itself, and only accepts (1, H, N, D).

    Args:
        samples: one layout (N, K) per sample.
        device: device of the result. The default is the device of the first coordinates, or the CPU if there are only
            grids.
    """
    rows = _samples(samples, device)
    ends = torch.tensor([0, *(part.num_tokens for part in rows)], device="cpu").cumsum(0, dtype=torch.int32)
    return Packed(_join(rows), ends.to(rows[0].coords.device))


def packed_positions(cu_seqlens: Tensor, num_tokens: int, offset: int | Tensor = 0) -> Coordinates:
    """Return positions for packed text x (1, H, N, D), with each sequence starting at ``offset``.

    This function does not synchronise with a GPU. Compute the positions once per batch, not once per layer.

    Args:
        cu_seqlens: start of each sequence, beginning with 0, and the end of the last one, as an int32 or int64 tensor
            (S + 1,) on x's device. Two equal entries mean an empty sequence. Tokens after the last entry continue the
            last sequence. Values are only checked on a CPU. On a GPU, invalid values lead to wrong positions.
        num_tokens: number of tokens, N.
        offset: position of the first token of each sequence, an int or an integer tensor of shape (), (1,) or (S,).

    Returns:
        coordinates (N, 1) in int64.

    Raises:
        ValueError, TypeError: for an invalid argument.
    """
    check_boundaries(cu_seqlens)
    check_at_least(0, num_tokens=num_tokens)
    check_offsets(cu_seqlens, num_tokens, to_the_end=False)
    num, device = len(cu_seqlens) - 1, cu_seqlens.device
    index = torch.arange(num_tokens, device=device, dtype=cu_seqlens.dtype)
    sequence = (torch.searchsorted(cu_seqlens, index, right=True) - 1).clamp(0, num - 1)
    shift = -cu_seqlens[:-1].long()
    if isinstance(offset, Tensor):
        if offset.dtype not in (torch.int32, torch.int64) or tuple(offset.shape) not in ((), (1,), (num,)):
            raise ValueError(
                f"offset: expected an int, or an int32 or int64 tensor of shape (), (1,) or ({num},), got "
                f"{offset.dtype} {tuple(offset.shape)}"
            )
        shift = shift + offset.to(device, non_blocking=not offset.is_cuda)
    elif isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise ValueError(f"offset: expected an int or an integer tensor of shape ({num},), got {offset!r}")
    else:
        shift = shift + offset
    return Coordinates((index + shift[sequence])[:, None])


def text_positions(x: Tensor, offset: int | Tensor, cu_seqlens: Tensor | None, dim: int | None) -> Any:
    """Return the positions of text x (B, H, N, D) or, with cu_seqlens, of packed text (1, H, N, D) or (N, H, D).

    ``dim`` is the dimension of a softmax activation.
    """
    if cu_seqlens is None:
        return offset_positions(x.shape[2], offset, x.device)
    if x.ndim == 3:
        return Packed(packed_positions(cu_seqlens, x.shape[0], offset), cu_seqlens)
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected packed sequences in x of shape (1, H, N, D), got {tuple(x.shape)}")
    refuse_mixing(dim)
    return packed_positions(cu_seqlens, x.shape[2], offset)


def refuse_mixing(dim: int | None) -> None:
    """Raise an error if the softmax is over the sequence, because it would mix packed sequences."""
    if dim == -2:
        raise ValueError(
            "dim: softmax over the sequence (-2) would mix packed sequences; process one sequence at a time"
        )


def pad(
    samples: Sequence[Grid | Coordinates],
    num_tokens: int | None = None,
    device: torch.device | str | None = None,
) -> Coordinates:
    """Batch the layouts of several samples for x (B, H, N, D), with unrotated padding at the end of shorter samples.

    Attention needs a separate mask for the padding, because class tokens are not rotated either. For softmax attention,
    mask the keys with ``torch.arange(N) < lengths[:, None]``, where ``lengths`` holds the number of tokens of each
    sample.

    Args:
        samples, device: see :func:`pack`.
        num_tokens: N. The default is the length of the longest sample.
    """
    rows = _samples(samples, device)
    longest = max(part.num_tokens for part in rows)
    num_tokens = longest if num_tokens is None else num_tokens
    if as_integer(num_tokens) is None or num_tokens < longest:
        raise ValueError(
            f"num_tokens: expected at least {longest}, the length of the longest sample, got {show_value(num_tokens)}"
        )
    padded = _join([replace(part, suffix=num_tokens - part.num_tokens).explicit() for part in rows])
    mask = None if padded.rotated is None else padded.rotated.unflatten(0, (len(rows), num_tokens))
    return Coordinates(padded.coords.unflatten(0, (len(rows), num_tokens)), rotated=mask)


def zigzag(
    positions: Grid | Coordinates, rank: int, num_ranks: int, device: torch.device | str | None = None
) -> Coordinates:
    """Select the tokens of one rank in zig-zag order, for ring attention.

    The sequence is split into 2 R equal chunks for R ranks. Each rank gets chunks ``rank`` and 2 R - 1 - ``rank``, so
    that all ranks have the same amount of work with a causal mask.

    Args:
        positions: layout of the whole sequence, including prefix and suffix tokens.
        rank, num_ranks: index of this rank, counted from 0, and the number of ranks R.
        device: device of the result. The default is the device of the coordinates or of a grid's origin, or else the
            CPU.

    Returns:
        the concatenated coordinates of the two chunks, for this rank's x (B, H, N / R, D). Sum the gradients of
        frequencies over all ranks.

    Raises:
        ValueError: if chunks have unequal lengths, the positions are a shard, or the rank is invalid.
        TypeError: if positions are neither a grid nor coordinates.
    """
    if not isinstance(positions, (Grid, Coordinates)):
        raise TypeError(f"positions: expected a Grid or Coordinates, got {describe_positions(positions)}")
    check_at_least(1, num_ranks=num_ranks)
    if isinstance(rank, bool) or not 0 <= rank < num_ranks:
        raise ValueError(f"rank: expected 0 to {num_ranks - 1}, got {rank}")
    if isinstance(positions, Grid) and not positions.whole:
        raise ValueError(
            f"positions: expected the whole sequence, got a shard (start={positions.start}, length={positions.length})"
        )
    length = positions.num_tokens // (2 * num_ranks)  # Dynamo doesn't support divmod of symbolic sizes
    if positions.num_tokens % (2 * num_ranks):
        raise ValueError(
            f"positions: expected a number of tokens that is a multiple of 2 · {num_ranks}, got "
            f"{positions.num_tokens}; pad the sequence"
        )
    if device is None:
        known = positions.coords if isinstance(positions, Coordinates) else positions.origin
        device = "cpu" if known is None else known.device
    device = torch.device(device)
    chunks = (rank, 2 * num_ranks - 1 - rank)
    return _join([_rows(positions, chunk * length, length, positions.num_axes, device) for chunk in chunks])


def _check_segments(segments: Sequence[Segment], num_axes: int | None) -> tuple[int, list[int]]:
    """Check the segments, and return the number of axes and each segment's number of tokens."""
    parts = [segment.grid if isinstance(segment, (After, Before)) else segment for segment in segments]
    for i, (segment, part) in enumerate(zip(segments, parts, strict=True)):
        if not isinstance(segment, Segment):
            is_number = type(segment) is int
            found = f"{segment}; pass Tokens({segment})" if is_number else describe_positions(segment)
            raise TypeError(f"segments: expected Tokens, Grid, After, Before or Coordinates at index {i}, got {found}")
        if not isinstance(part, Tokens):
            num_axes = _check_part("segments", part, num_axes, i)
    if num_axes is None:
        raise ValueError("num_axes: expected a number, because no segment is a grid, got None")
    for i, segment in enumerate(segments):
        axes: tuple[int, ...] = ()
        if isinstance(segment, Tokens) and segment.rule == "axis":
            axes = (segment.axis,)
        elif isinstance(segment, (After, Before)):
            axes = (*(segment.axes or ()), *(getattr(segment, "advance", None) or ()))
        if any(as_integer(axis) is None or not 0 <= axis < num_axes for axis in axes):
            raise ValueError(f"segments: expected axes from 0 to {num_axes - 1}, got {axes} at index {i}")
    return num_axes, [part.length if isinstance(part, Tokens) else part.num_tokens for part in parts]


def _check_part(name: str, part: Grid | Coordinates, num_axes: int | None, i: int) -> int:
    """Check that part ``i`` has positions (N, K) that don't depend on an origin, and return its number of axes."""
    if isinstance(part, Grid) and part.origin is not None:
        raise ValueError(f"{name}: expected positions without an origin tensor, got an origin in the Grid at index {i}")
    if isinstance(part, Coordinates) and part.coords.ndim != 2:
        raise ValueError(f"{name}: expected coords of shape (N, K), got {tuple(part.coords.shape)} at index {i}")
    if num_axes not in (None, part.num_axes):
        raise ValueError(f"{name}: expected {num_axes} axes in each {name[:-1]}, got {part.num_axes} at index {i}")
    return part.num_axes


def _place(segment: Segment, running: float, num_axes: int) -> tuple[Tokens | Grid | Coordinates, float]:
    """Return a segment at its final position, and the next running position."""
    if isinstance(segment, Tokens) and segment.rule in ("axis", "diagonal"):
        first = running if segment.start is None else segment.start
        return replace(segment, start=first), first + segment.length
    if not isinstance(segment, (After, Before)):
        return segment, running
    axes = range(num_axes) if segment.axes is None else segment.axes
    if isinstance(segment, Before):
        largest: list[Any] = [larger(*ends) + 1 for ends in _ends(segment.grid)] or [0.0] * num_axes
        return segment.grid.offset([running - largest[j] if j in axes else 0.0 for j in range(num_axes)]), running
    placed = segment.grid.offset([running if axis in axes else 0.0 for axis in range(num_axes)])
    ends, advance = _ends(segment.grid), axes if segment.advance is None else segment.advance
    behind: list[Any] = [running + larger(*ends[axis]) + 1 for axis in advance] if ends else []
    moved: Any = reduce(larger, behind) if behind else running
    return placed, math.ceil(moved) if segment.whole else moved


def _ends(grid: Grid | Coordinates) -> list[tuple[float, float]]:
    """Return the first and last position (for a table, the minimum and maximum) per axis, or [] for no tokens."""
    if isinstance(grid, Coordinates):
        rows = grid.coords if grid.rotated is None else grid.coords[grid.rotated]
        ends: Any = torch.stack(rows.double().aminmax(dim=0), dim=-1).tolist() if rows.shape[0] else []
        return [(first, last) for first, last in ends]
    if not grid.num_grid_tokens:
        return []
    given = ([float(v) for v in t] if isinstance(t, Tensor) else t for t in grid._scale_and_shift)
    rows = zip(*given, strict=True)
    return [(shift, shift + scale * (n - 1)) for n, (scale, shift) in zip(grid.shape, rows, strict=True)]


def _reach(segment: Segment, placed: Tokens | Grid | Coordinates) -> float:
    """Return the largest distance of a placed segment from 0, or 0 for a plain table, whose values are not read."""
    if isinstance(placed, Tokens):
        first = placed.start or 0
        return max(-first, first + placed.length - 1)
    if isinstance(segment, Coordinates):
        return 0
    return max((abs(s) for ends in _ends(placed) for s in ends), default=0)


def _rows(
    segment: Tokens | Grid | Coordinates, start: int, length: int, num_axes: int, device: torch.device
) -> Coordinates:
    """Return ``length`` tokens of a segment from ``start`` on, as a table."""
    if isinstance(segment, Grid):
        return replace(segment, start=segment.start + start, length=length).explicit(device).explicit()
    if isinstance(segment, Coordinates):
        return segment.to(device).shard(start, length)
    at = torch.arange(length, dtype=torch.float64, device=device) + (start + (segment.start or 0))
    on = [segment.rule == "diagonal" or (segment.rule == "axis" and segment.axis == j) for j in range(num_axes)]
    skipped = torch.zeros(length, dtype=torch.bool, device=device) if segment.rule == "skip" else None
    return Coordinates(at[:, None] * torch.tensor(on, dtype=torch.float64, device=device), rotated=skipped)


def _samples(samples: Sequence[Grid | Coordinates], device: torch.device | str | None) -> list[Coordinates]:
    """Convert each sample to a table with one row per token, all on one device."""
    if isinstance(samples, (Grid, Coordinates, Tensor)) or not isinstance(samples, Iterable):
        raise TypeError(f"samples: expected a list with one layout per sample, got {describe_positions(samples)}")
    samples = list(samples)
    if not samples:
        raise ValueError("samples: expected at least one layout, got none")
    for i, sample in enumerate(samples):
        if not isinstance(sample, (Grid, Coordinates)):
            raise TypeError(f"samples: expected a Grid or Coordinates at index {i}, got {describe_positions(sample)}")
        _check_part("samples", sample, samples[0].num_axes, i)
    if device is None:
        device = next((s.coords.device for s in samples if isinstance(s, Coordinates)), "cpu")
    return [s.explicit(device).explicit() if isinstance(s, Grid) else s.to(device).explicit() for s in samples]


def _join(parts: Sequence[Coordinates]) -> Coordinates:
    """Concatenate tables of coordinates along the tokens."""
    mask = None
    if any(part.rotated is not None for part in parts):
        masks = [
            torch.ones_like(part.coords[..., 0], dtype=torch.bool) if part.rotated is None else part.rotated
            for part in parts
        ]
        mask = torch.cat(masks, dim=-1)
    coords = [part.coords for part in parts]
    if len({t.dtype for t in coords}) > 1:  # torch.cat would round integers to float32, and rejects some dtypes
        coords = [t.double() for t in coords]
    return Coordinates(torch.cat(coords, dim=-2), rotated=mask)
