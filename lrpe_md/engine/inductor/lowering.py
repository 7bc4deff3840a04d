"""Lower our operators in ``torch.compile``, so that Inductor launches their kernels itself.

In a compiled program, calling a Python operator takes more host time than the launches in it. So we register lowerings
with Inductor. A lowering runs the operator's launcher on meta tensors, records what it allocates and launches, and adds
each launch to Inductor's graph. If the launcher does anything else, the lowering falls back to calling the operator.
Examples are tables that are created or changed before a kernel reads them, states, and pieces of packed sequences or of
causal attention. It also falls back for symbolic sizes, for tensors that are not on a GPU, and for sums over rows that
are not 16-byte aligned. Before torch 2.15, Inductor could not limit registers. In these versions, Triton launches
kernels that need a limit from Inductor's Python code, and in C++ code, such kernels remain operators. Export, ONNX and
other ``torch.compile`` backends only see the operator.

If gradients belong to one projection (core/projection.py), the operator writes them directly into the joined buffer,
which is allocated with them. v's gradient comes from elsewhere. If it is already in memory, extra programs of the same
launch copy it; otherwise, the lowering of the join does.
"""

from __future__ import annotations

import hashlib
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import ops
from ..core.call import Variant
from ..core.memory import split_projection
from ..core.recording import COMPILER_OPTIONS, KernelLaunch, UnrecordableError, record
from .private import get_storage_id

__all__ = ["SOURCE", "register", "register_join"]


def _hash_source() -> str:
    """Hash the source code of the engine. Compilers cache code by an operator's arguments, which must include this."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


SOURCE = _hash_source()


def register(operator: Any) -> None:
    """Register the lowering of an :class:`Operator`, if Inductor is already imported."""
    if "torch._inductor.lowering" in sys.modules:
        _register(operator)


def register_join() -> None:
    """Register the lowering of the operator that joins gradients, if Inductor is already imported."""
    if "torch._inductor.lowering" in sys.modules:
        _register_join()


@cache
def _register(operator: Any) -> None:
    from torch._inductor.lowering import fallback_handler, register_lowering

    def lower_forward(*args: Any) -> Any:
        return _lower_or_call(operator.run_forward, args, None, call_forward)

    def lower_backward(*args: Any) -> Any:
        return _lower_or_call(operator.run_backward, args, _find_join(operator.num_rows or len(args[0])), call_backward)

    forward, backward = operator.forward_op.default, operator.backward_op.default
    call_forward, call_backward = fallback_handler(forward), fallback_handler(backward)
    register_lowering(forward, type_promotion_kind=None)(lower_forward)
    register_lowering(backward, type_promotion_kind=None)(lower_backward)


@cache
def _register_join() -> None:
    from torch._inductor.lowering import register_lowering

    register_lowering(ops.join.default, type_promotion_kind=None)(_lower_join)


def _lower_or_call(
    run: Callable[..., list[Tensor]], args: Sequence[Any], join: _Join | None, call: Callable[..., Any]
) -> Any:
    try:
        return _lower(run, args, join)
    except (FallBackToOperator, UnrecordableError):
        return call(*args)


class FallBackToOperator(Exception):
    """Raised to make Inductor call the registered operator."""


# --- from a launcher to nodes ----------------------------------------------------------------------------------------


def _lower(run: Callable[..., list[Tensor]], args: Sequence[Any], join: _Join | None) -> list[Any]:
    """Add an operator's launches to Inductor's graph and return its outputs. Joined outputs are views of one buffer."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from ..core.launching import INTERPRETING
    from ..kernels.fixed import fix

    if INTERPRETING:
        raise FallBackToOperator
    inputs = _Inputs()
    with unset_fake_temporarily():
        values = inputs.read(args)
        v_gradient = None if join is None or join.v_gradient is None else inputs.read(join.v_gradient)
        num_joined = 0 if join is None else join.num_joined
        with record() as recorded:
            views = () if join is None else join.split_views(torch.empty(join.shape, dtype=join.dtype, device="meta"))
            outs = run(*values, outs=views[:num_joined]) if views else run(*values)
        for launch in recorded.launches:
            _check_compilable(launch, inputs.device)
        copy = _plan_copy(recorded.launches[0], v_gradient, views) if recorded.launches else None
        fixed_kernels = [
            fix(launch.kernel, launch.args, None if i else copy) for i, launch in enumerate(recorded.launches)
        ]
        boxes = _Boxes(inputs, recorded.allocations, outs, num_joined)
        kernel_boxes = [[boxes.find(t) for t in fixed_kernel.tensors] for fixed_kernel in fixed_kernels]
    for launch, fixed_kernel, tensors in zip(recorded.launches, fixed_kernels, kernel_boxes, strict=True):
        values = (*(box for box, _ in tensors), fixed_kernel.numbers, fixed_kernel.types, launch.variant)
        arguments = dict(zip(fixed_kernel.kernel.arg_names, values, strict=True))
        written_boxes = {id(box_to_write): box_to_write for _, box_to_write in tensors if box_to_write is not None}
        _node_type()(fixed_kernel, launch, arguments, list(written_boxes.values()))
    if join is not None:
        join.node.meta[_JOIN_STATE] = boxes.joined_buffer, num_joined + (copy is not None)
    return boxes.outs


def _plan_copy(launch: KernelLaunch, v_gradient: Tensor | None, views: Sequence[Tensor]) -> Any:
    """Plan the copy of v's gradient if its rows and their destinations are 16-byte aligned; else return None."""
    from ..core.launching import in_eights
    from ..kernels.fixed import Copy

    if v_gradient is None or v_gradient.storage_offset() or views[-1].storage_offset() % 8:
        return None
    if not in_eights(v_gradient.shape[3], [v_gradient.stride(), views[-1].stride()]):
        return None
    return Copy(v_gradient, views[-1], launch.programs, launch.options.get("num_warps", 4))


_LARGEST_SHARED = 227 * 1024  # bytes per program, on the GPUs that the tiles of linear attention are chosen for


def _check_compilable(launch: KernelLaunch, device: torch.device | None) -> None:
    """Check that Inductor can compile the kernel with bitwise equal results. It can't fall back to smaller tiles."""
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper and _needs_launcher(launch):
        raise FallBackToOperator
    if _sums_rows(launch.variant) and not launch.variant.aligned:
        raise FallBackToOperator  # constant strides would change how a row is distributed over threads, and so its sums
    if launch.variant.num_features:
        properties = torch.cuda.get_device_properties(device)
        if getattr(properties, "shared_memory_per_block_optin", 0) < _LARGEST_SHARED:
            raise FallBackToOperator


def _sums_rows(variant: Variant) -> bool:
    """Return whether a kernel sums over channels or tokens."""
    sums = variant.norm != "none" or variant.dim != 0 or variant.num_features > 0 or variant.need_dangles
    return sums and variant.head_dim > 0


def _needs_launcher(launch: KernelLaunch) -> bool:
    """Return whether a kernel needs a register limit that Inductor can't set.

    Without the limit, fewer programs would run at once than planned.
    """
    variant = launch.variant
    needs_no_limit = (variant.map, variant.act, variant.norm) == ("rotate", "none", "none") and not variant.num_features
    return "maxnreg" in launch.options and not needs_no_limit and not _takes_options()


class _Inputs:
    """Arguments of an operator, with meta tensors in place of the compiler's tensors."""

    def __init__(self) -> None:
        self.boxes: dict[int, tuple[Any, int]] = {}  # storage of a meta tensor -> compiler's tensor, storage offset
        self.tensors: dict[int, Tensor] = {}  # id of a compiler's tensor -> meta tensor
        self.device: torch.device | None = None

    def read(self, value: Any) -> Any:
        from torch._inductor.ir import IRNode

        if isinstance(value, (list, tuple)):
            return [self.read(item) for item in value]
        if not isinstance(value, IRNode):
            return _read_number(value)
        if id(value) not in self.tensors:
            self.tensors[id(value)] = self._make(value)
        return self.tensors[id(value)]

    def _make(self, box: Any) -> Tensor:
        """Create a meta tensor with the same size, stride, dtype and 16-byte alignment."""
        if box.get_device().type != "cuda" or self.device not in (None, box.get_device()):
            raise FallBackToOperator
        self.device = box.get_device()
        size = [_read_number(n) for n in box.get_size()]
        box = _realize(box)
        stride = [_read_number(n) for n in box.get_stride()]
        begin = 0 if _is_aligned(box) else 1
        t = torch.empty_strided(size, stride, dtype=box.get_dtype(), device="meta")
        if begin:
            num = t.untyped_storage().nbytes() // t.itemsize + begin
            t = torch.empty(num, dtype=t.dtype, device="meta").as_strided(size, stride, begin)
        self.boxes[get_storage_id(t)] = box, begin
        return t


def _read_number(value: Any) -> Any:
    """Convert a sympy integer to an int, and return other values unchanged. Symbolic sizes are not supported."""
    if not hasattr(value, "free_symbols"):  # not from sympy
        return value
    if not value.is_Integer:
        raise FallBackToOperator
    return int(value)


class _Boxes:
    """The compiler's tensors that correspond to a launcher's meta tensors."""

    def __init__(
        self, inputs: _Inputs, allocated: dict[int, Tensor], outs: Sequence[Tensor], num_joined: int
    ) -> None:  # fmt: skip
        """Allocate the outputs. The first ``num_joined`` of them are views of one tensor."""
        self.device, self.input_boxes, self.allocations = inputs.device, inputs.boxes, allocated
        self.predecessors = _find_predecessors(inputs)
        self.buffers: dict[int, Any] = {}
        views, others = outs[:num_joined], outs[num_joined:]
        geometry = {get_storage_id(out): out for out in others}
        are_own_storages = all(out.storage_offset() == 0 and get_storage_id(out) in allocated for out in others)
        if not are_own_storages or len(geometry) != len(others):
            raise FallBackToOperator
        self.joined_buffer = self._write(allocated[get_storage_id(views[0])]) if views else None
        self.outs = [_view_as(self.joined_buffer, view) for view in views] + [self._write(out) for out in others]

    def _write(self, like: Tensor) -> Any:
        key = get_storage_id(like)
        if key not in self.buffers:
            self.buffers[key] = _allocate(like, self.device, self.predecessors)
        return self.buffers[key]

    def find(self, t: Tensor) -> tuple[Any, Any]:
        """Return a compiler's tensor that begins where t does and, if we allocated it, the whole tensor."""
        key = get_storage_id(t)
        if key in self.input_boxes:
            box, begin = self.input_boxes[key]
            if t.storage_offset() != begin:
                raise FallBackToOperator
            return box, None
        if key not in self.allocations:
            raise FallBackToOperator  # a tensor from an earlier call
        whole_box = self._write(self.allocations[key])
        if not t.storage_offset():
            return whole_box, whole_box
        return _view_as(whole_box, t), whole_box


# --- gradients of a projection ---------------------------------------------------------------------------------------

_JOIN_STATE = "lrpe_md joined"  # metadata of a join's node: the joined buffer, and how many gradients are already in it


class _Join(NamedTuple):
    """A node that joins dq, dk and dv. The node being lowered computes the first ``num_joined`` of them."""

    node: Any
    num_joined: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    v_gradient: Any  # v's gradient, if another node computes it and it is in memory

    def split_views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return views for dq, dk and dv of the joined tensor."""
        return split_projection(buffer, self.node.args[1])


def _find_join(count: int) -> _Join | None:
    """Find the join that uses the first ``count`` outputs of the node being lowered, or return None."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    node: Any = V.graph.current_node
    outs = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    users = list(outs[0].users) if 0 in outs else []
    if len(users) != 1 or users[0].target is not ops.join.default:
        return None
    join: Any = users[0]
    join.meta.pop(_JOIN_STATE, None)
    grads, num_key_heads = join.args
    is_only_use = all(i in outs and grads[i] is outs[i] and list(outs[i].users) == [join] for i in range(count))
    value = join.meta["val"]
    is_static = all(isinstance(size, int) for size in value.shape) and isinstance(num_key_heads, int | None)
    if count < 2 or not is_only_use or not is_static or any(g.meta["val"].dtype != value.dtype for g in grads):
        return None
    v_gradient = V.graph.env.get(grads[2]) if count == 2 and grads[2].meta["val"].dtype == value.dtype else None
    v_gradient = v_gradient if v_gradient is not None and ir.is_storage_and_layout(v_gradient) else None
    return _Join(join, count, tuple(value.shape), value.dtype, v_gradient)


def _lower_join(grads: Sequence[Any], num_key_heads: int | None) -> Any:
    """Lower the join, copying each gradient that is not in place yet."""
    from torch._inductor.virtualized import V

    join_state = V.graph.current_node.meta.pop(_JOIN_STATE, None)
    if join_state is None:
        rows = [_find_lowering("permute")(g, [0, 2, 1, 3]) for g in grads]
        if num_key_heads is None:
            rows = [_find_lowering("unsqueeze")(row, 2) for row in rows]
        return _find_lowering("cat")(rows, 2)
    buffer, count = join_state
    sizes = [_read_number(n) for n in buffer.get_size()]
    views = split_projection(torch.empty(sizes, device="meta"), num_key_heads)
    for view, grad in list(zip(views, grads, strict=True))[count:]:
        _find_lowering("copy_")(_view_as(buffer, view), grad)
    return buffer


# --- tensors of the compiler -----------------------------------------------------------------------------------------


def _realize(box: Any) -> Any:
    """Make Inductor store a tensor in memory, and fix its strides."""
    from torch._inductor import ir

    box = ir.ExternKernel.realize_input(box)
    box.freeze_layout()
    return box


def _is_aligned(box: Any) -> bool:
    """Return whether a tensor is 16-byte aligned. Inductor copies inputs that turn out to be unaligned."""
    from torch._inductor.virtualized import V

    name = box.get_name()
    if name in V.graph.unaligned_buffers or name in V.graph.constants:
        return False
    return _read_number(box.get_layout().offset) * box.get_dtype().itemsize % 16 == 0


def _find_predecessors(inputs: _Inputs) -> set[str]:
    """Return the names of buffers that must exist before the outputs are allocated.

    These are the inputs. If all of them are inputs of the whole graph, also add the tensors that the outputs are first
    used with. One example is the incoming gradient, if an encoding is recomputed for attention's backward.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    names = {box.get_name() for box, _ in inputs.boxes.values()}
    if not names <= V.graph.graph_inputs.keys():
        return names
    derived_nodes = {V.graph.current_node}
    queue: list[Any] = list(V.graph.current_node.users)
    while queue:
        user = queue.pop()
        other_nodes = [node for node in user.all_input_nodes if node not in derived_nodes]
        if not other_nodes and user not in derived_nodes:  # depends only on our outputs, for example a view
            derived_nodes.add(user)
            queue += user.users
        for node in other_nodes:
            while node not in V.graph.env and len(node.all_input_nodes) == 1:  # e.g. a view, not lowered yet
                (node,) = node.all_input_nodes
            box = V.graph.env.get(node)
            if isinstance(box, ir.TensorBox):
                names |= {box.get_name()} if ir.is_storage_and_layout(box) else box.get_read_names()
    return names


def _allocate(like: Tensor, device: torch.device | None, predecessors: set[str]) -> Any:
    """Allocate an output once the buffers ``predecessors`` exist.

    Inductor searches for the order with the least memory. It assumes that a storage shared by several inputs is freed
    with each of them. So it may move an allocation that depends on nothing, or only on saved tensors, before all
    layers. That can use up all the memory that recomputing an encoding saves.
    """
    from torch._inductor.virtualized import V

    box = _find_lowering("empty_strided")(list(like.shape), list(like.stride()), dtype=like.dtype, device=device)
    V.graph.additional_star_deps[box.data.data.get_operation_name()].update(sorted(predecessors))
    return box


def _view_as(box: Any, t: Tensor) -> Any:
    return _find_lowering("as_strided")(box, t.shape, t.stride(), t.storage_offset())


def _find_lowering(name: str) -> Any:
    from torch._inductor.lowering import lowerings

    return lowerings[getattr(torch.ops.aten, name).default]


@cache
def _node_type() -> Any:
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    from ..kernels.fixed import Launcher

    class Launch(ir.UserDefinedTritonKernel):
        """A launch of one of our kernels.

        We declare which tensors are written. Inductor's own analysis would also include x, because kernels pass
        pointers to x and to the outputs in one tuple.
        """

        def __init__(
            self, fixed_kernel: Any, launch: KernelLaunch, arguments: dict[str, Any], written_boxes: Sequence[Any]
        ) -> None:
            values = {name: self._place(value) for name, value in arguments.items()}
            inputs = [value for value in values.values() if isinstance(value, ir.IRNode)]
            constants = tuple(value for value in values.values() if not isinstance(value, ir.IRNode))
            device = inputs[0].get_device()
            ir.ExternKernel.__init__(self, None, ir.NoneLayout(device=device), inputs, constants, values)
            options = dict(launch.options)
            self.fixed_kernel, self.launch = fixed_kernel, launch
            config = triton.Config({}, num_warps=options.pop("num_warps", 4))
            tuned_kernel: Any = triton.autotune(configs=[config], key=[])(fixed_kernel.kernel)
            self.kernel_idx = kernel_side_table.add_kernel(tuned_kernel)
            self.grid = [(launch.programs + fixed_kernel.programs, 1, 1)]
            self.device = device
            self.launch_kwargs = tuple(options)  # used since torch 2.15; earlier compilers accept no other options
            self.kwargs |= options if _takes_options() else {}
            self.ordered_kwargs_for_cpp_kernel = list(arguments)
            self.mutable_args = list(written_boxes)
            self.mutation_outputs = [
                ir.MutationOutput(ir.NoneLayout(device=device), box, self) for box in written_boxes
            ]
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            if not _needs_launcher(self.launch):
                with _define_fixed(wrapper, by_torch=not V.graph.cpp_wrapper):
                    return super().codegen(wrapper)
            name, num_tensors = self.launch.kernel.fn.__name__, len(self.inputs)
            constants = self.fixed_kernel.numbers, self.fixed_kernel.types, self.launch.variant
            kernel_source = name, num_tensors, self.fixed_kernel.arguments, self.fixed_kernel.branch
            values = *kernel_source, constants, self.launch.programs + self.fixed_kernel.programs, self.launch.options
            launcher = f"fixed_{name}_launcher_{wrapper.next_kernel_suffix()}"
            launcher_source = f"__import__({Launcher.__module__!r}, fromlist=['_']).Launcher{values!r}"
            wrapper.define_kernel(launcher, launcher_source)
            wrapper.writeline(f"{launcher}({', '.join(box.codegen_reference() for box in self.inputs)})")

        def _place(self, value: Any) -> Any:
            if not isinstance(value, ir.IRNode):
                return value
            return self.unwrap_storage_for_input(self.realize_input(value))

        def can_fuse_epilogue(self) -> bool:
            return False

    return Launch


@contextmanager
def _define_fixed(wrapper: Any, by_torch: bool) -> Iterator[None]:
    """Define kernels with COMPILER_OPTIONS, which Inductor ignores if it has no ``launch_kwargs``.

    by_torch: launch them with Inductor's C++ launcher, like its own kernels. For user kernels, which may be autotuned,
    Inductor uses Triton's launcher, which takes twice as long and passes our constants at each launch. Our kernels have
    just one configuration, so they don't need it.
    """
    define = wrapper.define_kernel

    def define_fixed(name: str, body: str, *args: Any, **kwargs: Any) -> Any:
        source, separator, tail = body.rpartition("''', device_str")
        if not _takes_options():
            source = source.replace("triton_meta={", f"triton_meta={{{str(COMPILER_OPTIONS)[1:-1]}, ", 1)
        kernel_match = re.search(r"@triton_heuristics.*?^def (\w+)", source, re.DOTALL | re.MULTILINE)
        heuristic = ""
        if kernel_match is not None and by_torch:
            heuristic = f"{kernel_match[1]}.heuristic_type = triton_heuristics.HeuristicType.FIXED\n"
        return define(name, source + heuristic + separator + tail, *args, **kwargs)

    wrapper.define_kernel = define_fixed
    try:
        yield
    finally:
        del wrapper.define_kernel


@cache
def _takes_options() -> bool:
    import inspect

    from torch._inductor import ir

    return "launch_kwargs" in inspect.signature(ir.UserDefinedTritonKernel.__init__).parameters
