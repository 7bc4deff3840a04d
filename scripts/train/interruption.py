"""Handle Ctrl-C and SIGTERM: finish the step, save a checkpoint, and tell the user how to resume."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import typer
from accelerate import PartialState

EVERY = 4  # number of steps between checks for signals in other processes


class Interrupted(KeyboardInterrupt):
    """Raised after saving a checkpoint if a training run was asked to stop.

    Args:
        message: text for the user.
        number: signal number.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)  # pickling passes both again
        self.message, self.number = message, number

    def __str__(self) -> str:
        return self.message


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Raise :class:`Interrupted` on SIGTERM, so that the process stops its workers, as after Ctrl-C."""

    def receive(number: int, frame: FrameType | None) -> None:
        raise Interrupted("Interrupted", number)

    with _handle_signals(receive, signal.SIGTERM):
        yield


@contextmanager
def _handle_signals(receive: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals with a function. Only the main thread can set handlers; other threads change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interruption:
    """Handler for signals that ask a run to stop. All processes stop after the same step."""

    def __init__(self) -> None:
        self.number = 0
        self.group: Any = None

    @contextmanager
    def watch(self) -> Iterator[Interruption]:
        """Catch SIGINT and SIGTERM. A second SIGINT stops the process immediately."""
        self.number = 0
        if PartialState().num_processes > 1:  # exchange signals through the hosts, so that no device waits
            self.group = torch.distributed.new_group(backend="gloo")
        with _handle_signals(self._receive, signal.SIGINT, signal.SIGTERM):
            yield self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if PartialState().is_main_process:
            typer.echo("\nInterrupted: finishing the step and saving; press Ctrl-C again to stop at once.", err=True)

    def find(self, step: int) -> int:
        """Return a signal that any process received, or 0. All processes must call this method at every step."""
        if self.group is None:
            return self.number
        if step % EVERY:
            return 0
        number = torch.tensor(self.number)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(number)
