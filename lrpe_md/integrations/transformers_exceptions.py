"""Classes of transformers that look like what is known and are not, and what is special about each."""

from __future__ import annotations

__all__ = ["EXCEPTIONS"]


def _no_positions(name: str) -> str:
    return f"expected a rotary module that is given positions, got a {name}, which counts a sequence from zero itself"


def _own_table(name: str) -> str:
    return f"expected a rotary module, got a {name}, which takes sines and cosines out of a table by position"


EXCEPTIONS: dict[str, str] = {  # by the name of a rotary module's class, or of the class that has it
    "VJEPA2RopeAttention": (
        "expected one angle for each pair of channels, got a VJEPA2RopeAttention, whose cosines are tiled while its "
        "pairs are neighbours: what it does to q and k is no rotation"
    ),
    "HunYuanVLRotaryEmbedding": (
        "expected one angle for each pair of channels, got a HunYuanVLRotaryEmbedding, whose sections are of channels "
        "and not of pairs, so that the two of a pair have angles of different axes: what it does to q and k is no "
        "rotation"
    ),
    "MLCDRotaryEmbedding": (
        "expected cos and sin of positions alone, got those of an MLCDVisionModel, whose class token has learned angles"
    ),
    "LightGluePositionalEncoder": (
        "expected positions times fixed frequencies, got a LightGluePositionalEncoder: a linear layer makes its angles"
    ),
    "EfficientLoFTRRotaryEmbedding": (
        "expected a rotary module that is given positions, got an EfficientLoFTRRotaryEmbedding, which is given "
        "features, and whose tables are expanded and reshaped on their way"
    ),
    "RoFormerSelfAttention": _own_table("RoFormerSelfAttention"),
    **{name: _own_table(name) for name in ("GPTJAttention", "CodeGenAttention")},
    **{
        name: _no_positions(name)
        for name in (
            "ClvpRotaryPositionalEmbedding", "SeamlessM4TConformerRotaryPositionalEmbedding",
            "Wav2Vec2BertRotaryPositionalEmbedding", "Wav2Vec2ConformerRotaryPositionalEmbedding",
        )
    },
}  # fmt: skip
