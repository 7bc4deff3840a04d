"""Base class of the operators in :mod:`lrpe_md.engine.encode.operator` and :mod:`lrpe_md.engine.linear.operator`.

The kernels support only first-order reverse mode. Function transforms, dual numbers and double backward passes run the
reference. Plain eager tensors go directly to the launcher. Compilers, tensor subclasses and dispatch modes see the
registered operators ``lrpe_md::forward`` and ``lrpe_md::backward``, or ``linear_forward`` and ``linear_backward``.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix, ops
from ...checks import show_value, warn_caller
from ...positions.grid import Grid
from ..inductor.lowering import SOURCE, register
from ..inductor.private import enable_recording, is_legacy_batched, is_tracing, is_transforming, num_dispatch_modes
from .call import Impl
from .memory import like_in_memory
from .projection import find_split

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
IMPLS = get_args(Impl)


# --- tensors -----------------------------------------------------------------------------------------------------


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether all tensors are plain tensors or parameters, and no dispatch mode is active."""
    if num_dispatch_modes():
        return False
    for t in tensors:
        kind = type(t)
        if t is not None and kind is not Tensor and kind is not torch.nn.Parameter:
            return False
    return True


def is_direct(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether the launcher may be called directly, bypassing PyTorch's dispatcher."""
    return not (torch.compiler.is_compiling() or is_tracing()) and is_plain(tensors)


def is_sharded(*tensors: Tensor | None) -> bool:
    """Return whether any tensor is a DTensor, without importing ``torch.distributed``."""
    return any(hasattr(t, "placements") for t in tensors)


# --- the cache of validated calls --------------------------------------------------------------------------------

_MOST_CALLS = 4096
call_cache: dict[Hashable, Any] = {}
AnyCall = TypeVar("AnyCall")


def cache_call(key: Hashable, call: AnyCall) -> AnyCall:
    """Cache a validated call, without its tensors, for later calls with the same key."""
    if len(call_cache) >= _MOST_CALLS:
        call_cache.clear()
    call_cache[key] = call
    return call


def make_key(positions: Any, tensors: Iterable[Any]) -> tuple[Any, ...] | None:
    """Make a cache key from positions (a Grid or other constants) and the shapes, dtypes and devices of tensors.

    Return None if any of the tensors isn't dense. Also return None if the grid has a scale or shift, because validation
    then creates new tensors.
    """
    fields: list[Any] = [positions]
    if type(positions) is Grid:
        if positions.scale is not None or positions.shift is not None:
            return None
        fields = [positions.shape, positions.prefix, positions.suffix, positions.start, positions.length]
        origin = positions.origin
        if origin is not None:
            fields += (origin.shape, origin.dtype, origin.device)
    for t in tensors:
        if t is None:
            fields.append(None)
        elif not isinstance(t, Tensor) or t.is_nested or t.layout is not torch.strided:
            return None
        else:
            fields += (t.shape, t.dtype, t.device)
    return tuple(fields)


# --- kernels or reference ----------------------------------------------------------------------------------------


def check_impl(impl: Any) -> None:
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {show_value(impl)}")


def use_triton(impl: str, x: Tensor, constants: Iterable[Tensor | None]) -> bool:
    """Return whether ``impl`` and the inputs select the kernels.

    ``constants`` are tensors for which the kernels don't compute gradients.
    """
    if impl not in IMPLS:
        check_impl(impl)
    if impl == "reference":
        return False
    is_required = impl == "triton"
    if not x.is_cuda and not (is_required and INTERPRETING and not x.is_meta):
        if is_required:
            raise ValueError(
                f"impl: 'triton' needs tensors on a GPU (or TRITON_INTERPRET=1 set before Python starts), got "
                f"{x.device}; use impl='auto' or 'reference'"
            )
        return False
    if not HAS_TRITON:
        if is_required:
            raise ValueError("impl: 'triton' needs the triton package, which is not installed; use impl='reference'")
        warn_caller("lrpe_md: triton is not installed, so the slower reference runs on this GPU", RuntimeWarning)
        return False
    if torch.is_grad_enabled():
        for t in constants:
            if t is not None and t.requires_grad:
                if is_required:
                    raise ValueError(
                        "positions, amplitude: the kernels don't compute gradients of coords, scale, shift or "
                        "amplitude; use impl='auto' or detach them"
                    )
                return False
    if is_transforming():
        if is_required:
            raise ValueError(
                "impl: 'triton' supports only first-order reverse-mode differentiation, but a torch.func transform or "
                "a dual number is active; use impl='auto'"
            )
        return False
    if INTERPRETING and not torch.compiler.is_compiling():
        warn_of_interpreter()
    return True


@cache
def warn_of_interpreter() -> None:
    """Warn once if the interpreter of the installed Triton is less accurate than a GPU."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        warn_caller(
            f"lrpe_md: the interpreter of Triton {triton.__version__} (TRITON_INTERPRET=1) rounds a fused multiply-add "
            "twice, so angles are off by up to 1e-4; use Triton 3.9 or later, or impl='reference'",
            RuntimeWarning,
        )


# --- schemas -----------------------------------------------------------------------------------------------------

_TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", Any: "Tensor?", int: "int", str: "str", tuple[int, ...]: "int[]",
    float: "float", bool: "bool",
}  # fmt: skip


class Part(NamedTuple):
    """A NamedTuple whose fields are separate arguments of a registered operator."""

    kind: Any
    prefix: str = ""  # prefix of the names of the arguments
    integer: str = "int"  # or "SymInt" for sizes that may be unknown to a compiler

    def declare(self) -> str:
        """Return the declarations of the arguments for an operator's schema."""
        hints = get_type_hints(self.kind)
        types = [(name, "str" if get_origin(hints[name]) is Literal else _TYPES[hints[name]]) for name in hints]
        return ", ".join(f"{kind.replace('int', self.integer)} {self.prefix}{name}" for name, kind in types)

    def take(self, values: Iterator[Any]) -> Any:
        """Build the NamedTuple from the next arguments."""
        values_of_fields = (next(values) for _ in self.kind._fields)
        return self.kind(*(tuple(value) if isinstance(value, (list, tuple)) else value for value in values_of_fields))


# --- the operator ------------------------------------------------------------------------------------------------

library = torch.library.Library(ops.name, "FRAGMENT")
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides


class Operator(ABC):
    """Forward and backward operators with their kernels, reference, fake implementations and derivatives.

    The first inputs are the rows: x, or q and k, or q, k and v. A call is a NamedTuple with all other arguments. The
    backward operator returns the gradients of the rows, followed by those of the learned tensors that need one, in the
    order of :meth:`list_learned`.
    """

    num_rows = 0  # number of inputs that are rows, which come first; 0 means all
    launcher_key: Callable[[Any], str] = staticmethod(attrgetter("spec.norm_over"))  # key of a call's launcher

    def __init__(self, prefix: str, inputs: tuple[str, ...], parts: tuple[Part, ...], options: Any, needs: Any) -> None:
        """Register the operators ``{prefix}forward`` and ``{prefix}backward``.

        ``inputs`` declares the inputs and, at the end, the tensors saved for the backward pass. ``options`` (or None)
        and ``needs`` are NamedTuple classes. Their fields select what a forward pass returns in addition to the
        outputs, and which gradients of learned tensors a backward pass computes.
        """
        *input_arguments, saved_argument = inputs
        self.prefix, self.parts, self.num_inputs = prefix, parts, len(input_arguments)
        self.launchers: dict[str, Any] = {}  # keyed by launcher_key
        self.needs, self.num_options = needs, len(options._fields) if options else 0
        call = [part.declare() for part in parts]
        forward = [*input_arguments, *call, *([Part(options).declare()] if options else [])]
        backward = ["Tensor[] grads", *input_arguments, saved_argument, *call, Part(needs, "need_").declare()]
        self.forward_op = self._register(
            f"{prefix}forward", forward, self.run_forward, self._run_reference_forward, self._fake_forward
        )
        self.backward_op = self._register(
            f"{prefix}backward", backward, self.run_backward, self._run_reference_backward, self._fake_backward
        )

    def _register(self, name: str, arguments: list[str], kernels: Any, reference: Any, fake: Any) -> Any:
        library.define(f"{name}({', '.join(arguments)}, str source='') -> Tensor[]", tags=_TAGS)
        library.impl(name, kernels, "CUDA")
        library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(add_op_namespace_prefix(name), fake, lib=library)
        return getattr(ops, name)

    # --- defined by each operator

    @abstractmethod
    def import_launcher(self, call: Any) -> Any:
        """Import the launcher module on first use, because the module imports triton."""

    @abstractmethod
    def split(self, call: Any) -> tuple[Any, ...]:
        """Split a call into its parts."""

    @abstractmethod
    def join(self, values: Sequence[Any]) -> Any:
        """Build a call from its parts."""

    @abstractmethod
    def read_inputs(self, values: Sequence[Any]) -> Any:
        """Build the inputs from an operator's first arguments."""

    @abstractmethod
    def write_inputs(self, inputs: Any) -> tuple[Any, ...]:
        """Convert the inputs back to an operator's first arguments."""

    @abstractmethod
    def list_learned(self, call: Any, inputs: Any) -> tuple[Tensor | None, ...]:
        """Return the tensors that may need a gradient, except the rows."""

    @abstractmethod
    def list_constants(self, call: Any) -> tuple[Tensor | None, ...]:
        """Return the tensors of a call for which the kernels don't compute gradients."""

    @abstractmethod
    def replace(
        self, call: Any, inputs: Any, rows: Sequence[Tensor], learned: Sequence[Tensor | None]
    ) -> tuple[Any, Any]:
        """Return the call and its inputs with the rows and learned tensors replaced."""

    @abstractmethod
    def read_needs(self, needs_gradients: Sequence[bool]) -> Any:
        """Build a ``needs`` tuple from flags that say whether each learned tensor needs a gradient."""

    @abstractmethod
    def list_needs(self, needs: Any, call: Any, inputs: Any) -> tuple[bool, ...]:
        """Return whether each learned tensor needs a gradient."""

    @abstractmethod
    def run_reference(self, call: Any, inputs: Any) -> tuple[Tensor, ...]:
        """Run the reference, which is differentiable to any order."""

    @abstractmethod
    def run_reference_forward(self, call: Any, inputs: Any, options: Sequence[Any]) -> list[Tensor]:
        """Use the reference to compute the results of the forward operator."""

    @abstractmethod
    def fake_forward(self, call: Any, inputs: Any, options: Sequence[Any]) -> list[Tensor]:
        """Return empty tensors with the sizes, strides and dtypes of the forward pass's results."""

    @abstractmethod
    def shape_gradients(self, call: Any, inputs: Any, grads: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        """Return a pair for each row gradient: a tensor with the same memory order, and the gradient's width."""

    @abstractmethod
    def pack_saved(self, call: Any, inputs: Any, needs_gradients: Sequence[bool]) -> tuple[tuple[Any, ...], Any]:
        """Return the tensors to save for the needed gradients, and the call's other values."""

    @abstractmethod
    def unpack_saved(self, rest: Any, tensors: Sequence[Any]) -> tuple[Any, Any, Sequence[Tensor]]:
        """Return the call, the inputs and any further saved tensors, given the result of :meth:`pack_saved`."""

    @abstractmethod
    def run_shards(self, run: Callable[..., Any], call: Any, inputs: Any, options: Any) -> tuple[Tensor, ...]:
        """Run a call on DTensors, by calling ``run`` on the local shards."""

    def keep_for_backward(self, call: Any, inputs: Any, options: Any, direct: bool) -> tuple[Any, int]:
        """Return the options for a forward pass that autograd records, and the number of results for the user."""
        raise NotImplementedError("operators with options must override keep_for_backward")

    # --- a call, from the choice of the path to a launch

    def run(
        self, call: Any, inputs: Any, impl: str, direct: bool, options: Any = (), constants: Any = None
    ) -> tuple[Tensor, ...]:
        """Run a validated call with the kernels or the reference, on whole tensors or on shards.

        ``direct`` is the result of :func:`is_direct` for the rows and the learned tensors. ``constants`` is the result
        of :meth:`list_constants`, if the caller already has these tensors.
        """
        rows, learned = inputs[: self.num_rows or None], self.list_learned(call, inputs)
        constants = self.list_constants(call) if constants is None else constants
        if not direct and is_sharded(*rows, *learned, *constants):

            def run(call: Any, inputs: Any, options: Any) -> tuple[Tensor, ...]:
                tensors = (*inputs[: self.num_rows or None], *self.list_learned(call, inputs))
                return self.run(call, inputs, impl, is_direct(tensors), options)

            return self.run_shards(run, call, inputs, options)
        if not use_triton(impl, rows[0], constants):
            return self.run_reference(call, inputs)
        return self.run_kernels(call, inputs, learned, direct and is_plain(constants), options)

    def run_kernels(
        self, call: Any, inputs: Any, learned: tuple[Tensor | None, ...], direct: bool, options: Any = ()
    ) -> tuple[Tensor, ...]:
        """Run the kernels, under autograd if needed. The reference computes higher derivatives."""
        rows = inputs[: self.num_rows or None]
        if torch.is_grad_enabled():
            tensors = (*rows, *learned)
            for t in tensors:
                if t is not None and t.requires_grad:
                    if torch.compiler.is_compiling():
                        tensors = separate(tensors)
                    return _Run.apply((self, call, inputs, options, direct), *tensors)
        out = self.forward(call, inputs, options, direct)
        return tuple(out[: len(rows)] if call.spec.dim == -2 else out)  # without softmax statistics

    def launcher(self, call: Any) -> Any:
        """Return the launcher module of a call."""
        key = self.launcher_key(call)
        module = self.launchers.get(key)
        if module is None:
            module = self.launchers[key] = self.import_launcher(call)
        return module

    def forward(self, call: Any, inputs: Any, options: Any, direct: bool) -> list[Tensor]:
        """Return the outputs, and any further tensors that the backward pass needs."""
        if direct:
            return self.launcher(call).forward(call, inputs, *options)
        return self.forward_op(*self.write_inputs(inputs), *self.flatten(call), *options, SOURCE)

    def launch_backward(
        self,
        call: Any,
        grads: Sequence[Tensor],
        inputs: Any,
        saved: Sequence[Tensor],
        needs: Any,
        outs: Sequence[Tensor],
    ) -> list[Tensor]:
        """Run the kernels of a backward pass. If ``outs`` is passed, write the gradients of the rows to it."""
        return self.launcher(call).backward(call, grads, inputs, saved, needs, outs)

    def backward(
        self,
        call: Any,
        grads: Sequence[Tensor],
        inputs: Any,
        saved: Sequence[Tensor],
        needs: Any,
        direct: bool,
        outs: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Return the gradients.

        If ``direct`` is set and ``outs`` is passed, write the gradients of the rows to ``outs``.
        """
        if direct:
            return self.launch_backward(call, grads, inputs, saved, needs, outs)
        input_arguments, call = self.write_inputs(inputs), self.flatten(call)
        return self.backward_op(list(grads), *input_arguments, list(saved), *call, *needs, SOURCE)

    def differentiate(
        self, call: Any, inputs: Any, grads: Sequence[Tensor], needs: Any, create_graph: bool = False
    ) -> list[Tensor]:
        """Compute the gradients with the reference.

        The reference runs on views of the saved tensors. If it ran on the saved tensors themselves, autograd would
        continue into the graph that computed them, for example if k was computed from q.
        """
        leaves: list[Tensor] = []

        def make_leaf(t: Tensor) -> Tensor:
            leaves.append(t.view_as(t) if create_graph and t.requires_grad else t.detach().requires_grad_())
            return leaves[-1]

        with torch.enable_grad():
            # If the map is linear in x, the gradients don't depend on x. So x wasn't saved, and any values will do.
            rows = inputs[: self.num_rows or None] or [
                like.new_zeros((*like.shape[:3], width)) for like, width in self.shape_gradients(call, inputs, grads)
            ]
            rows = [make_leaf(t) for t in rows]
            learned = zip(self.list_learned(call, inputs), self.list_needs(needs, call, inputs), strict=True)
            learned = [make_leaf(t) if t is not None and is_needed else t for t, is_needed in learned]
            outputs = self.run_reference(*self.replace(call, inputs, rows, learned))
            pairs = [(t, g) for t, g in zip(outputs, grads, strict=False) if t.requires_grad]
            return list(
                torch.autograd.grad(
                    [t for t, _ in pairs], leaves, [g for _, g in pairs],
                    create_graph=create_graph, allow_unused=True, materialize_grads=True,
                )
            )  # fmt: skip

    # --- arguments of the registered operators

    def flatten(self, call: Any) -> tuple[Any, ...]:
        """Convert a call to a flat tuple of operator arguments."""
        return tuple(list(value) if isinstance(value, tuple) else value for part in self.split(call) for value in part)

    def unflatten(self, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """Convert operator arguments back to a call, and return it with the remaining arguments."""
        values = iter(args)
        return self.join([part.take(values) for part in self.parts]), tuple(values)

    def _read_forward(self, args: Sequence[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
        call, rest = self.unflatten(args[self.num_inputs :])
        return call, self.read_inputs(args[: self.num_inputs]), rest[: self.num_options]

    def _read_backward(self, args: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        call, rest = self.unflatten(args[self.num_inputs + 1 :])
        needs = self.needs(*rest[: len(self.needs._fields)])
        return call, self.read_inputs(args[: self.num_inputs]), args[self.num_inputs], needs

    def run_forward(self, *args: Any) -> list[Tensor]:
        """Run the launcher on the arguments of the forward operator."""
        call, inputs, options = self._read_forward(args)
        return self.launcher(call).forward(call, inputs, *options)

    def run_backward(self, grads: list[Tensor], *args: Any, outs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Run the launcher on the arguments of the backward operator."""
        call, inputs, saved, needs = self._read_backward(args)
        return self.launch_backward(call, grads, inputs, saved, needs, outs)

    def _run_reference_forward(self, *args: Any) -> list[Tensor]:
        with torch.no_grad():
            return self.run_reference_forward(*self._read_forward(args))

    def _run_reference_backward(self, grads: list[Tensor], *args: Any) -> list[Tensor]:
        call, inputs, _, needs = self._read_backward(args)
        return self.run_reference_backward(call, grads, inputs, needs)

    def run_reference_backward(self, call: Any, grads: Sequence[Tensor], inputs: Any, needs: Any) -> list[Tensor]:
        """Use the reference to compute the results of the backward operator."""
        with enable_recording():
            gradients = self.differentiate(call, inputs, grads, needs)
        shapes = self.shape_gradients(call, inputs, grads)
        rows = [like_in_memory(like, width).copy_(t) for (like, width), t in zip(shapes, gradients, strict=False)]
        return rows + [t.detach().clone(memory_format=torch.contiguous_format) for t in gradients[len(rows) :]]

    def _fake_forward(self, *args: Any) -> list[Tensor]:
        register(self)
        return self.fake_forward(*self._read_forward(args))

    def _fake_backward(self, grads: list[Tensor], *args: Any) -> list[Tensor]:
        register(self)
        call, inputs, _, needs = self._read_backward(args)
        out = [like_in_memory(like, width) for like, width in self.shape_gradients(call, inputs, grads)]
        for t, is_needed in zip(self.list_learned(call, inputs), self.list_needs(needs, call, inputs), strict=True):
            if t is not None and is_needed:
                out.append(torch.empty_like(t, memory_format=torch.contiguous_format))
        return out


def separate(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Replace repeated tensors with views, because Dynamo accepts each tensor only once."""
    distinct_tensors: list[Tensor | None] = []
    for i, t in enumerate(tensors):
        for other in tensors[:i]:
            if t is not None and t is other:
                t = t.view_as(t)
        distinct_tensors.append(t)
    return tuple(distinct_tensors)


class _Run(torch.autograd.Function):
    """Autograd function whose tensor arguments are the rows and the learned tensors.

    ``settings`` are the operator, the call, its inputs, and the options and ``direct`` of its forward pass.
    """

    @staticmethod
    def forward(ctx, settings, *tensors):
        operator, call, inputs, options, direct = settings
        num_rows = num_outputs = operator.num_rows or len(inputs)
        if options:
            options, num_outputs = operator.keep_for_backward(call, inputs, options, direct)
        out = operator.forward(call, inputs, options, direct)
        saved, rest = operator.pack_saved(call, inputs, ctx.needs_input_grad[1 + num_rows :])
        ctx.save_for_backward(*saved, *out[num_outputs:])
        ctx.args = operator, num_rows, rest, direct
        ctx.split = find_split(tensors[:num_rows]) if direct else None
        return tuple(out[:num_outputs])

    @staticmethod
    def backward(ctx, *grads):
        operator, num_rows, rest, direct = ctx.args
        call, inputs, saved = operator.unpack_saved(rest, ctx.saved_tensors)
        needs = operator.read_needs(ctx.needs_input_grad[1 + num_rows :])
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():  # create_graph: a double backward
            gradients = operator.differentiate(call, inputs, grads, needs, create_graph=True)
        elif not compiling and (is_transforming() or any(is_legacy_batched(g) for g in grads)):
            # A function transform began after the forward pass: gradients are dual numbers, or batched
            # (is_grads_batched).
            gradients = operator.differentiate(call, inputs, grads, needs)
        else:
            direct = direct and is_plain(grads)
            outs = ctx.split.allocate(grads[0], num_rows) if direct and ctx.split is not None else ()
            gradients = operator.backward(call, grads, inputs, saved, needs, direct, outs)
        gradients = iter(gradients)
        dtensors = [next(gradients) for _ in range(num_rows)]
        for t, is_needed in zip(
            operator.list_learned(call, inputs), operator.list_needs(needs, call, inputs), strict=True
        ):
            dtensors.append(next(gradients) if is_needed and t is not None else None)
        return None, *dtensors
