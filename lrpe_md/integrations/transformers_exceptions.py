"""Classes of transformers that look like what is known and are not, and what is special about each."""

from __future__ import annotations

__all__ = ["EXCEPTIONS"]

EXCEPTIONS: dict[str, str] = {  # by the name of a rotary module's class, or of the class that has it
    "VJEPA2RopeAttention": (
        "expected one angle for each pair of channels, got a VJEPA2RopeAttention, whose cosines are tiled while its "
        "pairs are neighbours: what it does to q and k is no rotation"
    ),
}
