"""A norm before a map: the reference, errors, modules."""

import math

import pytest
import torch
from lrpe_md.scripts.common.cases import Case, bind, make_inputs
from torch import nn

from lrpe_md import Coordinates as Coords
from lrpe_md import CosineMd, Grid, Norm, Rotate1d, RotateMd, cosine, rotate

B, H, N, D = 2, 4, 13, 16
GRID = Grid((3, 4), prefix=1)
OMEGA = torch.randn(1, D // 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
both = pytest.mark.parametrize("over", ["head", "heads"])


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size)), dtype=torch.float64)


Q, K = normal(B, H, N, D), normal(B, 2, N, D)


def test_norm_equals_torchs_norm_before_the_map():
    weight, bias = normal(D), normal(D, seed=1)
    options = {"omega": OMEGA, "positions": GRID}
    for kind, expected in (
        ("rms", nn.functional.rms_norm(Q, (D,), weight, 1e-3)),
        ("layer", nn.functional.layer_norm(Q, (D,), weight, bias, 1e-3)),
    ):
        norm = Norm(kind, weight, bias if kind == "layer" else None, eps=1e-3)
        torch.testing.assert_close(rotate(Q, norm=norm, **options), rotate(expected, **options))


def test_norm_over_heads_equals_that_of_the_projection():
    weight = normal(H * D)
    flat = nn.functional.rms_norm(Q.transpose(1, 2).flatten(2), (H * D,), weight, 1e-6)
    expected = rotate(flat.unflatten(2, (H, D)).transpose(1, 2), omega=OMEGA, positions=GRID)
    found = rotate(Q, omega=OMEGA, positions=GRID, norm=Norm(weight=weight.view(H, D), over="heads"))
    torch.testing.assert_close(found, expected)


@both
def test_groups_of_tokens_equal_separate_calls(over):
    grid, omega = Grid((2, 3), prefix=4, suffix=3), OMEGA
    weight = normal(3, H, D) if over == "heads" else normal(3, 1, D)
    found = rotate(Q, omega=omega, positions=grid, norm=Norm(weight=weight, over=over))
    for rows, part in zip((slice(4), slice(4, 10), slice(10, None)), weight, strict=True):
        own = part if over == "heads" else part[0]
        expected = rotate(Q, omega=omega, positions=grid, norm=Norm(weight=own, over=over))
        assert torch.equal(found[:, :, rows], expected[:, :, rows])


@pytest.mark.slow
@both
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("change", [{}, {"norm_groups": 3, "suffix": 2}, {"norm_weight": "by_head", "act": "silu"}])
def test_gradcheck(kind, over, change):
    case = Case("rotate", (2, 2), norm=kind, norm_over=over, dtype=torch.float64, head_dim=8, batch=1, **change)
    inputs = make_inputs(case)
    leaves = [t.detach().requires_grad_() for t in (*inputs.xs, inputs.omega.double(), *inputs.weights.values())]
    forward = bind(inputs, "reference")

    def f(q, k, omega, *weights):
        return forward([q, k], omega, None, weights)

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


def test_gemma_offset():
    weight = normal(D)
    expected = rotate(Q, omega=OMEGA, positions=GRID, norm=Norm(weight=weight + 1))
    torch.testing.assert_close(rotate(Q, omega=OMEGA, positions=GRID, norm=Norm(weight=weight, offset=1)), expected)


def test_part_of_the_channels_of_the_cosine_map():
    norm, omega = Norm("layer", normal(D), normal(D, seed=2)), normal(1, 6, 2)
    expected = nn.functional.layer_norm(Q, (D,), norm.weight, norm.bias, norm.eps)
    options = {"omega": omega, "positions": GRID, "rotary_dim": slice(4, 10), "act": "silu"}
    torch.testing.assert_close(cosine(Q, norm=norm, **options), cosine(expected, **options))


ERRORS = {
    "no norm": (TypeError, r"norm: expected an lrpe_md.Norm, got str; pass Norm\(\"rms\"\)", lambda: "rms"),
    "a module": (
        TypeError, r"norm: expected an lrpe_md.Norm, got RMSNorm; pass Norm\(kind, module.weight, eps=module.eps\)$",
        lambda: nn.RMSNorm(D),
    ),
    "another kind": (ValueError, r"norm\.kind: expected one of \('rms', 'layer'\), got 'batch'", lambda: Norm("batch")),
    "over tokens": (ValueError, r"norm\.over: expected one of", lambda: Norm(over="tokens")),
    "no eps": (ValueError, r"norm\.eps: expected a finite positive number", lambda: Norm(eps=0.0)),
    "infinite eps": (ValueError, r"norm\.eps", lambda: Norm(eps=float("inf"))),
    "eps true": (TypeError, r"norm\.eps: expected a number, got bool", lambda: Norm(eps=True)),
    "a bias of rms": (ValueError, r"norm\.bias: expected None for kind='rms'", lambda: Norm(bias=torch.ones(D))),
    "an infinite offset": (
        ValueError, r"norm\.offset: expected a finite number, got inf", lambda: Norm(weight=normal(D), offset=math.inf),
    ),
    "an offset of NaN": (
        ValueError, r"norm\.offset: expected a finite number, got nan", lambda: Norm(weight=normal(D), offset=math.nan),
    ),
    "an offset of nothing": (ValueError, r"norm\.offset: expected 0 without a weight", lambda: Norm(offset=1.0)),
    "three weights": (
        ValueError, r"norm\.weight: expected a pair \(for q, for k\), got 3 values", lambda: Norm(weight=(Q, Q, Q)),
    ),
    "one of two": (TypeError, r"norm\.weight: .* a tuple that contains None", lambda: Norm(weight=(normal(D), None))),
    "a list": (TypeError, r"norm\.weight.*\(of q\): expected a tensor", lambda: Norm(weight=[1.0])),
    "another width": (
        ValueError, r"norm\.weight\[0\] \(of q\): expected shape \(D,\).* with H = 4 and D = 16 .* got \(8,\)",
        lambda: Norm(weight=torch.ones(8)),
    ),
    "k's heads": (
        ValueError, r"norm\.weight\[1\] \(of k\): .* H = 2 .* got \(4, 16\)", lambda: Norm(weight=torch.ones(H, D)),
    ),
    "a head's weight over all heads": (
        ValueError, r"norm\.weight.*over all heads, got \(16,\)", lambda: Norm(weight=torch.ones(D), over="heads"),
    ),
    "four groups": (ValueError, r"norm\.weight", lambda: Norm(weight=torch.ones(4, 1, D))),
    "whole numbers": (TypeError, r"norm\.weight.*int64", lambda: Norm(weight=torch.ones(D, dtype=torch.int64))),
    "another device": (ValueError, r"norm\.weight.*x's device cpu", lambda: Norm(weight=torch.ones(D, device="meta"))),
    "forms that differ": (
        ValueError, r"norm\.bias.*expected the same shape and dtype as the norm's other tensors",
        lambda: Norm("layer", torch.ones(D), torch.ones(D, dtype=torch.float64)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_one_clear_error(name):
    kind, match, make = ERRORS[name]
    with pytest.raises(kind, match=match):
        rotate(Q, K, omega=OMEGA, positions=GRID, norm=make())


def test_errors_of_a_call():
    with pytest.raises(ValueError, match=r"norm\.weight: expected one value for one tensor, got 2 values"):
        rotate(Q, omega=OMEGA, positions=GRID, norm=Norm(weight=(normal(D), normal(D))))
    with pytest.raises(ValueError, match=r"norm: expected None with a softmax over the sequence"):
        rotate(Q, omega=OMEGA, positions=GRID, act="softmax", dim=-2, norm=Norm())
    with pytest.raises(ValueError, match=r"norm\.weight: expected 3 groups of tokens.* suffix"):
        rotate(Q, omega=OMEGA, positions=Grid((3, 2), 3, 4), norm=Norm(weight=torch.ones(2, 1, D)))


@pytest.mark.parametrize("make", [RotateMd, CosineMd])
def test_modules(make):
    module, norm = make(D, 2), Norm(weight=(normal(D), normal(D, seed=3)))
    function = rotate if make is RotateMd else cosine
    expected = function(Q, K, omega=module.get_omega(), positions=GRID, norm=norm)
    for a, b in zip(module(Q, K, positions=GRID, norm=norm), expected, strict=True):
        assert torch.equal(a, b)
    packed = torch.cat([Q.transpose(1, 2), K.transpose(1, 2), K.transpose(1, 2)], dim=2)
    q, k, _ = module(qkv=packed, num_key_heads=2, positions=GRID, norm=norm)
    assert torch.equal(q.transpose(1, 2), expected[0])
    assert torch.equal(k.transpose(1, 2), expected[1])


def test_repr():
    module, norm = Rotate1d(D), Norm(weight=normal(D))
    expected = module(Q, K, offset=3, norm=norm)
    again = rotate(Q, K, omega=module.get_omega(), positions=Grid((N,), origin=torch.tensor([3])), norm=norm)
    for a, b in zip(expected, again, strict=True):
        torch.testing.assert_close(a, b)
    xpos = Rotate1d(D, scale_base=512.0)
    normed = [nn.functional.rms_norm(x, (D,), norm.weight, norm.eps) for x in (Q, K)]
    for a, b in zip(xpos(Q, K, norm=norm), xpos(*normed), strict=True):
        torch.testing.assert_close(a, b)


@both
def test_separate_positions_of_q_and_k(over):
    weights = (normal(H, D), normal(2, D)) if over == "heads" else (normal(D), normal(D, seed=4))
    norm, table = Norm(weight=weights, over=over), Coords(normal(N, 2))
    q, k = rotate(Q, K, omega=OMEGA, positions=(GRID, table), norm=norm)
    for y, x, where, weight in ((q, Q, GRID, weights[0]), (k, K, table, weights[1])):
        assert torch.equal(y, rotate(x, omega=OMEGA, positions=where, norm=Norm(weight=weight, over=over)))


def test_linear_attention_with_norm():
    norm = Norm()
    for module, where in ((RotateMd(D, 2), {"positions": GRID}), (Rotate1d(D), {})):
        description, q, k = module(Q, K, norm=norm, attend=lambda *args: args, **where)
        assert description.norm is norm
        assert q is Q
        assert k is K
