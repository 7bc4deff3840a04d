"""Tables and plots of results at several sizes, with extrapolated and rescaled positions."""

from __future__ import annotations

from dataclasses import MISSING, fields
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from ..common.folder import show_value
from ..common.markdown import table
from ..common.plots import OKABE_ITO, STYLE, WIDTH, add_legend, choose_looks, plt, save, set_title, split_series
from ..common.provenance import describe_environments
from .tasks import TASKS, TESTED, Task

KEYS = ["encoding", "attention"]
RISE = "largest rise in loss"
NO_INTERVAL = "A difference that is the same for all seeds has no interval"
# Columns of results.csv that may be empty.
SOURCES = {
    "final loss": "loss", RISE: "loss_rise", "ms per step": "step_ms", "million tokens per second": "step_ms",
    "peak memory, GiB": "peak_mib", "s per training": "train_seconds",
}  # fmt: skip
POSITIONS = {"extrapolated": "are one unit apart, as in training", "rescaled": "are mapped onto the training grid"}


def sizes(results: pd.DataFrame) -> list[str]:
    """Return the test sizes, starting with the training size."""
    return list(dict.fromkeys(results["size"]))


def name_axes(results: pd.DataFrame) -> str:
    """Return a label for the numbers in a size, such as "height x width"."""
    return ("frames x " if sizes(results)[0].count("x") == 2 else "") + "height x width"


def count_seeds(results: pd.DataFrame, keys: list[str]) -> tuple[int, str]:
    """Return the largest number of seeds per variant, and a description: "3", or "1 to 3" if variants differ."""
    counts: Any = results.groupby(keys)["seed"].nunique()
    fewest, most = counts.min(), counts.max()
    return most, f"{most}" if fewest == most else f"{fewest} to {most}"


def summarize(groups: Any) -> pd.DataFrame:
    """Return the mean, standard deviation and number of the values in each group.

    If a value is NaN, so are the mean and the standard deviation of its group.
    """
    found, number = groups.agg(["mean", "std", "count"]), groups.size()
    complete = found["count"] == number  # pandas leaves out NaN
    return found.assign(mean=found["mean"].where(complete), std=found["std"].where(complete), count=number)


def show_mean(row: Any, digits: int) -> str:
    """Show a row of :func:`summarize`, without the deviation if there is none."""
    text = f"{row['mean']:.{digits}f}"
    return text if np.isnan(row["std"]) else f"{text} ± {row['std']:.{digits}f}"


def subtract(results: Any, base: Any, common: list[str], keys: list[str], level: float = 0.95) -> pd.DataFrame:
    """Subtract ``base`` from results that have the same seed and the same values in the columns ``common``.

    Returns:
        a row for each combination of ``keys``, with the mean difference over seeds, half the width of Student's
        interval (NaN for one seed, or if all seeds have the same difference), and the number of pairs.
    """
    where = [*common, "seed"]
    paired = results.join(base.set_index(where)["value"].rename("base"), on=where, how="inner")
    paired = paired.reset_index(drop=True)  # without rows in common, pandas names the index after ``where``
    groups = paired.assign(gap=paired.value - paired.base, most=paired.value.abs()).groupby(keys, sort=False)
    found = summarize(groups["gap"])
    # Accuracies on few test images tie by chance. An interval of zero width would look like certainty.
    rounding = 1e-6 * groups["most"].max()
    found["std"] = found["std"].where(found["std"] > rounding)
    width = student.ppf((1 + level) / 2, found["count"] - 1) * found["std"] / np.sqrt(found["count"])
    return pd.DataFrame({"mean": found["mean"], "half": width, "pairs": found["count"]})


def find_baseline(results: Any, baseline: str) -> tuple[Any, list[str]]:
    """Return the mask of a baseline's rows, and the columns in which other rows must agree with it.

    A baseline ENCODING is compared with rows that use the same attention, and ATTENTION/ENCODING with all other rows.
    """
    attention, slash, encoding = baseline.rpartition("/")
    mask = results.encoding == encoding
    return (mask & (results.attention == attention), []) if slash else (mask, ["attention"])


def difference(results: pd.DataFrame, baseline: str, level: float = 0.95) -> pd.DataFrame:
    """Compare each encoding with the baseline; see :func:`find_baseline` and :func:`subtract`."""
    is_base, same = find_baseline(results, baseline)
    of = ["positions", "size"]
    return subtract(results[~is_base], results[is_base], [*same, *of], [*KEYS, *of], level)


def show_difference(row: Any, digits: int) -> str:
    """Show a row of :func:`subtract`, in bold if the interval excludes zero."""
    if np.isnan(row["half"]):
        return f"{row['mean']:+.{digits}f}"
    text = f"{row['mean']:+.{digits}f} ± {row['half']:.{digits}f}"
    return f"**{text}**" if abs(row["mean"]) > row["half"] else text


def explain_intervals(found: pd.DataFrame) -> str:
    """Explain how :func:`show_difference` shows the rows of :func:`subtract`."""
    pairs, text = found["pairs"], ""
    if (pairs > 1).any():
        text += (
            ". The tables list means ± half-widths of 95% confidence intervals (Student's t), in bold if the "
            "interval excludes zero. The intervals are not corrected for multiple comparisons: about one in "
            "twenty excludes zero by chance alone"
        )
    if (pairs == 1).any():
        text += ". A difference from a single seed has no interval"
    if (found["half"].isna() & found["mean"].notna() & (pairs > 1)).any():
        text += f". {NO_INTERVAL}"
    if 2 in set(pairs):
        text += ". Two seeds tell you little: the half-width is 12.7 standard errors, or 4.3 with three seeds"
    return f"{text}."


def _accuracy(results: pd.DataFrame, ranking: list[Any], digits: int) -> list[str]:
    columns: Any = sizes(results)
    groups: Any = results.groupby([*KEYS, "size"])["value"]
    stats = summarize(groups)

    def cell(key: tuple[str, ...]) -> str:
        if key not in stats.index:
            return ""
        return show_mean(stats.loc[key], digits)

    lines = [[*key, *(cell((*key, size)) for size in columns)] for key in ranking]
    return table([*KEYS, *columns], lines, len(KEYS))


def _differences(results: pd.DataFrame, ranking: list[Any], baseline: str, digits: int) -> list[str]:
    found, columns = difference(results, baseline), sizes(results)
    if found.empty:
        return []
    within = "" if "/" in baseline else "Encodings are compared within the same kind of attention, and results"
    what = f"{within or 'Results'} are paired by seed{explain_intervals(found)}"

    def cell(key: tuple[str, ...]) -> str:
        if key not in found.index:
            return ""
        return show_difference(found.loc[key], digits)

    lines = [f"**Difference from {baseline}.** {what}", ""]
    for positions in POSITIONS:
        rows = [[*key, *(cell((*key, positions, size)) for size in columns)] for key in ranking]
        shown = [row for row in rows if any(row[2:])]
        lines += [f"{positions.capitalize()} positions:", "", *table([*KEYS, *columns], shown, len(KEYS))]
    return lines


def summarize_trainings(results: pd.DataFrame, ranking: list[Any]) -> list[str]:
    """Summarise the training runs of each variant: the largest rise in the loss, and the median of every other column.

    Columns without values are omitted.
    """
    runs: Any = results.drop_duplicates([*KEYS, "seed"])
    groups: Any = runs.groupby(KEYS)
    found = groups[["params", "loss", "step_ms", "peak_mib", "tokens", "train_seconds"]].median()
    found["loss_rise"] = groups["loss_rise"].agg(lambda each: each.max(skipna=False))

    def cell(value: float, form: str) -> str:
        return "" if pd.isna(value) else format(value, form)

    def speed(value: float) -> str:
        return cell(value, ".2f" if value >= 0.1 else "#.2g")

    # Runs with a time budget train one at a time.
    timed = "counted_seconds" in runs and runs.counted_seconds.notna().any()
    columns: dict[str, list[str]] = {}
    for key in ranking:
        row: Any = found.loc[key]
        cells = {
            "parameters": f"{row.params:,.0f}", "final loss": cell(row.loss, ".3f"), RISE: cell(row.loss_rise, ".3f"),
            "ms per step": cell(row.step_ms, ".1f"), "million tokens per second": speed(row.tokens / row.step_ms / 1e3),
            "peak memory, GiB": cell(row.peak_mib / 1024, ".2f"), "s per training": cell(row.train_seconds, ".0f"),
        }  # fmt: skip
        if timed:
            of = groups.get_group(key)
            least, most = of.counted_seconds.min(), of.counted_seconds.max()
            cells |= {"steps": f"{of.steps.median():,.0f}", "seconds counted": f"{least:.1f} to {most:.1f}"}
        for name, text in cells.items():
            columns.setdefault(name, []).append(text)
    measured = runs.columns[runs.notna().any()]  # there is no peak memory on a CPU
    columns = {name: cells for name, cells in columns.items() if SOURCES.get(name, "params") in measured}
    single = len(runs) == runs[KEYS].drop_duplicates().shape[0]
    text = f"The table lists {'each run' if single else 'medians over all runs'}"
    if RISE in columns:
        text += "" if single else ", and the largest rise in training loss in any run"
        text += ". If an encoding's loss rises far more than the others', its learning rate was too high"
    if "ms per step" in columns and not timed:
        text += ". Several runs may have shared the machine, so don't compare times between rows"
    rows = [[*key, *(cells[i] for cells in columns.values())] for i, key in enumerate(ranking)]
    return [f"{text}.", "", *table([*KEYS, *columns], rows, len(KEYS))]


def describe_model(settings: dict[str, Any]) -> str:
    """Return a sentence about the model's depth and width, or "" if the settings name a model or lack its sizes."""
    training = settings["training"]
    architecture = TASKS[settings["task"]].architecture(training)
    depth, dim = (training.get(name) or architecture.get(name) for name in ("depth", "dim"))
    heads = training.get("heads") or architecture.get("num_heads")
    if training.get("model") or not (depth and heads and dim):
        return ""
    return f"The model has {depth} layers with {heads} heads and {dim} channels. "


def describe_training(settings: dict[str, Any], results: pd.DataFrame) -> str:
    """Return sentences that describe the model and the training, including all non-default settings."""
    training = settings["training"]
    tokens = f" ({results.tokens.iloc[0]:,.0f} tokens)" if results.tokens.nunique() == 1 else ""
    seconds = training.get("seconds")
    length = f"{seconds:g} s (not counting the first steps)" if seconds else (
        f"{training['steps']:,} steps"
    )  # fmt: skip
    precision = {"no": "float32"}.get(training["precision"], training["precision"])
    graphs = " and CUDA graphs" if training.get("cuda_graphs") else ""
    compiled = f" with `torch.compile`{graphs}" if training["compile"] else ""
    text = (
        f"{describe_model(settings)}Each run trained for {length}, at batch size {training['batch']}{tokens} and "
        f"learning rate {training['lr']:g}, in {precision}{compiled}."
    )
    changed = find_changes(settings)
    return f"{text} Settings that differ from the task's defaults: {', '.join(changed)}." if changed else text


def find_free(settings: dict[str, Any]) -> set[str]:
    """Return the names of options that don't affect the results, such as log_every."""
    affects = ("weights", "test_size", "test_sizes")
    return {f.name for f in fields(TASKS[settings["task"]].config) if f.metadata["free"] and f.name not in affects}


def default_options(task: Task, training: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of the training command. Some defaults depend on other options in ``training``."""
    defaults = {f.name: f.default for f in fields(task.config) if f.default is not MISSING}
    return defaults | task.dependent_defaults(defaults | training)


def find_changes(settings: dict[str, Any]) -> list[str]:
    """Return non-default settings as "name value", except those that :func:`describe_training` already mentions."""
    task, training, free = TASKS[settings["task"]], settings["training"], find_free(settings)
    defaults = default_options(task, task.defaults | training) | task.defaults
    named = ("steps", "seconds", "batch", "lr", "precision", "compile", "cuda_graphs")
    return [
        f"`{name}` {show_value(training[name])}" + " times the learning rate" * (name == "frequency_lr")
        for name, default in defaults.items()
        if name in training and name not in {*named, *free} and str(training[name]) != str(default)
    ]


def describe_tests(results: pd.DataFrame) -> list[str]:
    """Return sentences about how much accuracies depend on the choice of test data, if the number of tests is known."""
    for column, tested in TESTED.items():
        if column in results:
            count, most = results[column].min(), results[column].max()
            if count != most:
                return [
                    f"Accuracies are measured on {count:,} to {most:,} test {tested}. The data changed between runs, "
                    "so don't compare their results."
                ]
            half, high = (100 * (part * (1 - part) / count) ** 0.5 for part in (0.5, 0.95))
            # The answers for the versions of one clip are correlated.
            tests, bound = (f"{tested}, with every label", "at most ") if column == "test_clips" else (tested, "")
            return [
                f"Accuracies are measured on {count:,} test {tests}. The standard error from the choice of {tested} is "
                f"{bound}{half:.1f} at an accuracy of 50%, and {bound}{high:.1f} at 95%."
            ]
    return []


def markdown(results: pd.DataFrame, config: dict[str, Any], baseline: str) -> str:
    """Render the tables, sorted by the result at the training size."""
    settings = config["settings"]
    task = TASKS[settings["task"]]
    digits = 1 if task.higher else 4
    trained = results[results["size"] == sizes(results)[0]]
    means: Any = summarize(trained.groupby(KEYS)["value"])["mean"]
    ranking = list(means.sort_values(ascending=not task.higher, kind="stable").index)
    seeds, number = count_seeds(results, KEYS)
    scheme = f"as mean ± standard deviation over {number} seeds" if seeds > 1 else "for one seed"
    measure = task.measure.replace(", %", " in %")
    lines = [
        f"The tables list the {measure} on {' and '.join(settings['data'])}, {scheme}. Rows are sorted by the first "
        "column, the training size. The models never saw the other sizes in training. Sizes are "
        f"{name_axes(results)}. {describe_training(settings, results)}",
        "",
    ]
    for positions, meaning in POSITIONS.items():
        part: Any = results[results.positions == positions]
        lines += [f"{positions.capitalize()} positions {meaning}.", "", *_accuracy(part, ranking, digits)]
    notes = [note for encoding, note in task.notes.items() if encoding in set(results.encoding)]
    notes += describe_tests(results)
    lines += [" ".join(notes), ""] if notes else []
    lines += _differences(results, ranking, baseline, digits)
    lines += summarize_trainings(results, ranking)
    return "\n".join([*lines, f"Measured on {describe_environments(config['environments'])}."]) + "\n"


def plot_sizes(results: pd.DataFrame, config: dict[str, Any], path: Path) -> None:
    """Plot the mean and standard deviation of the measure against the size.

    Each kind of attention has a row. Extrapolated and rescaled positions have a column each. If there is only one
    encoding, all kinds of attention share a row.
    """
    task, compared, ticks = TASKS[config["settings"]["task"]], config["settings"]["encodings"], sizes(results)
    if results.encoding.nunique() == 1:
        compared = {results.encoding.iloc[0]: list(compared)}
        results = results.rename(columns={"attention": "encoding", "encoding": "attention"})
    order = sorted(ticks, key=lambda size: (np.prod([int(n) for n in size.split("x")]), ticks.index(size)))
    groups: Any = results.groupby(["attention", "positions", "encoding", "size"])["value"]
    stats = summarize(groups)
    split = {}
    for attention, names in compared.items():
        measured = set(results[results.attention == attention].encoding)
        shown = [name for name in names if name in measured]
        split[attention] = split_series(shown) if shown else []
    rows = [(attention, group) for attention, groups in split.items() for group in groups]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(rows), len(POSITIONS), figsize=(WIDTH, 1.6 + 2.3 * len(rows)), sharex=True, sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        looks = choose_looks(list(dict.fromkeys(name for _, names in rows for name in names)))
        for row, (attention, names) in zip(axes, rows, strict=True):
            for axis, positions in zip(row, POSITIONS, strict=True):
                axis.axvline(order.index(ticks[0]), color="black", linestyle=":", linewidth=1)
                for name in names:
                    if (attention, positions, name) not in stats.index.droplevel("size"):
                        continue
                    line = stats.loc[(attention, positions, name)].reindex(order)
                    axis.errorbar(
                        range(len(order)), line["mean"], yerr=line["std"].fillna(0), label=name, capsize=2,
                        elinewidth=0.8, markersize=5, **looks[name],
                    )  # fmt: skip
                set_title(axis, f"{attention}, {positions}", names, len(split[attention]) > 1)
                axis.set_xticks(range(len(order)), order, fontsize=8, rotation=30)
        add_legend(figure)
        text = f"{name_axes(results)} (dotted: in training)"
        for axis in axes[-1]:
            axis.set_xlabel(text.replace(" (", "\n(") if len(text) > 40 else text)
        spread = "\n(mean ± standard deviation)" if results.seed.nunique() > 1 else ""
        figure.supylabel(f"{task.measure}{spread}", fontsize=10)
        save(figure, path, dpi=120)


def plot_trained(results: pd.DataFrame, config: dict[str, Any], path: Path) -> None:
    """Plot the measure at the training size, with each seed and the mean over seeds."""
    settings = config["settings"]
    trained = sizes(results)[0]
    shown: Any = results[(results["size"] == trained) & (results.positions == "extrapolated")]
    means: Any = summarize(shown.groupby("encoding")["value"])["mean"]
    ranking = list(means.sort_values().index)
    attentions = [attention for attention in settings["encodings"] if attention in set(shown.attention)]
    # Two kinds of attention get colours that don't stand for encodings.
    colours = cycle(OKABE_ITO[name] for name in dict.fromkeys(("black", "grey", *OKABE_ITO)))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDTH, 1.6 + 0.4 * len(ranking)), layout="constrained")
        offsets = np.linspace(0.16, -0.16, len(attentions)) if len(attentions) > 1 else (0.0,)
        for offset, colour, attention in zip(offsets, colours, attentions, strict=False):
            part = shown[shown.attention == attention]
            mean = summarize(part.groupby("encoding")["value"])["mean"].reindex(ranking)
            rows = np.arange(len(ranking)) + offset
            seeds = [rows[ranking.index(name)] for name in part.encoding]
            axis.plot(part.value, seeds, "o", color=colour, mfc="none", ms=5, label=f"{attention} attention, each seed")
            axis.plot(mean, rows, "|", color=colour, ms=12, mew=2.5, label=f"{attention} attention, mean")
        axis.set_yticks(range(len(ranking)), ranking)
        axis.set_ylim(-0.5, len(ranking) - 0.5)
        axis.set_xlabel(TASKS[settings["task"]].measure)
        axis.set_title(f"{', '.join(settings['data'])} at the training size, {trained}")
        add_legend(figure, columns=2)
        save(figure, path)
