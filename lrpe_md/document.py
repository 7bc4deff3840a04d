"""Thin wrappers around :mod:`lrpe_md.functional` with the names and arguments of the LRPE document.

The input x is (B, H, N, D), and ``shape`` is (n_k, ..., n_1), slowest axis first. The first ``l`` tokens are condition
tokens with Θ = 0. ``*_torch`` runs the reference, and ``*_triton`` runs the kernels. ``*_fwd_triton`` and
``*_bwd_triton`` run a single pass without autograd. ``*_cache_*`` stores Θ (H, N, D) in float32, modulo 2π, for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from .checks import check_dense, rotary_slice
from .engine.core.call import Act, Call, Impl, Needs, Options, Pairs, Positions
from .engine.core.operator import is_direct, use_triton
from .engine.encode.dispatch import run_encoding
from .engine.encode.operator import ENCODE
from .engine.encode.tables import replace_angles, store_angles
from .engine.encode.validate import check_input, validate
from .frequencies.axial import AxisOrder, axial_omega, sequence_omega
from .functional import cosine, rotate
from .positions.grid import Grid
from .positions.sequences import text_positions

__all__ = [
    "lrpe_cosine_md", "lrpe_cosine_md_bwd_triton", "lrpe_cosine_md_cache_bwd_triton",
    "lrpe_cosine_md_cache_fwd_triton", "lrpe_cosine_md_cache_triton", "lrpe_cosine_md_fwd_triton",
    "lrpe_cosine_md_torch", "lrpe_cosine_md_triton", "lrpe_rotate_1d", "lrpe_rotate_1d_bwd_triton",
    "lrpe_rotate_1d_fwd_triton", "lrpe_rotate_1d_torch", "lrpe_rotate_1d_triton", "lrpe_rotate_md",
]  # fmt: skip


def lrpe_cosine_md(
    x: Tensor,
    theta: Tensor,
    *,
    shape: tuple[int, ...],
    l: int = 0,  # noqa: E741  the document's name
    act: Act = "none",
    dim: int | None = None,
    axis_order: AxisOrder = "minor_first",
    impl: Impl = "auto",
) -> Tensor:
    """Apply LRPE's cosine map on a grid, from (B, H, l + Π shape, D) to (B, H, l + Π shape, 2D).

    Args:
        theta: frequencies (E,) or (H, E) with K · E ≥ D. Θ is concat(s_1 θ, ..., s_k θ)[:D], where s_1 is the position
            on the fastest axis, or on the slowest axis with ``axis_order="major_first"``.
        l: number of condition tokens before the grid.

    Other arguments, differentiability and errors are the same as in :func:`lrpe_md.cosine`.
    """
    check_input("x", x, x)
    omega, grid = _lay_out(theta, x.shape[-1], shape=shape, l=l, axis_order=axis_order)
    return cosine(x, omega=omega, positions=grid, act=act, dim=dim, impl=impl)


lrpe_cosine_md_torch = partial(lrpe_cosine_md, impl="reference")
lrpe_cosine_md_triton = partial(lrpe_cosine_md, impl="triton")


def lrpe_cosine_md_fwd_triton(x: Tensor, theta: Tensor, **kwargs) -> Tensor:
    """Run the forward pass without autograd, with the arguments of :func:`lrpe_cosine_md`."""
    return _forward(x, _cosine_call(x, theta, **kwargs))[0]


def lrpe_cosine_md_bwd_triton(do: Tensor, x: Tensor, theta: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
    """Compute dx and dtheta without autograd."""
    return _backward(do, x, theta, partial(_cosine_call, **kwargs))


def lrpe_cosine_md_cache_triton(x: Tensor, theta: Tensor, **kwargs) -> Tensor:
    """Run :func:`lrpe_cosine_md`, and store H · N · D angles Θ for the backward pass.

    This function exists only because the document defines it. Loading stored angles is never faster than recomputing
    them (docs/tuning.md), and causes more memory traffic if each head has its own θ.
    """
    call = _cosine_call(x, theta, **kwargs)
    use_triton("triton", x, ())
    call = replace_angles(call, store_angles(call), x.dtype)
    return ENCODE.run_kernels(call, (x,), ENCODE.list_learned(call, ()), is_direct((x, *call.tables)))[0]


def lrpe_cosine_md_cache_fwd_triton(x: Tensor, theta: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
    """Return the output and theta_cache (H, N, D) in float32, without autograd. H is 1 if all heads share theta."""
    call = _cosine_call(x, theta, **kwargs)
    return _forward(x, call)[0], store_angles(call)


def lrpe_cosine_md_cache_bwd_triton(
    do: Tensor, x: Tensor, theta: Tensor, theta_cache: Tensor, **kwargs
) -> tuple[Tensor, Tensor]:
    """Compute dx and dtheta from the stored angles, without autograd."""
    return _backward(do, x, theta, partial(_cosine_call, **kwargs), theta_cache)


@overload
def lrpe_rotate_1d(
    x: Tensor, theta: Tensor, *, offset: int | Tensor = ..., cu_seqlens: Tensor | None = ..., act: Act = ...,
    dim: int | None = ..., rotary_dim: int | slice | None = ..., pairs: Pairs = ...,
    amplitude: float | Tensor | None = ..., inverse: bool = ..., impl: Impl = ...,
) -> Tensor: ...  # fmt: skip
@overload
def lrpe_rotate_1d(
    x: tuple[Tensor, Tensor], theta: Tensor, *, offset: int | Tensor = ..., cu_seqlens: Tensor | None = ...,
    act: Act = ..., dim: int | None = ..., rotary_dim: int | slice | None = ..., pairs: Pairs = ...,
    amplitude: float | Tensor | None = ..., inverse: bool = ..., impl: Impl = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def lrpe_rotate_1d(
    x: Tensor | tuple[Tensor, Tensor],
    theta: Tensor,
    *,
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    act: Act = "none",
    dim: int | None = None,
    rotary_dim: int | slice | None = None,
    pairs: Pairs = "half",
    amplitude: float | Tensor | None = None,
    inverse: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply RoPE to a sequence (B, H, N, D), rotating token t by (t + offset) θ.

    Args:
        x: one tensor, or (q, k), which share a launch and may have different numbers of heads (GQA).
        theta: frequencies (H, R/2), (1, R/2) or (R/2,), or (H,) for one frequency per head. R is the rotated width, and
            H is the number of heads of x, or of k. If H = R/2, a theta of that length is interpreted as (R/2,).
        offset: position of the first token, an int or an integer tensor of shape (), (1,) or (B,). A tensor is read on
            the device, so a new value requires neither a synchronisation nor a new kernel. With left padding, the
            offset is negative.
        cu_seqlens: boundaries (S + 1,) of sequences packed end to end in x (1, H, N, D) or (N, H, D). The result has
            the shape of x. Positions restart at ``offset`` in each sequence, and ``offset`` may have shape (S,). See
            :func:`lrpe_md.positions.packed_positions`.
        rotary_dim, pairs, amplitude, inverse: see :func:`lrpe_md.rotate`.

    Other arguments, differentiability and errors are the same as in :func:`lrpe_md.rotate`.
    """
    xs = x if isinstance(x, tuple) else (x,)
    omega, positions = _place_text(xs, theta, dim, rotary_dim, offset=offset, cu_seqlens=cu_seqlens, inverse=inverse)
    options = Options("rotate", act, dim, pairs, rotary_dim, impl=impl)
    return run_encoding(options, xs, omega, positions, amplitude=amplitude)


lrpe_rotate_1d_torch = partial(lrpe_rotate_1d, impl="reference")
lrpe_rotate_1d_triton = partial(lrpe_rotate_1d, impl="triton")


def lrpe_rotate_1d_fwd_triton(x: Tensor, theta: Tensor, **kwargs) -> Tensor:
    """Run the forward pass without autograd, with the arguments of :func:`lrpe_rotate_1d`."""
    return _forward(x, _rotate_call(x, theta, **kwargs))[0]


def lrpe_rotate_1d_bwd_triton(do: Tensor, x: Tensor, theta: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
    """Compute dx and dtheta without autograd."""
    return _backward(do, x, theta, partial(_rotate_call, **kwargs))


def lrpe_rotate_md(
    x: Tensor,
    theta: Tensor,
    *,
    shape: tuple[int, ...],
    l: int = 0,  # noqa: E741  the document's name
    act: Act = "none",
    dim: int | None = None,
    axis_order: AxisOrder = "minor_first",
    pairs: Pairs = "half",
    inverse: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Apply RoPE on a grid to x (B, H, l + Π shape, D), with theta (E,) or (H, E) where K · E ≥ D/2.

    With ``inverse``, rotate by -Θ. The other arguments are the same as in :func:`lrpe_cosine_md`. Source: the axial
    form of RoPE-ViT (arXiv 2403.13298).
    """
    check_input("x", x, x)
    omega, grid = _lay_out(theta, rotary_slice(None, x.shape[-1])[1] // 2, shape=shape, l=l, axis_order=axis_order)
    return rotate(x, omega=omega, positions=grid, pairs=pairs, act=act, dim=dim, inverse=inverse, impl=impl)


def _lay_out(
    theta: Tensor, width: int, *, shape: tuple[int, ...], l: int = 0, axis_order: AxisOrder = "minor_first"  # noqa: E741
) -> tuple[Tensor, Grid]:  # fmt: skip
    grid = Grid(shape, prefix=l)
    return axial_omega(theta, width, grid.num_axes, axis_order=axis_order), grid


def _place_text(
    xs: tuple[Tensor, ...], theta: Tensor, dim: int | None, rotary_dim: int | slice | None, *,
    offset: int | Tensor = 0, cu_seqlens: Tensor | None = None, inverse: bool = False,
) -> tuple[Tensor, Positions]:  # fmt: skip
    is_packed = cu_seqlens is not None and any(isinstance(x, Tensor) and x.ndim == 3 for x in xs)
    for x in xs:
        check_dense("x", x, "(N, H, D)") if is_packed else check_input("x", x, x, packed="cu_seqlens")
    if not xs or not isinstance(theta, Tensor):
        name, expected, got = ("theta", "a tensor", theta) if xs else ("x", "one tensor or two (q, k)", xs)
        raise TypeError(f"{name}: expected {expected}, got {type(got).__name__}")
    num_heads, half = xs[-1].shape[1], rotary_slice(rotary_dim, xs[-1].shape[-1])[1] // 2
    omega = sequence_omega(theta, half, num_heads)
    return -omega if inverse else omega, text_positions(xs[0], offset, cu_seqlens, dim)


def _cosine_call(x: Tensor, theta: Tensor, *, act: Act = "none", dim: int | None = None, **grid: Any) -> Call:
    return validate(Options("cosine", act, dim), (x,), *_lay_out(theta, x.shape[-1], **grid))


def _rotate_call(
    x: Tensor, theta: Tensor, *, act: Act = "none", dim: int | None = None, rotary_dim: int | slice | None = None,
    pairs: Pairs = "half", amplitude: float | Tensor | None = None, **where: Any,
) -> Call:  # fmt: skip
    omega, positions = _place_text((x,), theta, dim, rotary_dim, **where)
    return validate(Options("rotate", act, dim, pairs, rotary_dim), (x,), omega, positions, amplitude=amplitude)


def _forward(x: Tensor, call: Call) -> list[Tensor]:
    use_triton("triton", x, ())
    return ENCODE.forward(call, (x,), (), is_direct((x, *call.tables)))


def _backward(
    do: Tensor, x: Tensor, theta: Tensor, make_call: Callable[[Tensor, Tensor], Call], theta_cache: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    theta = theta.detach().requires_grad_()
    with torch.enable_grad():
        call = make_call(x, theta)
    spec, omega = call.spec, call.tables.omega
    use_triton("triton", x, ())
    _check_like("do", do, (*x.shape[:3], spec.out_dim(x.shape[3])), x.dtype, x.device)
    if theta_cache is not None:
        cached = (omega.shape[0], x.shape[2], omega.shape[1])
        _check_like("theta_cache", theta_cache, cached, torch.float32, x.device)
        call = replace_angles(call, theta_cache, x.dtype)
    direct = is_direct((do, x, *call.tables, theta_cache))
    _, *stats = ENCODE.forward(call, (x,), (), direct) if spec.dim == -2 else (None,)
    dx, domega = ENCODE.backward(call, [do], [x], stats, Needs(omega=True), direct)
    (dtheta,) = torch.autograd.grad(omega, theta, domega)
    return dx, dtheta


def _check_like(name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if (tuple(t.shape), t.dtype, t.device) != (shape, dtype, device):
        raise ValueError(
            f"{name}: expected shape {shape}, {dtype} on {device}, got {tuple(t.shape)}, {t.dtype} on {t.device}"
        )
