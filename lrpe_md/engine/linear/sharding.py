"""Run linear attention on DTensors. Each rank runs the same call on its shard.

If tokens are sharded, each rank first computes the state of its keys in a call without queries. Without a mask, the
rank's queries then read the sum of all ranks' states in a call without keys. With a causal or block mask, the rank
instead runs its tokens with the sum of the previous ranks' states as the initial state. States with decay or the delta
rule are handled in :mod:`engine.linear.sharding_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.call import Layout, Tables, Weights
from ..core.norms import of_tensor
from ..core.operator import is_sharded
from ..core.sharding import (
    BATCH,
    HEADS,
    TOKENS,
    check_cut,
    check_mesh,
    check_placements,
    count_ranks,
    local_part,
    local_positions,
    local_weights,
    take_local,
    wrap_shard,
)
from .call import LinearCall, Operands, Results
from .sharding_memory import Run, State, run_memory, without_queries, without_tokens
from .validate import check_edges

__all__ = ["run_shards"]


def run_shards(
    run_local: Callable[..., Any], call: LinearCall, operands: Operands, return_state: bool
) -> tuple[Tensor, ...]:
    """Run a call on the local shards.

    Return o, which has q's placements. If ``return_state`` is set, also return the state.

    The state is sharded like k along batch and heads, and replicated otherwise. As for encodings
    (:mod:`engine.encode.sharding`), batch, heads and tokens may be sharded, plain tensors count as replicated, and
    gradients are those of the unsharded computation. k and v must be sharded like q. They may also be replicated in two
    cases: if q's heads are sharded and there is one key head, or if q's tokens are sharded in cross-attention.

    Raises:
        TypeError: if plain tensors are mixed with DTensors.
        ValueError: if the placements would be invalid for an encoding, if tokens are sharded over several mesh axes or
            together with cu_seqlens, if the number of key heads isn't a multiple of the number of ranks, or if a block
            is split between shards.
    """

    def run(call: LinearCall, operands: Operands, return_state: bool) -> tuple[Tensor, State]:
        o, *after = run_local(call, operands, Results(return_state))
        return o, tuple(after)

    q, k, v, gate, state, decay = operands
    placed: Any = (q, k, v)
    check_placements(call.spec, placed, call.q_tables.omega, call.q_tables.phase)
    check_mesh("norm.weight, norm.bias", call.weights, "q", placed[0])
    _check_placements(call, *placed)
    local = _localize(call, q, k)
    _check_blocks_of_ranks(call, q)
    partial_axes = _find_partial_axes(q, k)
    here = Operands(
        _local(q, q), _local(k, q), _local(v, q), gate if gate is None else _local_gate(gate, k, partial_axes),
        tuple(_share_gradient(take_local(t, k, {BATCH: 0, HEADS: 1}), k, partial_axes) for t in state),
        decay if decay is None else _local_decay(decay, (call, local), k, partial_axes),
    )  # fmt: skip
    over_tokens = [i for i, p in enumerate(placed[1].placements) if p.is_shard(TOKENS)]
    if over_tokens:
        group = placed[0].device_mesh.get_group(over_tokens[0])
        if call.attention.forgets:
            o, after = run_memory(run, local, here, group, return_state)
        else:
            o, after = _run_tokens(run, local, here, group)
    else:
        o, after = run(local, here, return_state)
    states = [_whole_state(t, q, k) for t in after] if return_state else []
    return wrap_shard(o, q, v.shape[3]), *states


def _run_tokens(run: Run, call: LinearCall, operands: Operands, group: Any) -> tuple[Tensor, State]:
    """Run a call whose tokens are sharded over the group.

    Return the local shard of o, and the state after all tokens.
    """
    q, k, v, gate, before, _ = operands
    alone, given = without_queries(call, operands)
    alone = alone._replace(attention=call.attention._replace(mask="full", block=0))
    _, own = run(alone, given, True)
    total = _add(tuple(_SumRanks.apply(t, group) for t in own), before)
    if call.attention.mask == "full":
        k_layout, k_tables = without_tokens(call.k_layout, call.k_tables)
        reading = call._replace(k_layout=k_layout, k_tables=k_tables)
        none = None if gate is None else gate[:, :, :0]
        return run(reading, Operands(q, k[:, :, :0], v[:, :, :0], none, total), False)[0], total
    start = _add(tuple(_SumBefore.apply(t, group, False) for t in own), before)
    return run(call, Operands(q, k, v, gate, start), False)[0], total


def _add(state: State, before: State) -> State:
    return tuple(a + b for a, b in zip(state, before, strict=True)) if before else state


# --- between the ranks ------------------------------------------------------------------------------------------


class _SumRanks(torch.autograd.Function):
    """Sum a tensor over the ranks of a group. The backward pass sums the ranks' partial gradients."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        total = t.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *grads):
        return _SumRanks.apply(*grads, ctx.group), None


class _SumBefore(torch.autograd.Function):
    """Sum a tensor over the ranks before this one or, if ``is_reversed`` is set, over the ranks after it."""

    @staticmethod
    def forward(ctx, t, group, is_reversed):
        ctx.group, ctx.is_reversed = group, is_reversed
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        each = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(each, t.contiguous(), group=group)
        chosen = each[rank + 1 :] if is_reversed else each[:rank]
        return torch.stack(chosen).sum(0) if chosen else torch.zeros_like(each[rank])

    @staticmethod
    def backward(ctx, *grads):
        return _SumBefore.apply(*grads, ctx.group, not ctx.is_reversed), None, None


class _ChangeGradient(torch.autograd.Function):
    """Identity function whose backward pass returns ``change(gradient, group)``."""

    @staticmethod
    def forward(ctx, t, change, group):
        ctx.change, ctx.group = change, group
        return t.view_as(t)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.change(*grads, ctx.group), None, None


def _keep_first(grad: Tensor, group: Any) -> Tensor:
    """Return the gradient on the first rank and zeros on the other ranks, because all ranks have the same gradient."""
    return grad if dist.get_rank(group) == 0 else torch.zeros_like(grad)


# --- placements ---------------------------------------------------------------------------------------------------


def _check_placements(call: LinearCall, q: Any, k: Any, v: Any) -> None:
    if tuple(k.placements) != tuple(v.placements):
        raise ValueError(f"v: expected k's placements {tuple(k.placements)}, got {tuple(v.placements)}")
    for ours, theirs in zip(q.placements, k.placements, strict=True):
        one_head = ours.is_shard(HEADS) and k.shape[1] == 1
        all_keys = ours.is_shard(TOKENS) and call.attention.mask == "full" and call.cu_seqlens is None
        if ours != theirs and not (theirs.is_replicate() and (one_head or all_keys)):
            raise ValueError(
                f"k: expected q's placements {tuple(q.placements)}, or Replicate() (with one key head, or if the "
                f"queries' tokens are sharded), got {tuple(k.placements)}; call k.redistribute first"
            )
    if call.cu_seqlens is not None and count_ranks(q, TOKENS) * count_ranks(q, BATCH) > 1:
        raise ValueError(
            f"cu_seqlens: expected all tokens on each rank, got q with a sharded batch or sharded tokens, "
            f"{tuple(q.placements)}"
        )
    if sum(p.is_shard(TOKENS) for p in k.placements) > 1:
        raise ValueError(f"q: expected tokens sharded over a single mesh dimension, got {tuple(q.placements)}")
    if k.shape[1] % count_ranks(k, HEADS):
        raise ValueError(
            f"k: expected a number of heads divisible by {count_ranks(k, HEADS)} (the number of ranks), or 1 "
            f"replicated head, got {k.shape[1]}"
        )
    for tables, x in ((call.q_tables, q), (call.k_tables, k)):
        check_cut(tables, x)
        local_part(x, HEADS)


def _check_blocks_of_ranks(call: LinearCall, q: Any) -> None:
    """Check the blocks of all ranks on every rank. If only one rank raised an error, the other ranks would hang."""
    num_ranks, num_tokens = count_ranks(q, TOKENS), q.shape[2]
    if call.attention.mask != "block" or num_ranks == 1:
        return
    if call.q_tables.coords is not None:
        raise ValueError(
            "positions: expected a Grid for blocks of sharded tokens, got Coordinates; every rank must know the prefix "
            "and suffix"
        )
    layout, step = call.q_layout, -(-num_tokens // num_ranks)
    for begin in range(0, num_tokens, step):
        part = layout._replace(num_tokens=min(step, num_tokens - begin), start=layout.start + begin)
        check_edges(part, layout.start + num_tokens, call.attention.block)


def _find_partial_axes(q: Any, k: Any) -> list[int]:
    """Return the mesh axes along which q is sharded but k is not. Along them, ranks compute partial gradients of k."""
    return [
        i for i, (a, b) in enumerate(zip(q.placements, k.placements, strict=True)) if a.is_shard() and b.is_replicate()
    ]  # fmt: skip


def _share_gradient(t: Tensor, x: Any, axes: list[int]) -> Tensor:
    for axis in axes:
        t = _ChangeGradient.apply(t, _SumRanks.apply, x.device_mesh.get_group(axis)) if t.is_floating_point() else t
    return t


def _local(x: Any, q: Any) -> Tensor:
    """Return this rank's shard of q, k or v."""
    from torch.distributed.tensor import Partial

    partial_axes = _find_partial_axes(q, x)
    grads = [Partial() if i in partial_axes else p for i, p in enumerate(x.placements)]
    # This is needed even if no data moves, because its backward pass gives the summed gradient the placements of x.
    return x.redistribute(x.device_mesh, x.placements).to_local(grad_placements=grads)


def _local_gate(gate: Any, k: Any, partial_axes: list[int]) -> Tensor:
    dims = {BATCH: 0, TOKENS: 2} if gate.shape[1] == 1 else {BATCH: 0, HEADS: 1, TOKENS: 2}
    return _share_gradient(take_local(gate, k, dims), k, partial_axes)


def _local_decay(decay: Any, calls: tuple[LinearCall, LinearCall], k: Any, partial_axes: list[int]) -> Tensor:
    """Return the decays of this rank's samples, heads and blocks. ``calls`` is (global call, local call)."""
    sizes = {HEADS: 0} if decay.ndim == 1 else {BATCH: 0, HEADS: 1}
    dims = {dim: place for dim, place in sizes.items() if decay.shape[place] > 1}
    found = _share_gradient(take_local(decay, k, dims), k, partial_axes)
    if decay.ndim == 1 or count_ranks(k, TOKENS) == 1:
        return found
    (start, length), block = local_part(k, TOKENS), calls[0].attention.block
    if calls[0].attention.mask == "block":
        prefix, own = calls[0].k_layout.ends[0], calls[1].k_layout.ends
        start, length = max(0, start - prefix) // block, (length - sum(own)) // block
    return found[:, :, start : start + length]


def _localize(call: LinearCall, q: Any, k: Any) -> LinearCall:
    """Return the call for this rank's samples, heads and tokens."""
    q_layout, q_tables = k_layout, k_tables = _local_side(call, call.q_layout, call.q_tables, q)
    partial_axes = _find_partial_axes(q, k)
    if partial_axes or call.k_tables is not call.q_tables:
        k_layout, k_tables = _local_side(call, call.k_layout, call.k_tables, k)
        phase, coords = (
            t if t is None else _share_gradient(t, k, partial_axes) for t in (k_tables.phase, k_tables.coords)
        )
        # q and k share one tensor of frequencies, so autograd adds their gradients before ranks communicate.
        k_tables = k_tables._replace(
            omega=q_tables.omega, amplitude=q_tables.amplitude, phase=phase, coords=coords
        )  # fmt: skip
    in_rows = call.spec.map != "none"  # without a map, the layout of a shard keeps its prefix and suffix
    of_q = local_weights(of_tensor(call.weights, 0), call.q_layout, q, in_rows)
    of_k = local_weights(of_tensor(call.weights, 1), call.k_layout, k, in_rows)
    weight_k, bias_k = (None if t is None else _share_gradient(t, k, partial_axes) for t in of_k[:2])
    cu_seqlens: Any = call.cu_seqlens
    return call._replace(
        q_layout=q_layout, k_layout=k_layout, q_tables=q_tables, k_tables=k_tables, launches=None,
        cu_seqlens=cu_seqlens.to_local() if is_sharded(cu_seqlens) else cu_seqlens,
        weights=Weights(of_q.weight, of_q.bias, weight_k, bias_k),
    )  # fmt: skip


def _local_side(call: LinearCall, layout: Layout, tables: Tables, x: Any) -> tuple[Layout, Tables]:
    if call.spec.map != "none":
        return local_positions(layout, tables, x)
    start, length = local_part(x, TOKENS)
    return layout._replace(num_tokens=length, start=layout.start + start), tables


def _whole_state(t: Tensor, q: Any, k: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    placements = []
    for axis, (ours, theirs) in enumerate(zip(q.placements, k.placements, strict=True)):
        cut = theirs.is_shard(BATCH) or theirs.is_shard(HEADS)
        placements.append(theirs if cut else Replicate())
        if ours.is_shard() and not cut:
            t = _ChangeGradient.apply(t, _keep_first, q.device_mesh.get_group(axis))
    batch = k.shape[0] if count_ranks(k, BATCH) > 1 else t.shape[0]  # number of samples or of packed sequences
    shape = torch.Size((batch, k.shape[1], *t.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        t.contiguous(), q.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )  # fmt: skip
