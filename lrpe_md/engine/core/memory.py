"""Find the memory layout of tensors (B, H, N, D), and create tensors with the same layout."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_order(x: Tensor) -> tuple[int, int, int]:
    """Return the order of the first three dimensions of x (B, H, N, D) in memory, outermost first."""
    b, h, n, _ = x.stride()
    if b >= h >= n:
        return (0, 1, 2)
    if b >= n >= h:
        return (0, 2, 1)
    first, second, third = sorted(range(3), key=lambda i: -x.stride(i))
    return first, second, third


def strides_in_memory(x: Tensor, last: int) -> tuple[int, int, int, int]:
    """Return the strides of a dense tensor (B, H, N, last) with the memory order of x (B, H, N, D)."""
    strides, step = [0, 0, 0], last
    for i in reversed(memory_order(x)):
        strides[i] = step
        step = step * x.shape[i]
    return strides[0], strides[1], strides[2], 1


def like_in_memory(x: Tensor, last: int) -> Tensor:
    """Allocate a dense tensor (B, H, N, last) with the memory order of x (B, H, N, D)."""
    return torch.empty_strided((*x.shape[:3], last), strides_in_memory(x, last), dtype=x.dtype, device=x.device)


def arrange_in_memory(y: Tensor, order: tuple[int, int, int]) -> Tensor:
    """Return y (B, H, N, D) with its first three dimensions in the given memory order, outermost first."""
    if order == (0, 1, 2):
        return y
    first, second, third = (order.index(i) for i in range(3))
    return y.permute(*order, 3).contiguous().permute(first, second, third, 3)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which inputs of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_projection(qkv: Tensor, num_key_heads: int | None) -> tuple[Tensor, ...]:
    """Split (B, N, 3, H, D) or, with num_key_heads, (B, N, H_q + 2 H_k, D) into views q, k and v (B, H, N, D)."""
    if num_key_heads is None:
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)
    sizes = [qkv.shape[2] - 2 * num_key_heads, num_key_heads, num_key_heads]
    return tuple(t.transpose(1, 2) for t in qkv.split(sizes, dim=2))
