"""Decay from token to token for linear attention with a causal mask: S_n = g_n S_{n−1} + β_n k̂_n v_nᵀ.

Within a block of tokens, the weight of a key for a query is the product of the decays after the key, up to and
including the query's own decay. The weight of the state before the block is the product of the block's decays up to and
including the query's own. When a key is added to the state, its weight is the product of the decays after the key, up
to the end of the block. Products are computed as exponentials of sums of log g, or of log₂ g if operands are rounded,
because exp2 is a single instruction. Names are the same as in linear.py. In addition, L is the running sum of log g in
a block.
"""

import triton
import triton.language as tl

from .features import (
    fill_rest,
    form_block_cos_sin,
    load_gate,
    load_row,
    load_side,
    load_values,
    locate_tensor,
    map_features,
    normalise_tokens,
    to_tiles,
)
from .linear import (
    activate_tokens,
    add_outer_products,
    add_scaled,
    empty_state,
    empty_sums,
    find_state,
    form_keys,
    locate_piece,
    normalizer_features,
    point_to_scales,
    store_state,
    sum_tokens,
)
from .rows import add_rows, scale_row
from .signature import kernel, unpack_numbers
from .tiles import move_tokens


@triton.jit
def locate_decay(decay, b, h, V: tl.constexpr):
    """Load log g of a head if all of its tokens share it.

    Otherwise, return ``decay`` (a pointer and strides) unchanged.
    """
    if V.decay_per_head:
        p, strides = decay
        stride_b, stride_h, _ = unpack_numbers(strides)
        return convert_logs(tl.load(p + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h), V=V)
    elif V.memory == "add":
        return decay
    else:
        return 0


@triton.jit
def convert_logs(logs, V: tl.constexpr):
    """Convert log g to the dtype and base in which it is summed.

    Differences of L lose precision if decays are strong, so L is float64 unless operands are rounded anyway.
    """
    if V.operand == "same":
        return logs.to(tl.float64)
    else:
        LOG2_E: tl.constexpr = 1.4426950408889634
        return logs.to(tl.float32) * LOG2_E


@triton.jit
def load_decay(decay, place, end, V: tl.constexpr):
    """Return three sums of log g in a block: up to each token (L), after each token, and over the whole block.

    ``decay`` is the result of :func:`locate_decay`, and ``end`` is the end of the piece.
    """
    b, h, n0, o_n, m_n = place
    if V.decay_per_head:
        count = tl.minimum(end - n0, V.block_n)
        # This must depend on the block, as ``count`` does. Otherwise, the loop would keep all of fade_pairs in
        # registers.
        tokens = tl.minimum(o_n + 1, count)
        return tokens * decay, (count - tokens) * decay, count * decay
    else:
        logs = convert_logs(load_gate(decay, b, h, n0 + o_n, m_n, V=V), V=V)
        total = tl.sum(logs, axis=0)
        return tl.cumsum(logs, axis=0), tl.cumsum(logs, axis=0, reverse=True) - logs, total


@triton.jit
def fade(logs, V: tl.constexpr):
    """Convert sums of log g to products of g, in the compute dtype."""
    if V.operand == "same":
        return tl.exp(logs.to(tl.float64 if V.wide else tl.float32))
    else:
        return tl.exp2(logs)


@triton.jit
def fade_pairs(L, V: tl.constexpr):
    """Return the decay from each key (column) to each query (row) of a block, or 0 for later keys."""
    o_n = tl.arange(0, V.block_n)
    return fade(tl.where(o_n[:, None] >= o_n[None, :], L[:, None] - L[None, :], float("-inf")), V=V)


@triton.jit
def fade_pairs_transposed(L, V: tl.constexpr):
    """Return the transpose of :func:`fade_pairs`, with keys as rows and queries as columns."""
    o_n = tl.arange(0, V.block_n)
    return fade(tl.where(o_n[:, None] <= o_n[None, :], L[None, :] - L[:, None], float("-inf")), V=V)


@triton.jit
def sum_crossing(products, V: tl.constexpr):
    """For each token, sum the products of earlier keys (columns) with the queries (rows) at or after the token."""
    o_n = tl.arange(0, V.block_n)
    if V.operand == "same":
        products = products.to(tl.float64)
    sums_before = tl.cumsum(products, axis=1) - products
    return tl.sum(tl.where(o_n[:, None] >= o_n[None, :], sums_before, 0.0), axis=0)


@triton.jit
def sum_decaying_keys(k, v, gates, side, walk, V: tl.constexpr):
    """Compute S and Z after tokens [begin, end) of one head, including the decay."""
    gate, decay = gates
    b, h, begin, end = walk
    decay = locate_decay(decay, b, h, V=V)
    o_n = tl.arange(0, V.block_n)
    k_head = locate_tensor(k, b, h, V=V)
    v_head = locate_tensor(v, b, h, V=V)
    S = empty_state(V=V)
    Z = empty_sums(V=V)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        k_row = move_tokens(k_head, n0, V=V)
        v_row = move_tokens(v_head, n0, V=V)
        place = (b, h, n0, o_n, m_n)
        _k, k_bar, v_block, beta, cos_sin = form_keys(k_row, v_row, gate, side, place, V=V)
        _L, logs_to_end, total = load_decay(decay, place, end, V=V)
        weight = fade(logs_to_end, V=V)
        if V.gated:
            weight *= beta
        k_bar = scale_row(k_bar, weight[:, None])
        k_hat = map_features(k_bar, cos_sin, V=V)
        factor = fade(total, V=V)
        S = add_outer_products(scale_row(S, factor), v_block, k_hat, V=V)
        if V.normalizer != "none":
            Z = add_rows(scale_row(Z, factor), normalizer_features(k_bar, k_hat, V=V))
    return S, sum_tokens(Z)


@kernel
def linear_decay_state_kernel(k, v, gates, side, p_states, pieces: "sizes", sizes: "sizes", V: tl.constexpr):
    """Compute the states (P, B G, D_v Ê + sums) at the end of each piece of the tokens. ``gates`` is (β, log g)."""
    G, P, B = unpack_numbers(sizes)
    piece, b, g, begin, end, _ = locate_piece(pieces, tl.program_id(0), (G, P))
    S, Z = sum_decaying_keys(k, v, gates, (side, load_side(side, b, g, g, V=V)), (b, g, begin, end), V=V)
    p_state = find_state(p_states, piece, b * G + g, B * G, V=V)
    store_state(p_state, p_state + V.v_dim * V.num_features, S, Z, V=V)


@kernel
def linear_decay_query_state_kernel(
    q, do, decay, side, p_scales, p_dstates, pieces: "sizes", sizes: "sizes", V: tl.constexpr
):  # fmt: skip
    """Compute the contribution of each piece to dS and dZ before the piece, for each query head.

    The layout of p_scales is described in :func:`point_to_scales`.
    """
    G, R, P, B = unpack_numbers(sizes)
    piece, b, h, begin, end, _ = locate_piece(pieces, tl.program_id(0), (G * R, P))
    g = h // R
    side = (side, load_side(side, b, g, h, V=V))
    _table, numbers = pieces
    _length, N = unpack_numbers(numbers)
    p_scale, to_dz = point_to_scales(p_scales, b, h, (B, G * R), N)
    o_n = tl.arange(0, V.block_n)
    q_head = locate_tensor(q, b, h, V=V)
    do_head = locate_tensor(do, b, h, V=V)
    dS = empty_state(V=V)
    dZ = empty_sums(V=V)
    decay = locate_decay(decay, b, g, V=V)
    logs_before = tl.sum(tl.zeros([2], dtype=tl.float64 if V.operand == "same" else tl.float32))
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        x = to_tiles(load_row(move_tokens(q_head, n0, V=V), o_n, m_n, V=V), V=V)
        x = normalise_tokens(x, side, n0, o_n, V=V)
        do_block = load_values(move_tokens(do_head, n0, V=V), o_n, m_n, V=V)
        x_bar = fill_rest(activate_tokens(x, V=V), m_n, TOKENS=False, V=V)
        cos_sin = form_block_cos_sin(side, n0, o_n, V=V)
        L, _logs_to_end, total = load_decay(decay, (b, g, n0, o_n, m_n), end, V=V)
        weight = fade(logs_before + L, V=V)
        logs_before += total
        if V.normalizer != "none":
            counts = map_features(x_bar, cos_sin, V=V) if V.normalizer == "encoded" else x_bar
            scale = tl.load(p_scale + n0 + o_n, mask=m_n, other=0.0)
            dz = tl.load(p_scale + to_dz + n0 + o_n, mask=m_n, other=0.0)
            dZ = add_scaled(dZ, counts, dz * weight)
            weight *= scale
        dS = add_outer_products(dS, do_block, map_features(scale_row(x_bar, weight[:, None]), cos_sin, V=V), V=V)
    p_dstate = find_state(p_dstates, piece, b * G * R + h, B * G * R, V=V)
    store_state(p_dstate, p_dstate + V.v_dim * V.num_features, dS, sum_tokens(dZ), V=V)
