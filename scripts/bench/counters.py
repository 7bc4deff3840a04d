"""Find out what limits the kernels by reading GPU counters with Nsight Compute, and write a CSV.

    lrpe-md bench counters        needs ncu, and permission to read GPU counters

Each pass of ``bench operators`` runs once with cold caches. The CSV contains each pass's duration, memory traffic in
bytes, and the utilisation of memory, L2 cache and schedulers. On vit224, the baselines are a compiled kernel with
precomputed tables and an element-wise kernel with the same traffic. `make results` turns the CSV into a table.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._functorch.config as functorch_config
import typer

from ..common.options import OUT
from ..common.provenance import measured_on
from .layers import WORKLOADS
from .measure import floor_bytes, make_pass
from .peers import OURS, PEERS, large_inputs

MODES = ("fwd", "bwd", "bwd_omega")
TABLES = "torch.compile, tables"
ELEMENTWISE = "same-size element-wise kernel"  # a plain copy does not launch a kernel
METRICS = {
    "ns": "gpu__time_duration.sum",
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
KEY: tuple[str, ...] = ("op", "workload", "mode", "peer", "floor_bytes")
COLUMNS = (*KEY, *METRICS, "gpu", "versions", "commit")
KERNELS = "regex:^(lrpe_kernel|triton_.*|.*elementwise_kernel.*)$"  # excluding the second pass of dω
RANGE = "counted"
NCU: Any = typer.Option(help="Command that starts Nsight Compute.")
COMMIT: Any = typer.Option(help="Commit hash to record if there is no git history.")


def passes(device: torch.device) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the passes to profile. Each pass runs a single kernel."""
    for name, workload in WORKLOADS.items():
        for op in ("cosine", "rotate"):
            inputs = large_inputs(workload.case(op), device)
            for mode in MODES:
                key = {"op": op, "workload": name, "mode": mode, "floor_bytes": floor_bytes(mode, inputs)}
                yield {**key, "peer": OURS}, make_pass(mode, PEERS[OURS].build(inputs), inputs)
                if name == "vit224" and op == "cosine" and mode != "bwd_omega":
                    yield {**key, "peer": TABLES}, make_pass(mode, PEERS[TABLES].build(inputs), inputs)
            if name == "vit224":
                x = torch.ones(floor_bytes("fwd", inputs) // 4, dtype=torch.bfloat16, device=device)
                y = torch.empty_like(x)
                key = {"op": op, "workload": name, "mode": "fwd", "floor_bytes": floor_bytes("fwd", inputs)}
                yield {**key, "peer": ELEMENTWISE}, lambda x=x, y=y: torch.neg(x, out=y)


def run(keys: Path, columns: Sequence[str], passes: Iterable[tuple[dict[str, Any], Callable[[], Any]]]) -> None:
    """Run each pass once after a warm-up call, and write its key to a CSV. ncu profiles this process."""
    functorch_config.donated_buffer = False
    with keys.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for key, fn in passes:
            fn()
            torch.cuda.synchronize()
            counted = torch.cuda.nvtx.range_start(RANGE)  # includes launches from autograd's thread
            fn()
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_end(counted)
            writer.writerow(key)
            file.flush()


def parse(report: str, metrics: dict[str, str]) -> list[dict[str, Any]]:
    """Parse ncu's raw page: a line of names, a line of units, and a line per kernel. Return its name and metrics."""
    lines = [line for line in report.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        raise ValueError("ncu's report: expected names, units and kernels, got\n" + report[-2000:])
    found = list(csv.DictReader(io.StringIO("\n".join([lines[0], *lines[2:]]))))
    missing = [metric for metric in metrics.values() if found and metric not in found[0]]
    if missing:
        raise ValueError(f"ncu's report lacks {', '.join(missing)}")
    numbers = [{name: float(row[metric].replace(",", "")) for name, metric in metrics.items()} for row in found]
    return [{"kernel": row["Kernel Name"], **values} for row, values in zip(found, numbers, strict=True)]


def profile(
    ncu: str, kernels: str, metrics: dict[str, str], command: Sequence[str]
) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Profile a ``bench`` command with ncu. Return the keys of its passes, and the name and metrics of each kernel.

    The command must accept ``--counted FILE``, and then call :func:`run`. ``kernels`` is a filter of kernel names.
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("counters need an NVIDIA GPU, but PyTorch finds none")
    with tempfile.TemporaryDirectory() as folder:
        keys, report = Path(folder, "keys.csv"), Path(folder, "report.csv")
        arguments = [
            ncu, "--clock-control", "none", "--nvtx", "--nvtx-include", RANGE, "--kernel-name", kernels,
            "--metrics", ",".join(metrics.values()), "--page", "raw", "--csv", "--print-units", "base",
            "--log-file", str(report),
            sys.executable, "-m", "lrpe_md.scripts.bench", *command, "--counted", str(keys),
        ]  # fmt: skip
        try:
            done = subprocess.run(arguments, capture_output=True, text=True)
        except FileNotFoundError:
            raise typer.BadParameter(f"--ncu: command {ncu!r} not found; install the CUDA toolkit") from None
        text = report.read_text(encoding="utf-8") if report.exists() else ""
        if done.returncode:
            raise SystemExit(f"ncu failed with exit status {done.returncode}:\n{text[-2000:]}\n{done.stderr[-2000:]}")
        with keys.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file)), parse(text, metrics)


def write(out: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]], commit: str | None) -> None:
    """Write rows to a CSV, with the GPU, the versions and the commit."""
    here = measured_on(torch.device("cuda"), commit)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, **here} for row in rows)


def main(
    out: Annotated[Path, OUT] = Path("scripts/results/counters.csv"),
    ncu: Annotated[str, NCU] = "ncu",
    commit: Annotated[str | None, COMMIT] = None,
    counted: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Profile all passes with ncu. Write the CSV only if every pass succeeds."""
    if counted is not None:
        run(counted, KEY, passes(torch.device("cuda")))
        return
    known, rows = profile(ncu, KERNELS, METRICS, ["counters"])
    if len(rows) != len(known):
        raise SystemExit(f"expected one kernel for each of the {len(known)} passes, got {len(rows)} from ncu")
    write(out, COLUMNS, ({**key, **row} for key, row in zip(known, rows, strict=True)), commit)
    print(f"{out}: {len(rows)} kernels")
