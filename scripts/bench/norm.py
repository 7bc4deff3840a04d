"""Benchmark rotation fused with a norm of q and k against a copy and PyTorch implementations, and write a CSV.

    lrpe-md bench norm                                  all workloads, over each head and over all heads
    lrpe-md bench norm --workload wan --over heads
    lrpe-md bench norm --impl "lrpe-md;norm, then lrpe-md" --limit 300

Times are medians of GPU time with a cold L2 cache. Calls are queued in advance and cycle through three copies of the
inputs. A share is the speed relative to a copy of 2 GiB in the same run, counting the bytes that must be moved. In
units of the size of q and k, the forward pass moves 2 (read and write), the backward pass moves 3 (it also reads the
outputs' gradients), and both together move 5. The pass "backward" computes the gradients of q, k and γ, and
"backward_omega" also computes the gradient of ω. Before timing, values and gradients of a small case are checked
against float64. Implementations with wrong results are not timed.
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
from torch.nn import functional as F

from lrpe_md import Grid, Norm, rotate
from lrpe_md.reference import angles, join_pairs, split_pairs

from ..common.cases import Case, check
from ..common.devices import choose_gpu
from ..common.options import LIMIT, OUT
from ..common.provenance import measured_on
from .linear_measure import Run, time_calls
from .measure import describe_error, release_memory
from .operators import choose_in_order

COLUMNS: tuple[str, ...] = (
    "workload", "over", "pass", "impl", "ms", "share", "gpu", "versions", "commit", "note",
)  # fmt: skip
PASSES = {"forward": 2, "backward": 3, "backward_omega": 3, "both": 5}  # minimum memory traffic, in units of q and k
OVER = {"head": "head", "heads": "heads"}
TURNS, EPS = 3, 1e-6
BF16 = torch.bfloat16
WORKLOADS = {
    "wan": Case("rotate", (21, 30, 52), 0, batch=1, heads=(40, 40), head_dim=128, dtype=BF16, pairs="interleaved"),
    "flux": Case("rotate", (64, 64), 512, batch=1, heads=(24, 24), head_dim=128, dtype=BF16, pairs="interleaved"),
    "qwen3": Case("rotate", (8192,), 0, batch=1, heads=(32, 8), head_dim=128, dtype=BF16, pairs="half"),
}


@dataclass
class Inputs:
    """Projections with the memory layout (B, N, H, D), and float32 weights as in training."""

    xs: tuple[Tensor, Tensor]
    grads: tuple[Tensor, Tensor]
    omega: Tensor
    weights: tuple[Tensor, Tensor]
    positions: Grid
    case: Case

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin tables (N, D/2) in float32."""
        theta = angles(self.positions.coordinates(self.omega.device), self.omega)[0]
        return theta.cos().float(), theta.sin().float()


Encode = Callable[[Inputs, tuple[Tensor, ...], Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    grid = Grid(case.shape, prefix=case.prefix)

    def draw() -> tuple[Tensor, Tensor]:
        sizes = [(case.batch, grid.num_tokens, heads, case.head_dim) for heads in case.heads]
        q, k = (torch.randn(size, device=device, dtype=case.dtype).transpose(1, 2) for size in sizes)
        return q, k

    omega = torch.randn(1, case.channels, len(case.shape), device=device)
    omega *= torch.logspace(0, -2, case.channels, device=device)[:, None]
    sizes = [(heads, case.head_dim) if case.norm_over == "heads" else (case.head_dim,) for heads in case.heads]
    w_q, w_k = (torch.rand(size, device=device) + 0.5 for size in sizes)
    return Inputs(draw(), draw(), omega, (w_q, w_k), grid, case)


# --- implementations -----------------------------------------------------------------------------------------------


def encode_fused(inputs: Inputs, xs: tuple[Tensor, ...], omega: Tensor, weights: Any) -> tuple[Tensor, ...]:
    norm, case = Norm("rms", weights, eps=EPS, over=inputs.case.norm_over), inputs.case
    q, k = xs
    return rotate(q, k, omega=omega, positions=inputs.positions, pairs=case.pairs, norm=norm)


def normalise(x: Tensor, weight: Tensor, over: str) -> Tensor:
    if over == "head":
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), EPS)
    flat = x.transpose(1, 2).flatten(2)
    normed = F.rms_norm(flat, flat.shape[-1:], weight.flatten().to(x.dtype), EPS)
    return normed.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)


def encode_after(inputs: Inputs, xs: tuple[Tensor, ...], omega: Tensor, weights: Any) -> tuple[Tensor, ...]:
    """Apply PyTorch's norm, and then lrpe-md's rotation."""
    q, k = (normalise(x, w, inputs.case.norm_over) for x, w in zip(xs, weights, strict=True))
    return rotate(q, k, omega=omega, positions=inputs.positions, pairs=inputs.case.pairs)


def build_plain(inputs: Inputs) -> Encode:
    """Compute everything in PyTorch, with precomputed tables."""
    cos, sin = inputs.cos_sin

    def encode(inputs: Inputs, xs: tuple[Tensor, ...], omega: Tensor, weights: Any) -> tuple[Tensor, ...]:
        ys = []
        for x, weight in zip(xs, weights, strict=True):
            a, b = split_pairs(normalise(x, weight, inputs.case.norm_over).float(), inputs.case.pairs)
            ys.append(join_pairs(a * cos - b * sin, a * sin + b * cos, inputs.case.pairs).to(x.dtype))
        return tuple(ys)

    return torch.compile(encode)


def build_liger(inputs: Inputs) -> Encode:
    """Apply Liger's RMSNorm, and then Liger's rotation in place."""
    liger_norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    liger_rotate = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    cos, sin = (torch.cat([t, t], dim=-1)[None].to(BF16) for t in inputs.cos_sin)

    def encode(inputs: Inputs, xs: tuple[Tensor, ...], omega: Tensor, weights: Any) -> tuple[Tensor, ...]:
        q, k = (
            liger_norm.apply(x.transpose(1, 2), w.to(x.dtype), EPS).transpose(1, 2)
            for x, w in zip(xs, weights, strict=True)
        )
        return liger_rotate(q, k, cos, sin)

    return encode


OURS, AFTER, COMPILED, PLAIN, LIGER = (
    "lrpe-md", "norm, then lrpe-md", "norm, then lrpe-md, compiled", "torch, compiled", "liger-kernel"
)  # fmt: skip
IMPLS: dict[str, Callable[[Inputs], Encode]] = {
    OURS: lambda inputs: encode_fused, AFTER: lambda inputs: encode_after,
    COMPILED: lambda inputs: torch.compile(encode_after), PLAIN: build_plain, LIGER: build_liger,
}  # fmt: skip


def takes(impl: str, case: Case) -> bool:
    return impl != LIGER or (case.norm_over == "head" and case.pairs == "half")


# --- passes --------------------------------------------------------------------------------------------------------


def make_pass(which: str, encode: Encode, inputs: Inputs) -> Callable[[], Any]:
    if which == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return encode(inputs, inputs.xs, inputs.omega, inputs.weights)

        return forward
    xs = tuple(x.detach().requires_grad_() for x in inputs.xs)
    weights = tuple(w.detach().requires_grad_() for w in inputs.weights)
    omega = inputs.omega.detach().requires_grad_(which == "backward_omega")
    wanted = [*xs, *weights, *([omega] if omega.requires_grad else [])]
    if which == "both":
        return lambda: torch.autograd.grad(encode(inputs, xs, omega, weights), wanted, inputs.grads)
    ys = encode(inputs, xs, omega, weights)
    return lambda: torch.autograd.grad(ys, wanted, inputs.grads, retain_graph=True)


def measure(run: Run, name: str, case: Case, impl: str) -> None:
    key = {"workload": name, "over": case.norm_over, "impl": impl}
    if impl == OURS:
        wrong = check(replace(shrink(case), norm_dtype=torch.float32, head_dim=case.head_dim), "auto", run.device)
        if wrong:
            run.add(**{**key, "pass": ""}, note="outside the budget: " + "; ".join(map(str, wrong))[:300])
            return
    inputs = [make_inputs(case, run.device) for _ in range(TURNS)]
    encode = IMPLS[impl](inputs[0])
    for which, elements in PASSES.items():
        if which == "backward_omega" and impl in (PLAIN, LIGER):
            continue
        ms = time_calls([make_pass(which, encode, each) for each in inputs], run.device, run.rep)
        size = elements * sum(x.numel() * x.element_size() for x in inputs[0].xs)
        run.add(**{**key, "pass": which}, ms=ms, share=run.copy_ms * size / ms)


def shrink(case: Case) -> Case:
    shape = {1: (12,), 2: (3, 4), 3: (2, 3, 4)}[len(case.shape)]
    return replace(case, shape=shape, prefix=min(case.prefix, 2), heads=(4, 2), head_dim=16)


def main(
    workload: Annotated[str | None, typer.Option(help=f"Workloads: {', '.join(WORKLOADS)}. (default: all)")] = None,
    over: Annotated[str | None, typer.Option(help=f"Scope of the norm: {', '.join(OVER)}. (default: both)")] = None,
    impl: Annotated[str | None, typer.Option(help=f"Implementations: {'; '.join(IMPLS)}. (default: all)")] = None,
    limit: Annotated[float, LIMIT] = 3600.0,
    rep: Annotated[int, typer.Option(min=1, help="GPU time per measurement, in milliseconds.")] = 60,
    out: Annotated[Path, OUT] = Path("scripts/results/benchmark-norm.csv"),
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run with tiny sizes as a test, and write to runs/bench-smoke.")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:  # fmt: skip
    """Benchmark lrpe-md's rotation after a norm, then other implementations. Each row is written to the CSV
    immediately.
    """
    where = choose_gpu(device, smoke)
    works = choose_in_order("--workload", workload, WORKLOADS, WORKLOADS)
    overs, impls = choose_in_order("--over", over, OVER, OVER), choose_in_order("--impl", impl, IMPLS, IMPLS)
    if importlib.util.find_spec("liger_kernel") is None:
        impls = [by for by in impls if by != LIGER]
    console = Console(width=160, soft_wrap=True)
    run = Run(out, where, rep, time.monotonic() + limit, measured_on(where, commit), console, columns=COLUMNS)
    run.begin()
    run.measure_copy(2**16 if smoke else 2**30)
    for by, name, what in [(by, name, what) for by in impls for name in works for what in overs]:
        kind: Any = what
        case = replace(WORKLOADS[name], norm="rms", norm_over=kind)
        case = shrink(case) if smoke else case
        if not takes(by, case):
            continue
        if time.monotonic() > run.deadline:
            console.print(f"stopped after {limit:g} s; finished rows are in {out}")
            break
        try:
            measure(run, name, case, by)
        except Exception as error:  # for example, out of memory; continue with the next
            run.add(workload=name, over=what, impl=by, note=describe_error(error))
        release_memory(where)
    console.print(f"{len(run.rows)} rows in {out}", highlight=False)
