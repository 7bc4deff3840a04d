"""The public function :func:`lrpe_md.show`, which draws an encoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..modules.base import FrequencyModule
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..presets.scheme import Dense, Preset, Scheme
from . import data

__all__ = ["show"]


def show(
    scheme: str | Scheme | Preset | FrequencyModule | Tensor,
    shape: tuple[int, ...] | None = None,
    path: str | Path | None = None,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    head: int = 0,
    dark: bool = False,
    **options: Any,
) -> Any:
    """Plot an encoding's angles for a few channels, its similarity to the middle token, and its wavelengths.

    ``lrpe-md visualize`` draws the same figure. For a name or a scheme, the figure also shows the other map and axis
    order.

    Args:
        scheme: a name from :func:`lrpe_md.list_presets`, a :class:`lrpe_md.Scheme`, a result of :func:`lrpe_md.preset`,
            an encoding module such as :class:`lrpe_md.RotateMd`, or ω (H or 1, C, K) in radians per unit of position,
            with any float dtype and device. A module is drawn with its current frequencies, and ω is drawn as rotated
            pairs.
        shape: grid shape (N,), (H, W) or (T, H, W). By default, it is chosen to suit the scheme's axes.
        path: file to save the figure to, in the format of its suffix. Missing folders are created. With None, the
            figure is not saved.
        head_dim, num_heads: sizes for a scheme or a name; see :func:`lrpe_md.preset`.
        head: head to plot.
        dark: whether to draw for a dark background.
        options: options of the scheme's positions; see :meth:`lrpe_md.Preset.positions`.

    Returns:
        the figure, a matplotlib Figure.

    Raises:
        ImportError: if matplotlib is not installed.
        TypeError: if the scheme or the shape has the wrong type.
        ValueError: for an unknown name, an invalid shape of ω, or a shape or head that the scheme does not support.
    """
    try:
        from .dark import darken
        from .figure import draw, make_view
    except ImportError as error:
        raise ImportError("show: needs matplotlib, pip install 'lrpe-md[plots]'") from error
    subject = _prepare(scheme, head_dim, num_heads)
    made = subject.preset
    heads = max(made.omega.shape[0], made.num_heads)
    if not 0 <= head < heads:
        raise ValueError(f"head: expected 0 to {heads - 1}, got {head}")
    size = data.default_shape(made) if shape is None else _check_shape(shape, made.num_axes)

    def locate(*segments: Any) -> Grid | Coordinates:
        positions = made.positions(*segments, **options)
        return scheme.locate(positions) if isinstance(scheme, FrequencyModule) else positions

    layout = data.lay_out_tokens(locate, size, row_major=made.scheme.row_major)
    figure = draw(make_view(subject, layout, head=head, reference=options.get("reference")))
    if dark:
        darken(figure)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


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


def _prepare(scheme: Any, head_dim: int | None, num_heads: int | None) -> data.Subject:
    """Return the subject for a scheme, or for the frequencies of a preset, module or tensor, copied to the CPU."""
    if isinstance(scheme, (str, Scheme)):
        return data.published(scheme, head_dim, num_heads)
    if not isinstance(scheme, (Preset, FrequencyModule, Tensor)):
        raise TypeError(
            "scheme: expected a name, a Scheme, a Preset, an encoding module such as RotateMd, or omega "
            f"(H or 1, C, K), got {type(scheme).__name__}"
        )
    if head_dim is not None or num_heads is not None:
        raise ValueError(
            f"head_dim, num_heads: expected None with a {type(scheme).__name__}, which already has them, got "
            f"{head_dim}, {num_heads}"
        )
    if isinstance(scheme, Preset):
        return data.Subject(scheme, {}, 0)
    omega = scheme.get_omega() if isinstance(scheme, FrequencyModule) else scheme
    if omega.ndim != 3 or not all(omega.shape) or not omega.is_floating_point() or omega.is_meta:
        raise ValueError(
            "scheme: expected omega (H or 1, C, K) of a float dtype, not on the meta device, got "
            f"{omega.dtype} {tuple(omega.shape)} on {omega.device}"
        )
    omega = omega.detach().double().cpu()
    own = getattr(scheme, "preset", None)
    if isinstance(own, Preset):
        return data.Subject(replace(own, omega=omega), {}, 0)
    name, form = "omega", Scheme("omega", 2 * omega.shape[1], Dense(omega.shape[2], lambda *_: omega, 1.0))
    if isinstance(scheme, FrequencyModule):
        fields: Any = {"map": scheme.map} | ({"pairs": scheme.pairs} if scheme.map == "rotate" else {})
        name, form = type(scheme).__name__, replace(form, head_dim=scheme.head_dim, **fields)
    return data.Subject(Preset(name, form, form.head_dim, omega.shape[0], omega, 1.0, None), {}, 0)
