"""Choose the path of a call of linear attention: kernels or reference, whole tensors or shards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import check_offsets
from ...norm import Norm
from ...positions.grid import Grid
from ...reference import activate, no_autocast
from ...reference_linear import Features, attend_encoded, zero_gated_tokens
from ..core.call import NO_TABLES, NormOptions, Tables
from ..core.norms import apply_norm, take_norm
from ..core.operator import is_direct, is_sharded, make_key, remember, remembered
from ..encode.dispatch import is_laid_out
from ..encode.validate import check_input
from .call import LinearCall, LinearOptions, Operands, Results, Sides, State
from .operator import ATTEND
from .validate import (
    Given,
    check_decay_range,
    check_gate,
    check_normalizer,
    check_sequence_softmax,
    no_frequencies,
    validate_linear,
)

WITH_STATE, WITHOUT_STATE = Results(True), Results(False)

__all__ = ["as_state", "run_encoded", "run_linear"]


def as_state(state: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a state (S, Σ), (S, None) or None, as a tuple."""
    if state is None:
        return ()
    if not isinstance(state, (tuple, list)) or not 1 <= len(state) <= 2 or not isinstance(state[0], Tensor):
        what = type(state).__name__
        raise TypeError(
            "state: expected (S, Σ), or (S, None) with normalizer='none', as returned with return_state=True, got "
            f"{what}"
        )
    return tuple(t for t in state if t is not None)


def run_linear(options: LinearOptions, given: Given, sides: Sides, norm: Norm | None = None) -> Any:
    """Run :func:`lrpe_md.linear_attention`; return o, or o and the state."""
    if norm is not None:
        options, weights = take_norm(options, norm, 2)
        given = given._replace(weights=weights)
    q, k, v, gate, cu_seqlens, state, weights, decay = given
    omega, positions, phase, amplitude = sides
    one_phase = type(phase) is not tuple
    direct, key = _call_key(options, given, sides, one_phase)
    known = None if key is None else remembered.get(key)
    if known is None:
        call = validate_linear(options, given, sides)
        if call.spec.dim == -2:
            check_sequence_softmax(options, given, sides)
        if key is not None:
            layout = call.q_layout
            known = LinearCall(call.attention, call.spec, layout, layout, NO_TABLES, NO_TABLES, None, {})
            call = call._replace(launches=remember(key, known).launches)
    else:
        if cu_seqlens is not None:  # the key doesn't cover its values
            check_offsets(cu_seqlens, q.shape[2])
        attention, spec, layout, _, _, _, _, launches, _ = known
        origin = None if positions is None or positions.origin is None else positions.origin_row
        omega = no_frequencies(q) if omega is None else omega
        gain: Any = amplitude
        tables = Tables(omega, phase, None, origin, None, None, gain)
        call = LinearCall(attention, spec, layout, layout, tables, tables, cu_seqlens, launches, weights)
    if decay is not None:
        check_decay_range(decay)
    results = WITH_STATE if options.return_state else WITHOUT_STATE
    o, *after = ATTEND.run(call, Operands(q, k, v, gate, state, decay), options.impl, direct, results)
    return (o, pack_state(after)) if options.return_state else o


def run_encoded(
    options: LinearOptions, given: Given, encoding: Callable[..., Any], positions: Any, norm: Norm | None = None
) -> Any:
    """Run linear attention on q̂ and k̂ from any other encoding: ``encoding(q, k, positions=positions)``.

    With normalizer "unrotated" this runs the reference, because no operator takes q̄ and k̄ as well. A norm is applied
    first, with PyTorch operators.
    """
    check_gate(given.gate, given.k)
    k, v = zero_gated_tokens(given.gate, given.k, given.v)  # before the encoding, which would propagate NaN
    if norm is not None:
        q, k = _normalise_first(options, given.q, k, norm, positions)
        given = given._replace(q=q)
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
    check_decay_range(given.decay)
    with no_autocast(v):
        wide = torch.promote_types(v.dtype, torch.float32)
        q_bar, k_bar = (activate(x.to(wide), options.act, options.dim) for x in (given.q, k))
        o, after = attend_encoded(
            call.attention._replace(normalizer="unrotated"), Features(q_bar, q_hat), Features(k_bar, k_hat), v,
            gate=given.gate, decay=given.decay, cu_seqlens=call.cu_seqlens, state=state, ends=call.q_layout.ends,
            dtype=given.q.dtype,
        )  # fmt: skip
    return (o, pack_state(after)) if options.return_state else o


def _normalise_first(
    options: LinearOptions, q: Tensor, k: Tensor, norm: Norm, positions: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_input("q", q, q)
    check_input("k", k, q, other_length=True)
    if is_sharded(q, k):
        raise ValueError(
            "norm: expected None with DTensors and an encoding without describe(); normalise q and k first"
        )
    options, weights = take_norm(options, norm, 2)
    q_norm, k_norm = apply_norm(options, weights, (q, k), positions)
    return q_norm.to(q.dtype), k_norm.to(k.dtype)


def pack_state(tensors: Sequence[Tensor]) -> State:
    """Return (S, Σ), or (S, None) if there is no Σ."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def _call_key(options: LinearOptions, given: Given, sides: Sides, one_phase: bool) -> tuple[bool, Hashable | None]:
    """Return the result of :func:`is_direct`, and the cache key: everything that validation looks at.

    The key is None for calls that are validated each time: if tensors are not plain, if positions are not a Grid, if
    there is a pair of positions or phases, and if validation creates tensors. The key does not include the values of
    cu_seqlens and decay.
    """
    omega, positions, phase, amplitude = sides
    q, k, v, gate, cu_seqlens, state, weights, decay = given
    phases = (phase,) if one_phase else phase
    direct = is_direct((q, k, v, gate, cu_seqlens, omega, decay, *phases, *state, *weights))
    if (
        not direct
        or not one_phase
        or (type(positions) is not Grid and (positions is not None or options.map is not None))
    ):
        return direct, None
    for option in options:
        if not (option is None or type(option) in (str, int, bool, float, NormOptions)):
            return direct, None
    if amplitude is not None and not is_laid_out(amplitude):
        return direct, None
    sizes = make_key(positions, (q, k, v, gate, cu_seqlens, omega, phase, amplitude, decay, *weights, *state))
    return direct, None if sizes is None else ("linear", options, tuple(map(type, options)), *sizes)
