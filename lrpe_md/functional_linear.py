"""The public function of linear attention. :mod:`lrpe_md.engine.linear` implements it."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .engine.core.call import Act, Impl, Order, Pairs, Positions
from .engine.linear.call import Directions, LinearOptions, MapOrNone, NormalizerName, Rule, Sides, State
from .engine.linear.dispatch import as_state, run_linear_attention
from .engine.linear.validate import TensorArguments
from .norm import Norm
from .positions.sequences import Packed

__all__ = ["linear_attention"]

OnePosition = Positions | None


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, map: MapOrNone = ..., omega: Tensor | None = ...,
    positions: OnePosition | Packed | tuple[OnePosition, OnePosition] = ..., act: Act = ..., dim: int | None = ...,
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
    positions: OnePosition | Packed | tuple[OnePosition, OnePosition] = ..., act: Act = ..., dim: int | None = ...,
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
    positions: OnePosition | Packed | tuple[OnePosition, OnePosition] = ..., act: Act = ..., dim: int | None = ...,
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
    positions: OnePosition | Packed | tuple[OnePosition, OnePosition] = None,
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
    """Compute linear attention: o_n = q̂_n · (Σ_m β_m k̂_m v_mᵀ) / z_n, where q̂ is the map of q̄ = act(norm(q)).

    k̂ is computed like q̂. The cost is linear in the number of tokens, and q̂ and k̂ are never written to memory.

    Speed: on an H100 in bfloat16 with head_dim 64, linear attention is faster than softmax attention (PyTorch's fastest
    backend, without positions) above about 200 tokens. At 200 tokens, a forward takes nine tenths of the time, and a
    backward two thirds. At 4,096 tokens, both are about ten times as fast, and at 32,760 tokens a hundred times. With a
    causal mask at 8,192 tokens, they are six times as fast. A compiled training step of a ViT-B/16 is 7% faster at 224
    pixels than with softmax attention and no positions; at 1,024 pixels, it takes 0.55 of the time. With fewer tokens,
    prefer softmax attention, which is no slower. Measurements: scripts/results/benchmark-linear.csv,
    linear-training.csv and linear-scaling.csv.

    Args:
        q, k, v: (B, H_q, N_q, D), (B, H_k, N_k, D) and (B, H_k, N_k, D_v) with any strides. H_k divides H_q (GQA);
            query head h reads key head h // (H_q / H_k). N_q and N_k may differ with a pair of positions or without a
            map. DTensors may be sharded along batch, heads or tokens; with ``block``, each rank must hold whole blocks.
            o then has q's placements. Pass positions, block and the decay's blocks for the whole sequence.
        map: "cosine" (:func:`lrpe_md.cosine`), "rotate" (:func:`lrpe_md.rotate`), or None for no positions.
        omega, positions, act, dim, phase, pairs, rotary_dim, amplitude, order: see :func:`lrpe_md.cosine` and
            :func:`lrpe_md.rotate`. For cross-attention, pass a pair of positions (for q, for k); phase may also be a
            pair. Without a map, positions are optional, and only the prefix and suffix of a grid matter, for ``block``.
            ``pairs`` requires map="rotate", ``order`` requires map="cosine", and ``rotary_dim`` requires either.
        norm: a :class:`Norm` of q and k. A norm over each head runs in the same pass. A norm over all heads runs in a
            separate pass, and its result has q's dtype. Not supported with softmax over the sequence.
        normalizer: z of each row. "unrotated": max(q̄_n · Σ_m β_m k̄_m, eps), for activations that are never negative.
            If z is eps, it passes no gradient on. With the cosine map, no output is larger than the largest value that
            it sees. With a rotation and relu, an output can be about v / eps, if q̄ shares no channel with the few keys
            that it sees. "encoded": q̂_n · Σ_m β_m k̂_m, and o = 0 if |z| < eps; z can be close to 0. "none": 1; add a
            norm after the attention. docs/linear-attention.md shows how large outputs can get.
        gate: β, (B, H_k or 1, N_k), floats or bools that multiply the keys. 0 removes a token, even if it holds NaN,
            and gets no gradient.
        is_causal: token n sees tokens up to n.
        block: number of tokens per block, for example per video frame. A token sees its whole block and all earlier
            blocks. The prefix is a separate block that all tokens see, and the suffix is one that sees all tokens.
        cu_seqlens: boundaries of sequences packed end to end in q (1, H, N, D): (num_seqs + 1,) int32 or int64, from 0
            to N, or pass the result of :func:`lrpe_md.pack` as positions. Sequences don't see each other, and may be
            empty. Values are checked on a CPU, but not on a GPU, where reading them would force a synchronisation.
            There, the kernels clamp offsets to 0 .. N, and replace a decreasing offset with the largest one before it.
            Outputs and gradients of tokens in no sequence stay unwritten, and may be NaN. The reference fails with a
            device assertion.
        state: sums over earlier tokens, (S, Σ), as returned with ``return_state``. S is (B, H_k, Ê, D_v), where Ê is
            the width of k̂. Σ is (B, H_k, D) for "unrotated", (B, H_k, Ê) for "encoded" and None for "none". Both are
            float32, or float64 if q is. With cu_seqlens, num_seqs replaces B. You can process a causal sequence in
            pieces, or in whole blocks, with the same result as all at once. Give each piece its own positions
            (``Grid(start=, length=)``, or an origin).
        return_state: return (o, state), with the state after the last token.
        decay: g in (0, 1], with ``is_causal`` or ``block``. The state is multiplied by a block's g before the block is
            added. The shape is (H_k or 1,), or (B or 1, H_k or 1, F) for the F blocks between prefix and suffix. The
            state does not decay in prefix and suffix. With ``is_causal``, each token is a block, and F counts all
            tokens. Values are checked on a CPU, but not on a GPU, where reading them would force a synchronisation.
        rule: how block f updates the state. "add": S_f = g_f S_{f−1} + Σ_{m∈f} β_m k̂_m v_mᵀ. "delta", with ``block``,
            first removes the values that the block's keys read: S_f = g_f (I − Σ_{m∈f} β_m k̂_m k̂_mᵀ) S_{f−1} +
            Σ_{m∈f} β_m k̂_m v_mᵀ. Σ follows the same rule with k̄, or with k̂ for "encoded". Scale the keys or the gate
            so that Σ_{m∈f} β_m |k̂_m|² is about 1 or less. Otherwise, the state can grow from block to block.
        directions: "both", with ``block``: a query also reads a second memory, which runs backward from the last block
            to the one after the query's own. The two are added, in the numerator and in z, before the division. This
            needs the whole sequence, so no state is taken or returned.
        eps: absolute threshold of the normalizer.
        impl: "auto" uses Triton on a GPU and the reference elsewhere; "triton" raises if it cannot run.

    Returns:
        (B, H_q, N_q, D_v) in q's dtype (also under autocast) and memory order, or (o, (S, Σ)). Sums are float32, or
        float64 if q is. Rows that see no tokens are 0.

    Differentiable with respect to q, k, v, gate, decay, omega, phase, state, and the norm's weight and bias.
    First-order reverse mode runs the fused, deterministic backward. Other derivatives, and gradients of coordinates and
    amplitude, come from the reference, as for :func:`lrpe_md.cosine`.

    Raises:
        ValueError, TypeError: an invalid argument, before anything is launched.

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
