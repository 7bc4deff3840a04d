"""Convert a model's q and k norms to a :class:`lrpe_md.Norm` with the same parameters."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from ..norm import Norm, NormName

__all__ = ["is_plain_module", "norm_of", "takes_norm"]

_KNOWN: dict[str, NormName] = {
    "torch.nn.modules.normalization.LayerNorm": "layer", "torch.nn.modules.normalization.RMSNorm": "rms",
    "timm.layers.norm.LayerNorm": "layer", "timm.layers.norm.LayerNormFp32": "layer",
    "timm.layers.norm.RmsNorm": "rms", "timm.layers.norm.RmsNormFp32": "rms",
    "diffusers.models.normalization.RMSNorm": "rms", "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": "rms",
}  # fmt: skip


def norm_of(
    q_norm: Any,
    k_norm: Any,
    dtype: torch.dtype,
    heads: tuple[int, int] | None = None,
    device: torch.device | None = None,
) -> Norm | None:
    """Return the norms of q and k (of this dtype and device) as one Norm, or None if they must be called as modules.

    When called, the norms must belong to a known class, have no hooks and no instance-level forward, and keep their
    weights on q's device. If each norm is over all heads, ``heads`` holds the numbers of heads of q and k.
    """
    q, k = _read_norm(q_norm, dtype), _read_norm(k_norm, dtype)
    if q is None or k is None or (q.kind, q.eps) != (k.kind, k.eps):
        return None
    joined: list[Any] = []
    weights: list[Tensor] = []
    for pair in ((q.weight, k.weight), (q.bias, k.bias)):
        found = [t for t in pair if isinstance(t, Tensor)]
        if len(found) == 1 or any(t.ndim != 1 for t in found):
            return None
        weights += found
        if heads is not None:
            found = [t.view(n, -1) for t, n in zip(found, heads, strict=False)]
        joined.append(tuple(found) or None)
    if len({t.dtype for t in weights}) > 1 or any(t.device != (device or weights[0].device) for t in weights):
        return None
    return Norm(q.kind, joined[0], joined[1], q.eps, "head" if heads is None else "heads")


def is_plain_module(norm: nn.Module) -> bool:
    """Return whether calling a module only runs its class's forward, without hooks or an instance-level forward."""
    return not (
        norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
        or "forward" in norm.__dict__ or global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks
        or global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks
    )  # fmt: skip


def _read_norm(norm: Any, dtype: torch.dtype) -> Norm | None:
    kind = _kind(type(norm).forward) if isinstance(norm, nn.Module) and is_plain_module(norm) else None
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if kind is None or (kind == "rms" and bias is not None):
        return None
    eps: Any = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return Norm(kind, weight, bias, torch.finfo(dtype).eps if eps is None else eps)


@torch.compiler.assume_constant_result
def _kind(forward: Any) -> NormName | None:
    """Return the kind of norm that a forward method computes, or None if no known class has the same code."""
    return _find_kind(forward)


@functools.cache
def _find_kind(forward: Any) -> NormName | None:
    for name, kind in _KNOWN.items():
        place, _, cls = name.rpartition(".")
        if place.partition(".")[0] in sys.modules:
            known: Any = getattr(importlib.import_module(place), cls, nn.Module).forward
            full_name = f"{getattr(known, '__module__', '')}.{getattr(known, '__qualname__', '')}"
            if full_name == f"{name}.forward" and _code_of(known) == _code_of(forward) is not None:  # not patched
                return kind
    return None


def _code_of(forward: Any) -> tuple[Any, ...] | None:
    code = getattr(forward, "__code__", None)
    return code and (code.co_code, code.co_consts, code.co_names)


def takes_norm(encoding: Any, attention: str = "softmax") -> bool:
    """Return whether a module, or linear attention with its description, accepts ``norm=``."""
    if getattr(encoding, "dim", None) == -2:
        return False
    if attention == "linear":
        return encoding is None or getattr(encoding, "describes", False)
    return getattr(encoding, "takes_norm", False)
