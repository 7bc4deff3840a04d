"""The source of a library's functions with some calls exchanged, for one object and not for the library."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .tables import cat, einsum, of_series, outer, pad, stack, times, zeros

__all__ = [
    "Rewritten", "Unread", "methods_of", "rewrite", "rewrite_method", "rewrite_pads", "rewrite_tables",
    "source_tree",
]  # fmt: skip

ROTARY = re.compile(r"rot|rope|freqs", re.IGNORECASE)
SERIES = "get_1d_rotary_pos_embed"


class Unread(ValueError):
    """Source that can't be read or exchanged; says why."""


def source_tree(function: FunctionType) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise Unread(f"{function.__qualname__}: expected a function with a source") from error
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise Unread(f"{function.__qualname__}: expected a plain function")
    ast.increment_lineno(found, function.__code__.co_firstlineno - 1)
    return found


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """A class' own methods and those that it inherits, as they are in the classes' bodies; the library's alone."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins", "lrpe_md", "typing", "abc"):
            continue
        for name, value in vars(base).items():
            plain = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) or _is_wrapped(value) else None
            if name not in seen and isinstance(plain, FunctionType):
                yield name, value
            seen.add(name)


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, (staticmethod, classmethod))


def rewrite(
    function: FunctionType, tree: ast.FunctionDef, names: dict[str, Any], decorated: bool = False
) -> FunctionType:
    """A function of a changed tree, in the space of the original; ``names`` are what the changes call.

    Raises:
        Unread: it is a closure, or calls ``super()``.
    """
    code = inspect.unwrap(function).__code__
    if code.co_freevars:
        raise Unread(f"{function.__qualname__}: expected a function without a closure or super()")
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    defaults = tree.args.defaults
    tree.args.defaults = [ast.Constant(None) for _ in defaults]
    tree.args.kw_defaults = [None if d is None else ast.Constant(None) for d in tree.args.kw_defaults]
    if not decorated:
        tree.decorator_list = []
    made = f"_make_{tree.name.strip('_')}"
    factory: Any = ast.parse(f"def {made}({', '.join(names)}):\n    return {tree.name}").body[0]
    factory.body.insert(0, tree)
    module = ast.fix_missing_locations(ast.Module([factory], []))
    space: dict[str, Any] = {}
    exec(compile(module, code.co_filename, "exec"), function.__globals__, space)
    found = space[made](**names)
    plain = inspect.unwrap(found)
    original = inspect.unwrap(function)
    plain.__defaults__, plain.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    plain.__qualname__, plain.__module__ = original.__qualname__, original.__module__
    return found


MAKERS = {"torch.outer": outer, "torch.einsum": einsum}
JOINS = {"torch.cat": cat, "torch.concat": cat, "torch.concatenate": cat, "torch.stack": stack}


# --- rotary modules: tables in place of tensors ----------------------------------------------------------------------


class _Tables(ast.NodeTransformer):
    """Exchanges what makes tables, and the functions that do so."""

    def __init__(self, function: FunctionType) -> None:
        self.space, self.names, self.count = function.__globals__, {}, 0

    def _named(self, name: str, value: Any) -> ast.Name:
        self.names[f"_lrpe_{name}"] = value
        self.count += 1
        return ast.Name(f"_lrpe_{name}", ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called: Any = node.func
        if ast.unparse(called) == "torch.zeros":
            dtypes: list[Any] = [kw.value for kw in node.keywords if kw.arg == "dtype"]
            like = next((dtype.value for dtype in dtypes if _names_dtype(dtype)), None)
            if like is not None:
                self.count -= 1
                return ast.Call(self._named("zeros", zeros), [like, *node.args], node.keywords)
        elif ast.unparse(called) in JOINS:
            self.count -= 1
            node.func = self._named(ast.unparse(called)[6:], JOINS[ast.unparse(called)])
        elif isinstance(called, ast.Attribute) and ast.unparse(called) in MAKERS:
            node.func = self._named(called.attr, MAKERS[ast.unparse(called)])
        elif isinstance(called, ast.Name):
            function = self.space.get(called.id)
            made = None if function is None else _of_function(function)
            if made is not None:
                node.func = self._named(called.id, made)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mult):
            self.count -= "unsqueeze(-1)" not in ast.unparse(node)  # else a product may be anything
            return ast.Call(self._named("times", times), [node.left, node.right], [])
        return node


def _names_dtype(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "dtype"


@functools.cache
def _of_function(function: Any) -> Callable[..., Any] | None:
    """A library's function that makes tables, with its calls exchanged; None: it makes none."""
    plain = inspect.unwrap(function) if callable(function) and not isinstance(function, type) else None
    if not isinstance(plain, FunctionType) or not plain.__module__.startswith("diffusers."):
        return None
    if (plain.__module__, plain.__name__) == ("diffusers.models.embeddings", SERIES):
        return of_series
    try:
        tree = source_tree(plain)
        change = _Tables(plain)
        change.visit(tree)
        return rewrite(plain, tree, change.names) if change.count else None
    except (Unread, RecursionError):
        return None


def rewrite_method(method: FunctionType) -> FunctionType | None:
    """One that makes tables, as it is found in its class; None: it makes none.

    Raises:
        Unread: it can't be exchanged.
    """
    plain: Any = inspect.unwrap(method)
    tree = source_tree(plain)
    change = _Tables(plain)
    change.visit(tree)
    return rewrite(plain, tree, change.names) if change.count > 0 else None


class Rewritten(NamedTuple):
    """Methods of a rotary module's class, and whether one of them makes tables."""

    methods: dict[str, Any]
    makes_tables: bool


def rewrite_tables(cls: type) -> Rewritten:
    """
    Raises:
        Unread: a method that can't be exchanged.
    """
    found: dict[str, Any] = {}
    count = 0
    for name, value in methods_of(cls):
        if name.startswith("__") and name != "__call__":
            continue
        plain: Any = inspect.unwrap(getattr(value, "__func__", value))
        tree = source_tree(plain)
        known = KNOWN.get(_digest(tree))
        if known is not None:
            found[name] = known
            continue
        change = _Tables(plain)
        change.visit(tree)
        made: Any = rewrite(plain, tree, change.names)
        count += change.count
        found[name] = type(value)(made) if _is_wrapped(value) else made
    return Rewritten(found, count > 0)


class _Pads(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "pad_sequence":
            node.func = ast.Name("_lrpe_pad", ast.Load())
        return node


@functools.cache
def rewrite_pads(cls: type) -> dict[str, FunctionType]:
    """Methods of the module that has a rotary module in which tables may be padded, but its forward."""
    found: dict[str, FunctionType] = {}
    for name, value in methods_of(cls):
        if name == "forward" or not isinstance(value, FunctionType) or value.__globals__.get("pad_sequence") is None:
            continue
        if value.__globals__["pad_sequence"] is pad_sequence and "pad_sequence" in value.__code__.co_names:
            found[name] = rewrite(value, _Pads().visit(source_tree(value)), {"_lrpe_pad": pad}, decorated=True)
    return found


# --- methods whose source says less than what they do ----------------------------------------------------------------


def _digest(tree: ast.FunctionDef) -> str:
    """Of a function's source without annotations and docstring."""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _rows_of_axes(self: Any, ids: Tensor) -> Any:
    """Rows of each axis' table by ids (B, N, axes), which the original gathers channel by channel."""
    tables = [table.to(ids.device)[ids[:, :, axis].long()] for axis, table in enumerate(self.freqs_cis)]
    return torch.cat(tables, dim=-1)


KNOWN: dict[str, Any] = {"6e104c860af53a75": _rows_of_axes}  # Lumina2RotaryPosEmbed._get_freqs_cis
