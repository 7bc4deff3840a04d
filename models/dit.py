"""A diffusion transformer for images and videos, with text: adaLN-zero blocks, joint attention, relative positions.

    model = DiT(encoding="rotate", text_encoder=TextEncoder())
    v = model(z, t, tokenize(["a red square"]))       # z (B, C, height, width), t (B,); the rest is in .flow

Text and image have weights of their own in each block and attend to each other in one sequence (MM-DiT, SD3, arXiv
2403.03206); time and pooled text steer the blocks through adaLN-zero (DiT, arXiv 2212.09748). Size and text length are
free at run time.

Forward mode (``torch.func.jvp``, dual numbers) works with respect to every input: the encodings then run the reference,
and attention PyTorch's plain implementation, since the fused ones have no forward mode.

Shapes: B batch, K axes, L text tokens, N tokens (text, then patches), C embed_dim, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lrpe_md import Coordinates, CosineMd, Grid, Tokens
from lrpe_md.engine.linear.call import NormalizerName
from lrpe_md.integrations.attention import Context
from lrpe_md.integrations.encoding import Encoding, EncodingStack, build_encoding
from lrpe_md.presets.scheme import Preset, Scheme

from .joint import JointBlock, TimeEmbedding, modulate, modulation
from .text import Text, TextFeatures, replace_texts

__all__ = ["DiT", "patchify", "unpatchify"]

AXES = {2: ("h", "w"), 3: ("t", "h", "w")}


def patchify(x: Tensor, patch_size: Sequence[int]) -> Tensor:
    """x (B, C, [frames,] height, width) → patches (B, N, C Π patch_size), row-major."""
    axes = AXES[len(patch_size)]
    split = " ".join(f"({a} p{a})" for a in axes)
    pattern = f"b c {split} -> b ({' '.join(axes)}) (c {' '.join(f'p{a}' for a in axes)})"
    return rearrange(x, pattern, **{f"p{a}": p for a, p in zip(axes, patch_size, strict=True)})


def unpatchify(x: Tensor, shape: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """The inverse of :func:`patchify`; shape: of the grid of patches."""
    axes = AXES[len(patch_size)]
    joined = " ".join(f"({a} p{a})" for a in axes)
    pattern = f"b ({' '.join(axes)}) (c {' '.join(f'p{a}' for a in axes)}) -> b c {joined}"
    sizes = dict(zip(axes, shape, strict=True))
    return rearrange(x, pattern, **sizes, **{f"p{a}": p for a, p in zip(axes, patch_size, strict=True)})


class DiT(nn.Module):
    """Velocities of images (B, in_chans, height, width) or videos (B, in_chans, frames, height, width).

    Args:
        num_axes: 2 or 3.
        in_chans: of pixels or latents.
        patch_size: a number for height and width (and 1 for frames), or one an axis.
        embed_dim, depth, num_heads, mlp_ratio: of the blocks.
        encoding, encoding_kwargs: of q and k, see :func:`lrpe_md.integrations.encoding.build_encoding`; a preset
            (flux1, wan, qwen_image, ..) comes with its positions of text and image.
        absolute: "none", or "sincos", added to the patches.
        attention, normalizer: as there; linear takes act="relu" unless told otherwise, and with normalizer="none" puts
            an RMSNorm behind the attention.
        keep_encoded: False keeps no encoded q and k for the backward of softmax attention, which encodes again.
        text_encoder: module that turns the ``text`` of :meth:`forward` into a :class:`lrpe_md.models.text.Text` and
            defines the empty condition. Take one of :mod:`lrpe_md.models.text`, for captions, class labels or
            precomputed features, or write your own as described there. None: an unconditional model.
        text_width, pooled_width: channels of precomputed features, in place of a text_encoder; short for
            :class:`lrpe_md.models.text.TextFeatures`.
        text_positions: where text is, a rule of :class:`lrpe_md.Tokens` or one with its axis and start: "skip" (not
            rotated), "zero", "axis", "diagonal". Default: skip, or as the preset has it.
        image_after: axes on which the image is behind the text; None: it stands at the origin, or as the preset has it.
        interval: condition on t - r, too, for mean velocities (``r`` of :meth:`forward`).

    Attributes:
        reference: may be set at any time. None: one unit a patch (or as the preset has it), beyond the trained size
            extrapolated. One size for each of ``num_axes`` axes, or None for one: positions of that axis are laid over
            a grid of this size, whatever its patches.
        grad_checkpointing: recompute the blocks in the backward.

    Raises:
        ValueError, TypeError: an argument that does not fit.
    """

    def __init__(
        self,
        *,
        num_axes: int = 2,
        in_chans: int = 3,
        patch_size: int | Sequence[int] = 2,
        embed_dim: int = 192,
        depth: int = 8,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        encoding: Encoding = None,
        encoding_kwargs: dict[str, Any] | None = None,
        absolute: Literal["none", "sincos"] = "none",
        attention: Literal["softmax", "linear"] = "softmax",
        normalizer: NormalizerName = "unrotated",
        keep_encoded: bool = True,
        text_encoder: Any = None,
        text_width: int | None = None,
        pooled_width: int = 0,
        text_positions: str | Tokens | None = None,
        image_after: Sequence[int] | None = None,
        interval: bool = False,
    ) -> None:
        super().__init__()
        if num_axes not in AXES:
            raise ValueError(f"num_axes: expected 2 (images) or 3 (videos), got {num_axes}")
        if isinstance(patch_size, int):
            patch_size = (1,) * (num_axes - 2) + (patch_size, patch_size)
        if len(patch_size) != num_axes or min(patch_size) < 1:
            raise ValueError(f"patch_size: expected a size for each of {num_axes} axes, got {tuple(patch_size)}")
        if embed_dim % (2 * num_heads):
            raise ValueError(f"embed_dim: expected a multiple of 2 · num_heads = {2 * num_heads}, got {embed_dim}")
        if absolute not in ("none", "sincos"):
            raise ValueError(f"absolute: expected 'none' or 'sincos', got {absolute!r}")
        if attention not in ("softmax", "linear"):
            raise ValueError(f"attention: expected 'softmax' or 'linear', got {attention!r}")
        self.num_axes, self.in_chans, self.patch_size = num_axes, in_chans, tuple(patch_size)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.reference: tuple[int | None, ...] | None = None
        self.grad_checkpointing = False

        kwargs = dict(encoding_kwargs or {})
        if attention == "linear" and (encoding is None or isinstance(encoding, (str, Preset, Scheme))):
            kwargs.setdefault("act", "relu")
        self.encoding = build_encoding(encoding, kwargs, embed_dim // num_heads, num_heads, depth, num_axes)
        stack = EncodingStack(self.encoding)
        stack.check(num_axes)
        if attention == "linear":
            stack.check_linear(normalizer)
        self._set_rules(text_positions, image_after)

        channels = in_chans * torch.Size(self.patch_size).numel()
        self.embed = nn.Linear(channels, embed_dim)
        self.sincos = CosineMd(embed_dim // 2, num_axes) if absolute == "sincos" else None
        self.time = TimeEmbedding(embed_dim)
        self.interval = TimeEmbedding(embed_dim) if interval else None
        if text_width is not None or pooled_width:
            if text_encoder is not None:
                raise ValueError(
                    "text_width, pooled_width: expected them without a text_encoder, which has its own, got "
                    f"{text_width}, {pooled_width}; leave them out"
                )
            text_encoder = TextFeatures(text_width or 0, pooled_width)
        self.text_encoder = text_encoder
        self.text_width, self.pooled_width = _widths(text_encoder)
        if self.text_width:
            self.text_embed = nn.Linear(self.text_width, embed_dim)
        if self.pooled_width:
            self.pooled_embed = nn.Linear(self.pooled_width, embed_dim)
        self.blocks = nn.ModuleList(
            JointBlock(
                embed_dim, num_heads, mlp_ratio, text=self.text_width > 0, last=i == depth - 1,
                attention=attention, normalizer=normalizer, keep_encoded=keep_encoded,
            )
            for i in range(depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, elementwise_affine=False)
        self.modulation = modulation(embed_dim, 2)
        self.head = nn.Linear(embed_dim, channels)
        self._init_weights()

    def _set_rules(self, text: str | Tokens | None, after: Sequence[int] | None) -> None:
        self.preset = EncodingStack(self.encoding).preset
        if self.preset is not None and (text is not None or after is not None):
            raise ValueError(
                f"text_positions, image_after: the preset {self.preset.name} brings its own, expected None, "
                f"got {text!r}, {after!r}"
            )
        self.text_positions = text if isinstance(text, Tokens) else Tokens(0, text or "skip")  # pyright: ignore[reportArgumentType]
        self.image_after = tuple(after) if after is not None else self.preset and self.preset.scheme.after
        self.positions((2,) * self.num_axes, 1)  # checks them

    def _init_weights(self) -> None:
        """DiT's: the blocks begin as the identity, the output as zero."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("text_encoder."):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for embedding in (self.time, self.interval):
            if embedding is not None:
                nn.init.normal_(embedding.mlp.fc1.weight, std=0.02)
                nn.init.normal_(embedding.mlp.fc2.weight, std=0.02)
        for name, module in self.named_modules():
            if name.split(".")[-1] == "modulation":
                module.apply(_zero)
        _zero(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Frequencies and phases, and the table of bytes."""
        table = {name for name, _ in self.named_parameters() if name.endswith("text_encoder.embed.weight")}
        return table | EncodingStack(self.encoding).no_weight_decay(self)

    def positions(
        self, shape: Sequence[int], length: int = 0, device: torch.device | str = "cpu", mask: Tensor | None = None
    ) -> Grid | Coordinates:
        """Return the positions of ``length`` text tokens, and after them those of the patches of a grid.

        mask: (B, L), False for padding: an image behind the text then begins where the text of its sample ends.
        """
        before = length if self.preset is not None else replace(self.text_positions, length=length)
        stack = EncodingStack(self.encoding)
        placed = stack.lay_out(shape, before, after=self.image_after, reference=self.reference, device=device)
        if not self.image_after or mask is None or isinstance(placed, Grid):
            return placed
        padding = length - mask.sum(1)
        behind = torch.zeros_like(placed.coords)
        behind[length:, list(self.image_after)] = 1
        coords = placed.coords - padding[:, None, None] * behind
        return Coordinates(coords, rotated=None if placed.rotated is None else placed.rotated.expand(coords.shape[:2]))

    def encode_text(self, text: Any) -> Text:
        """Encode the condition once, for :meth:`forward` at many times.

        Args:
            text: what the text_encoder takes, or a :class:`lrpe_md.models.text.Text`, which is checked and returned.

        Raises:
            ValueError, TypeError: no text_encoder, or features that are not of its widths.
        """
        if self.text_encoder is None:
            raise ValueError(
                "text: expected None, the model has no text_encoder; make it with one, or with text_width="
            )
        encoded = text if isinstance(text, Text) else self.text_encoder(text)
        if not isinstance(encoded, Text):
            raise TypeError(
                "text_encoder: expected it to return a lrpe_md.models.text.Text(features, mask, pooled), got "
                f"{type(encoded).__name__}; for a model of transformers use PretrainedEncoder"
            )
        for name, value, width in (
            ("features", encoded.features, self.text_width), ("pooled", encoded.pooled, self.pooled_width),
        ):  # fmt: skip
            found = 0 if value is None else value.shape[-1]
            if found != width:
                raise ValueError(
                    f"text: expected {name} of {width} channels, as the text_encoder says, got {found or None}; make "
                    "the model with text_width= and pooled_width= of your features"
                )
        return encoded if encoded.mask is None else encoded._replace(mask=encoded.mask.bool())

    def empty_text(self, batch: int, like: Any = None) -> Text:
        """Return empty conditions for a batch, as the text_encoder defines them.

        Args:
            like: the text that they replace. If the encoder has no method ``empty``, a
                :class:`lrpe_md.models.text.Text` is emptied by zeros.

        Raises:
            TypeError: an encoder without a method ``empty``.
        """
        empty = getattr(self.text_encoder, "empty", None)
        if empty is not None or self.text_encoder is None:
            return self.encode_text(None if empty is None else empty(batch))
        if isinstance(like, Text):
            return like.zeros(batch)
        raise TypeError(
            "text_encoder: expected a method empty(batch) that returns the inputs, or the Text, of empty conditions, "
            f"got {type(self.text_encoder).__name__} without one; add it, or pass text, and negative= for guidance"
        )

    def forward(
        self, x: Tensor, t: Tensor, text: Any = None, r: Tensor | None = None, drop: Tensor | None = None
    ) -> Tensor:
        """Return the velocity at x (B, in_chans, [frames,] height, width) and t (B,), like x.

        Args:
            text: what the text_encoder takes, as tokens (B, L) or labels (B,), or what :meth:`encode_text` made of it;
                None: the empty condition.
            r: (B,), the end of the interval of a mean velocity; default: t.
            drop: (B,) bool, True for samples whose condition is emptied. Guidance needs a tenth of them in training.
        """
        shape = self._grid_shape(x, t)
        c = self.time(t)
        if self.interval is not None:
            c = c + self.interval(torch.zeros_like(t) if r is None else t - r)
        elif r is not None:
            raise ValueError("r: expected None, the model is not conditioned on it; make it with interval=True")
        tokens = self.embed(patchify(x, self.patch_size)).to(x.dtype)  # what blocks add to is x's, also under autocast
        if self.sincos is not None:
            grid = Grid(shape) if self.reference is None else Grid(shape).interpolate(self.reference)
            ones = torch.ones(1, 1, tokens.shape[1], self.embed_dim // 2, dtype=x.dtype, device=x.device)
            tokens = tokens + self.sincos(ones, positions=grid)[0]

        features, mask, pooled = self._condition(text, drop, x.shape[0])
        if features is not None:
            features = self.text_embed(features.to(self.text_embed.weight.dtype)).to(x.dtype)
        if pooled is not None:
            c = c + self.pooled_embed(pooled.to(self.pooled_embed.weight.dtype))
        length = 0 if features is None else features.shape[1]
        positions: Any = None if self.encoding is None else self.positions(shape, length, x.device, mask)
        if mask is not None:
            mask = nn.functional.pad(mask, (0, tokens.shape[1]), value=True)

        stack = EncodingStack(self.encoding)
        positions = stack.locate(positions)
        for i, block in enumerate(self.blocks):
            args = tokens, features, c, Context(stack[i], positions, mask)
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens, features = checkpoint(block, *args, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
            else:
                tokens, features = block(*args)
        shift, scale = self.modulation(c).chunk(2, dim=-1)
        return unpatchify(self.head(modulate(self.norm(tokens), shift, scale)), shape, self.patch_size)

    def _condition(self, text: Any, drop: Tensor | None, batch: int) -> Text:
        """Return the condition of each sample, emptied where ``drop`` is True."""
        if self.text_encoder is None and text is None:
            if drop is not None:
                raise ValueError("drop: expected None, the model has no text_encoder; make it with one")
            return Text(None)
        if text is None:
            return self.empty_text(batch)
        if drop is not None and (drop.dtype != torch.bool or drop.shape != (batch,)):
            raise ValueError(f"drop: expected bool ({batch},), got {drop.dtype} {tuple(drop.shape)}")
        drop_inputs = getattr(self.text_encoder, "drop", None)
        if drop is not None and drop_inputs is not None and not isinstance(text, Text):
            text, drop = drop_inputs(text, drop), None
        encoded = self.encode_text(text)
        if encoded.batch_size != batch:
            raise ValueError(f"text: expected one for each of {batch} samples, got {encoded.batch_size}")
        return encoded if drop is None else replace_texts(encoded, self.empty_text(1, text), drop)

    def _grid_shape(self, x: Tensor, t: Tensor) -> tuple[int, ...]:
        """Return the shape of the grid of patches."""
        if x.ndim != 2 + self.num_axes or x.shape[1] != self.in_chans:
            raise ValueError(
                f"x: expected (B, {self.in_chans}, {', '.join(['frames', 'height', 'width'][-self.num_axes :])}), "
                f"got {tuple(x.shape)}"
            )
        if t.ndim != 1 or t.shape[0] != x.shape[0] or not t.is_floating_point():
            raise ValueError(f"t: expected floats ({x.shape[0]},), one a sample, got {t.dtype} {tuple(t.shape)}")
        if any(n % p for n, p in zip(x.shape[2:], self.patch_size, strict=True)):
            raise ValueError(f"x: expected sizes in multiples of {self.patch_size}, got {tuple(x.shape[2:])}")
        return tuple(n // p for n, p in zip(x.shape[2:], self.patch_size, strict=True))


def _widths(encoder: Any) -> tuple[int, int]:
    """Return the channels of an encoder's features and pooled features."""
    if encoder is None:
        return 0, 0
    width = getattr(encoder, "width", None)
    pooled = getattr(encoder, "pooled_width", width)
    if not isinstance(width, int) or not isinstance(pooled, int) or width < 0 or pooled < 0:
        raise TypeError(
            "text_encoder: expected attributes width and pooled_width, the channels of its features (pooled_width is "
            f"width unless given), got {type(encoder).__name__} with {width!r}, {pooled!r}; for a model of "
            "transformers use lrpe_md.models.text.PretrainedEncoder"
        )
    return width, pooled


def _zero(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
