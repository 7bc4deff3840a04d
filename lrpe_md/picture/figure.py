"""Figures with panels for angles, similarity, slices and wavelengths, for :func:`lrpe_md.show`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from matplotlib import patheffects, rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ..checks import plural
from ..presets.registry import SCHEMES
from . import data
from .data import Subject, TokenLayout
from .layout import MARGIN, PLOT_HEIGHT, Block, Panel, bold, fill_lines, lay_out_panels, make_figure, split_name

WIDTH = 11.0  # inches
STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 10,
    "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
}  # fmt: skip
# A palette that colour-blind readers can distinguish, plus a grey
# (Okabe and Ito 2008, "Color universal design").
OKABE_ITO = {
    "black": "#000000", "orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "blue": "#0072B2",
    "vermilion": "#D55E00", "purple": "#CC79A7", "grey": "#7f7f7f", "yellow": "#F0E442",
}  # fmt: skip


class Look(NamedTuple):
    colour: str
    marker: str
    line: str
    width: float  # a thin line stays visible on top of a wide one


# Colours of the position axes; they also differ in greyscale.
LOOKS = {
    "N": Look(OKABE_ITO["black"], "o", "--", 1.2),
    "T": Look(OKABE_ITO["vermilion"], "^", "-.", 5),
    "H": Look(OKABE_ITO["blue"], "o", "-", 2.6),
    "W": Look(OKABE_ITO["orange"], "s", "--", 1.2),
    "L": Look(OKABE_ITO["green"], "D", "-.", 1.2),
}
OTHER = Look(OKABE_ITO["grey"], "X", "-.", 1.2)
SEQUENCE_LINES = (("blue", "-", 2.4), ("orange", "--", 1.2))
SMALL: Any = {
    **STYLE, "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7.5, "axes.linewidth": 0.6,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "figure.constrained_layout.use": False, "figure.autolayout": False,
}  # fmt: skip
SAVED: Any = {"pdf.fonttype": 42}  # publishers reject the default, Type 3 fonts
ANGLES: Any = {"cmap": "twilight_shifted", "vmin": -math.pi, "vmax": math.pi}  # lightness shows |Θ|, hue shows its sign
SIMILARITY: Any = {"cmap": "cividis", "vmax": 1.0}
FOOT = (
    "Similarity: q·k with the marked token, divided by its value at distance 0, if q and k have the same content in "
    "every channel."
)


@dataclass(frozen=True, eq=False)
class View:
    """Selection of what to draw in a figure.

    Attributes:
        subject, layout: encoding and tokens to draw.
        token: grid coordinates of the marked token.
        head: head to draw.
        channels, frames: channels and frames to draw as angle maps.
        chosen: ``channels`` or ``maps`` if one was passed, so that a figure without angle maps is an error.
        options: options of the positions, such as ``reference`` and ``fps``, for the title.
    """

    subject: Subject
    layout: TokenLayout
    token: tuple[int, ...]
    head: int
    channels: list[int]
    frames: list[int]
    options: Mapping[str, Any]
    chosen: Mapping[str, Any]

    @property
    def text_name(self) -> str:
        """Label of the tokens before the grid. Tokens that the scheme skips can be text, class or register tokens."""
        tokens = self.subject.preset.scheme.tokens
        return "prefix" if tokens is not None and tokens.rule == "skip" else "text"

    @property
    def default_variant(self) -> tuple[str, str]:
        return self.subject.variants[0]

    def omega(self, variant: tuple[str, str]) -> Tensor:
        """Return omega (C, K) of the selected head."""
        return data.of_head(self.subject.omega(*variant), self.head)

    @cached_property
    def scores(self) -> list[tuple[list[tuple[str, str]], Tensor]]:
        """Similarity (N,) to the marked token, for each variant. Axis orders with equal values share an entry."""
        found: list[tuple[list[tuple[str, str]], Tensor]] = []
        for variant in self.subject.variants:
            score = self.subject.similarity(self.layout, variant, self.head, self.layout.index(self.token))
            same = [names for names, other in found if names[0][0] == variant[0] and (score - other).abs().max() < 1e-3]
            same[0].append(variant) if same else found.append(([variant], score))
        return found


def make_view(
    subject: Subject,
    layout: TokenLayout,
    token: tuple[int, ...] | None = None,
    head: int = 0,
    *,
    channels: Sequence[int] = (),
    maps: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> View:
    """Select what to draw. By default, mark the token at the centre of the grid, and choose ``maps`` channels.

    Raises:
        ValueError: if no channel rotates on the grid.
    """
    token = layout.centre if token is None else token
    omega = data.of_head(subject.preset.omega, head)
    shown = list(channels) or data.choose_channels(layout, omega, 4 if maps is None else maps)
    if not shown:
        raise ValueError(
            f"shape: expected a grid on which {subject.preset.name} rotates at least one channel, got "
            f"{'x'.join(map(str, layout.shape))}"
        )
    frames = data.choose_frames(layout, token)
    chosen = {"channels": shown} if channels else {} if maps is None else {"maps": maps}
    return View(subject, layout, token, head, shown, frames, options or {}, chosen)


def lowest_similarity(views: Sequence[View], variants: int | None = None) -> float:
    """Return the lower end of a similarity scale for the first variants of these views (default: all variants).

    The upper end is 1.
    """
    return _round_down(score for view in views for _, score in view.scores[:variants])


def _lowest_slice(views: Sequence[View]) -> float:
    """Return the lower end of a similarity scale for the slices of these views."""
    return _round_down(
        data.slice_through(view.layout, view.scores[0][1], view.token, j)[1]
        for view in views
        for j in range(len(view.layout.shape))
    )


def _select_scores(view: View, panels: Sequence[str]) -> list[Any]:
    """Return the scores of the variants for which the figure has panels."""
    return view.scores[: "similarity" in panels] + (view.scores[1:] if "variants" in panels else [])


def _round_down(scores: Iterable[Tensor]) -> float:
    return min(math.floor(min(float(score.min()) for score in scores) * 10) / 10, 0.9)


# --- panels ----------------------------------------------------------------------------------------------------------


def choose_panels(views: Sequence[View], names: Sequence[str], is_comparison: bool = False) -> list[str]:
    """Return the panels to draw, in the order of :data:`lrpe_md.picture.data.PANELS`. The default is all panels.

    Sequences have no slices, which would repeat the similarity.

    Raises:
        ValueError: if the figure has no panel of this name, or has no angle maps for the channels that were passed.
    """
    missing = {"angles", "variants"} if is_comparison else set()
    missing |= {"variants"} if len(views[0].scores) == 1 else set()
    missing |= {"slices"} if all(len(view.layout.shape) == 1 for view in views) else set()
    known = [name for name in data.PANELS if name not in missing]
    for name in names:
        if name not in known:
            what = "a comparison" if is_comparison else views[0].subject.preset.name
            what += " of sequences" if is_comparison and "slices" in missing else ""
            raise ValueError(f"panels: expected one or more of {', '.join(known)} for {what}, got {name!r}")
    panels = [name for name in known if not names or name in names]
    for name, value in views[0].chosen.items() if "angles" not in panels else ():
        advice = "draw one encoding at a time to see its angles" if is_comparison else "also draw the panel 'angles'"
        if is_comparison and len(views) == 1:
            advice = "pass the encoding itself instead of a list or dict to see its angles"
        expected = "none" if name == "channels" else "None"
        raise ValueError(f"{name}: expected {expected} for a figure without angle maps, got {value}; {advice}")
    return panels


def draw(view: View, names: Sequence[str] = (), width: float | None = None) -> Figure:
    """Draw the panels with these names (default: all) in a figure ``width`` inches wide. The caller must close it.

    The height follows from the panels. A figure of all panels also has a header and a footnote.
    """
    panels, width = choose_panels([view], names), WIDTH if width is None else width
    with rc_context(_style(width)):
        figure = make_figure(width)
        draw_blocks = _draw_sequence if len(view.layout.shape) == 1 else _draw_grid
        blocks = draw_blocks(figure, view, panels, _count_columns(width))
        lay_out_panels(figure, blocks, *(() if names else (_header(figure, view), _foot(figure))))
        return figure


def draw_comparison(views: Sequence[View], names: Sequence[str] = (), width: float | None = None) -> Figure:
    """Draw the panels with these names (default: all) for each view. The caller must close the figure.

    Each view has a row of its own, or several rows if the figure is narrow. If there is one panel per view, views are
    also side by side. All views share the scales of the similarity and the wavelengths.
    """
    panels, width = choose_panels(views, names, is_comparison=True), WIDTH if width is None else width
    with rc_context(_style(width)):
        figure = make_figure(width)
        # Slices share the scale of the maps, if there are any.
        lowest = lowest_similarity(views, 1) if "similarity" in panels else _lowest_slice(views)
        is_same_size = len({view.subject.preset.head_dim for view in views}) == 1
        rows = [_draw_compared(figure, view, panels, lowest, is_same_size) for view in views]
        if "wavelengths" in panels:
            limits = [limit for row in rows for limit in row[-1].axis.get_ylim()]
            for row in rows:
                row[-1].axis.set_ylim(min(limits), max(limits))
        maps = [row[0] for row in rows if row[0].aspect is not None]
        columns = _count_columns(width)
        if len(panels) == 1:
            is_wide = maps and any(len(view.frames) > 1 for view in views)
            block = _tile([row[0] for row in rows], columns // 2 if is_wide else columns)
        else:
            columns = min(columns, len(panels))
            shares = [1.3 if name == "similarity" and columns == len(panels) else 1.0 for name in panels[:columns]]
            cells = [[*[row[0]] * (-len(row) % columns), *row] for row in rows]  # the first panel may span columns
            block = Block([line for row in cells for line in _chunk(row, columns)], shares)
        if maps:
            block = replace(
                block, bar=_colour_bar(figure, maps, "similarity", location="left"), scaled=maps, side="left"
            )
        lay_out_panels(figure, [block], foot=None if names else _foot(figure))
        return figure


def _draw_compared(figure: Figure, view: View, panels: Sequence[str], lowest: float, is_same_size: bool) -> list[Panel]:
    """Draw a view of a comparison, with its name above the first panel, and its head_dim unless all are the same."""
    made, scores = [], view.scores[:1]
    if "similarity" in panels:
        size = [] if is_same_size else [f"head_dim {view.subject.preset.head_dim}"]
        details = [_variant_name(view, scores[0][0]), *size, *_conditions(view)]
        title = " ".join(part.replace(" ", "\xa0") + "," for part in details).removesuffix(",")
        if len(view.layout.shape) == 1:
            made.append(replace(_similarity_lines(figure, view, lowest, scores), title=title, handles=()))
        else:
            made.append(_picture(figure, view, scores[0][1], title, 1.9, vmin=lowest, **SIMILARITY))
    made += [_slices(figure, view, lowest)] if "slices" in panels else []
    made += [_wavelengths(figure, view)] if "wavelengths" in panels else []
    return [replace(made[0], name=view.subject.preset.name), *made[1:]]


def _style(width: float) -> Any:
    return SMALL if width >= WIDTH else SMALL | {"xtick.labelsize": 7.5, "ytick.labelsize": 7.5}


def _count_columns(width: float) -> int:
    """Return the number of plots that fit side by side, at most 4."""
    return max(1, min(4, int(width / 2.25)))


def _chunk(cells: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [cells[i : i + size] for i in range(0, len(cells), size)]


def _tile(panels: Sequence[Panel], columns: int, bar: Any = None) -> Block:
    """Arrange panels in at most ``columns`` columns, beside an optional bar."""
    columns = -(-len(panels) // -(-len(panels) // max(1, columns)))  # no more than this number of rows needs
    cells = [*panels, *[None] * (-len(panels) % columns)]
    return Block(_chunk(cells, columns), [1.0] * columns, bar, panels if bar else ())


def _draw_grid(figure: Figure, view: View, panels: Sequence[str], columns: int) -> list[Block]:
    """Draw angle maps, then similarity, then slices and wavelengths, in fewer columns if there are several frames."""
    scores, span, blocks = _select_scores(view, panels), 1 if len(view.frames) == 1 else 2, []
    if "angles" in panels:
        theta = data.token_angles(view.layout, view.omega(view.default_variant)[view.channels])
        names = [_channel_name(view, channel) for channel in view.channels]
        maps = [_picture(figure, view, data.wrap(x), n, **ANGLES) for x, n in zip(theta.T, names, strict=True)]
        blocks.append(_tile(maps, columns // span, _angle_bar(figure, maps)))
    lowest = lowest_similarity([view], None if "variants" in panels else 1) if scores else _lowest_slice([view])
    shown = [(_variant_name(view, names).replace(" axis ", "\xa0axis\xa0"), score) for names, score in scores]
    maps = [_picture(figure, view, score, title, vmin=lowest, **SIMILARITY) for title, score in shown]
    plots = [_slices(figure, view, lowest)] if "slices" in panels else []
    plots += [_wavelengths(figure, view)] if "wavelengths" in panels else []
    bar = _colour_bar(figure, maps, "similarity") if maps else None
    if maps and plots and span * len(maps) + len(plots) <= columns:
        shares = [float(span)] * len(maps) + [1.0] * len(plots)
        return [*blocks, Block([[*maps, *plots]], shares, bar, maps)]
    blocks += [_tile(maps, columns // span, bar)] if maps else []
    return [*blocks, _tile(plots, columns)] if plots else blocks


def _draw_sequence(figure: Figure, view: View, panels: Sequence[str], columns: int) -> list[Block]:
    """Draw angles with one row per channel, similarity as lines, and wavelengths."""
    scores, made, bar = _select_scores(view, panels), [], None
    if "angles" in panels:
        made.append((1.25, _angle_rows(figure, view)))
        bar = _angle_bar(figure, [made[0][1]])
    if scores:
        lowest = lowest_similarity([view], None if "variants" in panels else 1)
        made.append((1.0, _similarity_lines(figure, view, lowest, scores)))
    made += [(0.9, _wavelengths(figure, view))] if "wavelengths" in panels else []
    first = len(made) % columns or columns
    rows = [made[:first], *_chunk(made[first:], columns)]
    blocks = [Block([[panel for _, panel in row]], [share for share, _ in row]) for row in rows]
    return [replace(blocks[0], bar=bar, scaled=[made[0][1]]), *blocks[1:]] if bar else blocks


def _add_axes(figure: Figure, **options: Any) -> Any:
    """Add axes whose position is not final."""
    axis = figure.add_axes((0.2, 0.2, 0.6, 0.5), **options)
    # Otherwise, matplotlib would choose as many ticks as there is space for in the default font.
    axis.tick_params(labelsize=rcParams["xtick.labelsize"])
    return axis


def _angle_rows(figure: Figure, view: View) -> Panel:
    """Draw the angles of a sequence with one row per channel."""
    axis, layout, omega = _add_axes(figure), view.layout, view.omega(view.default_variant)
    rows = data.wrap(data.token_angles(layout, omega[view.channels])).T
    before = layout.text + data.GAP if layout.text else 0
    gap = torch.full((len(rows), before - layout.text), math.nan, dtype=rows.dtype)
    rows = torch.cat([rows[:, : layout.text], gap, rows[:, layout.text :]], 1)
    extent = (-before - 0.5, layout.shape[0] - 0.5, len(rows) - 0.5, -0.5)
    axis.imshow(rows.numpy(), aspect="auto", interpolation="nearest", extent=extent, **ANGLES)
    turns = data.wavelengths(layout, omega)[1]
    axis.set_yticks(range(len(rows)), [f"{c}\nλ = {_number(turns[c])}" for c in view.channels])
    axis.set_xticks(_whole_ticks(layout.shape[0], 6))
    axis.set(xlabel=_token_label(view), ylabel=_what(view))
    axis.grid(False)
    labels = sum(label.get_window_extent().height for label in axis.get_yticklabels()) / figure.dpi
    order = ", fastest to slowest" if len(rows) > 1 else ""
    return Panel(axis, f"angle Θ{order}", height=max(PLOT_HEIGHT, 1.1 * labels))


def _token_label(view: View) -> str:
    return "token" + (f" (left: the {view.text_name})" if view.layout.text else "")


def _similarity_lines(figure: Figure, view: View, lowest: float, scores: Sequence[Any]) -> Panel:
    """Plot the similarity over a sequence for one or two variants, with the text on the left."""
    axis, layout, handles = _add_axes(figure), view.layout, []
    before = layout.text + data.GAP if layout.text else 0
    for (names, values), (colour, line, width) in zip(scores, SEQUENCE_LINES, strict=False):
        one: Any = {"ls": line, "lw": width, "color": OKABE_ITO[colour]}
        handles += axis.plot(values[layout.text :].tolist(), label=_variant_name(view, names), **one)
        axis.plot(range(-before, -before + layout.text), values[: layout.text].tolist(), marker=".", **one)
    axis.axvline(view.token[0], color="black", lw=0.8, ls=":")
    _scale_similarity(axis, lowest, _token_label(view))
    return Panel(axis, f"similarity to token {view.token[0]} (dotted)", handles=handles)


def _scale_similarity(axis: Any, lowest: float, label: str) -> None:
    """Set the labels of a plot of similarity, and its scale from ``lowest`` to 1 with a margin of 5%."""
    axis.set(xlabel=label, ylabel="similarity", ylim=(1.05 * lowest - 0.05, 1.05 - 0.05 * lowest))


def _angle_bar(figure: Figure, panels: Sequence[Panel]) -> Any:
    bar = _colour_bar(figure, panels, "angle Θ, rad", ticks=[-math.pi, 0, math.pi])
    bar.set_yticklabels(["−π", "0", "π"])
    return bar


def _colour_bar(figure: Figure, panels: Sequence[Panel], label: str, **options: Any) -> Any:
    bar = _add_axes(figure, label="<colorbar>")
    figure.colorbar(panels[0].axis.images[0], cax=bar, label=label, **options)
    bar.grid(False)
    return bar


def _whole_ticks(size: int, number: int) -> list[float]:
    ticks = MaxNLocator(number, integer=True).tick_values(0, max(size - 1, 1)) if number > 0 else [0.0]
    return [float(t) for t in ticks if 0 <= t < size]


def _picture(figure: Figure, view: View, values: Tensor, title: str, height: float = 4.0, **scale: Any) -> Panel:
    """Draw the frames side by side with the text above them, and mark the selected token with a ring."""
    axis, layout = _add_axes(figure), view.layout
    picture = data.arrange_frames(layout, values, view.frames)
    axis.imshow(picture.image.numpy(), interpolation="nearest", **scale)
    rows, columns = picture.image.shape
    axis.set_ylabel("H", labelpad=1, y=picture.size[0] / 2 / rows)  # beside the grid, not the text
    axis.grid(False)
    axis.spines[:].set_visible(False)
    frame = view.token[0] if len(layout.shape) == 3 else 0
    x, y = picture.first_columns[view.frames.index(frame)] + view.token[-1], picture.top + view.token[-2]
    ring = axis.plot(x, y, "o", mfc="none", mec="white", mew=1.2, ms=8, clip_on=False)[0]
    ring.set_path_effects([patheffects.Stroke(linewidth=2.6, foreground="black"), patheffects.Normal()])
    refine = partial(_set_map_ticks, axis, view, picture)
    return Panel(axis, title, aspect=rows / columns, height=height, refine=refine)


def _set_map_ticks(axis: Any, view: View, picture: data.Picture, *size: float) -> None:
    """Label as many rows and columns as a map of this size in inches has space for, and the frames and the text."""
    (height, width), (rows, columns) = picture.size, picture.image.shape
    cell = min(size[0] / columns, size[1] / rows)
    label, centre = 0.15, (picture.top - data.GAP - 1) / 2
    ticks = {picture.top + t: f"{t:.0f}" for t in _whole_ticks(height, min(4, int((height - 1) * cell / label)))}
    if view.layout.text:
        ticks = {y: name for y, name in ticks.items() if (y - centre) * cell > label} | {centre: view.text_name}
    axis.set_yticks(list(ticks), list(ticks.values()))
    middles = [left + (width - 1) / 2 for left in picture.first_columns]
    if len(middles) > 1 and width * cell < 0.65:
        axis.set_xticks(middles, view.frames)
        axis.set_xlabel("T", labelpad=1)
        return
    numbers = _whole_ticks(width, min(5, int((width - 1) * cell / (1.5 * label))))
    axis.set_xticks(*zip(*((left + t, f"{t:.0f}") for left in picture.first_columns for t in numbers), strict=True))
    axis.set_xlabel("W" if len(middles) == 1 else "", labelpad=1)
    if len(middles) > 1:  # labels of frames are below those of columns
        axis.xaxis.remove_overlapping_locs = False
        axis.set_xticks(middles, [f"W (T = {t})" for t in view.frames], minor=True)
        axis.tick_params(axis="x", which="minor", length=0, pad=7 + rcParams["xtick.labelsize"])


def _slices(figure: Figure, view: View, lowest: float) -> Panel:
    """Plot the similarity along each grid axis through the token."""
    axis, layout, handles = _add_axes(figure), view.layout, []
    for j, name in enumerate(data.AXES[len(layout.shape)]):
        if layout.shape[j] > 1:
            look = LOOKS[name]
            line: Any = {"ls": "-" if look.width > 2 else look.line, "lw": look.width, "color": look.colour}
            distance, values = data.slice_through(layout, view.scores[0][1], view.token, j)
            handles += axis.plot(distance.tolist(), values.tolist(), label=f"along {name}", **line)
    axis.axvline(0, color="black", lw=0.6, ls=":")
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    _scale_similarity(axis, lowest, "distance from the marked token, tokens")
    return Panel(axis, f"slices at the marked token, {view.default_variant[0]}", handles=handles)


def _wavelengths(figure: Figure, view: View) -> Panel:
    """Plot each channel's tokens per turn on the axes along which it rotates, with unrotated channels at the top."""
    axis, layout, omega = _add_axes(figure), view.layout, view.omega(view.default_variant)
    each, along = data.wavelengths(layout, omega)
    handles = []
    for j, name in enumerate(layout.names):
        look, there = LOOKS.get(name, OTHER), each[:, j].isfinite().nonzero().flatten()
        if not len(there):
            continue
        still, borrowed = layout.steps[j] == 0, layout.borrowed_axis(j)
        dots: Any = {"marker": look.marker, "ms": 3.2, "mew": 0.7, "color": look.colour}
        dots |= {"mfc": "none"} if still else {}
        axis.plot(there.tolist(), each[there, j].tolist(), ls="none", **dots)
        label, line = f"{name}, and its size {layout.sizes[j]}", look.line
        if still:
            label, line = f"{name}, in positions (not on this grid)", "none"
        elif borrowed:
            label, line = f"{name}, in tokens along {borrowed}", "none"
        else:
            axis.axhline(layout.sizes[j], color=look.colour, ls=look.line, lw=1)
        handles.append(Line2D([], [], ls=line, lw=1, label=label, **dots))
    if ((omega != 0).sum(-1) > 1).any():
        handles += axis.plot(along.tolist(), "_", color="black", ms=5, label="along its direction")
    if any(data.aliased(layout, row) for row in omega):
        band: Any = {"color": OKABE_ITO["grey"], "alpha": 0.2, "lw": 0}
        axis.axhspan(float(each.min()) / 2, 2, zorder=0, **band)
        handles.append(Patch(label="aliased, λ < 2", **band))
    none = (omega == 0).all(-1).nonzero().flatten()
    if len(none):
        handles += axis.plot(
            none.tolist(), [1.03] * len(none), "x", color=OKABE_ITO["grey"], ms=3.5, mew=0.8, clip_on=False,
            transform=axis.get_xaxis_transform(), label="not rotated",
        )  # fmt: skip
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axis.set_yscale("log")
    axis.set(xlabel=_what(view), ylabel="wavelength λ, tokens")
    return Panel(axis, "wavelengths and the grid", handles=handles, offset=0.09 if len(none) else 0.0)


def _header(figure: Figure, view: View) -> Any:
    """Add the name and the properties of an encoding above the panels."""
    made, layout, omega = view.subject.preset, view.layout, view.omega(view.default_variant)
    used = ", ".join(f"{name} {int(n)}" for name, n in zip(layout.names, (omega != 0).sum(0), strict=True) if n)
    has_pairs = made.scheme.map == "rotate" and made.name != "omega"  # the layout of a bare omega is unknown
    parts = [
        made.scheme.map + (f" ({made.scheme.pairs})" if has_pairs else ""),
        f"head_dim {made.head_dim}",
        f"{len(omega)} {_what(view)}s" + (", each along all axes" if ((omega != 0).sum(-1) > 1).any() else f": {used}"),
        *([f"base {_number(view.subject.base)}"] if view.subject.is_base_used else []),
        *_conditions(view),
    ]
    title, space = figure.suptitle("", fontsize=9, ha="left"), figure.get_figwidth() - 2 * MARGIN
    name = fill_lines(split_name(made.name), title, space, draw=bold)
    title.set_text(fill_lines([name, *(part.replace(" ", "\xa0") for part in parts)], title, space, "   ·   "))
    return title


def _foot(figure: Figure) -> Any:
    text = figure.supxlabel("", fontsize=7, color="#444444", ha="left")
    text.set_text(fill_lines(FOOT.split(" "), text, figure.get_figwidth() - 2 * MARGIN))
    return text


def _conditions(view: View) -> list[str]:
    """Return the parts of a title that state the grid, the text, the head, and what the scheme leaves open."""
    made, layout, width = view.subject.preset, view.layout, view.subject.rotated_channels
    parts = [("grid " if len(layout.shape) > 1 else "tokens ") + "×".join(map(str, layout.shape))]
    rules = {name: value for name, value in view.options.items() if name != "reference"}
    parts += [f"{name} {value}" for name, value in rules.items() if value is not None]
    parts += _rescaling(view, rules)
    parts += [plural(layout.text, f"{view.text_name} token")] if layout.text else []
    parts += [f"{width} of {made.head_dim} channels rotated"] if width < made.head_dim else []
    parts += [f"head {view.head} ({made.num_heads} heads)"] if made.omega.shape[0] > 1 else []
    parts += ["phase set to 0"] if made.scheme.phase else []
    parts += view.subject.notes
    return parts + (["frequencies before training"] if made.scheme.learned and view.subject.frequencies else [])


def _rescaling(view: View, rules: Mapping[str, Any]) -> list[str]:
    """Return the part of a title that states how positions are scaled. Without scaling, return nothing."""
    made, layout = view.subject.preset, view.layout
    reference = view.options.get("reference")
    reference = made.scheme.reference if reference is None else reference
    sizes = () if reference is None else made.find_reference(reference, layout.shape, **rules)
    if any(sizes):
        return ["positions rescaled to " + "×".join("–" if n is None else str(n) for n in sizes)]
    is_scaled = ((layout.steps > 0) & ((layout.steps - 1).abs() > 1e-6)).any()
    return ["positions scaled by the scheme's own rule"] if is_scaled else []


def _what(view: View) -> str:
    return "channel" if view.default_variant[0] == "cosine" else "pair"


def _number(value: Any) -> str:
    value = float(value)
    if 1e5 <= value < math.inf:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"${mantissa.removesuffix('.0')}\\times10^{{{int(exponent)}}}$".replace("$1\\times", "$")
    return "∞" if math.isinf(value) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _channel_name(view: View, channel: int) -> str:
    layout, omega = view.layout, view.omega(view.default_variant)[channel]
    on = [name for name, w in zip(layout.names, omega.tolist(), strict=True) if w]
    text = f"{_what(view)}\xa0{channel},\xa0{on[0] if len(on) == 1 else 'mixed'}: "
    each, along = data.wavelengths(layout, omega[None])
    still = bool(along.isinf())
    text += f"λ\xa0=\xa0{_number(each.min() if still else along)}\xa0{'positions' if still else 'tokens'}"
    return text + (" (aliased)" if data.aliased(layout, omega) else "")


def _variant_name(view: View, names: Sequence[tuple[str, str]]) -> str:
    (mapping, order), subject = names[0], view.subject
    orders = "" if order == data.NO_ORDER else f", {order}" if len(names) == 1 else ", either axis order"
    own = subject.preset.scheme
    is_named = bool(subject.frequencies) and any(own is scheme for scheme in SCHEMES.values())
    mine = "published" if is_named and subject.base == own.frequencies.base else "as defined"
    # A module or ω has no other variants from which to tell it apart.
    is_marked = view.default_variant in names and (is_named or len(subject.variants) > 1)
    return f"{mapping}{orders}" + (f" ({mine})" if is_marked else "")
