"""Plans that describe the effect of a rotary function as data, and calls that run them on the caller's tables."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..functional import rotate

__all__ = [
    "EQUAL", "FEWER", "MORE", "Follow", "PreparedCall", "RotationPlan", "Run", "Turn", "Unlike", "arrange", "describe",
    "prepare", "run_prepared",
]  # fmt: skip

EQUAL, MORE, FEWER = "=", ">", "<"  # how the number of table rows compares with the number of tokens in x


class Unlike(Exception):
    """Error for a function that computes something other than a supported rotation.

    ``depth`` is how far the probe got before this was clear.
    """

    def __init__(self, depth: int, message: str) -> None:
        super().__init__(message)
        self.depth = depth


class Follow(NamedTuple):
    """Dimension of a table, indexed by the position on an axis of x, or by a leaf's integers along ``axes``."""

    axes: tuple[int, ...]
    positions: int | None = None


class Run(NamedTuple):
    """Channels of cos or sin that one view of a leaf contains. A leaf is a tensor among the other arguments."""

    leaf: int
    follows: tuple[tuple[int, Follow], ...]  # dimensions of the leaf that follow an axis of x, or positions
    index: Any  # with order, views the channels as (N, W), (B, N, W) or (B or 1, H, N, W), after rows are gathered
    order: tuple[int, ...] | None
    negated: bool


class Turn(NamedTuple):
    """Rotation of one tensor by the tables. For ``pairs``, ``rotary_dim`` and ``inverse``, see :func:`rotate`."""

    cos: tuple[tuple[Run, ...], bool]  # runs in channel order, and whether two runs alternate from channel to channel
    sin: tuple[tuple[Run, ...], bool]
    angles: bool
    rows: str  # of the first token: "start", "end" (rows and tokens end together), or "offset" (an argument)
    heads: int  # width of a head if x has all heads in its last dimension, or else 0
    axes: tuple[int, ...]  # of x for batch, heads and tokens, along which tables vary; negative numbers are new axes
    index: Any  # with order, views x as (B, H, N, D)
    order: tuple[int, ...] | None
    back_order: tuple[int, ...] | None
    back_index: Any
    span: tuple[int, int]
    shuffle: tuple[int, int] | None  # shape for regrouping the channels of the span before the rotation
    pairs: Any
    rotary_dim: Any
    inverse: bool


class RotationPlan(NamedTuple):
    """Effect of the function on arguments of one kind (see :func:`describe`)."""

    turns: tuple[Turn, ...]
    like_next: tuple[bool, ...]  # whether each turn equals the next; some versions of Dynamo can't compare slices
    relations: str  # one character for each x
    form: tuple[str, tuple[bool, ...]]  # "tensor", "tuple" or "list", and whether each output is a tensor or None
    dtypes: tuple[torch.dtype, ...]
    broadcast_axes: tuple[int, ...] = ()  # axes of x along which a table may have a single row for all tokens
    same_lengths: bool = False  # whether all x with the same relation must have equally many tokens
    required_sizes: tuple[tuple[int, int, int], ...] = ()  # (leaf, dimension, axis of x with this size, or minus it)
    detach_tables: bool = False
    ignores_autocast: bool = True
    grids: tuple[int, int] | None = None  # instead of turns: leaves for sizes (B, 3) and a complex table (L, D/2)


def describe(value: Any, is_data: bool) -> Any:
    """Describe an argument as nested tuples of constants, without the sizes of batch, heads and tokens."""
    if isinstance(value, Tensor):
        kind, tail = "data" if is_data else "table", value.shape[-1:]
        if not (value.is_floating_point() or value.is_complex()):
            few = value.ndim > 2 and value.shape[-1] < 5  # coordinates of a token
            kind, tail = "unknown" if value.dtype == torch.bool else "integers", tail if few else ()
        elif not is_data and value.ndim > 1 and value.shape[-1] == 2:
            tail = value.shape[-3:] if value.ndim > 2 and value.shape[-2] == 2 else value.shape[-2:]
        return (kind, value.ndim, value.dtype, *[operator.index(n) for n in tail])
    if type(value) in (tuple, list):
        return (type(value).__name__, *[describe(v, is_data) for v in value])
    if isinstance(value, (bool, float)):
        return ("value", type(value).__name__, value)  # keys need the type, because 1 == 1.0 == True
    if isinstance(value, int):
        return operator.index(value)  # makes symbolic integers constant
    return value if value is None or isinstance(value, (str, torch.dtype)) else ("unknown",)


class _Side(NamedTuple):
    """Sizes of one x, as (B, H, N), and of its tables."""

    sizes: tuple[int, ...]
    kept: tuple[int, int] | None  # first row and number of rows to use if the tables have more rows than x has tokens
    tokens: int | None  # number of tokens if the tables have a single row for all tokens, or else None
    prefix: int


class PreparedCall(NamedTuple):
    plan: RotationPlan
    relations: str  # at these sizes; if they differ from the plan's, these sizes need another plan
    sides: tuple[_Side, ...] = ()
    launches: tuple[int, ...] = ()  # number of tensors in each launch


def arrange(index: Sequence[Any], labels: Sequence[Any], target: Sequence[Any]) -> tuple[Any, tuple[int, ...] | None]:
    """Return an index and a permutation (or None) that arrange labelled dimensions like the target."""
    new = [label for label in target if label not in labels]
    items, order = [*[None] * len(new), *index], tuple([*new, *labels].index(label) for label in target)
    if [label for label in target if label in labels] == list(labels):  # the index alone can add new ones in place
        rest, items, order = list(index), [], None
        for label in target:
            while label in labels and isinstance(rest[0], int):
                items.append(rest.pop(0))
            items.append(rest.pop(0) if label in labels else None)
        items += rest
    while items and items[-1] == slice(None):
        items.pop()
    return tuple(items) or None, order


def prepare(plan: RotationPlan, xs: list[Tensor], leaves: list[Tensor], offset: int = 0) -> PreparedCall | None:
    """Prepare a call with tensors of these sizes. Return None if the tables don't fit."""
    if plan.grids is not None:
        sizes, table = (leaves[i] for i in plan.grids)
        fits = sizes.shape == (len(xs[0]), 3) and 2 * table.shape[1] == xs[0].shape[3] and table.device == xs[0].device
        return PreparedCall(plan, EQUAL) if fits and not torch.compiler.is_compiling() else None
    for leaf, dim, size in plan.required_sizes:
        if leaves[leaf].shape[dim] != (-size if size < 0 else xs[0].shape[size]):
            return None
    relations, sides = "", []
    for x, turn in zip(xs, plan.turns, strict=True):
        sizes = (*x.shape[:-1], x.shape[-1] // turn.heads) if turn.heads else tuple(x.shape[:-1])
        token, rows = turn.axes[-1], cast(dict[int, list[int]], {})
        for leaf, follows in [each[:2] for each in (*turn.cos[0], *turn.sin[0])]:
            if leaves[leaf].device != x.device:
                return None
            for dim, at in follows:
                shape = leaves[leaf].shape[dim : dim + 1] if at.positions is None else leaves[at.positions].shape
                for axis, n in zip(at.axes, shape, strict=True):
                    rows.setdefault(axis, []).append(n)
        for axis, counts in rows.items():
            fits = all(n == sizes[axis] or (n == 1 and axis in plan.broadcast_axes) for n in counts)
            if not fits and (axis != token or any(n != counts[0] for n in counts)):
                return None
        num_rows, num_tokens = max(rows[token]), sizes[token]
        is_one_row = num_rows == 1 and token in plan.broadcast_axes
        spare = 0 if is_one_row else num_rows - num_tokens
        if turn.rows == "offset" and spare and not 0 <= offset <= spare:
            return None
        relations += EQUAL if spare == 0 else MORE if spare > 0 else FEWER
        kept = ({"start": 0, "end": spare, "offset": offset}[turn.rows], num_tokens) if spare > 0 else None
        prefix = -spare if spare < 0 and turn.rows == "end" else 0
        viewed = tuple(1 if a < 0 else sizes[a] for a in turn.axes)
        sides.append(_Side(viewed, kept, num_tokens if is_one_row and num_tokens != 1 else None, prefix))
    if plan.same_lengths and relations == plan.relations:
        lengths: dict[str, int] = {}  # compared without a set, which would make dynamic sizes constant
        for relation, side in zip(relations, sides, strict=True):
            if lengths.setdefault(relation, side.sizes[-1]) != side.sizes[-1]:
                return None
    launches: list[int] = []
    while (i := sum(launches)) < len(sides):
        launches.append(1)
        if plan.like_next[i] and plan.dtypes[i] == plan.dtypes[i + 1]:
            (batch, heads, tokens), (other_batch, other_heads, other_tokens) = sides[i].sizes, sides[i + 1].sizes
            same_sizes = batch == other_batch and tokens == other_tokens and heads % other_heads == 0
            launches[-1] += same_sizes and xs[i].dtype == xs[i + 1].dtype
    return PreparedCall(plan, relations, tuple(sides), tuple(launches))


def run_prepared(recipe: PreparedCall, xs: list[Tensor], leaves: list[Tensor], impl: Any = "auto") -> Any:
    """Rotate xs as the function would, but with our kernel. Return None if the kernel can't use the leaves' values."""
    plan = recipe.plan
    if plan.detach_tables:
        leaves = [t.detach() for t in leaves]
    if plan.grids is not None:
        return _run_on_grids(plan, xs[0], leaves, impl)
    outs: list[Any] = []
    for size in recipe.launches:
        done = len(outs)
        turn, side = plan.turns[done], recipe.sides[done]
        views = [_view_x(plan.turns[i], xs[i], plan.dtypes[i]) for i in range(done, done + size)]
        cos = _lay(turn.cos, turn.axes[-1], side.kept, leaves)
        sin = _lay(turn.sin, turn.axes[-1], side.kept, leaves)
        if turn.angles:
            wide = torch.float64 if cos.dtype == torch.float64 else torch.float32
            cos, sin = cos.to(wide).cos(), sin.to(wide).sin()
        if cos.shape != sin.shape:
            cos, sin = torch.broadcast_tensors(cos, sin)
        if side.tokens is not None:
            shape = (*cos.shape[:-2], side.tokens, cos.shape[-1])
            cos, sin = cos.expand(shape), sin.expand(shape)
        ys = rotate(
            *views, tables=(cos, sin), prefix=side.prefix, pairs=turn.pairs, rotary_dim=turn.rotary_dim,
            inverse=turn.inverse, impl=impl,
        )  # fmt: skip
        for y in (ys,) if size == 1 else ys:
            turn = plan.turns[len(outs)]
            if turn.back_order is not None:
                y = y.permute(turn.back_order)
            if turn.back_index is not None:
                y = y[turn.back_index]
            if turn.heads:
                y = y.flatten(-2)
            outs.append(y.to(plan.dtypes[len(outs)]))
    kind, is_tensor = plan.form
    if kind == "tensor":
        return outs[0]
    if not all(is_tensor):
        tensors = iter(outs)
        outs = [next(tensors) if p else None for p in is_tensor]
    return tuple(outs) if kind == "tuple" else outs


def _view_x(turn: Turn, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > x.dtype.itemsize:
        x = x.to(dtype)
    if turn.heads:
        x = x.unflatten(-1, (-1, turn.heads))
    if turn.index is not None:
        x = x[turn.index]
    if turn.order is not None:
        x = x.permute(turn.order)
    if turn.shuffle is not None:
        start, stop = turn.span
        middle = x[..., start:stop].unflatten(-1, turn.shuffle).mT.flatten(-2)
        x = torch.cat((x[..., :start], middle, x[..., stop:]), -1) if stop - start < x.shape[-1] else middle
    return x


def _lay(table: tuple[tuple[Run, ...], bool], token: int, kept: tuple[int, int] | None, leaves: list[Tensor]) -> Tensor:
    """Return cos or sin, assembled from views of the caller's tensors."""
    parts = []
    for run in table[0]:
        t = leaves[run.leaf]
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        for dim, at in run.follows[::-1]:
            if at.positions is not None:
                t = t[(*[slice(None)] * dim, leaves[at.positions])]
            elif kept is not None and at.axes[0] == token:
                t = t.narrow(dim, *kept)
        if run.index is not None:
            t = t[run.index]
        if run.order is not None:
            t = t.permute(run.order)
        parts.append(-t if run.negated else t)
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, -1).flatten(-2) if table[1] else torch.cat(parts, -1)


def _run_on_grids(plan: RotationPlan, x: Tensor, leaves: list[Tensor], impl: Any) -> Tensor | None:
    """Rotate as Wan does. The first tokens of each sample form a grid (T, H, W). The other tokens are not rotated."""
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
        outs.append(rotate(sample, tables=tables, prefix=0, pairs="interleaved", impl=impl))
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out.transpose(1, 2).to(plan.dtypes[0])
