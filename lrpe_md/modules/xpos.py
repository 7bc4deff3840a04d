"""xPos, which scales q and k by position so that attention scores decay with distance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import check_dense, rotary_slice, show_value, split_pair
from ..engine.core.call import Pairs, Positions
from ..engine.encode.validate import check_pairs, locate
from ..reference import join_pairs

__all__ = ["check_scale", "scale_xpos"]


def scale_xpos(
    q: Tensor,
    k: Tensor,
    *,
    positions: Positions | tuple[Positions, Positions],
    scale_base: float = 512.0,
    scale_centre: float = 0.0,
    pairs: Pairs = "half",
    rotary_dim: int | slice | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply pair i of q at position n by ζ_i^((n - centre) / scale_base), and divide pair i of k by the same factor.

    ζ_i = (2i + 0.4 R) / 1.4 R. Rotation preserves lengths, so you can call this before or after :func:`lrpe_md.rotate`.
    This function runs in plain PyTorch. Unless you compile it, the function costs an extra pass over q and k, and
    rounds 16-bit dtypes once more.

    Args:
        q, k: tensors (B, H, N, D).
        positions: positions on one axis, the same as for the rotation, or a pair (for q, for k). Unrotated tokens are
            not scaled.
        scale_base: number of tokens over which the scale changes by a factor of ζ_i.
        scale_centre: position where the scale is 1. Attention scores don't depend on it, but q and k overflow float16 a
            few thousand tokens away from it. flash-attn sets scale_centre to half of the maximum length.
        pairs, rotary_dim: same values as for the rotation.

    Returns:
        the scaled q and k, with the same shapes and dtypes. Both results are differentiable with respect to q, k and
        coordinates.

    Raises:
        ValueError, TypeError: if there is more than one axis, positions have the wrong length, or a number is invalid.

    Source: Sun et al., A Length-Extrapolatable Transformer (arXiv 2212.10554), as implemented in flash-attn's
    ``RotaryEmbedding``.
    """
    check_scale(scale_base, scale_centre)
    here = split_pair("positions", positions)
    ys = []
    for name, x, where, sign in zip("qk", (q, k), here, (1.0, -1.0), strict=True):
        check_dense(name, x, "(B, H, N, D)")
        power = sign * _distance(where, x, scale_centre) / scale_base
        start, width = rotary_slice(rotary_dim, x.shape[-1])
        name_of_pairs, sections = check_pairs(pairs, width // 2)
        i = torch.arange(width // 2, dtype=torch.float64, device=x.device)
        log = ((2 * i + 0.4 * width) / (1.4 * width)).log()
        factor = torch.exp(power[..., None] * log)
        factor = join_pairs(factor, factor, name_of_pairs, sections)
        factor = torch.nn.functional.pad(factor, (start, x.shape[-1] - start - width), value=1.0)
        factor = factor.to(torch.promote_types(x.dtype, torch.float32))
        factor = _whole_beside(x, factor if factor.ndim == 2 else factor[:, None])
        ys.append((x * factor).to(x.dtype))
    return ys[0], ys[1]


def check_scale(value: Any, centre: Any) -> None:
    """Check scale_base and scale_centre."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"scale_base: expected a finite positive number, got {show_value(value)}")
    if isinstance(centre, bool) or not isinstance(centre, (int, float)) or not -math.inf < centre < math.inf:
        raise ValueError(f"scale_centre: expected a finite number, got {show_value(centre)}")


def _whole_beside(x: Any, factor: Tensor) -> Tensor:
    """If x is a DTensor, return the factor as a replicated DTensor, so that each rank uses the part for its shard."""
    if not hasattr(x, "placements"):
        return factor
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(factor, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


def _distance(positions: Any, x: Tensor, centre: float) -> Tensor:
    """Subtract the centre from positions. Return a float64 distance (N,) or (B, N), which is 0 for unrotated tokens."""
    layout, tables = locate(positions, x)
    coords, rotated = layout.positions(tables, x.device)
    if coords.shape[-1] != 1:
        raise ValueError(f"positions: expected one axis, got {coords.shape[-1]}")
    distance = coords[..., 0].double() - centre
    return distance if rotated is None else torch.where(rotated, distance, 0.0)
