"""The public functions: validate, choose the path, call."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import ops, sharding
from .ops import Layout, Spec, Tables
from .positions import Coordinates, Grid, fleeting

__all__ = ["ACTIVATIONS", "Act", "Impl", "Order", "Pairs", "Positions", "cosine", "rotate"]

Act = Literal["none", "relu", "sigmoid", "silu", "softplus", "softmax"]
Impl = Literal["auto", "triton", "reference"]
Pairs = Literal["half", "interleaved"] | Sequence[int]
Order = Literal["cos_sin", "sin_cos"]
Positions = Grid | Coordinates | Tensor

ACTIVATIONS = ("none", "relu", "sigmoid", "silu", "softplus", "softmax")
_POSITIONS = (Grid, Coordinates, Tensor)
PAIRS = ("half", "interleaved")
ORDERS = ("cos_sin", "sin_cos")
IMPLS = ("auto", "triton", "reference")

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
            for no phase: PoPE has one on the keys alone.
        amplitude: multiplies cos Θ and sin Θ of grid tokens: a number, or (D,), or (H or 1, D) float32 or float64.
            Under ``torch.compile`` a tensor avoids a recompile for each new value.
        order: "sin_cos" puts out [x̄ sin Θ, x̄ cos Θ] (cosFormer).
        impl: "auto" runs Triton on a GPU and the reference elsewhere; "triton" raises where it can't run.

    Returns:
        (B, H, N, 2D) for each input, in x's dtype (also under autocast) and memory order. Arithmetic is
        float32, or float64 where x is.

    Differentiable with respect to xs, omega and phase: the fused backward, deterministic, in first-order
    reverse mode; under ``torch.func`` transforms, dual numbers and double backward "auto" takes the reference,
    which is differentiable to any order and also with respect to the coordinates and the amplitude.

    Raises:
        ValueError, TypeError: an argument that does not fit, before anything is launched.

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
            _check_input("q", xs[0], xs[0])
            _check_input("k", xs[1], xs[0], other_length=True)
        calls = [  # all is checked before anything is launched
            prepare(map, (x,), omega, where, act, dim, phi, pairs, rotary_dim, amplitude, order)
            for where, phi, x in each
        ]
        return tuple(
            _encode(call, (x,), omega, phi, impl, ops.is_direct(x, omega, phi))[0]
            for call, (_, phi, x) in zip(calls, each, strict=True)
        )
    direct = ops.is_direct(*xs, omega, phase)
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
) -> tuple[Tensor, ...]:
    """A prepared call on the path that ``impl`` and the inputs ask for."""
    if not direct and sharding.is_sharded(*xs, omega, phase):
        return sharding.encode(partial(_encode_shards, impl), call, xs, omega, phase)
    if use_triton(impl, xs, call[2]):
        return ops.encode(*call, omega, phase, xs, direct)
    return ops.encode_reference(*call, omega, phase, xs)


def _encode_shards(
    impl: str, call: tuple[Spec, Layout, Tables], xs: tuple[Tensor, ...], omega: Tensor, phase: Tensor | None
) -> tuple[Tensor, ...]:
    return _encode(call, xs, omega, phase, impl, ops.is_direct(*xs, omega, phase))


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


def prepare(
    map: str,
    xs: tuple[Tensor, ...],
    omega: Tensor,
    positions: Any,
    act: str,
    dim: int | None,
    phase: Any,
    pairs: Any,
    rotary_dim: int | slice | None,
    amplitude: float | Tensor | None = None,
    order: str = "cos_sin",
) -> tuple[Spec, Layout, Tables]:
    """Check every argument; what remains to be said to an operator."""
    if not 1 <= len(xs) <= 2:
        raise TypeError(f"{map}: expected one tensor or two (q, k), got {len(xs)}")
    x = xs[0]
    for name, t in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=True):
        _check_input(name, t, x)
    batch, _, num_tokens, head_dim = x.shape

    if act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of {ACTIVATIONS}, got {act!r}")
    if act == "softmax" and dim not in (-1, -2):
        raise ValueError(f"dim: softmax needs -1 (features) or -2 (sequence), got {dim!r}")
    if act != "softmax" and dim is not None:
        raise ValueError(f"dim: expected None for act={act!r} (only softmax has a dim), got {dim!r}")
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {ORDERS}, got {order!r}")

    if map == "cosine":
        start, channels, sections = 0, head_dim, ()
    else:
        start, width = rotary_slice(rotary_dim, head_dim)
        channels = width // 2
        pairs, sections = check_pairs(pairs, channels)

    layout, coords, affine, rotated = _layout(positions, num_tokens, batch, x.device)
    if act == "softmax" and dim == -2 and isinstance(positions, Grid) and not positions.whole:
        raise ValueError("dim: softmax over the sequence (-2) needs the whole sequence, got a shard (start, length)")

    num_axes = len(layout.sizes) if coords is None else coords.shape[-1]
    if num_axes < 1:
        raise ValueError(
            f"positions: expected at least one axis, got coords {tuple(coords.shape) if coords is not None else ()}"
        )
    _check_omega("omega", omega, x, (channels, num_axes), "(H or 1, channels or pairs, axes)", xs)
    amplitude = _amplitude(amplitude, channels, x.device)
    for name, t in (("phase", phase), ("amplitude", amplitude)):
        if t is not None:
            _check_omega(name, t, x, (channels,), "(H or 1, channels or pairs)", xs)
    tensors = (("omega", omega), ("phase", phase), ("amplitude", amplitude))
    several = [(name, t) for name, t in tensors if t is not None and t.shape[0] > 1]
    for name, t in several[1:]:
        if t.shape[0] != several[0][1].shape[0]:
            raise ValueError(
                f"{name}: expected 1 head or {several[0][0]}'s {several[0][1].shape[0]}, got {t.shape[0]} "
                f"({tuple(t.shape)})"
            )
    spec = Spec(map, act, dim or 0, pairs, start, channels, sections, order)
    return spec, layout, Tables(coords, affine, rotated, amplitude)


def check_pairs(pairs: Any, channels: int) -> tuple[str, tuple[int, ...]]:
    """The name of the pairing, and the pairs a block where there are several."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        if pairs not in PAIRS:
            raise ValueError(f"pairs: expected one of {PAIRS} or the number of pairs of each block, got {pairs!r}")
        return pairs, ()
    sections = tuple(pairs)
    if not all(type(n) is int and n > 0 for n in sections) or sum(sections) != channels:
        raise ValueError(f"pairs: expected blocks of at least one pair that make {channels} together, got {sections}")
    return ("half", ()) if len(sections) == 1 else ("blocks", sections)


def _amplitude(value: Any, channels: int, device: torch.device) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        if value is None or value.ndim == 2:
            return value
        if value.ndim == 0:
            return value.expand(1, channels)
        return value[None] if value.ndim == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"amplitude: expected a number or a tensor, got {type(value).__name__}")
    if value == 1:
        return None
    if torch.compiler.is_compiling() or fleeting() or _capturing(device):
        return torch.full((1, channels), value, dtype=torch.float64, device=device)
    return _filled(float(value), channels, device)


def _capturing(device: torch.device) -> bool:
    """What is computed now is only recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache  # for good: a CUDA graph may hold the address
def _filled(value: float, channels: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1, channels), value, dtype=torch.float64, device=device)


def _check_input(name: str, t: Tensor, x: Tensor, other_length: bool = False) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor (B, H, N, D), got {type(t).__name__}")
    if t.ndim != 4:
        raise ValueError(f"{name}: expected shape (B, H, N, D), got {tuple(t.shape)}")
    if t.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {t.dtype}")
    if t is x:
        return
    if t.dtype != x.dtype or t.device != x.device:
        raise ValueError(f"{name}: expected q's dtype and device, {x.dtype} on {x.device}, got {t.dtype} on {t.device}")
    if t.shape[0] != x.shape[0] or t.shape[3] != x.shape[3] or not (other_length or t.shape[2] == x.shape[2]):
        raise ValueError(
            f"{name}: expected q's batch, tokens and head_dim, {x.shape[0]}, {x.shape[2]}, {x.shape[3]}, "
            f"got shape {tuple(t.shape)}; tensors of different lengths take positions each"
        )


def _check_omega(name: str, t: Tensor, x: Tensor, tail: tuple[int, ...], form: str, xs: tuple[Tensor, ...]) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor {form}, got {type(t).__name__}")
    if t.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name}: expected float32 or float64 (16 bits misplace far tokens), got {t.dtype}; where FSDP2's mixed "
            "precision cast it, call fully_shard on the module that owns it first, without param_dtype"
        )
    if t.device != x.device:
        raise ValueError(f"{name}: expected it on x's device {x.device}, got {t.device}")
    if t.ndim != 1 + len(tail) or tuple(t.shape[1:]) != tail:
        raise ValueError(f"{name}: expected shape {form} = (H or 1, {', '.join(map(str, tail))}), got {tuple(t.shape)}")
    for tensor in xs:
        if t.shape[0] < 1 or tensor.shape[1] % t.shape[0]:
            raise ValueError(
                f"{name}: expected 1 head or the key heads, a divisor of x's {tensor.shape[1]} heads, "
                f"got {t.shape[0]} ({tuple(t.shape)})"
            )


def rotary_slice(rotary_dim: int | slice | None, head_dim: int) -> tuple[int, int]:
    """First rotated channel and width R."""
    if rotary_dim is None:
        start, stop = 0, head_dim
    elif isinstance(rotary_dim, slice):
        if rotary_dim.step not in (None, 1):
            raise ValueError(f"rotary_dim: expected a slice of step 1, got {rotary_dim}")
        start, stop, _ = rotary_dim.indices(head_dim)
    else:
        start, stop = 0, rotary_dim
    if not (0 <= start < stop <= head_dim and (stop - start) % 2 == 0):
        raise ValueError(
            f"rotary_dim: expected an even width of at most head_dim = {head_dim}, got {rotary_dim!r} "
            f"({stop - start} channels)"
        )
    return start, stop - start


def _layout(
    positions: Positions, num_tokens: int, batch: int, device: torch.device
) -> tuple[Layout, Tensor | None, Tensor | None, Tensor | None]:
    if isinstance(positions, Grid):
        if positions.num_tokens != num_tokens:
            raise ValueError(
                f"positions: expected {num_tokens} tokens (x's N), got prefix {positions.prefix} + grid "
                f"{' x '.join(map(str, positions.shape))} + suffix {positions.suffix} = {positions.total}"
                + ("" if positions.whole else f", of which the shard has {positions.num_tokens}")
            )
        origin = positions.origin_row
        if origin is not None:
            if origin.ndim == 3 and origin.shape[0] != batch:
                raise ValueError(
                    f"positions: expected an origin or offset for each of B = {batch} samples, got {origin.shape[0]}"
                )
            if origin.device != device:
                raise ValueError(f"positions: expected the origin on x's device {device}, got {origin.device}")
        layout = Layout(
            num_tokens, positions.prefix, positions.num_grid_tokens, positions.start, tuple(positions.shape)
        )
        return layout, origin, positions.affine(device), None
    if isinstance(positions, Tensor):
        positions = Coordinates(positions)
    elif not isinstance(positions, Coordinates):
        raise TypeError(
            f"positions: expected a Grid, Coordinates or a tensor of coordinates, got {type(positions).__name__}"
        )
    coords = positions.coords
    if positions.num_tokens != num_tokens:
        raise ValueError(
            f"positions: expected {num_tokens} tokens (x's N), got prefix {positions.prefix} + coords "
            f"{tuple(coords.shape)} + suffix {positions.suffix} = {positions.num_tokens}"
        )
    if coords.ndim == 3 and coords.shape[0] != batch:
        raise ValueError(f"positions: expected coords (B, N, K) with B = {batch}, got {tuple(coords.shape)}")
    if coords.device != device:
        raise ValueError(f"positions: expected coords on x's device {device}, got {coords.device}")
    return Layout(num_tokens, positions.prefix, coords.shape[-2], 0, ()), coords, None, positions.rotated


def use_triton(impl: str, xs: tuple[Tensor, ...], tables: Tables) -> bool:
    """The path that ``impl`` and the inputs ask for."""
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
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
    if ops.transforming():
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
