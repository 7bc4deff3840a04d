"""The boundary of linear attention with PyTorch: what :mod:`lrpe_md.engine.encode.operator` is for the maps.

First-order reverse mode runs the kernels; a function transform, a dual number or a double backward runs the reference.
Plain eager tensors call the launcher directly; compilers, tensor subclasses and dispatch modes see the registered
operators ``lrpe_md::linear_forward`` and ``lrpe_md::linear_backward``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]

from ... import reference, reference_linear
from ..._ops import add_op_namespace_prefix, ops
from ...reference_linear import Angles
from ..core.call import Layout, Tables, Weights
from ..core.joined import find_split
from ..core.memory import accumulator, arrange_in_memory, like_in_memory, memory_order
from ..encode.operator import is_plain, transforming
from ..inductor import lowering as compiled
from .call import LINEAR_CALL, LinearCall, LinearNeeds, Operands, ends_of, flatten_linear, unflatten_linear

__all__ = ["backward", "forward", "run_kernels", "run_reference"]


def run_kernels(
    call: LinearCall, operands: Operands, return_state: bool, direct: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """o, and with ``return_state`` the state behind; differentiable once in reverse mode (more through the reference).

    direct: :func:`lrpe_md.engine.encode.operator.is_direct` of the operands and the tables.
    """
    q, k, v, gate, state = operands
    omega, phase_q, phase_k = call.q_tables.omega, call.q_tables.phase, call.k_tables.phase
    weights = call.weights
    learned = (q, k, v, omega, gate, phase_q, phase_k, *weights, *state)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned):
        phase_k = None if phase_k is phase_q else phase_k
        if torch.compiler.is_compiling():  # Dynamo takes a tensor once
            k, v = k.view_as(k) if k is q else k, v.view_as(v) if v is q or v is k else v
            weights = _apart(weights)
        how = _How(call, direct, return_state)
        o, *after = _Attend.apply(how, gate, omega, phase_q, phase_k, *weights, q, k, v, *state)
    else:
        o, *after = forward(call, operands, return_state, False, direct)
    return o, tuple(after)


def _apart(weights: Weights) -> Weights:
    """Give k weights of its own, as separate tensors."""
    weight, bias, weight_k, bias_k = weights
    return Weights(
        weight, bias,
        weight_k.view_as(weight_k) if weight_k is not None and weight_k is weight else weight_k,
        bias_k.view_as(bias_k) if bias_k is not None and bias_k is bias else bias_k,
    )  # fmt: skip


def run_reference(
    call: LinearCall, operands: Operands, rounded: torch.dtype | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reference on the arguments of an operator: o, and the state behind the last token.

    rounded: ``operands`` of :func:`lrpe_md.reference_linear.attend`.
    """
    q, k, v, gate, state = operands
    omega = reference.widen(call.q_tables.omega)
    q_angles = _angles(call, call.q_layout, call.q_tables, omega)
    one_side = call.k_tables is call.q_tables and call.k_layout.is_same(call.q_layout)
    k_angles = q_angles if one_side else _angles(call, call.k_layout, call.k_tables, omega)
    scales = (
        call.q_layout.scales(call.weights, omega.device)[0], call.k_layout.scales(call.weights, omega.device)[1]
    )  # fmt: skip
    o, after = reference_linear.attend(
        call.attention, call.spec, q, k, v, q_angles=q_angles, k_angles=k_angles, scales=scales, gate=gate,
        cu_seqlens=call.cu_seqlens, state=state, ends=ends_of(call.q_layout), operands=rounded,
    )  # fmt: skip
    return arrange_in_memory(o, memory_order(q)), after


def _angles(call: LinearCall, layout: Layout, tables: Tables, omega: Tensor) -> Angles | None:
    if call.spec.map == "none":
        return None
    coords, rotated = layout.positions(tables, omega.device)
    return Angles(coords, rotated, omega, tables.phase, tables.amplitude)


def _differentiate_reference(
    call: LinearCall, operands: Operands, grads: Sequence[Tensor], needs: LinearNeeds, create_graph: bool = False
) -> list[Tensor]:
    """dq, dk, dv, and the gradients that are needed.

    Views stand in for the saved tensors: were those differentiated, paths through the user's own graph (k made from
    q, frequencies shared by layers) would be counted as well.
    """
    found: list[Tensor] = []

    def leaf(t: Tensor, needed: bool = True) -> Tensor:
        if not needed:
            return t
        found.append(t.view_as(t) if create_graph and t.requires_grad else t.detach().requires_grad_())
        return found[-1]

    q, k, v, gate, state = operands
    with torch.enable_grad():
        q, k, v = leaf(q), leaf(k), leaf(v)
        gate = gate if gate is None else leaf(gate, needs.gate)
        omega, (phase_q, phase_k) = call.q_tables.omega, (call.q_tables.phase, call.k_tables.phase)
        omega = leaf(omega, needs.omega)
        phase_q = phase_q if phase_q is None else leaf(phase_q, needs.phase_q)
        phase_k = phase_k if phase_k is None else leaf(phase_k, needs.phase_k)
        weights = Weights(*(None if t is None else leaf(t, needs.norm) for t in call.weights))
        state = tuple(leaf(t, needs.state) for t in state)
        call = call._replace(
            q_tables=call.q_tables._replace(omega=omega, phase=phase_q),
            k_tables=call.k_tables._replace(omega=omega, phase=phase_k),
            weights=weights,
        )
        o, after = run_reference(call, Operands(q, k, v, gate, state))
        outputs = [o, *after][: len(grads)]
        pairs = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
        return list(
            torch.autograd.grad(
                [t for t, _ in pairs], found, [g for _, g in pairs],
                create_graph=create_graph, allow_unused=True, materialize_grads=True,
            )
        )  # fmt: skip


# --- operators -------------------------------------------------------------------------------------------

_lib = torch.library.Library(ops.name, "FRAGMENT")
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides
_lib.define(
    f"linear_forward(Tensor q, Tensor k, Tensor v, Tensor? gate, Tensor[] state, {LINEAR_CALL}, bool return_state, "
    "bool keep, str source='') -> Tensor[]",
    tags=_TAGS,
)
_lib.define(
    "linear_backward(Tensor[] grads, Tensor q, Tensor k, Tensor v, Tensor? gate, Tensor[] state, Tensor[] saved, "
    f"{LINEAR_CALL}, bool need_gate, bool need_omega, bool need_phase_q, bool need_phase_k, bool need_norm, "
    "bool need_state, str source='') -> Tensor[]",
    tags=_TAGS,
)


def _launcher() -> Any:
    """Imported where triton is, and needed."""
    from . import launch as linear_launch

    return linear_launch


def forward(call: LinearCall, operands: Operands, return_state: bool, keep: bool, direct: bool) -> list[Tensor]:
    """o, with ``return_state`` S and Σ, with ``keep`` what the backward would else form again."""
    if direct:
        return _launcher().forward(call, operands, return_state, keep)
    q, k, v, gate, state = operands
    return ops.linear_forward(q, k, v, gate, list(state), *flatten_linear(call), return_state, keep, compiled.SOURCE)


def backward(
    call: LinearCall,
    grads: Sequence[Tensor],
    operands: Operands,
    saved: Sequence[Tensor],
    needs: LinearNeeds,
    direct: bool,
    outs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """dq, dk, dv, and the gradients that are needed. grads: of o, or of o, S and Σ. outs: where dq, dk and dv are to
    be, past the dispatcher."""
    if direct:
        return _launcher().backward(call, grads, operands, saved, needs, outs)
    q, k, v, gate, state = operands
    return ops.linear_backward(
        list(grads), q, k, v, gate, list(state), list(saved), *flatten_linear(call), *needs, compiled.SOURCE
    )


def _take_needs(rest: Sequence[Any]) -> LinearNeeds:
    """Read the needed gradients from the backward's trailing arguments, skipping the source."""
    return LinearNeeds(*rest[: len(LinearNeeds._fields)])


def _forward_cuda(*args: Any) -> list[Tensor]:
    operands, (call, (return_state, keep, *_)) = _operands(args), unflatten_linear(args[5:])
    return forward(call, operands, return_state, keep, direct=True)


def _backward_cuda(grads: list[Tensor], *args: Any) -> list[Tensor]:
    operands, (call, needs) = _operands(args), unflatten_linear(args[6:])
    return backward(call, grads, operands, args[5], _take_needs(needs), direct=True)


def _operands(args: Sequence[Any]) -> Operands:
    q, k, v, gate, state, *_ = args
    return Operands(q, k, v, gate, tuple(state))


def _forward_reference(*args: Any) -> list[Tensor]:
    operands, (call, (return_state, *_)) = _operands(args), unflatten_linear(args[5:])
    with torch.no_grad():
        o, after = run_reference(call, operands)
        out = [like_in_memory(operands.q, o.shape[3]).copy_(o)]
        return out + [t.clone() for t in after] if return_state else out


def _backward_reference(grads: list[Tensor], *args: Any) -> list[Tensor]:
    operands, (call, needs) = _operands(args), unflatten_linear(args[6:])
    with _recording():
        found = _differentiate_reference(call, operands, grads, _take_needs(needs))
    dqkv = [like_in_memory(x, dx.shape[3]).copy_(dx) for x, dx in zip(operands[:3], found, strict=False)]
    return dqkv + [t.detach().clone(memory_format=torch.contiguous_format) for t in found[3:]]


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd again, which lies behind where it calls an operator, or a mode that watches does."""
    exclude: Any = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include: Any = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _forward_fake(*args: Any) -> list[Tensor]:
    compiled.register_linear()
    operands, (call, (return_state, keep, *_)) = _operands(args), unflatten_linear(args[5:])
    q, k, v, _, _ = operands
    out = [like_in_memory(q, v.shape[3])]
    if return_state:
        batch = k.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
        width = call.spec.out_dim(k.shape[3])
        sizes: list[tuple[int, ...]] = [(batch, k.shape[1], width, v.shape[3])]
        if call.attention.normalizer != "none":
            sizes.append((batch, k.shape[1], k.shape[3] if call.attention.normalizer == "unrotated" else width))
        out += [q.new_empty(size, dtype=accumulator(q.dtype)) for size in sizes]
    if keep:
        saved = _launcher().saved_shapes(call, operands, return_state)
        out += [q.new_empty(shape, dtype=dtype) for shape, dtype in saved]
    return out


def _backward_fake(grads: list[Tensor], *args: Any) -> list[Tensor]:
    compiled.register_linear()
    (q, k, v, gate, state), (call, needs) = _operands(args), unflatten_linear(args[6:])
    need = _take_needs(needs)
    out = [like_in_memory(x, x.shape[3]) for x in (q, k, v)]
    for t, needed in (
        (gate, need.gate),
        (call.q_tables.omega, need.omega),
        (call.q_tables.phase, need.phase_q),
        (call.k_tables.phase, need.phase_k),
        *((t, need.norm) for t in call.weights),
        *((t, need.state) for t in state),
    ):
        if t is not None and needed:
            out.append(torch.empty_like(t, memory_format=torch.contiguous_format))
    return out


_lib.impl("linear_forward", _forward_cuda, "CUDA")
_lib.impl("linear_backward", _backward_cuda, "CUDA")
_lib.impl("linear_forward", _forward_reference, "CompositeExplicitAutograd")
_lib.impl("linear_backward", _backward_reference, "CompositeExplicitAutograd")
torch.library.register_fake(add_op_namespace_prefix("linear_forward"), _forward_fake, lib=_lib)
torch.library.register_fake(add_op_namespace_prefix("linear_backward"), _backward_fake, lib=_lib)


# --- autograd --------------------------------------------------------------------------------------------


_NUM_TABLES = 3 + len(Weights._fields)  # omega and the phases, and the weights


class _How(NamedTuple):
    """Non-differentiable arguments of the function below."""

    call: LinearCall
    direct: bool
    return_state: bool


class _Attend(torch.autograd.Function):
    """Autograd function of gate, omega, phase_q, phase_k, the norm's weights, q, k, v and the state.

    It saves them, and those results of the forward that the launcher names. gate, omega, the phases and the weights are
    also in the call; they are passed again because they have a gradient. phase_k is None if it is phase_q.

    """

    @staticmethod
    def forward(ctx, how, gate, *tensors):
        call, direct, return_state = how
        q, k, v, *state = tensors[_NUM_TABLES:]
        state = tuple(state)
        operands = Operands(q, k, v, gate, state)
        # What is kept, and of which size, depends on the sizes: a graph for all sizes forms it again, and so does the
        # operator where it is the reference.
        keep = direct or (q.is_cuda and all(reference_linear.is_static(size) for x in (q, k, v) for size in x.shape))
        out = forward(call, operands, return_state, keep, direct)
        num = 1 if not return_state else 2 if call.attention.normalizer == "none" else 3
        one_side = call.k_tables is call.q_tables
        one_phase = call.k_tables.phase is call.q_tables.phase
        tables = call.q_tables if one_side else (*call.q_tables, *call.k_tables)
        ctx.save_for_backward(q, k, v, gate, call.cu_seqlens, *call.weights, *tables, *state, *out[num:])
        ctx.args = call.attention, call.spec, call.q_layout, call.k_layout, call.launches, one_side, one_phase, direct
        ctx.num_states = len(state)
        ctx.split = find_split((q, k, v)) if direct else None
        return tuple(out[:num])

    @staticmethod
    def backward(ctx, *grads):
        attention, spec, q_layout, k_layout, launches, one_side, one_phase, direct = ctx.args
        q, k, v, gate, cu_seqlens, *rest = ctx.saved_tensors
        weights, rest = Weights(*rest[: len(Weights._fields)]), rest[len(Weights._fields) :]
        size = len(Tables._fields)
        q_tables = k_tables = Tables(*rest[:size])
        if not one_side:
            k_tables, rest = Tables(*rest[size : 2 * size]), rest[size:]
        state, saved = tuple(rest[size : size + ctx.num_states]), rest[size + ctx.num_states :]
        call = LinearCall(attention, spec, q_layout, k_layout, q_tables, k_tables, cu_seqlens, launches, weights)
        operands = Operands(q, k, v, gate, state)
        _, need_gate, need_omega, need_phase_q, need_phase_k, *need = ctx.needs_input_grad
        need_phase_k = need_phase_q if one_phase else need_phase_k
        need_norm, need_state = any(need[: len(weights)]), any(need[len(weights) + 3 :])
        needs = LinearNeeds(need_gate, need_omega, need_phase_q, need_phase_k, need_norm, need_state)
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():  # create_graph: a double backward
            found = _differentiate_reference(call, operands, grads, needs, create_graph=True)
        elif not compiling and (transforming() or any(is_legacy_batchedtensor(g) for g in grads)):
            # A transform that began after the forward: dual gradients, or batched ones (is_grads_batched).
            found = _differentiate_reference(call, operands, grads, needs)
        else:
            direct = direct and is_plain(grads)
            outs = ctx.split.allocate(q, 3) if direct and ctx.split is not None else ()
            found = backward(call, grads, operands, saved, needs, direct, outs)
        dq, dk, dv, *others = found
        others = iter(others)
        dgate, domega, dphase_q, dphase_k = (next(others) if needed else None for needed in needs[:4])
        dweights = [next(others) if needs.norm and t is not None else None for t in weights]
        if one_phase and dphase_q is not None and dphase_k is not None:
            dphase_q, dphase_k = dphase_q + dphase_k, None
        dstate = [next(others) if needs.state else None for _ in state]
        return None, dgate, domega, dphase_q, dphase_k, *dweights, dq, dk, dv, *dstate
