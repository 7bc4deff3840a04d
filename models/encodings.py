"""The encoding of a backbone: by name, module or factory, made for its heads and layers; and where its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lrpe_md import After, Coordinates, CosineMd, Grid, PresetMd, RotateMd, Tokens, compose, list_presets, preset
from lrpe_md.engine.validate import check_act
from lrpe_md.presets import Preset
from lrpe_md.presets.scheme import Axial
from lrpe_md.reference import activate

__all__ = ["Activation", "Encoding", "build_encoding", "check_preset", "lay_out", "preset_of"]

Encoding: TypeAlias = str | nn.Module | Callable[..., nn.Module] | None


class Activation(nn.Module):
    """``encoding=None`` with an activation: q, k → act(q), act(k), whatever the positions."""

    def __init__(self, act: str = "none", dim: int | None = None) -> None:
        super().__init__()
        check_act(act, dim)
        self.act, self.dim = act, dim

    def forward(self, *xs: Tensor, positions: Any = None) -> tuple[Tensor, ...]:
        return tuple(activate(x, self.act, self.dim) for x in xs)

    def extra_repr(self) -> str:
        return f"act={self.act!r}"


def build_encoding(
    encoding: Any, kwargs: dict[str, Any], head_dim: int, num_heads: int, depth: int, num_axes: int
) -> nn.Module | None:
    """One module for all layers, a ModuleList of one a layer, or None.

    Args:
        encoding: "cosine" or "rotate": axial frequencies, shared by all heads and layers; with ``frequencies="mixed"``
            each head has its own; with a phase each layer and head has its own phase and, where they are learned or
            mixed, frequencies. "mixed": rotate with learned frequencies for each layer and head, base 10 (RoPE-ViT,
            arXiv 2403.13298). A name of
            :func:`lrpe_md.list_presets`: a :class:`lrpe_md.PresetMd`, for each layer where it learns. A module, shared
            by all layers. A factory ``(head_dim, num_heads) -> module``, called once a layer. None: no encoding.
        kwargs: for "cosine", "rotate" and "mixed" of :class:`lrpe_md.CosineMd` and :class:`lrpe_md.RotateMd`; for the
            first two also ``split``, the axes' shares of the channels, (2, 3, 3) gives time two eighths, and
            ``remainder``, the axis that takes what the shares leave over; ``learnable`` then trains ω. For a preset of
            :func:`lrpe_md.preset` and PresetMd. For None: act, dim. For a factory its own.
        head_dim, num_heads, depth, num_axes: of the backbone.

    Raises:
        ValueError, TypeError: an unknown name, an argument that does not fit.
    """
    if encoding is None:
        if kwargs.keys() - {"act", "dim"}:
            raise ValueError(f"encoding_kwargs: expected act and dim alone with encoding=None, got {kwargs}")
        return Activation(**kwargs) if kwargs.get("act", "none") != "none" else None
    if isinstance(encoding, nn.Module):
        if kwargs:
            raise ValueError(f"encoding_kwargs: expected none with a module as encoding, got {kwargs}")
        return encoding
    if encoding in ("cosine", "rotate"):
        by_head = kwargs.get("phase") or kwargs.get("frequencies") == "mixed"
        own = _shared_out(**{"num_heads": num_heads, **kwargs} if by_head else kwargs)
        make = partial(CosineMd if encoding == "cosine" else RotateMd, head_dim, num_axes, **own)
        seed = kwargs.get("seed", 0)
        return nn.ModuleList(make(seed=seed + i) for i in range(depth)) if kwargs.get("phase") else make()
    if encoding == "mixed":
        kwargs = {"frequencies": "mixed", "base": 10.0, "learnable": True, "num_heads": num_heads, **kwargs}
        seed = kwargs.pop("seed", 0)
        return nn.ModuleList(RotateMd(head_dim, num_axes, seed=seed + i, **kwargs) for i in range(depth))
    if encoding in list_presets():
        return _of_preset(encoding, dict(kwargs), head_dim, num_heads, depth)
    if isinstance(encoding, str) or not callable(encoding):
        raise ValueError(
            f"encoding: expected 'cosine', 'rotate', 'mixed', one of the presets {list_presets()}, None, an nn.Module "
            f"or a factory (head_dim, num_heads) -> nn.Module, got {encoding!r}"
        )
    if isinstance(encoding, type):  # by name: the second positional argument of CosineMd is num_axes
        modules: list[Any] = [encoding(head_dim=head_dim, num_heads=num_heads, **kwargs) for _ in range(depth)]
    else:
        modules = [encoding(head_dim, num_heads, **kwargs) for _ in range(depth)]
    if not all(isinstance(m, nn.Module) for m in modules):
        raise TypeError(f"encoding: expected a factory that returns an nn.Module, got a {type(modules[0]).__name__}")
    return nn.ModuleList(modules)


def _shared_out(*, split: Sequence[int] | None = None, remainder: int | None = None, **kwargs: Any) -> dict[str, Any]:
    """Arguments of a module whose axes have unequal shares of the channels."""
    if split is None:
        if remainder is not None:
            raise ValueError(f"remainder: expected None without split, whose rest it takes, got {remainder}")
        return kwargs
    series = {"base": kwargs.pop("base", 1e4), "axis_order": kwargs.pop("axis_order", "minor_first")}
    return {"frequencies": partial(_split_omega, Axial(tuple(split), remainder=remainder, **series)), **kwargs}


def _split_omega(series: Axial, channels: int, heads: int, seed: int) -> Tensor:
    return series.build(channels, heads, seed)[0]


def _of_preset(name: str, kwargs: dict[str, Any], head_dim: int, num_heads: int, depth: int) -> nn.Module:
    """Shared by all layers where nothing is learned, or where the scheme shares it."""
    changes = {key: kwargs.pop(key) for key in ("base", "split", "scaling", "seed") if key in kwargs}
    chosen = preset(name, head_dim, num_heads, **changes)
    first, frequencies = PresetMd(chosen, **kwargs), chosen.scheme.frequencies
    if chosen.scheme.shared or not list(first.parameters()):
        return first
    seeds = [{"seed": changes.get("seed", 0) + i} if "seed" in frequencies.takes else {} for i in range(depth)]
    return nn.ModuleList(PresetMd(preset(name, head_dim, num_heads, **{**changes, **s}), **kwargs) for s in seeds)


# --- positions -------------------------------------------------------------------------------------------


def preset_of(encoding: nn.Module | None) -> Preset | None:
    """What an encoding, of all layers or one a layer, was made from, where that says where tokens are."""
    first: Any = encoding[0] if isinstance(encoding, nn.ModuleList) else encoding
    return first.preset if isinstance(first, PresetMd) else None


def check_preset(encoding: nn.Module | None, num_axes: int, preset_axes: int | None = None) -> None:
    """A preset must have a place for images (2 axes) or videos (3), row by row.

    preset_axes: the axes that it must have itself; None: more will do, an image is a frame.
    """
    made = preset_of(encoding)
    if made is None:
        return
    if preset_axes is not None and made.num_axes != preset_axes:
        raise ValueError(f"encoding: expected a preset with {preset_axes} axes, got {made.name!r} with {made.num_axes}")
    try:
        made.positions((2,) * num_axes)
    except ValueError as error:
        what = {2: "images", 3: "videos"}[num_axes]
        raise ValueError(f"encoding: expected a preset for {what}, got {made.name!r}: {error}") from error
    if not isinstance(made.scheme.grid((2,) * num_axes), Grid):
        raise ValueError(f"encoding: expected a preset whose tokens come row by row, got {made.name!r}")


def lay_out(
    encoding: nn.Module | None,
    size: Sequence[int],
    before: int | Tokens = 0,
    *,
    after: Sequence[int] | None = None,
    reference: Sequence[int | None] | None = None,
    device: torch.device | str = "cpu",
) -> Grid | Coordinates:
    """Positions of tokens off the grid, and behind them in the sequence those of a grid of this size.

    By the rule of a preset where the encoding has one, else one unit a token.

    Args:
        before: a number of tokens, placed as the preset has it, else not rotated; or with a rule of their own.
        after: axes on which the grid is behind the tokens; None: it stands at the origin. A preset has its own.
        reference: a size for each axis of ``size``, or None for one: positions of that axis are laid over a grid of
            this size. Default: as the preset has it.
        device: of a table.
    """
    size, made = tuple(size), preset_of(encoding)
    if made is not None:
        if not isinstance(before, Tokens) and made.scheme.tokens is None:
            before = Tokens(before)
        return made.positions(before, size, reference=_on_axes(made, reference), device=device)
    tokens = before if isinstance(before, Tokens) else Tokens(before)
    grid = Grid(size) if reference is None else Grid(size).interpolate(reference)
    if tokens.rule == "skip":
        return replace(grid, prefix=tokens.length)
    return compose(tokens, grid if after is None else After(grid, tuple(after)), device=device)


def _on_axes(made: Preset, reference: Sequence[int | None] | None) -> tuple[int | None, ...] | None:
    """Sizes of the axes of an image or video as sizes of the preset's axes, None for those that it adds."""
    if reference is None:
        return None
    probe = tuple(range(2, 2 + len(reference)))  # no two alike, and none of size 1
    placed: Any = made.scheme.grid(probe)
    return tuple(reference[probe.index(n)] if n in probe else None for n in placed.shape)
