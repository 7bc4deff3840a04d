"""Kernels for linear attention with a causal mask, forward and backward.

A program loops over the tokens of its piece in blocks, and keeps the state of all earlier tokens in registers. Within a
block, it multiplies queries by keys directly, as softmax attention does. The kernels in linear.py compute the state
before each piece. If V.memory is "add", the state decays from token to token (see decay.py), and masks include the
decay between two tokens.

Names are the same as in linear.py. In addition, P is a matrix of products (tokens, tokens).
"""

import triton
import triton.language as tl

from .decay import causal_mask, fade, fade_pairs, load_decay, locate_decay, sum_crossing
from .features import (
    empty_total,
    empty_weight_sums,
    form_block_cos_sin,
    load_query_side,
    load_side,
    load_values,
    locate_tensor,
    locate_tensors,
    map_features,
    map_features_backward,
    multiply,
    store_token_gradients,
    store_total,
    store_values,
    store_weight_sums,
    to_operand,
)
from .linear import (
    add_outer_products,
    add_scaled,
    apply_state,
    empty,
    empty_state,
    empty_sums,
    form_keys,
    form_queries,
    gate_keys,
    invert_denominator,
    load_slot,
    locate_piece,
    multiply_tiles,
    normalizer_features,
    point_to_scales,
    row_dot,
    store_gate,
    store_key_gradients,
    sum_columns,
    sum_tokens,
    to_operands,
    transpose_tiles,
)
from .rows import add_rows, scale_row
from .signature import kernel, unpack_numbers
from .tiles import move_tokens


@triton.jit
def multiply_tokens(x, y, V: tl.constexpr):
    """Return x yᵀ, of shape (tokens, tokens), summed over the tiles."""
    products = empty(ROWS=V.block_n, COLUMNS=V.block_n, V=V)
    for i in tl.static_range(len(x)):
        products = multiply(to_operand(x[i], V=V), tl.trans(to_operand(y[i], V=V)), products, V=V)
    return products


@triton.jit
def mix_tokens(P, y, total, V: tl.constexpr):
    """Return total + P y, of shape (tokens, channels), tile by tile."""
    P = to_operand(P, V=V)
    sums = ()
    for i in tl.static_range(len(y)):
        y_i = to_operand(y[i], V=V)
        if len(y) > 1:  # see multiply_tiles
            sums += (tl.trans(multiply(tl.trans(y_i), tl.trans(P), tl.trans(total[i]), V=V)),)
        else:
            sums += (multiply(P, y_i, total[i], V=V),)
    return sums


@triton.jit
def mask_pairs(products, block_decay, V: tl.constexpr, KEYS_FIRST: tl.constexpr = False):
    """Apply the causal mask, including any decay, to a block's products of queries and keys.

    For KEYS_FIRST, see :func:`causal_mask`.
    """
    if V.memory == "add":
        return products * fade_pairs(block_decay[0], V=V, KEYS_FIRST=KEYS_FIRST)
    else:
        return tl.where(causal_mask(V=V, KEYS_FIRST=KEYS_FIRST), products, 0.0)


@triton.jit
def fade_from_start(x, block_decay, V: tl.constexpr, COLUMNS: tl.constexpr = False):
    """Multiply x by the decay from the start of the block to each token, tile by tile.

    x has shape (tokens, channels) or, with COLUMNS, (channels, tokens).
    """
    if V.memory == "add":
        factor = fade(block_decay[0], V=V)
        return scale_row(x, factor[None, :] if COLUMNS else factor[:, None])
    else:
        return x


@triton.jit
def fade_to_end(x, block_decay, V: tl.constexpr, COLUMNS: tl.constexpr = False):
    """Multiply x by the decay from each token to the end of the block, like :func:`fade_from_start`."""
    if V.memory == "add":
        return fade_from_start(x, block_decay[1:], V=V, COLUMNS=COLUMNS)
    else:
        return x


@triton.jit
def fade_state(S, block_decay, V: tl.constexpr):
    """Multiply S by the decay of the whole block."""
    if V.memory == "add":
        return scale_row(S, fade(block_decay[2], V=V))
    else:
        return S


@triton.jit
def broadcast_sums(Z, like):
    """Broadcast Z to all tokens, tile by tile."""
    result = ()
    for i in tl.static_range(len(Z)):
        result += (tl.broadcast_to(Z[i][None, :], [like[i].shape[0], like[i].shape[1]]),)
    return result


@triton.jit
def sum_normalizer(counts, Z, block_decay, V: tl.constexpr):
    """Return Z (tokens, channels) at each token: the sum over the token and all earlier tokens, including any decay."""
    if V.memory == "add":
        sums = mix_exactly(fade_pairs(block_decay[0], V=V), counts, V=V)
        return add_rows(sums, fade_from_start(broadcast_sums(Z, counts), block_decay, V=V))
    else:
        sums = mix_exactly(causal_mask(V=V).to(tl.float64 if V.wide else tl.float32), counts, V=V)
        result = ()
        for i in tl.static_range(len(sums)):
            result += (sums[i] + Z[i][None, :],)
        return result


@triton.jit
def form_denominator(q_counts, k_counts, Z, block_decay, V: tl.constexpr):
    """Compute z of each query from the query's products with Z and with the keys of its block."""
    if V.normalizer == "encoded" and V.operand != "same":  # features cancel
        return row_dot(q_counts, sum_normalizer(k_counts, Z, block_decay, V=V))
    else:
        before = row_dot(q_counts, broadcast_sums(Z, q_counts))
        if V.memory == "add":
            before = before * fade(block_decay[0], V=V)
        return before + tl.sum(mask_pairs(multiply_tokens(q_counts, k_counts, V=V), block_decay, V=V), axis=1)


@triton.jit
def mix_exactly(pairs, counts, V: tl.constexpr):
    """Multiply pairs, of shape (tokens, tokens), by counts.

    Encoded features partly cancel in z, which would amplify rounding errors. So the errors from rounding these features
    to operands are added back. With a decay, the errors from rounding either factor are added back.
    """
    sums = ()
    for i in tl.static_range(len(counts)):
        sums += (empty(ROWS=V.block_n, COLUMNS=counts[i].shape[1], V=V),)
    if V.operand != "same" and (V.memory == "add" or V.normalizer == "encoded"):
        remainders = ()
        for i in tl.static_range(len(counts)):
            remainders += (counts[i] - to_operand(counts[i], V=V).to(tl.float32),)
        sums = mix_tokens(pairs, remainders, sums, V=V)
        if V.memory == "add":
            sums = mix_tokens(pairs - to_operand(pairs, V=V).to(tl.float32), counts, sums, V=V)
    return mix_tokens(pairs, counts, sums, V=V)


@triton.jit
def map_queries(q_head, side, k_cos_sin, place, V: tl.constexpr):
    """Return norm(q), q̄, q̂, and cos and sin of a block of tokens. With V.one_side, q uses k's cos and sin."""
    x, x_bar = form_queries(q_head, side, place, TOKENS=True, V=V)
    _b, _h, n0, o_n, _m_n = place
    cos_sin = k_cos_sin
    if not V.one_side:
        cos_sin = form_block_cos_sin(side, n0, o_n, V=V)
    return x, x_bar, map_features(x_bar, cos_sin, V=V), cos_sin


@triton.jit
def load_state_before(slots, row, V: tl.constexpr):
    """Load S and Z of the tokens before a piece, or return zeros if V.has_state is False."""
    if V.has_state:
        S, Z = load_slot(slots, row, V=V)
        return add_rows(empty_state(V=V), S), Z
    else:
        return empty_state(V=V), sum_tokens(empty_sums(V=V))


@triton.jit
def attend_block(q_hat, k_hat, v_block, S, block_decay, V: tl.constexpr):
    """Return the outputs of a block before division by z, one tile for each value tile.

    Each token attends to S, to the earlier tokens of its block, and to itself.
    """
    S = to_operands(S, V=V)
    if V.output_transposed:  # tokens are columns throughout, so no accumulator changes its layout
        products = mask_pairs(multiply_tokens(k_hat, q_hat, V=V), block_decay, V=V, KEYS_FIRST=True)
        values = tl.trans(v_block[0])
        values_before = fade_from_start(sum_columns(q_hat, S, V=V), block_decay, V=V, COLUMNS=True)
        return (tl.trans(multiply(values, to_operand(products, V=V), values_before[0], V=V)),)
    else:
        products = mask_pairs(multiply_tokens(q_hat, k_hat, V=V), block_decay, V=V)
        if V.raw:  # q̂ is in shared memory
            values_before = fade_from_start(apply_state(q_hat, S, V=V), block_decay, V=V)
        else:
            values_before = transpose_tiles(fade_from_start(sum_columns(q_hat, S, V=V), block_decay, V=V, COLUMNS=True))
        products = to_operand(products, V=V)
        out = ()
        for i in tl.static_range(len(v_block)):
            out += (multiply(products, v_block[i], values_before[i], V=V),)
        return out


# --- a normaliser in separate kernels -------------------------------------------------------------------------------


@triton.jit
def point_to_sums(p_sums, place, sizes, i: tl.constexpr, V: tl.constexpr):
    """Return the pointers to tile i of a block's running sums (B, H_k, N, padded channels). ``sizes`` is (H_k, N)."""
    b, g, n0, o_n, _m_n = place
    G, N = sizes
    WIDTH: tl.constexpr = V.sum_begins[len(V.sum_blocks)]
    o_c = V.sum_begins[i] + tl.arange(0, V.sum_blocks[i])
    return p_sums + (tl.cast(b * G + g, tl.int64) * N + n0) * WIDTH + o_n[:, None] * WIDTH + o_c[None, :]


@triton.jit
def load_running_sums(p_sums, place, sizes, V: tl.constexpr):
    """Load the running sums of a block, tile by tile."""
    sums = ()
    for i in tl.static_range(len(V.sum_blocks)):
        tile = tl.load(point_to_sums(p_sums, place, sizes, i=i, V=V), mask=place[4][:, None], other=0.0)
        sums += (tile.to(tl.float64 if V.wide else tl.float32),)
    return sums


@triton.jit
def store_running_sums(p_sums, sums, place, sizes, V: tl.constexpr):
    for i in tl.static_range(len(V.sum_blocks)):
        tl.store(point_to_sums(p_sums, place, sizes, i=i, V=V), sums[i], mask=place[4][:, None])


@triton.jit
def load_denominators(p_z, b, h, n, m_n, heads, N):
    """Load z of tokens n of a head. ``heads`` and N are passed to :func:`point_to_scales`."""
    p_z_head, _to_dz = point_to_scales(p_z, b, h, heads, N)
    return tl.load(p_z_head + n, mask=m_n, other=0.0)


@kernel
def linear_causal_normalizer_kernel(
    tensors, gate, sides, slots, p_z, p_sums, pieces: "sizes", sizes: "sizes", V: tl.constexpr
):  # fmt: skip
    """Store z of each query (B, H_q, N) and, in the backward pass, Z at each token.

    One program handles a piece of a key head's tokens. ``tensors`` is (q, k, v), but v is not read.
    """
    q, k, v = tensors
    q_side, k_side = sides
    G, R, P, B = unpack_numbers(sizes)
    N = unpack_numbers(pieces[1])[1]
    _piece, b, g, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G, P))
    _S, Z = load_state_before(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    k_side = (k_side, load_side(k_side, b, g, g, V=V))
    q_tables, _ = load_query_side(q_side, k_side[1], b, g, g, V=V)
    o_n = tl.arange(0, V.block_n)
    k_head, v_head = locate_tensors((k, v), b, g, V=V)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        place = (b, g, n0, o_n, m_n)
        rows = (move_tokens(k_head, n0, V=V), move_tokens(v_head, n0, V=V))
        _k, k_bar, _v, beta, _cos_sin = form_keys(rows, gate, k_side, place, V=V)
        k_bar = gate_keys(k_bar, beta, V=V)
        Z_of_tokens = sum_normalizer(k_bar, Z, (), V=V)
        if V.backward:
            store_running_sums(p_sums, Z_of_tokens, place, (G, N), V=V)
        Z = add_rows(Z, sum_tokens(k_bar))
        for r in range(R):
            h = g * R + r
            q_head = locate_tensor(q, b, h, V=V)
            _x, q_bar = form_queries(q_head, (q_side, (q_tables, h)), (b, h, n0, o_n, m_n), TOKENS=True, V=V)
            z = row_dot(q_bar, Z_of_tokens)
            tl.store(p_z + (tl.cast(b, tl.int64) * G * R + h) * N + n0 + o_n, z, mask=m_n)


@kernel
def linear_causal_normalizer_gradient_kernel(
    q, side, slots, p_scales, p_sums, pieces: "sizes", sizes: "sizes", V: tl.constexpr
):  # fmt: skip
    """Store dZ at each token: the sum of dz q̄ over the queries at and after the token. p_scales contains dz."""
    G, R, P, B = unpack_numbers(sizes)
    N = unpack_numbers(pieces[1])[1]
    _piece, b, g, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G, P))
    _dS, dZ = load_state_before(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    tables, _ = load_side(side, b, g, g, V=V)
    o_n = tl.arange(0, V.block_n)
    blocks = tl.cdiv(end - begin, V.block_n)
    for i in tl.range(0, blocks, num_stages=V.stages):
        n0 = begin + (blocks - 1 - i) * V.block_n
        m_n = n0 + o_n < end
        sums = broadcast_sums(dZ, empty_sums(V=V))
        for r in range(R):
            h = g * R + r
            q_head = locate_tensor(q, b, h, V=V)
            _x, q_bar = form_queries(q_head, (side, (tables, h)), (b, h, n0, o_n, m_n), TOKENS=True, V=V)
            p_scale, to_dz = point_to_scales(p_scales, b, h, (B, G * R), N)
            counts = scale_row(q_bar, tl.load(p_scale + to_dz + n0 + o_n, mask=m_n, other=0.0)[:, None])
            sums = mix_tokens(causal_mask(V=V, KEYS_FIRST=True).to(counts[0].dtype), counts, sums, V=V)
            dZ = add_rows(dZ, sum_tokens(counts))
        store_running_sums(p_sums, sums, (b, g, n0, o_n, m_n), (G, N), V=V)


# --- outputs and gradients ------------------------------------------------------------------------------------------


@kernel
def linear_causal_forward_kernel(
    q, k, v, o, gates, sides, slots, p_z, pieces: "sizes", sizes: "sizes", eps: "fp32", V: tl.constexpr
):  # fmt: skip
    """Compute o, with one program for each piece of a query head's tokens. ``gates`` is (β, log g).

    With V.has_normalizer_kernels, p_z is the output of :func:`linear_causal_normalizer_kernel`.
    """
    gate, decay = gates
    q_side, k_side = sides
    G, R, P, B = unpack_numbers(sizes)
    N = unpack_numbers(pieces[1])[1]
    _piece, b, h, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G * R, P))
    g = h // R
    S, Z = load_state_before(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    k_side = (k_side, load_side(k_side, b, g, g, V=V))
    q_side = (q_side, load_query_side(q_side, k_side[1], b, g, h, V=V))
    decay = locate_decay(decay, b, g, V=V)
    o_n = tl.arange(0, V.block_n)
    q_head = locate_tensor(q, b, h, V=V)
    k_head, v_head = locate_tensors((k, v), b, g, V=V)
    o_head = locate_tensor(o, b, h, V=V)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        place = (b, g, n0, o_n, m_n)
        rows = (move_tokens(k_head, n0, V=V), move_tokens(v_head, n0, V=V))
        block_decay = load_decay(decay, place, end, V=V)
        _k, k_bar, v_block, beta, k_cos_sin = form_keys(rows, gate, k_side, place, V=V)
        k_bar = gate_keys(k_bar, beta, V=V)
        k_hat = map_features(k_bar, k_cos_sin, V=V)
        _x, q_bar, q_hat, _q_cos_sin = map_queries(q_head, q_side, k_cos_sin, (b, h, n0, o_n, m_n), V=V)
        if V.has_normalizer_kernels:
            z = load_denominators(p_z, b, h, n0 + o_n, m_n, (B, G * R), N)
            scale, _is_free = invert_denominator(z, eps, V=V)
        elif V.normalizer != "none":  # computed before the outputs occupy registers
            k_counts = normalizer_features(k_bar, k_hat, V=V)
            q_counts = normalizer_features(q_bar, q_hat, V=V)
            scale, _is_free = invert_denominator(form_denominator(q_counts, k_counts, Z, block_decay, V=V), eps, V=V)
            Z = add_rows(fade_state(Z, block_decay, V=V), sum_tokens(fade_to_end(k_counts, block_decay, V=V)))
        v_block = to_operands(v_block, V=V)
        out = attend_block(q_hat, k_hat, v_block, S, block_decay, V=V)
        if V.normalizer != "none":
            out = scale_row(out, scale[:, None])
        S = add_outer_products(fade_state(S, block_decay, V=V), v_block, fade_to_end(k_hat, block_decay, V=V), V=V)
        store_values(move_tokens(o_head, n0, V=V), out, o_n, m_n, V=V)


@kernel
def linear_causal_query_kernel(
    tensors, gates, sides, slots, sums, p_scales, p_partial, pieces: "sizes", sizes: "sizes", eps: "fp32",
    V: tl.constexpr,
):  # fmt: skip
    """Compute dq. Also compute 1/z and dz of each query for the kernels that differentiate the state and the keys.

    ``tensors`` is (q, k, v, do, dq), and ``gates`` is (β, log g). With V.has_normalizer_kernels, ``sums`` holds z and Z
    at each token, from :func:`linear_causal_normalizer_kernel`. p_scales has shape (2, B, H, N) and receives 1/z and
    dz. With V.need_ddecay, its shape is (4, B, H, N), and it also receives two sums: the part of q̂ · dq̂ that comes
    from the state before the block, and the result of :func:`sum_crossing`.
    """
    gate, decay = gates
    q, k, v, do, dq = tensors
    q_side, k_side = sides
    G, R, P, B = unpack_numbers(sizes)
    N = unpack_numbers(pieces[1])[1]
    piece, b, h, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G * R, P))
    g = h // R
    S, Z = load_state_before(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    k_side = (k_side, load_side(k_side, b, g, g, V=V))
    q_side = (q_side, load_query_side(q_side, k_side[1], b, g, h, V=V))
    program_sums = (empty_total(V=V), empty_weight_sums(V=V))
    decay = locate_decay(decay, b, g, V=V)
    o_n = tl.arange(0, V.block_n)
    q_head = locate_tensor(q, b, h, V=V)
    k_head, v_head = locate_tensors((k, v), b, g, V=V)
    do_head, dq_head = locate_tensors((do, dq), b, h, V=V)
    p_scale, to_dz = point_to_scales(p_scales, b, h, (B, G * R), N)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        place = (b, g, n0, o_n, m_n)
        rows = (move_tokens(k_head, n0, V=V), move_tokens(v_head, n0, V=V))
        block_decay = load_decay(decay, place, end, V=V)
        _k, k_bar, v_block, beta, k_cos_sin = form_keys(rows, gate, k_side, place, V=V)
        k_bar = gate_keys(k_bar, beta, V=V)
        k_hat = map_features(k_bar, k_cos_sin, V=V)
        v_block = to_operands(v_block, V=V)
        x, q_bar, q_hat, cos_sin = map_queries(q_head, q_side, k_cos_sin, (b, h, n0, o_n, m_n), V=V)
        do_block = to_operands(load_values(move_tokens(do_head, n0, V=V), o_n, m_n, V=V), V=V)
        products = mask_pairs(multiply_tokens(do_block, v_block, V=V), block_decay, V=V)
        dx_hat = fade_from_start(multiply_tiles(do_block, to_operands(S, V=V), V=V), block_decay, V=V)  # without 1/z
        if V.need_ddecay:
            from_state = row_dot(q_hat, dx_hat)
            crossing = products * multiply_tokens(q_hat, k_hat, V=V)
        dx_hat = mix_tokens(products, k_hat, dx_hat, V=V)
        dx_bar, dangles = map_features_backward(q_bar, dx_hat, cos_sin, V=V)
        if V.normalizer != "none":
            q_counts = normalizer_features(q_bar, q_hat, V=V)
            k_counts = normalizer_features(k_bar, k_hat, V=V)
            if V.has_normalizer_kernels:
                z = load_denominators(sums[0], b, h, n0 + o_n, m_n, (B, G * R), N)
                Z_of_tokens = load_running_sums(sums[1], place, (G, N), V=V)
            else:
                Z_of_tokens = sum_normalizer(k_counts, Z, block_decay, V=V)
                z = row_dot(q_counts, Z_of_tokens)
            scale, is_free = invert_denominator(z, eps, V=V)
            dz = tl.where(is_free, -scale * scale * row_dot(q_bar, dx_bar), 0.0)
            tl.store(p_scale + n0 + o_n, scale, mask=m_n)
            tl.store(p_scale + to_dz + n0 + o_n, dz, mask=m_n)
            if V.normalizer == "encoded":
                dx_hat = add_scaled(scale_row(dx_hat, scale[:, None]), Z_of_tokens, dz)
                dx_bar, dangles = map_features_backward(q_bar, dx_hat, cos_sin, V=V)
            else:
                dx_bar = add_scaled(scale_row(dx_bar, scale[:, None]), Z_of_tokens, dz)
                if V.need_dangles:
                    dangles = scale_row(dangles, scale[:, None])
            if V.need_ddecay:
                Z_before = fade_from_start(broadcast_sums(Z, q_counts), block_decay, V=V)
                from_state = from_state * scale + dz * row_dot(q_counts, Z_before)
                count_products = mask_pairs(multiply_tokens(q_counts, k_counts, V=V), block_decay, V=V)
                crossing = crossing * scale[:, None] + count_products * dz[:, None]
            if not V.has_normalizer_kernels:
                Z = add_rows(fade_state(Z, block_decay, V=V), sum_tokens(fade_to_end(k_counts, block_decay, V=V)))
        if V.need_ddecay:
            tl.store(p_scale + 2 * to_dz + n0 + o_n, from_state, mask=m_n)
            tl.store(p_scale + 3 * to_dz + n0 + o_n, sum_crossing(crossing, V=V), mask=m_n)
        program_sums = store_token_gradients(
            dq_head, (x, q_bar, cos_sin), (dx_bar, dangles), program_sums, q_side, (n0, o_n, m_n), V=V
        )
        S = add_outer_products(fade_state(S, block_decay, V=V), v_block, fade_to_end(k_hat, block_decay, V=V), V=V)
    store_weight_sums(q_side, (h * B + b) * P + piece, program_sums[1], V=V)
    store_total(p_partial, (tl.cast(piece, tl.int64) * R + (h - g * R)) * B * G + b * G + g, program_sums[0], V=V)


@triton.jit
def load_queries(tensors, side, k_cos_sin, scales, place, V: tl.constexpr):
    """Return q̂ / z, the normaliser's features times dz, and do of tokens n0 + o_n of a head.

    ``scales`` is (p_scales, heads, N), the arguments of :func:`point_to_scales`.
    """
    q, do = tensors
    p_scales, heads, N = scales
    b, h, n0, o_n, m_n = place
    q_head, do_head = locate_tensors((q, do), b, h, V=V)
    _k, q_bar, q_hat, _q_cos_sin = map_queries(q_head, side, k_cos_sin, (b, h, n0, o_n, m_n), V=V)
    do_block = to_operands(load_values(move_tokens(do_head, n0, V=V), o_n, m_n, V=V), V=V)
    q_counts = ()
    if V.normalizer != "none":
        p_scale, to_dz = point_to_scales(p_scales, b, h, heads, N)
        scale = tl.load(p_scale + n0 + o_n, mask=m_n, other=0.0)
        if not V.has_normalizer_kernels:
            dz = tl.load(p_scale + to_dz + n0 + o_n, mask=m_n, other=0.0)
            q_counts = scale_row(normalizer_features(q_bar, q_hat, V=V), dz[:, None])
        q_hat = scale_row(q_hat, scale[:, None])
    return q_hat, q_counts, do_block


@triton.jit
def store_key_products(p_products, keys, grads, place, sizes, V: tl.constexpr):
    """Store the dot product of each key with its gradient from later blocks if V.need_ddecay is set.

    The output has shape (B, G, N), and ``keys`` is (β k̂, β k̄).
    """
    if V.need_ddecay:
        k_hat, k_bar = keys
        dx_hat, dcounts = grads
        b, g, n0, o_n, m_n = place
        G, N = sizes
        products = row_dot(k_hat, dx_hat)
        if V.normalizer != "none":
            products += row_dot(normalizer_features(k_bar, k_hat, V=V), dcounts)
        tl.store(p_products + (tl.cast(b, tl.int64) * G + g) * N + n0 + o_n, products, mask=m_n)


@triton.jit
def begin_values(k_hat, dS, block_decay, V: tl.constexpr):
    """Return the contribution of later blocks to dv, as tiles (tokens, D_v) or, with V.single_layout, (D_v, tokens)."""
    if V.single_layout:
        return fade_to_end(sum_columns(k_hat, dS, V=V), block_decay, V=V, COLUMNS=True)
    else:
        return fade_to_end(apply_state(k_hat, dS, V=V), block_decay, V=V)


@triton.jit
def add_to_values(dv_block, k_hat, queries, block_decay, V: tl.constexpr):
    """Add the contribution of queries in the same block to dv."""
    q_hat, _, do_block = queries
    if V.single_layout:
        weights = mask_pairs(multiply_tokens(q_hat, k_hat, V=V), block_decay, V=V)
        return (multiply(tl.trans(do_block[0]), to_operand(weights, V=V), dv_block[0], V=V),)
    else:
        weights = mask_pairs(multiply_tokens(k_hat, q_hat, V=V), block_decay, V=V, KEYS_FIRST=True)
        weights = to_operand(weights, V=V)
        new_dv = ()
        for i in tl.static_range(len(do_block)):
            new_dv += (multiply(weights, do_block[i], dv_block[i], V=V),)
        return new_dv


@triton.jit
def add_to_keys(grads, v_block, queries, block_decay, V: tl.constexpr):
    """Add the contribution of queries in the same block to dk̂ and to the gradient through the normaliser."""
    dx_hat, dcounts = grads
    q_hat, q_counts, do_block = queries
    products = mask_pairs(multiply_tokens(v_block, do_block, V=V), block_decay, V=V, KEYS_FIRST=True)
    if V.normalizer != "none" and not V.has_normalizer_kernels:
        if V.memory == "add":
            pairs = fade_pairs(block_decay[0], V=V, KEYS_FIRST=True)
            dcounts = add_rows(dcounts, mix_exactly(pairs, q_counts, V=V))
        else:
            dcounts = mix_tokens(causal_mask(V=V, KEYS_FIRST=True).to(products.dtype), q_counts, dcounts, V=V)
    return mix_tokens(products, q_hat, dx_hat, V=V), dcounts


@triton.jit
def add_to_state(grads, queries, block_decay, V: tl.constexpr):
    """Add the contribution of a block of queries to dS and dZ. The keys of earlier blocks need these gradients."""
    dS, dZ = grads
    q_hat, q_counts, do_block = queries
    if V.normalizer != "none" and not V.has_normalizer_kernels:
        dZ = add_rows(dZ, sum_tokens(fade_from_start(q_counts, block_decay, V=V)))
    return add_outer_products(dS, do_block, fade_from_start(q_hat, block_decay, V=V), V=V), dZ


@kernel
def linear_causal_key_kernel(
    tensors, gates, sides, slots, p_sums, p_scales, p_partial, pieces: "sizes", sizes: "sizes", V: tl.constexpr
):  # fmt: skip
    """Compute dk, dv and dβ in a loop from the last token to the first.

    ``tensors`` is (q, k, v, do, dk, dv), and ``gates`` is (β, dβ, log g, products). With V.need_ddecay,
    :func:`store_key_products` writes to products (B, G, N). With V.has_normalizer_kernels, p_sums is the output of
    :func:`linear_causal_normalizer_gradient_kernel`.
    """
    q, k, v, do, dk, dv = tensors
    gate, dgate, decay, products_of_keys = gates
    q_side, k_side = sides
    G, R, P, B = unpack_numbers(sizes)
    N = unpack_numbers(pieces[1])[1]
    piece, b, g, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G, P))
    dS, dZ = load_state_before(slots, tl.cast(slot, tl.int64) * B * G + b * G + g, V=V)
    k_side = (k_side, load_side(k_side, b, g, g, V=V))
    q_head_tables = load_query_side(q_side, k_side[1], b, g, g, V=V)
    q_tables, _ = q_head_tables
    sums = (empty_total(V=V), empty_weight_sums(V=V))
    decay = locate_decay(decay, b, g, V=V)
    o_n = tl.arange(0, V.block_n)
    k_head, v_head, dk_head, dv_head = locate_tensors((k, v, dk, dv), b, g, V=V)
    blocks = tl.cdiv(end - begin, V.block_n)
    for i in tl.range(0, blocks, num_stages=V.stages):
        n0 = begin + (blocks - 1 - i) * V.block_n
        m_n = n0 + o_n < end
        place = (b, g, n0, o_n, m_n)
        rows = (move_tokens(k_head, n0, V=V), move_tokens(v_head, n0, V=V))
        block_decay = load_decay(decay, place, end, V=V)
        x, x_bar, v_block, beta, cos_sin = form_keys(rows, gate, k_side, place, V=V)
        k_bar = gate_keys(x_bar, beta, V=V)
        k_hat = map_features(k_bar, cos_sin, V=V)
        keys = (k_hat, k_bar)
        v_block = to_operands(v_block, V=V)
        operands = to_operands(dS, V=V)
        scales = (p_scales, (B, G * R), N)
        dv_row = move_tokens(dv_head, n0, V=V)
        dcounts = fade_to_end(broadcast_sums(dZ, normalizer_features(x_bar, k_hat, V=V)), block_decay, V=V)
        dS, dZ = fade_state(dS, block_decay, V=V), fade_state(dZ, block_decay, V=V)
        if V.has_no_gqa:  # finish dv before starting dk
            queries = load_queries((q, do), (q_side, q_head_tables), cos_sin, scales, place, V=V)
            dv_block = add_to_values(begin_values(k_hat, operands, block_decay, V=V), k_hat, queries, block_decay, V=V)
            dv_block = transpose_tiles(dv_block) if V.single_layout else dv_block
            store_values(dv_row, dv_block, o_n, m_n, V=V)
            dx_hat = fade_to_end(multiply_tiles(v_block, operands, V=V), block_decay, V=V)
            store_key_products(products_of_keys, keys, (dx_hat, dcounts), place, (G, N), V=V)
            dx_hat, dcounts = add_to_keys((dx_hat, dcounts), v_block, queries, block_decay, V=V)
            dS, dZ = add_to_state((dS, dZ), queries, block_decay, V=V)
        else:
            dx_hat = fade_to_end(multiply_tiles(v_block, operands, V=V), block_decay, V=V)
            store_key_products(products_of_keys, keys, (dx_hat, dcounts), place, (G, N), V=V)
            dv_block = begin_values(k_hat, operands, block_decay, V=V)
            for r in range(R):
                h = g * R + r
                queries = load_queries((q, do), (q_side, (q_tables, h)), cos_sin, scales, (b, h, n0, o_n, m_n), V=V)
                dv_block = add_to_values(dv_block, k_hat, queries, block_decay, V=V)
                dx_hat, dcounts = add_to_keys((dx_hat, dcounts), v_block, queries, block_decay, V=V)
                dS, dZ = add_to_state((dS, dZ), queries, block_decay, V=V)
            dv_block = transpose_tiles(dv_block) if V.single_layout else dv_block
            store_values(dv_row, dv_block, o_n, m_n, V=V)
        if V.normalizer == "encoded":
            dx_hat = add_rows(dx_hat, dcounts)
        dx_bar, dangles = map_features_backward(x_bar, dx_hat, cos_sin, V=V)
        if V.normalizer == "unrotated":
            if V.has_normalizer_kernels:
                dcounts = load_running_sums(p_sums, place, (G, N), V=V)
            dx_bar = add_rows(dx_bar, dcounts)
        if V.need_dweight and V.has_bias:  # dcounts is not 0 for tokens beyond the end
            dx_bar = scale_row(dx_bar, m_n.to(dx_bar[0].dtype)[:, None])
        if V.need_dgate:
            store_gate(dgate, row_dot(x_bar, dx_bar), beta, place)
        tokens = (x, x_bar, cos_sin)
        sums = store_key_gradients(dk_head, tokens, (dx_bar, dangles), sums, k_side, place, beta, V=V)
    store_weight_sums(k_side, (g * B + b) * P + piece, sums[1], V=V)
    store_total(p_partial, tl.cast(piece, tl.int64) * B * G + b * G + g, sums[0], V=V)
