"""Copies of functions that call another function where the original calls ``scaled_dot_product_attention``.

A compiler traces such a copy where it can't trace a ``TorchFunctionMode``: inside a checkpoint.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Callable, Collection, Mapping, MutableMapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.nn import functional as F

from .copies import nested_codes

__all__ = ["SDPA", "ForwardCopy"]

SDPA = F.scaled_dot_product_attention
_DEPTH = 3  # of functions that call functions


class ForwardCopy:
    """A copy of a module's forward with globals of its own, in which SDPA is another function.

    It follows what the code looks up by name: torch's modules, the function itself, and other functions that lead to
    it. ``function`` is None where SDPA is not found that way, where other methods or the module's children lead to it,
    too, or where a function assigns globals.

    Args:
        module: any of those that have this forward.
        ours: in the place of SDPA.
    """

    def __init__(self, module: nn.Module, ours: Callable[..., Any]) -> None:
        self.ours, self.function = ours, None
        self._copies: dict[FunctionType, FunctionType | None] = {}
        self._spaces: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = []  # globals, the original's, changes
        kind = type(module)
        if isinstance(kind.forward, FunctionType):
            names = {name for code in nested_codes(kind.forward.__code__) for name in code.co_names}
            others: list[Any] = [getattr(kind, name, None) for name in names - {"forward"}]
            others += [type(child).forward for child in module.modules() if child is not module]
            if not any(isinstance(each, FunctionType) and self._copy(each) for each in others):
                self.function = self._copy(kind.forward)

    def refresh(self) -> None:
        """Take over what was assigned to the globals of the originals since."""
        for space, original, changed in self._spaces:
            space.update({name: value for name, value in original.items() if name not in changed})

    def _copy(self, function: FunctionType, depth: int = 0) -> FunctionType | None:
        if function not in self._copies:
            self._copies[function] = None  # ends the recursion of a function that calls itself
            self._copies[function] = self._make_copy(function, depth)
        return self._copies[function]

    def _make_copy(self, function: FunctionType, depth: int) -> FunctionType | None:
        codes = list(nested_codes(function.__code__))
        is_torch = str(function.__globals__.get("__name__")).partition(".")[0] == "torch"
        if depth > _DEPTH or is_torch or any(map(_assigns_globals, codes)):
            return None
        names = frozenset(name for code in codes for name in code.co_names)
        changed = self._take_all(function.__globals__, names, depth)
        cells = tuple(self._copy_cell(cell, names, depth) for cell in function.__closure__ or ())
        if not changed and all(a is b for a, b in zip(cells, function.__closure__ or (), strict=True)):
            return None
        # Without __name__, by which Dynamo would look up the original's globals.
        space = {name: value for name, value in function.__globals__.items() if name != "__name__"} | changed
        self._spaces.append((space, function.__globals__, {"__name__", *changed}))
        made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made

    def _copy_cell(self, cell: CellType, names: Collection[str], depth: int) -> CellType:
        try:
            ours = self._take(cell.cell_contents, names, depth)
        except ValueError:  # empty
            return cell
        return cell if ours is None else CellType(ours)

    def _take_all(self, space: Mapping[str, Any], names: Collection[str], depth: int) -> dict[str, Any]:
        """Return what takes the place of values in a namespace, by their names."""
        found = {name: self._take(space[name], names, depth) for name in names if name in space}
        return {name: ours for name, ours in found.items() if ours is not None}

    def _take(self, value: Any, names: Collection[str], depth: int) -> Any:
        """Return what takes the place of a value, or None."""
        if value is SDPA:
            return self.ours
        if isinstance(value, FunctionType):
            return self._copy(value, depth + 1)
        if isinstance(value, MutableMapping):  # of functions by name, as transformers has
            functions = {name: own for name, own in value.items() if isinstance(own, FunctionType)}
            changed = self._take_all(functions, functions, depth)
            if changed:
                value = copy.deepcopy(value)
                value.update(changed)
            return value if changed else None
        if not isinstance(value, ModuleType):
            return None
        changed = self._take_all({name: own for name, own in vars(value).items() if _leads(value, own)}, names, depth)
        if not changed:
            return None
        made = ModuleType(value.__name__)
        vars(made).update({**vars(value), **changed})
        return made


def _leads(module: ModuleType, value: Any) -> bool:
    """Return whether SDPA is looked for in a value of a module: a function, or a module inside it."""
    if isinstance(value, ModuleType):
        return value.__name__.startswith(f"{module.__name__}.")
    return value is SDPA or isinstance(value, FunctionType)


def _assigns_globals(code: CodeType) -> bool:
    return any(instruction.opname == "STORE_GLOBAL" for instruction in dis.get_instructions(code))
