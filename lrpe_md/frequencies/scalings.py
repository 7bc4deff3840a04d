"""A trained series for longer sequences or larger grids.

Each function takes the series of one axis, (E,) or (H, E), and returns the edited one and the amplitude of q and k that
goes with it. With several axes each gets its own. Differentiable with respect to theta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check_dense

__all__ = [
    "dynamic_ntk_scaling", "linear_scaling", "llama3_scaling", "longrope_scaling", "ntk_scaling", "yarn_scaling",
]  # fmt: skip


def linear_scaling(theta: Tensor, factor: float) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al., arXiv 2306.15595): θ / factor, amplitude 1."""
    check_dense("theta", theta, "(E,) or (H, E)")
    _check_positive(factor=factor)
    return theta / factor, 1.0


def ntk_scaling(theta: Tensor, factor: float) -> tuple[Tensor, float]:
    """NTK-aware: the base b becomes b · factor^(d / (d - 2)), d = 2E; the slowest turns ``factor`` times slower.

    On a geometric series that is θ_i · factor^(-i / (E - 1)), which needs no base. Amplitude 1. Source: bloc97,
    "NTK-aware scaled RoPE" (2023), as in YaRN, arXiv 2309.00071.
    """
    check_dense("theta", theta, "(E,) or (H, E)")
    _check_positive(factor=factor)
    num = theta.shape[-1]
    if num < 2:
        raise ValueError(f"theta: expected a series of at least 2 frequencies, got {tuple(theta.shape)}")
    steps = torch.arange(num, dtype=theta.dtype, device=theta.device) / (num - 1)
    return theta * factor**-steps, 1.0


def dynamic_ntk_scaling(theta: Tensor, factor: float, *, length: int, original_length: int) -> tuple[Tensor, float]:
    """NTK-aware by the present length: :func:`ntk_scaling` with s·L/L0 - (s - 1), and no change up to L0."""
    _check_positive(factor=factor, length=length, original_length=original_length)
    return ntk_scaling(theta, factor * max(length, original_length) / original_length - (factor - 1))


def yarn_scaling(
    theta: Tensor,
    factor: float,
    *,
    original_length: float,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> tuple[Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071): θ / factor below ``slow`` turns in ``original_length``, θ above ``fast``.

    Between, a ramp over the index; its ends are rounded outwards with ``truncate``, as in the authors' code.
    Amplitude 0.1 ln(factor) + 1. ``theta`` is a geometric series.
    """
    check_dense("theta", theta, "(E,) or (H, E)")
    _check_positive(factor=factor, original_length=original_length, fast=fast, slow=slow)
    num = theta.shape[-1]
    ends = theta.detach().double()
    first, last = ends[..., :1].log(), ends[..., -1:].log()
    if num < 2 or not (first > last).all():
        raise ValueError(f"theta: expected a falling geometric series, got {tuple(theta.shape)}")
    step = (first - last) / (num - 1)
    # The (fractional) index that makes `turns` turns in the original length.
    low, high = ((first - math.log(2 * math.pi * turns / original_length)) / step for turns in (fast, slow))
    if truncate:
        low, high = low.floor(), high.ceil()
    low, high = low.clamp_min(0), high.clamp_max(2 * num - 1)
    index = torch.arange(num, device=theta.device)
    ramp = ((index - low) / (high - low).clamp_min(0.001)).clamp(0, 1).to(theta.dtype)
    amplitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return theta / factor * ramp + theta * (1 - ramp), amplitude


def longrope_scaling(
    theta: Tensor,
    short: Sequence[float] | Tensor,
    long: Sequence[float] | Tensor,
    *,
    factor: float,
    length: int,
    original_length: int,
) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., arXiv 2402.13753): θ_i / λ_i, λ ``long`` beyond the original length, else ``short``.

    Amplitude √(1 + ln factor / ln original_length).
    """
    check_dense("theta", theta, "(E,) or (H, E)")
    _check_positive(factor=factor, length=length, original_length=original_length)
    divisors = torch.as_tensor(long if length > original_length else short, dtype=theta.dtype, device=theta.device)
    if divisors.shape != theta.shape[-1:]:
        raise ValueError(
            f"short, long: expected a divisor for each of {theta.shape[-1]} frequencies, got {tuple(divisors.shape)}"
        )
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0
    return theta / divisors, amplitude


def llama3_scaling(
    theta: Tensor, factor: float = 8.0, *, low: float = 1.0, high: float = 4.0, original_length: float = 8192
) -> tuple[Tensor, float]:
    """Llama 3.1 (arXiv 2407.21783): θ / factor where the wavelength passes L0 / low, θ where it is below L0 / high.

    Between, a blend that is linear in the turns made over L0 = ``original_length``. Amplitude 1.
    """
    check_dense("theta", theta, "(E,) or (H, E)")
    _check_positive(factor=factor, low=low, high=high, original_length=original_length)
    if not high > low:
        raise ValueError(f"high: expected more than low = {low}, got {high}")
    keep = ((original_length * theta / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return theta / factor * (1 - keep) + theta * keep, 1.0


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name}: expected a positive number, got {number}")
