"""Series of frequencies, theta: float64 unless asked otherwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_at_least, check_dense

__all__ = ["geometric_theta", "head_bands_theta", "log_linspace_theta", "period_theta"]


def geometric_theta(
    num: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """``base ** (-i / num)`` for i < num: RoPE's geometric series (arXiv 2104.09864), shape (num,)."""
    if num < 1:
        raise ValueError(f"num: expected at least one frequency, got {num}")
    if not base > 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    return (base ** (-torch.arange(num, dtype=torch.float64, device=device) / num)).to(dtype)


def log_linspace_theta(num: int, first: float, last: float, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """``num`` frequencies from ``first`` to ``last``, both included, evenly spaced in their logarithm: (num,).

    DINOv3 with the periods p to P is ``log_linspace_theta(num, 2π / p, 2π / P)``.
    """
    if num < 1:
        raise ValueError(f"num: expected at least one frequency, got {num}")
    if not (first > 0 and last > 0):
        raise ValueError(f"first, last: expected positive numbers, got {first}, {last}")
    steps = torch.linspace(math.log(first), math.log(last), num, dtype=torch.float64)
    return steps.exp().to(dtype)


def period_theta(periods: Tensor) -> Tensor:
    """Frequencies 2π / periods, for series that are given as wavelengths; any shape, differentiable."""
    check_dense("periods", periods, "of any shape")
    return 2 * math.pi / periods


def head_bands_theta(num: int, num_heads: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """One geometric series over all heads, a band a head: (num_heads, num), head 0 the fastest.

    TransNormer's LRPE (arXiv 2307.14995) is ``head_bands_theta(head_dim, num_heads, base=1e4 ** 2)``.
    """
    check_at_least(1, num=num, num_heads=num_heads)
    return geometric_theta(num_heads * num, base, dtype=dtype).reshape(num_heads, num)
