"""Run a test in several processes, forked from a server that has imported the slow modules once.

Forks of the test's own process can't use autograd once it has.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["run_two"]


def run_two(run: Callable[..., None], args: Sequence[Any], folder: Path, imported: Sequence[str]) -> None:
    """Run ``run(rank, *args)`` in two processes; it writes its failures to ``folder/failed{rank}``.

    imported: modules that the server imports. Without any, processes are spawned, which is required for processes that
    use a GPU.
    """
    multiprocessing.set_forkserver_preload(list(imported))
    method = "forkserver" if imported else "spawn"
    torch.multiprocessing.start_processes(run, args=tuple(args), nprocs=2, start_method=method)
    failed = "".join((folder / f"failed{rank}").read_text() for rank in range(2))
    assert not failed, f"\n{failed}"
