"""Norms of q and k that go with the encoding: the models compute what they did, and their parameters learn."""

import copy

import pytest
import torch
from torch import nn

from lrpe_md import Norm
from lrpe_md.integrations.norms import join_norms, norm_of

timm = pytest.importorskip("timm")

import lrpe_md.models.vit  # noqa: E402, F401
from lrpe_md.models import joint  # noqa: E402
from timm.layers.norm import RmsNorm  # noqa: E402

from lrpe_md.integrations import timm as vit  # noqa: E402

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def randomized(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "encoding" not in name:
                p.add_(torch.randn_like(p), alpha=0.3)
    return model.eval()


def gradients(model, *args):
    y = model(*args)
    found = torch.autograd.grad(y.square().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return y, found


@pytest.fixture
def norms_taken(monkeypatch):
    """The norms that functions of ours were given."""
    taken = []
    from lrpe_md.engine import dispatch

    take = dispatch.take_norm
    monkeypatch.setattr(dispatch, "take_norm", lambda *args: (taken.append(args[1]), take(*args))[1])
    return taken


@pytest.mark.parametrize("norm_layer", [nn.LayerNorm, RmsNorm])
@pytest.mark.parametrize("encoding", ["cosine", "rotate", "mixed"])
def test_timms_vit(encoding, norm_layer, monkeypatch, norms_taken):
    options = {**SMALL, "qk_norm": True, "norm_layer": norm_layer, "encoding": encoding}
    model = randomized(timm.create_model("lrpe_vit_tiny_patch16_224", **options))
    x = torch.randn(2, 3, 16, 16)
    found = gradients(model, x)
    assert [norm.kind for norm in norms_taken] == ["layer" if norm_layer is nn.LayerNorm else "rms"] * 2
    monkeypatch.setattr(vit, "norm_of", lambda *args: None)
    expected = gradients(model, x)
    assert len(norms_taken) == 2
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert any(name.endswith("attn.q_norm.weight") for name, _ in model.named_parameters())


def test_a_hook_on_a_norm_is_called(norms_taken):
    model = randomized(timm.create_model("lrpe_vit_tiny_patch16_224", **SMALL, qk_norm=True, encoding="rotate"))
    called = []
    model.blocks[0].attn.q_norm.register_forward_hook(lambda *args: called.append(args))
    model(torch.randn(2, 3, 16, 16))
    assert len(called) == len(norms_taken) == 1


@pytest.mark.parametrize("text", [False, True])
def test_joint_blocks(text, monkeypatch, norms_taken):
    from lrpe_md import Grid, RotateMd
    from lrpe_md.integrations.attention import Context

    block = randomized(joint.JointBlock(32, 2, 2.0, text=text, last=False, attention="softmax", normalizer="none"))
    context = Context(RotateMd(16, 2), Grid((3, 4), prefix=5 if text else 0))
    args = (torch.randn(2, 12, 32), torch.randn(2, 5, 32) if text else None, torch.randn(2, 32), context)
    found = block(*args)
    (norm,) = norms_taken
    assert norm.weight[0].shape == ((2, 1, 16) if text else (16,))
    monkeypatch.setattr(joint, "takes_norm", lambda *args: False)
    for a, b in zip(found, block(*args), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(norms_taken) == 1


def test_norms_that_are_not_known():
    f32 = torch.float32
    assert norm_of(nn.Identity(), nn.Identity(), f32) is None
    assert norm_of(nn.RMSNorm(8), nn.RMSNorm(8, eps=1e-3), f32) is None
    assert norm_of(nn.RMSNorm(8), nn.LayerNorm(8), f32) is None
    assert norm_of(nn.RMSNorm((2, 4)), nn.RMSNorm((2, 4)), f32) is None
    assert norm_of(nn.RMSNorm(8), nn.RMSNorm(8, elementwise_affine=False), f32) is None
    assert norm_of(nn.RMSNorm(8), nn.RMSNorm(8).double(), f32) is None

    class Own(nn.RMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    assert norm_of(Own(8), Own(8), f32) is None
    known = norm_of(nn.RMSNorm(8), nn.RMSNorm(8), torch.bfloat16)
    assert isinstance(known, Norm)
    assert known.eps == torch.finfo(torch.bfloat16).eps
    over = norm_of(nn.RMSNorm(8), nn.RMSNorm(4), f32, heads=(2, 1))
    assert isinstance(over, Norm)
    assert [tuple(t.shape) for t in over.weight] == [(2, 4), (1, 4)]
    assert join_norms((known, None)) is None
    assert join_norms((known, known._replace(eps=1.0))) is None


def test_qwen3_norms_go_with_the_rotation(norms_taken):
    transformers = pytest.importorskip("transformers")
    from lrpe_md.integrations import adapt_rotary
    from lrpe_md.integrations.exchange import restore_rotary

    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = randomized(transformers.Qwen3ForCausalLM(config))
    adapted = adapt_rotary(copy.deepcopy(model))
    ids = torch.randint(0, 32, (2, 9))
    expected, found = (m(ids).logits for m in (model, adapted))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(norms_taken) == 2
    for m, y in ((model, expected), (adapted, found)):
        y.square().mean().backward()
        assert m.model.layers[0].self_attn.q_norm.weight.grad is not None
    for (name, a), b in zip(adapted.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)
    attention = adapted.model.layers[0].self_attn
    with pytest.raises(TypeError, match="position_embeddings: expected what the adapted rotary module gives"):
        attention(torch.randn(1, 3, 32), (torch.ones(1, 3, 16), torch.zeros(1, 3, 16)), None)
    restored = restore_rotary(adapted)
    assert type(restored.model.layers[0].self_attn.q_norm) is type(model.model.layers[0].self_attn.q_norm)
    torch.testing.assert_close(restored(ids).logits, expected)
