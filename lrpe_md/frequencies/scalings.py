"""Scalings that extend a trained frequency series to longer sequences or larger grids.

Each function accepts the series theta of one axis, (E,) or (H, E), and returns the scaled series and an amplitude for q
and k. Scale each axis separately. All functions are differentiable with respect to theta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check_dense

__all__ = [
    "dynamic_ntk_scaling", "dype_ntk_scaling", "dype_yarn_scaling", "linear_scaling", "llama3_scaling",
    "longrope_scaling", "ntk_scaling", "riflex_scaling", "yarn_scaling",
]  # fmt: skip


def linear_scaling(theta: Tensor, factor: float) -> tuple[Tensor, float]:
    """Apply position interpolation (Chen et al., arXiv 2306.15595): return θ / factor and amplitude 1."""
    _check(theta, factor=factor)
    return theta / factor, 1.0


def ntk_scaling(theta: Tensor, factor: float) -> tuple[Tensor, float]:
    """Apply NTK-aware scaling, which changes the base b to b · factor^(d / (d - 2)) with d = 2E.

    For a geometric series, this equals θ_i · factor^(-i / (E - 1)), which does not need the base. The fastest frequency
    stays the same, and the slowest is divided by ``factor``. The amplitude is 1. Source: bloc97, "NTK-aware scaled
    RoPE" (2023), as described in YaRN, arXiv 2309.00071.
    """
    _check(theta, factor=factor)
    return _stretch(theta, factor), 1.0


def dynamic_ntk_scaling(theta: Tensor, factor: float, *, length: int, original_length: int) -> tuple[Tensor, float]:
    """Apply :func:`ntk_scaling` with factor · L/L0 - (factor - 1) if the length L exceeds the original length L0."""
    _check(theta, length=length, original_length=original_length)
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
    """Apply YaRN (Peng et al., arXiv 2309.00071).

    Frequencies that make fewer than ``slow`` turns in ``original_length`` are divided by ``factor``. Frequencies that
    make more than ``fast`` turns stay the same. Between these bounds, a linear ramp over the index blends the two
    results. With ``truncate``, the ends of the ramp are rounded outwards, as in the authors' code. The amplitude is 0.1
    ln(factor) + 1. ``theta`` must be a geometric series.
    """
    _check(theta, factor=factor, original_length=original_length, fast=fast, slow=slow)
    step, low, high = _locate(theta, original_length, (fast, slow))
    if not (step > 0).all():
        raise ValueError(
            f"theta: expected a decreasing geometric series, got other values (shape {tuple(theta.shape)})"
        )
    if truncate:
        low, high = low.floor(), high.ceil()
    ramp = _ramp(theta, low.clamp_min(0), high.clamp_max(2 * theta.shape[-1] - 1))
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
    """Apply LongRoPE (Ding et al., arXiv 2402.13753), which divides each θ_i by its own factor λ_i.

    λ is ``long`` if ``length`` exceeds the original length, and ``short`` otherwise. The amplitude is √(1 + ln factor /
    ln original_length).
    """
    _check(theta, factor=factor, length=length, original_length=original_length)
    divisors = torch.as_tensor(long if length > original_length else short, dtype=theta.dtype, device=theta.device)
    if divisors.shape != theta.shape[-1:]:
        raise ValueError(
            f"short, long: expected a divisor for each of the {theta.shape[-1]} frequencies, got "
            f"{tuple(divisors.shape)}"
        )
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0
    return theta / divisors, amplitude


def llama3_scaling(
    theta: Tensor, factor: float = 8.0, *, low: float = 1.0, high: float = 4.0, original_length: float = 8192
) -> tuple[Tensor, float]:
    """Apply Llama 3.1's scaling (arXiv 2407.21783).

    With L0 = ``original_length``, frequencies with a wavelength above L0 / low are divided by ``factor``. Frequencies
    with a wavelength below L0 / high stay the same. Between these bounds, the two results are blended, with a weight
    that is linear in the number of turns over L0. The amplitude is 1.
    """
    _check(theta, factor=factor, low=low, high=high, original_length=original_length)
    if not high > low:
        raise ValueError(f"high: expected a value greater than low = {low}, got {high}")
    keep = ((original_length * theta / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return theta / factor * (1 - keep) + theta * keep, 1.0


def riflex_scaling(
    theta: Tensor, length: float, *, repeats_at: float | None = None, index: int | None = None, share: float = 0.9
) -> tuple[Tensor, float]:
    """Apply RIFLEx (Zhao et al., arXiv 2502.15894, eq. 8), which lowers the intrinsic frequency to share · 2π / length.

    ``length`` frames then span ``share`` of the period, so a longer video does not repeat. If the period is
    already at least ``length``, theta is unchanged, as in the authors' code without fine-tuning. Use this scaling for
    the time axis.

    Args:
        length: number of latent frames to generate.
        repeats_at: frame at which a longer video starts to repeat. The intrinsic frequency is the one whose rounded
            period is closest to this frame (eq. 7).
        index: index of the intrinsic frequency in theta, counted from 0, as an alternative to ``repeats_at``.
        share: fraction of the period to span, 1 in the paper and 0.9 in the authors' code.

    The amplitude is 1.
    """
    _check(theta, length=length, share=share)
    if (repeats_at is None) == (index is None):
        raise ValueError(f"repeats_at, index: expected exactly one of the two, got {repeats_at} and {index}")
    num = theta.shape[-1]
    periods = (2 * math.pi / theta).round()
    if repeats_at is not None:
        intrinsic = (periods - repeats_at).abs().argmin(-1, keepdim=True)
    elif isinstance(index, int) and 0 <= index < num:
        intrinsic = torch.full((*theta.shape[:-1], 1), index, device=theta.device)
    else:
        raise ValueError(f"index: expected a number from 0 to {num - 1}, got {index}")
    chosen = torch.arange(num, device=theta.device) == intrinsic
    return torch.where(chosen & (periods < length), share * 2 * math.pi / length, theta), 1.0


def dype_ntk_scaling(
    theta: Tensor, factor: float, time: float | Tensor, *, strength: float = 2.0
) -> tuple[Tensor, float]:
    """Apply DyPE (Issachar et al., arXiv 2510.20766), which is :func:`ntk_scaling` with factor^(strength · t²).

    Args:
        factor: length divided by the training length. If the factor is at most 1, theta is unchanged.
        time: diffusion time t, from 1 (noise) to 0. A scalar tensor on a GPU stays on the GPU, so nothing synchronises.

    The amplitude is 1.
    """
    _check(theta, factor=factor, strength=strength)
    share = _check_time(theta, time) ** 2
    return _stretch(theta, max(1.0, factor) ** (strength * share)), 1.0


def dype_yarn_scaling(
    theta: Tensor,
    factor: float,
    time: float | Tensor,
    *,
    original_length: float,
    interpolated: tuple[float, float] = (0.75, 1.25),
    kept: tuple[float, float] = (2.0, 16.0),
) -> tuple[Tensor, float]:
    """Apply the YaRN variant of DyPE (Issachar et al., arXiv 2510.20766).

    How a frequency is scaled depends on the number of turns that it makes in ``original_length``. Frequencies with
    fewer than ``interpolated`` turns are divided by ``factor``. Frequencies with more turns follow :func:`ntk_scaling`,
    but those with more than ``kept`` turns stay the same. ``interpolated`` and ``kept`` are pairs of bounds, between
    which a ramp blends the two neighbouring ranges. The bounds are multiplied by t², so all of θ is unchanged as t
    approaches 0. The ends of a ramp are rounded outwards to whole indices.

    Close to t = 0, this function differs from the authors' code if all frequencies lie on one side of a ramp. In that
    case, the authors' ramp flips and treats the frequencies as if they were on the other side.

    factor, time: see :func:`dype_ntk_scaling`.

    The amplitude is 0.1 ln(factor) + 1. ``theta`` must be a geometric series.
    """
    _check(theta, factor=factor, original_length=original_length)
    share = _check_time(theta, time) ** 2
    if factor <= 1:
        return theta, 1.0
    scaled = theta / factor
    for faster, turns in ((_stretch(theta, factor), interpolated), (theta, kept)):
        _, low, high = _locate(theta, original_length, (turns[1], turns[0]), share.log())
        high = high.ceil().clamp_max(theta.shape[-1])
        ramp = 1 - _ramp(theta, low.floor().clamp_min(0).minimum(high), high)
        scaled = scaled * (1 - ramp) + faster * ramp
    return scaled, 0.1 * math.log(factor) + 1


def _locate(
    theta: Tensor, length: float, turns: tuple[float, float], log_share: float | Tensor = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step of log θ, and the fractional indices at which frequencies make ``turns`` turns in ``length``."""
    ends = theta.detach().double()
    first, last = ends[..., :1].log(), ends[..., -1:].log()
    step = (first - last) / max(theta.shape[-1] - 1, 1)
    low, high = ((first - math.log(2 * math.pi * n / length) - log_share) / step for n in turns)
    return step, low, high


def _ramp(theta: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return a ramp over the index of theta that rises from 0 at ``low`` to 1 at ``high``."""
    index = torch.arange(theta.shape[-1], device=theta.device)
    return ((index - low) / (high - low).clamp_min(0.001)).clamp(0, 1).to(theta.dtype)


def _stretch(theta: Tensor, factor: float | Tensor) -> Tensor:
    """Apply NTK-aware scaling to a series, without checking theta's values."""
    num = theta.shape[-1]
    if num < 2:
        raise ValueError(f"theta: expected a series of at least 2 frequencies, got {tuple(theta.shape)}")
    return theta * factor ** -(torch.arange(num, dtype=theta.dtype, device=theta.device) / (num - 1))


def _check_time(theta: Tensor, time: float | Tensor) -> Tensor:
    """Check the time, and return it as float64 on theta's device."""
    if isinstance(time, Tensor):
        if time.ndim:
            raise ValueError(f"time: expected one number, got a tensor of shape {tuple(time.shape)}")
        return time.to(theta.device, torch.float64)
    if not 0 <= time <= 1:
        raise ValueError(f"time: expected a diffusion time from 1 (noise) to 0 (data), got {time}")
    return torch.full((), time, dtype=torch.float64, device=theta.device)


def _check(theta: Tensor, **numbers: float) -> None:
    """Check that theta is a dense tensor, and that ``numbers`` are positive."""
    check_dense("theta", theta, "(E,) or (H, E)")
    for name, number in numbers.items():
        if isinstance(number, str) or not 0 < number < math.inf:
            raise ValueError(f"{name}: expected a finite positive number, got {number!r}")
