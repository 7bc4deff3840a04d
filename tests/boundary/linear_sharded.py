"""Cases of linear attention for sharded.py. Each one compares its result with the unsharded computation."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import case, close, leaf, normal
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lrpe_md import Coordinates, CosineMd, Grid, HeadDecay, LinearAttention, Norm, linear_attention
from lrpe_md.engine.linear import sharding

GRID = Grid((4, 3), prefix=1, suffix=2)
BATCH, HEADS, TOKENS, ALL = Shard(0), Shard(1), Shard(2), Replicate()


def inputs(mesh, *, q_tokens: int = 15, k_tokens: int = 15, batch: int = 2, key_heads: int = 2) -> dict[str, Tensor]:
    """Return inputs for the map "cosine" with head_dim 8 and two axes. v has a different head_dim."""
    q, k = normal(mesh, batch, 4, q_tokens, 8), normal(mesh, batch, key_heads, k_tokens, 8)
    v, gate = normal(mesh, batch, key_heads, k_tokens, 6), normal(mesh, batch, 1, k_tokens).abs()
    omega, phase = normal(mesh, 1, 8, 2), normal(mesh, 1, 8)
    return {"q": q, "k": k, "v": v, "gate": gate, "omega": omega, "phase": phase}


def with_state(mesh, tensors: dict[str, Tensor], normalizer: str = "unrotated") -> dict[str, Tensor]:
    batch, heads = tensors["k"].shape[:2]
    tensors = {**tensors, "S": normal(mesh, batch, heads, 16, 6)}
    return tensors if normalizer == "none" else {**tensors, "sums": normal(mesh, batch, heads, 8).abs()}


def attend(tensors: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return o and, unless directions is "both", S and Σ."""
    tensors = dict(tensors)
    q, k, v = (tensors.pop(name) for name in ("q", "k", "v"))
    state = tuple(tensors.pop(name) for name in ("S", "sums") if name in tensors)
    phase = tensors.pop("phase", None)
    phase = (None, phase) if options.get("normalizer") == "none" and phase is not None else phase
    options = {"act": "softplus", "phase": phase, "state": state or None, **options}
    if "weight" in tensors:
        weights = tensors.pop("weight"), tensors.pop("weight_k")
        options["norm"] = Norm("rms", weights, over=options.pop("over"))
    options |= tensors
    if options.get("directions") == "both":
        return (linear_attention(q, k, v, **options),)
    o, after = linear_attention(q, k, v, return_state=True, **options)
    return (o, *(t for t in after if t is not None))


def same(mesh, tensors: dict[str, Tensor], where: dict[str, Any], **options: Any) -> None:
    """Check that outputs, states and all gradients of DTensors equal those of one process.

    ``where`` holds placements by name. Tensors without a placement stay plain, which is equivalent to replicated.
    """
    whole = {name: leaf(t) for name, t in tensors.items()}
    expected = attend(whole, options)
    grads = [normal(mesh, *y.shape, seed=7 + i) for i, y in enumerate(expected)]
    torch.autograd.backward(expected, grads)
    parts: dict[str, Any] = {
        name: distribute_tensor(t, mesh, as_list(where[name])).requires_grad_() if name in where else leaf(t)
        for name, t in tensors.items()
    }
    actual = attend(parts, options)
    assert actual[0].placements == parts["q"].placements
    assert len(actual) == len(expected)
    shard_grads = [distribute_tensor(g, mesh, y.placements) for g, y in zip(grads, actual, strict=True)]
    found = torch.autograd.grad(actual, [*parts.values()], shard_grads)
    for name, y, right in zip(("o", "S", "sums"), actual, expected, strict=False):
        assert y.shape == right.shape
        assert y.stride() == right.stride(), (name, y.stride(), right.stride(), y.shape)
        close(name, y.full_tensor(), right)
    for (name, t), dt in zip(parts.items(), found, strict=True):
        if isinstance(t, DTensor):
            assert dt.placements == t.placements, name
            dt = dt.full_tensor()
        close("d" + name, dt, whole[name].grad)


def as_list(placements: Any) -> list[Any]:
    return placements if isinstance(placements, list) else [placements]


def close_enough(mesh, tensors, where, **options):
    for normalizer in ("unrotated", "none"):
        same(mesh, with_state(mesh, tensors, normalizer), where, normalizer=normalizer, **options)


QKV, ANGLES = ("q", "k", "v"), ("omega", "phase")


@case
def linear_batch_and_heads(mesh, impl):
    for options in ({}, {"is_causal": True}, {"block": 3}):
        for batch, p in ((3, BATCH), (1, BATCH), (2, HEADS)):
            where = dict.fromkeys((*QKV, "gate"), p) if p == BATCH else dict.fromkeys(QKV, p)
            close_enough(mesh, inputs(mesh, batch=batch), where, positions=GRID, **options)
        origin = torch.tensor([[1, 2], [30, 4]], device=mesh.device_type)
        close_enough(
            mesh, inputs(mesh), {**dict.fromkeys((*QKV, "S"), BATCH), "omega": ALL},
            positions=Grid((4, 3), prefix=1, suffix=2, origin=origin), **options,
        )  # fmt: skip
    where = {"q": HEADS, "k": ALL, "v": ALL, "omega": ALL}
    close_enough(mesh, inputs(mesh, key_heads=1), where, positions=GRID, is_causal=True)
    close_enough(mesh, inputs(mesh, key_heads=1), where, positions=GRID)
    same(
        mesh, inputs(mesh, batch=1), dict.fromkeys(QKV, HEADS), positions=GRID, is_causal=True,
        cu_seqlens=torch.tensor([0, 4, 4, 15], device=mesh.device_type),
    )  # fmt: skip
    plain = {name: t for name, t in inputs(mesh).items() if name in QKV}
    same(mesh, plain, dict.fromkeys(QKV, HEADS), map=None, is_causal=True)


@case
def linear_memory(mesh, impl):
    """Shard batch and heads of a memory that forgets."""
    frames = {"positions": Grid((4, 3), prefix=1, suffix=2), "block": 3}
    for options, blocks in (
        ({**frames, "rule": "delta"}, 4),
        (frames, 4),
        ({"positions": GRID, "is_causal": True}, 15),
    ):
        for batch, p in ((3, BATCH), (2, HEADS)):
            where = dict.fromkeys((*QKV, "gate"), p) if p == BATCH else dict.fromkeys(QKV, p)
            for size in ((2,), (batch, 2, blocks), (1, 1, blocks)):
                tensors = inputs(mesh, batch=batch)
                tensors |= {"k": tensors["k"] * 0.2, "decay": normal(mesh, *size).sigmoid()}
                close_enough(mesh, tensors, where, **options)
    where = {"q": HEADS, "k": ALL, "v": ALL, "decay": ALL}
    tensors = inputs(mesh, key_heads=1) | {"decay": normal(mesh, 1).sigmoid()}
    close_enough(mesh, tensors, where, **frames)


def memory(mesh, size: tuple[int, ...] | None, **sizes: Any) -> dict[str, Tensor]:
    """Return inputs with decays of this size, and with gates. Some gates are 0.

    Gates and angles are small, so that no state grows and no denominator is close to 0.
    """
    tensors = inputs(mesh, **sizes)
    tensors |= {name: 0.1 * tensors[name] for name in ANGLES}
    tensors["gate"] = 0.1 * tensors["gate"] * (tensors["gate"] > 0.2)
    return tensors if size is None else {**tensors, "decay": normal(mesh, *size).sigmoid()}


NORMALIZER_NAMES = ("unrotated", "encoded", "none")
FORGETTING = tuple(itertools.product(("add", "delta"), ("forward", "both")))


def choose_impl(mesh, impl: str) -> str:
    """Return the implementation to request, because there are no float64 kernels on a GPU."""
    return "auto" if mesh.device_type == "cuda" else impl


def each_normalizer(mesh, tensors, where, **options):
    """Compare each normaliser. Forward passes also have initial and final states."""
    for normalizer in NORMALIZER_NAMES:
        given = dict(tensors)
        if normalizer == "none":
            del given["phase"]
        if options.get("directions") != "both":
            given["S"] = normal(mesh, *tensors["k"].shape[:2], 16, 6)
            if normalizer != "none":
                given["sums"] = normal(mesh, *tensors["k"].shape[:2], 16 if normalizer == "encoded" else 8).abs()
        same(mesh, given, where, normalizer=normalizer, **options)


@case
def linear_memory_tokens(mesh, impl):
    """Shard whole frames of a memory that forgets. The ranks exchange their maps."""
    where = {**dict.fromkeys(QKV, TOKENS), "omega": ALL}
    ends = {"positions": Grid((4, 3), prefix=2, suffix=2), "block": 3}  # 2 + 3 * 4 + 2 tokens
    for rule, directions in FORGETTING:
        options = {"rule": rule, "directions": directions}
        for size in ((2,), (2, 2, 4)):
            each_normalizer(mesh, memory(mesh, size, q_tokens=16, k_tokens=16), where, **ends, **options)
        tensors = memory(mesh, (1, 1, 4), q_tokens=16, k_tokens=16)
        same(mesh, tensors, {**where, "gate": TOKENS, "decay": ALL, "phase": ALL}, **ends, **options)
        tensors["q"] = tensors["q"] * 0.9  # and a boolean gate
        gate, tensors["k"] = tensors.pop("gate") > 0, tensors["k"] - 1
        same(mesh, tensors, where, gate=gate, **ends, **options)
        if options != {"rule": "add", "directions": "forward"}:
            same(mesh, memory(mesh, None, q_tokens=16, k_tokens=16), where, **ends, **options)
        plain = {n: t for n, t in memory(mesh, (2,), q_tokens=12, k_tokens=12).items() if n not in ANGLES}
        same(mesh, plain, dict.fromkeys(QKV, TOKENS), map=None, block=3, **options)


@case
def linear_decay_of_tokens(mesh, impl):
    """Shard causal tokens unevenly, with decays per head and per token. One-token frames have a prefix and suffix."""
    where = {**dict.fromkeys(QKV, TOKENS), "omega": ALL}
    table = normal(mesh, 12, 2)
    for size in ((2,), (1, 2, 15)):
        for positions in (GRID, Coordinates(table, 1, 2)):
            each_normalizer(mesh, memory(mesh, size), where, positions=positions, is_causal=True)
    for directions in ("forward", "both"):
        for size in ((2,), (2, 1, 12)):
            same(mesh, memory(mesh, size), where, positions=GRID, block=1, directions=directions)
    plain = {n: t for n, t in memory(mesh, (1, 1, 15)).items() if n not in ANGLES}
    same(mesh, plain, dict.fromkeys(QKV, TOKENS), map=None, is_causal=True)
    one = {n: t for n, t in memory(mesh, (2, 2, 1), q_tokens=1, k_tokens=1).items() if n not in ANGLES}
    same(mesh, one, dict.fromkeys(QKV, TOKENS), map=None, is_causal=True)  # a rank without tokens


@case
def linear_memory_kernels(mesh, impl):
    """Run the kernels, with a norm and with states."""
    impl = choose_impl(mesh, impl)
    frames = {"positions": Grid((2, 2), prefix=2, suffix=2), "block": 2, "impl": impl}
    tensors = memory(mesh, (1, 2, 2), batch=1, q_tokens=8, k_tokens=8)
    where = {**dict.fromkeys(QKV, TOKENS), "omega": ALL}
    weights = {"weight": normal(mesh, 4, 8), "weight_k": normal(mesh, 2, 8)}
    same(mesh, tensors | weights, where, over="head", rule="delta", directions="both", **frames)
    tensors["decay"] = normal(mesh, 1, 2, 8).sigmoid()
    same(mesh, with_state(mesh, tensors), where, positions=Grid((4, 2)), is_causal=True, impl=impl)


@case
def linear_memory_over_a_mesh(mesh, impl):
    """Shard heads and tokens over two axes of a mesh, and tokens with a norm over all heads.

    Also form the map of a rank in parts, as on a GPU with a large state.
    """
    frames = {"positions": Grid((4, 2), prefix=2, suffix=2), "block": 2, "rule": "delta"}
    tensors = memory(mesh, (2, 2, 4), q_tokens=12, k_tokens=12)
    weights = {"weight": normal(mesh, 4, 8), "weight_k": normal(mesh, 2, 8)}
    same(mesh, tensors | weights, dict.fromkeys(QKV, TOKENS), over="heads", directions="both", **frames)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "fits_kernels", lambda *args, **options: False)
        same(mesh, with_state(mesh, tensors), dict.fromkeys(QKV, TOKENS), **frames)
    for shape, placements in (((1, mesh.size()), [HEADS, TOKENS]), ((mesh.size(), 1), [TOKENS, HEADS])):
        square = init_device_mesh(mesh.device_type, shape)
        same(square, with_state(mesh, tensors), dict.fromkeys(QKV, placements), **frames)


@case
def linear_memory_compiled(mesh, impl):
    """Compile a call and its exchanges as one graph."""
    impl = choose_impl(mesh, impl)

    def plain(q, k, v, **options):
        return linear_attention(q, k, v, map=None, act="softplus", impl=impl, **options)

    fast = torch.compile(plain, backend="aot_eager", fullgraph=True)
    tensors = memory(mesh, (1, 2, 2), batch=1, q_tokens=4, k_tokens=4)
    found = []
    for sharded in (False, True):
        q, k, v = (distribute_tensor(tensors[n], mesh, [TOKENS]) if sharded else tensors[n].clone() for n in QKV)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        gate, decay = tensors["gate"], leaf(tensors["decay"])
        o = (fast if sharded else plain)(*leaves, gate=gate, decay=decay, block=2, rule="delta", directions="both")
        dxs = torch.autograd.grad(o.square().sum(), [*leaves, decay])
        found.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (o, *dxs)])
    for i, (right, y) in enumerate(zip(*found, strict=True)):
        close(f"output {i}", y, right)


@partial(case, world_size=1)
def linear_memory_of_one_rank(mesh, impl):
    """Run the kernels that compute a rank's map, in a GPU's precision.

    All gradients of the returned state pass through that map. Errors are at most twice those of the call on plain
    tensors, up to the rounding of the sums.
    """
    frames = {"positions": Grid((4, 4), prefix=4), "block": 4}
    for options in ({**frames, "rule": "delta"}, {**frames, "rule": "delta", "directions": "both"}, frames):
        tensors = with_state(mesh, memory(mesh, (2, 2, 4), q_tokens=20, k_tokens=20))
        if "directions" in options:
            del tensors["S"], tensors["sums"]
        found = []
        for kind in ("exact", "plain", "sharded"):
            dtype = torch.float64 if kind == "exact" else torch.float32
            leaves: dict[str, Any] = {name: leaf(t.float().to(dtype)) for name, t in tensors.items()}
            if kind == "sharded":
                leaves |= {n: distribute_tensor(leaves[n].detach(), mesh, [TOKENS]).requires_grad_() for n in QKV}
            ys = attend(leaves, {**options, "impl": "reference" if kind == "exact" else impl})
            dys = [normal(mesh, *y.shape, seed=7, dtype=dtype) for y in ys]
            if kind == "sharded":
                dys = [distribute_tensor(dy, mesh, y.placements) for dy, y in zip(dys, ys, strict=True)]
            dxs = torch.autograd.grad(ys, [*leaves.values()], dys)
            found.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (*ys, *dxs)])
        for exact, plain, sharded in zip(*found, strict=True):
            bound = 2 * (plain - exact).abs().max() + 1e-6 * exact.abs().max()
            assert (sharded - exact).abs().max() <= bound, options


@partial(case, world_size=3)
def linear_three_ranks(mesh, impl):
    """Shard frames unevenly, so that a rank has only the prefix or no tokens. All ranks reject the same split."""
    where = {**dict.fromkeys(QKV, TOKENS), "omega": ALL}
    for rule, directions in FORGETTING:
        for grid in (
            Grid((5, 2)),  # 2, 2 and 1 frames
            Grid((2, 2)),  # 1, 1 and 0 frames
            Grid((1, 2), prefix=2),  # the prefix, 1 and 0 frames
            Grid((4, 2), prefix=2, suffix=2),  # the prefix and a frame, 2 frames, a frame and the suffix
        ):
            num_tokens, options = grid.num_tokens, {"positions": grid, "block": 2, "rule": rule}
            tensors = memory(mesh, (2, 2, grid.shape[0]), q_tokens=num_tokens, k_tokens=num_tokens)
            tensors = with_state(mesh, tensors) if directions == "forward" else tensors
            same(mesh, tensors, where, directions=directions, **options)
    same(mesh, with_state(mesh, memory(mesh, (2, 2, 15))), where, positions=GRID, is_causal=True)
    # With 3, 3 and 2 tokens, the third rank has a whole frame, but also raises the error.
    q, k, v = (distribute_tensor(inputs(mesh, q_tokens=8, k_tokens=8)[name], mesh, [TOKENS]) for name in QKV)
    for rule in ("add", "delta"):
        with pytest.raises(ValueError, match=r"block: expected each shard .* of 2 tokens .*, got tokens 0 to 3"):
            linear_attention(q, k, v, map=None, block=2, rule=rule)


@case
def linear_tokens(mesh, impl):
    """Shard tokens unevenly. The state needs one all-reduce, and causal masks need the sum over earlier ranks."""
    tensors = inputs(mesh)
    where = {**dict.fromkeys(QKV, TOKENS), "omega": ALL}
    table = normal(mesh, 12, 2)
    rotated = torch.arange(12, device=mesh.device_type) % 5 > 0
    for positions in (GRID, Coordinates(table, 1, 2, rotated), Coordinates(normal(mesh, 2, 12, 2), 1, 2)):
        close_enough(mesh, tensors, where, positions=positions)
        close_enough(mesh, tensors, {**where, "gate": TOKENS, "phase": ALL}, positions=positions, is_causal=True)
    # Shards of whole blocks: 2 + 3 * 4 + 2 tokens in two parts.
    close_enough(
        mesh, inputs(mesh, q_tokens=16, k_tokens=16), where, positions=Grid((4, 3), prefix=2, suffix=2), block=3
    )
    plain = {name: t for name, t in tensors.items() if name in (*QKV, "gate")}
    for options in ({}, {"is_causal": True}):
        same(mesh, plain, dict.fromkeys(QKV, TOKENS), map=None, **options)
    even = {name: t for name, t in inputs(mesh, q_tokens=12, k_tokens=12).items() if name in QKV}
    same(mesh, even, dict.fromkeys(QKV, TOKENS), map=None, block=3)
    same(mesh, with_state(mesh, tensors), where, positions=GRID, normalizer="unrotated", is_causal=True)


@case
def linear_cross_attention(mesh, impl):
    tensors = inputs(mesh, k_tokens=5)
    positions = GRID, normal(mesh, 5, 2)
    for keys in (TOKENS, ALL):
        where = {"q": TOKENS, "k": keys, "v": keys, "omega": ALL}
        close_enough(mesh, tensors, where, positions=positions)


@case
def linear_a_rank_without_tokens(mesh, impl):
    tensors = {name: t for name, t in inputs(mesh, q_tokens=1, k_tokens=1).items() if name in QKV}
    for options in ({}, {"is_causal": True}):
        same(mesh, tensors, dict.fromkeys(QKV, TOKENS), map=None, **options)
    q, k, v = (distribute_tensor(tensors[name][:, :, :0], mesh, [TOKENS]) for name in QKV)
    assert linear_attention(q, k, v, map=None, positions=Grid((0, 3)), block=3).shape == (2, 4, 0, 6)


def have_second_derivatives(mesh):
    """Return whether ``DTensor.to_local`` has second derivatives, which torch 2.11 lacks."""
    x = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).requires_grad_()
    (first,) = torch.autograd.grad(x.to_local().pow(3).sum(), [x], create_graph=True)
    return torch.autograd.grad(first.sum(), [x], allow_unused=True)[0] is not None


@case
def linear_double_backward(mesh, impl):
    """Check that sums across ranks are differentiable to any order."""
    if not have_second_derivatives(mesh):
        return
    causal, frames = {"positions": GRID, "is_causal": True}, {"positions": Grid((4, 3)), "block": 3}
    twice_differentiate(mesh, inputs(mesh), causal)
    twice_differentiate(mesh, memory(mesh, (2,)), causal)
    tensors = memory(mesh, (2,), q_tokens=12, k_tokens=12)
    twice_differentiate(mesh, tensors, {**frames, "rule": "delta", "directions": "both"})


def twice_differentiate(mesh, tensors, options):
    found = []
    options = {**options, "gate": tensors["gate"], "act": "softplus"}
    for sharded in (False, True):
        parts = {
            name: distribute_tensor(t, mesh, [TOKENS]).requires_grad_() if sharded and name in QKV else leaf(t)
            for name, t in tensors.items() if name in (*QKV, "omega", "decay")
        }  # fmt: skip
        q, k, v = (parts.pop(name) for name in QKV)
        o = linear_attention(q, k, v, **parts, **options)
        grads = torch.autograd.grad(o.square().sum(), [q, k, v], create_graph=True)
        total = sum((g.square().sum() for g in grads), start=torch.zeros((), dtype=o.dtype))
        twice = torch.autograd.grad(total, [q, k, v])
        found.append([g.full_tensor() if isinstance(g, DTensor) else g for g in twice])
    for a, b in zip(*found, strict=True):
        close("second derivative", a, b)


@case
def linear_module(mesh, impl):
    decay = HeadDecay(2, learnable=True)
    for options, call in (
        ({}, {"positions": GRID}),
        ({"decay": decay}, {"positions": GRID, "is_causal": True}),
        ({"decay": decay, "rule": "delta", "directions": "both"}, {"positions": Grid((3, 3), prefix=3), "block": 3}),
    ):
        encoding = CosineMd(8, 2, act="relu", learnable=True, dtype=torch.float64)
        module = LinearAttention(encoding, **options).to(mesh.device_type)
        num_tokens = call["positions"].num_tokens
        tensors = inputs(mesh, q_tokens=num_tokens, k_tokens=num_tokens)
        q, k, v = tensors["q"], 0.2 * tensors["k"], tensors["v"]
        expected = module(q, k, v, **call)
        names, learned = zip(*module.named_parameters(), strict=True)
        right = torch.autograd.grad(expected.square().sum(), learned)
        o = module(*(distribute_tensor(t, mesh, [TOKENS]) for t in (q, k, v)), **call)
        close("o", o.full_tensor(), expected)
        found = torch.autograd.grad(o.square().sum().full_tensor(), learned)
        for name, dt, expected_dt in zip(names, found, right, strict=True):
            rtol = 1e-12 if dt.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(dt, expected_dt, rtol=rtol, atol=1e-12, msg=lambda m, n=name: f"d{n}: {m}")


@case
def linear_errors(mesh, impl):
    tensors = inputs(mesh)
    shards = {name: distribute_tensor(tensors[name], mesh, [TOKENS]) for name in QKV}
    q, k, v = (shards[name] for name in QKV)
    options: dict[str, Any] = {"omega": tensors["omega"], "positions": GRID}
    one = [distribute_tensor(tensors[name][:1], mesh, [TOKENS]) for name in QKV]
    cu_seqlens = torch.tensor([0, 15], device=mesh.device_type)
    cut = Coordinates(normal(mesh, 12, 2), 1, 2)
    for message, qkv, changes in (
        (r"block: expected each shard to contain whole blocks of 3 tokens .*, got tokens", (q, k, v), {"block": 3}),
        (r"positions: expected a Grid", (q, k, v), {"block": 3, "positions": cut}),
        (r"cu_seqlens: expected all tokens on each rank", one, {"cu_seqlens": cu_seqlens}),
        (r"dim: softmax over the sequence \(-2\) needs", (q, k, v), {"act": "softmax", "dim": -2}),
        (r"v: expected k's placements", (q, k, distribute_tensor(tensors["v"], mesh, [ALL])), {}),
        (r"k: expected q's placements", (q, *(distribute_tensor(tensors[n], mesh, [HEADS]) for n in "kv")), {}),
        (r"k: expected a DTensor, like the other tensors", (q, tensors["k"], v), {}),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            linear_attention(*qkv, **{**options, **changes})
    three = [distribute_tensor(torch.cat([tensors[n], tensors[n][:, :1]], 1), mesh, [HEADS]) for n in "kv"]
    six = distribute_tensor(torch.cat([tensors["q"], tensors["q"][:, :2]], 1), mesh, [HEADS])
    with pytest.raises(ValueError, match=r"k: expected a number of heads divisible by 2 .*, got 3"):
        linear_attention(six, *three, **options)
    assert dist.get_world_size() == 2
