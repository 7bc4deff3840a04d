"""Scan over ranks, for linear attention with decay or the delta rule on sharded tokens.

The tokens of a rank turn the preceding state S into T S + B. In the reverse direction, S is the following state. Each
rank computes its T and B in a call without queries, and gathers T and B of all ranks. The rank then applies T and B of
all preceding ranks in order. In the reverse direction, it applies those of all following ranks. The result is the
initial state of the rank.

With rule "add", T is the product of the rank's decays, and B is a sum over its keys, weighted by the decays of later
blocks. With rule "delta", T = Π_f g_f (I − A_f). This T is the rank's final state if its initial state is the identity
matrix and its values are 0. A_f is symmetric, so the reverse direction uses the transpose of T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...reference import no_autocast
from ...reference_memory import lay_out_decay
from ...reference_products import product
from ..core.call import Layout, Tables
from ..core.memory import accumulator
from .call import LinearCall, Operands
from .plan import fits_kernels
from .validate import make_empty_frequencies

__all__ = ["Run", "State", "run_memory", "without_queries", "without_tokens"]

State = tuple[Tensor, ...]
Run = Callable[[LinearCall, Operands, bool], tuple[Tensor, State]]  # returns o and, if the flag is set, the state


def run_memory(
    run: Run, call: LinearCall, operands: Operands, group: Any, return_state: bool
) -> tuple[Tensor, State]:  # fmt: skip
    """Run the local tokens with an initial state from the other ranks. Return o and the state after all tokens."""
    both, k = call.attention.has_both_directions, operands.k
    with no_autocast(k):
        if call.attention.rule == "add":
            parts, transitions = _map_by_decay(run, call, operands)
        else:
            parts, transitions = _map_by_delta_rule(run, call, operands)
        parts, transitions = _gather((parts, transitions), group)
        count = len(parts) // 2 if both else len(parts)
        first = operands.state or tuple(torch.zeros_like(t[0]) for t in parts[:count])
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        start, last = [], []
        for i, part in enumerate(parts):
            transition = transitions[min(i % count, len(transitions) - 1)]
            if i < count:
                series = _scan(first[i], part, transition)
                last.append(series[-1])
                start.append(torch.stack(series)[rank])
            else:
                transition = transition.mT if transition.ndim == 5 else transition
                series = _scan(torch.zeros_like(part[0]), part.flip(0), transition.flip(0))
                start.append(torch.stack(series)[size - 1 - rank])
    o, _ = run(call, operands._replace(state=tuple(start)), False)
    return o, tuple(last) if return_state else ()


def _scan(first: Tensor, parts: Tensor, transitions: Tensor) -> list[Tensor]:
    """Return the state before each of the R ranks and after the last one.

    ``parts`` (R, B, H, ..) holds B of each rank. ``transitions`` holds T of each rank, as matrices (R, B, H, E, E) or
    as decay factors (R, B, H).
    """
    series = [first]
    for part, transition in zip(parts, transitions, strict=True):
        state = series[-1]
        if transition.ndim == 2:
            series.append(transition.reshape(*transition.shape, *(1,) * (state.ndim - 2)) * state + part)
        else:
            columns = state if state.ndim == 4 else state.unsqueeze(-1)
            series.append(product(transition, columns).view(state.shape) + part)
    return series


# --- the map of a rank ------------------------------------------------------------------------------------------------


def _map_by_decay(run: Run, call: LinearCall, operands: Operands) -> tuple[State, State]:
    """Return B and T for rule "add", where T is the product of the decays.

    In each direction, B is a sum over all keys, in which the decays act like gates. So B needs no scan.
    """
    _, k, _, gate, _, decay = operands
    dtype, both = accumulator(k.dtype), call.attention.has_both_directions
    ends, block = (call.k_layout.ends, call.attention.block) if call.attention.mask == "block" else ((0, 0), 1)
    num_blocks = (k.shape[2] - sum(ends)) // block
    logs = lay_out_decay(decay, num_blocks, k.new_empty((), dtype=torch.float64)).log()
    after = torch.nn.functional.pad(logs.flip(-1).cumsum(-1).flip(-1), (0, 1))
    before = torch.nn.functional.pad(logs.cumsum(-1), (1, 0))
    # One entry per slot: the prefix, the blocks and the suffix.
    slots = [torch.nn.functional.pad(after, (0, 1))] + [torch.nn.functional.pad(before, (1, 0))] * both
    state_call, given = without_queries(call, operands)
    state_call = state_call._replace(attention=call.attention._replace(mask="full", block=0, memory="sum"))
    parts: State = ()
    for logs_of_slots in slots:
        weights = _expand_slots(logs_of_slots.exp().to(dtype), ends, block).expand(k.shape[0], -1, -1)
        if gate is not None:
            weights = torch.where(gate, weights, 0) if gate.dtype == torch.bool else gate.to(dtype) * weights
        parts += run(state_call, given._replace(gate=weights, decay=None), True)[1]
    return parts, (after[..., 0].exp().to(dtype).expand(k.shape[:2]),)


def _expand_slots(values: Tensor, ends: tuple[int, int], block: int) -> Tensor:
    """Repeat each slot's value, (.., F + 2), once per token. The slots are the prefix, the blocks and the suffix."""
    prefix, suffix = ends
    return torch.cat(
        [
            values[..., :1].expand(*values.shape[:-1], prefix), values[..., 1:-1].repeat_interleave(block, dim=-1),
            values[..., -1:].expand(*values.shape[:-1], suffix),
        ],
        dim=-1,
    )  # fmt: skip


def _map_by_delta_rule(run: Run, call: LinearCall, operands: Operands) -> tuple[State, State]:
    """Return B and T for rule "delta". If the normaliser sums features other than k̂, also return T of these sums."""
    call, operands = without_queries(call, operands)
    _, parts = run(call, operands, True)
    normalizer = call.attention.normalizer
    call = call._replace(attention=call.attention._replace(normalizer="none", memory="delta"))
    transitions = [_run_on_identity(run, call, operands)]
    if normalizer == "unrotated" and call.spec.map != "none":
        tables = Tables(make_empty_frequencies(operands.k))
        plain = call._replace(
            spec=call.spec._replace(map="none"), k_layout=call.k_layout._replace(sizes=()), q_tables=tables,
            k_tables=tables,
        )  # fmt: skip
        transitions.append(_run_on_identity(run, plain, operands))
    return parts, tuple(transitions)


def _run_on_identity(run: Run, call: LinearCall, operands: Operands) -> Tensor:
    """Return T (B, H_k, E, E), which is the final state if the initial state is the identity and all values are 0.

    If the identity matrix is too large for the kernels, each run handles D_v of its columns (the number of channels of
    v).
    """
    k, v = operands.k, operands.v
    width = call.spec.out_dim(k.shape[3])
    size = width if fits_kernels(width, width, k.element_size(), delta=True) else v.shape[3]
    found: list[Tensor] = []
    for columns in torch.eye(width, dtype=accumulator(k.dtype), device=k.device).split(size, dim=1):
        values = k.new_zeros(columns.shape[1]).expand(*k.shape[:3], -1)
        state = columns.expand(*k.shape[:2], *columns.shape)
        found += run(call, operands._replace(v=values, state=(state,)), True)[1]
    return torch.cat(found, dim=-1)


def without_queries(call: LinearCall, operands: Operands) -> tuple[LinearCall, Operands]:
    """Return a call and operands without queries or an initial state.

    Use them to compute only the state of the keys.
    """
    q_layout, q_tables = without_tokens(call.q_layout, call.q_tables)
    q = operands.q.new_empty((*operands.q.shape[:2], 0, operands.q.shape[3]))
    return call._replace(q_layout=q_layout, q_tables=q_tables), operands._replace(q=q, state=())


def without_tokens(layout: Layout, tables: Tables) -> tuple[Layout, Tables]:
    """Return a layout and tables for zero tokens. They are new objects, so q and k no longer share them."""
    tables = Tables(*tables)
    if tables.coords is None:
        return layout._replace(num_tokens=0), tables
    rotated = None if tables.rotated is None else tables.rotated[..., :0]
    return Layout(0, 0, 0, 0, ()), tables._replace(coords=tables.coords[..., :0, :], rotated=rotated)


# --- between the ranks ------------------------------------------------------------------------------------------------


def _gather(given: tuple[State, State], group: Any) -> tuple[State, State]:
    """Gather tensors (B, H, ..) from R ranks into tensors (R, B, H, ..), with a single all-gather."""
    parts, transitions = given
    tensors = (*parts, *transitions)
    rows = torch.cat([t.flatten(2) if t.ndim > 2 else t.unsqueeze(2) for t in tensors], dim=2)
    ranks = _GatherRanks.apply(rows, group).split([t.shape[2:].numel() for t in tensors], dim=3)
    found = tuple(t.reshape(t.shape[0], *like.shape) for t, like in zip(ranks, tensors, strict=True))
    return found[: len(parts)], found[len(parts) :]


class _GatherRanks(torch.autograd.Function):
    """All-gather a tensor (..) over the R ranks of a group. The result has shape (R, ..)."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        found = t.new_empty((dist.get_world_size(group), *t.shape))
        dist.all_gather([*found], t.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx, *grads):
        return _SumForRank.apply(*grads, ctx.group), None


class _SumForRank(torch.autograd.Function):
    """Reduce-scatter a tensor (R, ..) over the R ranks of a group. Each rank gets its own sum (..)."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        received = torch.empty_like(t, memory_format=torch.contiguous_format)
        # We don't use reduce_scatter, because some versions of gloo lack it.
        dist.all_to_all_single(received, t.contiguous(), group=group)
        return received.sum(0)

    @staticmethod
    def backward(ctx, *grads):
        return _GatherRanks.apply(*grads, ctx.group), None
