"""Operations on rows. A row's channels are stored as a tuple of tiles (tokens, channels)."""

import triton
import triton.language as tl


@triton.jit
def mask_rest(x, i: tl.constexpr, value, V: tl.constexpr):
    """Set channels of tile i that are beyond the row's width to ``value``."""
    if V.widths[i] < V.blocks[i]:
        x = tl.where((tl.arange(0, V.blocks[i]) < V.widths[i])[None, :], x, value)
    return x


@triton.jit
def sum_row(tiles, V: tl.constexpr, AXIS: tl.constexpr = 1):
    """Sum all channels of each row. With AXIS=None, also sum over the rows.

    The first two tiles of a row of pairs have the same shape, and are added before the reduction across threads.
    """
    FIRST: tl.constexpr = V.halves
    first = tiles[0]
    if FIRST == 2:
        first = first + tiles[1]
    total = tl.sum(first, axis=AXIS)
    for i in tl.static_range(FIRST, len(tiles)):
        total += tl.sum(tiles[i], axis=AXIS)
    return total


@triton.jit
def sum_row_products(x, y, V: tl.constexpr):
    """Sum x y over all channels of each row, in the order of :func:`sum_row`."""
    FIRST: tl.constexpr = V.halves
    first = x[0] * y[0]
    if FIRST == 2:
        first = tl.fma(x[1], y[1], first)
    total = tl.sum(first, axis=1)
    for i in tl.static_range(FIRST, len(x)):
        total += tl.sum(x[i] * y[i], axis=1)
    return total


@triton.jit
def scale_row(x, factor):
    tiles = ()
    for i in tl.static_range(len(x)):
        tiles += (x[i] * factor,)
    return tiles


@triton.jit
def add_rows(x, y):
    sums = ()
    for i in tl.static_range(len(x)):
        sums += (x[i] + y[i],)
    return sums


@triton.jit
def add_row_products(total, x, y):
    """Return total + x * y, tile by tile. ``total`` is a row, or () before the first products."""
    sums = ()
    for i in tl.static_range(len(x)):
        sums += (x[i] * y[i] if len(total) == 0 else tl.fma(x[i], y[i], total[i]),)
    return sums
