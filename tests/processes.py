"""Several processes for one test: forks of a server that has imported, once, what takes longest.

A fork of the test's own process can't differentiate where that one has.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["run_two"]


def run_two(run: Callable[..., None], args: Sequence[Any], folder: Path, imported: Sequence[str]) -> None:
    """``run(rank, *args)``, which writes what failed into ``folder/failed{rank}``.

    imported: modules; none for processes with a GPU, which are spawned, since what has asked for one can't be forked.
    """
    multiprocessing.set_forkserver_preload(list(imported))
    method = "forkserver" if imported else "spawn"
    torch.multiprocessing.start_processes(run, args=tuple(args), nprocs=2, start_method=method)
    failed = "".join((folder / f"failed{rank}").read_text() for rank in range(2))
    assert not failed, f"\n{failed}"
