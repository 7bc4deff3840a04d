"""Pairings of channels, and conversion of weights from one pairing to another."""

from __future__ import annotations

import torch
from torch import Tensor

from .engine.encode.validate import Pairs, check_pairs, rotary_slice
from .reference import join_pairs, split_pairs

__all__ = ["convert_pairs"]


def convert_pairs(
    weight: Tensor,
    source: Pairs,
    target: Pairs,
    *,
    head_dim: int,
    num_heads: int | None = None,
    rotary_dim: int | slice | None = None,
    dim: int = 0,
) -> Tensor:
    """Reorder the channels that a projection to q or k puts out, so that ``target`` pairs what ``source`` paired.

    ``rotate(q', pairs=target)`` of the converted projection is the converted ``rotate(q, pairs=source)``, and as q and
    k are reordered alike, their scores stay the same. Convert both, weights and biases, norms by channel, too; v stays.

    Args:
        weight: of a linear layer to q or k, (H · D, C), its bias (H · D,), or anything with H · D channels along
            ``dim``. Of a packed projection give the rows of q and those of k.
        source, target: "half", "interleaved", or pairs a block; see :func:`lrpe_md.rotate`. RoFormer, GPT-J, GLM,
            Cohere and Mistral's own code are "interleaved", Llama in transformers is "half".
        head_dim: D.
        num_heads: H, to be checked against the weight; default: any.
        rotary_dim: the rotated channels of a head, see :func:`lrpe_md.rotate`; the others stay where they are.

    Returns:
        a new tensor of the same shape and dtype; differentiable.

    Raises:
        ValueError: a shape, a pairing or a width that does not fit.
    """
    if head_dim < 1:
        raise ValueError(f"head_dim: expected at least 1, got {head_dim}")
    size = weight.shape[dim]
    if size % head_dim or num_heads not in (None, size // head_dim):
        heads = "H" if num_heads is None else num_heads
        raise ValueError(
            f"weight: expected {heads} heads of {head_dim} channels along dim {dim}, got {size} ({tuple(weight.shape)})"
        )
    start, width = rotary_slice(rotary_dim, head_dim)
    (was, was_blocks), (becomes, becomes_blocks) = (check_pairs(p, width // 2) for p in (source, target))
    order = torch.arange(head_dim, device="cpu")
    turned = split_pairs(order[start : start + width], was, was_blocks)
    order[start : start + width] = join_pairs(*turned, becomes, becomes_blocks)
    rows = torch.arange(0, size, head_dim, device="cpu")[:, None] + order
    return weight.index_select(dim, rows.flatten().to(weight.device))
