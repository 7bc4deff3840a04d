"""Fuse the rotation with the q and k norms, or with the prefix tokens, of known attention classes.

We run a copy of the library's own method in which the norms also rotate. If the norms are not plain (:mod:`.norms`), we
run the copy from :mod:`.copies` instead, which only replaces the rotation. Classes are recognised by name, so in a fork
with different names, only the rotation is replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.core.call import Impl
from ..functional import rotate
from ..norm import Norm
from .copies import Copier, Exchange
from .norms import norm_of

__all__ = ["fuse"]

Method = Callable[..., Any]


@functools.cache
def fuse(method: FunctionType, plain: Method, exchange: Exchange, impl: Impl) -> tuple[Method, dict[str, Any]]:
    """Return a method with fused launches, or ``plain`` if there is none, and the attributes that the class needs."""
    inner = inspect.unwrap(method)
    known = _KNOWN.get(f"{inner.__module__}.{inner.__qualname__}")
    if known is None:
        return plain, {}
    make, names, attributes = known
    rotation, call = make(impl)
    if "torch" in names:
        inner.__globals__[names["torch"]] = _TORCH
    copied = Copier(lambda function: rotation if exchange(function) is not None else None, names).copy(method)
    needed = next(iter(attributes), "__class__")

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(args[0], needed):  # after restore_rotary, a wrapper may still call this
            return method(*args, **kwargs)
        return call(plain, copied, *args, **kwargs)

    return run, attributes


def _return_unchanged(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return x unchanged, in place of a norm or rotation that has already been applied."""
    return x


# --- transformers: Qwen3 and models with the same attention ----------------------------------------------------------


class _Normed(NamedTuple):
    cos: Tensor
    norm: Norm


def _fuse_qwen3(impl: Impl) -> tuple[Method, Method]:
    def rotate_both(q: Tensor, k: Tensor, cos: _Normed, sin: Tensor) -> Any:
        tables = cos.cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, k, tables=tables, pairs="half", norm=cos.norm, impl=impl)

    def forward(
        plain: Method, copied: Method, attn: Any, hidden_states: Tensor, position_embeddings: Any = None, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        norm = norm_of(attn.q_norm, attn.k_norm, hidden_states.dtype, device=hidden_states.device)
        if norm is None or type(position_embeddings) is not tuple:
            return plain(attn, hidden_states, position_embeddings, *args, **kwargs)
        cos, sin = position_embeddings
        return copied(attn, hidden_states, (_Normed(cos, norm), sin), *args, **kwargs)

    return rotate_both, forward


# --- diffusers: FLUX, Wan, HunyuanVideo, LTX-Video -------------------------------------------------------------------


class _Rotating:
    """Wrapper around an attention module, in which the norms also rotate. Everything else comes from the module."""

    def __init__(self, attn: Any, norm_q: Any, norm_k: Any, norm_added_q: Any = None, norm_added_k: Any = None) -> None:
        self.attn, self.norm_q, self.norm_k = attn, norm_q, norm_k
        if norm_added_q is not None:
            self.norm_added_q, self.norm_added_k = norm_added_q, norm_added_k

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attn, name)


def _norm_and_rotate(tables: Any, norm: Norm, heads: int, impl: Impl, x: Tensor) -> Tensor:
    """Normalise and rotate x (B, N, H, D), or (B, N, H D) with ``heads``."""
    y = x.unflatten(-1, (heads, -1)) if heads else x
    y = rotate(y.transpose(1, 2), tables=tables, prefix=0, pairs="interleaved", norm=norm, impl=impl).transpose(1, 2)
    return y.flatten(2) if heads else y


class _Processor(NamedTuple):
    ndim: int  # of its cos and sin: (N, D), (B, N, H D) or (B, N, 1, D)
    text: str = "none"  # "with norms" if text has separate norms, "joined" if unrotated text is joined to the video
    over_heads: bool = False  # whether each norm is over all heads
    on_cpu: bool = True  # whether to fuse on a CPU too, which adds Python calls but saves no time there

    def group(self, attn: Any, text: Tensor | None, tables: Any) -> dict[tuple[str, str], Any]:
        """Map the names of each pair of norms to their cos and sin. Return {} if the norms can't be fused."""
        is_known = type(tables) is tuple and [getattr(t, "ndim", None) for t in tables] == [self.ndim] * 2
        if not is_known or (self.text == "none" and text is not None):
            return {}
        if self.text == "with norms":
            if (attn.added_kv_proj_dim is None) != (text is None):
                return {}
            if text is not None:
                num = text.shape[1]
                image, own = (tuple(t[part] for t in tables) for part in (slice(num, None), slice(num)))
                return {("norm_q", "norm_k"): image, ("norm_added_q", "norm_added_k"): own}
        if self.ndim > 2:
            tables = tuple((t if t.ndim == 4 else t.unflatten(-1, (attn.heads, -1))).transpose(1, 2) for t in tables)
        return {("norm_q", "norm_k"): tables}


def _fuse_processor(how: _Processor, impl: Impl) -> tuple[Method, Method]:
    def call(
        plain: Method, copied: Method, processor: Any, attn: Any, hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None, attention_mask: Any = None, image_rotary_emb: Any = None, *,
        rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        text, tables = encoder_hidden_states, image_rotary_emb if rotary_emb is None else rotary_emb
        heads = attn.heads if how.over_heads else 0
        norms: dict[str, Any] = {}
        fuses = how.on_cpu or hidden_states.is_cuda or impl == "triton"
        for names, own in how.group(attn, text, tables).items() if fuses else ():
            over = (heads, heads) if heads else None
            q_norm, k_norm = (getattr(attn, name, None) for name in names)
            norm = norm_of(q_norm, k_norm, hidden_states.dtype, over, hidden_states.device)
            if norm is None or not isinstance(norm.weight, tuple):
                norms = {}
                break
            for name, weight in zip(names, norm.weight, strict=True):
                each = norm._replace(weight=weight, bias=None)
                norms[name] = partial(_norm_and_rotate, own, each, heads, impl)
        if not norms:
            return plain(processor, attn, hidden_states, text, attention_mask, tables)
        rotating = _Rotating(attn, **norms)
        is_joined = how.text == "joined" and attn.add_q_proj is None and getattr(attn, "to_out", None) is None
        if text is None or not is_joined:
            return copied(processor, rotating, hidden_states, text, attention_mask, tables)
        # Text follows the video and is not rotated. Both use the same projection, so they can stay in one tensor.
        both, _ = copied(processor, rotating, torch.cat([hidden_states, text], dim=1), None, attention_mask, tables)
        video, text = both.split([hidden_states.shape[1], text.shape[1]], dim=1)
        return video, (text if getattr(attn, "to_add_out", None) is None else attn.to_add_out(text))

    return _return_unchanged, call


# --- timm: Eva and models with AttentionRope -------------------------------------------------------------------------


def _cat(tensors: Any, dim: int = 0) -> Tensor:
    """Concatenate tensors. If the prefix is empty, nothing is copied."""
    if len(tensors) == 2 and dim == 2 and tensors[0].shape[2] == 0:
        return tensors[1]
    return torch.cat(tensors, dim)


_TORCH = ModuleType("torch")
vars(_TORCH).update(cat=_cat, __getattr__=partial(getattr, torch))


def _fuse_timm(impl: Impl) -> tuple[Method, Method]:
    def rotate_one(x: Tensor, emb: Tensor, half: bool = False) -> Tensor:
        """Rotate x (B, H, N, D). Prefix tokens have no row in emb (..., N, 2 D)."""
        sin, cos = (t[None] if t.ndim == 3 else t for t in emb.chunk(2, -1))
        prefix = x.shape[2] - cos.shape[-2]
        return rotate(x, tables=(cos, sin), pairs="half" if half else "interleaved", prefix=prefix, impl=impl)

    def forward(plain: Method, copied: Method, attn: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = copied if isinstance(x, Tensor) else plain  # torch.fx traces with proxies
        return run(attn, x, *args, **kwargs)

    return rotate_one, forward


_QWEN3 = (
    _fuse_qwen3,
    {"q_norm": "_fused_norm", "k_norm": "_fused_norm"},
    {"_fused_norm": (_return_unchanged, staticmethod)},
)
_TIMM = (_fuse_timm, {"num_prefix_tokens": "_fused_prefix", "torch": "_fused_torch"}, {"_fused_prefix": (0, None)})
_DIFFUSERS = {
    "flux.FluxAttnProcessor": _Processor(2, "with norms"),
    "wan.WanAttnProcessor": _Processor(4, over_heads=True),
    "hunyuan_video.HunyuanVideoAttnProcessor2_0": _Processor(2, "joined"),
    "ltx.LTXVideoAttnProcessor": _Processor(3, over_heads=True, on_cpu=False),
}  # fmt: skip
_TRANSFORMERS = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen3_vl": "Qwen3VLText", "qwen3_vl_moe": "Qwen3VLMoeText"}
# Maps a method name to the function that makes the rotation and the call, names that the copy looks up, and class
# attributes.
_KNOWN: dict[str, tuple[Callable[[Impl], tuple[Method, Method]], dict[str, str], dict[str, Any]]] = {
    "timm.models.eva.EvaAttention.forward": _TIMM, "timm.layers.attention.AttentionRope.forward": _TIMM,
    **{
        f"diffusers.models.transformers.transformer_{name}.__call__": (partial(_fuse_processor, how), {}, {})
        for name, how in _DIFFUSERS.items()
    },
    **{
        f"transformers.models.{folder}.modeling_{folder}.{name}Attention.forward": _QWEN3
        for folder, name in _TRANSFORMERS.items()
    },
}  # fmt: skip
