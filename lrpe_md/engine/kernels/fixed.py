"""Kernels with their numbers compiled in, for compilers that know every size."""

from __future__ import annotations

import linecache
from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Fixed", "Launcher", "fix"]


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
        elif TYPES[i] == "fp32":
            found += (tl.full([], NUMBERS[i], tl.float32),)
        else:
            tl.static_assert(False, "this type has no branch in kernels/fixed.py: _take_numbers")
    return found


class Fixed(NamedTuple):
    """A kernel of tensors alone, ``NUMBERS``, their ``TYPES`` and ``V``, and what of a launch's arguments these are."""

    kernel: Any
    written: tuple[str, ...]  # the arguments of the kernel that it is made of
    tensors: list[Any]
    numbers: tuple[int | float, ...]
    types: tuple[str, ...]


def fix(kernel: Any, args: tuple[Any, ...]) -> Fixed:
    """The same kernel for a launch with these arguments.

    A compiler that calls a kernel by itself gives each number the type of its value, and compiles in each 1: what a
    kernel is written for is neither. And what is compiled in costs no time at a launch.
    """
    tensors: list[Any] = []
    numbers: list[int | float] = []
    types: list[str] = []

    def write(value: Any, declared: str) -> str:
        if value is None:
            return "None"
        if isinstance(value, tuple):
            return "(" + "".join(f"{write(each, '')}, " for each in value) + ")"
        if isinstance(value, (int, float)):
            numbers.append(value)
            types.append(declared or ("i32" if -(2**31) <= value < 2**31 else "i64"))
            return f"numbers[{len(numbers) - 1}]"
        at = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
        tensors[at:] = tensors[at:] or [value]
        return f"p{at}"

    params = [param for param in kernel.params if not param.is_constexpr]
    written = [write(value, param.annotation) for param, value in zip(params, args, strict=True)]
    made = _write_kernel(kernel, len(tensors), tuple(written))
    return Fixed(made, tuple(written), tensors, tuple(numbers), tuple(types))


@cache
def _write_kernel(kernel: Any, num_tensors: int, args: tuple[str, ...]) -> Any:
    name = kernel.fn.__name__
    pointers = ", ".join(f"p{i}" for i in range(num_tensors))
    source = (
        f"def fixed_{name}({pointers}, NUMBERS: tl.constexpr, TYPES: tl.constexpr, V: tl.constexpr):\n"
        "    numbers = _take_numbers(NUMBERS=NUMBERS, TYPES=TYPES)\n"
        f"    {name}({', '.join(args)}, V=V)\n"
    )
    file = f"<{__name__}.{name} {hash(source):x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where Triton reads it
    found: dict[str, Any] = {"__name__": __name__, "tl": tl, "_take_numbers": _take_numbers, name: kernel}
    exec(compile(source, file, "exec"), found)
    return triton.jit(found[f"fixed_{name}"])


class Launcher:
    """Launches a fixed kernel from code that a compiler has written, with options that it does not hand on.

    Its arguments are what can be written into code: the name of the kernel that it is made of, how many tensors it has,
    the arguments of that kernel, and what is compiled in.
    """

    def __init__(
        self, name: str, num_tensors: int, written: tuple[str, ...], constants: tuple[Any, ...], programs: int,
        options: dict[str, int],
    ) -> None:  # fmt: skip
        from .. import kernels

        fixed = _write_kernel(getattr(kernels, name), num_tensors, written)
        pointers = fixed.arg_names[:num_tensors]
        self.kernel: Any = triton.jit(do_not_specialize_on_alignment=pointers)(fixed.fn)
        self.constants, self.grid, self.options = constants, (programs, 1, 1), options
        self.compiled: Any = None

    def __call__(self, *tensors: Any) -> None:
        """On the current device, which is always the same."""
        if self.compiled is None:
            self.compiled = self.kernel[self.grid](*tensors, *self.constants, **self.options)
        else:
            self.compiled[self.grid](*tensors, *self.constants)
