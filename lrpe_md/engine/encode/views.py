"""Convert joint projections and packed tokens to views (B, H, N, D) of q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...checks import as_integer, check_boundaries, check_dense, check_offsets, describe_positions, show_value
from ...positions.coordinates import Coordinates
from ...positions.grid import Grid
from ...positions.sequences import Packed, refuse_mixing
from ..core.memory import split_projection
from ..core.operator import is_direct
from ..core.projection import Split, TracedSplit
from ..inductor.private import is_exporting, is_transforming

# Takes one tensor (B, H, N, D), or q and k, and returns the same number of tensors.
Encode = Callable[..., Any]


def encode_qkv(
    encode: Encode, xs: tuple[Any, ...], qkv: Tensor | None, num_key_heads: int | None, out: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode q and k of a joint projection. Return q, k and the unchanged v in the projection's layout.

    The layout is (B, N, H, D) or (N, H, D). ``out`` holds tensors in this layout that receive q and k.
    """
    if qkv is None:
        raise ValueError(f"num_key_heads: expected None without qkv, got {show_value(num_key_heads)}")
    if xs:
        raise TypeError("qkv: expected either qkv or separate tensors, got both")
    num_key_heads = _check_projection(qkv, num_key_heads)
    is_batched = qkv.ndim == (5 if num_key_heads is None else 4)
    out_argument = {} if out is None else {"out": tuple(map(order_heads, out)) if type(out) is tuple else out}
    q, k, v = split_qkv(qkv if is_batched else qkv[None], num_key_heads)
    q, k = encode(q, k, **out_argument)
    return _put_tokens_first(q, is_batched), _put_tokens_first(k, is_batched), _put_tokens_first(v, is_batched)


def split_qkv(qkv: Tensor, num_key_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Split (B, N, 3, H, D) or, with num_key_heads, (B, N, H_q + 2 H_k, D) into views q, k and v (B, H, N, D).

    In eager mode, and in Inductor's code if sizes are static, gradients are written directly into the gradient of the
    projection. :func:`lrpe_md.linear_attention` writes all three gradients. :func:`lrpe_md.rotate` and
    :func:`lrpe_md.cosine` write dq and dk, so only dv is copied. With ordinary PyTorch views, all three gradients
    would be copied.
    """
    if torch.is_grad_enabled() and not is_transforming():
        if is_direct((qkv,)):
            return Split.apply(qkv, num_key_heads)  # pyright: ignore[reportReturnType]
        if type(qkv) is Tensor and torch.compiler.is_dynamo_compiling() and not is_exporting():
            return TracedSplit.apply(qkv, num_key_heads)  # pyright: ignore[reportReturnType]
    q, k, v = split_projection(qkv, num_key_heads)
    return q, k, v


def encode_packed(encode: Encode, xs: tuple[Tensor, ...], num_tokens: int | None = None) -> Any:
    """Encode x, or q and k. Packed tensors (N, H, D) are passed to ``encode`` as views (1, H, N, D).

    ``num_tokens`` is the number of positions, which reveals whether tokens and heads are swapped.
    """
    packed = [isinstance(x, Tensor) and x.ndim == 3 for x in xs]
    if not any(packed):
        return encode(*xs)
    for name, x in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=False):
        check_dense(name, x, "(N, H, D)")
        if x.ndim != 3:
            raise ValueError(f"{name}: expected (N, H, D), like {'q' if name == 'k' else 'k'}, got {tuple(x.shape)}")
        if x.shape[0] != num_tokens and x.shape[1] == num_tokens:
            raise ValueError(
                f"{name}: expected packed tokens (N, H, D) with N = {num_tokens}, got {tuple(x.shape)}; "
                f"{name} looks like (H, N, D), so pass {name}.transpose(0, 1)"
            )
    ys = encode(*map(_put_heads_first, xs))
    return tuple(_put_tokens_first(y, False) for y in ys) if len(xs) > 1 else _put_tokens_first(ys, False)


def unpack_positions(packed: Packed, dim: int | None) -> Coordinates:
    """Return the positions of packed sequences. Raise an error if softmax over ``dim`` would mix sequences."""
    refuse_mixing(dim)
    if not isinstance(packed.positions, (Grid, Coordinates)):
        raise TypeError(f"positions: expected Coordinates in Packed, got {describe_positions(packed.positions)}")
    check_boundaries(packed.cu_seqlens)
    check_offsets(packed.cu_seqlens, packed.positions.num_tokens, to_the_end=False)
    return packed.positions


def _check_projection(qkv: Any, num_key_heads: Any) -> int | None:
    """Check a projection and num_key_heads, and return num_key_heads as an int."""
    check_dense("qkv", qkv, "(B, N, 3, H, D)")
    if num_key_heads is None:
        if qkv.ndim not in (4, 5) or qkv.shape[-3] != 3:
            raise ValueError(
                "qkv: expected ([B,] N, 3, H, D), or ([B,] N, H_q + 2 H_k, D) with num_key_heads, got "
                f"{tuple(qkv.shape)}"
                + ("; for a projection (B, N, 3 H D), pass qkv.unflatten(-1, (3, H, D))" if qkv.ndim == 3 else "")
            )
        return None
    if qkv.ndim not in (3, 4):
        raise ValueError(f"qkv: expected ([B,] N, H_q + 2 H_k, D) with num_key_heads, got {tuple(qkv.shape)}")
    heads, total = None if isinstance(num_key_heads, bool) else as_integer(num_key_heads), qkv.shape[-2]
    if heads is None or heads < 1 or total - 2 * heads < 1 or total % heads:
        raise ValueError(
            f"num_key_heads: expected H_k >= 1 with H_q + 2 H_k = {total} heads and H_q a multiple of H_k, got "
            f"{show_value(num_key_heads)}"
            + ("; for a projection (B, N, C), pass qkv.unflatten(-1, (-1, D))" if qkv.ndim == 3 else "")
        )
    return heads


def order_outs(out: Any, xs: tuple[Any, ...]) -> Any:
    """Convert output tensors for packed tokens to views (B or 1, H, N, D). Return other arguments unchanged."""
    if not any(isinstance(x, Tensor) and x.ndim == 3 for x in xs):
        return out
    return tuple(map(order_heads, out)) if type(out) is tuple else order_heads(out)


def order_heads(out: Any) -> Any:
    """Apply :func:`_put_heads_first` to 3-D and 4-D tensors. Return anything else unchanged, to be rejected later."""
    is_valid = isinstance(out, Tensor) and not out.is_nested and out.ndim in (3, 4)
    return _put_heads_first(out) if is_valid else out


def _put_heads_first(x: Tensor) -> Tensor:
    """Return (B, N, H, D) or (N, H, D) as a view (B or 1, H, N, D)."""
    return (x if x.ndim == 4 else x[None]).transpose(1, 2)


def _put_tokens_first(y: Tensor, is_batched: bool) -> Tensor:
    """Inverse of :func:`_put_heads_first`."""
    y = y.transpose(1, 2)
    return y if is_batched else y[0]
