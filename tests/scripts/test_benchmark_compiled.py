"""scripts.bench compiled on a CPU, where both variants of lrpe-md run the reference."""

import csv

import torch
from lrpe_md.scripts.bench import compiled
from lrpe_md.scripts.bench.app import app
from torch._dynamo.backends.debugging import aot_eager
from typer.testing import CliRunner


def test_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "compile_alone", aot_eager)  # skips Inductor's C++, which the next test covers
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


def test_each_variant_runs_its_compiled_code(monkeypatch):
    ran, programs, compile_alone = [], [], compiled.compile_alone

    def listen(graph, inputs):
        run, number = compile_alone(graph, inputs), len(programs)
        programs.append(run)

        def run_and_note(*tensors):
            ran.append(number)
            return run(*tensors)

        return run_and_note

    monkeypatch.setattr(compiled, "compile_alone", listen)
    torch.compiler.reset()
    inputs = compiled.make_inputs("rotate", "forward", torch.device("cpu"))
    calls = [compiled.compile_ours("rotate", inputs, "forward")[0] for _ in range(2)]
    ran.clear()
    for call in (*calls, *calls):
        call()
    assert len(programs) == 2
    assert ran == [0, 1, 0, 1]
