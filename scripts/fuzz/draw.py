"""Draw random configurations, each determined by a seed."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from lrpe_md.reference import ACTIVATIONS

from .configs import Config, LinearConfig, MapConfig, NormConfig, Place

NEVER_NEGATIVE = tuple(name for name, entry in ACTIVATIONS.items() if entry.never_negative)
ACTS = (*NEVER_NEGATIVE, *(name for name in ACTIVATIONS if name not in NEVER_NEGATIVE))
DENSE = ("dense", "tokens first", "packed", "channels first", "odd")


class Limits(NamedTuple):
    """Largest sizes that a device can handle in a short time."""

    tokens: int = 40
    long: int = 150  # number of tokens in every tenth configuration
    repeat: int = 1  # number of consecutive seeds that share compiled kernels
    pairs: int = 10**7  # upper limit on token pairs times heads, because the reference stores all of them
    copies: int = 3  # maximum number of samples, and of key heads
    compiled: bool = False  # on a GPU: only sizes and dtypes that the kernels support


class Dice(NamedTuple):
    """Random number generators: ``variant`` for fields that select a compiled kernel, and ``free`` for all others."""

    variant: Random
    free: Random
    limits: Limits

    def tokens(self) -> int:
        most = self.limits.long if self.free.random() < 0.1 else self.limits.tokens
        return self.free.randint(1, most)


def draw(seed: int, kind: str, limits: Limits) -> Config:
    dice = Dice(Random(f"{kind} {seed // limits.repeat}"), Random(f"{kind} {seed}"), limits)
    return (draw_linear if kind == "linear" else draw_maps)(dice, seed)


def pick(rng: Random, first: Any, *others: Any, share: float = 0.6) -> Any:
    """Return the first value with probability ``share``, or else one of the other values."""
    return first if rng.random() < share else rng.choice(others)


# --- shared ---------------------------------------------------------------------------------------------------------


def draw_place(d: Dice, axes: int, *, whole: bool = False, packed: bool = False) -> Place:
    v, f = d.variant, d.free
    kind = v.choice(("grid", "grid", "grid", "coordinates", *(() if packed else ("tensor",))))
    most = max(1, round(2 * d.tokens() ** (1 / axes)))
    shape = tuple(f.randint(1, most) for _ in range(axes))
    while math.prod(shape) > d.limits.long:
        shape = tuple(max(1, n // 2) for n in shape)
    if f.random() < 0.02:
        shape = (0, *shape[1:])
    place = Place(kind, shape, max_coordinate=pick(f, 20.0, 1000.0, 1e6, share=0.8))
    by_sample = v.random() < 0.4
    if kind != "tensor" and v.random() < 0.6:
        place = replace(place, prefix=f.randint(0, 3), suffix=f.randint(1, 2) * v.randint(0, 1))
    place = replace(place, dtype=v.choice(("float32", "float32", "float64", "int64", "int32")))
    if kind != "grid":
        masked = kind == "coordinates" and v.random() < 0.6
        return replace(place, masked=masked, by_sample=by_sample and not packed)
    if v.random() < 0.4:
        place = replace(place, scale=tuple(f.choice((0.25, 1 / 3, 2.5, -1.0)) for _ in shape))
    if v.random() < 0.3:
        place = replace(place, shift=tuple(f.uniform(-3, 3) for _ in shape))
    if v.random() < 0.2 and (place.scale or place.shift):
        place = replace(place, as_tensors=not packed)
    if v.random() < 0.4 and not packed:
        place = replace(place, origin=True, by_sample=by_sample)
    if v.random() < 0.3 and not whole and place.num_tokens:
        begin = f.randint(0, place.num_tokens - 1)
        place = replace(place, start=begin, length=f.randint(1, place.num_tokens - begin))
    return place


def draw_part(d: Dice, map: str | None, head_dim: int) -> Any:
    """Draw rotary_dim and, for a rotation, pairs."""
    v = d.variant
    step = 2 if map == "rotate" else 1
    width = head_dim // step * step
    part = None
    if map is not None and (width != head_dim or v.random() < 0.3):
        width = step * v.randint(1, head_dim // step)
        start = v.randint(0, head_dim - width)
        part = slice(start, start + width) if v.random() < 0.5 else width
    pairs: Any = v.choice(("half", "half", "interleaved"))
    if width >= 4 and v.random() < 0.2:
        first = v.randint(1, width // 2 - 1)
        pairs = (first, width // 2 - first)
    return part, pairs


def draw_norm(d: Dice, places: tuple[Place | None, ...], same_heads: bool, dtype: str, two: bool) -> NormConfig:
    v = d.variant
    over = v.choice(("head", "head", "heads"))
    weight = v.choice(("none", "heads")) if over == "heads" else v.choice(("none", "shared", "heads"))
    weighted, groups = weight != "none", pick(v, 1, 2, 3, share=0.7)
    if groups > 1:
        groups = 1 if not (weighted and all(places)) else 3 if any(p and p.suffix for p in places) else groups
    bias, layer, pair, offset = (v.random() < p for p in (0.5, 0.3, 0.5, 0.2))
    return NormConfig(
        "layer" if (weighted and bias) or layer else "rms", over, weight, groups, weighted and bias,
        pair=two and (pair or not same_heads), offset=float(weighted and offset),
        eps=pick(v, 1e-6, 0.01, share=0.8), dtype=v.choice(("float32", "float32", dtype)),
    )  # fmt: skip


def draw_common(d: Dice, map: str | None, head_dims: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Draw the fields of :class:`Config` that do not depend on other fields."""
    v, f = d.variant, d.free
    head_dim = v.choice([n for n in head_dims if n > 1 or map != "rotate"])
    part, pairs = draw_part(d, map, head_dim)
    names = ("q", "k", "v", "gate", "omega", "phase_q", "phase_k", "S", "weight_q", "bias_q")
    frozen = tuple(name for name in names if v.random() < 0.5) if v.random() < 0.3 else ()
    encoded = map is not None
    return {
        "map": map, "head_dim": head_dim, "rotary_dim": part, "pairs": pairs if map == "rotate" else "half",
        "order": pick(v, "cos_sin", "sin_cos") if map == "cosine" else "cos_sin",
        "omega_heads": encoded and f.random() < 0.4, "omega_dtype": pick(v, "float32", "float64", share=0.8),
        "phase": pick(v, "none", "shared", "pair", "q", "k", share=0.5) if encoded else "none",
        "amplitude": pick(v, "none", "number", "channels", "heads", share=0.7) if encoded else "none",
        "frozen": frozen, "is_repeated": f.random() < 0.2, "zeros": f.random() < 0.2, "seed": seed,
        "layout": pick(f, *DENSE, "one sample", "one head", share=0.4),
        "grad_layout": pick(f, *DENSE, "one sample", "one number", share=0.5),
    }  # fmt: skip


def draw_dtype(d: Dice, wide: bool) -> str:
    names = ("float32", "bfloat16", "float16", "float64")
    return d.variant.choices(names, (5, 3, 1, 1.5 if wide else 0))[0]


# --- linear attention -----------------------------------------------------------------------------------------------


def draw_linear(d: Dice, seed: int) -> LinearConfig:
    v, f = d.variant, d.free
    map = v.choice(("cosine", "cosine", "rotate", "rotate", None))
    mask = v.choice(("full", "full", "full", "causal", "causal", "block"))
    cross = mask == "full" and v.random() < 0.45
    packed = not cross and mask != "block" and v.random() < 0.4
    normalizer = v.choice(("unrotated", "unrotated", "encoded", "none"))
    act = v.choice(NEVER_NEGATIVE if normalizer == "unrotated" else ACTS)
    over_tokens = act == "softmax" and mask == "full" and not packed and v.random() < 0.5
    dtype = draw_dtype(d, not d.limits.compiled)
    small = (2, 3, 5, 8, 10, 16, 20, 33) if not d.limits.compiled else (5, 8, 16, 20, 32, 40, 48, 64)
    wide = (*small, 72, 96, 128) if d.limits.compiled and dtype != "float32" else (1, *small)
    common = draw_common(d, map, wide, seed)
    axes = v.choices((1, 2, 3, 4, 5), (4, 4, 3, 1, 1))[0]
    places, num_tokens = draw_linear_places(d, map, axes, (mask, cross, packed or over_tokens))
    key_heads, repeats, batch = f.randint(1, d.limits.copies), v.choice((1, 1, 2, 3)), f.randint(1, d.limits.copies)
    c = LinearConfig(
        **common, dtype=dtype, act=act, dim=None if act != "softmax" else -2 if over_tokens else -1, places=places,
        num_tokens=num_tokens, heads=(key_heads * repeats, key_heads), batch=1 if packed else batch,
        v_dim=pick(v, common["head_dim"], *wide), normalizer=normalizer, mask=mask, eps=pick(f, 1e-6, 1e-3),
        cut=f.choice(("own", "two passes", "pieces", "parts")),
    )  # fmt: skip
    if c.batch * c.heads[0] * math.prod(c.tokens) > d.limits.pairs:
        c = replace(c, batch=1, heads=(repeats, 1))
    if packed:
        c = replace(c, lengths=draw_lengths(f, c.tokens[0]), cu_dtype=f.choice(("int32", "int64")))
    if mask == "block":
        c = draw_blocks(d, c)
    if over_tokens:
        return c
    if v.random() < 0.4:
        c = replace(c, norm=draw_norm(d, places, repeats == 1, dtype, True))
    if v.random() < 0.5:
        c = replace(
            c, gate=v.choice(("float", "zeros", "nan", "bool", "closed")), gate_heads=f.random() < 0.5,
            gate_dtype=v.choice(("float32", dtype)),
        )  # fmt: skip
    if c.gate == "nan" and c.layout not in DENSE:  # in other layouts, tokens share memory
        c = replace(c, layout="dense")
    state = f.random() < 0.35
    kept = f.random() < 0.35
    c = replace(c, state=state, return_state=kept, gradient_of=pick(f, "both", "o", "state") if kept else "both")
    return draw_memory(d, c) if mask != "full" and v.random() < 0.5 else c


def draw_memory(d: Dice, c: LinearConfig) -> LinearConfig:
    """Draw the decay, the update rule and the directions."""
    v = d.variant
    c = replace(
        c, decay=v.choice(("none", "heads", "one", "blocks", "shared")), decay_dtype=pick(v, "float32", c.dtype)
    )
    if c.mask == "causal" and c.decay in ("heads", "one") and v.random() < 0.5:
        c = replace(c, frozen=(*c.frozen, "decay"))
    if c.mask == "block" and v.random() < 0.3:
        c = replace(c, directions="both", state=False, return_state=False, gradient_of="both")
    if c.mask != "block" or c.block == 1 or v.random() < 0.5:
        return c
    delta = replace(c, rule="delta", gate=c.gate if c.gate not in ("none", "bool") else "float")
    rows = (1 << (c.v_dim - 1).bit_length()) + c.features
    itemsize = 2 if c.dtype.endswith("16") else 4
    return c if d.limits.compiled and rows * c.features * itemsize > 2 * 32768 else delta


def draw_linear_places(d: Dice, map: str | None, axes: int, how: tuple[str, bool, bool]) -> Any:
    """Draw the positions of q and k, and the numbers of tokens in q and k if there are no positions."""
    mask, cross, whole = how
    whole = whole or mask == "block"
    num = d.tokens()
    if map is None and d.variant.random() < 0.6:
        return (None,), (num, pick(d.free, d.tokens(), 0, share=0.97) if cross else num)
    first = draw_place(d, axes, whole=whole)
    return ((first, draw_place(d, axes, whole=whole)) if cross else (first,)), (num, num)


def draw_lengths(f: Random, num_tokens: int) -> tuple[int, ...]:
    """Draw the lengths of one, a few or many sequences. A length may be 0."""
    num = f.choice((1, 1, 2, 3, 5, num_tokens + 2))
    ends = sorted(f.randint(0, num_tokens) for _ in range(num - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, num_tokens], strict=True))


def draw_blocks(d: Dice, c: LinearConfig) -> LinearConfig:
    """Draw a block size that divides the number of grid tokens, and sometimes a shard of whole blocks."""
    f, place = d.free, c.place_q
    rows = math.prod(place.shape) if place else c.num_tokens[0]
    block = f.choice([n for n in range(1, max(rows, 1) + 1) if rows % n == 0])
    if place and place.kind == "grid" and f.random() < 0.3:
        end = place.prefix + rows
        edges = sorted({0, *range(place.prefix, end + 1, block), end + place.suffix})
        start, stop = sorted(f.sample(range(len(edges)), 2)) if len(edges) > 1 else (0, 0)
        place = replace(place, start=edges[start], length=edges[stop] - edges[start])
        c = replace(c, places=(place,))
    return replace(c, block=block)


# --- the maps -------------------------------------------------------------------------------------------------------


def draw_maps(d: Dice, seed: int) -> MapConfig:
    v, f = d.variant, d.free
    map = v.choice(("cosine", "rotate"))
    dtype = draw_dtype(d, True)
    widths = (16, 24, 40, 64, 72, 80, 96, 128) if d.limits.compiled else (1, 2, 3, 5, 8, 10, 16, 20, 33)
    common = draw_common(d, map, widths, seed)
    axes = v.choices((1, 2, 3, 4, 5), (4, 4, 3, 1, 1))[0]
    form = v.choice(("one", "two", "two", "qkv", "stacked"))
    packed = v.random() < 0.2
    act = v.choice(ACTS)
    over_tokens = act == "softmax" and not packed and v.random() < 0.5
    pair = form in ("two", "qkv") and not packed and v.random() < 0.4
    kept = {"whole": over_tokens, "packed": packed}
    places = [draw_place(d, axes, **kept) for _ in range(1 + pair)]
    if pair and form == "qkv":  # q, k and v have the same number of tokens
        shape = (places[0].num_tokens,) + (1,) * (axes - 1)
        places[1] = replace(places[0], kind="grid", shape=shape, prefix=0, suffix=0, start=0, length=None, masked=False)
    own = d._replace(variant=Random(v.random()))  # fields of packed positions don't select a kernel
    samples = tuple(draw_place(own, axes, whole=True, packed=True) for _ in range(f.randint(1, 4) * packed))
    if form == "one" and common["phase"] != "none":
        common["phase"] = "shared"
    key_heads = f.randint(1, d.limits.copies)
    repeats = 1 if form == "qkv" else f.choice((1, 1, 2, 3))
    c = MapConfig(
        **common, dtype=dtype, act=act, dim=None if act != "softmax" else -2 if over_tokens else -1,
        places=tuple(places), samples=samples, flat=packed and f.random() < 0.5, form=form,
        heads=(key_heads * repeats, key_heads), batch=1 if packed else f.randint(1, d.limits.copies),
        groups=v.randint(2, 3) if map == "cosine" and common["phase"] != "none" and v.random() < 0.3 else 1,
        inverse=map == "rotate" and v.random() < 0.2,
    )  # fmt: skip
    if not over_tokens and v.random() < 0.4:
        places = (None,) if samples else c.places  # all packed tokens are on the grid
        c = replace(c, norm=draw_norm(d, places, form == "qkv" or repeats == 1, dtype, form != "one"))
    if v.random() < 0.25:
        forms = ("slice", "start", "starts", *(("first",) if form != "one" else ()))
        layout = c.grad_layout if c.grad_layout in DENSE else "dense"
        c = replace(c, out=v.choice(forms), length=f.randint(0, 5), grad_layout=layout)
    return c
