"""Compilers can trace calls of the kernels. The tensors are fake tensors on a GPU, so that no GPU is needed.

An older torch can't trace everything that the newest one can: ``make oldest``.
"""

import pytest
import torch
from lrpe_md.scripts.common.cases import Case, LinearCase, bind, bind_linear, make_inputs, make_linear_inputs
from parametrizing import slow_except
from torch._subclasses.fake_tensor import FakeTensorMode

from lrpe_md import cosine, rotate

pytestmark = pytest.mark.sampled

ENCODINGS = {
    "rotate": Case("rotate", (4, 4), heads=(4, 2), head_dim=16),
    "cosine": Case("cosine", (4, 4), head_dim=16, prefix=1, suffix=2, act="silu", phase=True),
    "one tensor": Case("rotate", (4, 4), heads=(4,), head_dim=16),
    "softmax": Case("rotate", (4, 4), head_dim=16, act="softmax", dim=-2),
    "rms": Case("rotate", (4, 4), heads=(4, 2), head_dim=16, norm="rms"),
    "layer over heads": Case("cosine", (4, 4), head_dim=16, norm="layer", norm_over="heads"),
    "weights by group": Case("rotate", (4, 4), head_dim=16, suffix=3, norm="rms", norm_groups=3, norm_weight="by_head"),
}
ATTENTIONS = {
    "full": {"map": "cosine"},
    "with state": {"map": "rotate", "phase": "both", "state": True, "return_state": True},
    "causal": {"map": "cosine", "mask": "causal"},
    "wide and causal": {"map": "rotate", "mask": "causal", "head_dim": 128},
    "gated": {"map": "rotate", "gate": "float"},
    "after a norm": {"map": "rotate", "norm": "rms", "norm_groups": 2},
    "without a map": {"map": None, "mask": "causal"},
    "delta rule": {"mask": "block", "block": 5, "rule": "delta", "act": "silu", "normalizer": "none", "decay": "head"},
}


@pytest.fixture(autouse=True)
def fake_tensors():
    torch.compiler.reset()
    with FakeTensorMode():
        yield


@pytest.fixture(params=[True, False], ids=["any sizes", "fixed sizes"])  # quick cases mostly use the first one
def trace(request):
    """Return a function that traces both passes of a call. Dynamo traces the backward pass with the forward pass."""

    def run(function, *args):
        for out in torch.compile(function, backend="eager", fullgraph=True, dynamic=request.param)(*args):
            assert out.device.type == "cuda"
            assert out.requires_grad

    return run


def learn(tensor):
    return tensor if tensor is None else tensor.detach().requires_grad_()


@pytest.mark.parametrize("name", slow_except(["rotate", "layer over heads"], ENCODINGS))
def test_encoding(name, trace):
    inputs = make_inputs(ENCODINGS[name], "cuda")
    forward = bind(inputs, "triton")
    num_xs = len(inputs.xs)

    def call(omega, phase, *tensors):
        return forward(list(tensors[:num_xs]), omega, phase, tensors[num_xs:])

    trace(call, *map(learn, (inputs.omega, inputs.phase, *inputs.xs, *inputs.weights.values())))


@pytest.mark.slow
@pytest.mark.parametrize("encode", [cosine, rotate])
@pytest.mark.parametrize("learned", [False, True], ids=["constant", "learned"])
def test_tables(encode, learned, trace):
    q, k = (torch.empty(2, heads, 17, 16, device="cuda", requires_grad=True) for heads in (4, 2))
    cos, sin = (torch.empty(16, 16, device="cuda", requires_grad=learned) for _ in range(2))
    trace(lambda q, k, cos, sin: encode(q, k, tables=(cos, sin), prefix=1, impl="triton"), q, k, cos, sin)


@pytest.mark.parametrize("settings", ATTENTIONS.values(), ids=ATTENTIONS)
def test_linear_attention(settings, trace):
    inputs = make_linear_inputs(LinearCase(**settings), "cuda")
    forward = bind_linear(inputs, "triton")

    def call(omega, phase, gate, state, q, k, v, *weights):
        o, after = forward([q, k, v], omega, phase, gate, state, weights or None)
        return o, *(t for t in after if t is not None)

    state = [learn(t) for t in inputs.state]
    others = map(learn, (*inputs.qkv, *inputs.weights.values()))
    trace(call, learn(inputs.omega), learn(inputs.phase), learn(inputs.gate), state, *others)
