"""The encodings that are compared, one table for all tasks, and which of them a task's model can have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Encoding:
    """How a model is told where its tokens are.

    Args:
        encoding: of q and k, as the backbones name it.
        arguments: of it.
        model: other arguments of the model.
        needs: what the model must be able to do, see :class:`Backbone`.
    """

    encoding: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


def _entry(encoding: str | None = None, *needs: str, model: dict[str, Any] | None = None, **arguments: Any) -> Encoding:
    return Encoding(encoding, arguments, model or {}, frozenset(needs))


# The phase is PoPE's (arXiv 2509.10534), on the keys alone: on both it cancels in q·k.
ENCODINGS: dict[str, Encoding] = {
    "none": _entry(),
    "learned": _entry(None, "table", model={"absolute": "learned"}),
    "sincos": _entry(None, "sincos", model={"absolute": "sincos"}),
    "space-only": _entry("rotate", "time", model={"temporal": False}),
    "rotate": _entry("rotate"),
    "rotate-base-10000": _entry("rotate", "axes", base=10000.0),
    "rotate-learnable": _entry("rotate", learnable=True),
    "rotate-split": _entry("rotate", "time", split=[2, 3, 3]),
    "rotate-mixed-fixed": _entry("mixed", "axes", learnable=False),
    "rotate-mixed": _entry("mixed", "axes"),
    "rotate-text-axis": _entry("rotate", "caption", model={"text_positions": "axis", "image_after": [0]}),
    "rotate-text-diagonal": _entry("rotate", "caption", model={"text_positions": "diagonal"}),
    "wan": _entry("wan", "time"),
    "flux1": _entry("flux1", "caption"),
    "qwen_image": _entry("qwen_image", "caption"),
    "cosine": _entry("cosine", act="none"),
    "cosine-split": _entry("cosine", "time", act="none", split=[2, 3, 3]),
    "cosine-relu": _entry("cosine", act="relu"),
    "cosine-silu": _entry("cosine", act="silu"),
    "cosine-silu-phase": _entry("cosine", act="silu", phase="k"),
    "cosine-softplus": _entry("cosine", act="softplus"),
    "cosine-softplus-phase": _entry("cosine", act="softplus", phase="k"),
    "cosine-learnable": _entry("cosine", act="none", learnable=True),
    "cosine-softplus-learnable": _entry("cosine", act="softplus", learnable=True),
    "cosine-mixed": _entry("cosine", "axes", base=10.0, act="none", frequencies="mixed"),
    "cosine-mixed-learnable": _entry("cosine", "axes", base=10.0, act="none", frequencies="mixed", learnable=True),
}


@dataclass(frozen=True)
class Backbone:
    """What the model of a task can do.

    Args:
        can: of "axes" (more than one), "time" (three, the first of them time), "caption" (text beside the image),
            "table" (a learned absolute table), "sincos" (an absolute one that is computed).
        base: of the frequencies where an encoding names none.
        attentions: arguments of the model by attention.
    """

    can: frozenset[str]
    base: float
    attentions: dict[str, dict[str, Any]]

    @property
    def encodings(self) -> list[str]:
        return [name for name, each in ENCODINGS.items() if each.needs <= self.can]

    def arguments(self, encoding: str, attention: str) -> dict[str, Any]:
        """Of the model."""
        chosen = ENCODINGS[encoding]
        given = {"base": self.base} if chosen.encoding in ("rotate", "cosine") else {}
        return {
            "encoding": chosen.encoding, "encoding_kwargs": {**given, **chosen.arguments}, **chosen.model,
            **self.attentions[attention],
        }  # fmt: skip


# Linear attention takes relu features where the encoding names no activation. A norm stands for the denominator, so
# that activations with negative values can be compared, too. The axial base is RoPE-ViT's (arXiv 2403.13298).
_WITHOUT_DENOMINATOR = {"attention": "linear", "normalizer": "none"}
_VIT = {
    "softmax": {"attention": "softmax"},
    "linear": {**_WITHOUT_DENOMINATOR, "scale_attn_norm": True},
}
IMAGES = Backbone(frozenset({"axes", "table", "sincos"}), 100.0, _VIT)
VIDEOS = Backbone(frozenset({"axes", "time", "table", "sincos"}), 100.0, _VIT)
CAPTIONED = Backbone(
    frozenset({"axes", "caption", "sincos"}),
    100.0,
    {"softmax": {"attention": "softmax"}, "linear": _WITHOUT_DENOMINATOR},
)
TEXT = Backbone(frozenset(), 10000.0, {name: {"attention": name} for name in ("softmax", "linear")})
