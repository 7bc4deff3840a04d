"""``pytest`` runs the kernels in Triton's interpreter, ``pytest -m gpu`` on a GPU; a process can do one of the two."""

import gc
import os

import pytest
import torch

last_file = None
torch.set_num_threads(1)  # tensors are tiny


def pytest_configure(config: pytest.Config) -> None:
    """The interpreter must be chosen before triton is imported."""
    if not (torch.cuda.is_available() and config.getoption("markexpr") == "gpu"):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_aot.py")  # the longest first: one process would end with them
    if "TRITON_INTERPRET" not in os.environ:
        return
    reason = "runs with pytest -m gpu" if torch.cuda.is_available() else "needs a GPU"
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Between files, and before the first: a collection would walk again and again over all that imports and caches of
    compilers have left."""
    global last_file
    if item.path != last_file:
        last_file = item.path
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else Triton's bindings report a leak at exit


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Not the user's."""
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


@pytest.fixture
def nan_filled():
    """torch.empty returns NaN: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def known_launches():
    """The launches that were prepared since the test began: a function."""
    from lrpe_md.engine import call

    call.remembered.clear()
    return lambda: [launch for known in call.remembered.values() for launch in known.launches.values()]
