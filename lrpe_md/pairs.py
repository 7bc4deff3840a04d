"""Conversion of weights between layouts of channel pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_at_least, check_dense, rotary_slice
from .engine.core.call import Pairs
from .engine.encode.validate import check_pairs
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
    """Convert a q or k projection from one layout of channel pairs to another by reordering its output channels.

    If q' is the output of the converted projection, ``rotate(q', pairs=target)`` equals ``rotate(q, pairs=source)``
    with its channels reordered. Convert both q and k, so that attention scores stay the same. Convert weights, biases
    and per-channel norms, but leave v unchanged.

    Args:
        weight: weight (H · D, C) or bias (H · D,) of a linear layer, or any tensor with H · D channels along ``dim``.
            For a packed projection, convert the rows of q and k separately.
        source, target: current and new layout, "half", "interleaved", or block sizes in pairs; see
            :func:`lrpe_md.rotate`. RoFormer, GPT-J, GLM, Cohere and Mistral's own code use "interleaved". Llama in
            transformers uses "half".
        head_dim: number of channels per head, D.
        num_heads: number of heads, H, used to check the weight's size. By default, any number is accepted.
        rotary_dim: rotated channels of a head; see :func:`lrpe_md.rotate`. The other channels are not moved.

    Returns:
        a new tensor with the same shape and dtype, which is differentiable with respect to the weight.

    Raises:
        ValueError, TypeError: for an invalid shape, layout or width, or a weight that is not a tensor.
    """
    check_at_least(1, head_dim=head_dim)
    check_dense("weight", weight, "(H · D, C) or (H · D,)")
    size = weight.shape[dim]
    if size % head_dim or num_heads not in (None, size // head_dim):
        heads = "H" if num_heads is None else num_heads
        raise ValueError(
            f"weight: expected {heads} heads of {head_dim} channels along dim {dim}, got {size} channels in a tensor "
            f"of shape {tuple(weight.shape)}"
        )
    start, width = rotary_slice(rotary_dim, head_dim)
    (was, was_blocks), (becomes, becomes_blocks) = (check_pairs(p, width // 2) for p in (source, target))
    order = torch.arange(head_dim, device="cpu")
    turned = split_pairs(order[start : start + width], was, was_blocks)
    order[start : start + width] = join_pairs(*turned, becomes, becomes_blocks)
    rows = torch.arange(0, size, head_dim, device="cpu")[:, None] + order
    return weight.index_select(dim, rows.flatten().to(weight.device))
