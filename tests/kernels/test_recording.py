"""A launcher's recorded actions, replayed later, have the same effect as running it directly."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from lrpe_md.scripts.common.cases import Case, LinearCase, make_inputs, make_linear_inputs, run_linear

from lrpe_md import linear_attention
from lrpe_md.engine.core import recording, reduction
from lrpe_md.engine.core.call import NO_WEIGHTS, Needs, Options, Variant
from lrpe_md.engine.core.memory import split_projection
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.core.operator import call_cache
from lrpe_md.engine.core.recording import (
    UnrecordableError,
    collect_launches,
    compile_together,
    get_storage_id,
    is_recording,
    launch_kernel,
    record,
)
from lrpe_md.engine.encode import heads, launch
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.encode.validate import validate
from lrpe_md.engine.kernels.fixed import Copy, fix
from lrpe_md.engine.linear import launch as linear_launch
from lrpe_md.engine.linear import operator as linear_operator
from lrpe_md.engine.linear.call import LinearNeeds, LinearOptions, Operands, Sides
from lrpe_md.engine.linear.operator import ATTEND
from lrpe_md.engine.linear.validate import validate_linear


class StandIns:
    """Replace tensors with fakes that have no memory, and back again, by their storage."""

    def __init__(self):
        self.real = {}
        self.kept = []

    def to_fakes(self, value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.to_fakes, value))
        if not isinstance(value, torch.Tensor):
            return value
        t = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self.kept.append(t)
        self.real[get_storage_id(t)] = value
        return t

    def to_tensors(self, value):
        if isinstance(value, tuple):
            return tuple(map(self.to_tensors, value))
        if not isinstance(value, torch.Tensor):
            return value
        real = self.real[get_storage_id(value)].view(value.dtype)
        return real.as_strided(value.shape, value.stride(), real.storage_offset() + value.storage_offset())


def replay(run, args):
    """Return the launches and the outputs of run(*args)."""
    tensors = StandIns()
    given = tensors.to_fakes(args)
    with record() as recorded:
        outs = run(*given)
        assert is_recording()
    assert not is_recording()
    for key, t in recorded.allocations.items():
        tensors.real[key] = torch.full_like(t, float("nan"), device="cpu")
    for start in recorded.launches:
        start.kernel[(start.programs,)](*tensors.to_tensors(start.args), V=start.variant)
    return recorded.launches, [tensors.to_tensors(out) for out in outs]


def names(starts):
    return [start.kernel.fn.__name__ for start in starts]


def prepare(case):
    inputs = make_inputs(case)
    options, weights = take_norm(Options(case.map, case.act, case.dim), inputs.norm(), len(inputs.xs))
    call = validate(options, tuple(inputs.xs), inputs.omega, inputs.positions, inputs.phase, None, weights)
    return inputs, call, heads if case.norm_over == "heads" else launch


CASES = {
    ("lrpe_kernel", "reduce_partial_kernel"): Case(
        "rotate", norm="rms", norm_groups=2, phase=True, heads=(4, 2), coords="by_sample", masked=True
    ),
    ("heads_kernel", "reduce_partial_kernel"): Case("cosine", norm="layer", norm_over="heads", act="silu"),
    ("heads_kernel", "lrpe_kernel", "heads_kernel", "reduce_partial_kernel"): Case(
        "rotate", norm="rms", norm_over="heads", omega_heads=2
    ),
}


@pytest.mark.parametrize("kernels", CASES, ids=lambda names: f"{names[0]} {len(names)}")
def test_maps(kernels):
    inputs, call, launcher = prepare(CASES[kernels])
    needs = Needs(True, call.tables.phase is not None, True)

    def forward(xs, *args):
        return launcher.forward(ENCODE.unflatten(args)[0], xs)

    def backward(grads, xs, *args):
        return launcher.backward(ENCODE.unflatten(args)[0], grads, xs, [], needs)

    for run, args in (
        (forward, [inputs.xs, *ENCODE.flatten(call)]),
        (backward, [inputs.grads, inputs.xs, *ENCODE.flatten(call)]),
    ):
        starts, outs = replay(run, args)
        for a, b in zip(outs, run(*args), strict=True):
            assert torch.equal(a, b)
    assert tuple(names(starts)) == kernels


@pytest.mark.parametrize(
    "case",
    [
        LinearCase("cosine", gate="float", gate_heads=2),
        LinearCase("rotate", (40, 30), batch=1, heads=(2, 1), norm="rms"),
    ],
    ids=str,
)
def test_linear(case):
    inputs = make_linear_inputs(case)
    q, k, v = inputs.qkv
    options, weights = LinearOptions(case.map), NO_WEIGHTS
    if case.norm != "none":
        options, weights = take_norm(options, inputs.norm(), 2)
    call = validate_linear(options, Operands(q, k, v, inputs.gate), Sides(inputs.omega, inputs.positions), weights)
    needs = LinearNeeds(gate=inputs.gate is not None, omega=True, norm=bool(inputs.weights))

    def forward(q, k, v, gate, *args):
        return linear_launch.forward(ATTEND.unflatten(args)[0], Operands(q, k, v, gate, ()), False, True)

    def backward(grad, saved, q, k, v, gate, *args):
        operands = Operands(q, k, v, gate, ())
        return linear_launch.backward(ATTEND.unflatten(args)[0], [grad], operands, saved, needs)

    given = [*inputs.qkv, inputs.gate, *ATTEND.flatten(call)]
    starts, found = replay(forward, given)
    expected = forward(*given)
    assert len(starts) == (3 if len(expected) > 1 else 1)  # one pass saves nothing
    args = [inputs.grad, expected[1:], *given]
    _, grads = replay(backward, args)
    for a, b in zip([*found, *grads], [*expected, *backward(*args)], strict=True):
        assert torch.equal(a, b)


def test_unsupported_operations_are_refused():
    inputs, call, _ = prepare(Case("rotate", norm="rms", norm_weight="by_head", norm_groups=2))

    def forward(xs, *args):
        return launch.forward(ENCODE.unflatten(args)[0], xs)

    with pytest.raises(UnrecordableError, match="aten::clone"):
        replay(forward, [inputs.xs, *ENCODE.flatten(call)])
    assert not is_recording()


@pytest.mark.parametrize("num_key_heads", [None, 2])
@pytest.mark.parametrize("num_tokens", [1, 200])
def test_further_programs_copy(num_key_heads, num_tokens):
    """Gradients of q and k are written into the projection's gradient, and the same launch copies the gradient of v."""
    heads = (4, num_key_heads or 4)
    inputs, call, launcher = prepare(Case("rotate", (num_tokens,), prefix=0, heads=heads, head_dim=24, norm="rms"))
    size = (2, num_tokens, 3, 4, 24) if num_key_heads is None else (2, num_tokens, 4 + 2 * num_key_heads, 24)
    dv = torch.randn(2, num_tokens, heads[1], 24).transpose(1, 2)
    grads = [torch.randn_like(x) for x in inputs.xs]
    tensors = StandIns()
    given, xs, passing, args = tensors.to_fakes((grads, inputs.xs, dv, ENCODE.flatten(call)))
    with record() as recorded:
        joined = torch.empty(size, device="meta")
        places = split_projection(joined, num_key_heads)
        launcher.backward(ENCODE.unflatten(args)[0], given, xs, [], Needs(), places[:2])
    (start,) = recorded.launches
    real = tensors.real[get_storage_id(joined)] = torch.full(size, float("nan"))
    copy = Copy(passing, places[2], start.programs, num_warps=4)
    for key, t in recorded.allocations.items():
        tensors.real.setdefault(key, torch.full_like(t, float("nan"), device="cpu"))
    fixed = fix(
        start.kernel,
        tensors.to_tensors(start.args),
        copy._replace(source=dv, destination=tensors.to_tensors(places[2])),
    )
    assert fixed.programs == copy.programs > 0
    fixed.kernel[(start.programs + fixed.programs,)](*fixed.tensors, fixed.numbers, fixed.types, V=start.variant)
    expected = launcher.backward(call, grads, inputs.xs, [], Needs())
    for place, value in zip(split_projection(real, num_key_heads), (*expected, dv), strict=True):
        torch.testing.assert_close(place, value, rtol=0, atol=0)


class Kernel:
    """Stand-in for a kernel. It lists what is launched and compiled."""

    def __init__(self, fails=False):
        self.launched, self.compiled, self.built, self.fails = [], [], [], fails

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append(args)

    def warmup(self, *args, V, grid, **options):
        if self.fails:
            raise RuntimeError("does not compile")
        self.compiled.append((args, V, options))
        return Compiled(self)


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        self.kernel.built.append(grid)


def test_kernels_compile_together_without_a_launch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    kernel, broken = Kernel(), Kernel(fails=True)
    first, second = Variant(), Variant(map="rotate")
    with compile_together(torch.device("cuda", 0)):
        for variant in (first, second, first):
            launch_kernel(kernel, 3, ("x",), variant, {"num_warps": 2})
        launch_kernel(broken, 3, ("x",), first, {})
    options = {"enable_fp_fusion": False, "num_warps": 2}
    assert sorted(kernel.compiled, key=lambda each: each[1].map) == [(("x",), v, options) for v in (first, second)]
    assert kernel.built == [(3, 1, 1)] * 2
    assert kernel.launched == broken.launched == []
    launch_kernel(kernel, 3, ("x",), first, {})
    assert kernel.launched == [("x",)]


def describe(value):
    """Return what a kernel is compiled for: the dtypes of tensors, and the types of numbers."""
    if isinstance(value, tuple):
        return tuple(map(describe, value))
    return value.dtype if isinstance(value, torch.Tensor) else type(value)


def compile_ahead_with(monkeypatch, context):
    """Make the next first call of linear attention compile ahead, as on a GPU, but with another context."""
    monkeypatch.setattr(linear_operator, "INTERPRETING", False)
    monkeypatch.setattr(linear_operator, "compile_together", context)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(linear_operator, "_compiled", set())
    call_cache.clear()


@pytest.fixture
def launched(monkeypatch):
    """Return a list to which each launch of linear attention adds its kernel and variant."""
    launches = []

    def launch(kernel, programs, args, variant, options):
        launches.append((kernel, variant))
        return launch_kernel(kernel, programs, args, variant, options)

    monkeypatch.setattr(recording, "launch_kernel", launch)
    return launches


@pytest.mark.parametrize(
    "case",
    [
        LinearCase(shape=(70,), phase="both"),
        LinearCase("rotate", (70,), mask="causal", norm="rms"),
        LinearCase("rotate", (4, 6), mask="block", block=6, decay="block", rule="delta", gate="float"),
        LinearCase(None, (40,), heads=(2, 2), return_state=True),
    ],
    ids=str,
)
def test_linear_attention_compiles_what_it_launches(monkeypatch, case):
    """The launches of a first call that are compiled ahead are those of its forward and backward pass."""
    ahead, launched = [], []

    def launch(kernel, programs, args, variant, options):
        launches = launched if recording._launches.get() is None else ahead
        launches.append((kernel, variant, options, describe(args)))
        return launch_kernel(kernel, programs, args, variant, options)

    for module in (recording, reduction):
        monkeypatch.setattr(module, "launch_kernel", launch)
    compile_ahead_with(monkeypatch, lambda device: collect_launches())
    run_linear(make_linear_inputs(case), "triton")
    assert ahead == launched
    assert len({kernel for kernel, *_ in ahead}) >= 3
    run_linear(make_linear_inputs(case), "triton")
    assert launched == ahead * 2


def test_the_gradient_of_a_sum_runs_the_same_kernels(launched):
    """It is copied, because its strides of 0 would need other kernels."""
    x = torch.randn(1, 2, 70, 16, requires_grad=True)
    for gradient in (torch.ones(1, 2, 70, 16), torch.ones(()).expand(1, 2, 70, 16)):
        linear_attention(x, x, x, map=None, impl="triton").backward(gradient)
    assert launched[: len(launched) // 2] == launched[len(launched) // 2 :]


def test_learned_frequencies_add_no_states(launched):
    """Kernels that compute states are the same in both passes, whether or not frequencies are learned."""
    inputs = make_linear_inputs(LinearCase(shape=(300,), batch=1, heads=(1, 1), head_dim=8, phase="both", norm="rms"))
    for frequencies in (False, True):
        run_linear(inputs, "triton", frequencies=frequencies)
    names = [kernel.fn.__name__ for kernel, _ in set(launched)]
    assert names.count("linear_state_kernel") == names.count("linear_query_state_kernel") == 1
    assert names.count("linear_query_gradient_kernel") == 2


def test_without_memory_kernels_compile_at_their_launch(monkeypatch):
    def fail(device):
        raise torch.OutOfMemoryError("no memory")

    compile_ahead_with(monkeypatch, fail)
    inputs = make_linear_inputs(LinearCase(shape=(9,)))
    torch.testing.assert_close(run_linear(inputs, "triton")["o"], run_linear(inputs, "reference")["o"])
