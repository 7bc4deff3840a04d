"""Conditions of a diffusion model, such as captions, class labels or precomputed features.

An encoder is an ``nn.Module`` that turns its inputs into a :class:`Text` and defines the empty condition:

    class Labels(nn.Module):
        width = 64                                   # channels of the features; 0: no features
        pooled_width = 64                            # channels of the pooled features; default: width

        def forward(self, labels): ...               # return a Text of B samples
        def empty(self, batch): ...                  # return empty conditions: inputs of forward, or a Text
        def drop(self, labels, where): ...           # optional: return the inputs, empty if where (B,) is True

:class:`TextEncoder` reads captions as bytes and is trained together with the model. Use :class:`LabelEncoder` for
classes, :class:`PretrainedEncoder` for T5, CLIP and other models from transformers, and :class:`TextFeatures` for
precomputed features.

Shapes: B batch, L tokens of text, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.layers.norm import RmsNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lrpe_md import Grid, RotateMd
from lrpe_md.checks import can_read, check_at_least
from lrpe_md.integrations.attention import Context
from lrpe_md.integrations.timm import LrpeAttention

__all__ = [
    "PAD", "START", "LabelEncoder", "PretrainedEncoder", "Text", "TextEncoder", "TextFeatures", "join_texts",
    "replace_texts", "tokenize",
]  # fmt: skip

PAD, START = 0, 1
NUM_TOKENS = 2 + 256


class Text(NamedTuple):
    """Text conditions of a batch of B samples.

    Args:
        features: text tokens (B, L, C) for patches to attend to, or None.
        mask: mask (B, L), which is False or 0 for padding, or None if there is no padding.
        pooled: pooled features (B, P) to add to the time embedding, or None.
    """

    features: Tensor | None
    mask: Tensor | None = None
    pooled: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return next((t.shape[0] for t in (self.features, self.pooled) if t is not None), 0)

    def zeros(self, batch: int) -> Text:
        """Return one all-zero token, the default empty condition for precomputed features (SD3, arXiv 2403.03206)."""
        features = None if self.features is None else self.features.new_zeros(batch, 1, self.features.shape[2])
        return Text(features, None, None if self.pooled is None else self.pooled.new_zeros(batch, self.pooled.shape[1]))


def join_texts(first: Text, second: Text) -> Text:
    """Pad two sequences of text tokens to the same length, and concatenate them along the batch."""
    (a, mask, p), (b, other, r) = _padded_alike(first, second)
    return Text(
        None if a is None or b is None else torch.cat([a, b]),
        None if mask is None or other is None else torch.cat([mask, other]),
        None if p is None or r is None else torch.cat([p, r]),
    )


def replace_texts(text: Text, other: Text, where: Tensor) -> Text:
    """Replace samples of ``text`` with those of ``other`` (B or 1 samples) where the mask ``where`` (B,) is True."""
    (a, mask, p), (b, other_mask, r) = _padded_alike(text, other)
    rows = where[:, None]
    return Text(
        None if a is None or b is None else torch.where(rows[..., None], b.to(a.dtype), a),
        None if mask is None or other_mask is None else torch.where(rows, other_mask, mask),
        None if p is None or r is None else torch.where(rows, r.to(p.dtype), p),
    )


def _padded_alike(first: Text, second: Text) -> tuple[Text, Text]:
    """Pad the shorter text to the length of the longer one, and make sure that either both or neither have a mask."""
    if first.features is None or second.features is None:
        return first, second
    length = max(first.features.shape[1], second.features.shape[1])
    same = first.features.shape[1] == second.features.shape[1]
    if same and first.mask is None and second.mask is None:
        return first, second
    return _padded(first, length), _padded(second, length)


def _padded(text: Text, length: int) -> Text:
    features: Any = text.features
    missing = length - features.shape[1]
    mask = text.mask
    if mask is None:
        mask = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    pad = nn.functional.pad
    return Text(pad(features, (0, 0, 0, missing)), pad(mask.bool(), (0, missing), value=False), text.pooled)


def tokenize(captions: Sequence[str], max_length: int = 64, device: torch.device | str = "cpu") -> Tensor:
    """Convert captions to int64 tokens (B, L): START and then UTF-8 bytes, truncated to ``max_length`` and padded.

    Raises:
        TypeError: for a single string, or a caption that is not a string.
        ValueError: if there are no captions, or max_length is below 1.
    """
    if isinstance(captions, str) or not all(isinstance(caption, str) for caption in captions):
        raise TypeError(f"captions: expected a sequence of strings, got {captions!r}")
    if not captions or max_length < 1:
        raise ValueError(
            f"captions, max_length: expected at least one caption and a positive max_length, got {len(captions)}, "
            f"{max_length}"
        )
    rows = [torch.tensor([START, *(2 + byte for byte in c.encode())][:max_length]) for c in captions]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)


class TextEncoder(nn.Module):
    """Transformer with 1D RoPE that encodes tokens (B, L) from :func:`tokenize` as a :class:`Text` of length L.

    Padding does not affect other tokens. ``pooled`` is the output for the START token, which is the only token of an
    empty caption.

    Args:
        width: number of channels C.
        depth, num_heads, mlp_ratio: sizes of timm's blocks, which have RMSNorm and qk-norm.
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
        """Encode tokens (B, L) as features (B, L, C), a mask (B, L) and pooled features (B, C)."""
        if not isinstance(tokens, Tensor):
            raise ValueError(
                f"text: expected tokens of shape (B, L), got {type(tokens).__name__}; pass tokenize(captions)"
            )
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"text: expected integer tokens of shape (B, L), got {tokens.dtype} {tuple(tokens.shape)}")
        mask = tokens != PAD
        context = Context(self.encoding, Grid((tokens.shape[1],)), mask[:, None, None])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attn_mask=context)
        x = self.norm(x)
        return Text(x, mask, x[:, 0])

    def empty(self, batch: int) -> Tensor:
        """Return the tokens (B, 1) of empty captions."""
        return torch.full((batch, 1), START, device=self.embed.weight.device)

    def drop(self, tokens: Tensor, where: Tensor) -> Tensor:
        """Replace captions with empty ones where the mask ``where`` (B,) is True. The shape stays the same."""
        return torch.where(where[:, None] & (tokens != START), PAD, tokens)


class LabelEncoder(nn.Module):
    """Encoder that turns class labels (B,) into a :class:`Text` with only pooled features (DiT, arXiv 2212.09748).

    Args:
        num_classes: number of classes. Labels range from 0 to num_classes - 1. The embedding table has an additional
            row for the empty condition.
        width: number of channels P of the pooled features.
    """

    def __init__(self, num_classes: int, width: int = 192) -> None:
        super().__init__()
        check_at_least(1, num_classes=num_classes, width=width)
        self.num_classes, self.width, self.pooled_width = num_classes, 0, width
        self.embed = nn.Embedding(num_classes + 1, width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, labels: Tensor) -> Text:
        """Look up the pooled features (B, P) of labels (B,)."""
        if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
            got = f"{type(labels).__name__}; pass torch.tensor of class numbers"
            if isinstance(labels, Tensor):
                got = f"{labels.dtype} {tuple(labels.shape)}"
            raise ValueError(f"text: expected integer class labels of shape (B,), got {got}")
        if can_read(labels) and bool(((labels < 0) | (labels > self.num_classes)).any()):
            least, most = int(labels.min()), int(labels.max())
            raise ValueError(
                f"text: expected class labels from 0 to {self.num_classes - 1}, or {self.num_classes} for no class, "
                f"got {least if least == most else f'{least} to {most}'}"
            )
        return Text(None, None, self.embed(labels))

    def empty(self, batch: int) -> Tensor:
        """Return the labels (B,) of the empty condition."""
        return torch.full((batch,), self.num_classes, device=self.embed.weight.device)

    def drop(self, labels: Tensor, where: Tensor) -> Tensor:
        """Replace labels (B,) with the label of the empty condition where the mask ``where`` (B,) is True."""
        return torch.where(where, self.num_classes, labels)


class TextFeatures(nn.Module):
    """Encoder for precomputed features, such as those of T5 or CLIP. The input, a :class:`Text`, is returned unchanged.

    Args:
        width: number of channels C. With 0, there are only pooled features.
        pooled_width: number of channels P of pooled features. With 0, there are no pooled features.
        empty: :class:`Text` of a single empty caption, from the encoder that computed the features. This :class:`Text`
            is saved with the model. The default is a single token of zeros, with zeros as pooled features.
    """

    empty_features: Tensor | None
    empty_mask: Tensor | None
    empty_pooled: Tensor | None

    def __init__(self, width: int, pooled_width: int = 0, empty: Text | None = None) -> None:
        super().__init__()
        check_at_least(0, width=width, pooled_width=pooled_width)
        self.width, self.pooled_width = width, pooled_width
        if empty is None:
            pooled = torch.zeros(1, pooled_width) if pooled_width else None
            empty = Text(torch.zeros(1, 1, width) if width else None, None, pooled)
        if not isinstance(empty, Text) or empty.batch_size != 1:
            found = f"batch size {empty.batch_size}" if isinstance(empty, Text) else type(empty).__name__
            raise ValueError(f"empty: expected a Text with batch size 1 (the encoded empty caption), got {found}")
        for name, value in empty._asdict().items():
            self.register_buffer(
                f"empty_{name}", None if value is None else value.detach().clone(memory_format=torch.contiguous_format)
            )

    def forward(self, text: Text) -> Text:
        """Return the features unchanged."""
        if not isinstance(text, Text):
            raise TypeError(
                "text: expected precomputed features as an lrpe_md.models.text.Text(features, mask, pooled), got "
                f"{type(text).__name__}"
            )
        return text

    def empty(self, batch: int) -> Text:
        """Return the features of empty captions."""
        own = self.empty_features, self.empty_mask, self.empty_pooled
        return Text(*(None if t is None else t.expand(batch, *t.shape[1:]) for t in own))


class PretrainedEncoder(nn.Module):
    """Encoder of captions with a frozen text model from transformers, such as T5EncoderModel or CLIPTextModel.

    The encoder's weights become part of the diffusion model and of its checkpoints. If the text model is large,
    precompute the features. Pass the result of ``PretrainedEncoder(model, tokenizer)(captions)`` to a model with
    :class:`TextFeatures`.

    Args:
        model: text model that returns ``last_hidden_state`` and, optionally, ``pooler_output``.
        tokenizer: the model's tokenizer.
        max_length: maximum number of tokens per caption.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int = 77) -> None:
        super().__init__()
        check_at_least(1, max_length=max_length)
        self.model, self.tokenizer, self.max_length = model.requires_grad_(False).eval(), tokenizer, max_length
        features, _, pooled = self(self.empty(1))
        self.width = features.shape[-1]
        self.pooled_width = 0 if pooled is None else pooled.shape[-1]

    def train(self, mode: bool = True) -> PretrainedEncoder:
        """Set training or evaluation mode, but keep the text model in evaluation mode."""
        super().train(mode)
        self.model.eval()
        return self

    @torch.no_grad()
    def forward(self, captions: Sequence[str]) -> Text:
        """Encode B captions without gradients. Pooled features are None if the text model has none."""
        if isinstance(captions, str) or not all(isinstance(caption, str) for caption in captions):
            raise TypeError(f"text: expected a sequence of captions, got {captions!r}")
        tokens = self.tokenizer(
            list(captions), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt",
            return_attention_mask=True,
        )  # fmt: skip
        if not tokens["input_ids"].shape[1]:
            raise ValueError(
                "tokenizer: expected at least one token for an empty caption, got none; use a tokenizer that adds a "
                "special token to each caption"
            )
        tokens = {name: value.to(next(self.model.parameters()).device) for name, value in tokens.items()}
        out = self.model(**tokens)
        return Text(out.last_hidden_state, tokens["attention_mask"].bool(), getattr(out, "pooler_output", None))

    def empty(self, batch: int) -> list[str]:
        """Return empty captions."""
        return [""] * batch

    def drop(self, captions: Sequence[str], where: Tensor) -> list[str]:
        """Replace captions with empty ones where the mask ``where`` (B,) is True."""
        return ["" if out else caption for caption, out in zip(captions, where.tolist(), strict=True)]
