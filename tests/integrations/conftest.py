"""Fixtures of the adapters' tests."""

import threading

import pytest


@pytest.fixture
def record_calls(monkeypatch):
    """Return a function that makes modules record their calls of a function.

    It returns the list to which each call adds ``describe(*args, **kwargs)``. Probes, which run in other threads, are
    not recorded.
    """

    def record(function, *modules, describe):
        found = []

        def recorded(*args, **kwargs):
            if threading.current_thread() is threading.main_thread():
                found.append(describe(*args, **kwargs))
            return function(*args, **kwargs)

        for module in modules:
            monkeypatch.setattr(module, function.__name__, recorded)
        return found

    return record
