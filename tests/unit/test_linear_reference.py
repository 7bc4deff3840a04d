"""Compare the reference of linear attention with the quadratic form, whose weights q̂ k̂ᵀ are masked, then normalised.

The quadratic form follows the formula, in float64 with an N × N matrix, and shares no code with the package.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from lrpe_md.scripts.common import cases
from lrpe_md.scripts.common.cases import LinearCase, bind_linear, check_linear, make_linear_inputs, run_linear
from parametrizing import ACTS
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from lrpe_md import (
    Coordinates,
    Grid,
    geometric_theta,
    linear_attention,
    reference,
    reference_linear,
    reference_products,
)

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: x * (x > 0),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "softplus": lambda x: x.clamp_min(0) + torch.log1p((-x.abs()).exp()),
    "softmax": None,
}


def activated(x, act, dim):
    if act == "softmax":
        e = (x - x.amax(dim, keepdim=True).detach()).exp()
        return e / e.sum(dim, keepdim=True)
    return ACTIVATIONS[act](x)


def encoded(case, x, shape, omega, phase, amplitude):
    """Compute x̄ and x̂ of tokens on a grid, token by token and pair by pair."""
    bar = activated(x, case.act, case.dim)
    if case.map is None:
        return bar, bar
    places = [None] * case.prefix + [*itertools.product(*map(range, shape))] + [None] * case.suffix
    channels = case.encoding.channels
    first = case.rotary_dim.start or 0 if isinstance(case.rotary_dim, slice) else 0
    heads = []
    for h in range(x.shape[1]):
        rows = []
        for n, place in enumerate(places):
            of = [t if t is None else t[h * t.shape[0] // x.shape[1]] for t in (omega, phase, amplitude)]
            angle = torch.zeros(channels, dtype=x.dtype)
            gain = torch.ones_like(angle)
            if place is not None:
                angle = sum(of[0][:, j] * s for j, s in enumerate(place))
                angle = angle if of[1] is None else angle + of[1]
                gain = gain if of[2] is None else of[2]
            cos, sin, t = angle.cos() * gain, angle.sin() * gain, bar[:, h, n]
            if case.map == "cosine":
                mapped = t[..., first : first + channels]
                parts = [mapped * cos, mapped * sin]
                parts = parts if case.order == "cos_sin" else parts[::-1]
                rows.append(torch.cat([t[..., :first], *parts, t[..., first + channels :]], -1))
                continue
            columns = [*t.unbind(-1)]
            for c in range(channels):
                a, b = (first + c, first + c + channels) if case.pairs == "half" else (first + 2 * c, first + 2 * c + 1)
                columns[a], columns[b] = (
                    t[..., a] * cos[c] - t[..., b] * sin[c],
                    t[..., a] * sin[c] + t[..., b] * cos[c],
                )
            rows.append(torch.stack(columns, -1))
        heads.append(torch.stack(rows, 1))
    return bar, torch.stack(heads, 1)


def visible(case, num_q, num_k):
    """Return a mask of the keys (columns) that each query (row) sees."""
    q, k = torch.arange(num_q)[:, None], torch.arange(num_k)
    if case.cu_seqlens is not None:
        sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(case.cu_seqlens)])
        same = sequence[:, None] == sequence
        return same & (k <= q) if case.mask == "causal" else same
    if case.mask == "causal":
        return k <= q
    if case.mask == "block":
        grid = torch.Size(case.shape).numel()
        block = torch.tensor(
            [0] * case.prefix + [1 + i // case.block for i in range(grid)] + [grid + 1] * case.suffix
        )  # fmt: skip
        return block <= block[:, None]
    return torch.ones(num_q, num_k, dtype=torch.bool)


def quadratic(case, qkv, omega=None, phase=None, gate=None, state=(), amplitude=None):
    """Compute o, and S and Σ after the last token."""
    q, k, v = qkv
    sides = (None if case.phase == "k" else phase), phase
    q_bar, q_hat = encoded(case, q, case.shape, omega, sides[0], amplitude)
    k_bar, k_hat = encoded(case, k, case.k_shape or case.shape, omega, sides[1], amplitude)
    beta = torch.ones_like(k[..., 0]) if gate is None else gate.to(k.dtype).expand(k.shape[:3])
    group = q.shape[1] // k.shape[1]
    mask = visible(case, q.shape[2], k.shape[2])

    def shared(t):
        return torch.stack([t[:, h // group] for h in range(q.shape[1])], 1)

    def seen(q, k):
        return (q @ shared(beta[..., None] * k).mT) * mask

    rows = seen(q_hat, k_hat) @ shared(v)
    of_q, of_k = {"unrotated": (q_bar, k_bar), "encoded": (q_hat, k_hat), "none": (None, None)}[case.normalizer]
    z = torch.ones_like(rows[..., :1]) if of_q is None else seen(of_q, of_k).sum(-1, keepdim=True)
    lengths = case.cu_seqlens or (k.shape[2],)
    if state:
        before = [t.repeat_interleave(torch.tensor(lengths), 0).transpose(0, 1)[None] for t in state]
        if case.cu_seqlens is None:  # (B, H, N, ...)
            before = [t[:, :, None].expand(-1, -1, q.shape[2], *t.shape[2:]) for t in state]
        rows = rows + torch.einsum("bhne,bhned->bhnd", q_hat, shared(before[0]))
        if of_q is not None:
            z = z + (of_q * shared(before[1])).sum(-1, keepdim=True)
    if case.normalizer == "unrotated":
        z = torch.maximum(z, torch.full_like(z, case.eps))
    gone = (z.abs() < case.eps) & (case.normalizer == "encoded")
    o = (rows / z.masked_fill(gone, 1)).masked_fill(gone, 0)
    weighted = beta[..., None] * k_hat
    ends = list(itertools.accumulate(lengths))
    parts = [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]

    def summed(t):
        found = [t[:, :, part].sum(2) for part in parts]
        return torch.cat(found) if case.cu_seqlens is not None else found[0]

    after = [summed(weighted[..., :, None] * v[..., None, :])]
    after += [] if of_k is None else [summed(beta[..., None] * of_k)]
    return o, [a + b for a, b in zip(after, state or [0, 0], strict=False)]


def assert_equals_quadratic(case):
    case = replace(case, dtype=torch.float64, omega_dtype=torch.float64, return_state=case.dim != -2)
    inputs = make_linear_inputs(case)
    inputs = inputs.to(torch.float64)
    found = run_linear(inputs, "reference")
    tensors = {"dq": inputs.qkv[0], "dk": inputs.qkv[1], "dv": inputs.qkv[2], "domega": inputs.omega}
    tensors |= {"dphase": inputs.phase, "dgate": inputs.gate}
    tensors |= dict(zip(("dS", "dsums"), inputs.state, strict=False))
    if inputs.gate is not None:  # a gate of 0 removes its token
        out = (inputs.gate == 0).expand(inputs.qkv[1].shape[:3])[..., None]
        tensors |= {name: tensors[name].masked_fill(out, 0) for name in ("dk", "dv")}
    leaves = {
        n: t.detach().clone().requires_grad_() if t is not None and t.is_floating_point() else t
        for n, t in tensors.items()
    }
    state = [leaves[n] for n in ("dS", "dsums") if n in leaves]
    o, after = quadratic(
        case, [leaves[n] for n in ("dq", "dk", "dv")], leaves["domega"], leaves["dphase"], leaves["dgate"], state,
        inputs.amplitude,
    )  # fmt: skip
    expected = {"o": o, **(dict(zip(("S", "sums"), after, strict=False)) if case.return_state else {})}
    wanted = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    grads = torch.autograd.grad([*expected.values()], [*wanted.values()], [inputs.grad, *inputs.grad_state])
    expected |= dict(zip(wanted, grads, strict=True))
    if inputs.gate is not None:
        expected |= {n: expected[n].masked_fill(out, 0) for n in ("dk", "dv")}
        if "dgate" in expected:
            expected["dgate"] = expected["dgate"].masked_fill(inputs.gate == 0, 0)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        atol = 1e-9 * max(1, right.abs().max().item())  # "encoded" divides by values close to 0
        torch.testing.assert_close(found[name], right, rtol=1e-9, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    return found


MASKS = [
    {"mask": "full"},
    {"mask": "causal", "shape": (7, 19)},
    {"mask": "block", "block": 5, "suffix": 2},
    {"shape": (7, 19), "cu_seqlens": (1, 0, 65, 64, 4), "batch": 1},
    {"mask": "causal", "shape": (7, 19), "cu_seqlens": (0, 130, 4, 0), "batch": 1},
]


@pytest.mark.sampled
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("map", ["cosine", "rotate", None])
def test_the_quadratic_form(map, normalizer, mask):
    case = LinearCase(map, (3, 5), head_dim=6, normalizer=normalizer, gate="float", state=True)
    assert_equals_quadratic(replace(case, **mask))
    assert_equals_quadratic(replace(case, act="softplus", state=False, gate="bool", **mask))


@pytest.mark.parametrize(("act", "dim"), [each for each in ACTS if reference.ACTIVATIONS[each[0]].never_negative])
@pytest.mark.parametrize("map", ["cosine", "rotate", None])
def test_activations(map, act, dim):
    assert_equals_quadratic(LinearCase(map, act=act, dim=dim, head_dim=6))


@pytest.mark.parametrize("act", [name for name, entry in reference.ACTIVATIONS.items() if not entry.never_negative])
@pytest.mark.parametrize("normalizer", ["encoded", "none"])
def test_activations_that_can_be_negative(act, normalizer):
    for mask in MASKS[:2]:
        assert_equals_quadratic(replace(LinearCase(act=act, normalizer=normalizer, head_dim=6), **mask))


@pytest.mark.parametrize("phase", ["none", "both", "k"])
@pytest.mark.parametrize("amplitude_heads", [0, 1, 2])
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_tables(map, phase, amplitude_heads):
    case = LinearCase(map, (2, 2, 3), head_dim=6, mask="causal", omega_heads=2)
    assert_equals_quadratic(replace(case, phase=phase, amplitude_heads=amplitude_heads))


@pytest.mark.parametrize(
    "changes",
    [
        {"map": "rotate", "pairs": "interleaved"},
        {"map": "rotate", "rotary_dim": slice(2, 6)},
        {"rotary_dim": 3},
        {"rotary_dim": slice(3, 6), "order": "sin_cos", "normalizer": "encoded", "mask": "causal", "state": True},
        {"order": "sin_cos"},
        {"heads": (3, 3), "v_dim": 5},
        {"heads": (6, 1), "v_dim": 11},
        {"k_shape": (2, 2), "v_dim": 3, "gate": "float"},
        {"k_shape": (2, 2), "phase": "k"},
        {"shape": (1,), "prefix": 0, "head_dim": 24},
        {"shape": (127,), "prefix": 0, "mask": "causal"},
        {"shape": (64,), "prefix": 0, "mask": "causal"},
        {"shape": (128,), "prefix": 0, "mask": "causal", "normalizer": "encoded"},
        {"shape": (4, 3), "prefix": 0, "mask": "block", "block": 1},
        {"shape": (4, 3), "prefix": 3, "mask": "block", "block": 12, "suffix": 1},
        {"gate": "float", "gate_heads": 2, "heads": (4, 2)},
        {"batch": 1, "shape": (5,), "prefix": 0, "cu_seqlens": (0, 0, 5, 0)},
        {"batch": 1, "shape": (128,), "prefix": 0, "cu_seqlens": (64, 64), "mask": "causal", "state": True},
    ],
    ids=str,
)
def test_other_calls(changes):
    assert_equals_quadratic(LinearCase(**{"head_dim": 8, **changes}))


@pytest.mark.parametrize(
    ("map", "act", "tokens", "least", "most"),
    [
        ("cosine", "relu", 2, 0.99, 1 + 1e-9),
        ("cosine", "softplus", 2, 0.9, 1 + 1e-9),
        ("rotate", "relu", 2, 1e5, 1e7),
        ("rotate", "relu", 64, 0, 1),
        ("rotate", "softplus", 2, 1, 3),
        ("rotate", "sigmoid", 2, 1, 3),
    ],
)
def test_largest_outputs(map, act, tokens, least, most):
    """Check the table in docs/linear-attention.md: largest outputs at head_dim 8, relative to the largest value."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 20000 // tokens, 1, tokens, 8, dtype=torch.float64).unbind()
    omega = geometric_theta(8 if map == "cosine" else 4).view(1, -1, 1)
    o = linear_attention(q, k, v, map=map, omega=omega, positions=Grid((tokens,)), act=act)
    largest = (o.abs().amax((1, 2, 3)) / v.abs().amax((1, 2, 3))).max()
    assert least <= largest <= most


def test_the_comparison_can_fail():
    case = LinearCase(mask="causal", shape=(7, 19), head_dim=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_linear, "CHUNK", 32)
        assert_equals_quadratic(case)  # results do not depend on the chunk size
        patch.setattr(torch.Tensor, "tril", lambda t: torch.triu(t))
        with pytest.raises(AssertionError):
            assert_equals_quadratic(case)


# --- states ---------------------------------------------------------------------------------------------------------


def rows(t, start, stop):
    return t[:, :, start:stop]


@pytest.mark.parametrize("normalizer", ["unrotated", "none"])
@pytest.mark.parametrize("mask", ["causal", "block"])
def test_pieces_equal_the_whole(mask, normalizer):
    """Compare values and gradients, for causal sequences in any pieces and block-causal sequences in whole blocks."""
    torch.manual_seed(0)
    grid = Grid((5, 3), prefix=2, suffix=1)
    q, k, v = (torch.randn(2, h, 18, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    omega = torch.rand(1, 4, 2, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(2, 1, 18, dtype=torch.float64, requires_grad=True)
    options = {"omega": omega, "normalizer": normalizer, "return_state": True}
    options |= {"is_causal": True} if mask == "causal" else {"block": 3}
    edges = [0, 1, 1, 7, 8, 18] if mask == "causal" else [0, 2, 5, 5, 14, 17, 18]
    whole, after = linear_attention(q, k, v, positions=grid, gate=gate, **options)
    state, parts = None, []
    for start, stop in itertools.pairwise(edges):
        positions = replace(grid, start=start, length=stop - start)
        piece = (rows(t, start, stop) for t in (q, k, v))
        part, state = linear_attention(
            *piece, positions=positions, gate=gate[:, :, start:stop], state=state, **options
        )  # fmt: skip
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    tensors = [t for t in after if t is not None]
    assert len(tensors) == (2 if normalizer == "unrotated" else 1)
    for a, b in zip(state, after, strict=True):
        assert b is None if a is None else torch.allclose(a, b)
    leaves = [q, k, v, omega, gate]
    expected = torch.autograd.grad(whole.sin().sum() + sum(t.sin().sum() for t in tensors), leaves)
    total = torch.cat(parts, 2).sin().sum() + sum(t.sin().sum() for t in state if t is not None)
    for a, b in zip(torch.autograd.grad(total, leaves), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_call_without_keys_and_one_without_queries():
    """If the queries read the keys' state in a second call, the result is the same."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4) for n in (5, 7, 7))
    omega, where = torch.rand(1, 4, 1), (torch.arange(5.0)[:, None], torch.arange(7.0)[:, None])
    whole = linear_attention(q, k, v, omega=omega, positions=where)
    none, state = linear_attention(
        q[:, :, :0], k, v, omega=omega, positions=(where[0][:0], where[1]), return_state=True
    )
    assert none.shape == (2, 2, 0, 4)
    found = linear_attention(
        q, k[:, :, :0], v[:, :, :0], omega=omega, positions=(where[0], where[1][:0]), state=state
    )  # fmt: skip
    torch.testing.assert_close(found, whole)
    alone = linear_attention(q, k[:, :, :0], v[:, :, :0], omega=omega, positions=(where[0], where[1][:0]))
    assert torch.equal(alone, torch.zeros_like(alone))


# --- results where the formula is undefined ---------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nan_under_a_gate_of_zero(mask, normalizer):
    case = replace(LinearCase(gate="nan", normalizer=normalizer, act="sigmoid", return_state=True), **mask)
    found = run_linear(make_linear_inputs(case), "reference")
    inputs = make_linear_inputs(case)
    out = (inputs.gate == 0).expand(inputs.qkv[1].shape[:3])
    assert inputs.qkv[1].isnan().any()
    clean = tuple(t.masked_fill(out[..., None], 5.0) if i else t for i, t in enumerate(inputs.qkv))
    for name, right in run_linear(replace(inputs, qkv=clean), "reference").items():
        assert found[name].isfinite().all(), name
        assert torch.equal(found[name], right), name
    assert not found["dk"][out].any()
    assert not found["dv"][out].any()
    assert not found["dgate"][inputs.gate == 0].any()
    bools = run_linear(replace(inputs, gate=inputs.gate > 0), "reference")
    ones = run_linear(replace(inputs, gate=(inputs.gate > 0).float()), "reference")
    for name, t in bools.items():
        assert torch.equal(t, ones[name]), name


@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_rows_zeroed_by_relu(mask, normalizer):
    case = replace(LinearCase(normalizer=normalizer), **mask)
    inputs = make_linear_inputs(case)
    q, k, v = inputs.qkv
    for qkv in ((-q.abs(), k, v), (q, -k.abs(), v), (torch.zeros_like(q), k, v)):
        found = run_linear(replace(inputs, qkv=qkv), "reference")
        assert torch.equal(found["o"], torch.zeros_like(found["o"]))
        assert all(t.isfinite().all() for t in found.values())


def test_no_gradient_below_the_bound():
    q, k, v = (torch.rand(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    o = linear_attention(q, k, v, map=None, eps=1e3)
    expected = (q @ k.mT @ v) / 1e3
    torch.testing.assert_close(o, expected)
    for a, b in zip(*(torch.autograd.grad(t.sum(), (q, k, v)) for t in (o, expected)), strict=True):
        torch.testing.assert_close(a, b)
    gone = linear_attention(q, k, v, map=None, normalizer="encoded", eps=1e3)
    assert torch.equal(gone, torch.zeros_like(gone))
    assert not any(t.any() for t in torch.autograd.grad(gone.sum(), (q, k, v)))


def test_no_tokens_and_no_samples():
    for size in ((0, 2, 3, 4), (1, 2, 0, 4)):
        for options in ({}, {"is_causal": True}, {"block": 1}, {"cu_seqlens": torch.zeros(3, dtype=torch.int32)}):
            q = torch.randn(size, requires_grad=True)
            if "cu_seqlens" in options and size[0] == 0:
                continue
            o, (products, sums) = linear_attention(q, q, q, map=None, return_state=True, **options)
            (o.sum() + products.sum() + sums.sum()).backward()
            assert o.shape == size
            assert products.isfinite().all()


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_and_precision_settings_have_no_effect(dtype, mask):
    """This includes autocast around the backward pass, and the precision of float32 products."""
    case = replace(LinearCase(dtype=dtype, state=True, return_state=True, act="softplus", head_dim=64), **mask)
    inputs = make_linear_inputs(case)
    expected = run_linear(inputs, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        found = run_linear(inputs, "reference")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        seen = torch.backends.mkldnn.matmul.fp32_precision
        loose = run_linear(inputs, "reference")
        assert torch.backends.mkldnn.matmul.fp32_precision == seen != "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
    assert found["o"].dtype == dtype
    assert found["S"].dtype == torch.float32
    for name, right in expected.items():
        assert torch.equal(found[name], right), name
        assert torch.equal(loose[name], right), name


def test_products_are_formed_in_ieee(monkeypatch):
    """Check the setting at the product itself, because many CPUs have no other precision."""
    seen = []
    rounded = reference_products._rounded

    def watch(t, dtype):
        seen.append((torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision))
        seen.append(torch.is_autocast_enabled("cpu"))
        return rounded(t, dtype)

    monkeypatch.setattr(reference_products, "_rounded", watch)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cpu", torch.bfloat16):
            run_linear(make_linear_inputs(LinearCase(mask="causal")), "reference")
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(seen) > 20
    assert {*seen} <= {("ieee", "ieee"), False}


def test_rounded_operands():
    """Both operands of each product are rounded, in the forward pass and in derivatives. Sums stay float32."""
    a, b, g = (torch.randn(2, 5, 5) for _ in range(3))

    def low(t):
        return t.bfloat16().float()

    a.requires_grad_()
    b.requires_grad_()
    y = reference_products.product(a, b, torch.bfloat16)
    assert torch.equal(y, low(a) @ low(b))
    assert not torch.equal(y, a @ b)
    da, db = torch.autograd.grad(y, (a, b), g)
    assert torch.equal(da, low(g) @ low(b).mT)
    assert torch.equal(db, low(a).mT @ low(g))
    for mask in MASKS:
        case = replace(LinearCase(dtype=torch.bfloat16, state=True, return_state=True, gate="float"), **mask)
        inputs = make_linear_inputs(case)
        plain, rounded = run_linear(inputs, "reference"), run_linear(inputs, "reference", operands=torch.bfloat16)
        for name in ("S", "domega", "dgate", "dS"):
            assert not torch.equal(plain[name], rounded[name]), name
            torch.testing.assert_close(rounded[name], plain[name], rtol=0.1, atol=0.1 * plain[name].abs().max().item())
    # Values that are exact in 16 bits stay exact.
    case = LinearCase(None, act="relu", normalizer="none", head_dim=4, shape=(3,))
    inputs = make_linear_inputs(case)
    whole = replace(inputs, qkv=tuple(t.mul(2).round() for t in inputs.qkv), grad=inputs.grad.round())
    exact = run_linear(whole, "reference")
    for name, t in run_linear(whole, "reference", operands=torch.bfloat16).items():
        assert torch.equal(t, exact[name]), name


# --- the error budget -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_reference_keeps_its_own_budget(mask, dtype):
    case = replace(LinearCase(dtype=dtype, gate="float", state=True, return_state=True, layout="packed"), **mask)
    assert check_linear(case, "reference") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wrong_result_exceeds_the_budget(monkeypatch, dtype):
    case = LinearCase(dtype=dtype, shape=(5, 7), mask="causal", gate="float", state=True, return_state=True)
    names = {*run_linear(make_linear_inputs(case), "reference")}
    assert names == {"o", "dq", "dk", "dv", "dgate", "domega", "S", "sums", "dS", "dsums"}
    for name in names:

        def wrong(inputs, impl, _run=run_linear, _name=name, **options):
            found = _run(inputs, "reference", **options)
            if impl == "wrong":
                found[_name] = found[_name] * (1 + 40 * torch.finfo(dtype).eps)
            return found

        monkeypatch.setattr(cases, "run_linear", wrong)
        assert {v.name for v in check_linear(case, "wrong")} == {name}
    monkeypatch.setattr(cases, "run_linear", lambda inputs, impl, **options: run_linear(inputs, "reference", **options))
    assert check_linear(case, "wrong") == []


def test_factories():
    case = LinearCase("rotate", layout="packed", gate="nan", dtype=torch.float16, state=True, return_state=True)
    assert str(case) == (
        "map=rotate, dtype=torch.float16, gate=nan, state=True, return_state=True, layout=packed"
    )  # fmt: skip
    first, again = make_linear_inputs(case), make_linear_inputs(case)
    for a, b in zip(first.qkv, again.qkv, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert a.stride(1) == case.head_dim  # (B, N, 3, H, D)
    assert (first.gate == 0).any()
    assert first.qkv[1].isnan().any(-1).any()
    wide = first.to(torch.float64)
    assert {t.dtype for t in (*wide.qkv, wide.omega, wide.gate, *wide.state, wide.grad)} == {torch.float64}
    assert {t.dtype for t in first.state} == {torch.float32}
    assert make_linear_inputs(LinearCase(k_shape=(2, 2))).qkv[1].shape[2] == 5
    packed = make_linear_inputs(LinearCase(batch=1, cu_seqlens=(3, 0, 13)))
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 16]


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_derivatives_of_any_order(mask):
    """Differentiate with respect to every float input, including coordinates and amplitude."""
    case = LinearCase(
        shape=(5,), prefix=1, batch=1, heads=(2, 1), head_dim=2, v_dim=2, gate="float", state=True, return_state=True,
        act="softplus", dtype=torch.float64, phase="both", amplitude_heads=1, omega_dtype=torch.float64,
    )  # fmt: skip
    short = {"block": 5, "suffix": 0} if mask.get("mask") == "block" else {}
    short |= {"cu_seqlens": (2, 0, 4)} if "cu_seqlens" in mask else {}
    case = replace(case, mask=mask.get("mask", "full"), **short)
    inputs = make_linear_inputs(case).to(torch.float64)
    amplitude, coords = inputs.amplitude, torch.randn(5, 1, dtype=torch.float64)
    tensors = [*inputs.qkv, inputs.omega, inputs.phase, inputs.gate + 0.5, *inputs.state, coords, amplitude]

    def call(q, k, v, omega, phase, gate, S, sums, coords, amplitude):
        o, state = linear_attention(
            q, k, v, omega=omega, phase=phase, gate=gate, state=(S, sums), positions=Coordinates(coords, 1),
            amplitude=amplitude, act="softplus", is_causal=case.mask == "causal", return_state=True,
            block=5 if case.mask == "block" else None, cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip
        return (o, *state)

    leaves = [t.detach().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    plain = [t.detach() for t in tensors]
    values, tangents = jvp(call, tuple(plain), tuple(map(torch.ones_like, plain)))
    eps = 1e-6
    up, down = (call(*(t + s * eps for t in plain)) for s in (1, -1))
    for a, b, t, y, right in zip(up, down, tangents, values, call(*plain), strict=True):
        torch.testing.assert_close((a - b) / (2 * eps), t, rtol=1e-5, atol=1e-6)
        assert torch.equal(y, right)
    with dual_level():  # forward mode without a transform
        outputs = call(*(make_dual(t, torch.ones_like(t)) for t in plain))
        for y, t in zip(outputs, tangents, strict=True):
            torch.testing.assert_close(unpack_dual(y).tangent, t)
    both = [torch.stack([t, t + 1]) for t in plain]
    for y, first, second in zip(vmap(call)(*both), *(call(*(t[i] for t in both)) for i in range(2)), strict=True):
        torch.testing.assert_close(y, torch.stack([first, second]))


def test_bind_matches_run():
    inputs = make_linear_inputs(LinearCase(mask="causal", return_state=True))
    o, after = bind_linear(inputs, "auto")(inputs.qkv, inputs.omega)
    found = run_linear(inputs, "auto")
    assert torch.equal(o, found["o"])
    assert torch.equal(after[0], found["S"])


def test_sequences_do_not_synchronise():
    """cu_seqlens is never read by the host, which is impossible on the meta device."""
    q = torch.empty(1, 2, 100, 4, device="meta")
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    for is_causal in (False, True):
        o, (products, _) = linear_attention(
            q, q, q, map=None, cu_seqlens=cu_seqlens, is_causal=is_causal, return_state=True
        )
        assert o.shape == q.shape
        assert products.shape == (3, 2, 4, 4)


def test_no_table_of_all_pairs():
    """The largest tensor grows linearly with the tokens, not quadratically."""
    sizes = {}
    for num in (1024, 4096):
        largest = [0]

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, largest=largest):
                found = func(*args, **(kwargs or {}))
                for t in found if isinstance(found, (tuple, list)) else (found,):
                    largest[0] = max(largest[0], t.numel() if isinstance(t, torch.Tensor) else 0)
                return found

        q = torch.randn(1, 1, num, 8)
        with Watch():
            linear_attention(q, q, q, map=None, is_causal=True)
            linear_attention(q, q, q, map=None, is_causal=True, cu_seqlens=torch.tensor([0, 5, num]))
            linear_attention(q, q, q, map=None, block=8)
        sizes[num] = largest[0]
    assert sizes[4096] < 4.5 * sizes[1024]
