"""Kernel that applies either map, forward or backward.

A program processes one block of tokens in V.block_r rows that share frequencies. A row is one head of one sample, of q
or of k. The program starts to load its rows, computes the angles of the block in the meantime, and then maps row after
row with cos Θ and sin Θ in registers. If frequencies or weights need a gradient, there are fewer programs, and each one
loops over many blocks and rows. This is a single loop, so the rows of the next block can be prefetched.

The channels of a row are stored as a tuple of tiles (tokens, channels). The mapped channels come first: one tile for
the cosine map, or two tiles for the first and second channels of pairs. The other channels follow, and pass through as
x̄. Loops over rows are unrolled. If rows were a dimension of the tile, they would be distributed over threads, which
would all compute the same angles.
"""

import triton
import triton.language as tl

from .activations import activate, activate_backward
from .angles import (
    divide,
    find_coordinate,
    form_angles,
    load_channels,
    load_frequencies,
    take_cos_sin,
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
from .reduce import launch_next_kernel
from .signature import kernel, unpack_int32, unpack_numbers
from .softmax import softmax_features, softmax_features_backward, softmax_sequence
from .tables import load_cos_sin, point_to_tables, split_pair_entries, zero_cos_sin
from .tiles import (
    first_channel,
    load,
    load_flags,
    load_pairs,
    load_tile,
    locate_channels,
    point_to_row,
    split_pairs,
    store,
    store_pairs,
    store_tile,
    upcast,
    zeros,
)

# --- the two maps, on tiles (tokens, channels): a branch for each entry of reference.MAPS except "none" -----------


@triton.jit
def apply_map(x_bar, cos, sin, V: tl.constexpr):
    """Return (x̄ cos Θ, x̄ sin Θ) for the cosine map, or (a cos Θ - b sin Θ, a sin Θ + b cos Θ) for a rotation.

    If V.tables is "full", each channel of a pair has its own cos and sin.
    """
    if V.map == "cosine":
        return x_bar[0] * cos, x_bar[0] * sin
    elif V.map == "rotate":
        a, b = x_bar[0], x_bar[1]
        cos_a, cos_b = split_pair_entries(cos, V=V)
        sin_a, sin_b = split_pair_entries(sin, V=V)
        return a * cos_a - b * sin_a, a * sin_b + b * cos_b
    else:
        tl.static_assert(False, "this map has no branch in kernels/encode.py: apply_map")


@triton.jit
def apply_map_backward(dy, cos, sin, V: tl.constexpr):
    """Return dx̄: dy_cos cos Θ + dy_sin sin Θ for the cosine map, or dy rotated by -Θ for a rotation."""
    if V.map == "cosine":
        dy_cos, dy_sin = dy
        return (dy_cos * cos + dy_sin * sin,)
    elif V.map == "rotate":
        da, db = dy
        cos_a, cos_b = split_pair_entries(cos, V=V)
        sin_a, sin_b = split_pair_entries(sin, V=V)
        return da * cos_a + db * sin_b, db * cos_b - da * sin_a
    else:
        tl.static_assert(False, "this map has no branch in kernels/encode.py: apply_map_backward")


@triton.jit
def form_angle_gradient(x_bar, dy, dx_bar, cos, sin, V: tl.constexpr):
    """Return dΘ: x̄ (dy_sin cos Θ - dy_cos sin Θ) for the cosine map, or a db̄ - b dā for a rotation."""
    if V.map == "cosine":
        dy_cos, dy_sin = dy
        return x_bar[0] * (dy_sin * cos - dy_cos * sin)
    elif V.map == "rotate":
        return x_bar[0] * dx_bar[1] - x_bar[1] * dx_bar[0]
    else:
        tl.static_assert(False, "this map has no branch in kernels/encode.py: form_angle_gradient")


# --- a row's tiles: loads and stores --------------------------------------------------------------------------


@triton.jit
def load_inputs(row, o_n, m_n, c0, V: tl.constexpr):
    """Load the mapped channels of a row of x as two tiles, or return the same tile twice."""
    if V.map == "cosine":
        x = load(row, o_n, m_n, c0, V.rotary_start, V)
        return x, x
    else:
        return load_pairs(row, o_n, m_n, c0, V)


@triton.jit
def load_gradients(row, o_n, m_n, c0, V: tl.constexpr):
    """Load the gradient of the map's output from a row of dy as two tiles, or return the same tile twice."""
    if V.map == "cosine":
        COS_BEGIN: tl.constexpr = V.head_dim if V.order == "sin_cos" else 0
        dy_cos = load(row, o_n, m_n, c0, COS_BEGIN, V)
        dy_sin = load(row, o_n, m_n, c0, V.head_dim - COS_BEGIN, V)
        return dy_cos, dy_sin
    else:
        return load_pairs(row, o_n, m_n, c0, V)


@triton.jit
def load_unmapped(row, o_n, m_n, V: tl.constexpr):
    """Load the tiles of a row that the map leaves unchanged."""
    tiles = ()
    MAPPED: tl.constexpr = V.num_mapped
    for i in tl.static_range(MAPPED, len(V.begins)):
        tiles += (upcast(load_tile(row, o_n, m_n, i, V), V),)
    return tiles


@triton.jit
def store_unmapped(row, tiles, o_n, m_n, V: tl.constexpr):
    """Store the tiles of a row that the map leaves unchanged."""
    MAPPED: tl.constexpr = V.num_mapped
    for i in tl.static_range(MAPPED, len(V.begins)):
        store_tile(row, tiles[i], o_n, m_n, i, V)


@triton.jit
def store_outputs(row, outputs, o_n, m_n, c0, V: tl.constexpr):
    """Store the map's output in the layout of :func:`load_gradients`."""
    if V.map == "cosine":
        COS_BEGIN: tl.constexpr = V.head_dim if V.order == "sin_cos" else 0
        store(row, outputs[0], o_n, m_n, c0, COS_BEGIN, V)
        store(row, outputs[1], o_n, m_n, c0, V.head_dim - COS_BEGIN, V)
    else:
        store_pairs(row, outputs[0], outputs[1], o_n, m_n, c0, V)


@triton.jit
def store_input_gradients(row, gradients, o_n, m_n, c0, V: tl.constexpr):
    """Store the gradient of the tiles that :func:`load_inputs` returns."""
    if V.map == "cosine":
        store(row, gradients[0], o_n, m_n, c0, V.rotary_start, V)
    else:
        store_pairs(row, gradients[0], gradients[1], o_n, m_n, c0, V)


@triton.jit
def activate_row(x, stat, V: tl.constexpr):
    """Compute x̄ from norm(x), tile by tile. ``stat`` locates the statistics of a softmax over the sequence."""
    if V.dim == -1:
        return softmax_features(x, V)
    else:
        x_bar = ()
        for i in tl.static_range(len(x)):
            if V.dim == -2:
                o_d, m_d = locate_channels(i, V)
                x_bar += (softmax_sequence(x[i], stat, o_d, m_d, V),)
            else:
                x_bar += (activate(x[i], V),)
        return x_bar


@triton.jit
def activate_row_backward(x, x_bar, dx_bar, V: tl.constexpr):
    """Compute dx from dx̄, tile by tile. For softmax over the sequence, return dx̄, because a later pass computes dx."""
    if V.dim == -1:
        return softmax_features_backward(x_bar, dx_bar, V=V)
    elif V.act == "none":
        return dx_bar
    else:
        dx = ()
        for i in tl.static_range(len(x)):
            dx += (activate_backward(x[i], x_bar[i], dx_bar[i], V),)
        return dx


@triton.jit
def map_row(loaded_row, cos, sin, o_n, c0, row_weights, V: tl.constexpr):
    """Map one row, forward or backward, and store the result.

    Return dΘ if it is needed, and the row's contributions to dγ and dβ, which are added to dweights_before if it isn't
    (). row_weights is (weights, dweights_before).
    """
    weights, dweights_before = row_weights
    xa, xb, ga, gb, place, token_range = loaded_row
    x_row, dy_row, o_row, num, stat = place
    m_n = o_n < num
    m_o = m_n
    if V.has_start:
        low, high = token_range
        m_o = m_n & (o_n >= low) & (o_n < high)
    dangles = cos
    dweights = ()
    x = ()
    x_bar = ()
    if V.load_x:
        if V.map == "cosine":
            x = (upcast(xa, V),)
        else:
            x = split_pairs(upcast(xa, V), upcast(xb, V), V)
            x += load_unmapped(x_row, o_n, m_n, V)
        if V.norm != "none":
            x_hat, scale = normalise_row(x, V=V)
            x = apply_weights(x_hat, weights, V=V)
        x_bar = activate_row(x, stat, V)
    if V.backward:
        dy = (upcast(ga, V), upcast(gb, V))
        if V.map != "cosine":
            dy = split_pairs(dy[0], dy[1], V)
        dx_bar = apply_map_backward(dy, cos, sin, V)
        if V.need_dangles:
            dangles = form_angle_gradient(x_bar, dy, dx_bar, cos, sin, V)
        dx_bar = dx_bar + load_unmapped(dy_row, o_n, m_n, V)
        out = activate_row_backward(x, x_bar, dx_bar, V)
        if V.norm != "none":
            dweights = form_weight_gradients(out, x_hat, dweights_before, V=V)
            out = normalise_row_backward(out, x_hat, scale, weights, V=V)
        store_input_gradients(o_row, out, o_n, m_o, c0, V)
    else:
        out = x_bar
        store_outputs(o_row, apply_map(x_bar, cos, sin, V), o_n, m_o, c0, V)
    store_unmapped(o_row, out, o_n, m_o, V)
    return dangles, dweights


# --- rows ----------------------------------------------------------------------------------------------------


@triton.jit
def locate_row(r, r_hi, sample, g, heads, V: tl.constexpr):
    """Return the sample and head of row r in group g, whether it is a row of k, and whether it is below r_hi."""
    per_sample, magic, shift, group0, group1 = heads
    i = divide(r, magic, shift)
    h = r - i * per_sample
    is_k = False
    if V.has_k:
        is_k = h >= group0
        h = tl.where(is_k, g * group1 + h - group0, g * group0 + h)
    else:
        h += g * group0
    return sample + i, h, is_k, r < r_hi


@triton.jit
def move_output(o_row, start, is_k, b, n0, num_n, V: tl.constexpr):
    """Move an output row to the first output token of its sample.

    Return the row and the range (low, high) of tokens that fit.

    ``start`` is (pointer, packed numbers). The pointer locates the index of the first output token of each sample. The
    numbers are the length of q's output, the length of k's output, and the stride between samples. The length is 0 for
    an output that begins at token 0.
    """
    p_start, numbers = start
    length0, length1, step = unpack_numbers(numbers)
    length = tl.where(is_k, length1, length0) if V.has_k else length0
    has_start = length > 0
    first = tl.where(has_start, tl.load(p_start + b * step), 0).to(tl.int64)
    low = tl.minimum(tl.maximum(-first - n0, 0), num_n)
    high = tl.where(has_start, tl.maximum(tl.minimum(length - first - n0, num_n), 0), num_n)
    p, stride_n, stride_d = o_row
    p += first * stride_n.to(tl.int64) * (8 if V.aligned else 1)
    if V.aligned:
        p = tl.multiple_of(p, 16)
    return (p, stride_n, stride_d), (low.to(tl.int32), high.to(tl.int32))


@triton.jit
def fetch_rows(tensors, r0, rows, n0, o_n, num_n, c0, V: tl.constexpr):
    """Load x and dy of V.block_r rows, starting at row r0. Return them with the location of each row.

    If only x or only dy is needed, it is returned twice. ``tensors`` is (x, dy, output, statistics of softmax
    over the sequence, extras of :func:`lrpe_kernel`). ``rows`` is (end, first sample, group, number of groups, heads).
    A location consists of the rows of x, dy and the output, the number of tokens, and pointers to the statistics. Each
    location is followed by the range of tokens to write, which is set only with V.has_start.
    """
    x, dy, o, stat, extras = tensors
    r_hi, sample, g, G, heads = rows
    loaded_rows = ()
    ROWS: tl.constexpr = V.block_r
    for i in tl.static_range(ROWS):
        b, h, is_k, is_valid = locate_row(r0 + i, r_hi, sample, g, heads, V)
        num = tl.where(is_valid, num_n, 0)
        p_o, o_stride, stride_d = point_to_row(o, is_k, b, h, n0, V)
        o_row = (p_o, o_stride, tl.full([], 1, stride_d.dtype))  # the channels of an output are adjacent
        token_range = (0, 0)
        if V.has_start:
            _, start = extras
            o_row, token_range = move_output(o_row, start, is_k, tl.where(is_valid, b, 0), n0, num_n, V)
        if V.load_x:
            x_row = point_to_row(x, is_k, b, h, n0, V)
            xa, xb = load_inputs(x_row, o_n, o_n < num, c0, V)
        if V.backward:
            dy_row = point_to_row(dy, is_k, b, h, n0, V)
            ga, gb = load_gradients(dy_row, o_n, o_n < num, c0, V)
        if not V.load_x:
            x_row, xa, xb = dy_row, ga, gb
        if not V.backward:
            dy_row, ga, gb = x_row, xa, xb
        if V.dim == -2:
            p_stat0, p_stat1, B = stat
            _, _, _, group0, group1 = heads
            num_heads = (tl.where(is_k, group1, group0) * G).to(tl.int64)
            p_stat = tl.where(is_k, p_stat1, p_stat0) if V.has_k else p_stat0
            p_stat += tl.where(is_valid, (b * num_heads + h) * V.head_dim, 0)
            row_stat = (p_stat, num_heads * B * V.head_dim)
        else:
            row_stat = (0, 0)
        loaded_rows += ((xa, xb, ga, gb, (x_row, dy_row, o_row, num, row_stat), token_range),)
    return loaded_rows


@triton.jit
def form_cos_sin(omega, positions, tables, n0, o_n, o_c, m_c, V: tl.constexpr, WIDE: tl.constexpr = False):
    """Return cos Θ and sin Θ of tokens n0 + o_n, their grid indices (0 off the grid), and the mask of grid tokens.

    Args:
        positions: see :func:`find_coordinate`.
        tables: a pointer to the mask of rotated tokens, a pointer to the amplitudes, the result of
            :func:`point_to_tables`, the grid index (or table row) of token 0, and the number of grid tokens.
        WIDE: see :func:`load_flags`.
    """
    p_rotated, p_amplitude, cos_sin_tables, first_index, num_grid = tables
    o_g = n0 + o_n + first_index
    m_g = o_g.to(tl.uint32, bitcast=True) < num_grid.to(tl.uint32, bitcast=True)  # negative indices become large
    if p_rotated is not None:
        m_g = m_g & load_flags(p_rotated + o_g, m_g, WIDE=WIDE)
    o_g = tl.where(m_g, o_g, 0)
    if V.tables != "none":
        cos, sin = load_cos_sin(cos_sin_tables, o_g, m_g, V=V)
    else:
        angles, half = form_angles(omega, positions, o_g, m_g, V)
        cos, sin = take_cos_sin(angles, half, V)
        if p_amplitude is not None:
            amplitude = load_channels(p_amplitude + o_c, m_c).to(cos.dtype)
            gain = tl.where(m_g[:, None], amplitude if V.flat else amplitude[None, :], 1.0)
            cos *= gain
            sin *= gain
    return cos, sin, o_g, m_g


@triton.jit
def map_rows(loaded_rows, cos_sin, o_n, c0, norm, sums, V: tl.constexpr):
    """Map the rows from :func:`fetch_rows`, and add dΘ and the gradients of the weights to ``sums``.

    cos_sin is (cos Θ, sin Θ). ``norm`` is (weights, token groups). All rows share the weights.
    """
    ROWS: tl.constexpr = V.block_r
    cos, sin = cos_sin
    dangles, dweights = sums
    weights, token_group = norm
    for i in tl.static_range(ROWS):
        dweights_before = () if i % 2 == 0 else pair_dweights
        row_dangles, pair_dweights = map_row(loaded_rows[i], cos, sin, o_n, c0, (weights, dweights_before), V)
        if V.need_dweight and (i % 2 == 1 or i == V.block_r - 1):
            dweights = add_weight_gradients(dweights, pair_dweights, token_group, V=V)
        if V.need_dangles:  # masked rows and tokens contribute 0, because their dy is 0
            if V.dim == -2:  # but their x̄ can be inf after a softmax over the sequence
                _, _, _, _, place, _ = loaded_rows[i]
                _, _, _, num, _ = place
                row_dangles = tl.where((o_n < num)[:, None], row_dangles, 0.0)
            pair_dangles = row_dangles if i % 2 == 0 else pair_dangles + row_dangles
            if i % 2 == 1 or i == V.block_r - 1:  # a conversion costs as much as eight additions
                dangles += pair_dangles.to(tl.float64)
    return dangles, dweights


@triton.jit
def weigh_tokens(o_g, m_g, positions, V: tl.constexpr):
    """Return float64 factors for each token: dΘ is multiplied by s_j for dω_j, and by 1 for dφ.

    Off the grid, all factors are 0.
    """
    weights = ()
    K: tl.constexpr = V.num_axes
    for j in tl.static_range(K):
        s, _ = find_coordinate(o_g, m_g, positions, j, V, WIDE=True)
        weights += (s,)
    if V.has_phase:
        weights += (m_g.to(tl.float64),)
    return weights


@triton.jit
def plan_walk(t, T, num_blocks, r_lo, r_hi, V: tl.constexpr):
    """Plan the loop of program t over blocks of tokens and, within each block, over V.block_r rows at a time.

    First, the program processes every T-th block on its own, as long as there is a block for every program. Then
    programs with the same channels (all programs or, if V.flat is set, every V.flat-th one) share the remaining blocks
    evenly. Return the number of steps before the shared blocks, the total number of steps, and the block and row where
    the program's part of the shared blocks begins.
    """
    EVERY: tl.constexpr = V.flat if V.flat else 1
    first = t % EVERY
    walkers = T // EVERY
    blocks = (num_blocks - first + EVERY - 1) // EVERY
    rounds = blocks // walkers
    row_blocks = tl.maximum(r_hi - r_lo + V.block_r - 1, 0) // V.block_r
    num_shared = (blocks - rounds * walkers) * row_blocks
    share = (num_shared + walkers - 1) // walkers
    begin = tl.minimum(t // EVERY * share, num_shared)
    num_skipped = begin // tl.maximum(row_blocks, 1)
    num_solo = rounds * row_blocks
    steps = num_solo + tl.minimum(share, num_shared - begin)
    return (
        num_solo,
        steps,
        first + rounds * T + num_skipped * EVERY,
        r_lo + (begin - num_skipped * row_blocks) * V.block_r,
    )


@triton.jit
def store_partial(p_partial, total, c0, o_c, m_c, V: tl.constexpr):
    """Store a program's sums (J, C) over its tokens, for dω and dφ."""
    C: tl.constexpr = V.num_channels
    BLOCK_N: tl.constexpr = V.block_n
    BLOCK_C: tl.constexpr = V.block_c
    for j in tl.static_range(len(total)):
        if V.flat:
            for first_c in range(0, C, V.block_c):
                has_channels = tl.broadcast_to(c0 == first_c, [BLOCK_N, BLOCK_C])
                channel_sums = tl.sum(tl.where(has_channels, total[j], 0.0), axis=0)
                tl.store(p_partial + j * C + first_c + tl.arange(0, V.block_c), channel_sums)
        else:
            tl.store(p_partial + j * C + o_c, tl.sum(total[j], axis=0), mask=m_c)


# --- the kernel ----------------------------------------------------------------------------------------------


@kernel
def lrpe_kernel(
    x: "tensors", dy: "tensors", o: "tensors", stat: "pointers", tables: "tables", p_partial, extras: "extras",
    N: "i32", first_index: "i32", num_grid: "i32", numbers: "numbers", V: tl.constexpr,
):  # fmt: skip
    """Apply either map, forward or backward, to one tensor or to q and k.

    All programs are on the x axis of the launch grid. Their number is T (programs for the token blocks) times G (groups
    of heads that share frequencies) times the number of parts of a group's rows. There are P runs of M parts, or P runs
    per sample with V.by_sample. Programs are in memory order: either the tokens come first, or the groups and parts of
    a sample do. A group has group0 heads of q and group1 heads of k. Its ``span`` rows are these heads, sample by
    sample. A part has ``per`` rows.

    Args:
        x, dy, o: input (B, H, N, D), gradient (B, H, N, D or 2D) and output (y or dx). Each holds a pointer and packed
            strides (b, h, n, d) for the only tensor or for q, followed by those for k.
        stat: maximum and sum over the sequence (2, B, H, D) for the only tensor or for q, and for k.
        tables: ω (G or 1, C, K), φ (G or 1, C), coordinates (..., num_grid, K), origin (..., K) of a grid, its scale
            and shift (K, 2), the mask of rotated tokens (..., num_grid) with one byte per token, amplitude (G or 1, C),
            and the tables of :func:`point_to_tables`. Any of them may be None.
        p_partial: float64 sums of s_j dΘ for dω and dφ (parts, T, G, J, C).
        extras: with a norm, pointers to the weight and bias of q and of k, a pointer to the partial sums of their
            gradients, and two packed numbers: q's parts per sample, and runs of parts. All rows of a part share their
            weights. Without a norm, the extras are None. With V.has_start, this argument is a pair of the extras and
            ``start`` of :func:`move_output`.
        first_index: grid index of token 0, which is negative if there are prefix tokens.
        numbers: packed numbers that describe the programs, the magic numbers and shifts for divisions by them, and the
            table strides and grid from ``pack_side`` in core/launching.py.
        V: compile-time settings, a :class:`lrpe_md.engine.core.call.Variant`.
    """
    programs, magics, shifts, steps, axes = numbers
    tokens_first, first, second, G, M, span, per, group0, group1, num_blocks, P, B = unpack_int32(programs)
    magic_first, magic_second, magic_g, magic_h, magic_p = unpack_int32(magics)
    shift_first, shift_second, shift_g, shift_h, shift_p = unpack_int32(shifts)
    omega_h, phase_h, amplitude_h, positions_b, rotated_b = unpack_numbers(steps)
    p_omega, p_phase, p_coords, p_origin, p_affine, p_rotated, p_amplitude, cos_sin = tables
    pid = tl.program_id(0)
    rest = divide(pid, magic_first, shift_first)
    d0 = pid - rest * first
    outer = divide(rest, magic_second, shift_second)
    d1 = rest - outer * second
    in_order = tokens_first != 0
    t = tl.where(in_order, d0, d1)
    inner = tl.where(in_order, d1, d0)
    T = tl.where(in_order, first, second)
    part = divide(inner, magic_g, shift_g)
    g = inner - part * G
    slot = outer * M + part
    norm_part = part
    run_index = outer
    sample = 0
    if V.by_sample:
        sample = divide(outer, magic_p, shift_p)
        outer -= sample * P
        if V.explicit:
            p_coords += sample.to(tl.int64) * positions_b
        elif V.has_origin:
            p_origin += sample.to(tl.int64) * positions_b
        if p_rotated is not None:
            p_rotated += sample.to(tl.int64) * rotated_b
    part += outer * M
    r_lo = part * per
    r_hi = tl.minimum(r_lo + per, span)

    heads = (group0 + group1, magic_h, shift_h, group0, group1)
    p_stat, p_stat_k = stat
    tensors = (x, dy, o, (p_stat, p_stat_k, B), extras)
    rows = (r_hi, sample, g, G, heads)
    if V.num_axes > 0:
        p_omega += g * omega_h
    if V.has_phase:
        p_phase += g * phase_h
    if p_amplitude is not None:
        p_amplitude += g * amplitude_h
    positions = (p_coords, p_origin, p_affine, unpack_int32(axes))
    o_n = tl.arange(0, V.block_n)
    n0 = t * V.block_n
    c0 = first_channel(V=V)
    o_c = tl.arange(0, V.block_c)
    if V.flat:
        o_b = n0 + o_n
        n0 = 0
        o_n = o_b // V.flat
        c0 = (o_b % V.flat * V.block_c)[:, None]  # equal in all blocks that the program visits
        o_c = c0 + o_c[None, :]
    m_c = None if V.num_channels % V.block_c == 0 else o_c < V.num_channels
    cos_sin_tables = point_to_tables(cos_sin, sample, g, c0, V=V) if V.tables != "none" else 0
    tables = (p_rotated, p_amplitude, cos_sin_tables, first_index, num_grid)
    weights = ()
    if V.has_weight or V.has_bias:
        norm = extras
        if V.has_start:
            norm, _ = extras
        p_weight, p_bias, p_weight_k, p_bias_k, p_dweight, norm_numbers = norm
        p_weights = (p_weight, p_bias, p_weight_k, p_bias_k)
        q_parts, num_runs = unpack_numbers(norm_numbers)
        is_k_part = norm_part >= q_parts
        norm_part = tl.where(is_k_part, norm_part - q_parts, norm_part)
        weight_unit = g * tl.where(is_k_part, M - q_parts, q_parts) + norm_part  # a head, or heads that share weights
        if V.need_dweight:
            partial_row = (tl.where(is_k_part, G * q_parts, 0) + weight_unit).to(tl.int64) * num_runs + run_index
            p_dweight += (partial_row * T + t) * (V.head_dim * V.token_groups * (V.has_weight + V.has_bias))
        if V.token_groups == 1:
            weights = load_weights(p_weights, is_k_part, weight_unit, 0, None, V=V)
    if not (V.need_dangles or V.need_dweight):
        loaded_rows = fetch_rows(tensors, r_lo, rows, n0, o_n, N - n0, c0, V)
        if V.rows_first:
            tl.debug_barrier()  # keeps the compiler from moving loads past this point
        omega = load_frequencies(p_omega, p_phase, o_c, m_c, V)
        cos, sin, _, _ = form_cos_sin(omega, positions, tables, n0, o_n, o_c, m_c, V)
        row_weights = (weights, 0)
        if V.token_groups > 1:
            groups = find_token_group(n0 + o_n + first_index, num_grid, V=V)[:, None]
            row_weights = (load_weights(p_weights, is_k_part, weight_unit, groups, None, V=V), groups)
        map_rows(loaded_rows, (cos, sin), o_n, c0, row_weights, (cos, ()), V=V)
    else:
        if V.early:
            launch_next_kernel()
        BLOCK_N: tl.constexpr = V.block_n
        J: tl.constexpr = V.num_axes + 1 if V.has_phase else V.num_axes
        EVERY: tl.constexpr = V.flat if V.flat else 1  # distance between blocks with the same channels
        omega = load_frequencies(p_omega, p_phase, o_c, m_c, V)
        total = (zeros(V=V, dtype=tl.float64),) * J if V.need_dangles else ()
        dweights = zero_weight_gradients(dtype=tl.float64, V=V)
        # These are initial values, which the first step of each block replaces.
        cos = zero_cos_sin(V=V)
        sin = cos
        dangles = zeros(V=V, dtype=tl.float64)
        o_g = tl.zeros([BLOCK_N], dtype=tl.int32)
        m_g = o_g > 0
        num_solo, steps, shared_block, shared_r0 = plan_walk(t, T, num_blocks, r_lo, r_hi, V)
        block = tl.where(num_solo > 0, t, shared_block)
        r0 = tl.where(num_solo > 0, r_lo, shared_r0)
        for i in tl.range(0, steps, num_stages=V.stages):
            if V.flat:
                o_n = (block * V.block_n + tl.arange(0, V.block_n)) // V.flat
            else:
                n0 = block * V.block_n
            loaded_rows = fetch_rows(tensors, r0, rows, n0, o_n, N - n0, c0, V)
            if (r0 == r_lo) | (i == num_solo):
                cos, sin, o_g, m_g = form_cos_sin(omega, positions, tables, n0, o_n, o_c, m_c, V)
                dangles = zeros(V=V, dtype=tl.float64)
            row_weights = (weights, 0)
            if V.token_groups > 1:
                groups = find_token_group(n0 + o_n + first_index, num_grid, V=V)[:, None]
                row_weights = (load_weights(p_weights, is_k_part, weight_unit, groups, None, V=V), groups)
            dangles, dweights = map_rows(loaded_rows, (cos, sin), o_n, c0, row_weights, (dangles, dweights), V=V)
            r0 += V.block_r
            is_done = r0 >= r_hi
            if V.need_dangles:
                if is_done | (i == steps - 1):
                    if V.dim == -2:  # tokens off the grid have factor 0, but their x̄ can be inf
                        dangles = tl.where(m_g[:, None], dangles, 0.0)
                    shares = weigh_tokens(o_g, m_g, positions, V)
                    new_total = ()
                    for j in tl.static_range(J):
                        new_total += (total[j] + shares[j][:, None] * dangles,)
                    total = new_total
            next_block = tl.where(i + 1 == num_solo, shared_block, block + tl.where(i < num_solo, T, EVERY))
            block = tl.where(is_done, next_block, block)
            r0 = tl.where(is_done, tl.where(i + 1 == num_solo, shared_r0, r_lo), r0)
        if V.need_dangles:
            p_partial += ((tl.cast(slot, tl.int64) * T + t) * G + g) * (J * V.num_channels)
            store_partial(p_partial, total, c0, o_c, m_c, V)
        if V.need_dweight:
            store_weight_gradients(p_dweight, dweights, V=V)
