"""Compute q̂ and k̂ of linear attention from q and k, forward and backward, on tiles (tokens, channels) in registers.

The features of a row are a tuple of tiles. The output of the map comes first, with both halves interleaved. The
channels that the map leaves unchanged follow as x̄ (see encode.py). Some widths that are not powers of two are split
into several tiles, both for the map and for v. Without a map, neighbouring channels still form pairs (not rotated),
because sums over the channels of a single tile might involve all warps.

A "side" (q or k) has two parts. The first part consists of the frequencies, positions and tables for its tokens. q and
k often share the first part. The second part is the norm: None, or γ, β, partial sums for their gradients, and the grid
indices of the tokens.
"""

import triton
import triton.language as tl

from .angles import load_frequencies
from .encode import (
    activate_row_backward,
    apply_map,
    apply_map_backward,
    form_angle_gradient,
    form_cos_sin,
    load_inputs,
    load_unmapped,
    store_input_gradients,
    store_unmapped,
    weigh_tokens,
)
from .norm import (
    add_weight_gradients,
    apply_weights,
    find_token_group,
    form_weight_gradients,
    load_weights,
    normalise_row,
    normalise_row_backward,
    store_weight_gradients,
    zero_weight_gradients,
)
from .rows import mask_rest
from .signature import unpack_numbers, unpack_strides
from .tiles import (
    first_channel,
    load_at,
    load_flags,
    load_tile,
    move_row,
    move_tokens,
    split_last,
    split_pairs,
    store_at,
    upcast,
)


def for_tile(V, i):
    """Return the settings of tile i of the map."""
    return V.map_tiles[i] if V.num_map_tiles > 1 else V


if not triton.knobs.runtime.interpret:  # the interpreter of Triton 3.6 would pass V as a plain tuple
    for_tile = triton.constexpr_function(for_tile)


@triton.jit
def multiply(a, b, acc, V: tl.constexpr):
    """Return a @ b + acc. 16-bit operands use the matrix units, and others are multiplied in full precision."""
    if V.wide:
        return tl.dot(a, b, acc, out_dtype=tl.float64)
    elif V.operand == "bfloat16" and not V.accumulate_outside_mma:
        return tl.dot(a, b, acc)
    else:
        # This is more accurate than matrix units, which round down. The compiler would fuse a plain + into the product.
        product = tl.dot(a, b, input_precision="ieee")
        return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)


@triton.jit
def to_operand(x, V: tl.constexpr):
    """Round x to the dtype of operands.

    For 16-bit inputs, operands are bfloat16, whose range is large enough for sums.
    """
    if V.operand == "bfloat16":
        return x.to(tl.bfloat16)
    elif V.operand == "rounded":
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def locate_tensor(tensor, b, h, V: tl.constexpr):
    """Return the row (pointer, token stride, channel stride) at token 0 of a head of a sample."""
    p, strides = tensor
    stride_b, stride_h, stride_n, stride_d = unpack_strides(strides, V=V)
    row = (p, stride_n, stride_d)
    return move_row(move_row(row, b, stride_b, V=V), h, stride_h, V=V)


@triton.jit
def locate_tensors(tensors, b, h, V: tl.constexpr):
    """Apply :func:`locate_tensor` to several tensors."""
    rows = ()
    for i in tl.static_range(len(tensors)):
        rows += (locate_tensor(tensors[i], b, h, V=V),)
    return rows


@triton.jit
def load_side(side, b, g, h, V: tl.constexpr):
    """Load the frequencies of key head g. Return them with the offsets of the amplitudes, positions and mask, and h.

    Callers also pass on the side's pointers, because a Triton function can't return a pointer that is None.
    """
    if V.map == "none":
        return 0, h
    else:
        tables, _ = side
        p_omega, p_phase, _, _, _, _, _, numbers = tables
        _, steps, _ = numbers
        omega_h, phase_h, amplitude_h, positions_b, rotated_b = unpack_numbers(steps)
        omega = ()
        TILES: tl.constexpr = V.num_map_tiles
        for i in tl.static_range(TILES):
            omega += (load_tile_frequencies((p_omega, p_phase), g, (omega_h, phase_h), V=for_tile(V, i)),)
        sample = tl.cast(b, tl.int64)
        return (omega, g * amplitude_h, sample * positions_b, sample * rotated_b), h


@triton.jit
def load_query_side(side, k_head_tables, b, g, h, V: tl.constexpr):
    """Load the tables of a query head. With V.one_side, reuse k_head_tables, the tables of its key head."""
    if V.one_side:
        tables, _ = k_head_tables
        return tables, h
    else:
        return load_side(side, b, g, h, V=V)


@triton.jit
def load_tile_frequencies(tables, h, steps, V: tl.constexpr):
    """Load the frequencies and phases of head h for one tile of the map."""
    p_omega, p_phase = tables
    omega_h, phase_h = steps
    o_c = V.first + tl.arange(0, V.block_c)
    m_c = None if V.num_channels >= V.first + V.block_c else o_c < V.num_channels
    if V.has_phase:
        p_phase += h * phase_h
    return load_frequencies(p_omega + h * omega_h, p_phase, o_c, m_c, V=V)


@triton.jit
def load_row(row, o_n, m_n, V: tl.constexpr):
    """Load a block of tokens: two tiles (or the same tile twice) for each tile of the map, then the other channels."""
    tiles = ()
    if V.raw:
        for i in tl.static_range(len(V.begins)):
            tiles += (load_tile(row, o_n, m_n, i=i, V=V),)
        return tiles
    elif V.num_mapped == 0:
        return load_unmapped(row, o_n, m_n, V=V)
    else:
        TILES: tl.constexpr = V.num_map_tiles
        for i in tl.static_range(TILES):
            tiles += load_inputs(row, o_n, m_n, first_channel(V=for_tile(V, i)), V=for_tile(V, i))
        return tiles + load_unmapped(row, o_n, m_n, V=V)


@triton.jit
def find_values(i: tl.constexpr, m_n, V: tl.constexpr):
    """Return the channel indices (1, channels) of tile i of v, o or do, and their mask for tokens m_n."""
    o_v = tl.arange(0, V.v_blocks[i])[None, :]
    mask = m_n[:, None]
    if V.v_widths[i] < V.v_blocks[i]:
        mask = mask & (o_v < V.v_widths[i])
    return V.v_begins[i] + o_v, mask


@triton.jit
def load_values(row, o_n, m_n, V: tl.constexpr):
    """Load a block of tokens of v, o or do, tile by tile."""
    values = ()
    for i in tl.static_range(len(V.v_blocks)):
        o_v, mask = find_values(i=i, m_n=m_n, V=V)
        values += (load_at(row, o_n, o_v, mask, V=V),)
    return values


@triton.jit
def load_gate(gate, b, h, o_n, m_n, V: tl.constexpr):
    """Load β of a block of tokens."""
    p, strides = gate
    stride_b, stride_h, stride_n = unpack_numbers(strides)
    p += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    p += o_n.to(tl.int64) * stride_n
    if p.dtype.element_ty.primitive_bitwidth <= 8:
        beta = load_flags(p, m_n, WIDE=True)
    else:
        beta = tl.load(p, mask=m_n, other=0)
    return beta.to(tl.float64 if V.wide else tl.float32)


@triton.jit
def zero_gated_tokens(x, beta):
    """Set x to 0 for tokens with β = 0, even if x is NaN."""
    tiles = ()
    for i in tl.static_range(len(x)):
        tiles += (tl.where((beta == 0.0)[:, None], 0.0, x[i]),)
    return tiles


@triton.jit
def to_tiles(tiles, V: tl.constexpr):
    """Convert the result of :func:`load_row` to tiles of x: one or two for each tile of the map, then the rest."""
    if V.num_mapped == 0:
        return tiles
    else:
        TILES: tl.constexpr = V.num_map_tiles
        x = ()
        for i in tl.static_range(TILES):
            if V.map == "cosine":
                x += (upcast(tiles[2 * i], V=V),)
            else:
                x += split_pairs(upcast(tiles[2 * i], V=V), upcast(tiles[2 * i + 1], V=V), V=for_tile(V, i))
        return x + tiles[2 * V.num_map_tiles :]


@triton.jit
def normalise_tokens(x, side, n0, o_n, V: tl.constexpr):
    """Return norm(x) of tokens n0 + o_n, and the values that its backward pass needs: x̂, r, γ, β and token groups."""
    if V.norm == "none":
        return x, ()
    else:
        pointers, head_tables = side
        p_weight, p_bias, _, numbers = pointers[1]
        group = 0
        if V.token_groups > 1:
            first_index, num_grid = unpack_numbers(numbers)
            group = find_token_group(n0 + o_n + first_index, num_grid, V=V)[:, None]
        # Loading γ and β for each block avoids register spills.
        weights = load_weights((p_weight, p_bias, p_weight, p_bias), False, head_tables[1], group, None, V=V)
        x_hat, scale = normalise_row(x, V=V)
        return apply_weights(x_hat, weights, V=V), (x_hat, scale, weights, group)


@triton.jit
def fill_rest(x_bar, m_n, TOKENS: tl.constexpr, V: tl.constexpr):
    """Set channels of x̄ beyond the row's width to 0. With TOKENS, also set tokens beyond the end to 0."""
    if V.keeps_zero:
        return x_bar
    else:
        tiles = ()
        for i in tl.static_range(len(x_bar)):
            x = x_bar[i]
            if TOKENS:
                x = tl.where(m_n[:, None], x, 0.0)
            tiles += (mask_rest(x, i=i, value=0.0, V=V),)
        return tiles


@triton.jit
def form_block_cos_sin(side, n0, o_n, V: tl.constexpr):
    """Return the results of :func:`form_cos_sin` for tokens n0 + o_n, tile by tile."""
    if V.map == "none":
        return ()
    else:
        pointers, head_tables = side
        tables, _ = pointers
        _, _, p_coords, p_origin, p_affine, p_rotated, p_amplitude, numbers = tables
        counts, _, axes = numbers
        _, first_index, num_grid = unpack_numbers(counts)
        grid = unpack_numbers(axes)
        offsets, _ = head_tables
        omega, amplitude, coords, rotated = offsets
        if p_amplitude is not None:
            p_amplitude += amplitude
        if V.by_sample:
            if V.explicit:
                p_coords += coords
            else:
                p_origin += coords
            if p_rotated is not None:
                p_rotated += rotated
        positions = (p_coords, p_origin, p_affine, grid)
        tables = (p_rotated, p_amplitude, 0, first_index, num_grid)
        cos_sin = ()
        TILES: tl.constexpr = V.num_map_tiles
        for i in tl.static_range(TILES):
            cos_sin += (form_tile_cos_sin(omega[i], positions, tables, n0, o_n, V=for_tile(V, i)),)
        return cos_sin


@triton.jit
def form_tile_cos_sin(omega, positions, tables, n0, o_n, V: tl.constexpr):
    """Apply :func:`form_cos_sin` to one tile of the map."""
    o_c = V.first + tl.arange(0, V.block_c)
    m_c = None if V.num_channels >= V.first + V.block_c else o_c < V.num_channels
    return form_cos_sin(omega, positions, tables, n0, o_n, o_c, m_c, V=V, WIDE=True)


@triton.jit
def select_map_tile(x, i: tl.constexpr, V: tl.constexpr):
    """Return the tiles of a row that belong to tile i of the map."""
    if V.halves == 1:
        return (x[i],)
    else:
        return x[2 * i], x[2 * i + 1]


@triton.jit
def join_halves(first, second, V: tl.constexpr):
    """Interleave two tiles (tokens, channels) in runs of V.run channels, and return a single tile."""
    BLOCK_N: tl.constexpr = V.block_n
    WIDTH: tl.constexpr = 2 * V.block_c
    if V.run == 1:
        return tl.reshape(tl.join(first, second), [BLOCK_N, WIDTH])
    else:  # after a join, Triton 3.6 assumes that elements are packed, and reads operands in pieces of 8 bytes
        RUN: tl.constexpr = V.run
        RUNS: tl.constexpr = V.block_c // V.run
        is_second = tl.arange(0, 2)[None, None, :, None] == 1
        first = tl.broadcast_to(tl.reshape(first, [BLOCK_N, RUNS, 1, RUN]), [BLOCK_N, RUNS, 2, RUN])
        second = tl.broadcast_to(tl.reshape(second, [BLOCK_N, RUNS, 1, RUN]), [BLOCK_N, RUNS, 2, RUN])
        return tl.reshape(tl.where(is_second, second, first), [BLOCK_N, WIDTH])


@triton.jit
def split_halves(x, V: tl.constexpr):
    """Inverse of :func:`join_halves`."""
    BLOCK_N: tl.constexpr = V.block_n
    BLOCK_C: tl.constexpr = V.block_c
    if V.run == 1:
        return split_last(x)
    else:
        RUN: tl.constexpr = V.run
        RUNS: tl.constexpr = V.block_c // V.run
        first, second = tl.split(tl.permute(tl.reshape(x, [BLOCK_N, RUNS, 2, RUN]), (0, 1, 3, 2)))
        return tl.reshape(first, [BLOCK_N, BLOCK_C]), tl.reshape(second, [BLOCK_N, BLOCK_C])


@triton.jit
def map_features(x_bar, cos_sin, V: tl.constexpr):
    """Compute x̂ from x̄."""
    if V.num_mapped == 0:
        return x_bar
    else:
        x_hat = ()
        TILES: tl.constexpr = V.num_map_tiles
        for i in tl.static_range(TILES):
            halves = select_map_tile(x_bar, i=i, V=V)
            if V.map != "none":
                cos, sin, _, _ = cos_sin[i]
                halves = apply_map(halves, cos, sin, V=for_tile(V, i))
            x_hat += (join_halves(halves[0], halves[1], V=for_tile(V, i)),)
        return x_hat + x_bar[V.num_mapped :]


@triton.jit
def map_features_backward(x_bar, dx_hat, cos_sin, V: tl.constexpr):
    """Compute dx̄ and dΘ from dx̂, tile by tile."""
    if V.num_mapped == 0:
        return dx_hat, ()
    else:
        TILES: tl.constexpr = V.num_map_tiles
        dx_bar = ()
        dangles = ()
        for i in tl.static_range(TILES):
            dy = split_halves(dx_hat[i], V=for_tile(V, i))
            if V.map == "none":
                dx_bar += dy
            else:
                cos, sin, _, _ = cos_sin[i]
                dx_tile = apply_map_backward(dy, cos, sin, V=for_tile(V, i))
                if V.need_dangles:
                    x = select_map_tile(x_bar, i=i, V=V)
                    dangles += (form_angle_gradient(x, dy, dx_tile, cos, sin, V=for_tile(V, i)),)
                dx_bar += dx_tile
        return dx_bar + dx_hat[V.num_map_tiles :], dangles


@triton.jit
def store_token_gradients(head, tokens, grads, sums, side, place, V: tl.constexpr):
    """Store dq or dk of a block of tokens, and return the updated sums for dω and for the norm's weights.

    ``tokens`` is (norm(x), x̄, cos and sin), ``grads`` is (dx̄, dΘ), and ``place`` is (n0, o_n, m_n).
    """
    x, x_bar, cos_sin = tokens
    x_norm, norm_saved = x
    dx_bar, dangles = grads
    total, dweights = sums
    n0, o_n, m_n = place
    row = move_tokens(head, n0, V=V)
    dx = activate_row_backward(x_norm, x_bar, dx_bar, V=V)
    if V.norm != "none":
        x_hat, scale, weights, group = norm_saved
        dweights = add_weight_gradients(dweights, form_weight_gradients(dx, x_hat, (), V=V), group, V=V)
        dx = normalise_row_backward(dx, x_hat, scale, weights, V=V)
    if V.num_mapped > 0:
        TILES: tl.constexpr = V.num_map_tiles
        for i in tl.static_range(TILES):
            tile = select_map_tile(dx, i=i, V=V)
            store_input_gradients(row, tile, o_n, m_n, first_channel(V=for_tile(V, i)), V=for_tile(V, i))
    store_unmapped(row, dx, o_n, m_n, V=V)
    return add_angle_gradients(total, dangles, side, cos_sin, V=V), dweights


@triton.jit
def empty_total(V: tl.constexpr):
    """Return zeros for the sums Σ s_j dΘ of each tile and axis j, where s_j is a token's coordinate.

    Each sum has shape (tokens / V.share, channels), or (channels) in float64 if V.operand is "same".
    """
    total = ()
    if V.need_dangles:
        TILES: tl.constexpr = V.num_map_tiles
        for i in tl.static_range(TILES):
            total += _empty_tile_total(V=for_tile(V, i))
    return total


@triton.jit
def _empty_tile_total(V: tl.constexpr):
    ROWS: tl.constexpr = V.block_n // V.share
    BLOCK_C: tl.constexpr = V.block_c
    J: tl.constexpr = V.num_axes + 1 if V.has_phase else V.num_axes
    if V.operand != "same":
        return (tl.zeros([ROWS, BLOCK_C], dtype=tl.float32),) * J
    else:
        return (tl.zeros([BLOCK_C], dtype=tl.float64),) * J


@triton.jit
def sum_row_groups(x, V: tl.constexpr):
    """Sum groups of V.share tokens that are in the same thread. The result has shape (tokens / V.share, channels)."""
    if V.share == 1:
        return x
    else:
        SHARE: tl.constexpr = V.share
        ROWS: tl.constexpr = V.block_n // V.share
        BLOCK_C: tl.constexpr = V.block_c
        return tl.sum(tl.reshape(x, [SHARE, ROWS, BLOCK_C]), axis=0)


@triton.jit
def add_angle_gradients(total, dangles, side, cos_sin, V: tl.constexpr):
    """Add Σ s_j dΘ over a block of tokens to ``total``. If there is a phase, also add Σ dΘ."""
    if V.need_dangles:
        pointers, head_tables = side
        tables, _ = pointers
        offsets, _ = head_tables
        _, _, p_coords, p_origin, p_affine, _, _, numbers = tables
        _, _, axes = numbers
        grid = unpack_numbers(axes)
        _, _, coords, _ = offsets
        if V.by_sample:
            if V.explicit:
                p_coords += coords
            else:
                p_origin += coords
        positions = (p_coords, p_origin, p_affine, grid)
        _, _, o_g, m_g = cos_sin[0]
        weights = weigh_tokens(o_g, m_g, positions, V=V)
        new_total = ()
        for i in tl.static_range(len(dangles)):
            for j in tl.static_range(len(weights)):
                sums = total[i * len(weights) + j]
                if V.operand != "same":
                    products = weights[j].to(tl.float32)[:, None] * dangles[i]
                    new_total += (sums + sum_row_groups(products, V=for_tile(V, i)),)
                else:
                    new_total += (sums + tl.sum(weights[j][:, None] * dangles[i].to(tl.float64), axis=0),)
        return new_total
    else:
        return total


@triton.jit
def store_total(p_partial, row, total, V: tl.constexpr):
    """Store a program's sums (J, C) for dω and dφ as a row of the partial sums."""
    if V.need_dangles:
        J: tl.constexpr = V.num_axes + 1 if V.has_phase else V.num_axes
        p_partial += tl.cast(row, tl.int64) * (J * V.num_channels)
        TILES: tl.constexpr = V.num_map_tiles
        for i in tl.static_range(TILES):
            o_c = for_tile(V, i).first + tl.arange(0, for_tile(V, i).block_c)
            for j in tl.static_range(J):
                value = tl.sum(total[i * J + j], axis=0) if V.operand != "same" else total[i * J + j]
                tl.store(p_partial + j * V.num_channels + o_c, value.to(tl.float64), mask=o_c < V.num_channels)


@triton.jit
def empty_weight_sums(V: tl.constexpr):
    """Return the zeros of :func:`zero_weight_gradients`, as (tokens, channels) or, in float64, as (1, channels)."""
    if V.operand != "same":
        return zero_weight_gradients(dtype=tl.float32, V=V)
    else:
        return zero_weight_gradients(dtype=tl.float64, V=V, SUMMED=True)


@triton.jit
def store_weight_sums(side, row, sums, V: tl.constexpr):
    """Store a program's sums as a row of the partial sums."""
    if V.need_dweight:
        pointers, _ = side
        _, norm = pointers
        _, _, p_partial, _ = norm
        width: tl.constexpr = V.head_dim * V.token_groups * (V.has_weight + V.has_bias)
        store_weight_gradients(p_partial + tl.cast(row, tl.int64) * width, sums, V=V)


@triton.jit
def store_values(row, values, o_n, m_n, V: tl.constexpr):
    """Store tiles in the form that :func:`load_values` returns."""
    for i in tl.static_range(len(V.v_blocks)):
        o_v, mask = find_values(i=i, m_n=m_n, V=V)
        store_at(row, values[i], o_n, o_v, mask, V=V)
