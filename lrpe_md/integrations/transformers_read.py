"""What the rotary code of a model of transformers computes: read from its values, not from its name.

A rotary module is called with chosen positions, and its frequencies by channel and axis are read from the cosines and
sines that it gives. A function that turns q and k is called with random ones, and compared with each way to turn them
that is known. Both are run as they are, so that what another class, a hub kernel or a change by hand does to them
counts; what is like none of the known is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..engine.validate import Pairs
from ..frequencies.rope_parameters import RULES, rope_frequencies
from ..positions.grid import Grid
from .exchange import found_series

__all__ = ["Form", "Layout", "Misfit", "Reading", "Unknown", "by_length", "leaves_prefix", "read_function",
    "read_image_rotary", "read_rotary",
]  # fmt: skip

Layout = Literal["half", "repeat", "single", "blocks", "complex"]


@dataclass(frozen=True)
class Reading:
    """What a rotary module gives.

    Args:
        kind: of its ``position_ids``: "sequence" (B, N), "axes" (K, B, N), "table" (N, K), or "places" (B, N, K); or
            "image": it takes pixels, whose patches it lays over [-1, 1] on both axes.
        layout: of its cosines: the pairs twice end to end ("half"), those of one half of the channels and then those of
            the other so ("blocks"), each pair twice in a row ("repeat"), once ("single"), or with its sines as complex
            numbers.
        omega: (C, K), float64.
        amplitude: of all of them.
    """

    kind: Literal["sequence", "axes", "table", "places", "image"]
    layout: Layout
    omega: Tensor
    amplitude: float


class Unknown(ValueError):
    """Code that is like none that is known; says what is unlike."""


class Misfit(Unknown):
    """Code that is known, with settings that it is not."""


# --- rotary modules --------------------------------------------------------------------------------------------


def read_rotary(part: Any, layer_type: str | None = None) -> Reading:
    """What a module with ``forward(x, position_ids)`` gives; ``layer_type`` where it has frequencies of several.

    Raises:
        Unknown: anything else.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer = getattr(part, f"{prefix}inv_freq", None)
    if not isinstance(buffer, Tensor) or buffer.ndim != 1:
        raise Unknown("expected a rotary module with inv_freq of one axis")
    probe = _on_cpu(part)
    series = getattr(probe, f"{prefix}inv_freq").detach().double()
    extra = {} if layer_type is None else {"layer_type": layer_type}

    def call(position_ids: Tensor) -> Any:
        return type(probe).forward(probe, torch.zeros(1, 1, 1), position_ids, **extra)

    kind, num_axes = _read_kind(call)
    amplitude = _complex(call(_at(kind, torch.zeros(1, num_axes)))).abs().flatten()
    if not torch.allclose(amplitude, amplitude[:1].expand_as(amplitude), rtol=1e-5):
        raise Unknown("expected one amplitude for all channels")
    longest = 3.0 if by_length(part) else 1000.0
    measured = torch.stack([_measure(call, kind, axis, num_axes, series) for axis in range(num_axes)], -1)
    omega = _snap(measured, series)
    generator = torch.Generator().manual_seed(0)
    places = (torch.rand(7, num_axes, generator=generator) * longest).round()
    angles = places.double() @ omega.T
    expected = amplitude[0].double() * torch.polar(torch.ones_like(angles), angles)
    error = (_complex(call(_at(kind, places))).reshape(expected.shape) - expected).abs()
    if (error > 2e-6 * angles.abs() + 1e-5).any():
        raise Unknown("expected angles that are positions times frequencies")
    exact = _exact(part, layer_type, buffer if not buffer.is_meta else series.float())
    if exact is not None:
        omega = _snap(measured, series, exact)
    layout, omega = _read_layout(call(_at(kind, places)), omega)
    stated = getattr(part, f"{prefix}attention_scaling", None)
    found = float(amplitude[0])
    if isinstance(stated, (int, float)) and abs(stated - found) < 1e-5 * abs(found):
        found = float(stated)
    return Reading(kind, layout, omega, found)


def read_image_rotary(part: Any) -> Reading:
    """What a module with ``forward(pixel_values)`` gives, as DINOv3's does.

    Raises:
        Unknown: anything else.
    """
    buffer, patch = getattr(part, "inv_freq", None), _patch_size(part)
    if not isinstance(buffer, Tensor) or buffer.ndim != 1 or patch is None:
        raise Unknown("expected a rotary module with inv_freq of one axis, and one patch_size")
    probe = _on_cpu(part)
    series = 2 * torch.pi * probe.inv_freq.detach().double()
    omega = torch.block_diag(series[:, None], series[:, None])  # rows, then columns
    for shape in ((3, 5), (4, 2)):
        given = type(probe).forward(probe, torch.zeros(1, 3, shape[0] * patch, shape[1] * patch))
        angles = Grid(shape).cells("axis").coordinates(dtype=torch.float64) @ omega.T
        expected = torch.polar(torch.ones_like(angles), angles).tile(2)
        found = _complex(given)
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=2e-5):
            raise Unknown("expected places of patches in [-1, 1] times the frequencies in inv_freq, axis by axis")
    return Reading("image", "half", omega, 1.0)


def _patch_size(part: Any) -> int | None:
    size = getattr(getattr(part, "config", None), "patch_size", None)
    return size if isinstance(size, int) else None


def by_length(part: Any) -> bool:
    """Whether the frequencies change with the length of the sequence."""
    types = getattr(part, "rope_type", "default")
    types = types.values() if isinstance(types, dict) else [types]
    return any("dynamic" in str(t) or t == "longrope" for t in types)


def _on_cpu(part: Any) -> Any:
    """A copy that may be called; the buffers of one on the meta device are made anew."""
    if any(b.is_meta for b in part.buffers()):
        with torch.device("cpu"):
            return type(part)(part.config)
    cls: Any = type(part)
    state, made = {**vars(part)}, cls.__new__(cls)
    hooks = {name for name in state if name.endswith("_hooks")}
    vars(made).update({name: value for name, value in state.items() if name not in {"_buffers", "forward", *hooks}})
    vars(made).update({name: type(state[name])() for name in hooks})
    vars(made)["_buffers"] = {
        name: None if b is None else b.detach().to("cpu", copy=True) for name, b in part._buffers.items()
    }
    if "forward" in state:
        raise Unknown("expected the forward of its class, got one of its own")
    return made.train(False) if not part._modules else copy.deepcopy(part).cpu().eval()


def _at(kind: str, places: Tensor) -> Tensor:
    """position_ids of places (N, K)."""
    if kind == "sequence":
        return places.T
    if kind == "places":
        return places[None]
    return places.T[:, None] if kind == "axes" else places


def _read_kind(call: Callable[[Tensor], Any]) -> tuple[Any, int]:
    def shape(*sizes: int) -> tuple[int, ...]:
        try:
            return tuple(_complex(call(torch.ones(sizes))).shape[:-1])
        except (RuntimeError, IndexError, TypeError, ValueError):
            return ()

    for num_axes in (3, 2):
        if shape(num_axes, 4, 5) == (4, 5):
            return "axes", num_axes
    if shape(2, 5) == (2, 5):
        return "sequence", 1
    table, places = shape(5, 2) in ((5,), (1, 5)), shape(2, 5, 2) == (2, 5)
    if table and places:  # it may take the axes of (B, N, 2) for channels of (N, 2)
        at = torch.arange(10.0).reshape(5, 2)
        one, other = _complex(call(at)).flatten(), _complex(call(at[None])).flatten()
        table = one.shape == other.shape and torch.allclose(one, other)
    if table:
        return "table", 2
    if places:
        return "places", 2
    raise Unknown("expected position_ids (B, N), (3, B, N), (N, 2) or (B, N, 2)")


def _complex(given: Any) -> Tensor:
    """Cosines and sines as one, complex128."""
    if isinstance(given, Tensor) and given.is_complex():
        return given.to(torch.complex128)
    if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(t, Tensor) for t in given):
        raise Unknown("expected a rotary module that gives cosines and sines")
    return torch.complex(given[0].double(), given[1].double())


def _measure(call: Callable[[Tensor], Any], kind: str, axis: int, num_axes: int, series: Tensor) -> Tensor:
    """Frequencies of one axis by channel (D,), from angles at ever longer positions."""
    place, found = 1 / (4 * max(float(series.abs().max()), 1e-3)), None
    for _ in range(4):
        places = torch.zeros(1, num_axes)
        places[0, axis] = place
        place = float(places[0, axis])
        angles = _complex(call(_at(kind, places))).angle().flatten()
        if found is not None:
            angles = angles + 2 * torch.pi * ((found * place - angles) / (2 * torch.pi)).round()
        found = angles / place
        place *= 1.5 if found is None else 2
    assert found is not None
    return found


def _snap(measured: Tensor, series: Tensor, exact: Tensor | None = None) -> Tensor:
    """Each measured frequency (D, K) is one of a series, or zero; ``exact`` is the series that is then taken."""
    values = torch.cat([torch.zeros(1, dtype=torch.float64), series])
    near = (measured[..., None] - values).abs().argmin(-1)
    if not torch.allclose(values[near], measured, rtol=1e-3, atol=1e-6):
        raise Unknown("expected angles of the frequencies in inv_freq")
    return values[near] if exact is None else torch.cat([values[:1], exact])[near]


def _read_layout(given: Any, omega: Tensor) -> tuple[Layout, Tensor]:
    """The layout of channels with frequencies (D, K), and those of the pairs."""
    if isinstance(given, Tensor):
        return "complex", omega
    if len(omega) % 2 == 0:
        first, second = omega.chunk(2)
        if torch.equal(first, second):
            return "half", first
        if torch.equal(omega[0::2], omega[1::2]):
            return "repeat", omega[0::2]
    if len(omega) % 4 == 0:
        blocks = omega.unflatten(0, (2, 2, -1))
        if torch.equal(blocks[:, 0], blocks[:, 1]):
            return "blocks", blocks[:, 0].flatten(0, 1)
    return "single", omega


def _exact(part: Any, layer_type: str | None, buffer: Tensor) -> Tensor | None:
    """What the configuration says in float64, where the buffer is that, or is rounded from it."""
    config = getattr(part, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if layer_type is not None:
        parameters = parameters.get(layer_type) or {}
    candidates: list[Tensor] = []
    heads = _attribute(config, "num_attention_heads") or _attribute(config, "num_heads")
    width = _attribute(config, "hidden_size")
    head_dim = _attribute(config, "head_dim") or (width // heads if heads and width else None)
    if parameters.get("rope_type", "default") in RULES and head_dim:
        length = _attribute(config, "max_position_embeddings")
        with suppress(ValueError, TypeError, KeyError):
            candidates.append(rope_frequencies(parameters, head_dim, length)[0])
    if isinstance(parameters.get("rope_theta"), (int, float)):
        steps = torch.arange(len(buffer), dtype=torch.float64) / len(buffer)
        candidates.append(float(parameters["rope_theta"]) ** -steps)
    return next((theta for theta in candidates if found_series(buffer, theta) is None), None)


def _attribute(config: Any, name: str) -> Any:
    """None also where layers differ in it, which some configurations raise for."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


# --- functions that turn q and k ---------------------------------------------------------------------------------

Axis = Literal["given", "bhnd", "bnhd", "nhd", "shared"]
NAMES = {"cos": 2, "freqs_cis": 1, "freqs_ci": 1}  # the first argument of the rotary module's, and how many they are


WAYS: tuple[dict[str, Any], ...] = (
    {"pairs": "half"}, {"pairs": "interleaved"}, {"pairs": "interleaved", "gathered": True},
    {"pairs": "half", "reverse": True}, {"pairs": "half", "trailing": True}, {"pairs": "interleaved", "trailing": True},
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How a function turns its tensors.

    Args:
        num_tensors: q and k, or one of them.
        first: name of the argument behind them, and of all in front.
        shape: of the tensors; "given": ``unsqueeze_dim`` says it; "shared": (B, H, N, D), with angles (N, C).
        pairs: of the channels that it takes.
        gathered: the pairs' first channels come first in what it gives, whatever they were.
        reverse: by the negative angles.
        trailing: the last channels of a head are rotated, where it has more.
    """

    num_tensors: int
    first: str
    names: tuple[str, ...]
    shape: Axis
    unsqueeze_dim: int
    others: tuple[tuple[str, Any], ...]  # arguments that must be as they are by default
    pairs: Pairs
    gathered: bool = False
    reverse: bool = False
    trailing: bool = False


@lru_cache(maxsize=1024)
def read_function(function: Callable[..., Any], layout: Layout, num_channels: int) -> Form | None:
    """How a function turns q and k by what a module of this layout gives; None: in no way that is known.

    Args:
        num_channels: pairs.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    names = list(parameters)
    first = next((name for name in names if name in NAMES), None)
    if first is None or names.index(first) not in (1, 2) or (NAMES[first] == 2) != (layout != "complex"):
        return None
    num = names.index(first)
    if NAMES[first] == 2 and names[num + 1 : num + 2] != ["sin"]:
        return None
    others = tuple(
        (name, p.default)
        for name, p in list(parameters.items())[num + NAMES[first] :]
        if name != "unsqueeze_dim" and p.kind is not p.VAR_KEYWORD
    )
    if any(default is inspect.Parameter.empty and name != "position_ids" for name, default in others):
        return None
    shapes: list[Axis] = ["given"] if "unsqueeze_dim" in parameters else ["bhnd", "bnhd", "nhd", "shared"]
    unsqueeze = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else 0
    if not isinstance(unsqueeze, int):
        return None
    blocks: dict[str, Any] = {"pairs": (num_channels // 2, num_channels // 2)}
    for shape in shapes:
        for way in WAYS if layout != "blocks" else (blocks,):
            form = Form(num, first, tuple(names[:num]), shape, unsqueeze, others, **way)
            if _agrees(function, form, layout, num_channels):
                return form
    return None


def _agrees(function: Callable[..., Any], form: Form, layout: Layout, num_channels: int) -> bool:
    """With the channels that are rotated alone, and with more, where it takes them."""
    cases: list[tuple[str, dict[str, Any]]] = [(form.shape, {})]
    if form.shape == "given":
        cases = [("bhnd", {"unsqueeze_dim": 1}), ("bnhd", {"unsqueeze_dim": 2}), ("shared", {"unsqueeze_dim": 0})]
    if ("position_ids", inspect.Parameter.empty) in form.others:  # their number of axes is asked for
        cases = [(shape, {**options, "position_ids": torch.zeros(2, 5, 2)}) for shape, options in cases]
    generator = torch.Generator().manual_seed(0)
    angles = 6 * torch.rand(2, 5, num_channels, generator=generator)
    for shape, options in cases:
        for more in (0, 6):
            width = 2 * num_channels + more
            xs = [torch.randn(2, heads, 5, width, generator=generator) for heads in (3, 1)[: form.num_tensors]]
            expected = [_turn(x, angles[:1] if shape == "shared" else angles, form) for x in xs]
            if shape == "nhd":
                xs, expected = ([x[0].transpose(0, 1) for x in each] for each in (xs, expected))
            elif shape == "bnhd":
                xs, expected = ([x.transpose(1, 2) for x in each] for each in (xs, expected))
            try:
                found = function(*xs, *_given(angles[0] if shape in ("nhd", "shared") else angles, layout), **options)
            except (RuntimeError, IndexError, TypeError, ValueError):
                if not more:
                    return False
                continue
            found = (found,) if form.num_tensors == 1 else found
            if not isinstance(found, tuple) or len(found) != form.num_tensors:
                return False
            for a, b in zip(found, expected, strict=True):
                if not isinstance(a, Tensor) or a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                    return False
    return True


def leaves_prefix(function: Callable[..., Any], form: Form, num_channels: int) -> bool:
    """Whether it leaves tokens alone that stand in front of those with angles."""
    generator = torch.Generator().manual_seed(0)
    angles = 6 * torch.rand(5, num_channels, generator=generator)
    xs = [torch.randn(2, 3, 7, 2 * num_channels, generator=generator) for _ in range(form.num_tensors)]
    expected = [torch.cat([x[:, :, :2], _turn(x[:, :, 2:], angles[None], form)], 2) for x in xs]
    try:
        found = function(*xs, *_given(angles, "half"))
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    found = (found,) if form.num_tensors == 1 else found
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def _given(angles: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """What a rotary module of a layout gives for the pairs' angles (.., C)."""
    if layout == "complex":
        return (torch.polar(torch.ones_like(angles), angles),)
    if layout == "half":
        angles = torch.cat([angles, angles], -1)
    elif layout == "repeat":
        angles = angles.repeat_interleave(2, -1)
    elif layout == "blocks":
        angles = torch.cat([each.repeat(*[1] * (each.ndim - 1), 2) for each in angles.chunk(2, -1)], -1)
    return angles.cos(), angles.sin()


def _turn(x: Tensor, angles: Tensor, form: Form) -> Tensor:
    """x (B, H, N, W), the first channels turned by angles (B, N, C)."""
    width = 2 * angles.shape[-1]
    if form.trailing:
        rest, x = x.tensor_split([x.shape[-1] - width], -1)
        return torch.cat([rest, _turn(x, angles, replace(form, trailing=False))], -1)
    x, rest = x[..., :width], x[..., width:]
    if isinstance(form.pairs, tuple):
        inside = replace(form, pairs="half")
        halves = zip(x.chunk(2, -1), angles.chunk(2, -1), strict=True)
        return torch.cat([*(_turn(each, angle, inside) for each, angle in halves), rest], -1)
    a, b = x.chunk(2, -1) if form.pairs == "half" else (x[..., 0::2], x[..., 1::2])
    cos, sin = angles.cos()[:, None], angles.sin()[:, None] * (-1 if form.reverse else 1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat([a, b], -1) if form.pairs == "half" or form.gathered else torch.stack([a, b], -1).flatten(-2)
    return torch.cat([turned, rest], -1)
