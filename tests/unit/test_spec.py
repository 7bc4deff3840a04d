"""Compare every implementation with the two source documents, written as loops over tokens and channels.

The loops use float64 torch scalars, so that autograd differentiates them, and share no code with the package.
"""

import math
from typing import get_args

import pytest
import torch
from parametrizing import ACTS, parametrize_each

import lrpe_md
from lrpe_md import lrpe_cosine_md, lrpe_rotate_1d, lrpe_rotate_md, reference
from lrpe_md.testing import budget_violation, rounded_angles


def activation(x, act, dim):
    """Apply f_act to (N, D)."""
    if act == "softmax":
        e = (x - x.amax(dim, keepdim=True).detach()).exp()
        return e / e.sum(dim, keepdim=True)
    formulas = {
        "none": lambda x: x,
        "relu": lambda x: x * (x > 0),
        "sigmoid": lambda x: 1 / (1 + (-x).exp()),
        "silu": lambda x: x / (1 + (-x).exp()),
        "softplus": lambda x: x.clamp_min(0) + torch.log1p((-x.abs()).exp()),
    }
    return formulas[act](x)


def serial_to_coordinates(s, n):
    """Solve Σ s_j N_j = s, N_1 = 1, N_{j+1} = n_j N_j for n = (n_1, ..., n_k), fastest axis first."""
    coordinates = []
    for size in n:
        coordinates.append(s % size)
        s //= size
    return coordinates  # s_1, ..., s_k


def cosine_md_loop(x, theta, shape, l, act, dim, axis_order):  # noqa: E741
    """Implement ``lrpe_cosine_md`` of the LRPE specification on X (B, H, l + n, D), θ (E) or (H, E)."""
    batch, heads, total, d = x.shape
    rows = []
    for b in range(batch):
        for h in range(heads):
            x_bar = activation(x[b, h], act, dim)
            for t in range(total):
                if t < l:
                    angles = [torch.zeros((), dtype=x.dtype)] * d
                else:
                    s = serial_to_coordinates(t - l, shape[::-1])
                    s = s if axis_order == "minor_first" else s[::-1]
                    th = theta if theta.ndim == 1 else theta[h]
                    angles = [s_j * w for s_j in s for w in th.unbind()][:d]
                row = x_bar[t].unbind()
                cos = [row[c] * torch.cos(angles[c]) for c in range(d)]
                sin = [row[c] * torch.sin(angles[c]) for c in range(d)]
                rows.append(torch.stack(cos + sin))
    return torch.stack(rows).reshape(batch, heads, total, 2 * d)


def rotate_loop(x, angle, act, dim, first, width):
    """Implement ``lrpe_rotate_1d`` of the LRPE specification on the channels first ... first + width.

    O_1 = X_1 cos - X_2 sin, O_2 = X_1 sin + X_2 cos
    """
    batch, heads, total, d = x.shape
    half = width // 2
    rows = []
    for b in range(batch):
        for h in range(heads):
            x_bar = activation(x[b, h], act, dim)
            for t in range(total):
                row = x_bar[t].unbind()
                out = list(row)
                for k in range(half):
                    a, c = row[first + k], row[first + half + k]
                    phi = angle(b, h, t, k)
                    cos, sin = torch.cos(phi), torch.sin(phi)
                    out[first + k] = a * cos - c * sin
                    out[first + half + k] = a * sin + c * cos
                rows.append(torch.stack(out))
    return torch.stack(rows).reshape(batch, heads, total, d)


def compare(call, loop, x, theta, dtype=torch.float32):
    """Compare y, dx and dθ of call(x, theta, impl=...) with those of loop(x, theta).

    Gradients of several dy are judged together, because θ has too few entries for an RMS.
    """

    def run(f, x, theta):
        x, theta = x.detach().requires_grad_(), theta.detach().requires_grad_()
        y = f(x, theta)
        dys = [randn(*y.shape, seed=10 + i).to(dtype).to(y.dtype) for i in range(8)]
        if f is loop:  # loops are slow, so all dy share one forward pass
            return (y.detach(), *torch.autograd.grad(y, (x, theta), torch.stack(dys), is_grads_batched=True))
        found = [torch.autograd.grad(y, (x, theta), dy, retain_graph=True) for dy in dys]
        return (y.detach(), *(torch.stack(t) for t in zip(*found, strict=True)))

    def implementation(impl):
        return lambda x, theta: call(x, theta, impl=impl)

    x, theta = x.to(dtype), theta.to(dtype)
    exact = run(loop, x.double(), theta.double())
    for r, e in zip(run(implementation("reference"), x.double(), theta.double()), exact, strict=True):
        torch.testing.assert_close(r, e, rtol=1e-12, atol=1e-12)  # the float64 reference equals the document
    found = run(implementation("triton"), x, theta)
    with rounded_angles():
        same = run(implementation("reference"), x, theta)
    for name, f, s, e in zip(("y", "dx", "dtheta"), found, same, exact, strict=True):
        violation = budget_violation(name, f, s, e)
        assert violation is None, str(violation)


@pytest.mark.parametrize("map", ["cosine", "rotate"])
@pytest.mark.parametrize(("act", "dim"), [("none", None), ("silu", None), ("softmax", -1)])
def test_phase(map, act, dim):
    """Unlike in the documents, φ[h, c] is added to Θ on grid tokens. ω (H, C, K) is dense. Its last column is φ."""
    channels = 6 if map == "cosine" else 3
    x, packed = randn(1, 2, 9, 6), randn(2, channels, 3, seed=2)

    def call(x, packed, impl):
        f = lrpe_md.cosine if map == "cosine" else lrpe_md.rotate
        omega, phase = packed[..., :2].contiguous(), packed[..., 2].contiguous()
        return f(x, omega=omega, phase=phase, positions=lrpe_md.Grid((2, 3), 2, 1), act=act, dim=dim, impl=impl)

    def loop(x, packed):
        rows = []
        for h in range(2):
            x_bar = activation(x[0, h], act, dim)
            for t in range(9):
                s1, s2 = serial_to_coordinates(t - 2, (3, 2))
                angles = [s2 * w[0] + s1 * w[1] + w[2] for w in packed[h]]
                if not 2 <= t < 8:
                    angles = [torch.zeros((), dtype=x.dtype)] * channels
                if map == "cosine":
                    row = [x_bar[t, c] * f(angles[c]) for f in (torch.cos, torch.sin) for c in range(6)]
                else:
                    a, b = x_bar[t, :3], x_bar[t, 3:]
                    row = [a[c] * torch.cos(angles[c]) - b[c] * torch.sin(angles[c]) for c in range(3)]
                    row += [a[c] * torch.sin(angles[c]) + b[c] * torch.cos(angles[c]) for c in range(3)]
                rows.append(torch.stack(row))
        return torch.stack(rows).reshape(1, 2, 9, -1)

    compare(call, loop, x, packed)


def randn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GRIDS = [((7,), 8, 8), ((3, 4), 8, 4), ((3, 2), 7, 4), ((2, 3, 2), 8, 3), ((2, 1, 2, 3), 10, 3), ((2, 2), 9, 6)]


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "d", "e"), GRIDS)
@pytest.mark.parametrize("l", [0, 1, 5])
@pytest.mark.parametrize("per_head", [False, True])
def test_cosine_md_grids(shape, d, e, l, per_head):  # noqa: E741
    x = randn(1, 2, l + math.prod(shape), d)
    theta = randn(2, e, seed=2) if per_head else randn(e, seed=2)
    axis_order = "major_first" if l == 1 else "minor_first"

    def call(x, theta, impl):
        return lrpe_cosine_md(x, theta, shape=shape, l=l, axis_order=axis_order, impl=impl)

    compare(call, lambda x, theta: cosine_md_loop(x, theta, shape, l, "none", None, axis_order), x, theta)


@pytest.mark.parametrize(("act", "dim"), ACTS)
def test_cosine_md_activations(act, dim):
    x, theta = randn(2, 2, 13, 8), randn(2, 4, seed=2)

    def call(x, theta, impl):
        return lrpe_cosine_md(x, theta, shape=(3, 4), l=1, act=act, dim=dim, impl=impl)

    compare(call, lambda x, theta: cosine_md_loop(x, theta, (3, 4), 1, act, dim, "minor_first"), x, theta)


def test_default_axis_order_follows_the_document():
    x = randn(1, 1, 6, 4)
    theta = randn(2, seed=2)
    y = lrpe_cosine_md(x, theta, shape=(3, 2))
    torch.testing.assert_close(y, cosine_md_loop(x, theta, (3, 2), 0, "none", None, "minor_first"))
    major = lrpe_cosine_md(x, theta, shape=(3, 2), axis_order="major_first")
    torch.testing.assert_close(major, cosine_md_loop(x, theta, (3, 2), 0, "none", None, "major_first"))
    assert not torch.allclose(y, major)


@pytest.mark.sampled
@parametrize_each(
    "theta_shape offset rotary_dim", ["(h, d/2)", "(d/2)", "(h)"], [0, 3, "by sample"], [None, 4, slice(2, 8)],
)  # fmt: skip
def test_rotate_1d(theta_shape, offset, rotary_dim):
    first, last, _ = (rotary_dim if isinstance(rotary_dim, slice) else slice(rotary_dim)).indices(10)
    half = (last - first) // 2
    x = randn(2, 3 if half != 3 else 4, 11, 10)
    theta = {"(h, d/2)": randn(x.shape[1], half), "(d/2)": randn(half), "(h)": randn(x.shape[1])}[theta_shape]
    start = torch.tensor([4, 9]) if offset == "by sample" else offset

    def angle_of(theta):
        def angle(b, h, t, k):
            w = theta[h, k] if theta.ndim == 2 else theta[k] if theta_shape == "(d/2)" else theta[h]
            return (t + (int(start[b]) if offset == "by sample" else start)) * w

        return angle

    def call(x, theta, impl):
        return lrpe_rotate_1d(x, theta, offset=start, rotary_dim=rotary_dim, impl=impl)

    compare(call, lambda x, theta: rotate_loop(x, angle_of(theta), "none", None, first, last - first), x, theta)


@pytest.mark.parametrize(("act", "dim"), ACTS)
def test_rotate_1d_activations(act, dim):
    x, theta = randn(1, 2, 9, 8), randn(2, 3, seed=2)

    def call(x, theta, impl):
        return lrpe_rotate_1d(x, theta, act=act, dim=dim, rotary_dim=6, impl=impl)

    def loop(x, theta):
        return rotate_loop(x, lambda b, h, t, k: t * theta[h, k], act, dim, 0, 6)

    compare(call, loop, x, theta)


def test_theta_of_length_h_and_half_is_shared_by_heads():
    x, theta = randn(1, 4, 5, 8), randn(4)
    y = lrpe_rotate_1d(x, theta)
    torch.testing.assert_close(y, rotate_loop(x, lambda b, h, t, k: t * theta[k], "none", None, 0, 8))


@pytest.mark.parametrize(("shape", "d", "e"), [((3, 4), 8, 2), ((2, 3, 2), 10, 2)])
def test_rotate_md(shape, d, e):
    x, theta = randn(1, 2, 2 + math.prod(shape), d), randn(2, e, seed=2)

    def call(x, theta, impl):
        return lrpe_rotate_md(x, theta, shape=shape, l=2, impl=impl)

    def loop(x, theta):
        def angle(b, h, t, k):
            s = serial_to_coordinates(t - 2, shape[::-1]) if t >= 2 else [0] * len(shape)
            return [s_j * theta[h, i] for s_j in s for i in range(e)][k]

        return rotate_loop(x, angle, "none", None, 0, d)

    compare(call, loop, x, theta)


@pytest.mark.parametrize(("act", "dim"), [("none", None), ("silu", None), ("softmax", -2)])
@pytest.mark.parametrize("per_head", [False, True])
def test_passes_by_name(act, dim, per_head):
    """The document's forward and backward functions are the two halves of the differentiable one."""
    x = randn(2, 2, 13, 8).float().requires_grad_()
    theta = (randn(2, 4, seed=2) if per_head else randn(4, seed=2)).float().requires_grad_()
    kwargs = {"shape": (3, 4), "l": 1, "act": act, "dim": dim}
    y = lrpe_md.lrpe_cosine_md_triton(x, theta, **kwargs)
    do = randn(*y.shape, seed=3).float()
    expected = torch.autograd.grad(y, (x, theta), do)
    assert torch.equal(lrpe_md.lrpe_cosine_md_fwd_triton(x, theta, **kwargs), y)
    for a, b in zip(lrpe_md.lrpe_cosine_md_bwd_triton(do, x, theta, **kwargs), expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(lrpe_md.lrpe_cosine_md_torch(x, theta, **kwargs), y)

    o, cache = lrpe_md.lrpe_cosine_md_cache_fwd_triton(x, theta, **kwargs)
    assert torch.equal(o, y)
    assert cache.shape == (2 if per_head else 1, 13, 8)
    assert cache.dtype == torch.float32
    assert cache[:, 0].abs().max() == 0
    found = lrpe_md.lrpe_cosine_md_cache_bwd_triton(do, x, theta, cache, **kwargs)
    again = torch.autograd.grad(lrpe_md.lrpe_cosine_md_cache_triton(x, theta, **kwargs), (x, theta), do)
    for a, b, c in zip(found, again, expected, strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)
    # Other angles in the cache give another gradient.
    other, _ = lrpe_md.lrpe_cosine_md_cache_bwd_triton(do, x, theta, cache + 0.1, **kwargs)
    assert not torch.allclose(other, expected[0])

    kwargs = {"offset": 2, "act": act, "dim": dim, "rotary_dim": 6}
    theta = randn(3, seed=2).float().requires_grad_()
    y = lrpe_md.lrpe_rotate_1d_triton(x, theta, **kwargs)
    expected = torch.autograd.grad(y, (x, theta), do[..., :8])
    assert torch.equal(lrpe_md.lrpe_rotate_1d_fwd_triton(x, theta, **kwargs), y)
    for a, b in zip(lrpe_md.lrpe_rotate_1d_bwd_triton(do[..., :8], x, theta, **kwargs), expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(lrpe_md.lrpe_rotate_1d_torch(x, theta, **kwargs), y)


def test_cached_angles_equal_theta_modulo_a_turn():
    x, theta = randn(1, 2, 13, 8).float(), randn(2, 4, seed=2).float()
    _, cache = lrpe_md.lrpe_cosine_md_cache_fwd_triton(x, theta, shape=(3, 4), l=1)
    exact = torch.zeros(2, 13, 8, dtype=torch.float64)
    for s in range(12):
        s1, s2 = s % 4, s // 4
        exact[:, s + 1] = torch.cat([s1 * theta.double(), s2 * theta.double()], dim=-1)
    difference = (cache - exact) / (2 * math.pi)
    assert (difference - difference.round()).abs().max() * 2 * math.pi < 1e-6
    assert cache.abs().max() <= math.pi + 1e-6


def test_types_name_the_entries_of_the_tables():
    assert get_args(reference.Act) == tuple(reference.ACTIVATIONS)
    assert get_args(reference.MapName) == tuple(reference.MAPS)
