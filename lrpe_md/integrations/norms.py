"""The norms of q and k that models have, as a :class:`lrpe_md.Norm` of their own parameters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from ..norm import Norm, NormName

__all__ = ["is_plain", "join_norms", "norm_of", "takes_norm"]

_LIBRARIES: dict[str, dict[str, NormName]] = {  # known classes of each module
    "timm.layers.norm": {"LayerNorm": "layer", "LayerNormFp32": "layer", "RmsNorm": "rms", "RmsNormFp32": "rms"},
    "diffusers.models.normalization": {"RMSNorm": "rms"},
    "transformers.models.qwen3.modeling_qwen3": {"Qwen3RMSNorm": "rms"},
}


class _Own(NamedTuple):
    kind: NormName
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def norm_of(
    q_norm: Any,
    k_norm: Any,
    dtype: torch.dtype,
    heads: tuple[int, int] | None = None,
    device: torch.device | None = None,
) -> Norm | None:
    """Return the norms of q and of k as one, or None where a map can't take their place, so that they must be called.

    Their parameters stay theirs. Plain norms of known classes will do, as they are at this moment: without hooks, a
    forward of their own, or weights elsewhere than q.

    Args:
        dtype: of q and k.
        heads: of q and of k, where the norms are over all of them.
        device: of q and k; None: that of the weights.
    """
    q, k = _read(q_norm, dtype), _read(k_norm, dtype)
    if q is None or k is None or (q.kind, q.eps) != (k.kind, k.eps):
        return None
    pairs = [(q.weight, k.weight), (q.bias, k.bias)]
    if any((a is None) != (b is None) or (a is not None and a.ndim != 1) for a, b in pairs):
        return None
    weights = [t for pair in pairs for t in pair if t is not None]
    if len({t.dtype for t in weights}) > 1 or any(t.device != (device or weights[0].device) for t in weights):
        return None
    weight, bias = (None if a is None or b is None else _by_head(a, b, heads) for a, b in pairs)
    return Norm(q.kind, weight, bias, q.eps, "head" if heads is None else "heads")


def join_norms(groups: Sequence[Norm | None]) -> Norm | None:
    """Return the norms over a head that tokens of the prefix, the grid and the suffix have, as one.

    None where one is None, or they differ in kind.
    """
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


def is_plain(norm: nn.Module) -> bool:
    """Return whether calling a module is calling the forward of its class: no hooks, and no forward of its own."""
    return not (
        norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
        or "forward" in norm.__dict__ or global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks
        or global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks
    )  # fmt: skip


def _read(norm: Any, dtype: torch.dtype) -> _Own | None:
    if not isinstance(norm, nn.Module) or not is_plain(norm):
        return None
    kind = _kind(type(norm), type(norm).forward)
    if kind is None:
        return None
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if kind == "rms" and bias is not None:
        return None
    eps: Any = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return _Own(kind, weight, bias, torch.finfo(dtype).eps if eps is None else eps)  # pyright: ignore


_KINDS: dict[tuple[type, Any], NormName | None] = {}


@torch.compiler.assume_constant_result
def _kind(cls: type, forward: Any) -> NormName | None:
    """Return what a class computes, told by the code of its forward; None where that is not known."""
    if (cls, forward) not in _KINDS:
        code = getattr(forward, "__code__", None)
        same: list[NormName] = [kind for known, kind in _known() if code and _formula(code) == _formula(known.__code__)]
        _KINDS[cls, forward] = same[0] if same else None
    return _KINDS[cls, forward]


def _known() -> Iterator[tuple[Any, NormName]]:
    """Yield the forwards of known classes, as far as their libraries are loaded and nobody has patched them."""
    yield nn.LayerNorm.forward, "layer"
    yield nn.RMSNorm.forward, "rms"
    for name, classes in _LIBRARIES.items():
        if name.partition(".")[0] not in sys.modules:
            continue
        module = importlib.import_module(name)
        for each, kind in classes.items():
            forward = getattr(getattr(module, each, None), "forward", None)
            if (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) == (name, f"{each}.forward"):
                yield forward, kind


def _formula(code: Any) -> tuple[Any, ...]:
    return code.co_code, code.co_consts, code.co_names


def takes_norm(encoding: Any, attention: str = "softmax") -> bool:
    """Return whether a module encodes q and k with ``norm=``, or linear attention takes the norm that it describes."""
    if getattr(encoding, "dim", None) == -2:
        return False
    if attention == "linear":
        return encoding is None or getattr(encoding, "describes", False)
    return getattr(encoding, "takes_norm", False)
