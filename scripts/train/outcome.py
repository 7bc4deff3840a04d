"""Evaluate a finished run at other sizes, and write result.json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lrpe_md.checks import plural
from lrpe_md.integrations.encoding import EncodingStack

from ..common.devices import gpu_name
from ..common.folder import flat, write
from ..common.provenance import git_commit, versions
from .data.records import LISTED
from .history import HISTORY
from .loop import Trainer
from .weights import EXPORT

# Numbers in a result to show in the summary, and their labels.
SHOWN = {
    "steps": "steps", "train_seconds": "training, seconds", "step_ms": "step, ms", "peak_mib": "peak memory, MiB",
    "params": "parameters", "loss": "training loss", "chance": "chance accuracy, %",
    "test_videos": "test videos", "test_clips": "test clips",
    "frechet_random_features": "Fréchet distance, random features",
}  # fmt: skip
# Explanation of the names from :func:`placements`.
PLACEMENTS = (
    "At other sizes, extrapolated positions are one patch apart, as in training; rescaled positions are mapped onto "
    "the training grid."
)
RESCALED = "Rescaled positions are mapped onto the grid of --reference."


def timed(trainer: Trainer, fit: Callable[[], None]) -> dict[str, Any]:
    """Call ``fit``, and return the entries about model, training and machine that every result contains.

    For a finished run, return the entries from its result.json instead.
    """
    before = _read_result(trainer) if trainer.is_finished else {}
    since, first = time.perf_counter(), trainer.step
    fit()
    counted = trainer.counted_seconds()
    seconds, accelerator = time.perf_counter() - since - trainer.waited, trainer.accelerator
    common = {
        "loss": trainer.history[-1]["loss"], "loss_rise": largest_rise([row["loss"] for row in trainer.history]),
        "params": sum(p.numel() for p in trainer.raw.parameters()),
        "steps": trainer.step, "train_steps_timed": trainer.step - first,
        "counted_seconds": None if counted is None else round(counted, 2),
        "train_seconds": round(seconds, 1), **trainer.cost(),
        "processes": accelerator.num_processes, "gpu": gpu_name(accelerator.device), "commit": git_commit() or None,
        **versions("torch", "timm", "accelerate"),
    }  # fmt: skip
    return {name: before.get(name, value) for name, value in common.items()}


def _read_result(trainer: Trainer) -> dict[str, Any]:
    """Read the result.json of a finished run, or return {} if there is none for this number of steps."""
    try:
        found = json.loads((trainer.config.out / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a missing or damaged file is written again
        return {}
    return found if isinstance(found, dict) and found.get("steps") == trainer.step else {}


def largest_rise(losses: Sequence[float]) -> float:
    """Return the largest amount by which the loss exceeds an earlier loss, or NaN if a loss is NaN.

    If the rise is larger than the noise, the learning rate is too high.
    """
    return float(np.max(losses - np.minimum.accumulate(losses)))


def write_result(trainer: Trainer, result: dict[str, Any]) -> None:
    """In the first process, write result.json and history.csv, and print a summary."""
    if not trainer.accelerator.is_main_process:
        return
    out, text = trainer.config.out, json.dumps(result, indent=2)
    trainer.history_file.write(trainer.history)
    write(out / "result.json", f"{text}\n")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(summarize(result, trainer.config.loss_unit))
    names = " ".join(flat(result))
    if "rescaled" in names:
        console.print(PLACEMENTS if "extrapolated" in names else RESCALED)
    console.print(f"{out}: result.json and {HISTORY} have all numbers; {EXPORT} has the weights.")


def summarize(result: dict[str, Any], loss_unit: str = "") -> Table:
    """Summarise a result's main numbers and evaluations as a table, without evaluations that list too many classes."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    evaluations = {name: value for name, value in result.items() if isinstance(value, dict) and len(value) <= LISTED}
    columns = list(dict.fromkeys(key for value in evaluations.values() for key in value if is_series(value[key])))
    table.add_column()
    for _ in columns or ("value",):
        table.add_column(justify="right")
    steps, timed_steps = result.get("steps"), result.get("train_steps_timed")
    for name, text in SHOWN.items():
        text += f", {loss_unit}" if loss_unit and name == "loss" else ""
        if name == "train_seconds" and timed_steps not in (None, steps):
            text += f" (last {plural(timed_steps, 'step')})"
        if isinstance(value := result.get(name), (int, float)):
            table.add_row(text, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    for name, value in evaluations.items():
        series = {key: each for key, each in value.items() if is_series(each)}
        if series:
            table.add_section()
            table.add_row(name.replace("_", " "), *columns)
        for row in dict.fromkeys(key for each in series.values() for key in each):
            numbers = (series.get(column, {}).get(row) for column in columns)
            table.add_row(f"  {row}", *("" if number is None else f"{number:,.4g}" for number in numbers))
        rest = flat({key: each for key, each in value.items() if key not in series})
        for row, number in rest.items():
            if isinstance(number, (int, float)):
                table.add_row(f"{name} {row}".replace("_", " "), f"{number:,.4g}")
    return table


def is_series(value: Any) -> bool:
    """Return whether a value is a dictionary of numbers, such as accuracies by size."""
    return isinstance(value, dict) and bool(value) and all(isinstance(each, (int, float)) for each in value.values())


def placements(model: Any) -> Iterator[str]:
    """Iterate over the ways to place tokens at unseen sizes. Apply each way to the model, and yield its name.

    "extrapolated" uses one unit per token, and "rescaled" interpolates to the training grid, except along time if the
    model streams. A model that was trained with a reference grid is only tested as "rescaled" to that grid. A preset
    whose positions are a table is only tested as "extrapolated".
    """
    own, grid, made = model.reference, model.patch_embed.grid_size, EncodingStack(model.encoding).preset
    if getattr(model, "causal", None) is not None:
        grid = None, *grid[1:]
    ways: dict[str, Any] = {"extrapolated": None} if own is None else {}
    if made is None or made.scheme.has_grid(len(grid)):
        ways["rescaled"] = own or grid
    for name, reference in ways.items():
        model.reference = reference
        yield name
    model.reference = own
