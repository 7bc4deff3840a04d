"""The specification of linear attention, in torch alone: any float dtype, differentiable to any order.

    q̄ = act(norm(q)), q̂ = map(q̄), k alike                S = Σ_m β_m k̂_m v_mᵀ                 o_n = q̂_n S / z_n
    z    "unrotated" max(q̄_n · Σ_m β_m k̄_m, eps)    "encoded" q̂_n · Σ_m β_m k̂_m, o = 0 where |z| < eps    "none" 1
    the sums are over all tokens m ("full"), over m ≤ n ("causal"), or over the blocks up to n's own ("block")

Shapes: B batch, H heads (H_q of q, H_k of k and v: query head h has key head h // (H_q / H_k)), N tokens, D head_dim,
Ê what the map makes of it, D_v of v, G = H_q / H_k. Sequences are cut into chunks of L tokens: no table is N × N.
Arithmetic is float32, or float64 where q is, whatever autocast and the precision of float32 products are set to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .engine.inductor.private import are_transforms_active, has_static_value
from .reference import NO_SCALES, Scales, Spec, activate, activate_and_map, no_autocast, normalise

__all__ = [
    "MASKS", "NORMALIZERS", "Angles", "Attention", "Features", "attend", "attend_encoded", "form_features", "product",
    "zero_gated_tokens",
]  # fmt: skip

CHUNK = 64
MASKS = ("full", "causal", "block")


class Attention(NamedTuple):
    """Mask, normaliser and constants of linear attention."""

    normalizer: str = "unrotated"  # | "encoded" | "none"
    mask: str = "full"  # | "causal" | "block"
    block: int = 0  # tokens of a block, for mask "block"
    eps: float = 1e-6


class Angles(NamedTuple):
    """Arguments of :func:`lrpe_md.reference.encode` that determine the angles of q or of k."""

    coords: Tensor
    rotated: Tensor | None
    omega: Tensor
    phase: Tensor | None = None
    amplitude: Tensor | None = None


class Features(NamedTuple):
    """Features of q or of k."""

    bar: Tensor  # activated: (B, H, N, D)
    hat: Tensor  # and mapped: (B, H, N, Ê)


class Normalizer(NamedTuple):
    """z of a row."""

    feature: Callable[[Features], Tensor] | None  # z is q's times the sum of k's; None: z is 1
    divide: Callable[[Tensor, Tensor, float], Tensor]  # o from q̂ S (.., N, D_v), z (.., N, 1) and eps


def _divide_encoded(rows: Tensor, z: Tensor, eps: float) -> Tensor:
    small = z.abs() < eps
    return torch.where(small, 0, rows / torch.where(small, 1, z))


NORMALIZERS: dict[str, Normalizer] = {
    "unrotated": Normalizer(lambda features: features.bar, lambda rows, z, eps: rows / z.clamp_min(eps)),
    "encoded": Normalizer(lambda features: features.hat, _divide_encoded),
    "none": Normalizer(None, lambda rows, z, eps: rows),
}


# --- products -----------------------------------------------------------------------------------------------------


@contextmanager
def _exact_products(x: Tensor) -> Iterator[None]:
    """float32 products in float32: no autocast, no TF32, and on a CPU no bfloat16."""
    backends: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore
    before = [(backend, backend.fp32_precision) for backend in backends]
    loose = [(backend, precision) for backend, precision in before if precision not in ("ieee", "none")]
    if not loose and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        yield
        return
    try:
        for backend, _ in loose:
            backend.fp32_precision = "ieee"
        with no_autocast(x):
            yield
    finally:
        for backend, precision in loose:
            backend.fp32_precision = precision


class _Product(torch.autograd.Function):
    """a @ b, whose derivatives are products of the same kind."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, operands: torch.dtype | None) -> Tensor:
        ctx.operands = operands
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        with _exact_products(a):
            return _rounded(a, operands) @ _rounded(b, operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore
        a, b = ctx.saved_tensors
        need_a, need_b, _ = ctx.needs_input_grad
        da = product(grad, b.mT, ctx.operands) if need_a else None
        return da, product(a.mT, grad, ctx.operands) if need_b else None, None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, _: None) -> Tensor | None:  # pyright: ignore
        a, b = ctx.saved_tensors
        parts = [] if da is None else [product(da, b, ctx.operands)]
        parts += [] if db is None else [product(a, db, ctx.operands)]
        return sum(parts[1:], parts[0]) if parts else None


class _TransformedProduct(_Product):
    """The product in the form that function transforms require, which is slower to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, operands: torch.dtype | None) -> Tensor:  # pyright: ignore
        with _exact_products(a):
            return _rounded(a, operands) @ _rounded(b, operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.operands = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)


def _rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    return t if dtype is None else t.to(dtype).to(t.dtype)


def product(a: Tensor, b: Tensor, operands: torch.dtype | None = None) -> Tensor:
    """a (.., M, K) @ b (.., K, N) in the dtype that they have, whatever autocast and TF32 are set to.

    operands: both are rounded to it first, here and in the derivatives, which pass the rounding as if it were none.
    """
    if torch.compiler.is_compiling():  # what is set while a compiler traces holds for the whole graph
        with no_autocast(a):
            return _rounded(a, operands) @ _rounded(b, operands)
    return (_TransformedProduct if are_transforms_active() else _Product).apply(a, b, operands)


# --- features -----------------------------------------------------------------------------------------------------


def form_features(spec: Spec, x: Tensor, angles: Angles | None, scales: Scales = NO_SCALES) -> Features:
    """x̄ and x̂ of q or k (B, H, N, D), in at least float32. angles: None for the map "none"; scales: of the norm."""
    if angles is not None:
        return Features(*activate_and_map(spec, x, *angles, scales))
    with no_autocast(x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if spec.norm != "none":
            x = normalise(spec, x, scales)
        x_bar = activate(x, spec.act, spec.dim or None)
    return Features(x_bar, x_bar)


def zero_gated_tokens(gate: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """k and v with 0 for tokens whose gate is 0, whatever they hold: they get no gradient, and none comes of NaN."""
    if gate is None:
        return xs
    out = (gate.logical_not() if gate.dtype == torch.bool else gate == 0)[..., None]
    return tuple(torch.where(out, 0, x) for x in xs)


def _factors(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """β (B, H_k or 1, N, 1), without a gradient where it is 0."""
    beta = gate.to(dtype)
    return torch.where(beta == 0, 0, beta)[..., None]


# --- the whole ----------------------------------------------------------------------------------------------------


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
    cu_seqlens: Tensor | None = None,
    state: Sequence[Tensor] = (),
    ends: tuple[int, int] = (0, 0),
    operands: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Linear attention from end to end: o (B, H_q, N_q, D_v) in q's dtype, and the state behind the last token.

    Args:
        q, k, v: (B, H_q, N_q, D), (B, H_k, N_k, D), (B, H_k, N_k, D_v). N_q ≠ N_k with mask "full" alone.
        q_angles, k_angles: None for the map "none".
        scales: of q's norm and of k's.
        gate: β (B, H_k or 1, N_k), float or bool; 0 takes a token out, whatever it holds, and has no gradient itself.
        cu_seqlens: (num_seqs + 1,), from 0 to N: B is 1, and each sequence sees itself alone; not with mask "block".
        state: what is summed before the first token: (S, Σ), or (S,) with normalizer "none"; S (B, H_k, Ê, D_v),
            Σ (B, H_k, D or Ê), one a sequence instead of B with cu_seqlens.
        ends: how many of the tokens are prefix and suffix, for mask "block": blocks of their own.
        operands: for tests: a dtype that both sides of each product are rounded to, here and in the gradients.
    """
    with no_autocast(q):
        k, v = zero_gated_tokens(gate, k, v)
        q_features = form_features(spec, q, q_angles, scales[0])
        k_features = form_features(spec, k, k_angles, scales[1])
        return attend_encoded(
            attention, q_features, k_features, v, gate=gate, cu_seqlens=cu_seqlens, state=state, ends=ends,
            operands=operands, dtype=q.dtype,
        )  # fmt: skip


class _Terms(NamedTuple):
    """Factors and sums of linear attention. With the normalizer "none" there are no rows and sums of z."""

    q: Tensor  # q̂ (B, H_q, .., Ê)
    k: Tensor  # β k̂ (B, H_k, .., Ê)
    v: Tensor  # (B, H_k, .., D_v)
    z_q: Tensor | None  # q̄ or q̂
    z_k: Tensor | None  # β k̄ or β k̂

    def map(self, function: Callable[[Tensor], Tensor]) -> _Terms:
        return _Terms(*(None if t is None else function(t) for t in self))  # pyright: ignore[reportArgumentType]


class _State(NamedTuple):
    """S and Σ."""

    products: Tensor
    features: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> _State:
        return _State(function(self.products), None if self.features is None else function(self.features))

    def add(self, other: _State) -> _State:
        features = None if self.features is None or other.features is None else self.features + other.features
        return _State(self.products + other.products, features)


def attend_encoded(
    attention: Attention,
    q: Features,
    k: Features,
    v: Tensor,
    *,
    gate: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Sequence[Tensor] = (),
    ends: tuple[int, int] = (0, 0),
    operands: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """:func:`attend` behind the map: of q̄, q̂, k̄ and k̂. dtype: of the output."""
    normalizer = NORMALIZERS[attention.normalizer]
    with no_autocast(v):
        wide = torch.promote_types(q.hat.dtype, torch.float32)
        terms = _Terms(
            q.hat, k.hat, v,
            None if normalizer.feature is None else normalizer.feature(q),
            None if normalizer.feature is None else normalizer.feature(k),
        ).map(lambda t: t.to(wide))  # fmt: skip
        if gate is not None:
            beta = _factors(gate, wide)
            terms = terms._replace(k=beta * terms.k, z_k=None if terms.z_k is None else beta * terms.z_k)
        if cu_seqlens is not None:
            before = _initial(terms, state, cu_seqlens.shape[0] - 1)
            rows, z, after = _attend_packed(attention.mask, terms, before, cu_seqlens, operands)
        else:
            before = _initial(terms, state, 0) if state or attention.mask != "full" else None
            rows, z, after = _ATTEND[attention.mask](attention, terms, before, ends, operands)
        o = rows if z is None else normalizer.divide(rows, z, attention.eps)
        return o.to(dtype or v.dtype).contiguous(), tuple(t.contiguous() for t in after if t is not None)


def _initial(terms: _Terms, state: Sequence[Tensor], num_seqs: int) -> _State:
    """Return the state before the first token."""
    if state:
        products, *features = state
        return _State(products, features[0] if features else None).map(lambda t: t.to(terms.k.dtype))
    batch = num_seqs or terms.k.shape[0]
    heads, width = terms.k.shape[1], terms.k.shape[-1]
    features = None if terms.z_k is None else terms.k.new_zeros(batch, heads, terms.z_k.shape[-1])
    return _State(terms.k.new_zeros(batch, heads, width, terms.v.shape[-1]), features)


Rows = tuple[Tensor, Tensor | None, _State]  # q̂ S, z, and the state behind


def _sum(terms: _Terms, operands: torch.dtype | None) -> _State:
    """Over the tokens of each (.., N, ·)."""
    return _State(
        product(terms.k.transpose(-2, -1), terms.v, operands), None if terms.z_k is None else terms.z_k.sum(-2)
    )  # fmt: skip


def _share(t: Tensor, heads: int) -> Tensor:
    """The key heads' t (B, H_k, ..) for each of the query heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], dim=1)


def _read(terms: _Terms, state: _State, operands: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """q̂ S and q̄ · Σ, for all tokens of each (.., N, ·) the same state."""
    heads = terms.q.shape[1]
    rows = product(terms.q, _share(state.products, heads), operands)
    if terms.z_q is None or state.features is None:
        return rows, None
    return rows, (terms.z_q * _share(state.features, heads)[..., None, :]).sum(-1, keepdim=True)


def _attend_full(
    attention: Attention, terms: _Terms, before: _State | None, ends: tuple[int, int], operands: torch.dtype | None
) -> Rows:
    own = _sum(terms, operands)
    state = own if before is None else before.add(own)
    return *_read(terms, state, operands), state


def _attend_causal(
    attention: Attention, terms: _Terms, before: _State, ends: tuple[int, int], operands: torch.dtype | None
) -> Rows:
    num_tokens = terms.q.shape[2]
    if has_static_value(num_tokens):
        if num_tokens == 1:
            return _attend_full(attention, terms, before, ends, operands)
        size = max(1, min(CHUNK, num_tokens))
        chunks = -(-num_tokens // size)
    else:
        # At least a token is added: none would be another graph to a compiler.
        size, chunks = CHUNK, num_tokens // CHUNK + 1
    pad = chunks * size - num_tokens
    terms = terms.map(lambda t: torch.nn.functional.pad(t, (0, 0, 0, pad)).unflatten(2, (chunks, size)))
    through = _accumulate(before, _sum(terms, operands))
    rows, z = _within_chunks(terms, through.map(lambda t: t[:, :, :-1]), operands)
    rows, z = (None if t is None else t.flatten(2, 3)[:, :, :num_tokens] for t in (rows, z))
    assert rows is not None
    return rows, z, through.map(lambda t: t[:, :, -1])


def _accumulate(before: _State, parts: _State) -> _State:
    """(B, H, C, ..) → (B, H, C + 1, ..): the state before each part, and behind the last."""

    def sums(first: Tensor, each: Tensor) -> Tensor:
        first = first.unsqueeze(2)
        return torch.cat([first, first + each.cumsum(2)], dim=2)

    features = None
    if before.features is not None and parts.features is not None:
        features = sums(before.features, parts.features)
    return _State(sums(before.products, parts.products), features)


def _within_chunks(
    terms: _Terms, before: _State, operands: torch.dtype | None, causal: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Rows and z (B, H, C, L, ·) from the state before each chunk and, where causal, from the chunk's own tokens."""
    rows, z = _read(terms, before, operands)
    if not causal:
        return rows, z
    heads = terms.q.shape[1]
    weights = product(terms.q, _share(terms.k, heads).transpose(-2, -1), operands).tril()
    rows = rows + product(weights, _share(terms.v, heads), operands)
    if z is not None and terms.z_q is not None and terms.z_k is not None:
        z = z + (terms.z_q * _share(terms.z_k.cumsum(-2), heads)).sum(-1, keepdim=True)
    return rows, z


def _attend_blocks(
    attention: Attention, terms: _Terms, before: _State, ends: tuple[int, int], operands: torch.dtype | None
) -> Rows:
    """Prefix, blocks and suffix, one after the other."""
    prefix, suffix = ends
    num_tokens, size = terms.q.shape[2], attention.block
    num_blocks = (num_tokens - prefix - suffix) // size
    state, found = before, []
    for start, count, length in (
        (0, 1, prefix),
        (prefix, num_blocks, size),
        (prefix + num_blocks * size, 1, suffix),
    ):
        stop = start + count * length
        piece = terms.map(lambda t, a=start, b=stop, n=(count, length): t[:, :, a:b].unflatten(2, n))
        through = _accumulate(state, _sum(piece, operands))
        rows, z = _read(piece, through.map(lambda t: t[:, :, 1:]), operands)
        found.append((rows.flatten(2, 3), None if z is None else z.flatten(2, 3)))
        state = through.map(lambda t: t[:, :, -1])
    rows, zs = zip(*found, strict=True)
    return torch.cat(rows, dim=2), None if zs[0] is None else torch.cat(zs, dim=2), state


_ATTEND: dict[str, Callable[..., Rows]] = {"full": _attend_full, "causal": _attend_causal, "block": _attend_blocks}


# --- several sequences in one -------------------------------------------------------------------------------------


class _Chunks(NamedTuple):
    """Packed tokens laid out so that each sequence begins with a chunk; no number is waited for."""

    source: Tensor  # (C L,): the token that is here, or N where there is none
    place: Tensor  # (N,): where a token is
    sequence: Tensor  # (C,): the sequence of a chunk, or num_seqs where there is none


def _lay_out_chunks(cu_seqlens: Tensor, num_tokens: int) -> _Chunks:
    num_seqs, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    cu_seqlens = cu_seqlens.long()
    chunks = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends = chunks.cumsum(0)  # in chunks
    num_chunks = -(-num_tokens // CHUNK) + num_seqs  # at most: each sequence leaves one unfilled
    token = torch.arange(num_tokens, device=device)
    own = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp_max(num_seqs - 1)
    place = (ends - chunks)[own] * CHUNK + token - cu_seqlens[own]
    source = torch.full((num_chunks * CHUNK,), num_tokens, device=device).scatter(0, place, token)
    sequence = torch.searchsorted(ends, torch.arange(num_chunks, device=device), right=True)
    return _Chunks(source, place, sequence)


def _attend_packed(
    mask: str, terms: _Terms, before: _State, cu_seqlens: Tensor, operands: torch.dtype | None
) -> Rows:  # fmt: skip
    where = _lay_out_chunks(cu_seqlens, terms.q.shape[2])

    def cut(t: Tensor) -> Tensor:
        with_none = torch.nn.functional.pad(t, (0, 0, 0, 1))
        return with_none.index_select(2, where.source).unflatten(2, (-1, CHUNK))

    terms = terms.map(cut)
    parts = _sum(terms, operands)
    # A state more, for the chunks that no sequence has.
    first = before.map(lambda t: torch.cat([t, torch.zeros_like(t[:1])]))
    after = _State(*map(lambda a, b: _add_to(a, b, where.sequence), first, parts))  # pyright: ignore
    if mask == "causal":
        seen = parts.map(lambda t: _sum_before(t, where.sequence))
        seen = seen.add(first.map(lambda t: _by_chunk(t, where.sequence)))
    else:
        seen = after.map(lambda t: _by_chunk(t, where.sequence))
    found = _within_chunks(terms, seen, operands, causal=mask == "causal")
    rows, z = (None if t is None else t.flatten(2, 3).index_select(2, where.place) for t in found)
    assert rows is not None
    return rows, z, after.map(lambda t: t[:-1])


def _by_chunk(t: Tensor, sequence: Tensor) -> Tensor:
    """(num_seqs, H, ..) → (1, H, C, ..)."""
    return t.index_select(0, sequence).transpose(0, 1)[None]


def _add_to(total: Tensor | None, parts: Tensor | None, sequence: Tensor) -> Tensor | None:
    """Parts (1, H, C, ..) summed by sequence, onto (num_seqs, H, ..)."""
    if total is None or parts is None:
        return None
    return total.index_add(0, sequence, parts[0].transpose(0, 1))


def _sum_before(parts: Tensor, sequence: Tensor) -> Tensor:
    """Sums (1, H, C, ..) of the parts of the same sequence that come before, without differences of larger sums."""
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
