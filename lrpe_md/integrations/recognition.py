"""Find the arguments of :func:`lrpe_md.rotate` or :func:`lrpe_md.cosine` that correspond to third-party rotary code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..functional import cosine, rotate
from ..positions.grid import Grid
from .plans import Unlike
from .probing import Probe, firsts, get_forward, name_pairs, quietly, read_pairs

__all__ = ["Arguments", "Recognised", "recognise"]

_ANGLE = 1e-3  # radians; float32 tables are rounded by less than this on a grid


class Arguments(dict[str, Any]):
    """Keyword arguments of rotate or cosine, which print as the corresponding call."""

    def __init__(self, function: str, values: dict[str, Any], notes: str) -> None:
        super().__init__(values)
        self.function, self.notes = function, notes

    def __str__(self) -> str:
        shown = {name: f"<{tuple(v.shape)}>" if isinstance(v, Tensor) else repr(v) for name, v in self.items()}
        if (grid := self.get("positions")) is not None:
            fields = [f"{name}={value}" for name in ("prefix", "shift") if (value := getattr(grid, name))]
            shown["positions"] = f"Grid({', '.join([str(grid.shape), *fields])})"
        arguments = ", ".join(f"{name}={text}" for name, text in shown.items())
        return f"{self.function}(x, {arguments})" + (f"  # {self.notes}" if self.notes else "")


@dataclass(frozen=True)
class Recognised:
    """Description of a recognised function as a call to this library.

    Args:
        arguments: arguments of rotate or cosine. ``rotate(x, **found.arguments)`` gives the same result as the
            function.
        map: "rotate" or "cosine".
        axes: for each pair (or channel, for the cosine map), the axis on which it depends, or None if it depends on
            several axes or on none.
        axis_order: "major_first" if the slowest axis has the first channels, "minor_first" if the fastest axis has
            them, or None for any other order.
        bases: base of the geometric series of each axis, or None if the series is not geometric or differs between
            heads. If a series does not start at 1, the comment after the printed call gives its first frequency as a
            scale.
        error: largest difference from the function, for x with a standard deviation of 1.
    """

    arguments: Arguments
    map: Literal["rotate", "cosine"]
    axes: tuple[int | None, ...]
    axis_order: str | None
    bases: tuple[float | None, ...]
    error: float

    def __str__(self) -> str:
        return str(self.arguments)


def recognise(
    function: Callable[..., Any],
    *,
    head_dim: int,
    shape: int | Sequence[int],
    num_heads: int = 1,
    prefix: int = 0,
    device: torch.device | str = "cpu",
) -> Recognised:
    """Find arguments with which :func:`rotate` or :func:`cosine` reproduces a function.

    Args:
        function: function that takes x (1, H, N, D), or q and k, and returns them rotated. The function must compute
            the positions itself.
        head_dim, num_heads: D and H. ``num_heads`` must be above 1 if frequencies differ between heads.
        shape: grid of the tokens, slowest axis first: (H, W), (T, H, W), or N for a sequence.
        prefix: number of unrotated tokens before the grid.
        device: device on which to call the function.

    Returns:
        a :class:`Recognised`, which prints as a call to this library. Frequencies above half a turn per token are
        reported as smaller frequencies that are equivalent on this grid.

    Raises:
        TypeError: if the function is not a rotation (or cosine map) whose angles are linear in the positions. The
            message says what the function does instead.
    """
    grid = Grid(tuple(shape) if isinstance(shape, Iterable) else (shape,), prefix=prefix)
    if head_dim < 2 or num_heads < 1 or grid.num_grid_tokens < 2:
        raise ValueError(
            f"shape, head_dim: expected at least two tokens and two channels, got {grid.shape} and {head_dim}"
        )
    sizes = (1, num_heads, grid.total, head_dim)
    try:
        return quietly(lambda: _recognise(function, grid, sizes, str(device)))
    except Unlike as e:
        reason = str(e)
    with suppress(Unlike):  # the layout is not the reason
        quietly(lambda: _recognise(_swap_heads_and_tokens(function), grid, sizes, str(device)))
        wrapper = "wrap it in a function that transposes x and its result with .transpose(1, 2)"
        reason = f"expects x of shape (1, N, H, D); {wrapper}"
    name = getattr(function, "__qualname__", type(function).__name__)
    raise TypeError(
        f"function: expected a function that rotates x (1, H, N, D) by positions, got {name}, which {reason}"
    )


def _swap_heads_and_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of (B, N, H, D) as a function of (B, H, N, D)."""

    def swapped(*xs: Tensor) -> Any:
        out = function(*(x.transpose(1, 2) for x in xs))
        return out.transpose(1, 2) if isinstance(out, Tensor) else tuple(y.transpose(1, 2) for y in out)

    swapped.__signature__ = inspect.signature(get_forward(function))  # type: ignore[attr-defined]
    return swapped


def _recognise(function: Callable[..., Any], grid: Grid, sizes: tuple[int, ...], device: str) -> Recognised:
    try:
        parameters = inspect.signature(get_forward(function)).parameters.values()
    except (TypeError, ValueError) as e:  # a built-in function
        raise TypeError(f"function: expected a Python function or a module, got {function!r}: {e}") from e
    count = max(1, sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in parameters))
    if count > 2:
        raise Unlike(0, f"takes {count} arguments; wrap it in a function that takes only x, or only q and k")
    key = (("data", 4, torch.float64, sizes[-1]),) * count
    probe = Probe(lambda xs, _: function(*[x.clone() for x in xs]), key, device, (1, 2))  # the cosine map doubles x
    dtype = torch.float64

    def call(x: Tensor) -> Tensor:
        try:
            out, *others = probe.run([x.to(dtype)] * count, [])
        except Unlike:
            raise
        except Exception as e:  # a third-party function may raise anything
            raise Unlike(0, f"raises {type(e).__name__}: {e}") from e
        if any(not torch.equal(o, out) for o in others):
            raise Unlike(3, "rotates q and k differently")
        return out.double()

    x = torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float().double()
    try:
        call(x)
    except Unlike as e:
        if e.__cause__ is None:
            raise
        dtype = torch.float32  # some functions accept only this dtype
    (start, stop), distance, distance_in_x, cos, sin = read_pairs(call, x)
    values: dict[str, Any] = {}
    if distance:
        first = firsts(stop - start, distance)
        (cos, other_cos), (sin, other_sin) = ((t[..., first], t[..., ~first]) for t in (cos, sin))
        close = torch.allclose(cos, other_cos, atol=_ANGLE) and torch.allclose(sin, other_sin, atol=_ANGLE)
        if not close or distance != distance_in_x:
            raise Unlike(5, "does not rotate the two channels of a pair by the same angle")
        values = {"pairs": name_pairs(stop - start, distance)}
        if stop - start < x.shape[-1]:
            values["rotary_dim"] = slice(start, stop) if start else stop
    cos, sin = cos[0], sin[0]
    fitted = _fit_grid(cos, sin, grid) if values else _fit_cosine(cos, sin, grid)
    kind: Any = "rotate" if values else "cosine"
    axes, order, bases, notes = _describe(fitted["omega"], "pairs" if values else "channels")
    arguments = Arguments(kind, {**fitted, **values}, notes)
    error = float(((rotate if values else cosine)(x, **arguments) - call(x)).abs().max())
    if not error < 20 * _ANGLE:
        raise Unlike(5, f"is not linear in x, or mixes tokens: the closest rotation differs by {error:.2g}")
    return Recognised(arguments, kind, axes, order, bases, error)


def _fit_cosine(cos: Tensor, sin: Tensor, grid: Grid) -> dict[str, Any]:
    """Fit cosine to the halves of an output (H, N, C), in the order of halves that needs fewer arguments."""
    found: list[dict[str, Any]] = []
    reasons = []
    for halves, order in (((cos, sin), {}), ((sin, cos), {"order": "sin_cos"})):
        try:
            found.append({**_fit_grid(*halves, grid), **order})
        except Unlike as e:
            reasons.append(e)
    if not found:
        raise reasons[0]
    fitted = min(found, key=lambda values: ("phase" in values, "inverse" in values))
    if fitted.pop("inverse", False):  # cosine doesn't accept it
        fitted |= {name: -fitted[name] for name in ("omega", "phase") if name in fitted}
    return fitted


def _fit_grid(cos: Tensor, sin: Tensor, grid: Grid) -> dict[str, Any]:
    """Check that the prefix is not rotated, and fit the arguments of rotate to the grid's tokens."""
    prefix = grid.prefix
    if (cos[:, :prefix] - 1).abs().sum() + sin[:, :prefix].abs().sum() > _ANGLE:
        raise Unlike(5, f"also rotates its first {prefix} tokens; set prefix to the number of unrotated tokens")
    return _fit(cos[:, prefix:], sin[:, prefix:], grid)


def _fit(cos: Tensor, sin: Tensor, grid: Grid) -> dict[str, Any]:
    """Fit frequencies, a phase and an amplitude to cos and sin (H, N, C)."""
    amplitude = torch.hypot(cos, sin)
    if (amplitude - amplitude[:1, :1]).abs().max() > _ANGLE:
        raise Unlike(4, "scales x by a factor that depends on the token, head or channel")
    amplitude = amplitude.mean((0, 1))
    angles = torch.atan2(sin, cos).unflatten(1, grid.shape).movedim(-1, 1)  # (H, C, *shape)
    omega = torch.stack([_measure(angles, 2 + axis) for axis in range(len(grid.shape))], -1)
    coordinates = Grid(grid.shape).coordinates(dtype=torch.float64)
    rest = angles.flatten(2) - (omega[:, :, None] * coordinates).sum(-1)
    phase = _mean_angle(rest, -1)
    if _wrap(rest - phase[..., None]).abs().max() > 10 * _ANGLE:
        raise Unlike(5, "rotates by angles that are not positions on this grid times frequencies")
    omega[omega.abs() < 1e-7] = 0
    shift = _find_shift(omega, phase)
    sign = -1 if (omega <= 0).all() and (omega < 0).any() else 1
    if torch.allclose(omega, omega[:1]) and torch.allclose(phase, phase[:1], atol=1e-5):  # all heads are equal
        omega, phase = omega[:1], phase[:1]
    where = Grid(grid.shape, prefix=grid.prefix, shift=shift if shift and any(shift) else None)
    values: dict[str, Any] = {"omega": sign * omega, "positions": where}
    if shift is None and (phase.abs() > 1e-5).any():
        values["phase"] = sign * phase
    if sign < 0:
        values["inverse"] = True
    if (amplitude - 1).abs().max() > 1e-5:
        is_same = (amplitude - amplitude[0]).abs().max() < 1e-5
        values["amplitude"] = float(amplitude[0]) if is_same else amplitude
    return values


def _wrap(t: Tensor) -> Tensor:
    return torch.remainder(t + math.pi, 2 * math.pi) - math.pi


def _mean_angle(t: Tensor, dim: int) -> Tensor:
    return torch.atan2(t.sin().mean(dim), t.cos().mean(dim))


def _measure(angles: Tensor, dim: int) -> Tensor:
    """Return the angle (H, C) per step along a dimension. The angle is refined over increasing distances."""
    size = angles.shape[dim]
    step, lag = torch.zeros(angles.shape[:2], dtype=angles.dtype), 1
    while lag < size:
        delta = angles.narrow(dim, lag, size - lag) - angles.narrow(dim, 0, size - lag)
        step = step + _mean_angle(delta.flatten(2) - lag * step[..., None], -1) / lag
        lag = size - 1 if lag < size - 1 <= 2 * lag else 2 * lag
    return step


def _find_shift(omega: Tensor, phase: Tensor) -> tuple[float, ...] | None:
    flat, angles = omega.flatten(0, 1), phase.flatten()
    for slow in (flat.norm(dim=-1).argsort()[:n] for n in (2 * flat.shape[-1], len(flat))):
        shift = torch.linalg.lstsq(flat[slow], angles[slow, None], driver="gelsd").solution[:, 0]
        shift = (shift * 4).round() / 4 if ((shift * 4) - (shift * 4).round()).abs().max() < 0.02 else shift
        if _wrap(angles - (flat * shift).sum(-1)).abs().max() < _ANGLE:
            return tuple(shift.tolist())
    return None


def _describe(omega: Tensor, unit: str) -> tuple[tuple[int | None, ...], str | None, tuple[float | None, ...], str]:
    """Return each channel's axis, the axis order, the base of each axis, and a comment that describes these."""
    used = (omega.abs().amax(0) > 0).tolist()
    axes = tuple(row.index(True) if sum(row) == 1 else None for row in used)
    known = [a for a in axes if a is not None]
    orders = {"major_first": sorted(known), "minor_first": sorted(known, reverse=True)}
    order = next((name for name, each in orders.items() if each == known and len(set(known)) > 1), None)
    by_head = [omega[:, [a == axis for a in axes], axis].abs() for axis in range(omega.shape[-1])]
    series = [values[0] for values in by_head]
    is_same = [torch.allclose(values, values[:1], rtol=1e-3, atol=1e-6) for values in by_head]
    bases = tuple(_find_base(values) if same else None for values, same in zip(series, is_same, strict=True))
    text = []
    for axis, (base, values) in enumerate(zip(bases, series, strict=True)):
        if axis in axes:
            scale = f", scaled by {values[0]:.4g}" if base and abs(values[0] - 1) > 1e-4 else ""
            text.append(f"axis {axis}: {len(values)} {unit}" + (f", base {base:g}{scale}" if base else ""))
    return axes, order, bases, "; ".join(text)


def _find_base(series: Tensor) -> float | None:
    """Return the base of ω_i = scale · base^(-i / n), or None if the series is not geometric."""
    if len(series) < 3:
        return None
    logs = series.log()
    ratios = logs[:-1] - logs[1:]
    if (ratios - ratios.mean()).abs().max() > 1e-3:
        return None
    return float(f"{math.exp(float(ratios.mean()) * len(series)):.4g}")
