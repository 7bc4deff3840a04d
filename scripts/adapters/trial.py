"""Test ``adapt_rotary`` on a tiny random version of every rotary model in the installed libraries.

A model counts as adapted if its float32 outputs and gradients agree with those of the stock model, and its parameter
names are unchanged. After restoring, its outputs must be bitwise identical to those of the stock model.
"""

from __future__ import annotations

import csv
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from lrpe_md import adapt_rotary
from lrpe_md.integrations import restore_rotary
from lrpe_md.integrations.rotary import exchanged_names, models_of, parts

__all__ = [
    "LIBRARIES", "Candidate", "Result", "Row", "count", "differentiate", "distance", "find_tensors", "read",
    "try_library", "try_model", "write",
]  # fmt: skip

ROTARY = re.compile(r"[Rr]otary|RoPE")
UNKNOWN = "found no such function"
BOUND = 1e-5  # for outputs and gradients; relative to the largest value if that is above 1
LIBRARIES = ("timm", "diffusers", "transformers")
Outcome = Literal["adapted", "refused", "untried", "wrong", "none"]  # none: no rotary code


class Result(NamedTuple):
    """Outputs of a model, and gradients of a randomly weighted sum of the outputs."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Candidate:
    """Model to test.

    Args:
        name: name of the model type or class.
        build: function that returns a tiny random model in eval mode, or the model's pipeline if the pipeline computes
            the tables.
        call: function that runs the model forward and backward, with equal results for equal weights.
    """

    name: str
    build: Callable[[], Any]
    call: Callable[[Any], Result]


class Row(NamedTuple):
    """Row of the table. ``reason`` states why a model was refused or not tried, or which parts were not adapted."""

    library: str
    model: str
    outcome: Outcome
    reason: str


def find_tensors(given: Any) -> Iterator[Tensor]:
    """Yield all tensors in a model's output."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict):
        for value in given.values():
            yield from find_tensors(value)
    elif isinstance(given, (list, tuple)):
        for value in given:
            yield from find_tensors(value)


def differentiate(model: nn.Module, outputs: Sequence[Tensor]) -> Result:
    """Return the outputs, and the gradients of a randomly weighted sum of the outputs."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    floats = [y for y in outputs if y.is_floating_point() or y.is_complex()]
    total: Any = sum(
        (y.real * torch.randn(y.shape, generator=generator)).sum() / max(y.numel(), 1) ** 0.5
        for y in floats
        if y.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result([y.detach().clone() for y in floats], gradients)


def try_library(library: str) -> Iterator[Row]:
    """Yield a row for each rotary model of a library, or nothing if the library is not installed."""
    if find_spec(library) is None:
        return
    for candidate in import_module(f".trial_{library}", __package__).candidates():
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # stdout is for CSV rows only
            warnings.simplefilter("ignore")
            row = try_model(library, candidate)
        if row.outcome != "none":
            yield row


def try_model(library: str, candidate: Candidate) -> Row:
    """Adapt a model and compare it with the original, then restore it and compare again."""
    row = Row(library, candidate.name, "adapted", "")
    try:
        model = candidate.build()
    except Exception as error:
        return row._replace(outcome="untried", reason=_describe_untried(error))
    try:
        stock = candidate.call(model)
    except Exception as error:
        return _refuse_uncallable(row, model) or row._replace(outcome="untried", reason=_describe_untried(error))
    names = _names(model)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapt_rotary(model)
    except (TypeError, ValueError) as error:
        return _refuse(row, model, error)
    try:
        found = candidate.call(model)
    except Exception as error:
        return row._replace(outcome="wrong", reason=f"{type(error).__name__}: {_describe_error(error)}")
    same_names = _names(model) == names
    again = candidate.call(restore_rotary(model))
    is_restored = not any(exchanged_names(part) for part in parts(model).values())
    for worse, reason in (
        (distance(found, stock) > BOUND, f"differs by {distance(found, stock):.1e}"),
        (not same_names, "names of parameters changed"),
        (distance(again, stock) > 0 or not is_restored, "restored model differs"),
    ):
        if worse:
            return row._replace(outcome="wrong", reason=reason)
    left = [str(each.message).partition(": ")[2] for each in caught if str(each.message).startswith("adapt_rotary")]
    return row._replace(reason="; ".join(left))


def _names(model: Any) -> list[str]:
    """Return the names of all parameters and buffers."""
    return [name for own in models_of(model).values() for name in own.state_dict()]


def _describe_untried(error: Exception) -> str:
    return f"{type(error).__name__}: {_describe_error(error)}"[:160]


def _refuse_uncallable(row: Row, model: nn.Module) -> Row | None:
    """Return a "refused" row for a model that can't be called, or None if the model can be adapted."""
    try:
        adapt_rotary(model)
    except (TypeError, ValueError) as error:
        return _refuse(row, model, error)
    return None


def _refuse(row: Row, model: nn.Module, error: Exception) -> Row:
    """Return a "refused" row for a model, or a "none" row if the model has no rotary encoding."""
    reason = _describe_error(error)
    if reason == UNKNOWN and not _has_rotary(model):
        return row._replace(outcome="none")
    return row._replace(outcome="refused", reason=reason)


def _has_rotary(model: nn.Module) -> bool:
    """Return whether any name in the model's code contains "rotary" or "RoPE"."""
    own = [base for part in model.modules() for base in type(part).__mro__ if base.__module__.split(".")[0] != "torch"]
    methods = [
        inspect.unwrap(value)
        for base in set(own)
        for name, value in vars(base).items()
        if callable(value) and name != "_init_weights"  # this method initialises every class in a file
    ]
    codes = [code for method in methods if (code := getattr(method, "__code__", None)) is not None]
    names = [name for code in codes for name in (*code.co_names, *code.co_varnames)]
    return any(ROTARY.search(name) for name in (*names, *(base.__name__ for base in own)))


def distance(found: Result, stock: Result) -> float:
    """Return the largest difference in outputs or gradients, relative to the largest value if that exceeds 1."""
    if len(found.outputs) != len(stock.outputs) or found.gradients.keys() != stock.gradients.keys():
        return float("inf")
    names = list(stock.gradients)
    outputs = list(zip(found.outputs, stock.outputs, strict=True))
    gradients = [(found.gradients[name], stock.gradients[name]) for name in names]
    return max(_largest(outputs), _largest(gradients))


def _largest(pairs: list[tuple[Tensor, Tensor]]) -> float:
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    pairs = [(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs if b.numel()]
    if not pairs:
        return 0.0
    scale = max(1.0, *(float(b.abs().max()) for _, b in pairs))
    return max(float((a - b).abs().max()) for a, b in pairs) / scale


def _describe_error(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.partition("; ")[2].partition(". To add an encoding, ")[0] or text or type(error).__name__


# --- the table -------------------------------------------------------------------------------------------------------


def write(rows: Iterable[Any], file: TextIO = sys.stdout, kind: Any = Row) -> list[Any]:
    """Write each row to a CSV as soon as it is available, and return all rows."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(kind._fields)
    done: list[Any] = []
    for row in rows:
        writer.writerow(row)
        file.flush()
        done.append(row)
    return done


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [Row(**line) for line in csv.DictReader(file)]  # pyright: ignore[reportArgumentType]


def count(rows: Sequence[Row]) -> dict[str, int]:
    """Count the models by outcome."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.outcome] = found.get(row.outcome, 0) + 1
    return found
