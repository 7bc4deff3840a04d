"""Interface between tasks and the training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from accelerate import PartialState
from rich.console import Console
from torch import Tensor, nn

from lrpe_md.checks import plural

from ..common.folder import claim
from .config import Training, list_model_options, settings_of
from .loop import Trainer, begin
from .order import Steps
from .outcome import timed, write_result
from .weights import export_weights, start_from


@dataclass(frozen=True)
class Work:
    """Model, data and functions that a task passes to the training loop.

    Args:
        model: model on any device.
        settings: settings, other than options, that affect the weights, such as model arguments and a hash of the data.
        test_digest: hash of the test data, if ``settings["digest"]`` only covers the training data.
        steps, batch, loss: see :meth:`.loop.Trainer.fit`.
        evaluate: function that all processes call to evaluate the trained model, and that returns entries for
            result.json.
        validate: function that is called during training, and returns values for a row of the history.
        after_step: function to call after each step, for example to draw samples; see :meth:`.loop.Trainer.fit`.
        in_processes: whether workers are processes; see :meth:`.loop.Trainer.fit`.
    """

    model: nn.Module
    settings: dict[str, Any]
    steps: Steps
    batch: Callable[[np.ndarray, np.ndarray], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[Trainer], dict[str, Any]]
    validate: Callable[[Trainer], dict[str, float]] | None = None
    after_step: Callable[[Trainer], bool] | None = None
    in_processes: bool = False
    test_digest: int | None = None

    @property
    def data_digest(self) -> str | None:
        """Hash of the training and test data, or None for generated or built-in data."""
        digest = self.settings.get("digest")
        return None if digest is None else f"{digest}" + ("" if self.test_digest is None else f"-{self.test_digest}")


def report(*texts: str) -> None:
    """In the first process, print the non-empty messages to stderr."""
    if PartialState().is_main_process:
        for text in filter(None, texts):
            typer.echo(text, err=True)


def train(
    prepare: Callable[[Any, torch.device], Work], config: Training, check: Callable[[Work], None] | None = None
) -> dict[str, Any]:
    """Run or resume training and evaluation, and return the content of result.json.

    ``check`` is called after the data is read, and can raise an error before training.
    """
    accelerator = begin(config)
    console = Console(stderr=True, quiet=not (accelerator.is_main_process and config.progress), highlight=False)
    console.print("Reading the data, building the model")
    work = prepare(config, accelerator.device)
    if check is not None:
        check(work)
    settings = settings_of(config, **work.settings)
    if config.weights:
        options = list_model_options(config)
        settings["weights"] = start_from(work.model, Path(config.weights), settings, options)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(claim(config.out))
        trainer = Trainer(config, accelerator, work.model, settings)
        stack.callback(trainer.end_turn)
        if trainer.is_finished:
            report(f"{config.out}: already finished at step {trainer.step}; evaluating it again, without training")
        elif not config.seconds and config.warmup_steps != config.warmup:
            report(
                f"--warmup {config.warmup} reduced to {config.warmup_steps}, a tenth of the "
                f"{plural(config.steps, 'step')}"
            )
        validate = None if work.validate is None else partial(work.validate, trainer)
        after_step = None if work.after_step is None else partial(work.after_step, trainer)
        options = {"validate": validate, "after_step": after_step, "in_processes": work.in_processes}
        common = timed(trainer, lambda: trainer.fit(work.steps, work.batch, work.loss, **options))
        console.print("Evaluating")
        trainer.averaged.eval()
        result = {**work.evaluate(trainer), **common}
        export_weights(trainer)
        write_result(trainer, result)
    return result
