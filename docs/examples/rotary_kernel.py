"""RoPE on an image grid as a Triton kernel: float32, half layout. On a CPU, set TRITON_INTERPRET=1.

python docs/examples/rotary_kernel.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def cos_sin(s_y, s_x, p_omega, o_c, C: tl.constexpr):
    """Return cos Θ and sin Θ (tokens, pairs) for Θ = s_y ω_y + s_x ω_x."""
    turns = tl.zeros([s_y.shape[0], C], dtype=tl.float32)
    for j in tl.static_range(2):
        s = (s_y if j == 0 else s_x).to(tl.float32)[:, None]
        w = tl.load(p_omega + o_c * 2 + j)[None, :]
        hi = w * 0.15915493667125702  # 1/2π as a float32; lo adds its rounding error
        lo = tl.fma(w, tl.full(w.shape, 6.420638326565253e-09, tl.float32), tl.fma(w, 0.15915493667125702, -hi))
        whole = tl.floor(s * hi + 0.5)
        turns += tl.fma(s, hi, -whole) + s * lo  # the fma does not round the product
    angle = (turns - tl.floor(turns + 0.5)) * 6.283185307179586
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def rotary_kernel(p_x, p_y, p_omega, N, WIDTH, prefix, rows, SIGN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate a block of tokens in every row (one head of one sample) of x (rows, N, 2C) by SIGN · Θ."""
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_c = tl.arange(0, C)
    index = tl.maximum(o_n - prefix, 0)  # prefix tokens are at (0, 0), where Θ = 0
    cos, sin = cos_sin(index // WIDTH, index % WIDTH, p_omega, o_c, C)
    sin *= SIGN
    place = o_n[:, None] * (2 * C) + o_c[None, :]
    mask = (o_n < N)[:, None]
    for row in range(rows):  # cos and sin stay in registers
        begin = tl.cast(row, tl.int64) * N * (2 * C)
        a = tl.load(p_x + begin + place, mask=mask)
        b = tl.load(p_x + begin + place + C, mask=mask)
        tl.store(p_y + begin + place, a * cos - b * sin, mask=mask)
        tl.store(p_y + begin + place + C, a * sin + b * cos, mask=mask)


class Rotate(torch.autograd.Function):
    """Rotation by Θ. Its backward pass is the rotation by -Θ."""

    @staticmethod
    def forward(ctx, x, omega, shape, prefix):
        ctx.save_for_backward(omega)
        ctx.shape, ctx.prefix = shape, prefix
        return launch(x, omega, shape, prefix, 1)

    @staticmethod
    def backward(ctx, dy):
        (omega,) = ctx.saved_tensors
        return launch(dy, omega, ctx.shape, ctx.prefix, -1), None, None, None


def launch(x, omega, shape, prefix, sign):
    batch, heads, num_tokens, head_dim = x.shape
    x, block = x.contiguous(), 16
    y, programs = torch.empty_like(x), triton.cdiv(num_tokens, block)
    rotary_kernel[(programs,)](x, y, omega, num_tokens, shape[1], prefix, batch * heads, sign, head_dim // 2, block)
    return y


if __name__ == "__main__":
    from lrpe_md import Grid, axial_omega, geometric_theta, rotate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, prefix, pairs = (14, 18), 1, 32
    omega = axial_omega(geometric_theta(pairs // 2, 10000.0), pairs, 2)[0].float().to(device)
    x = torch.randn(2, 4, prefix + 14 * 18, 2 * pairs, device=device)
    y = Rotate.apply(x, omega, shape, prefix)
    expected = rotate(x, omega=omega[None], positions=Grid(shape, prefix=prefix), pairs="half")
    print(f"largest difference from lrpe_md.rotate: {float((y - expected).abs().max()):.1e}")
