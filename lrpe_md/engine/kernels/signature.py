"""Control which arguments Triton specialises a kernel on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def pack_numbers(*numbers: int) -> tuple[int, ...]:
    """Encode numbers as a tuple argument, which a kernel decodes with :func:`unpack_numbers`.

    Inside a tuple, Triton specialises on 1 and on multiples of 16, despite do_not_specialize. An encoded number is
    never one of these.
    """
    return tuple(4 * n + 2 for n in numbers)


STRIDE_OFFSET = tl.constexpr(2**40)


def pack_strides(*strides: int) -> tuple[int, ...]:
    """Encode strides like :func:`pack_numbers`, but always as int64, so that large strides don't need new kernels."""
    return tuple(4 * n + 2 + STRIDE_OFFSET.value for n in strides)


@triton.jit
def unpack_strides(packed):
    """Decode strides from :func:`pack_strides` as int64."""
    strides = ()
    for i in tl.static_range(len(packed)):
        strides += ((packed[i] - STRIDE_OFFSET) >> 2,)
    return strides


@triton.jit
def unpack_numbers(packed):
    """Decode numbers from :func:`pack_numbers`."""
    numbers = ()
    for i in tl.static_range(len(packed)):
        numbers += (packed[i] >> 2,)
    return numbers


@triton.jit
def unpack_int32(packed):
    """Decode numbers from :func:`pack_numbers` as int32. Numbers from 2^31 to 2^32 - 1 keep their bits."""
    numbers = ()
    for i in tl.static_range(len(packed)):
        numbers += ((packed[i] >> 2).to(tl.int32),)
    return numbers


def kernel(fn: Callable[..., Any]) -> Any:
    """Apply ``triton.jit`` without specialising on numbers (arguments with a type string) or on pointer alignment."""
    params = inspect.signature(fn).parameters
    numbers = [name for name in params if isinstance(fn.__annotations__.get(name), str)]
    pointers = [name for name in params if name not in fn.__annotations__]
    return triton.jit(do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)(fn)
