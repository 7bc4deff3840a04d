"""scripts.bench tables at tiny sizes on a CPU: rows, forms, failures."""

import csv

import pytest
import torch
from lrpe_md.scripts.bench import tables
from lrpe_md.scripts.bench.app import app
from lrpe_md.scripts.common.cases import make_inputs
from typer.testing import CliRunner

from lrpe_md.testing import Violation

SMOKE = ("tables", "--device", "cpu", "--smoke")


def run(*args):
    return CliRunner().invoke(app, [*SMOKE, *map(str, args)])


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_workload_form_and_pass_is_a_row(tmp_path):
    out = tmp_path / "tables.csv"
    done = run("--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert tuple(rows[0]) == tables.COLUMNS
    assert not [row for row in rows if row["note"]]
    assert all(float(row["ms"]) > 0 and float(row["share"]) > 0 and row["commit"] == "abc" for row in rows)
    found = [(row["workload"], row["form"], row["pass"]) for row in rows]
    assert len(set(found)) == len(found) == len(tables.WORKLOADS) * len(tables.FORMS) * len(tables.PASSES)
    angles = {(row["workload"], row["pass"]): float(row["ms"]) for row in rows if row["form"] == tables.ANGLES}
    for row in rows:
        assert float(row["speed"]) == pytest.approx(angles[row["workload"], row["pass"]] / float(row["ms"]))


@pytest.mark.parametrize("form", tables.FORMS)
def test_forms(form):
    """Each form has the tables that its name describes."""
    inputs = make_inputs(tables.make_case(tables.shrink(tables.WORKLOADS["vit224"]), form))
    kind, _, detail = form.partition(", ")
    assert len(inputs.tables) == {"angles": 0, "complex": 1}.get(kind, 2)
    for t in inputs.tables:
        assert t.shape[-1] == (16 if kind == "full" else 8)
        assert t.is_complex() == (kind == "complex")
        assert (t.ndim > 2) == (detail in ("by sample", "expanded"))
        assert t.real.dtype == getattr(torch, detail, torch.float32)


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    wrong = Violation("dx0", 2.0, 1.0, 2.0, 1.0, tables.WORKLOADS["wan"])
    monkeypatch.setattr(tables, "check", lambda *args, **kwargs: [wrong])
    out = tmp_path / "tables.csv"
    assert run("--form", "full, float32", "--workload", "wan", "--out", out).exit_code == 1
    for row in read(out):
        assert row["ms"] == ""
        assert "outside the budget: dx0" in row["note"]


def test_fails_if_tables_are_slow(tmp_path, monkeypatch):
    times = iter([1.0, 0.95, 1.0, 1.0, 1.01])  # copy, both passes with angles, both with tables
    monkeypatch.setattr(tables, "time_calls", lambda *args: next(times))
    monkeypatch.setattr(tables.Run, "measure_copy", lambda run, size: next(times))
    args = ("--form", "full, float32", "--workload", "img64", "--out", tmp_path / "tables.csv")
    done = run(*args, "--at-least", 0.96)
    assert done.exit_code == 1
    assert "0.950  img64, full, float32, forward" in done.output
    times = iter([1.0, 0.95, 1.0, 1.0, 1.01])
    assert run(*args, "--at-least", 0.94).exit_code == 0


@pytest.mark.parametrize("args", [("--workload", "sora"), ("--form", "half")])
def test_wrong_names_are_refused(args, tmp_path):
    done = run(*args, "--out", tmp_path / "tables.csv")
    assert done.exit_code != 0
    assert args[1] in done.output
    assert not (tmp_path / "tables.csv").exists()
