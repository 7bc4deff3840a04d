"""Which path a call of linear attention takes: the kernels or the reference, whole tensors or shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..positions.grid import Grid
from ..reference import activate, no_autocast
from ..reference_linear import Features, attend_encoded, take_out
from . import boundary, linear_boundary
from .call import Tables, remember, remembered
from .dispatch import use_triton
from .linear_call import LinearCall, LinearKnown, LinearOptions, Operands, Sides, State, ends_of
from .linear_plan import fits_kernels
from .linear_validate import (
    Given,
    check_gate,
    check_normalizer,
    check_sequence_softmax,
    no_frequencies,
    validate_linear,
)  # fmt: skip
from .sharding import is_sharded

__all__ = ["run_encoded", "run_linear"]


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
    o, after = _run_checked(call, Operands(q, k, v, gate, state), options.impl, options.return_state, direct)
    return (o, pack_state(after)) if options.return_state else o


def _run_checked(
    call: LinearCall, operands: Operands, impl: str, return_state: bool, direct: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A checked call on the path that ``impl`` and the inputs ask for."""
    q_tables, k_tables, inputs = call.q_tables, call.k_tables, (operands.q,)
    if not direct and is_sharded(*operands[:4], *operands.state, q_tables.omega, q_tables.phase):
        from . import linear_sharding

        def run(call: LinearCall, operands: Operands, return_state: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
            tables = (*call.q_tables[:2], *call.k_tables[:2])
            direct = boundary.is_direct((*operands[:4], *operands.state, *tables))
            return _run_checked(call, operands, impl, return_state, direct)

        return linear_sharding.run_shards(run, call, operands, return_state)
    if call.spec.dim == -2:
        operands = operands._replace(q=_soften(operands.q), k=_soften(operands.k))
        call = call._replace(spec=call.spec._replace(act="none", dim=0))
    if _fits_kernels(impl, call, operands) and (
        use_triton(impl, inputs, q_tables) and (k_tables is q_tables or use_triton(impl, inputs, k_tables))
    ):
        if direct:
            _, _, *others = q_tables
            direct = boundary.is_plain(others) and (k_tables is q_tables or boundary.is_plain(k_tables))
        return linear_boundary.run_kernels(call, operands, return_state, direct)
    return linear_boundary.run_reference(call, operands)


def _fits_kernels(impl: str, call: LinearCall, operands: Operands) -> bool:
    """Whether the kernels take it: on a GPU no float64, for which Triton has no products, and no state too large."""
    q, v = operands.q, operands.v
    if not q.is_cuda:
        return True
    features = call.spec.out_dim(q.shape[3])
    fits = fits_kernels(v.shape[3], features, q.element_size())
    if impl == "triton" and (q.dtype == torch.float64 or not fits):
        what = "float64" if q.dtype == torch.float64 else f"a state of {features} x {v.shape[3]} elements"
        raise ValueError(f"impl: 'triton' has no kernel for {what} in {q.dtype} on a GPU; use impl='auto'")
    return fits and q.dtype != torch.float64


def run_encoded(options: LinearOptions, given: Given, encoding: Callable[..., Any], positions: Any) -> Any:
    """Linear attention of q̂ and k̂ as an encoding of another make forms them: ``encoding(q, k, positions=positions)``.

    With normalizer "unrotated", whose q̄ and k̄ no operator takes beside them, by the reference.
    """
    check_gate(given.gate, given.k)
    k, v = take_out(given.gate, given.k, given.v)  # before the encoding, through which NaN would pass
    q_hat, k_hat = encoding(given.q, k, positions=positions)
    plain, encoded = options._replace(map=None, act="none", dim=None), given._replace(q=q_hat, k=k_hat, v=v)
    sides = Sides(positions=positions)
    if options.dim == -2:
        check_sequence_softmax(options, given, sides)
    if options.normalizer != "unrotated":
        return run_linear(plain, encoded, sides)
    check_normalizer(options.normalizer, options.act)
    state = given.state
    call = validate_linear(plain._replace(normalizer="none"), encoded._replace(state=state[:1]), sides)
    expected = [(*t.shape[:2], k.shape[3]) for t in state[:1]]
    if [tuple(t.shape) for t in state[1:]] != expected:
        raise ValueError(f"state: expected (S, Σ), Σ of shape {expected[0]}, got {[tuple(t.shape) for t in state]}")
    with no_autocast(v):
        wide = torch.promote_types(v.dtype, torch.float32)
        q_bar, k_bar = (activate(x.to(wide), options.act, options.dim) for x in (given.q, k))
        o, after = attend_encoded(
            call.attention._replace(normalizer="unrotated"), Features(q_bar, q_hat), Features(k_bar, k_hat), v,
            gate=given.gate, cu_seqlens=call.cu_seqlens, state=state, ends=ends_of(call.q_layout), dtype=given.q.dtype,
        )  # fmt: skip
    return (o, pack_state(after)) if options.return_state else o


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
