"""scripts.bench linear-scaling at tiny sizes on a CPU: rows, and notes in place of numbers."""

import csv

import pytest
import torch
from lrpe_md.scripts.bench import linear_scaling
from lrpe_md.scripts.bench.app import app
from typer.testing import CliRunner

SMOKE = ("linear-scaling", "--device", "cpu", "--smoke", "--steps", "1", "--commit", "abc")
KINDS = [("softmax", "rotate"), ("linear", "cosine"), ("linear", "rotate")]


def run(*args):
    return CliRunner().invoke(app, [*SMOKE, *map(str, args)], env={"NO_COLOR": "1", "COLUMNS": "200"})


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_backbone_and_attention_is_a_row(tmp_path):
    out = tmp_path / "new" / "scaling.csv"
    done = run("--tokens", "16,4", "--out", out)
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert tuple(rows[0]) == linear_scaling.COLUMNS
    found = [(row["backbone"], row["attention"], row["map"], row["tokens"]) for row in rows]
    assert found == [(b, *kind, n) for b in ("vit", "video", "dit", "dit-xl") for kind in KINDS for n in ("4", "16")]
    assert not [row for row in rows if row["note"]]
    for row in rows:
        assert float(row["tokens_per_s"]) == pytest.approx(1e3 * int(row["tokens"]) / float(row["ms"]))
        assert (row["mode"], row["commit"], row["batch"]) == ("eager", "abc", "1")


@pytest.mark.parametrize("name", linear_scaling.BACKBONES)
def test_sample_has_the_recorded_number_of_tokens(name):
    """The blocks receive the number of tokens in the CSV."""
    for tokens in (4, 8, 32):
        workload = linear_scaling.BACKBONES[name](tokens, linear_scaling.SMALL)
        model, seen = workload.build("linear cosine"), []
        model.blocks[0].register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].shape[1]))
        workload.loss(model, *workload.inputs(model, 2, torch.device("cpu"))).backward()
        assert seen[0] - getattr(model, "num_prefix_tokens", 0) == tokens


def test_backbones_have_the_documented_widths():
    heads = {name: linear_scaling.SIZES.get(name, linear_scaling.Sizes()) for name in linear_scaling.BACKBONES}
    assert {name: each.embed_dim // each.num_heads for name, each in heads.items()} == {
        "vit": 64, "video": 64, "dit": 64, "dit-xl": 72
    }  # fmt: skip


def test_the_sizes_are_near_squares():
    for tokens in linear_scaling.TOKENS:
        for axes in (2, 3):
            shape = linear_scaling.near_square(tokens, axes)
            assert len(shape) == axes
            assert torch.tensor(shape).prod() == tokens
            assert max(shape) <= 2 * min(shape)


def test_out_of_memory_retries_with_checkpointing(tmp_path, monkeypatch):
    tried = []

    def step(self):
        tried.append((self.workload.tokens, self.workload.recomputed))
        if self.workload.tokens > 16 or (self.workload.tokens == 16 and not self.workload.recomputed):
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(())

    monkeypatch.setattr(linear_scaling.Trainee, "step", step)
    out = tmp_path / "scaling.csv"
    run("--backbones", "vit", "--attention", "linear cosine", "--tokens", "4,16,64", "--out", out)
    rows = read(out)
    assert [row["note"] for row in rows] == ["", linear_scaling.RECOMPUTED, linear_scaling.NO_ROOM]
    assert [bool(row["ms"]) for row in rows] == [True, True, False]
    assert list(dict.fromkeys(tried)) == [(4, False), (16, False), (16, True), (64, True)]


@pytest.mark.parametrize("name", linear_scaling.BACKBONES)
def test_checkpointing_gives_the_same_gradients(name):
    grads = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        workload = linear_scaling.BACKBONES[name](16, linear_scaling.SMALL, recomputed)
        model = workload.build("softmax rotate").train()
        workload.loss(model, *workload.inputs(model, 1, torch.device("cpu"))).backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads)


def test_slow_rows_are_left_out(tmp_path, monkeypatch):
    """The expected time grows quadratically for softmax attention, and linearly for linear attention."""
    monkeypatch.setattr(linear_scaling, "measure_steps", lambda run, trainee, expected: (1000.0, 0.0))
    out = tmp_path / "scaling.csv"
    done = run("--backbones", "vit", "--tokens", "4,16", "--cap", "10", "--out", out)
    assert done.exit_code == 0, done.output
    notes = {(row["attention"], row["map"], row["tokens"]): row["note"] for row in read(out)}
    assert "left out: a step is expected to take 16 s" in notes["softmax", "rotate", "16"]
    assert notes["linear", "cosine", "16"] == notes["softmax", "rotate", "4"] == ""


def test_slow_step_is_timed_once(monkeypatch):
    calls = []
    run = linear_scaling.Run(None, torch.device("cpu"), "eager", "auto", 5, 10.0, {}, None)
    monkeypatch.setattr(linear_scaling, "peak_bytes", lambda trainee: calls.append("peak"))

    class Slow:
        def step(self):
            calls.append("step")

    monkeypatch.setattr(linear_scaling.time, "perf_counter", iter([0.0, 5.0]).__next__)
    ms, _ = linear_scaling.measure_steps(run, Slow(), expected=4.0)
    assert (ms, calls) == (5000.0, ["peak"])


def test_rows_are_added_and_the_limit_holds(tmp_path):
    out = tmp_path / "scaling.csv"
    options = ("--backbones", "dit", "--tokens", "4", "--attention", "linear rotate", "--out", out)
    run(*options)
    run(*options, "--append")
    assert len(read(out)) == 2
    done = run(*options, "--append", "--limit", "1e-9")
    assert "stopped after 1e-09 s" in done.output
    assert len(read(out)) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [(("--tokens", "100"), "powers of 2"), (("--backbones", "vti"), "vti"), (("--backend", "fast"), "fast")],
)
def test_wrong_options_are_refused(args, message, tmp_path):
    done = run(*args, "--out", tmp_path / "scaling.csv")
    assert done.exit_code != 0
    assert message in done.output
    assert not (tmp_path / "scaling.csv").exists()
