"""Position rules on grids and tables: composition, masks, and the kernels' results."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parametrizing import COMPILERS, slow_except

from lrpe_md import Coordinates, Grid, cosine, rotate, window_order
from lrpe_md.positions.grid import offset_positions

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
numbers = st.floats(-8, 8, allow_nan=False).map(lambda v: round(v, 3))
affine = st.tuples(numbers.filter(lambda v: abs(v) > 0.01), numbers)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


# --- the rules -------------------------------------------------------------------------------------------

RULES = {
    "offset": (lambda g: g.offset(3), [3, 4, 5], [3, 4, 5, 6, 7]),
    "offset by axis": (lambda g: g.offset((0.5, -1)), [0.5, 1.5, 2.5], [-1, 0, 1, 2, 3]),
    "rescale": (lambda g: g.rescale((24 / 12, 1)), [0, 2, 4], [0, 1, 2, 3, 4]),
    "interpolate": (lambda g: g.interpolate((6, 2)), [0, 2, 4], [0, 0.4, 0.8, 1.2, 1.6]),
    "interpolate one axis": (lambda g: g.interpolate((None, 10)), [0, 1, 2], [0, 2, 4, 6, 8]),
    "interpolate to a square": (lambda g: g.interpolate(15), [0, 5, 10], [0, 3, 6, 9, 12]),
    "offset first": (lambda g: g.offset(1).interpolate((6, 10)), [2, 4, 6], [2, 4, 6, 8, 10]),
    "centre": (lambda g: g.centre(), [-1, 0, 1], [-2, -1, 0, 1, 2]),
    "centre whole": (lambda g: g.centre(whole=True), [-2, -1, 0], [-3, -2, -1, 0, 1]),
    "centre one axis": (lambda g: g.offset(7).centre((1,)), [7, 8, 9], [-2, -1, 0, 1, 2]),
    "centre, then scale": (lambda g: g.rescale(2).centre().rescale(3), [-6, 0, 6], [-12, -6, 0, 6, 12]),
    "cells": (lambda g: g.cells(), [-2 / 3, 0, 2 / 3], [-0.8, -0.4, 0, 0.4, 0.8]),
    "cells by the shorter": (lambda g: g.cells("shorter"), [-2 / 3, 0, 2 / 3], [-2 / 3, 0, 2 / 3, 4 / 3, 2]),
    "cells by the longer": (lambda g: g.cells("longer"), [-0.8, -0.4, 0], [-0.8, -0.4, 0, 0.4, 0.8]),
    "crop": (lambda g: g.crop((0, 2), (6, 12)), [0, 2, 4], [2, 3.9, 5.8, 7.7, 9.6]),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tensors", [False, True])
def test_rules(name, tensors):
    rule, rows, columns = RULES[name]
    plain = Grid((3, 5), prefix=2, suffix=1)
    ones, zeros = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    grid = rule(Grid((3, 5), 2, 1, ones, zeros) if tensors else plain)
    assert isinstance(grid, Grid)
    assert isinstance(grid.scale, torch.Tensor) == tensors
    expected = torch.cartesian_prod(*(torch.tensor(t, dtype=torch.float64) for t in (rows, columns)))
    close(grid.coordinates()[2:-1], expected)
    assert grid.coordinates()[:2].abs().sum() + grid.coordinates()[-1].abs().sum() == 0
    assert plain.scale is None


@pytest.mark.parametrize("n", [0, 1])
def test_rules_on_a_single_row_and_on_none(n):
    for rule in (lambda g: g.interpolate(4), lambda g: g.cells(), lambda g: g.centre(), lambda g: g.crop((3,), (7,))):
        assert rule(Grid((n,))).coordinates().isfinite().all()
    assert Grid((1,)).crop((3,), (7,)).coordinates().tolist() == [[3]]


def test_a_crop_runs_forwards():
    """A few positions far from 0 would run backwards. A crop from 0, of one position, or of full size never does."""
    with pytest.raises(
        ValueError, match=r"start, stop: the last of 2 positions, stop \* \(2 - 1\) / 2 = 8, would precede"
    ):
        Grid((4, 2)).crop((0, 14), (4, 16))
    for n in range(1, 30):
        steps = Grid((n,)).crop((14,), (14 + n,)).coordinates().diff(dim=0) if 14 + n <= n * n else torch.ones(1)
        assert (steps >= 0).all()
    assert Grid((3,)).crop((-4,), (-1,)).coordinates().diff(dim=0).min() > 0


def test_crop_is_linspace():
    """Compare with NumPy's and torch's linspace from start to stop (n - 1) / n, as in CogVideoX."""
    for n, start, stop in ((7, 0, 30), (5, 3, 27), (45, 0, 45)):
        expected = torch.linspace(start, stop * (n - 1) / n, n, dtype=torch.float64)
        torch.testing.assert_close(Grid((n,)).crop((start,), (stop,)).coordinates()[:, 0], expected, rtol=1e-12, atol=0)


def test_grids_and_coordinates_compare():
    """Equality is by value, including tensors, and hashes agree."""
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    makers = [
        lambda: Grid((3, 4)),
        lambda: Grid((3, 4), 1),
        lambda: Grid((3, 4), scale=(0.5, 2.0)),
        lambda: Grid((3, 4), scale=scale.clone()),
        lambda: Grid((3, 4), scale=scale.float()),
        lambda: Grid((3, 4), shift=scale.clone()),
        lambda: Grid((3, 4), scale=scale + 1),
        lambda: Grid((3, 4)).explicit(),
        lambda: Grid((3, 4), 1).explicit(),
        lambda: Coordinates(torch.zeros(12, 2), rotated=torch.arange(12) > 2),
        lambda: Coordinates(torch.zeros(12, 2), rotated=torch.arange(12) > 1),
        lambda: offset_positions(12, 3, torch.device("cpu")),
        lambda: offset_positions(12, 3, torch.device("cpu")).rescale(scale[:1].clone()),
        lambda: offset_positions(12, 3, torch.device("cpu")).rescale(scale[:1] + 1),
        lambda: Grid((15,), start=3),
    ]
    for i, first in enumerate(makers):
        for j, second in enumerate(makers):
            assert (first() == second()) is (i == j), (i, j)
        assert hash(first()) == hash(first())
        assert first() != (3, 4)
    assert {Grid((3, 4), scale=scale): 1}[Grid((3, 4), scale=scale.clone())] == 1
    assert Grid((3, 4), scale=scale.to("meta")) != Grid((3, 4), scale=scale.to("meta"))


@given(sizes, affine, affine, st.data())
@settings(max_examples=60)
def test_scale_and_shift_commute_with_interpolation(shape, first, second, data):
    reference = data.draw(st.tuples(*(st.integers(1, 40) for _ in shape)))
    (a, b), (c, d) = first, second
    grid = Grid(shape, prefix=1).transform(a, b)
    moved = grid.transform(c).interpolate(reference).coordinates()
    close(moved, grid.interpolate(reference).transform(c).coordinates())
    ratio = [r / n for r, n in zip(reference, shape, strict=True)]
    close(
        grid.offset(d).interpolate(reference).coordinates(),
        grid.interpolate(reference).offset([d * r for r in ratio]).coordinates(),
    )


@given(sizes, st.lists(affine, min_size=1, max_size=4))
@settings(max_examples=40)
def test_rules_apply_in_order(shape, steps):
    grid, coords = Grid(shape), Grid(shape).coordinates()
    tensor_grid = Grid(shape, shift=torch.zeros(len(shape), dtype=torch.float64))
    table = Coordinates(coords)
    for a, b in steps:
        grid, tensor_grid, table = (g.transform(a, b) for g in (grid, tensor_grid, table))
        coords = coords * a + b
    for found in (grid.coordinates(), tensor_grid.coordinates(), table.coords):
        torch.testing.assert_close(found, coords, rtol=1e-9, atol=1e-9)


@given(sizes, affine, st.integers(0, 2), st.integers(0, 2), st.data())
@settings(max_examples=40)
def test_a_shard_of_a_rule_is_a_slice(shape, step, prefix, suffix, data):
    rule = data.draw(st.sampled_from([lambda g: g.cells(), lambda g: g.centre(), lambda g: g.interpolate(7)]))
    whole = rule(Grid(shape, prefix, suffix)).transform(*step)
    start = data.draw(st.integers(0, whole.total))
    length = data.draw(st.integers(0, whole.total - start))
    shard = rule(Grid(shape, prefix, suffix, start=start, length=length)).transform(*step)
    close(shard.coordinates(), whole.coordinates()[start : start + length])
    for part in (shard.explicit(), whole.explicit().shard(start, length)):
        assert part.num_tokens == length
        on_grid = [0 <= t - prefix < math.prod(shape) for t in range(start, start + length)]
        rows = part.explicit().rotated
        assert (on_grid if rows is None else rows.tolist()) == on_grid
        assert rows is not None or all(on_grid)
        close(part.explicit().coords, whole.coordinates()[start : start + length])


def test_rules_are_differentiable():
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    x, omega = torch.randn(1, 1, 12, 4, dtype=torch.float64), torch.rand(1, 2, 2, dtype=torch.float64)

    def call(s):
        return rotate(x, omega=omega, positions=Grid((3, 4)).rescale(s).cells("longer").centre())

    assert torch.autograd.gradcheck(call, (scale,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow_except(["centre whole"], ["interpolate", "centre whole", "cells by the shorter", "crop", "offset first"]),
)
def test_one_graph_for_all_sizes(name):
    rule, graphs = RULES[name][0], []
    omega = torch.rand(1, 4, 2)

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def f(x, shape):
        return rotate(x, omega=omega, positions=rule(Grid(shape, prefix=1)))

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for height, width in ((4, 6), (5, 3), (9, 7), (16, 2)):
        x = torch.randn(1, 2, height * width + 1, 8)
        torch.testing.assert_close(compiled(x, (height, width)), f(x, (height, width)))
    assert len(graphs) == 1


# --- tables ----------------------------------------------------------------------------------------------


@given(sizes, affine, st.data())
@settings(max_examples=40)
def test_take_equals_indexing(shape, step, data):
    grid = Grid(shape, prefix=1, suffix=2).transform(*step)
    num = math.prod(shape)
    index = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, num - 1), min_size=2, max_size=2), max_size=5)))
    index = index.reshape(-1, 2).T.long()  # (2, n)
    body = grid.coordinates()[1:-2]
    for taken in (grid.take(index), grid.explicit().take(index)):
        assert (taken.prefix, taken.suffix) == (1, 2)
        close(taken.coords, body[index])
        close(taken.take(index[:, :0]).coords, body[index[:, :0]])
    close(grid.take(index[0]).coords, body[index[0]])
    if index.numel():
        by_sample = grid.take(index)
        last = torch.full((1,), index.shape[1] - 1)
        close(by_sample.take(last).coords, body[index][:, -1:])


def test_take_by_sample_from_a_shared_table():
    coords, index = torch.rand(1, 5, 2), torch.tensor([[0, 4], [3, 3]])
    rotated = torch.tensor([[True, True, True, True, False]])
    found = Coordinates(coords, prefix=1, rotated=rotated).take(index)
    assert torch.equal(found.coords, torch.where(rotated[0, index][..., None], coords[0, index], 0))
    assert torch.equal(found.rotated, rotated[0, index])


def test_remaining_tokens_are_encoded_as_in_the_whole():
    grid = Grid((4, 5), prefix=1).interpolate((7, 7))
    x, omega = torch.randn(2, 3, 21, 8, dtype=torch.float64), torch.rand(1, 8, 2, dtype=torch.float64)
    keep = torch.stack([torch.randperm(20)[:9] for _ in range(2)])
    rows = torch.cat([torch.zeros(2, 1, dtype=torch.int64), keep + 1], dim=1)[:, None, :, None]
    whole = cosine(x, omega=omega, positions=grid)
    found = cosine(x.gather(2, rows.expand(-1, 3, -1, 8)), omega=omega, positions=grid.take(keep))
    torch.testing.assert_close(found, whole.gather(2, rows.expand(-1, 3, -1, 16)))


@pytest.mark.slow
@given(sizes, st.data())
@settings(max_examples=40)
def test_window_order(shape, data):
    window = data.draw(st.tuples(*(st.integers(1, 7) for _ in shape)))
    order = window_order(shape, window)
    assert order.tolist() == sorted(
        range(math.prod(shape)),
        key=lambda i: [c // w for c, w in zip(Grid(shape).coordinates()[i].int().tolist(), window, strict=True)],
    )


def test_merge_order():
    order = Grid((2, 4)).take(window_order((2, 4), 2)).coords.int().tolist()
    assert order == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


def test_floor_and_select():
    table = Grid((3, 2), prefix=1).rescale(0.7).explicit()
    assert table.floor().coords.tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [1, 0], [1, 0]]
    assert table.floor().prefix == 1
    assert Coordinates(torch.tensor([[-0.5]])).floor().coords.tolist() == [[-1]]
    moved = table.select((None, 1, 0, 1))
    assert torch.equal(moved.coords[:, 1:], table.coords[:, [1, 0, 1]])
    assert moved.coords[:, 0].abs().sum() == 0


def test_integer_coordinates_are_scaled_exactly():
    far = Coordinates(torch.tensor([[2**24 + 1]])).transform(0.5, 1)
    assert far.coords.dtype == torch.float64
    assert far.coords.item() == 2**23 + 1.5


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_past_2_to_24_keep_their_value(impl, dtype):
    """float32 can't represent them, so the angles are computed in float64."""
    x, omega = torch.randn(1, 1, 2, 4), torch.tensor([[[0.7], [0.31]]])
    coords = torch.tensor([[2**24 + 1], [2**25 + 7]], dtype=dtype)
    found = rotate(x, omega=omega, positions=coords, impl=impl)
    assert torch.equal(found, rotate(x, omega=omega, positions=coords.double(), impl=impl))
    assert (found - rotate(x, omega=omega, positions=coords.float(), impl=impl)).abs().max() > 1e-2
    if impl == "reference":
        exact = rotate(x.double(), omega=omega.double(), positions=coords.double(), impl=impl)
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


def test_casts_that_would_round():
    coords = torch.tensor([[2**24 + 1, -3]])
    message = r"dtype: expected float64 for positions up to 16777217, because float32 cannot .* above 16777216"
    for cast in (
        lambda: Coordinates(coords).to(dtype=torch.float32),
        lambda: Coordinates(-coords).to(dtype=torch.float32),
        lambda: Grid((1, 2**24 + 2), start=5, length=1).coordinates(dtype=torch.float32),
        lambda: Grid((2**24 + 2,), start=5, length=1).explicit(dtype=torch.float32),
        lambda: Grid((2, 4), origin=torch.tensor([0, 2**24 - 2])).coordinates(dtype=torch.float32),
        lambda: Grid((4,), origin=torch.tensor([[0], [-(2**24) - 1]])).coordinates(dtype=torch.float32),
    ):
        with pytest.raises(ValueError, match=message):
            cast()
    assert Coordinates(coords).to(dtype=torch.float64).coords.tolist() == coords.tolist()
    assert Coordinates(coords - 1).to(dtype=torch.float32).coords.tolist() == (coords - 1).tolist()
    assert Coordinates(coords[:0]).to(dtype=torch.float32).coords.shape == (0, 2)
    assert Grid((2**24 + 1,), start=2**24).coordinates(dtype=torch.float32).item() == 2**24
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        with pytest.raises(TypeError, match="dtype: expected float32 or float64"):
            Coordinates(coords).to(dtype=dtype)


def test_to():
    table = Coordinates(torch.rand(2, 3), rotated=torch.tensor([True, False])).to("meta", torch.float64)
    assert table.coords.is_meta
    assert table.rotated.is_meta
    assert table.coords.dtype == torch.float64


# --- rows that are not rotated -----------------------------------------------------------------------------


def test_unrotated_rows_are_zero():
    coords = torch.tensor([[1.0, 2.0], [float("nan"), 4.0], [5.0, 6.0]])
    table = Coordinates(coords, prefix=1, rotated=torch.tensor([True, False, True]))
    for moved in (table, table.offset(3), table.rescale(2.0).offset((1, 1)), table.take(torch.tensor([0, 1, 1]))):
        assert moved.coords[1].tolist() == [0, 0]
        assert moved.coords.isfinite().all()
    rows = table.explicit()
    assert rows.rotated.tolist() == [False, True, False, True]
    assert rows.coords.tolist() == [[0, 0], [1, 2], [0, 0], [5, 6]]
    assert table.take(torch.tensor([2, 1])).rotated.tolist() == [True, False]
    batch = Coordinates(coords.nan_to_num().expand(2, 3, 2), rotated=torch.tensor([[True, False, True]] * 2))
    assert batch.take(torch.tensor([[1, 0], [2, 2]])).rotated.tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("map", [cosine, rotate])
@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("heads", [(1, 2), (2, 1), (2, 2)])
def test_mask_equals_prefix_and_suffix(map, impl, by_sample, heads):
    """Compare values and gradients, with a phase, for masks that a prefix and a suffix can express."""
    grid = Grid((3, 4), prefix=2, suffix=1, scale=(0.3, 1.7))
    channels = 8 if map is cosine else 4
    x = torch.randn(2, 4, 15, 8, dtype=torch.float64, requires_grad=True)
    omega = torch.randn(heads[0], channels, 2, dtype=torch.float64, requires_grad=True)
    phase = torch.randn(heads[1], channels, dtype=torch.float64, requires_grad=True)
    table = grid.explicit().explicit()
    assert table.prefix == table.suffix == 0
    if by_sample:
        table = Coordinates(table.coords.expand(2, -1, -1), rotated=table.rotated.expand(2, -1))
    expected = map(x, omega=omega, positions=grid, phase=phase, act="silu", impl=impl)
    y = map(x, omega=omega, positions=table, phase=phase, act="silu", impl=impl)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(t, (x, omega, phase), g) for t in (y, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_mask_compiles():
    omega, phase = torch.rand(2, 4, 2), torch.rand(2, 4)

    def f(x, coords, rotated):
        return rotate(x, omega=omega, phase=phase, positions=Coordinates(coords, prefix=1, rotated=rotated))

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for num in (5, 9):
        args = torch.randn(2, 2, num + 1, 8), torch.randn(2, num, 2), torch.rand(2, num) > 0.5
        torch.testing.assert_close(compiled(*args), f(*args))


@pytest.mark.parametrize("index", [[6, 7], [-1], [[0, 1], [2, 6]]], ids=str)
@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_an_index_beyond_the_tokens(index, by_sample, table):
    """Without the check, index 6 of 6 tokens would wrap around."""
    positions, index = Grid((2, 3)), torch.tensor(index)
    positions = positions.explicit() if table else positions
    if by_sample and table:
        positions = Coordinates(positions.coords.expand(2, -1, -1))
    with pytest.raises(IndexError, match=r"index: expected tokens from 0 to 5, got (6|-1)$"):
        positions.take(index)


@pytest.mark.parametrize("backend", COMPILERS)
def test_an_index_beyond_the_tokens_of_a_compiled_function(backend):
    @torch.compile(fullgraph=True, backend=backend)
    def take(index):
        return Grid((2, 3)).take(index).coords

    assert take(torch.tensor([5, 0])).tolist() == [[1, 2], [0, 0]]
    with pytest.raises(RuntimeError, match="index: expected tokens from 0 to 5"):
        take(torch.tensor([6, 0]))


# --- errors ------------------------------------------------------------------------------------------------

BAD = {
    "reference of a different length": (r"reference: .*2 axes", lambda g: g.interpolate((4, 4, 4))),
    "reference of zero": (r"reference", lambda g: g.interpolate((0, 4))),
    "axis out of range": (r"axes: .*0 to 1, got \(2,\)", lambda g: g.centre((2,))),
    "unknown cells": (r"by: .*'area'", lambda g: g.cells("area")),
    "crop of a different length": (r"start, stop: .*2 axes", lambda g: g.crop((0,), (1,))),
    "taken from a shard": (r"take: .*a shard \(start=1", lambda g: Grid(g.shape, start=1).take(torch.tensor([0]))),
    "index of floats": (r"index: .*float32", lambda g: g.take(torch.rand(3))),
    "index of three dimensions": (r"index: .*\(1, 1, 1\)", lambda g: g.explicit().take(torch.zeros(1, 1, 1).long())),
    "window of zero": (r"window", lambda g: window_order(g.shape, 0)),
    "window of a different length": (r"window: .*2 axes", lambda g: window_order(g.shape, (2, 2, 2))),
    "column out of range": (r"axes: .*0 to 1, got \(0, 2\)", lambda g: g.explicit().select((0, 2))),
    "slice beyond the end": (r"start, length: .*12 tokens", lambda g: g.explicit().shard(3, 10)),
    "mask of a different length": (
        r"rotated: .*\(12,\).*got torch.bool \(11,\)",
        lambda g: Coordinates(g.coordinates(), rotated=torch.ones(11, dtype=torch.bool)),
    ),
    "mask on a different device": (
        r"rotated: .*device cpu, got meta",
        lambda g: Coordinates(g.coordinates(), rotated=torch.ones(12, dtype=torch.bool, device="meta")),
    ),
    "mask of floats": (r"rotated: .*float32", lambda g: Coordinates(g.coordinates(), rotated=torch.ones(12))),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    message, call = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(Grid((3, 4)))
