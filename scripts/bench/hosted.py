"""Rotary models from other libraries for ``scripts.bench training``, with their published widths but few layers."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
import typer
from torch import Tensor, nn

from lrpe_md import adapt_rotary

Arguments = dict[str, Any]  # keyword arguments of a model's forward method


@dataclass(frozen=True)
class Hosted:
    """Model from another library, stock or adapted.

    Args:
        library, name: library, and the name of a model class in it. For timm, pass the name of a model instead. For
            transformers, pass a configuration class and a model class, separated by a space.
        config: settings that differ from the library's defaults.
        arguments: function (model, batch, size) -> arguments of forward, on the default device.
        size: shape of the token grid that the model rotates.
    """

    library: str
    name: str
    config: dict[str, Any]
    arguments: Callable[[Any, int, tuple[int, ...]], Arguments]
    size: tuple[int, ...]
    batch: int = 1
    baselines: ClassVar = {"stock": "stock", "adapted": "stock", "adapted-other": "stock"}
    default: ClassVar = ("stock", "adapted")
    weights: ClassVar = torch.bfloat16
    other: ClassVar[Any] = None  # another checkout's package, for "adapted-other"; see import_checkout

    def build(self, encoding: str) -> nn.Module:
        torch.manual_seed(0)
        model = self._create()
        if encoding == "adapted":
            adapt_rotary(model)
        elif encoding == "adapted-other":
            self.other.adapt_rotary(model)
        return model.to(self.weights)

    def _create(self) -> nn.Module:
        library: Any = import_module(self.library)
        if self.library == "timm":
            return library.create_model(self.name, **self.config)
        if self.library == "transformers":
            config, model = self.name.split()
            return getattr(library, model)(getattr(library, config)(**self.config))
        return getattr(library, self.name)(**self.config)

    def inputs(self, model: Any, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensor arguments. Other arguments are cheap, and are rebuilt at each step."""
        torch.manual_seed(0)
        with device:
            given = self.arguments(model, batch, self.size)
        return tuple(value for value in given.values() if isinstance(value, Tensor))

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        raw = getattr(model, "_orig_mod", model)
        with torch.device("meta"):
            given = self.arguments(raw, len(inputs[0]), self.size)
        tensors = iter(inputs)
        given = {name: next(tensors) if isinstance(value, Tensor) else value for name, value in given.items()}
        positional = given.pop("", None)
        found = model(**given) if positional is None else model(positional, **given)
        if not isinstance(found, Tensor):
            found = found[0]
        return found.float().square().mean()

    def tokens(self, model: Any, batch: int) -> int:
        return batch * math.prod(self.size)


def import_checkout(root: Path, name: str = "lrpe_md_other") -> Any:
    """Import another checkout's package under a different name, so that both versions run in one process.

    The package is copied to a temporary folder on ``sys.path``, where compiler processes also find it. The operators of
    the copy get a separate namespace.

    Raises:
        typer.BadParameter: if the checkout has no package.
    """
    package = root / "lrpe_md"
    if not (package / "_ops.py").is_file():
        raise typer.BadParameter(
            f"--other: expected a checkout of this repository, got {root}, which has no lrpe_md/_ops.py"
        )
    folder = Path(tempfile.mkdtemp(prefix="other-checkout-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(package, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    operators = folder / name / "_ops.py"
    operators.write_text(operators.read_text(encoding="utf-8").replace("lrpe_md", name), encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return import_module(name)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=Hosted.weights)


def _wan(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    config = model.config
    latents = [n * patch for n, patch in zip(size, config.patch_size, strict=True)]
    return {
        "hidden_states": _draw(batch, config.in_channels, *latents), "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": _draw(batch, 512, config.text_dim), "return_dict": False,
    }  # fmt: skip


def _flux(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    config, (height, width) = model.config, size
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width).expand(height, width)
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)
    return {
        "hidden_states": _draw(batch, height * width, config.in_channels), "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": _draw(batch, 512, config.joint_attention_dim), "img_ids": places.to(Hosted.weights),
        "pooled_projections": _draw(batch, config.pooled_projection_dim), "guidance": torch.full((batch,), 3.5),
        "txt_ids": torch.zeros(512, 3, dtype=Hosted.weights), "return_dict": False,
    }  # fmt: skip


def _qwen_image(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    config = model.config
    return {
        "hidden_states": _draw(batch, math.prod(size), config.in_channels), "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": _draw(batch, 256, config.joint_attention_dim), "img_shapes": [[(1, *size)]] * batch,
        "return_dict": False,
    }  # fmt: skip


def _hunyuan_video(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    config, (frames, height, width) = model.config, size
    latents = frames * config.patch_size_t, height * config.patch_size, width * config.patch_size
    return {
        "hidden_states": _draw(batch, config.in_channels, *latents), "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": _draw(batch, 256, config.text_embed_dim),
        "encoder_attention_mask": torch.ones(batch, 256, dtype=torch.bool),
        "pooled_projections": _draw(batch, config.pooled_projection_dim), "guidance": torch.full((batch,), 3.5),
        "return_dict": False,
    }  # fmt: skip


def _ltx(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    config, (frames, height, width) = model.config, size
    return {
        "hidden_states": _draw(batch, math.prod(size), config.in_channels), "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": _draw(batch, 128, config.caption_channels),
        "encoder_attention_mask": torch.ones(batch, 128, dtype=torch.bool), "num_frames": frames, "height": height,
        "width": width, "rope_interpolation_scale": (8 / 25, 32, 32), "return_dict": False,
    }  # fmt: skip


def _text(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    return {"input_ids": torch.randint(model.config.vocab_size, (batch, *size)), "use_cache": False}


def _vision(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    config = model.config
    pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grids = torch.tensor([[1, *size]] * batch)
    return {"hidden_states": _draw(batch * math.prod(size), pixels), "grid_thw": grids}


def _image(model: Any, batch: int, size: tuple[int, ...]) -> Arguments:
    patches = model.patch_embed.patch_size if hasattr(model, "patch_embed") else [model.config.patch_size] * 2
    pixels = [n * patch for n, patch in zip(size, patches, strict=True)]
    name = "" if hasattr(model, "patch_embed") else "pixel_values"
    return {name: _draw(batch, 3, *pixels)}


HOSTED: dict[str, Hosted] = {
    "wan": Hosted(
        "diffusers", "WanTransformer3DModel", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 2}, _wan,
        (21, 30, 52),
    ),
    "flux": Hosted(
        "diffusers", "FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True},
        _flux, (64, 64),
    ),
    "qwen_image": Hosted("diffusers", "QwenImageTransformer2DModel", {"num_layers": 4}, _qwen_image, (64, 64)),
    "hunyuan_video": Hosted(
        "diffusers", "HunyuanVideoTransformer3DModel",
        {"num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1}, _hunyuan_video, (9, 34, 60),
    ),
    "ltx": Hosted("diffusers", "LTXVideoTransformer3DModel", {"num_layers": 6}, _ltx, (16, 16, 24), 2),
    "qwen3": Hosted(
        "transformers", "Qwen3Config Qwen3Model",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 40960,
        },
        _text, (8192,),
    ),
    "qwen3_vl": Hosted(
        "transformers", "Qwen3VLTextConfig Qwen3VLTextModel",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
            },
        },
        _text, (8192,),
    ),
    "qwen3_vl_vision": Hosted(
        "transformers", "Qwen3VLVisionConfig Qwen3VLVisionModel", {"depth": 6, "deepstack_visual_indexes": [1, 3, 5]},
        _vision, (32, 32), 16,
    ),
    "llama": Hosted(
        "transformers", "LlamaConfig LlamaModel",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        },
        _text, (8192,),
    ),
    "dinov3": Hosted(
        "transformers", "DINOv3ViTConfig DINOv3ViTModel",
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 16,
            "image_size": 512, "num_register_tokens": 4,
        },
        _image, (32, 32), 32,
    ),
    "eva02": Hosted("timm", "eva02_large_patch14_448", {"depth": 6, "num_classes": 0}, _image, (32, 32), 32),
    "rope_mixed": Hosted(
        "timm", "vit_base_patch16_rope_mixed_224", {"depth": 6, "num_classes": 0}, _image, (14, 14), 128
    ),
}  # fmt: skip
