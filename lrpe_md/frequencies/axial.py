"""Axial frequencies, where each channel depends on a single axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import as_integer, check_at_least, check_dense, check_one_of, join_names, show_value, warn_caller

__all__ = [
    "AXIS_MAPS", "AXIS_ORDERS", "AxisMap", "AxisOrder", "axial_omega", "check_map", "check_split", "cut_blocks",
    "has_one_series", "is_even", "num_blocks", "sequence_omega", "split_channels", "warn_of_idle_axes",
]  # fmt: skip

AxisOrder = Literal["minor_first", "major_first"]
AXIS_ORDERS = ("minor_first", "major_first")
AxisMapName = Literal["block", "alternate", "chunk", "stride", "even_odd", "head"]
AxisMap = AxisMapName | Sequence[Sequence[int]]


AXIS_MAPS = get_args(AxisMapName)[:-1]  # axis maps within each head; "head" distributes whole heads


def has_one_series(axis_map: AxisMap) -> bool:
    """Return whether the axes share a single series that runs over all channels."""
    return not isinstance(axis_map, str) or axis_map in ("chunk", "stride", "even_odd")


def is_even(axis_map: AxisMap) -> bool:
    """Return whether the axis map requires equal shares."""
    return axis_map == "even_odd"


def num_blocks(axis_map: AxisMap, num_axes: int) -> int:
    """Return the number of blocks of channels. Gaps can only go before, between and after blocks."""
    if not isinstance(axis_map, str):
        return len(axis_map)
    return 1 if axis_map in ("alternate", "stride", "head") else num_axes


def _divide(
    axis_map: AxisMap, widths: Sequence[int], num_channels: int
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]:
    """Return the indices into theta for each axis, and the channels of each axis.

    Instead of the channels, return None if each axis fills one block of consecutive channels.
    """
    num_axes = len(widths)
    if axis_map == "block":
        return [range(n) for n in widths], None
    if axis_map == "chunk":
        return [range(sum(widths[:b]), sum(widths[: b + 1])) for b in range(num_axes)], None
    if axis_map == "even_odd":
        return [range(b, b + num_axes * n, num_axes) for b, n in enumerate(widths)], None
    if axis_map == "alternate":
        order = [b for i in range(max(widths)) for b in range(num_axes) if i < widths[b]]
    elif axis_map == "stride":
        order = [c % num_axes if c < num_axes * widths[c % num_axes] else 0 for c in range(num_channels)]
    else:
        order = _alternate_in_groups(axis_map, widths)
    channels = [[c for c, owner in enumerate(order) if owner == b] for b in range(num_axes)]
    return channels if has_one_series(axis_map) else [range(n) for n in widths], channels


def _alternate_in_groups(axis_map: Sequence[Any], sections: Sequence[int]) -> list[int]:
    """Return the axis of each channel. The axes in a group alternate until each has filled its section."""
    order: list[int] = []
    for group in axis_map:
        left = {axis: sections[axis] for axis in group}
        while any(left.values()):
            for axis in group:
                if left[axis]:
                    order.append(axis)
                    left[axis] -= 1
    return order


def check_map(axis_map: Any, num_axes: int) -> None:
    names = (*AXIS_MAPS, "head")
    if isinstance(axis_map, str) and axis_map in names:
        return
    if isinstance(axis_map, str) or not isinstance(axis_map, Sequence):
        raise ValueError(f"axis_map: expected one of {names} or groups of axes, got {show_value(axis_map)}")
    groups = [[as_integer(axis) for axis in group] if isinstance(group, Sequence) else [] for group in axis_map]
    axes = [axis for group in groups for axis in set(group)]
    if not all(groups) or not all(isinstance(axis, int) for axis in axes) or sorted(axes) != list(range(num_axes)):
        raise ValueError(
            f"axis_map: expected groups that contain each of the {num_axes} axes once, got {show_value(axis_map)}"
        )


def split_channels(num_channels: int, shares: Sequence[int], *, remainder: int | None = None) -> tuple[int, ...]:
    """Split channels (or pairs) among axes, in proportion to ``shares``.

    Args:
        num_channels: total number to split.
        shares: one integer per axis. For example, (2, 3, 3) gives the first axis two eighths of the channels.
        remainder: axis that gets the leftover channels, or None to require an exact split.

    Raises:
        ValueError: if the split is not exact and ``remainder`` is None, or the shares are invalid.
    """
    check_at_least(0, num_channels=num_channels)
    total = sum(shares)
    if total < 1 or min(shares) < 0:
        raise ValueError(f"shares: expected non-negative whole numbers, not all 0, got {tuple(shares)}")
    parts = [num_channels // total * share for share in shares]
    left = num_channels - sum(parts)
    if left and remainder is None:
        raise ValueError(
            f"num_channels: expected a multiple of {total} for shares {' : '.join(map(str, shares))}, got "
            f"{num_channels}; use another number, or choose the axis that gets the remaining channels, as in "
            "Axial(..., remainder=0)"
        )
    if remainder is not None:
        parts[remainder] += left
    return tuple(parts)


def check_split(split: Any, num_axes: int, owner: str = "the ") -> None:
    """Check that ``split`` has one share per axis. ``owner`` names the scheme in the error, such as "wan's "."""
    example = (1,) * num_axes
    if not isinstance(split, Sequence):
        raise TypeError(f"split: expected a tuple of shares, such as {example}, got {split!r}")
    if len(split) != num_axes:
        raise ValueError(
            f"split: expected a share for each of {owner}{num_axes} axes, got {tuple(split)}; pass {num_axes} numbers, "
            f"such as {example}"
        )


def warn_of_idle_axes(
    widths: Sequence[int],
    shares: Sequence[int] = (),
    remedy: str = "split= in lrpe_md.preset or encoding_kwargs",
) -> None:
    """Warn about axes without channels, on which positions have no effect.

    Args:
        widths: number of channels or pairs per axis, slowest axis first.
        shares: share of each axis. An axis with a share of 0 has no channels on purpose, so it causes no warning.
        remedy: argument to recommend for changing the shares.
    """
    shares = shares or [1] * len(widths)
    idle = [str(axis) for axis, share in enumerate(shares) if share and not widths[axis]]
    if idle:
        warn_caller(
            f"head_dim: expected channels for each of the {len(widths)} axes, got {tuple(widths)}: positions on "
            f"{'axis' if len(idle) == 1 else 'axes'} {join_names(idle, 'and')} have no effect. Use a larger head_dim "
            f"or fewer axes, or choose each axis's share with {remedy}"
        )


def axial_omega(
    theta: Tensor | Sequence[Tensor],
    num_channels: int,
    num_axes: int,
    *,
    axis_order: AxisOrder = "minor_first",
    axis_map: AxisMap = "block",
    sections: Sequence[int] | None = None,
    gaps: Sequence[int] | None = None,
    num_heads: int | None = None,
) -> Tensor:
    """Build omega from the series theta by assigning one axis to each channel.

    By default, each axis gets one block of channels: Θ = concat(s_1 θ, ..., s_k θ)[:C].

    Args:
        theta: tensor (E,) or (H, E) for all axes, or one tensor per axis, slowest axis first like ``Grid.shape``.
        num_channels: C, which is head_dim for the cosine map and half the rotated width for rotation.
        num_axes: number of axes, K.
        axis_order: which axis gets the first channels. ``"minor_first"`` starts with the fastest axis (W), as in the
            LRPE document. ``"major_first"`` starts with the slowest (T), as in most vision models.
        axis_map: how the channels are divided among the axes.

            - ``"block"``: each axis has its own series and one block of channels.
            - ``"alternate"``: each axis has its own series, and the axes alternate from channel to channel.
            - ``"chunk"``: a single series runs over all channels, and is split into one section per axis (Qwen2-VL).
            - ``"stride"``: a single series runs over all channels. Channel c belongs to axis c mod K until that axis
              has filled its section, and to the first axis from then on (Qwen3-VL). The size of the first section is
              ignored.
            - ``"even_odd"``: the members of a single series go to the axes in turn, and each axis has one block of
              channels (Pixtral for K = 2).
            - ``"head"``: each head uses a single axis for all its channels (MHRoPE).
            - groups of axis numbers (0 is the slowest axis): a single series runs over all channels, with one group
              after the other. Within a group, the axes alternate until each has filled its section. ``((1, 2), (0,))``
              means h w h w ... and then t (ERNIE-4.5-VL, VideoRoPE). ``((0, 0, 1, 2, 1, 2, 1, 2),)`` repeats t t h w h
              w h w (MM-RoPE).
        sections: number of channels per axis, slowest axis first, or number of heads for ``"head"``. Channels beyond
            the sum of the sections are not rotated. By default, ``"block"`` uses all of theta for each axis and stops
            at C channels. The other maps use equal sections by default, and the first axis gets the remainder.
        gaps: numbers of unrotated channels before, between and after the blocks. There is one more gap than there are
            blocks. ``"alternate"`` and ``"stride"`` have a single block. Each group has one block. Default: no gaps.
        num_heads: number of heads for ``"head"``. Default: the sum of the sections.

    Returns:
        omega (H or 1, C, K), with theta's dtype and device. omega is differentiable with respect to theta.

    Raises:
        ValueError: if theta is too short, the sections exceed C, or a name is unknown.
    """
    check_one_of("axis_order", axis_order, AXIS_ORDERS)
    check_at_least(1, num_axes=num_axes)
    check_at_least(0, num_channels=num_channels)
    check_map(axis_map, num_axes)
    if num_heads is not None and axis_map != "head":
        raise ValueError(f"num_heads: expected None unless axis_map is 'head', got {num_heads}")
    between = _gaps(gaps, num_blocks(axis_map, num_axes))
    thetas: list[Any] = list(theta) if isinstance(theta, (tuple, list)) else [theta]
    for t in thetas:
        check_dense("theta", t, "(E,) or (H, E), or one for each axis")
    thetas = thetas if isinstance(theta, (tuple, list)) else thetas * num_axes
    if len(thetas) != num_axes:
        raise ValueError(f"theta: expected one tensor for each of the {num_axes} axes, got {len(thetas)}")
    for t in thetas:
        if t.ndim not in (1, 2) or not t.is_floating_point():
            raise ValueError(
                f"theta: expected a floating-point tensor of shape (E,) or (H, E), got {t.dtype} {tuple(t.shape)}"
            )
    thetas = [t if t.ndim == 2 else t[None] for t in thetas]
    if axis_map == "head":
        return _with_gaps(_axis_per_head(thetas, num_channels - sum(between), sections, num_heads), [], between)
    order = range(num_axes) if axis_order == "major_first" or not isinstance(axis_map, str) else range(num_axes)[::-1]
    whole, num_channels = num_channels, num_channels - sum(between)
    if num_channels < 0:
        raise ValueError(f"gaps: expected at most {whole} channels in total, got {tuple(between)}")
    if sections is None and axis_map == "block":
        widths = cut_blocks([thetas[axis].shape[1] for axis in order], num_channels, num_axes)
    elif sections is None:
        widths = list(split_channels(num_channels, (1,) * num_axes, remainder=0))
    else:
        sections = _read_counts(f"sections: expected a width for each of the {num_axes} axes", sections, num_axes)
        widths = [sections[axis] for axis in order]
    members, channels = _divide(axis_map, widths, num_channels)
    blocks = widths if isinstance(axis_map, str) else [sum(widths[axis] for axis in set(group)) for group in axis_map]
    width = sum(map(len, members))
    if width > num_channels:
        raise ValueError(f"sections: expected at most {num_channels} channels in total, got {tuple(sections or ())}")
    omega = _laid(thetas, order, members, axis_map)
    if channels is not None:
        places = torch.tensor([c for taken in channels for c in taken], device="cpu").argsort()
        omega = omega[:, places.to(omega.device)]
    omega = omega if width == num_channels else F.pad(omega, (0, 0, 0, num_channels - width))
    return _with_gaps(omega, blocks, between)


def _laid(
    thetas: Sequence[Tensor], order: Sequence[int], members: Sequence[Sequence[int]], axis_map: AxisMap
) -> Tensor:
    """Build omega (H, C, K) with one block of channels per axis. ``members`` holds each axis's indices into theta."""
    num_axes, blocks = len(thetas), []
    for axis, taken in zip(order, members, strict=True):
        needed = taken[-1] + 1 if taken else 0
        if thetas[axis].shape[1] < needed:
            raise ValueError(
                f"theta: expected at least {needed} frequencies for axis {axis} with axis_map={axis_map!r}, got "
                f"{thetas[axis].shape[1]}"
            )
        blocks.append(F.pad(_members(thetas[axis], taken)[:, :, None], (axis, num_axes - 1 - axis)))
    num_heads = max(block.shape[0] for block in blocks)
    return torch.cat([block.expand(num_heads, -1, -1) for block in blocks], dim=1)


def _axis_per_head(
    thetas: Sequence[Tensor], num_channels: int, sections: Sequence[int] | None, num_heads: int | None
) -> Tensor:
    """Assign one axis to all channels of each head. Heads beyond the sections are not rotated."""
    num_axes = len(thetas)
    if sections is None:
        sections = split_channels(num_axes if num_heads is None else num_heads, (1,) * num_axes, remainder=0)
    sections = _read_counts(f"sections: expected a number of heads for each of the {num_axes} axes", sections, num_axes)
    num_heads = sum(sections) if num_heads is None else num_heads
    if sum(sections) > num_heads:
        raise ValueError(f"sections: expected at most {num_heads} heads in total, got {tuple(sections)}")
    heads = []
    for axis, (theta, number) in enumerate(zip(thetas, sections, strict=True)):
        if theta.shape[0] != 1 or theta.shape[1] < num_channels:
            raise ValueError(
                f"theta: expected shape (n,) with n >= {num_channels}, shared by the heads of axis {axis}, with "
                f"axis_map='head', got {tuple(theta.shape)}"
            )
        laid = F.pad(theta[:, :num_channels, None], (axis, num_axes - 1 - axis))
        heads.append(laid.expand(number, -1, -1))
    omega = torch.cat(heads)
    return F.pad(omega, (0, 0, 0, 0, 0, num_heads - omega.shape[0]))


def _gaps(gaps: Sequence[int] | None, blocks: int) -> list[int]:
    expected = f"gaps: expected {blocks + 1} channel counts (before, between and after {blocks} blocks)"
    return [0] * (blocks + 1) if gaps is None else _read_counts(expected, gaps, blocks + 1)


def _read_counts(expected: str, counts: Any, number: int) -> list[int]:
    """Return ``number`` non-negative integers, or raise an error that begins with ``expected``."""
    read = [as_integer(count) for count in counts] if isinstance(counts, Iterable) else []
    if len(read) != number or any(count is None or count < 0 for count in read):
        raise ValueError(f"{expected}, got {show_value(counts)}")
    return read


def _with_gaps(omega: Tensor, blocks: Sequence[int], gaps: Sequence[int]) -> Tensor:
    """Insert zeros before, between and after blocks of channels."""
    if not any(gaps):
        return omega
    blocks = [*blocks[: len(gaps) - 2], omega.shape[1] - sum(blocks[: len(gaps) - 2])]
    parts = [omega.new_zeros(omega.shape[0], gaps[0], omega.shape[2])]
    for part, gap in zip(omega.split(blocks, dim=1), gaps[1:], strict=True):
        parts += [part, omega.new_zeros(omega.shape[0], gap, omega.shape[2])]
    return torch.cat(parts, dim=1)


def cut_blocks(widths: list[int], num_channels: int, num_axes: int) -> list[int]:
    """Truncate blocks of channels so that their widths add up to C."""
    if sum(widths) < num_channels:
        raise ValueError(
            f"theta: expected {num_channels} frequencies in total, got {sum(widths)} ({num_axes} axes with {widths}); "
            f"pass at least {-(-num_channels // num_axes)} per axis"
        )
    return [min(width, max(num_channels - sum(widths[:b]), 0)) for b, width in enumerate(widths)]


def _members(theta: Tensor, members: Sequence[int]) -> Tensor:
    """Return theta[:, members]. If ``members`` is a range, return a view, so no indices are copied."""
    if isinstance(members, range):
        return theta[:, members.start : members.stop : members.step]
    return theta[:, torch.tensor(members, dtype=torch.int64, device=theta.device)]


def sequence_omega(theta: Tensor, num_pairs: int, num_heads: int | None = None) -> Tensor:
    """Expand theta to omega (H or 1, C, 1) for a single axis, as a view.

    Args:
        theta: (C,), (1, C) or (H, C), or (H,) for one frequency per head.
        num_pairs: C. A one-dimensional theta of length C is read as (C,), even if H = C.
        num_heads: H, or None to accept any number of heads.
    """
    check_dense("theta", theta, "(C,), (H, C) or (H,)")
    check_at_least(1, num_pairs=num_pairs)
    shape = tuple(theta.shape)
    if shape == (num_pairs,):
        return theta[None, :, None]
    heads = shape[0] if num_heads is None and shape else num_heads
    if heads and shape == (heads,):
        return theta[:, None, None].expand(heads, num_pairs, 1)
    if heads and shape in ((heads, num_pairs), (1, num_pairs)):
        return theta[:, :, None]
    heads = "H" if num_heads is None else num_heads
    raise ValueError(
        f"theta: expected shape ({num_pairs},), ({heads},) or ({heads}, {num_pairs}) for num_heads={heads} and "
        f"{num_pairs} pairs, got {shape}"
    )
