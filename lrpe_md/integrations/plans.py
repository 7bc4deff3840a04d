"""What a rotary function does, as data, and how a call is run by it: the caller's tables as views, given to rotate."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..functional import rotate

__all__ = [
    "EQUAL", "FEWER", "MORE", "Piece", "Plan", "Table", "Turn", "Unlike", "describe", "flatten", "relate", "run_plan",
]  # fmt: skip

EQUAL, MORE, FEWER = "equal", "more", "fewer"  # rows of a table, compared with the tokens


class Unlike(Exception):
    """The function computes something else; ``depth`` says how far the probe came before it noticed."""

    def __init__(self, depth: int, message: str) -> None:
        super().__init__(message)
        self.depth = depth


class Piece(NamedTuple):
    """A run of channels of a table: an entry for each dimension, None for one that follows an axis of x."""

    leaf: int
    index: tuple[Any, ...]  # None, an integer, or (start, stop, step) for the channels
    negated: bool = False


class Table(NamedTuple):
    """Cos or sin as made of pieces, one after another, or two that alternate."""

    pieces: tuple[Piece, ...]
    alternating: bool


class Turn(NamedTuple):
    """How one tensor is turned by the leaves (the tensors among the other arguments).

    sources: for each leaf that is used and each of its dimensions: an axis of x, ("positions", leaf, axes), or None.
    axes: the axes of x along which the tables vary.
    heads: the width of a head, where x has all heads in its last dimension; 0 elsewhere.
    shuffle: 0, or how pairs are regrouped before the rotation: x.unflatten(-1, shuffle).mT.
    rows: where the first token's row is: "start", "end" (rows and tokens end together), or "offset" (an argument says).
    """

    cos: Table
    sin: Table
    angles: bool
    inverse: bool
    pairs: Any
    span: tuple[int, int]
    shuffle: tuple[int, int] | None
    heads: int
    sources: tuple[tuple[int, tuple[Any, ...]], ...]
    axes: tuple[int, ...]
    rows: str


class Plan(NamedTuple):
    """What the function does with arguments of one kind; see :func:`describe`.

    form: how the outputs come: "tensor", "tuple" or "list", and for each output whether it is a tensor or None.
    repeated: axes of x along which a table may have one row for all.
    fixed: (leaf, dimension, axis of x or minus a number) of dimensions that have this size.
    """

    turns: tuple[Turn, ...]
    relations: tuple[str, ...]
    form: tuple[str, tuple[bool, ...]]
    dtypes: tuple[torch.dtype, ...] = ()
    repeated: tuple[int, ...] = ()
    fixed: tuple[tuple[int, int, int], ...] = ()
    detach: bool = False
    autocast: bool = True


# --- what kind of arguments -------------------------------------------------------------------------------------


def describe(value: Any, is_data: bool) -> Any:
    """Return what a plan depends on: nested tuples of constants; sizes of batch, heads and tokens are left out."""
    if isinstance(value, Tensor):
        return _describe_tensor(value, is_data)
    if type(value) in (tuple, list):
        return (type(value).__name__, *[describe(v, is_data) for v in value])
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)  # also where it is symbolic
    if isinstance(value, (bool, float)):
        return ("value", type(value).__name__, value)  # as a key, 1 == 1.0 == True
    if value is None or isinstance(value, (str, torch.dtype)):
        return value
    return ("unknown",)


def _describe_tensor(t: Tensor, is_data: bool) -> tuple[Any, ...]:
    if t.dtype == torch.bool:
        return ("unknown",)
    if not (t.is_floating_point() or t.is_complex()):
        few = t.shape[-1:] if t.ndim > 2 and t.shape[-1] < 5 else ()  # coordinates of a token
        return ("integers", t.ndim, t.dtype, *[operator.index(n) for n in few])
    tail = t.shape[-1:]
    if not is_data and t.ndim > 1 and t.shape[-1] == 2:
        tail = t.shape[-3:] if t.ndim > 2 and t.shape[-2] == 2 else t.shape[-2:]
    return ("data" if is_data else "table", t.ndim, t.dtype, *[operator.index(n) for n in tail])


def flatten(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in flatten(v)] if type(value) in (tuple, list) else []


# --- a call by a plan ---------------------------------------------------------------------------------------------


def relate(plan: Plan, xs: list[Tensor], leaves: list[Tensor], offset: int = 0) -> tuple[str, ...] | None:
    """Return for each x whether the tables have as many rows as it has tokens; None for tables that don't fit."""
    for leaf, dim, size in plan.fixed:
        if leaves[leaf].shape[dim] != (-size if size < 0 else xs[0].shape[size]):
            return None
    found = []
    for x, turn in zip(xs, plan.turns, strict=True):
        relation = _relate(plan, turn, x, (leaves, offset))
        if relation is None:
            return None
        found.append(relation)
    return tuple(found)


def _relate(plan: Plan, turn: Turn, x: Tensor, others: tuple[list[Tensor], int]) -> str | None:
    leaves, offset = others
    sizes = _sizes(turn, x)
    token, relation = max([a for a in turn.axes if a < x.ndim - 1]), EQUAL
    for leaf, dims in turn.sources:
        if leaves[leaf].device != x.device:
            return None
        for dim, source in enumerate(dims):
            if source is None:
                continue
            if isinstance(source, tuple):
                if any(n != sizes[a] for n, a in zip(leaves[source[1]].shape, source[2], strict=True)):
                    return None
                continue
            rows, tokens = leaves[leaf].shape[dim], sizes[source]
            if rows == tokens or (rows == 1 and source in plan.repeated):
                continue
            if source != token or (turn.rows == "offset" and not 0 <= offset <= rows - tokens):
                return None
            relation = MORE if rows > tokens else FEWER
    return relation


def _sizes(turn: Turn, x: Tensor) -> tuple[int, ...]:
    """The sizes of x's axes: all dimensions but the channels."""
    return (*x.shape[:-1], x.shape[-1] // turn.heads) if turn.heads else tuple(x.shape[:-1])


class _Given(NamedTuple):
    """What one launch of rotate takes, and how its output goes back into the place of x."""

    x: Tensor
    tables: tuple[Tensor, Tensor]
    prefix: int
    axes: tuple[int | None, ...]


def run_plan(plan: Plan, xs: list[Tensor], leaves: list[Tensor], offset: int = 0, impl: Any = "auto") -> Any:
    """Turn xs as the function would have, with our kernel, and return them as it would have."""
    if plan.detach:
        leaves = [t.detach() for t in leaves]
    wide = [x.to(dtype) if dtype.itemsize > x.dtype.itemsize else x for x, dtype in zip(xs, plan.dtypes, strict=True)]
    given = [_arrange(plan, turn, x, (leaves, offset)) for turn, x in zip(plan.turns, wide, strict=True)]
    outs: list[Tensor] = []
    while len(outs) < len(given):
        first, turn = given[len(outs)], plan.turns[len(outs)]
        group = given[len(outs) : len(outs) + 2]
        if len(group) == 2 and not _goes_with(turn, first, plan.turns[len(outs) + 1], group[1]):
            group = group[:1]
        ys = rotate(
            *[g.x for g in group], tables=first.tables, pairs=turn.pairs, rotary_dim=_rotary_dim(turn, first.x),
            prefix=first.prefix, inverse=turn.inverse, impl=impl,
        )  # fmt: skip
        outs += [ys] if isinstance(ys, Tensor) else ys
    outs = [
        _put_back(g, turn, x, y).to(dtype)
        for g, turn, x, y, dtype in zip(given, plan.turns, xs, outs, plan.dtypes, strict=True)
    ]
    kind, present = plan.form
    filled = iter(outs)
    whole = [next(filled) if p else None for p in present]
    return whole[0] if kind == "tensor" else tuple(whole) if kind == "tuple" else whole


def _rotary_dim(turn: Turn, x: Tensor) -> int | slice | None:
    start, stop = turn.span
    if start == 0:
        return None if stop == x.shape[-1] else stop
    return slice(start, stop)


def _goes_with(a: Turn, first: _Given, b: Turn, second: _Given) -> bool:
    """Say whether two tensors can share a launch."""
    (batch, heads, tokens), (other_batch, other_heads, other_tokens) = first.x.shape[:3], second.x.shape[:3]
    if (a is not b and a != b) or first.axes != second.axes or first.prefix != second.prefix:
        return False
    if batch != other_batch or tokens != other_tokens or first.x.dtype != second.x.dtype:
        return False
    return heads == other_heads or (first.tables[0].shape[1] == 1 and heads % other_heads == 0)


def _arrange(plan: Plan, turn: Turn, x: Tensor, others_given: tuple[list[Tensor], int]) -> _Given:
    """View x as (B, H, N, D) and the tables as (B or 1, H or 1, N, W)."""
    leaves, offset = others_given
    sizes = _sizes(turn, x)
    varying = {}  # axis -> rows of the tables
    for leaf, dims in turn.sources:
        for dim, source in enumerate(dims):
            if isinstance(source, tuple):
                varying.update({a: sizes[a] for a in source[2]})
            elif source is not None:
                varying[source] = max(leaves[leaf].shape[dim], varying.get(source, 1))
    inside = [a for a in varying if a < x.ndim - 1]  # not the heads in x's last dimension
    several = [a for a in inside if a and (varying[a] != 1 or a not in plan.repeated)]
    token = max(several or inside)
    others: list[int | None] = [a for a in range(len(sizes)) if a != token]
    if len(others) == 1:
        others = [others[0], None] if varying.get(cast(int, others[0]), 1) != 1 else [None, others[0]]
    axes = (*([None] * (2 - len(others))), *others, token)
    rows, prefix = None, 0
    if varying[token] > sizes[token]:
        starts = {"start": 0, "end": varying[token] - sizes[token], "offset": offset}
        rows = slice(starts[turn.rows], starts[turn.rows] + sizes[token])
    elif turn.rows == "end" and token not in plan.repeated:
        prefix = sizes[token] - varying[token]
    cos, sin = (_lay_table(table, turn, leaves, axes, rows) for table in (turn.cos, turn.sin))
    if cos.shape != sin.shape:
        cos, sin = torch.broadcast_tensors(cos, sin)
    if turn.angles:
        cos, sin = cos.to(_wide(cos)).cos(), sin.to(_wide(sin)).sin()
    if varying[token] == 1 != sizes[token] and token in plan.repeated:
        cos, sin = cos.expand(-1, -1, sizes[token], -1), sin.expand(-1, -1, sizes[token], -1)
    if turn.heads:
        x = x.unflatten(-1, (-1, turn.heads))
    x = _permute(x, axes)
    if turn.shuffle is not None:
        start, stop = turn.span
        middle = x[..., start:stop].unflatten(-1, turn.shuffle).mT.flatten(-2)
        x = torch.cat((x[..., :start], middle, x[..., stop:]), -1) if stop - start < x.shape[-1] else middle
    return _Given(x, (cos, sin), prefix, axes)


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _permute(t: Tensor, axes: tuple[int | None, ...]) -> Tensor:
    """Bring the axes of x into this order, None for a new one; the channels stay last."""
    order = [a for a in axes if a is not None]
    if order != sorted(order):
        t = t.permute(*order, len(order))
    return t[tuple(None if a is None else slice(None) for a in axes)] if None in axes else t


def _put_back(given: _Given, turn: Turn, x: Tensor, y: Tensor) -> Tensor:
    """Return the output (B, H, N, D) in the shape of x."""
    order = [a for a in given.axes if a is not None]
    if None in given.axes:
        y = y[tuple(0 if a is None else slice(None) for a in given.axes)]
    if order != sorted(order):
        y = y.permute(*[order.index(a) for a in range(len(order))], len(order))
    return y.flatten(-2) if turn.heads else y


def _lay_table(table: Table, turn: Turn, leaves: list[Tensor], axes: tuple[int | None, ...], rows: Any) -> Tensor:
    views = [_lay_piece(piece, dict(turn.sources)[piece.leaf], leaves, axes, rows) for piece in table.pieces]
    if len(views) == 1:
        return views[0]
    return torch.stack(views, -1).flatten(-2) if table.alternating else torch.cat(views, -1)


def _lay_piece(
    piece: Piece, dims: tuple[Any, ...], leaves: list[Tensor], axes: tuple[int | None, ...], rows: Any
) -> Tensor:
    """View a run of channels of a leaf as (B or 1, H or 1, N, channels)."""
    t, index, labels = leaves[piece.leaf], [], []
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    for source, entry in zip(dims, piece.index, strict=True):
        if isinstance(source, tuple):
            t = t[(*[slice(None)] * len(index), leaves[source[1]])]
            index += [slice(None)] * len(source[2])
            labels += source[2]
        elif source is not None:
            index.append(rows if rows is not None and source == axes[-1] else slice(None))
            labels.append(source)
        elif isinstance(entry, tuple):
            index.append(slice(*entry))
            labels.append("channels")
        else:
            index.append(entry)
    t = t[tuple(index)]
    if "channels" not in labels:
        t, labels = t[..., None], [*labels, "channels"]
    wanted = [a for a in (*axes, "channels") if a in labels]
    if wanted != labels:
        t = t.permute([labels.index(a) for a in wanted])
    if len(wanted) < 4:
        t = t[tuple(slice(None) if a in labels else None for a in (*axes, "channels"))]
    return -t if piece.negated else t
