"""Softmax and linear attention for q and k that an encoding has made wider, and what a backbone tells its attentions.

Shapes: B batch, N tokens, H heads, D head_dim.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..engine.boundary import transforming
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..reference import ACTIVATIONS, activate

__all__ = [
    "Context", "Normalizer", "attend", "check_causal", "check_linear", "linear_attention", "sdpa_backends",
    "softmax_attention",
]  # fmt: skip

Normalizer = Literal["unrotated", "none"]

torch.fx.wrap("softmax_attention")  # one step of a traced graph

NON_NEGATIVE = tuple(name for name, entry in ACTIVATIONS.items() if entry.never_negative)


class Context:
    """What a forward of the backbone tells each attention, through its ``attn_mask`` argument.

    No tuple: the mixed precision of FSDP and DDP casts every tensor that it finds in one, positions among them.
    """

    def __init__(
        self, encoding: nn.Module | None, positions: Grid | Coordinates | None, attn_mask: Tensor | None = None
    ) -> None:
        self.encoding, self.positions, self.attn_mask = encoding, positions, attn_mask


def sdpa_backends(q: Tensor, v: Tensor) -> list[SDPBackend] | None:
    """The SDPA backends to try, in order, or None for PyTorch's own choice.

    The cosine map makes q and k 2D wide and leaves v D wide. Flash attention refuses unequal widths, and by default
    PyTorch then prefers the memory-efficient kernel. On Hopper cuDNN takes them several times as fast
    (docs/tuning.md), so there, and in 16 bits, it comes first; where it refuses (a mask, a width) the next is
    taken. Everything else, other devices and equal widths among it, is left to PyTorch.

    Under a function transform or a dual number it is the plain one: the fused ones have no forward mode.
    """
    if transforming():
        return [SDPBackend.MATH]
    if q.shape[-1] == v.shape[-1] or not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    if torch.version.hip or torch.cuda.get_device_capability(q.device)[0] < 9:
        return None
    return [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """SDPA of q, k (B, H, N, D or 2D) and v (B, H, N, D), on the backends of :func:`sdpa_backends`.

    ``scale`` is D**-0.5 of the head_dim before any map, so that zero frequencies are no encoding.
    """
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(q.dtype)  # a block's mixed precision casts q, but not what a Context holds
    backends = sdpa_backends(q, v)
    with nullcontext() if backends is None else sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=bool(is_causal), scale=scale
        )  # ONNX's older exporter hands it on as a tensor


def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Softmax attention of q, k, v (B, H, N, ..) as one of timm's attentions has it: fused or not, with its dropout."""
    if attn.fused_attn:
        dropout_p = attn.attn_drop.p if attn.training else 0.0
        return softmax_attention(
            q, k, v, scale=attn.scale, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p
        )
    # timm.layers.set_fused_attn(False): for export and for hooks on the weights.
    from timm.layers.attention import maybe_add_mask, resolve_self_attn_mask

    weights = (q * attn.scale) @ k.transpose(-2, -1)
    weights = maybe_add_mask(weights, resolve_self_attn_mask(q.shape[-2], weights, attn_mask, is_causal))
    return attn.attn_drop(weights.softmax(dim=-1)) @ v


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    encoding: nn.Module | None = None,
    positions: Grid | Coordinates | None = None,
    normalizer: Normalizer = "unrotated",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Linear attention: q̂ (k̂ᵀ v) / z, where q̂, k̂ are encoded and q̄, k̄ only activated.

    Args:
        q, k, v: (B, H, N, D), raw, any strides.
        encoding: called as ``encoding(q, k, positions=positions)``; its ``act`` and ``dim`` (default: none) say how
            q̄ = act(q) is formed. None: q̂ = q.
        normalizer: "unrotated" takes z = q̄ · Σ k̄, at least ``eps``, a sum of positive weights as the encoded product
            is not; "none" takes z = 1 (put a norm behind it: timm's ``scale_attn_norm=True``).
        is_causal: token n attends to tokens up to n. This is the quadratic form.
        key_mask: (B, N), False for tokens that no other attends to: padding.

    Returns:
        (B, H, N, D) in v's dtype. Sums are formed in float32 at least, also under autocast.

    Raises:
        ValueError: "unrotated" with an activation that can be negative; causal or a key_mask with a softmax over the
            sequence.

    Source: RoFormer (arXiv 2104.09864, eq. 19); LRPE (arXiv 2307.09270).
    """
    act, dim = getattr(encoding, "act", "none"), getattr(encoding, "dim", None)
    check_linear(act, normalizer)
    if is_causal:
        check_causal(encoding)
    if key_mask is not None and dim == -2:
        raise ValueError("key_mask: a softmax over the sequence (dim=-2) counts masked tokens; use dim=-1")
    q_hat, k_hat = (q, k) if encoding is None else encoding(q, k, positions=positions)
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q_hat, k_hat, v_wide = q_hat.to(dtype), k_hat.to(dtype), v.to(dtype)
        if key_mask is not None:
            v_wide = torch.where(key_mask[:, None, :, None], v_wide, 0)
        out = (
            (q_hat @ k_hat.transpose(-2, -1)).tril() @ v_wide
            if is_causal
            else q_hat @ (k_hat.transpose(-2, -1) @ v_wide)
        )
        if normalizer == "unrotated":
            q_bar, k_bar = activate(q.to(dtype), act, dim), activate(k.to(dtype), act, dim)
            if key_mask is not None:
                k_bar = torch.where(key_mask[:, None, :, None], k_bar, 0)
            total = k_bar.cumsum(-2) if is_causal else k_bar.sum(-2, keepdim=True)
            out = out / (q_bar * total).sum(-1, keepdim=True).clamp_min(eps)
    return out.to(v.dtype)


def check_linear(act: str, normalizer: str) -> None:
    if normalizer not in ("unrotated", "none"):
        raise ValueError(f"normalizer: expected 'unrotated' or 'none', got {normalizer!r}")
    if normalizer == "unrotated" and act not in NON_NEGATIVE:
        raise ValueError(
            f"normalizer: 'unrotated' divides by act(q) · Σ act(k), which needs an activation that is never negative, "
            f"one of {NON_NEGATIVE}, got act={act!r}; choose one (encoding_kwargs={{'act': 'relu'}}) or "
            f"normalizer='none'"
        )


def check_causal(encoding: nn.Module | None) -> None:
    if getattr(encoding, "dim", None) == -2:
        raise ValueError("is_causal: a softmax over the sequence (dim=-2) lets a token see later ones; use dim=-1")
