"""Wrap private names of torch, which may change without notice. lowering.py uses those of torch's compiler.

``READ_FROM`` maps each name to the torch version in which we looked it up, and includes the names in lowering.py,
core/recording.py and the integrations, but not attributes of objects. A test reports names that torch has removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

_V211, _V214 = "2.11", "2.14"
READ_FROM: dict[str, str] = {
    "torch._C._are_functorch_transforms_active": _V211,
    "torch._C._functorch.is_legacy_batchedtensor": _V211,
    "torch._C._is_tracing": _V211,
    "torch._C._len_torch_dispatch_stack": _V211,
    "torch._C._dispatch_tls_local_exclude_set": _V211,
    "torch._C._dispatch_tls_local_include_set": _V211,
    "torch._C._ForceDispatchKeyGuard": _V211,
    "torch._C.DispatchKey": _V211,
    "torch._assert_async": _V211,
    "torch._foreach_copy_": _V211,
    "torch.autograd.forward_ad._current_level": _V211,
    "torch.compiler._is_exporting_flag": _V211,
    "torch.fx.experimental.symbolic_shapes.has_static_value": _V211,
    "torch.utils._python_dispatch.TorchDispatchMode": _V211,
    "torch.utils._pytree.tree_map_only": _V211,
    "torch._higher_order_ops.triton_kernel_wrap.kernel_side_table": _V214,
    "torch._inductor.ir.ExternKernel": _V214,
    "torch._inductor.ir.IRNode": _V214,
    "torch._inductor.ir.MutationOutput": _V214,
    "torch._inductor.ir.NoneLayout": _V214,
    "torch._inductor.ir.TensorBox": _V214,
    "torch._inductor.ir.UserDefinedTritonKernel": _V214,
    "torch._inductor.ir.is_storage_and_layout": _V214,
    "torch._inductor.lowering.fallback_handler": _V214,
    "torch._inductor.lowering.lowerings": _V214,
    "torch._inductor.lowering.register_lowering": _V214,
    "torch._inductor.virtualized.V": _V214,
    "torch._subclasses.fake_tensor.unset_fake_temporarily": _V214,
    "torch._C._autograd._saved_tensors_hooks_is_enabled": _V214,
    "torch._C._autograd._top_saved_tensors_default_hooks": _V214,
    "torch._C._current_graph_task_id": _V214,
    "torch._ops.OpOverload": _V214,
    "torch.autograd.Variable._execution_engine": _V214,
    "torch.nn.modules.module._global_backward_hooks": _V214,
    "torch.nn.modules.module._global_backward_pre_hooks": _V214,
    "torch.nn.modules.module._global_forward_hooks": _V214,
    "torch.nn.modules.module._global_forward_pre_hooks": _V214,
}

are_transforms_active = torch._C._are_functorch_transforms_active
assert_async: Any = torch._assert_async  # pyright: ignore[reportPrivateImportUsage]
copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
is_legacy_batched = is_legacy_batchedtensor
is_tracing = torch._C._is_tracing
num_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_transforming() -> bool:
    """Return whether a torch.func transform or a dual level is active."""
    return are_transforms_active() or forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Return whether torch.export is tracing.

    In torch 2.11, torch's own is_exporting() is also true under torch.compile.
    """
    return torch.compiler._is_exporting_flag


def has_static_value(size: Any) -> bool:
    """Return whether the value of a size is known at compile time."""
    # This import takes longer than importing this whole library, because it also imports sympy.
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.has_static_value(size)


def get_storage_id(t: Tensor) -> int:
    """Return an id of a tensor's storage. All views share the id, which is unique while the storage exists."""
    return t.untyped_storage()._cdata


def find_backward(function: Any) -> Any:
    """Return the class of the nodes that an autograd.Function creates in the autograd graph."""
    return function._backward_cls


@contextmanager
def enable_recording() -> Iterator[None]:
    """Enable autograd inside an operator's kernel, where the dispatcher has disabled it."""
    exclude: Any = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include: Any = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield
