"""Report page and plots for linear attention, from the CSVs of ``bench linear`` and ``bench linear-scaling``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter

from ..common.markdown import PICTURES, table
from ..common.plots import ENCODINGS, OKABE_ITO, STYLE, WIDTH, add_legend, mix_with_white, plt, save
from .linear_measure import WORKLOADS
from .linear_peers import SANA, SANA_WORKLOADS
from .linear_scaling import TOKENS_A_STEP
from .training_report import training, where

LINEAR, SCALING, TRAINING = "benchmark-linear.csv", "linear-scaling.csv", "linear-training.csv"
MEASURED_AGAIN = "training.csv"  # newer measurements of some rows in TRAINING
BARS, LINES = "performance-linear.png", "linear-scaling.png"
OURS = "lrpe-md"
PEERS = ("bidirectional", "sana")  # prefixes of the peers' workloads
UNUSUAL = ("width", "windows", "one-head")
PASSES = {"forward": "forward", "backward": "backward", "backward_omega": "backward with ω"}
MAPS = ("cosine", "rotate", "none")
PEER_COLORS = {  # and the share of white
    "SDPA": ("grey", 0.0), "unfused, compiled": ("vermilion", 0.0), "fla chunk": ("green", 0.0),
    "fla fused_chunk": ("green", 0.6), "flash_bla": ("yellow", 0.0), "diffusers": ("sky", 0.0),
    "SanaWM": ("purple", 0.0), "SanaWM, compiled": ("purple", 0.4),
}  # fmt: skip
EXCLUDED = {"features formed beforehand": "the activation", "angles formed beforehand": "the angles"}  # by note
MEASURES = {"tokens_per_s": "tokens per second", "peak_gib": "peak memory, GiB"}


def read(file: Path, key: list[str]) -> pd.DataFrame:
    """Return the latest row of each measurement, or an empty table if there is no file."""
    if not file.exists():
        return pd.DataFrame()
    rows = pd.read_csv(file, dtype={"commit": str, "note": str, "map": str}, keep_default_na=False, na_values=[""])
    return rows.fillna({"note": "", "commit": "unknown", "pass": ""}).drop_duplicates(key, keep="last")


def read_linear(folder: Path) -> pd.DataFrame:
    return read(folder / LINEAR, ["workload", "map", "pass", "impl"])


def read_scaling(folder: Path) -> pd.DataFrame:
    return read(folder / SCALING, ["backbone", "tokens", "attention", "map", "mode"])


def label(impl: str, map: str) -> str:
    """Return the label of a series, such as "lrpe-md, no positions" or the name of another library."""
    return impl if map == "none" and impl != OURS else f"{impl}, {'no positions' if map == 'none' else map}"


def names(rows: Any) -> list[tuple[str, str]]:
    """Return all pairs (implementation, map), with lrpe-md first."""
    found = dict.fromkeys(zip(rows.impl, rows["map"], strict=True))
    return sorted(found, key=lambda name: (name[0] != OURS, name[0], MAPS.index(name[1])))


# --- tables ----------------------------------------------------------------------------------------------------------


def describe_workloads(works: Sequence[str]) -> list[str]:
    """Render a table with a row for each workload."""
    head = ["workload", "grid", "prefix tokens", "batch", "heads", "head_dim", "activation", "denominator", "mask"]
    found = []
    for name in works:
        w = SANA if name in SANA_WORKLOADS else WORKLOADS.get(name)
        if w is not None:
            sizes = (w.prefix, w.batch, w.heads[0], w.head_dim)
            cells = (*map(str, sizes), w.act, w.normalizer, w.mask)
            found.append([f"**{name}**", " × ".join(map(str, w.shape)), *cells])
    return table(head, found)


def excluded(rows: Any) -> str:
    """Return sentences that list what the times of other libraries do not include."""
    text = "Rows of other libraries have no positions, unless their names include a map. "
    for note, what in EXCLUDED.items():
        libraries = dict.fromkeys(
            impl.replace(",", "").split()[0] for impl in rows.impl[rows.note.str.startswith(note)]
        )
        if libraries:
            text += f"The times of {' and '.join(libraries)} exclude {what}. "
    return text


def linear_table(rows: Any) -> str:
    """Render shares and milliseconds, with a row for each implementation and map and a column for each workload."""
    measured: Any = rows[rows.ms.notna()] if len(rows) else rows
    if not len(measured):
        return ""
    works = list(dict.fromkeys(measured.workload))
    module = "sana-module includes the norms and projections of SANA-Video's attention. " * ("sana-module" in works)
    lines = [
        "**Linear attention.** The tables list speeds as shares of a copy's speed, with milliseconds in brackets. The "
        "forward pass must move 4·BHND elements, and the backward pass 7·BHND. Times are medians in bfloat16 with a "
        f"cold L2 cache. {module}{excluded(measured)}{where(measured)}.",
        "",
        f"![Linear attention: share of copy]({PICTURES}/{BARS})",
        "",
        *describe_workloads(works),
    ]
    for group, (which, title) in itertools.product(group_works(works), PASSES.items()):
        part = measured[(measured["pass"] == which) & measured.workload.isin(group)]
        if not len(part):
            continue
        shown = [work for work in group if (part.workload == work).any()]
        found = []
        for impl, map in names(part):
            mine = part[(part.impl == impl) & (part["map"] == map)].set_index("workload")
            cells = [f"{mine.share[work]:.2f} ({mine.ms[work]:.3f})" if work in mine.index else "" for work in shown]
            text = label(impl, map)
            found.append([f"**{text}**" if impl == OURS else text, *cells])
        lines += table([title, *shown], found)
    failed: Any = rows[rows.ms.isna() & (rows.note != "")]
    lines += [f"* {r.impl}, {r.workload}, {r.map}: {r.note}" for r in failed.itertuples()]
    return "\n".join(lines) + "\n"


def scaling_table(rows: Any) -> str:
    """Render a table with a row for each backbone and number of tokens, and a column for each attention."""
    if not len(rows) or not rows.ms.notna().any():
        return ""
    kinds = list(dict.fromkeys(zip(rows.attention, rows["map"], rows["mode"], strict=True)))
    several = rows["mode"].nunique() > 1
    mode = "" if several else {"eager": ", in eager mode"}.get(rows["mode"].iloc[0], ", compiled")
    wide = " (dit-xl: 1,152, with head_dim 72)" if "dit-xl" in set(rows.backbone) else ""
    lines = [
        "**Training steps by number of tokens.** The table lists throughput in thousands of tokens per second, and "
        f"peak memory in GiB. The backbones have four blocks of width 768{wide} and run in "
        "bfloat16. A batch has "
        f"{TOKENS_A_STEP:,} tokens, or a single sample if that is longer. Shorter samples therefore need the same "
        "memory. "
        f"Each step runs the forward and backward passes and the optimiser{mode}. {where(rows)}.",
        "",
        f"![Throughput and memory by number of tokens]({PICTURES}/{LINES})",
        "",
    ]
    found = []
    for name, tokens in dict.fromkeys(zip(rows.backbone, rows.tokens, strict=True)):
        cells = []
        for attention, map, mode in kinds:
            of = rows[(rows.backbone == name) & (rows.tokens == tokens) & (rows.attention == attention)]
            of = of[(of["map"] == map) & (of["mode"] == mode)]
            cells.append("".join(scaling_cell(row) for row in of.itertuples()))
        found.append([name, f"{tokens:,}", *cells])
    head = [f"{attention} {map}{f', {mode}' if several else ''}" for attention, map, mode in kinds]
    return "\n".join([*lines, *table(["", "tokens", *head], found)])


def scaling_cell(row: Any) -> str:
    if row.ms != row.ms:
        return row.note.split(":")[0]
    text = f"{row.tokens_per_s / 1e3:,.0f}, {row.peak_gib:.1f}"
    return f"{text} ({row.note})" if row.note else text


def section(folder: Path) -> str:
    """Render all tables."""
    tables = (
        linear_table(read_linear(folder)),
        training(folder / TRAINING, folder / MEASURED_AGAIN),
        scaling_table(read_scaling(folder)),
    )
    return "\n".join(text for text in tables if text)


# --- plots -----------------------------------------------------------------------------------------------------------


def group_works(works: Sequence[str]) -> list[list[str]]:
    """Group workloads into usual sizes, unusual sizes, causal masks, frames, and comparisons with peers."""
    unusual, causal, frames, theirs = (
        [work for work in works if work.startswith(prefixes)] for prefixes in (UNUSUAL, "causal", "frames", PEERS)
    )
    usual = [work for work in works if work not in (*unusual, *causal, *frames, *theirs)]
    return [group for group in (usual, unusual, causal, frames, theirs) if group]


def name_work(work: str) -> str:
    """Return the two-line label for a workload's bars."""
    return work.replace("-", "\n", 1)


def plot_linear(rows: pd.DataFrame, path: Path) -> bool:
    """Plot shares of the copy's speed, with forward and backward passes side by side.

    There is a row of panels for each kind of attention, and a group of bars for each workload. The eager unfused
    implementation is left out.
    """
    part: Any = rows[rows.share.notna() & rows["pass"].isin(["forward", "backward"])] if len(rows) else rows
    part = part[part.impl != "unfused"] if len(part) else part
    if not len(part):
        return False
    groups, every = group_works(list(dict.fromkeys(part.workload))), names(part)
    rows_shown = [(works, which) for works in groups for which in ("forward", "backward")]
    with plt.rc_context({**STYLE, "axes.grid.axis": "y", "axes.axisbelow": True}):
        figure, axes = plt.subplots(
            len(rows_shown), 1, figsize=(WIDTH, 1.2 + 1.8 * len(rows_shown)), sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axis, (works, which) in zip(axes.flat, rows_shown, strict=True):
            of = part[part.workload.isin(works)]
            kinds = [kind for kind in every if ((of.impl == kind[0]) & (of["map"] == kind[1])).any()]
            here = of[of["pass"] == which].set_index(["impl", "map", "workload"]).share
            for i, kind in enumerate(kinds):
                places = np.arange(len(works)) + 0.8 * ((i + 0.5) / len(kinds) - 0.5)
                heights = [here.get((*kind, work), np.nan) for work in works]
                axis.bar(places, heights, 0.8 / len(kinds), label=label(*kind), color=choose_color(*kind))
            axis.axhline(1, color="black", linestyle=":", linewidth=1)
            axis.set_title(which)
            axis.set_xticks(range(len(works)), [name_work(work) for work in works])
            axis.set_xlim(-0.5, len(works) - 0.5)
        figure.supylabel("share of copy bandwidth", fontsize=10)
        add_legend(figure)
        save(figure, path)
    return True


def choose_color(impl: str, map: str) -> str:
    """Return the colour of a series: that of the map for lrpe-md, or that of the library for other libraries."""
    name, share = (ENCODINGS[map], 0.0) if impl == OURS else PEER_COLORS[impl]
    return mix_with_white(OKABE_ITO[name], share)


def plot_scaling(rows: pd.DataFrame, path: Path) -> bool:
    """Plot throughput and memory on logarithmic axes, with a column for each backbone."""
    part: Any = rows[rows.ms.notna()] if len(rows) else rows
    if not len(part):
        return False
    backbones = list(dict.fromkeys(part.backbone))
    kinds = list(dict.fromkeys(zip(part.attention, part["map"], part["mode"], strict=True)))
    several = len(set(part["mode"])) > 1
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(backbones), 2, figsize=(WIDTH, 1 + 2.3 * len(backbones)), sharex=True, sharey="col", squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for row, name in zip(axes, backbones, strict=True):
            for axis, (measure, title) in zip(row, MEASURES.items(), strict=True):
                for attention, map, mode in kinds:
                    of = part[(part.backbone == name) & (part.attention == attention) & (part["map"] == map)]
                    of = of[of["mode"] == mode].sort_values("tokens")
                    text = f"{attention} attention, {map}{f', {mode}' if several else ''}"
                    line, marker = ("--", "s") if attention == "softmax" else ("-", "o")
                    # Maps can be equally fast, so wide lines of the first map stay visible behind the other.
                    look: Any = {"lw": 4, "ms": 7} if map == MAPS[0] else {"ms": 4}
                    color = OKABE_ITO[ENCODINGS[map]]
                    axis.plot(of.tokens, of[measure], line, marker=marker, label=text, color=color, **look)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_title(f"{name}: {title}")
                axis.yaxis.set_major_formatter(EngFormatter(sep=""))
                axis.yaxis.set_minor_formatter("{x:g}" if measure == "peak_gib" else "")
                axis.tick_params(axis="y", which="minor", labelsize=8)
        for axis in axes[-1]:
            axis.set_xlabel("tokens per sample")
        add_legend(figure, columns=2)
        save(figure, path)
    return True


def plots(folder: Path) -> list[Path]:
    """Write every plot for which there are results."""
    drawn: dict[str, tuple[Callable[[pd.DataFrame, Path], bool], pd.DataFrame]] = {
        BARS: (plot_linear, read_linear(folder)), LINES: (plot_scaling, read_scaling(folder))
    }  # fmt: skip
    return [folder / name for name, (plot, rows) in drawn.items() if plot(rows, folder / name)]
