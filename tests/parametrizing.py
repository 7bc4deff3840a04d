"""Parametrize slow tests without running all combinations of values.

Each pair of values of two parameters is tested, but not every combination of all parameters.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
import torch

from lrpe_md.reference import ACTIVATIONS

__all__ = ["ACTS", "COMPILERS", "TORCH_VERSION", "each_value_rows", "parametrize_each", "slow_except"]

TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]  # inductor takes seconds to compile C++
ACTS = [(name, dim) for name, entry in ACTIVATIONS.items() for dim in entry.dims or (None,)]


def parametrize_each(
    names: str, first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any], fixtures: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` for the rows of :func:`each_value_rows`.

    ``fixtures`` names the parameters that are fixtures.
    """
    return pytest.mark.parametrize(
        names.split(), each_value_rows(first, second, *others), ids=str, indirect=list(fixtures)
    )


def each_value_rows(first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows that combine each value of ``first`` with values of all other parameters.

    Each value of ``first`` appears with all values of each other parameter, in as many rows as the longest of them has
    values. The combinations of the other parameters differ from one value of ``first`` to the next.
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


def slow_except(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters in which all values are marked slow, except for those in ``quick``."""
    values = list(values)
    assert all(value in values for value in quick), "a quick value is not among the values"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
