"""The kernels on a GPU: ``pytest -m gpu``."""

import importlib
import math

import pytest
import torch
import triton
import triton.language as tl
from gpu_memory import skip_without
from lrpe_md.scripts.common.cases import Case, check, make_inputs, run
from parametrizing import ACTS

from lrpe_md import Grid, cosine, rotate
from lrpe_md.testing import budget_violation

pytestmark = pytest.mark.gpu
CONSTEXPR = ("lrpe_md.engine.core.call", "Variant")  # all options that the kernels are compiled for, as one value
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("act", "dim"), ACTS)
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_values_and_gradients(map, act, dim, dtype, nan_filled):
    case = Case(map, (14, 14), act=act, dim=dim, dtype=dtype, head_dim=64, heads=(4, 2), omega_heads=2, phase=True)
    assert not check(case, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "packed", "odd"])
@pytest.mark.parametrize(
    "change",
    [
        {"shape": (127,), "prefix": 0, "head_dim": 24},
        {"shape": (3, 7, 9), "head_dim": 72, "prefix": 5, "suffix": 2},
        {"shape": (2, 3, 4, 5), "head_dim": 80, "act": "silu"},
        {"shape": (1,), "prefix": 0, "heads": (1,)},
        {"shape": (9, 16), "coords": "by_sample", "omega_heads": 2, "phase": True},
        {"shape": (9, 16), "coords": "shared", "prefix": 4, "suffix": 3, "phase": True},
        {"shape": (9, 16), "scale": (0.5, 1.7), "shift": (3.0, -2.0), "start": 5, "length": 100},
        {"shape": (33, 5), "head_dim": 20, "omega_dtype": torch.float64},
        {"shape": (2, 1, 3, 2, 2), "head_dim": 40},
        {"shape": (33,), "prefix": 0, "origin": "by_sample"},
        {"shape": (7, 5), "prefix": 2, "origin": "shared", "scale": 0.5, "head_dim": 24},
    ],
    ids=str,
)
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_shapes_and_strides(map, change, layout, dtype, nan_filled):
    case = Case(map, dtype=dtype, layout=layout, grad_layout="odd" if layout == "odd" else "bnhd", **change)
    assert not check(case, device="cuda")
    assert not check(case, device="cuda", frequencies=False)


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 16, slice(8, 40), slice(4, 64)])
@pytest.mark.parametrize(("act", "dim"), [("none", None), ("silu", None), ("softmax", -1), ("softmax", -2)])
def test_partial_rotation(pairs, rotary_dim, act, dim, nan_filled):
    case = Case("rotate", (5, 13), head_dim=64, pairs=pairs, rotary_dim=rotary_dim, act=act, dim=dim)
    assert not check(case, device="cuda")


@pytest.mark.parametrize("num_axes", [1, 2, 3, 4])
@pytest.mark.parametrize("omega_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["coordinates", "grid"])
def test_angle_error_at_far_positions(num_axes, omega_dtype, kind):
    """Angles, read back from a rotation of (1, 0), are within 1e-6 rad.

    Positions reach 2^20 on each axis, or the end of a plain grid, whose turns are counted in integers.
    """
    num, channels = 4096, 32
    generator = torch.Generator().manual_seed(0)
    positions = coords = torch.randint(0, 2**20, (num, num_axes), generator=generator, dtype=torch.int32)
    coords[0] = 2**20
    if kind == "grid":
        shape = {1: (2**16,), 2: (2**15, 2**15), 3: (1200, 1200, 1200), 4: (200, 200, 200, 200)}[num_axes]
        positions = Grid(shape, start=math.prod(shape) - num)
        coords = positions.coordinates()
    omega = torch.rand(1, channels, num_axes, generator=generator, dtype=torch.float64)
    omega = omega.to(omega_dtype)
    x = torch.zeros(1, 1, num, 2 * channels)
    x[..., :channels] = 1
    positions = positions.cuda() if isinstance(positions, torch.Tensor) else positions
    y = rotate(x.cuda(), omega=omega.cuda(), positions=positions).cpu().double()
    cos, sin = y[0, 0, :, :channels], y[0, 0, :, channels:]
    exact = (coords.double()[:, None, :] * omega.double()[0]).sum(-1)
    error = torch.atan2(sin, cos) - exact
    error = (error - 2 * math.pi * (error / (2 * math.pi)).round()).abs()
    print(f"{num_axes} axes, {kind}, {omega_dtype}: largest angle error {error.max():.2e} rad")
    assert error.max() <= 1e-6


@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_frequency_gradient_is_deterministic(map):
    case = Case(map, (30, 31), batch=3, heads=(8, 4), omega_heads=4, head_dim=64, dtype=torch.bfloat16, phase=True)
    inputs = make_inputs(case, "cuda")
    first = run(inputs, "triton")
    for _ in range(10):
        again = run(inputs, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("map", [cosine, rotate])
def test_consecutive_frequency_gradients(map):
    """The second pass is launched during the first, and waits for it. Memory contains the sums of another gradient."""
    x = torch.randn(64, 16, 1024, 64, device="cuda", dtype=torch.bfloat16)
    omega = torch.rand(1, 64 if map is cosine else 32, 2, device="cuda", requires_grad=True)
    y = map(x, omega=omega, positions=Grid((32, 32)))
    dy = torch.randn_like(y)
    grads = [dy, 2 * dy]
    expected = []
    for g in grads:
        expected += torch.autograd.grad(y, omega, g, retain_graph=True)
        torch.cuda.synchronize()
    assert torch.equal(expected[1], 2 * expected[0])
    torch.cuda._sleep(50_000_000)  # keeps the GPU busy until all calls are queued
    found = [torch.autograd.grad(y, omega, grads[i % 2], retain_graph=True)[0] for i in range(8)]
    assert all(torch.equal(domega, expected[i % 2]) for i, domega in enumerate(found))


@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_large_tensor(map):
    """The last rows of more than 2^31 elements equal those of a small call."""
    out_dim = 128 if map == "cosine" else 64
    batch = 2**31 // (16 * 4096 * out_dim) + 1
    skip_without(2 * batch * 16 * 4096 * (64 + out_dim))
    call = cosine if map == "cosine" else rotate
    x = torch.empty(batch, 16, 4096, 64, dtype=torch.bfloat16, device="cuda").normal_()
    omega = torch.rand(1, 64 if map == "cosine" else 32, 2, device="cuda")
    y = call(x, omega=omega, positions=Grid((64, 64)))
    assert y.numel() > 2**31
    assert torch.equal(y[-1:], call(x[-1:], omega=omega, positions=Grid((64, 64))))


def test_many_tokens():
    """All of more than 65,535 × 64 tokens are encoded."""
    num = 65_536 * 64 + 37
    x = torch.randn(1, 1, num, 8, device="cuda")
    omega = torch.rand(1, 4, 1, device="cuda", dtype=torch.float64)
    y = rotate(x, omega=omega, positions=Grid((num,)))
    tail = slice(num - 100, num)
    positions = torch.arange(num, device="cuda")[tail, None]
    exact = rotate(x[:, :, tail].double(), omega=omega, positions=positions, impl="reference")
    same = rotate(x[:, :, tail], omega=omega, positions=positions.double(), impl="reference")
    assert budget_violation("y", y[:, :, tail], same, exact) is None


def test_autocast_keeps_dtype():
    x = torch.randn(1, 2, 9, 16, device="cuda")
    omega = torch.rand(1, 8, 1, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert rotate(x, omega=omega, positions=Grid((9,))).dtype == torch.float32


def test_compiles_with_real_kernels():
    omega = torch.rand(2, 16, 2, device="cuda", requires_grad=True)

    def f(q, k, omega, grid):
        q, k = cosine(q, k, omega=omega, positions=grid, act="silu")
        return (q * q_weights).sum() + (k * k_weights).sum()  # both modes have the same gradients of q and k

    q, k = (torch.randn(2, h, 31, 16, device="cuda", requires_grad=True) for h in (4, 2))
    q_weights, k_weights = (torch.randn(2, h, 31, 32, device="cuda") for h in (4, 2))
    grid = Grid((5, 6), prefix=1)
    expected = torch.autograd.grad(f(q, k, omega, grid), (q, k, omega))
    compiled = torch.compile(f, fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(q, k, omega, grid), (q, k, omega)), expected, strict=True):
        torch.testing.assert_close(a, b)


@triton.jit
def _times(x, V: tl.constexpr):
    return x * (V.num_axes + V.sections[1]) if V.act == "silu" else x


@triton.jit
def _times_kernel(p_x, p_y, N, V: tl.constexpr):
    o = tl.program_id(0) * V.block_n + tl.arange(0, V.block_n)
    tl.store(p_y + o, _times(tl.load(p_x + o, mask=o < N), V), mask=o < N)


def test_a_compiler_launches_a_kernel_with_our_constexpr():
    """Generated code contains the value's repr and imports its class."""
    variant = getattr(importlib.import_module(CONSTEXPR[0]), CONSTEXPR[1])
    value = variant(act="silu", sections=(3, 5), num_axes=2, block_n=32)

    @torch.library.triton_op("lrpe_md_test::times", mutates_args=())
    def times(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(_times_kernel)[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), V=value)
        return y

    def f(x):
        return times(x + 1) - 2

    x = torch.randn(100, device="cuda")
    expected = 7 * (x + 1) - 2
    assert torch.equal(f(x), expected)
    assert torch.equal(torch.compile(f, fullgraph=True)(x), expected)


def test_cuda_graph():
    x = torch.randn(2, 4, 31, 16, device="cuda", requires_grad=True)
    omega = torch.rand(1, 16, 2, device="cuda", requires_grad=True)
    grid = Grid((5, 6), prefix=1, scale=0.5)

    def step():
        y = cosine(x, omega=omega, positions=grid)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, omega))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.normal_()
    expected = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
