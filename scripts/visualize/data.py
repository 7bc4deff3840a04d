"""The numbers behind the pictures of ``scripts.visualize``: where tokens are, their angles, similarity, wavelengths.

Everything is float64 on the CPU. Shapes: N tokens, the L text tokens in front first, C channels (cosine) or pairs
(rotate), K axes of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lrpe_md import Coordinates, Grid, Tokens, axial_omega, geometric_theta, preset, reference
from lrpe_md.frequencies import mixed_omega
from lrpe_md.frequencies.axial import AXIS_ORDERS, AxisOrder
from lrpe_md.presets import Preset
from lrpe_md.presets.registry import SCHEMES, Axial, Dense, Scheme, find_scheme

MAPS = ("rotate", "cosine")
FREQUENCIES = ("axial", "mixed")
NO_ORDER = "no order"  # of a scheme with one axis, with a direction a channel, or which says all of it
AXES = {1: ("N",), 2: ("H", "W"), 3: ("T", "H", "W"), 4: ("T", "H", "W", "L")}
SHAPES = {1: (64,), 2: (18, 28), 3: (9, 18, 28)}


# --- what is pictured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """A preset or frequencies of one's own, with the variants that it is compared with.

    Attributes:
        preset: positions, pairs, and the frequencies as published.
        frequencies: by axis order, its own first.
        seed: of random directions.
    """

    preset: Preset
    frequencies: Mapping[str, Axial | Dense]
    seed: int

    @property
    def variants(self) -> list[tuple[str, str]]:
        """Maps and axis orders, its own first."""
        own = self.preset.scheme.map
        return [(m, order) for m in (own, *(m for m in MAPS if m != own)) for order in self.frequencies]

    @property
    def base(self) -> float | None:
        """Of the series, None where there is none."""
        return next(iter(self.frequencies.values())).base

    def omega(self, map: str, order: str) -> Tensor:
        """(H or 1, C, K): C = D for cosine, D/2 for rotate."""
        part = self.preset.rotary_dim
        width = self.preset.head_dim if part is None else part.stop - part.start
        channels = width if map == "cosine" else width // 2
        return self.frequencies[order].build(channels, self.preset.num_heads, self.seed)[0]


def published(
    name: str, head_dim: int | None = None, num_heads: int | None = None, base: float | None = None, seed: int = 0
) -> Subject:
    """One of :func:`lrpe_md.list_presets`; None: the original's own."""
    seeded = "seed" in SCHEMES[name].frequencies.takes if name in SCHEMES else False
    heads = num_heads or find_scheme(name)[1].num_heads
    made = preset(name, head_dim, heads, base=base, seed=seed if seeded else None)
    own = made.scheme.frequencies if base is None else replace(made.scheme.frequencies, base=base)
    if isinstance(own, Dense) or own.num_axes == 1 or own.by_head or not isinstance(own.axis_map, str):
        return Subject(made, {NO_ORDER: own}, seed)
    orders = sorted(AXIS_ORDERS, key=lambda order: order != own.axis_order)
    return Subject(made, {order: replace(own, axis_order=order) for order in orders}, seed)


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
    """The frequencies of :class:`lrpe_md.RotateMd` and :class:`lrpe_md.CosineMd`; base: 10000, for "mixed" 10."""
    for name, value, known in (("frequencies", frequencies, FREQUENCIES), ("map", map, MAPS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {known}, got {value!r}")
    if axis_order not in AXIS_ORDERS:
        raise ValueError(f"axis_order: expected one of {AXIS_ORDERS}, got {axis_order!r}")
    if head_dim < 1 or head_dim % 2:
        raise ValueError(f"head_dim: expected an even number, got {head_dim}")
    base = {"axial": 1e4, "mixed": 10.0}[frequencies] if base is None else base
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


def default_shape(made: Preset) -> tuple[int, ...]:
    """A sequence, an image, or a video where the first axis counts frames and not also images or text."""
    scheme = made.scheme
    text_first = scheme.tokens is not None and scheme.tokens.rule == "axis" and scheme.tokens.axis == 0
    if made.num_axes > 2 and (scheme.apart is not None or text_first):
        return SHAPES[2]
    return SHAPES[min(made.num_axes, 3)]


# --- where tokens are ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """Tokens in the order in which they are drawn: the text in front, then the grid row by row.

    Attributes:
        shape: of the grid, (N,), (H, W) or (T, H, W).
        text: L.
        coords: (L + N, K).
        rotated: (L + N,), False for tokens that are not.
        steps: (K,) from one token to the next on the axis of the grid that an axis of positions follows, 0 where it
            follows none (text's own axis, the time of an image).
        sizes: tokens on that axis, 1 where there is none.
    """

    shape: tuple[int, ...]
    text: int
    coords: Tensor
    rotated: Tensor
    steps: Tensor
    sizes: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes of positions."""
        num_axes = self.coords.shape[-1]
        return AXES.get(num_axes, tuple(f"axis {j}" for j in range(num_axes)))

    @property
    def frames(self) -> tuple[int, int, int]:
        """The shape as (T, H, W)."""
        frames, height, width = (1, 1, *self.shape)[-3:]
        return frames, height, width

    @property
    def centre(self) -> tuple[int, ...]:
        return tuple(n // 2 for n in self.shape)

    def index(self, token: Sequence[int]) -> int:
        """Row of a token of the grid, given by its coordinates (h, w), ..

        Raises:
            ValueError: not on the grid.
        """
        if len(token) != len(self.shape) or not all(0 <= i < n for i, n in zip(token, self.shape, strict=True)):
            raise ValueError(f"token: expected coordinates on the grid {self.shape}, from 0, got {tuple(token)}")
        index = 0
        for i, n in zip(token, self.shape, strict=True):
            index = index * n + i
        return self.text + index


def lay_out(
    positions: Callable[..., Grid | Coordinates], shape: Sequence[int], text: int = 0, row_major: bool = True
) -> Layout:
    """Text tokens and a grid, where ``positions(text, shape)`` puts them (:meth:`lrpe_md.Preset.positions`).

    row_major: False for positions that come in another order, in blocks that are merged later: they are put in the
        grid's.
    """
    shape = tuple(shape)
    alone = positions(shape)
    coords, rotated = _table(positions(text, shape) if text else alone)
    if not row_major:
        order = text + _raster(_table(alone)[0], math.prod(shape[:-2]))
        coords, rotated = (torch.cat([t[:text], t[order]]) for t in (coords, rotated))
    table = coords[text:].reshape(*shape, -1)
    steps, sizes = torch.zeros(coords.shape[-1], dtype=torch.float64), [1] * coords.shape[-1]
    for axis, n in enumerate(shape):
        if n > 1:
            step = (table.select(axis, 1) - table.select(axis, 0)).reshape(-1, len(sizes))[0]
            for j in step.nonzero().flatten().tolist():
                steps[j], sizes[j] = step[j], n
    return Layout(shape, text, coords, rotated, steps, tuple(sizes))


def _table(positions: Grid | Coordinates) -> tuple[Tensor, Tensor]:
    """A row a token, and which are rotated."""
    rows = (positions.explicit() if isinstance(positions, Grid) else positions).explicit()
    everywhere = torch.ones(rows.coords.shape[0], dtype=torch.bool)
    return rows.coords.double(), everywhere if rows.rotated is None else rows.rotated


def _raster(coords: Tensor, frames: int) -> Tensor:
    """Indices of the tokens, frame by frame, in the order of their coordinates, the last axis fastest."""
    order = torch.arange(coords.shape[0]).reshape(frames, -1)
    for j in reversed(range(coords.shape[-1])):
        order = order.gather(1, coords[order, j].argsort(dim=1, stable=True))
    return order.flatten()


# --- what the panels show --------------------------------------------------------------------------------------------


def of_head(omega: Tensor, head: int) -> Tensor:
    """omega (H or 1, C, K) → (C, K)."""
    return omega[head if omega.shape[0] > 1 else 0]


def angles(layout: Layout, omega: Tensor) -> Tensor:
    """Θ (N, C) in radians, from omega (C, K); the learned phase of a scheme that has one is taken as zero."""
    return reference.angles(layout.coords, omega[None], rotated=layout.rotated)[0]


def wrap(theta: Tensor) -> Tensor:
    """Θ less whole turns, in [-π, π)."""
    return torch.remainder(theta + math.pi, 2 * math.pi) - math.pi


def similarity(theta: Tensor, token: int) -> Tensor:
    """Mean over the channels of cos(Θ_i − Θ_token): theta (N, C) → (N,).

    What q·k is expected to be, relative to q·k at the same place:

    - rotate: of equal content, where all pairs have the same share of it on average
      (Men et al., arXiv 2405.14591, theorem 1; RoPE's decay, arXiv 2104.09864, section 3.4.3);
    - cosine: each channel weighs x̄_q x̄_k. With x̄ ≥ 0 that is never negative, so this also holds for tokens of
      different content, as long as the channels are alike on average (arXiv 2307.09270, arXiv 2509.10534).
    """
    return (theta - theta[token]).cos().mean(-1)


def wavelengths(layout: Layout, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens a turn: (C, K) on each axis, and (C,) along the channel's own direction; ∞ for no rotation.

    On an axis that the grid does not follow: positions a turn.
    """
    turn = omega.abs() * torch.where(layout.steps == 0, 1.0, layout.steps.abs())
    return 2 * math.pi / turn, 2 * math.pi / (omega * layout.steps).norm(dim=-1)


def aliased(layout: Layout, omega: Tensor) -> bool:
    """Whether a channel (K,) turns by more than half a turn from a token to the next, so that it seems slower."""
    return bool(((omega * layout.steps).abs() > math.pi).any())


def choose_channels(layout: Layout, omega: Tensor, number: int) -> list[int]:
    """``number`` channels of omega (C, K), from the fastest to the slowest on this grid.

    Evenly spaced in the logarithm of the angle that they turn over the grid, down to a quarter of a turn where there
    are slower ones, and the slowest; the axes take turns where several are near. None twice with the same frequencies,
    none that does not turn.
    """
    step = (omega * layout.steps).abs()
    turned = step @ torch.tensor([n - 1.0 for n in layout.sizes], dtype=torch.float64)
    speed, axis = step.norm(dim=-1), step.argmax(-1).tolist()
    distinct = {tuple(row): c for c, row in reversed(list(enumerate(omega.tolist()))) if speed[c] > 0}
    ranked = sorted(distinct.values(), key=lambda c: (-float(speed[c]), -float(turned[c]), c))
    if len(ranked) <= number:
        return ranked
    chosen = [ranked[0], ranked[-1]][:number]
    first, last = math.log(turned[ranked[0]]), math.log(turned[ranked[-1]])
    quarter = math.log(math.pi / 2)
    gap = (quarter - first) / max(number - 2, 1) if last < quarter < first else (last - first) / max(number - 1, 1)
    for i in range(1, number - 1):
        away = {c: abs(math.log(turned[c]) - (first + i * gap)) for c in ranked if c not in chosen}
        near = [c for c in away if away[c] <= max(abs(gap) / 2, min(away.values()))]
        used = [axis[c] for c in chosen]
        chosen.append(min(near, key=lambda c: (used.count(axis[c]), away[c])))
    return sorted(chosen, key=ranked.index)


def choose_frames(layout: Layout, token: Sequence[int], number: int = 3) -> list[int]:
    """Frames that are drawn: the token's, and others evenly over time."""
    frames = layout.frames[0]
    own = token[0] if len(layout.shape) == 3 else 0
    even = [round(i * (frames - 1) / max(number - 1, 1)) for i in range(min(number, frames))]
    nearest = min(range(len(even)), key=lambda i: abs(even[i] - own))
    even[nearest] = own
    return sorted(set(even))


@dataclass(frozen=True, eq=False)
class Picture:
    """Values of all tokens as one image: frames side by side, the text in rows above, NaN between.

    Attributes:
        image: 2-D, NaN where there is no token.
        frames: those that are drawn.
        top: rows above the grid.
        size: (H, W) of a frame.
    """

    image: Tensor
    frames: list[int]
    top: int
    size: tuple[int, int]

    @property
    def left(self) -> list[int]:
        """First column of each frame."""
        return [i * (self.size[1] + GAP) for i in range(len(self.frames))]


GAP = 1


def arrange(layout: Layout, values: Tensor, frames: list[int]) -> Picture:
    """values (N,) of all tokens → the picture of these frames."""
    _, height, width = layout.frames
    across = len(frames) * (width + GAP) - GAP
    rows = -(-layout.text // across)
    top = rows + GAP if rows else 0
    image = torch.full((top + height, across), math.nan, dtype=values.dtype)
    image[:rows].view(-1)[: layout.text] = values[: layout.text]
    grid = values[layout.text :].reshape(layout.frames)
    picture = Picture(image, frames, top, (height, width))
    for left, frame in zip(picture.left, frames, strict=True):
        image[top:, left : left + width] = grid[frame]
    return picture


def cut(layout: Layout, values: Tensor, token: Sequence[int], axis: int) -> tuple[Tensor, Tensor]:
    """values (N,) through a token along an axis of the grid: distances in tokens, and values."""
    grid = values[layout.text :].reshape(layout.shape)
    line = grid[tuple(slice(None) if a == axis else i for a, i in enumerate(token))]
    return torch.arange(layout.shape[axis]) - token[axis], line
