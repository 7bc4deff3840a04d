"""Which path a call of linear attention takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference import no_autocast
from . import linear_boundary
from .linear_call import LinearOptions, Sides, State
from .linear_validate import Given, check_sequence_softmax, validate_linear

__all__ = ["run_linear"]


def run_linear(options: LinearOptions, given: Given, sides: Sides) -> Any:
    """What :func:`lrpe_md.linear_attention` does: o, or o and the state."""
    call = validate_linear(options, given, sides)
    if call.spec.dim == -2:
        check_sequence_softmax(options, given, sides)
        given = given._replace(q=_soften(given.q), k=_soften(given.k))
        call = call._replace(spec=call.spec._replace(act="none", dim=0))
    o, after = linear_boundary.run_reference(call, *given[:4], given.state)
    return (o, pack_state(after)) if options.return_state else o


def pack_state(tensors: Any) -> State:
    """(S, Σ), Σ None where there is none."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def _soften(x: Tensor) -> Tensor:
    """Softmax over the sequence, in front of the kernels."""
    with no_autocast(x):
        return torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -2).to(x.dtype)
