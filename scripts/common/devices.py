"""Device selection and transfers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import typer
from torch import Tensor

from .options import choose


def choose_device(wanted: str) -> torch.device:
    """Return the device for a value of the option --device: auto, cpu or cuda."""
    choose("--device", [wanted], ("auto", "cpu", "cuda"))
    if wanted == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device: cuda needs a GPU, but PyTorch finds none; use cpu or auto")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def choose_gpu(wanted: str, smoke: bool) -> torch.device:
    """Return the device for a benchmark's option --device. With --smoke, cpu is also allowed."""
    choose("--device", [wanted], ("cuda", "cpu"))
    if wanted == "cpu" and not smoke:
        raise typer.BadParameter(
            "--device: expected cuda, got cpu; CPU times say nothing about a GPU. To check that everything runs on "
            "a CPU, add --smoke"
        )
    if wanted == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "--device: cuda needs a GPU, but PyTorch finds none. To check that everything runs on a CPU, add --device "
            "cpu --smoke"
        )
    return torch.device("cuda", 0) if wanted == "cuda" else torch.device("cpu")


def gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def turn_of(kind: str) -> Path:
    """Return the user's lock file for "cuda" or "cpu". A run holds the lock while no other run may train."""
    name = torch.cuda.get_device_properties("cuda").uuid if kind == "cuda" else "cpu"
    return Path(tempfile.gettempdir()) / f"lrpe-md-{Path.home().name}-{name}.turn"


def sent(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device.

    The copy is asynchronous and uses pinned memory, so that the host does not wait for all queued work.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
