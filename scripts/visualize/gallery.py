"""Documentation page for all presets. It describes each preset, and shows the similarity of one token to all others."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from lrpe_md import list_presets, preset
from lrpe_md.picture.data import Subject, TokenLayout, default_shape, lay_out_tokens
from lrpe_md.presets.registry import find_scheme
from lrpe_md.presets.scheme import Preset, Scheme

from ..common.folder import ROOT, require_checkout
from ..common.markdown import PAGES, PICTURES, page, table, write_page
from ..common.plots import OKABE_ITO, STYLE, WIDTH, plt, save

COLUMNS, ROWS = 3, 6
COMMAND = "python -m scripts.visualize.gallery"


class Similarity(NamedTuple):
    """Similarity of one token to all others, as (N,), or as (H, W) for an image or the token's frame in a video."""

    values: torch.Tensor
    token: tuple[int, ...]  # index of the token in the values
    head: int | None  # number of the head, if heads have different frequencies


def choose_token(layout: TokenLayout) -> tuple[int, ...]:
    """Return the token at a third of each axis, because positions on circles are singular at the centre."""
    return tuple(n // 3 for n in layout.shape)


def over_grid(made: Preset) -> Similarity:
    """Return the similarity for the head whose similarity varies most over the grid."""
    layout = lay_out_tokens(made.positions, default_shape(made), row_major=made.scheme.row_major)
    token = choose_token(layout)

    subject = Subject(made, {}, 0)

    def of(head: int) -> torch.Tensor:
        scores = subject.similarity(layout, subject.variants[0], head, layout.index(token)).reshape(layout.shape)
        return scores[token[0]] if scores.ndim == 3 else scores

    heads = made.omega.shape[0]
    head = max(range(heads), key=lambda each: float(of(each).std()))
    return Similarity(of(head), token[-2:], head if heads > 1 else None)


def draw(names: list[str], path: Path) -> None:
    """Draw a picture for each preset, and show the range of values in the picture's title."""
    with plt.rc_context({**STYLE, "axes.titlesize": 8, "axes.grid": False}):
        rows = -(-len(names) // COLUMNS)
        figure, axes = plt.subplots(
            rows, COLUMNS, figsize=(WIDTH, 0.4 + 1.55 * rows), layout="constrained", squeeze=False
        )
        for axis, name in zip(axes.flat, names, strict=False):
            found = over_grid(preset(name, num_heads=find_scheme(name)[1].num_heads))
            low = float(found.values.min())
            head = "" if found.head is None else f", head {found.head}"
            axis.set_title(f"{name}{head}\n{low:.{2 if low < 0.995 else 4}f} to 1")
            if found.values.ndim == 1:
                axis.plot(found.values, color=OKABE_ITO["blue"])
                axis.axvline(found.token[-1], color="black", linestyle=":", linewidth=0.8)
            else:
                axis.imshow(found.values, cmap="viridis", vmin=low, vmax=1)
                axis.plot(found.token[1], found.token[0], "o", mfc="none", mec="white", ms=5, mew=0.8)
            axis.tick_params(labelsize=7)
        for axis in axes.flat[len(names) :]:
            axis.axis("off")
        save(figure, path, dpi=110)


def describe(scheme: Scheme) -> list[str]:
    """Describe the axes, map, pairs, head width and learned parameters of a scheme."""
    ours = {name for name, on in (("ω", scheme.learned), ("φ", scheme.phase)) if on}
    activation = "" if scheme.act == "none" else f", {scheme.act}"
    pairs = scheme.pairs if scheme.map == "rotate" else ""
    return [
        str(scheme.frequencies.num_axes), scheme.map + activation, pairs, str(scheme.head_dim), ", ".join(sorted(ours)),
    ]  # fmt: skip


def render(files: list[str]) -> str:
    rows, texts = [], []
    for name in sorted(list_presets()):
        scheme = find_scheme(name)[1]
        rows.append([f"[`{name}`](#{name})", *describe(scheme)])
        text = re.sub(r":\w+:`([^`]*)`", r"`\1`", inspect.cleandoc(scheme.doc).replace("``", "`"))
        texts.append(f"### {name}\n\n{text}")
    head = table(["preset", "axes", "map", "pairs", "head_dim", "learned"], rows, words=6)
    pictures = "\n\n".join(f"![Similarity over a grid]({PICTURES}/gallery/{file})" for file in files)
    how = (
        "Each picture shows how similar the marked token is to every other token if all channels are equal. Images "
        "have 18 × 28 patches, videos show one of nine frames, and text has 64 tokens. Colours range from the lowest "
        "value (see the title) to 1. If heads have different frequencies, the picture shows the head that varies most."
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
    """Write the page about presets, and draw the pictures on the page."""
    if pages == PAGES:
        require_checkout("--pages")
    names, size = sorted(list_presets()), COLUMNS * ROWS
    files = [f"presets-{i // size + 1}.png" for i in range(0, len(names), size)]
    out.mkdir(parents=True, exist_ok=True)
    for file, i in zip(files, range(0, len(names), size), strict=True):
        draw(names[i : i + size], out / file)
    write_page(pages / "presets.md", render(files))


if __name__ == "__main__":
    typer.run(main)
