"""Modify adapted models (before or after adaptation) and the originals in the same way, and compare the results.

    lrpe-md adapters sweep > scripts/results/adapters/changes.csv

Each row describes one model. A column such as "low rank, after" contains the outcome of a modification after
adaptation, followed by a colon and details. The outcomes are:

- same: outputs are equal, and gradients are equal if the modification leaves them comparable
- different: outputs or gradients differ
- refused: adapting raises an error
- error: only the adapted model raises an error
- unstable: the original returns different results each time, so no comparison is possible
- inapplicable: the model contains nothing to modify, or the original raises an error
"""

from __future__ import annotations

import copy
import csv
import pickle
import re
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from lrpe_md import adapt_rotary
from lrpe_md.integrations.rotary import exchanged_names, models_of, parts

from .trial import BOUND, Candidate, Result, distance

__all__ = ["CHANGES", "Outcome", "read_outcomes", "sweep_library", "sweep_model", "write_outcomes"]

_TABLES = re.compile(r"rope|rotary|posembed|positionembedding", re.IGNORECASE)
_NORMS = re.compile(r"(^|[._])(norm_(added_)?[qk]|[qk]_(layer)?norm|query_norm|key_norm)$")
_TURNED = re.compile(r"(^|[._])(to_)?(qkv|query|key|[qk])(_proj)?$")
_WHOLE = re.compile(r"att(entio)?n|router|MLA$", re.IGNORECASE)
CPU = torch.device("cpu")


class Outcome(NamedTuple):
    """Outcome of one modification of a model."""

    library: str
    model: str
    change: str
    when: str
    outcome: str
    note: str


class Inapplicable(Exception):
    """Raised if a change applies to a part that the model does not have."""


# --- changes ---------------------------------------------------------------------------------------------------------


def _named(model: nn.Module, pattern: re.Pattern[str], by_class: bool = False) -> list[Any]:
    found = [
        part
        for name, part in model.named_modules()
        if pattern.search(type(part).__name__ if by_class else name) and not isinstance(part, nn.Identity)
    ]
    if not found:
        raise Inapplicable
    return found


def _makers(model: nn.Module) -> list[Any]:
    return _named(model, _TABLES, by_class=True)


def _map_tables(made: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a change to all floating-point and complex tensors in a module's output."""
    if isinstance(made, Tensor):
        return change(made) if made.is_floating_point() or made.is_complex() else made
    if isinstance(made, (tuple, list)) and not hasattr(made, "_fields"):
        return type(made)([_map_tables(each, change) for each in made])
    if isinstance(made, dict):
        return {name: _map_tables(each, change) for name, each in made.items()}
    return made


def hook_tables(model: nn.Module) -> None:
    for part in _makers(model):
        part.register_forward_hook(lambda module, args, made: _map_tables(made, lambda t: t * 0.5))


def hook_by_length(model: nn.Module) -> None:
    for part in _makers(model):
        part.register_forward_hook(lambda module, args, made: _map_tables(made, lambda t: t * (1 + t.numel() ** -0.5)))


def _buffers(model: nn.Module) -> list[tuple[Any, str, Tensor]]:
    found = [
        (part, name, t)
        for part in _makers(model)
        for name, t in part.named_buffers(recurse=False)
        if t.is_floating_point() or t.is_complex()
    ]
    if not found:
        raise Inapplicable
    return found


def scale_in_place(model: nn.Module) -> None:
    for _, _, t in _buffers(model):
        t.mul_(0.7)


def replace_frequencies(model: nn.Module) -> None:
    for part, name, t in _buffers(model):
        setattr(part, name, t * 0.7)


def learn_frequencies(model: nn.Module) -> None:
    found = [(part, name, t) for part, name, t in _buffers(model) if name == "inv_freq"]
    if not found:
        raise Inapplicable
    for part, name, t in found:
        delattr(part, name)
        part.register_parameter(name, nn.Parameter(t * 0.9))


def change_amplitude(model: nn.Module) -> None:
    found = [part for part in _makers(model) if isinstance(getattr(part, "attention_scaling", None), float)]
    if not found:
        raise Inapplicable
    for part in found:
        part.attention_scaling *= 0.5


def hook_norms(model: nn.Module) -> None:
    for norm in _named(model, _NORMS):
        norm.register_forward_hook(lambda module, args, y: 1.5 * y)


def patch_norms(model: nn.Module) -> None:
    for norm in _named(model, _NORMS):
        norm.forward = _Patched(norm)


class _Patched:
    """Replacement for the forward method of an instance. Unlike a closure, it can be copied and pickled."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        return 1.5 * type(self.norm).forward(self.norm, x)


class _LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, generator = base, torch.Generator().manual_seed(3)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) * 0.1)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def add_low_rank(model: nn.Module) -> None:
    paths = [p for p, m in model.named_modules() if _TURNED.search(p) and type(m) is nn.Linear]
    if not paths:
        raise Inapplicable
    for path in paths:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, _LowRank(model.get_submodule(path)))  # pyright: ignore


def quantise(model: nn.Module) -> None:
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


def offload_to_cpu(model: nn.Module) -> None:
    import accelerate

    accelerate.cpu_offload(model, execution_device=CPU)


def offload_to_disk(model: nn.Module) -> None:
    import accelerate

    folder = tempfile.mkdtemp(prefix="sweep-")
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    accelerate.disk_offload(model, folder, execution_device=CPU)


def offload_in_parts(model: nn.Module) -> None:
    """Offload weights to the CPU, and load all weights of an attention or router module together.

    An attention or router module may read the weights of its children in its own forward method.
    """
    import accelerate

    names = sorted({type(part).__name__ for part in _named(model, _WHOLE, by_class=True)})
    accelerate.cpu_offload(model, execution_device=CPU, preload_module_classes=names)


def offload_groups(model: Any) -> None:
    if not hasattr(model, "enable_group_offload"):
        raise Inapplicable
    model.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


def dispatch(model: nn.Module) -> None:
    import accelerate

    main_device: Any = "cpu"  # a string, because it is compared with the values of the device map
    accelerate.dispatch_model(model, {"": "cpu"}, main_device=main_device, force_hooks=True)


class Change(NamedTuple):
    """A modification of a model.

    Args:
        run: function that modifies a model in place.
        gradients: whether gradients are still comparable after the change.
        preserves: whether the modified original computes the same result as the unmodified one.
    """

    run: Callable[[Any], None]
    gradients: bool = True
    preserves: bool = False


CHANGES: dict[str, Change] = {
    "frequencies in place": Change(scale_in_place), "frequencies replaced": Change(replace_frequencies),
    "frequencies learned": Change(learn_frequencies), "amplitude": Change(change_amplitude),
    "tables scaled by a hook": Change(hook_tables), "tables scaled by length": Change(hook_by_length),
    "norms hooked": Change(hook_norms), "norms patched": Change(patch_norms), "low rank": Change(add_low_rank),
    "quantised linears": Change(quantise, False), "device map": Change(dispatch, preserves=True),
    "offloaded to the cpu": Change(offload_to_cpu, False, True),
    "offloaded to disk": Change(offload_to_disk, False, True),
    "offloaded in parts": Change(offload_in_parts, False, True),
    "offloaded in groups": Change(offload_groups, False, True),
}  # fmt: skip


def _save_and_load(model: Any) -> Any:
    with tempfile.TemporaryFile() as file:
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "save": _save_and_load,
}  # fmt: skip


DEFAULT_DTYPE = "default dtype"

# --- files -----------------------------------------------------------------------------------------------------------

COLUMNS = [
    *((name, when) for name in CHANGES for when in ("before", "after")), *((name, "after") for name in COPIES),
    (DEFAULT_DTYPE, "before"),
]  # fmt: skip


def write_outcomes(outcomes: Iterable[Outcome], file: TextIO = sys.stdout) -> list[Outcome]:
    """Write a model's row to the CSV when the next model begins, and return all outcomes."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["library", "model", *map(", ".join, COLUMNS)])
    done: list[Outcome] = []
    for model, group in groupby(outcomes, key=lambda each: (each.library, each.model)):
        part = list(group)
        cells = {(each.change, each.when): f"{each.outcome}: {each.note}".removesuffix(": ") for each in part}
        writer.writerow([*model, *(cells.get(column, "") for column in COLUMNS)])
        file.flush()
        done += part
    return done


def read_outcomes(path: Path) -> list[Outcome]:
    """Read the outcomes from a file that :func:`write_outcomes` wrote, skipping empty cells."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for change, when in COLUMNS:
                outcome, _, note = row[f"{change}, {when}"].partition(": ")
                found += [Outcome(row["library"], row["model"], change, when, outcome, note)] if outcome else []
    return found


# --- a model ---------------------------------------------------------------------------------------------------------


def sweep_library(library: str, names: Sequence[str] | None = None) -> Iterator[Outcome]:
    """Yield the outcomes for a library's adaptable models, or only for models with the given names."""
    if find_spec(library) is None:
        return
    for candidate in import_module(f".trial_{library}", __package__).candidates():
        if names is not None and candidate.name not in names:
            continue
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            rows = list(sweep_model(library, candidate))
        yield from rows


def sweep_model(library: str, candidate: Candidate) -> Iterator[Outcome]:
    """Apply each change before and after adaptation, and yield the outcomes. Yield nothing if adapting fails."""
    try:
        model = candidate.build()
        stock = candidate.call(copy.deepcopy(model))  # Some models can't be copied after a call.
        adapt_rotary(copy.deepcopy(model))
    except Exception:
        return
    for name, change in CHANGES.items():
        for when in ("before", "after"):
            yield Outcome(library, candidate.name, name, when, *_try(candidate, Original(model, stock), change, when))
    for name, make in COPIES.items():
        yield Outcome(library, candidate.name, name, "after", *_try_copy(candidate, Original(model, stock), make))
    default = _compare(candidate, stock, model, _in_bfloat16)
    yield Outcome(library, candidate.name, DEFAULT_DTYPE, "before", *default)


class Original(NamedTuple):
    """Unadapted model with its outputs and gradients."""

    model: Any
    result: Result


def _in_bfloat16(model: Any) -> Any:
    """Adapt the model while bfloat16 is the default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return adapt_rotary(model)
    finally:
        torch.set_default_dtype(torch.float32)


def _apply(change: Change, model: Any) -> None:
    for own in models_of(model).values():
        change.run(own)


def _call(candidate: Candidate, change: Change, model: Any) -> Result:
    with torch.set_grad_enabled(change.gradients):
        return candidate.call(model)


def _try(candidate: Candidate, original: Original, change: Change, when: str) -> tuple[str, str]:
    """Apply a change before or after adaptation, and return the outcome and a note."""
    model, plain = original
    try:
        with torch.no_grad():
            _apply(change, stock := copy.deepcopy(model))
        expected = _call(candidate, change, stock)
    except Inapplicable:
        return "inapplicable", ""
    except Exception as error:
        return "inapplicable", f"the original raises {type(error).__name__}"
    if change.preserves and (unstable := _describe_unstable(expected, plain)):
        return unstable
    changed = copy.deepcopy(model)
    if when == "before":
        with torch.no_grad():
            _apply(change, changed)
    try:
        adapt_rotary(changed)
    except (TypeError, ValueError) as error:
        return "refused", str(error)[:160]
    try:
        if when == "after":
            with torch.no_grad():
                _apply(change, changed)
        outcome = _judge(_call(candidate, change, changed), expected)
    except Exception as error:
        outcome = "error", f"{type(error).__name__}: {str(error)[:140]}"
    if outcome[0] == "same":
        return outcome
    try:
        return _describe_unstable(_call(candidate, change, stock), expected) or outcome
    except Exception as error:
        return "unstable", f"the original raises {type(error).__name__} when called again"


def _describe_unstable(found: Result, expected: Result) -> tuple[str, str] | None:
    """Return an outcome if two calls of the original model give different results, or None if they agree."""
    if not found.gradients:
        expected = expected._replace(gradients={})
    gap = distance(found, expected)
    return ("unstable", f"the original differs from itself by {gap:.1e}") if gap > BOUND else None


def _try_copy(candidate: Candidate, original: Original, make: Callable[[Any], Any]) -> tuple[str, str]:
    """Return the outcome for a copy of the adapted model, provided that the original can be copied after a call."""
    try:
        candidate.call(called := copy.deepcopy(original.model))
        make(called)
    except Exception as error:
        return "inapplicable", f"the original raises {type(error).__name__}"
    return _compare(candidate, original.result, original.model, make)


def _compare(candidate: Candidate, stock: Result, model: Any, make: Callable[[Any], Any]) -> tuple[str, str]:
    """Call the adapted model, copy it with ``make``, and return the outcome for the copy."""
    try:
        adapted = adapt_rotary(copy.deepcopy(model))
        candidate.call(adapted)
        copied = make(adapted)
        if not any(exchanged_names(part) for part in parts(copied).values()):
            return "different", "the copy is not adapted"
        return _judge(candidate.call(copied), stock)
    except Exception as error:
        return "error", f"{type(error).__name__}: {str(error)[:140]}"


def _judge(found: Result, expected: Result) -> tuple[str, str]:
    gap = distance(found, expected)
    return ("same", "") if gap <= BOUND else ("different", f"by {gap:.1e}")
