"""Pytest plugin that adapts diffusers and transformers models as soon as they are constructed.

    python -m pytest -p lrpe_md.scripts.host_plugin --outcomes FILE [--adapt] TESTS

The plugin writes one line of JSON when a test ends, so earlier outcomes survive a crash. Before each test, it
seeds the random number generators in the same way with and without ``--adapt``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import random
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrpe_md import adapt_rotary

BASES = {  # each library's base class of models, and its constructors in addition to __init__
    "diffusers.models.modeling_utils.ModelMixin": ("from_pretrained",),
    "transformers.modeling_utils.PreTrainedModel": ("from_pretrained", "_from_config"),
}
RANK = ("passed", "skipped", "failed")


class ModelAdapter:
    """Adapt each model when its outermost constructor returns, with submodules built and weights loaded."""

    def __init__(self) -> None:
        self.depth = 0
        self.adapted = 0
        self.refused: dict[str, str] = {}

    def adapt(self, model: torch.nn.Module) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings are about submodules that adapt_rotary leaves unchanged
                adapt_rotary(model)
            self.adapted += 1
        except (TypeError, ValueError) as error:
            self.refused.setdefault(type(model).__name__, str(error))

    def wrap(self, function: Callable[..., Any], returns: bool) -> Callable[..., Any]:
        """Wrap a constructor so that it adapts its model.

        The model is the constructor's first argument. With ``returns``, the model is the return value or its first
        item.
        """

        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                made = function(*args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                model = (made[0] if isinstance(made, tuple) else made) if returns else args[0]
                self.adapt(model)
            return made

        return make

    def wrap_class(self, cls: Any) -> None:
        cls.__init__ = self.wrap(cls.__init__, returns=False)  # may be inherited from a non-model class

    def wrap_base(self, base: Any, makers: tuple[str, ...]) -> None:
        """Wrap a base class and all of its existing and future subclasses."""
        for name in makers:
            setattr(base, name, classmethod(self.wrap(vars(base)[name].__func__, returns=True)))
        known = [base]
        while known:
            cls = known.pop()
            known += cls.__subclasses__()
            self.wrap_class(cls)
        own: Any = vars(base).get("__init_subclass__")

        def init_subclass(cls: Any, **kwargs: Any) -> None:
            if own is None:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                own.__func__(cls, **kwargs)
            self.wrap_class(cls)

        base.__init_subclass__ = classmethod(init_subclass)


def read_versions() -> dict[str, str]:
    """Return the versions of the imported libraries, which may come from PYTHONPATH."""
    libraries = {path.partition(".")[0] for path in BASES}
    return {name: sys.modules[name].__version__ for name in sorted(libraries & sys.modules.keys())}


class OutcomeRecorder:
    """Record the outcome of each test, the models that were adapted, and the versions of the libraries."""

    def __init__(self, file: Path, maker: ModelAdapter) -> None:
        self.file, self.maker = file, maker
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seed = zlib.crc32(item.name.encode())
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.maker.adapted, self.maker.refused = 0, {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is pytest.TestReport:  # skip subtest reports
            outcomes = (self.outcomes.get(report.nodeid, "passed"), report.outcome)
            self.outcomes[report.nodeid] = max(outcomes, key=RANK.index)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        line = {
            "test": nodeid, "outcome": self.outcomes.get(nodeid, "failed"), "adapted": self.maker.adapted,
            "refused": self.maker.refused, "versions": read_versions(),
        }  # fmt: skip
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="JSON Lines file to append the outcomes to")
    parser.addoption("--adapt", action="store_true", help="Adapt every model after construction.")


def pytest_configure(config: pytest.Config) -> None:
    maker = ModelAdapter()
    for path, makers in BASES.items() if config.getoption("--adapt") else ():
        module, _, name = path.rpartition(".")
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            maker.wrap_base(getattr(importlib.import_module(module), name), makers)
    file: Any = config.getoption("--outcomes")
    if file is not None:
        config.pluginmanager.register(OutcomeRecorder(file, maker))
