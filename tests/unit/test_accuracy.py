"""How exact the reference's angles are, for positions of every dtype."""

import pytest
import torch

from lrpe_md import Coordinates, cosine, rotate


def _turned(positions, omega, num_tokens, **options):
    """cos Θ and sin Θ as the rotation of (1, 0): (N, C) each."""
    x = torch.tensor([1.0, 0.0]).repeat_interleave(omega.shape[1]).expand(1, 1, num_tokens, -1)
    return rotate(x, omega=omega, positions=positions, impl="reference", **options)[0, 0].chunk(2, dim=-1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16])
def test_integer_coordinates_are_exact(dtype):
    top = min(torch.iinfo(dtype).max, 2**24 + 1)
    coords = torch.tensor([[top], [top - 1]]).to(dtype)
    omega = torch.tensor([[[1.0], [0.3]]])
    cos, sin = _turned(coords, omega, 2)
    expected = torch.tensor([[top], [top - 1]]).double() @ omega[0].double().mT
    torch.testing.assert_close(cos.double(), expected.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), expected.sin(), rtol=0, atol=1e-6)
    mask = torch.tensor([True, False])
    cos, _ = _turned(Coordinates(coords, prefix=1, suffix=1, rotated=mask), omega, 4)
    torch.testing.assert_close(
        cos.double(), torch.stack([torch.ones(2), expected[0].cos(), *torch.ones(2, 2)]).double()
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64]
)
def test_positions_of_too_few_bits(dtype):
    coords = torch.zeros(3, 2).to(dtype)
    message = f"coords: expected .*, got {dtype}"
    with pytest.raises(TypeError, match=message):
        Coordinates(coords)
    with pytest.raises(TypeError, match=message):
        cosine(torch.zeros(1, 1, 3, 4), omega=torch.zeros(1, 4, 2), positions=coords)
