"""Decay and the gated delta rule for :mod:`lrpe_md.reference_linear`.

    S_f = g_f (I − A_f) S_{f−1} + B_f        A_f = Σ_{m∈f} β_m k̂_m k̂_mᵀ        B_f = Σ_{m∈f} β_m k̂_m v_mᵀ

Block f contains the tokens m. With rule "add", A is 0. The normaliser's sums follow the same rule, with their own A. B
is the batch size, H the number of key heads, and F the number of blocks. A state is (B, H, ...), and a series of states
is (B, H, F, ...).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_products import product

__all__ = ["accumulate", "apply_delta_rule", "lay_out_decay", "multiply_decay", "sum_after"]


def lay_out_decay(decay: Tensor | None, num_blocks: int, like: Tensor) -> Tensor:
    """Expand a decay per head (H,), or one per block, to (B or 1, H or 1, F), in at least the dtype of ``like``.

    A float64 decay keeps its dtype, because float32 would round the smallest factors to 0, whose logarithm is infinite.
    """
    if decay is None:
        return like.new_ones(1, 1, num_blocks)
    decay = decay.to(torch.promote_types(decay.dtype, like.dtype))
    return decay[None, :, None].expand(-1, -1, num_blocks) if decay.ndim == 1 else decay


def multiply_decay(log_decay: Tensor) -> Tensor:
    """Return the weights (..., F + 1, F + 1) of block j in the state after block i, given log g (..., F).

    The weight is the product of g over blocks j + 1 to i, and block 0 is the initial state. Each product has its own
    sum of logarithms, because a difference of two cumulative sums would lose precision if the decay is strong.
    """
    size = log_decay.shape[-1] + 1
    logs = torch.nn.functional.pad(log_decay, (1, 0))[..., :, None].expand(*log_decay.shape[:-1], size, size)
    index = torch.arange(size, device=log_decay.device)
    later = index[:, None] > index
    return torch.where(later, logs, 0).cumsum(-2).exp().tril()


def accumulate(before: Tensor, parts: Tensor, weights: Tensor) -> Tensor:
    """Return the states (B, H, F + 1, ...) before each block and after the last one, for rule "add".

    ``before`` has shape (B, H, ...), and ``parts`` has shape (B, H, F, ...). ``weights`` come from
    :func:`multiply_decay`.
    """
    series = torch.cat([before.unsqueeze(2), parts], dim=2)
    batch, heads, size = series.shape[:3]
    return product(weights.expand(batch, heads, size, size), series.flatten(3)).view(series.shape)


def apply_delta_rule(before: Tensor, parts: Tensor, transitions: Tensor, decay: Tensor) -> Tensor:
    """Return the states (B, H, F + 1, ...) before each block and after the last one, for rule "delta".

    ``transitions`` contains A (B, H, F, E, E), and ``decay`` has shape (B or 1, H or 1, F).
    """
    state, series = before, [before]
    for f in range(parts.shape[2]):
        columns = state if state.ndim == 4 else state.unsqueeze(-1)
        kept = (columns - product(transitions[:, :, f], columns)).view(state.shape)
        g = decay[:, :, f].to(state.dtype).reshape(*decay.shape[:2], *(1,) * (state.ndim - 2))
        state = g * kept + parts[:, :, f]
        series.append(state)
    return torch.stack(series, dim=2)


def sum_after(values: Tensor, sequence: Tensor) -> Tensor:
    """For each chunk, sum values (..., C) over the later chunks with the same sequence number in ``sequence`` (C,)."""
    index = torch.arange(len(sequence), device=sequence.device)
    chosen = (index > index[:, None]) & (sequence == sequence[:, None])
    return torch.where(chosen, values[..., None, :], 0).sum(-1)
