"""What of its arguments a kernel is compiled for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def kernel(fn: Callable[..., Any]) -> Any:
    """``triton.jit``, but numbers, whose type is written down, and what pointers are divisible by choose no variant."""
    params = inspect.signature(fn).parameters
    numbers = [name for name in params if isinstance(fn.__annotations__.get(name), str)]
    pointers = [name for name in params if name not in fn.__annotations__]
    return triton.jit(do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)(fn)
