"""Load and store tiles (tokens, channels) of tensors with any strides.

If all pointers and strides are aligned to 8 elements, strides are passed in units of 8. Loads are then 16 bytes wide
for any head_dim that is a multiple of 8.
"""

import triton
import triton.language as tl

from .signature import unpack_strides


@triton.jit
def empty_tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Return a tile of zeros."""
    return tl.zeros([ROWS, COLUMNS], dtype=dtype)


@triton.jit
def zeros(V: tl.constexpr, dtype: tl.constexpr):
    """Return a tile (tokens, channels) of zeros."""
    return empty_tile(V.block_n, V.block_c, dtype)


@triton.jit
def step(o, stride):
    """Return o · stride in 64 bits for non-negative factors. For 32-bit factors, this takes one instruction."""
    if stride.dtype == tl.int64:
        return tl.cast(o, tl.int64) * stride
    else:
        product = tl.cast(tl.cast(o, tl.uint32), tl.uint64) * tl.cast(tl.cast(stride, tl.uint32), tl.uint64)
        return tl.cast(product, tl.int64)


@triton.jit
def point_to_row(tensors, is_k, b, h, n0, V: tl.constexpr):
    """Return a pointer to token n0 of head h of sample b, in q or in k, and the token and channel strides.

    ``tensors`` holds the pointer and the packed strides (b, h, n, d) of q and of k. The values for k are ignored unless
    V.has_k is set. V.long means that packed strides need 64 bits, even in units of 8.
    """
    UNIT: tl.constexpr = 8 if V.aligned else 1
    p_q, q_strides, p_k, k_strides = tensors
    p = p_q
    stride_b, stride_h, stride_n, stride_d = unpack_strides(q_strides, V=V)
    if V.has_k:
        k_stride_b, k_stride_h, k_stride_n, k_stride_d = unpack_strides(k_strides, V=V)
        p = tl.where(is_k, p_k, p_q)
        stride_b = tl.where(is_k, k_stride_b, stride_b)
        stride_h = tl.where(is_k, k_stride_h, stride_h)
        stride_n = tl.where(is_k, k_stride_n, stride_n)
        stride_d = tl.where(is_k, k_stride_d, stride_d)
    p = p + (step(b, stride_b) + step(h, stride_h) + step(n0, stride_n)) * UNIT
    if V.aligned:
        p = tl.multiple_of(p, 16)  # applied to the sum, because the compiler ignores it on a kernel argument
    return p, stride_n, stride_d


@triton.jit
def move_row(row, count, stride, V: tl.constexpr):
    """Advance a row by ``count`` strides."""
    UNIT: tl.constexpr = 8 if V.aligned else 1
    p, stride_n, stride_d = row
    p += step(count, stride) * UNIT
    if V.aligned:
        p = tl.multiple_of(p, 16)
    return p, stride_n, stride_d


@triton.jit
def move_tokens(row, n0, V: tl.constexpr):
    """Advance a row by n0 tokens."""
    _, stride_n, _ = row
    return move_row(row, n0, stride_n, V)


@triton.jit
def point_at(row, o_n, o_d, V: tl.constexpr):
    p, stride_n, stride_d = row
    tokens = step(o_n, stride_n)
    if V.aligned:
        return (p + tokens * 8)[:, None] + o_d
    else:
        return (p + tokens)[:, None] + step(o_d, stride_d)


@triton.jit
def first_channel(V: tl.constexpr):
    """Return c0, the first channel or pair of a tile. c0 is 0 unless the map has several tiles."""
    return tl.full([1, 1], V.first, dtype=tl.int32)


@triton.jit
def mask_channels(m_n, c0, width: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr = 0):
    """Return the mask of channels [c0, c0 + BLOCK) of tokens m_n. Only channels below ``width`` exist.

    A tile either begins at channel FIRST, or is one of several that divide the width evenly.
    """
    if width >= FIRST + BLOCK:
        return m_n[:, None]
    else:
        return m_n[:, None] & (c0 + tl.arange(0, BLOCK)[None, :] < width)


@triton.jit
def load_at(row, o_n, o_d, mask, V: tl.constexpr):
    """Load channels o_d (1 or tokens, channels) of a block of tokens."""
    return tl.load(point_at(row, o_n, o_d, V), mask=mask, other=0.0)


@triton.jit
def store_at(row, value, o_n, o_d, mask, V: tl.constexpr):
    p, _, _ = row
    tl.store(point_at(row, o_n, o_d, V), value.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load(row, o_n, m_n, c0, lo, V: tl.constexpr, TIMES: tl.constexpr = 1):
    """Load a tile of a block of tokens, starting at channel lo + c0. TIMES multiplies V.block_c and V.num_channels."""
    o_d = c0 + tl.arange(0, TIMES * V.block_c)[None, :]
    mask = mask_channels(m_n, c0, TIMES * V.num_channels, TIMES * V.block_c, FIRST=TIMES * V.first)
    return load_at(row, o_n, lo + o_d, mask, V)


@triton.jit
def store(row, value, o_n, m_n, c0, lo, V: tl.constexpr, TIMES: tl.constexpr = 1):
    """Store a tile in the form that :func:`load` returns."""
    o_d = c0 + tl.arange(0, TIMES * V.block_c)[None, :]
    mask = mask_channels(m_n, c0, TIMES * V.num_channels, TIMES * V.block_c, FIRST=TIMES * V.first)
    store_at(row, value, o_n, lo + o_d, mask, V)


@triton.jit
def load_tile(row, o_n, m_n, i: tl.constexpr, V: tl.constexpr):
    """Load tile i of a row, for a block of tokens."""
    o_d = first_channel(V=V) + tl.arange(0, V.blocks[i])[None, :]
    return load_at(row, o_n, V.begins[i] + o_d, mask_channels(m_n, first_channel(V=V), V.widths[i], V.blocks[i]), V)


@triton.jit
def store_tile(row, value, o_n, m_n, i: tl.constexpr, V: tl.constexpr):
    """Store a tile in the form that :func:`load_tile` returns."""
    o_d = first_channel(V=V) + tl.arange(0, V.blocks[i])[None, :]
    store_at(row, value, o_n, V.begins[i] + o_d, mask_channels(m_n, first_channel(V=V), V.widths[i], V.blocks[i]), V)


@triton.jit
def upcast(x, V: tl.constexpr):
    """Convert x to the compute dtype.

    A bfloat16 is the upper half of a float32. The assembly converts a packed pair in two instructions, whereas the
    compiler would use three.
    """
    if V.functions > 0 and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2
        )
    else:
        return x.to(tl.float64 if V.wide else tl.float32)


@triton.jit
def load_flags(p, m_n, WIDE: tl.constexpr):
    """Load one boolean per token. The result is False where m_n is False.

    Set WIDE if the result affects operands of matrix products. In Triton 3.6, an operand loaded from single bytes has a
    layout for 32 rows, so each token of a product over 16 tokens counts twice (triton-lang/triton#11691). A sum over
    two copies avoids that layout.
    """
    flags = tl.load(p, mask=m_n, other=0)
    if WIDE:
        BLOCK_N: tl.constexpr = m_n.shape[0]
        flags = tl.sum(tl.broadcast_to(flags.to(tl.int32)[:, None], [BLOCK_N, 2]), axis=1)
    return flags != 0


@triton.jit
def find_pairs(c0, V: tl.constexpr):
    """Return the indices of both channels of pairs [c0, c0 + V.block_c).

    The channels of a pair are adjacent, half the width apart, or half a section apart.
    """
    o_c = c0 + tl.arange(0, V.block_c)[None, :]
    if V.pairs == "interleaved":
        a = V.rotary_start + 2 * o_c
        return a, a + 1
    elif V.pairs == "blocks":
        section_begin = o_c * 0
        size = o_c * 0 + V.sections[0]
        begin = 0
        for i in tl.static_range(len(V.sections) - 1):
            begin += V.sections[i]
            section_begin = tl.where(o_c >= begin, begin, section_begin)
            size = tl.where(o_c >= begin, V.sections[i + 1], size)
        a = V.rotary_start + section_begin + o_c
        return a, a + size
    elif V.pairs == "half":
        return V.rotary_start + o_c, V.rotary_start + V.num_channels + o_c
    else:
        tl.static_assert(False, "this pairing has no branch in kernels/tiles.py: find_pairs")


@triton.jit
def locate_channels(i: tl.constexpr, V: tl.constexpr):
    """Return the channel indices (1, channels) of tile i of a row, and their mask."""
    if V.halves == 2 and i < V.num_mapped:
        T: tl.constexpr = V.map_tiles[i // 2] if V.num_map_tiles > 1 else V
        o_a, o_b = find_pairs(first_channel(V=T), T)
        o_d = o_b if i % 2 == 1 else o_a
        m_d = T.first + tl.arange(0, T.block_c)[None, :] < T.num_channels
    else:
        o_d = V.begins[i] + tl.arange(0, V.blocks[i])[None, :]
        m_d = o_d < V.begins[i] + V.widths[i]
    return o_d, m_d


@triton.jit
def load_pairs(row, o_n, m_n, c0, V: tl.constexpr):
    """Load both channels of each pair. Interleaved pairs are loaded as one tile, which :func:`split_pairs` splits."""
    if V.pairs == "interleaved":
        a = load(row, o_n, m_n, 2 * c0, V.rotary_start, V, TIMES=2)
        b = a
    elif V.pairs == "blocks":
        o_a, o_b = find_pairs(c0, V)
        mask = mask_channels(m_n, c0, V.num_channels, V.block_c, FIRST=V.first)
        a = load_at(row, o_n, o_a, mask, V)
        b = load_at(row, o_n, o_b, mask, V)
    else:
        a = load(row, o_n, m_n, c0, V.rotary_start, V)
        b = load(row, o_n, m_n, c0, V.rotary_start + V.num_channels, V)
    return a, b


@triton.jit
def split_last(x):
    """Split each row into its even and odd entries."""
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.reshape(x, [ROWS, HALF, 2]))


@triton.jit
def split_pairs(a, b, V: tl.constexpr):
    """Split interleaved pairs from :func:`load_pairs` into their first and second channels."""
    if V.pairs == "interleaved":
        return split_last(a)
    else:
        return a, b


@triton.jit
def store_pairs(row, a, b, o_n, m_n, c0, V: tl.constexpr):
    """Store both channels of each pair. This is the inverse of :func:`load_pairs` and :func:`split_pairs`."""
    if V.pairs == "interleaved":
        BLOCK_N: tl.constexpr = V.block_n
        WIDTH: tl.constexpr = 2 * V.block_c
        x = tl.reshape(tl.join(a, b), [BLOCK_N, WIDTH])
        store(row, x, o_n, m_n, 2 * c0, V.rotary_start, V, TIMES=2)
    elif V.pairs == "blocks":
        o_a, o_b = find_pairs(c0, V)
        mask = mask_channels(m_n, c0, V.num_channels, V.block_c, FIRST=V.first)
        store_at(row, a, o_n, o_a, mask, V)
        store_at(row, b, o_n, o_b, mask, V)
    else:
        store(row, a, o_n, m_n, c0, V.rotary_start, V)
        store(row, b, o_n, m_n, c0, V.rotary_start + V.num_channels, V)
