"""Find out what a rotary function computes, by calling it with small tensors.

Tables get entries that are all different. Where x is one on one channel of each pair and zero on the other, the output
is the entry that multiplied it, which says where in the tables cos and sin of that channel are taken from.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .plans import EQUAL, FEWER, MORE, Follow, Plan, Run, Turn, Unlike, flatten, prepare, relate, run

__all__ = [
    "Pairs",
    "Probe",
    "call_twice",
    "find_plan",
    "firsts",
    "is_close",
    "layouts",
    "name_pairs",
    "quietly",
    "read_pairs",
]

_AXES: dict[int, tuple[int, ...]] = {1: (5,), 2: (3, 5), 3: (2, 3, 5)}  # sizes of x's axes in the first probe
_OTHERS: dict[int, list[tuple[int, ...]]] = {
    1: [(3,), (1,)],
    2: [(5, 3), (4, 4), (1, 5), (3, 1), (1, 1)],
    3: [(5, 2, 3), (3, 3, 3), (1, 3, 5), (2, 1, 5), (2, 3, 1), (1, 1, 1)],
}
_MOST_ENTRIES = 2**20  # of all tables; an entry is then exact in float32
_MOST_LAYOUTS = 300
_MOST_ANSWERS = 6  # of other functions, before a kind of arguments is given up

Shapes = tuple[list[Any], list[Any]]  # of each x without its channels, and of each leaf
Tensors = tuple[list[Tensor], list[Tensor]]


def quietly(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, which has no autocast, modes, transforms or compiler of the caller's.

    The default dtype is float32 meanwhile, and the random state is left as it was.
    """

    def body() -> Any:
        dtype, state = torch.get_default_dtype(), torch.get_rng_state()
        is_compiling = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing it takes seconds
        try:
            torch.set_default_dtype(torch.float32)
            stance = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
            with warnings.catch_warnings(), stance, torch.no_grad():
                warnings.simplefilter("ignore")
                return function()
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(state)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(body).result()


# --- a function, and tensors for it ---------------------------------------------------------------------------------


def fill(entry: Any, tensor: Callable[[Any], Any]) -> Any:
    """Make an argument from its description; ``tensor`` gives each of its tensors, and the offset."""
    if not isinstance(entry, tuple):
        return entry
    if entry[0] in ("tuple", "list"):
        values = [fill(e, tensor) for e in entry[1:]]
        return values if entry[0] == "list" else tuple(values)
    if entry[0] == "unknown":
        raise Unlike(0, "takes an argument that is neither a tensor nor a number")
    return entry[2] if entry[0] == "value" else tensor(entry)


class Probe:
    """A function with arguments of one kind: called with tensors in the places of theirs.

    Args:
        call: takes the arguments in order, and the tensors in place of its object's own.
        key: descriptions of the arguments, then of the object's tensors and settings.
        device: where it is called; all tensors here are on the CPU.
    """

    widths: tuple[int, ...] = (1,)  # of outputs, as multiples of x's

    def __init__(self, call: Callable[..., Any], key: tuple[Any, ...], device: str = "cpu") -> None:
        self.call, self.device = call, device
        groups = {name: [e for e in key if isinstance(e, tuple) and e[0] == name] for name in ("attribute", "list")}
        self.entries = [e for e in key if not (isinstance(e, tuple) and e[0] in ("attribute", "settings"))]
        self.offset = 1 if ("offset",) in key else 0
        self.sections = [len(e) - 1 for e in groups["list"] if all(type(n) is int for n in e[1:])]
        tensors: list[Any] = []
        fill(("tuple", *self.entries), tensors.append)
        self.data = [e for e in tensors if e[0] == "data"]
        inner = [e for e in tensors if e[0] in ("table", "integers")]
        self.leaves, self.num_inner = inner + groups["attribute"], len(inner)
        self.form: tuple[str, tuple[bool, ...]] = ("tensor", ())
        ranks = {e[1] for e in self.data}
        if len(ranks) != 1 or not ranks <= {2, 3, 4} or any(e[3] < 2 for e in self.data):
            raise Unlike(0, "takes no tensors to turn, of 2, 3 or 4 dimensions")
        self.axes = _AXES[ranks.pop() - 1]

    def arguments(self, xs: list[Tensor], leaves: list[Any]) -> list[Any]:
        """Return the arguments of a call with these tensors."""
        of = {"data": iter(xs), "table": (inner := iter(leaves)), "integers": inner, "offset": iter([self.offset])}
        return [fill(e, lambda e: next(of[e[0]])) for e in self.entries]

    def run(self, xs: list[Tensor], leaves: list[Any]) -> list[Tensor]:
        """Call the function with copies, and return its outputs."""
        inputs = [[t.to(self.device, copy=True) if isinstance(t, Tensor) else t for t in each] for each in (xs, leaves)]
        out = self.call(self.arguments(*inputs), inputs[1][self.num_inner :])
        kind = "tensor" if isinstance(out, Tensor) else type(out).__name__
        items: list[Any] = [out] if kind == "tensor" else list(out) if kind in ("tuple", "list") else [()]
        if not all(o is None or isinstance(o, Tensor) for o in items):
            raise Unlike(1, f"returns something else than tensors ({kind})")
        outs = [o.cpu() for o in items if o is not None]
        allowed = [[(*x.shape[:-1], n * x.shape[-1]) for n in self.widths] for x in xs]
        if len(outs) != len(xs) or any(tuple(o.shape) not in shapes for o, shapes in zip(outs, allowed, strict=True)):
            shapes = [", ".join(str(tuple(t.shape)) for t in each) for each in (outs, xs)]
            raise Unlike(1, f"returns {shapes[0]} for {shapes[1]}")
        pairs = zip((*xs, *leaves), (*inputs[0], *inputs[1]), strict=True)
        if not all(torch.equal(t, copy.cpu()) for t, copy in pairs if isinstance(t, Tensor)):
            raise Unlike(3, "changes its arguments in place")
        self.form = kind, tuple(o is not None for o in items)
        return outs

    def inputs(self, shapes: Shapes, seed: int) -> Tensors:
        """Return random tensors of these shapes, in float32."""
        g = torch.Generator().manual_seed(seed)
        xs = [torch.randn(*s, e[3], generator=g) for s, e in zip(shapes[0], self.data, strict=True)]
        leaves = []
        for e, shape in zip(self.leaves, map(torch.Size, shapes[1]), strict=True):
            if e[0] == "integers":
                mixed = torch.rand(shape, generator=g).flatten().argsort() % 5 + (shape.numel() == 1) * (1 + seed % 3)
                leaves.append(mixed.reshape(shape).to(e[2]))
            else:
                parts = torch.rand(*shape, 2, generator=g) * 2 - 1
                leaves.append(torch.view_as_complex(parts) if e[2].is_complex else parts[..., 0])
        return xs, leaves


# --- shapes to try --------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Shapes of the leaves, and how many rows they have.

    labels: for each leaf and dimension the axis of x whose size it has, or minus the size.
    token: the axis along which the tables may have more or fewer rows than x has tokens.
    rows: their number where an object owns the tables.
    """

    labels: tuple[tuple[int, ...], ...]
    relations: str
    token: int
    rows: int | None = None

    def num_rows(self, axes: tuple[int, ...]) -> int:
        return self.rows or axes[self.token] + (0 if set(self.relations) == {EQUAL} else 2)

    def shapes(self, axes: tuple[int, ...], one_row: int | None = None, more_heads: int | None = None) -> Shapes:
        """Return shapes, with one row along ``one_row``, and the first x twice as long along ``more_heads``."""
        table, xs = [*axes], [[*axes] for _ in self.relations]
        rows = table[self.token] = self.num_rows(axes)
        tokens = {EQUAL: rows, MORE: min(axes[self.token], rows - 1), FEWER: rows + 2}
        for x, relation in zip(xs, self.relations, strict=True):
            x[self.token] = tokens[relation]
        if one_row is not None:
            table[one_row] = 1
        if more_heads is not None:
            xs[0][more_heads] *= 2
        return xs, [[table[a] if a >= 0 else -a for a in labels] for labels in self.labels]


def labels_of(probe: Probe, entry: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Return labels for the dimensions of a leaf that are not channels, likely ones first.

    These are axes of x in order, 1, the heads that x has in its last dimension, and in front the number of sections, or
    2 for cos and sin.
    """
    count, num_axes = entry[1] - len(entry[3:]), len(probe.axes)
    first = {-n for n in (*probe.sections, 2)} if count > 1 else set()
    heads = {-(probe.data[0][3] // n) for n in (2 * entry[3], entry[3])} if len(entry) > 3 and num_axes == 2 else set()
    ranked = []
    for labels in itertools.product({-1, *first, *heads, *range(num_axes)}, repeat=count):
        axes, others = [a for a in labels if a >= 0], [a for a in labels if a < -1]
        in_front = others == [labels[0]] and labels[0] in first if others else False
        is_known = not others or in_front or (len(others) == 1 and others[0] in heads)
        if is_known and axes == sorted(set(axes)) and (axes or not count):
            rank = 1 if not others else 3 if not in_front else 0 if -others[0] in probe.sections else 2
            ranked.append(((rank, -len(axes), [-a for a in axes[::-1]]), labels))
    return [labels for _, labels in sorted(ranked)]


def layouts(probe: Probe, relations: str) -> Iterator[Layout]:
    """Yield shapes for the first probe, likely ones first."""
    groups = list(dict.fromkeys(e for e in probe.leaves if e[0] != "attribute"))
    own_rows = sorted({n for e in probe.leaves if e[0] == "attribute" for n in e[1][:-1]}, reverse=True)
    for chosen in itertools.islice(itertools.product(*[labels_of(probe, e) for e in groups]), _MOST_LAYOUTS):
        of = dict(zip(groups, chosen, strict=True))
        labels = tuple((*of.get(e, ()), *[-n for n in (e[1] if e[0] == "attribute" else e[3:])]) for e in probe.leaves)
        axes = [len(probe.axes) - 1] if set(relations) == {EQUAL} and not own_rows else range(len(probe.axes))[::-1]
        for axis, rows in itertools.product(axes, own_rows or (None,)):
            if own_rows or len(axes) == 1 or any(axis in each for each in labels):
                yield Layout(labels, relations, axis, rows)


# --- channels -------------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """How one x is turned: the channels from first to last, how far those of a pair are apart in the output and in x,
    and cos and sin (axes of x, these channels).
    """

    span: tuple[int, int]
    distance: int
    distance_in_x: int
    cos: Tensor
    sin: Tensor


def call_twice(call: Callable[[list[Tensor]], list[Tensor]], xs: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a function that is neither random nor adds something."""
    outs = call(xs)
    if not all(map(torch.equal, outs, call(xs))):
        raise Unlike(3, "is random: two calls with the same arguments differ")
    if any(o.any() for o in call([torch.zeros_like(x) for x in xs])):
        raise Unlike(3, "adds something that does not depend on x")
    return outs


def read_pairs(call: Callable[[list[Tensor]], list[Tensor]], xs: list[Tensor], outs: list[Tensor]) -> list[Pairs]:
    """Read how a function turns the channels of each x; ``outs`` are its outputs for these xs."""
    spans = [find_span(x, o.to(x.dtype)) for x, o in zip(xs, outs, strict=True)]

    def respond(channels: list[Any]) -> list[Tensor]:
        """Return the outputs for xs that are one at these channels of their spans, and zero elsewhere."""
        inputs = [torch.zeros_like(x) for x in xs]
        for x, (start, stop), each in zip(inputs, spans, channels, strict=True):
            x[..., start:stop][..., each] = 1
        return [o.to(x.dtype) for o, x in zip(call(inputs), xs, strict=True)]

    hits, widths = [find_channels(o) for o in respond([0] * len(xs))], [stop - start for start, stop in spans]
    distances = [find_distance(hit, span) for hit, span in zip(hits, spans, strict=True)]
    in_x = list(distances)
    for options in ([1] * len(xs), [width // 2 for width in widths], distances):
        for i, o in enumerate(respond(options)):
            in_x[i] = options[i] if find_channels(o) == hits[i] else in_x[i]
    firsts_in_x = list(map(firsts, widths, in_x))
    answers = zip(respond(firsts_in_x), respond([~t for t in firsts_in_x]), strict=True)
    pairs = []
    for span, distance, distance_in_x, answer in zip(spans, distances, in_x, answers, strict=True):
        first, (a, b) = firsts(span[1] - span[0], distance), [o[..., span[0] : span[1]] for o in answer]
        pairs.append(Pairs(span, distance, distance_in_x, torch.where(first, a, b), torch.where(first, -b, a)))
    return pairs


def find_span(x: Tensor, out: Tensor) -> tuple[int, int]:
    """Return the first channel that is changed, and the one after the last."""
    if not out.isfinite().all():
        raise Unlike(2, "returns numbers that are not finite")
    changed = find_channels(x != out)
    if not changed:
        raise Unlike(3, "returns x as it was")
    if (changed[-1] - changed[0]) % 2 == 0:
        raise Unlike(3, f"changes {changed[-1] - changed[0] + 1} channels, which are not pairs")
    return changed[0], changed[-1] + 1


def find_channels(t: Tensor) -> list[int]:
    """Return the channels that are not zero everywhere."""
    return t.flatten(0, -2).any(0).nonzero().flatten().tolist()


def find_distance(hit: list[int], span: tuple[int, int]) -> int:
    """Return how far apart the channels of a pair are, from those that the first channel of x goes to."""
    start, stop = span
    if len(hit) == 1:
        does = "scales" if hit[0] == start else "moves"
        raise Unlike(4, f"{does} channels, without turning pairs of them")
    distance = hit[1] - hit[0] if len(hit) == 2 else 0
    if not distance or hit[0] != start or (stop - start) % (2 * distance):
        raise Unlike(4, f"mixes channel {start} into channels {hit[:4]}, which is not a pair of a known layout")
    return distance


def name_pairs(width: int, distance: int) -> Any:
    """Return the layout as :func:`lrpe_md.rotate` takes it."""
    half = width // 2
    return "half" if distance == half else "interleaved" if distance == 1 else (distance,) * (half // distance)


def firsts(width: int, distance: int) -> Tensor:
    """Say for each channel whether it is the first of its pair."""
    return torch.arange(width) // distance % 2 == 0


# --- entries of the tables ------------------------------------------------------------------------------------------


def is_integers(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


def as_real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def code_leaves(leaves: list[Tensor]) -> tuple[list[Tensor], float]:
    """Fill tables with entries that are all different: from 0.5 up by a step that is a power of two, below 1."""
    total = sum(as_real(t).numel() for t in leaves if not is_integers(t))
    if total > _MOST_ENTRIES:
        raise Unlike(0, f"reads tables of more than {_MOST_ENTRIES} entries")
    step, coded = 0.5 ** (1 + max(total - 1, 1).bit_length()), []
    sizes = [0 if is_integers(t) else as_real(t).numel() for t in leaves]
    for t, part in zip(leaves, (0.5 + step * torch.arange(total)).split(sizes), strict=True):
        entries = part.reshape(as_real(t).shape) if len(part) else part
        coded.append(t if is_integers(t) else torch.view_as_complex(entries) if t.is_complex() else entries)
    return coded, step


def numbers_of(values: Tensor, step: float, inverse: Callable[[Tensor], Tensor] | None) -> Tensor | None:
    """Return the numbers of the entries that the values are, or are a function of; None for other values."""
    tolerance = 0.01 if inverse is None else 0.3
    numbers = rounded = torch.empty(0)
    for part in (values[(0,) * (values.ndim - 1)], values):  # most are refused by their first token
        numbers = ((part.double() if inverse is None else inverse(part.double())) - 0.5) / step
        rounded = numbers.round()
        if not ((numbers - rounded).abs().max() < tolerance and rounded.min() >= 0 and rounded.max() * step < 0.5):
            return None
    return rounded.long()


class Reading:
    """Looks up which entries of the leaves turn one x.

    box: the part of x's axes that is turned. begins: for what dimensions of tables follow, the row of the first token.
    """

    def __init__(self, probe: Probe, layout: Layout, leaves: list[Tensor], pairs: Pairs) -> None:
        self.probe, self.layout, self.leaves, self.pairs = probe, layout, leaves, pairs
        rotates = ~((pairs.cos == 1) & (pairs.sin == 0)).all(-1)
        places = rotates.nonzero()
        ends = zip(places.amin(0).tolist(), places.amax(0).tolist(), strict=True)
        self.sizes, self.box = tuple(rotates.shape), tuple(slice(low, high + 1) for low, high in ends)
        if not rotates[self.box].all():
            raise Unlike(4, "rotates some tokens, and not those between them")

    def turn(self, step: float) -> Turn:
        """Look up the entries that cos and sin are, or are the cosine and sine of."""
        cos, sin, span = self.pairs.cos[self.box], self.pairs.sin[self.box], self.pairs.span
        for angles in (False, True):
            numbers = [
                numbers_of(t, step, f if angles else None) for t, f in ((cos, Tensor.acos), (sin.abs(), Tensor.asin))
            ]
            if numbers[0] is not None and numbers[1] is not None:
                break
        else:
            if (cos < 0).any() and (cos.abs() >= 0.5).all():
                raise Unlike(5, "negates cos, or exchanges cos and sin, which is not a rotation by the tables")
            does = "does not turn pairs by entries of its tables: it scales or mixes them, or has angles of its own"
            raise Unlike(4, does)
        width, double = span[1] - span[0], 2 * self.pairs.distance
        may_have_heads = width == self.probe.data[0][3] and self.pairs.distance == self.pairs.distance_in_x
        turns, failure = [], None
        for head in (0, *(n for n in range(double, width, double) if width % n == 0 and may_have_heads)):
            try:
                turns.append(self.turn_of_heads([*numbers, sin < 0], head, angles))
            except Unlike as e:
                failure = failure or e
            if turns and max(len(turns[-1].cos), len(turns[-1].sin)) <= 2:
                return turns[-1]
        if not turns:
            raise failure
        return min(turns, key=lambda turn: len(turn.cos) + len(turn.sin))

    def turn_of_heads(self, codes: list[Tensor], head: int, angles: bool) -> Turn:
        """Read the turn of heads of this width in x's last dimension; 0 for x's whole width."""
        span, distance, box = self.pairs.span, self.pairs.distance, self.box
        if head:
            codes = [t.unflatten(-1, (-1, head)) for t in codes]
            span, box = (0, head), (*box, slice(0, codes[0].shape[-2]))
        negative = codes[2][(0,) * (codes[2].ndim - 1)]
        if (codes[2] != negative).any():
            raise Unlike(5, "turns some tokens or heads by minus their angle")
        half, first = (span[1] - span[0]) // 2, firsts(span[1] - span[0], distance).tolist()
        candidates, begins = list(self.candidates(box)), {}
        tables = [self.locate(t, candidates, begins) for t in codes[:2]]
        by_pair = [[[e for e, f in zip(t, first, strict=True) if f == one] for one in (True, False)] for t in tables]
        per_pair = all(one == two for one, two in by_pair)
        if negative.any() and not negative.all() and (per_pair or not self.are_matrices(*by_pair[1])):
            raise Unlike(5, "turns the channels of a pair by opposite angles, which is not a rotation")
        signs = [[False] * len(first), [False] * len(first) if negative.all() else negative.tolist()]
        if per_pair:
            tables = [one for one, _ in by_pair]
        cos, sin = (join(t, s, distance == 1 and not per_pair) for t, s in zip(tables, signs, strict=True))
        followed = sorted({axis for at in begins for axis in at.axes if axis < len(self.sizes)})
        if not followed:
            raise Unlike(5, "turns all tokens alike")
        axes: list[int | None] = [a for a in range(len(box)) if a != followed[-1]]
        if len(axes) == 1:  # batch where the tables vary along it, else heads
            axes.insert(axes[0] in followed, None)
        in_x = self.pairs.distance_in_x
        return Turn(
            cos[0], sin[0], (cos[1], sin[1]), angles, bool(negative.all()), name_pairs(2 * half, distance), span,
            None if in_x == distance else (half, 2) if in_x == 1 else (2, half), head,
            (*[None] * (2 - len(axes)), *axes, followed[-1]), self.rows(begins),
        )  # fmt: skip

    def candidates(self, box: tuple[slice, ...]) -> Iterator[tuple[Follow, Tensor]]:
        """Yield what a dimension of a table may follow, with the numbers along the axes of the box."""
        lengths = [part.stop - part.start for part in box]
        for axis, part in enumerate(box):
            numbers = torch.arange(part.start, part.stop)
            yield Follow((axis,)), numbers.reshape([-1 if a == axis else 1 for a in range(len(box) + 1)])
        for leaf, t in enumerate(self.leaves):
            for axes in itertools.combinations(range(len(box)), t.ndim) if is_integers(t) and t.ndim else ():
                if list(t.shape) == [lengths[a] for a in axes]:
                    shape = [n if a in axes else 1 for a, n in enumerate(lengths)]
                    yield Follow(axes, leaf), t.long().reshape(*shape, 1)

    def locate(self, codes: Tensor, candidates: list[Any], begins: dict[Follow, set[int]]) -> list[Any]:
        """Return for each channel the leaf and the place in its dimensions: a Follow or an integer."""
        channels: list[Any] = [None] * codes.shape[-1]
        start, origin = 0, (0,) * (codes.ndim - 1)

        def follow(place: Tensor) -> Any:
            base = place[origin]
            if (place == base).all():
                return base.tolist()
            for at, numbers in candidates:
                begin = base[0] - numbers.flatten()[0]
                if torch.equal(place, (numbers + begin).expand_as(place)):
                    begins.setdefault(at, set()).add(int(begin))
                    return [at] * len(base)
            raise Unlike(5, "reads its tables in an order that is not the tokens'")

        for leaf, t in enumerate(self.leaves):
            if is_integers(t):
                continue
            shape = as_real(t).shape
            in_leaf = (codes >= start) & (codes < start + shape.numel())
            if (in_leaf != in_leaf[origin]).any():
                raise Unlike(5, "takes the tables of some tokens from another tensor")
            found = in_leaf[origin].nonzero().flatten()
            places = map(follow, torch.unravel_index(codes[..., found] - start, shape)) if len(found) else ()
            for channel, *index in zip(found.tolist(), *places, strict=True) if len(found) else ():
                channels[channel] = leaf, index
            start += shape.numel()
        return channels

    def are_matrices(self, one: list[Any], two: list[Any]) -> bool:
        """Say whether the sines of each pair are the entries (0, 1) and (1, 0) of a 2 × 2 matrix of its own."""
        square = all(self.leaves[leaf].shape[-2:] == (2, 2) for leaf, _ in (*one, *two))
        return square and all(at[-2:] == [0, 1] for _, at in one) and all(at[-2:] == [1, 0] for _, at in two)

    def rows(self, begins: dict[Follow, set[int]]) -> str:
        """Say where in the tables the row of the first token is; see :class:`Turn`."""
        token, offset = self.layout.token, self.probe.offset
        tokens, rows = self.sizes[token], self.layout.num_rows(self.probe.axes)
        for axis, (part, size) in enumerate(zip(self.box, self.sizes, strict=True)):
            if part not in (slice(0, size), slice(0, rows), slice(size - rows, size))[: 3 if axis == token else 1]:
                raise Unlike(5, "rotates a part of its tokens that does not follow from the tables' size")
        names = {offset: "offset"} if offset else {rows - tokens: "end", 0: "start"}
        (begin, *more) = begins.pop(Follow((token,)), {0})
        if more or begin not in names or any(each != {0} for each in begins.values()):
            raise Unlike(5, "begins to read its tables at a row that does not follow from their size")
        return names[begin]


def join(entries: list[Any], negated: list[bool], may_alternate: bool) -> tuple[tuple[Run, ...], bool]:
    """Return the entries of channels in as few runs as possible, and whether these alternate."""
    runs = gather(entries, negated)
    if may_alternate and len(runs) > 1:
        one, two = (gather(entries[i::2], negated[i::2]) for i in (0, 1))
        if len(one) == len(two) == 1:
            return (*one, *two), True
    return tuple(runs), False


def gather(entries: list[Any], negated: list[bool]) -> list[Run]:
    """Join entries that follow each other along one dimension of a leaf, in steps of one size."""
    runs: list[Run] = []
    start = 0
    while start < len(entries):
        (leaf, index), stop, step = entries[start], start + 1, None
        while stop < len(entries) and negated[stop] == negated[start] and entries[stop][0] == leaf:
            places = enumerate(zip(entries[stop - 1][1], entries[stop][1], strict=True))
            differ = [(dim, n - m) for dim, (m, n) in places if m != n]
            if len(differ) != 1 or differ[0][1] < 0 or step not in (None, differ[0]):
                break
            stop, step = stop + 1, differ[0]
        if step is not None:
            dim, by = step
            index = [*index[:dim], (index[dim], entries[stop - 1][1][dim] + 1, by), *index[dim + 1 :]]
        runs.append(Run(leaf, tuple(index), negated[start]))
        start = stop
    return runs


# --- a plan ---------------------------------------------------------------------------------------------------------


def find_plan(call: Callable[..., Any], key: tuple[Any, ...], relations: str, device: str = "cpu") -> Plan:
    """Find out what ``call`` does with arguments of this kind.

    Raises:
        Unlike: something that is no rotation by its tables, or none that tables in the operator can do.
    """
    probe = Probe(call, key, device)
    failure, num_answers = Unlike(-1, "takes no arguments of this kind"), 0
    for make in (make_grid_plan, *(partial(make_plan, layout=layout) for layout in layouts(probe, relations))):
        try:
            return make(probe)
        except Unlike as e:
            error = e
        except Exception as e:  # whatever somebody else's function raises
            error = Unlike(0, f"raises {type(e).__name__}: {e}")
            if not isinstance(e, (RuntimeError, IndexError, AssertionError)):  # not because of sizes
                num_answers = _MOST_ANSWERS
        failure, num_answers = max(failure, error, key=attrgetter("depth")), num_answers + (error.depth >= 4)
        if num_answers >= _MOST_ANSWERS:
            break
    raise failure


def make_plan(probe: Probe, layout: Layout) -> Plan:
    """Read the turns of one layout, then try the plan at other sizes, in the dtypes of the call, and its gradients."""
    axes = probe.axes
    shapes = layout.shapes(axes)
    leaves, step = code_leaves(probe.inputs(shapes, 0)[1])
    xs, _ = probe.inputs(shapes, 1)

    def call(xs: list[Tensor]) -> list[Tensor]:
        return probe.run(xs, leaves)

    turns = tuple(Reading(probe, layout, leaves, p).turn(step) for p in read_pairs(call, xs, call_twice(call, xs)))
    if len({t.inverse for t in turns}) > 1:
        raise Unlike(5, "turns its tensors by opposite angles")
    if any(t.axes[-1] != layout.token for t in turns) and set(layout.relations) != {EQUAL}:
        raise Unlike(5, "has more tokens or rows along an axis that is not the tokens'")
    plan = Plan(turns, layout.relations, probe.form, (torch.float32,) * len(turns))
    compare(probe, plan, probe.inputs(shapes, 2))
    plan = plan._replace(required_sizes=find_required_sizes(probe, plan, layout))
    followed = {axis for *_, at in turns[0].follows() for axis in at.axes}
    free = {1, 2} - {*followed, layout.token} if len(turns) > 1 and len(axes) == 3 else ()
    others = [layout.shapes(other) for other in _OTHERS[len(probe.axes)]]
    for other in (*others, *[layout.shapes(axes, more_heads=axis) for axis in free]):
        compare(probe, plan, probe.inputs(other, 2))
    if probe.offset:
        probe.offset = 2
        compare(probe, plan, probe.inputs(shapes, 2))
        probe.offset = 1
    for axis in sorted(followed & {*range(len(axes))}):
        candidate = plan._replace(broadcast_axes=(*plan.broadcast_axes, axis))
        with suppress(Unlike):
            inputs = probe.inputs(layout.shapes(axes, one_row=axis), 2)
            plan = candidate if compare(probe, candidate, inputs) else plan
    return complete(probe, plan, *probe.inputs(shapes, 3))


def make_grid_plan(probe: Probe) -> Plan:
    """Return the plan of a function that turns samples by grids as Wan's does; see :func:`run`."""
    kinds = [e[0] for e in probe.leaves]
    if sorted(kinds) != ["integers", "table"] or len(probe.data) != 1 or len(probe.axes) != 3:
        raise Unlike(-1, "takes no grids")
    sizes, table = kinds.index("integers"), kinds.index("table")
    plan = Plan((), EQUAL, ("tensor", (True,)), (torch.float32,), grids=(sizes, table))
    inputs: Any = None
    for grids, tokens in (([[2, 2, 3], [3, 1, 2]], 14), ([[1, 4, 2], [1, 4, 2]], 9)):
        shapes = [(2, 3), (9, *probe.leaves[table][3:])]
        inputs = probe.inputs(([(2, tokens, 3)], shapes if sizes == 0 else shapes[::-1]), tokens)
        inputs[1][sizes] = torch.tensor(grids, dtype=probe.leaves[sizes][2])
        if not compare(probe, plan, inputs):
            raise Unlike(-1, "takes no grids")
    return complete(probe, plan, *inputs)


def find_required_sizes(probe: Probe, plan: Plan, layout: Layout) -> tuple[tuple[int, int, int], ...]:
    """Return the dimensions of leaves whose sizes matter, without following an axis of x; see :class:`Plan`."""
    follows = {(leaf, dim) for turn in plan.turns for leaf, dim, _ in turn.follows()}
    used = {run.leaf for turn in plan.turns for run in (*turn.cos, *turn.sin)}
    positions = {at.positions for turn in plan.turns for *_, at in turn.follows()}
    required = []
    xs, leaves = probe.inputs(layout.shapes(probe.axes), 2)
    for leaf, (entry, labels) in enumerate(zip(probe.leaves, layout.labels, strict=True)):
        dims = [(leaf, dim, labels[dim]) for dim in range(len(labels) - len(entry[3:])) if (leaf, dim) not in follows]
        if leaf in used and any(label >= 0 for *_, label in dims):
            raise Unlike(0, "takes tables of another shape")
        if entry[0] == "attribute" or leaf in positions:
            continue
        if leaf not in used:
            with suppress(Exception):  # not even looked at
                probe.run(xs, [*leaves[:leaf], object(), *leaves[leaf + 1 :]])
                continue
        required += dims
    return tuple(required)


def compare(probe: Probe, plan: Plan, inputs: Tensors) -> bool:
    """Compare the plan with the function; False where either does not take these sizes."""
    xs, leaves = inputs
    try:
        expected = probe.run(xs, leaves)
    except Exception:  # the function does not take them
        return False
    if relate(plan, xs, leaves, probe.offset) != plan.relations:
        return False
    if not all(map(is_close, run_plan(probe, plan, xs, leaves), expected)):
        raise Unlike(5, "is a rotation for some sizes and values of its arguments, and not for others")
    if not all(map(is_close, [o / 1e3 for o in probe.run([x * 1e3 for x in xs], leaves)], expected)):
        raise Unlike(4, "is not linear in x")
    return True


def run_plan(probe: Probe, plan: Plan, xs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return flatten(run(prepare(plan, xs, leaves, probe.offset), xs, leaves, "reference"))


def is_close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> bool:
    a, b = as_real(a).double(), as_real(b).double()
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * (b.abs().max() + 1))


def complete(probe: Probe, plan: Plan, xs: list[Tensor], leaves: list[Tensor]) -> Plan:
    """Compare gradients, and outputs in the dtypes of the call, and note whether autocast changes these."""
    with torch.enable_grad():
        tables = [t for t in leaves if not is_integers(t)]
        inputs, grads = [t.requires_grad_() for t in (*xs, *tables)], []
        for outs in (run_plan(probe, plan, xs, leaves), probe.run(xs, leaves)):
            if not all(o.requires_grad for o in outs):
                raise Unlike(6, "passes no gradient to the tensors that it turns")
            weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape) for o in outs]
            grads.append(torch.autograd.grad(outs, inputs, weights, allow_unused=True))
    detach_tables = all(g is None for g in grads[1][len(xs) :])
    for a, b in list(zip(*grads, strict=True))[: len(xs) if detach_tables else None]:
        if (a is None) != (b is None) or (a is not None and not is_close(a, b, 1e-4)):
            raise Unlike(6, "has gradients of its own, which are not those of what it computes")
    dtypes = [e[2] for e in (*probe.data, *probe.leaves)]
    cast = [t.detach().to(dtype) for t, dtype in zip((*xs, *leaves), dtypes, strict=True)]
    xs, leaves = cast[: len(xs)], cast[len(xs) :]
    try:
        outs = probe.run(xs, leaves)
        with torch.autocast(probe.device.partition(":")[0], dtype=torch.bfloat16):
            under_autocast = probe.run(xs, leaves)
    except Exception as e:
        raise Unlike(6, f"raises {type(e).__name__} for {xs[0].dtype} and tables of {leaves[0].dtype}: {e}") from e
    same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(under_autocast, outs, strict=True))
    plan = plan._replace(dtypes=tuple(o.dtype for o in outs), detach_tables=detach_tables, ignores_autocast=same)
    if not all(is_close(a, b, 0.05) for a, b in zip(run_plan(probe, plan, xs, leaves), outs, strict=True)):
        raise Unlike(6, f"computes something else for {xs[0].dtype}")
    return plan
