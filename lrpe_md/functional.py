"""The public functions: validate, choose the path, call."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import ops
from .ops import Layout, Spec
from .positions import Coordinates, Grid

__all__ = ["ACTIVATIONS", "Act", "Impl", "Pairs", "Positions", "cosine", "rotate"]

Act = Literal["none", "relu", "sigmoid", "silu", "softplus", "softmax"]
Impl = Literal["auto", "triton", "reference"]
Pairs = Literal["half", "interleaved"]
Positions = Grid | Coordinates | Tensor

ACTIVATIONS = ("none", "relu", "sigmoid", "silu", "softplus", "softmax")
PAIRS = ("half", "interleaved")
IMPLS = ("auto", "triton", "reference")

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@overload
def cosine(
    x: Tensor, /, *, omega: Tensor, positions: Positions, act: Act = ..., dim: int | None = ...,
    phase: Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cosine(
    q: Tensor, k: Tensor, /, *, omega: Tensor, positions: Positions, act: Act = ..., dim: int | None = ...,
    phase: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def cosine(
    *xs: Tensor,
    omega: Tensor,
    positions: Positions,
    act: Act = "none",
    dim: int | None = None,
    phase: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """LRPE's cosine map: x → [x̄ cos Θ, x̄ sin Θ], x̄ = act(x), Θ[n, h, c] = Σ_j s_j[n] ω[h, c, j] + φ[h, c].

    ``cosine(x, ...)`` encodes one tensor, ``cosine(q, k, ...)`` two in one launch. The inputs are left alone.

    Args:
        xs: one or two tensors (B, H, N, D) with any strides; the head counts may differ (GQA). Slices of a
            packed qkv projection go in as they are.
        omega: (H or 1, D, K) float32 or float64, radians a unit of position; H: the key heads. Query head h
            takes ``omega[h // (H_q / H_k)]``.
        positions: a :class:`Grid`, a :class:`Coordinates`, or a tensor of coordinates (N, K) or (B, N, K).
        act: "none", "relu", "sigmoid", "silu", "softplus" or "softmax", on all tokens, prefix included.
        dim: for softmax -1 (features) or -2 (sequence); None for the others.
        phase: φ, (H or 1, D), added to Θ of grid tokens (not of prefix and suffix).
        impl: "auto" runs Triton on a GPU and the reference elsewhere; "triton" raises where it can't run.

    Returns:
        (B, H, N, 2D) for each input, in x's dtype (also under autocast) and memory order. Arithmetic is
        float32, or float64 where x is.

    Differentiable with respect to xs, omega and phase: the fused backward, deterministic, in first-order
    reverse mode; under ``torch.func`` transforms, dual numbers and double backward "auto" takes the reference,
    which is differentiable to any order and also with respect to the coordinates.

    Raises:
        ValueError, TypeError: an argument that does not fit, before anything is launched.

    Source: Qin et al., Linearized Relative Positional Encoding (arXiv 2307.09270); softplus and phase: PoPE
    (arXiv 2509.10534).
    """
    return encode("cosine", xs, omega, positions, act, dim, phase, "half", None, impl)


@overload
def rotate(
    x: Tensor, /, *, omega: Tensor, positions: Positions, pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ..., phase: Tensor | None = ...,
    impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def rotate(
    q: Tensor, k: Tensor, /, *, omega: Tensor, positions: Positions, pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ..., phase: Tensor | None = ...,
    impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def rotate(
    *xs: Tensor,
    omega: Tensor,
    positions: Positions,
    pairs: Pairs = "half",
    rotary_dim: int | slice | None = None,
    act: Act = "none",
    dim: int | None = None,
    phase: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """RoPE on any number of axes: pairs (a, b) → (a cos Θ - b sin Θ, a sin Θ + b cos Θ) of x̄ = act(x).

    Args as for :func:`cosine`, but

    Args:
        omega: (H or 1, R/2, K), R the rotated width.
        pairs: "half" pairs channel p with p + R/2 (llama), "interleaved" 2p with 2p + 1 (RoFormer).
        rotary_dim: rotate the first R channels (an int) or a slice of them; the rest pass as x̄. Default: all.
        phase: φ, (H or 1, R/2).

    Returns:
        (B, H, N, D) for each input, in x's dtype and memory order.

    Differentiability and errors as for :func:`cosine`.

    Source: Su et al., RoFormer (arXiv 2104.09864); several axes: RoPE-ViT (arXiv 2403.13298).
    """
    return encode("rotate", xs, omega, positions, act, dim, phase, pairs, rotary_dim, impl)


def encode(
    map: str,
    xs: tuple[Tensor, ...],
    omega: Tensor,
    positions: Positions,
    act: str,
    dim: int | None,
    phase: Tensor | None,
    pairs: str,
    rotary_dim: int | slice | None,
    impl: str,
) -> Any:
    """:func:`cosine` and :func:`rotate`, and what the modules call."""
    direct = ops.is_direct(*xs, omega, phase)
    key = _call_key(map, xs, omega, positions, act, dim, phase, pairs, rotary_dim) if direct else None
    call = _prepared.get(key) if key else None
    if call is None:
        call = prepare(map, xs, omega, positions, act, dim, phase, pairs, rotary_dim)
        if key:
            if len(_prepared) >= 4096:
                _prepared.clear()
            _prepared[key] = call
    spec, layout, coords, affine = call
    rotated = positions.rotated if phase is not None and isinstance(positions, Coordinates) else None
    if phase is not None and coords is not None and rotated is not None:
        # What only some rows get is the frequency of one more axis, on which they are at 1 and the others at 0.
        coords = torch.cat([coords, rotated[..., None]], dim=-1)
        heads = max(omega.shape[0], phase.shape[0])
        omega, phase = torch.cat([t.expand(heads, -1, -1) for t in (omega, phase[..., None])], dim=-1), None
    if use_triton(impl, xs, coords, affine):
        ys = ops.encode(spec, layout, coords, affine, omega, phase, xs, direct)
    else:
        ys = ops.encode_reference(spec, layout, coords, affine, omega, phase, xs)
    return ys[0] if len(xs) == 1 else ys


_prepared: dict[tuple, tuple[Spec, Layout, Tensor | None, Tensor | None]] = {}


def _call_key(map, xs, omega, positions, act, dim, phase, pairs, rotary_dim) -> tuple | None:
    """All that :func:`prepare` looks at, where its result holds no tensor: checking again would find the same."""
    if type(positions) is not Grid or positions.scale is not None or positions.shift is not None:
        return None
    if phase is not None or not 1 <= len(xs) <= 2:
        return None
    for option in (map, act, dim, pairs, rotary_dim):
        if not (option is None or type(option) is str or type(option) is int):  # 1.0 and True equal 1
            return None
    q, k = xs[0], xs[-1]
    return (
        map, act, dim, pairs, rotary_dim, len(xs), positions, omega.shape, omega.dtype, omega.device,
        q.shape, q.dtype, q.device, k.shape, k.dtype, k.device,
    )  # fmt: skip


def prepare(
    map: str,
    xs: tuple[Tensor, ...],
    omega: Tensor,
    positions: Positions,
    act: str,
    dim: int | None,
    phase: Tensor | None,
    pairs: str,
    rotary_dim: int | slice | None,
) -> tuple[Spec, Layout, Tensor | None, Tensor | None]:
    """Check every argument; what remains to be said to an operator: spec, layout, coords and affine."""
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

    if map == "cosine":
        start, channels = 0, head_dim
    else:
        if pairs not in PAIRS:
            raise ValueError(f"pairs: expected one of {PAIRS}, got {pairs!r}")
        start, width = rotary_slice(rotary_dim, head_dim)
        channels = width // 2

    layout, coords, affine = _layout(positions, num_tokens, batch, x.device)
    if act == "softmax" and dim == -2 and isinstance(positions, Grid) and not positions.whole:
        raise ValueError("dim: softmax over the sequence (-2) needs the whole sequence, got a shard (start, length)")

    num_axes = len(layout.sizes) if coords is None else coords.shape[-1]
    if num_axes < 1:
        raise ValueError(
            f"positions: expected at least one axis, got coords {tuple(coords.shape) if coords is not None else ()}"
        )
    _check_omega("omega", omega, x, (channels, num_axes), "(H or 1, channels or pairs, axes)", xs)
    if phase is not None:
        _check_omega("phase", phase, x, (channels,), "(H or 1, channels or pairs)", xs)
        if phase.shape[0] != omega.shape[0] and 1 not in (phase.shape[0], omega.shape[0]):
            raise ValueError(
                f"phase: expected 1 head or omega's {omega.shape[0]}, got {phase.shape[0]} ({tuple(phase.shape)})"
            )
    return Spec(map, act, dim or 0, pairs, start, channels), layout, coords, affine


def _check_input(name: str, t: Tensor, x: Tensor) -> None:
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
    if t.shape[0] != x.shape[0] or t.shape[2:] != x.shape[2:]:
        raise ValueError(
            f"{name}: expected q's batch, tokens and head_dim, {x.shape[0]}, {x.shape[2]}, {x.shape[3]}, "
            f"got shape {tuple(t.shape)}; encode tensors of different lengths one by one"
        )


def _check_omega(name: str, t: Tensor, x: Tensor, tail: tuple[int, ...], form: str, xs: tuple[Tensor, ...]) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor {form}, got {type(t).__name__}")
    if t.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: expected float32 or float64 (16 bits misplace far tokens), got {t.dtype}")
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
) -> tuple[Layout, Tensor | None, Tensor | None]:
    if isinstance(positions, Grid):
        if positions.num_tokens != num_tokens:
            raise ValueError(
                f"positions: expected {num_tokens} tokens (x's N), got prefix {positions.prefix} + grid "
                f"{' x '.join(map(str, positions.shape))} + suffix {positions.suffix} = {positions.total}"
                + ("" if positions.whole else f", of which the shard has {positions.num_tokens}")
            )
        layout = Layout(
            num_tokens, positions.prefix, positions.num_grid_tokens, positions.start, tuple(positions.shape)
        )
        return layout, None, positions.affine(device)
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
    return Layout(num_tokens, positions.prefix, coords.shape[-2], 0, ()), coords, None


def use_triton(impl: str, xs: tuple[Tensor, ...], coords: Tensor | None, affine: Tensor | None = None) -> bool:
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
            "lrpe_md: triton is not installed, so the slower reference runs on this GPU", RuntimeWarning, stacklevel=4
        )
        return False
    if ops.transforming():
        if asked:
            raise ValueError(
                "impl: 'triton' runs first-order reverse mode only, but a torch.func transform or a dual number is "
                "active; use impl='auto'"
            )
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (coords, affine)):
        if asked:
            raise ValueError(
                "positions: the kernels give no gradient to coords, scale or shift; use impl='auto' or detach them"
            )
        return False
    return True
