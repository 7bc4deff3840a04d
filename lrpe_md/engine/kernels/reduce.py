"""The second pass of dω and dφ: partial sums to gradients."""

import triton
import triton.language as tl

from .signature import kernel

# Of CUDA's programmatic dependent launch. Triton has both, in a module that other backends may lack.


@triton.jit
def launch_second_pass():
    """Once all programs have said so, the next kernel on the stream may be launched."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], tl.int32, False, 1)


@triton.jit
def wait_for_first_pass():
    """Until the kernel before has ended and what it wrote can be read."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], tl.int32, False, 1)


@kernel
def reduce_partial_kernel(
    p_partial, p_domega, p_dphase, rows: "i32", G: "i32", omega_heads: "i32", phase_heads: "i32", V: tl.constexpr,
):  # fmt: skip
    """Sum partial (rows, G, J, C) to dω (omega_heads, C, K) and dφ (phase_heads, C), in a fixed order.

    One program for block_c channels of each row j of each head of dω, then of each head of dφ. Shared frequencies (one
    head) sum over the groups too. V.early: launched before the first pass has ended.
    """
    C: tl.constexpr = V.num_channels
    K: tl.constexpr = V.num_axes
    J: tl.constexpr = K + 1 if V.has_phase else K
    NUM_C: tl.constexpr = (C + V.block_c - 1) // V.block_c
    pid = tl.program_id(0) // NUM_C
    num_omega = 0
    if p_domega is not None:
        num_omega = omega_heads * K
    is_omega = pid < num_omega
    head = tl.where(is_omega, pid // K, pid - num_omega)
    j = tl.where(is_omega, pid % K, K)
    shared = tl.where(is_omega, omega_heads, phase_heads) < G
    num = tl.where(shared, rows * G, rows)
    step = tl.where(shared, 1, G).to(tl.int64) * J * C
    o_c = tl.program_id(0) % NUM_C * V.block_c + tl.arange(0, V.block_c)
    o_r = tl.arange(0, V.block_r)
    p = p_partial + tl.where(shared, 0, head).to(tl.int64) * J * C + j * C + o_c[None, :]
    BLOCK_R: tl.constexpr = V.block_r
    BLOCK_C: tl.constexpr = V.block_c
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=p_partial.dtype.element_ty)
    if V.early:
        wait_for_first_pass()
    for r in range(0, num, V.block_r):
        mask = (r + o_r < num)[:, None] & (o_c < C)[None, :]
        total += tl.load(p + (r + o_r)[:, None] * step, mask=mask, other=0.0)
    total = tl.sum(total, axis=0)
    if p_domega is not None:
        if is_omega:
            tl.store(p_domega + (head * C + o_c) * K + j, total.to(p_domega.dtype.element_ty), mask=o_c < C)
    if p_dphase is not None:
        if pid >= num_omega:
            tl.store(p_dphase + head * C + o_c, total.to(p_dphase.dtype.element_ty), mask=o_c < C)
