"""Evaluate a finished training at other sizes, and write result.json and history.csv."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..common.devices import gpu_name
from ..common.folder import save_whole, write
from ..common.provenance import git_commit, versions
from .loop import Trainer


def timed(trainer: Trainer, fit: Callable[[], None]) -> dict[str, Any]:
    """Call ``fit``; what the results of all scripts say of the model, the training and the machine."""
    since, first = time.perf_counter(), trainer.step
    fit()
    counted = trainer.counted_seconds()
    seconds, accelerator = time.perf_counter() - since - trainer.waited, trainer.accelerator
    return {
        "loss": trainer.history[-1]["loss"], "loss_rise": largest_rise([row["loss"] for row in trainer.history]),
        "params": sum(p.numel() for p in trainer.raw.parameters()),
        "steps": trainer.step, "train_steps_timed": trainer.step - first,
        "counted_seconds": None if counted is None else round(counted, 2),
        "train_seconds": round(seconds, 1), **trainer.cost(),
        "processes": accelerator.num_processes, "gpu": gpu_name(accelerator.device), "commit": git_commit() or None,
        **versions("torch", "timm", "accelerate"),
    }  # fmt: skip


def largest_rise(losses: Sequence[float]) -> float:
    """Return the largest rise of a loss above an earlier value. It exceeds the noise if the learning rate was too
    high. NaN if a loss is NaN."""
    return float(np.max(losses - np.minimum.accumulate(losses)))


def write_result(trainer: Trainer, result: dict[str, Any]) -> None:
    """Both files, by the first process, which prints the result, too."""
    if not trainer.accelerator.is_main_process:
        return
    out, text = trainer.config.out, json.dumps(result, indent=2)
    save_whole(out / "history.csv", lambda part: write_history(part, trainer.history))
    write(out / "result.json", f"{text}\n")
    print(text)


def placements(model: Any) -> Iterator[str]:
    """Each way to place the tokens of another size, set on the model while it is asked for: one unit a token, or laid
    over the trained grid."""
    for name, reference in (("extrapolated", None), ("rescaled", model.patch_embed.grid_size)):
        model.reference = reference
        yield name
    model.reference = None


def write_history(path: Path, history: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(name for row in history for name in row)))
        table.writeheader()
        table.writerows(history)
