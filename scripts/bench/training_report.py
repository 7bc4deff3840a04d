"""Tables of training step times, from the CSVs of ``scripts.bench training``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ..common.markdown import table
from ..common.provenance import name_commits

KEY = ["model", "mode", "encoding"]


def read(file: Path, newer: Path | None = None) -> pd.DataFrame:
    """Read the latest row of each model, mode and encoding. Rows in ``newer`` replace those in ``file``.

    A row is only replaced by one that was measured on the same GPU.
    """
    rows = pd.read_csv(file, dtype={"commit": str}).drop_duplicates(KEY, keep="last")
    if newer is not None and newer.exists():
        rows = rows.set_index([*KEY, "gpu"])
        rows.update(read(newer).set_index([*KEY, "gpu"]))
        rows = rows.reset_index()
    return rows.fillna({"commit": "unknown"})


def how(rows: pd.DataFrame) -> str:
    """Return sentences that explain the values and marks in a table's cells."""
    counts = rows.rounds[rows.encoding != rows.baseline]
    rounds = " to ".join(dict.fromkeys(f"{count:.0f}" for count in (counts.min(), counts.max())))
    usual, *others = map(card, rows.gpu.value_counts().index)
    cards = f"Steps marked {' or '.join(others)} ran on that GPU, and all others on an {usual}. " * bool(others)
    return (
        f"Values are medians over {rounds} rounds in bfloat16. Each round runs one step of each model. ± is half the "
        "range from the 20th to the 80th percentile, so it shows how much single rounds differ. In steps marked "
        f"(host), the CPU spends at least 90% of the time launching kernels. {cards}"
    )


def where(rows: pd.DataFrame) -> str:
    gpu, versions = (" and ".join(dict.fromkeys(rows[name])) for name in ("gpu", "versions"))
    return f"Measured on {gpu}, {versions}, {name_commits(rows['commit'])}"


def card(gpu: str) -> str:
    """Return the short name of a GPU, such as H100 for NVIDIA H100 80GB HBM3."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def marks(row: Any, rows: pd.DataFrame) -> str:
    """Mark steps that wait for the CPU, and steps on a GPU that most rows don't use."""
    found = ["host"] * bool(row.host_ms > 0.9 * row.ms_p50)
    found += [card(row.gpu)] * bool(row.gpu != rows.gpu.value_counts().index[0])
    return f" ({', '.join(found)})" if found else ""


def change(median: float, low: float, high: float) -> str:
    """Format a ratio to the baseline as a change in percent, ± half of the range from ``low`` to ``high``."""
    return f"{100 * median - 100:+.1f} ± {50 * abs(high - low):.1f}%"


def time_and_memory(row: Any) -> str:
    return f"{change(row.ratio_p50, row.ratio_p20, row.ratio_p80)}, {100 * row.memory_ratio - 100:+.1f}%"


def batches(rows: pd.DataFrame) -> str:
    """Return a sentence with the batch size and the tokens per sample of each model, if the CSV contains them.

    If the sizes of a model differ, the sentence also names the modes that were measured with each size.
    """
    found = []
    for model, of in rows.dropna(subset=["tokens"]).groupby("model", sort=False):
        sizes: Any = of.groupby(["batch", "tokens"], sort=False)["mode"].unique()
        for (batch, tokens), modes in sizes.items():
            name = model if len(sizes) == 1 else f"{model}, {' and '.join(modes)}"
            found.append(f"{batch:,} × {tokens / batch:,.0f} tokens ({name})")
    counted = "not counting class tokens and the text of diffusion models"
    listed = " and ".join(each for each in (", ".join(found[:-1]), *found[-1:]) if each)
    return f"A batch has {listed}, {counted}. " if found else ""


def list_notes(*notes: str) -> list[str]:
    """Return the lines of a list below a table."""
    return [*(f"- {note.strip()}" for note in notes if note), ""]


def training(file: Path, newer: Path | None = None) -> str:
    """Render a table with a row for each encoding, and a column for each model and mode."""
    if not file.exists():
        return ""
    rows = read(file, newer)
    timm = (
        "timm-axial and timm-mixed are compared with timm-none, which is timm's RoPE-ViT without RoPE. timm-none is "
        "compared with timm's plain ViT. In the video layer, timm-axial is compared with the layer without positions. "
    )
    timm *= "timm-none" in set(rows.encoding)
    again = "Rows that end in -again use `keep_encoded=False`, which re-encodes q and k in the backward pass. "
    again *= bool(rows.encoding.str.endswith("-again").any())
    joined = (
        "In eager mode, rotation can be faster than no positions: its backward pass writes the gradients of q, k and "
        "v into one tensor, while PyTorch stacks and copies them. "
    )
    joined *= bool((rows.ratio_p50[(rows["mode"] == "eager") & (rows.encoding == "axial")] < 1).any())
    lines = [
        "**Training steps.** The table lists the overhead in time and in peak memory, compared with the same model "
        f"without position encoding.{' Rows in bold use lrpe-md.' * bool(timm)}",
        "",
    ]
    columns = list(dict.fromkeys(zip(rows.model, rows["mode"], strict=True)))
    found = []
    for name in dict.fromkeys(rows.encoding[rows.encoding != rows.baseline]):
        cells = []
        for model, mode in columns:
            cell = rows[(rows.model == model) & (rows["mode"] == mode) & (rows.encoding == name)]
            cells.append("".join(f"{time_and_memory(r)}{marks(r, rows)}" for r in cell.itertuples()))
        found.append([f"**{name}**" if not name.startswith("timm") else name, *cells])
    notes = list_notes(timm, again, joined, batches(rows), how(rows), f"{where(rows)}.")
    return "\n".join(lines + table(["", *(f"{model}, {mode}" for model, mode in columns)], found) + notes)


def backbones(file: Path) -> str:
    """Render a table with a row for each model and encoding, and a column for each mode."""
    if not file.exists():
        return ""
    rows = read(file)
    fused = (
        "In eager mode, dit with rotation or cosine is faster than none, because one launch normalises and encodes q "
        "and k. rotate-norms-first normalises them in separate launches, as none does. "
    )
    fused *= "rotate-norms-first" in set(rows.encoding)
    lines = [
        "**Training steps of this project's backbones**, on random data. The table lists millions of patches per "
        "second and peak memory. The changes relative to the same model without position encoding "
        "(none) are in brackets.",
        "",
    ]
    modes = list(dict.fromkeys(rows["mode"]))
    found = []
    for model, name in dict.fromkeys(zip(rows.model, rows.encoding, strict=True)):
        cells = []
        for mode in modes:
            cell = rows[(rows.model == model) & (rows["mode"] == mode) & (rows.encoding == name)]
            cells.append("".join(f"{speed_and_memory(r)}{marks(r, rows)}" for r in cell.itertuples()))
        found.append([f"{model}, {name}", *cells])
    command = "lrpe-md bench training --models image,video_model,dit --out scripts/results/backbones.csv"
    notes = list_notes(
        fused, batches(rows), how(rows), f"To repeat the measurements, run `{command}`.", f"{where(rows)}."
    )
    return "\n".join(lines + table(["", *modes], found) + notes)


def adapted(file: Path) -> str:
    """Render stock models' times and the speed-ups from adaptation, with a row per model and a column per mode."""
    if not file.exists():
        return ""
    rows = read(file)
    lines = [
        "**Models from other libraries** have their published width, a few layers and bfloat16 weights. The table "
        "lists the original model's time per step, in milliseconds. The changes in time and memory with "
        "`adapt_rotary` are in brackets.",
        "",
    ]
    modes = list(dict.fromkeys(rows["mode"]))
    found = []
    for model in dict.fromkeys(rows.model):
        cells = []
        for mode in modes:
            part = rows[(rows.model == model) & (rows["mode"] == mode)].set_index("encoding")
            if not {"stock", "adapted"} <= set(part.index):
                cells.append("")
                continue
            stock, ours = part.loc["stock"], part.loc["adapted"]
            cells.append(f"{stock.ms_p50:.1f} ms ({time_and_memory(ours)}){marks(ours, rows)}")
        found.append([model, *cells])
    command = f"lrpe-md bench training --models {','.join(dict.fromkeys(rows.model))}"
    notes = list_notes(batches(rows), how(rows), f"To repeat the measurements, run `{command}`.", f"{where(rows)}.")
    heads = ["", *("eager inference" if mode == "inference" else mode for mode in modes)]
    return "\n".join(lines + table(heads, found) + notes)


def speed_and_memory(row: Any) -> str:
    faster, more = "", ""
    if row.encoding != row.baseline:
        faster = f" ({change(1 / row.ratio_p50, 1 / row.ratio_p20, 1 / row.ratio_p80)})"
        more = f" ({100 * row.memory_ratio - 100:+.1f}%)"
    return f"{row.tokens / row.ms_p50 / 1000:.2f} M/s{faster}, {row.peak_gib:.2f} GiB{more}"
