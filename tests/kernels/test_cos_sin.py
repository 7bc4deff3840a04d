"""Compare the kernels with the caller's cos and sin with float64, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from lrpe_md.scripts.common.cases import Case, bind, make_inputs
from parametrizing import parametrize_each
from test_kernels import ACTS, CUTS, DTYPES, violations

from lrpe_md import Norm, rotate
from lrpe_md.engine.encode import launch
from lrpe_md.engine.encode import plan as plans
from lrpe_md.engine.kernels.signature import pack_numbers

pytestmark = pytest.mark.sampled
FULL = Case("rotate", (5, 7), tables="full", suffix=2)
PAIRS = replace(FULL, tables="pairs")
COSINE = replace(PAIRS, map="cosine")


@pytest.fixture(autouse=True)
def fill_with_nan(nan_filled):
    assert torch.empty(3).isnan().all()


@parametrize_each("case pairs act", [FULL, PAIRS, COSINE], ["half", "interleaved", (3, 5)], ACTS)
def test_pairings_and_activations(case, pairs, act):
    name, dim = act
    assert not violations(replace(case, act=name, dim=dim, **({} if case.map == "cosine" else {"pairs": pairs})))


@parametrize_each("case dtype tables_dtype pairs", [FULL, PAIRS, COSINE], DTYPES, DTYPES[::-1], ["half", "interleaved"])
def test_dtypes(case, dtype, tables_dtype, pairs):
    assert not violations(replace(case, dtype=dtype, tables_dtype=tables_dtype, pairs=pairs))


LAYOUTS = ["dense", "odd", "expanded", "complex", "complex odd"]


@parametrize_each(
    "case layout heads batch pairs", [FULL, PAIRS, COSINE], LAYOUTS, [1, 2], [2, 1], ["interleaved", "half"]
)
def test_layouts(case, layout, heads, batch, pairs):
    case = replace(case, tables_layout=layout, omega_heads=heads, tables_batch=batch, pairs=pairs)
    assert not violations(case)
    assert not violations(replace(case, batch=3, tables_batch=3 if batch > 1 else 1, heads=(2,), layout="odd"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"prefix": 0, "suffix": 0, "heads": (3,), "inverse": True},
        {"head_dim": 24, "pairs": "interleaved", "inverse": True, "layout": "packed"},
        {"head_dim": 72, "pairs": "half", "grad_layout": "bnhd"},
        {"head_dim": 80, "tables_layout": "complex", "act": "silu"},
        {"head_dim": 20, "pairs": (4, 6), "tables_layout": "complex"},
        {"rotary_dim": slice(3, 13), "act": "softmax", "dim": -2, "pairs": "interleaved"},
        {"rotary_dim": slice(4, 16), "pairs": (2, 4), "omega_heads": 2},
        {"rotary_dim": 10, "tables_layout": "complex odd", "prefix": 7},
        {"heads": (6, 3), "omega_heads": 3, "tables_batch": 2},
        {"heads": (4, 2), "omega_heads": 2, "tables_layout": "expanded", "tables_batch": 2},
        {"shape": (0,), "prefix": 3, "suffix": 1},
        {"shape": (1,), "prefix": 0, "suffix": 0, "heads": (1,), "batch": 1},
        {"batch": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("tables", ["pairs", "full"])
def test_widths_and_sizes(tables, change):
    assert not violations(replace(FULL, tables=tables, **change))


NORMS = [
    {"norm": "rms"},
    {"norm": "layer", "norm_weight": "by_head", "omega_heads": 2},
    {"norm": "rms", "norm_groups": 3, "tables_batch": 2},
    {"norm": "rms", "norm_weight": "none"},
    {"norm": "rms", "norm_over": "heads", "omega_heads": 2},
    {"norm": "layer", "norm_over": "heads", "heads": (6, 3), "omega_heads": 3, "tables_batch": 2, "inverse": True},
]
NORMS_OVER_HEADS = [
    {"norm": "rms", "norm_over": "heads"},
    {"norm": "layer", "norm_over": "heads", "norm_groups": 3, "tables_batch": 2},
]


NORM_VALUES = [FULL, PAIRS, COSINE], ["half", "interleaved"], ["dense", "complex", "odd", "expanded"]


@parametrize_each("change case pairs layout", NORMS, *NORM_VALUES)
def test_norms(change, case, pairs, layout):
    assert not violations(replace(case, pairs=pairs, tables_layout=layout, act="silu", **change))


@pytest.mark.slow
@parametrize_each("change case pairs layout", NORMS_OVER_HEADS, *NORM_VALUES)
def test_norms_over_all_heads(change, case, pairs, layout):
    test_norms(change, case, pairs, layout)


def test_norm_over_all_heads_reads_the_tables_of_each_head(count_launches):
    """A single kernel runs both the norm and the map."""
    assert not violations(replace(FULL, norm="rms", norm_over="heads", omega_heads=2))
    assert count_launches()
    for launched in count_launches():
        assert launched.variant.norm == "rms"
        assert launched.variant.table_by_head


@pytest.mark.slow
@parametrize_each("name case", list(CUTS), [FULL, COSINE])
def test_every_work_partition(monkeypatch, count_launches, name, case):
    cut = CUTS[name]
    whole = plans.plan

    def plan(work: plans.Work) -> plans.Plan:
        if work.stage is plans.Pass.DOMEGA:
            return cut if not work.rows_per_weight else whole(work)
        return cut._replace(token_programs=-(-work.num_tokens // cut.block_n), rows_per_program=cut.block_r)

    monkeypatch.setattr(launch, "plan", plan)
    changes = {"batch": 3, "heads": (4, 2), "head_dim": 8, "norm": "rms", "norm_weight": "none"}
    assert not violations(replace(case, omega_heads=2, tables_batch=3, **changes))
    assert not violations(replace(case, **changes))


def test_expanded_tables_share_programs(count_launches):
    """Samples and heads that share table rows are processed by the same programs."""
    for layout, heads, batch in (("dense", 1, 1), ("expanded", 1, 1)):
        assert not violations(replace(FULL, tables_layout=layout, omega_heads=heads, tables_batch=batch))
    inputs = make_inputs(FULL)
    rotate(*inputs.xs, tables=tuple(t[None, None] for t in inputs.tables), prefix=FULL.prefix, impl="triton")
    assert len(count_launches()) >= 5
    for launched in count_launches():
        assert not launched.variant.by_sample
        programs, *_ = launched.numbers
        assert programs[3:6:2] == pack_numbers(1, sum(FULL.heads) * FULL.batch)  # G and span


@pytest.mark.parametrize(
    ("table", "unit"),
    [
        (torch.randn(12, 16), 8),
        (torch.randn(12, 12)[:, :8], 4),
        (torch.randn(12, 9)[:, :8], 1),
        (torch.randn(193)[1:].view(12, 16), 1),
        (torch.randn(12, 32)[:, ::2], 1),
        (torch.randn(12, 1, 16).transpose(0, 1), 8),
    ],
)
def test_loads_are_as_wide_as_strides_allow(count_launches, table, unit):
    q = torch.randn(1, 2, 12, 2 * table.shape[-1])
    y = rotate(q, tables=(table, table), impl="triton")
    torch.testing.assert_close(y, rotate(q, tables=(table, table), impl="reference"))
    (launched,) = count_launches()
    assert launched.variant.table_unit == unit


def test_no_copy_of_a_table(monkeypatch):
    """The kernel receives the caller's memory, whatever its strides."""
    seen, run = [], launch._launch

    def watch(prepared, args):
        tables = args[4]
        seen.append(tables[-1])
        run(prepared, args)

    monkeypatch.setattr(launch, "_launch", watch)
    for layout in LAYOUTS:
        inputs = make_inputs(replace(FULL, tables_layout=layout))
        bind(inputs, "triton")([x.requires_grad_() for x in inputs.xs], inputs.omega)[0].sum().backward()
        for cos, *_ in seen:
            assert cos.data_ptr() == inputs.tables[0].data_ptr()
        assert len(seen) == 2
        seen.clear()


def test_a_negated_table_is_resolved():
    """The imaginary part of a conjugate is a view whose memory has the opposite sign."""
    table, q = torch.polar(torch.ones(12, 8), torch.randn(12, 8)), torch.randn(1, 2, 12, 16)
    expected = rotate(q, tables=table, inverse=True, impl="reference")
    for tables in (table.conj(), (table.conj().real, table.conj().imag)):
        torch.testing.assert_close(rotate(q, tables=tables, impl="triton"), expected)


@pytest.mark.parametrize("start", [None, torch.tensor([3, 0])])
@pytest.mark.parametrize("norm", [None, Norm("rms")])
def test_outputs_in_a_cache(start, norm):
    inputs = make_inputs(replace(FULL, rotary_dim=8, shape=(6,), prefix=1, suffix=0))
    q, k = inputs.xs
    expected = rotate(q, k, tables=inputs.tables, prefix=1, rotary_dim=8, norm=norm, impl="triton")
    cache = torch.full((2, 2, 12, 16), 7.0)
    out = cache if start is not None else cache[:, :, 2:9]
    rotate(
        q, k, tables=inputs.tables, prefix=1, rotary_dim=8, norm=norm, out=(None, out), out_start=start, impl="triton"
    )
    for b, begin in enumerate([2, 2] if start is None else start.tolist()):
        torch.testing.assert_close(cache[b, :, begin : begin + 7], expected[1][b])
        assert (cache[b, :, begin + 7 :] == 7).all()


def test_packed_tokens_and_projections():
    """Each of the tokens (N, H, D) has a table row. q, k and v of a projection are used as views."""
    qkv, tables = torch.randn(9, 3, 4, 8), (torch.randn(9, 8), torch.randn(9, 8))
    q, k, v = rotate(qkv=qkv, tables=tables, impl="triton")
    assert torch.equal(v, qkv[:, 2])
    for found, x in ((q, qkv[:, 0]), (k, qkv[:, 1])):
        expected = rotate(x.transpose(0, 1)[None], tables=tables, impl="reference")[0].transpose(0, 1)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(rotate(x, tables=tables, impl="triton"), expected)
