"""Launch linear attention with memory that forgets.

It forgets from block to block (kernels/memory.py) or, with a causal mask, from token to token (kernels/decay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .. import kernels
from ..core.call import Variant
from ..core.launching import current_device
from ..core.memory import like_in_memory
from ..kernels.signature import pack
from . import launch
from .call import LinearCall, LinearNeeds, Operands
from .launch import (
    Grads,
    Pieces,
    Seen,
    Sizes,
    Work,
    as_table,
    bound_blocks,
    differentiate_causal_keys,
    differentiate_causal_queries,
    differentiate_keys,
    differentiate_queries,
    form_states,
    gate_with_strides,
    gates_with_strides,
    join_state,
    make_pieces,
    measure,
    refine,
    split_state,
    with_strides,
    write_causal,
    write_outputs,
)
from .plan import LinearPass

__all__ = ["backward", "forward", "saved_shapes"]

ROWS = 16  # rows of a transposed state per program of a scan
COLUMNS = 64  # columns per tile of these rows
TILE = 32  # rows and columns of A's gradient per program


class Memory(NamedTuple):
    """Results of the forward scans that the backward uses."""

    seen: Tensor  # S that the tokens of each block see, as operands: (F, B H_k, D_v Ê)
    sums: Tensor  # the normaliser's sums
    series: Tensor  # states before each block and after the last: (F + 1, B H_k, size)
    later: Tensor | None = None  # states of the backward scan, each at the next index
    transitions: Tensor | None = None  # A of each piece of the tokens


class Extent(NamedTuple):
    """Rows of a state that a scan multiplies by the same matrix."""

    width: int
    num_rows: int
    begin: int  # first element in a state
    matrix_begin: int  # first element of the matrix in a piece's transitions


# --- forward ---------------------------------------------------------------------------------------------------------


def forward(call: LinearCall, operands: Operands, return_state: bool, keep: bool) -> list[Tensor]:
    """Return o; with return_state, the state after the last token; and with keep, what the backward can reuse."""
    work = Work(call, operands)
    o = like_in_memory(work.q, work.sizes.v_dim)
    with current_device(work.q):
        if call.attention.mask == "causal":
            work.log_decay = form_log_decay(work, operands)
            seen, series = sum_before(work, operands, return_state)
            write_causal(work, o, seen)
            last = split_state(work, series[-1]) if return_state and series is not None else []
            return [o, *last, *(seen if keep else ())]
        memory = form_memory(work, operands)
        write_outputs(work, o, (memory.seen, memory.sums))
        last = split_state(work, memory.series[-1]) if return_state else []
        if return_state and memory.later is not None:
            last += split_state(work, memory.later[0])
    return [o, *last, *([t for t in memory if t is not None] if keep else ())]


def form_memory(work: Work, operands: Operands) -> Memory:
    """Compute B and A of all pieces, and scan them."""
    attention, pieces = work.call.attention, work.pieces(of_queries=False)
    parts = form_states(work, pieces, exact=True)
    transitions = form_transitions(work, pieces) if attention.rule == "delta" else None
    decay = lay_out_decay(work, operands.decay, pieces)
    first, behind = join_states(work, operands.state)
    scan = Scan(work, locate_blocks(work, pieces), transitions, decay)
    series, _ = scan.run(parts, first)
    later = scan.run(parts, behind, backward=True)[0] if attention.has_both_directions else None
    return Memory(
        *split_sums(work, add_scans(series[1:], None if later is None else later[1:])), series, later, transitions
    )


def join_states(work: Work, state: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the state that the forward scan starts with, and that of the backward scan, as the kernels have them."""
    count = len(state) // 2 if work.call.attention.has_both_directions else len(state)
    first, behind = (join_state(work, part) if part else None for part in (state[:count], state[count:]))
    return first, behind


def add_scans(forward: Tensor, backward: Tensor | None) -> Tensor:
    return forward if backward is None else forward + backward


def split_sums(work: Work, states: Tensor) -> tuple[Tensor, Tensor]:
    """Split states (.., size) into S, as operands, and the normaliser's sums."""
    matrix, sums = states.split([work.sizes.v_dim * work.sizes.num_features, work.sizes.num_sums], dim=-1)
    return matrix.to(work.operand).contiguous(), sums.contiguous()


def form_transitions(work: Work, pieces: Pieces) -> Tensor:
    """Return A for each piece of the keys, (P, B H_k, ..)."""
    sizes = work.sizes
    described = work.describe(LinearPass.STATE, work.k_side, **refine(work, True))
    variant, _ = described
    size = count_transition(sizes, work.call)
    transitions = torch.empty(pieces.num_pieces, sizes.rows, size, dtype=work.acc, device=work.device)
    args = (
        with_strides(work.k, variant), gate_with_strides(work.gate), work.flatten_keys(variant), transitions,
        pieces.numbers, pack(sizes.groups, pieces.num_pieces, sizes.batch),
    )  # fmt: skip
    launch.start(kernels.linear_transition_kernel, sizes.rows * pieces.num_pieces, args, described)
    return transitions


def count_transition(sizes: Sizes, call: LinearCall) -> int:
    """Count the elements of A, including the normaliser's."""
    return sizes.num_features**2 + (sizes.num_sums**2 if call.attention.normalizer == "unrotated" else 0)


def list_extents(work: Work) -> list[Extent]:
    """List the parts of a state to scan: S (plus a row of encoded sums), and unrotated sums."""
    sizes, normalizer = work.sizes, work.call.attention.normalizer
    width = sizes.num_features
    extents = [Extent(width, sizes.v_dim + (normalizer == "encoded"), 0, 0)]
    if normalizer == "unrotated":
        extents.append(Extent(sizes.num_sums, 1, sizes.v_dim * width, width**2))
    return extents


def lay_out_decay(work: Work, decay: Tensor | None, pieces: Pieces) -> Tensor:
    """Return the decay of each block, (F, B H_k). It is 1 for prefix and suffix."""
    sizes = work.sizes
    shape = (pieces.num_slots, sizes.batch, sizes.groups)
    laid = torch.ones(shape, dtype=work.acc, device=work.device)
    if decay is not None:
        first, count = place_blocks(work)
        laid[first : first + count] = decay if decay.ndim == 1 else decay.permute(2, 0, 1)
    return laid.flatten(1)


def place_blocks(work: Work) -> tuple[int, int]:
    """Return the index of the first block after the prefix, and the number of blocks between prefix and suffix."""
    prefix, suffix = work.call.k_layout.ends
    return int(prefix > 0), (work.sizes.num_keys - prefix - suffix) // work.call.attention.block


def locate_blocks(work: Work, pieces: Pieces) -> Tensor:
    """Return the index of the first piece of each block, and the total number of pieces."""
    call = work.call
    return _locate_blocks(pieces.num_tokens, call.k_layout.ends, call.attention.block, pieces.length, work.device)


# The cache keeps tables alive, because a CUDA graph may hold their addresses.
@cache
def _locate_blocks(
    num_tokens: int, ends: tuple[int, int], block: int, length: int, device: torch.device
) -> Tensor:  # fmt: skip
    offsets = [0]
    for begin, end in pairwise(bound_blocks(num_tokens, ends, block)):
        offsets.append(offsets[-1] + triton.cdiv(end - begin, length))
    return as_table(offsets if len(offsets) > 1 else [0, 1], device)


class Scan(NamedTuple):
    """The scans of a call, which share A and the decay."""

    work: Work
    offsets: Tensor  # first piece of each block
    transitions: Tensor | None
    decay: Tensor

    def run(
        self,
        parts: Tensor,
        first: Tensor | None,
        *,
        backward: bool = False,
        adds_first: bool = False,
        partner: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a scan; return its series and, with a partner, dg (F, B H_k). See :func:`linear_memory_scan_kernel`."""
        work, sizes, call = self.work, self.work.sizes, self.work.call
        num_blocks, device = len(self.decay), work.device
        series = torch.empty(num_blocks + 1, sizes.rows, sizes.state, dtype=work.acc, device=device)
        repeats, found = parts.shape[1] // max(1, sizes.rows), []
        for extent in list_extents(work):
            blocks = triton.cdiv(extent.num_rows, ROWS)
            ddecay = None
            if partner is not None:
                ddecay = torch.empty(blocks, num_blocks, sizes.rows, dtype=torch.float64, device=device)
                found.append(ddecay)
            variant = Variant(
                block_r=ROWS, block_c=choose_columns(extent.width), width=extent.width, memory=call.attention.rule,
                adds_first=adds_first, need_ddecay=partner is not None, wide=work.acc == torch.float64,
            )  # fmt: skip
            counts = pack(sizes.rows, repeats, num_blocks, extent.num_rows, int(backward))
            places = pack(sizes.state, extent.begin, count_transition(sizes, call), extent.matrix_begin)
            args = (
                (parts, self.transitions, first), self.decay, (series, partner, ddecay), self.offsets,
                (counts, places),
            )  # fmt: skip
            launch.start(kernels.linear_memory_scan_kernel, sizes.rows * blocks, args, (variant, {}))
        return series, torch.cat(found).sum(0) if found else None


def choose_columns(width: int) -> int:
    return min(COLUMNS, max(16, triton.next_power_of_2(width)))


def saved_shapes(
    call: LinearCall, operands: Operands, return_state: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:  # fmt: skip
    """Return the shapes and dtypes of what forward keeps, from the shapes and dtypes of a call."""
    sizes = measure(call, operands)
    pieces = make_pieces(call, sizes.num_keys, sizes, call.k_layout, tabled=False)
    shape = (pieces.num_slots, sizes.rows)
    if call.attention.mask == "causal":
        found = [((*shape, sizes.v_dim * sizes.num_features), sizes.operand), ((*shape, sizes.num_sums), sizes.acc)]
        return found if operands.state or return_state or pieces.num_pieces > 1 else []
    series = ((pieces.num_slots + 1, sizes.rows, sizes.state), sizes.acc)
    found = [((*shape, sizes.v_dim * sizes.num_features), sizes.operand), ((*shape, sizes.num_sums), sizes.acc), series]
    if call.attention.has_both_directions:
        found.append(series)
    if call.attention.rule == "delta":
        found.append(((pieces.num_pieces, sizes.rows, count_transition(sizes, call)), sizes.acc))
    return found


# --- backward --------------------------------------------------------------------------------------------------------


def backward(
    call: LinearCall,
    grads: Sequence[Tensor],
    operands: Operands,
    saved: Sequence[Tensor],
    needs: LinearNeeds,
    outs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return the gradients of :func:`engine.linear.launch.backward`, then that of the decay if it is needed."""
    how = differentiate_causal if call.attention.mask == "causal" else differentiate
    return launch.backward(call, grads, operands, saved, needs, outs, how)


def differentiate(
    work: Work, grads: Grads, operands: Operands, dstate: Sequence[Tensor], saved: Sequence[Tensor]
) -> list[Tensor]:
    """Write dq, dk, dv and dβ. Return the gradients of the state and the decay, if they are needed."""
    attention, pieces = work.call.attention, work.pieces(of_queries=True)
    memory = restore(work, saved) if saved else form_memory(work, operands)
    parts = differentiate_queries(work, grads, (memory.seen, memory.sums))
    if work.sizes.num_queries == 0:  # a call that only forms a state: zeros for each piece of the keys
        pieces = work.pieces(of_queries=False)
        parts = parts.new_zeros(pieces.num_pieces, *parts.shape[1:])
    decay = lay_out_decay(work, operands.decay, pieces)
    scan, wanted = Scan(work, locate_blocks(work, pieces), memory.transitions, decay), work.needs.decay
    first, behind = join_states(work, dstate)
    gradients, ddecay = scan.run(
        parts, first, backward=True, adds_first=True, partner=memory.series if wanted else None
    )  # fmt: skip
    before = Pair(memory.series[:-1], gradients[1:])
    later, last = None, split_state(work, gradients[0]) if work.needs.state else []
    if memory.later is not None:
        found, more = scan.run(parts, behind, partner=memory.later if wanted else None)
        later = Pair(memory.later[1:], found[:-1])
        last += split_state(work, found[-1]) if work.needs.state else []
        ddecay = None if ddecay is None or more is None else ddecay + more
    dseen = split_sums(work, add_scans(before.gradients, None if later is None else later.gradients))
    if attention.rule == "delta":
        differentiate_delta(work, grads, dseen, (before, later), decay)
    else:
        differentiate_keys(work, grads, dseen)
    if wanted and ddecay is not None and operands.decay is not None:
        last.append(reduce_block_decay(work, ddecay, operands.decay))
    return last


def restore(work: Work, saved: Sequence[Tensor]) -> Memory:
    seen, sums, series, *others = saved
    later = others.pop(0) if work.call.attention.has_both_directions else None
    return Memory(seen, sums, series, later, others[0] if others else None)


class Pair(NamedTuple):
    """States at the start of each block, in scan order, and their gradients: (F, B H_k, size)."""

    states: Tensor
    gradients: Tensor


def differentiate_delta(
    work: Work, grads: Grads, dseen: tuple[Tensor, Tensor], scans: tuple[Pair, Pair | None], decay: Tensor
) -> None:
    """Write dk, dv and dβ for the delta rule."""
    sizes, pieces = work.sizes, work.pieces(of_queries=False)
    forward, backward = scans
    width = sizes.num_features
    num_rows = list_extents(work)[0].num_rows
    matrices = torch.empty(len(decay), sizes.rows, width**2, dtype=work.operand, device=work.device)
    column = min(TILE, choose_columns(width))
    variant = Variant(block_r=ROWS, block_c=column, width=width, wide=work.acc == torch.float64)
    args = (
        tuple(forward), (None, None) if backward is None else tuple(backward), decay, matrices,
        pack(num_rows, sizes.state),
    )  # fmt: skip
    programs = len(decay) * sizes.rows * triton.cdiv(width, column) ** 2
    launch.start(kernels.linear_transition_gradient_kernel, programs, args, (variant, {}))
    vectors, used = None, [pair for pair in scans if pair is not None]
    if work.call.attention.normalizer == "unrotated":
        begin = sizes.v_dim * width
        vectors = torch.stack(
            [t for pair in used for t in (-decay[..., None] * pair.gradients[..., begin:], pair.states[..., begin:])],
            dim=2,
        )
    outs = [grads.dk, grads.dv]
    described = work.describe(
        LinearPass.KEYS, work.k_side, outs, need_dgate=grads.dgate is not None, num_scans=len(used), memory="delta"
    )
    variant, _ = described
    args = (
        tuple(with_strides(t, variant) for t in (work.k, work.v, *outs)),
        (gate_with_strides(work.gate), gate_with_strides(grads.dgate)), work.flatten_keys(variant, grads.k_weights),
        dseen, (matrices, vectors), grads.k_partial, pieces.numbers,
        pack(sizes.groups, pieces.num_pieces, sizes.batch),
    )  # fmt: skip
    launch.start(kernels.linear_memory_key_kernel, sizes.rows * pieces.num_pieces, args, described)


def reduce_block_decay(work: Work, ddecay: Tensor, decay: Tensor) -> Tensor:
    """Sum the gradient to the shape and dtype of the decay that was passed."""
    first, count = place_blocks(work)
    whole = ddecay[first : first + count].unflatten(1, (work.sizes.batch, work.sizes.groups)).permute(1, 2, 0)
    if decay.ndim == 1:
        whole = whole.sum((0, 2))
    return whole.sum_to_size(decay.shape).to(decay.dtype).contiguous()


# --- from token to token ---------------------------------------------------------------------------------------------


def form_log_decay(work: Work, operands: Operands) -> Tensor:
    """Return log g of each token of each head, (B, H_k, N)."""
    sizes, decay = work.sizes, operands.decay
    assert decay is not None
    logs = decay.detach().to(work.acc).log()
    logs = logs[None, :, None] if logs.ndim == 1 else logs
    return logs.expand(sizes.batch, sizes.groups, sizes.num_keys)


def sum_before(work: Work, operands: Operands, has_state: bool) -> tuple[Seen, Tensor | None]:
    """Return the states before each piece, and their series; nothing if one program handles all tokens."""
    sizes, pieces = work.sizes, work.pieces(of_queries=False)
    if not operands.state and not has_state and pieces.num_pieces == 1:
        return (), None
    described = work.describe(LinearPass.STATE, work.k_side, **refine(work, True))
    variant, _ = described
    states = torch.empty(pieces.num_pieces, sizes.rows, sizes.state, dtype=work.acc, device=work.device)
    args = (
        with_strides(work.k, variant), with_strides(work.v, variant), gates_with_strides(work),
        work.flatten_keys(variant), states, pieces.numbers, pack(sizes.groups, pieces.num_pieces, sizes.batch),
    )  # fmt: skip
    launch.start(kernels.linear_decay_state_kernel, sizes.rows * pieces.num_pieces, args, described)
    series, _ = scan_pieces(work).run(states, join_state(work, operands.state) if operands.state else None)
    return split_sums(work, series[:-1]), series


def scan_pieces(work: Work) -> Scan:
    """Return a scan over the states of pieces, with the total decay of each piece."""
    pieces, sizes = work.pieces(of_queries=False), work.sizes
    assert work.log_decay is not None
    assert pieces.table is not None
    sums = torch.nn.functional.pad(work.log_decay.to(torch.float64).cumsum(-1), (1, 0))
    begins, ends = (pieces.table[:, i].long() for i in (0, 1))
    factors = (sums[..., ends] - sums[..., begins]).exp().permute(2, 0, 1).reshape(-1, sizes.rows)
    return Scan(work, _count_up(pieces.num_pieces, work.device), None, factors.to(work.acc).contiguous())


@cache
def _count_up(count: int, device: torch.device) -> Tensor:
    return as_table([*range(count + 1)], device)


def differentiate_causal(
    work: Work, grads: Grads, operands: Operands, dstate: Sequence[Tensor], saved: Sequence[Tensor]
) -> list[Tensor]:
    """Do the same as :func:`differentiate`, for a causal mask.

    The gradient of log g_n is g_n (dS_n · S_{n−1}). It has three parts: the product of the state before the piece with
    its gradient; a running sum over the tokens of the piece, plus what each key gives to later blocks and minus what
    each query reads from earlier ones; and, within a block, all pairs of an earlier key and a later query.
    """
    sizes, pieces, wanted = work.sizes, work.pieces(of_queries=True), work.needs.decay
    work.log_decay = form_log_decay(work, operands)
    seen = tuple(saved) or sum_before(work, operands, False)[0]
    scales = differentiate_causal_queries(work, grads, seen)
    dseen, gradients = (), None
    needs_first = work.needs.state or (wanted and bool(operands.state))
    if pieces.num_pieces > 1 or dstate or needs_first:
        parts = sum_query_states(work, scales)
        gradients, _ = scan_pieces(work).run(parts, join_state(work, dstate) if dstate else None, backward=True)
        dseen = split_sums(work, gradients[1:])
    products = None
    if wanted:
        products = torch.empty(sizes.batch, sizes.groups, sizes.num_keys, dtype=work.acc, device=work.device)
    differentiate_causal_keys(work, grads, dseen, scales, products)
    last = split_state(work, gradients[0]) if work.needs.state and gradients is not None else []
    if products is not None and operands.decay is not None:
        dlogs = sum_decay_gradients(work, seen, gradients, scales, products)
        last.append(reduce_decay(dlogs, operands.decay))
    return last


def sum_decay_gradients(
    work: Work, seen: Seen, gradients: Tensor | None, scales: Tensor, products: Tensor
) -> Tensor:  # fmt: skip
    """Compute the gradient of log g, (B, H_k, N), from the kernels' sums. See :func:`differentiate_causal`."""
    sizes, length = work.sizes, work.pieces(of_queries=True).length
    read, crossing = scales[2:].view(2, sizes.batch, sizes.groups, sizes.repeats, -1).double().sum(3)
    change = torch.nn.functional.pad((products.double() - read).cumsum(-1), (1, 0))[..., : sizes.num_keys]
    piece = torch.arange(sizes.num_keys, device=work.device) // length
    dlogs = crossing + change - change[..., piece * length]
    if seen and gradients is not None:
        states = torch.cat([t.double() for t in seen], dim=-1)
        start = (states * gradients[: len(states)]).sum(-1).view(-1, sizes.batch, sizes.groups)
        dlogs = dlogs + start.permute(1, 2, 0)[..., piece]
    return dlogs


def sum_query_states(work: Work, scales: Tensor) -> Tensor:
    """Return dS and dZ before each piece, by query head."""
    sizes, pieces = work.sizes, work.pieces(of_queries=True)
    described = work.describe(LinearPass.QUERY_STATE, work.q_side, **refine(work, True))
    variant, _ = described
    heads = sizes.rows * sizes.repeats
    parts = torch.empty(pieces.num_pieces, heads, sizes.state, dtype=work.acc, device=work.device)
    args = (
        with_strides(work.q, variant), with_strides(work.do, variant), gate_with_strides(work.log_decay),
        work.flatten_queries(variant), scales, parts, pieces.numbers, work.counts(pieces),
    )  # fmt: skip
    launch.start(kernels.linear_decay_query_state_kernel, heads * pieces.num_pieces, args, described)
    return parts


def reduce_decay(dlogs: Tensor, decay: Tensor) -> Tensor:
    """Convert the gradient of log g (B, H_k, N) to that of the decay that was passed."""
    if decay.ndim == 1:
        dlogs = dlogs.sum((0, 2))
    return (dlogs.sum_to_size(decay.shape) / decay).to(decay.dtype).contiguous()
