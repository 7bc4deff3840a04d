"""Sequences of several parts, and batches of them: text, images, videos, each with positions of its own.

:func:`compose` lays out one sample, :func:`pack` and :func:`pad` put samples together, each with its own layout, so
that one call encodes them all. Lay out once a batch, not once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .coordinates import check_reach
from .positions import Coordinates, Grid

__all__ = ["After", "Packed", "Segment", "Tokens", "compose", "pack", "pad"]

RULES = ("skip", "zero", "axis", "diagonal")


@dataclass(frozen=True)
class Tokens:
    """Tokens that are on no grid: text, class tokens, registers, padding.

    Args:
        length: how many.
        rule: where they are.

            - ``"skip"``: nowhere: they are not rotated, and get no phase;
            - ``"zero"``: at the origin;
            - ``"axis"``: one after the other on one axis, at zero on the others;
            - ``"diagonal"``: one after the other on all axes at once.
        axis: the axis of ``"axis"``.
        start: position of the first one; None: the running position of the sequence.
    """

    length: int
    rule: Literal["skip", "zero", "axis", "diagonal"] = "skip"
    axis: int = 0
    start: float | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length: expected at least 0, got {self.length}")
        if self.rule not in RULES:
            raise ValueError(f"rule: expected one of {RULES}, got {self.rule!r}")


@dataclass(frozen=True)
class After:
    """A grid behind what came before it: the running position of the sequence is added to its positions.

    Args:
        grid: a grid, its positions from 0 on.
        axes: the axes on which it is behind; None: all.
    """

    grid: Grid
    axes: tuple[int, ...] | None = None


Segment = Tokens | Grid | After | Coordinates


class Packed(NamedTuple):
    """Samples end to end: positions of all tokens, and where each sample starts, (B + 1,) int32."""

    positions: Coordinates
    cu_seqlens: Tensor


def compose(
    *segments: Segment,
    num_axes: int | None = None,
    num_tokens: int | None = None,
    start: int = 0,
    length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Coordinates:
    """One sample from its parts, in the order of its tokens.

    A running position p goes along, from 0: :class:`Tokens` on an axis or on the diagonal that start at s leave it at
    s + length, a grid :class:`After` it at its own largest position on its axes plus 1 (or at p, where it is empty);
    plain grids and coordinates stand where they say, and don't move it.

    Args:
        segments: :class:`Tokens`, :class:`Grid` or :class:`Coordinates` (N, K) where they are, :class:`After` a grid
            that follows. Prefix and suffix of a grid are tokens that are not rotated.
        num_axes: K, where no grid says it.
        num_tokens: what the segments must add up to, where that is known.
        start: the first token of this shard of the sequence (sequence parallelism, decoding).
        length: tokens of the shard; default: up to the end.
        device, dtype: of the positions. float32 holds whole positions up to 2^24.

    Returns:
        coordinates (N, K), with a mask where some tokens are not rotated.

    Raises:
        ValueError: segments with different numbers of axes, lengths that don't add up, a shard beyond the end,
            positions beyond 2^24 in float32.
        TypeError: something else than a segment, another dtype.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: expected float32 or float64 (16 bits misplace far tokens), got {dtype}")
    num_axes = _num_axes(segments, num_axes)
    lengths = [_length(segment) for segment in segments]
    total, added = sum(lengths), " + ".join(map(str, lengths))
    if num_tokens is not None and total != num_tokens:
        raise ValueError(f"num_tokens: expected the segments to add up to {num_tokens}, got {added} = {total}")
    end = total if length is None else start + length
    if not 0 <= start <= end <= total:
        raise ValueError(
            f"start, length: expected a slice of the {total} tokens ({added}), got start={start}, length={length}"
        )
    device = torch.device(device)
    running, before = 0.0, 0
    parts = [Coordinates(torch.zeros(0, num_axes, dtype=dtype, device=device))]
    for i, (segment, count) in enumerate(zip(segments, lengths, strict=True)):
        placed, running = _place(segment, running, num_axes)
        if dtype == torch.float32:
            check_reach(_reach(placed), f" in segment {i}")
        first, last = max(start - before, 0), min(end - before, count)
        before += count
        if first < last:
            parts.append(_rows(placed, first, last - first, num_axes, device).to(dtype=dtype))
    return _join(parts)


def pack(samples: Sequence[Grid | Coordinates], device: torch.device | str | None = None) -> Packed:
    """Samples end to end, for x (1, H, N_1 + .. + N_B, D) and attention that takes cu_seqlens.

    Args:
        samples: one layout a sample, (N, K) each.
        device: of the result; default: that of the first coordinates, else the CPU.
    """
    rows = _samples(samples, device)
    ends = torch.tensor([0, *(part.num_tokens for part in rows)]).cumsum(0, dtype=torch.int32)
    return Packed(_join(rows), ends.to(rows[0].coords.device))


def pad(
    samples: Sequence[Grid | Coordinates],
    num_tokens: int | None = None,
    device: torch.device | str | None = None,
) -> Coordinates:
    """Samples side by side, for x (B, H, N, D): (B, N, K), those that are shorter padded at the end, unrotated.

    Args:
        samples: one layout a sample, (N, K) each.
        num_tokens: N; default: that of the longest.
        device: of the result; default: that of the first coordinates, else the CPU.
    """
    rows = _samples(samples, device)
    longest = max(part.num_tokens for part in rows)
    num_tokens = longest if num_tokens is None else num_tokens
    if num_tokens < longest:
        raise ValueError(f"num_tokens: expected at least {longest}, the longest sample, got {num_tokens}")
    padded = _join([replace(part, suffix=num_tokens - part.num_tokens).explicit() for part in rows])
    mask = None if padded.rotated is None else padded.rotated.unflatten(0, (len(rows), num_tokens))
    return Coordinates(padded.coords.unflatten(0, (len(rows), num_tokens)), rotated=mask)


def _num_axes(segments: Sequence[Segment], num_axes: int | None) -> int:
    for i, segment in enumerate(segments):
        if not isinstance(segment, Segment):
            raise TypeError(f"segments: expected Tokens, Grid, After or Coordinates, got {segment!r} as number {i}")
        if isinstance(segment, Tokens):
            continue
        found = segment.grid.num_axes if isinstance(segment, After) else segment.num_axes
        if num_axes is None:
            num_axes = found
        if found != num_axes:
            raise ValueError(f"segments: expected {num_axes} axes each, got {found} in number {i}")
    if num_axes is None:
        raise ValueError("num_axes: expected a number where no segment is a grid, got None")
    for i, segment in enumerate(segments):
        axes: tuple[int, ...] = ()
        if isinstance(segment, Tokens) and segment.rule == "axis":
            axes = (segment.axis,)
        elif isinstance(segment, After):
            axes = segment.axes or ()
        if any(not 0 <= axis < num_axes for axis in axes):
            raise ValueError(f"segments: expected axes from 0 to {num_axes - 1}, got {axes} in number {i}")
        if isinstance(segment, Coordinates) and segment.coords.ndim != 2:
            raise ValueError(f"segments: expected coords (N, K), got {tuple(segment.coords.shape)} in number {i}")
    return num_axes


def _length(segment: Segment) -> int:
    if isinstance(segment, Tokens):
        return segment.length
    return segment.grid.num_tokens if isinstance(segment, After) else segment.num_tokens


def _place(segment: Segment, running: float, num_axes: int) -> tuple[Tokens | Grid | Coordinates, float]:
    """The segment where it belongs, and the running position behind it."""
    if isinstance(segment, Tokens) and segment.rule in ("axis", "diagonal"):
        first = running if segment.start is None else segment.start
        return replace(segment, start=first), first + segment.length
    if not isinstance(segment, After):
        return segment, running
    axes = range(num_axes) if segment.axes is None else segment.axes
    placed = segment.grid.offset([running if axis in axes else 0.0 for axis in range(num_axes)])
    ends = _ends(placed)
    return placed, max((max(ends[axis]) + 1 for axis in axes), default=running) if ends else running


def _ends(grid: Grid) -> list[tuple[float, float]]:
    """First and last position on each axis; none for an empty grid."""
    if not grid.num_grid_tokens:
        return []
    affine = grid.affine(torch.device("cpu"))
    rows = [(1.0, 0.0)] * grid.num_axes if affine is None else affine.tolist()
    return [(shift, shift + scale * (n - 1)) for n, (scale, shift) in zip(grid.shape, rows, strict=True)]


def _reach(segment: Tokens | Grid | Coordinates) -> float:
    """The largest position that can be told without looking at a table."""
    if isinstance(segment, Tokens):
        return (segment.start or 0) + segment.length - 1
    return max((abs(s) for ends in _ends(segment) for s in ends), default=0) if isinstance(segment, Grid) else 0


def _rows(
    segment: Tokens | Grid | Coordinates, start: int, length: int, num_axes: int, device: torch.device
) -> Coordinates:
    """Tokens start, start + 1, .. of a segment, a row each."""
    if isinstance(segment, Grid):
        return replace(segment, start=segment.start + start, length=length).explicit(device).explicit()
    if isinstance(segment, Coordinates):
        return segment.to(device).shard(start, length)
    at = torch.arange(length, dtype=torch.float64, device=device) + (start + (segment.start or 0))
    on = [segment.rule == "diagonal" or (segment.rule == "axis" and segment.axis == j) for j in range(num_axes)]
    skipped = torch.zeros(length, dtype=torch.bool, device=device) if segment.rule == "skip" else None
    return Coordinates(at[:, None] * torch.tensor(on, dtype=torch.float64, device=device), rotated=skipped)


def _samples(samples: Sequence[Grid | Coordinates], device: torch.device | str | None) -> list[Coordinates]:
    """A table each, a row a token, on one device."""
    if not samples:
        raise ValueError("samples: expected at least one layout, got none")
    for i, sample in enumerate(samples):
        if not isinstance(sample, (Grid, Coordinates)):
            raise TypeError(f"samples: expected a Grid or Coordinates, got {type(sample).__name__} as number {i}")
        if isinstance(sample, Coordinates) and sample.coords.ndim != 2:
            raise ValueError(f"samples: expected coords (N, K), got {tuple(sample.coords.shape)} in number {i}")
        if sample.num_axes != samples[0].num_axes:
            raise ValueError(f"samples: expected {samples[0].num_axes} axes each, got {sample.num_axes} in number {i}")
    if device is None:
        device = next((s.coords.device for s in samples if isinstance(s, Coordinates)), "cpu")
    return [s.explicit(device).explicit() if isinstance(s, Grid) else s.to(device).explicit() for s in samples]


def _join(parts: Sequence[Coordinates]) -> Coordinates:
    """Tables end to end."""
    mask = None
    if any(part.rotated is not None for part in parts):
        mask = torch.cat([
            torch.ones_like(part.coords[..., 0], dtype=torch.bool) if part.rotated is None else part.rotated
            for part in parts
        ])  # fmt: skip
    return Coordinates(torch.cat([part.coords for part in parts]), rotated=mask)
