"""A tiny random model of each rotary one of timm, for ``python -m lrpe_md.integrations --table``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from .extras import require

require("timm")

import timm
import torch
from timm.models.eva import Eva
from torch import nn

from .trial import Candidate, Result, differentiate

__all__ = ["build", "call", "candidates", "read_shape"]

PATCHES = 6  # to a side: a multiple of what encoders merge


def candidates() -> Iterator[Candidate]:
    for name in timm.list_models():
        shape = read_shape(name)
        if shape is not None:
            yield Candidate(name, partial(build, name, shape), call)


def read_shape(name: str) -> dict[str, Any] | None:
    """The smallest arguments of a model with a rotary embedding; None: it has none, or can't be built."""
    if not any(part in name for part in ("eva", "rope", "dinov3", "vit")):
        return None
    try:
        with torch.device("meta"):
            model: Any = timm.create_model(name)
    except Exception:
        return None
    if not any("Rotary" in type(part).__name__ for part in model.modules()):
        return None
    vit = model if hasattr(model, "blocks") else getattr(model, "encoder", model)
    shape: dict[str, Any] = {"depth": 2, "num_heads": 2, "embed_dim": 2 * vit.blocks[0].attn.head_dim}
    if isinstance(vit, Eva):
        shape["num_classes"] = 3
    if "sapiens2" in name:  # by block
        shape["num_kv_heads"] = (2, 1)
    patch = vit.patch_embed.patch_size
    return {**shape, "img_size": PATCHES * (patch if isinstance(patch, int) else patch[0])}


def build(name: str, shape: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **shape)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    model.image_size = shape["img_size"]
    return model.eval()


def call(model: Any) -> Result:
    torch.manual_seed(0)
    x = torch.randn(2, 3, model.image_size, model.image_size)
    y = model(x)
    return differentiate(model, [y] if isinstance(y, torch.Tensor) else [t for t in y if isinstance(t, torch.Tensor)])
