"""What a published scheme is, as data, and what it becomes at a given size. :mod:`lrpe_md.presets` has the schemes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..frequencies.axial import AxisMap, AxisOrder, axial_omega, split_channels
from ..frequencies.series import geometric_theta
from ..positions.grid import Coordinates, Grid
from ..positions.sequences import After, Segment, Tokens, compose

__all__ = ["Axial", "Dense", "Preset", "Scaling", "Scheme"]

Scaling = Callable[[Tensor], tuple[Tensor, float]]


def geometric(num: int, base: float, heads: int) -> Tensor:
    return geometric_theta(num, base)


def plain(shape: tuple[int, ...]) -> Grid:
    return Grid(shape)


@dataclass(frozen=True)
class Axial:
    """One axis a channel: a series, laid over the channels (:func:`lrpe_md.axial_omega`).

    Args:
        split: the axes' shares of the channels, slowest axis first.
        base: of the series; None: it has none.
        series: (number, base, number of heads) → theta (E,) or (H, E).
        axis_order, axis_map: see :func:`lrpe_md.axial_omega`.
        remainder: the axis that takes what the shares leave over; None: the shares must come out even.
        scaling: theta → (theta, amplitude), one of ``lrpe_md.*_scaling`` with its numbers; or one an axis.
    """

    split: tuple[int, ...]
    base: float | None = 1e4
    series: Callable[[int, Any, int], Tensor] = geometric
    axis_order: AxisOrder = "major_first"
    axis_map: AxisMap = "block"
    remainder: int | None = None
    scaling: Scaling | Sequence[Scaling | None] | None = None

    @property
    def num_axes(self) -> int:
        return len(self.split)

    @property
    def takes(self) -> set[str]:
        """What can be said instead of the scheme's own."""
        base = {"base"} if self.base is not None else set()
        shared = self.num_axes > 1 and self.axis_map != "even_odd"  # which deals out alike
        return {"scaling"} | base | ({"split"} if shared else set())

    def sections(self, num_channels: int) -> tuple[int, ...]:
        return split_channels(num_channels, self.split, remainder=self.remainder)

    def build(self, num_channels: int, num_heads: int, seed: int) -> tuple[Tensor, float | Tensor]:
        sections = self.sections(num_channels)
        scalings = self.scaling if isinstance(self.scaling, Sequence) else (self.scaling,) * self.num_axes
        if len(scalings) != self.num_axes:
            raise ValueError(f"scaling: expected one for each of {self.num_axes} axes, got {len(scalings)}")
        whole = self.axis_map in ("chunk", "stride", "even_odd")  # one series over all channels
        thetas, amplitudes = [], []
        for section, scaling in zip(sections, scalings, strict=True):
            theta = self.series(num_channels if whole else max(section, 1), self.base, num_heads)
            theta, amplitude = (theta, 1.0) if scaling is None else scaling(theta)
            thetas.append(theta)
            amplitudes.append(amplitude)
        lay = partial(
            axial_omega, num_channels=num_channels, num_axes=self.num_axes, axis_order=self.axis_order,
            axis_map=self.axis_map, sections=sections,
        )  # fmt: skip
        if len(set(amplitudes)) == 1:
            return lay(thetas), amplitudes[0]
        return lay(thetas), lay([torch.full_like(t, a) for t, a in zip(thetas, amplitudes, strict=True)])[0].sum(-1)


@dataclass(frozen=True)
class Dense:
    """A direction a channel.

    Args:
        num_axes: K.
        omega: (channels, heads, base, generator) → omega (H, C, K).
        base: of the magnitudes.
    """

    num_axes: int
    omega: Callable[[int, int, float, torch.Generator], Tensor]
    base: float

    @property
    def takes(self) -> set[str]:
        return {"base", "seed"}

    def build(self, num_channels: int, num_heads: int, seed: int) -> tuple[Tensor, float]:
        return self.omega(num_channels, num_heads, self.base, torch.Generator().manual_seed(seed)), 1.0


# --- what a scheme is, and what is made of it --------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A published scheme: what :func:`preset` needs to know, and nothing about sizes.

    Args:
        doc: source and quirks.
        head_dim: of the original.
        frequencies: where ω comes from.
        map, pairs, act: see :func:`lrpe_md.rotate` and :func:`lrpe_md.cosine`.
        order: of the two halves that the cosine map puts out.
        grid: (shape, **options) → positions of an image or a video; its parameters are the options that there are.
        reference: default of ``positions(.., reference=..)``.
        tokens: where tokens off the grids are; None: there are none.
        tokens_start: shapes of the grids → start of the tokens; None: the running position.
        after: grids are placed behind what precedes them, on these axes; None: they are not.
        apart: what each further grid of a sequence is offset by.
        learned: ω is a parameter of the original.
        shared: all layers share what is learned.
        phase: whether it learns a phase, and of what.
        phase_range: bounds that the phase is kept in.
        augment: arguments of :class:`AugmentPositions` that the original trains with.
    """

    doc: str
    head_dim: int
    frequencies: Axial | Dense
    map: Literal["rotate", "cosine"] = "rotate"
    pairs: Literal["half", "interleaved"] = "interleaved"
    act: str = "none"
    order: Literal["cos_sin", "sin_cos"] = "cos_sin"
    grid: Callable[..., Grid | Coordinates] = plain
    reference: tuple[int, ...] | None = None
    tokens: Tokens | None = None
    tokens_start: Callable[[list[tuple[int, ...]]], float] | None = None
    after: tuple[int, ...] | None = None
    apart: tuple[float, ...] | None = None
    learned: bool = False
    shared: bool = False
    phase: Literal["k"] | None = None
    phase_range: tuple[float, float] | None = None
    augment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Preset:
    """A scheme for a given head_dim.

    Attributes:
        name, scheme: what it was made from; ``scheme.doc`` has source and quirks.
        head_dim, num_heads: D, and the heads that ω or the phase was made for.
        omega: (H or 1, C, K) float64 on the CPU: C = D for cosine, D/2 pairs for rotate. Where ``scheme.learned``, an
            initial value.
        amplitude: factor of q and of k, one number or one a pair (C,), of the tokens that are rotated.
        phase: shape (num_heads, C) of the learned phase, or None; ``scheme.phase`` says on what it goes.
    """

    name: str
    scheme: Scheme
    head_dim: int
    num_heads: int
    omega: Tensor
    amplitude: float | Tensor
    phase: tuple[int, int] | None

    def __repr__(self) -> str:
        heads = f", num_heads={self.num_heads}" if self.num_heads > 1 else ""
        return (
            f"{type(self).__name__}({self.name!r}, head_dim={self.head_dim}{heads}, num_axes={self.num_axes}, "
            f"omega={tuple(self.omega.shape)})"
        )

    @property
    def num_axes(self) -> int:
        return self.scheme.frequencies.num_axes

    @property
    def options(self) -> dict[str, Any]:
        """What :func:`lrpe_md.rotate` or :func:`lrpe_md.cosine`, whichever ``scheme.map`` says, also takes."""
        rotating = self.scheme.map == "rotate"
        form = {"pairs": self.scheme.pairs} if rotating else {"order": self.scheme.order}
        return {"act": self.scheme.act, "amplitude": self.amplitude, **form}

    def positions(
        self,
        *segments: int | Sequence[int] | Segment,
        reference: int | Sequence[int | None] | None = None,
        start: int = 0,
        length: int | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Grid | Coordinates:
        """Positions of a sequence, in the order of its tokens.

        Args:
            segments: a number for that many tokens off the grids (text, class tokens, registers), a shape for an
                image (H, W) or a video (T, H, W) in tokens, or a segment of :func:`lrpe_md.compose` as it is.
            reference: interpolate the grids onto this size, one number an axis or None, where their resolution is not
                that of the training.
            start, length: a shard of the sequence.
            device: of a table.
            options: of the scheme's grids (``fps``, ``by``, ..; see its docstring).

        Returns:
            a :class:`Grid` where there is one grid with unrotated tokens around it, else :class:`Coordinates`.

        Raises:
            ValueError: a shape or tokens that the scheme does not have.
            TypeError: an option that its grids don't take.
        """
        scheme, parts, number = self.scheme, [], 0
        if options:
            taken = list(inspect.signature(scheme.grid).parameters)[1:]
            for option in options.keys() - set(taken):
                raise TypeError(
                    f"{option}: {self.name}'s grids take {' and '.join(taken) or 'no options'}, got {options[option]!r}"
                )
        shapes = [tuple(s) for s in segments if isinstance(s, (tuple, list))]
        reference = scheme.reference if reference is None else reference
        for segment in segments:
            if isinstance(segment, int):
                if scheme.tokens is None:
                    raise ValueError(f"segments: {self.name} has tokens on grids only, expected a shape, got {segment}")
                first = scheme.tokens.start if scheme.tokens_start is None else scheme.tokens_start(shapes)
                parts.append(replace(scheme.tokens, length=segment, start=first))
            elif isinstance(segment, (tuple, list)):
                grid = scheme.grid(tuple(segment), **options)
                if grid.num_axes != self.num_axes:
                    raise ValueError(
                        f"segments: {self.name} has {self.num_axes} axes, expected a shape for them, got {segment}"
                    )
                if reference is not None:
                    if not isinstance(grid, Grid):
                        raise ValueError(
                            f"reference: {self.name} has a table of positions, expected None, got {reference}"
                        )
                    grid = grid.interpolate(reference)
                if scheme.apart is not None and number:
                    grid = grid.offset([number * by for by in scheme.apart])
                parts.append(After(grid, scheme.after) if scheme.after and isinstance(grid, Grid) else grid)
                number += 1
            else:
                parts.append(segment)
        scaled = isinstance(self.amplitude, Tensor) or self.amplitude != 1
        return _one_grid(parts, scaled, start, length) or compose(
            *parts, num_axes=self.num_axes, start=start, length=length, device=device
        )


def _one_grid(parts: list[Segment], scaled: bool, start: int, length: int | None) -> Grid | None:
    """The sequence as a grid, where it is one grid between tokens that are not rotated."""
    grids = [i for i, part in enumerate(parts) if not isinstance(part, Tokens)]
    # Zero positions are no rotation but for the amplitude; a scheme with a phase has no such tokens.
    rules = ("skip",) if scaled else ("skip", "zero")
    still = all(part.rule in rules for part in parts if isinstance(part, Tokens))
    if len(grids) != 1 or not still:
        return None
    grid = parts[grids[0]]
    grid = grid.grid if isinstance(grid, After) else grid
    if not isinstance(grid, Grid) or not grid.whole:
        return None
    before, behind = ([p.length for p in t if isinstance(p, Tokens)] for t in (parts[: grids[0]], parts[grids[0] :]))
    return replace(grid, prefix=grid.prefix + sum(before), suffix=grid.suffix + sum(behind), start=start, length=length)
