"""Calls of the presets' original code, as functions of (q, k, preset, segments, options) that return (q, k)."""

import importlib
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lrpe_md import Tokens, cosine, preset, rotate

BATCH, HEADS = 2, 2


# --- lrpe-md -----------------------------------------------------------------------------------------------


def encode(p, q, k, positions, *, phase=None, omega=None, impl="auto"):
    """Encode q and k with a preset, or with another phase or omega."""
    call = rotate if p.scheme.map == "rotate" else cosine
    phase = None if phase is None else (None, phase)
    omega = p.omega if omega is None else omega
    return call(q, k, omega=omega, positions=positions, phase=phase, impl=impl, **p.options)


def original(name):
    """Import a module of timm, transformers or diffusers."""
    oldest = {"timm": "1.0.29", "transformers": "5.23", "diffusers": "0.42"}
    package = name.split(".")[0]
    pytest.importorskip(package, minversion=oldest[package])
    return importlib.import_module(name)


# --- the originals: (q, k, p, segments, options) → q, k, all (B, H, N, D) ----------------------------------


def swap(*xs):
    """Transpose tensors between (B, H, N, D) and (B, N, H, D)."""
    return tuple(x.transpose(1, 2) for x in xs)


def on(tokens, call, *xs):
    """Apply ``call`` to a slice of the tokens, and return the other tokens unchanged."""
    found = []
    for x in xs:
        y = x.clone()
        y[:, :, tokens] = call(x[:, :, tokens])
        found.append(y)
    return tuple(found)


def timm_axial(q, k, p, segments, options, temperature=1e4, reference=None, **kwargs):
    rope = original("timm.layers.pos_embed_sincos")
    prefix, shape = segments
    kwargs |= {"temperature": temperature, "ref_feat_shape": options.get("reference", reference)}
    embed = rope.RotaryEmbeddingCat(p.head_dim, in_pixels=False, **kwargs).get_embed(shape)
    return on(slice(prefix, None), lambda x: rope.apply_rot_embed_cat(x, embed), q, k)


def dinov3(q, k, p, segments, options):
    rope = original("timm.layers.pos_embed_sincos")
    normalize = {"axis": "separate", "shorter": "min", "longer": "max"}[options.get("by", "axis")]
    embed = rope.RotaryEmbeddingDinoV3(p.head_dim, normalize_coords=normalize).get_embed(segments[1])
    return on(slice(segments[0], None), lambda x: rope.apply_rot_embed_cat(x, embed, half=True), q, k)


def pixtral(q, k, p, segments, options):
    module = original("transformers.models.pixtral.modeling_pixtral")
    from transformers import PixtralVisionConfig

    config = PixtralVisionConfig(hidden_size=p.head_dim * HEADS, num_attention_heads=HEADS)
    ids = torch.cat([torch.cartesian_prod(*map(torch.arange, shape)) for shape in segments])
    cos, sin = module.PixtralVisionRotaryEmbedding(config)(q, ids)
    return module.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0)


def qwen2_vl_vision(q, k, p, segments, options):
    module = original("transformers.models.qwen2_vl.modeling_qwen2_vl")
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

    config = Qwen2VLVisionConfig(embed_dim=p.head_dim * HEADS, num_heads=HEADS)
    grid = torch.tensor([s if len(s) == 3 else (1, *s) for s in segments])
    cos, sin = module.Qwen2VLVisionRotaryEmbedding(config)(q, module.get_vision_position_ids(grid, 2))
    return swap(*module.apply_rotary_pos_emb_vision(*swap(q, k), cos, sin))


def qwen_text(q, k, p, segments, options, name, model, base, sections, scaling=None):
    """Rotate with the text model's rotary module, at the full model's position ids of text and images."""
    module = original(f"transformers.models.{name}.modeling_{name}")
    package = original(f"transformers.models.{name}")
    config = getattr(package, f"{model}TextConfig")(
        hidden_size=p.head_dim * HEADS, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=p.head_dim,
        rope_parameters={
            "rope_theta": base, "mrope_section": sections, "rope_type": "default", **(scaling or {}),
        },
    )  # fmt: skip
    images = [(s[0], 2 * s[1], 2 * s[2]) for s in segments if not isinstance(s, int)]
    kinds = [kind for s in segments for kind in ([0] * s if isinstance(s, int) else [1] * math.prod(s))]
    whole = getattr(module, f"{model}Model")
    self = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, temporal_merge_size=1))
    )
    self.get_vision_position_ids = partial(whole.get_vision_position_ids, self)
    ids, _ = whole.get_rope_index(
        self, torch.zeros(1, len(kinds), dtype=torch.int64), torch.tensor([kinds]),
        image_grid_thw=torch.tensor(images) if images else None,
    )  # fmt: skip
    rotary = getattr(module, f"{model}RotaryEmbedding" if name == "qwen2_vl" else f"{model}TextRotaryEmbedding")
    cos, sin = rotary(config)(q, ids)
    return module.apply_rotary_pos_emb(q, k, cos, sin)


def flux(q, k, p, segments, options, name, base, dims, text, reference=0):
    module = original(f"diffusers.models.transformers.transformer_{name}")
    from diffusers.models.embeddings import apply_rotary_emb

    ids, number = [], 0
    for segment in segments:
        if isinstance(segment, int):
            ids.append(text(segment))
            continue
        zeros = [torch.tensor([0])] * (len(dims) - 3)
        ids.append(torch.cartesian_prod(torch.tensor([reference * number]), *map(torch.arange, segment), *zeros))
        number += 1
    embed = (module.FluxPosEmbed if name == "flux" else module.Flux2PosEmbed)(base, list(dims))(torch.cat(ids))
    return swap(*(apply_rotary_emb(x, embed, sequence_dim=1) for x in swap(q, k)))


def lumina2(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_lumina2")
    text, (height, width) = segments
    rope = module.Lumina2RotaryPosEmbed(10000, [p.head_dim // 3] * 3, axes_lens=(64, 64, 64), patch_size=2)
    latent, mask = torch.zeros(1, 1, 2 * height, 2 * width), torch.ones(1, text, dtype=torch.int64)
    freqs = rope(latent, mask)[3]
    return swap(*(module.apply_rotary_emb(x, freqs, use_real=False) for x in swap(q, k)))


def qwen_image(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_qwenimage")
    text, *shapes = segments
    shapes = [s if len(s) == 3 else (1, *s) for s in shapes]
    rope = module.QwenEmbedRope(10000, [p.head_dim // 8, 7 * p.head_dim // 16, 7 * p.head_dim // 16], scale_rope=True)
    images, words = rope([shapes], device=torch.device("cpu"), max_txt_seq_len=text)
    freqs = torch.cat([words, images])
    return swap(*(module.apply_rotary_emb_qwen(x, freqs, use_real=False) for x in swap(q, k)))


def cogvideox(q, k, p, segments, options):
    embeddings = original("diffusers.models.embeddings")
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    text, (frames, *size) = segments
    base = options.get("size", (30, 45))
    if base is None:
        kwargs = {"crops_coords": None, "grid_type": "slice", "max_size": (64, 64)}
    else:
        kwargs = {"crops_coords": get_resize_crop_region_for_grid(tuple(size), base[1], base[0])}
    embed = embeddings.get_3d_rotary_pos_embed(p.head_dim, grid_size=size, temporal_size=frames, **kwargs)
    return on(slice(text, None), lambda x: embeddings.apply_rotary_emb(x, embed), q, k)


def hunyuan_video(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_hunyuan_video")
    from diffusers.models.embeddings import apply_rotary_emb

    shape, text = segments
    dims = [p.head_dim // 8, 7 * p.head_dim // 16, 7 * p.head_dim // 16]
    embed = module.HunyuanVideoRotaryPosEmbed(2, 1, dims)(torch.zeros(1, 1, shape[0], 2 * shape[1], 2 * shape[2]))
    return on(slice(None, -text), lambda x: apply_rotary_emb(x, embed), q, k)


def wan(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_wan")
    cos, sin = module.WanRotaryPosEmbed(p.head_dim, (1, 1, 1), 64)(torch.zeros(1, 1, *segments[0]))

    def rotate_pairs(x):  # as in WanAttnProcessor
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[..., 0::2], sin[..., 1::2]
        return torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2).type_as(x)

    return swap(*map(rotate_pairs, swap(q, k)))


def mochi_frequencies(p):
    drawn = torch.randn(3, HEADS, p.head_dim // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 5
    return drawn.float()


def mochi(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_mochi")
    shape, text = segments
    cos, sin = module.MochiRoPE()(mochi_frequencies(p), *shape, dtype=torch.float32)

    def rotate_pairs(x):  # as in MochiAttnProcessor2_0, on (B, N, H, D)
        (x,) = swap(x)
        a, b = x[..., 0::2], x[..., 1::2]
        return swap(torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2))[0]

    return on(slice(None, -text), rotate_pairs, q, k)


def cosmos(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_cosmos")
    from diffusers.models.embeddings import apply_rotary_emb

    embed = module.CosmosRotaryPosEmbed(p.head_dim, patch_size=(1, 1, 1))(
        torch.zeros(1, 1, *segments[0]), fps=options.get("fps")
    )
    return tuple(apply_rotary_emb(x, embed, use_real_unbind_dim=-2) for x in (q, k))


def mixed_parameter(p):
    rope = original("timm.layers.pos_embed_sincos")
    torch.manual_seed(3)
    return rope.RotaryEmbeddingMixed(p.head_dim * HEADS, depth=3, num_heads=HEADS)


def rope_vit_mixed(q, k, p, segments, options):
    apply_rot_embed_cat = original("timm.layers").apply_rot_embed_cat
    embed = mixed_parameter(p).get_embed(segments[1])[1]
    return on(slice(segments[0], None), lambda x: apply_rot_embed_cat(x, embed), q, k)


def transnormer(q, k, p, segments, options):
    """Encode like TransNormerLLM's Lrpe, with theta_i = 10000^(-2 i / (heads · head_dim)), split by head."""
    size = HEADS * p.head_dim
    theta = torch.tensor([1e4 ** (-2 * i / size) for i in range(size)]).reshape(HEADS, 1, -1)
    angles = torch.arange(segments[0][0]).reshape(1, -1, 1) * theta
    acted = (x / (1 + torch.exp(-x)) for x in (q, k))
    return tuple(torch.cat([x * angles.cos(), x * angles.sin()], dim=-1) for x in acted)


def cosformer(q, k, p, segments, options):
    """Encode with eq. 10 as in the authors' code, which uses relu, [sin, cos] and angles π/2 · i / M from i = 1."""
    (num,) = segments[0]
    index = math.pi / 2 * torch.arange(1, num + 1).reshape(-1, 1) / options.get("longest", num)
    acted = (x.clamp_min(0) for x in (q, k))
    return tuple(torch.cat([x * index.sin(), x * index.cos()], dim=-1) for x in acted)


def pope_phase(p):
    drawn = torch.rand(HEADS, p.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return -2 * math.pi * drawn.float()


def pope(q, k, p, segments, options):
    """Encode with eq. 5 and 6.

    q and k become softplus(q_c) e^{i m θ_c} and softplus(k_c) e^{i (n θ_c + δ_c)}, as real and imaginary parts.
    """
    theta = torch.tensor([1e4 ** (-c / p.head_dim) for c in range(p.head_dim)])
    angles = torch.arange(segments[0][0]).reshape(-1, 1) * theta
    found = []
    for x, phase in ((q, torch.zeros(HEADS, 1, 1)), (k, pope_phase(p)[:, None])):
        z = torch.polar(torch.log1p(x.exp()), (angles + phase).expand(BATCH, -1, -1, -1))
        found.append(torch.cat([z.real, z.imag], dim=-1))
    return tuple(found)


# --- further originals -------------------------------------------------------------------------------------


def interleaved(x, cos, sin):
    """Rotate pairs (2p, 2p + 1) as attention processors in diffusers do."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def latent(shape, patch=2):
    """Return a latent (1, 1, T, H, W) or (1, 1, H, W) whose patch grid has the given shape."""
    return torch.zeros(1, 1, *shape[:-2], patch * shape[-2], patch * shape[-1])


def gemma4_vision(q, k, p, segments, options):
    module = original("transformers.models.gemma4.modeling_gemma4")
    config = SimpleNamespace(rope_parameters={"rope_type": "axial", "rope_theta": 100.0}, head_dim=p.head_dim)
    height, width = segments[0]
    ids = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), dim=-1).reshape(
        1, -1, 2
    )
    cos, sin = module.Gemma4VisionRotaryEmbedding(config)(q, ids)
    return swap(*(module.apply_multidimensional_rope(x, cos, sin, ids) for x in swap(q, k)))


def llama4_vision(q, k, p, segments, options):
    module = original("transformers.models.llama4.modeling_llama4")
    (height, width), suffix = segments
    size = max(height, width)  # the original only supports squares
    config = SimpleNamespace(
        image_size=size,
        patch_size=1,
        hidden_size=p.head_dim,
        num_attention_heads=1,
        rope_parameters={"rope_theta": 1e4},
    )
    whole = module.Llama4VisionRotaryEmbedding(config)(q)
    rows = torch.arange(size * size).reshape(size, size)[:height, :width].flatten()
    freqs = torch.cat([whole[rows], whole[-1:].expand(suffix, -1, -1)])
    return swap(*module.vision_apply_rotary_emb(*swap(q, k), freqs))


def minimax_m3_vl(q, k, p, segments, options):
    module = original("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    config = SimpleNamespace(rope_parameters={"rope_type": "axial", "rope_theta": 1e4}, head_dim=p.head_dim)
    grid = torch.tensor([s if len(s) == 3 else (1, *s) for s in segments])
    ids = module.get_vision_position_ids(grid, 2, include_temporal=True)
    cos, sin = module.MiniMaxM3VLVisionRotaryEmbedding(config)(q, ids)
    return swap(*module.apply_rotary_pos_emb_vision(*swap(q, k), cos, sin))


def qwen2_5_omni(q, k, p, segments, options):
    module = original("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    whole = module.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    video, start, text = 1, 2, 9
    ids = []
    for segment in segments:
        if not isinstance(segment, int):
            ids[-1] = start
            ids += [video] * math.prod(segment)
        else:
            ids += [text] * segment
    grids = torch.tensor([(s[0], 2 * s[1], 2 * s[2]) for s in segments if not isinstance(s, int)])
    config = SimpleNamespace(
        image_token_id=-1, video_token_id=video, audio_token_id=-2, vision_start_token_id=start,
        audio_start_token_id=-3, position_id_per_seconds=options.get("rate", 25), seconds_per_chunk=2,
        head_dim=p.head_dim, max_position_embeddings=4096, rope_parameters={
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [p.head_dim // 8, *[3 * p.head_dim // 16] * 2],
        },
    )  # fmt: skip
    self = SimpleNamespace(config=config, spatial_merge_size=2)
    self.get_llm_pos_ids_for_vision = partial(whole.get_llm_pos_ids_for_vision, self)
    places, _ = whole.get_rope_index(
        self, torch.tensor([ids]), video_grid_thw=grids,
        second_per_grids=torch.full((len(grids),), float(options.get("interval", 1))),
    )  # fmt: skip
    cos, sin = module.Qwen2_5OmniRotaryEmbedding(config)(q, places)
    return module.apply_rotary_pos_emb(q, k, cos, sin)


def z_image(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_z_image")
    (height, width), *_, text = segments
    model = module.ZImageTransformer2DModel
    self = SimpleNamespace(create_coordinate_grid=model.create_coordinate_grid)
    for name in ("_pad_with_ids", "_patchify_image"):
        setattr(self, name, partial(getattr(model, name), self))
    image, caption = torch.zeros(4, 1, 2 * height, 2 * width), torch.zeros(text, 8)
    found = model.patchify_and_embed(self, [image], [caption], 2, 1)
    ids = torch.cat([found[3][0], found[4][0]])
    axes = [p.head_dim // 8, 7 * p.head_dim // 16, 7 * p.head_dim // 16]
    freqs = module.RopeEmbedder(256.0, axes, [256, 128, 128])(ids)[:, None]
    return swap(*(interleaved(x, freqs.real, freqs.imag) for x in swap(q, k)))


def hidream(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_hidream_image")
    (height, width), text = segments
    image = torch.cartesian_prod(torch.tensor([0]), torch.arange(height), torch.arange(width))
    ids = torch.cat([image, torch.zeros(text, 3)])[None]  # as in HiDreamImageTransformer2DModel.forward
    axes = [p.head_dim // 2, p.head_dim // 4, p.head_dim // 4]
    return swap(*module.apply_rope(*swap(q, k), module.HiDreamImageEmbedND(10000, axes)(ids)))


def image_rope(q, k, p, segments, options, name, make, dim, before):
    """Rotate an image or video with a diffusers module that expects its latent, and leave text unrotated."""
    module = original(f"diffusers.models.transformers.transformer_{name}")
    from diffusers.models.embeddings import apply_rotary_emb

    shape = next(s for s in segments if not isinstance(s, int))
    embed = make(module, p.head_dim)(latent(shape))
    text = sum(s for s in segments if isinstance(s, int))
    tokens = slice(text, None) if before else slice(None, math.prod(shape))
    return on(tokens, lambda x: apply_rotary_emb(x, embed, use_real_unbind_dim=dim), q, k)


cogview4 = partial(
    image_rope, name="cogview4", make=lambda m, d: m.CogView4RotaryPosEmbed(d, 2, (256, 256)), dim=-2, before=True
)
glm_image = partial(image_rope, name="glm_image", make=lambda m, d: m.GlmImageRotaryPosEmbed(d, 2), dim=-2, before=True)
hunyuan_image = partial(
    image_rope, name="hunyuanimage", make=lambda m, d: m.HunyuanImageRotaryPosEmbed((2, 2), [d // 2, d // 2]), dim=-1,
    before=False,
)  # fmt: skip
hunyuan_video15 = partial(
    image_rope, name="hunyuan_video15",
    make=lambda m, d: m.HunyuanVideo15RotaryPosEmbed(2, 1, [d // 8, 7 * d // 16, 7 * d // 16]), dim=-1, before=False,
)  # fmt: skip


def allegro(q, k, p, segments, options):
    embeddings = original("diffusers.models.embeddings")
    ((frames, *size),) = segments
    *freqs, t, h, w = embeddings.get_3d_rotary_pos_embed_allegro(
        p.head_dim, ((0, 0), tuple(size)), size, frames, options.get("by", (2.2, 2.0, 2.0))
    )
    ids = torch.cartesian_prod(*(axis.long() for axis in (t, h, w))).T.reshape(3, 1, -1)  # as in its pipeline
    return tuple(embeddings.apply_rotary_emb_allegro(x, freqs, ids) for x in (q, k))


def kandinsky5(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_kandinsky")
    (shape,) = segments
    rope = module.Kandinsky5RoPE3D((p.head_dim // 4, 3 * p.head_dim // 8, 3 * p.head_dim // 8))
    table = rope((1, *shape), [torch.arange(n) for n in shape], options.get("by", (1.0, 1.0, 1.0)))
    table = table.reshape(1, math.prod(shape), 1, p.head_dim // 2, 2, 2)
    return swap(*((x.unflatten(-1, (-1, 1, 2)) * table).sum(-1).flatten(-2) for x in swap(q, k)))


def wan_like(q, k, p, segments, options, name, make):
    module = original(f"diffusers.models.transformers.transformer_{name}")
    cos, sin = make(module, p.head_dim)(torch.zeros(1, 1, *segments[0]))
    act = torch.relu if p.scheme.act == "relu" else lambda x: x
    return swap(*(interleaved(act(x), cos[..., 0::2], sin[..., 1::2]) for x in swap(q, k)))


sana_video = partial(wan_like, name="sana_video", make=lambda m, d: m.WanRotaryPosEmbed(d, (1, 1, 1), 64))
chronoedit = partial(wan_like, name="chronoedit", make=lambda m, d: m.ChronoEditRotaryPosEmbed(d, (1, 1, 1), 64))


def all_heads(call, *xs):
    """Apply ``call`` to the channels of all heads together, (B, N, H · D)."""
    return tuple(call(x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2) for x in xs)


def ltx(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_ltx")
    rope = module.LTXVideoRotaryPosEmbed(p.head_dim * q.shape[1])
    scale = (8 / options.get("fps", 25), 32, 32)
    table = rope(q, *segments[0], rope_interpolation_scale=scale)
    return all_heads(lambda x: module.apply_rotary_emb(x, table), q, k)


def ltx2(q, k, p, segments, options, modality="video", axes=None):
    module = original("diffusers.models.transformers.transformer_ltx2")
    make = partial(
        module.LTX2AudioVideoRotaryPosEmbed, p.head_dim * q.shape[1], rope_type="split", num_attention_heads=q.shape[1]
    )
    if modality == "audio" or len(segments[0]) == 1:
        rope = make(modality="audio", scale_factors=(4,))
        coords = rope.prepare_audio_coords(1, *segments[0], torch.device("cpu"))
    else:
        rope = make()
        coords = rope.prepare_video_coords(1, *segments[0], torch.device("cpu"), fps=options.get("fps", 24.0))
    table = tuple(t.expand(BATCH, -1, -1, -1) for t in rope(coords[:, :axes]))
    return all_heads(lambda x: module.apply_split_rotary_emb(x, table), q, k)


def minimax_h3(q, k, p, segments, options):
    module = original("diffusers.models.transformers.transformer_minimax_h3")
    ids = torch.cartesian_prod(*map(torch.arange, segments[0]))
    cos, sin = module.MiniMaxH3RotaryPosEmbed(p.head_dim // 8)(ids)
    return swap(*(module._apply_rotary_emb(x, cos, sin) for x in swap(q, k)))


def rope(q, k, p, segments, options):
    module = original("transformers.models.llama.modeling_llama")
    config = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=p.head_dim, max_position_embeddings=4096
    )
    cos, sin = module.LlamaRotaryEmbedding(config)(q, torch.arange(q.shape[2])[None])
    return module.apply_rotary_pos_emb(q, k, cos, sin)


# --- stored results of code without a package: tests/golden/make_multimodal_ropes.py -----------------------

LAYOUTS = [(3, (1, 2, 3), 2), (2, (1, 3, 5), 3, (3, 2, 2), 4), (1, (2, 5, 3), 1, (1, 1, 1), 2)]
GOLDEN_DIMS = [128, 32, 32]


@cache
def golden_tables():
    with np.load(Path(__file__).parent / "golden" / "multimodal_ropes.npz") as tables:
        return {name: torch.from_numpy(tables[name]) for name in tables.files}


def golden(q, k, p, segments, options, name):
    """Rotate q and k with stored cos and sin, in the half layout."""
    number = LAYOUTS.index(segments)
    cos, sin = (golden_tables()[f"{name}/{number}/{part}"] for part in ("cos", "sin"))

    def rotate_pairs(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    return rotate_pairs(q), rotate_pairs(k)


def golden_cases(name, published=None, head_dim=None, heads=1, **options):
    """Return one case per layout. An option applies to all layouts, or is a list with one value per layout."""
    found = []
    for number, (segments, dim) in enumerate(zip(LAYOUTS, GOLDEN_DIMS, strict=True)):
        own = {key: value[number] if isinstance(value, list) else value for key, value in options.items()}
        code = partial(golden, name=name)
        found.append(
            case(
                published or name,
                code,
                *segments,
                head_dim=head_dim or dim,
                base=5e6,
                split=SHARES.get((name, dim)),
                double=True,
                heads=heads,
                **own,
            )
        )
    return found


STRIDE = {128: (24, 20, 20), 32: (6, 5, 5)}
SHARES = {(name, dim): STRIDE[dim] for name in ("mrope_interleave", "ilrope") for dim in STRIDE}


class Case(NamedTuple):
    name: str
    code: Callable
    segments: tuple
    made: dict  # arguments of lrpe_md.preset
    double: bool  # the original forms angles in float64
    omega: Callable | None
    phase: Callable | None
    options: dict  # of positions

    @property
    def preset(self):
        return preset(self.name, **self.made)


def case(
    name, code, *segments, head_dim=None, split=None, base=None, rotary_dim=None, heads=None, double=False, omega=None,
    phase=None, **options,
):  # fmt: skip
    heads = HEADS if heads is None and name in BY_HEAD else heads
    made = {"head_dim": head_dim, "num_heads": heads, "split": split, "base": base, "rotary_dim": rotary_dim}
    return Case(name, code, segments, made, double, omega, phase, options)


def for_heads(name):
    """Build a preset for two heads, or for as many as its axes require."""
    return preset(name, num_heads=8 if name == "mhrope" else HEADS)


BY_HEAD = ("transnormer", "pope", "ltx", "ltx2", "ltx2_audio", "ltx2_cross")


xy = partial(timm_axial, grid_indexing="xy")
kontext = partial(
    flux, name="flux", base=10000, dims=(16, 56, 56), text=lambda n: torch.zeros(n, 3, dtype=torch.int64), reference=1
)
flux2 = partial(
    flux, name="flux2", base=2000, dims=(32, 32, 32, 32), reference=10,
    text=lambda n: torch.cartesian_prod(*[torch.tensor([0])] * 3, torch.arange(n)),
)  # fmt: skip
text2 = partial(qwen_text, name="qwen2_vl", model="Qwen2VL", base=1e6, sections=(16, 24, 24))
text3 = partial(qwen_text, name="qwen3_vl", model="Qwen3VL", base=5e6, sections=(24, 20, 20))
text35 = partial(
    qwen_text, name="qwen3_5", model="Qwen3_5", base=1e7, sections=(11, 11, 10), scaling={"partial_rotary_factor": 0.25}
)
ernie = partial(qwen_text, name="ernie4_5_vl_moe", model="Ernie4_5_VLMoe", base=5e5, sections=(22, 22, 20))
glm4v = partial(qwen_text, name="glm4v", model="Glm4v", base=1e4, sections=(16, 24, 24))
HALF = {"partial_rotary_factor": 0.5}
eva02 = partial(timm_axial, reference=(16, 16))
encoder = partial(timm_axial, grid_indexing="xy", reference=(24, 24))

CASES = [
    case("eva02", eva02, 1, (5, 9)),
    case("eva02", eva02, 1, (5, 9), head_dim=32, reference=(24, 20)),
    case("rope_vit_axial", partial(xy, temperature=100.0), 1, (5, 9)),
    case("rope_vit_axial", partial(xy, temperature=100.0), 0, (7, 3), head_dim=48, reference=(14, 12)),
    case("rope_vit_mixed", rope_vit_mixed, 1, (5, 9), heads=1, omega=lambda p: mixed_parameter(p).freqs[:, 1].flip(0)),
    case(
        "rope_vit_mixed", rope_vit_mixed, 2, (7, 3), head_dim=32, heads=1,
        omega=lambda p: mixed_parameter(p).freqs[:, 1].flip(0),
    ),
    case("dinov3", dinov3, 5, (5, 9)),
    case("dinov3", dinov3, 5, (5, 9), by="shorter", head_dim=32),
    case("dinov3", dinov3, 0, (5, 9), by="longer"),
    case("perception_encoder", partial(encoder, grid_offset=1.0), 1, (5, 9)),
    case("perception_encoder", partial(encoder, grid_offset=1.0), 1, (5, 9), head_dim=96, reference=(32, 28)),
    case("perception_encoder", encoder, 0, (5, 9), offset=0, reference=(32, 32)),
    case("pixtral", pixtral, (5, 9), (7, 4)),
    case("pixtral", pixtral, (5, 9), head_dim=32),
    case("qwen2_vl_vision", qwen2_vl_vision, (2, 4, 6), (8, 2)),
    case("qwen2_vl_vision", qwen2_vl_vision, (4, 6), head_dim=64),
    case("qwen2_vl", text2, 3, (1, 3, 5), 2, (2, 2, 3), 4),
    case("qwen2_vl", text2, (1, 3, 5), 2),
    case("qwen2_vl", partial(text2, sections=(8, 12, 12)), 3, (1, 3, 5), 2, head_dim=64),
    case("qwen3_vl", text3, 3, (1, 3, 5), 2, (1, 3, 5), 4),
    case("qwen3_vl", partial(text3, sections=(8, 12, 12)), 3, (1, 3, 5), 2, head_dim=64, split=(8, 12, 12)),
    case("flux1", kontext, 6, (5, 9), double=True),
    case("flux1", kontext, 6, (5, 9), (4, 7), double=True),
    case("flux1", partial(kontext, dims=(8, 28, 28)), 6, (5, 9), head_dim=64, double=True),
    case("flux2", flux2, 6, (5, 9), double=True),
    case("flux2", flux2, 6, (5, 9), (3, 4), (4, 7), double=True),
    case("flux2", partial(flux2, dims=(16, 16, 16, 16)), 6, (5, 9), head_dim=64, double=True),
    case("lumina2", lumina2, 6, (5, 9), double=True),
    case("lumina2", lumina2, 6, (5, 9), head_dim=48, double=True),
    case("qwen_image", qwen_image, 6, (5, 9)),
    case("qwen_image", qwen_image, 6, (5, 8), (11, 3), head_dim=64),
    case("cogvideox", cogvideox, 6, (3, 5, 9)),
    case("cogvideox", cogvideox, 6, (3, 9, 4), head_dim=32),
    case("cogvideox", cogvideox, 6, (3, 5, 9), size=None),
    case("cogvideox", cogvideox, 6, (3, 5, 4), size=(48, 32)),
    case("hunyuan_video", hunyuan_video, (3, 5, 9), 6),
    case("hunyuan_video", hunyuan_video, (3, 5, 9), 6, head_dim=64),
    case("wan", wan, (3, 5, 9), double=True),
    case("wan", wan, (3, 5, 9), head_dim=64, double=True),
    case("mochi", mochi, (3, 5, 9), 6, heads=1, omega=mochi_frequencies),
    case("mochi", mochi, (3, 5, 9), 6, head_dim=64, heads=1, omega=mochi_frequencies),
    case("cosmos", cosmos, (3, 5, 9)),
    case("cosmos", cosmos, (3, 5, 9), head_dim=64, fps=16),
    case("transnormer", transnormer, (40,)),
    case("transnormer", transnormer, (40,), head_dim=16),
    case("cosformer", cosformer, (40,)),
    case("cosformer", cosformer, (40,), head_dim=8, longest=55),
    case("pope", pope, (40,), phase=pope_phase),
    case("pope", pope, (40,), head_dim=16, phase=pope_phase),
    case("gemma4_vision", gemma4_vision, (5, 9)),
    case("gemma4_vision", gemma4_vision, (5, 9), head_dim=72),
    case("llama4_vision", llama4_vision, (5, 9), 1),
    case("minimax_m3_vl", minimax_m3_vl, (3, 4, 6), (8, 2)),
    case("minimax_m3_vl", minimax_m3_vl, (4, 6), head_dim=64),
    case("qwen2_5_omni", qwen2_5_omni, 3, (3, 5, 9), 2),
    case("qwen2_5_omni", qwen2_5_omni, 3, (4, 2, 3), 2, (2, 3, 2), 4, interval=0.3),
    case("qwen2_5_omni", qwen2_5_omni, 3, (4, 2, 3), 2, head_dim=64, interval=1.7, rate=3),
    case("qwen3_5", text35, 3, (3, 5, 9), 2),
    case("qwen3_5", text35, 3, (9, 2, 4), 2, (1, 3, 2), 5),
    case("ernie4_5_vl", ernie, 3, (3, 5, 9), 2),
    case("ernie4_5_vl", ernie, 3, (9, 2, 4), 2, (1, 3, 2), 5),
    case("ernie4_5_vl", partial(ernie, sections=(11, 11, 10)), 3, (1, 3, 5), 2, head_dim=64),
    case("glm4v", glm4v, 3, (3, 5, 9), 2),
    case("glm4v", partial(glm4v, sections=(8, 12, 12), scaling=HALF), 3, (9, 2, 4), 2, rotary_dim=64),
    case("z_image", z_image, (4, 8), 32),
    case("z_image", z_image, (5, 9), Tokens(19, "zero"), 64),
    case("z_image", z_image, (8, 12), 32, head_dim=64),
    case("hidream", hidream, (5, 9), 6, double=True),
    case("hidream", hidream, (5, 9), 6, head_dim=64, double=True),
    case("cogview4", cogview4, 6, (5, 9)),
    case("cogview4", cogview4, 6, (98, 3), head_dim=64),
    case("glm_image", glm_image, 6, (5, 9)),
    case("hunyuan_image", hunyuan_image, (5, 9), 6),
    case("hunyuan_video15", hunyuan_video15, (3, 5, 9), 6),
    case("hunyuan_video15", hunyuan_video15, (3, 5, 9), 6, head_dim=64),
    case("allegro", allegro, (3, 5, 9)),
    case("allegro", allegro, (3, 5, 9), head_dim=48, by=(1.0, 3.0, 2.0)),
    case("kandinsky5", kandinsky5, (3, 5, 9)),
    case("kandinsky5", kandinsky5, (3, 5, 9), head_dim=128, by=(1.0, 2.0, 3.16)),
    case("sana_video", sana_video, (3, 5, 9), double=True),
    case("sana_video", sana_video, (3, 5, 9), head_dim=64, double=True),
    case("chronoedit", chronoedit, (3, 5, 9), double=True),
    case("chronoedit", chronoedit, (2, 5, 9), double=True),
    case("ltx", ltx, (3, 5, 9)),
    case("ltx", ltx, (3, 5, 9), head_dim=32, heads=3, fps=30),
    case("ltx", ltx, (2, 1, 3), heads=32),
    case("ltx2", ltx2, (3, 5, 9)),
    case("ltx2", ltx2, (2, 1, 3), heads=32),
    case("ltx2", ltx2, (3, 5, 9), head_dim=64, heads=3, fps=30),
    case("ltx2_audio", ltx2, (40,)),
    case("ltx2_cross", partial(ltx2, axes=1), (3, 5, 9)),
    case("ltx2_cross", ltx2, (40,)),
    case("minimax_h3", minimax_h3, (3, 5, 9)),
    case("rope_1d", rope, (40,)),
    case("rope_1d", rope, 6, (3, 5, 9), 2, head_dim=64),
    *golden_cases("rope", "rope_1d"),
    *golden_cases("mrope_interleave", stride=3),
    *golden_cases("mhrope", head_dim=16, heads=8),
    *golden_cases("circle_rope", mix=[0.3, 0, 0]),
    *golden_cases("v2pe", stride=2),
    *golden_cases("ilrope"),
    *golden_cases("omnirope", stride=2),
    *golden_cases("mm_rope", scale=(4.0, 8.0, 8.0)),
    *golden_cases("grape", "qwen2_vl"),
    *golden_cases("videorope"),
    *golden_cases("hope", stride=0.75),
]  # fmt: skip


def inputs(num_tokens, head_dim, heads=HEADS):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(BATCH, heads, num_tokens, head_dim, generator=generator) for _ in range(2))


def table(positions):
    return positions.explicit().explicit().coords


# --- three sizes: not square, odd, one frame ---------------------------------------------------------------

SIZES = {1: [(40,), (23,), (1,)], 2: [(5, 9), (7, 4), (1, 3)], 3: [(3, 5, 9), (2, 6, 3), (1, 7, 4)]}
EVEN = {2: [(4, 6), (10, 2), (2, 8)], 3: [(3, 4, 6), (2, 10, 2), (1, 2, 8)]}
FULL = {2: [(4, 8), (8, 12), (1, 32)]}  # multiples of 32 tokens
GRIDS_OF = {"qwen2_vl_vision": EVEN, "minimax_m3_vl": EVEN, "z_image": FULL}


def sized(case, number):
    """Return a case's segments, with grids of a different size."""
    sizes = GRIDS_OF.get(case.name, SIZES)
    return tuple(sizes[len(s)][number] if isinstance(s, tuple) else s for s in case.segments)


def is_golden(case):
    return getattr(case.code, "func", None) is golden
