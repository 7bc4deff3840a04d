"""Launch the kernels for linear attention with decay, the delta rule or both directions.

The kernels for block masks are in kernels/memory.py, and those for causal masks in kernels/decay.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import kernels
from ..core import launching
from ..core.call import Variant
from ..kernels.signature import pack_numbers
from . import launch
from .call import LinearCall, LinearNeeds, Operands
from .launch import Grads, LaunchInputs, Pieces, Sizes, SlotStates
from .plan import LinearPass

ROWS = 32  # rows of a transposed state that a program scans
COLUMNS = 64, 32  # columns per tile of these rows, with TF32 products and without
SCAN_WARPS = 8
ROWS_OF_GRADIENT = 16  # rows of states per product in the gradient of A
UNIT = 4  # elements (16 bytes); the kernels define the same constant


class MemoryStates(NamedTuple):
    """Results of the forward scans that the backward pass uses."""

    slot_states: Tensor  # S that the tokens of each block see, as operands: (F, B H_k, D_v Ê)
    sums: Tensor  # the normaliser's sums
    series: Tensor  # states before each block and after the last one: (F + 1, B H_k, size)
    backward_series: Tensor | None = None  # from the backward scan: the state that enters block f is at f + 1
    transitions: Tensor | None = None  # A of each block


class Extent(NamedTuple):
    """Rows of a state that a scan multiplies by the same matrix."""

    num_rows: int
    width: int
    begin: int  # index of the first element within a state
    matrix_begin: int  # index of the matrix's first element within a block's transitions


# --- forward ---------------------------------------------------------------------------------------------------------


def forward(call: LinearCall, operands: Operands, return_state: bool, keep: bool) -> list[Tensor]:
    """Return o and, if requested, the state after the last token and the tensors that the backward pass needs."""
    sum_as = sum_causal_states if call.attention.mask == "causal" else sum_block_states
    return launch.forward(call, operands, return_state, keep, sum_as)


def sum_block_states(inputs: LaunchInputs, returns_final: bool) -> tuple[SlotStates, list[Tensor]]:
    """Return the tensors of :class:`MemoryStates` and, if ``returns_final``, the state after the last token."""
    memory = form_memory(inputs, returns_final)
    final_state = launch.split_state(inputs, memory.series[-1]) if returns_final else []
    if returns_final and memory.backward_series is not None:
        final_state += launch.split_state(inputs, memory.backward_series[0])
    return tuple([t for t in memory if t is not None]), final_state


def form_memory(inputs: LaunchInputs, returns_state: bool = False) -> MemoryStates:
    """Compute each piece's B and each block's A, and scan over the blocks."""
    attention, pieces = inputs.call.attention, inputs.pieces(of_queries=False)
    parts = launch.form_states(inputs, pieces, is_exact=returns_state)
    transitions = form_transitions(inputs, pieces, is_exact=returns_state) if attention.rule == "delta" else None
    decay = lay_out_decay(inputs, pieces)
    initial_state, backward_initial_state = join_states(inputs, inputs.state)
    scan = Scan(inputs, locate_blocks(inputs, pieces), transitions, decay)
    if not attention.has_both_directions:
        slots = launch.allocate_slots(inputs, len(decay))
        series, _ = scan.run(parts, initial_state, slots=slots)
        return MemoryStates(*slots, series, None, transitions)
    series, _ = scan.run(parts, initial_state)
    backward_series, _ = scan.run(parts, backward_initial_state, backward=True)
    slots = split_sums(inputs, series[1:] + backward_series[1:])
    return MemoryStates(*slots, series, backward_series, transitions)


def join_states(inputs: LaunchInputs, state: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the initial states of the forward scan and of the backward scan, in the kernels' layout."""
    count = len(state) // 2 if inputs.call.attention.has_both_directions else len(state)
    return launch.join_state(inputs, state[:count]), launch.join_state(inputs, state[count:])


def split_sums(inputs: LaunchInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """Split states (..., size) into S, in the operands' dtype, and the normaliser's sums."""
    matrix, sums = states.split([inputs.sizes.matrix, inputs.sizes.num_sums], dim=-1)
    return matrix.to(inputs.operand).contiguous(), sums.contiguous()


def form_transitions(inputs: LaunchInputs, pieces: Pieces, is_exact: bool) -> Tensor:
    """Compute the matrix A (F, B H_k, elements) of each block."""
    sizes, call = inputs.sizes, inputs.call
    variant, options = inputs.describe(LinearPass.STATE, inputs.k_side, **launch.refine(inputs, is_exact))
    transitions = inputs.allocate(pieces.num_slots, sizes.rows, count_transition(sizes, call))
    table = launch.tabulate_blocks(
        pieces.num_tokens, call.k_layout.ends, call.attention.block, max(1, pieces.num_tokens), inputs.device
    )
    blocks = pieces._replace(table=table, num_pieces=pieces.num_slots)
    args = (
        *launch.with_strides(variant, inputs.k), launch.gate_with_strides(inputs.gate), inputs.flatten_keys(variant),
        transitions, blocks.numbers, pack_numbers(sizes.groups, blocks.num_pieces, sizes.batch),
    )  # fmt: skip
    tiles = len(variant.feature_blocks) + (len(variant.sum_blocks) if variant.normalizer == "unrotated" else 0)
    launch.launch_with_fallback(
        kernels.linear_transition_kernel, sizes.rows * blocks.num_pieces * tiles, args, variant, options
    )
    return transitions


def count_transition(sizes: Sizes, call: LinearCall) -> int:
    """Return the number of elements in a block's A, including the separate A for unrotated sums."""
    return sizes.num_features**2 + (sizes.num_sums**2 if call.attention.normalizer == "unrotated" else 0)


def list_extents(inputs: LaunchInputs) -> tuple[Extent, Extent]:
    """Return the two parts of a state to scan: S, with any encoded sums as its last row, and any unrotated sums."""
    sizes, normalizer = inputs.sizes, inputs.call.attention.normalizer
    width = sizes.num_features
    return (
        Extent(sizes.v_dim + (normalizer == "encoded"), width, 0, 0),
        Extent(int(normalizer == "unrotated"), sizes.num_sums, sizes.matrix, width**2),
    )


def lay_out_decay(inputs: LaunchInputs, pieces: Pieces) -> Tensor:
    """Return the decay (F, B H_k) of each block. The decay of the prefix and of the suffix is 1."""
    sizes, decay, (first, count) = inputs.sizes, inputs.decay, place_blocks(inputs)
    shape = (pieces.num_slots, sizes.batch, sizes.groups)
    fill = torch.ones if decay is None or count < pieces.num_slots else torch.empty
    block_decay = fill(shape, dtype=inputs.acc, device=inputs.device)
    if decay is not None:
        block_decay[first : first + count] = decay if decay.ndim == 1 else decay.permute(2, 0, 1)
    return block_decay.flatten(1)


def place_blocks(inputs: LaunchInputs) -> tuple[int, int]:
    """Return the index of the first block after the prefix, and the number of blocks between prefix and suffix."""
    prefix, suffix = inputs.call.k_layout.ends
    return int(prefix > 0), (inputs.sizes.num_keys - prefix - suffix) // inputs.call.attention.block


def locate_blocks(inputs: LaunchInputs, pieces: Pieces) -> Tensor:
    """Return the index of each block's first piece, followed by the number of pieces."""
    call = inputs.call
    return _locate_blocks(pieces.num_tokens, call.k_layout.ends, call.attention.block, pieces.length, inputs.device)


# The cache keeps tables alive, because a CUDA graph may hold their addresses.
@cache
def _locate_blocks(num_tokens: int, ends: tuple[int, int], block: int, length: int, device: torch.device) -> Tensor:
    rows = launch.list_blocks(num_tokens, ends, block, length)
    first_pieces = [i for i, row in enumerate(rows) if i == 0 or row[2] > rows[i - 1][2]]
    return launch.make_table([*first_pieces, len(rows)], device)


class Scan(NamedTuple):
    """Inputs that all scans of a call share."""

    inputs: LaunchInputs
    offsets: Tensor  # first piece of each block
    transitions: Tensor | None
    decay: Tensor

    def run(
        self,
        parts: Tensor,
        initial_rows: Tensor | None,
        *,
        backward: bool = False,
        adds_first: bool = False,
        partner: Tensor | None = None,
        slots: SlotStates = (None, None),
    ) -> tuple[Tensor, Tensor | None]:
        """Run a scan. Return its series of states and, if ``partner`` is passed, dg (F, B H_k).

        The arguments are described in :func:`linear_memory_scan_kernel`.
        """
        inputs, sizes, call = self.inputs, self.inputs.sizes, self.inputs.call
        num_blocks = len(self.decay)
        series = inputs.allocate(num_blocks + 1, sizes.rows, sizes.state)
        repeats, extents = parts.shape[1] // max(1, sizes.rows), list_extents(inputs)
        programs = triton.cdiv(extents[0].num_rows, ROWS) + extents[1].num_rows
        ddecay = None
        if partner is not None:
            ddecay = inputs.allocate(programs, num_blocks, sizes.rows, dtype=torch.float64)
        variant = Variant(
            **describe_products(inputs), block_r=ROWS, memory=call.attention.rule, adds_first=adds_first,
            need_ddecay=partner is not None, normalizer=call.attention.normalizer, v_dim=sizes.v_dim,
            num_features=sizes.num_features, num_sums=sizes.num_sums,
        )  # fmt: skip
        unit, totals = UNIT if variant.aligned else 1, (sizes.state, count_transition(sizes, call))
        numbers = (
            pack_numbers(sizes.rows, repeats, num_blocks, int(backward)), pack_numbers(*[n // unit for n in totals]),
            *[pack_numbers(extent.num_rows, *[n // unit for n in extent[1:]]) for extent in extents],
        )  # fmt: skip
        args = (
            (parts, self.transitions, initial_rows), self.decay, (series, partner, ddecay, tuple(slots)), self.offsets,
            numbers,
        )  # fmt: skip
        options = {"num_warps": SCAN_WARPS}
        launch.launch_with_fallback(kernels.linear_memory_scan_kernel, sizes.rows * programs, args, variant, options)
        return series, None if ddecay is None else ddecay.sum(0)


def describe_products(inputs: LaunchInputs) -> dict[str, Any]:
    """Return the precision, tile width and alignment of a variant that multiplies states.

    If ``aligned`` is set, the sizes of states are passed in units of UNIT elements, so loads can be wide.
    """
    fast, sizes = inputs.narrow and launching.has_ptx(inputs.dtype), inputs.sizes
    columns = min(COLUMNS[0 if fast else 1], max(16, triton.next_power_of_2(sizes.num_features)))
    return {
        "fast": fast, "block_c": columns, "width": sizes.num_features, "wide": inputs.acc == torch.float64,
        "operand": launch.name_operand(inputs.dtype),
        "aligned": sizes.num_features % UNIT == sizes.num_sums % UNIT == 0,
    }  # fmt: skip


def find_saved_shapes(
    call: LinearCall, operands: Operands, return_state: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of the tensors that :func:`forward` returns for the backward pass."""
    shapes = launch.find_saved_shapes(call, operands, return_state)
    if call.attention.mask != "causal":
        sizes, num_slots = launch.derive_sizes(call, operands), shapes[0][0][0]
        series = ((num_slots + 1, sizes.rows, sizes.state), sizes.acc)
        shapes += [series, series] if call.attention.has_both_directions else [series]
        if call.attention.rule == "delta":
            shapes.append(((num_slots, sizes.rows, count_transition(sizes, call)), sizes.acc))
    return shapes


# --- backward --------------------------------------------------------------------------------------------------------


def backward(
    call: LinearCall,
    grads: Sequence[Tensor],
    operands: Operands,
    saved: Sequence[Tensor],
    needs: LinearNeeds,
    outs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return the same gradients as :func:`engine.linear.launch.backward` and, if needed, the decay's gradient."""
    differentiate_as = differentiate_causal if call.attention.mask == "causal" else differentiate
    return launch.backward(call, grads, operands, saved, needs, outs, differentiate_as)


def differentiate(
    inputs: LaunchInputs, grads: Grads, dstate: Sequence[Tensor], saved: Sequence[Tensor]
) -> list[Tensor]:
    """Write dq, dk, dv and dβ to ``grads``. Return the gradients of the state and of the decay if they are needed."""
    attention, pieces = inputs.call.attention, inputs.pieces(of_queries=True)
    memory = restore(inputs, saved) if saved else form_memory(inputs)
    parts = launch.differentiate_queries(inputs, grads, (memory.slot_states, memory.sums))
    if inputs.sizes.num_queries == 0:  # the call only forms a state, so each piece of the keys gets zeros
        pieces = inputs.pieces(of_queries=False)
        parts = parts.new_zeros(pieces.num_pieces, *parts.shape[1:])
    decay = lay_out_decay(inputs, pieces)
    scan, needs_ddecay = Scan(inputs, locate_blocks(inputs, pieces), memory.transitions, decay), inputs.needs.decay
    dstate_rows, backward_dstate_rows = join_states(inputs, dstate)
    slots = (None, None) if attention.has_both_directions else launch.allocate_slots(inputs, len(decay))
    gradients, ddecay = scan.run(
        parts, dstate_rows, backward=True, adds_first=True, partner=memory.series if needs_ddecay else None, slots=slots
    )
    forward_pair = Pair(memory.series[:-1], gradients[1:])
    backward_pair, state_gradients = None, launch.split_state(inputs, gradients[0]) if inputs.needs.state else []
    if memory.backward_series is not None:
        backward_gradients, backward_ddecay = scan.run(
            parts, backward_dstate_rows, partner=memory.backward_series if needs_ddecay else None
        )
        backward_pair = Pair(memory.backward_series[1:], backward_gradients[:-1])
        state_gradients += launch.split_state(inputs, backward_gradients[-1]) if inputs.needs.state else []
        ddecay = None if ddecay is None or backward_ddecay is None else ddecay + backward_ddecay
        slots = split_sums(inputs, forward_pair.gradients + backward_pair.gradients)
    if attention.rule == "delta":
        differentiate_delta(inputs, grads, slots, (forward_pair, backward_pair), decay)
    else:
        launch.differentiate_keys(inputs, grads, slots)
    if ddecay is not None and inputs.decay is not None:
        first, count = place_blocks(inputs)
        by_head = ddecay[first : first + count].unflatten(1, (inputs.sizes.batch, inputs.sizes.groups))
        state_gradients.append(reduce_decay(by_head.permute(1, 2, 0), inputs.decay))
    return state_gradients


def restore(inputs: LaunchInputs, saved: Sequence[Tensor]) -> MemoryStates:
    slot_states, sums, series, *optional = saved
    backward_series = optional.pop(0) if inputs.call.attention.has_both_directions else None
    return MemoryStates(slot_states, sums, series, backward_series, optional[0] if optional else None)


class Pair(NamedTuple):
    """The states that enter each block of a scan, and their gradients. Both have shape (F, B H_k, size)."""

    states: Tensor
    gradients: Tensor


def differentiate_delta(
    inputs: LaunchInputs, grads: Grads, dslot_states: SlotStates, scans: tuple[Pair, Pair | None], decay: Tensor
) -> None:
    """Write the delta rule's dk, dv and dβ to ``grads``."""
    sizes, pieces = inputs.sizes, inputs.pieces(of_queries=False)
    forward, backward = scans
    width = sizes.num_features
    num_rows = list_extents(inputs)[0].num_rows
    matrices = inputs.allocate(len(decay), sizes.rows, width**2, dtype=inputs.operand)
    variant = Variant(**describe_products(inputs), block_r=ROWS_OF_GRADIENT)
    args = (
        tuple(forward), (None, None) if backward is None else tuple(backward), decay, matrices,
        pack_numbers(num_rows, sizes.state // (UNIT if variant.aligned else 1)),
    )  # fmt: skip
    programs = len(decay) * sizes.rows * triton.cdiv(width, variant.block_c) ** 2
    launch.launch_with_fallback(kernels.linear_transition_gradient_kernel, programs, args, variant, {})
    vectors, pairs = None, [pair for pair in scans if pair is not None]
    if inputs.call.attention.normalizer == "unrotated":
        tails = [Pair(pair.states[..., sizes.matrix :], pair.gradients[..., sizes.matrix :]) for pair in pairs]
        vectors = torch.stack([t for pair in tails for t in (-decay[..., None] * pair.gradients, pair.states)], dim=2)
    outs = [grads.dk, grads.dv]
    changes: dict[str, Any] = {"need_dgate": grads.dgate is not None, "num_scans": len(pairs), "memory": "delta"}
    variant, options = inputs.describe(LinearPass.DELTA_KEYS, inputs.k_side, outs, **changes)
    gates = launch.gate_with_strides(inputs.gate), launch.gate_with_strides(grads.dgate)
    args = (
        launch.with_strides(variant, inputs.k, inputs.v, *outs), gates, inputs.flatten_keys(variant, grads.k_weights),
        dslot_states, (matrices, vectors), grads.k_partial, pieces.numbers,
        pack_numbers(sizes.groups, pieces.num_pieces, sizes.batch),
    )  # fmt: skip
    programs = sizes.rows * pieces.num_pieces
    launch.launch_with_fallback(kernels.linear_memory_key_kernel, programs, args, variant, options)


# --- from token to token ---------------------------------------------------------------------------------------------


def sum_causal_states(inputs: LaunchInputs, returns_final: bool) -> tuple[SlotStates, list[Tensor]]:
    """Implement :func:`launch.sum_states` for a causal mask with a decay."""
    if not launch.needs_states(inputs, returns_final):
        return (), []
    pieces, (_, needed, per_piece) = inputs.pieces(of_queries=False), inputs.parts(returns_final)
    states = launch.form_states(inputs, needed, returns_final)
    series, _ = scan_parts(inputs, needed).run(states, launch.join_state(inputs, inputs.state))
    slots = split_sums(inputs, series[::per_piece][: pieces.num_pieces])
    return slots, launch.split_state(inputs, series[-1]) if returns_final else []


def scan_parts(inputs: LaunchInputs, parts: Pieces) -> Scan:
    """Return a scan over parts of the tokens instead of blocks. A part's decay is the product of its tokens' decays."""
    sizes = inputs.sizes
    assert inputs.log_decay is not None
    assert parts.table is not None
    begins, ends = parts.table[:, 0], parts.table[:, 1]
    if sizes.num_keys and inputs.decay_per_head:
        logs = (ends - begins)[:, None, None] * inputs.log_decay[..., 0].double()
    else:
        sums = torch.nn.functional.pad(inputs.log_decay.double().cumsum(-1), (1, 0))
        logs = (sums[..., ends] - sums[..., begins]).permute(2, 0, 1)
    factors = inputs.allocate(*logs.shape)
    torch.exp(logs, out=factors)
    return Scan(inputs, _count_up(parts.num_pieces, inputs.device), None, factors.flatten(1))


@cache
def _count_up(count: int, device: torch.device) -> Tensor:
    return launch.make_table([*range(count + 1)], device)


def differentiate_causal(
    inputs: LaunchInputs, grads: Grads, dstate: Sequence[Tensor], saved: SlotStates
) -> list[Tensor]:
    """Implement :func:`differentiate` for a causal mask.

    The gradient of log g_n is g_n (dS_n · S_{n−1}). It is computed as a sum of three terms. The first term is the
    product of the state before the piece and the gradient of that state. The second term is a running sum over the
    tokens of the piece: what each key adds to later blocks, minus what each query reads from earlier blocks. The third
    term is a sum over all pairs of an earlier key and a later query in the same block.
    """
    sizes, pieces, needs_ddecay = inputs.sizes, inputs.pieces(of_queries=True), inputs.needs.decay
    slot_states = saved or sum_causal_states(inputs, False)[0]
    scales = launch.differentiate_causal_queries(inputs, grads, slot_states)
    dslot_states, gradients = (), None
    needs_first = inputs.needs.state or (needs_ddecay and bool(inputs.state))
    if pieces.num_pieces > 1 or dstate or needs_first:
        _, needed, per_piece = inputs.parts(needs_first, backward=True)
        parts = launch.sum_query_states(inputs, needed, (None, None), scales)
        dstate_rows = launch.join_state(inputs, dstate)
        series, _ = scan_parts(inputs, needed).run(parts, dstate_rows, backward=True)
        # Gradients of the state before each piece and after the last one. The first is only needed with needs_first.
        first = [] if needs_first else [series[:1]]
        gradients = torch.cat([*first, series[:-1:per_piece], series[-1:]])
        dslot_states = split_sums(inputs, gradients[1:])
    products = inputs.allocate(sizes.batch, sizes.groups, sizes.num_keys) if needs_ddecay else None
    launch.differentiate_causal_keys(inputs, grads, dslot_states, scales, products)
    state_gradients = launch.split_state(inputs, gradients[0]) if inputs.needs.state and gradients is not None else []
    if products is not None and inputs.decay is not None:
        dlogs = sum_decay_gradients(inputs, slot_states, gradients, scales, products, not dstate)
        state_gradients.append(reduce_decay(dlogs, inputs.decay, of_logs=True))
    return state_gradients


def sum_decay_gradients(
    inputs: LaunchInputs, slot_states: SlotStates, gradients: Tensor | None, scales: Tensor, products: Tensor,
    ends_in_zero: bool,
) -> Tensor:  # fmt: skip
    """Compute the gradient of log g (B, H_k, N) from the kernels' sums, as :func:`differentiate_causal` describes.

    The running sum of a token starts at the first or at the last token of the piece, depending on which side has
    smaller terms. If it always started at the first token, the rounding errors of large terms would persist after the
    state has decayed. Set ``ends_in_zero`` if no gradient reaches the state after the last piece.
    """
    sizes, length = inputs.sizes, inputs.pieces(of_queries=True).length
    if not sizes.num_keys:
        return products
    query_products, crossing = scales[2:].view(2, sizes.batch, sizes.groups, sizes.repeats, -1).double().sum(3)
    num_pieces = -(-sizes.num_keys // length)
    keys, queries = (
        torch.nn.functional.pad(x, (0, num_pieces * length - sizes.num_keys)).unflatten(-1, (num_pieces, length))
        for x in (products.double(), query_products)
    )
    changes = torch.stack((keys - queries, keys.abs() + queries.abs()))  # also the magnitudes of their terms
    before = changes.cumsum(-1) - changes
    after = changes.flip(-1).cumsum(-1).flip(-1)
    begin = before.new_zeros(before.shape[1:-1])
    if slot_states and gradients is not None:
        states = torch.cat([t.double() for t in slot_states], dim=-1)
        begin = (states * gradients[: len(states)]).sum(-1).view(-1, sizes.batch, sizes.groups).permute(1, 2, 0)
    end = begin + after[0, ..., 0]
    end[..., :-1] = begin[..., 1:]
    if ends_in_zero:
        end[..., -1] = 0
    begin, end = begin[..., None], end[..., None]
    is_smaller_before = begin.abs() + before[1] <= end.abs() + after[1]
    running = torch.where(is_smaller_before, begin + before[0], end - after[0])
    return running.flatten(-2)[..., : sizes.num_keys] + crossing


def reduce_decay(gradient: Tensor, decay: Tensor, of_logs: bool = False) -> Tensor:
    """Reduce the gradient (B, H_k, F) of each g, or of log g, to the shape and dtype of ``decay``."""
    if decay.ndim == 1:
        gradient = gradient.sum((0, 2))
    gradient = gradient.sum_to_size(decay.shape)
    return (gradient / decay if of_logs else gradient).to(decay.dtype).contiguous()
