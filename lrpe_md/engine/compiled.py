"""Our operators in the code of ``torch.compile``: kernels that it launches itself, where every size is known.

An operator in Python costs a compiled program more of the host's time than the launch. So Inductor is told how to lower
ours: outputs are allocated, and what :func:`lrpe_md.engine.launch.prepare` prepares becomes a node that writes them.
What it leaves to the operator: sizes that are symbols, tensors that are not on a GPU or not laid out as the kernels
read them, softmax over the sequence, norms, and, where Inductor hands on no limit of registers (before torch 2.15), the
gradient of the frequencies of all but a rotation without activation. Export, ONNX and other backends of
``torch.compile`` see the operator alone.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .._ops import ops
from .call import Call, Needs, Tables, unflatten

__all__ = ["SOURCE", "register"]


def _hash_source() -> str:
    """Of what decides how an operator is launched: compilers keep their code on disk under the operators' arguments."""
    here, found = Path(__file__).parent, hashlib.sha256()
    for path in sorted((*here.glob("*.py"), *here.glob("kernels/*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


SOURCE = _hash_source()


def register() -> None:
    """Tell Inductor, once it is there; it is not loaded for this."""
    if "torch._inductor.lowering" in sys.modules:
        _register()


@cache
def _register() -> None:
    from torch._inductor.lowering import fallback_handler, register_lowering

    for op, lower in (
        (ops.forward.default, _lower_forward),
        (ops.backward.default, _lower_backward),
    ):
        register_lowering(op, type_promotion_kind=None)(_or_operator(lower, fallback_handler(op)))


def _or_operator(lower: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    def lower_or_call(*args: Any) -> Any:
        found = lower(*args)
        return operator(*args) if found is None else found

    return lower_or_call


# --- the operators -------------------------------------------------------------------------------------------


def _lower_forward(xs: list[Any], *args: Any) -> list[Any] | None:
    values = _read_numbers(args)
    if values is None:
        return None
    call, (cache_angles, *_) = unflatten(values)
    if cache_angles:
        return None
    return _lower(call, xs, [], Needs())


def _lower_backward(grads: list[Any], xs: list[Any], stats: list[Any], angles: Any, *args: Any) -> list[Any] | None:
    values = _read_numbers(args)
    if values is None or angles is not None:
        return None
    call, needs = unflatten(values)
    return _lower(call, xs, grads, Needs(*needs[: len(Needs._fields)]))


def _read_numbers(values: Sequence[Any]) -> list[Any] | None:
    """Arguments of an operator with plain integers; None where one of them is a symbol."""
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            inner = _read_numbers(value)
            if inner is None:
                return None
            found.append(inner)
        elif hasattr(value, "free_symbols"):  # sympy's
            if not value.is_Integer:
                return None
            found.append(int(value))
        else:
            found.append(value)
    return found


def _lower(call: Call, xs: list[Any], dys: list[Any], needs: Needs) -> list[Any] | None:
    """The outputs of an operator, as its launcher would leave them."""
    from . import launch
    from .kernels.fixed import fixed_lrpe_kernel, fixed_reduce_partial_kernel, number_types

    if launch.INTERPRETING or call.spec.dim == -2 or call.spec.norm != "none":
        return None
    xs, dys, boxes = list(map(_realize, xs)), list(map(_realize, dys)), Tables(*map(_realize, call.tables))
    plain_xs, plain_dys, plain = _describe(xs), _describe(dys), _describe(boxes)
    if plain_xs is None or plain_dys is None or plain is None:
        return None
    tables = Tables(*plain)
    call = call._replace(tables=tables)
    if not launch.is_readable(call):
        return None
    omega, phase = tables.omega, tables.phase
    need_dangles = needs.omega or needs.phase
    if dys and not need_dangles and call.spec.act == "none":
        xs = plain_xs = []
    source, dtype = (dys or xs)[0], (plain_dys or plain_xs)[0].dtype
    aligned = all(map(_is_aligned, (*xs, *dys)))
    ready = launch.prepare(call, launch.Rows(plain_xs, plain_dys, []), dtype, aligned, needs)
    if "maxnreg" in ready.options and not _takes_options() and (call.spec.map, call.spec.act) != ("rotate", "none"):
        return None  # too many registers without a limit: fewer programs run at once than were planned
    outs = [_allocate(size, stride, dtype, source) for size, stride in ready.outs]
    shape = ready.sums.angles if need_dangles else None
    partial = None if shape is None else _allocate(shape, None, torch.float64, source)
    if ready.grid[0]:
        tensors = launch.order_tensors(launch.Rows(xs, dys, []), outs, boxes, partial)
        written = outs if partial is None else [*outs, partial]
        _start(fixed_lrpe_kernel, number_types(launch.lrpe_kernel), ready, tensors, written)
    if shape is None:
        return outs
    phase = phase if needs.phase else None
    domega = _allocate(omega.shape, None, omega.dtype, source) if needs.omega else None
    dphase = None if phase is None else _allocate(phase.shape, None, phase.dtype, source)
    second = launch.prepare_reduction(shape, call, needs)
    found = [box for box in (domega, dphase) if box is not None]
    if second.grid[0]:
        types = ("i32",) * len(second.scalars)
        _start(fixed_reduce_partial_kernel, types, second, (partial, domega, dphase), found)
    return [*outs, *found]


# --- tensors of the compiler ---------------------------------------------------------------------------------


def _realize(box: Any) -> Any:
    """In memory, with strides that will not change."""
    if box is None:
        return None
    from torch._inductor import ir

    box = ir.ExternKernel.realize_input(box)
    box.freeze_layout()
    return box


def _describe(boxes: Sequence[Any]) -> list[Any] | None:
    """Tensors of these sizes, strides and dtypes, without memory; None where one has symbols or is on no GPU."""
    found: list[Any] = []
    for box in boxes:
        if box is not None:
            numbers = _read_numbers((box.get_size(), box.get_stride(), box.get_layout().offset))
            if numbers is None or box.get_device().type != "cuda":
                return None
            box = torch.empty_strided(*numbers[:2], dtype=box.get_dtype(), device="meta")
        found.append(box)
    return found


def _is_aligned(box: Any) -> bool:
    """Its address is a multiple of 16 bytes: of inputs that are not, Inductor's programs make copies that are."""
    from torch._inductor.virtualized import V

    name = box.get_name()
    if name in V.graph.unaligned_buffers or name in V.graph.constants:
        return False
    return int(box.get_layout().offset) * box.get_dtype().itemsize % 16 == 0


def _allocate(size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, like: Any) -> Any:
    from torch._inductor.lowering import lowerings

    stride = stride or torch.empty(size, device="meta").stride()
    empty = lowerings[torch.ops.aten.empty_strided.default]
    return empty(list(size), list(stride), dtype=dtype, device=like.get_device())


def _start(fixed: Any, types: tuple[str, ...], ready: Any, tensors: Sequence[Any], written: Sequence[Any]) -> None:
    """A launch, as a node of the compiler's program. types: of its numbers."""
    arguments = dict(zip(fixed.arg_names, (*tensors, ready.scalars, types, ready.variant), strict=True))
    _node_type()(fixed, ready, arguments, written)


@cache
def _node_type() -> Any:
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class Launch(ir.UserDefinedTritonKernel):
        """A launch of one of our kernels.

        Says itself what is written: Inductor reads it off the kernel, and takes x for written, too, since places in x
        and in the outputs travel in one tuple.
        """

        def __init__(self, kernel: Any, ready: Any, arguments: dict[str, Any], written: Sequence[Any]) -> None:
            values = {name: self._place(value) for name, value in arguments.items()}
            inputs = [value for value in values.values() if isinstance(value, ir.IRNode)]
            constants = tuple(value for value in values.values() if not isinstance(value, ir.IRNode))
            device = inputs[0].get_device()
            ir.ExternKernel.__init__(self, None, ir.NoneLayout(device=device), inputs, constants, values)
            options = dict(ready.options)
            config = triton.Config({}, num_warps=options.pop("num_warps", 4))
            chosen: Any = triton.autotune(configs=[config], key=[])(kernel)
            self.kernel_idx = kernel_side_table.add_kernel(chosen)
            self.grid = [ready.grid]
            self.device = device
            self.launch_kwargs = tuple(options)  # from torch 2.15 on; before, the compiler takes no other options
            self.kwargs |= options if _takes_options() else {}
            self.ordered_kwargs_for_cpp_kernel = list(arguments)
            self.mutable_args = list(written)
            self.mutation_outputs = [ir.MutationOutput(ir.NoneLayout(device=device), box, self) for box in written]
            V.graph.register_operation(self)

        def _place(self, value: Any) -> Any:
            if not isinstance(value, ir.IRNode):
                return value
            return self.unwrap_storage_for_input(self.realize_input(value))

        def can_fuse_epilogue(self) -> bool:
            return False

    return Launch


@cache
def _takes_options() -> bool:
    import inspect

    from torch._inductor import ir

    return "launch_kwargs" in inspect.signature(ir.UserDefinedTritonKernel.__init__).parameters
