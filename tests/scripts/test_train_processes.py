"""Every task, from start to result.json, on two processes with TensorBoard and both kinds of sharding."""

import importlib.util
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lrpe_md.scripts.ablate.tasks import TASKS
from PIL import Image
from processes import free_port
from test_streams import write_shards
from test_train_clips import write_classes
from test_train_image import write_idx
from test_train_video import DECODERS, brightening, write_video
from train_commands import flags

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")

SHARDINGS = ("ddp", "fsdp")
LAYERS = {  # layers of different kinds, with learned decays
    "lm": {"attention": "linear,softmax", "memory": "decay=retnet,learnable=true"},
    "video": {
        "depth": 2, "attention": "linear,softmax", "memory": "rule=delta,decay=retnet,learnable=true", "causal": True,
        "window": 2, "qk_norm": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    captioned = folder / "captioned"
    captioned.mkdir()
    for i in range(16):
        Image.new("RGB", (8, 8), (16 * i, 255 - 16 * i, 90)).save(captioned / f"{i}.png")
        (captioned / f"{i}.txt").write_text(f"colour {i}")
    text = folder / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8).tobytes())
    found = {
        "digits": "digits", "image": str(write_idx(folder / "idx", train=24, test=8)), "diffusion": str(captioned),
        "lm": str(text), "recall": "8x4x4",
    }  # fmt: skip
    if DECODERS:
        found["video"] = str(write_video(folder / "grey.mp4", brightening(160), DECODERS[0]))
    return found


def run_program(rank: int, port: int, arguments: list[str]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    from lrpe_md.scripts.cli import run_program
    from lrpe_md.scripts.train import work

    torch.set_num_threads(1)
    write_result = work.write_result

    def checked(*args: object) -> None:
        # evaluations gather weights, which NCCL can't do without a process group
        assert torch.distributed.is_initialized()
        write_result(*args)

    work.write_result = checked
    run_program("train", arguments)


def on_two_processes(arguments: list[str]) -> list[int | None]:
    port = free_port()
    # A fork can't use autograd after its parent has, so processes are forked from a server that has only imported.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lrpe_md.scripts.train.app", "torch.distributed.fsdp", "timm", "tensorboard"])
    processes = [context.Process(target=run_program, args=(rank, port, arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    for process in processes:
        process.kill()
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("task", "layers"), [*((task, {}) for task in TASKS), *LAYERS.items()])
def test_from_start_to_result(
    task: str, layers: dict[str, Any], sharding: str, data: dict[str, str], tmp_path: Path
) -> None:
    if task not in data:
        pytest.skip("needs PyAV or OpenCV")
    few = {**TASKS[task].smoke, **layers, "ema": 0.5, "data": data[task], "out": tmp_path / "run", "sharding": sharding}
    arguments = [task, *flags({**few, "device": "cpu", "save_every": 1})]
    assert on_two_processes(arguments) == [0, 0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["processes"] == 2
    values = [value for each in TASKS[task].values(result).values() for value in each.values()]
    assert np.isfinite(values).all()
    assert list((tmp_path / "run" / "tensorboard").rglob("events.*"))
    if sharding == "ddp":  # a single process reads the same weights from a file that two have written
        given = {"digits": "digits", "recall": "8x4x4", "video": [Path(data[task])]}.get(task, Path(data[task]))
        few |= {"data": given, "device": "cpu", "tensorboard": False, "progress": False}
        again = TASKS[task].values(TASKS[task].run(TASKS[task].config(**few)))
        for positions, found in TASKS[task].values(result).items():
            assert again[positions] == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("kind", ["shards", "clips"])
def test_streams_and_clips_on_two_processes_resume(kind: str, tmp_path: Path) -> None:
    """With two processes and TensorBoard, a resumed run ends with the same weights as an uninterrupted run."""
    if kind == "shards":
        data = {"data": write_shards(tmp_path / "data"), "size": 8, "test_sizes": "", "workers": 1, "mixup": 0.8,
                "augment": "rand-m9-n1", "layer_decay": 0.8}  # fmt: skip
    else:
        if not DECODERS:
            pytest.skip("needs PyAV or OpenCV")
        data = {"data": write_classes(tmp_path / "data"), "size": 8, "test_size": 16, "frames": 4, "every": 1,
                "task": "labels", "cache": "none"}  # fmt: skip
    options = {
        **data, "batch": 8, "patch": 4, "dim": 48, "depth": 1, "heads": 2, "warmup": 1, "device": "cpu", "ema": 0.5,
        "schedule": "constant", "betas": "0.8,0.9", "log_with": "tensorboard", "save_every": 1, "keep_checkpoints": 2,
    }  # fmt: skip
    task = {"shards": "image", "clips": "video"}[kind]
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        assert on_two_processes([task, *flags({**options, "steps": steps, "out": tmp_path / name})]) == [0, 0]
    states = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "parts")]
    for part in ("model", "average"):
        assert all(torch.equal(value, states[1][part][name]) for name, value in states[0][part].items())
    assert len(list((tmp_path / "parts").glob("checkpoint-*.pt"))) == 2
    assert list((tmp_path / "parts" / "tensorboard").rglob("events.*"))
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["processes"] == 2


def interrupted_worker(rank: int, port: int, out: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    from lrpe_md.scripts.train.config import Training
    from test_train_loop import TOY, toy_batch, toy_train

    calls = []

    def batch(*args):
        calls.append(1)
        if rank == 1 and len(calls) == 3:  # only one process receives the signal
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_batch(*args)

    try:
        toy_train(Training(out=out, **{**TOY, "accumulate": 1, "steps": 20, "save_every": 100}), batch)
    except KeyboardInterrupt as stopped:
        (out / f"stopped{rank}").write_text(str(stopped))


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path: Path) -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=interrupted_worker, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    assert [process.exitcode for process in processes] == [0, 0]
    assert ["at step 4;" in (tmp_path / f"stopped{rank}").read_text() for rank in range(2)] == [True, True]
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 4
