"""The code in docs/image.md runs with a run of `lrpe-md train image`, and exports it to timm."""

import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_pages import blocks
from train_commands import output_of, with_options

PAGE = Path(__file__).parents[2] / "docs" / "image.md"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return the page's commands that use runs/mine, with the options of a short run."""
    monkeypatch.chdir(tmp_path)
    for name, colour in {"cat": (200, 0, 0), "dog": (0, 0, 200)}.items():
        for i in range(20):
            path = tmp_path / "FOLDER" / name / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (90, 60), colour).save(path)
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("lrpe-md train image")]
    short = ["--steps", "1", "--batch", "8", "--device", "cpu", "--no-progress"]
    return [with_options(line[2:], *short) for line in lines if "runs/mine" in line]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_trains_tests_and_exports(commands, tmp_path, capsys):
    train, test, fine_tune = commands
    shown = output_of(*train, code=0)
    assert "32x32" in shown
    shown = output_of(*test, code=0)
    assert "already finished" in shown
    for size in ("48x48", "96x96", "64x96"):
        assert size in shown
    shown = output_of(*fine_tune, code=0)
    assert "Starting from runs/mine\n" in shown
    assert "To map their positions" not in shown
    Image.new("RGB", (90, 60)).save(tmp_path / "picture.jpg")
    space: dict = {"__name__": "page"}
    for block in blocks(PAGE):
        exec(compile(block, str(PAGE), "exec"), space)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["torch.Size([1, 10])", "torch.Size([1, 10])", "True", "torch.Size([1, 192, 20, 30])", "True"]
    other = torch.randn(1, 3, 72, 40)
    assert torch.equal(space["exported"](other), space["model"](other))
