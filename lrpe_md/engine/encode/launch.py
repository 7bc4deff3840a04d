"""Launch the encoding kernels. Variants and arguments are derived from shapes and strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from .. import kernels
from ..core import launching
from ..core.call import NO_NEEDS, NO_TABLES, Call, Needs, Variant, Weights
from ..core.memory import accumulator, like_in_memory, strides_in_memory
from ..core.operator import cache_call, call_cache, make_key
from ..core.recording import launch_kernel
from ..core.reduction import Partials, Sums, allocate_partials, reduce_partials
from ..kernels.signature import pack_numbers
from .plan import Pass, Work, plan, share_rows

Strides = tuple[tuple[tuple[int, ...], ...], ...]  # packed strides of q and of k in x, dy and the output

lrpe_kernel: Any = kernels.lrpe_kernel
softmax_sequence_kernel: Any = kernels.softmax_sequence_kernel


def forward(
    call: Call, xs: Sequence[Tensor], outs: Sequence[Tensor | None] = (), start: Tensor | None = None
) -> list[Tensor]:
    """Return the outputs and, for softmax over the sequence, the maximum and sum (2, B, H, D) of each tensor.

    ``outs`` and ``start`` are described in :class:`lrpe_md.engine.encode.output.Target`.
    """
    if call.launches and not outs:
        launch = _recall_forward(call, xs)
        if launch is not None:
            return run_launch(launch, call, Rows(xs, [], []), xs[0].dtype)[0]
    xs, dtype = launching.materialise(*xs), xs[0].dtype
    readable_call = use_affine_if_large(launching.make_readable(call), dtype, NO_NEEDS)
    stats = []
    with launching.current_device(xs[0]):
        if call.spec.dim == -2:
            for x in xs:
                stats.append(x.new_empty((2, x.shape[0], x.shape[1], x.shape[3]), dtype=accumulator(dtype)))
                _launch_softmax(x, stats[-1])
        rows = Rows(xs, [], stats, outs, None if start is None else start.contiguous())
        launch = find_launch(readable_call, rows, dtype)
        ys, _ = run_launch(launch, readable_call, rows, dtype)
    if readable_call is call and not outs:
        _remember_forward(call, xs, launch)
    return [*ys, *stats]


def _remember_forward(call: Call, xs: Sequence[Tensor], launch: Launch) -> None:
    """Remember the launch for the next forward pass with the same sizes, if :func:`_recall_forward` can check it."""
    tensors = _list_strided(call, xs)
    is_aligned = all(t.data_ptr() % 16 == 0 for t in tensors)
    if is_aligned and call.spec.norm == "none" and call.spec.dim != -2 and call.launches is not None:
        call.launches["forward"] = launch, [t.stride() for t in tensors]


def _recall_forward(call: Call, xs: Sequence[Tensor]) -> Launch | None:
    """Return the launch of the last forward pass with the same sizes, if it also fits this one."""
    assert call.launches is not None
    launch, strides = call.launches.get("forward", (None, ()))
    if launch is None:
        return None
    address = 0
    for t, stride in zip(_list_strided(call, xs), strides, strict=True):
        if t.stride() != stride or t.is_neg():
            return None
        address |= t.data_ptr()
    if address % 16 or (xs[0].is_cuda and xs[0].device.index != torch.cuda.current_device()):
        return None
    for t in call.tables:
        if t is not None and not (t.is_contiguous() and not t.is_neg()):
            return None
    return launch


def _list_strided(call: Call, xs: Sequence[Tensor]) -> Sequence[Any]:
    """Return the tensors that kernels read with any strides: x, or q and k, and the caller's tables."""
    cos, sin, _ = call.cos_sin
    return xs if cos is None else (*xs, cos) if sin is None else (*xs, cos, sin)


def backward(
    call: Call, grads: list[Tensor], xs: list[Tensor], stats: list[Tensor], needs: Needs, outs: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return dx and any needed gradients of ω, φ and weights. If ``outs`` is passed, write dx to it."""
    grads, xs = launching.materialise(*grads), launching.materialise(*xs)
    readable_call = launching.make_readable(call)
    is_sequence_softmax = call.spec.dim == -2
    with launching.current_device(grads[0]):
        inner_call = readable_call
        if is_sequence_softmax:
            inner_call = readable_call._replace(spec=call.spec._replace(act="none"))
        loaded_xs = xs if any(needs) or inner_call.spec.act != "none" or inner_call.spec.norm != "none" else []
        dxs, partials = launch_rows(
            inner_call, Rows(loaded_xs, grads, stats, () if is_sequence_softmax else outs), needs
        )
        if is_sequence_softmax:
            dx_bars = dxs
            dxs = list(outs) or [like_in_memory(g, t.shape[3]) for g, t in zip(grads, dx_bars, strict=True)]
            for x, stat, dx_bar, dx in zip(xs, stats, dx_bars, dxs, strict=True):
                _launch_softmax(x, stat, dx_bar, dx)
        if any(needs):
            dxs += reduce_partials(partials, readable_call, call.weights, needs)
    return dxs


class Rows(NamedTuple):
    """Inputs and outputs of a launch, for one tensor or for q and k. Tables are not included."""

    xs: Sequence[Tensor]  # empty if the backward pass doesn't need x
    dys: list[Tensor]  # empty in the forward pass
    stats: list[Tensor]
    outs: Sequence[Any] = ()  # tensors to write to; any that are missing or None are allocated
    start: Tensor | None = None  # (1,) or (B,): the index of the first token in each output


@dataclass(slots=True, eq=False)
class Launch:
    """A prepared launch, without its tensors."""

    programs: int
    outs: list[Any]  # (size, stride) of each output, or None if it has the dtype, size and stride of its input
    sums: Sums
    strides: Strides
    variant: Variant
    options: dict[str, Any]
    numbers: tuple[Any, ...]  # ``numbers`` of the kernel
    tables: tuple[int, ...]  # strides of tables
    counts: tuple[int, ...] = ()  # N, first_index and num_grid
    norm_numbers: tuple[int, ...] = ()
    start_numbers: tuple[int, ...] = ()  # numbers that locate the start of each output
    no_partials: Partials | None = None  # the result of allocate_partials, if there are no sums
    run: Any = None  # function that runs the compiled kernel with this number of programs

    def __post_init__(self) -> None:
        self.no_partials = None if self.sums.angles or self.sums.weights else Partials(None, None, self.sums)


def use_affine_if_large(call: Call, dtype: torch.dtype, needs: Needs) -> Call:
    """Apply :func:`use_affine_positions` to a large grid if the kernel uses the hardware's sine and cosine."""
    if max(call.layout.sizes, default=0) <= launching.LARGE_GRID or not _is_fast(dtype, call.weights, needs):
        return call
    return launching.use_affine_positions(call)


def launch_rows(
    call: Call, rows: Rows, needs: Needs = NO_NEEDS, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Partials]:
    """Launch the kernel on one tensor, or on q and k. Return the outputs and the partial sums.

    The outputs have dtype ``dtype`` or, if it is None, the dtype of the inputs.
    """
    dtype = dtype or (rows.dys or rows.xs)[0].dtype
    if rows.dys and call.spec.dim == -2:  # a later kernel computes dx from dx̄, which keeps the accumulator's dtype
        dtype = accumulator(dtype)
    call = use_affine_if_large(call, dtype, needs)
    return run_launch(find_launch(call, rows, dtype, needs), call, rows, dtype)


def find_launch(
    call: Call, rows: Rows, dtype: torch.dtype, needs: Needs = NO_NEEDS, prepare: Callable[..., Launch] | None = None
) -> Launch:
    """Return the launch for these strides and addresses, or prepare one with :func:`prepare_launch` if there is none.

    Pass ``prepare`` to replace :func:`prepare_launch` for another kernel.
    """
    spec = call.spec
    xs, dys, _, given_outs, start = rows
    launches, (cos, sin, _) = call.launches, call.cos_sin
    address, geometry = 0, []
    for t in (*xs, *dys):
        address |= t.data_ptr()
        geometry.append(t.stride())
    for t in given_outs:
        if t is not None:
            address |= t.data_ptr()
        geometry.append(None if t is None else t.stride())
    if start is not None:
        geometry.append((start.dtype, len(start), *(None if t is None else t.shape[2] for t in given_outs)))
    aligned = address % 16 == 0
    if cos is not None:
        geometry.append((cos.stride(), cos.data_ptr() % 16 == 0))
        geometry.append(None if sin is None else (sin.stride(), sin.data_ptr() % 16 == 0))
    if spec.norm != "none":
        geometry.append(all(t is None or t.data_ptr() % 16 == 0 for t in call.weights))
    if launches is None:
        launches = recall_launches(call, rows)
    key = dtype, spec.act, bool(xs), bool(dys), needs, aligned, *geometry
    launch = launches.get(key)
    if launch is None:
        launch = launches[key] = (prepare or prepare_launch)(call, rows, dtype, aligned, needs)
    return launch


def run_launch(launch: Launch, call: Call, rows: Rows, dtype: torch.dtype) -> tuple[list[Tensor], Partials]:
    """Allocate the outputs and partial sums of a prepared launch, run it, and return them."""
    xs, dys, stats, given_outs, start = rows
    weights, (cos, sin, _) = call.weights, call.cos_sin
    sources, outs = dys or xs, []
    for source, layout, out in zip(sources, launch.outs, given_outs or (None, None), strict=False):
        if out is None and layout is None:
            out = torch.empty_like(source)
        elif out is None:
            out = torch.empty_strided(*layout, dtype=dtype, device=source.device)
        outs.append(out)
    partials = launch.no_partials or allocate_partials(launch.sums, sources[0].device)
    if launch.programs:
        norm = None
        if call.spec.norm != "none":
            norm = (*weights, partials.weights, launch.norm_numbers)
        extras = norm if start is None else (norm, (start, launch.start_numbers))
        table_arguments = None if cos is None else (cos, sin, launch.tables)
        pointers = point_to_pairs(launch.strides, xs, dys, outs)
        tensors = (*pointers, (*stats, None, None)[:2], (*call.tables, table_arguments), partials.angles, extras)
        _launch(launch, (*tensors, *launch.counts, launch.numbers))
    return outs, partials


def point_to_pairs(
    strides: Strides, xs: Sequence[Tensor], dys: Sequence[Tensor], outs: Sequence[Tensor]
) -> tuple[tuple[Any, ...], ...]:
    """Return pointers and strides as kernels expect them: for each of x, dy and the output, those of q and of k."""
    pairs = []
    for tensors, (q_strides, k_strides) in zip((xs, dys, outs), strides, strict=True):
        q, k = (*tensors, None, None)[:2]
        pairs.append((q, q_strides, k, k_strides))
    return tuple(pairs)


def recall_launches(call: Call, rows: Rows) -> dict:
    """Return the launches prepared for calls with the same sizes, dtypes and devices."""
    tensors = (*rows.xs, *rows.dys, *call.tables, *call.weights, *call.cos_sin[:2])
    metas = make_key(None, tensors)
    key = "launches", call.spec, call.layout, call.cos_sin.inverse, len(rows.xs), len(rows.dys), metas
    cached_call: Any = call_cache.get(key) or cache_call(key, Call(call.spec, call.layout, NO_TABLES, {}))
    return cached_call.launches


def _launch(launch: Launch, args: tuple[Any, ...]) -> None:
    """Launch the kernel.

    Later calls skip Triton's lookup of the compiled kernel, which takes longer than the launch.
    """
    if launch.run is not None and not lrpe_kernel.pre_run_hooks:
        launch.run(*args, launch.variant)
        return
    compiled_kernel = launch_kernel(lrpe_kernel, launch.programs, args, launch.variant, launch.options)
    if isinstance(compiled_kernel, CompiledKernel):
        launch.run = compiled_kernel[launch.programs, 1, 1]


def prepare_launch(call: Call, rows: Rows, dtype: torch.dtype, aligned: bool, needs: Needs) -> Launch:
    """Prepare a launch with outputs of dtype ``dtype``. Only the shapes, strides and alignment of tensors matter.

    Set ``aligned`` if all addresses are multiples of 16 bytes.
    """
    spec, dys = call.spec, rows.dys
    sources = dys or rows.xs
    batch, heads0, num_tokens, _ = sources[0].shape
    heads1 = sources[1].shape[1] if len(sources) == 2 else 0
    outs, strides, variant = describe_variant(call, rows, dtype, aligned, needs)
    if not spec.dim and variant.aligned and spec.norm == "none":
        variant = _flatten_channels(variant, num_tokens)

    groups = max(1, launching.num_groups(call))
    group0, group1 = heads0 // groups, heads1 // groups
    samples = batch if variant.by_sample else 1
    num_rows = num_tokens * max(1, variant.flat)
    span = (group0 + group1) * batch // samples
    has_sums = any(needs)
    has_weights = variant.has_weight or variant.has_bias
    rows_per_weight = 0 if not has_weights else 1 if variant.weight_by_head else math.gcd(group0, group1)
    work = Work(
        map=spec.map, stage=Pass.DOMEGA if has_sums else Pass.BACKWARD if dys else Pass.FORWARD,
        activated=spec.act != "none", num_tokens=num_rows, groups=groups, rows=span, heads=group0 + group1,
        width=_find_tile_width(variant), itemsize=dtype.itemsize, samples=samples,
        step=variant.flat if variant.flat and has_sums else 1,  # keeps each thread on the same channels
        interpreting=launching.INTERPRETING, rows_per_weight=rows_per_weight, tables=variant.tables,
    )  # fmt: skip
    work_plan = plan(work)
    tile = {name: getattr(work_plan, name) for name in ("block_r", "block_n", "stages", "rows_first")}
    variant = variant._replace(**tile, early=has_sums and launching.launches_early())
    num_blocks = triton.cdiv(num_rows, work_plan.block_n)
    token_programs = work_plan.token_programs if num_blocks else 0
    parts_per_sample, num_runs = share_rows(span, group0 + group1, work_plan.rows_per_program)
    programs = token_programs * groups * parts_per_sample * num_runs * samples
    first, second = token_programs, groups * parts_per_sample
    tokens_first = outs[0][1][2] <= outs[0][1][1]  # so that concurrent programs access adjacent memory
    if not tokens_first:
        first, second = second, first
    magics, shifts = zip(*map(launching.find_magic, (first, second, groups, group0 + group1, num_runs)), strict=True)
    programs_numbers = pack_numbers(
        int(tokens_first), first, second, groups, parts_per_sample, span, work_plan.rows_per_program, group0, group1,
        num_blocks, num_runs, batch,
    )  # fmt: skip
    q_parts = group0 // work_plan.rows_per_program
    num_walks = token_programs * num_runs * samples
    rows_per_head = num_walks if needs.norm and variant.weight_by_head else 0
    sums = _count_sums(variant, programs, groups, (num_walks * groups * q_parts, rows_per_head))
    layouts = _drop_equal_layouts(outs, sources, dtype)
    options = {"num_warps": work_plan.num_warps, **launching.limit_registers(work_plan.max_registers)}
    numbers = programs_numbers, pack_numbers(*magics), pack_numbers(*shifts), *launching.pack_side(call, variant)
    launch = Launch(
        programs, layouts, sums, pack_pairs(strides, variant), variant, options, numbers,
        pack_table_strides(call, variant), launching.count_tokens(call.layout),
        pack_numbers(q_parts, num_runs * samples),
    )  # fmt: skip
    if rows.start is not None:  # see lrpe_md.engine.kernels.encode.move_output
        lengths = [0 if t is None else t.shape[2] for t in (*rows.outs, None)][:2]
        launch.start_numbers = pack_numbers(*lengths, int(len(rows.start) > 1))
    return launch


def _drop_equal_layouts(outs: list[Any], sources: Sequence[Tensor], dtype: torch.dtype) -> list[Any]:
    """Replace the layout of an output with None if it equals the input's, because ``empty_like`` is faster."""
    return [
        None if (x.dtype, x.shape, x.stride()) == (dtype, *layout) else layout
        for x, layout in zip(sources, outs, strict=True)
    ]


def _count_sums(variant: Variant, programs: int, groups: int, counts: tuple[int, int]) -> Sums:
    """Return the shapes of the partial sums. ``counts`` is (rows for q, rows per head), as in :class:`Sums`."""
    angles, weights = None, None
    if variant.need_dangles:
        angles = programs // groups, groups, variant.num_axes + variant.has_phase, variant.num_channels
    if variant.need_dweight:
        kinds = variant.has_weight + variant.has_bias
        weights = programs, kinds * variant.token_groups * variant.head_dim
    return Sums(angles, weights, counts)


def describe_variant(
    call: Call, rows: Rows, dtype: torch.dtype, aligned: bool, needs: Needs
) -> tuple[list[Any], dict[str, list[Any]], Variant]:
    """Return the size and stride of each output, all strides, and the variant before the work is divided."""
    spec, tables, weights, cos_sin = call.spec, call.tables, call.weights, call.cos_sin
    xs, dys = rows.xs, rows.dys
    sources = dys or xs
    head_dim = out_dim = spec.head_dim(sources[0].shape[3]) if dys else sources[0].shape[3]
    if not dys:
        out_dim = spec.out_dim(head_dim)
    outs = [
        ((*x.shape[:3], out_dim), strides_in_memory(x, out_dim)) if t is None else (t.shape, t.stride())
        for t, x in zip(rows.outs or (None,) * len(sources), sources, strict=True)
    ]
    strides = {"x": [t.stride() for t in xs], "dy": [t.stride() for t in dys], "o": [stride for _, stride in outs]}
    all_strides = [stride for group in strides.values() for stride in group]
    aligned = aligned and launching.in_eights(head_dim, all_strides)
    has_tables = cos_sin.cos is not None
    tiles = launching.cut_channels(spec, head_dim)
    fields = launching.describe_tables(tables, weights)
    fields["by_sample"] = fields["by_sample"] or (has_tables and cos_sin.by_sample)
    is_index = tables.coords is None and tables.origin is None and not fields["affine"]
    wide, fast = dtype == torch.float64, _is_fast(dtype, weights, needs)
    variant = Variant(
        *spec, head_dim=head_dim, **fields, **_describe_tables(call), **tiles._asdict(),
        backward=bool(rows.dys), need_dangles=needs.omega or needs.phase, load_x=bool(rows.xs),
        has_k=len(strides["o"]) == 2, has_start=rows.start is not None, need_dweight=needs.norm,
        wide=wide, fast=fast and not has_tables,
        # Integers can count angles if positions are indices. They would not improve the hardware's approximations.
        fixed=is_index and not (wide or fast or has_tables), functions=2 if fast else int(launching.has_ptx(dtype)),
        aligned=aligned, long=launching.are_long(all_strides, 8 if aligned else 1),
    )  # fmt: skip
    return outs, strides, variant


def _describe_tables(call: Call) -> dict[str, Any]:
    """Return the fields of a variant that tell kernels how to read the caller's cos and sin."""
    cos_sin, entries = call.cos_sin, 1
    if cos_sin.cos is None:
        return {}
    is_complex = cos_sin.sin is None
    strides = cos_sin.strides()
    are_adjacent = all(d == 1 + is_complex for _, _, _, d in strides)
    if are_adjacent and all(t.data_ptr() % 16 == 0 for t in cos_sin.tensors):
        # Use the largest number of entries that divides all strides and fits into one load.
        steps = [step for b, h, n, _ in strides for step in (b, h, n)]
        entries = math.gcd(8, *steps)
    kind = "pairs" if cos_sin.shape[-1] == call.spec.num_channels else "full"
    unit = entries if entries > 1 else 1
    return {"tables": kind, "joined": is_complex, "inverse": cos_sin.inverse, "table_unit": unit}


def pack_table_strides(call: Call, variant: Variant) -> tuple[int, ...]:
    """Return the packed strides (b, h, n, d) of cos and of sin for :func:`kernels.tables.point_to_tables`.

    With V.table_by_head, a row of the kernel is a group of heads, so that h and n are exchanged.
    """
    if call.cos_sin.cos is None:
        return ()
    strides = call.cos_sin.strides()
    if variant.table_by_head:
        strides = tuple((b, n, h, d) for b, h, n, d in strides)
    cos, sin = (*strides, (0, 0, 0, 0))[:2]
    return pack_numbers(*(step // variant.table_unit if i % 4 < 3 else step for i, step in enumerate((*cos, *sin))))


def _flatten_channels(variant: Variant, num_tokens: int) -> Variant:
    """Divide channels into small blocks if their number isn't a power of two, so that no threads are idle.

    This works only if all channels are mapped and nothing is summed over channels.
    """
    channels = variant.num_channels  # a multiple of 4 or 8 if all channels are mapped
    if len(variant.begins) > variant.num_mapped or channels == variant.block_c or num_tokens * channels >= 2**31:
        return variant
    block_c = min(8, channels & -channels)
    blocks = (block_c,) * variant.num_mapped
    return variant._replace(block_c=block_c, blocks=blocks, flat=channels // block_c)


def _find_tile_width(variant: Variant) -> int:
    """Return how many channels of a row, including padding, are in registers at the same time."""
    if not (variant.need_dangles or variant.need_dweight):
        return variant.num_mapped * variant.block_c
    return triton.next_power_of_2(sum(variant.blocks))  # includes the unmapped channels


def pack_pairs(strides: dict[str, list[tuple[int, ...]]], variant: Variant) -> Strides:
    """Return the packed strides of q and k, for each of x, dy and the output."""
    aligned, long, zeros = variant.aligned, variant.long, (0, 0, 0, 0)
    pairs = [[*group, zeros, zeros][:2] for group in strides.values()]
    return tuple(tuple(launching.pack_stride(stride, aligned, long) for stride in pair) for pair in pairs)


def _is_fast(dtype: torch.dtype, weights: Weights, needs: Needs) -> bool:
    """Return whether to use CUDA's sine and cosine. They are accurate enough for 16-bit outputs, but not for dω."""
    dtypes = [dtype] + [t.dtype for t in weights if t is not None and needs.norm]
    return all(d.itemsize == 2 for d in dtypes) and not (needs.omega or needs.phase) and launching.has_ptx(dtype)


def _launch_softmax(x: Tensor, stat: Tensor, g: Tensor | None = None, dx: Tensor | None = None) -> None:
    """Compute the maximum and sum of a softmax over the sequence. If g is passed, compute dx from dx̄ (= g) instead."""
    if not x.numel():
        return
    batch, heads, num_tokens, head_dim = x.shape
    block_d = 16
    block_n = max(16, min(triton.next_power_of_2(num_tokens), 2048)) if launching.INTERPRETING else 128
    tensors = [t for t in (x, g, dx) if t is not None]
    strides = [t.stride() for t in tensors]
    aligned = all(t.data_ptr() % 16 == 0 for t in tensors) and launching.in_eights(head_dim, strides)
    long = launching.are_long(strides, 8 if aligned else 1)
    x_strides, g_strides, dx_strides = (
        launching.pack_stride((0, 0, 0, 0) if t is None else t.stride(), aligned, long) for t in (x, g, dx)
    )
    variant = Variant(
        act="softmax", dim=-2, num_channels=head_dim, head_dim=head_dim, backward=g is not None,
        wide=x.dtype == torch.float64, functions=int(launching.has_ptx(x.dtype)), aligned=aligned,
        long=long, block_n=block_n, block_c=block_d,
    )  # fmt: skip
    args = (x, g, dx, stat, x_strides, g_strides, dx_strides, batch, heads, num_tokens)
    launch_kernel(softmax_sequence_kernel, batch * heads * triton.cdiv(head_dim, block_d), args, variant, {})
