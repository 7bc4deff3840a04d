"""The public functions :func:`cosine` and :func:`rotate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

from torch import Tensor

from .engine.core.call import Act, Impl, Options, Order, Pairs, Positions
from .engine.encode.dispatch import run_encoding, run_part
from .engine.encode.output import take_target
from .engine.encode.tables import take_tables
from .engine.encode.views import Packed, encode_qkv
from .norm import Norm

__all__ = ["cosine", "rotate"]

Outs = tuple[Tensor | None, Tensor | None] | None  # one output for q and one for k
Places = Positions | Packed | tuple[Positions, Positions] | None
CosSinTables = Tensor | Sequence[Tensor] | None  # cos + i sin, or cos and sin


@overload
def cosine(
    x: Tensor, /, *, omega: Tensor | None = ..., positions: Positions | Packed | None = ...,
    tables: CosSinTables = ..., prefix: int | None = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
    dim: int | None = ..., phase: Tensor | None = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., out: Tensor | None = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cosine(
    q: Tensor, k: Tensor, /, *, omega: Tensor | None = ..., positions: Places = ..., tables: CosSinTables = ...,
    prefix: int | None = ..., rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., amplitude: float | Tensor | None = ...,
    order: Order = ..., norm: Norm | None = ..., out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def cosine(
    *, qkv: Tensor, num_key_heads: int | None = ..., omega: Tensor | None = ..., positions: Places = ...,
    tables: CosSinTables = ..., prefix: int | None = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
    dim: int | None = ..., phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ...,
    amplitude: float | Tensor | None = ..., order: Order = ..., norm: Norm | None = ..., out: Outs = ...,
    out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def cosine(
    *xs: Tensor,
    qkv: Tensor | None = None,
    num_key_heads: int | None = None,
    omega: Tensor | None = None,
    positions: Places = None,
    tables: CosSinTables = None,
    prefix: int | None = None,
    rotary_dim: int | slice | None = None,
    act: Act = "none",
    dim: int | None = None,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    amplitude: float | Tensor | None = None,
    order: Order = "cos_sin",
    norm: Norm | None = None,
    out: Tensor | Outs = None,
    out_start: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Apply LRPE's cosine map: x → [x̄ cos Θ, x̄ sin Θ] with x̄ = act(x).

    The angles are Θ[n, h, c] = Σ_j s_j[n] ω[h, c, j] + φ[h, c]. ``cosine(x, ...)`` encodes one tensor, and ``cosine(q,
    k, ...)`` encodes two in one launch. Inputs are never modified.

    Args:
        xs: one or two tensors (B, H, N, D) with any strides; the head counts may differ (GQA). Slices of a packed qkv
            projection are not copied. DTensors sharded along batch, heads or tokens keep their sharding; pass the
            other arguments unsharded, equal on all ranks. Packed samples, or tables with a row per token, also allow
            (N, H, D).
        qkv: instead of xs, a projection (B, N, 3, H, D), or (N, 3, H, D) for packed tokens. It is not copied.
        num_key_heads: H_k, for a qkv with stacked heads: (B, N, H_q + 2 H_k, D) or (N, H_q + 2 H_k, D).
        omega: (H or 1, D, K) float32 or float64, in radians per unit of position. H is the number of key heads; query
            head h uses ``omega[h // (H_q / H_k)]``.
        positions: a :class:`Grid`, a :class:`Coordinates`, or coordinates (N, K) or (B, N, K). Pass a pair (for q, for
            k) if they differ, as in cross-attention; this takes two launches. For packed tokens, (N, H, D) or
            (1, H, N, D), pass the result of :func:`lrpe_md.pack`.
        tables: cos and sin, instead of omega, positions, phase and amplitude: a pair of tensors, or one complex tensor
            cos + i sin. Each is (N', D), (B or 1, N', D) or (B or 1, H or 1, N', D), in any float dtype and with any
            strides, and is not copied. H is the number of key heads. Shared rows may be expanded (stride 0).
        prefix: with tables, the number of tokens before their first row. These tokens, and any after the last row,
            become [x̄, 0]. Default: none, with a row for every token. Positions define their own prefix.
        rotary_dim: map only the first R channels (an int) or a slice of them. [x̄ cos Θ, x̄ sin Θ], of width 2R, takes
            their place; the other channels become x̄. Default: all. Mapping a part copies the output, and softmax over
            the features also copies the input.
        act: "none", "relu", "sigmoid", "silu", "softplus" or "softmax", applied to all tokens, prefix included.
        dim: for softmax, -1 (features) or -2 (sequence); otherwise None.
        phase: φ, (H or 1, D), added to Θ of grid tokens (not prefix or suffix). Pass a pair (for q, for k) if they
            differ; None means no phase (PoPE has one on the keys only). With P groups of phases, (P, H or 1, D), the
            outputs of all groups are concatenated, so that q·k is the sum over groups. If only one of a pair has
            groups, the other is repeated for each. Each group costs a launch, and the output is copied.
        amplitude: factor on cos Θ and sin Θ of grid tokens: a number, or float32 or float64 (D,) or (H or 1, D). Under
            ``torch.compile``, a tensor avoids a recompile for each new value.
        order: "sin_cos" returns [x̄ sin Θ, x̄ cos Θ] (cosFormer).
        norm: a :class:`Norm` of q and k, giving x̄ = act(norm(x)) in the same pass. Not supported with softmax over the
            sequence. With rotary_dim it is a separate pass in float32.
        out: tensor to write the output to, with any strides, such as ``cache[:, :, n : n + N]`` of a static cache
            (B, H, L, ..). For q and k, pass a pair; None allocates. It must not overlap with an input. The output is
            copied with phase groups, rotary_dim of the cosine map, a norm over all heads, non-contiguous channels, on a
            CPU and in compiled code. All other calls write it in a single launch.
        out_start: index along L where token 0 is written; out is then the whole cache (B, H, L, ..). Integers of shape
            (), (1,) or (B,), read on the device, so that each replay of a CUDA graph can write elsewhere. On a CPU,
            tokens out of range raise IndexError before any write (when compiled, at run time); a GPU drops them
            silently.
        impl: "auto" uses Triton on a GPU and the reference elsewhere; "triton" raises if it cannot run.

    Returns:
        (B, H, N, 2D) for each input, in x's dtype (also under autocast) and memory order; ``out`` if it was passed.
        With P groups (B, H, N, 2PD); with rotary_dim (B, H, N, D - R + 2PR); for packed tokens (N, H, 2D). For qkv: q,
        k as (B, N, H, 2D) or (N, H, 2D), and v as an unchanged view. Arithmetic is float32, or float64 for float64 x.

    Differentiable with respect to xs, omega, phase, and the norm's weight and bias. First-order reverse mode runs the
    fused, deterministic backward. Under ``torch.func`` transforms, forward mode and double backward, "auto" runs the
    reference, which is differentiable to any order and also with respect to coordinates and amplitude. Gradients of
    tables take as long as the reference. ``out`` only works for calls that don't record gradients.

    Raises:
        ValueError, TypeError: an invalid argument, before anything is launched.

    Without a phase, q·k is the same for a distance and its negative (on each axis, with axial frequencies): mirrored or
    reversed inputs cannot be told apart. A causal mask, tokens off the grid or a phase on the keys break the symmetry.

    Source: Qin et al., Linearized Relative Positional Encoding (arXiv 2307.09270); softplus and phase: PoPE
    (arXiv 2509.10534).
    """
    options = Options("cosine", act, dim, "half", rotary_dim, order, impl)
    if qkv is not None or num_key_heads is not None:
        again: Any = partial(
            cosine, omega=omega, positions=positions, tables=tables, prefix=prefix, rotary_dim=rotary_dim, act=act,
            dim=dim, phase=phase, amplitude=amplitude, order=order, norm=norm, out_start=out_start, impl=impl,
        )  # fmt: skip
        return encode_qkv(again, xs, qkv, num_key_heads, out)
    target = None if out is None and out_start is None else take_target(out, out_start, len(xs))
    where: Any = positions
    if tables is not None or omega is None or positions is None or prefix:
        where = take_tables(xs, tables, prefix, False, omega, positions, phase, amplitude)
    if rotary_dim is not None:
        return run_part(options, xs, omega, where, phase, amplitude, norm, target)
    return run_encoding(options, xs, omega, where, phase, amplitude, norm, target)


@overload
def rotate(
    x: Tensor, /, *, omega: Tensor | None = ..., positions: Positions | Packed | None = ...,
    tables: CosSinTables = ..., prefix: int | None = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ...,
    act: Act = ..., dim: int | None = ..., phase: Tensor | None = ...,
    amplitude: float | Tensor | None = ..., inverse: bool = ..., norm: Norm | None = ..., out: Tensor | None = ...,
    out_start: Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def rotate(
    q: Tensor, k: Tensor, /, *, omega: Tensor | None = ..., positions: Places = ..., tables: CosSinTables = ...,
    prefix: int | None = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
    dim: int | None = ..., phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ...,
    amplitude: float | Tensor | None = ..., inverse: bool = ..., norm: Norm | None = ..., out: Outs = ...,
    out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rotate(
    *, qkv: Tensor, num_key_heads: int | None = ..., omega: Tensor | None = ..., positions: Places = ...,
    tables: CosSinTables = ..., prefix: int | None = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ...,
    act: Act = ..., dim: int | None = ..., phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ...,
    amplitude: float | Tensor | None = ..., inverse: bool = ..., norm: Norm | None = ..., out: Outs = ...,
    out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def rotate(
    *xs: Tensor,
    qkv: Tensor | None = None,
    num_key_heads: int | None = None,
    omega: Tensor | None = None,
    positions: Places = None,
    tables: CosSinTables = None,
    prefix: int | None = None,
    pairs: Pairs = "half",
    rotary_dim: int | slice | None = None,
    act: Act = "none",
    dim: int | None = None,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    amplitude: float | Tensor | None = None,
    inverse: bool = False,
    norm: Norm | None = None,
    out: Tensor | Outs = None,
    out_start: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Apply RoPE on any number of axes: pairs (a, b) → (a cos Θ - b sin Θ, a sin Θ + b cos Θ) of x̄ = act(x).

    The arguments are the same as for :func:`cosine`, except for these:

    Args:
        omega: (H or 1, R/2, K), where R is the rotated width.
        tables: the last dimension is R/2, one entry per pair, or R, one entry per channel. A pair (a, b) with entries
            per channel becomes (a cos_a - b sin_a, a sin_b + b cos_b). Tables that repeat the entries of each pair, as
            in many libraries, can be passed unchanged.
        pairs: "half" pairs channel p with p + R/2 (Llama), "interleaved" pairs 2p with 2p + 1 (RoFormer). Integers are
            block sizes in pairs, each block in the half layout.
        rotary_dim: rotate the first R channels (an int) or a slice of them; the others become x̄. Default: all.
        phase: φ, (H or 1, R/2), or one for q and one for k.
        amplitude: a number, or (R/2,) or (H or 1, R/2), as used by YaRN and LongRoPE.
        inverse: rotate by -Θ, including the phase, by negating omega and phase, or the sin of tables. This undoes a
            rotation, but not an activation or amplitude.
        norm: a :class:`Norm` of q and k, over each head or all heads, in the same pass.
        out, out_start: see :func:`cosine`; rotary_dim needs no copy here.

    Returns:
        (B, H, N, D) for each input, in x's dtype and memory order; (N, H, D) for packed tokens. For qkv: q, k and v in
        its order, each (B, N, H, D) or (N, H, D).

    Differentiability and errors are the same as for :func:`cosine`.

    Source: Su et al., RoFormer (arXiv 2104.09864); several axes: RoPE-ViT (arXiv 2403.13298).
    """
    if qkv is not None or num_key_heads is not None:
        again: Any = partial(
            rotate, omega=omega, positions=positions, tables=tables, prefix=prefix, pairs=pairs, rotary_dim=rotary_dim,
            act=act, dim=dim, phase=phase, amplitude=amplitude, inverse=inverse, norm=norm, out_start=out_start,
            impl=impl,
        )  # fmt: skip
        return encode_qkv(again, xs, qkv, num_key_heads, out)
    where: Any = positions
    if tables is not None or omega is None or positions is None or prefix:
        where = take_tables(xs, tables, prefix, inverse, omega, positions, phase, amplitude)
    elif inverse:
        turned: Any = tuple(map(_negated, phase)) if type(phase) is tuple else _negated(phase)
        omega, phase = _negated(omega), turned
    options = Options("rotate", act, dim, pairs, rotary_dim, "cos_sin", impl)
    target = None if out is None and out_start is None else take_target(out, out_start, len(xs))
    return run_encoding(options, xs, omega, where, phase, amplitude, norm, target)


def _negated(t: Any) -> Any:
    return -t if isinstance(t, Tensor) else t
