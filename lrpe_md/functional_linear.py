"""The public function of linear attention: its contract only."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .engine.core.call import Act, Impl, Order, Pairs, Positions
from .engine.linear.call import Directions, LinearOptions, MapOrNone, NormalizerName, Rule, Sides, State
from .engine.linear.dispatch import as_state, run_linear_attention
from .engine.linear.validate import TensorArguments
from .norm import Norm

__all__ = ["linear_attention"]

OnePosition = Positions | None


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, map: MapOrNone = ..., omega: Tensor | None = ...,
    positions: OnePosition | tuple[OnePosition, OnePosition] = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., normalizer: NormalizerName = ..., gate: Tensor | None = ..., is_causal: bool = ...,
    block: int | None = ..., cu_seqlens: Tensor | None = ..., state: State | tuple[Tensor] | None = ...,
    return_state: Literal[False] = ..., decay: Tensor | None = ..., rule: Rule = ..., directions: Directions = ...,
    eps: float = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, map: MapOrNone = ..., omega: Tensor | None = ...,
    positions: OnePosition | tuple[OnePosition, OnePosition] = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., normalizer: NormalizerName = ..., gate: Tensor | None = ..., is_causal: bool = ...,
    block: int | None = ..., cu_seqlens: Tensor | None = ..., state: State | tuple[Tensor] | None = ...,
    return_state: Literal[True], decay: Tensor | None = ..., rule: Rule = ..., directions: Directions = ...,
    eps: float = ..., impl: Impl = ...,
) -> tuple[Tensor, State]: ...  # fmt: skip
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, map: MapOrNone = ..., omega: Tensor | None = ...,
    positions: OnePosition | tuple[OnePosition, OnePosition] = ..., act: Act = ..., dim: int | None = ...,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = ..., pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., normalizer: NormalizerName = ..., gate: Tensor | None = ..., is_causal: bool = ...,
    block: int | None = ..., cu_seqlens: Tensor | None = ..., state: State | tuple[Tensor] | None = ...,
    return_state: bool = ..., decay: Tensor | None = ..., rule: Rule = ..., directions: Directions = ...,
    eps: float = ..., impl: Impl = ...,
) -> Tensor | tuple[Tensor, State]: ...  # fmt: skip


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    map: MapOrNone = "cosine",
    omega: Tensor | None = None,
    positions: OnePosition | tuple[OnePosition, OnePosition] = None,
    act: Act = "relu",
    dim: int | None = None,
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    pairs: Pairs = "half",
    rotary_dim: int | slice | None = None,
    amplitude: float | Tensor | None = None,
    order: Order = "cos_sin",
    norm: Norm | None = None,
    normalizer: NormalizerName = "unrotated",
    gate: Tensor | None = None,
    is_causal: bool = False,
    block: int | None = None,
    cu_seqlens: Tensor | None = None,
    state: State | tuple[Tensor] | None = None,
    return_state: bool = False,
    decay: Tensor | None = None,
    rule: Rule = "add",
    directions: Directions = "forward",
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, State]:
    """Linear attention with positions: o_n = q̂_n · (Σ_m β_m k̂_m v_mᵀ) / z_n, q̂ the map of q̄ = act(norm(q)), k̂ alike.

    The cost grows with the tokens, not with their square, and q̂ and k̂ are never in memory.

    Which attention is faster: on an H100 in bfloat16, head_dim 64, the crossover with softmax attention (PyTorch's best
    backend, without positions) is at some 200 tokens, where a forward takes nine tenths and a backward two thirds of
    its time; at 4,096 tokens both are some ten times as fast, at 32,760 a hundred times, causal at 8,192 six times. A
    training step of a ViT-B/16, compiled, is 7% faster at 224 pixels than with softmax attention and no positions, and
    takes 0.55 of its time at 1,024. With fewer tokens softmax attention is no slower: prefer it there. Measured:
    scripts/results/benchmark-linear.csv, linear-training.csv and linear-scaling.csv.

    Args:
        q, k, v: (B, H_q, N_q, D), (B, H_k, N_k, D), (B, H_k, N_k, D_v) with any strides; H_k divides H_q (GQA): query
            head h reads key head h // (H_q / H_k). N_q and N_k differ with a pair of positions, or without a map.
            DTensors may have batch, heads or tokens sharded; with ``block``, each rank holds whole blocks. Then o has
            q's placements, and positions, block and the blocks of a decay are those of the whole sequence.
        map: "cosine" (:func:`lrpe_md.cosine`), "rotate" (:func:`lrpe_md.rotate`) or None: no positions.
        omega, positions, act, dim, phase, pairs, rotary_dim, amplitude, order: as those functions have them. A pair
            of positions is for q and for k (cross-attention), a pair of phases likewise. Without a map positions are
            not needed; with ``block`` a grid's prefix and suffix count. ``pairs`` belongs to "rotate", ``order`` to
            "cosine", and without a map there is neither of them, nor a ``rotary_dim``: anything but the default is an
            error there.
        norm: a :class:`Norm` of q and k: over a head's channels in the same pass, over all heads' in one before it,
            whose result has q's dtype. Not with softmax over the sequence.
        normalizer: z of a row. "unrotated": max(q̄_n · Σ_m β_m k̄_m, eps), a sum of what is never negative, which the
            activation must be; no gradient passes the bound. With the cosine map no output is larger than the largest
            value that it sees. With a rotation it can be: by up to 1 / eps with relu, if q̄ shares no channel with the
            few keys that it sees. "encoded": q̂_n · Σ_m β_m k̂_m, and o = 0 where |z| < eps; z can be close to 0.
            "none": 1; add a norm after it. How large outputs get: docs/linear-attention.md.
        gate: β, (B, H_k or 1, N_k), floats or bools: factors of the keys. 0 takes a token out, whatever it holds, NaN
            included, and has no gradient itself.
        is_causal: token n sees tokens up to n.
        block: token n sees all blocks of so many tokens up to its own, which it sees whole (the frames of a video).
            Prefix tokens are a block of their own that all see, suffix tokens one that sees all.
        cu_seqlens: where each of the sequences in q (1, H, N, D) starts, and where the last ends: (num_seqs + 1,)
            int32 or int64, from 0 to N. A sequence sees itself alone, and may be empty. On a CPU the values are
            checked. On a GPU they are not read, which would wait for it. The kernels then take an offset beyond 0 to N
            for that bound, and one that falls for the largest before it, and leave outputs and gradients of tokens that
            are in no sequence unwritten, possibly NaN; the reference fails with an assertion of the device.
        state: what was summed before: (S, Σ), as ``return_state`` gives it: S (B, H_k, Ê, D_v), Ê the width of k̂, and
            Σ (B, H_k, D) of "unrotated", (B, H_k, Ê) of "encoded", None of "none"; float32, float64 where q is; with
            cu_seqlens one a sequence. Pieces of a causal sequence, or whole blocks, one after the other, equal the
            whole: give each its positions (``Grid(start=, length=)``, or an origin).
        return_state: return (o, state) with the sums after the last token.
        decay: g in (0, 1], with ``is_causal`` or ``block``: each block first multiplies the state by its g. By head,
            (H_k or 1,), or (B or 1, H_k or 1, F), with a factor for each of the F blocks between prefix and suffix.
            These two keep everything. With ``is_causal`` each token is a block, and F counts all tokens. The values are
            checked on a CPU, but not on a GPU, which would have to wait for them.
        rule: how a block f enters the state. "add": S_f = g_f S_{f−1} + Σ_{m∈f} β_m k̂_m v_mᵀ. "delta", with ``block``:
            the block first takes out what its keys read, S_f = g_f (I − Σ_{m∈f} β_m k̂_m k̂_mᵀ) S_{f−1} +
            Σ_{m∈f} β_m k̂_m v_mᵀ. Σ follows the same rule with k̄, or for "encoded" with k̂. Scale the keys, or the
            gate, so that Σ_{m∈f} β_m |k̂_m|² is about 1 or less: otherwise the state can grow from block to block.
        directions: "both", with ``block``: a query also reads a second memory, which starts at the last block and ends
            at the one after the query's own. The two are added, in the numerator and in z, before the division. It
            needs the whole sequence, so it takes and returns no state.
        eps: of the normalizer, absolute.
        impl: "auto" runs Triton on a GPU and the reference elsewhere; "triton" raises where it can't run.

    Returns:
        (B, H_q, N_q, D_v) in q's dtype (also under autocast) and memory order, or (o, (S, Σ)). Sums are float32, or
        float64 where q is. A row that sees nothing is 0.

    Differentiable with respect to q, k, v, gate, decay, omega, phase, state and the norm's weight and bias: fused,
    deterministic, in first-order reverse mode; other derivatives, and those of coordinates and amplitude, are the
    reference's, as for :func:`lrpe_md.cosine`.

    Raises:
        ValueError, TypeError: an argument that does not fit, before anything is launched.

    Source: Katharopoulos et al., Transformers are RNNs (arXiv 2006.16236); positions: RoFormer (arXiv 2104.09864,
    eq. 19), LRPE (arXiv 2307.09270); decay: TransNormerLLM (arXiv 2307.14995), RetNet (arXiv 2307.08621); the delta
    rule: Gated DeltaNet (arXiv 2412.06464).
    """
    options = LinearOptions(
        map, act, dim, pairs, rotary_dim, order, normalizer, is_causal, block, eps, return_state, impl,
        rule=rule, directions=directions,
    )  # fmt: skip
    given = TensorArguments(q, k, v, gate, cu_seqlens, as_state(state), decay=decay)
    return run_linear_attention(options, given, Sides(omega, positions, phase, amplitude), norm)
