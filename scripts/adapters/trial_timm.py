"""Build and call a tiny version of each rotary timm model, for ``lrpe-md adapters``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import timm
import torch
from timm.models.eva import Eva
from torch import nn

from .trial import Candidate, Result, differentiate

__all__ = ["build", "call", "candidates", "read_shape"]

PATCHES = 6  # per side: a multiple of the encoders' merge sizes
NAFLEX = {  # NaFlexViT's rotary encodings for which timm registers no model name
    "axial": {}, "mixed": {}, "dinov3": {"rope_rotate_half": True}, "mrope": {"rope_mrope_section": (4, 6, 6)},
}  # fmt: skip
SIZES = ((3, 5), (6, 2), (3, 5), (4, 4))  # patch grids in a batch


def candidates() -> Iterator[Candidate]:
    for name in timm.list_models():
        shape = read_shape(name)
        if shape is not None:
            yield Candidate(name, partial(build, name, shape), call)
    for rope_type in NAFLEX:
        name = f"naflexvit_base_patch16_gap, rope_type={rope_type}"
        yield Candidate(name, partial(build_naflex, rope_type), call_naflex)
    for name in ("eva02_tiny_patch14_224", "vit_small_patch16_rope_mixed_224", "vit_small_patch16_dinov3"):
        shape = {**(read_shape(name) or {}), "use_naflex": True}
        yield Candidate(f"{name}, use_naflex=True", partial(build, name, shape), call_naflex)


def read_shape(name: str) -> dict[str, Any] | None:
    """Return arguments for a tiny version of a rotary model, or None if the model has no RoPE or can't be built."""
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
    if "sapiens2" in name:  # one value per block
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


def build_naflex(rope_type: str, **kwargs: Any) -> nn.Module:
    """Build a NaFlexViT with a rotary encoding. ``kwargs`` are passed to timm."""
    shape = {"depth": 2, "num_heads": 2, "embed_dim": 64, "num_classes": 3, "patch_size": 4, "img_size": 4 * PATCHES}
    return build("naflexvit_base_patch16_gap", {**shape, "rope_type": rope_type, **NAFLEX[rope_type], **kwargs})


def call_naflex(model: Any) -> Result:
    """Call a model with images of one size, and with patches from images of several sizes, including padding tokens."""
    torch.manual_seed(0)
    size = model.image_size
    images, given = torch.randn(2, 3, size, 2 * size), patches(model.embeds.patch_size[0] ** 2 * 3)
    outputs = [model(images), model(given), model.forward_features(**given)["patches"]]
    return differentiate(model, outputs)


def patches(width: int) -> dict[str, torch.Tensor]:
    """Return a batch of patches from images of several sizes, with padding."""
    most = max(h * w for h, w in SIZES) + 2
    coord = torch.zeros(len(SIZES), most, 2, dtype=torch.int64)
    valid = torch.zeros(len(SIZES), most, dtype=torch.bool)
    for i, (h, w) in enumerate(SIZES):
        coord[i, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        valid[i, : h * w] = True
    return {"patches": torch.randn(len(SIZES), most, width), "patch_coord": coord, "patch_valid": valid}


def call(model: Any) -> Result:
    torch.manual_seed(0)
    x = torch.randn(2, 3, model.image_size, model.image_size)
    y = model(x)
    return differentiate(model, [y] if isinstance(y, torch.Tensor) else [t for t in y if isinstance(t, torch.Tensor)])
