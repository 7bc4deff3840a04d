"""q̂ and k̂ of linear attention on tiles (tokens, channels), formed in registers from q and k; and their gradients.

A row's features are a tuple of tiles: what the map makes, both halves of it channel by channel, then what passes as x̄
(kernels/encode.py). Without a map neighbouring channels are pairs that nothing turns: where a row is one tile, sums
over its channels may go through all warps. One side of an attention is what encodes its tokens: frequencies, positions,
tables, often the same for q and for k; and the norm, None or γ, β, the partial sums for their gradients, and the
tokens' place on the grid.
"""

import triton
import triton.language as tl

from .angles import load_frequencies
from .encode import (
    activate_row_backward,
    apply_map,
    apply_map_backward,
    form_angle_gradient,
    load_inputs,
    load_passing,
    store_input_gradients,
    turn_tokens,
)
from .norm import (
    apply_weights,
    find_token_group,
    form_weight_gradients,
    load_weights,
    normalise_row,
    normalise_row_backward,
    store_weight_gradients,
)
from .signature import unpack
from .tiles import first_channel, load_at, load_flags, load_tile, move_row, split_pairs, store_at, store_tile, upcast


@triton.jit
def multiply(a, b, acc, V: tl.constexpr):
    """a b + acc, of 16-bit operands on the matrix units, of others in their own precision."""
    if V.wide:
        return tl.dot(a, b, acc, out_dtype=tl.float64)
    elif V.operand == "bfloat16" and not V.accumulate_outside_mma:
        return tl.dot(a, b, acc)
    else:
        # Sums of sums are rounded less, and matrix units round down; a plain + would become the product's accumulator.
        product = tl.dot(a, b, input_precision="ieee")
        return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)


@triton.jit
def to_operand(x, V: tl.constexpr):
    """Round to the dtype of a matrix operand: bfloat16 for 16-bit inputs, since sums over tokens stay in its range."""
    if V.operand == "bfloat16":
        return x.to(tl.bfloat16)
    elif V.operand == "rounded":
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def locate_tensor(tensor, b, h, V: tl.constexpr):
    """Token 0 of a head of a sample: pointer, strides of a token and of a channel."""
    p, strides = tensor
    stride_b, stride_h, stride_n, stride_d = unpack(strides)
    row = (p, stride_n, stride_d)
    return move_row(move_row(row, b, stride_b, V=V), h, stride_h, V=V)


@triton.jit
def load_side(side, b, g, h, V: tl.constexpr):
    """Load the tables of a head of a sample; also return h. g: the head of k.

    Functions below take the result next to the side's pointers, which a function can't return if they may be None.

    """
    return load_tables(side, b, g, V=V), h


@triton.jit
def load_query_side(side, k_loaded, b, g, h, V: tl.constexpr):
    """The same of a head of q; k_loaded: that of its key head."""
    if V.one_side:
        tables, _ = k_loaded
        return tables, h
    else:
        return load_side(side, b, g, h, V=V)


@triton.jit
def load_tables(side, b, h, V: tl.constexpr):
    """Load the frequencies of a head of a sample, and find where its amplitudes, positions and rotation mask begin."""
    if V.map == "none":
        return 0
    else:
        tables, _ = side
        p_omega, p_phase, _, _, _, _, _, numbers = tables
        _, steps, _ = numbers
        omega_h, phase_h, amplitude_h, positions_b, rotated_b = unpack(steps)
        o_c = tl.arange(0, V.block_c)
        m_c = None if V.num_channels % V.block_c == 0 else o_c < V.num_channels
        if V.has_phase:
            p_phase += h * phase_h
        omega = load_frequencies(p_omega + h * omega_h, p_phase, o_c, m_c, V=V)
        sample = tl.cast(b, tl.int64)
        return omega, h * amplitude_h, sample * positions_b, sample * rotated_b


@triton.jit
def load_row(row, o_n, m_n, V: tl.constexpr):
    """A block of tokens: what the map turns, as two tiles or twice the same, then what passes."""
    if V.raw:
        return (load_tile(row, o_n, m_n, i=0, V=V),)
    elif V.num_turned == 0:
        return load_passing(row, o_n, m_n, V=V)
    else:
        return load_inputs(row, o_n, m_n, first_channel(), V=V) + load_passing(row, o_n, m_n, V=V)


@triton.jit
def load_values(row, o_n, m_n, V: tl.constexpr):
    """A block of tokens of v, o or do."""
    o_v = tl.arange(0, V.block_v)[None, :]
    mask = m_n[:, None]
    if V.v_dim % V.block_v != 0:
        mask = mask & (o_v < V.v_dim)
    return load_at(row, o_n, o_v, mask, V=V)


@triton.jit
def load_gate(gate, b, h, o_n, m_n, V: tl.constexpr):
    """β of a block of tokens."""
    p, strides = gate
    stride_b, stride_h, stride_n = unpack(strides)
    p += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    p += o_n.to(tl.int64) * stride_n
    if p.dtype.element_ty.primitive_bitwidth <= 8:
        beta = load_flags(p, m_n, WIDE=True)
    else:
        beta = tl.load(p, mask=m_n, other=0)
    return beta.to(tl.float64 if V.wide else tl.float32)


@triton.jit
def zero_gated_tokens(x, beta, V: tl.constexpr):
    """Zeros where β is 0, whatever is there."""
    return tl.where((beta == 0.0)[:, None], 0.0, x)


@triton.jit
def to_tiles(loaded, V: tl.constexpr):
    """x of what :func:`load_row` has loaded: a tile for what the map turns as one, or two, then what passes."""
    if V.num_turned == 0:
        return loaded
    else:
        if V.map == "cosine":
            x = (upcast(loaded[0], V=V),)
        else:
            x = split_pairs(upcast(loaded[0], V=V), upcast(loaded[1], V=V), V=V)
        for i in tl.static_range(2, len(loaded)):
            x += (loaded[i],)
        return x


@triton.jit
def normalise_tokens(x, side, n0, o_n, V: tl.constexpr):
    """norm(x) of tokens n0 + o_n, and what its backward takes: x̂, what x was multiplied by, γ and β, the groups."""
    if V.norm == "none":
        return x, ()
    else:
        weights, group = find_weights(side, n0, o_n, V=V)
        x_hat, scale = normalise_row(x, V=V)
        return apply_weights(x_hat, weights, V=V), (x_hat, scale, weights, group)


@triton.jit
def find_weights(side, n0, o_n, V: tl.constexpr):
    """γ and β of tokens n0 + o_n, and the groups that they are of. Read again for each block: held on to, they would
    take registers that are spilled for them."""
    pointers, own = side
    _, h = own
    _, norm = pointers
    p_weight, p_bias, _, numbers = norm
    group = 0
    if V.token_groups > 1:
        first_index, num_grid = unpack(numbers)
        group = find_token_group(n0 + o_n + first_index, num_grid, V=V)[:, None]
    return load_weights((p_weight, p_bias, p_weight, p_bias), False, h, group, None, V=V), group


@triton.jit
def fill_rest(x_bar, m_n, TOKENS: tl.constexpr, V: tl.constexpr):
    """x̄ with zeros for the channels, with TOKENS also for the tokens, that are not there."""
    if V.keeps_zero:
        return x_bar
    else:
        filled = ()
        for i in tl.static_range(len(x_bar)):
            x = x_bar[i]
            if TOKENS:
                x = tl.where(m_n[:, None], x, 0.0)
            if V.widths[i] < V.blocks[i]:
                x = tl.where((tl.arange(0, V.blocks[i]) < V.widths[i])[None, :], x, 0.0)
            filled += (x,)
        return filled


@triton.jit
def turn_block(side, n0, o_n, V: tl.constexpr):
    """cos Θ and sin Θ of tokens n0 + o_n, their indices on the grid, and which of them are on it."""
    if V.map == "none":
        return 0, 0, 0, 0
    else:
        pointers, own = side
        tables, _ = pointers
        _, _, p_coords, p_origin, p_affine, p_rotated, p_amplitude, numbers = tables
        counts, _, axes = numbers
        _, first_index, num_grid = unpack(counts)
        grid = unpack(axes)
        loaded, _ = own
        omega, amplitude, coords, rotated = loaded
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
        o_c = tl.arange(0, V.block_c)
        m_c = None if V.num_channels % V.block_c == 0 else o_c < V.num_channels
        return turn_tokens(omega, positions, tables, n0, o_n, o_c, m_c, V=V, WIDE=True)


@triton.jit
def map_pairs(x_bar, turned, V: tl.constexpr):
    """Both halves of what the map makes of x̄."""
    if V.map == "none":
        return x_bar[0], x_bar[1]
    else:
        cos, sin, _, _ = turned
        return apply_map(x_bar, cos, sin, V=V)


@triton.jit
def join_halves(first, second, V: tl.constexpr):
    """Two tiles (tokens, channels) as one of features: V.run channels of one, then of the other, and so on."""
    BLOCK_N: tl.constexpr = V.block_n
    WIDTH: tl.constexpr = 2 * V.block_c
    if V.run == 1:
        return tl.reshape(tl.join(first, second), [BLOCK_N, WIDTH])
    else:  # a join would be taken for packed elements: operands behind it are read in pieces of 8 bytes (Triton 3.6)
        RUN: tl.constexpr = V.run
        RUNS: tl.constexpr = V.block_c // V.run
        of_second = tl.arange(0, 2)[None, None, :, None] == 1
        first = tl.broadcast_to(tl.reshape(first, [BLOCK_N, RUNS, 1, RUN]), [BLOCK_N, RUNS, 2, RUN])
        second = tl.broadcast_to(tl.reshape(second, [BLOCK_N, RUNS, 1, RUN]), [BLOCK_N, RUNS, 2, RUN])
        return tl.reshape(tl.where(of_second, second, first), [BLOCK_N, WIDTH])


@triton.jit
def split_halves(x, V: tl.constexpr):
    """The inverse of :func:`join_halves`."""
    BLOCK_N: tl.constexpr = V.block_n
    BLOCK_C: tl.constexpr = V.block_c
    if V.run == 1:
        return tl.split(tl.reshape(x, [BLOCK_N, BLOCK_C, 2]))
    else:
        RUN: tl.constexpr = V.run
        RUNS: tl.constexpr = V.block_c // V.run
        first, second = tl.split(tl.permute(tl.reshape(x, [BLOCK_N, RUNS, 2, RUN]), (0, 1, 3, 2)))
        return tl.reshape(first, [BLOCK_N, BLOCK_C]), tl.reshape(second, [BLOCK_N, BLOCK_C])


@triton.jit
def map_features(x_bar, turned, V: tl.constexpr):
    """x̂ of x̄."""
    if V.num_turned == 0:
        return x_bar
    else:
        first, second = map_pairs(x_bar, turned, V=V)
        x_hat = (join_halves(first, second, V=V),)
        TURNED: tl.constexpr = V.num_turned
        for i in tl.static_range(TURNED, len(V.begins)):
            x_hat += (x_bar[i],)
        return x_hat


@triton.jit
def map_features_backward(x_bar, dx_hat, turned, V: tl.constexpr):
    """dx̄ of dx̂, and dΘ."""
    if V.num_turned == 0:
        return dx_hat, 0
    else:
        cos, sin, _, _ = turned
        dy = split_halves(dx_hat[0], V=V)
        dx_bar = dy
        dangles = 0
        if V.map != "none":
            dx_bar = apply_map_backward(dy, cos, sin, V=V)
        if V.need_dangles:
            dangles = form_angle_gradient(x_bar, dy, dx_bar, cos, sin, V=V)
        for i in tl.static_range(1, len(dx_hat)):
            dx_bar += (dx_hat[i],)
        return dx_bar, dangles


@triton.jit
def store_row_gradient(row, x, x_bar, dx_bar, dweights, o_n, m_n, V: tl.constexpr):
    """dx of a block of tokens; the sums for dγ and dβ with theirs added. x: of :func:`normalise_tokens`."""
    normed, saved = x
    dx = activate_row_backward(normed, x_bar, dx_bar, V=V)
    if V.norm != "none":
        x_hat, scale, weights, group = saved
        dweights = add_weight_products(dweights, form_weight_gradients(dx, x_hat, (), V=V), group, V=V)
        dx = normalise_row_backward(dx, x_hat, scale, weights, V=V)
    if V.num_turned > 0:
        store_input_gradients(row, dx, o_n, m_n, first_channel(), V=V)
    TURNED: tl.constexpr = V.num_turned
    for i in tl.static_range(TURNED, len(V.begins)):
        store_tile(row, dx[i], o_n, m_n, i=i, V=V)
    return dweights


@triton.jit
def _empty_row(i: tl.constexpr, V: tl.constexpr):
    BLOCK_N: tl.constexpr = V.block_n
    BLOCK: tl.constexpr = V.blocks[i]
    if V.operand != "same":
        return tl.zeros([BLOCK_N, BLOCK], dtype=tl.float32)
    else:
        return tl.zeros([1, BLOCK], dtype=tl.float64)


@triton.jit
def empty_weight_sums(V: tl.constexpr):
    """Zeros for dγ and dβ of a program: for each group of tokens tiles (tokens, channels), or in float64 (1, channels),
    of γ, then of β."""
    sums = ()
    if V.need_dweight:
        for _ in tl.static_range(V.token_groups * (V.has_weight + V.has_bias)):
            for i in tl.static_range(len(V.begins)):
                sums += (_empty_row(i=i, V=V),)
    return sums


@triton.jit
def add_weight_products(sums, products, group, V: tl.constexpr):
    """Add the products of a block of tokens to the sums of their groups."""
    added = ()
    for j in tl.static_range(len(sums)):
        product = products[j % len(products)]
        if V.token_groups > 1:
            product = tl.where(group == j // len(products), product, 0.0)
        if V.operand != "same":
            added += (sums[j] + product,)
        else:
            added += (sums[j] + tl.sum(product.to(tl.float64), axis=0, keep_dims=True),)
    return added


@triton.jit
def store_weight_sums(side, row, sums, V: tl.constexpr):
    """A program's, as a row of the partial sums."""
    if V.need_dweight:
        pointers, _ = side
        _, norm = pointers
        _, _, p_partial, _ = norm
        width: tl.constexpr = V.head_dim * V.token_groups * (V.has_weight + V.has_bias)
        store_weight_gradients(p_partial + tl.cast(row, tl.int64) * width, sums, V=V)


@triton.jit
def store_values(row, value, o_n, m_n, V: tl.constexpr):
    """The inverse of :func:`load_values`."""
    o_v = tl.arange(0, V.block_v)[None, :]
    mask = m_n[:, None]
    if V.v_dim % V.block_v != 0:
        mask = mask & (o_v < V.v_dim)
    store_at(row, value, o_n, o_v, mask, V=V)
