"""The first run of docs/diffusion.md works: the data, the commands with few steps, and sampling in Python."""

import doctest
import json
import re
import shlex
from pathlib import Path

import pytest
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


@pytest.mark.slow
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


def test_emoji(tmp_path, monkeypatch):
    """The page's code turns the npm package into captioned images that can be trained on."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "package" / "img" / "google" / "64"
    folder.mkdir(parents=True)
    table = [
        {"name": f"FACE {i}", "image": f"{i}.png", "has_img_google": i > 0} | (
            {"skin_variations": {"1F3FB": {"image": f"{i}-1f3fb.png", "has_img_google": True}}} if i % 2 else {}
        )
        for i in range(24)
    ]  # fmt: skip
    (tmp_path / "package" / "emoji.json").write_text(json.dumps(table))
    for path in [f"{i}.png" for i in range(1, 24)] + [f"{i}-1f3fb.png" for i in range(1, 24, 2)]:
        Image.new("RGB", (8, 8)).save(folder / path)
    example = doctest.DocTestParser().get_doctest(find_block("pycon", "emoji.json"), {}, "diffusion.md", None, None)
    assert doctest.DocTestRunner().run(example).failed == 0
    options = "--size 8 --test-size 0 --dim 16 --depth 1 --heads 1 --text-dim 16 --text-depth 1 --batch 8 --parts 4"
    fast = "--steps 2 --sample-steps 1 --device cpu --no-tensorboard --no-progress --out run"
    done = CliRunner().invoke(
        app, ["diffusion", "--data", "emoji64.zip", "--without", "variation", *options.split(), *fast.split()],
        env={"COLUMNS": "400", "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "of 23 samples for tests" in done.output
