"""timm's ViTs with a rotary encoding of their own (``Eva``): EVA-02, RoPE-ViT axial and mixed, DINOv3, PE.

Source: timm 1.0.31, ``timm/models/eva.py`` and ``timm/layers/pos_embed_sincos.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, cast

from .extras import require

require("timm")

import timm
import torch
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
)  # fmt: skip
from timm.models.eva import Eva, EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from ..engine.validate import Impl
from ..engine.views import split_qkv
from ..positions.augment import AugmentPositions
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..presets.registry import preset
from .attention import attend
from .exchange import (
    Adapted,
    PresetRotate,
    Rotary,
    Step,
    adapted_class,
    found_series,
    parts,
    reduce_adapted,
    with_series,
)  # fmt: skip
from .norms import normal_source

__all__ = ["plan", "plan_vit"]

# torch.fx, and so create_feature_extractor, takes each of these as one step.
torch.fx.wrap("lay_out_patches")
torch.fx.wrap("omega_by_layer")


class _Rope(Adapted):
    """The rotary of a model: holds timm's settings and parameters; :class:`LrpeEva` asks it for :class:`Rotary`."""

    extras = ("rotation", "augment", "impl")
    rotation: PresetRotate
    augment: AugmentPositions | None
    impl: Impl
    grid_indexing: str

    def get_embed(self, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of the patches (N, 1), of which timm gathers those that it keeps."""
        if not self.adapted:
            return self.original.get_embed(self, shape, dtype=dtype)
        height, width = self.feat_shape if shape is None else shape  # pyright: ignore[reportAttributeAccessIssue]
        return torch.arange(height * width, device=self.device)[:, None]

    @property
    def adapted(self) -> bool:
        return hasattr(self, "augment")

    @property
    def device(self) -> torch.device:
        return self.rotation.omega.device

    def place(self, grid: Grid) -> Grid:
        """Positions in timm's units."""
        raise NotImplementedError  # each rotary embedding's own

    def rotaries(self, positions: Any) -> Rotary | list[Rotary]:
        """For all layers, or one a layer."""
        return self.rotation.at(positions)


class LrpeRotaryEmbeddingCat(_Rope, RotaryEmbeddingCat):
    def place(self, grid: Grid) -> Grid:
        reference: Any = self.ref_feat_shape
        grid = grid.offset(self.grid_offset)
        return grid if reference is None else grid.interpolate(reference)


class LrpeRotaryEmbeddingDinoV3(_Rope, RotaryEmbeddingDinoV3):
    def place(self, grid: Grid) -> Grid:
        by: Any = {"separate": "axis", "min": "shorter", "max": "longer"}[self.normalize_coords]
        return grid.offset(self.grid_offset).cells(by)


class LrpeRotaryEmbeddingMRope(_Rope, RotaryEmbeddingMRope):
    def place(self, grid: Grid) -> Grid:
        return grid


class LrpeRotaryEmbeddingMixed(_Rope, RotaryEmbeddingMixed):
    @property
    def device(self) -> torch.device:
        return self.freqs.device

    def place(self, grid: Grid) -> Grid:
        return grid

    def rotaries(self, positions: Any) -> list[Rotary]:
        omega = omega_by_layer(self.freqs, self.grid_indexing == "xy")
        return [Rotary(omega[i], positions, "interleaved", impl=self.impl) for i in range(self.depth)]


class LrpeEva(Adapted, Eva):
    rope: Any

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, Any]:
        if not getattr(self.rope, "adapted", False):
            return self.original._pos_embed(self, x)
        height, width = x.shape[1:3] if self.dynamic_img_size else self.patch_embed.grid_size
        x, index = self.original._pos_embed(self, x)
        assert index is not None
        return x, self.rope.rotaries(lay_out_patches(self.rope, height, width, self.num_prefix_tokens, index))


class EncoderWithRope(Adapted):
    """An encoder that adds positions to patches (B, H, W, C), such as those of Qwen3-VL and DeepSeek's models."""

    rope: Any

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, Any]:
        if not getattr(self.rope, "adapted", False):
            return self.original._pos_embed(self, x)
        height, width = x.shape[1:3]
        x, index = self.original._pos_embed(self, x)
        return x, self.rope.rotaries(lay_out_patches(self.rope, height, width, 0, index))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_adapted(self, EncoderWithRope)


def lay_out_patches(rope: Any, height: int, width: int, num_prefix_tokens: int, index: Tensor) -> Grid | Coordinates:
    """Where the patches are, of which timm has gathered those with these numbers."""
    positions: Any = rope.place(Grid((height, width), prefix=num_prefix_tokens))
    if rope.augment is not None:
        positions = rope.augment(positions, index.device)
    if index.ndim > 2:  # gathered: (B, 1, N, 1), or (N, B, 1) where each layer has its own
        positions = positions.take(index[..., 0].T if isinstance(rope, RotaryEmbeddingMixed) else index[:, 0, :, 0])
    return positions


def omega_by_layer(freqs: Tensor, xy: bool) -> Tensor:
    """(depth, H, C, K) from timm's parameter (K, depth, H, C), whose axes may be (x, y)."""
    omega = (freqs if freqs.dtype == torch.float64 else freqs.float()).permute(1, 2, 3, 0)
    return omega.flip(-1) if xy else omega


class _Attention(Adapted):
    """timm's attention, encoding q and k as the :class:`Rotary` says that comes in place of sin and cos."""

    def forward(self, x: Tensor, rope: Any = None, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x (B, N, C) → (B, N, C)."""
        own = cast(Any, self)
        if not isinstance(rope, Rotary):
            return self.original.forward(self, x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        gate = getattr(own, "gate", None)
        q, k, v = self._project(x)
        q, k = rope(own.q_norm(q), own.k_norm(k))
        groups = getattr(own, "num_kv_groups", 1)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = attend(own, q, k, v, attn_mask, is_causal)
        out = own.norm(out.transpose(1, 2).flatten(2))
        return own.proj_drop(own.proj(out if gate is None else out * gate(x).sigmoid()))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, N, D), strided views of the projections."""
        own = cast(Any, self)
        if own.qkv is None:
            projected = [linear(x) for linear in (own.q_proj, own.k_proj, own.v_proj)]
            q, k, v = (y.unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for y in projected)
            return q, k, v
        if getattr(own, "q_bias", None) is None:
            qkv = own.qkv(x)
        else:
            bias = torch.cat((own.q_bias, own.k_bias, own.v_bias))
            qkv = own.qkv(x) + bias if own.qkv_bias_separate else F.linear(x, own.qkv.weight, bias)
        return split_qkv(qkv.unflatten(-1, (3, own.num_heads, own.head_dim)))


class LrpeEvaAttention(_Attention, EvaAttention):
    pass


class LrpeAttentionRope(_Attention, AttentionRope):
    pass


def plan(model: nn.Module, impl: Impl) -> list[Step]:
    """The exchanges that put our encoding into every ViT of ``model`` that has one; raises where one does not fit."""
    found: dict[str, Any] = {path or "model": part for path, part in parts(model).items() if isinstance(part, Eva)}
    for path, part in found.items():
        if type(part) is not Eva:
            raise ValueError(
                f"{path}: expected timm's Eva itself, got {type(part).__name__}, a subclass, which may differ from it"
            )
    rotary = {path: vit for path, vit in found.items() if vit.rope is not None}
    encoders: dict[str, Any] = {path or "model": part for path, part in parts(model).items() if _is_encoder(part)}
    if found and not rotary:
        raise ValueError(
            f"{next(iter(found))}: expected an Eva with a rotary encoding, got one without (use_rot_pos_emb=False)"
        )
    steps = [step for path, vit in rotary.items() for step in plan_vit(path, vit, LrpeEva, impl)]
    for path, vit in encoders.items():
        steps += plan_vit(path, vit, adapted_class(EncoderWithRope, type(vit)), impl)
    return steps


def _is_encoder(part: Any) -> bool:
    """Whether positions come into a model as in :class:`EncoderWithRope`: the code that brings them there is the same.

    Told by the source of ``_pos_embed`` and of what calls it: that of timm's encoders, or one that is equal to it.
    """
    if isinstance(part, (Eva, Adapted)) or type(getattr(part, "rope", None)) not in ROPES:
        return False
    return any(
        all(normal_source(type(part), name) == normal_source(cls, name) for name in ("_pos_embed", "forward_features"))
        for cls in _encoders()
    )


@cache
def _encoders() -> tuple[type, ...]:
    """Those that are known, as far as timm has them."""
    found: list[type] = []
    for module, name in (("qwen3_vit", "Qwen3VitEncoder"), ("deepseek_vit", "DeepseekVitEncoder")):
        try:
            found.append(getattr(import_module(f"timm.models.{module}"), name))
        except (ImportError, AttributeError):
            continue
    return tuple(found)


def plan_vit(path: str, vit: Any, cls: Any, impl: Impl) -> list[Step]:
    attentions = [block.attn for block in vit.blocks]
    for i, attn in enumerate(attentions):
        if type(attn) not in ATTENTIONS:
            raise ValueError(
                f"{path}.blocks.{i}.attn: expected timm's EvaAttention or AttentionRope, got {type(attn).__name__}"
            )
    build = ROPES.get(type(vit.rope))
    if build is None:
        raise ValueError(
            f"{path}.rope: expected one of {', '.join(rope.__name__ for rope in ROPES)}, got {type(vit.rope).__name__}"
        )
    halves = {bool(getattr(attn, "rotate_half", False)) for attn in attentions}
    own = isinstance(vit.rope, RotaryEmbeddingMRope) or getattr(vit.rope, "rotate_half", halves.copy().pop())
    if halves != {own}:
        raise ValueError(f"{path}.rope: expected rotate_half as in all its attentions, got {sorted(halves)} there")
    head_dims = {attn.head_dim for attn in attentions}
    head_dim = vit.rope.dim // getattr(vit.rope, "num_heads", 1)
    if head_dims != {head_dim}:
        raise ValueError(f"{path}.rope: expected the attentions' head_dim {sorted(head_dims)}, got {head_dim}")
    device = next(vit.parameters()).device
    step = build(path, vit.rope, {"pairs": "half" if halves.pop() else "interleaved", "device": device, "impl": impl})
    augment = None
    if getattr(vit.rope, "aug_active", False):
        # timm draws from torch's own generator, which is seeded by rank.
        draws = {name: getattr(vit.rope, f"{name}_coords") for name in ("shift", "jitter", "rescale")}
        augment = AugmentPositions(**draws, seed=torch.initial_seed()).train(vit.training)
    step.attributes["augment"] = augment
    return [Step(vit, cls), step, *(Step(attn, ATTENTIONS[type(attn)]) for attn in attentions)]


def _axial(path: str, rope: Any, name: str, cls: Any, series: Tensor | None, options: dict[str, Any]) -> Step:
    """Fixed frequencies: the scheme's at the rotary's own temperature; (x, y) is its axes the other way round.

    series: those that the rotary holds, of which it keeps a table where its grid is fixed.
    """
    chosen = preset(name, rope.dim, base=rope.temperature)
    found = found_series(series, chosen.omega[0].sum(-1)[: rope.dim // 4])
    table = getattr(rope, "pos_embed", None) if isinstance(rope, RotaryEmbeddingCat) else rope.pos_embed_cached
    if table is None or table.is_meta:
        omegas = [with_series(path, chosen.omega, found)]
    else:
        feat_shape: Any = rope.feat_shape
        grid, half = cls.place(rope, Grid(tuple(feat_shape))), options["pairs"] == "half"
        omegas = [chosen.omega] if found is None else [chosen.omega, with_series(path, chosen.omega, found)]
        omegas = [omega for omega in omegas if _tells(table, grid, omega, rope.grid_indexing == "xy", half)]
    if not omegas:
        raise ValueError(
            f"{path}.rope: expected a table of its frequencies, got another; make it anew (set_input_size) or take "
            "dynamic_img_size=True"
        )
    omega = omegas[0].flip(-1) if rope.grid_indexing == "xy" else omegas[0]
    return Step(rope, cls, {"rotation": PresetRotate(chosen, omega=omega, **options)})


def _tells(table: Tensor, grid: Grid, omega: Tensor, xy: bool, half: bool) -> bool:
    """Whether these are the sines and cosines of this grid, as far as their dtype shows it."""
    omega = omega.flip(-1) if xy else omega
    angles = grid.coordinates(dtype=torch.float64) @ omega[0].transpose(-2, -1)
    angles = torch.cat([angles, angles], -1) if half else angles.repeat_interleave(2, -1)
    expected = torch.cat([angles.sin(), angles.cos()], -1)
    found = table.detach().cpu().double()
    atol = max(2e-5, 1e-6 * angles.abs().max().item()) + 2 * torch.finfo(table.dtype).eps
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=atol)


def _cat(path: str, rope: Any, options: dict[str, Any]) -> Step:
    if rope.in_pixels or getattr(rope, "grid_type", "index") != "index":
        raise ValueError(f"{path}.rope: expected a grid counted in patches (in_pixels=False), got one in pixels")
    return _axial(path, rope, "eva02", LrpeRotaryEmbeddingCat, getattr(rope, "bands", None), options)


def _dinov3(path: str, rope: Any, options: dict[str, Any]) -> Step:
    if rope.min_period is not None or rope.temperature is None:
        raise ValueError(f"{path}.rope: expected periods from a temperature, got min_period={rope.min_period}")
    if rope.grid_indexing == "xy" and TorchVersion(timm.__version__) < "1.0.31":  # which left the axes (height, width)
        raise ValueError(f"{path}.rope: grid_indexing='xy' expects timm 1.0.31 or newer, got {timm.__version__}")
    return _axial(path, rope, "dinov3", LrpeRotaryEmbeddingDinoV3, 2 * math.pi / rope.periods, options)


def _interleaved(path: str, rope: Any, options: dict[str, Any]) -> Step:
    """Fixed frequencies, one a pair, each of time, height or width; an image has no time."""
    chosen = preset("eva02", rope.dim, base=rope.temperature)
    steps = torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu") / (rope.dim // 2)
    exact = float(rope.temperature) ** -steps
    series = found_series(rope.inv_freq, exact)
    axis: Tensor = rope.axis.detach()
    if axis.is_meta:
        made: Any = RotaryEmbeddingMRope(rope.dim, rope.mrope_section, device="cpu")
        axis = made.axis
    of_axis = axis.cpu()[:, None] == torch.tensor([1, 2], device="cpu")
    omega = of_axis * (exact if series is None else series)[:, None]
    return Step(rope, LrpeRotaryEmbeddingMRope, {"rotation": PresetRotate(chosen, omega=omega[None], **options)})


def _mixed(path: str, rope: Any, options: dict[str, Any]) -> Step:
    """Learned: timm's parameter stays where it is, and is the frequencies."""
    if options["pairs"] != "interleaved":
        raise ValueError(f"{path}.rope: expected mixed frequencies with rotate_half=False, got True")
    return Step(rope, LrpeRotaryEmbeddingMixed, {"impl": options["impl"]})


ROPES: dict[type, Callable[[str, Any, dict[str, Any]], Step]] = {
    RotaryEmbeddingCat: _cat,
    RotaryEmbeddingDinoV3: _dinov3,
    RotaryEmbeddingMixed: _mixed,
    RotaryEmbeddingMRope: _interleaved,
}
ATTENTIONS: dict[type, type] = {EvaAttention: LrpeEvaAttention, AttentionRope: LrpeAttentionRope}
