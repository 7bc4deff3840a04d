"""Plot settings for all programs, such as style, colours and markers, and copies of plots for dark pages."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import colors
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lrpe_md.picture.dark import darken
from lrpe_md.picture.figure import OKABE_ITO, SAVED, STYLE

matplotlib.rcParams.update(SAVED)

__all__ = [
    "OKABE_ITO", "SERIES", "STYLE", "WIDTH", "add_legend", "choose_colors", "choose_looks", "mix_with_white", "plt",
    "save", "set_title", "split_series",
]  # fmt: skip

WIDTH = 6.2  # inches: 9-point text is legible on a page and on a phone
MARKERS = dict(zip(OKABE_ITO, "o^Dv*XPsH", strict=True))
# The same encoding has the same colour in every plot. A variant has the colour of the longest known name that its name
# starts with, and its own line style and marker.
ENCODINGS = {
    "none": "black", "learned": "grey", "sincos": "purple", "rotate": "blue", "rotate-mixed": "sky", "cosine": "orange",
    "cosine-silu": "green", "cosine-softplus": "vermilion", "space-only": "yellow", "rotate + linear": "grey",
    "rotate + ntk": "sky", "rotate + yarn": "purple",
}  # fmt: skip
VARIANTS: dict[str, tuple[Any, str]] = {
    "learnable": (":", "d"), "phase": ("--", "p"), "fixed": ("-.", "h"), "linear": (":", "<"), "ntk": ("--", ">"),
    "yarn": ("-.", "d"),
}  # fmt: skip
OTHER_VARIANTS = [((0, (5, 1)), "x"), ((0, (1, 3)), "8"), ((0, (5, 5)), "+"), ((0, (3, 1, 1, 1)), "H"),
                  ((0, (8, 2)), "1"), ((0, (2, 2)), "2"), ((0, (1, 1)), "h"), ((0, (9, 1, 2, 1)), "3")]  # fmt: skip
PALE = ("grey", "yellow", "sky")  # used last for encodings without a colour of their own
# The same library also has the same colour in every plot.
LIBRARIES = {
    "lrpe-md": "blue", "flash-attn": "orange", "liger, in place": "green", "liger": "yellow", "xopes": "black",
    "timm": "vermilion", "torch.compile, tables": "purple", "torch.compile, angles": "sky", "copy": "grey",
}  # fmt: skip
LEGEND_WIDTH, HANDLE_WIDTH = 84, 7  # in characters
PANEL_WIDTH = 50  # number of characters in a small title above one of two panels in a row
SERIES = 6  # maximum number of series that a reader can distinguish in one plot


def split_series(names: Sequence[str], reference: str = "rotate") -> list[list[str]]:
    """Split more than :data:`SERIES` encodings into several plots. The cosine map gets separate plots.

    Every plot contains the reference. Variants of an encoding stay together if they fit into one plot.
    """
    if len(names) <= SERIES:
        return [list(names)]
    kept = {reference} & set(names)
    groups = []
    for cosine in (False, True):
        part = sorted(name for name in names if name not in kept and name.startswith("cosine") == cosine)
        plots = math.ceil(len(part) / (SERIES - len(kept)))
        groups += [{*kept, *part[len(part) * i // plots : len(part) * (i + 1) // plots]} for i in range(plots)]
    return [[name for name in names if name in group] for group in groups]


def set_title(axis: Any, title: str, names: Sequence[str], is_split: bool) -> None:
    """Set the title of a panel. If series are split into several panels, the title also lists the panel's series."""
    listed = textwrap.fill(", ".join(names), PANEL_WIDTH, break_on_hyphens=False)
    axis.set_title(f"{title}\n{listed}".strip() if is_split else title, **({"fontsize": 7} if is_split else {}))


def choose_looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a colour, marker and line style for each encoding, for use in all plots.

    Unknown encodings get the colours of known encodings that are not in ``names``, with pale colours last. Encodings
    that only differ in their options get shades of the same colour.
    """
    bases = {name: _base(name) for name in names}
    used = {ENCODINGS[base] for base in bases.values() if base is not None}
    unused = sorted(OKABE_ITO.keys() - used, key=lambda color: (color in PALE, list(OKABE_ITO).index(color)))
    others = [name for name, base in bases.items() if base is None]
    looks, unknown = {}, iter(OTHER_VARIANTS * len(names))
    for name, base in bases.items():
        number = others.index(name) if base is None else 0
        color = (unused or list(OKABE_ITO))[number % len(unused or OKABE_ITO)] if base is None else ENCODINGS[base]
        rest = name.removeprefix(base or "").strip(" +-:")
        is_solid = base == name or (base is None and number < len(unused))
        line, marker = ("-", MARKERS[color]) if is_solid else VARIANTS.get(rest) or next(unknown)
        alike = [each for each in names if ":" in each and bases[each] == base]
        share = alike.index(name) / len(alike) if name in alike else 0.0
        looks[name] = {"color": mix_with_white(OKABE_ITO[color], 0.8 * share), "marker": marker, "linestyle": line}
    return looks


def mix_with_white(color: str, share: float) -> str:
    """Return the colour with the given share of white, from 0 (unchanged) to 1 (white)."""
    red, green, blue = (share + (1 - share) * part for part in colors.to_rgb(color))
    return colors.to_hex((red, green, blue))


def _base(name: str) -> str | None:
    """Return the longest known encoding that the name starts with."""
    starts = [known for known in ENCODINGS if name == known or name.startswith((f"{known}-", f"{known} ", f"{known}:"))]
    return max(starts, key=len, default=None)


def choose_colors(libraries: Sequence[str]) -> dict[str, str]:
    """Return a colour for each library. Unknown libraries get the unused colours, in order."""
    own = {name: next((c for known, c in LIBRARIES.items() if name.startswith(known)), None) for name in libraries}
    free = iter([color for color in OKABE_ITO if color not in own.values()])
    used: set[str] = set()
    chosen = {}
    for name, color in own.items():
        if color is None or color in used:
            color = next(free)
        used.add(color)
        chosen[name] = OKABE_ITO[color]
    return chosen


def add_legend(figure: Figure, columns: int = 3) -> None:
    """Add a legend for all axes below the figure. Use fewer columns if labels are long."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    longest = max(map(len, handles), default=1)
    columns = max(1, min(columns, LEGEND_WIDTH // (longest + HANDLE_WIDTH)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)


def save(figure: Figure, path: Path, dpi: int = 130, **options: Any) -> Path:
    """Save a figure and a copy named NAME-dark for pages with a dark background, and close the figure.

    Returns:
        the path of the copy.
    """
    figure.savefig(path, dpi=dpi, **options)
    darken(figure)
    copy = path.with_stem(f"{path.stem}-dark")
    figure.savefig(copy, dpi=dpi, **options)
    plt.close(figure)
    return copy
