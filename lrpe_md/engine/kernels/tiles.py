"""Loads and stores of a tile (tokens, channels) of tensors with any strides.

Strides come in units of 8 elements where everything is aligned to that, so that loads are 16 bytes wide for any
head_dim that is a multiple of 8.
"""

import triton
import triton.language as tl


@triton.jit
def _step(o, stride, LONG: tl.constexpr):
    """o · stride in 64 bits, neither of them negative; of unsigned 32-bit factors that is one instruction."""
    if LONG:
        return tl.cast(o, tl.int64) * stride
    else:
        product = tl.cast(tl.cast(o, tl.uint32), tl.uint64) * tl.cast(tl.cast(stride, tl.uint32), tl.uint64)
        return tl.cast(product, tl.int64)


@triton.jit
def row_at(
    tensors, is_k, b, h, n0, HAS_K: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """For head h of sample b of q or k: a pointer to token n0, strides of a token and of a channel.

    tensors: pointer and strides (b, h, n, d) of q and of k, where that is not HAS_K anything. LONG: strides need 64
    bits, also in units of 8.
    """
    U: tl.constexpr = 8 if ALIGNED else 1
    p_q, q_strides, p_k, k_strides = tensors
    p = p_q
    stride_b, stride_h, stride_n, stride_d = q_strides
    if HAS_K:
        p = tl.where(is_k, p_k, p_q)
        stride_b = tl.where(is_k, k_strides[0], stride_b)
        stride_h = tl.where(is_k, k_strides[1], stride_h)
        stride_n = tl.where(is_k, k_strides[2], stride_n)
        stride_d = tl.where(is_k, k_strides[3], stride_d)
    p = p + (_step(b, stride_b, LONG) + _step(h, stride_h, LONG) + _step(n0, stride_n, LONG)) * U
    if ALIGNED:
        p = tl.multiple_of(p, 16)  # on the sum: on an argument of the kernel the compiler ignores it
    return p, stride_n, stride_d


@triton.jit
def _pointers(row, o_n, o_d, ALIGNED: tl.constexpr, LONG: tl.constexpr):
    p, stride_n, stride_d = row
    tokens = _step(o_n, stride_n, LONG)
    if ALIGNED:
        return (p + tokens * 8)[:, None] + o_d
    else:
        return (p + tokens)[:, None] + _step(o_d, stride_d, LONG)


@triton.jit
def origin():
    """c0 of a tile that has all channels."""
    return tl.zeros([1, 1], dtype=tl.int32)


@triton.jit
def within(m_n, c0, n_d: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which of channels c0 .. c0 + BLOCK_D of the tokens m_n are among the n_d.

    A tile has all channels and is as wide or wider, or is one of many that n_d is a multiple of.
    """
    if n_d % BLOCK_D == 0:
        return m_n[:, None]
    else:
        return m_n[:, None] & (c0 + tl.arange(0, BLOCK_D)[None, :] < n_d)


@triton.jit
def load_at(row, o_n, o_d, mask, ALIGNED: tl.constexpr, LONG: tl.constexpr):
    """Channels o_d (1 or tokens, channels) of a block of tokens."""
    return tl.load(_pointers(row, o_n, o_d, ALIGNED, LONG), mask=mask, other=0.0)


@triton.jit
def store_at(row, value, o_n, o_d, mask, ALIGNED: tl.constexpr, LONG: tl.constexpr):
    tl.store(_pointers(row, o_n, o_d, ALIGNED, LONG), value.to(row[0].dtype.element_ty), mask=mask)


@triton.jit
def load(
    row, o_n, m_n, c0, lo, n_d: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of a block of tokens channels c0 .. c0 + BLOCK_D of the n_d that begin at lo."""
    o_d = c0 + tl.arange(0, BLOCK_D)[None, :]
    return load_at(row, o_n, lo + o_d, within(m_n, c0, n_d, BLOCK_D), ALIGNED, LONG)


@triton.jit
def store(
    row, value, o_n, m_n, c0, lo, n_d: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o_d = c0 + tl.arange(0, BLOCK_D)[None, :]
    store_at(row, value, o_n, lo + o_d, within(m_n, c0, n_d, BLOCK_D), ALIGNED, LONG)


@triton.jit
def upcast(x, ACC: tl.constexpr, PTX: tl.constexpr):
    """To the dtype of the arithmetic.

    A bfloat16 is the upper half of a float32; the compiler takes three instructions for two of them in one register.
    """
    if PTX and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2
        )
    else:
        return x.to(ACC)


@triton.jit
def pair_channels(c0, lo, C: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Both channels of pairs c0 .. c0 + BLOCK_C: side by side, C apart, or half a block of SECTIONS apart."""
    o_c = c0 + tl.arange(0, BLOCK_C)[None, :]
    if INTERLEAVED:
        a = lo + 2 * o_c
        return a, a + 1
    elif len(SECTIONS) > 0:
        before = o_c * 0
        size = o_c * 0 + SECTIONS[0]
        begin = 0
        for i in tl.static_range(len(SECTIONS) - 1):
            begin += SECTIONS[i]
            before = tl.where(o_c >= begin, begin, before)
            size = tl.where(o_c >= begin, SECTIONS[i + 1], size)
        a = lo + before + o_c
        return a, a + size
    else:
        return lo + o_c, lo + C + o_c


@triton.jit
def load_pairs(
    row, o_n, m_n, c0, lo, C: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr, ALIGNED: tl.constexpr,
    LONG: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Both channels of each pair; interleaved ones still side by side, twice: see :func:`apart`."""
    if INTERLEAVED:
        x1 = load(row, o_n, m_n, 2 * c0, lo, 2 * C, ALIGNED, LONG, 2 * BLOCK_C)
        x2 = x1
    elif len(SECTIONS) > 0:
        a, b = pair_channels(c0, lo, C, INTERLEAVED, SECTIONS, BLOCK_C)
        mask = within(m_n, c0, C, BLOCK_C)
        x1 = load_at(row, o_n, a, mask, ALIGNED, LONG)
        x2 = load_at(row, o_n, b, mask, ALIGNED, LONG)
    else:
        x1 = load(row, o_n, m_n, c0, lo, C, ALIGNED, LONG, BLOCK_C)
        x2 = load(row, o_n, m_n, c0, lo + C, C, ALIGNED, LONG, BLOCK_C)
    return x1, x2


@triton.jit
def apart(x1, x2, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """The channels of the pairs that :func:`load_pairs` left together."""
    if INTERLEAVED:
        return tl.split(tl.reshape(x1, [BLOCK_N, BLOCK_C, 2]))
    else:
        return x1, x2


@triton.jit
def store_pairs(
    row, x1, x2, o_n, m_n, c0, lo, C: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    ALIGNED: tl.constexpr, LONG: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        x = tl.reshape(tl.join(x1, x2), [BLOCK_N, 2 * BLOCK_C])
        store(row, x, o_n, m_n, 2 * c0, lo, 2 * C, ALIGNED, LONG, 2 * BLOCK_C)
    elif len(SECTIONS) > 0:
        a, b = pair_channels(c0, lo, C, INTERLEAVED, SECTIONS, BLOCK_C)
        mask = within(m_n, c0, C, BLOCK_C)
        store_at(row, x1, o_n, a, mask, ALIGNED, LONG)
        store_at(row, x2, o_n, b, mask, ALIGNED, LONG)
    else:
        store(row, x1, o_n, m_n, c0, lo, C, ALIGNED, LONG, BLOCK_C)
        store(row, x2, o_n, m_n, c0, lo + C, C, ALIGNED, LONG, BLOCK_C)
