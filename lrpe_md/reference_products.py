"""Matrix products for the reference, computed in the dtype of their factors regardless of autocast and TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .engine.inductor.private import are_transforms_active
from .reference import no_autocast

__all__ = ["product"]


@contextmanager
def _exact_products(x: Tensor) -> Iterator[None]:
    """Disable autocast, TF32 and (on a CPU) bfloat16 products, so that float32 products have full precision."""
    backends: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore
    before = [(backend, backend.fp32_precision) for backend in backends]
    loose = [(backend, precision) for backend, precision in before if precision not in ("ieee", "none")]
    if not loose and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        yield
        return
    try:
        for backend, _ in loose:
            backend.fp32_precision = "ieee"
        with no_autocast(x):
            yield
    finally:
        for backend, precision in loose:
            backend.fp32_precision = precision


class _Product(torch.autograd.Function):
    """Product a @ b, with derivatives that also have full precision."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, operands: torch.dtype | None) -> Tensor:
        ctx.operands = operands
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        with _exact_products(a):
            return _rounded(a, operands) @ _rounded(b, operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore
        a, b = ctx.saved_tensors
        need_a, need_b, _ = ctx.needs_input_grad
        da = product(grad, b.mT, ctx.operands) if need_a else None
        return da, product(a.mT, grad, ctx.operands) if need_b else None, None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, _: None) -> Tensor | None:  # pyright: ignore
        a, b = ctx.saved_tensors
        parts = [] if da is None else [product(da, b, ctx.operands)]
        parts += [] if db is None else [product(a, db, ctx.operands)]
        return sum(parts[1:], parts[0]) if parts else None


class _TransformedProduct(_Product):
    """Product in the form that function transforms require, which has more overhead per call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, operands: torch.dtype | None) -> Tensor:  # pyright: ignore
        with _exact_products(a):
            return _rounded(a, operands) @ _rounded(b, operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.operands = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)


def _rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    return t if dtype is None else t.to(dtype).to(t.dtype)


def product(a: Tensor, b: Tensor, operands: torch.dtype | None = None) -> Tensor:
    """Multiply a (..., M, K) and b (..., K, N) in their own dtype, regardless of autocast and TF32.

    If ``operands`` is set, both factors are first rounded to this dtype, also in the derivatives. Gradients pass
    through the rounding unchanged.
    """
    if torch.compiler.is_compiling():  # the settings at tracing time apply to the whole graph
        with no_autocast(a):
            return _rounded(a, operands) @ _rounded(b, operands)
    return (_TransformedProduct if are_transforms_active() else _Product).apply(a, b, operands)
