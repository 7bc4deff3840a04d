"""Compile numeric arguments into a kernel, for compilers that know all sizes."""

from __future__ import annotations

import linecache
from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Copy", "Fixed", "Launcher", "fix"]


@triton.jit
def _take_numbers(NUMBERS: tl.constexpr, TYPES: tl.constexpr):
    """Convert numbers to the types that they have in a normal launch."""
    numbers = ()
    for i in tl.static_range(len(NUMBERS)):
        if TYPES[i] == "i64":
            numbers += (tl.full([], NUMBERS[i], tl.int64),)
        elif TYPES[i] == "u32":
            numbers += (tl.full([], NUMBERS[i], tl.uint32),)
        elif TYPES[i] == "i32":
            numbers += (tl.full([], NUMBERS[i], tl.int32),)
        elif TYPES[i] == "fp32":
            numbers += (tl.full([], NUMBERS[i], tl.float32),)
        else:
            tl.static_assert(False, "this type has no branch in kernels/fixed.py: _take_numbers")
    return numbers


@triton.jit
def copy_rows(p_x, p_o, program, SIZES: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of tokens of one head from x (B, H, N, D) to o. FROM and TO are the strides (b, h, n) of x and o.

    The rows of both must be 16-byte aligned.
    """
    H: tl.constexpr = SIZES[0]
    N: tl.constexpr = SIZES[1]
    D: tl.constexpr = SIZES[2]
    BLOCK_D: tl.constexpr = SIZES[3]
    T: tl.constexpr = (N + BLOCK - 1) // BLOCK
    h = (program % H).to(tl.int64)
    rest = program // H
    b = (rest // T).to(tl.int64)
    o_n = rest % T * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_n < N)[:, None] & (o_d < D)[None, :]
    p_x = tl.multiple_of(p_x + b * FROM[0] + h * FROM[1], 16)
    p_o = tl.multiple_of(p_o + b * TO[0] + h * TO[1], 16)
    x = tl.load(p_x + o_n.to(tl.int64)[:, None] * FROM[2] + o_d[None, :], mask=mask)
    tl.store(p_o + o_n.to(tl.int64)[:, None] * TO[2] + o_d[None, :], x, mask=mask)


class Copy(NamedTuple):
    """Copy of rows (B, H, N, D) into a joined tensor.

    Extra programs of the launch that writes the other rows of this tensor make the copy.
    """

    source: Any
    destination: Any  # has the same dtype as the source
    first: int  # number of the first extra program
    num_warps: int

    @property
    def width(self) -> int:
        return triton.next_power_of_2(self.source.shape[3])

    @property
    def block(self) -> int:
        """Number of tokens per program. Each thread copies 64 bytes of bfloat16."""
        return max(1, 1024 * self.num_warps // self.width)

    @property
    def programs(self) -> int:
        batch, heads, num_tokens, _ = self.source.shape
        return batch * heads * triton.cdiv(num_tokens, self.block)

    def write(self, source: str, destination: str) -> str:
        """Return the source code of a call to :func:`copy_rows`."""
        _, heads, num_tokens, head_dim = self.source.shape
        sizes = heads, num_tokens, head_dim, self.width
        x, o = self.source.stride()[:3], self.destination.stride()[:3]
        constants = f"SIZES={sizes}, FROM={x}, TO={o}, BLOCK={self.block}"
        return f"copy_rows({source}, {destination}, program - {self.first}, {constants})"


class Fixed(NamedTuple):
    """A kernel that takes tensors, ``NUMBERS``, ``TYPES`` and ``V``.

    This tuple includes the values of all arguments except ``V``.
    """

    kernel: Any
    arguments: tuple[str, ...]  # source code of the original kernel's arguments
    tensors: list[Any]
    numbers: tuple[int | float, ...]
    types: tuple[str, ...]
    branch: tuple[int, str] | None = None  # number of the first extra program, and the code that extra programs run
    programs: int = 0  # number of extra programs


def fix(kernel: Any, args: tuple[Any, ...], copy: Copy | None = None) -> Fixed:
    """Return a kernel with the numbers among ``args`` compiled in. If ``copy`` is passed, extra programs make the copy.

    Inductor would derive the type of a number from its value, and would compile in only numbers that are equal to 1.
    Here, numbers have the types that the kernel declares. Compiled-in numbers also don't add to the launch time.
    """
    tensors: list[Any] = []
    numbers: list[int | float] = []
    types: list[str] = []

    def write(value: Any, type_name: str) -> str:
        if value is None:
            return "None"
        if isinstance(value, tuple):
            return "(" + "".join(f"{write(item, '')}, " for item in value) + ")"
        if isinstance(value, (int, float)):
            numbers.append(value)
            types.append(type_name or ("i32" if -(2**31) <= value < 2**31 else "i64"))
            return f"numbers[{len(numbers) - 1}]"
        index = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
        tensors[index:] = tensors[index:] or [value]
        return f"p{index}"

    declared = [kernel.fn.__annotations__.get(name, "") for name in kernel.arg_names]
    runtime_types = [type_name for type_name in declared if type_name is not tl.constexpr]
    arguments = [write(value, type_name) for type_name, value in zip(runtime_types, args, strict=True)]
    branch = None if copy is None else (copy.first, copy.write(write(copy.source, ""), write(copy.destination, "")))
    fixed_kernel = _write_kernel(kernel, len(tensors), tuple(arguments), branch)
    num_copy_programs = 0 if copy is None else copy.programs
    return Fixed(fixed_kernel, tuple(arguments), tensors, tuple(numbers), tuple(types), branch, num_copy_programs)


@cache
def _write_kernel(kernel: Any, num_tensors: int, args: tuple[str, ...], branch: tuple[int, str] | None) -> Any:
    name = kernel.fn.__name__
    pointers = ", ".join(f"p{i}" for i in range(num_tensors))
    call = f"{name}({', '.join(args)}, V=V)"
    body = f"    {call}\n"
    if branch is not None:
        first, copy_call = branch
        body = (
            "    program = tl.program_id(0)\n"
            f"    if program < {first}:\n        {call}\n    else:\n        {copy_call}\n"
        )  # fmt: skip
    source = (
        f"def fixed_{name}({pointers}, NUMBERS: tl.constexpr, TYPES: tl.constexpr, V: tl.constexpr):\n"
        "    numbers = _take_numbers(NUMBERS=NUMBERS, TYPES=TYPES)\n" + body
    )
    file = f"<{__name__}.{name} {hash(source):x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where Triton reads the source
    namespace: dict[str, Any] = {"__name__": __name__, "tl": tl, "_take_numbers": _take_numbers, name: kernel}
    if branch is not None:
        namespace["copy_rows"] = copy_rows
    exec(compile(source, file, "exec"), namespace)
    return triton.jit(namespace[f"fixed_{name}"])


class Launcher:
    """Launcher of a fixed kernel in compiler-generated code, with launch options that the compiler does not support.

    All arguments of the constructor can be written as source code. They are the name of the original kernel, the number
    of tensors, the source of the kernel's arguments, the code of extra programs, the constants, the number of programs
    and the launch options.
    """

    def __init__(
        self, name: str, num_tensors: int, arguments: tuple[str, ...], branch: tuple[int, str] | None,
        constants: tuple[Any, ...], programs: int, options: dict[str, int],
    ) -> None:  # fmt: skip
        from .. import kernels

        fixed_kernel = _write_kernel(getattr(kernels, name), num_tensors, arguments, branch)
        pointers = fixed_kernel.arg_names[:num_tensors]
        self.kernel: Any = triton.jit(do_not_specialize_on_alignment=pointers)(fixed_kernel.fn)
        self.constants, self.grid, self.options = constants, (programs, 1, 1), options
        self.compiled: Any = None

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device, which must be the same in every call."""
        if self.compiled is None:
            self.compiled = self.kernel[self.grid](*tensors, *self.constants, **self.options)
        else:
            self.compiled[self.grid](*tensors, *self.constants)
