"""The public functions: check, choose the path, call."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from .engine import boundary, sharding
from .engine.boundary import Layout, Spec, Tables
from .engine.validate import Act, Impl, Order, Pairs, Positions, check_impl, check_input, prepare
from .positions.grid import Coordinates, Grid

__all__ = ["cosine", "encode", "rotate", "use_triton"]

_POSITIONS = (Grid, Coordinates, Tensor)

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@overload
def cosine(
    x: Tensor, /, *, omega: Tensor, positions: Positions, act: Act = ..., dim: int | None = ...,
    phase: Tensor | None = ..., amplitude: float | Tensor | None = ..., order: Order = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cosine(
    q: Tensor, k: Tensor, /, *, omega: Tensor, positions: Positions | tuple[Positions, Positions], act: Act = ...,
    dim: int | None = ..., phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ...,
    amplitude: float | Tensor | None = ..., order: Order = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def cosine(
    *xs: Tensor,
    omega: Tensor,
    positions: Positions | tuple[Positions, Positions],
    act: Act = "none",
    dim: int | None = None,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    amplitude: float | Tensor | None = None,
    order: Order = "cos_sin",
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """LRPE's cosine map: x → [x̄ cos Θ, x̄ sin Θ], x̄ = act(x), Θ[n, h, c] = Σ_j s_j[n] ω[h, c, j] + φ[h, c].

    ``cosine(x, ...)`` encodes one tensor, ``cosine(q, k, ...)`` two in one launch. The inputs are left alone.

    Args:
        xs: one or two tensors (B, H, N, D) with any strides; the head counts may differ (GQA). Slices of a
            packed qkv projection go in as they are. DTensors with batch, heads or tokens sharded come out so; the
            other arguments are then those of the whole tensors, plain ones the same on all ranks.
        omega: (H or 1, D, K) float32 or float64, radians a unit of position; H: the key heads. Query head h
            takes ``omega[h // (H_q / H_k)]``.
        positions: a :class:`Grid`, a :class:`Coordinates`, or a tensor of coordinates (N, K) or (B, N, K). A pair of
            them is for q and for k, which may then differ in length (cross-attention); each has a launch of its own.
        act: "none", "relu", "sigmoid", "silu", "softplus" or "softmax", on all tokens, prefix included.
        dim: for softmax -1 (features) or -2 (sequence); None for the others.
        phase: φ, (H or 1, D), added to Θ of grid tokens (not of prefix and suffix). A pair is for q and for k, None
            for no phase: PoPE has one on the keys alone. Or P groups of phases, (P, H or 1, D): the output is what
            each group alone would give, one behind the other, so that q·k is the sum over the groups. In a pair the
            one without groups is repeated for each. Costs a launch a group and a copy of the output.
        amplitude: multiplies cos Θ and sin Θ of grid tokens: a number, or (D,), or (H or 1, D) float32 or float64.
            Under ``torch.compile`` a tensor avoids a recompile for each new value.
        order: "sin_cos" puts out [x̄ sin Θ, x̄ cos Θ] (cosFormer).
        impl: "auto" runs Triton on a GPU and the reference elsewhere; "triton" raises where it can't run.

    Returns:
        (B, H, N, 2D) for each input, or (B, H, N, 2PD), in x's dtype (also under autocast) and memory order.
        Arithmetic is float32, or float64 where x is.

    Differentiable with respect to xs, omega and phase: the fused backward, deterministic, in first-order
    reverse mode; under ``torch.func`` transforms, dual numbers and double backward "auto" takes the reference,
    which is differentiable to any order and also with respect to the coordinates and the amplitude.

    Raises:
        ValueError, TypeError: an argument that does not fit, before anything is launched.

    Without a phase q·k depends on the size of the distance and not on its sign, on axial frequencies for each axis by
    itself: up is down, and a film the same backwards. A causal mask, tokens off the grid or a phase on the keys tell
    directions apart.

    Source: Qin et al., Linearized Relative Positional Encoding (arXiv 2307.09270); softplus and phase: PoPE
    (arXiv 2509.10534).
    """
    return encode("cosine", xs, omega, positions, act, dim, phase, "half", None, impl, amplitude, order)


@overload
def rotate(
    x: Tensor, /, *, omega: Tensor, positions: Positions, pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ..., phase: Tensor | None = ...,
    amplitude: float | Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def rotate(
    q: Tensor, k: Tensor, /, *, omega: Tensor, positions: Positions | tuple[Positions, Positions], pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., amplitude: float | Tensor | None = ...,
    impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def rotate(
    *xs: Tensor,
    omega: Tensor,
    positions: Positions | tuple[Positions, Positions],
    pairs: Pairs = "half",
    rotary_dim: int | slice | None = None,
    act: Act = "none",
    dim: int | None = None,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    amplitude: float | Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """RoPE on any number of axes: pairs (a, b) → (a cos Θ - b sin Θ, a sin Θ + b cos Θ) of x̄ = act(x).

    Args as for :func:`cosine`, but

    Args:
        omega: (H or 1, R/2, K), R the rotated width.
        pairs: "half" pairs channel p with p + R/2 (llama), "interleaved" 2p with 2p + 1 (RoFormer).
            Numbers are blocks of so many pairs, with "half" inside each.
        rotary_dim: rotate the first R channels (an int) or a slice of them; the rest pass as x̄. Default: all.
        phase: φ, (H or 1, R/2), or one for q and one for k.
        amplitude: a number, or (R/2,), or (H or 1, R/2): of YaRN and LongRoPE.

    Returns:
        (B, H, N, D) for each input, in x's dtype and memory order.

    Differentiability and errors as for :func:`cosine`.

    Source: Su et al., RoFormer (arXiv 2104.09864); several axes: RoPE-ViT (arXiv 2403.13298).
    """
    return encode("rotate", xs, omega, positions, act, dim, phase, pairs, rotary_dim, impl, amplitude)


def encode(
    map: str,
    xs: tuple[Tensor, ...],
    omega: Tensor,
    positions: Any,
    act: str,
    dim: int | None,
    phase: Any,
    pairs: Any,
    rotary_dim: int | slice | None,
    impl: str,
    amplitude: float | Tensor | None = None,
    order: str = "cos_sin",
) -> Any:
    """:func:`cosine` and :func:`rotate`, and what the modules call."""
    if type(phase) is tuple or (type(positions) is tuple and positions and isinstance(positions[0], _POSITIONS)):
        each = list(zip(_by_tensor("positions", positions, xs), _by_tensor("phase", phase, xs), xs, strict=True))
        if len(xs) == 2:
            check_input("q", xs[0], xs[0])
            check_input("k", xs[1], xs[0], other_length=True)
        calls = [  # all is checked before anything is launched
            prepare(map, (x,), omega, where, act, dim, phi, pairs, rotary_dim, amplitude, order)
            for where, phi, x in each
        ]
        groups = _groups(phase)
        return tuple(
            _encode(call, (x,), omega, phi, impl, boundary.is_direct(x, omega, phi), groups)[0]
            for call, (_, phi, x) in zip(calls, each, strict=True)
        )
    direct = boundary.is_direct(*xs, omega, phase)
    key = None
    if direct:
        key = _call_key(map, xs, omega, positions, act, dim, phase, pairs, rotary_dim, amplitude, order)
    call = _prepared.get(key) if key else None
    if call is None:
        call = prepare(map, xs, omega, positions, act, dim, phase, pairs, rotary_dim, amplitude, order)
        if key:
            if len(_prepared) >= 4096:
                _prepared.clear()
            _prepared[key] = (*call[:2], Tables())
    else:
        call = _with_tensors(call, positions, amplitude)
    ys = _encode(call, xs, omega, phase, impl, direct)
    return ys[0] if len(xs) == 1 else ys


def _with_tensors(call: tuple[Spec, Layout, Tables], grid: Any, amplitude: Any) -> tuple[Spec, Layout, Tables]:
    """A call that was prepared before, with the tensors of this one."""
    if grid.origin is None and amplitude is None:
        return call
    return call[0], call[1], Tables(coords=grid.origin_row, amplitude=amplitude)


def _encode(
    call: tuple[Spec, Layout, Tables],
    xs: tuple[Tensor, ...],
    omega: Tensor,
    phase: Tensor | None,
    impl: str,
    direct: bool,
    groups: int = 1,
) -> tuple[Tensor, ...]:
    """A prepared call on the path that ``impl`` and the inputs ask for; one a group of phases, side by side."""
    if phase is not None and phase.ndim == 3:
        each = [_encode(call, xs, omega, group, impl, direct) for group in phase.unbind()]
        return tuple(map(_side_by_side, zip(*each, strict=True)))
    if groups > 1:
        return tuple(_side_by_side((y,) * groups) for y in _encode(call, xs, omega, phase, impl, direct))
    if not direct and sharding.is_sharded(*xs, omega, phase):
        return sharding.encode(partial(_encode_shards, impl), call, xs, omega, phase)
    if use_triton(impl, xs, call[2]):
        return boundary.encode(*call, omega, phase, xs, direct)
    return boundary.encode_reference(*call, omega, phase, xs)


def _encode_shards(
    impl: str, call: tuple[Spec, Layout, Tables], xs: tuple[Tensor, ...], omega: Tensor, phase: Tensor | None
) -> tuple[Tensor, ...]:
    return _encode(call, xs, omega, phase, impl, boundary.is_direct(*xs, omega, phase))


def _side_by_side(ys: tuple[Tensor, ...]) -> Tensor:
    """(B, H, N, D) of each group → (B, H, N, P D), in their memory order."""
    if len(ys) == 1:
        return ys[0]
    order = boundary.memory_order(ys[0])
    back = [order.index(i) for i in range(3)]
    return torch.cat([y.permute(*order, 3) for y in ys], dim=-1).permute(*back, 3)


def _groups(phase: Any) -> int:
    """Groups of phases that q and k have in common."""
    several = {len(phi) for phi in phase if phi is not None and phi.ndim == 3} if type(phase) is tuple else set()
    if len(several) > 1:
        raise ValueError(f"phase: expected as many groups for q as for k, got {[tuple(phi.shape) for phi in phase]}")
    return max(several, default=1)


def _by_tensor(name: str, value: Any, xs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """A value for each of q and k."""
    if type(value) is not tuple:
        return (value,) * len(xs)
    if not len(value) == len(xs) == 2:
        raise ValueError(f"{name}: a tuple is one for q and one for k, got {len(value)} for {len(xs)} tensors")
    return value


_prepared: dict[tuple, tuple[Spec, Layout, Tables]] = {}


def _call_key(map, xs, omega, positions, act, dim, phase, pairs, rotary_dim, amplitude, order) -> tuple | None:
    """All that :func:`prepare` looks at, where its result holds no tensors but the origin of a grid and the amplitude
    as they were given: checking again would find the same."""
    if type(positions) is not Grid or positions.scale is not None or positions.shift is not None:
        return None
    if not 1 <= len(xs) <= 2 or any(t is None for t in (omega, *xs)):
        return None
    for option in (map, act, dim, pairs, rotary_dim, order):
        if not (option is None or type(option) is str or type(option) is int):  # 1.0 and True equal 1
            return None
    if amplitude is not None and not (isinstance(amplitude, Tensor) and amplitude.ndim == 2):
        return None
    q, k = xs[0], xs[-1]
    where, origin = positions, positions.origin
    if origin is not None:
        where = (
            positions.shape, positions.prefix, positions.suffix, positions.start, positions.length, origin.shape,
            origin.dtype, origin.device,
        )  # fmt: skip
    return (
        map, act, dim, pairs, rotary_dim, order, len(xs), where, omega.shape, omega.dtype, omega.device,
        q.shape, q.dtype, q.device, k.shape, k.dtype, k.device,
        None if phase is None else (phase.shape, phase.dtype, phase.device),
        None if amplitude is None else (amplitude.shape, amplitude.dtype, amplitude.device),
    )  # fmt: skip


def use_triton(impl: str, xs: tuple[Tensor, ...], tables: Tables) -> bool:
    """The path that ``impl`` and the inputs ask for."""
    check_impl(impl)
    if impl == "reference":
        return False
    asked = impl == "triton"
    if not xs[0].is_cuda and not (asked and INTERPRETING):
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
    if boundary.transforming():
        if asked:
            raise ValueError(
                "impl: 'triton' runs first-order reverse mode only, but a torch.func transform or a dual number is "
                "active; use impl='auto'"
            )
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tables):
        if asked:
            raise ValueError(
                "positions, amplitude: the kernels give no gradient to amplitude, coords, scale or shift; use "
                "impl='auto' or detach them"
            )
        return False
    return True
