"""Operator for linear attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ... import reference, reference_linear
from ...reference import no_autocast
from ...reference_linear import Angles, Attention, zero_gated_tokens
from ..core.call import NO_WEIGHTS, Call, Layout, Spec, Tables, Weights
from ..core.memory import accumulator, arrange_in_memory, like_in_memory, memory_order
from ..core.norms import of_tensor
from ..core.operator import INTERPRETING, Operator, Part, is_sharded
from ..core.recording import compile_together
from ..encode.dispatch import run_call
from ..inductor.private import has_static_value
from .call import LinearCall, LinearNeeds, Operands, Packing, Results
from .plan import fits_kernels


def _make_angles(call: LinearCall, layout: Layout, tables: Tables, omega: Tensor) -> Angles | None:
    if call.spec.map == "none":
        return None
    coords, rotated = layout.positions(tables, omega.device)
    return Angles(coords, rotated, omega, tables.phase, tables.amplitude)


class Attend(Operator):
    """Operator whose rows are q, k and v.

    Its learned tensors are the gate, omega, the phases of q and k, the weights of a norm, the state and the decay.
    """

    num_rows = 3
    launcher_key = staticmethod(attrgetter("attention.memory"))

    def import_launcher(self, call: LinearCall) -> Any:
        if call.attention.forgets:
            from . import launch_memory

            return launch_memory
        from . import launch

        return launch

    def run(
        self, call: LinearCall, inputs: Operands, impl: str, direct: bool, options: Any = (), constants: Any = None
    ) -> tuple[Tensor, ...]:
        if (call.spec.norm_over == "heads" or call.spec.dim == -2) and not is_sharded(*inputs[:3]):
            call, inputs = _prepare_operands(call, inputs, impl, direct)
        if not _fits_kernels(impl, call, inputs):
            impl = "reference"
        return super().run(call, inputs, impl, direct, options, constants)

    def split(self, call: LinearCall) -> tuple[Any, ...]:
        attention, spec, q_layout, k_layout, q_tables, k_tables, cu_seqlens, _, weights = call
        packing = Packing(cu_seqlens, call.has_one_side)
        return attention, spec, q_layout, k_layout, q_tables, k_tables, weights, packing

    def join(self, values: Sequence[Any]) -> LinearCall:
        attention, spec, q_layout, k_layout, q_tables, k_tables, weights, (cu_seqlens, one_side) = values
        if one_side:
            k_layout, k_tables = q_layout, q_tables
        return LinearCall(attention, spec, q_layout, k_layout, q_tables, k_tables, cu_seqlens, None, weights)

    def read_inputs(self, values: Sequence[Any]) -> Operands:
        q, k, v, gate, decay, state = values
        return Operands(q, k, v, gate, tuple(state), decay)

    def write_inputs(self, inputs: Operands) -> tuple[Any, ...]:
        q, k, v, gate, state, decay = inputs
        return q, k, v, gate, decay, list(state)

    def list_learned(self, call: LinearCall, inputs: Operands) -> tuple[Tensor | None, ...]:
        q_tables, k_tables = call.q_tables, call.k_tables
        tables = q_tables.omega, q_tables.phase, k_tables.phase
        return inputs.gate, *tables, *call.weights, *inputs.state, inputs.decay

    def list_constants(self, call: LinearCall) -> tuple[Tensor | None, ...]:
        q_tables, k_tables = call.q_tables, call.k_tables
        return q_tables[2:] if k_tables is q_tables else (*q_tables[2:], *k_tables[2:])

    def replace(
        self, call: LinearCall, inputs: Operands, rows: Sequence[Tensor], learned: Sequence[Tensor | None]
    ) -> tuple[LinearCall, Operands]:
        q, k, v = rows
        gate, omega, phase_q, phase_k, *_, decay = learned
        state: Any = tuple(learned[8:-1])
        call = call._replace(
            q_tables=call.q_tables._replace(omega=omega, phase=phase_q),
            k_tables=call.k_tables._replace(omega=omega, phase=phase_k),
            weights=Weights(*learned[4:8]),
        )
        return call, Operands(q, k, v, gate, state, decay)

    def read_needs(self, needs_gradients: Sequence[bool]) -> LinearNeeds:
        gate, omega, phase_q, phase_k = needs_gradients[:4]
        return LinearNeeds(
            gate, omega, phase_q, phase_k, any(needs_gradients[4:8]), any(needs_gradients[8:-1]), needs_gradients[-1]
        )

    def list_needs(self, needs: LinearNeeds, call: LinearCall, inputs: Operands) -> tuple[bool, ...]:
        return *needs[:4], *(needs.norm,) * 4, *(needs.state,) * len(inputs.state), needs.decay

    def run_reference(
        self, call: LinearCall, inputs: Operands, operand_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Run the reference. Return o and the state after the last token.

        ``operand_dtype`` is passed to :func:`lrpe_md.reference_linear.attend` as ``operands``.
        """
        q, k, v, gate, state, decay = inputs
        omega = reference.widen(call.q_tables.omega)
        q_angles = _make_angles(call, call.q_layout, call.q_tables, omega)
        k_angles = q_angles if call.has_one_side else _make_angles(call, call.k_layout, call.k_tables, omega)
        scales = (
            call.q_layout.scales(call.weights, omega.device)[0], call.k_layout.scales(call.weights, omega.device)[1]
        )  # fmt: skip
        o, final_state = reference_linear.attend(
            call.attention, call.spec, q, k, v, q_angles=q_angles, k_angles=k_angles, scales=scales, gate=gate,
            decay=decay, cu_seqlens=call.cu_seqlens, state=state, ends=call.k_layout.ends, operands=operand_dtype,
        )  # fmt: skip
        return arrange_in_memory(o, memory_order(q)), *final_state

    def run_reference_forward(self, call: LinearCall, inputs: Operands, options: Sequence[Any]) -> list[Tensor]:
        o, *final_state = self.run_reference(call, inputs)
        out = [like_in_memory(inputs.q, o.shape[3]).copy_(o)]
        return out + [t.clone() for t in final_state] if options[0] else out

    def fake_forward(self, call: LinearCall, inputs: Operands, options: Sequence[Any]) -> list[Tensor]:
        return_state, keep = options
        q, k, v = inputs[:3]
        out = [like_in_memory(q, v.shape[3])]
        if return_state:
            out += [q.new_empty(size, dtype=accumulator(q.dtype)) for size in call.state_sizes(k, v)]
        if keep:
            saved = self.launcher(call).find_saved_shapes(call, inputs, return_state)
            out += [q.new_empty(shape, dtype=dtype) for shape, dtype in saved]
        return out

    def shape_gradients(self, call: LinearCall, inputs: Operands, grads: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        return [(x, x.shape[3]) for x in inputs[:3]]

    def pack_saved(
        self, call: LinearCall, inputs: Operands, needs_gradients: Sequence[bool]
    ) -> tuple[tuple[Any, ...], Any]:
        attention, spec, q_layout, k_layout, q_tables, k_tables, cu_seqlens, launches, weights = call
        one_side = k_tables is q_tables
        tables = q_tables if one_side else (*q_tables, *k_tables)
        tensors = *inputs[:4], cu_seqlens, *weights, *tables, inputs.decay, *inputs.state
        return tensors, (attention, spec, q_layout, k_layout, launches, one_side, len(inputs.state))

    def unpack_saved(self, rest: Any, tensors: Sequence[Any]) -> tuple[LinearCall, Operands, Sequence[Tensor]]:
        attention, spec, q_layout, k_layout, launches, one_side, num_states = rest
        weights, end = Weights(*tensors[5:9]), 16 if one_side else 23
        q_tables = k_tables = Tables(*tensors[9:16])
        if not one_side:
            k_tables = Tables(*tensors[16:23])
        call = LinearCall(attention, spec, q_layout, k_layout, q_tables, k_tables, tensors[4], launches, weights)
        q, k, v, gate = tensors[:4]
        decay, *state_and_saved = tensors[end:]
        inputs = Operands(q, k, v, gate, tuple(state_and_saved[:num_states]), decay)
        return call, inputs, state_and_saved[num_states:]

    def keep_for_backward(
        self, call: LinearCall, inputs: Operands, options: Results, direct: bool
    ) -> tuple[Results, int]:
        """Save states only if the kernels run and all sizes are known. Otherwise, the backward pass recomputes them."""
        keep = direct or (inputs.q.is_cuda and all(has_static_value(size) for x in inputs[:3] for size in x.shape))
        num_states = len(call.state_sizes(*inputs[1:3])) if options.return_state else 0
        options = Results(options.return_state, keep)
        if direct and not call.launches:
            self.compile_together(call, inputs, options, 1 + num_states)
        return options, 1 + num_states

    def compile_together(self, call: LinearCall, inputs: Operands, options: Results, num_outputs: int) -> None:
        """Compile the kernels of a first forward pass, and of its backward pass, at the same time."""
        needs = [t is not None and t.requires_grad for t in self.list_learned(call, inputs)]
        widths = [(t.dtype, t.shape[3]) for t in inputs[:3]]
        key = inputs.q.device, call.attention, call.spec, call.has_one_side, *widths, *needs
        if key in _compiled or INTERPRETING or torch.cuda.is_current_stream_capturing():
            return
        _compiled.add(key)
        launcher = self.launcher(call)
        with suppress(torch.OutOfMemoryError), torch.no_grad(), compile_together(inputs.q.device):
            call = call._replace(launches={})
            out = launcher.forward(call, inputs, *options)
            grads = [torch.empty_like(t) for t in out[:num_outputs]]
            launcher.backward(call, grads, inputs, out[num_outputs:], self.read_needs(needs), ())

    def run_shards(
        self, run: Callable[..., Any], call: LinearCall, inputs: Operands, options: Results
    ) -> tuple[Tensor, ...]:
        from .sharding import run_shards

        return run_shards(run, call, inputs, options.return_state)


def _prepare_operands(call: LinearCall, operands: Operands, impl: str, direct: bool) -> tuple[LinearCall, Operands]:
    """Apply a norm over all heads or a softmax over the sequence. The linear attention kernels support neither."""
    if call.spec.norm_over == "heads":
        call, operands = _normalise_heads(call, operands, impl, direct)
    if call.spec.dim == -2:
        operands = operands._replace(q=_soften(operands.q), k=_soften(operands.k))
        call = call._replace(spec=call.spec._replace(act="none", dim=0))
    return call, operands


def _normalise_heads(call: LinearCall, operands: Operands, impl: str, direct: bool) -> tuple[LinearCall, Operands]:
    """Apply a norm over all heads in a separate pass, because each linear attention program reads only one head.

    Tokens with gate 0 are set to zero first. They then affect neither other heads nor the gradients of the weights.
    """
    k, v = zero_gated_tokens(operands.gate, operands.k, operands.v)
    spec, weights = call.spec, call.weights
    tables = Tables(operands.q.new_empty((1, 0, 1), dtype=torch.float32))

    def normalise(layout: Layout, tensor_weights: Weights, *xs: Tensor) -> tuple[Tensor, ...]:
        layout = layout._replace(sizes=(layout.num_grid_tokens,))
        return run_call(Call(spec.without_map(), layout, tables, None, tensor_weights), xs, None, impl, direct)

    if call.q_layout.is_same(call.k_layout):
        q, k = normalise(call.q_layout, weights, operands.q, k)
    else:
        (q,) = normalise(call.q_layout, of_tensor(weights, 0), operands.q)
        (k,) = normalise(call.k_layout, of_tensor(weights, 1), k)
    return call._replace(spec=spec.without_norm(), weights=NO_WEIGHTS), operands._replace(q=q, k=k, v=v)


def _soften(x: Tensor) -> Tensor:
    """Apply softmax over the sequence."""
    with no_autocast(x):
        return torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -2).to(x.dtype)


def _fits_kernels(impl: str, call: LinearCall, operands: Operands) -> bool:
    """Return whether the kernels support a call. If impl is "triton", raise an error instead of returning False.

    On a GPU, Triton doesn't support float64 products, and a program must have room for a whole state. With a causal
    mask, the gradient of a per-head decay is a double sum over tokens, in which the rounding errors of the kernels
    would add up. So on a GPU, the reference computes this gradient.
    """
    q, v, decay, attention = operands.q, operands.v, operands.decay, call.attention
    forgets, features, reason = attention.memory != "sum", 0, ""
    is_learned_by_head = decay is not None and decay.ndim == 1 and decay.requires_grad and torch.is_grad_enabled()
    if forgets and call.cu_seqlens is not None:
        reason = "a decay with cu_seqlens"
    elif forgets and attention.block == 1:
        reason = "block=1 with a decay and a prefix, a suffix or directions='both'"
    elif q.is_cuda and q.dtype == torch.float64:
        reason = "float64 on a GPU"
    elif not q.is_cuda:
        return True
    elif attention.mask == "causal" and is_learned_by_head:
        reason = "a causal mask with a per-head decay that needs a gradient"
    else:
        features = call.spec.out_dim(q.shape[3])
    if features and not fits_kernels(v.shape[3], features, q.element_size(), attention.rule == "delta"):
        reason = f"a state of {features} x {v.shape[3]} elements in {q.dtype} on a GPU"
        reason += " and rule='delta'" if attention.rule == "delta" else ""
    if reason and impl == "triton":
        raise ValueError(f"impl: 'triton' has no kernel for {reason}; use impl='auto'")
    return not reason


_compiled: set[Hashable] = set()  # calls whose kernels were compiled together

_INPUTS = "Tensor q", "Tensor k", "Tensor v", "Tensor? gate", "Tensor? decay", "Tensor[] state", "Tensor[] saved"
_PARTS = (
    Part(Attention, "", "SymInt"), Part(Spec), Part(Layout, "q_", "SymInt"), Part(Layout, "k_", "SymInt"),
    Part(Tables, "q_"), Part(Tables, "k_"), Part(Weights), Part(Packing),
)  # fmt: skip
ATTEND = Attend("linear_", _INPUTS, _PARTS, Results, LinearNeeds)
