"""Our kernels in place of the rotary code of other libraries' models, their weights and outputs as they were.

    from models.rotary import adapt_rotary
    model = adapt_rotary(timm.create_model("vit_small_patch16_rope_mixed_224", pretrained=True))
    adapt_rotary(pipe.transformer)                      # diffusers: FLUX.1, Wan, HunyuanVideo
    adapt_rotary(Qwen3VLForConditionalGeneration.from_pretrained(..))
    adapt_rotary(LlamaForCausalLM.from_pretrained(..))

It lives here and not in ``lrpe_md``, which imports none of these libraries: what it exchanges are their classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from lrpe_md.engine.validate import IMPLS, Impl

from .common import PresetRotate, Rotary, apply, restore

__all__ = ["PresetRotate", "Rotary", "adapt_rotary", "restore_rotary"]

Model = TypeVar("Model", bound=nn.Module)

LIBRARIES = {  # the adapters of each, and what they take
    "timm": ((".timm_vits",), "timm's Eva (EVA-02, RoPE-ViT, DINOv3, Perception Encoder)"),
    "diffusers": ((".diffusers_models",), "diffusers' FLUX.1, Wan and HunyuanVideo transformers"),
    "transformers": (
        (".transformers_models", ".transformers_text"),
        "transformers' Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and language models (Llama, Mistral, Qwen, GLM, Cohere, ..)",
    ),
}


def adapt_rotary(model: Model, *, impl: Impl = "auto") -> Model:
    """Encode q and k with :func:`lrpe_md.rotate` in a built model of timm, diffusers or transformers; returns it.

    In place, and in one launch for q and k. Parameters, their names, hooks and optimizers stay as they are: only the
    classes of the model's parts change, which :func:`restore_rotary` takes back. Frequencies that the model learns
    (RoPE-ViT mixed) stay its parameter and get their gradient. An adapted model may be adapted again.

    Args:
        model: one with parts of these, itself or anywhere inside:

            - timm: ``Eva`` with a rotary: ``eva02_*``, ``vit_*_rope_*``, ``vit_*_dinov3*``, ``vit_pe_*``;
            - diffusers: FLUX.1, Wan 2.1 and 2.2, HunyuanVideo transformers, and ControlNets made of the same parts;
            - transformers: Qwen2-VL, Qwen2.5-VL and Qwen3-VL, language model and vision tower; Llama, Mistral, Qwen2,
              Qwen3, Gemma, Gemma 2, Granite, Phi, Phi-3, GLM, GLM-4, Cohere and Cohere2, with every length scaling.
        impl: see :func:`lrpe_md.rotate`.

    The angles are exact in float32 whatever the model's dtype; transformers rounds cos and sin to it, so that a
    16-bit model's outputs differ by that rounding. Adapt before ``torch.compile``, and don't load an adapter that
    exchanges attention processors (diffusers' IP adapters) afterwards. Random positions in training (timm's
    ``rope_*_coords``) are drawn as in timm, but from a generator of the encoding's own.

    Raises:
        TypeError: not a model, or none of its parts is known.
        ValueError: a part that does not fit, by its name; the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}; of a pipeline, its transformer")
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
    restore(model)  # what was adapted fits
    libraries = {type(part).__module__.split(".")[0] for part in model.modules()}
    steps: list[Any] = []
    for library, (adapters, _) in LIBRARIES.items():
        for adapter in adapters if library in libraries else ():
            steps += import_module(adapter, __name__).plan(model, impl)
    if not steps:
        names = "; ".join(names for _, names in LIBRARIES.values())
        raise TypeError(
            f"model: expected one with a rotary encoding of {names}, "
            f"got {type(model).__module__}.{type(model).__qualname__}"
        )
    apply(steps)
    return model


def restore_rotary(model: Model) -> Model:
    """Take back :func:`adapt_rotary`, in place; a model that is not adapted stays as it is."""
    restore(model)
    return model
