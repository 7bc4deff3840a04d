"""Kernels with their numbers compiled in, for compilers that know every size."""

from __future__ import annotations

import linecache
from typing import Any

import triton
import triton.language as tl

from .encode import lrpe_kernel
from .reduce import reduce_partial_kernel

JOB = tl.constexpr(11)  # numbers of a job of kernels/reduce.py

__all__ = ["fixed_lrpe_kernel", "fixed_reduce_partial_kernel", "number_types"]


@triton.jit
def _take_numbers(NUMBERS: tl.constexpr, TYPES: tl.constexpr):
    """As a launch would give them, each of its type."""
    found = ()
    for i in tl.static_range(len(NUMBERS)):
        if TYPES[i] == "i64":
            found += (tl.full([], NUMBERS[i], tl.int64),)
        elif TYPES[i] == "u32":
            found += (tl.full([], NUMBERS[i], tl.uint32),)
        elif TYPES[i] == "i32":
            found += (tl.full([], NUMBERS[i], tl.int32),)
        else:
            tl.static_assert(False, "this type has no branch in kernels/fixed.py: _take_numbers")
    return found


def number_types(kernel: Any) -> tuple[str, ...]:
    """Of a kernel's numbers, in the order of its arguments."""
    return tuple(param.annotation for param in kernel.params if param.annotation and not param.is_constexpr)


def _fix(kernel: Any) -> Any:
    """The same kernel, of its pointers, ``NUMBERS``, their ``TYPES`` and ``V``.

    A compiler that calls a kernel by itself gives each number the type of its value, and compiles in each 1: what a
    kernel is written for is neither. And what is compiled in costs no time at a launch.
    """
    if not isinstance(kernel, triton.JITFunction):
        return kernel  # of the interpreter, which no compiler calls
    name = kernel.fn.__name__
    listed = ", ".join(param.name for param in kernel.params if not param.annotation)
    source = (
        f"def fixed_{name}({listed}, NUMBERS: tl.constexpr, TYPES: tl.constexpr, V: tl.constexpr):\n"
        f"    {name}({listed}, *_take_numbers(NUMBERS, TYPES), V)\n"
    )
    file = f"<{__name__}.{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where Triton reads it
    exec(compile(source, file, "exec"), globals())
    return triton.jit(globals()[f"fixed_{name}"])


fixed_lrpe_kernel: Any = _fix(lrpe_kernel)


@triton.jit
def _take_job(numbers, FIRST: tl.constexpr):
    """Those of a job behind its heads."""
    found = ()
    for i in tl.static_range(FIRST + 1, FIRST + JOB):
        found += (numbers[i],)
    return found


@triton.jit
def fixed_reduce_partial_kernel(
    p_partial, p_domega, p_dphase, NUMBERS: tl.constexpr, TYPES: tl.constexpr, V: tl.constexpr
):
    """Of dω and dφ, either of which may be None."""
    numbers = _take_numbers(NUMBERS=NUMBERS, TYPES=TYPES)
    LAST: tl.constexpr = len(NUMBERS) - JOB
    jobs = ()
    if p_domega is not None:
        jobs += ((p_partial, p_domega, (numbers[0],), _take_job(numbers, FIRST=0)),)
    if p_dphase is not None:
        jobs += ((p_partial, p_dphase, (numbers[LAST],), _take_job(numbers, FIRST=LAST)),)
    reduce_partial_kernel(jobs, V=V)
