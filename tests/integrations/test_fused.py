"""In known attention classes, norms and prefix tokens are fused with the rotation if and only if this is correct."""

import copy

import pytest
import test_rotary_models as models
import torch
from torch import nn

from lrpe_md import adapt_rotary, rotate
from lrpe_md.engine.core.launching import INTERPRETING
from lrpe_md.integrations import fused, plans, restore_rotary

CASES = {  # launches: tensors, whether with a norm, and tokens in front
    "eva02": [(1, False, 1)] * 4,
    "dinov3": [(1, False, 5)] * 4,
    "flux": [(1, True, 0)] * 6,  # q and k of the text, of the image, and of the single stream
    "wan": [(1, True, 0)] * 4,
    "hunyuan video": [(1, True, 0)] * 4,
    "ltx": [(1, False, 0)] * 4,  # see test_ltx_fuses_its_norms_in_kernels
    "Qwen3VL": [(2, False, 0), (2, True, 0), (2, True, 0)],  # the tower's and the text model's
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def launches(record_calls):
    def describe(*xs, norm=None, prefix=0, **others):
        return len(xs), norm is not None, prefix

    return record_calls(rotate, fused, plans, describe=describe)


@pytest.mark.parametrize("name", CASES)
def test_launches(name, launches):
    build, call, x = models.ALL[name]
    model, x = build(), x()
    adapted = adapt_rotary(copy.deepcopy(model))
    call(adapted, x)
    launches.clear()
    models.same(model, adapted, call, x)
    assert launches == CASES[name]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter (tests/conftest.py sets it)")
def test_ltx_fuses_its_norms_in_kernels(launches):
    model, x = models.ltx(num_layers=1), torch.randn(2, 30, 4)
    adapted = adapt_rotary(copy.deepcopy(model), impl="triton")
    models.same(model, adapted, models.call_ltx, x)
    assert launches[-2:] == [(1, True, 0)] * 2


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter (tests/conftest.py sets it)")
def test_fused_ltx_compiles_in_one_graph():
    """test_rotary_models.py tests this for models that are also fused on a CPU."""
    torch._dynamo.reset()
    model, x = models.ltx(num_layers=1), torch.randn(2, 30, 4)
    adapted = adapt_rotary(copy.deepcopy(model), impl="triton")
    compiled = torch.compile(adapted, backend="eager", fullgraph=True)
    torch.testing.assert_close(models.call_ltx(compiled, x), models.call_ltx(model, x), rtol=0, atol=models.BOUND)


def norms(model):
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k", "q_norm", "k_norm")
    found = [getattr(part, name, None) for part in model.modules() for name in names]
    return [norm for norm in found if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity)]


def double(module, args, y):
    return 2 * y


CHANGES = {
    "a hook": lambda norm: norm.register_forward_hook(double),
    "a forward": lambda norm: setattr(norm, "forward", lambda x: type(norm).forward(norm, 2 * x) * x.mean().exp()),
    "a class": lambda norm: setattr(norm, "__class__", type("Own", (type(norm),), {"forward": lambda self, x: x})),
    "eps": lambda norm: setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", 0.5),
    "a weight": lambda norm: norm.weight.data.mul_(3),
}
PLAIN = ("eps", "a weight")  # settings that prevent fusing


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan video", "Qwen3VL"])
@pytest.mark.parametrize("change", CHANGES)
def test_norms_that_change_after_adapting(name, change, launches):
    build, call, x = models.ALL[name]
    model, x = build(), x()
    before = call(model, x)
    adapted = adapt_rotary(copy.deepcopy(model))
    for m in (model, adapted):
        for norm in norms(m):
            CHANGES[change](norm)
    call(adapted, x)
    launches.clear()
    torch.testing.assert_close(call(adapted, x), call(model, x), rtol=0, atol=models.BOUND)
    assert (call(model, x) - before).abs().max() > 1e-3
    assert any(norm for _, norm, _ in launches) == (change in PLAIN)
    assert torch.equal(call(restore_rotary(adapted), x), call(model, x))


def test_one_norm_of_several(launches):
    """A hook on one norm of FLUX's text stream makes all norms of the block run as modules."""
    build, call, x = models.ALL["flux"]
    model, x = build(), x()
    adapted = adapt_rotary(copy.deepcopy(model))
    for m in (model, adapted):
        m.transformer_blocks[0].attn.norm_added_k.register_forward_hook(double)
    call(adapted, x)
    launches.clear()
    torch.testing.assert_close(call(adapted, x), call(model, x), rtol=0, atol=models.BOUND)
    assert launches == [(1, False, 0)] * 2 + [(1, True, 0)] * 2


@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan video", "Qwen3VL"])
def test_weights_elsewhere_are_called(name, launches):
    """If another library's hook offloads a norm, its weights are loaded when it is called."""
    accelerate = pytest.importorskip("accelerate")
    build, call, x = models.ALL[name]
    model, x = build(), x()
    adapted = adapt_rotary(copy.deepcopy(model))
    call(adapted, x)
    accelerate.cpu_offload(adapted, execution_device=torch.device("cpu"))
    launches.clear()
    torch.testing.assert_close(call(adapted, x), call(model, x), rtol=0, atol=models.BOUND)
    assert not any(norm for _, norm, _ in launches)


def test_tables_that_were_changed():
    """The two entries of a pair may differ, because each channel has its own."""
    build, call, x = models.ALL["flux"]
    model, x = build(), x()
    adapted = adapt_rotary(copy.deepcopy(model))
    for m in (model, adapted):
        m.pos_embed.register_forward_hook(lambda m, args, tables: tuple(t * torch.linspace(0.5, 1, 32) for t in tables))
    torch.testing.assert_close(call(adapted, x), call(model, x), rtol=0, atol=models.BOUND)


def test_hunyuan_with_an_output_projection_in_its_single_stream():
    build, call, x = models.ALL["hunyuan video"]
    model, x = build(), x()
    for m in model.single_transformer_blocks:
        m.attn.to_out = nn.ModuleList([nn.Linear(64, 64), nn.Dropout(0.0)])
    adapted = adapt_rotary(copy.deepcopy(model))
    torch.testing.assert_close(call(adapted, x), call(model, x), rtol=0, atol=models.BOUND)


def test_another_number_of_tokens_in_front():
    """The setting of the instance counts, not that of its class. The tables have one row per rotated token."""
    model = models.timm_vit("eva02", class_token=False, global_pool="avg")
    adapted = adapt_rotary(copy.deepcopy(model))
    models.same(model, adapted, models.logits, models.image(model))
