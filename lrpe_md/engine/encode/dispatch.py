"""Choose the path of a call: kernels or reference, one launch or several, whole tensors or shards."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...checks import split_pair
from ...norm import Norm
from ...positions.coordinates import Coordinates
from ...positions.grid import Grid
from ...positions.sequences import Packed
from ...reference import activate
from ..core import sharding
from ..core.call import (
    NO_COS_SIN,
    NO_WEIGHTS,
    Call,
    CosSin,
    Known,
    NormOptions,
    Options,
    Tables,
    Weights,
    remember,
    remembered,
)
from ..core.memory import accumulator, memory_order
from ..core.norms import apply_norm, of_tensor, take_norm
from . import operator as boundary
from .output import Target, check_places, check_target, write
from .tables import TABLE_NAMES, GivenTables
from .validate import IMPLS, check_act, check_impl, check_input, rotary_slice, validate
from .views import encode_packed, order_outs, refuse_mixing, unpack_positions

__all__ = ["run", "run_checked", "run_part", "use_triton", "warn_of_interpreter"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def run(
    options: Options,
    xs: tuple[Tensor, ...],
    omega: Any,
    positions: Any,
    phase: Any = None,
    amplitude: Any = None,
    norm: Norm | None = None,
    target: Target | None = None,
) -> Any:
    """Run :func:`lrpe_md.cosine` or :func:`lrpe_md.rotate` on one tensor, or on q and k."""
    if type(positions) is Packed:
        where, into = unpack_positions(positions, options.dim), _of_views(target, xs)
        return encode_packed(lambda *views: run(options, views, omega, where, phase, amplitude, norm, into), xs)
    given = positions if type(positions) is GivenTables else None
    if given is not None and _are_packed(xs):
        refuse_mixing(options.dim)
        into = _of_views(target, xs)
        return encode_packed(lambda *views: run(options, views, omega, given, phase, amplitude, norm, into), xs)
    weights = NO_WEIGHTS
    if norm is not None:
        options, weights = take_norm(options, norm, len(xs))
    if type(phase) is tuple or (type(positions) is tuple and positions and isinstance(positions[0], _POSITIONS)):
        return _run_apart(options, xs, omega, positions, phase, amplitude, weights, target)
    beside = (omega, phase) if given is None else given.cos_sin[:2]
    direct = boundary.is_direct((*xs, *beside) if norm is None else (*xs, *beside, *weights))
    key = _call_key(options, xs, omega, positions, phase, amplitude) if direct else None
    if key is not None and norm is not None:
        key = _add_weights(key, weights)
    if key is None:
        call = validate(options, xs, omega, positions, phase, amplitude, weights)
    else:
        known = remembered.get(key)
        if known is None:
            checked = validate(options, xs, omega, positions, phase, amplitude, weights)
            known = remember(key, Known(checked.spec, checked.layout, {}))
        spec, layout, launches = known
        if given is not None:
            call = Call(spec, layout, NO_TABLES, launches, weights, given.cos_sin)
        else:
            grid: Any = positions
            origin = None if grid.origin is None else grid.origin_row
            call = Call(spec, layout, Tables(omega, phase, None, origin, None, None, amplitude), launches, weights)
    if target is None:
        ys = run_checked(call, xs, phase, options.impl, direct)
    else:
        ys = _run_into(call, xs, phase, options.impl, direct, target)
    return ys[0] if len(xs) == 1 else ys


def _are_packed(xs: tuple[Any, ...]) -> bool:
    """Tell whether tokens are packed, (N, H, D). All of xs must be, which is checked later."""
    return len(xs) > 0 and isinstance(xs[0], Tensor) and xs[0].ndim == 3


NO_TABLES = Tables(None)
_POSITIONS = (Grid, Coordinates, Tensor)
_DENSE = torch.strided


def _call_key(options: Options, xs: Any, omega: Any, positions: Any, phase: Any, amplitude: Any) -> tuple | None:
    """Build the cache key: everything that :func:`validate` looks at, if its result holds no other tensors than those
    given.

    """
    is_given = type(positions) is GivenTables
    if not is_given and (type(positions) is not Grid or positions.scale is not None or positions.shift is not None):
        return None
    if not 1 <= len(xs) <= 2 or xs[0] is None or xs[-1] is None:
        return None
    for option in options:
        kind = type(option)
        if not (option is None or kind is str or kind is int or kind is NormOptions):  # 1.0 and True equal 1
            return None
    if is_given:
        return _tables_key(options, xs, positions)
    if omega is None or type(positions) is not Grid:
        return None
    if amplitude is not None and not (isinstance(amplitude, Tensor) and amplitude.ndim == 2):
        return None
    for t in (omega, phase, amplitude, *xs):
        if t is not None and (t.is_nested or t.layout is not _DENSE):  # nested ones have no shape for a key
            return None
    q, k = xs[0], xs[-1]
    where, origin = positions, positions.origin
    if origin is not None:
        where = (
            positions.shape, positions.prefix, positions.suffix, positions.start, positions.length, origin.shape,
            origin.dtype, origin.device,
        )  # fmt: skip
    return (
        options, len(xs), where, omega.shape, omega.dtype, omega.device,
        q.shape, q.dtype, q.device, k.shape, k.dtype, k.device,
        None if phase is None else (phase.shape, phase.dtype, phase.device),
        None if amplitude is None else (amplitude.shape, amplitude.dtype, amplitude.device),
    )  # fmt: skip


def _tables_key(options: Options, xs: Any, given: GivenTables) -> tuple | None:
    """The key of a call with given tables. Their strides are in those of its launches."""
    (cos, sin, inverse), prefix = given
    for t in (cos, sin, *xs):
        if t is not None and (not isinstance(t, Tensor) or t.is_nested or t.layout is not _DENSE):
            return None
    q, k = xs[0], xs[-1]
    if cos is None:
        return None
    return (
        options, len(xs), prefix, inverse, cos.shape, cos.dtype, cos.device,
        None if sin is None else (sin.shape, sin.dtype, sin.device),
        q.shape, q.dtype, q.device, k.shape, k.dtype, k.device,
    )  # fmt: skip


def _add_weights(key: tuple, weights: Weights) -> tuple | None:
    """The key of a call with a norm."""
    for t in weights:
        if t is not None and (t.is_nested or t.layout is not _DENSE):
            return None
    return *key, *(None if t is None else (t.shape, t.dtype, t.device) for t in weights)


def run_checked(
    call: Call, xs: tuple[Tensor, ...], phase: Tensor | None, impl: str, direct: bool, groups: int = 1
) -> tuple[Tensor, ...]:
    """A checked call on the path that ``impl`` and the inputs ask for; one a group of phases, side by side."""
    if phase is not None:
        if phase.ndim == 3:
            each = [run_checked(call, xs, group, impl, direct) for group in phase.unbind()]
            return tuple(map(_join_groups, zip(*each, strict=True)))
        if call.tables.phase is not phase:
            call = call._replace(tables=call.tables._replace(phase=phase))
    if groups > 1:
        return tuple(_join_groups((y,) * groups) for y in run_checked(call, xs, phase, impl, direct))
    tables = call.tables
    if not direct and sharding.is_sharded(*xs, tables.omega, phase, *call.cos_sin[:2], *call.weights):
        return sharding.run_shards(lambda local, parts: _run_shard(local, parts, impl), call, xs)
    if use_triton(impl, xs, tables, call.cos_sin):
        if direct and not (tables.coords is tables.origin is tables.rotated is tables.amplitude is None):
            direct = boundary.is_plain((tables.coords, tables.origin, tables.rotated, tables.amplitude))
        return boundary.run_kernels(call, xs, direct)
    return boundary.run_reference(call, xs)


def _run_shard(call: Call, xs: tuple[Tensor, ...], impl: str) -> tuple[Tensor, ...]:
    omega, phase, *_ = call.tables
    direct = boundary.is_direct((*xs, omega, phase, *call.cos_sin[:2], *call.weights))
    return run_checked(call, xs, phase, impl, direct)


def _run_into(
    call: Call, xs: tuple[Tensor, ...], phase: Any, impl: str, direct: bool, target: Target, groups: int = 1
) -> tuple[Tensor, ...]:
    """:func:`run_checked`, its outputs where they are to be: by the launch, or copied."""
    direct = direct and boundary.is_plain(target.tensors)
    _check_into(call, xs, phase, direct, target, groups)
    if groups == 1 and (phase is None or phase.ndim == 2) and direct and target.can_launch(call):
        call = call if call.tables.phase is phase else call._replace(tables=call.tables._replace(phase=phase))
        tables = call.tables
        others = tables.coords, tables.origin, tables.rotated, tables.amplitude
        if use_triton(impl, xs, tables, call.cos_sin) and boundary.is_plain(others):
            return boundary.run_into(call, xs, target.outs, target.start)
    return write(target, run_checked(call, xs, phase, impl, direct, groups))


def _check_into(call: Call, xs: tuple[Tensor, ...], phase: Any, direct: bool, target: Target, groups: int) -> None:
    number = len(phase) if phase is not None and phase.ndim == 3 else groups
    read = (*call.tables, *call.weights, *call.cos_sin[:2], phase)
    names = (*Tables._fields, *Weights._fields, *TABLE_NAMES, "phase")
    _check_target(target, xs, read, names, number * call.spec.out_dim(xs[0].shape[3]), direct)


def _check_target(
    target: Target,
    xs: tuple[Tensor, ...],
    read: Sequence[Tensor | None],
    names: Sequence[str],
    width: int,
    direct: bool,
) -> None:
    if not direct and sharding.is_sharded(*xs, *read, *target.tensors):
        raise ValueError("out: expected None with DTensors, whose outputs are sharded as they are")
    check_target(target, xs, read, names, width, direct)


def _of_views(target: Target | None, xs: tuple[Any, ...]) -> Target | None:
    """Turn the target of packed tokens (N, H, D) into one of their views (1, H, N, D)."""
    return None if target is None else target._replace(outs=order_outs(target.outs, xs))


# --- q and k apart, and groups of phases -------------------------------------------------------------------------


def _run_apart(
    options: Options,
    xs: tuple[Tensor, ...],
    omega: Tensor,
    positions: Any,
    phase: Any,
    amplitude: Any,
    weights: Weights,
    target: Target | None = None,
) -> tuple[Tensor, ...]:
    """Positions or a phase for each of q and k: a launch each."""
    each = list(zip(split_pair("positions", positions, len(xs)), split_pair("phase", phase, len(xs)), xs, strict=True))
    if len(xs) == 2:
        q, k = xs
        check_input("q", q, q)
        check_input("k", k, q, other_length=True)
    calls = [  # before any launch
        validate(options, (x,), omega, where, phi, amplitude, of_tensor(weights, i))
        for i, (where, phi, x) in enumerate(each)
    ]
    groups, ys = _count_groups(phase), ()
    directs = [
        boundary.is_direct((x, omega, phi, *call.weights)) for call, (_, phi, x) in zip(calls, each, strict=True)
    ]
    if target is None:
        for call, (_, phi, x), direct in zip(calls, each, directs, strict=True):
            ys += run_checked(call, (x,), phi, options.impl, direct, groups)
        return ys
    intos = [target.only(i) for i in range(len(xs))]
    jobs = [
        (call, (x,), phi, options.impl, direct, into, groups)
        for call, (_, phi, x), direct, into in zip(calls, each, directs, intos, strict=True)
    ]
    for call, own, phi, _, direct, into, _ in jobs:  # before any launch
        _check_into(call, own, phi, direct and boundary.is_plain(into.tensors), into, groups)
        if options.impl != "triton":  # whose kernels leave out what does not fit in
            check_places(into, [own[0].shape[2]])
    for job in jobs:
        ys += _run_into(*job)
    return ys


def _count_groups(phase: Any) -> int:
    """Groups of phases that q and k have in common."""
    several = {len(phi) for phi in phase if phi is not None and phi.ndim == 3} if type(phase) is tuple else set()
    if len(several) > 1:
        raise ValueError(f"phase: expected as many groups for q as for k, got {[tuple(phi.shape) for phi in phase]}")
    return max(several, default=1)


def run_part(
    options: Options,
    xs: tuple[Tensor, ...],
    omega: Any,
    positions: Any,
    phase: Any = None,
    amplitude: Any = None,
    norm: Norm | None = None,
    target: Target | None = None,
) -> Any:
    """The cosine map of the channels that ``rotary_dim`` says; the others pass as x̄, side by side with it."""
    if type(positions) is Packed:
        where, into = unpack_positions(positions, options.dim), _of_views(target, xs)
        return encode_packed(lambda *views: run_part(options, views, omega, where, phase, amplitude, norm, into), xs)
    if type(positions) is GivenTables and _are_packed(xs):
        refuse_mixing(options.dim)
        into = _of_views(target, xs)
        return encode_packed(
            lambda *views: run_part(options, views, omega, positions, phase, amplitude, norm, into), xs
        )
    if not 1 <= len(xs) <= 2:
        raise TypeError(f"{options.map}: expected one tensor or two (q, k), got {len(xs)}")
    for name, x in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=True):
        check_input(name, x, xs[0], other_length=True)
    check_act(options.act, options.dim)
    act, dim, head_dim = options.act, options.dim, xs[0].shape[3]
    start, width = rotary_slice(options.rotary_dim, head_dim, even=False)
    options = options._replace(rotary_dim=None)
    # A norm, and softmax over the features, are over all of them: they come first, in the dtype of the arithmetic.
    first, wide = dim == -1 or norm is not None, xs
    if norm is not None:
        with_norm, weights = take_norm(options, norm, len(xs))
        wide = apply_norm(with_norm, weights, xs, positions)
    if first:
        wide = tuple(activate(x.to(accumulator(x.dtype)), act, dim) for x in wide)
        options = options._replace(act="none", dim=None)
    turned = run(options, tuple(x[..., start : start + width] for x in wide), omega, positions, phase, amplitude)
    ys: list[Tensor] = []
    for x, whole, y in zip(xs, wide, turned if len(xs) == 2 else (turned,), strict=True):
        passed = (whole[..., :start], whole[..., start + width :])
        if not first:
            passed = tuple(activate(t.to(accumulator(x.dtype)), act, dim) for t in passed)
        before, after = (t.to(x.dtype) for t in passed)
        ys.append(_side_by_side((before, y.to(x.dtype), after), memory_order(x)))
    if target is not None:
        given: dict[str, Any] = {"omega": omega, "phase": phase, "amplitude": amplitude}
        if type(positions) is GivenTables:
            given = dict(zip(TABLE_NAMES, positions.cos_sin[:2], strict=True))
        read = {name: t for name, t in given.items() if isinstance(t, Tensor)}
        direct = boundary.is_direct((*xs, *read.values(), *target.tensors))
        _check_target(target, xs, [*read.values()], [*read], ys[0].shape[3], direct)
        ys = list(write(target, ys))
    return tuple(ys) if len(xs) == 2 else ys[0]


def _join_groups(ys: tuple[Tensor, ...]) -> Tensor:
    """(B, H, N, D) of each group → (B, H, N, P D), in their memory order."""
    return ys[0] if len(ys) == 1 else _side_by_side(ys, memory_order(ys[0]))


def _side_by_side(ys: tuple[Tensor, ...], order: tuple[int, int, int]) -> Tensor:
    """(B, H, N, ..) each → (B, H, N, their sum), in this memory order."""
    back = [order.index(i) for i in range(3)]
    return torch.cat([y.permute(*order, 3) for y in ys], dim=-1).permute(*back, 3)


# --- the path ----------------------------------------------------------------------------------------------------


def use_triton(impl: str, xs: tuple[Tensor, ...], tables: Tables, cos_sin: CosSin = NO_COS_SIN) -> bool:
    """The path that ``impl`` and the inputs ask for."""
    if impl not in IMPLS:
        check_impl(impl)
    if impl == "reference":
        return False
    asked = impl == "triton"
    if not xs[0].is_cuda and not (asked and INTERPRETING and not xs[0].is_meta):
        if asked:
            raise ValueError(
                f"impl: 'triton' needs tensors on a GPU (or TRITON_INTERPRET=1 set before start), got "
                f"{xs[0].device}; use impl='auto' or 'reference'"
            )
        return False
    if not HAS_TRITON:
        if asked:
            raise ValueError("impl: 'triton' needs the triton package, which is not installed; use impl='reference'")
        warnings.warn(
            "lrpe_md: triton is not installed, so the slower reference runs on this GPU", RuntimeWarning, stacklevel=5
        )
        return False
    if torch.is_grad_enabled() and _needs_other_gradients(tables, cos_sin):
        if asked:
            raise ValueError(
                "positions, amplitude, tables: the kernels give no gradient to coords, scale or shift, nor to "
                "amplitude, cos or sin; use impl='auto' or detach them"
            )
        return False
    if boundary.transforming():
        if asked:
            raise ValueError(
                "impl: 'triton' runs first-order reverse mode only, but a torch.func transform or a dual number is "
                "active; use impl='auto'"
            )
        return False
    if INTERPRETING and not torch.compiler.is_compiling():
        warn_of_interpreter()
    return True


@cache
def warn_of_interpreter() -> None:
    """Warn once that an old interpreter is less exact than a GPU."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        warnings.warn(
            f"lrpe_md: the interpreter of Triton {triton.__version__} (TRITON_INTERPRET=1) rounds a fused multiply-add "
            "twice, so that angles are off by up to 1e-4; use Triton 3.9 or later, or impl='reference'",
            RuntimeWarning, stacklevel=6,
        )  # fmt: skip


def _needs_other_gradients(tables: Tables, cos_sin: CosSin) -> bool:
    """Beyond those that the kernels form."""
    cos, sin, _ = cos_sin
    if (cos is not None and cos.requires_grad) or (sin is not None and sin.requires_grad):
        return True
    _, _, *others = tables
    return tables.omega is not None and any(t is not None and t.requires_grad for t in others)
