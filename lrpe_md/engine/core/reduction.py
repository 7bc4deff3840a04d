"""Second pass: reduce the partial sums of all programs to the gradients of ω, φ and norm weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import kernels
from ..kernels.signature import pack_numbers
from .call import NO_WEIGHTS, Call, Needs, Variant, Weights
from .launching import INTERPRETING, launches_early
from .recording import launch_kernel

reduce_partial_kernel: Any = kernels.reduce_partial_kernel


class Sums(NamedTuple):
    """Shapes of the partial sums of a launch."""

    angles: tuple[int, ...] | None = None  # for dω and dφ: (rows, G, J, C)
    weights: tuple[int, int] | None = None  # for the weights: (number of rows, sums per row)
    counts: tuple[int, int] = (0, 0)  # (rows for q, rows per head); the latter is 0 if rows aren't divided by head
    all_heads: bool = False  # each row contains the sums of all heads


class Partials(NamedTuple):
    """Partial sums from the programs of a launch."""

    angles: Tensor | None  # for dω and dφ: (rows, G, J, C)
    weights: Tensor | None  # for the gradients of the weights
    sums: Sums


def allocate_partials(sums: Sums, device: torch.device) -> Partials:
    angles = None if sums.angles is None else torch.empty(sums.angles, dtype=torch.float64, device=device)
    weights = None if sums.weights is None else torch.empty(sums.weights, dtype=torch.float64, device=device)
    return Partials(angles, weights, sums)


def reduce_partial(partial: Tensor, call: Call, needs: Needs) -> list[Tensor]:
    """Compute dω and dφ, if they are needed, from partial sums (rows, G, J, C)."""
    return reduce_partials(Partials(partial, None, Sums()), call, NO_WEIGHTS, needs)


def reduce_partials(partials: Partials, call: Call, weights: Weights, needs: Needs) -> list[Tensor]:
    """Compute the needed gradients of ω, φ and the weights.

    The gradients have the shapes of ω, φ and the weights.
    """
    outs: list[Tensor] = []
    jobs: list[Job] = []
    if partials.angles is not None:
        outs, jobs = _angle_jobs(partials.angles, call, needs)
    if needs.norm and partials.weights is not None:
        gradients, more_jobs = _weight_jobs(partials, weights)
        outs, jobs = outs + gradients, jobs + more_jobs
    rows = 0 if partials.angles is None else len(partials.angles)
    rows = max(rows, 0 if partials.weights is None else len(partials.weights))
    _launch_reduction(
        jobs, rows > 0 and any(needs) and launches_early(), partials.sums.all_heads
    )  # launching early requires a first pass
    return [out.contiguous() for out in outs]


def reduce_weights(q_partials: Partials, k_partials: Partials, weights: Weights) -> list[Tensor]:
    """Compute the gradients of the weights from separate partial sums for q and for k."""
    outs: list[Tensor] = []
    jobs: list[Job] = []
    for partials, tensors in ((q_partials, weights[:2]), (k_partials, weights[2:])):
        gradients, more_jobs = _weight_jobs(partials, Weights(*tensors))
        outs, jobs = outs + gradients, jobs + more_jobs
    if jobs:
        _launch_reduction(jobs, False, False)
    return [out.contiguous() for out in outs]


def _launch_reduction(jobs: list[Job], early: bool, all_heads: bool) -> None:
    channels = min(job.width for job in jobs)
    # If heads share frequencies, there are few sums, each over all programs of the first pass. So a program reduces few
    # channels. For a norm over all heads, there are many sums, each over fewer programs.
    block_c = max(4, triton.next_power_of_2(channels) // 2) if INTERPRETING else 32 if all_heads else 4
    variant = Variant(early=early, block_r=max(1, 4096 // block_c), block_c=block_c)
    programs, packed = 0, []
    for job in jobs:
        packed.append((job.source, job.out, pack_numbers(programs, *job[3:])))
        programs += job.heads * job.slots * triton.cdiv(job.width, block_c)
    options = {"launch_pdl": True} if early else {}
    launch_kernel(reduce_partial_kernel, programs, (tuple(packed),), variant, options)


class Job(NamedTuple):
    """Reduction of one gradient. The fields after ``heads`` are passed to :func:`reduce_partial_kernel` as numbers."""

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
    """Allocate the needed gradients of ω and φ. Return them with their reduction jobs."""
    omega, phase = call.tables.omega, call.tables.phase
    rows, groups, slots, channels = partial.shape
    num_axes = omega.shape[2]
    outs, jobs = [], []
    targets = [(omega, num_axes, 0, (num_axes, 1))] if needs.omega else []
    targets += [(phase, 1, num_axes * channels, (1, 0))] if needs.phase and phase is not None else []
    size = slots * channels
    for t, num_slots, first, out_steps in targets:
        out = torch.empty_like(t, memory_format=torch.contiguous_format)
        steps = (size, 0, rows * groups) if t.shape[0] < groups else (groups * size, size, rows)  # shared or per head
        outs.append(out)
        jobs.append(Job(partial, out, t.shape[0], num_slots, channels, first, *steps, *out_steps))
    return outs, jobs


def _weight_jobs(partials: Partials, weights: Weights) -> tuple[list[Tensor], list[Job]]:
    """Allocate the gradients (H or 1, P, D) of the weights. Return them with their reduction jobs."""
    partial, (num_q_rows, rows_per_head) = partials.weights, partials.sums.counts
    assert partial is not None
    rows, row_width = partial.shape
    outs, jobs = [], []
    for i, t in enumerate(weights):
        if t is None:
            continue
        is_k, is_bias = i >= 2, i % 2
        groups, head_dim = t.shape[0] if t.ndim == 3 else 1, t.shape[-1]
        heads, width = t.numel() // (groups * head_dim), groups * head_dim
        if partials.sums.all_heads:
            heads, width = 1, t.numel()
        out = torch.empty((t.numel() // (groups * head_dim), groups, head_dim), dtype=t.dtype, device=t.device)
        begin, end = (num_q_rows, rows) if is_k else (0, num_q_rows)
        num_rows = rows_per_head or end - begin
        first = begin * row_width + (width if is_bias and weights[i - 1] is not None else 0)
        steps = row_width, num_rows * row_width, num_rows
        outs.append(out.transpose(0, 1) if t.ndim == 3 and len(out) > 1 else out.view(t.shape))
        jobs.append(Job(partial, out, heads, 1, width, first, *steps, 1, 0))
    return outs, jobs
