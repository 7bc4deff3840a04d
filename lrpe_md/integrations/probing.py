"""Find out what a rotary function computes, by calling it with small tensors.

Tables get entries that are all different. Where x is one on one channel of each pair and zero on the other, the output
is the entry that multiplied it, which says where in the tables cos and sin of that channel are taken from.
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .plans import EQUAL, FEWER, MORE, Piece, Plan, Table, Turn, Unlike, flatten, prepare, relate, run

__all__ = [
    "Probe",
    "at_channels",
    "find_distance",
    "find_plan",
    "find_span",
    "firsts",
    "is_close",
    "layouts",
    "quietly",
]

_AXES: dict[int, tuple[int, ...]] = {1: (5,), 2: (3, 5), 3: (2, 3, 5)}  # sizes of x's axes in the first probe
_OTHERS: dict[int, list[tuple[int, ...]]] = {
    1: [(3,), (1,)],
    2: [(5, 3), (4, 4), (1, 5), (3, 1), (1, 1)],
    3: [(5, 2, 3), (3, 3, 3), (1, 3, 5), (2, 1, 5), (2, 3, 1), (1, 1, 1)],
}
_ANY_SHAPES = ((1, 1, 1, 1), (4, 3, 2, 5), (2, 7, 3, 2), (3, 2, 4, 3), (7, 4, 7, 4))  # of tensors that may not be read
_MOST_ENTRIES = 2**20  # of all tables; an entry is then exact in float32
_MOST_LAYOUTS = 300
_MOST_ANSWERS = 6  # of other functions, before a kind of arguments is given up
_TENSORS = ("data", "table", "integers")


def quietly(run: Callable[[], Any]) -> Any:
    """Call ``run`` in a thread of its own, which has no autocast, modes, transforms or compiler of the caller's.

    The default dtype is float32 meanwhile, and the random state is left as it was.
    """
    result: list[Any] = []
    error: list[BaseException] = []

    def body() -> None:
        dtype, state = torch.get_default_dtype(), torch.get_rng_state()
        compiler = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing it takes seconds
        try:
            torch.set_default_dtype(torch.float32)
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


# --- a function, and tensors for it ---------------------------------------------------------------------------------


def fill(entry: Any, tensor: Callable[[Any], Any]) -> Any:
    """Make an argument from its description; ``tensor`` gives each of its tensors."""
    if not isinstance(entry, tuple):
        return entry
    if entry[0] in (*_TENSORS, "attribute", "offset"):
        return tensor(entry)
    if entry[0] == "value":
        return entry[2]
    if entry[0] not in ("tuple", "list"):
        raise Unlike(0, "takes an argument that is neither a tensor nor a number")
    values = [fill(e, tensor) for e in entry[1:]]
    return values if entry[0] == "list" else tuple(values)


class Sizes(NamedTuple):
    """Sizes of one probe: the axes of each x, and the shape of each leaf."""

    xs: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[int, ...], ...]


class Probe:
    """A function with arguments of one kind: called with tensors in the places of theirs.

    Args:
        call: takes the arguments in order, and the tensors in place of its object's own.
        key: descriptions of the arguments, then of the object's tensors and settings.
        device: where it is called; all tensors here are on the CPU.
    """

    def __init__(self, call: Callable[..., Any], key: tuple[Any, ...], device: str = "cpu") -> None:
        self.call, self.device = call, device
        self.entries = [e for e in key if not (isinstance(e, tuple) and e[:1] in (("attribute",), ("settings",)))]
        self.offset = 1 if ("offset",) in key else None
        self.sections = [len(e) - 1 for e in key if isinstance(e, tuple) and e[0] == "list" and type(e[1]) is int]
        tensors: list[Any] = []
        fill(("tuple", *self.entries), tensors.append)
        attributes = [e for e in key if isinstance(e, tuple) and e[:1] == ("attribute",)]
        self.data = [e for e in tensors if e[0] == "data"]
        self.leaves = [e for e in tensors if e[0] in ("table", "integers")] + attributes
        self.num_inner = len(self.leaves) - len(attributes)
        self.form: tuple[str, tuple[bool, ...]] = ("tensor", ())
        ranks = {e[1] for e in self.data}
        self.num_axes = max(ranks, default=0) - 1
        if len(ranks) != 1 or self.num_axes not in _AXES or any(e[3] < 2 for e in self.data):
            raise Unlike(0, "takes no tensors to turn, of 2, 3 or 4 dimensions")
        self.axes: tuple[int, ...] = _AXES[self.num_axes]

    def arguments(self, xs: list[Tensor], leaves: list[Tensor]) -> list[Any]:
        """Return the arguments of a call with these tensors."""
        of = {"data": iter(xs), "table": (inner := iter(leaves)), "integers": inner}
        return [fill(e, lambda e: self.offset if e[0] == "offset" else next(of[e[0]])) for e in self.entries]

    def run(self, xs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        """Call the function and return its outputs."""
        if self.device != "cpu":
            return self._run_on_device(xs, leaves)
        out = self.call(self.arguments(xs, leaves), leaves[self.num_inner :])
        kind = "tensor" if isinstance(out, Tensor) else type(out).__name__
        items: list[Any] = [out] if kind == "tensor" else list(out) if kind in ("tuple", "list") else [()]
        outs = [o for o in items if isinstance(o, Tensor)]
        if any(o is not None and not isinstance(o, Tensor) for o in items):
            raise Unlike(1, f"returns {type(out).__name__}, not tensors")
        if [o.shape for o in outs] != [x.shape for x in xs]:
            shapes = [", ".join(str(tuple(t.shape)) for t in each) for each in (outs, xs)]
            raise Unlike(1, f"returns shapes {shapes[0]} for inputs of {shapes[1]}")
        self.form = kind, tuple(o is not None for o in items)
        return outs

    def _run_on_device(self, xs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        inputs = [[t.to(self.device) for t in each] for each in (xs, leaves)]
        device, self.device = self.device, "cpu"
        try:
            outs = [o.cpu() for o in self.run(*inputs)]
        finally:
            self.device = device
        if not all(map(torch.equal, [t.cpu() for each in inputs for t in each], (*xs, *leaves))):
            raise Unlike(3, "changes its arguments in place")
        return outs

    def inputs(self, sizes: Sizes, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return random tensors of these sizes, in float32."""
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
        return xs, leaves


# --- sizes to try ---------------------------------------------------------------------------------------------------


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

    def sizes(self, axes: tuple[int, ...], broadcast_axis: int | None = None, heads_axis: int | None = None) -> Sizes:
        """Return shapes, with one row along ``broadcast_axis`` and twice as many heads of the first x."""
        token, rows = axes[self.token], self.num_rows(axes)
        of_relation = {EQUAL: rows, MORE: token if token < rows else rows - 1, FEWER: rows + 2}
        xs = [
            tuple(
                of_relation[relation] if a == self.token else n * (2 if a == heads_axis and i == 0 else 1)
                for a, n in enumerate(axes)
            )
            for i, relation in enumerate(self.relations)
        ]
        tables = [1 if a == broadcast_axis else rows if a == self.token else n for a, n in enumerate(axes)]
        return Sizes(tuple(xs), tuple(tuple(tables[a] if a >= 0 else -a for a in labels) for labels in self.labels))


def labels_of(probe: Probe, entry: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Return labels for the dimensions of a leaf that are not channels, likely ones first.

    These are axes of x in order, 1, the heads that x has in its last dimension, and in front the number of sections, or
    2 for cos and sin.
    """
    count, num_axes = entry[1] - len(entry[3:]), probe.num_axes
    first = {-n for n in (*probe.sections, 2)} if count > 1 else set()
    heads = {-(probe.data[0][3] // n) for n in (2 * entry[3], entry[3])} if len(entry) > 3 and num_axes == 2 else set()
    ranked = []
    for labels in itertools.product({-1, *first, *heads, *range(num_axes)}, repeat=count):
        axes = [a for a in labels if a >= 0]
        others = [a for a in labels if a < -1]
        in_front = bool(others) and others == [labels[0]] and labels[0] in first
        if axes != sorted(set(axes)) or (not axes and count) or (others and not in_front and set(others) - heads):
            continue
        if len(others) <= 1:
            rank = 1 if not others else 3 if not in_front else 0 if -others[0] in probe.sections else 2
            ranked.append(((rank, -len(axes), [-a for a in axes[::-1]]), labels))
    return [labels for _, labels in sorted(ranked)]


def layouts(probe: Probe, relations: str) -> Iterator[Layout]:
    """Yield shapes for the first probe, likely ones first."""
    groups = list(dict.fromkeys(e for e in probe.leaves if e[0] != "attribute"))
    attributes = sorted({n for e in probe.leaves if e[0] == "attribute" for n in e[1][:-1]}, reverse=True)
    backwards = range(probe.num_axes - 1, -1, -1)
    for chosen in itertools.islice(itertools.product(*[labels_of(probe, e) for e in groups]), _MOST_LAYOUTS):
        of = dict(zip(groups, chosen, strict=True))
        labels = tuple((*of.get(e, ()), *[-n for n in (e[1] if e[0] == "attribute" else e[3:])]) for e in probe.leaves)
        if not attributes and set(relations) == {EQUAL}:
            yield Layout(labels, relations, probe.num_axes - 1)
            continue
        for axis, rows in itertools.product(backwards, attributes or (None,)):
            if attributes or any(axis in each for each in labels):
                yield Layout(labels, relations, axis, rows)


# --- reading one probe ----------------------------------------------------------------------------------------------


def is_integers(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


def as_real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def code_leaves(leaves: list[Tensor]) -> tuple[list[Tensor], float]:
    """Fill tables with entries that are all different: from 0.5 up by a step that is a power of two, below 1."""
    total = sum(as_real(t).numel() for t in leaves if not is_integers(t))
    if total > _MOST_ENTRIES:
        raise Unlike(0, f"reads tables of more than {_MOST_ENTRIES} entries")
    step, start, outputs = 0.5 ** (1 + max(total - 1, 1).bit_length()), 0, []
    for t in leaves:
        if not is_integers(t):
            real = as_real(t)
            entries = 0.5 + step * torch.arange(start, start + real.numel()).reshape(real.shape)
            start += real.numel()
            t = torch.view_as_complex(entries) if t.is_complex() else entries
        outputs.append(t)
    return outputs, step


def read_turns(probe: Probe, layout: Layout) -> tuple[Turn, ...]:
    """Call the function with entries that are all different, and read how it turns each of its tensors.

    Raises:
        Unlike: not a rotation by entries of the tables.
    """
    sizes = layout.sizes(probe.axes)
    leaves, step = code_leaves(probe.inputs(sizes, 0)[1])
    xs, _ = probe.inputs(sizes, 1)
    copies = [t.clone() for t in (*xs, *leaves)]
    outs = probe.run(xs, leaves)
    if not all(map(torch.equal, (*xs, *leaves), copies)):
        raise Unlike(3, "changes its arguments in place")
    if not all(map(torch.equal, outs, probe.run(xs, leaves))):
        raise Unlike(3, "is random: two calls with the same arguments differ")
    spans = [find_span(x, o.to(x.dtype)) for x, o in zip(xs, outs, strict=True)]
    zeros = [torch.zeros_like(x) for x in xs]
    if any(o.any() for o in probe.run(zeros, leaves)):
        raise Unlike(3, "adds something that does not depend on x")
    ones = [at_channels(z, [start]) for z, (start, _) in zip(zeros, spans, strict=True)]
    distances = [find_distance(o, span) for o, span in zip(probe.run(ones, leaves), spans, strict=True)]
    halves = [(stop - start) // 2 for start, stop in spans]

    def read(of_x: list[int]) -> tuple[Turn, ...]:
        """Read the turns where the channels of x's pairs are so far apart."""
        answers = []
        for which in (True, False):
            at = [
                start + (firsts(2 * h, d) == which).nonzero().flatten()
                for (start, _), h, d in zip(spans, halves, of_x, strict=True)
            ]
            outs = probe.run([at_channels(z, c) for z, c in zip(zeros, at, strict=True)], leaves)
            answers.append([o.float()[..., s[0] : s[1]] for o, s in zip(outs, spans, strict=True)])
        turns = []
        for i, (a, b) in enumerate(zip(*answers, strict=True)):
            first, half = firsts(2 * halves[i], distances[i]), halves[i]
            shuffle = None if of_x[i] == distances[i] else (half, 2) if of_x[i] == 1 else (2, half)
            reading = Reading(leaves, spans[i], distances[i], shuffle, layout, sizes.xs[i], probe)
            turns.append(reading.turn(torch.where(first, a, b), torch.where(first, -b, a), step))
        return tuple(turns)

    options = [distances, *[d for d in ([1] * len(xs), halves) if d != distances]]
    return first_success([lambda d=d: read(d) for d in options])


def first_success(options: Sequence[Callable[[], Any]]) -> Any:
    """Return what the first of these returns that does not raise; raise what came farthest."""
    failure = Unlike(-1, "")
    for option in options:
        try:
            return option()
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
    if (changed[-1] - changed[0]) % 2 == 0:
        raise Unlike(3, f"changes {changed[-1] - changed[0] + 1} channels, which are not pairs")
    return changed[0], changed[-1] + 1


def at_channels(zeros: Tensor, channels: Any) -> Tensor:
    """Return x that is one at these channels."""
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
        raise Unlike(4, f"mixes channel {start} into channels {hit[:4]}, which is not a pair of a known layout")
    return distance


def firsts(width: int, distance: int) -> Tensor:
    """Say for each channel whether it is the first of its pair."""
    return torch.arange(width) // distance % 2 == 0


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


class Reading(NamedTuple):
    """What is known of one x before its entries are looked up."""

    leaves: list[Tensor]
    span: tuple[int, int]
    distance: int
    shuffle: tuple[int, int] | None
    layout: Layout
    axes: tuple[int, ...]
    probe: Probe

    def turn(self, cos: Tensor, sin: Tensor, step: float) -> Turn:
        """Look up the entries that cos and sin (axes of x, rotated channels) are, or are the cosine and sine of."""
        rotates = ~((cos == 1) & (sin == 0)).all(-1)
        places = rotates.nonzero()
        if not len(places):
            raise Unlike(3, "returns x as it was")
        box = tuple(
            slice(low, high + 1) for low, high in zip(places.amin(0).tolist(), places.amax(0).tolist(), strict=True)
        )
        if not rotates[box].all():
            raise Unlike(4, "rotates some tokens, and not those between them")
        cos, sin = cos[box], sin[box]
        for angles in (False, True):
            numbers = [
                numbers_of(t, step, f if angles else None) for t, f in ((cos, Tensor.acos), (sin.abs(), Tensor.asin))
            ]
            if numbers[0] is not None and numbers[1] is not None:
                return self.with_heads((numbers[0], numbers[1], sin < 0), box, angles)
        if (cos < 0).any() and (cos.abs() >= 0.5).all():
            raise Unlike(5, "negates cos, or exchanges cos and sin, which is not a rotation by the tables")
        raise Unlike(
            4, "does not turn pairs by entries of its tables: it scales or mixes them, or has angles of its own"
        )

    def with_heads(self, codes: tuple[Tensor, ...], box: tuple[slice, ...], angles: bool) -> Turn:
        """Read a turn of heads as wide as x's last dimension, or of several in it where this takes fewer pieces."""
        width, turns = self.span[1] - self.span[0], []
        head_widths = (
            range(2 * self.distance, width, 2 * self.distance)
            if width == self.probe.data[0][3] and not self.shuffle
            else ()
        )

        def read(head: int) -> Turn:
            turn = self.of_head(codes, head, box, angles)
            turns.append(turn)
            if max(len(turn.cos.pieces), len(turn.sin.pieces)) > 2:
                raise Unlike(0, "")
            return turn

        with suppress(Unlike):
            return first_success(
                [lambda head=head: read(head) for head in (0, *[n for n in head_widths if width % n == 0])]
            )
        if not turns:
            return self.of_head(codes, 0, box, angles)  # raises
        return min(turns, key=lambda t: len(t.cos.pieces) + len(t.sin.pieces))

    def of_head(self, codes: tuple[Tensor, ...], head: int, box: tuple[slice, ...], angles: bool) -> Turn:
        """Read a turn of heads of this width in x's last dimension; 0 for x's whole width."""
        span = self.span
        if head:
            codes = tuple(t.unflatten(-1, (-1, head)) for t in codes)
            span, box = (0, head), (*box, slice(0, codes[0].shape[-2]))
        *numbers, negative = codes
        signs = negative[(0,) * (negative.ndim - 1)]
        if (negative != signs).any():
            raise Unlike(5, "turns some tokens or heads by minus their angle")
        first = firsts(span[1] - span[0], self.distance)
        sources: dict[int, tuple[Any, ...]] = {}
        begins: dict[int, set[int]] = {}  # axis -> its first row, less its first token
        entries = [self.entries(t, box, sources, begins) for t in numbers]
        halves = [[list(itertools.compress(each, mask.tolist())) for mask in (first, ~first)] for each in entries]
        per_pair = all(one == two for one, two in halves)
        if signs.any() and not signs.all() and (per_pair or not self.are_matrices(*halves[1])):
            raise Unlike(5, "turns the channels of a pair by opposite angles, which is not a rotation")
        inverse = bool(signs.all())
        negated = [False] * len(first) if inverse else signs.tolist()
        if per_pair:
            entries = [one for one, _ in halves]
        alternates = self.distance == 1 and not per_pair
        cos, sin = make_table(entries[0], [False] * len(first), alternates), make_table(entries[1], negated, alternates)
        dim_sources = [s for dims in sources.values() for s in dims if s is not None]
        axes = {a for s in dim_sources for a in (s[2] if isinstance(s, tuple) else (s,))}
        if not axes:
            raise Unlike(5, "turns all tokens alike")
        half = (span[1] - span[0]) // 2
        pairs: Any = "half" if self.distance == half else (self.distance,) * (half // self.distance)
        return Turn(
            cos, sin, angles, inverse, "interleaved" if self.distance == 1 < half else pairs, span, self.shuffle, head,
            tuple(sorted(sources.items())), tuple(sorted(axes)), self.rows(begins, box),
        )  # fmt: skip

    def entries(self, codes: Tensor, box: Any, sources: dict[int, Any], begins: dict[int, set[int]]) -> list[Any]:
        """Return for each channel the leaf and the place in its dimensions, None where it follows an axis of x.

        ``sources`` gets what the dimensions of each leaf follow, ``begins`` where they begin.
        """
        channels: list[Any] = [None] * codes.shape[-1]
        start, origin = 0, (0,) * (codes.ndim - 1)
        for leaf, t in enumerate(self.leaves):
            if is_integers(t):
                continue
            shape, size = as_real(t).shape, as_real(t).numel()
            in_leaf = (codes >= start) & (codes < start + size)
            channel_mask = in_leaf[origin]
            if (in_leaf != channel_mask).any():
                raise Unlike(5, "takes the tables of some tokens from another tensor")
            follows, at = [], []
            for place in torch.unravel_index(codes[..., channel_mask] - start, shape) if channel_mask.any() else ():
                base = place[origin]
                source = self.source(place) if (place != base).any() else None
                if isinstance(source, int):
                    begins.setdefault(source, set()).add(int(base[0]) - box[source].start)
                follows.append(source)
                at.append(base.tolist() if source is None else [None] * len(base))
            if follows and sources.setdefault(leaf, tuple(follows)) != tuple(follows):
                raise Unlike(5, "reads cos and sin in different orders")
            for channel, entry in zip(channel_mask.nonzero().flatten().tolist(), zip(*at, strict=True), strict=True):
                channels[channel] = leaf, entry
            start += size
        return channels

    def source(self, place: Tensor) -> Any:
        """Return the axis that the places follow one by one, or the integers that they are."""
        delta = place - place[(0,) * (place.ndim - 1)]
        for axis in range(place.ndim - 1):
            count = torch.arange(place.shape[axis]).reshape([-1 if a == axis else 1 for a in range(place.ndim)])
            if torch.equal(delta, count.expand_as(delta)) and (place == place[..., :1]).all():
                return axis
        for j, t in enumerate(self.leaves):
            for axes in itertools.combinations(range(place.ndim - 1), t.ndim) if is_integers(t) and t.ndim else ():
                sizes = torch.Size([place.shape[a] if a in axes else 1 for a in range(place.ndim)])
                if t.numel() == sizes.numel() and torch.equal(t.reshape(sizes).expand_as(place).long(), place):
                    return ("positions", j, axes)
        raise Unlike(5, "reads its tables in an order that is not the tokens'")

    def are_matrices(self, one: list[Any], two: list[Any]) -> bool:
        """Say whether the sines of each pair are the entries (0, 1) and (1, 0) of a 2 × 2 matrix of its own."""
        square = all(self.leaves[leaf].shape[-2:] == (2, 2) for leaf, _ in (*one, *two))
        return square and [{at[-2:] for _, at in each} for each in (one, two)] == [{(0, 1)}, {(1, 0)}]

    def rows(self, begins: dict[int, set[int]], box: tuple[slice, ...]) -> str:
        """Say where in the tables the row of the first token is; see :class:`Turn`."""
        token, offset = self.layout.token, self.probe.offset
        tokens, rows = self.axes[token], self.layout.num_rows(self.probe.axes)
        for axis, (part, size) in enumerate(zip(box, self.axes, strict=False)):
            allowed = (slice(0, size), slice(0, rows), slice(size - rows, size))[: 3 if axis == token else 1]
            if part not in allowed or (axis != token and begins.get(axis, {0}) != {0}):
                raise Unlike(5, "rotates a part of its tokens that does not follow from the tables' size")
        begin = begins.get(token, {0})
        names = {rows - tokens: "end", 0: "start"} if offset is None else {offset: "offset"}
        if len(begin) > 1 or not begin <= set(names):
            raise Unlike(5, "begins to read its tables at a row that does not follow from their size")
        return names[begin.pop()]


def make_table(entries: list[Any], negative: list[bool], alternates: bool) -> Table:
    """Gather the entries of channels in as few pieces as possible."""
    pieces = gather(entries, negative)
    if alternates and len(pieces) > 1:
        parts = [gather(entries[i::2], negative[i::2]) for i in (0, 1)]
        if all(len(p) == 1 for p in parts):
            return Table((*parts[0], *parts[1]), True)
    return Table(tuple(pieces), False)


def gather(entries: list[Any], negative: list[bool]) -> list[Piece]:
    """Join entries that follow each other along one dimension of a leaf, in steps of one size."""
    pieces: list[Piece] = []
    start = 0
    while start < len(entries):
        (leaf, at), stop, step = entries[start], start + 1, None
        while stop < len(entries) and negative[stop] == negative[start] and entries[stop][0] == leaf:
            differ = [
                (d, n - m)
                for d, (m, n) in enumerate(zip(entries[stop - 1][1], entries[stop][1], strict=True))
                if m != n
            ]
            if len(differ) != 1 or differ[0][1] < 0 or step not in (None, differ[0]):
                break
            stop, step = stop + 1, differ[0]
        index = list(at)
        if step is not None:
            dim, by = step
            index[dim] = (at[dim], at[dim] + by * (stop - start - 1) + 1, by)
        pieces.append(Piece(leaf, tuple(index), negative[start]))
        start = stop
    return pieces


# --- a plan ---------------------------------------------------------------------------------------------------------


def find_plan(call: Callable[..., Any], key: tuple[Any, ...], relations: str, device: str = "cpu") -> Plan:
    """Find out what ``call`` does with arguments of this kind.

    Raises:
        Unlike: something that is no rotation by its tables, or none that tables in the operator can do.
    """
    probe = Probe(call, key, device)
    failure, num_answers = Unlike(-1, "takes no arguments of this kind"), 0
    for layout in layouts(probe, relations):
        try:
            return make_plan(probe, layout)
        except Unlike as e:
            failure = max(failure, e, key=lambda e: e.depth)
            num_answers += e.depth >= 4
            if num_answers == _MOST_ANSWERS:
                break
        except Exception as e:  # whatever somebody else's function raises
            failure = max(failure, Unlike(0, f"raises {type(e).__name__}: {e}"), key=lambda e: e.depth)
            if not isinstance(e, (RuntimeError, IndexError, AssertionError)):  # not because of sizes
                break
    raise failure


def make_plan(probe: Probe, layout: Layout) -> Plan:
    """Read the turns of one layout, then try the plan at other sizes, in the dtypes of the call, and its gradients."""
    turns = read_turns(probe, layout)
    axes: tuple[int, ...] = probe.axes
    if len({t.inverse for t in turns}) > 1:
        raise Unlike(5, "turns its tensors by opposite angles")
    if any(max(a for a in t.axes if a < len(axes)) != layout.token for t in turns) and set(layout.relations) != {EQUAL}:
        raise Unlike(5, "has more tokens or rows along an axis that is not the tokens'")
    same_as_next = tuple(a == b for a, b in itertools.pairwise(turns))
    plan = Plan(turns, layout.relations, probe.form, same_as_next, (torch.float32,) * len(turns))
    sizes = layout.sizes(axes)
    compare(probe, plan, sizes)
    plan = plan._replace(required_sizes=find_required_sizes(probe, plan, layout))
    for other in _OTHERS[probe.num_axes]:
        compare(probe, plan, layout.sizes(other))
    if probe.offset is not None:
        probe.offset = 2
        compare(probe, plan, sizes)
        probe.offset = 1
    first = turns[0].axes
    for axis in {1, 2} - {*first, layout.token} if len(turns) > 1 and len(axes) == 3 else ():
        compare(probe, plan, layout.sizes(axes, heads_axis=axis))
    for axis in [a for a in first if a < len(axes)]:
        candidate = plan._replace(broadcast_axes=(*plan.broadcast_axes, axis))
        with suppress(Unlike):
            plan = candidate if compare(probe, candidate, layout.sizes(axes, broadcast_axis=axis)) else plan
    return with_dtypes(probe, plan._replace(detach_tables=compare_gradients(probe, plan, sizes)), sizes)


def find_required_sizes(probe: Probe, plan: Plan, layout: Layout) -> tuple[tuple[int, int, int], ...]:
    """Return the dimensions of leaves whose sizes matter, without following an axis of x; see :class:`Plan`."""
    sources = {leaf: dims for turn in plan.turns for leaf, dims in turn.sources}
    positions = {s[1] for dims in sources.values() for s in dims if isinstance(s, tuple)}
    sizes, required = layout.sizes(probe.axes), []

    def is_indifferent(leaf: int, shape: tuple[int, ...]) -> bool:
        leaves = (*sizes.leaves[:leaf], shape, *sizes.leaves[leaf + 1 :])
        with suppress(Unlike):
            return compare(probe, plan, sizes._replace(leaves=leaves))
        return False

    for leaf, (entry, labels) in enumerate(zip(probe.leaves, layout.labels, strict=True)):
        dims = [(leaf, dim, labels[dim]) for dim in range(len(labels) - len(entry[3:]))]
        if leaf in sources:
            dims = [d for d in dims if sources[leaf][d[1]] is None]
            if any(label >= 0 for _, _, label in dims):
                raise Unlike(0, "takes tables of another shape")
        elif leaf in positions or all(is_indifferent(leaf, (*n[: len(dims)], *entry[3:])) for n in _ANY_SHAPES):
            continue
        required += dims if entry[0] != "attribute" else []
    return tuple(required)


def compare(probe: Probe, plan: Plan, sizes: Sizes) -> bool:
    """Compare the plan with the function; False where either does not take these sizes."""
    xs, leaves = probe.inputs(sizes, 2)
    try:
        expected = probe.run(xs, leaves)
    except Exception:  # the function does not take them
        return False
    if relate(plan, xs, leaves, probe.offset or 0) != plan.relations:
        return False
    if not all(map(is_close, run_plan(probe, plan, xs, leaves), expected)):
        raise Unlike(5, "is a rotation for some sizes and values of its arguments, and not for others")
    if not all(map(is_close, [o / 1e3 for o in probe.run([x * 1e3 for x in xs], leaves)], expected)):
        raise Unlike(4, "is not linear in x")
    return True


def run_plan(probe: Probe, plan: Plan, xs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return flatten(run(prepare(plan, xs, leaves, probe.offset or 0), xs, leaves, "reference"))


def is_close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> bool:
    a, b = as_real(a).double(), as_real(b).double()
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * (b.abs().max() + 1))


def compare_gradients(probe: Probe, plan: Plan, sizes: Sizes) -> bool:
    """Compare the gradients with the function's; return whether it passes none to the tables."""
    xs, leaves = probe.inputs(sizes, 3)
    used = sorted({leaf for t in plan.turns for leaf, _ in t.sources})
    grads = []
    with torch.enable_grad():
        inputs = [t.requires_grad_() for t in (*xs, *[leaves[i] for i in used])]
        for outs in (probe.run(xs, leaves), run_plan(probe, plan, xs, leaves)):
            if not all(o.requires_grad for o in outs):
                raise Unlike(6, "passes no gradient to the tensors that it turns")
            weights = [torch.linspace(-1, 1, o.numel()).reshape(o.shape) for o in outs]
            grads.append(torch.autograd.grad(outs, inputs, weights, allow_unused=True))
    detach_tables = all(g is None for g in grads[0][len(xs) :])
    for a, b in list(zip(*grads, strict=True))[: len(xs) if detach_tables else None]:
        if a is None or b is None or not is_close(b, a, 1e-4):
            raise Unlike(6, "has gradients of its own, which are not those of what it computes")
    return detach_tables


def with_dtypes(probe: Probe, plan: Plan, sizes: Sizes) -> Plan:
    """Note the dtypes of the outputs for inputs of the call's dtypes, and whether autocast changes them."""
    xs, leaves = probe.inputs(sizes, 4)
    xs = [x.to(e[2]) for x, e in zip(xs, probe.data, strict=True)]
    leaves = [t.to(e[2]) for t, e in zip(leaves, probe.leaves, strict=True)]
    try:
        outs = probe.run(xs, leaves)
        with torch.autocast(probe.device.partition(":")[0], dtype=torch.bfloat16):
            cast = probe.run(xs, leaves)
    except Exception as e:
        raise Unlike(6, f"raises {type(e).__name__} for {xs[0].dtype} and tables of {leaves[0].dtype}: {e}") from e
    dtypes = tuple(o.dtype for o in outs)
    same_as_next = tuple(a and dtypes[i] == dtypes[i + 1] for i, a in enumerate(plan.same_as_next))
    plan = plan._replace(dtypes=dtypes, same_as_next=same_as_next)
    if not all(is_close(a, b, 0.05) for a, b in zip(run_plan(probe, plan, xs, leaves), outs, strict=True)):
        raise Unlike(6, f"computes something else for {xs[0].dtype}")
    same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(cast, outs, strict=True))
    return plan._replace(ignores_autocast=same)
