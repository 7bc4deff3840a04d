"""Schemes and presets as encodings of the backbones, including tables of positions."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("timm", minversion="1.0.29")

import timm
from lrpe_md.models.dit import DiT
from lrpe_md.models.lm import CausalLm, LmConfig
from lrpe_md.models.video import LrpeVideoTransformer

from lrpe_md import Axial, Grid, PresetMd, Scheme, Tokens, adapt, preset, register_scheme
from lrpe_md.integrations.timm import LrpeVisionTransformer
from lrpe_md.presets.registry import REGISTERED


def rounded(shape):
    """Return a table of positions whose centre differs from a grid's."""
    return Grid(shape).rescale(0.7).floor()


ON_IMAGES = Scheme("doc", 32, Axial((1, 1), 100.0), pairs="half", tokens=Tokens(0, "skip"))
ON_VIDEOS = Scheme("doc", 32, Axial((2, 3, 3), 100.0), tokens=Tokens(0, "skip"))
ON_TEXT = Scheme("doc", 32, Axial((1,), 100.0), pairs="half")
FORMS = {"scheme": lambda s: s, "preset": lambda s: preset(s, 32), "name": lambda s: "ours"}


@pytest.fixture(params=FORMS)
def form(request):
    """Return a way to pass a scheme as encoding, and the name under which it is registered."""

    def make(scheme):
        register_scheme("ours", scheme, overwrite=True)
        return FORMS[request.param](scheme)

    yield make
    REGISTERED.pop("ours", None)


def vit(**kwargs):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 3}
    return LrpeVisionTransformer(**{**sizes, **kwargs}).eval()


def video(**kwargs):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 3}
    return LrpeVideoTransformer(num_frames=4, **{**sizes, **kwargs}).eval()


def same_as(model, other, *inputs):
    other.load_state_dict(model.state_dict())
    for a, b in zip((model(*inputs),), (other(*inputs),), strict=True):
        torch.testing.assert_close(a, b)


def test_images(form):
    encoding = form(ON_IMAGES)
    model, x = vit(encoding=encoding), torch.randn(2, 3, 24, 40)
    assert model.encoding.preset.scheme is ON_IMAGES
    same_as(model, vit(encoding=PresetMd(ON_IMAGES, head_dim=32)), x)
    plain = vit(encoding="rotate")
    plain.load_state_dict(model.state_dict())
    assert (plain(x) - model(x)).abs().max() > 1e-5
    stock = timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=6, dynamic_img_size=True)
    assert adapt(stock, encoding).encoding.preset.head_dim == 32


def test_videos(form):
    model, x = video(encoding=form(ON_VIDEOS)), torch.randn(1, 3, 4, 24, 40)
    same_as(model, video(encoding=PresetMd(ON_VIDEOS, head_dim=32)), x)


@pytest.mark.parametrize("num_axes", [2, 3])
def test_diffusion(form, num_axes):
    scheme = {2: ON_IMAGES, 3: ON_VIDEOS}[num_axes]
    sizes = {"patch_size": 2, "in_chans": 3, "embed_dim": 64, "depth": 1, "num_heads": 2, "num_axes": num_axes}
    model = DiT(encoding=form(scheme), **sizes).eval()
    other = DiT(encoding=PresetMd(scheme, head_dim=32), **sizes).eval()
    for parameter in model.parameters():  # the untrained model is the identity
        torch.nn.init.normal_(parameter, std=0.2)
    x, t = torch.randn(2, 3, *[4] * (num_axes - 2), 6, 10), torch.rand(2)
    same_as(model, other, x, t)
    plain = DiT(encoding="rotate", **sizes).eval()
    plain.load_state_dict(model.state_dict())
    assert (plain(x, t) - model(x, t)).abs().max() > 1e-3


def test_text(form):
    sizes = {"dim": 64, "depth": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 64}
    model = CausalLm(LmConfig(encoding=form(ON_TEXT), **sizes)).eval()
    other = CausalLm(LmConfig(encoding="rotate", base=100.0, **sizes)).eval()
    tokens = torch.randint(256, (2, 9))
    same_as(model, other, tokens)
    assert model.encoding.distinct[0].preset.scheme is ON_TEXT


def test_text_by_published_schemes():
    sizes = {"dim": 64, "depth": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 64}
    tokens = torch.randint(256, (2, 9))
    pope = CausalLm(LmConfig(encoding="pope", **sizes))
    assert pope.encoding.distinct[0].act == "softplus"
    assert pope.encoding.distinct[0].phase is not None
    assert LmConfig(encoding="pope", **sizes).key_dim == 64
    same_as(CausalLm(LmConfig(encoding="rope_1d", **sizes)), CausalLm(LmConfig(**sizes)), tokens)
    learned = CausalLm(LmConfig(encoding="rope_1d", learnable=True, base=50.0, **sizes))
    assert learned.encoding.distinct[0].log_theta.requires_grad
    with pytest.raises(ValueError, match="encoding: expected a scheme with one axis, got one with 3"):
        LmConfig(encoding="wan", **sizes)


def test_linear_attention_takes_relu():
    for encoding in (ON_IMAGES, preset(ON_IMAGES, 32)):
        assert vit(encoding=encoding, attention="linear").encoding.act == "relu"


def test_presets_for_other_heads_are_refused():
    for made in (preset(ON_IMAGES, 16), preset("rope_vit_mixed", 32, num_heads=3)):
        with pytest.raises(
            ValueError, match=r"encoding: expected a preset for head_dim=32 and num_heads=2 or 1, got Pre"
        ):
            vit(encoding=made)
    with pytest.raises(
        ValueError, match=r"encoding_kwargs: expected no base, .* with a Preset, which is already built"
    ):
        vit(encoding=preset(ON_IMAGES, 32), encoding_kwargs={"base": 3.0})
    assert vit(encoding=ON_IMAGES, encoding_kwargs={"base": 3.0, "rotary_dim": 16}).encoding.rotary_dim == slice(0, 16)


def test_layers_start_from_the_presets_frequencies():
    made = preset("rope_vit_mixed", 32, num_heads=2, seed=7)
    first, second = vit(encoding=made).encoding
    assert torch.equal(first.omega, second.omega)
    assert first.omega is not second.omega
    assert torch.equal(first.get_omega(), made.omega.float())


# --- tables ----------------------------------------------------------------------------------------------------------

TABLE = replace(ON_IMAGES, grid=rounded)


def test_images_by_a_table():
    """After class and register tokens, tokens are in row-major order. Dropped patches also drop their positions."""
    model, x = vit(encoding=TABLE, reg_tokens=2), torch.randn(2, 3, 24, 40)
    placed = model._embed(x)[1]
    assert (placed.prefix, placed.num_tokens) == (3, 18)
    expected = rounded((3, 5)).coords
    assert torch.equal(placed.coords, expected)
    model.patch_drop = timm.layers.PatchDropout(0.5, num_prefix_tokens=3)
    torch.manual_seed(0)
    rows = model.train()._embed(x)[1].coords
    assert rows.shape == (2, 7, 2)
    assert all((row == expected).all(-1).any() for row in rows.flatten(0, 1))
    model(x).sum().backward()
    model.reference = (4, 4)
    with pytest.raises(ValueError, match=r"reference: .*positions come from a table"):
        model(x)


def test_published_tables_in_backbones():
    x = torch.randn(1, 3, 24, 40)
    assert vit(encoding="cogview4")(x).shape == (1, 3)
    frames = torch.randn(1, 3, 4, 24, 40)
    assert video(encoding="videorope", class_token=False, global_pool="avg", embed_dim=128)(frames).shape == (1, 3)
    for name in ("qwen2_vl_vision", "minimax_m3_vl"):
        with pytest.raises(ValueError, match=f"expected a preset whose tokens are in row-major order, got '{name}'"):
            (vit if name == "qwen2_vl_vision" else video)(encoding=name)


def test_videos_by_a_table():
    scheme = replace(ON_VIDEOS, grid=rounded)
    x = torch.randn(1, 3, 4, 24, 40)
    model = video(encoding=scheme, patch_drop_rate=0.5)
    assert model(x).shape == (1, 3)
    model.train()(x).sum().backward()
    with pytest.raises(ValueError, match="space_time='factorised': expected an encoding with positions on a grid"):
        video(encoding=scheme, space_time="factorised")(x)
    with pytest.raises(ValueError, match="stream: expected an encoding with positions on a grid"):
        video(encoding=scheme, attention="linear", causal="frames", class_token=False, global_pool="avg").stream(x)


@pytest.mark.slow
def test_a_table_compiles():
    torch.compiler.reset()
    model, x = vit(encoding=TABLE), torch.randn(2, 3, 24, 40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
