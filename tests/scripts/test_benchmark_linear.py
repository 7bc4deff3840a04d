"""scripts.bench linear at tiny sizes on a CPU: every implementation, the rows, and what is refused."""

import csv

import pytest
from lrpe_md.scripts.bench import linear
from lrpe_md.scripts.bench.app import app
from typer.testing import CliRunner

from lrpe_md.testing import Violation

SMOKE = ("linear", "--device", "cpu", "--smoke")


def run(*args):
    return CliRunner().invoke(app, [*SMOKE, *map(str, args)])


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_implementation_is_a_row(tmp_path):
    out = tmp_path / "linear.csv"
    done = run("--impl", "lrpe-md;SDPA;unfused", "--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert tuple(rows[0]) == linear.COLUMNS
    assert not [row for row in rows if row["note"]]
    assert all(float(row["ms"]) > 0 and float(row["share"]) > 0 and row["commit"] == "abc" for row in rows)
    found = {(row["workload"], row["map"], row["pass"]) for row in rows if row["impl"] == "lrpe-md"}
    mapped = {(w, m, p) for w in linear.WORKLOADS for m in ("cosine", "rotate") for p in linear.PASSES}
    assert found == mapped | {(w, "none", p) for w in linear.WORKLOADS for p in ("forward", "backward")}
    assert {row["mask"] for row in rows if row["impl"] == "unfused"} == {"full"}
    assert {row["map"] for row in rows if row["impl"] == "SDPA"} == {"none"}


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    wrong = Violation("dq", 2.0, 1.0, 2.0, 1.0, linear.WORKLOADS["vit224"])
    monkeypatch.setattr(linear, "check_linear", lambda *args: [wrong])
    out = tmp_path / "linear.csv"
    assert run("--impl", "lrpe-md", "--workload", "vit224", "--map", "cosine", "--out", out).exit_code == 0
    (row,) = read(out)
    assert row["ms"] == ""
    assert "outside the budget: dq" in row["note"]


def test_the_unfused_is_the_same():
    """What is timed beside ours computes what ours does."""
    for name in ("cosine", "rotate", None):
        case = linear.replace(linear.shrink(linear.WORKLOADS["img64"]), map=name, dtype=linear.torch.float32)
        inputs = linear.make_inputs(case, linear.torch.device("cpu"))
        args = (inputs, inputs.q, inputs.k, inputs.v, inputs.omega)
        linear.torch.testing.assert_close(linear.attend_unfused(*args), linear.attend_fused(*args))


@pytest.mark.parametrize("args", [("--map", "cosin"), ("--workload", "img"), ("--impl", "sdpa")])
def test_wrong_names_are_refused(args, tmp_path):
    done = run(*args, "--out", tmp_path / "linear.csv")
    assert done.exit_code != 0
    assert args[1] in done.output
    assert not (tmp_path / "linear.csv").exists()
