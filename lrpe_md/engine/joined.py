"""q, k and v of one projection, whose gradients are written where the projection's is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Joined", "Split", "find_split"]


class Joined:
    """The gradient of a projection while it is being written."""

    __slots__ = ("buffer", "shape")

    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.buffer = shape, None

    def allocate(self, like: Tensor, count: int) -> tuple[Tensor, ...]:
        """For dq, dk and, of three, dv, of the dtype of ``like``."""
        self.buffer = like.new_empty(self.shape)
        return _places(self.buffer)[:count]

    def take(self) -> Tensor | None:
        buffer, self.buffer = self.buffer, None
        return buffer


class Split(torch.autograd.Function):
    """A projection (B, N, 3, H, D) → q, k, v (B, H, N, D), views."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Any:
        ctx.joined = Joined(qkv.shape)
        return _places(qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        buffer = ctx.joined.take()
        if buffer is None or torch.is_grad_enabled():
            return torch.stack([g.transpose(1, 2) for g in grads], dim=2)
        for place, grad in zip(_places(buffer), grads, strict=True):
            if place.data_ptr() != grad.data_ptr() or place.stride() != grad.stride():
                place.copy_(grad)
        return buffer


def _places(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def find_split(xs: Sequence[Tensor]) -> Joined | None:
    """Of q and k, or q, k and v, that :func:`split_qkv` gave, as they are."""
    node: Any = xs[0].grad_fn
    if len(xs) == 1 or type(node) is not Split._backward_cls:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return node.joined if all(x.grad_fn is node and x.output_nr == i for i, x in enumerate(xs)) else None
