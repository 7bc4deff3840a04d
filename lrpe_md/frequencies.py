"""How fast each channel turns: from theta to omega.

``omega`` (H or 1, C, K) holds one frequency for each head, channel (or pair) and axis, in radians a unit of
position. An axial scheme is an omega with zeros, a mixed one is dense. Everything here is float64 unless asked
otherwise, and differentiable where it takes a tensor.

theta is a series of frequencies, edited where a model is stretched (:mod:`lrpe_md.scalings`), and laid over the
channels: one axis a channel (:func:`axial_omega`), or a direction a channel (:func:`dense_omega`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "AXIS_MAPS", "AXIS_ORDERS", "AxisMap", "AxisOrder", "axial_omega", "dense_omega", "geometric_theta",
    "golden_directions", "head_bands_theta", "log_linspace_theta", "mixed_omega", "period_theta", "plane_directions",
    "random_directions", "sequence_omega", "simplex_directions", "split_channels",
]  # fmt: skip

AxisOrder = Literal["minor_first", "major_first"]
AXIS_ORDERS = ("minor_first", "major_first")
AxisMap = Literal["block", "alternate", "chunk", "stride", "even_odd"]


# --- series ----------------------------------------------------------------------------------------------


def geometric_theta(
    num: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """``base ** (-i / num)`` for i < num: RoPE's geometric series (arXiv 2104.09864), shape (num,)."""
    if num < 1:
        raise ValueError(f"num: expected at least one frequency, got {num}")
    if not base > 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    return (base ** (-torch.arange(num, dtype=torch.float64, device=device) / num)).to(dtype)


def log_linspace_theta(num: int, first: float, last: float, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """``num`` frequencies from ``first`` to ``last``, both included, evenly spaced in their logarithm: (num,).

    DINOv3 with the periods p to P is ``log_linspace_theta(num, 2π / p, 2π / P)``.
    """
    if num < 1:
        raise ValueError(f"num: expected at least one frequency, got {num}")
    if not (first > 0 and last > 0):
        raise ValueError(f"first, last: expected positive numbers, got {first}, {last}")
    steps = torch.linspace(math.log(first), math.log(last), num, dtype=torch.float64)
    return steps.exp().to(dtype)


def period_theta(periods: Tensor) -> Tensor:
    """Frequencies 2π / periods, for series that are given as wavelengths; any shape, differentiable."""
    return 2 * math.pi / periods


def head_bands_theta(num: int, num_heads: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """One geometric series over all heads, a band a head: (num_heads, num), head 0 the fastest.

    TransNormer's LRPE (arXiv 2307.14995) is ``head_bands_theta(head_dim, num_heads, base=1e4 ** 2)``.
    """
    return geometric_theta(num_heads * num, base, dtype=dtype).reshape(num_heads, num)


# --- one axis a channel ----------------------------------------------------------------------------------


def _owned(owners: list[int], num: int) -> list[list[int]]:
    return [[c for c, owner in enumerate(owners) if owner == b] for b in range(num)]


def _turns(widths: Sequence[int]) -> list[list[int]]:
    return _owned([b for i in range(max(widths)) for b in range(len(widths)) if i < widths[b]], len(widths))


def _strides(widths: Sequence[int], num_channels: int) -> list[list[int]]:
    k = len(widths)
    return _owned([c % k if c < k * widths[c % k] else 0 for c in range(num_channels)], k)


# From the widths of the axes, in their order, and C: the members that each takes of its series, and the channels where
# they go, None for a block an axis.
_Places = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]
_PLACES: dict[str, Callable[[Sequence[int], int], _Places]] = {
    "block": lambda w, c: ([range(n) for n in w], None),
    "alternate": lambda w, c: ([range(n) for n in w], _turns(w)),
    "chunk": lambda w, c: ([range(sum(w[:b]), sum(w[: b + 1])) for b in range(len(w))], None),
    "stride": lambda w, c: (_strides(w, c), _strides(w, c)),
    "even_odd": lambda w, c: ([range(b, b + len(w) * n, len(w)) for b, n in enumerate(w)], None),
}
AXIS_MAPS = tuple(_PLACES)


def split_channels(num_channels: int, shares: Sequence[int], *, remainder: int | None = None) -> tuple[int, ...]:
    """Channels (or pairs) of each axis, in proportion to ``shares``.

    Args:
        num_channels: what is shared out.
        shares: one whole number an axis: (2, 3, 3) gives the first axis two eighths.
        remainder: the axis that takes what is left over; None: nothing may be.

    Raises:
        ValueError: the shares don't divide ``num_channels`` and no axis takes the remainder.
    """
    total = sum(shares)
    if total < 1 or min(shares) < 0:
        raise ValueError(f"shares: expected whole numbers of at least 0, not all 0, got {tuple(shares)}")
    parts = [num_channels // total * share for share in shares]
    left = num_channels - sum(parts)
    if left and remainder is None:
        raise ValueError(
            f"num_channels: expected a multiple of {total}, to be shared {' : '.join(map(str, shares))}, "
            f"got {num_channels}; or name the axis that takes the remainder"
        )
    if remainder is not None:
        parts[remainder] += left
    return tuple(parts)


def axial_omega(
    theta: Tensor | Sequence[Tensor],
    num_channels: int,
    num_axes: int,
    *,
    axis_order: AxisOrder = "minor_first",
    axis_map: AxisMap = "block",
    sections: Sequence[int] | None = None,
) -> Tensor:
    """Lay theta over the channels, one axis a channel; by default in blocks: concat(s_1 θ, .., s_k θ)[:d].

    Args:
        theta: (E,) or (H, E), shared by the axes. Or one tensor for each axis, slowest axis first like
            ``Grid.shape``.
        num_channels: C: head_dim for cosine, half the rotated width for rotate.
        num_axes: K.
        axis_order: which axis is first. ``"minor_first"``: the fastest (W), the order of the LRPE document;
            ``"major_first"``: the slowest (T), as in most vision models.
        axis_map: how the axes share the channels.

            - ``"block"``: a block an axis, each from the start of its series;
            - ``"alternate"``: the axes take turns, each from the start of its series;
            - ``"chunk"``: one series over all channels, cut into a section an axis (Qwen2-VL);
            - ``"stride"``: one series, channel c to the (c mod K)-th axis until that has its section, and from
              there to the first (Qwen3-VL); the first axis's section is not used;
            - ``"even_odd"``: one series dealt out to the axes, a block an axis (Pixtral for K = 2).
        sections: channels of each axis, slowest axis first; channels beyond their sum stay unrotated. Default:
            all of theta for each axis, cut where it passes C (block), equal sections, the first axis taking the
            remainder (the others).

    Returns:
        omega (H or 1, C, K), with theta's dtype and device; differentiable with respect to theta.

    Raises:
        ValueError: theta has fewer members than the map takes, sections that pass C, an unknown name.
    """
    if axis_order not in AXIS_ORDERS:
        raise ValueError(f"axis_order: expected one of {AXIS_ORDERS}, got {axis_order!r}")
    if axis_map not in AXIS_MAPS:
        raise ValueError(f"axis_map: expected one of {AXIS_MAPS}, got {axis_map!r}")
    if num_axes < 1:
        raise ValueError(f"num_axes: expected at least 1, got {num_axes}")
    thetas = [theta] * num_axes if isinstance(theta, Tensor) else list(theta)
    if len(thetas) != num_axes:
        raise ValueError(f"theta: expected one tensor for each of {num_axes} axes, got {len(thetas)}")
    for t in thetas:
        if t.ndim not in (1, 2) or not t.is_floating_point():
            raise ValueError(f"theta: expected floats of shape (E,) or (H, E), got {t.dtype} {tuple(t.shape)}")
    thetas = [t if t.ndim == 2 else t[None] for t in thetas]
    order = range(num_axes) if axis_order == "major_first" else range(num_axes - 1, -1, -1)
    if sections is None and axis_map == "block":
        widths = _cut([thetas[axis].shape[1] for axis in order], num_channels, num_axes)
    elif sections is None:
        widths = split_channels(num_channels, (1,) * num_axes, remainder=0)
    else:
        if len(sections) != num_axes or min(sections) < 0:
            raise ValueError(f"sections: expected a width for each of {num_axes} axes, got {tuple(sections)}")
        widths = [sections[axis] for axis in order]
    members, channels = _PLACES[axis_map](widths, num_channels)
    width = sum(map(len, members))
    if width > num_channels:
        raise ValueError(f"sections: expected at most {num_channels} channels together, got {tuple(sections or ())}")

    blocks = []
    for axis, taken in zip(order, members, strict=True):
        needed = taken[-1] + 1 if taken else 0
        if thetas[axis].shape[1] < needed:
            raise ValueError(
                f"theta: axis {axis} takes {needed} members of its series ({axis_map!r}), got {thetas[axis].shape[1]}"
            )
        blocks.append(F.pad(_members(thetas[axis], taken)[:, :, None], (axis, num_axes - 1 - axis)))
    num_heads = max(block.shape[0] for block in blocks)
    omega = torch.cat([block.expand(num_heads, -1, -1) for block in blocks], dim=1)
    if channels is not None:
        omega = omega[:, torch.tensor([c for taken in channels for c in taken]).argsort().to(omega.device)]
    return omega if width == num_channels else F.pad(omega, (0, 0, 0, num_channels - width))


def _cut(widths: list[int], num_channels: int, num_axes: int) -> list[int]:
    """Blocks of these widths until they reach C."""
    if sum(widths) < num_channels:
        raise ValueError(
            f"theta: {num_axes} axes of {widths} frequencies give {sum(widths)} channels, "
            f"but {num_channels} are needed; theta needs at least {-(-num_channels // num_axes)} an axis"
        )
    return [min(width, max(num_channels - sum(widths[:b]), 0)) for b, width in enumerate(widths)]


def _members(theta: Tensor, members: Sequence[int]) -> Tensor:
    """theta[:, members], a view of a range: an index would have to travel to the device."""
    if isinstance(members, range):
        return theta[:, members.start : members.stop : members.step]
    return theta[:, torch.tensor(members, dtype=torch.int64, device=theta.device)]


def sequence_omega(theta: Tensor, num_pairs: int, num_heads: int | None = None) -> Tensor:
    """theta (C,), (H, C) or (H,), one frequency a head, on one axis: omega (H or 1, C, 1), a view.

    Args:
        num_pairs: C. A theta of that length is (C,), also where H = C.
        num_heads: H; None: whatever theta says.
    """
    shape = tuple(theta.shape)
    if shape == (num_pairs,):
        return theta[None, :, None]
    heads = shape[0] if num_heads is None and shape else num_heads
    if heads and shape == (heads,):
        return theta[:, None, None].expand(heads, num_pairs, 1)
    if heads and shape == (heads, num_pairs):
        return theta[:, :, None]
    heads = "H" if num_heads is None else num_heads
    raise ValueError(
        f"theta: expected shape ({num_pairs},), ({heads},) or ({heads}, {num_pairs}) for {heads} heads and {num_pairs} "
        f"pairs, got {shape}"
    )


# --- a direction a channel -------------------------------------------------------------------------------


def dense_omega(theta: Tensor, directions: Tensor) -> Tensor:
    """Magnitudes times directions: theta (C,) or (H, C), directions (C, K) or (H, C, K) → omega (H or 1, C, K)."""
    theta = theta if theta.ndim == 2 else theta[None]
    directions = directions if directions.ndim == 3 else directions[None]
    if theta.shape[1] != directions.shape[1]:
        raise ValueError(
            f"theta: expected a frequency for each of the {directions.shape[1]} directions, got {tuple(theta.shape)}"
        )
    return theta[:, :, None] * directions


def random_directions(
    num_channels: int, num_axes: int, num_heads: int = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """A random orthonormal frame a head, its vectors taken by K blocks of channels: (H, C, K)."""
    if num_axes < 1 or num_heads < 1:
        raise ValueError(f"num_axes, num_heads: expected at least 1, got {num_axes}, {num_heads}")
    normal = torch.randn(num_heads, num_axes, num_axes, dtype=torch.float64, generator=generator)
    frame, triangle = torch.linalg.qr(normal)
    # Signs from the triangle make the frame uniform over rotations and reflections.
    frame = frame * torch.diagonal(triangle, dim1=-2, dim2=-1).sign()[:, None, :]
    return frame.mT.repeat_interleave(math.ceil(num_channels / num_axes), dim=1)[:, :num_channels]


def plane_directions(num_channels: int, angles: Tensor) -> Tensor:
    """In the plane, angle a for the first half of the channels and a + π/2 for the second: (H,) → (H, C, 2).

    With a ~ U(0, 2π) a head this is RoPE-ViT's RoPE-Mixed (arXiv 2403.13298).
    """
    turned = torch.stack([angles, angles + math.pi / 2], dim=-1)
    directions = torch.stack([turned.cos(), turned.sin()], dim=-1)
    return directions.repeat_interleave(math.ceil(num_channels / 2), dim=1)[:, :num_channels]


def golden_directions(num_channels: int, num_axes: int) -> Tensor:
    """Directions that stay evenly spread however many channels are taken, for K = 2 or 3: (C, K), float64.

    On the half circle each channel is turned by the golden section of it from the one before; on the half sphere
    height and azimuth follow the sequence that generalises it (Roberts 2018; for RoPE: Xiong 2025, "On
    N-dimensional rotary positional embeddings"). Halves, since v and -v turn a pair alike but for the sense.
    """
    index = torch.arange(num_channels, dtype=torch.float64) + 0.5
    if num_axes == 2:
        golden = (1 + math.sqrt(5)) / 2  # x^2 = x + 1
        azimuth = math.pi * (index / golden % 1)
        return torch.stack([azimuth.cos(), azimuth.sin()], dim=-1)
    if num_axes == 3:
        plastic = 1.324717957244746  # x^3 = x + 1
        height, azimuth = index / plastic % 1, 2 * math.pi * (index / plastic**2 % 1)
        radius = (1 - height**2).sqrt()
        return torch.stack([radius * azimuth.cos(), radius * azimuth.sin(), height], dim=-1)
    raise ValueError(f"num_axes: expected 2 or 3, got {num_axes}")


def simplex_directions(num_channels: int, num_axes: int) -> Tensor:
    """Channels take turns at the K + 1 corners of a regular simplex around the origin: (C, K), float64.

    For K = 2 three directions 120° apart, as in the hexagonal codes of grid cells.
    """
    if num_axes < 1:
        raise ValueError(f"num_axes: expected at least 1, got {num_axes}")
    # Along axis j corner j stands out, and those after it balance it.
    corners = torch.zeros(num_axes + 1, num_axes, dtype=torch.float64)
    for j in range(num_axes):
        corners[j, j] = (1 - corners[j].square().sum()).sqrt()
        corners[j + 1 :, j] = -corners[j, j] / (num_axes - j)
    return corners[torch.arange(num_channels) % (num_axes + 1)]


def mixed_omega(
    num_channels: int,
    num_axes: int,
    num_heads: int = 1,
    *,
    base: float = 10.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Dense frequencies: each channel turns along a direction of its own, random by head.

    A head draws a random orthonormal frame of the K axes; channels fall into K blocks, one for each vector of
    the frame, each with the geometric magnitudes ``base ** (-i / E)``, E = ceil(C / K). For K = 2 this is the
    initialisation of RoPE-Mixed (RoPE-ViT, arXiv 2403.13298: random angle a head, directions a and a + π/2), up to
    the sense of rotation.

    Returns:
        omega (H, C, K).
    """
    directions = random_directions(num_channels, num_axes, num_heads, generator=generator)
    magnitude = geometric_theta(math.ceil(num_channels / num_axes), base).repeat(num_axes)[:num_channels]
    return dense_omega(magnitude, directions).to(dtype)
