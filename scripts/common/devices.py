"""The device that is computed on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import typer
from torch import Tensor

from .options import choose


def choose_device(wanted: str) -> torch.device:
    """What --device auto, cpu or cuda means here."""
    choose("--device", [wanted], ("auto", "cpu", "cuda"))
    if wanted == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: PyTorch finds no GPU")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def turn_of(kind: str) -> Path:
    """The file that this user's trainings lock while one alone uses a device, "cuda" or "cpu"."""
    name = torch.cuda.get_device_properties("cuda").uuid if kind == "cuda" else "cpu"
    return Path(tempfile.gettempdir()) / f"lrpe-md-{Path.home().name}-{name}.turn"


def sent(values: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device. From pinned memory: from other memory the host would wait for all that the device still
    has to do."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
