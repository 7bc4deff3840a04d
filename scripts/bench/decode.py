"""Measure how long a layer takes to rotate q and k and to store k in a static cache. Write a CSV.

    lrpe-md bench decode                                  single tokens for B from 1 to 64, prompts of 2,048
    lrpe-md bench decode --workload "decode-1;decode-64" --impl "lrpe-md, out=;transformers"

There are 32 query heads and 8 key heads with head_dim 128 in bfloat16, in the memory layout of a projection (B, N, H,
D). The cache has room for 4,096 tokens, and its next free row is read on the device. Workloads with "half" in their
name rotate half of the channels. Storing the values is not timed, because all implementations do it in the same way.
Implementations that use tables get precomputed cos and sin, because a model computes its tables once for all layers.
lrpe-md computes the angles in the kernel.

"gpu" is the GPU time of a call with a cold L2 cache, "graph" is the time per call of 64 calls in a CUDA graph, and
"host" is the host time of a call. A share is the speed relative to a copy of 2 GiB in the same run, counting the bytes
that must be moved: q and k are read and written. Before timing, q and the cache are checked against float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from lrpe_md import Grid, geometric_theta, rotate

from ..common.devices import choose_gpu
from ..common.options import LIMIT, OUT
from ..common.provenance import measured_on
from .linear_measure import Run, time_calls
from .measure import describe_error, quantiles, release_memory
from .modes import host_times
from .operators import choose_in_order

COLUMNS: tuple[str, ...] = (
    "workload", "batch", "tokens", "rotary_dim", "measure", "impl", "ms", "share", "gpu", "versions", "commit", "note",
)  # fmt: skip
MEASURES = ("gpu", "graph", "host")
TURNS, CAPTURED = 3, 64
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int = 1
    rotary_dim: int = 128
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    length: int = 4096  # number of rows in the cache
    start: int = 1000  # next free row


WORKLOADS = {
    **{f"decode-{batch}": Shape(batch) for batch in (1, 4, 16, 64)},
    **{f"decode-{batch}-half": Shape(batch, rotary_dim=64) for batch in (1, 16, 64)},
    **{f"prefill-{batch}": Shape(batch, 2048, start=0) for batch in (1, 4)},
    "prefill-1-half": Shape(1, 2048, 64, start=0),
}


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    omega: Tensor
    start: Tensor  # (1,), read on the device
    cache: Tensor  # (B, H, L, D), keys
    shape: Shape

    @property
    def where(self) -> Grid:
        return Grid((self.shape.tokens,), origin=self.start)

    @property
    def rows(self) -> Tensor:
        return self.start + torch.arange(self.shape.tokens, device=self.start.device)

    @property
    def rotary_dim(self) -> int | None:
        return None if self.shape.rotary_dim == self.shape.head_dim else self.shape.rotary_dim

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin tables (1, N, R) in transformers' layout."""
        angles = self.rows[:, None].double() * self.omega[0, :, 0].double()
        both = torch.cat([angles, angles], dim=-1)[None]
        return both.cos().to(dtype), both.sin().to(dtype)


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    sizes = [(shape.batch, shape.tokens, heads, shape.head_dim) for heads in shape.heads]
    q, k = (torch.randn(size, device=device, dtype=BF16).transpose(1, 2) for size in sizes)
    omega = geometric_theta(shape.rotary_dim // 2, 5e5).to(device)[None, :, None].float()
    start = torch.full((1,), shape.start, dtype=torch.int64, device=device)
    cache = torch.zeros(shape.batch, shape.heads[1], shape.length, shape.head_dim, device=device, dtype=BF16)
    return Inputs(q, k, omega, start, cache, shape)


# --- implementations: rotate q, and rotate k into the cache ----------------------------------------------------------

Step = Callable[[], Tensor]


def build_into(inputs: Inputs) -> Step:
    """Rotate q and k in a single launch that writes k directly into the cache."""
    omega, where, cache, start = inputs.omega, inputs.where, inputs.cache, inputs.start
    into = (None, cache)

    def step() -> Tensor:
        q, _ = rotate(
            inputs.q, inputs.k, omega=omega, positions=where, rotary_dim=inputs.rotary_dim, out=into, out_start=start
        )
        return q

    return step


def build_copied(inputs: Inputs) -> Step:
    rows = inputs.rows

    def step() -> Tensor:
        q, k = rotate(
            inputs.q, inputs.k, omega=inputs.omega, positions=inputs.where, rotary_dim=inputs.rotary_dim
        )  # fmt: skip
        inputs.cache.index_copy_(2, rows, k)
        return q

    return step


def build_tables(inputs: Inputs, apply: Callable[..., Any], dtype: torch.dtype = BF16) -> Step:
    """Rotate with ``apply``, a function of q, k, cos and sin, and copy k into the cache."""
    cos, sin = inputs.tables(dtype)
    rows = inputs.rows

    def step() -> Tensor:
        q, k = apply(inputs.q, inputs.k, cos, sin)
        inputs.cache.index_copy_(2, rows, k)
        return q

    return step


def build_transformers(inputs: Inputs) -> Step:
    family = "llama" if inputs.rotary_dim is None else "gpt_neox"  # gpt_neox supports partial rotation
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return build_tables(inputs, module.apply_rotary_pos_emb)


def build_liger(inputs: Inputs) -> Step:
    """Rotate q and k in place with Liger."""
    module = importlib.import_module("liger_kernel.transformers.rope")
    return build_tables(inputs, lambda q, k, cos, sin: module.liger_rotary_pos_emb(q, k, cos, sin))


def build_hub(inputs: Inputs) -> Step:
    """Rotate with the hub kernel that transformers loads. This kernel does not support partial rotation."""
    get_kernel = importlib.import_module("kernels").get_kernel
    return build_tables(inputs, get_kernel("kernels-community/rotary").apply_rotary_transformers)


def compile_step(build: Callable[[Inputs], Step]) -> Callable[[Inputs], Step]:
    return lambda inputs: torch.compile(build(inputs))


INTO, COPIED, THEIRS, LIGER, HUB = (
    "lrpe-md, out=", "lrpe-md, index_copy", "transformers", "liger-kernel", "kernels-community/rotary"
)  # fmt: skip
IMPLS: dict[str, Callable[[Inputs], Step]] = {
    INTO: build_into, f"{INTO}, compiled": compile_step(build_into), COPIED: build_copied,
    f"{COPIED}, compiled": compile_step(build_copied), THEIRS: build_transformers,
    f"{THEIRS}, compiled": compile_step(build_transformers), LIGER: build_liger, HUB: build_hub,
}  # fmt: skip
NEEDS = {LIGER: "liger_kernel", HUB: "kernels", THEIRS: "transformers", f"{THEIRS}, compiled": "transformers"}
WHOLE_HEADS = (LIGER, HUB)


# --- measuring -------------------------------------------------------------------------------------------------------


def find_wrong(build: Callable[[Inputs], Step], inputs: Inputs) -> str:
    """Describe the first result whose error exceeds the rounding of 16-bit tables and outputs, or return ""."""
    exact = rotate(
        inputs.q.double(), inputs.k.double(), omega=inputs.omega, positions=inputs.where, rotary_dim=inputs.rotary_dim,
        impl="reference",
    )  # fmt: skip
    inputs.cache.zero_()
    q = build(inputs)()
    part = slice(inputs.shape.start, inputs.shape.start + inputs.shape.tokens)
    for name, found, wanted in (("q", q, exact[0]), ("k", inputs.cache[:, :, part], exact[1])):
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        if not error < 2**-6:
            return f"{name}: off by {error:.2g}"
    rest = inputs.cache.clone()
    rest[:, :, part] = 0
    return "other rows of the cache changed" if rest.any() else ""


def capture(step: Step) -> Callable[[], Any]:
    """Capture several steps in a CUDA graph, and return a function that replays the graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            step()
    return graph.replay


def measure(run: Run, name: str, shape: Shape, impl: str) -> None:
    build = IMPLS[impl]
    key = {
        "workload": name, "batch": shape.batch, "tokens": shape.tokens, "rotary_dim": shape.rotary_dim, "impl": impl
    }  # fmt: skip
    with torch.no_grad():
        wrong = find_wrong(build, make_inputs(shape, run.device))
        if wrong:
            run.add(**key, measure="", note=wrong)
            return
        steps = [build(make_inputs(shape, run.device)) for _ in range(TURNS)]
        size = 2 * 2 * shape.batch * shape.tokens * sum(shape.heads) * shape.head_dim
        for which in MEASURES:
            if which == "host":
                calls = 50 if run.device.type == "cuda" else 2
                (times,) = host_times([steps[0]], 13, calls, lambda: synchronize(run.device))
                run.add(**key, measure=which, ms=quantiles(times[3:])["p50"] / 1e3)
                continue
            if which == "graph":
                if run.device.type != "cuda":
                    continue
                ms = time_calls([capture(steps[0])], run.device, run.rep) / CAPTURED
            else:
                ms = time_calls(list(steps), run.device, run.rep)
            run.add(**key, measure=which, ms=ms, share=run.copy_ms * size / ms)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def shrink(shape: Shape) -> Shape:
    return replace(
        shape, batch=min(shape.batch, 2), tokens=min(shape.tokens, 3), heads=(4, 2), head_dim=16,
        rotary_dim=shape.rotary_dim // 8, length=8, start=min(shape.start, 4),
    )  # fmt: skip


def missing(impl: str) -> str:
    """Return the name of a missing package that an implementation needs, or "" if there is none."""
    package = NEEDS.get(impl)
    return package if package is not None and importlib.util.find_spec(package) is None else ""


def main(
    workload: Annotated[str | None, typer.Option(help=f"Workloads: {', '.join(WORKLOADS)}. (default: all)")] = None,
    impl: Annotated[str | None, typer.Option(help=f"Implementations: {'; '.join(IMPLS)}. (default: all)")] = None,
    limit: Annotated[float, LIMIT] = 3600.0,
    rep: Annotated[int, typer.Option(min=1, help="GPU time per measurement, in milliseconds.")] = 60,
    out: Annotated[Path, OUT] = Path("scripts/results/benchmark-decode.csv"),
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Run with tiny sizes as a test, and write to runs/bench-smoke."),
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:
    """Measure the rotation and key-cache update in a decoding step. Each row is written to the CSV immediately."""
    where = choose_gpu(device, smoke)
    works = choose_in_order("--workload", workload, WORKLOADS, WORKLOADS)
    impls = choose_in_order("--impl", impl, IMPLS, IMPLS)
    console = Console(width=160, soft_wrap=True)
    run = Run(out, where, rep, time.monotonic() + limit, measured_on(where, commit), console, columns=COLUMNS)
    run.begin()
    run.measure_copy(2**16 if smoke else 2**30)
    for by, name in [(by, name) for by in impls for name in works]:
        shape = shrink(WORKLOADS[name]) if smoke else WORKLOADS[name]
        package = missing(by)
        if package or (by in WHOLE_HEADS and shape.rotary_dim != shape.head_dim):
            note = f"not installed: {package}" if package else "has no partial rotation"
            run.add(workload=name, impl=by, note=note)
            continue
        if time.monotonic() > run.deadline:
            console.print(f"stopped after {limit:g} s; finished rows are in {out}")
            break
        try:
            measure(run, name, shape, by)
        except Exception as error:  # for example, an unavailable kernel; continue with the next
            run.add(workload=name, impl=by, note=describe_error(error))
        release_memory(where)
        torch.compiler.reset()
    console.print(f"{len(run.rows)} rows in {out}", highlight=False)
