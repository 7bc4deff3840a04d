"""timm's ViTs that are given patches and where each is: NaFlexViT with a rotary encoding, and the tower of Gemma 4.

Source: timm 1.0.31, ``timm/models/naflexvit.py`` and ``timm/models/gemma4_vit.py``.
"""

from __future__ import annotations

from typing import Any, cast

from .extras import require

require("timm")

import timm
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ..engine.validate import Impl
from ..positions.coordinates import Coordinates, check_index
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
from .timm_rotary import plan_vit

__all__ = ["plan"]


def plan(model: nn.Module, impl: Impl) -> list[Step]:
    """The exchanges that put our encoding into these; raises where one does not fit."""
    steps: list[Step] = []
    for path, part in parts(model).items():
        path, module = path or "model", type(part).__module__
        if isinstance(part, NaFlexVit) and part.rope is not None:
            if type(part) is not NaFlexVit:
                raise ValueError(
                    f"{path}: expected timm's NaFlexVit itself, got {type(part).__name__}, a subclass, which may differ"
                )
            if TorchVersion(timm.__version__) < "1.0.31":  # whose tables of a batch were those of other grids and pairs
                raise ValueError(f"{path}: a NaFlexVit expects timm 1.0.31 or newer, got {timm.__version__}")
            steps += plan_vit(path, part, LrpeNaFlexVit, impl)
        elif module == "timm.models.gemma4_vit" and type(part).__name__ == "Gemma4VitEncoder":
            steps += _plan_gemma4(path, part, impl)
    return steps


# --- NaFlexViT -------------------------------------------------------------------------------------------------


class Ragged(Rotary):
    """Samples with grids of their own: behind the last patch of one, q and k are zero, as timm's zeros make them."""

    positions: Coordinates

    def encode(self, *xs: Tensor) -> Any:
        rotated: Any = self.positions.rotated
        kept = nn.functional.pad(rotated, (self.positions.prefix, 0), value=True)[:, None, :, None]
        return super().encode(*(x * kept for x in xs))


class LrpeNaFlexVit(Adapted, NaFlexVit):
    rope: Any
    num_prefix_tokens: int
    embeds: Any

    def _generate_rope_naflex(self, x: Tensor, patch_coord: Tensor) -> Any:
        if not getattr(self.rope, "adapted", False):
            return self.original._generate_rope_naflex(self, x, patch_coord)
        return patch_coord[:, None, :, :1]  # timm drops tokens of it, and :meth:`_forward_embeds` has no use for it

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        embeds = self.original._forward_embeds(self, x, patch_coord, patch_valid, attn_mask)
        if not getattr(self.rope, "adapted", False):
            return embeds
        positions: Any
        if patch_coord is None:
            shape = self.embeds.dynamic_feat_size(tuple(x.shape[-2:]))
            positions = self.rope.place(Grid(tuple(shape), prefix=self.num_prefix_tokens))
            if self.rope.augment is not None:
                positions = self.rope.augment(positions, x.device)
        else:
            positions = place_samples(self.rope, patch_coord, self.num_prefix_tokens)
        if embeds["keep_indices"] is not None:
            positions = positions.take(embeds["keep_indices"])
        rotaries = self.rope.rotaries(positions)
        if patch_coord is not None:
            rotaries = [_ragged(r) for r in rotaries] if isinstance(rotaries, list) else _ragged(rotaries)
        return {**embeds, "rope_embeds": rotaries, "keep_indices": None}  # what was dropped is no more in the positions


def _ragged(rotary: Rotary) -> Ragged:
    return Ragged(rotary.omega, rotary.positions, rotary.pairs, rotary.amplitude, rotary.impl, rotary.rotary_dim)


def place_samples(rope: Any, patch_coord: Tensor, num_prefix_tokens: int) -> Coordinates:
    """In timm's units, where the patches (B, N) are: row by row on the grid that each sample's ``patch_coord`` spans.

    Raises:
        ValueError: fewer patches than a grid has; on a GPU a device-side assertion.
    """
    size = patch_coord.amax(1) + 1  # (B, 2)
    num, total = size.prod(-1), patch_coord.shape[1]
    try:
        check_index(num - 1, total)
    except IndexError:
        raise ValueError(
            f"patch_coord: expected all patches of each grid, row by row, got {total} for grids of {size.tolist()}"
        ) from None
    number = torch.arange(total, device=patch_coord.device)
    width = size[:, 1:]
    coords = torch.stack([number // width, number % width], -1).float()
    size = size[:, None].float()
    if isinstance(rope, RotaryEmbeddingDinoV3):
        by = {"separate": size, "min": size.amin(-1, keepdim=True), "max": size.amax(-1, keepdim=True)}
        coords = 2 * (coords + (0.5 + rope.grid_offset)) / by[rope.normalize_coords] - 1
    elif isinstance(rope, RotaryEmbeddingCat):
        coords = coords + rope.grid_offset
        if rope.ref_feat_shape is not None:
            coords = coords * torch.tensor(rope.ref_feat_shape, device=coords.device) / size
    augment: Any = rope.augment
    if augment is not None and augment.training:
        coords = _augment_samples(augment, coords, size[:, 0])
    return Coordinates(coords, prefix=num_prefix_tokens, rotated=number < num[:, None])


def _augment_samples(augment: Any, coords: Tensor, size: Tensor) -> Tensor:
    """A draw for each size in the batch, as timm has it: that of the first sample of this size."""
    ends = Coordinates(torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64))
    drawn = torch.stack([augment(ends).coords for _ in coords]).to(coords)
    first = (size[:, None] == size[None]).all(-1).int().argmax(1)
    shift, unit = drawn[first].unbind(1)
    return coords * (unit - shift)[:, None] + shift[:, None]


# --- Gemma 4 ---------------------------------------------------------------------------------------------------


class Gemma4Rope(Adapted):
    """A rotary that gives :class:`Rotary` for both cos and sin, at places (x, y)."""

    extras = ("rotation",)
    rotation: PresetRotate

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Any, Any]:
        if not hasattr(self, "rotation"):
            return self.original.forward(self, x, position_ids)
        rotary = self.rotation.at(Coordinates(position_ids))
        return rotary, rotary

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_adapted(self, Gemma4Rope)


class Gemma4Attention(Adapted):
    extras = ("scale",)
    scale: float

    def forward(self, x: Tensor, rope_cos: Any, rope_sin: Any, attn_mask: Tensor | None = None) -> Tensor:
        """x (B, N, C) → (B, N, C)."""
        own = cast(Any, self)
        if not isinstance(rope_cos, Rotary):
            return self.original.forward(self, x, rope_cos, rope_sin, attn_mask=attn_mask)
        projected = [linear(x).unflatten(-1, (-1, own.head_dim)) for linear in (own.q_proj, own.k_proj, own.v_proj)]
        norms = (own.q_norm, own.k_norm, own.v_norm)
        q, k, v = (norm(y).transpose(1, 2) for norm, y in zip(norms, projected, strict=True))
        q, k = rope_cos(q, k)
        if own.num_kv_groups > 1:
            k, v = k.repeat_interleave(own.num_kv_groups, 1), v.repeat_interleave(own.num_kv_groups, 1)
        x = attend(own, q, k, v, attn_mask, False)
        return own.proj_drop(own.o_proj(x.transpose(1, 2).flatten(2)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_adapted(self, Gemma4Attention)


def _plan_gemma4(path: str, vit: Any, impl: Impl) -> list[Step]:
    rope, attentions = vit.rotary_emb, [block.attn for block in vit.blocks]
    for name, part in [("rotary_emb", rope), *((f"blocks.{i}.attn", attn) for i, attn in enumerate(attentions))]:
        expected = "Gemma4RotaryEmbedding2D" if part is rope else "Gemma4Attention"
        if (type(part).__module__, type(part).__name__) != ("timm.models.gemma4_vit", expected):
            raise ValueError(f"{path}.{name}: expected timm's {expected}, got {type(part).__name__}")
    chosen = preset("gemma4_vision", rope.head_dim, base=rope.rope_theta)
    exact = chosen.omega[0].sum(-1)[: rope.head_dim // 4]
    omega = with_series(f"{path}.rotary_emb", chosen.omega, found_series(rope.inv_freq, exact))
    device = next(vit.parameters()).device
    rotation = PresetRotate(chosen, omega=omega.flip(-1), device=device, impl=impl)  # (x, y)
    steps = [Step(rope, adapted_class(Gemma4Rope, type(rope)), {"rotation": rotation})]
    return steps + [Step(attn, adapted_class(Gemma4Attention, type(attn)), {"scale": 1.0}) for attn in attentions]
