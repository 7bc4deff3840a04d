"""Checkpoints. Each checkpoint is a single file with unsharded tensors and a digest of its content."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from torch import Tensor, nn

from ..common.folder import save_whole

FORMAT = 3
M = TypeVar("M", bound=nn.Module)


def save_checkpoint(state: dict[str, Any], path: Path, keep: int) -> None:
    """Write a checkpoint. If ``keep`` is above 1, also keep the latest ``keep`` checkpoints as checkpoint-STEP.pt."""
    state["digest"] = digest_of(state)
    save_whole(path, partial(write_checkpoint, state))
    if keep < 2:
        return
    save_whole(path.with_name(f"checkpoint-{state['step']:08}.pt"), partial(_link, path))
    for old in sorted(path.parent.glob("checkpoint-*.pt"))[:-keep]:
        old.unlink()


def _link(path: Path, part: Path) -> None:
    try:
        os.link(path, part)
    except OSError:  # the file system does not support links
        shutil.copyfile(path, part)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by :meth:`Trainer.save`. Tensors are loaded to the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling other data can raise any exception
        raise typer.BadParameter(f"{path} can't be read ({first_sentence(error)}); delete it to start over") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise typer.BadParameter(f"{path} is not a checkpoint from this version; choose another --out")
    if state.pop("digest", None) != digest_of(state):
        raise typer.BadParameter(f"{path} is damaged: its content differs from what was saved; delete it to start over")
    return state


def restore(model: M, state: dict[str, Any], *, average: bool = True) -> M:
    """Load the weights of a checkpoint into a model, and return the model in evaluation mode.

    Load averaged weights if ``average`` is True and the checkpoint contains them.
    """
    model.load_state_dict(state.get("average", state["model"]) if average else state["model"])
    return model.eval()


def first_sentence(error: Exception) -> str:
    """Return the type and the first sentence of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]


def write_checkpoint(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # raised by torch's writer if the disk is full
        raise OSError(errno.EIO, f"{path.name}: {error}".splitlines()[0]) from error


def digest_of(state: Any) -> str:
    """Return a hash of all names, numbers and tensors in a checkpoint."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            add((str(value.dtype), tuple(value.shape)))
            content: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(content)
        elif isinstance(value, dict):
            for name, each in value.items():
                digest.update(repr(name).encode())
                add(each)
        elif isinstance(value, (list, tuple)):
            digest.update(f"{len(value)}:".encode())
            for each in value:
                add(each)
        else:
            digest.update(f"{value!r};".encode())

    add(state)
    return digest.hexdigest()
