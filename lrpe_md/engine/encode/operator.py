"""The boundary with PyTorch: registered operators, the autograd.Function, and which of them runs.

First-order reverse mode runs the kernels; a function transform, a dual number or a double backward runs the
reference. Plain eager tensors call the launcher directly; compilers, tensor subclasses and dispatch modes
see the registered operators ``lrpe_md::forward`` and ``lrpe_md::backward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from ... import reference
from ..._ops import add_op_namespace_prefix, ops
from ..core.call import Call, CosSin, Layout, Needs, Spec, Tables, Weights, declare, flatten, take_fields, unflatten
from ..core.joined import find_split
from ..core.memory import accumulator, arrange_in_memory, like_in_memory, memory_order
from ..inductor import lowering as compiled

__all__ = [
    "backward", "exporting", "forward", "is_direct", "is_plain", "run_into", "run_kernels", "run_reference",
    "transforming",
]  # fmt: skip


def run_kernels(call: Call, xs: tuple[Tensor, ...], direct: bool) -> tuple[Tensor, ...]:
    """Run the kernels, differentiable once in reverse mode (more through the reference).

    direct: :func:`is_direct` of xs and the tables.
    """
    omega, phase = call.tables.omega, call.tables.phase
    if torch.is_grad_enabled() and (
        (omega is not None and omega.requires_grad)
        or (phase is not None and phase.requires_grad)
        or any(x.requires_grad for x in xs)
        or any(t is not None and t.requires_grad for t in call.weights)
    ):
        weights = call.weights if call.spec.norm != "none" else ()
        return _Encode.apply(call, direct, omega, phase, *xs, *weights)
    return tuple(forward(call, xs, direct)[: len(xs)])


def run_into(call: Call, xs: tuple[Tensor, ...], outs: Sequence[Tensor | None], start: Tensor | None) -> Any:
    """Run the kernels on plain tensors, past autograd; ``outs`` and ``start`` say where their outputs are to be."""
    ys = _launcher(call).forward(call, xs, outs, start)
    # Autograd would not see that what another node saved is another value now.
    changed = [t for t in outs if t is not None and not t.is_inference()]
    torch.autograd.graph.increment_version(changed)
    return tuple(ys[: len(xs)])


def run_reference(call: Call, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run the reference on the arguments of an operator."""
    spec, tables, layout = call.spec, call.tables, call.layout
    encode: Any
    args: tuple[Any, ...]
    if tables.omega is None:
        encode, args = reference.encode_tables, (*call.cos_sin.split(), layout.start - layout.prefix)
    else:
        s, rotated = layout.positions(tables, tables.omega.device)
        encode, args = reference.encode, (s, rotated, tables.omega, tables.phase, tables.amplitude)
    ys: list[Tensor] = []
    for x, scales in zip(xs, layout.scales(call.weights, xs[0].device), strict=False):
        y = encode(spec, x, *args, scales)
        ys.append(arrange_in_memory(y, memory_order(x)))
    return tuple(ys)


def _differentiate_reference(
    call: Call, xs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor | None, Tensor | None, list[Tensor | None]]:
    """dx for each gradient, dω, dφ and those of the weights by the closed form, in plain torch operators. xs: none
    where none is needed."""
    (omega, phase, *_, amplitude), layout = call.tables, call.layout
    scales = layout.scales(call.weights, grads[0].device)
    each = list(zip(grads, xs or (None,) * len(grads), scales, strict=False))
    if omega is None:
        cos, sin = call.cos_sin.split()
        first = layout.start - layout.prefix
        found = [reference.encode_tables_backward(call.spec, g, x, cos, sin, first, own) for g, x, own in each]
        return [dx for dx, *_ in found], None, None, [t for _, *dscales in found for t in dscales]
    s, rotated = layout.positions(call.tables, omega.device)
    found = [
        reference.encode_backward(call.spec, g, x, s, rotated, omega, phase, amplitude, scales=own)
        for g, x, own in each
    ]
    domega = torch.stack([domega for _, domega, *_ in found]).sum(0).to(omega.dtype)
    dphase = None if phase is None else torch.stack([dphase for _, _, dphase, *_ in found]).sum(0).to(phase.dtype)
    dweights = [t for _, _, _, *dscales in found for t in dscales]
    return [dx for dx, *_ in found], domega, dphase, dweights


# --- operators -------------------------------------------------------------------------------------------

_CALL = f"{declare(Tables)}, {declare(Layout, 'SymInt')}, {declare(Spec)}, {declare(Weights)}, {declare(CosSin)}"
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides
_lib = torch.library.Library(ops.name, "DEF")
_lib.define(f"forward(Tensor[] xs, {_CALL}, str source='') -> Tensor[]", tags=_TAGS)
_lib.define(
    f"backward(Tensor[] grads, Tensor[] xs, Tensor[] stats, {_CALL}, {declare(Needs, prefix='need_')}, "
    "str source='') -> Tensor[]",
    tags=_TAGS,
)


def _launcher(call: Call) -> Any:
    """Imported where triton is, and needed."""
    from . import launch, launch_heads

    return launch_heads if call.spec.norm_over == "heads" else launch


def forward(call: Call, xs: Sequence[Tensor], direct: bool) -> list[Tensor]:
    """The outputs; for softmax over the sequence (2, B, H, D), maximum and sum."""
    if direct:
        return _launcher(call).forward(call, xs)
    return ops.forward(list(xs), *flatten(call), compiled.SOURCE)


def backward(
    call: Call,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    stats: Sequence[Tensor],
    needs: Needs,
    direct: bool,
    outs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """dx for each gradient, then dω, dφ and those of all weights that there are, where needed. outs: where dx is to be,
    for the launcher."""
    if direct:
        return _launcher(call).backward(call, grads, xs, stats, needs, outs)
    return ops.backward(list(grads), list(xs), list(stats), *flatten(call), *needs, compiled.SOURCE)


def _take_needs(rest: Sequence[Any]) -> Needs:
    """Read the needed gradients from the backward's trailing arguments, skipping the source."""
    return Needs(*rest[: len(Needs._fields)])


def _forward_cuda(xs: list[Tensor], *args: Any) -> list[Tensor]:
    call, _ = unflatten(args)
    return _launcher(call).forward(call, xs)


def _backward_cuda(grads: list[Tensor], xs: list[Tensor], stats: list[Tensor], *args: Any) -> list[Tensor]:
    call, needs = unflatten(args)
    return _launcher(call).backward(call, grads, xs, stats, _take_needs(needs))


def _forward_reference(xs: list[Tensor], *args: Any) -> list[Tensor]:
    call, _ = unflatten(args)
    spec, tables = call.spec, call.tables
    with torch.no_grad():
        omega, phase = (None if t is None else t.detach() for t in tables[:2])
        weights = Weights(*(None if t is None else t.detach() for t in call.weights))
        detached = call._replace(tables=tables._replace(omega=omega, phase=phase), weights=weights)
        ys = run_reference(detached, tuple(x.detach() for x in xs))
        out = []
        for x, y in zip(xs, ys, strict=True):
            out.append(like_in_memory(x, spec.out_dim(x.shape[3])).copy_(y))
        if spec.dim == -2:
            for x in xs:
                wide = x.to(accumulator(x.dtype))
                top = wide.amax(-2) if x.shape[2] else wide.sum(-2)
                out.append(torch.stack([top, (wide - top[:, :, None]).exp().sum(-2)]))
        return out


def _backward_reference(grads: list[Tensor], xs: list[Tensor], stats: list[Tensor], *args: Any) -> list[Tensor]:
    call, needs = unflatten(args)
    need = _take_needs(needs)
    dxs, domega, dphase, dweights = _differentiate_reference(call, xs, grads)
    out = [like_in_memory(g, dx.shape[3]).copy_(dx) for g, dx in zip(grads, dxs, strict=True)]
    out += [t for t, needed in ((domega, need.omega), (dphase, need.phase)) if needed and t is not None]
    return out + [t.contiguous() for t in dweights if need.norm and t is not None]


def _forward_fake(xs: list[Tensor], *args: Any) -> list[Tensor]:
    compiled.register()
    call, _ = unflatten(args)
    spec = call.spec
    out = [like_in_memory(x, spec.out_dim(x.shape[3])) for x in xs]
    if spec.dim == -2:
        for x in xs:
            out.append(x.new_empty(2, x.shape[0], x.shape[1], x.shape[3], dtype=accumulator(x.dtype)))
    return out


def _backward_fake(grads: list[Tensor], xs: list[Tensor], stats: list[Tensor], *args: Any) -> list[Tensor]:
    compiled.register()
    call, needs = unflatten(args)
    need = _take_needs(needs)
    out = [like_in_memory(g, call.spec.head_dim(g.shape[3])) for g in grads]
    if need.omega:
        out.append(torch.empty_like(call.tables.omega, memory_format=torch.contiguous_format))
    if need.phase and call.tables.phase is not None:
        out.append(torch.empty_like(call.tables.phase, memory_format=torch.contiguous_format))
    if need.norm:
        given = [t for t in call.weights if t is not None]
        out += [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given]
    return out


_lib.impl("forward", _forward_cuda, "CUDA")
_lib.impl("backward", _backward_cuda, "CUDA")
_lib.impl("forward", _forward_reference, "CompositeExplicitAutograd")
_lib.impl("backward", _backward_reference, "CompositeExplicitAutograd")
torch.library.register_fake(add_op_namespace_prefix("forward"), _forward_fake, lib=_lib)
torch.library.register_fake(add_op_namespace_prefix("backward"), _backward_fake, lib=_lib)


# --- autograd --------------------------------------------------------------------------------------------


class _Encode(torch.autograd.Function):
    """Saves what the backward needs: the frequencies alone for a linear map without their gradient, else x.

    omega, phase and, behind xs, the weights of a norm are those of the call, given again as what has a gradient.
    """

    @staticmethod
    def forward(ctx, call, direct, omega, phase, *inputs):
        _, _, need_omega, need_phase, *_ = ctx.needs_input_grad
        normed = call.spec.norm != "none"
        xs = inputs[: -len(call.weights)] if normed else inputs
        out, num = forward(call, xs, direct), len(xs)
        ys, stats = out[:num], out[num:]
        keep = xs if need_omega or need_phase or call.spec.act != "none" or normed else ()
        ctx.save_for_backward(*call.tables, *call.weights, *call.cos_sin[:2], *stats, *keep)
        ctx.args = call.spec, call.layout, call.launches, call.cos_sin.inverse, direct, len(stats)
        ctx.split = find_split(xs) if direct else None
        return tuple(ys)

    @staticmethod
    def backward(ctx, *grads):
        spec, layout, launches, inverse, direct, num_stats = ctx.args
        saved = iter(ctx.saved_tensors)
        tables, weights = take_fields(Tables, saved), take_fields(Weights, saved)
        cos, sin, *rest = saved
        call = Call(spec, layout, tables, launches, weights, CosSin(cos, sin, inverse))
        stats, xs = rest[:num_stats], rest[num_stats:]
        _, _, need_omega, need_phase, *need_inputs = ctx.needs_input_grad
        needs = Needs(need_omega, need_phase, any(need_inputs[len(grads) :]))
        dweights = (None,) * len(weights) if spec.norm != "none" else ()
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():  # create_graph: a double backward
                domega, dphase, dxs, found = _differentiate_twice(call, xs, grads, needs)
                return None, None, domega, dphase, *dxs, *(found if needs.norm else dweights)
            # A transform that began after the forward: dual gradients, or batched ones (is_grads_batched).
            if transforming() or any(is_legacy_batchedtensor(g) for g in grads):
                dxs, domega, dphase, found = _differentiate_reference(call, xs, grads)
                found = (*found, None, None)[: len(weights)] if needs.norm else dweights
                return None, None, domega if need_omega else None, dphase if need_phase else None, *dxs, *found
        direct = direct and is_plain(grads)
        outs = ctx.split.allocate(grads[0], len(grads)) if direct and ctx.split is not None else ()
        out = iter(backward(call, grads, xs, stats, needs, direct, outs))
        dxs = [next(out) for _ in grads]
        domega = next(out) if need_omega else None
        dphase = next(out) if need_phase else None
        if needs.norm:
            dweights = [None if t is None else next(out) for t in weights]
        return None, None, domega, dphase, *dxs, *dweights


def _differentiate_twice(
    call: Call, xs: Sequence[Tensor], grads: Sequence[Tensor], needs: Needs
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """The first derivative as a differentiable function of the gradients, x, omega, phase and weights.

    Views stand in for the saved tensors: were those differentiated, paths through the user's own graph (k made from
    q, frequencies shared by layers) would be counted as well.
    """
    if not xs:  # linear in x: any x will do
        xs = [g.new_zeros((*g.shape[:3], call.spec.head_dim(g.shape[3]))) for g in grads]
        xs = [x.requires_grad_() for x in xs]
    omega, phase = (None if t is None else t.view_as(t) for t in call.tables[:2])
    xs = [x.view_as(x) for x in xs]
    weights = Weights(*(None if t is None else t.view_as(t) for t in call.weights))
    inputs: list[Any] = [*([omega] if needs.omega else []), *([phase] if needs.phase else [])]
    inputs += [t for t in (*xs, *weights) if t is not None and t.requires_grad]
    viewed = call._replace(tables=call.tables._replace(omega=omega, phase=phase), weights=weights)
    ys = run_reference(viewed, tuple(xs))
    pairs = [(y, g) for y, g in zip(ys, grads, strict=True) if y.requires_grad]
    found = list(
        torch.autograd.grad(
            [y for y, _ in pairs], inputs, [g for _, g in pairs],
            create_graph=True, allow_unused=True, materialize_grads=True,
        )
    )  # fmt: skip
    domega = found.pop(0) if needs.omega else None
    dphase = found.pop(0) if needs.phase else None
    dxs = [found.pop(0) if x.requires_grad else None for x in xs]
    return domega, dphase, dxs, [found.pop(0) if t is not None and t.requires_grad else None for t in weights]


def transforming() -> bool:
    """A torch.func transform or a dual level is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def exporting() -> bool:
    """torch.export traces. torch.compiler.is_exporting() is true of every compiled function in torch 2.11, too."""
    return torch.compiler._is_exporting_flag


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Eager tensors of torch's own classes, with no mode that wants to see operators."""
    if torch._C._len_torch_dispatch_stack():
        return False
    for t in tensors:
        kind = type(t)
        if t is not None and kind is not Tensor and kind is not torch.nn.Parameter:
            return False
    return True


def is_direct(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether the launcher may be called without PyTorch's dispatcher."""
    return not (torch.compiler.is_compiling() or torch._C._is_tracing()) and is_plain(tensors)
