"""How diffusers' attentions turn q and k: read from what their functions compute, and exchanged in their source."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import resolve_name
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..engine.validate import Impl, Pairs
from ..functional import rotate
from ..positions.coordinates import Coordinates
from .rewrite import ROTARY, Unread, methods_of, rewrite, source_tree
from .tables import Angles, Block, Heads, Table, keep, read_angles, to_tensor

__all__ = ["Form", "exchange_calls", "read_forms"]

Order = Literal["bnhd", "bhnd", "bnd"]
Style = Literal["both", "spread", "one"]  # (cos, sin) as one argument, as two, or one table


class Form(NamedTuple):
    """How a function turns a tensor.

    Args:
        axis: of the tokens, in the table.
        order: of the tensor's dimensions.
        pairs: of its channels.
        by_sample: the table's first dimension may be the batch's.
        partial: channels behind those of the table are left alone.
        dtype: that it gives for float32.
    """

    axis: int
    order: Order
    pairs: Pairs
    by_sample: bool
    partial: bool
    dtype: torch.dtype


Forms = dict[tuple[str, str, int], tuple[Form, ...]]  # by the tables' kind, layout, and number of leading dimensions


# --- what a function computes ------------------------------------------------------------------------------------

LEADS: tuple[tuple[str, int], ...] = (
    ("n", 0), ("1n", 1), ("bn", 1), ("n1", 0), ("1n1", 1), ("bn1", 1), ("11n", 2), ("b1n", 2),
)  # fmt: skip
KINDS: tuple[tuple[str, str, Style], ...] = (
    ("real", "repeat", "both"), ("real", "half", "both"), ("real", "single", "both"),
    ("real", "repeat", "spread"), ("real", "half", "spread"), ("real", "single", "spread"),
    ("complex", "single", "one"), ("matrix", "single", "one"), ("angle", "repeat", "one"), ("angle", "single", "one"),
    ("angle", "half", "one"),
    ("real", "nh", "both"), ("real", "hn", "both"), ("real", "nh", "spread"), ("real", "hn", "spread"),
)  # fmt: skip
SIZES = {"b": 2, "n": 5, "h": 3, "1": 1}


def read_forms(function: Callable[..., Any], num_tensors: int, options: tuple[tuple[str, Any], ...]) -> Forms:
    """Each way to turn tensors by tables that a function has, as one of the known.

    Args:
        num_tensors: that come first.
        options: arguments behind the tables.
    """
    forms: dict[tuple[str, str, int], dict[Any, Form]] = {}
    for kind, layout, style in KINDS:
        for lead, axis in LEADS if layout not in ("nh", "hn") else LEADS[:3]:
            for order in ("bnhd", "bhnd", "bnd"):
                for pairs in ("interleaved", "half"):
                    if order == "bnd" and pairs == "half" and layout not in ("nh", "hn"):
                        continue  # halves of all heads together
                    given = (function, num_tensors, dict(options), (kind, layout, style, lead), order, pairs)
                    dtype = _agrees(*given)
                    if dtype is None:
                        continue
                    partial = order != "bnd" and _agrees(*given, more=4) is not None
                    by_axis = forms.setdefault((kind, layout, len(lead)), {})
                    own = lead.startswith("b") or (
                        (axis, order, pairs) in by_axis and by_axis[axis, order, pairs].by_sample
                    )
                    by_axis[axis, order, pairs] = Form(axis, order, pairs, own, partial, dtype)
    return {key: tuple(found.values()) for key, found in forms.items()}


def _agrees(
    function: Callable[..., Any], num: int, options: dict[str, Any], tables: tuple[str, str, str, str], order: str,
    pairs: str, more: int = 0,
) -> torch.dtype | None:  # fmt: skip
    """What it gives for float32, where it turns tensors so; with ``more`` channels than the table has."""
    kind, layout, style, lead = tables
    generator = torch.Generator().manual_seed(0)
    num_heads = SIZES["h"] if layout in ("nh", "hn") else 1
    coords = 6 * torch.rand(*(SIZES[size] for size in lead), 1, generator=generator, dtype=torch.float64)
    omega = torch.rand(4 * num_heads, 1, generator=generator, dtype=torch.float64)
    block = Block(coords, omega, layout == "repeat", (), ())
    blocks = [block, block] if layout == "half" else [block]
    dtype = torch.complex64 if kind == "complex" else torch.float32
    parts: Any = ("cos", "sin") if kind == "real" else (kind,)
    given: list[Any] = [Table(blocks, part, dtype) for part in parts]
    if num_heads > 1:
        given = [Heads(table, num_heads, layout) for table in given]
    given = [tuple(given)] if style == "both" else given
    sizes = {**SIZES, "d": 8 * (num_heads if order == "bnd" else 1) + more}
    xs = [torch.randn(*(sizes[size] for size in order), generator=generator) for _ in range(num)]
    angles = (coords * omega[:, 0]).reshape(2 if "b" in lead else 1, SIZES["n"], num_heads, 4)
    expected = [_turn(x, angles, order, pairs) for x in xs]
    try:
        found = function(*(x.clone() for x in xs), *to_tensor(given), **options)
    except Exception:
        return None
    found = found if num > 1 else (found,)
    if not isinstance(found, tuple) or len(found) != num or not all(isinstance(y, Tensor) for y in found):
        return None
    dtype = found[0].dtype
    if not dtype.is_floating_point or any(y.shape != x.shape for x, y in zip(xs, found, strict=True)):
        return None
    bound = max(1e-5, 2 * torch.finfo(dtype).eps)
    close = all(torch.allclose(y.float(), z, rtol=bound, atol=bound) for y, z in zip(found, expected, strict=True))
    return dtype if close else None


def _turn(x: Tensor, angles: Tensor, order: str, pairs: str) -> Tensor:
    """The first channels of each head by angles (B or 1, N, H or 1, C)."""
    shape, num_heads, width = x.shape, angles.shape[2], 2 * angles.shape[-1]
    if order == "bnd":
        x = x.unflatten(-1, (num_heads, -1))
    elif order == "bhnd":
        x = x.transpose(1, 2)
    x, rest = x[..., :width], x[..., width:]
    a, b = x.chunk(2, -1) if pairs == "half" else (x[..., 0::2], x[..., 1::2])
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat([a, b], -1) if pairs == "half" else torch.stack([a, b], -1).flatten(-2)
    y = torch.cat([turned, rest], -1)
    return y.transpose(1, 2) if order == "bhnd" else y.reshape(shape)


# --- what takes its place -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function that turns q and k: with tables it is ours, with tensors the library's."""

    forms: Forms
    num_tensors: int
    impl: Impl = "auto"

    def one(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """``function(x, tables, ..)``, or ``function(q, k, tables, ..)``."""
        xs, rest = args[: self.num_tensors], args[self.num_tensors :]
        ours = self._encode(xs, rest)
        if ours is None:
            return function(*xs, *to_tensor(rest), **to_tensor(options))
        return ours[0] if self.num_tensors == 1 else tuple(ours)

    def two(self, function: Callable[..., Any], q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        """``function(q, tables, ..), function(k, tables, ..)``."""
        ours = self._encode((q, k), rest)
        if ours is None:
            rest, options = to_tensor(rest), to_tensor(options)
            return function(q, *rest, **options), function(k, *rest, **options)
        return ours

    def _encode(self, xs: Sequence[Tensor], rest: Sequence[Any]) -> Sequence[Tensor] | None:
        table = _find(rest)
        if table is None:
            return None
        heads, table = (table, table.table) if isinstance(table, Heads) else (None, table)
        angles = keep(table, (None if heads is None else (heads.num, heads.order)), lambda: _read_angles(table, heads))
        if angles is None:
            return None
        kind = "real" if table.part == "cos" else table.part
        forms = self.forms.get((kind, angles.layout, angles.coords.ndim - 1), ())
        fitting = [form for form in forms if _fits(form, xs, angles)]
        if len({form.order for form in fitting}) != 1:
            return None
        form = fitting[0]
        encoding = keep(table, form, lambda: _make_encoding(angles, xs, form))
        return _encode(xs, encoding, form, self.impl)


def _read_angles(table: Table, heads: Heads | None) -> Angles | None:
    angles = read_angles(table)
    if angles is None or heads is None:
        return angles
    omega = angles.omega.unflatten(0, (heads.num, -1))
    gain = None if angles.gain is None else angles.gain.unflatten(0, (heads.num, -1))
    return Angles(heads.order, angles.coords, omega, gain) if angles.layout == "single" else None


def _fits(form: Form, xs: Sequence[Tensor], angles: Angles) -> bool:
    """Whether these tensors can be of this form."""
    lead, axis, width = angles.coords.shape[:-1], form.axis, 2 * angles.omega.shape[-2]
    if angles.omega.ndim == 3 and form.order == "bnd":
        width *= angles.omega.shape[0]
    by_sample = axis > 0 and lead[0] != 1
    if any(lead[i] != 1 for i in range(len(lead)) if i != axis and not (i == 0 and by_sample)):
        return False
    if by_sample and not form.by_sample:
        return False
    if any(x.ndim != len(form.order) or x.shape[form.order.index("n")] != lead[axis] for x in xs):
        return False
    return all(x.shape[-1] == width or (form.partial and x.shape[-1] > width) for x in xs)


def _find(rest: Sequence[Any]) -> Table | Heads | None:
    """The table of cosines, or the one that there is; None: these are tensors, or not of the same angles."""
    if not rest:
        return None
    first = rest[0]
    if isinstance(first, (tuple, list)) and len(first) == 2:
        cos, sin = first
    elif (isinstance(first, Heads) or (isinstance(first, Table) and first.part == "cos")) and len(rest) > 1:
        cos, sin = rest[0], rest[1]
    else:
        return first if isinstance(first, Table) and first.part in ("complex", "matrix", "angle") else None
    if isinstance(cos, Heads) and isinstance(sin, Heads) and (cos.num, cos.order) == (sin.num, sin.order):
        return cos if _find([(cos.table, sin.table)]) is not None else None
    if not isinstance(cos, Table) or not isinstance(sin, Table) or (cos.part, sin.part) != ("cos", "sin"):
        return None
    return cos if cos.stands_beside(sin) else None


class Encoding(NamedTuple):
    """What the kernel takes: coordinates (N, K) or (B, N, K), frequencies (1 or H, C, K), amplitudes (1 or H, C)."""

    coords: Tensor
    omega: Tensor
    amplitude: Any


def _make_encoding(angles: Angles, xs: Sequence[Tensor], form: Form) -> Encoding:
    omega = _of_heads(angles.omega, xs, form)
    amplitude = None if angles.gain is None else angles.gain.reshape(omega.shape[:2]).to(omega.dtype)
    return Encoding(_of_tokens(angles.coords, form), omega, amplitude)


def _of_tokens(coords: Tensor, form: Form) -> Tensor:
    """(N, K), or (B, N, K)."""
    lead, axis = coords.shape[:-1], form.axis
    shape = (lead[axis], coords.shape[-1])
    coords = coords.reshape(lead[0], *shape) if axis > 0 and lead[0] != 1 else coords.reshape(shape)
    return coords if coords.dtype == torch.float32 else coords.float()


def _of_heads(omega: Tensor, xs: Sequence[Tensor], form: Form) -> Tensor:
    """(1 or H, C, K)."""
    omega = omega if omega.ndim == 3 else omega[None]
    if form.order == "bnd" and omega.shape[0] == 1:  # all heads at once: pairs are neighbours
        omega = omega.reshape(-1, _head_dim(xs[0].shape[-1]) // 2, omega.shape[-1])
    return omega if omega.dtype == torch.float64 else omega.float()


def _encode(xs: Sequence[Tensor], encoding: Encoding, form: Form, impl: Impl) -> Sequence[Tensor]:
    coords, omega, amplitude = encoding
    order = form.order
    rotary_dim = 2 * omega.shape[1]
    if order == "bnd":
        xs = [x.unflatten(-1, (omega.shape[0], -1)) for x in xs]
    given = [x if order == "bhnd" else x.transpose(1, 2) for x in xs]
    ys = rotate(
        *given, omega=omega, positions=Coordinates(coords), pairs=form.pairs, rotary_dim=rotary_dim,
        amplitude=amplitude, impl=impl,
    )  # fmt: skip
    ys = (ys,) if isinstance(ys, Tensor) else ys
    ys = [y if order == "bhnd" else y.transpose(1, 2) for y in ys]
    ys = [y.flatten(2) for y in ys] if order == "bnd" else ys
    return [y.to(form.dtype) for y in ys] if form.dtype != torch.float32 else ys


def _head_dim(width: int) -> int:
    """The largest even divisor of at most 128."""
    return next((size for size in range(128, 1, -2) if width % size == 0), width)


# --- in the source --------------------------------------------------------------------------------------------------


@functools.cache
def exchange_calls(cls: type, impl: Impl = "auto") -> dict[str, Any]:
    """A class' methods in which functions that turn q and k are called, with those calls exchanged.

    Raises:
        Unread: the source of such a method can't be read or exchanged.
    """
    found: dict[str, Any] = {}
    for name, value in methods_of(cls):
        if (name.startswith("__") and name != "__call__") or isinstance(value, (staticmethod, classmethod)):
            continue
        plain: Any = inspect.unwrap(value)
        if not any(ROTARY.search(each) for each in (*_names_in(plain.__code__), *plain.__code__.co_varnames)):
            continue
        tree = source_tree(plain)
        change = _Calls(cls, plain, tree, impl)
        tree.body = change.block(tree.body)
        if change.names:
            found[name] = rewrite(value, tree, change.names, decorated=True)
    return found


@functools.cache
def _exchange_function(function: FunctionType, impl: Impl) -> FunctionType | None:
    if not any(ROTARY.search(each) for each in _names_in(function.__code__)):
        return None
    try:
        tree = source_tree(function)
        change = _Calls(object, function, tree, impl)
        tree.body = change.block(tree.body)
        return rewrite(function, tree, change.names) if change.names else None
    except Unread:
        return None


def _names_in(code: Any) -> list[str]:
    inner = [c for c in code.co_consts if hasattr(c, "co_names")]
    return [*code.co_names, *(c.co_name for c in inner), *(name for c in inner for name in _names_in(c))]


class _Calls:
    def __init__(self, cls: type, function: FunctionType, tree: ast.FunctionDef, impl: Impl) -> None:
        self.cls, self.space = cls, function.__globals__
        self.impl: Impl = impl
        self.package = function.__module__.rsplit(".", 1)[0]
        self.local = self._local_functions(tree)
        self.names: dict[str, Any] = {}

    def _local_functions(self, tree: ast.FunctionDef) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                # Of what is imported already: a branch that is never taken may import what is not installed.
                try:
                    name = resolve_name("." * node.level + (node.module or ""), self.package)
                except ImportError:
                    continue
                module = sys.modules.get(name)
                found.update({a.asname or a.name: getattr(module, a.name, None) for a in node.names})
            elif isinstance(node, ast.FunctionDef) and node is not tree:
                found[node.name] = self._make(node)
        return found

    def _make(self, node: ast.FunctionDef) -> Any:
        """A function that is defined inside another; None where it needs the other's names, or where defining it would
        run more than the function itself: a decorator, or a default that is no constant."""
        given = (*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None))
        if node.decorator_list or not all(isinstance(default, ast.Constant) for default in given):
            return None
        node = copy.deepcopy(node)
        for each in ast.walk(node):
            if isinstance(each, ast.arg):
                each.annotation = None
        node.returns = None
        space: dict[str, Any] = {}
        try:
            exec(compile(ast.fix_missing_locations(ast.Module([node], [])), "<rotary>", "exec"), self.space, space)
        except Exception:
            return None
        return space[node.name]

    def _resolve(self, called: ast.expr) -> Any:
        if isinstance(called, ast.Name):
            return self.local[called.id] if called.id in self.local else self.space.get(called.id)
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
            found = inspect.getattr_static(self.cls, called.attr, None)
            return found.__func__ if isinstance(found, staticmethod) else None
        return None

    def read(self, node: ast.AST) -> tuple[str, Call] | None:
        """The name of what takes the place of a call, where it is one of a known function."""
        if not isinstance(node, ast.Call) or not ROTARY.search(ast.unparse(node.func)):
            return None
        function = self._resolve(node.func)
        if not isinstance(inspect.unwrap(function) if callable(function) else None, FunctionType):
            return None
        try:
            options = tuple(sorted((str(kw.arg), ast.literal_eval(kw.value)) for kw in node.keywords))
        except ValueError:
            return None
        for num in (1, 2):
            forms = _read_forms(function, num, options)
            if forms:
                name = f"_lrpe_{'_'.join(ast.unparse(node.func).split('.'))}_{num}_{len(self.names)}"
                call = Call(forms, num, self.impl)
                self.names[name] = call
                return name, call
        return None

    def help(self, called: ast.expr) -> ast.expr | None:
        """A function of the same file in which q and k are turned, with its calls exchanged."""
        function = self.space.get(called.id) if isinstance(called, ast.Name) else None
        if not isinstance(function, FunctionType) or function.__globals__ is not self.space:
            return None
        made = _exchange_function(function, self.impl)
        if made is None:
            return None
        name = f"_lrpe_{function.__name__}"
        self.names[name] = made
        return ast.Name(name, ast.Load())

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        at = 0
        while at < len(statements):
            here, there = statements[at], statements[at + 1] if at + 1 < len(statements) else None
            joined = None if there is None else self._join(here, there)
            if joined is not None:
                made.append(joined)
                at += 2
                continue
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(here, name, None)
                if inner and not isinstance(here, ast.FunctionDef):
                    setattr(here, name, self.block(inner))
            made.append(_Single(self).visit(here) if not hasattr(here, "body") else here)
            at += 1
        return made

    def _join(self, a: ast.stmt, b: ast.stmt) -> ast.stmt | None:
        """``q = f(q, ..)`` and ``k = f(k, ..)`` as one."""
        if not all(isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.value, ast.Call) for s in (a, b)):
            return None
        first, second = a.value, b.value  # pyright: ignore[reportAttributeAccessIssue]
        rest = [[ast.dump(n) for n in (c.func, *c.args[1:], *c.keywords)] for c in (first, second)]
        written = {n.id for n in ast.walk(a.targets[0]) if isinstance(n, ast.Name)}  # pyright: ignore
        read = {n.id for n in ast.walk(second) if isinstance(n, ast.Name)}
        if not first.args or rest[0] != rest[1] or written & read:
            return None
        found = self.read(first)
        if found is None or found[1].num_tensors != 1:
            return None
        value = _call(found[0], "two", first.func, [first.args[0], second.args[0], *first.args[1:]], first.keywords)
        target = ast.Tuple([a.targets[0], b.targets[0]], ast.Store())  # pyright: ignore[reportAttributeAccessIssue]
        return ast.copy_location(ast.Assign([target], value), a)


class _Single(ast.NodeTransformer):
    def __init__(self, calls: _Calls) -> None:
        self.calls = calls

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        found = self.calls.read(node)
        if found is None:
            helper = self.calls.help(node.func)
            return node if helper is None else ast.copy_location(ast.Call(helper, node.args, node.keywords), node)
        return ast.copy_location(_call(found[0], "one", node.func, node.args, node.keywords), node)


def _call(name: str, way: str, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(name, ast.Load()), way, ast.Load()), [function, *args], keywords)


@functools.cache
def _known(code: Any, num: int, options: Any) -> dict[str, Forms]:
    return {}


def _read_forms(function: Callable[..., Any], num: int, options: tuple[tuple[str, Any], ...]) -> Forms:
    """Read once for each code."""
    held = _known(inspect.unwrap(function).__code__, num, options)
    if "forms" not in held:
        with torch.no_grad():
            held["forms"] = read_forms(function, num, options)
    return held["forms"]
