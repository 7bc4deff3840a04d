"""Benchmark linear attention against a copy, softmax attention and PyTorch implementations, and write a CSV.

    lrpe-md bench linear                                all workloads, with both maps and without, three passes
    lrpe-md bench linear --workload vit224 --map cosine --out runs/linear.csv
    lrpe-md bench linear --impl lrpe-md,SDPA --limit 300 --append

Times are medians of GPU time with a cold L2 cache. Calls are queued in advance and cycle through three copies of the
inputs. A share is the speed relative to a copy of 2 GiB in the same run, counting the elements that must be moved:
4·BHND in the forward pass (q, k and v are read, and o is written), and 7·BHND in the backward pass (do is also read,
and dq, dk and dv are written). Before timing, values and gradients of one sample are checked against float64.
Implementations with wrong results are not timed.

With --other, calls of lrpe-md alternate with calls of another checkout of this repository:

    lrpe-md bench linear --impl lrpe-md --workload width72,width96 --other ../old-checkout --out runs/linear.csv

Other libraries are timed if you can import them; see :mod:`.linear_peers`:

    PYTHONPATH=.:FOLDER lrpe-md bench linear --workload bidirectional-4096,causal-plain,sana,sana-module
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lrpe_md import cosine, linear_attention, rotate
from lrpe_md.reference import activate

from ..common.cases import LinearCase, check_linear
from ..common.devices import choose_gpu
from ..common.options import LIMIT, OUT
from ..common.provenance import measured_on
from .hosted import import_checkout
from .linear_measure import (
    PASSES,
    TURNS,
    WORKLOADS,
    Attend,
    Inputs,
    Run,
    make_inputs,
    make_pass,
    shrink,
)  # fmt: skip
from .linear_peers import PEERS, SANA, SANA_WORKLOADS, STOCK, measure_peer, measure_sana, missing
from .measure import describe_error, release_memory
from .operators import choose_in_order

MAPS: dict[str, Any] = {"cosine": "cosine", "rotate": "rotate", "none": None}
ALL_WORKLOADS = (*WORKLOADS, *SANA_WORKLOADS)
DEFAULT = [name for name in ALL_WORKLOADS if not name.endswith(("-b2", "-as-64"))]


# --- implementations -----------------------------------------------------------------------------------------------


def attend_fused(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, omega: Tensor | None) -> Tensor:
    case = inputs.case
    positions = inputs.positions if case.has_positions else None
    return linear_attention(q, k, v, map=case.map, omega=omega, positions=positions, **inputs.options)


class OtherCheckout:
    """Package of another checkout of this repository."""

    package: Any = None


def attend_by_other(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, omega: Tensor | None) -> Tensor:
    """Like :func:`attend_fused`, but with the other checkout's kernels."""
    package, case = OtherCheckout.package, inputs.case
    positions = package.Grid(case.shape, prefix=case.prefix) if case.has_positions else None
    return package.linear_attention(q, k, v, map=case.map, omega=omega, positions=positions, **inputs.options)


def attend_unfused(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, omega: Tensor | None) -> Tensor:
    """Write q̂ and k̂ to memory with lrpe-md's kernels, and multiply in 16 bits."""
    case = inputs.case
    q_bar, k_bar = activate(q, case.act), activate(k, case.act)
    q_hat, k_hat = q_bar, k_bar
    if omega is not None:
        call: Any = cosine if case.map == "cosine" else rotate
        q_hat, k_hat = call(q, k, omega=omega, positions=inputs.positions, act=case.act)
    o = q_hat @ (k_hat.mT @ v)
    if case.normalizer == "unrotated":
        o = o / (q_bar * k_bar.sum(-2, keepdim=True)).sum(-1, keepdim=True).clamp_min(1e-6)
    return o


def attend_by_softmax(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, omega: Tensor | None) -> Tensor:
    """Apply softmax attention without positions, using the first backend that supports the inputs."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        return scaled_dot_product_attention(q, k, v, is_causal=inputs.case.mask == "causal")


OTHER = "lrpe-md, other"
OURS, SDPA, UNFUSED, COMPILED = "lrpe-md", "SDPA", "unfused", "unfused, compiled"
IMPLS: dict[str, Attend] = {
    OURS: attend_fused, SDPA: attend_by_softmax, UNFUSED: attend_unfused, COMPILED: attend_unfused
}  # fmt: skip


NAMES = [*IMPLS, *PEERS, STOCK]


def takes(impl: str, name: str, case: LinearCase) -> bool:
    if name in SANA_WORKLOADS:
        return case.map == "rotate" and impl in (OURS, STOCK)
    if impl in PEERS:
        return PEERS[impl].takes(name, case)
    if case.mask == "block":
        return case.map == "rotate" and impl == OURS
    if impl == SDPA:
        return case.map is None and case.decay == "none"
    return impl == OURS or (impl != STOCK and case.mask == "full")


def measure(run: Run, name: str, case: LinearCase, impl: str) -> None:
    key = {
        "workload": name, "map": case.map or "none", "act": case.act, "normalizer": case.normalizer, "mask": case.mask,
        "impl": impl,
    }  # fmt: skip
    if impl in PEERS:
        measure_peer(run, name, case, impl, key)
        return
    if impl == OURS:
        small = replace(case, batch=1, heads=(2, 2))
        wrong = check_linear(small, "auto", run.device)
        if wrong:
            run.add(**{**key, "pass": ""}, note="outside the budget: " + "; ".join(map(str, wrong))[:300])
            return
    inputs = [make_inputs(case, run.device) for _ in range(TURNS)]
    attend: Any = torch.compile(IMPLS[impl]) if impl == COMPILED else IMPLS[impl]
    for which in PASSES:
        if which == "backward_omega" and (case.map is None or impl != OURS):
            continue
        run.time(inputs[0], which, [make_pass(which, attend, each) for each in inputs], **key)
        if impl == OURS and OtherCheckout.package is not None:
            fns = [make_pass(which, attend_by_other, each) for each in inputs]
            run.time(inputs[0], which, fns, **{**key, "impl": OTHER})


def main(
    workload: Annotated[
        str | None, typer.Option(help=f"Workloads: {', '.join(ALL_WORKLOADS)}. (default: all except *-b2 and *-as-64)")
    ] = None,
    map: Annotated[str | None, typer.Option(help=f"Maps: {', '.join(MAPS)}. (default: all)")] = None,
    impl: Annotated[
        str | None, typer.Option(help=f"Implementations: {'; '.join(NAMES)}. (default: all installed)")
    ] = None,
    other: Annotated[
        Path | None, typer.Option(help="Another checkout of this repository to time as well.")
    ] = None,
    limit: Annotated[float, LIMIT] = 3600.0,
    rep: Annotated[int, typer.Option(min=1, help="GPU time per measurement, in milliseconds.")] = 60,
    out: Annotated[Path, OUT] = Path("scripts/results/benchmark-linear.csv"),
    append: Annotated[bool, typer.Option("--append", help="Append to the CSV instead of replacing it.")] = False,
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run with tiny sizes as a test, and write to runs/bench-smoke.")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:  # fmt: skip
    """Benchmark lrpe-md's linear attention, then other implementations. Each row is written to the CSV immediately."""
    where = choose_gpu(device, smoke)
    OtherCheckout.package = None if other is None else import_checkout(other)
    works = choose_in_order("--workload", workload, ALL_WORKLOADS, DEFAULT)
    maps, impls = choose_in_order("--map", map, MAPS, MAPS), choose_in_order("--impl", impl, NAMES, NAMES)
    console = Console(width=160, soft_wrap=True)
    cases = [(name, replace(WORKLOADS.get(name, SANA), map=MAPS[each])) for name in works for each in maps]
    needed = [by for by in NAMES if (by in impls or by == STOCK) and any(takes(by, *case) for case in cases)]
    for name, why in missing(needed).items():
        impls = [each for each in impls if each != name]
        works = [each for each in works if name != STOCK or each not in SANA_WORKLOADS]
        console.print(f"without {name}: {why}", highlight=False, markup=False)
    run = Run(out, where, rep, time.monotonic() + limit, measured_on(where, commit), console)
    if not (append and out.exists()):
        run.begin()
    run.measure_copy(2**16 if smoke else 2**30)
    for by, name, chosen in [(by, name, chosen) for by in impls for name in works for chosen in maps]:
        case = replace(WORKLOADS.get(name, SANA), map=MAPS[chosen])
        if not takes(by, name, case):
            continue
        if time.monotonic() > run.deadline:
            console.print(f"stopped after {limit:g} s; finished rows are in {out}")
            break
        try:
            if name in SANA_WORKLOADS:
                measure_sana(run, name, by, OURS, smoke)
            else:
                measure(run, name, shrink(case) if smoke else case, by)
        except Exception as error:  # for example, out of memory; continue with the next
            run.add(workload=name, map=chosen, impl=by, mask=case.mask, note=describe_error(error))
        release_memory(where)
    console.print(f"{len(run.rows)} rows in {out}", highlight=False)
