"""Accuracy of the reference's angles, for positions of every dtype."""

import math
from dataclasses import replace

import pytest
import torch

from lrpe_md import Coordinates, Grid, Rotate1d, cosine, rotate
from lrpe_md.reference import Spec, encode
from lrpe_md.testing import budget_violation, rounded_angles


def _cos_sin(positions, omega, num_tokens, **options):
    """Return cos Θ and sin Θ, (N, C) each, by rotating (1, 0)."""
    x = torch.tensor([1.0, 0.0]).repeat_interleave(omega.shape[1]).expand(1, 1, num_tokens, -1)
    return rotate(x, omega=omega, positions=positions, impl="reference", **options)[0, 0].chunk(2, dim=-1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16])
def test_integer_coordinates_are_exact(dtype):
    top = min(torch.iinfo(dtype).max, 2**24 + 1)
    coords = torch.tensor([[top], [top - 1]]).to(dtype)
    omega = torch.tensor([[[1.0], [0.3]]])
    cos, sin = _cos_sin(coords, omega, 2)
    expected = torch.tensor([[top], [top - 1]]).double() @ omega[0].double().mT
    torch.testing.assert_close(cos.double(), expected.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), expected.sin(), rtol=0, atol=1e-6)
    mask = torch.tensor([True, False])
    cos, _ = _cos_sin(Coordinates(coords, prefix=1, suffix=1, rotated=mask), omega, 4)
    torch.testing.assert_close(
        cos.double(), torch.stack([torch.ones(2), expected[0].cos(), *torch.ones(2, 2)]).double()
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64]
)
def test_low_precision_coordinates_are_refused(dtype):
    coords = torch.zeros(3, 2).to(dtype)
    message = f"coords: expected .*, got {dtype}"
    with pytest.raises(TypeError, match=message):
        Coordinates(coords)
    with pytest.raises(TypeError, match=message):
        cosine(torch.zeros(1, 1, 3, 4), omega=torch.zeros(1, 4, 2), positions=coords)


PLAIN = {"one axis": ((2**20,), 0), "two axes": ((1024, 1025), 3), "three": ((64, 128, 129), 1)}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("phase", [None, 2.5])
def test_far_tokens_of_a_plain_grid(name, phase):
    """Angles at 2^20 are exact to 1e-6 and equal those of a table."""
    shape, prefix = PLAIN[name]
    grid = Grid(shape, prefix=prefix)
    end = replace(grid, start=grid.total - 16)
    omega = torch.linspace(0.1, 1, 4)[None, :, None] * torch.linspace(1, 0.3, len(shape))
    phi = None if phase is None else torch.full((1, 4), phase)
    theta = (end.coordinates() @ omega[0].double().mT) + (phase or 0.0)
    for positions in (end, end.coordinates().float(), end.coordinates(), replace(end, scale=1.0)):
        cos, sin = _cos_sin(positions, omega, 16, phase=phi)
        torch.testing.assert_close(cos.double(), theta.cos(), rtol=0, atol=1e-6)
        torch.testing.assert_close(sin.double(), theta.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("learnable", [False, True])
def test_decoding_equals_the_whole_pass(learnable):
    """If the last of 8,192 tokens are encoded at an offset, their values and gradients are the same."""
    rope, x = Rotate1d(64, learnable=learnable), torch.randn(1, 2, 8192, 64, requires_grad=True)
    whole, tail = rope(x)[:, :, -16:], rope(x[:, :, -16:], offset=8176)
    torch.testing.assert_close(whole, tail, rtol=0, atol=1e-6)
    dy = torch.randn_like(tail)
    leaves = (x, rope.log_theta) if learnable else (x,)
    for a, b in zip(*(torch.autograd.grad(y, leaves, dy) for y in (whole, tail)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_gradients_of_far_tokens_are_exact(map):
    """The reference computes dω and dφ in float64. A float32 sum would round each product to 7 digits."""
    grid = Grid((2**20,), start=2**20 - 64)
    s, x = grid.coordinates(), torch.randn(1, 1, 64, 8)
    omega, phase = torch.rand(1, 8 if map == "cosine" else 4, 1), torch.rand(1, 8 if map == "cosine" else 4)
    spec = Spec(map, num_channels=omega.shape[1])
    dy = torch.randn(1, 1, 64, spec.out_dim(8))
    leaves = [omega.double().requires_grad_(), phase.double().requires_grad_()]
    y = encode(spec, x.double(), s, None, *leaves)
    exact = torch.autograd.grad(y, leaves, dy.double())
    for positions in (s, s.float()):
        leaves32 = [t.clone().requires_grad_() for t in (omega, phase)]
        for a, b in zip(
            torch.autograd.grad(encode(spec, x, positions, None, *leaves32), leaves32, dy), exact, strict=True
        ):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=5e-6 * b.abs().max().item())


def test_budget_is_based_on_float32_angles():
    """The error budget comes from angles and gradient sums in the dtype of their inputs."""
    grid = Grid((3000,))
    x, omega = torch.randn(1, 1, 3000, 8), torch.rand(1, 4, 1)
    exact = rotate(x.double(), omega=omega.double(), positions=grid, impl="reference")
    error = {"exact angles": rotate(x, omega=omega, positions=grid, impl="reference") - exact}
    with rounded_angles():
        error["rounded angles"] = rotate(x, omega=omega, positions=grid, impl="reference") - exact
        table = rotate(x, omega=omega, positions=grid.coordinates().float(), impl="reference")
        torch.testing.assert_close(table - exact, error["rounded angles"])
        of_whole_numbers = rotate(x, omega=omega, positions=grid.coordinates().long(), impl="reference")
        torch.testing.assert_close(of_whole_numbers - exact, error["exact angles"])
    assert error["rounded angles"].square().mean() > 100 * error["exact angles"].square().mean()
    again = rotate(x, omega=omega, positions=grid, impl="reference") - exact
    assert torch.equal(again, error["exact angles"])


def test_budget_of_a_scalar():
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert budget_violation("y", one, one, one.double()) is None
    assert budget_violation("y", two, one, one.double()) is not None


def test_budget_needs_a_reference_of_the_same_shape():
    ones = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="y"):
        budget_violation("y", ones, ones[0], ones.double())


def test_budget_if_the_reference_overflows():
    """An overflow of the reference allows no other value, and an overflow of the exact result is no error."""
    exact = torch.tensor([1e6, 1.0, 100.0], dtype=torch.float64)
    right, reference = torch.tensor([math.inf, 1.0, 100.0]).half(), torch.tensor([math.inf, 1.0, math.inf]).half()
    assert budget_violation("y", right, reference, exact) is None
    for i, wrong in ((0, 3.0), (0, -math.inf), (1, 5.0), (2, math.inf), (2, math.nan)):
        actual = right.clone()
        actual[i] = wrong
        assert budget_violation("y", actual, reference, exact) is not None
