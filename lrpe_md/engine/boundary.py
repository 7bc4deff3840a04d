"""The boundary with PyTorch: registered operators, the autograd.Function, and which of them runs.

First-order reverse mode runs the kernels; a function transform, a dual number or a double backward runs the
reference. Plain eager tensors call the launcher directly; compilers, tensor subclasses and dispatch modes
see the registered operators ``lrpe_md::forward`` and ``lrpe_md::backward``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from .. import reference
from ..positions.grid import grid_coordinates

__all__ = ["Layout", "Spec", "Tables", "backward", "encode", "encode_reference", "flatten", "forward", "transforming"]


class Spec(NamedTuple):
    """What is computed: the part of a call that is compiled into a kernel."""

    map: str  # "cosine" | "rotate"
    act: str = "none"
    dim: int = 0  # softmax over -1 (features) or -2 (sequence); 0 otherwise
    pairs: str = "half"  # | "interleaved" | "blocks"
    rotary_start: int = 0
    num_channels: int = 0  # C: head_dim for cosine, pairs for rotate
    sections: tuple[int, ...] = ()  # pairs a block, for pairs "blocks"
    order: str = "cos_sin"

    def out_dim(self, head_dim: int) -> int:
        return 2 * head_dim if self.map == "cosine" else head_dim


class Tables(NamedTuple):
    """Tensors beside the frequencies; none of them gets a gradient from the kernels."""

    coords: Tensor | None = None  # (N, K) or (B, N, K) without prefix and suffix; a grid's origin (1, K) or (B, 1, K)
    affine: Tensor | None = None  # (K, 2): scale and shift of a grid
    rotated: Tensor | None = None  # (N,) or (B, N) as coords: whether a row is rotated
    amplitude: Tensor | None = None  # (H or 1, C)


class Layout(NamedTuple):
    """Where the tokens are, in integers that cross the operator boundary as SymInts."""

    num_tokens: int
    prefix: int
    num_grid_tokens: int  # Π sizes, or the rows of explicit coords
    start: int
    sizes: tuple[int, ...]  # empty for explicit coords

    def positions(self, tables: Tables, device: torch.device) -> tuple[Tensor, Any]:
        """Positions (.., N, K) and the mask of rotated tokens (None where all are), for the reference."""
        coords, affine, rows, _ = tables
        if self.sizes:
            plain = affine is None and coords is None
            coords, rotated = grid_coordinates(
                self.num_tokens, self.sizes, self.prefix, self.start, affine, coords, device=device, dtype=torch.float64
            )
            # A plain grid's coordinates are small integers, which float32 holds up to 2^24.
            return (coords.float() if plain and max(self.sizes) <= 2**24 else coords), rotated
        assert coords is not None
        coords = coords.double() if coords.dtype in (torch.int32, torch.int64) else coords
        suffix = self.num_tokens - self.prefix - self.num_grid_tokens
        if self.prefix == 0 and suffix == 0:
            return coords, rows
        pad = torch.nn.functional.pad
        if rows is None:
            rows = torch.ones(self.num_grid_tokens, dtype=torch.bool, device=device)
        return pad(coords, (0, 0, self.prefix, suffix)), pad(rows, (self.prefix, suffix))


def encode_reference(
    spec: Spec,
    layout: Layout,
    tables: Tables,
    omega: Tensor,
    phase: Tensor | None,
    xs: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """The reference on the arguments of an operator."""
    s, rotated = layout.positions(tables, omega.device)
    ys = (reference.encode(x, s, rotated, omega, phase, tables.amplitude, **_options(spec)) for x in xs)
    return tuple(_arrange(y, memory_order(x)) for x, y in zip(xs, ys, strict=True))


def _arrange(y: Tensor, order: tuple[int, int, int]) -> Tensor:
    if order == (0, 1, 2):
        return y
    first, second, third = (order.index(i) for i in range(3))
    return y.permute(*order, 3).contiguous().permute(first, second, third, 3)


def _options(spec: Spec) -> dict[str, Any]:
    return {
        "map": spec.map, "act": spec.act, "dim": spec.dim or None, "pairs": spec.pairs, "start": spec.rotary_start,
        "sections": tuple(spec.sections), "order": spec.order,
    }  # fmt: skip


# --- operators -------------------------------------------------------------------------------------------

_LAYOUT = "SymInt num_tokens, SymInt prefix, SymInt num_grid_tokens, SymInt start, SymInt[] sizes"
_SPEC = "str map, str act, int dim, str pairs, int rotary_start, int num_channels, int[] sections, str order"
_TABLES = "Tensor? coords, Tensor? affine, Tensor? rotated, Tensor? amplitude"
_lib = torch.library.Library("lrpe_md", "DEF")
_lib.define(
    f"forward(Tensor[] xs, Tensor omega, Tensor? phase, {_TABLES}, {_LAYOUT}, {_SPEC}, bool cache) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.define(
    f"backward(Tensor[] grads, Tensor[] xs, Tensor[] stats, Tensor omega, Tensor? phase, {_TABLES}, "
    f"Tensor? theta, {_LAYOUT}, {_SPEC}, bool need_omega, bool need_phase) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def memory_order(x: Tensor) -> tuple[int, int, int]:
    """The first three dimensions of x (B, H, N, D), outermost in memory first."""
    b, h, n, _ = x.stride()
    if b >= h >= n:
        return (0, 1, 2)
    if b >= n >= h:
        return (0, 2, 1)
    first, second, third = sorted(range(3), key=lambda i: -x.stride(i))
    return first, second, third


def strides_in_memory(x: Tensor, last: int) -> tuple[int, int, int, int]:
    """Strides of a dense (B, H, N, last) with the memory order of x (B, H, N, D)."""
    strides, step = [0, 0, 0], last
    for i in reversed(memory_order(x)):
        strides[i] = step
        step = step * x.shape[i]
    return strides[0], strides[1], strides[2], 1


def like_in_memory(x: Tensor, last: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty dense (B, H, N, last) with the memory order of x (B, H, N, D)."""
    strides = strides_in_memory(x, last)
    return torch.empty_strided((*x.shape[:3], last), strides, dtype=dtype or x.dtype, device=x.device)


def _launch() -> Any:
    from . import launch

    return launch


def forward(xs, omega, phase, tables: Tables, spec: Spec, layout: Layout, cache: bool = False) -> list[Tensor]:
    """Launch: the outputs; for softmax over the sequence (2, B, H, D), maximum and sum; with ``cache`` the angles."""
    return _launch().forward(xs, omega, phase, tables, spec, layout, cache)


def backward(
    grads, xs, stats, omega, phase, tables: Tables, theta, spec: Spec, layout: Layout,
    need_omega: bool, need_phase: bool,
) -> list[Tensor]:  # fmt: skip
    """Launch: dx for each gradient, then dω and dφ where needed."""
    return _launch().backward(grads, xs, stats, omega, phase, tables, theta, spec, layout, need_omega, need_phase)


def flatten(layout: Layout, spec: Spec) -> tuple[Any, ...]:
    """The arguments of an operator that say the layout and the spec."""
    return (*layout[:4], list(layout.sizes), *spec[:6], list(spec.sections), spec.order)


def _split(args: tuple[Any, ...]) -> tuple[Spec, Layout, tuple[Any, ...]]:
    """The inverse of :func:`flatten`, and the arguments behind."""
    num_tokens, prefix, num_grid_tokens, start, sizes = args[:5]
    map, act, dim, pairs, rotary_start, num_channels, sections, order = args[5:13]
    layout = Layout(num_tokens, prefix, num_grid_tokens, start, tuple(sizes))
    spec = Spec(map, act, dim, pairs, rotary_start, num_channels, tuple(sections), order)
    return spec, layout, args[13:]


def _forward_cuda(xs, omega, phase, coords, affine, rotated, amplitude, *args):
    spec, layout, (cache,) = _split(args)
    return forward(xs, omega, phase, Tables(coords, affine, rotated, amplitude), spec, layout, cache)


def _backward_cuda(grads, xs, stats, omega, phase, coords, affine, rotated, amplitude, theta, *args):
    spec, layout, needs = _split(args)
    tables = Tables(coords, affine, rotated, amplitude)
    return backward(grads, xs, stats, omega, phase, tables, theta, spec, layout, *needs)


def _forward_reference(xs, omega, phase, coords, affine, rotated, amplitude, *args):
    spec, layout, (cache,) = _split(args)
    tables = Tables(coords, affine, rotated, amplitude)
    with torch.no_grad():
        detached = tuple(x.detach() for x in xs)
        phase = None if phase is None else phase.detach()
        ys = encode_reference(spec, layout, tables, omega.detach(), phase, detached)
        out = []
        for x, y in zip(xs, ys, strict=True):
            out.append(like_in_memory(x, spec.out_dim(x.shape[3])).copy_(y))
        if spec.dim == -2:
            for x in xs:
                wide = x.to(accumulator(x.dtype))
                top = wide.amax(-2) if x.shape[2] else wide.sum(-2)
                out.append(torch.stack([top, (wide - top[:, :, None]).exp().sum(-2)]))
        if cache:
            s, on_grid = layout.positions(tables, omega.device)
            theta = reference.angles(s, omega, phase, on_grid)
            out.append((theta.double() - 2 * torch.pi * (theta.double() / (2 * torch.pi)).round()).float())
        return out


def _reference_gradients(spec, layout, tables, omega, phase, xs, grads):
    """dx for each gradient, dω and dφ by the closed form, in plain torch operators."""
    s, rotated = layout.positions(tables, omega.device)
    found = [
        reference.encode_backward(
            g, xs[i] if xs else None, s, rotated, omega, phase, tables.amplitude, **_options(spec)
        )
        for i, g in enumerate(grads)
    ]  # fmt: skip
    dxs, domegas, dphases = zip(*found, strict=True)
    domega = torch.stack(domegas).sum(0).to(omega.dtype)
    return dxs, domega, None if phase is None else torch.stack(dphases).sum(0).to(phase.dtype)


def _backward_reference(grads, xs, stats, omega, phase, coords, affine, rotated, amplitude, theta, *args):
    spec, layout, (need_omega, need_phase) = _split(args)
    tables = Tables(coords, affine, rotated, amplitude)
    dxs, domega, dphase = _reference_gradients(spec, layout, tables, omega, phase, xs, grads)
    out = [like_in_memory(g, dx.shape[3]).copy_(dx) for g, dx in zip(grads, dxs, strict=True)]
    return out + ([domega] if need_omega else []) + ([dphase] if need_phase and dphase is not None else [])


def _forward_fake(xs, omega, phase, coords, affine, rotated, amplitude, *args):
    spec, layout, (cache,) = _split(args)
    out = [like_in_memory(x, spec.out_dim(x.shape[3])) for x in xs]
    if spec.dim == -2:
        for x in xs:
            out.append(x.new_empty(2, x.shape[0], x.shape[1], x.shape[3], dtype=accumulator(x.dtype)))
    if cache:
        heads = max(omega.shape[0], 1 if phase is None else phase.shape[0])
        out.append(omega.new_empty(heads, layout.num_tokens, spec.num_channels, dtype=torch.float32))
    return out


def _backward_fake(grads, xs, stats, omega, phase, coords, affine, rotated, amplitude, theta, *args):
    spec, _, (need_omega, need_phase) = _split(args)
    out = [like_in_memory(g, _head_dim(spec, g)) for g in grads]
    if need_omega:
        out.append(torch.empty_like(omega, memory_format=torch.contiguous_format))
    if need_phase:
        out.append(torch.empty_like(phase, memory_format=torch.contiguous_format))
    return out


def _head_dim(spec: Spec, grad: Tensor) -> int:
    return grad.shape[3] // 2 if spec.map == "cosine" else grad.shape[3]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


_lib.impl("forward", _forward_cuda, "CUDA")
_lib.impl("backward", _backward_cuda, "CUDA")
_lib.impl("forward", _forward_reference, "CompositeExplicitAutograd")
_lib.impl("backward", _backward_reference, "CompositeExplicitAutograd")
torch.library.register_fake("lrpe_md::forward", _forward_fake, lib=_lib)
torch.library.register_fake("lrpe_md::backward", _backward_fake, lib=_lib)


# --- autograd --------------------------------------------------------------------------------------------


def call_forward(direct: bool, xs, omega, phase, tables, spec, layout, cache) -> list[Tensor]:
    if direct:
        return forward(xs, omega, phase, tables, spec, layout, cache)
    return torch.ops.lrpe_md.forward(list(xs), omega, phase, *tables, *flatten(layout, spec), cache)


def call_backward(
    direct: bool, grads, xs, stats, omega, phase, tables, theta, spec, layout, need_omega, need_phase
) -> list[Tensor]:
    if direct:
        return backward(grads, xs, stats, omega, phase, tables, theta, spec, layout, need_omega, need_phase)
    return torch.ops.lrpe_md.backward(
        list(grads), list(xs), list(stats), omega, phase, *tables, theta, *flatten(layout, spec), need_omega, need_phase
    )


class _Encode(torch.autograd.Function):
    """Saves what the backward needs: the frequencies alone for a linear map without their gradient, else x."""

    @staticmethod
    def forward(ctx, direct, cache, spec, layout, coords, affine, rotated, amplitude, omega, phase, *xs):
        tables = Tables(coords, affine, rotated, amplitude)
        out = call_forward(direct, xs, omega, phase, tables, spec, layout, cache)
        ys, stats = out[: len(xs)], out[len(xs) : len(out) - cache]
        keep = xs if spec.act != "none" or ctx.needs_input_grad[8] or ctx.needs_input_grad[9] else ()
        ctx.save_for_backward(omega, phase, *tables, out[-1] if cache else None, *stats, *keep)
        ctx.args = direct, spec, layout, len(stats)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *grads):
        omega, phase, coords, affine, rotated, amplitude, theta, *rest = ctx.saved_tensors
        tables = Tables(coords, affine, rotated, amplitude)
        direct, spec, layout, num_stats = ctx.args
        stats, xs = rest[:num_stats], rest[num_stats:]
        need_omega, need_phase = ctx.needs_input_grad[8], ctx.needs_input_grad[9]
        no = (None,) * 8
        if not torch.compiler.is_compiling():
            where = spec, layout, tables, omega, phase, xs, grads
            if torch.is_grad_enabled():  # create_graph: a double backward
                return *no, *_differentiable_backward(*where, ctx)
            # A transform that began after the forward: dual gradients, or batched ones (is_grads_batched).
            if transforming() or any(is_legacy_batchedtensor(g) for g in grads):
                dxs, domega, dphase = _reference_gradients(*where)
                return *no, domega if need_omega else None, dphase if need_phase else None, *dxs
        out = call_backward(
            direct and _plain(grads),
            grads, xs, stats, omega, phase, tables, theta, spec, layout, need_omega, need_phase,
        )  # fmt: skip
        n = len(grads)
        domega = out[n] if need_omega else None
        dphase = out[-1] if need_phase else None
        return *no, domega, dphase, *out[:n]


def _differentiable_backward(spec, layout, tables, omega, phase, xs, grads, ctx):
    """The first derivative as a differentiable function of the gradients, x, omega and phase.

    Views stand in for the saved tensors: were those differentiated, paths through the user's own graph (k made from
    q, frequencies shared by layers) would be counted as well.
    """
    if not xs:  # linear in x: any x will do
        xs = [g.new_zeros((*g.shape[:3], _head_dim(spec, g))) for g in grads]
        xs = [x.requires_grad_() for x in xs]
    omega, phase = omega.view_as(omega), None if phase is None else phase.view_as(phase)
    xs = [x.view_as(x) for x in xs]
    needs = ctx.needs_input_grad
    inputs = [*([omega] if needs[8] else []), *([phase] if needs[9] else [])]
    inputs += [x for x in xs if x.requires_grad]
    ys = encode_reference(spec, layout, tables, omega, phase, tuple(xs))
    pairs = [(y, g) for y, g in zip(ys, grads, strict=True) if y.requires_grad]
    found = list(
        torch.autograd.grad(
            [y for y, _ in pairs], inputs, [g for _, g in pairs],
            create_graph=True, allow_unused=True, materialize_grads=True,
        )
    )  # fmt: skip
    domega = found.pop(0) if needs[8] else None
    dphase = found.pop(0) if needs[9] else None
    return domega, dphase, *(found.pop(0) if x.requires_grad else None for x in xs)


def transforming() -> bool:
    """A torch.func transform or a dual level is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _plain(tensors) -> bool:
    """Eager tensors of torch's own classes, with no mode that wants to see operators."""
    if torch._C._len_torch_dispatch_stack():
        return False
    for t in tensors:
        kind = type(t)
        if t is not None and kind is not Tensor and kind is not torch.nn.Parameter:
            return False
    return True


def is_direct(*tensors: Tensor | None) -> bool:
    """Whether the launcher may be called past the dispatcher."""
    return not torch.compiler.is_compiling() and _plain(tensors)


def encode(
    spec: Spec,
    layout: Layout,
    tables: Tables,
    omega: Tensor,
    phase: Tensor | None,
    xs: tuple[Tensor, ...],
    direct: bool,
    cache: bool = False,
) -> tuple[Tensor, ...]:
    """Run the kernels, differentiable once in reverse mode (more through the reference).

    direct: :func:`is_direct` of xs, omega and phase.
    """
    direct = direct and _plain(tables)
    if torch.is_grad_enabled() and (
        omega.requires_grad or (phase is not None and phase.requires_grad) or any(x.requires_grad for x in xs)
    ):
        return _Encode.apply(direct, cache, spec, layout, *tables, omega, phase, *xs)
    return tuple(call_forward(direct, xs, omega, phase, tables, spec, layout, cache)[: len(xs)])
