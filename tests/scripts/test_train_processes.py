"""Every task, from start to result.json, on two processes with TensorBoard and both kinds of sharding."""

import importlib.util
import json
import multiprocessing
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from lrpe_md.scripts.ablate.tasks import TASKS
from PIL import Image
from test_train_image import write_idx
from test_train_video import DECODERS, brightening, write_video

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")

SHARDINGS = ("ddp", "fsdp")


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
        "lm": str(text),
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


def flags(options: dict) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def on_two_processes(arguments: list[str]) -> list[int | None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
@pytest.mark.parametrize("task", TASKS)
def test_from_start_to_result(task: str, sharding: str, data: dict[str, str], tmp_path: Path) -> None:
    if task not in data:
        pytest.skip("needs PyAV or OpenCV")
    few = {**TASKS[task].smoke, "ema": 0.5, "data": data[task], "out": tmp_path / "run", "sharding": sharding}
    arguments = [task, *flags({**few, "device": "cpu", "save_every": 1})]
    assert on_two_processes(arguments) == [0, 0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["processes"] == 2
    values = [value for each in TASKS[task].values(result).values() for value in each.values()]
    assert np.isfinite(values).all()
    assert list((tmp_path / "run" / "tensorboard").rglob("events.*"))
    if sharding == "ddp":  # one process reads the same weights from the file that two have written
        given = {"digits": data[task], "video": [Path(data[task])]}.get(task, Path(data[task]))
        few |= {"data": given, "device": "cpu", "tensorboard": False, "progress": False}
        again = TASKS[task].values(TASKS[task].run(TASKS[task].config(**few)))
        for positions, found in TASKS[task].values(result).items():
            assert again[positions] == pytest.approx(found, rel=1e-4)
