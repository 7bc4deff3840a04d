"""Launch the linear attention kernels. Variants and arguments are derived from shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...reference import ACTIVATIONS, split_pairs
from .. import kernels
from ..core import launching, recording
from ..core.call import Call, Layout, Needs, Spec, Variant
from ..core.memory import accumulator, like_in_memory
from ..core.reduction import Partials, Sums, reduce_partial, reduce_weights
from ..kernels.signature import pack_numbers
from . import plan
from .call import LinearCall, LinearNeeds, Operands
from .plan import LinearPass, LinearTile

NO_NEEDS = LinearNeeds()
COLUMNS = 128  # with at least this many features, o of a causal block is faster with tokens as columns
WARPGROUP_ROWS = 64  # minimum number of rows of the first factor on Hopper's matrix units
EARLY = (LinearPass.QUERIES, LinearPass.QUERIES_OMEGA, LinearPass.QUERY_STATE)  # dq and dS may run at the same time
FORWARD = (LinearPass.FORWARD, LinearPass.STATE, LinearPass.OUTPUT, LinearPass.CAUSAL)
# Passes that compute no gradients of frequencies or weights, so that their kernels don't depend on which are learned.
UNLEARNED = (*FORWARD, LinearPass.QUERY_STATE, LinearPass.NORMALIZER, LinearPass.NORMALIZER_GRADIENT)


class Sizes(NamedTuple):
    """Sizes and dtypes of a call."""

    batch: int
    groups: int  # H_k
    repeats: int  # H_q / H_k
    num_queries: int
    num_keys: int
    head_dim: int
    v_dim: int
    num_features: int
    num_sums: int  # channels of the normaliser's sums over tokens
    raw: bool  # features are the rows of q and k, unchanged
    one_side: bool  # q and k share positions and tables
    acc: torch.dtype  # dtype of sums
    operand: torch.dtype  # dtype of matrix operands; interpreters round float32 to bfloat16 values

    @property
    def rows(self) -> int:
        return self.batch * self.groups

    @property
    def query_rows(self) -> int:
        return self.rows * self.repeats

    @property
    def matrix(self) -> int:
        """Number of elements in S of one head."""
        return self.v_dim * self.num_features

    @property
    def state(self) -> int:
        """Number of elements in S and Z of one head."""
        return self.matrix + self.num_sums


def derive_sizes(call: LinearCall, operands: Operands) -> Sizes:
    """Derive the sizes and dtypes from a call and its operands."""
    batch, heads, num_queries, head_dim = operands.q.shape
    _, groups, num_keys, v_dim = operands.v.shape
    features = call.spec.out_dim(head_dim)
    sums = {"unrotated": head_dim, "encoded": features, "none": 0}[call.attention.normalizer]
    spec = call.spec
    raw = spec.map == spec.act == spec.norm == call.attention.normalizer == "none"
    raw = raw and operands.q.dtype == torch.bfloat16 and operands.gate is None
    dtype, one_side = operands.q.dtype, call.has_one_side
    operand = dtype if dtype.itemsize > 2 else torch.float32 if launching.INTERPRETING else torch.bfloat16
    return Sizes(
        batch, groups, heads // groups, num_queries, num_keys, head_dim, v_dim, features, sums, raw, one_side,
        accumulator(dtype), operand,
    )  # fmt: skip


# --- pieces of the tokens --------------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """Division of the tokens into slots and pieces. Each program of a head processes one piece."""

    table: Tensor | None  # (P, 4): begin, end, slot and sequence. None for one slot with equal pieces
    length: int
    num_pieces: int
    num_slots: int
    num_tokens: int

    @property
    def numbers(self) -> tuple:
        return self.table, pack_numbers(self.length, self.num_tokens)

    @property
    def is_whole(self) -> bool:
        """Return whether a single piece contains all tokens, without a causal mask, blocks or packed sequences."""
        return self.table is None and self.num_pieces == 1


def make_pieces(call: LinearCall, num_tokens: int, sizes: Sizes, layout: Layout, makes_table: bool = True) -> Pieces:
    """Divide the tokens into pieces.

    All tokens of a slot see the same state. A slot is a sample, a block, a packed sequence or, with a causal mask, a
    piece. Tables are cached forever, so set ``makes_table`` to False if you only need the number of pieces.
    """
    mask, device = call.attention.mask, call.q_tables.omega.device
    divisor = plan.choose_divisor(mask == "causal", sizes.raw)
    count, length = plan.cut_pieces(num_tokens, sizes.rows, sizes.matrix, divisor)
    table, num_slots = None, 1
    if call.cu_seqlens is not None:
        count = triton.cdiv(num_tokens, length) + len(call.cu_seqlens) - 1
        num_slots = count if mask == "causal" else len(call.cu_seqlens)
        if makes_table:
            cu_seqlens = call.cu_seqlens.clamp(0, num_tokens)
            table = _tabulate_sequences(cu_seqlens, count, length, length, mask == "causal")
    elif mask != "full":
        ends, block = ((0, 0), length) if mask == "causal" else (layout.ends, call.attention.block)
        blocks = num_tokens, ends, block, length
        rows = list_blocks(*blocks)
        count, num_slots = len(rows), rows[-1][2] + 1
        table = tabulate_blocks(*blocks, device) if makes_table else None
    return Pieces(table, length, count, num_slots, num_tokens)


class Parts(NamedTuple):
    """Parts into which the pieces of a causal call are divided. One program computes the state of each needed part."""

    all_parts: Pieces
    needed_parts: Pieces  # the first parts or, in the backward pass, the last ones
    per_piece: int = 1


def cut_causal(call: LinearCall, pieces: Pieces, sizes: Sizes, needs_all: bool, backward: bool = False) -> Parts:
    """Divide each piece of a causal call into parts, whose states are computed in parallel.

    If ``needs_all`` is False, no state is needed for the last piece or, with ``backward``, for the first piece.
    """
    num_unneeded = 0 if needs_all else 1
    rows = sizes.query_rows if backward else sizes.rows
    num_tokens, length = pieces.num_tokens, pieces.length
    part = plan.cut_parts(length, rows * max(1, pieces.num_pieces - num_unneeded), sizes.state)
    per_piece = triton.cdiv(length, part)
    if call.cu_seqlens is not None:  # only the device knows where pieces begin
        count = pieces.num_pieces + (triton.cdiv(num_tokens, part) if per_piece > 1 else 0)
        table = _tabulate_sequences(call.cu_seqlens.clamp(0, num_tokens), count, length, part, True)
        parts = pieces._replace(table=table, num_pieces=count)
        return Parts(parts, parts if backward else parts._replace(num_pieces=count - num_unneeded))
    table = tabulate_blocks(num_tokens, (0, 0), length, part, call.q_tables.omega.device)
    parts = pieces._replace(table=table, num_pieces=len(table))
    if needs_all:
        return Parts(parts, parts, per_piece)
    needed_table = table[per_piece:] if backward else table[: (pieces.num_pieces - 1) * per_piece]
    return Parts(parts, parts._replace(table=needed_table, num_pieces=len(needed_table)), per_piece)


def _tabulate_sequences(cu_seqlens: Tensor, count: int, length: int, part: int, has_piece_slots: bool) -> Tensor:
    """Build the table of parts on the device, without synchronising to read the sequence lengths.

    Pieces have ``length`` tokens, divided into parts of ``part`` tokens. The table has ``count`` rows, which must be
    enough for any lengths, so some rows may be empty. The caller must clamp cu_seqlens to the number of tokens.
    """
    # Decreasing offsets would create more pieces than the table has rows for.
    cu_seqlens = cu_seqlens.long().cummax(0).values
    begins, ends, per_piece = cu_seqlens[:-1], cu_seqlens[1:], triton.cdiv(length, part)
    lengths = ends - begins
    parts = lengths // length * per_piece + (lengths % length + part - 1) // part
    last = parts.clamp_(min=1).cumsum(0)
    pieces = ((lengths + length - 1) // length).clamp_min(1)
    index = torch.arange(count, device=cu_seqlens.device)
    sequence = (index[:, None] >= last).sum(1)
    exists = sequence < len(parts)
    sequence_index = sequence.clamp_max(len(parts) - 1)
    part_index = index - (last - parts)[sequence_index]
    piece = part_index // per_piece
    piece_begin = begins[sequence_index] + piece * length
    begin = piece_begin + part_index % per_piece * part
    end = torch.minimum(torch.minimum(begin + part, piece_begin + length), ends[sequence_index])
    begin, end = torch.where(exists, begin, 0), torch.where(exists, end, 0)
    slot = torch.where(exists, (pieces.cumsum(0) - pieces)[sequence_index] + piece, 0) if has_piece_slots else sequence
    return torch.stack([begin, end, slot, torch.where(exists, sequence, -1)], dim=1).to(torch.int32)


# The cache keeps tables alive, because a CUDA graph may hold their addresses.
@cache
def tabulate_blocks(num_tokens: int, ends: tuple[int, int], block: int, length: int, device: torch.device) -> Tensor:
    return make_table(list_blocks(num_tokens, ends, block, length), device)


@lru_cache(maxsize=128)
def list_blocks(num_tokens: int, ends: tuple[int, int], block: int, length: int) -> list[list[int]]:
    """Return the rows of a table where each block is a slot, divided into pieces (or parts) of ``length`` tokens.

    Prefix and suffix are separate blocks. With a causal mask, the blocks are the pieces, and ``length`` is that of a
    part.
    """
    prefix, suffix = ends
    bounds = sorted({0, *range(prefix, num_tokens - suffix, block), num_tokens - suffix, num_tokens})
    rows = [
        [n, min(n + length, end), slot, 0]
        for slot, (begin, end) in enumerate(pairwise(bounds))
        for n in range(begin, end, length)
    ]
    return rows or [[0, 0, 0, 0]]


def make_table(rows: list[Any], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int32, device=device)


# --- the work of a call ----------------------------------------------------------------------------------------------


class LaunchInputs:
    """Inputs of a call in the form that kernels read, along with values that all kernels of the call share."""

    def __init__(
        self, call: LinearCall, operands: Operands, do: Tensor | None = None, needs: LinearNeeds = NO_NEEDS
    ) -> None:
        self.call, self.needs, gate = call, needs, operands.gate
        self.q, self.k, self.v, self.do, self.gate = launching.materialise(*operands[:3], do, gate)
        if self.do is not None and not (self.do.stride(3) or self.do.is_meta):  # compilers record meta tensors
            self.do = self.do.contiguous()  # the gradient of a sum would need other kernels
        launches = {} if call.launches is None else call.launches
        sizes = launches.get("sizes")
        if sizes is None:
            sizes = launches["sizes"] = derive_sizes(call, operands)
        self.sizes = sizes
        self.dtype, self.device = self.q.dtype, self.q.device
        self.acc, self.operand, self.narrow = sizes.acc, sizes.operand, self.dtype.itemsize == 2
        if self.gate is not None and self.gate.dtype == torch.bool:
            self.gate = self.gate.view(torch.uint8)
        self.q_side = self.k_side = launching.read_side(call.spec, call.q_layout, call.q_tables, self.narrow)
        if not sizes.one_side:
            self.k_side = launching.read_side(call.spec, call.k_layout, call.k_tables, self.narrow)
        if (self.q_side.tables.phase is None) != (self.k_side.tables.phase is None):
            self.q_side, self.k_side = _add_zero_phase(self.q_side), _add_zero_phase(self.k_side)
        self.weights = call.weights
        if call.spec.norm != "none":
            self.weights = launching.lay_weights(call.weights)
        self.state, self.decay = operands.state, operands.decay
        self.log_decay: Tensor | None = None  # log g (B, H_k, N), with a causal mask
        self.decay_per_head = False
        if call.attention.mask == "causal" and self.decay is not None:
            self.decay_per_head = self.decay.ndim == 1
            logs = self.decay.detach().to(torch.promote_types(self.decay.dtype, self.acc)).log().to(self.acc)
            logs = logs[None, :, None] if self.decay_per_head else logs
            self.log_decay = logs.expand(sizes.batch, sizes.groups, sizes.num_keys)
        self.need_dangles = needs.omega or needs.phase_q or needs.phase_k
        self.tensors = [self.q, self.k, self.v] if do is None else [self.q, self.k, self.v, self.do]
        address, strides = 0, []
        for t in self.tensors:
            address |= t.data_ptr()
            strides.append(t.stride())
        self.is_16_byte_aligned = address % 16 == 0
        # Variants, pieces and numbers from earlier calls with the same sizes, strides and needs.
        self.cache: dict[Any, Any] = launches.setdefault((*strides, self.is_16_byte_aligned, needs), {})

    def describe(
        self, stage: LinearPass, side: Call | None, outs: Sequence[Tensor] = (), **changes: Any
    ) -> tuple[Variant, dict[str, Any]]:
        """Return the variant and the compiler options of a kernel that reads the positions and tables of q or of k.

        If ``side`` is None, the kernel reads those of both q and k, and the variant describes k. If q needs a different
        variant, the field ``queries`` holds it.
        """
        key = stage, side is None, side is self.q_side, *changes.values()
        config = self.cache.get(key)
        if config is None:
            variant, options = self._describe(stage, side or self.k_side, outs, changes)
            queries = variant if side else self._describe(stage, self.q_side, outs, changes)[0]
            if variant != queries:
                # With a causal or block mask, q and k share their positions.
                assert self.call.attention.mask == "full"
                variant = variant._replace(queries=queries)
            config = self.cache[key] = variant, options
        return config

    def _describe(
        self, stage: LinearPass, side: Call, outs: Sequence[Tensor], changes: dict[str, Any]
    ) -> tuple[Variant, dict[str, Any]]:
        spec, sizes, tables = self.call.spec, self.sizes, side.tables
        spec = spec if sizes.raw else _pair_channels(spec, sizes.head_dim)
        tensors = [*self.tensors, *outs]
        aligned = self.is_16_byte_aligned and sizes.head_dim % 8 == sizes.v_dim % 8 == 0
        aligned = aligned and all(launching.strides_in_eights(t.stride()) for t in tensors)
        unit = 8 if aligned else 1
        causal = self.call.attention.mask == "causal"
        tiles, values = self._cut(spec, stage)
        v_begins, v_widths, v_blocks = zip(*values, strict=True)
        ptx = launching.has_ptx(self.dtype)
        regular = aligned and min(*v_blocks, *tiles.feature_blocks) >= WARPGROUP_ROWS
        state = sum(v_blocks) * sum(tiles.feature_blocks)
        normalizer = self.call.attention.normalizer
        is_separate = causal and normalizer == "unrotated" and state > plan.SEPARATE_STATE and self.log_decay is None
        rows = plan.SEPARATE if is_separate else self._choose_rows(spec)
        tile = plan.choose_tile(rows.get(stage, stage), state, self.dtype.itemsize, launching.INTERPRETING, regular)
        need_ddecay = self.log_decay is not None and self.needs.decay
        if need_ddecay and stage is LinearPass.CAUSAL_QUERIES:  # dg needs the same blocks in both causal kernels
            keys = rows.get(LinearPass.CAUSAL_KEYS, LinearPass.CAUSAL_KEYS)
            block_n = plan.choose_tile(keys, state, self.dtype.itemsize, launching.INTERPRETING, regular).block_n
            tile = tile._replace(block_n=block_n)
        single_layout = causal and self.dtype == torch.bfloat16 and len(tiles.feature_blocks) == len(v_blocks) == 1
        single_layout = single_layout and (launching.INTERPRETING or (regular and tile.block_n >= WARPGROUP_ROWS))
        output_transposed = single_layout and not sizes.raw and sum(tiles.feature_blocks) >= COLUMNS
        fields = launching.describe_tables(tables, self.weights)
        if spec.map == "none":
            fields["num_axes"] = 0
        sum_blocks = {"unrotated": tiles.blocks, "encoded": tiles.feature_blocks, "none": ()}[normalizer]
        variant = Variant(
            *spec, head_dim=sizes.head_dim, **fields, **tiles._asdict(), backward=stage not in FORWARD,
            need_dangles=self.need_dangles and stage not in UNLEARNED,
            wide=self.dtype == torch.float64, fast=self.narrow and ptx,
            fixed=tables.coords is tables.origin is tables.affine is None and self.dtype != torch.float64,
            functions=2 if self.narrow and ptx else int(ptx),
            aligned=aligned, long=launching.are_long([t.stride() for t in tensors], unit),
            block_n=tile.block_n, stages=tile.stages,
            tokens_as_n=_has_tokens_as_n(causal, single_layout, tile.block_n), single_layout=single_layout,
            output_transposed=output_transposed,
            has_no_gqa=causal and sizes.repeats == 1,
            need_dweight=self.needs.norm and stage not in UNLEARNED,
            keeps_zero=_keeps_zero(spec.act) and self.weights.bias is None,  # act(β) may differ from 0
            normalizer=normalizer, has_normalizer_kernels=is_separate, gated=self.gate is not None,
            operand=name_operand(self.dtype),
            one_side=self.q_side is self.k_side, v_dim=sizes.v_dim, v_begins=v_begins, v_widths=v_widths,
            v_blocks=v_blocks, num_features=sizes.num_features,
            run=choose_run(spec, causal, stage is LinearPass.FORWARD), raw=sizes.raw,
            share=1 if causal else _share_sums(tiles.block_c, tile),
            feature_begins=tuple(accumulate(tiles.feature_widths, initial=0))[:-1],
            feature_widths=tiles.feature_widths, feature_blocks=tiles.feature_blocks,
            sum_blocks=sum_blocks, sum_begins=tuple(accumulate(sum_blocks, initial=0)),
            num_sums=sizes.num_sums, state_size=sizes.state, causal=causal,
            memory="sum" if self.log_decay is None else "add", decay_per_head=self.decay_per_head,
            need_ddecay=need_ddecay, early=stage in EARLY and not causal and launching.launches_early(),
        )  # fmt: skip
        return replace_fields(variant, changes), _make_options(tile, variant.early and stage is LinearPass.QUERY_STATE)

    def _cut(self, spec: Spec, stage: LinearPass) -> tuple[launching.Tiles, list[launching.Segment]]:
        """Split or pad the channels of q and k, and those of v."""
        sizes, pad = self.sizes, plan.pad_width
        if self.call.attention.mask == "causal":
            return launching.cut_channels(spec, sizes.head_dim, pad, pad), launching.cut_width(0, sizes.v_dim, pad)
        features = 2 if spec.num_channels else 1  # without a map, an odd number of channels doesn't form pairs
        choose = partial(plan.choose_widths, stage=stage, features=features)
        tiles = launching.cut_channels(spec, sizes.head_dim, choose, pad)
        choose_values = partial(plan.choose_value_widths, stage=stage, features=sum(tiles.feature_blocks))
        return tiles, launching.cut_width(0, sizes.v_dim, choose_values)

    def _choose_rows(self, spec: Spec) -> dict[LinearPass, LinearPass]:
        """Return the rows of the tile table that replace those of causal passes."""
        if self.call.attention.normalizer != "none":
            return plan.NORMALIZED
        return {} if self.log_decay is None or spec.map == "none" else plan.DECAYING

    def pieces(self, of_queries: bool) -> Pieces:
        key = "pieces", of_queries
        call_pieces = self.cache.get(key)
        if call_pieces is not None:
            return call_pieces
        sizes, call = self.sizes, self.call
        if of_queries:
            call_pieces = make_pieces(call, sizes.num_queries, sizes, call.q_layout)
        else:
            call_pieces = make_pieces(call, sizes.num_keys, sizes, call.k_layout)
        if call.cu_seqlens is None:
            self.cache[key] = call_pieces
        return call_pieces

    def parts(self, needs_all: bool, backward: bool = False) -> Parts:
        """Return the :class:`Parts` of the keys or, with ``backward``, those of the queries."""
        pieces = self.pieces(of_queries=backward)
        if self.call.attention.mask != "causal":
            return Parts(pieces, pieces)
        key = "parts", needs_all, backward
        call_parts = self.cache.get(key)
        if call_parts is None:
            call_parts = cut_causal(self.call, pieces, self.sizes, needs_all, backward)
            if self.call.cu_seqlens is None:
                self.cache[key] = call_parts
        return call_parts

    def flatten_keys(self, variant: Variant, partial: Tensor | None = None) -> tuple:
        """Return the kernel arguments for k. ``partial`` receives partial sums for the gradients of norm weights."""
        return self._flatten(self.k_side, variant, (*self.weights[2:], partial), self.call.k_layout)

    def flatten_queries(self, variant: Variant, partial: Tensor | None = None) -> tuple:
        """Return the kernel arguments for q, as :meth:`flatten_keys` does for k."""
        return self._flatten(self.q_side, variant.queries or variant, (*self.weights[:2], partial), self.call.q_layout)

    def _flatten(self, side: Call, variant: Variant, weights: tuple[Tensor | None, ...], layout: Layout) -> tuple:
        """Return the tables and numbers of q or of k, and the weights and numbers of its norm."""
        tables, norm = (), None
        if side.spec.map != "none":
            key = "numbers", side is self.q_side
            numbers = self.cache.get(key)
            if numbers is None:
                counts = pack_numbers(*launching.count_tokens(side.layout))
                numbers = self.cache[key] = (counts, *launching.pack_side(side, variant))
            tables = (*side.tables, numbers)
        if side.spec.norm != "none":
            norm = (*weights, pack_numbers(layout.start - layout.prefix, layout.num_grid_tokens))
        return tables, norm

    def allocate(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor, by default in the dtype of sums."""
        return torch.empty(shape, dtype=dtype or self.acc, device=self.device)

    def counts(self, pieces: Pieces) -> tuple[int, ...]:
        """Pack the numbers of heads, pieces and samples for kernels that process queries."""
        return pack_numbers(self.sizes.groups, self.sizes.repeats, pieces.num_pieces, self.sizes.batch)


def _make_options(tile: LinearTile, starts_early: bool) -> dict[str, Any]:
    """Return the compiler options. ``starts_early`` starts the kernel while the previous one is still running."""
    early = {"launch_pdl": True} if starts_early else {}
    return {"num_warps": tile.num_warps, **launching.limit_registers(tile.max_registers), **early}


def replace_fields(variant: Variant, changes: dict[str, Any]) -> Variant:
    """Return a variant with some of its fields replaced. The variants of its map tiles change in the same way."""
    variant = variant._replace(**changes)
    if variant.num_map_tiles == 1:
        return variant
    blocks = variant.blocks[: variant.num_mapped : variant.halves]
    tiles = tuple(
        variant._replace(
            map_tiles=(), num_map_tiles=1, queries=None, first=first, block_c=block,
            share=max(1, variant.share * block // variant.block_c),
        )
        for first, block in zip(accumulate(blocks, initial=0), blocks, strict=False)
    )  # fmt: skip
    return variant._replace(map_tiles=tiles)


def name_operand(dtype: torch.dtype) -> str:
    """Return the name of the rounding that ``to_operand`` in kernels/features.py applies to factors of a product."""
    return "same" if dtype.itemsize > 2 else "rounded" if launching.INTERPRETING else "bfloat16"


def _share_sums(block_c: int, tile: LinearTile) -> int:
    """Return how many tokens one thread holds for each channel. A thread loads up to 8 elements of each token."""
    elements = tile.block_n * block_c // (32 * tile.num_warps)
    return max(1, elements // 8)


def _has_tokens_as_n(causal: bool, single_layout: bool, block_n: int) -> bool:
    """Return whether products with a state have tokens as columns."""
    return block_n < WARPGROUP_ROWS or (causal and not single_layout)


def _pair_channels(spec: Spec, head_dim: int) -> Spec:
    """Treat neighbouring channels as pairs if there is no map. kernels/features.py explains why."""
    if spec.map != "none" or head_dim % 2:
        return spec
    return spec._replace(pairs="interleaved", num_channels=head_dim // 2, rotary_start=0)


@cache
def _keeps_zero(act: str) -> bool:
    entry = ACTIVATIONS[act]
    return not entry.forward(torch.zeros(1, device="cpu"), -1 if entry.dims else None).any()


def _add_zero_phase(side: Call) -> Call:
    """Return the side with a phase of 0 if it has no phase."""
    tables = side.tables
    if tables.phase is not None:
        return side
    return side._replace(tables=tables._replace(phase=tables.omega.new_zeros(1, side.spec.num_channels)))


def with_strides(variant: Variant, *tensors: Any) -> tuple:
    """Return pairs of a tensor and its packed strides, in the form that the kernels expect."""
    return tuple([(t, launching.pack_stride(t.stride(), variant.aligned, variant.long)) for t in tensors])


def gate_with_strides(gate: Tensor | None) -> tuple:
    if gate is None:
        return None, pack_numbers(0, 0, 0)
    b, h, n = gate.stride()
    return gate, pack_numbers(b, h if gate.shape[1] > 1 else 0, n)


_fitting_configs: dict[Any, tuple[Variant, dict[str, Any]]] = {}  # replaces variants that need too much shared memory


def launch_with_fallback(kernel: Any, programs: int, args: tuple, variant: Variant, options: dict[str, Any]) -> None:
    """Launch a kernel. If its tile needs more shared memory than the GPU has, try the tiles of :func:`plan.shrink`.

    The tile that fits is cached for later launches. Recorded launches always use the first tile.

    Raises:
        OutOfResources: if no tile fits.
    """
    if not programs:
        return
    key = kernel, variant
    variant, options = _fitting_configs.get(key, (variant, options))
    try:
        recording.launch_kernel(kernel, programs, args, variant, options)
    except OutOfResources:
        smaller_tiles = plan.shrink(LinearTile(variant.block_n, options.get("num_warps", 4), variant.stages))
        if variant.need_ddecay and variant.causal:
            smaller_tiles = [tile for tile in smaller_tiles if tile.block_n == variant.block_n]
        for i, tile in enumerate(smaller_tiles):
            single_layout = variant.single_layout and tile.block_n >= WARPGROUP_ROWS
            tokens_as_n = _has_tokens_as_n(variant.causal, single_layout, tile.block_n)
            changes: dict[str, Any] = {
                "block_n": tile.block_n, "stages": tile.stages, "tokens_as_n": tokens_as_n,
                "single_layout": single_layout, "output_transposed": single_layout and variant.output_transposed,
            }  # fmt: skip
            queries = None if variant.queries is None else replace_fields(variant.queries, changes)
            smaller_variant = replace_fields(variant, {"queries": queries, **changes})
            try:
                recording.launch_kernel(kernel, programs, args, smaller_variant, options)
            except OutOfResources:
                if i + 1 == len(smaller_tiles):
                    raise
            else:
                _fitting_configs[key] = smaller_variant, options
                return


# --- forward ---------------------------------------------------------------------------------------------------------


def forward(
    call: LinearCall,
    operands: Operands,
    return_state: bool,
    keep: bool,
    sum_as: Callable[..., tuple[SlotStates, list[Tensor]]] | None = None,
) -> list[Tensor]:
    """Return o and, if requested, the state after the last token and the tensors that the backward pass needs.

    ``sum_as`` replaces :func:`sum_states`. After S and Z, it may return further tensors for the backward pass.
    """
    inputs = LaunchInputs(call, operands)
    sizes = inputs.sizes
    o = like_in_memory(inputs.q, sizes.v_dim)
    with launching.current_device(inputs.q):
        if sum_as is None and is_one_pass(call, sizes, bool(operands.state) or return_state, keep):
            variant, options = inputs.describe(LinearPass.FORWARD, None, [o])
            tensors = with_strides(variant, inputs.q, inputs.k, inputs.v, o)
            sides = (inputs.flatten_queries(variant), inputs.flatten_keys(variant))
            counts = pack_numbers(sizes.groups, sizes.repeats, sizes.num_queries, sizes.num_keys)
            args = (*tensors, gate_with_strides(inputs.gate), *sides, counts, call.attention.eps)
            launch_with_fallback(kernels.linear_forward_kernel, sizes.rows, args, variant, options)
            return [o]
        saved, final_state = (sum_as or sum_states)(inputs, return_state)
        (launch_causal_outputs if call.attention.mask == "causal" else launch_outputs)(inputs, o, saved[:2])
    return [o, *final_state, *(saved if keep else ())]


def is_one_pass(call: LinearCall, sizes: Sizes, has_state: bool, trains: bool) -> bool:
    """Return whether one program computes both the state and the outputs of a key head.

    ``trains`` is set in backward passes, and in forward passes that a backward pass follows.
    """
    plain = call.attention.mask == "full" and call.cu_seqlens is None and not has_state
    num_tokens = max(sizes.num_queries, sizes.num_keys)
    return plain and fits_one_pass(num_tokens, sizes.v_dim, sizes.num_features, trains)


def fits_one_pass(num_tokens: int, v_dim: int, num_features: int, trains: bool) -> bool:
    """Return whether one pass over ``num_tokens`` tokens is faster than two passes.

    The size of the state includes padding: v is padded to a power of two, and features to a multiple of NARROWEST.
    """
    state = max(plan.NARROWEST, 1 << (v_dim - 1).bit_length()) * (-(-num_features // plan.NARROWEST) * plan.NARROWEST)
    longest = min(plan.ONE_PASS, plan.ONE_PASS_TRAINING) if trains else plan.ONE_PASS
    return state <= plan.ONE_PASS_STATE and num_tokens <= longest


SlotStates = tuple[Any, ...]  # the state that the tokens of each slot see: S (as operands) and Z, or () without a state


def sum_states(inputs: LaunchInputs, returns_final: bool) -> tuple[SlotStates, list[Tensor]]:
    """Return the state that the tokens of each slot see and, if ``returns_final``, the state after the last token.

    With a causal mask, return no states if none are needed.
    """
    if not needs_states(inputs, returns_final):
        return (), []
    pieces, needed_pieces, _ = inputs.parts(returns_final)
    if pieces.is_whole and not inputs.state and not returns_final:
        slot_states = allocate_slots(inputs, 1)
        launch_states(inputs, slot_states, pieces, False)
        return slot_states, []
    return scan_states(inputs, form_states(inputs, needed_pieces, returns_final), pieces, inputs.state, returns_final)


def needs_states(inputs: LaunchInputs, returns_final: bool) -> bool:
    """Return whether a kernel needs states. A single causal piece without an initial or final state doesn't."""
    is_causal = inputs.call.attention.mask == "causal"
    return not is_causal or bool(inputs.state) or returns_final or inputs.pieces(of_queries=False).num_pieces > 1


def form_states(inputs: LaunchInputs, pieces: Pieces, is_exact: bool) -> Tensor:
    """Compute the states (P, B H_k, size) of pieces of the keys. For ``is_exact``, see :func:`refine`."""
    states = inputs.allocate(pieces.num_pieces, inputs.sizes.rows, inputs.sizes.state)
    launch_states(inputs, (states, None), pieces, is_exact)
    return states


def launch_states(inputs: LaunchInputs, states: tuple[Tensor, Tensor | None], pieces: Pieces, is_exact: bool) -> None:
    """Write the states of pieces of the keys to ``states``: a buffer and None or, for a single piece, a slot."""
    sizes = inputs.sizes
    variant, options = inputs.describe(LinearPass.STATE, inputs.k_side, **refine(inputs, is_exact))
    kernel, gates, target = kernels.linear_state_kernel, gate_with_strides(inputs.gate), states
    if inputs.log_decay is not None:
        gates = gates, gate_with_strides(inputs.log_decay)
        kernel, target = kernels.linear_decay_state_kernel, states[0]
    args = (
        *with_strides(variant, inputs.k, inputs.v), gates, inputs.flatten_keys(variant), target,
        pieces.numbers, pack_numbers(sizes.groups, pieces.num_pieces, sizes.batch),
    )  # fmt: skip
    launch_with_fallback(kernel, sizes.rows * pieces.num_pieces, args, variant, options)


def refine(inputs: LaunchInputs, is_exact: bool) -> dict[str, Any]:
    """Return variant fields for more precise sums if ``is_exact`` is set.

    States that are returned in float32 need this precision.
    """
    return {"functions": int(launching.has_ptx(inputs.dtype)), "accumulate_outside_mma": True} if is_exact else {}


def scan_states(
    inputs: LaunchInputs,
    states: Tensor,
    pieces: Pieces,
    initial_state: Sequence[Tensor],
    returns_final: bool,
    backward: bool = False,
) -> tuple[SlotStates, list[Tensor]]:
    """Sum the states of pieces, starting from ``initial_state``. With ``backward``, start with the last piece.

    ``states`` has shape (P, B H_k R, size) and is also summed over R heads. States that no token sees may be missing.
    """
    sizes = inputs.sizes
    num_states = sizes.batch if inputs.call.cu_seqlens is None else len(inputs.call.cu_seqlens) - 1
    slot_states, sums = allocate_slots(inputs, pieces.num_slots)
    initial_rows = join_state(inputs, initial_state)
    final_state = inputs.allocate(num_states * sizes.groups, sizes.state) if returns_final else None
    block, num_at_once = plan.choose_scan_tile(sizes.rows, sizes.state)
    variant = Variant(
        v_dim=sizes.v_dim, num_features=sizes.num_features, num_sums=sizes.num_sums, state_size=sizes.state,
        block_c=block, stages=num_at_once, wide=inputs.acc == torch.float64,
        causal=inputs.call.attention.mask == "causal",
    )  # fmt: skip
    repeats = states.shape[1] // max(1, sizes.rows)
    args = (
        states, (slot_states, sums), (initial_rows, final_state), pieces.table,
        pack_numbers(sizes.groups, repeats, pieces.num_pieces, states.shape[0], sizes.batch, int(backward)),
    )  # fmt: skip
    launch_with_fallback(kernels.linear_scan_kernel, sizes.rows * triton.cdiv(sizes.state, block), args, variant, {})
    return (slot_states, sums), [] if final_state is None else split_state(inputs, final_state)


def allocate_slots(inputs: LaunchInputs, num_slots: int) -> tuple[Tensor, Tensor]:
    """Allocate S (as operands) and the normaliser's sums for each slot."""
    sizes = inputs.sizes
    matrices = inputs.allocate(num_slots, sizes.rows, sizes.matrix, dtype=inputs.operand)
    return matrices, inputs.allocate(num_slots, sizes.rows, sizes.num_sums)


def launch_outputs(inputs: LaunchInputs, o: Tensor, slot_states: SlotStates) -> None:
    sizes, pieces = inputs.sizes, inputs.pieces(of_queries=True)
    if pieces.table is None:
        count, length = plan.cut_outputs(sizes.num_queries, sizes.query_rows, pieces.length)
        pieces = pieces._replace(num_pieces=count, length=length)
    variant, options = inputs.describe(LinearPass.OUTPUT, inputs.q_side, [o])
    args = (
        *with_strides(variant, inputs.q, o), inputs.flatten_queries(variant), slot_states,
        pieces.numbers, inputs.counts(pieces), inputs.call.attention.eps,
    )  # fmt: skip
    programs = sizes.query_rows * pieces.num_pieces
    launch_with_fallback(kernels.linear_output_kernel, programs, args, variant, options)


def launch_causal_outputs(inputs: LaunchInputs, o: Tensor, slot_states: SlotStates) -> None:
    sizes, pieces = inputs.sizes, inputs.pieces(of_queries=True)
    variant, options = inputs.describe(LinearPass.CAUSAL, None, [o], has_state=bool(slot_states))
    gates = gate_with_strides(inputs.gate), gate_with_strides(inputs.log_decay)
    args = (
        *with_strides(variant, inputs.q, inputs.k, inputs.v, o), gates,
        (inputs.flatten_queries(variant), inputs.flatten_keys(variant)), slot_states or (None, None),
        launch_normalizer(inputs, slot_states, variant)[0], pieces.numbers, inputs.counts(pieces),
        inputs.call.attention.eps,
    )  # fmt: skip
    programs = sizes.query_rows * pieces.num_pieces
    launch_with_fallback(kernels.linear_causal_forward_kernel, programs, args, variant, options)


def launch_normalizer(inputs: LaunchInputs, slot_states: SlotStates, variant: Variant) -> tuple[Any, Any]:
    """Return z of each query and, if the variant is for a backward pass, Z at each token. Otherwise return None.

    The variant describes the kernel that needs them. Without has_normalizer_kernels, it needs neither.
    """
    if not variant.has_normalizer_kernels:
        return None, None
    sizes, pieces, backward = inputs.sizes, inputs.pieces(of_queries=False), variant.backward
    variant, options = inputs.describe(LinearPass.NORMALIZER, None, has_state=bool(slot_states), backward=backward)
    z = inputs.allocate(sizes.query_rows, sizes.num_queries)
    sums = allocate_running_sums(inputs, variant) if backward else None
    args = (
        with_strides(variant, inputs.q, inputs.k, inputs.v), gate_with_strides(inputs.gate),
        (inputs.flatten_queries(variant), inputs.flatten_keys(variant)), slot_states or (None, None), z, sums,
        pieces.numbers, inputs.counts(pieces),
    )  # fmt: skip
    programs = sizes.rows * pieces.num_pieces
    launch_with_fallback(kernels.linear_causal_normalizer_kernel, programs, args, variant, options)
    return z, sums


def differentiate_normalizer(
    inputs: LaunchInputs, dslot_states: SlotStates, scales: Tensor, variant: Variant
) -> Tensor | None:
    """Return dZ at each token, or None if the kernel that the variant describes doesn't need it."""
    if not variant.has_normalizer_kernels:
        return None
    pieces = inputs.pieces(of_queries=True)
    variant, options = inputs.describe(LinearPass.NORMALIZER_GRADIENT, inputs.q_side, has_state=bool(dslot_states))
    sums = allocate_running_sums(inputs, variant)
    args = (
        *with_strides(variant, inputs.q), inputs.flatten_queries(variant), dslot_states or (None, None), scales, sums,
        pieces.numbers, inputs.counts(pieces),
    )  # fmt: skip
    programs = inputs.sizes.rows * pieces.num_pieces
    launch_with_fallback(kernels.linear_causal_normalizer_gradient_kernel, programs, args, variant, options)
    return sums


def allocate_running_sums(inputs: LaunchInputs, variant: Variant) -> Tensor:
    """Allocate Z or dZ at each token (B H_k, N, columns). They are rounded like operands."""
    return inputs.allocate(inputs.sizes.rows, inputs.sizes.num_keys, variant.sum_begins[-1], dtype=inputs.operand)


def find_saved_shapes(
    call: LinearCall, operands: Operands, return_state: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of the tensors that :func:`forward` returns for the backward pass."""
    sizes = derive_sizes(call, operands)
    has_state = bool(operands.state) or return_state
    if is_one_pass(call, sizes, has_state, trains=True):
        return []
    pieces = make_pieces(call, sizes.num_keys, sizes, call.k_layout, makes_table=False)
    if call.attention.mask == "causal" and pieces.num_pieces == 1 and not has_state:
        return []
    shape = (pieces.num_slots, sizes.rows)
    return [((*shape, sizes.matrix), sizes.operand), ((*shape, sizes.num_sums), sizes.acc)]


# --- states in the user's layout -------------------------------------------------------------------------------------


def choose_run(spec: Spec, causal: bool, state_stays: bool = False) -> int:
    """Choose how many channels of one half of the map's output are adjacent in a tile of features.

    A thread holds every eighth pair of columns of a product, or every sixty-fourth pair of rows. With runs of 8 or
    (better) 64 channels, a thread holds both halves of its channels, and computes their gradients without
    communication. Runs of 64 also avoid bank conflicts in stores. Alternating halves are better for kernels that sum
    over channels. Set ``state_stays`` if the kernel doesn't write its state to memory.
    """
    channels = spec.num_channels
    if spec.map == "none" or not (causal or (state_stays and channels % 64 == 0)):
        return 1
    return 64 if channels % 64 == 0 else min(8, channels & -channels)


def order_features(spec: Spec, head_dim: int, run: int = 1) -> list[int]:
    """Return the channels of q̂ in the order of the kernels' tiles: the map's output, then the other channels."""
    if spec.map == "none":
        return list(range(head_dim))
    width = 2 * spec.num_channels
    first, second = split_pairs(torch.arange(width, device="cpu"), spec.pairs, spec.sections)
    if spec.order == "sin_cos":
        first, second = second, first
    runs = torch.stack([first, second]).unflatten(1, (-1, run)).transpose(0, 1)
    mapped_channels = (runs + spec.rotary_start).flatten().tolist()
    return mapped_channels + [c for c in range(spec.out_dim(head_dim)) if not 0 <= c - spec.rotary_start < width]


@cache
def _make_permutation(spec: Spec, head_dim: int, run: int, device: torch.device, inverse: bool) -> Tensor | None:
    order = order_features(spec, head_dim, run)
    if order == sorted(order):
        return None
    if inverse:
        order = sorted(range(len(order)), key=order.__getitem__)
    with torch.inference_mode(False):
        return torch.tensor(order, device=device)


def find_permutation(inputs: LaunchInputs, inverse: bool) -> Tensor | None:
    """Return the permutation of features from the user's order to the kernels' order, or its inverse.

    Return None if both orders are the same.
    """
    run = choose_run(inputs.call.spec, inputs.call.attention.mask == "causal")
    return _make_permutation(inputs.call.spec, inputs.sizes.head_dim, run, inputs.device, inverse)


def join_state(inputs: LaunchInputs, state: Sequence[Tensor]) -> Tensor | None:
    """Convert (S, Σ) to one row per head: Sᵀ with features in the kernels' order, followed by Σ. Convert () to None."""
    if not state:
        return None
    sizes = inputs.sizes
    order = find_permutation(inputs, False)
    matrix, *sums = state
    if order is not None:
        matrix = matrix.index_select(2, order)
        if inputs.call.attention.normalizer == "encoded":
            sums = [t.index_select(2, order) for t in sums]
    parts = [matrix.mT.reshape(-1, sizes.groups, sizes.matrix), *sums]
    return torch.cat(parts, dim=-1).to(inputs.acc)


def split_state(inputs: LaunchInputs, final_state: Tensor) -> list[Tensor]:
    """Inverse of :func:`join_state`."""
    sizes = inputs.sizes
    order = find_permutation(inputs, True)
    matrix, sums = final_state.view(-1, sizes.groups, sizes.state).split([sizes.matrix, sizes.num_sums], dim=-1)
    matrix = _copy_features(matrix.unflatten(-1, (sizes.v_dim, sizes.num_features)).mT, order)
    if not sizes.num_sums:
        return [matrix]
    return [matrix, _copy_features(sums, order if inputs.call.attention.normalizer == "encoded" else None)]


def _copy_features(state: Tensor, order: Tensor | None) -> Tensor:
    """Copy a state and reorder its features. Compiled code needs aligned outputs that don't share memory."""
    return state.clone(memory_format=torch.contiguous_format) if order is None else state.index_select(2, order)


# --- backward --------------------------------------------------------------------------------------------------------


class Grads(NamedTuple):
    """Output tensors for the kernels of a backward pass."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dgate: Tensor | None
    partial: Tensor | None  # (rows, B H_k J C) float64, sums for dω and dφ: those of q, then those of k
    q_partial: Tensor | None
    k_partial: Tensor | None
    q_weights: Tensor | None  # (H B rows, kinds P D) float64, sums for dγ and dβ
    k_weights: Tensor | None


def backward(
    call: LinearCall,
    grads: Sequence[Tensor],
    operands: Operands,
    saved: Sequence[Tensor],
    needs: LinearNeeds,
    outs: Sequence[Tensor] = (),
    differentiate_as: Callable[..., list[Tensor]] | None = None,
) -> list[Tensor]:
    """Return dq, dk and dv and, if they are needed, dβ, dω, q's dφ, k's dφ, the norm's gradients, dS and dΣ.

    Args:
        grads: gradients of o, or of o, S and Σ.
        outs: tensors to write dq, dk and dv to. By default, they are allocated.
        differentiate_as: replacement for :func:`differentiate`. The replacement may return further gradients after dS
            and dΣ.
    """
    do, *dstate = grads
    gate, inputs = operands.gate, LaunchInputs(call, operands, do, needs)
    sizes = inputs.sizes
    one_pass = is_one_pass(call, sizes, bool(operands.state) or bool(dstate), trains=True)
    q_pieces, k_pieces = inputs.pieces(of_queries=True), inputs.pieces(of_queries=False)
    q_rows = 1 if one_pass else q_pieces.num_pieces * sizes.repeats
    k_rows = 1 if one_pass else k_pieces.num_pieces
    partial = q_partial = k_partial = dgate = None
    if inputs.need_dangles:
        tables = inputs.q_side.tables
        width = (tables.omega.shape[2] + (tables.phase is not None)) * call.spec.num_channels
        partial = inputs.allocate(q_rows + k_rows, sizes.rows * width, dtype=torch.float64)
        q_partial, k_partial = partial[:q_rows], partial[q_rows:]
    if needs.gate:
        dgate = inputs.allocate(sizes.batch, sizes.groups, sizes.num_keys)
    dq, dk, dv = outs or (like_in_memory(t, t.shape[3]) for t in (inputs.q, inputs.k, inputs.v))
    q_weights, k_weights = _allocate_weight_sums(inputs, q_rows * sizes.rows, k_rows * sizes.rows, one_pass)
    written_grads = Grads(dq, dk, dv, dgate, partial, q_partial, k_partial, q_weights, k_weights)
    with launching.current_device(inputs.q):
        if one_pass:
            state_gradients = []
            differentiate_one_pass(inputs, written_grads)
        else:
            default = differentiate_causal if call.attention.mask == "causal" else differentiate
            differentiate_as = differentiate_as or default
            state_gradients = differentiate_as(inputs, written_grads, dstate, tuple(saved))
        results = [dq, dk, dv]
        if dgate is not None and gate is not None:
            results.append((dgate if gate.shape[1] > 1 else dgate.sum(1, keepdim=True)).to(gate.dtype))
        results += reduce_angle_sums(inputs, written_grads)
        results += reduce_weight_sums(inputs, written_grads)
    return results + state_gradients


def _allocate_weight_sums(
    inputs: LaunchInputs, q_rows: int, k_rows: int, one_pass: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate partial sums for the gradients of q's and k's norm weights. Rows of the same head are adjacent."""
    if not inputs.needs.norm:
        return None, None
    q_rows *= inputs.sizes.repeats if one_pass else 1
    weights, groups = inputs.weights, inputs.call.weights.token_groups
    width = ((weights.weight is not None) + (weights.bias is not None)) * groups * inputs.sizes.head_dim
    sums = inputs.allocate(q_rows + k_rows, width, dtype=torch.float64)
    return sums[:q_rows], sums[q_rows:]


def differentiate_one_pass(inputs: LaunchInputs, grads: Grads) -> None:
    sizes = inputs.sizes
    outs = [grads.dq, grads.dk, grads.dv]
    variant, options = inputs.describe(LinearPass.BACKWARD, None, outs, need_dgate=grads.dgate is not None)
    args = (
        with_strides(variant, inputs.q, inputs.k, inputs.v, inputs.do, *outs),
        (gate_with_strides(inputs.gate), gate_with_strides(grads.dgate)),
        (inputs.flatten_queries(variant, grads.q_weights), inputs.flatten_keys(variant, grads.k_weights)),
        grads.partial,
        pack_numbers(sizes.groups, sizes.repeats, sizes.num_queries, sizes.num_keys), inputs.call.attention.eps,
    )  # fmt: skip
    launch_with_fallback(kernels.linear_backward_kernel, sizes.rows, args, variant, options)


def differentiate(inputs: LaunchInputs, grads: Grads, dstate: Sequence[Tensor], saved: SlotStates) -> list[Tensor]:
    """Run the backward pass with separate kernels for states, queries and keys. Return dS and dΣ if they are needed."""
    slot_states = saved or sum_states(inputs, False)[0]
    pieces = inputs.pieces(of_queries=True)
    if pieces.is_whole and inputs.sizes.repeats == 1 and not dstate and not inputs.needs.state:
        dslot_states, state_gradients = allocate_slots(inputs, 1), []
        differentiate_queries(inputs, grads, slot_states, dslot_states)
    else:
        dstates = differentiate_queries(inputs, grads, slot_states)
        dslot_states, state_gradients = scan_states(inputs, dstates, pieces, dstate, inputs.needs.state, backward=True)
    differentiate_keys(inputs, grads, dslot_states)
    return state_gradients


def differentiate_queries(
    inputs: LaunchInputs, grads: Grads, slot_states: SlotStates, slot: SlotStates | None = None
) -> Tensor:
    """Write dq to ``grads``. Return dS and dZ of each piece and query head, or write them to ``slot``."""
    sizes, pieces = inputs.sizes, inputs.pieces(of_queries=True)
    dstates = slot or (inputs.allocate(pieces.num_pieces, sizes.query_rows, sizes.state), None)
    stage = LinearPass.QUERIES_OMEGA if inputs.need_dangles else LinearPass.QUERIES
    variant, options = inputs.describe(stage, inputs.q_side, [grads.dq])
    args = (
        *with_strides(variant, inputs.q, inputs.do, grads.dq),
        inputs.flatten_queries(variant, grads.q_weights), slot_states, dstates, grads.q_partial, pieces.numbers,
        inputs.counts(pieces), inputs.call.attention.eps,
    )  # fmt: skip
    programs = sizes.query_rows * pieces.num_pieces
    launch_with_fallback(kernels.linear_query_gradient_kernel, programs, args, variant, options)
    return sum_query_states(inputs, pieces, slot_states, None, dstates)


def differentiate_keys(inputs: LaunchInputs, grads: Grads, dslot_states: SlotStates) -> None:
    """Write dk, dv and dβ to ``grads``."""
    sizes = inputs.sizes
    pieces = inputs.pieces(of_queries=False)
    outs = [grads.dk, grads.dv]
    variant, options = inputs.describe(LinearPass.KEYS, inputs.k_side, outs, need_dgate=grads.dgate is not None)
    args = (
        *with_strides(variant, inputs.k, inputs.v, *outs),
        (gate_with_strides(inputs.gate), gate_with_strides(grads.dgate)), inputs.flatten_keys(variant, grads.k_weights),
        dslot_states, grads.k_partial, pieces.numbers, pack_numbers(sizes.groups, pieces.num_pieces, sizes.batch),
    )  # fmt: skip
    launch_with_fallback(kernels.linear_key_gradient_kernel, sizes.rows * pieces.num_pieces, args, variant, options)


def sum_query_states(
    inputs: LaunchInputs,
    pieces: Pieces,
    slot_states: SlotStates,
    scales: Tensor | None,
    dstates: SlotStates | None = None,
) -> Tensor:
    """Return dS and, with a causal mask, dZ of each piece and query head, or write them to ``dstates``.

    With a causal mask, ``scales`` is the result of :func:`differentiate_causal_queries`.
    """
    sizes, needs, log_decay = inputs.sizes, inputs.needs, inputs.log_decay
    dstates = dstates or (inputs.allocate(pieces.num_pieces, sizes.query_rows, sizes.state), None)
    is_exact = needs.state or (needs.decay and log_decay is not None)
    variant, options = inputs.describe(LinearPass.QUERY_STATE, inputs.q_side, **refine(inputs, is_exact))
    rows = with_strides(variant, inputs.q, inputs.do)
    side, counts = inputs.flatten_queries(variant), (pieces.numbers, inputs.counts(pieces))
    if log_decay is None:
        kernel = kernels.linear_query_state_kernel
        args = (*rows, side, slot_states, scales, dstates, *counts, inputs.call.attention.eps)
    else:
        kernel = kernels.linear_decay_query_state_kernel
        args = (*rows, gate_with_strides(log_decay), side, scales, dstates[0], *counts)
    launch_with_fallback(kernel, sizes.query_rows * pieces.num_pieces, args, variant, options)
    return dstates[0]


def differentiate_causal(
    inputs: LaunchInputs, grads: Grads, dstate: Sequence[Tensor], saved: SlotStates
) -> list[Tensor]:
    """Implement :func:`differentiate` for a causal mask."""
    slot_states, needs_first = saved or sum_states(inputs, False)[0], inputs.needs.state
    scales = differentiate_causal_queries(inputs, grads, slot_states)
    dslot_states, state_gradients = (), []
    if inputs.pieces(of_queries=True).num_pieces > 1 or dstate or needs_first:
        parts, needed_pieces, _ = inputs.parts(needs_first, backward=True)
        dstates = sum_query_states(inputs, needed_pieces, (None, None), scales)
        dslot_states, state_gradients = scan_states(inputs, dstates, parts, dstate, needs_first, backward=True)
    differentiate_causal_keys(inputs, grads, dslot_states, scales)
    return state_gradients


def differentiate_causal_queries(inputs: LaunchInputs, grads: Grads, slot_states: SlotStates) -> Tensor:
    """Write dq to ``grads``. Return a tensor (2 or 4, B H_q, N) of 1/z, dz and, with a decay, two sums for dg."""
    sizes, pieces = inputs.sizes, inputs.pieces(of_queries=True)
    scales = inputs.allocate(2 if inputs.log_decay is None else 4, sizes.query_rows, sizes.num_queries)
    variant, options = inputs.describe(LinearPass.CAUSAL_QUERIES, None, [grads.dq], has_state=bool(slot_states))
    sides = (inputs.flatten_queries(variant, grads.q_weights), inputs.flatten_keys(variant))
    tensors = with_strides(variant, inputs.q, inputs.k, inputs.v, inputs.do, grads.dq)
    gates = gate_with_strides(inputs.gate), gate_with_strides(inputs.log_decay)
    args = (
        tensors, gates, sides, slot_states or (None, None),
        launch_normalizer(inputs, slot_states, variant), scales, grads.q_partial, pieces.numbers, inputs.counts(pieces),
        inputs.call.attention.eps,
    )  # fmt: skip
    programs = sizes.query_rows * pieces.num_pieces
    launch_with_fallback(kernels.linear_causal_query_kernel, programs, args, variant, options)
    return scales


def differentiate_causal_keys(
    inputs: LaunchInputs, grads: Grads, dslot_states: SlotStates, scales: Tensor, products: Tensor | None = None
) -> None:
    """Write dk, dv and dβ to ``grads``.

    With a decay, also write a term of dg for each key to ``products`` (B, H_k, N).
    """
    sizes, pieces = inputs.sizes, inputs.pieces(of_queries=True)
    outs = [grads.dk, grads.dv]
    variant, options = inputs.describe(
        LinearPass.CAUSAL_KEYS, None, outs, has_state=bool(dslot_states), need_dgate=grads.dgate is not None
    )
    sides = (inputs.flatten_queries(variant), inputs.flatten_keys(variant, grads.k_weights))
    args = (
        with_strides(variant, inputs.q, inputs.k, inputs.v, inputs.do, *outs),
        (gate_with_strides(inputs.gate), gate_with_strides(grads.dgate), gate_with_strides(inputs.log_decay), products),
        sides, dslot_states or (None, None), differentiate_normalizer(inputs, dslot_states, scales, variant), scales,
        grads.k_partial, pieces.numbers, inputs.counts(pieces),
    )  # fmt: skip
    launch_with_fallback(kernels.linear_causal_key_kernel, sizes.rows * pieces.num_pieces, args, variant, options)


def reduce_angle_sums(inputs: LaunchInputs, grads: Grads) -> list[Tensor]:
    """Return dω, q's dφ and k's dφ if they are needed."""
    if grads.partial is None:
        return []
    needs, spec, q_tables, k_tables = inputs.needs, inputs.call.spec, inputs.call.q_tables, inputs.call.k_tables
    head_counts = [t.shape[0] for t in (q_tables.omega, q_tables.phase, k_tables.phase) if t is not None]
    axes = q_tables.omega.shape[2] + (inputs.q_side.tables.phase is not None)
    gradients: list[Tensor] = []
    for is_needed, sums, tables, sum_needs in (
        (needs.omega, grads.partial, q_tables, Needs(omega=True)),
        (needs.phase_q, grads.q_partial, q_tables, Needs(phase=True)),
        (needs.phase_k, grads.k_partial, k_tables, Needs(phase=True)),
    ):
        if is_needed and sums is not None:
            partial = sums.reshape(-1, max(head_counts), axes, spec.num_channels)
            gradients += reduce_partial(partial, Call(spec, inputs.call.q_layout, tables), sum_needs)
    return gradients


def reduce_weight_sums(inputs: LaunchInputs, grads: Grads) -> list[Tensor]:
    """Return the needed gradients of the norm weights, first q's and then k's."""
    q_sums, k_sums = grads.q_weights, grads.k_weights
    if q_sums is None or k_sums is None:
        return []
    by_head = any(t is not None and t.shape[0] > 1 for t in inputs.weights)
    heads = inputs.sizes.groups * inputs.sizes.repeats, inputs.sizes.groups
    q_partials, k_partials = (
        Partials(None, sums, Sums(counts=(len(sums), len(sums) // count if by_head else 0)))
        for sums, count in zip((q_sums, k_sums), heads, strict=True)
    )
    return reduce_weights(q_partials, k_partials, inputs.call.weights)
