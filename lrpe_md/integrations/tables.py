"""Tables of cosines and sines as what they are made of: coordinates of tokens and frequencies of channels.

A library's rotary code builds a table of angles as an outer product, takes its cosine and sine, and cuts, joins and
expands it on the way to its attentions. A :class:`Table` goes that way in place of the tensor: what is done to the
tokens of the table is done to its coordinates, what is done to its channels to its frequencies, and at the end the
kernel gets both. Whatever else is asked of it, it becomes the tensor that it stands for, and the code computes what it
always did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

__all__ = [
    "Angles",
    "Block",
    "Heads",
    "Table",
    "cat",
    "einsum",
    "have_same_angles",
    "join_series",
    "keep",
    "of_series",
    "outer",
    "pad",
    "read_angles",
    "read_series",
    "scale",
    "stack",
    "times",
    "to_tensor",
    "zeros",
]

TAILS: dict[str, tuple[int, ...]] = {"four": (4,), "matrix": (2, 2), "twice": (2,)}


class Block(NamedTuple):
    """Channels that share coordinates.

    Args:
        coords: (.., K), of the table's leading dimensions.
        omega: (C, K).
        repeated: each channel stands twice in a row.
        trail: what the coordinates come from, and what was done to them: those of one trail are equal.
        key: what the frequencies come from: those of one key are equal.
        gain: (C,), what cosines and sines are multiplied by.
    """

    coords: Tensor
    omega: Tensor
    repeated: bool
    trail: tuple[Any, ...]
    key: tuple[Any, ...]
    gain: Tensor | None = None

    @property
    def width(self) -> int:
        return self.omega.shape[0] * (2 if self.repeated else 1)


class Angles(NamedTuple):
    """What tables of one layout stand for: coordinates (.., K), frequencies (C, K) and gain (C,) of the pairs."""

    layout: str
    coords: Tensor
    omega: Tensor
    gain: Tensor | None = None


class Table:
    """Stands for a tensor (.., width, *tail); see the module. Its ``part`` is what is made of the angles: "angle",
    "cos", "sin", "-sin", "complex", "ones", "zeros"; "twice" (.., 2), "four" (.., 4) or "matrix" (.., 2, 2) of them.

    Neither a dataclass nor a tuple: the mixed precision of FSDP and DDP casts every tensor that it finds in those.
    """

    def __init__(self, blocks: Sequence[Block], part: str, dtype: torch.dtype, blank: bool = False) -> None:
        self.blocks, self.part, self.dtype = tuple(blocks), part, dtype
        self.blank = blank  # it may be written into: nothing else has its coordinates
        self.kept: dict[Any, Any] = {}  # what was made of it, for the next layer

    # --- what a tensor says of itself ---

    @property
    def tail(self) -> tuple[int, ...]:
        return TAILS.get(self.part, ())

    @property
    def lead(self) -> tuple[int, ...]:
        return tuple(self.blocks[0].coords.shape[:-1])

    @property
    def width(self) -> int:
        return sum(block.width for block in self.blocks)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead, self.width, *self.tail))

    @property
    def ndim(self) -> int:
        return len(self.lead) + 1 + len(self.tail)

    @property
    def device(self) -> torch.device:
        return self.blocks[0].coords.device

    @property
    def requires_grad(self) -> bool:
        return False

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return _product(self.shape)

    def is_complex(self) -> bool:
        return self.part == "complex"

    def is_floating_point(self) -> bool:
        return self.part != "complex"

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def stands_beside(self, other: Table) -> bool:
        """Whether another table has the same angles."""
        if torch.compiler.is_compiling():
            return have_same_angles(self, other)
        if self.kept.get("beside") is not other and have_same_angles(self, other):
            self.kept["beside"] = other
        return self.kept.get("beside") is other

    # --- tokens ---

    def _moved(self, move: Callable[[Tensor], Tensor], *done: Any) -> Table:
        """What is done to the leading dimensions; blocks that share coordinates go on sharing them."""
        moved: list[tuple[Tensor, Tensor]] = []
        blocks: list[Block] = []
        for block in self.blocks:
            coords = next((after for before, after in moved if before is block.coords), None)
            if coords is None:
                coords = move(block.coords)
                moved.append((block.coords, coords))
            blocks.append(block._replace(coords=coords, trail=(*block.trail, done)))
        return Table(blocks, self.part, self.dtype)

    def _axis(self, dim: int) -> int:
        return dim + self.ndim if dim < 0 else dim

    def __getitem__(self, index: Any) -> Any:
        given: Any = index if isinstance(index, tuple) else (index,)
        taken = sum(_dims_of(each) for each in given)
        if any(each is Ellipsis for each in given):
            at = next(i for i, each in enumerate(given) if each is Ellipsis)
            given = (*given[:at], *[slice(None)] * (self.ndim - taken), *given[at + 1 :])
            taken = self.ndim
        lead = len(self.lead)
        if taken <= lead:
            return self._moved(lambda coords: coords[given], "getitem", given)
        while taken > lead + 1 and _is_all(given[-1]):
            given, taken = given[:-1], taken - 1
        if taken != lead + 1 or not isinstance(given[-1], slice) or given[-1].step not in (None, 1):
            return to_tensor(self)[index]
        start, stop = _bounds(given[-1], self.width)
        first, channels = given[:-1], self._channels(start, stop)
        if channels is None:
            return to_tensor(self)[index]
        if all(_is_all(each) for each in first):
            return channels
        return channels._moved(lambda coords: coords[first], "getitem", first)

    def _channels(self, start: int, stop: int) -> Table | None:
        if (start, stop) == (0, self.width):
            return self
        blocks: list[Block] = []
        at = 0
        for block in self.blocks:
            a, b = max(start - at, 0), min(stop - at, block.width)
            at += block.width
            if a >= b:
                continue
            step = 2 if block.repeated else 1
            if a % step or b % step:
                return None
            rows = (a // step, b // step)
            gain = None if block.gain is None else block.gain[rows[0] : rows[1]]
            blocks.append(block._replace(omega=block.omega[rows[0] : rows[1]], key=(*block.key, rows), gain=gain))
        return Table(blocks, self.part, self.dtype) if blocks else None

    def split(self, sizes: Any, dim: int = 0) -> Any:
        axis = self._axis(dim)
        if isinstance(sizes, int):
            total = self.shape[axis]
            sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
        index: list[Any] = [slice(None)] * axis
        found: list[Any] = []
        at = 0
        for size in sizes:
            found.append(self[(*index, slice(at, at + size))])
            at += size
        return tuple(found)

    split_with_sizes = split

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        return self.split(-(-self.shape[self._axis(dim)] // chunks), dim)

    def unbind(self, dim: int = 0) -> Any:
        index: list[Any] = [slice(None)] * self._axis(dim)
        return tuple(self[(*index, i)] for i in range(self.shape[self._axis(dim)]))

    def narrow(self, dim: int, start: int, length: int) -> Any:
        return self[(*[slice(None)] * self._axis(dim), slice(start, start + length))]

    def index_select(self, dim: int, index: Tensor) -> Any:
        return self[(*[slice(None)] * self._axis(dim), index)]

    def view(self, *shape: Any) -> Any:
        sizes: Any = _flat(shape)
        if any(not isinstance(size, (int, torch.SymInt)) for size in sizes):
            return to_tensor(self).view(*shape)
        return self._viewed(self._resolve(sizes))

    def _resolve(self, sizes: Sequence[int]) -> Any:
        """Sizes without -1."""
        rest = _product([size for size in sizes if size != -1])
        return tuple([self.numel() // rest if size == -1 else size for size in sizes])

    def _viewed(self, sizes: Any) -> Any:
        if self.part == "four" and sizes[-3:] == (self.width, 2, 2):
            return Table(self.blocks, "matrix", self.dtype)._reshaped(sizes[:-3])
        if self.part == "twice" and sizes[-1:] == (2 * self.width,) and not any(b.repeated for b in self.blocks):
            blocks = [block._replace(repeated=True) for block in self.blocks]
            return Table(blocks, "angle", self.dtype)._reshaped(sizes[:-1])
        end = (self.width, *self.tail)
        if sizes[-len(end) :] != end and sizes[-2] * sizes[-1] == self.width and sizes[:-2] == self.lead:
            heads = Heads(self, sizes[-2])
            return heads if heads.is_known() else to_tensor(self).reshape(sizes)
        if sizes[-len(end) :] != end:
            return to_tensor(self).reshape(sizes)
        return self._reshaped(sizes[: -len(end)])

    reshape = view

    def _reshaped(self, lead: tuple[int, ...]) -> Table:
        if lead == self.lead:
            return self
        return self._moved(lambda coords: coords.reshape(*lead, coords.shape[-1]), "reshape", lead)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        a, b = self._axis(start_dim), self._axis(end_dim)
        return self.view(*self.shape[:a], _product(self.shape[a : b + 1]), *self.shape[b + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        axis = self._axis(dim)
        if -1 in sizes:
            rest = -_product(sizes)
            sizes = [self.shape[axis] // rest if size == -1 else size for size in sizes]
        return self.view(*self.shape[:axis], *sizes, *self.shape[axis + 1 :])

    def unsqueeze(self, dim: int) -> Any:
        axis = dim + self.ndim + 1 if dim < 0 else dim
        if axis > len(self.lead):
            return to_tensor(self).unsqueeze(dim)
        return self._moved(lambda coords: coords.unsqueeze(axis), "unsqueeze", axis)

    def squeeze(self, *dims: int) -> Any:
        axis = self._axis(dims[0]) if len(dims) == 1 else len(self.lead)
        if axis >= len(self.lead):
            return to_tensor(self).squeeze(*dims)
        return self._moved(lambda coords: coords.squeeze(axis), "squeeze", axis)

    def expand(self, *shape: Any) -> Any:
        sizes, kept = _flat(shape), 1 + len(self.tail)
        same = zip(sizes[-kept:], self.shape[-kept:], strict=True)
        if not all(size in (-1, own) for size, own in same):
            return to_tensor(self).expand(*shape)
        lead = sizes[:-kept]
        return self._moved(lambda coords: coords.expand(*lead, -1), "expand", lead)

    def repeat(self, *sizes: Any) -> Any:
        times, kept = _flat(sizes), 1 + len(self.tail)
        if any(each != 1 for each in times[-kept:]):
            return to_tensor(self).repeat(*sizes)
        lead = times[:-kept]
        return self._moved(lambda coords: coords.repeat(*lead, 1), "repeat", lead)

    def repeat_interleave(self, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Any:
        if dim is not None and self._axis(dim) == len(self.lead) and not self.tail:
            if (
                repeats == 2
                and not any(block.repeated for block in self.blocks)
                and self.part in ("cos", "sin", "angle")
            ):
                return Table([block._replace(repeated=True) for block in self.blocks], self.part, self.dtype)
        elif dim is not None and isinstance(repeats, int) and self._axis(dim) < len(self.lead):
            axis = self._axis(dim)
            return self._moved(lambda coords: coords.repeat_interleave(repeats, axis), "interleave", repeats, axis)
        return to_tensor(self).repeat_interleave(repeats, dim)

    def permute(self, *dims: Any) -> Any:
        axes = tuple(self._axis(dim) for dim in _flat(dims))
        lead = len(self.lead)
        if axes[lead:] != tuple(range(lead, self.ndim)):
            return to_tensor(self).permute(*dims)
        return self._moved(lambda coords: coords.permute(*axes[:lead], lead), "permute", axes[:lead])

    def transpose(self, dim0: int, dim1: int) -> Any:
        axes = list(range(self.ndim))
        a, b = self._axis(dim0), self._axis(dim1)
        if {a, b} == {len(self.lead) - 1, len(self.lead)} and self.part == "angle" and len(self.blocks) == 1:
            return Turned(self)
        axes[a], axes[b] = axes[b], axes[a]
        return self.permute(*axes)

    swapaxes = swapdims = transpose

    # --- values ---

    def _as(self, part: str) -> Table:
        return Table(self.blocks, part, self.dtype)

    def cos(self) -> Any:
        return self._as("cos") if self.part == "angle" else to_tensor(self).cos()

    def sin(self) -> Any:
        return self._as("sin") if self.part == "angle" else to_tensor(self).sin()

    @property
    def real(self) -> Any:
        return Table(self.blocks, "cos", self.dtype.to_real()) if self.part == "complex" else self

    @property
    def imag(self) -> Any:
        return Table(self.blocks, "sin", self.dtype.to_real()) if self.part == "complex" else to_tensor(self).imag

    def __neg__(self) -> Any:
        if self.part == "sin":
            return self._as("-sin")
        return self * -1

    def __mul__(self, other: Any) -> Any:
        if self.part != "angle" or not isinstance(other, (int, float)):
            return to_tensor(self) * to_tensor(other)
        return self._moved(lambda coords: coords * other, "times", other)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __truediv__(self, other: Any) -> Any:
        if self.part != "angle" or not isinstance(other, (int, float)):
            return to_tensor(self) / to_tensor(other)
        return self if other == 1 else self._moved(lambda coords: coords / other, "over", other)

    def __add__(self, other: Any) -> Any:
        return to_tensor(self) + to_tensor(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return to_tensor(self) - to_tensor(other)

    def __setitem__(self, index: Any, value: Any) -> None:
        given = index if isinstance(index, tuple) else (index,)
        if self.blank and isinstance(value, Table) and sum(_dims_of(each) for each in given) <= len(self.lead):
            if not all(same_frequencies(a, b) for a, b in zip(self.blocks, value.blocks, strict=True)):
                raise TypeError("freqs: expected tables of the same frequencies to be joined, got others")
            for own, other in zip(self.blocks, value.blocks, strict=True):
                own.coords[given] = other.coords.to(own.coords.dtype)
            return
        raise TypeError(
            "freqs: expected rotary code that leaves its tables as they are, got a write into one; call "
            "restore_rotary(model)"
        )

    # --- where it is ---

    def to(
        self, *args: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False
    ) -> Any:
        for each in args:
            if isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, (Tensor, Table)):
                device, dtype = each.device, each.dtype
            elif isinstance(each, (str, torch.device, int)) and not isinstance(each, bool):
                device = each
        found = self
        if device is not None and torch.device(device) != self.device:
            moved = self._moved(lambda coords: coords.to(device, non_blocking=non_blocking), "to", torch.device(device))
            blocks = [_frequencies_to(block, device, non_blocking) for block in moved.blocks]
            found = Table(blocks, self.part, self.dtype)
        if dtype is not None and dtype != self.dtype:
            if dtype.is_complex != (self.part == "complex"):
                return to_tensor(found).to(dtype)
            found = Table(found.blocks, found.part, dtype)
        return found

    def type(self, dtype: torch.dtype) -> Any:
        return self.to(dtype)

    def type_as(self, other: Any) -> Any:
        return self.to(other.dtype)

    def float(self) -> Any:
        return self if self.part == "complex" else self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def cpu(self) -> Any:
        return self.to("cpu")

    def contiguous(self) -> Table:
        return self

    def detach(self) -> Table:
        return self

    def clone(self) -> Table:
        return self

    # --- all else ---

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("blocks", "part", "dtype", "blank", "kept"):
            raise AttributeError(name)
        return getattr(to_tensor(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = FUNCTIONS.get(getattr(func, "__name__", ""))
        if ours is not None:
            found = ours(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        args, kwargs = to_tensor(tuple(args)), to_tensor(dict(kwargs or {}))
        return func(*args, **kwargs)


class Turned:
    """A table of angles (.., K, C) whose last dimensions were swapped: flattened, it has channels of K axes in turn."""

    def __init__(self, table: Table) -> None:
        self.table = table

    @property
    def shape(self) -> torch.Size:
        *lead, a, b = self.table.shape
        return torch.Size((*lead, b, a))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        table, block = self.table, self.table.blocks[0]
        axes = len(table.lead)
        if (
            start_dim not in (axes - 1, -2)
            or end_dim not in (-1, axes)
            or block.coords.shape[-1] != 1
            or block.repeated
        ):
            return to_tensor(table).transpose(-1, -2).flatten(start_dim, end_dim)
        num = block.coords.shape[-2]
        omega = block.omega[:, None] * torch.eye(num, dtype=block.omega.dtype, device=block.omega.device)
        coords, trail, key = block.coords.squeeze(-1), (*block.trail, ("turned",)), (*block.key, ("turned", num))
        return Table([Block(coords, omega.flatten(0, 1), False, trail, key)], "angle", table.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "table":
            raise AttributeError(name)
        return getattr(to_tensor(self), name)


class Heads:
    """A table (.., N, C) as (.., N, H, C / H), or (.., H, N, C / H): each head has frequencies of its own."""

    def __init__(self, table: Table, num: int, order: str = "nh") -> None:
        self.table, self.num, self.order = table, num, order

    def is_known(self) -> bool:
        return self.table.part in ("angle", "cos", "sin") and not any(block.repeated for block in self.table.blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def shape(self) -> torch.Size:
        *lead, tokens = self.table.lead
        both = (tokens, self.num) if self.order == "nh" else (self.num, tokens)
        return torch.Size((*lead, *both, self.table.width // self.num))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _with(self, table: Any) -> Any:
        return Heads(table, self.num, self.order) if isinstance(table, Table) else table

    def cos(self) -> Any:
        return self._with(self.table.cos())

    def sin(self) -> Any:
        return self._with(self.table.sin())

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self._with(self.table.to(*args, **kwargs))

    def transpose(self, dim0: int, dim1: int) -> Any:
        given = {dim + self.ndim if dim < 0 else dim for dim in (dim0, dim1)}
        if given != {self.ndim - 3, self.ndim - 2}:
            return to_tensor(self).transpose(dim0, dim1)
        return Heads(self.table, self.num, "hn" if self.order == "nh" else "nh")

    swapaxes = swapdims = transpose

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("table", "num", "order"):
            raise AttributeError(name)
        return getattr(to_tensor(self), name)

    def __getitem__(self, index: Any) -> Any:
        return to_tensor(self)[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cos", "sin", "transpose", "swapaxes", "swapdims") and isinstance(args[0], Heads):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        args, kwargs = to_tensor(tuple(args)), to_tensor(dict(kwargs or {}))
        return func(*args, **kwargs)


def _frequencies_to(block: Block, device: Any, non_blocking: bool) -> Block:
    gain = None if block.gain is None else block.gain.to(device, non_blocking=non_blocking)
    return block._replace(omega=block.omega.to(device, non_blocking=non_blocking), gain=gain)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total = total * size
    return total


def keep(table: Table, key: Any, make: Callable[[], Any]) -> Any:
    """``make()``, once for a table: a compiler does so by itself, and what is learned has a graph of its own."""
    if torch.compiler.is_compiling() or table.blank or any(block.omega.requires_grad for block in table.blocks):
        return make()
    if key not in table.kept:
        table.kept[key] = make()
    return table.kept[key]


def _dims_of(index: Any) -> int:
    if index is None or index is Ellipsis:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _bounds(index: slice, width: int) -> tuple[int, int]:
    """As ``slice.indices``, which dynamo of torch 2.11 can't follow."""
    start, stop = 0 if index.start is None else index.start, width if index.stop is None else index.stop
    start, stop = (at + width if at < 0 else at for at in (start, stop))
    return min(max(start, 0), width), min(max(stop, 0), width)


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index.start is None and index.stop is None and index.step is None


def _flat(sizes: Any) -> Any:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else tuple(sizes)


def to_tensor(given: Any) -> Any:
    """The tensors that tables stand for, also inside tuples, lists and dicts."""
    if isinstance(given, Table):
        return keep(given, "tensor", lambda: _compute(given))
    if isinstance(given, Heads):
        found = _compute(given.table).unflatten(-1, (given.num, -1))
        return found.transpose(-3, -2) if given.order == "hn" else found
    if isinstance(given, Turned):
        return _compute(given.table).transpose(-1, -2)
    if isinstance(given, (tuple, list)) and not hasattr(given, "_fields"):
        return type(given)(to_tensor(each) for each in given)
    if isinstance(given, dict):
        return {name: to_tensor(each) for name, each in given.items()}
    return given


def _compute(table: Table) -> Tensor:
    rows: list[Tensor] = []
    gains: list[Tensor] = []
    for block in table.blocks:
        angles = (block.coords.double()[..., None, :] * block.omega.double()).sum(-1)
        gain = torch.ones_like(block.omega[:, 0], dtype=torch.float64) if block.gain is None else block.gain.double()
        rows.append(angles.repeat_interleave(2, -1) if block.repeated else angles)
        gains.append(gain.repeat_interleave(2, -1) if block.repeated else gain)
    angles, gain = torch.cat(rows, -1), torch.cat(gains, -1)
    cos, sin = angles.cos() * gain, angles.sin() * gain
    if table.part == "complex":
        return torch.complex(cos, sin).to(table.dtype)
    if table.part in ("four", "matrix"):
        four = torch.stack([cos, -sin, sin, cos], -1).to(table.dtype)
        return four.unflatten(-1, (2, 2)) if table.part == "matrix" else four
    if table.part == "twice":
        return torch.stack([angles, angles], -1).to(table.dtype)
    values = {"angle": angles, "cos": cos, "sin": sin, "-sin": -sin, "ones": torch.ones_like(angles)}
    values["zeros"] = torch.zeros_like(angles)
    return values[table.part].to(table.dtype)


# --- functions of torch ----------------------------------------------------------------------------------------------


def is_same(a: Any, b: Any) -> bool:
    """Whether two trails are one: tensors by identity, all else by value."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, slice) and isinstance(b, slice):
        return is_same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return type(a) is type(b) and bool(a == b)


def same_frequencies(a: Block, b: Block) -> bool:
    return a.repeated == b.repeated and (a.omega is b.omega or is_same(a.key, b.key))


def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    dim = kwargs.pop("axis", dim)
    if kwargs or not all(isinstance(t, Table) for t in tensors):
        return NotImplemented
    part = next((t.part for t in tensors if t.part in ("cos", "sin")), tensors[0].part)
    tensors = [_unturned(t, part) for t in tensors]
    first: Table = tensors[0]
    if any(t.part != first.part or t.ndim != first.ndim for t in tensors):
        return NotImplemented
    axis, lead = first._axis(dim), len(first.lead)
    if axis == lead:
        return Table([block for t in tensors for block in t.blocks], first.part, first.dtype)
    if axis > lead or any(len(t.blocks) != len(first.blocks) for t in tensors):
        return NotImplemented
    blocks: list[Block] = []
    for group in zip(*(t.blocks for t in tensors), strict=True):
        if any(block.repeated != group[0].repeated or block.width != group[0].width for block in group):
            return NotImplemented
        trail = ("cat", axis, *(block.trail for block in group))
        if all(same_frequencies(block, group[0]) for block in group):
            coords = [block.coords for block in group]
            blocks.append(group[0]._replace(coords=torch.cat(coords, axis), trail=trail))
            continue
        if any(block.gain is not None for block in group):
            return NotImplemented
        coords = torch.cat([_widen(block.coords, i, group) for i, block in enumerate(group)], axis)
        omega = torch.cat([block.omega for block in group], -1)
        key = ("cat", *(block.key for block in group))
        blocks.append(Block(coords, omega, group[0].repeated, trail, key))
    return Table(blocks, first.part, first.dtype)


def cat(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.cat`` of tensors or tables, in lists or tuples: dynamo looks for the latter in lists alone."""
    return torch.cat(list(tensors), *args, **kwargs)


def stack(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.stack`` likewise."""
    return torch.stack(list(tensors), *args, **kwargs)


def _widen(coords: Tensor, at: int, group: Sequence[Block]) -> Tensor:
    """Coordinates on axes of their own, beside those of the other blocks."""
    before = sum(block.coords.shape[-1] for block in group[:at])
    behind = sum(block.coords.shape[-1] for block in group[at + 1 :])
    return torch.nn.functional.pad(coords, (before, behind))


def _stack(tensors: Any, dim: int = 0) -> Any:
    if not all(isinstance(t, Table) for t in tensors):
        return NotImplemented
    first: Table = tensors[0]
    axis = dim + first.ndim + 1 if dim < 0 else dim
    if axis <= len(first.lead):
        return _cat([t.unsqueeze(axis) for t in tensors], axis)
    alike = all(have_same_angles(t, first) for t in tensors)
    if not alike or axis != first.ndim or first.tail:
        return NotImplemented
    part = {("cos", "-sin", "sin", "cos"): "four", ("angle", "angle"): "twice"}.get(tuple(t.part for t in tensors))
    return NotImplemented if part is None else Table(first.blocks, part, first.dtype)


def have_same_angles(a: Table, b: Table) -> bool:
    return len(a.blocks) == len(b.blocks) and all(
        (x.coords is y.coords or is_same(x.trail, y.trail)) and same_frequencies(x, y)
        for x, y in zip(a.blocks, b.blocks, strict=True)
    )


def _ones_like(table: Table, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or table.part == "complex" else table._as("ones")


def _zeros_like(table: Table, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or table.part == "complex" else table._as("zeros")


def _unturned(table: Table, part: str) -> Table:
    """Ones among cosines and zeros among sines: channels of frequency zero."""
    if {"ones": "cos", "zeros": "sin"}.get(table.part) != part:
        return table
    blocks = [b._replace(omega=torch.zeros_like(b.omega), key=("zero", b.width), gain=None) for b in table.blocks]
    return Table(blocks, part, table.dtype)


def _polar(absolute: Any, angle: Any) -> Any:
    if not isinstance(absolute, Table) or absolute.part != "ones" or not isinstance(angle, Table):
        return NotImplemented
    dtype = torch.complex128 if angle.dtype == torch.float64 else torch.complex64
    return Table(angle.blocks, "complex", dtype) if angle.part == "angle" else NotImplemented


def _pad_sequence(tables: Any, batch_first: bool = False, padding_value: float = 0.0, *args: Any) -> Any:
    """Padding is at the origin, whatever its value was: a token that is masked."""
    if args not in ((), ("right",)) or not batch_first or not all(isinstance(t, Table) for t in tables):
        return NotImplemented
    longest = max(t.shape[0] for t in tables)
    padded = [
        t._moved(lambda coords, n=longest: _pad_rows(coords, n), "padded", longest).unsqueeze(0) for t in tables
    ]  # fmt: skip
    return _cat(padded, 0)


def pad(sequences: Any, *args: Any, **kwargs: Any) -> Any:
    """``pad_sequence`` of tensors or tables: dynamo does not look for the latter."""
    found = _pad_sequence(list(sequences), *args, **kwargs)
    return pad_sequence(to_tensor(list(sequences)), *args, **kwargs) if found is NotImplemented else found


def _pad_rows(coords: Tensor, length: int) -> Tensor:
    fill = coords.new_zeros(length - coords.shape[0], *coords.shape[1:])
    return torch.cat([coords, fill])


def _method(name: str) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(first, Table):
            return NotImplemented
        if "input" in kwargs:
            return NotImplemented
        return getattr(first, name)(*args, **kwargs)

    return call


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cat": _cat, "concat": _cat, "concatenate": _cat, "stack": _stack, "ones_like": _ones_like,
    "zeros_like": _zeros_like, "polar": _polar, "pad_sequence": _pad_sequence,
    **{
        name: _method(name)
        for name in (
            "cos", "sin", "unsqueeze", "squeeze", "flatten", "transpose", "permute", "split", "chunk", "unbind",
            "reshape", "repeat_interleave", "narrow", "index_select", "is_complex", "unflatten",
            "swapaxes", "swapdims",
        )
    },
}  # fmt: skip


# --- where tables begin ----------------------------------------------------------------------------------------------


def outer(a: Tensor, b: Tensor) -> Any:
    """``torch.outer``: angles of positions (N,) and frequencies (C,)."""
    if _is_learned(a, b) or a.ndim != 1 or b.ndim != 1:
        return torch.outer(a, b)
    return _angles(a[:, None], b, torch.promote_types(a.dtype, b.dtype))


def times(a: Any, b: Any) -> Any:
    """``a * b``: angles, where it is positions (.., 1) and frequencies (C,), in this order or the other."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and not _is_learned(a, b) and a.is_floating_point():
        for coords, omega in ((a, b), (b, a)):
            alone = omega.numel() == omega.shape[-1] if omega.ndim else False
            if (
                coords.ndim > 1
                and coords.shape[-1] == 1
                and alone
                and omega.shape[-1] > 1
                and omega.ndim <= coords.ndim
            ):
                return _angles(coords, omega.flatten(), torch.promote_types(a.dtype, b.dtype))
    return a * b


def einsum(equation: str, *operands: Any) -> Any:
    """``torch.einsum``: angles, where it is an outer product with frequencies (C,), or one of axes and heads."""
    if equation == "nd,dhf->nhf" and len(operands) == 2:
        pos, freqs = operands
        omega = freqs.permute(1, 2, 0).flatten(0, 1)
        block = Block(pos, omega, False, ("outer", pos), ("outer", freqs))
        return Heads(Table([block], "angle", torch.promote_types(pos.dtype, freqs.dtype)), freqs.shape[1])
    if equation.replace(" ", "") in ("...n,d->...nd", "n,d->nd", "i,j->ij", "bn,d->bnd") and len(operands) == 2:
        pos, omega = operands
        if not _is_learned(pos, omega) and omega.ndim == 1:
            return _angles(pos[..., None], omega, torch.promote_types(pos.dtype, omega.dtype))
    return torch.einsum(equation, *operands)


def _is_learned(*tensors: Any) -> bool:
    """Frequencies that a model learns stay tensors: their gradient goes the way that it went."""
    return any(not isinstance(t, Tensor) or t.requires_grad or t.is_complex() for t in tensors)


def _angles(coords: Tensor, omega: Tensor, dtype: torch.dtype) -> Table:
    return Table([Block(coords, omega[:, None], False, ("outer", coords), ("outer", omega))], "angle", dtype)


def of_series(
    dim: int,
    pos: Any,
    theta: float = 10000.0,
    use_real: bool = False,
    linear_factor: float = 1.0,
    ntk_factor: float = 1.0,
    repeat_interleave_real: bool = True,
    freqs_dtype: torch.dtype = torch.float32,
) -> Any:
    """diffusers' ``get_1d_rotary_pos_embed``, as tables."""
    if isinstance(pos, int):
        pos = torch.arange(pos)
    if not isinstance(pos, Tensor):
        pos = torch.from_numpy(pos)
    steps = torch.arange(0, dim, 2, dtype=freqs_dtype, device=pos.device) / dim
    omega = 1.0 / ((theta * ntk_factor) ** steps) / linear_factor
    dtype = torch.promote_types(pos.dtype, omega.dtype)
    key = ("series", dim, float(theta), float(ntk_factor), float(linear_factor), freqs_dtype)
    coords = pos[:, None]
    angles = Table([Block(coords, omega[:, None], False, ("outer", coords), key)], "angle", dtype)
    if not use_real:
        return Table(angles.blocks, "complex", torch.complex128 if dtype == torch.float64 else torch.complex64)
    if repeat_interleave_real:
        both = angles.repeat_interleave(2, dim=1)
    else:
        both = Table([*angles.blocks, *angles.blocks], "angle", dtype)
    return both.cos().float(), both.sin().float()


def zeros(like: Any, *sizes: Any, **kwargs: Any) -> Any:
    """``torch.zeros`` of the dtype of ``like``: where that is a table, one at the origin, to be written into."""
    shape = _flat(sizes)
    if not isinstance(like, Table) or like.part != "complex" or shape[-1] != like.width:
        return torch.zeros(*sizes, **{**kwargs, "dtype": like.dtype})
    blocks = [
        block._replace(coords=block.coords.new_zeros(*shape[:-1], block.coords.shape[-1]), trail=("blank",))
        for block in like.blocks
    ]
    return Table(blocks, like.part, like.dtype, blank=True)


# --- where they end --------------------------------------------------------------------------------------------------


def read_layout(table: Table) -> str | None:
    """Of its channels: each twice in a row ("repeat"), all twice end to end ("half"), or once ("single")."""
    if all(block.repeated for block in table.blocks):
        return "repeat"
    if any(block.repeated for block in table.blocks):
        return None
    count = len(table.blocks)
    first, second = (
        Table(half, "cos", table.dtype) for half in (table.blocks[: count // 2], table.blocks[count // 2 :])
    )
    if count and count % 2 == 0 and have_same_angles(first, second):
        return "half"
    return "single"


def read_angles(table: Table) -> Angles | None:
    """Coordinates and frequencies of its pairs; None: its channels are of no known layout."""
    layout = read_layout(table)
    if layout is None:
        return None
    blocks = _pairs_of(table, layout)
    if len(blocks) == 1:
        return Angles(layout, blocks[0].coords, blocks[0].omega, blocks[0].gain)
    coords = torch.cat([block.coords.expand(*table.lead, -1) for block in blocks], -1)
    gain = None
    if any(block.gain is not None for block in blocks):
        gain = torch.cat([torch.ones_like(b.omega[:, 0]) if b.gain is None else b.gain.to(b.omega) for b in blocks])
    return Angles(layout, coords, join_series([(block.omega, block.coords.shape[-1]) for block in blocks]), gain)


def read_series(table: Table) -> list[tuple[Tensor, int]] | None:
    """Frequencies of its pairs, block by block, and how many axes each has; None: as above."""
    layout = read_layout(table)
    return None if layout is None else [(b.omega, b.coords.shape[-1]) for b in _pairs_of(table, layout)]


def join_series(series: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Frequencies (C, K) of what :func:`read_series` gives."""
    num = sum(axes for _, axes in series)
    rows: list[Tensor] = []
    at = 0
    for omega, axes in series:
        rows.append(torch.nn.functional.pad(omega, (at, num - at - axes)))
        at += axes
    return torch.cat(rows)


def _pairs_of(table: Table, layout: str) -> tuple[Block, ...]:
    return table.blocks[: len(table.blocks) // 2] if layout == "half" else table.blocks


def scale(table: Table, ratio: Tensor, gain: Tensor, key: Any) -> Table:
    """With frequencies (C, K) times ``ratio``, and cosines and sines times ``gain`` (C,), pair by pair.

    key: of what scales; the same for tables that are scaled alike.
    """
    pairs = len(table.blocks) // 2 if read_layout(table) == "half" else len(table.blocks)
    blocks: list[Block] = []
    row = column = 0
    for i, block in enumerate(table.blocks):
        if i == pairs:  # the other half
            row = column = 0
        num, axes = block.omega.shape
        factor = ratio[row : row + num, column : column + axes].to(block.omega.device)
        own = gain[row : row + num].to(block.omega.device)
        row, column = row + num, column + axes
        blocks.append(block._replace(omega=block.omega * factor, key=(*block.key, key), gain=own))
    return Table(blocks, table.part, table.dtype)
