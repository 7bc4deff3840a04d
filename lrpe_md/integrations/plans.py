"""What a rotary function does, as data, and how a call is run by it: the caller's tables as views, given to rotate."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..functional import rotate

__all__ = ["EQUAL", "FEWER", "MORE", "Follow", "Plan", "Recipe", "Run", "Turn", "Unlike", "describe", "flatten",
           "prepare", "relate", "run"]  # fmt: skip

EQUAL, MORE, FEWER = "=", ">", "<"  # rows of the tables, compared with the tokens of an x


class Unlike(Exception):
    """The function computes something else; ``depth`` says how far the probe came before it noticed."""

    def __init__(self, depth: int, message: str) -> None:
        super().__init__(message)
        self.depth = depth


class Follow(NamedTuple):
    """A dimension of a table whose index is the place on an axis of x, or the integers of a leaf along these axes."""

    axes: tuple[int, ...]
    positions: int | None = None


class Run(NamedTuple):
    """Channels of cos or sin that lie in a row in a leaf (a tensor among the other arguments).

    index: for each dimension of the leaf a Follow, an integer, or a slice of channels as (start, stop, step).
    """

    leaf: int
    index: tuple[Any, ...]
    negated: bool = False


class Turn(NamedTuple):
    """How one tensor is turned by the leaves.

    cos, sin: runs, one after another; where they ``alternate``, each of the two has every other channel.
    axes: which of x's axes are batch, heads and tokens, the last along which tables vary; None for one that x lacks.
    rows: where the first token's row is: "start", "end" (rows and tokens end together), or "offset" (an argument says).
    heads: the width of a head, where x has all heads in its last dimension; 0 elsewhere.
    shuffle: None, or how pairs are regrouped before the rotation: x.unflatten(-1, shuffle).mT.
    """

    cos: tuple[Run, ...]
    sin: tuple[Run, ...]
    alternate: tuple[bool, bool]
    angles: bool
    inverse: bool
    pairs: Any
    span: tuple[int, int]
    shuffle: tuple[int, int] | None
    heads: int
    axes: tuple[int | None, int | None, int]
    rows: str

    def sizes(self, x: Tensor) -> tuple[int, ...]:
        """Return the sizes of x's axes: all dimensions but the channels."""
        return (*x.shape[:-1], x.shape[-1] // self.heads) if self.heads else tuple(x.shape[:-1])

    def follows(self) -> list[tuple[int, int, Follow]]:
        """Return the leaves and dimensions that follow something."""
        runs = (*self.cos, *self.sin)
        return [(run.leaf, dim, at) for run in runs for dim, at in enumerate(run.index) if isinstance(at, Follow)]


class Plan(NamedTuple):
    """What the function does with arguments of one kind; see :func:`describe`.

    relations: for each x a character, EQUAL, MORE or FEWER.
    form: how the outputs come: "tensor", "tuple" or "list", and for each output whether it is a tensor or None.
    broadcast_axes: axes of x along which a table may have one row for all.
    required_sizes: (leaf, dimension, axis of x or minus a number) of dimensions that have this size.
    grids: instead of turns, the leaves with sizes (B, 3) and a complex table (L, D/2); see :func:`_run_on_grids`.
    """

    turns: tuple[Turn, ...]
    relations: str
    form: tuple[str, tuple[bool, ...]]
    dtypes: tuple[torch.dtype, ...]
    broadcast_axes: tuple[int, ...] = ()
    required_sizes: tuple[tuple[int, int, int], ...] = ()
    detach_tables: bool = False
    ignores_autocast: bool = True
    grids: tuple[int, int] | None = None


# --- what kind of arguments -------------------------------------------------------------------------------------


def describe(value: Any, is_data: bool) -> Any:
    """Return what a plan depends on: nested tuples of constants; sizes of batch, heads and tokens are left out."""
    if isinstance(value, Tensor):
        return _describe_tensor(value, is_data)
    if type(value) in (tuple, list):
        return (type(value).__name__, *[describe(v, is_data) for v in value])
    if isinstance(value, (bool, float)):
        return ("value", type(value).__name__, value)  # as a key, 1 == 1.0 == True
    if isinstance(value, int):
        return operator.index(value)  # also where it is symbolic
    return value if value is None or isinstance(value, (str, torch.dtype)) else ("unknown",)


def _describe_tensor(t: Tensor, is_data: bool) -> tuple[Any, ...]:
    if t.dtype == torch.bool:
        return ("unknown",)
    kind, tail = "data" if is_data else "table", t.shape[-1:]
    if not (t.is_floating_point() or t.is_complex()):
        kind, tail = "integers", tail if t.ndim > 2 and t.shape[-1] < 5 else ()  # coordinates of a token
    elif not is_data and t.ndim > 1 and t.shape[-1] == 2:
        tail = t.shape[-3:] if t.ndim > 2 and t.shape[-2] == 2 else t.shape[-2:]
    return (kind, t.ndim, t.dtype, *[operator.index(n) for n in tail])


def flatten(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in flatten(v)] if type(value) in (tuple, list) else []


# --- a call by a plan ---------------------------------------------------------------------------------------------


def relate(plan: Plan, xs: list[Tensor], leaves: list[Tensor], offset: int = 0) -> str | None:
    """Return for each x whether the tables have as many rows as it has tokens; None for tables that don't fit."""
    if plan.grids is not None:
        sizes, table = (leaves[i] for i in plan.grids)
        fits = sizes.shape == (len(xs[0]), 3) and 2 * table.shape[1] == xs[0].shape[3] and table.device == xs[0].device
        return EQUAL if fits and table.is_complex() and not torch.compiler.is_compiling() else None
    for leaf, dim, size in plan.required_sizes:
        if leaves[leaf].shape[dim] != (-size if size < 0 else xs[0].shape[size]):
            return None
    relations = ""
    for x, turn in zip(xs, plan.turns, strict=True):
        sizes, rows, token = turn.sizes(x), _count_rows(turn, leaves), turn.axes[-1]
        if any(leaves[run.leaf].device != x.device for run in (*turn.cos, *turn.sin)):
            return None
        for axis, counts in rows.items():
            fits = all(n == sizes[axis] or (n == 1 and axis in plan.broadcast_axes) for n in counts)
            if not fits and (axis != token or any(n != counts[0] for n in counts)):
                return None
        spare = max(rows[token]) - sizes[token]
        if spare == 0 or (token in plan.broadcast_axes and max(rows[token]) == 1):
            relations += EQUAL
        elif turn.rows == "offset" and not 0 <= offset <= spare:
            return None
        else:
            relations += MORE if spare > 0 else FEWER
    return relations


def _count_rows(turn: Turn, leaves: list[Tensor]) -> dict[int, list[int]]:
    """Return how many rows each table has along the axes of x that it follows."""
    rows: dict[int, list[int]] = {}
    for leaf, dim, at in turn.follows():
        shape = leaves[leaf].shape[dim : dim + 1] if at.positions is None else leaves[at.positions].shape
        for axis, n in zip(at.axes, shape, strict=True):
            rows.setdefault(axis, []).append(n)
    return rows


class _View(NamedTuple):
    """How a run of channels is viewed: rows of a leaf by positions, then an index, then an order of dimensions."""

    leaf: int
    gathers: tuple[tuple[int, int], ...]
    at: tuple[Any, ...] | None
    order: tuple[int, ...] | None
    negated: bool


class _Side(NamedTuple):
    """How one x is viewed as (B, H, N, D), what rotates it, and how the output is viewed as x was.

    heads: the last dimension as heads and channels. index: with None for each new dimension. tokens: their number where
    the tables have one row for all, else 0.
    """

    turn: Turn
    sizes: tuple[int, ...]
    order: tuple[int, ...] | None
    index: tuple[Any, ...] | None
    cos: tuple[_View, ...]
    sin: tuple[_View, ...]
    tokens: int
    options: dict[str, Any]
    back_index: tuple[Any, ...] | None
    back_order: tuple[int, ...] | None


class Recipe(NamedTuple):
    """A plan for tensors of known sizes; ``launches`` says how many of them each launch has."""

    plan: Plan
    sides: tuple[_Side, ...]
    launches: tuple[int, ...]


def prepare(plan: Plan, xs: list[Tensor], leaves: list[Tensor], offset: int = 0) -> Recipe:
    """Work out the views of a call whose tensors :func:`relate` as the plan says."""
    sides = [_prepare_side(plan, turn, x, (leaves, offset)) for turn, x in zip(plan.turns, xs, strict=False)]
    launches: list[int] = []
    while (i := sum(launches)) < len(sides):
        launches.append(2 if i + 1 < len(sides) and _share_launch(plan, sides, xs, i) else 1)
    return Recipe(plan, tuple(sides), tuple(launches))


def _share_launch(plan: Plan, sides: list[_Side], xs: list[Tensor], i: int) -> bool:
    """Say whether two tensors that follow each other are turned alike, with sizes for one launch."""
    (batch, heads, tokens), (other_batch, other_heads, other_tokens) = sides[i].sizes, sides[i + 1].sizes
    same_dtypes = (plan.dtypes[i], xs[i].dtype) == (plan.dtypes[i + 1], xs[i + 1].dtype)
    same_sizes = batch == other_batch and tokens == other_tokens and heads % other_heads == 0
    return same_dtypes and same_sizes and plan.turns[i] == plan.turns[i + 1]


def _prepare_side(plan: Plan, turn: Turn, x: Tensor, others: tuple[list[Tensor], int]) -> _Side:
    leaves, offset = others
    sizes, axes, token = turn.sizes(x), turn.axes, turn.axes[-1]
    num_rows, num_tokens, prefix, kept = max(_count_rows(turn, leaves)[token]), sizes[token], 0, None
    is_one_row = num_rows == 1 and token in plan.broadcast_axes
    if num_rows > num_tokens:
        first = {"start": 0, "end": num_rows - num_tokens, "offset": offset}[turn.rows]
        kept = slice(first, first + num_tokens)
    elif turn.rows == "end" and not is_one_row:
        prefix = num_tokens - num_rows
    start, stop = turn.span
    rotary_dim = slice(start, stop) if start else stop if stop < (turn.heads or x.shape[-1]) else None
    order = [a for a in axes if a is not None]
    is_sorted = order == sorted(order)
    index = tuple(None if a is None else slice(None) for a in axes) if None in axes else None
    cos, sin = (tuple(_view_run(run, leaves, axes, kept) for run in runs) for runs in (turn.cos, turn.sin))
    return _Side(
        turn,
        tuple(1 if a is None else sizes[a] for a in axes),
        None if is_sorted else (*order, len(order)),
        index,
        cos,
        sin,
        num_tokens if is_one_row and num_tokens != 1 else 0,
        {"pairs": turn.pairs, "rotary_dim": rotary_dim, "prefix": prefix, "inverse": turn.inverse},
        None if index is None else tuple(0 if i is None else i for i in index),
        None if is_sorted else (*[order.index(a) for a in range(len(order))], len(order)),
    )


def _view_run(run: Run, leaves: list[Tensor], axes: tuple[int | None, ...], kept: slice | None) -> _View:
    """View a run of channels as (N, W), (B, N, W) or (B or 1, H, N, W)."""
    leaf, gathers = leaves[run.leaf], []
    index: list[Any] = []
    labels: list[Any] = []
    for dim, at in enumerate(run.index):
        if isinstance(at, Follow):
            if at.positions is not None:
                gathers.append((len(index), at.positions))
            index += [kept if at == ((axes[-1],), None) and kept else slice(None)] * len(at.axes)
            labels += at.axes
        elif isinstance(at, tuple):
            is_whole = at == (0, leaf.shape[dim] if dim < leaf.ndim else 2, 1)
            index.append(slice(None) if is_whole else slice(*at))
            labels.append("channels")
        else:
            index.append(at)
    # rotate takes tables without heads, and without batch and heads
    first_labels = list(axes[:2]) if axes[1] in labels else [a for a in axes[:1] if a in labels]
    target_labels = [*first_labels, axes[-1], "channels"]
    new_labels = [label for label in target_labels if label not in labels]
    index, labels = [*index, *[None] * len(new_labels)], [*labels, *new_labels]
    order = tuple(labels.index(label) for label in target_labels)
    is_plain = all(isinstance(i, slice) and i == slice(None) for i in index)
    return _View(
        run.leaf, tuple(gathers), None if is_plain else tuple(index), order if list(order) != sorted(order) else None,
        run.negated,
    )  # fmt: skip


def run(recipe: Recipe, xs: list[Tensor], leaves: list[Tensor], impl: Any = "auto") -> Any:
    """Turn xs as the function would have, with our kernel; None where values in the leaves are not what it takes."""
    plan = recipe.plan
    if plan.detach_tables:
        leaves = [t.detach() for t in leaves]
    if plan.grids is not None:
        return _run_on_grids(plan, xs[0], leaves, impl)
    outs: list[Any] = []
    for size in recipe.launches:
        done = len(outs)
        views = [_view_x(recipe.sides[i], xs[i], plan.dtypes[i]) for i in range(done, done + size)]
        side = recipe.sides[done]
        cos, sin = _lay(side.cos, side.turn.alternate[0], leaves), _lay(side.sin, side.turn.alternate[1], leaves)
        if side.turn.angles:
            wide = torch.float64 if cos.dtype == torch.float64 else torch.float32
            cos, sin = cos.to(wide).cos(), sin.to(wide).sin()
        if cos.shape != sin.shape:
            cos, sin = torch.broadcast_tensors(cos, sin)
        if side.tokens:
            shape = (*cos.shape[:-2], side.tokens, cos.shape[-1])
            cos, sin = cos.expand(shape), sin.expand(shape)
        ys = rotate(*views, tables=(cos, sin), impl=impl, **side.options)
        for y in (ys,) if size == 1 else ys:
            side = recipe.sides[len(outs)]
            if side.back_index is not None:
                y = y[side.back_index]
            if side.back_order is not None:
                y = y.permute(side.back_order)
            if side.turn.heads:
                y = y.flatten(-2)
            outs.append(y.to(plan.dtypes[len(outs)]))
    kind, is_tensor = plan.form
    if kind == "tensor":
        return outs[0]
    if not all(is_tensor):
        tensors = iter(outs)
        outs = [next(tensors) if p else None for p in is_tensor]
    return tuple(outs) if kind == "tuple" else outs


def _view_x(side: _Side, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > x.dtype.itemsize:
        x = x.to(dtype)
    if side.turn.heads:
        x = x.unflatten(-1, (-1, side.turn.heads))
    if side.order is not None:
        x = x.permute(side.order)
    if side.index is not None:
        x = x[side.index]
    if side.turn.shuffle is not None:
        start, stop = side.turn.span
        middle = x[..., start:stop].unflatten(-1, side.turn.shuffle).mT.flatten(-2)
        x = torch.cat((x[..., :start], middle, x[..., stop:]), -1) if stop - start < x.shape[-1] else middle
    return x


def _lay(views: tuple[_View, ...], alternate: bool, leaves: list[Tensor]) -> Tensor:
    parts = []
    for view in views:
        t = leaves[view.leaf]
        if t.is_complex():
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
    return torch.stack(parts, -1).flatten(-2) if alternate else torch.cat(parts, -1)


def _run_on_grids(plan: Plan, x: Tensor, leaves: list[Tensor], impl: Any) -> Tensor | None:
    """Rotate as Wan does: the first tokens of each sample are a grid (T, H, W) of its own, and the others pass."""
    sizes, table = (leaves[i] for i in cast(tuple[int, int], plan.grids))
    grids, width = sizes.tolist(), table.shape[1]
    if not all(0 < t * h * w <= x.shape[1] and max(t, h, w) <= len(table) for t, h, w in grids):
        return None
    parts = table.split([width - 2 * (width // 3), width // 3, width // 3], dim=1)
    heads_first = (x.to(plan.dtypes[0]) if plan.dtypes[0].itemsize > x.dtype.itemsize else x).transpose(1, 2)
    same, outs = all(each == grids[0] for each in grids), []
    for i, grid in enumerate(grids[:1] if same else grids):
        rows = [
            part[:n].view([-1 if a == axis else 1 for a in range(3)] + [part.shape[1]]).expand(*grid, -1)
            for axis, (part, n) in enumerate(zip(parts, grid, strict=True))
        ]
        sample, tables = heads_first if same else heads_first[i : i + 1], torch.cat(rows, -1).flatten(0, 2)
        outs.append(rotate(sample, tables=tables, pairs="interleaved", impl=impl))
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out.transpose(1, 2).to(plan.dtypes[0])
