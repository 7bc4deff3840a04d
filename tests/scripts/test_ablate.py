"""The ablation on a few images: output files, resuming after interruptions and kills, errors and determinism."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lrpe_md.scripts.ablate import app as ablate
from lrpe_md.scripts.ablate.tasks import TASKS
from lrpe_md.scripts.train.encodings import IMAGES
from lrpe_md.scripts.train.tasks import digits
from lrpe_md.scripts.train.tasks.digits import DigitsTraining
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from train_commands import die_after
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
FEW = ["--set", "steps=2", "--set", "limit=64", "--set", "warmup=1", "--seeds", "2", "--attention", "softmax"]
ONE = ["--workers", "1"]
SMALL = ["run", "digits", *FEW, "--device", "cpu", "-e", "none", "-e", "cosine", *ONE]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(ablate.app, list(args), env={"COLUMNS": "400", "NO_COLOR": "1"})


def config(out: Path, **changes: Any) -> DigitsTraining:
    same: dict[str, Any] = {"device": "cpu", "tensorboard": False, "progress": False}
    return DigitsTraining(out=out, **{**same, **changes})


@pytest.fixture
def started_trainings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record (encoding, seed) of each run that starts."""
    calls, train = [], ablate.train

    def counted(comparison, file, job, *more) -> dict:
        calls.append((job[0], job[2]))
        return train(comparison, file, job, *more)

    monkeypatch.setattr(ablate, "train", counted)
    return calls


def test_a_run_from_end_to_end_and_again(tmp_path: Path, started_trainings: list) -> None:
    out = tmp_path / "new" / "folder"
    first = invoke(*SMALL, "--out", str(out))
    assert first.exit_code == 0, first.output
    assert len(started_trainings) == 4

    results = pd.read_csv(out / "results.csv")
    sizes = len(digits.SOURCES["digits"].sizes)
    assert len(results) == 2 * 2 * 2 * sizes  # encodings, seeds, kinds of positions, sizes
    assert {"encoding", "attention", "seed", "size", "value", "params", "train_seconds"} <= set(results)
    assert results.value.between(0, 100).all()
    table = (out / "table.md").read_text()
    assert table in first.output
    rows = [line for line in table.splitlines() if line.startswith(("| none", "| cosine"))]
    assert len(rows) == 4 + 2  # and the table of runs; there is no rotate to compare with
    rows = rows[:4]
    assert all(row.count("±") == sizes for row in rows)
    assert str(out / "table.md") in first.output
    for name in ("accuracy.png", "resolution.png"):
        assert 5_000 < (out / name).stat().st_size < 300_000
        assert str(out / name) in first.output
    config = (out / "config.json").read_text()
    assert json.loads(config)["environments"][0]["torch"] == version("torch")
    assert str(Path.home()) not in config
    assert os.uname().nodename not in config

    # If a result is lost and a killed process has left an incomplete file, only that run is repeated. The result is the
    # same.
    lost = out / "runs" / "cosine-softmax-1.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    lost.with_name(lost.name + ".123.part").write_text('{"encoding": "cos')
    started_trainings.clear()
    assert invoke(*SMALL, "--out", str(out)).exit_code == 0
    assert started_trainings == [("cosine", 1)]
    after = json.loads(lost.read_text())
    assert {**before, "train_seconds": 0, "step_ms": 0} == {**after, "train_seconds": 0, "step_ms": 0}


@pytest.mark.parametrize("change", ["steps=3", "limit=65"])
def test_settings_must_match_the_folder(tmp_path: Path, change: str, monkeypatch) -> None:
    monkeypatch.setattr(ablate, "train_all", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert invoke(*SMALL, "--out", str(tmp_path)).exit_code == 130
    refused = invoke(*SMALL, "--set", change, "--out", str(tmp_path))
    assert refused.exit_code == 2
    assert "different settings" in refused.output
    assert change.split("=")[0] in refused.output
    assert "pass the same settings" in " ".join(refused.output.replace("│", " ").split())


def test_a_comparison_can_be_extended(tmp_path: Path, started_trainings: list) -> None:
    """Encodings, kinds of attention and seeds are added to those of the folder. Its runs are not repeated."""
    run = ["run", "digits", "--smoke", "--device", "cpu", "--workers", "1", "--out", str(tmp_path)]
    softmax = [*run, "--attention", "softmax"]
    for more, started in (
        ([*softmax, "-e", "none", "--seeds", "1"], [("none", 0)]),
        ([*softmax, "-e", "rotate", "-e", "none", "--seeds", "2"], [
            ("rotate", 0), ("rotate", 1), ("none", 1),
        ]),
        ([*run, "--attention", "linear", "-e", "none", "--seeds", "1"], [("none", 0)]),
    ):  # fmt: skip
        done = invoke(*more)
        assert done.exit_code == 0, done.output
        assert sorted(started_trainings) == sorted(started)
        started_trainings.clear()
    settings = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert settings["encodings"] == {"softmax": ["none", "rotate"], "linear": ["none"]}
    assert settings["seeds"] == 2
    assert len(pd.read_csv(tmp_path / "results.csv").drop_duplicates(["encoding", "attention", "seed"])) == 5


def test_unrelated_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    refused = invoke(*SMALL, "--out", str(tmp_path))
    assert refused.exit_code == 2
    assert "choose an empty or new folder" in refused.output


def test_interrupt_keeps_finished_runs_and_explains_resuming(
    tmp_path: Path, monkeypatch, started_trainings: list
) -> None:
    counted = ablate.train

    def interrupted(*args) -> dict:
        if len(started_trainings) == 2:
            raise KeyboardInterrupt
        return counted(*args)

    monkeypatch.setattr(ablate, "train", interrupted)
    monkeypatch.chdir(tmp_path)
    stopped = invoke(*SMALL)
    assert stopped.exit_code == 130
    (out,) = tmp_path.glob("runs/ablate-*")
    assert f"--out runs/{out.name}" in stopped.output
    assert len(list(out.glob("runs/*.json"))) == 2
    monkeypatch.setattr(ablate, "train", counted)
    assert invoke(*SMALL, "--out", str(out)).exit_code == 0
    assert len(started_trainings) == 4


def test_sigterm_stops_like_ctrl_c(tmp_path: Path, monkeypatch) -> None:
    def terminated(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    monkeypatch.setattr(ablate, "train_all", terminated)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        stopped = invoke(*SMALL, "--out", str(tmp_path))
        assert stopped.exit_code == 128 + signal.SIGTERM, stopped.output
        assert "run the same command with --out" in stopped.output
        os.kill(os.getpid(), signal.SIGTERM)  # the earlier handler is back
    finally:
        signal.signal(signal.SIGTERM, before)


def test_kill_9(tmp_path: Path, started_trainings: list) -> None:
    command = [sys.executable, "-m", "scripts.ablate", *SMALL, "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {file: file.read_text() for file in tmp_path.glob("runs/*.json")}
    assert finished
    assert all(json.loads(text)["accuracy"] for text in finished.values())
    assert invoke(*SMALL, "--out", str(tmp_path)).exit_code == 0
    assert len(started_trainings) == 4 - len(finished)
    assert all(file.read_text() == text for file, text in finished.items())


def test_parallel_trainings_equal_sequential_ones(tmp_path: Path) -> None:
    for workers in ("1", "2"):
        done = invoke(*SMALL[: -len(ONE)], "--workers", workers, "--out", str(tmp_path / workers))
        assert done.exit_code == 0, done.output
    one, two = (pd.read_csv(tmp_path / workers / "results.csv") for workers in ("1", "2"))
    kept = [name for name in one if name not in ("train_seconds", "step_ms")]
    pd.testing.assert_frame_equal(one[kept], two[kept])


def test_help_and_unknown_names(tmp_path: Path) -> None:
    shown = invoke("run", "--help")
    assert shown.exit_code == 0
    for option in ("--out", "--set", "--encoding", "--seeds", "--full", "--device", "--workers"):
        assert option in shown.output
    for given, known in (
        (("-e", "nonsense"), "cosine-softplus"), (("nonsense",), "digits"), (("--attention", "nonsense"), "linear"),
    ):  # fmt: skip
        refused = invoke("run", "digits", *given, "--out", str(tmp_path / "out"))
        assert refused.exit_code == 2
        assert "'nonsense'" in refused.output
        assert known in refused.output
    assert "--full: not available for image" in invoke("run", "image", str(tmp_path), "--full").output
    assert "got none" in invoke("run", "image").output
    assert not (tmp_path / "out").exists()


def test_the_longer_comparison() -> None:
    task = TASKS["digits"]
    found = ablate.select_encodings(task, None, None, True)
    assert {kind: len(names) for kind, names in found.items()} == {"softmax": 15, "linear": 15}
    assert ablate.select_encodings(task, ["none"], ["linear"], True) == {"linear": ["none"]}
    assert ablate.training_fields(task, None, "cpu", True, False) == {"steps": 2100}
    assert ablate.training_fields(task, ["steps=7"], "cpu", True, False) == {"steps": 7}


def test_16_bits_and_compilation_are_for_gpus() -> None:
    found = {device: ablate.training_fields(TASKS["image"], None, device, False, False) for device in ("cpu", "cuda")}
    assert found == {"cpu": {}, "cuda": {"precision": "bf16", "compile": True}}


def test_same_seed_same_result_and_loss_goes_down(tmp_path: Path) -> None:
    few = {"limit": 256, "steps": 64, "batch": 32, "warmup": 16, "log_every": 8, "encoding": "cosine"}
    first, again, other = (
        digits.run(config(tmp_path / name, seed=seed, **few)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    losses = {name: [row["loss"] for row in torch.load(tmp_path / name / "checkpoint.pt")["history"]] for name in "abc"}
    assert {**first, "train_seconds": 0, "step_ms": 0} == {**again, "train_seconds": 0, "step_ms": 0}
    assert losses["a"] == losses["b"] != losses["c"]
    assert first["loss"] != other["loss"]
    assert losses["a"][-1] < 0.9 * losses["a"][0]
    extrapolated, rescaled = (list(first["accuracy"][name].values()) for name in ("extrapolated", "rescaled"))
    assert extrapolated[0] == rescaled[0]
    assert extrapolated[1:] != rescaled[1:]


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        "limit": 70,
        "steps": 7,
        "batch": 20,
        "warmup": 2,
        "save_every": 2,
        "log_every": 3,
        "encoding": "rotate-mixed",
    }
    whole, batch = digits.run(config(tmp_path / "whole", **few)), digits.batch
    expected = torch.load(tmp_path / "whole" / "checkpoint.pt")
    for kill in range(7):
        monkeypatch.setattr(digits, "batch", die_after(kill, batch, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            digits.run(config(tmp_path / f"{kill}", **few))
        monkeypatch.setattr(digits, "batch", batch)
        torch.manual_seed(kill)
        assert digits.run(config(tmp_path / f"{kill}", **few))["accuracy"] == whole["accuracy"]
        found = torch.load(tmp_path / f"{kill}" / "checkpoint.pt")
        assert found["history"] == expected["history"]
        assert all(torch.equal(value, found["model"][name]) for name, value in expected["model"].items())


def test_every_epoch_is_a_permutation() -> None:
    steps = [next(each)[0] for each in [digits.permute(10, 4, 3)] for _ in range(6)]
    for epoch in range(3):
        assert len({*steps[2 * epoch].tolist(), *steps[2 * epoch + 1].tolist()}) == 8
    for start in range(6):
        assert next(digits.permute(10, 4, 3, start))[0].tolist() == steps[start].tolist()


@pytest.mark.parametrize("attention", IMAGES.attentions)
@pytest.mark.parametrize("encoding", IMAGES.encodings)
def test_only_none_is_blind_to_positions(encoding: str, attention: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = digits.build(config(tmp_path, encoding=encoding, attention=attention)).eval().double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(2, 16, 2, 2)[:, torch.randperm(16)]
    shuffled = patches.reshape(2, 4, 4, 2, 2).transpose(2, 3).reshape(2, 1, 8, 8)
    with torch.no_grad():
        change = (model(x) - model(shuffled)).abs().max()
    assert (change < 1e-13) == (encoding == "none"), change


def test_frequencies_are_not_decayed(tmp_path: Path) -> None:
    settings = config(tmp_path, encoding="cosine-mixed-learnable")
    model = digits.build(settings)
    groups = create_optimizer_v2(
        model, opt=settings.opt, lr=settings.lr, weight_decay=settings.weight_decay
    ).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "blocks.0.attn.qkv.weight" in names
    assert not any(name.startswith("encoding") for name in names)
