"""Functions that schemes refer to by name, for series, dense frequencies and grids.

``FUNCTIONS`` maps names to functions. A scheme's dict contains the names, so you can write the dict as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from ..frequencies import scalings
from ..frequencies.dense import dense_omega, mixed_omega, plane_directions
from ..frequencies.series import geometric_theta, head_bands_theta, log_linspace_theta, period_theta
from ..positions.coordinates import Coordinates, larger, smaller
from ..positions.grid import Grid, window_order

__all__ = ["FUNCTIONS"]

Shape = tuple[int, ...]

# --- series: (number, base, heads) → theta ---------------------------------------------------------------


def geometric(num: int, base: float, heads: int) -> Tensor:
    return geometric_theta(num, base)


def periods(num: int, base: float, heads: int) -> Tensor:
    return period_theta(1 / geometric_theta(num, base))


def head_bands(num: int, base: float, heads: int) -> Tensor:
    return head_bands_theta(num, heads, base**2)


def quarter_turn(num: int, base: None, heads: int) -> Tensor:
    return torch.full((num,), math.pi / 2, dtype=torch.float64)


def rising(num: int, base: float, heads: int) -> Tensor:
    """Return frequencies rising from π/2 to ``base`` · π/2."""
    return log_linspace_theta(num, math.pi / 2, base * math.pi / 2)


# --- dense frequencies: (channels, heads, base, generator) → omega ---------------------------------------


def random_plane(channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
    """Return dense frequencies with one random angle U(0, 2π) per head, relative to the column axis."""
    angles = 2 * math.pi * torch.rand(heads, dtype=torch.float64, generator=generator)
    theta = geometric_theta(-(-channels // 2), base).repeat(2)[:channels]
    return dense_omega(theta, plane_directions(channels, angles).flip(-1))


def random_frames(channels: int, heads: int, base: float, generator: torch.Generator) -> Tensor:
    return mixed_omega(channels, 3, heads, base=base, generator=generator)


# --- scalings in addition to frequencies/scalings.py -----------------------------------------------------


def no_turn(theta: Tensor) -> tuple[Tensor, float]:
    """Set θ to 0, so that the axis does not encode position (HoPE)."""
    return torch.zeros_like(theta), 1.0


# --- grids: (shape, **options) → positions ---------------------------------------------------------------


def frames(shape: Shape) -> Shape:
    """Return a video's shape unchanged, and turn an image (H, W) into a video of one frame."""
    return (1, *shape) if len(shape) == 2 else shape


def plain(shape: Shape) -> Grid:
    return Grid(shape)


def video(shape: Shape) -> Grid:
    return Grid(frames(shape))


def sequence(shape: Shape) -> Grid:
    """Place all tokens of a grid on a single axis."""
    return Grid((math.prod(shape),))


def merged_video(shape: Shape, merge: int = 2) -> Coordinates:
    shape = frames(shape)
    if shape[1] % merge or shape[2] % merge:
        raise ValueError(f"shape: expected height and width to be multiples of {merge}, got {shape[1:]}")
    return Grid(shape).take(window_order(shape, (1, merge, merge)))


def merged(shape: Shape, merge: int = 2) -> Coordinates:
    return merged_video(shape, merge).select((1, 2))


def layered(shape: Shape) -> Grid:
    return Grid((*frames(shape), 1))


def counted(shape: Shape, offset: float = 1) -> Grid:
    return Grid(shape).offset(offset)


def centred(shape: Shape) -> Grid:
    return video(shape).centre((1, 2), whole=True)


def cells(shape: Shape, by: Literal["axis", "shorter", "longer"] = "axis") -> Grid:
    return Grid(shape).cells(by)


def crop(shape: Shape, size: tuple[int, int] | None = (30, 45)) -> Grid:
    """Place tokens in the middle of the training grid, in the largest crop with this grid's aspect ratio."""
    num, height, width = shape = frames(shape)
    if size is None:
        return Grid(shape)
    # A branch on the aspect ratio would be fixed in an exported program.
    rows = smaller(size[0], round(size[1] / width * height))
    columns = smaller(size[1], round(size[0] / height * width))
    top, left = round((size[0] - rows) / 2), round((size[1] - columns) / 2)
    return Grid(shape).crop((0, top, left), (num, top + rows, left + columns))


def same_area(shape: Shape, area: float = 192 * 192) -> Grid:
    shape = frames(shape)
    scale = (area / (shape[1] * shape[2])) ** 0.5
    return Grid(shape).centre((1, 2)).rescale((1, scale, scale))


def seconds(shape: Shape, fps: float | None = None, base_fps: float = 24) -> Grid:
    return video(shape).rescale((1 if fps is None else base_fps / fps, 1, 1))


def portion(shape: Shape, longest: int | None = None) -> Grid:
    """Place index i at (i + 1) / M, where M is ``longest`` or the size of the grid."""
    return Grid(shape).offset(1).rescale(1 / (longest or shape[0]))


def rounded_down(shape: Shape, size: int = 256) -> Coordinates:
    """Place index i of an axis of length n at i · size // n."""
    return Grid(shape).interpolate(size).floor()


def divided(shape: Shape, by: Sequence[float] = (1, 1, 1)) -> Grid:
    return video(shape).rescale([1 / factor for factor in by])


def two_apart(shape: Shape, skip: int = 8) -> Grid:
    """Place two frames ``skip`` - 1 apart, and any other number of frames one apart."""
    shape = frames(shape)
    is_two = larger(0, 1 - (shape[0] - 2) ** 2)  # 1 or 0; a branch would be fixed in an exported program
    return Grid(shape).rescale((1 + (skip - 2) * is_two, 1, 1))


def strided(shape: Shape, stride: float = 1) -> Grid:
    """Place successive frames ``stride`` apart."""
    return video(shape).rescale((stride, 1, 1))


def scaled(shape: Shape, scale: Sequence[float] = (1, 1, 1)) -> Grid:
    return video(shape).rescale(scale)


def whole_seconds(shape: Shape, interval: float = 1, rate: float = 25) -> Grid | Coordinates:
    """Place frame i at t = ⌊i · interval · rate⌋, with ``interval`` in seconds and ``rate`` in positions per second."""
    grid = video(shape).rescale((interval * rate, 1, 1))
    return grid if float(interval * rate).is_integer() else grid.floor()


def diagonal(shape: Shape, stride: float = 2) -> Coordinates:
    """Shift frames along the diagonal, so that h and w are centred at the frame's position t."""
    shape = frames(shape)
    grid = Grid(shape).rescale((stride, 1, 1)).offset((0, -((shape[1] - 1) // 2), -((shape[2] - 1) // 2)))
    coords = grid.coordinates()
    return Coordinates(torch.cat([coords[:, :1], coords[:, 1:] + coords[:, :1]], dim=-1))


def flattened(shape: Shape, stride: float = 16) -> Grid:
    """Place all tokens of an image evenly within ``stride`` positions, with the last token at the end."""
    num = math.prod(shape)
    return Grid((num,)).offset(1).rescale(stride / num).offset(-1)


def circle(shape: Shape, radius: float = 10, alpha: float = 0.5, mix: float = 0, stride: float = 1) -> Coordinates:
    """Place tokens on a circle perpendicular to the diagonal of the axes.

    A token's angle on the circle is a mixture of its angle around the middle of the image (with weight ``alpha``) and
    its index. ``mix`` is the weight of the plain grid position, relative to the circle. ``stride`` is the offset along
    the diagonal from one frame to the next.
    """
    num, height, width = frames(shape)
    across = Grid((height, width)).centre().coordinates()
    y, x = across.unbind(-1)
    angle = torch.atan2(y, x)
    span = angle.max() - angle.min()
    even = torch.arange(height * width, dtype=torch.float64, device="cpu") / (height * width)
    turn = 2 * math.pi * torch.where(span > 0, alpha * (angle - angle.min()) / span, alpha * angle / (2 * math.pi))
    turn = turn + 2 * math.pi * (1 - alpha) * even
    a = (1 - mix) * radius * turn.cos() + mix * x
    b = (1 - mix) * radius * turn.sin() + mix * y
    plane = torch.stack([2 * b / 6**0.5, a / 2**0.5 - b / 6**0.5, -a / 2**0.5 - b / 6**0.5], dim=-1)
    steps = stride * torch.arange(num, dtype=torch.float64, device="cpu")
    return Coordinates((plane + steps[:, None, None]).flatten(0, 1))


def _of_trained(positions: Grid | Coordinates, sizes: Sequence[float]) -> Any:
    """Rescale positions so that the training size covers [-1, 1]."""
    return positions.rescale([2 / size for size in sizes]).offset(-1)


def of_trained_video(
    shape: Shape,
    fps: float = 25,
    steps: Sequence[float] = (8, 32, 32),
    trained: Sequence[float] = (20, 2048, 2048),
) -> Grid:
    """Return the start of each latent in seconds and pixels, rescaled so that the training size covers [-1, 1]."""
    return _of_trained(video(shape).rescale((steps[0] / fps, *steps[1:])), trained)


def causal_video(
    shape: Shape,
    fps: float = 24,
    steps: Sequence[float] = (8, 32, 32),
    trained: Sequence[float] = (20, 2048, 2048),
) -> Coordinates:
    """Like :func:`of_trained_video`, but return the middle of each latent. The first latent is a single frame."""
    middle = video(shape).offset((0, 0.5, 0.5)).rescale(steps).offset((1 - steps[0] / 2, 0, 0))
    return _of_trained(middle.clamp((0.5, None, None)).rescale((1 / fps, 1, 1)), trained)


def causal_audio(shape: Shape, step: float = 4, rate: float = 100, trained: float = 20) -> Coordinates:
    """Return the time at the middle of each audio latent. A latent spans ``step`` frames of 1 / ``rate`` seconds."""
    middle = sequence(shape).rescale(step).offset(1 - step / 2)
    return _of_trained(middle.clamp(0.5).rescale(1 / rate), (trained,))


def causal_time(shape: Shape, fps: float = 24) -> Coordinates:
    """Return only the times of the audio latents if the shape has one axis, or else of the video latents."""
    return causal_audio(shape) if len(shape) == 1 else causal_video(shape, fps).select((0,))


# --- start positions of tokens outside the grids: shapes of the grids → position -----------------------------------


def behind_centred(shapes: list[Shape]) -> float:
    halves: Any = [n // 2 for shape in shapes for n in shape[-2:]]
    return reduce(larger, halves) if halves else 0


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        geometric, periods, head_bands, quarter_turn, rising, random_plane, random_frames, no_turn,
        plain, video, sequence, merged, merged_video, layered, counted, centred, cells, crop, same_area, seconds,
        portion, rounded_down, divided, two_apart, strided, scaled, whole_seconds, diagonal, flattened, circle,
        of_trained_video, causal_video, causal_audio, causal_time, behind_centred,
        *(getattr(scalings, name) for name in scalings.__all__),
    )
}  # fmt: skip
