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


LONG_STRIDE = 2**29  # Triton derives an argument's type from its value. From here on, packed strides need int64.
STRIDE_OFFSET = tl.constexpr(2**40)


def pack_strides(long: bool, *strides: int) -> tuple[int, ...]:
    """Encode strides like :func:`pack_numbers`. If ``long`` is set, all of them are int64, so they share a variant."""
    offset = STRIDE_OFFSET.value if long else 0
    return tuple(packed + offset for packed in pack_numbers(*strides))


@triton.jit
def unpack_strides(packed, V: tl.constexpr):
    """Decode strides from :func:`pack_strides`, as int64 if V.long is set."""
    strides = ()
    for i in tl.static_range(len(packed)):
        if V.long:
            strides += ((packed[i] - STRIDE_OFFSET) >> 2,)
        else:
            strides += (packed[i] >> 2,)
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
