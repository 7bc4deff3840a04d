"""Dense frequencies, where each channel has its own direction in position space."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_at_least, check_dense
from .series import geometric_theta

__all__ = [
    "dense_omega", "golden_directions", "mixed_omega", "plane_directions", "random_directions", "simplex_directions",
]  # fmt: skip


def dense_omega(theta: Tensor, directions: Tensor) -> Tensor:
    """Multiply directions (C, K) or (H, C, K) by magnitudes theta (C,) or (H, C), and return omega (H or 1, C, K)."""
    check_dense("theta", theta, "(C,) or (H, C)")
    check_dense("directions", directions, "(C, K) or (H, C, K)")
    theta = theta if theta.ndim == 2 else theta[None]
    directions = directions if directions.ndim == 3 else directions[None]
    if theta.shape[1] != directions.shape[1]:
        raise ValueError(
            f"theta: expected a frequency for each of the {directions.shape[1]} directions, got {tuple(theta.shape)}"
        )
    return theta[:, :, None] * directions


def random_directions(
    num_channels: int, num_axes: int, num_heads: int = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return directions (H, C, K). Each head has a random orthonormal frame, with one vector per block of channels."""
    check_at_least(1, num_channels=num_channels, num_axes=num_axes, num_heads=num_heads)
    device = None if generator is None else generator.device
    normal = torch.randn(num_heads, num_axes, num_axes, dtype=torch.float64, generator=generator, device=device)
    frame, triangle = torch.linalg.qr(normal)
    # Multiplying by the signs of R's diagonal makes Q uniform over rotations and reflections.
    frame = frame * torch.diagonal(triangle, dim1=-2, dim2=-1).sign()[:, None, :]
    return frame.transpose(-2, -1).repeat_interleave(math.ceil(num_channels / num_axes), dim=1)[:, :num_channels]


def plane_directions(num_channels: int, angles: Tensor) -> Tensor:
    """Return 2-D directions (H, C, 2) from one angle a per head: a for half of the channels, and a + π/2 for the rest.

    With a ~ U(0, 2π) per head, this is RoPE-ViT's RoPE-Mixed (arXiv 2403.13298).
    """
    check_at_least(1, num_channels=num_channels)
    check_dense("angles", angles, "(H,)")
    turned = torch.stack([angles, angles + math.pi / 2], dim=-1)
    directions = torch.stack([turned.cos(), turned.sin()], dim=-1)
    return directions.repeat_interleave(math.ceil(num_channels / 2), dim=1)[:, :num_channels]


def golden_directions(num_channels: int, num_axes: int) -> Tensor:
    """Return evenly distributed directions (C, K) in float64, for K = 2 or 3 and any number of channels.

    For K = 2, the angle between successive channels is the golden section of a half circle. For K = 3, height and
    azimuth on the half sphere use the generalisation of the golden section (Roberts 2018; for RoPE: Xiong 2025, "On
    N-dimensional rotary positional embeddings"). Half of the circle or sphere is enough, because v and -v rotate a pair
    by the same angle in opposite directions.
    """
    check_at_least(1, num_channels=num_channels)
    index = torch.arange(num_channels, dtype=torch.float64) + 0.5
    if num_axes == 2:
        golden = (1 + math.sqrt(5)) / 2  # positive root of x^2 = x + 1
        azimuth = math.pi * (index / golden % 1)
        return torch.stack([azimuth.cos(), azimuth.sin()], dim=-1)
    if num_axes == 3:
        plastic = 1.324717957244746  # real root of x^3 = x + 1
        height, azimuth = index / plastic % 1, 2 * math.pi * (index / plastic**2 % 1)
        radius = (1 - height**2).sqrt()
        return torch.stack([radius * azimuth.cos(), radius * azimuth.sin(), height], dim=-1)
    raise ValueError(f"num_axes: expected 2 or 3, got {num_axes}")


def simplex_directions(num_channels: int, num_axes: int) -> Tensor:
    """Return directions (C, K) in float64 that repeat the K + 1 corners of a regular simplex around the origin.

    For K = 2, the three directions are 120° apart, as in the hexagonal codes of grid cells.
    """
    check_at_least(1, num_channels=num_channels, num_axes=num_axes)
    # On axis j, earlier corners are zero, and later corners cancel corner j.
    corners = torch.zeros(num_axes + 1, num_axes, dtype=torch.float64)
    for j in range(num_axes):
        corners[j, j] = (1 - corners[j].square().sum()).sqrt()
        corners[j + 1 :, j] = -corners[j, j] / (num_axes - j)
    return corners[torch.arange(num_channels) % (num_axes + 1)]


def mixed_omega(
    num_channels: int,
    num_axes: int,
    num_heads: int = 1,
    *,
    base: float = 10.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return dense frequencies with random directions, drawn separately for each head.

    Each head has a random orthonormal frame of the K axes. The channels form K blocks, one per vector of the frame.
    In each block, the magnitudes form the geometric series ``base ** (-i / E)`` with E = ceil(C / K). For K = 2, this
    is the initialisation of RoPE-Mixed (RoPE-ViT, arXiv 2403.13298), up to the direction of rotation.

    Returns:
        omega (H, C, K).
    """
    directions = random_directions(num_channels, num_axes, num_heads, generator=generator)
    magnitude = geometric_theta(math.ceil(num_channels / num_axes), base, device=directions.device)
    magnitude = magnitude.repeat(num_axes)[:num_channels]
    return dense_omega(magnitude, directions).to(dtype)
