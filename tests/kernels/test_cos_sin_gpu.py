"""The caller's cos and sin on a GPU: values and the cost of a call. ``pytest -m gpu``."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lrpe_md.scripts.common.cases import Case, check
from test_gpu_cost import REPEATS, Call, host_us, no_synchronisation, num_variants, on_gpu, profiled

from lrpe_md import Norm, rotate
from lrpe_md.engine.encode import launch

pytestmark = pytest.mark.gpu
FULL = Case("rotate", (14, 14), tables="full", head_dim=64, suffix=2)
PAIRS = replace(FULL, tables="pairs")
COSINE = replace(PAIRS, map="cosine")
CASES = [FULL, PAIRS, COSINE]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["dense", "odd", "expanded", "complex", "complex odd"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tables_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dtypes(case, tables_dtype, dtype, nan_filled):
    assert not check(replace(case, dtype=dtype, tables_dtype=tables_dtype), device="cuda")


@pytest.mark.parametrize("pairs", ["half", "interleaved", (8, 24)], ids=str)
@pytest.mark.parametrize("tables_layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts(case, tables_layout, pairs, nan_filled):
    for heads, batch in ((1, 1), (2, 1), (1, 2), (2, 2)):
        changes = {"omega_heads": heads, "tables_batch": batch, "tables_layout": tables_layout, "act": "silu"}
        changes |= {} if case.map == "cosine" else {"pairs": pairs}
        assert not check(replace(case, dtype=torch.bfloat16, layout="packed", **changes), device="cuda")


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 72},
        {"head_dim": 80, "pairs": "interleaved", "tables_layout": "complex", "inverse": True},
        {"head_dim": 20, "layout": "odd"},
        {"head_dim": 128, "act": "softmax", "dim": -2},
        {"rotary_dim": slice(8, 40), "act": "softmax", "dim": -1},
        {"norm": "rms"},
        {"norm": "layer", "norm_weight": "by_head", "omega_heads": 2, "tables_batch": 2},
        {"norm": "rms", "norm_over": "heads", "heads": (6, 6), "tables_layout": "complex"},
        {"norm": "layer", "norm_over": "heads", "norm_groups": 3, "tables_batch": 2},
        {"norm": "rms", "norm_over": "heads", "omega_heads": 2},
        {"norm": "rms", "norm_over": "heads", "heads": (32, 16), "omega_heads": 16, "pairs": "interleaved"},
        {"norm": "layer", "norm_over": "heads", "heads": (12,), "omega_heads": 12, "tables_batch": 2, "batch": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("tables", ["pairs", "full"])
def test_widths_and_norms(tables, change, nan_filled):
    for dtype in (torch.bfloat16, torch.float32):
        assert not check(replace(FULL, tables=tables, dtype=dtype, **change), device="cuda")


FORMS = [
    FULL,
    replace(FULL, tables_layout="expanded", act="silu"),
    replace(FULL, tables_layout="complex", layout="packed", pairs="interleaved"),
    replace(PAIRS, tables_layout="odd", omega_heads=2, tables_batch=2),
    replace(PAIRS, norm="rms", norm_weight="none"),
    COSINE,
]


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_one_kernel_a_pass_no_copies_and_no_synchronisation(case):
    call = Call(on_gpu(replace(case, dtype=torch.bfloat16)))
    call.backward(call.forward())
    assert len(profiled(call.forward)) == 1
    ys = call.forward()
    assert len(profiled(lambda: call.backward(ys))) == 1
    with no_synchronisation():
        call.backward(call.forward())


def test_one_variant_for_all_sizes():
    """Sizes and aligned table strides don't add variants. No other test uses head_dim 56."""
    sizes = [
        {"shape": (1,), "prefix": 0, "suffix": 0, "batch": 1, "heads": (1, 1)},
        {"shape": (196,), "prefix": 1, "heads": (12, 4)},
        {"shape": (101,), "batch": 3, "heads": (6, 3), "tables_layout": "expanded"},
        {"shape": (1009,), "suffix": 7, "omega_heads": 2, "layout": "packed"},
    ]
    inputs = [on_gpu(replace(FULL, head_dim=56, dtype=torch.bfloat16, **size)) for size in sizes]
    counts = [num_variants(launch.lrpe_kernel)]
    for each in inputs:
        Call(each, requires_grad=False).forward()
    counts.append(num_variants(launch.lrpe_kernel))
    for each in inputs:
        call = Call(each)
        call.backward(call.forward())
    counts.append(num_variants(launch.lrpe_kernel))
    assert [after - before for before, after in pairwise(counts)] == [1, 1]


def test_cuda_graph():
    """A replay reads the current contents of the tables."""
    q, k = (torch.randn(2, h, 31, 16, device="cuda", requires_grad=True) for h in (4, 2))
    cos, sin = torch.randn(29, 16, device="cuda"), torch.randn(29, 16, device="cuda")

    def step():
        ys = rotate(q, k, tables=(cos, sin), prefix=1, norm=Norm("rms"))
        return *(y.detach() for y in ys), *torch.autograd.grad(sum(y.sin().sum() for y in ys), (q, k))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    cos.normal_()
    sin.normal_()
    expected = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tables", ["full", "complex"])
def test_compiles_with_real_kernels(tables):
    q, k = (torch.randn(2, h, 31, 16, device="cuda", requires_grad=True) for h in (4, 2))
    cos, sin = torch.randn(30, 16, device="cuda"), torch.randn(30, 16, device="cuda")
    given = (cos, sin) if tables == "full" else (torch.complex(cos, sin),)

    def f(q, k, *given):
        ys = rotate(q, k, tables=given if len(given) == 2 else given[0], prefix=1, act="silu")
        return sum(y.sin().sum() for y in ys)

    expected = torch.autograd.grad(f(q, k, *given), (q, k))
    found = torch.autograd.grad(torch.compile(f, fullgraph=True)(q, k, *given), (q, k))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
def test_host_time_against_computed_angles(requires_grad):
    """Compare calls that differ only in the use of tables."""
    sizes = {"batch": 1, "heads": (12,), "suffix": 0, "dtype": torch.bfloat16}
    given, computed = (Call(on_gpu(replace(FULL, tables=t, **sizes)), False, requires_grad) for t in ("full", "none"))
    found = []
    for _ in range(REPEATS):  # keep the minimum, because noise only adds time
        ours, theirs = host_us(given.forward, computed.forward)
        found.append(ours / theirs)
        if found[-1] <= 1.1:
            break
    print(f"tables, requires_grad={requires_grad}: {min(found):.3f} of the time of a call with frequencies")
    assert min(found) <= 1.1
