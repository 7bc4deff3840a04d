"""Validate calls to linear attention, or look them up in the cache, and run them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import check_offsets
from ...norm import Norm
from ...positions.grid import Grid
from ...positions.sequences import Packed
from ...reference import activate, no_autocast
from ...reference_linear import Features, attend_encoded, zero_gated_tokens
from ..core.call import NO_TABLES, NO_WEIGHTS, Tables, Weights
from ..core.norms import apply_norm, take_norm
from ..core.operator import cache_call, call_cache, is_direct, is_sharded, make_key
from ..encode.dispatch import is_laid_out
from ..encode.validate import check_input
from .call import LinearCall, LinearOptions, Operands, Results, Sides, State
from .operator import ATTEND
from .validate import (
    PACKED,
    check_decay_range,
    check_gate,
    check_normalizer,
    check_sequence_softmax,
    make_empty_frequencies,
    validate_linear,
)

WITH_STATE, WITHOUT_STATE = Results(True), Results(False)


def as_state(state: Any) -> tuple[Tensor, ...]:
    """Convert a state (S, Σ), (S, None) or None to a tuple of its tensors."""
    if state is None:
        return ()
    if not isinstance(state, (tuple, list)) or not 1 <= len(state) <= 2 or not isinstance(state[0], Tensor):
        type_name = type(state).__name__
        raise TypeError(
            "state: expected (S, Σ), or (S, None) with normalizer='none', as returned with return_state=True, got "
            f"{type_name}"
        )
    return tuple(t for t in state if t is not None)


def run_linear_attention(options: LinearOptions, operands: Operands, sides: Sides, norm: Norm | None = None) -> Any:
    """Implement :func:`lrpe_md.linear_attention`. Return o, or (o, state) if options.return_state is set."""
    sides, weights = _split_packed(sides) if type(sides.positions) is Packed else sides, NO_WEIGHTS
    if norm is not None:
        options, weights = take_norm(options, norm, 2)
    omega, positions, phase, amplitude, cu_seqlens = sides
    direct, key = _call_key(options, operands, sides, weights)
    cached_call = None if key is None else call_cache.get(key)
    if cached_call is None:
        call = validate_linear(options, operands, sides, weights)
        if call.spec.dim == -2:
            check_sequence_softmax(options, operands, sides)
        if key is not None:
            layout = call.q_layout
            cached_call = LinearCall(call.attention, call.spec, layout, layout, NO_TABLES, NO_TABLES, None, {})
            call = call._replace(launches=cache_call(key, cached_call).launches)
    else:
        if cu_seqlens is not None:  # the cache key doesn't contain the values of cu_seqlens
            check_offsets(cu_seqlens, operands.q.shape[2])
        attention, spec, layout, _, _, _, _, launches, _ = cached_call
        origin = None if positions is None else positions.origin
        omega = make_empty_frequencies(operands.q) if omega is None else omega
        any_amplitude: Any = amplitude
        tables = Tables(omega, phase, None, origin, None, None, any_amplitude)
        call = LinearCall(attention, spec, layout, layout, tables, tables, cu_seqlens, launches, weights)
    if operands.decay is not None:
        check_decay_range(operands.decay)
    results = WITH_STATE if options.return_state else WITHOUT_STATE
    o, *final_state = ATTEND.run(call, operands, options.impl, direct, results)
    return (o, pack_state(final_state)) if options.return_state else o


def _split_packed(sides: Sides) -> Sides:
    """Split the positions of packed sequences into coordinates and cu_seqlens."""
    if sides.cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens: expected None with positions from lrpe_md.pack, which already contain cu_seqlens, got both"
        )
    positions, cu_seqlens = sides.positions
    return sides._replace(positions=positions, cu_seqlens=cu_seqlens)


def run_encoded(
    encoding: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, positions: Any, *, gate: Tensor | None,
    cu_seqlens: Tensor | None, state: Any, decay: Tensor | None, norm: Norm | None, **others: Any,
) -> Any:  # fmt: skip
    """Run linear attention on the outputs q̂ and k̂ of ``encoding(q, k, positions=positions)``.

    If there is a norm, PyTorch operators apply it to q and k first. With normalizer "unrotated", the reference runs,
    because the operators don't accept both q̄ and q̂. ``others`` are the other arguments of
    :func:`lrpe_md.linear_attention`.
    """
    options = LinearOptions(None, getattr(encoding, "act", "none"), getattr(encoding, "dim", None), **others)
    sides, state = Sides(positions=positions, cu_seqlens=cu_seqlens), as_state(state)
    sides = _split_packed(sides) if type(positions) is Packed else sides
    operands = Operands(q, k, v, gate, state, decay)
    check_input("q", q, q, packed=PACKED)
    check_gate(gate, k)
    k, v = zero_gated_tokens(gate, k, v)  # before the encoding, which would propagate NaN
    if norm is not None:
        check_input("k", k, q, other_length=True)
        if is_sharded(q, k):
            raise ValueError(
                "norm: expected None with DTensors and an encoding without describe(); normalise q and k first"
            )
        own_options, weights = take_norm(options, norm, 2)
        dtype = q.dtype
        q, k = (x.to(dtype) for x in apply_norm(own_options, weights, (q, k), sides.positions))
    q_hat, k_hat = encoding(q, k, positions=sides.positions)
    plain_options, encoded = options._replace(map=None, act="none", dim=None), Operands(q_hat, k_hat, v, *operands[3:])
    if options.dim == -2:
        check_sequence_softmax(options, operands, sides)
    if options.normalizer != "unrotated":
        return run_linear_attention(plain_options, encoded, sides)
    check_normalizer(options.normalizer, options.act)
    call = validate_linear(plain_options._replace(normalizer="none"), encoded._replace(state=state[:1]), sides)
    expected = [(*t.shape[:2], k.shape[3]) for t in state[:1]]
    if [tuple(t.shape) for t in state[1:]] != expected:
        raise ValueError(
            f"state: expected (S, Σ) with Σ of shape {expected[0]}, got shapes {[tuple(t.shape) for t in state]}"
        )
    check_decay_range(decay)
    with no_autocast(v):
        wide_dtype = torch.promote_types(v.dtype, torch.float32)
        q_bar, k_bar = (activate(x.to(wide_dtype), options.act, options.dim) for x in (q, k))
        o, final_state = attend_encoded(
            call.attention._replace(normalizer="unrotated"), Features(q_bar, q_hat), Features(k_bar, k_hat), v,
            gate=gate, decay=decay, cu_seqlens=call.cu_seqlens, state=state, ends=call.q_layout.ends, dtype=q.dtype,
        )  # fmt: skip
    return (o, pack_state(final_state)) if options.return_state else o


def pack_state(tensors: Sequence[Tensor]) -> State:
    """Return (S, Σ), or (S, None) if there is no Σ."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def _call_key(
    options: LinearOptions, operands: Operands, sides: Sides, weights: Weights
) -> tuple[bool, Hashable | None]:
    """Return the result of :func:`is_direct` and a cache key that covers everything validation depends on.

    The key is None if the call must be validated every time. This is the case for calls that aren't direct, positions
    other than a Grid, pairs of positions or phases, and arguments from which validation creates tensors. The values of
    cu_seqlens and decay aren't part of the key.
    """
    omega, positions, phase, amplitude, cu_seqlens = sides
    q, k, v, gate, state, decay = operands
    phases = phase if type(phase) is tuple else (phase,)
    direct = is_direct((q, k, v, gate, cu_seqlens, omega, decay, *phases, *state, *weights))
    can_cache = type(positions) is Grid or (positions is None and options.map is None)
    if not direct or type(phase) is tuple or not can_cache:
        return direct, None
    for option in options:
        if not (option is None or type(option) in (str, int, bool, float, Norm)):
            return direct, None
    if amplitude is not None and not is_laid_out(amplitude):
        return direct, None
    sizes = make_key(positions, (q, k, v, gate, cu_seqlens, omega, phase, amplitude, decay, *weights, *state))
    return direct, None if sizes is None else ("linear", options, tuple(map(type, options)), *sizes)
