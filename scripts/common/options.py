"""The names that options take."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def choose(option: str, wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """The wanted names, each once; one that is not known is refused."""
    known, names = list(known), list(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option}: unknown {name!r}; known are: {'; '.join(known)}")
    return names
