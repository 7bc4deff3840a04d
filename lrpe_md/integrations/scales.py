"""Frequencies that a library's code makes at each call, scaled from one call to the next (run_time.py)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .tables import Heads, Table, join_series, read_series, scale

__all__ = ["Scales"]

numbers = itertools.count()


class Scales:
    """Of a rotary module, or of what else makes tables: the frequencies that it had last, and what they are scaled by.

    Its tensors are made once and changed in place: what is compiled reads them, and is not compiled again.
    """

    def __init__(self) -> None:
        self.number = next(numbers)
        self.last: list[list[tuple[Tensor, int]]] = []  # of each table
        self.ratio: Tensor | None = None  # (C, K)
        self.gain: Tensor | None = None  # (C,)

    def __call__(self, made: Any) -> Any:
        """What was made, with the tables in it scaled."""
        if not torch.compiler.is_compiling():
            self.last = []
        return self._scaled(made)

    def _scaled(self, made: Any) -> Any:
        if isinstance(made, Table):
            return self._scaled_table(made)
        if isinstance(made, Heads):
            return Heads(self._scaled_table(made.table), made.num, made.order)
        if isinstance(made, (tuple, list)) and not hasattr(made, "_fields"):
            return type(made)([self._scaled(each) for each in made])
        if isinstance(made, dict):
            return {name: self._scaled(each) for name, each in made.items()}
        return made

    def _scaled_table(self, table: Table) -> Table:
        series = read_series(table)
        if series is None:
            return table
        if not torch.compiler.is_compiling():
            self.last.append(series)
        if self.ratio is None or self.gain is None:
            return table
        pairs, axes = sum(len(omega) for omega, _ in series), sum(axes for _, axes in series)
        if (pairs, axes) != self.ratio.shape:
            raise ValueError(
                f"scaling: expected {tuple(self.ratio.shape)} pairs and axes, as before, got {(pairs, axes)}: call "
                "set_scaling again"
            )
        return scale(table, self.ratio, self.gain, ("scaled", self.number))

    # --- as run_time.py has it of all encodings

    @property
    def num_axes(self) -> int:
        return self.trained().shape[2]

    def check(self, path: str) -> None:
        """
        Raises:
            ValueError: no frequencies were made yet, or different ones.
        """
        if not self.last:
            raise ValueError(
                f"{path}: expected a model that was called once since adapt_rotary, got one that was not: it makes its "
                "frequencies when it is called"
            )
        first, *others = map(join_series, self.last)
        if self.ratio is None or self.ratio.shape != first.shape:
            vars(self).pop("_channels_of_axes", None)
            if any(other.shape != first.shape or not torch.equal(other, first) for other in others):
                raise ValueError(f"{path}: expected the same frequencies in all of its tables, got several")

    def trained(self) -> Tensor:
        """Frequencies (1, C, K) as they are made."""
        return join_series(self.last[0])[None].double()

    def adjusted(self, ratio: Tensor | None = None, amplitude: Any = None) -> list[tuple[Tensor, Tensor]]:
        """Tensors, and the values that they are to hold."""
        trained = self.trained()[0]
        if self.ratio is None or self.gain is None or self.ratio.shape != trained.shape:
            with torch.inference_mode(False), torch.no_grad():
                self.ratio, self.gain = torch.ones_like(trained), torch.ones_like(trained[:, 0])
        ratio = torch.ones_like(self.ratio) if ratio is None else ratio[0]
        gain = torch.ones_like(self.gain) * (1.0 if amplitude is None else amplitude[0])
        return [(self.ratio, ratio), (self.gain, gain)]
