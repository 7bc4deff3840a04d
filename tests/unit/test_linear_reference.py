"""The reference of linear attention against the quadratic form: weights q̂ k̂ᵀ, masked, then normalised.

The quadratic form is written from the formula, in float64 and N × N; it shares nothing with the package.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from lrpe_md.testing import LinearCase, make_linear_inputs, run_linear

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
    """x̄ and x̂ of tokens on a grid, token by token and pair by pair."""
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
                parts = [t * cos, t * sin]
                rows.append(torch.cat(parts if case.order == "cos_sin" else parts[::-1], -1))
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
    """Which keys (columns) a query (row) sees."""
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
    """o, S and Σ behind the last token."""
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
        if case.cu_seqlens is None:  # (B, H, N, ..)
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


def compared(case):
    inputs = make_linear_inputs(replace(case, dtype=torch.float64, omega_dtype=torch.float64, return_state=True))
    inputs = inputs.to(torch.float64)
    found = run_linear(inputs, "reference")
    tensors = {"dq": inputs.qkv[0], "dk": inputs.qkv[1], "dv": inputs.qkv[2], "domega": inputs.omega}
    tensors |= {"dphase": inputs.phase, "dgate": inputs.gate}
    tensors |= dict(zip(("dS", "dsums"), inputs.state, strict=False))
    if inputs.gate is not None:  # a gate of 0 takes its token out
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
    expected = {"o": o, **dict(zip(("S", "sums"), after, strict=False))}
    wanted = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    grads = torch.autograd.grad([*expected.values()], [*wanted.values()], [inputs.grad, *inputs.grad_state])
    expected |= dict(zip(wanted, grads, strict=True))
    if inputs.gate is not None:
        expected |= {n: expected[n].masked_fill(out, 0) for n in ("dk", "dv")}
        if "dgate" in expected:
            expected["dgate"] = expected["dgate"].masked_fill(inputs.gate == 0, 0)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        atol = 1e-9 * max(1, right.abs().max().item())  # "encoded" divides by what is near 0
        torch.testing.assert_close(found[name], right, rtol=1e-9, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    return found


MASKS = [
    {"mask": "full"},
    {"mask": "causal", "shape": (7, 19)},
    {"mask": "block", "block": 5, "suffix": 2},
    {"shape": (7, 19), "cu_seqlens": (1, 0, 65, 64, 4), "batch": 1},
    {"mask": "causal", "shape": (7, 19), "cu_seqlens": (0, 130, 4, 0), "batch": 1},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("map", ["cosine", "rotate", None])
def test_the_quadratic_form(map, normalizer, mask):
    case = LinearCase(map, (3, 5), head_dim=6, normalizer=normalizer, gate="float", state=True)
    compared(replace(case, **mask))
    compared(replace(case, act="softplus", state=False, gate="bool", **mask))
