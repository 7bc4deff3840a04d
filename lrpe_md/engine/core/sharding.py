"""Support for DTensors. Each rank runs the same call on its shard.

We shard calls before the operators run, rather than registering sharding strategies with DTensor's dispatcher.
Strategies can't change positions, can't mix plain tensors (such as frequencies) with sharded ones, and have no stable
interface for operators that take and return lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Layout, Spec, Tables, Weights
from .memory import strides_in_memory
from .norms import of_tensor
from .operator import is_sharded

_NAMES = ("batch", "heads", "tokens", "head_dim")
BATCH, HEADS, TOKENS = range(3)
_SHARDED_DIMS = (  # for error messages: the name of each dimension, and what to pass if its shards have other sizes
    ("samples", "the positions of its samples"),
    ("heads", "the frequencies, phase and amplitude of its heads"),
    ("tokens", "Grid(start=, length=) or Coordinates.shard"),
)


def wrap_shard(y: Tensor, x: Any, width: int) -> Any:
    """Return a local result (B, H, N, width) as a DTensor with the placements of x."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*x.shape[:3], width))
    stride = strides_in_memory(x, width)
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)


def check_placements(spec: Spec, xs: tuple[Any, ...], *others: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    names = ("x",) if len(xs) == 1 else ("q", "k", "v")[: len(xs)]
    for name, x in zip(names, xs, strict=True):
        if not is_sharded(x):
            raise TypeError(
                f"{name}: expected a DTensor, like the other tensors, got a plain tensor; convert it with "
                "DTensor.from_local, or pass the local shards (.to_local()) of all tensors"
            )
        if x.device_mesh != xs[0].device_mesh:
            raise ValueError(
                f"{name}: expected a DTensor on q's mesh {xs[0].device_mesh}, got {x.device_mesh}; redistribute {name}"
            )
        for p in x.placements:
            if type(p) is Shard and p.dim in (BATCH, HEADS, TOKENS):
                continue
            if type(p) is Replicate:
                continue
            placement = f"a sharded {_NAMES[p.dim]}" if type(p) is Shard else repr(p)
            raise ValueError(
                f"{name}: expected placements Shard(0) (batch), Shard(1) (heads), Shard(2) (tokens) or Replicate(), "
                f"got {placement} in {tuple(x.placements)}; call {name}.redistribute first"
            )
        if spec.dim == -2 and count_ranks(x, TOKENS) > 1:
            raise ValueError(
                f"dim: softmax over the sequence (-2) needs the whole sequence, got {name} with sharded tokens, "
                f"{tuple(x.placements)}; call {name}.redistribute first"
            )
        if spec.norm != "none" and spec.norm_over == "heads" and count_ranks(x, HEADS) > 1:
            raise ValueError(
                f"norm: over='heads' needs all heads of a token, got {name} with sharded heads, "
                f"{tuple(x.placements)}; call {name}.redistribute first, or shard its batch or tokens"
            )
    check_mesh("omega, phase", others, names[0], xs[0])


def check_mesh(names: str, others: tuple[Any, ...], name: str, x: Any) -> None:
    for t in others:
        if is_sharded(t) and t.device_mesh != x.device_mesh:
            raise ValueError(
                f"{names}: expected plain tensors, or DTensors on {name}'s mesh {x.device_mesh}, got {t.device_mesh}; "
                "redistribute them, or pass .full_tensor()"
            )


def count_ranks(x: Any, dim: int) -> int:
    """Return the number of shards along a dimension."""
    return math.prod([x.device_mesh.size(i) for i, p in enumerate(x.placements) if p.is_shard(dim)])


def take_local(t: Any, x: Any, dims: dict[int, int], partial_axes: Sequence[int] = ()) -> Tensor:
    """Return the part of t that corresponds to x's shard. ``dims`` maps dimensions of x to dimensions of t.

    If x is sharded along a dimension that t lacks, each rank computes a partial gradient of t. The backward pass then
    sums the partial gradients, and also those along the mesh axes in ``partial_axes``.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements, gradient_placements = [], []
    for i, p in enumerate(x.placements):
        placement = Shard(dims[p.dim]) if p.is_shard() and p.dim in dims else Replicate()
        is_partial = i in partial_axes or (p.is_shard() and placement.is_replicate())
        placements.append(placement)
        gradient_placements.append(Partial() if is_partial else placement)
    if not is_sharded(t):
        t = DTensor.from_local(t, x.device_mesh, [Replicate()] * len(placements), run_check=False)
    # This is needed even if no data moves, because its backward pass gives the summed gradient the placements of t.
    return t.redistribute(x.device_mesh, placements).to_local(grad_placements=gradient_placements)


def local_weights(
    weights: Weights, sides: Sequence[tuple[Layout, Any]], in_rows: bool = True, partial_axes: Sequence[int] = ()
) -> Weights:
    """Return this rank's γ and β of a norm. ``sides`` holds the layout and the tensor of q and of k.

    If the tokens of explicit coordinates are sharded, prefix and suffix tokens can become ordinary rows. Set
    ``in_rows`` in this case, to reject separate weights for token groups. ``partial_axes`` are those of k's tensors,
    as in :func:`take_local`.
    """
    shards: list[Tensor | None] = []
    for i, (layout, x) in enumerate(sides):
        own = of_tensor(weights, i)
        if own.token_groups > 1 and in_rows and not layout.sizes and count_ranks(x, TOKENS) > 1:
            raise ValueError(
                "norm.weight: expected one weight for all tokens, because the tokens are sharded and have Coordinates, "
                "got one per group; use a Grid, or redistribute x"
            )
        for t in own[:2]:
            by_head = t is not None and t.ndim > 1 and t.shape[-2] > 1
            if by_head:
                local_part(x, HEADS)
            dims = {HEADS: t.ndim - 2} if t is not None and by_head else {}
            shards.append(None if t is None else take_local(t, x, dims, partial_axes if i else ()))
    return Weights(*shards)


def _local_heads(name: str, t: Tensor, x: Any, partial_axes: Sequence[int]) -> Tensor:
    """Return the part of a tensor (H or 1, ...) for this rank's heads."""
    if t.shape[0] > 1:
        check_heads(name, t, 0, x)
    return take_local(t, x, {HEADS: 0} if t.shape[0] > 1 else {}, partial_axes)


def check_heads(name: str, t: Tensor, dim: int, x: Any) -> None:
    ranks = count_ranks(x, HEADS)
    if t.shape[dim] % ranks:
        raise ValueError(
            f"{name}: expected a number of heads divisible by {ranks} (the number of ranks), or 1 shared head, got "
            f"{t.shape[dim]} in a tensor of shape {tuple(t.shape)}; redistribute x, or shard its batch or tokens"
        )


def local_positions(layout: Layout, tables: Tables, x: Any, partial_axes: Sequence[int] = ()) -> tuple[Layout, Tables]:
    """Return the layout and the tables of x's shard. ``partial_axes`` are described in :func:`take_local`."""
    omega, phase, coords, origin, affine, rotated, amplitude = tables
    omega = _local_heads("omega", omega, x, partial_axes)
    phase = None if phase is None else _local_heads("phase", phase, x, partial_axes)
    affine = None if affine is None else take_local(affine, x, {}, partial_axes)
    amplitude = None if amplitude is None else _local_heads("amplitude", amplitude, x, partial_axes)
    start, length = local_part(x, TOKENS)
    by_sample = {BATCH: 0} if tables.by_sample else {}
    if layout.sizes:
        layout = layout._replace(num_tokens=length, start=layout.start + start)
        origin = None if origin is None else take_local(origin, x, by_sample)
    else:
        if count_ranks(x, TOKENS) > 1:  # prefix and suffix become rows
            coords, rotated = layout.positions(tables, x.device)
            rotated = None if rotated is None else rotated.expand(coords.shape[:-1])
            layout = Layout(length, 0, length, 0, ())
        dims = {**by_sample, TOKENS: len(by_sample)}
        coords = take_local(coords, x, dims, partial_axes)
        if rotated is not None:
            rotated = take_local(rotated, x, dims)
    return layout, Tables(omega, phase, coords, origin, affine, rotated, amplitude)


def check_cut(tables: Tables, x: Any) -> None:
    """Check that x's shards match those of torch.chunk, because tensors with the same dimensions are split that way."""
    if any(t is not None and t.shape[0] > 1 for t in (tables.omega, tables.phase, tables.amplitude)):
        local_part(x, HEADS)
    if tables.by_sample:
        local_part(x, BATCH)
    local_part(x, TOKENS)


def local_part(x: Any, dim: int) -> tuple[int, int]:
    """Return the start and length of this rank's shard along a dimension.

    Check that torch.chunk gives the same shard.
    """
    start, length = 0, x.shape[dim]
    for i, p in enumerate(x.placements):
        if p.is_shard(dim):
            step = -(-length // x.device_mesh.size(i))
            first = min(x.device_mesh.get_local_rank(i) * step, length)
            start, length = start + first, min(step, length - first)
    local = x.to_local().shape[dim]
    if local != length:
        noun, advice = _SHARDED_DIMS[dim]
        raise ValueError(
            f"x: expected {length} of the {x.shape[dim]} {noun} on this rank, as in DTensor's default sharding, "
            f"got {local}; pass the local tensor, with {advice}"
        )
    return start, length
