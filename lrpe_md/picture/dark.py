"""Figure colours for pages with a dark background."""

from __future__ import annotations

from typing import Any

from matplotlib import colors
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.spines import Spine
from matplotlib.text import Text

__all__ = ["darken"]

DARK_PAGE, DARK_TEXT = "#1e2129", "#e2e4e9"


def darken(figure: Figure) -> None:
    """Change a figure's black text and lines to a light colour, and its white backgrounds to a dark colour."""
    backgrounds = [figure.patch, *(axis.patch for axis in figure.axes)]
    backgrounds += [each.get_frame() for each in figure.findobj() if isinstance(each, Legend)]
    for patch in backgrounds:
        patch.set_facecolor(colors.to_rgba(DARK_PAGE, patch.get_alpha()))
    for axis in figure.axes:
        axis.tick_params(which="both", colors=DARK_TEXT)  # includes hidden ticks, which findobj leaves out
    for each in figure.findobj():
        if isinstance(each, Text):
            each.set_color(_lighten(each.get_color()))
        elif isinstance(each, Line2D):
            each.set_color(_lighten(each.get_color()))
            each.set_markeredgecolor(_lighten(each.get_markeredgecolor()))
            each.set_markerfacecolor(_lighten(each.get_markerfacecolor()))
        elif isinstance(each, LineCollection):
            each.set_color([_lighten(color) for color in each.get_colors()])
        elif isinstance(each, (Spine, Patch)) and each not in backgrounds:
            each.set_edgecolor(_lighten(each.get_edgecolor()))
            each.set_facecolor(_lighten(each.get_facecolor()))


def _lighten(color: Any) -> Any:
    """Return a light colour for black or dark grey, and any other colour unchanged."""
    if isinstance(color, str) and color in ("none", "auto"):
        return color
    *rgb, alpha = colors.to_rgba(color)
    return colors.to_rgba(DARK_TEXT, alpha) if max(rgb) < 0.3 else color
