"""Integration of the operators with PyTorch: derivatives, transforms, compilers, modes.

On a CPU, ``triton`` is the interpreter in eager mode and the registered operator under compilers. ``auto`` is the
reference on a CPU and the kernels on a GPU.
"""

import pytest
import torch
from lrpe_md.scripts.common.cases import Case, make_inputs
from parametrizing import COMPILERS, parametrize_each
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from lrpe_md import Coordinates, CosineMd, Grid, RotateMd, cosine, rotate
from lrpe_md.engine.core.call import Needs, Options
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.encode.validate import validate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAPS, IMPLS = {"cosine": cosine, "rotate": rotate}, ("auto", "triton")
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(params=IMPLS)
def impl(request):
    return request.param


@pytest.fixture(params=MAPS)
def map(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def example(map: str, device: str, dtype=torch.float64, act="silu", heads=(2, 1), **kwargs):
    """Return a function of only the inputs, omega and phase that makes a call, and arguments for the function."""
    case = Case(map, (2, 3), heads=heads, head_dim=4, batch=1, act=act, dtype=dtype, phase=True, **kwargs)
    inputs = make_inputs(case, device)
    assert inputs.phase is not None
    args = [*inputs.xs, inputs.omega.to(dtype), inputs.phase.to(dtype)]

    def call(*args, impl="auto"):
        *xs, omega, phase = args
        return MAPS[map](
            *xs, omega=omega, phase=phase, positions=inputs.positions, act=case.act, dim=case.dim, impl=impl
        )

    return call, [a.detach().requires_grad_() for a in args]


@pytest.mark.slow
@pytest.mark.sampled
@parametrize_each(
    "chosen map impl", [("none", None), ("silu", None), ("softmax", -1), ("softmax", -2)], list(MAPS), IMPLS,
    fixtures=["map", "impl"],
)  # fmt: skip
def test_gradcheck_and_gradgradcheck(chosen, map, impl, device):
    act, dim = chosen
    call, args = example(map, device, act=act, dim=dim)

    def f(*args):
        return call(*args, impl=impl)

    fast = impl == "triton"  # random directions instead of all entries, because interpreted kernels are slow
    assert torch.autograd.gradcheck(f, args, fast_mode=fast)
    assert torch.autograd.gradgradcheck(f, args, fast_mode=True)


def test_double_backward_of_a_linear_map(map, impl, device):
    """Only omega is saved. The second derivative passes through the gradient of the first one."""
    call, args = example(map, device, act="none")
    fixed = [a.detach() for a in args[2:]]

    def f(q, k):
        return call(q, k, *fixed, impl=impl)

    assert torch.autograd.gradcheck(f, args[:2], fast_mode=True)
    assert torch.autograd.gradgradcheck(f, args[:2], fast_mode=True)


def test_backward_saves_only_required_tensors(map, device):
    def saved(act, frequencies, impl="triton"):
        call, args = example(map, device, act=act)
        args = args[:2] + [a if frequencies else a.detach() for a in args[2:]]
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            call(*args, impl=impl)
        return kept

    x = torch.Size([1, 2, 7, 4])
    assert x not in saved("none", False)
    assert x in saved("none", True)
    assert x in saved("silu", False)
    assert len(saved("none", False)) == 2  # omega and phase


def test_forward_mode_and_transforms(map, device):
    call, args = example(map, device)
    args = [a.detach() for a in args]
    tangents = [torch.randn_like(a) for a in args]
    values, tangents_out = jvp(call, tuple(args), tuple(tangents))

    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(a, t) for a, t in zip(args, tangents, strict=True)]
        for y, v, t in zip(call(*duals), values, tangents_out, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, t)
            torch.testing.assert_close(forward_ad.unpack_dual(y).primal, v)

    def total(*args):
        return sum((y.sin()).sum() for y in call(*args))

    leaves = [a.clone().requires_grad_() for a in args]
    expected = torch.autograd.grad(total(*leaves), leaves)
    for a, b in zip(grad(total, argnums=(0, 1, 2, 3))(*args), expected, strict=True):
        torch.testing.assert_close(a, b)
    # forward over reverse against reverse over reverse
    hessian = jacfwd(jacrev(total, argnums=2), argnums=2)(*args)
    (again,) = torch.autograd.functional.hessian(lambda w: total(args[0], args[1], w, args[3]), (args[2],))[0]
    torch.testing.assert_close(hessian, again)
    # finite differences are independent of our formulas
    eps = 1e-6
    shifted = [call(*(a + s * eps * t for a, t in zip(args, tangents, strict=True))) for s in (1, -1)]
    for plus, minus, t in zip(*shifted, tangents_out, strict=True):
        torch.testing.assert_close((plus - minus) / (2 * eps), t, rtol=1e-6, atol=1e-7)


def test_vmap(map, device):
    call, args = example(map, device)
    stacked = [torch.stack([a.detach(), 2 * a.detach()]) for a in args]
    for y, first, second in zip(
        vmap(call)(*stacked), call(*[a[0] for a in stacked]), call(*[a[1] for a in stacked]), strict=True
    ):
        torch.testing.assert_close(y, torch.stack([first, second]))
    # per-sample gradients
    q, k, omega, phase = (a.detach() for a in args)
    per_sample = vmap(grad(lambda w: call(q, k, w, phase)[0].square().sum()))(torch.stack([omega, 3 * omega]))
    assert per_sample.shape == (2, *omega.shape)


def test_gradient_to_coordinates(device):
    """The kernels don't compute gradients of coordinates, so auto selects the reference."""
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, device=device)
    omega = torch.rand(1, 2, 3, dtype=torch.float64, device=device)
    coords = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: rotate(x, omega=omega, positions=c), (coords,))
    with pytest.raises(ValueError, match="coords"):
        rotate(x, omega=omega, positions=coords, impl="triton")


def test_triton_refuses_transforms(map, device):
    call, args = example(map, device)
    args = [a.detach() for a in args]

    def f(q):
        return call(q, *args[1:], impl="triton")[0].sum()

    with pytest.raises(ValueError, match="impl='auto'"):
        grad(f)(args[0])
    with forward_ad.dual_level(), pytest.raises(ValueError, match="impl='auto'"):
        f(forward_ad.make_dual(args[0], args[0]))


# --- compilers -------------------------------------------------------------------------------------------


def tracing(device: str) -> str:
    """Return a compiler that only traces, because inductor takes seconds to compile C++."""
    return "inductor" if device == "cuda" else "aot_eager"


def graph_counter():
    """Return a backend that counts graphs."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm

    return backend, graphs


@pytest.mark.sampled
@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_training(map, impl, dynamic, backend, device):
    call, args = example(map, device, dtype=torch.float32, act="softmax", dim=-2)

    def f(*args):
        return sum(y.square().sum() for y in call(*args, impl=impl))

    expected = torch.autograd.grad(f(*args), args)
    found = torch.autograd.grad(torch.compile(f, fullgraph=True, dynamic=dynamic, backend=backend)(*args), args)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.sampled
def test_compile_once_for_all_image_sizes(map, impl, device):
    omega = torch.rand(1, 8 if map == "cosine" else 4, 2, device=device, requires_grad=True)

    def f(x, shape, scale):
        return MAPS[map](x, omega=omega, positions=Grid(shape, prefix=1, scale=scale), act="silu", impl=impl)

    torch.manual_seed(0)
    backend, graphs = graph_counter()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for height, width in ((4, 6), (5, 3), (9, 7), (16, 2)):
        x = torch.randn(2, 2, height * width + 1, 8, device=device, requires_grad=True)
        scale = torch.tensor([4 / height, 6 / width], dtype=torch.float64, device=device)
        y, expected = compiled(x, (height, width), scale), f(x, (height, width), scale)
        torch.testing.assert_close(y, expected)
        dy = torch.randn_like(y)  # rotations preserve squares, whose gradient with respect to ω would be rounding error
        for a, b in zip(*(torch.autograd.grad(t, (x, omega), dy) for t in (y, expected)), strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("backend", COMPILERS)
def test_compile_explicit_coordinates(map, impl, backend, device):
    omega = torch.rand(2, 8 if map == "cosine" else 4, 3, device=device)

    def f(x, coords):
        return MAPS[map](x, omega=omega, positions=Coordinates(coords, prefix=1), impl=impl)

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for num in (5, 9):
        x = torch.randn(2, 2, num + 1, 8, device=device)
        coords = torch.randn(2, num, 3, device=device)
        torch.testing.assert_close(compiled(x, coords), f(x, coords))


@pytest.mark.slow
def test_transforms_inside_a_compiled_function(map, device):
    call, args = example(map, device, dtype=torch.float32)
    args = [a.detach() for a in args]
    tangents = [torch.randn_like(a) for a in args]

    def forward_mode(*args):
        return jvp(call, args, tuple(tangents))[1]

    def reverse_mode(*args):
        return grad(lambda w: call(args[0], args[1], w, args[3])[0].square().sum())(args[2])

    for f in (forward_mode, reverse_mode):
        torch.testing.assert_close(torch.compile(f, fullgraph=True, backend=tracing(device))(*args), f(*args))


def test_transforms_of_a_compiled_function(map, device):
    call, args = example(map, device, dtype=torch.float32)
    args = [a.detach() for a in args]

    def f(omega):
        return call(args[0], args[1], omega, args[3])[0].square().sum()

    compiled = torch.compile(f, backend=tracing(device))
    torch.testing.assert_close(grad(compiled)(args[2]), grad(f)(args[2]))
    tangent = (torch.ones_like(args[2]),)
    torch.testing.assert_close(jvp(compiled, (args[2],), tangent), jvp(f, (args[2],), tangent))


@pytest.mark.sampled
def test_export(map, impl, device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = {"cosine": CosineMd, "rotate": RotateMd}[map](8, 2, impl=impl, act="relu", learnable=True)

        def forward(self, x):
            return self.encode(x, x, positions=Grid((3, 4), prefix=1))

    model = Model().to(device)
    x = torch.randn(2, 2, 13, 8, device=device)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 2, 13, 8, device=device)
    for a, b in zip(program.module()(x), model(x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("act", ["none", "silu"])
def test_checkpoint(map, impl, act, device):
    call, args = example(map, device, act=act)

    def f(*args):
        return sum(y.sin().sum() for y in call(*args, impl=impl))

    expected = torch.autograd.grad(f(*args), args)
    for a, b in zip(torch.autograd.grad(checkpoint(f, *args, use_reentrant=False), args), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.sampled
@pytest.mark.parametrize(("act", "dim"), [("none", None), ("softmax", -2)])
def test_opcheck(map, act, dim, device):
    _, args = example(map, device, dtype=torch.float32, act=act, dim=dim)
    *xs, omega, phase = (a.detach() for a in args)
    grid = Grid((2, 3), prefix=1, scale=0.5)
    amplitude = torch.rand(omega.shape[:2], device=device)
    call = ENCODE.flatten(validate(Options(map, act, dim), tuple(xs), omega, grid, phase, amplitude))
    outs = torch.ops.lrpe_md.forward(xs, *call)
    torch.library.opcheck(torch.ops.lrpe_md.forward.default, (xs, *call))
    grads = [torch.randn_like(y) for y in outs[:2]]
    for need in (False, True):
        args = (grads, xs, outs[2:], *call, *Needs(need, need))
        torch.library.opcheck(torch.ops.lrpe_md.backward.default, args)


def test_operator_agrees_with_launcher(map, device):
    """The registered operator (the reference on a CPU) agrees with the interpreted kernels."""
    _, args = example(map, device, dtype=torch.float32, act="softmax", dim=-2)
    *xs, omega, phase = (a.detach() for a in args)
    call = validate(Options(map, "softmax", -2), tuple(xs), omega, Grid((2, 3), 1), phase)
    expected = torch.ops.lrpe_md.forward(xs, *ENCODE.flatten(call))
    found = ENCODE.forward(call, xs, (), direct=True)
    assert len(found) == len(expected) == 4
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_dispatch_modes_see_the_operator(map, device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    call, args = example(map, device, dtype=torch.float32)
    with Watch():
        ys = call(*args, impl="triton")
        torch.autograd.grad([y.sum() for y in ys], args)
    assert "lrpe_md.forward.default" in seen
    assert "lrpe_md.backward.default" in seen


def test_fake_tensors(map, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 13, 3, 4, 8, device=device).permute(2, 0, 3, 1, 4)
        omega = torch.empty(1, 8 if map == "cosine" else 4, 2, device=device)
        y = MAPS[map](x[0], omega=omega, positions=Grid((3, 4), 1), impl="triton")
    assert y.shape == (2, 4, 13, 16 if map == "cosine" else 8)
    assert y.transpose(1, 2).is_contiguous()


def test_autocast_and_inference_mode(map, impl, device):
    call, args = example(map, device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        ys = call(*args, impl=impl)
        grads = torch.autograd.grad([y.sum() for y in ys], args)
    plain = call(*args, impl=impl)
    plain = (*plain, *torch.autograd.grad([y.sum() for y in plain], args))
    for a, b in zip((*ys, *grads), plain, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    with torch.inference_mode():
        for a, b in zip(call(*args, impl=impl), ys, strict=True):
            assert torch.equal(a, b)


def test_functional_call_of_a_module(device):
    module = CosineMd(8, 2, learnable=True, device=device)
    x = torch.randn(1, 2, 12, 8, device=device)

    def loss(params):
        return (
            functional_call(module, params, (x,), {"positions": Grid((3, 4))}).square().mul(x.repeat(1, 1, 1, 2)).sum()
        )

    found = grad(loss)({"log_theta": module.log_theta.detach()})["log_theta"]
    (expected,) = torch.autograd.grad(loss({"log_theta": module.log_theta}), module.log_theta)
    torch.testing.assert_close(found, expected)
    assert found.abs().sum() > 0


# --- what a user's graph does around the call ------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("graph", ["one tensor twice", "k from q", "omega of two layers"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_double_backward_with_dependent_inputs(map, graph, create_graph, device):
    """A double backward differentiates the call, but not the user's graph before its inputs."""
    channels = 4 if map == "cosine" else 2
    leaf = torch.randn(1, 2, 6, 4, dtype=torch.float64, device=device, requires_grad=True)
    omega = torch.rand(1, channels, 2, dtype=torch.float64, device=device, requires_grad=True)

    def f(impl):
        def call(*xs):
            return MAPS[map](*xs, omega=omega, positions=Grid((2, 3)), act="silu", impl=impl)

        q = leaf * 1
        if graph == "omega of two layers":
            return call(call(q)[..., :4]).sin().sum()
        return sum((i + 1) * y.sin().sum() for i, y in enumerate(call(q, q if graph == "one tensor twice" else q * 2)))

    found, expected = (
        torch.autograd.grad(f(i), (leaf, omega), create_graph=create_graph) for i in ("triton", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    if create_graph:
        pairs = (torch.autograd.grad(sum(g.square().sum() for g in gs), (leaf, omega)) for gs in (found, expected))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)


def test_transforms_that_begin_after_the_forward(map, device):
    """Vectorise and differentiate the gradients of a call that ran outside of any transform."""
    call, args = example(map, device, act="none")  # torch has no forward mode for silu's backward
    y = call(*args, impl="triton")[0]
    expected = call(*args, impl="reference")[0]
    batch = torch.randn(3, *y.shape, dtype=y.dtype, device=device)
    pairs = (
        torch.autograd.grad(t, args, batch, is_grads_batched=True, retain_graph=True, allow_unused=True)
        for t in (y, expected)
    )
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a if a is not None else torch.zeros_like(b), b) if b is not None else None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch[0], batch[1])
        tangents = [forward_ad.unpack_dual(torch.autograd.grad(t, args[0], dual)[0]).tangent for t in (y, expected)]
    assert tangents[0] is not None
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("which", ["scale", "shift"])
def test_gradient_to_scale_and_shift(map, which, device):
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64, device=device)
    omega = torch.rand(1, 4 if map == "cosine" else 2, 2, dtype=torch.float64, device=device)
    value = torch.tensor([0.7, 1.2], dtype=torch.float64, device=device, requires_grad=True)

    def f(value, impl="auto"):
        return MAPS[map](x, omega=omega, positions=Grid((2, 3), **{which: value}), impl=impl)

    assert torch.autograd.gradcheck(f, (value,))
    with pytest.raises(ValueError, match="scale, shift or amplitude"):
        f(value, impl="triton")
    f(value.detach(), impl="triton")


def test_grid_is_usable_across_modes(map, device):
    """A grid that was first used in inference mode, in a transform or with fake tensors can be trained."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    omega = torch.rand(1, 4 if map == "cosine" else 2, 1, device=device)

    def f(x, scale, impl="triton"):
        return MAPS[map](x, omega=omega, positions=Grid((5,), scale=scale), impl=impl).sum()

    x = torch.randn(1, 1, 5, 4, device=device, requires_grad=True)
    with torch.inference_mode():
        f(x, 0.25)
    grad(lambda x: f(x, 0.125, "auto"))(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        Grid((5,), scale=0.0625).affine(torch.device(device))
    for scale in (0.25, 0.125, 0.0625):
        torch.autograd.grad(f(x, scale), x)


def test_outputs_may_be_changed_in_place(map, impl, device):
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        base = torch.randn(2, 3, 5, 4, device=device, requires_grad=True)
        back = [order.index(i) for i in range(4)]
        x = base.permute(order).contiguous().permute(back)
        omega = torch.rand(1, 4 if map == "cosine" else 2, 1, device=device)
        y = MAPS[map](x * 1, omega=omega, positions=Grid((5,)), impl=impl)
        assert y.permute(order).is_contiguous()  # the memory layout of x
        y.mul_(2)
        y.sum().backward()


def test_meta_tensors(map, device):
    x = torch.empty(1, 2, 6, 4, device="meta")
    omega = torch.empty(1, 4 if map == "cosine" else 2, 2, device="meta")
    assert MAPS[map](x, omega=omega, positions=Grid((2, 3))).shape[:3] == (1, 2, 6)


def test_negative_views(map, device):
    z = torch.randn(1, 2, 6, 4, dtype=torch.complex64, device=device)
    x = z.conj().imag
    assert x.is_neg()
    omega = torch.rand(1, 4 if map == "cosine" else 2, 2, device=device)
    found, expected = (MAPS[map](x, omega=omega, positions=Grid((2, 3)), impl=i) for i in ("triton", "reference"))
    torch.testing.assert_close(found, expected)


def test_masked_sequence_softmax(map, device):
    """Apply softmax to a channel that begins with more -inf values than a block has tokens."""
    x = torch.randn(1, 1, 4096, 4, dtype=torch.float64, device=device)
    x[:, :, :2500, 1] = float("-inf")
    omega = torch.rand(1, 4 if map == "cosine" else 2, 1, dtype=torch.float64, device=device)
    found, expected = (
        MAPS[map](x, omega=omega, positions=Grid((4096,)), act="softmax", dim=-2, impl=i)
        for i in ("triton", "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_positions_past_2_to_24(impl, device):
    from lrpe_md import lrpe_rotate_1d

    x = torch.randn(1, 1, 5, 4, dtype=torch.float64, device=device)
    theta = torch.tensor([0.7, 0.31], dtype=torch.float64, device=device)
    offset = 2**24 + 1
    expected = lrpe_rotate_1d(x, theta, offset=torch.tensor([offset], device=device), impl="reference")
    torch.testing.assert_close(lrpe_rotate_1d(x, theta, offset=offset, impl=impl), expected)
    found = lrpe_rotate_1d(x.float(), theta, offset=offset, impl=impl)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", COMPILERS)
def test_document_functions_compile(backend, device):
    from lrpe_md import lrpe_cosine_md_bwd_triton, lrpe_cosine_md_fwd_triton

    x, theta = torch.randn(1, 2, 6, 4, device=device), torch.rand(2, device=device)
    f = torch.compile(lambda x: lrpe_cosine_md_fwd_triton(x, theta, shape=(2, 3)), fullgraph=True, backend=backend)
    torch.testing.assert_close(f(x), lrpe_cosine_md_fwd_triton(x, theta, shape=(2, 3)))
    do = torch.randn(1, 2, 6, 8, device=device)
    assert lrpe_cosine_md_bwd_triton(do, x, theta, shape=(2, 3))[0].shape == x.shape
