"""The second pass of dω and dφ, and softmax over the sequence."""

import triton
import triton.language as tl

from .activations import exp, softmax_sequence
from .signature import kernel
from .tiles import load, origin, row_at, store

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
    p_partial, p_domega, p_dphase, rows: "i32", G: "i32", omega_heads: "i32", phase_heads: "i32",
    C: tl.constexpr, K: tl.constexpr, J: tl.constexpr, EARLY: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum partial (rows, G, J, C) to dω (omega_heads, C, K) and dφ (phase_heads, C), in a fixed order.

    One program for BLOCK_C channels of each row j of each head of dω, then of each head of dφ. Shared frequencies (one
    head) sum over the groups too. EARLY: launched before the first pass has ended.
    """
    NUM_C: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
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
    o_c = tl.program_id(0) % NUM_C * BLOCK_C + tl.arange(0, BLOCK_C)
    o_r = tl.arange(0, BLOCK_R)
    p = p_partial + tl.where(shared, 0, head).to(tl.int64) * J * C + j * C + o_c[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=p_partial.dtype.element_ty)
    if EARLY:
        wait_for_first_pass()
    for r in range(0, num, BLOCK_R):
        mask = (r + o_r < num)[:, None] & (o_c < C)[None, :]
        total += tl.load(p + (r + o_r)[:, None] * step, mask=mask, other=0.0)
    total = tl.sum(total, axis=0)
    if p_domega is not None:
        if is_omega:
            tl.store(p_domega + (head * C + o_c) * K + j, total.to(p_domega.dtype.element_ty), mask=o_c < C)
    if p_dphase is not None:
        if pid >= num_omega:
            tl.store(p_dphase + head * C + o_c, total.to(p_dphase.dtype.element_ty), mask=o_c < C)


@triton.jit
def _at(p, strides, b, h, n0, ALIGNED: tl.constexpr, LONG: tl.constexpr):
    return row_at((p, strides, p, strides), False, b, h, n0, False, ALIGNED, LONG)


@triton.jit
def _read(
    p, strides, b, h, n0, o_n, N, lo, D: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    x = load(_at(p, strides, b, h, n0, ALIGNED, LONG), o_n, n0 + o_n < N, origin() + lo, 0, D, ALIGNED, LONG, BLOCK_D)
    return x.to(tl.float64 if WIDE else tl.float32)


@kernel
def softmax_sequence_kernel(
    p_x, p_g, p_dx, p_stat, x_b: "i64", x_h: "i64", x_n: "i64", x_d: "i64", g_b: "i64", g_h: "i64", g_n: "i64",
    dx_b: "i64", dx_h: "i64", dx_n: "i64", B: "i32", H: "i32", N: "i32",
    D: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Softmax over the sequence: the maximum and the sum (2, B, H, D), or dx = x̄ (dx̄ - Σ_n x̄ dx̄) from dx̄ = g.

    A program owns BLOCK_D channels of one head and walks along the tokens.
    """
    BACKWARD: tl.constexpr = p_g is not None
    NUM_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    pid = tl.program_id(0)
    lo = (pid % NUM_D) * BLOCK_D
    row = pid // NUM_D
    b = row // H
    h = row % H
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_d = lo + o_d < D
    p_stat += tl.cast(row, tl.int64) * D + lo
    num_stats = tl.cast(B, tl.int64) * H * D
    x_strides = (x_b, x_h, x_n, x_d)
    if BACKWARD:
        g_strides = (g_b, g_h, g_n, tl.full([], 1, tl.int64))
        dx_strides = (dx_b, dx_h, dx_n, tl.full([], 1, tl.int64))
        dot = tl.zeros([BLOCK_D], dtype=ACC)
        for n0 in range(0, N, BLOCK_N):
            x = _read(p_x, x_strides, b, h, n0, o_n, N, lo, D, ALIGNED, LONG, WIDE, BLOCK_D)
            g = _read(p_g, g_strides, b, h, n0, o_n, N, lo, D, ALIGNED, LONG, WIDE, BLOCK_D)
            x = tl.where((n0 + o_n < N)[:, None], x, float("-inf"))  # exp(0 - top) could be inf, and inf · 0 is NaN
            dot += tl.sum(softmax_sequence(x, p_stat, num_stats, o_d[None, :], m_d[None, :], PTX) * g, axis=0)
        for n0 in range(0, N, BLOCK_N):
            x = _read(p_x, x_strides, b, h, n0, o_n, N, lo, D, ALIGNED, LONG, WIDE, BLOCK_D)
            g = _read(p_g, g_strides, b, h, n0, o_n, N, lo, D, ALIGNED, LONG, WIDE, BLOCK_D)
            dx = softmax_sequence(x, p_stat, num_stats, o_d[None, :], m_d[None, :], PTX) * (g - dot[None, :])
            out = _at(p_dx, dx_strides, b, h, n0, ALIGNED, LONG)
            store(out, dx, o_n, n0 + o_n < N, origin() + lo, 0, D, ALIGNED, LONG, BLOCK_D)
    else:
        top = tl.full([BLOCK_D], float("-inf"), dtype=ACC)
        total = tl.zeros([BLOCK_D], dtype=ACC)
        for n0 in range(0, N, BLOCK_N):
            x = _read(p_x, x_strides, b, h, n0, o_n, N, lo, D, ALIGNED, LONG, WIDE, BLOCK_D)
            x = tl.where((n0 + o_n < N)[:, None], x, float("-inf"))
            higher = tl.maximum(top, tl.max(x, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # while all is -inf
            total = total * exp(top - base, PTX) + tl.sum(exp(x - base[None, :], PTX), axis=0)
            top = higher
        tl.store(p_stat + o_d, top, mask=m_d)
        tl.store(p_stat + num_stats + o_d, total, mask=m_d)
