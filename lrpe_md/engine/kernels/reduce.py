"""The second pass of dω, dφ and the gradients of weights: partial sums to gradients."""

import triton
import triton.language as tl

from .signature import kernel, unpack

# Of CUDA's programmatic dependent launch. Triton has both, in a module that other backends may lack.


@triton.jit
def launch_second_pass():
    """Once all programs have said so, the next kernel on the stream may be launched."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], tl.int32, False, 1)


@triton.jit
def wait_for_first_pass():
    """Until the kernel before has ended and what it wrote can be read."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], tl.int32, False, 1)


@triton.jit
def _sum_columns(p_source, p_out, pid, numbers, V: tl.constexpr):
    """Block pid of a job: block_c columns of a slot of a head."""
    slots, width, source, out_column, out_slot, rows, step, head_step, first_row, row_width = numbers
    blocks = tl.cdiv(width, V.block_c)
    cell = pid // blocks
    head = cell // slots
    slot = cell - head * slots
    o_c = (pid - cell * blocks) * V.block_c + tl.arange(0, V.block_c)
    o_r = tl.arange(0, V.block_r)
    first = (first_row + head * head_step).to(tl.int64) * row_width
    p = p_source + first + source + slot * width + o_c[None, :]
    step = tl.cast(step, tl.int64) * row_width
    BLOCK_R: tl.constexpr = V.block_r
    BLOCK_C: tl.constexpr = V.block_c
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=p_source.dtype.element_ty)
    for r in range(0, rows, V.block_r):
        mask = (r + o_r < rows)[:, None] & (o_c < width)[None, :]
        total += tl.load(p + (r + o_r)[:, None] * step, mask=mask, other=0.0)
    o_out = head * slots * width + slot * out_slot + o_c * out_column
    sums = tl.sum(total, axis=0)
    if p_out.dtype.element_ty != tl.float64:
        sums = sums.to(tl.float32)  # of which the interpreter, too, makes 16 bits
    tl.store(p_out + o_out, sums.to(p_out.dtype.element_ty), mask=o_c < width)


@kernel
def reduce_partial_kernel(jobs: "jobs", V: tl.constexpr):
    """Sum partial sums to gradients, in a fixed order.

    A job is a matrix of float64 partial sums, a gradient (heads, ..), and numbers: the heads, then those of
    :func:`_sum_columns`: a head's slots (axes of ω), a slot's columns in the matrix and the first of them, the steps
    between columns and slots in the gradient; how many rows are summed, the step from one to the next, and from those
    of a head to those of the next one, the first, and how wide they are. V.early: launched before the first pass has
    ended.
    """
    pid = tl.program_id(0)
    if V.early:
        wait_for_first_pass()
    first = pid * 0
    for i in tl.static_range(len(jobs)):
        p_source, p_out, heads, packed = jobs[i]
        numbers = unpack(packed)
        blocks = unpack(heads)[0] * numbers[0] * tl.cdiv(numbers[1], V.block_c)
        if (pid >= first) & (pid < first + blocks):
            _sum_columns(p_source, p_out, pid - first, numbers, V=V)
        first += blocks
