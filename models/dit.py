"""A diffusion transformer for images and videos, with text, adaLN-zero blocks and relative position encodings.

    model = DiT(encoding="rotate", text_encoder=TextEncoder())
    v = model(z, t, tokenize(["a red square"]))       # z (B, C, height, width), t (B,); losses and sampling: .flow

Text takes part in the self-attention of patches, or patches attend to text with cross-attention. Blocks are conditioned
on time and pooled text through adaLN-zero (DiT, arXiv 2212.09748). Image size and text length may change from call to
call. The options can reproduce the blocks of published models, and ``DiT.from_name("XL/2", ...)`` uses a published
size.

Forward-mode differentiation (``torch.func.jvp``, dual numbers) works with respect to all inputs. In forward mode,
encodings use the reference implementation, and attention uses PyTorch's plain implementation, because fused kernels
don't support forward mode.

Shapes: B batch, K axes, L text tokens, R registers, N tokens (text, then registers and patches), C embed_dim, H heads,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lrpe_md import Coordinates, CosineMd, Grid, Tokens
from lrpe_md.checks import check_at_least, check_one_of, is_finite_number, repeat_over_layers
from lrpe_md.engine.core.call import Act
from lrpe_md.engine.linear.call import NormalizerName
from lrpe_md.integrations.attention import (
    ATTENTIONS,
    AttentionKind,
    Context,
    check_key_norm,
    check_memory,
    weight_dtype,
)
from lrpe_md.integrations.encoding import Encoding, EncodingStack, build_for_layers, explain_misplaced_options
from lrpe_md.modules.linear import Memory
from lrpe_md.positions.coordinates import larger, smaller
from lrpe_md.positions.sequences import RULES

from .blocks import (
    BlockOptions,
    DiTBlock,
    ModulationTable,
    TextAttention,
    TimeEmbedding,
    build_norm,
    modulate,
    modulation,
)
from .flow import check_times
from .text import Text, TextFeatures, replace_texts

__all__ = ["SIZES", "DiT", "TrainedGrids", "patchify", "unpatchify"]

Reference = Sequence[int | None] | None
# Wide enough for other parametrisations of time, such as ln(σ) / 4, but not for timesteps up to 1000.
TIME_LIMITS = (-10.0, 10.0)
AXES = {2: ("h", "w"), 3: ("t", "h", "w")}
SIZES = {  # DiT, arXiv 2212.09748, table 1
    "S": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "B": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "L": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "XL": {"embed_dim": 1152, "depth": 28, "num_heads": 16},
}


def patchify(x: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Split x (B, C, [frames,] height, width) into patches (B, N, C Π patch_size), in row-major order."""
    axes = AXES[len(patch_size)]
    split = " ".join(f"({a} p{a})" for a in axes)
    pattern = f"b c {split} -> b ({' '.join(axes)}) (c {' '.join(f'p{a}' for a in axes)})"
    return rearrange(x, pattern, **{f"p{a}": p for a, p in zip(axes, patch_size, strict=True)})


def unpatchify(x: Tensor, shape: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """Undo :func:`patchify`. ``shape`` is the shape of the patch grid."""
    axes = AXES[len(patch_size)]
    joined = " ".join(f"({a} p{a})" for a in axes)
    pattern = f"b ({' '.join(axes)}) (c {' '.join(f'p{a}' for a in axes)}) -> b c {joined}"
    sizes = dict(zip(axes, shape, strict=True))
    return rearrange(x, pattern, **sizes, **{f"p{a}": p for a, p in zip(axes, patch_size, strict=True)})


def check_input(x: Tensor, in_chans: int, num_axes: int) -> None:
    """Check that x is (B, in_chans, [frames,] height, width), and suggest a fix if the channels are elsewhere."""
    if x.ndim == 2 + num_axes and x.shape[1] == in_chans:
        return
    axis = next((i for i in range(2, x.ndim) if x.shape[i] == in_chans), None) if x.ndim == 2 + num_axes else None
    raise ValueError(
        f"x: expected shape (B, {in_chans}, {', '.join(['frames', 'height', 'width'][-num_axes:])}), got "
        f"{tuple(x.shape)}" + ("" if axis is None else f"; if axis {axis} has the channels, pass x.movedim({axis}, 1)")
    )


@dataclass(frozen=True)
class TrainedGrids:
    """Rule for ``DiT.reference``: map positions onto a grid with the image's aspect ratio and the trained area.

    Images that are larger than in training are mapped onto the largest trained area, and smaller images onto the
    smallest trained area. Images with an area in between keep one unit per patch. Frames always keep one unit per
    patch.

    Args:
        sides: side lengths of the square training images, in patches.
    """

    sides: tuple[float, ...]

    def __post_init__(self) -> None:
        sides = self.sides if isinstance(self.sides, Sequence) else ()
        if not sides or not all(isinstance(side, (int, float)) and side > 0 for side in sides):
            raise ValueError(f"sides: expected positive numbers, such as (8,), got {self.sides!r}")

    def __call__(self, shape: Sequence[int]) -> Reference:
        """Return the reference for a patch grid ([frames,] height, width)."""
        *frames, height, width = shape
        side = (height * width) ** 0.5  # math.sqrt of symbolic sizes would be fixed in an exported program
        trained = smaller(larger(side, min(self.sides)), max(self.sides))
        if type(side) is float and height == width == trained:  # not in an export, where a branch would be fixed
            return None
        return *(None for _ in frames), *(larger(1, round(trained * n / side)) for n in (height, width))


class DiT(nn.Module):
    """Diffusion transformer for images (B, in_chans, height, width) or videos (B, in_chans, frames, height, width).

    Args:
        num_axes: number of axes, 2 for images and 3 for videos.
        in_chans: number of input channels (of pixels or latents).
        out_chans: number of output channels. Default: in_chans.
        patch_size: one number for height and width (with 1 for frames), or one number for each axis.
        embed_dim, depth, num_heads: width, number of blocks and number of heads; see :meth:`from_name`.
        mlp, mlp_ratio: type of the MLPs, "gelu", "gelu_tanh" (with the tanh approximation) or "swiglu", and their
            hidden width as a multiple of embed_dim.
        norm: "layer" (LayerNorm without weights) or "rms" (RMSNorm with weights).
        qk_norm: "head" or "heads" applies RMSNorm to q and k over each head or over all heads. "none" disables the
            norm.
        modulation: with "block", each block has its own MLP that computes shifts, scales and gates from the time. With
            "shared", all blocks share one MLP, and each block learns offsets (adaLN-single, PixArt-α, arXiv
            2310.00426).
        parallel: whether to run a block's attention and MLP in parallel on the same input (ViT-22B, arXiv 2302.05442).
            Pass one value, or a sequence that repeats over the blocks.
        reg_tokens: number of register tokens, which are not rotated.
        encoding, encoding_kwargs: encoding of q and k; see :func:`lrpe_md.integrations.encoding.build_encoding`. A
            preset (flux1, wan, qwen_image, ...) also defines the positions of text and image.
        absolute: absolute position embedding to add to the patches, "none", "sincos", or "sincos_dit" (with the channel
            order that DiT's and PixArt's weights expect).
        attention, normalizer: "softmax" or "linear"; see :func:`lrpe_md.linear_attention`. Pass one value, or a
            sequence that repeats over the blocks, such as ("linear", "linear", "linear", "softmax"). Linear layers
            default to act="relu". With normalizer="none", linear layers add an RMSNorm after the attention.
            Cross-attention always uses softmax.
        memory: a :class:`lrpe_md.Memory` with directions="both" to define how linear layers forget other frames. This
            requires videos (``num_axes=3``) and text_attention="cross", because text in the sequence would also be
            forgotten.
        keep_encoded: if False, softmax attention re-encodes q and k in the backward pass instead of storing them.
        text_encoder: module that turns the ``text`` of :meth:`forward` into a :class:`lrpe_md.models.text.Text` and
            defines the empty condition. Use an encoder from :mod:`lrpe_md.models.text` (for captions, class labels or
            precomputed features), or write your own as that module describes. None builds an unconditional model.
        text_width, pooled_width: number of channels of precomputed features. This is a shorthand for passing
            :class:`lrpe_md.models.text.TextFeatures` as text_encoder.
        text_attention: with "joint", text and patches attend to each other, with separate weights (MM-DiT, SD3). With
            "single", text and patches form one sequence with shared weights. With "cross", patches first attend to
            patches and then to text. Pass one value, or a sequence that repeats over the blocks. FLUX uses "joint"
            blocks followed by "single" blocks.
        cross_norm: whether to apply a LayerNorm before cross-attention.
        text_projection: projection of text features to embed_dim, "linear", or "mlp" with one hidden layer.
        pooled_projection: projection of pooled features. "none" adds them unchanged to the time embedding (DiT's class
            labels).
        text_positions: rule for the positions of text, "skip" (not rotated), "zero", "axis" or "diagonal", or a
            :class:`lrpe_md.Tokens` with a rule, an axis and a start. The default is the preset's rule, or "skip".
        image_after: axes on which the image continues after the text. With None, the image starts at the origin, or
            where the preset places it.
        interval: whether to condition on t - r as well, to predict mean velocities; see ``r`` in :meth:`forward`.

    Attributes:
        reference: size of the grid to which positions are interpolated: None, one number, or one entry per axis. None
            extrapolates with one unit per patch, or with the preset's rule. You can also set a function that maps the
            shape of the patch grid to such a size, for example a :class:`TrainedGrids`. You can change the reference at
            any time.
        prediction: what the model predicts, "velocity", "noise" or "sample". The losses and samplers in :mod:`.flow`
            use this prediction by default. You can change the prediction at any time.
        grad_checkpointing: whether to recompute the blocks in the backward pass.

    Raises:
        ValueError, TypeError: for an invalid argument.
    """

    @explain_misplaced_options
    def __init__(
        self,
        *,
        num_axes: int = 2,
        in_chans: int = 3,
        out_chans: int | None = None,
        patch_size: int | Sequence[int] = 2,
        embed_dim: int = 192,
        depth: int = 8,
        num_heads: int = 3,
        mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu",
        mlp_ratio: float = 4.0,
        norm: Literal["layer", "rms"] = "layer",
        qk_norm: Literal["head", "heads", "none"] = "head",
        modulation: Literal["block", "shared"] = "block",
        parallel: bool | Sequence[bool] = False,
        reg_tokens: int = 0,
        encoding: Encoding = None,
        encoding_kwargs: dict[str, Any] | None = None,
        absolute: Literal["none", "sincos", "sincos_dit"] = "none",
        attention: AttentionKind | Sequence[AttentionKind] = "softmax",
        normalizer: NormalizerName = "unrotated",
        memory: Memory | None = None,
        keep_encoded: bool = True,
        text_encoder: Any = None,
        text_width: int | None = None,
        pooled_width: int = 0,
        text_attention: TextAttention | Sequence[TextAttention] = "joint",
        cross_norm: bool = True,
        text_projection: Literal["linear", "mlp"] = "linear",
        pooled_projection: Literal["linear", "mlp", "none"] = "linear",
        text_positions: str | Tokens | None = None,
        image_after: Sequence[int] | None = None,
        interval: bool = False,
    ) -> None:
        super().__init__()
        options = BlockOptions(
            embed_dim, num_heads, mlp_ratio, mlp, norm, qk_norm, modulation, cross_norm, normalizer=normalizer,
            keep_encoded=keep_encoded,
        )  # fmt: skip
        _check_options(options, absolute=absolute, reg_tokens=reg_tokens, depth=depth)
        self.num_axes, self.in_chans, self.out_chans = num_axes, in_chans, in_chans if out_chans is None else out_chans
        self.patch_size = _check_patch_size(num_axes, patch_size)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.reference: Reference | Callable[[Sequence[int]], Reference] = None
        self.prediction: Literal["velocity", "noise", "sample"] = "velocity"

        self.num_registers, self.grad_checkpointing = reg_tokens, False
        texts = repeat_over_layers("text_attention", text_attention, depth, ("joint", "cross", "single"))
        kinds: tuple[AttentionKind, ...] = repeat_over_layers("attention", attention, depth, ATTENTIONS)
        self.cross, self.memory = "cross" in texts, memory
        options = options._replace(feature_act=self._set_encoding(encoding, encoding_kwargs or {}, kinds, normalizer))
        self._set_rules(text_positions, image_after)
        self._set_inputs(absolute, interval)
        self._set_conditions(text_encoder, text_width, pooled_width, (text_projection, pooled_projection))
        self._check_text_attention(texts)
        self._check_memory(kinds, texts, qk_norm)
        side_by_side = repeat_over_layers("parallel", parallel, depth, (False, True))
        own = [options._replace(attention=kind, memory=memory if kind == "linear" else None) for kind in kinds]
        self._set_blocks(own, texts, side_by_side)
        self._init_weights()

    @classmethod
    def from_name(cls, name: str, **kwargs: Any) -> DiT:
        """Build a model of a published size, such as ``DiT.from_name("XL/2", encoding="rotate")``.

        Args:
            name: size ("S", "B", "L" or "XL"), a slash, and the patch size.
            kwargs: arguments of the class, which override the sizes that the name implies.

        Raises:
            ValueError: for an unknown name.
        """
        size, _, patch_size = name.partition("/")
        if size not in SIZES or not patch_size.isdecimal():
            raise ValueError(
                f"name: expected SIZE/PATCH, such as 'XL/2', with SIZE one of {', '.join(SIZES)}, got {name!r}"
            )
        return cls(**{"patch_size": int(patch_size), **SIZES[size], **kwargs})

    def _set_encoding(
        self, encoding: Encoding, kwargs: dict[str, Any], kinds: Sequence[AttentionKind], normalizer: NormalizerName
    ) -> Act | None:
        """Build the encoding, and return the activation that linear layers use instead of the encoding's own."""
        head_dim = self.embed_dim // self.num_heads
        self.encoding, feature_act = build_for_layers(
            encoding, kwargs, head_dim, self.num_heads, kinds, self.num_axes, normalizer
        )
        EncodingStack(self.encoding).check(self.num_axes)
        return feature_act

    def _check_memory(self, kinds: Sequence[AttentionKind], texts: Sequence[TextAttention], qk_norm: str) -> None:
        check_memory(self.memory, kinds)
        if self.memory is None:
            return
        if self.num_axes != 3:
            raise ValueError(
                f"memory: expected None for images, whose tokens have no order, got {self.memory}; use num_axes=3"
            )
        if self.memory.directions != "both":
            raise ValueError(
                "directions: expected 'both' for a model that denoises all frames at once, got "
                f"{self.memory.directions!r}; pass Memory(directions='both')"
            )
        if self.text_width and not self.cross:
            raise ValueError(
                "text_attention: expected 'cross' with a memory, which would also forget text in the sequence, "
                f"got {texts[0]!r}"
            )
        check_key_norm(self.memory, qk_norm, ("head", "heads"))

    def _set_inputs(self, absolute: str, interval: bool) -> None:
        """Build the layers that precede the blocks, except the layers for text."""
        check_at_least(1, in_chans=self.in_chans, out_chans=self.out_chans)
        self.embed = nn.Linear(self.in_chans * torch.Size(self.patch_size).numel(), self.embed_dim)
        self.absolute, self.sincos = absolute, None
        if absolute != "none":
            if absolute == "sincos_dit" and self.embed_dim % (2 * self.num_axes):
                raise ValueError(
                    f"embed_dim: expected a multiple of 2 · num_axes = {2 * self.num_axes} with absolute='sincos_dit', "
                    f"got {self.embed_dim}"
                )
            self.sincos = CosineMd(self.embed_dim // 2, self.num_axes, base=1e4)
        self.reg_token = None
        if self.num_registers:
            self.reg_token = nn.Parameter(torch.empty(1, self.num_registers, self.embed_dim))
        self.time = TimeEmbedding(self.embed_dim)
        self.interval = TimeEmbedding(self.embed_dim) if interval else None

    def _set_conditions(
        self, text_encoder: Any, text_width: int | None, pooled_width: int, projections: tuple[str, str]
    ) -> None:
        if text_width is not None or pooled_width:
            if text_encoder is not None:
                raise ValueError(
                    "text_width, pooled_width: expected None with a text_encoder, which defines both, got "
                    f"{text_width}, {pooled_width}; leave out both"
                )
            text_encoder = TextFeatures(text_width or 0, pooled_width)
        self.text_encoder = text_encoder
        self.text_width, self.pooled_width = _widths(text_encoder)
        check_one_of("text_projection", projections[0], ("linear", "mlp"))
        check_one_of("pooled_projection", projections[1], ("linear", "mlp", "none"))
        if self.text_width:
            act = partial(nn.GELU, approximate="tanh")
            self.text_embed = _projection(projections[0], self.text_width, self.embed_dim, act)
        if self.pooled_width:
            if projections[1] == "none" and self.pooled_width != self.embed_dim:
                raise ValueError(
                    f"pooled_projection: expected 'linear' or 'mlp' to project pooled features of {self.pooled_width} "
                    f"channels to embed_dim = {self.embed_dim}, got 'none'"
                )
            self.pooled_embed = _projection(projections[1], self.pooled_width, self.embed_dim, nn.SiLU)

    def _check_text_attention(self, kinds: Sequence[TextAttention]) -> None:
        if self.cross and set(kinds) != {"cross"}:
            raise ValueError(
                f"text_attention: expected 'cross' in all blocks or in none, got {tuple(kinds)}. With 'cross', text is "
                "not part of the sequence"
            )
        if set(kinds) != {"joint"} and not self.text_width:
            raise ValueError(
                "text_attention: expected 'joint', the default, without text features, got "
                f"{kinds[0]!r}; pass a text_encoder or text_width="
            )

    def _set_blocks(
        self, by_block: Sequence[BlockOptions], texts: Sequence[TextAttention], parallel: Sequence[bool]
    ) -> None:
        embed_dim, depth, options = self.embed_dim, len(by_block), by_block[0]
        decays = [
            None if own.memory is None else own.memory.build_decay(self.num_heads, i, depth)
            for i, own in enumerate(by_block)
        ]
        self.blocks = nn.ModuleList(
            DiTBlock(
                by_block[i],
                text=texts[i] if self.text_width else None,
                parallel=parallel[i],
                last=i == depth - 1,
                decay=decays[i],
            )
            for i in range(depth)
        )
        self.norm = build_norm(options)
        shared = options.modulation == "shared"
        self.shared_modulation = modulation(embed_dim, 3 if all(parallel) else 6) if shared else None
        self.modulation = ModulationTable(embed_dim, 2) if shared else modulation(embed_dim, 2)
        self.head = nn.Linear(embed_dim, self.out_chans * torch.Size(self.patch_size).numel())

    def _set_rules(self, text: str | Tokens | None, after: Sequence[int] | None) -> None:
        self.preset = EncodingStack(self.encoding).preset
        if self.cross and (text is not None or after is not None):
            raise ValueError(
                "text_positions, image_after: expected None with text_attention='cross', which gives text no "
                f"positions, got {text!r}, {after!r}"
            )
        if self.preset is not None and (text is not None or after is not None):
            raise ValueError(
                f"text_positions, image_after: expected None with the preset {self.preset.name}, which defines both, "
                f"got {text!r}, {after!r}"
            )
        if isinstance(text, str):
            check_one_of("text_positions", text, RULES)
        self.text_positions = text if isinstance(text, Tokens) else Tokens(0, text or "skip")  # pyright: ignore[reportArgumentType]
        self.image_after = tuple(after) if after is not None else self.preset and self.preset.scheme.after
        rule = self.text_positions if self.preset is None else self.preset.scheme.tokens
        self.has_ordered_text = not self.cross and rule is not None and rule.rule in ("axis", "diagonal")
        self.positions((2,) * self.num_axes, 0 if self.cross else 1)  # check the position rules

    def _init_weights(self) -> None:
        """Initialise the weights as in DiT, so that each block starts as the identity and the output starts at zero."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("text_encoder."):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for embedding in (self.time, self.interval):
            if embedding is not None:
                nn.init.normal_(embedding.mlp.fc1.weight, std=0.02)
                nn.init.normal_(embedding.mlp.fc2.weight, std=0.02)
        for name, module in self.named_modules():
            if name.endswith(("modulation", "cross.proj")) and not name.startswith("text_encoder."):
                module.apply(_zero)
        _zero(self.head)
        if self.reg_token is not None:
            nn.init.trunc_normal_(self.reg_token, std=0.02)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: frequencies, phases, decays and embedding tables."""
        ends = ("text_encoder.embed.weight", "reg_token", "modulation.table")
        table = {name for name, _ in self.named_parameters() if name.endswith(ends)}
        return table | EncodingStack(self.encoding).no_weight_decay(self)

    def positions(
        self, shape: Sequence[int], length: int = 0, device: torch.device | str = "cpu", mask: Tensor | None = None
    ) -> Grid | Coordinates:
        """Return the positions of text tokens, registers and patches.

        Args:
            shape: shape of the patch grid.
            length: number of text tokens in the sequence, which is 0 with cross-attention.
            mask: mask (B, L) of the text, which is False for padding at the end. If the image follows the text, the
                mask determines where each sample's image starts.
        """
        before = length if self.preset is not None else replace(self.text_positions, length=length)
        stack = EncodingStack(self.encoding)
        placed = stack.lay_out(shape, before, after=self.image_after, reference=self._refer(shape), device=device)
        if self.image_after and self.has_ordered_text and mask is not None and not isinstance(placed, Grid):
            placed = _move_image(placed, self.image_after, length, mask)
        return _insert_unrotated(placed, length, self.num_registers) if self.num_registers else placed

    def encode_text(self, text: Any) -> Text:
        """Encode the condition once, so you can reuse the result in many calls to :meth:`forward`.

        Args:
            text: input of the text_encoder. A :class:`lrpe_md.models.text.Text` is not encoded again, only checked.

        Raises:
            ValueError, TypeError: if there is no text_encoder, or the features don't have the widths that the encoder
                declares.
        """
        if self.text_encoder is None:
            raise ValueError(
                "text: expected None, because the model has no text_encoder; build the model with text_encoder= or "
                "text_width="
            )
        encoded = text if isinstance(text, Text) else self.text_encoder(text)
        if not isinstance(encoded, Text):
            raise TypeError(
                "text_encoder: expected an encoder that returns an lrpe_md.models.text.Text(features, mask, pooled), "
                f"got {type(encoded).__name__}; for a transformers model, use PretrainedEncoder"
            )
        for name, value, width in (
            ("features", encoded.features, self.text_width), ("pooled", encoded.pooled, self.pooled_width),
        ):  # fmt: skip
            found = 0 if value is None else value.shape[-1]
            if found != width:
                raise ValueError(
                    f"text: expected {name} of {width} channels, as declared by the text_encoder, got "
                    f"{found or None}; build "
                    "the model with the text_width= and pooled_width= of your features"
                )
        if encoded.mask is None:
            return encoded
        encoded = encoded._replace(mask=encoded.mask.bool())
        return _move_padding(encoded) if self.has_ordered_text else encoded

    def empty_text(self, batch: int, like: Any = None) -> Text:
        """Return the text_encoder's empty condition for each sample of a batch.

        Args:
            like: text to be replaced by the empty condition. If this is a :class:`lrpe_md.models.text.Text` and the
                encoder has no method ``empty``, the empty condition consists of zeros.

        Raises:
            TypeError: if the encoder has no method ``empty``.
        """
        empty = getattr(self.text_encoder, "empty", None)
        if empty is not None or self.text_encoder is None:
            return self.encode_text(None if empty is None else empty(batch))
        if isinstance(like, Text):
            return like.zeros(batch)
        raise TypeError(
            f"text_encoder: {type(self.text_encoder).__name__} has no method empty(batch), which returns empty "
            "conditions; add this method, or pass text= (and negative= for guidance)"
        )

    def forward(
        self, x: Tensor, t: Tensor, text: Any = None, r: Tensor | None = None, drop: Tensor | None = None
    ) -> Tensor:
        """Return the velocity for x (B, in_chans, [frames,] height, width) at times t (B,), in x's shape.

        Args:
            t: times (B,), from 0 (image) to 1 (noise). Divide timesteps up to 1000 by 1000. Undivided timesteps raise
                an error, except on a GPU, where reading them would be slow.
            text: input of the text_encoder, such as tokens (B, L) or labels (B,), or the result of :meth:`encode_text`.
                None means the empty condition.
            r: end (B,) of the time interval over which to predict the mean velocity. Default: t.
            drop: mask (B,) of the samples whose condition is replaced by the empty condition. To use guidance later,
                drop about a tenth of the conditions in training.
        """
        shape = self._grid_shape(x, t)
        c = self.time(t)
        if self.interval is not None:
            if r is not None:
                check_times("r", r, x.shape[0], TIME_LIMITS)
            c = c + self.interval(torch.zeros_like(t) if r is None else t - r)
        elif r is not None:
            raise ValueError("r: expected None, because the model is not conditioned on r; build it with interval=True")
        tokens = self._embed_patches(x, shape)
        features, mask, pooled = self._condition(text, drop, x.shape[0])
        if features is not None:
            features = self.text_embed(features.to(weight_dtype(self.embed, x.dtype))).to(x.dtype)
        if pooled is not None:
            c = c + self.pooled_embed(pooled.to(weight_dtype(self.embed, x.dtype)))
        length = 0 if features is None or self.cross else features.shape[1]
        placed = self.encoding is not None or self.memory is not None
        positions: Any = self.positions(shape, length, x.device, mask) if placed else None
        if mask is not None and not self.cross:
            mask = nn.functional.pad(mask, (0, tokens.shape[1]), value=True)

        frame = shape[-2] * shape[-1]
        tokens = self._run_blocks(tokens, features, c, positions, mask, frame)[:, self.num_registers :]
        shift, scale = self.modulation(c).chunk(2, dim=-1)
        return unpatchify(self.head(modulate(self.norm(tokens), shift, scale)), shape, self.patch_size)

    def _refer(self, shape: Sequence[int]) -> Reference:
        """Return the size to which the positions of a patch grid are interpolated."""
        return self.reference(shape) if callable(self.reference) else self.reference

    def _embed_patches(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Embed x, and return the register and patch tokens (B, R + N, C)."""
        tokens = self.embed(patchify(x, self.patch_size)).to(x.dtype)  # residuals keep x's dtype, even under autocast
        if self.sincos is not None:
            reference = self._refer(shape)
            grid = Grid(shape) if reference is None else Grid(shape).interpolate(reference)
            ones = torch.ones(1, 1, tokens.shape[1], self.embed_dim // 2, dtype=x.dtype, device=x.device)
            table = self.sincos(ones, positions=grid)[0]  # [cos Θ, sin Θ], each with the last axis first
            if self.absolute == "sincos_dit":
                table = table.unflatten(-1, (2, self.num_axes, -1)).flip(-3).transpose(-3, -2).flatten(-3)
            tokens = tokens + table
        if self.reg_token is None:
            return tokens
        return torch.cat([self.reg_token.expand(x.shape[0], -1, -1).to(x.dtype), tokens], dim=1)

    def _run_blocks(
        self, tokens: Tensor, features: Tensor | None, c: Tensor, positions: Any, mask: Tensor | None, frame: int
    ) -> Tensor:
        """Run all blocks. ``frame`` is the number of patches per frame."""
        stack = EncodingStack(self.encoding)
        positions = stack.locate(positions)
        if self.shared_modulation is not None:
            c = self.shared_modulation(c)
        for i, block in enumerate(self.blocks):
            args = tokens, features, c, Context(stack[i], positions, mask, block=frame, bidirectional=True)
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens, features = checkpoint(block, *args, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
            else:
                tokens, features = block(*args)
        return tokens

    def _condition(self, text: Any, drop: Tensor | None, batch: int) -> Text:
        """Return the condition of each sample, or the empty condition where ``drop`` is True."""
        if self.text_encoder is None and text is None:
            if drop is not None:
                raise ValueError(
                    "drop: expected None, because the model has no text_encoder; build the model with text_encoder="
                )
            return Text(None)
        if text is None:
            return self.empty_text(batch)
        if drop is not None and (drop.dtype != torch.bool or drop.shape != (batch,)):
            raise ValueError(
                f"drop: expected a boolean tensor of shape ({batch},), got {drop.dtype} {tuple(drop.shape)}"
            )
        drop_inputs = getattr(self.text_encoder, "drop", None)
        if drop is not None and drop_inputs is not None and not isinstance(text, Text):
            text, drop = drop_inputs(text, drop), None
        encoded = self.encode_text(text)
        if encoded.batch_size != batch:
            raise ValueError(
                f"text: expected batch size {batch} (one caption per sample), got {encoded.batch_size}; repeat "
                "your captions"
            )
        return encoded if drop is None else replace_texts(encoded, self.empty_text(1, text), drop)

    def _grid_shape(self, x: Tensor, t: Tensor) -> tuple[int, ...]:
        """Check x and t, and return the shape of the patch grid."""
        check_input(x, self.in_chans, self.num_axes)
        check_times("t", t, x.shape[0], TIME_LIMITS)
        if any(n < p or n % p for n, p in zip(x.shape[2:], self.patch_size, strict=True)):
            raise ValueError(f"x: expected sizes that are multiples of {self.patch_size}, got {tuple(x.shape[2:])}")
        return tuple(n // p for n, p in zip(x.shape[2:], self.patch_size, strict=True))


def _widths(encoder: Any) -> tuple[int, int]:
    """Return the widths of an encoder's features and of its pooled features."""
    if encoder is None:
        return 0, 0
    width = getattr(encoder, "width", None)
    pooled = getattr(encoder, "pooled_width", width)
    if not isinstance(width, int) or not isinstance(pooled, int) or width < 0 or pooled < 0:
        raise TypeError(
            "text_encoder: expected non-negative integer attributes width and pooled_width (the channel counts of its "
            f"features), got {type(encoder).__name__} with {width!r} and {pooled!r}; for a transformers "
            "model, use lrpe_md.models.text.PretrainedEncoder"
        )
    return width, pooled


def _check_options(options: BlockOptions, *, absolute: str, reg_tokens: int, depth: int) -> None:
    embed_dim, num_heads = options.embed_dim, options.num_heads
    check_at_least(1, depth=depth, embed_dim=embed_dim, num_heads=num_heads)
    if not is_finite_number(options.mlp_ratio) or int(options.mlp_ratio * embed_dim) < 1:
        raise ValueError(f"mlp_ratio: expected a positive number, got {options.mlp_ratio}")
    check_at_least(0, reg_tokens=reg_tokens)
    if embed_dim % (2 * num_heads):
        raise ValueError(f"embed_dim: expected a multiple of 2 · num_heads = {2 * num_heads}, got {embed_dim}")
    for name, value, known in (
        ("absolute", absolute, ("none", "sincos", "sincos_dit")),
        ("mlp", options.mlp, ("gelu", "gelu_tanh", "swiglu")),
        ("norm", options.norm, ("layer", "rms")),
        ("qk_norm", options.qk_norm, ("head", "heads", "none")),
        ("modulation", options.modulation, ("block", "shared")),
    ):
        check_one_of(name, value, known)


def _check_patch_size(num_axes: int, patch_size: int | Sequence[int]) -> tuple[int, ...]:
    """Check the patch size, and return one number per axis."""
    if num_axes not in AXES:
        raise ValueError(f"num_axes: expected 2 (images) or 3 (videos), got {num_axes}")
    if isinstance(patch_size, int):
        patch_size = (1,) * (num_axes - 2) + (patch_size, patch_size)
    if len(patch_size) != num_axes or min(patch_size) < 1:
        raise ValueError(f"patch_size: expected a size for each of the {num_axes} axes, got {tuple(patch_size)}")
    return tuple(patch_size)


def _projection(kind: str, width: int, embed_dim: int, act: Any) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    return nn.Linear(width, embed_dim) if kind == "linear" else Mlp(width, embed_dim, embed_dim, act_layer=act)


def _move_padding(text: Text) -> Text:
    """Move padding to the end of each sample, because a token's position is its place in the sequence."""
    features, mask, pooled = text
    assert features is not None
    assert mask is not None
    order = mask.argsort(dim=1, descending=True, stable=True)
    return Text(features.gather(1, order[..., None].expand_as(features)), mask.gather(1, order), pooled)


def _move_image(placed: Coordinates, axes: Sequence[int], length: int, mask: Tensor) -> Coordinates:
    """Shift the image of each sample to the end of the sample's text."""
    padding = length - mask.sum(1)
    behind = torch.zeros_like(placed.coords)
    behind[length:, list(axes)] = 1
    coords = placed.coords - padding[:, None, None] * behind
    return Coordinates(coords, rotated=None if placed.rotated is None else placed.rotated.expand(coords.shape[:2]))


def _insert_unrotated(placed: Grid | Coordinates, index: int, number: int) -> Grid | Coordinates:
    """Insert ``number`` unrotated tokens before token ``index``."""
    if index <= placed.prefix:
        return replace(placed, prefix=placed.prefix + number)
    if isinstance(placed, Grid):
        placed = Coordinates(placed.coordinates(), prefix=placed.prefix, suffix=placed.suffix)
    coords, row = placed.coords, index - placed.prefix
    rotated = coords.new_ones(coords.shape[:-1], dtype=torch.bool) if placed.rotated is None else placed.rotated
    new = coords.new_zeros(*coords.shape[:-2], number, coords.shape[-1])
    return replace(
        placed,
        coords=torch.cat([coords[..., :row, :], new, coords[..., row:, :]], dim=-2),
        rotated=torch.cat([rotated[..., :row], new[..., 0] != 0, rotated[..., row:]], dim=-1),
    )


def _zero(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
