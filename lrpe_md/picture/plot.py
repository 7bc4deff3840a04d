"""The public function :func:`lrpe_md.show`, which draws an encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleList

from ..checks import check_at_least, is_finite_number
from ..modules.base import FrequencyModule
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..presets.scheme import Dense, Preset, Scheme, Tokens, rotated_part
from . import data

__all__ = ["show"]


Drawable = str | Scheme | Preset | Module | Tensor
# What to pass instead of the names that matplotlib or the command use
INSTEAD = {
    "figsize": "width= in inches (the height follows from the panels, which you can select with panels=)",
    "dpi": "figure.savefig(file, dpi=...)",
    "out": "path=",
    "panel": "panels=",
    "channel": "channels=",
    "heads": "num_heads=",
    "format": "the suffix of path=",
    "map": "an encoding with this map, such as CosineMd(...) or Scheme(..., map=...),",
    "axis_order": "an encoding with this order, such as RotateMd(..., axis_order=...),",
}


def show(
    scheme: Drawable | Sequence[Drawable] | Mapping[str, Drawable],
    shape: tuple[int, ...] | None = None,
    path: str | Path | None = None,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    head: int = 0,
    token: tuple[int, ...] | None = None,
    channels: Sequence[int] = (),
    maps: int | None = None,
    text: int = 0,
    panels: Sequence[str] = (),
    width: float | None = None,
    dark: bool = False,
    **options: Any,
) -> Any:
    """Plot an encoding's angles for a few channels, its similarity to one token, and its wavelengths.

    ``lrpe-md visualize`` draws the same figure. For a name or a scheme, the figure also shows the other map and axis
    order. For a list of encodings, as with ``--compare``, the figure has a row per encoding, with the similarity,
    slices through it, and wavelengths. All rows have the same scales.

    Args:
        scheme: a name from :func:`lrpe_md.list_presets`, a :class:`lrpe_md.Scheme`, a result of :func:`lrpe_md.preset`,
            an encoding module such as :class:`lrpe_md.RotateMd`, or ω (H or 1, C, K) in radians per unit of position,
            with any float dtype and device. A module is drawn with its current frequencies. A bare ω is drawn with the
            rotate map. You can also pass a list of encodings, or a dict from titles (which may contain mathtext) to
            encodings. For a model, such as one from :func:`lrpe_md.adapt`, ``model.encoding`` is drawn with positions
            rescaled to ``model.reference``, with a row per layer if layers differ.
        shape: grid shape (N,), (H, W) or (T, H, W). The default depends on the scheme's axes.
        path: file to save the figure to, in the format of its suffix. Missing folders are created. With None, the
            figure is not saved.
        head_dim, num_heads: sizes for a scheme or a name; see :func:`lrpe_md.preset`.
        head: head to plot.
        token: grid coordinates of the marked token, such as (h, w). The default is the middle token.
        channels: channels (cosine) or pairs (rotate) to plot angles for. By default, ``maps`` channels are chosen, with
            at least one for each axis.
        maps: number of angle maps if ``channels`` is empty. The default is 4.
        text: number of text (or class) tokens before the grid. If the scheme skips these tokens, as with RotateMd or ω,
            figures label them "prefix".
        panels: names of the panels to draw. By default, all panels are drawn, with a header and a footnote. The names
            are "angles", "similarity", "variants" (similarity for the other map and axis order), "slices" and
            "wavelengths". Figures of a list of encodings have no "angles" or "variants", and figures of a sequence have
            no "slices".
        width: width of the figure in inches, from 3 to 100. The default is 11. Text keeps its size, so a narrow
            figure has fewer columns. The height follows from the panels.
        dark: whether to draw for a dark background.
        options: options of all schemes' positions, such as ``reference``; see :meth:`lrpe_md.presets.Preset.positions`.

    Returns:
        the figure, a matplotlib Figure. The figure is not registered with pyplot, so ``plt.show()`` doesn't show it. A
        notebook shows the figure if it is the last value of a cell, and ``figure.savefig(file, dpi=...)`` saves it at
        any resolution.

    Raises:
        ImportError: if matplotlib is not installed.
        TypeError: if the scheme, the shape, the token or the panels have the wrong type, or for an unknown option.
        ValueError: for an unknown name, an invalid shape of ω, an invalid width, or a shape, head, token, channel, text
            or panel that the scheme does not support.
    """
    try:
        from matplotlib import rc_context

        from .dark import darken
        from .figure import SAVED, draw, draw_comparison, make_view
    except ImportError as error:
        raise ImportError("show: needs matplotlib; run pip install 'lrpe-md[plots]'") from error
    check_at_least(1, maps=1 if maps is None else maps)
    check_at_least(0, text=text)
    _check_drawing(channels, panels, width, options)

    def view(scheme: Any, title: Any, model: Any = None) -> Any:
        scheme, model = _find_encoding(scheme), scheme if model is None else model
        subject = _prepare(scheme, head_dim, num_heads)
        if title is not None:
            subject = replace(subject, preset=replace(subject.preset, name=str(title)))
        made = subject.preset
        _check_text(made, text)
        _check_index("head", head, max(made.omega.shape[0], made.num_heads), scheme)
        size = data.default_shape(made) if shape is None else _check_shape(shape, made.num_axes)
        placement = options if "reference" in options else {**options, "reference": _find_reference(model, size)}

        def locate(*segments: Any) -> Grid | Coordinates:
            positions = made.positions(*segments, **placement)
            return scheme.locate(positions) if isinstance(scheme, FrequencyModule) else positions

        layout = data.lay_out_tokens(locate, size, text, made.scheme.row_major)
        marked = layout.centre if token is None else _check_token(token, layout)
        for channel in channels:
            _check_index("channels", channel, made.omega.shape[1])
        return make_view(subject, layout, marked, head, channels=channels, maps=maps, options=placement)

    found = _find_encoding(scheme)
    if isinstance(found, (list, tuple, dict)):
        if not found:
            raise ValueError(f"scheme: expected one or more encodings, got an empty {type(found).__name__}")
        titled = found.items() if isinstance(found, dict) else ((None, each) for each in found)
        model = scheme if isinstance(scheme, Module) else None
        figure = draw_comparison([view(each, title, model) for title, each in titled], panels, width)
    else:
        figure = draw(view(scheme, None), panels, width)
    if dark:
        darken(figure)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with rc_context(SAVED):
            figure.savefig(path, dpi=150)
    return figure


def _check_drawing(channels: Any, panels: Any, width: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(channels, Sequence):
        raise TypeError(f"channels: expected a list of integers, such as [0, 8], got {channels!r}")
    if isinstance(panels, str) or not isinstance(panels, Sequence):
        raise TypeError(f"panels: expected a list of names, such as ['similarity'], got {panels!r}")
    if width is not None and not (is_finite_number(width) and data.MIN_WIDTH <= width <= data.MAX_WIDTH):
        raise ValueError(f"width: expected {data.MIN_WIDTH:g} to {data.MAX_WIDTH:g} inches, got {width!r}")
    for name in options:
        if name in INSTEAD:
            raise TypeError(f"{name}: expected {INSTEAD[name]} instead of {name}, got {options[name]!r}")


def _check_text(made: Preset, text: int) -> None:
    if text and made.scheme.tokens is None:
        raise ValueError(
            f"text: {made.name} has no rule for text tokens, got {text}; draw {made.name} without text=, or pass a "
            'copy of its scheme for unrotated tokens: dataclasses.replace(preset(...).scheme, tokens=Tokens(0, "skip"))'
        )


def _check_index(name: str, value: Any, number: int, scheme: Any = None) -> None:
    if not isinstance(value, int) or not 0 <= value < number:
        hint = "; for more heads, pass num_heads=" if isinstance(scheme, (str, Scheme)) else ""
        raise ValueError(f"{name}: expected 0 to {number - 1}, got {value!r}{hint}")


def _check_token(token: Any, layout: data.TokenLayout) -> tuple[int, ...]:
    if not isinstance(token, (tuple, list)) or not all(isinstance(i, int) for i in token):
        raise TypeError(f"token: expected grid coordinates, such as {layout.centre}, got {token!r}")
    layout.index(token)
    return tuple(token)


def _check_shape(shape: Any, num_axes: int) -> tuple[int, ...]:
    expected = "shape: expected (N,), (H, W) or (T, H, W), got"
    size = shape if isinstance(shape, int) and shape > 0 else 14
    example = tuple(shape.shape) if isinstance(shape, Grid) else (size,) * (1 if num_axes == 1 else 2)
    if not isinstance(shape, (tuple, list)):
        found = "a Grid" if isinstance(shape, Grid) else repr(shape)
        raise TypeError(f"{expected} {found}; pass integers, such as shape={example}")
    sizes = tuple(shape)
    if not 1 <= len(sizes) <= 3 or any(size == 0 for size in sizes):
        raise ValueError(f"{expected} {sizes}; pass positive integers, such as shape={example}")
    return sizes


def _find_encoding(scheme: Any) -> Any:
    """Return a model's encoding, or a dict from titles to the encodings of layers. Return other values unchanged."""
    if isinstance(scheme, Module) and isinstance(getattr(scheme, "encoding", None), Module):
        scheme = scheme.encoding
    return {f"layer {i}": each for i, each in enumerate(scheme)} if isinstance(scheme, ModuleList) else scheme


def _find_reference(model: Any, shape: tuple[int, ...]) -> Any:
    """Return the size to which a model rescales a grid, or None."""
    reference: Any = getattr(model, "reference", None) if isinstance(model, Module) else None
    return reference(shape) if callable(reference) else reference


def _prepare(scheme: Any, head_dim: int | None, num_heads: int | None) -> data.Subject:
    """Return the subject for a scheme, preset, module or tensor. Frequencies are copied to the CPU."""
    if isinstance(scheme, (str, Scheme)):
        return data.published(scheme, head_dim, num_heads)
    if isinstance(scheme, dict):
        raise TypeError(
            "scheme: expected models whose layers share an encoding, got one with separate encodings per layer; in a "
            "list or dict, pass model.encoding[i]"
        )
    if not isinstance(scheme, (Preset, FrequencyModule, Tensor)):
        raise TypeError(
            "scheme: expected a name, a Scheme, a Preset, a module such as RotateMd, a model with an "
            f"encoding (model.encoding), or a tensor omega (H or 1, C, K), got {type(scheme).__name__}; for a model "
            "with its own RoPE, pass the name of its preset or its frequencies"
        )
    if head_dim is not None or num_heads is not None:
        raise ValueError(
            f"head_dim, num_heads: expected None with a {type(scheme).__name__}, which already defines both, got "
            f"{head_dim}, {num_heads}"
        )
    if isinstance(scheme, Preset):
        return data.Subject(scheme, {}, 0)
    omega = scheme.get_omega() if isinstance(scheme, FrequencyModule) else scheme
    if omega.ndim != 3 or not all(omega.shape) or not omega.is_floating_point() or omega.is_meta:
        raise ValueError(
            "scheme: expected omega of shape (H or 1, C, K) with a float dtype, not on the meta device, got "
            f"{omega.dtype} {tuple(omega.shape)} on {omega.device}"
        )
    omega = omega.detach().double().cpu()
    gain = getattr(scheme, "amplitude", None)
    amplitude = 1.0 if gain is None else gain.detach().double().cpu()[0]
    own = getattr(scheme, "preset", None)
    if isinstance(own, Preset):
        return data.Subject(replace(own, omega=omega, amplitude=amplitude), {}, 0)
    frequencies = Dense(omega.shape[2], lambda *_: omega, 1.0)
    name, form, part = "omega", Scheme("omega", 2 * omega.shape[1], frequencies, tokens=Tokens(0, "skip")), None
    if isinstance(scheme, FrequencyModule):
        fields: Any = {"map": scheme.map} | ({"pairs": scheme.pairs} if scheme.map == "rotate" else {})
        name, form = type(scheme).__name__, replace(form, head_dim=scheme.head_dim, **fields)
        part = rotated_part(form, form.head_dim, scheme.rotary_dim)
    return data.Subject(Preset(name, form, form.head_dim, omega.shape[0], omega, amplitude, None, part), {}, 0)
