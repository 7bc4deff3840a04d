"""Learning rate schedules: timm's cosine, a constant rate, and warmup-stable-decay (WSD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch.optim import SGD, Optimizer

SCHEDULES = ("cosine", "constant", "wsd")


class StableScheduler(Scheduler):
    """Schedule with a linear warm-up, a constant rate, and a linear decay in the last steps.

    Args:
        optimizer: optimiser whose learning rate the schedule sets.
        warmup: number of warm-up steps.
        start: initial rate of the warm-up.
        decay: first and last step of the decay, or None for a constant rate.
        end: learning rate at the end of the decay.
    """

    def __init__(
        self, optimizer: Optimizer, *, warmup: int, start: float, decay: tuple[int, int] | None, end: float
    ) -> None:
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.warmup, self.start, self.decay, self.end = warmup, start, decay, end
        self.step_update(0)

    def _get_lr(self, t: int) -> list[float]:
        if t < self.warmup:
            return [self.start + (rate - self.start) * t / self.warmup for rate in self.base_values]
        if self.decay is None or t <= self.decay[0]:
            return list(self.base_values)
        share = min((t - self.decay[0]) / (self.decay[1] - self.decay[0]), 1.0)
        return [rate + (self.end - rate) * share for rate in self.base_values]


@dataclass(frozen=True)
class Schedule:
    """Settings of a learning rate schedule with a linear warm-up.

    Args:
        length: number of steps.
        warmup: number of warm-up steps.
        start: initial rate of the warm-up.
        end: final rate of cosine and wsd.
        warmup_prefix: whether the warm-up steps precede the ``length`` steps instead of being the first of them.
        offset: number of the first step.
        kind: one of :data:`SCHEDULES`.
        cooldown: fraction of the steps during which wsd decreases the rate.
    """

    length: int
    warmup: int
    start: float
    end: float = 0.0
    warmup_prefix: bool = False
    offset: int = 0
    kind: str = "cosine"
    cooldown: float = 0.2

    def build(self, optimizer: Optimizer) -> Scheduler:
        """Return a scheduler for an optimiser, set to the first step."""
        scheduler: Scheduler
        if self.kind == "cosine":
            scheduler = CosineLRScheduler(
                optimizer, t_initial=self.length, lr_min=self.end, warmup_t=self.warmup, warmup_lr_init=self.start,
                warmup_prefix=self.warmup_prefix, t_in_epochs=False,
            )  # fmt: skip
        else:
            last = self.length + self.warmup * self.warmup_prefix
            first = min(last - max(round(self.cooldown * last), 1), last - 1)
            decay = (first, last) if self.kind == "wsd" else None
            scheduler = StableScheduler(optimizer, warmup=self.warmup, start=self.start, decay=decay, end=self.end)
        if self.offset:
            scheduler.step_update(self.offset)
        return scheduler

    def list_rates(self, lr: float, steps: int) -> list[float]:
        """Return the learning rates of the first ``steps`` steps for a peak rate of ``lr``."""
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        scheduler, found = self.build(optimizer), []
        for step in range(steps):
            scheduler.step_update(step + self.offset)
            found.append(optimizer.param_groups[0]["lr"])
        return found
