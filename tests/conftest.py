"""Fixtures and options of the tests. ``pytest`` runs kernels in Triton's interpreter, and ``pytest -m gpu`` runs them
on a GPU.

A process can only do one of the two.
"""

import gc
import math
import os
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

# Files that `make test` leaves out: compilers for GPUs, several processes, environments, browsers, complete training
# runs.
SLOW = {
    "test_ablate.py", "test_ablate_driver.py", "test_aot.py", "test_benchmark_compiled.py",
    "test_benchmark_training.py", "test_examples.py", "test_generative_processes.py", "test_host_tests.py",
    "test_sharded_models.py", "test_sharding.py", "test_site.py", "test_sweep.py", "test_train_processes.py",
    "test_wheel.py",
}  # fmt: skip
last_file = None


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests, and select the interpreter before triton is imported.

    The process that starts xdist's workers runs no tests. It doesn't import torch, so workers start earlier.
    """
    if config.getoption("dist", "no") != "no" and not config.option.collectonly:
        return
    import torch
    from hypothesis import HealthCheck, settings

    settings.register_profile("slow machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("slow machines")
    torch.set_num_threads(1)  # tensors are too small for several threads
    gc.set_threshold(50_000, 20, 100)  # collecting and tracing allocate millions of objects, few of which are garbage
    if not (torch.cuda.is_available() and config.getoption("markexpr") == "gpu"):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import files if all of their tests would be deselected."""
    chosen = config.getoption("markexpr")
    is_slow = chosen in ("not slow", "not slow and not gpu") and collection_path.name in SLOW
    is_for_gpu = chosen.endswith("slow and not gpu") and "gpu" in collection_path.stem.split("_")
    return True if is_slow or is_for_gpu else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)
    mark_combinations_slow(items)
    # start with the longest tests, so that no process runs them last
    items.sort(key=lambda item: item.path.name != "test_aot.py")
    if "TRITON_INTERPRET" not in os.environ:
        return
    reason = "runs with pytest -m gpu" if torch.cuda.is_available() else "needs a GPU"
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def mark_combinations_slow(items: list[pytest.Item]) -> None:
    """Mark cases of tests with ``sampled`` as slow, except for a few that cover each value of each parameter."""
    tests = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("sampled") or any(map(item.get_closest_marker, ("slow", "gpu"))):
            continue
        if hasattr(item, "callspec"):
            # compare by text, since not all values are hashable
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            tests[item.path, item.cls, item.originalname].append((item, values))
    for cases in tests.values():
        missing = set().union(*(values for _, values in cases))
        while missing:
            best = max(cases, key=lambda case: len(case[1] & missing))
            cases.remove(best)
            missing -= best[1]
        for item, _ in cases:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Freeze objects before each file, so that garbage collection does not traverse imports and caches every time."""
    global last_file
    if item.path != last_file:
        last_file = item.path
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise Triton's bindings report a leak at exit


@pytest.fixture(scope="session", autouse=True)
def isolated_cache(tmp_path_factory):
    """Use a temporary cache folder instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    with pytest.MonkeyPatch.context() as patch:
        if "TRITON_INTERPRET" in os.environ:
            from interpreting import quicken

            quicken(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_meta_models():
    """Leave out timm's initialisation of weights on the meta device, which takes most of the time of building a model.

    Training programs build models there to check their options.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "timm" in sys.modules:
            from timm.layers import weight_init

            fill = weight_init._trunc_normal_
            patch.setattr(weight_init, "_trunc_normal_", lambda t, *args: t if t.is_meta else fill(t, *args))
        yield


@pytest.fixture
def nan_filled():
    """Make torch.empty return NaN, to reveal memory that a kernel did not write."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def count_launches():
    """Return a function that lists the launches prepared since the test began."""
    from lrpe_md.engine.core import operator

    operator.call_cache.clear()
    known = operator.call_cache.values
    return lambda: [launch for call in known() for key, launch in call.launches.items() if key != "forward"]


@pytest.fixture
def unplaced(monkeypatch):
    """Draw figures without placing their panels, which takes most of the time. Titles are not broken into lines."""
    pytest.importorskip("matplotlib")
    from lrpe_md.picture import figure

    def fit_texts(figure, blocks, *texts, **options):
        for panel in {panel for block in blocks for row in block.rows for panel in row if panel}:
            panel.fit_text(math.inf)

    monkeypatch.setattr(figure, "lay_out_panels", fit_texts)


@pytest.fixture
def few_sizes(monkeypatch):
    """Test the models of ``train digits`` at two image sizes instead of six."""
    from lrpe_md.scripts.train.tasks import digits

    source = digits.SOURCES["digits"]
    monkeypatch.setitem(digits.SOURCES, "digits", replace(source, sizes=source.sizes[:2]))


@pytest.fixture
def record_calls(monkeypatch):
    """Return a function that makes modules record their calls to another function.

    It returns a list to which each call appends ``describe(*args, **kwargs)``. Calls in other threads, such as those of
    probes, are not recorded.
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
