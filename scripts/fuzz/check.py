"""The judge: how far a result may be from the formula, and whether one is.

The formula is run again :data:`SAMPLES` times with each of its steps off by a random relative error, of the size that
the library's arithmetic has (:class:`~.formula.Rounding`). How far an element then moves is what rounding can do to it:
where terms cancel much, where a denominator is far from 0 little. An element may be off by :data:`LARGEST` times the
standard deviation of that, taken of the element and of its row, plus one unit in the last place of what is stored; all
elements of a result by :data:`MEAN` times in the root mean square. A wrong token, sign or index is off by the size of
the values, thousands of times as much in float32; memory that nobody wrote is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configs import Config, LinearConfig
from .formula import Rounding
from .run import Inputs, Named, make_inputs, run_formula, run_library

SAMPLES = 6
LARGEST = 16.0
MEAN = 4.0


class Mismatch(NamedTuple):
    """A result beyond its bounds."""

    name: str
    place: tuple[int, ...]  # of the element that is off most
    actual: float
    expected: float
    times: float  # what rounding can do
    mean: float

    def __str__(self) -> str:
        return (
            f"{self.name}{list(self.place)} is {self.actual:g}, expected {self.expected:g}: {self.times:.3g} times "
            f"what rounding explains (RMS of all elements {self.mean:.3g})"
        )


class Verdict(NamedTuple):
    mismatches: list[Mismatch]
    largest: float = 0.0  # error of an element, in units of what rounding can do
    mean: float = 0.0


@contextmanager
def nan_filled() -> Iterator[None]:
    """torch.empty and its like return NaN: what no kernel writes shows, in results and in scratch memory."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def levels(c: Config, tensors: Named, impl: str) -> Rounding:
    """How exact the library promises to be: the largest error of a step, taken for the standard deviation."""
    own = torch.finfo(getattr(torch, c.dtype)).eps / 2
    arithmetic = min(own, torch.finfo(torch.float32).eps / 2)
    products = isinstance(c, LinearConfig) and impl == "triton" and c.dtype in ("bfloat16", "float16")
    stored = {name: torch.finfo(x.dtype).eps / 2 for name, x in tensors.items() if x.is_floating_point()}
    return Rounding(arithmetic, torch.finfo(torch.bfloat16).eps / 2 if products else arithmetic, own, stored)


def check(c: Config, impl: str = "triton", device: Any = "cpu") -> Verdict:
    """Compare outputs and gradients of one configuration with the formula's."""
    torch.manual_seed(c.seed)  # of the random errors
    inputs = make_inputs(c, device)
    rounding = levels(c, inputs.tensors, impl)
    unsure: dict[str, Tensor] = {}
    if isinstance(c, LinearConfig):
        unsure["o"] = find_unsure_rows(c, inputs, rounding)
        if "o" in inputs.grads and unsure["o"].any():
            inputs.grads["o"] = torch.where(unsure["o"], 0, inputs.grads["o"])
    exact = run_formula(c, inputs)
    total = {name: torch.zeros_like(x) for name, x in exact.items()}
    for _ in range(SAMPLES):
        for name, x in run_formula(c, inputs, rounding).items():
            total[name] += (x - exact[name]).square() / SAMPLES
    with nan_filled():
        if c.again:
            run_library(c, make_inputs(replace(c, seed=c.seed + 1), device), impl)
        actual = run_library(c, inputs, impl)  # last: outputs that are given it writes
    found = [judge(name, y, exact[name], total[name], unsure.get(name)) for name, y in actual.items()]
    bad = [m for m in found if not (m.times <= LARGEST and m.mean <= MEAN)]  # NaN is
    return Verdict(bad, max((m.times for m in found), default=0.0), max((m.mean for m in found), default=0.0))


def find_unsure_rows(c: LinearConfig, inputs: Inputs, rounding: Rounding) -> Tensor:
    """(B, H, N, 1): rows whose denominator may be anything, or on either side of a bound; neither judged nor learned
    from."""
    no_grads = inputs._replace(grads={})
    exact = run_formula(c, no_grads)
    unsure = torch.zeros_like(exact["o"][..., :1], dtype=torch.bool)
    if c.dtype == "float16":  # which gradients of such rows leave
        unsure = exact["o"].abs().amax(-1, keepdim=True) > 100
    if c.normalizer == "none":
        return unsure
    z = exact["z"]
    if c.normalizer == "unrotated":  # a sum of what is never negative, which rounding changes little
        return unsure | ((z > c.eps / 2) & (z < 2 * c.eps))
    for _ in range(SAMPLES):
        error = (run_formula(c, no_grads, rounding)["z"] - z).abs()
        for bound in (-c.eps, 0.0, c.eps):
            unsure = unsure | ((z - bound).abs() < 8 * error)
    return unsure


def judge(name: str, actual: Tensor, exact: Tensor, variance: Tensor, unsure: Tensor | None) -> Mismatch:
    assert actual.shape == exact.shape, (name, actual.shape, exact.shape)
    if not actual.numel():
        return Mismatch(name, (), 0.0, 0.0, 0.0, 0.0)
    limits = torch.finfo(actual.dtype)
    deviation = (variance + variance.mean(-1, keepdim=True) if exact.ndim else variance).sqrt()
    error = (actual.double() - exact).abs() - limits.eps * exact.abs()
    smallest = limits.smallest_normal if actual.dtype != torch.float16 else limits.smallest_normal * limits.eps
    times = error.clamp_min(0) / (deviation + smallest)
    skipped = exact.abs() + LARGEST * deviation > limits.max / 2
    times = torch.where(skipped if unsure is None else skipped | unsure, 0, times)
    worst = times.nan_to_num(torch.inf).flatten().argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, times.shape))
    actual, exact, largest = (t.flatten()[worst] for t in (actual, exact, times))
    return Mismatch(name, place, actual.item(), exact.item(), largest.item(), times.square().mean().sqrt().item())


def shrink(c: Config, impl: str, device: Any, attempts: int = 60) -> Config:
    """A smaller configuration that fails, too: fields are set to their defaults one by one, sizes made smaller."""

    def fails(candidate: Config) -> bool:
        try:
            return bool(check(candidate, impl, device).mismatches)
        except Exception:  # not a valid call, most often
            return False

    tried, progress = 0, True
    while progress and tried < attempts:
        progress = False
        for candidate in simpler(c):
            tried += 1
            if tried > attempts:
                break
            if fails(candidate):
                c, progress = candidate, True
                break
    return c


def simpler(c: Config) -> Iterator[Config]:
    for f in fields(c):
        value = getattr(c, f.name)
        if value == f.default or f.name in ("map", "seed", "places"):
            continue
        yield replace(c, **{f.name: f.default})
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            yield replace(c, **{f.name: value // 2})
    for i, place in enumerate(c.places):
        if place is None:
            continue
        for f in fields(place):
            value = getattr(place, f.name)
            smaller = [f.default] if value != f.default else []
            if f.name == "shape":
                smaller = [tuple(max(1, n // 2) for n in value), value[:1]]
            for each in smaller:
                if each != value:
                    yield replace(c, places=(*c.places[:i], replace(place, **{f.name: each}), *c.places[i + 1 :]))
