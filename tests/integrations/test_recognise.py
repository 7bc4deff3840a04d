"""recognise expresses third-party rotary code as arguments of our functions."""

import math

import pytest
import rotary_functions as rf
import torch

from lrpe_md import Grid, axial_omega, cosine, geometric_theta, rotate
from lrpe_md.integrations import recognise

SHAPE, D, N = (5, 7), 32, 35


def grid_positions(shape=SHAPE):
    lines = [torch.arange(n, dtype=torch.float32) for n in shape]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).flatten(0, -2)


def turn(x, angles, layout="half"):
    """Rotate by angles (..., N, pairs)."""
    if layout == "half":
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        return x * cos + rf.quarter_turn(x) * sin
    cos, sin = (t.repeat_interleave(2, -1) for t in (angles.cos(), angles.sin()))
    return x * cos + rf.quarter_turn_pairs(x) * sin


def series(pairs, base):
    return base ** -(torch.arange(pairs) / pairs)


LLAMA = torch.outer(torch.arange(20.0), series(16, 10000.0))
AXIAL = (grid_positions()[..., None] * series(8, 100.0)).flatten(1)  # rows first
CENTRED = (grid_positions() + 0.5) / torch.tensor(SHAPE) * 2 - 1
DINO = (2 * math.pi * CENTRED[..., None] * series(8, 100.0)).flatten(1)
MIXED = torch.einsum("nk,hck->hnc", grid_positions(), torch.rand(3, 16, 2, generator=torch.manual_seed(0)) - 0.5)


def llama(x):
    return turn(x, LLAMA)


def with_prefix(x):
    return torch.cat((x[:, :, :5], turn(x[:, :, 5:], DINO)), 2)


def partial(x):
    return torch.cat((x[..., :8], turn(x[..., 8:24], LLAMA[:, ::2], "interleaved"), x[..., 24:]), -1)


def check(found, function, sizes):
    """Check that the recognised arguments reproduce the function on other inputs."""
    x = torch.randn(sizes)
    ours = (rotate if found.map == "rotate" else cosine)(x, **found.arguments)
    torch.testing.assert_close(ours, function(x), rtol=0, atol=1e-5)
    assert found.error < 1e-5
    assert found.arguments["omega"].dtype == torch.float64


def test_a_language_model():
    found = recognise(llama, head_dim=D, shape=(20,))
    check(found, llama, (2, 3, 20, D))
    torch.testing.assert_close(found.arguments["omega"][0, :, 0].float(), series(16, 10000.0), rtol=1e-5, atol=1e-8)
    assert found.arguments["pairs"] == "half"
    assert found.bases == (10000.0,)
    assert set(found.arguments) == {"omega", "positions", "pairs"}


def test_q_and_k():
    found = recognise(lambda q, k: (llama(q), llama(k)), head_dim=D, shape=(20,))
    check(found, llama, (1, 2, 20, D))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("order", ["major_first", "minor_first"])
def test_axes(order, layout):
    angles = AXIAL if order == "major_first" else torch.cat((AXIAL[:, 8:], AXIAL[:, :8]), -1)

    def function(x):
        return turn(x, angles, layout)

    found = recognise(function, head_dim=D, shape=SHAPE)
    check(found, function, (1, 1, N, D))
    assert found.axis_order == order
    assert found.arguments["pairs"] == layout
    expected = axial_omega(geometric_theta(8, 100.0), 16, 2, axis_order=order)
    torch.testing.assert_close(found.arguments["omega"], expected, rtol=1e-5, atol=1e-7)
    assert found.bases == (100.0, 100.0)
    first, second = (0, 1) if order == "major_first" else (1, 0)
    assert found.axes == (first,) * 8 + (second,) * 8


def test_three_axes_of_unequal_widths():
    positions, widths = grid_positions((2, 3, 4)), (8, 4, 4)
    angles = torch.cat([positions[:, j, None] * series(w, 10000.0) for j, w in enumerate(widths)], -1)

    def function(x):
        return turn(x, angles)

    found = recognise(function, head_dim=D, shape=(2, 3, 4))
    check(found, function, (1, 1, 24, D))
    assert [found.axes.count(axis) for axis in range(3)] == list(widths)


def test_centred_positions_are_a_shift():
    found = recognise(with_prefix, head_dim=D, shape=SHAPE, prefix=5)
    check(found, with_prefix, (2, 3, N + 5, D))
    assert found.arguments["positions"].shift == (-2.0, -3.0)
    assert "phase" not in found.arguments


def test_frequencies_of_each_head():
    def function(x):
        return turn(x, MIXED)

    found = recognise(function, head_dim=D, shape=SHAPE, num_heads=3)
    check(found, function, (2, 3, N, D))
    assert found.arguments["omega"].shape == (3, 16, 2)
    assert set(found.axes) == {None}


def test_a_phase():
    phase = torch.rand(16, generator=torch.manual_seed(1)) * 6 - 3

    def function(x):
        return turn(x, LLAMA + phase)

    found = recognise(function, head_dim=D, shape=(20,))
    check(found, function, (1, 1, 20, D))
    torch.testing.assert_close(found.arguments["phase"][0].float(), phase, rtol=0, atol=1e-5)


def test_the_other_direction():
    found = recognise(lambda x: turn(x, -AXIAL), head_dim=D, shape=SHAPE)
    check(found, lambda x: turn(x, -AXIAL), (1, 1, N, D))
    assert found.arguments["inverse"] is True
    assert (found.arguments["omega"] >= 0).all()


@pytest.mark.parametrize("amplitude", [1.3, torch.linspace(0.5, 1.5, 16)])
def test_an_amplitude(amplitude):
    both = torch.as_tensor(amplitude).expand(16).repeat(2)

    def function(x):
        return turn(x, LLAMA) * both

    found = recognise(function, head_dim=D, shape=(20,))
    check(found, function, (1, 1, 20, D))
    assert isinstance(found.arguments["amplitude"], float) == isinstance(amplitude, float)


def test_a_part_of_the_channels():
    found = recognise(partial, head_dim=D, shape=(20,))
    check(found, partial, (1, 1, 20, D))
    assert found.arguments["rotary_dim"] == slice(8, 24)
    first = recognise(lambda x: torch.cat((turn(x[..., :16], LLAMA[:, ::2]), x[..., 16:]), -1), head_dim=D, shape=(20,))
    assert first.arguments["rotary_dim"] == 16


def test_blocks_of_pairs():
    def function(x):
        return torch.cat([turn(part, AXIAL[:, i * 8 : i * 8 + 8]) for i, part in enumerate(x.chunk(2, -1))], -1)

    found = recognise(function, head_dim=D, shape=SHAPE)
    check(found, function, (1, 1, N, D))
    assert found.arguments["pairs"] == (8, 8)


def test_the_cosine_map():
    omega = torch.rand(1, D, 2, generator=torch.manual_seed(0))
    found = recognise(lambda x: cosine(x, omega=omega, positions=Grid(SHAPE)), head_dim=D, shape=SHAPE)
    assert found.map == "cosine"
    torch.testing.assert_close(found.arguments["omega"].float(), omega)
    check(found, lambda x: cosine(x, omega=omega, positions=Grid(SHAPE)), (1, 2, N, D))


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("order", ["cos_sin", "sin_cos"])
def test_both_orders_of_the_cosine_map(order, sign, prefix):
    omega = sign * torch.rand(1, D, 2, generator=torch.manual_seed(0), dtype=torch.float64)
    where = Grid(SHAPE, prefix=prefix)

    def function(x):
        return cosine(x, omega=omega, positions=where, order=order)

    found = recognise(function, head_dim=D, shape=SHAPE, prefix=prefix)
    torch.testing.assert_close(found.arguments["omega"], omega)
    assert found.arguments.get("order", "cos_sin") == order
    check(found, function, (1, 2, where.num_tokens, D))


def test_no_base_for_heads_that_differ():
    theta = torch.stack([geometric_theta(D // 2, base) for base in (100.0, 1000.0)])
    where = Grid((20,))
    found = recognise(lambda x: rotate(x, omega=theta[..., None], positions=where), head_dim=D, shape=20, num_heads=2)
    assert found.bases == (None,)
    assert str(found).endswith("# axis 0: 16 pairs")


def test_high_frequencies_are_equal_on_the_grid():
    fast = torch.outer(torch.arange(20.0).double(), torch.linspace(2.0, 20.0, 16).double())

    def function(x):
        return turn(x.double(), fast).to(x.dtype)

    found = recognise(function, head_dim=D, shape=(20,))
    check(found, function, (1, 1, 20, D))
    assert found.arguments["omega"].abs().max() <= math.pi


def test_printed():
    found = recognise(with_prefix, head_dim=D, shape=SHAPE, prefix=5)
    expected = "rotate(x, omega=<(1, 16, 2)>, positions=Grid((5, 7), prefix=5, shift=(-2.0, -3.0)), pairs='half')"
    note = "axis 0: 8 pairs, base 100, scaled by 2.513; axis 1: 8 pairs, base 100, scaled by 1.795"
    assert str(found) == str(found.arguments) == f"{expected}  # {note}"
    assert str(recognise(llama, head_dim=D, shape=20)).endswith("# axis 0: 16 pairs, base 10000")


def test_a_module_of_q_and_k():
    class Rotary(torch.nn.Module):
        def forward(self, q, k, scale=1.0):
            return turn(q, LLAMA * scale), turn(k, LLAMA * scale)

    assert str(recognise(Rotary(), head_dim=D, shape=20)) == str(recognise(llama, head_dim=D, shape=20))


def test_presets_are_recognised():
    from lrpe_md import RotateMd

    module = RotateMd(D, 2, num_heads=2)

    def function(x):
        return module(x, positions=Grid(SHAPE))

    found = recognise(function, head_dim=D, shape=SHAPE, num_heads=2)
    check(found, function, (1, 2, N, D))


REFUSED = {
    "returns x unchanged": lambda x: x,
    "scales channels": lambda x: x * 2,
    "moves channels": lambda x: x.flip(-1),
    "does not depend on x": lambda x: llama(x) + 0.1,
    "does not depend on x (softmax)": lambda x: x.softmax(-1),
    "is random": lambda x: llama(x) + torch.randn_like(x),
    "is random (dropout)": lambda x: torch.nn.functional.dropout(llama(x), 0.5),
    "mixes channel 0": lambda x: x @ torch.linspace(-1, 1, D * D, dtype=x.dtype).reshape(D, D).sin(),
    "not positions on this grid": lambda x: llama(x).roll(1, 2),
    "not positions on this grid (random angles)": lambda x: turn(x, torch.linspace(0, 9, 320).sin().reshape(20, 16)),
    "not linear in x, or mixes tokens": lambda x: llama(x.relu()),
    "scales x by a factor (mean)": lambda x: llama(x) + llama(x).mean(2, keepdim=True) * 0.1 - 0.1 * x[:, :, :1],
    "same angle": lambda x: torch.cat((llama(x)[..., :16], -llama(x)[..., 16:]), -1),
    "scales x by a factor": lambda x: llama(x) * torch.linspace(1, 2, 20)[:, None],
    "rotates q and k differently": lambda q, k: (llama(q), turn(k, -LLAMA)),
    "takes 3 arguments": lambda q, cos, sin: q,
    "raises ValueError": lambda x: (_ for _ in ()).throw(ValueError("no")),
    "does not return tensors": lambda x: (x, {}),
    "returns tensors of shape (1, 1, 20, 20)": lambda x: x @ x.mT,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason):
    with pytest.raises(TypeError) as error:
        recognise(REFUSED[reason], head_dim=D, shape=(20,))
    assert reason.partition(" (s")[0].partition(" (d")[0].partition(" (r")[0].partition(" (m")[0] in str(error.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: llama(x.transpose(1, 2)).transpose(1, 2),
        lambda x: turn(x, torch.arange(x.shape[1])[:, None, None] * LLAMA[1]),
        lambda q, k: tuple(llama(x.transpose(1, 2)).transpose(1, 2) for x in (q, k)),
    ],
    ids=["fixed length", "any length", "q and k"],
)
def test_tokens_before_heads(function):
    with pytest.raises(TypeError, match=r"which expects x of shape \(1, N, H, D\); wrap it .*\.transpose\(1, 2\)"):
        recognise(function, head_dim=D, shape=(20,))


def test_a_forgotten_prefix():
    with pytest.raises(TypeError, match="positions on this grid"):
        recognise(lambda x: with_prefix(torch.cat((x, x[:, :, :5]), 2))[:, :, :N], head_dim=D, shape=SHAPE)
    with pytest.raises(TypeError, match="first 3 tokens"):
        recognise(lambda x: torch.cat((x[:, :, :0], turn(x, LLAMA)), 2), head_dim=D, shape=(17,), prefix=3)


def test_a_sequence_of_one_number():
    assert str(recognise(llama, head_dim=D, shape=20)) == str(recognise(llama, head_dim=D, shape=(20,)))
    with pytest.raises(ValueError, match=r"shape: expected a non-negative integer .*, got \(2\.5,\)"):
        recognise(llama, head_dim=D, shape=2.5)


@pytest.mark.parametrize("options", [{"head_dim": 1}, {"num_heads": 0}, {"shape": (1,)}])
def test_bad_arguments(options):
    with pytest.raises(ValueError, match="head_dim"):
        recognise(llama, **{"head_dim": D, "shape": (20,), **options})


def test_a_function_without_a_signature():
    with pytest.raises(TypeError, match=r"function: expected a Python function or a module, got <built-in method relu"):
        recognise(torch.relu, head_dim=16, shape=(3, 4))
