"""Blocks in which text and image attend to each other, steered by a vector (MM-DiT, SD3, arXiv 2403.03206; adaLN-zero,
DiT, arXiv 2212.09748).

Shapes: B batch, L text tokens, N tokens (text, then patches), C embed_dim, H heads, D head_dim.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from einops import rearrange
from timm.layers.mlp import Mlp
from timm.layers.norm import RmsNorm
from torch import Tensor, nn

from lrpe_md import Norm, geometric_theta
from lrpe_md.engine.encode.views import split_qkv
from lrpe_md.engine.linear.call import NormalizerName
from lrpe_md.integrations.attention import Context, attend_encoded, attend_linearly, softmax_attention
from lrpe_md.integrations.norms import join_norms, norm_of, takes_norm

__all__ = ["JointBlock", "Stream", "TimeEmbedding", "modulate", "modulation"]


class TimeEmbedding(nn.Module):
    """t (B,) → (B, C): sines and cosines of 1000 t, and two layers; formed in float32 at least."""

    def __init__(self, embed_dim: int, num_frequencies: int = 128) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.mlp = Mlp(2 * num_frequencies, embed_dim, embed_dim, act_layer=nn.SiLU)

    def forward(self, t: Tensor) -> Tensor:
        dtype = torch.promote_types(t.dtype, torch.float32)
        angles = 1000 * t.to(dtype)[:, None] * geometric_theta(self.num_frequencies, 1e4, dtype=dtype, device=t.device)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.mlp.fc1.weight.dtype))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (B, N, C) · (1 + scale (B, C)) + shift (B, C)."""
    return x * (1 + scale[:, None]) + shift[:, None]


def modulation(embed_dim: int, number: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(embed_dim, number * embed_dim))


class Stream(nn.Module):
    """The weights that text or image has in a block.

    norm: one of what was attended to. last: what comes out is not used any more; there are weights for q, k, v alone.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, mlp_ratio: float, *, norm: bool = False, last: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.last = num_heads, last
        self.norm1 = nn.LayerNorm(embed_dim, eps=1e-6, elementwise_affine=False)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.q_norm, self.k_norm = RmsNorm(embed_dim // num_heads), RmsNorm(embed_dim // num_heads)
        self.modulation = modulation(embed_dim, 2 if last else 6)
        if not last:
            self.norm = RmsNorm(embed_dim) if norm else nn.Identity()
            self.proj = nn.Linear(embed_dim, embed_dim)
            self.norm2 = nn.LayerNorm(embed_dim, eps=1e-6, elementwise_affine=False)
            self.mlp = Mlp(embed_dim, int(mlp_ratio * embed_dim))

    def project(
        self, x: Tensor, c: Tensor, normed: bool = True
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        """x (B, N, C), c (B, C) → q, k, v (B, H, N, D) and what remains of the modulation for :meth:`update`."""
        shift, scale, *rest = self.modulation(c).chunk(2 if self.last else 6, dim=-1)
        qkv = self.qkv(modulate(self.norm1(x), shift, scale))
        q, k, v = split_qkv(rearrange(qkv, "b n (three h d) -> b n three h d", three=3, h=self.num_heads))
        if not normed:
            return (q, k, v), tuple(rest)
        return (self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v), tuple(rest)  # autocast norms in float32

    def update(self, x: Tensor, attended: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        """x (B, N, C), attended (B, H, N, D) → x of the next block."""
        if self.last:
            return x
        gate1, shift, scale, gate2 = rest
        x = x + gate1[:, None] * self.proj(self.norm(rearrange(attended, "b h n d -> b n (h d)")))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift, scale))


class JointBlock(nn.Module):
    """Text and patches attend to both; everything else they do apart."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_ratio: float,
        *,
        text: bool,
        last: bool,
        attention: Literal["softmax", "linear"],
        normalizer: NormalizerName,
        keep_encoded: bool = True,
    ) -> None:
        super().__init__()
        self.attention, self.keep_encoded = attention, keep_encoded
        self.normalizer: NormalizerName = normalizer
        norm = attention == "linear" and normalizer == "none"
        self.image = Stream(embed_dim, num_heads, mlp_ratio, norm=norm)
        self.text = Stream(embed_dim, num_heads, mlp_ratio, norm=norm, last=last) if text else None
        self.scale = (embed_dim // num_heads) ** -0.5

    def forward(self, x: Tensor, text: Tensor | None, c: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """x (B, N - L, C), text (B, L, C), c (B, C) → x, text. The context's mask is (B, N), False for padding."""
        norm = self.norm(context, 0 if text is None else text.shape[1], x.dtype)
        (q, k, v), rest = self.image.project(x, c, norm is None)
        if self.text is None or text is None:
            return self.image.update(x, self.attend(q, k, v, context, norm), rest), None
        length = text.shape[1]
        first, text_rest = self.text.project(text, c, norm is None)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(first, (q, k, v), strict=True))
        attended = self.attend(q, k, v, context, norm)
        text = self.text.update(text, attended[:, :, :length], text_rest)
        return self.image.update(x, attended[:, :, length:], rest), text

    def norm(self, context: Context, length: int, dtype: torch.dtype) -> Norm | None:
        """The norms of text and image as one that the encoding takes; None: they come first."""
        if not takes_norm(context.encoding, self.attention):
            return None
        image = norm_of(self.image.q_norm, self.image.k_norm, dtype)
        if self.text is None or image is None or not length:
            return image
        text, positions = norm_of(self.text.q_norm, self.text.k_norm, dtype), context.positions
        if positions is None or positions.prefix != length or positions.suffix:
            return None  # text that has positions of its own
        return join_norms((text, image))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, norm: Norm | None) -> Tensor:
        encoding, positions, mask = context.encoding, context.positions, context.attn_mask
        if self.attention == "linear":
            gate = None if mask is None else mask[:, None]
            return attend_linearly(q, k, v, encoding, positions, normalizer=self.normalizer, gate=gate, norm=norm)
        attend = partial(softmax_attention, scale=self.scale, attn_mask=None if mask is None else mask[:, None, None])
        if encoding is None:
            return attend(q, k, v)
        encode = partial(encoding, positions=positions, **({} if norm is None else {"norm": norm}))
        if not self.keep_encoded:
            return attend_encoded(encode, attend, q, k, v)
        q, k = encode(q, k)
        return attend(q, k, v)
