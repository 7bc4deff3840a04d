"""Where what a rotary module gives goes to: read from the source of the modules that hand it on."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, Literal

from torch import nn

__all__ = ["Moved", "find_misuse"]

HANDED = (ast.Tuple, ast.List, ast.Dict, ast.Return, ast.Starred, ast.IfExp, ast.DictComp, ast.keyword)


Moved = Literal["no", "sliced", "signed", "reordered"]


def find_misuse(name: str, owner: nn.Module, users: Sequence[nn.Module], known: set[int], moved: Moved) -> str | None:
    """What else than handing it on is done with what ``owner.<name>`` gives; None: nothing.

    Args:
        users: modules that may hold it.
        known: ids of the functions that turn q and k.
        moved: what is given (B, N, ..) may be "sliced" by tokens, or its sign be changed ("signed"); (N, ..) may be
            "reordered", indexed and reshaped.
    """
    for cls in {type(user) for user in users} | {type(owner)}:
        for method, tree in _sources(cls):
            found = _Method(name, method, tree, known, moved).misuse()
            if found is not None:
                place = f"{cls.__name__}.{method.__name__}"
                return f"{place}: expected cos and sin to go to the functions alone, got {found}"
    return None


@lru_cache(maxsize=4096)
def _sources(cls: type) -> list[tuple[FunctionType, ast.AST]]:
    found: list[tuple[FunctionType, ast.AST]] = []
    for base in cls.__mro__:
        if not issubclass(base, nn.Module) or base.__module__.split(".")[0] in ("torch", "lrpe_md"):
            continue
        for value in vars(base).values():
            method = inspect.unwrap(value) if callable(value) else None
            if not isinstance(method, FunctionType) or method.__name__ in {m.__name__ for m, _ in found}:
                continue
            try:
                found.append((method, ast.parse(textwrap.dedent(inspect.getsource(method)))))
            except (OSError, TypeError, SyntaxError):
                continue
    return found


class _Method:
    def __init__(self, rope: str, method: FunctionType, tree: ast.AST, known: set[int], moved: Moved) -> None:
        self.rope, self.space, self.known, self.moved = rope, method.__globals__, known, moved
        self.tree = tree
        self.body = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        parameters = {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in (*n.args, *n.kwonlyargs)}
        self.held = dict.fromkeys({"position_embeddings"} & parameters, 0)  # names, from which line on

    def misuse(self) -> str | None:
        for _ in range(4):  # until no name is new
            before = dict(self.held)
            for node in self._given():
                wrong = self._follow(node)
                if wrong is not None:
                    return ast.unparse(wrong).split("\n")[0]
            if self.held == before:
                return None
        return None

    def _given(self) -> Iterator[ast.expr]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and self._is_held(node):
                yield node
            elif isinstance(node, ast.Call):
                called = node.func.value if isinstance(node.func, ast.Subscript) else node.func  # one of a list
                if isinstance(called, ast.Attribute) and called.attr == self.rope:
                    yield node

    def _follow(self, node: ast.AST) -> ast.AST | None:
        """What is done with a value that holds it, where that is none of what may be."""
        parent: Any = self.parents.get(node)
        if isinstance(parent, HANDED):
            return None if isinstance(parent, (ast.Return,)) else self._follow(parent)
        if isinstance(parent, (ast.Assign, ast.AnnAssign)):
            for target in parent.targets if isinstance(parent, ast.Assign) else [parent.target]:
                self._hold(target)
            return None
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub) and self.moved == "signed":
            return self._follow(parent)
        if isinstance(parent, ast.Subscript) and parent.value is node:
            return self._follow(parent) if self._may_index(parent.slice) else parent
        if isinstance(parent, ast.Call):
            return None if parent.func is not node and self._may_take(parent.func) else parent
        if isinstance(parent, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops):
            return None
        if isinstance(parent, ast.comprehension):
            if self.moved in ("no", "signed"):
                return parent.iter
            of_items = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items"
            target = parent.target
            self._hold(target.elts[1] if of_items and isinstance(target, ast.Tuple) else target)
            return None
        if isinstance(parent, ast.Attribute):
            call = self.parents.get(parent)
            allowed = {"to", "get", *{"sliced": ("items", "values"), "reordered": ("reshape",)}.get(self.moved, ())}
            return self._follow(call) if parent.attr in allowed and isinstance(call, ast.Call) else parent
        if isinstance(parent, (ast.Expr, ast.If, ast.NamedExpr)):
            return None
        return parent

    def _is_held(self, node: ast.Name) -> bool:
        """A name stands for what it was given before, or for what a loop around it gave it the last time."""
        since = self.held.get(node.id)
        if since is None:
            return False
        around, parent = node.lineno, self.parents.get(node)
        while parent is not None:
            if isinstance(parent, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)) and parent is not self.body:
                around = max(around, getattr(parent, "end_lineno", 0))
            parent = self.parents.get(parent)
        return since <= around

    def _hold(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.held[target.id] = min(target.lineno, self.held.get(target.id, target.lineno))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._hold(each)
        elif isinstance(target, ast.Subscript):
            self._hold(target.value)

    def _may_index(self, index: ast.expr) -> bool:
        """By the name of a layer type, where nothing is moved; [:, tokens, :] where it is sliced."""
        if self.moved == "sliced" and isinstance(index, ast.Tuple) and len(index.elts) == 3:
            return all(isinstance(e, ast.Slice) and ast.unparse(e) == ":" for e in index.elts[::2])
        return self.moved == "reordered" or not isinstance(index, (ast.Slice, ast.Tuple, ast.UnaryOp))

    def _may_take(self, function: ast.expr) -> bool:
        """A known function; a module or a method of this one; a name that is local."""
        if isinstance(function, ast.Attribute):
            root = function.value
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            return isinstance(root, ast.Name) and root.id in ("self", "layer", "block")
        if not isinstance(function, ast.Name):
            return True
        value = self.space.get(function.id)
        return (
            (value is None and function.id not in dir(__builtins__))
            or function.id == "tuple"
            or id(value) in self.known
        )
