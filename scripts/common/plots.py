"""Shared plot settings: backend, style, colours and markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["OKABE_ITO", "SERIES", "STYLE", "choose_looks", "plt", "split_series"]

STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
# A palette that colour-blind readers can distinguish, plus a grey
# (Okabe and Ito 2008, "Color universal design").
OKABE_ITO = {
    "black": "#000000", "orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "blue": "#0072B2",
    "vermilion": "#D55E00", "purple": "#CC79A7", "grey": "#7f7f7f",
}  # fmt: skip
LOOKS = dict(zip(OKABE_ITO.values(), "o^Dv*XPs", strict=True))  # a marker for each colour
KNOWN = {"none": "black", "rotate": "orange", "sincos": "sky", "learned": "grey"}
SERIES = 8  # most series that a reader can distinguish in one plot


def split_series(names: Sequence[str], reference: str = "rotate") -> list[list[str]]:
    """Split more than :data:`SERIES` encodings over two plots: one for the cosine map, and one for the others.

    The reference is in both plots.

    Raises:
        ValueError: more than :data:`SERIES` names belong in one plot.
    """
    if len(names) <= SERIES:
        return [list(names)]
    cosine = [name for name in names if name == reference or name.startswith("cosine")]
    groups = [[name for name in names if not name.startswith("cosine")], cosine]
    if any(len(group) > SERIES for group in groups):
        raise ValueError(f"names: expected at most {SERIES} names in one plot, got {', '.join(max(groups, key=len))}")
    return groups


def choose_looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and marker for each name; well-known encodings look the same in every plot."""
    known = {name: OKABE_ITO[KNOWN[name]] for name in names if name in KNOWN}
    free = [colour for colour in OKABE_ITO.values() if colour not in known.values()]
    chosen = known | dict(zip((name for name in names if name not in known), free, strict=False))
    return {name: {"color": chosen[name], "marker": LOOKS[chosen[name]]} for name in names}
