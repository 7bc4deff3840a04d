"""The public function :func:`linear_attention`, implemented in :mod:`lrpe_md.engine.linear`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .engine.core.call import Act, Impl, Order, Pairs, Positions
from .engine.linear.call import (
    Directions,
    LinearOptions,
    MapOrNone,
    NormalizerName,
    Operands,
    Rule,
    Sides,
    State,
)
from .engine.linear.dispatch import as_state, run_linear_attention
from .norm import Norm
from .positions.sequences import Packed

__all__ = ["linear_attention"]

Phases = Tensor | tuple[Tensor | None, Tensor | None] | None  # φ for both, or one for q and one for k
LinearPositions = Positions | Packed | tuple[Positions | None, Positions | None] | None


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, map: MapOrNone = ..., omega: Tensor | None = ...,
    positions: LinearPositions = ..., act: Act = ..., dim: int | None = ..., phase: Phases = ..., pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., normalizer: NormalizerName = ..., gate: Tensor | None = ..., is_causal: bool = ...,
    block: int | None = ..., cu_seqlens: Tensor | None = ..., state: State | tuple[Tensor] | None = ...,
    return_state: Literal[False] = ..., decay: Tensor | None = ..., rule: Rule = ..., directions: Directions = ...,
    eps: float = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, map: MapOrNone = ..., omega: Tensor | None = ...,
    positions: LinearPositions = ..., act: Act = ..., dim: int | None = ..., phase: Phases = ..., pairs: Pairs = ...,
    rotary_dim: int | slice | None = ..., amplitude: float | Tensor | None = ..., order: Order = ...,
    norm: Norm | None = ..., normalizer: NormalizerName = ..., gate: Tensor | None = ..., is_causal: bool = ...,
    block: int | None = ..., cu_seqlens: Tensor | None = ..., state: State | tuple[Tensor] | None = ...,
    return_state: Literal[True], decay: Tensor | None = ..., rule: Rule = ..., directions: Directions = ...,
    eps: float = ..., impl: Impl = ...,
) -> tuple[Tensor, State]: ...  # fmt: skip
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, map: MapOrNone = ..., omega: Tensor | None = ...,
    positions: LinearPositions = ..., act: Act = ..., dim: int | None = ..., phase: Phases = ..., pairs: Pairs = ...,
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
    positions: LinearPositions = None,
    act: Act = "relu",
    dim: int | None = None,
    phase: Phases = None,
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
    """Compute linear attention, o_n = q̂_n · (Σ_m β_m k̂_m v_mᵀ) / z_n, where q̂ is the map of q̄ = act(norm(q)).

    k̂ is computed from k in the same way. The cost is linear in the number of tokens, and q̂ and k̂ are never written
    to memory.

    On an H100 in bfloat16 with head_dim 64, linear attention is faster than softmax attention (PyTorch's fastest
    backend, without positions) above about 200 tokens. For shorter sequences, prefer softmax attention, which is at
    least as fast. At 4,096 tokens, the forward and backward passes of linear attention are about ten times as fast as
    those of softmax attention. With a causal mask, they are six times as fast at 8,192 tokens. The measurements are in
    benchmark-linear.csv, linear-training.csv and linear-scaling.csv in scripts/results.

    Args:
        q, k, v: tensors (B, H_q, N_q, D), (B, H_k, N_k, D) and (B, H_k, N_k, D_v) with any strides. H_k must divide H_q
            (GQA), and query head h reads key head h // (H_q / H_k). N_q and N_k may differ if you pass a pair of
            positions or use no map. DTensors may be sharded along batch, heads or tokens. With ``block``, each rank
            must hold whole blocks. The output has q's placements. Pass positions, block and the decay's blocks for the
            whole sequence.
        map: "cosine" (:func:`lrpe_md.cosine`), "rotate" (:func:`lrpe_md.rotate`), or None for no positions.
        omega, positions, act, dim, phase, pairs, rotary_dim, amplitude, order: see :func:`lrpe_md.cosine` and
            :func:`lrpe_md.rotate`. For cross-attention, pass a pair of positions (for q, for k); phase may also be a
            pair. Without a map, positions are optional, and only define the prefix and suffix for ``block``. ``pairs``
            requires map="rotate", ``order`` requires map="cosine", and ``rotary_dim`` requires one of the two.
        norm: a :class:`Norm` of q and k. A norm over each head runs in the same pass. A norm over all heads runs in a
            separate pass, and its result has q's dtype. Softmax over the sequence does not support a norm.
        normalizer: denominator z of each row.

            - "unrotated": max(q̄_n · Σ_m β_m k̄_m, eps), for activations that are never negative. Where z equals eps,
              its gradient is zero. With the cosine map, no output exceeds the largest value that it attends to. With a
              rotation and relu, an output can reach about v / eps if q̄ shares no channel with the few keys that it
              attends to.
            - "encoded": q̂_n · Σ_m β_m k̂_m, which can be close to 0. The output is 0 if |z| < eps.
            - "none": 1. Add a norm after the attention. docs/linear-attention.md shows how large outputs can get.
        gate: β (B, H_k or 1, N_k), floats or bools that multiply the keys. A gate of 0 removes a token, even one that
            contains NaN, and gets no gradient. Before a norm over all heads, it sets k to 0 in its head, so it also
            changes the mean over the token's other heads.
        is_causal: whether each token attends only to itself and earlier tokens.
        block: number of tokens per block, for example per video frame. A token attends to its own block and to all
            earlier blocks. All tokens attend to the prefix, and suffix tokens attend to all tokens.
        cu_seqlens: boundaries (num_seqs + 1,) of sequences packed end to end in q (1, H, N, D), from 0 to N, as int32
            or int64. Alternatively, pass the result of :func:`lrpe_md.pack` as positions. Sequences don't attend to
            each other, and may be empty. Values are checked on a CPU, but not on a GPU, where reading them would force
            a synchronisation. On a GPU, the kernels clamp boundaries to [0, N], and replace a decreasing boundary with
            the largest one before it. Outputs and gradients of tokens outside of all sequences are not written, and may
            be NaN. The reference instead fails with a device assertion.
        state: sums (S, Σ) over earlier tokens, as returned with ``return_state``. S is (B, H_k, Ê, D_v), where Ê is the
            width of k̂. Σ is (B, H_k, D) for "unrotated", (B, H_k, Ê) for "encoded" and None for "none". Both are
            float32, or float64 if q is float64. With cu_seqlens, num_seqs replaces B. You can process a causal sequence
            in chunks (with ``block``, in whole blocks) and get the same result as in a single call. Give each chunk its
            own positions, with ``Grid(start=, length=)`` or an origin.
        return_state: whether to also return the state after the last token, as (o, state).
        decay: g in (0, 1], which requires ``is_causal`` or ``block``. Before a block is added, the state is multiplied
            by the block's g. The shape is (H_k or 1,), or (B or 1, H_k or 1, F) for the F blocks between prefix and
            suffix. Prefix and suffix tokens don't decay the state. With ``is_causal``, each token is a block, and F is
            the number of tokens. Values are checked on a CPU, but not on a GPU, where reading them would force a
            synchronisation.
        rule: how block f updates the state. "add" computes S_f = g_f S_{f−1} + Σ_{m∈f} β_m k̂_m v_mᵀ. "delta", which
            requires ``block``, first removes the values that the block's keys retrieve: S_f = g_f (I − Σ_{m∈f} β_m k̂_m
            k̂_mᵀ) S_{f−1} + Σ_{m∈f} β_m k̂_m v_mᵀ. Σ follows the same rule with k̄, or with k̂ for "encoded". Scale the
            keys or the gate so that Σ_{m∈f} β_m |k̂_m|² is about 1 or less. Otherwise, the state can grow from block to
            block.
        directions: with "both" (requires ``block``), a query also reads a second state, accumulated backwards from the
            last block to the one after the query's own block. Both states contribute to the numerator and to z. This
            requires the whole sequence, so you can't pass a state, and none is returned.
        eps: absolute threshold of the normalizer.
        impl: "auto" uses Triton on a GPU and the reference elsewhere. "triton" raises an error if Triton cannot run.

    Returns:
        o (B, H_q, N_q, D_v) in q's dtype (also under autocast) and memory order, or (o, (S, Σ)). Sums are in float32,
        or in float64 if q is float64. Rows that attend to no tokens are 0.

    The result is differentiable with respect to q, k, v, gate, decay, omega, phase, state, and the norm's weight and
    bias. Ordinary gradients come from a fused, deterministic backward pass. Other derivatives, and gradients of
    coordinates and amplitude, come from the reference, as for :func:`lrpe_md.cosine`.

    Raises:
        ValueError, TypeError: for an invalid argument, before a kernel is launched.

    Sources: Katharopoulos et al., Transformers are RNNs (arXiv 2006.16236); for positions, RoFormer (arXiv 2104.09864,
    eq. 19) and LRPE (arXiv 2307.09270); for decay, TransNormerLLM (arXiv 2307.14995) and RetNet (arXiv 2307.08621); for
    the delta rule, Gated DeltaNet (arXiv 2412.06464).
    """
    options = LinearOptions(
        map, act, dim, pairs, rotary_dim, order, normalizer, is_causal, block, eps, return_state, impl,
        rule=rule, directions=directions,
    )  # fmt: skip
    operands = Operands(q, k, v, gate, as_state(state), decay)
    return run_linear_attention(options, operands, Sides(omega, positions, phase, amplitude, cu_seqlens), norm)
