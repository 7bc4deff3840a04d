"""The fuzzer: sample runs, a comparison of its formula with loops in long double, and errors that it must detect."""

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from lrpe_md.scripts.fuzz import check, run
from lrpe_md.scripts.fuzz.app import Job, app, run_job
from lrpe_md.scripts.fuzz.configs import LinearConfig, MapConfig, NormConfig, Place, arrange
from lrpe_md.scripts.fuzz.draw import Limits, draw
from typer.testing import CliRunner

from lrpe_md.engine.core.operator import INTERPRETING, call_cache
from lrpe_md.engine.linear import launch as linear_launch
from lrpe_md.reference import ACTIVATIONS

interpreted = pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter (tests/conftest.py sets it)")


@pytest.mark.parametrize("seeds", [range(10_000, 10_010), pytest.param(range(10_010, 10_050), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["linear", "maps"])
def test_the_reference_agrees(kind, seeds):
    for seed in seeds:
        assert_agrees(draw(seed, kind, Limits()), "reference")


@interpreted
@pytest.mark.parametrize("seeds", [range(20_000, 20_004), pytest.param(range(20_004, 20_016), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["linear", "maps"])
def test_the_kernels_agree(kind, seeds):
    for seed in seeds:
        assert_agrees(draw(seed, kind, Limits(16, 16, copies=2)), "triton")


def test_every_activation_is_drawn():
    """Each activation is drawn for the maps, and with each normaliser of linear attention that accepts it."""
    assert {draw(seed, "maps", Limits()).act for seed in range(200)} == set(ACTIVATIONS)
    drawn = {(c.normalizer, c.act) for c in (draw(seed, "linear", Limits()) for seed in range(800))}
    assert drawn == {
        (normalizer, name) for name, entry in ACTIVATIONS.items() for normalizer in ("unrotated", "encoded", "none")
        if entry.never_negative or normalizer != "unrotated"
    }  # fmt: skip


def assert_agrees(config, impl, device="cpu"):
    found = check.check(config, impl, device)
    assert not found.mismatches, f"{config!r}: {'; '.join(map(str, found.mismatches))}"


@pytest.mark.slow
def test_a_configuration_that_hangs_ends_the_process():
    code = """
import time
from lrpe_md.scripts.fuzz import app, check
app.SLOWEST, check.check = 0.5, lambda *arguments: time.sleep(60)
app.run_job(app.Job("linear", range(3, 4), "reference", "cpu", 1), None)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert found.returncode == 1
    assert found.stdout.startswith("seed 3 takes longer than 0.5 s: LinearConfig(")
    assert "in check" in found.stderr or "in <lambda>" in found.stderr


FOUND_ON_GPUS = {
    # ptxas 12.8 loses the address of an operand in a causal product of 64 tokens; see linear_plan.choose_tile.
    "causal": LinearConfig(
        "cosine", dtype="bfloat16", batch=2, head_dim=8, v_dim=48, places=(Place(shape=(3, 2, 4), prefix=2, suffix=2),),
        phase="q", grad_layout="odd", num_tokens=(12, 12), mask="causal", gate="nan", gate_heads=True, state=True,
        return_state=True, cut="two passes",
    ),
    # Operands loaded as bytes count twice in products over 16 tokens; see tiles.load_flags.
    "gate": LinearConfig(dtype="bfloat16", places=(Place(shape=(1,), prefix=2),), gate="bool"),
    "masked": LinearConfig(
        "cosine", dtype="bfloat16", places=(Place(kind="coordinates", shape=(1,), masked=True),), act="softmax", dim=-2
    ),
    "masked by sample": LinearConfig(
        dtype="bfloat16",
        places=(
            Place(shape=(1,)),
            Place(kind="coordinates", shape=(13,), by_sample=True, masked=True, dtype="float64"),
        ),
    ),
    # An inexact softplus shows where a rotated pair cancels.
    "softplus": MapConfig(dtype="bfloat16", head_dim=128, places=(Place(shape=(4, 4, 8)),), act="softplus", form="two"),
}  # fmt: skip


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("seed", [1292, 1294])  # encoded features that cancel in the denominator of a causal mask
def test_denominators_near_zero(seed):
    assert_agrees(draw(seed, "linear", Limits(300, 1500, 20, compiled=True)), "triton")


@interpreted
def test_decays_after_the_state_has_decayed():
    """Gradients of these decays are tiny, far below the rounding errors of earlier tokens' terms."""
    config = LinearConfig(
        None, places=(None,), seed=1188, head_dim=2, v_dim=4, num_tokens=(400, 400), normalizer="none", mask="causal",
        gate="closed", state=True, decay="shared",
    )  # fmt: skip
    assert_agrees(config, "triton")


@interpreted
def test_decays_of_no_tokens():
    place = Place(kind="coordinates", shape=(0,), by_sample=True, masked=True)
    assert_agrees(LinearConfig(batch=2, places=(place,), mask="causal", decay="shared"), "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("config", FOUND_ON_GPUS.values(), ids=list(FOUND_ON_GPUS))
def test_earlier_gpu_failures(config):
    assert_agrees(config, "triton", "cuda")


# --- the formula ----------------------------------------------------------------------------------------------------


def loop_positions(place, where, sample, n):
    """Return the position of a token, and whether it is on the grid. Random tables are used unchanged."""
    index = n + place.start - place.prefix
    cell, left = [], index
    for size in reversed(place.shape):
        left, i = divmod(left, size)
        cell.insert(0, i)
    on_grid = left == 0 <= index
    if place.kind == "grid":
        if place.origin:
            origin = where.positions.origin[sample] if place.by_sample else where.positions.origin
            cell = [i + int(o) for i, o in zip(cell, origin, strict=True)]
        scale, shift = place.scale or (1,) * len(cell), place.shift or (0,) * len(cell)
        return [i * np.longdouble(a) + np.longdouble(b) for i, a, b in zip(cell, scale, shift, strict=True)], on_grid
    table = where.positions if place.kind == "tensor" else where.positions.coords
    if not on_grid:
        return [0] * len(place.shape), False
    if place.masked:
        rotated = where.positions.rotated
        on_grid = bool((rotated[sample] if place.by_sample else rotated)[index])
    return [np.longdouble(x.item()) for x in (table[sample] if place.by_sample else table)[index]], on_grid


def loop_encode(c, t, place, where, sample, head, n, row):
    """Compute x̄ and x̂ of one row, for representative activations without a norm."""
    act = {"none": lambda x: x, "relu": lambda x: max(x, 0), "softplus": lambda x: np.log1p(np.exp(x))}[c.act]
    bar = [act(np.longdouble(x.item())) for x in row]
    if c.map is None:
        return bar, bar
    s, on_grid = loop_positions(place, where, sample, n)
    angles = []
    for channel in range(c.channels):
        omega = t["omega"][head % len(t["omega"]) if len(t["omega"]) > 1 else 0, channel]
        theta = sum(a * np.longdouble(w.item()) for a, w in zip(s, omega, strict=True))
        if "phase_q" in t:
            theta = theta + np.longdouble(t["phase_q"][head if len(t["phase_q"]) > 1 else 0, channel].item())
        gain = np.longdouble(t["amplitude"][channel].item()) if "amplitude" in t and on_grid else np.longdouble(1)
        theta = theta if on_grid else np.longdouble(0)
        angles.append((gain * np.cos(theta), gain * np.sin(theta)))
    if c.map == "cosine":
        return bar, [x * cos for x, (cos, _) in zip(bar, angles, strict=True)] + [
            x * sin for x, (_, sin) in zip(bar, angles, strict=True)
        ]
    hat, half = list(bar), len(angles)
    for p, (cos, sin) in enumerate(angles):
        a, b = (2 * p, 2 * p + 1) if c.pairs == "interleaved" else (p, p + half)
        hat[a], hat[b] = bar[a] * cos - bar[b] * sin, bar[a] * sin + bar[b] * cos
    return bar, hat


def loop_attention(c, inputs):
    """Compute o (B, H, N, D_v), key by key."""
    t, (q_where, k_where) = inputs.tensors, inputs.wheres
    q, k, v = t["q"], t["k"], t["v"]
    ends = np.cumsum([0, *(c.lengths or (k.shape[2],))])
    sequence = np.searchsorted(ends, range(k.shape[2]), side="right")
    o = np.zeros((*q.shape[:3], c.v_dim), dtype=np.longdouble)
    for b, h, n in itertools.product(*map(range, q.shape[:3])):
        own = h // (q.shape[1] // k.shape[1])
        q_bar, q_hat = loop_encode(c, t, c.place_q, q_where, b, own, n, q[b, h, n])
        rows, z = np.zeros(c.v_dim, dtype=np.longdouble), np.longdouble(0)
        for m in range(k.shape[2]):
            beta = np.longdouble(t["gate"][b, own if c.gate_heads else 0, m].item()) if "gate" in t else 1
            seen = c.lengths is None or sequence[n] == sequence[m]
            if c.mask == "causal":
                seen = seen and m <= n
            if not seen or beta == 0:
                continue
            k_bar, k_hat = loop_encode(c, t, c.place_k, k_where, b, own, m, k[b, own, m])
            rows += beta * np.dot(q_hat, k_hat) * np.array([x.item() for x in v[b, own, m]], dtype=np.longdouble)
            z += beta * (np.dot(q_bar, k_bar) if c.normalizer == "unrotated" else np.dot(q_hat, k_hat))
        if c.normalizer == "none":
            o[b, h, n] = rows
        elif c.normalizer == "unrotated":
            o[b, h, n] = rows / max(z, c.eps)
        else:
            o[b, h, n] = rows / z if abs(z) >= c.eps else 0
    return o


LOOPED = [
    LinearConfig(places=(Place(shape=(2, 3), prefix=1, suffix=2),), heads=(2, 1), gate="zeros", mask="causal"),
    LinearConfig("cosine", places=(Place(shape=(2, 2), scale=(2.5, -1.0), origin=True, by_sample=True),
                                   Place("coordinates", (5, 1), 2, by_sample=True, masked=True)), batch=2),
    LinearConfig("rotate", heads=(4, 2), act="softplus", omega_heads=True, phase="shared", amplitude="channels",
                 places=(Place("tensor", (3, 2), dtype="float64", by_sample=True),), pairs="interleaved",
                 lengths=(2, 0, 4)),
    LinearConfig("cosine", act="softplus", normalizer="encoded", heads=(2, 2), lengths=(5,), mask="causal", gate="nan",
                 gate_heads=True, places=(Place(shape=(2, 3), start=1, length=5, shift=(0.5, -2.0)),)),
    LinearConfig(None, places=(None,), num_tokens=(3, 4), act="none", normalizer="none", v_dim=2),
]  # fmt: skip


@pytest.mark.parametrize("config", LOOPED, ids=repr)
def test_the_formula_equals_loops_in_long_double(config):
    config = replace(config, dtype="float64", omega_dtype="float64")
    inputs = run.make_inputs(config, "cpu")
    exact = torch.from_numpy(loop_attention(config, inputs).astype(np.float64))
    torch.testing.assert_close(run.run_formula(config, inputs)["o"].detach(), exact, rtol=1e-12, atol=1e-13)


# --- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "maps"])
def test_configuration_of_a_seed_can_be_pasted(kind):
    names = {each.__name__: each for each in (LinearConfig, MapConfig, NormConfig, Place)}
    for seed in range(40):
        config = draw(seed, kind, Limits())
        assert config == draw(seed, kind, Limits())
        assert eval(repr(config), names) == config
    assert draw(0, kind, Limits()) != draw(1, kind, Limits())


def test_seeds_in_a_row_share_a_variant():
    limits = Limits(300, 1500, repeat=10, compiled=True)
    for kind in ("linear", "maps"):
        configs = [draw(seed, kind, limits) for seed in range(20)]
        of = [(c.map, c.dtype, c.head_dim, c.act, c.pairs, c.norm, c.num_axes) for c in configs]
        assert len(set(of[:10])) == 1
        assert len(set(of)) == 2
        assert len({c.tokens for c in configs}) > 10


def test_every_kind_of_call_is_drawn():
    """A few hundred seeds cover every value of every field."""
    linear, maps = ([draw(seed, kind, Limits()) for seed in range(600)] for kind in ("linear", "maps"))
    assert {(c.map, c.normalizer, c.mask) for c in linear} == set(
        itertools.product(("cosine", "rotate", None), ("unrotated", "encoded", "none"), ("full", "causal", "block"))
    )
    pairs = {(c.place_q.kind, c.place_k.kind) for c in linear if len(c.places) == 2}
    assert pairs == set(itertools.product(("grid", "tensor", "coordinates"), repeat=2))
    assert {c.gate for c in linear} == {"none", "float", "zeros", "nan", "bool", "closed"}
    assert {len(c.lengths) for c in linear if c.lengths} > {1, 2, 3}
    assert any(0 in c.lengths for c in linear if c.lengths)
    assert {c.form for c in maps} == {"one", "two", "qkv", "stacked"}
    assert {c.out for c in maps} == {"none", "slice", "start", "starts", "first"}
    assert any(c.groups > 1 for c in maps)
    assert any(c.samples for c in maps)


@pytest.mark.parametrize("layout", ["dense", "tokens first", "packed", "channels first", "odd"])
def test_inputs_are_surrounded_by_nan(layout):
    values = torch.randn(2, 3, 4, 5)
    found = arrange(values, layout)
    assert found.equal(values)
    assert torch.empty(0).set_(found.untyped_storage()).isnan().any()


# --- errors that it must detect -------------------------------------------------------------------------------------

CROSS = LinearConfig(
    places=(Place(shape=(4, 5), scale=(0.25, 0.25)), Place("tensor", (3, 7))), num_tokens=(20, 21), act="softplus"
)


class Spoil(torch.autograd.Function):
    """Identity whose gradient passes through a function."""

    @staticmethod
    def forward(ctx, x, spoil):
        ctx.spoil = spoil
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.spoil(grad), None


def negate_last(grad):
    grad = grad.clone()
    grad[0, 0, -1, -1] *= -1
    return grad


def leave_last_unwritten(grad):
    out = torch.empty_like(grad)
    out[:, :, :-1] = grad[:, :, :-1]
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("spoil", [negate_last, leave_last_unwritten], ids=lambda f: f.__name__)
def test_wrong_gradient_element_is_detected(spoil, dtype, monkeypatch):
    exact = run.linear_attention
    monkeypatch.setattr(run, "linear_attention", lambda q, k, v, **o: exact(q, Spoil.apply(k, spoil), v, **o))
    found = check.check(replace(CROSS, dtype=dtype), "reference").mismatches
    assert [m.name for m in found] == ["dk"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_position_is_detected(dtype, monkeypatch):
    exact = run.rotate

    def wrong(x, *, positions, **options):
        rows = positions.clone()
        rows[7] = rows[8]
        return exact(x, positions=rows, **options)

    monkeypatch.setattr(run, "rotate", wrong)
    config = MapConfig(dtype=dtype, places=(Place("tensor", (20,)),), heads=(2, 1))
    found = check.check(config, "reference").mismatches
    assert {m.name: m.place[2] for m in found if m.name != "domega"} == {"q": 7, "dq": 7}


def test_swapped_positions_are_detected(monkeypatch):
    exact = run.linear_attention
    monkeypatch.setattr(
        run, "linear_attention", lambda *x, positions, **o: exact(*x, positions=(positions[0], positions[0]), **o)
    )
    config = replace(CROSS, places=(Place(shape=(20,)), Place("tensor", (20,))))
    assert {m.name for m in check.check(config, "reference").mismatches} == {"o", "dq", "dk", "dv", "domega"}


def test_write_outside_the_output_is_detected(monkeypatch):
    exact = run.rotate

    def wrong(x, *, out, out_start, **options):
        found = exact(x, out=out, out_start=out_start, **options)
        out[:, :, int(out_start) - 1] = 0
        return found

    monkeypatch.setattr(run, "rotate", wrong)
    config = MapConfig(places=(Place(shape=(6,)),), out="start", length=4, seed=1)
    assert int(run.make_inputs(config, "cpu").tensors["start"]) > 0
    assert [m.name for m in check.check(config, "reference").mismatches] == ["q"]


def test_scratch_memory_is_nan():
    with check.nan_filled():
        made = (
            torch.empty(3),
            torch.empty_like(torch.ones(3)),
            torch.ones(1).new_empty(2),
            torch.empty_strided((2,), (3,)),
        )
        assert all(t.isnan().all() for t in made)
    assert not torch.are_deterministic_algorithms_enabled()


@interpreted
def test_shared_position_variant_is_detected(monkeypatch):
    """Linear attention must not read q's positions with the variant of k's (issue 39)."""
    config = replace(CROSS, places=(CROSS.place_q, Place(shape=(3, 7))))
    assert not check.check(config).mismatches
    describe = linear_launch.LaunchInputs.describe
    monkeypatch.setattr(
        linear_launch.LaunchInputs, "describe",
        lambda self, stage, side, outs=(), **changes: describe(self, stage, side or self.k_side, outs, **changes),
    )  # fmt: skip
    call_cache.clear()
    assert {m.name for m in check.check(config).mismatches} == {"o", "dq", "dk", "dv", "domega"}
    call_cache.clear()


@pytest.mark.slow
def test_failures_are_reduced_and_reported(monkeypatch):
    exact = run.linear_attention
    monkeypatch.setattr(run, "linear_attention", lambda q, k, v, **o: exact(q, k, -v if o["is_causal"] else v, **o))
    config = LinearConfig(
        "cosine", heads=(4, 2), batch=2, mask="causal", gate="float", places=(Place(shape=(3, 5), prefix=2),),
        normalizer="none",
    )  # fmt: skip
    smaller = check.shrink(config, "reference", "cpu")
    assert (smaller.mask, smaller.heads, smaller.batch, smaller.gate) == ("causal", (1, 1), 1, "none")
    assert smaller.place_q.num_tokens <= 3
    result = run_job(Job("linear", range(12), "reference", "cpu", 1), None)
    configs = {seed: draw(seed, "linear", Limits()) for seed in range(12)}
    wrong = [s for s, c in configs.items() if c.mask == "causal" and c.gate != "closed" and all(c.tokens)]
    assert result.done == 12
    assert [int(report.split()[1][:-1]) for report in result.reports] == wrong
    assert "LinearConfig(" in result.reports[0]
    assert "smaller: LinearConfig(" in result.reports[0]


def test_the_command_needs_time_for_one_configuration():
    refused = CliRunner().invoke(app, ["--impl", "reference", "--device", "cpu", "--seconds", "1e-9"])
    assert refused.exit_code == 2, refused.output
    assert "--seconds" in refused.output


@pytest.mark.slow
def test_the_command(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["--count", "6", "--seed", "5", "--impl", "reference", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "6 configurations, 0 mismatches" in done.output
    refused = CliRunner().invoke(app, ["--only", "everything"])
    assert refused.exit_code == 2
    assert "unknown 'everything'" in refused.output
