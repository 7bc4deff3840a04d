"""Compute the outputs and gradients for a configuration, with the library and with the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from lrpe_md import Norm, cosine, linear_attention, pack, rotate
from lrpe_md.engine.core.operator import call_cache
from lrpe_md.engine.linear import plan as linear_plan

from .configs import Config, Draws, LinearConfig, MapConfig, Where, arrange, join, pad
from .formula import EXACT, Rounding, attend, encode_all

Named = dict[str, Tensor]


class Inputs(NamedTuple):
    """Tensors and positions of a call, and the gradients of its outputs."""

    tensors: Named  # arguments of the call, by name
    wheres: list[Where]  # positions of q and of k
    grads: Named  # gradients of the outputs
    positions: Any


# --- inputs ---------------------------------------------------------------------------------------------------------


def make_inputs(c: Config, device: Any) -> Inputs:
    """Draw the inputs of a configuration."""
    return make_linear(c, device) if isinstance(c, LinearConfig) else make_maps(c, device)  # pyright: ignore


def make_linear(c: LinearConfig, device: Any) -> Inputs:
    draws, (heads, key_heads), (num_q, num_k) = Draws(c, device), c.heads, c.tokens
    wheres = [draws.locate(place, num) for place, num in zip((c.place_q, c.place_k), c.tokens, strict=True)]
    wheres[1] = wheres[0] if c.places[0] and len(c.places) == 1 else wheres[1]
    positions = tuple(w.positions for w in wheres) if len(c.places) == 2 else wheres[0].positions
    q = draws.rows(c.batch, heads, num_q, c.head_dim)
    k, v = (draws.rows(c.batch, key_heads, num_k, width) for width in (c.head_dim, c.v_dim))
    t = {"q": q, "k": k, "v": v, **draws.frequencies(), **draws.norm_weights()}
    if c.gate != "none":
        gate = draws.uniform(c.batch, key_heads if c.gate_heads else 1, num_k) + 0.25
        if c.gate != "float":
            closed = draws.uniform(*gate.shape) < (2 if c.gate == "closed" else 0.4)
            gate = torch.where(closed, 0, gate)
        if c.rule == "delta":  # otherwise states grow
            gate = gate / (8 * c.head_dim * c.block)
        if c.gate == "nan":
            out = (gate == 0).to(device)[..., None].expand(-1, key_heads, -1, -1)
            t["k"], t["v"] = (arrange(torch.where(out, float("nan"), x), c.layout) for x in (k, v))
        gate = gate > 0 if c.gate == "bool" else gate.to(getattr(torch, c.gate_dtype))
        t["gate"] = draws.table(gate)
    if c.decay != "none":
        blocks = c.count_blocks()
        size = {"heads": (key_heads,), "one": (1,), "shared": (1, 1, blocks)}.get(c.decay, (c.batch, key_heads, blocks))
        t["decay"] = draws.table((1 - draws.uniform(*size) * 0.7).to(getattr(torch, c.decay_dtype)))
    batch, wide = len(c.lengths) if c.lengths else c.batch, torch.float64 if c.dtype == "float64" else torch.float32
    sizes: dict[str, tuple[int, ...]] = {"S": (batch, key_heads, c.features, c.v_dim)}
    if c.normalizer != "none":
        sizes["sums"] = (batch, key_heads, c.head_dim if c.normalizer == "unrotated" else c.features)
    if c.state:
        state = {name: draws.normal(*size) * 3 for name, size in sizes.items()}
        if c.normalizer == "unrotated":
            state["sums"] = state["sums"].abs()
        t |= {name: draws.table(x.to(wide)) for name, x in state.items()}
    grads = {}
    if c.gradient_of != "state":
        grads["o"] = draws.rows(c.batch, heads, num_q, c.v_dim, layout=c.grad_layout)
    if c.return_state and c.gradient_of != "o":
        grads |= {name: draws.table(draws.normal(*size).to(wide)) for name, size in sizes.items()}
    return Inputs(t, wheres, grads, positions)


def make_maps(c: MapConfig, device: Any) -> Inputs:
    draws, (heads, key_heads), (num_q, num_k) = Draws(c, device), c.heads, c.tokens
    places = c.samples or c.places
    wheres = [draws.locate(place, place.num_tokens) for place in places if place]
    positions = pack([w.positions for w in wheres], device=device) if c.samples else tuple(w.positions for w in wheres)
    if c.samples:
        wheres = [join(wheres)]
    elif len(places) == 1:
        positions = wheres[0].positions
    if c.form == "one":
        t = {"q": draws.rows(c.batch, heads, num_q, c.head_dim)}
    elif c.form == "two":
        t = {"q": draws.rows(c.batch, heads, num_q, c.head_dim), "k": draws.rows(c.batch, key_heads, num_k, c.head_dim)}
    else:
        t = {"qkv": draws.rows(c.batch, num_q, heads + 2 * key_heads, c.head_dim)}
    t |= {**draws.frequencies(c.groups), **draws.norm_weights()}
    shapes = get_output_shapes(c)
    if c.out == "none":
        grads = {n: draws.rows(*size, layout=c.grad_layout) for n, size in shapes.items()}
        return Inputs(t, [wheres[0], wheres[-1]], grads, positions)
    for name, (b, h, n, d) in shapes.items():
        if name == "q" or (name == "k" and c.out != "first"):
            t[f"out_{name}"] = draws.rows(b, h, n + c.length, d, layout=c.grad_layout)
    size = (c.batch,) if c.out == "starts" else (1,)
    t["start"] = torch.randint(0, c.length + 1, size, generator=draws.generator).to(device)
    return Inputs(t, [wheres[0], wheres[-1]], {}, positions)


def get_output_shapes(c: MapConfig) -> dict[str, tuple[int, int, int, int]]:
    """Return the shapes (B, H, N, D) of a map's outputs, by name."""
    _, width = c.part
    wide = c.head_dim + (2 * c.groups - 1) * width if c.map == "cosine" else c.head_dim
    shapes = {n: (c.batch, h, num, wide) for n, h, num in zip("qk", c.heads, c.tokens, strict=True)}
    if c.form == "one":
        del shapes["k"]
    elif c.form != "two":
        shapes["v"] = (c.batch, c.heads[1], c.tokens[1], c.head_dim)
    return shapes


# --- the library ----------------------------------------------------------------------------------------------------


def make_common_options(c: Config, t: Named) -> dict[str, Any]:
    """Return the arguments that all public functions accept."""

    def pair(name: str, both: bool) -> Any:
        return (t.get(f"{name}_q"), t.get(f"{name}_k")) if both else t.get(f"{name}_q")

    norm = None
    if c.norm is not None:
        weight, bias = (pair(n, c.norm.pair and f"{n}_q" in t) for n in ("weight", "bias"))
        norm = Norm(c.norm.kind, weight, bias, c.norm.eps, c.norm.over, c.norm.offset)  # pyright: ignore
    gain: Any = t.get("amplitude")
    options = {
        "omega": t.get("omega"), "act": c.act, "dim": c.dim, "phase": pair("phase", c.phase in ("pair", "q", "k")),
        "amplitude": float(gain) if c.amplitude == "number" else gain, "norm": norm, "rotary_dim": c.rotary_dim,
    }  # fmt: skip
    if c.map == "rotate":
        options["pairs"] = c.pairs
    if c.map == "cosine":
        options["order"] = c.order
    return options


def call_linear(c: LinearConfig, inputs: Inputs, t: Named, impl: str) -> Named:
    cu_seqlens = None
    if c.lengths is not None:
        ends = torch.tensor([0, *c.lengths]).cumsum(0)
        cu_seqlens = pad(ends.to(t["q"].device, getattr(torch, c.cu_dtype)))
    function: Any = linear_attention
    # The causal kernels don't compute the gradient of a per-head decay on a GPU.
    by_head = c.mask == "causal" and "decay" in t and t["decay"].ndim == 1 and t["decay"].requires_grad
    impl = "auto" if not c.has_kernels or (by_head and t["q"].is_cuda) else impl
    result: Any = function(
        t["q"], t["k"], t["v"], map=c.map, positions=inputs.positions, normalizer=c.normalizer, gate=t.get("gate"),
        is_causal=c.mask == "causal", block=c.block if c.mask == "block" else None, cu_seqlens=cu_seqlens,
        state=(t["S"], t.get("sums")) if c.state else None, return_state=c.return_state, eps=c.eps, impl=impl,
        decay=t.get("decay"), rule=c.rule, directions=c.directions, **make_common_options(c, t),
    )  # fmt: skip
    if not c.return_state:
        return {"o": result}
    o, (S, sums) = result
    return {"o": o, "S": S, **({} if sums is None else {"sums": sums})}


def call_maps(c: MapConfig, inputs: Inputs, t: Named, impl: str) -> Named:
    options: dict[str, Any] = {**make_common_options(c, t), "positions": inputs.positions, "impl": impl}
    if c.inverse:
        options["inverse"] = True
    function: Any = cosine if c.map == "cosine" else rotate
    names, heads_last = list(get_output_shapes(c)), c.form in ("qkv", "stacked")

    def order(x: Tensor) -> Tensor:
        """Transpose (B, H, N, D) to the layout that the call uses."""
        x = x.transpose(1, 2) if heads_last or c.flat else x
        return x[0] if c.flat else x

    if c.out != "none":
        start = int(t["start"][0])
        outs = [t.get(f"out_{name}") for name, num in zip("qk"[: len(names)], c.tokens, strict=False)]
        if c.out in ("slice", "first"):
            outs = [o if o is None else o[:, :, start : start + n] for o, n in zip(outs, c.tokens, strict=False)]
        else:
            options["out_start"] = t["start"]
        views = [None if o is None else order(o) for o in outs]
        options["out"] = views[0] if c.form == "one" else tuple(views)
    if heads_last:
        qkv = t["qkv"][0] if c.flat else t["qkv"]
        if c.form == "qkv":
            result = function(qkv=qkv.unflatten(-2, (3, c.heads[0])), **options)
        else:
            result = function(qkv=qkv, num_key_heads=c.heads[1], **options)
    else:
        result = function(*(order(t[name]) for name in names), **options)
    ys: Any = result if isinstance(result, tuple) else (result,)
    ys = [y[None] if c.flat else y for y in ys]
    ys = [y.transpose(1, 2) if heads_last or c.flat else y for y in ys]
    caches = {name: t[f"out_{name}"] for name in names if f"out_{name}" in t}
    return {**dict(zip(names, ys, strict=True)), **caches}


# --- the formula ----------------------------------------------------------------------------------------------------


def formula_linear(c: LinearConfig, inputs: Inputs, t: Named, rounding: Rounding) -> Named:
    outputs = attend(c, t, (inputs.wheres[0], inputs.wheres[1]), rounding)
    return outputs if c.return_state else {name: x for name, x in outputs.items() if name in ("o", "z")}


def formula_maps(c: MapConfig, inputs: Inputs, t: Named, rounding: Rounding) -> Named:
    names = list(get_output_shapes(c))
    xs = [t[name] for name in names] if "qkv" not in t else None
    if xs is None:
        xs = list(t["qkv"].transpose(1, 2).split([c.heads[0], c.heads[1], c.heads[1]], 1))
    ys = encode_all(c, xs[:2], inputs.wheres, t, rounding)
    outputs = dict(zip(names, ys + xs[2:], strict=True))
    for name in names:
        if f"out_{name}" in t:
            cache, start = t[f"out_{name}"].clone(), t["start"].expand(c.batch)
            for b, begin in enumerate(start.tolist()):
                cache[b, :, begin : begin + outputs[name].shape[2]] = outputs[name][b]
            outputs[name] = cache
    return outputs


# --- both -----------------------------------------------------------------------------------------------------------


def list_learned(c: Config, t: Named) -> list[str]:
    """Return the names of the tensors whose gradients are compared."""
    has_none = {"amplitude", "start", *c.frozen}
    return [n for n, x in t.items() if x.is_floating_point() and n not in has_none and not n.startswith("out_")]


def differentiate(function: Callable[[Named], Named], t: Named, names: list[str], grads: Named) -> Named:
    """Return the outputs by name, and the gradient of each tensor in ``names`` as "d" + its name."""
    if not grads or not names:
        with torch.no_grad():
            return dict(function(t))
    leaves = {name: x.detach().requires_grad_(name in names) for name, x in t.items()}
    outputs = function(leaves)
    learned = [name for name in grads if outputs[name].requires_grad]
    dxs: Any = [None] * len(names)
    if learned:
        outs, dys = [outputs[name] for name in learned], [grads[name] for name in learned]
        dxs = torch.autograd.grad(outs, [leaves[name] for name in names], dys, allow_unused=True)
    results = {name: y.detach() for name, y in outputs.items()}
    for name, dx in zip(names, dxs, strict=True):
        results[f"d{name}"] = torch.zeros_like(leaves[name]) if dx is None else dx
    return results


def run_library(c: Config, inputs: Inputs, impl: str) -> Named:
    call: Any = call_linear if isinstance(c, LinearConfig) else call_maps
    with patch_cuts(getattr(c, "cut", "own"), inputs.tensors["q" if "q" in inputs.tensors else "qkv"].is_cuda):
        return differentiate(
            lambda t: call(c, inputs, t, impl), inputs.tensors, list_learned(c, inputs.tensors), inputs.grads
        )


def run_formula(c: Config, inputs: Inputs, rounding: Rounding = EXACT) -> Named:
    """Evaluate the formula in float64, regardless of the inputs' dtypes."""
    formula: Any = formula_linear if isinstance(c, LinearConfig) else formula_maps
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.tensors.items()}
    grads = {name: g.double() for name, g in inputs.grads.items()}
    names = list_learned(c, inputs.tensors)
    return differentiate(lambda t: formula(c, inputs, t, rounding), wide, names, grads)


@contextmanager
def patch_cuts(name: str, on_gpu: bool) -> Iterator[None]:
    """Change how the library divides tokens among programs, so that even a few tokens need several programs."""
    unit = 32 if on_gpu else 1
    changes: list[tuple[Any, str, Any]] = [] if name == "own" else [(linear_plan, "ONE_PASS", 0)]
    if name in ("pieces", "parts"):
        changes += [(linear_plan, "SHORTEST", 4 * unit), (linear_plan, "PIECE", 4 * unit)]
        changes += [(linear_plan, "PROGRAMS", 10**6)]
    if name == "parts":  # causal pieces whose states are summed in parts
        long, short = 12 * unit, 8 * unit
        changes.append((linear_plan, "cut_pieces", lambda num_tokens, *_: (max(1, -(-num_tokens // long)), long)))
        changes.append((linear_plan, "cut_parts", lambda length, *_: min(length, short)))
    patches = [patch.object(*change) for change in changes]
    try:
        for each in patches:
            each.start()
        if patches:
            call_cache.clear()
        yield
    finally:
        for each in patches:
            each.stop()
        if patches:
            call_cache.clear()
