"""Load cos and sin of a block of tokens from the caller's tables, instead of computing them from angles.

If V.tables is "pairs", a row has one entry per channel of the cosine map, or per pair of a rotation. If it is "full", a
row has one entry for each channel of a pair. Tables may have any strides and any float dtype. With V.joined, cos and
sin are interleaved, like the real and imaginary parts of complex numbers.
"""

import triton
import triton.language as tl

from .signature import unpack_numbers
from .tiles import find_pairs, mask_channels, split_last, step, upcast, zeros


@triton.jit
def _point_to_table(p, strides, sample, g, V: tl.constexpr):
    """Return a pointer to a table's first row for a sample and a group of heads, and the row and entry strides."""
    stride_b, stride_h, stride_n, stride_d = strides
    p = p + (step(sample, stride_b) + step(g, stride_h)) * V.table_unit
    if V.table_unit > 1:
        BYTES: tl.constexpr = V.table_unit * p.dtype.element_ty.primitive_bitwidth // 8
        p = tl.multiple_of(p, 16 if BYTES > 16 else BYTES)
    return p, stride_n, stride_d


@triton.jit
def point_to_tables(tables, sample, g, c0, V: tl.constexpr):
    """Return pointers and strides of cos and sin for a sample and a group of heads, and c0.

    ``tables`` holds pointers to cos and sin, and the packed strides (b, h, n, d) of both in units of V.table_unit
    entries. With V.joined, the pointer to sin is unused. c0 is the first channel or pair of the tile.
    """
    p_cos, p_sin, numbers = tables
    cos_b, cos_h, cos_n, cos_d, sin_b, sin_h, sin_n, sin_d = unpack_numbers(numbers)
    cos = _point_to_table(p_cos, (cos_b, cos_h, cos_n, cos_d), sample, g, V=V)
    if V.joined:
        p, stride_n, stride_d = cos
        sin = (p + 1, stride_n, stride_d)
    else:
        sin = _point_to_table(p_sin, (sin_b, sin_h, sin_n, sin_d), sample, g, V=V)
    return cos, sin, c0


@triton.jit
def _load_at(table, o_r, o_e, mask, default, V: tl.constexpr):
    """Load entries o_e (1 or rows, entries) of rows o_r in the compute dtype. Masked entries are ``default``."""
    p, stride_n, stride_d = table
    pointers = (p + step(o_r, stride_n) * V.table_unit)[:, None]
    if V.table_unit > 1:
        pointers += o_e
    else:
        pointers += step(o_e, stride_d)
    return upcast(tl.load(pointers, mask=mask, other=default), V=V)


@triton.jit
def _load_entries(tables, o_r, o_e, mask, V: tl.constexpr):
    """Load cos and sin for entries o_e of rows o_r."""
    cos_table, sin_table, _ = tables
    o_d = 2 * o_e if V.joined and V.table_unit > 1 else o_e  # _load_at ignores the entry stride if table_unit > 1
    return _load_at(cos_table, o_r, o_d, mask, 1.0, V=V), _load_at(sin_table, o_r, o_d, mask, 0.0, V=V)


@triton.jit
def _load_span(tables, o_r, m_r, c0, first: tl.constexpr, V: tl.constexpr, TIMES: tl.constexpr = 1):
    """Load cos and sin of TIMES · V.block_c adjacent entries, starting at first + c0."""
    WIDTH: tl.constexpr = TIMES * V.num_channels
    COUNT: tl.constexpr = TIMES * V.block_c
    if V.joined and V.table_unit > 1:
        table, _, _ = tables
        o_d = 2 * (first + c0) + tl.arange(0, 2 * COUNT)[None, :]
        entries = _load_at(table, o_r, o_d, mask_channels(m_r, 2 * c0, width=2 * WIDTH, BLOCK=2 * COUNT), 0.0, V=V)
        cos, sin = split_last(entries)
        return tl.where(m_r[:, None], cos, 1.0), sin
    else:
        o_e = first + c0 + tl.arange(0, COUNT)[None, :]
        return _load_entries(tables, o_r, o_e, mask_channels(m_r, c0, width=WIDTH, BLOCK=COUNT), V=V)


@triton.jit
def load_cos_sin(tables, o_r, m_r, V: tl.constexpr):
    """Load cos and sin of rows o_r. Where m_r is False, cos is 1 and sin is 0.

    If V.tables is "full", cos and sin are tuples with a tile for each channel of a pair.
    """
    _, _, c0 = tables
    if V.tables == "pairs":
        cos, sin = _load_span(tables, o_r, m_r, c0, first=0, V=V)
        return cos, _apply_sign(sin, V=V)
    else:
        if V.pairs == "interleaved":
            cos, sin = _load_span(tables, o_r, m_r, 2 * c0, first=0, V=V, TIMES=2)
            cos_a, cos_b = split_last(cos)
            sin_a, sin_b = split_last(sin)
        elif V.pairs == "blocks":
            o_a, o_b = find_pairs(c0, V=V)
            mask = mask_channels(m_r, c0, width=V.num_channels, BLOCK=V.block_c)
            cos_a, sin_a = _load_entries(tables, o_r, o_a - V.rotary_start, mask, V=V)
            cos_b, sin_b = _load_entries(tables, o_r, o_b - V.rotary_start, mask, V=V)
        else:
            cos_a, sin_a = _load_span(tables, o_r, m_r, c0, first=0, V=V)
            cos_b, sin_b = _load_span(tables, o_r, m_r, c0, first=V.num_channels, V=V)
        return (cos_a, cos_b), (_apply_sign(sin_a, V=V), _apply_sign(sin_b, V=V))


@triton.jit
def _apply_sign(sin, V: tl.constexpr):
    """Negate sin if V.inverse is set. A unary minus would compile to a subtraction from 0."""
    if V.inverse:
        return sin * -1.0
    else:
        return sin


@triton.jit
def split_pair_entries(t, V: tl.constexpr):
    """Return the cos (or sin) of both channels of a pair."""
    if V.tables == "full":
        return t[0], t[1]
    else:
        return t, t


@triton.jit
def zero_cos_sin(V: tl.constexpr):
    """Return zeros with the same structure as cos (or sin) from :func:`load_cos_sin` or from angles."""
    zero = zeros(V=V, dtype=tl.float64 if V.wide else tl.float32)
    if V.tables == "full":
        return zero, zero
    else:
        return zero
