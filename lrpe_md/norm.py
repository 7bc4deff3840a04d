"""Normalisation of q and k, fused with the encoding."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

__all__ = ["Norm", "NormName", "Over", "Weight"]

NormName = Literal["rms", "layer"]
Over = Literal["head", "heads"]
Weight = Tensor | tuple[Tensor, Tensor] | None


class Norm(NamedTuple):
    """Norm that is applied to q and k in the same pass as the map, before the activation: x̄ = act(norm(x)).

        rms    x / √(mean x² + eps) · (weight + offset)
        layer  (x - mean x) / √(mean (x - mean x)² + eps) · (weight + offset) + bias

    Args:
        kind: "rms" or "layer".
        weight: γ, either one tensor for both q and k or a pair (for q, for k). None means no weight. The shape is (D,)
            or (H, D) with over="head", and (H, D) with over="heads", where H is the number of heads of q or k. A weight
            of shape (2 or 3, 1 or H, D) contains separate weights for prefix, grid and (with 3) suffix tokens, as in
            joint text-image blocks. Only the ``prefix`` and ``suffix`` of positions count: the tables of pack, pad,
            compose and zigzag have neither, so all their tokens count as grid tokens. The dtype is float16, bfloat16,
            float32 or float64.
        bias: β for "layer", with the same shape and dtype as weight.
        eps: positive number to add to the mean square.
        over: "head" normalises each head separately. "heads" averages over the channels of all heads of q (or k)
            together.
        offset: number to add to the weight, such as 1 for models that store γ - 1 (Gemma).

    Arithmetic is in float32, or in float64 for float64 x, regardless of the weight's dtype, and only the final result
    is rounded. Norms are differentiable with respect to weight and bias. These gradients are deterministic, and have
    the dtype of weight and bias.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467); Ba et al., Layer Normalization
    (arXiv 1607.06450); for norms of q and k, Henry et al., Query-Key Normalization (arXiv 2010.04245).
    """

    kind: NormName = "rms"
    weight: Weight = None
    bias: Weight = None
    eps: float = 1e-6
    over: Over = "head"
    offset: float = 0.0
