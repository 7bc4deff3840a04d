"""Triton kernels: one for both maps, forward and backward; helpers for softmax over the sequence and for dω.

The formula is that of ``reference.py``. Names: p_ pointer, o_ offsets, m_ mask; tiles in registers carry no
prefix; s position, w frequency, BLOCK_N tokens and BLOCK_C channels (cosine) or pairs (rotate) a tile.

A program owns a block of tokens and a group of heads that share frequencies. It forms the angles of the block
once, and walks over its samples and heads, of q and then of k, with cos Θ and sin Θ in registers. Sizes are
run-time arguments throughout; strides come in units of 8 elements where everything is aligned to that, so
that loads are 16 bytes wide for any head_dim that is a multiple of 8.
"""

import triton
import triton.language as tl

# 1/2π = C_HI + C_LO with C_HI a float32: angles are in revolutions, as unevaluated sums of two float32.
C_HI = tl.constexpr(0.15915493667125702)
C_LO = tl.constexpr(6.420638326565253e-09)
INV_TAU = tl.constexpr(0.15915494309189535)
TAU = tl.constexpr(6.283185307179586)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: float32 near it are the integers
QUARTER_LO = tl.constexpr(-4.371139006309477e-08)  # π/2 less its float32


# --- positions and angles ----------------------------------------------------------------------------------


@triton.jit
def _divide(o, magic, shift):
    """o // n for 0 <= o < 2^31: a multiplication, since the hardware has no integer division."""
    return ((o.to(tl.int64) * magic) >> shift).to(tl.int32)


@triton.jit
def _round(x):
    """The nearest integer for |x| < 2^22, an integer near x beyond: two additions where floor is a conversion."""
    return (x + ROUND) - ROUND


@triton.jit
def _coordinate(
    o_g, m_g, p_coords, p_affine, n1, n2, n3, magic1, magic2, magic3, shift1, shift2, shift3,
    j: tl.constexpr, K: tl.constexpr, EXPLICIT: tl.constexpr, AFFINE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Position s_j of the tokens with index o_g on the grid, as hi + lo. n1 is the size of the fastest axis."""
    if EXPLICIT:
        s = tl.load(p_coords + o_g.to(tl.int64) * K + j, mask=m_g, other=0)
    else:
        FASTER: tl.constexpr = K - 1 - j
        s = o_g
        if FASTER >= 1:
            s = _divide(s, magic1, shift1)
        if FASTER >= 2:
            s = _divide(s, magic2, shift2)
        if FASTER >= 3:
            s = _divide(s, magic3, shift3)
        if j > 0:  # modulo
            if FASTER == 0:
                s = s - _divide(s, magic1, shift1) * n1
            elif FASTER == 1:
                s = s - _divide(s, magic2, shift2) * n2
            else:
                s = s - _divide(s, magic3, shift3) * n3
        if AFFINE:
            s = s.to(tl.float64) * tl.load(p_affine + 2 * j) + tl.load(p_affine + 2 * j + 1)
    if WIDE:
        s_hi = s.to(tl.float64)
        s_lo = tl.zeros_like(s_hi)
    elif EXPLICIT or AFFINE:
        s_hi = s.to(tl.float32)
        s_lo = (s - s_hi.to(s.dtype)).to(tl.float32)
    else:
        s_hi = s.to(tl.float32)  # exact: the launcher sends larger grids as AFFINE
        s_lo = tl.zeros_like(s_hi)
    return s_hi, s_lo


@triton.jit
def _turns(w, UNIT: tl.constexpr):
    """A frequency in radians as hi + lo turns (UNIT 1) or quarter turns (UNIT 4)."""
    if w.dtype == tl.float64:
        r = w * (INV_TAU * UNIT)
        hi = r.to(tl.float32)
        lo = (r - hi.to(tl.float64)).to(tl.float32)
    else:
        c_hi = tl.full(w.shape, C_HI * UNIT, tl.float32)
        hi = w * c_hi
        lo = tl.fma(w, tl.full(w.shape, C_LO * UNIT, tl.float32), tl.fma(w, c_hi, -hi))
    return hi, lo


@triton.jit
def _angle(
    p_omega, p_phase, p_coords, p_affine, p_theta, o_g, m_g, o_theta, m_theta, o_c, m_c, n1, n2, n3,
    magic1, magic2, magic3, shift1, shift2, shift3,
    C: tl.constexpr, K: tl.constexpr, EXPLICIT: tl.constexpr, AFFINE: tl.constexpr, LOAD_THETA: tl.constexpr,
    WIDE: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Θ (BLOCK_N, BLOCK_C) as a remainder in [-1/2, 1/2] and whole units, to be counted modulo a turn.

    The unit is a turn (FAST, whose whole part is of no use), a quarter turn, or float64 radians all in the
    remainder (WIDE).
    """
    whole = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    if LOAD_THETA:
        theta = tl.load(p_theta + o_theta[:, None] * C + o_c[None, :], mask=m_theta[:, None] & m_c[None, :], other=0)
        if WIDE:
            theta = theta.to(tl.float64)
        elif FAST:
            theta = theta * INV_TAU
        else:
            theta = theta * (4.0 * INV_TAU)
            whole = _round(theta)
            theta -= whole
    elif WIDE:
        theta = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float64)
        for j in tl.static_range(K):
            s, _ = _coordinate(
                o_g, m_g, p_coords, p_affine, n1, n2, n3, magic1, magic2, magic3, shift1, shift2, shift3,
                j, K, EXPLICIT, AFFINE, WIDE,
            )  # fmt: skip
            w = tl.load(p_omega + o_c * K + j, mask=m_c, other=0).to(tl.float64)
            theta += s[:, None] * w[None, :]
        if p_phase is not None:
            theta += tl.load(p_phase + o_c, mask=m_c, other=0).to(tl.float64)[None, :]
        theta = tl.where(m_g[:, None], theta, 0.0)
    else:
        # In units of a turn (FAST) or a quarter turn, which leaves smaller remainders to round.
        UNIT: tl.constexpr = 1.0 if FAST else 4.0
        part = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)  # Σ of s·hi less whole units, each exact to rounding
        low = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)  # Σ of what the float32 hi leaves out
        for j in tl.static_range(K):
            s_hi, s_lo = _coordinate(
                o_g, m_g, p_coords, p_affine, n1, n2, n3, magic1, magic2, magic3, shift1, shift2, shift3,
                j, K, EXPLICIT, AFFINE, WIDE,
            )  # fmt: skip
            w_hi, w_lo = _turns(tl.load(p_omega + o_c * K + j, mask=m_c, other=0), UNIT)
            s = tl.broadcast_to(s_hi[:, None], [BLOCK_N, BLOCK_C])
            w = tl.broadcast_to(w_hi[None, :], [BLOCK_N, BLOCK_C])
            n = _round(s * w)
            # An explicit fma: subtracting from the rounded product would count its residue twice once the
            # compiler contracts the two.
            part += tl.fma(s, w, -n)
            low += s_hi[:, None] * w_lo[None, :] + s_lo[:, None] * w_hi[None, :]
            if not FAST:
                whole += n - 4.0 * _round(n * 0.25)
        if p_phase is not None:  # one more axis: position φ, frequency 1
            phase = tl.load(p_phase + o_c, mask=m_c, other=0)
            f_hi = phase.to(tl.float32)
            f_lo = (phase - f_hi.to(phase.dtype)).to(tl.float32)
            one = tl.full([BLOCK_C], C_HI * UNIT, tl.float32)
            n = _round(f_hi * one)
            part += tl.fma(f_hi, one, -n)[None, :]
            low += (f_hi * (C_LO * UNIT) + f_lo * one)[None, :]
            if not FAST:
                whole += (n - 4.0 * _round(n * 0.25))[None, :]
        theta = part + low
        n = _round(theta)
        theta = tl.where(m_g[:, None], theta - n, 0.0)
        whole = tl.where(m_g[:, None], whole + n, 0.0)
    return theta, whole


@triton.jit
def _cos_sin(theta, whole, WIDE: tl.constexpr, FAST: tl.constexpr):
    """cos and sin of an angle from :func:`_angle`.

    FAST: the CUDA hardware's approximation, absolute error 2^-20.9 on [-π, π], under the rounding of a 16-bit
    result. Otherwise polynomials on [-π/4, π/4] (Cephes' coefficients), float32-accurate.
    """
    if WIDE:
        cos = tl.cos(theta)
        sin = tl.sin(theta)
    elif FAST:
        x = theta * TAU
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        quarter = tl.full(theta.shape, TAU / 4.0, tl.float32)
        x = theta * quarter
        x_lo = tl.fma(theta, quarter, -x) + theta * QUARTER_LO  # what rounding takes from x
        z = x * x
        s = (((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x_lo) + x
        c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
        q = whole.to(tl.int32) & 3
        odd = (q & 1) == 1
        cos = tl.where(odd, s, c)
        sin = tl.where(odd, c, s)
        cos = tl.where((q == 1) | (q == 2), -cos, cos)
        sin = tl.where(q >= 2, -sin, sin)
    return cos, sin


@triton.jit
def _radians(theta, whole, WIDE: tl.constexpr, FAST: tl.constexpr):
    """The angle in [-π, π] as float32, to be cached."""
    if WIDE:
        x = theta - TAU * tl.floor(theta * INV_TAU + 0.5)
    elif FAST:
        x = theta * TAU
    else:
        x = theta + (whole - 4.0 * tl.floor((whole + theta) * 0.25 + 0.5))
        x = x * (TAU / 4.0)
    return x.to(tl.float32)


# --- activations -------------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activate(x, ACT: tl.constexpr):
    if ACT == "relu":
        x = tl.where(x <= 0.0, 0.0, x)
    elif ACT == "sigmoid":
        x = _sigmoid(x)
    elif ACT == "silu":
        x = x * _sigmoid(x)
    elif ACT == "softplus":
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e  # log1p(e) = log(u) e / (u - 1), which repairs the rounding of u
        x = tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return x


@triton.jit
def _activate_backward(x, x_bar, dx_bar, ACT: tl.constexpr):
    if ACT == "relu":
        dx_bar = tl.where(x <= 0.0, 0.0, dx_bar)
    elif ACT == "sigmoid":
        dx_bar = dx_bar * x_bar * (1.0 - x_bar)
    elif ACT == "silu":
        s = _sigmoid(x)
        dx_bar = dx_bar * s * (1.0 + x * (1.0 - s))
    elif ACT == "softplus":
        dx_bar = dx_bar * _sigmoid(x)
    return dx_bar


# --- tiles -------------------------------------------------------------------------------------------------


@triton.jit
def _row(p, b, h, n0, stride_b, stride_h, stride_n, ALIGNED: tl.constexpr):
    """Pointer to token n0 of sample b, head h; 64 bits, so that no tensor is too large."""
    U: tl.constexpr = 8 if ALIGNED else 1
    p += (b * stride_b + h * stride_h + n0 * stride_n) * U
    if ALIGNED:
        p = tl.multiple_of(p, 16)  # on the sum: on an argument of the kernel the compiler ignores it
    return p


@triton.jit
def _tile(o_n, stride_n, o_d, stride_d, ALIGNED: tl.constexpr, LONG: tl.constexpr):
    """Offsets of a (tokens, channels) tile; LONG where a block of tokens spans 2^31 elements."""
    U: tl.constexpr = 8 if ALIGNED else 1
    if LONG:
        rows = o_n.to(tl.int64)[:, None] * (stride_n * U)
    else:
        rows = o_n[:, None] * (stride_n.to(tl.int32) * U)
    if ALIGNED:
        return rows + o_d[None, :]
    else:
        return rows + o_d[None, :] * stride_d


@triton.jit
def _load(
    p, o_n, m_n, stride_n, lo, n_d, stride_d,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Channels lo .. lo + n_d of a block of tokens, upcast."""
    o_d = tl.arange(0, BLOCK_D)
    mask = m_n[:, None] & (o_d < n_d)[None, :]
    x = tl.load(p + _tile(o_n, stride_n, lo + o_d, stride_d, ALIGNED, LONG), mask=mask, other=0.0)
    return x.to(tl.float64 if WIDE else tl.float32)


@triton.jit
def _store(p, value, o_n, m_n, stride_n, lo, n_d, ALIGNED: tl.constexpr, LONG: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    mask = m_n[:, None] & (o_d < n_d)[None, :]
    tl.store(p + _tile(o_n, stride_n, lo + o_d, 1, ALIGNED, LONG), value.to(p.dtype.element_ty), mask=mask)


@triton.jit
def _load_pairs(
    p, o_n, m_n, stride_n, lo, C: tl.constexpr, stride_d, INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        x = _load(p, o_n, m_n, stride_n, lo, 2 * C, stride_d, ALIGNED, LONG, WIDE, 2 * BLOCK_C)
        x1, x2 = tl.split(tl.reshape(x, [BLOCK_N, BLOCK_C, 2]))
    else:
        x1 = _load(p, o_n, m_n, stride_n, lo, C, stride_d, ALIGNED, LONG, WIDE, BLOCK_C)
        x2 = _load(p, o_n, m_n, stride_n, lo + C, C, stride_d, ALIGNED, LONG, WIDE, BLOCK_C)
    return x1, x2


@triton.jit
def _store_pairs(
    p, x1, x2, o_n, m_n, stride_n, lo, C: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        x = tl.reshape(tl.join(x1, x2), [BLOCK_N, 2 * BLOCK_C])
        _store(p, x, o_n, m_n, stride_n, lo, 2 * C, ALIGNED, LONG, 2 * BLOCK_C)
    else:
        _store(p, x1, o_n, m_n, stride_n, lo, C, ALIGNED, LONG, BLOCK_C)
        _store(p, x2, o_n, m_n, stride_n, lo + C, C, ALIGNED, LONG, BLOCK_C)


@triton.jit
def _softmax_sequence(x, p_stat, num_stats, lo, n_d, STEP: tl.constexpr, BLOCK_D: tl.constexpr):
    """x̄ from the maximum and the sum over the sequence, channels lo, lo + STEP, .."""
    o_d = tl.arange(0, BLOCK_D)
    top = tl.load(p_stat + lo + o_d * STEP, mask=o_d < n_d, other=0.0)
    total = tl.load(p_stat + num_stats + lo + o_d * STEP, mask=o_d < n_d, other=1.0)
    return tl.exp(x - top[None, :]) / total[None, :]


@triton.jit
def _masked_max(x, n_d, BLOCK_D: tl.constexpr):
    return tl.max(tl.where((tl.arange(0, BLOCK_D) < n_d)[None, :], x, float("-inf")), axis=1)


@triton.jit
def _masked_exp(x, top, n_d, BLOCK_D: tl.constexpr):
    return tl.where((tl.arange(0, BLOCK_D) < n_d)[None, :], tl.exp(x - top[:, None]), 0.0)


@triton.jit
def _add(total, lost, value):
    """Kahan's sum: a long walk over samples and heads loses nothing. The sum is total - lost."""
    value = value - lost
    longer = total + value
    return longer, (longer - total) - value


# --- the two maps ------------------------------------------------------------------------------------------


@triton.jit
def _cosine_row(
    p_x, p_dy, p_o, p_stat, num_stats, x_n, x_d, dy_n, dy_d, o_stride, cos, sin, dtheta, lost, o_n, m_n,
    D: tl.constexpr, ACT: tl.constexpr, DIM: tl.constexpr, BACKWARD: tl.constexpr, LOAD_X: tl.constexpr,
    NEED_DTHETA: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x -> [x̄ cos Θ, x̄ sin Θ], or the gradients: dx̄ = dy_cos cos Θ + dy_sin sin Θ."""
    if LOAD_X:
        x = _load(p_x, o_n, m_n, x_n, 0, D, x_d, ALIGNED, LONG, WIDE, BLOCK_C)
        if DIM == -1:
            e = _masked_exp(x, _masked_max(x, D, BLOCK_C), D, BLOCK_C)
            x_bar = e / tl.sum(e, axis=1)[:, None]
        elif DIM == -2:
            x_bar = _softmax_sequence(x, p_stat, num_stats, 0, D, 1, BLOCK_C)
        else:
            x_bar = _activate(x, ACT)
    if BACKWARD:
        dy_cos = _load(p_dy, o_n, m_n, dy_n, 0, D, dy_d, ALIGNED, LONG, WIDE, BLOCK_C)
        dy_sin = _load(p_dy, o_n, m_n, dy_n, D, D, dy_d, ALIGNED, LONG, WIDE, BLOCK_C)
        dx = dy_cos * cos + dy_sin * sin
        if NEED_DTHETA:
            dtheta, lost = _add(dtheta, lost, x_bar * (dy_sin * cos - dy_cos * sin))
        if DIM == -1:
            dx = x_bar * (dx - tl.sum(x_bar * dx, axis=1)[:, None])
        elif ACT != "none":
            dx = _activate_backward(x, x_bar, dx, ACT)
        _store(p_o, dx, o_n, m_n, o_stride, 0, D, ALIGNED, LONG, BLOCK_C)
    else:
        _store(p_o, x_bar * cos, o_n, m_n, o_stride, 0, D, ALIGNED, LONG, BLOCK_C)
        _store(p_o, x_bar * sin, o_n, m_n, o_stride, D, D, ALIGNED, LONG, BLOCK_C)
    return dtheta, lost


@triton.jit
def _rotate_row(
    p_x, p_dy, p_o, p_stat, num_stats, x_n, x_d, dy_n, dy_d, o_stride, cos, sin, dtheta, lost, o_n, m_n,
    D: tl.constexpr, C: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACT: tl.constexpr, DIM: tl.constexpr, BACKWARD: tl.constexpr, LOAD_X: tl.constexpr, NEED_DTHETA: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """(a, b) -> (a cos Θ - b sin Θ, a sin Θ + b cos Θ), or the gradients: the rotation by -Θ.

    The channels before START (head) and after the rotated ones (tail) pass as x̄.
    """
    TAIL: tl.constexpr = START + 2 * C
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    B_LO: tl.constexpr = START + 1 if INTERLEAVED else START + C
    if LOAD_X:
        xa, xb = _load_pairs(p_x, o_n, m_n, x_n, START, C, x_d, INTERLEAVED, ALIGNED, LONG, WIDE, BLOCK_N, BLOCK_C)
        if BLOCK_HEAD > 0:
            xh = _load(p_x, o_n, m_n, x_n, 0, START, x_d, ALIGNED, LONG, WIDE, BLOCK_HEAD)
        if BLOCK_TAIL > 0:
            xt = _load(p_x, o_n, m_n, x_n, TAIL, D - TAIL, x_d, ALIGNED, LONG, WIDE, BLOCK_TAIL)
        if DIM == -1:
            top = tl.maximum(_masked_max(xa, C, BLOCK_C), _masked_max(xb, C, BLOCK_C))
            if BLOCK_HEAD > 0:
                top = tl.maximum(top, _masked_max(xh, START, BLOCK_HEAD))
            if BLOCK_TAIL > 0:
                top = tl.maximum(top, _masked_max(xt, D - TAIL, BLOCK_TAIL))
            a_bar = _masked_exp(xa, top, C, BLOCK_C)
            b_bar = _masked_exp(xb, top, C, BLOCK_C)
            total = tl.sum(a_bar + b_bar, axis=1)
            if BLOCK_HEAD > 0:
                h_bar = _masked_exp(xh, top, START, BLOCK_HEAD)
                total += tl.sum(h_bar, axis=1)
            if BLOCK_TAIL > 0:
                t_bar = _masked_exp(xt, top, D - TAIL, BLOCK_TAIL)
                total += tl.sum(t_bar, axis=1)
            a_bar = a_bar / total[:, None]
            b_bar = b_bar / total[:, None]
            if BLOCK_HEAD > 0:
                h_bar = h_bar / total[:, None]
            if BLOCK_TAIL > 0:
                t_bar = t_bar / total[:, None]
        elif DIM == -2:
            a_bar = _softmax_sequence(xa, p_stat, num_stats, START, C, STEP, BLOCK_C)
            b_bar = _softmax_sequence(xb, p_stat, num_stats, B_LO, C, STEP, BLOCK_C)
            if BLOCK_HEAD > 0:
                h_bar = _softmax_sequence(xh, p_stat, num_stats, 0, START, 1, BLOCK_HEAD)
            if BLOCK_TAIL > 0:
                t_bar = _softmax_sequence(xt, p_stat, num_stats, TAIL, D - TAIL, 1, BLOCK_TAIL)
        else:
            a_bar = _activate(xa, ACT)
            b_bar = _activate(xb, ACT)
            if BLOCK_HEAD > 0:
                h_bar = _activate(xh, ACT)
            if BLOCK_TAIL > 0:
                t_bar = _activate(xt, ACT)
    if BACKWARD:
        ga, gb = _load_pairs(p_dy, o_n, m_n, dy_n, START, C, dy_d, INTERLEAVED, ALIGNED, LONG, WIDE, BLOCK_N, BLOCK_C)
        a = ga * cos + gb * sin
        b = gb * cos - ga * sin
        if NEED_DTHETA:
            dtheta, lost = _add(dtheta, lost, a_bar * b - b_bar * a)
        if BLOCK_HEAD > 0:
            h = _load(p_dy, o_n, m_n, dy_n, 0, START, dy_d, ALIGNED, LONG, WIDE, BLOCK_HEAD)
        if BLOCK_TAIL > 0:
            t = _load(p_dy, o_n, m_n, dy_n, TAIL, D - TAIL, dy_d, ALIGNED, LONG, WIDE, BLOCK_TAIL)
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
            a = _activate_backward(xa, a_bar, a, ACT)
            b = _activate_backward(xb, b_bar, b, ACT)
            if BLOCK_HEAD > 0:
                h = _activate_backward(xh, h_bar, h, ACT)
            if BLOCK_TAIL > 0:
                t = _activate_backward(xt, t_bar, t, ACT)
    else:
        a = a_bar * cos - b_bar * sin
        b = a_bar * sin + b_bar * cos
        if BLOCK_HEAD > 0:
            h = h_bar
        if BLOCK_TAIL > 0:
            t = t_bar
    _store_pairs(p_o, a, b, o_n, m_n, o_stride, START, C, INTERLEAVED, ALIGNED, LONG, BLOCK_N, BLOCK_C)
    if BLOCK_HEAD > 0:
        _store(p_o, h, o_n, m_n, o_stride, 0, START, ALIGNED, LONG, BLOCK_HEAD)
    if BLOCK_TAIL > 0:
        _store(p_o, t, o_n, m_n, o_stride, TAIL, D - TAIL, ALIGNED, LONG, BLOCK_TAIL)
    return dtheta, lost


@triton.jit
def _walk_heads(
    p_x, p_dy, p_o, p_stat, x_b, x_h, x_n, x_d, dy_b, dy_h, dy_n, dy_d, o_b, o_h, o_stride,
    b, h_lo, h_hi, n0, B, H, cos, sin, dtheta, lost, o_n, m_n,
    D: tl.constexpr, C: tl.constexpr, START: tl.constexpr, COSINE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACT: tl.constexpr, DIM: tl.constexpr, BACKWARD: tl.constexpr, LOAD_X: tl.constexpr, NEED_DTHETA: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """One tensor, sample b, heads h_lo .. h_hi."""
    for h in range(h_lo, h_hi):
        q_x = p_x
        if LOAD_X:
            q_x = _row(p_x, b, h, n0, x_b, x_h, x_n, ALIGNED)
        q_dy = p_dy
        if BACKWARD:
            q_dy = _row(p_dy, b, h, n0, dy_b, dy_h, dy_n, ALIGNED)
        q_o = _row(p_o, b, h, n0, o_b, o_h, o_stride, ALIGNED)
        q_stat = p_stat
        num_stats = tl.cast(B, tl.int64) * H * D
        if DIM == -2:
            q_stat = p_stat + (b * H + h) * D
        if COSINE:
            dtheta, lost = _cosine_row(
                q_x, q_dy, q_o, q_stat, num_stats, x_n, x_d, dy_n, dy_d, o_stride, cos, sin, dtheta, lost, o_n, m_n,
                D, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA, ALIGNED, LONG, WIDE, BLOCK_C,
            )  # fmt: skip
        else:
            dtheta, lost = _rotate_row(
                q_x, q_dy, q_o, q_stat, num_stats, x_n, x_d, dy_n, dy_d, o_stride, cos, sin, dtheta, lost, o_n, m_n,
                D, C, START, INTERLEAVED, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA, ALIGNED, LONG, WIDE,
                BLOCK_N, BLOCK_C, BLOCK_HEAD, BLOCK_TAIL,
            )  # fmt: skip
    return dtheta, lost


# --- kernels -----------------------------------------------------------------------------------------------

_POINTERS = [
    "p_x0", "p_dy0", "p_o0", "p_stat0", "p_x1", "p_dy1", "p_o1", "p_stat1",
    "p_omega", "p_phase", "p_coords", "p_affine", "p_theta", "p_partial",
]  # fmt: skip
_STRIDES = [
    f"{name}{i}_{axis}" for i in (0, 1) for name, axes in (("x", "bhnd"), ("dy", "bhnd"), ("o", "bhn")) for axis in axes
]
_SIZES = [
    "coords_b", "omega_h", "phase_h", "B", "H0", "H1", "N", "prefix", "num_grid", "start", "n1", "n2", "n3",
    "magic1", "magic2", "magic3", "shift1", "shift2", "shift3",
    "num_blocks", "T", "G", "PB", "per_b", "group0", "group1", "per_h0", "per_h1",
    "magic_t", "magic_g", "magic_b", "shift_t", "shift_g", "shift_b",
]  # fmt: skip


@triton.jit(do_not_specialize=_STRIDES + _SIZES, do_not_specialize_on_alignment=_POINTERS)
def lrpe_kernel(
    p_x0, p_dy0, p_o0, p_stat0, p_x1, p_dy1, p_o1, p_stat1,
    p_omega, p_phase, p_coords, p_affine, p_theta, p_partial,
    x0_b: "i64", x0_h: "i64", x0_n: "i64", x0_d: "i64", dy0_b: "i64", dy0_h: "i64", dy0_n: "i64", dy0_d: "i64",
    o0_b: "i64", o0_h: "i64", o0_n: "i64",
    x1_b: "i64", x1_h: "i64", x1_n: "i64", x1_d: "i64", dy1_b: "i64", dy1_h: "i64", dy1_n: "i64", dy1_d: "i64",
    o1_b: "i64", o1_h: "i64", o1_n: "i64",
    coords_b: "i64", omega_h: "i32", phase_h: "i32", B: "i32", H0: "i32", H1: "i32", N: "i32", prefix: "i32",
    num_grid: "i32", start: "i32", n1: "i32", n2: "i32", n3: "i32",
    magic1: "i64", magic2: "i64", magic3: "i64", shift1: "i32", shift2: "i32", shift3: "i32",
    num_blocks: "i32", T: "i32", G: "i32", PB: "i32", per_b: "i32",
    group0: "i32", group1: "i32", per_h0: "i32", per_h1: "i32",
    magic_t: "i64", magic_g: "i64", magic_b: "i64", shift_t: "i32", shift_g: "i32", shift_b: "i32",
    D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, START: tl.constexpr,
    COSINE: tl.constexpr, INTERLEAVED: tl.constexpr, ACT: tl.constexpr, DIM: tl.constexpr,
    BACKWARD: tl.constexpr, LOAD_X: tl.constexpr, EXPLICIT: tl.constexpr, BY_SAMPLE: tl.constexpr,
    AFFINE: tl.constexpr, LOAD_THETA: tl.constexpr, STORE_THETA: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Both maps, forward and backward, for one tensor or for q and k.

    Programs: T over the token blocks, G groups of heads that share frequencies, PB × PH parts of the samples
    and of a group's heads; all on the x axis of the launch grid, the tokens fastest. A part has per_b samples and
    per_h0, per_h1 of the group0, group1 heads of q and k in a group.

    x (B, H, N, D) inputs, dy (B, H, N, D or 2D) gradients, o the outputs y or dx, stat (2, B, H, D) maximum and
    sum over the sequence, omega (G or 1, C, K), phase (G or 1, C), coords (.., num_grid, K), affine (K, 2),
    theta (G, N, C) cached angles in radians, partial (PH, PB, T, G, J, C) float64 sums of s_j dΘ for dω and dφ.
    """
    NEED_DTHETA: tl.constexpr = p_partial is not None
    HAS_K: tl.constexpr = p_o1 is not None
    pid = tl.program_id(0)
    part = _divide(pid, magic_t, shift_t)
    t = pid - part * T
    g = part
    part = _divide(part, magic_g, shift_g)
    g -= part * G
    ph = _divide(part, magic_b, shift_b)
    b_lo = (part - ph * PB) * per_b
    b_hi = tl.minimum(b_lo + per_b, B)
    h0_lo = g * group0 + ph * per_h0
    h0_hi = tl.minimum(h0_lo + per_h0, (g + 1) * group0)
    h1_lo = g * group1 + ph * per_h1
    h1_hi = tl.minimum(h1_lo + per_h1, (g + 1) * group1)

    p_omega += g * omega_h
    if p_phase is not None:
        p_phase += g * phase_h
    o_n = tl.arange(0, BLOCK_N)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_j = tl.arange(0, BLOCK_J)
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    partial = tl.zeros([BLOCK_J, BLOCK_C], dtype=tl.float64)

    for block in range(t, num_blocks, T):
        n0 = tl.cast(block, tl.int64) * BLOCK_N
        m_n = block * BLOCK_N + o_n < N
        o_g = block * BLOCK_N + o_n + (start - prefix)
        m_g = m_n & (o_g >= 0) & (o_g < num_grid)
        o_g = tl.where(m_g, o_g, 0)
        o_theta = tl.cast(g, tl.int64) * N + n0 + o_n
        dtheta = tl.zeros([BLOCK_N, BLOCK_C], dtype=ACC)
        lost = tl.zeros([BLOCK_N, BLOCK_C], dtype=ACC)
        if not BY_SAMPLE:
            theta, whole = _angle(
                p_omega, p_phase, p_coords, p_affine, p_theta, o_g, m_g, o_theta, m_n, o_c, m_c, n1, n2, n3,
                magic1, magic2, magic3, shift1, shift2, shift3,
                C, K, EXPLICIT, AFFINE, LOAD_THETA, WIDE, FAST, BLOCK_N, BLOCK_C,
            )  # fmt: skip
            cos, sin = _cos_sin(theta, whole, WIDE, FAST)
            if STORE_THETA:
                if part == 0:
                    radians = _radians(theta, whole, WIDE, FAST)
                    m_theta = m_n[:, None] & m_c[None, :]
                    tl.store(p_theta + o_theta[:, None] * C + o_c[None, :], radians, mask=m_theta)
        for i in range(b_lo, b_hi):
            b = tl.cast(i, tl.int64)
            q_coords = p_coords
            if BY_SAMPLE:
                q_coords = p_coords + b * coords_b
                theta, whole = _angle(
                    p_omega, p_phase, q_coords, p_affine, p_theta, o_g, m_g, o_theta, m_n, o_c, m_c, n1, n2, n3,
                    magic1, magic2, magic3, shift1, shift2, shift3,
                    C, K, EXPLICIT, AFFINE, LOAD_THETA, WIDE, FAST, BLOCK_N, BLOCK_C,
                )  # fmt: skip
                cos, sin = _cos_sin(theta, whole, WIDE, FAST)
                dtheta = tl.zeros([BLOCK_N, BLOCK_C], dtype=ACC)
                lost = tl.zeros([BLOCK_N, BLOCK_C], dtype=ACC)
            dtheta, lost = _walk_heads(
                p_x0, p_dy0, p_o0, p_stat0, x0_b, x0_h, x0_n, x0_d, dy0_b, dy0_h, dy0_n, dy0_d, o0_b, o0_h, o0_n,
                b, h0_lo, h0_hi, n0, B, H0, cos, sin, dtheta, lost, o_n, m_n,
                D, C, START, COSINE, INTERLEAVED, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA, ALIGNED, LONG, WIDE,
                BLOCK_N, BLOCK_C, BLOCK_HEAD, BLOCK_TAIL,
            )  # fmt: skip
            if HAS_K:
                dtheta, lost = _walk_heads(
                    p_x1, p_dy1, p_o1, p_stat1, x1_b, x1_h, x1_n, x1_d, dy1_b, dy1_h, dy1_n, dy1_d, o1_b, o1_h, o1_n,
                    b, h1_lo, h1_hi, n0, B, H1, cos, sin, dtheta, lost, o_n, m_n,
                    D, C, START, COSINE, INTERLEAVED, ACT, DIM, BACKWARD, LOAD_X, NEED_DTHETA, ALIGNED, LONG, WIDE,
                    BLOCK_N, BLOCK_C, BLOCK_HEAD, BLOCK_TAIL,
                )  # fmt: skip
            if NEED_DTHETA and BY_SAMPLE:
                partial = _weigh(
                    partial, dtheta, lost, o_j, o_g, m_g, p_phase, q_coords, p_affine, n1, n2, n3,
                    magic1, magic2, magic3, shift1, shift2, shift3, K, EXPLICIT, AFFINE, WIDE,
                )  # fmt: skip
        if NEED_DTHETA and not BY_SAMPLE:
            partial = _weigh(
                partial, dtheta, lost, o_j, o_g, m_g, p_phase, p_coords, p_affine, n1, n2, n3,
                magic1, magic2, magic3, shift1, shift2, shift3, K, EXPLICIT, AFFINE, WIDE,
            )  # fmt: skip

    if NEED_DTHETA:
        J: tl.constexpr = K if p_phase is None else K + 1
        slot = (tl.cast(part, tl.int64) * T + t) * G + g
        tl.store(
            p_partial + (slot * J + o_j[:, None]) * C + o_c[None, :], partial, mask=(o_j < J)[:, None] & m_c[None, :]
        )


@triton.jit
def _weigh(
    partial, dtheta, lost, o_j, o_g, m_g, p_phase, p_coords, p_affine, n1, n2, n3,
    magic1, magic2, magic3, shift1, shift2, shift3,
    K: tl.constexpr, EXPLICIT: tl.constexpr, AFFINE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add Σ_n s_j dΘ to row j, and Σ_n dΘ (the phase's gradient) to row K; float64, once for a block of tokens."""
    dtheta = tl.where(m_g[:, None], dtheta.to(tl.float64) - lost.to(tl.float64), 0.0)
    for j in tl.static_range(K):
        s_hi, s_lo = _coordinate(
            o_g, m_g, p_coords, p_affine, n1, n2, n3, magic1, magic2, magic3, shift1, shift2, shift3,
            j, K, EXPLICIT, AFFINE, WIDE,
        )  # fmt: skip
        s = s_hi.to(tl.float64) + s_lo.to(tl.float64)
        row = tl.sum(s[:, None] * dtheta, axis=0)
        partial += tl.where((o_j == j)[:, None], row[None, :], 0.0)
    if p_phase is not None:
        row = tl.sum(dtheta, axis=0)
        partial += tl.where((o_j == K)[:, None], row[None, :], 0.0)
    return partial


@triton.jit(
    do_not_specialize=["rows", "G", "omega_heads", "phase_heads"],
    do_not_specialize_on_alignment=["p_partial", "p_domega", "p_dphase"],
)
def reduce_partial_kernel(
    p_partial, p_domega, p_dphase, rows: "i32", G: "i32", omega_heads: "i32", phase_heads: "i32",
    C: tl.constexpr, K: tl.constexpr, J: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum partial (rows, G, J, C) to dω (omega_heads, C, K) and dφ (phase_heads, C), in a fixed order.

    One program for each row j of each head of dω, then for each head of dφ. Shared frequencies (one head) sum
    over the groups too.
    """
    pid = tl.program_id(0)
    num_omega = 0
    if p_domega is not None:
        num_omega = omega_heads * K
    is_omega = pid < num_omega
    head = tl.where(is_omega, pid // K, pid - num_omega)
    j = tl.where(is_omega, pid % K, K)
    shared = tl.where(is_omega, omega_heads, phase_heads) < G
    num = tl.where(shared, rows * G, rows)
    step = tl.where(shared, 1, G).to(tl.int64) * J * C
    o_c = tl.arange(0, BLOCK_C)
    o_r = tl.arange(0, BLOCK_R)
    p = p_partial + tl.where(shared, 0, head).to(tl.int64) * J * C + j * C + o_c[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=p_partial.dtype.element_ty)
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


_SEQUENCE_SIZES = ["x_b", "x_h", "x_n", "x_d", "dx_b", "dx_h", "dx_n", "g_b", "g_h", "g_n", "B", "H", "N"]


@triton.jit(do_not_specialize=_SEQUENCE_SIZES, do_not_specialize_on_alignment=["p_x", "p_g", "p_dx", "p_stat"])
def softmax_sequence_kernel(
    p_x, p_g, p_dx, p_stat, x_b: "i64", x_h: "i64", x_n: "i64", x_d: "i64", g_b: "i64", g_h: "i64", g_n: "i64",
    dx_b: "i64", dx_h: "i64", dx_n: "i64", B: "i32", H: "i32", N: "i32",
    D: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
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
    b = (row // H).to(tl.int64)
    h = row % H
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_d = lo + o_d < D
    p_stat += tl.cast(row, tl.int64) * D + lo
    num_stats = tl.cast(B, tl.int64) * H * D
    if BACKWARD:
        dot = tl.zeros([BLOCK_D], dtype=ACC)
        for n0 in range(0, N, BLOCK_N):
            m_n = n0 + o_n < N
            x = _load(
                _row(p_x, b, h, n0, x_b, x_h, x_n, ALIGNED),
                o_n,
                m_n,
                x_n,
                lo,
                D - lo,
                x_d,
                ALIGNED,
                LONG,
                WIDE,
                BLOCK_D,
            )
            g = _load(
                _row(p_g, b, h, n0, g_b, g_h, g_n, ALIGNED), o_n, m_n, g_n, lo, D - lo, 1, ALIGNED, LONG, WIDE, BLOCK_D
            )
            dot += tl.sum(_softmax_sequence(x, p_stat, num_stats, 0, D - lo, 1, BLOCK_D) * g, axis=0)
        for n0 in range(0, N, BLOCK_N):
            m_n = n0 + o_n < N
            x = _load(
                _row(p_x, b, h, n0, x_b, x_h, x_n, ALIGNED),
                o_n,
                m_n,
                x_n,
                lo,
                D - lo,
                x_d,
                ALIGNED,
                LONG,
                WIDE,
                BLOCK_D,
            )
            g = _load(
                _row(p_g, b, h, n0, g_b, g_h, g_n, ALIGNED), o_n, m_n, g_n, lo, D - lo, 1, ALIGNED, LONG, WIDE, BLOCK_D
            )
            dx = _softmax_sequence(x, p_stat, num_stats, 0, D - lo, 1, BLOCK_D) * (g - dot[None, :])
            _store(
                _row(p_dx, b, h, n0, dx_b, dx_h, dx_n, ALIGNED), dx, o_n, m_n, dx_n, lo, D - lo, ALIGNED, LONG, BLOCK_D
            )
    else:
        top = tl.full([BLOCK_D], float("-inf"), dtype=ACC)
        total = tl.zeros([BLOCK_D], dtype=ACC)
        for n0 in range(0, N, BLOCK_N):
            m_n = n0 + o_n < N
            x = _load(
                _row(p_x, b, h, n0, x_b, x_h, x_n, ALIGNED),
                o_n,
                m_n,
                x_n,
                lo,
                D - lo,
                x_d,
                ALIGNED,
                LONG,
                WIDE,
                BLOCK_D,
            )
            x = tl.where(m_n[:, None], x, float("-inf"))
            higher = tl.maximum(top, tl.max(x, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # while all is -inf
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[None, :]), axis=0)
            top = higher
        tl.store(p_stat + o_d, top, mask=m_d)
        tl.store(p_stat + num_stats + o_d, total, mask=m_d)
