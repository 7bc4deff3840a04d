"""Plots for the README: speed compared with other libraries, and accuracy of encodings at unseen image sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..common.plots import STYLE, add_legend, choose_colors, choose_looks, plt, save
from .peers import OURS

SPEED, ENCODINGS = "front-speed.png", "front-encodings.png"
LARGE: Any = {**STYLE, "axes.titlesize": 11, "axes.labelsize": 11, "xtick.labelsize": 10, "ytick.labelsize": 10}
PEERS = {  # from names in the benchmark to names in the plot
    OURS: "lrpe-md", "flash-attn": "flash-attn", "liger, in place": "Liger", "timm, compiled": "timm, compiled",
    "torch.compile, tables": "PyTorch, compiled", "torch.compile, rotate_half": "PyTorch, compiled",
}  # fmt: skip
WORKLOADS = {"vit224": "ViT at 224 pixels", "video": "video and text", "text": "text"}
SHOWN = {  # from names in the comparison to names in the plot
    "rotate": "rotate", "cosine-softplus": "cosine, softplus", "sincos": "sine-cosine table",
    "learned": "learned table", "none": "none",
}  # fmt: skip


def fastest_shares(rows: pd.DataFrame) -> Any:
    """Return the share of the fastest peer for each label and workload."""
    known: Any = rows[rows.peer.isin(list(PEERS))]
    return known.assign(label=known.peer.map(PEERS)).groupby(["label", "workload"]).share.max()


def plot_speed(rows: pd.DataFrame, path: Path) -> bool:
    """Plot the speed of rotating q and k, forward and backward, as a share of the speed of a large copy."""
    if not len(rows):
        return False
    plain: Any = rows[(rows.op == "rotate") & (rows.variant == "") & (rows.omega == "shared") & rows.share.notna()]
    passes = {"fwd": "forward", "bwd": "backward"}
    works = [name for name in WORKLOADS if name in set(plain.workload)]
    first: dict[str, str] = {}  # the first peer of each label, which gives the colour of its bars
    for peer, label in PEERS.items():
        first.setdefault(label, peer)
    colors = choose_colors(list(first.values()))
    with plt.rc_context({**LARGE, "axes.grid.axis": "x", "axes.axisbelow": True}):
        figure, axes = plt.subplots(2, 1, figsize=(5.2, 6.4), sharex=True, layout="constrained")
        for axis, (name, title) in zip(axes, passes.items(), strict=True):
            of = fastest_shares(plain[plain["mode"] == name])
            for i, (label, peer) in enumerate(first.items()):
                widths = [100 * of.get((label, work), np.nan) for work in works]
                places = np.arange(len(works)) + 0.84 * ((i + 0.5) / len(first) - 0.5)
                bars = axis.barh(places, widths, 0.84 / len(first), label=label, color=colors[peer])
                axis.bar_label(bars, fmt="%.0f", fontsize=9, padding=2)
            axis.set_yticks(range(len(works)), [WORKLOADS[work] for work in works])
            axis.invert_yaxis()
            axis.set_title(f"rotate q and k, {title}")
        axes[1].set_xlabel("% of the speed of a memory copy")
        add_legend(figure)
        save(figure, path, dpi=150)
    return True


def plot_encodings(results: Path, path: Path) -> bool:
    """Plot the accuracy of softmax attention against image size, with extrapolated and with rescaled positions."""
    if not results.exists():
        return False
    rows: Any = pd.read_csv(results, keep_default_na=False)
    rows = rows[rows.attention == "softmax"].astype({"value": float})
    rows["side"] = rows["size"].str.split("x").str[0].astype(int)
    rows = rows[rows["size"] == rows.side.astype(str) + "x" + rows.side.astype(str)]
    trained = int(str(rows["size"].iloc[0]).split("x")[0])
    titles = {
        "extrapolated": "positions continue beyond the training grid",
        "rescaled": "positions mapped onto the training grid",
    }
    looks = choose_looks(list(SHOWN))
    with plt.rc_context(LARGE):
        figure, axes = plt.subplots(2, 1, figsize=(5.2, 6.2), sharex=True, sharey=True, layout="constrained")
        for axis, (name, title) in zip(axes, titles.items(), strict=True):
            for encoding, label in SHOWN.items():
                of = rows[(rows.encoding == encoding) & rows.positions.isin([name, ""])]
                values = of.groupby("side").value.agg(["mean", "std"])
                axis.errorbar(
                    values.index, values["mean"], yerr=values["std"], label=label, markersize=5, capsize=2,
                    **looks[encoding],
                )  # fmt: skip
            axis.axvline(trained, color="black", linestyle=":", linewidth=1)
            axis.set_title(title)
            axis.set_ylabel("accuracy, %")
        axes[1].set_xlabel("image side, pixels (dotted: training size)")
        add_legend(figure)
        save(figure, path, dpi=150)
    return True
