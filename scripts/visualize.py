"""What an encoding does, as pictures: angles over the grid, similarity of a token with all others, wavelengths.

    python -m scripts.visualize --preset wan --preset dinov3
    python -m scripts.visualize --preset all --out runs/visualize --format pdf
    python -m scripts.visualize --frequencies mixed --base 10 --shape 14x20 --reference 16 --text 8 --token 3,5

A picture an encoding: cos and sin of Θ turn with the angle maps on top; below, how much a query at the ring agrees with
every key if they have the same content, and the wavelengths that make it so. :mod:`scripts.visualize_data` says how the
numbers are formed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib import patheffects
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from lrpe_md import list_presets

from . import visualize_data as data
from .common import choose
from .plots import OKABE_ITO, STYLE, plt
from .visualize_data import Layout, Subject

FORMATS = ("png", "pdf", "svg")
# Of the axes of positions: a colour, a marker and a line that differ in grey, too.
LOOKS = {
    "N": ("black", "o", "-"), "T": ("vermilion", "^", "-."), "H": ("blue", "o", "-"), "W": ("orange", "s", "--"),
    "L": ("green", "D", ":"),
}  # fmt: skip
SMALL: Any = {
    **STYLE, "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7.5, "axes.linewidth": 0.6,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "savefig.dpi": 150,
}  # fmt: skip
ANGLES: Any = {"cmap": "twilight_shifted", "vmin": -math.pi, "vmax": math.pi}  # its lightness is |Θ|, its hue the sign
ASSUMED = {
    "rotate": "q·k of equal content, each pair with the same share of it",
    "cosine": "q·k with x̄ ≥ 0, alike in all channels",
}


@dataclass(frozen=True, eq=False)
class View:
    """A subject on a grid, and what of it is drawn."""

    subject: Subject
    layout: Layout
    token: tuple[int, ...]
    head: int
    channels: list[int]
    frames: list[int]

    @property
    def own(self) -> tuple[str, str]:
        return self.subject.variants[0]

    def omega(self, variant: tuple[str, str]) -> Tensor:
        """(C, K) of the head that is drawn."""
        return data.of_head(self.subject.omega(*variant), self.head)

    def scores(self) -> list[tuple[list[tuple[str, str]], Tensor]]:
        """Similarity with the token (N,), of each variant; equal ones together."""
        found: list[tuple[list[tuple[str, str]], Tensor]] = []
        for variant in self.subject.variants:
            score = data.similarity(data.angles(self.layout, self.omega(variant)), self.layout.index(self.token))
            same = [names for names, other in found if names[0][0] == variant[0] and torch.allclose(score, other)]
            same[0].append(variant) if same else found.append(([variant], score))
        return found


# --- panels ----------------------------------------------------------------------------------------------------------


def draw(view: View) -> Figure:
    """The whole figure; the caller closes it."""
    with plt.rc_context(SMALL):
        return (_draw_sequence if len(view.layout.shape) == 1 else _draw_grid)(view)


def _draw_grid(view: View) -> Figure:
    """Angle maps in rows, then similarity, then cuts and wavelengths; two panels a row where frames lie side by side."""
    layout, scores = view.layout, view.scores()
    columns = 4 if len(view.frames) == 1 else 2
    shown = data.arrange(layout, scores[0][1], view.frames).image.shape
    width = 11.0
    height = min(max((width / columns - 0.55) * shown[0] / shown[1], 0.5), 4.5) + 0.45
    map_rows, score_rows = -(-len(view.channels) // columns), -(-len(scores) // columns)
    beside = columns == 4 and len(scores) <= 2
    heights = [height] * (map_rows + score_rows) + ([] if beside else [2.3])
    figure = plt.figure(figsize=(width, sum(heights) + 0.75), layout="constrained")
    grid = figure.add_gridspec(len(heights), 4, height_ratios=heights)
    places = [(r, slice(c * 4 // columns, (c + 1) * 4 // columns)) for r in range(len(heights)) for c in range(columns)]

    theta, image = data.angles(layout, view.omega(view.own)), None
    maps = [figure.add_subplot(grid[places[i]]) for i in range(len(view.channels))]
    for axis, channel in zip(maps, view.channels, strict=True):
        image = _picture(axis, view, data.wrap(theta[:, channel]), **ANGLES)
        axis.set_title(_channel_name(view, channel))
    _angle_bar(figure, image, maps)

    lowest = min(float(score.min()) for _, score in scores)
    scale = {"cmap": "cividis", "vmin": min(math.floor(lowest * 10) / 10, 0.0), "vmax": 1.0}
    panels = [figure.add_subplot(grid[places[map_rows * columns + i]]) for i in range(len(scores))]
    for axis, (names, score) in zip(panels, scores, strict=True):
        image = _picture(axis, view, score, **scale)
        axis.set_title(_variant_name(view, names))
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.015, aspect=15)
    bar.set_label("similarity")
    bar.ax.grid(False)

    last = [(map_rows, 2), (map_rows, 3)] if beside else [(-1, slice(0, 2)), (-1, slice(2, 4))]
    _cuts(figure.add_subplot(grid[last[0]]), view, scores[0][1])
    _wavelengths(figure.add_subplot(grid[last[1]]), view)
    _head_and_foot(figure, view)
    return figure


def _draw_sequence(view: View) -> Figure:
    """Angles as a row a channel, similarity as lines, wavelengths."""
    layout = view.layout
    figure = plt.figure(figsize=(11, 3.1), layout="constrained")
    angle, score, wave = figure.subplots(1, 3, width_ratios=(1.25, 1, 0.9))
    theta, own = data.angles(layout, view.omega(view.own)), view.omega(view.own)
    rows = data.wrap(theta[:, view.channels]).T
    gap = torch.full((len(rows), 1), math.nan, dtype=rows.dtype)
    before = layout.text + 1 if layout.text else 0
    rows = torch.cat([rows[:, : layout.text], gap, rows[:, layout.text :]], 1) if layout.text else rows
    image = angle.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        extent=(-before - 0.5, layout.shape[0] - 0.5, len(rows) - 0.5, -0.5),
        **ANGLES,
    )
    turns = data.wavelengths(layout, own)[1]
    angle.set_yticks(range(len(rows)), [f"{c}\nλ {_number(turns[c])}" for c in view.channels])
    angle.set(xlabel=_with_text("token", layout), ylabel=_what(view), title="angle Θ, the fastest to the slowest")
    angle.set_xticks(
        [t for t in MaxNLocator(6, integer=True).tick_values(0, layout.shape[0] - 1) if 0 <= t < layout.shape[0]]
    )
    angle.grid(False)
    _angle_bar(figure, image, [angle])
    for (names, values), (colour, line) in zip(view.scores(), (("blue", "-"), ("orange", "--")), strict=False):
        score.plot(
            range(layout.shape[0]),
            values[layout.text :],
            line,
            color=OKABE_ITO[colour],
            lw=1.4,
            label=_variant_name(view, names),
        )
        if layout.text:
            score.plot(range(-before, -1), values[: layout.text], line, marker=".", color=OKABE_ITO[colour], lw=0.8)
    score.axvline(view.token[0], color="black", lw=0.8, ls=":")
    score.set(
        xlabel=_with_text("token", layout), ylabel="similarity", title=f"similarity with token {view.token[0]} (dotted)"
    )
    score.legend(frameon=False, loc="best")
    _wavelengths(wave, view)
    _head_and_foot(figure, view)
    return figure


def _picture(axis: Any, view: View, values: Tensor, **scale: Any) -> Any:
    """Tokens of the frames side by side, text above them, a ring at the chosen token."""
    layout = view.layout
    picture = data.arrange(layout, values, view.frames)
    image = axis.imshow(picture.image, interpolation="nearest", **scale)
    height, width = picture.size
    rows = [t for t in MaxNLocator(4, integer=True).tick_values(0, height - 1) if 0 <= t < height]
    text = [((picture.top - data.GAP - 1) / 2, "text")] if layout.text else []
    axis.set_yticks(
        [*(at for at, _ in text), *(picture.top + t for t in rows)],
        [*(name for _, name in text), *(f"{t:.0f}" for t in rows)],
    )
    if len(view.frames) == 1:
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_xlabel("W", labelpad=1)
    else:
        axis.set_xticks([left + (width - 1) / 2 for left in picture.left], [f"T = {t}" for t in view.frames])
        axis.tick_params(axis="x", length=0)
    axis.set_ylabel("H", labelpad=1)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    frame = view.token[0] if len(layout.shape) == 3 else 0
    x, y = picture.left[view.frames.index(frame)] + view.token[-1], picture.top + view.token[-2]
    ring = axis.plot(x, y, "o", mfc="none", mec="white", mew=1.2, ms=7)[0]
    ring.set_path_effects([patheffects.Stroke(linewidth=2.6, foreground="black"), patheffects.Normal()])
    return image


def _cuts(axis: Any, view: View, score: Tensor) -> None:
    """Similarity along each axis of the grid, through the token."""
    names = ("T", "H", "W")[-len(view.layout.shape) :]
    for j, name in enumerate(names):
        if view.layout.shape[j] > 1:
            distance, line = data.cut(view.layout, score, view.token, j)
            colour, marker, style = LOOKS[name]
            axis.plot(
                distance, line, style, marker=marker, ms=2.5, lw=1, color=OKABE_ITO[colour], label=f"along {name}"
            )
    axis.axhline(0, color="black", lw=0.6)
    axis.axvline(0, color="black", lw=0.6, ls=":")
    axis.set(xlabel="distance in tokens", ylabel="similarity", ylim=(None, 1.05))
    axis.set_title(f"through the ring: {_variant_name(view, [view.own])}")
    axis.legend(frameon=False, loc="best", handlelength=2.6)


def _wavelengths(axis: Any, view: View) -> None:
    """Tokens a turn of each channel, on the axes that it turns along; those that don't rotate, at the top."""
    layout, omega = view.layout, view.omega(view.own)
    each, along = data.wavelengths(layout, omega)
    finite = each[each.isfinite()]
    top = 4 * max(float(finite.max()), *layout.sizes)
    axis.set_yscale("log")
    for j, name in enumerate(layout.names):
        colour, marker, line = LOOKS.get(name, ("grey", "X", ":"))
        there = each[:, j].isfinite().nonzero().flatten()
        if not len(there):
            continue
        still = layout.steps[j] == 0
        axis.plot(
            there, each[there, j], marker, ms=3.2, color=OKABE_ITO[colour], mfc="none" if still else OKABE_ITO[colour],
            ls="none", mew=0.7, label=f"{name} (in positions)" if still else name,
        )  # fmt: skip
        if not still:
            axis.axhline(layout.sizes[j], color=OKABE_ITO[colour], ls=line if line != "-" else (0, (6, 2)), lw=1)
    sizes: dict[int, str] = {}
    for name, n, step in zip(layout.names, layout.sizes, layout.steps.tolist(), strict=True):
        if step:
            sizes[n] = f"{sizes[n]} = {name}" if n in sizes else name
    for n, name in sizes.items():
        axis.annotate(
            f"{name} = {n}",
            (1, n),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    if ((omega != 0).sum(-1) > 1).any():
        axis.plot(along.tolist(), "_", color="black", ms=5, label="along its direction")
    none = (omega == 0).all(-1).nonzero().flatten()
    if len(none):
        axis.plot(none, [top] * len(none), "x", color=OKABE_ITO["grey"], ms=4, label="not rotated")
    axis.set(xlabel=_what(view), ylabel="wavelength λ, tokens", title="wavelengths against the grid (lines)")
    axis.set_ylim(None, top * (1.6 if len(none) else 1))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(10, numticks=8))
    axis.legend(frameon=False, loc="best", handletextpad=0.2, borderaxespad=0.2)


def _angle_bar(figure: Figure, image: Any, axes: list[Any]) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.015, aspect=15, ticks=[-math.pi, 0, math.pi])
    bar.ax.set_yticklabels(["−π", "0", "π"])
    bar.set_label("angle Θ, rad")
    bar.ax.grid(False)


def _head_and_foot(figure: Figure, view: View) -> None:
    scheme, layout = view.subject.preset.scheme, view.layout
    omega = view.omega(view.own)
    used = [f"{name} {int(n)}" for name, n in zip(layout.names, (omega != 0).sum(0), strict=True) if n]
    dense = ((omega != 0).sum(-1) > 1).any()
    frequencies = next(iter(view.subject.frequencies.values()))
    parts = [
        scheme.map + (f" ({scheme.pairs})" if scheme.map == "rotate" else ""),
        f"head_dim {view.subject.preset.head_dim}",
        f"{len(omega)} {_what(view)}s" + (", each along all axes" if dense else f": {', '.join(used)}"),
        f"base {frequencies.base:g}",
        "grid " + "×".join(map(str, layout.shape)),
    ]
    parts += [f"{layout.text} text tokens"] if layout.text else []
    parts += [f"head {view.head} of {view.subject.preset.num_heads}"] if view.subject.preset.num_heads > 1 else []
    parts += ["phase 0"] if scheme.phase else []
    parts += ["initial frequencies"] if scheme.learned else []
    figure.suptitle(
        f"$\\bf{{{view.subject.preset.name.replace('_', chr(92) + '_')}}}$   " + "   ·   ".join(parts),
        fontsize=9,
        x=0.01,
        ha="left",
    )
    figure.supxlabel(
        "similarity: mean of cos(Θ − Θ at the ring) over all channels; "
        + "; ".join(f"{m}: {ASSUMED[m]}" for m in data.MAPS),
        fontsize=7,
        x=0.01,
        ha="left",
        color="#444444",
    )


def _what(view: View) -> str:
    return "channel" if view.own[0] == "cosine" else "pair"


def _with_text(label: str, layout: Layout) -> str:
    return f"{label} (left of 0: text)" if layout.text else label


def _number(value: Any) -> str:
    value = float(value)
    return "∞" if math.isinf(value) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _channel_name(view: View, channel: int) -> str:
    layout, omega = view.layout, view.omega(view.own)
    along = data.wavelengths(layout, omega)[1][channel]
    on = [name for name, w in zip(layout.names, omega[channel].tolist(), strict=True) if w]
    axis = f"along {on[0]}" if len(on) == 1 else "mixed"
    return f"{_what(view)} {channel}, {axis}: λ = {_number(along)} tokens"


def _variant_name(view: View, names: Sequence[tuple[str, str]]) -> str:
    mapping, order = names[0]
    orders = "" if order == data.NO_ORDER else f", {order}" if len(names) == 1 else ", either axis order"
    return f"{mapping}{orders}" + (" (its own)" if view.own in names else "")


# --- command line ----------------------------------------------------------------------------------------------------


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
        layout = data.lay_out(partial(made.positions, **options), size, text)
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
    preset: Annotated[list[str] | None, typer.Option("--preset", "-p", help="A published scheme, or all; may be repeated.")] = None,
    frequencies: Annotated[str | None, typer.Option(help="Instead of a preset: axial or mixed, as RotateMd has them.")] = None,
    map: Annotated[str | None, typer.Option(help="Without a preset: rotate or cosine. [rotate]")] = None,
    axis_order: Annotated[str | None, typer.Option(help="Without a preset: minor_first or major_first. [minor_first]")] = None,
    base: Annotated[float | None, typer.Option(help="Of the series. [the preset's; axial 10000, mixed 10]")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="D. [the preset's; 64]")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Heads that the frequencies are made for.")] = 1,
    head: Annotated[int, typer.Option(min=0, help="The one that is drawn.")] = 0,
    seed: Annotated[int, typer.Option(help="Of random directions.")] = 0,
    shape: Annotated[str | None, typer.Option(help="Of the grid: N, HxW or TxHxW. [64, 18x28 or 9x18x28]")] = None,
    reference: Annotated[str | None, typer.Option(help="Interpolate onto this size: 16 or 16x16, - leaves an axis alone.")] = None,
    text: Annotated[int, typer.Option(min=0, help="Text (or class) tokens in front of the grid.")] = 0,
    token: Annotated[str | None, typer.Option(help="The chosen token: H,W or T,H,W. [the centre]")] = None,
    channel: Annotated[list[int] | None, typer.Option(help="Draw the angles of this channel or pair; may be repeated.")] = None,
    maps: Annotated[int, typer.Option(min=1, help="Else of so many, from the fastest to the slowest.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder; a picture a preset goes there.")] = Path("runs/visualize"),
    format: Annotated[str, typer.Option(help=f"One of: {', '.join(FORMATS)}.")] = "png",
    dpi: Annotated[int, typer.Option(min=20, help="Of a PNG.")] = 150,
) -> None:  # fmt: skip
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
            subjects = [data.custom(frequencies or "", num_axes, num_heads=heads, base=base, seed=seed, **own)]
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


def _preset(name: str, head_dim: int | None, heads: int, base: float | None, seed: int) -> Subject:
    with _says("--head-dim, --base"):
        return data.published(name, head_dim, heads, base, seed)


if __name__ == "__main__":
    typer.run(main)
