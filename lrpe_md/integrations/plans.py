"""What a rotary function does, as data, and how a call is run by it: the caller's tables as views, given to rotate."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..functional import rotate

__all__ = [
    "EQUAL", "FEWER", "MORE", "Piece", "Plan", "Recipe", "Table", "Turn", "Unlike", "describe", "flatten", "prepare",
    "relate", "run",
]  # fmt: skip

EQUAL, MORE, FEWER = "=", ">", "<"  # rows of the tables, compared with the tokens of an x


class Unlike(Exception):
    """The function computes something else; ``depth`` says how far the probe came before it noticed."""

    def __init__(self, depth: int, message: str) -> None:
        super().__init__(message)
        self.depth = depth


class Piece(NamedTuple):
    """A run of channels of a table: an entry for each dimension, None for one that follows an axis of x."""

    leaf: int
    entries: tuple[Any, ...]  # None, an integer, or (start, stop, step) for the channels
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

    relations: for each x a character, EQUAL, MORE or FEWER.
    form: how the outputs come: "tensor", "tuple" or "list", and for each output whether it is a tensor or None.
    same_as_next: for each x whether the next one is turned as it is, and comes out in the same dtype if it went in so.
    broadcast_axes: axes of x along which a table may have one row for all.
    required_sizes: (leaf, dimension, axis of x or minus a number) of dimensions that have this size.
    """

    turns: tuple[Turn, ...]
    relations: str
    form: tuple[str, tuple[bool, ...]]
    same_as_next: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    broadcast_axes: tuple[int, ...] = ()
    required_sizes: tuple[tuple[int, int, int], ...] = ()
    detach_tables: bool = False
    ignores_autocast: bool = True


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


def relate(plan: Plan, xs: list[Tensor], leaves: list[Tensor], offset: int = 0) -> str | None:
    """Return for each x whether the tables have as many rows as it has tokens; None for tables that don't fit."""
    for leaf, dim, size in plan.required_sizes:
        if leaves[leaf].shape[dim] != (-size if size < 0 else xs[0].shape[size]):
            return None
    relations = ""
    for x, turn in zip(xs, plan.turns, strict=True):
        relation = _relate(plan, turn, x, (leaves, offset))
        if relation is None:
            return None
        relations += relation
    return relations


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
            if rows == tokens or (rows == 1 and source in plan.broadcast_axes):
                continue
            if source != token or (turn.rows == "offset" and not 0 <= offset <= rows - tokens):
                return None
            relation = MORE if rows > tokens else FEWER
    return relation


def _sizes(turn: Turn, x: Tensor) -> tuple[int, ...]:
    """The sizes of x's axes: all dimensions but the channels."""
    return (*x.shape[:-1], x.shape[-1] // turn.heads) if turn.heads else tuple(x.shape[:-1])


class _View(NamedTuple):
    """How a run of channels is viewed: rows of a leaf by positions, then an index, then an order of dimensions."""

    leaf: int
    is_complex: bool
    gathers: tuple[tuple[int, int], ...]
    at: tuple[Any, ...] | None
    order: tuple[int, ...] | None
    negated: bool


class _Side(NamedTuple):
    """How one x is viewed as (B, H, N, D), what rotates it, and how the output is viewed as x was.

    shape: with the heads as a dimension of their own. unsqueeze_index: with None for each new dimension. tokens: their
    number where the tables have one row for all, else 0.
    """

    shape: tuple[int, ...] | None
    order: tuple[int, ...] | None
    unsqueeze_index: tuple[Any, ...] | None
    shuffle: tuple[int, int] | None
    span: tuple[int, int]
    cos: tuple[_View, ...]
    sin: tuple[_View, ...]
    alternating: tuple[bool, bool]
    angles: bool
    tokens: int
    options: dict[str, Any]
    squeeze_index: tuple[Any, ...] | None
    back_order: tuple[int, ...] | None


class Recipe(NamedTuple):
    """A plan for tensors of known sizes; ``sizes`` says how many of them each launch has."""

    sides: tuple[_Side, ...]
    sizes: tuple[int, ...]
    form: tuple[str, tuple[bool, ...]]
    dtypes: tuple[torch.dtype, ...]
    detach_tables: bool
    ignores_autocast: bool


def prepare(plan: Plan, xs: list[Tensor], leaves: list[Tensor], offset: int = 0) -> Recipe:
    """Work out the views of a call whose tensors :func:`relate` as the plan says."""
    sides = [_prepare_side(plan, turn, x, (leaves, offset)) for turn, x in zip(plan.turns, xs, strict=True)]
    sizes: list[int] = []
    while (done := sum(sizes)) < len(sides):
        sizes.append(2 if done + 1 < len(sides) and _share_launch(plan, sides, xs, done) else 1)
    return Recipe(tuple(sides), tuple(sizes), plan.form, plan.dtypes, plan.detach_tables, plan.ignores_autocast)


def _share_launch(plan: Plan, sides: list[_Side], xs: list[Tensor], i: int) -> bool:
    """Say whether two tensors that follow each other are turned alike, with sizes for one launch."""
    (batch, heads, tokens), (other_batch, other_heads, other_tokens) = map(
        _viewed_sizes, sides[i : i + 2], xs[i : i + 2]
    )
    same = batch == other_batch and tokens == other_tokens and heads % other_heads == 0
    return same and plan.same_as_next[i] and xs[i].dtype == xs[i + 1].dtype


def _viewed_sizes(side: _Side, x: Tensor) -> list[int]:
    """Return B, H and N of x as it is viewed."""
    sizes = list(side.shape or x.shape)
    sizes = [sizes[i] for i in side.order] if side.order else sizes
    remaining = iter(sizes)
    return [1 if i is None else next(remaining) for i in side.unsqueeze_index] if side.unsqueeze_index else sizes[:3]


def _prepare_side(plan: Plan, turn: Turn, x: Tensor, others: tuple[list[Tensor], int]) -> _Side:
    leaves, offset = others
    sizes, count = _sizes(turn, x), x.ndim - 1  # of the axes; those beyond are heads in x's last dimension
    row_counts: dict[int, int] = {}  # axis -> rows of the tables
    for leaf, dims in turn.sources:
        for dim, source in enumerate(dims):
            if isinstance(source, tuple):
                row_counts.update({a: sizes[a] for a in source[2]})
            elif source is not None:
                row_counts[source] = max(leaves[leaf].shape[dim], row_counts.get(source, 1))
    outer_axes = [a for a in row_counts if a < count]
    token = max([a for a in outer_axes if a and (row_counts[a] != 1 or a not in plan.broadcast_axes)] or outer_axes)
    other_axes: list[int | None] = [a for a in range(len(sizes)) if a != token]
    if len(other_axes) == 1:  # batch where the tables vary along it, else heads
        by_batch = row_counts.get(cast(int, other_axes[0]), 1) != 1
        other_axes = [other_axes[0], None] if by_batch else [None, other_axes[0]]
    axes = (*([None] * (2 - len(other_axes))), *other_axes, token)
    rows, prefix, last = None, 0, sizes[token]
    if row_counts[token] > last:
        start = {"start": 0, "end": row_counts[token] - last, "offset": offset}[turn.rows]
        rows = slice(start, start + last)
    elif turn.rows == "end" and token not in plan.broadcast_axes:
        prefix = last - row_counts[token]
    start, stop = turn.span
    width = turn.heads or x.shape[-1]
    rotary_dim = slice(start, stop) if start else stop if stop < width else None
    axis_order = [a for a in axes if a is not None]
    order = tuple(axis_order) if axis_order != sorted(axis_order) else None
    unsqueeze_index = tuple(None if a is None else slice(None) for a in axes) if None in axes else None
    cos, sin = (tuple(_view_piece(p, turn, leaves, axes, rows) for p in table.pieces) for table in (turn.cos, turn.sin))
    return _Side(
        (*sizes, turn.heads) if turn.heads else None,
        None if order is None else (*order, len(order)),
        unsqueeze_index,
        turn.shuffle,
        turn.span,
        cos,
        sin,
        (turn.cos.alternating, turn.sin.alternating),
        turn.angles,
        last if row_counts[token] == 1 != last and token in plan.broadcast_axes else 0,
        {"pairs": turn.pairs, "rotary_dim": rotary_dim, "prefix": prefix, "inverse": turn.inverse},
        None if unsqueeze_index is None else tuple(0 if i is None else i for i in unsqueeze_index),
        None if order is None else (*[order.index(a) for a in range(len(order))], len(order)),
    )


def _view_piece(piece: Piece, turn: Turn, leaves: list[Tensor], axes: tuple[int | None, ...], rows: Any) -> _View:
    """View a run of channels of a leaf as (N, W), (B, N, W) or (B or 1, H, N, W)."""
    leaf = leaves[piece.leaf]
    gathers: list[tuple[int, int]] = []
    index: list[Any] = []
    labels: list[Any] = []
    for dim, (source, entry) in enumerate(zip(dict(turn.sources)[piece.leaf], piece.entries, strict=True)):
        if isinstance(source, tuple):
            gathers.append((len(index), source[1]))
            index += [slice(None)] * len(source[2])
            labels += source[2]
        elif source is not None:
            index.append(rows if rows is not None and source == axes[-1] else slice(None))
            labels.append(source)
        elif isinstance(entry, tuple):
            is_whole = entry == (0, leaf.shape[dim] if dim < leaf.ndim else 2, 1)
            index.append(slice(None) if is_whole else slice(*entry))
            labels.append("channels")
        else:
            index.append(entry)
    # rotate takes tables without heads, and without batch and heads
    first_labels = list(axes[:2]) if axes[1] in labels else [a for a in axes[:1] if a in labels]
    target_labels = [*first_labels, axes[-1], "channels"]
    new_labels = [label for label in target_labels if label not in labels]
    index, labels = [*index, *[None] * len(new_labels)], [*labels, *new_labels]
    order = tuple(labels.index(label) for label in target_labels)
    is_plain = all(isinstance(i, slice) and i == slice(None) for i in index)
    return _View(
        piece.leaf, leaf.is_complex(), tuple(gathers), None if is_plain else tuple(index),
        order if list(order) != sorted(order) else None, piece.negated,
    )  # fmt: skip


def run(recipe: Recipe, xs: list[Tensor], leaves: list[Tensor], impl: Any = "auto") -> Any:
    """Turn xs as the function would have, with our kernel, and return them as it would have."""
    if recipe.detach_tables:
        leaves = [t.detach() for t in leaves]
    outs: list[Any] = []
    for size in recipe.sizes:
        done = len(outs)
        views = [_view_x(recipe.sides[i], xs[i], recipe.dtypes[i]) for i in range(done, done + size)]
        side = recipe.sides[done]
        cos, sin = _lay(side.cos, side.alternating[0], leaves), _lay(side.sin, side.alternating[1], leaves)
        if side.angles:
            cos, sin = cos.to(_wide(cos)).cos(), sin.to(_wide(sin)).sin()
        if cos.shape != sin.shape:
            cos, sin = torch.broadcast_tensors(cos, sin)
        if side.tokens:
            shape = (*cos.shape[:-2], side.tokens, cos.shape[-1])
            cos, sin = cos.expand(shape), sin.expand(shape)
        ys = rotate(*views, tables=(cos, sin), impl=impl, **side.options)
        for y in (ys,) if size == 1 else ys:
            i = len(outs)
            if recipe.sides[i].squeeze_index is not None:
                y = y[recipe.sides[i].squeeze_index]
            if recipe.sides[i].back_order is not None:
                y = y.permute(recipe.sides[i].back_order)
            if recipe.sides[i].shape is not None:
                y = y.flatten(-2)
            outs.append(y.to(recipe.dtypes[i]))
    kind, is_tensor = recipe.form
    if kind == "tensor":
        return outs[0]
    if not all(is_tensor):
        tensors = iter(outs)
        outs = [next(tensors) if p else None for p in is_tensor]
    return tuple(outs) if kind == "tuple" else outs


def _view_x(side: _Side, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > x.dtype.itemsize:
        x = x.to(dtype)
    if side.shape is not None:
        x = x.unflatten(-1, side.shape[-2:])
    if side.order is not None:
        x = x.permute(side.order)
    if side.unsqueeze_index is not None:
        x = x[side.unsqueeze_index]
    if side.shuffle is not None:
        start, stop = side.span
        middle = x[..., start:stop].unflatten(-1, side.shuffle).mT.flatten(-2)
        x = torch.cat((x[..., :start], middle, x[..., stop:]), -1) if stop - start < x.shape[-1] else middle
    return x


def _lay(views: tuple[_View, ...], alternating: bool, leaves: list[Tensor]) -> Tensor:
    parts = []
    for view in views:
        t = leaves[view.leaf]
        if view.is_complex:
            t = torch.view_as_real(t.resolve_conj())
        for dim, positions in view.gathers:
            t = t[(*[slice(None)] * dim, leaves[positions])]
        if view.at is not None:
            t = t[view.at]
        if view.order is not None:
            t = t.permute(view.order)
        parts.append(-t if view.negated else t)
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, -1).flatten(-2) if alternating else torch.cat(parts, -1)


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
