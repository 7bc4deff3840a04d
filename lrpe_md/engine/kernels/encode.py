"""Both maps, forward and backward, in one kernel.

A program owns a block of tokens and BLOCK_R rows (heads of samples, of q and then of k) that share frequencies. It asks
for its rows, forms the angles of the block while they are on their way, and maps row after row with cos Θ and sin Θ in
registers. Where the frequencies need a gradient, programs are few and walk over many blocks and rows: in one loop, so
that the rows of a next block can be on their way, too.

The rows are unrolled: as a dimension of the tile they would be spread over threads, which then form the same angles.
"""

import triton
import triton.language as tl

from .activations import activate, activate_backward, masked_exp, masked_max, reciprocal, softmax_sequence
from .angles import angle, coordinate, cos_sin, divide, frequencies, load_channels, radians
from .signature import kernel
from .sums import launch_second_pass
from .tiles import apart, load, load_pairs, origin, pair_channels, row_at, store, store_pairs, upcast

# --- the two maps, on tiles (tokens, channels) ---------------------------------------------------------------


@triton.jit
def _cosine(
    x, dy_cos, dy_sin, place, cos, sin, o_n, c0,
    D: tl.constexpr, SIN_FIRST: tl.constexpr, ACT: tl.constexpr, DIM: tl.constexpr, BACKWARD: tl.constexpr,
    LOAD_X: tl.constexpr, NEED_DTHETA: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr, PTX: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x -> [x̄ cos Θ, x̄ sin Θ], or the gradients: dx̄ = dy_cos cos Θ + dy_sin sin Θ, and dΘ of each row."""
    ACC: tl.constexpr = cos.dtype
    _, _, o_row, num, p_stat, num_stats = place
    m_n = o_n < num
    dtheta = cos
    if LOAD_X:
        x = upcast(x, ACC, PTX)
        if DIM == -1:
            e = masked_exp(x, masked_max(x, D, BLOCK_C), D, PTX, BLOCK_C)
            x_bar = e * reciprocal(tl.sum(e, axis=1), PTX)[:, None]
        elif DIM == -2:
            o_d = tl.arange(0, BLOCK_C)[None, :]
            x_bar = softmax_sequence(x, p_stat, num_stats, o_d, o_d < D, PTX)
        else:
            x_bar = activate(x, ACT, PTX)
    if BACKWARD:
        dy_cos = upcast(dy_cos, ACC, PTX)
        dy_sin = upcast(dy_sin, ACC, PTX)
        dx = dy_cos * cos + dy_sin * sin
        if NEED_DTHETA:
            dtheta = x_bar * (dy_sin * cos - dy_cos * sin)
        if DIM == -1:
            dx = x_bar * (dx - tl.sum(x_bar * dx, axis=1)[:, None])
        elif ACT != "none":
            dx = activate_backward(x, x_bar, dx, ACT, PTX)
        store(o_row, dx, o_n, m_n, c0, 0, D, ALIGNED, LONG, BLOCK_C)
    else:
        store(o_row, x_bar * cos, o_n, m_n, c0, D if SIN_FIRST else 0, D, ALIGNED, LONG, BLOCK_C)
        store(o_row, x_bar * sin, o_n, m_n, c0, 0 if SIN_FIRST else D, D, ALIGNED, LONG, BLOCK_C)
    return dtheta


@triton.jit
def _rotate(
    xa, xb, ga, gb, place, cos, sin, o_n, c0,
    D: tl.constexpr, C: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    ACT: tl.constexpr, DIM: tl.constexpr, BACKWARD: tl.constexpr, LOAD_X: tl.constexpr, NEED_DTHETA: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """(a, b) -> (a cos Θ - b sin Θ, a sin Θ + b cos Θ), or the gradients: the rotation by -Θ, and dΘ of each row.

    The channels before START (head) and after the rotated ones (tail) pass as x̄.
    """
    ACC: tl.constexpr = cos.dtype
    TAIL: tl.constexpr = START + 2 * C
    x_row, dy_row, o_row, num, p_stat, num_stats = place
    m_n = o_n < num
    dtheta = cos
    if LOAD_X:
        xa, xb = apart(upcast(xa, ACC, PTX), upcast(xb, ACC, PTX), INTERLEAVED, BLOCK_N, BLOCK_C)
        if BLOCK_HEAD > 0:
            xh = upcast(load(x_row, o_n, m_n, origin(), 0, START, ALIGNED, LONG, BLOCK_HEAD), ACC, PTX)
        if BLOCK_TAIL > 0:
            xt = upcast(load(x_row, o_n, m_n, origin(), TAIL, D - TAIL, ALIGNED, LONG, BLOCK_TAIL), ACC, PTX)
        if DIM == -1:
            top = tl.maximum(masked_max(xa, C, BLOCK_C), masked_max(xb, C, BLOCK_C))
            if BLOCK_HEAD > 0:
                top = tl.maximum(top, masked_max(xh, START, BLOCK_HEAD))
            if BLOCK_TAIL > 0:
                top = tl.maximum(top, masked_max(xt, D - TAIL, BLOCK_TAIL))
            a_bar = masked_exp(xa, top, C, PTX, BLOCK_C)
            b_bar = masked_exp(xb, top, C, PTX, BLOCK_C)
            total = tl.sum(a_bar + b_bar, axis=1)
            if BLOCK_HEAD > 0:
                h_bar = masked_exp(xh, top, START, PTX, BLOCK_HEAD)
                total += tl.sum(h_bar, axis=1)
            if BLOCK_TAIL > 0:
                t_bar = masked_exp(xt, top, D - TAIL, PTX, BLOCK_TAIL)
                total += tl.sum(t_bar, axis=1)
            scale = reciprocal(total, PTX)[:, None]
            a_bar = a_bar * scale
            b_bar = b_bar * scale
            if BLOCK_HEAD > 0:
                h_bar = h_bar * scale
            if BLOCK_TAIL > 0:
                t_bar = t_bar * scale
        elif DIM == -2:
            o_a, o_b = pair_channels(origin(), START, C, INTERLEAVED, SECTIONS, BLOCK_C)
            m_c = tl.arange(0, BLOCK_C)[None, :] < C
            a_bar = softmax_sequence(xa, p_stat, num_stats, o_a, m_c, PTX)
            b_bar = softmax_sequence(xb, p_stat, num_stats, o_b, m_c, PTX)
            if BLOCK_HEAD > 0:
                o_h = tl.arange(0, BLOCK_HEAD)[None, :]
                h_bar = softmax_sequence(xh, p_stat, num_stats, o_h, o_h < START, PTX)
            if BLOCK_TAIL > 0:
                o_t = TAIL + tl.arange(0, BLOCK_TAIL)[None, :]
                t_bar = softmax_sequence(xt, p_stat, num_stats, o_t, o_t < D, PTX)
        else:
            a_bar = activate(xa, ACT, PTX)
            b_bar = activate(xb, ACT, PTX)
            if BLOCK_HEAD > 0:
                h_bar = activate(xh, ACT, PTX)
            if BLOCK_TAIL > 0:
                t_bar = activate(xt, ACT, PTX)
    if BACKWARD:
        ga, gb = apart(upcast(ga, ACC, PTX), upcast(gb, ACC, PTX), INTERLEAVED, BLOCK_N, BLOCK_C)
        a = ga * cos + gb * sin
        b = gb * cos - ga * sin
        if NEED_DTHETA:
            dtheta = a_bar * b - b_bar * a
        if BLOCK_HEAD > 0:
            h = upcast(load(dy_row, o_n, m_n, origin(), 0, START, ALIGNED, LONG, BLOCK_HEAD), ACC, PTX)
        if BLOCK_TAIL > 0:
            t = upcast(load(dy_row, o_n, m_n, origin(), TAIL, D - TAIL, ALIGNED, LONG, BLOCK_TAIL), ACC, PTX)
        if DIM == -1:
            dot = tl.sum(a_bar * a + b_bar * b, axis=1)
            if BLOCK_HEAD > 0:
                dot += tl.sum(h_bar * h, axis=1)
            if BLOCK_TAIL > 0:
                dot += tl.sum(t_bar * t, axis=1)
            a = a_bar * (a - dot[:, None])
            b = b_bar * (b - dot[:, None])
            if BLOCK_HEAD > 0:
                h = h_bar * (h - dot[:, None])
            if BLOCK_TAIL > 0:
                t = t_bar * (t - dot[:, None])
        elif ACT != "none":
            a = activate_backward(xa, a_bar, a, ACT, PTX)
            b = activate_backward(xb, b_bar, b, ACT, PTX)
            if BLOCK_HEAD > 0:
                h = activate_backward(xh, h_bar, h, ACT, PTX)
            if BLOCK_TAIL > 0:
                t = activate_backward(xt, t_bar, t, ACT, PTX)
    else:
        a = a_bar * cos - b_bar * sin
        b = a_bar * sin + b_bar * cos
        if BLOCK_HEAD > 0:
            h = h_bar
        if BLOCK_TAIL > 0:
            t = t_bar
    store_pairs(o_row, a, b, o_n, m_n, c0, START, C, INTERLEAVED, SECTIONS, ALIGNED, LONG, BLOCK_N, BLOCK_C)
    if BLOCK_HEAD > 0:
        store(o_row, h, o_n, m_n, origin(), 0, START, ALIGNED, LONG, BLOCK_HEAD)
    if BLOCK_TAIL > 0:
        store(o_row, t, o_n, m_n, origin(), TAIL, D - TAIL, ALIGNED, LONG, BLOCK_TAIL)
    return dtheta


# --- rows ----------------------------------------------------------------------------------------------------


@triton.jit
def _row(r, r_hi, sample, g, heads, HAS_K: tl.constexpr):
    """Sample, head and tensor (is it k?) of row r of group g, and whether it is the program's."""
    per_sample, magic, shift, group0, group1 = heads
    i = divide(r, magic, shift)
    h = r - i * per_sample
    is_k = False
    if HAS_K:
        is_k = h >= group0
        h = tl.where(is_k, g * group1 + h - group0, g * group0 + h)
    else:
        h += g * group0
    return sample + i, h, is_k, r < r_hi


@triton.jit
def _fetch(
    x, dy, o, stat, r0, r_hi, sample, g, heads, n0, o_n, num_n, c0,
    D: tl.constexpr, C: tl.constexpr, START: tl.constexpr, COSINE: tl.constexpr, SIN_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    DIM: tl.constexpr, BACKWARD: tl.constexpr, LOAD_X: tl.constexpr, HAS_K: tl.constexpr, ALIGNED: tl.constexpr,
    LONG: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For each of rows r0 .. r0 + BLOCK_R: x and dy as one tile (twice) or as two, and where the row is.

    Where one of x and dy is not read the other stands for it. Where: places of x, dy and the output, number of tokens,
    pointer to the maximum over the sequence and from there to the sum.
    """
    fetched = ()
    for i in tl.static_range(BLOCK_R):
        b, h, is_k, mine = _row(r0 + i, r_hi, sample, g, heads, HAS_K)
        num = tl.where(mine, num_n, 0)
        o_row = row_at(o, is_k, b, h, n0, HAS_K, ALIGNED, LONG)
        if LOAD_X:
            x_row = row_at(x, is_k, b, h, n0, HAS_K, ALIGNED, LONG)
            if COSINE:
                xa = load(x_row, o_n, o_n < num, c0, 0, D, ALIGNED, LONG, BLOCK_C)
                xb = xa
            else:
                xa, xb = load_pairs(x_row, o_n, o_n < num, c0, START, C, INTERLEAVED, SECTIONS, ALIGNED, LONG, BLOCK_C)
        if BACKWARD:
            dy_row = row_at(dy, is_k, b, h, n0, HAS_K, ALIGNED, LONG)
            if COSINE:
                ga = load(dy_row, o_n, o_n < num, c0, D if SIN_FIRST else 0, D, ALIGNED, LONG, BLOCK_C)
                gb = load(dy_row, o_n, o_n < num, c0, 0 if SIN_FIRST else D, D, ALIGNED, LONG, BLOCK_C)
            else:
                ga, gb = load_pairs(dy_row, o_n, o_n < num, c0, START, C, INTERLEAVED, SECTIONS, ALIGNED, LONG, BLOCK_C)
        if not LOAD_X:
            x_row, xa, xb = dy_row, ga, gb
        if not BACKWARD:
            dy_row, ga, gb = x_row, xa, xb
        if DIM == -2:
            p_stat0, p_stat1, B, H0, H1 = stat
            num_heads = tl.where(is_k, H1, H0).to(tl.int64)
            q_stat = tl.where(is_k, p_stat1, p_stat0) if HAS_K else p_stat0
            q_stat += tl.where(mine, (b * num_heads + h) * D, 0)
            num_stats = num_heads * B * D
        else:
            q_stat, num_stats = 0, 0
        fetched += ((xa, xb, ga, gb, (x_row, dy_row, o_row, num, q_stat, num_stats)),)
    return fetched


@triton.jit
def _angles(
    omega, p_phase, p_coords, p_affine, p_rotated, p_amplitude, p_theta, g, slot, n0, N, first_index, num_grid,
    o_n, o_c, m_c, grid, C: tl.constexpr, K: tl.constexpr, EXPLICIT: tl.constexpr, AFFINE: tl.constexpr,
    LOAD_THETA: tl.constexpr, STORE_THETA: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr, FIXED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """cos Θ and sin Θ of tokens n0 .. n0 + BLOCK_N; their index on the grid (0 off it) and whether they are on it."""
    m_n = n0 + o_n < N
    o_g = n0 + o_n + first_index
    m_g = o_g.to(tl.uint32, bitcast=True) < num_grid.to(tl.uint32, bitcast=True)  # what is negative is large
    if p_rotated is not None:
        m_g = m_g & (tl.load(p_rotated + o_g, mask=m_g, other=0) != 0)
    o_g = tl.where(m_g, o_g, 0)
    o_theta = tl.cast(g, tl.int64) * N + n0 + o_n
    theta, half = angle(
        omega, p_phase, p_coords, p_affine, p_theta, o_g, m_g, o_theta, m_n, o_c, grid,
        C, K, EXPLICIT, AFFINE, LOAD_THETA, WIDE, FAST, FIXED, BLOCK_N, BLOCK_C,
    )  # fmt: skip
    cos, sin = cos_sin(theta, half, WIDE, FAST)
    if p_amplitude is not None:
        amplitude = load_channels(p_amplitude + o_c, m_c).to(cos.dtype)
        gain = tl.where(m_g[:, None], amplitude if FLAT else amplitude[None, :], 1.0)
        cos *= gain
        sin *= gain
    if STORE_THETA:
        if slot == 0:
            m_theta = m_n[:, None] & (o_c < C)
            tl.store(p_theta + o_theta[:, None] * C + o_c, radians(theta, half, WIDE, FAST), mask=m_theta)
    return cos, sin, o_g, m_g


@triton.jit
def _map(
    fetched, cos, sin, o_n, c0, dtheta,
    D: tl.constexpr, C: tl.constexpr, START: tl.constexpr, COSINE: tl.constexpr, SIN_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    ACT: tl.constexpr, DIM: tl.constexpr, BACKWARD: tl.constexpr, LOAD_X: tl.constexpr, NEED_DTHETA: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, PTX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Map fetched rows; dtheta with theirs added."""
    for i in tl.static_range(BLOCK_R):
        xa, xb, ga, gb, place = fetched[i]
        if COSINE:
            row_dtheta = _cosine(
                xa, ga, gb, place, cos, sin, o_n, c0,
                D, SIN_FIRST, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA, ALIGNED, LONG, PTX, BLOCK_C,
            )  # fmt: skip
        else:
            row_dtheta = _rotate(
                xa, xb, ga, gb, place, cos, sin, o_n, c0,
                D, C, START, INTERLEAVED, SECTIONS, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA, ALIGNED, LONG, PTX,
                BLOCK_N, BLOCK_C, BLOCK_HEAD, BLOCK_TAIL,
            )  # fmt: skip
        if NEED_DTHETA:  # rows and tokens masked off have read dy = 0
            if DIM == -2:  # but their x̄ can be inf
                row_dtheta = tl.where((o_n < place[3])[:, None], row_dtheta, 0.0)
            pair = row_dtheta if i % 2 == 0 else pair + row_dtheta
            if i % 2 == 1 or i == BLOCK_R - 1:  # a conversion costs as much as eight additions
                dtheta += pair.to(tl.float64)
    return dtheta


@triton.jit
def _weights(
    o_g, m_g, p_phase, p_coords, p_affine, grid,
    K: tl.constexpr, EXPLICIT: tl.constexpr, AFFINE: tl.constexpr,
):  # fmt: skip
    """What dΘ of a token counts for dω_j, s_j, and for dφ, 1: float64 (BLOCK_N) each."""
    weights = ()
    for j in tl.static_range(K):
        s, _ = coordinate(o_g, m_g, p_coords, p_affine, grid, j, K, EXPLICIT, AFFINE, True)
        weights += (s,)
    if p_phase is not None:
        weights += (m_g.to(tl.float64),)
    return weights


@triton.jit
def _walk(t, T, num_blocks, r_lo, r_hi, EVERY: tl.constexpr, BLOCK_R: tl.constexpr):
    """Program t's walk through all rows of a block of tokens, then those of the next: steps of BLOCK_R rows.

    In as many rounds as are full it has every T-th block to itself, side by side with its neighbours; what is left is
    shared evenly by the programs with the same channels (every EVERY-th). Returns the steps alone, all steps, and the
    block and the row where its share begins.
    """
    first = t % EVERY
    walkers = T // EVERY
    blocks = (num_blocks - first + EVERY - 1) // EVERY
    rounds = blocks // walkers
    row_blocks = tl.maximum(r_hi - r_lo + BLOCK_R - 1, 0) // BLOCK_R
    left = (blocks - rounds * walkers) * row_blocks
    share = (left + walkers - 1) // walkers
    begin = tl.minimum(t // EVERY * share, left)
    skipped = begin // tl.maximum(row_blocks, 1)
    alone = rounds * row_blocks
    steps = alone + tl.minimum(share, left - begin)
    return alone, steps, first + rounds * T + skipped * EVERY, r_lo + (begin - skipped * row_blocks) * BLOCK_R


# --- the kernel ----------------------------------------------------------------------------------------------


@kernel
def lrpe_kernel(
    p_x0, p_dy0, p_o0, p_stat0, p_x1, p_dy1, p_o1, p_stat1,
    p_omega, p_phase, p_coords, p_affine, p_rotated, p_amplitude, p_theta, p_partial,
    # In the order of use: the fewer lines of the constant cache a program reads, the sooner it begins.
    x0_b: "i64", x0_h: "i64", x0_n: "i64", x0_d: "i64", o0_b: "i64", o0_h: "i64", o0_n: "i64",
    N: "i32", prefix: "i32", num_grid: "i32", start: "i32", n1: "i32", magic1: "u32", shift1: "i32", omega_h: "i32",
    tokens_first: "i32", first: "i32", second: "i32", G: "i32", M: "i32", span: "i32", per: "i32",
    group0: "i32", group1: "i32", magic_first: "u32", magic_second: "u32", magic_g: "u32", magic_h: "u32",
    shift_first: "i32", shift_second: "i32", shift_g: "i32", shift_h: "i32",
    dy0_b: "i64", dy0_h: "i64", dy0_n: "i64", dy0_d: "i64", x1_b: "i64", x1_h: "i64", x1_n: "i64", x1_d: "i64",
    dy1_b: "i64", dy1_h: "i64", dy1_n: "i64", dy1_d: "i64", o1_b: "i64", o1_h: "i64", o1_n: "i64",
    n2: "i32", n3: "i32", magic2: "u32", magic3: "u32", shift2: "i32", shift3: "i32", num_blocks: "i32",
    phase_h: "i32", amplitude_h: "i32", coords_b: "i64", rotated_b: "i64", P: "i32", magic_p: "u32", shift_p: "i32",
    B: "i32", H0: "i32", H1: "i32",
    D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, START: tl.constexpr,
    COSINE: tl.constexpr, SIN_FIRST: tl.constexpr, INTERLEAVED: tl.constexpr,
    SECTIONS: tl.constexpr, ACT: tl.constexpr, DIM: tl.constexpr,
    BACKWARD: tl.constexpr, LOAD_X: tl.constexpr, EXPLICIT: tl.constexpr, BY_SAMPLE: tl.constexpr,
    AFFINE: tl.constexpr, LOAD_THETA: tl.constexpr, STORE_THETA: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr, PTX: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, FLAT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """Both maps, forward and backward, for one tensor or for q and k.

    Programs, all on the x axis of the launch grid: T over the token blocks, G groups of heads that share frequencies,
    and parts of a group's rows: M that share a sample, P times these, and all that for each sample where each has
    coordinates of its own (BY_SAMPLE). The order follows memory: tokens first, or groups and parts of a sample. A
    group has group0 heads of q and group1 of k; its span rows are these, sample by sample, and a part has per of them.

    x (B, H, N, D) inputs, dy (B, H, N, D or 2D) gradients, o the outputs y or dx, stat (2, B, H, D) maximum and
    sum over the sequence, omega (G or 1, C, K), phase (G or 1, C), coords (.., num_grid, K), or (.., 1, K), the origin
    of a grid (not EXPLICIT), affine (K, 2), rotated (.., num_grid) bytes, amplitude (G or 1, C), theta (G, N, C) cached
    angles in radians, partial (parts, T, G, J, C) float64 sums of s_j dΘ for dω and dφ.

    FLAT: not 0 where the channels are no power of two and x̄ needs no sum over them: the number of blocks of BLOCK_C
    channels, and tiles have BLOCK_N of all the tokens' blocks, so that no thread idles on channels that are not there.
    EARLY: the second pass of dω may be launched as soon as all programs of this one run. ROWS_FIRST: frequencies are
    read after the rows.
    """
    NEED_DTHETA: tl.constexpr = p_partial is not None
    HAS_K: tl.constexpr = p_o1 is not None
    FUNCTIONS: tl.constexpr = 2 if FAST else 1 if PTX else 0
    # Where a position is an index, unless the hardware's approximations leave nothing to gain from exact angles.
    FIXED: tl.constexpr = p_coords is None and not (AFFINE or WIDE or FAST)
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
    sample = 0
    if BY_SAMPLE:
        sample = divide(outer, magic_p, shift_p)
        outer -= sample * P
        p_coords += sample.to(tl.int64) * coords_b
        if p_rotated is not None:
            p_rotated += sample.to(tl.int64) * rotated_b
    part += outer * M
    r_lo = part * per
    r_hi = tl.minimum(r_lo + per, span)

    grid = (n1, n2, n3, magic1, magic2, magic3, shift1, shift2, shift3)
    heads = (group0 + group1, magic_h, shift_h, group0, group1)
    one = tl.full([], 1, tl.int64)
    x = (p_x0, (x0_b, x0_h, x0_n, x0_d), p_x1, (x1_b, x1_h, x1_n, x1_d))
    dy = (p_dy0, (dy0_b, dy0_h, dy0_n, dy0_d), p_dy1, (dy1_b, dy1_h, dy1_n, dy1_d))
    o = (p_o0, (o0_b, o0_h, o0_n, one), p_o1, (o1_b, o1_h, o1_n, one))
    stat = (p_stat0, p_stat1, B, H0, H1)
    p_omega += g * omega_h
    if p_phase is not None:
        p_phase += g * phase_h
    if p_amplitude is not None:
        p_amplitude += g * amplitude_h
    o_n = tl.arange(0, BLOCK_N)
    n0 = t * BLOCK_N
    c0 = origin()
    o_c = tl.arange(0, BLOCK_C)
    if FLAT:
        rows = n0 + o_n
        n0 = 0
        o_n = rows // FLAT
        c0 = (rows % FLAT * BLOCK_C)[:, None]  # also of every FLAT-th block from here on
        o_c = c0 + o_c[None, :]
    m_c = None if C % BLOCK_C == 0 else o_c < C
    if not NEED_DTHETA:
        fetched = _fetch(
            x, dy, o, stat, r_lo, r_hi, sample, g, heads, n0, o_n, N - n0, c0,
            D, C, START, COSINE, SIN_FIRST, INTERLEAVED, SECTIONS, DIM, BACKWARD, LOAD_X, HAS_K, ALIGNED, LONG,
            BLOCK_R, BLOCK_C,
        )  # fmt: skip
        if ROWS_FIRST:
            tl.debug_barrier()  # which no load can be moved across
        omega = frequencies(p_omega, p_phase, o_c, m_c, K, WIDE, FAST, FIXED)
        cos, sin, _, _ = _angles(
            omega, p_phase, p_coords, p_affine, p_rotated, p_amplitude, p_theta, g, slot, n0, N, start - prefix,
            num_grid, o_n, o_c, m_c, grid,
            C, K, EXPLICIT, AFFINE, LOAD_THETA, STORE_THETA, WIDE, FAST, FIXED, BLOCK_N, BLOCK_C, FLAT,
        )  # fmt: skip
        _map(
            fetched, cos, sin, o_n, c0, cos,
            D, C, START, COSINE, SIN_FIRST, INTERLEAVED, SECTIONS, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA, ALIGNED,
            LONG, FUNCTIONS, BLOCK_R, BLOCK_N, BLOCK_C, BLOCK_HEAD, BLOCK_TAIL,
        )  # fmt: skip
    else:
        if EARLY:
            launch_second_pass()
        J: tl.constexpr = K if p_phase is None else K + 1
        EVERY: tl.constexpr = FLAT if FLAT else 1  # blocks with the same channels
        omega = frequencies(p_omega, p_phase, o_c, m_c, K, WIDE, FAST, FIXED)
        total = ()
        for _ in tl.static_range(J):
            total += (tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float64),)
        # What a block's first step sets.
        cos = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float64 if WIDE else tl.float32)
        sin = cos
        dtheta = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float64)
        o_g = tl.zeros([BLOCK_N], dtype=tl.int32)
        m_g = o_g > 0
        alone, steps, shared_block, shared_r0 = _walk(t, T, num_blocks, r_lo, r_hi, EVERY, BLOCK_R)
        block = tl.where(alone > 0, t, shared_block)
        r0 = tl.where(alone > 0, r_lo, shared_r0)
        for i in tl.range(0, steps, num_stages=STAGES):
            if FLAT:
                o_n = (block * BLOCK_N + tl.arange(0, BLOCK_N)) // FLAT
            else:
                n0 = block * BLOCK_N
            fetched = _fetch(
                x, dy, o, stat, r0, r_hi, sample, g, heads, n0, o_n, N - n0, c0,
                D, C, START, COSINE, SIN_FIRST, INTERLEAVED, SECTIONS, DIM, BACKWARD, LOAD_X, HAS_K, ALIGNED, LONG,
                BLOCK_R, BLOCK_C,
            )  # fmt: skip
            if (r0 == r_lo) | (i == alone):
                cos, sin, o_g, m_g = _angles(
                    omega, p_phase, p_coords, p_affine, p_rotated, p_amplitude, p_theta, g, slot, n0, N, start - prefix,
                    num_grid, o_n, o_c, m_c, grid,
                    C, K, EXPLICIT, AFFINE, LOAD_THETA, STORE_THETA, WIDE, FAST, FIXED, BLOCK_N, BLOCK_C, FLAT,
                )  # fmt: skip
                dtheta = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float64)
            dtheta = _map(
                fetched, cos, sin, o_n, c0, dtheta,
                D, C, START, COSINE, SIN_FIRST, INTERLEAVED, SECTIONS, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA,
                ALIGNED, LONG, FUNCTIONS, BLOCK_R, BLOCK_N, BLOCK_C, BLOCK_HEAD, BLOCK_TAIL,
            )  # fmt: skip
            r0 += BLOCK_R
            done = r0 >= r_hi
            if done | (i == steps - 1):
                if DIM == -2:  # tokens off the grid weigh 0, but their x̄ can be inf
                    dtheta = tl.where(m_g[:, None], dtheta, 0.0)
                weights = _weights(o_g, m_g, p_phase, p_coords, p_affine, grid, K, EXPLICIT, AFFINE)
                added = ()
                for j in tl.static_range(J):
                    added += (total[j] + weights[j][:, None] * dtheta,)
                total = added
            next_block = tl.where(i + 1 == alone, shared_block, block + tl.where(i < alone, T, EVERY))
            block = tl.where(done, next_block, block)
            r0 = tl.where(done, tl.where(i + 1 == alone, shared_r0, r_lo), r0)
        p_partial += ((tl.cast(slot, tl.int64) * T + t) * G + g) * (J * C)
        for j in tl.static_range(J):
            if FLAT:
                for first_c in range(0, C, BLOCK_C):
                    mine = tl.broadcast_to(c0 == first_c, [BLOCK_N, BLOCK_C])
                    channel_sums = tl.sum(tl.where(mine, total[j], 0.0), axis=0)
                    tl.store(p_partial + j * C + first_c + tl.arange(0, BLOCK_C), channel_sums)
            elif m_c is None:
                tl.store(p_partial + j * C + o_c, tl.sum(total[j], axis=0))
            else:
                tl.store(p_partial + j * C + o_c, tl.sum(total[j], axis=0), mask=m_c)
