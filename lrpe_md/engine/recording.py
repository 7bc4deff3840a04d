"""Launches: done, or noted down for a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from .call import Variant

__all__ = ["Start", "is_recording", "record", "start"]


class Start(NamedTuple):
    """A launch of a kernel."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]  # before V: tensors, numbers, and tuples of them, any of them None
    variant: Variant
    options: dict[str, Any]  # of Triton's compiler


_noted: ContextVar[list[Start] | None] = ContextVar("noted", default=None)


def start(kernel: Any, programs: int, args: tuple[Any, ...], variant: Variant, options: dict[str, Any]) -> Any:
    """Launch a kernel; while :func:`record` is active, write down that it would be."""
    noted = _noted.get()
    if noted is None:
        return kernel[(programs,)](*args, V=variant, **options)
    noted.append(Start(kernel, programs, args, variant, options))
    return None


def is_recording() -> bool:
    return _noted.get() is not None


@contextmanager
def record() -> Iterator[list[Start]]:
    """What is launched meanwhile, in its order, instead of launching it: of tensors without memory."""
    found: list[Start] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)
