"""Conversion of a model's q and k norms to a :class:`lrpe_md.Norm` with the same parameters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from ..norm import Norm, NormName

__all__ = ["is_plain_module", "join_norms", "norm_of", "takes_norm"]

_LIBRARIES: dict[str, dict[str, NormName]] = {  # known classes of each module
    "timm.layers.norm": {"LayerNorm": "layer", "LayerNormFp32": "layer", "RmsNorm": "rms", "RmsNormFp32": "rms"},
    "diffusers.models.normalization": {"RMSNorm": "rms"},
    "transformers.models.qwen3.modeling_qwen3": {"Qwen3RMSNorm": "rms"},
}


def norm_of(
    q_norm: Any,
    k_norm: Any,
    dtype: torch.dtype,
    heads: tuple[int, int] | None = None,
    device: torch.device | None = None,
) -> Norm | None:
    """Return the norms of q and k as one Norm, or None if they must be called as modules.

    The parameters remain in the modules. At call time, the norms must belong to a known class, without hooks, without
    an instance-level forward, and with weights on q's device.

    Args:
        dtype: dtype of q and k.
        heads: numbers of heads of q and k, if the norms are over all heads.
        device: device of q and k; None: that of the weights.
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
        joined.append(_shape_by_head(found, heads) if found else None)
    if len({t.dtype for t in weights}) > 1 or any(t.device != (device or weights[0].device) for t in weights):
        return None
    return Norm(q.kind, joined[0], joined[1], q.eps, "head" if heads is None else "heads")


def _shape_by_head(pair: list[Tensor], heads: tuple[int, int] | None) -> tuple[Tensor, ...]:
    return tuple(pair) if heads is None else tuple(t.view(n, -1) for t, n in zip(pair, heads, strict=True))


def join_norms(groups: Sequence[Norm | None]) -> Norm | None:
    """Combine the per-head norms of prefix, grid and suffix tokens; return None if one is None or they differ."""
    norms = [norm for norm in groups if norm is not None and norm.weight is not None]
    if len(norms) < len(groups) or len({(n.kind, n.eps, n.over, n.offset, n.bias is None) for n in norms}) > 1:
        return None
    columns: list[Any] = [[n.weight for n in norms], [n.bias for n in norms if n.bias is not None]]
    weight, bias = (tuple(torch.stack(rows)[:, None] for rows in zip(*pairs, strict=True)) for pairs in columns)
    return norms[0]._replace(weight=weight, bias=bias or None)


def is_plain_module(norm: nn.Module) -> bool:
    """Return whether calling a module only runs its class's forward: no hooks, no instance-level forward."""
    return not (
        norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
        or "forward" in norm.__dict__ or global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks
        or global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks
    )  # fmt: skip


def _read_norm(norm: Any, dtype: torch.dtype) -> Norm | None:
    """Read the norm of one module, or return None if the module is unknown or not plain."""
    kind = _kind(type(norm), type(norm).forward) if isinstance(norm, nn.Module) and is_plain_module(norm) else None
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if kind is None or (kind == "rms" and bias is not None):
        return None
    eps: Any = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return Norm(kind, weight, bias, torch.finfo(dtype).eps if eps is None else eps)


_KINDS: dict[tuple[type, Any], NormName | None] = {}


@torch.compiler.assume_constant_result
def _kind(cls: type, forward: Any) -> NormName | None:
    """Return the kind of norm that a class computes, recognised by its forward's code, or None."""
    if (cls, forward) not in _KINDS:
        kinds: dict[Any, NormName] = {_code_of(known): kind for known, kind in _known()}
        code = _code_of(forward)
        _KINDS[cls, forward] = kinds.get(code) if code else None
    return _KINDS[cls, forward]


def _code_of(forward: Any) -> tuple[Any, ...] | None:
    code = getattr(forward, "__code__", None)
    return code and (code.co_code, code.co_consts, code.co_names)


def _known() -> Iterator[tuple[Any, NormName]]:
    """Yield the forwards of known classes, for libraries that are loaded and not patched."""
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


def takes_norm(encoding: Any, attention: str = "softmax") -> bool:
    """Return whether a module, or linear attention with its description, accepts ``norm=``."""
    if getattr(encoding, "dim", None) == -2:
        return False
    if attention == "linear":
        return encoding is None or getattr(encoding, "describes", False)
    return getattr(encoding, "takes_norm", False)
