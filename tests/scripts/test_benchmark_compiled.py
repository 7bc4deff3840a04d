"""scripts.bench compiled on a CPU, where both ways of ours are the operator's reference."""

import csv

from lrpe_md.scripts.bench import compiled
from lrpe_md.scripts.bench.app import app
from typer.testing import CliRunner


def test_rows(tmp_path):
    out = tmp_path / "compiled.csv"
    args = ["compiled", "--device", "cpu", "--smoke", "--map", "rotate", "--out", str(out), "--commit", "abc"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == compiled.COLUMNS
    found = {(row["map"], row["pass"], row["impl"]) for row in rows}
    assert found == {("rotate", p, i) for p in compiled.PASSES for i in (compiled.OURS, compiled.OPERATOR)}
    assert all(float(row["p50"]) > 0 and row["commit"] == "abc" for row in rows)


def test_times_of_a_cpu_are_refused():
    done = CliRunner().invoke(app, ["compiled", "--device", "cpu"])
    assert done.exit_code != 0
    assert "--smoke" in done.output
