"""Tables and plot of associative recall, by memory, encoding, kind of question and size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from ..common.markdown import table
from ..common.plots import OKABE_ITO, STYLE, WIDTH, plt, save
from ..common.provenance import describe_environments
from ..train.data.recall import KINDS, OFFSETS
from .report_sizes import (
    KEYS,
    NO_INTERVAL,
    count_seeds,
    describe_training,
    difference,
    sizes,
    summarize,
    summarize_trainings,
)

NAMES = {"by key": "Key lookups", "by place": "Place lookups"}  # by kind of question
MEMORY = "add"  # other memories are compared with this one
LINES = 6  # maximum number of lines that can be labelled in a panel
COLORS = {"softmax": "black", "add": "orange", "decay": "green", "delta": "blue"}
DASHES = {"none": "-", "rotate": "--"}  # by encoding; other encodings are dotted


def frames_of(size: str) -> int:
    return int(size.split("x")[0])


def longest(results: pd.DataFrame) -> str:
    """Return the size with the most frames."""
    return max(sizes(results), key=frames_of)


def intervals(results: Any) -> pd.DataFrame:
    """Return the mean and the half-width of the 95% interval over seeds, by question, attention, encoding and size."""
    found = summarize(results.groupby(["question", *KEYS[::-1], "size"])["value"])
    half = student.ppf(0.975, found["count"] - 1) * found["std"] / np.sqrt(found["count"])
    return pd.DataFrame({"mean": found["mean"], "half": half})


def _cell(row: Any, form: str) -> str:
    text = form.format(row["mean"])
    return text if np.isnan(row["half"]) else f"{text} ± {row['half']:.1f}"


def _accuracies(results: pd.DataFrame, kind: str) -> list[str]:
    stats, columns = intervals(results).loc[kind], sizes(results)
    means: Any = stats["mean"].xs(longest(results), level="size")
    order = means.sort_values(ascending=False, kind="stable").index
    rows = [[*key, *(_cell(stats.loc[(*key, size)], "{:.1f}") for size in columns)] for key in order]
    return table(["memory", "positions", *columns], rows, 2)


def _differences(results: pd.DataFrame, kind: str, changed: str, baseline: str) -> list[str]:
    """Compare the values of a key in :data:`KEYS` with a baseline, paired by seed. Without a baseline, return []."""
    (same,) = (key for key in KEYS if key != changed)
    part: Any = results[results.question == kind]
    renamed = part.rename(columns={changed: "encoding", same: "attention", "question": "positions"})
    if baseline not in set(renamed.encoding) or renamed.encoding.nunique() == 1:
        return []
    found, rows = difference(renamed, baseline), []
    for other, fixed in dict.fromkeys((key[0], key[1]) for key in found.index):
        cells = [found.loc[(other, fixed, kind, size)] for size in sizes(results)]
        texts = [_cell(each, "{:+.1f}") for each in cells]
        bold = [
            f"**{text}**" if abs(each["mean"]) > each["half"] else text for each, text in zip(cells, texts, strict=True)
        ]
        rows.append([*((other, fixed) if changed == "attention" else (fixed, other)), *bold])
    return table(["memory", "positions", *sizes(results)], rows, 2) if rows else []


def markdown(results: pd.DataFrame, config: dict[str, Any], baseline: str) -> str:
    """Render the tables, sorted by accuracy on the longest clips."""
    training, trained = config["settings"]["training"], sizes(results)[0]
    seeds, number = count_seeds(results, KEYS)
    interval = f"as mean ± half-width of the 95% confidence interval (Student's t) over {number} seeds"
    scheme = interval if seeds > 1 else "for one seed"
    offsets = ", ".join(f"({t}, {h}, {w})" for t, h, w in OFFSETS)
    lines = [
        f"The tables list accuracy (%) on questions about symbols in earlier frames, {scheme}. Chance is "
        f"{100 / training['values']:g}%. Each column is a clip size: frames × height × width, in tokens. The first is "
        "the training size, and rows are sorted by the longest clips. In longer clips, only questions in the last "
        f"{frames_of(trained)} frames count. {describe_training(config['settings'], results)}",
        "",
        f"In each frame, {training['writes']} tokens each write one of {training['values']} values under one of "
        f"{training['keys']} keys. For each kind of lookup, up to {training['questions']} tokens ask for a value: the "
        f"latest value of a key, or the value at one of these offsets (frames back, rows down, columns right): "
        f"{offsets}.{describe_lines(results)}",
        "",
    ]
    for kind in KINDS:
        lines += [f"{NAMES[kind]}:", "", *_accuracies(results, kind)]
    bold = f", in bold if the interval excludes zero. {NO_INTERVAL}" if seeds > 1 else ""
    memory, _, encoding = baseline.rpartition("/")
    for changed, base, same in (("attention", memory or MEMORY, "positions"), ("encoding", encoding, "memory")):
        compared = {kind: _differences(results, kind, changed, base) for kind in KINDS}
        if any(compared.values()):
            lines += [
                f"The tables list the difference from {base} with the same {same}, paired by seed{bold}.",
                "",
            ]
        for kind, rows in compared.items():
            lines += [f"{NAMES[kind]}:", "", *rows] if rows else []
    order: Any = results.drop_duplicates(KEYS)[KEYS]
    lines += summarize_trainings(results, [tuple(key) for key in order.to_numpy()])
    return "\n".join([*lines, f"Measured on {describe_environments(config['environments'])}."]) + "\n"


def select_lines(results: pd.DataFrame, kind: str) -> list[tuple[str, str]]:
    """Return the variants to plot, as pairs (attention, encoding) sorted by accuracy on the longest clips.

    If there are more than six variants, keep only the best encoding for each memory, then the best six of those.
    """
    part: Any = results[(results.question == kind) & (results["size"] == longest(results))]
    means: Any = summarize(part.groupby(KEYS[::-1])["value"])["mean"].sort_values(ascending=False, kind="stable")
    if len(means) <= LINES:
        return list(means.index)
    best: dict[str, str] = {}
    for attention, encoding in means.index:
        best.setdefault(attention, encoding)
    return list(best.items())[:LINES]


def describe_lines(results: pd.DataFrame) -> str:
    """Say which variants the plot shows, or return "" if it shows all of them."""
    if len(results.drop_duplicates(KEYS)) <= LINES:
        return ""
    fewer = f" It only shows the best {LINES} memories." if results.attention.nunique() > LINES else ""
    return (
        " For each kind of lookup and each memory, the plot only shows the positions with the highest mean accuracy on "
        f"the longest clips.{fewer}"
    )


def spread(values: Sequence[float], gap: float, most: float) -> list[float]:
    """Move values apart until neighbours differ by ``gap`` or more, keeping their order and not exceeding ``most``."""
    placed, last = np.zeros(len(values)), -np.inf
    order = np.argsort(values, kind="stable")
    for i in order:
        placed[i] = last = max(values[i], last + gap)
    for i in order[::-1]:
        placed[i] = highest = min(float(placed[i]), most)
        most = highest - gap
    return placed.tolist()


def plot_recall(results: pd.DataFrame, config: dict[str, Any], path: Path) -> None:
    """Plot accuracy by number of frames for each memory and encoding, with each seed and the mean over seeds."""
    trained, stats = sizes(results)[0], intervals(results)
    by_line: Any = results.assign(frames=results["size"].map(frames_of)).groupby(["question", *KEYS[::-1]])
    image = trained.partition("x")[2]
    ticks = sorted((size for size in sizes(results) if size.partition("x")[2] == image), key=frames_of)
    frames = [frames_of(size) for size in ticks]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(KINDS), figsize=(WIDTH, 3.2), sharey=True, layout="constrained")
        for axis, kind in zip(axes, KINDS, strict=True):
            lines = select_lines(results, kind)
            means = [stats.loc[(kind, *line)].reindex(ticks) for line in lines]
            heights = spread([each["mean"].iloc[-1] for each in means], 6.0, 101.0)
            for (attention, encoding), each, height in zip(lines, means, heights, strict=True):
                kinds = list(dict.fromkeys(attention.split(",")))
                color = OKABE_ITO[COLORS[kinds[0]]]
                seeds = by_line.get_group((kind, attention, encoding))
                seeds = seeds[seeds["size"].isin(ticks)]
                axis.plot(seeds.frames, seeds.value, "o", color=color, markersize=2.5, alpha=0.5)
                axis.plot(
                    frames, each["mean"], color=color, linestyle=DASHES.get(encoding, ":"),
                    marker="s" if len(kinds) > 1 else "o", markersize=5,
                )  # fmt: skip
                axis.annotate(
                    f"{' + '.join(kinds)}, {encoding}", (frames[-1], height), (6, 0), color=color, fontsize=8,
                    textcoords="offset points", va="center", annotation_clip=False,
                )  # fmt: skip
            chance = 100 / config["settings"]["training"]["values"]
            axis.axhline(chance, color=OKABE_ITO["grey"], linewidth=0.8)
            axis.annotate(
                "chance", (frames[0], chance), (4, -2), color=OKABE_ITO["grey"], fontsize=8, va="top",
                textcoords="offset points",
            )  # fmt: skip
            axis.axvline(frames[0], color="black", linestyle=":", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_xticks(frames, [str(n) for n in frames])
            axis.set_xlabel("frames (dotted: in training)")
            axis.set_title(NAMES[kind])
            axis.set_ylim(0, 104)
            axis.minorticks_off()
        axes[0].set_ylabel("accuracy, %")
        figure.suptitle("lines: mean; small dots: each seed", fontsize=9)
        save(figure, path)
