"""Options of all training commands: schedules, betas, weights, steps, checkpoints, trackers, interruption and help."""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import typer
from accelerate import PartialState, tracking
from accelerate.utils import LoggerType
from lrpe_md.scripts.train import trackers
from lrpe_md.scripts.train.app import TRAININGS, load_training
from lrpe_md.scripts.train.config import PANELS, Training, command, parse_betas
from lrpe_md.scripts.train.interruption import Interrupted
from lrpe_md.scripts.train.schedules import Schedule
from lrpe_md.scripts.train.tasks import digits
from lrpe_md.scripts.train.tasks.digits import DigitsTraining
from lrpe_md.scripts.train.weights import start_from
from test_train_loop import TOY, same, toy_batch, toy_train
from train_commands import Killed, invoke, output_of
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("few_sizes")
ROOT = Path(__file__).parents[2]
TINY = {"warmup": 1, "limit": 64, "device": "cpu", "progress": False, "tensorboard": False}

# --- schedules -------------------------------------------------------------------------------------------------------


def test_rates_of_each_schedule():
    make = partial(Schedule, length=10, warmup=2, start=0.25)
    assert make(kind="constant").list_rates(1.0, 10) == [0.25, 0.625] + [1.0] * 8
    wsd = make(kind="wsd", cooldown=0.4).list_rates(1.0, 11)
    assert wsd == pytest.approx([0.25, 0.625, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert make(kind="wsd", end=0.5, cooldown=0.2).list_rates(1.0, 12)[8:] == pytest.approx([1, 0.75, 0.5, 0.5])
    cosine = make(kind="cosine").list_rates(1.0, 11)
    assert cosine[:2] == pytest.approx([0.25, 0.625])
    assert cosine[5] == pytest.approx(0.5)
    assert cosine[10] == pytest.approx(0)


@pytest.mark.slow
def test_a_warmup_is_at_most_a_tenth_of_the_run(tmp_path, capsys):
    """After the warm-up, the cosine schedule begins near its maximum, without a drop."""
    make = partial(Training, out=tmp_path, warmup=20)
    assert make(steps=200).warmup_steps == 20
    assert make(steps=199).warmup_steps == 19
    assert make(steps=20).warmup_steps == 2
    assert make(steps=20, schedule="constant").warmup_steps == 20
    assert make(steps=21, schedule="wsd").warmup_steps == 20  # its rate doesn't drop, and a run can be extended
    assert make(steps=20, schedule="wsd").warmup_steps == 2
    assert make(steps=100, seconds=1.0).warmup_steps == 20
    assert make(steps=99, seconds=1.0).warmup_steps == 19
    for steps in (60, 300, 1500):
        rates = make(steps=steps, warmup=100).build_schedule().list_rates(1.0, steps)
        assert max(before - after for before, after in itertools.pairwise(rates)) < 0.03
    rates = make(steps=20).build_schedule().list_rates(1.0, 20)
    assert max(rates) == rates[2]
    assert rates[-1] < 0.05
    digits.run(DigitsTraining(out=tmp_path / "run", steps=2, **{**TINY, "warmup": 3}))
    assert "--warmup 3 reduced to 0, a tenth of the 2 steps\n" in capsys.readouterr().err
    digits.run(DigitsTraining(out=tmp_path / "one", steps=1, **{**TINY, "warmup": 2}))
    assert "a tenth of the 1 step\n" in capsys.readouterr().err
    digits.run(DigitsTraining(out=tmp_path / "other", steps=10, **TINY))
    assert "reduced" not in capsys.readouterr().err
    digits.run(DigitsTraining(out=tmp_path / "run", steps=2, **{**TINY, "warmup": 3}))  # finished, so it trains nothing
    with pytest.raises(typer.BadParameter, match="different settings"):
        digits.run(DigitsTraining(out=tmp_path / "run", steps=2, **{**TINY, "warmup": 3, "seed": 1}))
    assert "reduced" not in capsys.readouterr().err


def test_rates_of_groups_keep_their_scale():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [parameters[0]], "lr_scale": 0.1}, {"params": [parameters[1]]}], lr=1.0)
    Schedule(length=10, warmup=0, start=0.0, kind="wsd", cooldown=0.5).build(optimizer).step_update(9)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.2])


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_resumed_run_equals_uninterrupted_run_with_each_schedule(tmp_path, schedule):
    options = {**TOY, "schedule": schedule, "cooldown": 0.5, "betas": "0.8,0.9", "log_every": 1}
    whole = toy_train(Training(out=tmp_path / "whole", **options))
    assert (whole.history[-1]["lr"] < TOY["lr"]) == (schedule == "wsd")
    for kill in (3, 9):
        config = Training(out=tmp_path / f"{kill}", **options)
        with pytest.raises(Killed):
            toy_train(config, partial(toy_batch, kill_at=kill, counter=[]))
        same(toy_train(config), whole)


def test_an_unknown_schedule_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"--schedule: unknown 'cosin'; did you mean 'cosine'|--schedule"):
        Training(out=tmp_path, schedule="cosin")


def test_betas(tmp_path):
    trainer = toy_train(Training(out=tmp_path, **{**TOY, "betas": "0.8,0.95"}))
    assert {group["betas"] for group in trainer.inner.param_groups} == {(0.8, 0.95)}
    assert parse_betas("", "adamw") == ()
    for wrong in ("0.9", "0.9,1.0", "a,b", "-0.1,0.9"):
        with pytest.raises(typer.BadParameter, match=r"--betas: expected 2 numbers in \[0, 1\)"):
            parse_betas(wrong, "adamw")
    with pytest.raises(typer.BadParameter, match=r"--opt sgd has no betas; pass --betas=''$"):  # train lm sets betas
        parse_betas("0.9,0.95", "sgd")


# --- more steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_more_steps_equal_a_longer_run_if_the_rate_is_constant(tmp_path, accumulate, capsys):
    """The history is also the same, although a row was added when the shorter run ended."""
    options = {**TOY, "schedule": "constant", "accumulate": accumulate, "warmup": 5}
    whole = toy_train(Training(out=tmp_path / "whole", **{**options, "steps": 11}))
    for steps in (4, 7, 11):
        continued = toy_train(Training(out=tmp_path / "parts", **{**options, "steps": steps}))
    same(continued, whole)
    said = capsys.readouterr().err
    assert "Continuing the 4-step run from step 4 to step 7." in said
    assert "differs" not in said


def test_more_steps_of_another_schedule_are_announced(tmp_path, capsys):
    first = toy_train(Training(out=tmp_path / "run", **TOY))
    longer = toy_train(Training(out=tmp_path / "run", **{**TOY, "steps": 12, "log_every": 1}))
    assert first.step == 7
    assert longer.step == 12
    assert longer.history[-5]["lr"] > 1e-3  # the rate rises again
    said = " ".join(capsys.readouterr().err.split())
    assert "cosine schedule was planned for 7 steps, so the result differs" in said
    assert "--schedule constant avoids this in a new run." in said
    with pytest.raises(typer.BadParameter, match="steps: was 12, is now 8"):
        toy_train(Training(out=tmp_path / "run", **{**TOY, "steps": 8}))
    with pytest.raises(typer.BadParameter, match=r"different settings \(--seed: was 0, is now 1\)"):
        toy_train(Training(out=tmp_path / "run", **{**TOY, "steps": 13, "seed": 1}))


def test_wsd_continues_from_a_checkpoint_before_its_cooldown(tmp_path, capsys):
    options = {**TOY, "schedule": "wsd", "cooldown": 0.5, "keep_checkpoints": 9}
    toy_train(Training(out=tmp_path / "short", **{**options, "steps": 8}))
    whole = toy_train(Training(out=tmp_path / "whole", **{**options, "steps": 12}))
    (tmp_path / "long").mkdir()
    (tmp_path / "short" / "checkpoint-00000004.pt").rename(tmp_path / "long" / "checkpoint.pt")
    same(toy_train(Training(out=tmp_path / "long", **{**options, "steps": 12})), whole)
    assert "differs" not in capsys.readouterr().err


def test_an_interrupted_run_says_where_it_resumes(tmp_path, capsys):
    config = Training(out=tmp_path, **TOY)
    with pytest.raises(Killed):
        toy_train(config, batch=partial(toy_batch, kill_at=7, counter=[]))  # two micro-batches per step
    assert "Resuming" not in capsys.readouterr().err
    toy_train(config)
    assert "Resuming from step 2." in capsys.readouterr().err
    toy_train(config)
    assert "Resuming" not in capsys.readouterr().err  # it is finished


def test_options_newer_than_a_checkpoint_had_their_default(tmp_path):
    config = Training(out=tmp_path, **TOY)
    toy_train(config)
    from lrpe_md.scripts.train.checkpoint import read_checkpoint, save_checkpoint

    state = read_checkpoint(tmp_path / "checkpoint.pt")
    del state["settings"]["schedule"], state["settings"]["betas"]
    save_checkpoint(state, tmp_path / "checkpoint.pt", 1)
    assert toy_train(config).step == 7
    with pytest.raises(typer.BadParameter, match="schedule: was cosine, is now constant"):
        toy_train(Training(out=tmp_path, **TOY, schedule="constant"))


# --- checkpoints and weights -----------------------------------------------------------------------------------------


def test_last_checkpoints_are_kept(tmp_path):
    toy_train(Training(out=tmp_path / "run", **{**TOY, "save_every": 2, "keep_checkpoints": 2}))
    files = sorted(path.name for path in (tmp_path / "run").glob("*.pt"))
    assert files == ["checkpoint-00000006.pt", "checkpoint-00000007.pt", "checkpoint.pt"]
    assert [torch.load(tmp_path / "run" / name)["step"] for name in files] == [6, 7, 7]


def test_exported_weights_are_the_averaged_ones_and_start_another_run(tmp_path):
    digits.run(DigitsTraining(out=tmp_path / "a", steps=4, ema=0.5, **TINY))
    file = tmp_path / "a" / "model.safetensors"
    found, state = safetensors.torch.load_file(file), torch.load(tmp_path / "a" / "checkpoint.pt")
    assert found.keys() == state["average"].keys()
    assert all(torch.equal(value, found[name]) for name, value in state["average"].items())
    still = {**TINY, "steps": 1, "lr": 0.0, "weight_decay": 0.0}
    for name in ("file", "folder"):
        weights = str(file if name == "file" else tmp_path / "a")
        digits.run(DigitsTraining(out=tmp_path / name, weights=weights, **still))
        model = torch.load(tmp_path / name / "checkpoint.pt")["model"]
        assert all(torch.equal(value, model[key]) for key, value in found.items()), name


@pytest.mark.slow
def test_weights_of_another_encoding_are_announced(tmp_path, capsys):
    digits.run(DigitsTraining(out=tmp_path / "a", steps=1, **TINY))
    for weights in (tmp_path / "a", tmp_path / "a" / "model.safetensors"):
        capsys.readouterr()
        for encoding in ("rotate", "cosine"):
            out = tmp_path / f"{encoding}-{weights.suffix}"
            digits.run(DigitsTraining(out=out, steps=1, weights=str(weights), encoding=encoding, **TINY))
            line = f"{weights} was trained with --encoding rotate; this training uses cosine"
            assert (line in capsys.readouterr().err) == (encoding == "cosine")


def test_weights_fit_models_that_are_no_vision_transformers(tmp_path):
    from lrpe_md.models.lm import CausalLm, LmConfig

    models = [CausalLm(LmConfig(dim=32, depth=depth, num_heads=4, hidden=64)) for depth in (1, 1, 2)]
    safetensors.torch.save_model(models[0], str(tmp_path / "lm.safetensors"))
    start_from(models[1], tmp_path / "lm.safetensors")
    weights = models[0].state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in models[1].state_dict().items())
    with pytest.raises(typer.BadParameter, match="different architecture"):
        start_from(models[2], tmp_path / "lm.safetensors")


# --- trackers --------------------------------------------------------------------------------------------------------


class Recorder(tracking.GeneralTracker):
    """Stand-in for a tracker from another library."""

    name = "wandb"
    requires_logging_directory = False
    calls: list = []  # noqa: RUF012

    def __init__(self, run_name, **about):
        super().__init__()
        self.calls.append(("init", run_name, about["resume"]))

    @property
    def tracker(self):
        return self

    def start(self):
        pass

    def store_init_configuration(self, values):
        self.calls.append(("settings", values))

    def log(self, values, step=None, **about):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))


def test_several_trackers(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    available = [*tracking.get_available_trackers(), LoggerType.WANDB]
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: available)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: available)
    monkeypatch.setattr(Recorder, "calls", [])
    plain = toy_train(Training(out=tmp_path / "plain", **TOY))
    logged = toy_train(Training(out=tmp_path / "run", **TOY, log_with="tensorboard,wandb"))
    same(plain, logged)
    kinds = [call[0] for call in Recorder.calls]
    assert kinds == ["init", "settings", "log", "log", "log", "finish"]
    assert Recorder.calls[0][1:] == ("lrpe-md", "allow")
    assert Recorder.calls[1][1]["lr"] == TOY["lr"]
    assert [call[1] for call in Recorder.calls[2:5]] == [3, 6, 7]
    assert list((tmp_path / "run" / "tensorboard").rglob("events.*"))


def test_unknown_and_missing_trackers(tmp_path, monkeypatch):
    command = ["digits", "--out", tmp_path / "run", "--device", "cpu"]
    said = output_of(*command, "--log-with", "tensorbord")
    assert "unknown 'tensorbord'" in said
    assert "did you mean 'tensorboard'" in said
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    assert "these trackers are not installed: wandb" in output_of(*command, "--log-with", "wandb")
    assert not (tmp_path / "run").exists()


# --- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_saves_and_resumes(tmp_path, number):
    whole = toy_train(Training(out=tmp_path / "whole", **TOY))
    config, calls = Training(out=tmp_path / "run", **{**TOY, "save_every": 100}), []

    def interrupted(indices, draws):
        calls.append(1)
        if len(calls) == 5:  # in the middle of the third step, which has two micro-batches
            os.kill(os.getpid(), number)
        return toy_batch(indices, draws)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=r"at step 3; the checkpoint is saved") as stopped:
        toy_train(config, interrupted)
    assert stopped.value.number == number
    copied = pickle.loads(pickle.dumps(stopped.value))  # as from a worker of `ablate run`
    assert (str(copied), copied.number) == (str(stopped.value), number)
    assert signal.getsignal(number) == before
    assert torch.load(config.out / "checkpoint.pt")["step"] == 3
    same(toy_train(config), whole)


def test_second_ctrl_c_stops_at_once(tmp_path):
    config = Training(out=tmp_path / "run", **TOY)

    def interrupted(indices, draws):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return toy_batch(indices, draws)

    with pytest.raises(KeyboardInterrupt) as stopped:
        toy_train(config, interrupted)
    assert not isinstance(stopped.value, Interrupted)
    assert not (config.out / "checkpoint.pt").exists()


@pytest.mark.slow
def test_ctrl_c_of_the_command(tmp_path):
    """The first Ctrl-C saves a checkpoint, the message says how to resume, and the same command resumes."""
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "scripts.train", "digits", "--out", str(out), "--steps", "40000", "--device", "cpu",
        "--no-tensorboard", "--save-every", "7", "--log-every", "50", "--limit", "64", "--schedule", "constant",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (out / "checkpoint.pt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 130, said
    assert "to resume, run the same command" in " ".join(said.split())
    assert "Traceback" not in said
    state = torch.load(out / "checkpoint.pt")
    assert 0 < state["step"] < 40000


@pytest.mark.parametrize("is_main", [False, True])
def test_only_the_main_process_says_how_to_resume(is_main, tmp_path, monkeypatch):
    def stop(config):
        raise Interrupted("Interrupted at step 1", signal.SIGINT)

    monkeypatch.setattr(PartialState, "is_main_process", is_main)
    app = typer.Typer()
    command(app, Training, "toy")(stop)
    result = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert result.exit_code == 128 + signal.SIGINT
    assert ("to resume" in result.output) == is_main


# --- the end, and help -----------------------------------------------------------------------------------------------


def test_training_ends_with_a_short_table(tmp_path):
    out = tmp_path / "run"
    done = invoke("digits", "--out", out, "--steps", 2, "--limit", 64, "--device", "cpu", "--no-tensorboard")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) < 30
    assert any("accuracy" in line and "extrapolated" in line and "rescaled" in line for line in lines)
    result = json.loads((out / "result.json").read_text())
    shown = next(line.split() for line in lines if line.split()[:1] == ["10x10"])
    assert [float(each) for each in shown[1:]] == pytest.approx(
        [result["accuracy"][name]["10x10"] for name in ("extrapolated", "rescaled")], rel=1e-3
    )
    assert "{" not in done.stdout


@pytest.mark.parametrize("task", TRAININGS)
def test_help_is_grouped_and_starts_with_capitals(task):
    shown = output_of(task, "--help", code=0)
    assert f"Command: lrpe-md train {task} --" in shown
    text = typer.main.get_command(load_training(task, TRAININGS[task][0])).help or ""
    assert not any("\n" in paragraph for paragraph in text.split("\n\n"))  # the terminal wraps lines
    assert all(f"─ {panel} ─" in shown for panel in PANELS)
    assert [shown.index(f"─ {panel} ─") for panel in PANELS] == sorted(shown.index(f"─ {panel} ─") for panel in PANELS)
    assert "…" not in invoke(task, "--help", columns=80).output  # no word is cut


@pytest.mark.parametrize("config", [Training, DigitsTraining])
def test_help_of_an_option_is_a_sentence(config):
    for field in fields(config):
        text = field.metadata["help"]
        assert text[0].isupper(), field.name
        assert text.endswith("."), field.name
        assert not text.startswith(("Of ", "Where ", "What ", "Those ", "How ")), field.name
