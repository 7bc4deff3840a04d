"""Our kernels in place of the functions that turn q and k in other people's models.

    from lrpe_md import adapt_rotary
    model = adapt_rotary(timm.create_model("vit_small_patch16_rope_mixed_224", pretrained=True))
    adapt_rotary(pipe)                                  # diffusers: FLUX, Wan, Qwen-Image, ..; or pipe.transformer
    adapt_rotary(Qwen3VLForConditionalGeneration.from_pretrained(..))
    adapt_rotary(YourOwnModel())

Nothing here knows a library: the functions that a module looks up by name are given to :func:`drop_in`, and those that
it takes are exchanged in a copy of the module's methods. The cos and sin that the model computes go to the kernel.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ..engine.validate import IMPLS, Impl
from .copies import (
    Copier,
    Recipe,
    adapt_class,
    find_method,
    find_methods,
    is_adapted,
    looks_rotary,
    original_class,
    private_names,
    read_own,
    restore_class,
)  # fmt: skip
from .drop_ins import drop_in
from .fused import fuse

__all__ = ["adapt_rotary", "exchanged_names", "is_pipeline", "models_of", "parts", "restore_rotary"]

Model = TypeVar("Model")
_ENTRIES = ("__call__", "forward")
_SAVED = "_lrpe_attributes"  # of an object: attributes of its own that were exchanged, as they were


# --- which functions are exchanged ---------------------------------------------------------------------------------


class Taken(NamedTuple):
    """What :func:`drop_in` makes of a function: one of ours, or the reason why not."""

    ours: Any
    reason: str | None


class DropIns:
    """Functions of ours by those whose place they take; the same each time.

    Args:
        impl: see :func:`lrpe_md.rotate`.
    """

    def __init__(self, impl: Impl) -> None:
        self.impl = impl

    def __call__(self, function: Any) -> Any:
        """Return a function of ours, or None where this is no rotary function."""
        return _take(function, self.impl).ours if _is_candidate(function) else None

    def refine(self, method: FunctionType, copied: Any) -> tuple[Any, dict[str, Any]]:
        """Return the method of a known class in which more goes into a launch, and attributes of the class."""
        return fuse(method, copied, self, self.impl)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DropIns) and other.impl == self.impl

    def __hash__(self) -> int:
        return hash(self.impl)


def _is_candidate(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return isinstance(function, FunctionType) and looks_rotary(function.__code__)


@functools.cache
def _take(function: Any, impl: Impl) -> Taken:
    try:
        return Taken(drop_in(function, impl=impl), None)
    except TypeError as error:
        return Taken(None, str(error))


class Record:
    """The drop-ins of one model, with the functions that were refused, by name."""

    def __init__(self, drop_ins: DropIns) -> None:
        self.drop_ins = drop_ins
        self.refused: dict[str, str] = {}

    def __call__(self, function: Any) -> Any:
        ours = self.drop_ins(function)
        if ours is None and _is_candidate(function):
            name = _name(function)
            if _TURNS.search(name.rpartition(".")[2]) and _DATA.intersection(_parameters(function)):
                self.refused[name] = _take(function, self.drop_ins.impl).reason or ""
        return ours

    def left(self) -> dict[str, str]:
        """Return those that were refused; what turns half of the channels stands for the function that calls it."""
        helpers = [name for name in self.refused if name.endswith("rotate_half")]
        whole = {name: reason for name, reason in self.refused.items() if name not in helpers}
        return whole or self.refused


_TURNS = re.compile(r"(apply|turn).*(rot|rope)|rotat|(rot|rope).*(apply|emb)", re.IGNORECASE)
_DATA = {"x", "xq", "xk", "x_in", "q", "k", "query", "key", "queries", "keys", "tensor", "t", "hidden_states"}


def _parameters(function: Any) -> tuple[str, ...]:
    code = inspect.unwrap(function.func if isinstance(function, functools.partial) else function).__code__
    return code.co_varnames[: code.co_argcount]


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


class Exchanged:
    """A function of ours as an attribute of an object. Copies and files keep what it takes the place of."""

    def __init__(self, original: Any, exchange: DropIns) -> None:
        self.original, self.exchange = original, exchange
        self.function = _exchange_value(original, Copier(exchange)) or original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Exchanged, (self.original, self.exchange)


def _exchange_value(value: Any, copier: Copier) -> Any:
    ours = copier.exchange(value)
    return copier.copy(value) if ours is None and isinstance(value, FunctionType) else ours


# --- what a model is made of ---------------------------------------------------------------------------------------


def is_pipeline(model: Any) -> bool:
    """Return whether this is a pipeline of diffusers."""
    return any(base.__name__ == "DiffusionPipeline" for base in type(model).__mro__)


def models_of(model: Any) -> dict[str, nn.Module]:
    """Return a model, or the models of a pipeline by name; encoders of text, which are transformers', are left out."""
    if not is_pipeline(model):
        return {"": model}
    found = {name: part for name, part in model.components.items() if isinstance(part, nn.Module)}
    return {name: part for name, part in found.items() if not _is_of(part, "transformers")}


def _is_of(part: Any, library: str) -> bool:
    return any(base.__module__.partition(".")[0] == library for base in type(part).__mro__)


def parts(model: Any) -> dict[str, Any]:
    """Return all modules by name, and the other objects that they call: attention processors."""
    found: dict[str, Any] = {}
    callables: dict[type, bool] = {Exchanged: False}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = list(models_of(model).items())[::-1]
    while waiting:
        path, module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        found[path] = module
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if type(value) not in callables:
                callables[type(value)] = isinstance(find_method(type(value), "__call__"), FunctionType)
            if callables[type(value)]:
                found[f"{prefix}{name}"] = value
        waiting += [(f"{prefix}{name}", child) for name, child in module._modules.items()][::-1]
    return found


def exchanged_names(part: Any) -> list[str]:
    """Return the names of the functions that are exchanged in an object."""
    cls, saved = type(part), vars(part).get(_SAVED, {})
    return sorted({*saved, *(private_names(cls) if is_adapted(cls) else ())})


# --- a whole model -------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """What becomes of one object: its class, and attributes of its own."""

    part: Any
    cls: type
    attributes: dict[str, Any]

    def apply(self) -> None:
        if self.attributes:
            vars(self.part)[_SAVED] = {name: vars(self.part)[name] for name in self.attributes}
            vars(self.part).update(self.attributes)
        if self.cls is not type(self.part):
            self.part.__class__ = self.cls


def adapt_rotary(model: Model, *, impl: Impl = "auto", verbose: bool = False) -> Model:
    """Turn q and k with :func:`lrpe_md.rotate` in a built model of any library, or in the denoisers of a pipeline.

    In place; returns the model. The functions that its modules and attention processors call by name to turn q and k
    are exchanged for equal ones (:func:`drop_in`), in this model alone: parameters, their names, hooks, optimizers and
    the state_dict stay as they are, and so do other models of the same classes. cos and sin stay the model's own: what
    it learns, what scales or replaces its frequencies, and hooks on its rotary module work as before, whether they are
    set before or afterwards.

    Args:
        model: an ``nn.Module``, or a pipeline of diffusers, whose text encoders are left alone.
        impl: see :func:`lrpe_md.rotate`.
        verbose: print what was adapted, and what was left and why.

    A function that looks like one of these and can't be exchanged stays as it is, and a warning names it. Adapt before
    ``torch.compile``. :func:`restore_rotary` undoes it. A model may be adapted again, after attention processors or
    functions were set.

    Raises:
        TypeError: not a model, or none of its functions can be exchanged; the message says why.
        ValueError: a part was sharded (``fully_shard``) since it was adapted. The model is as it was.
    """
    if not isinstance(model, nn.Module) and not is_pipeline(model):
        raise TypeError(f"model: expected an nn.Module or a pipeline of diffusers, got {type(model).__name__}")
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
    found = parts(model)
    _restore(found)
    record = Record(DropIns(impl))
    changes = _plan(found, record)
    if not changes:
        raise TypeError(
            "model: expected one that calls a function to turn q and k by cos and sin, got "
            f"{type(model).__module__}.{type(model).__qualname__}; {_reasons(record)}"
        )
    for change in changes.values():
        change.apply()
    if verbose:
        for path, change in changes.items():
            name = (original_class(change.cls) or change.cls).__name__
            print(f"adapted: {path or 'model'} ({name}): {', '.join(exchanged_names(change.part))}")
        for name, reason in record.left().items():
            print(f"left: {name}: {_say(reason)}")
    elif record.left():
        warnings.warn(f"adapt_rotary: left as in the original: {', '.join(record.left())}", stacklevel=2)
    return model


def _reasons(record: Record) -> str:
    refused = [f"refused {name}, which {_say(reason)}" for name, reason in record.left().items()]
    return "; ".join(refused) or "found no such function"


def _say(reason: str) -> str:
    """Return what a function does of the message that it is refused with."""
    return reason.rpartition(", which ")[2]


def _plan(found: dict[str, Any], record: Record) -> dict[str, Change]:
    copier = Copier(record)
    entries = _find_entries(found)
    classes: dict[tuple[type, tuple[str, ...]], Any] = {}
    changes: dict[str, Change] = {}
    for path, part in found.items():
        cls = type(part)
        if cls.__module__.startswith("torch."):
            continue
        key = (cls, entries.get(id(part), _ENTRIES))
        if key not in classes:
            classes[key] = adapt_class(cls, Recipe(record.drop_ins, key[1]), copier)
        attributes = _plan_attributes(part, copier, record.drop_ins)
        if classes[key] is not cls or attributes:
            changes[path] = Change(part, classes[key], attributes)
    return changes


def _find_entries(found: dict[str, Any]) -> dict[int, tuple[str, ...]]:
    """Return by the id of an object the names of methods that others call: ``self.rope.rotate(q)``."""
    called: dict[int, set[str]] = {}
    known = {id(part) for part in found.values()}
    chains: dict[type, list[tuple[str, ...]]] = {}
    for part in found.values():
        cls = type(part)
        if cls not in chains:
            methods = {} if cls.__module__.startswith("torch.") else find_methods(cls, _ENTRIES)
            chains[cls] = [path for method in methods.values() for path in read_own(method) if len(path) > 1]
        for name, method, *_ in chains[cls]:
            owned = vars(part).get(name)
            owned = vars(part).get("_modules", {}).get(name) if owned is None else owned
            if id(owned) in known and isinstance(find_method(type(owned), method), FunctionType):
                called.setdefault(id(owned), set()).add(method)
    return {key: (*_ENTRIES, *sorted(names - {*_ENTRIES})) for key, names in called.items()}


def _plan_attributes(part: Any, copier: Copier, drop_ins: DropIns) -> dict[str, Any]:
    """Return functions and methods that an object has of its own, exchanged."""
    changed: dict[str, Any] = {}
    for name, value in vars(part).items():
        if isinstance(value, MethodType) and value.__self__ is part:  # accelerate's hooks keep the forward so
            ours = copier.copy(value.__func__) if isinstance(value.__func__, FunctionType) else None
            if ours is not None:
                changed[name] = MethodType(ours, part)
        elif isinstance(value, (FunctionType, functools.partial)) and _exchange_value(value, copier) is not None:
            changed[name] = Exchanged(value, drop_ins)
    return changed


def _restore(found: dict[str, Any]) -> None:
    for path, part in found.items():
        if is_adapted(type(part)) and original_class(type(part)) is None:
            raise ValueError(
                f"{path or 'model'}: expected a class that adapt_rotary made, got {type(part).__name__}, derived from "
                "it; adapt or restore before fully_shard"
            )
    for part in found.values():
        if _SAVED in vars(part):
            vars(part).update(vars(part).pop(_SAVED))
        restore_class(part)


def restore_rotary(model: Model) -> Model:
    """Undo :func:`adapt_rotary`, in place; a model that is not adapted stays as it is."""
    _restore(parts(model))
    return model
