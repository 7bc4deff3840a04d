"""Kernels for memory that forgets, in Triton's interpreter: decay and the delta rule over blocks."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from parametrizing import slow_except

pytest.importorskip("triton")

from lrpe_md.scripts.common.cases import LinearCase, check_linear, make_linear_inputs, run_linear

from lrpe_md.engine.core.operator import INTERPRETING, call_cache
from lrpe_md.engine.linear import launch_memory
from lrpe_md.engine.linear import plan as linear_plan
from lrpe_md.engine.linear.call import LinearOptions, Operands, Sides
from lrpe_md.engine.linear.validate import validate_linear

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter (tests/conftest.py sets it)"),
]

BLOCK = LinearCase("rotate", (4, 5), batch=1, heads=(2, 1), mask="block", block=5, decay="block")
DELTA = replace(BLOCK, rule="delta")
# For "encoded", small angles and positive weights keep z away from 0.
STEADY = {"normalizer": "encoded", "base": 1e8}


def assert_within_budget(case: LinearCase, **changes) -> None:
    assert not check_linear(case, ulps=1.0, **changes)


@pytest.fixture(autouse=True)
def nan_scratch(nan_filled):
    assert torch.empty(3).isnan().all()


@pytest.fixture
def many_pieces(monkeypatch):
    """Cut blocks into pieces of 4 tokens."""
    monkeypatch.setattr(linear_plan, "SHORTEST", 4)
    monkeypatch.setattr(linear_plan, "PIECE", 4)
    monkeypatch.setattr(linear_plan, "PROGRAMS", 10**6)
    call_cache.clear()
    yield
    call_cache.clear()


@pytest.fixture
def parts_of_pieces(monkeypatch):
    """Divide tokens into causal pieces of 12, whose states are scanned in parts of 8 and 4."""
    monkeypatch.setattr(linear_plan, "cut_pieces", lambda num_tokens, *_: (max(1, -(-num_tokens // 12)), 12))
    monkeypatch.setattr(linear_plan, "cut_parts", lambda length, *_: min(length, 8))
    call_cache.clear()
    yield
    call_cache.clear()


@pytest.mark.parametrize("directions", ["forward", "both"])
@pytest.mark.parametrize("case", [BLOCK, DELTA], ids=["add", "delta"])
@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
def test_maps_and_normalizers(name, normalizer, case, directions):
    changes = STEADY if normalizer == "encoded" else {"normalizer": normalizer}
    assert_within_budget(replace(case, map=name, directions=directions, **changes))


CHANGES = [
    # With seed 0, z is 0.002 at a token that only sees itself. Its gradient cancels from terms 500 times as large.
    {"decay": "none", "rule": "delta"}, {"decay": "head", "heads": (2, 2), "batch": 2, "seed": 1},
    {"prefix": 3, "suffix": 2},
    {"prefix": 0}, {"shape": (1, 5)}, {"heads": (4, 2), "gate": "float", "gate_heads": 2},
    {"gate": "nan", "phase": "both"}, {"gate": "bool", "omega_heads": 1, "amplitude_heads": 1}, {"v_dim": 24},
    {"rotary_dim": slice(4, 14)}, {"head_dim": 24}, {"head_dim": 80, "v_dim": 8}, {"layout": "odd"},
    {"coords": "shared", "batch": 2}, {"norm": "rms"}, {"norm": "layer", "norm_groups": 2, "gate": "float"},
    {"dtype": torch.float64},
]  # fmt: skip


@pytest.mark.parametrize("case", [BLOCK, DELTA], ids=["add", "delta"])
@pytest.mark.parametrize("changes", slow_except(CHANGES[::2], CHANGES), ids=str)
def test_arguments(changes, case, many_pieces):
    assert_within_budget(replace(case, **changes))


def test_several_tiles_of_equal_width():
    """Rotated and other channels have a tile each. With equal widths, mixing them up changes values, not shapes."""
    assert_within_budget(replace(DELTA, head_dim=64, rotary_dim=32, shape=(2, 2), block=2, v_dim=8, heads=(1, 1)))


@pytest.mark.parametrize("case", [BLOCK, DELTA], ids=["add", "delta"])
@pytest.mark.parametrize("normalizer", ["unrotated", "none"])
def test_states(normalizer, case, many_pieces):
    assert_within_budget(
        replace(case, normalizer=normalizer, state=True, return_state=True, heads=(2, 1), batch=2, prefix=2)
    )


@pytest.mark.parametrize("directions", ["forward", "both"])
@pytest.mark.parametrize("case", [BLOCK, DELTA], ids=["add", "delta"])
@pytest.mark.parametrize(("name", "dtype"), [*product(("cosine", "rotate"), (torch.bfloat16, torch.float16))])
def test_narrow_inputs(name, dtype, case, directions):
    assert_within_budget(replace(case, map=name, dtype=dtype, directions=directions, gate="float"))


@pytest.mark.parametrize("case", [BLOCK, DELTA], ids=["add", "delta"])
def test_no_tokens(case):
    assert_within_budget(replace(case, shape=(0, 5), prefix=0, state=True, return_state=True))


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("directions", ["forward", "both"])
@pytest.mark.parametrize("case", [BLOCK, DELTA], ids=["add", "delta"])
@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
def test_saved_tensors_have_the_declared_shapes(normalizer, case, directions, state):
    inputs = make_linear_inputs(replace(case, normalizer=normalizer))
    q, k, v = inputs.qkv
    options = LinearOptions(
        "rotate", normalizer=normalizer, block=5, rule=case.rule, directions=directions,
        return_state=state and directions == "forward",
    )  # fmt: skip
    operands = Operands(q, k, v, decay=inputs.decay)
    call = validate_linear(options, operands, Sides(inputs.omega, inputs.positions))
    _, *found = launch_memory.forward(call, operands, options.return_state, True)
    kept = found[(1 if normalizer == "none" else 2) * options.return_state :]
    declared = launch_memory.find_saved_shapes(call, operands, options.return_state)
    assert [(tuple(t.shape), t.dtype) for t in kept] == declared


def test_backward_forms_again_what_was_not_kept(monkeypatch):
    """A graph for dynamic sizes saves no states, so the backward pass recomputes them."""
    inputs = make_linear_inputs(replace(DELTA, directions="both"))
    expected = run_linear(inputs, "triton")
    forward = launch_memory.forward
    monkeypatch.setattr(
        launch_memory, "forward", lambda call, operands, state, _: forward(call, operands, state, False)
    )
    for name, t in run_linear(inputs, "triton").items():
        assert torch.equal(t, expected[name]), name


@pytest.mark.slow
def test_gradients_are_deterministic():
    inputs = make_linear_inputs(replace(DELTA, heads=(2, 1), batch=2, gate="float"))
    first, second = run_linear(inputs, "triton"), run_linear(inputs, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


CAUSAL = LinearCase("rotate", (40,), batch=1, heads=(2, 1), mask="causal", decay="block")


@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
def test_tokens(name, normalizer):
    changes = STEADY | {"act": "softplus", "head_dim": 32} if normalizer == "encoded" else {"normalizer": normalizer}
    assert_within_budget(replace(CAUSAL, map=name, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"decay": "head", "heads": (4, 2)}, {"gate": "nan", "heads": (2, 2), "gate_heads": 2},
        {"gate": "float", "normalizer": "none"}, {"shape": (1,), "prefix": 0},
        pytest.param({"shape": (150,)}, marks=pytest.mark.slow),
        {"dtype": torch.float64}, {"head_dim": 24, "v_dim": 8}, {"norm": "rms", "phase": "both"},
    ],
    ids=str,
)  # fmt: skip
def test_pieces_of_tokens(changes, state, many_pieces):
    assert_within_budget(replace(CAUSAL, state=state, return_state=state, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"decay": "head"}, {"decay": "head", "shape": (24,)}, {"shape": (6,)}, {"heads": (4, 2), "shape": (31,)}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_pieces(dtype, changes, state, parts_of_pieces):
    assert_within_budget(replace(CAUSAL, dtype=dtype, state=state, return_state=state, **changes))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
def test_narrow_tokens(name, head_dim, heads):
    assert_within_budget(
        replace(CAUSAL, map=name, head_dim=head_dim, heads=heads, dtype=torch.bfloat16, act="softplus", shape=(150,))
    )


@pytest.mark.parametrize("changes", [{"cu_seqlens": (20, 21)}, {"mask": "block", "block": 1}], ids=str)
def test_calls_without_a_kernel(changes):
    """impl="auto" uses the reference, and "triton" raises an error."""
    with pytest.raises(ValueError, match="'triton' has no kernel for"):
        run_linear(make_linear_inputs(replace(CAUSAL, **changes)), "triton")
