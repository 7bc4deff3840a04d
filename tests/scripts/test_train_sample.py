"""Sampling images for prompts after a short training run (scripts/train/sample.py, prompts.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("timm")
pytest.importorskip("accelerate")

from lrpe_md.models.dit import TrainedGrids
from lrpe_md.models.flow import flow_matching_loss, sample
from lrpe_md.models.text import tokenize
from lrpe_md.scripts.train.app import app
from lrpe_md.scripts.train.checkpoint import FORMAT, digest_of, read_checkpoint, save_checkpoint
from lrpe_md.scripts.train.prompts import Painter, Sheet, draw, draw_noise
from lrpe_md.scripts.train.runs import load_run
from lrpe_md.scripts.train.tasks.diffusion import DiffusionTraining, run

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
SHEET = Sheet(size=None, scale=3.0, steps=2, images=2, positions="rescaled", out="")
CPU = torch.device("cpu")


class Wrapper(torch.nn.Module):
    """Wrapper that hides the model's attributes, like DistributedDataParallel."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args):
        return self.module(*args)


def train(folder, **changes):
    data = folder / "data"
    data.mkdir()
    for i in range(5):
        for name, colour in COLOURS.items():
            Image.new("RGB", (8, 8), colour).save(data / f"{name}{i}.png")
            (data / f"{name}{i}.txt").write_text(f"{name} tile {i}", encoding="utf-8")
    small = {
        "steps": 12, "batch": 8, "warmup": 2, "save_every": 12, "ema": 0.9, "lr": 3e-3, "size": 8, "test_size": 8,
        "dim": 32, "depth": 1, "heads": 2, "text_dim": 16, "text_depth": 1, "text_length": 24, "parts": 4,
        "sample_steps": 1, "samples": 1, "test_samples": 1, "tensorboard": False, "device": "cpu", "progress": False,
    }  # fmt: skip
    run(DiffusionTraining(data=data, out=folder / "run", **{**small, **changes}))
    return folder / "run"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sample"))


WIDE = {"COLUMNS": "400"}


def invoke(*args):
    return CliRunner().invoke(app, ["sample", *map(str, args)], env=WIDE)


def test_captions_need_a_prompt_even_with_npz(run_folder, tmp_path):
    given = [run_folder, "--count", 2, "--npz", tmp_path / "s.npz", "--steps", 1, "--device", "cpu"]
    assert "--prompt: expected at least one prompt for a run of" in invoke(*given).output
    assert not (tmp_path / "s.npz").exists()
    assert invoke(*given, "--prompt", "").exit_code == 0


def test_guidance_needs_a_trained_empty_condition(run_folder, tmp_path):
    state = read_checkpoint(run_folder / "checkpoint.pt")
    state["settings"]["drop_text"] = 0.0
    save_checkpoint(state, tmp_path / "checkpoint.pt", 1)
    given = [tmp_path, "--prompt", "red tile", "--images", 1, "--steps", 1, "--device", "cpu"]
    refused = invoke(*given)
    assert "--scale: expected 1, because this run was trained with --drop-text 0" in refused.output
    assert "got 3; pass --scale 1, or --negative" in refused.output
    assert invoke(*given, "--scale", 1).exit_code == 0
    assert invoke(*given, "--negative", "blue tile").exit_code == 0


def test_a_sheet_of_prompts(run_folder, tmp_path):
    out = tmp_path / "sheets" / "sheet.png"
    common = [
        run_folder,
        "--prompt",
        "red tile",
        "--prompt",
        "blue tile",
        "--steps",
        1,
        "--scale",
        2,
        "--device",
        "cpu",
    ]
    done = invoke(*common, "--size", "12x8", "--images", 3, "--out", out)
    assert done.exit_code == 0, done.output
    assert "2 × 3 images of 12x8, step 12" in done.output
    with Image.open(out) as sheet:
        assert sheet.format == "PNG"
        width, height = sheet.size
    assert width > 3 * 8
    assert height > 2 * 12
    assert invoke(*common, "--size", "24x8", "--images", 3, "--out", out).exit_code == 0
    with Image.open(out) as taller:
        assert taller.size[0] / taller.size[1] < 0.8 * width / height
    square = invoke(*common, "--size", 12, "--images", 3, "--out", out)
    assert "2 × 3 images of 12x12, step 12" in square.output, square.output


def test_a_negative_prompt(run_folder, tmp_path):
    """Sampling steers away from the negative prompt. Without guidance, a negative prompt is an error."""
    state = read_checkpoint(run_folder / "checkpoint.pt")

    def images(scale, negative):
        sheet = replace(SHEET, scale=scale, negative=negative)
        return draw(Painter(state, CPU), ["red tile"], draw_noise(sheet.images, (3, 8, 8), 0), sheet)

    torch.testing.assert_close(images(3.0, ""), images(3.0, None))
    assert not torch.allclose(images(3.0, "blue tile"), images(3.0, None))
    torch.testing.assert_close(images(3.0, "red tile"), images(1.0, None), rtol=1e-3, atol=1e-3)
    with pytest.raises(
        typer.BadParameter, match=r"--negative 'blue tile': has no effect with --scale 1, .* pass another"
    ):
        images(1.0, "blue tile")
    arguments = ("--prompt", "red tile", "--negative", "pink tile", "--steps", 1, "--device", "cpu")
    done = invoke(run_folder, *arguments, "--out", tmp_path / "s.png")
    assert done.exit_code == 0, done.output
    assert "No training caption contains 'pink'" in done.output
    refused = invoke(run_folder, "--prompt", "a", "--negative", "x" * 99, "--out", tmp_path / "s.png")
    assert "expected at most" in refused.output


def test_large_images_keep_their_pixels(tmp_path):
    from lrpe_md.scripts.train.samples import write_sheet

    stripes = np.zeros((1, 320, 256, 3), np.uint8)
    stripes[:, :, ::2] = 255
    write_sheet(tmp_path / "sheet.png", ["a"], {"seed 0": stripes})
    with Image.open(tmp_path / "sheet.png") as sheet:
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(sheet.convert("L")), 256, axis=1)
    assert (windows == stripes[0, 0, :, 0]).all(axis=-1).any(axis=1).sum() == 320


def test_seeds_prompts_and_positions(run_folder):
    state = read_checkpoint(run_folder / "checkpoint.pt")
    prompts = ["red tile", "blue tile", ""]

    def images(seed=0, size=(8, 8), sheet=SHEET):
        return draw(Painter(state, CPU), prompts, draw_noise(sheet.images, (3, *size), seed), sheet)

    first = images()
    assert first.shape == (3, 2, 3, 8, 8)
    assert torch.equal(first, images())
    torch.testing.assert_close(first[:, 1], images(seed=1)[:, 0])  # the i-th image equals the first of seed + i
    assert not torch.allclose(first[:, 0], first[:, 1])
    assert not torch.allclose(first[0], first[1])
    larger = images(size=(12, 8))
    assert larger.shape == (3, 2, 3, 12, 8)
    other = Sheet(None, 3.0, 2, 2, "extrapolated", "")
    assert not torch.allclose(larger, images(size=(12, 8), sheet=other))
    assert torch.equal(first, images(sheet=other))  # both kinds of positions agree at the training size


@pytest.mark.parametrize(
    ("grid", "expected"), [((8, 8), (4, 4)), ((16, 4), (8, 2)), ((24, 16), (5, 3)), ((9, 1), (12, 1))]
)
def test_rescaled_positions_keep_the_aspect_ratio(grid, expected):
    assert TrainedGrids((4,))(grid) == expected
    assert TrainedGrids((4,))((3, *grid)) == (None, *expected)  # frames keep their distance


def test_a_loaded_model_samples_other_sizes_like_the_command(run_folder):
    """By default, it rescales positions. ``reference=None`` extrapolates them."""
    model, noise, text = load_run(run_folder), draw_noise(2, (3, 12, 8), 0), tokenize(["red tile"] * 2)
    painter = Painter(read_checkpoint(run_folder / "checkpoint.pt"), CPU)
    for positions in ("rescaled", "extrapolated"):
        expected = draw(painter, ["red tile"], noise, replace(SHEET, positions=positions))[0]
        shift = (12 * 8) ** 0.5 / 8
        found = sample(model, noise, text, scale=3.0, steps=2, method="heun", shift=shift)
        torch.testing.assert_close(found, expected)
        model.reference = None


def test_changed_data_is_reported_before_the_batch_that_it_no_longer_fills(tmp_path):
    train(tmp_path, condition="none")
    for path in sorted((tmp_path / "data").glob("*.png"))[6:]:
        path.unlink()
    command = [
        "--data",
        tmp_path / "data",
        "--condition",
        "none",
        "--batch",
        8,
        "--size",
        8,
        "--test-size",
        8,
        "--dim",
        32,
    ]
    command += ["--depth", 1, "--heads", 2, "--device", "cpu", "--parts", 4]
    again = CliRunner().invoke(app, list(map(str, ["diffusion", *command, "--out", tmp_path / "run"])), env=WIDE)
    assert again.exit_code == 2
    assert "contains a run with different settings (" in again.output
    new = CliRunner().invoke(app, list(map(str, ["diffusion", *command, "--out", tmp_path / "new"])), env=WIDE)
    assert "--batch 8: expected at most" in new.output
    assert not (tmp_path / "new").exists()


def test_a_loaded_model_knows_what_it_predicts(tmp_path):
    folder = train(tmp_path, prediction="sample")
    model, noise, text = load_run(folder), draw_noise(2, (3, 8, 8), 0), tokenize(["red tile"] * 2)
    assert model.prediction == "sample"
    expected = sample(model, noise, text, steps=3, prediction="sample")
    assert torch.equal(sample(model, noise, text, steps=3), expected)
    assert not torch.allclose(sample(model, noise, text, steps=3, prediction="velocity"), expected)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([0.3, 0.6])
    expected = flow_matching_loss(model, x, text, t, noise, prediction="sample")
    assert torch.equal(flow_matching_loss(model, x, text, t, noise), expected)
    wrapped = Wrapper(model)
    assert torch.equal(flow_matching_loss(wrapped, x, text, t, noise), expected)


def test_samples_use_averaged_weights(run_folder):
    state = read_checkpoint(run_folder / "checkpoint.pt")
    assert not torch.equal(state["average"]["head.weight"], state["model"]["head.weight"])
    assert torch.equal(Painter(state, CPU).model.head.weight, state["average"]["head.weight"])
    del state["average"]  # as in a run without averaging
    assert torch.equal(Painter(state, CPU).model.head.weight, state["model"]["head.weight"])


def test_unknown_words_are_named(run_folder, tmp_path):
    assert (run_folder / "words.txt").read_text().split() == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "blue",
        "green",
        "red",
        "tile",
        "white",
    ]
    command = [run_folder, "--steps", 1, "--images", 1, "--out", tmp_path / "sheet.png"]
    said = invoke(*command, "--prompt", "Red zebra", "--prompt", "blue sky").output
    assert "No training caption contains 'sky', 'zebra': the model has not learned" in said
    assert "No caption" not in invoke(*command, "--prompt", "Red tile").output


def test_without_a_prompt_nothing_is_drawn(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = invoke(run_folder, "--steps", 1)
    assert refused.exit_code == 2, refused.output
    assert "--prompt: expected at least one" in refused.output
    drawn = invoke(run_folder, "--steps", 1, "--images", 1, "--prompt", "")
    assert drawn.exit_code == 0, drawn.output
    assert (run_folder / "sheet.png").exists()
    assert not list(tmp_path.iterdir())
    before = (run_folder / "sheet.png").read_bytes()
    again = invoke(run_folder, "--steps", 1, "--images", 2, "--prompt", "")
    assert f"{run_folder / 'sheet-2.png'}: 1 × 2 images" in again.output
    assert (run_folder / "sheet.png").read_bytes() == before
    (run_folder / "sheet.png").unlink()
    (run_folder / "sheet-2.png").unlink()


def bare(folder, settings):
    state = {"format": FORMAT, "settings": settings}
    folder.mkdir()
    torch.save({**state, "digest": digest_of(state)}, folder / "checkpoint.pt")
    return folder


REFUSED = {
    "no checkpoint": (["--prompt", "a"], "expected a run's folder with a checkpoint.pt"),
    "a different task": (["--prompt", "a"], "was trained for a different task"),
    "a scheme": (["--prompt", "a"], "scheme 'ours' to be registered; first import the module that registers it"),
    "size": (
        ["--size", "9x8", "--prompt", "a"],
        "--size: expected multiples of 2, the model's patch size, got 9x8; the next valid size is 10x8",
    ),
    "no size": (["--size", "big", "--prompt", "a"], "--size: expected a side or HEIGHTxWIDTH in pixels, got 'big'"),
    "nothing": (["--size", "0x8", "--prompt", "a"], "--size: expected a side or HEIGHTxWIDTH in pixels, got '0x8'"),
    "long": (
        ["--prompt", "é" * 12],
        "--prompt: expected at most 23 bytes, as set by --text-length in training, got 24",
    ),
    "of text": (
        ["--tokens", "5"],
        "--tokens: not supported for a run of `train diffusion`, which only accepts --size, --frames",
    ),
    "no prompt": ([], "--prompt: expected at least one prompt for a run of `train diffusion`, got none"),
    "negative": (
        ["--prompt", "a", "--negative", "b", "--scale", "1"],
        "--negative 'b': has no effect with --scale 1, which disables guidance; pass another --scale",
    ),
    "vae": (["--prompt", "a", "--vae", "runs/vae"], "--vae: has no effect, because this run was trained on pixels"),
    "encoder": (["--prompt", "a", "--encoder", "t5"], "--encoder: has no effect, because this run was trained without"),
    "sheet and npz": (["--count", "2", "--npz", "s.npz"], "--out: has no effect, because with --npz, no sheet"),
    "frames": (
        ["--prompt", "a", "--frames", "3"],
        "--frames: has no effect, because this run was trained on images; leave out --frames",
    ),
    "positions": (
        ["--positions", "squeezed", "--prompt", "a"],
        "--positions: unknown 'squeezed'. Choose from: rescaled; extrapolated",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(run_folder, tmp_path, name):
    args, message = REFUSED[name]
    folder = run_folder
    if name == "no checkpoint":
        folder = tmp_path
    if name == "a different task":
        folder = bare(tmp_path / "digits", {"model": {"img_size": 8}})
    if name == "a scheme":
        settings = {"model": {"vocab_size": 256}, "encoding": "ours:learnable=true", "scheme": "1234"}
        folder = bare(tmp_path / "lm", settings)
    result = invoke(folder, *args, "--out", tmp_path / "sheet.png", "--steps", 1)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "sheet.png").exists()


def test_options_of_images_are_refused_for_text(tmp_path):
    folder = bare(tmp_path / "lm", {"model": {"vocab_size": 256}, "length": 8})
    result = invoke(folder, "--size", "8x8", "--scale", 2)
    assert result.exit_code == 2
    assert "--size, --scale: not supported for a run of `train lm`" in result.output


def test_outputs_that_cannot_be_written(run_folder, tmp_path):
    (tmp_path / "file").write_text("")
    for out, message in (
        (tmp_path / "file" / "sheet.png", "can't be written"),
        (tmp_path, "expected a file, such as sheet.png"),
    ):
        result = invoke(run_folder, "--prompt", "a", "--steps", 1, "--images", 1, "--out", out)
        assert result.exit_code == 2, result.output
        assert message in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
