"""Launch the encoding kernels: derive the variant and numbers from shapes and strides, allocate, and launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from .. import kernels
from ..core.call import NO_TABLES, Call, Needs, Variant, Weights
from ..core.launching import (
    FAR,
    INTERPRETING,
    count_grid,
    count_tables,
    current_device,
    cut_channels,
    describe_tables,
    divide_by,
    has_ptx,
    in_eights,
    launches_early,
    limit_registers,
    make_readable,
    materialise,
    num_groups,
    place_far,
)  # fmt: skip
from ..core.memory import accumulator, like_in_memory, strides_in_memory
from ..core.operator import make_key, remember, remembered
from ..core.recording import start
from ..core.reduction import Partials, Sums, allocate_partials, reduce_partials
from ..kernels.signature import pack
from .plan import Pass, Plan, Work, plan, share_rows

__all__ = [
    "Launch",
    "Rows",
    "backward",
    "count_entries",
    "count_far",
    "describe",
    "forward",
    "prepare",
    "recall_launches",
    "run",
]

lrpe_kernel: Any = kernels.lrpe_kernel
softmax_sequence_kernel: Any = kernels.softmax_sequence_kernel


def forward(
    call: Call, xs: Sequence[Tensor], outs: Sequence[Tensor | None] = (), start: Tensor | None = None
) -> list[Tensor]:
    """Return the outputs and, for softmax over the sequence, maximum and sum (2, B, H, D) of each tensor.

    outs, start: see :class:`lrpe_md.engine.encode.output.Target`.
    """
    xs = [materialise(x) for x in xs]
    ready = make_readable(call)
    stats = []
    with current_device(xs[0]):
        if call.spec.dim == -2:
            for x in xs:
                stats.append(x.new_empty((2, x.shape[0], x.shape[1], x.shape[3]), dtype=accumulator(x.dtype)))
                _launch_softmax(x, stats[-1])
        ys, _ = run(ready, Rows(xs, [], stats, outs, None if start is None else start.contiguous()))
    return [*ys, *stats]


def backward(
    call: Call,
    grads: list[Tensor],
    xs: list[Tensor],
    stats: list[Tensor],
    needs: Needs,
    outs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return dx for each gradient (written to ``outs`` if passed), then the needed gradients of ω, φ and weights."""
    grads, xs = [materialise(g) for g in grads], [materialise(x) for x in xs]
    ready = make_readable(call)
    over_sequence = call.spec.dim == -2
    with current_device(grads[0]):
        inner = ready
        if over_sequence:
            inner = ready._replace(spec=call.spec._replace(act="none"))
        load = xs if any(needs) or inner.spec.act != "none" or inner.spec.norm != "none" else []
        dxs, partials = run(inner, Rows(load, grads, stats, () if over_sequence else outs), needs)
        if over_sequence:
            dx_bars = dxs
            dxs = list(outs) or [like_in_memory(g, t.shape[3]) for g, t in zip(grads, dx_bars, strict=True)]
            for x, stat, dx_bar, dx in zip(xs, stats, dx_bars, dxs, strict=True):
                _launch_softmax(x, stat, dx_bar, dx)
        if any(needs):
            dxs += reduce_partials(partials, ready, call.weights, needs)
    return dxs


class Rows(NamedTuple):
    """Inputs of a launch beside the tables, for one tensor or for q and k."""

    xs: list[Tensor]  # empty if the backward needs no x
    dys: list[Tensor]  # empty in the forward
    stats: list[Tensor]
    outs: Sequence[Any] = ()  # tensors to write to; missing ones, or None, are allocated
    start: Tensor | None = None  # (1,) or (B,): the index of the first token in each output


class Launch:
    """Everything about a launch except the tensors."""

    __slots__ = ("compiled", "grid", "options", "outs", "packed", "placed", "scalars", "sums", "tables", "variant")

    def __init__(
        self, programs: int, outs: list, sums: Sums, scalars: tuple[int, ...], variant: Variant, options: dict
    ) -> None:
        self.grid = (programs, 1, 1)
        self.outs = outs  # (size, stride) of each output
        self.sums = sums
        self.scalars = scalars
        self.packed: tuple[int, ...] = pack(0, 0)  # numbers of the norm
        self.placed: tuple[int, ...] = ()  # numbers of where outputs begin
        self.tables: tuple[int, ...] = ()  # strides of tables
        self.variant = variant
        self.options = options
        self.compiled: Any = None


_NOTHING = Needs()


def count_far(call: Call, dtype: torch.dtype, needs: Needs) -> Call:
    """Apply :func:`place_far` if the grid is large and the kernel uses the hardware's sine and cosine."""
    if max(call.layout.sizes, default=0) <= FAR or not _is_fast(dtype, call.weights, needs):
        return call
    return place_far(call)


def run(
    call: Call, rows: Rows, needs: Needs = _NOTHING, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Partials]:
    """Launch the kernel on q (and k); return its outputs and the partial sums. dtype: of outputs; None: as inputs."""
    spec = call.spec
    xs, dys, _, given, start = rows
    source = (dys or xs)[0]
    dtype, device = dtype or source.dtype, source.device
    if dys and spec.dim == -2:  # outputs are dx̄, in the accumulator's dtype, as a later kernel computes dx
        dtype = accumulator(dtype)
    call = count_far(call, dtype, needs)
    tables, launches, weights, cos_sin = call.tables, call.launches, call.weights, call.cos_sin
    address, geometry = 0, []
    for t in (*xs, *dys):
        address |= t.data_ptr()
        geometry.append(t.stride())
    for t in given:
        if t is not None:
            address |= t.data_ptr()
        geometry.append(None if t is None else t.stride())
    if start is not None:
        geometry.append((start.dtype, len(start), *(None if t is None else t.shape[2] for t in given)))
    aligned = address % 16 == 0
    cos, sin, _ = cos_sin
    if cos is not None:
        geometry.append((cos.stride(), cos.data_ptr() % 16 == 0))
        geometry.append(None if sin is None else (sin.stride(), sin.data_ptr() % 16 == 0))
    if spec.norm != "none":
        geometry.append(all(t is None or t.data_ptr() % 16 == 0 for t in weights))
    if launches is None:
        launches = recall_launches(call, rows)
    key = dtype, spec.act, bool(xs), bool(dys), needs, aligned, *geometry
    launch = launches.get(key)
    if launch is None:
        launch = launches[key] = prepare(call, rows, dtype, aligned, needs, launches_early(needs))
    outs: list[Tensor] = [
        torch.empty_strided(size, stride, dtype=dtype, device=device) if t is None else t
        for t, (size, stride) in zip(given or (None,) * len(launch.outs), launch.outs, strict=True)
    ]
    partials = allocate_partials(launch.sums, device) if any(needs) else Partials(None, None, launch.sums)
    if launch.grid[0]:
        norm = None
        if spec.norm != "none":
            norm = (weights.weight, weights.bias, weights.weight_k, weights.bias_k, partials.weights, launch.packed)
        more = norm if start is None else (norm, (start, launch.placed))
        turn = None if cos is None else (cos, sin, launch.tables)
        _start(launch, order_tensors(rows, outs, (*tables, turn), partials.angles, more))
    return outs, partials


def order_tensors(
    rows: Rows, outs: Sequence[Any], tables: tuple[Any, ...], partial: Any, more: Any = None
) -> tuple[Any, ...]:
    """Return the first arguments of ``lrpe_kernel``.

    tables: the call's tables, then the caller's cos and sin with their strides. more: see :func:`lrpe_kernel`.
    """
    x0, x1 = (*rows.xs, None, None)[:2]
    dy0, dy1 = (*rows.dys, None, None)[:2]
    stat0, stat1 = (*rows.stats, None, None)[:2]
    o0, o1 = (*outs, None)[:2]
    return x0, dy0, o0, stat0, x1, dy1, o1, stat1, *tables, partial, more


def recall_launches(call: Call, rows: Rows) -> dict:
    """Return the launches prepared for calls with the same sizes, dtypes and devices."""
    tensors = (*rows.xs, *rows.dys, *call.tables, *call.weights, *call.cos_sin[:2])
    metas = make_key(None, tensors)
    key = "launches", call.spec, call.layout, call.cos_sin.inverse, len(rows.xs), len(rows.dys), metas
    known: Any = remembered.get(key) or remember(key, Call(call.spec, call.layout, NO_TABLES, {}))
    return known.launches


def _start(launch: Launch, tensors: tuple[Any, ...]) -> None:
    """Launch the kernel. Later launches skip Triton's lookup of the compiled kernel, which is slower than a launch."""
    compiled = launch.compiled
    if compiled is not None and not lrpe_kernel.pre_run_hooks:
        compiled[launch.grid](*tensors, *launch.scalars, launch.variant)
        return
    compiled = start(lrpe_kernel, launch.grid[0], (*tensors, *launch.scalars), launch.variant, launch.options)
    if isinstance(compiled, CompiledKernel):
        launch.compiled = compiled


def prepare(call: Call, rows: Rows, dtype: torch.dtype, aligned: bool, needs: Needs, early: bool = False) -> Launch:
    """Prepare a launch, using only shapes and strides.

    dtype: of the outputs. aligned: addresses are multiples of 16 bytes. early: the second pass of dω may start while
    this one runs.
    """
    spec, layout = call.spec, call.layout
    xs, dys = rows.xs, rows.dys
    sources = dys or xs
    batch, heads0, num_tokens, last = sources[0].shape
    heads1 = sources[1].shape[1] if len(sources) == 2 else 0
    head_dim = spec.head_dim(last) if dys else last
    out_dim = head_dim if dys else spec.out_dim(head_dim)
    given = rows.outs or (None,) * len(sources)
    outs = [
        ((*x.shape[:3], out_dim), strides_in_memory(x, out_dim)) if t is None else (t.shape, t.stride())
        for t, x in zip(given, sources, strict=True)
    ]
    strides = {"x": [t.stride() for t in xs], "dy": [t.stride() for t in dys], "o": [stride for _, stride in outs]}
    aligned = aligned and in_eights(head_dim, [s for group in strides.values() for s in group])
    variant = describe(call, rows, dtype, (head_dim, aligned), needs, strides)
    if not spec.dim and aligned and spec.norm == "none":
        variant = _flatten_channels(variant, num_tokens)

    groups = max(1, num_groups(call))
    group0, group1 = heads0 // groups, heads1 // groups
    samples = batch if variant.by_sample else 1
    num_rows = num_tokens * max(1, variant.flat)
    span = (group0 + group1) * batch // samples
    walks = any(needs)
    common = 0
    if variant.has_weight or variant.has_bias:
        common = 1 if variant.weight_by_head else math.gcd(group0, group1)
    work = Work(
        map=spec.map, stage=Pass.DOMEGA if walks else Pass.BACKWARD if dys else Pass.FORWARD,
        activated=spec.act != "none", num_tokens=num_rows, groups=groups, rows=span, heads=group0 + group1,
        width=_tile_width(variant), itemsize=dtype.itemsize, samples=samples,
        step=variant.flat if variant.flat and walks else 1,  # so that each thread keeps its channels
        interpreting=INTERPRETING, common=common, tables=variant.tables,
    )  # fmt: skip
    chosen = plan(work)
    variant = variant._replace(
        block_r=chosen.block_r, block_n=chosen.block_n, stages=chosen.stages, rows_first=chosen.rows_first,
        early=early,
    )  # fmt: skip
    num_blocks = triton.cdiv(num_rows, chosen.block_n)
    token_programs = chosen.token_programs if num_blocks else 0
    in_sample, outer = share_rows(span, group0 + group1, chosen.per)
    programs = token_programs * groups * in_sample * outer * samples
    first, second = token_programs, groups * in_sample
    tokens_first = outs[0][1][2] <= outs[0][1][1]  # neighbours in memory run at the same time
    if not tokens_first:
        first, second = second, first
    numbers = {
        **_count_strides(strides, 8 if aligned else 1), **count_tables(call, variant), **count_grid(layout),
        "B": batch, "N": num_tokens, "num_blocks": num_blocks, "tokens_first": int(tokens_first),
        "first": first, "second": second, "G": groups, "M": in_sample, "P": outer, "span": span, "per": chosen.per,
        "group0": group0, "group1": group1,
        **divide_by("_first", first), **divide_by("_second", second), **divide_by("_g", groups),
        **divide_by("_p", outer), **divide_by("_h", group0 + group1),
    }  # fmt: skip
    scalars = tuple(numbers[name] for name in kernels.lrpe_kernel.arg_names if name in numbers)
    q_parts = group0 // chosen.per
    sums = _count_sums(variant, programs, groups, token_programs * groups * q_parts * outer * samples)
    if needs.norm:
        rows_of = token_programs * outer * samples if variant.weight_by_head else 0
        sums = sums._replace(counts=(sums.counts[0], rows_of))
    launch = Launch(programs, outs, sums, scalars, variant, _compiler_options(chosen))
    launch.packed = pack(q_parts, outer * samples)
    launch.tables = count_entries(call, variant)
    if rows.start is not None:
        lengths = [0 if t is None else t.shape[2] for t in (*rows.outs, None)][:2]
        launch.placed = pack(*lengths, int(len(rows.start) > 1))
    return launch


def _count_sums(variant: Variant, programs: int, groups: int, of_q: int) -> Sums:
    angles, weights = None, None
    if variant.need_dangles:
        angles = programs // groups, groups, variant.num_axes + variant.has_phase, variant.num_channels
    if variant.need_dweight:
        kinds = variant.has_weight + variant.has_bias
        weights = programs, kinds * variant.token_groups * variant.head_dim
    return Sums(angles, weights, (of_q, 0))


def describe(call: Call, rows: Rows, dtype: torch.dtype, row: tuple[int, bool], needs: Needs, strides: dict) -> Variant:
    """Return the variant without the division of the work. row: head_dim, and whether all rows are aligned."""
    spec, tables, weights, cos_sin = call.spec, call.tables, call.weights, call.cos_sin
    head_dim, aligned = row
    given = cos_sin.cos is not None
    tiles = cut_channels(spec, head_dim)
    fields = describe_tables(tables, weights)
    fields["by_sample"] = fields["by_sample"] or (given and cos_sin.by_sample)
    is_index = tables.coords is None and tables.origin is None and not fields["affine"]
    wide, fast = dtype == torch.float64, _is_fast(dtype, weights, needs)
    unit = 8 if aligned else 1
    return Variant(
        *spec, head_dim=head_dim, **fields, **_describe_tables(call), **tiles._asdict(),
        backward=bool(rows.dys), need_dangles=needs.omega or needs.phase, load_x=bool(rows.xs),
        has_k=len(strides["o"]) == 2, has_start=rows.start is not None, need_dweight=needs.norm,
        wide=wide, fast=fast and not given,
        # If a position is an index. With the hardware's approximations, exact angles would gain nothing.
        fixed=is_index and not (wide or fast or given), functions=2 if fast else int(has_ptx(dtype)),
        aligned=aligned, long=any(s // unit >= 2**31 for group in strides.values() for each in group for s in each),
    )  # fmt: skip


def _describe_tables(call: Call) -> dict[str, Any]:
    """Return the fields of a variant that describe how the caller's cos and sin are read."""
    cos_sin, entries = call.cos_sin, 1
    if cos_sin.cos is None:
        return {}
    joined = cos_sin.sin is None
    strides = cos_sin.strides()
    side_by_side = all(d == 1 + joined for _, _, _, d in strides)
    if side_by_side and all(t.data_ptr() % 16 == 0 for t in cos_sin.given):
        # The largest number of entries (at most those of one load) that divides all strides.
        steps = [step for b, h, n, _ in strides for step in (b, h, n)]
        entries = math.gcd(8, *steps)
    kind = "pairs" if cos_sin.shape[-1] == call.spec.num_channels else "full"
    unit = entries if entries > 1 else 1
    return {"tables": kind, "joined": joined, "inverse": cos_sin.inverse, "table_unit": unit}


def count_entries(call: Call, variant: Variant) -> tuple[int, ...]:
    """Return the packed strides (b, h, n, d) of cos and of sin for :func:`kernels.tables.point_to_tables`."""
    if call.cos_sin.cos is None:
        return ()
    cos, sin = (*call.cos_sin.strides(), (0, 0, 0, 0))[:2]
    return pack(*(step // variant.table_unit if i % 4 < 3 else step for i, step in enumerate((*cos, *sin))))


def _flatten_channels(variant: Variant, num_tokens: int) -> Variant:
    """Divide channels into small blocks if their number is not a power of two, so that no threads idle.

    This only works if the map turns all channels, and nothing is summed over the channels.
    """
    channels = variant.num_channels  # a multiple of 4 or 8 if the map turns all channels
    if len(variant.begins) > variant.num_turned or channels == variant.block_c or num_tokens * channels >= 2**31:
        return variant
    block_c = min(8, channels & -channels)
    blocks = (block_c,) * variant.num_turned
    return variant._replace(block_c=block_c, blocks=blocks, flat=channels // block_c)


def _tile_width(variant: Variant) -> int:
    """Return how many channels of a row a tile holds."""
    if not (variant.need_dangles or variant.need_dweight):
        return variant.num_turned * variant.block_c
    return triton.next_power_of_2(sum(variant.blocks))  # includes the other channels


def _count_strides(strides: dict[str, list], unit: int) -> dict[str, int]:
    numbers = {}
    for name, group in strides.items():
        for k in range(2):
            b, h, n, d = group[k] if k < len(group) else (0, 0, 0, 0)
            at = f"{name}{k}"
            numbers |= {f"{at}_b": b // unit, f"{at}_h": h // unit, f"{at}_n": n // unit, f"{at}_d": d}
    return numbers


def _compiler_options(chosen: Plan) -> dict[str, Any]:
    return {"num_warps": chosen.num_warps, **limit_registers(chosen.max_registers)}


def _is_aligned(head_dim: int, tensors: list[Tensor]) -> bool:
    """Return whether every row is 16-byte aligned and strides are multiples of 8 elements."""
    return all(t.data_ptr() % 16 == 0 for t in tensors) and in_eights(head_dim, [t.stride() for t in tensors])


def _is_fast(dtype: torch.dtype, weights: Weights, needs: Needs) -> bool:
    """Return whether to use CUDA's sine and cosine. Their error is below the rounding of 16-bit outputs, not of dω."""
    narrow = [dtype] + [t.dtype for t in weights if t is not None and needs.norm]
    return all(d.itemsize == 2 for d in narrow) and not (needs.omega or needs.phase) and has_ptx(dtype)


def _launch_softmax(x: Tensor, stat: Tensor, g: Tensor | None = None, dx: Tensor | None = None) -> None:
    """Launch softmax over the sequence: compute maximum and sum or, with g, the backward."""
    if not x.numel():
        return
    batch, heads, num_tokens, head_dim = x.shape
    block_d = 16
    block_n = max(16, min(triton.next_power_of_2(num_tokens), 2048)) if INTERPRETING else 128
    tensors = [t for t in (x, g, dx) if t is not None]
    aligned = _is_aligned(head_dim, tensors)
    unit = 8 if aligned else 1
    x_strides, g_strides, dx_strides = (_stride_in(t, unit) for t in (x, g, dx))
    variant = Variant(
        act="softmax", dim=-2, num_channels=head_dim, head_dim=head_dim, backward=g is not None,
        wide=x.dtype == torch.float64, functions=int(has_ptx(x.dtype)), aligned=aligned,
        long=any(s // unit >= 2**31 for t in tensors for s in t.stride()), block_n=block_n, block_c=block_d,
    )  # fmt: skip
    args = (x, g, dx, stat, x_strides, g_strides, dx_strides, batch, heads, num_tokens)
    start(softmax_sequence_kernel, batch * heads * triton.cdiv(head_dim, block_d), args, variant, {})


def _stride_in(t: Tensor | None, unit: int) -> tuple[int, ...]:
    """Return packed strides of (B, H, N, D), in units except for the channel stride."""
    b, h, n, d = (0, 0, 0, 0) if t is None else t.stride()
    return pack(b // unit, h // unit, n // unit, d)
