"""Integration of the caller's tables with PyTorch: derivatives, transforms, compilers, operators.

On a CPU, ``triton`` is the interpreter in eager mode and the registered operator under compilers. ``auto`` is the
reference on a CPU and the kernels on a GPU.
"""

import pytest
import torch
from parametrizing import COMPILERS, parametrize_each, slow_except
from test_boundary import graph_counter
from torch import nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from lrpe_md import Norm, cosine, rotate
from lrpe_md.engine.core.call import CallerTables, CosSin, Needs, Options
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.encode.validate import validate

MAPS, IMPLS = {"cosine": cosine, "rotate": rotate}, ("auto", "triton")
KINDS = ("pairs", "full", "complex", "by sample and head")
pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def draw(device, kind, dtype=torch.float64, num_tokens=7, batch=2):
    """Draw q, k and tables for all but two of their tokens."""
    generator = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)

    width = 8 if kind in ("full", "by sample and head") else 4
    outer = (2, 2) if kind == "by sample and head" else ()
    cos, sin = (randn(*outer, num_tokens - 2, width) for _ in range(2))
    tables = torch.complex(cos, sin) if kind == "complex" else (cos, sin)
    if outer:
        batch = 2
    return [randn(batch, heads, num_tokens, 8).requires_grad_() for heads in (4, 2)], tables


def encode(q, k, tables, impl="auto", **options):
    return rotate(q, k, tables=tables, prefix=1, act="silu", pairs="interleaved", impl=impl, **options)


@pytest.mark.slow
@pytest.mark.sampled
@parametrize_each("kind impl act", KINDS, IMPLS, ["none", "silu", "softmax"])
def test_gradcheck_and_gradgradcheck(kind, impl, act, device):
    xs, tables = draw(device, kind, batch=1)

    def f(*xs):
        return rotate(*xs, tables=tables, prefix=1, act=act, dim=-2 if act == "softmax" else None, impl=impl)

    assert torch.autograd.gradcheck(f, xs, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, xs, fast_mode=True)


@pytest.mark.slow
def test_gradients_of_a_norm(device):
    xs, tables = draw(device, "full", batch=1)
    weight = torch.rand(8, dtype=torch.float64, device=device, requires_grad=True)

    def f(*args):
        return rotate(*args[:2], tables=tables, prefix=1, norm=Norm("rms", args[2]), impl="triton")

    assert torch.autograd.gradcheck(f, (*xs, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (*xs, weight), fast_mode=True)


@pytest.mark.slow
@pytest.mark.sampled
@parametrize_each("kind impl options", KINDS, IMPLS, [{}, {"act": "none"}, {"norm": Norm("layer")}, {"inverse": True}])
def test_gradients_to_tables(kind, impl, options, device):
    xs, tables = draw(device, kind, batch=1)
    leaves = [t.requires_grad_() for t in (tables if isinstance(tables, tuple) else (tables,))]

    def f(*args):
        given = args[2:] if len(args) == 4 else args[2]
        return rotate(*args[:2], tables=given, prefix=1, impl=impl, **{"act": "silu", **options})

    assert torch.autograd.gradcheck(f, (*xs, *leaves), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (*xs, *leaves), fast_mode=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_to_tables_of_the_cosine_map(impl, device):
    xs, tables = draw(device, "full", batch=1)
    leaves = [t.requires_grad_() for t in tables]

    def f(q, k, *tables):
        return cosine(q, k, tables=tables, prefix=1, act="relu", impl=impl)

    assert torch.autograd.gradcheck(f, (*xs, *leaves), fast_mode=True)


def test_gradients_to_one_of_the_tables(device):
    xs, (cos, sin) = draw(device, "pairs")
    leaf = sin.requires_grad_()

    def f(sin):
        return rotate(*(x.detach() for x in xs), tables=(cos, sin), prefix=1, impl="triton")

    assert torch.autograd.gradcheck(f, leaf, fast_mode=True)


def test_only_tables_are_saved_by_a_linear_map(device):
    xs, tables = draw(device, "full")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        rotate(*xs, tables=tables, prefix=1, impl="triton")
    assert kept == [t.shape for t in tables]


def test_transforms(device):
    xs, tables = draw(device, "full")
    q, k = (x.detach() for x in xs)
    tangents = tuple(torch.randn_like(t) for t in (q, *tables))

    def f(q, cos, sin):
        return encode(q, k, (cos, sin))[0]

    args = (q, *tables)
    value, tangent = jvp(f, args, tangents)
    torch.testing.assert_close(value, f(*args))
    plus, minus = (f(*(a + s * t for a, t in zip(args, tangents, strict=True))) for s in (1e-6, -1e-6))
    torch.testing.assert_close((plus - minus) / 2e-6, tangent, rtol=1e-6, atol=1e-7)
    stacked = [torch.stack([a, 2 * a]) for a in args]
    for y, *each in zip(vmap(f)(*stacked), *stacked, strict=True):
        torch.testing.assert_close(y, f(*each))

    def total(q):
        return f(q, *tables).sin().sum()

    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad(total)(q), torch.autograd.grad(total(leaf), leaf)[0])
    with pytest.raises(ValueError, match=r"torch\.func transform"):
        grad(lambda q: rotate(q, tables=tables, prefix=1, impl="triton").sum())(q)


@pytest.mark.slow
@parametrize_each("kind impl dynamic learned", KINDS, IMPLS, [False, True], [False, True])
@pytest.mark.parametrize("backend", COMPILERS)
def test_compile_training(kind, impl, dynamic, learned, backend, device):
    xs, tables = draw(device, kind, torch.float32)

    def f(*args):
        return sum(y.sin().sum() for y in encode(*args[:2], args[2:] if len(args) == 4 else args[2], impl=impl))

    args = (*xs, *(t.requires_grad_(learned) for t in (tables if isinstance(tables, tuple) else (tables,))))
    xs = args if learned else xs
    expected = torch.autograd.grad(f(*args), xs)
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=backend)
    for a, b in zip(torch.autograd.grad(compiled(*args), xs), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", slow_except(["triton"], IMPLS))
def test_compile_once_for_all_lengths(impl, device):
    backend, graphs = graph_counter()
    compiled = torch.compile(
        lambda q, k, cos, sin: encode(q, k, (cos, sin), impl=impl), fullgraph=True, dynamic=True, backend=backend
    )
    for num_tokens in (12, 7, 31):
        xs, tables = draw(device, "full", torch.float32, num_tokens)
        for y, expected in zip(compiled(*xs, *tables), encode(*xs, tables, impl=impl), strict=True):
            torch.testing.assert_close(y, expected)
    assert len(graphs) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["full", "complex"])
@pytest.mark.parametrize("impl", IMPLS)
def test_export(impl, kind, device):
    class Model(nn.Module):
        def forward(self, q, k, *tables):
            return encode(q, k, tables if len(tables) == 2 else tables[0], impl=impl)

    xs, tables = draw(device, kind, torch.float32)
    tables = tables if isinstance(tables, tuple) else (tables,)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch}, {0: batch}, tuple({} for _ in tables))
    args = (*(x.detach() for x in xs), *tables)
    program = torch.export.export(Model(), args, dynamic_shapes=shapes)
    args = (*(torch.cat([x, 2 * x, x])[:5] for x in args[:2]), *tables)
    for a, b in zip(program.module()(*args), Model()(*args), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("act", "dim"), [("none", None), ("softmax", -2)])
def test_operators(act, dim, kind, device):
    """The operators pass opcheck, and agree with the kernels on a CPU."""
    xs, tables = draw(device, kind, torch.float32)
    xs = [x.detach() for x in xs]
    cos_sin = CosSin(torch.view_as_real(tables), None) if kind == "complex" else CosSin(*tables, inverse=True)
    options, weights = Options("rotate", act, dim), ()
    if dim is None:
        options, weights = take_norm(options, Norm("rms", torch.rand(8, device=device)), 2)
    call = validate(options, tuple(xs), None, CallerTables(cos_sin, 1), None, None, *([weights] if weights else []))
    flat = ENCODE.flatten(call)
    torch.library.opcheck(torch.ops.lrpe_md.forward.default, (xs, *flat))
    outs = torch.ops.lrpe_md.forward(xs, *flat)
    grads, stats, needs = [torch.randn_like(y) for y in outs[:2]], outs[2:], Needs(norm=dim is None)
    torch.library.opcheck(torch.ops.lrpe_md.backward.default, (grads, xs, stats, *flat, *needs))
    expected = [*outs, *torch.ops.lrpe_md.backward(grads, xs, stats, *flat, *needs)]
    found = ENCODE.forward(call, xs, (), direct=True)
    found += ENCODE.backward(call, grads, xs, stats, needs, direct=True)
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_checkpoint_autocast_and_inference_mode(device):
    xs, tables = draw(device, "full", torch.float32)
    expected = encode(*xs, tables, impl="triton")
    again = checkpoint(lambda *xs: encode(*xs, tables, impl="triton"), *xs, use_reentrant=False)
    grads = [torch.randn_like(y) for y in expected]
    for a, b in zip(torch.autograd.grad(again, xs, grads), torch.autograd.grad(expected, xs, grads), strict=True):
        assert torch.equal(a, b)
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
        for a, b in zip(encode(*xs, tables, impl="triton"), expected, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)


@pytest.mark.parametrize("map", MAPS)
def test_meta_and_fake_tensors(map, device):
    x, table = torch.randn(2, 3, 7, 8, device="meta"), torch.randn(5, 8, device="meta")
    y = MAPS[map](x, tables=(table, table), prefix=1)
    assert y.shape == (2, 3, 7, 16 if map == "cosine" else 8)
