"""How fast each channel turns: from theta to omega.

``omega`` (H or 1, C, K) holds one frequency for each head, channel (or pair) and axis, in radians a unit of
position. An axial scheme is an omega with zeros, a mixed one is dense. Everything here is float64 unless asked
otherwise, and differentiable where it takes a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["AXIS_ORDERS", "AxisOrder", "axial_omega", "geometric_theta", "mixed_omega"]

AxisOrder = Literal["minor_first", "major_first"]
AXIS_ORDERS = ("minor_first", "major_first")


def geometric_theta(num: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """``base ** (-i / num)`` for i < num: RoPE's geometric series (arXiv 2104.09864), shape (num,)."""
    if num < 1:
        raise ValueError(f"num: expected at least one frequency, got {num}")
    if not base > 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    return (base ** (-torch.arange(num, dtype=torch.float64) / num)).to(dtype)


def axial_omega(
    theta: Tensor | Sequence[Tensor],
    num_channels: int,
    num_axes: int,
    *,
    axis_order: AxisOrder = "minor_first",
) -> Tensor:
    """Lay theta over the channels in blocks, one axis a block: concat(s_1 θ, .., s_k θ)[:d].

    Args:
        theta: (E,) or (H, E), shared by the axes, K · E ≥ C: the last block is cut where it passes C.
            Or one tensor for each axis, slowest axis first like ``Grid.shape``, for unequal splits; their
            widths must add up to at least C.
        num_channels: C: head_dim for cosine, half the rotated width for rotate.
        num_axes: K.
        axis_order: which axis the first block belongs to. ``"minor_first"``: the fastest (W), the order of
            the LRPE document; ``"major_first"``: the slowest (T), as in most vision models.

    Returns:
        omega (H or 1, C, K), with theta's dtype and device; differentiable with respect to theta.
    """
    if axis_order not in AXIS_ORDERS:
        raise ValueError(f"axis_order: expected one of {AXIS_ORDERS}, got {axis_order!r}")
    if num_axes < 1:
        raise ValueError(f"num_axes: expected at least 1, got {num_axes}")
    thetas = [theta] * num_axes if isinstance(theta, Tensor) else list(theta)
    if len(thetas) != num_axes:
        raise ValueError(f"theta: expected one tensor for each of {num_axes} axes, got {len(thetas)}")
    for t in thetas:
        if t.ndim not in (1, 2) or not t.is_floating_point():
            raise ValueError(f"theta: expected floats of shape (E,) or (H, E), got {t.dtype} {tuple(t.shape)}")
    thetas = [t if t.ndim == 2 else t[None] for t in thetas]
    width = sum(t.shape[1] for t in thetas)
    if width < num_channels:
        raise ValueError(
            f"theta: {num_axes} axes of {[t.shape[1] for t in thetas]} frequencies give {width} channels, "
            f"but {num_channels} are needed; theta needs at least {-(-num_channels // num_axes)} an axis"
        )
    axes = range(num_axes) if axis_order == "major_first" else range(num_axes - 1, -1, -1)
    blocks = []
    for axis in axes:
        one_hot = (torch.arange(num_axes, device=thetas[axis].device) == axis).to(thetas[axis].dtype)
        blocks.append(thetas[axis][:, :, None] * one_hot)
    num_heads = max(block.shape[0] for block in blocks)
    return torch.cat([block.expand(num_heads, -1, -1) for block in blocks], dim=1)[:, :num_channels]


def mixed_omega(
    num_channels: int,
    num_axes: int,
    num_heads: int = 1,
    *,
    base: float = 10.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Dense frequencies: each channel turns along a direction of its own, random by head.

    A head draws a random orthonormal frame of the K axes; channels fall into K blocks, one for each vector of
    the frame, each with the geometric magnitudes ``base ** (-i / E)``, E = ceil(C / K). For K = 2 this is the
    initialisation of RoPE-Mixed (RoPE-ViT, arXiv 2403.13298: random angle a head, directions a and a + π/2).

    Returns:
        omega (H, C, K).
    """
    if num_axes < 1 or num_heads < 1:
        raise ValueError(f"num_axes, num_heads: expected at least 1, got {num_axes}, {num_heads}")
    magnitude = geometric_theta(math.ceil(num_channels / num_axes), base)
    normal = torch.randn(num_heads, num_axes, num_axes, dtype=torch.float64, generator=generator)
    frame, triangle = torch.linalg.qr(normal)
    # Signs from the triangle make the frame uniform over rotations and reflections.
    frame = frame * torch.diagonal(triangle, dim1=-2, dim2=-1).sign()[:, None, :]
    omega = frame.transpose(1, 2)[:, :, None, :] * magnitude[:, None]
    return omega.flatten(1, 2)[:, :num_channels].to(dtype)
