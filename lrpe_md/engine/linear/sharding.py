"""Run linear attention on DTensors. Each rank runs the same call on its shard.

If tokens are sharded, each rank first computes the state of its keys in a call without queries. Without a mask, the
rank's queries then read the sum of all ranks' states in a call without keys.

With a causal or block mask, the tokens of a rank turn the preceding state S into T S + B. In the reverse direction, S
is the following state. Each rank gathers T and B from all ranks, and applies those of all preceding ranks in order. In
the reverse direction, it applies those of all following ranks. With rule "add", T is the product of the rank's decays,
and B is a sum over its keys, weighted by the decays of later blocks. Without decay, T is 1, and B is the state of the
rank's keys. With rule "delta", T = Π_f g_f (I − A_f). This T
is the rank's final state if its initial state is the identity matrix and its values are 0. A_f is symmetric, so the
reverse direction uses the transpose of T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...reference import no_autocast
from ...reference_memory import lay_out_decay
from ...reference_products import product
from ..core import sharding
from ..core.call import Layout, Tables
from ..core.memory import accumulator
from ..core.operator import is_sharded
from ..core.sharding import BATCH, HEADS, TOKENS
from .call import LinearCall, Operands, Results
from .plan import fits_kernels
from .validate import check_edges, make_empty_frequencies

State = tuple[Tensor, ...]
Run = Callable[[LinearCall, Operands, bool], tuple[Tensor, State]]  # returns o and, if the flag is set, the state


def run_shards(
    run_local: Callable[..., Any], call: LinearCall, operands: Operands, return_state: bool
) -> tuple[Tensor, ...]:
    """Run a call on the local shards. Return o with q's placements and, if ``return_state`` is set, the state.

    The state is sharded like k along batch and heads, and replicated otherwise. The rules for placements and gradients
    are those of :mod:`engine.encode.sharding`. In addition, k and v may be replicated along a mesh axis that shards q's
    heads if there is one key head, and along one that shards q's tokens if there is no mask.
    """

    def run(call: LinearCall, operands: Operands, return_state: bool) -> tuple[Tensor, State]:
        o, *after = run_local(call, operands, Results(return_state))
        return o, tuple(after)

    q, k, v, gate, state, decay = operands
    placed: Any = (q, k, v)
    sharding.check_placements(call.spec, placed, call.q_tables.omega, call.q_tables.phase)
    sharding.check_mesh("norm.weight, norm.bias", call.weights, "q", placed[0])
    _check_placements(call, *placed)
    local = _localize(call, q, k)
    _check_blocks_of_ranks(call, q)
    partial_axes = _find_partial_axes(q, k)
    if gate is not None:
        dims = {BATCH: 0, TOKENS: 2} if gate.shape[1] == 1 else {BATCH: 0, HEADS: 1, TOKENS: 2}
        gate = sharding.take_local(gate, k, dims, partial_axes)
    here = Operands(
        _local(q, q), _local(k, q), _local(v, q), gate,
        tuple(sharding.take_local(t, k, {BATCH: 0, HEADS: 1}, partial_axes) for t in state),
        decay if decay is None else _local_decay(decay, (call, local), k, partial_axes),
    )  # fmt: skip
    over_tokens = [i for i, p in enumerate(placed[1].placements) if p.is_shard(TOKENS)]
    if over_tokens:
        group = placed[0].device_mesh.get_group(over_tokens[0])
        if call.attention.mask == "full":
            o, after = _run_unmasked(run, local, here, group)
        else:
            o, after = _run_in_order(run, local, here, group, return_state)
    else:
        o, after = run(local, here, return_state)
    states = [_whole_state(t, q, k) for t in after] if return_state else []
    return sharding.wrap_shard(o, q, v.shape[3]), *states


def _run_unmasked(run: Run, call: LinearCall, operands: Operands, group: Any) -> tuple[Tensor, State]:
    """Run the local queries on the keys of all ranks. Return o and the state of all keys."""
    q, k, v, gate, before, _ = operands
    total = tuple(_SumRanks.apply(t, group) for t in run(*_without_queries(call, operands), True)[1])
    total = tuple(a + b for a, b in zip(total, before, strict=True)) if before else total
    k_layout, k_tables = _without_tokens(call.k_layout, call.k_tables)
    reading = call._replace(k_layout=k_layout, k_tables=k_tables)
    no_gate = None if gate is None else gate[:, :, :0]
    return run(reading, Operands(q, k[:, :, :0], v[:, :, :0], no_gate, total), False)[0], total


def _run_in_order(
    run: Run, call: LinearCall, operands: Operands, group: Any, return_state: bool
) -> tuple[Tensor, State]:
    """Run the local tokens with an initial state from the other ranks. Return o and the state after all tokens."""
    both, k = call.attention.has_both_directions, operands.k
    with no_autocast(k):
        if call.attention.rule == "delta":
            parts, transitions = _map_by_delta_rule(run, call, operands)
        else:
            parts, transitions = _map_by_decay(run, call, operands)
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

    ``parts`` (R, B, H, ...) holds each rank's B. ``transitions`` holds each rank's T, as matrices (R, B, H, E, E) or
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
    """Return B and T for rule "add", where T is the product of the decays, or 1 without a decay.

    In each direction, B is a sum over all keys, in which the decays act like gates. So B needs no scan.
    """
    _, k, _, gate, _, decay = operands
    state_call, given = _without_queries(call, operands)
    state_call = state_call._replace(attention=call.attention._replace(mask="full", block=0, memory="sum"))
    if not call.attention.forgets:
        return run(state_call, given, True)[1], (k.new_ones(k.shape[:2], dtype=accumulator(k.dtype)),)
    dtype, both = accumulator(k.dtype), call.attention.has_both_directions
    ends, block = (call.k_layout.ends, call.attention.block) if call.attention.mask == "block" else ((0, 0), 1)
    num_blocks = (k.shape[2] - sum(ends)) // block
    logs = lay_out_decay(decay, num_blocks, k.new_empty((), dtype=torch.float64)).log()
    after = torch.nn.functional.pad(logs.flip(-1).cumsum(-1).flip(-1), (0, 1))
    before = torch.nn.functional.pad(logs.cumsum(-1), (1, 0))
    # One entry per slot: the prefix, the blocks and the suffix.
    slots = [torch.nn.functional.pad(after, (0, 1))] + [torch.nn.functional.pad(before, (1, 0))] * both
    parts: State = ()
    for logs_of_slots in slots:
        weights = _expand_slots(logs_of_slots.exp().to(dtype), ends, block).expand(k.shape[0], -1, -1)
        if gate is not None:
            weights = torch.where(gate, weights, 0) if gate.dtype == torch.bool else gate.to(dtype) * weights
        parts += run(state_call, given._replace(gate=weights, decay=None), True)[1]
    return parts, (after[..., 0].exp().to(dtype).expand(k.shape[:2]),)


def _expand_slots(values: Tensor, ends: tuple[int, int], block: int) -> Tensor:
    """Repeat each slot's value, (..., F + 2), once per token. The slots are the prefix, the blocks and the suffix."""
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
    call, operands = _without_queries(call, operands)
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

    If the identity matrix is too large for the kernels, each run handles D_v of its columns, where D_v is the number of
    channels of v.
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


def _without_queries(call: LinearCall, operands: Operands) -> tuple[LinearCall, Operands]:
    """Return a call and operands without queries or an initial state.

    Use them to compute only the state of the keys.
    """
    q_layout, q_tables = _without_tokens(call.q_layout, call.q_tables)
    q = operands.q.new_empty((*operands.q.shape[:2], 0, operands.q.shape[3]))
    return call._replace(q_layout=q_layout, q_tables=q_tables), operands._replace(q=q, state=())


def _without_tokens(layout: Layout, tables: Tables) -> tuple[Layout, Tables]:
    """Return a layout and tables for zero tokens. They are new objects, so q and k no longer share them."""
    tables = Tables(*tables)
    if tables.coords is None:
        return layout._replace(num_tokens=0), tables
    rotated = None if tables.rotated is None else tables.rotated[..., :0]
    return Layout(0, 0, 0, 0, ()), tables._replace(coords=tables.coords[..., :0, :], rotated=rotated)


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


def _gather(given: tuple[State, State], group: Any) -> tuple[State, State]:
    """Gather tensors (B, H, ...) from R ranks into tensors (R, B, H, ...), with a single all-gather."""
    parts, transitions = given
    tensors = (*parts, *transitions)
    rows = torch.cat([t.flatten(2) if t.ndim > 2 else t.unsqueeze(2) for t in tensors], dim=2)
    ranks = _GatherRanks.apply(rows, group).split([t.shape[2:].numel() for t in tensors], dim=3)
    found = tuple(t.reshape(t.shape[0], *like.shape) for t, like in zip(ranks, tensors, strict=True))
    return found[: len(parts)], found[len(parts) :]


class _GatherRanks(torch.autograd.Function):
    """All-gather a tensor (...) over the R ranks of a group. The result has shape (R, ...)."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        found = t.new_empty((dist.get_world_size(group), *t.shape))
        dist.all_gather([*found], t.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx, *grads):
        return _SumRanks.apply(*grads, ctx.group)[dist.get_rank(ctx.group)], None


class _KeepFirst(torch.autograd.Function):
    """Identity function that keeps the gradient only on the first rank, because all ranks have the same gradient."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        return grad if dist.get_rank(ctx.group) == 0 else torch.zeros_like(grad), None


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
    if call.cu_seqlens is not None and sharding.count_ranks(q, TOKENS) * sharding.count_ranks(q, BATCH) > 1:
        raise ValueError(
            f"cu_seqlens: expected all tokens on each rank, got q with a sharded batch or sharded tokens, "
            f"{tuple(q.placements)}"
        )
    if sum(p.is_shard(TOKENS) for p in k.placements) > 1:
        raise ValueError(f"q: expected tokens sharded over a single mesh dimension, got {tuple(q.placements)}")
    if k.shape[1] % sharding.count_ranks(k, HEADS):
        raise ValueError(
            f"k: expected a number of heads divisible by {sharding.count_ranks(k, HEADS)} (the number of ranks), or 1 "
            f"replicated head, got {k.shape[1]}"
        )
    for tables, x in ((call.q_tables, q), (call.k_tables, k)):
        sharding.check_cut(tables, x)
        sharding.local_part(x, HEADS)


def _check_blocks_of_ranks(call: LinearCall, q: Any) -> None:
    """Check the blocks of all ranks on every rank. If only one rank raised an error, the other ranks would hang."""
    num_ranks, num_tokens = sharding.count_ranks(q, TOKENS), q.shape[2]
    if call.attention.mask != "block" or num_ranks == 1:
        return
    if call.q_tables.coords is not None:
        raise ValueError(
            "positions: expected a Grid with block= and sharded tokens, because every rank must know the prefix and "
            "suffix, got Coordinates"
        )
    layout, step = call.q_layout, max(1, -(-num_tokens // num_ranks))
    for begin in range(0, num_tokens, step):
        part = layout._replace(num_tokens=min(step, num_tokens - begin), start=layout.start + begin)
        check_edges(part, layout.start + num_tokens, call.attention.block)


def _find_partial_axes(q: Any, k: Any) -> list[int]:
    """Return the mesh axes along which q is sharded but k is not. Along these, ranks compute partial gradients of k."""
    return [
        i for i, (a, b) in enumerate(zip(q.placements, k.placements, strict=True)) if a.is_shard() and b.is_replicate()
    ]


def _local(x: Any, q: Any) -> Tensor:
    """Return this rank's shard of q, k or v."""
    from torch.distributed.tensor import Partial

    partial_axes = _find_partial_axes(q, x)
    grads = [Partial() if i in partial_axes else p for i, p in enumerate(x.placements)]
    # This is needed even if no data moves, because its backward pass gives the summed gradient the placements of x.
    return x.redistribute(x.device_mesh, x.placements).to_local(grad_placements=grads)


def _local_decay(decay: Any, calls: tuple[LinearCall, LinearCall], k: Any, partial_axes: list[int]) -> Tensor:
    """Return the decays of this rank's samples, heads and blocks. ``calls`` is (global call, local call)."""
    sizes = {HEADS: 0} if decay.ndim == 1 else {BATCH: 0, HEADS: 1}
    dims = {dim: place for dim, place in sizes.items() if decay.shape[place] > 1}
    found = sharding.take_local(decay, k, dims, partial_axes)
    if decay.ndim == 1 or sharding.count_ranks(k, TOKENS) == 1:
        return found
    (start, length), block = sharding.local_part(k, TOKENS), calls[0].attention.block
    if calls[0].attention.mask == "block":
        prefix, own = calls[0].k_layout.ends[0], calls[1].k_layout.ends
        start, length = max(0, start - prefix) // block, (length - sum(own)) // block
    return found[:, :, start : start + length]


def _localize(call: LinearCall, q: Any, k: Any) -> LinearCall:
    """Return the call for this rank's samples, heads and tokens."""
    q_layout, q_tables = k_layout, k_tables = _local_side(call, call.q_layout, call.q_tables, q)
    partial_axes = _find_partial_axes(q, k)
    if partial_axes or call.k_tables is not call.q_tables:
        k_layout, k_tables = _local_side(call, call.k_layout, call.k_tables, k, partial_axes)
        # q and k share one tensor of frequencies, so autograd adds their gradients before ranks communicate.
        k_tables = k_tables._replace(omega=q_tables.omega, amplitude=q_tables.amplitude)
    in_rows = call.spec.map != "none"  # without a map, the layout of a shard keeps its prefix and suffix
    sides = [(call.q_layout, q), (call.k_layout, k)]
    cu_seqlens: Any = call.cu_seqlens
    return call._replace(
        q_layout=q_layout, k_layout=k_layout, q_tables=q_tables, k_tables=k_tables, launches=None,
        cu_seqlens=cu_seqlens.to_local() if is_sharded(cu_seqlens) else cu_seqlens,
        weights=sharding.local_weights(call.weights, sides, in_rows, partial_axes),
    )  # fmt: skip


def _local_side(
    call: LinearCall, layout: Layout, tables: Tables, x: Any, partial_axes: Sequence[int] = ()
) -> tuple[Layout, Tables]:
    if call.spec.map != "none":
        return sharding.local_positions(layout, tables, x, partial_axes)
    start, length = sharding.local_part(x, TOKENS)
    return layout._replace(num_tokens=length, start=layout.start + start), tables


def _whole_state(t: Tensor, q: Any, k: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    placements = []
    for axis, (ours, theirs) in enumerate(zip(q.placements, k.placements, strict=True)):
        cut = theirs.is_shard(BATCH) or theirs.is_shard(HEADS)
        placements.append(theirs if cut else Replicate())
        if ours.is_shard() and not cut:
            t = _KeepFirst.apply(t, q.device_mesh.get_group(axis))
    batch = k.shape[0] if sharding.count_ranks(k, BATCH) > 1 else t.shape[0]  # number of samples or of packed sequences
    shape = torch.Size((batch, k.shape[1], *t.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t.contiguous(), q.device_mesh, placements, run_check=False, shape=shape, stride=stride)
