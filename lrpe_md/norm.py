"""Normalisation of q and k, fused with the map."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

__all__ = ["Norm", "NormName", "Over", "Weight"]

NormName = Literal["rms", "layer"]
Over = Literal["head", "heads"]
Weight = Tensor | tuple[Tensor, Tensor] | None


class Norm(NamedTuple):
    """Norm of q and k, applied before the activation and the map in the same pass: x̄ = act(norm(x)).

        rms    x / √(mean x² + eps) · (weight + offset)
        layer  (x - mean x) / √(mean (x - mean x)² + eps) · (weight + offset) + bias

    Args:
        kind: "rms" or "layer".
        weight: γ, one for both or a pair (for q, for k); None for no weight. The shape is (D,) or (H, D) with
            over="head", and (H, D) with over="heads", where H is the number of heads of q or k. A leading dimension of
            2 or 3, (2 or 3, 1 or H, D), gives prefix, grid and suffix tokens separate weights, as in joint text-image
            blocks. The dtype is float16, bfloat16, float32 or float64.
        bias: β for "layer", with weight's shape and dtype.
        eps: added to the mean; positive.
        over: "head" averages over the channels of each head, "heads" over those of all heads of q (or k) together.
        offset: added to the weight; 1 for models that store γ - 1 (Gemma).

    Arithmetic is float32, or float64 for float64 x, whatever the weight's dtype; only the final result is rounded.
    Differentiable with respect to weight and bias. Their gradients are deterministic and have the dtype of weight and
    bias.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467); Ba et al., Layer Normalization
    (arXiv 1607.06450); of q and k: Henry et al., Query-Key Normalization (arXiv 2010.04245).
    """

    kind: NormName = "rms"
    weight: Weight = None
    bias: Weight = None
    eps: float = 1e-6
    over: Over = "head"
    offset: float = 0.0
