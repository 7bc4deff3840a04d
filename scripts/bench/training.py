"""Measure how much time and memory encodings add to training steps of ViTs, a video layer, and other models.

    lrpe-md bench training --models vit_b --modes compiled --out training.csv
    lrpe-md bench training --models vit_s --modes eager,compiled,graphs --profile --out training.csv
    lrpe-md bench training --models vit_b,vit_b_1024 --modes compiled --encodings axial,linear-cosine
    lrpe-md bench training --models image,video_model,dit --out scripts/results/backbones.csv
    lrpe-md bench training --models dit --encodings rotate,rotate-norms-first
    lrpe-md bench training --models wan,qwen3 --modes eager,compiled,inference --out adapted.csv
    lrpe-md bench training --models wan,qwen3 --encodings adapted,adapted-other --other ../old-checkout

A step consists of forward under bfloat16 autocast, loss, backward and fused AdamW. The modes are eager, compiled, and
graphs (forward and backward as CUDA graphs). "inference" and "inference-compiled" run only the forward pass. All models
of a run stay in memory and take turns, in a new order each round. Each step is compared with the step of the baseline
in the same round. The baseline is the same model without the encoding. The models vit_b, vit_b_1024 (at 1,024 pixels),
vit_s (timm's ViTs) and video (a layer of a video transformer) have these encodings:

    none                 timm's ViT without positions; the video layer without positions
    learned              timm's ViT as it is, with its absolute table                           (compared with none)
    axial, mixed, cosine that ViT with `models.vit.adapt`: rotate on a fixed axial omega, rotate on an omega learned
                         for each layer and head, and the cosine map                            (compared with none)
    axial-again, ...     the same three in ViTs with `keep_encoded=False`                      (compared with none)
    timm-none            timm's RoPE-ViT without its rope: an Eva ViT with LayerScale           (compared with none)
    timm-axial           timm's RoPE-ViT; in the video layer `apply_rot_embed_cat` with a table
                         for each token                             (compared with timm-none; in the layer with none)
    timm-mixed           timm's RoPE-ViT with learned frequencies                          (compared with timm-none)

image, video_model and dit are the models of `train image`, `train video` and `train diffusion` with their default sizes
and losses, on random data. The batches are eight times larger, to keep a GPU busy. The encodings are those of the
training commands, and "none" is their baseline. dit also has rotate-norms-first, which normalises q and k in separate
launches.

wan, flux, qwen_image, hunyuan_video, ltx, qwen3, llama, dinov3, eva02 and rope_mixed are diffusers, transformers and
timm models with random bfloat16 weights, published widths and few layers. The variants are stock, adapted (with
`adapt_rotary`, compared with stock) and adapted-other (with `adapt_rotary` from another checkout).

The command appends a row to the CSV for each model, mode and encoding. The row contains:

    tokens               patches of a step
    ms_p*, ratio_p*      quantiles of the step time, and of its ratio to the baseline
    peak_gib             peak memory of a step, excluding the other models
    host_ms              host time to issue a step; less than the GPU time if the GPU is the bottleneck
    attention            PyTorch's attention kernel
    graph_breaks         number of graph breaks
"""

from __future__ import annotations

import gc
import math
import random
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from ..common.devices import choose_device
from ..common.options import choose, group_options, positive
from ..common.provenance import measured_on
from ..train.encodings import split_list, split_options
from .hosted import HOSTED, Hosted, import_checkout
from .measure import device_events
from .training_models import MODELS as OURS
from .training_models import Workload as Ours

COMPILE: dict[str, dict[str, Any]] = {
    "compiled": {"dynamic": False},
    "graphs": {"dynamic": False, "mode": "reduce-overhead"},
    "inference-compiled": {"dynamic": False},
}
INFERENCE = ("inference", "inference-compiled")
MODES = ("eager", "compiled", "graphs", *INFERENCE)
Workload = Ours | Hosted
MODELS: dict[str, Workload] = {**OURS, **HOSTED}
WARMUP_ROUNDS = 3  # in addition to two steps of each model
HOST_STEPS = 5
KERNELS = 25  # number of rows in the --profile table
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Trainee:
    """Model with an optimiser and a fixed batch."""

    def __init__(
        self, workload: Workload, encoding: str, mode: str, batch: int, backend: str, device: torch.device
    ) -> None:
        self.workload, self.mode, self.device = workload, mode, device
        self.learning = mode not in INFERENCE
        # Initialising billions of weights is slow on a CPU.
        with device if isinstance(workload, Hosted) else nullcontext():
            self.raw = workload.build(encoding)
        self.raw = self.raw.to(device).train(self.learning)
        self.model: Any = torch.compile(self.raw, **COMPILE[mode]) if mode in COMPILE else self.raw
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-4, fused=True)
        self.inputs = workload.inputs(self.raw, batch, device)
        self.backend = BACKENDS.get(backend)

    def step(self) -> Tensor:
        if self.mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        attention = nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=not isinstance(self.workload, Hosted))
        with attention, autocast, torch.set_grad_enabled(self.learning):
            loss = self.workload.loss(self.model, *self.inputs)
        if not self.learning:
            return loss
        loss.backward()
        self.optimizer.step()
        # The CUDA graphs of all models share a memory pool, so no tensor from a graph may outlive the step. The loss is
        # computed outside of the graphs.
        self.optimizer.zero_grad(set_to_none=True)
        for x in self.inputs:
            x.grad = None
        return loss.detach()

    def state_bytes(self) -> int:
        """Return the number of bytes that a model occupies between steps."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        tensors = [*self.raw.parameters(), *self.raw.buffers(), *states, *self.inputs]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


# --- measurements ----------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_step(trainee: Trainee) -> Callable[[], float]:
    """Run a step, and return a function that reads its time in milliseconds once the device has finished."""
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
    """Return step times in milliseconds, with a row for each round. In a round, every model takes one step."""
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
    """Return the peak memory of a step, excluding the other models, or NaN without a GPU."""
    if trainee.device.type != "cuda":
        trainee.step()
        return math.nan
    torch.cuda.synchronize(trainee.device)
    torch.cuda.reset_peak_memory_stats(trainee.device)
    held = torch.cuda.memory_allocated(trainee.device)
    trainee.step()
    torch.cuda.synchronize(trainee.device)
    return torch.cuda.max_memory_allocated(trainee.device) - held + trainee.state_bytes()


def host_ms(trainee: Trainee) -> float:
    """Return the milliseconds that the host takes to issue a step to an idle device."""
    times = []
    for _ in range(HOST_STEPS):
        synchronize(trainee.device)
        start = time.perf_counter()
        trainee.step()
        times.append(1000 * (time.perf_counter() - start))
    synchronize(trainee.device)
    return statistics.median(times)


def observed_step(trainee: Trainee) -> tuple[str, float]:
    """Run a step, and return PyTorch's attention kernel in that step and the step's :func:`peak_bytes`.

    Call this for the second step. The first step compiles, and CUDA graph replay hides calls and allocations from the
    third step on.
    """
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        peak = peak_bytes(trainee)
        synchronize(trainee.device)
    names = [event.name for event in prof.events() or ()]
    found = [re.search(r"::_scaled_dot_product_\w*?(flash|efficient|cudnn|math)", name) for name in names]
    return " ".join(sorted({match[1] for match in found if match})), peak


def kernel_times(trainee: Trainee) -> pd.DataFrame:
    """Return each CUDA kernel in a step with its number of calls and its milliseconds, slowest first."""
    events = [(event.name, event.time_range.elapsed_us() / 1000) for event in device_events(trainee.step)]
    table = pd.DataFrame(events, columns=["kernel", "ms"])
    table = table.groupby("kernel").agg(calls=("ms", "size"), ms=("ms", "sum")).reset_index()
    table["share"] = table.ms / table.ms.sum()
    return table.sort_values("ms", ascending=False, ignore_index=True).head(KERNELS)


@dataclass(frozen=True)
class Timing:
    """Timing settings. Each round runs one step per model, and rounds repeat until ``limit`` seconds have passed."""

    steps: int
    limit: float
    backend: str
    profiling: bool
    device: torch.device
    console: Console


def compare(
    workload: Workload, encodings: list[str], mode: str, batch: int, timing: Timing
) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """Return a row for each encoding and, with ``profiling``, the kernels in a step of each encoding."""
    device = timing.device
    torch.compiler.reset()
    gc.collect()
    trainees: dict[str, Trainee] = {}
    attention: dict[str, str] = {}
    peak: dict[str, float] = {}
    skipped = counters["inductor"]["cudagraph_skips"]
    breaks: dict[str, int] = {}
    for name in encodings:
        start = time.perf_counter()
        counters["graph_break"].clear()
        trainees[name] = Trainee(workload, name, mode, batch, timing.backend, device)
        trainees[name].step()
        synchronize(device)
        timing.console.print(f"  {name}: built, first step after {time.perf_counter() - start:.1f} s", highlight=False)
        attention[name], peak[name] = observed_step(trainees[name])
        breaks[name] = len(counters["graph_break"])
        if mode == "graphs" and device.type == "cuda" and counters["inductor"]["cudagraph_skips"] > skipped:
            raise RuntimeError(
                f"CUDA graphs: PyTorch did not use them for {name}; set TORCH_LOGS=perf_hints to see why"
            )
    # With the cosine map, q and k are wider than v, so PyTorch uses other kernels. Linear attention uses none of them.
    if len({attention[name] for name in trainees if not name.startswith(("cosine", "linear"))}) > 1:
        raise RuntimeError(
            f"attention: expected the same kernel for all models, got {attention}; choose one with --backend"
        )
    time_rounds(trainees, device, WARMUP_ROUNDS, math.inf)
    host = {name: host_ms(trainee) for name, trainee in trainees.items()}
    ms = time_rounds(trainees, device, timing.steps, timing.limit)
    diverged = [name for name, trainee in trainees.items() if not trainee.step().isfinite()]
    if diverged:
        raise RuntimeError(f"the loss is not finite: {diverged}")

    rows = []
    for name in trainees:
        baseline = workload.baselines[split_options(name)[0]]
        ratio = ms[name] / ms[baseline]
        rows.append({
            "mode": mode, "encoding": name, "baseline": baseline, "batch": batch,
            "tokens": workload.tokens(trainees[name].raw, batch), "rounds": len(ms),
            **{f"ms_p{p}": ms[name].quantile(p / 100) for p in (20, 50, 80)},
            **{f"ratio_p{p}": ratio.quantile(p / 100) for p in (20, 50, 80)},
            "peak_gib": peak[name] / 2**30, "memory_ratio": peak[name] / peak[baseline], "host_ms": host[name],
            "attention": attention[name], "graph_breaks": breaks[name],
        })  # fmt: skip
    kernels = {name: kernel_times(trainee) for name, trainee in trainees.items()} if timing.profiling else {}
    return pd.DataFrame(rows), kernels


# --- command line ----------------------------------------------------------------------------------------------------


def with_baselines(workload: Workload, wanted: list[str] | None) -> list[str]:
    """Return the selected encodings that the model supports, and their baselines."""
    known = workload.baselines
    names = {name for name in wanted or workload.default if split_options(name)[0] in known}
    for _ in range(2):  # a baseline may have a baseline: timm-axial, timm-none, none
        names |= {known[split_options(name)[0]] for name in names}
    return sorted(names, key=lambda name: (list(known).index(split_options(name)[0]), name))


def import_other(other: Path | None, is_used: bool) -> None:
    """Import the checkout of --other for adapted-other. Raise an error if only one of the two options is passed."""
    if is_used and other is None:
        raise typer.BadParameter("--encodings: adapted-other needs --other, a checkout of a different version")
    if other is not None:
        if not is_used:
            raise typer.BadParameter("--other: only adapted-other uses it; add adapted-other to --encodings")
        Hosted.other = import_checkout(other)


def append(path: Path, rows: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        rows = pd.concat([pd.read_csv(path, keep_default_na=False, na_values=[""]), rows])
    rows.to_csv(path, index=False, float_format="%.6g")


def show(title: str, rows: pd.DataFrame) -> None:
    print(f"\n{title}\n{rows.to_string(index=False, float_format='{:.4g}'.format)}\n", flush=True)


PANELS = {"What is measured": "models modes encodings steps batch backend", "Other checkout": "other"}


@group_options(PANELS)
def main(
    models: Annotated[
        str, typer.Option("--models", "--model", help=f"Models: {', '.join(MODELS)}.")
    ] = "vit_b,vit_s,video",
    modes: Annotated[str, typer.Option(help=f"Modes: {', '.join(MODES)}.")] = "eager,compiled",
    encodings: Annotated[
        str | None, typer.Option(help="Encodings, as NAME or NAME:KEY=VALUE,... (default: depends on the model)")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of rounds; every model takes one step per round.")] = 60,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. (default: depends on the model)")] = None,
    limit: Annotated[
        float, typer.Option(callback=positive, help="Time budget in seconds; once it runs out, no new round starts.")
    ] = math.inf,
    backend: Annotated[str, typer.Option(help=f"Attention kernel, one of: auto, {', '.join(BACKENDS)}.")] = "auto",
    profiling: Annotated[
        bool, typer.Option("--profile", help="Also list the CUDA kernels of one step per model.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto (cuda if available).")] = "auto",
    other: Annotated[
        Path | None, typer.Option(help="Another checkout of this repository, for adapted-other.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
    out: Annotated[Path, typer.Option(help="CSV to append to; --profile writes NAME-kernels.csv next to it.")] = Path(
        "runs/training.csv"
    ),
) -> None:  # fmt: skip
    """Time training steps with each position encoding and without one.

    ViTs and video: none, learned, axial, mixed, cosine, timm-none, timm-axial, timm-mixed.
    ViTs only: linear-axial, linear-cosine.
    image, video_model, dit: the encodings of their training programs, including presets.
    Other libraries' models: stock, adapted, adapted-other.

    The baselines of the chosen encodings are added automatically.
    """
    known = {name for workload in MODELS.values() for name in workload.baselines}
    wanted = None if encodings is None else split_list(encodings)
    choose("--encodings", [split_options(name)[0] for name in wanted or ()], sorted(known))
    choose("--backend", [backend], ("auto", *BACKENDS))
    on = choose_device(device)
    if profiling and on.type != "cuda":
        raise typer.BadParameter("--profile: expected a GPU, but PyTorch finds none; leave out --profile")
    chosen_modes = choose("--modes", modes.split(","), MODES)
    todo = {model: with_baselines(MODELS[model], wanted) for model in choose("--models", models.split(","), MODELS)}
    for model, names in todo.items():
        if not names:
            raise typer.BadParameter(f"--encodings: {model} supports none of {encodings}")
    import_other(other, any("adapted-other" in names for names in todo.values()))
    here = measured_on(on, commit)
    console = Console(soft_wrap=True)
    timing = Timing(steps, limit, backend, profiling, on, console)
    for model, names in todo.items():
        workload = MODELS[model]
        for mode in chosen_modes:
            console.print(f"{model}, {mode}: {', '.join(names)}", highlight=False)
            rows, kernels = compare(workload, names, mode, batch or workload.batch, timing)
            rows.insert(0, "model", model)
            append(out, rows.assign(**here))
            show(f"{model}, {mode}, {here['gpu']}", rows.drop(columns=["model", "mode"]))
            for name, table in kernels.items():
                append(
                    out.with_name(f"{out.stem}-kernels.csv"),
                    pd.DataFrame({"model": model, "mode": mode, "encoding": name, **table, **here}),
                )
                table["kernel"] = table.kernel.str.slice(0, 90)
                show(f"{model}, {mode}, {name}: kernels in one step", table)
