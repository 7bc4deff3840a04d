"""Write the report of a comparison: results.csv, table.md, plots and a page in docs/results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from lrpe_md.checks import explain_unknown

from ..common.folder import ROOT, read_json, show_value, write, write_config
from ..common.markdown import PICTURES, page, table, write_page
from ..train.config import DATA, find_panel
from ..train.samples import write_comparison
from . import report_lengths, report_recall, report_sizes
from .report_sizes import KEYS, default_options, explain_intervals, find_free, show_difference, subtract
from .tasks import TASKS, collect, name_run

COMMAND = "lrpe-md ablate report"
LAYOUTS = {
    "sizes": report_sizes.markdown, "lengths": report_lengths.markdown, "recall": report_recall.markdown,
}  # fmt: skip
PLOTS = {
    "sizes": report_sizes.plot_sizes, "trained": report_sizes.plot_trained, "lengths": report_lengths.plot_lengths,
    "recall": report_recall.plot_recall,
}  # fmt: skip


BASELINE = "rotate"


def choose_baseline(baseline: str | None, trained: Iterable[tuple[str, str]]) -> str:
    """Return the baseline as ENCODING or ATTENTION/ENCODING. None selects :data:`BASELINE`, even if it was not trained.

    Raises:
        typer.BadParameter: if the baseline is not one of the ``trained`` pairs (attention, encoding).
    """
    pairs = ["/".join(pair) for pair in trained]
    names = list(dict.fromkeys(pair.rpartition("/")[2] for pair in pairs))
    if baseline is not None and baseline not in [*names, *pairs]:
        expected = f"one of the trained encodings ({', '.join(names)}), or ATTENTION/NAME"
        raise typer.BadParameter(explain_unknown("--baseline", baseline, [*names, *pairs], expected))
    return BASELINE if baseline is None else baseline


def check_task(folder: Path, task: str) -> None:
    """Check that the runs in a folder belong to a task.

    Raises:
        typer.BadParameter: if the runs belong to a different task.
    """
    if (folder / "config.json").is_file() and (found := task_of(folder)) in TASKS and found != task:
        raise typer.BadParameter(
            f"TASK: expected {found}, the task of the runs in {folder}, got {task}; leave out TASK, or pass another "
            "--folder"
        )


def read_results(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "results.csv", keep_default_na=False, na_values=[""])


def describe_changes(
    settings: dict[str, Any], other: dict[str, Any], results: pd.DataFrame, base: pd.DataFrame
) -> list[str]:
    """Describe how the settings and the data differ from those of other results."""
    task, free = TASKS[settings["task"]], find_free(settings)
    # Results of earlier versions lack newer options, whose defaults keep the earlier behaviour.
    here, there = (
        default_options(task, each["training"]) | {"data": each["data"], **each["training"]}
        for each in (settings, other)
    )
    changed = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    changes = [
        f"`{name}` {show_value(here.get(name))} (there {show_value(there.get(name))})"
        for name in changed
        if name not in free
    ]
    # Options such as the size also determine how the data is read.
    same_options = not {f.name for f in fields(task.config) if find_panel(f) == DATA} & set(changed)
    if same_options and all("data_digest" in each for each in (results, base)):
        same = set(results["data_digest"].dropna()) <= set(base["data_digest"].dropna())
        changes += [] if same else ["the content of `data`"]
    return changes


def compare_folders(folder: Path, results: pd.DataFrame, config: dict[str, Any], against: Path) -> str:
    """Render the differences from another folder's results, paired by encoding, attention, seed and size.

    Raises:
        typer.BadParameter: if the other folder has no report of the same task, or no results in common.
    """
    if not (against / "results.csv").exists():
        raise typer.BadParameter(
            f"--against: expected a folder with results.csv, got {against}; run `report --folder {against}` first"
        )
    settings, other = config["settings"], read_config(against)["settings"]
    task = TASKS[settings["task"]]
    if other.get("task") != settings["task"]:
        raise typer.BadParameter(
            f"--against: expected runs of {settings['task']}, as in {folder}, got {other.get('task')} in {against}"
        )
    keys, whole = [*KEYS, task.series], ~results["size"].astype(str).str.contains(":")  # no results by position
    base = read_results(against).astype({"size": str})
    found = subtract(results[whole].astype({"size": str}), base, [*keys, "size"], [*keys, "size"])
    if found.empty:
        raise typer.BadParameter(
            f"--against: expected results with the same encoding, attention, seed and size in {folder} and {against}, "
            "found none"
        )
    columns = list(dict.fromkeys(found.index.get_level_values("size")))
    digits = {"lengths": 3}.get(task.layout, 1 if task.higher else 4)
    rows = [
        [*key, *(show_difference(found.loc[(*key, n)], digits) if (*key, n) in found.index else "" for n in columns)]
        for key in dict.fromkeys(each[:-1] for each in found.index)
    ]
    changes = describe_changes(settings, other, results, base)
    what = f"Different settings: {', '.join(changes) or 'none'}. Results are paired by seed"
    text = f"**Difference from the runs in {against}.** {what}{explain_intervals(found)}"
    for where in (folder, against):
        text += f" About the runs in {where}: {note}" if (note := read_config(where).get("note")) else ""
    return "\n".join([text, "", *table([*keys, *columns], rows, len(keys))])


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, which every report needs.

    Raises:
        typer.BadParameter: if the file is missing or invalid.
    """
    if not (folder / "config.json").exists():
        raise typer.BadParameter(
            f"{folder}: expected config.json next to the results, found none; copy it from the output folder"
        )
    return read_json(folder / "config.json")


def write_report(folder: Path, baseline: str | None, against: Path | None = None) -> None:
    """Write results.csv, table.md and plots for the runs in a folder.

    With ``against``, table.md also lists differences from the results in that folder; see :func:`compare_folders`.

    ``baseline`` is stored for later reports. None selects the most recent baseline; see :func:`choose_baseline`.

    If runs with the first seed saved samples, also write samples.png. A folder without runs must contain results.csv.
    """
    files = sorted(folder.glob("runs/*.json"))
    if not files and not (folder / "results.csv").exists():
        raise typer.BadParameter(
            f"--folder: expected runs/*.json or results.csv in {folder}, found neither; pass an output folder of `run`"
        )
    config = read_config(folder)
    task_name = config["settings"].get("task")
    if task_name not in TASKS:
        raise typer.BadParameter(
            f"--folder: expected an output folder from `ablate run`, but {folder} was written by another command"
        )
    task = TASKS[task_name]
    if files:
        write(folder / "results.csv", collect(files, task.series).to_csv(index=False))
    results = read_results(folder)
    trained = list(dict.fromkeys(zip(results.attention, results.encoding, strict=True)))
    chosen = choose_baseline(baseline or config.get("baseline"), trained)
    if baseline is not None:
        write_config(folder / "config.json", {**config, "baseline": baseline})
    text = LAYOUTS[task.layout](results, config, chosen)
    without_differences = len(trained) > 1 and "ifference from" not in text
    if against is not None:
        text += "\n" + compare_folders(folder, results, config, against)
    write(folder / "table.md", text)
    for name, plot in task.plots.items():
        PLOTS[plot](results, config, folder / name)
    samples = {
        f"{name}, {attention}": file
        for attention, names in config["settings"]["encodings"].items()
        for name in names
        if (file := folder / "runs" / f"{name_run(name, attention, 0)}.samples.npz").exists()
    }
    if samples:
        write_comparison(folder / "samples.png", samples)
    if without_differences:
        of = next((attention for attention, name in trained if name == chosen), None)
        reason, choice = f"{chosen} was not trained", "a different one with --baseline"
        if of:
            reason = f"each kind of attention has only one encoding, or lacks {chosen}"
            choice = f"--baseline {of}/{chosen} to compare all kinds"
        text += f"\nNo differences are listed, because {reason}; choose {choice}."
    print(f"\n{text}", *(folder / name for name in ("table.md", "results.csv", *task.plots)), sep="\n")


def committed(task: str) -> Path:
    return ROOT / "scripts" / "results" / f"ablate-{task}"


def folders() -> list[Path]:
    """List the folders in scripts/results that contain a comparison."""
    return sorted(path.parent for path in (ROOT / "scripts" / "results").glob("ablate-*/table.md"))


def task_of(folder: Path) -> str | None:
    """Return the task of the runs in a folder, or None for the output folder of another command."""
    return read_json(folder / "config.json")["settings"].get("task")


def render(folder: Path) -> str:
    """Render a folder's page from table.md, the plots, and samples.png if it exists."""
    config = read_json(folder / "config.json")
    task = TASKS[config["settings"]["task"]]
    name = folder.name.removeprefix("ablate-")
    measure = task.measure.replace(", %", " in %").capitalize()
    by = {
        "sizes": f"{measure} by size", "lengths": f"{measure} by length and by position",
        "recall": "Accuracy of key lookups and place lookups, by number of frames",
    }  # fmt: skip
    pictures = [("Samples of held-out captions", "samples.png")] * (folder / "samples.png").exists()
    pictures += [(by[task.layout], plot) for plot in task.plots]
    shown = "\n\n".join(f"![{text}]({PICTURES}/{folder.name}/{file})" for text, file in pictures)
    text = (folder / "table.md").read_text(encoding="utf-8")
    note = config.get("note", "")  # results of an earlier version have a note
    names = "See [what the names of encodings mean](../which-encoding.md#names-of-encodings)."
    return page(f"Comparison: {name}", COMMAND, note, shown, names, text)


def write_pages(to: Path) -> None:
    for folder in folders():
        write_page(to / f"{folder.name}.md", render(folder))
