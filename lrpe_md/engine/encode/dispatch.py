"""Validate calls to encodings, or look them up in the cache, and run them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...checks import rotary_slice, split_pair
from ...norm import Norm
from ...positions.coordinates import Coordinates
from ...positions.grid import Grid
from ...positions.sequences import Packed, refuse_mixing
from ...reference import activate
from ..core.call import NO_TABLES, NO_WEIGHTS, Call, CallerTables, Options, Tables, Weights
from ..core.memory import accumulator, memory_order
from ..core.norms import apply_norm, of_tensor, take_norm
from ..core.operator import cache_call, call_cache, is_direct, is_plain, make_key, use_triton
from .operator import ENCODE, run_in_place
from .output import Target, check_places, check_target, write
from .tables import TABLE_NAMES
from .validate import check_act, check_input, validate
from .views import encode_packed, order_outs, unpack_positions


def run_encoding(
    options: Options,
    xs: tuple[Tensor, ...],
    omega: Any,
    positions: Any,
    phase: Any = None,
    amplitude: Any = None,
    norm: Norm | None = None,
    target: Target | None = None,
) -> Any:
    """Implement :func:`lrpe_md.cosine` and :func:`lrpe_md.rotate` for one tensor, or for q and k."""
    caller_tables = positions if type(positions) is CallerTables else None
    if type(positions) is Packed or (caller_tables is not None and _are_packed(xs)):
        return _encode_views(options, xs, positions, (omega, phase, amplitude, norm), target)
    if options.rotary_dim is not None and options.map == "cosine":
        return _run_part(options, xs, omega, positions, phase, amplitude, norm, target)
    weights = NO_WEIGHTS
    if norm is not None:
        options, weights = take_norm(options, norm, len(xs))
    if type(phase) is tuple or (type(positions) is tuple and positions and isinstance(positions[0], _POSITIONS)):
        return _run_each(options, xs, omega, positions, phase, amplitude, weights, target)
    direct, key = _call_key(options, xs, omega, positions, phase, amplitude, weights)
    cached_call = None if key is None else call_cache.get(key)
    if cached_call is None:
        call = validate(options, xs, omega, positions, phase, amplitude, weights)
        if key is not None:
            call = call._replace(launches=cache_call(key, Call(call.spec, call.layout, NO_TABLES, {})).launches)
        constants = ENCODE.list_constants(call)
    elif caller_tables is not None:
        cos_sin, constants = caller_tables.cos_sin, ()
        call = Call(cached_call.spec, cached_call.layout, NO_TABLES, cached_call.launches, weights, cos_sin)
    else:
        grid: Any = positions
        constants = grid.origin, amplitude
        tables = Tables(omega, phase, None, grid.origin, None, None, amplitude)
        call = Call(cached_call.spec, cached_call.layout, tables, cached_call.launches, weights)
    if target is None and call.tables.phase is phase and (phase is None or phase.ndim == 2):
        impl = options.impl
        if direct and (impl == "reference" or (impl == "auto" and not xs[0].is_cuda)):
            ys = ENCODE.run_reference(call, xs)
        else:
            ys = ENCODE.run(call, xs, impl, direct, (), constants)
    elif target is None:
        ys = run_call(call, xs, phase, options.impl, direct)
    else:
        ys = _run_with_target(call, xs, phase, options.impl, direct, target)
    return ys[0] if len(xs) == 1 else ys


def _are_packed(xs: tuple[Any, ...]) -> bool:
    """Return whether the first tensor has packed tokens, (N, H, D). :func:`encode_packed` checks the other tensors."""
    return len(xs) > 0 and isinstance(xs[0], Tensor) and xs[0].ndim == 3


_POSITIONS = (Grid, Coordinates, Tensor)


def _call_key(
    options: Options, xs: Any, omega: Any, positions: Any, phase: Any, amplitude: Any, weights: Weights
) -> tuple[bool, Hashable | None]:
    """Return the result of :func:`is_direct`, and a cache key that covers everything that :func:`validate` depends on.

    The key is None if the call must be validated every time. This is the case for calls that aren't direct, for
    positions other than a Grid or tables, and for arguments from which validation creates tensors.
    """
    has_tables = type(positions) is CallerTables
    tensors = (*xs, *positions.cos_sin[:2]) if has_tables else (*xs, omega, phase)
    if weights is not NO_WEIGHTS:
        tensors = (*tensors, *weights)
    direct = is_direct(tensors)
    if not direct or not 1 <= len(xs) <= 2 or xs[0] is None or xs[-1] is None:
        return direct, None
    for option in options:
        kind = type(option)
        if not (option is None or kind is str or kind is int or kind is Norm):  # because 1.0 and True equal 1
            return direct, None
    if has_tables:
        (cos, _, inverse), prefix = positions
        sizes = None if cos is None else make_key((prefix, inverse), tensors)
    else:
        can_cache = omega is not None and type(positions) is Grid and (amplitude is None or is_laid_out(amplitude))
        sizes = make_key(positions, (*tensors, amplitude)) if can_cache else None
    return direct, None if sizes is None else (options, len(xs), *sizes)


def is_laid_out(amplitude: Any) -> bool:
    """Return whether an amplitude is already a tensor (H or 1, C)."""
    return isinstance(amplitude, Tensor) and amplitude.ndim == 2


def run_call(
    call: Call, xs: tuple[Tensor, ...], phase: Tensor | None, impl: str, direct: bool, groups: int = 1
) -> tuple[Tensor, ...]:
    """Run a validated call. ``impl`` and the inputs determine whether the kernels or the reference run.

    Each group of phases runs separately. The outputs of the groups are then concatenated along the channels.
    """
    if phase is not None:
        if phase.ndim == 3:
            outputs = [run_call(call, xs, group, impl, direct) for group in phase.unbind()]
            return tuple(map(_join_groups, zip(*outputs, strict=True)))
        if call.tables.phase is not phase:
            call = call._replace(tables=call.tables._replace(phase=phase))
    if groups > 1:
        return tuple(_join_groups((y,) * groups) for y in run_call(call, xs, phase, impl, direct))
    return ENCODE.run(call, xs, impl, direct)


def _run_with_target(
    call: Call, xs: tuple[Tensor, ...], phase: Any, impl: str, direct: bool, target: Target, groups: int = 1
) -> tuple[Tensor, ...]:
    """Run a validated call like :func:`run_call`, and return its outputs in the target.

    Kernels write to the target directly if they can. Otherwise, the outputs are copied to the target.
    """
    direct = direct and is_plain(target.tensors)
    _check_call_target(call, xs, phase, direct, target, groups)
    if groups == 1 and (phase is None or phase.ndim == 2) and direct and target.can_launch(call):
        call = call if call.tables.phase is phase else call._replace(tables=call.tables._replace(phase=phase))
        constants = ENCODE.list_constants(call)
        if use_triton(impl, xs[0], constants) and is_plain(constants):
            return run_in_place(call, xs, target.outs, target.start)
    return write(target, run_call(call, xs, phase, impl, direct, groups))


def _check_call_target(
    call: Call, xs: tuple[Tensor, ...], phase: Any, direct: bool, target: Target, groups: int
) -> None:
    num_groups = len(phase) if phase is not None and phase.ndim == 3 else groups
    sources = (*call.tables, *call.weights, *call.cos_sin[:2], phase)
    names = (*Tables._fields, *Weights._fields, *TABLE_NAMES, "phase")
    check_target(target, xs, sources, names, num_groups * call.spec.out_dim(xs[0].shape[3]), direct)


def _run_each(
    options: Options,
    xs: tuple[Tensor, ...],
    omega: Tensor,
    positions: Any,
    phase: Any,
    amplitude: Any,
    weights: Weights,
    target: Target | None = None,
) -> tuple[Tensor, ...]:
    """Encode q and k in separate launches, because they have separate positions or phases."""
    pairs = split_pair("positions", positions, len(xs)), split_pair("phase", phase, len(xs))
    if len(xs) == 2:
        q, k = xs
        check_input("q", q, q)
        check_input("k", k, q, other_length=True)
    jobs: list[Any] = []
    for i, (x, x_positions, phi) in enumerate(zip(xs, *pairs, strict=True)):  # check all arguments before any launch
        call = validate(options, (x,), omega, x_positions, phi, amplitude, of_tensor(weights, i))
        jobs.append((call, (x,), phi, options.impl, is_direct((x, omega, phi, *call.weights))))
    groups, ys = _count_groups(phase), ()
    if target is None:
        for job in jobs:
            ys += run_call(*job, groups=groups)
        return ys
    targets = [target.select(i) for i in range(len(xs))]
    for (call, inputs, phi, _, direct), x_target in zip(jobs, targets, strict=True):  # also check all targets
        _check_call_target(call, inputs, phi, direct and is_plain(x_target.tensors), x_target, groups)
        if options.impl != "triton":  # kernels skip tokens that don't fit, without an error
            check_places(x_target, [inputs[0].shape[2]])
    for job, x_target in zip(jobs, targets, strict=True):
        ys += _run_with_target(*job, target=x_target, groups=groups)
    return ys


def _encode_views(
    options: Options, xs: tuple[Tensor, ...], positions: Any, others: tuple[Any, ...], target: Target | None
) -> Any:
    """Encode packed tokens (N, H, D) as views (1, H, N, D). ``others`` are omega, phase, amplitude and norm."""
    omega, phase, amplitude, norm = others
    num_tokens: int | None = None
    if isinstance(positions, Packed):
        positions = unpack_positions(positions, options.dim)
        num_tokens = positions.num_tokens
    else:
        refuse_mixing(options.dim)
    target = None if target is None else target._replace(outs=order_outs(target.outs, xs))

    def run(*views: Tensor) -> Any:
        return run_encoding(options, views, omega, positions, phase, amplitude, norm, target)

    return encode_packed(run, xs, num_tokens)


def _count_groups(phase: Any) -> int:
    """Return the number of groups of phases. Raise an error if this number differs between q and k."""
    group_counts = {len(phi) for phi in phase if phi is not None and phi.ndim == 3} if type(phase) is tuple else set()
    if len(group_counts) > 1:
        raise ValueError(
            f"phase: expected the same number of groups for q and k, got shapes {[tuple(phi.shape) for phi in phase]}"
        )
    return max(group_counts, default=1)


def _run_part(
    options: Options,
    xs: tuple[Tensor, ...],
    omega: Any,
    positions: Any,
    phase: Any,
    amplitude: Any,
    norm: Norm | None,
    target: Target | None,
) -> Any:
    """Apply the cosine map to the channels that ``rotary_dim`` selects.

    The channels before and after them become x̄.
    """
    if not 1 <= len(xs) <= 2:
        raise TypeError(f"{options.map}: expected one tensor or two (q, k), got {len(xs)}")
    for name, x in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=True):
        check_input(name, x, xs[0], other_length=True)
    check_act(options.act, options.dim)
    act, dim, head_dim = options.act, options.dim, xs[0].shape[3]
    start, width = rotary_slice(options.rotary_dim, head_dim, even=False)
    options = options._replace(rotary_dim=None)
    # A norm or softmax over features needs all channels. So both are applied first, in the accumulator's dtype.
    activates_first, wide_xs = dim == -1 or norm is not None, xs
    if norm is not None:
        with_norm, weights = take_norm(options, norm, len(xs))
        wide_xs = apply_norm(with_norm, weights, xs, positions)
    if activates_first:
        wide_xs = tuple(activate(x.to(accumulator(x.dtype)), act, dim) for x in wide_xs)
        options = options._replace(act="none", dim=None)
    mapped_xs = run_encoding(
        options, tuple(x[..., start : start + width] for x in wide_xs), omega, positions, phase, amplitude
    )
    ys: list[Tensor] = []
    for x, wide_x, y in zip(xs, wide_xs, mapped_xs if len(xs) == 2 else (mapped_xs,), strict=True):
        other_channels = (wide_x[..., :start], wide_x[..., start + width :])
        if not activates_first:
            other_channels = tuple(activate(t.to(accumulator(x.dtype)), act, dim) for t in other_channels)
        head, tail = (t.to(x.dtype) for t in other_channels)
        ys.append(_concatenate((head, y.to(x.dtype), tail), memory_order(x)))
    if target is not None:
        candidates: dict[str, Any] = {"omega": omega, "phase": phase, "amplitude": amplitude}
        if type(positions) is CallerTables:
            candidates = dict(zip(TABLE_NAMES, positions.cos_sin[:2], strict=True))
        sources = {name: t for name, t in candidates.items() if isinstance(t, Tensor)}
        direct = is_direct((*xs, *sources.values(), *target.tensors))
        check_target(target, xs, [*sources.values()], [*sources], ys[0].shape[3], direct)
        ys = list(write(target, ys))
    return tuple(ys) if len(xs) == 2 else ys[0]


def _join_groups(ys: tuple[Tensor, ...]) -> Tensor:
    """Concatenate the outputs (B, H, N, D) of P groups to (B, H, N, P D), with the same memory order."""
    return ys[0] if len(ys) == 1 else _concatenate(ys, memory_order(ys[0]))


def _concatenate(ys: tuple[Tensor, ...], order: tuple[int, int, int]) -> Tensor:
    """Concatenate tensors (B, H, N, ...) along the channels, into a tensor with the given memory order."""
    inverse_order = [order.index(i) for i in range(3)]
    return torch.cat([y.permute(*order, 3) for y in ys], dim=-1).permute(*inverse_order, 3)
