"""Options of the diffusion transformer's blocks (models/blocks.py), as in published models and in combinations."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.func import jvp

from lrpe_md import Coordinates, Grid

pytest.importorskip("timm")

from lrpe_md.models import blocks
from lrpe_md.models.dit import SIZES, DiT
from lrpe_md.models.flow import flow_matching_loss, guided
from lrpe_md.models.text import LabelEncoder, Text, TextEncoder, tokenize
from test_dit import assert_blocks_are_the_identity

OPTIONS = {
    "cross": {"text_attention": "cross"},
    "cross, parallel": {"text_attention": "cross", "parallel": True, "cross_norm": False},
    "cross, shared, heads": {"text_attention": "cross", "modulation": "shared", "qk_norm": "heads", "mlp": "gelu_tanh"},
    "cross, linear": {
        "text_attention": "cross", "attention": "linear", "encoding_kwargs": {"act": "relu"}, "normalizer": "none",
        "text_projection": "mlp",
    },
    "single": {"text_attention": "single", "mlp": "swiglu", "norm": "rms"},
    "single, text on an axis": {
        "text_attention": "single", "text_positions": "axis", "image_after": (0,), "reg_tokens": 3,
    },
    "single, linear": {"text_attention": "single", "attention": "linear", "encoding": "cosine", "reg_tokens": 2},
    "joint, then parallel": {
        "text_attention": ["joint", "single"], "parallel": [False, True], "encoding": "flux1",
        "pooled_projection": "mlp",
    },
    "joint, parallel": {"parallel": True, "modulation": "shared", "reg_tokens": 2},
    "joint, shared": {"modulation": "shared", "mlp": "swiglu", "qk_norm": "none"},
    "joint, heads": {"qk_norm": "heads"},
    "joint, registers": {"reg_tokens": 3, "text_positions": "diagonal"},
    "joint, linear, heads": {"attention": "linear", "encoding": "cosine", "qk_norm": "heads", "reg_tokens": 2},
}  # fmt: skip


def dit(name="", seed=0, **kwargs):
    """Build a tiny model with random weights, or with seed=None its initial weights."""
    torch.manual_seed(0)
    options = {
        "embed_dim": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "encoding": "rotate",
        "text_encoder": TextEncoder(16, 1, 2), **OPTIONS.get(name, {}), **kwargs,
    }  # fmt: skip
    model = DiT(**options)
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def inputs(*size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, *(size or (8, 12)), generator=generator, dtype=dtype)
    return x, torch.rand(2, generator=generator, dtype=dtype), tokenize(["red", "a green dog"])


parametrize_options = pytest.mark.parametrize("name", OPTIONS)


@parametrize_options
def test_blocks_begin_as_the_identity(name):
    assert_blocks_are_the_identity(dit(name, seed=None), *inputs(), 2)


@parametrize_options
@torch.no_grad()
def test_text_counts_and_padding_does_not(name):
    model, (x, t, text) = dit(name), inputs()
    y = model(x, t, text)
    torch.testing.assert_close(model(x, t, torch.nn.functional.pad(text, (0, 5))), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x[:1], t[:1], text[:1, :4]), y[:1], rtol=1e-4, atol=1e-5)
    # The pooled features don't change, so only the tokens make a difference.
    encoded = model.encode_text(text)
    other = encoded._replace(features=encoded.features.flip(0), mask=encoded.mask.flip(0))
    assert (model(x, t, other) - y).abs().amax((1, 2, 3)).min() > 1e-3
    without = model(x, t)
    torch.testing.assert_close(guided(model, text, 3.0)(x, t), without + 3 * (y - without), rtol=1e-3, atol=1e-4)
    drop = torch.tensor([True, False])
    torch.testing.assert_close(model(x, t, text, drop=drop)[0], without[0], rtol=1e-4, atol=1e-5)


@parametrize_options
@torch.no_grad()
def test_positions_and_sizes(name):
    model = dit(name)
    for size in ((8, 12), (4, 6)):
        x, t, text = inputs(*size)
        y = model(x, t, text)
        assert y.shape == x.shape
        model.reference = (8, 8)
        assert (model(x, t, text) - y).abs().max() > 1e-4
        model.reference = None


@parametrize_options
def test_checkpointing_gives_the_same_gradients(name):
    model, (x, t, text) = dit(name), inputs()
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        flow_matching_loss(model, x, text, t, torch.ones_like(x)).mean().backward()
        grads.append([p.grad for p in model.parameters()])
        idle = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        assert idle <= {"blocks.1.text.q_norm.weight"}  # nothing reads the text's attention in the last block
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["cross", "single, text on an axis", "joint, registers"])
def test_encoding_again_gives_the_same_gradients(name):
    (x, t, text), grads = inputs(), []
    for keep_encoded in (True, False):
        model = dit(name, keep_encoded=keep_encoded)
        flow_matching_loss(model, x, text, t, torch.ones_like(x)).mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["cross", "joint, then parallel"])
def test_checkpointing_recomputes_every_block(name):
    model, (x, t, text) = dit(name), inputs()
    model.set_grad_checkpointing()
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, _: calls.append(block))
    model(x, t, text).sum().backward()
    assert [calls.count(block) for block in model.blocks] == [2, 2]


@pytest.mark.slow
@parametrize_options
def test_one_graph_for_all_sizes(name):
    torch._dynamo.reset()
    counter, model = CompileCounter(), dit(name, depth=2)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    # torch.compile assumes that sizes that are equal at first stay equal.
    for batch, height, width, length in ((2, 8, 12, 9), (3, 20, 14, 7)):
        x, t = torch.randn(batch, 3, height, width), torch.rand(batch)
        text = tokenize(["x" * length] * batch)
        torch.testing.assert_close(compiled(x, t, text), model(x, t, text), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["cross, shared, heads", "cross, linear", "joint, then parallel"])
def test_jvp_equals_finite_differences(name):
    model = dit(name).double()
    x, t, text = inputs(4, 6, dtype=torch.float64)
    tangents = torch.randn_like(x), torch.rand_like(t)
    y, dy = jvp(lambda x, t: model(x, t, text), (x, t), tangents)
    torch.testing.assert_close(y, model(x, t, text))
    ends = [model(x + s * tangents[0], t + s * tangents[1], text) for s in (1e-6, -1e-6)]
    torch.testing.assert_close(dy, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-5 * dy.abs().max().item())


@parametrize_options
def test_autocast_keeps_the_residual(name):
    model, seen = dit(name), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.extend(each.dtype for each in out))
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs())
    assert seen == [torch.float32] * 4
    half = model.bfloat16()
    x, t, text = inputs()
    assert half(x.bfloat16(), t, text).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["cross, shared, heads", "joint, heads", "joint, registers", "single", "joint, parallel"]
)
@torch.no_grad()
def test_norms_in_the_encoding_change_nothing(name, monkeypatch):
    model, args = dit(name), inputs()
    y = model(*args)
    monkeypatch.setattr(blocks, "takes_norm", lambda *args: False)
    torch.testing.assert_close(model(*args), y, rtol=1e-4, atol=1e-5)


# --- registers -----------------------------------------------------------------------------------------------


def test_registers_are_not_rotated():
    """Registers are between text and patches. Text and patches keep their positions."""
    assert dit(reg_tokens=3).positions((2, 3), 4) == Grid((2, 3), prefix=7)
    assert dit(reg_tokens=3, text_attention="cross").positions((2, 3)) == Grid((2, 3), prefix=3)
    assert dit(reg_tokens=3, encoding="flux1").positions((2, 3), 4) == Grid((1, 2, 3), prefix=7)
    for kwargs in ({"text_positions": "diagonal"}, {"encoding": "qwen_image"}):
        plain, ours = dit(**kwargs).positions((2, 3), 4), dit(reg_tokens=2, **kwargs).positions((2, 3), 4)
        assert isinstance(ours, Coordinates)
        assert torch.equal(ours.coords[4:6], torch.zeros_like(ours.coords[4:6]))
        assert torch.equal(ours.coords[[0, 1, 2, 3, *range(6, 12)]], plain.coords)
        assert ours.rotated.tolist() == [True] * 4 + [False] * 2 + [True] * 6


@pytest.mark.parametrize("encoding", ["flux1", "qwen_image", "lumina2", "z_image", "wan", "hunyuan_video", "eva02"])
def test_registers_beside_the_positions_of_a_preset(encoding):
    """Encoding doesn't change a register. Other tokens are encoded as they are without registers."""
    plain, ours = (dit(reg_tokens=n, encoding=encoding, embed_dim=192) for n in (0, 2))
    q = torch.randn(1, 2, 3 + 2 + 6, 96)
    kept = [0, 1, 2, *range(5, 11)]
    found = ours.encoding(q, positions=ours.positions((2, 3), 3))
    expected = plain.encoding(q[:, :, kept], positions=plain.positions((2, 3), 3))
    found, expected = (y[0] if isinstance(y, tuple) else y for y in (found, expected))
    torch.testing.assert_close(found[:, :, 3:5], q[:, :, 3:5])
    torch.testing.assert_close(found[:, :, kept], expected)


def test_registers_follow_the_text_of_a_sample():
    model = dit("single, text on an axis", reg_tokens=1)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    placed = model.positions((2, 1), 3, mask=mask)
    assert placed.coords[:, :, 0].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 3, 4]]
    assert placed.rotated.tolist() == [[True] * 3 + [False] + [True] * 2] * 2


@torch.no_grad()
def test_registers_are_attended_to():
    model, args = dit(reg_tokens=2), inputs()
    y = model(*args)
    model.reg_token[:, 1].copy_(torch.randn(64))
    assert (model(*args) - y).abs().max() > 1e-3


@torch.no_grad()
def test_the_output_is_that_of_patches():
    """Registers change nothing as long as blocks are the identity."""
    plain, ours = dit(seed=None), dit(seed=None, reg_tokens=2)
    torch.nn.init.normal_(plain.head.weight)
    ours.load_state_dict(plain.state_dict(), strict=False)
    x, t, text = inputs()
    torch.testing.assert_close(ours(x, t, text), plain(x, t, text))
    assert plain(x, t, text).std() > 0.1


# --- other options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("S/2", 33), ("B/2", 130), ("L/2", 458), ("XL/2", 675)])
def test_sizes(name, millions):
    """The numbers of parameters match table 1 of arXiv 2212.09748."""
    with torch.device("meta"):
        model = DiT.from_name(
            name, in_chans=4, out_chans=8, mlp="gelu_tanh", qk_norm="none", pooled_projection="none",
            text_encoder=LabelEncoder(1000, SIZES[name.split("/")[0]]["embed_dim"]),
        )  # fmt: skip
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) in (millions, millions - 1)
    assert model.patch_size == (2, 2)


def test_names_leave_other_arguments_free():
    with torch.device("meta"):
        model = DiT.from_name("B/4", num_axes=3, depth=1)
    assert (model.patch_size, model.embed_dim, len(model.blocks)) == ((1, 4, 4), 768, 1)


def test_modulation_is_shared():
    model = dit("cross, shared, heads")
    plain = dit("cross, shared, heads", modulation="block")
    found, other = ({n for n, _ in m.named_parameters() if "modulation" in n} for m in (model, plain))
    assert found == {
        "shared_modulation.1.weight", "shared_modulation.1.bias", "blocks.0.image.modulation.table",
        "blocks.1.image.modulation.table", "modulation.table",
    }  # fmt: skip
    assert "blocks.1.image.modulation.1.weight" in other
    assert "blocks.1.image.modulation.table" in model.no_weight_decay()
    assert "reg_token" in dit(reg_tokens=1).no_weight_decay()


def test_hidden_width_of_swiglu():
    mlp = dit(mlp="swiglu", mlp_ratio=2.5).blocks[0].image.mlp
    assert (mlp.fc1.weight.shape, mlp.fc2.weight.shape) == ((320, 64), (64, 160))


@torch.no_grad()
def test_labels_steer_without_text():
    """Class labels only reach blocks through the time vector. Parallel blocks, registers and SwiGLU also work."""
    model = dit(
        text_encoder=LabelEncoder(10, 64), pooled_projection="none", parallel=True, reg_tokens=2, mlp="swiglu",
    )  # fmt: skip
    x, t, _ = inputs()
    y = model(x, t, torch.tensor([1, 2]))
    assert y.shape == x.shape
    assert (model(x, t, torch.tensor([1, 3])) - y).abs().amax((1, 2, 3)).tolist()[0] == 0
    assert (model(x, t, torch.tensor([1, 3])) - y).abs().amax((1, 2, 3)).tolist()[1] > 1e-3
    assert model(x, t).shape == x.shape


@torch.no_grad()
def test_the_order_of_a_sine_cosine_table():
    """Values are the same in another channel order: the sines, then the cosines, for each axis, last axis first."""
    tables = []
    for absolute in ("sincos", "sincos_dit"):
        model = dit(absolute=absolute)
        model.embed.weight.zero_()
        model.embed.bias.zero_()
        tables.append(model._embed_patches(torch.zeros(1, 3, 4, 6), (2, 3))[0])
    theta = 1e4 ** -(torch.arange(16) / 16)
    column = torch.tensor([0.0, 1, 2, 0, 1, 2])[:, None] * theta
    row = torch.tensor([0.0, 0, 0, 1, 1, 1])[:, None] * theta
    torch.testing.assert_close(tables[0], torch.cat([column.cos(), row.cos(), column.sin(), row.sin()], dim=1))
    torch.testing.assert_close(tables[1], torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1))


def test_videos():
    model = dit("cross, shared, heads", num_axes=3, patch_size=(2, 2, 1), encoding="wan", out_chans=5)
    x, t, text = inputs(4, 4, 3)
    assert model(x, t, text).shape == (2, 5, 4, 4, 3)


BAD = {
    "text_attention": (r"text_attention: expected 'joint', 'cross' or 'single', got 'add'", {"text_attention": "add"}),
    "number": (r"text_attention: .* over the 2 layers, got 3 values", {"text_attention": ["joint"] * 3}),
    "mixture": (r"text_attention: .*'cross' in all blocks or in none", {"text_attention": ["joint", "cross"]}),
    "no text": (
        r"text_attention: .*got 'cross'; pass a text_encoder",
        {"text_attention": "cross", "text_encoder": None},
    ),
    "parallel": (r"parallel: expected False or True, got 2", {"parallel": [2, True]}),
    "positions of text": (
        r"text_positions, image_after: expected None with text_attention='cross'",
        {"text_attention": "cross", "text_positions": "axis"},
    ),
    "mlp": (r"mlp: expected 'gelu', 'gelu_tanh' or 'swiglu', got 'relu'", {"mlp": "relu"}),
    "norm": (r"norm: expected 'layer' or 'rms'", {"norm": "batch"}),
    "qk_norm": (r"qk_norm: expected 'head', 'heads' or 'none', got True", {"qk_norm": True}),
    "modulation": (r"modulation: expected 'block' or 'shared'", {"modulation": "single"}),
    "channels": (r"in_chans: expected a positive integer, got 0", {"in_chans": 0}),
    "output channels": (r"out_chans: expected a positive integer, got -1", {"out_chans": -1}),
    "mlp_ratio": (r"mlp_ratio: expected a positive number, got 0", {"mlp_ratio": 0}),
    "registers": (r"reg_tokens: expected a non-negative integer, got -1", {"reg_tokens": -1}),
    "projection": (r"text_projection: expected 'linear' or 'mlp', got 'none'", {"text_projection": "none"}),
    "width": (r"pooled_projection: .*of 16 channels to embed_dim = 64", {"pooled_projection": "none"}),
    "table": (
        r"embed_dim: expected a multiple of 2 · num_axes = 6 with absolute='sincos_dit', got 64",
        {"num_axes": 3, "absolute": "sincos_dit"},
    ),
    "linear": (
        r"normalizer: .*act='none'",
        {"attention": "linear", "text_attention": "cross", "encoding_kwargs": {"act": "none"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    message, kwargs = BAD[name]
    with pytest.raises(ValueError, match=message):
        dit(**kwargs)


@pytest.mark.parametrize("name", ["XXL/2", "XL", "XL/two", "XL/0"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=r"(name: expected SIZE/PATCH|patch_size: expected)"):
        DiT.from_name(name)


def test_text_without_features():
    with pytest.raises(ValueError, match=r"text: expected features of 16 channels"):
        dit("cross")(*inputs()[:2], Text(None, None, torch.ones(2, 16)))
