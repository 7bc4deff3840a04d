"""A launcher's recorded actions, replayed later, have the same effect as running it directly."""

import pytest
import torch

pytest.importorskip("triton")

from lrpe_md.scripts.common.cases import Case, LinearCase, make_inputs, make_linear_inputs

from lrpe_md.engine.core.call import NO_WEIGHTS, Needs, Options
from lrpe_md.engine.core.memory import split_projection
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.core.recording import UnrecordableError, get_storage_id, is_recording, record
from lrpe_md.engine.encode import heads, launch
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.encode.validate import validate
from lrpe_md.engine.kernels.fixed import Copy, fix
from lrpe_md.engine.linear import launch as linear_launch
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
