"""Training the diffusion model: captioned images in every supported format, training, samples and resuming."""

from __future__ import annotations

import csv
import json
import os
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("timm")
pytest.importorskip("accelerate")

from lrpe_md.scripts.train import samples
from lrpe_md.scripts.train.app import app
from lrpe_md.scripts.train.data.pictures import open_pictures
from lrpe_md.scripts.train.data.records import Split
from lrpe_md.scripts.train.data.values import hash_data
from lrpe_md.scripts.train.encodings import CAPTIONED
from lrpe_md.scripts.train.generation import Evaluation
from lrpe_md.scripts.train.runs import load_run
from lrpe_md.scripts.train.tasks import diffusion as train_diffusion
from lrpe_md.scripts.train.tasks.diffusion import DiffusionTraining, run
from train_commands import Killed, die_after, with_options

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
SMALL = {
    "steps": 12, "batch": 8, "warmup": 2, "log_every": 4, "save_every": 6, "ema": 0.9, "lr": 3e-3, "size": 8,
    "test_size": 12, "dim": 32, "depth": 1, "heads": 2, "text_dim": 16, "text_depth": 1, "parts": 4, "sample_steps": 1,
    "samples": 2, "test_samples": 2, "tensorboard": False, "device": "cpu",
}  # fmt: skip


def images(folder, size=(8, 8)):
    """Write 24 plain images, and return (name, caption) pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(6):
        for name, colour in COLOURS.items():
            Image.new("RGB", size, colour).save(folder / f"{name}{i}.png")
            rows.append((f"{name}{i}.png", f"{name} {i}"))
    return rows


@pytest.fixture
def folder(tmp_path):
    """Create a folder of images with a metadata.jsonl."""
    rows = images(tmp_path / "data")
    lines = [json.dumps({"file_name": name, "text": text, "odd": i % 2 == 1}) for i, (name, text) in enumerate(rows)]
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "data"


def load(path, size=8, parts=4, fold=0, limit=None, without=""):
    """Read all pairs of a folder or a zip."""
    split = Split(parts, fold, limit)
    pictures = open_pictures(path, split, condition="captions", without=without)
    images, records = pictures.read(size), pictures.records
    return SimpleNamespace(
        images=images, captions=records.captions, held_out=records.held_out(path, split),
        digest=hash_data([images], records),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "width", "expected"), [(4, 256, 4), (3, 256, 1), (6, 256, 2), (12, 256, 4), (6, 252, 6), (1, 2, 1)]
)
def test_heads_of_the_text_encoder_divide_its_width(folder, tmp_path, heads, width, expected):
    config = DiffusionTraining(
        data=folder, out=tmp_path, **{**SMALL, "dim": 24 * heads, "heads": heads, "text_dim": width}
    )
    encoder = train_diffusion.build(config).text_encoder
    assert encoder.blocks[0].attn.num_heads == expected
    assert encoder(torch.ones(1, 3, dtype=torch.long)).features.shape == (1, 3, width)


# --- data ------------------------------------------------------------------------------------------------


def test_all_forms_hold_the_same_pairs(folder, tmp_path):
    found = load(folder)
    assert found.images.shape == (24, 3, 8, 8)
    assert found.images.dtype == torch.uint8
    pairs = dict(zip(found.captions, found.images, strict=True))
    for name, colour in COLOURS.items():
        assert pairs[f"{name} 3"][:, 4, 4].tolist() == list(colour)
    assert 0 < found.held_out.sum() < 24

    beside = tmp_path / "beside"
    for name, text in images(beside):
        (beside / name).with_suffix(".txt").write_text(f"{text}\n", encoding="utf-8")
    table = tmp_path / "table"
    with open(table / "captions.csv" if images(table) else "", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("file_name", "text"), *images(table)])
    archive = tmp_path / "pairs.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in folder.iterdir():
            packed.write(path, f"inside/{path.name}")
        packed.writestr("__MACOSX/inside/._red0.png", b"no image")
    (beside / "._red0.png").write_bytes(b"no image")
    for other in (beside, table, archive):
        assert load(other).digest == found.digest


def test_transparency_crops_and_choices(folder, tmp_path):
    image = np.zeros((8, 16, 4), np.uint8)
    image[:, 4:12] = (255, 0, 0, 255)
    Image.fromarray(image).save(folder / "red0.png")
    found = load(folder, size=4)
    red = dict(zip(found.captions, found.images, strict=True))["red 0"]
    assert red.flatten(1).float().mean(1).tolist() == [255, 0, 0]
    image[:, 4:12, 3] = 0
    Image.fromarray(image).save(folder / "red0.png")
    assert load(folder, size=4).images[found.captions.index("red 0")].float().mean() == 255
    assert len(load(folder, without="odd").captions) == 12
    assert len(load(folder, limit=10).captions) == 10
    assert load(folder, fold=1).held_out.sum() + load(folder).held_out.sum() <= 24
    assert not (load(folder, fold=1).held_out & load(folder).held_out).any()


def _break(folder, **files):
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


BAD = {
    "nothing there": (
        r"no such file or folder; expected a folder .*NAME.txt.*CLASS/NAME.png", lambda f: load(f / "absent"),
    ),
    "no zip": (r"can't be read as a zip", lambda f: load(f / "metadata.jsonl")),
    "no images": (r"no images among its 0 files", lambda f: [(f / "new").mkdir(), load(f / "new")]),
    "row without image": (
        r"1 row of metadata.jsonl without an image: red0.png;", lambda f: [(f / "red0.png").unlink(), load(f)],
    ),
    "image without row": (
        r"1 image without a row in metadata.jsonl: new.png",
        lambda f: [Image.new("L", (2, 2)).save(f / "new.png"), load(f)],
    ),
    "row without caption": (
        r"line 1: expected file_name and text, got \{'file_name'",
        lambda f: [_break(f, **{"metadata.jsonl": '{"file_name": "red0.png"}'}), load(f)],
    ),
    "no JSON": (r"metadata.jsonl, line 2 is not JSON", lambda f: [_break(f, **{"metadata.jsonl": "\n{"}), load(f)]),
    "no rows": (r"24 images without a row", lambda f: [_break(f, **{"metadata.jsonl": ""}), load(f)]),
    "two rows": (
        r"line 2: red0.png already has a caption",
        lambda f: [_break(f, **{"metadata.jsonl": '{"file_name": "red0.png", "text": ""}\n' * 2}), load(f)],
    ),
    "two tables": (
        r"expected one table of captions, got captions.csv, metadata.jsonl",
        lambda f: [_break(f, **{"captions.csv": ""}), load(f)],
    ),
    "no text beside": (
        r"caption in NAME.txt next to each of the 24 images, got 0 \(none for blue0.png, blue1.png, blue2.png, ...\)",
        lambda f: [(f / "metadata.jsonl").unlink(), load(f)],
    ),
    "text without image": (
        r"1 caption without an image: purple.txt",
        lambda f: [
            (f / "metadata.jsonl").unlink(),
            _break(f, **{f"{p.stem}.txt": "" for p in f.glob("*.png")}, **{"purple.txt": ""}),
            load(f),
        ],
    ),
    "unreadable image": (
        r"green1.png can't be read as an image", lambda f: [_break(f, **{"green1.png": "text"}), load(f)],
    ),
    "half an image": (
        r"green1.png can't be read as an image",
        lambda f: [(f / "green1.png").write_bytes((f / "green1.png").read_bytes()[:50]), load(f)],
    ),
    "unknown field": (r"--without even: .*line 1 has no such field; pass one of", lambda f: load(f, without="even")),
    "misspelt field": (r"has no such field \(did you mean 'odd'\?\); pass one", lambda f: load(f, without="odds")),
    "no table": (
        r"--without odd: expected a table such as metadata.jsonl with this field in --data .*, found none; add one, or",
        lambda f: [(f / "metadata.jsonl").unlink(), load(f, without="odd")],
    ),
    "few texts beside": (
        r"next to each of the 24 images, got 2 \(none for .*; add the missing captions, or pass --condition none or ",
        lambda f: [(f / "metadata.jsonl").unlink(), _break(f, **{"red0.txt": "", "red1.txt": ""}), load(f)],
    ),
    "one caption": (
        r"held-out samples, got 0 and 1 \(1 different caption\); add", lambda f: load(f, limit=1),
    ),
}  # fmt: skip


def test_a_few_captions_are_enough(folder):
    """In a small dataset, the hash chooses no sample. One sample is held out anyway, and it is always the same one."""
    for limit in (2, 3, 5):
        found = load(folder, limit=limit, parts=10**6)
        assert found.held_out.sum() == 1
        assert np.array_equal(load(folder, limit=limit, parts=10**6).held_out, found.held_out)


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused(folder, name):
    message, call = BAD[name]
    with pytest.raises(typer.BadParameter, match=message):
        call(folder)


# --- training --------------------------------------------------------------------------------------------


def config(folder, out, **changes):
    return DiffusionTraining(data=folder, out=out, **{**SMALL, **changes})


def weights(out):
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return {**state["model"], **{f"average.{k}": v for k, v in state["average"].items()}}


def test_a_run_lowers_the_loss_and_shows_samples(folder, tmp_path):
    result = run(config(folder, tmp_path / "run", steps=40, encoding="rotate-text-axis"))
    with open(tmp_path / "run" / "history.csv", encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < 0.8 * losses[0]
    held_out = result["held_out"]
    assert set(held_out) == {"test_pairs", "8x8", "12x12 extrapolated", "12x12 rescaled"}
    assert held_out["12x12 extrapolated"]["loss"] != held_out["12x12 rescaled"]["loss"]
    assert all(len(held_out[name]["by_time"]) == 8 for name in held_out if name != "test_pairs")
    with Image.open(tmp_path / "run" / "samples.png") as sheet:
        assert sheet.format == "PNG"
        assert min(sheet.size) > 300
    names = {p.name for p in (tmp_path / "run").iterdir()}
    written = {"checkpoint.pt", "history.csv", "model.safetensors", "result.json"}
    assert names == written | {"samples.npz", "samples.png", "words.txt"}
    captions, columns = samples.load(tmp_path / "run" / "samples.npz")
    assert list(columns) == ["held out", "8x8", "12x12 extrapolated", "12x12 rescaled"]
    assert {images.shape[0] for images in columns.values()} == {len(captions)}
    assert columns["8x8"].shape[1:] == (8, 8, 3)
    assert not np.array_equal(columns["12x12 extrapolated"], columns["12x12 rescaled"])


def test_tables_of_positions_are_not_rescaled(folder, tmp_path):
    result = run(config(folder, tmp_path / "run", steps=1, encoding="cogview4"))
    assert set(result["held_out"]) == {"test_pairs", "8x8", "12x12 extrapolated"}
    assert load_run(tmp_path / "run").reference is None


def test_captions_are_dropped_and_the_evaluation_repeats(folder, tmp_path):
    chosen = config(folder, tmp_path, drop_text=0.25, encoding="rotate")
    source = train_diffusion.open_source(chosen, torch.device("cpu"))
    draws = np.arange(16, dtype=np.int64) * 2**59
    x, _, drop = train_diffusion.batch(chosen, source, np.arange(16) % len(source.train), draws)
    assert x.shape == (16, 3, 8, 8)
    assert {x.min().item(), x.max().item()} == {-1, 1}
    assert drop.tolist() == [True] * 4 + [False] * 12

    model = train_diffusion.build(chosen, source)
    torch.nn.init.normal_(model.head.weight)
    evaluation = train_diffusion.make_evaluation(chosen, source, torch.device("cpu"))
    first = evaluation.evaluate(model, nullcontext)
    torch.randn(5)
    assert evaluation.evaluate(model, nullcontext) == first
    _, columns = evaluation.draw(model, chosen.sampling, chosen.samples, nullcontext)
    assert {name: images.shape[-1] for name, images in columns.items()} == {
        "held out": 12, "8x8": 8, "12x12 extrapolated": 12, "12x12 rescaled": 12,
    }  # fmt: skip
    assert model.reference is None


@pytest.mark.slow
@pytest.mark.parametrize("stop", [7, 12])
def test_resumed_run_equals_uninterrupted_run(folder, tmp_path, monkeypatch, stop):
    """Kill the run one step after the checkpoint, and after the last step but before the results are written."""
    whole = run(config(folder, tmp_path / "whole", encoding="rotate-mixed"))
    monkeypatch.setattr(train_diffusion, "loss", die_after(stop, train_diffusion.loss))
    if stop == SMALL["steps"]:
        monkeypatch.setattr(Evaluation, "evaluate", die_after(0, Evaluation.evaluate))
    part = config(folder, tmp_path / "part", encoding="rotate-mixed")
    with pytest.raises(Killed):
        run(part)
    assert sorted(p.name for p in (tmp_path / "part").iterdir()) == ["checkpoint.pt", "history.csv"]
    monkeypatch.undo()
    again = run(part)
    assert again["train_steps_timed"] == SMALL["steps"] - (6 if stop == 7 else 12)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "part")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert again["held_out"] == whole["held_out"]


def test_a_checkpoint_of_another_encoding_or_data_is_refused(folder, tmp_path):
    done = config(folder, tmp_path / "run", steps=1, batch=2)
    run(done)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(typer.BadParameter, match=r"encoding: was rotate, is now cosine.*choose another folder"):
        run(replace(done, encoding="cosine"))
    Image.new("RGB", (8, 8), "black").save(folder / "red0.png")
    with pytest.raises(typer.BadParameter, match="the data has changed"):
        run(done)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_guidance_needs_dropped_conditions(folder, tmp_path):
    with pytest.raises(typer.BadParameter, match=r"--scale: expected 1 with --drop-text 0, .*got 3; pass --scale 1"):
        config(folder, tmp_path, drop_text=0.0)
    for given in ({"scale": 1.0}, {"condition": "none"}, {"weights": "runs/first"}):
        config(folder, tmp_path, drop_text=0.0, **given)


def test_command_line(folder, tmp_path):
    out = tmp_path / "run"
    command = ["--data", str(folder), "--out", str(out), "--device", "cpu", "--batch", "8"]
    for more, message in (
        (["--encoding", "rope"], "unknown 'rope'"),
        (["--size", "9"], "--size: expected a multiple of --patch 2, got 9"),
        (["--parts", "4", "--fold", "4"], "--fold: expected 0 to --parts - 1 = 3"),
        (["--drop-text", "1"], "--drop-text: expected"),
        (["--dim", "32", "--heads", "4", "--encoding", "flux1", "--parts", "4"], "flux1 doesn't support 8"),
        (["--batch", "64", "--parts", "4", "--dim", "16", "--heads", "2"], "--batch 64: expected at most"),
        (["--data", str(tmp_path / "absent")], "no such file or folder"),
    ):
        result = CliRunner().invoke(
            app, ["diffusion", *with_options(command, *more)], env={**os.environ, "COLUMNS": "400"}
        )
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert not out.exists()


@pytest.mark.parametrize("encoding", [*CAPTIONED.encodings, "flux1", "qwen_image", "hidream:split=2,1,1,base=300"])
@pytest.mark.parametrize("attention", CAPTIONED.attentions)
def test_every_choice_builds_a_model(encoding, attention, folder, tmp_path):
    chosen = config(folder, tmp_path, encoding=encoding, attention=attention, dim=64)
    model = train_diffusion.build(chosen)
    for size, model.reference in ((8, None), (12, None), (12, (4, 4))):
        assert model(torch.randn(1, 3, size, size), torch.rand(1)).shape == (1, 3, size, size)


def test_trainings_side_by_side(tmp_path):
    """Each row of the picture is a run, and each caption is a block of columns below its held-out image."""
    solid = {"a": 40, "b": 200}
    for name, value in solid.items():
        columns = {column: np.full((3, 6, 6, 3), value, np.uint8) for column in ("8x8", "12x12 rescaled")}
        columns["held out"] = np.full((3, 6, 6, 3), 120, np.uint8)
        samples.keep(tmp_path / name, ["one", "$two", "three"], columns)
    samples.write_comparison(tmp_path / "both.png", {name: tmp_path / name for name in solid}, captions=(0, 2, 7))
    with Image.open(tmp_path / "both.png") as image:
        assert image.mode == "P"
        rows = np.asarray(image.convert("L")).astype(int)
    height = rows.shape[0]
    for value, top, bottom in ((120, 0, 0.45), (40, 0.3, 0.75), (200, 0.65, 1)):
        count = (abs(rows - value) < 4).sum(axis=1)
        found = np.flatnonzero(count > 20)
        assert len(found), value
        assert top * height < found.mean() < bottom * height, value
    widths = [(abs(rows - value) < 4).sum(axis=1).max() for value in (120, 40)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.1)  # two captions of two columns each, with one image above


def test_the_sheet_takes_any_caption_and_size(tmp_path):
    columns = {"a": torch.rand(2, 3, 4, 4) * 2 - 1, "b": torch.full((2, 3, 8, 6), torch.nan)}
    pixels = {name: samples.pixels(images) for name, images in columns.items()}
    assert pixels["a"][1, 2, 3].tolist() == ((columns["a"][1, :, 2, 3] + 1) * 127.5).round().tolist()
    samples.write_sheet(tmp_path / "sheet.part", ["$x_{", "long " * 20], pixels)
    with Image.open(tmp_path / "sheet.part") as sheet:
        assert sheet.format == "PNG"


@pytest.mark.parametrize("num", [1, 4])
def test_captions_of_the_sheet_are_not_clipped(tmp_path, num):
    images = {"a": np.zeros((num, 8, 8, 3), np.uint8)}
    samples.write_sheet(tmp_path / "sheet.png", ["WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW"] * num, images)
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("L"))
    edges = pixels[:, :2], pixels[:, -2:], pixels[:2], pixels[-2:]
    assert min(edge.min() for edge in edges) == 255
    assert (pixels[:, : pixels.shape[1] // 2] < 128).any()


def test_validation_during_training(folder, tmp_path):
    few = {**SMALL, "steps": 6, "log_every": 4, "data": folder}
    plain = train_diffusion.run(DiffusionTraining(out=tmp_path / "plain", **few))
    checked = train_diffusion.run(DiffusionTraining(out=tmp_path / "checked", validate_every=3, **few))
    assert checked["held_out"] == plain["held_out"]
    weights = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("plain", "checked")]
    assert all(torch.equal(value, weights[1]["model"][name]) for name, value in weights[0]["model"].items())
    rows = weights[1]["history"]
    assert [(row["step"], "held_out" in row) for row in rows] == [(3, True), (4, False), (6, True)]
    assert rows[-1]["held_out"] == checked["held_out"]["8x8"]["loss"]
