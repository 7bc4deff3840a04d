"""The norms of q and k that models have, as a :class:`lrpe_md.Norm` of their own parameters."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..norm import Norm, NormName
from .exchange import Adapted, Rotary, Step, adapted_class, parts, reduce_adapted

__all__ = ["DeferredNorm", "NormedAttention", "defer_norms", "join_norms", "norm_of", "normal_source", "takes_norm"]


class _Own(NamedTuple):
    kind: NormName
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def norm_of(q_norm: Any, k_norm: Any, dtype: torch.dtype, heads: tuple[int, int] | None = None) -> Norm | None:
    """What the norms of q and of k are together; None where a map can't take their place: they are to be called.

    Their parameters stay theirs. Those of torch, timm and diffusers are known, without hooks.

    Args:
        dtype: of q and k.
        heads: of q and of k, where the norms are over all of them.
    """
    q, k = _read(q_norm, dtype), _read(k_norm, dtype)
    if q is None or k is None or (q.kind, q.eps) != (k.kind, k.eps):
        return None
    pairs = [(q.weight, k.weight), (q.bias, k.bias)]
    if any((a is None) != (b is None) or (a is not None and a.ndim != 1) for a, b in pairs):
        return None
    if len({t.dtype for pair in pairs for t in pair if t is not None}) > 1:
        return None
    weight, bias = (None if a is None or b is None else _by_head(a, b, heads) for a, b in pairs)
    return Norm(q.kind, weight, bias, q.eps, "head" if heads is None else "heads")


def join_norms(groups: Sequence[Norm | None]) -> Norm | None:
    """The norms over a head that tokens of the prefix, the grid and the suffix have, as one; None where one is None, or
    they are not of a kind."""
    first = groups[0]
    if first is None or first.weight is None:
        return None
    if any(norm is None or (norm.kind, norm.eps, norm.over) != (first.kind, first.eps, first.over) for norm in groups):
        return None
    stacked: list[Any] = []
    for name in ("weight", "bias"):
        each = [None if norm is None else getattr(norm, name) for norm in groups]
        if each[0] is None and not any(each):
            stacked.append(None)
            continue
        if any(t is None for t in each):
            return None
        stacked.append(tuple(torch.stack(list(rows))[:, None] for rows in zip(*each, strict=True)))
    return first._replace(weight=stacked[0], bias=stacked[1])


def _by_head(q: Tensor, k: Tensor, heads: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    return (q, k) if heads is None else (q.view(heads[0], -1), k.view(heads[1], -1))


def _read(norm: Any, dtype: torch.dtype) -> _Own | None:
    if not isinstance(norm, nn.Module) or norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks:
        return None
    kind, library, name = type(norm), type(norm).__module__.split(".")[0], type(norm).__name__
    if getattr(norm, "bias", None) is not None and kind is not nn.LayerNorm and name != "LayerNorm":
        return None
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if kind is nn.LayerNorm or (library == "timm" and name in ("LayerNorm", "LayerNormFp32")):
        return _Own("layer", weight, bias, norm.eps)  # pyright: ignore[reportArgumentType]
    if kind is nn.RMSNorm:
        return _Own("rms", weight, None, torch.finfo(dtype).eps if norm.eps is None else norm.eps)  # pyright: ignore
    if (library, name) in (("timm", "RmsNorm"), ("timm", "RmsNormFp32"), ("diffusers", "RMSNorm")):
        return _Own("rms", weight, None, norm.eps)  # pyright: ignore[reportArgumentType]
    return None


class DeferredNorm(Adapted):
    """A norm of q or of k that the map takes with it: it gives what it gets. Its parameters are where they were."""

    extras = ("deferred",)
    deferred: bool
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if hasattr(self, "deferred") else self.original.forward(self, hidden_states)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_adapted(self, DeferredNorm)


class NormedAttention(Adapted):
    """An attention of transformers whose norms of q and k over a head are :class:`DeferredNorm`."""

    q_norm: Any
    k_norm: Any

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        q_norm, k_norm = self.q_norm, self.k_norm
        if hasattr(q_norm, "deferred"):
            if not isinstance(position_embeddings, tuple) or not isinstance(position_embeddings[0], Rotary):
                raise TypeError(
                    "position_embeddings: expected what the adapted rotary module gives, which q_norm and k_norm go "
                    f"with, got {type(position_embeddings).__name__}; call restore_rotary(model) for others"
                )
            eps: Any = q_norm.variance_epsilon
            norm = Norm("rms", (q_norm.weight, k_norm.weight), None, eps)
            position_embeddings = (position_embeddings[0].normed(norm), *position_embeddings[1:])
        return self.original.forward(self, hidden_states, position_embeddings, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_adapted(self, NormedAttention)


def defer_norms(model: nn.Module, attentions: Sequence[type], norms: Sequence[type]) -> list[Step]:
    """The exchanges that leave the norms of q and k to the map, in attentions whose code is that of these classes."""
    steps: list[Step] = []
    for part in parts(model).values():
        own = [getattr(part, name, None) for name in ("q_norm", "k_norm")]
        if not _is_one_of(part, attentions) or not all(_is_one_of(norm, norms) for norm in own):
            continue
        if any(norm._forward_hooks or norm._forward_pre_hooks for norm in own):  # pyright: ignore
            continue
        steps.append(Step(part, adapted_class(NormedAttention, type(part))))
        steps += [Step(norm, adapted_class(DeferredNorm, type(norm)), {"deferred": True}) for norm in own]
    return steps


def _is_one_of(part: Any, classes: Sequence[type]) -> bool:
    """Whether the forward of a module is that of one of the classes, source for source."""
    if not isinstance(part, nn.Module) or "forward" in vars(part):
        return False
    return type(part) in classes or normal_source(type(part)) in {normal_source(cls) for cls in classes}


@cache
def normal_source(cls: type, name: str = "forward") -> str:
    """The source of a method without decorators, comments, docstring and annotations; where there is none, a name of
    this class alone."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(cls, name)))))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return f"{cls.__module__}.{cls.__qualname__}.{name}"
    function: Any = tree.body[0]
    function.returns, function.decorator_list = None, []
    for argument in (*function.args.args, *function.args.kwonlyargs, function.args.vararg, function.args.kwarg):
        if argument is not None:
            argument.annotation = None
    if isinstance(function.body[0], ast.Expr) and isinstance(function.body[0].value, ast.Constant):
        del function.body[0]
    return ast.unparse(function)


def takes_norm(encoding: Any, attention: str = "softmax") -> bool:
    """Whether a module encodes q and k with ``norm=``, or linear attention takes the norm with what it describes."""
    if getattr(encoding, "dim", None) == -2:
        return False
    if attention == "linear":
        return encoding is None or getattr(encoding, "describes", False)
    return getattr(encoding, "takes_norm", False)
