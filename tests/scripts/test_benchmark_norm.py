"""scripts.bench norm at tiny sizes on a CPU: implementations, rows, errors."""

import csv
import inspect

import pytest
import torch
from lrpe_md.scripts.bench import norm, report
from lrpe_md.scripts.bench.app import COMMANDS, app, with_smoke
from typer.testing import CliRunner

from lrpe_md.testing import Violation

SMOKE = ("norm", "--device", "cpu", "--smoke")


def run(*args):
    return CliRunner().invoke(app, [*SMOKE, *map(str, args)])


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_workload_and_pass_is_a_row(tmp_path):
    out = tmp_path / "norm.csv"
    done = run("--impl", f"{norm.OURS};{norm.AFTER}", "--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert tuple(rows[0]) == norm.COLUMNS
    assert not [row for row in rows if row["note"]]
    assert all(float(row["ms"]) > 0 and float(row["share"]) > 0 and row["commit"] == "abc" for row in rows)
    found = [(row["workload"], row["over"], row["pass"], row["impl"]) for row in rows]
    assert len(set(found)) == len(found) == len(norm.WORKLOADS) * 2 * len(norm.PASSES) * 2


def test_smoke_writes_elsewhere_and_names_the_real_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(norm, "measure", lambda *args: None)
    done = run("--impl", norm.OURS, "--workload", "wan")
    assert done.exit_code == 0, done.output
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv")] == ["runs/bench-smoke/norm.csv"]
    assert "These numbers mean nothing, because with --smoke sizes are tiny" in done.output
    assert done.output.rstrip().endswith(f" norm --workload wan --impl {norm.OURS}")
    done = run("--impl", norm.OURS, "--workload", "wan", "--out", "scripts/results/benchmark-norm.csv")
    assert (tmp_path / "scripts/results/benchmark-norm.csv").exists()  # on request


def test_every_smoke_has_its_own_folder():
    """Each benchmark with --smoke gets its context from the app, which redirects the CSV."""
    for name, command in COMMANDS.items():
        parameters = inspect.signature(with_smoke(name, command.run)).parameters
        assert ("smoke" in parameters) == ("context" in parameters)


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    wrong = Violation("dweight0", 2.0, 1.0, 2.0, 1.0, norm.WORKLOADS["wan"])
    monkeypatch.setattr(norm, "check", lambda *args: [wrong])
    out = tmp_path / "norm.csv"
    assert run("--impl", norm.OURS, "--workload", "wan", "--over", "head", "--out", out).exit_code == 0
    (row,) = read(out)
    assert row["ms"] == ""
    assert "outside the budget: dweight0" in row["note"]


@pytest.mark.parametrize("over", ["head", "heads"])
@pytest.mark.parametrize("name", norm.WORKLOADS)
def test_implementations_agree(name, over, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f: f)
    case = norm.replace(norm.shrink(norm.WORKLOADS[name]), norm="rms", norm_over=over, dtype=torch.float32)
    inputs = norm.make_inputs(case, torch.device("cpu"))
    args = (inputs, inputs.xs, inputs.omega, inputs.weights)
    expected = norm.encode_fused(*args)
    for impl in (norm.AFTER, norm.COMPILED, norm.PLAIN):
        for a, b in zip(norm.IMPLS[impl](inputs)(*args), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("args", [("--over", "tokens"), ("--workload", "sora"), ("--impl", "SDPA")])
def test_wrong_names_are_refused(args, tmp_path):
    done = run(*args, "--out", tmp_path / "norm.csv")
    assert done.exit_code != 0
    assert args[1] in done.output
    assert not (tmp_path / "norm.csv").exists()


def test_report_states_the_sizes():
    """The text above the tables describes all workloads."""
    text = report.PIVOTS["benchmark-norm.csv"].text
    for name, sizes in {"wan": "21 × 30 × 52", "flux": "64 × 64", "qwen3": "8,192"}.items():
        case = norm.WORKLOADS[name]
        assert " × ".join(f"{n:,}" for n in case.shape) == sizes
        assert name in text
        assert sizes in text
        assert f"{case.heads[0]} " in text
    assert list(norm.WORKLOADS) == ["wan", "flux", "qwen3"]
    assert {(case.batch, case.head_dim) for case in norm.WORKLOADS.values()} == {(1, 128)}
