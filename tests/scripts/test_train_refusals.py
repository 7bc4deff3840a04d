"""User errors and disk failures.

Each error prints a one-line message. No file is left incomplete, and nothing is lost.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from generative_data import write_captions as write_tiles
from lrpe_md.scripts.ablate.tasks import TASKS
from lrpe_md.scripts.common.folder import claim, save_whole
from lrpe_md.scripts.train import loop, samples
from lrpe_md.scripts.train.checkpoint import digest_of
from lrpe_md.scripts.train.data import images as image_data
from lrpe_md.scripts.train.tasks import digits
from lrpe_md.scripts.train.tasks.digits import DigitsTraining
from PIL import Image
from test_train_diffusion import load
from test_train_image import write_folders, write_idx
from train_commands import invoke, output_of, with_options

pytestmark = pytest.mark.usefixtures("few_sizes")
ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {
    "steps": 3, "warmup": 1, "limit": 64, "device": "cpu", "tensorboard": False, "progress": False, "save_every": 1,
}  # fmt: skip


def digits_command(out: Path, *more: str) -> list[str]:
    given = ["--steps", "3", "--warmup", "1", "--limit", "64", "--device", "cpu", "--no-tensorboard", "--no-progress"]
    return with_options(["digits", "--out", str(out), *given], *more)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_every_number_has_a_range(task, tmp_path):
    given = {field.name: tmp_path for field in fields(TASKS[task].config) if field.default is MISSING}
    for field in fields(TASKS[task].config):
        if type(field.default) not in (int, float):
            continue
        name = f"--{field.name.replace('_', '-')}"
        refused = invoke(task, "--out", str(tmp_path / "out"), "--data", "digits", name, "-1")
        assert refused.exit_code == 2, (name, refused.output)
        expected = f"{name}: expected at least 0 (0 disables it), got " if field.metadata["off"] else name
        assert expected in refused.output
        for wrong in (-1e-9, float("nan"), float("inf")) if isinstance(field.default, float) else ():
            with pytest.raises(typer.BadParameter, match=name if wrong == float("inf") else re.escape(expected)):
                TASKS[task].config(**(given | {field.name: wrong}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--clip", "--warmup", "--weight-decay"])
def test_zero_turns_off(option, tmp_path):
    assert invoke(*digits_command(tmp_path / "run", option, "0")).exit_code == 0


def test_options_that_must_not_be_zero(tmp_path):
    for task, names in {"image": ("heads", "dim"), "video": ("patch", "tubelet", "heads", "every")}.items():
        for name in names:
            refused = invoke(task, "--out", str(tmp_path / "out"), "--data", str(tmp_path), f"--{name}", "0")
            assert refused.exit_code == 2
            assert f"--{name}: expected at least 1, got 0" in refused.output


@pytest.mark.parametrize(
    ("task", "data", "options", "message"),
    [
        ("image", "folder", [], "--dim: expected a multiple of 4 (--heads), got 50; pass --dim 48 or 56, or"),
        ("video", "folder", [], "--dim: expected a multiple of 4 (--heads), got 50; pass --dim 48 or 56, or"),
        ("recall", "16x8x8", [], "--dim: expected a multiple of 4 (--heads), got 50; pass --dim 48 or 56, or"),
        ("lm", "folder", [], "--dim: expected a multiple of 4 (--heads), got 50; pass --dim 48 or 56, or"),
        ("diffusion", "folder", [], "--dim: expected a multiple of 2 × 4 (--heads), got 50; pass --dim 48 or 56, or"),
        ("diffusion", "folder", ["--dim", 6], "--dim: expected a multiple of 2 × 4 (--heads), got 6; pass --dim 8, or"),
        (
            "diffusion",
            "captions",
            ["--dim", 48, "--text-dim", 51],
            "--text-dim: expected an even number, got 51; pass --text-dim 52",
        ),
    ],
)
def test_heads_must_divide_the_width(tmp_path, task, data, options, message):
    if data == "captions":
        data = write_tiles(tmp_path / "captions")
    given = [task, "--out", tmp_path / "out", "--data", data, "--dim", 50, "--heads", 4, "--device", "cpu"]
    assert message in output_of(*with_options([*given, "--batch", 2, "--no-progress"], *options))
    assert not (tmp_path / "out").exists()


def test_seed_out_of_numpys_range(tmp_path):
    for seed in (2**32, 2**70):
        refused = invoke(*digits_command(tmp_path / "out", "--seed", str(seed)))
        assert refused.exit_code == 2
        assert f"--seed: expected at least 0 and less than 4294967296, got {seed}" in refused.output
        sampled = invoke("sample", str(tmp_path), "--seed", str(seed))
        assert sampled.exit_code == 2
        assert "--seed" in sampled.output
    assert not (tmp_path / "out").exists()


def test_sampling_options_must_be_numbers(tmp_path):
    for name, value in {"--temperature": "nan", "--top-p": "0", "--scale": "inf"}.items():
        refused = invoke("sample", str(tmp_path), name, value)
        assert refused.exit_code == 2
        assert f"Invalid value for '{name}'" in refused.output


def test_turn_must_be_a_file_in_an_existing_folder(tmp_path):
    timed = ("--seconds", "5", "--turn")
    for where in (tmp_path / "new" / "file", tmp_path):
        refused = invoke(*digits_command(tmp_path / "out", *timed, str(where)))
        assert refused.exit_code == 2
        assert f"--turn {where}: expected a file in an existing folder" in refused.output
    refused = invoke(*digits_command(tmp_path / "out", "--turn", str(tmp_path / "file")))
    assert "only works with --seconds" in refused.output
    assert not list(tmp_path.iterdir())


def test_an_unknown_optimiser(tmp_path):
    refused = invoke(*digits_command(tmp_path / "out", "--opt", "foo"))
    assert refused.exit_code == 2
    assert "--opt: unknown 'foo'" in refused.output
    assert "adamw" in refused.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adahessian", "not supported, because it needs second derivatives"),
        ("cadafactorbv", "not supported, because its settings can't be stored in a checkpoint"),
        ("bnbadam", "not available here ("),
    ],
)
def test_unsuitable_optimisers(tmp_path, monkeypatch, name, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = invoke(*digits_command(tmp_path / "out", "--opt", name))
    assert refused.exit_code == 2
    assert f"--opt {name}: {reason}" in refused.output


def test_float16_needs_a_gpu(tmp_path):
    refused = invoke(*digits_command(tmp_path / "out", "--precision", "fp16"))
    assert refused.exit_code == 2
    assert "--precision fp16 needs a GPU" in refused.output
    assert not (tmp_path / "out").exists()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_with_flipped_bytes_is_refused(tmp_path):
    config = DigitsTraining(out=tmp_path, **TINY)
    digits.run(config)
    path, before = tmp_path / "checkpoint.pt", (tmp_path / "result.json").read_bytes()
    weight = torch.load(path)["model"]["blocks.0.attn.qkv.weight"].numpy().tobytes()
    data = bytearray(path.read_bytes())
    at = data.index(weight) + len(weight) // 2
    data[at] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(typer.BadParameter, match=r"checkpoint\.pt is damaged.*delete it to start over"):
        digits.run(config)
    assert (tmp_path / "result.json").read_bytes() == before


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    config = DigitsTraining(out=tmp_path, **TINY)
    digits.run(config)
    path = tmp_path / "checkpoint.pt"
    whole = torch.load(path)
    for change in (
        lambda state: state.pop("optimizer"),
        lambda state: state["model"].pop("head.weight"),
        lambda state: state["model"].update({"head.weight": torch.zeros(3, 3)}),
    ):
        state = {**whole, "model": dict(whole["model"])}
        change(state)
        state["digest"] = digest_of({name: value for name, value in state.items() if name != "digest"})
        torch.save(state, path)
        with pytest.raises(typer.BadParameter, match="does not fit"):
            digits.run(config)


HOSTILE = {
    "text": b"no checkpoint", "opcodes": b"(ccopy\n", "empty": b"", "numbers": b"]\x94(K\x01K\x02e.", "nul": bytes(64),
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE)
def test_file_that_is_not_a_checkpoint(content, tmp_path):
    """The error has one line, without the unpickler's traceback."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(HOSTILE[content])
    with pytest.raises(typer.BadParameter, match=r"can't be read \(\w+.*; delete it to start over$") as error:
        digits.run(DigitsTraining(out=tmp_path, **TINY))
    assert "\n" not in str(error.value)
    refused = invoke("sample", str(tmp_path))
    assert refused.exit_code == 2
    assert "can't be read" in refused.output


def test_error_about_a_torn_checkpoint_is_one_sentence(tmp_path):
    torch.save({"model": torch.ones(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(typer.BadParameter, match=r"failed finding central directory\); delete it to start over$"):
        digits.run(DigitsTraining(out=tmp_path, **TINY))


def test_list_is_not_a_checkpoint(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "checkpoint.pt")
    with pytest.raises(typer.BadParameter, match=r"checkpoint\.pt is not a checkpoint from this version"):
        digits.run(DigitsTraining(out=tmp_path, **TINY))


def test_damaged_samples(tmp_path):
    """Cover a different file, a truncated file, and flipped bytes."""
    path = tmp_path / "samples.npz"
    samples.keep(path, ["a"], {"one": np.zeros((1, 8, 8, 3), np.uint8)})
    whole = path.read_bytes()
    assert samples.load(path)[0] == ["a"]
    flipped = bytearray(whole)
    flipped[whole.index(b"one.npy") + 40] ^= 0xFF  # in the compressed data
    for content in (b"", b"text", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(typer.BadParameter, match=r"samples\.npz: expected captions and images saved by"):
            samples.load(path)


def test_two_trainings_on_one_folder(tmp_path):
    config = DigitsTraining(out=tmp_path / "run", **TINY)
    with (
        claim(config.out),
        pytest.raises(typer.BadParameter, match=r"--out .*run: another run is writing there"),
    ):
        digits.run(config)
    digits.run(config)  # the lock is released


@pytest.mark.slow
def test_kill_while_saving_leaves_no_incomplete_file(tmp_path):
    script = (
        "import sys, time, torch\n"
        "save = torch.save\n"
        "def slow(state, path):\n"
        "    path.write_bytes(b'half')\n"
        "    time.sleep(60)\n"
        "torch.save = slow\n"
        "from lrpe_md.scripts.cli import run_program\n"
        "run_program('train', sys.argv[1:])\n"
    )  # fmt: skip
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *digits_command(out)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(out.glob("*.part"))) == 1
    assert invoke(*digits_command(out)).exit_code == 0
    assert {path.name for path in out.iterdir()} == {"checkpoint.pt", "history.csv", "model.safetensors", "result.json"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may not write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    refused = invoke(*digits_command(tmp_path / "closed" / "run"))
    assert refused.exit_code == 2
    assert "can't be written" in refused.output


def test_invalid_out_raises_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(loop.Trainer, "fit", lambda *args: pytest.fail("trained"))
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        refused = invoke(*digits_command(out))
        assert refused.exit_code == 2, refused.output
        assert "can't be written" in refused.output


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk(tmp_path, monkeypatch, error):
    done = invoke(*digits_command(tmp_path / "run", "--save-every", "1", "--steps", "3"))
    assert done.exit_code == 0
    shutil.rmtree(tmp_path / "run")
    save, calls = torch.save, []

    def full(state, path):
        calls.append(1)
        if len(calls) == 2:
            raise error
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    said = invoke(*digits_command(tmp_path / "run", "--save-every", "1"))
    assert said.exit_code == 1
    assert isinstance(said.exception, SystemExit)  # no traceback
    assert "can't be written" in said.output
    assert "to resume from the last checkpoint" in said.output
    assert torch.load(tmp_path / "run" / "checkpoint.pt")["step"] == 1


# --- data ------------------------------------------------------------------------------------------------------------


def png(colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, format="PNG")
    return file.getvalue()


def write_captions(folder: Path, lines: str, table: str = "metadata.jsonl", num: int = 24) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(num):
        (folder / f"{i}.png").write_bytes(png())
    (folder / table).write_text(lines, encoding="utf-8")
    return folder


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85"])
def test_json_lines_only_end_at_newlines(sign, tmp_path):
    lines = [json.dumps({"file_name": f"{i}.png", "text": f"a{sign}{i}"}, ensure_ascii=False) for i in range(24)]
    found = load(write_captions(tmp_path / "data", "\r\n".join(lines)), 8, parts=4)
    assert len(found.captions) == 24
    assert all(caption.startswith(f"a{sign}") for caption in found.captions)


def test_captions_must_be_text(tmp_path):
    rows = "".join(f'{{"file_name": "{i}.png", "text": "\\ud800 {i}"}}\n' for i in range(24))
    with pytest.raises(typer.BadParameter, match=r"metadata\.jsonl, line 1: expected text, got an unpaired surrogate"):
        load(write_captions(tmp_path / "data", rows), 8, parts=4)


@pytest.mark.parametrize(
    ("row", "message"),
    [("[" * 10**5 + "]" * 10**5, "nested too deeply"), ('{"file_name": ' + "1" * 10**4 + "}", "is not JSON")],
)
def test_unreadable_captions(row, message, tmp_path):
    rows = "".join(f'{{"file_name": "{i}.png", "text": "{i}"}}\n' for i in range(23)) + row
    with pytest.raises(typer.BadParameter, match=rf"metadata\.jsonl, line 24 .*{message}"):
        load(write_captions(tmp_path / "data", rows), 8, parts=4)


def test_a_field_that_is_too_long(tmp_path):
    rows = "file_name,text\n" + "".join(f"{i}.png,{'x' * 2**18 if i == 3 else i}\n" for i in range(24))
    with pytest.raises(typer.BadParameter, match=r"metadata\.csv, line \d+: .*field"):
        load(write_captions(tmp_path / "data", rows, "metadata.csv"), 8, parts=4)


def write_zip(path: Path, twice: bool = False, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for i in range(24):
            archive.writestr(f"{i}.png", png())
            archive.writestr(f"{i}.txt", f"caption {i}")
        if twice:
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr("3.txt", "another")
    return path


def test_a_zip_with_one_name_twice(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"3\.txt appears twice"):
        load(write_zip(tmp_path / "a.zip", twice=True), 8, parts=4)


def test_an_encrypted_zip(tmp_path):
    path = write_zip(tmp_path / "a.zip")
    data = bytearray(path.read_bytes())
    for sign, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(sign)
        while at >= 0:
            data[at + flags] |= 1  # encrypted
            at = data.find(sign, at + 4)
    path.write_bytes(data)
    with pytest.raises(typer.BadParameter, match=r"can't be read.*encrypted"):
        load(path, 8, parts=4)


def test_a_zip_with_broken_parts(tmp_path):
    path = write_zip(tmp_path / "a.zip", method=zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    for name in (b"7.png", b"7.txt"):
        at = data.index(name) + len(name)
        data[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(typer.BadParameter, match=r"7\.(png|txt) can't be read"):
        load(path, 8, parts=4)


def test_a_decompression_bomb(tmp_path, monkeypatch):
    folder = write_folders(tmp_path / "data")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(image_data.ImageError, match=r"can't be read as an image .*bomb"):
        image_data.load_images(folder, 8)


def test_valid_files_train(tmp_path):
    """The files that these tests modify are a valid training set."""
    data = write_idx(tmp_path / "idx", train=24, test=8)
    small = ["--batch", "8", "--steps", "1", "--warmup", "0", "--size", "8", "--test-sizes", "", "--patch", "4"]
    small += ["--dim", "24", "--depth", "1", "--heads", "2", "--device", "cpu"]
    assert invoke("image", "--data", str(data), "--out", str(tmp_path / "run"), *small).exit_code == 0


def test_saved_files_have_the_usual_permissions(tmp_path):
    """Libraries such as safetensors write files that only their owner can read."""
    (tmp_path / "usual").touch()
    save_whole(tmp_path / "saved", lambda part: (part.write_text("x"), part.chmod(0o600)))
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "usual").stat().st_mode
