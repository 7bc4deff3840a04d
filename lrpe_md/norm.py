"""The norm of q and k, which a map takes with it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

__all__ = ["Norm", "NormName", "Over", "Weight"]

NormName = Literal["rms", "layer"]
Over = Literal["head", "heads"]
Weight = Tensor | tuple[Tensor, Tensor] | None


class Norm(NamedTuple):
    """x̄ = act(norm(x)): q and k are normalised before they are activated and turned, in the same pass over memory.

        rms    x / √(mean x² + eps) · (weight + offset)
        layer  (x - mean x) / √(mean (x - mean x)² + eps) · (weight + offset) + bias

    Args:
        kind: "rms" or "layer".
        weight: γ, of q and of k alike, or a pair; None for none. Over a head (D,) or (H, D), over all heads (H, D), H
            being q's heads or k's. With a dimension of 2 or 3 in front, (2 or 3, 1 or H, D), tokens differ: those of
            the prefix have the first, of the grid the second, of the suffix the third (joint blocks of text and
            image). float16, bfloat16, float32 or float64.
        bias: β of "layer", of weight's shape and dtype.
        eps: added to the mean, above 0.
        over: what a mean is taken over: the channels of each "head", or those of all "heads" of q, or of k.
        offset: of the weight, 1 where a model keeps γ - 1 (Gemma).

    Means and products are of float32, or float64 where x is, whatever the weight's dtype; they are rounded once, with
    what the map makes of them. Differentiable with respect to weight and bias, whose gradients have their dtype and are
    deterministic, like those of the frequencies.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467); Ba et al., Layer Normalization
    (arXiv 1607.06450); of q and k: Henry et al., Query-Key Normalization (arXiv 2010.04245).
    """

    kind: NormName = "rms"
    weight: Weight = None
    bias: Weight = None
    eps: float = 1e-6
    over: Over = "head"
    offset: float = 0.0
