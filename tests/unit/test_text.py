"""RoPE on text: offsets, caches, packed sequences, grouped queries and comparisons with other code."""

import copy
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lrpe_md
from lrpe_md import Grid, Rotate1d, convert_pairs, geometric_theta, lrpe_rotate_1d, rotate
from lrpe_md.positions import packed_positions
from lrpe_md.positions.grid import offset_positions

IMPLS = ["reference", "triton"]


def randn(*size, seed=0, dtype=torch.float64):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qk(batch=2, heads=(4, 2), num_tokens=5, head_dim=8, dtype=torch.float32):
    return tuple(randn(batch, h, num_tokens, head_dim, seed=i, dtype=dtype) for i, h in enumerate(heads))


# --- implementations of other sources -----------------------------------------------------------------------------


def paper_matrix(x, theta):
    """Multiply x_m by the block-diagonal R_m of [[cos, -sin], [sin, cos]], as in the paper."""
    rows = []
    for m in range(x.shape[2]):
        blocks = []
        for angle in m * theta:
            c, s = angle.cos(), angle.sin()
            blocks.append(torch.stack([torch.stack([c, -s]), torch.stack([s, c])]))
        rows.append(x[:, :, m] @ torch.block_diag(*blocks).T)
    return torch.stack(rows, dim=2)


def llama_matrix(x, theta):
    """Multiply by the same matrix with the pairs in the half layout, as in Llama."""
    d = x.shape[-1]
    order = torch.arange(d).reshape(-1, 2).T.flatten()  # llama's rows in the paper's order
    at = order.argsort()
    return paper_matrix(x[..., at], theta)[..., order]


def rotate_half(x, theta):
    """Compute x cos + [-x_2, x_1] sin, with each angle twice, as in Hugging Face."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * theta
    angles = torch.cat([angles, angles], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def mistral_complex(x, theta):
    """Multiply neighbours as complex numbers by e^{i m θ}, as in Mistral."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * theta
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )  # fmt: skip
    return torch.view_as_real(turned).flatten(-2)


def backward_document(x, theta):
    """Compute y = x ⊙ c + J(x) ⊙ s, J(v)_2k = -v_2k+1, J(v)_2k+1 = v_2k."""
    angles = (torch.arange(x.shape[2], dtype=x.dtype)[:, None] * theta).repeat_interleave(2, dim=-1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


QUOTED = {
    paper_matrix: "interleaved", mistral_complex: "interleaved", backward_document: "interleaved",
    llama_matrix: "half", rotate_half: "half",
}  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("quoted", QUOTED, ids=lambda f: f.__name__)
def test_quoted_implementations(quoted, impl):
    """Compare values and the gradients of x and theta in float64. With the other layout, they differ."""
    x, theta = randn(2, 3, 6, 8).requires_grad_(), geometric_theta(4, 10.0).requires_grad_()
    expected, found = quoted(x, theta), lrpe_rotate_1d(x, theta, pairs=QUOTED[quoted], impl=impl)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dy = randn(*x.shape, seed=1)
    for a, b in zip(
        torch.autograd.grad(found, (x, theta), dy), torch.autograd.grad(expected, (x, theta), dy), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    other = "half" if QUOTED[quoted] == "interleaved" else "interleaved"
    assert (lrpe_rotate_1d(x, theta, pairs=other, impl="reference") - expected).abs().max() > 0.1


def test_backward_of_the_document():
    """dx = dy ⊙ c + Jᵀ(dy) ⊙ s is the rotation by -Θ."""
    x, theta, dy = randn(1, 2, 6, 8).requires_grad_(), geometric_theta(4, 10.0), randn(1, 2, 6, 8, seed=1)
    (dx,) = torch.autograd.grad(lrpe_rotate_1d(x, theta, pairs="interleaved"), x, dy)
    torch.testing.assert_close(dx, backward_document(dy, -theta), rtol=1e-12, atol=1e-12)


# --- theta -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 4)], ids=["(h)", "(d/2)", "(h, d/2)"])
def test_theta_gradcheck(shape, impl):
    small = impl == "triton"  # the interpreter is slow; test_spec.py also tests the kernels' gradients
    q, k = qk(1, (2, 2) if small else (4, 2), 2 if small else 3, dtype=torch.float64)
    theta = (0.3 + randn(*shape).abs()).requires_grad_()
    xs = (k.requires_grad_(),) if small else (q.requires_grad_(), k.requires_grad_())

    def call(theta, *xs):
        return lrpe_rotate_1d(xs if len(xs) == 2 else xs[0], theta, offset=torch.tensor(2), impl=impl)

    assert torch.autograd.gradcheck(call, (theta, *xs), fast_mode=small)


def test_grouped_queries_in_one_call():
    """A per-head theta belongs to key heads. The query heads in a group share it."""
    q, k = qk(dtype=torch.float64)
    for theta in (randn(2), randn(2, 4), randn(4)):
        by_query = theta if theta.shape == (4,) else theta.repeat_interleave(2, 0)
        if by_query.shape == (4,) and theta.shape == (2,):
            by_query = by_query[:, None].expand(4, 4)  # a theta of length d/2 would have one entry per pair
        found = lrpe_rotate_1d((q, k), theta, offset=3)
        torch.testing.assert_close(found[0], lrpe_rotate_1d(q, by_query, offset=3))
        torch.testing.assert_close(found[1], lrpe_rotate_1d(k, theta, offset=3))


# --- offsets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("impl", "rotary_dim"),
    [("reference", None), ("reference", 4), ("reference", slice(2, 6)), ("triton", None), ("triton", slice(2, 6))],
)
def test_two_calls_equal_one(rotary_dim, impl):
    """Caches rely on this for a prompt and its continuation, and for two successive rotations."""
    q, k = qk(num_tokens=7)
    module = Rotate1d(8, base=100.0, rotary_dim=rotary_dim, impl=impl)
    whole = module(q, k, offset=11)
    starts = [torch.tensor([11, 11], dtype=torch.int32), 11, torch.tensor(11), torch.tensor([11])]
    for cut in (1, 4) if impl == "reference" else (4,):
        for start in starts if impl == "reference" else starts[:1]:
            first = module(q[:, :, :cut], k[:, :, :cut], offset=start)
            then = module(q[:, :, cut:], k[:, :, cut:], offset=start + cut)
            for a, b, c in zip(first, then, whole, strict=True):
                torch.testing.assert_close(torch.cat([a, b], 2), c, rtol=0, atol=2e-6)
    twice = module(q[:, :, :1], offset=11), module(module(q[:, :, :1], offset=4), offset=7)
    torch.testing.assert_close(*twice, rtol=0, atol=2e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_offsets_of_samples(impl):
    """Cover caches of different lengths and left padding, with the same offsets for q and k."""
    q, k = qk(3)
    module, offsets = Rotate1d(8, base=100.0, impl=impl), torch.tensor([-3, 0, 9])
    found = module(q, k, offset=offsets)
    for b, offset in enumerate(offsets.tolist()):
        expected = module(q[b : b + 1], k[b : b + 1], offset=offset)
        for y, e in zip(found, expected, strict=True):
            torch.testing.assert_close(y[b : b + 1], e, rtol=0, atol=2e-6)
    # a left-padded row gives the same attention as without padding
    scores = found[0][0, :2, 3:] @ found[1][0, 0, 3:].T
    alone = module(q[:1, :, 3:], k[:1, :, 3:])
    torch.testing.assert_close(scores, alone[0][0, :2] @ alone[1][0, 0].T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("offset", [2**20 + 7, 2**25 + 1, -(2**25) - 3])
def test_far_offsets_are_exact(offset):
    """Offsets may exceed the integers that float32 represents."""
    x, theta = randn(2, 1, 3, 8, dtype=torch.float32), geometric_theta(4)
    exact = lrpe_rotate_1d(x.double(), theta, offset=torch.tensor([offset, 0]), impl="reference")
    found = lrpe_rotate_1d(x, theta, offset=torch.tensor([offset, 0]), impl="triton")
    assert (found - exact).abs().max() < 2e-6
    angle = (offset + 2) * theta
    a, b = x[0, 0, 2].double().chunk(2)
    by_hand = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()])
    torch.testing.assert_close(exact[0, 0, 2], by_hand, rtol=0, atol=1e-7)


class NoValues(TorchDispatchMode):
    """Fail if the host reads a tensor's value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default,
            torch.ops.aten.is_nonzero.default,
        ), func  # fmt: skip
        return func(*args, **(kwargs or {}))


def every_form(module, q, k):
    for offset in (torch.tensor(3), torch.tensor([3]), torch.tensor([3, -1], dtype=torch.int32)):
        yield module(q, k, offset=offset)
    packed = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k)]
    yield module(*packed, cu_seqlens=torch.tensor([0, 4, 10]), offset=torch.tensor([7, 0]))
    yield module(q, k, positions=torch.arange(5)[:, None])


def test_offsets_as_tensors_are_not_read_by_the_host():
    q, k = (x.requires_grad_() for x in qk())
    module = Rotate1d(8, amplitude=1.2)
    with NoValues():
        for ys in every_form(module, q, k):
            torch.autograd.grad(ys, (q, k), [torch.ones_like(y) for y in ys])
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            int(torch.tensor([3]))


def test_offsets_may_be_fake_tensors():
    """Nothing depends on values, and the shapes are correct."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, k = torch.empty(2, 4, 5, 8), torch.empty(2, 2, 5, 8)
        for y, z in every_form(Rotate1d(8), q, k):
            assert y.shape in (q.shape, (1, 4, 10, 8))
            assert z.shape in (k.shape, (1, 2, 10, 8))


@pytest.mark.parametrize("kind", ["0-d", "by sample"])
def test_the_same_kernel_for_every_offset(count_launches, kind):
    """A new offset also adds no host work, because its launch is cached."""
    q, k = qk()
    for value in (0, 1, 5, -4, 70_000, 2**40):
        offset = torch.tensor(value) if kind == "0-d" else torch.tensor([value, 3])
        Rotate1d(8, impl="triton")(q, k, offset=offset)
    (launched,) = count_launches()
    assert launched.variant.by_sample == (kind == "by sample")


def test_a_new_offset_compiles_nothing():
    """Changing the module's frequencies, for example by length scaling at run time, doesn't recompile either."""
    torch._dynamo.reset()
    counter = CompileCounter()
    module = Rotate1d(8, amplitude=1.0)
    q, k = qk()

    def call(q, k, offset):
        return module(q, k, offset=offset)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    settings = [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "ntk", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ]
    seen = []
    for i, parameters in enumerate(settings):
        theta, amplitude = lrpe_md.rope_frequencies(parameters, 8, 64, 100, base=1e4)
        module.set_frequencies(theta, amplitude)
        offset = torch.tensor([i, 100 * i])
        found = compiled(q, k, offset)
        expected = lrpe_rotate_1d((q, k), theta.float(), offset=offset, amplitude=amplitude, impl="reference")
        for y, e in zip(found, expected, strict=True):
            torch.testing.assert_close(y, e, rtol=0, atol=1e-6)
        seen.append(found[0])
    assert counter.frame_count == 1
    assert all((a - b).abs().max() > 1e-3 for a, b in pairwise(seen))


def test_frequencies_change_without_another_kernel(count_launches):
    module, (q, k) = Rotate1d(8, amplitude=1.0, impl="triton"), qk()
    places = module.omega.data_ptr(), module.amplitude.data_ptr()  # a CUDA graph depends on these addresses
    for theta, amplitude in ((geometric_theta(4), 1.0), (geometric_theta(4) / 2, 1.3)):
        module.set_frequencies(theta, amplitude)
        expected = lrpe_rotate_1d(q, theta.float(), offset=3, amplitude=amplitude, impl="reference")
        torch.testing.assert_close(module(q, k, offset=3)[0], expected, rtol=0, atol=2e-6)
    assert len(count_launches()) == 1
    assert places == (module.omega.data_ptr(), module.amplitude.data_ptr())


@pytest.mark.parametrize("impl", IMPLS)
def test_int_offsets_equal_tensor_offsets(count_launches, impl):
    """Negative and large offsets, except 0, use one kernel and one layout."""
    q, k = qk()
    module = Rotate1d(8, impl=impl)
    for offset in (-5, 3, 2**17):
        for y, e in zip(module(q, k, offset=offset), module(q, k, offset=torch.tensor(offset)), strict=True):
            assert torch.equal(y, e)
    assert len(count_launches()) == (impl == "triton")
    assert offset_positions(4, 0, q.device) is offset_positions(4, 0, q.device)


# --- packed sequences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 4, torch.tensor(4), torch.tensor([4, 0, 9, 2])], ids=str)
def test_packed_sequences(offset):
    """Each sequence, even an empty one, is encoded as if it were alone. Later tokens continue the last one."""
    lengths, ends = (3, 0, 1, 4), [0, 3, 3, 4, 8]
    q, k = qk(1, num_tokens=10)
    module, cu_seqlens = Rotate1d(8, base=100.0), torch.tensor(ends, dtype=torch.int32)
    found = module(q, k, cu_seqlens=cu_seqlens, offset=offset)
    once = module(q, k, positions=packed_positions(cu_seqlens, 10, offset))
    for i, (length, start) in enumerate(zip(lengths, ends, strict=False)):
        at = offset[i] if isinstance(offset, torch.Tensor) and offset.ndim else offset
        part = slice(start, start + length + 2 * (i == 3))
        expected = module(q[:, :, part], k[:, :, part], offset=int(at))
        for y, z, e in zip(found, once, expected, strict=True):
            torch.testing.assert_close(y[:, :, part], e, rtol=0, atol=1e-6)
            assert torch.equal(y, z)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale_base", [None, 8.0])
def test_position_ids_that_the_batch_shares(impl, scale_base):
    """transformers passes position_ids (1, N), also for larger batches."""
    module, ids = Rotate1d(8, scale_base=scale_base, impl=impl), torch.tensor([[3, 4, 5, 9, 10]])
    expected = module(*qk(), positions=ids[0, :, None])
    for positions in (ids[..., None], lrpe_md.Coordinates(ids[..., None])):
        torch.testing.assert_close(module(*qk(), positions=positions), expected, rtol=0, atol=0)
    rotated = torch.tensor([[True, False, True, True, False]])
    masked = [lrpe_md.Coordinates(t, rotated=r) for t, r in ((ids[..., None], rotated), (ids[0, :, None], rotated[0]))]
    torch.testing.assert_close(module(*qk(), positions=masked[0]), module(*qk(), positions=masked[1]))


def test_packed_sequences_in_the_kernel():
    q, k = qk(1, num_tokens=8)
    options = {"cu_seqlens": torch.tensor([0, 3, 8]), "offset": torch.tensor([4, 0])}
    theta = geometric_theta(4)
    for y, e in zip(
        lrpe_rotate_1d((q, k), theta, impl="triton", **options),
        lrpe_rotate_1d((q, k), theta, impl="reference", **options), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(y, e, rtol=0, atol=1e-6)


# --- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary_dim", [None, 4, "slice"])
@pytest.mark.parametrize(("source", "target"), [("interleaved", "half"), ("half", "interleaved"), ("half", (1, 1, 1))])
def test_convert_pairs(source, target, rotary_dim):
    """Converted projections, with biases, give the same scores."""
    if isinstance(target, tuple):
        target = {None: (1, 3), 4: (1, 1)}.get(rotary_dim, target)
    channels = slice(2, 8) if rotary_dim == "slice" else rotary_dim
    x = randn(2, 6, 5)
    weights = {"q": randn(4 * 8, 5, seed=1), "k": randn(2 * 8, 5, seed=2)}
    biases = {"q": randn(4 * 8, seed=3), "k": randn(2 * 8, seed=4)}

    def scores(weights, biases, pairs):
        q, k = ((x @ weights[n].T + biases[n]).unflatten(-1, (-1, 8)).transpose(1, 2) for n in "qk")
        omega = geometric_theta({None: 4, 4: 2}.get(rotary_dim, 3), 10.0)[None, :, None]
        q, k = rotate(q, k, omega=omega, positions=Grid((6,)), pairs=pairs, rotary_dim=channels)
        return q @ k.repeat_interleave(2, 1).mT

    options = {"head_dim": 8, "rotary_dim": channels}
    converted = [{n: convert_pairs(t, source, target, **options) for n, t in d.items()} for d in (weights, biases)]
    expected = scores(weights, biases, source)
    torch.testing.assert_close(scores(*converted, target), expected, rtol=1e-12, atol=1e-12)
    assert (scores(weights, biases, target) - expected).abs().max() > 0.1
    for name, weight in weights.items():
        assert torch.equal(convert_pairs(converted[0][name], target, source, **options), weight)
    by_columns = convert_pairs(weights["q"].T, source, target, dim=-1, num_heads=4, **options)
    assert torch.equal(by_columns, converted[0]["q"].T)


# --- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2,), (2, 3)], ids=["(d/2)", "(h)", "(h, d/2)"])
def test_module_with_custom_theta(shape, learnable):
    theta, (q, k) = randn(*shape).abs(), qk()
    options = {"rotary_dim": 6, "num_heads": 2, "learnable": learnable, "amplitude": 1.5, "dtype": torch.float64}
    module = Rotate1d(8, theta=theta, **options)
    found = module(q, k, offset=2)
    expected = lrpe_rotate_1d((q, k), theta, offset=2, rotary_dim=6, amplitude=1.5)
    for y, e in zip(found, expected, strict=True):
        torch.testing.assert_close(y, e, rtol=0, atol=1e-6)
    names = {name for name, _ in module.named_parameters()}
    assert names == ({"log_theta"} if learnable else set())
    assert set(module.state_dict()) == names
    if learnable:
        found[0].square().mul(randn(*found[0].shape)).sum().backward()
        assert (module.log_theta.grad != 0).all()
    with torch.device("meta"):
        empty = Rotate1d(8, theta=theta, **options)
    for copied in (copy.deepcopy(module), empty.to_empty(device="cpu"), copy.deepcopy(module).bfloat16()):
        assert torch.equal(copied(q, k, offset=2)[0], found[0])
    module.set_frequencies(theta / 2, 1.0)
    changed = lrpe_rotate_1d(k, theta / 2, offset=2, rotary_dim=6)
    torch.testing.assert_close(module(q, k, offset=2)[1], changed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("frequencies", ["axial", "mixed"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_set_learned_frequencies(frequencies, num_heads):
    module = Rotate1d(8, frequencies=frequencies, learnable=True, num_heads=num_heads)
    (learned,) = module.parameters()
    theta = geometric_theta(4) / torch.arange(3, 3 + num_heads)[:, None]
    module.set_frequencies(theta.squeeze(0))
    assert next(module.parameters()) is learned
    torch.testing.assert_close(module.get_omega()[..., 0].detach(), theta.float())


@pytest.mark.parametrize("learnable", [False, True, "raw"])
def test_set_frequencies_undoes_adjust(learnable):
    module, theta = Rotate1d(8, learnable=learnable), geometric_theta(4, 50.0)
    module.adjust(torch.tensor(2.0), 3.0)
    module.set_frequencies(theta)
    torch.testing.assert_close(module.get_omega()[0, :, 0].detach(), theta.float())
    assert (module.amplitude == 1).all()


# --- errors ----------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lrpe_rotate_1d(X, torch.ones(3)), ValueError, r"theta: expected shape \(4,\), \(4,\).*got \(3,\)"),
        (lambda: lrpe_rotate_1d(X, torch.ones(4), offset=torch.zeros(2)), ValueError, "offset: .*float32"),
        (lambda: lrpe_rotate_1d(X, torch.ones(4), offset=1.5), ValueError, "offset: .*got 1.5"),
        (
            lambda: lrpe_rotate_1d(X, torch.ones(4), offset=torch.tensor([1, 2, 3])), ValueError,
            "offset for each of the B = 2 samples, got 3",
        ),
        (lambda: Grid((3,), origin=3), TypeError, r"origin: .* got int; pass torch.tensor\(.*\) with 1 integer$"),
        (lambda: Grid((3,), origin=torch.zeros(1)), TypeError, "origin: expected int32 or int64, got torch.float32"),
        (lambda: Grid((3, 4), origin=torch.tensor([1])), ValueError, r"origin: expected shape \(2,\) or .*got \(1,\)"),
        (
            lambda: lrpe_md.pack([Grid((3,), origin=torch.tensor([1]))]), ValueError,
            "samples: expected positions without an origin.*at index 0",
        ),
        (
            lambda: Rotate1d(8)(X, cu_seqlens=torch.tensor([0, 5])), ValueError,
            r"cu_seqlens: expected packed sequences in x of shape \(1, H, N, D\), got \(2, 4, 5, 8\)",
        ),
        (
            lambda: Rotate1d(8, act="softmax", dim=-2)(X[:1], cu_seqlens=torch.tensor([0, 5])), ValueError,
            "dim: softmax over the sequence.*packed",
        ),
        (lambda: packed_positions([0, 5], 5), TypeError, "cu_seqlens: expected a tensor.*list"),
        (lambda: packed_positions(torch.zeros(2), 5), ValueError, "cu_seqlens: .*float32"),
        (
            lambda: packed_positions(torch.tensor([1, 5]), 5), ValueError,
            r"cu_seqlens: expected non-decreasing offsets from 0 to at most 5 .*, got \[1, 5\]",
        ),
        (lambda: packed_positions(torch.tensor([0, 4, 2]), 5), ValueError, r"cu_seqlens: .*, got \[0, 4, 2\]"),
        (
            lambda: Rotate1d(8)(X[:1], cu_seqlens=torch.tensor([0, 6])), ValueError,
            r"cu_seqlens: .* at most 5 .*, got \[0, 6\]",
        ),
        (
            lambda: lrpe_rotate_1d(X[:1], torch.rand(4), cu_seqlens=torch.tensor([0, 2**32 + 5])), ValueError,
            r"cu_seqlens: .*, got \[0, 4294967301\]",
        ),
        (
            lambda: packed_positions(torch.tensor([0, 5]), 5, torch.tensor([1, 2])), ValueError,
            r"offset: .*\(1,\), got torch.int64 \(2,\)",
        ),
        (
            lambda: Rotate1d(8)(X, offset=2, positions=torch.zeros(5, 1)), ValueError, "positions: .*None with offset",
        ),
        (lambda: Rotate1d(8, theta=torch.ones(3)), ValueError, r"\(1,\) or \(1, 4\) for num_heads=1 and 4 pairs"),
        (lambda: Rotate1d(8, amplitude=torch.ones(3)), ValueError, r"amplitude: .*\(4,\), got \(3,\)"),
        (lambda: Rotate1d(8).set_frequencies(torch.ones(4), 1.2), ValueError, "amplitude: .*amplitude=1.0"),
        (
            lambda: Rotate1d(8, amplitude=1.0).set_frequencies(torch.ones(4), torch.ones(3)), ValueError,
            r"amplitude: .*got \(3,\)",
        ),
        (
            lambda: Rotate1d(8, theta=torch.rand(4), num_heads=3).set_frequencies(torch.rand(3, 4)), ValueError,
            r"theta: expected 1 head or the module's number of heads, 1, got",
        ),
        (lambda: Rotate1d(8)(), TypeError, "x: expected one tensor"),
        (lambda: Rotate1d(8)(torch.randn(4, 8)), ValueError, "x: expected shape"),
        (lambda: lrpe_rotate_1d(torch.randn(4, 8), torch.rand(4)), ValueError, "x: expected shape"),
        (lambda: lrpe_rotate_1d((), torch.rand(4)), TypeError, "x: expected one tensor or two"),
        (lambda: lrpe_rotate_1d(torch.randn(1, 1, 4, 8), [1.0]), TypeError, "theta: expected a tensor"),
        (lambda: Rotate1d(8, theta=5e5), TypeError, r"theta: expected a tensor .*rope_theta as base=\), got float"),
        (lambda: convert_pairs(torch.randn(8, 2), "half", "interleaved", head_dim=0), ValueError, "head_dim: "),
        (lambda: Grid((3,), prefix=1.0), ValueError, "prefix: expected a non-negative integer"),
        (lambda: Grid(3.0), ValueError, "shape: "),
        (
            lambda: Rotate1d(8, learnable=True, num_heads=2).set_frequencies(torch.ones(4)), ValueError,
            r"theta: expected the shape of the learned frequencies, \(2, 4\), got \(4,\)",
        ),
        (
            lambda: convert_pairs(torch.ones(20, 3), "half", "interleaved", head_dim=8), ValueError,
            r"weight: expected H heads of 8 channels along dim 0, got 20 channels in a tensor of shape \(20, 3\)",
        ),
        (
            lambda: convert_pairs(torch.ones(16, 3), "half", "interleaved", head_dim=8, num_heads=4), ValueError,
            "weight: expected 4 heads of 8 channels",
        ),
        (lambda: convert_pairs(torch.ones(8), "half", "halves", head_dim=8), ValueError, "pairs: .*'halves'"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
