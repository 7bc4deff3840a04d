"""Position augmentation in training: distributions, invariants, errors."""

import copy
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lrpe_md import AugmentPositions, Coordinates, Grid, rotate

GRID = Grid((3, 5), prefix=2, suffix=1).cells()


def affine_of(found, expected):
    """Return scale and shift per axis that map one table to the other."""
    rows = []
    for a, b in zip(expected.unbind(-1), found.unbind(-1), strict=True):
        scale = (b.max() - b.min()) / (a.max() - a.min())
        rows.append(torch.stack([scale, b[0] - scale * a[0]]))
        torch.testing.assert_close(a * scale + rows[-1][1], b)
    return torch.stack(rows)


def draws(num, positions=GRID, **strengths):
    augment = AugmentPositions(**strengths)
    return torch.stack([
        affine_of(augment(positions).explicit().coords, positions.explicit().coords) for _ in range(num)
    ])  # fmt: skip


def test_eval_keeps_positions():
    augment = AugmentPositions(shift=1, jitter=2, rescale=2, perturb=1).eval()
    assert augment(GRID) is GRID
    assert augment.train()(GRID) is not GRID


def test_shift():
    scale, shift = draws(200, shift=(0.5, 2.0)).unbind(-1)
    torch.testing.assert_close(scale, torch.ones_like(scale))
    for axis, bound in enumerate((0.5, 2.0)):
        assert 0.9 * bound < shift[:, axis].max() <= bound
        assert -0.9 * bound > shift[:, axis].min() >= -bound
    assert shift.T.corrcoef()[0, 1].abs() < 0.3  # axes are independent
    assert draws(100, shift=0.5)[..., 1].abs().max() <= 0.5


@pytest.mark.parametrize("name", ["jitter", "rescale"])
def test_factors(name):
    scale, shift = draws(200, **{name: 2.0}).unbind(-1)
    torch.testing.assert_close(shift, torch.zeros_like(shift))
    assert 1.9 < scale.max() <= 2
    assert 0.5 <= scale.min() < 0.53
    assert scale.log().mean().abs() < 0.1  # uniform in the logarithm
    shared = (scale[:, 0] - scale[:, 1]).abs().max() < 1e-9
    assert shared == (name == "rescale")


def test_order():
    """The shift comes first, followed by jitter and rescale (DINOv3), so that the factors scale the shift."""
    only = [draws(1, shift=0.5)[0], draws(1, shift=0.5, jitter=2.0)[0], draws(1, shift=0.5, jitter=2.0, rescale=3.0)[0]]
    torch.testing.assert_close(only[1][:, 1], only[0][:, 1] * only[1][:, 0])
    torch.testing.assert_close(only[2][:, 1], only[0][:, 1] * only[2][:, 0])
    ratio = only[2][:, 0] / only[1][:, 0]
    torch.testing.assert_close(ratio[0], ratio[1])
    assert abs(ratio[0] - 1) > 1e-3


def test_a_grid_stays_a_grid():
    found = AugmentPositions(shift=0.1, jitter=1.5, rescale=2)(GRID)
    assert isinstance(found, Grid)
    assert isinstance(found.scale, torch.Tensor)
    assert (found.prefix, found.suffix) == (2, 1)
    assert found.coordinates()[[0, 1, -1]].abs().sum() == 0


def test_perturb():
    grid = Grid((20, 30), prefix=1).rescale((2.0, -0.5))
    moved = AugmentPositions(perturb=(1.0, 0.2))(grid)
    assert isinstance(moved, Coordinates)
    assert moved.prefix == 1
    steps = (moved.coords - grid.explicit().coords) / torch.tensor([2.0, 0.5])
    assert steps.abs().max() <= 0.5 + 1e-12
    assert (steps[:, 0].abs() > 0.49).double().mean() == pytest.approx(math.erfc(0.98 / 2**0.5), abs=0.05)  # clamped
    assert steps[:, 1].std() == pytest.approx(0.1, rel=0.1)
    assert steps.T.corrcoef()[0, 1].abs() < 0.1
    frames_kept = AugmentPositions(perturb=(0, 1.0))(grid)
    assert torch.equal(frames_kept.coords[:, 0], grid.explicit().coords[:, 0])


def test_perturb_before_the_rest():
    """Repeat the draws by hand. The perturbation of a token is scaled together with the grid."""
    generator = torch.Generator().manual_seed(7)
    factor = ((2 * torch.rand(1, dtype=torch.float64, generator=generator) - 1) * math.log(4)).exp()
    noise = (torch.randn(9, 1, dtype=torch.float64, generator=generator) / 2).clamp(-0.5, 0.5)
    found = AugmentPositions(perturb=1.0, rescale=4.0, seed=7)(Grid((9,)))
    torch.testing.assert_close(found.coords, (Grid((9,)).coordinates() + noise) * factor)


@pytest.mark.parametrize("positions", [GRID, GRID.explicit(), Grid((4, 4))], ids=["grid", "table", "plain"])
def test_seeds(positions):
    def run(augment):
        return torch.cat([augment(positions).explicit().coords for _ in range(3)])

    strengths = {"shift": 0.1, "jitter": 1.1, "rescale": 2.0, "perturb": 0.3}
    first = AugmentPositions(**strengths, seed=1)
    again, other = copy.deepcopy(first), AugmentPositions(**strengths, seed=2)
    expected = run(first)
    assert torch.equal(run(again), expected)
    assert not torch.equal(run(other), expected)
    assert not torch.equal(run(first), expected)
    state = torch.get_rng_state()
    run(first)
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_of_a_sequence_draw_the_same_augmentation():
    strengths = {"shift": 0.1, "jitter": 1.1, "rescale": 2.0, "perturb": 0.3}
    whole = AugmentPositions(**strengths)(GRID).explicit()
    for start, length in ((0, 5), (5, 7), (12, 6)):
        shard = Grid(GRID.shape, 2, 1, GRID.scale, GRID.shift, start, length)
        part, expected = AugmentPositions(**strengths)(shard).explicit(), whole.shard(start, length)
        torch.testing.assert_close(part.coords, expected.coords)
        assert part.rotated.tolist() == expected.rotated.tolist()


def test_unrotated_rows_are_unchanged():
    table = Coordinates(torch.rand(2, 4, 2), rotated=torch.tensor([[True, False, True, True]] * 2))
    moved = AugmentPositions(shift=1.0, perturb=1.0)(table)
    assert moved.coords.shape == (2, 4, 2)
    assert moved.coords[:, 1].abs().sum() == 0
    assert (moved.coords[:, [0, 2, 3]] != table.coords[:, [0, 2, 3]]).all()


def test_draws_go_to_the_device():
    augment = AugmentPositions(shift=1.0, rescale=2.0)
    assert augment(GRID, device="meta").scale.is_meta
    assert augment(GRID.explicit("meta")).coords.is_meta
    assert AugmentPositions(perturb=1.0)(GRID, device="meta").coords.is_meta


def test_a_compiled_model_is_compiled_once():
    graphs, omega = [], torch.rand(1, 4, 2)
    augment = AugmentPositions(shift=0.2, rescale=2.0)

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def f(x, positions):
        return rotate(x, omega=omega, positions=positions)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    x = torch.randn(1, 2, 18, 8)
    for _ in range(4):
        positions = augment(GRID)
        torch.testing.assert_close(compiled(x, positions), f(x, positions))
    assert len(graphs) == 1


@pytest.mark.parametrize("positions", [GRID, GRID.explicit()], ids=["grid", "table"])
def test_inside_a_compiled_model(positions):
    """Consecutive draws equal those of eager mode."""
    torch._dynamo.reset()
    augment = AugmentPositions(shift=0.2, jitter=1.5, rescale=2.0, perturb=0.3)
    again, counter = copy.deepcopy(augment), CompileCounterWithBackend("aot_eager")
    omega, x = torch.rand(1, 4, 2), torch.randn(1, 2, 18, 8)
    compiled = torch.compile(
        lambda x: rotate(x, omega=omega, positions=augment(positions)), fullgraph=True, backend=counter
    )
    found = [compiled(x) for _ in range(3)]
    for y in found:
        torch.testing.assert_close(y, rotate(x, omega=omega, positions=again(positions)))
    assert counter.frame_count == 1
    assert not torch.allclose(found[0], found[1])


def test_the_operator_that_draws():
    state = torch.Generator().manual_seed(3).get_state()
    for normal, draw in ((False, torch.rand), (True, torch.randn)):
        expected = draw(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        assert torch.equal(torch.ops.lrpe_md.draw(state.clone(), [3, 4], normal), expected)
        torch.library.opcheck(torch.ops.lrpe_md.draw.default, (state.clone(), [3, 4], normal))


@pytest.mark.parametrize(
    ("strengths", "message"),
    [
        ({"shift": -1}, "shift: .*at least 0, got -1"),
        ({"jitter": 0.5}, "jitter: .*at least 1, got 0.5"),
        ({"rescale": math.inf}, "rescale: .*inf"),
        ({"perturb": (0.1, -0.1)}, r"perturb: .*at least 0, got \(0.1, -0.1\)"),
        ({"jitter": (1.0, 2.0, 3.0)}, r"jitter: expected a number for each of the 2 axes"),
    ],
)
def test_errors(strengths, message):
    with pytest.raises(ValueError, match=message):
        AugmentPositions(**strengths)(GRID)


def test_repr():
    assert repr(AugmentPositions(shift=0.5, rescale=2.0)) == "AugmentPositions(shift=0.5, rescale=2.0)"
