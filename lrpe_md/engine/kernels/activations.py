"""Compute x̄ = act(x) and its derivative, with a branch for each entry of ``reference.ACTIVATIONS``.

If V.functions is 0, Triton's functions are used. If it is 1, CUDA's approximations of 2^x and 1/x are used, with errors
of at most 2 units in the last place of a float32. Like Triton's exp, exp(x) = 2^(x log2 e) then has a relative error of
6e-8 |x| from the rounding of its argument. If it is 2, polynomials are also less accurate, but accurate enough for
16-bit results.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x, V: tl.constexpr):
    if V.functions > 0:
        x = x * LOG2_E
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp(x)


@triton.jit
def reciprocal(x, V: tl.constexpr):
    if V.functions > 0:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x, V: tl.constexpr):
    return reciprocal(1.0 + exp(-x, V), V)


@triton.jit
def _add_log1p(e, y, V: tl.constexpr):
    """Return y + log(1 + e) for 0 <= e <= 1.

    Minimax polynomials for log(1 + e) / e have a relative error of 1.4e-7, or 1.4e-6 for 16-bit results.
    """
    if e.dtype == tl.float64:
        u = 1.0 + e  # log(u) e / (u - 1) corrects for the rounding of u
        return y + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    elif V.functions == 2:
        p = tl.fma(e, 1.4141024090349674e-2, -6.640180200338364e-2)
        p = tl.fma(p, e, 1.4922387897968292e-1)
        p = tl.fma(p, e, -2.350386083126068e-1)
        p = tl.fma(p, e, 3.3109450340270996e-1)
        p = tl.fma(p, e, -4.998696446418762e-1)
        return tl.fma(tl.fma(p, e, 9.999987483024597e-1), e, y)
    else:
        p = tl.fma(e, -3.413804806768894e-3, 2.0630458369851112e-2)
        p = tl.fma(p, e, -5.845554545521736e-2)
        p = tl.fma(p, e, 1.0759567469358444e-1)
        p = tl.fma(p, e, -1.5401174128055573e-1)
        p = tl.fma(p, e, 1.9710858166217804e-1)
        p = tl.fma(p, e, -2.4961474537849426e-1)
        p = tl.fma(p, e, 3.333077132701874e-1)
        p = tl.fma(p, e, -4.9999940395355225e-1)
        return tl.fma(tl.fma(p, e, 1.0), e, y)


@triton.jit
def activate(x, V: tl.constexpr):
    """Compute x̄ elementwise."""
    if V.act == "none":
        return x
    elif V.act == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif V.act == "sigmoid":
        return sigmoid(x, V)
    elif V.act == "silu":
        return x * sigmoid(x, V)
    elif V.act == "softplus":
        return _add_log1p(exp(-tl.abs(x), V), tl.maximum(x, 0.0), V)
    else:
        tl.static_assert(False, "this activation has no branch in kernels/activations.py: activate")


@triton.jit
def activate_backward(x, x_bar, dx_bar, V: tl.constexpr):
    """Compute dx from dx̄ elementwise."""
    if V.act == "none":
        return dx_bar
    elif V.act == "relu":
        return tl.where(x <= 0.0, 0.0, dx_bar)
    elif V.act == "sigmoid":
        return dx_bar * x_bar * (1.0 - x_bar)
    elif V.act == "silu":
        s = sigmoid(x, V)
        return dx_bar * s * (1.0 + x * (1.0 - s))
    elif V.act == "softplus":
        return dx_bar * sigmoid(x, V)
    else:
        tl.static_assert(False, "this activation has no branch in kernels/activations.py: activate_backward")
