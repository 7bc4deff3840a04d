"""Vision transformers with relative position encodings, registered with timm.

Build a model with ``timm.create_model("lrpe_vit_tiny_patch16_224", encoding="rotate")``. The default encoding is
"rotate", unless you pass ``absolute``. The class is in :mod:`lrpe_md.integrations.timm`, next to ``adapt``, which
converts a timm model to this class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, get_pretrained_cfg, register_model
from torch import nn

from lrpe_md.integrations.timm import LrpeVisionTransformer, checkpoint_filter_fn

__all__ = [
    "lrpe_vit_base_patch16_224", "lrpe_vit_large_patch16_224", "lrpe_vit_small_patch16_224",
    "lrpe_vit_tiny_patch16_224",
]  # fmt: skip


def with_positions(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add encoding="rotate" to a model's arguments if no other argument specifies positions."""
    silent = "encoding" not in kwargs and kwargs.get("absolute", "none") == "none"
    return {**kwargs, "encoding": "rotate"} if silent else kwargs


def rename_final_norm(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Rename a checkpoint's final norm for a model that averages tokens and then applies this norm."""
    renamed, own = dict(state_dict), model.state_dict().keys()
    for name in ("weight", "bias"):
        if f"fc_norm.{name}" in own and f"norm.{name}" in renamed:
            renamed.setdefault(f"fc_norm.{name}", renamed.pop(f"norm.{name}"))
    return renamed


def timm_cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "", "num_classes": 1000, "input_size": (3, 224, 224), "pool_size": None, "crop_pct": 0.9,
        "interpolation": "bicubic", "fixed_input_size": False, "mean": IMAGENET_INCEPTION_MEAN,
        "std": IMAGENET_INCEPTION_STD, "first_conv": "patch_embed.proj", "classifier": "head", **kwargs,
    }  # fmt: skip


def _timm_weights(size: str) -> dict[str, dict[str, Any]]:
    """Return two pretrained configurations for a size: timm's, and one without weights for ``lrpe_vit_*.untrained``."""
    name = f"vit_{size}_patch16_224"
    cfg: Any = get_pretrained_cfg(name)
    known = {key: getattr(cfg, key) for key in ("hf_hub_id", "mean", "std", "crop_pct", "interpolation", "license")}
    return {f"lrpe_{name}.{cfg.tag}": timm_cfg(**known), f"lrpe_{name}.untrained": timm_cfg()}


default_cfgs = generate_default_cfgs(
    {name: cfg for size in ("tiny", "small", "base", "large") for name, cfg in _timm_weights(size).items()}
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> LrpeVisionTransformer:
    out_indices: int | Sequence[int] = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        LrpeVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **with_positions(kwargs),
    )


@register_model
def lrpe_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVisionTransformer:
    """Build a ViT-Ti/16, with 5.7 M parameters if there is no absolute position embedding."""
    return _create(
        "lrpe_vit_tiny_patch16_224",
        pretrained,
        **{"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs},
    )


@register_model
def lrpe_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVisionTransformer:
    """Build a ViT-S/16."""
    return _create(
        "lrpe_vit_small_patch16_224",
        pretrained,
        **{"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs},
    )


@register_model
def lrpe_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVisionTransformer:
    """Build a ViT-B/16."""
    return _create(
        "lrpe_vit_base_patch16_224",
        pretrained,
        **{"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12, **kwargs},
    )


@register_model
def lrpe_vit_large_patch16_224(pretrained: bool = False, **kwargs: Any) -> LrpeVisionTransformer:
    """Build a ViT-L/16."""
    return _create(
        "lrpe_vit_large_patch16_224",
        pretrained,
        **{"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16, **kwargs},
    )
