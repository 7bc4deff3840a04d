"""Compute coordinates, then angles, then cos and sin for a block of tokens from the indices of the tokens."""

import triton
import triton.language as tl

from .tiles import zeros

# An angle is the unevaluated sum of two float32 numbers, in half turns (or in turns if V.fast). 1/2π = C_HI + C_LO in
# float32.
C_HI = tl.constexpr(0.15915493667125702)
C_LO = tl.constexpr(6.420638326565253e-09)
INV_TAU = tl.constexpr(0.15915494309189535)
TAU = tl.constexpr(6.283185307179586)
TWO_31 = tl.constexpr(2147483648.0)
TWO_32 = tl.constexpr(4294967296.0)
ONE_LESS = tl.constexpr(0.99999994)  # the largest float32 below 1
HALF_TURN = tl.constexpr(2.0**-32)  # half turns per unit of a fixed-point number that was shifted left by one bit
QUARTER = tl.constexpr(2**30)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds a float32 to an integer
PI_HI = tl.constexpr(3.1415927410125732)  # π as float32, and its rounding error
PI_LO = tl.constexpr(-8.742277657347586e-08)


@triton.jit
def divide(o, magic, shift):
    """Return o // n for 0 <= o < 2^31. This uses a multiplication, because GPUs have no integer division."""
    return (tl.umulhi(tl.cast(o, tl.uint32) * 2, tl.cast(magic, tl.uint32)) >> shift).to(tl.int32)


@triton.jit
def find_index(o_g, grid, j: tl.constexpr, V: tl.constexpr):
    """Return the int32 index along axis j of the tokens with grid index o_g."""
    n1, n2, n3, magic1, magic2, magic3, shift1, shift2, shift3 = grid  # n1: the size of the fastest axis
    FASTER: tl.constexpr = V.num_axes - 1 - j
    s = o_g
    if FASTER >= 1:
        s = divide(s, magic1, shift1)
    if FASTER >= 2:
        s = divide(s, magic2, shift2)
    if FASTER >= 3:
        s = divide(s, magic3, shift3)
    if j > 0:  # modulo
        if FASTER == 0:
            s = s - divide(s, magic1, shift1) * n1
        elif FASTER == 1:
            s = s - divide(s, magic2, shift2) * n2
        else:
            s = s - divide(s, magic3, shift3) * n3
    return s


@triton.jit
def find_coordinate(o_g, m_g, positions, j: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr):
    """Return coordinate s_j of the tokens with grid index o_g, as (hi, lo). Off the grid, o_g and s_j are 0.

    ``positions`` holds pointers to the coordinates, to the grid's origin, and to its scale and shift. The last element
    holds the grid's sizes. With WIDE, hi is the float64 coordinate, and lo is 0.
    """
    p_coords, p_origin, p_affine, grid = positions
    if V.explicit:
        s = tl.load(p_coords + o_g.to(tl.int64) * V.num_axes + j, mask=m_g, other=0)
    else:
        s = find_index(o_g, grid, j, V)
        if V.has_origin:
            s = tl.where(m_g, s + tl.load(p_origin + j).to(tl.int64), 0)
        if V.affine:
            s = s.to(tl.float64) * tl.load(p_affine + 2 * j) + tl.load(p_affine + 2 * j + 1)
            s = tl.where(m_g, s, 0.0)
    if WIDE:
        s_hi = s.to(tl.float64)
        s_lo = tl.zeros_like(s_hi)
    elif V.explicit or V.affine or V.has_origin:
        s_hi = s.to(tl.float32)
        s_lo = (s - s_hi.to(s.dtype)).to(tl.float32)
    else:
        s_hi = s.to(tl.float32)  # exact, because the launcher makes larger grids affine where that matters
        s_lo = tl.zeros_like(s_hi)
    return s_hi, s_lo


@triton.jit
def drop_turns(s, w, ANY_SIZE: tl.constexpr):
    """Return s·w minus the nearest integer, and an int32 with the same lowest bit as that integer.

    |s·w| must be below 2^22 unless ANY_SIZE is set. The fma is explicit. Otherwise, the compiler might fuse the product
    with the subtraction, and the product's rounding error would count twice.
    """
    if ANY_SIZE:
        negated_turns = tl.ceil(-0.5 - s * w)
        shifted = (negated_turns - 2.0 * tl.floor(negated_turns * 0.5)) + ROUND
    else:
        shifted = tl.fma(s, w, ROUND)  # cheaper than ceil, which compiles to a conversion
        negated_turns = ROUND - shifted  # negating the difference shifted - ROUND would cost another subtraction
    return tl.fma(s, w, negated_turns), shifted.to(tl.int32, bitcast=True)


@triton.jit
def to_turns(w, UNIT: tl.constexpr):
    """Convert a frequency from radians to turns (UNIT 1) or half turns (UNIT 2), and return it as (hi, lo)."""
    if w.dtype == tl.float64:
        r = w * (INV_TAU * UNIT)
        hi = r.to(tl.float32)
        lo = (r - hi.to(tl.float64)).to(tl.float32)
    else:
        c_hi = tl.full(w.shape, C_HI * UNIT, tl.float32)
        hi = tl.fma(w, c_hi, tl.zeros_like(w))  # an fma, because a product could be fused with a later subtraction
        lo = tl.fma(w, tl.full(w.shape, C_LO * UNIT, tl.float32), tl.fma(w, c_hi, -hi))
    return hi, lo


@triton.jit
def to_fixed(hi, lo):
    """Convert hi + lo turns, modulo 1, to an int32 in units of 2^-32 plus a uint32 in units of 2^-64."""
    size = tl.abs(hi)
    fraction = size - tl.floor(size)  # exact, while subtracting a larger integer would not be
    m = tl.where(hi < 0.0, -fraction, fraction) * TWO_31  # |m| < 2^31 has 24 bits, some of them after the binary point
    n = m.to(tl.int32)
    m = tl.fma(lo, tl.full(lo.shape, TWO_32, tl.float32), (m - n.to(tl.float32)) * 2.0)
    whole = tl.floor(m)
    part = tl.minimum(m - whole, ONE_LESS) * TWO_32
    return (n << 1) + whole.to(tl.int32), part.to(tl.uint32)


@triton.jit
def mark_non_finite(values):
    """Return 1 for channels where a frequency or phase is infinite or NaN, and 0 for all other channels."""
    zero = values[0].to(tl.float32) * 0.0
    for i in tl.static_range(1, len(values)):
        zero += values[i].to(tl.float32) * 0.0
    return (zero != zero).to(tl.uint32)


@triton.jit
def load_frequencies(p_omega, p_phase, o_c, m_c, V: tl.constexpr):
    """Load the frequency ω_j of each axis in half turns, and any phase φ in radians. Return each as (hi, lo).

    Some variants use other units. With V.wide, all values are in float64 radians. With V.fast, hi of ω is in turns, but
    lo is in radians. With V.fixed, all values are in fixed-point turns, and the lowest bit of the first lo marks
    channels with non-finite values. o_c has shape (block_c) or (tokens, block_c). m_c is its mask, or None if all
    channels exist.
    """
    K: tl.constexpr = V.num_axes
    channels = ()
    for j in tl.static_range(K):
        channels += (load_channels(p_omega + o_c * K + j, m_c),)
    if V.has_phase:
        channels += (load_channels(p_phase + o_c, m_c),)
    omega = ()
    for j in tl.static_range(len(channels)):
        w = channels[j]
        if V.fixed:
            hi, lo = to_turns(w, UNIT=1.0)
            hi, lo = to_fixed(hi, lo)
            if j == 0:
                lo = (lo & 0xFFFFFFFE) | mark_non_finite(channels)
        elif V.wide or j == K:
            hi = w.to(tl.float64 if V.wide else tl.float32)
            lo = (w - hi.to(w.dtype)).to(hi.dtype)
        else:
            hi, lo = to_turns(w, UNIT=1.0 if V.fast else 2.0)
            if V.fast:
                lo *= TAU
        omega += ((hi[None, :], lo[None, :]) if len(hi.shape) == 1 else (hi, lo),)
    return omega


@triton.jit
def load_channels(p, m_c):
    if m_c is None:
        return tl.load(p)
    else:
        return tl.load(p, mask=m_c, other=0)


@triton.jit
def form_angles(omega, positions, o_g, m_g, V: tl.constexpr):
    """Compute Θ as a remainder in [-1/2, 1/2] half turns, and an int32 whose lowest bit adds a half turn.

    Both have shape (block_n, block_c). The unit is a half turn, because smaller remainders have smaller rounding
    errors. With V.fast, the remainder is in radians and may span a few turns. With V.wide, the whole angle in float64
    radians takes its place. In both cases, the int32 is unused.
    """
    if V.wide:
        return form_wide_angles(omega, positions, o_g, m_g, V)
    elif V.fixed:
        if V.fast:
            return count_angles(omega, positions, o_g, m_g, V)
        else:
            return form_fixed_angles(omega, positions, o_g, m_g, V)
    else:
        return form_float_angles(omega, positions, o_g, m_g, V)


@triton.jit
def form_wide_angles(omega, positions, o_g, m_g, V: tl.constexpr):
    """Compute Θ in float64 radians."""
    K: tl.constexpr = V.num_axes
    angles = zeros(V, dtype=tl.float64)
    for j in tl.static_range(K):
        s, _ = find_coordinate(o_g, m_g, positions, j, V, WIDE=True)
        w, _ = omega[j]
        angles += s[:, None] * w
    if V.has_phase:
        phase, _ = omega[K]
        angles += tl.where(m_g[:, None], phase, 0.0)
    return angles, zeros(V, dtype=tl.int32)


@triton.jit
def form_fixed_angles(omega, positions, o_g, m_g, V: tl.constexpr):
    """Compute Θ from the indices of a grid in fixed-point arithmetic.

    Integer overflow drops whole turns. The error per axis is at most 2^-32 of a turn, anywhere on the grid.
    """
    K: tl.constexpr = V.num_axes
    _, _, _, grid = positions
    turn = zeros(V, dtype=tl.int32)
    for j in tl.static_range(K):
        s = find_index(o_g, grid, j, V)[:, None]
        w_hi, w_lo = omega[j]
        turn += s * w_hi + tl.umulhi(s.to(tl.uint32), w_lo).to(tl.int32)
    if V.has_phase:  # like an additional axis with frequency φ, whose positions are 1 on the grid and 0 off it
        phase, _ = omega[K]
        turn += m_g.to(tl.int32)[:, None] * phase
    angles = (turn << 1).to(tl.float32) * HALF_TURN
    half = (turn + QUARTER) >> 31
    # Setting all bits gives a NaN. Loading the non-finite value itself would cost a register per channel, or a branch.
    _, bits = omega[0]
    nan_mask = (bits << 31).to(tl.int32, bitcast=True) >> 31
    angles = (angles.to(tl.int32, bitcast=True) | nan_mask).to(tl.float32, bitcast=True)
    return angles, half


@triton.jit
def count_angles(omega, positions, o_g, m_g, V: tl.constexpr):
    """Compute Θ like :func:`form_fixed_angles`, but in radians and in the range from one to two turns.

    The bits of the fixed-point number are reused as those of a float32, which avoids a conversion. With each step along
    the grid, the error grows by up to 2^-32 of a turn.
    """
    K: tl.constexpr = V.num_axes
    _, _, _, grid = positions
    _, bits = omega[0]
    one = ((bits << 31).to(tl.int32, bitcast=True) >> 31) | 0x3F800000  # or a NaN
    turn = zeros(V, dtype=tl.int32)
    for j in tl.static_range(K):
        w_hi, w_lo = omega[j]
        turn += find_index(o_g, grid, j, V)[:, None] * (w_hi + (w_lo >> 31).to(tl.int32))
    if V.has_phase:
        phase, _ = omega[K]
        turn += m_g.to(tl.int32)[:, None] * phase
    turn = (turn.to(tl.uint32, bitcast=True) >> 9).to(tl.int32, bitcast=True) | one
    return turn.to(tl.float32, bitcast=True) * TAU, zeros(V, dtype=tl.int32)


@triton.jit
def form_float_angles(omega, positions, o_g, m_g, V: tl.constexpr):
    """Compute Θ in double-float arithmetic, dropping whole turns and summing the low parts separately."""
    K: tl.constexpr = V.num_axes
    BLOCK_N: tl.constexpr = V.block_n
    BLOCK_C: tl.constexpr = V.block_c
    UNIT: tl.constexpr = 1.0 if V.fast else 2.0
    LOW: tl.constexpr = TAU if V.fast else 1.0  # converts low parts to their unit
    ANY_SIZE: tl.constexpr = V.explicit or V.affine or V.has_origin  # the launcher makes large grids affine
    half = zeros(V, dtype=tl.int32)
    for j in tl.static_range(K):
        s_hi, s_lo = find_coordinate(o_g, m_g, positions, j, V, WIDE=False)
        w_hi, w_lo = omega[j]
        s = tl.broadcast_to(s_hi[:, None], [BLOCK_N, BLOCK_C])
        w = tl.broadcast_to(w_hi, [BLOCK_N, BLOCK_C])
        a, parity = drop_turns(s, w, ANY_SIZE=ANY_SIZE)
        if j == 0:
            part = a  # sum of s·hi without whole units; each term is rounded once
            low = s * w_lo  # sum of the low parts
        else:
            part += a
            low = tl.fma(s, w_lo, low)
        half += parity
        if ANY_SIZE:
            low += s_lo[:, None] * (w_hi * LOW)
    if V.has_phase:  # like an additional axis with frequency 1, whose positions are φ on the grid and 0 off it
        f_hi, f_lo = omega[K]
        one = tl.full(f_hi.shape, C_HI * UNIT, tl.float32)
        a, parity = drop_turns(f_hi, one, ANY_SIZE=True)
        on_grid = m_g[:, None]
        part += tl.where(on_grid, a, 0.0)
        low += tl.where(on_grid, tl.fma(f_hi, tl.full(f_hi.shape, C_LO * UNIT, tl.float32), f_lo * one) * LOW, 0.0)
        half += tl.where(on_grid, parity, 0)
    if V.fast:  # the hardware functions tolerate a few extra turns
        angles = tl.fma(part, tl.full(part.shape, TAU, tl.float32), low)
    else:
        angles = part + low
        shifted = angles + ROUND
        angles -= shifted - ROUND
        half += shifted.to(tl.int32, bitcast=True)
    return angles, half


@triton.jit
def take_cos_sin(angles, half, V: tl.constexpr):
    """Compute cos and sin of an angle from :func:`form_angles`.

    V.fast selects CUDA's approximations, whose absolute error is 2^-20.5 on [-2π, 2π] (PTX ISA, sin.approx). A sum over
    axes may span a few turns, where the error is slightly larger, but still below the rounding error of 16-bit results.
    Otherwise, minimax polynomials on [-π/2, π/2] have an error of at most 1.3e-7.
    """
    if V.wide:
        cos = tl.cos(angles)
        sin = tl.sin(angles)
    elif V.fast:
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angles], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angles], tl.float32, True, 1)
    else:
        z = angles * angles
        s = tl.fma(z, 7.750529050827026e-2, -5.982178449630737e-1)
        s = tl.fma(s, z, 2.55006742477417)
        s = tl.fma(s, z, -5.167709827423096)
        s = tl.fma(s, z, PI_LO)
        s = tl.fma(angles, PI_HI, angles * s)
        c = tl.fma(z, -2.3991823196411133e-2, 2.3469902575016022e-1)
        c = tl.fma(c, z, -1.335164189338684)
        c = tl.fma(c, z, 4.0587053298950195)
        c = tl.fma(c, z, -4.934802055358887)
        c = tl.fma(c, z, 1.0)
        sign = half << 31
        cos = (c.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        sin = (s.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return cos, sin
