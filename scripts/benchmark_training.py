"""What an encoding costs in training: whole steps of ViTs and of a video transformer's layer, with and without it.

    python -m scripts.benchmark_training --models vit_b --modes compiled --out training.csv
    python -m scripts.benchmark_training --models vit_s,video --modes eager,compiled --profile --out training.csv

A step is the forward under bfloat16 autocast, the loss, the backward and a fused AdamW step. All models of a run are
resident, and take their steps in turn, in a new order each round; each step is compared with that of its baseline in
the same round. Every encoding is compared with the same model without it:

    none                 timm's ViT without positions; the video layer without positions
    learned              timm's ViT as it is, with its absolute table                           (compared with none)
    axial, mixed, cosine that ViT with `models.vit.adapt`: rotate on a fixed axial omega, rotate on an omega learned
                         for each layer and head, and the cosine map                            (compared with none)
    timm-none            timm's RoPE-ViT without its rope: a ViT with LayerScale, of timm's Eva (compared with none)
    timm-axial           timm's RoPE-ViT; in the video layer `apply_rot_embed_cat` with a table
                         for each token                             (compared with timm-none; in the layer with none)
    timm-mixed           timm's RoPE-ViT with learned frequencies                          (compared with timm-none)

Appends to the CSV, one row for each model, mode and encoding: quantiles of the time and of its ratio to the baseline,
the largest memory that one step takes with its own model alone, the host's time to issue a step (below the GPU's
where the GPU is the bottleneck), and the attention kernel that PyTorch took.
"""

from __future__ import annotations

import gc
import math
import platform
import random
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import timm
import torch
import typer
from rich.console import Console
from timm.layers.attention import Attention
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from lrpe_md import CosineMd, Grid, RotateMd
from models.vit import Context, LrpeAttention, adapt

from .benchmark_measure import device_events
from .common import choose, choose_device, git_commit, gpu_name, versions

COMPILE: dict[str, Any] = {"dynamic": False}
MODES = ("eager", "compiled")
WARMUP_ROUNDS = 3  # after a first step of each model, in which it compiles
HOST_STEPS = 5
KERNELS = 25  # of a step, in the table of --profile
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

# --- what is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ViT:
    """A ViT of timm's by three names: as it is, with axial and with mixed rope."""

    plain: str
    rope: str
    mixed: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: int = 128
    baselines: ClassVar = {
        "none": "none", "learned": "none", "timm-none": "none", "timm-axial": "timm-none", "timm-mixed": "timm-none",
        "axial": "none", "mixed": "none", "cosine": "none",
    }  # fmt: skip
    default = ("none", "timm-none", "timm-axial", "timm-mixed", "axial", "mixed")

    def build(self, encoding: str) -> nn.Module:
        if encoding.startswith("timm-"):
            name = self.mixed if encoding == "timm-mixed" else self.rope
            return timm.create_model(name, use_rot_pos_emb=encoding != "timm-none", **self.kwargs)
        if encoding == "learned":
            return timm.create_model(self.plain, **self.kwargs)
        model = timm.create_model(self.plain, pos_embed="none", **self.kwargs)
        if encoding == "none":
            return model
        if encoding == "mixed":
            return adapt(model, "mixed")
        return adapt(model, "cosine" if encoding == "cosine" else "rotate", encoding_kwargs={"base": 100.0})

    def inputs(self, model: Any, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        size = model.patch_embed.img_size
        images = torch.randn(batch, 3, *size, generator=generator, device=device)
        return images, torch.randint(model.num_classes, (batch,), generator=generator, device=device)

    def loss(self, out: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(out, labels)


class TimmRotary(nn.Module):
    """Rotary positions as timm applies them: a table of sines and cosines, the prefix by slice and cat."""

    table: Tensor

    def __init__(self, omega: Tensor, grid: Grid) -> None:
        super().__init__()
        theta = Grid(grid.shape).coordinates() @ omega[0].double().T
        theta = theta.float().repeat_interleave(2, -1)
        self.register_buffer("table", torch.cat([theta.sin(), theta.cos()], -1), persistent=False)

    def forward(self, *xs: Tensor, positions: Grid) -> tuple[Tensor, ...]:
        n = positions.prefix
        return tuple(
            torch.cat([x[:, :, :n], apply_rot_embed_cat(x[:, :, n:], self.table)], dim=2).type_as(x) for x in xs
        )


class VideoLayer(nn.Module):
    """timm's block on the tokens of a video: x (B, N, C) → (B, N, C)."""

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, encoding: nn.Module | None) -> None:
        super().__init__()
        self.grid = grid
        attention = Attention if encoding is None else LrpeAttention
        self.block = Block(num_heads * head_dim, num_heads, qkv_bias=True, attn_layer=attention)
        self.encoding = encoding

    def forward(self, x: Tensor) -> Tensor:
        if self.encoding is None:
            return self.block(x)
        context: Any = Context(self.encoding, self.grid, None)
        return self.block(x, context)


@dataclass(frozen=True)
class Video:
    """One layer of a video transformer, whose input takes a gradient as it does inside a model."""

    shape: tuple[int, int, int] = (21, 30, 52)
    prefix: int = 512
    num_heads: int = 24
    head_dim: int = 128
    batch: int = 2
    baselines: ClassVar = {"none": "none", "timm-axial": "none", "axial": "none", "mixed": "none", "cosine": "none"}
    default = ("none", "timm-axial", "axial", "mixed")

    def build(self, encoding: str) -> nn.Module:
        grid, head_dim = Grid(self.shape, prefix=self.prefix), self.head_dim
        module: nn.Module | None = None
        if encoding == "timm-axial":
            module = TimmRotary(RotateMd(head_dim, 3).get_omega(), grid)
        elif encoding == "axial":
            module = RotateMd(head_dim, 3)
        elif encoding == "mixed":
            module = RotateMd(head_dim, 3, frequencies="mixed", num_heads=self.num_heads, learnable=True)
        elif encoding == "cosine":
            module = CosineMd(head_dim, 3)
        return VideoLayer(grid, self.num_heads, head_dim, module)

    def inputs(self, model: Any, batch: int, device: torch.device) -> tuple[Tensor, None]:
        generator = torch.Generator(device).manual_seed(0)
        size = batch, model.grid.num_tokens, self.num_heads * self.head_dim
        return torch.randn(size, generator=generator, device=device).requires_grad_(), None

    def loss(self, out: Tensor, labels: Tensor | None) -> Tensor:
        return out.float().square().mean()


MODELS: dict[str, ViT | Video] = {
    "vit_b": ViT("vit_base_patch16_224", "vit_base_patch16_rope_224", "vit_base_patch16_rope_mixed_224"),
    "vit_s": ViT("vit_small_patch16_224", "vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224"),
    "video": Video(),
}


class Trainee:
    """A model with an optimizer and a batch of its own."""

    def __init__(
        self, workload: ViT | Video, encoding: str, mode: str, batch: int, backend: str, device: torch.device
    ) -> None:
        self.workload, self.device = workload, device
        self.raw = workload.build(encoding).to(device).train()
        self.model: Any = torch.compile(self.raw, **COMPILE) if mode == "compiled" else self.raw
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-4, fused=True)
        self.x, self.labels = workload.inputs(self.raw, batch, device)
        self.backend = BACKENDS.get(backend)

    def step(self) -> Tensor:
        attention = nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        with attention, torch.autocast(self.device.type, torch.bfloat16):
            loss = self.workload.loss(self.model(self.x), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.x.grad = None
        return loss.detach()

    def state_bytes(self) -> int:
        """What this model holds between its steps."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        tensors = [*self.raw.parameters(), *self.raw.buffers(), *states, self.x, self.labels]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
        return sum(storages.values())


# --- measurements ----------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_step(trainee: Trainee) -> Callable[[], float]:
    """Take a step; its milliseconds can be asked for once the device is done."""
    if trainee.device.type != "cuda":
        start = time.perf_counter()
        trainee.step()
        elapsed = 1000 * (time.perf_counter() - start)
        return lambda: elapsed
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    trainee.step()
    end.record()
    return lambda: begin.elapsed_time(end)


def time_rounds(trainees: dict[str, Trainee], device: torch.device, steps: int, limit: float) -> pd.DataFrame:
    """Milliseconds, a row for each round, in which every model takes one step."""
    order, rounds, start = random.Random(0), [], time.perf_counter()
    for _ in range(steps):
        # No synchronisation here: the host runs ahead, as it does in training.
        names = order.sample(list(trainees), len(trainees))
        rounds.append({name: time_step(trainees[name]) for name in names})
        if time.perf_counter() - start > limit:
            break
    synchronize(device)
    return pd.DataFrame([{name: row[name]() for name in trainees} for row in rounds])


def peak_bytes(trainee: Trainee) -> float:
    """The largest memory of a step, what the other models hold left out."""
    if trainee.device.type != "cuda":
        return math.nan
    torch.cuda.synchronize(trainee.device)
    torch.cuda.reset_peak_memory_stats(trainee.device)
    held = torch.cuda.memory_allocated(trainee.device)
    trainee.step()
    torch.cuda.synchronize(trainee.device)
    return torch.cuda.max_memory_allocated(trainee.device) - held + trainee.state_bytes()


def host_ms(trainee: Trainee) -> float:
    """Until a step is issued to an idle device."""
    times = []
    for _ in range(HOST_STEPS):
        synchronize(trainee.device)
        start = time.perf_counter()
        trainee.step()
        times.append(1000 * (time.perf_counter() - start))
    synchronize(trainee.device)
    return statistics.median(times)


def attention_backend(trainee: Trainee) -> str:
    """Which of PyTorch's attention kernels a step calls."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        trainee.step()
        synchronize(trainee.device)
    names = [event.name for event in prof.events() or ()]
    found = [re.search(r"::_scaled_dot_product_\w*?(flash|efficient|cudnn|math)", name) for name in names]
    return " ".join(sorted({match[1] for match in found if match}))


def kernel_times(trainee: Trainee) -> pd.DataFrame:
    """The CUDA kernels of a step with their calls and milliseconds, the slowest first."""
    events = [(event.name, event.time_range.elapsed_us() / 1000) for event in device_events(trainee.step)]
    table = pd.DataFrame(events, columns=["kernel", "ms"])
    table = table.groupby("kernel").agg(calls=("ms", "size"), ms=("ms", "sum")).reset_index()
    table["share"] = table.ms / table.ms.sum()
    return table.sort_values("ms", ascending=False, ignore_index=True).head(KERNELS)


def environment(commit: str | None, device: torch.device) -> dict[str, Any]:
    """Where the numbers come from."""
    found = versions("torch", "triton", "timm").items()
    return {
        "gpu": gpu_name(device) or f"none ({platform.machine()} CPU)",
        "versions": ", ".join(f"{name} {number}" if number else f"no {name}" for name, number in found),
        "commit": git_commit() if commit is None else commit,
    }


def compare(
    workload: ViT | Video, encodings: list[str], mode: str, batch: int, steps: int, limit: float, backend: str,
    profiling: bool, device: torch.device, console: Console,
) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:  # fmt: skip
    """A row for each encoding, and with ``profiling`` the kernels of a step of each."""
    torch.compiler.reset()
    gc.collect()
    trainees: dict[str, Trainee] = {}
    for name in encodings:
        start = time.perf_counter()
        trainees[name] = Trainee(workload, name, mode, batch, backend, device)
        trainees[name].step()
        synchronize(device)
        console.print(f"  {name}: built, first step after {time.perf_counter() - start:.1f} s", highlight=False)
    time_rounds(trainees, device, WARMUP_ROUNDS, math.inf)
    attention = {name: attention_backend(trainee) for name, trainee in trainees.items()}
    if len({attention[name] for name in trainees if name != "cosine"}) > 1:  # whose q and k are wider than v
        raise RuntimeError(f"attention: expected the same kernel for all, got {attention}; choose one by --backend")
    peak = {name: peak_bytes(trainee) for name, trainee in trainees.items()}
    host = {name: host_ms(trainee) for name, trainee in trainees.items()}
    ms = time_rounds(trainees, device, steps, limit)
    diverged = [name for name, trainee in trainees.items() if not trainee.step().isfinite()]
    if diverged:
        raise RuntimeError(f"the loss is not finite: {diverged}")

    rows = []
    for name in trainees:
        baseline = workload.baselines[name]
        ratio = ms[name] / ms[baseline]
        rows.append({
            "mode": mode, "encoding": name, "baseline": baseline, "batch": batch, "rounds": len(ms),
            **{f"ms_p{p}": ms[name].quantile(p / 100) for p in (20, 50, 80)},
            **{f"ratio_p{p}": ratio.quantile(p / 100) for p in (20, 50, 80)},
            "peak_gib": peak[name] / 2**30, "memory_ratio": peak[name] / peak[baseline], "host_ms": host[name],
            "attention": attention[name],
        })  # fmt: skip
    kernels = {name: kernel_times(trainee) for name, trainee in trainees.items()} if profiling else {}
    return pd.DataFrame(rows), kernels


# --- command line ----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False)


def with_baselines(workload: ViT | Video, wanted: list[str] | None) -> list[str]:
    """Those that this model has, and what they are compared with."""
    names = {name for name in wanted or workload.default if name in workload.baselines}
    for _ in range(2):  # timm-axial, timm-none, none
        names |= {workload.baselines[name] for name in names}
    return [name for name in workload.baselines if name in names]


def append(path: Path, rows: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        rows = pd.concat([pd.read_csv(path, keep_default_na=False, na_values=[""]), rows])
    rows.to_csv(path, index=False, float_format="%.6g")


def show(title: str, rows: pd.DataFrame) -> None:
    print(f"\n{title}\n{rows.to_string(index=False, float_format='{:.4g}'.format)}\n", flush=True)


@app.command()
def main(
    models: Annotated[str, typer.Option("--models", "--model", help=f"Any of {','.join(MODELS)}.")] = ",".join(MODELS),
    modes: Annotated[str, typer.Option(help=f"Any of {','.join(MODES)}.")] = ",".join(MODES),
    encodings: Annotated[str | None, typer.Option(help="Names; without it all but learned and cosine.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every model takes one step.")] = 60,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step. Without it 128, video 2.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no new round begins.")] = math.inf,
    backend: Annotated[str, typer.Option(help=f"Attention kernel: auto or one of {', '.join(BACKENDS)}.")] = "auto",
    profiling: Annotated[bool, typer.Option("--profile", help="Also list the CUDA kernels of a step of each.")] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    commit: Annotated[str | None, typer.Option(help="Recorded with the numbers; without it what git says.")] = None,
    out: Annotated[Path, typer.Option(help="CSV to add rows to; kernels go to NAME-kernels.csv beside it.")] = Path(
        "runs/training.csv"
    ),
) -> None:  # fmt: skip
    """Time training steps with each positional encoding and without any.

    Encodings: none, learned, axial, mixed, cosine, timm-none, timm-axial, timm-mixed; what they are compared with is
    added.
    """
    known = {name for workload in MODELS.values() for name in workload.baselines}
    wanted = None if encodings is None else choose("--encodings", encodings.split(","), sorted(known))
    choose("--backend", [backend], ("auto", *BACKENDS))
    on = choose_device(device)
    if profiling and on.type != "cuda":
        raise typer.BadParameter("--profile: lists CUDA kernels, but there is no GPU")
    chosen_modes = choose("--modes", modes.split(","), MODES)
    todo = {model: with_baselines(MODELS[model], wanted) for model in choose("--models", models.split(","), MODELS)}
    for model, names in todo.items():
        if not names:
            raise typer.BadParameter(f"--encodings: {model} has none of {encodings}")
    here = environment(commit, on)
    console = Console(soft_wrap=True)
    for model, names in todo.items():
        workload = MODELS[model]
        for mode in chosen_modes:
            console.print(f"{model}, {mode}: {', '.join(names)}", highlight=False)
            rows, kernels = compare(
                workload, names, mode, batch or workload.batch, steps, limit, backend, profiling, on, console
            )
            rows.insert(0, "model", model)
            append(out, rows.assign(**here))
            show(f"{model}, {mode}, {here['gpu']}", rows.drop(columns=["model", "mode"]))
            for name, table in kernels.items():
                append(
                    out.with_name(f"{out.stem}-kernels.csv"),
                    pd.DataFrame({"model": model, "mode": mode, "encoding": name, **table, **here}),
                )
                table["kernel"] = table.kernel.str.slice(0, 90)
                show(f"{model}, {mode}, {name}: kernels of a step", table)


if __name__ == "__main__":
    app()
