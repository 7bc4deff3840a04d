"""Integration of linear attention with PyTorch: derivatives, transforms, compilers, modes.

``triton`` is the registered operator under compilers and the launcher in eager mode. On a CPU, the launcher is replaced
by a fake, so that the tests only cover the boundary. ``auto`` is the reference on a CPU and the kernels on a GPU.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from lrpe_md.scripts.common.cases import LinearCase, bind_linear, make_linear_inputs, run_linear
from parametrizing import slow_except
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from lrpe_md import Coordinates, Grid, linear_attention
from lrpe_md.engine.core import operator as calls
from lrpe_md.engine.core.memory import like_in_memory
from lrpe_md.engine.linear.call import LinearNeeds, LinearOptions, Operands, Sides
from lrpe_md.engine.linear.operator import ATTEND
from lrpe_md.engine.linear.validate import validate_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
NAMES = ("omega", "phase", "gate", "S", "sums")


class Launcher(SimpleNamespace):
    """Fake launcher that calls the reference. It saves S, which the backward pass must receive."""

    def forward(self, call, operands, return_state, keep):
        self.seen.append("forward")
        with torch.no_grad():
            o, *after = ATTEND.run_reference(call, operands)
        o = like_in_memory(operands.q, operands.v.shape[3]).copy_(o)
        return [o, *(after if return_state else ()), *([after[0].clone()] if keep else [])]

    def backward(self, call, grads, operands, saved, needs, outs=()):
        self.seen.append("backward")
        _, k, v, *_ = operands
        sequences = k.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1
        size = (sequences, k.shape[1], call.spec.out_dim(k.shape[3]), v.shape[3])
        assert [t.shape for t in saved] == [torch.Size(size)]
        return ATTEND.differentiate(call, operands, grads, needs)


@pytest.fixture(autouse=True)
def launcher(monkeypatch, device):
    torch.compiler.reset()
    calls.call_cache.clear()
    if device == "cuda":
        return None
    stub = Launcher(seen=[])
    for memory in ("sum", "add", "delta", "add both", "delta both"):
        monkeypatch.setitem(ATTEND.launchers, memory, stub)
    return stub


@pytest.fixture(params=["auto", "triton"])
def impl(request):
    return request.param


@pytest.fixture(params=["cosine", "rotate", None])
def map(request):
    return request.param


def exact_dtype(device, impl="triton"):
    """Return float64 if it is supported. The kernels don't support it on a GPU."""
    return torch.float32 if (device, impl) == ("cuda", "triton") else torch.float64


def assert_near(a, b, msg=None):
    """Compare up to the rounding error of float32 products. An omitted or doubled term has a larger effect."""
    torch.testing.assert_close(a, b, msg=msg, **({"rtol": 1e-3, "atol": 1e-4} if a.dtype == torch.float32 else {}))


def example(map, device, dtype=torch.float64, **changes):
    """Return a function of tensors that makes a call, and its arguments: q, k, v, omega, phase, gate, S, Σ."""
    case = LinearCase(
        map, (2, 3), head_dim=4, v_dim=3, heads=(2, 1), batch=1, act="softplus", dtype=dtype, phase="both",
        gate="float", state=True, return_state=True,
    )  # fmt: skip
    case = LinearCase(**{**vars(case), **changes})
    inputs = make_linear_inputs(case, device)
    assert inputs.gate is not None
    given = {  # a gate of 0 has no derivative
        "omega": inputs.omega, "phase": inputs.phase, "gate": inputs.gate + 0.5,
        **dict(zip(("S", "sums"), inputs.state, strict=False)), "decay": inputs.decay,
    }  # fmt: skip
    given = {name: t for name, t in given.items() if t is not None}
    names = list(given)

    def call(q, k, v, *others, impl="auto"):
        found = dict(zip(names, others, strict=True))
        state = [found[name] for name in ("S", "sums") if name in found]
        o, after = bind_linear(inputs, impl)(
            (q, k, v), found.get("omega"), found.get("phase"), found.get("gate"), state, decay=found.get("decay")
        )  # fmt: skip
        return (o, *after)

    wide = torch.promote_types(dtype, torch.float32)
    tensors = [*inputs.qkv, *(t if t.dtype == torch.bool else t.to(wide) for t in given.values())]
    return call, [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]


FULL, CAUSAL, PACKED = {"mask": "full"}, {"mask": "causal"}, {"cu_seqlens": (2, 0, 5)}
LEARNED_DECAY = {"mask": "causal", "decay": "head"}
MASKS = [
    FULL, CAUSAL, {"mask": "block", "block": 3}, PACKED,
    {"mask": "causal", "cu_seqlens": (2, 0, 5)}, {"normalizer": "none", "phase": "k"},
    {"mask": "block", "block": 3, "decay": "block", "rule": "delta", "normalizer": "none"},
    LEARNED_DECAY,
    {"mask": "block", "block": 3, "decay": "head", "directions": "both", "state": False, "return_state": False},
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("changes", MASKS, ids=str)
def test_gradcheck_and_gradgradcheck(map, impl, changes, device):
    if exact_dtype(device, impl) == torch.float32:
        pytest.skip("a GPU has no kernel for float64")
    call, args = example(map, device, **changes)

    def f(*args):
        return call(*args, impl=impl)

    assert torch.autograd.gradcheck(f, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, args, fast_mode=True)


@pytest.mark.parametrize("learned", ["q", "v", "omega", "phase", "gate", "S", "sums", "gate sums"])
def test_single_gradients(learned, device):
    """Differentiate with respect to one input at a time. The list of gradients has no gaps."""
    call, args = example("cosine", device, exact_dtype(device))
    names = ("q", "k", "v", *NAMES)
    for t, name in zip(args, names, strict=True):
        t.requires_grad_(name in learned.split())
    wanted = [t for t in args if t.requires_grad]
    found, expected = (
        torch.autograd.grad(sum(y.sin().sum() for y in call(*args, impl=i)), wanted) for i in ("triton", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)


def test_the_launcher_is_called(launcher, device):
    if launcher is None:
        pytest.skip("the GPU's launcher has separate tests")
    call, args = example("rotate", device)
    call(*args, impl="triton")[0].sum().backward()
    assert launcher.seen == ["forward", "backward"]
    with torch.no_grad():
        call(*args, impl="triton")
    assert launcher.seen == ["forward", "backward", "forward"]
    call(*args, impl="auto")
    assert len(launcher.seen) == 3


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
        return sum(y.sin().sum() for y in call(*args))

    leaves = [a.clone().requires_grad_() for a in args]
    expected = torch.autograd.grad(total(*leaves), leaves)
    for a, b in zip(grad(total, argnums=tuple(range(len(args))))(*args), expected, strict=True):
        torch.testing.assert_close(a, b)
    hessian = jacfwd(jacrev(total, argnums=1), argnums=1)(*args)  # forward over reverse against reverse over reverse
    again = torch.autograd.functional.hessian(lambda k: total(args[0], k, *args[2:]), args[1])
    torch.testing.assert_close(hessian, again)
    eps = 1e-6  # finite differences are independent of our formulas
    plus, minus = (call(*(a + s * eps * t for a, t in zip(args, tangents, strict=True))) for s in (1, -1))
    for a, b, t in zip(plus, minus, tangents_out, strict=True):
        torch.testing.assert_close((a - b) / (2 * eps), t, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", MASKS, ids=str)
def test_vmap(changes, device):
    call, args = example("cosine", device, **changes)
    stacked = [torch.stack([a.detach(), 2 * a.detach()]) for a in args]
    both = [call(*[a[i] for a in stacked]) for i in range(2)]
    for y, first, second in zip(vmap(call)(*stacked), *both, strict=True):
        torch.testing.assert_close(y, torch.stack([first, second]))
    q, k, v, omega, *others = (a.detach() for a in args)
    per_sample = vmap(grad(lambda w: call(q, k, v, w, *others)[0].square().sum()))(torch.stack([omega, 3 * omega]))
    assert per_sample.shape == (2, *omega.shape)


def test_gradients_to_coordinates_and_amplitude(device):
    """The kernels don't compute these gradients, so auto selects the reference."""
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, device=device) for _ in range(3))
    omega = torch.rand(1, 4, 3, dtype=torch.float64, device=device)
    coords = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    amplitude = torch.rand(1, 4, dtype=torch.float64, device=device).add_(1).requires_grad_()

    def f(coords, amplitude, impl="auto"):
        return linear_attention(q, k, v, omega=omega, positions=coords, amplitude=amplitude, impl=impl)

    assert torch.autograd.gradcheck(f, (coords, amplitude))
    q, k, v = (t.to(exact_dtype(device)) for t in (q, k, v))
    with pytest.raises(ValueError, match="coords"):
        f(coords, amplitude, "triton")
    with pytest.raises(ValueError, match="coords"):  # only for the keys
        linear_attention(q, k, v, omega=omega, positions=(coords.detach(), coords), impl="triton")


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


def graph_counter():
    """Return a backend that counts graphs."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm

    return backend, graphs


COMPILED = [*product(MASKS, [True], ["triton"]), *product([FULL, CAUSAL, PACKED], [True], ["auto"])]
COMPILED += [(CAUSAL, False, "auto"), ({"rotary_dim": 2}, True, "triton")]


@pytest.mark.parametrize(
    ("changes", "dynamic", "impl"),
    [(FULL, False, "triton"), *(pytest.param(*each, marks=pytest.mark.slow) for each in COMPILED)],
    ids=str,
)
def test_compile_training(changes, dynamic, impl, device):
    if device == "cuda" and changes == LEARNED_DECAY:
        impl = "auto"  # the kernels don't compute this gradient on a GPU
    call, args = example("cosine", device, dtype=torch.float32, **changes)

    def f(*args):
        return sum(y.square().sum() for y in call(*args, impl=impl))

    backend = "inductor" if device == "cuda" else "aot_eager"
    expected = torch.autograd.grad(f(*args), args)
    found = torch.autograd.grad(torch.compile(f, fullgraph=True, dynamic=dynamic, backend=backend)(*args), args)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("map", "mask"), [*product(["cosine", "rotate", None], ["full"]), ("cosine", "causal"), ("rotate", "block")]
)
def test_compile_once_for_all_image_sizes(map, impl, mask, device):
    omega = None if map is None else torch.rand(1, 8 if map == "cosine" else 4, 2, device=device, requires_grad=True)

    def f(q, k, v, shape):
        return linear_attention(
            q, k, v, map=map, omega=omega, positions=Grid(shape, prefix=1), impl=impl, is_causal=mask == "causal",
            block=shape[1] if mask == "block" else None,
        )  # fmt: skip

    torch.manual_seed(0)
    backend, graphs = graph_counter()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for height, width in ((8, 9), (5, 13), (21, 7), (64, 2)):  # a single chunk would need another graph
        qkv = [torch.randn(2, h, height * width + 1, 8, device=device, requires_grad=True) for h in (4, 2, 2)]
        y, expected = compiled(*qkv, (height, width)), f(*qkv, (height, width))
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        wanted = qkv if omega is None else [*qkv, omega]
        for a, b in zip(*(torch.autograd.grad(t, wanted, torch.ones_like(t)) for t in (y, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert len(graphs) == 1


@pytest.mark.parametrize("impl", slow_except(["triton"], ["auto", "triton"]), indirect=True)
def test_compile_cross_attention(impl, device):
    omega = torch.rand(1, 8, 3, device=device)

    def f(q, k, v, coords):
        positions = Coordinates(coords, prefix=1), coords
        return linear_attention(q, k, v, omega=omega, positions=positions, return_state=True, impl=impl)

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for num in (5, 9):
        q, k, v = (torch.randn(2, 2, n, 8, device=device) for n in (num + 1, num, num))
        coords = torch.randn(2, num, 3, device=device)
        o, (products, sums) = compiled(q, k, v, coords)
        right, (products_right, sums_right) = f(q, k, v, coords)
        for a, b in ((o, right), (products, products_right), (sums, sums_right)):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("map", slow_except(["cosine"], ["cosine", "rotate", None]), indirect=True)
def test_transforms_inside_and_of_a_compiled_function(map, device):
    call, args = example(map, device, dtype=torch.float32)
    args = [a.detach() for a in args]
    tangents = tuple(torch.randn_like(a) for a in args)
    backend = "inductor" if device == "cuda" else "aot_eager"

    def total(k):
        return call(args[0], k, *args[2:])[0].square().sum()

    for f in (lambda *args: jvp(call, args, tangents)[1], lambda *args: grad(total)(args[1])):
        torch.testing.assert_close(torch.compile(f, fullgraph=True, backend=backend)(*args), f(*args))
    compiled = torch.compile(total, backend=backend)
    torch.testing.assert_close(grad(compiled)(args[1]), grad(total)(args[1]))


@pytest.mark.sampled
def test_export(map, impl, device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            size = 8 if map == "cosine" else 4
            self.omega = None if map is None else nn.Parameter(torch.rand(1, size, 2))

        def forward(self, q, k, v):
            return linear_attention(
                q, k, v, map=map, omega=self.omega, positions=Grid((3, 4), prefix=1), block=4, impl=impl
            )

    model = Model().to(device)
    batch = torch.export.Dim("batch", min=2, max=64)
    qkv = tuple(torch.randn(2, 2, 13, 8, device=device) for _ in range(3))
    program = torch.export.export(model, qkv, dynamic_shapes=({0: batch},) * 3)
    qkv = tuple(torch.randn(5, 2, 13, 8, device=device) for _ in range(3))
    torch.testing.assert_close(program.module()(*qkv), model(*qkv))


@pytest.mark.sampled
def test_checkpoint(map, impl, device):
    call, args = example(map, device, exact_dtype(device, impl))

    def f(*args):
        return sum(y.sin().sum() for y in call(*args, impl=impl))

    expected = torch.autograd.grad(f(*args), args)
    for a, b in zip(torch.autograd.grad(checkpoint(f, *args, use_reentrant=False), args), expected, strict=True):
        assert torch.equal(a, b)


def operator_call(case, device):
    """Return the arguments of the operators, and the call."""
    inputs = make_linear_inputs(case, device)
    phase = (None, inputs.phase) if case.phase == "k" else inputs.phase
    options = LinearOptions(
        case.map, case.act, rotary_dim=case.rotary_dim, normalizer=case.normalizer, is_causal=case.mask == "causal",
        block=case.block if case.mask == "block" else None, rule=case.rule, directions=case.directions,
    )  # fmt: skip
    operands = Operands(*inputs.qkv, inputs.gate, inputs.state, inputs.decay)
    sides = Sides(inputs.omega, inputs.positions, phase, cu_seqlens=inputs.cu_seqlens)
    return inputs, validate_linear(options, operands, sides)


OPERATOR_CASES = [
    LinearCase(phase="both", gate="float", state=True, return_state=True, layout="bnhd", v_dim=8),
    LinearCase("rotate", mask="block", block=5, phase="k", normalizer="encoded", return_state=True),
    LinearCase(None, batch=1, mask="causal", cu_seqlens=(3, 0, 13), normalizer="none", state=True, return_state=True),
    LinearCase("rotate", k_shape=(2, 2), gate="bool", normalizer="none", act="silu"),
    LinearCase(rotary_dim=6, normalizer="encoded", act="softplus", state=True, return_state=True),
    LinearCase("rotate", mask="block", block=5, decay="block", rule="delta", state=True, return_state=True),
    LinearCase(mask="block", block=5, directions="both", gate="float"),
    LinearCase(mask="causal", decay="block"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
def test_opcheck(case, device):
    inputs, call = operator_call(case, device)
    args = (*inputs.qkv, inputs.gate, inputs.decay, list(inputs.state), *ATTEND.flatten(call))
    out = torch.ops.lrpe_md.linear_forward(*args, case.return_state, False)
    assert len(out) == 1 + len(inputs.grad_state)
    torch.library.opcheck(torch.ops.lrpe_md.linear_forward.default, (*args, case.return_state, False))
    grads = [torch.randn_like(t) for t in out]
    q, k, v, gate, decay, state, *rest = args
    floats = gate is not None and gate.is_floating_point()
    for needed in (False, True):
        needs = LinearNeeds(
            needed and floats, needed and case.map is not None, needed and call.q_tables.phase is not None,
            needed and call.k_tables.phase is not None, state=needed and bool(state),
            decay=needed and decay is not None,
        )  # fmt: skip
        args = (grads, q, k, v, gate, decay, state, [], *rest, *needs)
        found = torch.ops.lrpe_md.linear_backward(*args)
        assert len(found) == 3 + sum(needs[:4]) + needs.state * len(state) + needs.decay
        torch.library.opcheck(torch.ops.lrpe_md.linear_backward.default, args)


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
def test_arguments_of_the_operators(case, device):
    _, call = operator_call(case, device)
    again, rest = ATTEND.unflatten((*ATTEND.flatten(call), 1, 2))
    assert rest == (1, 2)
    assert again.attention == call.attention
    assert again.spec == call.spec
    assert (again.q_layout, again.k_layout) == (call.q_layout, call.k_layout)
    assert (again.k_tables is again.q_tables) == (call.k_tables is call.q_tables)
    for a, b in zip((*again.q_tables, *again.k_tables), (*call.q_tables, *call.k_tables), strict=True):
        assert a is b


def test_dispatch_modes_see_the_operators(map, device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    call, args = example(map, device, exact_dtype(device))
    with Watch():
        found = torch.autograd.grad([y.sum() for y in call(*args, impl="triton")], args)
    assert {"lrpe_md.linear_forward.default", "lrpe_md.linear_backward.default"} <= set(seen)
    expected = torch.autograd.grad([y.sum() for y in call(*args, impl="reference")], args)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)


def test_fake_and_meta_tensors(map, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        qkv = torch.empty(2, 13, 3, 4, 8, device=device).permute(2, 0, 3, 1, 4)
        omega = None if map is None else torch.empty(1, 8 if map == "cosine" else 4, 2, device=device)
        o, (products, sums) = linear_attention(
            *qkv, map=map, omega=omega, positions=Grid((3, 4), 1), return_state=True, impl="triton"
        )
    assert o.shape == (2, 4, 13, 8)
    assert o.transpose(1, 2).is_contiguous()
    assert products.shape == (2, 4, 16 if map == "cosine" else 8, 8)
    assert sums.shape == (2, 4, 8)
    q = torch.empty(1, 2, 6, 4, device="meta")
    omega = None if map is None else torch.empty(1, 4 if map == "cosine" else 2, 2, device="meta")
    assert linear_attention(q, q, q, map=map, omega=omega, positions=Grid((2, 3))).shape == q.shape


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


# --- what a user's graph does around the call ------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("graph", ["one tensor three times", "k from q", "omega of two layers"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_double_backward_with_dependent_inputs(map, graph, create_graph, device):
    """A double backward differentiates the call, but not the user's graph before its inputs."""
    dtype = exact_dtype(device)
    leaf = torch.randn(1, 2, 6, 4, dtype=dtype, device=device, requires_grad=True)
    channels = 4 if map == "cosine" else 2
    omega = torch.rand(1, channels, 2, dtype=dtype, device=device, requires_grad=True) if map else None
    leaves = [leaf] if omega is None else [leaf, omega]

    def f(impl):
        def call(*qkv):
            return linear_attention(
                *qkv, map=map, omega=omega, positions=Grid((2, 3)), act="softplus", is_causal=True, impl=impl
            )

        q = leaf * 1
        if graph == "omega of two layers":
            return call(call(q, q * 2, q * 3), q, q).sin().sum()
        return call(*((q, q, q) if graph == "one tensor three times" else (q, q * 2, q * 3))).sin().sum()

    found, expected = (torch.autograd.grad(f(i), leaves, create_graph=create_graph) for i in ("triton", "reference"))
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)
    if create_graph:
        pairs = (torch.autograd.grad(sum(g.square().sum() for g in gs), leaves) for gs in (found, expected))
        for a, b in zip(*pairs, strict=True):
            assert_near(a, b)


def test_transforms_that_begin_after_the_forward(map, device):
    """Vectorise and differentiate the gradients of a call that ran outside of any transform."""
    call, args = example(map, device, exact_dtype(device), act="none", normalizer="none")
    y = call(*args, impl="triton")[0]
    expected = call(*args, impl="reference")[0]
    batch = torch.randn(3, *y.shape, dtype=y.dtype, device=device)
    pairs = (
        torch.autograd.grad(t, args, batch, is_grads_batched=True, retain_graph=True, allow_unused=True)
        for t in (y, expected)
    )
    for a, b in zip(*pairs, strict=True):
        assert_near(a if a is not None else torch.zeros_like(b), b) if b is not None else None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch[0], batch[1])
        tangents = [forward_ad.unpack_dual(torch.autograd.grad(t, args[0], dual)[0]).tangent for t in (y, expected)]
    assert tangents[0] is not None
    assert_near(*tangents)


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
def test_cached_call_is_not_validated_again(case, monkeypatch, device):
    """A cache hit computes with the new tensors, and reads the values of an origin again."""
    from lrpe_md.engine.linear import dispatch as linear_dispatch

    case = LinearCase(**{**vars(case), "phase": "none" if case.phase == "k" else case.phase, "origin": "by_sample"})
    case = LinearCase(**{**vars(case), "k_shape": None})
    inputs = [make_linear_inputs(LinearCase(**{**vars(case), "seed": seed}), device) for seed in (0, 1)]
    expected = []
    for each in inputs:
        calls.call_cache.clear()
        expected.append(run_linear(each, "triton"))
    monkeypatch.setattr(linear_dispatch, "validate_linear", None)
    for each, right in zip(reversed(inputs), reversed(expected), strict=True):
        for name, found in run_linear(each, "triton").items():
            assert torch.equal(found, right[name]), name
    assert (expected[0]["o"] != expected[1]["o"]).any()


def test_cache_distinguishes_options(device):
    """Repeat calls after all other calls. The cache compares options by value and type."""
    there = {"dtype": exact_dtype(device), "device": device}
    q, k, v = (torch.randn(1, 2, 6, 4, **there) for _ in range(3))
    omega = torch.rand(1, 4, 1, **there)
    state = (torch.ones(1, 2, 8, 4, **there), torch.ones(1, 2, 4, **there))
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    options = [
        {}, {"is_causal": True}, {"block": 1}, {"block": 2}, {"act": "softplus"}, {"normalizer": "encoded"},
        {"normalizer": "none"}, {"eps": 0.5}, {"eps": 10.0}, {"order": "sin_cos"}, {"cu_seqlens": cu_seqlens},
        {"gate": torch.rand(1, 1, 6, device=device)}, {"gate": torch.rand(1, 1, 6, device=device) < 0.5},
        {"positions": Grid((5,), prefix=1)}, {"positions": Grid((5,), suffix=1)}, {"state": state},
        {"phase": omega[..., 0]}, {"map": None, "omega": None}, {"act": "softmax", "dim": -1},
        {"act": "softmax", "dim": -2}, {"map": "rotate", "omega": omega[:, :2]},
        {"map": "rotate", "omega": omega[:, :2], "pairs": "interleaved"},
        {"map": "rotate", "omega": omega[:, :1], "rotary_dim": 2}, {"omega": omega[:, :2], "rotary_dim": 2},
        {"omega": omega[:, :2], "rotary_dim": slice(1, 3)},
    ]  # fmt: skip
    plain = {"omega": omega, "positions": Grid((6,))}

    def run(changes, impl):
        whole = changes.get("dim") == -2  # such a call has no state
        found = linear_attention(q, k, v, **{**plain, **changes}, return_state=not whole, impl=impl)
        return [found] if whole else [found[0], *(t for t in found[1] if t is not None)]

    expected = []
    for changes in options:
        calls.call_cache.clear()
        expected.append(run(changes, "reference"))
    for _ in range(2):
        for changes, right in zip(options, expected, strict=True):
            for a, b in zip(run(changes, "triton"), right, strict=True):
                assert_near(a, b, msg=lambda m, c=changes: f"{c}: {m}")
    with pytest.raises(ValueError, match="block: expected a positive integer"):
        run({"block": True}, "triton")  # block=1 is cached
    with pytest.raises(ValueError, match="block: expected a positive integer"):
        run({"block": 2.0}, "triton")


def test_outputs_may_be_changed_in_place(map, impl, device):
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        base = torch.randn(2, 3, 6, 4, device=device, requires_grad=True)
        back = [order.index(i) for i in range(4)]
        q = base.permute(order).contiguous().permute(back)
        positions = Grid((q.shape[2],))
        omega = None if map is None else torch.rand(1, 4 if map == "cosine" else 2, 1, device=device)
        y = linear_attention(q * 1, q, q[..., :2], map=map, omega=omega, positions=positions, impl=impl)
        assert y.shape[-1] == 2
        assert y.permute(order).is_contiguous()  # the memory layout of q
        y.mul_(2)
        y.sum().backward()
