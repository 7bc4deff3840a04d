"""scripts.visualize: every figure, and a comparison of the numbers in the panels with plain Python loops."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lrpe_md.models.dit import DiT
from lrpe_md.models.video import LrpeVideoTransformer
from lrpe_md.scripts.visualize import pictures as visualize
from lrpe_md.scripts.visualize.app import app
from matplotlib import mathtext
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from parametrizing import slow_except
from torch import Tensor
from typer.testing import CliRunner

import lrpe_md
from lrpe_md import Scheme, cosine, list_presets, preset, rotate
from lrpe_md.picture import data
from lrpe_md.picture.dark import DARK_TEXT, darken
from lrpe_md.presets import Axial
from lrpe_md.presets.registry import SCHEMES, Dense

TINY = {1: (9,), 2: (4, 6), 3: (3, 4, 6)}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def tiny(name: str, shape: tuple[int, ...] | None = None, **options: Any) -> visualize.View:
    subject = data.published(name, num_heads=8 if name == "mhrope" else 2)
    shape = TINY[len(data.default_shape(subject.preset))] if shape is None else shape
    return visualize.build_view(subject, shape="x".join(map(str, shape)), **options)


def cells(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List the cells of a grid in row-major order."""
    out: list[tuple[int, ...]] = [()]
    for n in shape:
        out = [(*index, i) for index in out for i in range(n)]
    return out


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except(["dinov3", "pope", "qwen2_vl_vision", "wan"], list_presets()))
def test_each_preset_has_a_figure_with_named_axes(name: str):
    view = tiny(name)
    figure = visualize.draw(view)
    titled = {axis.get_title(): axis for axis in figure.axes if axis.get_title()}
    assert all(axis.get_xlabel() or len(view.frames) > 1 for axis in titled.values())
    assert all(axis.get_ylabel() for axis in titled.values())
    assert {"wavelengths and the grid"} < set(titled)
    if len(view.layout.shape) > 1:
        assert sum(t.startswith(("pair ", "channel ")) for t in titled) == len(view.channels)
        drawn = sum(t.startswith(("rotate", "cosine")) for t in titled)
        assert drawn == len(view.scores) >= 2
        bars = {axis.get_ylabel() for axis in figure.axes if axis.get_label() == "<colorbar>"}
        assert bars == {"angle Θ, rad", "similarity"}
    assert name in figure.get_suptitle().replace(r"\_", "_")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov3", "pope", "qwen2_vl_vision", "wan"])
@pytest.mark.usefixtures("unplaced")
def test_show_draws_the_same_panels(name: str):
    """lrpe_md.show and the command draw the same axes, images and lines, in the same order."""
    drawn = visualize.draw(visualize.build_view(data.published(name))), lrpe_md.show(name)
    ours, shown = [
        [
            [axis.get_title(), *(i.get_array().tolist() for i in axis.images), *(x.get_xydata() for x in axis.lines)]
            for axis in figure.axes
        ]
        for figure in drawn
    ]
    assert len(ours) > 3
    assert str(ours) == str(shown)  # as text, because the gaps between frames are NaN
    assert drawn[0].get_suptitle() == drawn[1].get_suptitle()


@pytest.mark.usefixtures("unplaced")
def test_compared_panels_share_a_scale():
    figure = visualize.draw(tiny("pixtral"))
    images = [a.images[0] for a in figure.axes if a.images and a.get_title()]
    angle, score = images[:4], images[4:]
    assert len(score) == 4
    assert {image.get_clim() for image in angle} == {(-math.pi, math.pi)}
    assert len({image.get_clim() for image in score}) == 1
    low, high = score[0].get_clim()
    assert all(low <= image.get_array().min() and image.get_array().max() <= high for image in score)


@pytest.mark.parametrize("low", [-0.2, -0.1, 0.3, 0.7])
def test_colour_bars_label_similarity_one(low: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lrpe_md.picture.figure.lowest_similarity", lambda *_: low)
    figure = lrpe_md.show("rope_vit_mixed", (14, 14), panels=["similarity"], num_heads=6, head=3)
    (bar,) = [axis for axis in figure.axes if axis.get_label() == "<colorbar>"]
    figure.draw_without_rendering()
    assert bar.get_ylim() == (low, 1.0)
    assert bar.get_yticks()[-1] == 1.0
    assert bar.get_yticklabels()[-1].get_text().rstrip("0") == "1."


def similarity_limits(figure: Any) -> set[tuple[float, ...]]:
    """Return the limits of similarity in all maps, slices and lines of a figure, without the margin of a plot."""
    axes = figure.axes
    images = {i.get_clim() for axis in axes for i in axis.images if i.get_cmap().name == "cividis"}
    plots = [axis.get_ylim() for axis in axes if axis.get_ylabel() == "similarity" and axis.lines]
    return images | {(round((21 * low + high) / 22, 6), round((low + 21 * high) / 22, 6)) for low, high in plots}


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_only_compared_encodings_share_a_scale():
    alone = [similarity_limits(lrpe_md.show(name, (4, 6))) for name in ("wan", "rope_vit_mixed")]
    assert all(len(limits) == 1 for limits in alone)
    assert alone[0] != alone[1]
    compared = similarity_limits(lrpe_md.show(["wan", "rope_vit_mixed"], (4, 6)))
    assert compared == {min(*alone[0], *alone[1])}


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_a_comparison_has_a_row_for_each_preset(tmp_path: Path):
    """The command and lrpe_md.show draw the same figure, on one scale."""
    names = ["wan", "dinov3", "pope"]
    given = [part for name in names for part in ("-p", name)]
    result = run(*given, "--compare", "--out", str(tmp_path), "--dpi", "20")
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(tmp_path / "comparison.png")
    figure = lrpe_md.show(names, token=None)
    assert len(similarity_limits(figure)) == 1
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert [title.replace(",\n", ", ") for title in titles if title.startswith("$")] == [
        "$\\mathbf{wan}$\nrotate, either axis order (published), head_dim 128, grid 9×18×28",
        "$\\mathbf{dinov3}$\nrotate, either axis order (published), head_dim 64, grid 18×28, positions scaled by the "
        "scheme's own rule",
        "$\\mathbf{pope}$\ncosine (published), head_dim 64, tokens 64, phase set to 0",
    ]
    assert titles.count("wavelengths and the grid") == 3
    alone = lrpe_md.show("dinov3")
    maps = [
        [i.get_array().tolist() for axis in axes for i in axis.images if i.get_cmap().name == "cividis"]
        for axes in (figure.axes, alone.axes)
    ]
    assert maps[0][1] == maps[1][0]
    with pytest.raises(ValueError, match="scheme: expected one or more encodings, got an empty list"):
        lrpe_md.show([])


def bold_titles(encodings):
    """Return the title of each encoding in a comparison."""
    titles = [axis.get_title() for axis in lrpe_md.show(encodings, (4, 6)).axes]
    return [title.splitlines()[0] for title in titles if title.startswith("$")]


@pytest.mark.usefixtures("unplaced")
def test_a_comparison_takes_titles():
    encodings = {f"base {base}": lrpe_md.RotateMd(16, 2, base=base) for base in (10, 100)}
    assert bold_titles(encodings) == [r"$\mathbf{base\ 10}$", r"$\mathbf{base\ 100}$"]
    assert bold_titles({r"$\theta=10$": encodings["base 10"]}) == [r"$\theta=10$"]
    assert bold_titles({r"base $\theta = 10$": encodings["base 10"]}) == [r"$\mathbf{base\ }$$\theta = 10$"]


@pytest.mark.slow
def test_lines_of_a_title_do_not_break_formulas():
    for start in ("base", "a base", "with a base", "rotation with a base"):
        figure = lrpe_md.show({rf"{start} $\theta = 10$": lrpe_md.RotateMd(16, 2)}, (4, 6), width=3.25)
        assert r"$\theta = 10$" in figure.axes[0].get_title()
    for formula in (r"$\omega_h=10000^{-2i/d},\ \omega_w=\omega_h\cos\phi,\ \phi=\pi/4$", r"$\alpha$$\beta$"):
        assert formula in lrpe_md.show({formula: lrpe_md.RotateMd(16, 2)}, (4, 6), width=3.25).axes[0].get_title()


def test_a_title_is_as_long_as_its_formulas_look():
    figure = lrpe_md.show({r"axial, $\theta=100$": lrpe_md.RotateMd(16, 2)}, (12, 16), width=6.75)
    assert figure.axes[0].get_title().splitlines()[0].endswith(r"$\theta=100$")


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_titles_may_contain_any_character():
    """Unless they are escaped, mathtext rejects or changes some characters."""
    printable = "".join(map(chr, range(32, 127)))
    for name in (printable, *"#$%\\^{}~", "a\nb"):
        figure = lrpe_md.show({name: lrpe_md.RotateMd(16, 2)}, (4, 6))
        title = figure.axes[0].get_title()
        assert "\nb" not in title
        mathtext.MathTextParser("path").parse(title.splitlines()[0])
    assert bold_titles({"a^{b}": lrpe_md.RotateMd(16, 2)}) == [r"$\mathbf{a\text{\^}\text{\{}b\text{\}}}$"]


@pytest.mark.usefixtures("unplaced")
def test_compared_wavelengths_share_a_scale():
    def limits(*names: str) -> list[tuple[float, float]]:
        axes = lrpe_md.show(list(names), (14, 14)).axes
        return [axis.get_ylim() for axis in axes if axis.get_title() == "wavelengths and the grid"]

    [one], [other], both = limits("eva02"), limits("rope_vit_axial"), limits("eva02", "rope_vit_axial")
    assert one != other
    assert both[0] == both[1] == (min(one[0], other[0]), pytest.approx(max(one[1], other[1]), rel=0.2))


@pytest.mark.usefixtures("unplaced")
def test_a_comparison_states_the_head_dim_only_if_rows_differ():
    def titles(**options: Any) -> str:
        return "\n".join(axis.get_title() for axis in lrpe_md.show(["rope_1d", "pope"], **options).axes)

    assert "head_dim 128" in titles()
    assert "head_dim 64" in titles()
    assert "head_dim" not in titles(head_dim=64)


@pytest.mark.usefixtures("unplaced")
def test_a_comparison_of_sequences_has_no_slices():
    titles = [axis.get_title() for axis in lrpe_md.show(["rope_1d", "pope"]).axes]
    assert len(titles) == 4
    assert not any("slices" in title for title in titles)


@pytest.mark.slow
def test_a_pdf_has_no_type_3_fonts(tmp_path: Path):
    lrpe_md.show("rope_1d", path=tmp_path / "shown.pdf")
    assert run("-p", "rope_1d", "--format", "pdf", "--out", str(tmp_path)).exit_code == 0
    for name in ("shown", "rope_1d"):
        content = (tmp_path / f"{name}.pdf").read_bytes()
        assert b"/Subtype /CIDFontType2" in content
        assert b"/Subtype /Type3" not in content


@pytest.mark.slow
def test_the_band_of_aliased_wavelengths_is_dark_on_a_dark_page():
    axis = lrpe_md.show(["cogview4"], (14, 14), dark=True).axes[2]
    [band] = axis.patches
    assert band.get_alpha() == 0.2


def test_ticks_that_appear_later_are_light_on_a_dark_page():
    figure = Figure()
    axis = figure.add_subplot()
    for count in (9, 2):  # matplotlib keeps the other seven ticks, and draws them again later
        axis.set_yticks(range(count))
        axis.get_yticklabels()
    darken(figure)
    axis.set_yticks(range(9))
    assert {to_hex(label.get_color()) for label in axis.get_yticklabels()} == {DARK_TEXT}
    assert {to_hex(line.get_color()) for line in axis.get_yticklines()} == {DARK_TEXT}


@pytest.mark.slow
def test_rows_of_a_comparison_have_the_same_ticks():
    figure = lrpe_md.show(["wan", "cogvideox", "hunyuan_video"], (5, 12, 20), head_dim=64)
    ticks = [axis.get_yticks().tolist() for axis in figure.axes if axis.get_title().startswith("slices")]
    assert len(ticks) == 3
    assert ticks[0] == ticks[1] == ticks[2]


def test_labels_of_plots_side_by_side_break_into_the_same_lines():
    figure = lrpe_md.show(["dinov3", "rope_vit_mixed"], (18, 28), panels=["slices"], width=5.5)
    assert [axis.get_xlabel() for axis in figure.axes] == ["distance from the\nmarked token, tokens"] * 2


@pytest.mark.usefixtures("unplaced")
def test_a_comparison_names_the_head():
    encodings = [lrpe_md.RotateMd(16, 2, frequencies="mixed", num_heads=3), lrpe_md.RotateMd(16, 2)]
    titles = [axis.get_title() for axis in lrpe_md.show(encodings, (4, 6)).axes if "RotateMd" in axis.get_title()]
    assert titles[0].endswith(", grid 4×6, head 0 (3 heads)")
    assert titles[1].endswith(", grid 4×6")


@pytest.mark.usefixtures("unplaced")
def test_the_ring_is_complete_at_the_border():
    figure = lrpe_md.show(["dinov3"], (4, 6), token=(0, 0))
    [ring] = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert not ring.get_clip_on()


@pytest.mark.slow
def test_distances_in_slices_do_not_overlap():
    figure = lrpe_md.show(["dinov3"], (16, 24), token=(0, 23))
    figure.draw_without_rendering()
    low, high = figure.axes[1].get_xlim()
    shown = [text for text in figure.axes[1].get_xticklabels() if low <= text.get_position()[0] <= high]
    boxes = [text.get_window_extent() for text in shown]
    gap = 4 * figure.dpi / 72  # points
    assert all(left.x1 + gap < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_a_model_is_drawn_with_its_encoding():
    encoding = lrpe_md.RotateMd(16, 2)
    model = torch.nn.Module()
    with pytest.raises(TypeError, match=r"model.encoding\), or a tensor omega .*, got Module; .* own RoPE, pass"):
        lrpe_md.show(model)
    model.encoding = encoding
    assert lrpe_md.show(model, (4, 6)).get_suptitle() == lrpe_md.show(encoding, (4, 6)).get_suptitle()
    model.encoding = torch.nn.ModuleList([encoding, lrpe_md.RotateMd(16, 2, base=10)])
    for layers in (model, model.encoding):
        assert bold_titles(layers) == [r"$\mathbf{layer\ 0}$", r"$\mathbf{layer\ 1}$"]


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_a_model_is_drawn_with_its_reference():
    model = torch.nn.Module()
    model.encoding = lrpe_md.RotateMd(16, 2)
    model.reference = (4, 6)
    rescaled = lrpe_md.show(model.encoding, (8, 6), reference=(4, 6))
    assert lrpe_md.show(model, (8, 6)).get_suptitle() == rescaled.get_suptitle()
    drawn, expected = (each.axes[0].images[0].get_array() for each in (lrpe_md.show(model, (8, 6)), rescaled))
    assert (drawn == expected).all()
    assert "rescaled" not in lrpe_md.show(model, (8, 6), reference=None).get_suptitle()
    model.reference = lambda shape: tuple(n // 2 for n in shape)
    assert "positions rescaled to 4×3" in lrpe_md.show(model, (8, 6)).get_suptitle()
    model.encoding = lrpe_md.PresetMd("wan", head_dim=16)
    assert "positions rescaled to –×4×3" in lrpe_md.show(model, (8, 6)).get_suptitle()


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_titles_state_what_is_left_out_of_a_module():
    for module, expected in (
        (lrpe_md.CosineMd(16, 1, phase=True), "phase set to 0"),
        (lrpe_md.RotateMd(16, 1, phase="k"), "phase set to 0"),
        (lrpe_md.Rotate1d(16, scale_base=64), "xPos scale set to 1"),
    ):
        assert lrpe_md.show(module, (8,)).get_suptitle().endswith(f"   ·   {expected}")


@pytest.mark.usefixtures("unplaced")
def test_a_model_is_drawn_with_its_rules_for_text_and_time():
    sizes: Any = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    model = DiT(
        **sizes, encoding="rotate", text_width=4, text_positions=lrpe_md.Tokens(0, "axis", axis=1), image_after=(1,)
    )
    angles = lrpe_md.show(model, (3, 4), text=2, channels=[0], panels=["angles"]).axes[0].images[0].get_array()
    theta = model.encoding.get_omega()[0, 0, 1].item()
    assert angles[0, :2].tolist() == pytest.approx([0, theta])
    assert angles[2, :4].tolist() == pytest.approx([math.remainder(theta * i, 2 * math.pi) for i in (2, 3, 4, 5)])
    video = LrpeVideoTransformer(8, 4, **sizes, tubelet_size=1, encoding="rotate", temporal=False)
    [_, axis] = lrpe_md.show(video, (3, 2, 2), panels=["slices", "wavelengths"]).axes
    assert axis.get_legend().get_texts()[0].get_text() == "T, in positions (not on this grid)"
    [axis] = lrpe_md.show(video, (3, 2, 2), panels=["slices"]).axes
    assert axis.lines[0].get_label() == "along T"
    assert axis.lines[0].get_ydata() == pytest.approx([1, 1, 1])


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_models_are_compared():
    model = torch.nn.Module()
    model.encoding, model.reference = lrpe_md.RotateMd(16, 2), (4, 6)
    titles = [axis.get_title() for axis in lrpe_md.show({1: model, 0.5: "dinov3"}, (8, 6)).axes]
    assert titles[0].startswith(r"$\mathbf{1}$")
    assert titles[0].endswith("positions rescaled to 4×6")
    assert titles[3].startswith(r"$\mathbf{0.5}$")
    assert "rescaled" not in titles[3]
    model.encoding = torch.nn.ModuleList([lrpe_md.RotateMd(16, 2), lrpe_md.RotateMd(16, 2, base=10)])
    assert "rescaled to 4×6" in lrpe_md.show(model, (8, 6)).axes[0].get_title().replace("\n", " ")
    with pytest.raises(TypeError, match=r"separate encodings per layer; .* pass model.encoding\[i\]"):
        lrpe_md.show([model, "dinov3"], (8, 6))


@pytest.mark.slow
def test_text_before_a_grid_is_not_rotated_by_a_module():
    encoding = lrpe_md.CosineMd(16, 2)
    for drawn in (encoding, encoding.get_omega()):
        figure = lrpe_md.show(drawn, (4, 6), text=1, channels=[0])
        assert figure.get_suptitle().endswith("1 prefix token")
        axis = figure.axes[0]
        labels = [label.get_text() for label in axis.get_yticklabels()]
        assert "prefix" in labels
        assert "text" not in labels
        assert "interleaved" not in figure.get_suptitle()
        image = axis.images[0].get_array()
        assert image[0, 0] == 0
        assert image.mask[0, 1:].all()
    with pytest.raises(ValueError, match=r"draw wan without text=, or .*: dataclasses\.replace\(preset\(\.\.\.\)\."):
        lrpe_md.show("wan", text=1)


@pytest.mark.slow
def test_only_text_with_positions_is_labelled_text():
    for name, shape in (("qwen3_vl", (4, 6)), ("flux1", (4, 6)), ("rope_1d", (8,))):
        figure = lrpe_md.show(name, shape, text=2)
        assert figure.get_suptitle().endswith("2 text tokens")
        drawn = figure.axes
        labels = [label.get_text() for axis in drawn for label in (*axis.get_yticklabels(), axis.xaxis.label)]
        assert ("text" in labels) or ("token (left: the text)" in labels)
    figure = lrpe_md.show(lrpe_md.RotateMd(16, 1), (8,), text=2, panels=["similarity"])
    [axis] = figure.axes
    assert axis.get_xlabel() == "token (left: the prefix)"


def test_figures_need_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "wan.png"):
        result = run("-p", "wan", "--out", str(out))
        assert result.exit_code == 2
        assert "--out: expected a folder, got" in result.output
    assert not (tmp_path / "wan.png").exists()
    result = run("-p", "wan", "--shape", "2x2", "--out", str(tmp_path / "file" / "figures"))
    assert result.exit_code == 2
    assert "can't be written (Not a directory); choose another folder" in result.output


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_show_takes_the_options_of_the_command():
    drawn = visualize.draw(
        visualize.build_view(data.published("eva02"), shape="4x6", text=2, token="1x4", channels=[3, 9])
    )
    shown = lrpe_md.show("eva02", (4, 6), text=2, token=(1, 4), channels=[3, 9])
    ours, theirs = [[a.get_title() for a in figure.axes] for figure in (drawn, shown)]
    assert ours == theirs
    assert "2 prefix tokens" in shown.get_suptitle()
    two = lrpe_md.show("eva02", (4, 6), maps=2)
    assert sum(a.get_title().startswith("pair ") for a in two.axes) == 2
    refused: Any = (
        ({"token": (4, 0)}, ValueError, r"token: expected coordinates on the grid \(4, 6\)"),
        ({"token": "1x4"}, TypeError, r"token: expected grid coordinates, such as \(2, 3\), got '1x4'"),
        ({"channels": [32]}, ValueError, "channels: expected 0 to 31, got 32$"),
        ({"head": 1}, ValueError, "head: expected 0 to 0, got 1; for more heads, pass num_heads="),
        ({"channels": 3}, TypeError, r"channels: expected a list of integers, such as \[0, 8\], got 3"),
        ({"channels": [3], "panels": ["slices"]}, ValueError, r"without angle maps, got \[3\]; also draw the panel"),
        ({"maps": 2, "panels": ["slices"]}, ValueError, "maps: expected None for .* angle maps, got 2; also draw"),
        ({"maps": 0}, ValueError, "maps: expected a positive integer, got 0"),
        ({"text": -1}, ValueError, "text: expected a non-negative integer, got -1"),
    )
    for options, error, message in refused:
        with pytest.raises(error, match=message):
            lrpe_md.show("eva02", (4, 6), **options)
    with pytest.raises(ValueError, match=r"channels: expected none .*, got \[3\]; draw one encoding at a time"):
        lrpe_md.show(["eva02", "dinov3"], (4, 6), channels=[3])
    with pytest.raises(ValueError, match=r"got \[3\]; pass the encoding itself instead of a list or dict"):
        lrpe_md.show({"eva": "eva02"}, (4, 6), channels=[3])


@pytest.mark.usefixtures("unplaced")
def test_an_axis_that_the_grid_does_not_follow_is_explained():
    figure = visualize.draw(tiny("wan", (4, 6)))
    axes = {a.get_title(): a for a in figure.axes}
    marks = [text.get_text() for text in axes["wavelengths and the grid"].get_legend().get_texts()]
    assert "T, in positions (not on this grid)" in marks


@pytest.mark.slow
def test_ticks_of_channels_are_whole_numbers():
    figure = lrpe_md.show(lrpe_md.RotateMd(6, 2), (4, 6))
    figure.draw_without_rendering()
    [waves] = [a for a in figure.axes if a.get_title() == "wavelengths and the grid"]
    assert all(float(tick).is_integer() for tick in waves.get_xticks())


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_sizes_are_those_of_the_grid():
    """All axes of Circle-RoPE change along T, H and W."""
    for name, wanted in (
        ("circle_rope", ["T, in tokens along W", "H, in tokens along W", "W, and its size 5"]),
        ("rope_1d", ["N, in tokens along W"]),
        ("videorope", ["T, and its size 3", "H, and its size 4", "W, and its size 5"]),
    ):
        figure = visualize.draw(tiny(name, (3, 4, 5), text=0))
        [axis] = [a for a in figure.axes if a.get_title() == "wavelengths and the grid"]
        assert [text.get_text() for text in axis.get_legend().get_texts()] == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_unrotated_and_aliased_channels_are_marked():
    subject = visualize.custom("axial", 2, head_dim=12)

    def omega(channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
        first = torch.tensor([[[4.0, 0.0], [0.0, 0.5], [0.0, 0.0], [0.1, 0.0], [0.0, 0.0], [0.0, 0.2]]]).double()
        return torch.nn.functional.pad(first, (0, 0, 0, channels - 6))

    subject = replace(subject, frequencies={data.NO_ORDER: Dense(2, omega, 1.0)})
    subject = replace(subject, preset=replace(subject.preset, omega=subject.omega("rotate", data.NO_ORDER)))
    view = visualize.build_view(subject, shape="5x7")
    assert view.channels == [0, 1, 5, 3]
    figure = visualize.draw(view)
    axes = {a.get_title(): a for a in figure.axes}
    waves = axes["wavelengths and the grid"]
    marks = {text.get_text(): text for text in waves.get_legend().get_texts()}
    assert {"H, and its size 5", "W, and its size 7", "not rotated", "aliased, λ < 2"} == set(marks)
    crosses = next(line for line in waves.lines if line.get_marker() == "x")
    assert list(crosses.get_xdata()) == [2, 4]
    assert not crosses.get_clip_on()  # markers above the axis must not be clipped
    assert "pair 0, H: λ = 1.57 tokens (aliased)" in axes
    assert "pair 1, W: λ = 12.6 tokens" in axes


@pytest.mark.slow
def test_ticks_are_whole_and_on_the_grid():
    figure = visualize.draw(tiny("hunyuan_video", (1, 6), text=2))
    axis = figure.axes[0]
    assert [(y, text.get_text()) for y, text in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)] == [
        (2.0, "0"), (0.0, "prefix")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "text", "wanted"),
    [
        ((3, 60), 0, "01530"),
        *[pytest.param(*each, "0", marks=pytest.mark.slow) for each in (((30, 1), 20), ((200, 2), 3), ((4, 6), 1500))],
    ],
)
def test_labels_of_ticks_do_not_overlap(shape: tuple[int, ...], text: int, wanted: str):
    figure = lrpe_md.show(["flux1", "eva02"], shape) if not text else lrpe_md.show("flux1", shape, text=text)
    figure.draw_without_rendering()
    pictures = [axis for axis in figure.axes if axis.get_ylabel() == "H"]
    assert len(pictures) >= 2
    for axis in pictures:
        assert "".join(label.get_text() for label in axis.get_xticklabels()).startswith(wanted)
        for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels]
            assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.slow
def test_the_label_of_the_text_covers_no_other():
    figure = lrpe_md.show("flux1", (32, 48), text=16)
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["8", "16", "24", "text"]


@pytest.mark.slow
def test_a_long_header_has_two_lines():
    options: Any = {"num_heads": 3, "head": 2, "reference": 14, "text": 1}
    figure = lrpe_md.show("rope_vit_mixed", (24, 24), **options)
    figure.draw_without_rendering()
    assert "   ·   head 2 (3 heads)   ·   " in figure.get_suptitle().split("\n")[1]
    assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1  # pyright: ignore[reportAttributeAccessIssue]
    assert "\n" not in lrpe_md.show("rope_vit_axial", (24, 24)).get_suptitle()


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"), [(n, text) for n in list_presets() for text in (0, 3) if not text or SCHEMES[n].tokens]
)
def test_similarity_matches_encoded_tokens(name: str, text: int):
    """Encode equal content in all channels with the library, and compare q·k."""
    view = tiny(name, text=text)
    made, layout = view.subject.preset, view.layout
    positions = made.positions(*([text] if text else []), layout.shape)
    x = torch.ones(1, made.omega.shape[0], positions.num_tokens, made.head_dim, dtype=torch.float64)
    encode = {"cosine": cosine, "rotate": rotate}[made.scheme.map]
    y = encode(x, omega=made.omega, positions=positions, **made.options)
    for head in range(made.omega.shape[0]):
        here = replace(view, head=head)
        score = here.scores[0][1]
        # Tokens in blocks of 2×2 have a different order, so compare sorted values.
        subject, variant = here.subject, here.default_variant
        numbers = range(text, positions.num_tokens)
        all_scores = torch.stack([subject.similarity(layout, variant, head, i) for i in numbers])
        products = y[0, head] @ y[0, head].T
        wanted = (products / products.diagonal()[:, None])[text:]
        if made.scheme.row_major:
            torch.testing.assert_close(all_scores, wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(score, wanted[layout.index(view.token) - text], rtol=0, atol=1e-12)
        torch.testing.assert_close(all_scores.flatten().sort()[0], wanted.flatten().sort()[0], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "amplitude"), [
    ("rotate", None), ("rotate", 1.5), ("rotate", torch.tensor([0.5, 1.0, 2.0])), ("cosine", None), ("preset", 1.0),
    ("preset", 1.5),
])  # fmt: skip
@pytest.mark.usefixtures("unplaced")
def test_similarity_counts_unrotated_channels_and_amplitudes(name: str, amplitude: Any):
    """Compare the figure of a module with q·k of the module, for text and a grid."""
    from lrpe_md import CosineMd, PresetMd, RotateMd

    shape, text, dtype = (3, 5), 2, torch.float64
    if name == "rotate":
        module = RotateMd(12, 2, frequencies="mixed", rotary_dim=slice(2, 8), amplitude=amplitude, dtype=dtype)
    elif name == "cosine":
        module = CosineMd(12, 2, rotary_dim=6, dtype=dtype)
    else:
        own = Axial((1, 1), scaling=lambda theta: (theta, amplitude))
        module = PresetMd(Scheme("ours", 16, own, rotary=(0.0, 0.5), tokens=lrpe_md.Tokens(0, "skip")), dtype=dtype)
    x = torch.ones(1, 1, text + 15, module.head_dim, dtype=torch.float64)
    y, _ = module(x, x, positions=lrpe_md.Grid(shape, prefix=text))
    score = (y[0, 0] @ y[0, 0, text + 7]).detach()
    figure = lrpe_md.show(module, shape, text=text)
    axes = figure.axes
    [axis] = [a for a in axes if a.get_title() == module.map]
    image = torch.tensor(axis.images[0].get_array().filled(math.nan))
    drawn = torch.cat([image[0, :text], image[2:].flatten()])
    torch.testing.assert_close(drawn, score / score[text + 7], rtol=0, atol=1e-12)
    assert f"{6 if name != 'preset' else 8} of {module.head_dim} channels rotated" in figure.get_suptitle()


def test_each_variant_counts_unrotated_channels():
    """Qwen3.5 rotates a quarter of the channels. Both maps leave the same channels unrotated."""
    view = tiny("qwen3_5")
    for names, values in view.scores:
        theta = data.token_angles(view.layout, view.omega(names[0]))
        cosines = (theta - theta[view.layout.index(view.token)]).cos().mean(-1)
        torch.testing.assert_close(values, 0.25 * cosines + 0.75, rtol=0, atol=1e-12)


def test_similarity_of_many_tokens_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch):
    wanted = tiny("qwen3_vl", text=3).scores[0][1]
    monkeypatch.setattr(data, "CHUNK", 5)
    torch.testing.assert_close(tiny("qwen3_vl", text=3).scores[0][1], wanted, rtol=0, atol=0)


def test_angles_and_similarity_by_hand():
    """EVA-02 has h·16/H on the first half of the pairs and w·16/W on the second half. Class tokens are at zero."""
    view = tiny("eva02", text=2, token="1x4")
    theta = data.token_angles(view.layout, view.omega(view.default_variant))
    assert theta.shape == (2 + 24, 32)
    found = []
    for row, (h, w) in enumerate(cells((4, 6)), start=2):
        angles = [h * 16 / 4 * 10000 ** (-i / 16) for i in range(16)]
        angles += [w * 16 / 6 * 10000 ** (-i / 16) for i in range(16)]
        found.append(angles)
        assert theta[row].tolist() == pytest.approx(angles, abs=1e-12)
    assert not theta[:2].any()
    at = found[1 * 6 + 4]
    score = [sum(math.cos(a - b) for a, b in zip(row, at, strict=True)) / 32 for row in ([0.0] * 32,) * 2 + (*found,)]
    names, values = view.scores[0]
    assert values.tolist() == pytest.approx(score, abs=1e-12)
    # both orders, because the axes have equal series
    assert names == [("rotate", "major_first"), ("rotate", "minor_first")]


def test_each_map_and_axis_order_by_hand():
    """Pixtral has one series. Even members belong to the first axis, and odd members to the second."""
    view = tiny("pixtral", token="2x1")
    scores = view.scores
    assert [names for names, _ in scores] == [[(m, o)] for m in ("rotate", "cosine") for o in
                                              ("major_first", "minor_first")]  # fmt: skip
    for [(mapping, order)], values in scores:
        num = 64 if mapping == "cosine" else 32
        series = [1e4 ** (-i / num) for i in range(num)]
        first, second = series[::2], series[1::2]
        h, w = (first, second) if order == "major_first" else (second, first)
        wanted = [
            (sum(math.cos((i - 2) * f) for f in h) + sum(math.cos((j - 1) * f) for f in w)) / num
            for i, j in cells((4, 6))
        ]
        assert values.tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("order", ["minor_first", "major_first"])
@pytest.mark.parametrize("mapping", ["rotate", "cosine"])
def test_custom_frequencies_equal_the_modules(mapping: str, order: Any):
    from lrpe_md import CosineMd, RotateMd

    module = {"rotate": RotateMd, "cosine": CosineMd}[mapping]
    for kind, base in (("axial", 100.0), ("mixed", 7.0), ("axial", None), ("mixed", None)):
        subject = visualize.custom(kind, 3, map=mapping, head_dim=20, num_heads=2, base=base, axis_order=order, seed=4)
        own = module(
            20, 3, base=base, frequencies=kind, num_heads=2, axis_order=order, seed=4, dtype=torch.float64
        ).get_omega()
        torch.testing.assert_close(subject.preset.omega.expand_as(own), own, rtol=0, atol=0)
        assert subject.variants[0] == (mapping, order if kind == "axial" else data.NO_ORDER)
        assert len(subject.variants) == (4 if kind == "axial" else 2)


def test_wavelengths_in_tokens():
    view = tiny("dinov3", (4, 6))
    each, along = data.wavelengths(view.layout, view.omega(view.default_variant))
    periods = [100 ** (i / 16) for i in range(16)]  # positions are in [-1, 1], with n cells of 2/n
    assert each[:16, 0].tolist() == pytest.approx([p * 4 / 2 for p in periods])
    assert each[16:, 1].tolist() == pytest.approx([p * 6 / 2 for p in periods])
    assert each[:16, 1].isinf().all()
    assert each[16:, 0].isinf().all()
    assert torch.equal(along, each.min(-1).values)
    oblique = torch.tensor([[0.3, 0.0], [3.0, 4.0]]).double()
    flat = tiny("rope_vit_axial", (4, 6)).layout
    assert data.wavelengths(flat, oblique)[1].tolist() == pytest.approx([2 * math.pi / 0.3, 2 * math.pi / 5])


def test_wavelengths_are_means_if_tokens_are_unevenly_spaced():
    view = tiny("ltx2", (5, 2, 2))  # in latents of 8 frames, the first frame is at 0.5, and the others at 5, 13, 21, 29
    step = 28.5 / 4 / 24 * 2 / 20
    assert view.layout.steps[0].item() == pytest.approx(step)
    each, _ = data.wavelengths(view.layout, view.omega(view.default_variant))
    assert each[:, 0].min().item() == pytest.approx(
        2 * math.pi / step / view.subject.preset.omega[0, :, 0].max().item()
    )
    assert tiny("cogview4", (2, 400)).layout.steps.tolist() == [128, 255 / 399]  # columns 0 and 1 are both at 0
    module = lrpe_md.RotateMd(18, 3)
    module.set_places(0, torch.tensor([0, 0, 0, 1, 2]))
    [axis] = lrpe_md.show(module, (5, 4, 6), panels=["wavelengths"]).axes
    assert axis.get_legend().get_texts()[0].get_text() == "T, and its size 5"


def test_axes_that_the_grid_does_not_follow_count_positions():
    layout = tiny("flux2", (4, 6), text=3).layout
    assert layout.steps.tolist() == [0, 1, 1, 0]
    assert layout.sizes == (1, 4, 6, 1)
    each, along = data.wavelengths(layout, torch.eye(4, dtype=torch.float64) / 2)
    assert each.diagonal().tolist() == pytest.approx([4 * math.pi] * 4)
    assert along.isinf().tolist() == [True, False, False, True]


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)])
def test_merged_tokens_are_drawn_at_their_positions(shape: tuple[int, ...]):
    layout = tiny("qwen2_vl_vision", shape).layout
    assert [tuple(row) for row in layout.coords.tolist()] == [cell[-2:] for cell in cells(shape)]


def test_text_comes_first_and_moves_the_image():
    layout = tiny("qwen2_vl", (2, 3, 5), text=4).layout
    assert layout.coords[:4].tolist() == [[i] * 3 for i in range(4)]
    assert layout.coords[4:].tolist() == [[4.0 + i for i in cell] for cell in cells((2, 3, 5))]
    assert layout.rotated.all()
    assert tiny("cogvideox", text=4).layout.rotated.tolist() == [False] * 4 + [True] * 72


def test_interpolation_is_passed_on():
    view = tiny("rope_vit_axial", (4, 6), reference="8x-")
    assert view.layout.steps.tolist() == [2, 1]


def test_channels_go_from_the_fastest_to_the_slowest():
    for name in list_presets():
        view = tiny(name)
        omega = view.omega(view.default_variant)
        speed = (omega * view.layout.steps).norm(dim=-1)
        shown = speed[view.channels].tolist()
        moving = speed[speed > 0]
        assert shown == sorted(shown, reverse=True)
        assert shown[-1] > moving.min() or name == "cosformer"  # barely visible on a grid
        assert len({tuple(omega[c].tolist()) for c in view.channels}) == len(shown) == (1 if name == "cosformer" else 4)
    view = tiny("rope_vit_axial", (6, 6))
    axes_of_four = view.omega(view.default_variant)[view.channels].argmax(-1)
    assert axes_of_four.bincount().tolist() == [2, 2]
    view = tiny("wan")
    for number in (1, 2, 3, 5, 63, 64, 99):
        channels = data.choose_channels(view.layout, view.omega(view.default_variant), number)
        assert len(set(channels)) == len(channels) == min(number, 64)


@pytest.mark.parametrize(
    ("name", "shape"), [("wan", (4, 8, 8)), ("wan", (9, 18, 28)), ("qwen2_5_omni", (4, 14, 14)), ("wan", (14, 20))]
)
def test_each_axis_has_a_map_whose_wavelength_is_closest_to_its_size(name: str, shape: tuple[int, ...]):
    view = tiny(name, shape)
    omega = view.omega(view.default_variant)
    each, _ = data.wavelengths(view.layout, omega)
    axes = omega.argmax(-1)
    for axis in range(3 - len(shape), 3):
        size = shape[axis - 3]
        nearest = min((c for c in range(64) if axes[c] == axis), key=lambda c: abs(math.log(each[c, axis] / size)))
        assert nearest in view.channels
    if name == "wan":  # all W pairs of Qwen2.5-Omni are slow
        angles = omega @ torch.tensor([n - 1.0 for n in (1, *shape)[-3:]]).double()
        assert (angles[view.channels] > math.pi / 2).all()


def test_frames_include_the_selected_one():
    layout = tiny("wan", (9, 2, 2)).layout
    assert data.choose_frames(layout, (4, 0, 0)) == [0, 4, 8]
    assert data.choose_frames(layout, (1, 0, 0)) == [1, 4, 8]
    assert data.choose_frames(layout, (7, 0, 0)) == [0, 4, 7]
    for t in (1, 2):  # a tie: the first and last frames stay
        assert data.choose_frames(tiny("wan", (4, 2, 2)).layout, (t, 0, 0)) == [0, t, 3]
    assert data.choose_frames(tiny("wan", (2, 2, 2)).layout, (1, 0, 0)) == [0, 1]
    assert data.choose_frames(tiny("wan", (2, 2)).layout, (1, 0)) == [0]


def test_frames_side_by_side_with_the_text_above():
    layout = tiny("hunyuan_video", (3, 2, 3), text=9).layout
    picture = data.arrange_frames(layout, torch.arange(9.0 + 18), [0, 2])
    nan = math.nan
    wanted = [
        [0, 1, 2, 3, 4, 5, 6],
        [7, 8, nan, nan, nan, nan, nan],
        [nan] * 7,
        [9, 10, 11, nan, 21, 22, 23],
        [12, 13, 14, nan, 24, 25, 26],
    ]
    torch.testing.assert_close(picture.image, torch.tensor(wanted, dtype=torch.float32), equal_nan=True)
    assert (picture.top, picture.first_columns) == (3, [0, 4])


def test_slices_go_through_the_token():
    layout = tiny("wan", (3, 4, 5), text=0).layout
    values = torch.tensor([100 * t + 10 * h + w for t, h, w in cells((3, 4, 5))])
    for axis, wanted in enumerate(([13, 113, 213], [103, 113, 123, 133], [110, 111, 112, 113, 114])):
        distance, line = data.slice_through(layout, values, (1, 1, 3), axis)
        assert line.tolist() == wanted
        assert distance[wanted.index(113)] == 0
    assert values[layout.index((1, 1, 3))] == 113


def test_equal_maps_are_drawn_separately():
    """cosFormer has a single frequency, so a rotation gives the same similarity."""
    (own, first), (other, second) = tiny("cosformer").scores
    assert (own, other) == ([("cosine", data.NO_ORDER)], [("rotate", data.NO_ORDER)])
    assert torch.equal(first, second)


def test_wrapped_angles():
    theta = torch.tensor([0.0, 3.0, 3.5, -3.5, 20.0, -1e3]).double()
    wrapped = data.wrap(theta)
    assert ((wrapped >= -math.pi) & (wrapped < math.pi)).all()
    torch.testing.assert_close(torch.polar(torch.ones(6).double(), wrapped), torch.polar(torch.ones(6).double(), theta))


def test_base_is_shown_only_if_there_is_one():
    assert data.published("cosformer").base is None
    assert data.published("wan").base == 1e4
    assert data.published("wan", base=50.0).base == 50
    assert data.published("rope_vit_mixed").base == 10
    assert data.published("rope_vit_mixed").is_base_used
    assert data.published("qwen3_vl", base=50.0).is_base_used


@pytest.mark.usefixtures("unplaced")
def test_a_base_that_the_series_ignores_is_not_shown():
    def linear(num: int, base: float, heads: int) -> Tensor:
        return torch.linspace(0.1, 1, num)

    headers = [
        lrpe_md.show(Scheme("ours", 16, Axial((1, 1), series=series)), (3, 4)).get_suptitle()
        for series in (linear, lambda num, base, heads: lrpe_md.geometric_theta(num, base))
    ]
    assert ["base 10,000" in header for header in headers] == [False, True]


@pytest.mark.usefixtures("unplaced")
def test_only_the_base_of_the_model_is_published():
    for base, label in ((None, "published"), (10_000.0, "published"), (50.0, "as defined")):
        view = visualize.build_view(data.published("wan", base=base), shape="3x4")
        titles = [a.get_title() for a in visualize.draw(view).axes]
        assert f"rotate, either axis order ({label})" in titles


def test_another_base_reaches_every_variant():
    subject = data.published("wan", head_dim=48, base=50.0)
    for mapping, order in subject.variants:
        omega = subject.omega(mapping, order)
        num = 48 // 3 if mapping == "cosine" else 24 // 3
        speeds = sorted(omega[0][omega[0, :, 2] > 0, 2].tolist(), reverse=True)
        assert speeds == pytest.approx([50 ** (-i / num) for i in range(num)])


# --- command line ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"TERMINAL_WIDTH": "1000", "NO_COLOR": "1"})


@pytest.mark.parametrize(("arguments", "names"), [
    (["-p", "pope", "--preset", "eva02", "--shape", "6"], None),
    (["-p", "pope", "--shape", "6", "--text", "2"], ["pope.png"]),
    pytest.param(
        ["-p", "wan", "-p", "lumina2", "--shape", "4 6", "--text", "0", "--token", "1,5", "--format", "svg"],
        ["lumina2.svg", "wan.svg"], marks=pytest.mark.slow,
    ),
    (["--frequencies", "mixed", "--shape", "2x3x4", "--heads", "2", "--head", "1", "--map", "cosine", "--maps", "2"],
     ["mixed-cosine.png"]),
    (["--frequencies", "axial", "--shape", "3x4", "--axis-order", "major_first", "--base", "30", "--head-dim", "12",
      "--reference", "8", "--channel", "5", "--text", "2"], ["axial-rotate.png"]),
])  # fmt: skip
def test_one_picture_per_preset(arguments: list[str], names: list[str] | None, tmp_path: Path):
    result = run(*arguments, "--out", str(tmp_path / "out"), "--dpi", "20")
    if names is None:  # presets of sequences have no grid shape
        assert result.exit_code == 2
        assert not (tmp_path / "out").exists()
        return
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert all(path.stat().st_size > 1000 for path in (tmp_path / "out").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "skipped"), [
    (["--shape", "4x6"], {"pope"}), (["--panel", "slices"], {"pope"}), (["--text", "2", "--panel", "angles"], {"wan"}),
    (["--head-dim", "6", "--panel", "angles"], {"dinov3"}),
])  # fmt: skip
@pytest.mark.usefixtures("unplaced")
def test_all_skips_presets_that_do_not_fit(arguments, skipped, tmp_path: Path, monkeypatch):
    presets = {"pope", "dinov3", "wan"}
    monkeypatch.setattr(visualize, "list_presets", lambda: sorted(presets))
    result = run("-p", "all", *arguments, "--out", str(tmp_path), "--dpi", "20")
    assert result.exit_code == 0, result.output
    assert {path.stem for path in tmp_path.iterdir()} == presets - skipped
    assert set(re.findall(r"^Skipped (\w+): --", result.stderr, re.M)) == skipped


@pytest.mark.parametrize("arguments", [["--panel", "slice"], ["--shape", "0x3"], ["--token", "100"]])
def test_all_without_a_preset_that_fits(arguments, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(visualize, "list_presets", lambda: ["dinov3", "wan"])
    result = run("-p", "all", *arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert "Skipped" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_earlier_pictures_are_kept(tmp_path: Path):
    for name in ("pope", "pope-2"):
        result = run("-p", "pope", "--shape", "6", "--out", str(tmp_path), "--dpi", "20", "--dark")
        assert result.output.split() == [f"{tmp_path / name}.png", f"{tmp_path / name}-dark.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pope-2-dark.png", "pope-2.png", "pope-dark.png", "pope.png"
    ]  # fmt: skip


def test_separators_of_numbers():
    for text in ("4x18", "4,18", "4, 18", " 4 18 ", "4 × 18", "4  18"):
        assert visualize.numbers("--shape", text, least=1) == (4, 18)


def save_scheme(path: Path, **changes: Any) -> str:
    fields = {**replace(SCHEMES["eva02"], doc="ours").to_dict(), **changes}
    path.write_text(json.dumps(fields), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_a_scheme_in_a_json_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    views: list[visualize.View] = []
    draw = visualize.draw
    monkeypatch.setattr(visualize, "draw", lambda view, *more: (views.append(view), draw(view, *more))[1])
    file = save_scheme(tmp_path / "ours 1.json", head_dim=16)
    result = run("-p", file, "-p", "eva02", "--shape", "3x4", "--out", str(tmp_path / "out"), "--dpi", "20")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["eva02.png", "ours-1.png"]
    own, eva02 = views
    assert torch.equal(own.subject.preset.omega, preset("eva02", 16).omega)
    for view, label in ((own, "as defined"), (eva02, "published")):
        titles = [a.get_title() for a in draw(view).axes]
        assert [title for title in titles if title.endswith(f"({label})")]


@pytest.mark.parametrize(("changes", "message"), [
    ({"head_dim": -1}, "head_dim: expected a positive integer, got -1"),
    ({"grid": "mine"}, "grid: expected one of the functions"),
    ({"grid": "mine"}, "register_scheme, and pass --import MODULE --preset NAME"),
])  # fmt: skip
def test_invalid_json_files(changes: dict[str, Any], message: str, tmp_path: Path):
    file = save_scheme(tmp_path / "ours.json", **changes)
    assert message in re.sub(r"[\s│]+", " ", run("-p", file).output)
    twice = run("-p", save_scheme(tmp_path / "wan.json"), "-p", "wan", "--out", str(tmp_path / "out"))
    assert "--preset: expected different names, got 'wan' twice" in twice.output
    (tmp_path / "broken.json").write_text("{")
    assert "--preset: expected JSON from Scheme.to_dict(), got" in run("-p", str(tmp_path / "broken.json")).output


def save_grid(path: Path, grid: str, frequencies: Any) -> str:
    scheme = {**Scheme("ours", 64, frequencies).to_dict(), "grid": grid}
    path.write_text(json.dumps(scheme), encoding="utf-8")
    return str(path)


def test_a_grid_function_that_fits_no_shape(tmp_path: Path):
    """lrpe-md's centred returns three axes, one more than the frequencies have."""
    file = save_grid(tmp_path / "ours.json", "centred", Axial((1, 1)))
    for given, option in (
        ([], "--shape: ours supports none of the default"),
        (["--shape", "8x8"], "--shape 8x8 for ours"),
    ):
        result = run("-p", file, *given, "--out", str(tmp_path / "out"))
        assert result.exit_code == 2
        text = re.sub(r"[\s│]+", " ", result.output)
        assert option in text
        assert "expected positions with 2 axes, like ours's frequencies, got 3 from its grid" in text
    file = save_grid(tmp_path / "theirs.json", "of_trained_video", Axial((1, 1, 1)))
    result = run("-p", file, "--shape", "8", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output


@pytest.mark.usefixtures("unplaced")
def test_frequencies_for_one_map_only():
    """The function returns float32 for 32 pairs, and fails for the 64 channels of the other map."""

    def omega(channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
        return torch.linspace(0.1, 1, 32)[None, :, None].expand(1, 32, 2)

    view = visualize.build_view(data.published(Scheme("doc", 64, Dense(2, omega, 1.0)), name="own"), shape="3x4")
    assert view.subject.variants == [("rotate", data.NO_ORDER)]
    assert view.omega(view.default_variant).dtype == torch.float64
    figure = visualize.draw(view)
    titles = [a.get_title() for a in figure.axes]
    assert [title for title in titles if title.startswith(("rotate", "cosine"))] == ["rotate"]
    assert "base" not in figure.get_suptitle()


@pytest.mark.slow
@pytest.mark.usefixtures("unplaced")
def test_the_header_names_the_options_of_the_positions():
    assert "grid 2×4×6   ·   fps 12" in lrpe_md.show("cosmos", (2, 4, 6), fps=12).get_suptitle()
    assert "positions rescaled" not in visualize.draw(tiny("wan")).get_suptitle()
    assert "positions rescaled to 3×9×14" in visualize.draw(tiny("wan", reference="3x9x14")).get_suptitle()
    assert "positions rescaled to 8×–" in visualize.draw(tiny("rope_vit_axial", reference="8x-")).get_suptitle()
    assert "positions rescaled to 16×16" in visualize.draw(tiny("rope_vit_axial", reference="16")).get_suptitle()
    for reference in ("16", None):
        title = visualize.draw(tiny("dinov3", reference=reference)).get_suptitle()
        assert "positions scaled by the scheme's own rule" in title
    assert "positions rescaled to 16×16" in lrpe_md.show("eva02", (4, 6)).get_suptitle()
    assert "scaled" not in lrpe_md.show("eva02", (4, 6), reference=(None, None)).get_suptitle()
    assert "positions rescaled to –×8×12" in visualize.draw(tiny("wan", (4, 6), reference="8x12")).get_suptitle()
    assert "positions rescaled to 3×–×–" in visualize.draw(tiny("cogvideox", reference="3x9x14")).get_suptitle()


def test_titles_of_a_comparison_state_the_reference():
    title = lrpe_md.show(["rope_vit_axial"], (4, 6), reference=16).axes[0].get_title()
    assert title.endswith(",\ngrid 4×6, positions rescaled to 16×16")


@pytest.mark.slow
def test_options_reach_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    views: list[visualize.View] = []
    draw = visualize.draw
    monkeypatch.setattr(visualize, "draw", lambda view, *more: (views.append(view), draw(view, *more))[1])
    own = "--map cosine --axis-order major_first --base 30 --head-dim 12 --shape 3x4 --reference 8 --text 2 --token 2x1"
    given = ["--out", str(tmp_path), "--dpi", "20"]
    assert run("--frequencies", "axial", *own.split(), *given).exit_code == 0
    mixed = "--map rotate --base 30 --head-dim 12 --shape 3x4 --heads 3 --head 2 --seed 5 --channel 4 --channel 1"
    assert run("--frequencies", "mixed", *mixed.split(), *given).exit_code == 0
    assert run("-p", "pope", "--shape", "6", "--base", "50", "--head-dim", "6", "--maps", "2", *given).exit_code == 0
    axial, dense, pope = views
    wanted = visualize.custom("axial", 2, map="cosine", head_dim=12, base=30.0, axis_order="major_first")
    assert torch.equal(axial.subject.preset.omega, wanted.preset.omega)
    assert axial.subject.variants[0] == ("cosine", "major_first")
    assert (axial.layout.text, axial.token, axial.layout.steps.tolist()) == (2, (2, 1), [8 / 3, 2])
    wanted = visualize.custom("mixed", 2, head_dim=12, base=30.0, num_heads=3, seed=5)
    assert torch.equal(dense.omega(dense.default_variant), wanted.preset.omega[2])
    assert (dense.channels, dense.token) == ([4, 1], (1, 2))
    assert pope.omega(pope.default_variant).flatten().tolist() == pytest.approx([50 ** (-c / 6) for c in range(6)])
    assert pope.channels == [0, 1]


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "expected either --preset or --frequencies"),
    (["-p", "wan", "--frequencies", "axial"], "expected either --preset or --frequencies"),
    (["-p", "wann"], "--preset: unknown 'wann'; did you mean 'wan'? For your own scheme, pass --import MODULE or a"),
    (["-p", "absent.json"], "--preset: expected JSON from Scheme.to_dict(), got 'absent.json': [Err"),
    (["-p", "wan", "--map", "cosine"], "--map: expected no value with --preset, got 'cosine'; leave out --map"),
    (["-p", "wan", "--axis-order", "minor_first"], "--axis-order: expected no value with --preset, got 'minor_first'"),
    (["--frequencies", "dense"], "--frequencies: unknown 'dense'"),
    (["--frequencies", "axial", "--map", "turn"], "--map: unknown 'turn'"),
    (["--frequencies", "axial", "--axis-order", "xy"], "--axis-order: unknown 'xy'"),
    (["--frequencies", "axial", "--head-dim", "7"], "--head-dim: expected an even number, got 7"),
    (["-p", "wan", "--head-dim", "7"], "--head-dim: expected an even number, got 7"),
    (["-p", "flux1", "--head-dim", "66"], "--head-dim: flux1 doesn't support 66"),
    (["-p", "wan", "--format", "gif"], "--format: unknown 'gif'. Choose from: png; pdf; svg"),
    (["--frequencies", "mixed", "--axis-order", "major_first"], "--axis-order: expected no value with --freq"),
    (["-p", "eva02", "--shape", "14xx20"], "such as 18x28 or 9x18x28, got '14xx20'"),
    (["-p", "eva02", "--shape", "14x20x"], "got '14x20x'"),
    (["-p", "eva02", "--shape", ""], "got ''"),
    (["-p", "wan", "--shape", "4xa"], "--shape: expected positive integers"),
    (["-p", "wan", "--shape", "4x0x2"], "--shape: expected positive integers"),
    (["-p", "eva02", "--shape", "2x4x6"], "--shape 2x4x6 for eva02: eva02 expects a shape with 2 axes, got 2x4x6"),
    (["-p", "wan", "--shape", "2x2x4x6"], "--shape: expected N, HxW or TxHxW, got '2x2x4x6'"),
    (["-p", "qwen2_vl_vision", "--shape", "3x4"], "--shape 3x4 for qwen2_vl_vision"),
    (["-p", "qwen2_vl_vision", "--reference", "8"], "--reference for qwen2_vl_vision: must be left out"),
    (["-p", "eva02", "--reference", "8x8x8"], "--reference for eva02: expected a positive size, or -, for each"),
    (["-p", "wan", "--reference", "4x-"], "for each of the 3 axes, got 4x-"),
    (["-p", "pixtral", "--text", "4"], "--text: pixtral has no rule for text tokens, got 4; plot pixtral without "
     '--text, or use a Scheme with tokens=Tokens(0, "skip") for unrotated tokens'),
    (["-p", "eva02", "--token", "18x0"], "--token: expected coordinates on the grid 18x28, starting at 0, got 18x0"),
    (["-p", "eva02", "--token", "1x1x1"], "--token: expected coordinates on the grid 18x28, starting at 0, got 1x1x1"),
    (["-p", "wan", "--base", "0"], "--base: expected a positive number, got 0.0"),
    (["-p", "cosformer", "--base", "3"], "--base: must be left out, because cosformer only accepts"),
    (["-p", "eva02", "--head", "1"], "--head: expected 0 to 0, because --heads is 1, got 1; for more heads, pass"),
    (["-p", "eva02", "--dpi", "5000"], "'--dpi': Input should be less than or equal to 1200"),
    (["-p", "eva02", "--channel", "32"], "--channel for eva02: expected 0 to 31, got 32"),
    (["-p", "wan", "--compare"], "--compare: expected several presets, got one; pass --preset for each"),
    (["--frequencies", "axial", "--compare"], "such as several bases, pass a dict to lrpe_md.show in Python"),
    (["-p", "wan", "--map", "cosine"], "leave out --map. A preset sets its own map and axis order"),
    (["-p", "."], "expected a name or a file, got a folder, '.'; to plot a trained run, call lrpe_md.show(load_run("),
    (["-p", "rotate"], "--preset: 'rotate' is not a preset; to plot it, pass --frequencies axial"),
    (["wan"], "unexpected extra argument(s) (wan); to plot it, try: -p wan"),
    (["-p", "eva02", "--shape", "14", "20"], "(20); join the sizes of a shape or token with x, as in --shape 14x20"),
    (["-p", "eva02", "--shape", "1x1"], "expected a grid on which eva02 rotates at least one channel, got 1x1"),
])  # fmt: skip
def test_invalid_arguments(arguments: list[str], message: str, tmp_path: Path):
    result = run(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.output)
    assert not (tmp_path / "out").exists()
