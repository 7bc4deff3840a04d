"""Error budgets for kernels.

An implementation passes if its RMS error is at most twice the reference's, and its maximum error is at most four times
the reference's. Errors are measured against a float64 result for the same inputs. The reference's error is the larger
of two errors: that of the reference in the inputs' dtype, and that of the exact result rounded to this dtype. For this
purpose, the reference computes angles in the dtype of frequencies and positions, whereas :func:`lrpe_md.rotate` uses
float64; see :func:`rounded_angles`. No tolerance is chosen by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from . import reference
from .engine.core.call import Layout, Tables

__all__ = ["Violation", "budget_violation", "find_violation", "rounded_angles"]

RMS_FACTOR, MAX_FACTOR = 2.0, 4.0


@contextmanager
def rounded_angles() -> Iterator[None]:
    """Make the reference compute angles in the dtype of frequencies and positions (float32 for plain grids).

    The error of such a reference shows how far float32 arithmetic is from float64. This sets the error budget.
    """
    exact, positions = reference.angles, Layout.positions

    def rounded(coords: Tensor, omega: Tensor, *args: Any) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(omega.dtype, coords.dtype), torch.float32)
        return exact(coords, omega, *args, dtype=dtype)

    def narrow(layout: Layout, tables: Tables, device: torch.device) -> tuple[Tensor, Any]:
        coords, rotated = positions(layout, tables, device)
        plain = layout.sizes and tables.affine is None and tables.origin is None and max(layout.sizes) <= 2**24
        return coords.float() if plain else coords, rotated

    with (
        patch.object(reference, "angles", rounded),
        patch.object(reference, "widen", lambda omega: omega),
        patch.object(Layout, "positions", narrow),
    ):
        yield


@dataclass
class Violation:
    name: str
    rms: float
    rms_budget: float
    max: float
    max_budget: float
    case: Any = None

    def __str__(self) -> str:
        return (
            f"{self.name}: RMS error {self.rms:.3e} (budget {self.rms_budget:.3e}), maximum {self.max:.3e} "
            f"(budget {self.max_budget:.3e}) for {self.case or 'default'}"
        )


def budget_violation(
    name: str, actual: Tensor, same: Tensor, exact: Tensor, case: Any = None, *, ulps: float = 0.0
) -> Violation | None:
    """Return how ``actual`` violates the error budget, or None if it does not.

    The budget is derived from the difference between ``same``, the reference in actual's dtype with
    :func:`rounded_angles`, and ``exact``, the reference in float64. ``ulps`` units in the last place are subtracted
    from each error, because Triton's interpreter truncates when it stores bfloat16.
    """
    assert actual.dtype == same.dtype, (name, actual.dtype, same.dtype)
    assert actual.shape == same.shape, (name, actual.shape, same.shape)
    return find_violation(name, actual, (same.double() - exact).abs(), exact, case, ulps)


def find_violation(
    name: str, actual: Tensor, reference_error: Tensor, exact: Tensor, case: Any = None, ulps: float = 0.0
) -> Violation | None:
    """Implement :func:`budget_violation` for a known error of the reference."""
    assert actual.shape == exact.shape, (name, actual.shape, exact.shape)
    assert exact.dtype == torch.float64
    if actual.numel() == 0:
        return None
    rounded = exact.to(actual.dtype)
    error = (actual.double() - exact).abs()
    error = torch.where(rounded.isinf() & (actual == rounded), 0, error)
    error = (error - ulps * torch.finfo(actual.dtype).eps * exact.abs()).clamp_min(0) if ulps else error
    rounding_error = (rounded.double() - exact).abs()
    allowed = torch.stack([reference_error.flatten(), rounding_error.flatten()])
    allowed = torch.where(allowed.isinf(), 0, allowed)  # an overflow in the reference must not allow any value
    rms = error.square().mean().sqrt().item()
    rms_budget = RMS_FACTOR * allowed.square().mean(1).sqrt().max().item()
    top, max_budget = error.max().item(), MAX_FACTOR * allowed.max().item()
    if rms <= rms_budget and top <= max_budget:  # False for NaN
        return None
    return Violation(name, rms, rms_budget, top, max_budget, case)
