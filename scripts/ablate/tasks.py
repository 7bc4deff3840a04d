"""The image, video and diffusion trainings as tasks of ``scripts.ablate``: what is compared, trained and measured."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pandas as pd
import torch
import typer

from ..common.folder import save_whole, write
from ..train.loop import Training, settings_of
from ..train.tasks import diffusion as train_diffusion
from ..train.tasks import image as train_image
from ..train.tasks import video as train_video

Values = dict[str, dict[str, float]]  # positions → size → what is measured, the trained size first
CHOSEN = ("out", "data", "encoding", "attention", "seed", "device", "tensorboard")  # by the driver, for each training


@dataclass(frozen=True)
class Task:
    """One of the train scripts.

    Args:
        config, run: of the script.
        compared: encodings of the default comparison, by attention.
        defaults: of the configuration, where they differ from the script's.
        smoke: a tiny one, for a CPU.
        values: from what ``run`` returns.
        measure: what they are; higher: whether more is better.
        kept: files of a training's folder that the report shows.
    """

    config: type[Training]
    run: Callable[[Any], dict[str, Any]]
    encodings: Iterable[str]
    compared: dict[str, tuple[str, ...]]
    defaults: dict[str, Any]
    smoke: dict[str, Any]
    values: Callable[[dict[str, Any]], Values]
    measure: str
    higher: bool
    kept: tuple[str, ...] = ()


def _held_out(result: dict[str, Any]) -> Values:
    found: Values = {"extrapolated": {}, "rescaled": {}}
    for name, value in result["held_out"].items():
        if name != "test_pairs":
            size, _, positions = name.partition(" ")
            for each in [positions] if positions else found:  # at the trained size they are the same
                found[each][size] = value["loss"]
    return found


def _accuracy(result: dict[str, Any]) -> Values:
    return {positions: result["accuracy"][positions] for positions in ("extrapolated", "rescaled")}


TINY: dict[str, Any] = {"steps": 2, "batch": 4, "warmup": 1, "dim": 48, "depth": 1, "log_every": 1, "precision": "no"}
TASKS = {
    "image": Task(
        train_image.ImageTraining, train_image.run, train_image.ENCODINGS,
        {
            "softmax": (
                "none", "learned", "sincos", "rotate", "rotate-mixed-fixed", "rotate-mixed", "cosine", "cosine-silu",
                "cosine-softplus", "cosine-softplus-phase", "cosine-learnable", "cosine-softplus-learnable",
            ),
            "linear": ("none", "sincos", "rotate", "cosine-silu", "cosine-softplus"),
        },
        {"precision": "bf16", "compile": True}, {**TINY, "compile": False, "heads": 2, "test_sizes": "20,28x40"},
        _accuracy, "accuracy, %", True,
    ),
    "video": Task(
        train_video.VideoTraining, train_video.run, train_video.ENCODINGS,
        {
            "softmax": (
                "none", "space-only", "learned", "sincos", "rotate", "rotate-mixed", "cosine", "cosine-softplus",
                "cosine-softplus-phase",
            ),
            "linear": ("space-only", "rotate", "cosine-softplus", "cosine-softplus-phase"),
        },
        {"precision": "bf16", "compile": True, "task": "order", "steps": 3000},
        {
            **TINY, "compile": False, "heads": 2, "frames": 4, "every": 1, "size": 8, "test_size": 16, "patch": 4,
            "segment": 40, "parts": 4, "test_samples": 8,
        },
        _accuracy, "accuracy, %", True,
    ),
    "diffusion": Task(
        train_diffusion.DiffusionTraining, train_diffusion.run, train_diffusion.ENCODINGS,
        {
            "softmax": ("none", "sincos", "rotate", "cosine-softplus"),
            "linear": ("sincos", "rotate", "cosine-softplus"),
        },
        {"precision": "bf16", "compile": True},
        {
            **TINY, "compile": False, "dim": 32, "heads": 2, "size": 8, "test_size": 12, "text_dim": 16,
            "text_depth": 1, "parts": 4, "sample_steps": 1, "samples": 2, "test_samples": 2,
        },
        _held_out, "held-out loss", False, ("samples.npz",),
    ),
}  # fmt: skip


def overrides(config: type[Training], given: Iterable[str]) -> dict[str, Any]:
    """Fields of a configuration from NAME=VALUE."""
    hints = get_type_hints(config)
    known = sorted({f.name for f in fields(config)} - set(CHOSEN))
    found: dict[str, Any] = {}
    for each in given:
        name, _, text = each.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known or "=" not in each:
            raise typer.BadParameter(f"--set: expected NAME=VALUE, NAME one of {', '.join(known)}, got {each!r}")
        try:
            found[name] = {"true": True, "false": False}[text.lower()] if hints[name] is bool else hints[name](text)
        except (KeyError, ValueError) as error:
            kind = "true or false" if hints[name] is bool else f"a value of type {hints[name].__name__}"
            raise typer.BadParameter(f"--set {name}: expected {kind}, got {text!r}") from error
    return found


@dataclass(frozen=True)
class Comparison:
    """All that decides a result; a folder holds runs of one of these."""

    task: str
    encodings: dict[str, list[str]]  # by attention
    seeds: int
    data: list[Path]
    training: dict[str, Any]
    device: str

    def config(self, out: Path, encoding: str, attention: str, seed: int) -> Training:
        kind = TASKS[self.task].config
        several = get_origin(get_type_hints(kind)["data"]) is list
        if not several and len(self.data) != 1:
            raise typer.BadParameter(f"DATA: expected one for {self.task}, got {len(self.data)}")
        data = self.data if several else self.data[0]
        more: dict[str, Any] = {"data": data, "encoding": encoding, "attention": attention, **self.training}
        return kind(out=out, seed=seed, device=self.device, tensorboard=False, **more)

    @property
    def settings(self) -> dict[str, Any]:
        """For config.json: what all trainings share, without the paths of the data."""
        attention, names = next(iter(self.encodings.items()))
        shared = settings_of(self.config(Path("unused"), names[0], attention, 0))
        shared = {name: value for name, value in shared.items() if name not in CHOSEN}
        data = [path.name for path in self.data]
        return {**asdict(self), "data": data, "training": shared}

    def jobs(self, out: Path) -> dict[Path, tuple[str, str, int]]:
        """Each run's file, its encoding, attention and seed: all encodings of one seed after the other."""
        return {
            out / "runs" / f"{name}-{attention}-{seed}.json": (name, attention, seed)
            for seed in range(self.seeds)
            for attention, names in self.encodings.items()
            for name in names
        }


def train(comparison: Comparison, file: Path, encoding: str, attention: str, seed: int) -> dict[str, Any]:
    """One training, resumed where its folder has a checkpoint, which is deleted when the result is on the disk."""
    task = TASKS[comparison.task]
    folder = file.parent.parent / "trainings" / file.stem
    if not (folder / "checkpoint.pt").exists():  # finished, but its result was deleted; or nothing yet
        shutil.rmtree(folder, ignore_errors=True)
    torch.compiler.reset()  # each model compiles anew, below the limit of recompilations
    with contextlib.redirect_stdout(io.StringIO()):
        result = task.run(comparison.config(folder, encoding, attention, seed))
    result = {**result, "values": task.values(result)}
    for name in task.kept:
        save_whole(file.with_suffix(f".{name}"), partial(shutil.copy, folder / name))
    write(file, json.dumps(result))
    (folder / "checkpoint.pt").unlink()
    return result


COLUMNS = (
    "encoding", "attention", "seed", "params", "loss", "loss_rise", "train_seconds", "step_ms", "peak_mib", "tokens",
)  # fmt: skip


def collect(files: Iterable[Path]) -> pd.DataFrame:
    """A row for each encoding, attention, seed, positions and size."""
    rows = []
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        same = {key: run[key] for key in COLUMNS}
        for positions, values in run["values"].items():
            rows += [{**same, "positions": positions, "size": size, "value": v} for size, v in values.items()]
    return pd.DataFrame(rows)
