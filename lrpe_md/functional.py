"""The public functions :func:`cosine` and :func:`rotate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

from torch import Tensor

from .engine.core.call import Act, Impl, Options, Order, Pairs, Positions
from .engine.encode.dispatch import run_encoding
from .engine.encode.output import take_target
from .engine.encode.tables import take_tables
from .engine.encode.views import Packed, encode_qkv
from .norm import Norm

__all__ = ["cosine", "rotate"]

Outs = tuple[Tensor | None, Tensor | None] | None  # one output for q and one for k
Places = Positions | Packed | tuple[Positions, Positions] | None
Phases = Tensor | tuple[Tensor | None, Tensor | None] | None  # φ for both, or one for q and one for k
CosSinTables = Tensor | Sequence[Tensor] | None  # cos + i sin, or cos and sin


@overload
def cosine(
    x: Tensor, /, *, omega: Tensor | None = ..., positions: Positions | Packed | None = ..., tables: CosSinTables = ...,
    prefix: int | None = ..., rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | None = ..., amplitude: float | Tensor | None = ..., order: Order = ..., norm: Norm | None = ...,
    out: Tensor | None = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cosine(
    q: Tensor, k: Tensor, /, *, omega: Tensor | None = ..., positions: Places = ..., tables: CosSinTables = ...,
    prefix: int | None = ..., rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ...,
    phase: Phases = ..., amplitude: float | Tensor | None = ..., order: Order = ..., norm: Norm | None = ...,
    out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def cosine(
    *, qkv: Tensor, num_key_heads: int | None = ..., omega: Tensor | None = ..., positions: Places = ...,
    tables: CosSinTables = ..., prefix: int | None = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
    dim: int | None = ..., phase: Phases = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
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
    phase: Phases = None,
    amplitude: float | Tensor | None = None,
    order: Order = "cos_sin",
    norm: Norm | None = None,
    out: Tensor | Outs = None,
    out_start: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Apply LRPE's cosine map, x → [x̄ cos Θ, x̄ sin Θ] with x̄ = act(x).

    The angles are Θ[n, h, c] = Σ_j s_j[n] ω[h, c, j] + φ[h, c]. ``cosine(x, ...)`` encodes one tensor, and ``cosine(q,
    k, ...)`` encodes two in one launch. Inputs are never modified.

    Args:
        xs: one or two tensors (B, H, N, D) with any strides. Their numbers of heads may differ (GQA). Slices of a
            packed qkv projection are not copied. DTensors sharded along batch, heads or tokens keep their sharding;
            pass the other arguments unsharded and equal on all ranks. With packed samples, or with tables that have a
            row per token, shape (N, H, D) is also accepted.
        qkv: packed projection (B, N, 3, H, D), or (N, 3, H, D) for packed tokens, instead of xs. The projection is not
            copied.
        num_key_heads: H_k, if qkv stacks the heads of q, k and v as (B, N, H_q + 2 H_k, D) or (N, H_q + 2 H_k, D).
        omega: frequencies (H or 1, D, K) in radians per unit of position, as float32 or float64. H is the number of key
            heads, and query head h uses ``omega[h // (H_q / H_k)]``.
        positions: a :class:`Grid`, a :class:`Coordinates`, or a tensor (N, K) or (B, N, K). If q and k have different
            positions, as in cross-attention, pass a pair (for q, for k). This takes two launches. For packed tokens (N,
            H, D) or (1, H, N, D), pass the result of :func:`lrpe_md.pack`.
        tables: cos and sin, as a pair of tensors or as one complex tensor cos + i sin, instead of omega, positions,
            phase and amplitude. The shape is (N', D), (B or 1, N', D) or (B or 1, H or 1, N', D), where H is the number
            of key heads. Any float dtype and any strides are accepted, including stride 0, and nothing is copied.
        prefix: number of tokens before the first row of the tables. These tokens, and any after the last row, become
            [x̄, 0]. By default, the tables must have a row for every token. Without tables, the positions define the
            prefix.
        rotary_dim: channels to map, as a slice or as an int R for the first R channels. [x̄ cos Θ, x̄ sin Θ], of width
            2R, replaces these channels, and the others become x̄. By default, all channels are mapped. Mapping only
            some channels requires a copy of the output, and also of the input if the softmax is over the features.
        act: activation to apply to all tokens, including the prefix: "none", "relu", "sigmoid", "silu", "softplus" or
            "softmax".
        dim: dimension of the softmax, -1 (features) or -2 (sequence). It must be None for other activations.
        phase: φ (H or 1, D), which is added to Θ of grid tokens, but not to that of prefix and suffix tokens. If q and
            k have different phases, pass a pair (for q, for k), in which None means no phase. PoPE uses a phase only
            for the keys. With P groups of phases (P, H or 1, D), the outputs of all groups are concatenated, so q·k is
            the sum over groups. If only one phase of a pair has groups, the other phase is repeated for each group.
            Each group requires its own launch, and the output is copied.
        amplitude: factor by which to multiply cos Θ and sin Θ of grid tokens: a number, or a float32 or float64 tensor
            (D,) or (H or 1, D). Under ``torch.compile``, pass a tensor to avoid recompilation for each new value.
        order: order of the two halves. "sin_cos" returns [x̄ sin Θ, x̄ cos Θ] (cosFormer).
        norm: a :class:`Norm` to apply to q and k in the same pass, x̄ = act(norm(x)). With rotary_dim, it runs in a
            separate pass in float32. Softmax over the sequence does not support a norm.
        out: tensor to write the output to, with any strides, such as ``cache[:, :, n : n + N]`` of a static cache (B,
            H, L, ...). For q and k, pass a pair, in which None allocates a new tensor. ``out`` must not overlap with an
            input. Most calls write directly to ``out``. Calls with phase groups, a norm over all heads, non-contiguous
            channels, or rotary_dim in the cosine map copy their result to ``out``, and so do CPU calls and compiled
            code.
        out_start: index along L at which token 0 is written. ``out`` is then the whole cache (B, H, L, ...). The index
            is an integer tensor of shape (), (1,) or (B,), which is read on the device, so each replay of a CUDA graph
            can write at a new index. On a CPU, out-of-range tokens raise IndexError before anything is written (at run
            time in compiled code). On a GPU, these tokens are dropped silently.
        impl: "auto" uses Triton on a GPU and the reference elsewhere. "triton" raises an error if Triton cannot run.

    Returns:
        a tensor (B, H, N, 2D) for each input, in x's dtype (also under autocast) and memory order, or ``out`` if you
        passed it. The width is 2PD with P groups, and D - R + 2PR with rotary_dim. For packed tokens, the shape is (N,
        H, 2D). For qkv, the result is q and k as (B, N, H, 2D) or (N, H, 2D), and v as an unchanged view. Arithmetic is
        in float32, or in float64 for float64 inputs.

    The result is differentiable with respect to xs, omega, phase, and the norm's weight and bias. Ordinary gradients
    come from a fused, deterministic backward pass. Under ``torch.func`` transforms, and for forward mode and double
    backward, "auto" runs the reference, which is differentiable to any order and also with respect to coordinates and
    amplitude. Gradients with respect to tables use the slower reference implementation. You can pass ``out`` only to
    calls that don't record gradients.

    Raises:
        ValueError, TypeError: for an invalid argument, before a kernel is launched.

    Without a phase, q·k is the same for a distance and its negative (with axial frequencies, separately on each axis),
    so mirrored or reversed inputs cannot be told apart. A causal mask, tokens outside of the grid, and a phase on the
    keys each break this symmetry.

    Source: Qin et al., Linearized Relative Positional Encoding (arXiv 2307.09270). Softplus and the phase come from
    PoPE (arXiv 2509.10534).
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
    return run_encoding(options, xs, omega, where, phase, amplitude, norm, target)


@overload
def rotate(
    x: Tensor, /, *, omega: Tensor | None = ..., positions: Positions | Packed | None = ..., tables: CosSinTables = ...,
    prefix: int | None = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
    dim: int | None = ..., phase: Tensor | None = ..., amplitude: float | Tensor | None = ..., inverse: bool = ...,
    norm: Norm | None = ..., out: Tensor | None = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def rotate(
    q: Tensor, k: Tensor, /, *, omega: Tensor | None = ..., positions: Places = ..., tables: CosSinTables = ...,
    prefix: int | None = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
    dim: int | None = ..., phase: Phases = ..., amplitude: float | Tensor | None = ..., inverse: bool = ...,
    norm: Norm | None = ..., out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rotate(
    *, qkv: Tensor, num_key_heads: int | None = ..., omega: Tensor | None = ..., positions: Places = ...,
    tables: CosSinTables = ..., prefix: int | None = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ...,
    act: Act = ..., dim: int | None = ..., phase: Phases = ..., amplitude: float | Tensor | None = ...,
    inverse: bool = ..., norm: Norm | None = ..., out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
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
    phase: Phases = None,
    amplitude: float | Tensor | None = None,
    inverse: bool = False,
    norm: Norm | None = None,
    out: Tensor | Outs = None,
    out_start: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Apply RoPE with any number of axes: rotate each pair (a, b) of x̄ = act(x) by its angle Θ.

    A pair becomes (a cos Θ - b sin Θ, a sin Θ + b cos Θ).

    The arguments are the same as for :func:`cosine`, except for these:

    Args:
        omega: frequencies (H or 1, R/2, K), where R is the rotated width.
        tables: the last dimension is R/2, with one entry per pair, or R, with one entry per channel. With one entry per
            channel, a pair (a, b) becomes (a cos_a - b sin_a, a sin_b + b cos_b). Tables that repeat each pair's entry,
            as in many libraries, therefore work unchanged if they repeat it in the layout of ``pairs``:
            ``torch.cat([t, t], -1)`` for "half", and ``t.repeat_interleave(2, -1)`` for "interleaved". On a CPU,
            the first call with tables of a given size warns if their layout differs.
        pairs: "half" pairs channel p with p + R/2 (Llama), and "interleaved" pairs 2p with 2p + 1 (RoFormer). A
            sequence of integers gives the size of each block in pairs, and each block uses the half layout.
        rotary_dim: channels to rotate, as a slice or as an int R for the first R channels. The other channels become
            x̄. By default, all channels are rotated.
        phase: φ (H or 1, R/2), or a pair (for q, for k).
        amplitude: a number, or a tensor (R/2,) or (H or 1, R/2), as in YaRN and LongRoPE.
        inverse: rotate by -Θ, where Θ includes the phase. This undoes a rotation, but not an activation or amplitude.
        norm: a :class:`Norm` to apply to q and k in the same pass, over each head or over all heads.
        out, out_start: see :func:`cosine`; rotary_dim needs no copy here.

    Returns:
        for each input, a tensor (B, H, N, D), or (N, H, D) for packed tokens, in x's dtype and memory order. For qkv,
        the result is q, k and v, each (B, N, H, D) or (N, H, D).

    Differentiability and errors are the same as for :func:`cosine`.

    Sources: Su et al., RoFormer (arXiv 2104.09864); for several axes, RoPE-ViT (arXiv 2403.13298).
    """
    if qkv is not None or num_key_heads is not None:
        again: Any = partial(
            rotate, omega=omega, positions=positions, tables=tables, prefix=prefix, pairs=pairs, rotary_dim=rotary_dim,
            act=act, dim=dim, phase=phase, amplitude=amplitude, inverse=inverse, norm=norm, out_start=out_start,
            impl=impl,
        )  # fmt: skip
        return encode_qkv(again, xs, qkv, num_key_heads, out)
    where: Any = positions
    if tables is not None or omega is None or positions is None or prefix or not isinstance(inverse, bool):
        where = take_tables(xs, tables, prefix, inverse, omega, positions, phase, amplitude)
    elif inverse:
        turned: Any = tuple(map(_negated, phase)) if type(phase) is tuple else _negated(phase)
        omega, phase = _negated(omega), turned
    options = Options("rotate", act, dim, pairs, rotary_dim, "cos_sin", impl)
    target = None if out is None and out_start is None else take_target(out, out_start, len(xs))
    return run_encoding(options, xs, omega, where, phase, amplitude, norm, target)


def _negated(t: Any) -> Any:
    return -t if isinstance(t, Tensor) else t
