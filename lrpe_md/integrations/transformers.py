"""transformers' Qwen2-VL, Qwen2.5-VL and Qwen3-VL (and its MoE): language model and vision tower.

Their attentions call a function of their modeling file, ``apply_rotary_pos_emb(q, k, cos, sin)``. The rotary module
gives a :class:`Rotary` where it gave cos and sin, and that function is exchanged for one that takes both: models that
are not adapted compute as before. Source: transformers 5.23, ``transformers/models/qwen*_vl*/modeling_*.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .extras import require

require("transformers")

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_vl_moe

from ..engine.validate import Impl
from ..positions.coordinates import Coordinates
from ..presets.registry import preset
from .exchange import Adapted, PresetRotate, Rotary, Step, found_series, install, parts, with_series
from .norms import DeferredNorm, NormedAttention, defer_norms

__all__ = ["plan"]


# --- rotary modules ------------------------------------------------------------------------------------------


class WindowedRotary(Rotary):
    """The tower of Qwen2.5-VL brings cos and sin (N, ..) into the order of its windows: by shape and by index."""

    positions: Coordinates

    def reshape(self, *shape: int) -> Rotary:
        return self._moved(self.positions.coords.reshape(shape))

    def __getitem__(self, index: Any) -> Rotary:
        return self._moved(self.positions.coords[index])

    def _moved(self, coords: Tensor) -> Rotary:
        return self.at(replace(self.positions, coords=coords))


class _Rope(Adapted):
    extras = ("rotation",)
    rotation: PresetRotate


class _Text(_Rope):
    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """position_ids (3, B, N), or (B, N) for text alone."""
        if not hasattr(self, "rotation"):
            return self.original.forward(self, x, position_ids)
        coords = position_ids.expand(3, -1, -1).permute(1, 2, 0)
        # One sample's positions hold for a whole batch.
        return self.rotation.at(Coordinates(coords[0] if coords.shape[0] == 1 else coords)), None


class _Vision(_Rope):
    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """position_ids (N, 2)."""
        if not hasattr(self, "rotation"):
            return self.original.forward(self, x, position_ids)
        rotary = self._rotary(Coordinates(position_ids))
        return rotary, rotary

    def _rotary(self, positions: Coordinates) -> Rotary:
        return self.rotation.at(positions)


class LrpeQwen2VLRotaryEmbedding(_Text, qwen2_vl.Qwen2VLRotaryEmbedding):
    pass


class LrpeQwen2_5_VLRotaryEmbedding(_Text, qwen2_5_vl.Qwen2_5_VLRotaryEmbedding):
    pass


class LrpeQwen3VLTextRotaryEmbedding(_Text, qwen3_vl.Qwen3VLTextRotaryEmbedding):
    pass


class LrpeQwen3VLMoeTextRotaryEmbedding(_Text, qwen3_vl_moe.Qwen3VLMoeTextRotaryEmbedding):
    pass


class LrpeQwen2VLVisionRotaryEmbedding(_Vision, qwen2_vl.Qwen2VLVisionRotaryEmbedding):
    pass


class LrpeQwen2_5_VLVisionRotaryEmbedding(_Vision, qwen2_5_vl.Qwen2_5_VLVisionRotaryEmbedding):
    def _rotary(self, positions: Coordinates) -> Rotary:
        rotary = self.rotation.at(positions)
        return WindowedRotary(rotary.omega, positions, rotary.pairs, rotary.amplitude, rotary.impl, rotary.rotary_dim)


class LrpeQwen3VLVisionRotaryEmbedding(_Vision, qwen3_vl.Qwen3VLVisionRotaryEmbedding):
    pass


class LrpeQwen3VLMoeVisionRotaryEmbedding(_Vision, qwen3_vl_moe.Qwen3VLMoeVisionRotaryEmbedding):
    pass


ROPES: dict[type, tuple[type, str]] = {
    cls.__bases__[-1]: (cls, name)
    for name, classes in {
        "qwen2_vl": (LrpeQwen2VLRotaryEmbedding, LrpeQwen2_5_VLRotaryEmbedding),
        "qwen3_vl": (LrpeQwen3VLTextRotaryEmbedding, LrpeQwen3VLMoeTextRotaryEmbedding),
        "qwen2_vl_vision": (
            LrpeQwen2VLVisionRotaryEmbedding, LrpeQwen2_5_VLVisionRotaryEmbedding, LrpeQwen3VLVisionRotaryEmbedding,
            LrpeQwen3VLMoeVisionRotaryEmbedding,
        ),
    }.items()
    for cls in classes
}  # fmt: skip


# --- the functions that the attentions call ----------------------------------------------------------------------


def _text(rotary: Rotary, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(q, k)


def _vision(rotary: Rotary, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (N, H, D), images end to end."""
    q, k = rotary.bnhd(q[None], k[None])
    return q[0], k[0]


FUNCTIONS = {"apply_rotary_pos_emb": _text, "apply_rotary_pos_emb_vision": _vision}


# --- the exchange ----------------------------------------------------------------------------------------------


class LrpeQwen3VLTextRMSNorm(DeferredNorm, qwen3_vl.Qwen3VLTextRMSNorm):
    pass


class LrpeQwen3VLMoeTextRMSNorm(DeferredNorm, qwen3_vl_moe.Qwen3VLMoeTextRMSNorm):
    pass


class LrpeQwen3VLTextAttention(NormedAttention, qwen3_vl.Qwen3VLTextAttention):
    pass


class LrpeQwen3VLMoeTextAttention(NormedAttention, qwen3_vl_moe.Qwen3VLMoeTextAttention):
    pass


NORMS = {cls.__bases__[-1]: cls for cls in (LrpeQwen3VLTextRMSNorm, LrpeQwen3VLMoeTextRMSNorm)}
ATTENTIONS = {cls.__bases__[-1]: cls for cls in (LrpeQwen3VLTextAttention, LrpeQwen3VLMoeTextAttention)}


def plan(model: nn.Module, impl: Impl) -> list[Step]:
    """The exchanges that put our encoding into the known rotary modules of ``model``."""
    steps: list[Step] = []
    for path, part in parts(model).items():
        if type(part) in ROPES:
            cls, name = ROPES[type(part)]
            steps.append(Step(part, cls, {"rotation": _rotation(path, part, name, impl)}))
    if steps:
        steps += defer_norms(model, ATTENTIONS, NORMS)
        install(model, FUNCTIONS)
    return steps


def _rotation(path: str, rope: Any, name: str, impl: Impl) -> PresetRotate:
    """The preset at the rotary's own base, sections and scaling; where it has other frequencies, those."""
    config, parameters = rope.config, rope.config.rope_parameters
    if "dynamic" in rope.rope_type or rope.rope_type == "longrope":
        raise ValueError(f"{path}: expected frequencies that don't depend on the length, got {rope.rope_type!r}")
    width = getattr(config, "embed_dim", None) or config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    sections = getattr(rope, "mrope_section", None)
    scaling = None
    if rope.rope_type not in ("default", "axial"):
        if rope.inv_freq.is_meta:
            raise ValueError(f"{path}: expected {rope.rope_type!r} frequencies in memory, got them on the meta device")
        stretched, amplitude = rope.inv_freq.detach().cpu().double(), float(rope.attention_scaling)
        scaling = lambda theta: (stretched, amplitude)  # noqa: E731
    split = None if sections is None else _split(path, name, sections, head_dim // 2)
    chosen = preset(name, head_dim, base=parameters["rope_theta"], split=split, scaling=scaling)
    series = found_series(rope.inv_freq, chosen.omega[0].sum(-1)[: len(rope.inv_freq)])
    omega = with_series(path, chosen.omega, series)
    return PresetRotate(chosen, omega=omega, device=rope.inv_freq.device, impl=impl)


def _split(path: str, name: str, sections: Sequence[int], num_pairs: int) -> list[int]:
    """Pairs of time, height and width, as the original takes its ``mrope_section``."""
    if len(sections) < 3 or (name != "qwen3_vl" and (len(sections) > 3 or min(sections) < 0)):
        raise ValueError(f"{path}: expected an mrope_section of time, height and width, got {list(sections)}")
    if name == "qwen3_vl":  # reads two of them, takes turns as far as there are pairs, and time has the rest
        height, width = (len(range(num_pairs)[i : 3 * n : 3]) for i, n in enumerate(sections[1:3], 1))
        return [num_pairs - height - width, height, width]
    if sum(sections) != num_pairs:
        raise ValueError(
            f"{path}: expected an mrope_section that sums to head_dim / 2 = {num_pairs}, got {list(sections)}"
        )
    return list(sections)
