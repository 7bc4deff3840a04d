"""Plots of the README: speed compared with peers, and encodings at sizes unseen in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..common.plots import OKABE_ITO, STYLE, plt
from .peers import OURS

SPEED, ENCODINGS = "front-speed.png", "front-encodings.png"
COLOURS = [OKABE_ITO[n] for n in ("blue", "orange", "green", "vermilion", "purple", "sky", "grey", "black")]
BESIDE = {  # names in the benchmark: names in the plot
    OURS: "lrpe-md", "flash-attn": "flash-attn", "liger, in place": "Liger", "timm, compiled": "timm, torch.compile",
    "torch.compile, tables": "PyTorch with tables, torch.compile", "torch.compile, angles": "PyTorch, torch.compile",
    "copy of as many bytes": "a copy of as many bytes",
}  # fmt: skip
WORKLOADS = {
    "vit224": "ViT, 224 pixels\n197 tokens", "img64": "64 × 64 patches\n4,096 tokens",
    "video": "video and text\n33,272 tokens", "text": "text\n8,192 tokens",
}  # fmt: skip
SHOWN = {
    "rotate": "rotation", "rotate-mixed": "rotation, mixed axes", "cosine-silu": "cosine, silu",
    "cosine-softplus": "cosine, softplus", "sincos": "sine-cosine table", "learned": "learned table", "none": "none",
}  # fmt: skip


def plot_speed(rows: pd.DataFrame, path: Path) -> bool:
    """Plot the speed of rotating q and k, forward and backward, as a share of the speed of a large copy."""
    if not len(rows):
        return False
    plain: Any = rows[(rows.op == "rotate") & (rows.variant == "") & (rows.omega == "shared") & rows.share.notna()]
    passes = {"fwd": "forward", "bwd": "backward"}
    works = [name for name in WORKLOADS if name in set(plain.workload)]
    with plt.rc_context({**STYLE, "axes.grid.axis": "y", "axes.axisbelow": True}):
        figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.6), sharey=True, layout="constrained")
        for axis, (name, title) in zip(axes, passes.items(), strict=True):
            of = plain[plain["mode"] == name].set_index(["peer", "workload"]).share
            for i, (peer, label) in enumerate(BESIDE.items()):
                heights = [of.get((peer, work), np.nan) for work in works]
                places = np.arange(len(works)) + 0.84 * ((i + 0.5) / len(BESIDE) - 0.5)
                axis.bar(places, heights, 0.84 / len(BESIDE), label=label, color=COLOURS[i])
            axis.set_xticks(range(len(works)), [WORKLOADS[work] for work in works], fontsize=8)
            axis.set_title(f"rotation of q and k, {title}", fontsize=10)
        axes[0].set_ylabel("share of memory bandwidth")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return True


def plot_encodings(results: Path, path: Path) -> bool:
    """Plot accuracy against image size for softmax attention, with extrapolated and with rescaled positions."""
    if not results.exists():
        return False
    rows: Any = pd.read_csv(results, keep_default_na=False)
    rows = rows[rows.attention == "softmax"].astype({"value": float})
    rows["side"] = rows["size"].str.split("x").str[0].astype(int)
    rows = rows[rows["size"] == rows.side.astype(str) + "x" + rows.side.astype(str)]
    trained = int(str(rows["size"].iloc[0]).split("x")[0])
    titles = {"extrapolated": "positions go on as in training", "rescaled": "positions laid over the trained grid"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.8), sharey=True, layout="constrained")
        for axis, (name, title) in zip(axes, titles.items(), strict=True):
            for i, (encoding, label) in enumerate(SHOWN.items()):
                of = rows[(rows.encoding == encoding) & rows.positions.isin([name, ""])]
                values = of.groupby("side").value.agg(["mean", "std"])
                axis.errorbar(
                    values.index, values["mean"], yerr=values["std"], label=label, marker="osD^vPX"[i], ms=4,
                    capsize=2, color=COLOURS[i],
                )  # fmt: skip
            axis.axvline(trained, color="black", linestyle=":", linewidth=1)
            axis.set_xlabel("height and width of the images, pixels (dotted: in training)")
            axis.set_title(title, fontsize=10)
        axes[0].set_ylabel("accuracy, %")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return True
