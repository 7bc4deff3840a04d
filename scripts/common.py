"""What the scripts share: the names that their options take, and where their numbers come from."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import typer
from torch import Tensor


def choose(option: str, wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """The wanted names, each once; one that is not known is refused."""
    known, names = list(known), list(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option}: unknown {name!r}; known are: {'; '.join(known)}")
    return names


def choose_device(wanted: str) -> torch.device:
    """What --device auto, cpu or cuda means here."""
    choose("--device", [wanted], ("auto", "cpu", "cuda"))
    if wanted == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: PyTorch finds no GPU")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def sent(values: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device. From pinned memory: from other memory the host would wait for all that the device still
    has to do."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def git_commit(digits: int = 40) -> str:
    """The checkout's commit, with a + where files differ from it; empty where git knows none."""
    command = ["git", "describe", "--always", f"--abbrev={digits}", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def versions(*names: str) -> dict[str, str]:
    """Of the packages, empty where one is not installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def measured_on(device: torch.device, commit: str | None) -> dict[str, str]:
    """Where a row's numbers come from; commit: of files without their history."""
    found = versions("torch", "triton", "timm").items()
    return {
        "gpu": gpu_name(device) or f"none ({platform.machine()} CPU)",
        "versions": ", ".join(f"{name} {number}" if number else f"no {name}" for name, number in found),
        "commit": git_commit() if commit is None else commit,
    }


def fill(text: str, begin: str, end: str, section: str) -> str:
    """The text with the section between its markers."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"expected {begin} and then {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{section}{end}{rest.split(end)[1]}"


def table(head: list[str], lines: list[list[str]], words: int = 1) -> list[str]:
    """Lines of markdown, an empty one behind them; the first columns are words, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)] + [""]
