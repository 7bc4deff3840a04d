"""In third-party models, replace the functions that rotate q and k with calls to our kernels.

Nothing here depends on a particular library. We pass each function that a module looks up by name to :func:`drop_in`.
If the function is supported, it is replaced in a copy of the module's methods. The kernel reads the cos and sin that
the model computes.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ..checks import check_one_of
from ..engine.core.call import Impl
from ..engine.core.operator import IMPLS
from . import copies
from .drop_ins import drop_in
from .fused import fuse
from .linear_cores import find_core, replace_core

__all__ = ["adapt_rotary", "exchanged_names", "models_of", "parts", "restore_rotary"]

Model = TypeVar("Model")
_ENTRIES = ("__call__", "forward")
_SAVED = "_lrpe_attributes"  # key in an object's dict for replaced attributes, as {name: (ours, original)}
_ROTATES = re.compile(r"(apply|turn).*(rot|rope)|rotat|(rot|rope).*(apply|emb)", re.IGNORECASE)
_SWITCH = re.compile(r"(use_)?(rope|rotary)(_(emb|pos)\w*)?")  # settings that turn RoPE off
_DATA = {"x", "xq", "xk", "x_in", "q", "k", "query", "key", "queries", "keys", "tensor", "t", "hidden_states"}


class DropIns(NamedTuple):
    """Map from rotary functions to our replacements. A function always gets the same replacement."""

    impl: Impl

    def __call__(self, function: Any) -> Any:
        """Return our replacement, or None if this is not a rotary function."""
        if isinstance(function, FunctionType) and find_core(function) is not None:
            return replace_core(function, function, self.impl)
        found = _drop_in(function, self.impl) if _is_candidate(function) else None
        return None if isinstance(found, str) else found

    def refine(self, method: FunctionType, copied: Any) -> tuple[Any, dict[str, Any]]:
        """Return the method of a known class with more operations fused, and the attributes that this method needs."""
        if find_core(method) is not None:
            return replace_core(method, copied or method, self.impl), {}
        return (None, {}) if copied is None else fuse(method, copied, self, self.impl)


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _is_candidate(function: Any) -> bool:
    inner = _unwrap(function)
    return isinstance(inner, FunctionType) and copies.looks_rotary(inner.__code__) and find_core(inner) is None


@functools.cache
def _drop_in(function: Any, impl: Impl) -> Any:
    """Return our replacement, or a description of what the function does instead of a rotation."""
    try:
        return drop_in(function, impl=impl)
    except TypeError as error:
        return str(error).rpartition(", which ")[2]


def _find_refused(functions: list[Any], impl: Impl) -> dict[str, str]:
    """Describe functions that look like rotations but do something else."""
    refused: dict[str, str] = {}
    for function in filter(_is_candidate, functions):
        inner, reason = _unwrap(function), _drop_in(function, impl)
        takes_data = _DATA.intersection(inner.__code__.co_varnames[: inner.__code__.co_argcount])
        if isinstance(reason, str) and takes_data and _ROTATES.search(inner.__name__):
            refused[f"{inner.__module__}.{inner.__qualname__}"] = reason
    whole = {name: reason for name, reason in refused.items() if not name.endswith("rotate_half")}
    return whole or refused  # rotate_half is only a helper, so name the function that calls it


class Exchanged:
    """Replacement for a function in an object's attribute. Copies and pickles store the original."""

    def __init__(self, original: Any, exchange: copies.Exchange) -> None:
        self.original, self.exchange = original, exchange
        self.function = copies.Copier(exchange).replace(original) or original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Exchanged, (self.original, self.exchange)


def models_of(model: Any) -> dict[str, nn.Module]:
    """Return a model, or a pipeline's models by name, excluding text encoders, which come from transformers."""
    if isinstance(model, nn.Module):
        return {"": model}
    if all(base.__name__ != "DiffusionPipeline" for base in type(model).__mro__):
        raise TypeError(f"model: expected an nn.Module or a diffusers pipeline, got {type(model).__name__}")
    modules = {name: part for name, part in model.components.items() if isinstance(part, nn.Module)}
    texts = {n for n, m in modules.items() if any(c.__module__.startswith("transformers.") for c in type(m).__mro__)}
    return {name: part for name, part in modules.items() if name not in texts}


def parts(model: Any) -> dict[str, Any]:
    """Return all modules by name, and other objects that they call, such as attention processors."""
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
                is_callable = isinstance(copies.find_method(type(value), "__call__"), FunctionType)
                callables[type(value)] = is_callable and hasattr(value, "__dict__")  # not tuples or classes with slots
            if callables[type(value)]:
                found[f"{prefix}{name}"] = value
        waiting += [(f"{prefix}{name}", child) for name, child in module._modules.items()][::-1]
    return found


def exchanged_names(part: Any) -> list[str]:
    replaced = copies.replaced_names(type(part)) if copies.is_adapted(type(part)) else ()
    return sorted({*vars(part).get(_SAVED, {}), *replaced})


def adapt_rotary(model: Model, *, impl: Impl = "auto", verbose: bool = False) -> Model:
    """Rotate q and k in an existing model, or in a pipeline's denoisers, with :func:`lrpe_md.rotate`.

    The model is changed in place and returned. Functions that modules and attention processors call by name to rotate q
    and k are replaced with equivalent functions (:func:`drop_in`). Other models of the same classes don't change.
    Parameters, their names, hooks, optimizers and the state_dict stay the same. The model still computes its own cos
    and sin. Hooks on its rotary module therefore work as before, and so do learned, scaled or replaced frequencies,
    even if you set them later. In SANA-Video and SANA-WM, :func:`lrpe_md.linear_attention` replaces the whole
    attention.

    Args:
        model: an ``nn.Module``, or a diffusers pipeline. A pipeline's text encoders stay unchanged.
        impl: see :func:`lrpe_md.rotate`.
        verbose: whether to print what was adapted, and what was left unchanged and why.

    If a function looks rotary but can't be replaced, it stays unchanged, and a warning names it. This includes a
    ``forward`` that you or diffusers' hooks set on a module. Adapt the model before you call ``torch.compile``.
    :func:`restore_rotary` undoes the change. If you set new attention processors or functions afterwards, adapt the
    model again.

    Raises:
        TypeError: if ``model`` is not a model, or no function can be replaced. The error message gives the reason.
        ValueError: if a part was sharded (``fully_shard``) after it was adapted. After an error, the model is
            unchanged.
    """
    found, copier = parts(model), copies.Copier(DropIns(impl))
    check_one_of("impl", impl, IMPLS)
    detached = _restore(found)
    try:
        changes = _plan(found, copier)
        refused = _find_refused(copier.seen, impl)
        if not changes:
            reasons = "; ".join(f"rejected {name}, which {reason}" for name, reason in refused.items())
            raise TypeError(
                "model: expected a model that calls a function to rotate q and k by cos and sin, got "
                f"{type(model).__module__}.{type(model).__qualname__}; {reasons or 'found no such function'}. To add "
                "an encoding, use lrpe_md.adapt for timm's ViT, or lrpe_md.adapt_attention for other models"
            )
        for path, (cls, attributes) in changes.items():
            part = found[path]
            if not attributes and "forward" in vars(part) and "forward" in vars(cls):  # may hold the original method
                refused[f"{path or 'model'}.forward"] = "was set on the object; adapt the model before you set it"
            if attributes and _SAVED not in vars(part):  # several layers may share an object
                vars(part)[_SAVED] = {name: (ours, vars(part)[name]) for name, ours in attributes.items()}
                vars(part).update(attributes)
            if cls is not type(part):
                part.__class__ = cls
            if verbose:
                print(f"adapted: {path or 'model'} ({cls.__name__}): {', '.join(exchanged_names(part))}")
    finally:
        for path, (recipe, rotation) in detached.items():
            recipe.attach(path, found[path], rotation)
    if verbose:
        for name, reason in refused.items():
            print(f"unchanged: {name}, which {reason}")
    elif refused:
        warnings.warn(f"adapt_rotary: left these functions unchanged: {', '.join(refused)}", stacklevel=2)
    return model


def find_rotary(model: nn.Module) -> list[str]:
    """Return the names of modules and processors that call a rotary function or are adapted, or [] if RoPE is off."""
    settings = {**getattr(getattr(model, "config", None), "__dict__", {}), **vars(model), **model._modules}
    switches = [value for name, value in settings.items() if _SWITCH.fullmatch(name)]
    if switches and all(value is None or value is False for value in switches):
        return []
    found = parts(model)
    changes = _plan(found, copies.Copier(DropIns("auto")))
    return [path for path, part in found.items() if path in changes or exchanged_names(part)]


def _plan(found: dict[str, Any], copier: copies.Copier) -> dict[str, tuple[type, dict[str, Any]]]:
    """Return, by path, the new class of each object to change, and the instance attributes to replace."""
    kinds = dict.fromkeys(type(part) for part in found.values() if not type(part).__module__.startswith("torch."))
    methods = [method for cls in kinds for method in copies.find_methods(cls, _ENTRIES).values()]
    # methods that other methods call, such as ``self.rope.rotate``
    called = {path[1] for method in methods for path in copies.read_own(method) if len(path) > 1}
    entries = [*_ENTRIES, *sorted(called - {*_ENTRIES})]
    classes: dict[type, Any] = {}
    for cls in kinds:
        own = tuple(name for name in entries if isinstance(copies.find_method(cls, name), FunctionType))
        classes[cls] = copies.Recipe(copier.exchange, own).derive(cls, copier)
    changes: dict[str, tuple[type, dict[str, Any]]] = {}
    for path, part in found.items():
        cls = type(part)
        attributes: dict[str, Any] = {}
        for name, value in vars(part).items() if cls in kinds else ():
            if isinstance(value, MethodType) and value.__self__ is part:  # accelerate's hooks store forwards like this
                ours = copier.copy(value.__func__) if isinstance(value.__func__, FunctionType) else None
                attributes |= {} if ours is None else {name: MethodType(ours, part)}
            elif isinstance(value, (FunctionType, functools.partial)) and copier.replace(value) is not None:
                attributes[name] = Exchanged(value, copier.exchange)
        if attributes or classes.get(cls, cls) is not cls:
            changes[path] = (classes[cls], attributes)
    return changes


def _restore(found: dict[str, Any]) -> dict[str, tuple[Any, nn.Module]]:
    """Restore the original classes and attributes. Return the recipes and frequencies of detached tables."""
    adapted = {path: part for path, part in found.items() if copies.is_adapted(type(part))}
    for kind, path in {type(part): path for path, part in adapted.items()}.items():
        if any(copies.is_adapted(cls) and copies.recipe_of(cls) is None for cls in kind.__mro__):
            raise ValueError(
                f"{path or 'model'}: expected a class created by adapt_rotary, got its subclass {kind.__name__}; "
                "adapt or restore the model before fully_shard"
            )
    recipes = {path: copies.recipe_of(type(part)) for path, part in adapted.items()}
    stand_ins = {path: recipe for path, recipe in recipes.items() if not isinstance(recipe, copies.Recipe)}
    detached = {path: (recipe, recipe.detach(adapted[path])) for path, recipe in stand_ins.items()}
    for part in found.values():
        originals = dict(vars(part).pop(_SAVED, {}).values())
        for name, value in vars(part).items():  # accelerate moves methods, and users set new functions
            if isinstance(value, (MethodType, Exchanged)) and value in originals:
                vars(part)[name] = originals[value]
    for part in adapted.values():
        ours = copies.restore_class(part)
        for name, value in vars(part).items():  # accelerate stores methods of the adapted class
            if isinstance(value, MethodType) and value.__func__ in ours:
                vars(part)[name] = MethodType(getattr(type(part), ours[value.__func__]), part)
    return detached


def restore_rotary(model: Model) -> Model:
    """Undo :func:`adapt_rotary` in place.

    In third-party modules, this also undoes ``set_scaling`` and ``set_places``.
    """
    _restore(parts(model))
    return model
