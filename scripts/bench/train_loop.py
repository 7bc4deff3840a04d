"""Compare `train diffusion` on latents with a bare loop over the same compiled model, and write a CSV.

    lrpe-md bench train-loop --model B/2 --model XL/2 --out train-loop.csv

The latents are random values with labels from 1,000 classes. Each latent is as large as that of a 256-pixel image (mean
and standard deviation, each of 4 × 32 × 32 values). The training loop loads, samples and transfers the latents, writes
logs, and checks the loss. The bare loop repeats forward, backward, clipping, optimiser and EMA on one batch that stays
on the GPU. The two loops take turns in one process, with the same model and optimiser. The loader is also timed
separately.
"""

from __future__ import annotations

import csv
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import nn

from ..common.devices import choose_gpu
from ..common.options import OUT
from ..common.provenance import measured_on
from ..train.config import settings_of
from ..train.data.records import Records
from ..train.data.values import FORMAT, LATENTS, RECORDS
from ..train.loop import Trainer, begin
from ..train.order import prepare_ahead
from ..train.tasks import diffusion
from ..train.tasks.diffusion import DiffusionTraining

__all__ = ["main"]

COLUMNS: tuple[str, ...] = (
    "model", "batch", "workers", "train_ms", "bare_ms", "ratio", "turns", "trained_per_second", "loaded_per_second",
    "gpu", "versions", "commit",
)  # fmt: skip
CLASSES, FACTOR = 1000, 8
TINY = {"dim": 32, "depth": 1, "heads": 2, "patch": 2}  # model for --smoke


def write_random_latents(folder: Path, number: int, side: int) -> Path:
    """Write a folder of random latents (4, side, side) in the format of `train latents`."""
    rng, size = np.random.default_rng(0), side * FACTOR
    for name in ("mean", "std"):
        np.save(folder / f"{name}.npy", rng.random((number, 1, 4, side, side), np.float32).astype(np.float16))
    labels = rng.integers(CLASSES, size=number)
    names = [f"{i:08}" for i in range(number)]
    records = Records(names, labels=labels, classes=tuple(map(str, range(CLASSES))))
    (folder / RECORDS).write_text(json.dumps(records.to_json()), encoding="utf-8")
    about = {
        "format": FORMAT, "number": number, "shapes": {size: [[size, size]]}, "factor": FACTOR, "channels": 4,
        "scale": 1.0, "shift": 0.5, "flip": False, "sampled": False, "digest": "random", "lengths": None, "vae": "",
    }  # fmt: skip
    (folder / LATENTS).write_text(json.dumps(about), encoding="utf-8")
    return folder


@dataclass
class Turns:
    """Timer for alternating turns of the training loop and the bare loop. Call the timer after each training step.

    Args:
        bare: function that runs one step of the bare loop.
        steps: number of steps per turn.
        warmup: number of steps at the start of a training turn that are not timed, because their batches were prepared
            during the bare loop's turn.
        number: number of turns of each loop.
        synchronize: function that waits for the device.

    Attributes:
        train_times, bare_times: milliseconds per step of each turn.
    """

    bare: Callable[[], Any]
    steps: int
    warmup: int
    number: int
    synchronize: Callable[[], Any]
    train_times: list[float] = field(default_factory=list)
    bare_times: list[float] = field(default_factory=list)
    began: float = 0.0
    done: int = 0

    @property
    def total(self) -> int:
        """Total number of training steps, including an untimed first turn in which the model is compiled."""
        return (self.number + 1) * (self.warmup + self.steps)

    def after_step(self) -> bool:
        self.done += 1
        place = self.done % (self.warmup + self.steps)
        if place == self.warmup:
            self.synchronize()
            self.began = time.perf_counter()
        if place:
            return False
        self.synchronize()
        elapsed = time.perf_counter() - self.began
        if self.done > self.warmup + self.steps:
            self.train_times.append(1e3 * elapsed / self.steps)
            self.bare_times.append(self._time_bare())
        else:
            self.bare()  # allocates memory before the first timed call
        return False

    def _time_bare(self) -> float:
        self.synchronize()
        began = time.perf_counter()
        for _ in range(self.steps):
            self.bare()
        self.synchronize()
        return 1e3 * (time.perf_counter() - began) / self.steps


def make_bare_step(config: DiffusionTraining, trainer: Trainer, samples: Any) -> Callable[[], None]:
    """Return a function that runs a bare training step on one batch, with the trainer's model and optimiser."""

    def step() -> None:
        with trainer.accelerator.autocast():
            loss = diffusion.loss(config, trainer.raw, samples)
        loss.backward()
        nn.utils.clip_grad_norm_(trainer.raw.parameters(), config.clip)
        trainer.inner.step()
        trainer.inner.zero_grad()
        if trainer.average is not None:
            trainer.average.update(trainer.raw, step=trainer.step)

    return step


def count_loaded(make: Callable[..., Any], chosen: Any, workers: int, seconds: float, synchronize: Any) -> float:
    """Run the loader without training, and return the number of samples per second."""
    stream = prepare_ahead(make, chosen, workers)
    for _ in range(2 * workers + 1):
        next(stream)
    synchronize()
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        number += len(next(stream)[0])
    synchronize()
    rate = number / (time.perf_counter() - began)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    return rate


def measure(config: DiffusionTraining, steps: int, turns: int, seconds: float) -> dict[str, Any]:
    """Alternate between training and the bare loop, and then time the loader.

    Args:
        config: training options, whose number of steps is replaced.
        steps: number of steps per turn.
        turns: number of turns of each loop.
        seconds: how long to time the loader, in seconds.
    """
    torch.compiler.reset()  # drops the compiled code of an earlier model
    accelerator = begin(config)
    device = accelerator.device
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    source = diffusion.open_source(config, device)
    model, order = diffusion.build(config, source), source.order(config.batch, config.seed)
    make = partial(diffusion.batch, config, source)
    trainer = Trainer(config, accelerator, model, settings_of(config))
    bare = make_bare_step(config, trainer, make(*next(order(0))))
    run = Turns(bare, steps, 2 * config.workers + 2, turns, synchronize)
    trainer.last = run.total
    trainer.fit(order, make, partial(diffusion.loss, config), after_step=run.after_step)
    loaded = count_loaded(make, itertools.islice(order(0), 10**6), config.workers, seconds, synchronize)
    train_ms, bare_ms = (float(np.median(times)) for times in (run.train_times, run.bare_times))
    ratio = float(np.median(np.array(run.bare_times) / np.array(run.train_times)))
    return {
        "model": config.model or "tiny", "batch": config.batch, "workers": config.workers, "train_ms": train_ms,
        "bare_ms": bare_ms, "ratio": ratio, "turns": turns, "trained_per_second": 1e3 * config.batch / train_ms,
        "loaded_per_second": loaded,
    }  # fmt: skip


def main(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Published model size and patch size, such as B/2; repeatable. (default: B/2 and XL/2)"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Number of threads that prepare batches.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps per turn.")] = 20,
    turns: Annotated[int, typer.Option(min=1, help="Number of turns per loop.")] = 3,
    number: Annotated[int, typer.Option(min=1, help="Number of latents to write to disk.")] = 8192,
    out: Annotated[Path, OUT] = Path("scripts/results/benchmark-train-loop.csv"),
    device: Annotated[str, typer.Option(help="Device: cuda (or cpu with --smoke).")] = "cuda",
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Train a tiny model to test that everything runs, and write to runs/bench-smoke.",
        ),
    ] = False,
    commit: Annotated[str | None, typer.Option(help="Commit hash to record if there is no git history.")] = None,
) -> None:
    """Compare `train diffusion` on latents with a bare loop over the same compiled model, on one GPU."""
    here = measured_on(choose_gpu(device, smoke), commit)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        data = write_random_latents(Path(folder), number, 8 if smoke else 32)
        for name in [""] if smoke else model or ["B/2", "XL/2"]:
            sizes: dict[str, Any] = TINY if smoke else {"model": name, "precision": "bf16", "compile": True}
            config = DiffusionTraining(
                data=data, out=Path(folder) / f"run-{name.replace('/', '-')}", batch=batch, workers=workers,
                device=device, tensorboard=False, progress=False, save_every=10**9, warmup=10, steps=10**6,
                schedule="constant", log_every=steps + 2 * workers + 2, **sizes,
            )  # fmt: skip
            row = {**measure(config, steps, turns, 0.2 if smoke else 3.0), **here}
            writer.writerow(row)
            file.flush()
            Console(soft_wrap=True).print(describe(row), markup=False)


def describe(row: dict[str, Any]) -> str:
    """Summarise a row of the CSV."""
    return (
        f"{row['model']}, batch {row['batch']}: {row['train_ms']:.1f} ms per step, {row['bare_ms']:.1f} ms in the bare "
        f"loop, ratio {row['ratio']:.3f}; the loader prepares {row['loaded_per_second']:.0f} samples/s, the model "
        f"takes {row['trained_per_second']:.0f}"
    )
