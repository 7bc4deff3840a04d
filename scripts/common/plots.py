"""What the plots share: the backend, the style, the colours."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["OKABE_ITO", "STYLE", "plt"]

STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
# Told apart with any colour vision (Okabe and Ito 2008, "Color universal design"), and a grey.
OKABE_ITO = {
    "black": "#000000", "orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "blue": "#0072B2",
    "vermilion": "#D55E00", "purple": "#CC79A7", "grey": "#7f7f7f",
}  # fmt: skip
