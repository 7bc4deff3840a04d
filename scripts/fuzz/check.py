"""Decide whether rounding explains the difference between the library and the formula.

The check runs the formula :data:`SAMPLES` more times, with random relative errors in each step that are as large as the
library's rounding (:class:`~.formula.Rounding`). The changes in each element estimate the effect of rounding on that
element. The effect of rounding is only large where terms cancel. An element may differ by :data:`LARGEST` times the
standard deviation of these changes (taken from the element and its row), plus one unit in the last place. For the root
mean square over all elements, the factor is :data:`MEAN`. In float32, a wrong token, sign or index exceeds these bounds
by orders of magnitude. Memory that no kernel wrote is NaN.
"""

from __future__ import annotations

import time
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
LARGEST = 24.0
MEAN = 4.0


class Mismatch(NamedTuple):
    """Result whose error exceeds the bounds."""

    name: str
    place: tuple[int, ...]  # index of the worst element
    actual: float
    expected: float
    times: float  # the worst element's error relative to rounding
    mean: float  # root mean square of this ratio over all elements

    def __str__(self) -> str:
        return (
            f"{self.name}{list(self.place)} is {self.actual:g}, expected {self.expected:g}: {self.times:.3g} times the "
            f"error that rounding explains (RMS over all elements: {self.mean:.3g})"
        )


class Verdict(NamedTuple):
    """Mismatches found for one configuration, and the largest factors among all results."""

    mismatches: list[Mismatch]
    largest: float = 0.0
    mean: float = 0.0


@contextmanager
def nan_filled() -> Iterator[None]:
    """Make torch.empty and similar functions return NaN, to detect memory that is never written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def choose_rounding(c: Config, tensors: Named, impl: str) -> Rounding:
    """Return the largest rounding error of each kind of step, for use as the standard deviation of random errors."""
    own = torch.finfo(getattr(torch, c.dtype)).eps / 2
    arithmetic = min(own, torch.finfo(torch.float32).eps / 2)
    products = isinstance(c, LinearConfig) and impl == "triton" and c.dtype in ("bfloat16", "float16")
    parameters = {name: torch.finfo(x.dtype).eps / 2 for name, x in tensors.items() if x.is_floating_point()}
    return Rounding(arithmetic, torch.finfo(torch.bfloat16).eps / 2 if products else arithmetic, own, parameters)


def check(c: Config, impl: str = "triton", device: Any = "cpu") -> Verdict:
    """Compare the outputs and gradients of one configuration with those of the formula."""
    torch.manual_seed(c.seed)
    inputs = make_inputs(c, device)
    rounding = choose_rounding(c, inputs.tensors, impl)
    ambiguous: dict[str, Tensor] = {}
    if isinstance(c, LinearConfig):
        ambiguous["o"] = find_ambiguous_rows(c, inputs, rounding)
        if "o" in inputs.grads and ambiguous["o"].any():
            inputs.grads["o"] = torch.where(ambiguous["o"], 0, inputs.grads["o"])
    exact = run_formula(c, inputs)
    total = {name: torch.zeros_like(x) for name, x in exact.items()}
    for _ in range(SAMPLES):
        for name, x in run_formula(c, inputs, rounding).items():
            total[name] += (x - exact[name]).square() / SAMPLES
    with nan_filled():
        if c.is_repeated:
            run_library(c, make_inputs(replace(c, seed=c.seed + 1), device), impl)
        actual = run_library(c, inputs, impl)  # last, because this overwrites out=
    for name in actual.keys() & {"o", "q", "k", "v"}:
        assert actual[name].dtype == getattr(torch, c.dtype), (name, actual[name].dtype)
    results = [judge(name, y, exact[name], total[name], ambiguous.get(name)) for name, y in actual.items()]
    mismatches = [m for m in results if not (m.times <= LARGEST and m.mean <= MEAN)]  # also catches NaN
    return Verdict(mismatches, max((m.times for m in results), default=0), max((m.mean for m in results), default=0))


def find_ambiguous_rows(c: LinearConfig, inputs: Inputs, rounding: Rounding) -> Tensor:
    """Return a mask (B, H, N, 1) of the rows of o that can't be checked because rounding may move z across a bound."""
    no_grads = inputs._replace(grads={})
    exact = run_formula(c, no_grads)
    ambiguous = torch.zeros_like(exact["o"][..., :1], dtype=torch.bool)
    if c.dtype == "float16":  # gradients of such rows overflow float16
        ambiguous = exact["o"].abs().amax(-1, keepdim=True) > 100
    if c.normalizer == "none":
        return ambiguous
    z = exact["z"]
    if c.normalizer == "unrotated" and c.rule == "add":  # a sum of non-negative terms has a small relative error
        return ambiguous | ((z > c.eps / 2) & (z < 2 * c.eps))
    for _ in range(SAMPLES):
        error = (run_formula(c, no_grads, rounding)["z"] - z).abs()
        for bound in (-c.eps, 0.0, c.eps):
            ambiguous = ambiguous | ((z - bound).abs() < 8 * error)
    return ambiguous


def judge(name: str, actual: Tensor, exact: Tensor, variance: Tensor, ignored: Tensor | None) -> Mismatch:
    """Compare a result with the exact result. ``variance`` is the variance of each element under random errors."""
    assert actual.shape == exact.shape, (name, actual.shape, exact.shape)
    if not actual.numel():
        return Mismatch(name, (), 0.0, 0.0, 0.0, 0.0)
    limits = torch.finfo(actual.dtype)
    deviation = (variance + variance.mean(-1, keepdim=True) if exact.ndim else variance).sqrt()
    error = (actual.double() - exact).abs() - limits.eps * exact.abs()
    smallest = limits.smallest_normal if actual.dtype != torch.float16 else limits.smallest_normal * limits.eps
    times = error.clamp_min(0) / (deviation + smallest)
    overflow = exact.abs() + LARGEST * deviation > limits.max / 2
    times = torch.where(overflow if ignored is None else overflow | ignored, 0, times)
    worst = times.nan_to_num(torch.inf).flatten().argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, times.shape))
    actual, exact, largest = (t.flatten()[worst] for t in (actual, exact, times))
    return Mismatch(name, place, actual.item(), exact.item(), largest.item(), times.square().mean().sqrt().item())


def shrink(c: Config, impl: str, device: Any, seconds: float = 30.0) -> Config:
    """Return a simpler configuration that also fails, with more fields at their defaults and smaller sizes.

    The search stops after ``seconds``, because each candidate may have to be compiled.
    """
    end = time.monotonic() + seconds

    def fails(candidate: Config) -> bool:
        try:
            return bool(check(candidate, impl, device).mismatches)
        except Exception:  # usually an invalid call
            return False

    progress = True
    while progress:
        progress = False
        for candidate in simpler(c):
            if time.monotonic() > end:
                return c
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
