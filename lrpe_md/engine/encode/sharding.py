"""Run encodings on DTensors. Each rank runs the same call on its shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core import sharding
from ..core.call import Call, CosSin, Layout
from ..core.norms import of_tensor
from ..core.operator import is_sharded
from ..core.sharding import BATCH, HEADS, TOKENS


def run_shards(run: Callable[..., tuple[Tensor, ...]], call: Call, xs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Run a call on the local shards. Return DTensors with the placements of xs.

    Batch, heads and tokens may be sharded, evenly or not. Each rank's tokens keep their positions in the sequence, or
    their rows in the tables. Other tensors are sharded like xs along shared dimensions, and replicated along all
    others. Plain tensors count as replicated. Gradients are the same as without sharding, and have the placements of
    their tensors.
    """
    spec, layout, tables = call.spec, call.layout, call.tables
    sharding.check_placements(spec, xs, tables.omega, tables.phase)
    first_name = "x" if len(xs) == 1 else "q"
    sharding.check_mesh("norm.weight, norm.bias", call.weights, first_name, xs[0])
    sharding.check_mesh("tables", call.cos_sin.tensors, first_name, xs[0])
    if len(xs) == 2 and tuple(xs[0].placements) != tuple(xs[1].placements):
        # With one replicated key head, q's and k's gradients of the frequencies are summed over different ranks.
        q_call, k_call = (call._replace(weights=of_tensor(call.weights, i)) for i in range(2))
        return run_shards(run, q_call, xs[:1]) + run_shards(run, k_call, xs[1:])
    x, cos_sin = xs[0], call.cos_sin
    if cos_sin.cos is None:
        for tensor in xs:
            sharding.check_cut(tables, tensor)
        layout, tables = sharding.local_positions(layout, tables, x)
    else:
        for tensor in xs:
            sharding.local_part(tensor, TOKENS)
        layout, cos_sin = _local_tables(layout, cos_sin, x)
    weights = sharding.local_weights(call.weights, [(call.layout, x) for x in xs], cos_sin.cos is None)
    local = Call(spec, layout, tables, None, weights, cos_sin)
    ys = run(local, tuple(x.to_local() for x in xs), ())
    return tuple(sharding.wrap_shard(y, x, spec.out_dim(x.shape[3])) for x, y in zip(xs, ys, strict=True))


def _local_tables(layout: Layout, cos_sin: CosSin, x: Any) -> tuple[Layout, CosSin]:
    """Return the layout of x's shard, and the shard's part of the caller's tables.

    DTensor tables are sharded along the tokens if their rows are sharded and every token has a row. Other tables keep
    all rows, and the layout's start is the row where the shard begins.
    """
    start, length = sharding.local_part(x, TOKENS)
    outer = len(cos_sin.shape) - 2
    dims = {dim: dim for dim in (BATCH, HEADS)[:outer] if cos_sin.shape[dim] > 1}
    rows_sharded = any(is_sharded(t) and sharding.count_ranks(t, outer) > 1 for t in cos_sin.tensors)
    if rows_sharded and layout.num_grid_tokens == layout.num_tokens:
        dims[TOKENS] = outer
        layout = Layout(length, 0, length, 0, ())
    else:
        layout = layout._replace(num_tokens=length, start=layout.start + start)
    if HEADS in dims:
        sharding.check_heads("tables", cos_sin.tensors[0], HEADS, x)
    cos, sin = (None if t is None else _local_table(t, x, dims) for t in cos_sin[:2])
    return layout, cos_sin._replace(cos=cos, sin=sin)


def _local_table(t: Tensor, x: Any, dims: dict[int, int]) -> Tensor:
    """Return this rank's part of a table. The part is a view if the table is a plain tensor that needs no gradient."""
    if is_sharded(t) or t.requires_grad:
        return sharding.take_local(t, x, dims)
    for dim, table_dim in dims.items():
        start, length = sharding.local_part(x, dim)
        heads_per_row = x.shape[dim] // t.shape[table_dim]  # number of adjacent heads of x that share rows
        t = t.narrow(table_dim, start // heads_per_row, length // heads_per_row)
    return t
