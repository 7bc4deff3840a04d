"""Second pass: reduce the partial sums of all programs to dω, dφ and the gradients of weights."""

import triton
import triton.language as tl

from .signature import kernel, unpack_numbers

# These functions implement CUDA's programmatic dependent launch. Triton also has them, but in a module that other
# backends may lack.


@triton.jit
def launch_next_kernel():
    """Allow the next kernel on the stream to start as soon as all programs have called this function."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], tl.int32, False, 1)


@triton.jit
def wait_for_previous_kernel():
    """Wait until the previous kernel has ended and its results can be read."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], tl.int32, False, 1)


@triton.jit
def choose_job(is_later, next_job, job):
    """Return the numbers of ``next_job`` if ``is_later`` is true, and those of ``job`` otherwise."""
    numbers = ()
    for i in tl.static_range(len(job)):
        numbers += (tl.where(is_later, next_job[i], job[i]),)
    return numbers


@kernel
def reduce_partial_kernel(jobs: "jobs", V: tl.constexpr):
    """Reduce partial sums to gradients in a fixed order. A program sums V.block_c columns of one slot of one head.

    A job consists of a matrix of float64 partial sums, a gradient (heads, ...), and packed numbers: the job's first
    program, the number of slots per head (axes of ω), the number of columns per slot, the offset of the first partial
    sum, the row stride, the head stride, the number of rows, and the column and slot strides of the gradient. If
    V.early is set, the kernel may start before the first pass has ended.
    """
    pid = tl.program_id(0)
    p_source, _, packed = jobs[0]
    numbers = unpack_numbers(packed)
    job = 0
    for i in tl.static_range(1, len(jobs)):
        p_later, _, packed_later = jobs[i]
        next_job = unpack_numbers(packed_later)
        is_later = pid >= next_job[0]
        p_source = tl.where(is_later, p_later, p_source)
        numbers = choose_job(is_later, next_job, numbers)
        job = tl.where(is_later, i, job)
    begin, slots, width, first, step, head_step, rows, out_column, out_slot = numbers
    blocks = tl.cdiv(width, V.block_c)
    cell = (pid - begin) // blocks
    head = cell // slots
    slot = cell - head * slots
    o_c = (pid - begin - cell * blocks) * V.block_c + tl.arange(0, V.block_c)
    o_r = tl.arange(0, V.block_r)
    p = p_source + head.to(tl.int64) * head_step + first + (slot * width + o_c)[None, :]
    BLOCK_R: tl.constexpr = V.block_r
    BLOCK_C: tl.constexpr = V.block_c
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=p_source.dtype.element_ty)
    if V.early:
        wait_for_previous_kernel()
    for r in range(0, rows, V.block_r):
        mask = (r + o_r < rows)[:, None] & (o_c < width)[None, :]
        total += tl.load(p + (r + o_r).to(tl.int64)[:, None] * step, mask=mask, other=0.0)
    sums = tl.sum(total, axis=0)
    o_out = head * slots * width + slot * out_slot + o_c * out_column
    for i in tl.static_range(len(jobs)):
        _, p_out, _ = jobs[i]
        out = sums
        if p_out.dtype.element_ty != tl.float64:
            out = sums.to(tl.float32)  # the interpreter can't convert float64 to 16 bits
        job_width = tl.where(job == i, width, 0) if len(jobs) > 1 else width
        tl.store(p_out + o_out, out.to(p_out.dtype.element_ty), mask=o_c < job_width)
