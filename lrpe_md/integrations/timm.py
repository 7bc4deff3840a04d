"""Relative positions for timm's VisionTransformer: ``adapt(model, "cosine")`` converts it to the class in this module.

Weights and their names are the same as in timm, except for learned frequencies (``encoding.*``) and decays
(``*.decay.logit``). ``lrpe_md.models.vit`` registers new models with timm.

The backbone owns the encoding, computes the positions once per forward pass, and passes the encoding and the positions
to its blocks in a :class:`Context`, in place of ``attn_mask``. A forward pass stores no state on a module, so
activation checkpointing recomputes with the right positions.

Shapes: B batch, N tokens (prefix + patches), P prefix tokens (class, registers), C embed_dim, H heads, D head_dim.
"""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Literal

from .extras import require

require("timm")

import torch
from timm.layers.attention import Attention
from timm.layers.format import nchw_to
from timm.layers.patch_dropout import PatchDropout, patch_dropout_forward
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models import checkpoint
from timm.models import vision_transformer as timm_vit
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..checks import a_or_an, check_one_of, check_reference, join_names, repeat_over_layers
from ..engine.core.call import Act
from ..engine.encode.views import split_qkv
from ..engine.linear.call import NormalizerName
from ..modules.linear import HeadDecay, Memory
from ..norm import Norm
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..positions.sequences import Tokens
from .attention import (
    ATTENTIONS,
    AttentionKind,
    Context,
    attend_encoded,
    attend_linearly,
    attend_softmax,
    check_causal,
    check_key_norm,
    check_memory,
    weight_dtype,
)
from .attention_adapter import find_adapted_forward
from .encoding import Encoding, EncodingStack, build_for_layers, explain_misplaced_options
from .norms import norm_of, takes_norm

__all__ = [
    "LrpeAttention", "LrpePatchEmbed", "LrpeVisionTransformer", "adapt", "checkpoint_filter_fn", "with_own_frequencies",
]  # fmt: skip

# torch.fx (and therefore create_feature_extractor) treats each of these functions as one node.
torch.fx.wrap("attend_linearly")
torch.fx.wrap("encode")
torch.fx.wrap("grid_size")
torch.fx.wrap("lay_out_patches")

BLOCKS = (timm_vit.Block, timm_vit.ResPostBlock, timm_vit.ParallelThingsBlock)  # block classes that pass attn_mask on


class LrpeAttention(Attention):
    """timm's attention with the same parameters, which also encodes q and k as the :class:`Context` specifies.

    Without a Context (that is, if ``attn_mask`` is None or a mask), this layer works like timm's attention.

    For the backward pass, softmax attention stores the encoded q and k, and also the projection's output, of which v is
    a view. In total, it stores five tensors of size B·N·C, compared with three without an encoding. ``copy_v`` copies
    v, so only three tensors are stored, unless the encoding has an activation or learned frequencies.
    ``keep_encoded=False`` only stores the projection's output, and re-encodes q and k in the backward pass. This option
    has no effect under checkpointing or after ``timm.layers.set_fused_attn(False)``.
    """

    takes_context = True  # adapt_attention then looks for the encoding of the backbone
    attention: AttentionKind = "softmax"
    normalizer: NormalizerName = "unrotated"
    memory: Memory | None = None
    feature_act: Act | None = None  # replaces the activation of the encoding
    copy_v: bool = False
    keep_encoded: bool = True

    def forward(self, x: Tensor, attn_mask: Context | Tensor | None = None, is_causal: bool = False) -> Tensor:
        context = attn_mask if isinstance(attn_mask, Context) else Context(None, None, attn_mask)
        encoding, positions, mask = context.encoding, context.positions, context.attn_mask
        gate = None if self.gate is None else self.gate(x).sigmoid()
        # The encoding reads strided views of the projection without a copy.
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = split_qkv(qkv)
        norm = None
        if takes_norm(encoding, self.attention):
            norm = norm_of(self.q_norm, self.k_norm, weight_dtype(self.qkv, qkv.dtype))
        if self.attention == "linear":
            if norm is None:
                q, k = self.q_norm(q), self.k_norm(k)
            decay: HeadDecay | None = getattr(self, "decay", None)
            x = attend_linearly(
                q, k, v, encoding, positions, normalizer=self.normalizer, attn_mask=mask, is_causal=is_causal,
                block=context.block_for(self.memory), carried=context.carried, norm=norm, memory=self.memory,
                decay=None if decay is None else decay(), act=self.feature_act,
            )  # fmt: skip
            return self._project(x, gate)
        own = partial(self._norm_and_encode, encoding, positions, is_causal, norm)
        attend = partial(attend_softmax, self, attn_mask=mask, is_causal=is_causal)
        is_proxy = not isinstance(x, Tensor)  # in a torch.fx trace
        if encoding is not None and not self.keep_encoded and self.fused_attn and not is_proxy:
            return self._project(attend_encoded(own, attend, q, k, v), gate)
        q, k = own(q, k)
        if self.copy_v and encoding is not None:
            v = v.clone()
            del qkv
        return self._project(attend(q, k, v), gate)

    def _norm_and_encode(
        self, encoding: nn.Module | None, positions: Any, is_causal: bool, norm: Norm | None, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        if norm is None:
            q, k = self.q_norm(q), self.k_norm(k)
        return (q, k) if encoding is None else encode(encoding, q, k, positions, is_causal, norm)

    def _project(self, x: Tensor, gate: Tensor | None) -> Tensor:
        x = self.norm(x.transpose(1, 2).flatten(2))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))

    def extra_repr(self) -> str:
        if self.attention == "softmax":
            return "attention='softmax'"
        memory = "" if self.memory is None else f", memory={self.memory}"
        return f"attention='linear', normalizer={self.normalizer!r}{memory}"


def encode(
    encoding: nn.Module, q: Tensor, k: Tensor, positions: Grid | Coordinates | None, is_causal: bool, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    if is_causal:
        check_causal(encoding)
    return encoding(q, k, positions=positions) if norm is None else encoding(q, k, positions=positions, norm=norm)


def grid_size(x: Tensor, height: int, width: int) -> tuple[int, ...]:
    """Return the size of the grid of tokens (B, H, W, C), which some embeddings round up, or else the expected size."""
    return tuple(x.shape[1:3]) if x.ndim == 4 else (height, width)


def lay_out_patches(
    encoding: nn.Module | None,
    size: Sequence[int],
    num_prefix_tokens: int,
    reference: Sequence[int | None] | None,
    device: torch.device | str,
) -> Grid | Coordinates:
    return EncodingStack(encoding).lay_out(size, Tokens(num_prefix_tokens), reference=reference, device=device)


class LrpePatchEmbed(PatchEmbed):
    """timm's patch embedding, changed so that it compiles to one graph for all sizes.

    timm's size check includes the size in its message, so each size would need a new graph.
    """

    has_table: bool = False  # PyTorch can't compile the backward pass of resampling a table to a dynamic size

    def forward(self, x: Tensor) -> Tensor:
        trains_table = self.has_table and torch.is_grad_enabled() and not torch.compiler.is_exporting()
        if not torch.compiler.is_compiling() or trains_table or self.strict_img_size or self.dynamic_img_pad:
            return super().forward(x)
        patch_size: Any = self.patch_size
        if x.shape[-2] % patch_size[0] or x.shape[-1] % patch_size[1]:
            raise ValueError("x: expected a height and width divisible by patch_size")
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(-2, -1) if self.flatten else nchw_to(x, self.output_fmt))


class LrpeVisionTransformer(timm_vit.VisionTransformer):
    """timm's VisionTransformer with an encoding of q and k.

    Args:
        encoding, encoding_kwargs: encoding of q and k, and its options; see :func:`.encoding.build_encoding`. A preset
            also defines the positions. Class and register tokens are not rotated.
        absolute: absolute position embedding. "learned" is timm's table, resampled to the input's grid. "sincos" is
            computed for the input's grid. "none" disables it.
        attention: "softmax" or "linear" (:func:`lrpe_md.linear_attention`) for all layers, or a sequence that repeats
            over the depth, such as ("linear", "linear", "linear", "softmax"). Linear layers default to act="relu".
        normalizer: "unrotated", "encoded" or "none", for linear attention.
        memory: how linear layers forget other frames, for video models only; see
            :class:`lrpe_md.models.video.LrpeVideoTransformer`.
        copy_v, keep_encoded: what to store for the backward pass; see :class:`LrpeAttention`.
        dynamic_img_size: whether to accept any input size that the patch size divides. Default: True.
        args, kwargs: arguments of timm's class.

    Attributes:
        reference: size of the grid to which positions are interpolated: None, one number, or one entry per axis, where
            None skips an axis. A sin-cos table is computed at this size, and then resampled. None uses one unit per
            patch, which extrapolates beyond the trained size. ``model.reference = model.patch_embed.grid_size`` keeps
            positions in the trained range. You can change the reference at any time. A learned table is always
            resampled to the grid.

    Raises:
        ValueError, TypeError: for an invalid argument.
    """

    attention_class = LrpeAttention  # class that adapt gives to the attention layers
    num_axes = 2  # axes of the patch grid
    preset_axes: int | None = None  # number of axes of a preset; None allows any that supports images
    memory: Memory | None = None
    _reference: Sequence[int | None] | None = None
    encoding: nn.Module | None
    absolute: Literal["none", "learned", "sincos"]
    grad_checkpointing: bool
    blocks: Any
    patch_embed: Any

    @explain_misplaced_options
    def __init__(
        self,
        *args: Any,
        encoding: Encoding = None,
        encoding_kwargs: dict[str, Any] | None = None,
        absolute: Literal["none", "learned", "sincos"] = "none",
        attention: AttentionKind | Sequence[AttentionKind] = "softmax",
        normalizer: NormalizerName = "unrotated",
        memory: Memory | None = None,
        copy_v: bool = False,
        keep_encoded: bool = True,
        dynamic_img_size: bool = True,
        **kwargs: Any,
    ) -> None:
        if absolute not in ("none", "learned", "sincos"):
            other = {"drop": "none", "keep": "learned"}.get(str(absolute))
            hint = f"; pass {other!r} ({absolute!r} is a value of adapt())" if other else ""
            raise ValueError(f"absolute: expected 'none', 'learned' or 'sincos', got {absolute!r}{hint}")
        if "pos_embed" in kwargs:
            raise ValueError(f"pos_embed: expected absolute= instead of pos_embed, got {kwargs['pos_embed']!r}")
        pos_embed = "learn" if absolute == "learned" else "none"
        super().__init__(*args, pos_embed=pos_embed, dynamic_img_size=dynamic_img_size, **kwargs)
        if absolute == "sincos" and self.embed_dim % 4:
            raise ValueError(f"absolute: 'sincos' needs an embed_dim divisible by 4, got {self.embed_dim}")
        self.absolute = absolute
        adapt(
            self, encoding, encoding_kwargs=encoding_kwargs, attention=attention, normalizer=normalizer, memory=memory,
            copy_v=copy_v, keep_encoded=keep_encoded,
        )  # fmt: skip

    def check_memory(self, memory: Memory) -> None:
        """Reject a memory, because image patches have no order in which a model could forget them."""
        raise ValueError(
            f"memory: expected None for an image model, whose tokens have no order, got {memory}; use a video model, "
            "lrpe_md.models.video, with causal='frames' or directions='both'"
        )

    @property
    def reference(self) -> Sequence[int | None] | None:
        return self._reference

    @reference.setter
    def reference(self, sizes: Sequence[int | None] | None) -> None:
        if sizes is not None:
            Grid(self.patch_embed.grid_size).interpolate(sizes)  # validates the sizes
            sizes = (sizes,) * self.num_axes if isinstance(sizes, int) else tuple(sizes)
            check_reference(sizes, self.patch_embed.grid_size, self.patch_embed.patch_size)
        self._reference = sizes

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Compute tokens (B, N, C) from x (B, in_chans, height, width)."""
        x, positions = self._embed(x)
        for i in range(len(self.blocks)):
            x = self._block(i, x, positions, attn_mask, is_causal)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Run timm's ``forward_intermediates``, with the same arguments and result."""
        check_one_of("output_fmt", output_fmt, ("NCHW", "NLC"))
        taken, last = feature_take_indices(len(self.blocks), indices)
        size = tuple(self.patch_embed.dynamic_feat_size(x.shape[2:]))
        prefixes, patches = [], []
        x, positions = self._embed(x)
        if output_fmt == "NCHW" and x.shape[1] - self.num_prefix_tokens != math.prod(size):
            raise ValueError(
                "output_fmt: 'NCHW' needs all patches, but patch_drop_rate dropped some; use 'NLC' or eval()"
            )
        for i in range(last + 1 if stop_early else len(self.blocks)):
            x = self._block(i, x, positions, attn_mask, is_causal)
            if i in taken:
                y = self.norm(x) if norm else x
                prefixes.append(y[:, : self.num_prefix_tokens])
                y = y[:, self.num_prefix_tokens :]
                if output_fmt == "NCHW":
                    y = y.transpose(-2, -1).unflatten(-1, size).contiguous()
                patches.append(y)
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if with_prefix:
                result["image_intermediates_prefix"] = prefixes
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        intermediates = list(zip(patches, prefixes, strict=True)) if with_prefix else patches
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def _embed(self, x: Tensor) -> tuple[Tensor, Grid | Coordinates]:
        """Embed x as tokens (B, N, C), and return the tokens and their positions, without dropped patches."""
        size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x = self.patch_embed(x)
        size = grid_size(x, size[0], size[1])
        if self.absolute == "sincos":
            x = x + self._sincos(size, x).reshape(x.shape[1:])
        if self.has_class_token and self.cls_token is None and self.num_prefix_tokens > self.num_reg_tokens:
            raise ValueError(
                f"model.num_prefix_tokens: expected {self.num_reg_tokens} with model.cls_token=None, got "
                f"{self.num_prefix_tokens}; change it when you remove the class token"
            )
        x = self._pos_embed(x)
        if self.absolute == "sincos":
            x = self.pos_drop(x)
        kept, drop = None, self.patch_drop
        if isinstance(drop, PatchDropout):
            x, kept = patch_dropout_forward(x, drop.prob, drop.num_prefix_tokens, drop.ordered, drop.training)
        x = self.norm_pre(x)
        grid = lay_out_patches(self.encoding, size, self.num_prefix_tokens, self.reference, x.device)
        grid = EncodingStack(self.encoding).locate(grid)
        if kept is None:
            return x, grid
        table = grid.take(kept)
        whole = isinstance(grid, Grid) and grid.scale is None
        return x, table.to(dtype=torch.float32) if whole else table

    def _sincos(self, shape: Sequence[int], x: Tensor) -> Tensor:
        """Compute the sin-cos table (H W, C). If there is a reference grid, resample the table from that grid."""
        sizes = self.reference or (None, None)
        own = [n if size is None else size for n, size in zip(shape, sizes, strict=True)]
        table = build_sincos2d_pos_embed(own, self.embed_dim, device=x.device)
        if self.reference is not None:
            table = resample_abs_pos_embed(table[None], list(shape), own, num_prefix_tokens=0)[0]
        return table.to(x.dtype)

    def _block(
        self, i: int, x: Tensor, positions: Grid | Coordinates, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        return self._run(i, x, Context(EncodingStack(self.encoding)[i], positions, attn_mask), is_causal)

    def _run(self, i: int, x: Tensor, context: Context, is_causal: bool = False) -> Tensor:
        if self.grad_checkpointing and context.carried is None:  # sums must not be recomputed
            return checkpoint(self.blocks[i], x, context, is_causal)
        return self.blocks[i](x, context, is_causal)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict. Weights of timm's model are accepted even in strict mode, as with ``checkpoint_path=``."""
        return super().load_state_dict(self._fit(state_dict) if strict else state_dict, strict, assign)

    def _fit(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Resize the absolute table to fit the model, and keep the model's frequencies if the checkpoint has none."""
        fitted = _without_table(state_dict, self)
        table, own = fitted.get("pos_embed"), self.pos_embed
        if table is not None and own is not None and self.num_axes == 2 and table.shape[1] != own.shape[1]:
            first = 0 if self.no_embed_class else self.num_prefix_tokens
            fitted["pos_embed"] = resample_abs_pos_embed(table, self.patch_embed.grid_size, num_prefix_tokens=first)
        own = with_own_frequencies({}, self)
        for found, kept in (("encoding.*", "frequencies"), ("*.decay.logit", "decays")):
            names = fnmatch.filter(own, found)
            if names and not fnmatch.filter(fitted, found):
                fitted.update({name: own[name] for name in names})
                warnings.warn(f"state_dict: {found} is missing; the {kept} stay unchanged", stacklevel=3)
        return fitted

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | EncodingStack(self.encoding).no_weight_decay(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's groups. A layer's frequencies belong to its block, and shared frequencies to the stem."""
        groups = super().group_matcher(coarse)
        return {
            **groups,
            "stem": rf"{groups['stem']}|^encoding\.(?!\d)",
            "blocks": [(r"^encoding\.(\d+)", None), *groups["blocks"]],
        }

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if isinstance(self.encoding, nn.ModuleList):
            self.encoding = self.encoding[: len(self.blocks)]
        return taken


@explain_misplaced_options
def adapt(
    model: nn.Module,
    encoding: Encoding,
    absolute: Literal["keep", "drop"] = "keep",
    *,
    encoding_kwargs: dict[str, Any] | None = None,
    attention: AttentionKind | Sequence[AttentionKind] = "softmax",
    normalizer: NormalizerName = "unrotated",
    memory: Memory | None = None,
    copy_v: bool = False,
    keep_encoded: bool = True,
) -> LrpeVisionTransformer:
    """Convert a timm VisionTransformer to an :class:`LrpeVisionTransformer` in place, and return it.

    Only the classes of the model, its patch embedding and its attention layers change. Parameters, hooks, and
    optimisers that hold the parameters stay the same. You can adapt a model more than once. The supported input sizes
    also stay the same, so for inputs of any size, create the model with ``dynamic_img_size=True``.

    Args:
        model: a model from ``timm.create_model("vit_*")`` of the class VisionTransformer. Its blocks must be Block,
            ResPostBlock or ParallelThingsBlock, with timm's Attention.
        encoding: "cosine", "rotate", "mixed", "none", a preset, a scheme or a module. A module is moved to the model's
            device.
        absolute: whether to "keep" or "drop" the learned absolute embedding.
        encoding_kwargs, attention, normalizer, memory, copy_v, keep_encoded: see :class:`LrpeVisionTransformer`.

    Raises:
        TypeError, ValueError: for an invalid model or argument. After an error, the model is unchanged.
    """
    if absolute not in ("keep", "drop"):
        other = {"none": "drop", "learned": "keep"}.get(str(absolute))
        hint = f"; pass {other!r} ({absolute!r} is a value of LrpeVisionTransformer)" if other else ""
        hint = "; pass attention='linear'" if absolute == "linear" else hint
        raise ValueError(f"absolute: expected 'keep' or 'drop', got {absolute!r}{hint}")
    if copy_v and not keep_encoded:
        raise ValueError("copy_v: expected False with keep_encoded=False, which keeps only the projection's output")
    blocks = _attentions(model)
    vit: Any = model
    kinds = repeat_over_layers("attention", attention, len(blocks), ATTENTIONS)
    attentions = [(i, kind, m) for i, (kind, block) in enumerate(zip(kinds, blocks, strict=True)) for m in block]
    if normalizer != "unrotated" and "linear" not in kinds:
        raise ValueError(
            f"normalizer: expected 'unrotated' (the default) without linear attention, got {normalizer!r}; pass "
            "attention='linear', or leave out normalizer"
        )
    _check_linear_layers(vit, kinds, attentions, memory)
    num_axes = getattr(vit, "num_axes", LrpeVisionTransformer.num_axes)
    attn, device = blocks[0][0], next(vit.parameters()).device
    built, feature_act = build_for_layers(
        encoding, encoding_kwargs or {}, attn.head_dim, attn.num_heads, kinds, num_axes, normalizer
    )
    stack = EncodingStack(built)
    stack.check(num_axes, getattr(vit, "preset_axes", None))
    stack.check_modules(attn.head_dim, num_axes)
    stack.check_idle_channels(num_axes)
    if built is not None:
        built.to(device)

    # Nothing below raises.
    if not isinstance(vit, LrpeVisionTransformer):
        vit.__class__ = LrpeVisionTransformer
        vit.absolute = "none" if vit.pos_embed is None else "learned"
    if type(vit.patch_embed) is PatchEmbed:
        vit.patch_embed.__class__ = LrpePatchEmbed
    for i, kind, module in attentions:
        if not isinstance(module, LrpeAttention):
            module.__class__ = vit.attention_class
        own = memory if kind == "linear" else None
        module.attention, module.normalizer, module.copy_v = kind, normalizer, copy_v
        module.keep_encoded, module.memory, module.feature_act = keep_encoded, own, feature_act
        decay = None if own is None else own.build_decay(module.num_heads, i, len(blocks), device)
        module.register_module("decay", decay)
    vit.encoding, vit.memory = built, memory
    if absolute == "drop":
        vit.pos_embed, vit.absolute = None, "none"
    if isinstance(vit.patch_embed, LrpePatchEmbed):
        vit.patch_embed.has_table = vit.pos_embed is not None
    return vit


def _check_linear_layers(vit: Any, kinds: Sequence[str], attentions: Sequence[Any], memory: Memory | None) -> None:
    """Check that the chosen layers support linear attention, and that the model supports this memory."""
    if any(kind == "linear" and m.attn_drop.p > 0 for _, kind, m in attentions):
        raise ValueError("attn_drop_rate: expected 0, because linear attention has no weights to drop")
    check_memory(memory, kinds)
    if memory is None:
        return
    (type(vit) if isinstance(vit, LrpeVisionTransformer) else LrpeVisionTransformer).check_memory(vit, memory)
    has_norm = not any(kind == "linear" and isinstance(m.k_norm, nn.Identity) for _, kind, m in attentions)
    check_key_norm(memory, has_norm, (True,))


def _attentions(model: Any) -> list[list[Any]]:
    """Return the attention layers of each block. If the model can't be adapted, raise an error."""
    if type(model) is not timm_vit.VisionTransformer and not isinstance(model, LrpeVisionTransformer):
        kind, expected = a_or_an(type(model).__qualname__), "model: expected a timm VisionTransformer"
        for name in ("module", "_orig_mod", "model"):  # DataParallel, torch.compile, features_only
            if isinstance(getattr(model, name, None), timm_vit.VisionTransformer):
                advice = f"adapt model.{name}, or adapt the model before you wrap it"
                raise TypeError(f"{expected}, not a wrapper around one, got {kind}; {advice}")
        if isinstance(model, str):
            raise TypeError(f"{expected}, got {model!r}; pass the model first")
        names = [type(m).__name__.lower() for m in model.modules()] if isinstance(model, nn.Module) else ["attention"]
        if not any(part in name for name in names for part in ("attn", "attention", "mhsa")):
            raise TypeError(f"{expected}, got {kind}, which has no attention layers with q and k to encode")
        raise TypeError(
            f"{expected}, got {type(model).__module__}.{type(model).__qualname__}; for subclasses and other families, "
            "use lrpe_md.adapt_rotary if the model has a rotary encoding, or lrpe_md.adapt_attention if it has no "
            "relative positions"
        )
    blocks: list[list[Attention]] = []
    for i, block in enumerate(model.blocks):
        inside = [m for m in block.modules() if type(m) is Attention or isinstance(m, LrpeAttention)]
        if type(block) not in BLOCKS or not inside:
            raise ValueError(
                f"model: expected blocks of type {join_names((b.__name__ for b in BLOCKS), 'or')} with timm's "
                "Attention, got "
                f"blocks[{i}] of type {type(block).__name__} with {type(getattr(block, 'attn', None)).__name__}"
            )
        for m in inside:
            if find_adapted_forward(m) is not None or (type(m) is Attention and "forward" in vars(m)):
                raise ValueError(
                    f"model: expected attention layers with the forward method of their class, got blocks[{i}] with a "
                    "replaced one. After adapt_attention, call restore_attention first; otherwise, undo the "
                    "replacement"
                )
        blocks.append(inside)
    found = [m for inside in blocks for m in inside]
    if len({(m.num_heads, m.head_dim) for m in found}) != 1:
        raise ValueError(
            "model: expected the same number of heads and head_dim in all blocks, got (num_heads, head_dim) = "
            f"{[(m.num_heads, m.head_dim) for m in found]}"
        )
    if type(model.patch_drop) not in (nn.Identity, PatchDropout):
        raise ValueError(f"model: expected timm's PatchDropout as patch_drop, got {type(model.patch_drop).__name__}")
    return blocks


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Fit a checkpoint's weights and absolute table as timm does, and keep learned frequencies missing from it."""
    fitted = timm_vit.checkpoint_filter_fn(_without_table(state_dict, model), model)  # pyright: ignore[reportArgumentType]
    return with_own_frequencies(fitted, model)


def _without_table(state_dict: Mapping[str, Any], model: nn.Module) -> Any:
    """Return a copy of a state_dict with its metadata. Leave out the absolute table if the model has none."""
    fitted: Any = copy(state_dict)
    if getattr(model, "pos_embed", None) is None and fitted.pop("pos_embed", None) is not None:
        warnings.warn(
            "state_dict: dropped pos_embed, because the model has no position table. To get one, build the model with "
            "absolute='learned', or call adapt(..., absolute='keep')",
            stacklevel=3,
        )
    return fitted


def with_own_frequencies(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Add the model's learned frequencies and decays to a checkpoint that lacks them, such as one of timm's."""
    names = ("encoding.*", "*.decay.logit")
    own = {n: t for n, t in model.state_dict().items() if any(fnmatch.fnmatchcase(n, each) for each in names)}
    return {**own, **state_dict}
