"""Type checks for the fields of a scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..checks import is_finite_number, show_value

__all__ = ["check_axis_numbers", "check_fields"]


def check_fields(value: Any) -> None:
    """Check that each field of a dataclass has its declared type, and that numbers are finite."""
    hints = _hints(type(value))
    for field in fields(value):
        own, hint = getattr(value, field.name), hints[field.name]
        if not _fits(own, hint):
            raise ValueError(f"{field.name}: expected {_say(hint)}, got {show_value(own)}")


def check_axis_numbers(num_axes: int, **axes: Sequence[int] | None) -> None:
    """Check that axis numbers (slowest first) are distinct and in range."""
    for name, value in axes.items():
        if value is None:
            continue
        if not value or len(set(value)) < len(value) or not all(0 <= axis < num_axes for axis in value):
            raise ValueError(
                f"{name}: expected at least one axis from 0 to {num_axes - 1}, without duplicates, got {value!r}"
            )


_hints = cache(get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    kind, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in args)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in args)
    if hint is float:
        return is_finite_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is Callable:
        return callable(value)
    if kind in (tuple, Sequence):
        if not isinstance(value, (tuple, list)):
            return False
        if kind is tuple and args[-1] is not ...:
            return len(value) == len(args) and all(map(_fits, value, args))
        return all(_fits(each, args[0]) for each in value)
    return isinstance(value, kind or hint)


_WORDS = {bool: "True or False", int: "an integer", float: "a finite number", str: "text", NoneType: "None"}
_MANY = {int: "integers", float: "finite numbers"}


def _say(hint: Any) -> str:
    kind, args = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(_say(each) for each in args)
    if kind is Literal:
        return repr(args[0]) if len(args) == 1 else f"one of {args}"
    if kind is Callable:
        return "a function"
    if kind is tuple and args[-1] is not ...:
        return f"({', '.join(map(_say, args))})"
    if kind in (tuple, Sequence):
        return f"a tuple of {_MANY.get(args[0], _say(args[0]))}"
    if kind is Mapping:
        return "a dict"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
