"""Apply either map after a norm over all heads. A program processes all heads of a token together.

Tiles are (heads, channels) of one token, whereas tiles in encode.py are (tokens, channels) of one head. Here, V.block_n
is the number of heads in a tile, and V.block_r is the number of tiles for all heads. x and dy are read once, and stay
in registers until the sums over all channels are known. All heads share their frequencies, but may have separate
tables of cos and sin.
"""

import triton
import triton.language as tl

from .angles import load_frequencies
from .encode import (
    activate_row,
    activate_row_backward,
    apply_map,
    apply_map_backward,
    form_angle_gradient,
    form_cos_sin,
    load_gradients,
    load_unmapped,
    store_input_gradients,
    store_outputs,
    store_partial,
    store_unmapped,
    weigh_tokens,
)
from .features import load_row, to_tiles
from .norm import (
    add_weight_gradients,
    apply_weight,
    apply_weights,
    combine_gradient,
    find_token_group,
    form_weight_gradients,
    load_weights,
    subtract_mean,
    take_root,
    zero_weight_gradients,
)
from .reduce import launch_next_kernel
from .rows import add_row_products, add_rows, scale_row, sum_row
from .signature import kernel, unpack_numbers
from .tables import load_cos_sin, point_to_tables
from .tiles import (
    first_channel,
    locate_channels,
    point_at,
    point_to_row,
    split_pairs,
    upcast,
    zeros,
)


@triton.jit
def point_to_heads(tensor, token, i: tl.constexpr, V: tl.constexpr):
    """Return a pointer to tile i of a token, and the head and channel strides.

    ``tensor`` holds the pointer and the packed strides (b, n, h, d) of q and of k.
    """
    is_k, b, n = token
    first = tl.full([], i * V.block_n, tl.int32)
    return point_to_row(tensor, is_k, b, n, first, V=V)


@triton.jit
def fetch_ahead(tensor, token, is_there, H, width: tl.constexpr, V: tl.constexpr):
    """Prefetch a token's rows into the L2 cache, in lines of 128 bytes.

    Unlike early loads, prefetching needs no registers.
    """
    if V.functions > 0:
        row = point_to_heads(tensor, token, i=0, V=V)
        LINE: tl.constexpr = 1024 // row[0].dtype.element_ty.primitive_bitwidth
        o_h = tl.arange(0, triton.next_power_of_2(V.block_r * V.block_n))
        o_d = (LINE * tl.arange(0, triton.next_power_of_2((width + LINE - 1) // LINE)))[None, :]
        mask = (o_h < H)[:, None] & (o_d < width) & is_there
        asm: tl.constexpr = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
        pointers = point_at(row, o_h, o_d, V=V).to(tl.int64)
        tl.inline_asm_elementwise(asm, "=r,l,r", [pointers, mask.to(tl.int32)], tl.int32, False, 1)


@triton.jit
def fetch_next(x, dy, is_k, item, counts, H, V: tl.constexpr):
    """Prefetch the rows of x and dy that this program reads next. ``counts`` is (tokens per sample, total tokens)."""
    N, num_items = counts
    b = item // N
    token = (is_k, b, item - b * N)
    fetch_ahead(x, token, item < num_items, H, width=V.head_dim, V=V)
    if V.backward:
        OUT: tl.constexpr = V.head_dim + V.num_channels if V.map == "cosine" else V.head_dim
        fetch_ahead(dy, token, item < num_items, H, width=OUT, V=V)


@triton.jit
def load_gradient_row(row, o_h, m_h, V: tl.constexpr):
    """Load a row of dy in the form that :func:`to_gradient_tiles` expects."""
    halves = () if V.map == "none" else load_gradients(row, o_h, m_h, first_channel(V=V), V=V)
    return halves + load_unmapped(row, o_h, m_h, V=V)


@triton.jit
def to_gradient_tiles(rows, V: tl.constexpr):
    """Convert the result of :func:`load_gradient_row` to the two tiles of the map's output and the other tiles."""
    if V.map == "none":
        return rows
    else:
        first, second = upcast(rows[0], V=V), upcast(rows[1], V=V)
        if V.map != "cosine":
            first, second = split_pairs(first, second, V=V)
        halves = (first, second)
        return halves + rows[2:]


@triton.jit
def centre(row, mean, m_h, V: tl.constexpr):
    """Return x for the heads of a tile. For layer norm, subtract the mean, and set padding heads and channels to 0."""
    x = to_tiles(row, V=V)
    if V.norm == "layer":
        tiles = ()
        x = subtract_mean(x, mean, V=V)
        for i in tl.static_range(len(x)):
            tiles += (tl.where(m_h[:, None], x[i], 0.0),)
        return tiles
    else:
        return x


@triton.jit
def compute_norm_stats(rows, H, share, V: tl.constexpr):
    """Compute the mean (0 for RMS norm) and r over all channels of a token. ``share`` is 1 / number of channels."""
    o_h = tl.arange(0, V.block_n)
    mean = share * 0.0
    if V.norm == "layer":
        total = to_tiles(rows[0], V=V)
        for i in tl.static_range(1, len(rows)):
            total = add_rows(total, to_tiles(rows[i], V=V))
        mean = sum_row(total, V=V, AXIS=None) * share
        # Correct the mean's rounding error. Otherwise, equal channels would not become exactly 0.
        residual = centre(rows[0], mean, o_h < H, V=V)
        for i in tl.static_range(1, len(rows)):
            residual = add_rows(residual, centre(rows[i], mean, i * V.block_n + o_h < H, V=V))
        mean += sum_row(residual, V=V, AXIS=None) * share
    squares = ()
    for i in tl.static_range(len(rows)):
        x = centre(rows[i], mean, i * V.block_n + o_h < H, V=V)
        squares = add_row_products(squares, x, x)
    return mean, take_root(sum_row(squares, V=V, AXIS=None) * share, V=V)


@triton.jit
def normalise_backward(rows, cos_sin, stats, weights, m_h, V: tl.constexpr):
    """Return the gradient of norm(x), along with x̂ and dΘ, for the heads of a tile."""
    xs, gs = rows
    cos, sin = cos_sin
    mean, scale = stats
    x_hat = scale_row(centre(xs, mean, m_h, V=V), scale)
    x = apply_weights(x_hat, weights, V=V)
    x_bar = activate_row(x, 0, V=V)
    dy = to_gradient_tiles(gs, V=V)
    dx_bar = dy if V.map == "none" else apply_map_backward((dy[0], dy[1]), cos, sin, V=V) + dy[2:]
    dangles = x_hat[0]
    if V.need_dangles:
        dangles = form_angle_gradient(x_bar, (dy[0], dy[1]), dx_bar, cos, sin, V=V)
    return activate_row_backward(x, x_bar, dx_bar, V=V), x_hat, dangles


@triton.jit
def store_tile_gradients(p, sums, H, V: tl.constexpr):
    """Store a program's dγ (H, P, D), followed by its dβ (H, P, D)."""
    TILES: tl.constexpr = len(V.begins)
    KINDS: tl.constexpr = V.has_weight + V.has_bias
    COUNT: tl.constexpr = TILES * KINDS * V.token_groups
    o_h = tl.arange(0, V.block_n)[:, None]
    for j in tl.static_range(len(sums)):
        h = j // COUNT * V.block_n + o_h
        o_d, m_d = locate_channels(i=j % TILES, V=V)
        o_row = h * V.token_groups + j % COUNT // (TILES * KINDS)
        if j % COUNT // TILES % KINDS == 1:
            o_row += H * V.token_groups
        tl.store(p + o_row * V.head_dim + o_d, sums[j], mask=(h < H) & m_d)


@triton.jit
def store_heads(row, out, cos_sin, o_h, m_h, V: tl.constexpr):
    """Map x̄ (``out``) to y, and store y. In the backward pass, ``out`` is dx and is stored unchanged."""
    c0 = first_channel(V=V)
    if V.map != "none":
        cos, sin = cos_sin
        if V.backward:
            store_input_gradients(row, out, o_h, m_h, c0, V=V)
        else:
            store_outputs(row, apply_map(out, cos, sin, V=V), o_h, m_h, c0, V=V)
    store_unmapped(row, out, o_h, m_h, V=V)


@triton.jit
def form_token_cos_sin(omega, tables, token, counts, grid, V: tl.constexpr):
    """Return cos Θ and sin Θ of a token, with a row for each head of a tile, and the result of :func:`weigh_tokens`."""
    p_coords, p_origin, p_affine, p_rotated, p_amplitude, cos_sin_tables = tables
    _, b, n = token
    first_index, num_grid, positions_b, rotated_b = counts
    if V.by_sample:
        if V.explicit:
            p_coords += b.to(tl.int64) * positions_b
        elif V.has_origin:
            p_origin += b.to(tl.int64) * positions_b
        if p_rotated is not None:
            p_rotated += b.to(tl.int64) * rotated_b
    positions = (p_coords, p_origin, p_affine, grid)
    o_n = tl.arange(0, V.block_n) * 0
    if V.tables != "none":
        o_n = tl.zeros([1], dtype=tl.int32)  # one row in registers, shared by all heads
        cos_sin_tables = point_to_tables(cos_sin_tables, b, 0, first_channel(V=V), V=V)
    tables_at_token = (p_rotated, p_amplitude, cos_sin_tables, first_index, num_grid)
    o_c = tl.arange(0, V.block_c)
    m_c = None if V.num_channels % V.block_c == 0 else o_c < V.num_channels
    cos, sin, o_g, m_g = form_cos_sin(omega, positions, tables_at_token, n, o_n, o_c, m_c, V=V)
    shares = (0,)
    if V.need_dangles:
        shares = weigh_tokens(o_g, m_g, positions, V=V)
    return cos, sin, shares


@triton.jit
def load_head_cos_sin(tables, token, counts, heads, V: tl.constexpr):
    """Return tuples of cos and sin with an entry for each tile of heads. ``heads`` is (heads, groups of heads)."""
    _, b, n = token
    first_index, num_grid, _, _ = counts
    H, G = heads
    row = n + first_index
    on_grid = (row >= 0) & (row < num_grid)
    tables = point_to_tables(tables, b, tl.where(on_grid, row, 0), first_channel(V=V), V=V)
    TILES: tl.constexpr = V.block_r
    cosines = ()
    sines = ()
    for i in tl.static_range(TILES):
        h = i * V.block_n + tl.arange(0, V.block_n)
        cos, sin = load_cos_sin(tables, h // (H // G), (h < H) & on_grid, V=V)
        cosines += (cos,)
        sines += (sin,)
    return cosines, sines


@triton.jit
def take_tile(cos_sin, i: tl.constexpr, V: tl.constexpr):
    """Return cos and sin of tile i."""
    if V.table_by_head:
        cosines, sines = cos_sin
        return cosines[i], sines[i]
    else:
        return cos_sin


@triton.jit
def load_tile_weights(norm, is_k, H, token_group, i: tl.constexpr, V: tl.constexpr):
    """Load γ and β of the heads of tile i."""
    h = (i * V.block_n + tl.arange(0, V.block_n))[:, None]
    return load_weights(norm, is_k, h, token_group, h < H, V=V)


@triton.jit
def store_mapped(rows, token, H, stats, cos_sin, tile_weights, o, V: tl.constexpr):
    """Compute and store y of a token. ``tile_weights`` holds γ and β of each tile."""
    mean, scale = stats
    o_h = tl.arange(0, V.block_n)
    for i in tl.static_range(len(rows)):
        m_h = i * V.block_n + o_h < H
        x_hat = scale_row(centre(rows[i], mean, m_h, V=V), scale)
        x_bar = activate_row(apply_weights(x_hat, tile_weights[i], V=V), 0, V=V)
        store_heads(point_to_heads(o, token, i=i, V=V), x_bar, take_tile(cos_sin, i=i, V=V), o_h, m_h, V=V)


@triton.jit
def compute_gradient_means(row_pairs, H, stats, share, cos_sin, tile_weights, V: tl.constexpr):
    """Compute mean(g x̂) and, for layer norm, mean(g) over all channels of a token, where g = γ dy."""
    rows, gradients = row_pairs
    for i in tl.static_range(len(rows)):
        m_h = i * V.block_n + tl.arange(0, V.block_n) < H
        tile = (rows[i], gradients[i])
        tile_cos_sin = take_tile(cos_sin, i=i, V=V)
        dy, x_hat, _ = normalise_backward(tile, tile_cos_sin, stats, tile_weights[i], m_h, V=V)
        g = apply_weight(dy, tile_weights[i], V=V)
        dots = add_row_products(() if i == 0 else dots, g, x_hat)
        total = g if i == 0 else add_rows(total, g)
    dot = sum_row(dots, V=V, AXIS=None) * share
    if V.norm == "layer":
        return dot, sum_row(total, V=V, AXIS=None) * share
    else:
        return dot, dot


@triton.jit
def store_gradients(row_pairs, token, H, stats, means, cos_sin, tile_weights, out, V: tl.constexpr):
    """Compute and store dx of a token. Return dΘ, summed over the tiles, and the updated sums for the weights.

    ``out`` is (output tensor for dx, sums for the weights, token group).
    """
    rows, gradients = row_pairs
    o, dweights, group = out
    _, scale = stats
    dot, mean = means
    o_h = tl.arange(0, V.block_n)
    COUNT: tl.constexpr = len(dweights) // len(rows)
    new_sums = ()
    for i in tl.static_range(len(rows)):
        m_h = i * V.block_n + o_h < H
        tile = (rows[i], gradients[i])
        tile_cos_sin = take_tile(cos_sin, i=i, V=V)
        dy, x_hat, tile_dangles = normalise_backward(tile, tile_cos_sin, stats, tile_weights[i], m_h, V=V)
        dangles = tile_dangles if i == 0 else dangles + tile_dangles
        if V.need_dweight:
            products = form_weight_gradients(dy, x_hat, (), V=V)
            new_sums += add_weight_gradients(dweights[i * COUNT : i * COUNT + COUNT], products, group, V=V)
        dx = combine_gradient(apply_weight(dy, tile_weights[i], V=V), x_hat, scale, dot, mean, V=V)
        store_heads(point_to_heads(o, token, i=i, V=V), dx, tile_cos_sin, o_h, m_h, V=V)
    return dangles, new_sums


# Number of tokens over which the gradients of weights are summed in float32, because float64 takes twice the registers.
TOKENS = tl.constexpr(16)


@kernel
def heads_kernel(
    x: "tensors", dy: "tensors", o: "tensors", tables: "tables", norm: "norm", sums: "sums", numbers: "numbers",
    V: tl.constexpr,
):  # fmt: skip
    """Apply a norm over all heads and then either map, forward or backward, to one tensor or to q and k.

    The first programs process the tokens of q, and the remaining programs process the tokens of k.

    Args:
        x, dy, o: pointer and strides (b, n, h, d) of q and of k.
        tables: pointers, and tables of cos and sin, as in :func:`lrpe_kernel`.
        norm: pointers to the weight and bias of q and of k.
        sums: pointers to partial sums (programs, J, C) for dω and dφ, and (programs, ...) for dγ and dβ.
    """
    counts, axes = numbers
    N, first_index, num_grid, positions_b, rotated_b, heads_q, heads_k, G, num_q, num_items, width = unpack_numbers(
        counts
    )
    token_counts = (first_index, num_grid, positions_b, rotated_b)
    grid = unpack_numbers(axes)
    p_omega, p_phase, p_coords, p_origin, p_affine, p_rotated, p_amplitude, cos_sin_tables = tables
    p_partial, p_dweight = sums
    pid = tl.program_id(0)
    is_k = pid >= num_q
    H = tl.where(is_k, heads_k, heads_q)
    step = tl.where(is_k, tl.num_programs(0) - num_q, num_q)
    # div_rn rounds in the same way whether or not H is compiled in.
    share = 1.0 / (H * V.head_dim).to(tl.float64) if V.wide else tl.div_rn(1.0, (H * V.head_dim).to(tl.float32))
    o_h = tl.arange(0, V.block_n)
    TILES: tl.constexpr = V.block_r
    J: tl.constexpr = V.num_axes + 1 if V.has_phase else V.num_axes
    omega = 0
    o_c = tl.arange(0, V.block_c)
    m_c = None if V.num_channels % V.block_c == 0 else o_c < V.num_channels
    if V.map != "none":
        omega = load_frequencies(p_omega, p_phase, o_c, m_c, V=V)
    if V.early:
        launch_next_kernel()
    total = (zeros(V=V, dtype=tl.float64),) * J if V.need_dangles else ()
    dweights = zero_weight_gradients(dtype=tl.float64, V=V) * TILES
    shared_weights = ()
    if V.token_groups == 1:
        for i in tl.static_range(TILES):
            shared_weights += (load_tile_weights(norm, is_k, H, 0, i=i, V=V),)
    for first in tl.range(tl.where(is_k, pid - num_q, pid), num_items, step * TOKENS):
        recent_sums = zero_weight_gradients(dtype=tl.float64 if V.wide else tl.float32, V=V) * TILES
        for item in tl.range(first, tl.minimum(first + step * TOKENS, num_items), step):
            b = item // N
            n = item - b * N
            token = (is_k, b, n)
            rows = ()
            gradients = ()
            for i in tl.static_range(TILES):
                m_h = i * V.block_n + o_h < H
                rows += (load_row(point_to_heads(x, token, i=i, V=V), o_h, m_h, V=V),)
                if V.backward:
                    gradients += (load_gradient_row(point_to_heads(dy, token, i=i, V=V), o_h, m_h, V=V),)
            fetch_next(x, dy, is_k, item + step, counts=(N, num_items), H=H, V=V)
            cos, sin, shares = 0, 0, 0
            if V.table_by_head:
                cos, sin = load_head_cos_sin(cos_sin_tables, token, token_counts, (H, G), V=V)
            elif V.map != "none":
                pointers = (p_coords, p_origin, p_affine, p_rotated, p_amplitude, cos_sin_tables)
                cos, sin, shares = form_token_cos_sin(omega, pointers, token, token_counts, grid, V=V)
            cos_sin = (cos, sin)
            group = find_token_group(n + first_index, num_grid, V=V)
            weights = shared_weights
            if V.token_groups > 1:
                for i in tl.static_range(TILES):
                    weights += (load_tile_weights(norm, is_k, H, group, i=i, V=V),)
            stats = compute_norm_stats(rows, H, share, V=V)
            if V.backward:
                row_pairs = (rows, gradients)
                means = compute_gradient_means(row_pairs, H, stats, share, cos_sin, weights, V=V)
                out = (o, recent_sums, group)
                dangles, recent_sums = store_gradients(row_pairs, token, H, stats, means, cos_sin, weights, out, V=V)
                if V.need_dangles:
                    new_total = ()
                    for j in tl.static_range(J):
                        new_total += (total[j] + shares[j][:, None] * dangles.to(tl.float64),)
                    total = new_total
            else:
                store_mapped(rows, token, H, stats, cos_sin, weights, o, V=V)
        dweights = add_rows(dweights, recent_sums)
    if V.need_dangles:
        store_partial(p_partial + pid.to(tl.int64) * (J * V.num_channels), total, 0, o_c, m_c, V=V)
    if V.need_dweight:
        store_tile_gradients(p_dweight + pid.to(tl.int64) * width, dweights, H, V=V)
