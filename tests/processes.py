"""Run a test in several processes, which are forked from a server that has imported slow modules once.

The test's own process is not forked, because autograd fails in forks of a process that has used it.
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
    """Call ``run(rank, *args)`` in several processes, and fail if it wrote anything to ``folder/failed{rank}``.

    ``imported`` names the modules that the server imports. If it is empty, processes are spawned, as GPU tests require.
    """
    multiprocessing.set_forkserver_preload(list(imported))
    method = "forkserver" if imported else "spawn"
    torch.multiprocessing.start_processes(run, args=tuple(args), nprocs=count, start_method=method)
    failed = "".join((folder / f"failed{rank}").read_text() for rank in range(count))
    assert not failed, f"\n{failed}"
