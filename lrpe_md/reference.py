"""The specification, in torch alone: readable, any float dtype, differentiable to any order.

    Θ[n, h, c] = Σ_j s_j[n] · ω[h, c, j] + φ[h, c]     for grid tokens; Θ = 0 for prefix and suffix tokens
    x̄ = act(x)
    cosine   y = [x̄ ⊙ cos Θ, x̄ ⊙ sin Θ]                                d -> 2d
    rotate   pairs (a, b) -> (a cos Θ - b sin Θ, a sin Θ + b cos Θ)      d -> d

Shapes: B batch, H heads, N tokens, D head_dim, C channels (cosine: D, rotate: pairs), K axes.
Angles are formed in at least float32; x is upcast to at least float32, and the result has x's dtype.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["activate", "activate_backward", "angles", "cosine", "encode", "encode_backward", "fold", "rotate"]


def angles(coords: Tensor, omega: Tensor, phase: Tensor | None = None, rotated: Tensor | None = None) -> Tensor:
    """Θ (.., H, N, C) from positions (.., N, K), omega (H, C, K), phase (H, C) and the grid mask (N,)."""
    dtype = torch.promote_types(torch.promote_types(omega.dtype, coords.dtype), torch.float32)
    coords, omega = coords.to(dtype), omega.to(dtype)
    theta = torch.zeros((), dtype=dtype, device=omega.device)
    for j in range(omega.shape[-1]):
        theta = theta + coords[..., None, :, None, j] * omega[:, None, :, j]
    if phase is not None:
        theta = theta + phase.to(dtype)[:, None, :]
    return theta if rotated is None else torch.where(rotated[:, None], theta, 0)


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


def cosine(x: Tensor, theta: Tensor) -> Tensor:
    """[x cos Θ, x sin Θ]: (B, H, N, D) -> (B, H, N, 2D)."""
    return torch.cat([x * theta.cos(), x * theta.sin()], dim=-1)


def rotate(x: Tensor, theta: Tensor, pairs: str = "half", start: int = 0) -> Tensor:
    """Rotate the 2C channels from ``start`` on, paired (p, p + C) or (2p, 2p + 1); the rest pass."""
    width = 2 * theta.shape[-1]
    cos, sin = theta.cos(), theta.sin()
    before, turned, after = x.split([start, width, x.shape[-1] - start - width], dim=-1)
    a, b = turned.chunk(2, dim=-1) if pairs == "half" else (turned[..., 0::2], turned[..., 1::2])
    a, b = a * cos - b * sin, a * sin + b * cos
    turned = torch.cat([a, b], dim=-1) if pairs == "half" else torch.stack([a, b], dim=-1).flatten(-2)
    return torch.cat([before, turned, after], dim=-1)


def _no_autocast(x: Tensor):
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def encode(
    x: Tensor,
    coords: Tensor,
    rotated: Tensor | None,
    omega: Tensor,
    phase: Tensor | None = None,
    *,
    map: str,
    act: str = "none",
    dim: int | None = None,
    pairs: str = "half",
    start: int = 0,
) -> Tensor:
    """One tensor from end to end: x (B, H, N, D), coords (N, K) or (B, N, K), omega (H or fewer, C, K)."""
    with _no_autocast(x):
        dtype = torch.promote_types(x.dtype, torch.float32)
        theta = angles(coords, omega.to(torch.promote_types(omega.dtype, dtype)), phase, rotated)
        # Query head h takes the frequencies of head h // (H_q / H_k).
        theta = fold(theta, dtype).repeat_interleave(x.shape[1] // theta.shape[-3], dim=-3)
        x_bar = activate(x.to(dtype), act, dim)
        y = cosine(x_bar, theta) if map == "cosine" else rotate(x_bar, theta, pairs, start)
        return y.to(x.dtype)


def encode_backward(
    dy: Tensor,
    x: Tensor | None,
    coords: Tensor,
    rotated: Tensor | None,
    omega: Tensor,
    phase: Tensor | None = None,
    *,
    map: str,
    act: str = "none",
    dim: int | None = None,
    pairs: str = "half",
    start: int = 0,
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
        cos, sin = theta.cos(), theta.sin()
        g = dy.to(dtype)
        head_dim = g.shape[-1] // 2 if map == "cosine" else g.shape[-1]
        x = g.new_zeros((*g.shape[:3], head_dim)) if x is None else x.to(dtype)
        x_bar = activate(x, act, dim)
        if map == "cosine":
            g_cos, g_sin = g.chunk(2, dim=-1)
            dx_bar = g_cos * cos + g_sin * sin
            dtheta = x_bar * (g_sin * cos - g_cos * sin)
        else:
            dx_bar = rotate(g, -theta, pairs, start)
            channels = theta.shape[-1]
            step = (slice(start, start + 2 * channels, 2), slice(start + 1, start + 2 * channels, 2))
            half = (slice(start, start + channels), slice(start + channels, start + 2 * channels))
            a, b = half if pairs == "half" else step
            dtheta = x_bar[..., a] * dx_bar[..., b] - x_bar[..., b] * dx_bar[..., a]
        dx = activate_backward(dx_bar, x, x_bar, act, dim).to(dy.dtype)
        if rotated is not None:
            dtheta = torch.where(rotated[:, None], dtheta, 0)
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
