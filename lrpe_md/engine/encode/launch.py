"""Launches: the numbers and the variant of a kernel from shapes and strides, allocation, and the launch itself."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from ...positions.grid import affine_on, grid_coordinates
from .. import kernels
from ..core.call import NO_WEIGHTS, Call, Known, Layout, Needs, Tables, Variant, Weights, remember, remembered
from ..core.memory import accumulator, like_in_memory, strides_in_memory
from ..core.recording import is_recording, start
from ..kernels.signature import pack
from .plan import Pass, Plan, Work, plan, share_rows

__all__ = [
    "INTERPRETING", "Launch", "Partials", "Rows", "Sums", "allocate_partials", "backward", "count_entries", "count_far",
    "count_grid", "count_tables", "current_device", "describe", "forward", "has_ptx", "in_eights", "launches_early",
    "lay_weight", "limit_registers", "make_readable", "materialise", "num_groups", "prepare", "recall_launches",
    "reduce_partial", "reduce_partials", "reduce_weights", "run", "strides_in_eights",
]  # fmt: skip

lrpe_kernel: Any = kernels.lrpe_kernel
reduce_partial_kernel: Any = kernels.reduce_partial_kernel
softmax_sequence_kernel: Any = kernels.softmax_sequence_kernel

INTERPRETING = not isinstance(lrpe_kernel, triton.JITFunction)

MAX_AXES = 4  # of a grid inside the kernel; more axes go in as coordinates
MAX_INDEX = 2**31 - 1  # of a token there; a shard of a larger grid goes in as coordinates


def forward(
    call: Call, xs: Sequence[Tensor], outs: Sequence[Tensor | None] = (), start: Tensor | None = None
) -> list[Tensor]:
    """The outputs; for softmax over the sequence (2, B, H, D), maximum and sum.

    outs, start: where outputs are to be: see :class:`lrpe_md.engine.encode.output.Target`.
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
    """dx for each gradient, in ``outs`` where they are given, then dω and dφ where needed."""
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

    xs: list[Tensor]  # none where the backward needs none
    dys: list[Tensor]  # none in the forward
    stats: list[Tensor]
    outs: Sequence[Any] = ()  # what is written, tensors; allocated where there are none, or None
    start: Tensor | None = None  # (1,) or (B,): the token of each of outs where they begin


class Sums(NamedTuple):
    """The partial sums of a launch."""

    angles: tuple[int, ...] | None = None  # the shape of those of dω and dφ: (rows, G, J, C)
    weights: tuple[int, int] | None = None  # of those of the weights: rows, and all of a program's sums
    counts: tuple[int, int] = (0, 0)  # of the rows, those that are q's, and the rows of a head; 0: they are all heads'
    all_heads: bool = False  # a row has the sums of all heads of q, or of k


class Launch:
    """Everything about a launch but the tensors."""

    __slots__ = ("compiled", "grid", "options", "outs", "packed", "placed", "scalars", "sums", "tables", "variant")

    def __init__(
        self, programs: int, outs: list, sums: Sums, scalars: tuple[int, ...], variant: Variant, options: dict
    ) -> None:
        self.grid = (programs, 1, 1)
        self.outs = outs  # (size, stride) of each output
        self.sums = sums
        self.scalars = scalars
        self.packed: tuple[int, ...] = pack(0, 0)  # numbers of the norm
        self.placed: tuple[int, ...] = ()  # of where outputs begin
        self.tables: tuple[int, ...] = ()  # and the strides of tables
        self.variant = variant
        self.options = options
        self.compiled: Any = None


def make_readable(call: Call) -> Call:
    """Tables as the kernels read them: dense, and coordinates for a grid of more axes than they count along."""
    omega, phase, coords, origin, affine, rotated, amplitude = call.tables
    layout, weights, cos_sin = call.layout, call.weights, call.cos_sin
    cos, sin, _ = cos_sin
    if (cos is not None and cos.is_neg()) or (sin is not None and sin.is_neg()):
        cos, sin = (None if t is None else materialise(t) for t in (cos, sin))
        call = call._replace(cos_sin=cos_sin._replace(cos=cos, sin=sin))
    if call.spec.norm != "none":
        weights = Weights(*(None if t is None else lay_weight(t) for t in weights))
    if omega is None:
        return call if weights is call.weights else call._replace(weights=weights)
    if max(layout.num_grid_tokens, layout.start + layout.num_tokens) > MAX_INDEX:
        if call.weights.token_groups > 1:
            raise ValueError("norm.weight: expected one for all tokens of a grid of 2^31 tokens or more")
        coords, rotated = layout.positions(call.tables, omega.device)
        rotated = rotated.expand(coords.shape[:-1])
        affine, origin, layout = None, None, Layout(layout.num_tokens, 0, layout.num_tokens, 0, ())
    elif len(layout.sizes) > MAX_AXES:
        coords, _ = grid_coordinates(
            layout.num_grid_tokens, layout.sizes, 0, 0, affine, origin, device=omega.device, dtype=torch.float64
        )
        affine, origin, layout = None, None, layout._replace(sizes=())
    elif phase is coords is origin is rotated is amplitude is None and omega.is_contiguous() and not omega.is_neg():
        return call if weights is call.weights else call._replace(weights=weights)
    if rotated is not None:
        rotated = rotated.contiguous().view(torch.uint8)
    phase, coords, origin, amplitude = (
        None if t is None else materialise(t).contiguous() for t in (phase, coords, origin, amplitude)
    )
    tables = Tables(materialise(omega).contiguous(), phase, coords, origin, affine, rotated, amplitude)
    return call._replace(layout=layout, tables=tables, weights=weights)


def lay_weight(t: Tensor) -> Tensor:
    """Return γ or β as the kernels read it: dense, (H or 1, P, D)."""
    t = materialise(t.detach())
    if t.ndim == 3:
        return t.transpose(0, 1).contiguous()
    return t.contiguous().view(-1, 1, t.shape[-1])


def _reaches_far(layout: Layout, tables: Tables) -> bool:
    """Angles for the hardware's functions count up to 2^22 turns an axis: of 400 radians a position at these sizes."""
    return bool(layout.sizes) and max(layout.sizes) > 2**16 and tables.affine is None and tables.origin is None


def materialise(t: Tensor) -> Tensor:
    """A kernel reads memory, which a lazily negated view has not changed."""
    return t.resolve_neg() if t.is_neg() else t


class Partials(NamedTuple):
    """Partial sums that the programs of a launch leave."""

    angles: Tensor | None  # of dω and dφ: (rows, G, J, C)
    weights: Tensor | None  # of the gradients of weights
    sums: Sums


_NOTHING = Needs()


def count_far(call: Call, dtype: torch.dtype, needs: Needs) -> Call:
    """Positions of a large grid as an affine map of indices, where the hardware's functions would count their turns."""
    layout, tables = call.layout, call.tables
    if _reaches_far(layout, tables) and _is_fast(dtype, call.weights, needs):
        num_axes = len(layout.sizes)
        affine = affine_on((1.0,) * num_axes, (0.0,) * num_axes, tables.omega.device)
        return call._replace(tables=tables._replace(affine=affine))
    return call


def run(
    call: Call, rows: Rows, needs: Needs = _NOTHING, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Partials]:
    """Launch the kernel on q (and k); returns its outputs, of this dtype or that of the inputs, and the partial
    sums."""
    spec = call.spec
    xs, dys, _, given, start = rows
    source = (dys or xs)[0]
    dtype, device = dtype or source.dtype, source.device
    if dys and spec.dim == -2:  # all of dx̄ is needed before any of dx: it waits in the accumulator's dtype
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

    tables: those of the call, then given cos and sin with their strides. more: what the kernel takes for a norm, and
    for where outputs begin.
    """
    x0, x1 = (*rows.xs, None, None)[:2]
    dy0, dy1 = (*rows.dys, None, None)[:2]
    stat0, stat1 = (*rows.stats, None, None)[:2]
    o0, o1 = (*outs, None)[:2]
    return x0, dy0, o0, stat0, x1, dy1, o1, stat1, *tables, partial, more


def allocate_partials(sums: Sums, device: torch.device) -> Partials:
    angles = None if sums.angles is None else torch.empty(sums.angles, dtype=torch.float64, device=device)
    weights = None if sums.weights is None else torch.empty(sums.weights, dtype=torch.float64, device=device)
    return Partials(angles, weights, sums)


def recall_launches(call: Call, rows: Rows) -> dict:
    """Return the launches prepared for calls with the same sizes, dtypes and devices."""
    tensors = (*rows.xs, *rows.dys, *call.tables, *call.weights, *call.cos_sin[:2])
    metas = tuple(None if t is None else (t.shape, t.dtype, t.device) for t in tensors)
    key = "launches", call.spec, call.layout, call.cos_sin.inverse, len(rows.xs), len(rows.dys), metas
    known = remembered.get(key) or remember(key, Known(call.spec, call.layout, {}))
    return known.launches


def _start(launch: Launch, tensors: tuple[Any, ...]) -> None:
    """``lrpe_kernel[grid](...)``, past Triton's search for the compiled kernel, which takes longer than the launch."""
    compiled = launch.compiled
    if compiled is not None and not lrpe_kernel.pre_run_hooks:
        compiled[launch.grid](*tensors, *launch.scalars, launch.variant)
        return
    compiled = start(lrpe_kernel, launch.grid[0], (*tensors, *launch.scalars), launch.variant, launch.options)
    if isinstance(compiled, CompiledKernel):
        launch.compiled = compiled


def prepare(call: Call, rows: Rows, dtype: torch.dtype, aligned: bool, needs: Needs, early: bool = False) -> Launch:
    """Prepare a launch from shapes and strides alone.

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
        step=variant.flat if variant.flat and walks else 1,  # each thread stays with its channels
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
    tokens_first = outs[0][1][2] <= outs[0][1][1]  # neighbours in memory run together
    if not tokens_first:
        first, second = second, first
    numbers = {
        **_count_strides(strides, 8 if aligned else 1), **count_tables(call, variant), **count_grid(layout),
        "B": batch, "N": num_tokens, "num_blocks": num_blocks, "tokens_first": int(tokens_first),
        "first": first, "second": second, "G": groups, "M": in_sample, "P": outer, "span": span, "per": chosen.per,
        "group0": group0, "group1": group1,
        **_magic("_first", first), **_magic("_second", second), **_magic("_g", groups), **_magic("_p", outer),
        **_magic("_h", group0 + group1),
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


def num_groups(call: Call) -> int:
    """Groups of heads that share frequencies, or rows of tables."""
    tables = call.tables
    heads = [t.shape[0] for t in (tables.omega, tables.phase, tables.amplitude) if t is not None]
    return max(*heads, 1 if call.cos_sin.cos is None else call.cos_sin.num_heads, 0)


def describe(call: Call, rows: Rows, dtype: torch.dtype, row: tuple[int, bool], needs: Needs, strides: dict) -> Variant:
    """The variant, but for how the work is cut. row: head_dim, and whether all rows are aligned."""
    spec, tables, weights, cos_sin = call.spec, call.tables, call.weights, call.cos_sin
    head_dim, aligned = row
    positions = tables.coords if tables.coords is not None else tables.origin
    rotating, given = spec.map == "rotate", cos_sin.cos is not None
    block_c = triton.next_power_of_2(spec.num_channels)
    begins, widths, blocks = [0], [spec.num_channels], [block_c]
    if rotating:
        head, tail = spec.rotary_start, spec.rotary_start + 2 * spec.num_channels
        begins, widths, blocks = [head, head + spec.num_channels], widths * 2, blocks * 2
        for begin, end in ((0, head), (tail, head_dim)):
            if end > begin:
                begins.append(begin)
                widths.append(end - begin)
                blocks.append(triton.next_power_of_2(end - begin))
    elif spec.map == "none":
        block_c = triton.next_power_of_2(head_dim)
        widths, blocks = [head_dim], [block_c]
    explicit, affine, wide = tables.coords is not None, tables.affine is not None, dtype == torch.float64
    fast, ptx, unit = _is_fast(dtype, weights, needs), has_ptx(dtype), 8 if aligned else 1
    scales = [t for t in weights if t is not None]
    return Variant(
        *spec, head_dim=head_dim, num_axes=0 if tables.omega is None else tables.omega.shape[2],
        backward=bool(rows.dys), need_dangles=needs.omega or needs.phase, load_x=bool(rows.xs),
        has_k=len(strides["o"]) == 2,
        has_start=rows.start is not None,
        explicit=explicit, affine=affine,
        by_sample=(positions is not None and positions.ndim == 3) or (given and cos_sin.by_sample),
        has_origin=tables.origin is not None, has_phase=tables.phase is not None,
        has_weight=weights.weight is not None, has_bias=weights.bias is not None,
        weight_by_head=any(t.shape[0] > 1 for t in scales), token_groups=scales[0].shape[1] if scales else 1,
        need_dweight=needs.norm, **_describe_tables(call),
        wide=wide, fast=fast and not given,
        # Where a position is an index, unless the hardware's approximations leave nothing to gain from exact angles.
        fixed=positions is None and not (affine or wide or fast or given), functions=2 if fast else int(ptx),
        aligned=aligned, long=any(s // unit >= 2**31 for group in strides.values() for each in group for s in each),
        num_turned={"rotate": 2, "cosine": 1, "none": 0}[spec.map], begins=tuple(begins), widths=tuple(widths),
        blocks=tuple(blocks),
        block_c=block_c,
    )  # fmt: skip


def _describe_tables(call: Call) -> dict[str, Any]:
    """The fields of a variant that say how given cos and sin are read."""
    cos_sin, entries = call.cos_sin, 1
    if cos_sin.cos is None:
        return {}
    joined = cos_sin.sin is None
    strides = cos_sin.strides()
    side_by_side = all(d == 1 + joined for _, _, _, d in strides)
    if side_by_side and all(t.data_ptr() % 16 == 0 for t in cos_sin.given):
        # As many entries as a load takes, at most, divide all steps to where one may begin.
        steps = [step for b, h, n, _ in strides for step in (b, h, n)]
        entries = math.gcd(8, *steps)
    kind = "pairs" if cos_sin.shape[-1] == call.spec.num_channels else "full"
    unit = entries if entries > 1 else 1
    return {"tables": kind, "joined": joined, "inverse": cos_sin.inverse, "table_unit": unit}


def count_entries(call: Call, variant: Variant) -> tuple[int, ...]:
    """The packed strides (b, h, n, d) of cos and of sin, as :func:`kernels.tables.point_to_tables` takes them."""
    if call.cos_sin.cos is None:
        return ()
    cos, sin = (*call.cos_sin.strides(), (0, 0, 0, 0))[:2]
    return pack(*(step // variant.table_unit if i % 4 < 3 else step for i, step in enumerate((*cos, *sin))))


def _flatten_channels(variant: Variant, num_tokens: int) -> Variant:
    """Tiles of blocks of channels where these are no power of two and nothing is summed over them, so that no thread
    idles on channels that are not there."""
    channels = variant.num_channels  # a multiple of 4, or of 8, where they are all
    if len(variant.begins) > variant.num_turned or channels == variant.block_c or num_tokens * channels >= 2**31:
        return variant
    block_c = min(8, channels & -channels)
    blocks = (block_c,) * variant.num_turned
    return variant._replace(block_c=block_c, blocks=blocks, flat=channels // block_c)


def _tile_width(variant: Variant) -> int:
    """Channels of a row that a tile holds."""
    if not (variant.need_dangles or variant.need_dweight):
        return variant.num_turned * variant.block_c
    return triton.next_power_of_2(sum(variant.blocks))  # what is not turned waits with the rest


def _count_strides(strides: dict[str, list], unit: int) -> dict[str, int]:
    numbers = {}
    for name, group in strides.items():
        for k in range(2):
            b, h, n, d = group[k] if k < len(group) else (0, 0, 0, 0)
            at = f"{name}{k}"
            numbers |= {f"{at}_b": b // unit, f"{at}_h": h // unit, f"{at}_n": n // unit, f"{at}_d": d}
    return numbers


def count_tables(call: Call, variant: Variant) -> dict[str, int]:
    """Steps from one sample's, or one head's, part of a table to the next."""
    omega, phase, coords, origin, _, rotated, amplitude = call.tables
    positions = coords if coords is not None else origin
    channels = variant.num_channels

    def step(t: Tensor | None, size: int) -> int:
        return size if t is not None and t.shape[0] > 1 else 0

    return {
        "positions_b": positions.stride(0) if positions is not None and positions.ndim == 3 else 0,
        "rotated_b": rotated.stride(0) if rotated is not None and rotated.ndim == 2 else 0,
        "omega_h": step(omega, channels * variant.num_axes),
        "phase_h": step(phase, channels), "amplitude_h": step(amplitude, channels),
    }  # fmt: skip


def count_grid(layout: Layout) -> dict[str, int]:
    n1, n2, n3 = (*layout.sizes[::-1], 1, 1, 1)[:3]  # fastest first
    sizes = {"n1": n1, "n2": n2, "n3": n3, **_magic("1", n1), **_magic("2", n2), **_magic("3", n3)}
    return {"first_index": layout.start - layout.prefix, "num_grid": layout.num_grid_tokens, **sizes}


def _magic(name: str, divisor: int) -> dict[str, int]:
    magic, shift = _divide_by(divisor)
    return {f"magic{name}": magic, f"shift{name}": shift}


@lru_cache(maxsize=4096)
def _divide_by(n: int) -> tuple[int, int]:
    """32-bit (m, s) with o // n = (2o · m >> 32) >> s for 0 <= o < 2^31 (Granlund and Montgomery, PLDI 1994)."""
    bits = max(n - 1, 0).bit_length()
    return ((1 << (31 + bits)) // max(n, 1)) + 1, bits


def _compiler_options(chosen: Plan) -> dict[str, Any]:
    return {"num_warps": chosen.num_warps, **limit_registers(chosen.max_registers)}


def limit_registers(most: int | None) -> dict[str, int]:
    """An option of Triton's CUDA compiler alone."""
    return {} if most is None or INTERPRETING or torch.version.hip is not None else {"maxnreg": most}


def _is_aligned(head_dim: int, tensors: list[Tensor]) -> bool:
    """Every row starts at 16 bytes, and strides can be counted in units of 8 elements."""
    return all(t.data_ptr() % 16 == 0 for t in tensors) and in_eights(head_dim, [t.stride() for t in tensors])


def in_eights(head_dim: int, strides: list[tuple[int, ...]]) -> bool:
    return head_dim % 8 == 0 and all(map(strides_in_eights, strides))


def strides_in_eights(stride: tuple[int, ...]) -> bool:
    """Tell whether (B, H, N, D) has its channels side by side and all other strides divisible by 8."""
    b, h, n, d = stride
    return d == 1 and (b | h | n) % 8 == 0


def _is_fast(dtype: torch.dtype, weights: Weights, needs: Needs) -> bool:
    """CUDA's approximations of sin and cos are below the rounding of 16-bit outputs, but not of dω."""
    narrow = [dtype] + [t.dtype for t in weights if t is not None and needs.norm]
    return all(d.itemsize == 2 for d in narrow) and not (needs.omega or needs.phase) and has_ptx(dtype)


@cache
def _can_launch_early() -> bool:
    """A kernel can be launched while the one before it runs, and wait for it.

    CUDA's programmatic dependent launch: from compute capability 9 on; graphs capture it since CUDA 12.3.
    """
    if INTERPRETING or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    driver = ctypes.c_int()
    try:
        ctypes.CDLL("nvcuda" if sys.platform == "win32" else "libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    except OSError:
        return False
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return driver.value >= 12030 and min(capabilities) >= (9, 0)


def launches_early(needs: Needs) -> bool:
    """Tell whether the reduction of partial sums starts while they are formed."""
    return any(needs) and not is_recording() and _can_launch_early()


def has_ptx(dtype: torch.dtype) -> bool:
    """CUDA's approximations of 2^x and 1/x can be used."""
    return dtype != torch.float64 and torch.version.hip is None and not INTERPRETING


def _launch_softmax(x: Tensor, stat: Tensor, g: Tensor | None = None, dx: Tensor | None = None) -> None:
    """Softmax over the sequence: its maximum and sum, or with g its backward."""
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
    """Strides of (B, H, N, D), but that of a channel in units."""
    b, h, n, d = (0, 0, 0, 0) if t is None else t.stride()
    return pack(b // unit, h // unit, n // unit, d)


def reduce_partial(partial: Tensor, call: Call, needs: Needs) -> list[Tensor]:
    """dω and dφ, those that are needed, from partial sums (rows, G, J, C)."""
    return reduce_partials(Partials(partial, None, Sums()), call, NO_WEIGHTS, needs)


def reduce_partials(partials: Partials, call: Call, weights: Weights, needs: Needs) -> list[Tensor]:
    """dω and dφ, those that are needed, and the gradients of the weights, in the shapes that these have."""
    outs: list[Tensor] = []
    jobs: list[Job] = []
    if partials.angles is not None:
        outs, jobs = _angle_jobs(partials.angles, call, needs)
    if needs.norm and partials.weights is not None:
        found, more = _weight_jobs(partials, weights)
        outs, jobs = outs + found, jobs + more
    rows = 0 if partials.angles is None else len(partials.angles)
    rows = max(rows, 0 if partials.weights is None else len(partials.weights))
    _reduce(jobs, rows > 0 and launches_early(needs), partials.sums.all_heads)  # behind a first pass
    return [out.contiguous() for out in outs]


def reduce_weights(of_q: Partials, of_k: Partials, weights: Weights) -> list[Tensor]:
    """The gradients of the weights where sums of q and of k are apart, as those of one tensor are."""
    outs: list[Tensor] = []
    jobs: list[Job] = []
    for partials, own in ((of_q, weights[:2]), (of_k, weights[2:])):
        found, more = _weight_jobs(partials, Weights(*own))
        outs, jobs = outs + found, jobs + more
    if jobs:
        _reduce(jobs, False, False)
    return [out.contiguous() for out in outs]


def _reduce(jobs: list[Job], early: bool, all_heads: bool) -> None:
    channels = min(job.width for job in jobs)
    # Few channels a program: shared frequencies have few sums, each over all programs of the first pass. The weights of
    # all heads have many, over the fewer programs that there are at once.
    block_c = max(4, triton.next_power_of_2(channels) // 2) if INTERPRETING else 32 if all_heads else 4
    variant = Variant(early=early, block_r=max(1, 4096 // block_c), block_c=block_c)
    programs, packed = 0, []
    for job in jobs:
        packed.append((job.source, job.out, pack(programs, *job[3:])))
        programs += job.heads * job.slots * triton.cdiv(job.width, block_c)
    options = {"launch_pdl": True} if early else {}
    start(reduce_partial_kernel, programs, (tuple(packed),), variant, options)


class Job(NamedTuple):
    """Work of a reduction for one gradient. Fields after ``heads`` are numbers for :func:`reduce_partial_kernel`."""

    source: Tensor
    out: Tensor
    heads: int
    slots: int
    width: int
    first: int
    step: int
    head_step: int
    rows: int
    out_column: int
    out_slot: int


def _angle_jobs(partial: Tensor, call: Call, needs: Needs) -> tuple[list[Tensor], list[Job]]:
    """The gradients of ω and φ, and what a reduction does for them."""
    omega, phase = call.tables.omega, call.tables.phase
    rows, groups, slots, channels = partial.shape
    num_axes = omega.shape[2]
    outs, jobs = [], []
    wanted = [(omega, num_axes, 0, (num_axes, 1))] if needs.omega else []
    wanted += [(phase, 1, num_axes * channels, (1, 0))] if needs.phase and phase is not None else []
    size = slots * channels
    for t, own_slots, first, out_steps in wanted:
        out = torch.empty_like(t, memory_format=torch.contiguous_format)
        steps = (size, 0, rows * groups) if t.shape[0] < groups else (groups * size, size, rows)  # shared, or by head
        outs.append(out)
        jobs.append(Job(partial, out, t.shape[0], own_slots, channels, first, *steps, *out_steps))
    return outs, jobs


def _weight_jobs(partials: Partials, weights: Weights) -> tuple[list[Tensor], list[Job]]:
    """Likewise of the weights, (H or 1, P, D) each."""
    partial, (of_q, rows_of_head) = partials.weights, partials.sums.counts
    assert partial is not None
    rows, row_width = partial.shape
    outs, jobs = [], []
    for i, t in enumerate(weights):
        if t is None:
            continue
        of_k, is_bias = i >= 2, i % 2
        groups, head_dim = t.shape[0] if t.ndim == 3 else 1, t.shape[-1]
        heads, width = t.numel() // (groups * head_dim), groups * head_dim
        if partials.sums.all_heads:
            heads, width = 1, t.numel()
        out = torch.empty((t.numel() // (groups * head_dim), groups, head_dim), dtype=t.dtype, device=t.device)
        begin, end = (of_q, rows) if of_k else (0, of_q)
        num_rows = rows_of_head or end - begin
        first = begin * row_width + (width if is_bias and weights[i - 1] is not None else 0)
        steps = row_width, num_rows * row_width, num_rows
        outs.append(out.transpose(0, 1) if t.ndim == 3 and len(out) > 1 else out.view(t.shape))
        jobs.append(Job(partial, out, heads, 1, width, first, *steps, 1, 0))
    return outs, jobs


def current_device(x: Tensor):
    """Triton launches on the current device: make it x's."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device_of(x) if elsewhere else nullcontext()
