"""What an encoding costs in training: whole steps of ViTs, a video layer and our backbones, with and without it.

    python -m scripts.bench training --models vit_b --modes compiled --out training.csv
    python -m scripts.bench training --models vit_s --modes eager,compiled,graphs --profile --out training.csv
    python -m scripts.bench training --models vit_b,vit_b_1024 --modes compiled --encodings axial,linear-cosine
    python -m scripts.bench training --models image,video_model,dit --out scripts/results/backbones.csv
    python -m scripts.bench training --models dit --encodings rotate,rotate-norms-first
    python -m scripts.bench training --models wan,qwen3 --modes eager,compiled,inference --out adapted.csv
    python -m scripts.bench training --models wan,qwen3 --encodings adapted,adapted-other --other ../old-checkout

A step is the forward under bfloat16 autocast, the loss, the backward and a fused AdamW step: eager, compiled, or with
forward and backward as CUDA graphs (graphs); with "inference" and "inference-compiled" the forward alone. All models of
a run are resident, and take their steps in turn, in a new order each round; each step is compared with that of its
baseline in the same round. Every encoding is compared with the same model without it. vit_b, vit_b_1024 (at 1,024
pixels) and vit_s (timm's ViTs) and video (a layer of a video transformer) have:

    none                 timm's ViT without positions; the video layer without positions
    learned              timm's ViT as it is, with its absolute table                           (compared with none)
    axial, mixed, cosine that ViT with `models.vit.adapt`: rotate on a fixed axial omega, rotate on an omega learned
                         for each layer and head, and the cosine map                            (compared with none)
    axial-again, ..      the same three in ViTs with `keep_encoded=False`                      (compared with none)
    timm-none            timm's RoPE-ViT without its rope: a ViT with LayerScale, of timm's Eva (compared with none)
    timm-axial           timm's RoPE-ViT; in the video layer `apply_rot_embed_cat` with a table
                         for each token                             (compared with timm-none; in the layer with none)
    timm-mixed           timm's RoPE-ViT with learned frequencies                          (compared with timm-none)

image, video_model and dit are the models of `train image`, `train video` and `train diffusion`, of their
default sizes and with their losses, on random data, at eight times their batches, which keep a GPU busy; they have
their scripts' encodings, compared with none; dit also rotate-norms-first, whose norms of q and k are launches of
their own.

wan, flux, qwen_image, hunyuan_video, ltx, qwen3, llama, dinov3, eva02 and rope_mixed are models of diffusers,
transformers and timm with random weights in bfloat16, as wide as they are published and a few layers deep: stock, and
by `adapt_rotary` (adapted, compared with stock), and by that of another checkout (adapted-other).

Appends to the CSV, one row for each model, mode and encoding: tokens of a step (patches), quantiles of the time and of
its ratio to the baseline, the largest memory that one step takes with its own model alone, the host's time to issue a
step (below the GPU's where the GPU is the bottleneck), the attention kernel that PyTorch took, and for how many
reasons the compiler broke the graph.
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
from ..common.options import choose, positive
from ..common.provenance import measured_on
from ..train.encodings import split_list, split_options
from .hosted import HOSTED, Hosted, import_checkout
from .measure import device_events
from .workloads import MODELS as OURS
from .workloads import Workload as Ours

COMPILE: dict[str, dict[str, Any]] = {
    "compiled": {"dynamic": False},
    "graphs": {"dynamic": False, "mode": "reduce-overhead"},
    "inference-compiled": {"dynamic": False},
}
INFERENCE = ("inference", "inference-compiled")
MODES = ("eager", "compiled", "graphs", *INFERENCE)
Workload = Ours | Hosted
MODELS: dict[str, Workload] = {**OURS, **HOSTED}
WARMUP_ROUNDS = 3  # after two steps of each model
HOST_STEPS = 5
KERNELS = 25  # of a step, in the table of --profile
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Trainee:
    """A model with an optimizer and a batch of its own."""

    def __init__(
        self, workload: Workload, encoding: str, mode: str, batch: int, backend: str, device: torch.device
    ) -> None:
        self.workload, self.mode, self.device = workload, mode, device
        self.learning = mode not in INFERENCE
        with device if isinstance(workload, Hosted) else nullcontext():  # billions of weights, slow to draw on a CPU
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
        # Nothing of this step may be held in the next: the graphs of all models share their memory. The loss is not
        # in it, being computed outside of them.
        self.optimizer.zero_grad(set_to_none=True)
        for x in self.inputs:
            x.grad = None
        return loss.detach()

    def state_bytes(self) -> int:
        """What this model holds between its steps."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        tensors = [*self.raw.parameters(), *self.raw.buffers(), *states, *self.inputs]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
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
    """The largest memory of a step, what the other models hold left out; NaN without a GPU."""
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
    """Until a step is issued to an idle device."""
    times = []
    for _ in range(HOST_STEPS):
        synchronize(trainee.device)
        start = time.perf_counter()
        trainee.step()
        times.append(1000 * (time.perf_counter() - start))
    synchronize(trainee.device)
    return statistics.median(times)


def observed_step(trainee: Trainee) -> tuple[str, float]:
    """Which of PyTorch's attention kernels a step calls, and its :func:`peak_bytes`.

    Of the second step: the first compiles, and from the third on CUDA graphs are replayed, which shows neither calls
    nor allocations.
    """
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        peak = peak_bytes(trainee)
        synchronize(trainee.device)
    names = [event.name for event in prof.events() or ()]
    found = [re.search(r"::_scaled_dot_product_\w*?(flash|efficient|cudnn|math)", name) for name in names]
    return " ".join(sorted({match[1] for match in found if match})), peak


def kernel_times(trainee: Trainee) -> pd.DataFrame:
    """The CUDA kernels of a step with their calls and milliseconds, the slowest first."""
    events = [(event.name, event.time_range.elapsed_us() / 1000) for event in device_events(trainee.step)]
    table = pd.DataFrame(events, columns=["kernel", "ms"])
    table = table.groupby("kernel").agg(calls=("ms", "size"), ms=("ms", "sum")).reset_index()
    table["share"] = table.ms / table.ms.sum()
    return table.sort_values("ms", ascending=False, ignore_index=True).head(KERNELS)


@dataclass(frozen=True)
class Timing:
    """How training steps are timed: rounds of one step of each, until ``limit`` seconds are over."""

    steps: int
    limit: float
    backend: str
    profiling: bool
    device: torch.device
    console: Console


def compare(
    workload: Workload, encodings: list[str], mode: str, batch: int, timing: Timing
) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """A row for each encoding, and with ``profiling`` the kernels of a step of each."""
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
            raise RuntimeError(f"graphs: {name} runs without them; TORCH_LOGS=perf_hints says why")
    # Of cosine q and k are wider than v, which other kernels take; linear attention takes none.
    if len({attention[name] for name in trainees if not name.startswith(("cosine", "linear"))}) > 1:
        raise RuntimeError(f"attention: expected the same kernel for all, got {attention}; choose one by --backend")
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
    """Return those that this model has, and what they are compared with."""
    known = workload.baselines
    names = {name for name in wanted or workload.default if split_options(name)[0] in known}
    for _ in range(2):  # timm-axial, timm-none, none
        names |= {known[split_options(name)[0]] for name in names}
    return sorted(names, key=lambda name: (list(known).index(split_options(name)[0]), name))


def append(path: Path, rows: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        rows = pd.concat([pd.read_csv(path, keep_default_na=False, na_values=[""]), rows])
    rows.to_csv(path, index=False, float_format="%.6g")


def show(title: str, rows: pd.DataFrame) -> None:
    print(f"\n{title}\n{rows.to_string(index=False, float_format='{:.4g}'.format)}\n", flush=True)


def main(
    models: Annotated[
        str, typer.Option("--models", "--model", help=f"Any of {','.join(MODELS)}.")
    ] = "vit_b,vit_s,video",
    modes: Annotated[str, typer.Option(help=f"Any of {','.join(MODES)}.")] = "eager,compiled",
    encodings: Annotated[
        str | None, typer.Option(help="NAME or NAME:KEY=VALUE,.., commas between. Default: some that the model has.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every model takes one step.")] = 60,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step; each model has its own.")] = None,
    limit: Annotated[
        float, typer.Option(callback=positive, help="Seconds after which no new round begins.")
    ] = math.inf,
    backend: Annotated[str, typer.Option(help=f"Attention kernel: auto or one of {', '.join(BACKENDS)}.")] = "auto",
    profiling: Annotated[bool, typer.Option("--profile", help="Also list the CUDA kernels of a step of each.")] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    other: Annotated[
        Path | None, typer.Option(help="Another checkout of this repository, for --encodings adapted-other.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded with the numbers; without it what git says.")] = None,
    out: Annotated[Path, typer.Option(help="CSV to add rows to; kernels go to NAME-kernels.csv beside it.")] = Path(
        "runs/training.csv"
    ),
) -> None:  # fmt: skip
    """Time training steps with each positional encoding and without any.

    Encodings of the ViTs and video: none, learned, axial, mixed, cosine, timm-none, timm-axial, timm-mixed, and of the
    ViTs linear-axial and linear-cosine; of image, video_model and dit those of their train scripts, presets included;
    of other libraries' models stock and adapted. What they are compared with is added.
    """
    known = {name for workload in MODELS.values() for name in workload.baselines}
    wanted = None if encodings is None else split_list(encodings)
    choose("--encodings", [split_options(name)[0] for name in wanted or ()], sorted(known))
    choose("--backend", [backend], ("auto", *BACKENDS))
    on = choose_device(device)
    if profiling and on.type != "cuda":
        raise typer.BadParameter("--profile: lists CUDA kernels, but there is no GPU")
    chosen_modes = choose("--modes", modes.split(","), MODES)
    todo = {model: with_baselines(MODELS[model], wanted) for model in choose("--models", models.split(","), MODELS)}
    for model, names in todo.items():
        if not names:
            raise typer.BadParameter(f"--encodings: {model} has none of {encodings}")
    if other is not None:
        Hosted.other = import_checkout(other)
    elif any("adapted-other" in names for names in todo.values()):
        raise typer.BadParameter("--encodings: adapted-other needs --other, a checkout of another version")
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
                show(f"{model}, {mode}, {name}: kernels of a step", table)
