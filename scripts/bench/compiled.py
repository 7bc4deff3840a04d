"""Measure the host time of lrpe-md calls in programs compiled by torch.compile, and write a CSV.

    lrpe-md bench compiled

q and k are so small that the GPU waits for the host. The benchmark times kernels that Inductor launches itself, the
registered operator (used if sizes are symbolic), and a plain triton_op with the same number of tensors. All three take
turns in one run, so machine noise affects them equally. Compare times relative to the triton_op.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from torch import Tensor

from lrpe_md import Grid, cosine, rotate

from ..common.devices import choose_gpu
from ..common.options import OUT
from ..common.provenance import measured_on
from .measure import quantiles
from .modes import host_times
from .operators import choose_in_order

__all__ = ["main"]

COLUMNS: tuple[str, ...] = (
    "map", "pass", "impl", "p20", "p50", "p80", "min", "unit", "ratio", "operators", "gpu", "versions", "commit",
)  # fmt: skip
GRID = Grid((14, 14), prefix=1)
OURS, OPERATOR, TRITON_OP = "lrpe-md", "lrpe-md, operator", "triton_op"
MAPS: dict[str, Any] = {"rotate": rotate, "cosine": cosine}
PASSES = ("forward", "forward and backward", "with omega")
Encode = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@contextmanager
def operator_only() -> Iterator[None]:
    """Make Inductor call the registered operator instead of launching kernels itself."""
    from torch._inductor import lowering

    table: dict[Any, Any] = lowering.lowerings
    from lrpe_md.engine.encode.operator import ENCODE
    from lrpe_md.engine.inductor.lowering import register

    register(ENCODE)
    ops = torch.ops.lrpe_md.forward.default, torch.ops.lrpe_md.backward.default
    saved = {op: table.pop(op) for op in ops}
    try:
        for op in ops:
            table[op] = lowering.fallback_handler(op)
        yield
    finally:
        table.update(saved)


def encoder(map: str) -> Encode:
    def encode(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
        return MAPS[map](q, k, omega=omega, positions=GRID)

    return encode


def make_inputs(map: str, which: str, device: torch.device) -> tuple[Tensor, ...]:
    channels = 64 if map == "cosine" else 32
    omega = torch.rand(1, channels, 2, device=device, requires_grad=which == "with omega")
    qkv = torch.randn(1, GRID.num_tokens, 3, 12, 64, device=device, dtype=torch.bfloat16)
    q, k, _ = (t.transpose(1, 2).requires_grad_(which != "forward") for t in qkv.unbind(2))
    return q, k, omega


def make_call(encode: Encode, inputs: tuple[Tensor, ...], which: str) -> Callable[[], Any]:
    leaves = [t for t in inputs if t.requires_grad]
    if which == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return encode(*inputs)

        return forward
    grads = [torch.randn_like(y) for y in encode(*inputs)]
    return lambda: torch.autograd.grad(encode(*inputs), leaves, grads)


def compile_alone(graph: Any, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


def compile_ours(map: str, inputs: tuple[Tensor, ...], which: str) -> tuple[Callable[[], Any], str]:
    """Compile a call. Return the compiled call, and the lrpe-md operators that the generated code calls."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    # Use a separate backend. Otherwise, torch.compile would reuse the code of the variant that was compiled first.
    encode = torch.compile(encoder(map), backend=partial(compile_alone), fullgraph=True)
    listening = mock.patch.object(GraphLowering, "save_output_code", codes.append)
    with listening, config.patch(force_disable_caches=True):  # caches may contain the code of the other variant
        call = make_call(encode, inputs, which)
        call()
    found = {name for code in codes for name in re.findall(r"torch\.ops\.lrpe_md\.(\w+)", code)}
    return call, " ".join(sorted(found))


def measure(map: str, which: str, device: torch.device, blocks: int, calls: int) -> list[dict[str, Any]]:
    inputs = make_inputs(map, which, device)
    found: dict[str, tuple[Callable[[], Any], str]] = {}
    torch.compiler.reset()
    found[OURS] = compile_ours(map, inputs, which)
    with operator_only():
        found[OPERATOR] = compile_ours(map, inputs, which)
    if which == "forward" and device.type == "cuda":
        from .plain_kernels import copy_two

        found[TRITON_OP] = make_call(torch.compile(copy_two, fullgraph=True), inputs, which), ""
        found[TRITON_OP][0]()

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = host_times([call for call, _ in found.values()], blocks + 3, calls, synchronize)
    rows: list[dict[str, Any]] = [
        {"map": map, "pass": which, "impl": name, **quantiles(own[3:]), "unit": "us", "operators": operators}
        for (name, (_, operators)), own in zip(found.items(), times, strict=True)
    ]
    usual = next((row["p50"] for row in rows if row["impl"] == TRITON_OP), None)
    return [{**row, "ratio": row["p50"] / usual if usual else ""} for row in rows]


def main(
    map: Annotated[str | None, typer.Option(help=f"Map: {', '.join(MAPS)}. (default: both)")] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks of calls to time per measurement.")] = 30,
    out: Annotated[Path, OUT] = Path("scripts/results/benchmark-compiled.csv"),
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Time only a few calls to test that everything runs, and write to runs/bench-smoke.",
        ),
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:
    """Measure the CPU time of compiled calls. Each row is written to the CSV immediately."""
    where = choose_gpu(device, smoke)
    maps = choose_in_order("--map", map, MAPS, MAPS)
    here, console = measured_on(where, commit), Console(width=160, soft_wrap=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for chosen in maps:
            for which in PASSES:
                rows = measure(chosen, which, where, 1 if smoke else blocks, 2 if smoke else 50)
                for row in rows:
                    writer.writerow({**row, **here})
                    console.print(
                        f"{chosen}, {which}: {row['impl']} {row['p50']:.1f} us {row['operators']}", markup=False
                    )
                file.flush()
