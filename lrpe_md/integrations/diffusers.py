"""diffusers' transformers: FLUX.1, Wan, HunyuanVideo, and what is made of the same parts (ControlNets, VACE).

The rotary module gives positions where it gave cos and sin, and the attention processors encode q and k with them.
Source: diffusers 0.42, ``diffusers/models/transformers/transformer_{flux,wan,hunyuan_video}.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .extras import require

require("diffusers")

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video import (
    HunyuanVideoAttnProcessor2_0,
    HunyuanVideoRotaryPosEmbed,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanRotaryPosEmbed
from torch import Tensor, nn

from ..engine.validate import Impl
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..presets.registry import preset
from ..presets.scheme import Preset
from ..reference import angles, cos_sin
from .diffusers_rule import explain_by_rule, is_rope, plan_by_rule, refusals_by_rule
from .exchange import Adapted, PresetRotate, Rotary, Step, parts
from .norms import join_norms, norm_of

__all__ = ["plan"]


# --- rotary modules ------------------------------------------------------------------------------------------


class Tabled(Rotary):
    """Also the pair of the library's tables (N, D), each pair's entry twice, for attention processors that take those:
    IP adapters, and whatever is set after the model was adapted."""

    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin, float32, of the same frequencies and places."""
        where = self.positions
        where = where.explicit(self.omega.device) if isinstance(where, Grid) else where.explicit()
        amplitude = torch.as_tensor(self.amplitude, device=self.omega.device).expand(1, self.omega.shape[1])
        theta = angles(where.coords, self.omega, rotated=where.rotated)
        cos, sin = (
            table[0].float().repeat_interleave(2, -1) for table in cos_sin(theta, amplitude, where.rotated)
        )  # fmt: skip
        return cos, sin

    def __iter__(self) -> Any:
        return iter(self.tables())

    def __getitem__(self, index: int) -> Tensor:
        return self.tables()[index]

    def __len__(self) -> int:
        return 2


class TabledWan(Tabled):
    """Wan's are (1, N, 1, D)."""

    def tables(self) -> tuple[Tensor, Tensor]:
        cos, sin = Tabled.tables(self)
        return cos[None, :, None], sin[None, :, None]


class TabledRotate(PresetRotate):
    rotary = Tabled


class TabledWanRotate(PresetRotate):
    rotary = TabledWan


class _Rope(Adapted):
    extras = ("rotation",)
    rotation: PresetRotate

    def _at(self, *segments: Any) -> Rotary:
        return self.rotation.at(self.rotation.preset.positions(*segments))


class LrpeFluxPosEmbed(_Rope, FluxPosEmbed):
    def forward(self, ids: Tensor) -> Any:
        """ids (N, 3), text and image as the pipeline places them."""
        if not hasattr(self, "rotation"):
            return self.original.forward(self, ids)
        return self.rotation.at(Coordinates(ids.float()))  # the pipeline makes them in the dtype of the latents


class LrpeWanRotaryPosEmbed(_Rope, WanRotaryPosEmbed):
    def forward(self, hidden_states: Tensor) -> Any:
        """hidden_states (B, C, T, H, W)."""
        if not hasattr(self, "rotation"):
            return self.original.forward(self, hidden_states)
        sizes = zip(hidden_states.shape[2:], self.patch_size, strict=True)
        return self._at(tuple(size // patch for size, patch in sizes))


class LrpeHunyuanVideoRotaryPosEmbed(_Rope, HunyuanVideoRotaryPosEmbed):
    def forward(self, hidden_states: Tensor) -> Any:
        """hidden_states (B, C, T, H, W)."""
        if not hasattr(self, "rotation"):
            return self.original.forward(self, hidden_states)
        frames, height, width = hidden_states.shape[2:]
        return self._at((frames // self.patch_size_t, height // self.patch_size, width // self.patch_size))


# --- attention processors, as diffusers calls them -------------------------------------------------------------


class _Processor(Adapted):
    """Called with anything else than a :class:`Rotary`, they are diffusers' own."""

    _attention_backend: Any
    _parallel_config: Any

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        return self._run(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    def _run(self, attn: Any, x: Tensor, text: Tensor | None, mask: Tensor | None, rotary: Any) -> Any:
        if isinstance(rotary, Rotary):
            return self._encoded(attn, x, text, mask, rotary)
        return self.original.__call__(self, attn, x, text, mask, rotary)

    def _encoded(self, attn: Any, x: Tensor, text: Tensor | None, mask: Tensor | None, rotary: Rotary) -> Any:
        raise NotImplementedError  # each model's own

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """Attention of (B, N, H, D) on the backend that the user chose → (B, N, H D)."""
        if self._parallel_config is not None:
            raise ValueError(
                "parallel_config: expected none, a split sequence has other positions than its rank's grid says; use "
                "restore_rotary(model) before enable_parallelism"
            )
        out = dispatch_attention_fn(q, k, v, attn_mask=attn_mask, backend=self._attention_backend)
        return out.flatten(2, 3).to(q.dtype)


def _qkv(attn: Any, x: Tensor, names: tuple[str, str, str, str]) -> tuple[Tensor, ...]:
    """q, k, v (B, N, H D), by a projection each or by one where they were fused."""
    if getattr(attn, "fused_projections", False):
        return getattr(attn, names[3])(x).chunk(3, dim=-1)
    return tuple(getattr(attn, name)(x) for name in names[:3])


def _call(norm: Any, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _normed(rotary: Rotary, q: Tensor, k: Tensor, norm_q: Any, norm_k: Any) -> tuple[Tensor, Tensor]:
    """q and k (B, N, H, D) normalised over a head and encoded, at once where that can be."""
    norm = norm_of(norm_q, norm_k, q.dtype)
    if norm is None:
        q, k = _call(norm_q, q), _call(norm_k, k)
    return rotary.normed(norm).bnhd(q, k)


OWN = ("to_q", "to_k", "to_v", "to_qkv")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj", "to_added_qkv")


class LrpeFluxAttnProcessor(_Processor, FluxAttnProcessor):
    def _encoded(self, attn: Any, x: Tensor, text: Tensor | None, mask: Tensor | None, rotary: Rotary) -> Any:
        q, k, v = (y.unflatten(-1, (-1, attn.head_dim)) for y in _qkv(attn, x, OWN))
        num_text = 0 if text is None else text.shape[1]
        if text is None:
            q, k = _normed(rotary, q, k, attn.norm_q, attn.norm_k)
        else:  # in front
            tq, tk, tv = (y.unflatten(-1, (-1, attn.head_dim)) for y in _qkv(attn, text, ADDED))
            tq, tk = _normed(rotary.cut(0, num_text), tq, tk, attn.norm_added_q, attn.norm_added_k)
            q, k = _normed(rotary.cut(num_text), q, k, attn.norm_q, attn.norm_k)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((tq, q), (tk, k), (tv, v)))
        x = self._attend(q, k, v, mask)
        if text is None:
            return x
        text, image = x[:, :num_text].contiguous(), x[:, num_text:].contiguous()
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


class LrpeWanAttnProcessor(_Processor, WanAttnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,  # diffusers passes it by this name
    ) -> Any:
        return self._run(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def _encoded(self, attn: Any, x: Tensor, text: Tensor | None, mask: Tensor | None, rotary: Rotary) -> Any:
        if text is not None:
            raise ValueError("encoder_hidden_states: expected none where positions are encoded, got cross-attention")
        q, k, v = _qkv(attn, x, OWN)
        norm = norm_of(attn.norm_q, attn.norm_k, q.dtype, (attn.heads, attn.heads))
        if norm is None:
            q, k = attn.norm_q(q), attn.norm_k(k)
        q, k, v = (y.unflatten(-1, (attn.heads, -1)) for y in (q, k, v))
        x = self._attend(*rotary.normed(norm).bnhd(q, k), v, mask)
        return attn.to_out[1](attn.to_out[0](x))


class LrpeHunyuanVideoAttnProcessor2_0(_Processor, HunyuanVideoAttnProcessor2_0):
    def _encoded(self, attn: Any, x: Tensor, text: Tensor | None, mask: Tensor | None, rotary: Rotary) -> Any:
        video = x
        num_text = 0 if text is None else text.shape[1]

        def project(x: Tensor, names: tuple[str, str, str]) -> list[Tensor]:
            return [getattr(attn, name)(x).unflatten(2, (attn.heads, -1)) for name in names]

        one = attn.add_q_proj is None  # a single stream: one projection for both
        x = video if text is None or not one else torch.cat([video, text], dim=1)
        q, k, v = project(x, OWN[:3])
        rotary = rotary.behind(num_text)
        if text is None or one:
            q, k = _normed(rotary, q, k, attn.norm_q, attn.norm_k)
        else:
            tq, tk, tv = project(text, ADDED[:3])
            own = norm_of(attn.norm_q, attn.norm_k, q.dtype)
            norm = join_norms((own, own, norm_of(attn.norm_added_q, attn.norm_added_k, q.dtype)))
            if norm is None:
                q, k = _call(attn.norm_q, q), _call(attn.norm_k, k)
                tq, tk = _call(attn.norm_added_q, tq), _call(attn.norm_added_k, tk)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((q, tq), (k, tk), (v, tv)))
            q, k = rotary.normed(norm).bnhd(q, k)
        x = self._attend(q, k, v, mask)
        if text is None:
            return x, None
        video, text = x[:, :-num_text], x[:, -num_text:]
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return video, text


# --- which part becomes what -----------------------------------------------------------------------------------


def _flux(path: str, rope: Any) -> Preset:
    if len(rope.axes_dim) != 3:
        raise ValueError(f"{path}: expected 3 axes, got axes_dim={tuple(rope.axes_dim)}")
    return _shared("flux1", rope.axes_dim, rope.theta)


def _hunyuan_video(path: str, rope: Any) -> Preset:
    return _shared("hunyuan_video", rope.rope_dim, rope.theta)


def _shared(name: str, axes_dim: Any, base: float) -> Preset:
    return preset(name, sum(axes_dim), base=base, split=[dim // 2 for dim in axes_dim])


def _wan(path: str, rope: Any) -> Preset:
    """It keeps no theta, only tables that follow from it: one that makes the same."""
    chosen = preset("wan", rope.attention_head_dim)
    cos, sin = rope.freqs_cos, rope.freqs_sin
    if cos.is_meta or _tells(cos, sin, chosen):
        return chosen
    t_dim = rope.t_dim
    if t_dim >= 4 and cos.shape[0] > 1:
        # The last frequency of time, theta^-((t_dim - 2) / t_dim), is the angle of its second row.
        last = torch.atan2(sin[1, t_dim - 1].double(), cos[1, t_dim - 1].double()).item()
        theta = last ** (-t_dim / (t_dim - 2)) if last > 0 else 1.0
        for base in (float(round(theta)), float(f"{theta:.6g}"), theta):
            if base > 0 and _tells(cos, sin, chosen := preset("wan", rope.attention_head_dim, base=base)):
                return chosen
    raise ValueError(
        f"{path}: expected Wan's tables of one theta, got others, or a theta that {cos.dtype} does not tell: call "
        "adapt_rotary before the model is cast to 16 bits"
    )


def _tells(cos: Tensor, sin: Tensor, chosen: Preset) -> bool:
    """Whether these are the tables of this preset, as far as their dtype shows it."""
    rows = torch.arange(cos.shape[0], dtype=torch.float64, device="cpu")[:, None]
    angles = (rows * chosen.omega[0].sum(-1)).repeat_interleave(2, -1)
    bound = 2e-7 * rows + 2 * torch.finfo(cos.dtype).eps
    return all(
        found.shape == table.shape and bool(((found.detach().cpu().double() - table).abs() <= bound).all())
        for found, table in ((cos, angles.cos()), (sin, angles.sin()))
    )


ROPES: dict[type, tuple[type, type[PresetRotate], Callable[[str, Any], Preset]]] = {
    FluxPosEmbed: (LrpeFluxPosEmbed, TabledRotate, _flux),
    WanRotaryPosEmbed: (LrpeWanRotaryPosEmbed, TabledWanRotate, _wan),
    HunyuanVideoRotaryPosEmbed: (LrpeHunyuanVideoRotaryPosEmbed, TabledRotate, _hunyuan_video),
}
PROCESSORS: dict[type, type] = {
    FluxAttnProcessor: LrpeFluxAttnProcessor,
    WanAttnProcessor: LrpeWanAttnProcessor,
    HunyuanVideoAttnProcessor2_0: LrpeHunyuanVideoAttnProcessor2_0,
}


def plan(model: nn.Module, impl: Impl) -> list[Step]:
    """The exchanges that put our encoding into the known rotary modules of ``model`` and the attentions they serve."""
    everything = parts(model)
    if any(type(part) not in ROPES and is_rope(type(part)) for part in everything.values()):
        return plan_by_rule(model, impl)
    ropes = {path: part for path, part in everything.items() if type(part) in ROPES}
    steps: list[Step] = []
    for path, rope in ropes.items():
        cls, rotate, choose = ROPES[type(rope)]
        device = next(iter(model.parameters())).device
        steps.append(Step(rope, cls, {"rotation": rotate(choose(path, rope), device=device, impl=impl)}))
    for path, part in everything.items() if ropes else ():
        if type(part) in PROCESSORS:
            steps.append(Step(part, PROCESSORS[type(part)]))
        elif path.endswith("processor") and _takes_rotary(part):
            raise ValueError(
                f"{path}: expected one of {', '.join(p.__name__ for p in PROCESSORS)}, got {type(part).__name__}"
            )
    return steps


def _takes_rotary(processor: Any) -> bool:
    return any(name.endswith("rotary_emb") for name in inspect.signature(processor).parameters)


def refusals(model: nn.Module) -> dict[str, str]:
    """Why rotary modules of ``model`` are left as they are."""
    return refusals_by_rule(model)


def explain(model: nn.Module) -> str | None:
    """Why nothing of ``model`` can be taken, where that can be said."""
    return explain_by_rule(model)
