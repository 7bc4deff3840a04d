"""The ablation end to end on a few images: files, resuming after every kind of stop, refusals, determinism."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import pytest
import torch
from lrpe_md.scripts.ablate import digits as ablate
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
SETTINGS = ablate.Settings(
    data="digits", encodings={**ablate.ENCODINGS, **ablate.MORE_ENCODINGS}, attentions=ablate.ATTENTIONS, seeds=1,
    epochs=2, limit=64, device="cpu", precision="no", vit=ablate.VIT, optimizer=ablate.OPTIMIZER, batch=ablate.BATCH,
)  # fmt: skip
FEW = ["--epochs", "2", "--limit", "64", "--seeds", "2", "--attention", "softmax"]
SMALL = [*FEW, "--device", "cpu", "--workers", "1", "-e", "none", "-e", "cosine"]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(ablate.app, list(args), env={"COLUMNS": "400", "NO_COLOR": "1"})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(encoding, seed) of each training that starts."""
    calls, train = [], ablate.train

    def counted(encoding: str, attention: str, seed: int, settings: ablate.Settings) -> dict:
        calls.append((encoding, seed))
        return train(encoding, attention, seed, settings)

    monkeypatch.setattr(ablate, "train", counted)
    return calls


def test_a_run_from_end_to_end_and_again(tmp_path: Path, trained: list) -> None:
    out = tmp_path / "new" / "folder"
    first = invoke(*SMALL, "--out", str(out))
    assert first.exit_code == 0, first.output
    assert len(trained) == 4

    results = pd.read_csv(out / "results.csv")
    sizes = len(ablate.SOURCES["digits"].sizes)
    assert len(results) == 2 * 2 * 2 * sizes  # encodings, seeds, ways to place, sizes
    assert {"encoding", "attention", "seed", "height", "width", "accuracy", "params", "train_seconds"} <= set(results)
    assert results.accuracy.between(0, 100).all()
    table = (out / "table.md").read_text()
    assert table in first.output
    rows = [line for line in table.splitlines() if line.startswith(("| none", "| cosine"))]
    assert len(rows) == 4
    assert all(row.count("±") == sizes for row in rows)
    for name in ("accuracy.png", "resolution.png"):
        assert 5_000 < (out / name).stat().st_size < 300_000
        assert str(out / name) in first.output
    config = (out / "config.json").read_text()
    assert json.loads(config)["environments"][0]["torch"] == version("torch")
    assert str(Path.home()) not in config
    assert os.uname().nodename not in config

    # One run lost, the half-written file of a killed process left behind: that run alone is repeated, to the same end.
    lost = out / "runs" / "cosine-softmax-1.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    lost.with_name(lost.name + ".123.part").write_text('{"encoding": "cos')
    trained.clear()
    assert invoke(*SMALL, "--out", str(out)).exit_code == 0
    assert trained == [("cosine", 1)]
    after = json.loads(lost.read_text())
    assert {**before, "train_seconds": 0} == {**after, "train_seconds": 0}


@pytest.mark.parametrize("change", [("--epochs", "3"), ("--limit", "65"), ("-e", "rotate"), ("--seeds", "3")])
def test_other_settings_than_the_folders_are_refused(tmp_path: Path, change: tuple[str, str], monkeypatch) -> None:
    monkeypatch.setattr(ablate, "run_all", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert invoke(*SMALL, "--out", str(tmp_path)).exit_code == 130
    refused = invoke(*SMALL, *change, "--out", str(tmp_path))
    assert refused.exit_code == 2
    assert "other settings" in refused.output
    assert {"-e": "encodings"}.get(change[0], change[0].strip("-")) in refused.output


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    refused = invoke(*SMALL, "--out", str(tmp_path))
    assert refused.exit_code == 2
    assert "not a folder of this script" in refused.output


def test_interrupt_keeps_finished_runs_and_says_how_to_go_on(tmp_path: Path, monkeypatch, trained: list) -> None:
    save = ablate.run_and_save

    def interrupted(file: Path, *args) -> dict:
        if len(trained) == 2:
            raise KeyboardInterrupt
        return save(file, *args)

    monkeypatch.setattr(ablate, "run_and_save", interrupted)
    monkeypatch.chdir(tmp_path)
    stopped = invoke(*SMALL)
    assert stopped.exit_code == 130
    (out,) = tmp_path.glob("runs/ablate-*")
    assert f"--out runs/{out.name}" in stopped.output
    assert len(list(out.glob("runs/*.json"))) == 2
    monkeypatch.setattr(ablate, "run_and_save", save)
    assert invoke(*SMALL, "--out", str(out)).exit_code == 0
    assert len(trained) == 4


def test_kill_9(tmp_path: Path, trained: list) -> None:
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
    assert len(trained) == 4 - len(finished)
    assert all(file.read_text() == text for file, text in finished.items())


def test_help_and_unknown_names() -> None:
    shown = invoke("--help")
    assert shown.exit_code == 0
    for option in ("--out", "--data", "--encoding", "--seeds", "--full", "--device", "--precision"):
        assert option in shown.output
    for option, known in (("-e", "cosine-softplus"), ("--data", "digits"), ("--attention", "linear")):
        refused = invoke(option, "nonsense")
        assert refused.exit_code == 2
        assert "'nonsense'" in refused.output
        assert known in refused.output


def test_same_seed_same_result_and_loss_goes_down() -> None:
    settings = replace(SETTINGS, limit=256, epochs=8, batch=32)
    first, again, other = (ablate.train("cosine", "softmax", seed, settings) for seed in (0, 0, 1))
    assert {**first, "train_seconds": 0} == {**again, "train_seconds": 0}
    assert first["loss"] != other["loss"]
    assert first["loss"][-1] < 0.9 * first["loss"][0]
    assert first["accuracy"]["extrapolated"][0] == first["accuracy"]["rescaled"][0]
    assert first["accuracy"]["extrapolated"][1:] != first["accuracy"]["rescaled"][1:]


@pytest.mark.parametrize("attention", ablate.ATTENTIONS)
@pytest.mark.parametrize("encoding", SETTINGS.encodings)
def test_only_none_is_blind_to_positions(encoding: str, attention: str) -> None:
    torch.manual_seed(0)
    model = ablate.build(encoding, attention, SETTINGS).eval().double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(2, 16, 2, 2)[:, torch.randperm(16)]
    shuffled = patches.reshape(2, 4, 4, 2, 2).transpose(2, 3).reshape(2, 1, 8, 8)
    with torch.no_grad():
        change = (model(x) - model(shuffled)).abs().max()
    assert (change < 1e-13) == (encoding == "none"), change


def test_frequencies_are_not_decayed() -> None:
    model = ablate.build("cosine-mixed-learnable", "softmax", SETTINGS)
    groups = create_optimizer_v2(model, **ablate.OPTIMIZER).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "blocks.0.attn.qkv.weight" in names
    assert not any(name.startswith("encoding") for name in names)
