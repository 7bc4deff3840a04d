"""timm's ViT with an encoding. All of timm's features still work, and the encoding has an effect."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import replace

import pytest
import torch
from parametrizing import TORCH_VERSION, slow_except
from torch import nn

from lrpe_md import Coordinates, CosineMd, Grid, LinearAttention, PresetMd, RotateMd, Tokens, preset, rotate

timm = pytest.importorskip("timm")

import lrpe_md.models.vit  # noqa: E402, F401
from timm.layers import set_fused_attn  # noqa: E402
from timm.layers.attention import Attention  # noqa: E402
from timm.models.vision_transformer import DiffAttention, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock  # noqa: E402

from lrpe_md.integrations import timm as vit  # noqa: E402
from lrpe_md.integrations.attention import sdpa_backends, softmax_attention  # noqa: E402
from lrpe_md.integrations.encoding import Activation, EncodingStack  # noqa: E402
from lrpe_md.integrations.timm import LrpeAttention, LrpeVisionTransformer, adapt  # noqa: E402

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
ENCODINGS = ("cosine", "rotate", "mixed")


@pytest.fixture(autouse=True)
def _seeded():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def timm_vit(**kwargs):
    return randomize(timm.create_model("vit_tiny_patch16_224", **{**TINY, **kwargs})).eval()


def lrpe_vit(**kwargs):
    """Build a ViT, by default without an encoding."""
    kwargs["encoding"] = "none" if kwargs.get("encoding") is None else kwargs["encoding"]
    return randomize(timm.create_model("lrpe_vit_tiny_patch16_224", **{**TINY, **kwargs})).eval()


def randomize(model):
    """Make weights large enough that attention is far from uniform (timm starts at 0.02)."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.startswith("encoding"):
                p.add_(torch.randn_like(p), alpha=0.3)
    return model


def image(*size, batch=2):
    return torch.randn(batch, 3, *(size or (16, 16)))


def zeroed(encoding):
    """Set all frequencies to zero, which disables the encoding."""
    for module in encoding.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.detach().zero_()
    return encoding


def silent_encodings(head_dim=16):
    return {
        "none": None,
        "cosine": zeroed(CosineMd(head_dim, 2)),
        "rotate": zeroed(RotateMd(head_dim, 2)),
        "mixed": lambda d, h: zeroed(RotateMd(d, 2, frequencies="mixed", num_heads=h, learnable=True)),
    }


class GatedAttention(Attention):
    pass


def gate(model):
    """Enable timm's gate. VisionTransformer does not pass this argument on to Attention."""
    for block in model.blocks:
        old = block.attn
        block.attn = randomize(Attention(old.qkv.in_features, old.num_heads, qkv_bias=True, gated=True))
    return model.eval()


VARIANTS = {
    "plain": ({}, None),
    "registers": ({"reg_tokens": 3}, None),
    "no_embed_class": ({"reg_tokens": 2, "no_embed_class": True, "dynamic_img_size": True}, None),
    "no_class_token": ({"class_token": False, "global_pool": "avg"}, None),
    "qk_norm": ({"qk_norm": True, "scale_attn_norm": True}, None),
    "gated": ({}, gate),
    "res_post": ({"block_fn": ResPostBlock, "init_values": 1e-1}, None),
    "parallel": ({"block_fn": ParallelThingsBlock}, None),
    "map": ({"class_token": False, "global_pool": "map"}, None),
    "layer_scale": ({"init_values": 0.1, "pre_norm": True}, None),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapt_without_encoding_is_timm(variant):
    kwargs, change = VARIANTS[variant]
    model = timm_vit(**kwargs)
    model = model if change is None else change(model)
    x, expected = image(), None
    expected = model(x)
    features = model.forward_intermediates(x, norm=True)
    for name, encoding in silent_encodings().items():
        adapted = adapt(copy.deepcopy(model), encoding)
        assert isinstance(adapted, LrpeVisionTransformer)
        assert all(type(m) is LrpeAttention for m in adapted.modules() if isinstance(m, Attention)), name
        torch.testing.assert_close(adapted(x), expected, rtol=1e-5, atol=1e-5, msg=name)
        last, between = adapted.forward_intermediates(x, norm=True)
        torch.testing.assert_close(last, features[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(between, features[1], rtol=1e-5, atol=1e-5)
    # an encoding with frequencies gives a different result, so the comparison above is not vacuous
    assert (adapt(model, "cosine")(x) - expected).abs().max() > 1e-3


def test_adapt_full_size():
    model = timm.create_model("vit_tiny_patch16_224").eval()
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = model(x)
        for encoding in (None, zeroed(CosineMd(64, 2)), zeroed(RotateMd(64, 2))):
            torch.testing.assert_close(adapt(model, encoding)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("encoding", ["none", "cosine", "rotate"])
def test_masks(encoding, fused):
    set_fused_attn(fused)
    try:
        model = timm_vit()
    finally:
        set_fused_attn(True)
    x, n = image(), 17
    adapted = adapt(copy.deepcopy(model), silent_encodings()[encoding])
    live = adapt(copy.deepcopy(model), "rotate")
    keep = torch.rand(n, n) > 0.4
    keep.fill_diagonal_(True)
    bias = torch.randn(2, 2, n, n)
    for kwargs in ({"attn_mask": keep}, {"attn_mask": bias}, {"is_causal": True}, {}):
        torch.testing.assert_close(adapted(x, **kwargs), model(x, **kwargs), rtol=1e-5, atol=1e-5)
        if kwargs:
            assert (adapted(x, **kwargs) - adapted(x)).abs().max() > 1e-3
        for a, b in zip(
            adapted.forward_intermediates(x, intermediates_only=True, **kwargs),
            model.forward_intermediates(x, intermediates_only=True, **kwargs),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # is_causal has the same effect as a causal mask, even with an encoding
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    torch.testing.assert_close(live(x, is_causal=True), live(x, attn_mask=causal), rtol=1e-5, atol=1e-5)


def test_fused_and_explicit_attention_agree():
    model, x = lrpe_vit(encoding="cosine"), image()
    expected = model(x)
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_forward_intermediates_forms():
    model = timm_vit(reg_tokens=1)
    adapted, x = adapt(copy.deepcopy(model), None), image()
    for kwargs in (
        {"indices": [0], "stop_early": True, "intermediates_only": True},
        {"indices": 1, "return_prefix_tokens": True, "output_fmt": "NLC"},
        {"output_dict": True, "return_prefix_tokens": True, "norm": True},
        {"output_dict": True, "intermediates_only": True},
    ):
        ours, theirs = (m.forward_intermediates(x, **kwargs) for m in (adapted, model))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        adapted.get_intermediate_layers(x, 2, reshape=True), model.get_intermediate_layers(x, 2, reshape=True)
    )
    with pytest.raises(ValueError, match="output_fmt"):
        adapted.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_state_dict_round_trip(encoding):
    model = timm_vit(reg_tokens=1, qk_norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = adapt(model, encoding)
    state = adapted.state_dict()
    extra = {name for name in state if name not in before}
    expected = {f"encoding.{i}.omega" for i in range(2)} if encoding == "mixed" else set()
    assert extra == expected
    assert all(torch.equal(state[name], value) for name, value in before.items())
    fresh = timm_vit(reg_tokens=1, qk_norm=True)
    fresh.load_state_dict({name: value for name, value in state.items() if name not in extra}, strict=True)
    # and back into another lrpe-md model
    other = adapt(fresh, encoding, encoding_kwargs={"seed": 9} if encoding == "mixed" else None)
    x = image()
    if encoding == "mixed":
        assert not torch.equal(other(x), adapted(x))
    other.load_state_dict(state, strict=True)
    torch.testing.assert_close(other(x), adapted(x), rtol=0, atol=0)


def test_dropped_absolute_loads_into_timm_without_one():
    adapted = adapt(timm_vit(), "cosine", "drop")
    timm_vit(pos_embed="none").load_state_dict(adapted.state_dict(), strict=True)
    assert adapted.pos_embed is None


def test_learned_frequencies():
    model = lrpe_vit(encoding="mixed")
    names = {"encoding.0.omega", "encoding.1.omega"}
    assert names <= model.no_weight_decay()
    assert {"cls_token", "pos_embed"} <= model.no_weight_decay()
    omegas = [model.get_parameter(name) for name in sorted(names)]
    assert model.encoding[0].get_omega().shape == (2, 8, 2)
    assert not torch.equal(omegas[0], omegas[1])  # each layer has a separate seed
    model(image()).square().sum().backward()
    assert all(omega.grad is not None and omega.grad.abs().max() > 0 for omega in omegas)

    shared = lrpe_vit(encoding="cosine", encoding_kwargs={"learnable": True, "phase": True})
    assert {"encoding.1.log_theta", "encoding.1.phase"} <= shared.no_weight_decay()
    shared(image()).square().sum().backward()
    assert all(layer.get_phase().shape[0] == 2 for layer in shared.encoding)  # one per head and layer
    mixed = lrpe_vit(encoding="cosine", encoding_kwargs={"frequencies": "mixed", "phase": "k"})
    assert not torch.equal(mixed.encoding[0].omega, mixed.encoding[1].omega)
    assert all(layer.log_theta.grad.abs().max() > 0 for layer in shared.encoding)

    from timm.optim import create_optimizer_v2

    groups = create_optimizer_v2(model, opt="adamw", weight_decay=0.1).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    assert decayed
    assert not decayed & {id(omega) for omega in omegas}


def test_copied_v_frees_the_projection():
    """Check what attention saves for its backward pass.

    With v copied, it saves three tensors of size B·N·C, as without an encoding. Otherwise, it saves five.
    """
    batch, num_tokens, dim = 2, 17, 32
    unit = batch * num_tokens * dim * 4

    def saved_bytes(**kwargs) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        model = randomize(lrpe_vit(depth=1, **kwargs)).eval()
        attn, x = model.blocks[0].attn, torch.randn(batch, num_tokens, dim, requires_grad=True)
        storages = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        context = vit.Context(model.encoding, Grid((4, 4), prefix=1), None)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = attn(x, None if model.encoding is None else context)
        y.sum().backward()
        if model.encoding is not None:
            storages.pop(model.encoding.omega.data_ptr())
        return sum(storages.values()), x.grad

    plain, _ = saved_bytes()
    operator = {"encoding": "rotate", "encoding_kwargs": {"impl": "triton"}}
    five, expected = saved_bytes(**operator)
    three, grad = saved_bytes(**operator, copy_v=True)
    assert five - plain == 2 * unit
    assert three == plain
    torch.testing.assert_close(grad, expected)


def test_layer_groups():
    from timm.models import group_parameters

    groups = group_parameters(model := lrpe_vit(encoding="mixed"), model.group_matcher(), reverse=True)
    assert groups["encoding.1.omega"] == groups["blocks.1.attn.qkv.weight"] != groups["encoding.0.omega"]
    model = lrpe_vit(encoding="cosine", encoding_kwargs={"learnable": True})
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups["encoding.log_theta"] == groups["patch_embed.proj.weight"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kwargs", [{"encoding": "mixed"}, {"encoding": "cosine", "patch_drop_rate": 0.5}])
def test_checkpointing_gradients(kwargs, reentrant, monkeypatch):
    monkeypatch.setattr("timm.layers.config._USE_REENTRANT_CKPT", reentrant)
    model = lrpe_vit(**kwargs, dynamic_img_size=True).train()
    # After a forward pass at a different size, recomputation must still use the positions of its forward pass.
    x, other = image(16, 24), image(12, 8)
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)
        y = (
            model(x).square().sum()
            + model.forward_intermediates(x, intermediates_only=True, output_fmt="NLC")[-1].sum()
        )
        with torch.no_grad():
            model(other)
        y.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:  # reentrant checkpointing adds the gradients in a different order
        torch.testing.assert_close(
            grads[1][name], grads[0][name], rtol=0 if not reentrant else 1e-4, atol=0 if not reentrant else 1e-3
        )


def test_checkpointing_is_used_with_a_mask_too(monkeypatch):
    calls = []
    plain = vit.checkpoint
    monkeypatch.setattr(vit, "checkpoint", lambda *args: calls.append(1) or plain(*args))
    model = lrpe_vit(encoding="rotate").train()
    model.set_grad_checkpointing()
    model(image(), is_causal=True).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("prefix", [{"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
def test_patch_dropout_gathers_positions(prefix, monkeypatch):
    model = lrpe_vit(encoding="rotate", patch_drop_rate=0.6, **prefix).train()
    x = image(16, 24, batch=3)
    kept = []
    drop = vit.patch_dropout_forward

    def spy(*args):
        y, keep = drop(*args)
        kept.append(keep)
        return y, keep

    monkeypatch.setattr(vit, "patch_dropout_forward", spy)
    tokens, positions = model._embed(x)
    p = model.num_prefix_tokens
    assert isinstance(positions, Coordinates)
    assert positions.prefix == p
    keep = kept[0]
    assert positions.coords.shape == (3, keep.shape[1], 2)
    assert tokens.shape[1] == p + keep.shape[1] < p + 24
    h, w = keep // 6, keep % 6
    torch.testing.assert_close(positions.coords, torch.stack([h, w], -1).float(), rtol=0, atol=0)
    assert len({tuple(row.tolist()) for row in keep}) == 3  # each sample drops different patches

    # Masking the dropped tokens in the whole grid gives the same output tokens.
    y, context = tokens, vit.Context(model.encoding, positions, None)
    for block in model.blocks:
        y = block(y, context)
    model.eval()
    z, grid = model._embed(x)
    index = torch.cat([torch.arange(p).expand(3, p), keep + p], 1)
    mask = torch.zeros(3, 1, 1, p + 24, dtype=torch.bool).scatter(-1, index[:, None, None], True)
    context = vit.Context(model.encoding, grid, mask)
    for block in model.blocks:
        z = block(z, context)
    torch.testing.assert_close(y, z.gather(1, index[..., None].expand(-1, -1, 32)), rtol=1e-5, atol=1e-5)


def test_patch_dropout_drops_the_same_patches_as_timm():
    model = timm_vit(patch_drop_rate=0.5).train()
    adapted, x = adapt(copy.deepcopy(model), silent_encodings()["cosine"]), image()
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(adapted(x), expected, rtol=1e-5, atol=1e-5)
    assert adapted.eval()(x).shape == (2, 5)


@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
def test_encoding_distinguishes_permuted_patches(encoding):
    """A permutation only changes the mean of all tokens if there is an encoding."""
    model = lrpe_vit(encoding=encoding, class_token=False, global_pool="avg")
    x = image()
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(2, 3, 16, 4, 4)
    shuffled = (
        patches[:, :, torch.randperm(16)].reshape(2, 3, 4, 4, 4, 4).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 16, 16)
    )
    difference = (model(shuffled) - model(x)).abs().max()
    assert difference < 1e-4 if encoding is None else difference > 1e-2


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("encoding", ["cosine", "rotate", "mixed"])
def test_output_depends_on_relative_positions(encoding, attention):
    """Without prefix tokens, shifting the coordinates does not change the output. Other changes do."""
    model = lrpe_vit(encoding=encoding, class_token=False, global_pool="avg", attention=attention)
    tokens, grid = model._embed(image(16, 24))
    coords = grid.coordinates(dtype=torch.float32)

    def run(positions):
        y = tokens
        for i in range(2):
            y = model._block(i, y, positions, None, False)
        return y

    expected = run(grid)
    torch.testing.assert_close(run(Coordinates(coords)), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(Coordinates(coords + torch.tensor([3.0, 7.0]))), expected, rtol=1e-4, atol=1e-4)
    assert (run(Coordinates(coords.flip(-1))) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("absolute", ["none", "learned", "sincos"])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_any_resolution(absolute, attention):
    model = lrpe_vit(encoding="cosine", absolute=absolute, attention=attention, reg_tokens=1)
    for size in ((16, 16), (24, 12), (8, 32)):
        y = model(image(*size))
        assert y.shape == (2, 5)
        assert y.isfinite().all()
    features = model.forward_intermediates(image(24, 12), intermediates_only=True)
    assert features[0].shape == (2, 32, 6, 3)
    assert model.absolute == absolute
    assert (model.pos_embed is not None) == (absolute == "learned")


def test_learned_absolute_is_resampled_as_timm_does():
    model = timm_vit(dynamic_img_size=True)
    adapted, x = adapt(copy.deepcopy(model), zeroed(RotateMd(16, 2))), image(24, 12)
    torch.testing.assert_close(adapted(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [True, False])
def test_sincos_is_computed_for_the_grid(dynamic):
    model = lrpe_vit(absolute="sincos", img_size=(16, 24), reg_tokens=2, dynamic_img_size=dynamic)
    x = image(16, 24)
    plain = copy.deepcopy(model)
    plain.absolute = "none"
    table = (model._embed(x)[0] - plain._embed(x)[0])[0].detach()
    assert table[:3].abs().max() == 0  # prefix tokens have no position
    h, w = (t.flatten()[:, None] for t in torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij"))
    band = 10000.0 ** (-torch.arange(8) / 8)
    # timm's order: by axis, sin then cos of each band
    expected = {round(float(v), 4) for v in torch.cat([t * band for t in (h, w)], 1).sin()[9]}
    assert expected <= {round(float(v), 4) for v in table[3 + 9]}
    assert len(torch.unique(table[3:].mul(1e4).round(), dim=0)) == 24


def naive_linear(q, k, v, encoding, positions, normalizer, is_causal):
    q, k, v = q.double(), k.double(), v.double()
    act = torch.relu if encoding.act == "relu" else nn.functional.softplus
    q_hat, k_hat = encoding(q, k, positions=positions)
    weights = torch.einsum("bhnd,bhmd->bhnm", q_hat, k_hat)
    plain = torch.einsum("bhnd,bhmd->bhnm", act(q), act(k))
    if is_causal:
        keep = torch.ones(plain.shape[-2:]).tril().double()
        weights, plain = weights * keep, plain * keep
    out = torch.einsum("bhnm,bhmd->bhnd", weights, v)
    return out / plain.sum(-1, keepdim=True) if normalizer == "unrotated" else out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalizer", ["unrotated", "none"])
@pytest.mark.parametrize("cls", [CosineMd, RotateMd])
def test_linear_attention(cls, normalizer, is_causal):
    encoding, grid = cls(8, 2, act="softplus", base=10.0), Grid((3, 4), prefix=1)
    q, k, v = torch.randn(2, 13, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
    kwargs = {"encoding": encoding, "positions": grid, "normalizer": normalizer, "is_causal": is_causal}
    expected = naive_linear(q, k, v, **kwargs)
    attention = LinearAttention(encoding, normalizer=normalizer)
    kwargs = {"positions": grid, "is_causal": is_causal}
    out = attention(q, k, v, **kwargs)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention(q.double(), k.double(), v.double(), **kwargs), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(attention(q, k, v, **kwargs), out)
    # in 16 bits, only the encoded q and k are rounded, because sums are float32
    low = [t.bfloat16() for t in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*low, **kwargs)
    assert out.dtype == torch.bfloat16
    rounded = naive_linear(*low, encoding, normalizer=normalizer, **kwargs)
    assert (out.double() - rounded).norm() < 1e-2 * expected.norm()


def test_linear_attention_accumulates_in_float32():
    n = 4096
    q = k = torch.ones(1, 1, n, 4, dtype=torch.float16)
    v = torch.full((1, 1, n, 4), 5.0, dtype=torch.float16)
    out = LinearAttention(Activation("relu"))(q, k, v)  # Σ is 20,480 · 4, beyond the range of float16
    torch.testing.assert_close(out, v)


def test_linear_attention_with_tokens_zeroed_by_relu():
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    out = LinearAttention(Activation("relu"))(-q.abs(), k, v)
    assert (out == 0).all()


def test_linear_without_encoding_applies_the_act():
    model, x = lrpe_vit(attention="linear", encoding_kwargs={"act": "softplus"}, dynamic_img_size=True), image()
    assert model.encoding.act == "softplus"
    expected = model(x)
    silent = lrpe_vit(attention="linear", encoding="cosine", encoding_kwargs={"act": "softplus"})
    silent.load_state_dict(model.state_dict())
    zeroed(silent.encoding)
    torch.testing.assert_close(silent(x), expected, rtol=1e-5, atol=1e-5)
    assert lrpe_vit(attention="linear").encoding.act == "relu"
    assert lrpe_vit(attention="linear", encoding="rotate").encoding.act == "relu"


def test_act_without_encoding_in_softmax_attention():
    model, x = lrpe_vit(encoding_kwargs={"act": "silu"}), image()
    silent = lrpe_vit(encoding="rotate", encoding_kwargs={"act": "silu"})
    silent.load_state_dict(model.state_dict())
    zeroed(silent.encoding)
    torch.testing.assert_close(silent(x), model(x), rtol=1e-5, atol=1e-5)


def test_linear_is_causal():
    model, x = lrpe_vit(encoding="cosine", attention="linear"), image()
    tokens, grid = model._embed(x)
    y = model._block(0, tokens, grid, None, True)
    changed = tokens.clone()
    changed[:, 9:] += 1.0
    z = model._block(0, changed, grid, None, True)
    torch.testing.assert_close(z[:, :9], y[:, :9], rtol=1e-5, atol=1e-5)
    assert (z[:, 9:] - y[:, 9:]).abs().max() > 0.1


@pytest.mark.parametrize("encoding", [None, "rotate"])
@pytest.mark.parametrize("normalizer", ["encoded", "none"])
def test_linear_attention_without_an_activation(normalizer, encoding):
    """The features are q and k, and the sums are normalised by the resulting weights."""
    model = lrpe_vit(encoding=encoding, encoding_kwargs={"act": "none"}, attention="linear", normalizer=normalizer)
    tokens, grid = model._embed(image())
    attn = model.blocks[0].attn
    q, k, v = attn.qkv(tokens).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).double().unbind()
    if encoding is not None:
        q, k = model.encoding(q, k, positions=grid)
    weights = q @ k.mT
    if normalizer == "encoded":
        weights = weights / weights.sum(-1, keepdim=True)
    expected = attn.proj((weights @ v).float().transpose(1, 2).flatten(2))
    found = attn(tokens, vit.Context(model.encoding, grid))
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_linear_attention_of_normed_q_and_k_under_autocast():
    """Norms return float32 under autocast, while v has 16 bits."""

    class Wide(nn.Module):
        def forward(self, x):
            return x.float()

    model, x = lrpe_vit(encoding="rotate", attention="linear"), image()
    expected = model(x)
    for block in model.blocks:
        block.attn.q_norm = block.attn.k_norm = Wide()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


def test_linear_errors():
    with pytest.raises(ValueError, match=r"normalizer.*never negative.*'silu'"):
        lrpe_vit(encoding="cosine", encoding_kwargs={"act": "silu"}, attention="linear")
    with pytest.raises(ValueError, match=r"normalizer.*'none'"):
        adapt(timm_vit(), RotateMd(16, 2), attention="linear")
    with pytest.raises(ValueError, match=r"normalizer: expected one of \('unrotated', 'encoded', 'none'\), got 'mean'"):
        lrpe_vit(encoding="cosine", attention="linear", normalizer="mean")
    with pytest.raises(ValueError, match="attn_drop_rate"):
        lrpe_vit(encoding="cosine", attention="linear", attn_drop_rate=0.1)
    model = lrpe_vit(encoding="cosine", encoding_kwargs={"act": "silu"}, attention="linear", normalizer="none")
    assert model(image()).isfinite().all()
    with pytest.raises(ValueError, match=r"attn_mask: expected None with linear attention"):
        model(image(), attn_mask=torch.ones(17, 17, dtype=torch.bool))
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="normalizer"):
        LinearAttention(Activation())(q, q, q)
    for attention in ("softmax", "linear"):
        kwargs = {"act": "softmax", "dim": -2}
        model = lrpe_vit(encoding="rotate", encoding_kwargs=kwargs, attention=attention)
        with pytest.raises(ValueError, match=r"is_causal.*dim=-2"):
            model(image(), is_causal=True)


class Custom(nn.Module):
    """A custom encoding, which is called with q, k and positions, as documented."""

    def __init__(self, head_dim, num_heads):
        super().__init__()
        self.size = (head_dim, num_heads)

    def forward(self, q, k, *, positions):
        assert positions.num_tokens == q.shape[2]
        return q, -k


@pytest.mark.parametrize("name", ["lrpe_vit_tiny_patch16_224", "lrpe_video_tiny_patch16_224"])
def test_registered_models_have_positions_by_default(name):
    import lrpe_md.models.video  # noqa: F401

    assert all(
        type(timm.create_model(name, **TINY, **given).encoding) is RotateMd for given in ({}, {"encoding": None})
    )
    assert timm.create_model(name, **TINY, attention="linear").encoding.act == "relu"
    for absolute in ("learned", "sincos"):  # these provide positions
        size = {"embed_dim": 48} if absolute == "sincos" else {}
        assert timm.create_model(name, **{**TINY, **size}, absolute=absolute).encoding is None
        both = timm.create_model(name, **{**TINY, **size}, absolute=absolute, encoding="cosine")
        assert type(both.encoding) is CosineMd
    assert timm.create_model(name, **TINY, encoding="none").encoding is None
    patches = torch.randn(1, 16, 32)
    for given, same in (({}, False), ({"encoding": "none"}, True)):
        model = randomize(timm.create_model("lrpe_vit_tiny_patch16_224", **TINY, **given)).eval()
        logits = []
        for order in (torch.arange(16), torch.randperm(16)):
            model.patch_embed.forward = lambda x, order=order: patches[:, order]
            logits.append(model(image()))
        assert torch.allclose(*logits, atol=1e-5) == same


def test_a_wrapped_model_is_adapted_inside():
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    with pytest.raises(TypeError, match=r"got a DataParallel; adapt model\.module, or"):
        adapt(torch.nn.DataParallel(model), "rotate")
    with pytest.raises(TypeError, match=r"got an OptimizedModule; adapt model\._orig_mod, or adapt the model before"):
        adapt(torch.compile(model), "rotate")


def test_errors_of_adapt_name_what_was_mixed_up():
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    with pytest.raises(TypeError, match="got 'rotate'; pass the model first"):
        adapt("rotate", model)
    with pytest.raises(TypeError, match="got a ResNet, which has no attention"):
        adapt(timm.create_model("resnet18"), "rotate")
    for encoding, hint in (("rotate-mixed", "mixed"), ("lrpe", "cosine")):
        with pytest.raises(ValueError, match=rf"^encoding: unknown '{encoding}'; did you mean '{hint}'\? Expe"):
            adapt(model, encoding)
    with pytest.raises(TypeError, match=r"^encoding_kwargs: unknown 'theta'; did you mean 'base'\? Expected opt"):
        adapt(model, "rotate", encoding_kwargs={"theta": 100})
    for normalizer in ("none", "encoded"):
        message = rf"without linear attention, got '{normalizer}'; pass attention='linear', or leave out normalizer"
        with pytest.raises(ValueError, match=message):
            adapt(model, "rotate", normalizer=normalizer)
    for absolute, hint in (("none", "drop"), ("learned", "keep")):
        with pytest.raises(ValueError, match=rf"got '{absolute}'; pass '{hint}'"):
            adapt(model, "rotate", absolute)
        with pytest.raises(ValueError, match=rf"got '{hint}'; pass '{absolute}'"):
            lrpe_vit(absolute=hint)
    assert type(model) is timm.models.VisionTransformer  # unchanged


@pytest.mark.parametrize(
    ("encoding", "found"),
    [
        (RotateMd(16, num_axes=3), "a RotateMd with head_dim=16 and num_axes=3"),
        (CosineMd(8, 2), "a CosineMd with head_dim=8 and num_axes=2"),
        (lambda head_dim, num_heads: RotateMd(head_dim, 1), "a RotateMd with head_dim=16 and num_axes=1"),
        (PresetMd(preset("dinov3", 8)), "a PresetMd with head_dim=8 and num_axes=2"),
    ],
)
def test_adapt_rejects_a_module_of_other_sizes(encoding, found):
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    with pytest.raises(ValueError, match=f"a module with head_dim=16 and num_axes=2, like this model, got {found}"):
        adapt(model, encoding)
    assert type(model) is timm.models.VisionTransformer  # unchanged


@pytest.mark.parametrize("absolute", ["keep", "drop"])
def test_a_removed_class_token_must_not_be_counted(absolute):
    model = adapt(timm.create_model("vit_tiny_patch16_224", **TINY, global_pool="avg"), "rotate", absolute)
    model.cls_token = None
    with pytest.raises(ValueError, match=r"^model\.num_prefix_tokens: expected 0 with model\.cls_token=None"):
        model(image())
    model.num_prefix_tokens = 0
    if absolute == "drop":
        assert model(image()).isfinite().all()


def test_encoding_none_disables_the_encoding():
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    assert adapt(model, "none").encoding is None
    assert adapt(model, "none", encoding_kwargs={"act": "relu"}).encoding.act == "relu"


def test_custom_encodings():
    x, module = image(), CosineMd(16, 2, act="relu")
    assert lrpe_vit(encoding=module).encoding is module
    model = lrpe_vit(encoding=lambda d, h: RotateMd(d, 2, num_heads=h, learnable=True))
    assert [e.num_heads for e in model.encoding] == [2, 2]
    assert model.encoding[0] is not model.encoding[1]
    for cls in (Custom, CosineMd):
        assert len(lrpe_vit(encoding=cls).encoding) == 2
    assert lrpe_vit(encoding=Custom).encoding[1].size == (16, 2)
    assert lrpe_vit(encoding=CosineMd, encoding_kwargs={"act": "silu"}).encoding[1].act == "silu"
    plain = lrpe_vit()
    expected = plain(x)
    assert (adapt(plain, Custom)(x) - expected).abs().max() > 1e-3
    model = lrpe_vit(encoding="rotate", encoding_kwargs={"axis_order": "major_first", "base": 100.0})
    assert (model.encoding.axis_order, model.encoding.base) == ("major_first", 100.0)


@pytest.mark.filterwarnings("ignore:encoding")  # presets of videos
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("eva02", {}), ("dinov3", {"reg_tokens": 2}), ("rope_vit_axial", {}), ("rope_vit_mixed", {}), ("qwen2_vl", {}),
        ("mochi", {}), ("wan", {}), ("wan", {"class_token": False, "global_pool": "avg"}),
    ],
)  # fmt: skip
def test_presets(name, kwargs):
    """Pass a preset by name, with its positions. adapt is equivalent, and layers share it unless they learn."""
    kwargs = {"embed_dim": 64, **kwargs}  # head_dim 32
    model = lrpe_vit(encoding=name, **kwargs)
    layers = model.encoding if isinstance(model.encoding, nn.ModuleList) else [model.encoding] * 2
    assert isinstance(model.encoding, nn.ModuleList) == (name == "rope_vit_mixed")
    first, prefix = layers[0], model.num_prefix_tokens
    assert first.preset.name == name
    assert first.num_heads == 2

    class Call(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = [layer]

        def forward(self, q, k, *, positions):
            made = first.preset
            assert positions.num_tokens == q.shape[2]
            placed = replace(made.positions(positions.shape), prefix=prefix)
            return rotate(q, k, omega=self.layer[0].get_omega(), positions=placed, **made.options)

    x = image(16, 28)
    expected = copy.deepcopy(model)
    expected.encoding = nn.ModuleList(Call(layer) for layer in layers)
    torch.testing.assert_close(model(x), expected(x))
    plain = timm_vit(**kwargs, pos_embed="none", dynamic_img_size=True)
    plain.load_state_dict({key: t for key, t in model.state_dict().items() if not key.startswith("encoding")})
    torch.testing.assert_close(adapt(plain, name)(x), expected(x))
    assert {n for n, _ in model.named_parameters() if n.startswith("encoding")} == (
        {"encoding.0.omega", "encoding.1.omega"} if name == "rope_vit_mixed"
        else {"encoding.omega"} if name == "mochi" else set()
    )  # fmt: skip
    if name == "rope_vit_mixed":
        assert not torch.equal(layers[0].omega, layers[1].omega)
    model.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.encoding.parameters())


@pytest.mark.filterwarnings("ignore:encoding")
@pytest.mark.parametrize("name", ["eva02", "qwen2_vl"])
def test_presets_with_dropped_patches(name):
    """The remaining patches keep their scaled positions after a prefix that is not rotated."""
    model = lrpe_vit(encoding=name, embed_dim=64, patch_drop_rate=0.5)
    positions, seen = EncodingStack(model.encoding).lay_out((4, 7), Tokens(1)), []
    model.encoding.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs["positions"]), with_kwargs=True)
    torch.manual_seed(3)
    model.train()(image(16, 28))
    _, kept = vit.patch_dropout_forward(torch.zeros(2, 29, 1), 0.5, 1, model.patch_drop.ordered, True)
    table = positions.explicit().explicit().coords
    for dropped in seen:
        rows = dropped.explicit().coords
        assert rows.shape[1] == 15
        assert torch.equal(rows[:, 0], table[:1].expand(2, -1))
        assert all(row.tolist() in table[1:].tolist() for row in rows[:, 1:].flatten(0, 1))
        assert len({tuple(row) for row in rows[0, 1:].tolist()}) == 14
    assert kept.shape == (2, 14)


@pytest.mark.slow
def test_presets_compile_once_for_all_sizes():
    # 16 pairs, a number that also occurs as a number of rows
    model, graphs = lrpe_vit(encoding="eva02", embed_dim=64, depth=1), []
    torch.compiler.reset()
    compiled = torch.compile(
        model, fullgraph=True, dynamic=True, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1]
    )
    for size in ((16, 28), (20, 24), (36, 12)):
        x = image(*size)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("pope", {}, r"encoding: expected a preset for images.*'pope'.*pope expects a shape with 1 axis"),
        ("qwen2_vl_vision", {}, r"expected a preset whose tokens are in row-major order, got 'qwen2_vl_vision'"),
        ("flux1", {}, r"head_dim: flux1 doesn't support 16"),
        (
            "eva02",
            {"split": (1, 1, 1)},
            r"split: expected a share for each of eva02's 2 axes.*; pass 2 numbers, such as",
        ),
        ("eva02", {"split": 2}, r"split: expected a tuple of shares, such as \(1, 1\), got 2"),
        ("rotate", {"split": (2, 3, 3)}, r"split: .* 2 axes, got \(2, 3, 3\); pass 2 numbers, such as \(1, 1\)"),
        ("rotate", {"split": 2}, r"split: expected a tuple of shares, such as \(1, 1\), got 2"),
        ("eva02", {"seed": 1}, r"seed: expected None, because"),
        ("eva02", {"bas": 1}, r"bas"),
    ],
)
def test_unsuitable_presets(name, kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lrpe_vit(encoding=name, encoding_kwargs=kwargs)
    model = timm_vit()
    before = snapshot(model)
    with pytest.raises((ValueError, TypeError), match=message):
        adapt(model, name, encoding_kwargs=kwargs)
    assert {n: v[0] for n, v in snapshot(model).items()} == {n: v[0] for n, v in before.items()}


@pytest.mark.parametrize("build", [lrpe_vit, lambda encoding, **kwargs: adapt(timm_vit(**kwargs), encoding)])
def test_a_preset_with_more_axes_warns(build):
    """An image is a single frame. So temporal channels don't rotate, unless their frequencies also depend on space."""
    message = "expected a preset with 2 axes, like this model, got 'wan' with 3. 38% of its channels .*split"
    with pytest.warns(UserWarning, match=message):
        build(encoding="wan", embed_dim=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(encoding="mochi", embed_dim=64)
        lrpe_vit(encoding="wan", embed_dim=64, encoding_kwargs={"split": (0, 1, 1)})
    with pytest.raises(ValueError, match=r"expected a preset with 2 axes, .*got 'ltx2_cross' with 1. 100% of its"):
        build(encoding="ltx2_cross", embed_dim=64)


def test_preset_options():
    kwargs = {"act": "relu", "base": 10.0, "learnable": True, "split": (1, 3)}
    model = lrpe_vit(encoding="eva02", encoding_kwargs=kwargs)
    assert [type(e).__name__ for e in model.encoding] == ["PresetMd"] * 2
    assert [e.act for e in model.encoding] == ["relu"] * 2
    expected = preset("eva02", 16, 2, base=10.0, split=(1, 3)).omega
    torch.testing.assert_close(model.encoding[1].get_omega().detach(), expected.float(), rtol=1e-6, atol=0)
    linear = lrpe_vit(encoding="eva02", attention="linear")
    assert linear.encoding.act == "relu"
    assert linear(image()).isfinite().all()


@pytest.mark.parametrize("rate", ["attn_drop_rate", "proj_drop_rate", "drop_path_rate", "pos_drop_rate", "drop_rate"])
@pytest.mark.parametrize("fused", [True, False])
def test_dropout_only_runs_in_training(rate, fused):
    model, x = lrpe_vit(encoding="cosine", absolute="sincos", **{rate: 0.5}), image()
    for block in model.blocks:
        block.attn.fused_attn = fused
        block.mlp = nn.Identity()  # the MLP would drop at the same rate as the projection
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)
    model.train()
    assert not torch.equal(model(x), model(x))


def test_the_qkv_projection_is_not_copied():
    class Spy(RotateMd):
        def forward(self, *xs, positions):
            assert all(x._base is not None and x.stride(-2) == 3 * 32 for x in xs)
            assert xs[0].untyped_storage().data_ptr() == xs[1].untyped_storage().data_ptr()
            return super().forward(*xs, positions=positions)

    assert lrpe_vit(encoding=Spy(16, 2))(image()).isfinite().all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_casts_keep_frequencies(encoding):
    model = lrpe_vit(encoding=encoding)
    before = [t.clone() for t in (*model.encoding.parameters(), *model.encoding.buffers())]
    model = model.to(torch.bfloat16)
    after = [*model.encoding.parameters(), *model.encoding.buffers()]
    assert before
    for old, new in zip(before, after, strict=True):
        assert new.dtype == torch.float32
        assert torch.equal(old, new)
    y = model(image().bfloat16())
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


class Int8Linear(nn.Module):
    """Linear layer with an int8 weight and a scale, like those of bitsandbytes."""

    def __init__(self, linear):
        super().__init__()
        self.scale, self.bias = linear.weight.detach().abs().max() / 127, linear.bias
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.in_features = linear.in_features

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def quantise_to_int8(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
    return model


def quantise_dynamically(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")  # warnings of torch.ao
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("quantise", [quantise_dynamically, quantise_to_int8])
def test_a_quantised_vit(quantise, qk_norm):
    stock = quantise(timm_vit(qk_norm=qk_norm, norm_layer=nn.RMSNorm))  # its default eps depends on the dtype
    x = image()
    with torch.no_grad():
        expected = stock(x)
        for encoding in silent_encodings().values():
            torch.testing.assert_close(adapt(copy.deepcopy(stock), encoding)(x), expected, rtol=1e-5, atol=1e-5)
        assert (adapt(stock, "rotate")(x) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
def test_copies(encoding):
    model, x = lrpe_vit(encoding=encoding, absolute="sincos"), image()
    expected = model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected, rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), expected, rtol=0, atol=0)
    adapted = copy.deepcopy(adapt(timm_vit(), encoding))
    assert type(adapted) is LrpeVisionTransformer


@pytest.mark.parametrize("encoding", ["cosine", "mixed"])
def test_meta_device(encoding):
    with torch.device("meta"):
        model = timm.create_model("lrpe_vit_tiny_patch16_224", **TINY, encoding=encoding)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model = model.to_empty(device="cpu")
    model.init_weights(needs_reset=True)
    fresh = lrpe_vit(encoding=encoding)
    fresh.load_state_dict(model.state_dict())
    x = image()
    torch.testing.assert_close(model.eval()(x), fresh(x), rtol=0, atol=0)
    for a, b in zip(model.encoding.buffers(), fresh.encoding.buffers(), strict=True):
        assert torch.equal(a, b)


def test_timm_surface():
    model = lrpe_vit(encoding="mixed")
    model.reset_classifier(7)
    assert model(image()).shape == (2, 7)
    model.set_input_size(img_size=(24, 16), patch_size=(8, 8))
    assert model(image(24, 16)).shape == (2, 7)
    model.prune_intermediate_layers([0])
    assert len(model.encoding) == len(model.blocks) == 1
    assert model.forward_intermediates(image(24, 16), intermediates_only=True)[0].shape == (2, 32, 3, 2)
    features = timm.create_model(
        "lrpe_vit_tiny_patch16_224", **TINY, encoding="cosine", features_only=True, out_indices=[0, 1]
    )
    assert [f.shape[1:] for f in features(image())] == [(32, 4, 4), (32, 4, 4)]
    assert set(timm.list_models("lrpe_vit_*")) >= {
        f"lrpe_vit_{s}_patch16_224" for s in ("tiny", "small", "base", "large")
    }
    with torch.device("meta"):
        sizes = {
            s: sum(p.numel() for p in timm.create_model(f"lrpe_vit_{s}_patch16_224", encoding="cosine").parameters())
            for s in ("tiny", "small", "base", "large")
        }
        for s, n in sizes.items():
            other = timm.create_model(f"vit_{s}_patch16_224", pos_embed="none")
            assert n == sum(p.numel() for p in other.parameters())


@pytest.mark.parametrize("encoding", [None, "cosine", "mixed"])
@pytest.mark.parametrize("absolute", ["none", "learned"])
def test_checkpoints_of_timm_load(encoding, absolute, tmp_path):
    """Load pretrained=True from a file. Missing frequencies keep their values. The table is dropped or resampled."""
    source = timm_vit()
    torch.save(source.state_dict(), tmp_path / "vit.pth")
    kwargs = {**TINY, "encoding": encoding, "absolute": absolute, "img_size": 32}
    model = timm.create_model(
        "lrpe_vit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "vit.pth"), "num_classes": 5},
        **kwargs,
    )
    assert torch.equal(model.blocks[1].attn.qkv.weight, source.blocks[1].attn.qkv.weight)
    if absolute == "learned":
        assert model.pos_embed.shape == (1, 65, 32)
        assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    assert model(image(32, 32)).isfinite().all()


@pytest.mark.parametrize("encoding", ["none", "cosine", "mixed"])
@pytest.mark.parametrize("absolute", ["none", "learned"])
def test_checkpoint_path_takes_weights_of_timm(encoding, absolute, tmp_path):
    """timm loads such files strictly and without a filter."""
    source, kwargs = timm_vit(), {**TINY, "encoding": encoding, "absolute": absolute, "img_size": 32}
    torch.save(source.state_dict(), tmp_path / "vit.pth")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = timm.create_model("lrpe_vit_tiny_patch16_224", checkpoint_path=str(tmp_path / "vit.pth"), **kwargs)
    said = [str(w.message) for w in caught if "state_dict" in str(w.message)]
    assert len(said) == (absolute == "none") + (encoding == "mixed")
    assert ("dropped pos_embed" in said[0] if absolute == "none" else True) if said else True
    fresh = timm.create_model("lrpe_vit_tiny_patch16_224", **kwargs)
    for name, value in model.state_dict().items():
        if name.startswith("encoding."):
            assert torch.equal(value, fresh.state_dict()[name])
        elif name != "pos_embed":
            assert torch.equal(value, source.state_dict()[name])
    if absolute == "learned":
        assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
        assert model.pos_embed.shape == (1, 65, 32)


def test_strict_load_refuses_other_names():
    model, state = lrpe_vit(encoding="mixed"), lrpe_vit(encoding="mixed").state_dict()
    for gone in ("encoding.0.omega", "norm.weight"):
        with pytest.raises(RuntimeError, match=gone):
            model.load_state_dict({name: value for name, value in state.items() if name != gone})
    with pytest.raises(RuntimeError, match="other"):
        model.load_state_dict({**state, "other": torch.zeros(1)})


@pytest.mark.parametrize("size", slow_except(["tiny"], ["tiny", "small", "base", "large"]))
def test_pretrained_weights_equal_timms(size):
    ours, theirs = (timm.models.get_pretrained_cfg(f"{prefix}vit_{size}_patch16_224") for prefix in ("lrpe_", ""))
    for name in ("hf_hub_id", "mean", "std", "crop_pct", "num_classes", "tag"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.hf_hub_id.startswith(f"timm/vit_{size}_patch16_224.")
    assert not timm.create_model(f"lrpe_vit_{size}_patch16_224.untrained").pretrained_cfg.get("hf_hub_id")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("vit_small_resnet26d_224", (80, 72)), ("vitamin_small_224", (58, 64))])
def test_hybrid_embeddings_of_any_size(name, size):
    """Hybrid embeddings round up sizes that patches don't divide, and the adapted model must do the same."""
    model = timm.create_model(name, depth=1, num_classes=5, dynamic_img_size=True).eval()
    x = image(*size)
    expected = model(x)
    for encoding in silent_encodings(model.embed_dim // model.blocks[0].attn.num_heads).values():
        torch.testing.assert_close(adapt(copy.deepcopy(model), encoding)(x), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(adapt(model, "cosine")(x), expected)


def test_argument_errors():
    for kwargs, match in (
        ({"encoding": "rope"}, r"encoding: unknown 'rope'; did you mean 'rotate'\? Expected 'cosine'"),
        (
            {"encoding": "linear"},
            r"got 'linear'; pass an encoding such as 'rotate', and attention='linear' to adapt\(\)",
        ),
        ({"encoding": "learned"}, r"got 'learned'; .*, and absolute='learned' to the model itself"),
        ({"encoding": 3}, r"encoding: expected"),
        ({"encoding": lambda d, h: d}, r"encoding: expected a factory that returns an nn.Module, got a int"),
        ({"encoding": "cosine", "absolute": "yes"}, r"absolute: expected 'none', 'learned' or 'sincos', got 'yes'"),
        ({"encoding": "cosine", "attention": "flash"}, r"attention: expected 'softmax' or 'linear', got 'flash'"),
        (
            {"encoding": CosineMd(16, 2), "encoding_kwargs": {"act": "relu"}},
            r"encoding_kwargs: expected no options with a module",
        ),
        ({"encoding_kwargs": {"base": 10.0}}, r"encoding_kwargs: expected only act and dim"),
        ({"encoding_kwargs": {"act": "gelu"}}, r"act: expected one of"),
        ({"encoding_kwargs": {"act": "softmax"}}, r"dim: expected -1"),
        ({"encoding": "cosine", "encoding_kwargs": {"bas": 10.0}}, r"bas"),
        ({"encoding": "cosine", "pos_embed": "learn"}, r"pos_embed: expected absolute= instead"),
        ({"absolute": "sincos", "embed_dim": 30}, r"absolute: 'sincos' needs an embed_dim divisible by 4, got 30"),
        ({"encoding": "cosine", "block_fn": ParallelScalingBlock}, r"blocks\[0\] of type ParallelScalingBlock"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            timm.create_model("lrpe_vit_tiny_patch16_224", **{**TINY, "encoding": "none", **kwargs})


def test_reference_in_pixels():
    model = timm.create_model("lrpe_vit_tiny_patch16_224", depth=1)
    for pixels in ((224, 224), 224, (None, 384)):
        with pytest.raises(ValueError, match=r"sizes in patches, .* \(14, 14\), got .* by the patch size, \(16, 16\)"):
            model.reference = pixels
    assert model.reference is None
    for patches in ((14, 14), 100, (None, 64)):
        model.reference = patches


def snapshot(model):
    return {
        name: (type(m), dict(m.__dict__), dict(m._modules), dict(m._parameters)) for name, m in model.named_modules()
    }


@pytest.mark.parametrize(
    ("kwargs", "call", "match"),
    [
        ({"block_fn": ParallelScalingBlock}, {"encoding": "cosine"}, r"model: expected blocks of type Block"),
        ({"attn_layer": DiffAttention}, {"encoding": "cosine"}, r"DiffAttention"),
        ({"attn_layer": GatedAttention}, {"encoding": "cosine"}, r"GatedAttention"),
        ({}, {"encoding": "rope"}, r"encoding: unknown 'rope'"),
        ({}, {"encoding": "cosine", "absolute": "sincos"}, r"absolute: expected 'keep' or 'drop'"),
        ({}, {"encoding": "cosine", "absolute": "linear"}, r"got 'linear'; pass attention='linear'"),
        ({}, {"encoding": "cosine", "attention": "linear", "normalizer": "x"}, r"normalizer"),
        ({}, {"encoding": "cosine", "encoding_kwargs": {"act": "silu"}, "attention": "linear"}, r"normalizer"),
        ({"num_heads": 32}, {"encoding": "rotate"}, r"even"),
        ({"attn_drop_rate": 0.1}, {"encoding": "cosine", "attention": "linear"}, r"attn_drop_rate"),
    ],
)
def test_a_failed_adapt_changes_nothing(kwargs, call, match):
    model = timm_vit(**kwargs)
    before, names = snapshot(model), list(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=match):
        adapt(model, **call)
    after = snapshot(model)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name][0] is after[name][0]
        assert before[name][1].keys() == after[name][1].keys()
        assert before[name][2] == after[name][2]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    "name", ["deit_tiny_distilled_patch16_224", "vit_relpos_small_patch16_224", "resnet18", "eva02_tiny_patch14_224"]
)
def test_other_families_are_refused(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(TypeError, match=r"model: expected a timm VisionTransformer"):
        adapt(model, "cosine")


def test_adapt_twice():
    model, x = timm_vit(), image()
    expected = model(x)
    adapt(model, "mixed", attention="linear")
    assert (model(x) - expected).abs().max() > 1e-3
    adapt(model, None)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert not any(name.startswith("encoding") for name in model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {"encoding": "cosine"},
        pytest.param({"encoding": "mixed", "attention": "linear"}, marks=pytest.mark.slow),
        pytest.param({"encoding": "rotate", "absolute": "sincos"}, marks=pytest.mark.slow),
    ],
)
def test_one_graph_for_all_sizes(kwargs):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = lrpe_vit(**kwargs)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for size in ((16, 24), (24, 20), (32, 40)):
        x = image(*size)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(
    TORCH_VERSION < (2, 14),
    reason="torch before 2.14: gradients of bicubic resizing can't be traced with symbolic sizes",
)
def test_compile_training_of_a_resampled_table():
    torch._dynamo.reset()
    model = adapt(lrpe_vit(encoding=None, absolute="learned", depth=1), "rotate")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((16, 24), (24, 20), (24, 24)):
        x, grads = image(*size), []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            grads.append(model.pos_embed.grad.clone())
        torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_compile_training_with_checkpointing():
    torch._dynamo.reset()
    model = lrpe_vit(encoding="mixed", patch_drop_rate=0.5).train()
    x = image()
    grads = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        for enable in (False, True):
            model.set_grad_checkpointing(enable)
            model.zero_grad()
            torch.manual_seed(1)
            run(x).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kwargs",
    [{"encoding": "cosine"}, pytest.param({"encoding": "mixed", "absolute": "sincos"}, marks=pytest.mark.slow)],
)
def test_export(kwargs):
    model, x = lrpe_vit(**kwargs), image(16, 24)
    h, w = (4 * torch.export.Dim(name, min=2, max=64) for name in ("h", "w"))
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {2: h, 3: w}})
    for size in ((16, 24), (32, 20)):
        x = image(*size)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_attention_without_encoding_equals_timm():
    torch.manual_seed(1)
    ours, theirs = LrpeAttention(32, 2, qkv_bias=True), Attention(32, 2, qkv_bias=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    mask = torch.randn(9, 9)
    torch.testing.assert_close(ours(x, attn_mask=mask), theirs(x, attn_mask=mask), rtol=1e-5, atol=1e-5)


def test_attention_backends_by_gpu():
    """PyTorch chooses the backend on a CPU and for equal widths."""
    q, v = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 8)
    assert sdpa_backends(q, v) is None
    assert sdpa_backends(v, v) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_wide_attention_on_gpu(dtype, head_dim):
    q, k = torch.randn(2, 2, 4, 197, 2 * head_dim, device="cuda", dtype=dtype).unbind(0)
    v = torch.randn(2, 4, 197, head_dim, device="cuda", dtype=dtype)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    scale = head_dim**-0.5
    for mask in (None, torch.rand(197, 197, device="cuda") > 0.3):
        out = softmax_attention(*inputs, scale=scale, attn_mask=mask)
        expected = nn.functional.scaled_dot_product_attention(*wide, scale=scale, attn_mask=mask)
        grad = torch.randn_like(out)
        results = (out, *torch.autograd.grad(out, inputs, grad))
        references = (expected, *torch.autograd.grad(expected, wide, grad.double()))
        bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-3}[dtype]
        for a, b in zip(results, references, strict=True):
            assert (a.double() - b).norm() < bound * b.norm()


def extracted(by, model, x):
    """Return the first block's output, from the graph that timm or torchvision traces and from a hook."""
    found = []
    with model.blocks[0].register_forward_hook(lambda module, args, y: found.append(y)):
        model(x)
    library = "torchvision.models.feature_extraction" if by == "torchvision" else "timm.models"
    create = pytest.importorskip(library).create_feature_extractor
    graph = create(model, return_nodes={"blocks.0": "first", "head": "last"})
    return graph(x), {"first": found[0], "last": model(x)}


@pytest.mark.parametrize("by", ["timm", "torchvision"])
@pytest.mark.parametrize("name", [None, "cosine", "rotate", "mixed", "eva02", "linear", "reference"])
def test_feature_extraction_by_a_traced_graph(by, name):
    options = {"linear": {"attention": "linear"}}.get(name, {})
    encoding = {"linear": "cosine", "reference": "rotate"}.get(name, name)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(32, 48), depth=2, embed_dim=64, num_heads=2, num_classes=5
    )
    model = vit.adapt(model.eval(), encoding, **options)
    if name == "reference":
        model.reference = (5, 7)
    found, expected = extracted(by, model, torch.randn(2, 3, 32, 48))
    assert found.keys() == expected.keys()
    for key in found:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-6)
