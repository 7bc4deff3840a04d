"""Validate the arguments of the public functions before any launch, and convert them to a :class:`Call`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor

from ...checks import check_dense, check_precise, fleeting, invalid_positions, rotary_slice, show_value
from ...positions.coordinates import Coordinates
from ...positions.grid import Grid
from ...reference import ACTIVATIONS, MAPS
from ..core.call import (
    NO_WEIGHTS,
    Call,
    CallerTables,
    Layout,
    Options,
    Order,
    Spec,
    Tables,
    Weights,
)
from ..core.norms import check_weights, norm_fields
from .tables import TRANSPOSE, check_tables

ORDERS = get_args(Order)
PAIRS = ("half", "interleaved")
FSDP = (
    ". If FSDP2's mixed precision cast it, first call fully_shard without param_dtype on the module that owns it. "
    "With FSDP1, use MixedPrecision(buffer_dtype=torch.float32), and add the module to ignored_modules if it "
    "is learnable"
)
WHOLE_PACK = (
    "the whole result of lrpe_md.pack as positions (not only its first part), or your own coordinates (N, K) as "
    "lrpe_md.positions.Packed(Coordinates(coords), cu_seqlens)"
)


def validate(
    options: Options,
    xs: tuple[Tensor, ...],
    omega: Tensor,
    positions: Any,
    phase: Tensor | None = None,
    amplitude: float | Tensor | None = None,
    weights: Weights = NO_WEIGHTS,
) -> Call:
    """Check all arguments, and return the validated call."""
    if not 1 <= len(xs) <= 2:
        raise TypeError(f"{options.map}: expected one tensor or two (q, k), got {len(xs)}")
    x = xs[0]
    for name, t in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=True):
        check_input(name, t, x)
    spec = _specify(options, x.shape[-1])
    if type(positions) is CallerTables:
        layout = check_tables(positions, spec, xs)
        if options.norm is not None:
            check_weights(options, weights, xs, layout)
        return Call(spec, layout, Tables(None), None, weights, positions.cos_sin)
    phase_name = "phase"
    if isinstance(phase, Tensor) and not phase.is_nested and phase.ndim == 3 and spec.map == "cosine":
        if not len(phase):
            raise ValueError(f"phase: expected at least one group, got shape {tuple(phase.shape)}")
        phase_name, phase = "phase[0]", phase[0]  # groups only differ in their values
    layout, tables = locate(positions, x)
    if spec.dim == -2 and isinstance(positions, Grid) and not positions.whole:
        raise ValueError("dim: softmax over the sequence (-2) needs the whole sequence, got a shard (start, length)")
    coords = tables.coords
    num_axes = len(layout.sizes) if coords is None else coords.shape[-1]
    if coords is not None and num_axes < 1:
        raise ValueError(f"positions: expected at least one axis, got coords of shape {tuple(coords.shape)}")
    channels = spec.num_channels
    if isinstance(omega, (tuple, list)) and omega and isinstance(omega[0], Tensor):
        raise TypeError(
            f"omega: expected one tensor for both q and k, got {len(omega)}; q·k only depends on relative "
            "positions if both use the same frequencies. To use different frequencies, encode q and k in separate "
            "calls"
        )
    _check_omega("omega", omega, xs, (channels, num_axes), "(H or 1, channels or pairs, axes)")
    amplitude = _lay_out_amplitude(amplitude, channels, x.device)
    for name, t in ((phase_name, phase), ("amplitude", amplitude)):
        if t is not None:
            _check_omega(name, t, xs, (channels,), "(H or 1, channels or pairs)")
    tensors = (("omega", omega), (phase_name, phase), ("amplitude", amplitude))
    head_tensors = [(name, t) for name, t in tensors if t is not None and t.shape[0] > 1]
    for name, t in head_tensors[1:]:
        first_name, first = head_tensors[0]
        if t.shape[0] != first.shape[0]:
            raise ValueError(
                f"{name}: expected 1 head, or {first.shape[0]} like {first_name}, got {t.shape[0]} in a tensor of "
                f"shape {tuple(t.shape)}"
            )
    if options.norm is not None:
        check_weights(options, weights, xs, layout)
    return Call(spec, layout, Tables(omega, phase, *tables[2:6], amplitude), None, weights)


def _specify(options: Options, head_dim: int) -> Spec:
    """Convert the user's options to a spec."""
    check_act(options.act, options.dim)
    if options.order not in ORDERS:
        raise ValueError(f"order: expected one of {ORDERS}, got {show_value(options.order)}")
    if head_dim < 1 and options.map == "cosine":
        raise ValueError(f"x: expected a positive head_dim, got {head_dim}")
    start, width = rotary_slice(options.rotary_dim, head_dim, even=options.map != "cosine")
    channels = MAPS[options.map].channels(width)
    if options.map == "cosine":
        check_unused(options, "pairs")
        pairs, sections = "half", ()
    else:
        check_unused(options, "order")
        pairs, sections = check_pairs(options.pairs, channels)
    fields: Any = {} if options.norm is None else norm_fields(options.norm)
    return Spec(options.map, options.act, options.dim or 0, pairs, start, channels, sections, options.order, **fields)


_UNUSED = {"pairs": "half", "order": "cos_sin", "rotary_dim": None}  # default values of options that not every map has


def check_unused(options: Any, *names: str) -> None:
    """Raise an error if an option is set that this map does not use. The options may be those of linear attention."""
    for name in names:
        value, default = getattr(options, name), _UNUSED[name]
        if not (value is default or (isinstance(value, str) and value == default)):
            raise ValueError(
                f"{name}: expected the default, {default!r}, because map={options.map!r} ignores this option, got "
                f"{show_value(value)}; leave out {name}"
            )


def check_act(act: Any, dim: Any) -> None:
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of {tuple(ACTIVATIONS)}, got {show_value(act)}")
    dims = ACTIVATIONS[act].dims
    if dims and dim not in dims:
        raise ValueError(f"dim: expected -1 (features) or -2 (sequence) for act={act!r}, got {show_value(dim)}")
    if not dims and dim is not None:
        raise ValueError(f"dim: expected None for act={act!r} (only softmax has a dim), got {show_value(dim)}")


def check_pairs(pairs: Any, channels: int) -> tuple[str, tuple[int, ...]]:
    """Return the name of the pairing and, for several blocks, the number of pairs in each block."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        if pairs not in PAIRS:
            raise ValueError(
                f"pairs: expected one of {PAIRS} or the number of pairs in each block, got {show_value(pairs)}"
            )
        return pairs, ()
    sections = tuple(pairs)
    numbers = [isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sections]
    if not all(numbers) or sum(sections) != channels:
        raise ValueError(f"pairs: expected positive numbers of pairs that add up to {channels}, got {sections}")
    return ("half", ()) if len(sections) == 1 else ("blocks", sections)


def _lay_out_amplitude(value: Any, channels: int, device: torch.device) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        if value is not None:
            check_dense("amplitude", value, "(H or 1, channels or pairs)")
        if value is None or value.ndim == 2:
            return value
        if value.ndim == 0:
            return value.expand(1, channels)
        return value[None] if value.ndim == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"amplitude: expected a number or a tensor, got {type(value).__name__}")
    if not -math.inf < value < math.inf:  # math.isfinite would break the graph under torch.compile
        raise ValueError(f"amplitude: expected a finite number, got {show_value(value)}")
    if value == 1:
        return None
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # a CUDA graph
    if is_capturing or torch.compiler.is_compiling() or fleeting():
        return torch.full((1, channels), value, dtype=torch.float64, device=device)
    return _make_constant(float(value), channels, device)


@cache  # unlimited, because a CUDA graph may hold the address
def _make_constant(value: float, channels: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1, channels), value, dtype=torch.float64, device=device)


def check_input(name: str, t: Tensor, x: Tensor, other_length: bool = False, *, packed: str = WHOLE_PACK) -> None:
    """Check q or k. ``packed`` is the advice that the error message gives for packed tokens."""
    check_dense(name, t, "(B, H, N, D)")
    if t.ndim != 4:
        raise ValueError(
            f"{name}: expected shape (B, H, N, D), got {tuple(t.shape)}"
            + (f"; for packed tokens (N, H, D), pass {packed}" if t.ndim == 3 else "")
        )
    if t.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {t.dtype}")
    if t is x:
        return
    if t.dtype != x.dtype or t.device != x.device:
        raise ValueError(f"{name}: expected q's dtype and device, {x.dtype} on {x.device}, got {t.dtype} on {t.device}")
    if t.shape[0] != x.shape[0] or t.shape[3] != x.shape[3] or not (other_length or t.shape[2] == x.shape[2]):
        is_tokens_first = (t.shape[0], t.shape[1], t.shape[3]) == (x.shape[0], x.shape[1], x.shape[3])
        raise ValueError(
            f"{name}: expected q's batch size, number of tokens and head_dim, ({x.shape[0]}, {x.shape[2]}, "
            f"{x.shape[3]}), got shape {tuple(t.shape)}; "
            + ("for (B, N, H, D), pass q.transpose(1, 2) and k.transpose(1, 2); " if is_tokens_first else "")
            + "for tensors of different lengths, pass a tuple of positions (for q, for k)"
        )


def _check_omega(name: str, t: Tensor, xs: tuple[Tensor, ...], tail: tuple[int, ...], form: str) -> None:
    check_dense(name, t, form, xs[0])
    check_precise(name, t.dtype, FSDP)
    if t.ndim != 1 + len(tail) or tuple(t.shape[1:]) != tail:
        advice = f"; pass {name}[None]" if tuple(t.shape) == tail else ""
        raise ValueError(
            f"{name}: expected shape {form} = (H or 1, {', '.join(map(str, tail))}), got {tuple(t.shape)}{advice}"
        )
    for tensor in xs:
        if t.shape[0] < 1 or tensor.shape[1] % t.shape[0]:
            raise ValueError(
                f"{name}: expected 1 head or the number of key heads, a divisor of x's {tensor.shape[1]} heads, got "
                f"{t.shape[0]} in a tensor of shape {tuple(t.shape)}"
            )


def remedy_layout(x: Tensor, positions: Any) -> str:
    """Return advice if axes of ``x`` or of the positions are missing or in the wrong order, and "" otherwise."""
    coords = positions.coords if isinstance(positions, Coordinates) else positions
    if isinstance(coords, Tensor) and coords.ndim == 2 and coords.shape in ((x.shape[0], x.shape[2]), (1, x.shape[2])):
        return "; for position ids (B, N) on one axis, pass positions[..., None]"
    num_tokens = coords.shape[-2] if isinstance(coords, Tensor) and coords.ndim > 1 else None
    if x.shape[1] == getattr(positions, "num_tokens", num_tokens) != x.shape[2]:
        return TRANSPOSE
    if isinstance(coords, Tensor) and coords.ndim > 1 and coords.shape[-1] == x.shape[2] != coords.shape[-2]:
        return "; for coordinates (K, N), pass positions.mT"
    return ""


def remedy(x: Tensor, positions: Any) -> str:
    """Return advice for an error about the number of tokens, or "" if the shapes don't reveal the mistake."""
    if advice := remedy_layout(x, positions):
        return advice
    if isinstance(positions, Grid) and positions.whole and positions.num_tokens < x.shape[2]:
        return "; count tokens that are not on the grid in prefix= or suffix="
    if isinstance(positions, Coordinates) and positions.num_tokens < x.shape[2]:
        rest = x.shape[2] - positions.num_tokens
        return f"; count tokens without coordinates in prefix= or suffix=, as in Coordinates(coords, prefix={rest})"
    if isinstance(positions, Coordinates) and positions.coords.shape[-2] == x.shape[2]:
        return "; prefix and suffix tokens have no coordinates, so leave out their rows, or omit prefix= and suffix="
    return ""


def locate(positions: Any, x: Tensor) -> tuple[Layout, Tables]:
    """Return the layout of x's tokens, and the tables that define their positions."""
    if isinstance(positions, Grid):
        return _locate_grid(positions, x)
    if isinstance(positions, Tensor):
        positions = Coordinates(positions)
    elif not isinstance(positions, Coordinates):
        raise invalid_positions(positions)
    coords, rotated, num_tokens = positions.coords, positions.rotated, x.shape[2]
    if positions.num_tokens != num_tokens:
        raise ValueError(
            f"positions: expected {num_tokens} tokens (x's N), got prefix {positions.prefix} + coords "
            f"{tuple(coords.shape)} + suffix {positions.suffix} = {positions.num_tokens}{remedy(x, positions)}"
        )
    if coords.ndim == 3 and coords.shape[0] != x.shape[0]:
        if coords.shape[0] != 1:
            raise ValueError(
                f"positions: expected coords (B, N, K) with B = {x.shape[0]} or 1, got {tuple(coords.shape)}"
            )
        coords, rotated = coords[0], None if rotated is None else rotated[0]
    if coords.device != x.device:
        raise ValueError(
            f"positions: expected coords on x's device {x.device}, got {coords.device}; build them with "
            "device=x.device (pack, pad, compose), or move them with .to()"
        )
    return Layout(num_tokens, positions.prefix, coords.shape[-2], 0, ()), Tables(None, coords=coords, rotated=rotated)


def _locate_grid(grid: Grid, x: Tensor) -> tuple[Layout, Tables]:
    num_tokens = x.shape[2]
    if grid.num_tokens != num_tokens:
        raise ValueError(
            f"positions: expected {num_tokens} tokens (x's N), got prefix {grid.prefix} + grid "
            f"{' x '.join(map(str, grid.shape))} + suffix {grid.suffix} = {grid.total}"
            + ("" if grid.whole else f", of which the shard has {grid.num_tokens}")
            + remedy(x, grid)
        )
    origin = grid.origin
    if origin is not None:
        if origin.ndim == 2 and origin.shape[0] != x.shape[0]:
            raise ValueError(
                f"positions: expected an origin or offset for each of the B = {x.shape[0]} samples, "
                f"got {origin.shape[0]}"
            )
        if origin.device != x.device:
            raise ValueError(
                f"positions: expected the origin on x's device {x.device}, got {origin.device}; move it with .to()"
            )
    layout = Layout(num_tokens, grid.prefix, grid.num_grid_tokens, grid.start, tuple(grid.shape))
    return layout, Tables(None, origin=origin, affine=grid.affine(x.device))
