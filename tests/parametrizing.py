"""Parametrize slow tests.

Each value appears with each value of every other parameter, but not in every combination.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from lrpe_md.reference import ACTIVATIONS

__all__ = ["ACTS", "each_value_rows", "parametrize_each"]

ACTS = [(name, dim) for name, entry in ACTIVATIONS.items() for dim in entry.dims or (None,)]


def parametrize_each(
    names: str, first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any], fixtures: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` with the rows of :func:`each_value_rows`.

    fixtures: names of the parameters that are fixtures.
    """
    return pytest.mark.parametrize(
        names.split(), each_value_rows(first, second, *others), ids=str, indirect=list(fixtures)
    )


def each_value_rows(first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combine each value of ``first`` with one value of each other parameter.

    Each value of ``first`` appears as often as the longest other parameter has values, and together with each value of
    every other parameter. The combinations of the other parameters change from one value to the next.
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
