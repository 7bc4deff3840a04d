"""Documentation page of all presets: a description of each, and the similarity of one token to every other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lrpe_md import list_presets, preset
from lrpe_md.presets.registry import find_scheme
from lrpe_md.presets.scheme import Preset, Scheme

from ..common.folder import ROOT, require_checkout
from ..common.markdown import PAGES, PICTURES, page, table, write_page
from ..common.plots import plt
from .data import angles, default_shape, lay_out, of_head, similarity

COLUMNS, ROWS = 5, 4
COMMAND = "python -m scripts.visualize.gallery"


def over_grid(made: Preset) -> torch.Tensor:
    """Return the similarity of the central token to all others: (N,), or (H, W) of an image or the middle frame."""
    layout = lay_out(made.positions, default_shape(made), row_major=made.scheme.row_major)
    values = similarity(angles(layout, of_head(made.omega, 0)), layout.index(layout.centre)).reshape(layout.shape)
    return values[layout.centre[0]] if values.ndim == 3 else values


def draw(names: list[str], path: Path) -> None:
    figure, axes = plt.subplots(ROWS, COLUMNS, figsize=(11, 7.4), layout="constrained")
    image: Any = None
    for axis, name in zip(axes.flat, names, strict=False):
        scores = over_grid(preset(name, num_heads=find_scheme(name)[1].num_heads))
        axis.set_title(name, fontsize=9)
        if scores.ndim == 1:
            axis.plot(scores)
            axis.set_ylim(-0.45, 1.05)
        else:
            image = axis.imshow(scores, cmap="viridis", vmin=-0.2, vmax=1)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.5, label="similarity with the token in the middle")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def describe(scheme: Scheme) -> list[str]:
    """Return the axes, map, pairs, head width and learned parameters of a scheme."""
    ours = {name for name, on in (("ω", scheme.learned), ("φ", scheme.phase)) if on}
    activation = "" if scheme.act == "none" else f", {scheme.act}"
    pairs = scheme.pairs if scheme.map == "rotate" else ""
    return [
        str(scheme.frequencies.num_axes), scheme.map + activation, pairs, str(scheme.head_dim), ", ".join(sorted(ours)),
    ]  # fmt: skip


def render(files: list[str]) -> str:
    rows, texts = [], []
    for name in list_presets():
        scheme = find_scheme(name)[1]
        rows.append([f"[`{name}`](#{name})", *describe(scheme)])
        text = re.sub(r":\w+:`([^`]*)`", r"`\1`", inspect.cleandoc(scheme.doc).replace("``", "`"))
        texts.append(f"### {name}\n\n{text}")
    head = table(["preset", "axes", "map", "pairs", "head_dim", "learned"], rows, words=6)
    pictures = "\n\n".join(f"![Similarity over a grid]({PICTURES}/gallery/{file})" for file in files)
    how = (
        "Each picture: what the token in the middle has in common with every other one, all channels alike: "
        "over 18 × 28 patches, for videos in the middle one of nine frames, for text over 64 tokens."
    )
    return page(
        "All presets", COMMAND, "\n".join(head), "## What they look like", how, pictures, "## Sources", *texts
    )  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="Output folder for the pictures.")] = ROOT
    / "scripts"
    / "results"
    / "gallery",
    pages: Annotated[Path, typer.Option(help="Output folder for the page.")] = PAGES,
) -> None:
    """Write the page and its pictures."""
    if pages == PAGES:
        require_checkout("--pages")
    names, size = list_presets(), COLUMNS * ROWS
    files = [f"presets-{i // size + 1}.png" for i in range(0, len(names), size)]
    out.mkdir(parents=True, exist_ok=True)
    for file, i in zip(files, range(0, len(names), size), strict=True):
        draw(names[i : i + size], out / file)
    write_page(pages / "presets.md", render(files))


if __name__ == "__main__":
    typer.run(main)
