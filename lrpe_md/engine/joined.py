"""q, k and v of one projection, whose gradients are written where the projection's is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Joined", "Split", "find_split"]


class Joined:
    """The gradient of a projection while it is being written."""

    __slots__ = ("buffer", "num_key_heads", "shape")

    def __init__(self, shape: torch.Size, num_key_heads: int | None) -> None:
        self.shape, self.num_key_heads, self.buffer = shape, num_key_heads, None

    def allocate(self, like: Tensor, count: int) -> tuple[Tensor, ...]:
        """For dq, dk and, of three, dv, of the dtype of ``like``."""
        self.buffer = like.new_empty(self.shape)
        return self.places(self.buffer)[:count]

    def places(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v (B, H, N, D) of a projection."""
        if self.num_key_heads is None:
            return qkv.permute(2, 0, 3, 1, 4).unbind(0)
        sizes = [qkv.shape[2] - 2 * self.num_key_heads, self.num_key_heads, self.num_key_heads]
        return tuple(t.transpose(1, 2) for t in qkv.split(sizes, dim=2))

    def take(self) -> Tensor | None:
        buffer, self.buffer = self.buffer, None
        return buffer


class Split(torch.autograd.Function):
    """A projection (B, N, 3, H, D), or with num_key_heads (B, N, H_q + 2 H_k, D) → q, k, v (B, H, N, D), views."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_key_heads: int | None) -> Any:
        ctx.joined = Joined(qkv.shape, num_key_heads)
        return ctx.joined.places(qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        joined = ctx.joined
        buffer = joined.take()
        if buffer is None or torch.is_grad_enabled():
            join = torch.stack if joined.num_key_heads is None else torch.cat
            return join([g.transpose(1, 2) for g in grads], dim=2), None
        for place, grad in zip(joined.places(buffer), grads, strict=True):
            if place.data_ptr() != grad.data_ptr() or place.stride() != grad.stride():
                place.copy_(grad)
        return buffer, None


def find_split(xs: Sequence[Tensor]) -> Joined | None:
    """Of q and k, or q, k and v, that :func:`split_qkv` gave, as they are."""
    node: Any = xs[0].grad_fn
    if len(xs) == 1 or type(node) is not Split._backward_cls:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return node.joined if all(x.grad_fn is node and x.output_nr == i for i, x in enumerate(xs)) else None
