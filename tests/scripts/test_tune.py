"""The tuner: candidates, results for synthetic times, the printed table and --check."""

import math

import pandas as pd
import pytest
import torch
from lrpe_md.scripts.bench import linear_tune, tune
from lrpe_md.scripts.bench.app import app
from lrpe_md.scripts.bench.linear_tune import LinearPlace
from lrpe_md.scripts.bench.tune import Place, choose_places, large_inputs, search
from parametrizing import slow_except
from typer.testing import CliRunner

from lrpe_md.engine.encode.plan import TILES, Pass, Tile
from lrpe_md.engine.linear import launch as linear_launch
from lrpe_md.engine.linear import plan as linear_plan

ALL = choose_places([])
PLACES = [place for place in ALL if isinstance(place, Place)]
LINEAR = [place for place in ALL if isinstance(place, LinearPlace)]
DOMEGA = next(place for place in PLACES if place.stage is Pass.DOMEGA and place.key[0] == 2)
FORWARD = next(place for place in PLACES if place.stage is Pass.FORWARD and place.key[0] == 2)


def test_every_tile_of_the_table_has_a_place():
    assert [place.tile for place in PLACES] == [tile for row in TILES.values() for tile in row]
    assert {place.stage for place in PLACES} == set(Pass)
    assert {place.act for place in PLACES} == {"none", "silu"}
    assert len({str(place) for place in PLACES}) == len(PLACES)


def test_candidates():
    for place in PLACES:
        found = place.shapes()
        assert 12 <= len(found) == len(set(found))
        assert place.tile in found, "the candidates lack the table's tile"
        fixed = {(tile.max_registers, tile.stages, tile.rows_first) for tile in found}
        assert fixed == {place.tile[3:]}
        others = place.refinements(place.tile)
        assert place.tile not in others
        assert {tile[:3] for tile in others} == {place.tile[:3]}
        assert len(set(others)) == (8 if place.stage is Pass.DOMEGA else 1)
        if place.stage is not Pass.DOMEGA:
            assert {(tile.max_registers, tile.stages) for tile in others} == {(None, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("place", slow_except(PLACES[::9], PLACES), ids=str)
def test_problem_uses_its_tile(place):
    """A problem doesn't use any other tile in the row. This test runs in the interpreter on few tokens."""
    before = dict(TILES)
    cases = place.cases(small=True)
    assert cases.keys() == place.cases().keys()
    assert len(cases) in (2, 4)
    case = next(iter(cases.values()))
    inputs = [large_inputs(case, torch.device("cpu"))]
    with place.in_table(place.tile):
        place.passes(inputs)[0]()
    for width in range(3):
        if width != place.width:
            place.passes(inputs)[0]()  # a cached launch is dropped
            with Place(place.key, width).in_table(place.tile), pytest.raises(TypeError):
                place.passes(inputs)[0]()
    assert before == TILES


def test_cache_is_cleared_between_tiles(monkeypatch):
    inputs = [large_inputs(next(iter(FORWARD.cases(small=True).values())), torch.device("cpu"))]
    with FORWARD.in_table(FORWARD.tile):
        FORWARD.passes(inputs)[0]()
    monkeypatch.setitem(TILES, FORWARD.key, (None, None, None))
    with pytest.raises(TypeError):
        FORWARD.passes(inputs)[0]()


def test_candidates_of_linear_attention():
    for place in LINEAR:
        found = place.shapes()
        assert len(found) == len(set(found)) == 24
        assert place.tile in found, "the candidates lack the table's tile"
        others = place.refinements(place.tile)
        assert {tile[:3] for tile in others} == {place.tile[:3]}
        assert place.tile not in others
        bounds = {tile.max_registers for tile in others}
        assert len(bounds) == len(others) >= 4
        assert place.tile.max_registers not in bounds


def test_every_tile_of_linear_attention_has_a_place():
    tiles = {(stage, width): tile for stage, row in linear_plan.TILES.items() for width, tile in row.items()}
    assert {(place.stage, place.width): place.tile for place in LINEAR} == tiles
    assert len({str(place) for place in ALL}) == len(ALL)


@pytest.mark.parametrize("place", LINEAR, ids=str)
def test_linear_problem_uses_its_tile(place, monkeypatch):
    """Check the requested pass and state size, because the interpreter itself uses another tile."""
    asked = set()

    def choose(stage, state, itemsize, interpreting, aligned):
        asked.add((stage, state))
        return linear_plan.LinearTile(64, 4, 1)

    monkeypatch.setattr(linear_plan, "choose_tile", choose)
    # The requests are recorded without a launch.
    monkeypatch.setattr(linear_launch, "launch_with_fallback", lambda *args: None)
    for full, small in zip(place.cases().values(), place.cases(small=True).values(), strict=True):
        assert (full.map, full.head_dim) == (small.map, small.head_dim)
    case = next(iter(place.cases(small=True).values()))
    before = linear_plan.TILES[place.stage]
    with place.in_table(place.tile._replace(block_n=128)):
        assert place.tile.block_n == 128
        place.passes([place.inputs(case, torch.device("cpu"))])[0]()
    assert (place.stage, place.width) in asked
    assert linear_plan.TILES[place.stage] == before


def test_oversized_tile_is_not_replaced_by_a_smaller_one():
    place = LINEAR[0]
    with place.in_table(place.tile), pytest.raises(linear_tune.TooLarge, match="shared memory"):
        linear_plan.shrink(place.tile)
    assert len(linear_plan.shrink(place.tile)) == 2


def test_printed_table_of_linear_attention_equals_the_table():
    best = LINEAR[5].tile._replace(stages=1)
    found = tune.Found(LINEAR[5], best, 1.0, 1.1)
    (text,) = tune.write_tables([found])
    assert all(len(line) <= 120 for line in text.splitlines())
    scope = {"LinearTile": linear_plan.LinearTile, "LinearPass": linear_plan.LinearPass}
    exec("from __future__ import annotations\n" + text, scope)
    changed = {key: dict(row) for key, row in linear_plan.TILES.items()}
    changed[LINEAR[5].stage][LINEAR[5].width] = best
    assert scope["TILES"] == changed
    assert len(tune.write_tables([found, tune.Found(DOMEGA, DOMEGA.tile, 1.0, 1.0)])) == 2


def made_up(place, fast, slow=1.0, calls=None):
    """Return a function that times tiles. ``fast`` is the fastest. Others are slower the more they differ from it."""

    def measure(tile, problem):
        if calls is not None:
            calls.append((tile, problem))
        different = sum(a != b for a, b in zip(tile, fast, strict=True))
        return (1 + 0.1 * different) * (slow if tile == place.tile else 1) * (2 if "head" in problem else 1)

    return measure


def test_best_tile_is_found():
    fast = DOMEGA.tile._replace(rows=2, elements=256, num_warps=2, max_registers=255, stages=2)
    assert fast != DOMEGA.tile
    told, calls = [], []
    found = search(DOMEGA, made_up(DOMEGA, fast, calls=calls), rounds=2, prepare=told.append)
    assert found.best == fast
    assert found.score == 1
    assert found.ratio == pytest.approx(1 + 0.1 * sum(a != b for a, b in zip(fast, DOMEGA.tile, strict=True)))
    tried = {tile for tile, _ in calls}
    assert {tile for tiles in told for tile in tiles} == tried
    assert all(calls.count((tile, problem)) >= 1 for tile in tried for problem in DOMEGA.cases())
    assert calls.count((fast, next(iter(DOMEGA.cases())))) == 3  # first pass plus two rounds


def test_table_tile_is_kept_if_it_is_best():
    found = search(FORWARD, made_up(FORWARD, FORWARD.tile), rounds=1)
    assert (found.best, found.ratio) == (FORWARD.tile, 1)


def test_the_worst_problem_decides():
    one, two, three = (FORWARD.tile._replace(rows=rows) for rows in (1, 2, 4))
    times = {
        one: {"shared": 1.0, "by head": 3.0},
        two: {"shared": 1.2, "by head": 2.2},
        three: {"shared": 0.5, "by head": math.inf},
    }
    assert list(tune.scores(times).items()) == [(one, 2.0), (two, 2.4), (three, math.inf)]
    del times[three]
    assert tune.scores(times) == {two: pytest.approx(1.2), one: pytest.approx(3 / 2.2)}


def test_failing_tile_is_never_best():
    def measure(tile, problem):
        return math.inf if tile == FORWARD.tile and "head" in problem else 1.0 + tile.rows

    found = search(FORWARD, measure, rounds=1)
    assert found.best.rows == 1
    assert found.ratio == math.inf


@pytest.mark.slow
def test_a_measurement(monkeypatch, tmp_path):
    """Measure the passes of a problem. Inputs are created once, and each time is saved immediately."""
    ran = []

    def clock(fns, rep):
        ran.append([fn() for fn in fns])
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(tune, "cold_times", clock)
    cases = DOMEGA.cases(small=True)
    monkeypatch.setattr(Place, "cases", lambda self: cases)
    session = tune.Session(tmp_path / "a.csv", torch.device("cpu"), 30, math.inf, {"commit": "abc"})
    problem, counted = next(iter(cases)), {}
    other = DOMEGA.tile._replace(rows=1)
    assert [session.measure(DOMEGA, counted, tile, problem) for tile in (DOMEGA.tile, other, other)] == [2.0] * 3
    assert [len(results) for results in ran] == [tune.TURNS] * 3
    assert len({id(inputs) for inputs in session.inputs[problem]}) == tune.TURNS
    assert list(session.inputs) == [problem]
    rows = pd.read_csv(tmp_path / "a.csv")
    assert list(rows["round"]) == [0, 0, 1]
    assert list(rows.rows) == [DOMEGA.tile.rows, 1, 1]
    assert (rows.p50 == 2).all()
    assert (rows["min"] == 1).all()


def test_leaders_are_timed_again():
    """A tile that was fast in two of four measurements is not the best."""
    seen = []

    def measure(tile, problem):
        lucky = tile.rows == 1 and seen.count((tile, problem)) < 2
        seen.append((tile, problem))
        return 0.5 if lucky else 2.0 if tile.rows == 1 else 1.0

    found = search(FORWARD._replace(width=1), measure, rounds=3)
    assert found.best.rows != 1


def test_printed_table_equals_the_table():
    text = tune.write_table(TILES)
    assert all(len(line) <= 120 for line in text.splitlines())
    scope = {"Tile": Tile, "Pass": Pass}
    exec(text, scope)
    assert scope["TILES"] == TILES
    assert tune.write_tile(Tile(2, 256, 1)) == "Tile(2, 256, 1)"
    assert tune.write_tile(Tile(2, 256, 1, 128, 2)) == "Tile(2, 256, 1, 128, 2)"
    assert tune.write_tile(Tile(2, 256, 1, rows_first=True)) == "Tile(2, 256, 1, rows_first=True)"


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Run the command with synthetic times, as if on a GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tune, "gpu_name", lambda device: "made up")

    def run(times, *args):
        monkeypatch.setattr(tune.Session, "time", times)
        options = ["--out", str(tmp_path / "new" / "tune.csv"), "--jobs", "0", "--commit", "abc"]
        result = CliRunner().invoke(app, ["tune", *args, *options], env={"NO_COLOR": "1", "COLUMNS": "400"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result, tmp_path / "new" / "tune.csv"

    return run


def times_of_table(session, place, tile, problem):
    return [1.0 if tile == place.tile else 1.5]


def slow_in_one_place(session, place, tile, problem):
    return [1.1 if place == DOMEGA and tile == place.tile else 1.0]


@pytest.mark.slow
def test_check_passes_if_the_table_is_best(invoke):
    result, out = invoke(times_of_table, "--check")
    assert result.exit_code == 0, result.output
    assert f"0 of {len(ALL)} tiles" in result.output
    rows = pd.read_csv(out)
    assert list(rows) == list(tune.COLUMNS)
    assert set(rows.row) == {place.row for place in ALL}
    assert (rows.commit == "abc").all()
    assert (rows.gpu == "made up").all()
    assert set(rows["round"]) == {0, 1, 2, 3}


@pytest.mark.slow
def test_check_fails_at_a_slow_tile(invoke):
    result, _ = invoke(slow_in_one_place, "--check")
    assert result.exit_code == 1
    assert f"1 of {len(ALL)} tiles" in result.output
    marked = [line for line in result.output.splitlines() if line.rstrip().endswith(" !")]
    assert len(marked) == 1
    assert DOMEGA.row in marked[0]
    assert "1.100" in marked[0]


def test_check_fails_if_time_runs_out(invoke):
    result, _ = invoke(times_of_table, "--check", "--limit", "1e-9")
    assert result.exit_code == 1
    assert f"{len(ALL)} were not timed" in result.output


def test_the_best_tiles_are_printed_and_the_rest_kept(invoke):
    before = dict(TILES)
    result, out = invoke(slow_in_one_place, "--only", str(DOMEGA))
    assert result.exit_code == 0, result.output
    scope = {"Tile": Tile, "Pass": Pass}
    exec("TILES" + result.output.split("TILES", 1)[1].split("}", 1)[0] + "}", scope)
    changed = {key: row for key, row in scope["TILES"].items() if row != TILES[key]}
    assert list(changed) == [DOMEGA.key]
    assert [a != b for a, b in zip(changed[DOMEGA.key], TILES[DOMEGA.key], strict=True)].count(True) == 1
    assert before == TILES
    assert set(pd.read_csv(out).channels) == {tune.WIDTHS[DOMEGA.width]}


def test_failed_tiles_are_saved_with_the_reason(invoke):
    def times(session, place, tile, problem):
        if tile.num_warps == 4:
            raise RuntimeError("out of resource: registers")
        return [1.0 if tile == place.tile else 1.2]

    result, out = invoke(times, "--only", str(FORWARD))
    assert result.exit_code == 0, result.output
    rows = pd.read_csv(out)
    failed = rows[rows.num_warps == 4]
    assert len(failed)
    assert failed.note.str.contains("out of resource").all()
    assert rows[rows.num_warps != 4].note.isna().all()


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--only", "8 cosine"], "2 cosine forward"), ([], "needs the target GPU"), (["--rep", "0"], "--rep")],
)
def test_errors(args, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "tune.csv"
    result = CliRunner().invoke(app, ["tune", *args, "--out", str(out)], env={"NO_COLOR": "1", "COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output
    assert not out.exists()
