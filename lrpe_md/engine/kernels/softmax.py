"""Softmax over the features of a row, or over the sequence in a separate pass."""

import triton
import triton.language as tl

from .activations import exp, reciprocal
from .rows import mask_rest, scale_row, sum_row, sum_row_products
from .signature import kernel
from .tiles import load_at, point_to_row, store_at


@triton.jit
def softmax_features(x, V: tl.constexpr):
    """Compute x̄, the softmax over all channels of a row, tile by tile."""
    top = tl.max(mask_rest(x[0], 0, float("-inf"), V), axis=1)
    for i in tl.static_range(1, len(x)):
        top = tl.maximum(top, tl.max(mask_rest(x[i], i, float("-inf"), V), axis=1))
    exps = ()
    for i in tl.static_range(len(x)):
        exps += (mask_rest(exp(x[i] - top[:, None], V), i, 0.0, V),)
    return scale_row(exps, reciprocal(sum_row(exps, V=V), V)[:, None])


@triton.jit
def softmax_features_backward(x_bar, dx_bar, V: tl.constexpr):
    """Compute dx = x̄ (dx̄ - Σ x̄ dx̄), tile by tile."""
    dot = sum_row_products(x_bar, dx_bar, V=V)[:, None]
    dx = ()
    for i in tl.static_range(len(x_bar)):
        dx += (x_bar[i] * (dx_bar[i] - dot),)
    return dx


@triton.jit
def softmax_sequence(x, stat, o_d, m_d, V: tl.constexpr):
    """Compute x̄ of channels o_d (1, channels) from the stored maximum and sum over the sequence."""
    p_stat, num_stats = stat
    top = tl.load(p_stat + o_d, mask=m_d, other=0.0)
    total = tl.load(p_stat + num_stats + o_d, mask=m_d, other=1.0)
    return exp(x - top, V) * reciprocal(total, V)


@triton.jit
def _point_to_block(p, strides, place, V: tl.constexpr):
    b, h, n0 = place
    return point_to_row((p, strides, p, strides), False, b, h, n0, V)


@triton.jit
def _mask_block(m_n, o_d, V: tl.constexpr):
    """Return the mask of channels o_d (1, channels) of tokens m_n. The last block of channels may be incomplete."""
    if V.num_channels % V.block_c == 0:
        return m_n[:, None]
    else:
        return m_n[:, None] & (o_d < V.num_channels)


@triton.jit
def _load_block(p, strides, place, o_n, N, o_d, V: tl.constexpr):
    _, _, n0 = place
    x = load_at(_point_to_block(p, strides, place, V), o_n, o_d, _mask_block(n0 + o_n < N, o_d, V), V)
    return x.to(tl.float64 if V.wide else tl.float32)


@kernel
def softmax_sequence_kernel(
    p_x, p_g, p_dx, p_stat, x_strides: "strides", g_strides: "strides", dx_strides: "strides",
    B: "i32", H: "i32", N: "i32", V: tl.constexpr,
):  # fmt: skip
    """Compute the maximum and sum (2, B, H, D) over the sequence. With V.backward, compute dx instead.

    p_g points to dx̄, and dx is x̄ (dx̄ - Σ_n x̄ dx̄). A program processes V.block_c channels of one head, in a loop
    over the tokens. Strides are (b, h, n, d).
    """
    D: tl.constexpr = V.num_channels
    BLOCK_D: tl.constexpr = V.block_c
    NUM_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    ACC: tl.constexpr = tl.float64 if V.wide else tl.float32
    pid = tl.program_id(0)
    lo = (pid % NUM_D) * BLOCK_D
    row = pid // NUM_D
    b = row // H
    h = row % H
    o_n = tl.arange(0, V.block_n)
    o_d = tl.arange(0, BLOCK_D)
    m_d = lo + o_d < D
    channels = (lo + o_d)[None, :]
    p_stat += tl.cast(row, tl.int64) * D + lo
    num_stats = tl.cast(B, tl.int64) * H * D
    stat = (p_stat, num_stats)
    if V.backward:
        dot = tl.zeros([BLOCK_D], dtype=ACC)
        for n0 in range(0, N, V.block_n):
            x = _load_block(p_x, x_strides, (b, h, n0), o_n, N, channels, V=V)
            g = _load_block(p_g, g_strides, (b, h, n0), o_n, N, channels, V=V)
            x = tl.where((n0 + o_n < N)[:, None], x, float("-inf"))  # with 0, exp(0 - top) can be inf, and inf · 0 NaN
            x_bar = softmax_sequence(x, stat, o_d[None, :], m_d[None, :], V)
            dot += tl.sum(x_bar * g, axis=0)
        for n0 in range(0, N, V.block_n):
            x = _load_block(p_x, x_strides, (b, h, n0), o_n, N, channels, V=V)
            g = _load_block(p_g, g_strides, (b, h, n0), o_n, N, channels, V=V)
            dx = softmax_sequence(x, stat, o_d[None, :], m_d[None, :], V) * (g - dot[None, :])
            out = _point_to_block(p_dx, dx_strides, (b, h, n0), V=V)
            store_at(out, dx, o_n, channels, _mask_block(n0 + o_n < N, channels, V), V)
    else:
        top = tl.full([BLOCK_D], float("-inf"), dtype=ACC)
        total = tl.zeros([BLOCK_D], dtype=ACC)
        for n0 in range(0, N, V.block_n):
            x = _load_block(p_x, x_strides, (b, h, n0), o_n, N, channels, V=V)
            x = tl.where((n0 + o_n < N)[:, None], x, float("-inf"))
            new_top = tl.maximum(top, tl.max(x, axis=0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # while all x are -inf
            total = total * exp(top - base, V) + tl.sum(exp(x - base[None, :], V), axis=0)
            top = new_top
        tl.store(p_stat + o_d, top, mask=m_d)
        tl.store(p_stat + num_stats + o_d, total, mask=m_d)
