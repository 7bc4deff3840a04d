"""Rows, whose channels are several tiles: products and sums of them that every kernel rounds alike, in float32.

Compilers fuse a product into the sum that it is added to. Of a product with several uses they do so or not by how far
these are in the code, and of a sum of two products they choose the one to fuse by what is beside it: kernels made of
the same lines, one with numbers as arguments and one with them compiled in, would differ in the last place. So what is
fused is written as such: of two products one goes into :func:`add_product` or :func:`subtract_product`, and a product
that goes into a reduction, or has several uses, is a :func:`round_product`. tests/kernels/test_aot.py looks for others.
"""

import triton
import triton.language as tl


@triton.jit
def round_product(x, y):
    """x y of two tensors, rounded before anything is added; 0 for -0."""
    return tl.fma(x, y, 0.0)


@triton.jit
def round_multiple(x, number: tl.constexpr):
    """x times a number, of x's type: fma takes it for a float32."""
    return round_product(x, tl.full(x.shape, number, x.dtype))


@triton.jit
def add_product(total, x, y):
    """total + x y, rounded once."""
    return tl.fma(x, y, total)


@triton.jit
def subtract_product(total, x, y):
    """total - x y, rounded once."""
    return tl.fma(x, y * -1.0, total)  # a sign of an operand, where -y would be a subtraction from 0


@triton.jit
def mask_rest(x, i: tl.constexpr, value, V: tl.constexpr):
    """Tile i of a row, with this value where it is wider than the row's channels."""
    if V.widths[i] < V.blocks[i]:
        x = tl.where((tl.arange(0, V.blocks[i]) < V.widths[i])[None, :], x, value)
    return x


@triton.jit
def sum_row(tiles, V: tl.constexpr, AXIS: tl.constexpr = 1):
    """Σ over all channels of a row, with AXIS None of all rows of the tiles; the halves of pairs, of one shape, add up
    before they go across threads."""
    FIRST: tl.constexpr = 2 if V.num_turned == 2 else 1
    first = tiles[0]
    if FIRST == 2:
        first = first + tiles[1]
    total = tl.sum(first, axis=AXIS)
    for i in tl.static_range(FIRST, len(tiles)):
        total += tl.sum(tiles[i], axis=AXIS)
    return total


@triton.jit
def sum_row_products(x, y, V: tl.constexpr):
    """Σ x y over all channels of a row, in the order of :func:`sum_row`."""
    FIRST: tl.constexpr = 2 if V.num_turned == 2 else 1
    first = round_product(x[0], y[0])
    if FIRST == 2:
        first = add_product(first, x[1], y[1])
    total = tl.sum(first, axis=1)
    for i in tl.static_range(FIRST, len(x)):
        total += tl.sum(round_product(x[i], y[i]), axis=1)
    return total


@triton.jit
def scale_row(x, by):
    scaled = ()
    for i in tl.static_range(len(x)):
        scaled += (round_product(x[i], by),)
    return scaled


@triton.jit
def add_rows(x, y):
    sums = ()
    for i in tl.static_range(len(x)):
        sums += (x[i] + y[i],)
    return sums


@triton.jit
def add_row_products(total, x, y):
    """total + x y, tile by tile; total: a row, or () before the first products."""
    sums = ()
    for i in tl.static_range(len(x)):
        sums += (round_product(x[i], y[i]) if len(total) == 0 else add_product(total[i], x[i], y[i]),)
    return sums
