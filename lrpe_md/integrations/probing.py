"""Find out what a rotary function computes by calling it with small tensors.

All table entries get distinct values. If x is 1 in one channel of each pair and 0 in the other, the output shows which
table entries multiplied x. These entries are the cos and sin of that channel.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .plans import (
    EQUAL,
    FEWER,
    MORE,
    Follow,
    PreparedCall,
    RotationPlan,
    Run,
    Turn,
    Unlike,
    arrange,
    prepare,
    run_prepared,
)

__all__ = [
    "Probe", "are_close", "find_plan", "firsts", "get_forward", "layouts", "name_pairs", "quietly", "read_pairs",
]  # fmt: skip

_AXES: dict[int, tuple[int, ...]] = {1: (5,), 2: (3, 5), 3: (2, 3, 5)}  # sizes of x's axes in the first probe
_OTHERS: dict[int, list[tuple[int, ...]]] = {
    1: [(3,), (1,)],
    2: [(5, 3), (4, 4), (1, 5), (3, 1), (1, 1)],
    3: [(5, 2, 3), (3, 3, 3), (1, 3, 5), (2, 1, 5), (2, 3, 1), (1, 1, 1)],
}
_MOST_ENTRIES = 2**20  # total over all tables, so an entry is exact in float32
_MOST_TOKENS = 5  # tokens per axis whose entries are looked up
_MOST_LAYOUTS = 300
_MOST_ANSWERS = 6  # give up on a kind of arguments after this many results that are not rotations
_OWN_TABLES = "if it computes its own tables from positions, use recognise()"
_OTHERWISE = "is a rotation for some sizes and values of its arguments, but not for others"

_probes = threading.local()  # has the attribute ``is_running`` in threads that quietly() started
_lock = threading.Lock()  # quietly() changes settings of the whole process

Shapes = tuple[list[Any], list[Any]]  # shape of each x without channels, and of each leaf
Tensors = tuple[list[Tensor], list[Tensor]]


def quietly(function: Callable[[], Any]) -> Any:
    """Call a function in a separate thread, without the caller's autocast, modes, transforms or compiler.

    During the call, the default dtype is float32. The random state is preserved. Calls from several threads wait for
    each other, because each one has to restore the settings that it found.
    """

    def body() -> Any:
        _probes.is_running = True
        dtype, state = torch.get_default_dtype(), torch.get_rng_state()
        is_compiling = "torch._dynamo" in sys.modules  # skip the slow import if the compiler is not in use
        try:
            torch.set_default_dtype(torch.float32)
            stance = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
            with warnings.catch_warnings(), stance, torch.no_grad():
                warnings.simplefilter("ignore")
                return function()
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(state)

    is_nested = getattr(_probes, "is_running", False)  # the outer call holds the lock
    with nullcontext() if is_nested else _lock, ThreadPoolExecutor(1) as thread:
        return thread.submit(body).result()


def get_forward(function: Any) -> Callable[..., Any]:
    """Return the function that has the signature: the ``forward`` of a module, or the function itself."""
    return function.forward if isinstance(function, nn.Module) else function


def fill(entry: Any, tensor: Callable[[Any], Any]) -> Any:
    """Build an argument from its description. ``tensor`` makes each tensor, and the offset."""
    if not isinstance(entry, tuple):
        return entry
    if entry[0] in ("tuple", "list"):
        values = [fill(e, tensor) for e in entry[1:]]
        return values if entry[0] == "list" else tuple(values)
    if entry[0] == "unknown":
        raise Unlike(0, "takes an argument that is neither a tensor nor a number")
    return entry[2] if entry[0] == "value" else tensor(entry)


class _ChangeOthers(TorchDispatchMode):
    """Dispatch mode that changes tensors that are neither arguments nor results, such as a global variable.

    Arguments and intermediate results are new tensors in each call. Any other tensor is changed from the second call
    on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.first_calls = 0, WeakTensorKeyDictionary()
        self.shapes: set[tuple[int, ...]] = set()  # of the changed tensors

    def __enter__(self) -> Any:
        self.num_calls += 1
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self.change(value) for name, value in (kwargs or {}).items()}
        return func(*map(self.change, args), **kwargs)

    def change(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [*map(self.change, value)]
        if not isinstance(value, Tensor) or self.first_calls.setdefault(value, self.num_calls) == self.num_calls:
            return value
        self.shapes.add(tuple(value.shape))
        return value.logical_not().to(value.dtype)


class Probe:
    """A function to call with arguments of one kind.

    ``call`` takes the arguments in order, and tensors to use instead of its object's tensors. ``key`` describes the
    arguments, and the object's tensors and settings. ``widths`` are the allowed widths of outputs, as multiples of x's.
    """

    def __init__(
        self, call: Callable[..., Any], key: tuple[Any, ...], device: str = "cpu", widths: tuple[int, ...] = (1,)
    ) -> None:
        self.call, self.device, self.widths = call, device, widths
        self.others = _ChangeOthers()
        attributes = [e for e in key if isinstance(e, tuple) and e[0] == "attribute"]
        self.entries = [e for e in key if not (isinstance(e, tuple) and e[0] in ("attribute", "settings"))]
        self.offset = 1 if ("offset",) in key else 0
        tensors: list[Any] = []
        fill(("tuple", *self.entries), tensors.append)
        self.data = [e for e in tensors if e[0] == "data"]
        inner = [e for e in tensors if e[0] in ("table", "integers")]
        self.leaves, self.num_inner = inner + attributes, len(inner)
        self.form: tuple[str, tuple[bool, ...]] = ("tensor", ())
        ranks = {e[1] for e in self.data}
        if len(ranks) != 1 or not ranks <= {2, 3, 4} or any(e[3] < 2 for e in self.data):
            raise Unlike(0, "has no tensor argument with 2, 3 or 4 dimensions to rotate")
        self.axes = _AXES[ranks.pop() - 1]

    def arguments(self, xs: list[Tensor], leaves: list[Any]) -> list[Any]:
        of = {"data": iter(xs), "table": (inner := iter(leaves)), "integers": inner, "offset": iter([self.offset])}
        return [fill(e, lambda e: next(of[e[0]])) for e in self.entries]

    def run(self, xs: list[Tensor], leaves: list[Any], change_others: bool = False) -> list[Tensor]:
        """Call the function with copies, and return its outputs."""
        inputs = [t.to(self.device, copy=True) if isinstance(t, Tensor) else t for t in (*xs, *leaves)]
        arguments = self.arguments(inputs[: len(xs)], inputs[len(xs) :])
        with self.others if change_others else nullcontext():
            out = self.call(arguments, inputs[len(xs) + self.num_inner :])
        kind = "tensor" if isinstance(out, Tensor) else type(out).__name__
        items: list[Any] = [out] if kind == "tensor" else list(out) if kind in ("tuple", "list") else [()]
        if not all(o is None or isinstance(o, Tensor) for o in items):
            raise Unlike(1, f"does not return tensors ({kind})")
        outs = [o.cpu() for o in items if o is not None]
        if [o.shape for o in outs] not in [[(*x.shape[:-1], n * x.shape[-1]) for x in xs] for n in self.widths]:
            shapes = [", ".join(str(tuple(t.shape)) for t in each) for each in (outs, xs)]
            raise Unlike(1, f"returns tensors of shape {shapes[0]} for inputs of shape {shapes[1]}")
        originals = zip((*xs, *leaves), inputs, strict=True)
        if not all(torch.equal(t, copy.cpu()) for t, copy in originals if isinstance(t, Tensor)):
            raise Unlike(3, "changes its arguments in place")
        self.form = kind, tuple(o is not None for o in items)
        return outs

    def inputs(self, shapes: Shapes, seed: int) -> Tensors:
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


class LeafShapes(NamedTuple):
    labels: tuple[tuple[int, ...], ...]  # for each dimension of each leaf, an axis of x, or minus a fixed size
    relations: str
    token: int  # axis along which tables may have more or fewer rows than x has tokens
    rows: int | None = None  # if an object owns the tables

    def shapes(self, axes: tuple[int, ...], one_row: int = -1, more_heads: int = -1, shorter: int = -1) -> Shapes:
        """Return shapes with a single row along ``one_row``.

        The first x is twice as long along ``more_heads``. The x with index ``shorter`` has one fewer token.
        """
        table, xs = [*axes], [[*axes] for _ in self.relations]
        tokens = axes[self.token]
        rows = table[self.token] = self.rows or tokens + (0 if set(self.relations) == {EQUAL} else 2 + tokens % 2)
        lengths = {EQUAL: rows, MORE: min(tokens, rows - 1), FEWER: rows + 2 + tokens % 2}
        for x, relation in zip(xs, self.relations, strict=True):
            x[self.token] = lengths[relation]
        if one_row >= 0:
            table[one_row] = 1
        if more_heads >= 0:
            xs[0][more_heads] *= 2
        if shorter >= 0:
            xs[shorter][self.token] -= 1
        return xs, [[table[a] if a >= 0 else -a for a in labels] for labels in self.labels]


def layouts(probe: Probe, relations: str) -> Iterator[LeafShapes]:
    """Yield shapes for the first probe, most likely first.

    Dimensions other than channels follow the axes of x in order, or have size 1, or the number of heads in x's last
    dimension. A leading dimension may also be the number of sections, or 2 for cos and sin.
    """
    num_axes, lists = len(probe.axes), [e for e in probe.entries if isinstance(e, tuple) and e[0] == "list"]
    sections = [len(e) - 1 for e in lists if all(type(n) is int for n in e[1:])]

    def labels_of(entry: tuple[Any, ...]) -> list[tuple[int, ...]]:
        count, ranked = entry[1] - len(entry[3:]), []
        first = {-n for n in (*sections, 2)} if count > 1 else set()
        heads = {-(probe.data[0][3] // n) for w in entry[3:4] for n in (2 * w, w)} if num_axes == 2 else set()
        for labels in itertools.product({-1, *first, *heads, *range(num_axes)}, repeat=count):
            axes, others = [a for a in labels if a >= 0], [a for a in labels if a < -1]
            in_front = bool(others) and others == [labels[0]] and labels[0] in first
            is_known = not others or in_front or (len(others) == 1 and others[0] in heads)
            if is_known and axes == sorted(set(axes)) and (axes or not count):
                rank = 1 if not others else 3 if not in_front else 0 if -others[0] in sections else 2
                ranked.append(((rank, -len(axes), [-a for a in axes[::-1]]), labels))
        return [labels for _, labels in sorted(ranked)]

    groups = list(dict.fromkeys(e for e in probe.leaves if e[0] != "attribute"))
    own_rows = sorted({n for e in probe.leaves if e[0] == "attribute" for n in e[1][:-1]}, reverse=True)
    for chosen in itertools.islice(itertools.product(*map(labels_of, groups)), _MOST_LAYOUTS):
        of = dict(zip(groups, chosen, strict=True))
        labels = tuple((*of.get(e, ()), *[-n for n in (e[1] if e[0] == "attribute" else e[3:])]) for e in probe.leaves)
        is_equal = set(relations) == {EQUAL} and not own_rows
        for axis, rows in itertools.product(range(num_axes)[::-1][: 1 if is_equal else None], own_rows or (None,)):
            if own_rows or is_equal or any(axis in each for each in labels):
                yield LeafShapes(labels, relations, axis, rows)


class Pairs(NamedTuple):
    span: tuple[int, int]  # range of rotated channels
    distance: int  # between the two channels of a pair in the output, or 0 for the cosine map
    distance_in_x: int
    cos: Tensor  # (axes of x, channels of the span)
    sin: Tensor


def read_pairs(call: Callable[[Tensor], Tensor], x: Tensor) -> Pairs:
    """Measure how a function rotates the channels of x. Raise Unlike if it does not rotate pairs of channels."""
    out, zeros = call(x), torch.zeros_like(x)
    if not torch.equal(out, call(x)):
        raise Unlike(3, "is random: two calls with the same arguments differ")
    if call(zeros).any():
        raise Unlike(3, "adds something that does not depend on x")
    if out.shape != x.shape:
        return Pairs((0, x.shape[-1]), 0, 0, *call(torch.ones_like(x)).chunk(2, -1))
    changed = find_channels(x != out.to(x.dtype))
    if not changed:
        raise Unlike(3, "returns x unchanged")
    start, width = changed[0], changed[-1] + 1 - changed[0]

    def respond(channels: Any) -> Tensor:
        """Return the output for an x that is 1 in these channels of the changed range and 0 elsewhere."""
        ones = zeros.clone()
        ones[..., start : start + width][..., channels] = 1
        return call(ones).to(x.dtype)

    hit = find_channels(respond(0))
    if len(hit) == 1:
        raise Unlike(4, f"{'scales' if hit[0] == start else 'moves'} channels without rotating them in pairs")
    distance = hit[1] - hit[0] if len(hit) == 2 else 0
    if not distance or hit[0] != start or width % (2 * distance):
        raise Unlike(4, f"mixes channel {start} into channels {hit[:4]}, which do not form a pair of a known layout")
    in_x = next((d for d in (distance, 1, width // 2) if find_channels(respond(d)) == hit), distance)
    first, first_in_x = firsts(width, distance), firsts(width, in_x)
    a, b = (respond(mask)[..., start : start + width] for mask in (first_in_x, ~first_in_x))
    return Pairs((start, start + width), distance, in_x, torch.where(first, a, b), torch.where(first, -b, a))


def find_channels(t: Tensor) -> list[int]:
    return t.flatten(0, -2).any(0).nonzero().flatten().tolist()


def firsts(width: int, distance: int) -> Tensor:
    return torch.arange(width) // distance % 2 == 0


def name_pairs(width: int, distance: int) -> Any:
    half = width // 2
    return "half" if distance == half else "interleaved" if distance == 1 else (distance,) * (half // distance)


def as_real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


class Reading:
    """Rotations read with coded tables, whose entries differ and are evenly spaced from 0.5 up to 1."""

    def __init__(self, probe: Probe, layout: LeafShapes) -> None:
        self.probe, self.layout = probe, layout
        xs, self.leaves = probe.inputs(layout.shapes(probe.axes), 1)
        self.shapes = {i: as_real(t).shape for i, t in enumerate(self.leaves) if probe.leaves[i][0] != "integers"}
        counts = [shape.numel() for shape in self.shapes.values()]
        self.total = sum(counts)
        if self.total > _MOST_ENTRIES:
            raise Unlike(0, f"reads tables of more than {_MOST_ENTRIES} entries")
        self.step = 0.5 ** (1 + max(self.total - 1, 1).bit_length())  # a power of two
        codes = (0.5 + self.step * torch.arange(self.total)).split(counts)
        for (i, shape), part in zip(self.shapes.items(), codes, strict=True):
            part = part.reshape(shape)
            self.leaves[i] = torch.view_as_complex(part) if self.leaves[i].is_complex() else part

        def call(i: int, x: Tensor) -> Tensor:
            return probe.run([*xs[:i], x, *xs[i + 1 :]], self.leaves)[i]

        zeros = [torch.zeros_like(x) for x in xs]
        for i, j in itertools.permutations(range(len(xs)), 2):
            others_zero = [*zeros[:j], xs[j], *zeros[j + 1 :]]
            if probe.run(others_zero, self.leaves)[i].any() and not probe.run(zeros, self.leaves)[i].any():
                raise Unlike(
                    3, f"computes output {i + 1} from tensor {j + 1} instead of only tensor {i + 1}; check whether it "
                    "uses q in place of k, or k in place of q"
                )  # fmt: skip
        self.turns = tuple(self.turn(read_pairs(partial(call, i), x)) for i, x in enumerate(xs))

    def place(self, numbers: list[int]) -> tuple[int, list[tuple[int, ...]]]:
        """Return the leaf of the first entry, and the indices of the entries in each dimension of that leaf."""
        leaves = iter(self.shapes.items())
        leaf, shape = next(leaves)
        while numbers[0] >= shape.numel():
            numbers = [number - shape.numel() for number in numbers]
            leaf, shape = next(leaves)
        places: list[tuple[int, ...]] = []
        for size in reversed(shape):
            places.append(tuple(number % size for number in numbers))
            numbers = [number // size for number in numbers]
        return leaf, places[::-1]

    def turn(self, pairs: Pairs) -> Turn:
        """Find the table entries that contain cos and sin, or the angles from which they are computed."""
        rotates = ~((pairs.cos == 1) & (pairs.sin == 0)).all(-1)
        places = rotates.nonzero()
        box = tuple(slice(i, j + 1) for i, j in zip(places.amin(0).tolist(), places.amax(0).tolist(), strict=True))
        if not rotates[box].all():
            raise Unlike(4, f"rotates some tokens but skips tokens between them; {_OWN_TABLES}")
        cos, sin = pairs.cos[box].double(), pairs.sin[box].double()
        for angles, values in ((False, (cos, sin.abs())), (True, (cos.acos(), sin.abs().asin()))):
            numbers = (torch.stack(values) - 0.5) / self.step
            rounded = numbers.round()
            is_near = (numbers - rounded).abs().max() < (0.3 if angles else 0.01)
            if is_near and rounded.min() >= 0 and rounded.max() < self.total:
                break
        else:
            if not self.total:
                raise Unlike(
                    4, "uses other angles than those in the argument or tensor where drop_in looks for them. If the "
                    "function computes them from positions, see recognise()"
                )  # fmt: skip
            if (cos < 0).any() and (cos.abs() >= 0.5).all():
                raise Unlike(5, "negates cos, or swaps cos and sin, so it does not rotate by the tables")
            what = "does not rotate pairs by the entries of its tables: it scales or mixes them, or uses other angles"
            raise Unlike(4, f"{what}; {_OWN_TABLES}")
        width, step = pairs.span[1] - pairs.span[0], 2 * pairs.distance
        may_have_heads = width == self.probe.data[0][3] and pairs.distance == pairs.distance_in_x
        turns, failures = [], []
        for head in (0, *(n for n in range(step, width, step) if width % n == 0 and may_have_heads)):
            try:
                turns.append(self.turn_of_heads(pairs, (*rounded.long(), sin < 0), box, head)._replace(angles=angles))
            except Unlike as e:
                failures.append(e)
            if turns and max(len(turns[-1].cos[0]), len(turns[-1].sin[0])) <= 2:
                return turns[-1]
        if not turns:
            raise failures[0]
        return min(turns, key=lambda turn: len(turn.cos[0]) + len(turn.sin[0]))

    def turn_of_heads(self, pairs: Pairs, codes: tuple[Tensor, ...], box: tuple[slice, ...], head: int) -> Turn:
        """Read the rotation, assuming that heads have this width in x's last dimension (0 for the whole dimension)."""
        (start, stop), num_axes, width = pairs.span, len(box), head or self.probe.data[0][3]
        if head:
            codes = tuple(t.unflatten(-1, (-1, head)) for t in codes)
            start, stop, box = 0, head, (*box, slice(0, codes[0].shape[-2]))
        codes = tuple(t[(slice(0, _MOST_TOKENS),) * len(box)] for t in codes)
        tokens = list(itertools.product(*[range(part.start, part.stop)[:_MOST_TOKENS] for part in box]))
        candidates = {Follow((axis,)): [at[axis] for at in tokens] for axis in range(len(box))}
        for leaf, t in enumerate(self.leaves):
            for axes in itertools.combinations(range(len(box)), t.ndim) if leaf not in self.shapes and t.ndim else ():
                if list(t.shape) == [box[a].stop - box[a].start for a in axes]:
                    candidates[Follow(axes, leaf)] = [
                        int(t[tuple(at[a] - box[a].start for a in axes)]) for at in tokens
                    ]
        begins: dict[Follow, int] = {}  # index of the first token, minus its position

        @cache
        def follow(column: tuple[int, ...]) -> Any:
            if len(set(column)) == 1:
                return column[0]
            for at, numbers in candidates.items():
                if len({index - n for index, n in zip(column, numbers, strict=True)}) == 1:
                    begins[at] = column[0] - numbers[0]
                    return at
            raise Unlike(5, "reads its tables in a different order from the tokens")

        def locate(numbers: list[int], is_negated: bool) -> tuple[Any, ...]:
            leaf, places = self.place(numbers)
            return leaf, is_negated, tuple(map(follow, places))

        first, signs = firsts(stop - start, pairs.distance).tolist(), codes[2].flatten(0, -2)[0].tolist()
        inverse = all(signs)
        negated = ([False] * len(first), [False] * len(first) if inverse else signs)
        tables = [[*map(locate, t.flatten(0, -2).T.tolist(), n)] for t, n in zip(codes[:2], negated, strict=True)]
        by_pair = [[[e for e, f in zip(t, first, strict=True) if f == one] for one in (True, False)] for t in tables]
        corners = [{(*self.shapes[leaf][-2:], *at[-2:]) for leaf, _, at in each} for each in by_pair[1]]
        if any(negated[1]) and corners != [{(2, 2, 0, 1)}, {(2, 2, 1, 0)}]:
            raise Unlike(5, "rotates the channels of a pair by opposite angles, which is not a rotation of the pair")
        per_pair = all(one == two for one, two in by_pair)
        followed = sorted({axis for at in begins for axis in at.axes if axis < num_axes})
        if not followed:
            raise Unlike(5, "rotates all tokens by the same angles")
        axes = [a for a in range(len(box)) if a != followed[-1]]
        if len(axes) == 1:  # the batch axis if the tables vary along it, or else the heads axis
            axes.insert(axes[0] in followed, -1)
        axes = (*range(len(axes) - 2, 0), *axes, followed[-1])
        labels = [*range(len(box)), "channels"]
        index, order = arrange([slice(None)] * len(labels), labels, [*axes, "channels"])
        cos, sin = (
            self.view(one if per_pair else table, axes, pairs.distance == 1 and not per_pair)
            for table, (one, _) in zip(tables, by_pair, strict=True)
        )
        token, in_x, half = self.layout.token, pairs.distance_in_x, (stop - start) // 2
        is_first = begins.get(Follow((token,)), 0) == box[token].start == 0
        rows = "offset" if self.probe.offset else "start" if is_first else "end"
        return Turn(
            cos, sin, False, rows, head, axes, index, order,
            None if order is None else tuple(order.index(i) for i in range(len(order))),
            None if index is None else tuple(0 if i is None else i for i in index), (start, stop),
            None if in_x == pairs.distance else (half, 2) if in_x == 1 else (2, half),
            name_pairs(stop - start, pairs.distance),
            slice(start, stop) if start else stop if stop < width else None, inverse,
        )  # fmt: skip

    def view(self, entries: list[Any], axes: tuple[int, ...], may_alternate: bool) -> tuple[tuple[Run, ...], bool]:
        """Return the entries of the channels in as few runs as possible, and whether the runs alternate."""
        found, alternate = gather(entries), False
        if may_alternate and len(found) > 1:
            by_turns = [run for i in (0, 1) for run in gather(entries[i::2])]
            found, alternate = (by_turns, True) if len(by_turns) == 2 else (found, False)
        runs = []
        for leaf, is_negated, place in found:
            index, labels = cast(list[Any], []), cast(list[Any], [])
            for at, size in zip(place, self.shapes[leaf], strict=True):
                if isinstance(at, Follow):
                    labels += at.axes
                    index += [slice(None)] * len(at.axes)
                else:
                    labels += ["channels"] if isinstance(at, slice) else []
                    index.append(slice(None) if at == slice(0, size, 1) else at)
            # rotate accepts tables without heads, and without batch and heads.
            first_axes = axes[:2] if axes[1] in labels else [a for a in axes[:1] if a in labels]
            follows = tuple((dim, at) for dim, at in enumerate(place) if isinstance(at, Follow))
            runs.append(Run(leaf, follows, *arrange(index, labels, [*first_axes, axes[2], "channels"]), is_negated))
        return tuple(runs), alternate


def gather(entries: list[Any]) -> list[Any]:
    """Merge entries that are evenly spaced along one dimension of a leaf into slices."""
    runs: list[Any] = []
    start = 0
    while start < len(entries):
        (leaf, is_negated, place), stop, step = entries[start], start + 1, None
        while stop < len(entries) and entries[stop][:2] == (leaf, is_negated):
            places = enumerate(zip(entries[stop - 1][2], entries[stop][2], strict=True))
            differ = [(dim, n - m if type(m) is type(n) is int else -1) for dim, (m, n) in places if m != n]
            if len(differ) != 1 or differ[0][1] < 0 or step not in (None, differ[0]):
                break
            stop, step = stop + 1, differ[0]
        if step is not None:
            dim, by = step
            place = (*place[:dim], slice(place[dim], entries[stop - 1][2][dim] + 1, by), *place[dim + 1 :])
        runs.append((leaf, is_negated, place))
        start = stop
    return runs


def find_plan(call: Callable[..., Any], key: tuple[Any, ...], relations: str, device: str = "cpu") -> RotationPlan:
    """Find out what ``call`` does with arguments of this kind. Raise Unlike if it is not a supported rotation."""
    probe = Probe(call, key, device)
    failure, num_answers = Unlike(-1, "takes no arguments of this kind"), 0
    makers = (partial(make_plan, layout=layout) for layout in layouts(probe, relations))
    for make in itertools.chain([make_grid_plan], makers):
        try:
            return make(probe)
        except Unlike as e:
            error = e
        except Exception as e:  # a third-party function may raise anything
            what = f"raises {type(e).__name__} with all kinds of tables that drop_in knows: {e}"
            error = Unlike(0, f"{what}; {_OWN_TABLES}")
            if not isinstance(e, (RuntimeError, IndexError, AssertionError)):  # the sizes are not the cause
                num_answers = _MOST_ANSWERS
        failure, num_answers = max(failure, error, key=operator.attrgetter("depth")), num_answers + (error.depth >= 4)
        if num_answers >= _MOST_ANSWERS:
            break
    raise failure


def make_plan(probe: Probe, layout: LeafShapes) -> RotationPlan:
    """Read the rotations for one layout. Verify the plan at different sizes, with the call's dtypes and gradients."""
    probe.offset = min(probe.offset, 1)
    turns, shapes, axes = Reading(probe, layout).turns, layout.shapes(probe.axes), probe.axes
    probe.offset *= 2
    if len({t.inverse for t in turns}) > 1:
        raise Unlike(5, "rotates its tensors by opposite angles")
    if any(t.axes[-1] != layout.token for t in turns) and set(layout.relations) != {EQUAL}:
        raise Unlike(5, "has tables that vary along a dimension other than tokens")
    like_next = (*map(operator.eq, turns, turns[1:]), False)
    plan = RotationPlan(turns, like_next, layout.relations, probe.form, (torch.float32,) * len(turns))
    if not compare(probe, plan, probe.inputs(shapes, 2)):
        raise Unlike(5, _OTHERWISE)
    plan = plan._replace(required_sizes=find_required_sizes(probe, plan, layout))
    follows = [at for run in (*turns[0].cos[0], *turns[0].sin[0]) for _, at in run.follows]
    followed, positions = {axis for at in follows for axis in at.axes}, {at.positions for at in follows}
    xs, leaves = probe.inputs(shapes, 2)  # positions from 0 to 4, which are clamped by some functions if negative
    compare(probe, plan, (xs, [t - 5 if i in positions else t for i, t in enumerate(leaves)]))
    free = {1, 2} - {*followed, layout.token} if len(turns) > 1 and len(axes) == 3 else ()
    others = [layout.shapes(other) for other in _OTHERS[len(axes)]]
    for other in (*others, *[layout.shapes(axes, more_heads=axis) for axis in free]):
        compare(probe, plan, probe.inputs(other, 2))
    for axis in sorted(followed & {*range(len(axes))}):
        candidate = plan._replace(broadcast_axes=(*plan.broadcast_axes, axis))
        if holds(probe, candidate, probe.inputs(layout.shapes(axes, one_row=axis), 2)):
            plan = candidate
    plan = plan._replace(same_lengths=needs_same_lengths(probe, plan, layout))
    return complete(probe, plan, *probe.inputs(shapes, 3))


def make_grid_plan(probe: Probe) -> RotationPlan:
    """Return the plan of a function that rotates each sample by its own grid, like Wan's."""
    refusal, kinds = Unlike(-1, ""), [e[:2] for e in probe.leaves]
    if sorted(kinds) != [("integers", 2), ("table", 2)] or len(probe.data) != 1 or len(probe.axes) != 3:
        raise refusal
    sizes, table = kinds.index(("integers", 2)), kinds.index(("table", 2))
    plan = RotationPlan((), (), EQUAL, ("tensor", (True,)), (torch.float32,), grids=(sizes, table))
    inputs: Any = None
    for grids, tokens in (([[2, 2, 3], [3, 1, 2]], 14), ([[1, 4, 2], [1, 4, 2]], 9)):
        shapes = [(2, 3), (9, *probe.leaves[table][3:])]
        inputs = probe.inputs(([(2, tokens, 3)], shapes if sizes == 0 else shapes[::-1]), tokens)
        inputs[1][sizes] = torch.tensor(grids, dtype=probe.leaves[sizes][2])
        if not inputs[1][table].is_complex() or not holds(probe, plan, inputs):
            raise refusal
    return complete(probe, plan, *inputs)


def needs_same_lengths(probe: Probe, plan: RotationPlan, layout: LeafShapes) -> bool:
    for i, relation in enumerate(layout.relations):
        if relation != EQUAL and layout.relations.count(relation) > 1:
            shapes = layout.shapes(probe.axes, shorter=i)
            if shapes[0][i][layout.token] < 1 or not holds(probe, plan, probe.inputs(shapes, 2)):
                return True
    return False


def find_required_sizes(probe: Probe, plan: RotationPlan, layout: LeafShapes) -> tuple[tuple[int, int, int], ...]:
    """Return the dimensions of leaves that follow no axis of x but whose sizes matter. See RotationPlan."""
    runs = [run for turn in plan.turns for run in (*turn.cos[0], *turn.sin[0])]
    follows = {(run.leaf, dim): at for run in runs for dim, at in run.follows}
    tables, positions = {run.leaf for run in runs}, {at.positions for at in follows.values()}
    required, (xs, leaves) = [], probe.inputs(layout.shapes(probe.axes), 2)
    for leaf, labels in enumerate(layout.labels):
        sizes = [(leaf, dim, label) for dim, label in enumerate(labels) if label < 0 or (leaf, dim) not in follows]
        if leaf in tables and any(label >= 0 for *_, label in sizes):
            raise Unlike(0, "expects tables of a different shape")
        if leaf not in tables | positions:
            with suppress(Exception):  # arguments that the function ignores
                probe.run(xs, [*leaves[:leaf], object(), *leaves[leaf + 1 :]])
                continue
        required += [] if leaf in positions else sizes
    return tuple(required)


def compare(probe: Probe, plan: RotationPlan, inputs: Tensors) -> bool:
    """Return whether the plan and the function agree. The result is False if either rejects these sizes."""
    xs, leaves = inputs
    try:
        expected = probe.run(xs, leaves)
    except Exception:  # the function rejects these sizes
        return False
    recipe = prepare(plan, xs, leaves, probe.offset)
    if recipe is None or recipe.relations != plan.relations:
        return False
    if not are_close(run_prepared(recipe, xs, leaves, "reference"), expected):
        raise Unlike(5, _OTHERWISE)
    try:
        scaled = probe.run([x * 1e3 for x in xs], leaves, change_others=True)
        is_linear = are_close([o / 1e3 for o in scaled], expected)
    except Exception:  # for example, because a changed tensor is used as an index
        is_linear = False
    if not is_linear and probe.others.shapes:
        what = f"a tensor of shape {' or '.join(map(str, sorted(probe.others.shapes)))}"
        raise Unlike(6, f"depends on {what} that is neither an argument nor one of its tables; pass it as an argument")
    if not is_linear:
        raise Unlike(4, "is not linear in x")
    return True


def holds(probe: Probe, plan: RotationPlan, inputs: Tensors) -> bool:
    try:
        return compare(probe, plan, inputs)
    except Unlike:
        return False


def are_close(outs: Any, expected: list[Tensor], tolerance: float = 2e-5) -> bool:
    outs = [outs] if isinstance(outs, Tensor) else [o for o in outs or () if o is not None]
    pairs = [(as_real(a).double(), as_real(b).double()) for a, b in zip(outs, expected, strict=True)]
    return all(a.shape == b.shape and (a - b).abs().max() <= tolerance * (b.abs().max() + 1) for a, b in pairs)


def complete(probe: Probe, plan: RotationPlan, xs: list[Tensor], leaves: list[Tensor]) -> RotationPlan:
    """Compare gradients, and outputs in the call's dtypes. Record whether autocast changes the outputs."""

    def ours() -> list[Tensor]:
        out = run_prepared(cast(PreparedCall, prepare(plan, xs, leaves, probe.offset)), xs, leaves, "reference")
        return [out] if isinstance(out, Tensor) else [o for o in out if o is not None]

    with torch.enable_grad():
        inputs, grads = [t.requires_grad_() for t in (*xs, *leaves) if t.is_floating_point() or t.is_complex()], []
        answers = ours(), probe.run(xs, leaves)
        if not are_close(*answers):
            raise Unlike(5, _OTHERWISE)
        for outs in answers:
            if not all(o.requires_grad for o in outs):
                raise Unlike(6, "passes no gradient to the tensors that it rotates")
            weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape) for o in outs]
            grads.append(torch.autograd.grad(outs, inputs, weights, allow_unused=True))
    detach_tables = all(g is None for g in grads[1][len(xs) :])
    for a, b in list(zip(*grads, strict=True))[: len(xs) if detach_tables else None]:
        if (a is None) != (b is None) or (a is not None and not are_close(a, [b], 1e-4)):
            raise Unlike(6, "defines its own gradients, which do not match what it computes")
    xs = [t.detach().to(e[2]) for t, e in zip(xs, probe.data, strict=True)]
    leaves = [t.detach().to(e[2]) for t, e in zip(leaves, probe.leaves, strict=True)]
    try:
        outs = probe.run(xs, leaves)
        with torch.autocast(probe.device.partition(":")[0], dtype=torch.bfloat16):
            under_autocast = probe.run(xs, leaves)
    except Exception as e:
        raise Unlike(6, f"raises {type(e).__name__} with {xs[0].dtype} inputs and {leaves[0].dtype} tables: {e}") from e
    same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(under_autocast, outs, strict=True))
    plan = plan._replace(dtypes=tuple(o.dtype for o in outs), detach_tables=detach_tables, ignores_autocast=same)
    if not are_close(ours(), outs, 0.05):
        raise Unlike(6, f"computes something different with {xs[0].dtype} inputs")
    return plan
