"""Build and call a tiny random model of each rotary diffusers class, for ``lrpe-md adapters``."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from diffusers.models import controlnets, transformers
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from .trial import Candidate, Result, differentiate, find_tensors

__all__ = ["build", "call", "candidate", "candidates", "inputs", "rotary_classes"]

ROTARY = re.compile(r"[Rr]otary|[Rr]ope[^r]|RoPE")


def rotary_classes() -> dict[str, type]:
    """Find the models whose files contain rotary code, except for models that are composed of other models."""
    found: dict[str, type] = {}
    for package in (transformers, controlnets):
        for info in pkgutil.iter_modules(package.__path__):
            try:
                module = import_module(f"{package.__name__}.{info.name}")
                rotary = ROTARY.search(inspect.getsource(module))
            except (ImportError, OSError):
                continue
            for name, cls in vars(module).items() if rotary else ():
                own = inspect.isclass(cls) and cls.__module__ == module.__name__ and issubclass(cls, ModelMixin)
                if own and "Multi" not in name:
                    found[name] = cls
    return dict(sorted(found.items()))


# --- their arguments ----------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {  # constructor arguments by name; lists for models that take several values
    "num_layers": 2, "num_single_layers": 1, "n_layers": 2, "depth": 2, "num_refiner_layers": 1, "n_refiner_layers": 1,
    "num_hidden_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "n_heads": 2, "n_kv_heads": 2,
    "num_heads": 2, "head_dim": 16, "joint_attention_dim": 24, "pooled_projection_dim": 24, "text_embed_dim": 24,
    "cross_attention_dim": 32, "caption_channels": 24, "text_dim": 24, "freq_dim": 32, "ffn_dim": 48, "in_channels": 4,
    "out_channels": 4, "time_embed_dim": 32, "rope_max_seq_len": 32, "cap_feat_dim": 24, "dim": 32, "hidden_size": 32,
    "axes_dims_rope": (4, 6, 6), "rope_axes_dim": (4, 6, 6), "axes_dims": (4, 6, 6), "axes_dim_rope": (4, 6, 6),
    "axes_lens": (64, 32, 32), "condition_dim": 8, "intermediate_size": 64, "num_key_value_heads": 2,
    "model_dim": 32, "ff_dim": 48, "time_dim": 32, "in_text_dim": 24, "in_text_dim2": 24, "text_embed_2_dim": 24,
    "image_embed_dim": 24, "context_in_dim": 24, "num_visual_blocks": 2, "num_text_blocks": 1,
    "timestep_guidance_channels": 32, "timestep_channels": 32,
}  # fmt: skip
WAN: dict[str, Any] = {"attention_head_dim": 12}
LTX2: dict[str, Any] = {
    "audio_num_attention_heads": 2, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16, "rope_theta": 20.0,
    "audio_in_channels": 4, "audio_out_channels": 4, "caption_channels": 24, "base_height": 16, "base_width": 16,
}  # fmt: skip
COGVIDEOX: dict[str, Any] = {
    "sample_width": 12, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 5,
    "use_rotary_positional_embeddings": True,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # constructor arguments by class
    "AnyFlowTransformer3DModel": WAN, "ChronoEditTransformer3DModel": WAN, "SkyReelsV2Transformer3DModel": WAN,
    "WanTransformer3DModel": WAN, "WanVACETransformer3DModel": {**WAN, "vace_layers": [0, 1], "vace_in_channels": 8},
    "AnyFlowFARTransformer3DModel": {**WAN, "chunk_partition": (1, 1)},
    "WanAnimateTransformer3DModel": {
        **WAN, "in_channels": 12, "latent_channels": 4, "image_dim": 16, "motion_style_dim": 8, "motion_dim": 4,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, "motion_encoder_size": 16,
        "motion_encoder_dim": 16, "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
    },
    "SanaWMLTX2RefinerTransformer3DModel": LTX2,
    "SanaVideoTransformer3DModel": {
        **WAN, "cross_attention_dim": 24, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12,
        "sample_size": 8,
    },
    "SanaWMTransformer3DModel": {"linear_head_dim": 16, "chunk_plucker_channels": 6, "caption_channels": 24},
    "BriaTransformer2DModel": {"pooled_projection_dim": None}, "BriaFiboTransformer2DModel": {"text_encoder_dim": 12},
    "BriaFibo2Transformer2DModel": {
        "n_refiner_layers": 1, "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4,
        "max_num_gist_tokens": 4, "gist_step": 1, "gist_min_text_len": 4, "gist_max_text_len": 8,
        "axes_lens": (64, 32, 32),
    },
    "ChromaTransformer2DModel": {
        "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1,
    },
    "CogVideoXTransformer3DModel": COGVIDEOX, "ConsisIDTransformer3DModel": COGVIDEOX,
    "CogView4Transformer2DModel": {"attention_head_dim": 16, "rope_axes_dim": (12, 12), "sample_size": 8},
    "GlmImageTransformer2DModel": {"prior_vq_quantizer_codebook_size": 16, "condition_dim": 8},
    "CosmosTransformer3DModel": {
        "attention_head_dim": 18, "max_size": (4, 16, 16), "adaln_lora_dim": 4, "extra_pos_embed_type": None,
    },
    "CosmosControlNetModel": {
        "attention_head_dim": 18, "model_channels": 36, "n_controlnet_blocks": 2, "in_channels": 10,
        "latent_channels": 8, "max_size": (4, 16, 16), "adaln_lora_dim": 4,
    },
    "EasyAnimateTransformer3DModel": {"mmdit_layers": 1, "patch_size": 2},
    "ErnieImageTransformer2DModel": {"ffn_hidden_size": 48, "text_in_dim": 24},
    "Flux2Transformer2DModel": {"axes_dims_rope": (4, 4, 4, 4)},
    "Flux3Transformer2DModel": {"axes_dims_rope": (4, 4, 4, 4), "cond_in_channels": 4},
    "FluxControlNetModel": {"in_channels": 4},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2, "attention_head_dim": 16, "axes_dims_rope": (8, 4, 4), "caption_channels": [12, 8],
        "text_emb_dim": 24, "num_routed_experts": 2, "num_activated_experts": 2, "llama_layers": (0, 1),
        "max_resolution": (32, 32), "force_inference_output": True, "num_layers": 1,
    },
    "HunyuanDiT2DModel": {"patch_size": 2, "cross_attention_dim_t5": 24, "sample_size": 8},
    "HunyuanDiT2DControlNetModel": {"patch_size": 2, "cross_attention_dim_t5": 24, "transformer_num_layers": 4},
    "HunyuanImageTransformer2DModel": {"rope_axes_dim": (8, 8), "text_embed_2_dim": None},
    "HunyuanVideo15Transformer3DModel": {"target_size": 16, "task_type": "t2v"},
    "HunyuanVideoFramepackTransformer3DModel": {"has_image_proj": False},
    "HunyuanVideoTransformer3DModel": {"guidance_embeds": False},
    "Kandinsky5Transformer3DModel": {"axes_dims": (4, 6, 6)},
    "Kandinsky6Transformer3DModel": {"visual_cond": False},
    "Krea2Transformer2DModel": {
        "num_key_value_heads": 1, "timestep_embed_dim": 16, "text_hidden_dim": 12, "num_text_layers": 2,
        "text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
    },
    "LTXVideoTransformer3DModel": {"cross_attention_dim": 32}, "LTX2VideoTransformer3DModel": LTX2,
    "LongCatAudioDiTTransformer": {
        "dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 24, "latent_dim": 8,
    },
    "LongCatImageTransformer2DModel": {"pooled_projection_dim": 24},
    "LuminaNextDiT2DModel": {"num_kv_heads": 2, "multiple_of": 2},
    "Lumina2Transformer2DModel": {"sample_size": 16, "num_kv_heads": 1, "multiple_of": 2},
    "MiniMaxH3Transformer3DModel": {
        "hidden_size": 24, "attention_head_dim": 16, "audio_in_channels": 6, "text_dim": 12, "freq_dim": 8,
        "time_embed_hidden_dim": 16, "time_embed_dim": 8, "rope_freq_dim": 2,
    },
    "MiniMaxMusic3Transformer1DModel": {
        "in_channels": 8, "condition_dim": 16, "ff_inner_dim": 32, "rotary_dim": 8, "fourier_embedding_dim": 16,
    },
    "MotifVideoTransformer3DModel": {"num_decoder_layers": 1, "image_embed_dim": None},
    "NucleusMoEImageTransformer2DModel": {
        "num_key_value_heads": 1, "num_experts": 4, "moe_intermediate_dim": 32, "moe_enabled": False,
        "mlp_ratio": 8.0,  # widths are rounded to multiples of 128; 4.0 would give 0
    },
    "OmniGenTransformer2DModel": {
        "num_key_value_heads": 2, "vocab_size": 16, "pad_token_id": 0, "pos_embed_max_size": 16, "time_step_dim": 16,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    },
    "JoyImageEditTransformer3DModel": {"rope_dim_list": [4, 6, 6]},
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "QwenImage21Transformer2DModel": {"axes_dims_rope": (4, 6, 6)},
    "StableAudio3DiTModel": {
        "io_channels": 8, "embed_dim": 128, "num_heads": 2, "cond_token_dim": 24, "global_cond_dim": 24,
        "local_add_cond_dim": 9, "timestep_features_dim": 16, "num_memory_tokens": 4,
    },
    "ZImageControlNetModel": {"control_layers_places": [0], "control_in_dim": 4},
}  # fmt: skip


def build(name: str) -> nn.Module:
    """Build a two-layer model with weights so large that attention is far from uniform."""
    torch.manual_seed(0)
    cls: Any = rotary_classes()[name]
    if name == "ZImageControlNetModel":
        model = cls.from_transformer(_make(cls), build("ZImageTransformer2DModel"))
        model.gradient_checkpointing = False
        return model
    return _randomize(_make(cls))


def _make(cls: Any) -> Any:
    name = cls.__name__
    parameters = inspect.signature(cls.__init__).parameters
    kwargs = {key: _same_kind(parameters[key].default, small) for key, small in SMALL.items() if key in parameters}
    return cls(**{**kwargs, **OWN.get(name, {})})


def _randomize(model: Any) -> Any:
    for part in model.modules():
        if type(part).__name__ == "LTXVideoRotaryPosEmbed":
            part.theta = 20.0  # with the default of 10,000, the stock model's rounding of float32 angles is visible
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.nan_to_num_().clamp_(-2, 2).add_(torch.randn_like(p), alpha=0.05)
    return model.eval()


def _same_kind(default: Any, small: Any) -> Any:
    return list(small) if isinstance(default, list) and isinstance(small, tuple) else small


# --- their inputs -------------------------------------------------------------------------------------------------


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _ids(height: int, width: int, axes: int = 3) -> Tensor:
    """Return position ids. The row and the column are the last two of three axes, or the middle two of four."""
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
    found = torch.zeros(height * width, axes)
    found[:, 1:3] = places
    return found


def _guidance(model: Any) -> Tensor | None:
    return torch.tensor([3.0, 4.0]) if getattr(model.config, "guidance_embeds", False) else None


def _channels(model: Any) -> int:
    return getattr(model.config, "in_channels", 4)


def _flux(model: Any) -> dict[str, Any]:
    axes = len(model.config.axes_dims_rope)
    return {
        "hidden_states": _randn(2, 24, model.config.in_channels), "encoder_hidden_states": _randn(2, 5, 24),
        "pooled_projections": _randn(2, 24), "timestep": torch.tensor([0.3, 0.7]), "img_ids": _ids(4, 6, axes),
        "txt_ids": torch.zeros(5, axes), "guidance": _guidance(model),
    }  # fmt: skip


def _video(model: Any) -> dict[str, Any]:
    return {
        "hidden_states": _randn(2, _channels(model), 3, 8, 12), "encoder_hidden_states": _randn(2, 5, 24),
        "timestep": torch.tensor([300, 700]), "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "pooled_projections": _randn(2, 24), "guidance": _guidance(model),
    }  # fmt: skip


def _image(model: Any) -> dict[str, Any]:
    return {
        "hidden_states": _randn(2, _channels(model), 8, 12), "encoder_hidden_states": _randn(2, 5, 24),
        "timestep": torch.tensor([0.3, 0.7]), "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
    }  # fmt: skip


def _qwen(model: Any) -> dict[str, Any]:
    channels = model.config.in_channels
    return {
        "hidden_states": _randn(2, 24, channels), "encoder_hidden_states": _randn(2, 5, 24),
        "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.bool), "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 4, 6)]] * 2, "controlnet_cond": _randn(2, 24, channels),
    }  # fmt: skip


def _z_image(model: Any) -> dict[str, Any]:
    return {
        "x": [_randn(4, 1, 8, 12), _randn(4, 1, 8, 8)], "t": torch.tensor([0.3, 0.7]),
        "cap_feats": [_randn(5, 24), _randn(3, 24)], "patch_size": 2, "f_patch_size": 1,
    }  # fmt: skip


def _ltx2(model: Any) -> dict[str, Any]:
    return {
        "hidden_states": _randn(2, 12, 4), "audio_hidden_states": _randn(2, 6, 4), "timestep": torch.rand(2),
        "encoder_hidden_states": _randn(2, 5, 24), "audio_encoder_hidden_states": _randn(2, 5, 24),
        "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool), "num_frames": 3, "height": 2, "width": 2,
        "audio_encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool), "audio_num_frames": 6, "fps": 24.0,
    }  # fmt: skip


def _minimax_h3(model: Any) -> dict[str, Any]:
    tokens = 4 + 4 + 2  # text, video, audio
    return {
        "hidden_states": _randn(1, 4, 16), "audio_hidden_states": _randn(1, 2, 6), "timestep": torch.tensor([300.0]),
        "encoder_hidden_states": _randn(1, 4, 12), "timestep_indices": torch.zeros(tokens, dtype=torch.long),
        "token_tags": torch.tensor([0] * 4 + [1] * 4 + [2] * 2), "position_ids": torch.arange(30).reshape(tokens, 3),
        "text_indices": torch.arange(4), "video_indices": torch.arange(4, 8), "audio_indices": torch.arange(8, 10),
    }  # fmt: skip


def _sana_refiner(model: Any) -> dict[str, Any]:
    tables = model.build_rotary_emb_for_absolute_positions(2, [0, 1, 2], 2, 2, torch.device("cpu"), 24.0)
    return {
        "hidden_states": _randn(2, 12, 4), "encoder_hidden_states": _randn(2, 5, 24), "timestep": torch.rand(2),
        "video_rotary_emb": tables, "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
    }  # fmt: skip


SHAPES: dict[str, Callable[[Any], dict[str, Any]]] = {  # models with different inputs than other video or image models
    "Bria": _flux, "Chroma": _flux, "Flux": _flux, "LongCatImage": _flux, "OvisImage": _flux, "Qwen": _qwen,
    "NucleusMoE": _qwen, "ZImage": _z_image, "LTX2": _ltx2, "MiniMaxH3": _minimax_h3, "BriaFibo2": _image,
    "SanaWMLTX2": _sana_refiner,
}  # fmt: skip
MORE: dict[str, Callable[[], dict[str, Any]]] = {  # additional inputs by class
    "AnyFlowTransformer3DModel": lambda: {
        "hidden_states": _randn(2, 3, 4, 8, 12), "timestep": torch.full((2, 3), 300.0),
        "r_timestep": torch.full((2, 3), 200.0),
    },
    "BriaFiboTransformer2DModel": lambda: {"text_encoder_layers": [_randn(2, 5, 12) for _ in range(3)]},
    "BriaFibo2Transformer2DModel": lambda: {
        "encoder_hidden_states": _randn(2, 2, 6, 24), "encoder_attention_mask": None,
    },
    "CogView4Transformer2DModel": lambda: {
        "original_size": torch.tensor([[64, 96]] * 2), "target_size": torch.tensor([[64, 96]] * 2),
        "crop_coords": torch.zeros(2, 2, dtype=torch.long), "timestep": torch.tensor([300, 700]),
    },
    "CogVideoXTransformer3DModel": lambda: {"hidden_states": _randn(2, 3, 4, 8, 12)},
    "ConsisIDTransformer3DModel": lambda: {"hidden_states": _randn(2, 3, 4, 8, 12)},
    "CosmosControlNetModel": lambda: {
        "controls_latents": _randn(2, 8, 2, 8, 12), "latents": _randn(2, 6, 2, 8, 12),
        "condition_mask": torch.ones(2, 1, 2, 8, 12), "padding_mask": torch.zeros(1, 1, 16, 24),
        "timestep": torch.tensor([0.5, 0.5]),
    },
    "CosmosTransformer3DModel": lambda: {"padding_mask": torch.zeros(1, 1, 64, 96), "fps": 30},
    "EasyAnimateTransformer3DModel": lambda: {"encoder_attention_mask": None},
    "ErnieImageTransformer2DModel": lambda: {"text_bth": _randn(2, 5, 24), "text_lens": torch.tensor([5, 3])},
    "FluxControlNetModel": lambda: {"controlnet_cond": _randn(2, 24, 4)},
    "GlmImageTransformer2DModel": lambda: {
        "prior_token_id": torch.randint(0, 16, (2, 24)), "prior_token_drop": torch.zeros(2, 24, dtype=torch.bool),
        "target_size": torch.tensor([[64, 96]] * 2), "crop_coords": torch.zeros(2, 2, dtype=torch.long),
        "timestep": torch.tensor([300, 700]),
    },
    "HiDreamImageTransformer2DModel": lambda: {
        "timesteps": torch.tensor([300, 700]), "encoder_hidden_states_t5": _randn(2, 5, 12),
        "encoder_hidden_states_llama3": _randn(2, 2, 5, 8), "pooled_embeds": _randn(2, 24),
    },
    "HunyuanVideo15Transformer3DModel": lambda: {
        "timestep": torch.tensor([300.0, 700.0]),
        "encoder_hidden_states_2": _randn(2, 4, 24), "encoder_attention_mask_2": torch.ones(2, 4),
        "image_embeds": torch.zeros(2, 3, 24), "encoder_attention_mask": torch.ones(2, 5),
    },
    "Kandinsky5Transformer3DModel": lambda: {
        "hidden_states": _randn(1, 3, 8, 12, 4), "encoder_hidden_states": _randn(1, 5, 24),
        "pooled_projections": _randn(1, 24), "timestep": torch.tensor([300.0]),
        "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(6)], "text_rope_pos": torch.arange(5),
    },
    "Kandinsky6Transformer3DModel": lambda: {"hidden_states": _randn(2, 3, 8, 12, 16)},
    "Kandinsky6SRTransformer3DModel": lambda: {"hidden_states": _randn(1, 1, 8, 8, 129)},
    "Krea2Transformer2DModel": lambda: {
        "hidden_states": _randn(2, 24, 4), "encoder_hidden_states": _randn(2, 5, 2, 12),
        "position_ids": torch.cat([torch.zeros(5, 3), _ids(4, 6)]), "encoder_attention_mask": None,
    },
    "LongCatAudioDiTTransformer": lambda: {
        "hidden_states": _randn(2, 16, 8), "attention_mask": torch.ones(2, 16, dtype=torch.bool),
        "latent_cond": _randn(2, 16, 8), "timestep": torch.tensor([1.0, 0.5]),
    },
    "LTXVideoTransformer3DModel": lambda: {
        "hidden_states": _randn(2, 12, 4), "num_frames": 3, "height": 2, "width": 2,
        "rope_interpolation_scale": (0.5, 16.0, 16.0),
    },
    "Lumina2Transformer2DModel": lambda: {
        "encoder_attention_mask": torch.tensor([[1] * 5, [1] * 3 + [0] * 2], dtype=torch.bool),
    },
    "MiniMaxMusic3Transformer1DModel": lambda: {
        "hidden_states": _randn(2, 8, 8), "encoder_hidden_states": _randn(2, 8, 16), "timestep": torch.rand(2),
    },
    "QwenImage21Transformer2DModel": lambda: {
        "img_mask": torch.tensor([[False] * 5 + [True] * 6] * 2), "encoder_hidden_states_mask": None,
    },
    "SanaWMTransformer3DModel": lambda: {
        "encoder_hidden_states": _randn(2, 1, 5, 24), "timestep": torch.randint(1000, (2, 1, 3)),
        "camera_conditions": torch.cat([torch.eye(4).flatten(), torch.tensor([8.0, 8.0, 6.0, 4.0])]).expand(2, 3, 20),
        "chunk_plucker": _randn(2, 6, 3, 8, 12),
    },
    "StableAudio3DiTModel": lambda: {
        "hidden_states": _randn(1, 8, 32), "timestep": torch.tensor([0.5]), "encoder_hidden_states": _randn(1, 5, 24),
        "global_hidden_states": _randn(1, 24), "local_add_cond": _randn(1, 9, 32), "encoder_attention_mask": None,
    },
    "WanAnimateTransformer3DModel": lambda: {
        "hidden_states": _randn(1, 12, 21, 8, 8), "timestep": torch.tensor([300]),
        "encoder_hidden_states": _randn(1, 5, 24), "encoder_hidden_states_image": _randn(1, 12, 16),
        "pose_hidden_states": _randn(1, 4, 20, 8, 8), "face_pixel_values": _randn(1, 3, 77, 16, 16),
    },
    "WanVACETransformer3DModel": lambda: {"control_hidden_states": _randn(2, 8, 3, 8, 12)},
    "ZImageControlNetModel": lambda: {"control_context": [_randn(4, 1, 8, 12), _randn(4, 1, 8, 8)]},
}  # fmt: skip


def inputs(model: Any) -> dict[str, Any]:
    """Return inputs for the arguments of a model's forward method."""
    torch.manual_seed(2)
    name, names = type(model).__name__, inspect.signature(type(model).forward).parameters
    kind = max((key for key in SHAPES if name.startswith(key)), key=len, default=None)
    is_video = "3D" in name or "Video" in name
    shape = SHAPES[kind] if kind is not None else _video if is_video else _image
    given = {**shape(model), **MORE.get(name, dict)()}
    return {key: value for key, value in given.items() if key in names}


def call(model: nn.Module) -> Result:
    """Call a model with tiny inputs, and return its outputs and gradients."""
    given = inputs(model)
    torch.manual_seed(0)
    return differentiate(model, list(find_tensors(model(**given))))


PIPELINES = {  # pipelines that compute the model's tables, by model class
    "CogVideoXTransformer3DModel": ("cogvideo.pipeline_cogvideox", "CogVideoXPipeline"),
    "ConsisIDTransformer3DModel": ("consisid.pipeline_consisid", "ConsisIDPipeline"),
}


def build_pipeline(name: str) -> Any:
    """Build a pipeline that contains only the denoiser."""
    module, pipeline = PIPELINES[name]
    cls: Any = getattr(import_module(f"diffusers.pipelines.{module}"), pipeline)
    components = dict.fromkeys(list(inspect.signature(cls.__init__).parameters)[1:])
    return cls(**{**components, "transformer": build(name)})


def call_pipeline(pipeline: Any) -> Result:
    """Run one step of a pipeline's denoiser with the tables that the pipeline computes."""
    model = pipeline.transformer
    given = inputs(model)
    _, frames, _, height, width = given["hidden_states"].shape
    tables = pipeline._prepare_rotary_positional_embeddings(8 * height, 8 * width, frames, model.device)
    return differentiate(model, list(find_tensors(model(**given, image_rotary_emb=tables))))


def candidates() -> Iterator[Candidate]:
    for name in rotary_classes():
        yield candidate(name)


def candidate(name: str) -> Candidate:
    if name in PIPELINES:
        return Candidate(name, partial(build_pipeline, name), call_pipeline)
    return Candidate(name, partial(build, name), call)
