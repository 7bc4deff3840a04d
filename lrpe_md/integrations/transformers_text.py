"""transformers' language models: Llama and those that are built like it.

As in :mod:`.transformers`, the rotary module gives a :class:`Rotary` where it gave cos and sin, and the function
that the attentions call takes both. Source: transformers 5.23, ``transformers/models/*/modeling_*.py``.
"""

from __future__ import annotations

from typing import Any

from .extras import require

require("transformers")

import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.cohere2.modeling_cohere2 import Cohere2RotaryEmbedding
from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding
from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.granite.modeling_granite import GraniteRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..engine.validate import Impl
from ..frequencies.rope_parameters import RULES, rope_frequencies
from ..modules import Rotate1d
from ..positions.coordinates import Coordinates
from .exchange import Adapted, Exact, Rotary, Step, found_series, install, parts
from .norms import DeferredNorm, NormedAttention, defer_norms

__all__ = ["plan"]


class SequenceRotate(Exact, Rotate1d):
    """:class:`lrpe_md.Rotate1d` with the frequencies of a model."""


class _Sequence(Adapted):
    extras = ("rotation",)
    rotation: SequenceRotate
    rope_type: str
    inv_freq: Tensor
    attention_scaling: float

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """position_ids (B, N)."""
        if not hasattr(self, "rotation"):
            return self.original.forward(self, x, position_ids)
        omega = self.rotation.get_omega()
        if _by_length(self.rope_type):  # the original updates its frequencies
            self.original.forward(self, x, position_ids)
            omega = self.inv_freq.float()[None, :, None]
        # One sample's positions hold for a whole batch.
        coords = position_ids[0, :, None] if position_ids.shape[0] == 1 else position_ids[..., None]
        return Rotary(
            omega, Coordinates(coords), self.rotation.pairs, self.attention_scaling, self.rotation.impl,
            2 * omega.shape[1],
        ), None  # fmt: skip


class LrpeLlamaRotaryEmbedding(_Sequence, LlamaRotaryEmbedding):
    pass


class LrpeMistralRotaryEmbedding(_Sequence, MistralRotaryEmbedding):
    pass


class LrpeQwen2RotaryEmbedding(_Sequence, Qwen2RotaryEmbedding):
    pass


class LrpeQwen3RotaryEmbedding(_Sequence, Qwen3RotaryEmbedding):
    pass


class LrpeGemmaRotaryEmbedding(_Sequence, GemmaRotaryEmbedding):
    pass


class LrpeGemma2RotaryEmbedding(_Sequence, Gemma2RotaryEmbedding):
    pass


class LrpeGraniteRotaryEmbedding(_Sequence, GraniteRotaryEmbedding):
    pass


class LrpePhiRotaryEmbedding(_Sequence, PhiRotaryEmbedding):
    pass


class LrpePhi3RotaryEmbedding(_Sequence, Phi3RotaryEmbedding):
    pass


class LrpeGlmRotaryEmbedding(_Sequence, GlmRotaryEmbedding):
    pass


class LrpeGlm4RotaryEmbedding(_Sequence, Glm4RotaryEmbedding):
    pass


class LrpeCohereRotaryEmbedding(_Sequence, CohereRotaryEmbedding):
    pass


class LrpeCohere2RotaryEmbedding(_Sequence, Cohere2RotaryEmbedding):
    pass


ROPES: dict[type, tuple[type, Any]] = {
    cls.__bases__[-1]: (cls, pairs)
    for pairs, classes in {
        "half": (
            LrpeLlamaRotaryEmbedding, LrpeMistralRotaryEmbedding, LrpeQwen2RotaryEmbedding, LrpeQwen3RotaryEmbedding,
            LrpeGemmaRotaryEmbedding, LrpeGemma2RotaryEmbedding, LrpeGraniteRotaryEmbedding, LrpePhiRotaryEmbedding,
            LrpePhi3RotaryEmbedding,
        ),
        "interleaved": (
            LrpeGlmRotaryEmbedding, LrpeGlm4RotaryEmbedding, LrpeCohereRotaryEmbedding, LrpeCohere2RotaryEmbedding,
        ),
    }.items()
    for cls in classes
}  # fmt: skip


class LrpeQwen3RMSNorm(DeferredNorm, Qwen3RMSNorm):
    pass


class LrpeQwen3Attention(NormedAttention, Qwen3Attention):
    pass


def plan(model: nn.Module, impl: Impl) -> list[Step]:
    """The exchanges that put our encoding into the known rotary modules of ``model``."""
    steps: list[Step] = []
    for path, part in parts(model).items():
        if type(part) in ROPES:
            cls, pairs = ROPES[type(part)]
            steps.append(Step(part, cls, {"rotation": _rotation(path, part, pairs, impl)}))
    if steps:
        steps += defer_norms(model, {Qwen3Attention: LrpeQwen3Attention}, {Qwen3RMSNorm: LrpeQwen3RMSNorm})
        install(model, {"apply_rotary_pos_emb": Rotary.__call__})
    return steps


def _rotation(path: str, rope: Any, pairs: Any, impl: Impl) -> SequenceRotate:
    """Exact frequencies of the model's configuration; where it has others, those."""
    config, buffer = rope.config, rope.inv_freq
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = None
    if rope.rope_type in RULES:
        theta, _ = rope_frequencies(config.rope_parameters, head_dim, config.max_position_embeddings)
    found = found_series(buffer, theta)
    theta = theta if found is None else found
    if theta is None:
        raise ValueError(f"{path}: expected {rope.rope_type!r} frequencies in memory, got them on the meta device")
    return SequenceRotate(
        head_dim, theta=theta, rotary_dim=2 * len(theta), pairs=pairs, impl=impl, device=buffer.device,
        dtype=torch.float64,
    )  # fmt: skip


def _by_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
