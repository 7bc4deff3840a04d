"""scripts.bench train-loop on a CPU."""

import csv
import time

import numpy as np
import pytest
import torch
from lrpe_md.scripts.bench import train_loop
from lrpe_md.scripts.bench.app import app
from lrpe_md.scripts.train.data.values import Latents
from typer.testing import CliRunner


def test_row(tmp_path):
    out = tmp_path / "loop.csv"
    args = [
        "train-loop",
        "--device",
        "cpu",
        "--smoke",
        "--batch",
        "4",
        "--number",
        "64",
        "--steps",
        "3",
        "--turns",
        "2",
    ]
    done = CliRunner().invoke(app, [*args, "--out", str(out), "--commit", "abc"])
    assert done.exit_code == 0, done.output
    with out.open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == train_loop.COLUMNS
    assert row["commit"] == "abc"
    assert all(float(row[name]) > 0 for name in ("train_ms", "bare_ms", "ratio", "loaded_per_second"))
    assert float(row["trained_per_second"]) == pytest.approx(4e3 / float(row["train_ms"]))


def test_turns_time_both_loops_without_the_first_steps(monkeypatch):
    """On this clock, a training step takes one second, and a step of the bare loop takes ten."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def advance(seconds):
        clock[0] += seconds

    run = train_loop.Turns(lambda: advance(10), steps=2, warmup=3, number=2, synchronize=lambda: None)
    assert run.total == 15
    for _ in range(run.total):
        advance(1)
        assert not run.after_step()
    assert run.train_times == [1000.0, 1000.0]
    assert run.bare_times == [10_000.0, 10_000.0]
    assert clock[0] == 15 + 10 * (1 + 2 * 2)


def test_bare_step_is_a_step_of_the_training(tmp_path):
    """Both loops change the same model. The bare loop also updates the average."""
    data = tmp_path / "latents"
    data.mkdir()
    train_loop.write_random_latents(data, 32, 8)
    latents = Latents(data, False, torch.device("cpu"))
    assert latents.batch(np.arange(3), 64, np.arange(3)).shape == (3, 4, 8, 8)
    config = train_loop.DiffusionTraining(
        data=data, out=tmp_path / "run", batch=4, device="cpu", tensorboard=False, progress=False, **train_loop.TINY
    )
    source = train_loop.diffusion.open_source(config, torch.device("cpu"))
    model = train_loop.diffusion.build(config, source)
    trainer = train_loop.Trainer(config, train_loop.begin(config), model, {})
    before = {name: value.clone() for name, value in trainer.raw.state_dict().items()}
    average = {name: value.clone() for name, value in trainer.averaged.state_dict().items()}
    samples = train_loop.diffusion.batch(config, source, np.arange(4), np.arange(4))
    step = train_loop.make_bare_step(config, trainer, samples)
    step()
    trainer.step = 5
    step()
    assert any(not torch.equal(value, before[name]) for name, value in trainer.raw.state_dict().items())
    assert any(not torch.equal(value, average[name]) for name, value in trainer.averaged.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.raw.parameters())
