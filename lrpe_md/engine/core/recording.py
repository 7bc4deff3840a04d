"""Launch kernels, or record the launches for a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..inductor.private import storage_of
from .call import Variant

__all__ = ["COMPILER_OPTIONS", "Record", "Start", "UnrecordableError", "is_recording", "record", "start"]

# Compilers may fuse a product and a sum into an fma, depending on the code around them. Without this, all kernels
# compute the formula with the same rounding.
COMPILER_OPTIONS = {"enable_fp_fusion": False}


class Start(NamedTuple):
    """A launch of a kernel."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]  # before V: tensors, numbers, None, and tuples of these
    variant: Variant
    options: dict[str, Any]  # of Triton's compiler


class Record(NamedTuple):
    """Launches and allocations of a launcher that runs on meta tensors."""

    starts: list[Start]  # in their order
    allocated: dict[int, Tensor]  # by storage


class UnrecordableError(Exception):
    """Raised if a launcher runs a tensor operation other than an allocation or a view."""


_current: ContextVar[Record | None] = ContextVar("current", default=None)


def start(kernel: Any, programs: int, args: tuple[Any, ...], variant: Variant, options: dict[str, Any]) -> Any:
    """Launch a kernel, or only record the launch while :func:`record` is active."""
    current = _current.get()
    if current is None:
        return kernel[(programs,)](*args, V=variant, **COMPILER_OPTIONS, **options)
    current.starts.append(Start(kernel, programs, args, variant, {**COMPILER_OPTIONS, **options}))
    return None


def is_recording() -> bool:
    return _current.get() is not None


@contextmanager
def record() -> Iterator[Record]:
    """Record launches, and allocations on the meta device, inside this context."""
    found = Record([], {})
    token = _current.set(found)
    try:
        with _Watch(found.allocated):
            yield found
    finally:
        _current.reset(token)


_ALLOCATIONS = {"aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


class _Watch(TorchDispatchMode):
    """Dispatch mode that records allocations of meta tensors, and allows only views of them otherwise."""

    def __init__(self, allocated: dict[int, Tensor]) -> None:
        super().__init__()
        self.allocated = allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_meta:
            if func.name() in _ALLOCATIONS:
                self.allocated[storage_of(out)] = out
            elif not func.is_view:
                raise UnrecordableError(func.name())
        return out
