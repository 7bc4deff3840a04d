"""Integration of maps after a norm with PyTorch."""

import pytest
import torch
from lrpe_md.scripts.common.cases import Case, bind, make_inputs
from parametrizing import COMPILERS, slow_except
from torch import nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from lrpe_md import Grid, Norm, RotateMd, rotate
from lrpe_md.engine.core.call import Needs, Options
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.encode.validate import validate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
FORMS = [
    {"norm": "rms"},
    {"norm": "layer", "norm_over": "heads"},
    {"norm": "layer", "norm_groups": 2, "norm_weight": "by_head"},
]
forms = pytest.mark.parametrize("form", FORMS, ids=str)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def example(device, form, dtype=torch.float64, impl="auto", shape=(2, 3)):
    """Return a function of q, k, omega, phase and weights that makes a call, and arguments for the function."""
    case = Case("rotate", shape, heads=(2, 1), head_dim=4, batch=1, act="silu", dtype=dtype, phase=True, **form)
    inputs = make_inputs(case, device)
    forward = bind(inputs, impl)
    args = [*inputs.xs, inputs.omega.to(dtype), inputs.phase.to(dtype), *inputs.weights.values()]

    def call(q, k, omega, phase, *weights):
        return forward([q, k], omega, phase, weights)

    return call, [a.detach().requires_grad_() for a in args]


@pytest.mark.parametrize("form", slow_except(FORMS[:1], FORMS), ids=str)
def test_gradcheck_of_the_kernels(form, device):
    call, args = example(device, form, impl="triton", shape=(1, 2))  # small, because there are dozens of calls
    assert torch.autograd.gradcheck(call, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, args, fast_mode=True)


@forms
def test_transforms(form, device):
    call, args = example(device, form)
    tangents = tuple(torch.randn_like(a) for a in args)
    plain = tuple(a.detach() for a in args)

    def total(*args):
        return sum(y.sin().sum() for y in call(*args))

    expected = torch.autograd.grad(total(*args), args)
    for i in (0, 4):
        torch.testing.assert_close(grad(total, argnums=i)(*plain), expected[i])
    _, forward = jvp(total, plain, tangents)
    torch.testing.assert_close(forward, sum((a * t).sum() for a, t in zip(expected, tangents, strict=True)))
    assert jacfwd(jacrev(total, argnums=4), argnums=4)(*plain).isfinite().all()
    stacked = vmap(lambda q: call(q, *plain[1:])[0])(torch.stack([plain[0], 2 * plain[0]]))
    torch.testing.assert_close(stacked[1], call(2 * plain[0], *plain[1:])[0])


@pytest.mark.sampled
@forms
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_checkpoint(form, impl, device):
    call, args = example(device, form, torch.float32, impl)

    def f(*args):
        return sum(y.sin().sum() for y in call(*args))

    expected = torch.autograd.grad(f(*args), args)
    for a, b in zip(torch.autograd.grad(checkpoint(f, *args, use_reentrant=False), args), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.sampled
@forms
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("backend", COMPILERS)
def test_compile(form, impl, backend, device):
    call, args = example(device, form, torch.float32, impl)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    expected, found = call(*args), compiled(*args)
    grads = [torch.randn_like(y) for y in expected]
    wanted = torch.autograd.grad(expected, args, grads)
    for a, b in zip((*found, *torch.autograd.grad(found, args, grads)), (*expected, *wanted), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def calls(device, form):
    inputs = make_inputs(Case("rotate", heads=(2, 1), head_dim=4, batch=1, prefix=2, **form), device)
    options, weights = take_norm(Options("rotate"), inputs.norm(), 2)
    return inputs, validate(options, tuple(inputs.xs), inputs.omega, inputs.positions, None, None, weights)


@forms
def test_opcheck(form, device):
    inputs, call = calls(device, form)
    torch.library.opcheck(torch.ops.lrpe_md.forward.default, (inputs.xs, *ENCODE.flatten(call)))
    for needs in (Needs(), Needs(norm=True), Needs(omega=True, norm=True)):
        args = (inputs.grads, inputs.xs, [], *ENCODE.flatten(call), *needs)
        torch.library.opcheck(torch.ops.lrpe_md.backward.default, args)


@forms
def test_operator_agrees_with_launcher(form, device):
    inputs, call = calls(device, form)
    args = (inputs.grads, inputs.xs, [])
    needs = Needs(omega=True, norm=True)
    expected = [
        *torch.ops.lrpe_md.forward(inputs.xs, *ENCODE.flatten(call)),
        *torch.ops.lrpe_md.backward(*args, *ENCODE.flatten(call), *needs),
    ]
    found = ENCODE.forward(call, inputs.xs, (), direct=True)
    found += ENCODE.backward(call, *args, needs, direct=True)
    assert len(found) == len(expected) == 5 + len(inputs.weights)
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self, over: str) -> None:
        super().__init__()
        self.rope, self.over = RotateMd(8, 2), over
        self.q_norm = nn.Parameter(torch.rand(4, 8) if over == "heads" else torch.rand(8))

    def forward(self, q, k, height: int, width: int):
        norm = Norm("rms", (self.q_norm, self.q_norm), over=self.over)
        return self.rope(q, k, positions=Grid((height, width)), norm=norm)


@pytest.mark.parametrize("over", slow_except(["head"], ["head", "heads"]))
def test_one_graph_for_all_sizes(over, device):
    block = Block(over).to(device)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for height, width in ((3, 4), (5, 6), (7, 4)):
        q, k = (torch.randn(2, 4, height * width, 8, device=device, requires_grad=True) for _ in range(2))
        for a, b in zip(compiled(q, k, height, width), block(q, k, height, width), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("over", ["head", "heads"])
def test_export(over, device):
    block = Block(over).to(device)
    q, k = torch.randn(2, 4, 12, 8, device=device), torch.randn(2, 4, 12, 8, device=device)
    exported = torch.export.export(block, (q, k, 3, 4)).module()
    for a, b in zip(exported(q, k, 3, 4), block(q, k, 3, 4), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("over", ["head", "heads"])
def test_cached_call_uses_new_weights(over, device):
    """The cache contains no weights. Weights of a different form are validated again."""
    q = torch.randn(1, 4, 6, 8, device=device)
    omega, grid = torch.randn(1, 4, 2, device=device), Grid((2, 3))
    size = (4, 8) if over == "heads" else (8,)
    for scale in (1.0, 2.0):
        norm = Norm(weight=torch.full(size, scale, device=device), over=over)
        y = rotate(q, omega=omega, positions=grid, norm=norm)
        torch.testing.assert_close(y, scale * rotate(q, omega=omega, positions=grid, norm=Norm(over=over)))
    with pytest.raises(ValueError, match=r"norm\.weight"):
        rotate(q, omega=omega, positions=grid, norm=Norm(weight=torch.ones(7, device=device), over=over))
