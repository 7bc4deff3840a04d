"""The 80-line kernel of docs/kernel.md agrees with the library's kernel, and the drawings can be made."""

import pytest
import torch
from test_examples import load

pytest.importorskip("triton")

from lrpe_md import Grid, rotate


@pytest.mark.parametrize("shape", [(3, 5), (5, 7)], ids=str)
def test_the_kernel_in_80_lines(shape, nan_filled):
    """At large positions, the error is no larger than the library kernel's."""
    example = load("rotary_kernel")
    torch.manual_seed(0)
    omega, grid = torch.randn(1, 8, 2) * 40, Grid(shape, prefix=2)
    x, dy = torch.randn(2, 3, 2, grid.total, 16)
    x.requires_grad_()
    y = example.Rotate.apply(x, omega[0].contiguous(), shape, 2)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    expected = rotate(wide, omega=omega.double(), positions=grid, pairs="half")
    (dx_expected,) = torch.autograd.grad(expected, wide, dy.double())
    for actual, exact in ((y, expected), (dx, dx_expected)):
        assert (actual - exact).abs().max() <= 4 * 2**-24 * exact.abs().max() * 2
    assert torch.equal(y[:, :, :2], x[:, :, :2])


def test_the_drawings(tmp_path):
    from lrpe_md.scripts.visualize.kernel import DRAWINGS, main

    main(tmp_path)
    both = {name.replace(".svg", f"{mode}.svg") for name in DRAWINGS for mode in ("", "-dark")}
    assert {path.name for path in tmp_path.iterdir()} == both
