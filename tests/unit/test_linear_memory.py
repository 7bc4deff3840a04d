"""Decay and the delta rule, compared with a token-by-token implementation and with diffusers' SanaWM."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from lrpe_md import CosineMd, Grid, HeadDecay, LinearAttention, RotateMd, linear_attention

SHAPE = (4, 2, 3)
SIZE = 6  # tokens per frame


@dataclass(frozen=True)
class Case:
    map: str | None = "rotate"
    normalizer: str = "unrotated"
    rule: str = "delta"
    both: bool = False
    block: int | None = SIZE  # None means causal
    decay: str = "block"  # | "head" | "one head" | "none"
    prefix: int = 0
    suffix: int = 0
    lengths: tuple[int, ...] | None = None  # lengths of packed sequences
    state: bool = False
    gate: bool = True
    act: str = "softplus"
    eps: float = 1e-6

    @property
    def num_tokens(self) -> int:
        return self.prefix + torch.Size(SHAPE).numel() + self.suffix

    @property
    def bounds(self) -> list[int]:
        """Return the starts of the blocks, and the end of the last one."""
        if self.block is None:
            return [*range(self.num_tokens + 1)]
        inside = range(self.prefix, self.num_tokens - self.suffix + 1, self.block)
        return sorted({0, *inside, self.num_tokens})


def make(case, seed=0):
    """Return the tensors of a call with 4 query heads, 2 key heads, head_dim 6, and a v of width 5."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    batch, n = 1 if case.lengths else 2, case.num_tokens
    t = {"q": randn(batch, 4, n, 6), "k": randn(batch, 2, n, 6) * 0.3, "v": randn(batch, 2, n, 5)}
    if case.map:
        t["omega"] = randn(1, 6 if case.map == "cosine" else 3, 3)
    if case.gate:
        t["gate"] = torch.rand(batch, 2, n, generator=generator, dtype=torch.float64)
        t["gate"][:, :, ::5] = 0
    blocks = n if case.block is None else torch.Size(SHAPE).numel() // case.block
    size = {"block": (batch, 2, blocks), "head": (2,), "one head": (1, 1, blocks), "none": None}[case.decay]
    if size:
        t["decay"] = torch.rand(size, generator=generator, dtype=torch.float64) * 0.9 + 0.1
    if case.state:
        num, width = len(case.lengths or range(batch)), 12 if case.map == "cosine" else 6
        t["S"] = randn(num, 2, width, 5)
        if case.normalizer != "none":
            t["sums"] = randn(num, 2, 6 if case.normalizer == "unrotated" else width).abs()
    return t


def encode(case, x, omega):
    """Compute x̄ and x̂ of one head of a sample, (N, D), token by token."""
    bar = {"softplus": lambda x: (1 + x.exp()).log(), "relu": lambda x: x * (x > 0), "none": lambda x: x}[case.act](x)
    if case.map is None:
        return bar, bar
    places = [(0, 0, 0)] * case.prefix + [*itertools.product(*map(range, SHAPE))] + [(0, 0, 0)] * case.suffix
    angles = torch.stack([sum(omega[:, j] * s for j, s in enumerate(place)) for place in places])
    cos, sin = angles.cos(), angles.sin()
    if case.map == "cosine":
        return bar, torch.cat([bar * cos, bar * sin], 1)
    a, b = bar[:, :3], bar[:, 3:]
    return bar, torch.cat([a * cos - b * sin, a * sin + b * cos], 1)


def walk(states, decays, blocks, tokens, rule):
    """Return the states before each block and after the last one, computed token by token."""
    S, sums = states
    series = [(S, sums)]
    for g, (begin, end) in zip(decays, blocks, strict=True):
        S_next, sums_next = S, sums
        for m in range(begin, end):
            k_hat, k_sum, v, beta = (t[m] for t in tokens)
            if rule == "delta":
                S_next = S_next - beta * torch.outer(k_hat, k_hat @ S)
                sums_next = sums_next - beta * k_sum * (k_sum @ sums)
        S, sums = g * S_next, g * sums_next
        for m in range(begin, end):
            k_hat, k_sum, v, beta = (t[m] for t in tokens)
            S = S + beta * torch.outer(k_hat, v)
            sums = sums + beta * k_sum
        series.append((S, sums))
    return series


def attend_head(case, t, b, h):
    """Return o of a query head, and the states of its key head after each sequence."""
    g = h // 2
    q_bar, q_hat = encode(case, t["q"][b, h], t["omega"][0] if case.map else None)
    k_bar, k_hat = encode(case, t["k"][b, g], t["omega"][0] if case.map else None)
    q_sum, k_sum = (q_hat, k_hat) if case.normalizer == "encoded" else (q_bar, k_bar)
    beta = t["gate"][b, g] if case.gate else torch.ones(case.num_tokens, dtype=torch.float64)
    bounds = case.bounds
    decays = torch.ones(len(bounds) - 1, dtype=torch.float64)
    first = int(case.block is not None and case.prefix > 0)
    if case.decay != "none":
        decay = t["decay"]
        own = decay[g] if decay.ndim == 1 else decay[min(b, len(decay) - 1), min(g, decay.shape[1] - 1)]
        inside = len(decays) - first - int(case.block is not None and case.suffix > 0)
        decays = torch.cat([decays[:first], own.expand(inside), decays[first + inside :]])
    blocks = [*itertools.pairwise(bounds)]
    tokens = k_hat, k_sum, t["v"][b, g], beta
    rows, after, begin = [], [], 0
    for i, length in enumerate(case.lengths or (case.num_tokens,)):
        at = i if case.lengths else b
        zeros = torch.zeros(k_hat.shape[1], 5, dtype=torch.float64), torch.zeros(k_sum.shape[1], dtype=torch.float64)
        start = (t["S"][at, g], t["sums"][at, g] if "sums" in t else zeros[1]) if case.state else zeros
        own = [j for j, (a, _) in enumerate(blocks) if begin <= a < begin + length]
        mine = [blocks[j] for j in own]
        series = walk(start, [decays[j] for j in own], mine, tokens, case.rule)
        later = walk(zeros, [decays[j] for j in own[::-1]], mine[::-1], tokens, case.rule)
        for j, (a, z) in enumerate(mine):
            S, sums = series[j + 1]
            if case.both:
                S, sums = (x + y for x, y in zip((S, sums), later[len(mine) - 1 - j], strict=True))
            for n in range(a, z):
                bottom = q_sum[n] @ sums
                row = q_hat[n] @ S
                if case.normalizer == "unrotated":
                    row = row / (bottom if bottom > case.eps else torch.full_like(bottom, case.eps))
                if case.normalizer == "encoded":
                    row = row * 0 if abs(bottom) < case.eps else row / bottom
                rows.append(row)
        after.append(series[-1])
        begin += length
    return torch.stack(rows), after


def expected(case, t):
    """Return o and, unless there are two directions, S and the sums after the last token."""
    batch = len(t["q"])
    found = [[attend_head(case, t, b, h) for h in range(4)] for b in range(batch)]
    out = {"o": torch.stack([torch.stack([o for o, _ in row]) for row in found])}
    if not case.both:
        each = [[found[b][h][1] for h in (0, 2)] for b in range(batch)]
        rows = [[heads[i] for heads in each[0]] for i in range(len(case.lengths))] if case.lengths else None
        rows = rows or [[head[0] for head in heads] for heads in each]
        out["S"] = torch.stack([torch.stack([S for S, _ in heads]) for heads in rows])
        if case.normalizer != "none":
            out["sums"] = torch.stack([torch.stack([sums for _, sums in heads]) for heads in rows])
    return out


def actual(case, t, **changes):
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0) if case.lengths else None
    result = linear_attention(
        t["q"], t["k"], t["v"], map=case.map, omega=t.get("omega"), act=case.act,
        positions=Grid(SHAPE, case.prefix, case.suffix), normalizer=case.normalizer, gate=t.get("gate"),
        decay=t.get("decay"), rule=case.rule, directions="both" if case.both else "forward", block=case.block,
        is_causal=case.block is None, cu_seqlens=cu_seqlens, eps=case.eps, return_state=not case.both,
        state=(t["S"], t.get("sums")) if case.state else None, **changes,
    )  # fmt: skip
    if case.both:
        return {"o": result}
    o, (S, sums) = result
    return {"o": o, "S": S, **({} if sums is None else {"sums": sums})}


def differentiate(function, t):
    leaves = {name: x.clone().requires_grad_() for name, x in t.items()}
    found = function(leaves)
    generator = torch.Generator().manual_seed(9)
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in found.values()]
    dxs = torch.autograd.grad([*found.values()], [*leaves.values()], grads)
    return {**found, **{f"d{name}": dx for name, dx in zip(leaves, dxs, strict=True)}}


def assert_equal(case):
    t = make(case)
    found, right = (differentiate(lambda t, f=f: f(case, t), t) for f in (actual, expected))
    assert found.keys() == right.keys()
    if case.gate:  # a gate of 0 removes a token and has no gradient
        out = t["gate"] == 0
        right["dgate"] = right["dgate"].masked_fill(out, 0)
        right |= {name: right[name].masked_fill(out[..., None], 0) for name in ("dk", "dv")}
    for name, y in right.items():
        torch.testing.assert_close(found[name], y, rtol=1e-9, atol=1e-9 * y.abs().max().item(), msg=f"{name}, {case}")


@pytest.mark.sampled
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
def test_blocks(normalizer, rule, both):
    assert_equal(Case("cosine", normalizer, rule, both, prefix=2, suffix=1, state=not both))
    assert_equal(Case("rotate", normalizer, rule, both, decay="head", gate=False))
    assert_equal(Case(None, normalizer, rule, both, decay="none", prefix=1))


@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
def test_tokens(normalizer):
    for decay, lengths in itertools.product(("block", "head", "one head"), (None, (0, 9, 1, 14, 0))):
        assert_equal(Case("cosine", normalizer, "add", block=None, decay=decay, lengths=lengths, state=decay != "head"))


@pytest.mark.parametrize("both", [False, True])
def test_blocks_of_one_token_are_causal(both):
    assert_equal(Case(rule="add", block=1, both=both))
    assert_equal(Case(rule="add", block=1, both=both, prefix=2))


def test_many_tokens_of_packed_sequences():
    """Compare sequences of several chunks with one call per sequence."""
    torch.manual_seed(0)
    lengths = (150, 0, 3, 200)
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 4, dtype=torch.float64).unbind()
    decay = torch.rand(1, 2, sum(lengths), dtype=torch.float64) * 0.3 + 0.7
    state = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.rand(4, 2, 4, dtype=torch.float64)
    options = {"map": None, "is_causal": True, "return_state": True}
    ends = torch.tensor([0, *lengths]).cumsum(0)
    o, after = linear_attention(q, k, v, decay=decay, cu_seqlens=ends, state=state, **options)
    for i, (a, b) in enumerate(itertools.pairwise(ends.tolist())):
        start = tuple(t[i : i + 1] for t in state)
        own, own_after = linear_attention(
            *(t[:, :, a:b] for t in (q, k, v)), decay=decay[:, :, a:b], state=start, **options
        )  # fmt: skip
        torch.testing.assert_close(o[:, :, a:b], own)
        for whole, part in zip(after, own_after, strict=True):
            torch.testing.assert_close(whole[i : i + 1], part)


def attend_in_pieces(case, t, cuts):
    """Return the results of :func:`actual`, from one call for each piece of the tokens."""
    found, state = [], (t["S"], t.get("sums")) if case.state else None
    for start, stop in itertools.pairwise(cuts):
        decay = t.get("decay")
        if decay is not None and decay.ndim == 3:
            before, size = (0, 1) if case.block is None else (case.prefix, case.block)
            first, end = (max(0, n - before) // size for n in (start, stop))
            decay = decay[:, :, first:end]
        o, state = linear_attention(
            *(t[name][:, :, start:stop] for name in ("q", "k", "v")), map=case.map, omega=t.get("omega"), act=case.act,
            positions=Grid(SHAPE, case.prefix, case.suffix, start=start, length=stop - start), decay=decay,
            gate=t["gate"][:, :, start:stop], normalizer=case.normalizer, rule=case.rule, block=case.block,
            is_causal=case.block is None, eps=case.eps, state=state, return_state=True,
        )  # fmt: skip
        found.append(o)
    return {"o": torch.cat(found, 2), "S": state[0], **({} if state[1] is None else {"sums": state[1]})}


@pytest.mark.sampled
@pytest.mark.parametrize("cuts", [(0, 2, 8, 8, 20, 27), (0, 14, 27), (0, 20, 26, 27)], ids=str)
@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize(("rule", "block"), [("add", SIZE), ("add", None), ("delta", SIZE)])
def test_pieces_equal_the_whole(rule, block, normalizer, cuts):
    """Pass the state through pieces: only the prefix, no tokens, or several frames with or without prefix and suffix.

    Gradients pass through the states as well.
    """
    for map, decay, state in (("rotate", "block", False), ("cosine", "head", True), ("rotate", "one head", True)):
        case = Case(map, normalizer, rule, block=block, decay=decay, prefix=2, suffix=1, state=state)
        t = make(case)
        whole = differentiate(lambda t, case=case: actual(case, t), t)
        pieces = differentiate(lambda t, case=case: attend_in_pieces(case, t, cuts), t)
        assert pieces.keys() == whole.keys()
        for name, y in whole.items():
            bound = 1e-10 * y.abs().max().item()
            torch.testing.assert_close(pieces[name], y, rtol=1e-10, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("block", [SIZE, None])
def test_decay_of_one_keeps_all(block):
    case = Case(rule="add", block=block)
    t = make(case)
    plain = {name: x for name, x in t.items() if name != "decay"}
    kept = actual(case, plain | {"decay": torch.ones_like(t["decay"])})
    for name, y in actual(case, plain).items():
        torch.testing.assert_close(kept[name], y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "block"), [("add", SIZE), ("add", None), ("delta", SIZE)])
def test_decay_close_to_zero_forgets_all(rule, block, dtype):
    case = Case(rule=rule, block=block, gate=False, normalizer="none")
    t = make(case)
    t["decay"] = torch.full_like(t["decay"], 1e-30)
    leaves = {name: x.to(dtype).requires_grad_() for name, x in t.items()}
    found = actual(case, leaves)
    grads = torch.autograd.grad(found["o"].sum() + found["S"].sum(), [*leaves.values()])
    assert all(dx.isfinite().all() for dx in grads)
    size = block or 1
    q, k = (torch.stack([torch.stack([encode(case, x, t["omega"][0])[1] for x in xs]) for xs in t[n]]) for n in "qk")
    k, v = k.repeat_interleave(2, 1), t["v"].repeat_interleave(2, 1)
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
    right = (q @ k.mT @ v).flatten(2, 3).to(dtype)
    torch.testing.assert_close(found["o"], right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_gate_of_zero(rule, both):
    """With a closed gate, the state only decays, whatever the tokens contain."""
    case = Case(rule=rule, both=both, state=not both)
    t = make(case)
    t["gate"] = torch.zeros_like(t["gate"])
    t["k"][0, 0, 3] = torch.nan
    found = differentiate(lambda t: actual(case, t), t)
    assert all(y.isfinite().all() for y in found.values())
    assert not any(found[name].any() for name in ("dk", "dv", "dgate"))
    if both:
        assert not found["o"].any()
    else:
        torch.testing.assert_close(found["S"], t["decay"].prod(-1)[..., None, None] * t["S"])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_one_frame(rule, both):
    """A single frame reads only itself, whatever its decay."""
    q, k, v = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64).unbind()
    options = {"map": None, "block": 6}
    decay = torch.rand(2, 2, 1, dtype=torch.float64) * 0.5 + 0.5
    o = linear_attention(q, k, v, decay=decay, rule=rule, directions="both" if both else "forward", **options)
    torch.testing.assert_close(o, linear_attention(q, k, v, **options))


@pytest.mark.parametrize(("rule", "block"), [("add", SIZE), ("add", None), ("delta", SIZE)])
def test_no_tokens(rule, block):
    empty = torch.zeros(2, 2, 0, 4)
    state = torch.randn(2, 2, 4, 4), torch.rand(2, 2, 4)
    o, after = linear_attention(
        empty, empty, empty, map=None, block=block, is_causal=block is None, rule=rule, state=state, return_state=True,
        decay=torch.zeros(2, 2, 0),
    )  # fmt: skip
    assert o.shape == (2, 2, 0, 4)
    for found, right in zip(after, state, strict=True):
        assert torch.equal(found, right)


DERIVED = [Case(prefix=1), Case(both=True, rule="add"), Case(block=None, rule="add")]


@pytest.mark.parametrize("case", DERIVED, ids=str)
def test_other_derivatives(case):
    """Compare forward mode and double backward with finite differences of the first derivative."""
    t = make(case)
    generator = torch.Generator().manual_seed(3)
    direction = {n: torch.randn(x.shape, generator=generator, dtype=x.dtype) * (n != "gate") for n, x in t.items()}
    step = 1e-6

    def first(h):
        found = differentiate(lambda t: actual(case, t), {n: x + h * direction[n] for n, x in t.items()})
        return {name: y.detach() for name, y in found.items()}

    ahead, behind = first(step), first(-step)
    with dual_level():
        dual = actual(case, {n: make_dual(x, direction[n]) for n, x in t.items()})
        tangents = {name: unpack_dual(y).tangent for name, y in dual.items()}
    for name, tangent in tangents.items():
        difference = (ahead[name] - behind[name]) / (2 * step)
        torch.testing.assert_close(tangent, difference, rtol=1e-5, atol=1e-5 * difference.abs().max().item())
    leaves = {n: x.clone().requires_grad_() for n, x in t.items()}
    found = actual(case, leaves)
    generator = torch.Generator().manual_seed(9)
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in found.values()]
    dxs = torch.autograd.grad([*found.values()], [*leaves.values()], grads, create_graph=True)
    total = sum((dx * direction[n]).sum() for n, dx in zip(leaves, dxs, strict=True))
    second = torch.autograd.grad(total, [*leaves.values()])
    for name, dx in zip(leaves, second, strict=True):
        difference = (ahead[f"d{name}"] - behind[f"d{name}"]) / (2 * step)
        scale = difference.abs().max().item()
        torch.testing.assert_close(dx, difference, rtol=1e-4, atol=1e-4 * scale, msg=lambda m, n=name: f"{n}: {m}")


# --- diffusers' SanaWM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True])
def test_sana_wm(both):
    """Compare with SanaWM's core in float32, with a rotated numerator, a plain denominator and scaled keys."""
    sana = pytest.importorskip("diffusers.models.transformers.transformer_sana_wm")
    batch, heads, width, frames, size = 2, 3, 12, 5, 8
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, frames * size, heads, width, generator=generator) for _ in range(3))
    beta = torch.rand(batch, heads, frames, size, generator=generator)
    decay = torch.rand(batch, heads, frames, generator=generator) * 0.5 + 0.5
    omega = torch.randn(1, width // 2, 3, generator=generator)
    grid = Grid((frames, 2, 4))
    angles = torch.polar(torch.ones(frames * size, width // 2), grid.coordinates().float() @ omega[0].T)[None, None]
    scale = (width * size) ** -0.5

    def ours(q, k, v, beta, decay):
        return linear_attention(
            q.transpose(1, 2), k.transpose(1, 2) * scale, v.transpose(1, 2), map="rotate", omega=omega, positions=grid,
            pairs="interleaved", block=size, eps=1e-15, gate=beta.flatten(2), decay=decay, rule="delta",
            directions="both" if both else "forward",
        )  # fmt: skip

    def stock(q, k, v, beta, decay):
        q, k = q.relu(), k.relu()
        if both:
            core = sana.SanaWMBidirectionalGDNAttention()
            o = core(q, k, v, beta, decay, torch.zeros(1), frames, rotary_emb=angles)
            return o.unflatten(-1, (heads, width)).transpose(1, 2)
        q, k, v = (x.permute(0, 2, 3, 1) for x in (q, k * scale, v))
        rotated = [sana._apply_rotary_emb(x, angles) for x in (q, k)]
        return sana.torch_chunk_sana_gdn(q, k, v, *rotated, beta, decay, eps=0.0).mT

    leaves = [x.requires_grad_() for x in (q, k, v, beta, decay)]
    o, right = ours(*leaves), stock(*leaves)
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-5)
    do = torch.randn(o.shape, generator=generator)
    for found, dx in zip(*(torch.autograd.grad(y, leaves, do) for y in (o, right)), strict=True):
        torch.testing.assert_close(found, dx, rtol=1e-5, atol=1e-5 * dx.abs().max().item())


# --- the module -----------------------------------------------------------------------------------------------------


def test_initial_decays():
    torch.testing.assert_close(HeadDecay(3)(), torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128]))
    expected = torch.tensor([-8 * h / 4 * 0.75 for h in range(4)]).exp()
    torch.testing.assert_close(HeadDecay(4, "lightning", depth=0.25)(), expected)
    own = torch.tensor([0.3, 0.9])
    torch.testing.assert_close(HeadDecay(2, own)(), own)
    torch.testing.assert_close(HeadDecay(2, own, learnable=True)(), own)
    assert HeadDecay(2, "lightning", learnable=True)().max() < 1


@pytest.mark.parametrize("learnable", [False, True])
def test_decay_keeps_its_precision(learnable):
    decay = HeadDecay(8, learnable=learnable)
    model = nn.Sequential(decay).to(torch.bfloat16)
    assert model[0] is decay
    assert decay().dtype == torch.float32
    torch.testing.assert_close(decay(), 1 - 2.0 ** (-5 - torch.arange(8)), rtol=0, atol=1e-6)
    with torch.device("meta"):
        made = HeadDecay(8, learnable=learnable)
    assert torch.equal(made.to_empty(device="cpu")(), HeadDecay(8, learnable=learnable)())


@pytest.mark.parametrize("learnable", [False, True])
def test_decays_that_were_cast(learnable):
    """FSDP's mixed precision casts parameters and buffers through their data."""
    decay = HeadDecay(8, learnable=learnable)
    name, own = ("logit", decay.logit) if learnable else ("decay", decay.decay)
    own.data = own.data.to(torch.bfloat16)
    with pytest.raises(TypeError, match=rf"{name}: expected float32 .*got torch.bfloat16.*call fully_shard"):
        decay()


@pytest.mark.parametrize("encoding", ["own", "other", None])
def test_module(encoding):
    """The module passes on its options, even for an encoding without a description."""
    rotate = RotateMd(head_dim=6, num_axes=3, act="softplus")
    call = {"own": rotate, None: None}.get(encoding, lambda q, k, positions: rotate(q, k, positions=positions))
    if encoding == "other":
        call.act = "softplus"  # pyright: ignore
    decay = HeadDecay(2, "retnet", learnable=True)
    module = LinearAttention(call, decay=decay, rule="delta", directions="both")
    assert "rule='delta'" in repr(module)
    assert "directions='both'" in repr(module)
    q, k, v = (torch.randn(2, heads, 24, 6) for heads in (4, 2, 2))
    k = k * 0.3
    o = module(q, k, v, positions=Grid(SHAPE), block=SIZE)
    o.square().sum().backward()
    assert decay.logit.grad is not None
    assert decay.logit.grad.all()
    options = {"map": None, "act": "relu"} if encoding is None else {
        "map": "rotate", "omega": rotate.get_omega(), "act": "softplus"
    }  # fmt: skip
    right = linear_attention(
        q, k, v, positions=Grid(SHAPE), block=SIZE, decay=decay(), rule="delta", directions="both", **options
    )
    torch.testing.assert_close(o, right)
    passed = torch.full((1, 2, 4), 0.5)
    changed = module(q, k, v, positions=Grid(SHAPE), block=SIZE, decay=passed)
    assert not torch.allclose(changed, o), "a decay that is passed replaces the module's own"


# --- errors ---------------------------------------------------------------------------------------------------------

ERRORS = [
    ({"decay": torch.ones(2)}, "decay: expected is_causal=True or a block"),
    ({"rule": "delta"}, "rule: 'delta' needs block="),
    ({"rule": "delta", "is_causal": True}, "fla"),
    ({"rule": "delta", "block": 1}, "fla"),
    ({"rule": "sum"}, "rule: expected one of"),
    ({"directions": "backward", "block": 6}, "directions: expected one of"),
    ({"directions": "both"}, "directions: 'both' needs block="),
    ({"directions": "both", "is_causal": True}, "directions: 'both' needs block="),
    ({"directions": "both", "block": 6, "return_state": True}, "return_state: expected None"),
    ({"block": 6, "decay": torch.ones(3)}, r"\(2 or 1,\) for one decay per key head, or \(2 or 1, 2 or 1, 4\)"),
    ({"block": 6, "decay": torch.ones(2, 2, 24)}, r"4\) for one decay per block between prefix and suffix"),
    ({"is_causal": True, "decay": torch.ones(2, 2, 4)}, r"24\) for one decay per token"),
    ({"block": 6, "decay": torch.ones(3, 2, 4)}, "decay: expected"),
    ({"block": 6, "decay": torch.tensor([0.5, 1.5])}, r"factors in \(0, 1\], got values from 0.5 to 1.5"),
    ({"block": 6, "decay": torch.tensor([0.0, 0.5])}, "from 0 to 0.5"),
    ({"block": 6, "decay": torch.tensor([0.5, float("nan")])}, "got values from nan"),
    ({"block": 6, "decay": torch.ones(2, dtype=torch.int64)}, "decay: expected a floating-point tensor"),
    ({"block": 6, "decay": [0.5, 0.5]}, "decay: expected a tensor"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors(options, message):
    q, k, v = (torch.randn(2, heads, 24, 6) for heads in (4, 2, 2))
    with pytest.raises((ValueError, TypeError), match=message):
        linear_attention(q, k, v, map=None, **options)


def test_the_shape_of_a_decay_of_one_head():
    q, k, v = (torch.randn(1, heads, 24, 6) for heads in (4, 1, 1))
    with pytest.raises(ValueError, match=r"decay: expected shape \(1,\) for .*, or \(1, 1, 4\) for one decay per"):
        linear_attention(q, k, v, map=None, block=6, decay=torch.ones(3))


def test_values_are_checked_at_each_call():
    """A new decay of the same shape is validated again."""
    q, k, v = (torch.randn(2, 2, 24, 6) for _ in range(3))
    linear_attention(q, k, v, map=None, block=6, decay=torch.tensor([0.5, 1.0]))
    with pytest.raises(ValueError, match="decay: expected factors"):
        linear_attention(q, k, v, map=None, block=6, decay=torch.tensor([0.5, 2.0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads"), ({"num_heads": 2, "initial": "alibi"}, "initial: expected one of"),
        ({"num_heads": 2, "initial": torch.ones(3)}, r"initial: expected shape \(2,\)"),
        ({"num_heads": 2, "initial": torch.tensor([0.5, 2.0])}, "decay: expected factors"),
        ({"num_heads": 2, "initial": torch.ones(2), "learnable": True}, "below 1"),
        ({"num_heads": 2, "initial": "lightning", "depth": 2.0}, "depth"),
        ({"num_heads": 2, "depth": (1, 2)}, r"depth: expected a layer's index .* got \(1, 2\)"),
        ({"num_heads": 2, "learnable": "raw"}, "learnable: expected False or True, got 'raw'"),
    ],
)  # fmt: skip
def test_errors_of_head_decay(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeadDecay(**arguments)


def test_decay_is_a_module():
    with pytest.raises(TypeError, match="pass a tensor to forward"):
        LinearAttention(CosineMd(head_dim=4, num_axes=1, act="relu"), decay=torch.ones(2))  # pyright: ignore


@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "cu_seqlens": True}, {"block": 3}])
@pytest.mark.parametrize("decay", [1e-46, 1e-300])
def test_a_decay_that_float32_rounds_to_zero(decay, options):
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    options = options | ({"cu_seqlens": torch.tensor([0, 5, 12])} if "cu_seqlens" in options else {})
    g = torch.full((2,), decay, dtype=torch.float64, requires_grad=True)
    o = linear_attention(q, k, v, map=None, decay=g, **options)
    (grad,) = torch.autograd.grad(o.sum(), g)
    exact = linear_attention(q.double(), k.double(), v.double(), map=None, decay=g, **options)
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-4)
    assert grad.isfinite().all()
