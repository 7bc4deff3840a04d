"""Checks that frequencies, positions and calls share."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_integer", "check_at_least", "check_dense"]


def as_integer(value: Any) -> Any:
    """An int of whatever counts as one (NumPy's integers, sizes in a trace), a SymInt as it is; None for others."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_dense(name: str, value: Any, form: str) -> None:
    """A tensor whose numbers lie in memory, in steps."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor {form}, got {type(value).__name__}")
    if value.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor {form}, got a nested one; pad it, or pack its sequences "
            "into (1, H, N, D) and lay out their positions with lrpe_md.pack or cu_seqlens"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor {form}, got {value.layout}; use to_dense()")


def check_at_least(least: int, **numbers: Any) -> None:
    """Whole numbers, or those of a trace."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)) or number < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {number!r}")
