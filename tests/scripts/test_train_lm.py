"""Training the language model on a few kilobytes: resuming, learned frequencies, evaluation, refusals."""

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import typer
from accelerate import Accelerator
from lrpe_md.models.lm import CausalLm, LmConfig
from torch import Tensor
from typer.testing import CliRunner, Result

from scripts import lm_data, train_lm
from scripts.lm_data import Windows, check_lengths, load_text

MODEL = {"dim": 16, "depth": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 16}
LINES = [f"{who} says that {what} of {who} is {what}.\n" for who in ("Ann", "Bob", "Cid") for what in ("tea", "war")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.md"
    path.write_text("".join(LINES[i * i % 5] for i in range(200)))
    return path


def config(encoding: str = "rotate", **changes) -> train_lm.Config:
    same = {"length": 16, "batch": 4, "steps": 6, "warmup": 1, "lr": 1e-2, **changes}
    return train_lm.Config(text="", model=LmConfig(**MODEL, **train_lm.ENCODINGS[encoding]), **same)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(train_lm.app, list(args), env={"COLUMNS": "400", "NO_COLOR": "1"})


# --- training --------------------------------------------------------------------------------------------------------


def test_train_sample_and_refuse_another_encoding(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    command = [
        "train",
        str(file),
        "--out",
        str(out),
        "--size",
        "tiny",
        "--steps",
        "40",
        "--every",
        "20",
        "--lr",
        "1e-2",
    ]
    command += ["--batch", "8", "--length", "32", "--lengths", "32,64", "--scaling", "yarn", "--device", "cpu"]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    metrics = pd.read_csv(out / "metrics.csv")
    assert list(metrics.step) == [20, 40]
    assert metrics.train[1] < 0.7 * metrics.train[0] < 0.7 * 8
    assert metrics.lr[1] == pytest.approx(1e-3)  # a tenth
    assert metrics.validation[1] < 0.9 * metrics.validation[0]
    assert [p.name for p in out.glob("checkpoint*")] == ["checkpoint-40"]
    evaluation = pd.read_csv(out / "evaluation.csv")
    assert set(evaluation.scaling) == {"none", "yarn"}
    assert set(evaluation.length) == {32, 64}
    settings = (out / "config.json").read_text()
    assert str(tmp_path) not in settings

    weights = (out / "checkpoint-40" / "model.safetensors").read_bytes()
    assert invoke(*command).exit_code == 0  # nothing left to do but to evaluate
    assert (out / "checkpoint-40" / "model.safetensors").read_bytes() == weights

    shown = [invoke("sample", str(out), "--prompt", "Ann", "--prompt", "Bob says", "--tokens", "9") for _ in range(2)]
    assert shown[0].exit_code == 0, shown[0].output
    assert shown[0].output.startswith("Ann")
    assert "\nBob says" in shown[0].output
    assert shown[0].output == shown[1].output
    assert invoke("sample", str(out), "--tokens", "80", "--scaling", "ntk").exit_code == 0

    refused = invoke(*command, "--encoding", "cosine-softplus-phase")
    assert refused.exit_code == 2
    assert "model.encoding: rotate there, cosine now" in refused.output
    file.write_text(file.read_text() + "more")
    assert "text: " in invoke(*command).output


@pytest.mark.parametrize("encoding", ["rotate-learned", "cosine-softplus-phase"])
def test_resumed_training_equals_one_that_never_stopped(encoding: str, file: Path, tmp_path: Path, monkeypatch) -> None:
    text, settings = load_text(file), config(encoding)
    _, whole, history = train_lm.fit(settings, text, tmp_path / "whole", every=3, progress=False)

    save, out = train_lm.save, tmp_path / "stopped"

    def interrupted(*args) -> None:
        save(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_lm, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_lm.fit(settings, text, out, every=3, progress=False)
    (out / "checkpoint-5.part").mkdir()  # of a process that was killed
    monkeypatch.setattr(train_lm, "save", save)
    steps, draw = [], Windows.draw
    monkeypatch.setattr(Windows, "draw", lambda self: (steps.append(self.step), draw(self))[1])
    _, resumed, again = train_lm.fit(settings, text, out, every=3, progress=False)
    assert steps == [4, 5, 6]
    assert again == history
    expected = whole.state_dict()
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert [p.name for p in out.glob("checkpoint*")] == ["checkpoint-6"]


def test_learned_frequencies_and_phases_move(file: Path) -> None:
    text = load_text(file)
    for encoding, name in (("rotate-learned", "theta"), ("cosine-softplus-phase", "phase")):
        settings = config(encoding)
        _, model, _ = train_lm.fit(settings, text, every=6, progress=False)
        before = dict(CausalLm(settings.model).named_parameters())
        found = {key: p for key, p in model.named_parameters() if "frequencies" in key}
        assert list(found) == [f"blocks.0.attn.encoding.frequencies.{name}"]
        (key, moved), rate = *found.items(), settings.lr * (settings.frequency_lr if name == "theta" else 1)
        change = (moved - before[key]).abs()
        assert (change > 0.1 * rate).any()
        assert (change < 1.5 * settings.steps * rate).all()


def test_a_row_is_the_mean_of_its_steps(file: Path) -> None:
    each, pairs = (train_lm.fit(config(steps=4), load_text(file), every=n, progress=False)[2] for n in (1, 2))
    assert [row["step"] for row in pairs] == [2, 4]
    for row, a, b in zip(pairs, each[::2], each[1::2], strict=True):
        assert row["train"] == pytest.approx((a["train"] + b["train"]) / 2)
        assert row["validation"] == b["validation"]


def test_parameter_groups() -> None:
    settings = config("rotate-learned")
    model = CausalLm(replace(settings.model, encoding="cosine", phase=True))
    groups = train_lm.parameter_groups(model, settings)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names) == sorted(id(p) for group in groups for p in group["params"])
    decay, keep, frequencies = ({names[id(p)].split(".")[-2:][0] for p in group["params"]} for group in groups)
    assert decay == {"embed", "qkv", "proj", "fc1_g", "fc1_x", "fc2"}
    assert keep == {"norm1", "norm2", "norm", "frequencies"}
    assert frequencies == {"frequencies"}
    assert [group["weight_decay"] for group in groups] == [settings.weight_decay, 0, 0]
    assert [group.get("lr_scale", 1) for group in groups] == [1, 1, settings.frequency_lr]


def test_a_loss_that_is_not_finite_is_said(file: Path) -> None:
    with pytest.raises(FloatingPointError, match="before step 6; try a lower --lr"):
        train_lm.fit(config(lr=math.inf), load_text(file), every=6, progress=False)


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(file: Path) -> tuple[CausalLm, Tensor]:
    torch.manual_seed(0)
    model = CausalLm(LmConfig(**MODEL))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, load_text(file).validation


@pytest.mark.parametrize(("limit", "count"), [(64, 2), (100, 3), (10, 1)])
def test_evaluation_is_the_mean_over_windows(measured: tuple, limit: int, count: int, monkeypatch) -> None:
    model, text = measured
    monkeypatch.setattr(train_lm, "EVAL_TOKENS", 64)  # two windows a batch
    found = train_lm.evaluate(Accelerator(cpu=True), model, text, 32, limit)
    each = []
    for i in range(count):
        window = text[32 * i : 32 * i + 33].long()
        each.append(-model(window[None, :-1])[0].log_softmax(-1).gather(-1, window[1:, None])[:, 0] / math.log(2))
    torch.testing.assert_close(found.float(), torch.stack(each).mean(0).detach())


def test_measure_by_length_and_position(measured: tuple) -> None:
    model, text = measured
    accelerator, same = Accelerator(cpu=True), (16, (8, 16, 64), )  # fmt: skip
    rows = {name: train_lm.measure(accelerator, model, text, *same, name, 64) for name in (None, *train_lm.SCALINGS)}
    for name, found in rows.items():
        whole = {
            row["length"]: row["bits_per_byte"] for row in found if (row["first"], row["last"]) == (0, row["length"])
        }
        assert set(whole) == {8, 16, 64}
        parts = [row for row in found if row["length"] == 64 and row["last"] - row["first"] < 64]
        assert [row["first"] for row in parts] == [0, *(row["last"] for row in parts[:-1])]
        mean = sum(row["bits_per_byte"] * (row["last"] - row["first"]) for row in parts) / 64
        assert mean == pytest.approx(whole[64], abs=1e-4)
        changed = [
            a["length"] for a, b in zip(found, rows[None], strict=True) if a["bits_per_byte"] != b["bits_per_byte"]
        ]
        assert set(changed) == (set() if name is None else {64})
    assert (model.blocks[0].attn.encoding.ratio == 1).all()


# --- text ------------------------------------------------------------------------------------------------------------


def test_text_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    for name, content in {"b.txt": "b" * 60, "a/x.md": "é" * 20, "c.py": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    text = load_text(tmp_path)
    assert bytes(torch.cat([text.train, text.validation]).tolist()).decode() == "é" * 20 + "b" * 60
    assert len(text.validation) == 5
    assert len(load_text(tmp_path / "b.txt").train) == 57
    assert load_text(tmp_path).digest != load_text(tmp_path / "b.txt").digest


def test_windows_are_the_same_on_any_number_of_processes_and_go_on() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    one, left, right = Windows(text, 8, 6, 0), Windows(text, 8, 6, 0, 0, 2), Windows(text, 8, 6, 0, 1, 2)
    for _ in range(3):
        batch = one.draw()
        assert torch.equal(batch, torch.cat([left.draw(), right.draw()]))
        assert torch.equal(batch, batch[:, :1] + torch.arange(9))
    later = Windows(text, 8, 6, 1)
    later.load_state_dict(one.state_dict())
    assert torch.equal(later.draw(), one.draw())
    starts = torch.cat([Windows(text, 98, 64, 0).draw()[:, 0]])
    assert set(starts.tolist()) == {0, 1}  # the last byte is a target
    with pytest.raises(typer.BadParameter, match="--batch: expected a multiple of the 4 processes, got 6"):
        Windows(text, 8, 6, 0, 0, 4)


def test_text_errors(file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in {tmp_path / "none": "does not exist", empty: "found none"}.items():
        with pytest.raises(typer.BadParameter, match=message):
            load_text(path)
    (empty / "a.txt").touch()
    with pytest.raises(typer.BadParameter, match="1 empty files"):
        load_text(empty)
    text = load_text(file)
    assert lm_data.VALIDATION == 0.05
    check_lengths(text, 16, (64,))
    with pytest.raises(typer.BadParameter, match=r"more than 8192 bytes for validation, got \d+"):
        check_lengths(text, 16, (64, 8192))
    with pytest.raises(typer.BadParameter, match="more than 10000 bytes for training"):
        check_lengths(text, 10_000, (64,))


def test_refusals(file: Path, tmp_path: Path) -> None:
    for args, message in {
        ("--encoding", "rope"): "cosine-softplus-phase",
        ("--size", "huge"): "small",
        ("--attention", "flash"): "linear",
        ("--scaling", "x"): "yarn",
        ("--lengths", "a"): "numbers of at least 1",
        ("--precision", "int8"): "bf16",
    }.items():
        refused = invoke("train", str(file), "--out", str(tmp_path / "out"), *args)
        assert refused.exit_code == 2
        assert args[0] in refused.output
        assert message in refused.output
    assert "does not exist" in invoke("train", str(tmp_path / "none")).output
    assert "with a checkpoint" in invoke("sample", str(tmp_path)).output


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("encoding", ["rotate-learned", "cosine-softplus-phase"])
def test_training_in_bf16_on_a_gpu(encoding: str, attention: str, file: Path) -> None:
    model = LmConfig(**train_lm.SIZES["small"] | {"depth": 2}, attention=attention, **train_lm.ENCODINGS[encoding])
    settings = train_lm.Config(
        text="", model=model, length=128, batch=8, steps=30, warmup=5, precision="bf16", device="cuda"
    )
    _, trained, history = train_lm.fit(settings, load_text(file), every=10, progress=False)
    assert history[-1]["train"] < 0.5 * history[0]["train"]
    assert next(trained.parameters()).dtype == torch.float32
