"""Descriptions of schemes, and the presets built from them. :mod:`lrpe_md.presets.registry` lists the schemes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..checks import as_integer, check_at_least, check_frequencies, join_names, plural, rotary_slice
from ..frequencies.axial import (
    AxisMap,
    AxisOrder,
    axial_omega,
    check_map,
    has_one_series,
    is_even,
    num_blocks,
    split_channels,
    warn_of_idle_axes,
)
from ..frequencies.series import apply_scaling, call_function
from ..positions.augment import AugmentPositions
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..positions.sequences import After, Segment, Tokens, compose
from ..reference import Act
from .dicts import read_scheme, write_scheme
from .fields import check_axis_numbers, check_fields
from .functions import geometric, plain

__all__ = ["PRESET_OPTIONS", "Axial", "Dense", "Preset", "Scaling", "Scheme", "make_preset"]

Scaling = Callable[[Tensor], tuple[Tensor, float]]
# Arguments of preset(), which are often passed to positions() by mistake
PRESET_OPTIONS = ("base", "split", "scaling", "rotary_dim", "seed")


@dataclass(frozen=True)
class Axial:
    """Axial frequencies, where each channel depends on one axis; see :func:`lrpe_md.axial_omega`.

    Args:
        split: each axis's share of the channels, slowest axis first.
        base: base of the series, or None if the series has no base.
        series: function (num, base, num_heads) → theta (num,) or (H, num).
        axis_order, axis_map: see :func:`lrpe_md.axial_omega`. With the map "head", ``split`` divides the heads instead
            of the channels.
        gaps: shares of the unrotated channels before, between and after the blocks. There is one more share than there
            are blocks. None means no gaps.
        remainder: where the leftover channels go. With an axis number, that axis gets these channels. "front" and
            "behind" leave them unrotated at the start or the end. "cut" excludes the last channels before pairs are
            formed. None requires an exact split.
        across_heads: whether to split the channels of all heads together among the axes, and then into heads.
        scaling: function theta → (theta, amplitude), such as a ``lrpe_md.frequencies.*_scaling`` with its arguments
            bound, or one function per axis.
    """

    split: tuple[int, ...]
    base: float | None = 1e4
    series: Callable[[int, Any, int], Tensor] = geometric
    axis_order: AxisOrder = "major_first"
    axis_map: AxisMap = "block"
    gaps: tuple[int, ...] | None = None
    remainder: int | Literal["front", "behind", "cut"] | None = None
    across_heads: bool = False
    scaling: Scaling | Sequence[Scaling | None] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.split or min(self.split) < 0 or not any(self.split):
            raise ValueError(f"split: expected non-negative shares, not all 0, got {self.split}")
        check_map(self.axis_map, self.num_axes)
        if self.base is not None and self.base <= 0:
            raise ValueError(f"base: expected a positive number or None, got {self.base}")
        if self.base is None and self.series is geometric:
            raise ValueError("base: expected a positive number for a geometric series, got None")
        number = num_blocks(self.axis_map, self.num_axes) + 1
        if self.gaps is not None and (len(self.gaps) != number or min(self.gaps) < 0):
            raise ValueError(
                f"gaps: expected {number} non-negative shares, one more than the number of blocks, got {self.gaps}"
            )
        if isinstance(self.remainder, int) and not 0 <= self.remainder < self.num_axes:
            raise ValueError(f"remainder: expected an axis from 0 to {self.num_axes - 1}, got {self.remainder}")
        if isinstance(self.scaling, Sequence) and len(self.scaling) != self.num_axes:
            raise ValueError(
                f"scaling: expected one scaling for each of the {self.num_axes} axes, got {len(self.scaling)}"
            )

    @property
    def num_axes(self) -> int:
        return len(self.split)

    @property
    def by_head(self) -> bool:
        return self.axis_map == "head"

    @property
    def has_axis_order(self) -> bool:
        """Return whether ``axis_order`` has an effect."""
        return self.num_axes > 1 and isinstance(self.axis_map, str) and not self.by_head

    @property
    def takes(self) -> set[str]:
        """Names of the :func:`preset` arguments that this scheme supports."""
        base = {"base"} if self.base is not None else set()
        shared = self.num_axes > 1 and not is_even(self.axis_map)
        return {"scaling"} | base | ({"split"} if shared else set())

    def usable(self, num_channels: int) -> int:
        """Return the number of channels in use."""
        return num_channels - num_channels % self.least if self.remainder == "cut" else num_channels

    @property
    def least(self) -> int:
        """Smallest number of channels that can be split exactly."""
        return sum(self.split) + sum(self.gaps or ())

    def sections(self, num_channels: int) -> tuple[int, ...]:
        """Return the number of channels (or heads) for each axis."""
        return self._shared_out(num_channels)[0]

    def blocks(self, num_channels: int) -> tuple[int, ...]:
        """Return the number of channels in each block, in channel order."""
        if self.axis_map != "block" or any(self.gaps or ()) or isinstance(self.remainder, str):
            raise ValueError(f"pairs: 'blocks' needs axis_map='block' without gaps, got {self.axis_map!r}")
        sections = self.sections(num_channels)
        return tuple(n for n in (sections if self.axis_order == "major_first" else sections[::-1]) if n)

    def _shared_out(self, number: int) -> tuple[tuple[int, ...], list[int]]:
        """Return the number of channels for each axis and for each gap."""
        shares = (*self.split, *(self.gaps or ()))
        rest = number % self.least if self.remainder in ("front", "behind", "cut") else 0
        remainder = self.remainder if isinstance(self.remainder, int) else None
        widths = split_channels(number - rest, shares, remainder=remainder)
        gaps = list(widths[self.num_axes :]) or [0] * (num_blocks(self.axis_map, self.num_axes) + 1)
        gaps[0 if self.remainder == "front" else -1] += rest
        return widths[: self.num_axes], gaps

    def build(self, num_channels: int, num_heads: int, seed: int) -> tuple[Tensor, float | Tensor]:
        scalings = self.scaling if isinstance(self.scaling, Sequence) else (self.scaling,) * self.num_axes
        if self.by_head and num_heads % self.least:
            shares = " : ".join(map(str, self.split))
            raise ValueError(
                f"num_heads: expected a multiple of {self.least} to split the heads {shares} among the axes, got "
                f"{num_heads}"
            )
        wide = num_channels * num_heads if self.across_heads else num_channels
        sections, gaps = self._shared_out(num_heads if self.by_head else wide)
        laid = wide if self.by_head else wide - sum(gaps)
        thetas, amplitudes = [], []
        for section, scaling in zip(sections, scalings, strict=True):
            whole = self.by_head or has_one_series(self.axis_map)
            num = laid if whole else max(section, 1)
            args = {"num": num, "base": self.base, "num_heads": num_heads}
            theta = call_function("series", self.series, args, ((num,), (1, num), (num_heads, num)))
            theta, amplitude = (theta, 1.0) if scaling is None else apply_scaling(scaling, theta)
            thetas.append(theta)
            amplitudes.append(amplitude)
        lay = partial(
            axial_omega, num_channels=wide, num_axes=self.num_axes, axis_order=self.axis_order,
            axis_map=self.axis_map, sections=sections, gaps=None if self.by_head else gaps,
            num_heads=num_heads if self.by_head else None,
        )  # fmt: skip
        omega = lay(thetas)
        omega = omega.reshape(num_heads, -1, self.num_axes) if self.across_heads else omega
        if len(set(amplitudes)) == 1:
            return omega, amplitudes[0]
        gain = lay([torch.full_like(t, a) for t, a in zip(thetas, amplitudes, strict=True)]).sum(-1)
        if len(gain) > 1 or self.across_heads:
            raise ValueError(
                "scaling: expected one amplitude for all axes, because frequencies differ between heads, got several"
            )
        return omega, torch.where(gain[0] == 0, 1.0, gain[0])


@dataclass(frozen=True)
class Dense:
    """Dense frequencies, where each channel has its own direction.

    Args:
        num_axes: number of axes, K.
        omega: function (num_channels, num_heads, base, generator) → omega (H, C, K).
        base: base of the magnitudes.
    """

    num_axes: int
    omega: Callable[[int, int, float, torch.Generator], Tensor]
    base: float

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_axes < 1:
            raise ValueError(f"num_axes: expected at least 1, got {self.num_axes}")
        if self.base <= 0:
            raise ValueError(f"base: expected a positive number, got {self.base}")

    @property
    def takes(self) -> set[str]:
        return {"base", "seed"}

    def build(self, num_channels: int, num_heads: int, seed: int) -> tuple[Tensor, float]:
        generator = torch.Generator().manual_seed(seed)
        shapes = tuple((heads, num_channels, self.num_axes) for heads in (1, num_heads))
        args = {"num_channels": num_channels, "num_heads": num_heads, "base": self.base, "generator": generator}
        return call_function("omega", self.omega, args, shapes), 1.0


# --- schemes, and presets built from them ------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A published or custom scheme, independent of sizes. :func:`preset` builds it for a head_dim.

    A scheme is plain data, which :meth:`to_dict` writes and :meth:`from_dict` reads. The functions in a scheme are your
    own, or come from the dict ``lrpe_md.presets.FUNCTIONS``.

    Args:
        doc: source of the scheme and its peculiarities.
        head_dim: head_dim of the original model.
        frequencies: description of how to build ω.
        map, act: see :func:`lrpe_md.rotate` and :func:`lrpe_md.cosine`.
        pairs: "half", "interleaved", or "blocks", which uses the half layout within the block of each axis.
        rotary: rotated part of a head as a range of fractions. (0, 0.25) is the first quarter of the head's channels.
            None means all channels.
        order: order of the two halves that the cosine map returns.
        num_heads: number of heads in the original model, if heads differ. If heads differ and this number is 1,
            :func:`preset` requires ``num_heads``.
        grid: function (shape, **options) → positions of an image or a video. The function's parameters define the
            options.
        row_major: whether tokens are in row-major order. If False, the grid function returns a table in its own order.
        reference: default value of ``positions(..., reference=...)``.
        tokens: placement of tokens outside of the grids. The length in ``tokens`` is ignored, because you pass the
            number of tokens to ``positions``. None means that such tokens are not supported.
        tokens_start: function from the shapes of the grids to the position of the first token. None means the running
            position.
        tokens_first: whether tokens get their running positions before the grids, regardless of their place in the
            sequence.
        after: axes on which grids continue after the preceding segments. None means that grids keep their own
            positions.
        advance, whole: how grids advance the running position; see :class:`lrpe_md.After`.
        apart: offset between successive grids of a sequence on each axis.
        learned: whether the original model learns ω.
        shared: whether all layers share the learned parameters.
        phase: "k" if the original model learns a phase on the keys. None means no phase.
        phase_range: lower and upper bound of the phase.
        augment: arguments of :class:`AugmentPositions` that the original model was trained with.

    Raises:
        ValueError: for an invalid argument.
    """

    doc: str
    head_dim: int
    frequencies: Axial | Dense
    map: Literal["rotate", "cosine"] = "rotate"
    pairs: Literal["half", "interleaved", "blocks"] = "interleaved"
    act: Act = "none"
    rotary: tuple[float, float] | None = None
    order: Literal["cos_sin", "sin_cos"] = "cos_sin"
    num_heads: int = 1
    grid: Callable[..., Grid | Coordinates] = plain
    row_major: bool = True
    reference: tuple[int, ...] | None = None
    tokens: Tokens | None = None
    tokens_start: Callable[[list[tuple[int, ...]]], float] | None = None
    tokens_first: bool = False
    after: tuple[int, ...] | None = None
    advance: tuple[int, ...] | None = None
    whole: bool = False
    apart: tuple[float, ...] | None = None
    learned: bool = False
    shared: bool = False
    phase: Literal["k"] | None = None
    phase_range: tuple[float, float] | None = None
    augment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.frequencies, (Axial, Dense)):
            raise TypeError(f"frequencies: expected Axial or Dense, got {type(self.frequencies).__name__}")
        check_fields(self)
        check_at_least(1, head_dim=self.head_dim, num_heads=self.num_heads)
        if self.map == "cosine" and self.pairs != "interleaved":
            raise ValueError(
                f"pairs: expected 'interleaved' (the default) with map='cosine', which has no pairs, got {self.pairs!r}"
            )
        if self.map == "rotate" and self.order != "cos_sin":
            raise ValueError(
                f"order: expected 'cos_sin' (the default) with map='rotate', which has no halves, got {self.order!r}"
            )
        self._check_positions()
        if self.rotary is not None and not 0 <= self.rotary[0] < self.rotary[1] <= 1:
            raise ValueError(f"rotary: expected the start and end of a range within [0, 1], got {self.rotary}")
        if self.pairs == "blocks" and isinstance(self.frequencies, Dense):
            raise ValueError("pairs: expected 'half' or 'interleaved' with Dense, which has no blocks, got 'blocks'")
        if self.after is None and (self.advance is not None or self.whole):
            raise ValueError(
                f"advance, whole: expected None and False unless after is set, got {self.advance}, {self.whole}"
            )

    def _check_positions(self) -> None:
        num_axes = self.frequencies.num_axes
        check_axis_numbers(num_axes, after=self.after, advance=self.advance)
        if self.apart is not None and len(self.apart) != num_axes:
            raise ValueError(f"apart: expected a number for each of the {num_axes} axes, got {self.apart}")
        if self.reference is not None and (len(self.reference) != num_axes or min(self.reference) < 1):
            raise ValueError(f"reference: expected {num_axes} positive sizes, got {self.reference}")
        if self.tokens is not None and self.tokens.rule == "axis":
            check_axis_numbers(num_axes, **{"tokens.axis": (self.tokens.axis,)})
        if self.tokens is None and (self.tokens_start is not None or self.tokens_first):
            raise ValueError(
                "tokens_start, tokens_first: expected None and False unless tokens is set, got "
                f"{self.tokens_start}, {self.tokens_first}"
            )
        if self.phase_range is not None and not self.phase_range[0] < self.phase_range[1]:
            raise ValueError(f"phase_range: expected a lower and an upper bound, got {self.phase_range}")
        if self.augment:
            try:
                AugmentPositions(**self.augment)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"augment: expected arguments of AugmentPositions, got {self.augment}: {error}"
                ) from error

    def has_grid(self, num_axes: int) -> bool:
        """Return whether images (2 axes) or videos (3) are on a :class:`Grid`, whose positions can be interpolated."""
        return isinstance(self.grid((2,) * num_axes), Grid)

    def to_dict(self, functions: Mapping[str, Callable[..., Any]] | None = None) -> dict[str, Any]:
        """Return the fields that differ from their defaults as plain lists, numbers and strings, for JSON or YAML.

        functions: your own functions by name. You don't need to pass the library's own functions.

        Raises:
            ValueError: if a function has no name, or has the name of one of the library's functions.
        """
        return write_scheme(self, functions)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> Scheme:
        """Build a scheme from the output of :meth:`to_dict`, with the library's functions and those in ``functions``.

        Raises:
            ValueError, TypeError: if a field or function is unknown or missing, one of your functions has the name of a
                library function, a value is invalid, or the frequencies are invalid for the scheme's own head_dim.
        """
        scheme = read_scheme(data, functions, {"scheme": cls, "axial": Axial, "dense": Dense, "tokens": Tokens})
        make_preset("this scheme", scheme, scheme.head_dim, scheme.num_heads)
        return scheme


@dataclass(frozen=True, eq=False)
class Preset:
    """A scheme that was built for a specific head_dim.

    Attributes:
        name, scheme: name of the scheme, and the scheme itself. ``scheme.doc`` describes the scheme's source and
            peculiarities.
        head_dim, num_heads: D and the number of heads of ω or the phase.
        omega: frequencies (H or 1, C, K) in float64 on the CPU, where C is D for cosine and D/2 for rotate. These are
            the initial values if ``scheme.learned`` is True.
        amplitude: factor by which to multiply q and k of rotated tokens, a number or a tensor (C,) with one factor per
            pair.
        phase: shape (num_heads, C) of the learned phase, or None if there is none; see ``scheme.phase``.
        rotary_dim: slice of the rotated channels of a head, or None for all.
        blocks: number of pairs in each block, if ``scheme.pairs`` is "blocks".
    """

    name: str
    scheme: Scheme
    head_dim: int
    num_heads: int
    omega: Tensor
    amplitude: float | Tensor
    phase: tuple[int, int] | None
    rotary_dim: slice | None = None
    blocks: tuple[int, ...] | None = None

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
    def pairs(self) -> Any:
        """``pairs`` argument for :func:`lrpe_md.rotate`."""
        return self.blocks if self.scheme.pairs == "blocks" else self.scheme.pairs

    @property
    def options(self) -> dict[str, Any]:
        """Arguments other than omega and positions for :func:`lrpe_md.rotate` or :func:`lrpe_md.cosine`."""
        form = {"pairs": self.pairs} if self.scheme.map == "rotate" else {"order": self.scheme.order}
        part = {} if self.rotary_dim is None else {"rotary_dim": self.rotary_dim}
        return {"act": self.scheme.act, "amplitude": self.amplitude, **form, **part}

    def positions(
        self,
        *segments: int | Sequence[int] | Segment,
        reference: int | Sequence[int | None] | None = None,
        start: int = 0,
        length: int | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Grid | Coordinates:
        """Return the positions of a sequence, in token order.

        Args:
            segments: parts of the sequence. A number stands for that many tokens outside of the grids (text, class
                tokens, registers). A shape (H, W) or (T, H, W), in tokens, stands for an image or a video. Segments of
                :func:`lrpe_md.compose` are also accepted.
            reference: size to which grids are interpolated if their resolution differs from training. Pass one number,
                or one per axis of the shapes or of the scheme, where None skips an axis. Axes that the scheme's own
                rule scales with the size, as in DINOv3, are not interpolated.
            start, length: first token and number of tokens of a shard of the sequence.
            device: device of the result if it is a table.
            options: options of the scheme's grids, such as ``fps`` or ``by``; see ``scheme.doc``.

        Returns:
            a :class:`Grid` if the sequence is a single grid, possibly surrounded by unrotated tokens, or else
            :class:`Coordinates`.

        Raises:
            ValueError: if the scheme does not support a shape or tokens.
            TypeError: if the scheme's grids don't accept an option.
        """
        scheme, parts, number = self.scheme, [], 0
        if options:
            taken = list(inspect.signature(scheme.grid).parameters)[1:]
            for option in options.keys() - set(taken):
                advice = f"leave out {option}, or use a Scheme whose grid function has this argument"
                if option in PRESET_OPTIONS:
                    advice = f"pass it to preset() instead, as in preset(..., {option}={options[option]!r})"
                raise TypeError(
                    f"{option}: expected {join_names(taken or ['no options'], 'or')} for {self.name}'s grids, got "
                    f"{option}={options[option]!r}; {advice}"
                )
        shapes = [tuple(s) for s in segments if isinstance(s, (tuple, list))]
        reference = scheme.reference if reference is None else reference
        for segment in segments:
            if as_integer(segment) is not None:
                if scheme.tokens is None:
                    grid = "" if reference is not None else self._suggest_grid(segments, options)
                    raise ValueError(
                        f"segments: {self.name} has no rule for text tokens, got {segment}; for unrotated tokens, "
                        f'{grid}use a Scheme with tokens=Tokens(0, "skip")'
                    )
                first = scheme.tokens.start if scheme.tokens_start is None else scheme.tokens_start(shapes)
                parts.append(replace(scheme.tokens, length=segment, start=first))
            elif isinstance(segment, (tuple, list)):
                grid = self._place(tuple(segment), options)
                if reference is not None:
                    if not isinstance(grid, Grid):
                        raise ValueError(
                            f"reference: expected None with {self.name}, whose positions come from a table, got "
                            f"{reference}"
                        )
                    grid = grid.interpolate(self._fit_reference(reference, grid, tuple(segment), options))
                if scheme.apart is not None and number:
                    grid = grid.offset([number * by for by in scheme.apart])
                parts.append(After(grid, scheme.after, scheme.advance, scheme.whole) if scheme.after else grid)
                number += 1
            else:
                parts.append(segment)
        scaled = isinstance(self.amplitude, Tensor) or self.amplitude != 1 or self.phase is not None
        order = None
        if scheme.tokens_first:
            order = sorted(range(len(parts)), key=lambda i: not isinstance(parts[i], Tokens))
        whole = _one_grid(parts, scaled)
        if isinstance(whole, Grid):
            return replace(whole, start=start, length=length)
        if whole is not None and (start, length) == (0, None):
            return whole.to(device)
        return compose(*parts, num_axes=self.num_axes, start=start, length=length, order=order, device=device)

    def find_reference(self, reference: Any, shape: tuple[int, ...], **options: Any) -> Any:
        """Return, for each axis of the scheme, the size that :meth:`positions` interpolates to, or None.

        The reference may be for the axes of ``shape``, such as (H, W). Axes that the scheme adds get None, and so do
        axes on which the distance between tokens already depends on the size.
        """
        return self._fit_reference(reference, self._place(shape, options), shape, options)

    def _fit_reference(self, reference: Any, grid: Any, shape: tuple[int, ...], options: Mapping[str, Any]) -> Any:
        """Implement :meth:`find_reference` for a grid of this shape."""
        if isinstance(reference, (tuple, list)) and len(reference) == len(shape) != self.num_axes:
            probe = tuple(range(2, 2 + len(shape)))  # distinct sizes, none of them 1
            placed: Any = self._place(probe, options)
            reference = tuple(reference[probe.index(n)] if n in probe else None for n in placed.shape)
        sizes = (reference,) * self.num_axes if isinstance(reference, int) else reference
        if not isinstance(sizes, (tuple, list)) or len(sizes) != self.num_axes:
            return reference  # not valid for a grid of this scheme, which raises the error
        scale = _read_scale(grid)
        if scale is None:
            return tuple(sizes)
        try:
            doubled = _read_scale(self._place(tuple(2 * n for n in shape), options)) or (1.0,) * self.num_axes
        except ValueError:  # a grid function may limit the size
            return tuple(sizes)
        return tuple(n if a == b else None for n, a, b in zip(sizes, scale, doubled, strict=True))

    def _suggest_grid(self, segments: Sequence[Any], options: Mapping[str, Any]) -> str:
        """Return advice to pass a Grid, or "" if the scheme would not place the same tokens at a grid's indices."""
        others = [i for i, segment in enumerate(segments) if not isinstance(segment, int)]
        if len(others) != 1 or not isinstance(segments[others[0]], (tuple, list)):
            return ""
        shape, first = tuple(segments[others[0]]), others[0]
        if self._place(shape, options) != Grid(shape):
            return ""
        counts = {"prefix": sum(segments[:first]), "suffix": sum(segments[first + 1 :])}
        sides = "".join(f", {name}={count}" for name, count in counts.items() if count)
        return f"pass positions=Grid({shape}{sides}), or "

    def _place(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> Grid | Coordinates:
        """Call the scheme's grid function, and check the result."""
        try:
            grid = self.scheme.grid(shape, **options)
        except (ZeroDivisionError, RuntimeError):
            if 0 not in shape:
                raise
            grid = Grid((0,) * self.num_axes)  # many rules divide by a size, or need the largest position
        except IndexError as error:
            raise ValueError(f"shape: {self.name}'s grid function doesn't support {shape}: {error}") from error
        if not isinstance(grid, (Grid, Coordinates)):
            raise TypeError(
                f"grid: expected a function that returns a Grid or Coordinates, got {type(grid).__name__} from "
                f"{self.name}'s {self.scheme.grid}"
            )
        if grid.num_axes == self.num_axes:
            return grid
        axes = plural(self.num_axes, "axis")
        if len(shape) == self.num_axes:
            raise ValueError(
                f"grid: expected positions with {axes}, like {self.name}'s frequencies, got "
                f"{grid.num_axes} from its grid function for shape {shape}; change the grid function or the frequencies"
            )
        raise ValueError(f"shape: {self.name} expects a shape with {axes}, got {shape}")


def rotated_part(scheme: Scheme, head_dim: int, rotary_dim: int | slice | None) -> slice | None:
    """Return the slice of a head's channels that the map uses, or None if it uses all."""
    part = rotary_dim
    if part is None:
        first, last = (0, 1) if scheme.rotary is None else scheme.rotary
        part = slice(round(first * head_dim), round(last * head_dim))
    step = 2 if scheme.map == "rotate" else 1
    start, width = rotary_slice(part, head_dim, even=step == 2)
    if isinstance(scheme.frequencies, Axial):
        width = step * scheme.frequencies.usable(width // step)
        if not width:
            raise ValueError(f"rotary_dim: expected at least {scheme.frequencies.least * step} channels, got {part}")
    return None if (start, width) == (0, head_dim) else slice(start, start + width)


def make_preset(
    name: str,
    scheme: Scheme,
    head_dim: int,
    num_heads: int,
    *,
    changes: Mapping[str, Any] | None = None,
    rotary_dim: int | slice | None = None,
    seed: int = 0,
) -> Preset:
    """Build a scheme for a head_dim. ``changes`` override fields of the scheme's frequencies."""
    if head_dim < 1 or (scheme.map == "rotate" and head_dim % 2):
        raise ValueError(f"head_dim: expected {'an even' if head_dim > 0 else 'a positive'} number, got {head_dim}")
    frequencies = replace(scheme.frequencies, **(changes or {}))
    part = partial(rotated_part, replace(scheme, frequencies=frequencies), head_dim, rotary_dim)
    rotated = part() if rotary_dim is not None else _fitting(name, head_dim, part)
    width = head_dim if rotated is None else rotated.stop - rotated.start
    channels = width if scheme.map == "cosine" else width // 2
    blocks = None
    with torch.device("cpu"):
        if isinstance(frequencies, Axial):
            laid = channels * num_heads if frequencies.across_heads else channels
            if not frequencies.by_head:
                sections = _fitting(name, head_dim, partial(frequencies.sections, laid))
                warn_of_idle_axes(sections, frequencies.split)
            if scheme.pairs == "blocks":
                blocks = frequencies.blocks(channels)
        build = partial(frequencies.build, channels, num_heads, seed)
        heads_matter = isinstance(frequencies, Axial) and (frequencies.by_head or frequencies.across_heads)
        omega, amplitude = build() if changes or heads_matter else _fitting(name, head_dim, build)
        check_frequencies("frequencies", omega)
    phase = None if scheme.phase is None else (num_heads, channels)
    return Preset(name, scheme, head_dim, num_heads, omega.double(), amplitude, phase, rotated, blocks)


def _read_scale(grid: Any) -> tuple[float, ...] | None:
    """Return the distances between a grid's tokens, or None if the grid's scale is None or a tensor."""
    scale = getattr(grid, "scale", None)
    return None if isinstance(scale, Tensor) else scale


def _fitting(name: str, head_dim: int, make: Callable[[], Any]) -> Any:
    """Call ``make``, and report its errors as errors about head_dim, unless a function of the scheme caused them."""
    try:
        return make()
    except ValueError as error:
        if str(error).startswith(("series: expected a function", "omega: expected a function")):
            raise
        raise ValueError(f"head_dim: {name} doesn't support {head_dim}: {error}") from error


def _one_grid(parts: list[Segment], scaled: bool) -> Grid | Coordinates | None:
    """Return the sequence as a single grid or table with prefix and suffix, or None if this is impossible."""
    grids = [i for i, part in enumerate(parts) if not isinstance(part, Tokens)]
    # A token at position zero is not rotated, but it gets the amplitude and the phase, unlike a prefix.
    rules = ("skip",) if scaled else ("skip", "zero")
    still = all(part.rule in rules for part in parts if isinstance(part, Tokens))
    if len(grids) != 1 or not still:
        return None
    grid = parts[grids[0]]
    grid = grid.grid if isinstance(grid, After) else grid
    if isinstance(grid, Coordinates):
        if grid.coords.ndim != 2:
            return None
    elif not isinstance(grid, Grid) or not grid.whole:
        return None
    before, behind = ([p.length for p in t if isinstance(p, Tokens)] for t in (parts[: grids[0]], parts[grids[0] :]))
    return replace(grid, prefix=grid.prefix + sum(before), suffix=grid.suffix + sum(behind))
