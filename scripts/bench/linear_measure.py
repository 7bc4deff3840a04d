"""Workloads, inputs, passes, timing and CSV output for ``scripts.bench linear``."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from lrpe_md import Grid

from ..common.cases import LinearCase
from .measure import cold_times, quantiles

COLUMNS: tuple[str, ...] = (
    "workload", "map", "act", "normalizer", "mask", "pass", "impl", "ms", "share", "gpu", "versions", "commit", "note",
)  # fmt: skip
PASSES = {"forward": 4, "backward": 7, "backward_omega": 7}  # minimum memory traffic, in units of q's size
TURNS = 3
BF16 = torch.bfloat16
CAUSAL = LinearCase(
    shape=(8192,), prefix=0, batch=8, heads=(16, 16), head_dim=64, dtype=BF16, act="silu", normalizer="none",
    mask="causal",
)  # fmt: skip
# SANA-WM's attention: 11 frames of 23×40 tokens.
FRAMES = LinearCase(
    shape=(11, 23, 40), prefix=0, batch=1, heads=(20, 20), head_dim=112, dtype=BF16, mask="block", block=920,
    gate="float", pairs="interleaved",
)  # fmt: skip
DELTA = replace(FRAMES, rule="delta", decay="block")
WORKLOADS = {
    "vit224": LinearCase(shape=(14, 14), batch=256, heads=(12, 12), head_dim=64, dtype=BF16, layout="packed"),
    "img64": LinearCase(shape=(64, 64), prefix=0, batch=16, heads=(16, 16), head_dim=64, dtype=BF16),
    "video64": LinearCase(shape=(21, 30, 52), prefix=0, heads=(24, 24), head_dim=64, dtype=BF16),
    "video128": LinearCase(shape=(21, 30, 52), prefix=0, heads=(24, 24), head_dim=128, dtype=BF16),
    # Widths that are not powers of two, short windows, and a single head:
    "vit384": LinearCase(shape=(24, 24), batch=64, heads=(12, 12), head_dim=64, dtype=BF16, layout="packed"),
    "width72": LinearCase(shape=(27, 27), prefix=0, batch=32, heads=(16, 16), head_dim=72, dtype=BF16),
    "width80": LinearCase(shape=(16, 16), batch=128, heads=(16, 16), head_dim=80, dtype=BF16),
    "width96": LinearCase(shape=(16, 32, 32), prefix=0, batch=1, heads=(16, 16), head_dim=96, dtype=BF16),
    "width112": LinearCase(shape=(32, 32), prefix=0, batch=8, heads=(20, 20), head_dim=112, dtype=BF16),
    "windows": LinearCase(shape=(8, 8), prefix=0, batch=1024, heads=(6, 6), head_dim=32, dtype=BF16),
    "one-head": LinearCase(shape=(256, 256), prefix=0, batch=1, heads=(1, 1), head_dim=64, dtype=BF16),
    "causal": CAUSAL,
    "causal-plain": replace(CAUSAL, act="none"),
    # Causal attention with a normaliser, at other widths and lengths:
    "causal-relu": replace(CAUSAL, shape=(4096,), batch=4, act="relu", normalizer="unrotated"),
    "causal128": replace(CAUSAL, batch=2, head_dim=128, act="relu", normalizer="unrotated"),
    "causal128-long": replace(CAUSAL, shape=(32768,), batch=1, head_dim=128, act="relu", normalizer="unrotated"),
    "causal-decay": replace(CAUSAL, decay="head"),
    # Frame by frame: a sum, a sum with decay, and the delta rule.
    "frames": FRAMES,
    "frames-decay": replace(FRAMES, decay="block"),
    "frames-delta": DELTA,
    "frames-delta-both": replace(DELTA, directions="both"),
    "frames-long": replace(FRAMES, shape=(121, 23, 40)),
    "frames-decay-long": replace(FRAMES, shape=(121, 23, 40), decay="block"),
    "frames-delta-long": replace(DELTA, shape=(121, 23, 40)),
}
# Workloads of flash-bidirectional-linear-attention's README (B 8, H 16, D 64) and of its benchmark script (B 2).
BIDIRECTIONAL = {
    f"bidirectional-{num}{'' if batch == 8 else '-b2'}": LinearCase(
        shape=(num,), prefix=0, batch=batch, heads=(16, 16), head_dim=64, dtype=BF16
    )
    for batch in (8, 2)
    for num in (1024, 4096, 16384, 32768)
}
WORKLOADS |= BIDIRECTIONAL
# The same tokens and bytes as the workload before "-as-64", in heads of 64 channels:
AS_64 = {
    f"{name}-as-64": replace(case, heads=(case.heads[0] * case.head_dim // 64,) * 2, head_dim=64)
    for name, case in WORKLOADS.items()
    if name.startswith("width") or name == "windows"
}
WORKLOADS |= AS_64


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    omega: Tensor | None
    positions: Grid
    case: LinearCase
    memory: dict[str, Any] = field(default_factory=dict)  # gate, decay and rule

    @property
    def options(self) -> dict[str, Any]:
        case = self.case
        return {
            "act": case.act,
            "normalizer": case.normalizer,
            "is_causal": case.mask == "causal",
            "pairs": case.pairs,
            **self.memory,
        }


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
    return Inputs(q, k * case.key_scale, v, torch.randn_like(q), omega, grid, case, make_memory(case, device))


def make_memory(case: LinearCase, device: torch.device) -> dict[str, Any]:
    """Return a workload's memory arguments, such as β for each token, and g for each head or frame."""
    if case.decay == "none" and case.mask != "block":
        return {}
    memory: dict[str, Any] = {}
    heads = case.heads[1]
    if case.mask == "block":
        tokens = math.prod(case.shape)
        memory = {"block": case.block, "rule": case.rule, "directions": case.directions}
        memory["gate"] = torch.rand(case.batch, heads, tokens, device=device)
        if case.decay == "block":
            memory["decay"] = torch.rand(case.batch, heads, tokens // case.block, device=device) * 0.5 + 0.5
    if case.decay == "head":
        memory["decay"] = 1 - 2.0 ** (-5 - torch.arange(heads, device=device, dtype=torch.float32) % 8)
    return memory


def shrink(case: LinearCase) -> LinearCase:
    shape = {1: (12,), 2: (3, 4), 3: (2, 3, 4)}[len(case.shape)]
    block = math.prod(shape[1:]) if case.block else 0
    return replace(case, batch=1, heads=(2, 2), shape=shape, head_dim=16, block=block)


# --- passes ----------------------------------------------------------------------------------------------------------


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
    copy_ms: float = 0.0  # per byte read or written
    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: tuple[str, ...] = COLUMNS

    def begin(self) -> None:
        """Create the CSV and write its header."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writeheader()

    def add(self, **values: Any) -> None:
        """Append a row to the CSV."""
        row = {**values, **self.here}
        self.rows.append(row)
        with self.out.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)
        found = f"{row['ms']:.4f} ms  " if "ms" in row else ""
        found += f"{row['share']:.3f} of copy  " if "share" in row else ""
        key = self.columns[: self.columns.index("ms")]
        text = f"{' '.join(str(row.get(name)) for name in key)} {found}{row.get('note', '')}"
        self.console.print(text, highlight=False, markup=False)

    def time(self, inputs: Inputs, which: str, fns: list[Callable[[], Any]], **key: Any) -> None:
        """Time a pass, and append a row that includes the share of the copy's speed."""
        ms = time_calls(fns, self.device, self.rep)
        size = PASSES[which] * inputs.q.numel() * inputs.q.element_size()
        self.add(**{**key, "pass": which}, ms=ms, share=self.copy_ms * size / ms)

    def measure_copy(self, size: int) -> None:
        x = torch.ones(size, dtype=BF16, device=self.device)
        y = torch.empty_like(x)
        self.copy_ms = time_calls([lambda: y.copy_(x)], self.device, self.rep) / (2 * x.numel() * x.element_size())
