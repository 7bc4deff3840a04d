"""Parameters of a test that takes time: each with each value of every other parameter, not with each combination."""

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["spread", "spread_rows"]


def spread(
    names: str, first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any], fixtures: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with :func:`spread_rows`. fixtures: those of the names that are fixtures."""
    return pytest.mark.parametrize(names.split(), spread_rows(first, second, *others), ids=str, indirect=list(fixtures))


def spread_rows(first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of a value of ``first`` and one of each other parameter.

    Each value of ``first`` comes as often as the longest of the others has values, together with each value of each of
    them; how the others come together changes from one to the next.
    """
    rows = []
    for i, value in enumerate(first):
        for j in range(max(map(len, (second, *others)))):
            row, shift = [value, second[j % len(second)]], i
            for other in others:
                row.append(other[(j + shift) % len(other)])
                shift //= len(other)
            rows.append(tuple(row))
    return rows
