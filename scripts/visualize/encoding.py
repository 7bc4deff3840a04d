"""Draw encodings on a grid for the docs.

Run ``python -m lrpe_md.scripts.visualize.encoding [FOLDER]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lrpe_md import Grid, axial_omega, cosine, geometric_theta, rotate
from lrpe_md.frequencies import mixed_omega

from ..common.plots import WIDTH, plt, save

GRID, QUERY = (18, 28), (6, 10)
HEAD_DIM = 64


def main(folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("scripts/results")) -> None:
    """Draw angles and similarity for the README, the home page and the concepts page."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_angles(folder / "encoding.png")
    draw_relative(folder / "front-relative.png")


def draw_relative(path: Path) -> None:
    """Draw the similarity of two patches to all other patches, to show the same pattern in different places."""
    grid = Grid(GRID)
    omega = axial_omega(geometric_theta(HEAD_DIM // 4, 100.0), HEAD_DIM // 2, 2)
    x = torch.ones(1, 1, grid.total, HEAD_DIM, dtype=torch.float64)
    y = rotate(x, omega=omega, positions=grid)[0, 0].reshape(*GRID, HEAD_DIM)
    with plt.rc_context({"font.size": 11}):
        figure, axes = plt.subplots(1, 2, figsize=(5.2, 1.9), layout="constrained")
        for axis, (row, column) in zip(axes, ((5, 7), (12, 20)), strict=True):
            axis.imshow((y @ y[row, column]) / HEAD_DIM, cmap="viridis", vmin=0.2, vmax=1)
            axis.plot(column, row, "o", mfc="none", mec="white", ms=9)
            axis.set(xticks=[], yticks=[], title=f"patch ({row}, {column})")
        save(figure, path, dpi=150)


def draw_angles(path: Path) -> None:
    """Draw the angles of single channels over the grid, and the similarity of one query to all keys."""
    grid = Grid(GRID)
    axial = {c: axial_omega(geometric_theta(-(-c // 2), 100.0), c, 2) for c in (HEAD_DIM, HEAD_DIM // 2)}
    mixed = mixed_omega(HEAD_DIM // 2, 2, base=10.0, generator=torch.Generator().manual_seed(3))
    x = torch.ones(1, 1, grid.total, HEAD_DIM, dtype=torch.float64)
    rows = [
        ("cosine", cosine(x, omega=axial[HEAD_DIM], positions=grid), axial[HEAD_DIM], 8),
        ("rotate", rotate(x, omega=axial[HEAD_DIM // 2], positions=grid), axial[HEAD_DIM // 2], 20),
        ("rotate, mixed", rotate(x, omega=mixed, positions=grid), mixed, 4),
    ]
    wave: Any = None
    score: Any = None
    figure, axes = plt.subplots(3, 2, figsize=(WIDTH, 6.4), layout="constrained")
    for (left, right), (name, y, omega, channel) in zip(axes, rows, strict=True):
        angles = (grid.coordinates()[:, None] * omega[0]).sum(-1)
        wave = left.imshow(angles[:, channel].cos().reshape(GRID), cmap="RdBu", vmin=-1, vmax=1)
        what = "channel" if name == "cosine" else "pair"
        left.set_title(f"{name}: cos Θ of {what} {channel}", fontsize=10)
        scores = (y[0, 0] @ y[0, 0, QUERY[0] * GRID[1] + QUERY[1]]) / HEAD_DIM
        score = right.imshow(scores.reshape(GRID), cmap="viridis", vmin=-0.2, vmax=1)
        right.plot(QUERY[1], QUERY[0], "o", mfc="none", mec="white", ms=9)
        right.set_title("similarity to the marked patch", fontsize=10)
        left.set_ylabel("row")
    for axis in axes.flat:
        axis.set(xticks=[0, 10, 20], yticks=[0, 10])
    for axis in axes[-1]:
        axis.set_xlabel("column of the patch")
    for column, image in enumerate((wave, score)):
        figure.colorbar(image, ax=axes[:, column], shrink=0.9, location="bottom", aspect=30)
    save(figure, path)


if __name__ == "__main__":
    typer.run(main)
