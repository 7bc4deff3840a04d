"""Figures at the width of a column, with selected panels: text sizes, overlaps, margins, and the options."""

import itertools
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from lrpe_md.scripts.visualize.app import app
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.text import Text
from parametrizing import slow_except
from typer.testing import CliRunner

import lrpe_md
from lrpe_md.picture.data import PANELS

DOCS = Path(__file__).parents[2] / "docs"
FOUR = ["dinov3", "rope_vit_mixed", "eva02", "pixtral"]
OWN = {r"ours, $\theta = 100^{k/16}$, long": lrpe_md.RotateMd(64, 2), "a_name_without_spaces_but_very_long": "dinov3"}
# Encodings, with shape and other options of show.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sequence": ("pope", {}),
    "sequence with text": ("pope", {"text": 4}),
    "image": ("dinov3", {"reference": 16}),
    "tall": (lrpe_md.RotateMd(64, 2, frequencies="mixed"), {"shape": (40, 8), "maps": 6}),
    "wide": ("eva02", {"shape": (3, 60), "dark": True}),
    "text": ("qwen3_vl", {"shape": (18, 28), "text": 12}),
    "much text": ("flux1", {"shape": (24, 24), "text": 20}),
    "video": ("wan", {}),
    "video with text": ("cogvideox", {"shape": (3, 6, 10), "text": 10, "reference": (3, 12, 20)}),
    "tall video": ("hunyuan_video", {"shape": (5, 30, 6), "text": 2}),
    "heads": ("rope_vit_mixed", {"num_heads": 3, "head": 2, "reference": 14, "text": 1}),
    "aliased": (torch.tensor([[[4.0, 0], [0, 0.5], [0, 0], [0.1, 0.1], [0, 0], [0, 0.2]]]), {}),
    "own names": (OWN, {"shape": (8, 12), "text": 3, "reference": None}),
    "two sequences": (["rope_1d", "pope"], {}),
    "mixed dimensions": (["wan", "pope", "dinov3"], {}),
    "three with text": (["flux1", "qwen_image", "lumina2"], {"shape": (12, 20), "text": 20}),
    "four": (FOUR, {"reference": 16}),
    "videos": (["wan", "cogvideox", "hunyuan_video"], {"shape": (3, 8, 12)}),
    "five": ([*FOUR, "rope_vit_axial"], {"shape": (14, 14)}),
}
QUICK = ["sequence with text", "tall", "text", "video with text", "heads", "aliased", "own names", "mixed dimensions"]
WIDTHS = (3.25, 4.5, 5.5, 6.75, 8.0, 11.0)


def is_bar(axis: Any) -> bool:
    return axis.get_label() == "<colorbar>"


def drawn_texts(figure: Any) -> list[tuple[Text, Any]]:
    """Return the visible texts with their boxes, without ticks outside the limits of their axes."""
    hidden = set()
    for axis in figure.axes:
        for each in (axis.xaxis, axis.yaxis):
            drawn = {id(label) for tick in each._update_ticks() for label in (tick.label1, tick.label2)}
            ticks = [*each.get_major_ticks(), *each.get_minor_ticks()]
            hidden |= {id(label) for tick in ticks for label in (tick.label1, tick.label2)} - drawn
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text, text.get_window_extent()) for text in texts if id(text) not in hidden]


def overlap(a: Any, b: Any) -> bool:
    (left, bottom, right, top), (x0, y0, x1, y1) = a.extents.tolist(), b.extents.tolist()
    return min(right, x1) - max(left, x0) > 1 and min(top, y1) - max(bottom, y0) > 1


def find_problems(figure: Any) -> list[Any]:
    """Find small texts, and texts and legends that leave the figure or overlap each other, maps, bars or lines."""
    figure.draw_without_rendering()
    texts, page, axes = drawn_texts(figure), figure.bbox.padded(1), figure.axes
    boxes = [(axis, axis.get_window_extent()) for axis in axes if axis.images or is_bar(axis)]
    legends = [(axis, axis.get_legend().get_window_extent()) for axis in axes if axis.get_legend()]
    paths = [line.get_transform().transform_path(line.get_path()) for axis in axes for line in axis.lines]
    found: list[Any] = [("small", text) for text, _ in texts if float(text.get_fontsize()) < 7]
    for what, box in [*texts, *legends]:
        found += [] if page.contains(*box.min) and page.contains(*box.max) else [("outside", what)]
        found += [("covers a map or bar", what, axis) for axis, other in boxes if overlap(box, other)]
    found += [("overlap", a, b) for (a, x), (b, y) in itertools.combinations(texts, 2) if overlap(x, y)]
    for axis, box in legends:
        others = [(text, other) for text, other in texts if text not in axis.get_legend().get_texts()]
        found += [("covered by a legend", text) for text, other in others if overlap(box, other)]
        found += [("line under a legend", axis) for path in paths if path.intersects_bbox(box.padded(-1), filled=False)]
    return found


@pytest.mark.parametrize("panel", slow_except([None], [None, *PANELS]))
@pytest.mark.parametrize("width", slow_except([3.25], WIDTHS))
@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_nothing_overlaps_or_leaves_the_figure(case: str, width: float, panel: str | None):
    encoding, options = CASES[case]
    if panel not in (None, "angles"):
        options = {name: value for name, value in options.items() if name != "maps"}
    try:
        figure = lrpe_md.show(encoding, width=width, panels=[panel] if panel else [], **options)
    except ValueError as error:
        if not str(error).startswith("panels: "):
            raise
        pytest.skip(f"no {panel}")
    assert figure.get_figwidth() == width
    for dpi in (100, 300):
        figure.set_dpi(dpi)
        assert find_problems(figure) == []


@pytest.mark.parametrize(("panel", "maps"), [("angles", 1), ("variants", None)])
def test_a_single_map_is_in_the_middle(panel: str, maps: int | None):
    figure = lrpe_md.show("dinov3", (8, 8), panels=[panel], maps=maps)
    figure.draw_without_rendering()
    [box] = [axis.bbox for axis in figure.axes if not is_bar(axis)]
    assert box.x0 / figure.bbox.width == pytest.approx(1 - box.x1 / figure.bbox.width, abs=0.05)


@pytest.mark.slow
def test_each_decade_of_the_wavelengths_is_labelled():
    figure = lrpe_md.show(lrpe_md.RotateMd(64, 2, base=1e3), (12, 16), width=6.75)
    figure.draw_without_rendering()
    [axis] = [axis for axis in figure.axes if axis.get_title().startswith("wavelengths")]
    low, high = axis.get_ylim()
    ticks = [float(t) for t in axis.get_yticks() if low <= t <= high]
    assert ticks == [10.0**n for n in range(1, int(math.log10(high)) + 1)]


@pytest.mark.slow
def test_a_single_panel_is_the_figure():
    for name, title in (
        ("angles", "pair 18, W: λ = 24.9 tokens"),
        ("similarity", "rotate, either axis order (published)"),
        ("variants", "cosine, either axis order"),
        ("slices", "slices at the marked token, rotate"),
        ("wavelengths", "wavelengths and the grid"),
    ):
        figure = lrpe_md.show("dinov3", panels=[name], channels=[18] if name == "angles" else (), width=5.5)
        assert [axis.get_title() for axis in figure.axes if not is_bar(axis)] == [title]
        assert (figure.get_suptitle(), figure.get_supxlabel()) == ("", "")
    figure = lrpe_md.show("pope", panels=["similarity"])
    [axis] = figure.axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["cosine (published)"]


def test_selected_panels_have_their_own_scale():
    """The cosine map of mixed frequencies has other values than the rotate map."""
    for names in (["similarity"], ["similarity", "variants"]):
        view = [axis for axis in lrpe_md.show("pixtral", (4, 6), panels=names).axes if axis.images]
        low = min(float(axis.images[0].get_array().min()) for axis in view if not is_bar(axis))
        assert view[0].images[0].get_clim()[0] == pytest.approx(int(low * 10 - (low < 0)) / 10)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["rope_vit_mixed", ["dinov3", "rope_vit_mixed"]])
def test_slices_without_maps_have_their_own_scale(encoding: Any):
    for names in (["slices"], ["slices", "wavelengths"]):
        axes = [a for a in lrpe_md.show(encoding, panels=names).axes if "slices" in a.get_title()]
        low = min(min(line.get_ydata()) for axis in axes for line in axis.lines if len(line.get_xdata()) > 2)
        assert all(low - 0.15 < axis.get_ylim()[0] < low for axis in axes)


@pytest.mark.parametrize("encoding", ["flux1", ["flux1", "qwen_image"]])
def test_the_row_label_is_beside_the_grid(encoding: Any):
    figure = lrpe_md.show(encoding, (4, 4), token=(2, 2), text=24, panels=["similarity"])
    figure.draw_without_rendering()
    for axis in figure.axes:
        if not is_bar(axis):
            box, grid = axis.yaxis.label.get_window_extent(), axis.transData.transform([(0, 10.5), (0, 6.5)])
            assert (box.y0 + box.y1) / 2 == pytest.approx(grid[:, 1].mean(), abs=2)


@pytest.mark.parametrize("width", slow_except([7.0], [3.25, 7.0]))
def test_colour_bars_are_narrow(width: float):
    for encoding in ("dinov3", ["dinov3", "eva02"]):
        figure = lrpe_md.show(encoding, (14, 14), width=width)
        figure.draw_without_rendering()
        assert all(axis.bbox.width <= 0.21 * figure.dpi for axis in figure.axes if is_bar(axis))


def count_columns(encoding: Any, **options: Any) -> int:
    """Return the number of panels in the widest row."""
    axes = [axis for axis in lrpe_md.show(encoding, **options).axes if not is_bar(axis)]
    tops = [round(axis.get_position(original=True).y1, 3) for axis in axes]
    return max(map(tops.count, tops))


@pytest.mark.slow
def test_narrow_figures_have_fewer_columns():
    assert [count_columns("dinov3", width=w, panels=["angles"]) for w in (3.25, 5.5, 7, 11)] == [1, 2, 2, 4]
    assert [count_columns("dinov3", width=w, panels=["angles"], maps=3) for w in (5.5, 7)] == [2, 3]
    assert [count_columns("wan", width=w, panels=["angles"]) for w in (5.5, 7, 11)] == [1, 1, 2]
    assert [count_columns(FOUR, width=w, panels=["similarity"]) for w in (3.25, 5.5, 11)] == [1, 2, 4]
    assert [count_columns(FOUR, width=w, panels=["slices", "wavelengths"]) for w in (3.25, 5.5)] == [1, 2]


@pytest.mark.slow
def test_texts_are_measured_with_few_renderers(monkeypatch: pytest.MonkeyPatch):
    """Each renderer measures all texts again, so a figure needs one for each size that it has during its layout."""
    made: list[Any] = []
    create = RendererAgg.__init__
    monkeypatch.setattr(RendererAgg, "__init__", lambda self, *size: (made.append(size), create(self, *size))[1])
    lrpe_md.show("dinov3", (4, 6))
    assert 0 < len(made) == len(set(made)) <= 3


def test_invalid_widths_and_panels():
    for options, error, message in (
        ({"width": 1}, ValueError, "width: expected 3 to 100 inches, got 1"),
        ({"width": "5in"}, ValueError, "width: expected 3 to 100 inches, got '5in'"),
        ({"panels": "angles"}, TypeError, r"panels: expected a list of names, such as \['similarity'\], got 'angles'"),
        (
            {"panels": ["angle"]},
            ValueError,
            "one or more of angles, similarity, variants, slices, wavelengths for eva02",
        ),
        (
            {"figsize": (5, 3)},
            TypeError,
            r"figsize: expected width= in inches .* got \(5, 3\)$",
        ),
        ({"dpi": 300}, TypeError, r"dpi: expected figure.savefig\(file, dpi=...\) instead of dpi, got 300"),
        ({"panel": ["angles"]}, TypeError, r"panel: expected panels= instead of panel, got \['angles'\]"),
        ({"format": "pdf"}, TypeError, "format: expected the suffix of path= instead of format, got 'pdf'"),
        ({"map": "cosine"}, TypeError, "map: expected an encoding with this map, such as CosineMd"),
        ({"axis_order": "minor_first"}, TypeError, "axis_order: expected an encoding with this order, such as Ro"),
        ({"base": 9.0}, TypeError, r"pass it to preset\(\) instead, as in preset\(\.\.\., base=9\.0\)"),
    ):
        with pytest.raises(error, match=message):
            lrpe_md.show("eva02", (4, 6), **options)  # pyright: ignore[reportArgumentType]
    for scheme, name, known in (
        ("pope", "slices", "angles, similarity, variants, wavelengths for pope"),
        (lrpe_md.RotateMd(16, 2), "variants", "angles, similarity, slices, wavelengths for RotateMd"),
        (["eva02", "wan"], "angles", "similarity, slices, wavelengths for a comparison"),
        (["rope_1d", "pope"], "slices", "similarity, wavelengths for a comparison of sequences"),
    ):
        with pytest.raises(ValueError, match=f"panels: expected one or more of {known}, got '{name}'"):
            lrpe_md.show(scheme, panels=[name])


# --- command line ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"TERMINAL_WIDTH": "1000", "NO_COLOR": "1"})


@pytest.mark.slow
def test_the_command_for_a_paper_draws_a_pdf_of_this_width(tmp_path: Path):
    text = (DOCS / "schemes.md").read_text(encoding="utf-8").split("### For a paper")[1]
    block = text.split("```bash\n")[1].split("```")[0].replace("\\\n", "")
    for line, file in zip(block.splitlines(), ("dinov3.pdf", "comparison.pdf"), strict=True):
        command = shlex.split(line)
        assert command[:2] == ["lrpe-md", "visualize"]
        result = run(*command[2:], "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", (tmp_path / file).read_bytes())
        assert box is not None
        assert float(box[1]) == 5.5 * 72


@pytest.mark.parametrize(("arguments", "message"), [
    (["--panel", "slice"], "--panel: unknown 'slice'; did you mean 'slices'? Choose from: angles; similarity;"),
    (["-p", "pope", "--panel", "slices"], "--panel: expected one or more of angles, similarity, variants, wavelengths"),
    (["-p", "wan", "--compare", "--panel", "angles"], "--panel: expected one or more of similarity, slices"),
    (["--width", "2"], "'--width': Input should be greater than or equal to 3"),
])  # fmt: skip
def test_invalid_options(arguments: list[str], message: str, tmp_path: Path):
    result = run("-p", "eva02", *arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.output)
    assert not (tmp_path / "out").exists()
