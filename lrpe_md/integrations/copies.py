"""Copies of functions and classes in which some of the functions that they look up by name are exchanged.

A copy shares the globals of its original, so that whatever is patched there later reaches both. Where the original
looks up ``apply_rotary_emb``, the copy looks up a private name, which is added to where the original one is found: the
globals of a function, a module, or a module that a function imports from when it runs.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

__all__ = [
    "Copier", "Recipe", "adapt_class", "derive_class", "find_method", "find_methods", "is_adapted", "looks_rotary",
    "original_class", "private_names", "read_own", "restore_class",
]  # fmt: skip

_ORIGINAL, _RECIPE, _EXTRAS = "_lrpe_original", "_lrpe_recipe", "_lrpe_extras"  # of a class that is derived here
_PRIVATE = "_lrpe_"
_ROTARY = re.compile(r"(^|_)(rot|rotary|rotate|rope|ropes|cos|sin|freqs?|cis|pe|pos_emb|image_rotary)(_|\d|$)", re.I)
_DEPTH = 3  # of functions that call functions


# --- what a code object looks up -----------------------------------------------------------------------------------


class Lookups(NamedTuple):
    """What a code object looks up by name.

    Args:
        globals: global names.
        dotted: (kind, base, name) of attributes, ``("global", "llama", "apply")`` for ``llama.apply``; a base is a
            "global", a "local" variable or a "cell", one of an enclosing function.
        imports: (module, name) of what is imported when it runs, ``("2:embeddings", "apply")``: 2 is the level.
        others: names of attributes of anything else.
        chains: (kind, variable, attribute, ..) for ``self.rope.rotate`` and its like, and for what they begin with.
    """

    globals: frozenset[str]
    dotted: frozenset[tuple[str, str, str]]
    imports: frozenset[tuple[str, str]]
    others: frozenset[str]
    chains: frozenset[tuple[str, ...]]


_SHIFTS = {  # of an argument that is the index of a name, and flags
    "LOAD_GLOBAL": int(sys.version_info >= (3, 11)), "LOAD_ATTR": int(sys.version_info >= (3, 12)),
    "LOAD_SUPER_ATTR": 2,
}  # fmt: skip
_NAMED = {op: (dis.opname[op], _SHIFTS.get(dis.opname[op], 0)) for op in dis.hasname}
_VARIABLES = {
    op: (kind, is_cell)
    for kind, is_cell, ops in (("local", False, dis.haslocal), ("cell", True, dis.hasfree))
    for op in ops
    if dis.opname[op].startswith("LOAD")
}
_SKIPPED = (0, dis.EXTENDED_ARG)  # 0: room for an instruction's cache
_LOAD_CONST = dis.opmap["LOAD_CONST"]


@functools.cache
def read_lookups(code: CodeType) -> Lookups:
    """Return what a code object looks up, without what is nested in it."""
    of_globals, dotted, imports, others, chains = set(), set(), set(), set(), set()
    last: tuple[str, ...] | None = None  # what the instruction before this one loaded
    constants: tuple[Any, Any] = (0, None)  # and the last two constants
    module, extended, raw, names, variables = "", 0, code.co_code, code.co_names, _variables(code)
    for i in range(0, len(raw), 2):
        op, arg = raw[i], raw[i + 1] | extended << 8
        extended = arg if op == dis.EXTENDED_ARG else 0
        if op in _SKIPPED:
            continue
        before, last = last, None
        if op in _VARIABLES:
            kind, is_cell = _VARIABLES[op]
            last = (kind, variables[is_cell][arg])
        elif op == _LOAD_CONST:
            constants = (constants[1], code.co_consts[arg])
        elif op in _NAMED:
            operation, shift = _NAMED[op]
            name = names[arg >> shift]
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                last = ("global", name)
                of_globals.add(name)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD") and before is not None:
                last = (*before, name)
                (dotted if len(last) == 3 else others).add(last if len(last) == 3 else name)
                chains.add(last)
            elif operation == "IMPORT_NAME":
                module = f"{constants[0]}:{name}"
            elif operation == "IMPORT_FROM":
                imports.add((module, name))
            else:
                others.add(name)
    return Lookups(*map(frozenset, (of_globals, dotted, imports, others, chains)))  # pyright: ignore[reportArgumentType]


def _variables(code: CodeType) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names that an instruction's argument is an index of: of local variables, and of cells."""
    if sys.version_info < (3, 11):
        return code.co_varnames, (*code.co_cellvars, *code.co_freevars)
    local = code.co_varnames
    both = (*local, *[name for name in code.co_cellvars if name not in local], *code.co_freevars)
    return both, both


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


@functools.cache
def looks_rotary(code: CodeType) -> bool:
    """Return whether a function is no method, and has a name or a parameter such as rotary functions have."""
    names = (code.co_name, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return names[1:2] not in (("self",), ("cls",)) and any(map(_ROTARY.search, names))


# --- copies of functions -------------------------------------------------------------------------------------------

Exchange = Callable[[Any], Any]  # a callable -> the one that takes its place, or None
Place = tuple[dict[str, Any], Any]  # a namespace, and what takes the place of one of its values


class Copier:
    """Copies functions in which the functions that ``exchange`` takes are exchanged.

    Args:
        exchange: called with each function, ``functools.partial`` or other callable that is looked up by name.
        names: other names by those that the functions look up; they must be found where these are.
    """

    def __init__(self, exchange: Exchange, names: Mapping[str, str] | None = None) -> None:
        self.exchange, self.names = exchange, names or {}
        self._copies: dict[FunctionType, FunctionType | None] = {}
        self._exchanged: dict[int, Any] = {}  # by the id of what is looked up, which lives as long as this

    def copy(self, function: FunctionType, depth: int = 0) -> FunctionType | None:
        """Return a copy of a function, or None where it looks up nothing that is exchanged."""
        if function not in self._copies:
            self._copies[function] = None  # of a function that calls itself
            code, closure = self._exchange_code(function.__code__, function, depth), function.__closure__
            if closure is not None:
                closure = self._exchange_cells(closure, function, depth)
            if code is not function.__code__ or closure is not function.__closure__:
                self._copies[function] = _copy_function(function, code, closure)
        return self._copies[function]

    def _exchange_code(self, code: CodeType, function: FunctionType, depth: int) -> CodeType:
        """Return the code of a function, or of one that is nested in it, with private names."""
        found = self._find(code, function, depth)
        constants = list(code.co_consts)
        for i, each in enumerate(constants):
            if isinstance(each, CodeType):
                constants[i] = self._exchange_nested(each, function, depth)
        names = {name: self.names[name] for name in code.co_names if name in self.names}
        if not (found or names) and all(map(operator.is_, constants, code.co_consts)):
            return code
        names |= {name: _publish(name, places) for name, places in found.items()}
        return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=tuple(constants))

    def _find(self, code: CodeType, function: FunctionType, depth: int) -> dict[str, list[Place]]:
        """Return where each name is found that stands for a function which is exchanged, wherever the code has it."""
        lookups, space = read_lookups(code), function.__globals__
        places: list[tuple[str, Place | None]] = [(name, None) for name in lookups.others]
        for name in lookups.globals:
            value = space.get(name)
            if value is not None and not isinstance(value, (type, ModuleType)):
                ours = self._take(value, function, depth)
                places.append((name, None if ours is None else (space, ours)))
        for kind, base, name in lookups.dotted:
            module = space.get(base) if kind == "global" else _cell(function, base) if kind == "cell" else None
            is_taken = isinstance(module, ModuleType) and _package(vars(module)) != "torch"
            places.append((name, self._take_of(module, name, function, depth) if is_taken else None))
        for path, name in lookups.imports:
            places.append((name, self._take_of(_imported(path, space), name, function, depth)))
        found: dict[str, list[Place]] = {}
        for name, place in places:
            if place is not None:
                found.setdefault(name, []).append(place)
        for name, place in places:
            if place is None:  # it stands for something else, too
                found.pop(name, None)
        return found

    def _take_of(self, module: Any, name: str, function: FunctionType, depth: int) -> Place | None:
        """Return where a module has a name, and what takes the place of its value; None for nothing."""
        space = {} if module is None else vars(module)
        ours = self._take(space[name], function, depth) if name in space else None
        return None if ours is None else (space, ours)

    def _take(self, value: Any, caller: FunctionType, depth: int) -> Any:
        """Return what takes the place of a value, or None."""
        if id(value) in self._exchanged:
            return self._exchanged[id(value)]
        if isinstance(value, (type, ModuleType)) or not callable(value):
            return None
        ours = self._exchanged[id(value)] = self.exchange(value)
        if ours is None and isinstance(value, FunctionType) and depth < _DEPTH:
            space = value.__globals__
            if space is caller.__globals__ or _package(space) == _package(caller.__globals__):
                ours = self._exchanged[id(value)] = self.copy(value, depth + 1)
        return ours

    def _exchange_nested(self, code: CodeType, function: FunctionType, depth: int) -> CodeType:
        if not code.co_freevars and looks_rotary(code):
            ours = self.exchange(_nested_function(code, function))
            if ours is not None:
                name = _publish(code.co_name, [(function.__globals__, ours)])
                return _call_global.__code__.replace(co_names=(name,), co_name=code.co_name)
        return self._exchange_code(code, function, depth)

    def _exchange_cells(
        self, closure: tuple[CellType, ...], function: FunctionType, depth: int
    ) -> tuple[CellType, ...]:
        """Return a closure with new cells for what is exchanged; decorators keep the function that they wrap there."""
        cells: list[CellType] = []
        for cell in closure:
            value, ours = _contents(cell), None
            if isinstance(value, FunctionType):
                ours = None if vars(function).get("__wrapped__") is value else self.exchange(value)
                ours = self.copy(value, depth) if ours is None else ours
            elif value is not None and not isinstance(value, (type, ModuleType)) and callable(value):
                ours = self.exchange(value)
            cells.append(cell if ours is None else CellType(ours))
        return closure if all(map(operator.is_, cells, closure)) else tuple(cells)


def _cell(function: FunctionType, name: str) -> Any:
    free = function.__code__.co_freevars
    return _contents((function.__closure__ or ())[free.index(name)]) if name in free else None


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _imported(place: str, space: dict[str, Any]) -> ModuleType | None:
    level, _, name = place.partition(":")
    try:
        full = importlib.util.resolve_name("." * int(level) + name, space.get("__package__") or "")
    except (ImportError, ValueError):
        return None
    return sys.modules.get(full)


def _package(space: dict[str, Any]) -> str:
    return str(space.get("__name__")).partition(".")[0]


def _publish(name: str, places: Sequence[Place]) -> str:
    """Add what takes the place of ``name`` to where that is found, and return the private name that it has there."""
    number = 0
    while True:
        private = f"{_PRIVATE}{name}{number or ''}"
        if all(holder.get(private, ours) is ours for holder, ours in places):
            for holder, ours in places:
                holder[private] = ours
            return private
        number += 1


@functools.cache
def _nested_function(code: CodeType, function: FunctionType) -> FunctionType:
    """Return a function that another one defines when it runs; the same each time."""
    return FunctionType(code, function.__globals__, code.co_name)


def _call_global(*args: Any, **kwargs: Any) -> Any:
    return _target(*args, **kwargs)  # pyright: ignore[reportUndefinedVariable] # noqa: F821


_MADE: dict[tuple[FunctionType, CodeType, tuple[int, ...]], FunctionType] = {}


def _copy_function(function: FunctionType, code: CodeType, closure: tuple[CellType, ...] | None) -> FunctionType:
    """Return a function with other code and cells; the same each time."""
    changed = [(a, b) for a, b in zip(function.__closure__ or (), closure or (), strict=True) if a is not b]
    key = (function, code, tuple(id(cell.cell_contents) for _, cell in changed))
    if key not in _MADE:
        made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
        made.__annotations__ = function.__annotations__
        exchanged = {id(a.cell_contents): b.cell_contents for a, b in changed}  # among them __wrapped__
        vars(made).update({name: exchanged.get(id(value), value) for name, value in vars(function).items()})
        _MADE[key] = made
    return _MADE[key]


# --- classes -------------------------------------------------------------------------------------------------------


@functools.cache
def read_own(function: FunctionType) -> frozenset[tuple[str, ...]]:
    """Return what a method looks up in its object, ``("rope", "rotate")`` for ``self.rope.rotate``."""
    code = function.__code__
    first = code.co_varnames[0] if code.co_argcount else None
    found = {
        chain[2:]
        for each in _nested(code)
        for chain in read_lookups(each).chains
        if chain[1] == first and (chain[0] == "cell" or each is code)
    }
    for name in code.co_freevars:
        inner = _cell(function, name)
        if isinstance(inner, FunctionType) and inner is not function:
            found |= read_own(inner)
    return frozenset(found)


def find_method(cls: type, name: str) -> Any:
    """Return what a class has under a name, a ``staticmethod`` as such; None for none."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def find_methods(cls: type, entries: Iterable[str]) -> dict[str, FunctionType]:
    """Return the functions of a class' methods by name: those of ``entries`` and what they call in the same object."""
    found: dict[str, FunctionType] = {}
    seen: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for base in cls.__mro__:
            if name in vars(base):
                method = vars(base)[name]
                function = getattr(method, "__func__", method)
                if isinstance(function, FunctionType) and _package(function.__globals__) != "torch":
                    found[name] = function
                    waiting += [path[0] for path in read_own(function)]
                break
    return found


class Recipe(NamedTuple):
    """How a class of ours is derived from another one, also in a process that loads one of its objects."""

    exchange: Any  # an Exchange that can be pickled, with ``refine(method, copy) -> method, attributes``
    entries: tuple[str, ...]

    def derive(self, cls: type) -> Any:
        return adapt_class(cls, self)


def adapt_class(cls: type, recipe: Recipe, copier: Copier | None = None) -> Any:
    """Return a class of the same name that calls what ``recipe.exchange`` gives; ``cls`` where that is nothing."""
    copier = copier or Copier(recipe.exchange)
    exchanged: dict[str, Any] = {}
    for name, function in find_methods(cls, recipe.entries).items():
        method = find_method(cls, name)
        ours = copier.exchange(function) if isinstance(method, staticmethod) else None
        ours = copier.copy(function) if ours is None else ours
        if ours is not None:
            exchanged[name] = (ours, None if method is function else type(method))
        if ours is not None and method is function:
            ours, attributes = recipe.exchange.refine(function, ours)
            exchanged |= {name: (ours, None), **attributes}
    return derive_class(cls, tuple(exchanged.items()), recipe) if exchanged else cls


@functools.cache
def derive_class(
    cls: type, methods: tuple[tuple[str, tuple[Any, Any]], ...], recipe: Any, extras: tuple[str, ...] = ()
) -> Any:
    """Return a class of the same name with other methods; the same each time.

    Args:
        methods: name -> function and kind of method: None, ``staticmethod`` or ``classmethod``.
        recipe: whose ``derive(cls)`` gives this class again.
        extras: attributes that its objects have beside those of ``cls``.
    """
    own: dict[str, Any] = {
        **{name: kind(ours) if kind else ours for name, (ours, kind) in methods}, _ORIGINAL: cls, _RECIPE: recipe,
        _EXTRAS: extras, "__reduce_ex__": _reduce, "__module__": cls.__module__, "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }  # fmt: skip
    return type(cls)(cls.__name__, (cls,), own)


def _reduce(part: Any, protocol: Any) -> Any:
    """Return what copies and files keep of an object whose class is found nowhere by name."""
    _, _, *state = object.__reduce_ex__(part, 2)
    cls, recipes = type(part), []
    while is_adapted(cls):
        recipes.append(getattr(cls, _RECIPE))
        cls = getattr(cls, _ORIGINAL)
    return (_make_anew, (cls, *recipes[::-1]), *state)


def _make_anew(cls: Any, *recipes: Any) -> Any:
    for recipe in recipes:
        cls = recipe.derive(cls)
    return cls.__new__(cls)


def restore_class(part: Any) -> None:
    """Give an object the class that it had; it must not have been derived further, see :func:`original_class`."""
    while is_adapted(type(part)):
        for name in getattr(type(part), _EXTRAS):
            delattr(part, name)
        part.__class__ = original_class(type(part))


def private_names(cls: type) -> set[str]:
    """Return the names that the methods of an adapted class look up under private ones."""
    functions = [getattr(method, "__func__", method) for method in vars(cls).values()]
    found = {name for f in functions if isinstance(f, FunctionType) for code in _codes(f) for name in code.co_names}
    return {name.removeprefix(_PRIVATE).rstrip("0123456789") for name in found if name.startswith(_PRIVATE)}


def _codes(function: FunctionType) -> Iterator[CodeType]:
    yield from _nested(function.__code__)
    for cell in function.__closure__ or ():
        if isinstance(inner := _contents(cell), FunctionType) and inner is not function:
            yield from _codes(inner)


def is_adapted(cls: type) -> bool:
    """Return whether a class is one that :func:`adapt_class` made, or is derived from one."""
    return hasattr(cls, _ORIGINAL)


def original_class(cls: type) -> Any:
    """Return the class that an adapted one was made of, or None where it was derived further since."""
    return vars(cls).get(_ORIGINAL)
