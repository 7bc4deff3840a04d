"""Apply a norm over all heads, or softmax over the sequence, before linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference import no_autocast
from ...reference_linear import zero_gated_tokens
from ..core.call import NO_WEIGHTS, Call, Layout, Spec, Tables, Weights
from ..core.norms import of_tensor
from ..encode.dispatch import run_call
from .call import LinearCall, Operands


def prepare_operands(call: LinearCall, operands: Operands, impl: str, direct: bool) -> tuple[LinearCall, Operands]:
    """Apply a norm over all heads or a softmax over the sequence. The linear attention kernels support neither."""
    if call.spec.norm_over == "heads":
        call, operands = _normalise_heads(call, operands, impl, direct)
    if call.spec.dim == -2:
        operands = operands._replace(q=_soften(operands.q), k=_soften(operands.k))
        call = call._replace(spec=call.spec._replace(act="none", dim=0))
    return call, operands


def _normalise_heads(call: LinearCall, operands: Operands, impl: str, direct: bool) -> tuple[LinearCall, Operands]:
    """Apply a norm over all heads in a separate pass, because each linear attention program reads only one head.

    Tokens with gate 0 are set to zero first. They then affect neither other heads nor the gradients of the weights.
    """
    k, v = zero_gated_tokens(operands.gate, operands.k, operands.v)
    spec, weights = call.spec, call.weights
    norm_spec = Spec("none", norm=spec.norm, norm_over="heads", norm_eps=spec.norm_eps, norm_offset=spec.norm_offset)
    tables = Tables(operands.q.new_empty((1, 0, 1), dtype=torch.float32))

    def normalise(layout: Layout, tensor_weights: Weights, *xs: Tensor) -> tuple[Tensor, ...]:
        layout = layout._replace(sizes=(layout.num_grid_tokens,))
        return run_call(Call(norm_spec, layout, tables, None, tensor_weights), xs, None, impl, direct)

    if call.q_layout.is_same(call.k_layout):
        q, k = normalise(call.q_layout, weights, operands.q, k)
    else:
        (q,) = normalise(call.q_layout, of_tensor(weights, 0), operands.q)
        (k,) = normalise(call.k_layout, of_tensor(weights, 1), k)
    spec = spec._replace(norm="none", norm_over="head", norm_eps=0.0, norm_offset=0.0)
    return call._replace(spec=spec, weights=NO_WEIGHTS), operands._replace(q=q, k=k, v=v)


def _soften(x: Tensor) -> Tensor:
    """Apply softmax over the sequence."""
    with no_autocast(x):
        return torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -2).to(x.dtype)
