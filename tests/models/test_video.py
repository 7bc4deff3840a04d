"""The video transformer (models/video.py): positions, sizes, token dropping, factorised attention, compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

timm = pytest.importorskip("timm")

from lrpe_md.models.video import LrpeVideoTransformer, inflate  # noqa: E402
from timm.layers import RmsNorm, SwiGLU  # noqa: E402
from timm.models.vision_transformer import ParallelThingsBlock  # noqa: E402

from lrpe_md import Coordinates, preset  # noqa: E402
from lrpe_md.integrations import set_places  # noqa: E402
from lrpe_md.integrations.attention import Context  # noqa: E402
from lrpe_md.integrations.encoding import EncodingStack  # noqa: E402
from lrpe_md.integrations.timm import LrpeAttention, LrpeVisionTransformer, adapt  # noqa: E402
from lrpe_md.positions import relative_times  # noqa: E402

TINY = {
    "img_size": 8, "patch_size": 4, "num_frames": 4, "tubelet_size": 1, "embed_dim": 96, "depth": 2, "num_heads": 2,
    "mlp_ratio": 1.0, "num_classes": 5,
}  # fmt: skip
IMAGE = {"absolute": "learned", **{key: TINY[key] for key in TINY.keys() - {"num_frames", "tubelet_size"}}}
ENCODINGS = {
    "none": {},
    "cosine": {"encoding": "cosine", "encoding_kwargs": {"act": "silu"}},
    "rotate": {"encoding": "rotate"},
    "rotate-split": {"encoding": "rotate", "encoding_kwargs": {"split": (2, 3, 3), "base": 100.0}},
    "cosine-split": {"encoding": "cosine", "encoding_kwargs": {"split": (2, 1, 1), "learnable": True}},
    "mixed": {"encoding": "mixed"},
    "wan": {"encoding": "wan"},
    "mochi": {"encoding": "mochi"},
    "learned": {"absolute": "learned"},
    "sincos": {"absolute": "sincos"},
}
WITH_TIME = [name for name in ENCODINGS if name != "none"]
ATTENTIONS = {
    "joint": {},
    "factorised": {"space_time": "factorised"},
    "linear": {"attention": "linear"},
    "factorised-linear": {"space_time": "factorised", "attention": "linear"},
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def build(**kwargs) -> LrpeVideoTransformer:
    """Build a model with weights large enough that attention is far from uniform (timm starts at 0.02)."""
    kwargs["encoding"] = "none" if kwargs.get("encoding") is None else kwargs["encoding"]
    model = timm.create_model("lrpe_video_tiny_patch16_224", **{**TINY, **kwargs}).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.startswith("encoding"):
                p.add_(torch.randn_like(p), alpha=0.2)
    return model


def video(frames=4, height=8, width=8, batch=2):
    return torch.randn(batch, 3, frames, height, width)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_only_temporal_encoding_distinguishes_frame_order(name, attention):
    kwargs = {**ENCODINGS[name], **ATTENTIONS[attention], "reg_tokens": 1}
    if attention != "joint" and name == "cosine":
        kwargs["encoding_kwargs"] = {"act": "relu"}
    model, x = build(**kwargs), video()
    there, back = model(x), model(x.flip(2))
    if name == "none":
        return close(there, back)
    assert (there - back).abs().max() > 1e-3
    model.temporal = False
    there = model(x)
    close(there, model(x.flip(2)))
    assert (there - model(x.flip(3))).abs().max() > 1e-3  # spatial order still matters


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_cosine_without_a_phase_is_blind_to_direction(attention):
    """q·k is even in the distance on each axis. A key phase, a rotation or an unrotated token reveals the direction."""
    pooled = {**ATTENTIONS[attention], "class_token": False, "global_pool": "avg"}
    kwargs, x = {"act": "relu", "base": 10.0}, video()
    model = build(encoding="cosine", encoding_kwargs=kwargs, **pooled)
    mirrored = [x.flip(2), *(x.unflatten(axis, (-1, 4)).flip(axis).flatten(axis, axis + 1) for axis in (3, 4))]
    for y in mirrored:  # mirrored by patches
        close(model(x), model(y))
    turned = build(encoding="cosine", encoding_kwargs={**kwargs, "phase": "k"}, **pooled)
    for layer in turned.encoding:
        layer.phase.uniform_(-1, 1)
    others = [turned, build(encoding="rotate", encoding_kwargs={"base": 10.0}, **pooled)]
    others.append(build(encoding="cosine", encoding_kwargs=kwargs, **{**pooled, "reg_tokens": 1}))
    for other in others:
        assert all((other(x) - other(y)).abs().max() > 1e-3 for y in mirrored)


@torch.no_grad()
def test_frame_order_within_a_tubelet_needs_no_encoding():
    model, x = build(tubelet_size=2, temporal=False, **ENCODINGS["rotate"]), video()
    assert (model(x) - model(x.flip(2))).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["none", "rotate-split", "mochi", "learned", "sincos"])
def test_any_number_of_frames_and_size(name, attention):
    model = build(**ENCODINGS[name], **ATTENTIONS[attention], tubelet_size=2)
    for size in ((2, 8, 8), (6, 12, 4), (4, 8, 16)):
        tokens = 1 + size[0] // 2 * size[1] // 4 * size[2] // 4
        features = model.forward_features(video(*size, batch=1))
        assert features.shape == (1, tokens, 96)
        assert features.isfinite().all()
        batch = video(*size)
        close(model(batch)[:1], model(batch[:1]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["cosine", "rotate", "mixed", "wan", "sincos"])
def test_reference_lays_positions_over_another_grid(name):
    model, x = build(**ENCODINGS[name], img_size=16), video(4, 16, 16)
    expected = model(x)
    model.reference = model.patch_embed.grid_size
    close(model(x), expected)
    # The grid is twice as fine, and each token occurs twice. If positions agree, so do the means over the copies.
    model.reference = (4, None, None)
    table = model.positions((8, 4, 4)).coordinates()[1:].unflatten(0, (8, 4, 4))
    torch.testing.assert_close(table[:, 0, 0, 0], torch.arange(8).double() / 2)
    assert table[0, :, 0, 1].tolist() == [0, 1, 2, 3]
    long = video(8, 16, 16)
    rescaled = model(long)
    model.reference = None
    assert (model(long) - rescaled).abs().max() > 1e-3


def test_presets_bring_frequencies_and_positions():
    for name in ("wan", "mochi", "cosmos"):
        model, scheme = build(encoding=name), preset(name, 48, 2)
        assert torch.equal(model.encoding.get_omega().detach().float(), scheme.omega.float())
        assert model.encoding.get_omega().requires_grad == scheme.scheme.learned
        assert model.encoding.pairs == scheme.scheme.pairs
        grid = model.positions((4, 6, 8))
        assert grid.prefix == 1
        torch.testing.assert_close(grid.coordinates()[1:], scheme.positions((4, 6, 8)).coordinates())
    model.temporal = False
    assert model.positions((4, 6, 8)).coordinates()[:, 0].abs().max() == 0


def test_split_gives_each_axis_its_share():
    omega = build(**ENCODINGS["rotate-split"]).encoding.get_omega()
    assert (omega != 0).sum((0, 1)).tolist() == [6, 9, 9]
    assert omega[0, :, 2].nonzero().max() < 9  # minor_first: W has the first block
    kwargs = {"split": (2, 3, 3), "axis_order": "major_first"}
    omega = build(encoding="cosine", encoding_kwargs=kwargs).encoding.get_omega()
    assert omega[0, :12, 0].count_nonzero() == 12


def test_reference_is_checked():
    with pytest.raises(ValueError, match="reference: expected a positive size"):
        build().reference = (4, 4)


@torch.no_grad()
@pytest.mark.parametrize("unit", ["token", "tube"])
@pytest.mark.parametrize("name", ["cosine", "rotate", "mixed", "wan", "sincos", "learned"])
def test_kept_tokens_keep_their_positions(name, unit):
    """The result is the same as if the dropped tokens were masked as keys."""
    model, x = build(**ENCODINGS[name], drop_unit=unit, reg_tokens=1), video(4, 8, 12)
    keep = torch.tensor([[0, 4, 5], [1, 2, 3]])
    tokens = keep if unit == "token" else (keep[:, None] + 6 * torch.arange(4)[:, None]).flatten(1)
    rows = torch.cat([torch.arange(2).expand(2, -1), tokens + 2], dim=1)
    mask = torch.zeros(2, 1, 1, 26, dtype=torch.bool).scatter_(3, rows[:, None, None], True)
    expected = model.forward_features(x, attn_mask=mask).gather(1, rows[..., None].expand(-1, -1, 96))
    close(model.forward_features(x, keep=keep), expected)
    close(model.forward_features(x[:1], keep=keep[0]), expected[:1])


def space_then_time(model, x):
    """Compute factorised attention by definition, without a prefix.

    Block 0 attends within each frame, and block 1 within each place.
    """
    (t, h, w), tokens = model.patch_embed.dynamic_feat_size(x.shape[2:]), model.patch_embed(x)
    grid = model.positions((t, h, w)).explicit()
    index = torch.arange(t * h * w).unflatten(0, (t, h * w))
    for block, groups in zip(model.blocks, (index, index.T), strict=True):
        out = torch.empty_like(tokens)
        for group in groups:  # positions keep all three coordinates
            context = Context(model.encoding, grid.take(group), None)
            out[:, group] = block(tokens[:, group], attn_mask=context)
        tokens = out
    return model.norm(tokens)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("name", ["none", "cosine", "rotate", "rotate-split", "wan"])
def test_factorised_attention_matches_its_definition(name, attention):
    kwargs = {**ENCODINGS[name], "attention": attention}
    if attention == "linear" and name == "cosine":
        kwargs["encoding_kwargs"] = {"act": "relu"}
    model = build(**kwargs, space_time="factorised", class_token=False, global_pool="avg")
    x = video(3, 8, 12)
    close(model.forward_features(x), space_then_time(model, x))
    kept = torch.tensor([0, 2, 5])
    model.drop_unit = "tube"
    assert model.forward_features(x, keep=kept).shape == (2, 9, 96)


@torch.no_grad()
def test_factorised_keeps_tubes_and_averages_the_prefix():
    model, x = (
        build(encoding="rotate", space_time="factorised", drop_unit="tube", reg_tokens=1, depth=1),
        video(3, 8, 12),
    )
    # With only block 0, frames do not mix except in the prefix.
    frames = torch.stack([model.forward_features(x[:, :, t : t + 1]) for t in range(3)], dim=1)
    whole = model.forward_features(x)
    close(whole[:, 2:], frames[:, :, 2:].flatten(1, 2))
    # the mean is taken before the last norm
    norm, model.norm = model.norm, nn.Identity()
    frames = torch.stack([model.forward_features(x[:, :, t : t + 1]) for t in range(3)], dim=1)
    close(whole[:, :2], norm(frames[:, :, :2].mean(1)))
    model.norm = norm
    keep = torch.tensor([[0, 2], [3, 5]])
    one = model.forward_features(x[:1], keep=keep[0])
    close(model.forward_features(x, keep=keep)[:1], one)
    all_places = torch.arange(6)
    close(model.forward_features(x, keep=all_places), whole)


def test_dropping_in_training():
    for kwargs, tokens in (({}, 8), ({"drop_unit": "tube"}, 8), ({"drop_unit": "tube", "space_time": "factorised"}, 8)):
        model = build(encoding="mixed", patch_drop_rate=0.5, **kwargs).train()
        features = model.forward_features(video())
        assert features.shape == (2, 1 + tokens, 96)
        features.sum().backward()
        assert all(p.grad is not None for p in model.encoding.parameters())
        assert model.eval().forward_features(video()).shape == (2, 17, 96)
    with pytest.raises(ValueError, match="drop_unit: 'token'"):
        build(patch_drop_rate=0.5, space_time="factorised")
    with pytest.raises(ValueError, match=r"^space_time='factorised': expected an encoding with positions on a grid"):
        build(encoding="videorope", space_time="factorised")
    with pytest.raises(ValueError, match="keep: dropping single tokens"):
        build(space_time="factorised").forward_features(video(), keep=torch.tensor([0, 1]))


def test_state_dict_equals_that_without_encoding():
    plain = build().state_dict()
    for name in ("cosine", "rotate", "rotate-split", "wan", "sincos"):
        for attention in ATTENTIONS.values():
            kwargs = {**ENCODINGS[name], **attention}
            if attention.get("attention") == "linear" and name == "cosine":
                kwargs["encoding_kwargs"] = {"act": "relu"}
            model = build(**kwargs, temporal=False)
            assert model.load_state_dict(plain).missing_keys == []
    model = build(encoding="mixed")
    keys = model.load_state_dict(plain, strict=False)
    assert keys.missing_keys == ["encoding.0.omega", "encoding.1.omega"]
    assert model.load_state_dict(inflate(plain, model)).missing_keys == []
    assert {"encoding.0.omega", "cls_token"} <= model.no_weight_decay()


def test_timm_interface():
    model = build(encoding="rotate", depth=4)
    assert (model.num_classes, model.num_features, model.num_prefix_tokens) == (5, 96, 1)
    assert all(isinstance(block.attn, LrpeAttention) for block in model.blocks)
    x = video()
    model.reset_classifier(3, "avg")
    assert model(x).shape == (2, 3)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 96)
    last, maps = model.forward_intermediates(x, indices=2)
    assert [m.shape for m in maps] == [(2, 96, 4, 2, 2)] * 2
    close(maps[-1].flatten(2).mT, model.forward_intermediates(x, indices=1, output_fmt="NLC")[1][0])
    close(model.norm(torch.cat([last[:, :1], last[:, 1:]], dim=1)), model.norm(last))
    expected = model.forward_features(x)
    model.set_grad_checkpointing()
    close(model.train().forward_features(x), expected)
    adapt(model, "cosine")
    assert model.encoding.num_axes == 3


OPTIONS_OF_TIMM = {
    "swiglu": {"mlp_layer": SwiGLU, "mlp_ratio": 2.0},
    "registers": {"reg_tokens": 3, "qk_norm": True, "norm_layer": RmsNorm},
    "parallel": {"block_fn": ParallelThingsBlock},
}


@pytest.mark.parametrize("name", OPTIONS_OF_TIMM)
def test_blocks_of_timm(name):
    """Blocks use positions, and checkpointing gives the same gradients."""
    model, x, grads = build(encoding="wan", **OPTIONS_OF_TIMM[name]), video(), []
    y = model(x)
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model.train()(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        assert all(grad is not None for grad in grads[-1])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    model.reference = (2, 2, 2)
    assert (model.eval()(x) - y).abs().max() > 1e-4


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_sizes(size):
    """The blocks have as many parameters as the blocks of timm's image model of this size."""
    with torch.device("meta"):
        ours = timm.create_model(f"lrpe_video_{size}_patch16_224")
        theirs = timm.create_model(f"vit_{size}_patch16_224")
    assert sum(p.numel() for p in ours.blocks.parameters()) == sum(p.numel() for p in theirs.blocks.parameters())


@torch.no_grad()
def test_set_input_size_resamples_the_learned_table():
    model, x = build(absolute="learned", reg_tokens=1), video(6, 12, 8)
    expected = model(x)
    model.set_input_size((6, 12, 8))
    assert model.pos_embed.shape == (1, 2 + 6 * 3 * 2, 96)
    close(model(x), expected)


@torch.no_grad()
def test_image_weights_on_a_still_video():
    pooled = {"class_token": False, "global_pool": "avg"}  # with more tokens, the class token has less weight
    kwargs = {key: value for key, value in TINY.items() if key not in ("num_frames", "tubelet_size")}
    image = timm.create_model("vit_tiny_patch16_224", **kwargs, **pooled).eval()
    with torch.no_grad():
        for p in image.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    model = build(absolute="learned", tubelet_size=2, **pooled)
    model.load_state_dict(inflate(image.state_dict(), model))
    x = torch.randn(2, 3, 8, 8)
    close(model(x[:, :, None].repeat(1, 1, 4, 1, 1)), image(x))


@pytest.mark.parametrize(
    ("kwargs", "expected", "got"),
    [
        ({"embed_dim": 48, "depth": 3}, "a model with depth=2, embed_dim=96", "depth=3, embed_dim=48; create both"),
        ({"patch_size": 2}, r"a model with patch_size=\(4, 4\)", r"patch_size=\(2, 2\)"),
        ({"in_chans": 1}, "a model with in_chans=3", "in_chans=1"),
        ({"reg_tokens": 2}, "a model with reg_tokens=0", "reg_tokens=2; create both models with the same arguments"),
        ({"class_token": False, "global_pool": "avg"}, "a model with class_token=True", "class_token=False"),
        ({"mlp_ratio": 2.0}, r"blocks\.0\.mlp\.fc1\.weight of shape \(96, 96\)", r"\(192, 96\) after inflating"),
        (
            {"img_size": 16},
            r"pos_embed of shape \(1, 9, 96\)",
            r"\(1, 33, 96\) .* \(1, 17, 96\); use the same img_size",
        ),
    ],
)
def test_image_weights_of_other_sizes(kwargs, expected, got):
    image = LrpeVisionTransformer(**{**IMAGE, **kwargs})
    with pytest.raises(ValueError, match=rf"^state_dict: expected (weights of )?{expected}, got {got}"):
        inflate(image.state_dict(), build(absolute="learned", tubelet_size=2))


def test_invalid_weights():
    image, model = LrpeVisionTransformer(**IMAGE), build()
    with pytest.raises(
        TypeError, match=r"state_dict: expected a dict of weights, got LrpeVision.*; pass its state_dict"
    ):
        inflate(image, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="model: expected an LrpeVideoTransformer, got LrpeVisionTransformer"):
        inflate(image.state_dict(), image)
    with pytest.raises(ValueError, match=r"state_dict: expected the weights of a ViT, .* got \['model'\]; if one of"):
        inflate({"model": image.state_dict()}, model)


def test_frequencies_of_two_axes_are_refused_with_advice():
    image, model = LrpeVisionTransformer(**IMAGE, encoding="mixed"), build(encoding="mixed")
    weights = image.state_dict()
    with pytest.raises(ValueError, match=r"encoding\.0\.omega of shape .*; to keep the model's own freq"):
        inflate(weights, model)
    kept = {name: value for name, value in weights.items() if "encoding" not in name.split(".")}
    assert model.load_state_dict(inflate(kept, model)).missing_keys == []


@pytest.mark.parametrize(("image_classes", "classes"), [(7, 10), (0, 10), (7, 0), (10, 10)])
def test_model_keeps_its_head_if_the_classes_differ(image_classes, classes):
    image = LrpeVisionTransformer(**{**IMAGE, "num_classes": image_classes})
    model = build(absolute="learned", num_classes=classes)
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    model.load_state_dict(inflate(image.state_dict(), model))
    expected = image.head.state_dict() if image_classes == classes else before
    assert model.head.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.head.state_dict().items())
    assert torch.equal(model.state_dict()["norm.weight"], image.state_dict()["norm.weight"])


def test_table_of_another_image_size_is_resampled_first():
    image, model = LrpeVisionTransformer(**{**IMAGE, "img_size": 16}), build(absolute="learned")
    with pytest.raises(ValueError, match=r"resample the table of the other model with its set_input_size\(img_size\)$"):
        inflate(image.state_dict(), model)
    with pytest.raises(
        ValueError, match=r"use the same img_size, number of frames, class_token and no_embed_class, or"
    ):
        inflate(LrpeVisionTransformer(**IMAGE, no_embed_class=True).state_dict(), model)
    image.set_input_size((8, 8))
    assert model.load_state_dict(inflate(image.state_dict(), model)).missing_keys == []


def test_table_of_another_video_size_is_not_repeated():
    """A grid of 4×2×2 has as many places as a frame of 4×4."""
    source, model = build(absolute="learned"), build(absolute="learned", img_size=16, num_frames=2)
    with pytest.raises(
        ValueError, match=r"pos_embed of shape \(1, 33, 96\), got \(1, 17, 96\) after .* set_input_size"
    ):
        inflate(source.state_dict(), model)
    source.set_input_size((2, 16, 16))
    assert torch.equal(inflate(source.state_dict(), model)["pos_embed"], source.pos_embed)


@torch.no_grad()
def test_image_weights_for_a_model_that_averages_tokens():
    image, model = LrpeVisionTransformer(**IMAGE), build(global_pool="avg")
    torch.nn.init.normal_(image.norm.weight)
    assert not model.load_state_dict(inflate(image.state_dict(), model)).missing_keys
    assert torch.equal(model.fc_norm.weight, image.norm.weight)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("kwargs", "references"),
    [
        pytest.param(
            {"encoding": "wan", "absolute": "sincos", "space_time": "factorised"},
            (None, (4, None, 2)),
            marks=pytest.mark.slow,
        ),
        ({"encoding": "mixed", "absolute": "learned", "attention": "linear"}, (None,)),
    ],
)
def test_compiled_once_for_all_sizes(kwargs, references):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = build(depth=1, **kwargs), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for i, model.reference in enumerate(references):
        for size in ((6, 8, 12), (8, 16, 12), (10, 12, 20)):
            x = video(*size)
            close(compiled(x), model(x))
        assert counter.frame_count == 1 + i


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"space_time": "divided"}, "space_time: expected"),
        ({"drop_unit": "frame"}, "drop_unit: expected"),
        ({"patch_drop_rate": 1.0}, "patch_drop_rate: expected"),
        (
            {"num_frames": 8, "tubelet_size": 3},
            r"num_frames, img_size: expected multiples of tubelet_size and patch_size, \(3, .* other sizes",
        ),
        ({"encoding": "dinov3"}, "encoding: expected a preset with 3 axes, got 'dinov3' with 2"),
        ({"encoding": "flux2", "embed_dim": 64}, "encoding: expected a preset with 3 axes, got 'flux2' with 4"),
        ({"encoding": "rotate", "encoding_kwargs": {"remainder": 0}}, "remainder: expected None without split"),
        ({"encoding": "wann"}, r"encoding: unknown 'wann'; did you mean 'wan'\? Expected"),
        ({"encoding": "hunyuan_video"}, "head_dim: hunyuan_video doesn't support 48"),
        ({"encoding": "rotate", "encoding_kwargs": {"split": (5, 6, 6)}}, "num_channels: expected a multiple of 17"),
    ],
)
def test_invalid_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


def test_invalid_inputs():
    model = build(space_time="factorised")
    with pytest.raises(ValueError, match=r"x: expected shape \(B, 3, frames, height, width\), got \(2, 3, 8, 8\)$"):
        model(torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"got \(2, 4, 3, 8, 8\); if axis 2 has the channels, pass x\.movedim\(2, 1\)"):
        model(video().transpose(1, 2))
    assert model(video().transpose(1, 2).movedim(2, 1)).shape == (2, 5)
    for size in ((4, 9, 8), (0, 8, 8)):
        with pytest.raises(ValueError, match="multiples of"):
            model(video(*size))
    with pytest.raises(ValueError, match="attn_mask"):
        model(video(), attn_mask=torch.ones(17, 17, dtype=torch.bool))
    with pytest.raises(ValueError, match="keep: expected an integer tensor"):
        build().forward_features(video(), keep=torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["cosine", "rotate-split", "mixed", "wan", "learned", "sincos"])
def test_gpu_equals_the_reference(name, attention):
    kwargs = {**ENCODINGS[name], **ATTENTIONS[attention]}
    if attention != "joint" and name == "cosine":
        kwargs["encoding_kwargs"] = {"act": "relu"}
    model, x = build(**kwargs), video(6, 8, 12)
    expected = model(x)
    expected.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.cuda()
    out = model(x.cuda())
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-3)
    out.square().sum().backward()
    for name, p in model.named_parameters():
        scale = grads[name].abs().max().clamp_min(1e-3)
        torch.testing.assert_close(p.grad.cpu() / scale, grads[name] / scale, rtol=1e-2, atol=1e-2)


# --- causal frames ---------------------------------------------------------------------------------------------------

STREAMED = {
    "none": {"encoding_kwargs": {"act": "softplus"}},
    "rotate": {"encoding": "rotate", "encoding_kwargs": {"act": "softplus"}},
    "cosine-split": ENCODINGS["cosine-split"],
    "mixed, encoded": {"encoding": "mixed", "normalizer": "encoded"},
    "wan, norm": {"encoding": "wan", "normalizer": "none", "scale_attn_norm": True},
    "sincos": {"absolute": "sincos"},
    "registers": {"encoding": "rotate", "reg_tokens": 2},
    "no prefix": {"encoding": "rotate", "class_token": False},
    "parallel": {"encoding": "rotate", "block_fn": ParallelThingsBlock},
    "space interpolated": {"encoding": "rotate", "reference": (None, 5, 5)},
    "blind to time": {"absolute": "learned", "encoding": "rotate", "temporal": False, "reference": (7, 5, 5)},
}


def causal(name, **kwargs):
    kwargs = {**STREAMED[name], "attention": "linear", "causal": "frames", "global_pool": "avg", **kwargs}
    reference = kwargs.pop("reference", None)
    if kwargs["attention"] == "softmax":
        kwargs.pop("normalizer", None)
    model = build(**kwargs).double()
    model.reference = reference
    return model


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("name", STREAMED)
def test_frames_only_see_earlier_frames(name, attention):
    """The tokens of the first frames equal those of a video that ends there."""
    model, x = causal(name, attention=attention), video(5, 8, 12).double()
    tokens, prefix = model.forward_features(x), model.num_prefix_tokens
    assert tokens.shape[1] == prefix + 5 * 6
    for frames in (1, 3):
        torch.testing.assert_close(tokens[:, : prefix + frames * 6], model.forward_features(x[:, :, :frames]))
    changed = x.clone()
    changed[:, :, 2, :4, :4] += 1
    difference = (model.forward_features(changed) - tokens).abs().amax((0, 2))[prefix:].unflatten(0, (5, 6)).amax(1)
    assert (difference[:2] == 0).all()
    assert (difference[2:] > 1e-4).all()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("name", STREAMED)
def test_stream_equals_the_whole_video(name, attention):
    model, x = causal(name, attention=attention), video(5, 8, 12).double()
    whole = model.forward_features(x)
    for sizes in ((1,) * 5, (2, 3), (5,)):
        state, found = None, []
        for piece in x.split(sizes, 2):
            tokens, state = model.stream(piece, state)
            found.append(tokens)
        assert state.num_frames == 5
        assert len(state.layers) == (4 if name == "parallel" else 2)
        torch.testing.assert_close(torch.cat(found, 1), whole)
    if attention == "softmax":
        assert all(t.shape[2] == model.num_prefix_tokens + 5 * 6 for pair in state.layers for t in pair)
        return
    sums = [t for pair in state.layers for t in pair if t is not None]
    state = model.stream(x[:, :, :1])[1]
    assert [t.shape for t in sums] == [t.shape for pair in state.layers for t in pair if t is not None]


@pytest.mark.parametrize("change", [{}, {"attention": "softmax"}, {"attention": "softmax", "window": 2}], ids=str)
def test_a_stream_learns_through_its_state(change):
    model, x = causal("cosine-split", **change), video(3).double()
    model.set_grad_checkpointing()
    names, parameters = zip(*model.named_parameters(), strict=True)
    first, state = model.stream(x[:, :, :2])
    tokens = torch.cat([first, model.stream(x[:, :, 2:], state)[0]], 1)
    found = torch.autograd.grad(tokens.sin().sum(), parameters, allow_unused=True)
    expected = torch.autograd.grad(model.forward_features(x).sin().sum(), parameters, allow_unused=True)
    for name, a, b in zip(names, found, expected, strict=True):
        assert (a is None) == (b is None) == name.startswith(("head", "fc_norm")), name
        if a is not None:
            torch.testing.assert_close(a, b, msg=name)
    assert parameters[names.index("encoding.omega")].requires_grad
    assert found[names.index("encoding.omega")].abs().max() > 0


@pytest.mark.slow
@torch.no_grad()
def test_a_stream_compiles_once():
    torch._dynamo.reset()
    model, x = causal("registers", depth=1), video(6).double()
    counter = CompileCounter()
    stream = torch.compile(model.stream, backend=counter, fullgraph=True, dynamic=True)
    whole, found = model.forward_features(x), []
    tokens, state = model.stream(x[:, :, :1])
    for i in range(1, 6):
        tokens, state = stream(x[:, :, i : i + 1], state)
        found.append(tokens)
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 3 + 4 :])
    # a size of 1 is static, so there is a graph for one earlier frame, and one for any other number
    assert counter.frame_count <= 2, counter.frame_count


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_tubes_of_causal_frames_may_be_dropped(attention):
    model, x = causal("registers", attention=attention, drop_unit="tube", patch_drop_rate=0.5), video(3).double()
    keep = torch.tensor([0, 3])
    tokens = model.forward_features(x, keep=keep)
    assert tokens.shape[1] == 3 + 3 * 2
    torch.testing.assert_close(tokens[:, : 3 + 4], model.forward_features(x[:, :, :2], keep=keep))
    model.train()
    assert model(x).shape == (2, 5)


def test_errors_of_causal_frames():
    made = {"attention": "linear", "causal": "frames", "global_pool": "avg"}
    for message, change in {
        r"causal: expected 'frames' or None, got 'tokens'": {"causal": "tokens"},
        r"causal: 'frames' needs space_time='joint', got 'factorised'": {"space_time": "factorised"},
        r"window: expected None unless causal='frames' and a layer has attention='softmax', got 2": {"window": 2},
        r"window: expected at least 1 frame, or None, got 0": {"attention": "softmax", "window": 0},
        r"window: expected None with absolute='sincos'": {"attention": "softmax", "window": 2, "absolute": "sincos"},
        r"global_pool: expected 'avg' .* got 'token'": {"global_pool": "token"},
        r"drop_unit: 'token' drops different patches": {"patch_drop_rate": 0.5},
    }.items():
        with pytest.raises(ValueError, match=message):
            build(**{**made, **change})
    model, x = build(**made), video(2)
    with pytest.raises(ValueError, match="is_causal: expected False with block"):
        model.forward_features(x, is_causal=True)
    with pytest.raises(ValueError, match="keep: dropping single tokens"):
        model.forward_features(x, keep=torch.tensor([0, 1]))
    other = adapt(build(**made), "rotate", attention="softmax")
    other.window = 1
    with pytest.raises(
        ValueError, match=r"window: expected None unless .* got 1 with causal='frames', attention='linear'"
    ):
        adapt(other, "rotate", attention="linear")(x)
    softmax = build(**{**made, "attention": "softmax", "drop_unit": "tube"})
    _, state = softmax.stream(x)
    with pytest.raises(
        ValueError, match=r"state: expected keys and values of shape \(1, 2, 1 \+ a multiple of 4, 48\)"
    ):
        softmax.stream(x[:1], state)
    with pytest.raises(ValueError, match="attn_mask: expected None with causal='frames'"):
        softmax.forward_features(x, torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="is_causal: expected False with causal='frames'"):
        softmax.forward_features(x, is_causal=True)
    softmax.window = 1
    with pytest.raises(ValueError, match="window: expected None if tokens are dropped"):
        softmax.forward_features(x, keep=torch.tensor([0, 1]))
    for run in (LrpeVideoTransformer.check_stream, lambda model: model.stream(x)):
        with pytest.raises(ValueError, match="stream: expected a model with causal='frames', got causal=None"):
            run(build(attention="linear"))
        with pytest.raises(ValueError, match="stream: absolute='learned' is stretched over the whole video"):
            run(build(**made, absolute="learned"))
    with pytest.raises(ValueError, match=r"x: expected shape \(B, 3, frames, height, width\), got \(3, "):
        model.stream(x[0])
    model = build(**made, encoding="rotate")
    model.check_stream()
    _, state = model.stream(x)
    with pytest.raises(ValueError, match="state: expected"):
        model.stream(x[:1], state)
    for whole in (model, build(**{**made, "attention": "softmax"})):
        high, wide = x[..., :4], x[..., :4, :]  # the same number of patches
        _, state = whole.stream(high)
        for piece, before, message in (
            (wide, state, r"state: expected frames of \(1, 2\) tokens, as in x, got \(2, 1\)"),
            (
                high,
                replace(state, layers=state.layers[:-1]),
                "state: expected the state .* with 2 attention layers, got 1",
            ),
            (
                high,
                replace(state, layers=state.layers * 2),
                "state: expected the state .* with 2 attention layers, got 4",
            ),
            (high, state.layers, "state: expected the state that stream returned for the previous frames, got tuple"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                whole.stream(piece, before)
    model.reference = (4, 2, 2)
    for run in (model.check_stream, lambda: model.stream(x)):
        with pytest.raises(ValueError, match=r"stream: .* number of frames.*reference=\(4, 2, 2\)"):
            run()


def recompute(model, x, window, times=None):
    """Compute the tokens of each frame and of the prefix, frame by frame.

    Keys of all visible frames are re-encoded from cached features, at their positions in the window or at the times
    that ``times`` returns for their frame numbers.
    """
    size, prefix = model.patch_embed.dynamic_feat_size(x.shape[2:]), model.num_prefix_tokens
    tokens, _ = model._embed(x)
    places = size[1] * size[2]
    features = [tokens[:, :prefix], *tokens[:, prefix:].split(places, 1)]
    for i, block in enumerate(model.blocks):
        after = []
        for f, own in enumerate(features):
            first = max(1, f - window + 1)
            seen = features[:1] if f == 0 else [features[0], *features[first : f + 1]]
            normed = block.norm1(torch.cat(seen, 1))
            seen_tokens = normed.shape[1]
            attn = block.attn
            qkv = attn.qkv(normed).unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
            q, k, v = attn.q_norm(qkv[0]), attn.k_norm(qkv[1]), qkv[2]
            where = model.positions((len(seen) - 1, *size[1:]))
            if times is not None:
                axes = torch.tensor(times(len(seen) - 1)), torch.arange(size[1]), torch.arange(size[2])
                where = Coordinates(torch.cartesian_prod(*(axis.double() for axis in axes)), prefix)
            q, k = EncodingStack(model.encoding)[i](q, k, positions=where)
            weights = (q @ k.transpose(-2, -1) * attn.scale).softmax(-1)
            out = attn.proj(attn.norm((weights @ v)[:, :, seen_tokens - own.shape[1] :].transpose(1, 2).flatten(2)))
            own = own + block.ls1(out)
            after.append(own + block.ls2(block.mlp(block.norm2(own))))
        features = after
    return model.norm(torch.cat(features, 1))


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 3, 9])
@pytest.mark.parametrize("name", ["rotate", "cosine-split", "wan, norm", "registers", "no prefix"])
def test_moving_window_equals_recomputation(name, window):
    """If cached unrotated keys are encoded at their positions in the window, the result equals recomputation."""
    model, x = causal(name, attention="softmax", window=window), video(6, 8, 12).double()
    expected = recompute(model, x, window)
    torch.testing.assert_close(model.forward_features(x), expected)
    for sizes in ((1,) * 6, (3, 1, 2), (4, 2)):
        state, found = None, []
        for piece in x.split(sizes, 2):
            tokens, state = model.stream(piece, state)
            found.append(tokens)
            held = min(state.num_frames, window - 1)
            kept = [t for pair in state.layers for t in pair]
            assert all(t.untyped_storage().nbytes() == t.numel() * 8 for t in kept), (
                "a cached tensor keeps a larger one alive"
            )
            assert all(t.shape[2] == model.num_prefix_tokens + held * 6 for pair in state.layers for t in pair)
        torch.testing.assert_close(torch.cat(found, 1), expected)


@torch.no_grad()
def test_recomputation_detects_another_window():
    model, x = causal("registers", attention="softmax", window=2), video(4).double()
    model.window = 3
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.forward_features(x), recompute(model, x, 2))


@torch.no_grad()
def test_positions_of_a_stream_stay_in_the_window(monkeypatch):
    """Whatever the stream's length, positions are the same as in a video that is as long as the window."""
    model, x = causal("registers", attention="softmax", window=3), video(9).double()
    seen, forward = [], model.encoding.forward

    def listen(*xs, positions):
        seen.extend(positions if isinstance(positions, tuple) else (positions,))
        return forward(*xs, positions=positions)

    monkeypatch.setattr(model.encoding, "forward", listen)
    state = None
    for piece in x.split(1, 2):
        _, state = model.stream(piece, state)
    assert max(float(where.coordinates()[:, 0].max()) for where in seen) == 2
    model.window = None
    seen.clear()
    model.stream(x)
    assert max(float(where.coordinates()[:, 0].max()) for where in seen) == 8


@pytest.mark.slow
@torch.no_grad()
def test_a_stream_in_a_full_window_compiles_once():
    torch._dynamo.reset()
    model, x = causal("registers", attention="softmax", window=2), video(9).double()
    counter = CompileCounter()
    stream = torch.compile(model.stream, backend=counter, fullgraph=True)
    whole, found = model.forward_features(x), []
    tokens, state = model.stream(x[:, :, :2])
    counts = []
    for i in range(2, 9):
        tokens, state = stream(x[:, :, i : i + 1], state)
        found.append(tokens)
        counts.append(counter.frame_count)
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 3 + 8 :])
    assert counts[-1] == counts[1] <= 2  # one graph for the first number of frames, and one for any other number


@torch.no_grad()
@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("name", ["rotate", "cosine-split", "registers", "no prefix"])
def test_a_stream_beyond_its_horizon(name, horizon):
    """Frames beyond the horizon stay cached and share time 0 (eq. 3 of arXiv 2511.20649)."""
    model, x = causal(name, attention="softmax"), video(6, 8, 12).double()
    plain = model.forward_features(x)
    expected = recompute(model, x, 9, lambda frames: [max(j - max(frames - horizon, 0), 0) for j in range(frames)])
    state, found = None, []
    for seen, piece in enumerate(x.split(1, 2)):
        set_places(model, 0, relative_times(seen + 1, horizon))
        tokens, state = model.stream(piece, state)
        found.append(tokens)
    torch.testing.assert_close(torch.cat(found, 1), expected)
    assert (expected - plain).abs().max() > 1e-6
    set_places(model, 0, None)
    torch.testing.assert_close(model.forward_features(x), plain)


@torch.no_grad()
def test_a_cut_in_a_window():
    """The newest frame jumps ahead in time. Earlier frames keep their times (eq. 4)."""
    model, x = causal("registers", attention="softmax", window=3), video(5, 8, 12).double()
    expected = recompute(model, x, 3, lambda frames: [[0], [0, 1], [0, 1, 9]][frames - 1] if frames else [])
    set_places(model, 0, torch.tensor([0, 1, 9]))
    state, found = None, []
    for piece in x.split((2, 1, 2), 2):
        tokens, state = model.stream(piece, state)
        found.append(tokens)
    torch.testing.assert_close(torch.cat(found, 1), expected)
    torch.testing.assert_close(model.forward_features(x), expected)


@torch.no_grad()
def test_places_of_whole_videos():
    """Places also work in models that are not causal and with dropped tokens, but not with factorised axes."""
    model, x = build(encoding="rotate").double(), video(4).double()
    wanted = model.forward_features(x)
    set_places(model, 0, torch.arange(4) + 7)
    shifted = model.forward_features(x)
    set_places(model, 0, torch.arange(4) * 2)
    assert (model.forward_features(x) - wanted).abs().max() > 1e-6
    grid = model.positions((4, 2, 2))
    moved = grid.offset((7, 0, 0))
    model.positions = lambda *_: moved
    set_places(model, 0, None)
    torch.testing.assert_close(model.forward_features(x), shifted)
    apart = build(encoding="rotate", space_time="factorised")
    set_places(apart, 0, torch.arange(4))
    with pytest.raises(ValueError, match="places: expected None with space_time='factorised'"):
        apart(video(4))
    model = build(encoding="rotate").double()
    keep, places = torch.tensor([0, 5, 6, 13]), torch.tensor([0, 1, 8, 9])
    set_places(model, 0, places)
    found = model.forward_features(x, keep=keep)
    set_places(model, 0, None)
    model.positions = lambda *_: Coordinates(torch.cartesian_prod(places, torch.arange(2), torch.arange(2)).double(), 1)
    torch.testing.assert_close(found, model.forward_features(x, keep=keep))
