"""Figures with panels for angles, similarity, slices and wavelengths, for :func:`lrpe_md.show`."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from matplotlib import patheffects, rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from torch import Tensor

from ..checks import plural
from ..presets.registry import SCHEMES
from . import data
from .data import Subject, TokenLayout

WIDTH = 11.0  # inches
MAX_HEIGHT = 4.0  # of a map, in inches
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
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "legend.framealpha": 0.8, "legend.edgecolor": "none",
}  # fmt: skip
SAVED: Any = {"pdf.fonttype": 42}  # publishers reject the default, Type 3 fonts
LEGEND: Any = {"loc": "best", "borderaxespad": 0.2, "borderpad": 0.2}
ANGLES: Any = {"cmap": "twilight_shifted", "vmin": -math.pi, "vmax": math.pi}  # lightness shows |Θ|, hue shows its sign
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
        options: options of the positions, such as ``reference`` and ``fps``, for the title.
    """

    subject: Subject
    layout: TokenLayout
    token: tuple[int, ...]
    head: int
    channels: list[int]
    frames: list[int]
    options: Mapping[str, Any]

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
    maps: int = 4,
    options: Mapping[str, Any] | None = None,
) -> View:
    """Select what to draw. By default, mark the token at the centre of the grid, and choose ``maps`` channels.

    Raises:
        ValueError: if no channel rotates on the grid.
    """
    token = layout.centre if token is None else token
    omega = data.of_head(subject.preset.omega, head)
    shown = list(channels) or data.choose_channels(layout, omega, maps)
    if not shown:
        raise ValueError(
            f"shape: expected a grid on which {subject.preset.name} rotates at least one channel, got "
            f"{'x'.join(map(str, layout.shape))}"
        )
    return View(subject, layout, token, head, shown, data.choose_frames(layout, token), options or {})


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
        ValueError: if the figure has no panel of this name.
    """
    missing = {"angles", "variants"} if is_comparison else set()
    missing |= {"variants"} if len(views[0].scores) == 1 else set()
    missing |= {"slices"} if all(len(view.layout.shape) == 1 for view in views) else set()
    known = [name for name in data.PANELS if name not in missing]
    for name in names:
        if name not in known:
            what = "a comparison" if is_comparison else views[0].subject.preset.name
            raise ValueError(f"panels: expected one or more of {', '.join(known)} for {what}, got {name!r}")
    return [name for name in known if not names or name in names]


def draw(view: View, names: Sequence[str] = (), width: float | None = None) -> Figure:
    """Draw the panels with these names (default: all) in a figure ``width`` inches wide. The caller must close it.

    The height follows from the panels. A figure of all panels also has a header and a footnote.
    """
    panels = choose_panels([view], names)
    width = WIDTH if width is None else width
    with rc_context(_style(width)):
        make = _draw_sequence if len(view.layout.shape) == 1 else _draw_grid
        figure = make(view, panels, width, 0.05 if names else 0.75)
        if not names:
            _head_and_foot(figure, view)
        return figure


def draw_comparison(views: Sequence[View], names: Sequence[str] = (), width: float | None = None) -> Figure:
    """Draw the panels with these names (default: all) for each view. The caller must close the figure.

    Each view has a row of its own, or several rows if the figure is narrow. If there is one panel per view, views are
    also side by side. All views share the scales of the similarity and the wavelengths.
    """
    panels, width = choose_panels(views, names, is_comparison=True), WIDTH if width is None else width
    pictures = [i for i, view in enumerate(views) if len(view.layout.shape) > 1] if "similarity" in panels else []
    number, columns, shares = len(panels), _count_columns(width), [1.3 if p == "similarity" else 1.0 for p in panels]
    if number == 1:
        span = 2 if pictures and any(len(views[i].frames) > 1 for i in pictures) else 1
        columns = _balance(len(views), max(1, columns // span))
        cells = _arrange([*range(len(views)), *["."] * (-len(views) % columns)], columns)
    else:
        columns = min(columns, number)
        cells = [row for i in range(len(views)) for row in _arrange(range(i * number, (i + 1) * number), columns)]
    if number == 1 or columns < number:
        shares = [1.0] * columns
    inner = width - 0.7 if pictures else width  # beside the bar of the similarity
    widths = [inner * share / sum(shares) for share in shares]
    first = inner if len(cells) > len(views) and number % columns else widths[0]  # the first panel may span columns
    heights = [
        min(_picture_height(views[row[0] // number], first - 0.5), 1.9) + 1.05
        if {*row} <= {i * number for i in pictures} | {"."} else 2.5
        for row in cells
    ]  # fmt: skip
    if "similarity" in panels:
        lines = {i * number: sum(map(len, _title_lines(view, first))) for i, view in enumerate(views)}
        most = [max(lines.get(cell, 0) for cell in row) for row in cells]
        heights = [height + 0.15 * max(number - 3, 0) for height, number in zip(heights, most, strict=True)]
    plot = (widths[-1] - 0.75, 2.5 - 0.9)
    with rc_context(_style(width)):
        figure = Figure(figsize=(width, sum(heights) + (0.1 if names else 0.5)), layout="constrained")
        axes: Any = figure.subplot_mosaic(cells, height_ratios=heights, width_ratios=shares)
        named = [{panel: axes[i * number + j] for j, panel in enumerate(panels)} for i in range(len(views))]
        # Slices share the scale of the maps, if there are any.
        lowest = lowest_similarity(views, 1) if "similarity" in panels else _lowest_slice(views)
        if "wavelengths" in panels:
            _wavelengths([own["wavelengths"] for own in named], views, plot, columns=2)
        for own, view in zip(named, views, strict=True):
            _draw_compared(own, view, lowest, first, plot)
        if pictures:
            maps = [named[i]["similarity"] for i in pictures]
            first_row, last_row = (maps[i].get_subplotspec().rowspan for i in (0, -1))
            height = sum(heights[first_row.start : last_row.stop])
            _similarity_bar(figure, maps[0].images[0], maps, height, location="left")
        if not names:
            _foot(figure)
        return figure


def _draw_compared(axes: Mapping[str, Any], view: View, lowest: float, width: float, plot: tuple[float, float]) -> None:
    """Draw the panels of a view in a comparison, except for its wavelengths, with a title above the first panel.

    ``width`` is the width of the title, and ``plot`` the size of a plot, both in inches.
    """
    score = view.scores[0][1]
    if "slices" in axes:
        _slices(axes["slices"], view, score, lowest, plot)
    lines, details = _title_lines(view, width)
    above, where = next(iter(axes.items()))
    if above != "similarity":
        lines.append(where.get_title())
    elif len(view.layout.shape) == 1:
        _similarity_lines(where, view, lowest, view.scores[:1])
    else:
        _picture(where, view, score, cmap="cividis", vmin=lowest, vmax=1.0)
    if above == "similarity":
        lines += details
    where.set_title("\n".join(lines))


def _title_lines(view: View, width: float) -> tuple[list[str], list[str]]:
    """Return the lines of the name, and of the variant and the conditions, of a view in a comparison.

    Lines are wrapped so that they don't reach the bar. They break between parts, unless a part is longer than a line.
    """
    parts, most = [_variant_name(view, view.scores[0][0]), *_conditions(view)], int(18 * width - 17)
    parts = [part.replace(" ", "\xa0") if len(part) < most else part for part in parts]
    details = [line.replace("\xa0", " ") for line in textwrap.wrap(", ".join(parts), most)]
    # Formulas are as long as the characters that they draw, and never break.
    name, limit = view.subject.preset.name, int(0.72 * most)
    formulas = re.findall(r"\$[^$]*\$", name)
    name = re.sub(r"\$[^$]*\$", lambda found: "\1".ljust(min(_count_drawn(found[0]), limit), "\0"), name)
    lines = textwrap.wrap(name, limit)
    return [_bold(re.sub("\1\0*", lambda _: formulas.pop(0), line)) for line in lines], details


def _count_drawn(formula: str) -> int:
    """Return the approximate number of characters that a formula draws."""
    return max(1, len(re.sub(r"[\s${}^_]", "", re.sub(r"\\[A-Za-z]+", "x", formula))))


def _style(width: float) -> Any:
    return SMALL if width >= WIDTH else SMALL | {"xtick.labelsize": 7.5, "ytick.labelsize": 7.5}


def _count_columns(width: float) -> int:
    """Return the number of plots that fit side by side, at most 4."""
    return max(1, min(4, int(width / 2.25)))


def _count_rows(number: int, columns: int) -> int:
    return -(-number // columns)


def _balance(number: int, columns: int) -> int:
    """Return the smallest number of columns that needs no more rows than ``columns``."""
    return _count_rows(number, _count_rows(number, columns)) if number else 1


def _arrange(keys: Sequence[Any], columns: int) -> Any:
    """Arrange keys for ``subplot_mosaic``. The first key spans several columns if a row would be incomplete."""
    cells = [*[keys[0]] * (-len(keys) % columns), *keys]
    return [cells[i : i + columns] for i in range(0, len(cells), columns)]


def _height_per_width(view: View) -> float:
    rows, columns = data.arrange_frames(view.layout, view.scores[0][1], view.frames).image.shape
    return rows / columns


def _picture_height(view: View, width: float) -> float:
    return min(max(width * _height_per_width(view), 0.5), MAX_HEIGHT)


def _column_width(view: View, width: float) -> float:
    """Return the width of a single column of maps with labels and a bar, in a figure that is ``width`` inches wide."""
    return min(width, max(MAX_HEIGHT / _height_per_width(view) + 1.3, 3.25))


def _centre(figure: Any, inner: float, width: float) -> Any:
    """Return the middle ``inner`` inches of a figure that is ``width`` inches wide."""
    rest = (width - inner) / 2
    return figure.subfigures(1, 3, width_ratios=(rest, inner, rest))[1] if rest > 0 else figure


def _draw_grid(view: View, panels: Sequence[str], width: float, margin: float) -> Figure:
    """Draw angle maps, then similarity, then slices and wavelengths, in fewer columns if there are several frames."""
    scores = _select_scores(view, panels)
    plots = [name for name in panels if name in ("slices", "wavelengths")]
    columns, span = _count_columns(width), 1 if len(view.frames) == 1 else 2
    beside = bool(scores and plots) and span * len(scores) + len(plots) <= columns  # whether one row has enough space
    shares = (span * len(scores), len(plots)) if beside else (1, 1)
    map_columns = _balance(len(view.channels), max(1, columns // span))
    map_width = _column_width(view, width) if map_columns == 1 else width
    score_columns = len(scores) if beside else _balance(len(scores), max(1, columns // span))
    plot_columns = min(columns, len(plots))

    def height(number: int, columns: int, width: float) -> float:
        text = 0.5 if columns > 1 else 0.65  # a title may have two lines
        return (_picture_height(view, width / columns - 0.6) + text) * _count_rows(number, columns)

    left, right = ((width * share / sum(shares)) if beside else width for share in shares)
    heights = {}
    if "angles" in panels:
        number = len(view.channels)
        has_two_lines = "\n" in _channel_titles(view, map_columns, map_width)[0]
        second_lines = 0.13 * _count_rows(number, map_columns) if has_two_lines else 0
        heights["angles"] = height(number, map_columns, map_width) + second_lines
    if scores:
        heights["similarity"] = max(height(len(scores), score_columns, left), 2.0 if beside else 0.0)
    if plots and not beside:
        heights["plots"] = 2.3 * _count_rows(len(plots), plot_columns)
    figure = Figure(figsize=(width, sum(heights.values()) + margin), layout="constrained")
    rows: Any = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=list(heights.values()))
    parts: dict[str, Any] = dict(zip(heights, rows[:, 0], strict=True))
    if beside:
        parts["similarity"], parts["plots"] = parts["similarity"].subfigures(1, 2, width_ratios=shares)
    if "angles" in panels:
        _draw_angles(_centre(parts["angles"], map_width, width), view, map_columns, map_width)
    lowest = lowest_similarity([view], None if "variants" in panels else 1) if scores else _lowest_slice([view])
    if scores:
        inner = _column_width(view, left) if score_columns == 1 and not beside else left
        _draw_scores(_centre(parts["similarity"], inner, left), view, scores, score_columns, inner, lowest)
    if plots:
        axes = _panels(parts["plots"], _count_rows(len(plots), plot_columns), plot_columns)
        size = (right / plot_columns - 0.65, (heights["similarity"] if beside else 2.3) - 0.8)
        if "slices" in plots:
            _slices(axes[0], view, view.scores[0][1], lowest, size)
        if "wavelengths" in plots:
            _wavelengths(axes[-1:], [view], size, 1 if beside else 2)
    return figure


def _draw_angles(figure: Any, view: View, columns: int, width: float) -> None:
    """Draw an angle map for each channel in a part of the figure that is ``width`` inches wide."""
    theta, image = data.token_angles(view.layout, view.omega(view.default_variant)[view.channels]), None
    panels = _panels(figure, _count_rows(len(view.channels), columns), columns)
    for axis, title, angles in zip(panels, _channel_titles(view, columns, width), theta.T, strict=False):
        image = _picture(axis, view, data.wrap(angles), **ANGLES)
        axis.set_title(title)
    _angle_bar(figure, image, panels, figure.bbox.height / figure.dpi)
    _blank(panels[len(view.channels) :])


def _channel_titles(view: View, columns: int, width: float) -> list[str]:
    """Return the titles of the angle maps, in two lines each if one of them would reach the colour bar."""
    titles = [_channel_name(view, channel) for channel in view.channels]
    space = (width - 0.7 if columns == 1 else (width - 0.65) / columns - 0.28) - _text_label_width(view)
    is_long = max(map(len, titles)) > 16 * space  # about 16 characters per inch
    return [title.replace(": ", ":\n") for title in titles] if is_long else titles


def _draw_scores(figure: Any, view: View, scores: Sequence[Any], columns: int, width: float, lowest: float) -> None:
    """Draw a similarity map for each variant in a part of the figure that is ``width`` inches wide."""
    panels, image = _panels(figure, _count_rows(len(scores), columns), columns), None
    for axis, (names, score) in zip(panels, scores, strict=False):
        image = _picture(axis, view, score, cmap="cividis", vmin=lowest, vmax=1.0)
        axis.set_title(_fill(_variant_name(view, names), _title_width(view, width, columns)))
    _similarity_bar(figure, image, panels, figure.bbox.height / figure.dpi)
    _blank(panels[len(scores) :])


def _draw_sequence(view: View, panels: Sequence[str], width: float, margin: float) -> Figure:
    """Draw angles with one row per channel, similarity as lines, and wavelengths."""
    scores = _select_scores(view, panels)
    shares = {"angles": 1.25, "similarity": 1.0, "wavelengths": 0.9}
    names = [name for name in shares if name in panels or (name == "similarity" and scores)]
    columns = min(_count_columns(width), len(names))
    ratios = [shares[name] if columns == len(names) else 1.0 for name in names[:columns]]
    cells = _arrange(names, columns)
    figure = Figure(figsize=(width, 2.45 * len(cells) + margin), layout="constrained")
    axes = figure.subplot_mosaic(cells, width_ratios=ratios)
    # The labels and the bar of the angles also take space from the panels below.
    outside = 1.5 if len(cells) > 1 else 1.1 if "angles" in names else 0.65
    sizes = {
        n: (width * part / sum(ratios) - outside, 2.2) for row in cells for n, part in zip(row, ratios, strict=True)
    }
    if "angles" in axes:
        _draw_rows(axes["angles"], view)
    if scores:
        axis, lowest = axes["similarity"], lowest_similarity([view], None if "variants" in panels else 1)
        _similarity_lines(axis, view, lowest, scores)
        axis.set_title(f"similarity to token {view.token[0]} (dotted)")
        _place_legend(axis, sizes["similarity"], handlelength=1.2)
    if "wavelengths" in axes:
        _wavelengths([axes["wavelengths"]], [view], sizes["wavelengths"])
    return figure


def _draw_rows(axis: Any, view: View) -> None:
    """Draw the angles of a sequence with one row per channel."""
    layout, omega = view.layout, view.omega(view.default_variant)
    rows = data.wrap(data.token_angles(layout, omega[view.channels])).T
    before = layout.text + data.GAP if layout.text else 0
    gap = torch.full((len(rows), before - layout.text), math.nan, dtype=rows.dtype)
    rows = torch.cat([rows[:, : layout.text], gap, rows[:, layout.text :]], 1)
    extent = (-before - 0.5, layout.shape[0] - 0.5, len(rows) - 0.5, -0.5)
    image = axis.imshow(rows.numpy(), aspect="auto", interpolation="nearest", extent=extent, **ANGLES)
    turns = data.wavelengths(layout, omega)[1]
    axis.set_yticks(range(len(rows)), [f"{c}\nλ = {_number(turns[c])}" for c in view.channels])
    axis.set_xticks(_whole_ticks(layout.shape[0], 6))
    title = "angle Θ" + (", fastest to slowest" if len(rows) > 1 else "")
    axis.set(xlabel=_token_label(view), ylabel=_what(view), title=title)
    axis.grid(False)
    _angle_bar(axis.figure, image, [axis], axis.bbox.height / axis.figure.dpi)


def _title_width(view: View, width: float, columns: int) -> float:
    """Return the space for the title of a map, so that it doesn't reach the next title or the colour bar."""
    return (width - 0.7 if columns == 1 else (width - 0.4) / columns) - _text_label_width(view)


def _text_label_width(view: View) -> float:
    """Return the width of the label of the text tokens, in inches. The label narrows maps, and thus their titles."""
    return 0.35 if view.layout.text else 0.0


def _fill(title: str, width: float) -> str:
    """Break a title into lines of at most ``width`` inches, at about 15 characters per inch."""
    return textwrap.fill(title, int(15 * width))


def _token_label(view: View) -> str:
    return "token" + (f" (left: the {view.text_name})" if view.layout.text else "")


def _similarity_lines(axis: Any, view: View, lowest: float, scores: Sequence[Any]) -> None:
    """Plot the similarity over a sequence for one or two variants, with the text on the left."""
    layout = view.layout
    before = layout.text + data.GAP if layout.text else 0
    for (names, values), (colour, line, width) in zip(scores, SEQUENCE_LINES, strict=False):
        one: Any = {"ls": line, "lw": width, "color": OKABE_ITO[colour]}
        axis.plot(range(layout.shape[0]), values[layout.text :].tolist(), label=_variant_name(view, names), **one)
        axis.plot(range(-before, -before + layout.text), values[: layout.text].tolist(), marker=".", **one)
    axis.axvline(view.token[0], color="black", lw=0.8, ls=":")
    axis.set(xlabel=_token_label(view), ylabel="similarity")
    _limit_similarity(axis, lowest)


def _limit_similarity(axis: Any, lowest: float) -> None:
    """Set the limits of a similarity axis to ``lowest`` and 1, with a margin."""
    margin = 0.05 * (1 - lowest)
    axis.set_ylim(lowest - margin, 1 + margin)


def _similarity_bar(figure: Any, image: Any, axes: list[Any], height: float, **options: Any) -> None:
    _colour_bar(figure, image, axes, height, **options).set_label("similarity")


def _colour_bar(figure: Any, image: Any, axes: list[Any], height: float, **options: Any) -> Any:
    """Draw a bar of at most 0.2 inches width beside axes that are ``height`` inches high."""
    # Without panchor=False, narrow maps would be next to the bar, which then covers their titles.
    options |= {"shrink": 0.9, "pad": 0.015, "aspect": max(15, 0.9 * height / 0.2), "panchor": False}
    bar = figure.colorbar(image, ax=axes, **options)
    bar.ax.grid(False)
    return bar


def _panels(figure: Any, rows: int, columns: int) -> list[Any]:
    return figure.subplots(rows, columns, squeeze=False).flatten().tolist()


def _whole_ticks(size: int, number: int) -> list[float]:
    if number < 1:
        return [0.0]
    ticks = MaxNLocator(number, integer=True).tick_values(0, max(size - 1, 1))
    return [float(t) for t in ticks if 0 <= t < size]


def _blank(axes: list[Any]) -> None:
    for axis in axes:
        axis.set_axis_off()


def _picture(axis: Any, view: View, values: Tensor, **scale: Any) -> Any:
    """Draw the frames side by side with the text above them, and mark the selected token with a ring."""
    layout = view.layout
    picture = data.arrange_frames(layout, values, view.frames)
    image = axis.imshow(picture.image.numpy(), interpolation="nearest", **scale)
    height, width = picture.size
    # Tick labels need some space, in inches.
    rows, columns = picture.image.shape
    cell = min(axis.bbox.width / columns, axis.bbox.height / rows) / axis.figure.dpi
    label, centre = 0.15, (picture.top - data.GAP - 1) / 2
    ticks = {picture.top + t: f"{t:.0f}" for t in _whole_ticks(height, min(4, int(height * cell / label)))}
    if layout.text:
        ticks = {y: name for y, name in ticks.items() if (y - centre) * cell > label} | {centre: view.text_name}
    axis.set_yticks(list(ticks), list(ticks.values()))
    if len(view.frames) == 1:
        axis.set_xticks(_whole_ticks(width, min(5, int(width * cell / (1.5 * label)))))
        axis.set_xlabel("W", labelpad=1)
    else:
        is_wide = width * cell > 0.9
        labels = [f"W  (T = {t})" if is_wide else f"T = {t}" for t in view.frames]
        axis.set_xticks([left + (width - 1) / 2 for left in picture.first_columns], labels)
        axis.tick_params(axis="x", length=0)
        axis.set_xlabel("" if is_wide else "W", labelpad=1)
    axis.set_ylabel("H", labelpad=1, y=height / 2 / rows)  # beside the grid, not the text
    axis.grid(False)
    axis.spines[:].set_visible(False)
    frame = view.token[0] if len(layout.shape) == 3 else 0
    x, y = picture.first_columns[view.frames.index(frame)] + view.token[-1], picture.top + view.token[-2]
    ring = axis.plot(x, y, "o", mfc="none", mec="white", mew=1.2, ms=8, clip_on=False)[0]
    ring.set_path_effects([patheffects.Stroke(linewidth=2.6, foreground="black"), patheffects.Normal()])
    return image


def _slices(axis: Any, view: View, score: Tensor, lowest: float, size: tuple[float, float]) -> None:
    """Plot the similarity along each grid axis through the token, in axes of about this size in inches."""
    for j, name in enumerate(data.AXES[len(view.layout.shape)]):
        if view.layout.shape[j] > 1:
            look = LOOKS[name]
            line = "-" if look.width > 2 else look.line
            distance, values = data.slice_through(view.layout, score, view.token, j)
            axis.plot(distance.tolist(), values.tolist(), line, lw=look.width, color=look.colour, label=f"along {name}")
    axis.axvline(0, color="black", lw=0.6, ls=":")
    axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axis.set(xlabel=_fill("distance from the marked token, tokens", size[0] + 0.45), ylabel="similarity")
    axis.set_title(_fill(f"slices at the marked token, {view.default_variant[0]}", size[0] + 0.3))
    _limit_similarity(axis, lowest)
    _place_legend(axis, size, handlelength=2.6)


def _place_legend(axis: Any, size: tuple[float, float], **options: Any) -> None:
    """Put the legend in a corner where it covers no line, or else above the lines.

    ``size`` is the approximate size of the axes in inches, because their layout is not final.
    """
    options = {**LEGEND, **options}
    legend = axis.legend(**options)
    # At other resolutions, text is up to 8% wider.
    width, height = (1.1 * n / (m * axis.figure.dpi) for n, m in zip(_extent(legend), size, strict=True))
    lines = [(line.get_transform() - axis.transAxes).transform_path(line.get_path()) for line in axis.lines]
    for corner in ("upper right", "upper left", "lower left", "lower right"):
        x, y = 1 - width if "right" in corner else 0, 1 - height if "upper" in corner else 0
        if not any(line.intersects_bbox(Bbox.from_bounds(x, y, width, height), filled=False) for line in lines):
            axis.legend(**{**options, "loc": corner})
            return
    low, high = axis.get_ylim()
    axis.set_yticks([t for t in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= t <= high])
    _legends_above([axis], [legend.legend_handles], size, len(legend.legend_handles), **options)


def _legends_above(
    axes: Sequence[Any], handles: Sequence[list[Any]], size: tuple[float, float], columns: int, **options: Any
) -> None:
    """Extend the scale of the axes upwards, and put legends with at most ``columns`` columns there."""
    options = {**options, "loc": "upper left", "handletextpad": 0.4, "columnspacing": 0.8}

    def fit(columns: int) -> bool:
        legends = [axis.legend(handles=h, ncols=columns, **options) for axis, h in zip(axes, handles, strict=True)]
        return all(_extent(legend)[0] <= size[0] * legend.figure.dpi for legend in legends)

    columns = next((n for n in range(columns, 0, -1) if fit(n)), 0)
    if not columns:
        columns = 1
        for handle in itertools.chain(*handles):
            handle.set_label(handle.get_label().replace(" (", "\n("))
    lines = [sum(1 + handle.get_label().count("\n") for handle in each) for each in handles]
    share = (0.08 + 0.16 * _count_rows(max(lines), columns)) / size[1]
    for axis, each in zip(axes, handles, strict=True):
        scale = axis.yaxis.get_transform()
        low, high = scale.transform(axis.get_ylim())
        axis.set_ylim(*scale.inverted().transform([low, low + (high - low) / (1 - share)]))
        axis.legend(handles=each, ncols=columns, **options)


def _extent(legend: Any) -> tuple[float, float]:
    """Return the width and height of a legend in pixels. This size doesn't depend on the layout of the figure."""
    box = legend.get_window_extent()
    return box.width, box.height


def _wavelengths(axes: Sequence[Any], views: Sequence[View], size: tuple[float, float], columns: int = 1) -> None:
    """Plot the wavelengths of each view on one scale, with the legends above the data.

    ``size`` is the approximate size of the axes in inches, and ``columns`` is the maximum number of legend columns.
    """
    legends = [_plot_wavelengths(axis, view) for axis, view in zip(axes, views, strict=True)]
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_title(_fill(axis.get_title(), size[0]))
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        # By default, matplotlib would estimate the number of ticks for a larger font than that of this style.
        for ticks in (axis.yaxis.get_major_locator(), axis.yaxis.get_minor_locator()):
            ticks.set_params(numticks=max(2, int(size[1] / 0.2)))
    _legends_above(axes, legends, size, columns, **LEGEND, handlelength=2.1)


def _plot_wavelengths(axis: Any, view: View) -> list[Any]:
    """Plot each channel's tokens per turn on the axes along which it rotates, with unrotated channels at the top.

    Return the handles of the legend.
    """
    layout, omega = view.layout, view.omega(view.default_variant)
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
        # Unrotated channels get a band above the axis.
        handles += axis.plot(
            none.tolist(), [1.03] * len(none), "x", color=OKABE_ITO["grey"], ms=3.5, mew=0.8, clip_on=False,
            transform=axis.get_xaxis_transform(), label="not rotated",
        )  # fmt: skip
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axis.set_yscale("log")
    axis.set(xlabel=_what(view), ylabel="wavelength λ, tokens", title="wavelengths and the grid")
    axis.title.set_y(1.04 if len(none) else 1.0)
    return handles


def _angle_bar(figure: Any, image: Any, axes: list[Any], height: float) -> None:
    bar = _colour_bar(figure, image, axes, height, ticks=[-math.pi, 0, math.pi])
    bar.ax.set_yticklabels(["−π", "0", "π"])
    bar.set_label("angle Θ, rad")


def _head_and_foot(figure: Figure, view: View) -> None:
    made, layout, omega = view.subject.preset, view.layout, view.omega(view.default_variant)
    used = [f"{name} {int(n)}" for name, n in zip(layout.names, (omega != 0).sum(0), strict=True) if n]
    dense = ((omega != 0).sum(-1) > 1).any()
    has_pairs = made.scheme.map == "rotate" and made.name != "omega"  # the layout of a bare omega is unknown
    parts = [
        made.scheme.map + (f" ({made.scheme.pairs})" if has_pairs else ""),
        f"head_dim {made.head_dim}",
        f"{len(omega)} {_what(view)}s" + (", each along all axes" if dense else f": {', '.join(used)}"),
        *([f"base {_number(view.subject.base)}"] if view.subject.is_base_used else []),
        *_conditions(view),
    ]
    title = figure.suptitle(_bold(made.name), fontsize=9, x=0.008, ha="left")
    for part in parts:
        text = title.get_text()
        title.set_text(f"{text}   ·   {part}")
        if title.get_window_extent().x1 > figure.bbox.x1:
            title.set_text(f"{text}\n{part}")
    _foot(figure)


def _foot(figure: Figure) -> None:
    text = textwrap.fill(FOOT, int(18 * figure.get_figwidth()))
    figure.supxlabel(text, fontsize=7, color="#444444", x=0.008, ha="left")


def _conditions(view: View) -> list[str]:
    """Return the parts of a title that state the grid, the text, the head, and what the scheme leaves open."""
    made, layout, width = view.subject.preset, view.layout, view.subject.rotated_channels
    parts = [("grid " if len(layout.shape) > 1 else "tokens ") + "×".join(map(str, layout.shape))]
    for name, value in view.options.items():
        if value is None:
            continue
        if name != "reference":
            parts.append(f"{name} {value}")
            continue
        rules = {key: each for key, each in view.options.items() if key != name}
        sizes = made.find_reference(value, layout.shape, **rules)
        if any(sizes):
            parts.append("positions rescaled to " + "×".join("–" if n is None else str(n) for n in sizes))
        elif isinstance(value, int) or any(value):
            parts.append("positions scaled by the scheme's own rule")
    parts += [plural(layout.text, f"{view.text_name} token")] if layout.text else []
    parts += [f"{width} of {made.head_dim} channels rotated"] if width < made.head_dim else []
    parts += [f"head {view.head} ({made.num_heads} heads)"] if made.omega.shape[0] > 1 else []
    parts += ["phase set to 0"] if made.scheme.phase else []
    return parts + (["frequencies before training"] if made.scheme.learned and view.subject.frequencies else [])


def _bold(name: str) -> str:
    """Return a name in bold, as mathtext, except for formulas in it such as "$\\theta$"."""
    if name.count("$") > 1:
        return "".join(part if part[0] == "$" else _bold(part) for part in re.findall(r"\$[^$]*\$?|[^$]+", name))
    name = re.sub(r"[^\w\s.,:;=+*/()<>!?&|@\[\]]", lambda found: rf"\text{{\{found[0]}}}", name)
    name = re.sub(r"\s+", r"\ ", name.replace("_", r"\_"))
    return rf"$\mathbf{{{name}}}$"


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
    text = f"{_what(view)} {channel}, {on[0] if len(on) == 1 else 'mixed'}: "
    each, along = data.wavelengths(layout, omega[None])
    still = bool(along.isinf())
    text += f"λ = {_number(each.min() if still else along)} {'positions' if still else 'tokens'}"
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
