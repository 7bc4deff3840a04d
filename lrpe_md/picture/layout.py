"""Layout of panels, from the measured sizes of titles, labels, legends and colour bars. All sizes are in inches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MARGIN = 0.07  # between texts, and at the edges of the figure
GAP = 0.12  # between rows
BAR = 0.13  # width of a colour bar
PLOT_HEIGHT = 1.5 + 1e-6  # at exactly 1.5, rounding errors decide how many ticks of 9 points matplotlib draws
MIN_HEIGHT = 0.5  # of the box of a map
TITLE_WIDTH = 1.8  # space for the title of a tall map
SLACK = 1.06  # at other resolutions, text is up to 6% wider
LEGEND: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False, "borderpad": 0.2}


@dataclass(eq=False)
class Panel:
    """Axes below a legend, a title and a name.

    Attributes:
        axis: the axes.
        title, name: title, and name in bold above it. Parts joined by no-break spaces only break if they are too long.
        aspect: height per width of a map, or None for a plot, which is as high as its row.
        height: minimum height of a plot, or maximum height of a map.
        handles, offset: handles of the legend, and the height of marks between the axes and the legend.
        refine: function that chooses the ticks for axes of this width and height.
        box: left side, top, width and height. A map is in the middle of its box.
        margins: space for texts and ticks on the left, above, on the right and below the axes.
    """

    axis: Any
    title: str
    name: str = ""
    aspect: float | None = None
    height: float = PLOT_HEIGHT
    handles: Sequence[Any] = ()
    offset: float = 0.0
    refine: Callable[[float, float], None] = lambda width, height: None
    box: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    margins: Sequence[float] = (0.4, 0.0, 0.0, 0.0)  # before the first measurement

    @property
    def kind(self) -> int | str:
        """Return a key that plots with the same x label share, so that their texts break into the same lines."""
        return id(self) if self.aspect else " ".join(self.axis.get_xlabel().split())

    def find_height(self) -> float:
        """Return the height that the panel needs for its width."""
        return self.height if self.aspect is None else min(max(self.box[2] * self.aspect, MIN_HEIGHT), self.height)

    def fit_text(self, space: float) -> None:
        """Break the title and the x label into lines of at most this width, and add the legend."""
        title, label = self.axis.title, self.axis.xaxis.label
        above = _add_legend(self.axis, self.handles, space, self.offset) if self.handles else self.offset
        names = fill_lines(split_name(self.name), title, space, draw=bold)
        titles = fill_lines(self.title.split(" "), title, space)
        self.axis.set_title("\n".join(filter(None, [names, titles])), pad=4 + 72 * above, y=1.0)
        label.set_text(fill_lines(label.get_text().split(), label, space))


@dataclass(eq=False)
class Block:
    """Rows of panels in common columns.

    Attributes:
        rows: panels, or None for empty cells. A panel that is repeated in a row spans several columns.
        shares: relative widths of the columns.
        bar: axes of a colour bar, or None.
        scaled, side: panels with the scale of the bar, and the side of them on which the bar is.
    """

    rows: Sequence[Sequence[Panel | None]]
    shares: Sequence[float]
    bar: Any = None
    scaled: Sequence[Panel] = ()
    side: str = "right"
    bar_start: float = 0.0

    def set_columns(self, width: float) -> None:
        """Set the horizontal positions, and fit texts between the neighbours, the bar and the edges of the figure."""
        number, spans = len(self.shares), [span for row in self.rows for span in _find_spans(row)]
        before, after = [0.0] * (number + 1), [0.0] * (number + 1)  # labels on both sides of each gap between columns
        for panel, i, j in spans:
            left, _, right, _ = panel.margins
            before[i], after[j + 1] = max(before[i], left), max(after[j + 1], right)
        gaps = [a + b + MARGIN for a, b in zip(after, before, strict=True)]
        left, _, right, _ = _find_margins(self.bar) if self.bar else [0.0] * 4
        place = max((j + 1 for panel, _, j in spans if panel in self.scaled and self.side == "right"), default=0)
        gaps[place] += left + BAR + right + MARGIN if self.bar else 0.0
        unit = (width - sum(gaps)) / sum(self.shares)
        if all(panel.aspect for panel, *_ in spans):
            unit = min(unit, max(max(panel.height / (panel.aspect or 1), TITLE_WIDTH) for panel, *_ in spans))
        ends, starts = [(width - sum(gaps) - unit * sum(self.shares)) / 2], []
        for gap, share in zip(gaps, self.shares, strict=False):
            starts.append(ends[-1] + gap)
            ends.append(starts[-1] + unit * share)
        middles = [(end + start) / 2 for end, start in zip(ends[1:], starts[1:], strict=False)]
        lows, highs = [0.0, *middles, width], [0.0, *middles, width]  # limits of text on both sides of each gap
        if self.bar:
            self.bar_start = ends[place] + after[place] + MARGIN + left
            highs[place], lows[place] = self.bar_start - left, self.bar_start + BAR + right
        spaces: dict[int | str, float] = {}
        for panel, i, j in spans:
            panel.box[0], panel.box[2] = starts[i], ends[j + 1] - starts[i]
            centre = starts[i] + panel.box[2] / 2
            space = 2 * min(centre - lows[i], highs[j + 1] - centre) - MARGIN
            spaces[panel.kind] = min(space, spaces.get(panel.kind, width))
        for panel, *_ in spans:
            panel.fit_text(spaces[panel.kind])

    def set_rows(self, top: float) -> float:
        """Set the vertical positions from this top down, and return the top of what follows."""
        for row in self.rows:
            panels = [panel for panel, *_ in _find_spans(row)]
            height = max(panel.find_height() for panel in panels)
            for panel in panels:
                panel.refine(panel.box[2], height)
                wide, high = panel.axis.figure.get_size_inches()
                panel.axis.set_position((0.0, 0.0, panel.box[2] / wide, height / high))  # ticks depend on the size
                panel.margins = _find_margins(panel.axis)
            top += max(panel.margins[1] for panel in panels)
            for panel in panels:
                panel.box[1], panel.box[3] = top, height
            top += height + max(panel.margins[3] for panel in panels) + GAP
        return top

    def boxes(self) -> list[tuple[Any, list[float]]]:
        """Return all axes with their boxes."""
        found = [(panel.axis, panel.box) for row in self.rows for panel, *_ in _find_spans(row)]
        if self.bar:
            rests = [
                (panel.box, (panel.box[3] - panel.find_height()) / 2 * bool(panel.aspect)) for panel in self.scaled
            ]
            top, end = min(box[1] + rest for box, rest in rests), max(box[1] + box[3] - rest for box, rest in rests)
            found.append((self.bar, [self.bar_start, top, BAR, end - top]))
        return found


def make_figure(width: float) -> Figure:
    """Create a figure of this width, whose canvas reuses measurements of texts."""
    figure = Figure(figsize=(width, 4.0))
    FigureCanvasAgg(figure)
    return figure


def lay_out_panels(figure: Figure, blocks: Sequence[Block], header: Any = None, foot: Any = None) -> None:
    """Set the height of a figure, and place the header, the blocks below each other, and the footnote."""
    width = figure.get_figwidth()
    for _ in range(2):  # ticks change with the sizes of the axes, and margins change with the ticks
        top = MARGIN + (_find_extent(header)[1] + GAP if header else 0.0)
        for block in blocks:
            block.set_columns(width)
            top = block.set_rows(top)
        height = top - GAP + MARGIN + (_find_extent(foot)[1] + GAP if foot else 0.0)
        figure.set_size_inches(width, height)
        for axis, (x, y, w, h) in (pair for block in blocks for pair in block.boxes()):
            axis.set_position((x / width, 1 - (y + h) / height, w / width, h / height))
        for bar in (block.bar for block in blocks if block.bar):  # other ticks could have longer labels
            low, high = bar.get_ylim()
            near = (high - low) * 1e-6  # matplotlib's ticks have rounding errors, such as 1.0000000000000002
            ticks = [tick for tick in bar.get_yticks() if low - near <= tick <= high + near]
            bar.set_yticks([min(max(tick, low), high) for tick in ticks])
        for text, y in ((header, height - MARGIN), (foot, MARGIN)):
            if text:
                text.set_position((MARGIN / width, y / height))


def _find_spans(row: Sequence[Panel | None]) -> list[tuple[Panel, int, int]]:
    """Return the panels of a row with their first and last columns."""
    return [(p, row.index(p), row.index(p) + row.count(p) - 1) for p in dict.fromkeys(row) if p]


def _find_margins(axis: Any) -> list[float]:
    """Return the space for labels, ticks, legend and title on the left, above, on the right and below the axes."""
    outer, box, dpi = axis.get_tightbbox(for_layout_only=True), axis.bbox, axis.figure.dpi
    sides = (box.x0 - outer.x0, outer.y1 - box.y1, outer.x1 - box.x1, box.y0 - outer.y0)
    return [max(side, 0.0) / dpi for side in sides]


def _add_legend(axis: Any, handles: Sequence[Any], space: float, offset: float) -> float:
    """Add a legend above the axes, at most ``space`` wide and with few rows, and return the height that it needs."""
    labels = [handle.get_label() for handle in handles]

    def add(rows: int) -> Any:
        pad = 0.2 + 72 * offset / rcParams["legend.fontsize"]
        made = axis.legend(handles=handles, labels=labels, ncols=-(-len(handles) // rows), borderaxespad=pad, **LEGEND)
        made.set_in_layout(False)  # the title above it needs the space
        return made

    rows = 1
    while _find_extent(legend := add(rows))[0] > space and rows < len(handles):
        rows += 1
    if _find_extent(legend)[0] > space:
        texts = legend.get_texts()
        rest = space - _find_extent(legend)[0] + max(_find_extent(text)[0] for text in texts)
        labels = [fill_lines(label.split(" "), text, rest) for label, text in zip(labels, texts, strict=True)]
        legend = add(rows)
    return _find_extent(legend)[1] + offset


def _find_extent(artist: Any) -> tuple[float, float]:
    """Return the width and height of a text or a legend."""
    box, dpi = artist.get_window_extent(), artist.figure.dpi
    return SLACK * box.width / dpi, SLACK * box.height / dpi


def fill_lines(words: Sequence[str], text: Any, width: float, separator: str = " ", draw: Any = str) -> str:
    """Break words into lines of at most this width, as few and as equal as possible.

    Words that exceed a line break at no-break spaces, or else anywhere outside of formulas. ``text`` is a text in the
    font of the lines, which the function changes, and ``draw`` returns what to draw for a line.
    """

    def fits(line: str, width: float) -> bool:
        text.set_text(draw(line).replace("\xa0", " "))
        return _find_extent(text)[0] <= width

    whole = separator.join(words)
    if fits(whole, width):
        return draw(whole).replace("\xa0", " ")

    def split(word: str) -> list[str]:
        if "\xa0" in word and not fits(word, width):
            return [piece for part in word.split("\xa0") for piece in split(part)]
        parts = re.findall(r"\$[^$]*\$|.", word, re.DOTALL)
        for size in (-(-len(parts) // number) for number in range(1, len(parts) + 1)):
            found = ["".join(parts[i : i + size]) for i in range(0, len(parts), size)]
            if all(fits(piece, width) for piece in found):
                return found
        return [word]

    pieces, best = [piece for word in words for piece in split(word)], None
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        lines: list[str] = []
        for piece in pieces:
            joined = separator.join([*lines[-1:], piece])
            lines[-1:] = [joined] if not lines or fits(joined, share * width) else [lines[-1], piece]
        if best and (len(best) == 1 or len(lines) > len(best)):
            break
        best = lines
    return "\n".join(draw(line).replace("\xa0", " ") for line in best or [])


def split_name(name: str) -> list[str]:
    """Split a name at spaces, except in formulas."""
    return re.findall(r"(?:\$[^$]*\$|[^\s$])+|\$", name)


def bold(name: str) -> str:
    """Return a name in bold, as mathtext, except for formulas in it such as "$\\theta$"."""
    if name.count("$") > 1:
        return "".join(part if part[0] == "$" else bold(part) for part in re.findall(r"\$[^$]*\$?|[^$]+", name))
    name = re.sub(r"[^\w\s.,:;=+*/()<>!?&|@\[\]]", lambda found: rf"\text{{\{found[0]}}}", name)
    name = re.sub(r"\s+", r"\ ", name.replace("_", r"\_"))
    return rf"$\mathbf{{{name}}}$" if name else ""
