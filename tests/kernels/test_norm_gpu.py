"""Maps after a norm on a GPU: ``pytest -m gpu``."""

import pytest
import torch
from gpu_memory import skip_without
from lrpe_md.scripts.bench import norm as bench
from lrpe_md.scripts.bench.measure import device_events
from lrpe_md.scripts.common.cases import Case, check, make_inputs, run

from lrpe_md import Grid, Norm, rotate

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
both = pytest.mark.parametrize("over", ["head", "heads"])
kinds = pytest.mark.parametrize("kind", ["rms", "layer"])


@both
@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_values_and_gradients(map, dtype, kind, over, nan_filled):
    for weights in {dtype, torch.float32}:
        case = Case(map, (14, 14), norm=kind, norm_over=over, dtype=dtype, norm_dtype=weights, head_dim=64, act="silu")
        assert not check(case, device="cuda")
        assert not check(case, device="cuda", frequencies=False)


@both
@kinds
@pytest.mark.parametrize("head_dim", [24, 64, 72, 80, 96, 128, 256])
def test_widths(head_dim, kind, over, nan_filled):
    for pairs in ("half", "interleaved"):
        case = Case("rotate", (9, 16), norm=kind, norm_over=over, head_dim=head_dim, dtype=torch.bfloat16, pairs=pairs)
        assert not check(case, device="cuda")


CHANGES = [
    {"heads": (40, 40), "head_dim": 128, "batch": 1},
    {"heads": (32, 8), "head_dim": 128},
    {"heads": (40, 8), "head_dim": 128, "norm_groups": 3, "suffix": 7, "prefix": 5},
    {"norm_weight": "by_head", "norm_groups": 2, "prefix": 9},
    {"norm_weight": "none"},
    {"omega_heads": 2, "phase": True},
    {"coords": "by_sample", "phase": True, "masked": True, "batch": 3},
    {"layout": "packed", "grad_layout": "bnhd", "heads": (4, 4), "zero_rows": True},
    {"layout": "odd", "grad_layout": "odd", "rotary_dim": slice(3, 13)},
    {"shape": (70, 70), "heads": (12, 12), "head_dim": 64, "batch": 3},
    {"batch": 0},
]


@both
@kinds
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_weights_positions_and_strides(change, kind, over, nan_filled):
    case = Case("rotate", **{"shape": (9, 16), "norm": kind, "norm_over": over, "dtype": torch.bfloat16, **change})
    assert not check(case, device="cuda")
    assert not check(case, device="cuda", frequencies=False)


@both
def test_deterministic(over):
    case = Case("rotate", (40, 40), norm="layer", norm_over=over, head_dim=64, dtype=torch.bfloat16)
    inputs = make_inputs(case, "cuda")
    first, second = run(inputs, "triton"), run(inputs, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@both
def test_kernels_of_a_call(over):
    """The forward pass needs one kernel. The backward pass with dγ and dω needs a second one, which sums."""
    inputs = bench.make_inputs(bench.replace(bench.WORKLOADS["flux"], norm="rms", norm_over=over), torch.device("cuda"))
    for which, kernels in (("forward", 1), ("backward", 2), ("backward_omega", 2)):
        call = bench.make_pass(which, bench.encode_fused, inputs)
        call()
        names = [event.name for event in device_events(call)]
        assert len(names) == kernels, (which, names)


@both
def test_sizes_do_not_add_variants(over):
    """Tokens and samples are run-time arguments."""
    from lrpe_md.engine.encode import heads, launch

    kernel = heads.heads_kernel if over == "heads" else launch.lrpe_kernel
    omega, weight = torch.randn(1, 20, 2, device="cuda"), torch.ones(3, 40, device="cuda", requires_grad=True)
    weight = weight if over == "heads" else weight[0]

    def call(batch: int, *shape: int) -> None:
        x = torch.randn(batch, 3, torch.Size(shape).numel(), 40, device="cuda", requires_grad=True)
        rotate(x, omega=omega, positions=Grid(shape), norm=Norm(weight=weight, over=over)).sum().backward()

    call(2, 5, 7)
    variants = len(kernel.device_caches[torch.cuda.current_device()][0])
    for sizes in ((1, 16, 16), (3, 1, 101), (2, 64, 33)):
        call(*sizes)
    assert len(kernel.device_caches[torch.cuda.current_device()][0]) == variants


def test_far_tokens_over_all_heads():
    """Use offsets beyond 2^31 elements, in a strided view of a few distant rows."""
    heads, step = 4, 2**28
    skip_without(10 * step)
    storage = torch.zeros(10 * step, dtype=torch.bfloat16, device="cuda")
    x = storage.as_strided((1, heads, 9, 64), (0, 64, step, 1))
    x.normal_()
    options = {"omega": torch.randn(1, 32, 1, device="cuda"), "positions": Grid((9,)), "norm": Norm(over="heads")}
    assert torch.equal(rotate(x, **options), rotate(x.clone(), **options))
