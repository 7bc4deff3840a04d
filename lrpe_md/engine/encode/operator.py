"""Operator for encodings, which apply an optional norm and then the cosine or rotate map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..core.call import NO_WEIGHTS, Call, CosSin, Layout, Needs, Spec, Tables, Weights
from ..core.memory import accumulator, arrange_in_memory, like_in_memory, memory_order
from ..core.operator import Operator, Part

Xs = tuple[Tensor, ...]  # x, or q and k


def run_in_place(call: Call, xs: Xs, outs: Sequence[Tensor | None], start: Tensor | None) -> tuple[Tensor, ...]:
    """Run the kernels on plain tensors without autograd, and write to ``outs`` (see ``Target`` in output.py)."""
    ys = ENCODE.launcher(call).forward(call, xs, outs, start)
    # Tell autograd about the in-place change, because another node may have saved one of these tensors.
    written_outs = [t for t in outs if t is not None and not t.is_inference()]
    torch.autograd.graph.increment_version(written_outs)
    return tuple(ys[: len(xs)])


class Encode(Operator):
    """Operator for encodings. Its learned tensors are omega, phase, the caller's tables and the norm's weights.

    For softmax over the sequence, the forward pass saves the maximum and the sum (2, B, H, D).
    """

    def import_launcher(self, call: Call) -> Any:
        from . import heads, launch

        return heads if call.spec.norm_over == "heads" else launch

    def split(self, call: Call) -> tuple[Any, ...]:
        return call.tables, call.layout, call.spec, call.weights, call.cos_sin

    def join(self, values: Sequence[Any]) -> Call:
        tables, layout, spec, weights, cos_sin = values
        return Call(spec, layout, tables, None, weights, cos_sin)

    def read_inputs(self, values: Sequence[Any]) -> Xs:
        return tuple(values[0])

    def write_inputs(self, inputs: Xs) -> tuple[Any, ...]:
        return (list(inputs),)

    def list_learned(self, call: Call, inputs: Xs) -> tuple[Tensor | None, ...]:
        learned = call.tables[:2]
        if call.cos_sin.cos is None and call.weights is NO_WEIGHTS:
            return learned  # autograd takes time for each argument, even None
        learned += call.cos_sin[:2]
        return learned if call.weights is NO_WEIGHTS else (*learned, *call.weights)

    def list_constants(self, call: Call) -> tuple[Tensor | None, ...]:
        return call.tables[2:]

    def replace(
        self, call: Call, inputs: Xs, rows: Sequence[Tensor], learned: Sequence[Tensor | None]
    ) -> tuple[Call, Xs]:
        omega, phase, cos, sin, *weights = (*learned, *[None] * 6)[:8]
        tables = call.tables._replace(omega=omega, phase=phase)
        cos_sin = call.cos_sin._replace(cos=cos, sin=sin)
        return call._replace(tables=tables, weights=Weights(*weights), cos_sin=cos_sin), tuple(rows)

    def read_needs(self, needs_gradients: Sequence[bool]) -> Needs:
        return Needs(needs_gradients[0], needs_gradients[1], any(needs_gradients[4:]), any(needs_gradients[2:4]))

    def list_needs(self, needs: Needs, call: Call, inputs: Xs) -> tuple[bool, ...]:
        all_needs = needs.omega, needs.phase, needs.tables, needs.tables, *(needs.norm,) * len(call.weights)
        return all_needs[: len(self.list_learned(call, inputs))]

    def run_reference(self, call: Call, inputs: Xs) -> tuple[Tensor, ...]:
        spec, tables, layout = call.spec, call.tables, call.layout
        encode: Any
        args: tuple[Any, ...]
        if tables.omega is None:
            encode, args = reference.encode_tables, (*call.cos_sin.split(), layout.start - layout.prefix)
        else:
            s, rotated = layout.positions(tables, tables.omega.device)
            encode, args = reference.encode, (s, rotated, tables.omega, tables.phase, tables.amplitude)
        ys: list[Tensor] = []
        for x, scales in zip(inputs, layout.scales(call.weights, inputs[0].device), strict=False):
            y = encode(spec, x, *args, scales)
            ys.append(arrange_in_memory(y, memory_order(x)))
        return tuple(ys)

    def run_reference_forward(self, call: Call, inputs: Xs, options: Sequence[Any]) -> list[Tensor]:
        results = self.fake_forward(call, inputs, options)
        for out, y in zip(results, self.run_reference(call, inputs), strict=False):
            out.copy_(y)
        for x, stats in zip(inputs, results[len(inputs) :], strict=False):
            wide = x.to(stats.dtype)
            top = wide.amax(-2) if x.shape[2] else wide.sum(-2)
            stats.copy_(torch.stack([top, (wide - top[:, :, None]).exp().sum(-2)]))
        return results

    def fake_forward(self, call: Call, inputs: Xs, options: Sequence[Any]) -> list[Tensor]:
        out = [like_in_memory(x, call.spec.out_dim(x.shape[3])) for x in inputs]
        if call.spec.dim == -2:
            for x in inputs:
                out.append(x.new_empty(2, x.shape[0], x.shape[1], x.shape[3], dtype=accumulator(x.dtype)))
        return out

    def launch_backward(
        self,
        call: Call,
        grads: Sequence[Tensor],
        inputs: Xs,
        saved: Sequence[Tensor],
        needs: Needs,
        outs: Sequence[Tensor],
    ) -> list[Tensor]:
        if needs.tables:  # the kernels don't compute the gradients of cos and sin
            return self.run_reference_backward(call, grads, inputs, needs)
        return super().launch_backward(call, grads, inputs, saved, needs, outs)

    def shape_gradients(self, call: Call, inputs: Xs, grads: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        return [(g, call.spec.head_dim(g.shape[3])) for g in grads]

    def pack_saved(self, call: Call, inputs: Xs, needs_gradients: Sequence[bool]) -> tuple[tuple[Any, ...], Any]:
        """Return the tensors to save, and the call's other values. Linear maps with fixed angles don't save x."""
        saved_xs = inputs if any(needs_gradients) or call.spec.act != "none" or call.spec.norm != "none" else ()
        tensors = *call.tables, *call.weights, *call.cos_sin[:2], *saved_xs
        return tensors, (call.spec, call.layout, call.launches, call.cos_sin.inverse, len(saved_xs))

    def unpack_saved(self, rest: Any, tensors: Sequence[Any]) -> tuple[Call, Xs, Sequence[Tensor]]:
        spec, layout, launches, inverse, num_xs = rest
        tables, weights = Tables(*tensors[:7]), Weights(*tensors[7:11])
        call = Call(spec, layout, tables, launches, weights, CosSin(tensors[11], tensors[12], inverse))
        return call, tuple(tensors[13 : 13 + num_xs]), tensors[13 + num_xs :]

    def run_shards(self, run: Callable[..., Any], call: Call, inputs: Xs, options: Any) -> tuple[Tensor, ...]:
        from .sharding import run_shards

        return run_shards(run, call, inputs)


_PARTS = Part(Tables), Part(Layout, "", "SymInt"), Part(Spec), Part(Weights), Part(CosSin)
ENCODE = Encode("", ("Tensor[] xs", "Tensor[] stats"), _PARTS, None, Needs)
