"""Constructors of the frequency series theta, in float64 by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..checks import check_at_least, check_dense, check_precise, is_finite_number, join_names

__all__ = [
    "apply_scaling", "call_function", "geometric_theta", "head_bands_theta", "log_linspace_theta", "period_theta",
]  # fmt: skip


def geometric_theta(
    num: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return RoPE's geometric series ``base ** (-i / num)`` for i < num, of shape (num,) (arXiv 2104.09864)."""
    check_at_least(1, num=num)
    if not isinstance(base, (Real, Tensor, torch.SymFloat, torch.SymInt)) or not 0 < base < math.inf:
        raise ValueError(f"base: expected a finite positive number, got {base!r}")
    return (base ** (-torch.arange(num, dtype=torch.float64, device=device) / num)).to(dtype)


def log_linspace_theta(num: int, first: float, last: float, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``num`` frequencies from ``first`` to ``last`` inclusive, with evenly spaced logarithms.

    For DINOv3 with periods from p to P, use ``log_linspace_theta(num, 2π / p, 2π / P)``.
    """
    if num < 1:
        raise ValueError(f"num: expected at least one frequency, got {num}")
    if not (0 < first < math.inf and 0 < last < math.inf):
        raise ValueError(f"first, last: expected finite positive numbers, got {first}, {last}")
    steps = torch.linspace(math.log(first), math.log(last), num, dtype=torch.float64)
    return steps.exp().to(dtype)


def period_theta(periods: Tensor) -> Tensor:
    """Convert a tensor of wavelengths to frequencies, 2π / periods. The result is differentiable."""
    check_dense("periods", periods, "(*)")
    return 2 * math.pi / periods


def head_bands_theta(num: int, num_heads: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Split a geometric series into one band per head, and return the bands (num_heads, num), fastest band first.

    TransNormer's LRPE (arXiv 2307.14995) is ``head_bands_theta(head_dim, num_heads, base=1e4 ** 2)``.
    """
    check_at_least(1, num=num, num_heads=num_heads)
    return geometric_theta(num_heads * num, base, dtype=dtype).reshape(num_heads, num)


def call_function(name: str, function: Callable[..., Tensor], args: dict[str, Any], shapes: tuple[Any, ...]) -> Tensor:
    """Call a user's function. Raise a clear error if it rejects the arguments, or returns a wrong shape or dtype."""
    try:
        found = function(*args.values())
    except TypeError as error:
        raise TypeError(f"{name}: expected a function ({', '.join(args)}), got {function}: {error}") from error
    if not isinstance(found, Tensor):
        raise TypeError(
            f"{name}: expected a function that returns a tensor, got {type(found).__name__} from {function}"
        )
    check_precise(name, found.dtype)
    if found.shape not in shapes:
        expected = join_names(map(str, dict.fromkeys(shapes)), "or")
        raise ValueError(
            f"{name}: expected a function that returns a tensor of shape {expected}, got {tuple(found.shape)}"
        )
    return found


def apply_scaling(scaling: Any, theta: Tensor) -> tuple[Tensor, Any]:
    """Apply a scaling to theta (E,) or (H, E), check its result, and return the new theta and the amplitude.

    Raises:
        TypeError: if the scaling is not a function, or does not return a tensor and an amplitude.
        ValueError: if theta or the amplitude has the wrong shape, or the amplitude is not finite.
    """
    if not callable(scaling):
        raise TypeError(
            "scaling: expected a function of theta, such as partial(yarn_scaling, factor=4.0, original_length=512), "
            f"got {scaling!r}"
        )
    try:
        found = scaling(theta)
    except (TypeError, ValueError) as error:
        raise type(error)(f"scaling: {error}") from error
    if not isinstance(found, (tuple, list)) or len(found) != 2 or not isinstance(found[0], Tensor):
        raise TypeError(f"scaling: expected a function that returns (theta, amplitude), got {type(found).__name__}")
    scaled, amplitude = found
    if scaled.shape != theta.shape:
        raise ValueError(
            f"scaling: expected a function that returns theta of shape {tuple(theta.shape)}, got {tuple(scaled.shape)}"
        )
    fits = amplitude.shape in ((), theta.shape[-1:]) if isinstance(amplitude, Tensor) else is_finite_number(amplitude)
    if not fits:
        got = tuple(amplitude.shape) if isinstance(amplitude, Tensor) else repr(amplitude)
        raise ValueError(
            f"scaling: expected an amplitude that is a finite number or a tensor of shape ({theta.shape[-1]},), got "
            f"{got}"
        )
    return scaled, amplitude
