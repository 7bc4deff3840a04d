"""Find out what a rotary function computes, by calling it with small tensors.

Tables get entries that are all different. Where x is one on one channel of each pair and zero on the other, the output
is the entry that multiplied it, which says where in the tables cos and sin of that channel are taken from.
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .plans import EQUAL, FEWER, MORE, Piece, Plan, Table, Turn, Unlike, flatten, prepare, relate, run

__all__ = ["Probe", "find_plan", "quietly"]

_AXES = {1: (5,), 2: (3, 5), 3: (2, 3, 5)}  # sizes of x's axes in the first probe
_OTHERS = {
    1: [(3,), (1,)],
    2: [(5, 3), (4, 4), (1, 5), (3, 1), (1, 1)],
    3: [(5, 2, 3), (3, 3, 3), (1, 3, 5), (2, 1, 5), (2, 3, 1), (1, 1, 1)],
}
_ANY_SHAPES = (
    (1, 1, 1, 1),
    (4, 3, 2, 5),
    (2, 7, 3, 2),
    (3, 2, 4, 3),
    (7, 4, 7, 4),
)  # of tensors that a function may not read
_MOST_ENTRIES = 2**20  # of all tables; an entry is then exact in float32
_MOST_LAYOUTS = 300


def quietly(run: Callable[[], Any]) -> Any:
    """Call ``run`` in a thread of its own, which has no autocast, modes, transforms or compiler of the caller's.

    The default dtype is float32 meanwhile, and the random state is left as it was.
    """
    result: list[Any] = []
    error: list[BaseException] = []

    def body() -> None:
        dtype, state = torch.get_default_dtype(), torch.get_rng_state()
        try:
            torch.set_default_dtype(torch.float32)
            compiler = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing it takes seconds
            stance = torch.compiler.set_stance("force_eager") if compiler else nullcontext()
            with warnings.catch_warnings(), stance, torch.no_grad():
                warnings.simplefilter("ignore")
                result.append(run())
        except BaseException as e:  # raised again where quietly was called
            error.append(e)
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(state)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return result[0]


# --- arguments from their description -------------------------------------------------------------------------------


def described(entry: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the descriptions of tensors in the description of an argument, in the order of ``flatten``."""
    if isinstance(entry, tuple) and entry:
        if entry[0] in ("data", "table", "integers", "owned"):
            yield entry
        elif entry[0] in ("tuple", "list"):
            for e in entry[1:]:
                yield from described(e)


def rebuild(entry: Any, tensors: Iterator[Tensor], offset: int | None) -> Any:
    """Make an argument from its description and the tensors that it takes."""
    if not isinstance(entry, tuple):
        return entry
    if entry[0] in ("data", "table", "integers"):
        return next(tensors)
    if entry[0] == "offset":
        return offset
    if entry[0] == "value":
        return entry[2]
    if entry[0] not in ("tuple", "list"):
        raise Unlike(0, "takes an argument that is neither a tensor nor a number")
    values = [rebuild(e, tensors, offset) for e in entry[1:]]
    return values if entry[0] == "list" else tuple(values)


class Sizes(NamedTuple):
    """Sizes of one probe: axes of each x, and the shape of each leaf."""

    xs: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[int, ...], ...]


class Probe:
    """A function with arguments of one kind: called with tensors in the places of theirs."""

    def __init__(self, call: Callable[..., Any], key: tuple[Any, ...]) -> None:
        """``call(values, owned)`` takes the arguments in order, and the tensors in place of an object's own."""
        self.call, self.key = call, key
        self.offset = 1 if ("offset",) in key else None
        everything = [e for entry in key for e in described(entry)]
        self.data = [e for e in everything if e[0] == "data"]
        self.leaves = [e for e in everything if e[0] != "data"]
        self.num_owned = sum(e[0] == "owned" for e in everything)
        self.form: tuple[str, tuple[bool, ...]] = ("tensor", ())
        if not self.data:
            raise Unlike(0, "takes no tensor to turn")
        if len({e[1] for e in self.data}) > 1 or self.data[0][1] not in (2, 3, 4) or any(e[3] < 2 for e in self.data):
            raise Unlike(0, "takes tensors of a rank that is not 2, 3 or 4, or of different ranks")
        self.num_axes = self.data[0][1] - 1

    def run(self, xs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        """Call the function and return its outputs."""
        inner = len(leaves) - self.num_owned
        out = self.call(self.arguments(xs, leaves), leaves[inner:])
        kind = "tensor" if isinstance(out, Tensor) else type(out).__name__
        items = [out] if kind == "tensor" else list(out) if kind in ("tuple", "list") else [()]
        if not all(o is None or isinstance(o, Tensor) for o in items):
            raise Unlike(1, f"returns {type(out).__name__}, not tensors")
        outs = [o for o in items if o is not None]
        if [o.shape for o in outs] != [x.shape for x in xs]:
            got = ", ".join(str(tuple(o.shape)) for o in outs)
            raise Unlike(1, f"returns shapes {got} for inputs of {', '.join(str(tuple(x.shape)) for x in xs)}")
        self.form = kind, tuple(o is not None for o in items)
        return outs

    def arguments(self, xs: list[Tensor], leaves: list[Tensor]) -> list[Any]:
        """Return the arguments of a call with these tensors."""
        of_data, of_leaves = iter(xs), iter(leaves)
        values = []
        for entry in self.key:
            if not (isinstance(entry, tuple) and entry and entry[0] in ("owned", "settings")):
                is_data = any(e[0] == "data" for e in described(entry))
                values.append(rebuild(entry, of_data if is_data else of_leaves, self.offset))
        return values

    def inputs(self, sizes: Sizes, seed: int, like_key: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return random tensors of these sizes, float32 or in the dtypes of the key."""
        g = torch.Generator().manual_seed(seed)
        xs = [torch.randn(*s, e[3], generator=g) for s, e in zip(sizes.xs, self.data, strict=True)]
        leaves = []
        for e, shape in zip(self.leaves, map(torch.Size, sizes.leaves), strict=True):
            if e[0] == "integers":
                mixed = torch.rand(shape, generator=g).flatten().argsort() % 5 + (shape.numel() == 1) * (1 + seed % 3)
                leaves.append(mixed.reshape(shape).to(e[2]))
            else:
                parts = torch.rand(*shape, 2, generator=g) * 2 - 1
                leaves.append(torch.view_as_complex(parts) if e[2].is_complex else parts[..., 0])
        if like_key:
            xs = [x.to(e[2]) for x, e in zip(xs, self.data, strict=True)]
            leaves = [t if e[0] == "integers" else t.to(e[2]) for t, e in zip(leaves, self.leaves, strict=True)]
        return xs, leaves


# --- sizes to try ---------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Shapes of the leaves, and how many rows they have.

    labels: for each leaf and dimension the axis of x whose size it has, or minus the size.
    token: the axis along which the tables may have more or fewer rows than x has tokens.
    rows: their number where an object owns the tables.
    """

    labels: tuple[tuple[int, ...], ...]
    relations: tuple[str, ...]
    token: int
    rows: int | None = None

    def sizes(self, axes: tuple[int, ...], single: int | None = None, shared: int | None = None) -> Sizes:
        """Return shapes; one row along the axis ``single``; twice as many heads of the first x along ``shared``."""
        token, rows = axes[self.token], self.num_rows(axes)
        of_relation = {EQUAL: rows, MORE: token if token < rows else rows - 1, FEWER: rows + 2}
        tables = [rows if a == self.token else n for a, n in enumerate(axes)]
        if single is not None:
            tables[single] = 1
        xs = []
        for i, relation in enumerate(self.relations):
            x = [of_relation[relation] if a == self.token else n for a, n in enumerate(axes)]
            if shared is not None and i == 0:
                x[shared] *= 2
            xs.append(tuple(x))
        leaves = tuple(tuple(tables[a] if a >= 0 else -a for a in labels) for labels in self.labels)
        return Sizes(tuple(xs), leaves)

    def num_rows(self, axes: tuple[int, ...]) -> int:
        return self.rows or axes[self.token] + (0 if set(self.relations) == {EQUAL} else 2)


def leading_labels(count: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """Yield labels for the dimensions of a table that are not channels: axes of x in order, or 1."""
    if count == 0:
        yield ()
    for used in range(min(count, num_axes), 0, -1):
        for chosen in itertools.combinations(range(num_axes - 1, -1, -1), used):
            for places in itertools.combinations(range(count), used):
                yield tuple(sorted(chosen)[places.index(i)] if i in places else -1 for i in range(count))


def labels_of_leaf(probe: Probe, entry: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
    """Yield labels for a leaf without its channels, also with a first dimension of sections, or of cos and sin."""
    count, num_axes = entry[1] - len(entry[3:]), probe.num_axes
    for e in probe.key:
        if count > 1 and isinstance(e, tuple) and e[0] == "list" and type(e[1]) is int:
            yield from ((1 - len(e), *rest) for rest in leading_labels(count - 1, num_axes))
    yield from leading_labels(count, num_axes)
    if count > 1:
        yield from ((-2, *rest) for rest in leading_labels(count - 1, num_axes))
    yield from head_labels(probe, entry)


def head_labels(probe: Probe, entry: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Labels of a table with a dimension of heads, where x has all heads in its last dimension."""
    if probe.num_axes != 2 or entry[1] - len(entry[3:]) != 3 or entry[0] != "table":
        return []
    heads = [probe.data[0][3] // n for n in (2 * entry[3], entry[3]) if probe.data[0][3] % n == 0]
    return [labels for n in heads for labels in ((0, -n, 1), (0, 1, -n))]


def layouts(probe: Probe, relations: tuple[str, ...]) -> Iterator[Layout]:
    """Yield shapes for the first probe, likely ones first."""
    groups = list(dict.fromkeys(e for e in probe.leaves if e[0] != "owned"))
    options = [list(labels_of_leaf(probe, e)) for e in groups]
    owned = {n for e in probe.leaves if e[0] == "owned" for n in e[1][:-1]}
    backwards = range(probe.num_axes - 1, -1, -1)
    for chosen in itertools.islice(itertools.product(*options), _MOST_LAYOUTS):
        labels_of = dict(zip(groups, chosen, strict=True))
        labels = tuple(
            tuple(-n for n in e[1]) if e[0] == "owned" else (*labels_of[e], *[-n for n in e[3:]]) for e in probe.leaves
        )
        if owned:
            yield from (Layout(labels, relations, a, rows) for a in backwards for rows in sorted(owned, reverse=True))
        elif set(relations) == {EQUAL}:
            yield Layout(labels, relations, probe.num_axes - 1)
        else:
            yield from (Layout(labels, relations, a) for a in backwards if any(a in each for each in labels))


# --- reading one probe ----------------------------------------------------------------------------------------------


class Codes(NamedTuple):
    """Which entries of the tables multiply x: numbers of entries (axes of x, rotated channels), and signs of sin.

    first: which channels are the first of a pair. box: for each axis of x, the tokens that are rotated.
    """

    cos: Tensor
    sin: Tensor
    negative: Tensor
    first: Tensor
    angles: bool
    box: tuple[slice, ...]


def coded_leaves(probe: Probe, sizes: Sizes) -> list[Tensor]:
    """Return tables whose entries are all different, and random integers."""
    _, leaves = probe.inputs(sizes, 0)
    reals = [torch.view_as_real(t) if t.is_complex() else t for t in leaves if not is_integers(t)]
    numbers = torch.arange(sum(t.numel() for t in reals)).split([t.numel() for t in reals])
    step = code_step(leaves)
    coded = iter([(0.5 + n * step).reshape(t.shape) for n, t in zip(numbers, reals, strict=True)])
    out = []
    for t in leaves:
        entries = t if is_integers(t) else next(coded)
        out.append(torch.view_as_complex(entries) if t.is_complex() else entries)
    return out


def is_integers(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


def code_step(leaves: list[Tensor]) -> float:
    """Return the difference of entries that follow each other: a power of two, so that all are in [0.5, 1)."""
    total = sum(t.numel() * (1 + t.is_complex()) for t in leaves if not is_integers(t))
    if total > _MOST_ENTRIES:
        raise Unlike(0, f"reads tables of more than {_MOST_ENTRIES} entries")
    return 0.5 ** (1 + max(total - 1, 1).bit_length())


def read_turns(probe: Probe, layout: Layout) -> tuple[Turn, ...]:
    """Call the function with entries that are all different, and read how it turns each of its tensors.

    Raises:
        Unlike: not a rotation by entries of the tables.
    """
    sizes = layout.sizes(_AXES[probe.num_axes])
    leaves = coded_leaves(probe, sizes)
    xs, _ = probe.inputs(sizes, 1)
    copies = [t.clone() for t in (*xs, *leaves)]
    outs = probe.run(xs, leaves)
    if any(not torch.equal(a, b) for a, b in zip((*xs, *leaves), copies, strict=True)):
        raise Unlike(3, "changes its arguments in place")
    if any(not torch.equal(a, b) for a, b in zip(outs, probe.run(xs, leaves), strict=True)):
        raise Unlike(3, "is random: two calls with the same arguments differ")
    outs = [o.to(x.dtype) for o, x in zip(outs, xs, strict=True)]
    spans = [find_span(x, o) for x, o in zip(xs, outs, strict=True)]
    zeros = [torch.zeros_like(x) for x in xs]
    if any(o.any() for o in probe.run(zeros, leaves)):
        raise Unlike(3, "adds something that does not depend on x")
    ones = [at_channels(z, [start]) for z, (start, _) in zip(zeros, spans, strict=True)]
    distances = [find_distance(o, span) for o, span in zip(probe.run(ones, leaves), spans, strict=True)]
    failure = Unlike(0, "")
    for grouping in ("same", "interleaved", "half"):
        try:
            return _read_grouped(probe, layout, (zeros, leaves), (spans, distances), grouping)
        except Unlike as e:
            failure = max(failure, e, key=lambda e: e.depth)
    raise failure


def find_span(x: Tensor, out: Tensor) -> tuple[int, int]:
    """Return the first channel that is changed, and the one after the last."""
    if not out.isfinite().all():
        raise Unlike(2, "returns numbers that are not finite")
    changed = (x != out).flatten(0, -2).any(0).nonzero().flatten().tolist()
    if not changed:
        raise Unlike(3, "returns x as it was")
    start, stop = changed[0], changed[-1] + 1
    if (stop - start) % 2:
        raise Unlike(3, f"changes {stop - start} channels, which are not pairs")
    return start, stop


def at_channels(zeros: Tensor, channels: Any) -> Tensor:
    t = zeros.clone()
    t[..., channels] = 1
    return t


def find_distance(out: Tensor, span: tuple[int, int]) -> int:
    """Return how far apart the channels of a pair are, from the output for x that has one channel."""
    start, stop = span
    hit = out.flatten(0, -2).any(0).nonzero().flatten().tolist()
    if len(hit) == 1:
        does = "scales" if hit[0] == start else "moves"
        raise Unlike(4, f"{does} channels, without turning pairs of them")
    distance = hit[1] - hit[0] if len(hit) == 2 else 0
    if not distance or hit[0] != start or (stop - start) % (2 * distance):
        raise Unlike(
            4, f"mixes channel {start} into {len(hit)} channels, {hit[:4]}, which is not a pair of a known layout"
        )
    return distance


def firsts(width: int, distance: int) -> Tensor:
    """Say for each channel whether it is the first of its pair."""
    return torch.arange(width) // distance % 2 == 0


def _read_grouped(probe: Probe, layout: Layout, inputs: Any, found: Any, grouping: str) -> tuple[Turn, ...]:
    """Read the turns where x's pairs lie as the output's do, or interleaved or in halves."""
    (zeros, leaves), (spans, distances) = inputs, found
    widths = [stop - start for start, stop in spans]
    of_x = {"same": distances, "interleaved": [1] * len(widths), "half": [w // 2 for w in widths]}[grouping]
    if grouping != "same" and of_x == distances:
        raise Unlike(0, "")
    masks = [firsts(w, d) for w, d in zip(widths, of_x, strict=True)]

    def run(which: bool) -> list[Tensor]:
        channels = [s[0] + (m == which).nonzero().flatten() for s, m in zip(spans, masks, strict=True)]
        outs = probe.run([at_channels(z, c) for z, c in zip(zeros, channels, strict=True)], leaves)
        return [o.float()[..., s[0] : s[1]] for o, s in zip(outs, spans, strict=True)]

    turns = []
    for a, b, span, distance, x_distance in zip(run(True), run(False), spans, distances, of_x, strict=True):
        first = firsts(span[1] - span[0], distance)
        codes = decode(torch.where(first, a, b), torch.where(first, -b, a), first, code_step(leaves))
        half = (span[1] - span[0]) // 2
        shuffle = None if x_distance == distance else (half, 2) if x_distance == 1 else (2, half)
        *axes, head_dim = zeros[len(turns)].shape
        limits = Limits(tuple(axes), layout.token, layout.num_rows(_AXES[probe.num_axes]), probe.offset)
        turns.append(read_turn(codes, leaves, head_dim, (span, distance, shuffle, limits)))
    return tuple(turns)


def decode(cos: Tensor, sin: Tensor, first: Tensor, step: float) -> Codes:
    """Find the numbers of the entries that cos and sin are, or are the cosine and sine of."""
    rotated = ~((cos == 1) & (sin == 0)).all(-1)
    box = []
    for axis in range(rotated.ndim):
        hit = rotated.transpose(0, axis).flatten(1).any(1).nonzero().flatten().tolist() if rotated.any() else []
        if not hit:
            raise Unlike(3, "returns x as it was")
        box.append(slice(hit[0], hit[-1] + 1))
    if not rotated[tuple(box)].all():
        raise Unlike(5, "rotates some tokens, and not those between them")
    cos, sin = cos[tuple(box)], sin[tuple(box)]
    for angles in (False, True):
        whole = [numbers_of(t, step, f if angles else None) for t, f in ((cos, Tensor.acos), (sin.abs(), Tensor.asin))]
        if whole[0] is not None and whole[1] is not None:
            return Codes(whole[0], whole[1], sin < 0, first, angles, tuple(box))
    if (cos < 0).any() and (cos.abs() >= 0.5).all():
        raise Unlike(5, "negates cos, or has cos and sin in each other's places, which is not a rotation by the tables")
    raise Unlike(
        4, "does not turn pairs by entries of its tables (it scales or mixes them, or makes angles of its own)"
    )


def numbers_of(values: Tensor, step: float, inverse: Callable[[Tensor], Tensor] | None) -> Tensor | None:
    """Return the numbers of the entries that the values are, or are a function of; None for other values."""
    tolerance = 0.01 if inverse is None else 0.3
    for part in (values[(0,) * (values.ndim - 1)], values):  # most are refused by their first token
        numbers = ((part.double() if inverse is None else inverse(part.double())) - 0.5) / step
        rounded = numbers.round()
        if not ((numbers - rounded).abs().max() < tolerance and rounded.min() >= 0 and rounded.max() * step < 0.5):
            return None
    return rounded.long()


def read_turn(codes: Codes, leaves: list[Tensor], head_dim: int, shape: Any) -> Turn:
    """Find which dimension of which table follows which axis of x, and which channels it gives."""
    span, distance, shuffle, _ = shape
    width = span[1] - span[0]
    options = [width]  # of a head: all channels are one, or x has several heads in its last dimension
    if width == head_dim and shuffle is None:
        options += [n for n in range(2 * distance, width, 2 * distance) if width % n == 0]
    best: tuple[int, Turn] | None = None
    failure = Unlike(0, "")
    for head in options:
        try:
            cost, turn = _read_heads(codes, head if head < width else 0, leaves, shape)
        except Unlike as e:
            failure = max(failure, e, key=lambda e: e.depth)
            continue
        if best is None or cost < best[0]:
            best = cost, turn
        if best[0] <= 2:
            break
    if best is None:
        raise failure
    return best[1]


class Limits(NamedTuple):
    """How many tokens x has along its axes, how many rows the tables, and the offset that was given."""

    axes: tuple[int, ...]
    token: int
    rows: int
    offset: int | None


def find_rows(begins: dict[int, set[int]], box: tuple[slice, ...], limits: Limits) -> str:
    """Say where in the tables the row of the first token is; see :class:`Turn`."""
    tokens = limits.axes[limits.token]
    for axis, (part, size) in enumerate(zip(box, limits.axes, strict=False)):
        whole = part == slice(0, size)
        if axis == limits.token:
            whole = whole or part in (slice(0, limits.rows), slice(tokens - limits.rows, tokens))
        if not whole or (axis != limits.token and begins.get(axis, {0}) != {0}):
            raise Unlike(5, "rotates a part of its tokens that does not follow from the tables' size")
    begin = begins.get(limits.token, {0})
    if limits.offset is not None and begin != {limits.offset}:
        raise Unlike(5, "has an offset that is not that of the tables' rows")
    names = {limits.rows - tokens: "end", limits.offset: "offset", 0: "start"}
    if len(begin) > 1 or not begin <= set(names):
        raise Unlike(5, "begins to read its tables at a row that does not follow from their size")
    return names[begin.pop()]


def _read_heads(codes: Codes, head: int, leaves: list[Tensor], shape: Any) -> tuple[int, Turn]:
    """Read a turn with heads of this width in x's last dimension, or 0. Also return the number of pieces."""
    span, distance, shuffle, limits = shape
    first, cos, sin, negative = codes.first, codes.cos, codes.sin, codes.negative
    box = codes.box
    if head:
        cos, sin, negative = (t.unflatten(-1, (-1, head)) for t in (cos, sin, negative))
        if (negative != negative[..., :1, :]).any():
            raise Unlike(5, "turns some channels by minus their angle")
        first, span, box = first[:head], (0, head), (*box, slice(0, cos.shape[-2]))
    if (negative != negative[(0,) * (negative.ndim - 1)]).any():
        raise Unlike(5, "turns some tokens by minus their angle")
    signs = negative[(0,) * (negative.ndim - 1)]
    sources: dict[int, tuple[Any, ...]] = {}
    begins: dict[int, set[int]] = {}  # axis -> its first row, less its first token
    entries = [_find_entries(t, leaves, (box, begins), sources) for t in (cos, sin)]
    by_pair = [
        [[e for e, f in zip(each, first, strict=True) if f == which] for which in (True, False)] for each in entries
    ]
    per_pair = all(one == two for one, two in by_pair)
    inverse = bool(signs.all())
    if signs.any() and not inverse and (per_pair or not _are_matrices(*by_pair[1], leaves)):
        raise Unlike(5, "turns the channels of a pair by opposite angles, which is not a rotation")
    if per_pair:
        entries, signs = [one for one, _ in by_pair], signs[first]
    alternates = not per_pair and distance == 1
    cos_table = _make_table(entries[0], [False] * len(entries[0]), alternates)
    sin_table = _make_table(entries[1], [False] * len(signs) if inverse else signs.tolist(), alternates)
    half = (span[1] - span[0]) // 2
    pairs: Any = (distance,) * (half // distance)
    if distance in (1, half):
        pairs = "half" if distance == half else "interleaved"
    found = [s for dims in sources.values() for s in dims if s is not None]
    axes = {a for s in found for a in (s[2] if isinstance(s, tuple) else (s,))}
    if not axes:
        raise Unlike(5, "turns all tokens alike")
    turn = Turn(
        cos_table, sin_table, codes.angles, inverse, pairs, span, shuffle, head, tuple(sorted(sources.items())),
        tuple(sorted(axes)), find_rows(begins, box, limits),
    )  # fmt: skip
    return max(len(t.pieces) for t in (cos_table, sin_table)), turn


def _find_entries(codes: Tensor, leaves: list[Tensor], begin: Any, sources: dict[int, tuple[Any, ...]]) -> list[Any]:
    """Return for each channel the leaf and the place in its dimensions, None where it follows an axis of x.

    ``sources`` gets, for each leaf, what its dimensions follow.
    """
    channels: list[Any] = [None] * codes.shape[-1]
    start = 0
    for leaf, t in enumerate(leaves):
        if is_integers(t):
            continue
        shape = (*t.shape, 2) if t.is_complex() else tuple(t.shape)
        inside = (codes >= start) & (codes < start + t.numel() * (1 + t.is_complex()))
        mine = inside[(0,) * (codes.ndim - 1)]
        if (inside != mine).any():
            raise Unlike(5, "takes the tables of some tokens from another tensor")
        if mine.any():
            places = torch.unravel_index(codes[..., mine] - start, shape)
            follows, at = _follow(places, leaves, *begin)
            if sources.setdefault(leaf, follows) != follows:
                raise Unlike(5, "reads cos and sin in different orders")
            for i, channel in enumerate(mine.nonzero().flatten().tolist()):
                channels[channel] = (leaf, tuple(None if each is None else each[i] for each in at))
        start += t.numel() * (1 + t.is_complex())
    return channels


def _follow(
    places: Any, leaves: list[Tensor], box: Any, begins: dict[int, set[int]]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Say for each dimension of a leaf which axis of x its places follow, or list them by channel."""
    follows: list[Any] = []
    at: list[Any] = []
    for place in places:
        base = place[(0,) * (place.ndim - 1)]
        delta = place - base
        if not delta.any():
            follows.append(None)
            at.append(base.tolist())
            continue
        source = _find_source(place, delta, leaves) if (base == base[0]).all() else None
        if source is None:
            raise Unlike(5, "reads its tables in an order that is not the tokens'")
        if isinstance(source, int):
            begins.setdefault(source, set()).add(int(base[0]) - box[source].start)
        follows.append(source)
        at.append(None)
    return tuple(follows), at


def _find_source(place: Tensor, delta: Tensor, leaves: list[Tensor]) -> Any:
    """Return the axis that the places follow one by one, or the integers that they are."""
    for axis in range(place.ndim - 1):
        count = torch.arange(place.shape[axis]).reshape([-1 if a == axis else 1 for a in range(place.ndim)])
        if torch.equal(delta, count.expand_as(delta)):
            return axis
    for j, t in enumerate(leaves):
        if not is_integers(t) or not 0 < t.ndim < place.ndim:
            continue
        for axes in itertools.combinations(range(place.ndim - 1), t.ndim):
            sizes = [place.shape[a] if a in axes else 1 for a in range(place.ndim)]
            if t.numel() == torch.Size(sizes).numel() and torch.equal(t.reshape(sizes).expand_as(place).long(), place):
                return ("positions", j, axes)
    return None


def _are_matrices(one: list[Any], two: list[Any], leaves: list[Tensor]) -> bool:
    """Say whether the sines of each pair are the entries (0, 1) and (1, 0) of a 2 × 2 matrix of its own."""
    if any(leaves[leaf].shape[-2:] != (2, 2) for leaf, _ in (*one, *two)):
        return False
    return ({at[-2:] for _, at in one}, {at[-2:] for _, at in two}) in (({(0, 1)}, {(1, 0)}), ({(1, 0)}, {(0, 1)}))


def _make_table(entries: list[Any], negative: list[bool], alternates: bool) -> Table:
    """Gather the entries of channels in as few pieces as possible."""
    pieces = _gather(entries, negative)
    if alternates and len(pieces) > 1:
        parts = [_gather(entries[i::2], negative[i::2]) for i in (0, 1)]
        if all(len(p) == 1 for p in parts):
            return Table((*parts[0], *parts[1]), True)
    return Table(tuple(pieces), False)


def _gather(entries: list[Any], negative: list[bool]) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0
    while start < len(entries):
        stop, step = start + 1, None
        while stop < len(entries) and negative[stop] == negative[start]:
            found = _step(entries[stop - 1], entries[stop])
            if found is None or step not in (None, found):
                break
            stop, step = stop + 1, found
        leaf, at = entries[start]
        index = list(at)
        if step is not None:
            dim, by = step
            index[dim] = (at[dim], at[dim] + by * (stop - start - 1) + 1, by)
        pieces.append(Piece(leaf, tuple(index), negative[start]))
        start = stop
    return pieces


def _step(a: Any, b: Any) -> tuple[int, int] | None:
    """Return (dimension, difference) where one entry follows the other along one dimension."""
    if a[0] != b[0]:
        return None
    differ = [i for i, (m, n) in enumerate(zip(a[1], b[1], strict=True)) if m != n]
    return (
        (differ[0], b[1][differ[0]] - a[1][differ[0]])
        if len(differ) == 1 and b[1][differ[0]] > a[1][differ[0]]
        else None
    )


# --- a plan ---------------------------------------------------------------------------------------------------------


def find_plan(call: Callable[..., Any], key: tuple[Any, ...], relations: tuple[str, ...]) -> Plan:
    """Find out what ``call`` does with arguments of this kind.

    Raises:
        Unlike: something that is no rotation by its tables, or none that tables in the operator can do.
    """
    probe = Probe(call, key)
    failure = Unlike(-1, "takes no arguments of this kind")
    for layout in layouts(probe, relations):
        try:
            return make_plan(probe, layout)
        except Unlike as e:
            failure = max(failure, e, key=lambda e: e.depth)
        except Exception as e:  # whatever somebody else's function raises
            failure = max(failure, Unlike(0, f"raises {type(e).__name__}: {e}"), key=lambda e: e.depth)
            if not isinstance(e, (RuntimeError, IndexError, AssertionError)):  # not because of sizes
                break
    raise failure


def make_plan(probe: Probe, layout: Layout) -> Plan:
    """Read the turns of one layout, then try the plan at other sizes, in the dtypes of the call, and its gradients."""
    turns = read_turns(probe, layout)
    if len({t.inverse for t in turns}) > 1:
        raise Unlike(5, "turns its tensors by opposite angles")
    if set(layout.relations) != {EQUAL} and any(token_axis(t, probe.num_axes) != layout.token for t in turns):
        raise Unlike(5, "has more tokens or rows along an axis that is not the tokens'")
    float32 = (torch.float32,) * len(turns)
    plan = Plan(turns, layout.relations, probe.form, float32)
    axes = _AXES[probe.num_axes]
    compare(probe, plan, layout.sizes(axes))
    plan = plan._replace(fixed=find_fixed(probe, plan, layout))
    for other in _OTHERS[probe.num_axes]:
        compare(probe, plan, layout.sizes(other))
    if probe.offset is not None:
        probe.offset = 2
        compare(probe, plan, layout.sizes(axes))
        probe.offset = 1
    if len(turns) > 1 and probe.num_axes == 3:
        for axis in {1, 2} - {*turns[0].axes, layout.token}:
            compare(probe, plan, layout.sizes(axes, shared=axis))
    for axis in [a for a in turns[0].axes if a < probe.num_axes]:
        wider = plan._replace(repeated=(*plan.repeated, axis))
        with suppress(Unlike):
            plan = wider if compare(probe, wider, layout.sizes(axes, single=axis)) else plan
    plan = plan._replace(detach=compare_gradients(probe, plan, layout.sizes(axes)))
    return with_dtypes(probe, plan, layout.sizes(axes))


def find_fixed(probe: Probe, plan: Plan, layout: Layout) -> tuple[tuple[int, int, int], ...]:
    """Return the dimensions of leaves whose sizes matter, without following an axis of x; see :class:`Plan`."""
    sources = {leaf: dims for turn in plan.turns for leaf, dims in turn.sources}
    positions = {s[1] for dims in sources.values() for s in dims if isinstance(s, tuple)}
    sizes, fixed = layout.sizes(_AXES[probe.num_axes]), []
    for leaf, (entry, labels) in enumerate(zip(probe.leaves, layout.labels, strict=True)):
        count = len(labels) - len(entry[3:])
        if entry[0] == "owned" or leaf in positions:
            continue
        if leaf in sources:
            several = [(leaf, dim, labels[dim]) for dim in range(count) if sources[leaf][dim] is None]
            if any(label >= 0 for _, _, label in several):
                raise Unlike(0, "takes tables of another shape")
            fixed += several
        elif not all(_is_indifferent(probe, plan, sizes, leaf, (*n[:count], *entry[3:])) for n in _ANY_SHAPES):
            fixed += [(leaf, dim, labels[dim]) for dim in range(count)]
    return tuple(fixed)


def _is_indifferent(probe: Probe, plan: Plan, sizes: Sizes, leaf: int, shape: tuple[int, ...]) -> bool:
    """Say whether the function does the same with another shape of a leaf that it does not read."""
    leaves = (*sizes.leaves[:leaf], shape, *sizes.leaves[leaf + 1 :])
    with suppress(Unlike):
        return compare(probe, plan, sizes._replace(leaves=leaves))
    return False


def token_axis(turn: Turn, num_axes: int) -> int:
    """The axis along which a table may have other than x's number of rows."""
    return max(a for a in turn.axes if a < num_axes)


def compare(probe: Probe, plan: Plan, sizes: Sizes) -> bool:
    """Compare the plan with the function; False where either does not take these sizes."""
    xs, leaves = probe.inputs(sizes, 2)
    try:
        expected = probe.run(xs, leaves)
    except Exception:  # the function does not take them
        return False
    if relate(plan, xs, leaves, probe.offset or 0) != plan.relations:
        return False
    found = run_plan(probe, plan, xs, leaves)
    if not all(is_close(a, b, 2e-5) for a, b in zip(found, expected, strict=True)):
        raise Unlike(5, "is a rotation for some sizes and values of its arguments, and not for others")
    large = probe.run([x * 1e3 for x in xs], leaves)
    if not all(is_close(a.float() / 1e3, b.float(), 1e-4) for a, b in zip(large, expected, strict=True)):
        raise Unlike(4, "is not linear in x")
    return True


def run_plan(probe: Probe, plan: Plan, xs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return flatten(run(prepare(plan, xs, leaves, probe.offset or 0), xs, leaves, "reference"))


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool(
        (a.double() - b.double()).abs().max() <= tolerance * (b.double().abs().max() + 1)
    )


def compare_gradients(probe: Probe, plan: Plan, sizes: Sizes) -> bool:
    """Compare the gradients with the function's; return whether it passes none to the tables."""
    xs, leaves = probe.inputs(sizes, 3)
    used = sorted({leaf for t in plan.turns for leaf, _ in t.sources})
    with torch.enable_grad():
        inputs = [t.requires_grad_() for t in (*xs, *[leaves[i] for i in used])]
        grads = []
        for outs in (probe.run(xs, leaves), run_plan(probe, plan, xs, leaves)):
            if not all(o.requires_grad for o in outs):
                raise Unlike(6, "passes no gradient to the tensors that it turns")
            weights = [torch.linspace(-1, 1, o.numel()).reshape(o.shape) for o in outs]
            loss = torch.stack([(o * w).sum() for o, w in zip(outs, weights, strict=True)]).sum()
            grads.append(torch.autograd.grad(loss, inputs, allow_unused=True))
    theirs, ours = grads
    detach = all(g is None for g in theirs[len(xs) :])
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if i >= len(xs) and detach:
            continue
        if (
            a is None
            or b is None
            or not is_close(
                torch.view_as_real(b) if b.is_complex() else b, torch.view_as_real(a) if a.is_complex() else a, 1e-4
            )
        ):
            raise Unlike(6, "has gradients of its own, which are not those of what it computes")
    return detach


def with_dtypes(probe: Probe, plan: Plan, sizes: Sizes) -> Plan:
    """Note the dtypes of the outputs for inputs of the call's dtypes, with and without autocast."""
    xs, leaves = probe.inputs(sizes, 4, like_key=True)
    try:
        outs = probe.run(xs, leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = probe.run(xs, leaves)
    except Exception as e:
        raise Unlike(6, f"raises {type(e).__name__} for {xs[0].dtype} and tables of {leaves[0].dtype}: {e}") from e
    plan = plan._replace(dtypes=tuple(o.dtype for o in outs))
    found = run_plan(probe, plan, xs, leaves)
    if not all(is_close(a, b, 0.05) for a, b in zip(found, outs, strict=True)):
        raise Unlike(6, f"computes something else for {xs[0].dtype}")
    return plan._replace(autocast=[o.dtype for o in cast] == [o.dtype for o in outs])
