"""Plot encodings: angles over the grid, the similarity of one token to all others, and wavelengths.

    lrpe-md visualize --preset wan --preset dinov3
    lrpe-md visualize --preset wan --preset dinov3 --compare
    lrpe-md visualize --preset dinov3 --panel similarity --panel wavelengths --width 5.5 --format pdf
    lrpe-md visualize --preset ours.json
    lrpe-md visualize --preset all --out runs/visualize --format pdf
    lrpe-md visualize --frequencies mixed --base 10 --shape 14x20 --reference 16 --text 8 --token 3,5

There is one figure per encoding. The top of the figure shows Θ of a few pairs over the grid. Below are the similarity
of the marked token to all others for each map and axis order, slices through this similarity, and the wavelengths. With
--compare, there is a single figure with a row per encoding, and all rows share the scale of the similarity.
:mod:`lrpe_md.picture.data` computes the data and explains the assumptions behind similarity.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

from lrpe_md import Scheme, Tokens, axial_omega, geometric_theta, list_presets
from lrpe_md.frequencies import mixed_omega
from lrpe_md.frequencies.axial import AXIS_ORDERS, AxisOrder
from lrpe_md.modules.base import DEFAULT_BASES
from lrpe_md.picture import data
from lrpe_md.picture.data import NO_ORDER, Subject
from lrpe_md.picture.figure import View, choose_panels, draw, draw_comparison, make_view
from lrpe_md.presets import Axial, Dense, Preset

from ..common.folder import make_folder, unused_path
from ..common.options import SEEDS, choose, group_options, in_shell_terms
from ..common.plots import plt, save

FORMATS = ("png", "pdf", "svg")
FREQUENCIES = tuple(DEFAULT_BASES)
# Options for the encodings of --encoding in training commands that are not presets.
MODULES = {
    "rotate": "--frequencies axial", "cosine": "--frequencies axial --map cosine", "mixed": "--frequencies mixed",
}  # fmt: skip
PANELS = {
    "Encoding": "preset frequencies map axis_order base head_dim heads seed",
    "Picture": "compare shape reference text token head channel maps panel",
    "Output": "width out format dpi dark",
}  # fmt: skip


# Options by argument of the library.
OPTIONS = {
    "head_dim": "--head-dim", "num_heads": "--heads", "base": "--base", "panels": "--panel", "channels": "--channel",
    "maps": "--maps",
}  # fmt: skip
IMPLIED = ("token", "segments", "shape", "reference")  # arguments for which the option depends on the call


@contextmanager
def _name_option(option: str) -> Iterator[None]:
    """In the library's errors, replace the name of an argument with that of its option."""
    try:
        yield
    except ValueError as error:
        argument, colon, text = str(error).partition(": ")
        if not colon or argument not in (*OPTIONS, *IMPLIED):
            text = str(error)
        text = re.sub(
            r"(\S+)( has no rule for .*); for unrotated tokens, .*",
            r'\1\2; plot \1 without --text, or use a Scheme with tokens=Tokens(0, "skip") for unrotated tokens',
            text,
        )
        text = re.sub(r",? or None\b", ", or -" if "--reference" in option else "", text)
        text = re.sub(r"\(([\d, ]*None[^()]*)\)", lambda sizes: re.sub(", ?", "x", sizes[1].replace("None", "-")), text)
        raise typer.BadParameter(f"{OPTIONS.get(argument, option)}: {in_shell_terms(text, 'x')}") from error


def numbers(option: str, text: str, *, least: int, gaps: bool = False) -> tuple[Any, ...]:
    """Parse numbers such as "4x18x28", "4,18,28" or "4 18 28". With ``gaps``, "-" means None."""
    parts = re.split(r"\s*[x×,]\s*|\s+", text.strip())
    good = [part.isdecimal() or (gaps and part == "-") for part in parts]
    if not all(good) or any(part != "-" and int(part) < least for part in parts):
        kind = "positive" if least else "non-negative"
        raise typer.BadParameter(f"{option}: expected {kind} integers, such as 18x28 or 9x18x28, got {text!r}")
    return tuple(None if part == "-" else int(part) for part in parts)


def build_view(
    subject: Subject,
    *,
    shape: str | None = None,
    reference: str | None = None,
    text: int = 0,
    token: str | None = None,
    head: int = 0,
    channels: Sequence[int] = (),
    maps: int | None = None,
) -> View:
    """Build the view of a subject from options.

    Raises:
        typer.BadParameter: if an option does not fit the subject.
    """
    made = subject.preset
    if shape is None:
        with _name_option("--shape"):
            size = data.default_shape(made)
    else:
        size = numbers("--shape", shape, least=1)
    options: dict[str, Any] = {}
    if reference is not None:
        sizes = numbers("--reference", reference, least=1, gaps=True)
        options["reference"] = sizes[0] if len(sizes) == 1 else sizes
    if len(size) > 3:
        raise typer.BadParameter(f"--shape: expected N, HxW or TxHxW, got {shape!r}")
    with _name_option(f"--shape {'x'.join(map(str, size))} for {made.name}"):
        made.positions(size)
    with _name_option(f"--reference for {made.name}"):
        made.positions(size, **options)
    with _name_option("--text"):
        layout = data.lay_out_tokens(partial(made.positions, **options), size, text, made.scheme.row_major)
    chosen = layout.centre if token is None else numbers("--token", token, least=0)
    with _name_option("--token"):
        layout.index(chosen)
    if not 0 <= head < made.num_heads:
        raise typer.BadParameter(
            f"--head: expected 0 to {made.num_heads - 1}, because --heads is {made.num_heads}, got {head}; for more "
            "heads, pass --heads"
        )
    number = made.omega.shape[1]
    for channel in channels:
        if not 0 <= channel < number:
            raise typer.BadParameter(f"--channel for {made.name}: expected 0 to {number - 1}, got {channel}")
    with _name_option("--shape"):
        return make_view(subject, layout, chosen, head, channels=channels, maps=maps, options=options)


def custom(
    frequencies: str = "axial",
    num_axes: int = 2,
    *,
    map: str = "rotate",
    head_dim: int = 64,
    num_heads: int = 1,
    base: float | None = None,
    axis_order: AxisOrder = "minor_first",
    seed: int = 0,
) -> Subject:
    """Return a subject with the frequencies of :class:`lrpe_md.RotateMd` and :class:`lrpe_md.CosineMd`."""
    for name, value, known in (("frequencies", frequencies, FREQUENCIES), ("map", map, data.MAPS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {known}, got {value!r}")
    if axis_order not in AXIS_ORDERS:
        raise ValueError(f"axis_order: expected one of {AXIS_ORDERS}, got {axis_order!r}")
    if head_dim < 1 or head_dim % 2:
        raise ValueError(f"head_dim: expected an even number, got {head_dim}")
    base = DEFAULT_BASES[frequencies] if base is None else base
    made: dict[str, Axial | Dense] = {NO_ORDER: Dense(num_axes, partial(_mixed, num_axes), base)}
    if frequencies == "axial":
        orders = sorted(AXIS_ORDERS, key=lambda order: order != axis_order) if num_axes > 1 else [NO_ORDER]
        made = {order: Dense(num_axes, partial(_blocks, num_axes, order), base) for order in orders}
    name = f"{frequencies}-{map}"
    doc = f"{frequencies} frequencies on {num_axes} axes"
    scheme = Scheme(doc, head_dim, next(iter(made.values())), map=map, tokens=Tokens(0, "skip"))  # pyright: ignore[reportArgumentType]
    scheme = replace(scheme, pairs="half") if map == "rotate" else scheme
    subject = Subject(Preset(name, scheme, head_dim, num_heads, torch.empty(0), 1.0, None), made, seed)
    omega = subject.omega(map, next(iter(made)))
    return replace(subject, preset=replace(subject.preset, omega=omega))


def _mixed(num_axes: int, channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
    return mixed_omega(channels, num_axes, heads, base=base, generator=generator)


def _blocks(num_axes: int, order: str, channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
    theta = geometric_theta(math.ceil(channels / num_axes), base)
    return axial_omega(theta, channels, num_axes, axis_order="minor_first" if order == NO_ORDER else order)  # pyright: ignore[reportArgumentType]


PRESET: Any = typer.Option(
    "--preset",
    "-p",
    help="Preset to plot: a name, the name of your own scheme (with --import MODULE), a JSON file of a scheme, or "
    "'all' (all that fit the other options); repeatable.",
)
PANEL: Any = typer.Option(
    help=f"Panel to draw: {', '.join(data.PANELS)}; repeatable. The variants are the similarity for the other map and "
    "axis order. (default: all panels, with a header)"
)
WIDTH: Any = typer.Option(
    min=data.MIN_WIDTH,
    max=data.MAX_WIDTH,
    help="Width of the figure in inches; the height follows from the panels. (default: 11)",
)


@group_options(PANELS)
def main(
    preset: Annotated[list[str] | None, PRESET] = None,
    frequencies: Annotated[
        str | None,
        typer.Option(help="Kind of frequencies to plot instead of a preset: axial or mixed (see RotateMd)."),
    ] = None,
    map: Annotated[str | None, typer.Option(help="Map to plot with --frequencies: rotate (default) or cosine.")] = None,
    axis_order: Annotated[
        str | None,
        typer.Option(help="Axis order of axial frequencies: minor_first (default) or major_first."),
    ] = None,
    base: Annotated[
        float | None,
        typer.Option(help="Base of the frequencies. (default: the preset's, or 10000 for axial and 10 for mixed)"),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, help="Channels per head. (default: the preset's, or 64)")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of heads with separate frequencies. (default: the preset's, or 1)",
        ),
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="Index of the head to plot.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS - 1, help="Seed for random directions.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw one figure with a row for each preset.")
    ] = False,
    shape: Annotated[
        str | None,
        typer.Option(help="Grid shape: N, HxW or TxHxW. (default: 64, 18x28 or 9x18x28)"),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Rescale positions to a grid such as 16 or 8x- ('-' skips an axis) unless the preset does."),
    ] = None,
    text: Annotated[int, typer.Option(min=0, help="Number of text (or class) tokens before the grid.")] = 0,
    token: Annotated[str | None, typer.Option(help="Token to mark: N, HxW or TxHxW. (default: the centre)")] = None,
    channel: Annotated[list[int] | None, typer.Option(help="Channel or pair whose angles to plot; repeatable.")] = None,
    maps: Annotated[
        int | None, typer.Option(min=1, help="Number of angle maps if you don't pass --channel. (default: 4)")
    ] = None,
    panel: Annotated[list[str] | None, PANEL] = None,
    width: Annotated[float | None, WIDTH] = None,
    out: Annotated[
        Path, typer.Option(help="Output folder. Figures are named NAME.png, or NAME-2.png if that file exists.")
    ] = Path("runs/visualize"),
    format: Annotated[str, typer.Option(help=f"File format: {', '.join(FORMATS)}.")] = "png",
    dpi: Annotated[int, typer.Option(min=20, max=1200, help="Resolution of a PNG, in dots per inch.")] = 150,
    dark: Annotated[
        bool, typer.Option("--dark", help="Also save a version for dark backgrounds, named NAME-dark.")
    ] = False,
) -> None:  # fmt: skip
    """Plot angle maps, similarity and wavelengths of encodings, one figure per encoding."""
    choose("--format", [format], FORMATS)
    if bool(preset) == bool(frequencies):
        raise typer.BadParameter("expected either --preset or --frequencies (--preset all plots every preset)")
    sizes: Any = {"head_dim": head_dim, "num_heads": heads, "base": base, "seed": seed}
    panels = choose("--panel", panel or (), data.PANELS)
    if preset:
        subjects = _find_subjects(preset, {"--map": map, "--axis-order": axis_order}, sizes)
    else:
        num_axes = 2 if shape is None else len(numbers("--shape", shape, least=1))
        subjects = {"": partial(_make_subject, frequencies or "", num_axes, map, axis_order, sizes)}
    grid: Any = {"shape": shape, "reference": reference, "text": text, "token": token}
    build = partial(build_view, **grid, head=head, channels=channel or (), maps=maps)
    views = _build_views(subjects, build, () if compare else panels, preset == ["all"])
    if compare:
        _check_panels(panels, views, compare)
    _make_output_folder(out)
    if compare:
        save_figure(draw_comparison(views, panels, width), unused_path(out / f"comparison.{format}"), dpi, dark)
        return
    for view in views:
        path = unused_path(out / f"{view.subject.preset.name}.{format}")
        save_figure(draw(view, panels, width), path, dpi, dark)


def _build_views(
    subjects: dict[str, Callable[[], Subject]], build: Callable[[Subject], View], panels: Sequence[str], skip: bool
) -> list[View]:
    """Build the views of the subjects, and check that they have these panels. With ``skip``, leave out invalid ones."""
    views, skipped = [], {}
    for name, find in subjects.items():
        try:
            view = build(find())
            _check_panels(panels, [view])
            views.append(view)
        except typer.BadParameter as error:
            if not skip or len(skipped) == len(subjects) - 1:
                raise
            skipped[name] = error.message
    for name, message in skipped.items():
        typer.echo(f"Skipped {name}: {message}", err=True)
    return views


def _check_panels(panels: Sequence[str], views: list[View], compare: bool = False) -> None:
    """Check that the figure has these panels, and that --compare has several views."""
    if compare and len(views) < 2:
        raise typer.BadParameter(
            "--compare: expected several presets, got one; pass --preset for each, or leave out --compare. To compare "
            "other encodings, such as several bases, pass a dict to lrpe_md.show in Python"
        )
    with _name_option("--panel"):
        choose_panels(views, panels, is_comparison=compare)


def _make_output_folder(out: Path) -> None:
    if out.suffix[1:] in FORMATS or out.is_file():
        raise typer.BadParameter(f"--out: expected a folder, got {out}; each figure is named after its encoding")
    make_folder(out)


def _find_subjects(
    preset: list[str], unused: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Callable[[], Subject]]:
    """Return functions that build the subjects of --preset, and check that all options in ``unused`` are None."""
    for option, value in unused.items():
        if value is not None:
            raise typer.BadParameter(
                f"{option}: expected no value with --preset, got {value!r}; leave out {option}. A preset sets its own "
                "map and axis order, and its figure also shows the alternatives"
            )
    schemes = _find_schemes(list_presets() if preset == ["all"] else preset)
    build = _name_option("--preset")(data.published)
    return {name: partial(build, scheme, name=name, **sizes) for name, scheme in schemes.items()}


def _make_subject(
    frequencies: str, num_axes: int, map: str | None, axis_order: str | None, sizes: dict[str, Any]
) -> Subject:
    """Return the subject of --frequencies. Options that are None have the defaults of :func:`custom`."""
    choose("--frequencies", [frequencies], FREQUENCIES)
    choose("--map", [map or "rotate"], data.MAPS)
    choose("--axis-order", [axis_order or "minor_first"], AXIS_ORDERS)
    if axis_order is not None and frequencies == "mixed":
        raise typer.BadParameter(
            f"--axis-order: expected no value with --frequencies mixed, got {axis_order!r}; leave out --axis-order, "
            "because mixed frequencies have no axis order"
        )
    options: Any = {"map": map, "axis_order": axis_order, **sizes}
    with _name_option("--frequencies"):
        return custom(frequencies, num_axes, **{key: value for key, value in options.items() if value is not None})


def save_figure(figure: Figure, path: Path, dpi: int, dark: bool) -> None:
    """Save and close a figure, optionally with a copy for dark pages, and print the paths."""
    print(path)
    if dark:
        print(save(figure, path, dpi=dpi))
    else:
        figure.savefig(path, dpi=dpi)
        plt.close(figure)


def _find_schemes(wanted: Sequence[str]) -> dict[str, str | Scheme]:
    """Return presets by name, and schemes from JSON files by file name."""
    found: dict[str, str | Scheme] = {}
    for value in dict.fromkeys(wanted):
        if value.lower().endswith(".json"):
            name, scheme = re.sub(r"[^\w.-]+", "-", Path(value).stem), _read_scheme(value)
        else:
            if Path(value).is_dir() and value not in list_presets():
                advice = f"to plot a trained run, call lrpe_md.show(load_run({value!r})) in Python; see docs/image.md"
                raise typer.BadParameter(f"--preset: expected a name or a file, got a folder, {value!r}; {advice}")
            if value in MODULES:
                raise typer.BadParameter(f"--preset: {value!r} is not a preset; to plot it, pass {MODULES[value]}")
            advice = "For your own scheme, pass --import MODULE or a JSON file."
            [name] = [scheme] = choose("--preset", [value], list_presets(), advice)
        if name in found:
            raise typer.BadParameter(f"--preset: expected different names, got {name!r} twice; rename the file")
        found[name] = scheme
    return found


def _read_scheme(file: str) -> Scheme:
    try:
        return Scheme.from_dict(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        remedy = (
            "a file can't contain your own functions; register the scheme in a module with "
            "lrpe_md.presets.register_scheme, and pass --import MODULE --preset NAME"
        )
        text = re.sub(r"pass your own functions with .*", remedy, str(error))
        raise typer.BadParameter(f"--preset: expected JSON from Scheme.to_dict(), got {file!r}: {text}") from error
