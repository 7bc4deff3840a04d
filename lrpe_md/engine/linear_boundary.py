"""The boundary of linear attention with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference_linear
from ..reference_linear import Angles
from .linear_call import LinearCall, Side, ends_of
from .memory import arrange_in_memory, memory_order

__all__ = ["run_reference"]


def run_reference(
    call: LinearCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    state: Sequence[Tensor],
    operands: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reference on the arguments of an operator: o, and the state behind the last token.

    operands: see :func:`lrpe_md.reference_linear.attend`.
    """
    o, after = reference_linear.attend(
        call.attention, call.spec, q, k, v,
        q_angles=_angles(call, Side(call.q_layout, call.q_tables)),
        k_angles=_angles(call, Side(call.k_layout, call.k_tables)),
        gate=gate, cu_seqlens=call.cu_seqlens, state=state, ends=ends_of(call.q_layout),
        operands=operands,
    )  # fmt: skip
    return arrange_in_memory(o, memory_order(q)), after


def _angles(call: LinearCall, side: Side) -> Angles | None:
    if call.spec.map == "none":
        return None
    tables = side.tables
    coords, rotated = side.layout.positions(tables, tables.omega.device)
    return Angles(coords, rotated, tables.omega, tables.phase, tables.amplitude)
