"""RMS norm and layer norm with weights γ and β, for rows whose channels are split into several tiles.

RMS norm computes x̂ = r x, where r is the reciprocal of the root mean square. Layer norm computes x̂ = r (x - mean),
where r is the reciprocal of the standard deviation. In memory, γ and β are (H or 1, P, D) for P groups of tokens. In
registers, they form one tuple, with the tiles of γ followed by the tiles of β.
"""

import triton
import triton.language as tl

from .rows import (
    add_row_products,
    mask_rest,
    scale_row,
    sum_row,
    sum_row_products,
)
from .tiles import empty_tile, locate_channels


@triton.jit
def subtract_mean(x, mean, V: tl.constexpr):
    """Return x - mean, with channels beyond the row's width set to 0."""
    tiles = ()
    for i in tl.static_range(len(x)):
        tiles += (mask_rest(x[i] - mean, i=i, value=0.0, V=V),)
    return tiles


@triton.jit
def take_root(mean_square, V: tl.constexpr):
    """Return 1 / √(mean_square + eps), using the hardware's approximation and one Newton step."""
    v = mean_square + V.norm_eps
    if V.wide:
        return 1.0 / tl.sqrt(v)
    else:
        r = tl.rsqrt(v)
        return tl.where(r > 0.0, r * (1.5 - 0.5 * v * r * r), r)  # r is 0 if the mean is infinite


@triton.jit
def normalise_row(x, V: tl.constexpr):
    """Return the tiles of x̂, and r of shape (tokens, 1)."""
    SHARE: tl.constexpr = 1.0 / V.head_dim
    if V.norm == "layer":
        mean = sum_row(x, V=V) * SHARE
        # Correct the mean's rounding error. Otherwise, equal channels would not become exactly 0.
        mean += sum_row(subtract_mean(x, mean[:, None], V=V), V=V) * SHARE
        x_centred = subtract_mean(x, mean[:, None], V=V)
    else:
        x_centred = x
    scale = take_root(sum_row_products(x_centred, x_centred, V=V) * SHARE, V=V)[:, None]
    return scale_row(x_centred, scale), scale


@triton.jit
def normalise_row_backward(dy, x_hat, scale, weights, V: tl.constexpr):
    """Return dx = r (g - x̂ mean(g x̂)) with g = γ dy. Layer norm also subtracts mean(g) from g."""
    SHARE: tl.constexpr = 1.0 / V.head_dim
    g = apply_weight(dy, weights, V=V)
    dot = (sum_row_products(g, x_hat, V=V) * SHARE)[:, None]
    mean = dot * 0.0
    if V.norm == "layer":
        mean = (sum_row(g, V=V) * SHARE)[:, None]
    return combine_gradient(g, x_hat, scale, dot, mean, V=V)


@triton.jit
def combine_gradient(g, x_hat, scale, dot, mean, V: tl.constexpr):
    """Return r (g - mean - x̂ dot). RMS norm ignores the mean."""
    dx = ()
    for i in tl.static_range(len(g)):
        dx += (scale * tl.fma(x_hat[i], dot * -1.0, g[i] - mean if V.norm == "layer" else g[i]),)
    return dx


# --- γ and β ------------------------------------------------------------------------------------------------


@triton.jit
def find_token_group(o_g, num_grid, V: tl.constexpr):
    """Return the group of each token: 0 for the prefix (negative indices), 1 for the grid, and 2 for the suffix."""
    if V.token_groups > 1:
        group = (o_g >= 0).to(tl.int32) + (o_g >= num_grid).to(tl.int32)
        return tl.minimum(group, V.token_groups - 1)  # masked tokens beyond the end also need a valid group
    else:
        return 0


@triton.jit
def load_tiles(p, o_row, m_row, V: tl.constexpr):
    tiles = ()
    for i in tl.static_range(len(V.begins)):
        o_d, m_d = locate_channels(i=i, V=V)
        value = tl.load(p + o_row + o_d, mask=m_d if m_row is None else m_d & m_row, other=0.0)
        tiles += (value.to(tl.float64 if V.wide else tl.float32),)
    return tiles


@triton.jit
def load_weights(norm, is_k, h, token_group, m_row, V: tl.constexpr):
    """Load γ and β of one head h of q or k, or of several heads if h has shape (rows, 1).

    ``norm`` holds pointers to the weight and bias for q and for k. token_group is 0, or a column with the group of each
    token. m_row is the mask of rows, or None if all rows exist.
    """
    p_weight, p_bias, p_weight_k, p_bias_k = norm
    weights = ()
    o_row = token_group
    if V.weight_by_head:
        o_row = h * V.token_groups + token_group
    o_row = o_row * V.head_dim
    if V.has_weight:
        if V.has_k:
            p_weight = tl.where(is_k, p_weight_k, p_weight)
        tiles = load_tiles(p_weight, o_row, m_row, V=V)
        for i in tl.static_range(len(tiles)):
            weights += (tiles[i] + V.norm_offset if V.norm_offset != 0.0 else tiles[i],)
    if V.has_bias:
        if V.has_k:
            p_bias = tl.where(is_k, p_bias_k, p_bias)
        weights += load_tiles(p_bias, o_row, m_row, V=V)
    return weights


@triton.jit
def apply_weight(x, weights, V: tl.constexpr):
    """Return γ x."""
    tiles = ()
    for i in tl.static_range(len(x)):
        tiles += (x[i] * weights[i] if V.has_weight else x[i],)
    return tiles


@triton.jit
def apply_weights(x_hat, weights, V: tl.constexpr):
    """Return γ x̂ + β."""
    if V.has_bias:
        COUNT: tl.constexpr = len(V.begins)
        tiles = ()
        for i in tl.static_range(COUNT):
            bias = weights[len(weights) - COUNT + i]
            tiles += (tl.fma(x_hat[i], weights[i], bias) if V.has_weight else x_hat[i] + bias,)
        return tiles
    else:
        return apply_weight(x_hat, weights, V=V)


@triton.jit
def form_weight_gradients(dy, x_hat, dweights_before, V: tl.constexpr):
    """Add a row's contributions to dγ (dy x̂) and dβ (dy) to ``dweights_before``, and return the sums."""
    products = ()
    if V.need_dweight:
        COUNT: tl.constexpr = len(dy)
        if V.has_weight:
            products += add_row_products(dweights_before, dy, x_hat)
        if V.has_bias:
            for i in tl.static_range(COUNT):
                products += (
                    dy[i] if len(dweights_before) == 0 else dweights_before[len(dweights_before) - COUNT + i] + dy[i],
                )
    return products


@triton.jit
def zero_weight_gradients(dtype: tl.constexpr, V: tl.constexpr, SUMMED: tl.constexpr = False):
    """Return zero-filled tiles for a program's sums: for each token group, first dγ and then dβ.

    Tiles are (tokens, channels). With SUMMED, they are (1, channels).
    """
    sums = ()
    if V.need_dweight:
        for _ in tl.static_range(V.token_groups * (V.has_weight + V.has_bias)):
            for i in tl.static_range(len(V.begins)):
                sums += (empty_tile(1 if SUMMED else V.block_n, V.blocks[i], dtype),)
    return sums


@triton.jit
def add_weight_gradients(sums, products, token_group, V: tl.constexpr):
    """Add the products of a row's tokens to their token groups' sums (see :func:`zero_weight_gradients`)."""
    new_sums = ()
    for j in tl.static_range(len(sums)):
        product = products[j % len(products)]
        if V.token_groups > 1:
            product = tl.where(token_group == j // len(products), product, 0.0)
        product = product.to(sums[j].dtype)
        if sums[j].shape[0] < product.shape[0]:
            product = tl.sum(product, axis=0, keep_dims=True)
        new_sums += (sums[j] + product,)
    return new_sums


@triton.jit
def store_weight_gradients(p, sums, V: tl.constexpr):
    """Store a program's sums over its tokens, first dγ (P, D) and then dβ (P, D)."""
    COUNT: tl.constexpr = len(V.begins)
    KINDS: tl.constexpr = len(sums) // (COUNT * V.token_groups)
    for j in tl.static_range(len(sums)):
        o_d, m_d = locate_channels(i=j % COUNT, V=V)
        row = (j // COUNT) % KINDS * V.token_groups + j // (COUNT * KINDS)
        tl.store(p + row * V.head_dim + o_d, tl.sum(sums[j], axis=0, keep_dims=True), mask=m_d)
