"""Exact rounding, bounds, reordered axes, and grids that come before and after other tokens."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parametrizing import COMPILERS

from lrpe_md import After, Before, Coordinates, Grid, Tokens, compose


def column(positions, axis=0):
    return positions.explicit().explicit().coords[..., axis].tolist()


def test_interpolation_of_a_rounding_edge_case():
    assert Grid((98,)).interpolate(256).explicit().floor().coords[49] == 128
    assert Grid((98,)).interpolate(256).floor().coords[49] == 128


def test_interpolation_rounds_down_exactly():
    """Compare with CogView4's i · 256 // n at every size up to 512."""
    for n in range(1, 513):
        assert column(Grid((n,)).interpolate(256).floor()) == [i * 256 // n for i in range(n)], n


@given(n=st.integers(1, 3000), r=st.integers(1, 5000), first=st.integers(0, 50), data=st.data())
def test_rational_rules_are_rounded_once(n, r, first, data):
    """This holds for any reference, start and selection of tokens, and for shards."""
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    grid = Grid((n,)).offset(first).interpolate(r)
    found = grid.take(torch.tensor(index)).coords[:, 0].tolist()
    assert [int(x // 1) for x in found] == [(i + first) * r // n for i in index]
    assert found == [float(Fraction((i + first) * r, n)) for i in index]
    start = data.draw(st.integers(0, n - 1))
    part = Grid((n,), start=start, length=1).offset(first).interpolate(r)
    assert column(part) == [float(Fraction((start + first) * r, n))]


@pytest.mark.parametrize("by", ["axis", "shorter", "longer"])
def test_cells_round_down_exactly(by):
    """Compare with ⌊2 (i + ½) / m - 1⌋ in integers. The centre of an odd number of cells is at 0."""
    for shape in [(n, m) for n in range(1, 40, 3) for m in range(1, 40, 2)]:
        sizes = {"axis": shape, "shorter": [min(shape)] * 2, "longer": [max(shape)] * 2}[by]
        found = Grid(shape).cells(by).floor().coords.reshape(*shape, 2)
        for axis, (n, m) in enumerate(zip(shape, sizes, strict=True)):
            assert found.select(1 - axis, 0)[:, axis].tolist() == [(2 * i + 1 - m) // m for i in range(n)], shape


@given(n=st.integers(2, 300), p=st.integers(1, 300), q=st.integers(1, 300), r=st.integers(-300, 300))
def test_fractions_round_down_exactly(n, p, q, r):
    """This holds for numbers and tensors, for grids and tables, and in several steps."""
    expected = [(i * p + r) // q for i in range(n)]
    scale, shift = p / q, r / q
    for positions in (Grid((n,)), Coordinates(torch.arange(n)[:, None])):
        for by in (scale, torch.tensor([scale], dtype=torch.float64)):
            assert column(positions.transform(by, shift).floor()) == expected
            assert column(positions.rescale(by).offset(shift).floor()) == expected


def test_rounding_keeps_gradients():
    """Positions that become whole numbers still depend on the scale and on the coordinates."""
    scale = torch.tensor([1 / 49], dtype=torch.float64, requires_grad=True)
    coords = torch.arange(50.0, dtype=torch.float64)[:, None].requires_grad_()
    for positions in (Grid((50,)).rescale(scale), Coordinates(coords).rescale(scale)):
        (found,) = torch.autograd.grad(positions.explicit().coords.sum(), scale)
        assert found == 49 * 50 / 2
    assert (torch.autograd.grad(Coordinates(coords).rescale(0.5).coords.sum(), coords)[0] == 0.5).all()


def test_inexact_rules_are_unchanged():
    """Scales that are not fractions of n, tensors, and integers beyond float64 use the general path."""
    scale, shift = 0.1234567, -3.7
    grid = Grid((7,), scale=scale, shift=shift)
    assert column(grid) == [i * scale + shift for i in range(7)]
    assert column(Grid((7,), scale=torch.tensor([scale], dtype=torch.float64))) == [i * scale for i in range(7)]
    assert column(Grid((7,), scale=2.0**60)) == [i * 2.0**60 for i in range(7)]
    assert column(Grid((3, 5), prefix=1, suffix=1).interpolate((6, None)), 0) == [0, *[0] * 5, *[2] * 5, *[4] * 5, 0]


def test_rounding_down_is_exact_when_compiled():
    """One graph serves all sizes."""
    torch.compiler.reset()

    def place(x):
        return Grid((x.shape[0],)).interpolate(256).floor().coords[:, 0]

    compiled = torch.compile(place, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (98, 49, 100, 256, 333, 7):
        assert compiled(torch.zeros(n)).tolist() == [i * 256 // n for i in range(n)], n


@pytest.mark.parametrize("backend", COMPILERS)
def test_rounding_down_is_exact_when_compiled_for_one_size(backend):
    torch.compiler.reset()
    fixed = torch.compile(
        lambda x: x + Grid((98,)).interpolate(256).floor().coords[:, 0], fullgraph=True, backend=backend
    )
    assert fixed(torch.zeros(98, dtype=torch.float64)).tolist() == [i * 256 // 98 for i in range(98)]


def test_floor_of_a_grid_keeps_its_tokens():
    grid = Grid((2, 3), prefix=1).interpolate((5, 4))
    found = grid.floor()
    assert (found.prefix, found.num_tokens) == (1, 7)
    assert found.coords.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [2, 2]]


def test_clamp_applies_per_axis():
    grid = Grid((4, 4))
    assert column(grid.clamp(low=1)) == [max(i, 1) for i in range(4) for _ in range(4)]
    found = grid.clamp((None, 1), (2, None))
    assert column(found, 0) == [min(i, 2) for i in range(4) for _ in range(4)]
    assert column(found, 1) == [max(i, 1) for _ in range(4) for i in range(4)]
    ids = Coordinates(torch.tensor([[5, -5]])).clamp((0, 0), (3, 3))
    assert ids.coords.tolist() == [[3, 0]]
    with pytest.raises(ValueError, match=r"low: expected a number or None for each of the 2 axes, got \(1,\)"):
        grid.clamp((1,))
    with pytest.raises(ValueError, match="low, high: expected low <= high on each axis, got 3, 2"):
        grid.clamp(3, 2)


def test_select_of_a_grid():
    grid = Grid((2, 3), prefix=1).offset((5, 7))
    assert grid.select((None, 0, 1)) == Grid((1, 2, 3), prefix=1).offset((0, 5, 7))
    assert Grid((2, 3)).select((0, 1, None)) == Grid((2, 3, 1))
    assert column(grid.select((None, 0, 1)), 2) == column(grid, 1)
    swapped = grid.select((1, 0))
    assert isinstance(swapped, Coordinates)
    assert column(swapped, 0) == column(grid, 1)
    assert column(grid.select((1,)), 0) == column(grid, 1)
    tensor = Grid((2,), scale=torch.tensor([2.0])).select((0, None))
    assert column(tensor, 0) == [0, 2]
    for axes in ((2,), (), (-1,)):
        with pytest.raises(ValueError, match="axes: expected None or numbers from 0 to 1"):
            grid.select(axes)


# --- after and before --------------------------------------------------------------------------------------

WHERE = {"grid": lambda grid: grid, "table": lambda grid: grid.explicit()}


@pytest.mark.parametrize("form", WHERE)
def test_advance_of_a_grid(form):
    """The running position advances by the longer side, the largest position, or an axis that is not offset."""
    video = WHERE[form](Grid((9, 2, 4)))

    def first_behind(*args, **kwargs):
        return compose(Tokens(3, "diagonal"), After(video, *args, **kwargs), Tokens(1, "diagonal")).coords[-1, 0]

    assert first_behind() == 3 + 9
    assert first_behind(advance=(1, 2)) == 3 + 4
    assert first_behind((0,), (0, 1, 2)) == 3 + 9
    assert first_behind((0,), (1,)) == 3 + 2
    placed = compose(Tokens(3, "diagonal"), After(video, (0,), (1,)))
    assert torch.equal(placed.coords[3:], Grid((9, 2, 4)).offset((3, 0, 0)).coordinates())


def test_advance_by_whole_numbers():
    part = Grid((4,)).rescale(0.4)
    assert compose(After(part), Tokens(1, "axis")).coords[-1, 0] == pytest.approx(2.2)
    assert compose(After(part, whole=True), Tokens(1, "axis")).coords[-1, 0] == 3


@pytest.mark.parametrize("form", WHERE)
def test_before(form):
    """Earlier frames end where the sequence begins."""
    history = WHERE[form](Grid((2, 1, 2)))
    found = compose(Before(history, (0,)), After(Grid((2, 1, 2)), (0,)), Tokens(1, "axis"))
    assert found.coords[:, 0].tolist() == [-2, -2, -1, -1, 0, 0, 1, 1, 2]
    assert found.coords[:4, 2].tolist() == [0, 1, 0, 1]
    later = compose(Tokens(5, "axis"), Before(history), Tokens(1, "axis"))
    assert later.coords[5:, 0].tolist() == [3, 3, 4, 4, 5]
    assert later.coords[5:, 1].tolist() == [4, 4, 4, 4, 0]
    with pytest.raises(TypeError, match="grid: expected a Grid or Coordinates, got 3"):
        Before(3)


def test_order_of_positions_differs_from_the_sequence():
    """Text comes after its image in the sequence, but its positions come before those of the image."""
    found = compose(After(Grid((1, 2, 2)), (0,)), Tokens(3, "axis", start=1), order=(1, 0))
    assert found.coords[:, 0].tolist() == [4, 4, 4, 4, 1, 2, 3]
    with pytest.raises(ValueError, match=r"order: expected each number from 0 to 1 once, got \(0, 0\)"):
        compose(Tokens(1, "axis"), Tokens(1, "axis"), num_axes=1, order=(0, 0))
    with pytest.raises(ValueError, match=r"advance: expected at least one axis, or None, got \(\)"):
        After(Grid((2,)), advance=())
    with pytest.raises(ValueError, match=r"segments: expected axes from 0 to 1, got \(7,\)"):
        compose(After(Grid((2, 2)), advance=(7,)))
