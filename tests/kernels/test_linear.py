"""Compare linear attention's kernels with float64 in Triton's interpreter, for all maps, normalisers and masks."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from parametrizing import each_value_rows, parametrize_each, slow_except

pytest.importorskip("triton")

from lrpe_md.scripts.common.cases import LinearCase, check_linear, make_linear_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

from lrpe_md import Grid, checks, linear_attention
from lrpe_md.engine.core.operator import INTERPRETING, call_cache
from lrpe_md.engine.kernels.signature import LONG_STRIDE, pack_numbers
from lrpe_md.engine.linear import launch as linear_launch
from lrpe_md.engine.linear import plan as linear_plan
from lrpe_md.engine.linear.call import LinearOptions, Operands, Sides
from lrpe_md.engine.linear.validate import validate_linear
from lrpe_md.reference import ACTIVATIONS

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter (tests/conftest.py sets it)"),
]

# For "encoded", small angles and positive weights keep z away from 0.
STEADY = {"normalizer": "encoded", "act": "softplus", "base": 1e8, "head_dim": 32}


def assert_within_budget(case: LinearCase, **changes) -> None:
    assert not check_linear(case, ulps=1.0, **changes)


@pytest.fixture(autouse=True)
def nan_scratch(nan_filled):
    assert torch.empty(3).isnan().all()


CUTS = ("one pass", "two passes", "many pieces")
MASKED = CUTS[1:]  # a single pass only supports full attention


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """Divide the tokens into sizes that the interpreter can run."""
    if request.param != "one pass":
        monkeypatch.setattr(linear_plan, "ONE_PASS", 0)
    if request.param == "many pieces":
        monkeypatch.setattr(linear_plan, "SHORTEST", 4)
        monkeypatch.setattr(linear_plan, "PIECE", 4)
        monkeypatch.setattr(linear_plan, "PROGRAMS", 10**6)
    call_cache.clear()
    yield request.param
    call_cache.clear()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal", "block"])
def test_saved_tensors_have_the_declared_shapes(mask, return_state, state, cut):
    case = LinearCase(mask=mask, block=5, state=state, batch=1, heads=(2, 1))
    inputs = make_linear_inputs(case)
    q, k, v = inputs.qkv
    options = LinearOptions(is_causal=mask == "causal", block=5 if mask == "block" else None, return_state=return_state)
    operands = Operands(q, k, v, None, tuple(inputs.state))
    call = validate_linear(options, operands, Sides(inputs.omega, inputs.positions))
    _, *others = linear_launch.forward(call, operands, return_state, keep=True)
    kept = [(tuple(t.shape), t.dtype) for t in (others[2:] if return_state else others)]
    assert kept == linear_launch.find_saved_shapes(call, operands, return_state)
    assert kept or not (cut == "many pieces" or state or return_state)


@pytest.mark.parametrize("map", ["cosine", None])
@pytest.mark.parametrize("head_dim", [1, 3])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_outputs_do_not_share_memory(mask, head_dim, map):
    q = torch.rand(1, 1, 5, head_dim, requires_grad=True)
    omega = None if map is None else torch.rand(1, head_dim, 1, requires_grad=True)
    width = head_dim if map is None else 2 * head_dim
    state = [torch.rand(1, 1, *size, requires_grad=True) for size in ((width, head_dim), (head_dim,))]
    o, last = linear_attention(
        q, q, q, map=map, omega=omega, positions=None if map is None else Grid((5,)), is_causal=mask == "causal",
        state=tuple(state), return_state=True, impl="triton",
    )  # fmt: skip
    outs = (o, *last)
    leaves = [q, *state] if omega is None else [q, *state, omega]
    for tensors in (outs, torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs])):
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
        assert all(t.storage_offset() == 0 for t in tensors)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"block": 700}], ids=str)
def test_a_trace_leaves_no_table(options):
    """Tables are cached forever. A trace makes fake tables, so it must not cache them."""

    def count_tables() -> int:
        return linear_launch.tabulate_blocks.cache_info().currsize

    before = count_tables()
    with FakeTensorMode():
        q = torch.empty(1, 2, 1402, 16, device="cuda", requires_grad=True)
        omega = torch.empty(1, 16, 1, device="cuda")
        linear_attention(q, q, q, omega=omega, positions=Grid((1400,), 1, 1), impl="triton", **options)
    assert count_tables() == before


@pytest.fixture
def in_parts(monkeypatch):
    """Divide tokens into causal pieces of 12, whose states are summed in parts of 8 and 4."""
    monkeypatch.setattr(linear_plan, "SHORTEST", 4)
    monkeypatch.setattr(linear_plan, "PIECE", 4)
    monkeypatch.setattr(linear_plan, "cut_pieces", lambda num_tokens, *_: (max(1, -(-num_tokens // 12)), 12))
    monkeypatch.setattr(linear_plan, "cut_parts", lambda length, *_: min(length, 8))
    call_cache.clear()
    yield
    call_cache.clear()


PARTS = [{"shape": (31,), "heads": (4, 2)}, {"shape": (5, 7), "normalizer": "none"}]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    "changes",
    slow_except(PARTS, [
        *PARTS, {}, {"gate": "nan", "gate_heads": 2}, {"cu_seqlens": (9, 0, 14, 1, 13), "batch": 1},
        {"dtype": torch.bfloat16, "map": "rotate", "shape": (4, 12)},
    ]),
    ids=str,
)  # fmt: skip
def test_states_of_causal_pieces_by_parts(changes, state, in_parts):
    assert_within_budget(
        LinearCase(**{"mask": "causal", "shape": (6, 6), "state": state, "return_state": state, **changes})
    )


@pytest.mark.parametrize("head_dim", [20, 24, 64, 72])
@pytest.mark.parametrize("name", ["cosine", "rotate"])
def test_states_of_any_width_are_in_the_order_of_the_features(name, head_dim):
    """Causal kernels store halves of channels side by side, in groups of 4, 8, 64 and 8 here."""
    case = LinearCase(name, (5, 6), batch=1, heads=(2, 1), head_dim=head_dim, mask="causal", state=True)
    assert_within_budget(replace(case, return_state=True, normalizer="none", dtype=torch.bfloat16))
    assert_within_budget(replace(case, return_state=True, normalizer="encoded", act="softplus", base=1e8))


@pytest.mark.slow
@parametrize_each(
    "cut mask changes head_dim", CUTS, ["full", "causal"], [{}, {"state": True, "return_state": True}], [16, 24],
    fixtures=["cut"],
)  # fmt: skip
def test_unmapped_features_are_read_in_place(mask, changes, head_dim, cut):
    case = LinearCase(None, (67,), prefix=0, heads=(4, 2), dtype=torch.bfloat16, head_dim=head_dim, mask=mask)
    assert_within_budget(replace(case, act="none", normalizer="none", **changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cosine", "rotate"])
def test_thread_sums_tokens_before_frequencies(name, cut):
    """In tiles of 64 tokens and 64 channels, a thread has four tokens with four warps, and two of 32 tokens."""
    assert_within_budget(
        LinearCase(name, (5, 4, 6), batch=1, heads=(2, 1), head_dim=64, dtype=torch.bfloat16, phase="both")
    )


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize(
    ("name", "changes"),
    [*product(("cosine", "rotate", None), ({"gate": "float"}, {"normalizer": "none"})), ("cosine", {"phase": "k"})],
    ids=str,
)
def test_causal_products_that_are_one_tile(name, changes, heads):
    """Sums of bfloat16 rows keep one layout throughout, with tokens as columns or rows."""
    case = LinearCase(name, (10, 15), heads=heads, dtype=torch.bfloat16, mask="causal", act="softplus", batch=1)
    assert_within_budget(replace(case, **changes))


@pytest.mark.parametrize("is_causal", slow_except([True], [False, True]))
@pytest.mark.parametrize("stride", [LONG_STRIDE - 1, LONG_STRIDE])
def test_long_strides(stride, is_causal):
    """Long strides of tokens are passed in 64 bits."""
    memory = torch.empty(LONG_STRIDE + 20, dtype=torch.float16)  # takes little memory, because few pages are written
    q = memory.as_strided((1, 2, 2, 10), (0, 10, stride, 1)).copy_(torch.randn(1, 2, 2, 10))
    k, v = torch.randn(2, 1, 2, 2, 10, dtype=torch.float16)
    options = {"map": None, "normalizer": "none", "is_causal": is_causal, "impl": "triton"}
    assert torch.equal(linear_attention(q, k, v, **options), linear_attention(q.contiguous(), k, v, **options))


def test_few_heads_are_cut_until_multiprocessors_have_work():
    summing = linear_plan.choose_divisor(False, False)
    assert linear_plan.cut_pieces(65536, 1, 8192, summing) == (256, 256)
    assert linear_plan.cut_pieces(8192, 1, 8192, summing) == (64, 128), "shorter pieces than elsewhere"
    assert linear_plan.cut_pieces(8192, 8, 8192, summing) == (32, 256)
    assert linear_plan.cut_outputs(1024, 160, 1024) == (3, 384), "outputs leave no states"
    assert linear_plan.cut_outputs(1024, 128, 512) == (2, 512), "two programs on each multiprocessor are enough"


@pytest.mark.parametrize(("trains", "longest"), [(False, 384), (True, 224)])
@pytest.mark.parametrize(("v_dim", "features"), [(32, 64), (48, 96), (64, 128), (72, 72), (128, 256)])
def test_one_pass_needs_few_tokens_and_a_small_state(v_dim, features, trains, longest):
    assert linear_launch.fits_one_pass(longest, v_dim, features, trains) == (v_dim <= 64)
    assert not linear_launch.fits_one_pass(longest + 1, v_dim, features, trains)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("many_heads", [False, True])
@pytest.mark.parametrize("tokens", slow_except([15, 16], [15, 16, 65]))
def test_states_of_many_pieces(tokens, many_heads, heads, monkeypatch):
    """With pieces of one token, sums of states load 4 or 64 pieces at once, and mask those that don't exist."""
    for name, value in (("ONE_PASS", 0), ("SHORTEST", 1), ("PIECE", 1), ("PROGRAMS", 10**6)):
        monkeypatch.setattr(linear_plan, name, value)
    call_cache.clear()
    if many_heads:
        monkeypatch.setattr(linear_plan, "MULTIPROCESSORS", 1)
    assert linear_plan.choose_scan_tile(2, 1024) == ((512, 4) if many_heads else (64, 64))
    assert_within_budget(LinearCase(shape=(tokens,), prefix=0, batch=1, heads=heads, state=True, return_state=True))
    call_cache.clear()


def test_scans_of_many_heads_have_large_tiles():
    assert linear_plan.choose_scan_tile(768, 8256) == (512, 4)
    assert linear_plan.choose_scan_tile(1, 8256) == (64, 64)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_a_single_piece_needs_no_scan(heads, monkeypatch):
    """The state of a single piece is written in the form that the next kernel reads. Heads of a group are summed."""
    scans, scan_states = [], linear_launch.scan_states
    monkeypatch.setattr(
        linear_launch, "scan_states", lambda *args, **options: scans.append(args) or scan_states(*args, **options)
    )
    monkeypatch.setattr(linear_plan, "ONE_PASS", 0)
    call_cache.clear()
    assert_within_budget(LinearCase(shape=(40,), heads=heads))
    assert len(scans) == (0 if heads == (2, 2) else 1), "only the gradient of the state sums over query heads"
    assert_within_budget(LinearCase(shape=(40,), heads=heads, state=True, return_state=True))
    assert len(scans) > 1, "an initial state is added by the scan"
    call_cache.clear()


def test_number_of_programs():
    summing, causal, raw = (linear_plan.choose_divisor(*each) for each in ((False, False), (True, False), (True, True)))
    cut = linear_plan.cut_pieces
    assert cut(1024, 128, 4096, summing) == (4, 256)
    assert cut(1024, 128, 8192, summing) == (2, 512), "few tokens don't justify a second large state"
    assert cut(1024, 64, 8192, summing) == (4, 256)
    assert cut(32760, 48, 8192, summing) == (11, 3072)
    assert cut(8192, 128, 8192, causal) == (2, 4096)
    assert cut(8192, 128, 4096, raw) == (1, 8192), "one pass saturates the memory"
    q = torch.empty(1, 1, 1024, 64).expand(8, 16, -1, -1)
    sides = Sides(torch.ones(1, 32, 1), Grid((1024,)))
    call = validate_linear(LinearOptions(map="rotate", act="relu"), Operands(q, q, q), sides)
    sizes = linear_launch.derive_sizes(call, Operands(q, q, q))
    pieces = linear_launch.make_pieces(call, 1024, sizes, call.k_layout)
    assert pieces.length == 256, "the normaliser's features don't count towards the state"


@pytest.mark.parametrize("lengths", [(40,), (9, 0, 14, 1, 26), (12, 24), (0,), (3, 41, 0)], ids=str)
@pytest.mark.parametrize("part", [4, 8, 12])
def test_parts_are_the_tokens_of_their_piece(lengths, part):
    count = 2 * len(lengths) + sum(lengths) // part + 3
    ends = torch.tensor([0, *lengths]).cumsum(0)
    table = linear_launch._tabulate_sequences(ends, count, 12, part, True)
    whole = linear_launch._tabulate_sequences(ends, count, 12, 12, True)
    if len(lengths) == 1:
        assert table[table[:, 3] == 0].equal(linear_launch.tabulate_blocks(lengths[0], (0, 0), 12, part, ends.device))
    for begin, end, slot, sequence in whole[whole[:, 3] >= 0].tolist():
        own = table[(table[:, 2] == slot) & (table[:, 3] == sequence)].tolist()
        assert [row[0] for row in own] + [end] == [begin] + [row[1] for row in own]
        assert all(row[1] - row[0] == part for row in own[:-1])
    assert (table[:, 3] >= 0).sum() < count, "no room for additional pieces"


@pytest.mark.parametrize(("head_dim", "parts"), [(16, (8, 4)), (64, (2, 1))])
def test_parts_fill_the_gpu_and_skip_unused_pieces(head_dim, parts):
    q = torch.empty(2, 4, 3000, head_dim)
    sides = Sides(torch.ones(1, head_dim, 1), Grid((3000,)))
    call = validate_linear(LinearOptions(is_causal=True), Operands(q, q, q), sides)
    sizes = linear_launch.derive_sizes(call, Operands(q, q, q))._replace(batch=33)
    pieces = linear_launch.make_pieces(call, 3000, sizes, call.k_layout)
    assert (pieces.num_pieces, pieces.length) == (2, 1536)
    found, needed, _ = linear_launch.cut_causal(call, pieces, sizes, False)
    count = needed.num_pieces
    assert (found.num_pieces, count) == parts, "a piece of 1,536 tokens by up to 4 × 132 programs, as its state allows"
    assert found.num_slots == 2
    assert linear_launch.cut_causal(call, pieces, sizes, True).needed_parts.num_pieces == min(4, found.num_pieces)
    found, needed, _ = linear_launch.cut_causal(call, pieces, sizes, False, backward=True)
    assert found.table is not None
    assert needed.table is not None
    assert needed.table.equal(found.table[count:]), "expected all parts but those of the first piece"
    assert needed.num_pieces == len(needed.table)


@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
def test_maps_and_normalizers(name, normalizer, cut):
    assert_within_budget(LinearCase(name, **(STEADY if normalizer == "encoded" else {"normalizer": normalizer})))


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
def test_activations(name, act):
    normalizer = "unrotated" if ACTIVATIONS[act].never_negative else "none"
    assert_within_budget(
        LinearCase(name, act=act, dim=-1 if act == "softmax" else None, normalizer=normalizer, head_dim=24)
    )


GATES = ("float", "bool", "nan")
GATED = [*product(["full"], GATES, CUTS), *each_value_rows(["causal", "block"], GATES, MASKED)]


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "gate", "cut"), GATED, indirect=["cut"])
def test_gates(mask, gate, cut):
    assert_within_budget(
        LinearCase("rotate", gate=gate, gate_heads=2, mask=mask, block=5, act="softplus", normalizer="unrotated")
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (1,), "prefix": 0}, {"shape": (127,), "prefix": 0}, {"shape": (14, 14)}, {"shape": (2, 3, 5)},
        {"shape": (2, 2, 2, 3), "omega_heads": 2}, {"prefix": 3, "suffix": 2},
    ],
    ids=str,
)  # fmt: skip
def test_grids(changes):
    assert_within_budget(LinearCase(**changes))


WIDTHS = (24, 40, 48, 72, 80, 88, 96, 104, 112, 120, 128, 256)
# These options are combined with the widths in turn. Their numbers share no factor, so each map gets different ones.
WIDTH_OPTIONS: list[dict[str, Any]] = [
    {}, {"mask": "causal", "v_dim": 40}, {"normalizer": "none", "act": "silu", "v_dim": 72},
    {"mask": "block", "block": 5},
    {"gate": "float", "v_dim": 96}, {"normalizer": "encoded", "act": "softplus", "base": 1e8},
    {"heads": (4, 2), "state": True, "return_state": True}, {"norm": "layer", "v_dim": 104},
    {"act": "softmax", "dim": -1},
    {"dtype": torch.bfloat16, "v_dim": 80}, {"phase": "both", "amplitude_heads": 1}, {"v_dim": 33, "layout": "odd"},
    {"mask": "causal", "normalizer": "encoded", "act": "softplus", "base": 1e8, "dtype": torch.bfloat16},
]  # fmt: skip


@pytest.fixture(params=["padded values", "cut values"])
def widths(request, monkeypatch):
    """Split v into tiles like q and k. With the widths in the table, v is never split here."""
    if request.param == "cut values":
        sums = {48: (32, 16), 80: (64, 16), 96: (64, 32), 112: (64, 32, 16)}
        monkeypatch.setattr(linear_plan, "SUMS", sums)
        monkeypatch.setattr(linear_plan, "VALUE_SUMS", sums)
    call_cache.clear()
    yield
    call_cache.clear()


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 4, 9])
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("name", ["cosine", "rotate", None])
def test_widths(name, head_dim, shift, widths):
    """Each width is tested with a third of the options, which differs between maps."""
    at = 5 * WIDTHS.index(head_dim) + shift + ["cosine", "rotate", None].index(name)
    options = WIDTH_OPTIONS[at % len(WIDTH_OPTIONS)]
    if name is None:
        options = {key: value for key, value in options.items() if key not in ("phase", "amplitude_heads")}
    assert_within_budget(LinearCase(name, **{"head_dim": head_dim, "batch": 1, "heads": (2, 1), **options}))


def test_tiles_hold_each_channel_once():
    stages = linear_plan.LinearPass
    for width in range(1, 257):
        cuts = [
            (blocks, linear_plan.NARROWEST // features)
            for stage in (stages.STATE, stages.QUERIES_OMEGA) for features in (1, 2)
            for blocks in [linear_plan.choose_widths(width, stage, features)]
        ]  # fmt: skip
        values = [linear_plan.choose_value_widths(width, stage, 144) for stage in (stages.STATE, stages.KEYS)]
        for blocks, narrowest in (*cuts, *((blocks, linear_plan.NARROWEST) for blocks in values)):
            padded = linear_plan.pad_width(width)
            assert sum(blocks[:-1]) < width <= sum(blocks) <= sum(padded)
            assert all(block >= narrowest and block & (block - 1) == 0 for block in blocks)
            assert list(blocks) == sorted(blocks, reverse=True), "a tile begins at a multiple of its width"
            assert width not in (16, 32, 64, 128, 256) or blocks == (width,), "powers of two are one tile"


@pytest.mark.parametrize(
    ("name", "head_dim", "blocks"),
    [("cosine", 72, (128, 16)), ("cosine", 96, (128, 64)), ("rotate", 72, (64, 16)), (None, 80, (64, 16))],
)
def test_features_are_cut_without_a_causal_mask(name, head_dim, blocks, monkeypatch):
    described = []
    monkeypatch.setattr(
        linear_launch, "launch_with_fallback", lambda kernel, programs, args, variant, _: described.append(variant)
    )
    for mask in ("full", "causal"):
        case = LinearCase(name, head_dim=head_dim, mask=mask, heads=(2, 2))
        q, k, v = make_linear_inputs(case).qkv
        linear_attention(
            q, k, v, map=name, omega=make_linear_inputs(case).omega, positions=Grid(case.shape, case.prefix),
            is_causal=mask == "causal", impl="triton",
        )  # fmt: skip
    full, causal = described[0], described[-1]
    assert full.feature_blocks == blocks
    assert len(causal.feature_blocks) == 1
    assert [tile.block_c for tile in full.map_tiles] == [block // 2 for block in blocks]
    shrunk = linear_launch.replace_fields(full, {"block_n": 16})
    assert {tile.block_n for tile in shrunk.map_tiles} == {16}, "a smaller tile applies to all tiles of the map"


@pytest.mark.parametrize(
    ("name", "head_dim", "blocks"),
    [("cosine", 72, (64, 16)), ("cosine", 80, (128,)), ("rotate", 80, (64, 16)), ("rotate", 96, (128,))],
)
def test_values_of_small_states_are_cut_for_gradients_of_keys(name, head_dim, blocks):
    width = head_dim if name == "cosine" else head_dim // 2
    for stage in (linear_plan.LinearPass.KEYS, linear_plan.LinearPass.STATE):
        features = 2 * sum(linear_plan.choose_widths(width, stage))
        is_cut = stage is linear_plan.LinearPass.KEYS
        assert linear_plan.choose_value_widths(head_dim, stage, features) == (blocks if is_cut else (128,))


@pytest.mark.parametrize(
    ("head_dim", "options", "is_summed"),
    [
        (72, {}, True), (72, {"normalizer": "none"}, False), (72, {"normalizer": "encoded"}, False),
        (72, {"decay": torch.full((2,), 0.9)}, False), (64, {}, False),
    ],
)  # fmt: skip
def test_normalizer_of_wide_states_has_kernels_of_its_own(head_dim, options, is_summed, monkeypatch):
    names = []
    monkeypatch.setattr(linear_launch, "launch_with_fallback", lambda kernel, *args: names.append(kernel.__name__))
    q, k, v = (torch.rand(1, 2, 9, head_dim, requires_grad=True) for _ in range(3))
    o = linear_attention(q, k, v, map=None, act="softplus", is_causal=True, impl="triton", **options)
    o.sum().backward()
    assert names.count("linear_causal_normalizer_kernel") == (2 if is_summed else 0)
    assert names.count("linear_causal_normalizer_gradient_kernel") == (1 if is_summed else 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"v_dim": 24}, {"heads": (6, 1)}, {"heads": (3, 3), "omega_heads": 3}, {"layout": "packed"},
        {"layout": "odd", "grad_layout": "odd"}, {"layout": "bnhd", "grad_layout": "expanded"},
        {"coords": "shared"}, {"coords": "by_sample", "masked": True}, {"origin": "by_sample"},
        {"phase": "both"}, {"phase": "k", "map": "rotate", "omega_heads": 2}, {"amplitude_heads": 1},
        {"map": "rotate", "rotary_dim": 10}, {"map": "rotate", "rotary_dim": slice(4, 14), "pairs": "interleaved"},
        {"map": "rotate", "pairs": (3, 5)}, {"order": "sin_cos"}, {"k_shape": (7, 4)}, {"omega_dtype": torch.float64},
    ],
    ids=str,
)  # fmt: skip
def test_arguments(changes, cut):
    assert_within_budget(LinearCase(**{"return_state": "k_shape" not in changes and cut != "one pass", **changes}))


KINDS_OF_POSITIONS = (
    {}, {"scale": (2.5, 0.5)}, {"origin": "shared"}, {"origin": "by_sample"}, {"coords": "shared"},
    {"coords": "by_sample", "masked": True}, {"prefix": 0, "suffix": 2},
)  # fmt: skip


@pytest.mark.parametrize("of_q", KINDS_OF_POSITIONS, ids=str)
@pytest.mark.parametrize("of_k", KINDS_OF_POSITIONS, ids=str)
def test_cross_attention_with_positions_of_two_kinds(of_q, of_k):
    """One launch reads q's and k's positions in different formats."""
    plain = {"scale": None, "origin": "none", "coords": "grid", "masked": False, "prefix": 1, "suffix": 0}
    k_positions = tuple({**plain, **of_k}.items())
    assert_within_budget(LinearCase("rotate", (3, 4), k_shape=(2, 5), heads=(2, 1), k_positions=k_positions, **of_q))


@pytest.mark.parametrize("changes", [{"map": "cosine", "phase": "k"}, {"norm": "rms", "gate": "float"}], ids=str)
def test_two_kinds_of_positions_with_other_options(changes, cut):
    k_positions = (("scale", None), ("coords", "by_sample"))
    assert_within_budget(
        LinearCase(**{"map": "rotate", **changes}, scale=(2.5, 0.5), k_shape=(2, 5), k_positions=k_positions)
    )


PARTS_OF_THE_COSINE_MAP = [
    {"rotary_dim": 5}, {"rotary_dim": slice(3, 14), "order": "sin_cos"}, {"rotary_dim": slice(4, 16), "phase": "k"},
    {"rotary_dim": 4, "act": "softmax", "dim": -1, "head_dim": 24},
    {"rotary_dim": slice(20, 24), "norm": "layer", "norm_groups": 2, "head_dim": 24},
    {"rotary_dim": 16, "head_dim": 72, "dtype": torch.bfloat16, "batch": 1, "heads": (2, 1)},
]  # fmt: skip


@pytest.mark.slow
@parametrize_each(
    "changes normalizer mask cut", PARTS_OF_THE_COSINE_MAP, ["unrotated", "encoded", "none"],
    ["full", "causal", "block"], CUTS, fixtures=["cut"],
)  # fmt: skip
def test_cosine_map_of_some_channels(changes, normalizer, mask, cut):
    """Check values, states in the documented order of channels, and all gradients."""
    case = LinearCase(mask=mask, block=5, batch=1, act="softplus", gate="float", normalizer=normalizer, base=1e8)
    with_state = mask != "full" or cut != "one pass"
    steady = normalizer != "encoded"  # a random state could bring its denominator close to 0
    assert_within_budget(replace(case, state=with_state and steady, return_state=with_state, **changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["cosine", "rotate"])
def test_dtypes(name, mask, dtype):
    assert_within_budget(
        LinearCase(name, dtype=dtype, mask=mask, act="softplus", shape=(70,), state=True, return_state=True)
    )


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"normalizer": "encoded"}], ids=str)
def test_eps_of_float64_is_not_rounded(options, cut):
    """The output is q̂ S / eps if z is below eps. A float32 eps would give a relative error of 2e-8."""
    q, k, v = torch.rand(3, 1, 2, 9, 16, dtype=torch.float64).unbind()
    k = k * 1e-9
    eps = 0.1 if "normalizer" not in options else 1e-10
    omega = torch.full((1, 16, 1), 1e-3)
    found, expected = (
        linear_attention(q, k, v, omega=omega, positions=Grid((9,)), eps=eps, impl=impl, **options)
        for impl in ("triton", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


CAUSAL = [
    {}, {"map": "rotate", "phase": "both", "gate": "float"}, {"map": None, "shape": (67,), "prefix": 0},
    {"normalizer": "none", "act": "silu", "shape": (67,), "heads": (2, 2)}, {"heads": (4, 4), "v_dim": 24},
    {"cu_seqlens": (5, 0, 9, 2), "batch": 1}, {"phase": "k", "omega_heads": 2}, STEADY,
    {"map": "rotate", "head_dim": 72, "gate": "nan"},
]  # fmt: skip
NORMED = [{"head_dim": 72, "cu_seqlens": (5, 0, 9, 2), "norm": "layer", "batch": 1}]


@parametrize_each("changes state cut", CAUSAL, [False, True], MASKED, fixtures=["cut"])
def test_causal(changes, state, cut):
    changes = {"act": "softplus", "batch": 1, **changes}
    assert_within_budget(LinearCase(mask="causal", state=state, return_state=state, **changes))


@pytest.mark.slow
@parametrize_each("changes state cut", NORMED, [False, True], MASKED, fixtures=["cut"])
def test_causal_norm_of_padded_features(changes, state, cut):
    test_causal(changes, state, cut)


BLOCKS = [{"prefix": 0}, {"prefix": 2, "suffix": 3}, {"map": "rotate", "gate": "float"}, STEADY]


@pytest.mark.slow
@parametrize_each("changes state cut", BLOCKS, [False, True], MASKED, fixtures=["cut"])
def test_blocks(changes, state, cut):
    case = LinearCase(mask="block", shape=(4, 5), block=5, batch=1, state=state, return_state=state)
    assert_within_budget(replace(case, **{"act": "softplus", **changes}))


@pytest.mark.parametrize("normalizer", ["unrotated", "none"])
def test_packed_sequences(normalizer, cut):
    lengths = (5, 0, 9, 1, 17)
    assert_within_budget(
        LinearCase(shape=(31,), cu_seqlens=lengths, batch=1, state=True, return_state=True, normalizer=normalizer)
    )


@pytest.mark.parametrize("normalizer", ["unrotated", "encoded", "none"])
@pytest.mark.parametrize("lengths", [(3,), (20,), (70,), (0, 20), (20, 0), (9, 6, 5)], ids=str)
def test_packed_sequences_with_a_causal_mask(lengths, normalizer):
    """The table of pieces has unused rows. After one sequence, the neighbouring slot is in use."""
    options = {"normalizer": normalizer, **(STEADY if normalizer == "encoded" else {})}
    case = LinearCase("rotate", (sum(lengths),), 0, cu_seqlens=lengths, batch=1, mask="causal", gate="float")
    assert_within_budget(replace(case, **{"act": "softplus", **options}))


@pytest.mark.parametrize("cu_seqlens", [[0, 4, 100], [0, 4, 2**32], [-(2**33), 4, 6], [0, 4, 2, 6]], ids=str)
def test_wrong_offsets_stay_in_bounds(cu_seqlens, monkeypatch):
    """Kernels stay within the tokens without a check, which would sync on a GPU. 64-bit offsets don't wrap around."""
    monkeypatch.setattr(checks, "can_read", lambda t: False)
    q = torch.ones(1, 1, 6, 16)
    o = linear_attention(q, q, q, map=None, cu_seqlens=torch.tensor(cu_seqlens), impl="triton")
    torch.testing.assert_close(o, q)


def test_decreasing_offsets_stay_within_the_slots():
    """Pieces of 100 tokens in parts of 50 have 10 + 3 slots. Overlapping sequences would take 17."""
    table = linear_launch._tabulate_sequences(torch.tensor([0, 1000, 0, 1000]), 33, 100, 50, True)
    begin, end, slot, _ = table.unbind(1)
    assert slot.max() < 13
    assert (end - begin).sum() == 1000


@pytest.mark.parametrize("number", [-40, -1, 0, 1, 2, 16, 197, 2**20, 2**29 - 1, 2**32])
def test_numbers_do_not_specialise_kernels(number):
    """Triton would specialise on 1 and on multiples of 16 in a tuple."""
    (packed,) = pack_numbers(number)
    assert packed % 16 not in (0, 1)
    assert packed >> 2 == number
