"""Which path a call of linear attention takes: the kernels or the reference, whole tensors or shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..positions.grid import Grid
from ..reference import no_autocast
from . import boundary, linear_boundary
from .call import Tables, remember, remembered
from .dispatch import use_triton
from .linear_boundary import Operands
from .linear_call import LinearCall, LinearKnown, LinearOptions, Sides, State
from .linear_validate import Given, check_sequence_softmax, no_frequencies, validate_linear

__all__ = ["run_linear"]


def run_linear(options: LinearOptions, given: Given, sides: Sides) -> Any:
    """What :func:`lrpe_md.linear_attention` does: o, or o and the state."""
    q, k, v, gate, cu_seqlens, state = given
    omega, positions, phase, amplitude = sides
    one_phase = type(phase) is not tuple
    tensors = (q, k, v, gate, cu_seqlens, omega, *((phase,) if one_phase else phase), *state)
    direct = boundary.is_direct(tensors)
    key = _call_key(options, given, sides) if direct and one_phase else None
    known = None if key is None else remembered.get(key)
    if known is None:
        call = validate_linear(options, given, sides)
        if call.spec.dim == -2:
            check_sequence_softmax(options, given, sides)
        if key is not None:
            known = remember(key, LinearKnown(call.attention, call.spec, call.q_layout, {}))
            call = call._replace(launches=known.launches)
    else:
        attention, spec, layout, launches = known
        origin = None if positions is None or positions.origin is None else positions.origin_row
        omega = no_frequencies(q) if omega is None else omega
        gain: Any = amplitude
        tables = Tables(omega, phase, None, origin, None, None, gain)
        call = LinearCall(attention, spec, layout, layout, tables, tables, cu_seqlens, launches)
    if call.spec.dim == -2:
        q, k = _soften(q), _soften(k)
        call = call._replace(spec=call.spec._replace(act="none", dim=0))
    o, after = _run_checked(call, Operands(q, k, v, gate, state), options, direct)
    return (o, pack_state(after)) if options.return_state else o


def _run_checked(
    call: LinearCall, operands: Operands, options: LinearOptions, direct: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A checked call on the path that ``impl`` and the inputs ask for."""
    q_tables, k_tables, inputs = call.q_tables, call.k_tables, (operands.q,)
    if use_triton(options.impl, inputs, q_tables) and (
        k_tables is q_tables or use_triton(options.impl, inputs, k_tables)
    ):
        if direct:
            _, _, *others = q_tables
            direct = boundary.is_plain(others) and (k_tables is q_tables or boundary.is_plain(k_tables))
        return linear_boundary.run_kernels(call, operands, options.return_state, direct)
    return linear_boundary.run_reference(call, operands)


def pack_state(tensors: tuple[Tensor, ...]) -> State:
    """(S, Σ), Σ None where there is none."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def _soften(x: Tensor) -> Tensor:
    """Softmax over the sequence, in front of the kernels."""
    with no_autocast(x):
        return torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -2).to(x.dtype)


def _call_key(options: LinearOptions, given: Given, sides: Sides) -> tuple | None:
    """All that :func:`validate_linear` looks at, where its result holds no tensors but those that were given: checking
    again would find the same."""
    omega, where, phase, amplitude = sides
    if where is None:
        if options.map is not None:
            return None
    elif type(where) is not Grid or where.scale is not None or where.shift is not None:
        return None
    elif where.origin is not None:
        origin = where.origin
        where = (
            where.shape, where.prefix, where.suffix, where.start, where.length, origin.shape, origin.dtype,
            origin.device,
        )  # fmt: skip
    for option in options:
        if not (option is None or type(option) in (str, int, bool, float)):
            return None
    if amplitude is not None and not (isinstance(amplitude, Tensor) and amplitude.ndim == 2):
        return None
    q, k, v, gate, cu_seqlens, state = given
    if cu_seqlens is not None and cu_seqlens.dtype != torch.int32:
        return None
    shapes = []
    for t in (q, k, v, gate, cu_seqlens, omega, phase, amplitude, *state):
        if t is None:
            shapes.append(None)
        elif isinstance(t, Tensor) and not t.is_nested and t.layout is torch.strided:
            shapes.append((t.shape, t.dtype, t.device))
        else:
            return None
    return "linear", options, where, tuple(map(type, options)), *shapes
