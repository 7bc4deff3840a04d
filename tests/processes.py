"""Run a test in several processes, forked from a server that has imported the slow modules once.

If the test's own process has used autograd, its forks can't.
"""

import multiprocessing
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["free_port", "run_processes"]


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_processes(
    run: Callable[..., None], args: Sequence[Any], folder: Path, imported: Sequence[str], count: int = 2
) -> None:
    """Run ``run(rank, *args)`` in several processes; it writes its failures to ``folder/failed{rank}``.

    imported: modules that the server imports. Without any, processes are spawned, which is required for processes that
    use a GPU.
    """
    multiprocessing.set_forkserver_preload(list(imported))
    method = "forkserver" if imported else "spawn"
    torch.multiprocessing.start_processes(run, args=tuple(args), nprocs=count, start_method=method)
    failed = "".join((folder / f"failed{rank}").read_text() for rank in range(count))
    assert not failed, f"\n{failed}"
