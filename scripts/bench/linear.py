"""How fast is linear attention, against the copy of a tensor, softmax attention and what torch can do? Writes a CSV.

    python -m scripts.bench linear                                the workloads, both maps and none, three passes
    python -m scripts.bench linear --workload vit224 --map cosine
    python -m scripts.bench linear --impl lrpe-md,SDPA --limit 300

Times are medians on the GPU's clock, with a cold L2 cache and the call queued beforehand, in turns on three copies of
the inputs. A share is that of a copy of 4·BHND elements forward (q, k and v read, o written) and 7·BHND backward (and
do; dq, dk, dv written), against a copy of 2 GiB timed in the same run. A wrong result is not timed: values and
gradients of one sample are held against float64 first.
"""

from __future__ import annotations

import csv
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lrpe_md import Grid, cosine, linear_attention, rotate
from lrpe_md.reference import activate
from lrpe_md.testing import LinearCase, check_linear

from ..common.provenance import measured_on
from .measure import cold_times, in_words, quantiles
from .operators import choose_in_order

COLUMNS: tuple[str, ...] = (
    "workload", "map", "act", "normalizer", "mask", "pass", "impl", "ms", "share", "gpu", "versions", "commit", "note",
)  # fmt: skip
PASSES = {"forward": 4, "backward": 7, "backward_omega": 7}  # and the elements that must move, in units of q's
MAPS: dict[str, Any] = {"cosine": "cosine", "rotate": "rotate", "none": None}
TURNS = 3
BF16 = torch.bfloat16
WORKLOADS = {
    "vit224": LinearCase(shape=(14, 14), batch=256, heads=(12, 12), head_dim=64, dtype=BF16, layout="packed"),
    "img64": LinearCase(shape=(64, 64), prefix=0, batch=16, heads=(16, 16), head_dim=64, dtype=BF16),
    "video64": LinearCase(shape=(21, 30, 52), prefix=0, heads=(24, 24), head_dim=64, dtype=BF16),
    "video128": LinearCase(shape=(21, 30, 52), prefix=0, heads=(24, 24), head_dim=128, dtype=BF16),
    "causal": LinearCase(
        shape=(8192,), prefix=0, batch=8, heads=(16, 16), head_dim=64, dtype=BF16, act="silu", normalizer="none",
        mask="causal",
    ),
}  # fmt: skip


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    omega: Tensor | None
    positions: Grid
    case: LinearCase

    @property
    def options(self) -> dict[str, Any]:
        case = self.case
        return {"act": case.act, "normalizer": case.normalizer, "is_causal": case.mask == "causal"}


Attend = Callable[[Inputs, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def make_inputs(case: LinearCase, device: torch.device) -> Inputs:
    grid = Grid(case.shape, prefix=case.prefix)
    size = (case.batch, grid.num_tokens, 3, case.heads[0], case.head_dim)
    if case.layout == "packed":
        q, k, v = torch.randn(size, device=device, dtype=case.dtype).permute(2, 0, 3, 1, 4)
    else:
        q, k, v = (torch.randn(size, device=device, dtype=case.dtype)[:, :, 0].transpose(1, 2) for _ in range(3))
        q, k, v = (t.contiguous() for t in (q, k, v))
    omega = None
    if case.map is not None:
        channels = case.head_dim if case.map == "cosine" else case.head_dim // 2
        omega = torch.randn(1, channels, len(case.shape), device=device)
        omega *= torch.logspace(0, -2, channels, device=device)[:, None]
    return Inputs(q, k, v, torch.randn_like(q), omega, grid, case)


# --- implementations -----------------------------------------------------------------------------------------------


def attend_fused(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, omega: Tensor | None) -> Tensor:
    positions = None if omega is None else inputs.positions
    return linear_attention(q, k, v, map=inputs.case.map, omega=omega, positions=positions, **inputs.options)


def attend_unfused(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, omega: Tensor | None) -> Tensor:
    """q̂ and k̂ by our kernels in memory, products in 16 bits."""
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
    """Without positions, by the first backend that takes it."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        return scaled_dot_product_attention(q, k, v, is_causal=inputs.case.mask == "causal")


OURS, SDPA, UNFUSED, COMPILED = "lrpe-md", "SDPA", "unfused", "unfused, compiled"
IMPLS: dict[str, Attend] = {
    OURS: attend_fused, SDPA: attend_by_softmax, UNFUSED: attend_unfused, COMPILED: attend_unfused
}  # fmt: skip


def takes(impl: str, case: LinearCase) -> bool:
    if impl == SDPA:
        return case.map is None
    return impl == OURS or case.mask == "full"


# --- passes --------------------------------------------------------------------------------------------------------


def make_pass(which: str, attend: Attend, inputs: Inputs) -> Callable[[], Any]:
    if which == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(inputs, inputs.q, inputs.k, inputs.v, inputs.omega)

        return forward
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    omega = inputs.omega
    if which == "backward_omega" and omega is not None:
        omega = omega.detach().requires_grad_()
    wanted = [q, k, v, *([omega] if omega is not None and omega.requires_grad else [])]
    o = attend(inputs, q, k, v, omega)
    return lambda: torch.autograd.grad(o, wanted, inputs.do, retain_graph=True)


def time_calls(fns: list[Callable[[], Any]], device: torch.device, rep: int) -> float:
    if device.type == "cuda":
        return quantiles(cold_times(fns, rep))["p50"]
    start = time.perf_counter()
    for fn in fns:
        fn()
    return 1e3 * (time.perf_counter() - start) / len(fns)


@dataclass
class Run:
    out: Path
    device: torch.device
    rep: int
    deadline: float
    here: dict[str, str]
    console: Console
    copy_ms: float = 0.0  # a byte read and written
    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: tuple[str, ...] = COLUMNS

    def begin(self) -> None:
        """The file, with its header alone."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writeheader()

    def add(self, **values: Any) -> None:
        """One row, on the disk at once."""
        row = {**values, **self.here}
        self.rows.append(row)
        with self.out.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)
        found = f"{row['ms']:.4f} ms, {row['share']:.3f} of copy" if "ms" in row else row.get("note", "")
        self.console.print(
            " ".join(str(row.get(name)) for name in self.columns[: self.columns.index("ms")]),
            found,
            highlight=False,
            markup=False,
        )

    def measure_copy(self, size: int) -> None:
        x = torch.ones(size, dtype=BF16, device=self.device)
        y = torch.empty_like(x)
        self.copy_ms = time_calls([lambda: y.copy_(x)], self.device, self.rep) / (2 * x.numel() * x.element_size())


def measure(run: Run, name: str, case: LinearCase, impl: str) -> None:
    key = {
        "workload": name, "map": case.map or "none", "act": case.act, "normalizer": case.normalizer, "mask": case.mask,
        "impl": impl,
    }  # fmt: skip
    if impl == OURS:
        small = replace(case, batch=1, heads=(2, 2))
        wrong = check_linear(small, "auto", run.device)
        if wrong:
            run.add(**{**key, "pass": ""}, note="outside the budget: " + "; ".join(map(str, wrong))[:300])
            return
    inputs = [make_inputs(case, run.device) for _ in range(TURNS)]
    attend: Any = torch.compile(IMPLS[impl]) if impl == COMPILED else IMPLS[impl]
    for which, elements in PASSES.items():
        if which == "backward_omega" and (case.map is None or impl != OURS):
            continue
        ms = time_calls([make_pass(which, attend, each) for each in inputs], run.device, run.rep)
        size = elements * inputs[0].q.numel() * inputs[0].q.element_size()
        run.add(**{**key, "pass": which}, ms=ms, share=run.copy_ms * size / ms)


def shrink(case: LinearCase) -> LinearCase:
    shape = {1: (12,), 2: (3, 4), 3: (2, 3, 4)}[len(case.shape)]
    return replace(case, batch=1, heads=(2, 2), shape=shape, head_dim=16)


def main(
    workload: Annotated[str | None, typer.Option(help=f"Of {', '.join(WORKLOADS)}; all where not given.")] = None,
    map: Annotated[str | None, typer.Option(help=f"Of {', '.join(MAPS)}; all where not given.")] = None,
    impl: Annotated[str | None, typer.Option(help=f"Of {'; '.join(IMPLS)}; all where not given.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no measurement starts.")] = 3600.0,
    rep: Annotated[int, typer.Option(min=1, help="Milliseconds of GPU time a measurement.")] = 60,
    out: Annotated[Path, typer.Option(help="The CSV.")] = Path("scripts/results/benchmark-linear.csv"),
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes: whether it runs, not how fast.")] = False,
    commit: Annotated[str | None, typer.Option(help="To record where the files are without their history.")] = None,
) -> None:  # fmt: skip
    """Measure linear attention, ours first. The CSV has every row as soon as it is known."""
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device: PyTorch has no {device} here")
    if device == "cpu" and not smoke:
        raise typer.BadParameter("--device cpu: only with --smoke; its times say nothing about a GPU")
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    works = choose_in_order("--workload", workload, WORKLOADS, WORKLOADS)
    maps, impls = choose_in_order("--map", map, MAPS, MAPS), choose_in_order("--impl", impl, IMPLS, IMPLS)
    console = Console(width=160, soft_wrap=True)
    run = Run(out, where, rep, time.monotonic() + limit, measured_on(where, commit), console)
    run.begin()
    run.measure_copy(2**16 if smoke else 2**30)
    plan = [(by, name, chosen) for by in impls for name in works for chosen in maps]
    for by, name, chosen in plan:
        case = replace(WORKLOADS[name], map=MAPS[chosen])
        case = shrink(case) if smoke else case
        if not takes(by, case):
            continue
        if time.monotonic() > run.deadline:
            console.print(f"stopped after {limit:g} s; finished rows are in {out}")
            break
        try:
            measure(run, name, case, by)
        except Exception as error:  # out of memory, a backend that refuses: the next can be measured
            run.add(workload=name, map=chosen, impl=by, mask=case.mask, note=in_words(error))
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()
    console.print(f"{len(run.rows)} rows in {out}", highlight=False)
