"""Plots of a scheme: the axis and frequency of each channel, and the resulting angles on a grid."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .modules.base import FrequencyModule
from .positions.coordinates import Coordinates
from .positions.grid import Grid
from .presets.registry import find_scheme, preset
from .presets.scheme import Dense, Preset, Scheme

__all__ = ["show"]

SIZES: dict[int, tuple[int, ...]] = {1: (64,), 2: (18, 28), 3: (9, 18, 28)}
LETTERS = {1: ("n",), 2: ("h", "w"), 3: ("t", "h", "w"), 4: ("t", "h", "w", "l")}
SHOWN = 4  # number of angle maps


def show(
    scheme: str | Scheme | Preset | FrequencyModule | Tensor,
    shape: tuple[int, ...] | None = None,
    path: str | Path | None = None,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    head: int = 0,
    **options: Any,
) -> Any:
    """Plot an encoding: ω per channel and axis, Θ of a few channels over the grid, and similarity to its middle token.

    Args:
        scheme: a name from :func:`lrpe_md.list_presets`, a :class:`lrpe_md.Scheme`, a result of
            :func:`lrpe_md.preset`, an encoding module such as :class:`lrpe_md.RotateMd`, or ω (H or 1, C, K) in radians
            per unit, of any float dtype and device. A module is drawn with its current frequencies.
        shape: grid (N,), (H, W) or (T, H, W); default: one that suits the scheme's axes.
        path: file for the figure, in the format of its suffix. Missing folders are created. None: don't save it.
        head_dim, num_heads: for a scheme or a name; see :func:`lrpe_md.preset`.
        head: head to plot.
        options: options of the scheme's grids.

    Returns:
        the matplotlib Figure.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: a scheme of another type.
        ValueError: an unknown name, an ω of another shape, or a shape or head that the scheme does not support.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("show: needs matplotlib, pip install 'lrpe-md[plots]'") from error
    made = _prepare(scheme, head_dim, num_heads)
    heads = made.omega.shape[0]
    if not 0 <= head < max(heads, made.num_heads):
        raise ValueError(f"head: expected 0 to {max(heads, made.num_heads) - 1}, got {head}")
    omega = made.omega[head if heads > 1 else 0]
    size = _default_shape(made) if shape is None else tuple(shape)
    positions = made.positions(size, **options)
    positions = scheme.locate(positions) if isinstance(scheme, FrequencyModule) else positions
    angles, similarity = _on_grid(positions, omega, size)
    chosen = _spread(angles)
    rows, columns = (1, *size)[-2:]

    figure = figures.Figure(figsize=(2.6 * (len(chosen) + 2), 3.2), layout="constrained")
    axes = figure.subplots(1, len(chosen) + 2, width_ratios=[1.3, *[1] * (len(chosen) + 1)])
    width = f"{len(omega)} channels or pairs" if isinstance(scheme, Tensor) else f"head_dim {made.head_dim}"
    figure.suptitle(f"{made.name}: {width}, grid {' × '.join(map(str, size))}")
    _draw_frequencies(axes[0], omega)
    for ax, channel in zip(axes[1:], chosen, strict=False):
        ax.imshow(angles[:, channel].cos().reshape(rows, columns).numpy(), vmin=-1, vmax=1, cmap="RdBu", aspect="auto")
        ax.set_title(f"cos Θ, channel {channel}", fontsize=9)
    axes[-1].imshow(similarity.reshape(rows, columns).numpy(), vmin=-1, vmax=1, cmap="RdBu", aspect="auto")
    axes[-1].set_title("similarity with the middle", fontsize=9)
    for ax in axes[1:]:
        ax.set_xticks([])
        ax.set_yticks([])
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _prepare(scheme: Any, head_dim: int | None, num_heads: int | None) -> Preset:
    """Build the preset of a scheme, or wrap the frequencies of a module or tensor as one, float64 on the CPU."""
    if isinstance(scheme, (str, Scheme)):
        return preset(scheme, head_dim, num_heads or find_scheme(scheme)[1].num_heads)
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
        return scheme
    omega = scheme.get_omega() if isinstance(scheme, FrequencyModule) else scheme
    if omega.ndim != 3 or not all(omega.shape) or not omega.is_floating_point() or omega.is_meta:
        raise ValueError(
            "scheme: expected omega (H or 1, C, K) of a float dtype, not on the meta device, got "
            f"{omega.dtype} {tuple(omega.shape)} on {omega.device}"
        )
    omega = omega.detach().double().cpu()
    own = getattr(scheme, "preset", None)
    if isinstance(own, Preset):
        return replace(own, omega=omega)
    name, width, map_ = "omega", 2 * omega.shape[1], "rotate"
    if isinstance(scheme, FrequencyModule):
        name, width, map_ = type(scheme).__name__, scheme.head_dim, scheme.map
    frequencies = Dense(omega.shape[2], lambda *_: omega, 1.0)
    made: Any = Scheme(name, width, frequencies, map=map_)  # pyright: ignore[reportArgumentType]
    return Preset(name, made, width, omega.shape[0], omega, 1.0, None)


def _draw_frequencies(ax: Any, omega: Tensor) -> None:
    num_axes = omega.shape[1]
    for axis in range(num_axes):
        turned = omega[:, axis].nonzero()[:, 0]
        letter = LETTERS.get(num_axes, tuple(str(j) for j in range(num_axes)))[axis]
        ax.plot(turned.numpy(), omega[turned, axis].abs().numpy(), ".", label=letter, markersize=3)
    ax.set_yscale("log")
    ax.set_xlabel("channel or pair")
    ax.set_title("|ω|, radians per unit", fontsize=9)
    ax.legend(fontsize=8)


def _default_shape(made: Preset) -> tuple[int, ...]:
    """Return the first default shape that the scheme's grids accept."""
    for number in sorted(SIZES, key=lambda n: abs(n - made.num_axes)):
        try:
            made.positions(SIZES[number])
        except (ValueError, IndexError):
            continue
        return SIZES[number]
    raise ValueError(f"shape: expected a shape, because {made.name} fits none of {tuple(SIZES.values())}, got None")


def _on_grid(positions: Grid | Coordinates, omega: Tensor, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return Θ (N, C) of the middle frame's tokens, and their mean cos(Θ_n - Θ_m) with the middle token m."""
    table = positions.explicit().explicit().coords.double().cpu()
    angles = table @ omega.T
    rows, columns = (1, *size)[-2:]
    frame = rows * columns
    first = len(angles) // frame // 2 * frame
    angles = angles[first : first + frame]
    turned = (omega != 0).any(-1)
    middle = angles[rows // 2 * columns + columns // 2]
    return angles, torch.cos(angles - middle)[:, turned].mean(-1)


def _spread(angles: Tensor) -> list[int]:
    """Choose channels between the fastest and the slowest that vary over the grid."""
    turns = angles.max(0).values - angles.min(0).values
    moving = [c for c in turns.argsort(descending=True).tolist() if turns[c] > 0.5] or [int(turns.argmax())]
    steps = torch.linspace(0, len(moving) - 1, min(SHOWN, len(moving))).round().long().tolist()
    return [moving[i] for i in steps]
