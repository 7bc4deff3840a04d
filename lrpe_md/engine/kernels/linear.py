"""Kernels for linear attention without a causal mask, forward and backward: S = Σ β k̂ vᵀ and o = q̂ S / z.

All tokens of a slot read the same state. A slot is a sample, a packed sequence or a block. These kernels also compute
the states before the pieces of tokens that linear_causal.py processes.

S is stored transposed, as Sᵀ (D_v, Ê), with one tile for each pair of a feature tile and a value tile. This way, v goes
to the matrix units exactly as it was loaded. In the one-pass variant, a program computes the state of one key head of a
sample and then the outputs of its query heads. In the two-pass variant, programs first compute the states of pieces of
the tokens. If there are several pieces, another kernel sums these states. Further programs then use the sums. Both
variants share their loops: one over keys and values for S, one over queries for o, one over queries and do for dq,
another for dS, and one over keys and values for dk and dv.

S and dS denote transposed states. Z is the sum Σ β k̄, or Σ β k̂ if V.normalizer is "encoded", and dZ is its gradient.
"""

import triton
import triton.language as tl

from .decay import fade, load_decay, locate_decay
from .encode import activate_row
from .features import (
    empty_total,
    empty_weight_sums,
    fill_rest,
    form_block_cos_sin,
    load_gate,
    load_query_side,
    load_row,
    load_side,
    load_values,
    locate_tensors,
    map_features,
    map_features_backward,
    multiply,
    normalise_tokens,
    store_token_gradients,
    store_total,
    store_values,
    store_weight_sums,
    to_operand,
    to_tiles,
    zero_gated_tokens,
)
from .reduce import launch_next_kernel, wait_for_previous_kernel
from .rows import add_rows, scale_row
from .signature import kernel, unpack_numbers
from .tiles import locate_channels, move_tokens

# --- tiles of a state ------------------------------------------------------------------------------------------


@triton.jit
def empty(ROWS: tl.constexpr, COLUMNS: tl.constexpr, V: tl.constexpr):
    """Return zeros in the accumulator's dtype."""
    return tl.zeros([ROWS, COLUMNS], dtype=tl.float64 if V.wide else tl.float32)


@triton.jit
def empty_state(V: tl.constexpr):
    """Return zero-filled tiles (D_v, features) for S, ordered by feature tile, then by value tile."""
    S = ()
    for i in tl.static_range(len(V.feature_blocks)):
        for j in tl.static_range(len(V.v_blocks)):
            S += (empty(ROWS=V.v_blocks[j], COLUMNS=V.feature_blocks[i], V=V),)
    return S


@triton.jit
def empty_sums(V: tl.constexpr):
    """Return zero-filled tiles (tokens, channels) that accumulate Z before it is summed over tokens."""
    Z = ()
    for i in tl.static_range(len(V.sum_blocks)):
        Z += (empty(ROWS=V.block_n, COLUMNS=V.sum_blocks[i], V=V),)
    return Z


@triton.jit
def add_scaled(total, x, weight):
    """Return ``total + weight * x``, with one weight per token, tile by tile."""
    result = ()
    for i in tl.static_range(len(x)):
        result += (total[i] + x[i] * weight[:, None],)
    return result


@triton.jit
def sum_tokens(Z):
    """Sum each tile, of shape (tokens, channels), over its tokens."""
    result = ()
    for i in tl.static_range(len(Z)):
        result += (tl.sum(Z[i], axis=0),)
    return result


@triton.jit
def to_rows(Z):
    """Reshape each tile from (channels) to (1, channels)."""
    result = ()
    for i in tl.static_range(len(Z)):
        result += (Z[i][None, :],)
    return result


@triton.jit
def row_dot(x, y):
    """Return the dot product of x and y for each token."""
    total = tl.sum(x[0] * y[0], axis=1)
    for i in tl.static_range(1, len(x)):
        total += tl.sum(x[i] * y[i], axis=1)
    return total


@triton.jit
def to_operands(S, V: tl.constexpr):
    result = ()
    for i in tl.static_range(len(S)):
        result += (to_operand(S[i], V=V),)
    return result


@triton.jit
def transpose_tiles(x):
    result = ()
    for i in tl.static_range(len(x)):
        result += (tl.trans(x[i]),)
    return result


# If two products share a factor, it must be the second factor of both, which is in shared memory. The first factor may
# be in registers. In Triton 3.6 on sm_90, results are wrong if two products read their first factor from the same
# registers.


@triton.jit
def multiply_tiles(values, S, V: tl.constexpr):
    """Multiply values, of shape (tokens, D_v), by S. Return one tile (tokens, features) for each feature tile."""
    VALUES: tl.constexpr = len(V.v_blocks)
    products = ()
    for i in tl.static_range(len(V.feature_blocks)):
        if V.tokens_as_n or len(S) > 1:
            product = empty(ROWS=V.feature_blocks[i], COLUMNS=V.block_n, V=V)
            for j in tl.static_range(VALUES):
                product = multiply(tl.trans(S[i * VALUES + j]), tl.trans(values[j]), product, V=V)
            products += (tl.trans(product),)
        else:
            products += (multiply(values[0], S[i], empty(ROWS=V.block_n, COLUMNS=V.feature_blocks[i], V=V), V=V),)
    return products


@triton.jit
def sum_columns(x, S, V: tl.constexpr):
    """Multiply S by xᵀ, of shape (features, tokens). Return one tile (D_v, tokens) for each value tile."""
    VALUES: tl.constexpr = len(V.v_blocks)
    sums = ()
    for j in tl.static_range(VALUES):
        total = empty(ROWS=V.v_blocks[j], COLUMNS=V.block_n, V=V)
        for i in tl.static_range(len(V.feature_blocks)):
            total = multiply(S[i * VALUES + j], tl.trans(to_operand(x[i], V=V)), total, V=V)
        sums += (total,)
    return sums


@triton.jit
def apply_state(x, S, V: tl.constexpr):
    """Multiply x, of shape (tokens, features), by Sᵀ. Return one tile (tokens, D_v) for each value tile."""
    if V.tokens_as_n or len(V.v_blocks) > 1:
        return transpose_tiles(sum_columns(x, S, V=V))
    else:
        total = empty(ROWS=V.block_n, COLUMNS=V.v_blocks[0], V=V)
        for i in tl.static_range(len(S)):
            total = multiply(to_operand(x[i], V=V), tl.trans(S[i]), total, V=V)
        return (total,)


@triton.jit
def normalizer_features(x_bar, x_hat, V: tl.constexpr):
    """Return the features that the normaliser sums: x̄ or x̂."""
    if V.normalizer == "encoded":
        return x_hat
    else:
        return x_bar


# --- a block of tokens -------------------------------------------------------------------------------------------
# The ``place`` of a block of tokens is (sample, head, n0, o_n, m_n). m_n masks out tokens n0 + o_n beyond the end.


@triton.jit
def form_keys(rows, gate, side, place, V: tl.constexpr):
    """Load a block of keys and values from their rows. Return norm(k), k̄ (without β), v, β, and cos and sin."""
    k_row, v_row = rows
    b, h, n0, o_n, m_n = place
    k = to_tiles(load_row(k_row, o_n, m_n, V=V), V=V)
    v = load_values(v_row, o_n, m_n, V=V)
    cos_sin = form_block_cos_sin(side, n0, o_n, V=V)
    beta = 0.0
    if V.gated:
        beta = load_gate(gate, b, h, n0 + o_n, m_n, V=V)
        v = zero_gated_tokens(v, beta)
        k = zero_gated_tokens(k, beta)
    k = normalise_tokens(k, side, n0, o_n, V=V)
    return k, activate_tokens(k, m_n, TOKENS=True, V=V), v, beta, cos_sin


@triton.jit
def form_queries(q_head, side, place, TOKENS: tl.constexpr, V: tl.constexpr):
    """Load a block of queries. Return norm(q) and q̄."""
    _b, _h, n0, o_n, m_n = place
    q = to_tiles(load_row(move_tokens(q_head, n0, V=V), o_n, m_n, V=V), V=V)
    q = normalise_tokens(q, side, n0, o_n, V=V)
    return q, activate_tokens(q, m_n, TOKENS=TOKENS, V=V)


@triton.jit
def activate_tokens(x, m_n, TOKENS: tl.constexpr, V: tl.constexpr):
    """Compute x̄ from the result of :func:`normalise_tokens`, with zeros as in :func:`fill_rest`."""
    normed, _ = x
    return fill_rest(activate_row(normed, (0, 0), V=V), m_n, TOKENS=TOKENS, V=V)


@triton.jit
def gate_keys(k_bar, weight, V: tl.constexpr):
    """Multiply k̄ by β, or by another weight of each token that includes β."""
    if V.gated:
        return scale_row(k_bar, weight[:, None])
    else:
        return k_bar


@triton.jit
def sum_keys(k, v, gates, side, walk, V: tl.constexpr):
    """Compute S and Z for tokens [begin, end) of one head.

    ``k`` and ``v`` are (pointer, strides), ``gates`` is (β, log g or None), and ``walk`` is (sample, head, begin, end).
    """
    gate, decay = gates
    b, h, begin, end = walk
    if decay is not None:
        decay = locate_decay(decay, b, h, V=V)
    o_n = tl.arange(0, V.block_n)
    k_head, v_head = locate_tensors((k, v), b, h, V=V)
    S = empty_state(V=V)
    Z = empty_sums(V=V)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        place = (b, h, n0, o_n, n0 + o_n < end)
        rows = (move_tokens(k_head, n0, V=V), move_tokens(v_head, n0, V=V))
        _k, k_bar, v_block, beta, cos_sin = form_keys(rows, gate, side, place, V=V)
        if decay is None:
            k_bar = gate_keys(k_bar, beta, V=V)
        else:
            _L, logs_to_end, total = load_decay(decay, place, end, V=V)
            weight = fade(logs_to_end, V=V)
            if V.gated:
                weight *= beta
            k_bar = scale_row(k_bar, weight[:, None])
        k_hat = map_features(k_bar, cos_sin, V=V)
        if decay is not None:
            factor = fade(total, V=V)
            S = scale_row(S, factor)
        S = add_outer_products(S, v_block, k_hat, V=V)
        if V.normalizer != "none":
            if decay is not None:
                Z = scale_row(Z, factor)
            Z = add_rows(Z, normalizer_features(k_bar, k_hat, V=V))
    return S, sum_tokens(Z)


@triton.jit
def invert_denominator(z, eps, V: tl.constexpr):
    """Return 1/z for each token, and the mask of tokens whose z is not clamped."""
    eps = tl.full(z.shape, eps, z.dtype)  # tl.maximum would treat a number as float32
    if V.normalizer == "encoded":
        is_free = tl.abs(z) >= eps
        return tl.where(is_free, invert(tl.where(is_free, z, 1.0), V=V), 0.0), is_free
    else:
        return invert(tl.maximum(z, eps), V=V), z > eps


@triton.jit
def invert(z, V: tl.constexpr):
    """Return 1/z. With V.operand "same", it is correctly rounded."""
    if V.operand == "same" and not V.wide:
        return tl.div_rn(tl.full(z.shape, 1.0, z.dtype), z)
    else:
        return 1.0 / z


@triton.jit
def write_outputs(q, o, side, S, Z, walk, eps, V: tl.constexpr):
    """Compute and store o for tokens [begin, end) of one head, given S (as operands) and Z."""
    b, h, begin, end = walk
    o_n = tl.arange(0, V.block_n)
    q_head, o_head = locate_tensors((q, o), b, h, V=V)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        _x, x_bar = form_queries(q_head, side, (b, h, n0, o_n, m_n), TOKENS=False, V=V)
        cos_sin = form_block_cos_sin(side, n0, o_n, V=V)
        # If tokens are columns of the product, 1/z has the layout of q, not of o. So q̂ is scaled or, because the map
        # is linear, q̄.
        if V.normalizer == "unrotated":
            scale, _is_free = invert_denominator(row_dot(x_bar, to_rows(Z)), eps, V=V)
            if V.tokens_as_n:
                x_bar = scale_row(x_bar, scale[:, None])
        x_hat = map_features(x_bar, cos_sin, V=V)
        if V.normalizer == "encoded":
            scale, _is_free = invert_denominator(row_dot(x_hat, to_rows(Z)), eps, V=V)
            if V.tokens_as_n:
                x_hat = scale_row(x_hat, scale[:, None])
        out = apply_state(x_hat, S, V=V)
        if V.normalizer != "none" and not V.tokens_as_n:
            out = scale_row(out, scale[:, None])
        store_values(move_tokens(o_head, n0, V=V), out, o_n, m_n, V=V)


# --- states in memory ----------------------------------------------------------------------------------------------


@triton.jit
def find_features(i: tl.constexpr, COUNTS: tl.constexpr, V: tl.constexpr):
    """Return the channel indices (1, channels) of tile i of k̂, and their mask.

    With COUNTS, the tile belongs to the normaliser's features.
    """
    if V.normalizer == "encoded" or not COUNTS:
        o_e = tl.arange(0, V.feature_blocks[i])[None, :]
        return V.feature_begins[i] + o_e, o_e < V.feature_widths[i]
    else:
        return locate_channels(i=i, V=V)


@triton.jit
def point_to_state(p, i: tl.constexpr, V: tl.constexpr):
    """Return the pointers to tile i of S, and their mask."""
    E: tl.constexpr = i // len(V.v_blocks)
    J: tl.constexpr = i % len(V.v_blocks)
    o_e = tl.arange(0, V.feature_blocks[E])[None, :]
    o_v = tl.arange(0, V.v_blocks[J])[:, None]
    mask = (o_v < V.v_widths[J]) & (o_e < V.feature_widths[E])
    return p + (V.v_begins[J] + o_v) * V.num_features + V.feature_begins[E] + o_e, mask


@triton.jit
def store_state(p_state, p_sums, S, Z, V: tl.constexpr):
    for i in tl.static_range(len(S)):
        p, mask = point_to_state(p_state, i=i, V=V)
        tl.store(p, S[i], mask=mask)
    for i in tl.static_range(len(Z)):
        o_e, m_e = find_features(i=i, COUNTS=True, V=V)
        tl.store(p_sums + o_e, Z[i][None, :], mask=m_e)


@triton.jit
def load_state(p_state, V: tl.constexpr):
    """Load S as operands."""
    S = ()
    for i in tl.static_range(len(V.feature_blocks) * len(V.v_blocks)):
        p, mask = point_to_state(p_state, i=i, V=V)
        S += (to_operand(tl.load(p, mask=mask, other=0.0), V=V),)
    return S


@triton.jit
def load_sums(p_sums, V: tl.constexpr):
    """Load Z."""
    Z = ()
    for i in tl.static_range(len(V.sum_blocks)):
        o_e, m_e = find_features(i=i, COUNTS=True, V=V)
        Z += (tl.sum(tl.load(p_sums + o_e, mask=m_e, other=0.0), axis=0),)
    return Z


# --- gradients -----------------------------------------------------------------------------------------------------


@triton.jit
def write_query_gradients(tensors, side, state, grads, walk, eps, V: tl.constexpr):
    """Compute and store dq for tokens [begin, end) of one head. Return ``grads`` plus the sums over these tokens.

    ``tensors`` is (q, do, dq), and ``state`` is (S, Z) with S as operands. ``grads`` is (tiles of dZ, sums for dω, sums
    for the norm's weights).
    """
    q, do, dq = tensors
    S, Z = state
    dZ, total, dweights = grads
    sums = (total, dweights)
    b, h, begin, end = walk
    o_n = tl.arange(0, V.block_n)
    q_head, do_head, dq_head = locate_tensors((q, do, dq), b, h, V=V)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        x = to_tiles(load_row(move_tokens(q_head, n0, V=V), o_n, m_n, V=V), V=V)
        x = normalise_tokens(x, side, n0, o_n, V=V)
        do_block = to_operands(load_values(move_tokens(do_head, n0, V=V), o_n, m_n, V=V), V=V)
        cos_sin = form_block_cos_sin(side, n0, o_n, V=V)
        x_bar = activate_tokens(x, m_n, TOKENS=False, V=V)
        dx_hat = multiply_tiles(do_block, S, V=V)  # before the division by z
        dx_bar, dangles = map_features_backward(x_bar, dx_hat, cos_sin, V=V)
        if V.normalizer != "none":
            counts = map_features(x_bar, cos_sin, V=V) if V.normalizer == "encoded" else x_bar
            scale, is_free = invert_denominator(row_dot(counts, to_rows(Z)), eps, V=V)
            dz = tl.where(is_free, -scale * scale * row_dot(x_bar, dx_bar), 0.0)
            dZ = add_scaled(dZ, counts, dz)
            if V.normalizer == "encoded":
                dx_hat = add_scaled(scale_row(dx_hat, scale[:, None]), to_rows(Z), dz)
                dx_bar, dangles = map_features_backward(x_bar, dx_hat, cos_sin, V=V)
            else:
                dx_bar = add_scaled(scale_row(dx_bar, scale[:, None]), to_rows(Z), dz)
                if V.need_dangles:
                    dangles = scale_row(dangles, scale[:, None])
        tokens = (x, x_bar, cos_sin)
        sums = store_token_gradients(dq_head, tokens, (dx_bar, dangles), sums, side, (n0, o_n, m_n), V=V)
    return dZ, sums[0], sums[1]


@triton.jit
def store_key_gradients(head, tokens, grads, sums, side, place, weight, V: tl.constexpr):
    """Store dk of a block of tokens, like :func:`store_token_gradients`, after multiplying its gradients by β.

    ``weight`` is β, or 0 for tokens beyond the end.
    """
    dx_bar, dangles = grads
    if V.gated:
        dx_bar = scale_row(dx_bar, weight[:, None])
        if V.need_dangles:
            dangles = scale_row(dangles, weight[:, None])
    _b, _h, n0, o_n, m_n = place
    return store_token_gradients(head, tokens, (dx_bar, dangles), sums, side, (n0, o_n, m_n), V=V)


@triton.jit
def sum_queries(tensors, side, Z, grads, walk, eps, V: tl.constexpr):
    """Add the sum of q̂ doᵀ / z over tokens [begin, end) of one head to dS.

    With a causal mask, also add the sum of dz q̂ (or dz q̄) to dZ. ``grads`` is (dS, dZ), and ``tensors`` is
    (q, do, scales, decay). With a causal mask, ``scales`` is the result of :func:`point_to_scales`. ``decay`` is None
    or (log g, key head).
    """
    q, do, scales, decay = tensors
    dS, dZ = grads
    b, h, begin, end = walk
    o_n = tl.arange(0, V.block_n)
    q_head, do_head = locate_tensors((q, do), b, h, V=V)
    if decay is not None:
        logs, g = decay
        logs = locate_decay(logs, b, g, V=V)
        logs_before = tl.sum(tl.zeros([2], dtype=tl.float64 if V.operand == "same" else tl.float32))
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        x = to_tiles(load_row(move_tokens(q_head, n0, V=V), o_n, m_n, V=V), V=V)
        x = normalise_tokens(x, side, n0, o_n, V=V)
        do_block = load_values(move_tokens(do_head, n0, V=V), o_n, m_n, V=V)
        x_bar = activate_tokens(x, m_n, TOKENS=False, V=V)
        cos_sin = form_block_cos_sin(side, n0, o_n, V=V)
        if decay is not None:
            L, _logs_to_end, log_total = load_decay(logs, (b, g, n0, o_n, m_n), end, V=V)
            weight = fade(logs_before + L, V=V)
            logs_before += log_total
        if V.normalizer != "none":
            counts = map_features(x_bar, cos_sin, V=V) if V.normalizer == "encoded" else x_bar
            if V.causal:
                p_scale, to_dz = scales
                scale = tl.load(p_scale + n0 + o_n, mask=m_n, other=0.0)
                dz = tl.load(p_scale + to_dz + n0 + o_n, mask=m_n, other=0.0)
                dZ = add_scaled(dZ, counts, dz if decay is None else dz * weight)
            else:
                scale, _is_free = invert_denominator(row_dot(counts, to_rows(Z)), eps, V=V)
            weight = scale if decay is None else weight * scale
        if V.normalizer != "none" or decay is not None:
            x_bar = scale_row(x_bar, weight[:, None])
        dS = add_outer_products(dS, do_block, map_features(x_bar, cos_sin, V=V), V=V)
    return dS, dZ


@triton.jit
def add_outer_products(S, values, features, V: tl.constexpr):
    """Return S + valuesᵀ @ features, tile by tile."""
    values = to_operands(values, V=V)
    new_S = ()
    for i in tl.static_range(len(features)):
        for j in tl.static_range(len(values)):
            new_S += (_add_outer_product(S[i * len(values) + j], values[j], features[i], i=i, j=j, V=V),)
    return new_S


@triton.jit
def _add_outer_product(S, values, features, i: tl.constexpr, j: tl.constexpr, V: tl.constexpr):
    """Implement :func:`add_outer_products` for feature tile i and value tile j.

    Products with 64 rows or more must not share their first factor. The comment above multiply_tiles explains why.
    """
    LAST: tl.constexpr = V.num_map_tiles - 1
    FEW_VALUES: tl.constexpr = j > 0 and V.v_blocks[j] < 64
    FEW_FEATURES: tl.constexpr = i == LAST and i > 0 and V.feature_blocks[i] < 64
    if len(V.feature_blocks) * len(V.v_blocks) > 1 and not FEW_VALUES and not FEW_FEATURES:
        return tl.trans(multiply(tl.trans(to_operand(features, V=V)), values, tl.trans(S), V=V))
    else:
        return multiply(tl.trans(values), to_operand(features, V=V), S, V=V)


@triton.jit
def write_key_gradients(tensors, gates, side, state, walk, V: tl.constexpr):
    """Compute and store dk, dv and dβ for tokens [begin, end) of one head.

    Return the sums for dω and the sums for the norm's weights. ``tensors`` is (k, v, dk, dv), ``gates`` is (β, dβ), and
    ``state`` is (dS, dZ) with dS as operands.
    """
    sums = (empty_total(V=V), empty_weight_sums(V=V))
    gate, dgate = gates
    dS, dZ = state
    b, h, begin, end = walk
    o_n = tl.arange(0, V.block_n)
    k_head, v_head, dk_head, dv_head = locate_tensors(tensors, b, h, V=V)
    ACC: tl.constexpr = tl.float64 if V.wide else tl.float32
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        place = (b, h, n0, o_n, m_n)
        rows = (move_tokens(k_head, n0, V=V), move_tokens(v_head, n0, V=V))
        x, x_bar, v_block, beta, cos_sin = form_keys(rows, gate, side, place, V=V)
        weight = m_n.to(ACC)  # 0 for tokens beyond the end
        if V.gated:
            weight *= beta
        dx_hat = multiply_tiles(to_operands(v_block, V=V), dS, V=V)
        weighted_x = gate_keys(x_bar, weight, V=V)
        dv_row = move_tokens(dv_head, n0, V=V)
        store_values(dv_row, apply_state(map_features(weighted_x, cos_sin, V=V), dS, V=V), o_n, m_n, V=V)
        if V.normalizer == "encoded":
            dx_hat = add_scaled(dx_hat, to_rows(dZ), m_n.to(ACC))
        dx_bar, dangles = map_features_backward(x_bar, dx_hat, cos_sin, V=V)
        if V.normalizer == "unrotated":
            dx_bar = add_scaled(dx_bar, to_rows(dZ), m_n.to(ACC))
        if V.need_dgate:
            store_gate(dgate, row_dot(x_bar, dx_bar), beta, place)
        tokens = (x, x_bar, cos_sin)
        sums = store_key_gradients(dk_head, tokens, (dx_bar, dangles), sums, side, place, weight, V=V)
    return sums


@triton.jit
def store_gate(dgate, dbeta, beta, place):
    """Store dβ for a block of tokens, with zeros where β is 0."""
    b, h, n0, o_n, m_n = place
    p, strides = dgate
    stride_b, stride_h, stride_n = unpack_numbers(strides)
    p += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    dbeta = tl.where(beta == 0.0, 0.0, dbeta)
    tl.store(p + (n0 + o_n).to(tl.int64) * stride_n, dbeta.to(p.dtype.element_ty), mask=m_n)


# --- kernels in one pass ---------------------------------------------------------------------------------------------


@kernel
def linear_forward_kernel(q, k, v, o, gate, q_side, k_side, sizes: "sizes", eps: "fp32", V: tl.constexpr):
    """Compute o in one pass, with one program for each key head of a sample.

    The shapes are q (B, H, N, D), k (B, G, M, D), v (B, G, M, D_v), gate (B, G, M) and o (B, H, N, D_v). Each tensor is
    passed as (pointer, strides), and ``sizes`` is (G, H / G, N, M).
    """
    G, R, N, M = unpack_numbers(sizes)
    pid = tl.program_id(0)
    b = pid // G
    g = pid - b * G
    k_head_tables = load_side(k_side, b, g, g, V=V)
    S, Z = sum_keys(k, v, (gate, None), (k_side, k_head_tables), (b, g, 0, M), V=V)
    S = to_operands(S, V=V)
    Q: tl.constexpr = V if V.queries is None else V.queries
    tables, _ = load_query_side(q_side, k_head_tables, b, g, g, V=Q)
    for r in range(R):
        h = g * R + r
        side = (q_side, (tables, h))
        write_outputs(q, o, side, S, Z, (b, h, 0, N), eps, V=Q)


@kernel
def linear_backward_kernel(tensors, gates, sides, p_partial, sizes: "sizes", eps: "fp32", V: tl.constexpr):
    """Compute dq, dk, dv, dβ and partial sums for dω in one pass.

    ``tensors`` is (q, k, v, do, dq, dk, dv). The partial sums have shape (2, B, G, J, C): first those of the queries,
    then those of the keys. The sums for the norm's weights have one row for each head of q (or of k) in each sample.
    """
    q, k, v, do, dq, dk, dv = tensors
    G, R, N, M = unpack_numbers(sizes)
    q_side, k_side = sides
    gate, _dgate = gates
    pid = tl.program_id(0)
    b = pid // G
    g = pid - b * G
    k_head_tables = load_side(k_side, b, g, g, V=V)
    k_side = (k_side, k_head_tables)
    S, Z = sum_keys(k, v, (gate, None), k_side, (b, g, 0, M), V=V)
    S = to_operands(S, V=V)
    Q: tl.constexpr = V if V.queries is None else V.queries
    grads = (empty_sums(V=Q), empty_total(V=Q))
    tables, _ = load_query_side(q_side, k_head_tables, b, g, g, V=Q)
    batch = tl.num_programs(0) // G
    for r in range(R):
        h = g * R + r
        side = (q_side, (tables, h))
        dZ, total = grads
        head_grads = (dZ, total, empty_weight_sums(V=Q))
        dZ, total, dweights = write_query_gradients((q, do, dq), side, (S, Z), head_grads, (b, h, 0, N), eps, V=Q)
        store_weight_sums(side, h * batch + b, dweights, V=Q)
        grads = (dZ, total)
    dZ, total = grads
    store_total(p_partial, pid, total, V=V)
    dS = empty_state(V=V)
    for r in range(R):
        h = g * R + r
        side = (q_side, (tables, h))
        dS, _dZ = sum_queries((q, do, None, None), side, Z, (dS, ()), (b, h, 0, N), eps, V=Q)
    state = (to_operands(dS, V=V), sum_tokens(dZ))
    total, dweights = write_key_gradients((k, v, dk, dv), gates, k_side, state, (b, g, 0, M), V=V)
    store_weight_sums(k_side, g * batch + b, dweights, V=V)
    store_total(p_partial, tl.num_programs(0) + pid, total, V=V)


# --- kernels in two passes -------------------------------------------------------------------------------------------


@triton.jit
def locate_piece(pieces, p, heads):
    """Return the piece, sample, head, begin, end and slot of program p.

    ``pieces`` is (table, (tokens per piece, N)). The table has P rows of begin, end, slot and sequence. The table is
    None if all pieces have the same length. ``heads`` is (heads per sample, P).
    """
    p_table, sizes = pieces
    length, N = unpack_numbers(sizes)
    H, P = heads
    # Neighbouring programs process the pieces of a head.
    row = p // P
    piece = p - row * P
    b = row // H
    h = row - b * H
    if p_table is None:
        begin = piece * length
        end = tl.minimum(begin + length, N)
        slot = 0
    else:
        begin = tl.load(p_table + piece * 4)
        end = tl.load(p_table + piece * 4 + 1)
        slot = tl.load(p_table + piece * 4 + 2)
    return piece, b, h, begin, end, slot


@triton.jit
def point_to_piece(states, piece, row, rows, V: tl.constexpr):
    """Return pointers to S and Z of a piece.

    ``states`` is a pair of a buffer (P, rows, D_v Ê + sums) and None. If there is only one piece, ``states`` may
    instead be the slot that its tokens see: S (rows, D_v Ê) and Z (rows, sums).
    """
    p_states, p_sums = states
    if p_sums is None:
        p_state = p_states + (tl.cast(piece, tl.int64) * rows + row) * V.state_size
        return p_state, p_state + V.v_dim * V.num_features
    else:
        row = tl.cast(row, tl.int64)
        return p_states + row * (V.v_dim * V.num_features), p_sums + row * V.num_sums


@kernel
def linear_state_kernel(k, v, gate, side, states, pieces: "sizes", sizes: "sizes", V: tl.constexpr):
    """Compute the state of each piece of the tokens. For ``states``, see :func:`point_to_piece`."""
    G, P, B = unpack_numbers(sizes)
    piece, b, g, begin, end, _ = locate_piece(pieces, tl.program_id(0), (G, P))
    S, Z = sum_keys(k, v, (gate, None), (side, load_side(side, b, g, g, V=V)), (b, g, begin, end), V=V)
    p_state, p_sums = point_to_piece(states, piece, b * G + g, B * G, V=V)
    store_state(p_state, p_sums, S, Z, V=V)


@kernel
def linear_decay_state_kernel(k, v, gates, side, p_states, pieces: "sizes", sizes: "sizes", V: tl.constexpr):
    """Compute the states (P, B G, D_v Ê + sums) at the end of each piece of the tokens. ``gates`` is (β, log g)."""
    G, P, B = unpack_numbers(sizes)
    piece, b, g, begin, end, _ = locate_piece(pieces, tl.program_id(0), (G, P))
    S, Z = sum_keys(k, v, gates, (side, load_side(side, b, g, g, V=V)), (b, g, begin, end), V=V)
    p_state, p_sums = point_to_piece((p_states, None), piece, b * G + g, B * G, V=V)
    store_state(p_state, p_sums, S, Z, V=V)


@kernel
def linear_output_kernel(q, o, side, slots, pieces: "sizes", sizes: "sizes", eps: "fp32", V: tl.constexpr):
    """Compute o from the state of each slot."""
    G, R, P, B = unpack_numbers(sizes)
    _, b, h, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G * R, P))
    g = h // R
    S, Z = load_slot(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    write_outputs(q, o, (side, load_side(side, b, g, h, V=V)), S, Z, (b, h, begin, end), eps, V=V)


@triton.jit
def load_slot(slots, row, V: tl.constexpr):
    """Load S, as operands, and Z of a slot."""
    p_slots, p_slot_sums = slots
    return load_state(p_slots + row * (V.v_dim * V.num_features), V=V), load_sums(p_slot_sums + row * V.num_sums, V=V)


@kernel
def linear_query_gradient_kernel(
    q, do, dq, side, slots, dstates, p_partial, pieces: "sizes", sizes: "sizes", eps: "fp32", V: tl.constexpr
):  # fmt: skip
    """Compute dq, the sums for dω, and dZ for each piece and query head.

    ``dstates`` has a row for each query head (see :func:`point_to_piece`), of which this kernel writes only dZ.
    """
    if V.early:
        launch_next_kernel()
    G, R, P, B = unpack_numbers(sizes)
    piece, b, h, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G * R, P))
    g = h // R
    state = load_slot(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    grads = (empty_sums(V=V), empty_total(V=V), empty_weight_sums(V=V))
    side = (side, load_side(side, b, g, h, V=V))
    dZ, total, dweights = write_query_gradients((q, do, dq), side, state, grads, (b, h, begin, end), eps, V=V)
    store_weight_sums(side, (h * B + b) * P + piece, dweights, V=V)
    p_dstate, p_dsums = point_to_piece(dstates, piece, b * G * R + h, B * G * R, V=V)
    store_state(p_dstate, p_dsums, (), sum_tokens(dZ), V=V)
    store_total(p_partial, (tl.cast(piece, tl.int64) * R + (h - g * R)) * B * G + b * G + g, total, V=V)


@triton.jit
def point_to_scales(p_scales, b, h, heads, N):
    """Return a pointer to a head's 1/z, and the offset from 1/z to dz. The scales have shape (2, B, H, N)."""
    batch, num_heads = heads
    return p_scales + (tl.cast(b, tl.int64) * num_heads + h) * N, tl.cast(batch, tl.int64) * num_heads * N


@kernel
def linear_query_state_kernel(
    q, do, side, slots, p_scales, dstates, pieces: "sizes", sizes: "sizes", eps: "fp32", V: tl.constexpr
):  # fmt: skip
    """Compute dS for each piece and query head. With a causal mask, also compute dZ, using 1/z and dz from p_scales.

    ``dstates`` has a row for each query head (see :func:`point_to_piece`). If V.early is set, this kernel may run at
    the same time as linear_query_gradient_kernel.
    """
    _p_slots, p_slot_sums = slots
    G, R, P, B = unpack_numbers(sizes)
    piece, b, h, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G * R, P))
    g = h // R
    side = (side, load_side(side, b, g, h, V=V))
    N = unpack_numbers(pieces[1])[1]
    if V.causal:
        scales = point_to_scales(p_scales, b, h, (B, G * R), N)
        Z = ()
        dZ = empty_sums(V=V)
    else:
        scales = ()
        Z = load_sums(p_slot_sums + (tl.cast(slot, tl.int64) * B * G + b * G + g) * V.num_sums, V=V)
        dZ = ()
    dS, dZ = sum_queries((q, do, scales, None), side, Z, (empty_state(V=V), dZ), (b, h, begin, end), eps, V=V)
    p_dstate, p_dsums = point_to_piece(dstates, piece, b * G * R + h, B * G * R, V=V)
    store_state(p_dstate, p_dsums, dS, sum_tokens(dZ), V=V)
    if V.early:
        wait_for_previous_kernel()  # the next kernel also reads dZ from linear_query_gradient_kernel


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
    N = unpack_numbers(pieces[1])[1]
    tensors = (q, do, point_to_scales(p_scales, b, h, (B, G * R), N), (decay, g))
    grads = (empty_state(V=V), empty_sums(V=V))
    dS, dZ = sum_queries(tensors, side, (), grads, (b, h, begin, end), 0.0, V=V)
    p_dstate, p_dsums = point_to_piece((p_dstates, None), piece, b * G * R + h, B * G * R, V=V)
    store_state(p_dstate, p_dsums, dS, sum_tokens(dZ), V=V)


@kernel
def linear_key_gradient_kernel(
    k, v, dk, dv, gates, side, slots, p_partial, pieces: "sizes", sizes: "sizes", V: tl.constexpr
):  # fmt: skip
    """Compute dk, dv, dβ and the sums for dω from the summed gradients of the state."""
    G, P, B = unpack_numbers(sizes)
    piece, b, g, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G, P))
    state = load_slot(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    side = (side, load_side(side, b, g, g, V=V))
    total, dweights = write_key_gradients((k, v, dk, dv), gates, side, state, (b, g, begin, end), V=V)
    store_weight_sums(side, (g * B + b) * P + piece, dweights, V=V)
    store_total(p_partial, tl.cast(piece, tl.int64) * B * G + b * G + g, total, V=V)


@triton.jit
def sum_pieces(p_states, row, rows, counts, o, V: tl.constexpr):
    """Sum elements o of a row's states over all heads and pieces. Load V.stages pieces at once.

    ``counts`` is (heads, pieces).
    """
    R, P = counts
    SIZE: tl.constexpr = V.state_size
    BLOCK: tl.constexpr = V.block_c
    AT_ONCE: tl.constexpr = V.stages
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for r in range(R):
        for first in range(0, P, AT_ONCE):
            pieces = first + tl.arange(0, AT_ONCE)
            index = (pieces.to(tl.int64) * rows + row) * R + r
            mask = (pieces < P)[:, None] & (o < SIZE)[None, :]
            tile = tl.load(p_states + index[:, None] * SIZE + o[None, :], mask=mask, other=0.0)
            total += tl.sum(tile.to(tl.float64), axis=0)
    return total


@triton.jit
def scan_slots(p_states, slots, ends, p_table, sizes, place, V: tl.constexpr):
    """Implement :func:`linear_scan_kernel` for a table of pieces. ``place`` is (row, element offsets)."""
    p_slots, p_slot_sums = slots
    p_first, p_last = ends
    G, R, P, num_states, B, backward = sizes
    row, o = place
    SIZE: tl.constexpr = V.state_size
    BLOCK: tl.constexpr = V.block_c
    b = row // G
    g = row - b * G
    rows = tl.cast(B * G, tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    previous_sequence = -2
    previous_slot = -2
    num_missing = tl.where(backward != 0, P - num_states, 0)
    for i in range(P):
        p = tl.where(backward != 0, P - 1 - i, i)
        next_piece = tl.where(backward != 0, p - 1, p + 1)
        has_next = (next_piece >= 0) & (next_piece < P)
        slot = tl.load(p_table + p * 4 + 2)
        sequence = tl.load(p_table + p * 4 + 3)
        next_slot = tl.load(p_table + next_piece * 4 + 2, mask=has_next, other=-2)
        next_sequence = tl.load(p_table + next_piece * 4 + 3, mask=has_next, other=-2)
        state_row = tl.cast(b + sequence, tl.int64) * G + g  # a sample may hold several sequences
        if previous_sequence != sequence:
            total = tl.zeros([BLOCK], dtype=tl.float64)
            if p_first is not None:
                total += tl.load(p_first + state_row * SIZE + o, mask=o < tl.where(sequence >= 0, SIZE, 0), other=0.0)
        previous_sequence = sequence
        if V.causal:
            if (previous_slot != slot) & (sequence >= 0):  # unused rows of the table have a negative sequence
                store_slot(p_slots, p_slot_sums, total, slot * rows + row, o, V=V)
        previous_slot = tl.where(sequence >= 0, slot, -2)
        state = p - num_missing
        mask = o < tl.where((state >= 0) & (state < num_states), SIZE, 0)
        for r in range(R):
            index = (tl.cast(state, tl.int64) * rows + row) * R + r
            total += tl.load(p_states + index * SIZE + o, mask=mask, other=0.0)
        if not V.causal:
            if next_slot != slot:
                store_slot(p_slots, p_slot_sums, total, slot * rows + row, o, V=V)
        if p_last is not None:
            if next_sequence != sequence:
                tl.store(p_last + state_row * SIZE + o, total, mask=o < tl.where(sequence >= 0, SIZE, 0))


@kernel
def linear_scan_kernel(p_states, slots, ends, p_table, sizes: "sizes", V: tl.constexpr):
    """Sum the states of pieces to obtain the state that the tokens of each slot see.

    The sum runs over the pieces of a sequence up to the slot's last piece. With V.causal, it ends before the slot's
    first piece. A backward scan sums in reverse order. Sums are float64 until they are stored.

    Args:
        p_states: states (P or fewer, B G R, size) of the first pieces or, in a backward scan, of the last pieces. The
            sum also runs over R heads.
        slots: the outputs S (slots, B G, D_v Ê), in the operands' dtype, and Z (slots, B G, sums).
        ends: initial and final states (B or sequences, G, size), or None.
        p_table: the table of :func:`locate_piece`, or None if all tokens form one slot of one sequence.
    """
    p_slots, p_slot_sums = slots
    p_first, p_last = ends
    G, R, P, num_states, B, backward = unpack_numbers(sizes)
    SIZE: tl.constexpr = V.state_size
    BLOCK: tl.constexpr = V.block_c
    NUM: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // NUM
    o = tl.program_id(0) % NUM * BLOCK + tl.arange(0, BLOCK)
    if p_table is None:
        state_row = tl.cast(row, tl.int64)
        total = sum_pieces(p_states, row, tl.cast(B * G, tl.int64), (R, P), o, V=V)
        if p_first is not None:
            total += tl.load(p_first + state_row * SIZE + o, mask=o < SIZE, other=0.0)
        store_slot(p_slots, p_slot_sums, total, state_row, o, V=V)
        if p_last is not None:
            tl.store(p_last + state_row * SIZE + o, total, mask=o < SIZE)
    else:
        scan_slots(p_states, slots, ends, p_table, (G, R, P, num_states, B, backward), (row, o), V=V)


@triton.jit
def store_slot(p_slots, p_slot_sums, total, row, o, V: tl.constexpr):
    STATE: tl.constexpr = V.v_dim * V.num_features
    tl.store(p_slots + row * STATE + o, total.to(p_slots.dtype.element_ty), mask=o < STATE)
    if V.num_sums > 0:
        tl.store(p_slot_sums + row * V.num_sums + o - STATE, total, mask=(o >= STATE) & (o < V.state_size))
