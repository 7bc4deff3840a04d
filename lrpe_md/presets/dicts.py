"""Conversion between schemes and plain dicts, for JSON and YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from inspect import signature
from typing import Any

from ..checks import explain_unknown, suggest
from .functions import FUNCTIONS

__all__ = ["read_scheme", "write_scheme"]

Functions = Mapping[str, Callable[..., Any]]
CALLED = ("grid", "omega", "scaling", "series", "tokens_start")  # fields that hold functions


def write_scheme(scheme: Any, functions: Functions | None) -> dict[str, Any]:
    names = {function: name for name, function in _add_functions(functions).items()}
    return _write_fields(scheme, names)


def _add_functions(functions: Functions | None) -> Functions:
    """Return the library's functions and the caller's own functions by name.

    Raises:
        ValueError: if a caller's function has the same name as a different function of the library, because the name
            would be ambiguous in a file.
    """
    for name, function in (functions or {}).items():
        if FUNCTIONS.get(name, function) is not function:
            raise ValueError(
                f"functions: expected names that lrpe_md.presets.FUNCTIONS does not contain, got {name!r} for your "
                f"function; choose another name, such as 'my_{name}'"
            )
    return {**FUNCTIONS, **(functions or {})}


def _write_fields(value: Any, names: Mapping[Any, str]) -> dict[str, Any]:
    """Return the fields that differ from their defaults as a plain dict."""
    found = {}
    for field in fields(value):
        own = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if own is not default and (callable(own) or own != default):
            found[field.name] = _write(field.name, own, names)
    return found


def _write(name: str, value: Any, names: Mapping[Any, str]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, partial):
        if value.args:
            raise ValueError(
                f"{name}: expected a functools.partial with keyword arguments only, got {value!r}; positional "
                "arguments can't be saved"
            )
        bound = {key: _write(name, argument, names) for key, argument in value.keywords.items()}
        return {"function": _write(name, value.func, names), **bound}
    if isinstance(value, Mapping):
        return {key: _write(name, part, names) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_write(name, part, names) for part in value]
    if hasattr(value, "__dataclass_fields__"):
        kind = {"kind": type(value).__name__.lower()} if name == "frequencies" else {}
        return {**kind, **_write_fields(value, names)}
    if callable(value) and value in names:
        return names[value]
    raise ValueError(
        f"{name}: expected numbers, strings or a named function, got {value!r}, which can't be saved; name your "
        "own functions with to_dict(functions={'name': function})"
    )


def read_scheme(data: Mapping[str, Any], functions: Functions | None, classes: Mapping[str, Any]) -> Any:
    known = _add_functions(functions)
    if not isinstance(data, Mapping):
        raise ValueError(f"data: expected a dict, as returned by to_dict, got {type(data).__name__}")
    values = dict(data)
    if isinstance(values.get("frequencies"), Mapping):
        part = dict(values["frequencies"])
        kind = part.pop("kind", None)
        if kind not in ("axial", "dense"):
            raise ValueError(f"frequencies: expected 'kind' to be 'axial' or 'dense', got {kind!r}")
        values["frequencies"] = _read_fields("frequencies", classes[kind], part, known)
    if isinstance(values.get("tokens"), Mapping):
        values["tokens"] = _read_fields("tokens", classes["tokens"], values["tokens"], known)
    return _read_fields("data", classes["scheme"], values, known)


def _read_fields(where: str, cls: Any, values: Mapping[str, Any], known: Functions) -> Any:
    taken = {field.name: field for field in fields(cls)}
    unknown = sorted(map(str, values.keys() - taken))
    if unknown:
        name = unknown[0]
        advice = suggest(name, taken) or f"; use one of {', '.join(taken)}"
        raise ValueError(f"{where}: expected a field of {cls.__name__}, got {name!r}{advice}")
    needed = [n for n, f in taken.items() if f.default is f.default_factory is MISSING and n not in values]
    if needed:
        raise ValueError(f"{where}: {cls.__name__} needs {', '.join(needed)}, got {', '.join(values) or 'nothing'}")
    return cls(**{name: _read_value(name, value, known) for name, value in values.items()})


def _check_arguments(name: str, function: Any, bound: Mapping[str, Any]) -> None:
    if not callable(function):
        raise ValueError(f"{name}: expected the name of a function, got {function!r}")
    taken = signature(function).parameters.values()
    names = [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = sorted(map(str, bound.keys() - set(names)))
    if unknown and not any(p.kind == p.VAR_KEYWORD for p in taken):
        raise ValueError(explain_unknown(name, unknown[0], names, f"one of the arguments {names}"))


def _read_value(name: str, value: Any, known: Functions) -> Any:
    if name in CALLED and isinstance(value, str):
        if value not in known:
            raise ValueError(
                f"{name}: expected one of the functions {sorted(known)}, got {value!r}; pass your own functions with "
                "from_dict(..., functions={'name': function})"
            )
        return known[value]
    if name in CALLED and isinstance(value, Mapping):
        bound = {key: _read_value("", argument, known) for key, argument in value.items() if key != "function"}
        function = _read_value(name, value.get("function", ""), known)
        _check_arguments(name, function, bound)
        return partial(function, **bound)
    if isinstance(value, Mapping):
        return {key: _read_value("", part, known) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_read_value(name, part, known) for part in value)
    return value
