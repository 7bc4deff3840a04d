"""Compare the kernels with float64, in Triton's interpreter. test_gpu.py runs them on a GPU."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lrpe_md.scripts.common.cases import Case, check, make_inputs, run
from parametrizing import ACTS, parametrize_each

from lrpe_md import Grid, cosine, rotate
from lrpe_md.engine.core import launching
from lrpe_md.engine.encode import launch
from lrpe_md.engine.encode import plan as plans
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.kernels.signature import LONG_STRIDE

pytestmark = pytest.mark.sampled
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def violations(case: Case, **kwargs) -> list[str]:
    # The interpreter truncates instead of rounding to bfloat16.
    ulps = 1.0 if case.dtype == torch.bfloat16 and launching.INTERPRETING else 0.0
    return [str(v) for v in check(case, ulps=ulps, **kwargs)]


@pytest.fixture(autouse=True)
def fill_with_nan(nan_filled):
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize(("act", "dim"), ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_activations(map, dtype, act, dim):
    assert not violations(Case(map, (5, 7), act=act, dim=dim, dtype=dtype, omega_heads=2, phase=True))


@pytest.mark.parametrize("act", [name for name, dim in ACTS if dim is None])
def test_gradients_at_kinks(act):
    """The kernel computes the same gradient as the reference at 0 and at other integers."""
    x, omega = torch.arange(-4.0, 4.0).expand(1, 1, 3, 8).requires_grad_(), torch.zeros(1, 8, 1)
    ys = (cosine(x, omega=omega, positions=Grid((3,)), act=act, impl=impl) for impl in ("triton", "reference"))
    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in ys)
    torch.testing.assert_close(found, expected)


SHAPES = [
    {"shape": (127,), "prefix": 0, "head_dim": 24},
    {"shape": (3, 5), "prefix": 0, "suffix": 4, "head_dim": 72},
    {"shape": (2, 3, 4), "prefix": 5, "head_dim": 80, "omega_heads": 2},
    {"shape": (2, 3, 2, 2), "head_dim": 20},
    {"shape": (2, 1, 2, 2, 2), "head_dim": 12, "scale": 0.5},
    {"shape": (1,), "prefix": 0, "heads": (1,), "batch": 1},
    {"shape": (0,), "prefix": 3},
    {"shape": (4, 4), "batch": 0},
    {"shape": (4, 6), "scale": (0.5, 1.7), "shift": (3.0, -2.0), "phase": True},
    {"shape": (4, 6), "prefix": 2, "suffix": 2, "start": 5, "length": 11, "phase": True},
    {"shape": (4, 6), "prefix": 2, "start": 1, "length": 1},
    {"shape": (3, 4), "prefix": 2, "suffix": 1, "origin": "by_sample", "phase": True},
    {"shape": (2, 3, 4), "origin": "shared", "scale": 0.5, "start": 2},
    {"shape": (2, 1, 2, 2, 2), "head_dim": 12, "origin": "by_sample"},
    {"shape": (4, 6), "coords": "shared", "prefix": 2, "suffix": 1, "phase": True, "omega_heads": 2},
    {"shape": (4, 6), "coords": "by_sample", "prefix": 1, "phase": True},
    {"shape": (4, 6), "coords": "by_sample", "coords_dtype": torch.float64, "coords_scale": 1e4},
    {"shape": (30,), "coords": "shared", "coords_dtype": torch.int64, "coords_scale": 1e6, "prefix": 0},
    {"shape": (30,), "coords": "shared", "coords_dtype": torch.int16, "prefix": 0},
    {"shape": (4, 6), "omega_dtype": torch.float64, "phase": True},
    {"shape": (4, 6), "heads": (6, 3), "omega_heads": 3, "act": "silu"},
    {"shape": (4, 6), "heads": (6, 1)},
]


@pytest.mark.parametrize("change", SHAPES, ids=str)
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_shapes_and_positions(map, change):
    case = Case(map, **change)
    assert not violations(case)
    assert not violations(case, frequencies=False)


@pytest.mark.parametrize("layout", ["bnhd", "packed", "odd"])
@pytest.mark.parametrize("grad_layout", ["bnhd", "odd", "expanded"])
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_strides(map, layout, grad_layout):
    if grad_layout == "expanded":
        layout = "bhnd"
    assert not violations(Case(map, layout=layout, grad_layout=grad_layout, act="silu"))


@pytest.mark.parametrize("head_dim", [24, 40, 72])
def test_softmax_over_a_sequence_with_a_part_of_a_block(head_dim):
    """The last block of 16 channels has only 8. The others are masked, in the forward pass and in the backward pass."""
    assert not violations(Case("rotate", (3, 2), head_dim=head_dim, heads=(2,), act="softmax", dim=-2))


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [10, slice(3, 13), slice(4, 16), 16])
@pytest.mark.parametrize(("act", "dim"), [("none", None), ("silu", None), ("softmax", -1), ("softmax", -2)])
def test_partial_rotation(pairs, rotary_dim, act, dim):
    assert not violations(Case("rotate", pairs=pairs, rotary_dim=rotary_dim, act=act, dim=dim, phase=True))


CUTS = {
    "token loop": plans.Plan(2, 8, 4, None, 1, False, 1, 64),
    "parts": plans.Plan(1, 8, 4, None, 1, False, 3, 1),
    "all": plans.Plan(2, 16, 4, None, 1, False, 2, 4),
    "a block shared": plans.Plan(2, 8, 4, None, 1, False, 2, 64),
    "parts of blocks shared": plans.Plan(2, 4, 4, None, 1, False, 4, 6),
    "no round": plans.Plan(1, 8, 4, None, 1, False, 5, 64),
    "programs without a row": plans.Plan(4, 8, 4, None, 1, False, 40, 64),
}


@pytest.mark.slow
@parametrize_each("name map coords", list(CUTS), ["cosine", "rotate"], ["grid", "by_sample"])
def test_every_work_partition(monkeypatch, count_launches, name, map, coords):
    """Programs loop over blocks of tokens, samples and heads. Parts and shares do not divide evenly."""
    cut = CUTS[name]

    def plan(work: plans.Work) -> plans.Plan:
        one_tile = cut._replace(token_programs=-(-work.num_tokens // cut.block_n), rows_per_program=cut.block_r)
        return cut if work.stage is plans.Pass.DOMEGA else one_tile

    monkeypatch.setattr(launch, "plan", plan)
    case = Case(map, (3, 6), coords=coords, batch=3, heads=(4, 2), omega_heads=2, head_dim=8, phase=True)
    assert not violations(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=72),
        Case(head_dim=24, coords="by_sample", phase=True, omega_heads=2),
        Case(head_dim=40, act="silu", prefix=2, suffix=3, layout="packed", scale=0.5),
        Case(head_dim=72, dtype=torch.float64, heads=(2,)),
        Case("rotate", head_dim=72, phase=True),
        Case("rotate", head_dim=80, pairs="interleaved", grad_layout="bnhd"),
    ],
    ids=str,
)
def test_channels_not_a_power_of_two(count_launches, case):
    """Tiles consist of blocks of channels. A block is as large as a load of 16 bytes."""
    assert not violations(case, frequencies=False)
    assert not violations(case)
    blocks = {(launched.variant.flat, launched.variant.block_c) for launched in count_launches()}
    width = 4 if case.channels % 8 else 8
    assert blocks == {(case.channels // width, width)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("cosine", (7, 8), head_dim=24), Case("rotate", (7, 8), head_dim=48, heads=(3,))], ids=str
)
def test_shared_blocks_of_channels(monkeypatch, count_launches, case):
    """Programs with the same channels share the remainder after full rounds."""
    walks = []

    def plan(work: plans.Work) -> plans.Plan:
        chosen = uncut(work)
        if work.stage is not plans.Pass.DOMEGA:
            return chosen
        step = work.step
        blocks = -(-work.num_tokens // 8)
        walks.append((step, *divmod(blocks, 4 * step)))
        return chosen._replace(block_n=8, block_r=1, token_programs=4 * step)

    uncut = plans.plan
    monkeypatch.setattr(launch, "plan", plan)
    assert not violations(case)
    assert walks
    assert all(step > 1 and rounds and left for step, rounds, left in walks), walks


@pytest.mark.parametrize(
    "case",
    [
        Case(amplitude_heads=1),
        Case("rotate", amplitude_heads=2, omega_heads=2, phase=True, suffix=2),
        Case("rotate", amplitude_heads=2, rotary_dim=slice(2, 14)),
        Case("rotate", head_dim=24, amplitude_heads=1, dtype=torch.float64),
        Case(order="sin_cos", act="silu"),
        Case(order="sin_cos", head_dim=24, grad_layout="bnhd"),
        Case("rotate", pairs=(3, 5)),
        Case("rotate", head_dim=48, pairs=(8, 16), layout="packed"),
        Case("rotate", pairs=(1, 2, 3), rotary_dim=slice(2, 14), act="softmax", dim=-2, phase=True),
        Case("rotate", pairs=(2, 6), act="softmax", dim=-1, layout="odd"),
        Case(coords="by_sample", masked=True, phase=True, amplitude_heads=1, prefix=2, suffix=1),
        Case("rotate", coords="shared", masked=True, phase=True, omega_heads=2),
    ],
    ids=str,
)
def test_amplitude_order_blocks_and_masks(case):
    assert not violations(case)
    assert not violations(case, frequencies=False)


@pytest.mark.parametrize("num_tokens", [15, 16])
@pytest.mark.parametrize("map", ["cosine", "rotate"])
def test_softmax_over_a_sequence_of_low_logits(map, num_tokens):
    """Masked tokens and rows must not contribute exp(0 - maximum), which overflows here."""
    inputs = make_inputs(Case(map, (num_tokens, 1), prefix=0, batch=1, heads=(3,), act="softmax", dim=-2))
    inputs.xs[0][:, 0, :, 3] -= 200
    expected, found = run(inputs, "reference"), run(inputs, "triton")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("far", [1e4, 1.4e7, 3e7, 5e7, 2e8])
def test_angles_of_any_size(far, sign):
    """Half turns are counted correctly at explicit positions of millions of radians."""
    x, omega = torch.randn(1, 1, 64, 8), torch.ones(1, 8, 1)
    coords = (sign * (far + torch.arange(64, dtype=torch.float64) * 0.37))[:, None]
    exact = cosine(x.double(), omega=omega.double(), positions=coords, impl="reference")
    found = cosine(x, omega=omega, positions=coords, impl="triton")
    assert (found - exact).abs().max() < 1e-5


@pytest.mark.parametrize("frequency", [190.0, -190.0])
@pytest.mark.parametrize("size", [60_000, 250_000])
def test_fast_frequencies_far_on_a_grid(size, frequency):
    x, omega = torch.randn(1, 1, 16, 8), torch.full((1, 8, 1), frequency)
    grid = Grid((size,), start=size - 16)
    exact = cosine(x.double(), omega=omega.double(), positions=grid, impl="reference")
    assert (cosine(x, omega=omega, positions=grid, impl="triton") - exact).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stride", [LONG_STRIDE - 1, LONG_STRIDE])
def test_long_strides(stride):
    """Long strides of tokens are passed in 64 bits."""
    memory = torch.empty(LONG_STRIDE + 20, dtype=torch.float16)  # takes little memory, because few pages are written
    x = memory.as_strided((1, 2, 2, 10), (0, 10, stride, 1)).copy_(torch.randn(1, 2, 2, 10))
    omega = torch.rand(1, 5, 1)
    expected = rotate(x.float(), omega=omega, positions=Grid((2,)), impl="reference")
    torch.testing.assert_close(rotate(x, omega=omega, positions=Grid((2,)), impl="triton"), expected.half())


@pytest.mark.parametrize("shape", [(2**16,), (2**15, 2**15), (200, 200, 200, 200)])
def test_turns_counted_in_integers(shape):
    """Angles of the last tokens of a plain grid are exact up to the rounding of sine and cosine."""
    num = 64
    generator = torch.Generator().manual_seed(0)
    grid = Grid(shape, start=math.prod(shape) - num)
    omega = torch.rand(1, 8, len(shape), generator=generator)
    x = torch.randn(1, 1, num, 8, generator=generator)
    exact = cosine(x.double(), omega=omega.double(), positions=grid, impl="reference")
    found = cosine(x, omega=omega, positions=grid, impl="triton")
    assert (found - exact).abs().max() < 4e-7 * x.abs().max()


def test_frequencies_around_whole_turns():
    """Test values for which the nearest integer differs from adding 1/2 and rounding down."""
    near = [s * f * math.pi for s in (1, -1) for f in (1, 1 - 2**-24, 1 + 2**-24, 0.5, 2, 1 - 0.7 * 2**-24)]
    grid = Grid((60_016,), start=60_000)
    for dtype in (torch.float32, torch.float64):
        omega = torch.tensor(near, dtype=dtype)[None, :, None]
        x = torch.ones(1, 1, 16, len(near))
        exact = cosine(x.double(), omega=omega.double(), positions=grid, impl="reference")
        assert (cosine(x, omega=omega, positions=grid, impl="triton") - exact).abs().max() < 5e-7


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_frequency_gives_nan(bad):
    omega, x = torch.ones(1, 4, 2), torch.ones(1, 1, 6, 4)
    omega[0, 1, 0] = bad
    for phase in (None, torch.tensor([[0.0, 0.0, bad, 0.0]])):
        y = cosine(x, omega=omega, positions=Grid((2, 3)), phase=phase, impl="triton")[0, 0, :, :4]
        assert y.isnan().all(0).tolist() == [False, True, phase is not None, False]
    # Tiles of blocks of 8 channels, per-head frequencies, and their gradient.
    omega = torch.ones(2, 24, 2)
    omega[1, 9, 1] = bad
    omega.requires_grad_()
    y = cosine(torch.ones(1, 2, 6, 24), omega=omega, positions=Grid((2, 3)), impl="triton")
    expected = torch.zeros(2, 24, dtype=torch.bool)
    expected[1, 9] = True
    assert torch.equal(y[0, :, :, :24].isnan().all(1), expected)
    (domega,) = torch.autograd.grad(y.sum(), omega)
    assert torch.equal(domega.isnan().any(-1), expected)


@pytest.mark.parametrize(
    ("driver", "capabilities", "early"),
    [
        (12030, [(9, 0)], True),
        (13000, [(9, 0), (10, 0)], True),
        (13000, [(9, 0), (8, 0)], False),
        (12020, [(9, 0)], False),
        (None, [(9, 0)], False),
    ],
)
def test_early_launch_depends_on_driver_and_gpu(monkeypatch, driver, capabilities, early):
    class Driver:
        def __init__(self, name):
            if driver is None:
                raise OSError(name)

        def cuDriverGetVersion(self, found):
            found._obj.value = driver

    monkeypatch.setattr(launching, "INTERPRETING", False)
    monkeypatch.setattr(launching.ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert launching._can_launch_early.__wrapped__() is early


@pytest.mark.parametrize("stage", plans.Pass)
@pytest.mark.parametrize(("num_tokens", "rows"), [(0, 4), (4, 0), (0, 0), (197, 3072)])
def test_plans_for_a_gpu(stage, num_tokens, rows):
    """Check plans that the interpreter can't run: empty calls, and per-sample coordinates, which only need one wave."""
    for map in ("cosine", "rotate"):
        for samples, step in ((1, 1), (256, 1), (1, 9)):
            rows_each = rows // samples
            work = plans.Work(map, stage, False, num_tokens, 1, rows_each, 12, 64, 2, samples, step)
            chosen = plans.plan(work)
            assert chosen.rows_per_program % chosen.block_r == 0
            assert chosen.rows_per_program >= chosen.block_r
            if stage is plans.Pass.DOMEGA:
                assert chosen.token_programs % step == 0
                parts = math.prod(plans.share_rows(rows_each, 12, chosen.rows_per_program))
                programs = samples * chosen.token_programs * parts
                assert programs <= max(samples, plans.NUM_SM * 16)


@given(
    st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 60),
    st.sampled_from([1, 3]),
)  # fmt: skip
@example(52, 16, 16, 4, 79, 1)  # an eighth of 64×64 tokens: one program per block would leave a third idle
@example(41, 2, 48, 2, 79, 1)  # a third of 96 rows does not divide 48, and a quarter of the programs would have none
@example(25, 256, 1, 4, 66, 1)  # 14×14 tokens, ω by head: half the tokens and a fifth of the rows is slower
def test_partition_is_optimal(token_blocks, samples, heads, block_r, programs, step):
    """Try all other shares of the rows and all numbers of programs along the tokens. None of them finishes sooner."""
    rows = samples * heads

    def fits(across, per):
        return across * math.prod(plans.share_rows(rows, heads, per)) <= programs

    def walk(across, per):
        rounds, left = divmod(token_blocks, across)
        steps = per // block_r
        return rounds * (plans.NEW_TOKENS + steps) + (plans.NEW_TOKENS + -(-left * steps // across) if left else 0)

    across, per = plans.cut_rows(token_blocks, rows, heads, block_r, programs, step)
    assert across % step == per % block_r == 0
    assert per * math.prod(plans.share_rows(rows, heads, per)) >= rows
    every = [
        (t, p)
        for p in range(block_r, rows + block_r, block_r)
        for t in range(step, max(step, token_blocks) + 1, step)
        if fits(t, p)
    ]
    if every:
        assert fits(across, per)
        assert walk(across, per) == min(walk(*each) for each in every)
    if (token_blocks, samples) == (25, 256):  # the last example
        assert (across, per) == (25, 128)


def misalign(t):
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


# what changes in the next call with the same sizes, and whether the last launch still fits
REPEATS = {
    "values": (lambda t: t.flip(0), True),
    "strides": (lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2), False),
    "alignment": (misalign, False),
    "negative bit": (torch._neg_view, False),
}


@pytest.mark.parametrize("change", REPEATS)
@pytest.mark.parametrize("argument", ["x", "cos", "sin"])
def test_repeated_calls_reuse_the_launch(monkeypatch, argument, change):
    make, fits = REPEATS[change]
    tensors = {"x": torch.randn(2, 3, 20, 8), "cos": torch.randn(2, 3, 20, 4), "sin": torch.randn(2, 3, 20, 4)}
    _check_repeat(monkeypatch, rotate, tensors, {**tensors, argument: make(tensors[argument])}, fits)


@pytest.mark.parametrize("change", ["values", "strides", "negative bit"])
@pytest.mark.parametrize("map", [cosine, rotate])
def test_repeated_calls_with_frequencies_reuse_the_launch(monkeypatch, map, change):
    make, fits = REPEATS[change]
    tensors = {"x": torch.randn(2, 3, 20, 8), "omega": torch.rand(1, 8 if map is cosine else 4, 2)}
    changed = {
        **tensors,
        "omega": tensors["omega"].mT.contiguous().mT if change == "strides" else make(tensors["omega"]),
    }
    _check_repeat(monkeypatch, map, tensors, changed, fits)


def test_copies_with_other_strides_are_not_repeated():
    """A negative view is copied before the launch, and its copy is dense."""
    omega, positions = torch.rand(1, 4, 2), Grid((4, 5))
    x = torch.randn(2, 3, 40, 8)[:, :, ::2]
    for t in (torch._neg_view(x), x):
        found, expected = (rotate(t, omega=omega, positions=positions, impl=impl) for impl in ("triton", "reference"))
        torch.testing.assert_close(found, expected)


def _check_repeat(monkeypatch, map, tensors, changed, fits):
    def encode(impl, x, cos=None, sin=None, omega=None):
        where = {"tables": (cos, sin)} if omega is None else {"omega": omega, "positions": Grid((4, 5))}
        return map(x, **where, impl=impl)

    first = encode("triton", **tensors)
    searches, find = [], launch.find_launch
    monkeypatch.setattr(launch, "find_launch", lambda *args: (searches.append(args), find(*args))[1])
    found, expected = encode("triton", **changed), encode("reference", **changed)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert found.data_ptr() != first.data_ptr()
    assert len(searches) == (not fits)


def test_result_keeps_memory_order():
    for layout in ("bhnd", "bnhd", "packed"):
        inputs = make_inputs(Case(layout=layout))
        q, k = cosine(*inputs.xs, omega=inputs.omega, positions=inputs.positions, impl="triton")
        for y in (q, k):
            assert (y if layout == "bhnd" else y.transpose(1, 2)).is_contiguous()


def test_inputs_are_not_modified():
    inputs = make_inputs(Case())
    before = [x.clone() for x in (*inputs.xs, *inputs.grads, inputs.omega)]
    run(inputs, "triton")
    assert all(torch.equal(a, b) for a, b in zip(before, (*inputs.xs, *inputs.grads, inputs.omega), strict=True))


def test_budget_can_fail(monkeypatch):
    """A missing phase, a wrong sign and an unwritten row each exceed the budget."""

    real = ENCODE.forward

    def no_phase(call, *rest):
        return real(call._replace(tables=call.tables._replace(phase=None), launches={}), *rest)

    def unwritten(*args):
        out = real(*args)
        out[0][0, 0, -1] = float("nan")
        return out

    def one_part_in_a_million(*args):
        out = real(*args)
        out[0].mul_(1 + 2e-6)
        return out

    for broken in (no_phase, unwritten, one_part_in_a_million):
        monkeypatch.setattr(ENCODE, "forward", broken)
        assert violations(Case(phase=True)), broken
