"""Reference implementation of linear attention in plain PyTorch, for any float dtype and derivatives of any order.

    q̄ = act(norm(q)), q̂ = map(q̄), the same for k        S = Σ_m β_m k̂_m v_mᵀ                o_n = q̂_n S / z_n
    z    "unrotated" max(q̄_n · Σ_m β_m k̄_m, eps)    "encoded" q̂_n · Σ_m β_m k̂_m, o = 0 if |z| < eps    "none" 1

The mask selects the tokens m of the sums: all tokens for "full", all m ≤ n for "causal", and the tokens in n's block
and in all earlier blocks for "block". Causal and block states may decay, and block states may follow the delta rule.
The decay and the delta rule are described in reference_memory.py.

In shapes, B is the batch size, H_q is the number of heads of q, H_k is that of k and v, N is the number of tokens, D
is head_dim, Ê is the width of q̂ and k̂, and D_v is the width of v. Query head h reads key head h // (H_q / H_k).
Sequences are processed in chunks of L tokens, so no matrix is N × N. Computations use float32, or float64 if q is
float64, regardless of autocast and TF32 settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .engine.inductor.private import has_static_value
from .reference import NO_SCALES, Scales, Spec, activate, activate_and_map, no_autocast, normalise
from .reference_memory import accumulate, apply_delta_rule, lay_out_decay, multiply_decay, sum_after
from .reference_products import product

__all__ = [
    "MASKS", "NORMALIZERS", "Angles", "Attention", "Features", "attend", "attend_encoded", "form_features",
    "zero_gated_tokens",
]  # fmt: skip

CHUNK = 64
MASKS = ("full", "causal", "block")


class Attention(NamedTuple):
    """Mask, normaliser and constants of linear attention."""

    normalizer: str = "unrotated"  # | "encoded" | "none"
    mask: str = "full"  # | "causal" | "block"
    block: int = 0  # tokens per block, for mask "block"
    eps: float = 1e-6
    memory: str = "sum"  # | "add" (with decay) | "delta" | "add both" | "delta both" (both directions)

    @property
    def forgets(self) -> bool:
        """Return whether the state is more than a plain sum over tokens (see reference_memory.py)."""
        return self.memory != "sum"

    @property
    def rule(self) -> str:
        """Return "delta" if a block's keys replace old values in the state, or "add" if new values are only added."""
        return "delta" if self.memory.startswith("delta") else "add"

    @property
    def has_both_directions(self) -> bool:
        """Return whether a query also sees the blocks after its own."""
        return self.memory.endswith("both")


class Angles(NamedTuple):
    """Arguments of :func:`lrpe_md.reference.encode` that determine the angles of q or of k."""

    coords: Tensor
    rotated: Tensor | None
    omega: Tensor
    phase: Tensor | None = None
    amplitude: Tensor | None = None


class Features(NamedTuple):
    """Features of q or of k."""

    bar: Tensor  # q̄ or k̄: (B, H, N, D)
    hat: Tensor  # q̂ or k̂: (B, H, N, Ê)


class Normalizer(NamedTuple):
    """Definition of the normaliser z."""

    feature: Callable[[Features], Tensor]  # z_n is q's feature times the sum of k's features; width 0 if z is 1
    divide: Callable[[Tensor, Tensor, float], Tensor]  # o from q̂ S (..., N, D_v), z (..., N, 1) and eps


def _divide_encoded(rows: Tensor, z: Tensor, eps: float) -> Tensor:
    small = z.abs() < eps
    return torch.where(small, 0, rows / torch.where(small, 1, z))


NORMALIZERS: dict[str, Normalizer] = {
    "unrotated": Normalizer(lambda features: features.bar, lambda rows, z, eps: rows / z.clamp_min(eps)),
    "encoded": Normalizer(lambda features: features.hat, _divide_encoded),
    "none": Normalizer(lambda features: features.hat[..., :0], lambda rows, z, eps: rows),
}


# --- features -----------------------------------------------------------------------------------------------------


def form_features(spec: Spec, x: Tensor, angles: Angles | None, scales: Scales = NO_SCALES) -> Features:
    """Return x̄ and x̂ of q or k (B, H, N, D) in at least float32. ``angles`` is None if there is no map."""
    if angles is not None:
        return Features(*activate_and_map(spec, x, *angles, scales))
    with no_autocast(x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if spec.norm != "none":
            x = normalise(spec, x, scales)
        x_bar = activate(x, spec.act, spec.dim or None)
    return Features(x_bar, x_bar)


def zero_gated_tokens(gate: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """Set each x to 0 for tokens with gate 0. These tokens then get no gradient, and their NaN values do not spread."""
    if gate is None:
        return xs
    out = (gate.logical_not() if gate.dtype == torch.bool else gate == 0)[..., None]
    return tuple(torch.where(out, 0, x) for x in xs)


def _factors(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Return β (B, H_k or 1, N, 1), without a gradient for entries that are 0."""
    beta = gate.to(dtype)
    return torch.where(beta == 0, 0, beta)[..., None]


# --- full computation ---------------------------------------------------------------------------------------------


def attend(
    attention: Attention,
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_angles: Angles | None = None,
    k_angles: Angles | None = None,
    scales: tuple[Scales, Scales] = (NO_SCALES, NO_SCALES),
    gate: Tensor | None = None,
    decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Sequence[Tensor] = (),
    ends: tuple[int, int] = (0, 0),
    operands: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output o (B, H_q, N_q, D_v) of linear attention in q's dtype, and the state after the last token.

    Args:
        attention: mask, normaliser and memory.
        spec: norm, activation and map of q and k.
        q, k, v: (B, H_q, N_q, D), (B, H_k, N_k, D) and (B, H_k, N_k, D_v). N_q may differ from N_k with mask "full".
        q_angles, k_angles: angles of q and of k, or None if there is no map.
        scales: weights of the norm for q and for k.
        gate, decay, cu_seqlens: see :func:`lrpe_md.linear_attention`.
        state: sums before the first token, as in :func:`lrpe_md.linear_attention`, but without None. With both
            directions, these are followed by the reverse direction's sums after the last token. The returned state then
            also contains the reverse direction's sums before the first token.
        ends: numbers of prefix and suffix tokens with mask "block". Prefix and suffix are separate blocks.
        operands: dtype to which both factors of each product are rounded, also in the backward pass. Used by tests.
    """
    with no_autocast(q):
        k, v = zero_gated_tokens(gate, k, v)
        q_features = form_features(spec, q, q_angles, scales[0])
        k_features = form_features(spec, k, k_angles, scales[1])
        return attend_encoded(
            attention, q_features, k_features, v, gate=gate, decay=decay, cu_seqlens=cu_seqlens, state=state,
            ends=ends, operands=operands, dtype=q.dtype,
        )  # fmt: skip


class _Terms(NamedTuple):
    """Factors of the products in linear attention."""

    q: Tensor  # q̂ (B, H_q, ..., Ê)
    k: Tensor  # β k̂ (B, H_k, ..., Ê)
    v: Tensor  # (B, H_k, ..., D_v)
    z_q: Tensor  # q's feature for z
    z_k: Tensor  # β times k's feature for z

    def map(self, function: Callable[[Tensor], Tensor]) -> _Terms:
        return _Terms(*map(function, self))


class _State(NamedTuple):
    """State (S, Σ) of linear attention."""

    products: Tensor
    features: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> _State:
        return _State(*map(function, self))

    def join(self, other: _State, function: Callable[..., Tensor], *args: Tensor) -> _State:
        """Combine the fields of two states with ``function(field, other_field, *args)``."""
        return _State(*(function(own, theirs, *args) for own, theirs in zip(self, other, strict=True)))

    def add(self, other: _State) -> _State:
        return self.join(other, torch.add)


def attend_encoded(
    attention: Attention,
    q: Features,
    k: Features,
    v: Tensor,
    *,
    gate: Tensor | None = None,
    decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Sequence[Tensor] = (),
    ends: tuple[int, int] = (0, 0),
    operands: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Implement :func:`attend`, given the features q̄, q̂, k̄ and k̂. The output has dtype ``dtype``."""
    normalizer = NORMALIZERS[attention.normalizer]
    with no_autocast(v):
        wide = torch.promote_types(q.hat.dtype, torch.float32)
        terms = _Terms(q.hat, k.hat, v, normalizer.feature(q), normalizer.feature(k)).map(lambda t: t.to(wide))
        keys = terms  # without the gate, for the delta rule
        if gate is not None:
            beta = _factors(gate, wide)
            terms = terms._replace(k=beta * terms.k, z_k=beta * terms.z_k)
        if cu_seqlens is not None:
            before = _initial(terms, state, cu_seqlens.shape[0] - 1)
            rows, z, last = _attend_packed(attention.mask, terms, before, cu_seqlens, operands, decay)
        elif attention.mask == "block":
            count = len(state) // 2 if attention.has_both_directions else len(state)
            states = _initial(terms, state[:count]), _initial(terms, state[count:])
            rows, z, last = _attend_blocks(attention, terms, keys, states, ends, operands, decay)
        elif attention.mask == "causal":
            rows, z, last = _attend_causal(terms, _initial(terms, state), operands, decay)
        else:
            rows, z, last = _attend_full(terms, _initial(terms, state), operands)
        o = normalizer.divide(rows, z, attention.eps)
        sums = last[::2] if attention.normalizer == "none" else last
        return o.to(dtype or v.dtype).contiguous(), tuple(t.contiguous() for t in sums)


def _initial(terms: _Terms, state: Sequence[Tensor], num_seqs: int = 0) -> _State:
    """Return the state before the first token. Missing sums are zeros."""
    batch, heads = num_seqs or terms.k.shape[0], terms.k.shape[1]
    sizes = (terms.k.shape[-1], terms.v.shape[-1]), (terms.z_k.shape[-1],)
    missing = (terms.k.new_zeros(batch, heads, *size) for size in sizes[len(state) :])
    return _State(*(t.to(terms.k.dtype) for t in state), *missing)


Rows = tuple[Tensor, Tensor, _State]  # q̂ S, z, and the state after the last token


def _sum_keys(terms: _Terms, operands: torch.dtype | None) -> _State:
    """Return the state of tokens (..., N, ·), summed over N."""
    # Not k.mT, here and below, which ONNX's older exporter doesn't support.
    return _State(product(terms.k.transpose(-2, -1), terms.v, operands), terms.z_k.sum(-2))


def _share(t: Tensor, heads: int) -> Tensor:
    """Repeat the key heads of t (B, H_k, ...) to match the query heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], dim=1)


def _read_state(terms: _Terms, state: _State, operands: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return q̂ S and z = z_q · Σ of queries (..., N, ·), where all N tokens read the same state."""
    heads = terms.q.shape[1]
    rows = product(terms.q, _share(state.products, heads), operands)
    return rows, (terms.z_q * _share(state.features, heads)[..., None, :]).sum(-1, keepdim=True)


def _attend_full(terms: _Terms, before: _State, operands: torch.dtype | None) -> Rows:
    state = before.add(_sum_keys(terms, operands))
    return *_read_state(terms, state, operands), state


def _attend_causal(terms: _Terms, before: _State, operands: torch.dtype | None, decay: Tensor | None) -> Rows:
    num_tokens = terms.q.shape[2]
    if has_static_value(num_tokens):
        if num_tokens == 1 and decay is None:
            return _attend_full(terms, before, operands)
        size = max(1, min(CHUNK, num_tokens))
        chunks = -(-num_tokens // size)
    else:
        # Padding by 0 tokens, or a single chunk, would be traced as another graph.
        size, chunks = CHUNK, num_tokens // CHUNK + 2
    pad = chunks * size - num_tokens
    terms = terms.map(lambda t: torch.nn.functional.pad(t, (0, 0, 0, pad)).unflatten(2, (chunks, size)))
    weights = None
    if decay is None:
        through = _accumulate(before, _sum_keys(terms, operands))
    else:
        logs = lay_out_decay(decay, num_tokens, terms.k).log().to(terms.k.dtype)
        logs = torch.nn.functional.pad(logs, (0, pad)).unflatten(2, (chunks, size))
        weights = multiply_decay(logs)
        through = before.join(_sum_decayed(terms, weights, operands), accumulate, multiply_decay(logs.sum(-1)))
    rows, z = _within_chunks(terms, through.map(lambda t: t[:, :, :-1]), operands, decay=weights)
    rows, z = (t.flatten(2, 3)[:, :, :num_tokens] for t in (rows, z))
    return rows, z, through.map(lambda t: t[:, :, -1])


def _accumulate(before: _State, parts: _State) -> _State:
    """Return the states (B, H, C + 1, ...) before each part and after the last one, given parts (B, H, C, ...)."""

    def sums(first: Tensor, each: Tensor) -> Tensor:
        first = first.unsqueeze(2)
        return torch.cat([first, first + each.cumsum(2)], dim=2)

    return before.join(parts, sums)


def _sum_decayed(terms: _Terms, weights: Tensor, operands: torch.dtype | None) -> _State:
    """Sum the states of each chunk's tokens, with the decay up to the end of the chunk.

    ``weights`` is the result of :func:`multiply_decay` for the tokens of each chunk.
    """
    remaining = weights[..., -1, 1:, None]
    return _sum_keys(terms._replace(k=remaining * terms.k, z_k=remaining * terms.z_k), operands)


def _within_chunks(
    terms: _Terms, before: _State, operands: torch.dtype | None, causal: bool = True, decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return q̂ S and z (B, H, C, L, ·), given the state before each chunk.

    If ``causal`` is set, queries also attend to earlier tokens of their chunk and to themselves. ``decay`` is the
    result of :func:`multiply_decay` for the tokens of each chunk.
    """
    rows, z = _read_state(terms, before, operands)
    if not causal:
        return rows, z
    heads = terms.q.shape[1]
    weights = product(terms.q, _share(terms.k, heads).transpose(-2, -1), operands).tril()
    if decay is not None:
        remaining = _share_decay(decay[..., 1:, 0, None], heads)
        rows, z = remaining * rows, remaining * z
        decay = decay[..., 1:, 1:]
        weights = weights * _share_decay(decay, heads)
    rows = rows + product(weights, _share(terms.v, heads), operands)
    sums = terms.z_k.cumsum(-2) if decay is None else product(decay.expand(*terms.z_k.shape[:-1], -1), terms.z_k)
    return rows, z + (terms.z_q * _share(sums, heads)).sum(-1, keepdim=True)


def _share_decay(t: Tensor, heads: int) -> Tensor:
    """Repeat the decays of key heads to match the query heads, unless all heads share one decay (B, 1, ...)."""
    return t if t.shape[1] == 1 else _share(t, heads)


def _cut_blocks(terms: _Terms, ends: tuple[int, int], size: int) -> list[_Terms]:
    """Return the prefix (one block), the blocks of the grid, and the suffix (one block) as (B, H, blocks, tokens, ·).

    There may be no queries, because some calls only compute a state.
    """
    prefix, suffix = ends
    num_blocks = (terms.k.shape[2] - prefix - suffix) // size
    pieces, start = [], 0
    for count, length in ((1, prefix), (num_blocks, size), (1, suffix)):
        stop = start + count * length

        def cut(t: Tensor, a: int = start, b: int = stop, sizes: tuple[int, int] = (count, length)) -> Tensor:
            return t[:, :, a:b].unflatten(2, sizes if t.shape[2] else (sizes[0], 0))

        pieces.append(terms.map(cut))
        start = stop
    return pieces


def _join_blocks(found: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Concatenate the rows and z of the pieces from :func:`_cut_blocks` along the tokens."""
    return [torch.cat([t.flatten(2, 3) for t in ts], dim=2) for ts in zip(*found, strict=True)]


def _attend_blocks(
    attention: Attention, terms: _Terms, keys: _Terms, given: tuple[_State, _State], ends: tuple[int, int],
    operands: torch.dtype | None, decay: Tensor | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Compute block attention. The prefix and the suffix are separate blocks.

    ``keys`` contains the keys without the gate. ``given`` is the state before the first token and, for the reverse
    direction, the state after the last one.
    """
    before, behind = given
    pieces = _cut_blocks(terms, ends, attention.block)
    sizes = [piece.k.shape[2] for piece in pieces]
    parts = _join_states([_sum_keys(piece, operands) for piece in pieces])
    if attention.forgets:
        decay = torch.nn.functional.pad(lay_out_decay(decay, sizes[1], before.products), (1, 1), value=1.0)
    transitions = None
    if attention.rule == "delta":
        # torch.compile unrolls the scan. A static number of tokens keeps each step free of symbolic sizes.
        int(terms.k.shape[2])
        transitions = _join_states([
            _State(product(piece.k.mT, own.k, operands), product(piece.z_k.mT, own.z_k, operands))
            for piece, own in zip(pieces, _cut_blocks(keys, ends, attention.block), strict=True)
        ])  # fmt: skip
    through = _scan_blocks(parts, before, decay, transitions)
    seen, last = through.map(lambda t: t[:, :, 1:]), tuple(through.map(lambda t: t[:, :, -1]))
    if attention.has_both_directions:
        later = _scan_blocks(parts, behind, decay, transitions, backward=True)
        seen = seen.add(later.map(lambda t: t[:, :, :-1].flip(2)))
        last += tuple(later.map(lambda t: t[:, :, -1]))
    states = map(_State, *(t.split(sizes, dim=2) for t in seen))
    rows, z = _join_blocks([_read_state(*each, operands) for each in zip(pieces, states, strict=True)])
    return rows, z, last


def _join_states(states: Sequence[_State]) -> _State:
    """Concatenate states (B, H, blocks, ...) of successive blocks."""
    return _State(*(torch.cat(ts, dim=2) for ts in zip(*states, strict=True)))


def _scan_blocks(
    parts: _State, before: _State, decay: Tensor | None, transitions: _State | None, backward: bool = False
) -> _State:
    """Return the state before each block and after the last one. With ``backward``, scan from the last block.

    ``transitions`` contains each block's matrix A for the delta rule. Without a decay, the state is a plain sum.
    """
    if decay is None:
        return _accumulate(before, parts)

    def order(t: Tensor) -> Tensor:
        return t.flip(2) if backward else t

    parts, decay = parts.map(order), order(decay)
    if transitions is None:
        return before.join(parts, accumulate, multiply_decay(decay.log().to(before.products.dtype)))
    of_blocks = zip(before, parts, transitions.map(order), strict=True)
    return _State(*(apply_delta_rule(start, part, a, decay) for start, part, a in of_blocks))


# --- packed sequences ---------------------------------------------------------------------------------------------


class _Chunks(NamedTuple):
    """Layout of packed tokens in chunks, where each sequence starts a new chunk."""

    source: Tensor  # (C L,): the token in each slot, or N for empty slots
    place: Tensor  # (N,): the slot of each token
    sequence: Tensor  # (C,): the sequence of each chunk, or num_seqs for chunks without a sequence


def _lay_out_chunks(cu_seqlens: Tensor, num_tokens: int) -> _Chunks:
    num_seqs, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    cu_seqlens = cu_seqlens.long()
    chunks = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends = chunks.cumsum(0)  # in chunks
    num_chunks = -(-num_tokens // CHUNK) + num_seqs  # upper bound: each sequence may leave one chunk partly empty
    token = torch.arange(num_tokens, device=device)
    own = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp_max(num_seqs - 1)
    place = (ends - chunks)[own] * CHUNK + token - cu_seqlens[own]
    source = torch.full((num_chunks * CHUNK,), num_tokens, device=device).scatter(0, place, token)
    sequence = torch.searchsorted(ends, torch.arange(num_chunks, device=device), right=True)
    return _Chunks(source, place, sequence)


def _attend_packed(
    mask: str, terms: _Terms, before: _State, cu_seqlens: Tensor, operands: torch.dtype | None, decay: Tensor | None
) -> Rows:  # fmt: skip
    where = _lay_out_chunks(cu_seqlens, terms.q.shape[2])

    def cut(t: Tensor) -> Tensor:
        with_none = torch.nn.functional.pad(t, (0, 0, 0, 1))
        return with_none.index_select(2, where.source).unflatten(2, (-1, CHUNK))

    num_tokens = terms.q.shape[2]
    terms = terms.map(cut)
    # One extra state serves the chunks without a sequence.
    first = before.map(lambda t: torch.cat([t, torch.zeros_like(t[:1])]))
    if decay is not None:
        logs = lay_out_decay(decay, num_tokens, terms.k).log().to(terms.k.dtype)
        logs = cut(logs[..., None]).squeeze(-1)
        rows, z, after = _attend_packed_decaying(terms, first, logs, where.sequence, operands)
    else:
        rows, z, after = _attend_packed_plain(mask, terms, first, where.sequence, operands)
    rows, z = (t.flatten(2, 3).index_select(2, where.place) for t in (rows, z))
    return rows, z, after.map(lambda t: t[:-1])


def _attend_packed_plain(
    mask: str, terms: _Terms, first: _State, sequence: Tensor, operands: torch.dtype | None
) -> Rows:
    """Compute full or causal attention without decay for the chunks of packed sequences."""
    parts = _sum_keys(terms, operands)
    after = first.join(parts, _add_parts, sequence)
    if mask == "causal":
        seen = parts.map(lambda t: _sum_before(t, sequence)).add(first.map(lambda t: _by_chunk(t, sequence)))
    else:
        seen = after.map(lambda t: _by_chunk(t, sequence))
    return *_within_chunks(terms, seen, operands, causal=mask == "causal"), after


def _attend_packed_decaying(
    terms: _Terms, first: _State, logs: Tensor, sequence: Tensor, operands: torch.dtype | None
) -> Rows:
    """Compute causal attention with decay for the chunks of packed sequences.

    ``logs`` is log g of each token (1, H or 1, C, L).
    """
    weights, by_chunk = multiply_decay(logs), logs.sum(-1)
    parts = _sum_decayed(terms, weights, operands)
    same = sequence[:, None] == sequence
    # Chunk c sees part c' after the decay of the chunks in between. It sees the initial state of its sequence after the
    # decay of all earlier chunks of the sequence.
    between = torch.where(same, multiply_decay(by_chunk)[..., :-1, 1:], 0)
    from_start = sum_after(by_chunk.flip(-1), sequence.flip(0)).flip(-1).exp()

    def see(start: Tensor, part: Tensor) -> Tensor:
        size, heads = part.shape[2], part.shape[1]
        found = product(between.expand(1, heads, size, size), part.flatten(3)).view(part.shape)
        return found + _scale_rows(_by_chunk(start, sequence), from_start)

    def finish(start: Tensor, part: Tensor) -> Tensor:
        whole = start.new_zeros(len(start), by_chunk.shape[1]).index_add(0, sequence, by_chunk[0].T).exp()
        return _add_parts(_scale_rows(start, whole), _scale_rows(part, sum_after(by_chunk, sequence).exp()), sequence)

    seen = first.join(parts, see)
    return *_within_chunks(terms, seen, operands, decay=weights), first.join(parts, finish)


def _scale_rows(t: Tensor, factors: Tensor) -> Tensor:
    """Multiply t by factors whose shape matches the leading dimensions of t."""
    return t * factors.reshape(*factors.shape, *(1,) * (t.ndim - factors.ndim))


def _by_chunk(t: Tensor, sequence: Tensor) -> Tensor:
    """Convert states of sequences (num_seqs, H, ...) to states of their chunks (1, H, C, ...)."""
    return t.index_select(0, sequence).transpose(0, 1)[None]


def _add_parts(total: Tensor, parts: Tensor, sequence: Tensor) -> Tensor:
    """Add the parts (1, H, C, ...) of each sequence to the sequence's total (num_seqs, H, ...)."""
    return total.index_add(0, sequence, parts[0].transpose(0, 1))


def _sum_before(parts: Tensor, sequence: Tensor) -> Tensor:
    """Return, for each part, the sum (1, H, C, ...) of all earlier parts of its sequence.

    The sums are not computed as differences of larger sums, because this would lose precision.
    """
    size = parts.shape[2]
    reach, total = 1, parts
    shape = (1, 1, size) + (1,) * (parts.ndim - 3)

    def earlier(t: Tensor, by: int) -> Tensor:
        moved = torch.cat([torch.zeros_like(t[:, :, :by]), t[:, :, : size - by]], dim=2)
        index = (torch.arange(size, device=sequence.device) - by).clamp_min(0)
        same = sequence == sequence[index]
        return torch.where(same.reshape(shape), moved, 0)

    while reach < size:
        total = total + earlier(total, reach)
        reach *= 2
    return earlier(total, 1)
