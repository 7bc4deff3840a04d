"""Launch the kernel that applies a map after a norm over all heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..core import launching
from ..core.call import NO_COS_SIN, NO_NEEDS, NO_WEIGHTS, Call, Needs
from ..core.memory import accumulator
from ..core.recording import launch_kernel
from ..core.reduction import Partials, Sums, allocate_partials, reduce_partials
from ..kernels.signature import pack_numbers
from .launch import (
    Launch,
    Rows,
    describe_variant,
    find_launch,
    launch_rows,
    pack_pairs,
    pack_table_strides,
    point_to_pairs,
    use_affine_if_large,
)
from .plan import Pass, plan_heads

heads_kernel: Any = kernels.heads_kernel


def forward(call: Call, xs: list[Tensor]) -> list[Tensor]:
    """Return the encoded tensors."""
    xs = launching.materialise(*xs)
    readable_call = launching.make_readable(call)
    with launching.current_device(xs[0]):
        if _is_fused(readable_call):
            return _run_heads(readable_call, Rows(xs, [], []))[0]
        return launch_rows(_drop_norm(readable_call), Rows(_normalise(readable_call, xs), [], []), dtype=xs[0].dtype)[0]


def backward(
    call: Call, grads: list[Tensor], xs: list[Tensor], stats: list[Tensor], needs: Needs, outs: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return dx and any needed gradients of ω, φ and weights. If ``outs`` is passed, write dx to it."""
    grads, xs = launching.materialise(*grads), launching.materialise(*xs)
    readable_call = launching.make_readable(call)
    with launching.current_device(grads[0]):
        if _is_fused(readable_call):
            dxs, partials = _run_heads(readable_call, Rows(xs, grads, [], outs), needs)
        else:  # if frequencies differ between heads, norm(x) is written to memory
            wide_dtype = accumulator(grads[0].dtype)
            rows = Rows(_normalise(readable_call, xs), grads, [])
            dx_bars, map_partials = launch_rows(_drop_norm(readable_call), rows, needs._replace(norm=False), wide_dtype)
            dxs, norm_partials = _run_heads(
                _drop_map(readable_call), Rows(xs, dx_bars, [], outs), Needs(norm=needs.norm), grads[0].dtype
            )
            partials = norm_partials._replace(angles=map_partials.angles)
        if any(needs):
            dxs += reduce_partials(partials, readable_call, call.weights, needs)
    return dxs


def _is_fused(call: Call) -> bool:
    """Return whether one kernel can run both the norm and the map: heads share frequencies, or have tables."""
    return call.cos_sin.cos is not None or launching.num_groups(call) == 1


def _normalise(call: Call, xs: list[Tensor]) -> list[Tensor]:
    """Compute norm(x) of each tensor in the accumulator's dtype."""
    return _run_heads(_drop_map(call), Rows(xs, [], []), dtype=accumulator(xs[0].dtype))[0]


def _drop_map(call: Call) -> Call:
    return call._replace(spec=call.spec.without_map(), launches=None, cos_sin=NO_COS_SIN)


def _drop_norm(call: Call) -> Call:
    return call._replace(spec=call.spec.without_norm(), weights=NO_WEIGHTS, launches=None)


def _run_heads(
    call: Call, rows: Rows, needs: Needs = NO_NEEDS, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Partials]:
    """Implement :func:`lrpe_md.engine.encode.launch.launch_rows` for a norm over all heads."""
    xs, dys = rows.xs, rows.dys
    source = (dys or xs)[0]
    dtype, device = dtype or source.dtype, source.device
    call = use_affine_if_large(call, dtype, needs)
    cos_sin = call.cos_sin
    launch = find_launch(call, rows, dtype, needs, _prepare_launch)
    outs = list(rows.outs)
    if not outs:
        outs = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride in launch.outs]
    partials = allocate_partials(launch.sums, device)
    if launch.programs:
        x, dy, o = point_to_pairs(launch.strides, xs, dys, outs)
        sums = (partials.angles, partials.weights)
        table_arguments = None if cos_sin.cos is None else (cos_sin.cos, cos_sin.sin, launch.tables)
        args = (x, dy, o, (*call.tables, table_arguments), tuple(call.weights), sums, launch.numbers)
        launch_kernel(heads_kernel, launch.programs, args, launch.variant, launch.options)
    return outs, partials


def _prepare_launch(call: Call, rows: Rows, dtype: torch.dtype, aligned: bool, needs: Needs) -> Launch:
    """Implement :func:`lrpe_md.engine.encode.launch.prepare_launch` for a norm over all heads."""
    layout, dys = call.layout, rows.dys
    sources = dys or rows.xs
    batch, heads_q, num_tokens, _ = sources[0].shape
    heads_k = sources[1].shape[1] if len(sources) == 2 else 0
    outs, strides, variant = describe_variant(call, rows, dtype, aligned, needs)
    items = batch * num_tokens
    tensors = 1 + (heads_k > 0)
    stage = Pass.DOMEGA if any(needs) else Pass.BACKWARD if dys else Pass.FORWARD
    work_plan = plan_heads(max(heads_q, heads_k), sum(variant.blocks), items * tensors, stage, launching.INTERPRETING)
    programs = max(tensors, work_plan.programs) if items and work_plan.programs else 0
    num_q = (
        programs if tensors == 1 else items if programs == 2 * items else _count_q_programs(programs, heads_q, heads_k)
    )
    variant = variant._replace(
        table_by_head=call.cos_sin.num_heads > 1,
        block_r=work_plan.tiles, block_n=work_plan.heads, weight_by_head=variant.has_weight or variant.has_bias,
        early=any(needs) and launching.launches_early(),
    )  # fmt: skip
    swapped_strides = {name: [(b, n, h, d) for b, h, n, d in group] for name, group in strides.items()}
    num_weights = variant.has_weight + variant.has_bias
    width = num_weights * variant.token_groups * max(heads_q, heads_k) * variant.head_dim
    *_, positions_b, rotated_b = launching.find_table_strides(call, variant)
    groups = launching.num_groups(call)
    counts = (*launching.count_tokens(layout), positions_b, rotated_b, heads_q, heads_k, groups, num_q, items, width)
    sums = Sums(
        (programs, 1, variant.num_axes + variant.has_phase, variant.num_channels) if variant.need_dangles else None,
        (programs, width) if needs.norm else None, (num_q, 0), True,
    )  # fmt: skip
    numbers, options = (pack_numbers(*counts), launching.pack_grid(layout)), {"num_warps": work_plan.num_warps}
    strides, tables = pack_pairs(swapped_strides, variant), pack_table_strides(call, variant)
    return Launch(programs, outs, sums, strides, variant, options, numbers, tables)


def _count_q_programs(programs: int, heads_q: int, heads_k: int) -> int:
    """Return how many programs should process q, so that all programs have about the same amount of work.

    Half of the work on a tensor is proportional to its number of heads. The other half is proportional to the number of
    heads of q or of k, whichever is larger.
    """
    max_heads = max(heads_q, heads_k)
    return min(programs - 1, max(1, round(programs * (heads_q + max_heads) / (heads_q + heads_k + 2 * max_heads))))
