"""Adapters for timm, diffusers and transformers models, and for your own models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_adapter import adapt_attention as adapt_attention
    from .attention_adapter import restore_attention as restore_attention
    from .attention_adapter import set_positions as set_positions
    from .drop_ins import drop_in as drop_in
    from .recognition import recognise as recognise
    from .rotary import adapt_rotary as adapt_rotary
    from .rotary import restore_rotary as restore_rotary
    from .timm import adapt as adapt

_PLACES = {
    "adapt": ".timm", "drop_in": ".drop_ins", "recognise": ".recognition",
    **dict.fromkeys(("adapt_attention", "restore_attention", "set_positions"), ".attention_adapter"),
    **dict.fromkeys(("adapt_rotary", "restore_rotary"), ".rotary"),
    **dict.fromkeys(("prepare_scaling", "set_places", "set_scaling"), ".run_time"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
