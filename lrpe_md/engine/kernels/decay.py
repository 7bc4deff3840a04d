"""Decay from token to token for linear attention with a causal mask: S_n = g_n S_{n−1} + β_n k̂_n v_nᵀ.

Within a block of tokens, the weight of a key for a query is the product of the decays after the key, up to and
including the query's own decay. The weight of the state before the block is the product of the block's decays up to and
including the query's own. When a key is added to the state, its weight is the product of the decays after the key, up
to the end of the block. Products are computed as exponentials of sums of log g, or of log₂ g if operands are rounded,
because exp2 is a single instruction. Names are the same as in linear.py. In addition, L is the running sum of log g in
a block.
"""

import triton
import triton.language as tl

from .features import load_gate
from .signature import unpack_numbers


@triton.jit
def locate_decay(decay, b, h, V: tl.constexpr):
    """Load log g of a head if all of its tokens share it.

    Otherwise, return ``decay`` (a pointer and strides) unchanged.
    """
    if V.decay_per_head:
        p, strides = decay
        stride_b, stride_h, _ = unpack_numbers(strides)
        return convert_logs(tl.load(p + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h), V=V)
    elif V.memory == "add":
        return decay
    else:
        return 0


@triton.jit
def convert_logs(logs, V: tl.constexpr):
    """Convert log g to the dtype and base in which it is summed.

    Differences of L lose precision if decays are strong, so L is float64 unless operands are rounded anyway.
    """
    if V.operand == "same":
        return logs.to(tl.float64)
    else:
        LOG2_E: tl.constexpr = 1.4426950408889634
        return logs.to(tl.float32) * LOG2_E


@triton.jit
def load_decay(decay, place, end, V: tl.constexpr):
    """Return three sums of log g in a block: up to each token (L), after each token, and over the whole block.

    Return () without a decay. ``decay`` is the result of :func:`locate_decay`, and ``end`` is the end of the piece.
    """
    b, h, n0, o_n, m_n = place
    if V.memory != "add":
        return ()
    elif V.decay_per_head:
        count = tl.minimum(end - n0, V.block_n)
        # This must depend on the block, as ``count`` does. Otherwise, the loop would keep all of fade_pairs in
        # registers.
        tokens = tl.minimum(o_n + 1, count)
        return tokens * decay, (count - tokens) * decay, count * decay
    else:
        logs = convert_logs(load_gate(decay, b, h, n0 + o_n, m_n, V=V), V=V)
        total = tl.sum(logs, axis=0)
        return tl.cumsum(logs, axis=0), tl.cumsum(logs, axis=0, reverse=True) - logs, total


@triton.jit
def fade(logs, V: tl.constexpr):
    """Convert sums of log g to products of g, in the compute dtype."""
    if V.operand == "same":
        return tl.exp(logs.to(tl.float64 if V.wide else tl.float32))
    else:
        return tl.exp2(logs)


@triton.jit
def causal_mask(V: tl.constexpr, KEYS_FIRST: tl.constexpr = False):
    """Return the causal mask of a block, in which each query (row) sees its own key and earlier keys (columns).

    With KEYS_FIRST, keys are rows and queries are columns.
    """
    o_n = tl.arange(0, V.block_n)
    if KEYS_FIRST:
        return o_n[:, None] <= o_n[None, :]
    else:
        return o_n[:, None] >= o_n[None, :]


@triton.jit
def fade_pairs(L, V: tl.constexpr, KEYS_FIRST: tl.constexpr = False):
    """Return the decay from each key to each query of a block, or 0 for keys that :func:`causal_mask` excludes."""
    mask = causal_mask(V=V, KEYS_FIRST=KEYS_FIRST)
    logs = L[None, :] - L[:, None] if KEYS_FIRST else L[:, None] - L[None, :]
    return fade(tl.where(mask, logs, float("-inf")), V=V)


@triton.jit
def sum_crossing(products, V: tl.constexpr):
    """For each token, sum the products of earlier keys (columns) with the queries (rows) at or after the token."""
    if V.operand == "same":
        products = products.to(tl.float64)
    sums_before = tl.cumsum(products, axis=1) - products
    return tl.sum(tl.where(causal_mask(V=V), sums_before, 0.0), axis=0)
