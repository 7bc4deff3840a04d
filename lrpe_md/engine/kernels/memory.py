"""Kernels for states that decay or follow the delta rule from block to block: S_f = g_f (I − A_f) S_{f−1} + B_f.

These kernels compute A_f = Σ β k̂ k̂ᵀ for all blocks in parallel, scan over the blocks, and backpropagate through A and
B to the keys. The kernels in linear.py compute B_f and read the states. The scan runs in float32, because I − A would
lose too much precision in 16 bits. If V.memory is "add", A is 0. As in linear.py, states are stored transposed. A is
symmetric, so the rows of Sᵀ are independent of each other. The sums of the normaliser are one more row of Sᵀ.

Names are the same as in linear.py. In addition, M = dA + dAᵀ = −g (dS Sᵀ + S dSᵀ), where S is the state before a block.
"""

import triton
import triton.language as tl

from .features import (
    empty_total,
    empty_weight_sums,
    form_block_cos_sin,
    load_gate,
    load_row,
    load_side,
    locate_tensor,
    locate_tensors,
    map_features,
    map_features_backward,
    multiply,
    normalise_tokens,
    store_total,
    store_values,
    store_weight_sums,
    to_operand,
    to_tiles,
    zero_gated_tokens,
)
from .linear import (
    activate_tokens,
    add_scaled,
    apply_state,
    empty,
    find_features,
    form_keys,
    gate_keys,
    load_slot,
    load_sums,
    locate_piece,
    multiply_tiles,
    row_dot,
    store_gate,
    store_key_gradients,
    to_operands,
    to_rows,
)
from .rows import add_rows, scale_row
from .signature import kernel, unpack_numbers
from .tiles import move_tokens

# --- A ---------------------------------------------------------------------------------------------------------------


@triton.jit
def form_weighted_keys(k_head, gate, side, place, COUNTS: tl.constexpr, V: tl.constexpr):
    """Return the features of keys n0 + o_n, and the same features times β. COUNTS selects k̄ instead of k̂."""
    b, h, n0, o_n, m_n = place
    k = to_tiles(load_row(move_tokens(k_head, n0, V=V), o_n, m_n, V=V), V=V)
    if V.gated:
        beta = load_gate(gate, b, h, n0 + o_n, m_n, V=V)
        k = zero_gated_tokens(k, beta)
    k = normalise_tokens(k, side, n0, o_n, V=V)
    x = activate_tokens(k, m_n, TOKENS=True, V=V)
    if not COUNTS:
        x = map_features(x, form_block_cos_sin(side, n0, o_n, V=V), V=V)
    if V.gated:
        return x, scale_row(x, beta[:, None])
    else:
        return x, x


@triton.jit
def sum_columns_of_keys(k, gate, side, walk, r: tl.constexpr, COUNTS: tl.constexpr, V: tl.constexpr):
    """Compute column tile r of A from tokens [begin, end) of one head."""
    b, h, begin, end = walk
    o_n = tl.arange(0, V.block_n)
    k_head = locate_tensor(k, b, h, V=V)
    BLOCKS: tl.constexpr = V.sum_blocks if COUNTS else V.feature_blocks
    A = ()  # one tile for each row tile
    for i in tl.static_range(len(BLOCKS)):
        A += (empty(ROWS=BLOCKS[i], COLUMNS=BLOCKS[r], V=V),)
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        place = (b, h, n0, o_n, n0 + o_n < end)
        x, weighted = form_weighted_keys(k_head, gate, side, place, COUNTS=COUNTS, V=V)
        column = to_operand(x[r], V=V)
        new_A = ()
        for i in tl.static_range(len(A)):
            new_A += (multiply(tl.trans(to_operand(weighted[i], V=V)), column, A[i], V=V),)
        A = new_A
    return A


@triton.jit
def store_columns(p, A, r: tl.constexpr, WIDTH: tl.constexpr, COUNTS: tl.constexpr, V: tl.constexpr):
    o_c, m_c = find_features(i=r, COUNTS=COUNTS, V=V)
    for i in tl.static_range(len(A)):
        o_r, m_r = find_features(i=i, COUNTS=COUNTS, V=V)
        tl.store(p + tl.trans(o_r) * WIDTH + o_c, A[i], mask=tl.trans(m_r) & m_c)


@kernel
def linear_transition_kernel(k, gate, side, p_transitions, blocks: "sizes", sizes: "sizes", V: tl.constexpr):
    """Compute the matrix A of each block, with one program for each column tile of a matrix.

    The output has shape (F, B G, Ê²), or (F, B G, Ê² + D²) for normalizer "unrotated". The last D² elements are the
    matrix A for the normaliser's sums.
    """
    G, F, B = unpack_numbers(sizes)
    FEATURE_TILES: tl.constexpr = len(V.feature_blocks)
    TILES: tl.constexpr = FEATURE_TILES + (len(V.sum_blocks) if V.normalizer == "unrotated" else 0)
    pid = tl.program_id(0) // TILES
    tile = tl.program_id(0) - pid * TILES
    block, b, g, begin, end, _ = locate_piece(blocks, pid, (G, F))
    side = (side, load_side(side, b, g, g, V=V))
    walk = (b, g, begin, end)
    MATRIX: tl.constexpr = V.num_features * V.num_features
    EXTRA: tl.constexpr = V.num_sums * V.num_sums if V.normalizer == "unrotated" else 0
    p = p_transitions + (tl.cast(block, tl.int64) * B * G + b * G + g) * (MATRIX + EXTRA)
    for r in tl.static_range(FEATURE_TILES):
        if tile == r:
            A = sum_columns_of_keys(k, gate, side, walk, r=r, COUNTS=False, V=V)
            store_columns(p, A, r=r, WIDTH=V.num_features, COUNTS=False, V=V)
    if V.normalizer == "unrotated":
        for r in tl.static_range(len(V.sum_blocks)):
            if tile == FEATURE_TILES + r:
                A = sum_columns_of_keys(k, gate, side, walk, r=r, COUNTS=True, V=V)
                store_columns(p + MATRIX, A, r=r, WIDTH=V.num_sums, COUNTS=True, V=V)


# --- from block to block -----------------------------------------------------------------------------------------


@triton.jit
def multiply_precisely(a, b, acc, V: tl.constexpr):
    """Return a @ b + acc with about the precision of the accumulator. 16-bit inputs need only three TF32 products."""
    if V.wide:
        return tl.dot(a, b, acc, out_dtype=tl.float64)
    elif V.fast:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_rows(p, o_r, num_rows, width, V: tl.constexpr):
    """Load rows o_r of Sᵀ as a tuple of column tiles."""
    S = ()
    for i in tl.static_range((V.width + V.block_c - 1) // V.block_c):
        o, mask = place_rows(o_r, num_rows, width, i=i, V=V)
        S += (tl.load(p + o, mask=mask, other=0.0).to(tl.float64 if V.wide else tl.float32),)
    return S


@triton.jit
def place_rows(o_r, num_rows, width, i: tl.constexpr, V: tl.constexpr):
    """Return the offsets and the mask of column tile i in rows o_r of Sᵀ."""
    o_c = i * V.block_c + tl.arange(0, V.block_c)[None, :]
    return o_r[:, None] * width + o_c, (o_r < num_rows)[:, None] & (o_c < width)


@triton.jit
def store_rows(p, S, o_r, num_rows, width, V: tl.constexpr):
    for i in tl.static_range(len(S)):
        o, mask = place_rows(o_r, num_rows, width, i=i, V=V)
        tl.store(p + o, S[i], mask=mask)


@triton.jit
def store_block_state(slots, index, S, o_r, width, is_sums, V: tl.constexpr):
    """Store rows of a state in the form that tokens read: Sᵀ as operands, and the normaliser's sums.

    ``index`` is the index of a block and a head. ``is_sums`` tells whether the rows are "unrotated" sums. Encoded sums
    are the row after Sᵀ.
    """
    p_slots, p_slot_sums = slots
    SIZE: tl.constexpr = V.v_dim * V.num_features
    num_rows = tl.where(is_sums, 0, V.v_dim)
    row_of_sums = tl.where(is_sums, 0, V.v_dim if V.normalizer == "encoded" else -1)
    for i in tl.static_range(len(S)):
        o, mask = place_rows(o_r, num_rows, width, i=i, V=V)
        tl.store(p_slots + index * SIZE + o, S[i].to(p_slots.dtype.element_ty), mask=mask)
        if V.normalizer != "none":
            o, mask = place_rows(o_r - row_of_sums, 1, width, i=i, V=V)
            tl.store(p_slot_sums + index * V.num_sums + o, S[i], mask=mask & (o_r == row_of_sums)[:, None])


@triton.jit
def empty_rows(V: tl.constexpr):
    """Return zero-filled column tiles for V.block_r rows of Sᵀ."""
    TILES: tl.constexpr = (V.width + V.block_c - 1) // V.block_c
    return (empty(ROWS=V.block_r, COLUMNS=V.block_c, V=V),) * TILES


@triton.jit
def sum_rows(p_parts, pieces, steps, o_r, num_rows, width, V: tl.constexpr):
    """Sum rows o_r of B over the pieces of a block and over the R heads of each piece."""
    first, last = pieces
    row, rows, R, size = steps
    total = empty_rows(V=V)
    for p in range(first, last):
        for r in range(R):
            p_rows = p_parts + ((tl.cast(p, tl.int64) * rows + row) * R + r) * size
            total = add_rows(total, load_rows(p_rows, o_r, num_rows, width, V=V))
    return total


@triton.jit
def load_transition(p_transitions, f, step, width, V: tl.constexpr):
    """Load the matrix A of block f as tiles in row-major order. Return () if V.memory is "add"."""
    A = ()
    if V.memory == "delta":
        p_matrix = p_transitions + f * step
        for i in tl.static_range((V.width + V.block_c - 1) // V.block_c):
            o_r = i * V.block_c + tl.arange(0, V.block_c)
            A += load_rows(p_matrix, o_r, width, width, V=V)
    return A


@triton.jit
def apply_transition(S, A, V: tl.constexpr):
    """Remove a block's keys from the state: return Sᵀ (I − A). If V.memory is "add", return Sᵀ unchanged."""
    if V.memory == "add":
        return S
    else:
        new_S = ()
        for j in tl.static_range(len(S)):
            product = empty(ROWS=V.block_r, COLUMNS=V.block_c, V=V)
            for i in tl.static_range(len(S)):
                product = multiply_precisely(S[i], A[i * len(S) + j], product, V=V)
            new_S += (S[j] - product,)
        return new_S


@triton.jit
def sum_products(x, y):
    """Return the sum of x * y over all elements of all tiles, in float64."""
    total = tl.sum(x[0].to(tl.float64) * y[0].to(tl.float64))
    for i in tl.static_range(1, len(x)):
        total += tl.sum(x[i].to(tl.float64) * y[i].to(tl.float64))
    return total


@kernel
def linear_memory_scan_kernel(parts, p_decay, series, p_offsets, numbers: "sizes", V: tl.constexpr):
    """Scan over the blocks: compute the state before each block and the state after the last one.

    In a forward scan, the state before block f is stored at index f and the final state at index F. In a backward scan,
    these states are stored at f + 1 and 0. Each program scans a few rows of Sᵀ. If the normaliser is "unrotated", one
    more program per head scans the normaliser's sums with a separate A. To differentiate a scan, set V.adds_first, so
    that each part is added before the state is stored, not after.

    Args:
        parts: B (P, B G R, size), which is summed over R heads; A (F, B G, elements); and the initial state (B G, size)
            or None.
        p_decay: decay factors (F, B G).
        series: the output (F + 1, B G, size). With V.need_ddecay, also the series of the scan being differentiated, and
            the output for partial sums of dg (programs of a head, F, B G). Last come the slots, or (None, None). In a
            forward scan, the slots receive the states that the tokens of each block read. In a backward scan with
            V.adds_first, they receive the gradients of these states.
        p_offsets: index of the first piece of each block (F + 1).
        numbers: counts, the numbers of elements in a state and in a block's A, and four numbers each for Sᵀ and for
            the sums: the number of rows, the width of a row, and the offsets of the rows and of A. With V.aligned,
            widths, offsets and numbers of elements are in units of 4 elements.
    """
    UNIT: tl.constexpr = 4 if V.aligned else 1
    p_parts, p_transitions, p_first = parts
    p_series, p_partner, p_ddecay, slots = series
    p_slots, _p_slot_sums = slots
    counts, totals, matrix, sums = numbers
    rows, R, F, backward = unpack_numbers(counts)
    size, transition = unpack_numbers(totals)
    num_rows, width, begin, matrix_begin = unpack_numbers(matrix)
    num_sums, sum_width, sum_begin, sum_matrix_begin = unpack_numbers(sums)
    blocks = (num_rows + V.block_r - 1) // V.block_r
    row = tl.program_id(0) // (blocks + num_sums)
    block = tl.program_id(0) - row * (blocks + num_sums)
    o_r = block * V.block_r + tl.arange(0, V.block_r)
    is_sums = block == blocks
    if is_sums:
        num_rows, width, begin, matrix_begin = num_sums, sum_width, sum_begin, sum_matrix_begin
        o_r = tl.arange(0, V.block_r)
    size, width, transition = size * UNIT, width * UNIT, transition * UNIT
    p_parts, p_series = p_parts + begin * UNIT, p_series + begin * UNIT
    if V.memory == "delta":
        p_transitions += matrix_begin * UNIT + tl.cast(row, tl.int64) * transition
    offset = tl.where(backward != 0, 1, 0)
    first, step = tl.where(backward != 0, F - 1, 0), tl.where(backward != 0, -1, 1)
    S = empty_rows(V=V)
    if p_first is not None:
        p_initial = p_first + tl.cast(row, tl.int64) * size + begin * UNIT
        S = add_rows(S, load_rows(p_initial, o_r, num_rows, width, V=V))
    for i in range(F):
        f = first + i * step
        slot = tl.cast(f, tl.int64) * rows + row
        A = load_transition(p_transitions, f, tl.cast(rows, tl.int64) * transition, width, V=V)  # early: loads are slow
        pieces = (tl.load(p_offsets + f), tl.load(p_offsets + f + 1))
        part = sum_rows(p_parts, pieces, (row, rows, R, size), o_r, num_rows, width, V=V)
        if V.adds_first:
            S = add_rows(S, part)
        store_rows(
            p_series + (tl.cast(f + offset, tl.int64) * rows + row) * size, S, o_r, num_rows, width, V=V
        )  # fmt: skip
        if V.adds_first:
            if p_slots is not None:
                store_block_state(slots, slot, S, o_r, width, is_sums, V=V)
        S = apply_transition(S, A, V=V)
        if V.need_ddecay:
            p_other = p_partner + (tl.cast(f + 1 - offset, tl.int64) * rows + row) * size + begin * UNIT
            ddecay = sum_products(S, load_rows(p_other, o_r, num_rows, width, V=V))
            tl.store(p_ddecay + (tl.cast(block, tl.int64) * F + f) * rows + row, ddecay)
        S = scale_row(S, tl.load(p_decay + slot))
        if not V.adds_first:
            S = add_rows(S, part)
            if p_slots is not None:
                store_block_state(slots, slot, S, o_r, width, is_sums, V=V)
    last = tl.where(backward != 0, 0, F)
    store_rows(p_series + (tl.cast(last, tl.int64) * rows + row) * size, S, o_r, num_rows, width, V=V)


# --- gradients -----------------------------------------------------------------------------------------------------


@triton.jit
def load_columns(p, num_rows, v0, i, V: tl.constexpr):
    """Load column tile i of V.block_r rows of Sᵀ, starting at row v0."""
    o_r = v0 + tl.arange(0, V.block_r)
    o_c = i * V.block_c + tl.arange(0, V.block_c)[None, :]
    mask = (o_r < num_rows)[:, None] & (o_c < V.width)
    return tl.load(p + o_r[:, None] * V.width + o_c, mask=mask, other=0.0)


@triton.jit
def add_gradient(total, p_state, p_gradient, num_rows, tile, V: tl.constexpr):
    """Return total plus one tile of dS Sᵀ + S dSᵀ. ``tile`` is the row and column index of this tile."""
    i, j = tile
    for v0 in range(0, num_rows, V.block_r):
        dS_i = to_operand(load_columns(p_gradient, num_rows, v0, i, V=V), V=V)
        S_j = to_operand(load_columns(p_state, num_rows, v0, j, V=V), V=V)
        total = multiply(tl.trans(dS_i), S_j, total, V=V)
        S_i = to_operand(load_columns(p_state, num_rows, v0, i, V=V), V=V)
        dS_j = to_operand(load_columns(p_gradient, num_rows, v0, j, V=V), V=V)
        total = multiply(tl.trans(S_i), dS_j, total, V=V)
    return total


@kernel
def linear_transition_gradient_kernel(forward, backward, p_decay, p_out, sizes: "sizes", V: tl.constexpr):
    """Compute M (F, B G, Ê²), with one program per tile.

    ``forward`` and ``backward`` are pairs of the states that enter each block and their gradients, all of shape (F, B
    G, size). Without a backward scan, ``backward`` is (None, None). With V.aligned, size is in units of 4 elements.
    """
    UNIT: tl.constexpr = 4 if V.aligned else 1
    p_state, p_gradient = forward
    p_backward_state, p_backward_gradient = backward
    num_rows, size = unpack_numbers(sizes)
    size = size * UNIT
    TILES: tl.constexpr = (V.width + V.block_c - 1) // V.block_c
    pid = tl.program_id(0)
    index = tl.cast(pid // (TILES * TILES), tl.int64)  # index of a block and a head
    tile = pid % (TILES * TILES)
    i = tile // TILES
    j = tile - i * TILES
    total = empty(ROWS=V.block_c, COLUMNS=V.block_c, V=V)
    total = add_gradient(total, p_state + index * size, p_gradient + index * size, num_rows, (i, j), V=V)
    if p_backward_state is not None:
        total = add_gradient(
            total, p_backward_state + index * size, p_backward_gradient + index * size, num_rows, (i, j), V=V
        )
    total = total * -tl.load(p_decay + index)
    o_r = i * V.block_c + tl.arange(0, V.block_c)[:, None]
    o_c = j * V.block_c + tl.arange(0, V.block_c)[None, :]
    p = p_out + index * (V.width * V.width) + o_r * V.width + o_c
    tl.store(p, total.to(p_out.dtype.element_ty), mask=(o_r < V.width) & (o_c < V.width))


@triton.jit
def load_matrix(p, V: tl.constexpr):
    """Load M as a tuple of operand tiles in row-major order."""
    M = ()
    for i in tl.static_range(len(V.feature_blocks)):
        o_r, m_r = find_features(i=i, COUNTS=False, V=V)
        for j in tl.static_range(len(V.feature_blocks)):
            o_c, m_c = find_features(i=j, COUNTS=False, V=V)
            values = tl.load(p + tl.trans(o_r) * V.num_features + o_c, mask=tl.trans(m_r) & m_c, other=0.0)
            M += (to_operand(values, V=V),)
    return M


@triton.jit
def apply_matrix(x, M, V: tl.constexpr):
    """Multiply x, of shape (tokens, features), by M.

    The comment above :func:`multiply_tiles` explains why tokens are the columns of the products.
    """
    result = ()
    for i in tl.static_range(len(x)):
        total = empty(ROWS=V.feature_blocks[i], COLUMNS=V.block_n, V=V)
        for j in tl.static_range(len(x)):
            total = multiply(M[i * len(x) + j], tl.trans(to_operand(x[j], V=V)), total, V=V)
        result += (tl.trans(total),)
    return result


@triton.jit
def apply_vectors(x_bar, p_vectors, V: tl.constexpr):
    """Multiply x̄ by the normaliser's M = Σ (u wᵀ + w uᵀ), summed over pairs of vectors (u, w)."""
    result = ()
    for i in tl.static_range(len(x_bar)):
        result += (x_bar[i] * 0.0,)
    SCANS: tl.constexpr = V.num_scans
    for pair in tl.static_range(SCANS):
        u = to_rows(load_sums(p_vectors + 2 * pair * V.num_sums, V=V))
        w = to_rows(load_sums(p_vectors + (2 * pair + 1) * V.num_sums, V=V))
        from_u = row_dot(broadcast_rows(u, x_bar), x_bar)
        from_w = row_dot(broadcast_rows(w, x_bar), x_bar)
        result = add_scaled(add_scaled(result, u, from_w), w, from_u)
    return result


@triton.jit
def broadcast_rows(rows, like):
    """Broadcast each tile of rows, of shape (1, channels), to all tokens."""
    result = ()
    for i in tl.static_range(len(rows)):
        result += (tl.broadcast_to(rows[i], [like[i].shape[0], like[i].shape[1]]),)
    return result


@triton.jit
def write_delta_gradients(tensors, gates, side, grads, walk, V: tl.constexpr):
    """Compute and store the delta rule's dk, dv and dβ for tokens [begin, end) of one head.

    Return the sums for dω and the sums for the norm's weights. ``tensors`` is (k, v, dk, dv), and ``gates`` is (β, dβ).
    ``grads`` is (dS, dZ, M, p_vectors), with dS as operands. p_vectors points to the pairs of :func:`apply_vectors`.
    """
    sums = (empty_total(V=V), empty_weight_sums(V=V))
    gate, dgate = gates
    dS, dZ, M, p_vectors = grads
    b, h, begin, end = walk
    o_n = tl.arange(0, V.block_n)
    k_head, v_head, dk_head, dv_head = locate_tensors(tensors, b, h, V=V)
    ACC: tl.constexpr = tl.float64 if V.wide else tl.float32
    for n0 in tl.range(begin, end, V.block_n, num_stages=V.stages):
        m_n = n0 + o_n < end
        place = (b, h, n0, o_n, m_n)
        rows = (move_tokens(k_head, n0, V=V), move_tokens(v_head, n0, V=V))
        x, x_bar, v_block, beta, cos_sin = form_keys(rows, gate, side, place, V=V)
        weight = m_n.to(ACC)  # 0 for tokens beyond the end
        x_hat = map_features(x_bar, cos_sin, V=V)
        from_state = multiply_tiles(to_operands(v_block, V=V), dS, V=V)
        if V.normalizer == "encoded":
            from_state = add_scaled(from_state, to_rows(dZ), weight)
        from_transition = apply_matrix(x_hat, M, V=V)
        vectors = ()
        if V.normalizer == "unrotated":
            vectors = apply_vectors(x_bar, p_vectors, V=V)
        if V.gated:
            if V.need_dgate:  # A is a product of two keys, and β multiplies only one of them
                dbeta = row_dot(x_hat, from_state) + 0.5 * row_dot(x_hat, from_transition)
                if V.normalizer == "unrotated":
                    dbeta += row_dot(broadcast_rows(to_rows(dZ), x_bar), x_bar) + 0.5 * row_dot(x_bar, vectors)
                store_gate(dgate, dbeta, beta, place)
            weight *= beta
        weighted_x = gate_keys(x_hat, weight, V=V)
        store_values(move_tokens(dv_head, n0, V=V), apply_state(weighted_x, dS, V=V), o_n, m_n, V=V)
        dx_hat = add_rows(from_state, from_transition)
        dx_bar, dangles = map_features_backward(x_bar, dx_hat, cos_sin, V=V)
        if V.normalizer == "unrotated":
            dx_bar = add_rows(add_scaled(dx_bar, to_rows(dZ), m_n.to(ACC)), vectors)
        tokens = (x, x_bar, cos_sin)
        sums = store_key_gradients(dk_head, tokens, (dx_bar, dangles), sums, side, place, weight, V=V)
    return sums


@kernel
def linear_memory_key_kernel(
    tensors, gates, side, slots, matrices, p_partial, pieces: "sizes", sizes: "sizes", V: tl.constexpr
):  # fmt: skip
    """Compute the delta rule's dk, dv, dβ and sums for dω.

    ``tensors`` is (k, v, dk, dv), ``slots`` is (dS, dZ) of each block, and ``matrices`` is (M, vectors).
    """
    p_matrices, p_vectors = matrices
    G, P, B = unpack_numbers(sizes)
    piece, b, g, begin, end, slot = locate_piece(pieces, tl.program_id(0), (G, P))
    row = tl.cast(slot, tl.int64) * B * G + b * G + g
    dS, dZ = load_slot(slots, row, V=V)
    M = load_matrix(p_matrices + row * (V.num_features * V.num_features), V=V)
    if p_vectors is not None:
        p_vectors += row * (2 * V.num_scans * V.num_sums)
    side = (side, load_side(side, b, g, g, V=V))
    grads = (dS, dZ, M, p_vectors)
    total, dweights = write_delta_gradients(tensors, gates, side, grads, (b, g, begin, end), V=V)
    store_weight_sums(side, (g * B + b) * P + piece, dweights, V=V)
    store_total(p_partial, tl.cast(piece, tl.int64) * B * G + b * G + g, total, V=V)
