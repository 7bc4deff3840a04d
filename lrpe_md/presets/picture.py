"""Plots of a scheme: the axis and frequency of each channel, and the resulting angles on a grid."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .registry import find_scheme, preset
from .scheme import Preset, Scheme

__all__ = ["show"]

SIZES: dict[int, tuple[int, ...]] = {1: (64,), 2: (18, 28), 3: (9, 18, 28)}
LETTERS = {1: ("n",), 2: ("h", "w"), 3: ("t", "h", "w"), 4: ("t", "h", "w", "l")}
SHOWN = 4  # number of angle maps


def show(
    scheme: str | Scheme | Preset,
    shape: tuple[int, ...] | None = None,
    path: str | Path | None = None,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    head: int = 0,
    **options: Any,
) -> Any:
    """Plot a scheme: ω per channel and axis, Θ of a few channels over the grid, and similarity to its middle token.

    Args:
        scheme: a name from :func:`lrpe_md.list_presets`, a :class:`lrpe_md.Scheme`, or a result of
            :func:`lrpe_md.preset`.
        shape: grid (N,), (H, W) or (T, H, W); default: one that suits the scheme's axes.
        path: file for the figure, in the format of its suffix; None: don't save it.
        head_dim, num_heads: for a scheme or a name; see :func:`lrpe_md.preset`.
        head: head to plot.
        options: options of the scheme's grids.

    Returns:
        the matplotlib Figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: a shape or head that the scheme does not support.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("show: needs matplotlib, pip install 'lrpe-md[plots]'") from error
    if not isinstance(scheme, Preset):
        made = preset(scheme, head_dim, num_heads or find_scheme(scheme)[1].num_heads)
    elif head_dim is not None or num_heads is not None:
        raise ValueError(
            f"head_dim, num_heads: expected None with a Preset, which already has them, got {head_dim}, {num_heads}"
        )
    else:
        made = scheme
    heads = made.omega.shape[0]
    if not 0 <= head < max(heads, made.num_heads):
        raise ValueError(f"head: expected 0 to {max(heads, made.num_heads) - 1}, got {head}")
    omega = made.omega[head if heads > 1 else 0]
    size = _default_shape(made) if shape is None else tuple(shape)
    angles, similarity = _on_grid(made, omega, size, options)
    chosen = _spread(angles)
    rows, columns = (1, *size)[-2:]

    figure = figures.Figure(figsize=(2.6 * (len(chosen) + 2), 3.2), layout="constrained")
    axes = figure.subplots(1, len(chosen) + 2, width_ratios=[1.3, *[1] * (len(chosen) + 1)])
    figure.suptitle(f"{made.name}: head_dim {made.head_dim}, grid {' × '.join(map(str, size))}")
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
        figure.savefig(path)
    return figure


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


def _on_grid(made: Preset, omega: Tensor, size: tuple[int, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return Θ (N, C) of the middle frame's tokens, and their mean cos(Θ_n - Θ_m) with the middle token m."""
    table = made.positions(size, **options).explicit().explicit().coords
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
