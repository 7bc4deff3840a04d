"""Check tables of cos and sin that the caller passes instead of frequencies and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...checks import as_integer, can_read, check_boolean, check_dense, show_value, warn_caller
from ...positions.grid import Coordinates, Grid
from ..core.call import Call, CallerTables, CosSin, Layout, Spec
from ..core.memory import accumulator

COS, SIN = TABLE_NAMES = "tables[0] (cos)", "tables[1] (sin)"
FORM = "(N, W), (B, N, W) or (B or 1, H or 1, N, W)"
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


TRANSPOSE = "; x looks like (B, N, H, D), so pass x.transpose(1, 2)"
_EXAMPLES = {1: "N tokens, pass positions=Grid((N,))", 3: "T x H x W patches, pass positions=Grid((T, H, W))"}


def explain_missing(omega: Any, expected: str = "a tensor (N, K)") -> str:
    """Return the error message for a call without positions, including an example with omega's number of axes."""
    num_axes = omega.shape[-1] if isinstance(omega, Tensor) and omega.ndim == 3 else 2
    example = _EXAMPLES.get(num_axes, "H x W patches, pass positions=Grid((H, W))")
    return f"positions: expected a Grid, Coordinates or {expected}, got None; for {example}"


def find_positional(xs: Sequence[Any], *names: str) -> str | None:
    """Return an error message if xs contains arguments that should be keyword arguments. Otherwise, return None.

    ``names`` are the keyword arguments that are missing.
    """
    extra = [type(x).__name__ for i, x in enumerate(xs) if i > 1 or isinstance(x, (Grid, Coordinates))]
    if not extra:
        return None
    after = "q and k" if len(xs) > 2 else "x"
    expected = "a keyword argument" if len(names) == 1 else "keyword arguments"
    keywords = ", ".join(f"{name}=..." for name in names)
    return (
        f"{', '.join(names)}: expected {expected}, got {', '.join(extra)} without a keyword after {after}; pass "
        f"{keywords}"
    )


def take_tables(
    xs: Sequence[Any], tables: Any, prefix: Any, inverse: bool, omega: Any, positions: Any, phase: Any, amplitude: Any
) -> CallerTables:
    """Convert the argument ``tables`` of a public function, and check that the other arguments are compatible."""
    if not isinstance(inverse, bool):
        check_boolean("inverse", inverse)
    if tables is None:
        missing = [name for name, value in (("omega", omega), ("positions", positions)) if value is None]
        if missing and (error := find_positional(xs, *missing)):
            raise TypeError(error)
        if omega is None:
            raise TypeError(
                "omega: expected frequencies (H or 1, channels or pairs, K), got None; pass omega=axial_omega(...) "
                "and positions, or tables=(cos, sin), or use a module such as RotateMd, which has its own frequencies"
            )
        if positions is None:
            raise TypeError(f"{explain_missing(omega)}, or tables=(cos, sin) instead of omega and positions")
        raise ValueError(
            f"prefix: expected 0 without tables, got {show_value(prefix)}; a Grid or Coordinates has its own prefix"
        )
    if not (omega is positions is phase is amplitude is None):
        others = {"omega": omega, "positions": positions, "phase": phase, "amplitude": amplitude}
        name, value = next((name, value) for name, value in others.items() if value is not None)
        raise ValueError(
            f"{name}: expected None with tables, which already contain cos and sin, got {type(value).__name__}; "
            f"leave out tables or {name}"
        )
    num_prefix = None if prefix is None else as_integer(prefix)
    if prefix is not None and (num_prefix is None or isinstance(prefix, bool) or num_prefix < 0):
        raise ValueError(
            "prefix: expected a non-negative integer, the number of tokens before the tables' first row, got "
            f"{show_value(prefix)}"
        )
    if isinstance(tables, Tensor):
        if tables.is_nested or not tables.is_complex():
            raise TypeError(
                f"tables: expected a pair (cos, sin), or one complex tensor cos + i sin, got one tensor of "
                f"{tables.dtype}"
            )
        return CallerTables(CosSin(torch.view_as_real(tables.resolve_conj()), None, inverse), num_prefix)
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        description = f"{len(tables)} values" if isinstance(tables, (tuple, list)) else type(tables).__name__
        raise TypeError(f"tables: expected a pair (cos, sin), or one complex tensor cos + i sin, got {description}")
    cos, sin = tables
    if sin is None:
        check_dense(SIN, sin, FORM)
    return CallerTables(CosSin(cos, sin, inverse), num_prefix)


def check_tables(tables: CallerTables, spec: Spec, xs: tuple[Tensor, ...]) -> Layout:
    """Check that the tables match the validated inputs, and return the layout of the tokens."""
    (cos, sin, _), prefix = tables
    num_prefix = prefix or 0
    if sin is None:
        _check_table("tables (complex)", cos[..., 0], spec, xs)  # pyright: ignore[reportOptionalSubscript]
    else:
        _check_table(COS, cos, spec, xs)
        _check_table(SIN, sin, spec, xs)
        if cos.shape != sin.shape:  # pyright: ignore[reportOptionalMemberAccess]
            raise ValueError(
                f"tables: expected cos and sin of the same shape, got {tables.cos_sin.shape} and {sin.shape}"
            )
    angles = cos[..., 1] if sin is None else sin  # pyright: ignore[reportOptionalSubscript]
    if spec.map == "rotate" and angles.shape[-1] != spec.num_channels and can_read(angles):
        _warn_of_other_layout(angles.detach(), spec)
    num_rows, num_tokens = tables.cos_sin.shape[-2], xs[0].shape[2]
    looks_transposed = xs[0].shape[1] == num_prefix + num_rows
    if num_prefix + num_rows > num_tokens:
        raise ValueError(
            f"tables: expected at most {num_tokens} tokens (x's N), got a prefix of {num_prefix} and {num_rows} rows "
            f"in tables of shape {tuple(tables.cos_sin.shape)}" + TRANSPOSE * looks_transposed
        )
    if prefix is None and num_rows < num_tokens:
        raise ValueError(
            f"tables: expected a row for each of the {num_tokens} tokens (x's N), got {num_rows} rows in "
            f"tables of shape {tuple(tables.cos_sin.shape)}. Pass longer tables, or set prefix= to the number of "
            "tokens without a row, which must come first" + TRANSPOSE * looks_transposed
        )
    return tables.lay_out(num_tokens)


def _warn_of_other_layout(sin: Tensor, spec: Spec) -> None:
    """Warn if the tables repeat each pair's entry, but in a layout other than ``pairs``."""
    if torch.equal(*reference.split_pairs(sin, spec.pairs, spec.sections)):
        return
    for layout, repeated in (("half", "torch.cat([t, t], -1)"), ("interleaved", "t.repeat_interleave(2, -1)")):
        if torch.equal(*reference.split_pairs(sin, layout)):
            shown = spec.sections if spec.pairs == "blocks" else spec.pairs
            warn_caller(
                f"tables: expected the same entry for both channels of a pair (pairs={shown!r}), got the layout of "
                f"{repeated}. The result is not a rotation; pass pairs={layout!r}, or tables with one entry per pair"
            )
            return


def _check_table(name: str, t: Any, spec: Spec, xs: tuple[Tensor, ...]) -> None:
    x = xs[0]
    check_dense(name, t, FORM, x)
    shape = tuple(t.shape)
    if t.dtype not in _REAL:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {t.dtype}")
    if t.ndim not in (2, 3, 4):
        raise ValueError(f"{name}: expected {FORM}, got {shape}")
    widths = [spec.num_channels] if spec.map == "cosine" else [spec.num_channels, 2 * spec.num_channels]
    if shape[-1] not in widths:
        expected = " (pairs) or ".join(map(str, widths)) + (" (rotated channels)" if len(widths) > 1 else " (channels)")
        raise ValueError(f"{name}: expected a last dimension of {expected}, got shape {shape}")
    if t.ndim > 2 and shape[0] not in (1, x.shape[0]):
        raise ValueError(f"{name}: expected {FORM} with B = {x.shape[0]}, got {shape}")
    if t.ndim == 4 and any(shape[1] < 1 or tensor.shape[1] % shape[1] for tensor in xs):
        heads = ", ".join(str(tensor.shape[1]) for tensor in xs)
        raise ValueError(
            f"{name}: expected 1 head or the number of key heads, a divisor of x's heads ({heads}), got {shape[1]} "
            f"in a tensor of shape {shape}"
        )


def store_angles(call: Call) -> Tensor:
    """Return the angles of a call without phase or amplitude, as float32 (H or 1, N, C) in [-π, π]."""
    omega = call.tables.omega.detach()
    coords, on_grid = call.layout.positions(call.tables, omega.device)
    return reference.fold(reference.angles(coords, omega, rotated=on_grid), torch.float32)


def replace_angles(call: Call, angles: Tensor, dtype: torch.dtype) -> Call:
    """Return a copy of the call in which positions are replaced by the cos and sin of stored angles.

    ``dtype`` is the dtype of the inputs.
    """
    begin = call.layout.prefix
    angles = angles[None, :, begin : begin + call.layout.num_grid_tokens].to(accumulator(dtype))
    return call._replace(cos_sin=CosSin(angles.cos(), angles.sin()))
