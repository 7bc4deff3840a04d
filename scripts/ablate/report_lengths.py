"""Table and plot of bits per byte by text length and position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from ..common.markdown import table
from ..common.plots import STYLE, WIDTH, add_legend, choose_looks, plt, save, set_title, split_series
from ..common.provenance import describe_environments
from ..train.tasks.lm import DEFAULT_LENGTHS, count_windows, skipped_lengths
from .report_sizes import (
    KEYS,
    count_seeds,
    describe_training,
    explain_intervals,
    find_baseline,
    show_difference,
    show_mean,
    subtract,
    summarize,
)


def parse(results: pd.DataFrame) -> pd.DataFrame:
    """Parse length, first position and last position from column names such as "8192:512-1024" or "512" (all)."""
    parts = results["size"].astype(str).str.extract(r"^(?P<length>\d+)(?::(?P<first>\d+)-(?P<last>\d+))?$")
    parts["first"], parts["last"] = parts["first"].fillna("0"), parts["last"].fillna(parts["length"])
    return results.assign(**{key: parts[key].astype(int).to_numpy() for key in parts}, name=names(results))


def names(results: pd.DataFrame) -> Any:
    """Return display names such as "rotate + yarn", or "linear/rotate" if there are several kinds of attention."""
    scaled = results.positions != "none"
    kinds = results.attention + "/" if results.attention.nunique() > 1 else ""
    return kinds + results.encoding + (" + " + results.positions).where(scaled, "")


def ranking(results: Any) -> list[str]:
    """Return the names sorted by result at the longest length, best first."""
    longest = results[(results["first"] == 0) & (results["last"] == results.length.max())]
    return list(summarize(longest.groupby("name")["value"])["mean"].sort_values(kind="stable").index)


def _differences(whole: Any, baseline: str, lengths: list[int]) -> list[str]:
    """Compare each name with the baseline; see :func:`find_baseline`."""
    mask, same = find_baseline(whole, baseline)
    is_base = mask & (whole.positions == "none")
    found = subtract(whole[~is_base], whole[is_base], [*same, "length"], ["name", "length"])
    if found.empty:
        return []
    what = f"Results are paired by seed{explain_intervals(found)}"
    if same and whole.attention.nunique() > 1:
        what = f"Encodings are compared within the same kind of attention. {what}"
    rows = [
        [name, *(show_difference(found.loc[(name, n)], 3) if (name, n) in found.index else "" for n in lengths)]
        for name in ranking(whole)
        if name in found.index
    ]
    return [f"**Difference from {baseline}.** {what}", "", *table(["encoding", *(f"{n:,}" for n in lengths)], rows)]


def describe_evaluation(results: pd.DataFrame, limit: int, lengths: list[int]) -> str:
    """State how many bytes each length is evaluated on. Use ``limit`` if the results don't record it."""
    num_bytes = int(results["test_bytes"].max()) if "test_bytes" in results else limit
    found = [length * count_windows(length, num_bytes) for length in lengths]
    if len(set(found)) == 1:
        return f"Each length is evaluated on the same {found[0]:,} bytes."
    return (
        f"Each length is evaluated on adjacent windows at the start of the held-out text, {min(found):,} to "
        f"{max(found):,} bytes in total."
    )


def markdown(results: pd.DataFrame, config: dict[str, Any], baseline: str) -> str:
    """Render the table, including the baseline. Rows are sorted by the result at the longest length."""
    settings = config["settings"]
    training = settings["training"]
    trained = training["length"]
    results = parse(results)
    seeds, number = count_seeds(results, KEYS)
    whole: Any = results[(results["first"] == 0) & (results["last"] == results.length)]
    stats = summarize(whole.groupby(["name", "length"])["value"])
    fixed = whole.drop_duplicates("name").set_index("name")
    lengths = sorted(whole.length.unique())
    scheme = f"as mean ± standard deviation over {number} seeds" if seeds > 1 else "for one seed"

    seconds = results.drop_duplicates([*KEYS, "seed"]).train_seconds
    lines = [
        f"The table lists bits per byte of held-out text, {scheme}. Columns are lengths in bytes, and rows are "
        f"sorted by the longest length. {describe_training(settings, results)} Training windows have {trained} bytes. "
        f"{describe_evaluation(results, training['test_bytes'], lengths)} In rows with + linear, + ntk or + yarn, "
        f"frequencies are scaled without further training, by a factor of length / {trained}.",
        "",
    ]
    if skipped := skipped_lengths(training.get("lengths", DEFAULT_LENGTHS), lengths):
        lines[0] += f" Lengths without results, because they are too long for the held-out text: {skipped}."
    rows = [
        [name, f"{fixed.params[name]:,}", *(show_mean(stats.loc[(name, n)], 3) for n in lengths)]
        for name in ranking(results)
    ]
    lines += table(["encoding", "parameters", *(f"{n:,}" for n in lengths)], rows)
    lines += _differences(whole, baseline, lengths)
    took = f"; each run took {seconds.min():.0f} to {seconds.max():.0f} s" if seconds.notna().any() else ""
    lines += [f"Measured on {describe_environments(config['environments'])}{took}."]
    return "\n".join(lines) + "\n"


def plot_lengths(results: pd.DataFrame, config: dict[str, Any], path: Path) -> None:
    """Plot the mean and standard deviation of bits per byte by length, and by position at the longest length."""
    results, trained = parse(results), config["settings"]["training"]["length"]
    longest = results.length.max()
    whole = (results["first"] == 0) & (results["last"] == results.length)
    parts: Any = results[(results.length == longest) & ~whole]
    groups = split_series(ranking(results))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(groups), 2, figsize=(WIDTH, 1.4 + 2.8 * len(groups)), sharex="col", sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        position = f"up to this byte\n(length {longest:,} bytes)"
        panels = (("length", results[whole], "length, bytes"), ("last", parts, position))
        looks = choose_looks(ranking(results))
        for row, names in zip(axes, groups, strict=True):
            for axis, (key, rows, label) in zip(row, panels, strict=True):
                stats = summarize(rows.groupby(["name", key])["value"])
                for name in names:
                    line = stats.loc[name]
                    axis.errorbar(
                        line.index, line["mean"], yerr=line["std"].fillna(0), label=name, capsize=2, elinewidth=0.8,
                        markersize=4, **looks[name],
                    )  # fmt: skip
                axis.axvline(trained, color="black", linestyle=":", linewidth=1)
                ticks = sorted(set(rows[key]))
                axis.set_xscale("log", base=2)
                axis.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8, rotation=30)
                axes[-1, list(row).index(axis)].set_xlabel(label)
            if len(groups) > 1:
                for axis in row:
                    set_title(axis, "", names, True)
            row[0].set_yscale("log")  # separates close curves even if one encoding fails badly
            row[0].set_ylabel("bits per byte")
        low, high = axes[0, 0].get_ylim()
        shown: Any = [n for n in (1, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16) if low <= n <= high]
        if len(shown) < 2:
            shown = [n for n in MaxNLocator(4).tick_values(low, high) if low <= n <= high]
        for axis in axes[:, 0]:
            axis.set_yticks(shown, [f"{n:g}" for n in shown])
            axis.minorticks_off()
        spread = "; mean ± standard deviation" if results.seed.nunique() > 1 else ""
        figure.suptitle(f"dotted: length in training, {trained:,} bytes{spread}", fontsize=10)
        add_legend(figure)
        save(figure, path)
