"""Decide which arguments a kernel is specialised on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def pack(*numbers: int) -> tuple[int, ...]:
    """Numbers of a tuple, which a kernel takes apart with :func:`unpack`.

    Triton compiles each 1 and each multiple of 16 inside a tuple into the kernel, whatever do_not_specialize says:
    here there are none.
    """
    return tuple(4 * n + 2 for n in numbers)


@triton.jit
def unpack(packed):
    """The inverse of :func:`pack`."""
    numbers = ()
    for i in tl.static_range(len(packed)):
        numbers += (packed[i] >> 2,)
    return numbers


def kernel(fn: Callable[..., Any]) -> Any:
    """``triton.jit``, but numbers, whose type is written down, and what pointers are divisible by choose no variant."""
    params = inspect.signature(fn).parameters
    numbers = [name for name in params if isinstance(fn.__annotations__.get(name), str)]
    pointers = [name for name in params if name not in fn.__annotations__]
    return triton.jit(do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)(fn)
