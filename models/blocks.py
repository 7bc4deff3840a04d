"""Blocks of diffusion transformers. A single class reproduces the blocks of published models through its options.

There are three ways to attend to text. Text and patches can attend to each other with separate weights (MM-DiT, SD3,
arXiv 2403.03206). Patches can attend to text with cross-attention (PixArt-α, arXiv 2310.00426). Finally, text and
patches can form one sequence with shared weights (FLUX, Lumina 2). Blocks are conditioned on a vector through
adaLN-zero (DiT, arXiv 2212.09748).

Shapes: B batch, L text tokens, N tokens (text, then registers and patches), C embed_dim, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from einops import rearrange
from timm.layers.mlp import Mlp, SwiGLUPacked
from timm.layers.norm import RmsNorm
from torch import Tensor, nn

from lrpe_md import Norm, geometric_theta
from lrpe_md.engine.core.call import Act
from lrpe_md.engine.encode.views import split_qkv
from lrpe_md.engine.linear.call import NormalizerName
from lrpe_md.integrations.attention import (
    AttentionKind,
    Context,
    attend_encoded,
    attend_linearly,
    softmax_attention,
    weight_dtype,
)
from lrpe_md.integrations.norms import norm_of, takes_norm
from lrpe_md.modules.linear import Memory

__all__ = [
    "BlockOptions", "CrossAttention", "DiTBlock", "ModulationTable", "Stream", "TextAttention", "TimeEmbedding",
    "build_norm", "modulate", "modulation",
]  # fmt: skip

TextAttention: TypeAlias = Literal["joint", "cross", "single"]


class BlockOptions(NamedTuple):
    """Options of a block. See :class:`lrpe_md.models.dit.DiT` for an explanation.

    ``feature_act`` is the activation of q and k in linear attention, and replaces the encoding's activation.
    """

    embed_dim: int
    num_heads: int
    mlp_ratio: float = 4.0
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: Literal["head", "heads", "none"] = "head"
    modulation: Literal["block", "shared"] = "block"
    cross_norm: bool = True
    attention: AttentionKind = "softmax"
    normalizer: NormalizerName = "unrotated"
    keep_encoded: bool = True
    memory: Memory | None = None
    feature_act: Act | None = None


class TimeEmbedding(nn.Module):
    """Embed diffusion times t (B,) as vectors (B, C), with sinusoidal features of 1000 t and a two-layer MLP.

    Attributes:
        base: base b of the frequencies b^(-i / num_frequencies).
    """

    def __init__(self, embed_dim: int, num_frequencies: int = 128, base: float = 1e4) -> None:
        super().__init__()
        self.num_frequencies, self.base = num_frequencies, base
        self.mlp = Mlp(2 * num_frequencies, embed_dim, embed_dim, act_layer=nn.SiLU)

    def forward(self, t: Tensor) -> Tensor:
        dtype = torch.promote_types(t.dtype, torch.float32)
        theta = geometric_theta(self.num_frequencies, self.base, dtype=dtype, device=t.device)
        angles = 1000 * t.to(dtype)[:, None] * theta
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(weight_dtype(self.mlp.fc1, dtype)))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x · (1 + scale) + shift, for tokens x (B, N, C) with scale and shift (B, C)."""
    return x * (1 + scale[:, None]) + shift[:, None]


def modulation(embed_dim: int, number: int) -> nn.Sequential:
    """Build the layers that compute shifts, scales and gates (B, number · C) from a conditioning vector (B, C)."""
    return nn.Sequential(nn.SiLU(), nn.Linear(embed_dim, number * embed_dim))


class ModulationTable(nn.Module):
    """One block's learned offsets to the shared shifts, scales and gates (adaLN-single, PixArt-α, arXiv 2310.00426)."""

    def __init__(self, embed_dim: int, number: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(number, embed_dim))

    def forward(self, shared: Tensor) -> Tensor:
        """Add the offsets to the leading channels of the shared vectors (B, m C), or to a single vector (B, C)."""
        number, embed_dim = self.table.shape
        return (shared.unflatten(-1, (-1, embed_dim))[:, :number] + self.table).flatten(1)


def _build_modulation(options: BlockOptions, number: int) -> nn.Module:
    return (modulation if options.modulation == "block" else ModulationTable)(options.embed_dim, number)


def build_norm(options: BlockOptions) -> nn.Module:
    """Build the norm to apply before attention, an MLP or the head."""
    if options.norm == "rms":
        return RmsNorm(options.embed_dim, eps=1e-6)
    return nn.LayerNorm(options.embed_dim, eps=1e-6, elementwise_affine=False)


def _build_qk_norm(options: BlockOptions) -> nn.Module:
    if options.qk_norm == "none":
        return nn.Identity()
    return RmsNorm(options.embed_dim // (options.num_heads if options.qk_norm == "head" else 1))


def _build_mlp(options: BlockOptions) -> nn.Module:
    hidden = int(options.mlp_ratio * options.embed_dim)
    if options.mlp == "swiglu":
        return SwiGLUPacked(options.embed_dim, 2 * hidden)
    act = nn.GELU if options.mlp == "gelu" else partial(nn.GELU, approximate="tanh")
    return Mlp(options.embed_dim, hidden, act_layer=act)  # pyright: ignore[reportArgumentType]


def _normalize(norm: nn.Module, x: Tensor, dtype: torch.dtype, over: str) -> Tensor:
    """Normalise q or k (B, H, N, D), separately for each head (over="head") or over all heads (over="heads")."""
    if over == "heads":
        x = norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
    else:
        x = norm(x)
    return x.to(dtype)  # under autocast, norms return float32


class Stream(nn.Module):
    """Weights of a block's self-attention and MLP for one sequence.

    Args:
        parallel: whether attention and MLP read the same input, and a single gate scales the sum of their outputs.
        last: whether the stream's output is unused, so the stream only needs weights for q, k and v.
    """

    def __init__(self, options: BlockOptions, *, parallel: bool = False, last: bool = False) -> None:
        super().__init__()
        embed_dim = options.embed_dim
        self.num_heads, self.qk_norm, self.parallel, self.last = options.num_heads, options.qk_norm, parallel, last
        self.norm1 = build_norm(options)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.q_norm, self.k_norm = _build_qk_norm(options), _build_qk_norm(options)
        self.num_vectors = 2 if last else 3 if parallel else 6
        self.modulation = _build_modulation(options, self.num_vectors)
        if not last:
            norm = options.attention == "linear" and options.normalizer == "none"
            self.norm = RmsNorm(embed_dim) if norm else nn.Identity()
            self.proj = nn.Linear(embed_dim, embed_dim)
            self.norm2 = nn.Identity() if parallel else build_norm(options)
            self.mlp = _build_mlp(options)

    def project(self, x: Tensor, c: Tensor, normed: bool = True) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return x (B, N, C) projected to q, k, v (B, H, N, D), and ``rest`` for :meth:`update` and :meth:`feed`.

        ``c`` is the conditioning vector (B, C or 6 C). If ``normed`` is True, q and k are normalised.
        """
        shift, scale, *rest = self.modulation(c).chunk(self.num_vectors, dim=-1)
        x = modulate(self.norm1(x), shift, scale)
        if self.parallel:
            rest = [*rest, x]  # in torch 2.11, Dynamo makes rest a tuple
        q, k, v = split_qkv(rearrange(self.qkv(x), "b n (three h d) -> b n three h d", three=3, h=self.num_heads))
        if normed:
            q = _normalize(self.q_norm, q, v.dtype, self.qk_norm)
            k = _normalize(self.k_norm, k, v.dtype, self.qk_norm)
        return (q, k, v), tuple(rest)

    def update(self, x: Tensor, attended: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        """Add the attention output (B, H, N, D) to x (B, N, C), and also the MLP's output if both run in parallel."""
        if self.last:
            return x
        attended = self.proj(self.norm(rearrange(attended, "b h n d -> b n (h d)")))
        if self.parallel:
            attended = attended + self.mlp(rest[1])
        return x + rest[0][:, None] * attended

    def feed(self, x: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        """Add the MLP's output to x (B, N, C), unless :meth:`update` has already done so."""
        if self.last or self.parallel:
            return x
        _, shift, scale, gate = rest
        return x + gate[:, None] * self.mlp(modulate(self.norm2(x), shift, scale))


class CrossAttention(nn.Module):
    """Cross-attention from patches to text, without positions (PixArt-α, arXiv 2310.00426; Wan, arXiv 2503.20314)."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        embed_dim = options.embed_dim
        self.num_heads, self.qk_norm = options.num_heads, options.qk_norm
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6) if options.cross_norm else nn.Identity()
        self.q, self.kv = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, 2 * embed_dim)
        self.q_norm, self.k_norm = _build_qk_norm(options), _build_qk_norm(options)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention to text (B, L, C), and add it to x (B, N, C). The mask (B, L) is False for padding."""
        q = rearrange(self.q(self.norm(x)), "b n (h d) -> b h n d", h=self.num_heads)
        k, v = rearrange(self.kv(text), "b l (two h d) -> two b h l d", two=2, h=self.num_heads)
        q = _normalize(self.q_norm, q, v.dtype, self.qk_norm)
        k = _normalize(self.k_norm, k, v.dtype, self.qk_norm)
        mask = None if mask is None else mask[:, None, None]
        attended = softmax_attention(q, k, v, scale=q.shape[-1] ** -0.5, attn_mask=mask)
        return x + self.proj(rearrange(attended, "b h n d -> b n (h d)"))


class DiTBlock(nn.Module):
    """Block of a diffusion transformer.

    Args:
        text: how to attend to text. With "joint", text and patches attend to each other, with separate weights. With
            "cross", patches first attend to patches, and then to text, before the MLP (or after the MLP with
            ``parallel``). With "single", text and patches form one sequence with shared weights. None means no text.
        parallel: see :class:`Stream`.
        last: whether the text that the block returns is unused.
        decay: decay of the linear attention state; see :meth:`lrpe_md.Memory.build_decay`.
    """

    def __init__(
        self, options: BlockOptions, *, text: TextAttention | None = None, parallel: bool = False, last: bool = False,
        decay: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention, self.keep_encoded, self.qk_norm = options.attention, options.keep_encoded, options.qk_norm
        self.normalizer: NormalizerName = options.normalizer
        self.memory, self.decay = options.memory, decay
        self.feature_act: Act | None = options.feature_act
        self.single = text == "single"
        self.image = Stream(options, parallel=parallel)
        self.text = Stream(options, parallel=parallel, last=last) if text == "joint" else None
        self.cross = CrossAttention(options) if text == "cross" else None
        self.num_heads, self.scale = options.num_heads, (options.embed_dim // options.num_heads) ** -0.5

    def forward(self, x: Tensor, text: Tensor | None, c: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return the updated patches and text.

        Args:
            x: patches (B, N - L, C), or (B, N, C) with cross-attention.
            text: text tokens (B, L, C), or None.
            c: conditioning vector (B, C), or (B, 6 C) with shared modulation.
            context: inputs that all blocks share. The mask has shape (B, N), or (B, L) with cross-attention, and is
                False for padding.
        """
        norm = self.norm(context, 0 if text is None else text.shape[1], x.dtype)
        if self.text is not None and text is not None:
            return self._attend_jointly(x, text, c, context, norm)
        length = text.shape[1] if text is not None and self.single else 0
        if text is not None and self.single:
            x = torch.cat([text, x], dim=1)
        (q, k, v), rest = self.image.project(x, c, norm is None)
        x = self.image.update(x, self.attend(q, k, v, context, norm), rest)
        if self.cross is not None and text is not None:
            x = self.cross(x, text, context.attn_mask)
        x = self.image.feed(x, rest)
        return (x[:, length:], x[:, :length]) if length else (x, text)

    def _attend_jointly(
        self, x: Tensor, text: Tensor, c: Tensor, context: Context, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        assert self.text is not None
        length = text.shape[1]
        image, rest = self.image.project(x, c, norm is None)
        first, text_rest = self.text.project(text, c, norm is None)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(first, image, strict=True))
        attended = self.attend(q, k, v, context, norm)
        text = self.text.feed(self.text.update(text, attended[:, :, :length], text_rest), text_rest)
        return self.image.feed(self.image.update(x, attended[:, :, length:], rest), rest), text

    def norm(self, context: Context, length: int, dtype: torch.dtype) -> Norm | None:
        """Return the norm for the encoding to apply to q and k, or None if the norm must run before the encoding."""
        if not takes_norm(context.encoding, self.attention):
            return None
        heads = (self.num_heads, self.num_heads) if self.qk_norm == "heads" else None
        image = norm_of(self.image.q_norm, self.image.k_norm, dtype, heads)
        if self.text is None or image is None or not length:
            return image
        text, positions = norm_of(self.text.q_norm, self.text.k_norm, dtype), context.positions
        if heads or positions is None or positions.prefix != length or positions.suffix:
            return None  # the text has positions, or registers follow it
        return join_norms((text, image))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, norm: Norm | None) -> Tensor:
        """Encode q and k, and return the output of self-attention. All tensors are (B, H, N, D)."""
        encoding, positions = context.encoding, context.positions
        mask = None if self.cross is not None else context.attn_mask
        if self.attention == "linear":
            gate = None if mask is None else mask[:, None]
            return attend_linearly(
                q, k, v, encoding, positions, normalizer=self.normalizer, gate=gate, norm=norm, act=self.feature_act,
                block=context.block_for(self.memory), memory=self.memory,
                decay=None if self.decay is None else self.decay(),
            )  # fmt: skip
        attend = partial(softmax_attention, scale=self.scale, attn_mask=None if mask is None else mask[:, None, None])
        if encoding is None:
            return attend(q, k, v)
        encode = partial(encoding, positions=positions, **({} if norm is None else {"norm": norm}))
        if not self.keep_encoded:
            return attend_encoded(encode, attend, q, k, v)
        q, k = encode(q, k)
        return attend(q, k, v)


def join_norms(groups: Sequence[Norm | None]) -> Norm | None:
    """Combine the per-head norms of prefix, grid and suffix tokens. Return None if they differ or one is missing."""
    norms = [norm for norm in groups if norm is not None and norm.weight is not None]
    if len(norms) < len(groups) or len({(n.kind, n.eps, n.over, n.offset, n.bias is None) for n in norms}) > 1:
        return None
    columns: list[Any] = [[n.weight for n in norms], [n.bias for n in norms if n.bias is not None]]
    weight, bias = (tuple(torch.stack(rows)[:, None] for rows in zip(*pairs, strict=True)) for pairs in columns)
    return norms[0]._replace(weight=weight, bias=bias or None)
