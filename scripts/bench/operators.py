"""Benchmark the operators against a copy and other implementations, and write a CSV.

    lrpe-md bench operators --peers lrpe-md                      all passes of lrpe-md on three workloads
    lrpe-md bench operators --peers lrpe-md --variants           also activations, dtypes, widths, coordinates
    lrpe-md bench operators --modes host,compile,memory,accuracy
    lrpe-md bench operators --modes scaling --op rotate          time against N, from 2^8 to 2^20
    lrpe-md bench operators --workload video --liger DIR --flash-attn DIR --xopes DIR --out FILE.csv

Times are medians of GPU time with a cold L2 cache, and calls are queued in advance. A share is the speed relative to a
copy of 2 GiB in the same run, counting the bytes that must be moved. Each result is compared with float64 first. If a
result violates the error budget of lrpe_md.testing, the violation is recorded, and the pass is not timed. You can
measure each mode and each workload in a separate run. `make results` writes docs/results/performance.md from
scripts/results/benchmark-*.csv.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._functorch.config as functorch_config
import typer
from rich.console import Console
from rich.table import Table

from ..common.devices import choose_gpu, gpu_name
from ..common.options import LIMIT, OUT, choose, group_options
from ..common.provenance import git_commit, versions
from . import modes as modes_of
from .layers import TEXT_WORKLOADS, WORKLOADS, Workload
from .measure import PASSES, Judge, OutOfTime, Session, describe_error, time_copy, time_peer
from .peers import LIBRARIES, OURS, PEERS, Peer, large_inputs

OPS = ("cosine", "rotate")
OMEGAS = ("shared", "per-head")
MODES = (*PASSES, "host", "compile", "memory", "accuracy", "scaling")
DEFAULT_MODES = PASSES[:3]
ALL_WORKLOADS = {**WORKLOADS, **TEXT_WORKLOADS}


def choose_in_order(option: str, wanted: str | None, known: Iterable[str], default: Iterable[str]) -> list[str]:
    """Split a list at semicolons, or at commas if no name contains a comma, and sort the names as in ``known``."""
    known = list(known)
    if wanted is None:
        return list(default)
    pieces = [piece.strip() for piece in wanted.split(";")]
    names = [name for piece in pieces for name in ([piece] if piece in known else map(str.strip, piece.split(",")))]
    return sorted(choose(option, names, known), key=known.index)


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Return the machine, versions and commit of a run. Host names and paths are left out."""
    return {
        "copy_gbps": None,
        "gpu": gpu_name(device) or "cpu",
        "python": platform.python_version(),
        **versions("torch", "triton", "timm"),
        "commit": commit or git_commit(12),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def summary(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each mode, operator, type of frequencies and peer, with a column for each workload."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["mode"] == "copy":
            continue
        name = tuple(str(row.get(k, "")) for k in ("mode", "op", "omega", "peer", "variant"))
        place = str(row.get("workload") or "")
        if row["mode"] in ("scaling", "accuracy"):
            place = f"N {row['num_tokens']}" if row["mode"] == "scaling" else f"{row['num_axes']} axes"
            name = (*name[:4], str(row.get("workload", "")))
        text = "-" if row.get("p50") is None else f"{row['p50']:.4g} {row['unit']}"
        if row.get("share") is not None:
            text = f"{row['share']:.3f}"
        lines.setdefault(name, {})[place] = text + ("" if row.get("in_budget", True) else " !")
    for mode in dict.fromkeys(name[0] for name in lines):
        part = {name: cells for name, cells in lines.items() if name[0] == mode}
        places = list(dict.fromkeys(place for cells in part.values() for place in cells))
        table = Table("op", "omega", "peer", "variant", *places, title=mode, box=None, title_justify="left")
        for name, cells in part.items():
            table.add_row(*name[1:], *(cells.get(place, "") for place in places))
        console.print(table)


def shrink(workload: Workload) -> Workload:
    shape = {1: (12,), 2: (3, 4), 3: (2, 3, 4)}[len(workload.shape)]
    heads, key_heads = (4, 2) if workload.key_heads else (2, None)
    return replace(
        workload, batch=2, heads=heads, shape=shape, prefix=min(workload.prefix, 1), head_dim=16, key_heads=key_heads
    )


def takes(peer: Peer, op: str, workload: str) -> bool:
    return op in peer.maps and (workload in TEXT_WORKLOADS or not peer.text)


@dataclass(frozen=True)
class Plan:
    """Selection of the modes, operators, workloads and peers to measure."""

    modes: list[str]
    workloads: dict[str, Workload]
    ops: list[str]
    omegas: list[str]
    peers: dict[str, Peer]
    variants: bool
    smoke: bool

    @property
    def passes(self) -> list[str]:
        return [mode for mode in self.modes if mode in PASSES]


def load_peers(folders: dict[str, Path | None]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Load all peers, including those in the folders. Return the peers, and the errors of those that failed to load."""
    known, broken = dict(PEERS), {}
    for name, root in folders.items():
        if root is not None:
            try:
                known |= LIBRARIES[name](root.resolve())
            except Exception as error:  # continue with the other peers
                broken[name] = describe_error(error)
    return known, broken


PANELS = {
    "What is measured": "op workload omega modes peers variants time_inexact",
    "Other libraries": "liger flash_attn xopes",
}


@group_options(PANELS)
def main(
    op: Annotated[str | None, typer.Option(help=f"Operators: {', '.join(OPS)}. (default: all)")] = None,
    workload: Annotated[
        str | None, typer.Option(help=f"Workloads: {', '.join(ALL_WORKLOADS)}. (default: all but text)")
    ] = None,
    omega: Annotated[str | None, typer.Option(help=f"Frequencies: {', '.join(OMEGAS)}. (default: all)")] = None,
    modes: Annotated[str | None, typer.Option(help=f"Modes: {', '.join(MODES)}. (default: the first three)")] = None,
    peers: Annotated[str | None, typer.Option(help="Libraries to compare, separated by semicolons.")] = None,
    variants: Annotated[bool, typer.Option("--variants", help="Also measure variants of lrpe-md's passes.")] = False,
    liger: Annotated[
        Path | None, typer.Option(help="Liger-Kernel checkout, or the folder that contains its package.")
    ] = None,
    flash_attn: Annotated[Path | None, typer.Option(help="flash-attention checkout.")] = None,
    xopes: Annotated[Path | None, typer.Option(help="xopes checkout.")] = None,
    time_inexact: Annotated[
        bool, typer.Option("--time-inexact", help="Also time peers that exceed the error budget.")
    ] = False,
    limit: Annotated[float, LIMIT] = 3600.0,
    rep: Annotated[int, typer.Option(min=1, help="GPU time per measurement, in milliseconds.")] = 100,
    out: Annotated[Path | None, typer.Option(help=f"{OUT.help} (default: scripts/results/benchmark-MODES.csv)")] = None,
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run with tiny sizes as a test, and write to runs/bench-smoke.")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:  # fmt: skip
    """Benchmark lrpe-md's operators, then other implementations. Each row is written to the CSV immediately."""
    where = choose_gpu(device, smoke)
    started = time.monotonic()
    wanted_modes = choose_in_order("--modes", modes, MODES, DEFAULT_MODES)
    ops, omegas = choose_in_order("--op", op, OPS, OPS), choose_in_order("--omega", omega, OMEGAS, OMEGAS)
    works = {name: ALL_WORKLOADS[name] for name in choose_in_order("--workload", workload, ALL_WORKLOADS, WORKLOADS)}
    works = {name: shrink(work) for name, work in works.items()} if smoke else works

    console = Console(width=160, soft_wrap=True)
    known, broken = load_peers({"flash-attn": flash_attn, "liger": liger, "xopes": xopes})
    chosen: dict[str, Peer] = {name: known[name] for name in choose_in_order("--peers", peers, known, known)}
    plan = Plan(wanted_modes, works, ops, omegas, chosen, variants, smoke)

    functorch_config.donated_buffer = False  # graphs are differentiated many times
    out = out or Path("scripts/results") / f"benchmark-{'-'.join(wanted_modes)}.csv"
    here = environment(where, commit)
    session = Session(out, where, started + limit, rep, time_inexact, here, console)
    session.measure_copy(2**20 if smoke else 2**30)
    for name, text in broken.items():
        session.add(mode="import", peer=name, note=text)

    try:
        measure_all(session, plan)
    except OutOfTime:
        console.print(f"stopped after {limit:g} s; finished rows are in {out}")
    summary(session.rows, console)
    console.print(f"{len(session.rows)} rows in {out}, {time.monotonic() - started:.0f} s", highlight=False)


def measure_passes(session: Session, plan: Plan, peers: dict[str, Peer]) -> None:
    for name, workload in plan.workloads.items():
        for op in plan.ops:
            for kind in plan.omegas:
                run_passes(session, plan.passes, name, workload, op, kind, peers)


def measure_all(session: Session, plan: Plan) -> None:
    """Run all measurements. lrpe-md comes first, in case the time runs out."""
    measure_passes(session, plan, {name: peer for name, peer in plan.peers.items() if name == OURS})
    if plan.variants and plan.passes:
        for name, workload in plan.workloads.items():
            for op in plan.ops:
                modes_of.measure_variants(session, plan.passes, op, name, workload)
    if "accuracy" in plan.modes:
        modes_of.measure_accuracy(session)
    for op in plan.ops:
        if "host" in plan.modes:
            with session.attempt(mode="host", op=op):
                modes_of.measure_host(session, op, plan.peers, blocks=3 if plan.smoke else 200)
        if "compile" in plan.modes:
            modes_of.measure_compile(session, op, repeats=3)
    if "memory" in plan.modes:
        for name, workload in plan.workloads.items():
            for op in plan.ops:
                run_memory(session, name, workload, op, plan.peers)
    if "scaling" in plan.modes:
        for name in modes_of.SCALING_PEERS:
            for op in plan.ops:
                if name in plan.peers and op in plan.peers[name].maps:
                    step = 1 if name == OURS else 2  # peers may compile for each size
                    exponents = list(range(6 if plan.smoke else 8, 8 if plan.smoke else 21, step))
                    modes_of.measure_scaling(session, op, name, plan.peers[name], exponents)
    measure_passes(session, plan, {name: peer for name, peer in plan.peers.items() if name != OURS})


def run_passes(
    session: Session, passes: list[str], name: str, work: Workload, op: Any, kind: str, peers: dict[str, Peer]
) -> None:
    """Measure all suitable peers on one problem. The inputs and float64 results are computed only once."""
    fitting = {n: p for n, p in peers.items() if takes(p, op, name) and (kind == "shared" or p.per_head)}
    if not passes or not fitting:
        return
    with session.attempt(mode=passes[0], op=op, workload=name, omega=kind):
        inputs = large_inputs(work.case(op, per_head=kind == "per-head"), session.device)
        if OURS in fitting and kind == "shared":
            time_copy(session, [mode for mode in passes if mode != "fwdbwd"], name, inputs)
        judge = Judge(inputs)
        for peer_name, peer in fitting.items():
            time_peer(session, passes, name, peer_name, peer, inputs, judge=judge)


def run_memory(session: Session, name: str, work: Workload, op: Any, peers: dict[str, Peer]) -> None:
    with session.attempt(mode="memory", op=op, workload=name):
        inputs = large_inputs(work.case(op), session.device)
        for peer_name, peer in peers.items():
            if takes(peer, op, name) and peer.adapt is None:
                modes_of.measure_memory(session, name, peer_name, peer, inputs, False)
        if OURS in peers:
            modes_of.measure_memory(session, name, OURS, peers[OURS], inputs, True)
