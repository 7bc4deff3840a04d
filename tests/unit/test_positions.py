"""Grids, coordinates, frequencies, and their invariants."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpe_md import Coordinates, Grid, axial_omega, cosine, geometric_theta, rotate
from lrpe_md.frequencies import mixed_omega

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def test_document_example():
    """s = 5 on (n_2, n_1) = (3, 2) is (s_2, s_1) = (2, 1)."""
    assert Grid((3, 2)).coordinates()[5].tolist() == [2, 1]


@given(sizes, st.integers(0, 3), st.integers(0, 3))
def test_coordinates_are_row_major(shape, prefix, suffix):
    coords = Grid(shape, prefix=prefix, suffix=suffix).coordinates()
    expected = torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape))
    assert torch.equal(coords[prefix : prefix + math.prod(shape)], expected.double())
    assert coords[:prefix].abs().sum() == 0
    assert coords[prefix + math.prod(shape) :].abs().sum() == 0


@given(sizes, st.data())
@settings(max_examples=40)
def test_a_shard_is_a_slice(shape, data):
    whole = Grid(shape, prefix=2, suffix=1, scale=0.5, shift=2.0)
    start = data.draw(st.integers(0, whole.total))
    length = data.draw(st.integers(0, whole.total - start))
    shard = Grid(shape, prefix=2, suffix=1, scale=0.5, shift=2.0, start=start, length=length)
    assert torch.equal(shard.coordinates(), whole.coordinates()[start : start + length])
    x = torch.randn(1, 1, whole.total, 6, dtype=torch.float64)
    omega = torch.randn(1, 3, len(shape), dtype=torch.float64)
    phase = torch.randn(1, 3, dtype=torch.float64)
    y = rotate(x, omega=omega, positions=whole, phase=phase)[:, :, start : start + length]
    part = rotate(x[:, :, start : start + length], omega=omega, positions=shard, phase=phase)
    torch.testing.assert_close(part, y)


def test_scale_and_shift():
    grid = Grid((3, 4), scale=(2, 0.5), shift=(-1, 0))
    expected = Grid((3, 4)).coordinates() * torch.tensor([2, 0.5]) + torch.tensor([-1.0, 0])
    assert torch.equal(grid.coordinates(), expected.double())
    tensor = Grid((3, 4), scale=torch.tensor([2, 0.5]), shift=torch.tensor([-1.0, 0]))
    assert torch.equal(tensor.coordinates(), expected.double())
    assert torch.equal(Grid((3, 4), scale=3.0).coordinates(), 3 * Grid((3, 4)).coordinates())
    assert torch.equal(Grid((3,), shift=torch.tensor(2.0)).coordinates(), Grid((3,)).coordinates() + 2)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("map", [cosine, rotate])
def test_explicit_coordinates_equal_the_grid(map, impl):
    grid = Grid((3, 4), prefix=2, suffix=1, scale=(0.3, 1.7))
    x = torch.randn(2, 4, 15, 8)
    omega = torch.randn(2, 8 if map is cosine else 4, 2)
    phase = torch.randn(2, 8 if map is cosine else 4)
    expected = map(x, omega=omega, positions=grid, phase=phase, impl=impl)
    coords = grid.coordinates()[2:-1]
    for c in (coords, coords.expand(2, -1, -1)):
        y = map(x, omega=omega, positions=Coordinates(c, prefix=2, suffix=1), phase=phase, impl=impl)
        torch.testing.assert_close(y, expected)
    # A tensor of coordinates covers every token.
    y = map(x, omega=omega, positions=grid.coordinates(), impl=impl)
    torch.testing.assert_close(y, map(x, omega=omega, positions=grid, impl=impl))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("map", [cosine, rotate])
@pytest.mark.parametrize("omega_kind", ["axial", "mixed"])
def test_scores_only_depend_on_relative_positions(map, impl, omega_kind):
    channels = 8 if map is cosine else 4
    omega = axial_omega(geometric_theta(4), channels, 2) if omega_kind == "axial" else mixed_omega(channels, 2)
    q = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 30, 8)
    k = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 30, 8)
    q, k = map(q, k, omega=omega, positions=Grid((5, 6)), impl=impl)
    scores = (q @ k.mT)[0, 0].reshape(5, 6, 5, 6)
    torch.testing.assert_close(scores[:4, :5, :4, :5], scores[1:, 1:, 1:, 1:])
    assert scores.std() > 1e-3


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_rotation_by_minus_theta_inverts(impl, pairs):
    x, omega = torch.randn(2, 3, 12, 8, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64)
    y = rotate(x, omega=omega, positions=Grid((3, 4)), pairs=pairs, impl=impl)
    back = rotate(y, omega=-omega, positions=Grid((3, 4)), pairs=pairs, impl=impl)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_pair_layouts_convert_into_each_other(impl):
    x, omega = torch.randn(2, 3, 12, 8), torch.randn(1, 4, 2)
    interleaved = rotate(x, omega=omega, positions=Grid((3, 4)), pairs="interleaved", impl=impl)

    def to_half(t):
        return torch.cat([t[..., 0::2], t[..., 1::2]], dim=-1)

    half = rotate(to_half(x), omega=omega, positions=Grid((3, 4)), pairs="half", impl=impl)
    assert torch.equal(half, to_half(interleaved))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_query_heads_share_their_key_heads_frequencies(impl):
    q, omega = torch.randn(1, 6, 9, 8), torch.randn(3, 8, 1)
    y = cosine(q, omega=omega, positions=Grid((9,)), impl=impl)
    expected = cosine(q, omega=omega.repeat_interleave(2, 0), positions=Grid((9,)), impl=impl)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("map", [cosine, rotate])
def test_prefix_is_not_rotated(map, impl):
    x = torch.randn(1, 2, 14, 8)
    channels = 8 if map is cosine else 4
    y = map(
        x, omega=torch.randn(1, channels, 2), phase=torch.randn(1, channels), positions=Grid((3, 4), 1, 1), impl=impl
    )
    for t in (0, 13):
        assert torch.equal(y[:, :, t, :8], x[:, :, t])
        if map is cosine:
            assert y[:, :, t, 8:].abs().max() == 0


# --- frequencies -----------------------------------------------------------------------------------------


def test_geometric_theta():
    assert torch.equal(geometric_theta(2, 100.0), torch.tensor([1.0, 0.1], dtype=torch.float64))
    assert geometric_theta(4, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(("axis_order", "axes"), [("minor_first", [1, 1, 0, 0]), ("major_first", [0, 0, 1, 1])])
def test_axial_blocks(axis_order, axes):
    omega = axial_omega(torch.tensor([1.0, 0.5]), 4, 2, axis_order=axis_order)
    assert omega.shape == (1, 4, 2)
    for c, axis in enumerate(axes):
        assert omega[0, c, axis] == [1, 0.5][c % 2]
        assert omega[0, c, 1 - axis] == 0


def test_axial_truncation_and_unequal_splits():
    omega = axial_omega(geometric_theta(3), 8, 3)
    assert (omega != 0).sum(1).tolist() == [[2, 3, 3]]  # the last block, of the slowest axis, is truncated
    thetas = [geometric_theta(n) for n in (1, 2, 5)]
    omega = axial_omega(thetas, 8, 3, axis_order="major_first")
    assert (omega != 0).sum(1).tolist() == [[1, 2, 5]]
    assert torch.equal(omega[0, 3:, 2], thetas[2])
    per_head = axial_omega([torch.rand(4, 3), torch.rand(2)], 5, 2)
    assert per_head.shape == (4, 5, 2)


def test_axial_is_differentiable():
    theta = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: axial_omega(t, 5, 2), (theta,))


def test_mixed_directions():
    omega = mixed_omega(8, 2, 3, base=10.0, generator=torch.Generator().manual_seed(0))
    assert omega.shape == (3, 8, 2)
    magnitude = omega.norm(dim=-1)
    torch.testing.assert_close(magnitude, geometric_theta(4, 10.0).repeat(2).expand(3, 8))
    # the two blocks of a head have orthogonal directions
    torch.testing.assert_close((omega[:, :4] * omega[:, 4:]).sum(-1), torch.zeros(3, 4, dtype=torch.float64))
    assert not torch.allclose(omega[0], omega[1])
    again = mixed_omega(8, 2, 3, base=10.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(omega, again)
    assert mixed_omega(7, 3).shape == (1, 7, 3)


@pytest.mark.parametrize("map", ["cosine", "rotate"])
@pytest.mark.parametrize("value", [1.5, torch.tensor(1.5), torch.linspace(1, 2, 4), torch.rand(2, 4) + 1])
def test_amplitude_scales_tokens_of_the_grid(map, value):
    """Prefix and suffix are not scaled."""
    x = torch.randn(2, 2, 9, 4 if map == "cosine" else 8)
    call, grid = {"cosine": cosine, "rotate": rotate}[map], Grid((2, 3), prefix=2, suffix=1)
    omega = torch.rand(1, 4, 2)
    plain = call(x, omega=omega, positions=grid)
    scaled = call(x, omega=omega, positions=grid, amplitude=value)
    gain = torch.as_tensor(value).broadcast_to(2, 4).repeat(1, 2)
    torch.testing.assert_close(scaled[:, :, 2:8], plain[:, :, 2:8] * gain[:, None])
    assert torch.equal(scaled[:, :, [0, 1, 8]], plain[:, :, [0, 1, 8]])


def test_amplitude_of_one_has_no_effect():
    x, omega = torch.randn(1, 2, 6, 4), torch.rand(1, 4, 2)
    plain = cosine(x, omega=omega, positions=Grid((2, 3)))
    assert torch.equal(cosine(x, omega=omega, positions=Grid((2, 3)), amplitude=1.0), plain)


def test_amplitude_gets_a_gradient_from_the_reference():
    x, omega = torch.randn(1, 2, 6, 4, dtype=torch.float64), torch.rand(1, 4, 2, dtype=torch.float64)
    amplitude = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: cosine(x, omega=omega, positions=Grid((2, 3)), amplitude=a), amplitude)


def test_sine_first():
    x, omega = torch.randn(1, 2, 6, 4), torch.rand(1, 4, 2)
    cos, sin = cosine(x, omega=omega, positions=Grid((2, 3))).chunk(2, dim=-1)
    found = cosine(x, omega=omega, positions=Grid((2, 3)), order="sin_cos")
    assert torch.equal(found, torch.cat([sin, cos], dim=-1))


def test_pairs_within_blocks():
    """Each block uses the half layout like a separate head."""
    x, omega = torch.randn(2, 3, 6, 20), torch.rand(3, 8, 2)
    found = rotate(x, omega=omega, positions=Grid((2, 3)), pairs=(3, 5), rotary_dim=slice(2, 18))
    blocks = [
        rotate(x[..., 2:8], omega=omega[:, :3], positions=Grid((2, 3))),
        rotate(x[..., 8:18], omega=omega[:, 3:], positions=Grid((2, 3))),
    ]
    assert torch.equal(found, torch.cat([x[..., :2], *blocks, x[..., 18:]], dim=-1))
    one, half = (
        rotate(x, omega=torch.rand(1, 10, 2).fill_(0.3), positions=Grid((2, 3)), pairs=p) for p in ([10], "half")
    )
    assert torch.equal(one, half)


def test_separate_positions_and_phases_for_q_and_k():
    """Cross-attention has different tokens for q and k, and a different number of them."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 5, 8)
    omega, phase = torch.rand(2, 4, 2), torch.rand(2, 4)
    where = Grid((2, 3)), Coordinates(torch.randn(4, 2), prefix=1)
    found = rotate(q, k, omega=omega, positions=where, phase=(None, phase))
    assert torch.equal(found[0], rotate(q, omega=omega, positions=where[0]))
    assert torch.equal(found[1], rotate(k, omega=omega, positions=where[1], phase=phase))
    both = rotate(q, q, omega=omega, positions=where[0], phase=(None, phase))
    assert torch.equal(both[1], rotate(q, omega=omega, positions=where[0], phase=phase))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_masked_rows_are_like_a_prefix(map, prefix):
    x = torch.randn(2, 2, 6 + prefix, 4 if map == "cosine" else 8)
    call, mask = {"cosine": cosine, "rotate": rotate}[map], torch.tensor([True, False, True, True, False, True])
    coords, omega, phase = torch.randn(6, 2), torch.rand(2, 4, 2), torch.rand(2, 4)
    options = {"omega": omega, "phase": phase, "amplitude": torch.rand(4) + 1}
    found = call(x, positions=Coordinates(coords, prefix=prefix, rotated=mask), **options)
    rotated = call(x, positions=Coordinates(coords, prefix=prefix), **options)
    still = call(x, positions=Grid((1, 0), prefix=6 + prefix), **options)
    mask = torch.cat([torch.ones(prefix, dtype=torch.bool), mask])
    assert torch.equal(found, torch.where(mask[:, None], rotated, still))
