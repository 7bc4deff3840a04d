"""Pipelines of diffusers: their denoisers adapted, and tables where the pipeline itself makes them (CogVideoX)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..engine.validate import Impl
from .diffusers_rule import find_ropes, plan_callers
from .exchange import OWN, Step
from .rewrite import ROTARY, Unread, methods_of, rewrite_method
from .scales import Scales

__all__ = ["find_denoisers", "plan_of_pipeline"]


def find_denoisers(pipeline: Any) -> dict[str, nn.Module]:
    """The library's own models in a pipeline by name, ControlNets among them; encoders of text are transformers'."""
    models = pipeline.components.items()
    return {name: model for name, model in models if isinstance(model, nn.Module) and _is_own(model)}


def _is_own(model: nn.Module) -> bool:
    return any(base.__module__.startswith("diffusers.") for base in type(model).__mro__)


def plan_of_pipeline(pipeline: Any, planned: Mapping[str, list[Step]], impl: Impl) -> list[Step]:
    """The exchanges in a pipeline that makes tables: its methods that do, and attentions of models without any.

    Args:
        planned: what is exchanged in its models, by name.
    """
    makers = rewrite_makers(type(pipeline))
    if not makers:
        return []
    scales = Scales()
    own: dict[str, Any] = {
        name: functools.partial(_make_scaled, MethodType(method, pipeline), scales) for name, method in makers.items()
    }
    own["scales"] = scales
    models = {name: model for name, model in find_denoisers(pipeline).items() if not planned[name]}
    steps = [step for model in models.values() if not find_ropes(model) for step in plan_callers(model, impl)]
    return [*steps, Step(pipeline, type(pipeline), {**own, OWN: tuple(own)})] if steps else []


def _make_scaled(method: Callable[..., Any], scales: Scales, *args: Any, **kwargs: Any) -> Any:
    return scales(method(*args, **kwargs))


@functools.cache
def rewrite_makers(cls: type) -> dict[str, FunctionType]:
    """Methods of a pipeline's class that make tables, with tables of ours in their place; ``__call__`` is none."""
    found: dict[str, FunctionType] = {}
    for name, value in methods_of(cls):
        code = inspect.unwrap(value).__code__ if isinstance(value, FunctionType) else None
        if code is None or name.startswith("__") or not any(map(ROTARY.search, code.co_names)):
            continue
        try:
            method = rewrite_method(value)
        except Unread:
            continue
        if method is not None:
            found[name] = method
    return found
