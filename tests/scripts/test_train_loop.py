"""The shared training loop on a toy model: resuming, accumulation, several processes, and the draws of each step."""

import multiprocessing
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from filelock import FileLock, Timeout
from lrpe_md.scripts.train import loop
from lrpe_md.scripts.train.config import Training, settings_of
from lrpe_md.scripts.train.history import HistoryFile
from lrpe_md.scripts.train.loop import Trainer
from lrpe_md.scripts.train.order import divide, prepare_ahead, shuffle
from processes import free_port
from torch import nn
from torch.nn import functional as F
from train_commands import Killed


class Toy(nn.Module):
    """Model with dropout, whose random draws must also be reproduced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x))


X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 2


def toy_batch(indices, draws, *, kill_at=None, counter=None):
    if counter is not None:
        counter.append(1)
        if len(counter) > kill_at:
            raise Killed
    noise = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(int(draw))) for draw in draws])
    return X[indices] + 0.1 * noise, Y[indices]


def toy_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def toy_train(config, batch=toy_batch, validate=None):
    accelerator = loop.start(config)
    loop.set_seed(config.seed)
    trainer = Trainer(config, accelerator, Toy(), settings_of(config))
    trainer.fit(partial(shuffle, len(X), config.batch, config.seed), batch, toy_loss, validate)
    return trainer


TOY = {
    "steps": 7, "batch": 12, "accumulate": 2, "warmup": 2, "lr": 1e-2, "device": "cpu", "save_every": 2, "log_every": 3,
    "tensorboard": False,
}  # fmt: skip


def same(a: Trainer, b: Trainer) -> None:
    for x, y in ((a.raw, b.raw), (a.averaged, b.averaged)):
        for name, value in x.state_dict().items():
            assert torch.equal(value, y.state_dict()[name]), name
    assert a.history == b.history


def test_a_run_resumes_after_a_validation_with_numpy_numbers(tmp_path):
    """torch.load rejects NumPy numbers in a checkpoint."""
    accuracies = iter(np.float64([0.25, 0.5, 0.75]))
    options = {**TOY, "out": tmp_path, "validate_every": 4, "schedule": "constant"}
    toy_train(Training(**{**options, "steps": 4}), validate=lambda: {"accuracy": next(accuracies)})
    trainer = toy_train(Training(**{**options, "steps": 8}), validate=lambda: {"accuracy": next(accuracies)})
    assert [row["accuracy"] for row in trainer.history if "accuracy" in row] == [0.25, 0.5]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_history_lists_the_learning_rate_of_each_step(tmp_path, monkeypatch, schedule):
    used, step = [], torch.optim.AdamW.step

    def recorded(self, *args, **options):
        used.append(self.param_groups[0]["lr"])
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    trainer = toy_train(Training(out=tmp_path, **{**TOY, "steps": 20, "log_every": 1, "schedule": schedule}))
    assert [row["lr"] for row in trainer.history] == used
    assert used[-1] > 0


@pytest.fixture
def clock(monkeypatch):
    """Fake clock that advances by 0.25 s per step."""
    now = [0.0]

    def stepped(self, *args, advance=Trainer._advance):
        now[0] += 0.25
        return advance(self, *args)

    monkeypatch.setattr(Trainer, "_advance", stepped)
    monkeypatch.setattr(Trainer, "_now", lambda self: now[0])
    return now


def test_time_budget_is_converted_to_steps(tmp_path, clock):
    """The first steps do not count. The schedule is the same as for a run with as many steps."""
    timed = toy_train(Training(out=tmp_path / "timed", **{**TOY, "seconds": 10.0, "log_every": 1}))
    assert timed.step == loop.STARTING + 40
    assert timed.counted_seconds() == pytest.approx(10)
    plain = Training(out=tmp_path / "plain", **{**TOY, "steps": timed.step, "log_every": 1})
    rates = [[row["lr"] for row in trainer.history] for trainer in (timed, toy_train(plain))]
    planned = loop.STARTING + loop.EVERY
    assert rates[0][planned:] == pytest.approx(rates[1][planned:])
    assert rates[0][-1] < 1e-4 < rates[0][planned]


def test_plan_accounts_for_slow_steps(tmp_path, clock):
    timed = toy_train(Training(out=tmp_path, **{**TOY, "seconds": 0.5}))
    assert timed.step == loop.STARTING + loop.EVERY + 1


@pytest.mark.slow
def test_plan_is_revised_after_slow_first_steps(tmp_path, clock, monkeypatch):
    """Steps take ten times as long while other runs compile."""

    def stepped(self, *args, advance=Trainer._advance):
        clock[0] += 2.25 if self.step < 20 else 0.0  # in addition to 0.25
        return advance(self, *args)

    monkeypatch.setattr(Trainer, "_advance", stepped)
    trainer = toy_train(Training(out=tmp_path, **{**TOY, "seconds": 100.0, "log_every": 1}))
    assert trainer.counted_seconds() == pytest.approx(100, rel=0.05)
    assert trainer.step > 300
    assert trainer.history[-1]["lr"] < 1e-4


def test_checkpoint_stores_the_plan(tmp_path, clock):
    options = {**TOY, "seconds": 10.0, "accumulate": 1}
    whole = toy_train(Training(out=tmp_path / "whole", **options))
    config = Training(out=tmp_path / "cut", **options)
    with pytest.raises(Killed):
        toy_train(config, partial(toy_batch, kill_at=31, counter=[]))
    clock[0] += 100  # time between runs does not count
    resumed = toy_train(config)
    same(whole, resumed)
    assert resumed.counted_seconds() == pytest.approx(10, abs=0.25)  # its first step is not counted


@pytest.mark.slow
@pytest.mark.parametrize("kill", [14, 24])
def test_interrupted_run_keeps_its_time_budget(tmp_path, clock, kill):
    """Time before the interruption counts, even if there was no plan yet."""
    config = Training(out=tmp_path, **{**TOY, "seconds": 100.0, "accumulate": 1})
    with pytest.raises(Killed):
        toy_train(config, partial(toy_batch, kill_at=kill, counter=[]))
    before = torch.load(config.out / "checkpoint.pt")["counted"]
    assert before == pytest.approx((kill - loop.STARTING) / 4)
    resumed = toy_train(config)
    assert resumed.counted_seconds() == pytest.approx(100)
    assert resumed.step == 2 * loop.STARTING + 400


def is_taken(turn: Path) -> bool:
    try:
        with FileLock(turn, timeout=0):
            return False
    except Timeout:
        return True


def test_trainings_of_equal_time_take_turns(tmp_path, clock):
    """A run holds the lock from the second step, when all runs have compiled, until the end of the evaluation."""
    turn, taken = tmp_path / "turn", []

    def batch(*args):
        taken.append(is_taken(turn))
        return toy_batch(*args)

    trainer = toy_train(Training(out=tmp_path / "a", **{**TOY, "accumulate": 1, "seconds": 1.0, "turn": turn}), batch)
    assert taken == [False] + [True] * (trainer.step - 1)
    assert trainer.step > loop.STARTING
    assert is_taken(turn)
    trainer.end_turn()
    assert not is_taken(turn)


def test_cuda_graphs_need_compiled_steps(tmp_path):
    for wrong in ({}, {"compile": True, "accumulate": 2}):
        with pytest.raises(typer.BadParameter, match="--cuda-graphs: expected --compile and --accumulate 1"):
            Training(out=tmp_path, cuda_graphs=True, **wrong)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run_equals_uninterrupted_run(tmp_path, workers):
    whole = toy_train(Training(out=tmp_path / "whole", **TOY))
    rows = (tmp_path / "whole" / "history.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "3", "6", "7"]
    for kill in range(14):
        config = Training(out=tmp_path / f"{kill}", workers=workers, **TOY)
        with pytest.raises(Killed):
            toy_train(config, partial(toy_batch, kill_at=kill, counter=[]))
        history, logged = config.out / "history.csv", kill // 2 // TOY["log_every"]
        if not workers:  # workers die a few batches ahead of the step
            assert (history.read_text().splitlines() if history.exists() else []) == rows[: logged and logged + 1]
        torch.manual_seed(kill)  # a new process has a different random state
        same(toy_train(config), whole)
        assert history.read_text().splitlines() == rows
    other = toy_train(Training(out=tmp_path / "other", **{**TOY, "seed": 1}))
    assert not torch.equal(other.raw.head.weight, whole.raw.head.weight)


def test_run_without_a_checkpoint_starts_again(tmp_path):
    whole = toy_train(Training(out=tmp_path / "whole", **TOY))
    config = Training(out=tmp_path / "run", **{**TOY, "save_every": 100})
    with pytest.raises(Killed):
        toy_train(config, partial(toy_batch, kill_at=8, counter=[]))
    assert [p.name for p in config.out.iterdir()] == ["history.csv"]
    same(toy_train(config), whole)
    assert (config.out / "history.csv").read_text() == (tmp_path / "whole" / "history.csv").read_text()


def test_history_gains_columns(tmp_path):
    """Rows of a resumed run replace those after its checkpoint, and a new column is added to the earlier rows."""
    path, history = tmp_path / "history.csv", [{"step": 1, "loss": 0.5}]
    file = HistoryFile(path)
    file.add(history)
    file.add([*history, {"step": 2, "loss": 0.4, "held_out": 0.6}])
    again = HistoryFile(path)
    again.write(history)
    history.append({"step": 2, "loss": 0.3, "held_out": 0.6})
    again.add(history)
    history.append({"step": 3, "loss": 0.2})
    again.add(history)
    assert path.read_text().splitlines() == ["step,loss,held_out", "1,0.5,", "2,0.3,0.6", "3,0.2,"]
    again.write([])
    assert not path.exists()


def test_failed_save_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    whole = toy_train(Training(out=tmp_path / "whole", **TOY))
    config, save, calls = Training(out=tmp_path / "run", **TOY), torch.save, []

    def torn(state, path):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError("disk full")
        save(state, path)

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        toy_train(config)
    assert sorted(p.name for p in config.out.iterdir()) == ["checkpoint.pt", "history.csv"]
    assert torch.load(config.out / "checkpoint.pt")["step"] == 2
    same(toy_train(config), whole)


def test_no_checkpoint_of_a_diverged_run(tmp_path):
    config = Training(out=tmp_path / "run", **{**TOY, "log_every": 7})

    def diverging(indices, draws, counter=[]):  # noqa: B006
        counter.append(1)
        return X[indices] * (float("nan") if len(counter) > 6 else 1), Y[indices]

    with pytest.raises(FloatingPointError, match="after 4 steps"):
        toy_train(config, diverging)
    assert torch.load(config.out / "checkpoint.pt")["step"] == 2


def test_accumulation_equals_a_larger_batch(tmp_path):
    still = {**TOY, "steps": 3}
    training_mode = nn.Dropout.forward
    try:
        nn.Dropout.forward = lambda self, x: x
        one = toy_train(Training(out=tmp_path / "one", **{**still, "accumulate": 1}))
        three = toy_train(Training(out=tmp_path / "three", **{**still, "accumulate": 3}))
    finally:
        nn.Dropout.forward = training_mode
    for a, b in zip(one.raw.parameters(), three.raw.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_every_epoch_is_a_permutation_shared_by_the_processes():
    def steps(count, **kwargs):
        start = kwargs.pop("start", 0)
        return [next(it) for it in [divide(shuffle(20, 6, 3, start), **kwargs)] for _ in range(count)]

    single = steps(9)
    for epoch in range(3):
        seen = np.concatenate([indices for indices, _ in single[3 * epoch : 3 * epoch + 3]])
        assert len(set(seen.tolist())) == 18
    for (a, x), (b, y) in zip(single[4:], steps(5, start=4), strict=True):
        assert a.tolist() == b.tolist()
        assert x.tolist() == y.tolist()
    parts = [steps(6, start=2, accumulate=3, world=2, rank=rank) for rank in range(2)]
    for k in range(2):
        joined = [part[3 * k + m] for m in range(3) for part in parts]
        assert np.concatenate([i for i, _ in joined]).tolist() == single[2 + k][0].tolist()
        assert np.concatenate([d for _, d in joined]).tolist() == single[2 + k][1].tolist()
    with pytest.raises(typer.BadParameter, match="expected at most 5, the number of samples"):
        next(shuffle(5, 6, 0))


def test_prefetched_batches_keep_order_and_errors():
    chosen = ((i,) for i in range(20))
    assert list(prepare_ahead(lambda i: i * i, chosen, 3)) == [i * i for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        list(prepare_ahead(lambda i: 1 // (3 - i), ((i,) for i in range(20)), 2))


SHARDINGS = ("ddp", "fsdp")


def worker(rank: int, ports: list[int], out: Path) -> None:
    from accelerate.state import AcceleratorState

    nn.Dropout.forward = lambda self, x: x  # dropout differs between processes
    for sharding, port in zip(SHARDINGS, ports, strict=True):
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
        )  # fmt: skip
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = toy_train(Training(out=out / sharding, sharding=sharding, **TOY))
        if sharding == "fsdp":
            assert all(hasattr(p, "placements") for p in trainer.raw.parameters())
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, monkeypatch):

    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    whole = toy_train(Training(out=tmp_path / "whole", **TOY))
    context = multiprocessing.get_context("spawn")  # a fork can't use autograd after its parent has
    ports = [free_port() for _ in SHARDINGS]
    processes = [context.Process(target=worker, args=(rank, ports, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    for sharding in SHARDINGS:
        state = torch.load(tmp_path / sharding / "checkpoint.pt")
        for part, module in (("model", whole.raw), ("average", whole.averaged)):
            for name, value in module.state_dict().items():
                torch.testing.assert_close(state[part][name], value, rtol=1e-3, atol=1e-5)
