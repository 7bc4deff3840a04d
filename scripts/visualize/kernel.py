"""Figures for docs/kernel.md, drawn by ``python -m lrpe_md.scripts.visualize.kernel [FOLDER]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.patches import Rectangle

from ..common.plots import plt, save

BLUE, LIGHT, ORANGE, GREY = "#2b6cb0", "#d6e6f5", "#dd6b20", "#e8e8e8"


def box(axis: Any, corner: tuple[float, float], size: tuple[float, float], color: str, text: str = "") -> None:
    """Draw a rectangle with centred text."""
    axis.add_patch(Rectangle(corner, *size, facecolor=color, edgecolor="black", linewidth=0.7))
    axis.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", fontsize=9)


def arrow(axis: Any, begin: tuple[float, float], end: tuple[float, float], color: str = "black") -> None:
    axis.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.2})


def draw_walk(axis: Any) -> None:
    """Draw one program of the rotary kernel: a block of tokens, and all rows that share the block's angles."""
    blocks, rows, program = 6, 4, 2
    for block in range(blocks):
        for row in range(rows):
            color = LIGHT if block == program else GREY
            box(axis, (1.6 * block, rows - row - 1), (1.5, 0.8), color, "x → y" if block == program else "")
    box(axis, (1.6 * program, rows + 0.5), (1.5, 0.8), BLUE)
    axis.text(1.6 * program + 0.75, rows + 0.9, "cos Θ, sin Θ", ha="center", va="center", fontsize=9, color="white")
    for row in range(rows):
        top = rows + 0.5 if row == 0 else rows - row + 0.0
        arrow(axis, (1.6 * program + 0.75, top), (1.6 * program + 0.75, rows - row - 0.2), ORANGE)
    axis.text(1.6 * program + 1.7, rows + 0.9, "formed once, kept in registers", va="center", fontsize=9)
    for row in range(rows):
        axis.text(-0.15, rows - row - 0.6, f"sample {row // 2}, head {row % 2}", ha="right", va="center", fontsize=8)
    for block in range(blocks):
        axis.text(1.6 * block + 0.75, -0.3, f"tokens {16 * block}–{16 * block + 15}", ha="center", va="top", fontsize=7)
    axis.set(xlim=(-2.2, 9.8), ylim=(-0.9, 5.6))


def draw_passes(axis: Any) -> None:
    """Draw the two passes of linear attention, and the scan between the passes."""
    for chunk in range(3):
        y = 4.4 - 2 * chunk
        box(axis, (0, y), (1.7, 1.2), LIGHT, f"k, v\nchunk {chunk}")
        box(axis, (3.0, y), (1.7, 1.2), GREY, f"S{chunk} = Σ k̂ vᵀ")
        box(axis, (9.0, y), (1.7, 1.2), LIGHT, f"q\nchunk {chunk}")
        box(axis, (12.0, y), (1.9, 1.2), GREY, "o = q̂ S / z")
        arrow(axis, (1.7, y + 0.6), (3.0, y + 0.6))
        arrow(axis, (4.7, y + 0.6), (6.1, 3.0), ORANGE)
        arrow(axis, (7.8, 3.0), (9.0, y + 0.6), ORANGE)
        arrow(axis, (10.7, y + 0.6), (12.0, y + 0.6))
    box(axis, (6.1, 2.3), (1.7, 1.4), BLUE)
    axis.text(6.95, 3.0, "scan\nS = Σ Sᵢ", ha="center", va="center", fontsize=9, color="white")
    for x, text in ((2.35, "first pass: keys and values"), (11.4, "second pass: queries")):
        axis.text(x, 6.1, text, ha="center", fontsize=10)
    axis.text(6.95, 1.9, "with a causal mask:\nthe sum of earlier chunks", ha="center", va="top", fontsize=8)
    axis.set(xlim=(-0.2, 14.2), ylim=(0.1, 6.6))


DRAWINGS = {"kernel-walk.svg": (draw_walk, (7.6, 3.8)), "kernel-passes.svg": (draw_passes, (9.0, 4.2))}


def main(folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("docs")) -> None:
    """Draw how a program walks over tokens and rows, and the two passes of linear attention."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "lrpe-md", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for name, (draw, size) in DRAWINGS.items():
            figure, axis = plt.subplots(figsize=size, layout="constrained")
            draw(axis)
            axis.set_axis_off()
            save(figure, folder / name, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
