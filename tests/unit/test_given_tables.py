"""Cos and sin tables from the caller: semantics and errors."""

import warnings

import pytest
import torch
from parametrizing import parametrize_each

from lrpe_md import Coordinates, Grid, Norm, axial_omega, cosine, pack, reference, rotate
from lrpe_md.engine.core import operator
from lrpe_md.reference import join_pairs, split_pairs

SHAPE, PREFIX = (3, 4), 2
GRID = Grid(SHAPE, prefix=PREFIX, suffix=1)
THETA = 10.0 ** -torch.arange(4, dtype=torch.float64)


def draw(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float64)


def angles(channels: int, heads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return omega (H, C, 2), and Θ (H, 12, C) of the tokens on the grid."""
    omega = torch.cat([axial_omega(THETA * (h + 1), channels, 2) for h in range(heads)])
    return omega, reference.angles(Grid(SHAPE).coordinates(), omega)


PAIRS = ["half", "interleaved", (1, 3)]


@parametrize_each("pairs kind heads", PAIRS, ["pairs", "full", "complex", "complex full"], [1, 2])
def test_tables_rotate_by_their_angles(pairs, kind, heads):
    q, k = draw(2, 4, 15, 8), draw(2, 2, 15, 8)
    omega, theta = angles(4, heads)
    expected = rotate(q, k, omega=omega, positions=GRID, pairs=pairs)
    if "full" in kind:
        blocks = ("blocks", pairs) if isinstance(pairs, tuple) else (pairs,)
        theta = join_pairs(theta, theta, *blocks)
    tables = torch.polar(torch.ones_like(theta), theta) if "complex" in kind else (theta.cos(), theta.sin())
    if heads == 1:  # (N, W)
        tables = tables[0] if isinstance(tables, torch.Tensor) else tuple(t[0] for t in tables)
    else:  # (1, H, N, W)
        tables = tables[None] if isinstance(tables, torch.Tensor) else tuple(t[None] for t in tables)
    found = rotate(q, k, tables=tables, prefix=PREFIX, pairs=pairs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    back = rotate(*found, tables=tables, prefix=PREFIX, pairs=pairs, inverse=True)
    for a, x in zip(back, (q, k), strict=True):
        torch.testing.assert_close(a, x)


@parametrize_each("pairs layout", ["half", "interleaved", (1, 3)], ["half", "interleaved"])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_tables_in_another_layout_warn(pairs, layout, kind):
    _, theta = angles(4)
    theta = join_pairs(theta[0], theta[0], layout)
    tables = torch.polar(torch.ones_like(theta), theta) if kind == "complex" else (theta.cos(), theta.sin())
    operator.call_cache.clear()  # only the first call with these sizes warns
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rotate(draw(1, 1, 12, 8), tables=tables, pairs=pairs)
    messages = [(str(w.message), w.filename) for w in caught]
    if pairs == layout:
        assert not messages
    else:
        ((message, file),) = messages
        assert f"pairs={layout!r}" in message
        assert file == __file__


def test_tables_with_different_entries_in_a_pair_do_not_warn(recwarn):
    rotate(draw(1, 1, 12, 8), tables=(draw(12, 8), draw(12, 8)))
    still = torch.ones(12, 8), torch.zeros(12, 8)
    rotate(draw(1, 1, 12, 8), tables=still, pairs="interleaved")
    assert not recwarn


def test_tables_of_the_cosine_map():
    x = draw(2, 4, 15, 8)
    omega, theta = angles(8)
    tables = theta[0].cos(), theta[0].sin()
    options = {"act": "silu", "order": "sin_cos", "norm": Norm("rms", draw(8))}
    torch.testing.assert_close(
        cosine(x, tables=tables, prefix=PREFIX, **options), cosine(x, omega=omega, positions=GRID, **options)
    )
    omega, theta = angles(4)
    part = {"rotary_dim": slice(2, 6), "act": "softmax", "dim": -1, "norm": Norm("layer")}
    torch.testing.assert_close(
        cosine(x, tables=(theta[0].cos(), theta[0].sin()), prefix=PREFIX, **part),
        cosine(x, omega=omega, positions=GRID, **part),
    )


@pytest.mark.parametrize("pairs", PAIRS)
def test_each_channel_uses_its_own_entry(pairs):
    """y_a = a cos_a - b sin_a and y_b = b cos_b + a sin_b. Tokens and channels without entries are unchanged."""
    x, cos, sin = draw(2, 3, 15, 12), draw(2, 12, 8), draw(1, 12, 8).expand(2, -1, -1)
    blocks = ("blocks", pairs) if isinstance(pairs, tuple) else (pairs,)
    a, b = split_pairs(x[:, :, PREFIX:-1, 2:10], *blocks)
    (cos_a, cos_b), (sin_a, sin_b) = (split_pairs(t[:, None], *blocks) for t in (cos, sin))
    expected = x.clone()
    expected[:, :, PREFIX:-1, 2:10] = join_pairs(a * cos_a - b * sin_a, b * cos_b + a * sin_b, *blocks)
    found = rotate(x, tables=(cos, sin), prefix=PREFIX, pairs=pairs, rotary_dim=slice(2, 10))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("map", [cosine, rotate])
def test_gradients_of_tables(map):
    """With plain torch, tables get gradients of any order, even through views and complex numbers."""
    width = 8 if map is cosine else 4
    q, k = draw(2, 4, 5, 8).requires_grad_(), draw(2, 2, 5, 8).requires_grad_()
    cos, sin = (draw(2, 2, 3, width).requires_grad_() for _ in range(2))
    table = torch.complex(draw(3, width), draw(3, width)).requires_grad_()

    def encode(q, k, *tables):
        given = tables if len(tables) == 2 else tables[0]
        return map(q, k, tables=given, prefix=1, act="silu", norm=Norm("rms"))

    assert torch.autograd.gradcheck(encode, (q, k, cos, sin))
    assert torch.autograd.gradcheck(encode, (q, k, table))
    assert torch.autograd.gradgradcheck(encode, (q[:1, :2, :3], k[:1, :2, :3], cos[:1, :, :2], sin[:1, :, :2]))


def test_cache_distinguishes_tables():
    """Calls that differ only in the tables' shape, dtype, prefix or sign are different cache entries."""
    x = draw(1, 2, 12, 8)
    tables = draw(12, 8), draw(12, 8)
    whole = rotate(x, tables=tables)
    assert not torch.equal(rotate(x, tables=tables, inverse=True), whole)
    half = tuple(t[:, :4] for t in tables)
    assert not torch.equal(rotate(x, tables=half), whole)
    found = rotate(x, tables=tuple(t[:10] for t in tables), prefix=2)
    assert torch.equal(found[:, :, :2], x[:, :, :2])
    later = rotate(x, tables=tuple(t[:10] for t in tables), prefix=1)
    assert torch.equal(later[:, :, 11:], x[:, :, 11:])
    assert rotate(x, tables=tuple(t.float() for t in tables)).dtype == x.dtype


X, Q, K = torch.randn(2, 4, 12, 8), torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8)
COS, OMEGA = torch.randn(12, 8), torch.rand(1, 4, 2)
TABLES = COS, COS


BAD = {
    "neither": (TypeError, r"omega: expected frequencies .*, got None; .* or tables=\(cos, sin\)", {}),
    "no positions": (
        TypeError,
        r"positions: expected a Grid, .*, got None; .*, or tables=\(cos, sin\)",
        {"omega": OMEGA},
    ),
    "no omega": (TypeError, r"omega: expected frequencies .*, got None", {"positions": Grid((3, 4))}),
    "omega, too": (ValueError, r"omega: expected None with tables", {"tables": TABLES, "omega": OMEGA}),
    "positions, too": (
        ValueError,
        r"positions: expected None with tables, .* got Grid",
        {"tables": TABLES, "positions": Grid((3, 4))},
    ),
    "a phase": (ValueError, r"phase: expected None with tables", {"tables": TABLES, "phase": torch.rand(1, 4)}),
    "an amplitude": (
        ValueError,
        r"amplitude: expected None with tables, .* got float",
        {"tables": TABLES, "amplitude": 2.0},
    ),
    "a prefix of a grid": (
        ValueError,
        r"prefix: expected 0 without tables, got 1",
        {"omega": OMEGA, "positions": Grid((3, 4)), "prefix": 1},
    ),
    "a prefix below 0": (ValueError, r"prefix: .* got -1", {"tables": TABLES, "prefix": -1}),
    "a prefix that is no number": (ValueError, r"prefix: .* got 1.5", {"tables": TABLES, "prefix": 1.5}),
    "a prefix that is true": (ValueError, r"prefix: .* got True", {"tables": TABLES, "prefix": True}),
    "one real tensor": (TypeError, r"tables: expected a pair .* got one tensor of torch.float32", {"tables": COS}),
    "a tensor of both": (TypeError, r"tables: expected a pair .* got one tensor", {"tables": torch.stack(TABLES)}),
    "three": (TypeError, r"tables: expected a pair .* got 3 values", {"tables": (COS, COS, COS)}),
    "a dict": (TypeError, r"tables: expected a pair .* got dict", {"tables": {"cos": COS, "sin": COS}}),
    "an array": (TypeError, r"tables\[1\] \(sin\): expected a tensor .* got ndarray", {"tables": (COS, COS.numpy())}),
    "no sine": (TypeError, r"tables\[1\] \(sin\): expected a tensor .* got NoneType", {"tables": (COS, None)}),
    "a sparse table": (TypeError, r"tables\[0\] \(cos\): expected a dense tensor", {"tables": (COS.to_sparse(), COS)}),
    "integers": (TypeError, r"tables\[0\] \(cos\): expected float16.* got torch.int64", {"tables": (COS.long(), COS)}),
    "a complex pair": (
        TypeError,
        r"tables\[0\] \(cos\): expected float16.* got torch.complex64",
        {"tables": (COS.cfloat(), COS.cfloat())},
    ),
    "a different device": (
        ValueError,
        r"tables\[1\] \(sin\): expected a tensor on x's device cpu, got meta",
        {"tables": (COS, COS.to("meta"))},
    ),
    "one dimension": (ValueError, r"tables\[0\] \(cos\): expected \(N, W\).* got \(8,\)", {"tables": (COS[0], COS[0])}),
    "five dimensions": (
        ValueError,
        r"tables\[0\] \(cos\): expected \(N, W\)",
        {"tables": (COS[None, None, None],) * 2},
    ),
    "another width": (
        ValueError,
        r"last dimension of 4 \(pairs\) or 8 \(rotated channels\), got shape \(12, 6\)",
        {"tables": (COS[:, :6],) * 2},
    ),
    "the width of another rotary_dim": (
        ValueError,
        r"last dimension of 2 \(pairs\) or 4",
        {"tables": TABLES, "rotary_dim": 4},
    ),
    "another batch": (ValueError, r"with B = 2, got \(3, 12, 8\)", {"tables": (COS.expand(3, 12, 8),) * 2}),
    "other heads": (ValueError, r"a divisor of x's heads \(4\), got 3", {"tables": (COS.expand(1, 3, 12, 8),) * 2}),
    "no heads": (ValueError, r"a divisor of x's heads \(4\), got 0", {"tables": (torch.ones(1, 0, 12, 8),) * 2}),
    "two shapes": (
        ValueError,
        r"tables: expected cos and sin of the same shape, got .*12, 4.* and .*12, 8",
        {"tables": (COS[:, :4], COS)},
    ),
    "too many rows": (
        ValueError,
        r"tables: expected at most 12 tokens \(x's N\), got a prefix of 1 and 12 rows in tables of shape \(12, 8\)",
        {"tables": TABLES, "prefix": 1},
    ),
    "too few rows": (
        ValueError,
        r"tables: expected a row for each of the 12 tokens \(x's N\), got 11 rows .*11, 8.* longer tables.*prefix=",
        {"tables": (COS[:11], COS[:11])},
    ),
    "too few rows of a complex table": (
        ValueError,
        r"each of the 12 tokens .* 1 row",
        {"tables": torch.ones(1, 4) * 1j},
    ),
    "too few rows for packed tokens": (
        ValueError,
        r"each of the 12 tokens .* 5 rows",
        {"x": torch.randn(12, 4, 8), "tables": (COS[:5], COS[:5])},
    ),
    "heads and tokens exchanged": (
        ValueError,
        r"each of the 12 tokens .* 4 rows .*x looks like \(B, N, H, D\), so pass x.transpose\(1, 2\)",
        {"tables": (COS[:4], COS[:4])},
    ),
    "three groups of a norm for a suffix": (
        ValueError,
        r"norm.weight: expected 3 groups of tokens",
        {"tables": (COS[:6], COS[:6]), "prefix": 0, "norm": Norm("rms", torch.ones(2, 1, 8))},
    ),
    "softmax over packed tokens": (
        ValueError,
        r"dim: softmax over the sequence",
        {"x": torch.randn(12, 4, 8), "tables": TABLES, "act": "softmax", "dim": -2},
    ),
}


def test_fewer_rows_than_tokens_need_a_prefix():
    """With prefix=0, tokens after the last row have no position. The call without a prefix is another cache entry."""
    for _ in range(2):
        y = rotate(X, tables=(COS[:6], COS[:6]), prefix=0)
        assert torch.equal(y[:, :, 6:], X[:, :, 6:])
        with pytest.raises(ValueError, match=r"each of the 12 tokens .* 6 rows"):
            rotate(X, tables=(COS[:6], COS[:6]))


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    error, message, given = BAD[name]
    given = dict(given)
    with pytest.raises(error, match=message):
        rotate(given.pop("x", X), **given)


def test_refused_for_q_and_k_and_for_cosine():
    with pytest.raises(ValueError, match=r"a divisor of x's heads \(4, 2\), got 4"):
        rotate(Q, K, tables=(COS.expand(1, 4, 12, 8),) * 2)
    with pytest.raises(ValueError, match=r"last dimension of 8 \(channels\), got shape \(12, 16\)"):
        cosine(X, tables=(torch.ones(12, 16),) * 2)
    with pytest.raises(ValueError, match=r"k: expected q's batch size, number of tokens"):
        rotate(Q, K[:, :, :5], tables=TABLES)


def test_positions_still_work_without_tables():
    """Calls without tables accept omega and positions."""
    packed = pack([Grid((3, 4))])
    expected = rotate(X[0].transpose(0, 1), omega=OMEGA, positions=packed)
    again = rotate(X[:1], omega=OMEGA, positions=Coordinates(packed.positions.coords))
    torch.testing.assert_close(expected.transpose(0, 1)[None], again)


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_outputs_must_not_overlap_tables(rotary_dim):
    """An output that overlaps a table is rejected before anything is written."""
    place = torch.randn(1, 4, 12, 16)
    tables = place[0, 0, :, : rotary_dim or 8], COS[:, : rotary_dim or 8]
    out = place[..., : 8 + (rotary_dim or 8)]
    before = place.clone()
    with pytest.raises(ValueError, match=r"out: expected memory that doesn't overlap tables\[0\] \(cos\)"):
        cosine(X[:1], tables=tables, rotary_dim=rotary_dim, out=out)
    assert torch.equal(place, before)
