"""Frequencies: series, axis maps, directions, scalings."""

import math
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpe_md import axial_omega, geometric_theta
from lrpe_md.frequencies import mixed_omega
from lrpe_md.frequencies.axial import AXIS_MAPS, AxisMapName, split_channels
from lrpe_md.frequencies.dense import (
    dense_omega,
    golden_directions,
    plane_directions,
    random_directions,
    simplex_directions,
)
from lrpe_md.frequencies.scalings import (
    dynamic_ntk_scaling,
    dype_ntk_scaling,
    dype_yarn_scaling,
    linear_scaling,
    llama3_scaling,
    longrope_scaling,
    ntk_scaling,
    riflex_scaling,
    yarn_scaling,
)
from lrpe_md.frequencies.series import head_bands_theta, log_linspace_theta, period_theta


def axes_and_members(omega, series):
    """For each channel of head 0, return the axis and the member of the series, or None if it is not rotated."""
    found = []
    for row in omega[0]:
        axes = row.nonzero()[:, 0].tolist()
        assert len(axes) <= 1
        found.append((axes[0], (series - row[axes[0]]).abs().argmin().item()) if axes else None)
    return found


# --- series ----------------------------------------------------------------------------------------------


def test_series():
    assert torch.equal(log_linspace_theta(3, 100.0, 1.0).round(decimals=12), torch.tensor([100.0, 10.0, 1.0]).double())
    assert torch.equal(period_theta(torch.tensor([1.0, 4.0])), torch.tensor([2 * math.pi, math.pi / 2]))
    bands = head_bands_theta(4, 3, 1e4)
    assert bands.shape == (3, 4)
    assert torch.equal(bands.flatten(), geometric_theta(12, 1e4))
    assert all(t.dtype == torch.float64 for t in (bands, log_linspace_theta(3, 1.0, 2.0)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: log_linspace_theta(0, 1.0, 2.0), "num: .*got 0"),
        (lambda: log_linspace_theta(3, 1.0, -2.0), "first, last: .*-2.0"),
        (lambda: split_channels(30, (2, 7, 7)), r"multiple of 16 for shares 2 : 7 : 7, got 30"),
        (lambda: split_channels(30, (0, 0)), "shares"),
        (lambda: axial_omega(geometric_theta(4), 8, 2, axis_map="spiral"), "axis_map: .*'spiral'"),
        (lambda: axial_omega(geometric_theta(8), 8, 2, sections=(4, 4, 4)), "sections: .*2 axes"),
        (
            lambda: axial_omega(geometric_theta(8), 8, 2, sections=(5, 4)),
            r"sections: .*8 channels in total, got \(5, 4",
        ),
        (
            lambda: axial_omega(geometric_theta(4), 8, 2, sections=(3, 5)),
            "theta: expected at least 5 frequencies for axis 1 with .*got 4",
        ),
        (
            lambda: axial_omega(geometric_theta(7), 8, 2, axis_map="chunk"),
            "theta: expected at least 8 frequencies for axis 0 with axis_map='chunk'",
        ),
        (lambda: dense_omega(torch.ones(3), torch.ones(4, 2)), "theta: .*4 directions"),
        (lambda: golden_directions(4, 5), "num_axes: .*2 or 3, got 5"),
        (lambda: simplex_directions(4, 0), "num_axes"),
        (lambda: random_directions(4, 0), "num_axes"),
        (lambda: linear_scaling(torch.ones(3), 0.0), "factor: .*got 0"),
        (lambda: ntk_scaling(torch.ones(1), 2.0), "theta: .*at least 2"),
        (lambda: yarn_scaling(torch.ones(4), 2.0, original_length=64), "theta: .*decreasing"),
        (
            lambda: longrope_scaling(torch.ones(4), [1.0], [1.0] * 4, factor=2, length=8, original_length=16),
            r"short, long: .*4 frequencies, got \(1,\)",
        ),
        (lambda: llama3_scaling(torch.ones(4), low=4.0, high=1.0), "high"),
        (
            lambda: riflex_scaling(torch.ones(4), 8),
            "repeats_at, index: expected exactly one of the two, got None and None",
        ),
        (lambda: riflex_scaling(torch.ones(4), 8, index=4), "index: expected a number from 0 to 3, got 4"),
        (lambda: riflex_scaling(torch.ones(4), 0, index=1), "length: .*got 0"),
        (lambda: dype_ntk_scaling(torch.ones(4), 2.0, 1.5), "time: expected .* from 1 .noise. to 0 .data., got 1.5"),
        (lambda: dype_ntk_scaling(torch.ones(1), 2.0, 0.5), "theta: .*at least 2"),
        (lambda: dype_yarn_scaling(torch.ones(4), 2.0, torch.ones(2), original_length=8), "time: expected one number"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- axis maps -------------------------------------------------------------------------------------------

MAPS = {  # (axis, member) of each channel, for two axes with two and three channels, slowest axis first
    "block": ((2, 3), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]),
    "alternate": ((2, 3), [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]),
    "chunk": ((2, 3), [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]),
    "stride": ((2, 1), [(0, 0), (1, 1), (0, 2), (0, 3), (0, 4)]),
    "even_odd": ((3, 2), [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3)]),
}


@pytest.mark.parametrize("axis_map", AXIS_MAPS)
def test_maps(axis_map):
    sections, expected = MAPS[axis_map]
    series = geometric_theta(6, 100.0)
    omega = axial_omega(series, 5, 2, axis_order="major_first", axis_map=axis_map, sections=sections)
    assert axes_and_members(omega, series) == expected
    omega = axial_omega(series, 5, 2, axis_order="minor_first", axis_map=axis_map, sections=sections[::-1])
    assert axes_and_members(omega, series) == [(1 - axis, member) for axis, member in expected]


def test_every_axis_map_is_in_its_type():
    assert get_args(AxisMapName) == (*AXIS_MAPS, "head")


def test_default_sections():
    series = geometric_theta(8, 100.0)
    found = axes_and_members(axial_omega(series, 8, 3, axis_map="chunk", axis_order="major_first"), series)
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (2, 6), (2, 7)]
    found = axes_and_members(axial_omega(series, 7, 3, axis_map="stride", axis_order="major_first"), series)
    assert [axis for axis, _ in found] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("axis_map", AXIS_MAPS)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(["minor_first", "major_first"]))
@settings(max_examples=40)
def test_each_axis_gets_its_section(axis_map, sections, axis_order):
    total, num_axes = sum(sections), len(sections)
    zeros = 0 if axis_map == "stride" else 2
    theta = torch.rand(3, num_axes * (total + 1), dtype=torch.float64) + 0.5
    omega = axial_omega(theta, total + zeros, num_axes, axis_order=axis_order, axis_map=axis_map, sections=sections)
    assert omega.shape == (3, total + zeros, num_axes)
    if axis_map != "stride":  # stride clamps its sections
        assert (omega[0] != 0).sum(0).tolist() == sections
        assert omega[:, total:].abs().sum() == 0
    assert ((omega[:, :total] != 0).sum(-1) == 1).all()


def test_series_per_axis():
    thetas = [torch.rand(2, dtype=torch.float64), torch.rand(5, dtype=torch.float64)]
    omega = axial_omega(thetas, 6, 2, axis_order="major_first", axis_map="alternate", sections=(2, 4))
    assert torch.equal(omega[0, [0, 2], 0], thetas[0])
    assert torch.equal(omega[0, [1, 3, 4, 5], 1], thetas[1][:4])


@pytest.mark.parametrize("axis_map", AXIS_MAPS)
def test_maps_are_differentiable(axis_map):
    theta = torch.rand(2, 6, dtype=torch.float64, requires_grad=True)
    call = lambda t: axial_omega(t, 6, 2, axis_map=axis_map, sections=(2, 3))  # noqa: E731
    assert torch.autograd.gradcheck(call, (theta,))
    assert call(theta).sum().item() > 1


def test_shares():
    assert split_channels(64, (2, 7, 7)) == (8, 28, 28)
    assert split_channels(64, (1, 1, 1), remainder=0) == (22, 21, 21)
    assert split_channels(65, (1, 1, 1), remainder=2) == (21, 21, 23)
    with pytest.raises(ValueError, match=r"num_channels: .* multiple of 2 .*, got 7; .*\(\.\.\., remainder=0\)$"):
        split_channels(7, (1, 1))


# --- directions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_axes", [1, 2, 3, 4])
def test_directions_are_unit_vectors(num_axes):
    found = [random_directions(7, num_axes, 3), simplex_directions(7, num_axes)]
    found += [golden_directions(7, num_axes)] if num_axes in (2, 3) else []
    found += [plane_directions(7, torch.rand(3).double())] if num_axes == 2 else []
    for directions in found:
        assert directions.shape[-2:] == (7, num_axes)
        assert directions.dtype == torch.float64
        torch.testing.assert_close(directions.norm(dim=-1), torch.ones(directions.shape[:-1]).double())


def test_golden_directions():
    """Channel c is at the fractions of (c + ½) / r and (c + ½) / r², with the root r of x^K = x + 1."""
    index = torch.arange(9, dtype=torch.float64) + 0.5
    for num_axes in (2, 3):
        root = 1.5
        for _ in range(60):  # a fixed point of x = (x + 1)^(1/K)
            root = (root + 1) ** (1 / num_axes)
        *height, turn = (index / root ** (i + 1) % 1 for i in range(num_axes - 1))
        radius = (1 - sum(z**2 for z in height)) ** 0.5
        angle = (num_axes - 1) * math.pi * turn
        expected = torch.stack([radius * angle.cos(), radius * angle.sin(), *height], -1)
        torch.testing.assert_close(golden_directions(9, num_axes), expected)


def test_plane_directions():
    angles = torch.tensor([0.0, 1.0], dtype=torch.float64)
    directions = plane_directions(4, angles)
    expected = torch.stack([angles.cos(), angles.sin()], -1), torch.stack([-angles.sin(), angles.cos()], -1)
    for c in range(4):
        torch.testing.assert_close(directions[:, c], expected[c // 2])


@pytest.mark.parametrize("num_axes", [2, 3])
@pytest.mark.parametrize("num", [50, 83, 130])
def test_golden_directions_are_spread_evenly(num_axes, num):
    """As for uniform directions, Σ v vᵀ is close to C/K · I. No two neighbours are close to each other."""
    v = golden_directions(num, num_axes)
    torch.testing.assert_close(v.T @ v / num, torch.eye(num_axes).double() / num_axes, atol=0.04, rtol=0)
    cosines = (v @ v.T).abs() - torch.eye(num)
    apart = cosines.max(-1).values.clamp(max=1).acos()
    share = math.pi / num if num_axes == 2 else math.sqrt(2 * math.pi / num)  # share of the half circle or half sphere
    assert apart.min() > 0.35 * share


@pytest.mark.parametrize("num_axes", [1, 2, 3, 4])
def test_simplex_directions_are_regular(num_axes):
    corners = simplex_directions(num_axes + 1, num_axes)
    cosines = corners @ corners.T
    off = cosines[~torch.eye(num_axes + 1, dtype=torch.bool)]
    torch.testing.assert_close(off, torch.full_like(off, -1 / num_axes))
    assert torch.equal(simplex_directions(2 * num_axes + 2, num_axes)[num_axes + 1 :], corners)


def test_dense_omega():
    theta, directions = torch.rand(2, 5), torch.rand(5, 3)
    assert torch.equal(dense_omega(theta, directions), theta[:, :, None] * directions)
    omega = mixed_omega(6, 2, 3, generator=torch.Generator().manual_seed(1))
    directions = random_directions(6, 2, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(omega, dense_omega(geometric_theta(3, 10.0).repeat(2), directions))


# --- scalings --------------------------------------------------------------------------------------------


def geometric(dim, base):
    return torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


@pytest.mark.parametrize(("dim", "base"), [(64, 1e4), (128, 5e5), (40, 256.0)])
def test_linear_and_ntk(dim, base):
    theta, amplitude = linear_scaling(geometric(dim, base), 4.0)
    torch.testing.assert_close(theta, geometric(dim, base) / 4)
    assert amplitude == 1
    theta, amplitude = ntk_scaling(geometric(dim, base), 4.0)
    torch.testing.assert_close(theta, geometric(dim, base * 4 ** (dim / (dim - 2))))
    torch.testing.assert_close(theta[[0, -1]], geometric(dim, base)[[0, -1]] / torch.tensor([1.0, 4.0]))
    assert amplitude == 1


@pytest.mark.parametrize(("length", "factor"), [(100, 1.0), (1000, 1.0), (4000, 2.0 * 4 - 1)])
def test_dynamic_ntk(length, factor):
    theta, _ = dynamic_ntk_scaling(geometric(64, 1e4), 2.0, length=length, original_length=1000)
    torch.testing.assert_close(theta, geometric(64, 1e4 * factor ** (64 / 62)))


def test_scalings_keep_dtype_and_gradient():
    theta = geometric_theta(8, dtype=torch.float32).expand(3, 8).requires_grad_()
    for scaled, _ in (
        linear_scaling(theta, 2.0),
        ntk_scaling(theta, 2.0),
        yarn_scaling(theta, 2.0, original_length=512),
        longrope_scaling(theta, [1.0] * 8, [2.0] * 8, factor=2.0, length=64, original_length=32),
        llama3_scaling(theta, 2.0, original_length=512),
        riflex_scaling(theta, 4000, index=7),
        dype_ntk_scaling(theta, 2.0, 0.5),
        dype_yarn_scaling(theta, 2.0, torch.tensor(0.5), original_length=512),
    ):
        assert scaled.dtype == torch.float32
        assert scaled.shape == (3, 8)
        gradient = torch.autograd.grad(scaled.sum(), theta)[0]
        replaced = (scaled.detach() / theta.detach())[0, 7] < 0.5 and scaled.grad_fn.name().startswith("Where")
        assert (gradient[:, :7] > 0).all()
        # RIFLEx replaces this member with one that does not depend on theta
        assert (gradient[:, 7] > 0).all() != replaced


@pytest.mark.parametrize(
    ("dim", "base", "repeats_at", "index"), [(16, 256.0, 48, 3), (44, 1e4, 50, 5), (40, 1e4, 26, 3)]
)
@pytest.mark.parametrize("length", [20, 66, 200])
def test_riflex(dim, base, repeats_at, index, length):
    """Evaluate eq. 7 and 8 of the paper numerically.

    The component whose period is closest to the first repetition gets a period as long as the video. The authors use
    90% of this length. Shorter videos are unchanged.
    """
    periods = [round(2 * math.pi * base ** (2 * j / dim)) for j in range(dim // 2)]
    nearest = min(range(dim // 2), key=lambda j: abs(periods[j] - repeats_at))
    expected = [base ** (-2 * j / dim) for j in range(dim // 2)]
    if length > periods[nearest]:
        expected[nearest] = 0.9 * 2 * math.pi / length
    found, amplitude = riflex_scaling(geometric(dim, base), length, repeats_at=repeats_at)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert nearest == index
    assert torch.equal(found, riflex_scaling(geometric(dim, base), length, index=index)[0])
    assert amplitude == 1
    both = riflex_scaling(torch.stack([geometric(dim, base), geometric(dim, base) / 7]), length, repeats_at=repeats_at)[
        0
    ]
    assert torch.equal(both[0], found)
    assert torch.equal(both[1], riflex_scaling(geometric(dim, base) / 7, length, repeats_at=repeats_at)[0])
    assert riflex_scaling(geometric(dim, base), 1e4, index=0, share=1.0)[0][0] == 2 * math.pi / 1e4


TIMES = [1.0, 0.7, 0.31, 0.1, 0.04]


@pytest.mark.parametrize("factor", [1.5, 4.0])
@pytest.mark.parametrize("time", [*TIMES, 0.0])
def test_dype_on_ntk(factor, time):
    """NTK's scaled base is raised to the power of 2 t², as in the paper."""
    dim, base = 56, 1e4
    larger = base * max(1.0, (factor ** (dim / (dim - 2))) ** (2 * time**2))
    expected = geometric(dim, larger)
    for t in (time, torch.tensor(time, dtype=torch.float64)):
        found, amplitude = dype_ntk_scaling(geometric(dim, base), factor, t)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert amplitude == 1
    assert torch.equal(dype_ntk_scaling(geometric(dim, base), 0.5, time)[0], geometric(dim, base))


def dype_by_turns(dim, base, factor, time, length):
    """Compute DY-YaRN numerically. A component's turns in the training length determine its range."""
    if factor <= 1:
        return [base ** (-2 * i / dim) for i in range(dim // 2)]

    def place(turns):  # the index of the component with this number of turns
        return dim * math.log(length / (2 * math.pi * turns * time**2)) / (2 * math.log(base))

    def weight(i, most, least):
        begin, end = max(math.floor(place(most)), 0), min(math.ceil(place(least)), dim // 2)
        assert begin < end
        return min(max((end - i) / (end - begin), 0.0), 1.0)

    found = []
    for i in range(dim // 2):
        theta = base ** (-2 * i / dim)
        ntk = (base * factor ** (dim / (dim - 2))) ** (-2 * i / dim)
        low, high = weight(i, 1.25, 0.75), weight(i, 16, 2)
        mixed = (1 - low) * theta / factor + low * ntk
        found.append((1 - high) * mixed + high * theta)
    return found


@pytest.mark.parametrize(("dim", "base"), [(56, 1e4), (60, 500.0)])
@pytest.mark.parametrize("factor", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("time", TIMES)
def test_dype_on_yarn(dim, base, factor, time):
    if base == 500.0 and time < 0.3:
        return  # no component changes; see the next test
    expected = torch.tensor(dype_by_turns(dim, base, factor, time, 64), dtype=torch.float64)
    for t in (time, torch.tensor(time, dtype=torch.float64)):
        found, amplitude = dype_yarn_scaling(geometric(dim, base), factor, t, original_length=64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        assert amplitude == pytest.approx(max(0.1 * math.log(factor) + 1, 1.0))


def test_dype_on_yarn_at_its_ends():
    """At the end of the diffusion, nothing changes. If no component rotates often enough, all are interpolated.

    At t = 0 the authors' formula is undefined.
    """
    theta = geometric(56, 1e4)
    for time in (0.0, 0.001, torch.zeros(())):
        found, _ = dype_yarn_scaling(theta, 4.0, time, original_length=64)
        torch.testing.assert_close(found, theta, rtol=1e-12, atol=0)
    found, _ = dype_yarn_scaling(theta, 4.0, 1.0, original_length=0.5)
    torch.testing.assert_close(found, theta / 4, rtol=1e-12, atol=0)


def test_time_scalings_do_not_synchronise():
    """The meta device has no values that could be read."""
    theta, time = geometric(56, 1e4).to("meta"), torch.zeros((), device="meta")
    for scaled, _ in (
        riflex_scaling(theta, 66, repeats_at=30), riflex_scaling(theta, 66, index=2), ntk_scaling(theta, 2.0),
        linear_scaling(theta, 2.0), dype_ntk_scaling(theta, 2.0, time),
        dype_yarn_scaling(theta, 2.0, time, original_length=64),
    ):  # fmt: skip
        assert scaled.shape == theta.shape


def test_yarn_keeps_fast_frequencies():
    """This includes series with only fast frequencies, where the authors' clamp reverses its bounds."""
    theta = geometric(48, 10.0)
    assert torch.equal(yarn_scaling(theta, 2.0, original_length=10**5)[0], theta)


def test_yarn_by_head():
    """Each head of a series over all heads has a separate ramp."""
    bands = head_bands_theta(8, 2, 1e4)
    both, _ = yarn_scaling(bands, 4.0, original_length=1024)
    for one, theta in zip(both, bands, strict=True):
        torch.testing.assert_close(one, yarn_scaling(theta, 4.0, original_length=1024)[0])


def hugging_face(rope_type, dim, base, length=None, **parameters):
    rope_utils = pytest.importorskip("transformers", minversion="5.23").modeling_rope_utils
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=parameters.pop("max_position_embeddings"),
        rope_parameters={"rope_type": rope_type, "rope_theta": base, **parameters},
    )  # fmt: skip
    theta, amplitude = rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=length)
    return theta.double(), amplitude


@pytest.mark.parametrize(("dim", "base"), [(64, 1e4), (128, 1e6), (48, 10.0)])
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_scalings_equal_transformers(dim, base, factor):
    theta = geometric(dim, base)
    divisors = (1 + torch.rand(2, dim // 2)).tolist()
    short, long = divisors
    cases = {
        "linear": (linear_scaling(theta, factor), {"factor": factor, "max_position_embeddings": 512}),
        "dynamic": (
            dynamic_ntk_scaling(theta, factor, length=900, original_length=512),
            {"factor": factor, "max_position_embeddings": 512, "length": 900},
        ),
        "llama3": (
            llama3_scaling(theta, factor, original_length=1024),
            {
                "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024, "max_position_embeddings": 8192,
            },
        ),
    }  # fmt: skip
    for truncate, original in ((True, 1024), (False, 1024), (True, 128)):
        cases["yarn", truncate, original] = (
            yarn_scaling(theta, factor, original_length=original, truncate=truncate),
            {
                "factor": factor, "truncate": truncate, "original_max_position_embeddings": original,
                "max_position_embeddings": 10**8,
            },
        )  # fmt: skip
    for length in (1024, 1025):
        cases["longrope", length] = (
            longrope_scaling(theta, short, long, factor=factor, length=length, original_length=1024),
            {
                "factor": factor, "short_factor": short, "long_factor": long, "length": length,
                "original_max_position_embeddings": 1024, "max_position_embeddings": int(1024 * factor),
            },
        )  # fmt: skip
    for name, ((found, amplitude), parameters) in cases.items():
        expected, factor_ = hugging_face(name if isinstance(name, str) else name[0], dim, base, **parameters)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert amplitude == pytest.approx(factor_), name


# --- axis maps in groups, by head, with gaps ----------------------------------------------------------------


def owners(omega):
    """For each channel, return the axis (None if it is not rotated) and the member of the series."""
    axes = [int(row.argmax()) if row.any() else None for row in omega]
    return axes, [None if axis is None else float(row[axis]) for axis, row in zip(axes, omega, strict=True)]


COUNT = torch.arange(1, 33, dtype=torch.float64)  # theta whose values are its indices


def test_groups_of_axes():
    """h and w alternate, followed by t, in one series over all."""
    axes, members = owners(axial_omega(COUNT, 8, 3, axis_map=((1, 2), (0,)), sections=(2, 4, 2))[0])
    assert axes == [1, 2, 1, 2, 1, 1, 0, 0]
    assert members == list(range(1, 9))
    axes, _ = owners(axial_omega(COUNT, 16, 3, axis_map=((0, 0, 1, 2, 1, 2, 1, 2),), sections=(4, 6, 6))[0])
    assert axes == [0, 0, 1, 2, 1, 2, 1, 2] * 2
    axes, members = owners(axial_omega(COUNT, 7, 2, axis_map=((0,), (1,)), sections=(3, 2))[0])
    assert axes == [0, 0, 0, 1, 1, None, None]
    assert members[:5] == [1, 2, 3, 4, 5]
    same = axial_omega(COUNT, 9, 3, axis_map=((0,), (1,), (2,)))
    assert torch.equal(same, axial_omega(COUNT, 9, 3, axis_map="chunk", axis_order="major_first"))


def test_axis_per_head():
    omega = axial_omega(COUNT, 4, 3, axis_map="head", sections=(2, 1, 3), num_heads=7)
    assert omega.shape == (7, 4, 3)
    for head, axis in enumerate((0, 0, 1, 2, 2, 2)):
        assert owners(omega[head]) == ([axis] * 4, [1, 2, 3, 4])
    assert not omega[6].any()
    assert axial_omega(COUNT, 4, 3, axis_map="head", num_heads=8).any(1).any(-1).all()


def test_gaps_before_between_and_after():
    axes, members = owners(axial_omega(COUNT, 10, 2, sections=(3, 2), gaps=(1, 2, 2), axis_order="major_first")[0])
    assert axes == [None, 0, 0, 0, None, None, 1, 1, None, None]
    assert members == [None, 1, 2, 3, None, None, 1, 2, None, None]
    axes, members = owners(axial_omega(COUNT, 7, 3, axis_map="alternate", gaps=(1, 0), axis_order="major_first")[0])
    assert axes == [None, 0, 1, 2, 0, 1, 2]
    assert members == [None, 1, 1, 1, 2, 2, 2]
    axes, members = owners(axial_omega(COUNT, 8, 2, axis_map="chunk", gaps=(0, 2, 0), axis_order="major_first")[0])
    assert axes == [0, 0, 0, None, None, 1, 1, 1]
    assert members == [1, 2, 3, None, None, 4, 5, 6]
    axes, _ = owners(axial_omega(COUNT, 10, 3, axis_map=((1, 2), (0,)), sections=(2, 2, 2), gaps=(1, 1, 2))[0])
    assert axes == [None, 1, 2, 1, 2, None, 0, 0, None, None]
    axes, _ = owners(axial_omega(COUNT, 4, 2, axis_map="head", gaps=(1, 1))[0])
    assert axes == [None, 0, 0, None]


@pytest.mark.parametrize("axis_map", AXIS_MAPS)
def test_gaps_of_each_axis_map(axis_map):
    """Axes that take turns form a single block, so no gap can separate them."""
    sections, channels = MAPS[axis_map]
    expected = [axis for axis, _ in channels]
    gaps = (1, 2, 3) if expected == sorted(expected) else (1, 3)
    call = partial(axial_omega, COUNT, axis_order="major_first", axis_map=axis_map, sections=sections)
    axes, _ = owners(call(5 + sum(gaps), 2, gaps=gaps)[0])
    if len(gaps) == 3:
        expected[sections[0] : sections[0]] = [None, None]
    assert axes == [None, *expected, None, None, None]
    with pytest.raises(ValueError, match=f"gaps: expected {len(gaps)} channel counts"):
        call(5, 2, gaps=(0,) * (5 - len(gaps)))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"axis_map: expected one of .*or groups of axes, got 'spiral'", {"axis_map": "spiral"}),
        (r"axis_map: expected groups that contain each of the 2 axes once", {"axis_map": ((0,),)}),
        (r"axis_map: expected groups that contain each of the 2 axes once", {"axis_map": ((0, 1), (1,))}),
        (r"axis_map: expected groups that contain each of the 2 axes once", {"axis_map": ((0.0, 1),)}),
        (r"axis_map: expected one of .*or groups of axes, got ", {"axis_map": np.array([[0], [1]])}),
        (r"gaps: expected 3 channel counts \(before, between and after 2 blocks\), got \(1,\)", {"gaps": (1,)}),
        (r"gaps: expected 3 channel counts .*, got 1", {"gaps": 1}),
        (r"gaps: expected 3 channel counts .*, got \(0, 0\.5, 0\)", {"gaps": (0, 0.5, 0)}),
        (r"sections: expected a width for each of the 2 axes, got 4", {"sections": 4}),
        (r"sections: expected a width for each of the 2 axes, got \(1, 1\.5\)", {"sections": (1, 1.5)}),
        (r"sections: expected a number of heads for each of the 2 axes, got 2", {"axis_map": "head", "sections": 2}),
        (r"gaps: expected at most 8 channels in total, got \(9, 0, 0\)", {"gaps": (9, 0, 0)}),
        (r"num_heads: expected None unless axis_map is 'head', got 4", {"num_heads": 4}),
        (
            r"sections: expected at most 2 heads in total, got \(2, 2\)",
            {"axis_map": "head", "sections": (2, 2), "num_heads": 2},
        ),
    ],
)
def test_invalid_maps(message, options):
    with pytest.raises(ValueError, match=message):
        axial_omega(COUNT, 8, 2, **options)
