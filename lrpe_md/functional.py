"""The public functions: contracts only."""

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

Outs = tuple[Tensor | None, Tensor | None] | None  # for q and for k
Places = Positions | Packed | tuple[Positions, Positions] | None
CosSinTables = Tensor | Sequence[Tensor] | None  # cos + i sin, or cos and sin


@overload
def cosine(
    x: Tensor, /, *, omega: Tensor | None = ..., positions: Positions | Packed | None = ...,
    tables: CosSinTables = ..., prefix: int = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
    dim: int | None = ..., phase: Tensor | None = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., out: Tensor | None = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cosine(
    q: Tensor, k: Tensor, /, *, omega: Tensor | None = ..., positions: Places = ..., tables: CosSinTables = ...,
    prefix: int = ..., rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., amplitude: float | Tensor | None = ...,
    order: Order = ..., norm: Norm | None = ..., out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def cosine(
    *, qkv: Tensor, num_key_heads: int | None = ..., omega: Tensor | None = ..., positions: Places = ...,
    tables: CosSinTables = ..., prefix: int = ..., rotary_dim: int | slice | None = ..., act: Act = ...,
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
    prefix: int = 0,
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
    """LRPE's cosine map: x → [x̄ cos Θ, x̄ sin Θ], x̄ = act(x), Θ[n, h, c] = Σ_j s_j[n] ω[h, c, j] + φ[h, c].

    ``cosine(x, ...)`` encodes one tensor, ``cosine(q, k, ...)`` two in one launch. The inputs are left alone.

    Args:
        xs: one or two tensors (B, H, N, D) with any strides; the head counts may differ (GQA). Slices of a
            packed qkv projection go in as they are. DTensors with batch, heads or tokens sharded come out so; the
            other arguments are then those of the whole tensors, plain ones the same on all ranks. Or (N, H, D) each
            with the positions of packed samples, or with tables that have a row for each token.
        qkv: instead of xs: a projection (B, N, 3, H, D), or (N, 3, H, D) of packed tokens. No copy is made of it.
        num_key_heads: of a qkv whose heads are stacked, (B, N, H_q + 2 H_k, D) or (N, H_q + 2 H_k, D): H_k.
        omega: (H or 1, D, K) float32 or float64, radians a unit of position; H: the key heads. Query head h
            takes ``omega[h // (H_q / H_k)]``.
        positions: a :class:`Grid`, a :class:`Coordinates`, or a tensor of coordinates (N, K) or (B, N, K). A pair of
            them is for q and for k, which may then differ in length (cross-attention); each has a launch of its own.
            What :func:`lrpe_md.pack` gives is for packed tokens, (N, H, D) or (1, H, N, D).
        tables: cos and sin, in place of omega, positions, phase and amplitude: a pair of tensors, or one complex tensor
            cos + i sin. Each is (N', D), (B or 1, N', D) or (B or 1, H or 1, N', D) with the rows of N' tokens, in any
            float dtype and with any strides; no copy is made. H: the key heads, as for omega. Samples or heads that
            share rows may be expanded (stride 0).
        prefix: with tables: tokens before their first row. These, and the tokens after the last row, pass as [x̄, 0].
            Positions have a prefix of their own.
        rotary_dim: map the first R channels (an int) or a slice of them: [.., x̄ cos Θ, x̄ sin Θ, ..] stands where they
            stood, of width 2R, and the rest pass as x̄. Default: all. A part costs a copy of the output, and softmax
            over the features one of the input.
        act: "none", "relu", "sigmoid", "silu", "softplus" or "softmax", on all tokens, prefix included.
        dim: for softmax -1 (features) or -2 (sequence); None for the others.
        phase: φ, (H or 1, D), added to Θ of grid tokens (not of prefix and suffix). A pair is for q and for k, None
            for no phase: PoPE has one on the keys alone. Or P groups of phases, (P, H or 1, D): the output is what
            each group alone would give, one behind the other, so that q·k is the sum over the groups. In a pair the
            one without groups is repeated for each. Costs a launch a group and a copy of the output.
        amplitude: multiplies cos Θ and sin Θ of grid tokens: a number, or (D,), or (H or 1, D) float32 or float64.
            Under ``torch.compile`` a tensor avoids a recompile for each new value.
        order: "sin_cos" puts out [x̄ sin Θ, x̄ cos Θ] (cosFormer).
        norm: x̄ = act(norm(x)): a :class:`Norm` of q and k, in the same pass; not with softmax over the sequence. With
            rotary_dim a pass of its own, in float32.
        out: where to write, as the output would be, with any strides: a slice ``cache[:, :, n : n + N]`` of a static
            cache (B, H, L, ..). For q and k a pair, either of which may be None: a new tensor. It must not overlap with
            what is read. Of a plain call one launch writes it, key cache and all; groups of phases, rotary_dim of the
            cosine map, a norm over all heads, channels that are not side by side, a CPU and compiled code cost a copy.
        out_start: with out: it is the whole cache (B, H, L, ..) then, and token 0 goes to this place along L. Integers
            (), (1,) or (B,), read on the device, so that a captured graph writes elsewhere each time it is replayed.
            Tokens before 0 or beyond L are an IndexError on a CPU, before anything is written (compiled, when the
            program runs). A GPU drops them silently.
        impl: "auto" runs Triton on a GPU and the reference elsewhere; "triton" raises where it can't run.

    Returns:
        (B, H, N, 2D) for each input, or (B, H, N, 2PD), with rotary_dim (B, H, N, D - R + 2PR), in x's dtype (also
        under autocast) and memory order. (N, H, 2D) of packed tokens. From qkv q, k and v in its order, (B, N, H, 2D)
        or (N, H, 2D) and v, a view of it. What is given as out is given back. Arithmetic is float32, or float64 where x
        is.

    Differentiable with respect to xs, omega, phase and the norm's weight and bias: the fused backward, deterministic,
    in first-order reverse mode; under ``torch.func`` transforms, dual numbers and double backward "auto" takes the
    reference, which is differentiable to any order and also with respect to the coordinates and the amplitude. Tables
    have a gradient, too, which costs as much as the reference. Not with out, which is for where no gradient is
    recorded.

    Raises:
        ValueError, TypeError: an argument that does not fit, before anything is launched.

    Without a phase q·k depends on the size of the distance and not on its sign, on axial frequencies for each axis by
    itself: up is down, and a film the same backwards. A causal mask, tokens off the grid or a phase on the keys tell
    directions apart.

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
        where = take_tables(tables, prefix, False, omega, positions, phase, amplitude)
    if rotary_dim is not None:
        return run_part(options, xs, omega, where, phase, amplitude, norm, target)
    return run_encoding(options, xs, omega, where, phase, amplitude, norm, target)


@overload
def rotate(
    x: Tensor, /, *, omega: Tensor | None = ..., positions: Positions | Packed | None = ...,
    tables: CosSinTables = ..., prefix: int = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ...,
    act: Act = ..., dim: int | None = ..., phase: Tensor | None = ...,
    amplitude: float | Tensor | None = ..., inverse: bool = ..., norm: Norm | None = ..., out: Tensor | None = ...,
    out_start: Tensor | None = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def rotate(
    q: Tensor, k: Tensor, /, *, omega: Tensor | None = ..., positions: Places = ..., tables: CosSinTables = ...,
    prefix: int = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., amplitude: float | Tensor | None = ...,
    inverse: bool = ..., norm: Norm | None = ..., out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rotate(
    *, qkv: Tensor, num_key_heads: int | None = ..., omega: Tensor | None = ..., positions: Places = ...,
    tables: CosSinTables = ..., prefix: int = ..., pairs: Pairs = ..., rotary_dim: int | slice | None = ...,
    act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., amplitude: float | Tensor | None = ...,
    inverse: bool = ..., norm: Norm | None = ..., out: Outs = ..., out_start: Tensor | None = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def rotate(
    *xs: Tensor,
    qkv: Tensor | None = None,
    num_key_heads: int | None = None,
    omega: Tensor | None = None,
    positions: Places = None,
    tables: CosSinTables = None,
    prefix: int = 0,
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
    """RoPE on any number of axes: pairs (a, b) → (a cos Θ - b sin Θ, a sin Θ + b cos Θ) of x̄ = act(x).

    Args as for :func:`cosine`, but

    Args:
        omega: (H or 1, R/2, K), R the rotated width.
        tables: the last dimension is R/2, an entry for each pair, or R, an entry for each channel: a pair (a, b) then
            becomes (a cos_a - b sin_a, a sin_b + b cos_b), whatever the entries are. Tables that repeat the entries of
            the pairs, as many libraries make them, go in as they are.
        pairs: "half" pairs channel p with p + R/2 (llama), "interleaved" 2p with 2p + 1 (RoFormer).
            Numbers are blocks of so many pairs, with "half" inside each.
        rotary_dim: rotate the first R channels (an int) or a slice of them; the rest pass as x̄. Default: all.
        phase: φ, (H or 1, R/2), or one for q and one for k.
        amplitude: a number, or (R/2,), or (H or 1, R/2): of YaRN and LongRoPE.
        inverse: rotate by -Θ, phase included, which undoes a rotation that had neither activation nor amplitude; both
            stay what they are. Negates omega and phase, or the sin of tables.
        norm: a :class:`Norm` of q and k, over a head or all heads, in the same pass.
        out, out_start: with rotary_dim in the same launch, too.

    Returns:
        (B, H, N, D) for each input, in x's dtype and memory order; (N, H, D) of packed tokens; from qkv q, k and v in
        its order, (B, N, H, D) or (N, H, D) each.

    Differentiability and errors as for :func:`cosine`.

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
        where = take_tables(tables, prefix, inverse, omega, positions, phase, amplitude)
    elif inverse:
        turned: Any = tuple(map(_negated, phase)) if type(phase) is tuple else _negated(phase)
        omega, phase = _negated(omega), turned
    options = Options("rotate", act, dim, pairs, rotary_dim, "cos_sin", impl)
    target = None if out is None and out_start is None else take_target(out, out_start, len(xs))
    return run_encoding(options, xs, omega, where, phase, amplitude, norm, target)


def _negated(t: Any) -> Any:
    return -t if isinstance(t, Tensor) else t
