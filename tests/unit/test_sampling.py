"""Selection of the cases that `make test` runs (tests/conftest.py and tests/parametrizing.py)."""

from itertools import product
from types import SimpleNamespace

import pytest
from conftest import mark_combinations_slow
from parametrizing import slow_except


class Item(SimpleNamespace):
    """One case of a test."""

    path, cls, originalname = "test_file.py", None, "test"

    def __init__(self, params, *markers):
        super().__init__(callspec=SimpleNamespace(params=params), markers={"sampled", *markers})

    def get_closest_marker(self, name):
        return name if name in self.markers else None

    def add_marker(self, marker):
        self.markers.add(marker.name)


def test_sampled_cases_cover_each_value():
    first, second = ["a", "b", "c"], [{"x": 1}, {"x": 2}, {}, None]
    items = [Item({"first": i, "second": j}) for i, j in product(first, second)]
    mark_combinations_slow(items)
    quick = [item.callspec.params for item in items if "slow" not in item.markers]
    assert len(quick) == 4
    assert all(value in [params["first"] for params in quick] for value in first)
    assert all(value in [params["second"] for params in quick] for value in second)


def test_cases_for_a_gpu_cover_nothing():
    items = [Item({"x": 1, "device": "cuda"}, "gpu"), Item({"x": 1, "device": "cpu"}), Item({"x": 1}, "slow")]
    mark_combinations_slow(items)
    assert ["slow" in item.markers for item in items] == [False, False, True]


def test_all_but_the_quick_values_are_slow():
    a, b, c = slow_except(["b"], "abc")
    assert b == "b"
    assert [(p.values, [mark.name for mark in p.marks]) for p in (a, c)] == [(("a",), ["slow"]), (("c",), ["slow"])]
    with pytest.raises(AssertionError, match="a quick value"):
        slow_except(["d"], "abc")
