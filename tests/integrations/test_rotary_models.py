"""With adapt_rotary, whole models of timm, diffusers and transformers give the same results with our kernels.

The bound is 1e-5, for outputs of order 1 and for their gradients.
"""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from parametrizing import slow_except
from torch import nn

from lrpe_md import adapt_rotary, rotate
from lrpe_md.integrations import fused, plans, restore_rotary
from lrpe_md.integrations.rotary import exchanged_names, parts

OLDEST = {"timm": "1.0.29", "diffusers": "0.42", "transformers": "5.23"}
BOUND = 1e-5


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def calls(record_calls):
    """Record the number of tensors in each call of :func:`lrpe_md.rotate` that a model makes."""
    return record_calls(rotate, fused, plans, describe=lambda *xs, **options: len(xs))


@pytest.fixture
def unturned(monkeypatch):
    """Return a function that calls a model without rotating q and k, as if positions didn't matter."""

    def run(call, *args):
        with monkeypatch.context() as patch:
            for module in (fused, plans):
                patch.setattr(module, "rotate", lambda *xs, **kwargs: xs if len(xs) > 1 else xs[0])
            return call(*args)

    return run


def is_adapted(model):
    return any(exchanged_names(part) for part in parts(model).values())


def library(name, version=None):
    return pytest.importorskip(name, minversion=version or OLDEST[name])


def randomize(model):
    """Make the weights large enough that attention is far from uniform."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith("freqs"):
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def gradients(model, call, x, seed=None):
    """Return the output of ``call(model, x)``, and the gradients of x and of each parameter for a random cotangent."""
    if seed is not None:
        torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = call(model, x)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y) / y.numel() ** 0.5
    wanted = {"x": x, **{name: p for name, p in model.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad((y * direction).sum(), list(wanted.values()), allow_unused=True)
    return y.detach(), {name: g for name, g in zip(wanted, found, strict=True) if g is not None}


def same(model, adapted, call, x, seed=None):
    """Check that the outputs and gradients of two models agree within the bound."""
    y, dy = gradients(model, call, x, seed)
    z, dz = gradients(adapted, call, x, seed)
    assert 0.1 < y.abs().max() < 10
    torch.testing.assert_close(z, y, rtol=0, atol=BOUND)
    assert dz.keys() == dy.keys()
    # Gradients are also of order 1. Those of some weights are only rounding error (a bias shared by all keys).
    largest = max(g.abs().max() for name, g in dy.items() if name != "x")
    for name in dy:
        scale = dy[name].abs().max() if name in ("x", "rope.freqs") else largest
        assert scale > 1e-5
        error = ((dz[name] - dy[name]) / scale).abs().max()
        assert error <= BOUND, f"{name}: {error:.2e}"


def classes(model):
    return {name: type(part) for name, part in parts(model).items()}


# --- timm ------------------------------------------------------------------------------------------------------

TINY = {"depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 5, "head_init_scale": 0}
VITS = {  # model, its own arguments
    "eva02": ("eva02_tiny_patch14_224", {"swiglu_mlp": True}),
    "eva02 unfused": ("eva02_base_patch14_224", {}),
    "axial": ("vit_small_patch16_rope_224", {}),
    "axial with a table": ("vit_small_patch16_rope_ape_224", {}),
    "mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "mixed with a table": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "dinov3": ("vit_small_patch16_dinov3", {}),
    "dinov3 with qkv bias": ("vit_small_patch16_dinov3_qkvb", {}),
    "perception encoder": ("vit_pe_core_tiny_patch16_384", {}),
    "registers": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "grouped queries": (
        "vit_small_patch16_dinov3",
        {"attn_type": "rope", "qkv_fused": False, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 128},
    ),
    "post norm": ("eva02_tiny_patch14_224", {"use_post_norm": True, "scale_attn_inner": True}),
    "gate": ("eva02_tiny_patch14_224", {}),
    "mrope": ("eva02_tiny_patch14_224", {"rope_type": "mrope"}),
    "shorter side": ("vit_small_patch16_dinov3", {"rope_grid_indexing": "xy", "rope_grid_offset": 0.25}),
}


NEWER = {"num_kv_heads", "rope_grid_indexing", "rope_type", "rope_shift_coords"}  # missing or different before 1.0.31


def timm_vit(name="axial", **kwargs):
    model, own = VITS[name]
    version = "1.0.31" if NEWER & {*own, *kwargs} else None
    size = {"img_size": (16 * 5, 16 * 3) if "patch14" not in model else (14 * 5, 14 * 3)}
    vit = library("timm", version).create_model(model, **{**TINY, **size, **own, **kwargs})
    if name == "gate":  # and another argument of the attention that Eva does not pass on
        for block in vit.blocks:
            block.attn.qkv_bias_separate = True
            block.attn.gate = nn.Linear(64, 64)
    if name == "shorter side":
        vit.rope.normalize_coords = "min"
        if vit.rope.feat_shape is not None:
            vit.rope._cache_embed(vit.rope.feat_shape)
    return randomize(vit)


def image(vit, rows=5, columns=3):
    height, width = vit.patch_embed.patch_size
    return torch.randn(2, 3, height * rows, width * columns)


def logits(model, x):
    return model(x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VITS)
def test_timm(name, dynamic, calls, unturned):
    vit = timm_vit(name, dynamic_img_size=dynamic)
    adapted = adapt_rotary(copy.deepcopy(vit))
    for rows, columns in ((5, 3), (4, 7)) if dynamic else ((5, 3),):
        x = image(vit, rows, columns)
        calls.clear()
        same(vit, adapted, logits, x)
        assert sum(calls) == 4  # q and k of two layers
        assert (unturned(adapted, x) - vit(x)).abs().max() > 1e-3
    assert list(adapted.state_dict()) == list(vit.state_dict())


@pytest.mark.parametrize("name", ["eva02", "mixed", "dinov3"])
def test_timm_drops_patches(name, calls):
    vit = timm_vit(name, patch_drop_rate=0.4).train()
    adapted = adapt_rotary(copy.deepcopy(vit))
    x = image(vit)
    same(vit, adapted, logits, x, seed=3)
    assert sum(calls) == 4
    same(vit.eval(), adapted.eval(), logits, x)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["eva02", "mixed"])
def test_timm_masks(name, fused, monkeypatch):
    vit = timm_vit(name, global_pool="avg")
    if name == "eva02":  # adapting another model may have patched this module
        monkeypatch.delitem(vars(sys.modules["timm.layers.attention"]), "_fused_torch", raising=False)
    for block in vit.blocks:
        block.attn.fused_attn = fused
    adapted, x = adapt_rotary(copy.deepcopy(vit)), image(vit)
    mask = torch.rand(1, 1, 15 + vit.num_prefix_tokens, 15 + vit.num_prefix_tokens) < 0.5
    mask[..., 0] = True
    for kwargs in ({"attn_mask": mask}, {"is_causal": True}):
        same(vit, adapted, lambda model, x, kwargs=kwargs: model(x, **kwargs), x)
        assert (adapted(x, **kwargs) - adapted(x)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["eva02", "mixed"])
def test_timm_checkpointing(name, calls):
    vit = timm_vit(name)
    adapted = adapt_rotary(copy.deepcopy(vit))
    adapted.set_grad_checkpointing()
    same(vit, adapted, logits, image(vit))
    assert sum(calls) == 8


def test_timm_intermediates():
    vit = timm_vit("mixed", dynamic_img_size=True)
    adapted, x = adapt_rotary(copy.deepcopy(vit)), image(vit, 4, 7)
    expected = vit.forward_intermediates(x, norm=True)
    last, between = adapted.forward_intermediates(x, norm=True)
    torch.testing.assert_close(last, expected[0], rtol=0, atol=BOUND)
    torch.testing.assert_close(between, expected[1], rtol=0, atol=BOUND)
    vit.prune_intermediate_layers(1)
    adapted.prune_intermediate_layers(1)
    torch.testing.assert_close(adapted.forward_features(x), vit.forward_features(x), rtol=0, atol=BOUND)


def test_timm_changes_its_input_size():
    vit = timm_vit("eva02")
    adapted = adapt_rotary(copy.deepcopy(vit))
    for model in (vit, adapted):
        model.set_input_size((14 * 4, 14 * 6))
    same(vit, adapted, logits, image(vit, 4, 6))


FREQUENCIES = {"eva02": "bands", "dinov3": "periods"}


@pytest.mark.parametrize("name", FREQUENCIES)
def test_timm_frequencies_by_hand_are_kept(name):
    vit = timm_vit(name, dynamic_img_size=True)
    getattr(vit.rope, FREQUENCIES[name]).mul_(0.3)
    adapted = adapt_rotary(copy.deepcopy(vit))
    same(vit, adapted, logits, image(vit, 4, 7))
    getattr(vit.rope, FREQUENCIES[name]).div_(0.3)
    assert (adapted(image(vit)) - vit(image(vit))).abs().max() > 1e-3


def test_learned_frequencies_stay_the_models_own():
    vit = timm_vit("mixed")
    freqs = vit.rope.freqs
    optimizer = torch.optim.SGD([freqs], lr=0.1)
    adapted = adapt_rotary(vit)
    assert adapted.rope.freqs is freqs
    assert "rope.freqs" in adapted.no_weight_decay()
    x, before = image(vit), freqs.detach().clone()
    expected = adapted(x)
    adapted(x).square().sum().backward()
    assert (freqs.grad.flatten(3).abs().amax((0, 3)) > 0).all()  # for each layer and head
    optimizer.step()
    assert not torch.equal(freqs, before)
    assert (adapted(x) - expected).abs().max() > 1e-5
    torch.testing.assert_close(restore_rotary(copy.deepcopy(adapted))(x), adapted(x), rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["eva02", "mixed"])
def test_casts(name):
    if name == "mixed":
        library("timm", "1.0.31")  # mixed rotation in bfloat16
    vit = timm_vit(name)
    adapted, x = adapt_rotary(copy.deepcopy(vit)), image(vit)
    expected = adapted.double()(x.double())
    torch.testing.assert_close(expected, vit(x).double(), rtol=0, atol=BOUND)
    for dtype in (torch.float64, torch.bfloat16):
        cast = copy.deepcopy(adapted).to(dtype)
        cast(x.to(dtype)).square().sum().backward()
        assert all(p.grad is not None for p in cast.parameters())
    found = adapted.bfloat16()(x.bfloat16())
    assert found.dtype == torch.bfloat16
    theirs = vit.bfloat16()(x.bfloat16())
    assert (found - expected).abs().max() < 1.5 * (theirs - expected).abs().max()


@pytest.mark.parametrize("by", ["timm.models", "torchvision.models.feature_extraction"])
@pytest.mark.parametrize("name", ["eva02", "axial", "mixed", "dinov3"])
def test_timm_feature_extraction_by_a_traced_graph(name, by):
    create = pytest.importorskip(by).create_feature_extractor
    vit = timm_vit(name, dynamic_img_size=False)
    nodes = {"blocks.0": "first", "head": "last"}
    adapted, x = adapt_rotary(copy.deepcopy(vit)), image(vit)
    found, expected = (create(model, return_nodes=nodes)(x) for model in (adapted, vit))
    for key in nodes.values():
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=BOUND)
    torch.testing.assert_close(found["last"], adapted(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["eva02", "axial", "mixed", "mixed with a table", "dinov3"])
def test_timm_features_of_any_size_by_a_traced_graph(name):
    """There is one graph for all sizes, with gradients of learned frequencies."""
    create = pytest.importorskip("timm.models").create_feature_extractor
    vit = timm_vit(name, dynamic_img_size=True)
    adapted = adapt_rotary(copy.deepcopy(vit))
    graph = create(adapted, return_nodes={"head": "last"})
    for height, width in ((4, 6), (7, 3)):
        x = image(vit, height, width)
        torch.testing.assert_close(graph(x)["last"], vit(x), rtol=0, atol=BOUND)
    if "mixed" in name:
        found, expected = (
            torch.autograd.grad(y.square().sum(), model.rope.freqs)[0]
            for y, model in ((graph(x)["last"], graph), (vit(x), vit))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_timm_compiles():
    vit = timm_vit("mixed", dynamic_img_size=True)
    x = image(vit, 4, 7)
    expected = vit(x)
    compiled = torch.compile(adapt_rotary(vit), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eva02", "mixed", "dinov3"])
def test_timm_on_a_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # for the patch embedding
    vit = timm_vit(name, patch_drop_rate=0.4).cuda()
    adapted, x = adapt_rotary(copy.deepcopy(vit), impl="triton"), image(vit).cuda()
    same(vit, adapted, logits, x)
    same(vit.train(), adapted.train(), logits, x, seed=3)


# --- diffusers -------------------------------------------------------------------------------------------------


def flux(**kwargs):
    config = {
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2,
        "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 14, 14),
    }  # fmt: skip
    return randomize(library("diffusers").FluxTransformer2DModel(**{**config, **kwargs}))


def flux_ids():
    """Return the ids of an image and a reference image, as in FLUX.1 Kontext."""
    grids = [torch.cartesian_prod(torch.tensor([i]), torch.arange(3), torch.arange(5)) for i in (0, 1)]
    return torch.cat(grids).float()


def call_flux(model, x):
    torch.manual_seed(5)
    return model(
        x, torch.randn(2, 6, 16), torch.randn(2, 16), torch.tensor([0.3, 0.7]), flux_ids(), torch.zeros(6, 3),
        return_dict=False,
    )[0]  # fmt: skip


def wan(**kwargs):
    config = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2,
    }  # fmt: skip
    return randomize(library("diffusers").WanTransformer3DModel(**{**config, **kwargs}))


def call_wan(model, x):
    torch.manual_seed(5)
    return model(x, torch.tensor([3, 7]), torch.randn(2, 6, 16), return_dict=False)[0]


def ltx(**kwargs):
    config = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
        "cross_attention_dim": 32, "caption_channels": 16,
    }  # fmt: skip
    return randomize(library("diffusers").LTXVideoTransformer3DModel(**{**config, **kwargs}))


def call_ltx(model, x):
    torch.manual_seed(5)
    mask = torch.ones(2, 6, dtype=torch.int64)
    return model(
        x, torch.randn(2, 6, 16), torch.tensor([3, 7]), mask, num_frames=2, height=3, width=5, return_dict=False
    )[0]  # fmt: skip


def hunyuan_video(**kwargs):
    config = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 1,
        "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16, "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 14, 14),
    }  # fmt: skip
    return randomize(library("diffusers").HunyuanVideoTransformer3DModel(**{**config, **kwargs}))


def call_hunyuan_video(model, x):
    torch.manual_seed(5)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    return model(
        x, torch.tensor([3, 7]), torch.randn(2, 6, 16), mask, torch.randn(2, 8), torch.tensor([1.0, 2.0]),
        return_dict=False,
    )[0]  # fmt: skip


VIDEO = (2, 4, 3, 6, 10)
DIFFUSERS = {  # model, call, size of the input, attentions
    "flux": (flux, call_flux, (2, 30, 4), 3),  # text, image, and both in the single stream
    "wan": (wan, call_wan, VIDEO, 2),
    "hunyuan video": (hunyuan_video, call_hunyuan_video, VIDEO, 2),
    "hunyuan video with a first frame": (
        lambda: hunyuan_video(image_condition_type="token_replace"), call_hunyuan_video, VIDEO, 2,
    ),
    "wan, another width": (lambda: wan(attention_head_dim=20), call_wan, VIDEO, 2),
    "hunyuan video, another base": (
        lambda: hunyuan_video(rope_theta=10000.0, rope_axes_dim=(8, 12, 12)), call_hunyuan_video, VIDEO, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers(name, calls, unturned):
    build, call, size, count = DIFFUSERS[name]
    model = build()
    adapted, x = adapt_rotary(copy.deepcopy(model)), torch.randn(size)
    same(model, adapted, call, x)
    assert sum(calls) == 2 * count
    assert (unturned(call, adapted, x) - call(model, x)).abs().max() > 1e-3
    assert list(adapted.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_fused_projections(name):
    build, call, size, *_ = DIFFUSERS[name]
    model = build()
    expected, adapted, x = model, adapt_rotary(copy.deepcopy(model)), torch.randn(size)
    adapted.fuse_qkv_projections()
    torch.testing.assert_close(call(adapted, x), call(expected, x), rtol=0, atol=BOUND)
    attention = next(m for m in adapted.modules() if getattr(m, "fused_projections", False))
    attention.to_qkv.weight.data.zero_()
    assert (call(adapted, x) - call(expected, x)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan video"])
def test_diffusers_checkpointing(name, calls):
    build, call, size, count = DIFFUSERS[name]
    model = build()
    adapted = adapt_rotary(copy.deepcopy(model)).train()
    adapted.enable_gradient_checkpointing()
    same(model, adapted, call, torch.randn(size))
    assert sum(calls) == 4 * count


@pytest.mark.parametrize("name", ["eva02", "mixed", "dinov3", "flux", "wan", "hunyuan video", "Qwen2VL", "Qwen3VL"])
def test_no_warning_where_all_is_known(name):
    model = ALL[name][0]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapt_rotary(model)


def test_a_controlnet_of_the_same_parts(unturned):
    diffusers = library("diffusers")
    config = {
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2,
        "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": [4, 14, 14],
    }  # fmt: skip
    model = randomize(diffusers.FluxControlNetModel(**config))
    adapted, x = adapt_rotary(copy.deepcopy(model)), torch.randn(2, 30, 4)

    def call(model):
        torch.manual_seed(5)
        condition, text, pooled = torch.randn(2, 30, 4), torch.randn(2, 6, 16), torch.randn(2, 16)
        args = {"timestep": torch.tensor([0.3, 0.7]), "img_ids": flux_ids(), "txt_ids": torch.zeros(6, 3)}
        blocks, single = model(
            x, condition, encoder_hidden_states=text, pooled_projections=pooled, return_dict=False, **args
        )
        return torch.stack([*blocks, *single])

    torch.testing.assert_close(call(adapted), call(model), rtol=0, atol=BOUND)
    assert (unturned(call, adapted) - call(model)).abs().max() > 1e-3


# --- transformers ----------------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
QWEN2 = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
QWEN25 = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
    "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip
QWEN3 = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWENS = {  # model, text and vision configuration, rotary parameters, attentions
    "Qwen2VL": ("Qwen2VL", {}, QWEN2, {"mrope_section": [2, 3, 3]}, 3),
    "Qwen2VL, yarn": ("Qwen2VL", {}, QWEN2, {"mrope_section": [2, 3, 3], **YARN}, 3),
    "Qwen2.5VL": ("Qwen2_5_VL", {}, QWEN25, {"mrope_section": [2, 3, 3]}, 4),
    "Qwen3VL": ("Qwen3VL", {"head_dim": 32}, QWEN3, {"mrope_section": [6, 5, 5], "rope_theta": 5e6}, 3),
    "Qwen3VLMoe": (
        "Qwen3VLMoe",
        {"head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
        QWEN3, {"mrope_section": [4, 2, 2], "rope_theta": 1e4}, 3,
    ),
}  # fmt: skip


def qwen(name="Qwen2VL", **parameters):
    model, text, vision, own, _ = QWENS[name]
    transformers = library("transformers")
    parameters = {"rope_type": "default", "rope_theta": 1e6, **own, **parameters}
    config = getattr(transformers, f"{model}Config")(
        text_config={**TEXT, **text, "rope_parameters": parameters}, vision_config=vision, **IDS
    )
    return randomize(getattr(transformers, f"{model}ForConditionalGeneration")(config))


def prompt():
    """Return text with two images of 4 × 6 and 2 × 4 patches, merged 2 × 2, and a padded second sample."""
    ids = torch.tensor([3, 4, 62, *[60] * 6, 63, 5, 62, *[60] * 2, 63, 7, 8])
    ids = torch.stack([ids, torch.cat([torch.tensor([0, 0, 0]), ids[:-3]])])
    grids = torch.tensor([[1, 4, 6], [1, 2, 4]] * 2)
    return {
        "input_ids": ids, "image_grid_thw": grids, "mm_token_type_ids": (ids == 60).int(),
        "attention_mask": (ids != 0).long(),
    }  # fmt: skip


def pixels():
    return torch.randn(2 * 32, 3 * 2 * 16, generator=torch.Generator().manual_seed(6))


def call_qwen(model, x):
    return model(**prompt(), pixel_values=x).logits[:, 3:]


@pytest.mark.parametrize("name", QWENS)
def test_transformers(name, calls, unturned):
    model = qwen(name)
    adapted = adapt_rotary(copy.deepcopy(model))
    same(model, adapted, call_qwen, pixels())
    assert calls == [2] * QWENS[name][4]  # one launch for q and k
    assert (unturned(call_qwen, adapted, pixels()) - call_qwen(model, pixels())).abs().max() > 1e-3
    assert list(adapted.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(
    "sections", [[2, 2, 2], [4, 2, 1], [9, 9, 9], [24, 20, 20], [0, 1, 40], [3, 0, 2], [-1, 2, -1, 7]]
)
def test_sections_as_the_original_takes_them(sections):
    """Qwen3-VL's sections need not add up to the number of pairs. Time gets the remainder."""
    model = qwen("Qwen3VL", mrope_section=sections)
    same(model, adapt_rotary(copy.deepcopy(model)), call_qwen, pixels())


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2VL, yarn", "Qwen2.5VL", "Qwen3VL", "Qwen3VLMoe"])
@pytest.mark.parametrize("tower", ["language_model", "visual"])
def test_qwens_frequencies_by_hand_are_kept(name, tower):
    model = qwen(name)
    ropes = [m for m in getattr(model.model, tower).modules() if hasattr(m, "inv_freq")]
    assert len(ropes) == 1
    ropes[0].inv_freq.mul_(0.3)
    same(model, adapt_rotary(copy.deepcopy(model)), call_qwen, pixels())


@pytest.mark.parametrize("name", QWENS)
def test_recorded_states_and_names(name):
    """transformers looks up what to record by a model's class, and saves the class name."""
    model = qwen(name)
    adapted = adapt_rotary(copy.deepcopy(model))
    before = {path: type(part) for path, part in model.named_modules()}
    changed = {path for path, part in adapted.named_modules() if type(part) is not before.get(path, type(part))}
    assert changed == {path for path in before if path.endswith(("self_attn", "attn"))}
    assert {path: cls.__name__ for path, cls in before.items()} == {
        path: type(part).__name__ for path, part in adapted.named_modules()
    }
    ids = torch.tensor([[5, 6, 7, 8]])
    for m in (model, adapted):
        m.model.language_model.config._attn_implementation = "eager"  # this implementation returns weights to record
    for key in ("attentions", "hidden_states"):  # from the language model
        expected, found = (m(input_ids=ids, **{f"output_{key}": True})[key] for m in (model, adapted))
        assert len(found) == len(expected) >= 1
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=BOUND)
    x, grids = pixels(), prompt()["image_grid_thw"]
    flags = {"output_hidden_states": True, "output_attentions": True}
    expected, found = (m.model.visual(x, grids, **flags) for m in (model, adapted))
    for key in ("hidden_states", "attentions"):
        assert len(found[key]) == len(expected[key]) >= 1
        for one, other in zip(found[key], expected[key], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=BOUND)


def test_a_saved_tower_has_its_own_name(tmp_path):
    tower = qwen("Qwen2.5VL").model.visual
    expected = type(tower).__name__
    adapt_rotary(tower).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [expected]


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen3VL"])
def test_generation(name, calls):
    model = qwen(name)
    adapted = adapt_rotary(copy.deepcopy(model))
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, found = (m.generate(**prompt(), pixel_values=pixels(), **options) for m in (model, adapted))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=BOUND)
    assert set(calls) == {2}


def test_other_models_of_the_same_file_are_left_alone(calls):
    model, adapted = qwen(), adapt_rotary(qwen())
    call_qwen(model, pixels())
    assert not calls
    call_qwen(adapted, pixels())
    assert calls
    assert {type(part) for part in model.modules()} == {type(part) for part in qwen().modules()}


def test_transformers_checkpointing(calls):
    model = qwen()
    adapted = adapt_rotary(copy.deepcopy(model)).train()
    adapted.gradient_checkpointing_enable()
    same(model, adapted, call_qwen, pixels())
    assert calls == [2] * 6


# --- what holds for each -----------------------------------------------------------------------------------------

ALL = {
    "eva02": (lambda: timm_vit("eva02"), logits, lambda: torch.randn(2, 3, 70, 42)),
    "mixed": (lambda: timm_vit("mixed"), logits, lambda: torch.randn(2, 3, 80, 48)),
    "dinov3": (lambda: timm_vit("dinov3"), logits, lambda: torch.randn(2, 3, 80, 48)),
    "flux": (flux, call_flux, lambda: torch.randn(2, 30, 4)),
    "wan": (wan, call_wan, lambda: torch.randn(VIDEO)),
    "hunyuan video": (hunyuan_video, call_hunyuan_video, lambda: torch.randn(VIDEO)),
    "ltx": (ltx, call_ltx, lambda: torch.randn(2, 30, 4)),
    "Qwen2VL": (qwen, call_qwen, pixels),
    "Qwen3VL": (lambda: qwen("Qwen3VL"), call_qwen, pixels),
}


SMALL_WAN = (lambda: wan(num_layers=1), call_wan, lambda: torch.randn(2, 4, 2, 4, 6))  # its norm is over all heads


@pytest.mark.parametrize("name", slow_except(["wan", "mixed", "Qwen2VL"], ALL))
def test_kernels(name, monkeypatch):
    """The Triton kernels run in the interpreter."""
    build, call, x = SMALL_WAN if name == "wan" else ALL[name]
    model, impls = build(), []

    def recorded(*xs, **kwargs):
        if threading.current_thread() is threading.main_thread():
            impls.append(kwargs["impl"])
        return rotate(*xs, **kwargs)

    for module in (fused, plans):
        monkeypatch.setattr(module, "rotate", recorded)
    same(model, adapt_rotary(copy.deepcopy(model), impl="triton"), call, x())
    assert set(impls) == {"triton"}


def wide_wan():
    """Build Wan with the width of Wan 1.3B."""
    return wan(attention_head_dim=128, num_attention_heads=12, num_layers=1)


COMPILED = {
    **{name: ALL[name] for name in ("flux", "hunyuan video", "eva02", "mixed", "dinov3")},
    "wan": (lambda: wan(num_layers=1), call_wan, lambda: torch.randn(VIDEO)),
    "wan, wide": (wide_wan, call_wan, lambda: torch.randn(VIDEO)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(["dinov3"], COMPILED))
def test_compiling_breaks_no_graph_that_the_original_keeps(name):
    """This covers the forward pass, training, and the gradients of the compiled model."""
    build, call, x = COMPILED[name]
    model, x = build(), x()
    adapted = adapt_rotary(copy.deepcopy(model))
    counted = torch._dynamo.utils.counters

    def compiled(backend):
        return lambda m, x: call(torch.compile(m, backend=backend), x)

    torch._dynamo.reset()
    counted.clear()
    compiled("eager")(model, x)
    kept = set(counted["graph_break"])
    torch._dynamo.reset()
    counted.clear()
    y, dy = gradients(adapted, call, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled("eager")(adapted, x), y, rtol=0, atol=BOUND)
    z, dz = gradients(adapted, compiled("aot_eager"), x)
    torch.testing.assert_close(z, y, rtol=0, atol=BOUND)
    assert dz.keys() == dy.keys()
    atol = 1e-4 * max(g.abs().max().item() for g in dy.values())
    for key in dy:
        torch.testing.assert_close(dz[key], dy[key], rtol=1e-4, atol=atol)
    assert counted["stats"]["unique_graphs"] >= 1
    assert not counted["graph_break"].keys() - kept


@pytest.mark.parametrize("name", ALL)
def test_adapt_again_and_restore(name):
    build, call, x = ALL[name]
    model, x = build(), x()
    before, parameters, expected = classes(model), dict(model.named_parameters()), call(model, x)
    assert adapt_rotary(model) is model
    once, exact = classes(model), call(model, x)
    assert once != before
    assert is_adapted(model)
    assert classes(adapt_rotary(model)) == once
    adapt_rotary(model, impl="reference")
    assert torch.equal(call(model, x), exact)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    for _ in range(2):
        assert restore_rotary(model) is model
        assert classes(model) == before
        assert torch.equal(call(model, x), expected)


@pytest.mark.parametrize("name", ALL)
def test_copies(name):
    build, call, x = ALL[name]
    model, x = adapt_rotary(build()), x()
    expected, file = call(model, x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(call(other, x), expected)
        fresh = build()
        fresh.load_state_dict(other.state_dict())
        torch.testing.assert_close(call(fresh, x), expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["dinov3", "eva02"])
def test_meta_device(name):
    """A model that was adapted on the meta device can be materialised."""
    build, call, x = ALL[name]
    model, x = build(), x()
    expected, state = call(model, x), model.state_dict()
    adapted = adapt_rotary(model.to("meta"))
    adapted = adapted.to_empty(device="cpu")
    adapted.load_state_dict(state)
    for module in adapted.modules():
        if hasattr(module, "init_non_persistent_buffers") and module is not adapted:
            module.init_non_persistent_buffers()
    torch.testing.assert_close(call(adapted, x), expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["dinov3", "flux", "Qwen2VL"])
def test_within_another_default_device(name):
    """Probe tensors have values, whatever the default device."""
    build, call, x = ALL[name]
    model, x = build(), x()
    expected = call(model, x)
    with torch.device("meta"):
        adapt_rotary(model)
    torch.testing.assert_close(call(model, x), expected, rtol=0, atol=BOUND)


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed():
    code = (
        "import sys, torch; before = set(sys.modules); from lrpe_md import adapt_rotary\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} & {'timm', 'diffusers', 'transformers'}))\n"
        "try:\n    adapt_rotary(torch.nn.Linear(2, 2))\nexcept TypeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    first, second = done.stdout.splitlines()
    assert first == ""
    assert second.startswith(
        "model: expected a model that calls a function to rotate q and k by cos and sin, got torch"
    )
    assert second.endswith(
        "Linear; found no such function. To add an encoding, use lrpe_md.adapt for timm's ViT, or "
        "lrpe_md.adapt_attention for other models"
    )


def test_argument_errors():
    with pytest.raises(TypeError, match=r"model: expected an nn.Module or a diffusers pipeline, got str"):
        adapt_rotary("eva02")
    model = timm_vit()
    with pytest.raises(ValueError, match=r"impl: expected .*got 'cuda'"):
        adapt_rotary(model, impl="cuda")
