"""q and k norms fused with the encoding: results don't change, and their parameters learn."""

import types

import pytest
import torch
from parametrizing import TORCH_VERSION
from torch import nn

from lrpe_md import Norm
from lrpe_md.integrations.norms import norm_of

timm = pytest.importorskip("timm")

import lrpe_md.models.vit  # noqa: E402, F401
from lrpe_md.models import blocks  # noqa: E402
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
    """Return the list of norms that were passed to our functions."""
    taken = []
    from lrpe_md.engine.encode import dispatch

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

    block = randomized(blocks.DiTBlock(blocks.BlockOptions(32, 2, 2.0), text="joint" if text else None))
    context = Context(RotateMd(16, 2), Grid((3, 4), prefix=5 if text else 0))
    args = (torch.randn(2, 12, 32), torch.randn(2, 5, 32) if text else None, torch.randn(2, 32), context)
    found = block(*args)
    (norm,) = norms_taken
    assert norm.weight[0].shape == ((2, 1, 16) if text else (16,))
    monkeypatch.setattr(blocks, "takes_norm", lambda *args: False)
    for a, b in zip(found, block(*args), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(norms_taken) == 1


def double(module, *args):
    return 2 * args[-1]


PATCHES = {
    "a hook": lambda norm: norm.register_forward_hook(double),
    "a hook in front": lambda norm: norm.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a hook of the backward": lambda norm: norm.register_full_backward_hook(lambda *args: None),
    "a forward": lambda norm: setattr(norm, "forward", lambda x: 2 * x),
    "another class": lambda norm: setattr(norm, "__class__", type("Own", (type(norm),), {"forward": double})),
}


@pytest.mark.parametrize("cls", [nn.RMSNorm, nn.LayerNorm, RmsNorm])
@pytest.mark.parametrize("name", PATCHES)
def test_patched_norms_are_called(name, cls):
    """Norms are recognised at the time of the call."""
    q, k = cls(8), cls(8)
    assert norm_of(q, k, torch.float32) is not None
    PATCHES[name](k)
    assert norm_of(q, k, torch.float32) is None


def test_hooks_of_all_modules(monkeypatch):
    q = nn.RMSNorm(8)
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        assert norm_of(q, q, torch.float32) is None
    finally:
        handle.remove()
    assert norm_of(q, q, torch.float32) is not None


def test_a_class_that_was_patched(monkeypatch):
    q = RmsNorm(8)
    assert norm_of(q, q, torch.float32) is not None
    monkeypatch.setattr(RmsNorm, "forward", double)
    assert norm_of(q, q, torch.float32) is None


def test_weights_elsewhere():
    q = nn.RMSNorm(8)
    assert norm_of(q, q, torch.float32, device=torch.device("cpu")) is not None
    assert norm_of(q.to("meta"), q, torch.float32, device=torch.device("cpu")) is None


def test_a_fork_of_a_norm_is_known():
    """The same code in another module's class is recognised."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias, self.eps, self.normalized_shape = nn.Parameter(torch.ones(8)), None, 1e-6, (8,)

        forward = types.FunctionType(nn.LayerNorm.forward.__code__, vars(nn.functional) | {"F": nn.functional})

    assert norm_of(Fork(), Fork(), torch.float32).kind == "layer"


IGNORES_HOOKS = pytest.mark.skipif(
    TORCH_VERSION < (2, 14), reason="torch before 2.14: by default, compiled code ignores hooks that are added later"
)


@pytest.mark.parametrize("ignore_hooks", [False, pytest.param(True, marks=IGNORES_HOOKS)])
def test_the_check_costs_no_graph_break(ignore_hooks):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_norm, self.k_norm = RmsNorm(8), RmsNorm(8)

        def forward(self, x):
            norm = norm_of(self.q_norm, self.k_norm, x.dtype, device=x.device)
            return x if norm is None else x * norm.weight[0] * 3

    torch._dynamo.reset()
    model, x = Both(), torch.randn(2, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=ignore_hooks):
        assert torch.equal(compiled(x), 3 * x)
        model.q_norm.register_forward_hook(double)
        assert torch.equal(compiled(x), x)


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
    assert blocks.join_norms((known, None)) is None
    assert blocks.join_norms((known, known._replace(eps=1.0))) is None
