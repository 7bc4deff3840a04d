"""Wan's rotary function: the first tokens of each sample are a grid of its own, and the others pass.

Which rows of its table a token uses depends on the numbers in a tensor, so this function is not read entry by entry as
those of :mod:`.probing` are: it is compared with the formula here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.call import Impl
from ..functional import rotate
from .probing import quietly

__all__ = ["Grids", "find_grids", "replace_on_grids"]


class Grids(NamedTuple):
    """Which parameters are x (B, N, H, D), the sizes (B, 3) of the grids, and the complex table (L, D/2)."""

    x: int
    sizes: int
    table: int


def find_grids(function: Callable[..., Any], names: tuple[str, ...], defaults: tuple[Any, ...]) -> Grids | None:
    """Return the roles of the parameters where the function turns grids of samples as :func:`turn_on_grids` does."""
    sizes = [i for i, name in enumerate(names) if "grid" in name]
    required = [i for i, default in enumerate(defaults) if default is inspect.Parameter.empty]
    if required != [0, 1, 2] or len(sizes) != 1 or sizes[0] not in required:
        return None
    x, table = (i for i in required if i not in sizes)
    roles = Grids(x, sizes[0], table)
    return roles if all(_agrees(function, roles, head_dim) for head_dim in (24, 20)) else None


def _agrees(function: Callable[..., Any], roles: Grids, head_dim: int) -> bool:
    g = torch.Generator().manual_seed(head_dim)
    args: dict[int, Tensor] = {
        roles.x: torch.randn(2, 14, 3, head_dim, generator=g),
        roles.sizes: torch.tensor([[2, 2, 3], [3, 1, 2]]),
        roles.table: torch.view_as_complex(torch.randn(9, head_dim // 2, 2, generator=g)),
    }
    x, sizes, table = args[roles.x], args[roles.sizes], args[roles.table]
    try:
        expected = function(*[args[i] for i in range(3)])
        ours = turn_on_grids(x, sizes.tolist(), table, "reference")
    except Exception:  # whatever somebody else's function raises
        return False
    return (
        isinstance(expected, Tensor) and expected.shape == x.shape and torch.allclose(ours, expected.float(), atol=1e-5)
    )


def turn_on_grids(x: Tensor, sizes: list[list[int]], table: Tensor, impl: Impl) -> Tensor:
    """Rotate the first tokens of each sample, which are a grid (T, H, W) in this order; the rest pass."""
    width = table.shape[1]
    parts = table.split([width - 2 * (width // 3), width // 3, width // 3], dim=1)
    heads_first, outs = x.transpose(1, 2), []
    same = all(each == sizes[0] for each in sizes)
    for i, each in enumerate(sizes[:1] if same else sizes):
        rows = [
            part[:n].view([-1 if a == axis else 1 for a in range(3)] + [part.shape[1]]).expand(*each, -1)
            for axis, (part, n) in enumerate(zip(parts, each, strict=True))
        ]
        sample = heads_first if same else heads_first[i : i + 1]
        outs.append(rotate(sample, tables=torch.cat(rows, -1).flatten(0, 2), pairs="interleaved", impl=impl))
    return torch.cat(outs).transpose(1, 2) if len(outs) > 1 else outs[0].transpose(1, 2)


def replace_on_grids(
    function: Callable[..., Any],
    roles: Grids,
    bind: Callable[..., list[Any] | None],
    defaults: tuple[Any, ...],
    impl: Impl,
) -> Callable[..., Any]:
    """Return the function in place of one that :func:`find_grids` knows."""
    dtypes: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {}

    def out_dtype(x: Tensor, table: Tensor) -> torch.dtype:
        key = x.dtype, table.dtype
        if key not in dtypes:
            args = {
                roles.x: torch.zeros(1, 1, 1, 6, dtype=x.dtype), roles.sizes: torch.ones(1, 3, dtype=torch.int64),
                roles.table: torch.ones(1, 3, dtype=table.dtype),
            }  # fmt: skip
            dtypes[key] = quietly(lambda: function(*[args[i] for i in range(3)]).dtype)
        return dtypes[key]

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        values = bind(args, kwargs)
        if (
            values is None
            or torch.compiler.is_compiling()
            or any(value is not default for value, default in zip(values[3:], defaults[3:], strict=True))
        ):
            return function(*args, **kwargs)
        x, sizes, table = values[roles.x], values[roles.sizes], values[roles.table]
        if not _fits(x, sizes, table) or torch.is_autocast_enabled(x.device.type):
            return function(*args, **kwargs)
        dtype = out_dtype(x, table)
        wide = x.to(dtype) if dtype.itemsize > x.dtype.itemsize else x
        return turn_on_grids(wide, sizes.tolist(), table, impl).to(dtype)

    replacement.original = function  # pyright: ignore[reportAttributeAccessIssue]
    return replacement


def _fits(x: Any, sizes: Any, table: Any) -> bool:
    if not all(isinstance(t, Tensor) for t in (x, sizes, table)) or x.device != table.device:
        return False
    shapes = (x.ndim, sizes.ndim, table.ndim) == (4, 2, 2) and tuple(sizes.shape) == (x.shape[0], 3)
    if not shapes or not table.is_complex() or x.shape[3] != 2 * table.shape[1] or not x.is_floating_point():
        return False
    return all(t * h * w <= x.shape[1] and max(t, h, w) <= table.shape[0] for t, h, w in sizes.tolist())
