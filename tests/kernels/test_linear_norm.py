"""Compare linear attention after a norm with float64 in Triton's interpreter."""

import pytest
import torch
from parametrizing import parametrize_each

pytest.importorskip("triton")

from lrpe_md.scripts.common.cases import LinearCase, check_linear, make_linear_inputs, run_linear

from lrpe_md import Grid, Norm, linear_attention
from lrpe_md.engine.core.operator import INTERPRETING, call_cache
from lrpe_md.engine.linear import plan as linear_plan
from lrpe_md.reference import ACTIVATIONS

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter (tests/conftest.py sets it)"),
]

STEADY = {"normalizer": "encoded", "act": "softplus", "base": 1e8, "head_dim": 32}
KINDS, CUTS = ("rms", "layer"), ("one pass", "many pieces")
# few programs: one case has several heads, and the other has several samples
FEW = {"one pass": {"batch": 1}, "many pieces": {"heads": (2, 1)}}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fill_with_nan(nan_filled):
    assert torch.empty(3).isnan().all()


def assert_within_budget(case: LinearCase, **changes) -> None:
    assert not check_linear(case, ulps=1.0, **changes)


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """Divide the tokens into sizes that the interpreter can run."""
    if request.param != "one pass":
        monkeypatch.setattr(linear_plan, "ONE_PASS", 0)
        monkeypatch.setattr(linear_plan, "SHORTEST", 8)
        monkeypatch.setattr(linear_plan, "PIECE", 8)
        monkeypatch.setattr(linear_plan, "PROGRAMS", 10**6)
    call_cache.clear()
    yield request.param
    call_cache.clear()


@parametrize_each(
    "name normalizer kind cut", ["cosine", "rotate", None], ["unrotated", "encoded", "none"], KINDS, CUTS,
    fixtures=["cut"],
)  # fmt: skip
def test_maps_and_normalizers(name, normalizer, kind, cut):
    steady = STEADY if normalizer == "encoded" else {"normalizer": normalizer}
    assert_within_budget(LinearCase(name, norm=kind, **steady))


@kinds
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act, kind):
    normalizer = "unrotated" if ACTIVATIONS[act].never_negative else "none"
    dim = -1 if act == "softmax" else None
    assert_within_budget(LinearCase("rotate", act=act, dim=dim, normalizer=normalizer, head_dim=24, norm=kind))


@pytest.mark.slow
@parametrize_each("mask gate kind cut", ["full", "causal", "block"], ["float", "nan"], KINDS, CUTS, fixtures=["cut"])
def test_masks_and_gates(mask, gate, kind, cut):
    assert_within_budget(
        LinearCase("rotate", gate=gate, gate_heads=2, mask=mask, block=5, act="softplus", norm=kind, norm_groups=2)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_dtypes(mask, dtype):
    case = {"dtype": dtype, "mask": mask, "act": "softplus", "shape": (70,), "state": True, "return_state": True}
    assert_within_budget(LinearCase(norm="layer", batch=1, head_dim=12, **case))
    if dtype.itemsize == 2:
        assert_within_budget(LinearCase("rotate", norm="rms", norm_dtype=torch.float32, heads=(2, 1), **case))


@pytest.mark.parametrize("head_dim", [24, 72, 96, 128])
@pytest.mark.parametrize("name", ["cosine", "rotate"])
def test_widths(name, head_dim):
    assert_within_budget(LinearCase(name, head_dim=head_dim, batch=1, heads=(2, 1), norm="layer"))


CHANGES = [
    {"norm_weight": "none"},
    {"norm_weight": "by_head", "heads": (6, 2)},
    {"norm_weight": "by_head", "heads": (4, 1), "norm_groups": 3, "suffix": 2},
    {"norm_bias": False},
    # With relu, z may depend on a single channel, a small difference between γ x̂ and β, which makes 1/z inexact.
    {"offset": 1.0, "norm_eps": 1e-2, "act": "softplus"},
    {"norm_groups": 3, "prefix": 2, "suffix": 3, "act": "sigmoid"},
    {"norm_groups": 2, "map": None, "prefix": 3},
    {"k_shape": (7, 4)},
    {"k_shape": (7, 4), "norm_weight": "by_head", "map": "rotate", "pairs": "interleaved"},
    {"layout": "packed", "v_dim": 24},
    {"layout": "odd", "grad_layout": "odd"},
    {"layout": "bnhd", "grad_layout": "expanded"},
    {"coords": "by_sample", "masked": True, "norm_groups": 2},
    {"phase": "k", "map": "rotate", "omega_heads": 2, "heads": (4, 2)},
    {"map": "rotate", "rotary_dim": slice(4, 14), "pairs": "interleaved"},
    {"rotary_dim": slice(3, 14)},
    {"map": "rotate", "pairs": (3, 5)},
    {"shape": (67,), "prefix": 0, "heads": (3, 3)},
]


@pytest.mark.slow
@parametrize_each("changes kind cut", CHANGES, KINDS, CUTS, fixtures=["cut"])
def test_weights_positions_and_strides(changes, kind, cut):
    case = LinearCase(**{"norm": kind, **FEW[cut], **changes})
    assert_within_budget(case)
    if kind == "layer":  # a layer norm has all kinds of weights
        assert_within_budget(case, frequencies=False)


CAUSAL = [
    {}, {"norm_weight": "by_head", "gate": "float"}, {"heads": (2, 2), "norm_groups": 2, "shape": (67,)},
    {"cu_seqlens": (5, 0, 9, 2), "batch": 1}, {"map": None, "norm_weight": "by_head", "heads": (4, 1)}, STEADY,
    {"phase": "k", "omega_heads": 2},
]  # fmt: skip


@pytest.mark.slow
@parametrize_each("changes state cut", CAUSAL, [False, True], CUTS, fixtures=["cut"])
def test_causal(changes, state, cut):
    assert_within_budget(
        LinearCase(
            mask="causal",
            state=state,
            return_state=state,
            **{"batch": 1, "act": "softplus", "norm": "layer", **changes},
        )
    )


@pytest.mark.parametrize("lengths", [(5, 0, 9, 1, 17)])
def test_packed_sequences(lengths, cut):
    assert_within_budget(
        LinearCase(shape=(31,), cu_seqlens=lengths, batch=1, state=True, return_state=True, norm="rms")
    )


@pytest.mark.slow
@kinds
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"map": "rotate", "mask": "causal", "heads": (4, 1)}, {"map": None, "gate": "nan"},
        {"k_shape": (7, 4)}, {"norm_groups": 2, "gate": "nan", "gate_heads": 2}, {"dtype": torch.bfloat16},
    ],
    ids=str,
)  # fmt: skip
def test_over_all_heads(changes, kind):
    assert_within_budget(LinearCase(shape=(2, 4), norm=kind, norm_over="heads", **{"act": "softplus", **changes}))


def test_gated_tokens_do_not_affect_weight_gradients(cut):
    """This holds for any values of the tokens."""
    clean, dirty = (
        run_linear(make_linear_inputs(LinearCase(norm="layer", gate=gate, act="softplus")), "triton")
        for gate in ("float", "nan")
    )
    for name, t in dirty.items():
        assert t.isfinite().all(), name
        if name.startswith(("dweight", "dbias")):
            assert torch.equal(t, clean[name]), name


@pytest.mark.slow
def test_deterministic(cut):
    inputs = make_linear_inputs(LinearCase("rotate", (6, 7), batch=1, norm="layer", mask="causal"))
    first, second = run_linear(inputs, "triton"), run_linear(inputs, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("over", ["head", "heads"])
def test_only_weights_require_gradients(over):
    """dγ is computed even if no other input requires a gradient, with one or two weights for q and k."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 10, 16)
    size = (16,) if over == "head" else (2, 16)
    weight = torch.rand(size).requires_grad_()
    omega = torch.rand(1, 16, 1)
    found = [
        torch.autograd.grad(
            linear_attention(
                q, k, v, omega=omega, positions=Grid((10,)), norm=Norm("rms", w, over=over), act="softplus", impl=impl
            ).square().sum(),
            weight,
        )[0]
        for impl in ("triton", "reference")
        for w in (weight, (weight, weight.view_as(weight)))
    ]  # fmt: skip
    for t in found[1:]:
        torch.testing.assert_close(t, found[0], rtol=1e-4, atol=1e-5)


def test_softmax_over_the_sequence_is_refused():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"norm: .* \(dim=-2\)"):
        linear_attention(q, q, q, map=None, act="softmax", dim=-2, norm=Norm())
