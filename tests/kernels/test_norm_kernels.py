"""Compare maps after a norm with float64 in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from lrpe_md.scripts.common.cases import Case, check, make_inputs, run
from parametrizing import ACTS, parametrize_each

from lrpe_md import Grid, Norm, rotate
from lrpe_md.engine.core import launching
from lrpe_md.engine.encode import launch
from lrpe_md.engine.encode import plan as plans

pytestmark = pytest.mark.sampled
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OVER, KINDS = ("head", "heads"), ("rms", "layer")
# Over all heads the interpreter processes tokens one by one. There are few, but more than the 16 of both samples that
# are summed at a time.
SHAPES = {"head": (3, 5), "heads": (2, 4)}
both = pytest.mark.parametrize("over", OVER)
kinds = pytest.mark.parametrize("kind", KINDS)


def violations(case: Case, **kwargs) -> list[str]:
    # The interpreter truncates instead of rounding to bfloat16.
    ulps = 1.0 if case.dtype == torch.bfloat16 and launching.INTERPRETING else 0.0
    return [str(v) for v in check(case, ulps=ulps, **kwargs)]


@pytest.fixture(autouse=True)
def fill_with_nan(nan_filled):
    assert torch.empty(3).isnan().all()


@parametrize_each("chosen over kind map", [each for each in ACTS if each[1] != -2], OVER, KINDS, ("cosine", "rotate"))
def test_activations(chosen, over, kind, map):
    act, dim = chosen
    case = Case(map, SHAPES[over], act=act, dim=dim, norm=kind, norm_over=over, head_dim=24, phase=True)
    assert not violations(case)


@parametrize_each("dtype over kind", DTYPES, OVER, KINDS)
def test_dtypes(dtype, over, kind):
    case = Case("rotate", (5, 7) if over == "head" else (3, 5), norm=kind, norm_over=over, dtype=dtype)
    assert not violations(case)
    if dtype.itemsize == 2:
        assert not violations(replace(case, norm_dtype=torch.float32))
    if dtype == torch.float64:
        assert not violations(replace(case, head_dim=12)), "fails for a width whose reciprocal is not exact in float32"


@both
@pytest.mark.parametrize("head_dim", [24, 64, 72, 80, 96, 128, 256])
def test_widths(head_dim, over):
    for kind, map in (("rms", "rotate"), ("layer", "cosine")):
        assert not violations(Case(map, (2, 3), norm=kind, norm_over=over, head_dim=head_dim))


@kinds
def test_over_5120_channels(kind):
    assert not violations(Case("rotate", (2, 2), batch=1, heads=(40, 8), head_dim=128, norm=kind, norm_over="heads"))


CHANGES = [
    {"norm_weight": "none"},
    {"norm_weight": "by_head"},
    {"norm_bias": False},
    {"offset": 1.0, "eps": 1e-2},
    {"zero_rows": True},
    {"norm_groups": 2, "prefix": 3},
    {"norm_groups": 3, "prefix": 2, "suffix": 3},
    {"norm_groups": 3, "prefix": 2, "suffix": 3, "norm_weight": "by_head", "shape": (2, 4), "start": 1, "length": 10},
    {"heads": (3,), "norm_groups": 2},
    {"heads": (6, 2), "omega_heads": 2},
    {"heads": (6, 1), "omega_heads": 1, "norm_weight": "by_head"},
    {"heads": (4, 4), "omega_heads": 4, "phase": True, "amplitude_heads": 4},
    {"coords": "by_sample", "phase": True, "masked": True, "batch": 3},
    {"coords": "shared", "suffix": 2, "norm_groups": 3},
    {"origin": "by_sample", "heads": (4, 4), "batch": 3},
    {"layout": "packed", "grad_layout": "bnhd", "heads": (4, 4)},
    {"layout": "odd", "grad_layout": "odd"},
    {"grad_layout": "expanded"},
    {"batch": 0},
    {"shape": (0,), "prefix": 3},
]


@parametrize_each("change over kind", CHANGES, OVER, KINDS)
def test_weights_positions_and_strides(change, over, kind):
    case = Case("rotate", **{"shape": SHAPES[over], "norm": kind, "norm_over": over, **change})
    assert not violations(case)
    if kind == "layer":  # a layer norm has all kinds of weights
        assert not violations(case, frequencies=False)


@pytest.mark.parametrize("pairs", ["half", "interleaved", (3, 5)])
@parametrize_each("rotary_dim over kind", [None, slice(3, 13)], OVER, KINDS)
def test_pairs_and_partial_rotation(pairs, rotary_dim, over, kind):
    if rotary_dim and pairs == (3, 5):
        pairs = (2, 3)
    assert not violations(
        Case("rotate", SHAPES[over], pairs=pairs, rotary_dim=rotary_dim, norm=kind, norm_over=over, act="silu")
    )


def test_rows_of_zeros_stay_zero():
    found = run(make_inputs(Case("rotate", norm="rms", zero_rows=True)), "triton")
    for name, t in found.items():
        assert t.isfinite().all(), name
    assert not found["y0"][:, :, ::3].any()


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@both
def test_rows_of_equal_channels_become_zero(over, dtype, impl):
    """The rounding error of the mean is divided by sqrt(eps), which is equally small. torch does the same."""
    heads, head_dim = 3, 72
    generator = torch.Generator().manual_seed(0)
    level = torch.randn(8 if over == "heads" else 64, generator=generator, dtype=torch.float64).mul(1e5).to(dtype)
    x = level[:, None].expand(1, heads, -1, head_dim)
    scale = torch.rand(heads, head_dim, generator=generator).to(dtype)
    norm = Norm("layer", scale, scale + 1, over=over)
    omega = torch.zeros(1, head_dim // 2, 1)
    y = rotate(x, omega=omega, positions=Grid((len(level),)), norm=norm, impl=impl)
    assert torch.equal(y, (scale + 1)[None, :, None].expand_as(y)), "expected only β"
    if over == "head":
        assert torch.equal(y, torch.nn.functional.layer_norm(x, (head_dim,)) * scale[:, None] + (scale + 1)[:, None])


CUTS = {
    "token loop": plans.Plan(2, 8, 4, None, 1, False, 1, 2),
    "parts": plans.Plan(1, 8, 4, None, 1, False, 3, 1),
    "a block shared": plans.Plan(2, 8, 4, None, 1, False, 2, 2),
}


@pytest.mark.parametrize("coords", ["grid", "by_sample"])
@pytest.mark.parametrize("name", CUTS)
def test_every_work_partition(monkeypatch, count_launches, coords, name):
    """Programs share weights between their rows, some of q and some of k."""
    cut = CUTS[name]

    def plan(work: plans.Work) -> plans.Plan:
        one_tile = cut._replace(token_programs=-(-work.num_tokens // cut.block_n), rows_per_program=cut.block_r)
        return cut if work.stage is plans.Pass.DOMEGA else one_tile

    monkeypatch.setattr(launch, "plan", plan)
    assert not violations(Case("rotate", (3, 6), coords=coords, batch=3, heads=(4, 2), head_dim=8, norm="layer"))


@pytest.mark.parametrize("token_blocks", [1, 7, 300])
@pytest.mark.parametrize(("heads", "groups", "batch"), [((40, 40), 1, 1), ((32, 8), 1, 4), ((12, 12), 12, 16)])
def test_parts_share_weights(token_blocks, heads, groups, batch):
    group0, group1 = (h // groups for h in heads)
    work = plans.Work(
        "rotate", plans.Pass.DOMEGA, False, token_blocks, groups, (group0 + group1) * batch, group0 + group1, 128, 2,
        rows_per_weight=torch.tensor([group0, group1]).gcd(torch.tensor(group0)).min().item(),
    )  # fmt: skip
    chosen = plans.plan(work)
    assert group0 % chosen.rows_per_program == group1 % chosen.rows_per_program == 0
    assert chosen.rows_per_program % chosen.block_r == 0


@both
def test_only_weights_require_gradients(over):
    """dγ is computed if neither x nor ω requires a gradient."""
    inputs = make_inputs(Case("rotate", norm="layer", norm_over=over))
    from lrpe_md.scripts.common.cases import bind

    weights = [t.requires_grad_() for t in inputs.weights.values()]
    expected, found = (
        torch.autograd.grad(bind(inputs, impl)(inputs.xs, inputs.omega, None, weights), weights, inputs.grads)
        for impl in ("reference", "triton")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@both
def test_deterministic(over):
    inputs = make_inputs(Case("rotate", (6, 7), norm="rms", norm_over=over))
    first, second = run(inputs, "triton"), run(inputs, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)
