"""Find out what limits linear attention's kernels by reading GPU counters with Nsight Compute, and write a CSV.

    lrpe-md bench linear-counters        needs ncu, and permission to read GPU counters

Each pass of ``bench linear`` runs once with cold caches. The CSV contains each kernel's duration, the utilisation of
its busiest parts, and why its warps waited: the average number of warps in each state per issued instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..common.options import OUT
from .counters import COMMIT, NCU, profile, run, write
from .linear import MAPS, attend_fused
from .linear_measure import WORKLOADS, make_inputs, make_pass
from .operators import choose_in_order

STALLS = {
    "memory": ("long_scoreboard", "lg_throttle"),
    "shared": ("short_scoreboard", "mio_throttle"),
    "barrier": ("barrier",),
    "products": ("gmma", "math_pipe_throttle"),
    "latency": ("wait",),
    "instructions": ("no_instruction", "branch_resolving"),
    "ready": ("not_selected", "selected"),
}
METRICS = {
    "ns": "gpu__time_duration.sum",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "programs": "launch__grid_size",
    "spills": "smsp__inst_executed_op_local_ld.sum",
    "executed": "smsp__inst_executed.sum",
} | {
    name: f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
    for names in STALLS.values()
    for name in names
}
KEY: tuple[str, ...] = ("workload", "map", "pass")
COLUMNS = (*KEY, "kernel", *METRICS, "gpu", "versions", "commit")
MARK = "elementwise_kernel_with_index"  # torch.arange launches it before each pass
KERNELS = f"regex:^(linear_.*|.*{MARK}.*)$"
DEFAULT = ("vit384", "width72", "width80", "width96", "width72-as-64", "causal-relu", "causal128", "one-head")


def passes(
    workloads: Sequence[str], maps: Sequence[str], device: torch.device
) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Yield the passes to profile. Each pass starts with a kernel that marks its beginning."""
    for name in workloads:
        for chosen in maps:
            inputs = make_inputs(replace(WORKLOADS[name], map=MAPS[chosen]), device)
            for which in ("forward", "backward"):
                fn = make_pass(which, attend_fused, inputs)
                key = dict(zip(KEY, (name, chosen, which), strict=True))
                yield key, lambda fn=fn: (torch.arange(2, device=device), fn())


def split(kernels: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the list of kernels into passes, without the kernels that mark their beginnings."""
    found: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if MARK in kernel["kernel"]:
            found.append([])
        elif found:
            found[-1].append(kernel)
        else:
            raise ValueError(f"ncu's report: expected {MARK} before the first pass, got {kernel['kernel']}")
    return found


def main(
    out: Annotated[Path, OUT] = Path("scripts/results/counters-linear.csv"),
    workload: Annotated[str | None, typer.Option(help=f"Workloads. (default: {', '.join(DEFAULT)})")] = None,
    map: Annotated[str | None, typer.Option(help=f"Maps: {', '.join(MAPS)}. (default: all)")] = None,
    ncu: Annotated[str, NCU] = "ncu",
    commit: Annotated[str | None, COMMIT] = None,
    counted: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Profile linear attention's kernels with ncu. Write the CSV only if every pass succeeds."""
    works, maps = (
        choose_in_order("--workload", workload, WORKLOADS, DEFAULT),
        choose_in_order("--map", map, MAPS, MAPS),
    )
    if counted is not None:
        run(counted, KEY, passes(works, maps, torch.device("cuda")))
        return
    command = ["linear-counters", "--workload", ",".join(works), "--map", ",".join(maps)]
    known, kernels = profile(ncu, KERNELS, METRICS, command)
    found = split(kernels)
    if len(found) != len(known) or not all(found):
        raise SystemExit(f"expected kernels for each of the {len(known)} passes, got {[len(each) for each in found]}")
    rows = [{**key, **kernel} for key, each in zip(known, found, strict=True) for kernel in each]
    write(out, COLUMNS, rows, commit)
    print(f"{out}: {len(rows)} kernels")
