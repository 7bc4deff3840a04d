"""The report of a comparison: results.csv, table.md, plots, and the sections of the README."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import typer

from ..common.folder import ROOT, from_root, write
from ..common.markdown import fill
from ..train.samples import write_comparison
from . import report_lengths, report_sizes
from .report_sizes import DIFFERENCE, TRAININGS
from .tasks import TASKS, collect

LAYOUTS = {"sizes": report_sizes.markdown, "lengths": report_lengths.markdown}
PLOTS = {
    "sizes": report_sizes.plot_sizes, "trained": report_sizes.plot_trained, "lengths": report_lengths.plot_lengths,
}  # fmt: skip


def write_report(folder: Path, baseline: str) -> None:
    """results.csv of the runs in a folder, table.md and plots, and samples.png where trainings of the first seed
    have kept samples; of results.csv alone where there are no runs."""
    files = sorted(folder.glob("runs/*.json"))
    if files:
        write(folder / "results.csv", collect(files).to_csv(index=False))
    if not (folder / "results.csv").exists():
        raise typer.BadParameter(f"--folder: expected runs/*.json or results.csv in {folder}, found neither")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["settings"].get("task") not in TASKS:
        raise typer.BadParameter(f"--folder: expected one of `ablate run`, got {folder}, of something else")
    task, results = (
        TASKS[config["settings"]["task"]],
        pd.read_csv(folder / "results.csv", keep_default_na=False, na_values=[""]),
    )
    text = LAYOUTS[task.layout](results, config, baseline)
    write(folder / "table.md", text)
    for name, plot in task.plots.items():
        PLOTS[plot](results, config, folder / name)
    samples = {
        f"{name}, {attention}": file
        for attention, names in config["settings"]["encodings"].items()
        for name in names
        if (file := folder / "runs" / f"{name}-{attention}-0.samples.npz").exists()
    }
    if samples:
        write_comparison(folder / "samples.png", samples)
    print(f"\n{text}", *(folder / name for name in ("results.csv", *task.plots)), sep="\n")


def committed(task: str) -> Path:
    return ROOT / "scripts" / "results" / f"ablate-{task}"


def markers(task: str) -> tuple[str, str]:
    return f"<!-- ablate-{task}:begin -->", f"<!-- ablate-{task}:end -->"


def section(task: str, folder: Path) -> str:
    """What the README shows of a folder with table.md, which it has the first tables of, and plots, and samples.png
    where there is one."""
    if not (folder / "table.md").exists():
        return f"(No results yet: `python -m scripts.ablate run {task} DATA`, then `report`.)\n"
    where = from_root(folder)
    text = (folder / "table.md").read_text(encoding="utf-8")
    text, *details = re.split(f"^(?:{DIFFERENCE}|{TRAININGS})", text, maxsplit=1, flags=re.MULTILINE)
    if details:
        text += f"[Paired differences, and the trainings: loss, time, memory]({where}/table.md)\n"
    samples = f"![Samples of held-out captions]({where}/samples.png)\n" * (folder / "samples.png").exists()
    measure = TASKS[task].measure
    by = {"sizes": f"{measure} by size", "lengths": f"{measure.capitalize()} by length and by position"}
    plots = "".join(f"![{by[TASKS[task].layout]}]({where}/{name})\n" for name in TASKS[task].plots)
    return f"{samples}{plots}\n{text}"


def fill_readme(readme: Path, tasks: Iterable[str]) -> None:
    """Fill in the sections of a file that it has, from the committed results."""
    tasks = list(tasks)
    text = readme.read_text(encoding="utf-8")
    for task in tasks:
        text = fill(text, *markers(task), section(task, committed(task)))
    write(readme, text)
    print(f"{readme}: the sections of {', '.join(tasks)}")
