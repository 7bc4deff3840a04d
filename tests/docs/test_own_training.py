"""The program in docs/your-own-training.md trains, resumes and learns."""

import json
import sys
from pathlib import Path

import pytest
import torch
from test_pages import blocks
from typer.testing import CliRunner

PAGE = Path(__file__).parents[2] / "docs" / "your-own-training.md"
COMMAND = ["--steps", "60", "--batch", "32", "--warmup", "5", "--lr", "2e-3", "--ema", "0.9", "--device", "cpu"]


@pytest.fixture
def app(tmp_path, monkeypatch):
    """Import the program from a separate file, like a user's."""
    (program,) = blocks(PAGE)
    (tmp_path / "train_waves.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train_waves", raising=False)
    import train_waves  # pyright: ignore[reportMissingImports]

    return train_waves.app


def invoke(app, *arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_the_program_learns_and_resumes(app, tmp_path):
    shown = invoke(app, "--help")
    assert "Height and width of a picture, pixels." in shown
    invoke(app, *COMMAND, "--out", tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["accuracy"] > 0.6
    constant = [*COMMAND[2:], "--schedule", "constant", "--out"]
    invoke(app, "--steps", 9, *constant, tmp_path / "long")
    for steps in (4, 9):
        invoke(app, "--steps", steps, *constant, tmp_path / "parts")
    states = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("long", "parts")]
    assert all(torch.equal(value, states[1]["average"][name]) for name, value in states[0]["average"].items())


def test_the_program_is_short():
    (program,) = blocks(PAGE)
    assert len([line for line in program.splitlines() if line.strip()]) <= 50
