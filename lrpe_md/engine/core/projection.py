"""Split a projection into q, k and v, whose gradients are written directly into the gradient of the projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix, ops
from ..inductor.lowering import register
from ..inductor.private import find_backward
from .memory import split_projection


class ProjectionGradient:
    """Buffer for the gradient of a projection. Backward passes write dq, dk and dv to it."""

    __slots__ = ("buffer", "num_key_heads", "shape")

    def __init__(self, shape: torch.Size, num_key_heads: int | None) -> None:
        self.shape, self.num_key_heads, self.buffer = shape, num_key_heads, None

    def allocate(self, like: Tensor, count: int) -> tuple[Tensor, ...]:
        """Allocate dq, dk and, if count is 3, dv, with the dtype of ``like``."""
        self.buffer = like.new_empty(self.shape)
        return split_projection(self.buffer, self.num_key_heads)[:count]

    def take(self) -> Tensor | None:
        buffer, self.buffer = self.buffer, None
        return buffer


class Split(torch.autograd.Function):
    """Split (B, N, 3, H, D) or, with num_key_heads, (B, N, H_q + 2 H_k, D) into views q, k and v (B, H, N, D)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_key_heads: int | None) -> Any:
        ctx.projection_gradient = ProjectionGradient(qkv.shape, num_key_heads)
        return split_projection(qkv, num_key_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradient = ctx.projection_gradient
        buffer = gradient.take()
        if buffer is None or torch.is_grad_enabled():
            return join(grads, gradient.num_key_heads), None
        for view, grad in zip(split_projection(buffer, gradient.num_key_heads), grads, strict=True):
            if view.data_ptr() != grad.data_ptr() or view.stride() != grad.stride():
                view.copy_(grad)
        return buffer, None


class TracedSplit(torch.autograd.Function):
    """Variant of :class:`Split` for compiled code.

    Its backward pass is a single operator, lowered in inductor/lowering.py.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_key_heads: int | None) -> Any:
        ctx.num_key_heads = num_key_heads
        return split_projection(qkv, num_key_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ops.join(list(grads), ctx.num_key_heads), None


def join(grads: Sequence[Tensor], num_key_heads: int | None) -> Tensor:
    """Join dq, dk and dv (B, H, N, D) into the gradient of the projection."""
    combine = torch.stack if num_key_heads is None else torch.cat
    return combine([g.transpose(1, 2) for g in grads], dim=2)


def _join_fake(grads: Sequence[Tensor], num_key_heads: int | None) -> Tensor:
    register()
    return join(grads, num_key_heads)


_lib = torch.library.Library(ops.name, "FRAGMENT")
_lib.define("join(Tensor[] grads, SymInt? num_key_heads) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_lib.impl("join", join, "CompositeExplicitAutograd")
torch.library.register_fake(add_op_namespace_prefix("join"), _join_fake, lib=_lib)


def find_split(xs: Sequence[Tensor]) -> ProjectionGradient | None:
    """Return the :class:`ProjectionGradient` of q and k, or of q, k and v, if all are outputs of the same split."""
    node: Any = xs[0].grad_fn
    if len(xs) == 1 or type(node) is not find_backward(Split):
        return None
    return node.projection_gradient if all(x.grad_fn is node and x.output_nr == i for i, x in enumerate(xs)) else None
