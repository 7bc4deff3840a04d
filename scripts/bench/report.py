"""Write the docs/results pages and plots about speed and adapted models from the files in scripts/results.

    make results                  or lrpe-md bench report [FOLDER] [--pages FOLDER] [--gpu NAME]

If several files contain the same measurement, the latest one is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import typer

from lrpe_md.checks import plural

from ..adapters.sweep import COLUMNS as SWEPT
from ..adapters.sweep import read_outcomes
from ..adapters.trial import LIBRARIES
from ..common.folder import ROOT, require_checkout, shown
from ..common.markdown import PAGES, PICTURES, page, table, write_page
from ..common.options import choose
from ..common.plots import STYLE, WIDTH, add_legend, choose_colors, plt, save
from ..common.provenance import name_commits
from . import front, linear_report
from .layers import TEXT_WORKLOADS, WORKLOADS
from .measure import COLUMNS, HERE, KEY, PASSES
from .modes import SMALL
from .peers import OURS, PEERS
from .training_report import adapted, backbones, training, where

RESULTS = ROOT / "scripts" / "results"
COMMAND = "lrpe-md bench report"
PASS_NAMES: dict[str, str] = dict(
    zip(PASSES, ("forward", "backward", "backward with ω", "forward + backward"), strict=True)
)
WAYS = ("forward, no gradient", "forward, gradient", "forward and backward")
BARS = 8  # maximum number of bars per group in a plot
NUMBERS = ("head_dim", "num_tokens", "num_axes", "p20", "p50", "p80", "min", "floor_bytes", "share", "copy_gbps")


def read(folder: Path, gpu: str | None = None) -> pd.DataFrame:
    """Read the latest row of each measurement on one GPU. The default is the GPU with the most rows."""
    files = sorted(folder.glob("benchmark-*.csv"))
    frames = [pd.read_csv(file, dtype=str, keep_default_na=False) for file in files]
    frames = [frame for frame in frames if set(KEY) <= set(frame)]  # other benchmarks have other columns
    if not frames:
        return pd.DataFrame(columns=[*COLUMNS, *HERE])
    rows: Any = pd.concat(frames, ignore_index=True)
    if gpu is not None:
        choose("--gpu", [gpu], tuple(dict.fromkeys(rows.gpu)))
    rows = rows[rows.gpu == (gpu or rows.gpu.value_counts().idxmax())]
    for name in NUMBERS:
        rows[name] = pd.to_numeric(rows[name])
    return rows.sort_values("date", kind="stable").drop_duplicates(list(KEY), keep="last").sort_index()


def ordered(values: Any) -> list[Any]:
    """Return the unique values: known workloads and peers in the benchmark's order, then the rest as they appear."""
    found = dict.fromkeys(values)
    return list(dict.fromkeys([*(v for v in (*WORKLOADS, *PEERS, "cosine", "rotate") if v in found), *found]))


def cell(rows: pd.DataFrame, text: str = "{:.2f}", column: str = "share") -> str:
    """Format the only value in the rows. Return ✗ if it violates the error budget, or "" if there is no value."""
    measured: Any = rows.dropna(subset=["p50"])
    if len(measured):
        last = measured.iloc[-1]
        return text.format(last[column]) + ("" if last.in_budget != "False" else " ✗")
    return "✗" if (rows.in_budget == "False").any() else ""


# --- tables ----------------------------------------------------------------------------------------------------------


def render(rows: pd.DataFrame) -> str:
    """Render the results as markdown. Return an empty string if nothing was measured."""
    if not len(rows):
        return ""
    one: Any = {name: ", ".join(ordered(v for v in rows[name] if v)) for name in ("gpu", "torch", "triton")}
    commits = name_commits(ordered(v for v in rows["commit"] if v) or ["unknown"])
    lines = [f"Measured on {one['gpu']}, torch {one['torch']}, triton {one['triton']}, {commits}."]
    speeds: Any = rows.copy_gbps.dropna()
    copies: Any = rows[rows["mode"] == "copy"].floor_bytes
    if len(copies):
        speed = " to ".join(ordered(f"{v:,.0f}" for v in (speeds.min(), speeds.max())))
        lines += [f"Copying {copies.iloc[-1] / 2**31:.2g} GiB of bfloat16 reads and writes memory at {speed} GB/s."]
    lines += [""]
    for part in (passes, variants, scaling, host, first_compile, memory, accuracy, left_out):
        lines += part(rows)
    return "\n".join(lines).strip() + "\n"


WORDS = """
A workload describes a batch: the grid, the prefix tokens, the batch size, the heads and the head_dim. Speeds are shares
of a copy's speed. The share is the bandwidth (bytes that must move, divided by time), relative to that of a large copy.
"""


def workloads() -> str:
    lines = [
        [f"**{name}**", " × ".join(map(str, w.shape)), str(w.prefix), str(w.batch), str(w.heads), str(w.head_dim)]
        for name, w in {**WORKLOADS, **TEXT_WORKLOADS}.items()
    ]
    return "\n".join(table(["workload", "grid", "prefix tokens", "batch", "heads", "head_dim"], lines, words=2))


def adapters(folder: Path) -> str:
    """Report which models `adapt_rotary` supports, and why it rejects the other models."""
    parts: list[str] = []
    counts: list[list[str]] = []
    for file in sorted(folder / f"{library}.csv" for library in LIBRARIES):
        if not file.is_file():
            continue
        rows: Any = pd.read_csv(file, keep_default_na=False)
        of = {outcome: rows[rows.outcome == outcome] for outcome in ("adapted", "refused", "untried")}
        counts.append([file.stem, *(str(len(part)) for part in of.values())])
        taken = table(["", "adapted"], group_names([row.model for row in of["adapted"].itertuples()]), words=2)
        others = [
            [f"`{row.model}`", shown, row.reason.removeprefix("refused ").removeprefix("rejected ").replace("|", "\\|")]
            for outcome, shown in (("refused", "rejected"), ("untried", "not tried"))
            for row in sorted(of[outcome].itertuples(), key=lambda row: row.model.lower())
        ]
        lines = table(["model", "outcome", "reason"], others, words=3) if others else []
        parts.append("\n".join([f"## {file.stem}", "", *taken, *lines]))
    if not parts:
        return ""
    return "\n".join([*table(["library", "adapted", "rejected", "not tried"], counts), *parts])


CHANGES = """
## Modified models

One test modifies a model before `adapt_rotary`, and another test modifies it afterwards. Both tests compare the model
with an original that has the same modification. The table counts the outcomes for all models to which a modification
applies. `rejected` means that `adapt_rotary` raises an error, and `error` that only the adapted model raises one.
`unstable` means that the modified original does not reproduce its own outputs, because it reads weights that are still
offloaded.
"""
OUTCOMES = ("same", "refused", "different", "error", "unstable")


def changes(file: Path) -> str:
    """Report how often an adapted model agrees with the original after both were modified."""
    if not file.is_file():
        return ""
    found: dict[str, list[str]] = {change: [] for change, _ in SWEPT}
    for each in read_outcomes(file):
        found[each.change].append(each.outcome)
    lines = [[change, *(str(made.count(name)) for name in OUTCOMES)] for change, made in found.items() if made]
    return "\n".join(
        [CHANGES, *table(["modification", *(name.replace("refused", "rejected") for name in OUTCOMES)], lines)]
    )


def group_names(names: list[str]) -> list[list[str]]:
    """Group names into one row per first letter or, for timm's vit_base_patch16_..., one row per model size."""
    rows: dict[str, list[str]] = {}
    for name in sorted(names, key=str.lower):
        group = "_".join(name.split("_")[:2]) if "_patch" in name else name[0].upper()
        rows.setdefault(group, []).append(f"`{name}`")
    return [[group, " ".join(each)] for group, each in rows.items()]


class Pivot(NamedTuple):
    """Layout of a table with a row for each implementation and a column for each case."""

    text: str
    columns: tuple[str, ...]
    value: str
    digits: int
    more: str = ""  # column shown in brackets after the value


PIVOTS = {
    "benchmark-norm.csv": Pivot(
        "**RMS norm and rotation of q and k.** The table lists speeds as shares of a copy's speed, with milliseconds "
        "in brackets. The forward pass must move twice the bytes of q and k, and the backward pass three times. The "
        "norm covers the channels of one head or of all heads. The batch size is 1, and head_dim is 128. wan has 21 × "
        "30 × 52 tokens and 40 heads. flux has 512 text tokens, 64 × 64 other tokens and 24 heads. qwen3 has 8,192 "
        "tokens, 32 query heads and 8 key heads.",
        ("over", "pass", "workload"), "share", 2, "ms",
    ),
    "benchmark-decode.csv": Pivot(
        "**A decoding step** rotates q and k, and stores k and v in the cache. The table lists the time in "
        "milliseconds on the GPU, in a CUDA graph and on the CPU. On a shared machine, CPU times vary, so "
        "individual times can be far too high. The number in a name is the batch size. decode processes one token per "
        "sequence, and prefill 2,048, with 32 query heads, 8 key heads and head_dim 128. In -half, only half of the "
        "channels are rotated.",
        ("measure", "workload"), "ms", 4,
    ),
    "benchmark-compiled.csv": Pivot(
        "**A compiled call with q and k.** The table lists its CPU time in microseconds, next to that of a "
        "`triton_op` with the same number of arguments.",
        ("map", "pass"), "p50", 0,
    ),
}  # fmt: skip


CASES = {  # from values in the files to words in the tables
    "backward_omega": "backward with ω", "both": "forward and backward", "head": "one head", "heads": "all heads",
    "gpu": "GPU", "graph": "CUDA graph", "host": "CPU",
}  # fmt: skip


def pivot(file: Path) -> str:
    """Render a file as a table, followed by a line about the machine and versions."""
    if not file.is_file():
        return ""
    shown = PIVOTS[file.name]
    rows: Any = pd.read_csv(file, dtype=str, keep_default_na=False)
    rows = rows[rows[shown.value] != ""]
    cases = list(dict.fromkeys(map(tuple, rows[list(shown.columns)].to_numpy().tolist())))
    impls = list(dict.fromkeys(rows.impl))
    cells = {(row["impl"], *(row[name] for name in shown.columns)): row for row in rows.to_dict("records")}
    lines: list[list[str]] = []
    for case in cases:
        line = [", ".join(str(CASES.get(part, part)) for part in case)]
        for impl in impls:
            row = cells.get((impl, *case))
            more = f" ({float(row[shown.more]):.3f})" if row is not None and shown.more else ""
            line.append("" if row is None else f"{float(row[shown.value]):.{shown.digits}f}{more}")
        lines.append(line)
    first = rows.iloc[0]
    here = f"Measured on {first.gpu}, {first.versions}, {name_commits(rows.commit)}."
    return "\n".join([f"{shown.text} {here}", "", *table(["", *impls], lines)])


HOST_TESTS = (
    "`python -m scripts.host_tests` runs the libraries' own tests for these models twice: once with the original "
    "models, and once with models that are adapted on construction. {passed:,} tests pass with the originals, and "
    "{worse} of them fail with adapted models. {adapted:,} tests use an adapted model, and the other tests don't build "
    "a model."
)


def host_tests(file: Path) -> str:
    """Report the results of other libraries' tests with stock and adapted models."""
    if not file.is_file():
        return ""
    rows: Any = pd.read_csv(file, keep_default_na=False)
    worse = sum(len(names.split()) for names in rows.worse)
    text = HOST_TESTS.format(
        passed=rows.passed_stock.sum(), worse=worse or "none",
        adapted=rows.of_adapted_models.sum(),
    )  # fmt: skip
    of = [
        f"{library} {installed} with the tests of {str(tests).replace('(', f'({library} commit ')}"
        for library, installed, tests in dict.fromkeys(zip(rows.library, rows.installed, rows.tests, strict=True))
    ]
    head = [
        "tests",
        "pass with originals",
        "pass when adapted",
        "use an adapted model",
        "fail in both",
        "newly failing",
    ]
    lines = [
        [
            f"{row.library}: {row.model}", str(row.passed_stock), str(row.passed_adapted), str(row.of_adapted_models),
            str(row.failed_both), row.worse or "none",
        ]
        for row in rows.itertuples()
    ]  # fmt: skip
    versions = f"We ran {' and '.join(of)}."
    return "\n".join(["## The libraries' own tests", "", text, "", versions, "", *table(head, lines)])


def pages(rows: pd.DataFrame, folder: Path) -> dict[str, str]:
    """Render all pages that have results, and return them by file name."""
    speed = render(rows), counters(folder / "counters.csv")
    others = [pivot(folder / name) for name in PIVOTS]
    found = {
        "performance.md": ("Encoding speed", (WORDS, workloads(), *speed, *others) if any(speed) else ()),
        "training-steps.md": (
            "Training steps",
            (
                training(folder / "training.csv"), adapted(folder / "adapted-training.csv"),
                backbones(folder / "backbones.csv"),
            ),
        ),
        "linear-attention.md": ("Linear attention speed", (linear_report.section(folder),)),
        "adapted-models.md": (
            "Adapted models",
            (
                adapters(folder / "adapters"), changes(folder / "adapters" / "changes.csv"),
                host_tests(folder / "adapters" / "own-tests.csv"),
            ),
        ),
    }  # fmt: skip
    return {name: page(title, COMMAND, *parts) for name, (title, parts) in found.items() if any(parts)}


def pass_rows(rows: pd.DataFrame) -> Any:
    return rows[rows["mode"].isin(PASSES) & (rows.op != "")]


def pass_tables(rows: Any, names: dict[str, Any]) -> list[str]:
    """Render a table for each pass, with a row for each name and a column for each workload."""
    lines = []
    for mode in PASSES:
        of = rows[rows["mode"] == mode]
        works, found = ordered(of.workload[of.p50.notna()]), []
        for name, select in names.items():
            part = of[select[of.index]]
            cells = [cell(part[part.workload == work]) for work in works]
            if any(cells):
                found.append([name, *cells])
        lines += table([PASS_NAMES[mode], *works], found) if works else []
    return lines


def passes(rows: pd.DataFrame) -> list[str]:
    plain = pass_rows(rows)
    plain = plain[plain.variant == ""]
    if not len(plain):
        return []
    wrong = (plain.in_budget == "False").any()
    lines = [
        "The tables list median speeds as shares of a copy's speed, in bfloat16 with a cold L2 cache. For each element "
        "of q and k, cosine must move 3 elements and rotate 2. The gradient of the frequencies ω adds one. For rotate, "
        "q and k are slices of a packed projection. If a library has to copy them, its time includes the copy. Tables "
        "of cos and sin are precomputed. The backward pass is `torch.autograd.grad` on a retained graph. "
        f"{'✗ marks results outside the error budget. ' if wrong else ''}"
        'The "same-size copy" row shows what fraction of peak copy speed a plain copy of the same number of bytes '
        "reaches.",
        "",
        f"![Share of copy bandwidth by workload]({PICTURES}/performance-passes.png)",
        "",
    ]
    for op in ordered(plain.op):
        part = plain[plain.op == op]
        names = {}
        for omega in ordered(part.omega):
            for peer in ordered(part.peer):
                label = f"{peer}, ω by head" if omega == "per-head" else peer
                names[f"**{label}**" if peer == OURS else label] = (part.omega == omega) & (part.peer == peer)
        lines += [f"**{op}**", "", *pass_tables(part, names)]
    return lines


def variants(rows: pd.DataFrame) -> list[str]:
    part = pass_rows(rows)
    part = part[(part.peer == OURS) & (part.omega == "shared")]
    lines = []
    for op in ordered(part[part.variant != ""].op):
        mine = part[part.op == op]
        names = {variant or "as above": mine.variant == variant for variant in sorted(ordered(mine.variant), key=bool)}
        lines += [
            f"**{op}** with other arguments. The backward pass of an activation reads x again.",
            "",
            *pass_tables(mine, names),
        ]
    return lines


def scaling(rows: pd.DataFrame) -> list[str]:
    if not len(rows[(rows["mode"] == "scaling") & rows.p50.notna()]):
        return []
    return [f"![Time against the number of tokens]({PICTURES}/performance-scaling.png)", ""]


def host(rows: pd.DataFrame) -> list[str]:
    part: Any = rows[rows["mode"] == "host"]
    if not len(part.p50.dropna()):
        return []
    some = part.iloc[0]
    lines = [
        "The table lists the median CPU time per call in microseconds "
        f"(B {SMALL.batch}, H {SMALL.heads}, N {some.num_tokens:.0f}, D {some.head_dim:.0f}, {some['dtype']}). "
        "`custom_op` wraps the same launcher in `torch.library.custom_op`. For `launch alone`, Triton launches the "
        "compiled kernel with prepared arguments. From the second call on, lrpe-md skips Triton's launcher, so it can "
        "take less time than that.",
        "",
    ]
    places = [(op, way) for op in ordered(part.op) for way in WAYS]
    found = []
    for peer in ordered(part[part.variant.isin(WAYS)].peer):
        mine = part[part.peer == peer]
        cells = [cell(mine[(mine.op == op) & (mine.variant == way)], "{:.1f}", "p50") for op, way in places]
        found.append([f"**{peer}**" if peer == OURS else peer, *cells])
    lines += table(["", *(f"{op}: {way}" if way == WAYS[0] else way for op, way in places)], found)
    started = part[(part.variant == "kernels") & part.p50.notna()]
    if len(started):
        texts = [f"{plural(round(row.p50), 'kernel')} for {row.op}" for row in started.itertuples()]
        lines += [f"According to the profiler, a forward call launches {' and '.join(texts)}.", ""]
    return lines


def first_compile(rows: pd.DataFrame) -> list[str]:
    part: Any = rows[(rows["mode"] == "compile") & rows.p50.notna()]
    if not len(part):
        return []
    texts = [f"{row.p50:.1f} s for {row.op} ({row.variant})" for row in part.itertuples()]
    return [f"In a fresh process with an empty Triton cache, the first call takes {' and '.join(texts)}.", ""]


def memory(rows: pd.DataFrame) -> list[str]:
    part: Any = rows[(rows["mode"] == "memory") & rows.p50.notna()]
    if not len(part):
        return []
    lines = [
        "The table lists the memory of forward and backward, without the inputs. The first number is the peak as a "
        "multiple of y and the gradients. The second is the MiB stored between the passes in addition to y.",
        "",
    ]
    places = [(op, work) for op in ordered(part.op) for work in ordered(part.workload)]
    part = part.assign(extra=part.variant.str.partition(", ")[2], what=part.variant.str.partition(", ")[0])
    found = []
    for peer, extra in ordered(zip(part.peer, part.extra, strict=True)):
        cells = []
        for op, work in places:
            here = part[(part.peer == peer) & (part.extra == extra) & (part.op == op) & (part.workload == work)]
            peak, kept = here[here.what == "peak"], here[here.what == "kept"]
            if len(peak) and len(kept):
                ratio = peak.p50.iloc[-1] * 2**20 / peak.floor_bytes.iloc[-1]
                cells.append(f"{ratio:.2f}×, {kept.p50.iloc[-1]:,.0f}")
            else:
                cells.append("")
        name = f"{peer}, {extra}" if extra else peer
        found.append([f"**{name}**" if peer == OURS else name, *cells])
    return lines + table(["", *(f"{op}: {work}" for op, work in places)], found)


def accuracy(rows: pd.DataFrame) -> list[str]:
    part: Any = rows[(rows["mode"] == "accuracy") & rows.p50.notna()]
    if not len(part):
        return []
    axes = sorted(ordered(part.num_axes))
    found = [
        [peer, *(cell(part[(part.peer == peer) & (part.num_axes == n)], "{:.1e}", "p50") for n in axes)]
        for peer in ordered(part.peer)
    ]
    lines = ["The largest angle error at positions up to 2^20, in radians:", ""]
    return lines + table(["", *(f"{n:.0f} {'axis' if n == 1 else 'axes'}" for n in axes)], found)


def counters(file: Path) -> str:
    """Report what limits the kernels, or return an empty string if the file of counters is missing."""
    if not file.exists():
        return ""
    found: Any = pd.read_csv(file, dtype={"commit": str})
    lines = [
        "`lrpe-md bench counters` reads the GPU's counters in one run per pass, with cold caches. `bytes` is the "
        "memory traffic as a multiple of the bytes that must move (about 25 MB stay in the L2 cache at the end). "
        "`memory`, `L2` and `instructions issued` are the utilisation of memory, of the busiest part of the L2 cache, "
        "and of the schedulers. `warps` is the share of active warps. "
        f"{where(found)}.",
        "",
    ]
    cells = []
    for row in found.itertuples():
        name = f"{row.workload}: {row.op}, {PASS_NAMES[row.mode]}"
        shares = [f"{value:.0f}%" for value in (row.dram, row.l2, row.issue, row.warps)]
        bytes_moved = (row.bytes_read + row.bytes_written) / row.floor_bytes
        cells.append([f"**{name}**" if row.peer == OURS else f"{name}: {row.peer}", f"{row.ns / 1e3:.1f}",
                      f"{bytes_moved:.2f}", *shares, f"{row.registers:.0f}"])  # fmt: skip
    head = ["", "µs", "bytes", "memory", "L2", "instructions issued", "warps", "registers"]
    return "\n".join([*lines, *table(head, cells)])


def left_out(rows: pd.DataFrame) -> list[str]:
    """List results that violate the error budget, and failures with their error messages."""
    wrong: Any = rows[rows.in_budget == "False"]
    failed: Any = rows[rows.p50.isna() & (rows.in_budget != "False") & (rows.note != "")]
    lines = []
    for title, part in (("Outside the error budget", wrong), ("Failed", failed)):
        texts = [
            f"* {', '.join(str(v) for v in (r.peer, r.op, r.mode, r.workload, r.omega, r.variant) if v)}: {r.note}"
            for r in part.itertuples()
        ]
        lines += [f"{title}:", "", *texts, ""] if texts else []
    return lines


# --- plots -----------------------------------------------------------------------------------------------------------


def choose_peers(part: pd.DataFrame) -> list[str]:
    """Choose the peers to plot for an operator. Peers are sorted by their number of measurements, then by speed.

    Unlike the plots, the tables show all peers.
    """
    found: Any = part.groupby("peer").agg(places=("share", "size"), share=("share", "median"))
    found["ours"] = found.index.str.startswith(OURS)
    first = found.sort_values(["ours", "places", "share"], ascending=False).index[:BARS]
    return [peer for peer in ordered(part.peer) if peer in first]


def plot_passes(rows: pd.DataFrame, path: Path) -> bool:
    """Draw bar charts for shared frequencies, with a row per operator and a column per pass."""
    part = pass_rows(rows)
    part = part[(part.variant == "") & (part.omega == "shared") & part.share.notna()]
    if not len(part):
        return False
    marked: Any = part.peer.where(part.in_budget != "False", part.peer + " ✗")
    part = part.assign(peer=marked)
    ops = ordered(part.op)
    shown = [p for p in PASSES if (part["mode"] == p).any()]
    colors = choose_colors(ordered(peer for op in ops for peer in choose_peers(part[part.op == op])))
    rows_shown = [(op, name) for op in ops for name in shown]
    with plt.rc_context({**STYLE, "axes.grid.axis": "y", "axes.axisbelow": True}):
        figure, axes = plt.subplots(
            len(rows_shown), 1, figsize=(WIDTH, 1.2 + 1.7 * len(rows_shown)), sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axis, (op, name) in zip(axes.flat, rows_shown, strict=True):
            there, workloads = choose_peers(part[part.op == op]), ordered(part[part.op == op].workload)
            here = part[(part.op == op) & (part["mode"] == name)].set_index(["peer", "workload"]).share
            draw_bars(axis, here, {peer: colors[peer] for peer in there}, workloads)
            axis.set_title(f"{op}, {PASS_NAMES[name]}")
        figure.supylabel("share of copy bandwidth", fontsize=10)
        add_legend(figure)
        save(figure, path)
    return True


def draw_bars(axis: Any, heights: Any, colors: dict[str, str], workloads: list[str]) -> None:
    """Draw a group of bars for each workload, with one bar per peer."""
    width = 0.84 / len(colors)
    for i, (peer, color) in enumerate(colors.items()):
        places = np.arange(len(workloads)) + (i - (len(colors) - 1) / 2) * width
        values = [heights.get((peer, work), np.nan) for work in workloads]
        axis.bar(places, values, width, label=peer, linewidth=0, color=color)
    axis.axhline(1, color="black", linestyle=":", linewidth=1)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_xlim(-0.5, len(workloads) - 0.5)


def plot_scaling(rows: pd.DataFrame, path: Path) -> bool:
    """Plot the forward time against N for each operator and number of axes, with a dotted line for the copy's speed."""
    part: Any = rows[(rows["mode"] == "scaling") & rows.p50.notna()]
    if not len(part):
        return False
    ops, places, peers = ordered(part.op), ordered(part.workload), ordered(part.peer)
    colors = choose_colors(peers)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(ops), len(places), figsize=(WIDTH, 1.1 + 2.5 * len(ops)), sharex=True, sharey=True,
            squeeze=False, layout="constrained",
        )  # fmt: skip
        for row, op in zip(axes, ops, strict=True):
            for axis, place in zip(row, places, strict=True):
                here = part[(part.op == op) & (part.workload == place)].sort_values("num_tokens")
                for i, peer in enumerate(peers):
                    line = here[here.peer == peer]
                    if len(line):
                        axis.plot(
                            line.num_tokens, line.p50, marker="osD^vPX*"[i % 8], ms=4, label=peer, color=colors[peer]
                        )
                floor = here.drop_duplicates("num_tokens")
                axis.plot(
                    floor.num_tokens, floor.floor_bytes / floor.copy_gbps / 1e6, "k:", lw=1, label="at copy's speed"
                )
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_title(f"{op}, {place}")
            row[0].set_ylabel("forward, ms")
        for axis in axes[-1]:
            axis.set_xlabel("tokens (8 heads)")
        add_legend(figure)
        save(figure, path)
    return True


# --- command line ----------------------------------------------------------------------------------------------------


def main(
    folder: Annotated[
        Path,
        typer.Argument(show_default=shown(RESULTS), help="Folder with benchmark-*.csv. Plots are saved there too."),
    ] = RESULTS,
    to: Annotated[
        Path, typer.Option("--pages", show_default=shown(PAGES), help="Output folder for the pages.")
    ] = PAGES,
    gpu: Annotated[str | None, typer.Option(help="GPU to report on. (default: the one with the most rows)")] = None,
) -> None:
    """Write the pages and plots of all measurements."""
    if folder == RESULTS or to == PAGES:
        require_checkout("FOLDER and --pages")
    rows = read(folder, gpu)
    found = pages(rows, folder)
    if not found:
        raise typer.BadParameter(f"FOLDER: expected a folder with results of `lrpe-md bench`, got {folder}")
    for name, plot in (("performance-passes.png", plot_passes), ("performance-scaling.png", plot_scaling)):
        if plot(rows, folder / name):
            print(folder / name)
    for path in linear_report.plots(folder):
        print(path)
    if front.plot_speed(rows, folder / front.SPEED):
        print(folder / front.SPEED)
    if front.plot_encodings(folder / "ablate-image" / "results.csv", folder / front.ENCODINGS):
        print(folder / front.ENCODINGS)
    for name, text in found.items():
        write_page(to / name, text)
