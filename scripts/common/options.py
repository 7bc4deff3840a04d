"""The names that options take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import typer

from lrpe_md.checks import suggest

__all__ = ["LIMIT", "SEEDS", "choose", "finite", "positive"]

SEEDS = 2**32  # that NumPy takes, from 0 on


def positive(value: float | None) -> float | None:
    """Refuse what is no number above 0; infinity is one."""
    if value is not None and not value > 0:
        raise typer.BadParameter(f"expected a number above 0, got {value:g}")
    return value


LIMIT: Any = typer.Option(callback=positive, help="Seconds after which no measurement starts.")


def finite(value: float | None) -> float | None:
    """Refuse infinity and NaN, which a least and a most let through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def choose(option: str, wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the wanted names, each once; one that is not known is refused."""
    known, names = list(known), list(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option}: unknown {name!r}{suggest(name, known)}; known are: {'; '.join(known)}")
    return names
