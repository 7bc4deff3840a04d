"""The specification, in torch alone: readable, any float dtype, differentiable to any order.

    Θ[n, h, c] = Σ_j s_j[n] · ω[h, c, j] + φ[h, c]     for grid tokens; Θ = 0 for prefix and suffix tokens
    x̄ = act(x)
    cosine   y = [x̄ ⊙ cos Θ, x̄ ⊙ sin Θ]                                d -> 2d
    rotate   pairs (a, b) -> (a cos Θ - b sin Θ, a sin Θ + b cos Θ)      d -> d
    An amplitude a[h, c] multiplies cos Θ and sin Θ of grid tokens.

Shapes: B batch, H heads, N tokens, D head_dim, C channels (cosine: D, rotate: pairs), K axes.
Angles are formed in at least float32; x is upcast to at least float32, and the result has x's dtype.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "activate", "activate_backward", "angles", "cos_sin", "cosine", "encode", "encode_backward", "fold", "join_pairs",
    "rotate", "split_pairs",
]  # fmt: skip


def angles(coords: Tensor, omega: Tensor, phase: Tensor | None = None, rotated: Tensor | None = None) -> Tensor:
    """Θ (.., H, N, C) from positions (.., N, K), omega (H, C, K), phase (H, C) and the grid mask (N,) or (B, N)."""
    dtype = torch.promote_types(torch.promote_types(omega.dtype, coords.dtype), torch.float32)
    coords, omega = coords.to(dtype), omega.to(dtype)
    theta = torch.zeros((), dtype=dtype, device=omega.device)
    for j in range(omega.shape[-1]):
        theta = theta + coords[..., None, :, None, j] * omega[:, None, :, j]
    if phase is not None:
        theta = theta + phase.to(dtype)[:, None, :]
    return theta if rotated is None else torch.where(rotated[..., None, :, None], theta, 0)


def cos_sin(
    theta: Tensor, amplitude: Tensor | None = None, rotated: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cos Θ and sin Θ (.., H, N, C), times the amplitude (H or fewer, C) where the token is on the grid."""
    if amplitude is None:
        return theta.cos(), theta.sin()
    gain = amplitude.to(theta.dtype).repeat_interleave(theta.shape[-3] // amplitude.shape[0], dim=0)[:, None, :]
    if rotated is not None:
        gain = torch.where(rotated[..., None, :, None], gain, 1)
    return theta.cos() * gain, theta.sin() * gain


def fold(theta: Tensor, dtype: torch.dtype) -> Tensor:
    """Θ less whole turns, in the dtype of the arithmetic: float64 angles lose nothing but their turns."""
    if theta.dtype == dtype:
        return theta
    return (theta - 2 * torch.pi * (theta.detach() / (2 * torch.pi)).round()).to(dtype)


def activate(x: Tensor, act: str, dim: int | None = None) -> Tensor:
    """x̄ = act(x); ``dim`` is -1 (features) or -2 (sequence) for softmax and None otherwise."""
    if act == "none":
        return x
    if act == "softmax":
        assert dim is not None
        return torch.softmax(x, dim)
    if act == "softplus":
        return F.softplus(x, threshold=40.0)  # the default threshold, 20, is off by 2e-9 in float64
    return {"relu": torch.relu, "sigmoid": torch.sigmoid, "silu": F.silu}[act](x)


def activate_backward(dx_bar: Tensor, x: Tensor, x_bar: Tensor, act: str, dim: int | None = None) -> Tensor:
    """dx from dx̄."""
    if act == "none":
        return dx_bar
    if act == "softmax":
        return x_bar * (dx_bar - (x_bar * dx_bar).sum(dim, keepdim=True))
    if act == "relu":
        return dx_bar * (x > 0)
    s = torch.sigmoid(x)
    return dx_bar * {"sigmoid": s * (1 - s), "silu": s * (1 + x * (1 - s)), "softplus": s}[act]


def cosine(x: Tensor, cos: Tensor, sin: Tensor, order: str = "cos_sin") -> Tensor:
    """[x cos Θ, x sin Θ], or the other order: (B, H, N, D) -> (B, H, N, 2D)."""
    return torch.cat([x * cos, x * sin] if order == "cos_sin" else [x * sin, x * cos], dim=-1)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: str = "half", start: int = 0, sections: tuple[int, ...] = ()
) -> Tensor:
    """Rotate the 2C channels from ``start`` on; the rest pass."""
    width = 2 * cos.shape[-1]
    before, turned, after = x.split([start, width, x.shape[-1] - start - width], dim=-1)
    a, b = split_pairs(turned, pairs, sections)
    turned = join_pairs(a * cos - b * sin, a * sin + b * cos, pairs, sections)
    return torch.cat([before, turned, after], dim=-1)


def split_pairs(x: Tensor, pairs: str, sections: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Pairs (p, p + C), (2p, 2p + 1), or the former within each block of so many pairs: x (.., 2C) -> a, b (.., C)."""
    if pairs == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    blocks = x.split([2 * n for n in sections], dim=-1) if pairs == "blocks" else [x]
    halves = [block.chunk(2, dim=-1) for block in blocks]
    return torch.cat([a for a, _ in halves], dim=-1), torch.cat([b for _, b in halves], dim=-1)


def join_pairs(a: Tensor, b: Tensor, pairs: str, sections: tuple[int, ...] = ()) -> Tensor:
    """The inverse of :func:`split_pairs`."""
    if pairs == "interleaved":
        return torch.stack([a, b], dim=-1).flatten(-2)
    blocks = [(a, b)]
    if pairs == "blocks":
        blocks = zip(a.split(sections, dim=-1), b.split(sections, dim=-1), strict=True)
    return torch.cat([half for block in blocks for half in block], dim=-1)


def _no_autocast(x: Tensor):
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def encode(
    x: Tensor,
    coords: Tensor,
    rotated: Tensor | None,
    omega: Tensor,
    phase: Tensor | None = None,
    amplitude: Tensor | None = None,
    *,
    map: str,
    act: str = "none",
    dim: int | None = None,
    pairs: str = "half",
    start: int = 0,
    sections: tuple[int, ...] = (),
    order: str = "cos_sin",
) -> Tensor:
    """One tensor from end to end: x (B, H, N, D), coords (N, K) or (B, N, K), omega (H or fewer, C, K)."""
    with _no_autocast(x):
        dtype = torch.promote_types(x.dtype, torch.float32)
        theta = angles(coords, omega.to(torch.promote_types(omega.dtype, dtype)), phase, rotated)
        # Query head h takes the frequencies of head h // (H_q / H_k).
        theta = fold(theta, dtype).repeat_interleave(x.shape[1] // theta.shape[-3], dim=-3)
        cos, sin = cos_sin(theta, amplitude, rotated)
        x_bar = activate(x.to(dtype), act, dim)
        if map == "cosine":
            return cosine(x_bar, cos, sin, order).to(x.dtype)
        return rotate(x_bar, cos, sin, pairs, start, sections).to(x.dtype)


def encode_backward(
    dy: Tensor,
    x: Tensor | None,
    coords: Tensor,
    rotated: Tensor | None,
    omega: Tensor,
    phase: Tensor | None = None,
    amplitude: Tensor | None = None,
    *,
    map: str,
    act: str = "none",
    dim: int | None = None,
    pairs: str = "half",
    start: int = 0,
    sections: tuple[int, ...] = (),
    order: str = "cos_sin",
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dω (H or fewer, C, K) and Σ_n dΘ = dφ, in closed form, for where autograd can't record.

        cosine   dx̄ = dy_cos ⊙ cos Θ + dy_sin ⊙ sin Θ        dΘ = x̄ ⊙ (dy_sin ⊙ cos Θ - dy_cos ⊙ sin Θ)
        rotate   dx̄ = dy rotated by -Θ                        dΘ = ā db̄ - b̄ dā
        dω[h, c, j] = Σ s_j dΘ                                 dx = act'(dx̄)

    x may be None for act "none": dx needs none, and dω and dφ are then zero.
    """
    with _no_autocast(dy):
        dtype = torch.promote_types(dy.dtype, torch.float32)
        theta = angles(coords, omega.to(torch.promote_types(omega.dtype, dtype)), phase, rotated)
        groups = theta.shape[-3]
        theta = fold(theta, dtype).repeat_interleave(dy.shape[1] // groups, dim=-3)
        cos, sin = cos_sin(theta, amplitude, rotated)
        g = dy.to(dtype)
        head_dim = g.shape[-1] // 2 if map == "cosine" else g.shape[-1]
        x = g.new_zeros((*g.shape[:3], head_dim)) if x is None else x.to(dtype)
        x_bar = activate(x, act, dim)
        if map == "cosine":
            g_cos, g_sin = g.chunk(2, dim=-1) if order == "cos_sin" else g.chunk(2, dim=-1)[::-1]
            dx_bar = g_cos * cos + g_sin * sin
            dtheta = x_bar * (g_sin * cos - g_cos * sin)
        else:
            dx_bar = rotate(g, cos, -sin, pairs, start, sections)
            width = 2 * theta.shape[-1]
            cut = [start, width, head_dim - start - width]
            a, b = split_pairs(x_bar.split(cut, dim=-1)[1], pairs, sections)
            da, db = split_pairs(dx_bar.split(cut, dim=-1)[1], pairs, sections)
            dtheta = a * db - b * da
        dx = activate_backward(dx_bar, x, x_bar, act, dim).to(dy.dtype)
        if rotated is not None:
            dtheta = torch.where(rotated[..., None, :, None], dtheta, 0)
        # Sum over the heads that share a frequency in at least omega's dtype: (B, G, N, C).
        batch, heads, *tail = dtheta.shape
        dtheta = dtheta.to(torch.promote_types(dtype, omega.dtype))
        dtheta = dtheta.reshape(batch, groups, heads // groups, *tail).sum(2)
        columns = [(dtheta * coords[..., None, :, None, j]).sum((0, 2)) for j in range(coords.shape[-1])]
        domega, dphase = torch.stack(columns, dim=-1), dtheta.sum((0, 2))
        domega = domega.sum(0, keepdim=True) if omega.shape[0] < groups else domega
        if phase is not None and phase.shape[0] < groups:
            dphase = dphase.sum(0, keepdim=True)
        return dx, domega, dphase
