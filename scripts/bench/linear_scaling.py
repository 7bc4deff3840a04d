"""Measure training steps of this project's backbones with softmax and linear attention as the number of tokens grows.

    lrpe-md bench linear-scaling                         four backbones, 256 to 262,144 tokens
    lrpe-md bench linear-scaling --backbones vit --tokens 4096,65536 --compiled --append

As in ``scripts.bench training``, a step consists of forward under bfloat16 autocast, loss, backward, and fused AdamW.
The backbones are the ViT on square images, the video transformer, and the DiT without text. All have few blocks, a
width of 768 and head_dim 64, except dit-xl, which has the width and head_dim of DiT-XL (1,152 and 72). A batch has
65,536 tokens, or a single sample if one sample has more tokens. If a step runs out of memory, it is repeated with
activation checkpointing, and a note is added to the row. Each row contains the median milliseconds, tokens per second
and peak memory of a step, and is saved immediately. A measurement is skipped with a note if it runs out of memory or is
expected to take more than --cap seconds.
"""

from __future__ import annotations

import csv
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md.integrations.timm import LrpeVisionTransformer

from ...models.dit import DiT
from ...models.video import LrpeVideoTransformer
from ..common.devices import choose_gpu
from ..common.options import OUT, choose, positive
from ..common.provenance import measured_on
from .measure import describe_error, release_memory
from .training import BACKENDS, Trainee, peak_bytes, synchronize, time_step

COLUMNS: tuple[str, ...] = (
    "backbone", "tokens", "batch", "attention", "map", "mode", "ms", "tokens_per_s", "peak_gib", "gpu", "versions",
    "commit", "note",
)  # fmt: skip
TOKENS = (256, 1024, 4096, 16384, 65536, 262144)
TOKENS_A_STEP = 65536
ATTENTIONS = {"softmax rotate": ("softmax", "rotate"), "linear cosine": ("linear", "cosine"),
              "linear rotate": ("linear", "rotate")}  # fmt: skip
ONCE = 3.0  # seconds; a step that is expected to take longer is timed once
RECOMPUTED, NO_ROOM = "blocks recomputed", "does not fit into memory"


@dataclass(frozen=True)
class Sizes:
    embed_dim: int = 768
    num_heads: int = 12
    depth: int = 4


SMALL = Sizes(32, 2, 1)


@dataclass(frozen=True)
class Scaled:
    """Backbone with a fixed number of tokens, wrapped as a workload for :class:`.training.Trainee`."""

    tokens: int
    sizes: Sizes
    recomputed: bool = False

    def build(self, encoding: str) -> nn.Module:
        """Build the model. ``encoding`` is one of ATTENTIONS."""
        attention, chosen = ATTENTIONS[encoding]
        sizes: dict[str, Any] = vars(self.sizes)
        model: Any = self.make(encoding=chosen, attention=attention, **sizes)
        if self.recomputed:
            if isinstance(model, DiT):
                model.grad_checkpointing = True
            else:
                model.set_grad_checkpointing()
        return model

    def make(self, **arguments: Any) -> nn.Module:
        raise NotImplementedError  # subclasses define it

    def sample_size(self) -> tuple[int, ...]:
        """Return the size of one sample."""
        raise NotImplementedError

    def inputs(self, model: Any, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.randn(batch, *self.sample_size(), device=device),)

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        return F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long, device=x.device))


def near_square(num: int, axes: int) -> tuple[int, ...]:
    """Factor a power of 2 into ``axes`` sizes. They are in ascending order, and differ by at most a factor of 2."""
    powers = round(math.log2(num))
    return tuple(2 ** ((powers + i) // axes) for i in range(axes))


class Images(Scaled):
    def sample_size(self) -> tuple[int, ...]:
        return 3, *(16 * n for n in near_square(self.tokens, 2))

    def make(self, **arguments: Any) -> nn.Module:
        return LrpeVisionTransformer(img_size=self.sample_size()[1:], patch_size=16, **arguments)


class Videos(Scaled):
    def sample_size(self) -> tuple[int, ...]:
        frames, height, width = near_square(self.tokens, 3)
        return 3, 2 * frames, 16 * height, 16 * width

    def make(self, **arguments: Any) -> nn.Module:
        _, frames, *size = self.sample_size()
        return LrpeVideoTransformer(img_size=tuple(size), patch_size=16, num_frames=frames, **arguments)  # pyright: ignore


class Latents(Scaled):
    def sample_size(self) -> tuple[int, ...]:
        return 4, *(2 * n for n in near_square(self.tokens, 2))

    def make(self, **arguments: Any) -> nn.Module:
        return DiT(in_chans=4, patch_size=2, **arguments)

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        return (model(x, torch.full((len(x),), 0.5, device=x.device)) - x).float().square().mean()


BACKBONES: dict[str, type[Scaled]] = {"vit": Images, "video": Videos, "dit": Latents, "dit-xl": Latents}
SIZES = {"dit-xl": Sizes(1152, 16)}  # other backbones have the default sizes


@dataclass
class Run:
    """Settings and rows of a run."""

    out: Path
    device: torch.device
    mode: str
    backend: str
    steps: int
    cap: float
    here: dict[str, str]
    console: Console
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        """Append a row to the CSV."""
        row = {**values, "mode": self.mode, **self.here}
        self.rows.append(row)
        with self.out.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
        numbers = [f"{row[name]:.4g} {name}" for name in ("ms", "tokens_per_s", "peak_gib") if name in row]
        key = " ".join(str(row[name]) for name in COLUMNS[:6])
        self.console.print(f"{key}: {', '.join(numbers)} {row.get('note', '')}", highlight=False, markup=False)


def measure_steps(run: Run, trainee: Trainee, expected: float) -> tuple[float, float]:
    """Return the milliseconds and peak bytes of a step that is expected to take ``expected`` seconds."""
    if expected < ONCE:
        trainee.step()
    synchronize(run.device)
    start = time.perf_counter()
    peak = peak_bytes(trainee)
    synchronize(run.device)
    seconds = time.perf_counter() - start
    if seconds > ONCE:
        return 1e3 * seconds, peak
    number = max(1, min(run.steps, int(run.cap / max(seconds, 1e-4))))
    waiting = [time_step(trainee) for _ in range(number)]
    synchronize(run.device)
    return statistics.median(each() for each in waiting), peak


def measure(run: Run, workload: Any, attention: str, batch: int, expected: float) -> dict[str, Any]:
    """Measure the values for one row, release all memory, and return the values."""
    backend = run.backend if run.device.type == "cuda" else "auto"
    found: dict[str, Any] = {}
    trainee = None
    try:
        trainee = Trainee(workload, attention, run.mode, batch, backend, run.device)
        ms, peak = measure_steps(run, trainee, expected)
        found = {"ms": ms, "tokens_per_s": 1e3 * batch * workload.tokens / ms, "peak_gib": peak / 2**30}
    except torch.OutOfMemoryError:
        found = {"note": NO_ROOM}
    except Exception as error:  # for example, an unsupported backend; continue with the next
        found = {"note": describe_error(error)}
    del trainee
    if run.mode == "compiled":
        torch.compiler.reset()
    release_memory(run.device)
    return found


def measure_sizes(run: Run, name: str, attention: str, sizes: list[int], model: Sizes, deadline: float) -> bool:
    """Measure a backbone with increasing numbers of tokens, and return whether there was enough time."""
    expected, recomputed, before = 0.0, False, 0
    for tokens in sizes:
        if time.monotonic() > deadline:
            return False
        batch = max(1, TOKENS_A_STEP // tokens) if model != SMALL else 1
        kind, chosen = ATTENTIONS[attention]
        key = {"backbone": name, "tokens": tokens, "batch": batch, "attention": kind, "map": chosen}
        work = batch * tokens ** (2 if kind == "softmax" else 1)
        expected = expected * work / before if before else 0.0
        before = work
        if expected * (1 if expected > ONCE else 2) > run.cap:
            run.add(**key, note=f"left out: a step is expected to take {expected:.3g} s")
            continue
        found: dict[str, Any] = {"note": NO_ROOM}
        if not recomputed:
            found = measure(run, BACKBONES[name](tokens, model), attention, batch, expected)
        if found.get("note") == NO_ROOM:
            recomputed = True
            found = measure(run, BACKBONES[name](tokens, model, True), attention, batch, expected)
            found.setdefault("note", RECOMPUTED)
        run.add(**key, **found)
        expected = found["ms"] / 1e3 if "ms" in found else expected
    return True


def main(
    backbones: Annotated[str, typer.Option(help="Backbones, separated by commas.")] = ",".join(BACKBONES),
    tokens: Annotated[str, typer.Option(help="Tokens per sample, as powers of 2.")] = ",".join(map(str, TOKENS)),
    attention: Annotated[str, typer.Option(help="Attention kinds, separated by commas.")] = ",".join(ATTENTIONS),
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Use torch.compile, which adds about 30 seconds per row.")
    ] = False,
    backend: Annotated[str, typer.Option(help=f"Softmax backend, one of: auto, {', '.join(BACKENDS)}.")] = "flash",
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps per row.")] = 5,
    cap: Annotated[float, typer.Option(callback=positive, help="Time limit per row, in seconds.")] = 15.0,
    limit: Annotated[
        float, typer.Option(callback=positive, help="Time budget in seconds; once it runs out, no new row starts.")
    ] = 3600.0,
    out: Annotated[Path, OUT] = Path("scripts/results/linear-scaling.csv"),
    append: Annotated[bool, typer.Option("--append", help="Append to the CSV instead of replacing it.")] = False,
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Use a tiny model and a batch size of 1, and write to runs/bench-smoke.")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:  # fmt: skip
    """Time training steps of softmax and linear attention at increasing numbers of tokens."""
    where = choose_gpu(device, smoke)
    names = choose("--backbones", backbones.split(","), BACKBONES)
    kinds = choose("--attention", attention.split(","), ATTENTIONS)
    choose("--backend", [backend], ("auto", *BACKENDS))
    sizes = sorted(map(int, tokens.split(",")))
    if any(n < 1 or n & (n - 1) for n in sizes):
        raise typer.BadParameter(f"--tokens: expected powers of 2, got {tokens}")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not (append and out.exists()):
        with out.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()
    console = Console(width=160, soft_wrap=True)
    mode = "compiled" if compiled else "eager"
    run = Run(out, where, mode, backend, steps, cap, measured_on(where, commit), console)
    deadline = time.monotonic() + limit
    for name, kind in [(name, kind) for name in names for kind in kinds]:
        model = SMALL if smoke else SIZES.get(name, Sizes())
        if not measure_sizes(run, name, kind, sizes, model, deadline):
            console.print(f"stopped after {limit:g} s; finished rows are in {out}")
            break
    console.print(f"{len(run.rows)} rows in {out}", highlight=False)
