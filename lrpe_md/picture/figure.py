"""Figures with panels for angles, similarity, slices and wavelengths, for :func:`lrpe_md.show`."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from matplotlib import patheffects, rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ..checks import plural
from ..presets.registry import SCHEMES
from . import data
from .data import Subject, TokenLayout

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
    def default_variant(self) -> tuple[str, str]:
        return self.subject.variants[0]

    def omega(self, variant: tuple[str, str]) -> Tensor:
        """Return omega (C, K) of the selected head."""
        return data.of_head(self.subject.omega(*variant), self.head)

    @cached_property
    def scores(self) -> list[tuple[list[tuple[str, str]], Tensor]]:
        """Similarity (N,) to the token for each variant. Axis orders with equal values share an entry."""
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
    """Select what to draw. By default, this is the centre of the grid as the marked token, and ``maps`` channels.

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
    lowest = min(float(score.min()) for view in views for _, score in view.scores[:variants])
    return min(math.floor(lowest * 10) / 10, 0.9)


# --- panels ----------------------------------------------------------------------------------------------------------


def draw(view: View) -> Figure:
    """Draw the figure, which the caller must close."""
    lowest = lowest_similarity([view])
    with rc_context(SMALL):
        return (_draw_sequence if len(view.layout.shape) == 1 else _draw_grid)(view, lowest)


def draw_comparison(views: Sequence[View]) -> Figure:
    """Draw a row for each view, with similarity, slices and wavelengths. The caller must close the figure.

    All rows share the scales of the similarity and the wavelengths. Sequences have no slices, which would repeat the
    similarity.
    """
    lowest, height = lowest_similarity(views, 1), 2.5
    columns = 2 if all(len(view.layout.shape) == 1 for view in views) else 3
    with rc_context(SMALL):
        figure = Figure(figsize=(WIDTH, height * len(views) + 0.5), layout="constrained")
        axes = figure.subplots(len(views), columns, squeeze=False, width_ratios=(1.3, 1, 1)[:columns])
        image, pictures = None, []
        for view, (where, *slices, _) in zip(views, axes, strict=True):
            names, score = view.scores[0]
            if len(view.layout.shape) == 1:
                _similarity_lines(where, view, lowest, variants=1)
            else:
                image = _picture(where, view, score, cmap="cividis", vmin=lowest, vmax=1.0)
                pictures.append(where)
            # A longer line would reach the bar. Lines break between parts only.
            parts = [part.replace(" ", "\xa0") for part in (_variant_name(view, names), *_conditions(view))]
            lines = [*map(_bold, textwrap.wrap(view.subject.preset.name, 40)), *textwrap.wrap(", ".join(parts), 56)]
            where.set_title("\n".join(lines).replace("\xa0", " "))
            for axis in slices:
                _slices(axis, view, score, lowest)
        if image is not None:
            # Without panchor=False, narrow maps would be next to the bar, which then covers their titles.
            _similarity_bar(figure, image, pictures, location="left", aspect=15 * len(pictures), panchor=False)
        figure.supxlabel(FOOT, fontsize=7, color="#444444", x=0.008, ha="left")
        _wavelengths(axes[:, -1].tolist(), views, height - 0.9, columns=2)
        return figure


def _draw_grid(view: View, lowest: float) -> Figure:
    """Draw angle maps, then similarity, then slices and wavelengths, in fewer columns if there are several frames."""
    layout, scores = view.layout, view.scores
    columns = 4 if len(view.frames) == 1 else 2
    shown = data.arrange_frames(layout, scores[0][1], view.frames).image.shape
    panel = min(max((WIDTH / columns - 0.6) * shown[0] / shown[1], 0.5), 4.0) + 0.5
    map_rows, score_rows = -(-len(view.channels) // columns), -(-len(scores) // columns)
    beside = len(scores) <= columns // 2  # whether the last two panels fit into the row of similarities
    heights = [panel * map_rows, max(panel, 2.0) if beside else panel * score_rows] + ([] if beside else [2.3])
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.75), layout="constrained")
    rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    left, right = rows[1].subfigures(1, 2) if beside else rows[1:]

    theta, image = data.token_angles(layout, view.omega(view.default_variant)[view.channels]), None
    panels = _panels(rows[0], map_rows, columns)
    for axis, channel, angles in zip(panels, view.channels, theta.T, strict=False):
        image = _picture(axis, view, data.wrap(angles), **ANGLES)
        axis.set_title(_channel_name(view, channel))
    _angle_bar(rows[0], image, panels)
    _blank(panels[len(view.channels) :])

    panels = _panels(left, score_rows, len(scores) if beside else columns)
    for axis, (names, score) in zip(panels, scores, strict=False):
        image = _picture(axis, view, score, cmap="cividis", vmin=lowest, vmax=1.0)
        axis.set_title(_variant_name(view, names))
    _similarity_bar(left, image, panels)
    _blank(panels[len(scores) :])

    slices, waves = _panels(right, 1, 2)
    _slices(slices, view, scores[0][1], lowest)
    _wavelengths([waves], [view], heights[-1] - 0.8, 1 if beside else 2)
    _head_and_foot(figure, view)
    return figure


def _draw_sequence(view: View, lowest: float) -> Figure:
    """Draw angles with one row per channel, similarity as lines, and wavelengths."""
    layout, length = view.layout, view.layout.shape[0]
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    angle, score, wave = figure.subplots(1, 3, width_ratios=(1.25, 1, 0.9))
    omega = view.omega(view.default_variant)
    rows = data.wrap(data.token_angles(layout, omega[view.channels])).T
    before = layout.text + data.GAP if layout.text else 0
    gap = torch.full((len(rows), before - layout.text), math.nan, dtype=rows.dtype)
    rows = torch.cat([rows[:, : layout.text], gap, rows[:, layout.text :]], 1)
    extent = (-before - 0.5, length - 0.5, len(rows) - 0.5, -0.5)
    image = angle.imshow(rows.numpy(), aspect="auto", interpolation="nearest", extent=extent, **ANGLES)
    turns = data.wavelengths(layout, omega)[1]
    angle.set_yticks(range(len(rows)), [f"{c}\nλ = {_number(turns[c])}" for c in view.channels])
    angle.set_xticks(_whole_ticks(length, 6))
    title = "angle Θ" + (", fastest to slowest" if len(rows) > 1 else "")
    angle.set(xlabel=_token_label(layout), ylabel=_what(view), title=title)
    angle.grid(False)
    _angle_bar(figure, image, [angle])
    _similarity_lines(score, view, lowest)
    score.set_title(f"similarity to token {view.token[0]} (dotted)")
    score.legend(**LEGEND, handlelength=1.2)
    _wavelengths([wave], [view], 2.2)
    _head_and_foot(figure, view)
    return figure


def _token_label(layout: TokenLayout) -> str:
    return "token" + (" (left: the text)" if layout.text else "")


def _similarity_lines(axis: Any, view: View, lowest: float, variants: int = len(SEQUENCE_LINES)) -> None:
    """Plot the similarity over a sequence, with the text on the left. The first variant is the scheme's own."""
    layout = view.layout
    before = layout.text + data.GAP if layout.text else 0
    for (names, values), (colour, line, width) in zip(view.scores[:variants], SEQUENCE_LINES, strict=False):
        one: Any = {"ls": line, "lw": width, "color": OKABE_ITO[colour]}
        axis.plot(range(layout.shape[0]), values[layout.text :].tolist(), label=_variant_name(view, names), **one)
        axis.plot(range(-before, -before + layout.text), values[: layout.text].tolist(), marker=".", **one)
    axis.axvline(view.token[0], color="black", lw=0.8, ls=":")
    axis.set(xlabel=_token_label(layout), ylabel="similarity")
    _limit_similarity(axis, lowest)


def _limit_similarity(axis: Any, lowest: float) -> None:
    """Set the limits of a similarity axis to ``lowest`` and 1, with a margin."""
    margin = 0.05 * (1 - lowest)
    axis.set_ylim(lowest - margin, 1 + margin)


def _similarity_bar(figure: Any, image: Any, axes: list[Any], **options: Any) -> None:
    bar = figure.colorbar(image, ax=axes, **{"shrink": 0.9, "pad": 0.015, "aspect": 15, **options})
    bar.set_label("similarity")
    bar.ax.grid(False)


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
        ticks = {y: name for y, name in ticks.items() if (y - centre) * cell > label} | {centre: "text"}
    axis.set_yticks(list(ticks), list(ticks.values()))
    if len(view.frames) == 1:
        axis.set_xticks(_whole_ticks(width, min(5, int(width * cell / (1.5 * label)))))
        axis.set_xlabel("W", labelpad=1)
    else:
        axis.set_xticks(
            [left + (width - 1) / 2 for left in picture.first_columns], [f"W  (T = {t})" for t in view.frames]
        )
        axis.tick_params(axis="x", length=0)
    axis.set_ylabel("H", labelpad=1)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    frame = view.token[0] if len(layout.shape) == 3 else 0
    x, y = picture.first_columns[view.frames.index(frame)] + view.token[-1], picture.top + view.token[-2]
    ring = axis.plot(x, y, "o", mfc="none", mec="white", mew=1.2, ms=8, clip_on=False)[0]
    ring.set_path_effects([patheffects.Stroke(linewidth=2.6, foreground="black"), patheffects.Normal()])
    return image


def _slices(axis: Any, view: View, score: Tensor, lowest: float) -> None:
    """Plot the similarity along each grid axis through the token."""
    for j, name in enumerate(data.AXES[len(view.layout.shape)]):
        if view.layout.shape[j] > 1:
            look = LOOKS[name]
            line = "-" if look.width > 2 else look.line
            distance, values = data.slice_through(view.layout, score, view.token, j)
            axis.plot(distance.tolist(), values.tolist(), line, lw=look.width, color=look.colour, label=f"along {name}")
    axis.axvline(0, color="black", lw=0.6, ls=":")
    axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axis.set(xlabel="distance from the marked token, tokens", ylabel="similarity")
    axis.set_title(f"slices at the marked token, {view.default_variant[0]}")
    _limit_similarity(axis, lowest)
    axis.legend(**LEGEND, handlelength=2.6)


def _wavelengths(axes: Sequence[Any], views: Sequence[View], height: float, columns: int = 1) -> None:
    """Plot the wavelengths of each view on one scale, with the legend above the data.

    ``height`` is the height of the axes in inches, and ``columns`` is the number of legend columns. It is 1 if a legend
    would be wider than its axes.
    """
    legends = [_plot_wavelengths(axis, view) for axis, view in zip(axes, views, strict=True)]
    low = min(math.log10(axis.get_ylim()[0]) for axis in axes)
    high = max(math.log10(axis.get_ylim()[1]) for axis in axes)
    options: Any = {**LEGEND, "loc": "upper left", "handletextpad": 0.4, "handlelength": 2.1, "columnspacing": 0.8}
    if columns > 1:
        boxes = [axis.legend(handles=h, ncols=columns, **options) for axis, h in zip(axes, legends, strict=True)]
        for box in boxes:
            box.set_in_layout(False)
        axes[0].figure.canvas.figure.draw_without_rendering()  # applies the layout
        if any(box.get_tightbbox().width > axis.bbox.width for box, axis in zip(boxes, axes, strict=True)):
            columns = 1
    rows = -(-max(map(len, legends)) // columns)
    for axis, handles in zip(axes, legends, strict=True):
        axis.set_ylim(10**low, 10 ** (low + (high - low) / (1 - (0.08 + 0.16 * rows) / height)))
        axis.legend(handles=handles, ncols=columns, **options)


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


def _angle_bar(figure: Any, image: Any, axes: list[Any]) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.015, aspect=15, ticks=[-math.pi, 0, math.pi])
    bar.ax.set_yticklabels(["−π", "0", "π"])
    bar.set_label("angle Θ, rad")
    bar.ax.grid(False)


def _head_and_foot(figure: Figure, view: View) -> None:
    made, layout, omega = view.subject.preset, view.layout, view.omega(view.default_variant)
    used = [f"{name} {int(n)}" for name, n in zip(layout.names, (omega != 0).sum(0), strict=True) if n]
    dense = ((omega != 0).sum(-1) > 1).any()
    has_pairs = made.scheme.map == "rotate" and made.name != "omega"  # the layout of a bare omega is unknown
    parts = [
        made.scheme.map + (f" ({made.scheme.pairs})" if has_pairs else ""),
        f"head_dim {made.head_dim}",
        f"{len(omega)} {_what(view)}s" + (", each along all axes" if dense else f": {', '.join(used)}"),
        *([] if view.subject.base is None else [f"base {_number(view.subject.base)}"]),
        *_conditions(view),
    ]
    at: Any = {"x": 0.008, "ha": "left"}
    title = figure.suptitle(_bold(made.name), fontsize=9, **at)
    for part in parts:
        text = title.get_text()
        title.set_text(f"{text}   ·   {part}")
        if title.get_window_extent().x1 > figure.bbox.x1:
            title.set_text(f"{text}\n{part}")
    figure.supxlabel(FOOT, fontsize=7, color="#444444", **at)


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
    parts += [plural(layout.text, "text token")] if layout.text else []
    parts += [f"{width} of {made.head_dim} channels rotated"] if width < made.head_dim else []
    parts += [f"head {view.head} ({made.num_heads} heads)"] if made.omega.shape[0] > 1 else []
    parts += ["phase set to 0"] if made.scheme.phase else []
    return parts + (["frequencies before training"] if made.scheme.learned and view.subject.frequencies else [])


def _bold(name: str) -> str:
    """Return a name in bold, as mathtext. A name with formulas such as "$\\theta$" is already mathtext."""
    if name.count("$") > 1:
        return name
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
    mapping, order = names[0]
    orders = "" if order == data.NO_ORDER else f", {order}" if len(names) == 1 else ", either axis order"
    own = view.subject.preset.scheme
    is_published = any(own is scheme for scheme in SCHEMES.values()) and view.subject.base == own.frequencies.base
    mine = "published" if is_published and view.subject.frequencies else "as defined"
    return f"{mapping}{orders}" + (f" ({mine})" if view.default_variant in names else "")
