"""Data for the plots of :func:`lrpe_md.show`, such as token positions, angles, similarity and wavelengths.

All tensors are float64 on the CPU. In shapes, L text tokens precede N grid tokens, C is the number of channels (cosine)
or pairs (rotate), and K is the number of position axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .. import reference
from ..frequencies.axial import AXIS_ORDERS
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..presets.registry import find_scheme, preset
from ..presets.scheme import Axial, Dense, Preset, Scheme

# Panels of a figure, in drawing order. "variants" is the similarity for the other map and axis order.
PANELS = ("angles", "similarity", "variants", "slices", "wavelengths")
MIN_WIDTH, MAX_WIDTH = 3.0, 100.0  # of a figure, in inches
MAPS = ("rotate", "cosine")
NO_ORDER = "no order"  # for schemes with a single axis, one direction per channel, or a fixed layout
AXES = {1: ("N",), 2: ("H", "W"), 3: ("T", "H", "W"), 4: ("T", "H", "W", "L")}
SHAPES = {1: (64,), 2: (18, 28), 3: (9, 18, 28)}
CHUNK = 1 << 16  # tokens whose angles are in memory at once


# --- subjects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """A preset or custom frequencies to draw, with the variants to compare.

    Attributes:
        preset: preset that defines positions, pairs and frequencies.
        frequencies: frequencies for each axis order, with the subject's own order first. The dict is empty for a module
            or a tensor, because their ω can't be rebuilt for a different map or order.
        seed: seed of random directions.
        notes: parts of the encoding that the figure leaves out, for the title.
    """

    preset: Preset
    frequencies: Mapping[str, Axial | Dense]
    seed: int
    notes: tuple[str, ...] = ()

    @cached_property
    def variants(self) -> list[tuple[str, str]]:
        """Pairs (map, axis order) for which the frequencies can be built, starting with the subject's own pair."""
        own = self.preset.scheme.map
        if not self.frequencies:
            return [(own, NO_ORDER)]
        others = [(m, order) for m in MAPS if m != own for order in self.frequencies]
        return [*((own, order) for order in self.frequencies), *(v for v in others if self._can_build(*v))]

    def _can_build(self, map: str, order: str) -> bool:
        try:
            self.omega(map, order)
        except Exception:  # a user's function may raise any exception for a different number of channels
            return False
        return True

    @property
    def base(self) -> float | None:
        """Base of the frequency series, or None if there is none."""
        return next((each.base for each in self.frequencies.values()), None)

    @property
    def is_base_used(self) -> bool:
        """Return whether the frequencies depend on the base, which a user's function may ignore."""
        if self.base is None:
            return False
        order, own = next(iter(self.frequencies.items()))
        other = replace(self, frequencies={order: replace(own, base=2 * self.base + 1)})
        variant = (self.preset.scheme.map, order)
        try:
            return not torch.equal(self.omega(*variant), other.omega(*variant))
        except Exception:  # a user's function may raise any exception for a different base
            return True

    @property
    def rotated_channels(self) -> int:
        """Number of channels per head that the map uses."""
        part = self.preset.rotary_dim
        return self.preset.head_dim if part is None else part.stop - part.start

    def build(self, map: str, order: str) -> tuple[Tensor, float | Tensor]:
        """Build omega (H or 1, C, K) and the amplitude, a number or (C,).

        C is the number of rotated channels for cosine, and half that number for rotate.
        """
        if not self.frequencies:
            return self.preset.omega, self.preset.amplitude
        channels = self.rotated_channels // (1 if map == "cosine" else 2)
        omega, amplitude = self.frequencies[order].build(channels, self.preset.num_heads, self.seed)
        return omega.double(), amplitude

    def omega(self, map: str, order: str) -> Tensor:
        return self.build(map, order)[0]

    def similarity(self, layout: TokenLayout, variant: tuple[str, str], head: int, token: int) -> Tensor:
        """Return the :func:`similarity` (N,) to the token with this index, for a variant and a head."""
        omega, amplitude = self.build(*variant)
        # In the rotate map, a pair counts as one channel of omega.
        rest = (self.preset.head_dim - self.rotated_channels) / (1 if variant[0] == "cosine" else 2)
        return similarity(layout, of_head(omega, head), token, amplitude, rest)


def published(
    scheme: str | Scheme,
    head_dim: int | None = None,
    num_heads: int | None = None,
    base: float | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Subject:
    """Return the subject for a scheme, or for a name from :func:`lrpe_md.list_presets`.

    The sizes and the base default to the scheme's. ``name``, the title of the figure, defaults to the scheme's name.
    """
    found, described = find_scheme(scheme)
    seeded = "seed" in described.frequencies.takes
    made = preset(scheme, head_dim, num_heads or described.num_heads, base=base, seed=seed if seeded else None)
    made = replace(made, name=name or found)
    own = made.scheme.frequencies if base is None else replace(made.scheme.frequencies, base=base)
    if isinstance(own, Dense) or own.num_axes == 1 or own.by_head or not isinstance(own.axis_map, str):
        return Subject(made, {NO_ORDER: own}, seed)
    orders = sorted(AXIS_ORDERS, key=lambda order: order != own.axis_order)
    return Subject(made, {order: replace(own, axis_order=order) for order in orders}, seed)


def default_shape(made: Preset) -> tuple[int, ...]:
    """Return the grid shape to draw by default.

    The shape has one axis for each axis of the positions. However, if the first axis also counts text or images, the
    shape of an image is used. If the scheme does not accept this shape, a different default shape is returned.

    Raises:
        ValueError: if the scheme accepts none of the default shapes. The message says why the scheme rejects the first
            default shape.
    """
    scheme = made.scheme
    text_first = scheme.tokens is not None and scheme.tokens.rule == "axis" and scheme.tokens.axis == 0
    is_video = made.num_axes > 2 and (scheme.apart is not None or text_first)
    first = 2 if is_video else min(made.num_axes, 3)
    errors = []
    for number in sorted(SHAPES, key=lambda n: abs(n - first)):
        try:
            made.positions(SHAPES[number])
        except ValueError as error:
            errors.append(error)
            continue
        return SHAPES[number]
    raise ValueError(
        f"shape: {made.name} supports none of the default shapes {tuple(SHAPES.values())}; pass a different shape. For "
        f"{SHAPES[first]}: {errors[0]}"
    ) from errors[0]


# --- positions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Tokens in drawing order, with the text before the grid's rows.

    Attributes:
        shape: shape of the grid, (N,), (H, W) or (T, H, W).
        text: number of text tokens L.
        coords: positions (L + N, K).
        rotated: mask (L + N,), which is False for tokens that are not rotated.
        steps: mean distance (K,) between neighbouring tokens along the grid axis that each position axis follows. The
            distance is 0 for a position axis that follows no grid axis, such as time in an image.
        sizes: number of tokens on the grid axis that each position axis follows, or 1 if it follows none.
        grid_axes: grid axes along which each position axis changes. A position axis follows the last of these grid
            axes.
    """

    shape: tuple[int, ...]
    text: int
    coords: Tensor
    rotated: Tensor
    steps: Tensor
    sizes: tuple[int, ...]
    grid_axes: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the position axes."""
        num_axes = self.coords.shape[-1]
        return AXES.get(num_axes, tuple(f"axis {j}" for j in range(num_axes)))

    def borrowed_axis(self, j: int) -> str | None:
        """Return the grid axis that position axis ``j`` follows, or None.

        None means that position axis ``j`` changes along at most one grid axis, or follows an axis of the same name.
        """
        grid, on = AXES[len(self.shape)], self.grid_axes[j]
        return grid[on[-1]] if len(on) > 1 and grid[on[-1]] != self.names[j] else None

    @property
    def frames(self) -> tuple[int, int, int]:
        """Grid shape as (T, H, W)."""
        frames, height, width = (1, 1, *self.shape)[-3:]
        return frames, height, width

    @property
    def centre(self) -> tuple[int, ...]:
        return tuple(n // 2 for n in self.shape)

    def index(self, token: Sequence[int]) -> int:
        """Return the index of the grid token with the given coordinates, such as (h, w).

        Raises:
            ValueError: if the token is not on the grid.
        """
        if len(token) != len(self.shape) or not all(0 <= i < n for i, n in zip(token, self.shape, strict=True)):
            raise ValueError(f"token: expected coordinates on the grid {self.shape}, starting at 0, got {tuple(token)}")
        index = 0
        for i, n in zip(token, self.shape, strict=True):
            index = index * n + i
        return self.text + index


def lay_out_tokens(
    positions: Callable[..., Grid | Coordinates], shape: Sequence[int], text: int = 0, row_major: bool = True
) -> TokenLayout:
    """Lay out text tokens and a grid at the positions that ``positions(text, shape)`` returns.

    row_major: whether the positions are in row-major order. If False, for example because patches are merged later,
    tokens are sorted into row-major order.
    """
    shape = tuple(shape)
    alone = positions(shape)
    coords, rotated = _table(positions(text, shape) if text else alone)
    if not row_major:
        order = text + _raster(_table(alone)[0], math.prod(shape[:-2]))
        coords, rotated = (torch.cat([t[:text], t[order]]) for t in (coords, rotated))
    table = coords[text:].reshape(*shape, -1)
    steps, sizes = torch.zeros(coords.shape[-1], dtype=torch.float64), [1] * coords.shape[-1]
    grid_axes: list[tuple[int, ...]] = [()] * len(sizes)
    for axis, n in enumerate(shape):
        if n > 1:
            step = table.diff(dim=axis).abs().flatten(0, -2).mean(0)
            for j in step.nonzero().flatten().tolist():
                steps[j], sizes[j], grid_axes[j] = step[j], n, (*grid_axes[j], axis)
    return TokenLayout(shape, text, coords, rotated, steps, tuple(sizes), tuple(grid_axes))


def _table(positions: Grid | Coordinates) -> tuple[Tensor, Tensor]:
    """Return one row of positions per token, and a mask of the rotated tokens."""
    rows = (positions.explicit() if isinstance(positions, Grid) else positions).explicit()
    everywhere = torch.ones(rows.coords.shape[0], dtype=torch.bool)
    return rows.coords.double(), everywhere if rows.rotated is None else rows.rotated


def _raster(coords: Tensor, frames: int) -> Tensor:
    """Return the indices that sort the tokens of each frame into row-major order."""
    order = torch.arange(coords.shape[0]).reshape(frames, -1)
    for j in reversed(range(coords.shape[-1])):
        order = order.gather(1, coords[order, j].argsort(dim=1, stable=True))
    return order.flatten()


# --- values in the panels --------------------------------------------------------------------------------------------


def of_head(omega: Tensor, head: int) -> Tensor:
    """Select the omega (C, K) of a head from omega (H or 1, C, K)."""
    return omega[head if omega.shape[0] > 1 else 0]


def token_angles(layout: TokenLayout, omega: Tensor, tokens: slice = slice(None)) -> Tensor:
    """Compute Θ (N, C) in radians from omega (C, K), ignoring learned phases."""
    return reference.angles(layout.coords[tokens], omega[None], rotated=layout.rotated[tokens])[0]


def wrap(theta: Tensor) -> Tensor:
    """Wrap angles to [-π, π)."""
    return torch.remainder(theta + math.pi, 2 * math.pi) - math.pi


def similarity(
    layout: TokenLayout, omega: Tensor, token: int, amplitude: float | Tensor = 1.0, unrotated: float = 0.0
) -> Tensor:
    """Return the q·k (N,) of all tokens with one token, divided by the q·k of this token with itself.

    Each channel of omega (C, K) contributes cos(Θ_i − Θ_token), multiplied by the amplitudes of both tokens. Each
    unrotated channel contributes 1. Without unrotated channels, and with an amplitude of 1, the result is the mean of
    the cosines.

    This is the expected q·k under assumptions that depend on the map:

    - rotate: q and k have the same content, which contributes equally to all pairs on average (Men et al., arXiv
      2405.14591, theorem 1; RoPE's decay, arXiv 2104.09864, section 3.4.3).
    - cosine: each channel has the weight x̄_q x̄_k, which is never negative if x̄ ≥ 0. The result is also valid for
      tokens with different content if all channels have similar averages (arXiv 2307.09270, arXiv 2509.10534).
    """
    gain = torch.as_tensor(amplitude, dtype=torch.float64).expand(omega.shape[:1])
    own = gain if layout.rotated[token] else torch.ones_like(gain)
    here = token_angles(layout, omega, slice(token, token + 1))
    scores = []
    for first in range(0, len(layout.coords), CHUNK):
        tokens = slice(first, first + CHUNK)
        weight = torch.where(layout.rotated[tokens, None], gain, 1.0) * own
        scores.append((weight * (token_angles(layout, omega, tokens) - here).cos()).sum(-1) + unrotated)
    return torch.cat(scores) / (own.square().sum() + unrotated)


def wavelengths(layout: TokenLayout, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of tokens per turn on each axis (C, K), and along each channel's own direction (C,).

    The number is infinite if the channel does not rotate. On a position axis that follows no grid axis, positions are
    counted instead of tokens.
    """
    turn = omega.abs() * torch.where(layout.steps == 0, 1.0, layout.steps)
    return 2 * math.pi / turn, 2 * math.pi / (omega * layout.steps).norm(dim=-1)


def aliased(layout: TokenLayout, omega: Tensor) -> bool:
    """Return whether a channel with omega (K,) makes more than half a turn per token and so looks slower than it is."""
    return bool(((omega * layout.steps).abs() > math.pi).any())


def choose_channels(layout: TokenLayout, omega: Tensor, number: int) -> list[int]:
    """Choose ``number`` channels of omega (C, K), from the fastest to the slowest on this grid.

    First, each axis gets the channel whose wavelength is closest to the size of the axis, starting with the longest
    axis. The other channels are chosen so that the logarithms of their angles over the grid are spread widely, and so
    that axes alternate if possible. Channels that make less than a quarter of a turn are only added, fastest first,
    when no other channels are left. All chosen channels rotate, and no two have the same frequencies.
    """
    step = (omega * layout.steps).abs()
    angle = step @ torch.tensor([n - 1.0 for n in layout.sizes], dtype=torch.float64)
    speed, axis = step.norm(dim=-1), step.argmax(-1).tolist()
    distinct = {tuple(row): c for c, row in reversed(list(enumerate(omega.tolist()))) if speed[c] > 0}
    ranked = sorted(distinct.values(), key=lambda c: (-float(speed[c]), -float(angle[c]), c))
    turned = {c: math.log(angle[c]) for c in ranked}
    chosen: list[int] = []
    for j in sorted(set(axis), key=lambda j: -layout.sizes[j]):
        size = 2 * math.pi / layout.sizes[j]
        nearest = sorted((c for c in ranked if axis[c] == j), key=lambda c: abs(math.log(speed[c] / size)))
        chosen += nearest[:1]
    chosen = chosen[:number]
    rest = [c for c in ranked if c not in chosen]
    while rest and len(chosen) < number:
        fast = [c for c in rest if turned[c] >= math.log(math.pi / 2)] or rest[:1]
        away = {c: min((abs(turned[c] - turned[other]) for other in chosen), default=0.0) for c in fast}
        far = [c for c in fast if away[c] >= 0.8 * max(away.values())]
        used = [axis[c] for c in chosen]
        chosen.append(min(far, key=lambda c: (used.count(axis[c]), -away[c])))
        rest.remove(chosen[-1])
    return sorted(chosen, key=ranked.index)


def choose_frames(layout: TokenLayout, token: Sequence[int], number: int = 3) -> list[int]:
    """Choose the frames to draw, including the token's own frame and others evenly spaced over time.

    The token's frame replaces the nearest evenly spaced frame. On a tie, the first and last frames are kept.
    """
    frames = layout.frames[0]
    own = token[0] if len(layout.shape) == 3 else 0
    even = [round(i * (frames - 1) / max(number - 1, 1)) for i in range(min(number, frames))]
    nearest = min(range(len(even)), key=lambda i: (abs(even[i] - own), i in (0, len(even) - 1)))
    even[nearest] = own
    return sorted(set(even))


@dataclass(frozen=True, eq=False)
class Picture:
    """Values of all tokens as one image, with frames side by side, text in rows above the frames, and NaN in the gaps.

    Attributes:
        image: array (rows, columns), which is NaN where there is no token.
        frames: indices of the drawn frames.
        top: number of rows above the frames.
        size: size (H, W) of a frame.
    """

    image: Tensor
    frames: list[int]
    top: int
    size: tuple[int, int]

    @property
    def first_columns(self) -> list[int]:
        """Return the index of each frame's first column."""
        return [i * (self.size[1] + GAP) for i in range(len(self.frames))]


GAP = 1


def arrange_frames(layout: TokenLayout, values: Tensor, frames: list[int]) -> Picture:
    """Arrange the values of all tokens in a picture of the given frames."""
    _, height, width = layout.frames
    across = len(frames) * (width + GAP) - GAP
    rows = -(-layout.text // across)
    top = rows + GAP if rows else 0
    image = torch.full((top + height, across), math.nan, dtype=values.dtype)
    image[:rows].view(-1)[: layout.text] = values[: layout.text]
    grid = values[layout.text :].reshape(layout.frames)
    picture = Picture(image, frames, top, (height, width))
    for left, frame in zip(picture.first_columns, frames, strict=True):
        image[top:, left : left + width] = grid[frame]
    return picture


def slice_through(layout: TokenLayout, values: Tensor, token: Sequence[int], axis: int) -> tuple[Tensor, Tensor]:
    """Return distances from a token along a grid axis, in tokens, and the values at these distances."""
    grid = values[layout.text :].reshape(layout.shape)
    line = grid[tuple(slice(None) if a == axis else i for a, i in enumerate(token))]
    return torch.arange(layout.shape[axis]) - token[axis], line
