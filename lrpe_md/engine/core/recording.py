"""Launch kernels, or record the launches for a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..inductor.private import get_storage_id
from .call import Variant

# Compilers may fuse a product and a sum into an fma, depending on the surrounding code. Without fusion, the same
# formula is rounded identically in all kernels.
COMPILER_OPTIONS = {"enable_fp_fusion": False}


class KernelLaunch(NamedTuple):
    """A recorded kernel launch."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]  # arguments before V: tensors, numbers, None, and tuples of these
    variant: Variant
    options: dict[str, Any]  # options for Triton's compiler


class Record(NamedTuple):
    """Launches and allocations that a launcher made on meta tensors."""

    launches: list[KernelLaunch]  # in the order of the launches
    allocations: dict[int, Tensor]  # keyed by storage


class UnrecordableError(Exception):
    """Raised if a launcher runs a tensor operation other than an allocation or a view."""


_launches: ContextVar[list[KernelLaunch] | None] = ContextVar("launches", default=None)
_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)


def launch_kernel(kernel: Any, programs: int, args: tuple[Any, ...], variant: Variant, options: dict[str, Any]) -> Any:
    """Launch a kernel, or only record the launch while :func:`record` or :func:`compile_together` is active."""
    launches = _launches.get()
    if launches is None:
        return kernel[(programs,)](*args, V=variant, **COMPILER_OPTIONS, **options)
    launches.append(KernelLaunch(kernel, programs, args, variant, {**COMPILER_OPTIONS, **options}))
    return None


def is_recording() -> bool:
    return _is_recording.get()


@contextmanager
def collect_launches() -> Iterator[list[KernelLaunch]]:
    """List the launches inside this context instead of running them."""
    launches: list[KernelLaunch] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


@contextmanager
def compile_together(device: torch.device) -> Iterator[None]:
    """Launch no kernels inside this context, but compile them at the end, all at the same time.

    Compilers run mostly without Python's lock, so threads are enough. If a kernel can't be compiled, its next launch
    raises the error.
    """
    with collect_launches() as launches:
        yield

    def compile_kernel(launch: KernelLaunch) -> Any:
        with torch.cuda.device(device):
            compiled = launch.kernel.warmup(*launch.args, V=launch.variant, grid=(launch.programs,), **launch.options)
            return compiled[launch.programs, 1, 1]  # also builds the function that launches the kernel

    with ThreadPoolExecutor() as threads:
        for launch in {(launch.kernel, launch.variant): launch for launch in launches}.values():
            threads.submit(compile_kernel, launch)


@contextmanager
def record() -> Iterator[Record]:
    """Record launches and allocations of meta tensors inside this context."""
    allocations: dict[int, Tensor] = {}
    token = _is_recording.set(True)
    try:
        with collect_launches() as launches, _AllocationRecorder(allocations):
            yield Record(launches, allocations)
    finally:
        _is_recording.reset(token)


_ALLOCATIONS = {"aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


class _AllocationRecorder(TorchDispatchMode):
    """Dispatch mode that records allocations of meta tensors. The only other operations it allows are views."""

    def __init__(self, allocated: dict[int, Tensor]) -> None:
        super().__init__()
        self.allocations = allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_meta:
            if func.name() in _ALLOCATIONS:
                self.allocations[get_storage_id(out)] = out
            elif not func.is_view:
                raise UnrecordableError(func.name())
        return out
