"""Timing, CSV output and accuracy checks for ``scripts.bench operators``."""

from __future__ import annotations

import csv
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from lrpe_md import Coordinates
from lrpe_md.testing import budget_violation, rounded_angles

from ..common.cases import Inputs, run
from .peers import OURS, Forward, Peer, large_inputs

PASSES = ("fwd", "bwd", "bwd_omega", "fwdbwd")
KEY = ("mode", "op", "workload", "omega", "peer", "variant", "dtype", "head_dim", "num_tokens", "num_axes")
COLUMNS: tuple[str, ...] = (*KEY, "p20", "p50", "p80", "min", "unit", "floor_bytes", "share", "in_budget", "note")
COPY = "same-size copy"
TURNS = 3  # number of input copies that calls cycle through
HERE: tuple[str, ...] = ("copy_gbps", "gpu", "python", "torch", "triton", "timm", "commit", "date")


class OutOfTime(Exception):
    """Raised when the time budget (--limit) is used up."""


def release_memory(device: torch.device) -> None:
    """Release cached memory on a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def cold_times(fns: Sequence[Callable[[], Any]], rep: int) -> list[float]:
    """Time calls with a cold L2 cache for about ``rep`` milliseconds, and return the GPU time of each call (ms).

    The function extends triton.testing.do_bench in two ways. First, the GPU spins between clearing the cache and the
    call, so that the host has queued the call before the GPU starts it, and times of short kernels exclude the launch
    latency. Second, calls cycle through the functions, each with its own tensors, because data that was loaded with an
    evict-last policy (as in torch.compile's code) stays in the cache.
    """
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for fn in fns:
        fn()
        fn()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    fns[0]()
    end.record()
    host_ms = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    spin = int(2e6 * (2 * host_ms + 0.1))  # GPU cycles at about 2 GHz
    events = []
    for i in range(max(10, min(200, int(rep / begin.elapsed_time(end))))):
        cache.zero_()
        torch.cuda._sleep(spin)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fns[i % len(fns)]()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def device_events(fn: Callable[[], Any]) -> list[Any]:
    """Return the GPU activities of a call (kernels, copies and fills) that the profiler reports."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        fn()
        torch.cuda.synchronize()
    return [
        event
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


@dataclass
class Session:
    """Settings and rows of one run."""

    out: Path
    device: torch.device
    deadline: float
    rep: int  # GPU time per measurement, in milliseconds
    time_inexact: bool
    here: dict[str, Any]
    console: Console
    turns: int = TURNS
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, (*COLUMNS, *HERE), lineterminator="\n").writeheader()

    def add(self, **values: Any) -> None:
        """Append a row to the CSV."""
        row = {**values, **self.here}
        self.rows.append(row)
        with self.out.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, (*COLUMNS, *HERE), lineterminator="\n").writerow(row)
        key = " ".join(str(values[k]) for k in KEY if values.get(k) not in (None, ""))
        found = f"{values['p50']:.4g} {values['unit']}" if "p50" in values else "-"
        share = f"   {values['share']:.3f} of copy" if values.get("share") is not None else ""
        self.console.print(f"{key}: {found}{share}   {values.get('note', '')}", highlight=False, markup=False)

    @contextmanager
    def attempt(self, **key: Any) -> Iterator[None]:
        """Run a measurement that may fail. If it fails, record the error as a row. Release the memory afterwards."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
        try:
            yield
        except OutOfTime:
            raise
        except Exception as error:
            self.add(**key, note=describe_error(error))
        finally:
            release_memory(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def gpu_time(self, *fns: Callable[[], Any]) -> dict[str, Any]:
        """Time calls in turn with a cold L2 cache, and return milliseconds. On a CPU, run each call only once."""
        if self.device.type == "cuda":
            return {**quantiles(cold_times(fns, self.rep)), "unit": "ms"}
        times = []
        fns[0]()
        for fn in fns:
            start = time.perf_counter()
            fn()
            times.append(1e3 * (time.perf_counter() - start))
        return {**quantiles(times), "unit": "ms"}

    def share(self, ms: float, floor_bytes: int) -> dict[str, Any]:
        """Return the speed at which ``floor_bytes`` were moved, as a share of the copy's speed in this run."""
        return {"floor_bytes": floor_bytes, "share": floor_bytes / ms / 1e6 / self.here["copy_gbps"]}

    def measure_copy(self, num_elements: int) -> None:
        """Measure the speed of a bfloat16 copy in GB/s, counting reads and writes, as a reference."""
        x = torch.ones(num_elements, dtype=torch.bfloat16, device=self.device)
        y = torch.empty_like(x)
        found = self.gpu_time(lambda: y.copy_(x))
        moved = 2 * x.numel() * x.element_size()
        self.here["copy_gbps"] = moved / found["p50"] / 1e6
        self.add(mode="copy", peer="copy", dtype="bfloat16", **found, **self.share(found["p50"], moved))


def describe_error(error: Exception) -> str:
    """Return the first line of an error, with file names instead of paths."""
    text = (str(error).strip() or "no message").splitlines()[0]
    text = re.sub(r"(?<!\S)(?:/[^/\s:,]+)*/(?=[^/\s:,])", "", text)
    return f"{type(error).__name__}: {text[:300]}"


def quantiles(times: list[float]) -> dict[str, Any]:
    p20, p50, p80, least = (float(v) for v in np.quantile(times, [0.2, 0.5, 0.8, 0.0]))
    return {"p20": p20, "p50": p50, "p80": p80, "min": least}


def describe(mode: str, workload: str, peer: str, inputs: Inputs, variant: str = "") -> dict[str, Any]:
    case = inputs.case
    return {
        "mode": mode, "op": case.map, "workload": workload, "omega": "shared" if case.omega_heads == 1 else "per-head",
        "peer": peer, "variant": variant, "dtype": str(case.dtype).removeprefix("torch."), "head_dim": case.head_dim,
        "num_tokens": inputs.xs[0].shape[2], "num_axes": len(case.shape),
    }  # fmt: skip


def floor_bytes(mode: str, inputs: Inputs) -> int:
    """Return the number of bytes that a pass must read and write.

    If x is the size of the inputs, cosine reads x and writes 2x in the forward pass, and reads 2x and writes x in the
    backward pass. rotate reads and writes x in both passes. The backward pass of an activation and the gradient of the
    frequencies each read x once more.
    """
    case = inputs.case
    one_way = 3 if case.map == "cosine" else 2
    extra = int(case.act != "none")
    elements = {"fwd": one_way, "bwd": one_way + extra, "bwd_omega": one_way + 1, "fwdbwd": 2 * one_way + extra}
    return elements[mode] * sum(x.numel() * x.element_size() for x in inputs.xs)


def time_copy(session: Session, modes: list[str], workload: str, inputs: Inputs) -> None:
    """Time a copy of the same number of bytes, because fixed overhead makes small copies slower than large ones."""
    for mode in modes:
        key = describe(mode, workload, COPY, inputs)
        with session.attempt(**key):
            size = floor_bytes(mode, inputs)
            x = torch.ones(size // 4, dtype=torch.bfloat16, device=session.device)
            y = torch.empty_like(x)
            found = session.gpu_time(lambda x=x, y=y: y.copy_(x))
            del x, y
            session.add(**key, **found, **session.share(found["p50"], size), in_budget=True)


# --- one peer --------------------------------------------------------------------------------------------------------


def scratch(peer: Peer, inputs: Inputs) -> Inputs:
    """Return the inputs, with the tensors that the peer overwrites replaced by clones."""
    if peer.overwrites == "nothing":
        return inputs
    xs, grads = inputs.xs, inputs.grads
    if peer.overwrites == "all":  # the peer overwrites inputs that are contiguous as (B, N, H, D)
        xs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
        xs = [x.clone() if x.data_ptr() == y.data_ptr() else x for x, y in zip(xs, inputs.xs, strict=True)]
    else:  # the peer copies q and k from a packed projection, but overwrites contiguous q and k
        xs = [x.clone() if x.transpose(1, 2).is_contiguous() else x for x in xs]
    return replace(inputs, xs=xs, grads=[g.clone() for g in grads])


def make_pass(mode: str, forward: Forward, inputs: Inputs) -> Callable[[], Any]:
    """Build a function to time. A backward pass calls torch.autograd.grad on a retained graph."""
    if mode == "fwd":
        xs = tuple(x.detach() for x in inputs.xs)
        omega = inputs.omega.detach()
        return lambda: forward(xs, omega)
    leaves = tuple(x.detach().requires_grad_() for x in inputs.xs)
    omega = inputs.omega.detach().requires_grad_(mode == "bwd_omega")
    wanted = [*leaves, omega] if mode == "bwd_omega" else list(leaves)
    if mode == "fwdbwd":
        return lambda: torch.autograd.grad(forward(leaves, omega), wanted, inputs.grads)
    ys = forward(leaves, omega)
    return lambda: torch.autograd.grad(ys, wanted, inputs.grads, retain_graph=True)


class Judge:
    """Check results against the error budget, using the first and last head of the first and last sample."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.samples = sorted({0, len(inputs.xs[0]) - 1})
        omega = inputs.omega[sorted({0, len(inputs.omega) - 1})]  # of the first and last head of the slice
        part = replace(
            inputs,
            xs=[*map(self.slice_corners, inputs.xs)],
            grads=[*map(self.slice_corners, inputs.grads)],
            omega=omega,
        )
        with rounded_angles():
            self.same = run(part, "reference", frequencies=False)
        self.exact = run(part.to(torch.float64), "reference", frequencies=False)

    def slice_corners(self, t: Tensor) -> Tensor:
        return t.detach()[self.samples][:, sorted({0, t.shape[1] - 1})]

    def add_omega(self) -> None:
        """Compute the exact gradient of omega over all samples. Process the samples in parts to save memory."""
        if "domega" in self.exact:
            return
        inputs = self.inputs
        assert not isinstance(inputs.positions, Coordinates) or inputs.positions.coords.ndim == 2
        with rounded_angles():
            self.same["domega"] = run(inputs, "reference")["domega"]
        total = torch.zeros_like(inputs.omega, dtype=torch.float64)
        size = max(1, 2**25 // inputs.xs[0][0].numel())
        parts = zip(*(t.split(size) for t in (*inputs.xs, *inputs.grads)), strict=True)
        for part in parts:
            xs, grads = list(part[: len(inputs.xs)]), list(part[len(inputs.xs) :])
            total += run(replace(inputs, xs=xs, grads=grads).to(torch.float64), "reference")["domega"]
        self.exact["domega"] = total

    def violations(self, peer: Peer, forward: Forward, mode: str) -> list[str]:
        """Run a pass on the inputs that will be timed, and return its violations of the error budget."""
        if mode == "bwd_omega":
            self.add_omega()
        names = [f"{'y' if mode == 'fwd' else 'dx'}{i}" for i in range(len(self.inputs.xs))]
        names += ["domega"] if mode == "bwd_omega" else []
        results = make_pass(mode, forward, scratch(peer, self.inputs))()
        judged = [
            budget_violation(
                k, t if k == "domega" else self.slice_corners(t), self.same[k], self.exact[k], self.inputs.case
            )
            for k, t in zip(names, results, strict=True)
        ]
        return [str(violation) for violation in judged if violation is not None]


def time_peer(
    session: Session, modes: list[str], workload: str, name: str, peer: Peer, inputs: Inputs, *, variant: str = "",
    judge: Judge | None = None, label: str | None = None,
) -> None:  # fmt: skip
    """Time all passes of a peer on one problem. If a pass violates the error budget, record only the violation."""
    case = inputs.case
    if peer.adapt is not None:
        inputs, judge = peer.adapt(inputs), None
    modes = [mode for mode in modes if mode != "bwd_omega" or peer.omega_grad]
    if not modes:
        return

    def key(mode: str) -> dict[str, Any]:
        return describe(label or mode, workload, name, inputs, variant)

    def copy() -> Inputs:
        made = large_inputs(case, session.device)
        return made if peer.adapt is None else peer.adapt(made)

    with session.attempt(**key(modes[0])):
        forward = peer.build(inputs)
        judge = judge or Judge(inputs)
        checks = {"fwd": ["fwd"], "fwdbwd": ["fwd", "bwd"]}
        wanted = {check for mode in modes for check in checks.get(mode, [mode])}
        wrong = {check: judge.violations(peer, forward, check) for check in sorted(wanted)}
        del judge
        turns = [inputs, *(copy() for _ in range(session.turns - 1))]
        for mode in modes:
            found_wrong = [text for check in checks.get(mode, [mode]) for text in wrong[check]]
            note = "; ".join([*([peer.note] if peer.note else []), *found_wrong])
            in_budget = not found_wrong
            if not in_budget and (name == OURS or not session.time_inexact):
                session.add(**key(mode), in_budget=False, note=note)
                continue
            with session.attempt(**key(mode)):
                fns = [make_pass(mode, forward, scratch(peer, own)) for own in turns]
                found = session.gpu_time(*fns)
                del fns
                share = session.share(found["p50"], floor_bytes(mode, inputs))
                session.add(**key(mode), **found, **share, in_budget=in_budget, note=note)
    if peer.compiled:
        torch.compiler.reset()
