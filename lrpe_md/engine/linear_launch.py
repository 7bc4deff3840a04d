"""Launches of linear attention's kernels: variants and numbers from shapes and strides, allocation, and the order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..positions.grid import affine_on
from ..reference import ACTIVATIONS, split_pairs
from . import kernels
from .call import Call, Needs, Variant
from .launch import (
    INTERPRETING,
    _count_grid,
    _count_tables,
    _current_device,
    _has_ptx,
    _in_eights,
    _make_readable,
    _materialise,
    _reduce,
    _registers,
)
from .linear_plan import SCAN_BLOCK, LinearPass, choose_tile, cut_pieces, fits_one_pass
from .memory import accumulator, like_in_memory

__all__ = ["backward", "forward", "saved_shapes"]


class Sizes(NamedTuple):
    """Of a call: B, H_q / H_k, H_k, tokens, channels of v and of q̂."""

    batch: int
    groups: int
    repeats: int
    num_queries: int
    num_keys: int
    v_dim: int
    num_features: int
    num_sums: int

    @property
    def state(self) -> int:
        """Elements of S and the sums of a head."""
        return self.v_dim * self.num_features + self.num_sums


def measure(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    batch, heads, num_queries, head_dim = q.shape
    groups, num_keys = k.shape[1:3]
    features = call.spec.out_dim(head_dim)
    sums = {"unrotated": head_dim, "encoded": features, "none": 0}[call.attention.normalizer]
    return Sizes(batch, groups, heads // groups, num_queries, num_keys, v.shape[3], features, sums)


class Work:
    """One call on its way: readable inputs, the variant that all its kernels begin from, and the sides."""

    def __init__(self, call: Any, tensors: Sequence[Tensor], gate: Tensor | None, needs: Any = None) -> None:
        self.q, self.k, self.v, *self.do = [_materialise(t) for t in tensors]
        self.call, self.sizes = call, measure(call, self.q, self.k, self.v)
        self.dtype, self.device = self.q.dtype, self.q.device
        self.acc = accumulator(self.dtype)
        self.gate = None if gate is None else _materialise(gate)
        if self.gate is not None and self.gate.dtype == torch.bool:
            self.gate = self.gate.view(torch.uint8)
        q_call = _make_far_readable(call.spec, call.q_layout, call.q_tables, self.narrow)
        k_call = _make_far_readable(call.spec, call.k_layout, call.k_tables, self.narrow)
        if call.spec.map != "none" and (q_call.tables.phase is None) != (k_call.tables.phase is None):
            q_call, k_call = _with_phase(q_call), _with_phase(k_call)
        self.q_call, self.k_call = q_call, k_call
        self.needs = needs

    @property
    def narrow(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def operand(self) -> torch.dtype:
        return torch.bfloat16 if self.narrow else self.dtype

    def describe(self, stage: LinearPass, side: Call, outs: Sequence[Tensor] = (), **changes: Any) -> tuple[Variant, dict]:
        spec, sizes = self.call.spec, self.sizes
        head_dim = self.q.shape[3]
        layout, tables = side.layout, side.tables
        positions = tables.coords if tables.coords is not None else tables.origin
        tensors = [self.q, self.k, self.v, *self.do, *outs]
        aligned = (
            head_dim % 8 == 0
            and sizes.v_dim % 8 == 0
            and all(t.data_ptr() % 16 == 0 and _in_eights(8, [t.stride()]) for t in tensors)
        )
        unit = 8 if aligned else 1
        block_c, begins, widths, blocks = _cut_channels(spec, head_dim)
        turned = {"cosine": 1, "rotate": 2, "none": 0}[spec.map]
        features = _join_features(spec, widths, blocks)
        sums = {"unrotated": blocks, "encoded": features[1], "none": ()}[self.call.attention.normalizer]
        ptx = _has_ptx(self.dtype)
        fast = self.narrow and ptx
        affine = tables.affine is not None
        block_v = max(16, triton.next_power_of_2(sizes.v_dim))
        tile = choose_tile(stage, block_v * sum(features[1]), self.dtype.itemsize, INTERPRETING)
        num_axes = 0 if spec.map == "none" else tables.omega.shape[2]
        need_dangles = self.needs is not None and (self.needs.omega or self.needs.phase)
        weights = max(16, 2 * triton.next_power_of_2(num_axes + (tables.phase is not None)))
        variant = Variant(
            *spec, head_dim=head_dim, num_axes=num_axes, backward=stage not in _FORWARD, need_dangles=need_dangles,
            explicit=spec.map != "none" and not layout.sizes,
            by_sample=positions is not None and positions.ndim == 3, affine=affine,
            has_origin=tables.origin is not None, has_phase=tables.phase is not None,
            wide=self.dtype == torch.float64, fast=fast,
            fixed=positions is None and not affine and self.dtype != torch.float64, functions=2 if fast else int(ptx),
            aligned=aligned, long=any(s // unit >= 2**31 for t in tensors for s in t.stride()),
            num_turned=turned, begins=begins, widths=widths, blocks=blocks, block_c=block_c,
            block_n=tile.block_n, stages=tile.stages,
            keeps_zero=_keeps_zero(spec.act), normalizer=self.call.attention.normalizer, gated=self.gate is not None,
            operand="same" if not self.narrow else "rounded" if INTERPRETING else "bfloat16",
            v_dim=sizes.v_dim, block_v=block_v, num_features=sizes.num_features,
            feature_begins=tuple(accumulate(features[0], initial=0))[:-1], feature_widths=features[0],
            feature_blocks=features[1], turned_products=tile.block_n < 64,
            sum_blocks=sums, num_sums=sizes.num_sums, state_size=sizes.state,
            weight_rows=weights, prefetch=tile.prefetch and ptx,
        )._replace(**changes)  # fmt: skip
        options = {"num_warps": tile.num_warps, **_registers(tile.max_registers)}
        return variant, options

    def tensor(self, t: Tensor | None, variant: Variant) -> tuple:
        if t is None:
            return (None, (0, 0, 0, 0))
        unit = 8 if variant.aligned else 1
        b, h, n, d = t.stride()
        return t, (b // unit, h // unit, n // unit, d)

    def gate_tensor(self, t: Tensor | None) -> tuple:
        if t is None:
            return (None, (0, 0, 0))
        b, h, n = t.stride()
        return t, (b, h if t.shape[1] > 1 else 0, n)

    def side(self, side: Call, variant: Variant) -> tuple:
        if side.spec.map == "none":
            return ()
        steps, grid = _count_tables(side, variant), _count_grid(side.layout)
        names = ("omega_h", "phase_h", "amplitude_h", "positions_b", "rotated_b")
        axes = ("n1", "n2", "n3", "magic1", "magic2", "magic3", "shift1", "shift2", "shift3")
        numbers = (
            side.layout.num_tokens, grid["first_index"], grid["num_grid"], tuple(steps[name] for name in names),
            tuple(grid[name] for name in axes),
        )  # fmt: skip
        t = side.tables
        return t.omega, t.phase, t.coords, t.origin, t.affine, t.rotated, t.amplitude, numbers


@cache
def _keeps_zero(act: str) -> bool:
    entry = ACTIVATIONS[act]
    return not entry.forward(torch.zeros(1, device="cpu"), -1 if entry.dims else None).any()


_FORWARD = (LinearPass.FORWARD, LinearPass.STATE, LinearPass.OUTPUT)


def _cut_channels(spec: Any, head_dim: int) -> tuple[int, tuple, tuple, tuple]:
    """Channels a tile, and begins, widths and blocks of a row's tiles: what the map turns, then what passes."""

    def block(width: int) -> int:
        return max(16, triton.next_power_of_2(width))

    if spec.map == "none":
        return 16, (0,), (head_dim,), (block(head_dim),)
    channels = spec.num_channels
    if spec.map == "cosine":
        return block(channels), (0,), (channels,), (block(channels),)
    head, tail = spec.rotary_start, spec.rotary_start + 2 * channels
    begins, widths = [head, head + channels], [channels, channels]
    for begin, end in ((0, head), (tail, head_dim)):
        if end > begin:
            begins.append(begin)
            widths.append(end - begin)
    return block(channels), tuple(begins), tuple(widths), tuple(map(block, widths))


def _join_features(spec: Any, widths: tuple, blocks: tuple) -> tuple[tuple, tuple]:
    """Widths and blocks of the tiles of q̂: what the map makes is one."""
    turned = {"cosine": 1, "rotate": 2, "none": 0}[spec.map]
    if not turned:
        return widths, blocks
    return (2 * spec.num_channels, *widths[turned:]), (2 * blocks[0], *blocks[turned:])


def _make_far_readable(spec: Any, layout: Any, tables: Any, narrow: bool) -> Call:
    """Tables as the kernels read them; grids whose turns 32 bits don't count exactly enough by float64 positions."""
    call = Call(spec, layout, tables)
    if spec.map == "none":
        return call
    if narrow and layout.sizes and max(layout.sizes) > 2**16 and tables.affine is None and tables.origin is None:
        affine = affine_on((1.0,) * len(layout.sizes), (0.0,) * len(layout.sizes), tables.omega.device)
        call = call._replace(tables=tables._replace(affine=affine))
    return _make_readable(call)


def _with_phase(call: Call) -> Call:
    tables = call.tables
    if tables.phase is not None:
        return call
    return call._replace(tables=tables._replace(phase=tables.omega.new_zeros(1, call.spec.num_channels)))


# --- forward ---------------------------------------------------------------------------------------------------


def forward(
    call: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Sequence[Tensor], return_state: bool,
    keep: bool,
) -> list[Tensor]:  # fmt: skip
    work = Work(call, (q, k, v), gate)
    sizes = work.sizes
    o = like_in_memory(work.q, sizes.v_dim)
    with _current_device(q):
        if not state and not return_state and fits_one_pass(sizes.num_queries, sizes.num_keys):
            variant, options = work.describe(LinearPass.FORWARD, work.k_call, [o])
            kernels.linear_forward_kernel[(sizes.batch * sizes.groups,)](
                work.tensor(work.q, variant), work.tensor(work.k, variant), work.tensor(work.v, variant),
                work.tensor(o, variant), work.gate_tensor(work.gate), work.side(work.q_call, variant),
                work.side(work.k_call, variant),
                (sizes.groups, sizes.repeats, sizes.num_queries, sizes.num_keys, call.attention.eps), V=variant, **options,
            )  # fmt: skip
            return [o]
        slots, final = sum_states(work, state, return_state)
        variant, options = work.describe(LinearPass.OUTPUT, work.q_call, [o])
        rows = sizes.batch * sizes.groups * sizes.repeats
        count, length = cut_pieces(sizes.num_queries, rows, variant.block_n)
        kernels.linear_output_kernel[(rows * count,)](
            work.tensor(work.q, variant), work.tensor(o, variant), work.side(work.q_call, variant), slots,
            (None, length, sizes.num_queries),
            (sizes.groups, sizes.repeats, count, sizes.batch, call.attention.eps), V=variant, **options,
        )  # fmt: skip
    return [o, *(final if return_state else []), *(slots if keep else [])]


def sum_states(work: Work, state: Sequence[Tensor], return_state: bool) -> tuple[tuple, list[Tensor]]:
    """What the tokens see: S as operands and the sums; and the state behind all tokens."""
    sizes, call = work.sizes, work.call
    variant, options = work.describe(LinearPass.STATE, work.k_call)
    rows = sizes.batch * sizes.groups
    count, length = cut_pieces(sizes.num_keys, rows, variant.block_n)
    states = torch.empty(count, rows, sizes.state, dtype=work.acc, device=work.device)
    kernels.linear_state_kernel[(rows * count,)](
        work.tensor(work.k, variant), work.tensor(work.v, variant), work.gate_tensor(work.gate),
        work.side(work.k_call, variant), states, (None, length, sizes.num_keys), (sizes.groups, count, sizes.batch),
        V=variant, **options,
    )  # fmt: skip
    return scan(work, states, 1, state, return_state, False)


def scan(
    work: Work, states: Tensor, repeats: int, first: Sequence[Tensor], return_last: bool, backward: bool
) -> tuple[tuple, list[Tensor]]:
    sizes = work.sizes
    count, rows = states.shape[0], sizes.batch * sizes.groups
    slots = torch.empty(1, rows, sizes.v_dim, sizes.num_features, dtype=work.operand, device=work.device)
    sums = torch.empty(1, rows, max(1, sizes.num_sums), dtype=work.acc, device=work.device)
    begin = join_state(work, first) if first else None
    last = torch.empty(rows, sizes.state, dtype=work.acc, device=work.device) if return_last else None
    variant = Variant(
        normalizer=work.call.attention.normalizer, v_dim=sizes.v_dim, num_features=sizes.num_features,
        num_sums=sizes.num_sums, state_size=sizes.state, block_c=SCAN_BLOCK, wide=work.acc == torch.float64,
    )  # fmt: skip
    kernels.linear_scan_kernel[(rows * triton.cdiv(sizes.state, SCAN_BLOCK),)](
        states, (slots, sums), (begin, last), None, (sizes.groups, repeats, count, sizes.batch, int(backward)),
        V=variant,
    )  # fmt: skip
    return (slots, sums), [] if last is None else split_state(work, last)


def order_features(spec: Any, head_dim: int) -> list[int]:
    """The channels of q̂ in the order of the kernels' tiles."""
    channels = range(spec.num_channels)
    if spec.map == "none":
        return list(range(head_dim))
    if spec.map == "cosine":
        begins = (0, head_dim) if spec.order == "cos_sin" else (head_dim, 0)
        return [begin + c for c in channels for begin in begins]
    width = 2 * spec.num_channels
    first, second = split_pairs(torch.arange(width), spec.pairs, spec.sections)
    turned = (torch.stack([first, second], dim=-1).flatten() + spec.rotary_start).tolist()
    return turned + [c for c in range(head_dim) if not 0 <= c - spec.rotary_start < width]


@lru_cache(maxsize=256)
def _order(spec: Any, head_dim: int, device: torch.device, inverse: bool) -> Tensor | None:
    order = order_features(spec, head_dim)
    if order == sorted(order):
        return None
    found = torch.tensor(order, device=device)
    return found.argsort() if inverse else found


def join_state(work: Work, state: Sequence[Tensor]) -> Tensor:
    """(S, sums) as one row a head: Sᵀ, its features in the kernels' order, and the sums behind."""
    sizes, spec = work.sizes, work.call.spec
    order = _order(spec, work.q.shape[3], work.device, False)
    matrix, *sums = state
    if order is not None:
        matrix = matrix.index_select(2, order)
        if work.call.attention.normalizer == "encoded":
            sums = [t.index_select(2, order) for t in sums]
    parts = [matrix.mT.reshape(-1, sizes.groups, sizes.v_dim * sizes.num_features), *sums]
    return torch.cat(parts, dim=-1).to(work.acc).contiguous()


def split_state(work: Work, last: Tensor) -> list[Tensor]:
    """The inverse of :func:`join_state`."""
    sizes, spec = work.sizes, work.call.spec
    order = _order(spec, work.q.shape[3], work.device, True)
    size = sizes.v_dim * sizes.num_features
    matrix, sums = last.view(-1, sizes.groups, sizes.state).split([size, sizes.num_sums], dim=-1)
    matrix = matrix.unflatten(-1, (sizes.v_dim, sizes.num_features)).mT
    if order is not None:
        matrix = matrix.index_select(2, order)
        if work.call.attention.normalizer == "encoded":
            sums = sums.index_select(2, order)
    return [matrix] if not sizes.num_sums else [matrix, sums]


def saved_shapes(call: Any, q: Any, k: Any, v: Any) -> list:
    return []


# --- backward --------------------------------------------------------------------------------------------------


def backward(
    call: Any, do: Tensor, dstate: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None,
    state: Sequence[Tensor], saved: Sequence[Tensor], needs: Any,
) -> list[Tensor]:  # fmt: skip
    work = Work(call, (q, k, v, do), gate, needs)
    sizes = work.sizes
    dq, dk, dv = (like_in_memory(t, t.shape[3]) for t in (work.q, work.k, work.v))
    outs = [dq, dk, dv]
    need_dangles = needs.omega or needs.phase
    dgate = None
    if needs.gate:
        dgate = torch.empty(sizes.batch, sizes.groups, sizes.num_keys, dtype=work.acc, device=work.device)
    tables = work.k_call.tables
    partial = None
    rows = sizes.batch * sizes.groups
    dstate_in: list[Tensor] = []
    with _current_device(q):
        if not state and not dstate and not saved and fits_one_pass(sizes.num_queries, sizes.num_keys):
            variant, options = work.describe(LinearPass.BACKWARD, work.k_call, outs, need_dgate=needs.gate)
            slots = variant.num_axes + variant.has_phase
            if need_dangles:
                partial = torch.empty(rows, slots * call.spec.num_channels, dtype=torch.float64, device=work.device)
            kernels.linear_backward_kernel[(rows,)](
                *(work.tensor(t, variant) for t in (work.q, work.k, work.v, work.do[0], *outs)),
                (work.gate_tensor(work.gate), work.gate_tensor(dgate)),
                (work.side(work.q_call, variant), work.side(work.k_call, variant)), partial,
                (sizes.groups, sizes.repeats, sizes.num_queries, sizes.num_keys, call.attention.eps),
                V=variant, **options,
            )  # fmt: skip
        else:
            kept = tuple(saved) if saved else sum_states(work, state, False)[0]
            q_variant, options = work.describe(LinearPass.QUERIES, work.q_call, outs)
            count, length = cut_pieces(sizes.num_queries, rows * sizes.repeats, q_variant.block_n)
            k_variant, k_options = work.describe(LinearPass.KEYS, work.k_call, outs, need_dgate=needs.gate)
            k_count, k_length = cut_pieces(sizes.num_keys, rows, k_variant.block_n)
            q_rows = count * sizes.repeats
            q_partial = k_partial = None
            if need_dangles:
                width = (q_variant.num_axes + q_variant.has_phase) * call.spec.num_channels
                partial = torch.empty(q_rows + k_count, rows * width, dtype=torch.float64, device=work.device)
                q_partial, k_partial = partial[:q_rows], partial[q_rows:]
            dstates = torch.empty(count, rows * sizes.repeats, sizes.state, dtype=work.acc, device=work.device)
            kernels.linear_query_gradient_kernel[(rows * sizes.repeats * count,)](
                *(work.tensor(t, q_variant) for t in (work.q, work.do[0], dq)), work.side(work.q_call, q_variant), kept,
                dstates, q_partial, (None, length, sizes.num_queries),
                (sizes.groups, sizes.repeats, count, sizes.batch, call.attention.eps), V=q_variant, **options,
            )  # fmt: skip
            s_variant, s_options = work.describe(LinearPass.QUERY_STATE, work.q_call, outs)
            kernels.linear_query_state_kernel[(rows * sizes.repeats * count,)](
                *(work.tensor(t, s_variant) for t in (work.q, work.do[0])), work.side(work.q_call, s_variant), kept,
                dstates, (None, length, sizes.num_queries),
                (sizes.groups, sizes.repeats, count, sizes.batch, call.attention.eps), V=s_variant, **s_options,
            )  # fmt: skip
            dslots, dstate_in = scan(work, dstates, sizes.repeats, dstate, bool(state), True)
            kernels.linear_key_gradient_kernel[(rows * k_count,)](
                *(work.tensor(t, k_variant) for t in (work.k, work.v, dk, dv)),
                (work.gate_tensor(work.gate), work.gate_tensor(dgate)), work.side(work.k_call, k_variant), dslots,
                k_partial, (None, k_length, sizes.num_keys), (sizes.groups, k_count, sizes.batch),
                V=k_variant, **k_options,
            )  # fmt: skip
        found = outs
        if dgate is not None:
            found.append((dgate if gate.shape[1] > 1 else dgate.sum(1, keepdim=True)).to(gate.dtype))
        if partial is not None:
            heads = max(t.shape[0] for t in (tables.omega, tables.phase) if t is not None)
            shape = (-1, heads, tables.omega.shape[2] + (tables.phase is not None), call.spec.num_channels)
            found += _reduce(partial.view(shape), work.k_call, Needs(needs.omega, needs.phase))
    return [*found, *dstate_in]
