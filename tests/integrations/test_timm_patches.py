"""timm models that accept patches and their positions: NaFlexViT with each rotary encoding, and Gemma 4's tower."""

import copy

import pytest
import torch
from lrpe_md.scripts.adapters import trial

from lrpe_md import adapt_rotary
from lrpe_md.integrations import restore_rotary

timm = pytest.importorskip("timm", minversion="1.0.31")

from lrpe_md.scripts.adapters import trial_timm as tiny  # noqa: E402

BOUND = 1e-5
CASES = {
    "axial": {},
    "axial, a different reference": {
        "rope_grid_indexing": "xy", "rope_ref_feat_shape": (5, 7), "rope_grid_offset": 0.3,
    },
    "axial, half": {"rope_rotate_half": True, "class_token": True, "use_key_only_attn_mask": True},
    "mixed": {"rope_grid_indexing": "xy"},
    "dinov3": {"rope_grid_offset": 0.2, "rope_grid_indexing": "xy"},
    "mrope": {"attn_type": "eva", "rope_mrope_section": (2, 3, 3)},
}  # fmt: skip


def naflex(name="axial", **kwargs):
    return tiny.build_naflex(name.split(",")[0], **{**CASES[name], **kwargs})


def run(model):
    """Run on images, patches, patches without a mask, and intermediate features. Return all gradients."""
    torch.manual_seed(0)
    images, given = torch.randn(2, 3, 24, 32), tiny.patches(48)
    outputs = [model(images), model(given), model.forward_features(**given)["patches"]]
    outputs.append(model.forward_features(given["patches"], given["patch_coord"])["patches"])
    outputs += model.forward_intermediates(images, intermediates_only=True)
    if not model.rope_is_mixed or model.patch_drop is None:  # not supported by timm
        found = model.forward_intermediates(given, intermediates_only=True, output_fmt="NLC", output_dict=True)
        outputs += found["image_intermediates"]
    return trial.differentiate(model, outputs)


def same(found, stock, bound=BOUND):
    assert found.gradients.keys() == stock.gradients.keys()
    for a, b in zip(found.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=bound * max(1, b.abs().max()))
    scale = max(1, *(g.abs().max() for g in stock.gradients.values()))
    for name, gradient in stock.gradients.items():
        assert (found.gradients[name] - gradient).abs().max() <= bound * scale, name


@pytest.mark.parametrize("name", CASES)
def test_naflexvit(name):
    model = naflex(name)
    stock, names, classes = run(model), list(model.state_dict()), [type(m) for m in model.modules()]
    adapt_rotary(model)
    found = run(model)
    same(found, stock)
    same(run(copy.deepcopy(model)), found, 0)
    assert list(model.state_dict()) == names
    same(run(restore_rotary(model)), stock, 0)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("name", ["axial", "dinov3"])
def test_dropped_patches(name):
    model = naflex(name, patch_drop_rate=0.3).train()
    stock = run(model)
    same(run(adapt_rotary(model)), stock)


def test_dropped_patches_of_mixed_frequencies():
    """This only tests images, because timm drops patches in a different shape if sizes differ."""
    model, images = naflex("mixed", patch_drop_rate=0.3).train(), torch.randn(2, 3, 24, 32)

    def call(model):
        torch.manual_seed(0)
        return trial.differentiate(model, [model(images)])

    stock = call(model)
    same(call(adapt_rotary(model)), stock)


def test_positions_matter():
    """If patches are moved, the results that the other tests compare change."""
    model, given = adapt_rotary(naflex()), tiny.patches(48)
    expected = model(given)
    moved = {**given, "patch_coord": given["patch_coord"].flip(-1)}
    assert (model(moved) - expected).abs().max() > 100 * BOUND


def gemma4(**kwargs):
    shape = {"depth": 2, "num_heads": 4, "embed_dim": 64, "head_dim": 16, "patch_size": 4, "intermediate_size": 64}
    options = {**shape, "img_size": 24, "position_embedding_size": 64, "num_kv_heads": 2, **kwargs}
    return tiny.build("gemma4_vit_167m_enc", options)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gemma4(scale):
    """Images and padded patches work, and manually changed frequencies take effect."""
    model, given = gemma4(global_pool=""), tiny.patches(48)
    model.rotary_emb.inv_freq.mul_(scale)
    images = torch.rand(2, 3, 24, 36)

    def call(model):
        return trial.differentiate(model, [model(images), model(given)])

    stock = call(model)
    adapt_rotary(model)
    same(call(model), stock)
    same(call(copy.deepcopy(model)), call(model), 0)
    same(call(restore_rotary(model)), stock, 0)


def test_a_fork_of_gemma4s_attention():
    model = gemma4()
    for block in model.blocks:
        block.attn.__class__ = type("Mine", (type(block.attn),), {})
    x = torch.rand(1, 3, 24, 24)
    expected = model(x)
    torch.testing.assert_close(adapt_rotary(model)(x), expected, rtol=0, atol=BOUND)


def test_gemma4_without_fused_attention():
    model = gemma4(global_pool="avg")
    for block in model.blocks:
        block.attn.fused_attn = False

    def call(model):
        return trial.differentiate(model, [model(torch.linspace(0, 1, 2 * 3 * 24**2).reshape(2, 3, 24, 24))])

    stock = call(model)
    same(call(adapt_rotary(model)), stock)
