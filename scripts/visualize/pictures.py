"""What an encoding does, as pictures: angles over the grid, similarity of a token with all others, wavelengths.

    python -m scripts.visualize --preset wan --preset dinov3
    python -m scripts.visualize --preset all --out runs/visualize --format pdf
    python -m scripts.visualize --frequencies mixed --base 10 --shape 14x20 --reference 16 --text 8 --token 3,5

A figure an encoding. On top Θ of a few pairs over the grid, below it how much a token (the ring) agrees with all others
for each map and axis order, cuts through that, and the wavelengths. :mod:`.data` has the numbers, and says what
similarity assumes, :mod:`.figure` draws them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lrpe_md import list_presets

from ..common.options import SEEDS, choose
from ..common.plots import plt
from . import data
from .data import Subject
from .figure import View, draw

FORMATS = ("png", "pdf", "svg")


@contextmanager
def _says(option: str) -> Iterator[None]:
    """An error of the library, under the option's name."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def numbers(option: str, text: str, *, least: int, gaps: bool = False) -> tuple[Any, ...]:
    """ "4x18x28", "4,18,28" or "4 18 28"; with gaps a "-" is None."""
    parts = [part for part in re.split(r"[x×,\s]+", text.strip()) if part]
    good = [part.isdecimal() or (gaps and part == "-") for part in parts]
    if not parts or not all(good) or any(part != "-" and int(part) < least for part in parts):
        raise typer.BadParameter(
            f"{option}: expected whole numbers of at least {least} such as 18x28 or 9x18x28, got {text!r}"
        )
    return tuple(None if part == "-" else int(part) for part in parts)


def look(
    subject: Subject,
    *,
    shape: str | None = None,
    reference: str | None = None,
    text: int = 0,
    token: str | None = None,
    head: int = 0,
    channels: Sequence[int] = (),
    maps: int = 4,
) -> View:
    """What the options ask for, of one subject.

    Raises:
        typer.BadParameter: what does not fit it, under the option's name.
    """
    made = subject.preset
    size = data.default_shape(made) if shape is None else numbers("--shape", shape, least=1)
    options: dict[str, Any] = {}
    if reference is not None:
        sizes = numbers("--reference", reference, least=1, gaps=True)
        options["reference"] = sizes[0] if len(sizes) == 1 else sizes
    if len(size) > 3:
        raise typer.BadParameter(f"--shape: expected N, HxW or TxHxW, got {shape!r}")
    with _says(f"--shape {'x'.join(map(str, size))} of {made.name}"):
        made.positions(size)
    with _says(f"--reference of {made.name}"):
        made.positions(size, **options)
    with _says(f"--text of {made.name}"):
        layout = data.lay_out(partial(made.positions, **options), size, text, made.scheme.row_major)
    chosen = layout.centre if token is None else numbers("--token", token, least=0)
    with _says("--token"):
        layout.index(chosen)
    if not 0 <= head < made.num_heads:
        raise typer.BadParameter(f"--head: expected 0 to {made.num_heads - 1} (--heads {made.num_heads}), got {head}")
    omega = data.of_head(made.omega, head)
    for channel in channels:
        if not 0 <= channel < len(omega):
            raise typer.BadParameter(f"--channel of {made.name}: expected 0 to {len(omega) - 1}, got {channel}")
    shown = list(channels) or data.choose_channels(layout, omega, maps)
    if not shown:
        raise typer.BadParameter(f"--shape: nothing of {made.name} turns on a grid of {'x'.join(map(str, size))}")
    return View(subject, layout, chosen, head, shown, data.choose_frames(layout, chosen))


def main(
    preset: Annotated[list[str] | None, typer.Option("--preset", "-p", help="Scheme, or all; repeatable.")] = None,
    frequencies: Annotated[str | None, typer.Option(help="Instead of a preset: axial or mixed, as RotateMd's.")] = None,
    map: Annotated[str | None, typer.Option(help="Without a preset: rotate or cosine. (default: rotate)")] = None,
    axis_order: Annotated[
        str | None, typer.Option(help="Without a preset: minor_first (default) or major_first.")
    ] = None,
    base: Annotated[
        float | None, typer.Option(help="Of the series. (default: the preset's; axial 10000, mixed 10)")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="D. (default: the preset's; 64)")] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Heads that the frequencies are made for. (default: the preset's; 1)")
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="The one that is drawn.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS - 1, help="Of random directions.")] = 0,
    shape: Annotated[
        str | None, typer.Option(help="Of the grid: N, HxW or TxHxW. (default: 64, 18x28 or 9x18x28)")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Interpolate onto 16 or 16x16; - leaves an axis alone.")] = None,
    text: Annotated[int, typer.Option(min=0, help="Text (or class) tokens in front of the grid.")] = 0,
    token: Annotated[str | None, typer.Option(help="The chosen token: N, HxW or TxHxW. (default: the centre)")] = None,
    channel: Annotated[list[int] | None, typer.Option(help="Angle maps of this channel or pair; repeatable.")] = None,
    maps: Annotated[int, typer.Option(min=1, help="Else so many, from the fastest to the slowest.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder; a picture a preset goes there.")] = Path("runs/visualize"),
    format: Annotated[str, typer.Option(help=f"One of: {', '.join(FORMATS)}.")] = "png",
    dpi: Annotated[int, typer.Option(min=20, help="Of a PNG.")] = 150,
) -> None:
    """Angle maps, similarity and wavelengths of encodings, a figure each."""
    choose("--format", [format], FORMATS)
    if bool(preset) == bool(frequencies):
        raise typer.BadParameter("--preset, --frequencies: expected one of the two (--preset all draws every scheme)")
    if preset:
        for option, value in (("--map", map), ("--axis-order", axis_order)):
            if value is not None:
                raise typer.BadParameter(f"{option}: a preset has its own, and the figure compares both; got {value!r}")
        names = list_presets() if preset == ["all"] else choose("--preset", preset, list_presets())
        subjects = [_preset(name, head_dim, heads, base, seed) for name in names]
    else:
        num_axes = 2 if shape is None else len(numbers("--shape", shape, least=1))
        choose("--frequencies", [frequencies or ""], data.FREQUENCIES)
        choose("--map", [map or "rotate"], data.MAPS)
        choose("--axis-order", [axis_order or "minor_first"], data.AXIS_ORDERS)
        own: Any = {"map": map, "axis_order": axis_order, "head_dim": head_dim}
        own = {key: value for key, value in own.items() if value is not None}
        with _says("--frequencies"):
            subjects = [data.custom(frequencies or "", num_axes, num_heads=heads or 1, base=base, seed=seed, **own)]
    views = [
        look(
            subject,
            shape=shape,
            reference=reference,
            text=text,
            token=token,
            head=head,
            channels=channel or (),
            maps=maps,
        )
        for subject in subjects
    ]
    out.mkdir(parents=True, exist_ok=True)
    for view in views:
        figure, path = draw(view), out / f"{view.subject.preset.name}.{format}"
        figure.savefig(path, dpi=dpi)
        plt.close(figure)
        print(path)


def _preset(name: str, head_dim: int | None, heads: int | None, base: float | None, seed: int) -> Subject:
    with _says("--head-dim, --base"):
        return data.published(name, head_dim, heads, base, seed)
