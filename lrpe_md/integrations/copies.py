"""Copies of functions and classes in which some of the called functions are replaced.

A copy shares the globals of its original, so later patches affect both. Where the original looks up
``apply_rotary_emb``, the copy looks up a private name. We add that name next to the original name: in a function's
globals, in a module, or in a module from which a function imports at run time.
"""

from __future__ import annotations

import copy
import dis
import functools
import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional as F

__all__ = [
    "SDPA", "Copier", "Recipe", "derive_class", "find_method", "find_methods", "is_adapted",
    "looks_rotary", "read_own", "recipe_of", "replaced_names", "restore_class",
]  # fmt: skip

SDPA = F.scaled_dot_product_attention
_RECIPE = "_lrpe_recipe"  # attribute of derived classes, whose only base is the original class
_PRIVATE = "_lrpe_"
_ROTARY = re.compile(r"(^|_)(rot|rotary|rotate|rope|ropes|cos|sin|freqs?|cis|pe|pos_emb|image_rotary)(_|\d|$)", re.I)
_DEPTH = 3  # maximum depth of nested calls
_LARGEST_TABLE = 32  # largest dict of functions that is searched
_KINDS = {"LOAD_DEREF": "cell", "LOAD_CLOSURE": "cell", "LOAD_GLOBAL": "global", "LOAD_NAME": "global"}


# --- names that a code object looks up -----------------------------------------------------------------------------


class Lookups(NamedTuple):
    """Names that a code object looks up.

    Args:
        chains: (kind, variable, attribute, ...) for each chain, such as ``self.rope.rotate``, and for all its prefixes.
            The kind is "global", "local", or "cell" for a variable of an enclosing function.
        imports: (relative level and module, name) of imports at run time, such as ``("2:embeddings", "apply")``.
        others: attribute names that are looked up on other objects.
    """

    chains: frozenset[tuple[str, ...]]
    imports: frozenset[tuple[str, str]]
    others: frozenset[str]


@functools.cache
def read_lookups(code: CodeType) -> Lookups:
    """Return the names that a code object looks up, excluding those that nested functions look up."""
    chains, imports, others = set(), set(), set()
    chain: tuple[str, ...] | None = None  # the chain loaded by the last instruction
    constants: tuple[Any, Any] = (0, None)  # the last two constants loaded
    module = ""
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation == "EXTENDED_ARG":
            continue
        before, chain = chain, None
        if operation.startswith("LOAD_FAST"):
            chain = ("local", value[-1] if isinstance(value, tuple) else value)
        elif operation in _KINDS:
            chain = (_KINDS[operation], value)
        elif operation in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants = (constants[1], value)
        elif operation in ("LOAD_ATTR", "LOAD_METHOD") and before is not None:
            chain = (*before, value)
        elif operation == "IMPORT_NAME":
            module = f"{constants[0]}:{value}"
        elif operation == "IMPORT_FROM":
            imports.add((module, value))
        elif instruction.opcode in dis.hasname:
            others.add(value)
        if chain is not None:
            chains.add(chain)
    return Lookups(frozenset(chains), frozenset(imports), frozenset(others))


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


@functools.cache
def looks_rotary(code: CodeType) -> bool:
    """Return whether the name or parameters of a function suggest that it is rotary. Methods never count as rotary."""
    names = (code.co_name, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return names[1:2] not in (("self",), ("cls",)) and any(map(_ROTARY.search, names))


def _package_of(space: Mapping[str, Any]) -> str:
    return str(space.get("__name__")).partition(".")[0]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# --- copies of functions -------------------------------------------------------------------------------------------

Exchange = Callable[[Any], Any]  # a callable -> its replacement, or None
Place = tuple[dict[str, Any], Any]  # a namespace, and the replacement for a value in it


class Copier:
    """Copy functions, and replace the functions that they call with ``exchange(function)``.

    ``names`` maps additional names to replace in the first function, but not in the functions that it calls.
    """

    def __init__(self, exchange: Exchange, names: Mapping[str, str] | None = None) -> None:
        self.exchange, self.names = exchange, names or {}
        self._copies: dict[FunctionType, FunctionType | None] = {}
        self._exchanged: dict[int, tuple[Any, Any]] = {}  # id of a callable -> the callable and its replacement

    @property
    def seen(self) -> list[Any]:
        return [value for value, _ in self._exchanged.values()]

    def copy(self, function: FunctionType, depth: int = 0) -> FunctionType | None:
        """Return a copy of a function, or None if nothing that it looks up is replaced."""
        if function not in self._copies:
            self._copies[function] = None  # ends the recursion of a function that calls itself
            code = self._replace_names(function.__code__, function, depth)
            wrapped, values = vars(function).get("__wrapped__"), map(_contents, function.__closure__ or ())
            cells = [self.replace(value, depth, value is wrapped) for value in values]
            changed = tuple((i, ours) for i, ours in enumerate(cells) if ours is not None)
            if changed or code is not function.__code__:
                self._copies[function] = _copy_function(function, code, changed)
        return self._copies[function]

    def _replace_names(self, code: CodeType, function: FunctionType, depth: int) -> CodeType:
        """Return the code of a function, or of one nested in it, with private names for replaced functions."""
        constants = list(code.co_consts)
        for i, each in enumerate(constants):
            if isinstance(each, CodeType):
                constants[i] = self._replace_nested(each, function, depth)
        names = {} if depth else {name: self.names[name] for name in code.co_names if name in self.names}
        names |= {name: _publish(name, places) for name, places in self._find(code, function, depth).items()}
        if not names and all(map(operator.is_, constants, code.co_consts)):
            return code
        return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=tuple(constants))

    def _replace_nested(self, code: CodeType, function: FunctionType, depth: int) -> CodeType:
        if not code.co_freevars and looks_rotary(code):
            ours = self._exchange(_nested_function(code, function))
            if ours is not None:
                name = _publish(code.co_name, [(function.__globals__, ours)])
                return _call_global.__code__.replace(co_names=(name,), co_name=code.co_name)
        return self._replace_names(code, function, depth)

    def _find(self, code: CodeType, function: FunctionType, depth: int) -> dict[str, list[Place]]:
        """Return the places of each name that refers to a replaced function in all its uses."""
        lookups, space = read_lookups(code), function.__globals__
        places: dict[str, list[Any]] = {name: [None] for name in lookups.others}
        cells = dict(zip(function.__code__.co_freevars, map(_contents, function.__closure__ or ()), strict=True))
        for kind, *path, name in lookups.chains:
            if path or kind == "global":
                holder = {"global": space, "cell": cells, "local": {}}[kind]
                for each in path:
                    owner = holder.get(each)
                    holder = vars(owner) if isinstance(owner, ModuleType) else {}
                places.setdefault(name, []).append(self._place(holder, name, function, depth) if holder else None)
        for path, name in lookups.imports:
            places.setdefault(name, []).append(self._place(_imported(path, space), name, function, depth))
        return {name: found for name, found in places.items() if None not in found}

    def _place(self, space: dict[str, Any], name: str, caller: FunctionType, depth: int) -> Place | None:
        """Return a namespace, and the replacement for the value of ``name`` in this namespace, or None."""
        value: Any = space.get(name)
        # A subclass of dict may import its values when they are read. The registry in transformers is another mapping.
        is_table = type(value) is dict or (isinstance(value, MutableMapping) and not isinstance(value, dict))
        if is_table and len(value) <= _LARGEST_TABLE and not name.startswith("__"):
            ours = {key: ours for key, each in value.items() if (ours := self.replace(each, depth)) is not None}
            if not ours:
                return None
            table = {**value} if type(value) is dict else copy.deepcopy(value)  # a shallow copy would share its values
            table.update(ours)
            return (space, table)
        if _package_of(space) == "torch" and value is not SDPA:
            return None
        package = _package_of(caller.__globals__)
        is_helper = isinstance(value, FunctionType) and depth < _DEPTH and _package_of(value.__globals__) == package
        ours = self.replace(value, depth + 1, may_copy=is_helper)
        return None if ours is None else (space, ours)

    def replace(self, value: Any, depth: int = 0, is_wrapped: bool = False, may_copy: bool = True) -> Any:
        """Return the replacement or the copy of a value. A function inside a decorator is only copied."""
        if isinstance(value, (type, ModuleType)) or not callable(value):
            return None
        ours = None if is_wrapped else self._exchange(value)
        return self.copy(value, depth) if ours is None and may_copy and isinstance(value, FunctionType) else ours

    def _exchange(self, value: Any) -> Any:
        if id(value) not in self._exchanged:
            self._exchanged[id(value)] = value, self.exchange(value)
        return self._exchanged[id(value)][1]


def _imported(place: str, space: dict[str, Any]) -> dict[str, Any]:
    level, _, name = place.partition(":")
    try:
        full = importlib.util.resolve_name("." * int(level) + name, space.get("__package__") or "")
    except (ImportError, ValueError):
        return {}
    return vars(sys.modules[full]) if full in sys.modules else {}


def _is_same(known: Any, ours: Any) -> bool:
    is_table = isinstance(ours, MutableMapping) and type(known) is type(ours)
    return known is ours or (is_table and dict(known) == dict(ours))


def _publish(name: str, places: Sequence[Place]) -> str:
    """Add the replacement for ``name`` to all places under a private name, and return the private name."""
    number = 0
    while True:
        private = f"{_PRIVATE}{name}{number or ''}"
        if all(_is_same(holder.get(private, ours), ours) for holder, ours in places):
            for holder, ours in places:
                holder[private] = ours
            return private
        number += 1


def _call_global(*args: Any, **kwargs: Any) -> Any:
    return _target(*args, **kwargs)  # pyright: ignore[reportUndefinedVariable] # noqa: F821


@functools.cache
def _nested_function(code: CodeType, function: FunctionType) -> FunctionType:
    return FunctionType(code, function.__globals__, code.co_name)


@functools.cache
def _copy_function(function: FunctionType, code: CodeType, changed: tuple[tuple[int, Any], ...]) -> FunctionType:
    """Return a function with different code and cell contents (by cell index). Results are cached."""
    cells = list(function.__closure__ or ())
    replaced = {id(cells[i].cell_contents): ours for i, ours in changed}  # may include __wrapped__
    for i, ours in changed:
        cells[i] = CellType(ours)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, tuple(cells) or None)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    vars(made).pop("__wrapped__")
    vars(made).update({name: replaced.get(id(value), value) for name, value in vars(function).items()})
    return made


def copy_forward(module: nn.Module, attend: Callable[..., Any]) -> FunctionType | None:
    """Return a copy of a module's forward method that calls ``attend`` in place of ``scaled_dot_product_attention``.

    Return None if the forward method does not call SDPA, or if other methods or child modules call it.
    """
    kind, copier = type(module), Copier(lambda function: attend if function is SDPA else None)
    if not isinstance(kind.forward, FunctionType):
        return None
    names = {name for code in _nested_codes(kind.forward.__code__) for name in code.co_names}
    others: list[Any] = [getattr(kind, name, None) for name in names - {"forward"}]
    others += [type(child).forward for child in module.modules() if child is not module]
    leads = any(isinstance(each, FunctionType) and copier.copy(each) for each in others)
    return None if leads else copier.copy(kind.forward)


# --- classes -------------------------------------------------------------------------------------------------------


@functools.cache
def read_own(function: FunctionType) -> frozenset[tuple[str, ...]]:
    """Return what a method looks up on its object, such as ``("rope", "rotate")`` for ``self.rope.rotate``."""
    code = function.__code__
    first = code.co_varnames[0] if code.co_argcount else None
    found = {
        chain[2:]
        for each in _nested_codes(code)
        for chain in read_lookups(each).chains
        if len(chain) > 2 and chain[1] == first and (chain[0] == "cell" or each is code)
    }
    return frozenset(found).union(*map(read_own, _inner_functions(function)))


def _inner_functions(function: FunctionType) -> list[FunctionType]:
    values = map(_contents, function.__closure__ or ())
    return [value for value in values if isinstance(value, FunctionType) and value is not function]


def find_method(cls: type, name: str) -> Any:
    """Return the class attribute with this name, or None. A ``staticmethod`` stays wrapped."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


def find_methods(cls: type, entries: Iterable[str]) -> dict[str, FunctionType]:
    """Return, by name, the methods in ``entries`` and all methods that these call on the same object."""
    found: dict[str, FunctionType] = {}
    names = [*entries]
    for name in names:  # the list grows
        function = getattr(method := find_method(cls, name), "__func__", method)
        if isinstance(function, FunctionType) and _package_of(function.__globals__) != "torch":
            found[name] = function
            names += {path[0] for path in read_own(function)}.difference(names)
    return found


class Recipe(NamedTuple):
    """Recipe for an adapted class, with which another process can derive the same class and unpickle its objects."""

    exchange: Any  # a picklable Exchange, with ``refine(method, copy) -> method, attributes``
    entries: tuple[str, ...]

    def derive(self, cls: type, copier: Copier | None = None) -> Any:
        """Return a class of the same name with replaced calls. Return ``cls`` if ``exchange`` replaces nothing."""
        copier = copier or Copier(self.exchange)
        methods: dict[str, Any] = {}
        for name, function in find_methods(cls, self.entries).items():
            method = find_method(cls, name)
            ours = copier.replace(function, is_wrapped=not isinstance(method, staticmethod))
            if method is function:
                ours, attributes = self.exchange.refine(function, ours)
                methods |= {} if ours is None else {name: (ours, None), **attributes}
            elif ours is not None:
                methods[name] = (ours, type(method))
        return derive_class(cls, tuple(methods.items()), self) if methods else cls


@functools.cache
def derive_class(cls: type, methods: tuple[tuple[str, tuple[Any, Any]], ...], recipe: Any) -> Any:
    """Return a class of the same name with different methods. ``recipe.derive(cls)`` recreates it.

    ``methods`` maps names to values and their kinds (None or ``staticmethod``).
    """
    own: dict[str, Any] = {
        **{name: kind(ours) if kind else ours for name, (ours, kind) in methods}, _RECIPE: recipe,
        "__reduce_ex__": _reduce, "__module__": cls.__module__, "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }  # fmt: skip
    derived = type(cls)(cls.__name__, (cls,), own)
    if cls.__module__.startswith("diffusers."):
        _register_with_hooks(cls, derived)
    return derived


def _register_with_hooks(cls: type, derived: type) -> None:
    """Register a derived class with diffusers' hooks, such as layer skipping, which look up settings by exact class."""
    with suppress(ImportError, AttributeError):  # older versions have no registries
        helpers = importlib.import_module("diffusers.hooks._helpers")
        for registry in (helpers.AttentionProcessorRegistry, helpers.TransformerBlockRegistry):
            with suppress(ValueError):  # not every class is registered
                registry.register(derived, copy.copy(registry.get(cls)))


def _reduce(part: Any, protocol: Any) -> Any:
    """Implement ``__reduce__`` for an object whose class cannot be imported by name."""
    derived = [cls for cls in type(part).__mro__[::-1] if recipe_of(cls) is not None]
    return (_rebuild, (derived[0].__bases__[0], *map(recipe_of, derived)), *object.__reduce_ex__(part, 2)[2:])


def _rebuild(cls: Any, *recipes: Any) -> Any:
    for recipe in recipes:
        cls = recipe.derive(cls)
    return cls.__new__(cls)


def restore_class(part: Any) -> dict[Any, str]:
    """Restore an object's original class, and return the names of our methods, by method.

    The object's class must not be a subclass of an adapted class.
    """
    ours: dict[Any, str] = {}
    while is_adapted(type(part)):
        ours |= {method: name for name, method in vars(type(part)).items() if isinstance(method, FunctionType)}
        part.__class__ = type(part).__bases__[0]
    return ours


def replaced_names(cls: type) -> set[str]:
    """Return the names of the methods, and of the functions called by methods, that an adapted class replaces."""
    found: set[str] = set()
    for name, method in vars(cls).items():
        called = _private_names(getattr(method, "__func__", method))
        is_whole = isinstance(method, (staticmethod, FunctionType)) and method is not _reduce
        found |= called or ({name} if is_whole and hasattr(cls.__bases__[0], name) else set())
    return found


def _private_names(function: Any) -> set[str]:
    if not isinstance(function, FunctionType):
        return set()
    found = {name for code in _nested_codes(function.__code__) for name in code.co_names if name.startswith(_PRIVATE)}
    own = {name.removeprefix(_PRIVATE).rstrip("0123456789") for name in found}
    return own.union(*map(_private_names, _inner_functions(function)))


def is_adapted(cls: type) -> bool:
    """Return whether :func:`derive_class` made this class or one of its base classes."""
    return hasattr(cls, _RECIPE)


def recipe_of(cls: type) -> Any:
    """Return the recipe of a derived class. Return None for its subclasses and for all other classes."""
    return vars(cls).get(_RECIPE)
