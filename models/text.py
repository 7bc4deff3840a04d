"""Captions as bytes, and a small encoder of them, trained with its model: nothing to download.

Shapes: B batch, L tokens of text, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from timm.layers.norm import RmsNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lrpe_md import Grid, RotateMd
from lrpe_md.integrations.attention import Context
from lrpe_md.integrations.timm import LrpeAttention

__all__ = ["PAD", "START", "Text", "TextEncoder", "drop_text", "tokenize"]

PAD, START = 0, 1
NUM_TOKENS = 2 + 256


class Text(NamedTuple):
    """What a model is told about a text.

    features (B, L, C), mask (B, L) with False for padding, or None where there is none, pooled (B, C).
    """

    features: Tensor
    mask: Tensor | None
    pooled: Tensor


def tokenize(captions: Sequence[str], max_length: int = 64, device: torch.device | str = "cpu") -> Tensor:
    """START and the UTF-8 bytes of each caption, cut at ``max_length`` tokens, the shorter ones padded: (B, L) int64.

    Raises:
        TypeError: a single string, something else than strings.
        ValueError: no caption, a max_length below 1.
    """
    if isinstance(captions, str) or not all(isinstance(caption, str) for caption in captions):
        raise TypeError(f"captions: expected a sequence of strings, got {captions!r}")
    if not captions or max_length < 1:
        raise ValueError(f"captions, max_length: expected at least one each, got {len(captions)}, {max_length}")
    rows = [torch.tensor([START, *(2 + byte for byte in c.encode())][:max_length]) for c in captions]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)


def drop_text(tokens: Tensor, where: Tensor | bool = True) -> Tensor:
    """Empty captions instead of those ``where`` (B,) says, padded to the same length: (B, L)."""
    where = torch.as_tensor(where, device=tokens.device).expand(tokens.shape[0])
    return torch.where(where[:, None] & (tokens != START), PAD, tokens)


class TextEncoder(nn.Module):
    """Tokens (B, L) of :func:`tokenize` → :class:`Text` of the same length: a transformer with RoPE on one axis.

    What is padded does not change what the others become. ``pooled`` is the START token.

    Args:
        width: C.
        depth, num_heads, mlp_ratio: of the blocks, timm's with RMSNorm and qk-norm.
    """

    def __init__(self, width: int = 192, depth: int = 2, num_heads: int = 3, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        if width % (2 * num_heads):
            raise ValueError(f"width: expected a multiple of 2 · num_heads = {2 * num_heads}, got {width}")
        self.width = width
        self.embed = nn.Embedding(NUM_TOKENS, width, padding_idx=PAD)
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        self.encoding = RotateMd(width // num_heads, 1)
        self.blocks = nn.ModuleList(
            Block(
                width, num_heads, mlp_ratio, qkv_bias=True, qk_norm=True, norm_layer=RmsNorm, attn_layer=LrpeAttention
            )
            for _ in range(depth)
        )
        self.norm = RmsNorm(width)

    def forward(self, tokens: Tensor) -> Text:
        """Tokens (B, L) → features (B, L, C), mask (B, L), pooled (B, C)."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"text: expected integer tokens (B, L), got {tokens.dtype} {tuple(tokens.shape)}")
        mask = tokens != PAD
        context = Context(self.encoding, Grid((tokens.shape[1],)), mask[:, None, None])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attn_mask=context)
        x = self.norm(x)
        return Text(x, mask, x[:, 0])
