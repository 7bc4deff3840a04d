"""The replacements in docs/your-own-code-base.md give the same results as the code that they replace."""

import pytest
import torch

from lrpe_md import Coordinates, Grid, PresetMd, Rotate1d, pad, rotate


def turn_complex(x, angles):
    """Rotate x (..., N, D) by angles (..., N, D/2), in the interleaved layout, with ``view_as_complex``."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def series(dim, theta=1e4):
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def assert_equal(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_wan_with_sizes_by_sample():
    x = torch.randn(2, 60, 2, 128)
    sizes = [(3, 4, 5), (2, 4, 4)]
    omegas = [series(d) for d in (128 - 4 * (128 // 6), 2 * (128 // 6), 2 * (128 // 6))]
    rows = []
    for row, size in zip(x, sizes, strict=True):
        ids = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in size))
        angles = torch.cat([ids[:, i : i + 1] * omega for i, omega in enumerate(omegas)], dim=-1)
        rows.append(
            torch.cat([turn_complex(row[: len(ids)].transpose(0, 1), angles), row[len(ids) :].transpose(0, 1)], 1)
        )
    rope = PresetMd("wan", head_dim=128)
    positions = pad([Grid(size) for size in sizes], 60)
    assert_equal(rope(x.transpose(1, 2), positions=positions), torch.stack(rows))


def test_flux_with_ids():
    q, ids = torch.randn(2, 3, 20, 128), torch.randint(30, (2, 20, 3)).float()
    angles = torch.cat([ids[..., i : i + 1].double() * series(dim) for i, dim in enumerate((16, 56, 56))], dim=-1)
    matrices = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1).unflatten(-1, (2, 2))
    expected = (matrices[:, None] @ q.double().unflatten(-1, (-1, 2))[..., None]).flatten(-3)
    assert_equal(PresetMd("flux1", head_dim=128)(q, positions=ids), expected)


def test_dinov3_with_storage_tokens():
    q, (H, W), prefix = torch.randn(1, 2, 5 + 12, 64), (3, 4), 5
    rows = 2 * (torch.arange(H, dtype=torch.float64) + 0.5) / H - 1
    columns = 2 * (torch.arange(W, dtype=torch.float64) + 0.5) / W - 1
    coords = torch.cartesian_prod(rows, columns)
    periods = 100.0 ** (2 * torch.arange(16, dtype=torch.float64) / 32)
    angles = (2 * torch.pi * coords[:, :, None] / periods).flatten(1).tile(2)
    x = q[:, :, prefix:].double()
    a, b = x.chunk(2, dim=-1)
    turned = x * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()
    rope = PresetMd("dinov3", head_dim=64)
    found = rope(q, positions=rope.positions(prefix, (H, W)))
    assert_equal(found, torch.cat([q[:, :, :prefix].double(), turned], dim=2))


@pytest.mark.parametrize("kept", [False, True])
def test_ids_and_kept_ids(kept):
    omega = torch.rand(1, 8, 2, dtype=torch.float64)
    ids = torch.tensor([[5, 0, 7], [11, 3, 2]])
    grid = Grid((3, 4), prefix=1)
    x = torch.randn(2, 2, 4, 16)
    places = torch.stack([ids // 4, ids % 4], dim=-1)
    positions = grid.take(ids) if kept else Coordinates(places, prefix=1)
    angles = (places.double()[:, :, None] * omega[0]).sum(-1)[:, None]
    expected = torch.cat([x[:, :, :1].double(), turn_complex(x[:, :, 1:], angles)], dim=2)
    assert_equal(rotate(x, omega=omega, positions=positions, pairs="interleaved"), expected)


def test_decoding_with_a_key_cache():
    rope, q = Rotate1d(16), torch.randn(1, 2, 9, 16)
    torch.testing.assert_close(rope(q[:, :, 6:], offset=6), rope(q)[:, :, 6:])
