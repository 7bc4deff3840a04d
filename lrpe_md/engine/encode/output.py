"""Check the output tensors that the caller passes (``out``), and copy the outputs to those that no launch fills."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import can_read, check_dense, plural
from ..core.call import Call
from ..core.operator import cache_call, call_cache, is_sharded
from ..inductor.private import is_transforming

FORM = "(B, H, N, D)"


class Target(NamedTuple):
    """Destination of the outputs.

    ``outs`` holds one tensor per input, of shape (B, H, N, ...), or (B, H, L, ...) with a start. If an element is None,
    that output is allocated. ``start`` is the index along L of the first token, an integer tensor of shape (1,) or (B,)
    that is read on the device. If the target is for only one of two inputs, ``number`` is the index of that input.
    """

    outs: tuple[Tensor | None, ...]
    start: Tensor | None = None
    number: int | None = None

    def select(self, i: int) -> Target:
        """Return the target for one of two tensors."""
        return Target((self.outs[i],), self.start, i)

    def name(self, i: int) -> str:
        """Return the name of an output for error messages."""
        i = i if self.number is None else self.number
        return "out" if len(self.outs) == 1 and self.number is None else f"out[{i}]"

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.outs, self.start

    def can_launch(self, call: Call) -> bool:
        """Return whether kernels can write to the target.

        They can't if channels are strided or the norm is over all heads.
        """
        if call.spec.norm != "none" and call.spec.norm_over == "heads":
            return False
        return all(t is None or (t.stride(-1) == 1 and not t.is_neg()) for t in self.outs)


def take_target(out: Any, start: Any, number: int) -> Target | None:
    """Convert the arguments ``out`` and ``out_start`` of a call with ``number`` tensors to a target."""
    if out is None:
        if start is not None:
            raise ValueError("out_start: expected None without out, because it is a row index into out")
        return None
    if type(out) is tuple and len(out) == number and all(t is None or type(t) is Tensor for t in out):
        return Target(out, None if start is None else _check_start(start))
    outs = (out,) if isinstance(out, Tensor) else out
    kinds = {type(t) for t in outs if t is not None} if isinstance(outs, (tuple, list)) else {type(outs)}
    if not isinstance(outs, (tuple, list)) or not all(issubclass(kind, Tensor) for kind in kinds):
        raise TypeError(f"out: expected a tensor, or one for q and one for k, got {type(out).__name__}")
    if len(outs) != number:
        raise ValueError(
            f"out: expected {'one tensor' if number == 1 else 'a pair (for q, for k), either of which may be None'}, "
            f"got {len(outs)} outputs"
        )
    if start is not None:
        start = _check_start(start)
    return Target(tuple(outs), start)


def _check_start(start: Any) -> Tensor:
    if not isinstance(start, Tensor):
        raise TypeError(
            "out_start: expected an integer tensor, which the kernel reads on the device, got "
            f"{type(start).__name__}; to start at a fixed row, pass a slice of out instead"
        )
    if start.ndim > 1 or start.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"out_start: expected int32 or int64 of shape (), (1,) or (B,), got {start.dtype} {tuple(start.shape)}"
        )
    return start if start.ndim == 1 else start.reshape(1)


def check_target(
    target: Target,
    xs: Sequence[Tensor],
    sources: Sequence[Tensor | None],
    names: Sequence[str],
    width: int,
    direct: bool,
) -> None:
    """Check the target before anything is written. The results of checking shapes, strides and dtypes are cached.

    ``sources`` are the other tensors that the call reads, and ``names`` are their names in error messages. ``width`` is
    the number of channels of an output. Set ``direct`` if all tensors are plain and have memory.
    """
    start = target.start
    if not direct and is_sharded(*xs, *sources, *target.tensors):
        raise ValueError("out: expected None with DTensors, which don't support out")
    if is_transforming():
        raise ValueError(
            "out: expected None under a torch.func transform or with dual numbers, which don't support out"
        )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*xs, *sources)):
        raise ValueError(
            "out: expected gradients to be disabled, because writing into out is not differentiable; use "
            "torch.no_grad() or torch.inference_mode(), or omit out"
        )
    if start is not None and (start.shape[0] not in (1, xs[0].shape[0]) or start.device != xs[0].device):
        raise ValueError(
            f"out_start: expected one row index, or one for each of the {xs[0].shape[0]} samples, on {xs[0].device}, "
            f"got {tuple(start.shape)} on {start.device}"
        )
    if not direct:
        _check_outs(target, xs, width, False)
        return
    others = [*xs, *sources] if start is None else [*xs, *sources, start]
    for out in target.outs:
        if out is None:
            continue
        if out.requires_grad or out.is_nested or out.layout is not torch.strided:
            _check_outs(target, xs, width, True)
        others.append(out)
    shapes = [None if t is None else (t.shape, t.stride(), t.dtype) for t in others]
    key = "reaches", width, len(xs), start is None, *shapes
    reaches = call_cache.get(key)  # number of bytes from the start to the end of each tensor
    if reaches is None or any(t is not None and t.device != xs[0].device for t in target.outs):
        _check_outs(target, xs, width, True)
        reaches = [None if t is None else (_sum_steps(t.shape, t.stride()) + 1) * t.element_size() for t in others]
        cache_call(key, reaches)
    if not xs[0].is_meta:  # meta tensors have no memory
        _check_no_overlap(target, others, reaches, (*(("q", "k") if len(xs) == 2 else ("x",)), *names))


def _check_no_overlap(
    target: Target, tensors: Sequence[Tensor | None], reaches: Sequence[int | None], names: Sequence[str]
) -> None:
    """Check that no output overlaps another tensor.

    ``tensors`` holds the sources, then all outputs that aren't None.
    """
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    num_outs = sum(t is not None for t in target.outs)
    first = len(tensors) - num_outs
    for i in range(first, len(tensors)):
        out: Any = tensors[i]
        begin: Any = addresses[i]
        end = begin + reaches[i]
        for j in range(i):
            address: Any = addresses[j]
            if address is None or address >= end or address + reaches[j] <= begin:
                continue
            other: Any = tensors[j]
            if _may_overlap(out, other):
                name = _find_name(target, i - first)
                source_name = _find_name(target, j - first) if j >= first else [*names, "out_start"][j]
                raise ValueError(f"{name}: expected memory that doesn't overlap {source_name}")


def _find_name(target: Target, number: int) -> str:
    """Return the name of an output for error messages. ``number`` counts only outputs that are not None."""
    return target.name([i for i, t in enumerate(target.outs) if t is not None][number])


def _check_outs(target: Target, xs: Sequence[Tensor], width: int, direct: bool) -> None:
    """Check everything about the outputs that doesn't depend on memory addresses."""
    for i, (out, x) in enumerate(zip(target.outs, xs, strict=True)):
        if out is None:
            continue
        name, shape = target.name(i), (*x.shape[:3], width)
        check_dense(name, out, FORM)
        out_shape = tuple(out.shape)
        is_cache = len(out_shape) == 4 and out_shape == (*shape[:2], max(out_shape[2], shape[2]), shape[3])
        if not (is_cache if target.start is not None else out_shape == shape):
            form = f"({shape[0]}, {shape[1]}, {'' if target.start is None else 'at least '}{shape[2]}, {shape[3]})"
            advice = f"; to write to part of a cache, pass out_start=, or a slice of {shape[2]} of its rows"
            raise ValueError(f"{name}: expected shape {form}, got {out_shape}{advice if is_cache else ''}")
        if out.dtype != x.dtype or out.device != x.device:
            raise ValueError(
                f"{name}: expected the dtype and device of the input, {x.dtype} on {x.device}, got {out.dtype} on "
                f"{out.device}"
            )
        if out.requires_grad:
            raise ValueError(f"{name}: expected a tensor that does not require grad; detach it")
        if direct and _overlaps_itself(out.shape, out.stride()):
            raise ValueError(f"{name}: expected elements that do not overlap in memory, got strides {out.stride()}")


@lru_cache(maxsize=4096)
def _overlaps_itself(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether elements of a tensor may share memory, as in an expanded or overlapping view."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _may_overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors whose address ranges overlap may share memory."""
    if not (a.numel() and b.numel()):
        return False
    distance, itemsize = b.data_ptr() - a.data_ptr(), a.element_size()
    if itemsize != b.element_size() or distance % itemsize:
        return True
    # They may be disjoint columns of the same tensor, such as q and k in a projection.
    steps = {step for t in (a, b) for step, size in zip(t.stride(), t.shape, strict=True) if size > 1 and step > 0}
    return not any(_are_disjoint_modulo(a, b, distance // itemsize, step) for step in steps)


def _sum_steps(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the distance in memory, in elements, from the first element to the last one."""
    return sum(step * (size - 1) for step, size in zip(strides, shape, strict=True))


def _are_disjoint_modulo(a: Tensor, b: Tensor, offset: int, step: int) -> bool:
    """Return whether a and b occupy disjoint ranges modulo ``step``. b starts ``offset`` elements after a."""
    arcs = [_sum_steps(t.shape, [s if s % step else 0 for s in t.stride()]) for t in (a, b)]
    return offset % step > arcs[0] and -offset % step > arcs[1]


def check_places(target: Target, lengths: Sequence[int]) -> None:
    """Check that the tokens of each output fit after its start, if the CPU can read the start."""
    start = target.start
    if start is None or not start.numel() or not can_read(start):
        return
    first, last = int(start.min()), int(start.max())
    for i, (out, length) in enumerate(zip(target.outs, lengths, strict=True)):
        if out is not None and length and not 0 <= first <= last <= out.shape[2] - length:
            raise IndexError(
                f"out_start: expected rows from 0 to {out.shape[2] - length}, got {start.tolist()}: "
                f"{plural(length, 'token')} must fit into the {out.shape[2]} rows of {target.name(i)}. "
                "Nothing was written"
            )


def write(target: Target, ys: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copy each output to its target tensor, and return that tensor. Return outputs without a target unchanged."""
    check_places(target, [y.shape[2] for y in ys])
    outputs = []
    for out, y in zip(target.outs, ys, strict=True):
        if out is not None:
            with torch.no_grad():
                _copy_out(out, y, target.start)
        outputs.append(y if out is None else out)
    return tuple(outputs)


def _copy_out(out: Tensor, y: Tensor, start: Tensor | None) -> None:
    if start is None:
        out.copy_(y)
        return
    rows = start[:, None] + torch.arange(y.shape[2], device=y.device)
    if start.shape[0] == 1:
        out.index_copy_(2, rows[0], y)
    else:
        out.scatter_(2, rows[:, None, :, None].expand(y.shape), y)
