"""x̄ = act(x) and its derivative, on tiles (tokens, channels).

PTX: 0, or CUDA's own approximations of 2^x and 1/x, accurate to 2 units in the last place of a float32, may be used
(1), and polynomials for 16-bit results (2).
exp(x) = 2^(x log2 e) is then off by the rounding of its argument, a relative 6e-8 |x|, as it is in Triton's exp.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x, PTX: tl.constexpr):
    if PTX:
        x = x * LOG2_E
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp(x)


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    return reciprocal(1.0 + exp(-x, PTX), PTX)


@triton.jit
def _add_log1p(e, y, PTX: tl.constexpr):
    """y + log(1 + e), 0 <= e <= 1: minimax polynomials for log(1 + e)/e, relative error 1.4e-7, 2^-14 if PTX is 2."""
    if e.dtype == tl.float64:
        u = 1.0 + e  # log(u) e / (u - 1) repairs the rounding of u
        return y + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    elif PTX == 2:
        p = 4.13472056388855e-2 * e - 1.5742705762386322e-1
        p = p * e + 3.063008785247803e-1
        p = p * e - 4.969778060913086e-1
        return (p * e + 9.999432563781738e-1) * e + y
    else:
        p = -3.413804806768894e-3 * e + 2.0630458369851112e-2
        p = p * e - 5.845554545521736e-2
        p = p * e + 1.0759567469358444e-1
        p = p * e - 1.5401174128055573e-1
        p = p * e + 1.9710858166217804e-1
        p = p * e - 2.4961474537849426e-1
        p = p * e + 3.333077132701874e-1
        p = p * e - 4.9999940395355225e-1
        return (p * e + 1.0) * e + y


@triton.jit
def activate(x, ACT: tl.constexpr, PTX: tl.constexpr):
    if ACT == "relu":
        x = tl.where(x <= 0.0, 0.0, x)
    elif ACT == "sigmoid":
        x = sigmoid(x, PTX)
    elif ACT == "silu":
        x = x * sigmoid(x, PTX)
    elif ACT == "softplus":
        x = _add_log1p(exp(-tl.abs(x), PTX), tl.maximum(x, 0.0), PTX)
    return x


@triton.jit
def activate_backward(x, x_bar, dx_bar, ACT: tl.constexpr, PTX: tl.constexpr):
    if ACT == "relu":
        dx_bar = tl.where(x <= 0.0, 0.0, dx_bar)
    elif ACT == "sigmoid":
        dx_bar = dx_bar * x_bar * (1.0 - x_bar)
    elif ACT == "silu":
        s = sigmoid(x, PTX)
        dx_bar = dx_bar * s * (1.0 + x * (1.0 - s))
    elif ACT == "softplus":
        dx_bar = dx_bar * sigmoid(x, PTX)
    return dx_bar


@triton.jit
def masked_max(x, n_d: tl.constexpr, BLOCK_D: tl.constexpr):
    if n_d < BLOCK_D:
        x = tl.where((tl.arange(0, BLOCK_D) < n_d)[None, :], x, float("-inf"))
    return tl.max(x, axis=1)


@triton.jit
def masked_exp(x, top, n_d: tl.constexpr, PTX: tl.constexpr, BLOCK_D: tl.constexpr):
    e = exp(x - top[:, None], PTX)
    if n_d < BLOCK_D:
        e = tl.where((tl.arange(0, BLOCK_D) < n_d)[None, :], e, 0.0)
    return e


@triton.jit
def softmax_sequence(x, p_stat, num_stats, o_d, m_d, PTX: tl.constexpr):
    """x̄ from the row's maximum and sum over the sequence, for channels o_d (1, channels)."""
    top = tl.load(p_stat + o_d, mask=m_d, other=0.0)
    total = tl.load(p_stat + num_stats + o_d, mask=m_d, other=1.0)
    return exp(x - top, PTX) * reciprocal(total, PTX)
