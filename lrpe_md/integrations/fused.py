"""Attentions of known classes in which more than the rotation goes into a launch: norms of q and k, tokens in front.

The library's own method runs, in a copy in which its norms, or what brings tokens together, are left out. It is called
while the norms are plain (:mod:`.norms`); else the copy of :mod:`.copies` is called, in which the rotation alone is
exchanged. Classes are told by their names; a fork under another name has the rotation alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.call import Impl
from ..functional import rotate
from ..norm import Norm
from .copies import Copier, Exchange
from .norms import norm_of

__all__ = ["fuse"]

Method = Callable[..., Any]


@functools.cache
def fuse(method: FunctionType, plain: Method, exchange: Exchange, impl: Impl) -> tuple[Method, dict[str, Any]]:
    """Return a method in which more goes into a launch, and attributes that its class needs; ``plain`` for others.

    An attribute is a value and the kind of method, see :func:`.copies.derive_class`.

    Args:
        method: of a library's class.
        plain: its copy, in which the rotation is exchanged.
        exchange: what takes the functions that turn q and k.
        impl: see :func:`lrpe_md.rotate`.
    """
    inner = inspect.unwrap(method)
    make = _KNOWN.get(f"{inner.__module__}.{inner.__qualname__}")
    return (plain, {}) if make is None else make(method, plain, exchange, impl)


def _keep(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for a norm or a rotation that was done before."""
    return x


def _copy(method: FunctionType, exchange: Exchange, ours: Any, names: dict[str, str]) -> Any:
    """Copy a method with ``ours`` in the place of what turns q and k, and other names."""
    return Copier(lambda function: ours if exchange(function) is not None else None, names).copy(method)


# --- transformers: Qwen3 and what has the same attention -------------------------------------------------------------


class _Normed(NamedTuple):
    """What comes in the place of cos, where the norms of q and k go with the rotation."""

    cos: Tensor
    norm: Norm


def _fuse_qwen3(method: FunctionType, plain: Method, exchange: Exchange, impl: Impl) -> Any:
    def turn(q: Tensor, k: Tensor, cos: _Normed, sin: Tensor) -> Any:
        tables = cos.cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, k, tables=tables, pairs="half", norm=cos.norm, impl=impl)

    copied = _copy(method, exchange, turn, {"q_norm": "_fused_norm", "k_norm": "_fused_norm"})

    @functools.wraps(method)
    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        norm = norm_of(self.q_norm, self.k_norm, hidden_states.dtype, device=hidden_states.device)
        if norm is None or type(position_embeddings) is not tuple:
            return plain(self, hidden_states, position_embeddings, *args, **kwargs)
        cos, sin = position_embeddings
        return copied(self, hidden_states, (_Normed(cos, norm), sin), *args, **kwargs)

    return forward, {"_fused_norm": (_keep, staticmethod)}


# --- diffusers: FLUX, Wan, HunyuanVideo ------------------------------------------------------------------------------


class _Turning:
    """An attention whose norms turn q and k, too; all else is the attention's own."""

    def __init__(self, attn: Any, norms: dict[str, Any]) -> None:
        vars(self).update(norms, attn=attn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attn, name)


def _norm_and_turn(tables: Any, norm: Norm, heads: int, impl: Impl, x: Tensor) -> Tensor:
    """Normalise and turn x (B, N, H, D), or (B, N, H D) with ``heads``."""
    y = x.unflatten(-1, (heads, -1)) if heads else x
    y = rotate(y.transpose(1, 2), tables=tables, pairs="interleaved", norm=norm, impl=impl).transpose(1, 2)
    return y.flatten(2) if heads else y


def _turning(attn: Any, groups: tuple[tuple[str, str, Any], ...], x: Tensor, heads: int, impl: Impl) -> _Turning | None:
    """Return an attention whose norms turn, too; None where one of its norms is to be called.

    groups: names of the norms of q and of k, and the tables of their tokens.
    """
    norms: dict[str, Any] = {}
    for q_name, k_name, tables in groups:
        found = getattr(attn, q_name, None), getattr(attn, k_name, None)
        norm = norm_of(*found, x.dtype, (heads, heads) if heads else None, x.device)
        if norm is None or not isinstance(norm.weight, tuple):
            return None
        for name, weight in zip((q_name, k_name), norm.weight, strict=True):
            own = norm._replace(weight=weight, bias=None)
            norms[name] = functools.partial(_norm_and_turn, tables, own, heads, impl)
    return _Turning(attn, norms)


def _is_pair(tables: Any, ndim: int) -> bool:
    return type(tables) is tuple and len(tables) == 2 and all(isinstance(t, Tensor) and t.ndim == ndim for t in tables)


def _fuse_flux(method: FunctionType, plain: Method, exchange: Exchange, impl: Impl) -> Any:
    copied = _copy(method, exchange, _keep, {})

    @functools.wraps(method)
    def call(
        self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        turning = None
        text = encoder_hidden_states
        if _is_pair(image_rotary_emb, 2) and (attn.added_kv_proj_dim is None) == (text is None):
            num = 0 if text is None else text.shape[1]
            groups = (("norm_q", "norm_k", tuple(t[num:] for t in image_rotary_emb)),)
            if text is not None:
                groups += (("norm_added_q", "norm_added_k", tuple(t[:num] for t in image_rotary_emb)),)
            turning = _turning(attn, groups, hidden_states, 0, impl)
        if turning is None:
            return plain(self, attn, hidden_states, text, attention_mask, image_rotary_emb)
        return copied(self, turning, hidden_states, text, attention_mask, image_rotary_emb)

    return call, {}


def _fuse_wan(method: FunctionType, plain: Method, exchange: Exchange, impl: Impl) -> Any:
    copied = _copy(method, exchange, _keep, {})

    @functools.wraps(method)
    def call(
        self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None, rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        turning = None
        if _is_pair(rotary_emb, 4) and encoder_hidden_states is None:
            tables = tuple(t.transpose(1, 2) for t in rotary_emb)
            turning = _turning(attn, (("norm_q", "norm_k", tables),), hidden_states, attn.heads, impl)
        if turning is None:
            return plain(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        return copied(self, turning, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    return call, {}


def _fuse_hunyuan(method: FunctionType, plain: Method, exchange: Exchange, impl: Impl) -> Any:
    """Text goes through unturned, behind the video; where both have one projection they stay one tensor."""
    copied = _copy(method, exchange, _keep, {})

    @functools.wraps(method)
    def call(
        self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        text, turning = encoder_hidden_states, None
        if _is_pair(image_rotary_emb, 2):
            turning = _turning(attn, (("norm_q", "norm_k", image_rotary_emb),), hidden_states, 0, impl)
        if turning is None:
            return plain(self, attn, hidden_states, text, attention_mask, image_rotary_emb)
        if text is None or attn.add_q_proj is not None or getattr(attn, "to_out", None) is not None:
            return copied(self, turning, hidden_states, text, attention_mask, image_rotary_emb)
        both = torch.cat([hidden_states, text], dim=1)
        both, _ = copied(self, turning, both, None, attention_mask, image_rotary_emb)
        video, text = both[:, : -text.shape[1]], both[:, -text.shape[1] :]
        return video, (text if getattr(attn, "to_add_out", None) is None else attn.to_add_out(text))

    return call, {}


# --- timm: Eva and what has AttentionRope ---------------------------------------------------------------------------


class _Torch:
    """torch in a method whose tokens in front are empty: to put nothing in front of a tensor is no copy."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def cat(tensors: Any, dim: int = 0) -> Tensor:
        if len(tensors) == 2 and dim == 2 and tensors[0].shape[2] == 0:
            return tensors[1]
        return torch.cat(tensors, dim)


_TORCH = _Torch()


def _fuse_timm(method: FunctionType, plain: Method, exchange: Exchange, impl: Impl) -> Any:
    def turn(x: Tensor, emb: Tensor, half: bool = False) -> Tensor:
        """Turn x (B, H, N, D), of whose tokens those in front have no row in emb (.., N, 2 D)."""
        sin, cos = (t[None] if t.ndim == 3 else t for t in emb.chunk(2, -1))
        prefix = x.shape[2] - cos.shape[-2]
        return rotate(x, tables=(cos, sin), pairs="half" if half else "interleaved", prefix=prefix, impl=impl)

    inspect.unwrap(method).__globals__["_fused_torch"] = _TORCH
    copied = _copy(method, exchange, turn, {"num_prefix_tokens": "_fused_prefix", "torch": "_fused_torch"})

    @functools.wraps(method)
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = copied if isinstance(x, Tensor) else plain  # torch.fx traces by what is no tensor
        return run(self, x, *args, **kwargs)

    return forward, {"_fused_prefix": (0, None)}


_FLUX = "diffusers.models.transformers.transformer_flux.FluxAttnProcessor.__call__"
_WAN = "diffusers.models.transformers.transformer_wan.WanAttnProcessor.__call__"
_HUNYUAN = "diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0.__call__"
_QWEN3 = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen3_vl": "Qwen3VLText", "qwen3_vl_moe": "Qwen3VLMoeText"}
_KNOWN: dict[str, Callable[..., Any]] = {
    _FLUX: _fuse_flux, _WAN: _fuse_wan, _HUNYUAN: _fuse_hunyuan,
    "timm.models.eva.EvaAttention.forward": _fuse_timm, "timm.layers.attention.AttentionRope.forward": _fuse_timm,
    **{
        f"transformers.models.{folder}.modeling_{folder}.{name}Attention.forward": _fuse_qwen3
        for folder, name in _QWEN3.items()
    },
}  # fmt: skip
