"""Create, register, serialise and draw custom schemes."""

import inspect
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import lrpe_md
from lrpe_md import (
    Axial,
    Coordinates,
    Dense,
    Grid,
    PresetMd,
    Scheme,
    Tokens,
    list_presets,
    preset,
    register_scheme,
    rotate,
)
from lrpe_md.frequencies import mixed_omega, ntk_scaling
from lrpe_md.presets import FUNCTIONS, SCHEMES
from lrpe_md.presets.registry import REGISTERED
from lrpe_md.presets.scheme import PRESET_OPTIONS

DOCS = Path(__file__).parents[2] / "docs"


def doubled(shape):
    return Grid(shape).rescale(2)


def dense(channels, heads, base, generator):
    return mixed_omega(channels, 2, heads, base=base, generator=generator)


OWN = Scheme("doc", 16, Axial((1, 1), 50.0), grid=doubled, tokens=Tokens(0, "zero"))


@pytest.fixture(autouse=True)
def restore_registry():
    """Remove the names that a test registers."""
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


# --- creation --------------------------------------------------------------------------------------------------------


def test_a_preset_of_a_scheme():
    made = preset(OWN, 8)
    assert made.head_dim == 8
    assert preset(OWN).head_dim == 16
    assert made.positions(1, (2, 3)) == Grid((2, 3), prefix=1).rescale(2)
    torch.testing.assert_close(made.omega[0, :, 0], torch.tensor([1.0, 50**-0.5, 0, 0], dtype=torch.float64))
    assert preset(SCHEMES["wan"]).name == "wan"
    assert torch.equal(preset(SCHEMES["wan"]).omega, preset("wan").omega)
    own = Scheme("doc", 8, Dense(2, dense, 10.0), learned=True)
    assert preset(own, num_heads=3).omega.shape == (3, 4, 2)
    assert set(dict(PresetMd(own, num_heads=3).named_parameters())) == {"omega"}
    assert torch.equal(PresetMd(OWN, head_dim=8).omega, made.omega)


def test_registered_scheme_works_like_a_published_one():
    register_scheme("ours", OWN)
    assert list_presets()[-1] == "ours"
    assert preset("ours", 8).name == "ours"
    assert preset(OWN).name == "ours"
    assert PresetMd("ours").preset.scheme is OWN
    with pytest.raises(ValueError, match="name: expected an unregistered name, or overwrite=True, got 'ours'"):
        register_scheme("ours", OWN)
    other = replace(OWN, pairs="half")
    register_scheme("ours", other, overwrite=True)
    assert preset("ours").scheme is other


def test_invalid_registrations():
    before = list_presets()
    for name in ("wan", "rotate", "none"):
        with pytest.raises(ValueError, match=f"name: expected a name that is not used by a published .* got '{name}'"):
            register_scheme(name, OWN, overwrite=True)
    for name in ("", 3):
        with pytest.raises(TypeError, match="name: expected a non-empty string"):
            register_scheme(name, OWN)
    with pytest.raises(TypeError, match=r"scheme: expected an lrpe_md.Scheme, got Axial"):
        register_scheme("ours", OWN.frequencies)
    with pytest.raises(ValueError, match="head_dim: ours doesn't support 14"):
        register_scheme("ours", replace(OWN, head_dim=14))
    assert list_presets() == before


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"map: expected one of \('rotate', 'cosine'\), got 'turn'", {"map": "turn"}),
        (r"pairs: expected one of .*, got 'thirds'", {"pairs": "thirds"}),
        (r"rotary: expected the start and end of a range within \[0, 1\], got \(0.5, 0.5\)", {"rotary": (0.5, 0.5)}),
        (r"advance, whole: expected None and False unless after is set, got", {"advance": (1,)}),
        (
            r"pairs: expected 'half' or 'interleaved' with Dense, which has no blocks",
            {"pairs": "blocks", "frequencies": Dense(2, dense, 1)},
        ),
    ],
)
def test_contradictory_schemes(message, changes):
    with pytest.raises(ValueError, match=message):
        replace(OWN, **changes)


# --- parts of a head, gaps, heads ------------------------------------------------------------------------------------


def encode(made, x, positions):
    return rotate(x, omega=made.omega, positions=positions, **made.options)


def test_a_part_of_a_head():
    """Rotate the scheme's part of a head, at the start or elsewhere, or another part by argument. Also use cosine."""
    part = replace(OWN, rotary=(0.5, 1))
    made = preset(part, 16)
    assert made.rotary_dim == slice(8, 16)
    x, positions = torch.randn(1, 1, 6, 16), made.positions((2, 3))
    y = encode(made, x, positions)
    assert torch.equal(y[..., :8], x[..., :8])
    torch.testing.assert_close(y[..., 8:], encode(preset(OWN, 8), x[..., 8:], positions))
    assert preset(part, 16, rotary_dim=4).rotary_dim == slice(0, 4)
    assert preset(OWN, 16, rotary_dim=slice(4, 12)).rotary_dim == slice(4, 12)
    assert preset(OWN, 16, rotary_dim=16).rotary_dim is None
    assert torch.equal(PresetMd(made)(x, positions=positions), y)
    cosine = preset(replace(OWN, map="cosine", rotary=(0, 0.5)), 8)
    assert PresetMd(cosine)(x[..., :8], positions=positions).shape == (1, 1, 6, 12)
    for bad in (3, 18, 0, -4, slice(2, 2), slice(0, 8, 2)):
        with pytest.raises(
            ValueError, match=r"rotary_dim: expected (an even width of at most head_dim = 16|a slice with step 1)"
        ):
            preset(OWN, 16, rotary_dim=bad)


def test_pairs_in_blocks_at_any_head_dim():
    """Within each axis's channels, pairs use the half layout, for unequal shares and either order."""
    for shares, order in (((1, 3), "major_first"), ((1, 3), "minor_first"), ((0, 1), "major_first")):
        blocks = replace(OWN, pairs="blocks", frequencies=Axial(shares, axis_order=order))
        for head_dim in (8, 24):
            made = preset(blocks, head_dim)
            widths = [share * head_dim // 2 // sum(shares) for share in shares]
            widths = [n for n in (widths if order == "major_first" else widths[::-1]) if n]
            assert made.pairs == tuple(widths)
            x, positions = torch.randn(1, 1, 6, head_dim), made.positions((2, 3))
            apart = [
                rotate(part, omega=omega, positions=positions, pairs="half")
                for part, omega in zip(x.split([2 * n for n in widths], -1), made.omega.split(widths, 1), strict=True)
            ]
            torch.testing.assert_close(encode(made, x, positions), torch.cat(apart, dim=-1))
    with pytest.raises(ValueError, match="pairs: 'blocks' needs axis_map='block' without gaps"):
        preset(replace(OWN, pairs="blocks", frequencies=Axial((1, 1), axis_map="alternate")))


def test_channels_that_are_not_rotated():
    """Gaps have shares. Leftover channels come before or after the rotated ones, or are dropped with their pairs."""
    made = preset(replace(OWN, frequencies=Axial((1, 1), gaps=(1, 0, 2))), 20)
    assert (made.omega[0] != 0).any(-1).tolist() == [False] * 2 + [True] * 4 + [False] * 4
    torch.testing.assert_close(made.omega[0, 3, 0].item(), 1e4**-0.5)  # the series does not depend on gaps
    for remainder, rotated in (("front", [False, True, True, True]), ("behind", [True, True, True, False])):
        scheme = replace(OWN, frequencies=Axial((1, 1, 1), remainder=remainder), grid=FUNCTIONS["video"])
        assert (preset(scheme, 8).omega[0] != 0).any(-1).tolist() == rotated
        assert preset(scheme, 8).rotary_dim is None
    scheme = replace(OWN, frequencies=Axial((1, 1, 1), remainder="cut"), grid=FUNCTIONS["video"])
    assert preset(scheme, 8).rotary_dim == slice(0, 6)
    with pytest.raises(ValueError, match=r"head_dim: this scheme doesn't support 4: rotary_dim: expected at least 6"):
        preset(scheme, 4)


def test_amplitude_per_axis_does_not_scale_gaps():
    scaling = (None, lambda theta: (theta, 3.0))
    made = preset(replace(OWN, frequencies=Axial((1, 1), gaps=(0, 1, 1))), 16, scaling=scaling)
    assert made.amplitude.tolist() == [1, 1, 1, 1, 3, 3, 1, 1]
    with pytest.raises(ValueError, match="scaling: expected one amplitude for all axes, because frequencies differ"):
        preset(replace(OWN, frequencies=Axial((1, 1), axis_map="head"), num_heads=2), scaling=scaling)


def test_heads_that_differ():
    by_head = replace(OWN, frequencies=Axial((1, 3), axis_map="head"), num_heads=4)
    assert preset(by_head).num_heads == 4
    assert (preset(by_head, num_heads=8).omega != 0).any(1).sum(0).tolist() == [2, 6]
    with pytest.raises(
        ValueError, match="num_heads: expected a multiple of 4 to split the heads 1 : 3 among the axes, got 6"
    ):
        preset(by_head, num_heads=6)
    across = replace(OWN, frequencies=Axial((1, 1), across_heads=True), num_heads=2)
    whole = preset(replace(OWN, frequencies=Axial((1, 1))), 32).omega
    assert torch.equal(preset(across, 16).omega, whole.reshape(2, 8, 2))


# --- tables ----------------------------------------------------------------------------------------------------------


def test_table_with_prefix_and_suffix():
    made = preset("cogview4")
    positions = made.positions(5, (3, 7), 2)
    assert (positions.prefix, positions.suffix, positions.rotated) == (5, 2, None)
    assert isinstance(positions, Coordinates)
    part = made.positions(5, (3, 7), 2, start=4, length=9)
    assert torch.equal(part.coords, positions.explicit().coords[4:13])


def test_tables_follow_preceding_tokens():
    table = replace(OWN, grid=FUNCTIONS["rounded_down"], tokens=Tokens(0, "diagonal"), after=(0, 1), advance=(1,))
    found = preset(table).positions(3, (2, 5), 1).coords
    own = Grid((2, 5)).interpolate(256).floor().coords
    assert torch.equal(found[3:13], own + 3)
    assert found[13].tolist() == [3 + 204 + 1] * 2


# --- serialisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_every_published_scheme_is_data(name):
    """A round trip through JSON preserves frequencies, positions and pairs, and gives the same JSON again."""
    scheme = SCHEMES[name]
    data = json.loads(json.dumps(scheme.to_dict()))
    again = Scheme.from_dict(data)
    assert again.to_dict() == scheme.to_dict()
    one, other = (preset(each, num_heads=scheme.num_heads) for each in (scheme, again))
    assert torch.equal(one.omega, other.omega)
    assert one.options == other.options
    shape = {1: (6,), 2: (4, 6), 3: (2, 4, 6), 4: (4, 6)}[one.num_axes]
    tokens = () if scheme.tokens is None else (3,)
    assert one.positions(*tokens, shape) == other.positions(*tokens, shape)
    for field in ("act", "map", "learned", "shared", "phase", "phase_range", "augment", "row_major", "reference"):
        assert getattr(again, field) == getattr(scheme, field)


def test_defaults_are_not_written():
    assert SCHEMES["hunyuan_image"].to_dict().keys() == {"doc", "head_dim", "frequencies", "tokens"}
    data = SCHEMES["cosmos"].to_dict()
    assert data["frequencies"]["scaling"] == [{"function": "ntk_scaling", "factor": 2.0}, None, None]
    assert data["grid"] == "seconds"


def test_custom_functions():
    scaled = replace(OWN, frequencies=Axial((1, 1), scaling=partial(ntk_scaling, factor=3.0)))
    names = {"doubled": doubled}
    with pytest.raises(ValueError, match=r"grid: expected .* a named function.*name your own functions"):
        scaled.to_dict()
    data = json.loads(json.dumps(scaled.to_dict(names)))
    again = Scheme.from_dict(data, names)
    assert again.grid is doubled
    assert torch.equal(preset(again).omega, preset(scaled).omega)
    with pytest.raises(ValueError, match=r"grid: expected one of the functions .*, got 'doubled'"):
        Scheme.from_dict(data)
    with pytest.raises(ValueError, match=r"grid: expected a functools\.partial with keyword arguments"):
        replace(OWN, grid=partial(doubled, (1, 2))).to_dict(names)


def test_own_functions_need_names_of_their_own():
    """Otherwise, a file would be read with the library's function, without an error."""
    message = "functions: expected names that lrpe_md.presets.FUNCTIONS does not contain, got 'centred' .* 'my_centred'"
    with pytest.raises(ValueError, match=message):
        OWN.to_dict({"centred": doubled})
    data = replace(OWN, grid=FUNCTIONS["cells"]).to_dict({"cells": FUNCTIONS["cells"]})  # the same function
    assert data["grid"] == "cells"
    with pytest.raises(ValueError, match=message):
        Scheme.from_dict({**data, "grid": "centred"}, {"centred": doubled})


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"data: expected a field of Scheme, got 'colour'; use one of doc, head_dim, .*", lambda d: d | {"colour": 1}),
        (r"data: expected a field of Scheme, got 'pair' \(did you mean 'pairs'\?\)$", lambda d: d | {"pair": "half"}),
        (r"data: Scheme needs head_dim, got doc, frequencies", lambda d: d.pop("head_dim") and None),
        (
            r"frequencies: expected 'kind' to be 'axial' or 'dense', got None",
            lambda d: d["frequencies"].pop("kind") and None,
        ),
        (r"frequencies: Axial needs split, got base", lambda d: d["frequencies"].pop("split") and None),
        (
            r"grid: unknown 'scal'; did you mean 'scale'\? Expected one of the arguments \['shape', 'scale'\]",
            lambda d: d | {"grid": {"function": "scaled", "scal": 2}},
        ),
        (r"data: expected a dict, as returned by to_dict, got list", lambda d: [1]),
        (r"frequencies: expected Axial or Dense, got str", lambda d: d | {"frequencies": "axial"}),
    ],
)
def test_invalid_dicts(message, change):
    data = {"doc": "", "frequencies": {"kind": "axial", "split": [1, 1], "base": 3.0}, "head_dim": 8}
    changed = change(data)
    with pytest.raises((ValueError, TypeError), match=message):
        Scheme.from_dict(data if changed is None else changed)


WRONG = {
    # fields of the scheme, its frequencies (Axial, Dense) and its tokens
    "head_dim": ["8", 8.5, True, 0, -8, 7], "num_heads": [0, 1.5, None], "doc": [3, None],
    "map": ["turn", 1], "pairs": ["thirds", None, ["half"]], "act": ["gelu", None, 1], "order": ["sin", None],
    "rotary": [0.5, [0, 0.5, 1], [0.5, 0.25], ["a", "b"], [0, math.nan]], "grid": [3, None, "unknown", {"function": 3}],
    "row_major": ["no", 0], "reference": ["ab", [0, 4], [1.5, 2], [4], [4, 4, 4]], "tokens": ["skip", 1],
    "tokens_start": [3, "unknown"], "tokens_first": ["yes", 1], "after": [1, [2], [], ["x"], [0, 0], [-1]],
    "advance": [[0]], "whole": ["yes", True], "apart": [1, [1], [1, math.inf], ["a", "b"]], "learned": ["yes", 1, None],
    "shared": ["no", 0], "phase": ["q", True, 1], "phase_range": [1, [1, 0], [0], [0, math.inf]],
    "augment": [1, {"rescal": 2}, {"rescale": 0.5}, {"rescale": "2"}], "frequencies": ["axial", [], {"kind": "mixed"}],
    "frequencies.split": [2, [], [0, 0], [1, -1], [1.5, 1], ["a", 1]],
    "frequencies.base": ["10", math.inf, math.nan, 0, -1, True, None], "frequencies.series": [3, "unknown", "plain"],
    "frequencies.axis_order": ["xy", None], "frequencies.axis_map": ["blocks", [[0]], [[0], [0, 1]], 3],
    "frequencies.gaps": [1, [1], [1, -1, 0], ["a"]], "frequencies.remainder": ["left", 2, -1, 1.5],
    "frequencies.across_heads": ["no", 0],
    "frequencies.scaling": [2.0, "unknown", [None], {"function": "ntk_scaling", "factr": 2}, "ntk_scaling"],
    "dense.num_axes": [0, 1.5, "2", 3], "dense.omega": [3, "unknown", "plain"], "dense.base": [0, math.inf, None, "2"],
    "tokens.length": [-1, 1.5, "1", True], "tokens.rule": ["never", 1], "tokens.axis": [-1, 0.5, "0", 2],
    "tokens.start": ["0", math.nan, math.inf, True],
}  # fmt: skip


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in WRONG.items() for value in values])
def test_invalid_fields_raise_on_reading(path, value):
    """Reading raises an error immediately, not only at the first preset() or positions."""
    where, _, name = path.rpartition(".")
    data = {
        "doc": "", "head_dim": 8, "frequencies": {"kind": "axial", "split": [1, 1], "base": 3.0},
        "tokens": {"length": 0, "rule": "axis"},
    }  # fmt: skip
    if where == "dense":
        data["frequencies"] = {"kind": "dense", "num_axes": 2, "omega": "random_plane", "base": 3.0}
    assert preset(Scheme.from_dict(data), num_heads=1).omega.shape == (1, 4, 2)
    part = {"": data, "frequencies": data["frequencies"], "dense": data["frequencies"], "tokens": data["tokens"]}[where]
    part[name] = value
    named = {"base": "base|series", "num_axes": "num_axes|omega"}.get(name, name)
    with pytest.raises((ValueError, TypeError), match=rf"\b({named})\b.*: "):
        Scheme.from_dict(data)


@pytest.mark.parametrize("change", [{"order": "sin_cos"}, {"map": "cosine", "pairs": "half"}])
def test_options_without_effect_are_refused(change):
    with pytest.raises(ValueError, match=r"(order|pairs): expected '\w+' \(the default\) with map="):
        replace(OWN, **change)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda theta: (theta[:1], 1.0), lambda theta: (theta.repeat(2), 1.0), lambda theta: theta,
        lambda theta: (theta, math.nan), lambda theta: (theta, torch.ones(3)), lambda theta: (1.0, theta),
    ],
)  # fmt: skip
def test_invalid_results_of_a_scaling(scaled):
    with pytest.raises((ValueError, TypeError), match="scaling: expected"):
        preset(OWN, scaling=scaled)


# --- plots -----------------------------------------------------------------------------------------------------------


def panels(figure):
    return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}


def similarity(figure):
    """Return the first similarity map, which is followed by the maps of other variants."""
    [first, *_] = [axis for title, axis in panels(figure).items() if title.startswith(("rotate", "cosine"))]
    return first.images[0].get_array()


def test_positions_that_a_scheme_does_not_support():
    module = PresetMd(Scheme("", 8, Axial((1, 1))))
    rule, scheme = (
        "has no rule for text tokens, got 1; for unrotated tokens, ",
        'use a Scheme with tokens=Tokens(0, "skip")',
    )
    for segments, grid in (
        ((1, (3, 4)), "(3, 4), prefix=1"), (((3, 4), 1), "(3, 4), suffix=1"),
        ((1, (3, 4), 2), "(3, 4), prefix=1, suffix=2"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(f"{rule}pass positions=Grid({grid}), or {scheme}") + "$"):
            module.positions(*segments)
    video = PresetMd("wan", head_dim=64)
    with pytest.raises(ValueError, match=re.escape("pass positions=Grid((2, 3, 4), prefix=5), or use a Scheme")):
        video.positions(5, (2, 3, 4))
    for segments in ((1,), (1, (3, 4), (3, 4))):  # no single grid
        with pytest.raises(ValueError, match=re.escape(rule + scheme) + "$"):
            module.positions(*segments)
    with pytest.raises(ValueError, match=re.escape(rule + scheme) + "$"):  # Grid would be at other positions
        preset(replace(OWN, tokens=None, tokens_start=None, grid=FUNCTIONS["cells"])).positions(1, (3, 4))
    skip = PresetMd(Scheme("", 8, Axial((1, 1)), tokens=Tokens(0, "skip")))
    assert skip.positions(1, (3, 4)) == Grid((3, 4), prefix=1)
    with pytest.raises(TypeError, match=r"fps: .* grids, got fps=3; leave out fps, or use a Scheme whose"):
        module.positions((3, 4), fps=3)
    with pytest.raises(TypeError, match=r"base=9\.0; pass it to preset\(\) instead, as in preset\(\.\.\., base=9"):
        module.positions((3, 4), base=9.0)


def test_errors_of_a_grid_function_are_not_blamed_on_the_shape():
    with pytest.raises(
        ValueError, match=r"^grid: expected positions with 2 axes, .* got 3 from .* for shape \(3, 4\);"
    ):
        preset(replace(OWN, grid=FUNCTIONS["centred"])).positions(1, (3, 4))
    last = preset(replace(OWN, grid=lambda shape: Grid((shape[0], shape[1]))))
    with pytest.raises(ValueError, match=r"^shape: .*grid function doesn't support \(3,\): tuple index out of range"):
        last.positions(1, (3,))


@pytest.mark.usefixtures("unplaced")
def test_drawing_a_custom_preset(tmp_path):
    pytest.importorskip("matplotlib")
    lrpe_md.show(OWN, (3, 5), tmp_path / "own.png", head_dim=8)
    assert (tmp_path / "own.png").stat().st_size > 1000
    values = similarity(lrpe_md.show(preset(OWN, 8), (3, 5)))
    assert values.shape == (3, 5)
    assert values[1, 2] == values.max() == 1
    with pytest.raises(ValueError, match="head: expected 0 to 0, got 3"):
        lrpe_md.show(OWN, head=3)
    with pytest.raises(
        ValueError, match="head_dim, num_heads: expected None with a Preset, which already defines both"
    ):
        lrpe_md.show(preset(OWN), head_dim=4)
    with pytest.raises(ValueError, match=r"shape: expected \(N,\), \(H, W\) or \(T, H, W\), got \(2, 2, 3, 5\)"):
        lrpe_md.show(OWN, (2, 2, 3, 5))
    with pytest.raises(ValueError, match=r"shape: .*, got \(0, 3\); pass positive integers, .* shape=\(14, 14\)$"):
        lrpe_md.show(OWN, (0, 3))
    for shape, found, example in (
        (Grid((3, 5)), "a Grid", "(3, 5)"), (14, "14", "(14, 14)"), ("14x14", "'14x14'", "(14, 14)"),
    ):  # fmt: skip
        expected = f"shape: expected (N,), (H, W) or (T, H, W), got {found}; pass integers, such as shape={example}"
        with pytest.raises(TypeError, match=re.escape(expected)):
            lrpe_md.show(OWN, shape)
    with pytest.raises(ValueError, match=r"shape: expected a grid on which this scheme rotates .*, got 1x1"):
        lrpe_md.show(OWN, (1, 1))


@pytest.mark.usefixtures("unplaced")
def test_only_what_a_name_describes_is_compared_with_other_maps():
    pytest.importorskip("matplotlib")
    maps = [t for t in panels(lrpe_md.show("dinov3", (3, 5))) if t.startswith(("rotate", "cosine"))]
    assert maps == ["rotate, either axis order (published)", "cosine, either axis order"]
    maps = [t for t in panels(lrpe_md.show(PresetMd("dinov3"), (3, 5))) if t.startswith(("rotate", "cosine"))]
    assert maps == ["rotate"]


@pytest.mark.usefixtures("unplaced")
def test_the_default_shape_is_one_that_the_scheme_accepts():
    pytest.importorskip("matplotlib")

    def images_only(shape):
        if len(shape) != 2:
            raise ValueError("shape: expected (H, W)")
        return lrpe_md.Grid((1, *shape))

    own = replace(OWN, frequencies=Dense(3, lambda c, *_: torch.ones(1, c, 3), 10.0), grid=images_only)
    assert "grid 18×28" in lrpe_md.show(own).get_suptitle()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: lrpe_md.RotateMd(32, 2, frequencies="mixed", num_heads=2, learnable=True),
            ["RotateMd", "head_dim 32", "16 pairs, each along all axes", "head 1 (2 heads)"],
        ),
        (lambda: lrpe_md.CosineMd(16, 2), ["CosineMd", "cosine", "head_dim 16", "16 channels: H 8, W 8"]),
        (lambda: PresetMd("dinov3"), ["dinov3", "head_dim 64", "32 pairs: H 16, W 16"]),
        (lambda: lrpe_md.RotateMd(32, 2, num_heads=2, frequencies="mixed").get_omega().float(), ["omega", "16 pairs"]),
    ],
)
@pytest.mark.usefixtures("unplaced")
def test_drawing_a_module_or_tensor(make, parts):
    pytest.importorskip("matplotlib")
    encoding = make()
    omega = encoding if isinstance(encoding, torch.Tensor) else encoding.get_omega()
    head = len(omega) - 1
    figure = lrpe_md.show(encoding, shape=(3, 5), head=head)
    assert all(part in figure.get_suptitle() for part in parts), figure.get_suptitle()
    lines = [line for line in panels(figure)["wavelengths and the grid"].lines if line.get_marker() in "os"]
    steps = (2 / 3, 2 / 5) if isinstance(encoding, PresetMd) else (1, 1)  # DINOv3's positions are in [-1, 1]
    for axis, (line, step) in enumerate(zip(lines, steps, strict=True)):
        drawn = omega[head, :, axis].detach().abs().double() * step
        assert line.get_ydata() == pytest.approx((2 * math.pi / drawn[drawn > 0]).tolist())


@pytest.mark.usefixtures("unplaced")
def test_drawing_a_module_with_moved_positions():
    pytest.importorskip("matplotlib")
    module = lrpe_md.RotateMd(32, 2)
    module.set_places(1, torch.zeros(5))
    values = similarity(lrpe_md.show(module, (3, 5)))
    assert (values == values[:, :1]).all()
    assert values[0, 0] < values[1, 0]


def test_drawing_other_objects():
    pytest.importorskip("matplotlib")
    for wrong, error, text in (
        (torch.nn.Linear(2, 2), TypeError, "got Linear; for a model with its own RoPE, pass .*"),
        (torch.full((3, 4), 0.123), ValueError, r"got torch.float32 \(3, 4\) on cpu"),
        (torch.ones(1, 4, 2, device="meta"), ValueError, "on meta"),
        (torch.ones(1, 4, 2, dtype=torch.int64), ValueError, r"got torch.int64 \(1, 4, 2\) on cpu"),
    ):
        with pytest.raises(error, match=f"^scheme: expected .*omega.*{text}$"):
            lrpe_md.show(wrong, (3, 5))
    with pytest.raises(ValueError, match="head_dim, num_heads: expected None with a RotateMd"):
        lrpe_md.show(lrpe_md.RotateMd(32, 2), head_dim=4)
    with pytest.raises(ValueError, match="shape: omega expects a shape with 2 axes"):
        lrpe_md.show(torch.ones(1, 4, 2), (3, 5, 7))
    with pytest.raises(ValueError, match=r"list_presets.*got Tensor$"):
        preset(torch.ones(1, 4, 2))


@pytest.mark.usefixtures("unplaced")
def test_drawing_float32_frequencies():
    pytest.importorskip("matplotlib")
    own = Scheme("doc", 16, Dense(2, lambda *sizes: dense(*sizes).float(), 10.0))
    assert preset(own, num_heads=1).omega.dtype == torch.float64
    assert similarity(lrpe_md.show(own, (3, 5))).shape == (3, 5)


def test_missing_folders_of_a_figure_are_created(tmp_path):
    pytest.importorskip("matplotlib")
    lrpe_md.show("wan", (3, 5), tmp_path / "a" / "b" / "wan.svg")
    assert (tmp_path / "a" / "b" / "wan.svg").stat().st_size > 1000


@pytest.mark.slow
def test_without_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; import lrpe_md; lrpe_md.show('wan')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ImportError: show: needs matplotlib; run pip install 'lrpe-md[plots]'" in done.stderr


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    """Run the code of docs/schemes.md from top to bottom."""
    pytest.importorskip("timm")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "schemes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 8
    space = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/schemes.md", "exec"), space)
    assert (tmp_path / "ours.png").exists()


def test_page_check_can_fail():
    """The check on the page fails for a different base."""
    text = (DOCS / "schemes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:6]
    assert any("test_ours_is_the_formula()" in block for block in blocks)
    page = "\n".join(blocks).replace("base=500.0", "base=501.0")
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        exec(compile(page, "docs/schemes.md", "exec"), {"__name__": "page"})


@pytest.mark.slow
def test_show_on_a_dark_background(tmp_path):
    colors = pytest.importorskip("matplotlib.colors")
    light, dark = (lrpe_md.show(OWN, (3, 5), tmp_path / f"{dark}.png", dark=dark) for dark in (False, True))
    assert sum(light.get_facecolor()[:3]) > 2.9
    assert sum(dark.get_facecolor()[:3]) < 0.6
    assert sum(map(float, colors.to_rgb(dark.axes[0].title.get_color()))) > 2


def test_tokens_at_zero_have_the_phase_next_to_any_segments():
    scheme = Scheme("doc", 8, Axial((1, 1), 50.0), tokens=Tokens(0, "zero"), map="cosine", act="softplus", phase="k")
    module = PresetMd(preset(scheme, 8, 2))
    torch.nn.init.normal_(module.phase)
    x = torch.randn(1, 2, 8, 8)
    _, one = module(x, x, positions=module.preset.positions(2, (2, 3)))
    _, two = module(x, x, positions=module.preset.positions(2, (1, 3), (1, 3)))
    torch.testing.assert_close(one[:, :, :2], two[:, :, :2])


def test_preset_options_are_those_of_preset():
    keywords = [p.name for p in inspect.signature(preset).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert list(PRESET_OPTIONS) == keywords
