"""The first run of docs/diffusion.md works: the data, the commands with few steps, and sampling in Python."""

import doctest
import re
import shlex
from pathlib import Path

import torch
from lrpe_md.scripts.train.app import app
from PIL import Image
from train_commands import with_options
from typer.testing import CliRunner

PAGE = (Path(__file__).parents[2] / "docs" / "diffusion.md").read_text(encoding="utf-8")


def find_block(language, part):
    """Return the code block that contains this text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if part in text]
    return found


def test_the_first_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(find_block("python", "load_digits"), {})
    train, draw = (shlex.split(line) for line in find_block("bash", "digits.npz").splitlines())
    fast = ["--steps", "2", "--sample-steps", "1", "--device", "cpu", "--no-tensorboard", "--no-progress"]
    for command in (with_options(train, *fast), [*draw, "--steps", "1", "--device", "cpu"]):
        done = CliRunner().invoke(app, command[2:], env={"COLUMNS": "400", "NO_COLOR": "1"})
        assert (command[:2], done.exit_code) == (["lrpe-md", "train"], 0), done.output
    with Image.open("digits.png") as sheet:
        assert sheet.format == "PNG"
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(find_block("pycon", "load_run"), {}, "diffusion.md", None, None)
    assert len(example.examples) == 9
    assert doctest.DocTestRunner().run(example).failed == 0
