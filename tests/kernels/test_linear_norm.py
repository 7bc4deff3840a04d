"""Linear attention behind a norm, in Triton's interpreter against float64."""

import pytest
import torch
from parametrizing import parametrize_each

pytest.importorskip("triton")

from lrpe_md import Grid, Norm, linear_attention
from lrpe_md.engine import linear_plan
from lrpe_md.engine.call import remembered
from lrpe_md.engine.dispatch import INTERPRETING
from lrpe_md.testing import LinearCase, check_linear, make_linear_inputs, run_linear

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter (tests/conftest.py sets it)")

STEADY = {"normalizer": "encoded", "act": "softplus", "base": 1e8, "head_dim": 32}
KINDS, CUTS = ("rms", "layer"), ("one pass", "many pieces")
FEW = {"one pass": {"batch": 1}, "many pieces": {"heads": (2, 1)}}  # programs: the one has heads, the other samples
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def poison(nan_filled):
    assert torch.empty(3).isnan().all()


def holds(case: LinearCase, **changes) -> None:
    assert not check_linear(case, ulps=1.0, **changes)


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """How the tokens are cut, at sizes that an interpreter can do."""
    if request.param != "one pass":
        monkeypatch.setattr(linear_plan, "ONE_PASS", 0)
        monkeypatch.setattr(linear_plan, "SHORTEST", 8)
        monkeypatch.setattr(linear_plan, "PIECE", 8)
        monkeypatch.setattr(linear_plan, "PROGRAMS", 10**6)
    remembered.clear()
    yield request.param
    remembered.clear()


@parametrize_each(
    "name normalizer kind cut", ["cosine", "rotate", None], ["unrotated", "encoded", "none"], KINDS, CUTS,
    fixtures=["cut"],
)  # fmt: skip
def test_maps_and_normalizers(name, normalizer, kind, cut):
    steady = STEADY if normalizer == "encoded" else {"normalizer": normalizer}
    holds(LinearCase(name, norm=kind, **steady))


@kinds
@pytest.mark.parametrize("act", ["none", "sigmoid", "silu", "softplus", "softmax"])
def test_activations(act, kind):
    normalizer = "none" if act in ("none", "silu") else "unrotated"
    dim = -1 if act == "softmax" else None
    holds(LinearCase("rotate", act=act, dim=dim, normalizer=normalizer, head_dim=24, norm=kind))


@parametrize_each("mask gate kind cut", ["full", "causal", "block"], ["float", "nan"], KINDS, CUTS, fixtures=["cut"])
def test_masks_and_gates(mask, gate, kind, cut):
    holds(LinearCase("rotate", gate=gate, gate_heads=2, mask=mask, block=5, act="softplus", norm=kind, norm_groups=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_dtypes(mask, dtype):
    case = {"dtype": dtype, "mask": mask, "act": "softplus", "shape": (70,), "state": True, "return_state": True}
    holds(LinearCase(norm="layer", batch=1, head_dim=12, **case))
    if dtype.itemsize == 2:
        holds(LinearCase("rotate", norm="rms", norm_dtype=torch.float32, heads=(2, 1), **case))


@pytest.mark.parametrize("head_dim", [24, 72, 96, 128])
@pytest.mark.parametrize("name", ["cosine", "rotate"])
def test_widths(name, head_dim):
    holds(LinearCase(name, head_dim=head_dim, batch=1, heads=(2, 1), norm="layer"))


CHANGES = [
    {"norm_weight": "none"},
    {"norm_weight": "by_head", "heads": (6, 2)},
    {"norm_weight": "by_head", "heads": (4, 1), "norm_groups": 3, "suffix": 2},
    {"norm_bias": False},
    # With relu a query may see one key's channel alone, a difference of γ x̂ and β: 1/z is as good as its last bits.
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


@parametrize_each("changes kind cut", CHANGES, KINDS, CUTS, fixtures=["cut"])
def test_weights_positions_and_strides(changes, kind, cut):
    case = LinearCase(**{"norm": kind, **FEW[cut], **changes})
    holds(case)
    if kind == "layer":  # which has all the weights
        holds(case, frequencies=False)


CAUSAL = [
    {}, {"norm_weight": "by_head", "gate": "float"}, {"heads": (2, 2), "norm_groups": 2, "shape": (67,)},
    {"cu_seqlens": (5, 0, 9, 2), "batch": 1}, {"map": None, "norm_weight": "by_head", "heads": (4, 1)}, STEADY,
    {"phase": "k", "omega_heads": 2},
]  # fmt: skip


@parametrize_each("changes state cut", CAUSAL, [False, True], CUTS, fixtures=["cut"])
def test_causal(changes, state, cut):
    holds(LinearCase(mask="causal", state=state, return_state=state, **{"act": "softplus", "norm": "layer", **changes}))


@pytest.mark.parametrize("lengths", [(5, 0, 9, 1, 17)])
def test_packed_sequences(lengths, cut):
    holds(LinearCase(shape=(31,), cu_seqlens=lengths, batch=1, state=True, return_state=True, norm="rms"))


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
    holds(LinearCase(shape=(2, 4), norm=kind, norm_over="heads", **{"act": "softplus", **changes}))


def test_gated_tokens_leave_the_weights_alone(cut):
    """Whatever they hold."""
    clean, dirty = (
        run_linear(make_linear_inputs(LinearCase(norm="layer", gate=gate, act="softplus")), "triton")
        for gate in ("float", "nan")
    )
    for name, t in dirty.items():
        assert t.isfinite().all(), name
        if name.startswith(("dweight", "dbias")):
            assert torch.equal(t, clean[name]), name


def test_deterministic(cut):
    inputs = make_linear_inputs(LinearCase("rotate", (6, 7), norm="layer", mask="causal"))
    first, second = run_linear(inputs, "triton"), run_linear(inputs, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("over", ["head", "heads"])
def test_gradients_of_weights_alone(over):
    """q, k, v, ω and what else has none: dγ nevertheless, of one weight for q and k as of two."""
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
