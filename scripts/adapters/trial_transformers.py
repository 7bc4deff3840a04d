"""Build and call a tiny random model of each transformers model type, for ``lrpe-md adapters``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from .trial import Candidate, Result, differentiate, find_tensors

__all__ = ["build", "call", "candidates", "rotary_types", "shrink"]

# An import statement would make type checkers read all models of the library, which is slow.
transformers: Any = import_module("transformers")

SMALL: dict[str, Any] = {  # configuration attributes by name
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "global_head_dim": 16, "ffn_dim": 64, "ffn_hidden_size": 64,
    "n_embd": 64, "n_layer": 2, "n_layers": 2, "n_head": 4, "n_heads": 4, "d_model": 64, "embed_dim": 64, "depth": 2,
    "num_heads": 4, "image_size": 16, "patch_size": 4, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "qk_head_dim": 32, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "sliding_window": 8, "moe_num_experts": 4, "moe_k": 2, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32,
    "dense_intermediate_size": 64, "expert_dim": 32, "out_hidden_size": 64, "lm_head_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1], "window_size": 16,
    "encoder_hidden_size": 64, "decoder_hidden_size": 64, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64,
    "num_kv_heads": 2, "n_kv_heads": 2, "intermediate_size_mlp": 64, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64, "num_mtp_layers": 0, "num_nextn_predict_layers": 0, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "num_kv_shared_layers": 0, "laurel_rank": 8, "altup_num_inputs": 2, "mamba_expand": 2,
    "swiglu_limit": 7.0, "kv_channels": 16, "attention_head_dim": 16, "moe_num_shared_experts": 1, "num_channels": 3,
    "moe_latent_size": 32, "lru_width": 64, "attention_window_size": 8, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "encoder_num_key_value_heads": 2, "decoder_num_key_value_heads": 2, "num_register_tokens": 2,
}  # fmt: skip
CODEC = {
    "upsample_groups": 64, "num_filters": 8, "codebook_size": 32, "codebook_dim": 16, "num_quantizers": 2,
    "vector_quantization_hidden_dimension": 16,
}  # fmt: skip
PE = {"depth": 2, "embed_dim": 64, "num_heads": 4, "img_size": 28}
COMPASS = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
INDEXER = {  # required, but None by default
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # configuration attributes by model type
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "gemma3n_text": {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.0]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gptj": {"rotary_dim": 8}, "codegen": {"rotary_dim": 8},
    "esm": {"vocab_size": 64, "position_embedding_type": "rotary", "pad_token_id": 1},
    "wav2vec2-conformer": {"position_embeddings_type": "rotary"},
    "wav2vec2-bert": {"position_embeddings_type": "rotary"}, "seamless_m4t": {"position_embeddings_type": "rotary"},
    "bailing_hybrid": {"num_experts": 16, "num_expert_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "kimi_linear": {"num_experts": 4, "num_experts_per_token": 2, "num_expert_group": 1},
    "blt": {
        "encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64},
        "global_config": {"encoder_cross_output_size": None}, "encoder_hash_byte_group_vocab": 64,
    },
    "chameleon": {"vocabulary_map": {"<image>": 40, "<racm3:break>": 41, "<eoss>": 42}},
    "emu3": {"vocabulary_map": {"<image>": 40, "<|extra_200|>": 41, "<|image start|>": 42}},
    "cohere_compass_text": {"rope_parameters": COMPASS},
    "cohere_compass": {"text_config": {"rope_parameters": COMPASS}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "topk_group": 1, "n_group": 1}
    },
    "diffusion_gemma": {
        "text_config": {
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "expert_intermediate_size": 32,
        },
    },
    "efficientloftr": {"hidden_size": 256},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"rope_theta": 5e5, "mrope_section": [3, 3, 2]}}},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n": {"text_config": {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.0]}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2", "spatial_target_layers": [0]},
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"head_dim": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron": {"num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "use_mem_rope": True},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "qwen4_exp_text": INDEXER, "qwen4_exp": {"text_config": INDEXER},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "sam3": {"vision_config": {"fpn_hidden_size": 64}, "detr_encoder_config": {"hidden_size": 64}},
    "muse_spark": {"audio_config": {"patch_sizes": [16, 6], "hidden_sizes": [32, 64], "depths": [1, 1]}},
    "dinov3_vit": {"num_register_tokens": 2},
    "vjepa2": {
        "crop_size": 16, "frames_per_clip": 4, "pred_hidden_size": 64, "pred_num_hidden_layers": 2,
        "pred_num_attention_heads": 4,
    },
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2]},
    "mimi": CODEC, "mimi_decoder": CODEC,
    "csm": {"codec_config": CODEC, "depth_decoder_config": {"backbone_hidden_size": 64}},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "kyutai_speech_to_text": {
        "codec_config": CODEC, "audio_pad_token_id": 63, "audio_bos_token_id": 32, "codebook_vocab_size": 33,
        "num_codebooks": 2,
    },
    "dia": {"decoder_config": {"num_channels": 9}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "muse_spark_audio": {"num_hidden_layers": 2, "patch_sizes": [16, 6], "hidden_sizes": [32, 64], "depths": [1, 1]},
    "pe_video_encoder": {"vision_config": {"model_args": PE}},
    "pe_video": {"video_config": {"vision_config": {"model_args": PE}}},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}  # fmt: skip


INPUTS: dict[str, dict[str, Any]] = {  # additional inputs by model type
    "video_llama_3_vision": {"merge_sizes": torch.tensor([1, 1])},
    "wav2vec2-conformer": {"input_values": torch.linspace(-1, 1, 8192).sin().reshape(2, 4096)},
    "moonshine": {
        "input_values": torch.linspace(-1, 1, 8192).sin().reshape(2, 4096),
        "decoder_input_ids": torch.arange(5, 19).reshape(2, 7),
    },
    "moonshine_streaming": {
        "input_values": torch.linspace(-1, 1, 8000).sin().reshape(2, 4000),
        "decoder_input_ids": torch.arange(5, 19).reshape(2, 7),
    },
    "lightglue": {"pixel_values": torch.linspace(-1, 1, 2 * 2 * 3 * 64 * 64).sin().reshape(2, 2, 3, 64, 64)},
    "efficientloftr": {"pixel_values": torch.linspace(-1, 1, 2 * 2 * 3 * 64 * 64).sin().reshape(2, 2, 3, 64, 64)},
    "timesfm2_5": {"past_values": torch.linspace(-9, 9, 2 * 128).sin().reshape(2, 128)},
    "idefics": {
        "pixel_values": torch.linspace(-9, 9, 2 * 3 * 256).sin().reshape(2, 1, 3, 16, 16),
        "image_attention_mask": torch.ones(2, 9, 1, dtype=torch.int64),
    },
    "sam3": {"pixel_values": torch.linspace(-9, 9, 6 * 256).sin().reshape(2, 3, 16, 16)},
    "muse_spark_vision": {"pixel_values": torch.linspace(-9, 9, 32 * 96).sin().reshape(32, 96)},
    "muse_glimmer_vision": {"pixel_values": torch.linspace(-9, 9, 32 * 96).sin().reshape(32, 96)},
    "inkling2_vision": {"pixel_values": torch.linspace(-9, 9, 128 * 48).sin().reshape(32, 8, 8, 3)},
    "glmasr_encoder": {"input_features": torch.linspace(-9, 9, 2 * 128 * 32).sin().reshape(2, 128, 32)},
    "voxtral_realtime_encoder": {"input_features": torch.linspace(-9, 9, 2 * 128 * 32).sin().reshape(2, 128, 32)},
    "pe_video_encoder": {"pixel_values_videos": torch.linspace(-9, 9, 24 * 28**2).sin().reshape(2, 4, 3, 28, 28)},
    "pe_video": {"pixel_values_videos": torch.linspace(-9, 9, 24 * 28**2).sin().reshape(2, 4, 3, 28, 28)},
    "mimi_decoder": {"latents": torch.linspace(-9, 9, 2 * 64 * 9).sin().reshape(2, 64, 9)},
    "kyutai_speech_to_text": {"input_ids": torch.arange(54).reshape(2, 9, 3) % 30},
    "dia": {"decoder_input_ids": torch.arange(126).reshape(2, 7, 9) % 30},
    "kimi_k25_vision": {"pixel_values": torch.linspace(-9, 9, 32 * 48).sin().reshape(32, 3, 4, 4)},
}

ROTARY = re.compile(r"[Rr]otary|RoPE|[^p]rope[^r]|Rope")


def rotary_types() -> list[str]:
    """List the model types whose files contain rotary code."""
    return sorted(name for name in CONFIG_MAPPING_NAMES if _rotary_source(name))


def _rotary_source(model_type: str) -> bool:
    try:
        model = _model_class(model_type)
        module = inspect.getmodule(model)
        return module is not None and ROTARY.search(inspect.getsource(module)) is not None
    except Exception:
        return False


def _model_class(model_type: str) -> Any:
    config = type(transformers.AutoConfig.for_model(model_type))
    found = MODEL_MAPPING[config]
    return found[0] if isinstance(found, (tuple, list)) else found


def build(model_type: str) -> nn.Module:
    """Build a two-layer model with weights so large that attention is far from uniform."""
    torch.manual_seed(0)
    config = shrink(model_type, OWN.get(model_type, {}))
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.nan_to_num_().clamp_(-2, 2).add_(torch.randn_like(p), alpha=0.05)
    return model.eval()


def shrink(model_type: str, own: dict[str, Any]) -> Any:
    """Return a tiny configuration for a model type. ``own`` overrides the common values."""
    config_class: Any = type(transformers.AutoConfig.for_model(model_type))
    return config_class(**_merge(_shrink(config_class()), own))


def _merge(given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Override ``given`` with ``own``, recursing into nested configurations."""
    merged = dict(given)
    for name, value in own.items():
        inside = name.endswith("config") and isinstance(value, dict) and isinstance(given.get(name), dict)
        merged[name] = _merge(given[name], value) if inside else value
    return merged


def _shrink(default: Any) -> dict[str, Any]:
    """Return arguments that make a tiny configuration of the same class as ``default``."""
    kwargs: dict[str, Any] = {}
    values = vars(default)
    mapped = getattr(default, "attribute_map", {})
    for name, value in values.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            kwargs[name] = {**_shrink(value), "model_type": value.model_type}
        elif mapped.get(name, name) == name and name in SMALL and (value or name == "head_dim"):
            kwargs[name] = _same_kind(value, SMALL[name])
    heads, groups = kwargs.get("num_attention_heads"), values.get("num_key_value_heads")
    if groups is not None and groups == values.get("num_attention_heads"):
        kwargs["num_key_value_heads"] = heads
    if values.get("layer_types"):
        kinds = list(dict.fromkeys(values["layer_types"]))
        layers = max(2, len(kinds))
        kwargs["layer_types"] = (kinds * 2)[:layers]
        for name in ("num_hidden_layers", "num_layers"):
            if name in kwargs:
                kwargs[name] = layers
    kwargs |= _by_layer(values, kwargs)
    parameters = values.get("rope_parameters")
    if isinstance(parameters, dict):
        kwargs["rope_parameters"] = _sections(parameters, kwargs.get("head_dim") or 16, _has_sections(type(default)))
    return kwargs


def _by_layer(values: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Truncate lists with one entry per layer to the number of layers."""
    was, layers = values.get("num_hidden_layers"), kwargs.get("num_hidden_layers")
    if not isinstance(was, int) or not isinstance(layers, int) or was < 6:
        return {}
    lists = {name: kwargs.get(name, value) for name, value in values.items() if isinstance(value, list)}
    return {name: value[:layers] for name, value in lists.items() if len(value) == was}


def _has_sections(config_class: Any) -> bool:
    try:
        module = import_module(config_class.__module__.replace("configuration_", "modeling_"))
        return "mrope_section" in inspect.getsource(module)
    except (ImportError, OSError):
        return False


def _sections(parameters: dict[str, Any], head_dim: int, has_sections: bool) -> dict[str, Any]:
    nested = any(isinstance(value, dict) for value in parameters.values())
    found: dict[str, Any] = {
        k: _sections(v, head_dim, has_sections) if isinstance(v, dict) else v for k, v in parameters.items()
    }
    if has_sections and not nested:
        pairs = int(head_dim * found.get("partial_rotary_factor", 1.0)) // 2
        small = pairs * 3 // 8
        found["mrope_section"] = [pairs - 2 * small, small, small]
    return found


def _same_kind(value: Any, small: Any) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(small, list):
        return [small] * len(value)
    return small


# --- a call ----------------------------------------------------------------------------------------------------------


def call(model: Any) -> Result:
    """Call a model with tiny inputs, and return its outputs and gradients."""
    torch.manual_seed(0)
    own = INPUTS.get(getattr(model.config, "model_type", ""), {})
    return differentiate(model, list(find_tensors(model(**{**inputs(model), **own}))))


def inputs(model: Any) -> dict[str, Any]:
    """Return inputs for the arguments of a model's forward method."""
    names, config = inspect.signature(model.forward).parameters, model.config
    generator = torch.Generator().manual_seed(2)
    given: dict[str, Any] = {}
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    patch = getattr(config, "patch_size", 4)
    if "input_ids" in names:
        given["input_ids"] = torch.randint(5, 20, (2, 9), generator=generator)
        if "decoder_input_ids" in names:
            given["decoder_input_ids"] = torch.randint(5, 20, (2, 7), generator=generator)
    elif "grid_thw" in names or "image_grid_thw" in names:
        first = "hidden_states" if "hidden_states" in names else "pixel_values"
        width = channels * (getattr(config, "temporal_patch_size", None) or 1) * patch**2
        given[first] = torch.randn(32, width, generator=generator)
        given["grid_thw" if "grid_thw" in names else "image_grid_thw"] = torch.tensor([[1, 4, 6], [1, 2, 4]])
    elif "pixel_position_ids" in names:
        given["pixel_values"] = torch.rand(2, 36, channels * patch**2, generator=generator)
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6))
        given["pixel_position_ids"] = places.expand(2, -1, -1)
        given["padding_positions"] = torch.zeros(2, 36, dtype=torch.bool)
        given = {name: value for name, value in given.items() if name in names}
    elif "pixel_values" in names:
        size = getattr(config, "image_size", None) or 16
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        given["pixel_values"] = torch.randn(2, channels, height, width, generator=generator)
    elif "pixel_values_videos" in names:
        size, frames = getattr(config, "image_size", 16) or 16, getattr(config, "frames_per_clip", 4) or 4
        given["pixel_values_videos"] = torch.randn(2, frames, channels, size, size, generator=generator)
    elif "input_features" in names:
        sizes = (getattr(config, name, 0) for name in ("num_mel_bins", "feature_size", "input_feat_size"))
        bins = next((n for n in sizes if n), 64)
        given["input_features"] = torch.randn(2, 32, bins, generator=generator)
    elif "input_values" in names:
        given["input_values"] = torch.randn(2, 1, 4096, generator=generator)
    if "use_cache" in names:
        given["use_cache"] = False
    return given


def candidates() -> Iterator[Candidate]:
    for name in rotary_types():
        yield Candidate(name, partial(build, name), call)
