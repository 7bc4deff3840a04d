"""Validation of option values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import typer

from lrpe_md.checks import suggest

__all__ = ["LIMIT", "SEEDS", "choose", "finite", "positive"]

SEEDS = 2**32  # NumPy's seeds are 0 to SEEDS - 1


def positive(value: float | None) -> float | None:
    """Refuse values that are not above 0; infinity is allowed."""
    if value is not None and not value > 0:
        raise typer.BadParameter(f"expected a number above 0, got {value:g}")
    return value


LIMIT: Any = typer.Option(callback=positive, help="Time budget in seconds; no measurement starts after it.")


def finite(value: float | None) -> float | None:
    """Refuse infinity and NaN, which typer's min and max let through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def choose(option: str, wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the wanted names without duplicates; refuse unknown ones."""
    known, names = list(known), list(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"{option}: unknown {name!r}{suggest(name, known)}; choose from: {'; '.join(known)}"
            )
    return names
