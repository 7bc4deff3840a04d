"""Compare rotations that use precomputed tables with rotations that compute angles, and write a CSV.

    lrpe-md bench tables                               all workloads, table forms and passes
    lrpe-md bench tables --workload wan --form "angles;full, float32"
    lrpe-md bench tables --at-least 0.95               fails if the speed with tables is lower

Times are medians of GPU time with a cold L2 cache. Calls are queued in advance and cycle through three copies of the
inputs. ``speed`` is the time with computed angles, divided by the time with tables in the same run. ``share`` is the
speed relative to copying as many bytes as q and k contain. Before timing, a small case of each form is checked against
float64.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..common.cases import Case, bind, check
from ..common.devices import choose_gpu
from ..common.options import OUT
from ..common.provenance import measured_on
from .layers import WORKLOADS as LAYERS
from .linear_measure import Run, time_calls
from .measure import describe_error, floor_bytes, make_pass, release_memory
from .operators import choose_in_order
from .peers import large_inputs

COLUMNS: tuple[str, ...] = (
    "workload", "form", "pass", "ms", "share", "speed", "gpu", "versions", "commit", "note",
)  # fmt: skip
PASSES = {"forward": "fwd", "backward": "bwd"}
TURNS = 3
ANGLES = "angles"
FORMS: dict[str, dict[str, Any]] = {
    ANGLES: {},
    "pairs, float32": {"tables": "pairs"},
    "full, float32": {"tables": "full"},
    "full, bfloat16": {"tables": "full", "tables_dtype": torch.bfloat16},
    "complex, float32": {"tables": "pairs", "tables_layout": "complex"},
    "complex, float64": {"tables": "pairs", "tables_layout": "complex", "tables_dtype": torch.float64},
    "full, by sample": {"tables": "full", "by_sample": True},
    "full, expanded": {"tables": "full", "tables_layout": "expanded"},
}
WORKLOADS = {
    "wan": Case(
        "rotate", (21, 30, 52), 0, batch=1, heads=(40, 40), head_dim=128, dtype=torch.bfloat16, pairs="interleaved",
        layout="bnhd", grad_layout="bnhd",
    ),
    **{name: LAYERS[name].case("rotate") for name in ("img64", "vit224")},
}  # fmt: skip


def make_case(case: Case, form: str) -> Case:
    """Return the case with tables in a different form."""
    options = dict(FORMS[form])
    by_sample = options.pop("by_sample", False)
    return replace(case, tables_batch=case.batch if by_sample else 1, **options)


def shrink(case: Case) -> Case:
    return replace(case, shape=(2, 3, 4)[: len(case.shape)], batch=2, heads=(4, 4), head_dim=16)


def measure(run: Run, name: str, form: str, whole: Case, angles_ms: dict[str, float]) -> None:
    """Time both passes with tables in one form. ``angles_ms`` stores the times with computed angles."""
    case = make_case(whole, form)
    small = replace(shrink(case), tables_batch=2 if case.tables_batch > 1 else 1)
    wrong = check(small, "auto", run.device, frequencies=False)
    if wrong:
        run.add(workload=name, form=form, note="outside the budget: " + "; ".join(map(str, wrong))[:300])
        return
    inputs = [large_inputs(case, run.device) for _ in range(TURNS)]
    forward = [bind(each, "auto") for each in inputs]
    for which, mode in PASSES.items():
        fns = [make_pass(mode, encode, each) for encode, each in zip(forward, inputs, strict=True)]
        ms = time_calls(fns, run.device, run.rep)
        if form == ANGLES:
            angles_ms[which] = ms
        row = {"ms": ms, "share": run.copy_ms * floor_bytes(mode, inputs[0]) / ms}
        if which in angles_ms:
            row["speed"] = angles_ms[which] / ms
        run.add(**{"workload": name, "form": form, "pass": which, **row})


def main(
    workload: Annotated[str | None, typer.Option(help=f"Workloads: {', '.join(WORKLOADS)}. (default: all)")] = None,
    form: Annotated[str | None, typer.Option(help=f"Table forms: {'; '.join(FORMS)}. (default: all)")] = None,
    at_least: Annotated[
        float, typer.Option(help="Minimum speed of tables relative to computed angles; fail below this speed.")
    ] = 0.0,
    limit: Annotated[
        float, typer.Option(help="Time budget in seconds; once it runs out, no new measurement starts.")
    ] = 3600.0,
    rep: Annotated[int, typer.Option(min=1, help="GPU time per measurement, in milliseconds.")] = 60,
    out: Annotated[Path, OUT] = Path("scripts/results/benchmark-tables.csv"),
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run with tiny sizes as a test, and write to runs/bench-smoke.")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:  # fmt: skip
    """Compare rotation from tables with rotation from computed angles. Each row is written to the CSV immediately."""
    where = choose_gpu(device, smoke)
    works = choose_in_order("--workload", workload, WORKLOADS, WORKLOADS)
    chosen = choose_in_order("--form", form, FORMS, FORMS)
    forms = [ANGLES, *(each for each in chosen if each != ANGLES)]
    console = Console(width=160, soft_wrap=True)
    run = Run(out, where, rep, time.monotonic() + limit, measured_on(where, commit), console, columns=COLUMNS)
    run.begin()
    run.measure_copy(2**16 if smoke else 2**30)
    for name in works:
        angles_ms: dict[str, float] = {}
        for each in forms:
            if time.monotonic() > run.deadline:
                console.print(f"stopped after {limit:g} s; finished rows are in {out}")
                break
            try:
                measure(run, name, each, shrink(WORKLOADS[name]) if smoke else WORKLOADS[name], angles_ms)
            except Exception as error:  # for example, out of memory; continue with the next
                run.add(workload=name, form=each, note=describe_error(error))
            release_memory(where)
    finish(run, at_least)


def finish(run: Run, at_least: float) -> None:
    """Print the speeds, slowest first, and fail if one is too low or missing."""
    timed = sorted((row for row in run.rows if "speed" in row and row["form"] != ANGLES), key=lambda row: row["speed"])
    for row in timed:
        run.console.print(f"{row['speed']:.3f}  {row['workload']}, {row['form']}, {row['pass']}", highlight=False)
    run.console.print(f"{len(run.rows)} rows in {run.out}", highlight=False)
    if any("speed" not in row or row["speed"] < at_least for row in run.rows):
        raise typer.Exit(1)
