"""Copies of functions that call another function where the original calls ``scaled_dot_product_attention``.

A compiler traces such a copy where it can't trace a ``TorchFunctionMode``: inside a checkpoint.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.nn import functional as F

from .copies import contents, nested_codes, package_of

__all__ = ["SDPA", "ForwardCopier"]

SDPA = F.scaled_dot_product_attention
_PATH = frozenset({"nn", "functional", "scaled_dot_product_attention"})  # from torch
_DEPTH = 3  # of functions that call functions


class ForwardCopier:
    """Copies forwards with globals of their own, in which SDPA is another function.

    It follows what the code looks up by name: torch's modules, SDPA itself, and other functions that lead to it.

    Args:
        ours: takes the place of SDPA.
    """

    def __init__(self, ours: Callable[..., Any]) -> None:
        self.ours = ours
        self.copies: dict[FunctionType, FunctionType | None] = {}
        self.spaces: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = []  # globals, the original's, what differs

    def copy_forward(self, module: nn.Module) -> FunctionType | None:
        """Return a copy of the forward of a module's class.

        None where SDPA is not found by name, where other methods or the module's children lead to it, too, or where a
        function assigns globals.
        """
        kind = type(module)
        if not isinstance(kind.forward, FunctionType):
            return None
        others: list[Any] = [getattr(kind, name, None) for name in _names(kind.forward) - {"forward"}]
        others += [type(child).forward for child in module.modules() if child is not module]
        is_elsewhere = any(isinstance(each, FunctionType) and self.copy(each) for each in others)
        return None if is_elsewhere else self.copy(kind.forward)

    def refresh(self) -> None:
        """Take over what was assigned to the globals of the originals since."""
        for space, original, changed in self.spaces:
            space.update({name: value for name, value in original.items() if name not in changed})

    def copy(self, function: FunctionType, depth: int = 0) -> FunctionType | None:
        """Return a copy of a function; None where it does not lead to SDPA."""
        if function not in self.copies:
            self.copies[function] = None  # ends the recursion of a function that calls itself
            self.copies[function] = self._copy(function, depth)
        return self.copies[function]

    def _copy(self, function: FunctionType, depth: int) -> FunctionType | None:
        original, closure, names = function.__globals__, function.__closure__ or (), _names(function)
        assigns = any(dis.opmap["STORE_GLOBAL"] in code.co_code[::2] for code in nested_codes(function.__code__))
        if depth > _DEPTH or package_of(original) == "torch" or assigns:
            return None
        changed = self._replace_all(original, names, names, depth)
        replaced = [self._replace(contents(cell), names, depth) for cell in closure]
        if not changed and all(ours is None for ours in replaced):
            return None
        cells = tuple(cell if ours is None else CellType(ours) for cell, ours in zip(closure, replaced, strict=True))
        # Without __name__, by which Dynamo would look up the original's globals.
        space = {name: value for name, value in original.items() if name != "__name__"} | changed
        self.spaces.append((space, original, {"__name__", *changed}))
        made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made

    def _replace_all(
        self, space: Mapping[str, Any], keys: Iterable[str], names: frozenset[str], depth: int
    ) -> dict[str, Any]:
        """Return what takes the place of a namespace's values, by their names."""
        found = {key: self._replace(space[key], names, depth) for key in keys if key in space}
        return {key: ours for key, ours in found.items() if ours is not None}

    def _replace(self, value: Any, names: frozenset[str], depth: int) -> Any:
        """Return what takes the place of a value in code that looks up ``names``, or None."""
        if value is SDPA:
            return self.ours
        if isinstance(value, FunctionType):
            return self.copy(value, depth + 1)
        if isinstance(value, MutableMapping):  # of functions by name, as transformers has
            keys = [key for key, each in value.items() if isinstance(each, FunctionType)]
            changed = self._replace_all(value, keys, names, depth)
            if changed:
                value = copy.deepcopy(value)
                value.update(changed)
            return value if changed else None
        if not isinstance(value, ModuleType):
            return None
        space = vars(value)
        if package_of(space) == "torch":
            keys = [key for key in names & _PATH if isinstance(space.get(key), ModuleType) or space.get(key) is SDPA]
        else:
            keys = [key for key in names if isinstance(space.get(key), FunctionType) or space.get(key) is SDPA]
        changed = self._replace_all(space, keys, names, depth)
        return _copy_module(value, changed) if changed else None


def _names(function: FunctionType) -> frozenset[str]:
    return frozenset(name for code in nested_codes(function.__code__) for name in code.co_names)


def _copy_module(module: ModuleType, changed: Mapping[str, Any]) -> ModuleType:
    made = ModuleType(module.__name__)
    vars(made).update({**vars(module), **changed})
    return made
