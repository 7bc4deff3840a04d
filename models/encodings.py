"""Encodings by name, for backbones whose grid has three axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lrpe_md import CosineMd, RotateMd, list_presets, preset
from lrpe_md.presets import Axial

__all__ = ["video_encoding"]


def video_encoding(
    name: str,
    head_dim: int,
    num_heads: int = 1,
    *,
    split: Sequence[int] | None = None,
    remainder: int | None = None,
    base: float | None = None,
    **kwargs: Any,
) -> CosineMd | RotateMd:
    """Frequencies on three axes with unequal shares of the channels, or those of a preset.

    Args:
        name: "cosine" or "rotate", or one of ``list_presets()`` with three axes.
        head_dim, num_heads: of the backbone.
        split: shares of the channels, (T, H, W): (2, 3, 3) gives time two eighths. A preset has its own.
        remainder: the axis that takes what the shares leave over; None: they must come out even.
        base: of the series; default: 10000, or the preset's.
        kwargs: of :class:`CosineMd` or :class:`RotateMd`, such as act, phase, axis_order. ``learnable`` trains ω; a
            preset's default is the original's.

    Returns:
        a module, to be shared by the layers. Its ``place`` is the preset's rule, (T, H, W) → grid.

    Raises:
        ValueError: an unknown name, a preset with another number of axes, shares that don't come out even.
    """
    if name in ("cosine", "rotate"):
        if split is None:
            raise ValueError(f"split: expected the shares of (T, H, W) for {name!r}, got None")
        series: dict[str, Any] = {"split": tuple(split), "remainder": remainder, "base": 1e4 if base is None else base}
        series["axis_order"] = kwargs.pop("axis_order", "minor_first")
        module = CosineMd if name == "cosine" else RotateMd
        return module(head_dim, 3, frequencies=partial(_split_omega, **series), num_heads=num_heads, **kwargs)
    known = [known for known in list_presets() if preset(known).num_axes == 3]
    if name not in known:
        raise ValueError(f"encoding: expected 'cosine', 'rotate', 'mixed' or one of the presets {known}, got {name!r}")
    made = preset(name, head_dim, num_heads, base=base, split=split)
    kwargs = {
        "frequencies": partial(_preset_omega, name=name, head_dim=head_dim, base=base, split=split),
        "pairs": made.scheme.pairs, "act": made.scheme.act, "learnable": made.scheme.learned,
        "num_heads": num_heads, **kwargs,
    }  # fmt: skip
    encoding: Any = RotateMd(head_dim, 3, **kwargs)
    encoding.place = made.positions
    return encoding


def _split_omega(channels: int, heads: int, seed: int, **series: Any) -> Tensor:
    return Axial(**series).build(channels, heads, seed)[0]


def _preset_omega(channels: int, heads: int, seed: int, *, name: str, head_dim: int, **kwargs: Any) -> Tensor:
    return preset(name, head_dim, heads, seed=seed or None, **kwargs).omega
