"""Linear attention's kernels on a GPU: real sizes and launch options, large tensors, packed sequences."""

from dataclasses import replace

import pytest
import torch
from gpu_memory import skip_without

pytest.importorskip("triton")

from lrpe_md.scripts.common.cases import LinearCase, check_linear, make_linear_inputs, run_linear

from lrpe_md import Grid, linear_attention
from lrpe_md.engine import kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nan_scratch(nan_filled):
    """Fill scratch memory with NaN, so that unwritten values show up in the outputs."""


STEADY = {"normalizer": "encoded", "act": "softplus", "base": 1e8, "head_dim": 64}
REAL = {"heads": (4, 2), "head_dim": 64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "full"}, {"mask": "causal", "act": "softplus"},
        {"mask": "causal", "act": "silu", "normalizer": "none"}, {"mask": "block", "block": 40, "act": "softplus"},
        STEADY,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
@pytest.mark.parametrize("shape", [(14, 14), (27, 40)], ids=str)
def test_masks(shape, name, changes, dtype):
    changes = {**REAL, **changes}
    if changes.get("mask") == "block":
        changes["block"] = shape[1]
    assert not check_linear(LinearCase(name, shape, dtype=dtype, **changes), "auto", "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 112])
@pytest.mark.parametrize(
    "changes",
    [
        {"decay": "block"}, {"decay": "block", "rule": "delta", "gate": "float", "prefix": 3, "state": True},
        {"decay": "head", "rule": "delta", "directions": "both", "normalizer": "none"},
        {"decay": "block", "mask": "causal", "act": "softplus"},
        {"decay": "head", "mask": "causal", "normalizer": "none", "state": True, "return_state": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(5, 40), (3, 920)], ids=str)
def test_memory(shape, changes, head_dim, dtype):
    changes = {"mask": "block", "block": shape[1], **REAL, "head_dim": head_dim, **changes}
    changes["block"] = shape[1] if changes["mask"] == "block" else 0
    assert not check_linear(LinearCase("rotate", shape, dtype=dtype, **changes), "auto", "cuda")


KINDS_OF_POSITIONS = (
    {}, {"scale": (2.5, 0.5)}, {"origin": "by_sample"}, {"coords": "shared"}, {"coords": "by_sample", "masked": True},
)  # fmt: skip


@pytest.mark.parametrize("of_q", KINDS_OF_POSITIONS, ids=str)
@pytest.mark.parametrize("of_k", KINDS_OF_POSITIONS, ids=str)
@pytest.mark.parametrize("name", ["cosine", "rotate"])
def test_cross_attention_with_positions_of_two_kinds(name, of_q, of_k):
    plain = {"scale": None, "origin": "none", "coords": "grid", "masked": False}
    k_positions = tuple({**plain, **of_k}.items())
    case = LinearCase(name, (14, 14), k_shape=(10, 11), dtype=torch.bfloat16, k_positions=k_positions, **REAL, **of_q)
    assert not check_linear(case, device="cuda")


@pytest.mark.parametrize("head_dim", [16, 24, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("layouts", [{"grad_layout": "odd"}, {"layout": "odd"}], ids=str)
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
def test_causal_unaligned_rows(name, layouts, head_dim):
    """This guards against out-of-bounds reads of shared memory, which crash at head_dim 32."""
    case = LinearCase(name, (12, 16), dtype=torch.bfloat16, mask="causal", act="softplus", head_dim=head_dim)
    assert not check_linear(replace(case, heads=(2, 2), **layouts), device="cuda")


@pytest.mark.parametrize("normalizer", ["unrotated", "none"])
@pytest.mark.parametrize("lengths", [(3,), (20,), (70,), (400,), (0, 20), (300, 0, 9)], ids=str)
def test_packed_sequences_with_a_causal_mask(lengths, normalizer):
    case = LinearCase("rotate", (sum(lengths),), 0, cu_seqlens=lengths, batch=1, mask="causal", gate="float", **REAL)
    assert not check_linear(replace(case, act="softplus", normalizer=normalizer), device="cuda")


@pytest.mark.parametrize("head_dim", [24, 40, 48, 72, 80, 88, 96, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["cosine", "rotate"])
def test_widths(name, mask, head_dim):
    case = LinearCase(name, (40, 30), head_dim=head_dim, dtype=torch.bfloat16, mask=mask, act="softplus", batch=1)
    assert not check_linear(case, device="cuda")
    if mask == "causal":
        assert not check_linear(replace(case, normalizer="none", act="silu", gate="float"), device="cuda")


@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_unmapped_features_are_read_in_place(mask, head_dim):
    """Check sums of bfloat16 products and float32 states, where truncating matrix units would show."""
    case = LinearCase(None, (1700,), prefix=0, head_dim=head_dim, dtype=torch.bfloat16, mask=mask, act="none")
    case = replace(case, normalizer="none", state=True, return_state=True)
    assert not check_linear(case, device="cuda")


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (1,), "prefix": 0, "act": "softplus", "batch": 128}, {"shape": (2,), "prefix": 0, "batch": 128},
        {"shape": (127,), "prefix": 0}, {"act": "softmax", "dim": -1},
        {"gate": "nan", "phase": "k", "omega_heads": 2}, {"gate": "float", "gate_heads": 2, "amplitude_heads": 1},
        {"layout": "packed", "v_dim": None}, {"layout": "odd", "grad_layout": "expanded"}, {"v_dim": 48},
        {"coords": "by_sample", "masked": True}, {"origin": "by_sample"}, {"k_shape": (30, 30)},
        {"map": "rotate", "rotary_dim": slice(8, 40), "pairs": "interleaved"}, {"map": "rotate", "pairs": (10, 22)},
        {"rotary_dim": slice(8, 40), "state": True, "return_state": True, "gate": "float"},
        {"rotary_dim": 20, "mask": "causal", "act": "softplus", "norm": "layer", "state": True, "return_state": True},
        {"cu_seqlens": (700, 0, 31, 169), "shape": (30, 30), "batch": 1, "state": True, "return_state": True},
        {"state": True, "return_state": True, "shape": (40, 60), "order": "sin_cos"},
        {"mask": "causal", "cu_seqlens": (700, 0, 31, 169), "shape": (30, 30), "batch": 1, "act": "softplus"},
        {"mask": "causal", "state": True, "return_state": True, "shape": (40, 60), "act": "softplus", "gate": "float"},
        {"mask": "causal", "cu_seqlens": (700, 200), "shape": (30, 30), "batch": 1, "map": "rotate", "head_dim": 112},
        {"mask": "causal", "map": "rotate", "shape": (40, 60), "head_dim": 128, "gate": "nan", "norm": "layer"},
        {"mask": "block", "block": 60, "state": True, "return_state": True, "shape": (40, 60), "act": "softplus"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arguments(changes, dtype):
    changes = {**REAL, "dtype": dtype, "prefix": 0 if "cu_seqlens" in changes else 1, **changes}
    assert not check_linear(LinearCase(**changes), device="cuda")


def test_one_token_of_relu():
    """The output of a single token equals v.

    bfloat16 is left out, because its budget comes from rounded products. But at position 0, relu's features are exact
    until the kernels divide by z.
    """
    assert not check_linear(LinearCase(shape=(1,), prefix=0, dtype=torch.float32, **REAL), device="cuda")


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("shape", [(14, 14), (60, 60)], ids=str)
def test_deterministic(shape, mask):
    inputs = make_linear_inputs(LinearCase(shape=shape, dtype=torch.bfloat16, mask=mask, gate="float", **REAL), "cuda")
    first = run_linear(inputs, "triton")
    for _ in range(5):
        again = run_linear(inputs, "triton")
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


def test_variants():
    """Sizes don't add variants. One pass has one variant. Two passes, and the scan of many heads, have others."""
    names = [name for name in kernels.__all__ if name.startswith("linear")]

    def compiled():
        return {name: sum(len(each[0]) for each in getattr(kernels, name).device_caches.values()) for name in names}

    def call(*shape, batch=2, heads=(4, 2)):
        case = LinearCase(shape=shape, prefix=0, dtype=torch.bfloat16, batch=batch, heads=heads, head_dim=64)
        run_linear(make_linear_inputs(case, "cuda"), "triton")

    call(14, 14)
    call(60, 60)
    call(64, 64, batch=16, heads=(16, 16))
    before = compiled()
    for sizes in ((1, 1), (16, 16), (13, 7), (61, 59), (64, 64), (128, 128)):
        call(*sizes)
    call(16, 16, batch=1, heads=(1, 1))
    call(72, 72, batch=16, heads=(16, 16))
    assert compiled() == before


def test_more_than_2_31_elements():
    """Check head 0 of the last sample."""
    batch, heads, num_tokens, dim = 33, 16, 64 * 1024, 64
    skip_without(5 * batch * heads * num_tokens * dim)  # q, o and states
    q = torch.randn(batch, heads, num_tokens, dim, device="cuda", dtype=torch.bfloat16)
    omega = torch.randn(1, dim, 1, device="cuda")
    o = linear_attention(q, q, q, omega=omega, positions=Grid((num_tokens,)))
    assert q.numel() > 2**31
    last = q[-1:, -1:]
    alone = linear_attention(last, last, last, omega=omega, positions=Grid((num_tokens,)), impl="reference")
    error = (o[-1:, -1:].double() - alone.double()).norm() / alone.double().norm()
    assert error < 2**-6, error


def test_four_million_tokens():
    skip_without(2**22 * 64 * 60)  # mostly for the reference
    q = torch.randn(1, 1, 2**22, 64, device="cuda", dtype=torch.bfloat16)
    omega = torch.randn(1, 64, 3, device="cuda")
    grid = Grid((16, 512, 512))
    o = linear_attention(q, q, q, omega=omega, positions=grid)
    expected = linear_attention(q, q, q, omega=omega, positions=grid, impl="reference")
    assert (o.double() - expected.double()).norm() / expected.double().norm() < 2**-6


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_cuda_graph(mask):
    case = LinearCase(shape=(40, 40), dtype=torch.bfloat16, mask=mask, act="softplus", **REAL)
    inputs = make_linear_inputs(case, "cuda")
    q, k, v = inputs.qkv

    def call():
        return linear_attention(
            q, k, v, omega=inputs.omega, positions=inputs.positions, act="softplus", is_causal=mask == "causal"
        )

    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    o.fill_(float("nan"))
    graph.replay()
    assert torch.equal(o, expected)


def test_float64_has_no_kernel():
    q = torch.randn(1, 1, 5, 16, device="cuda", dtype=torch.float64)
    with pytest.raises(ValueError, match="no kernel for float64"):
        linear_attention(q, q, q, map=None, impl="triton")
