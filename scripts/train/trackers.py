"""Experiment trackers that accelerate supports."""

from __future__ import annotations

import importlib.util
import zlib
from typing import Any

import typer
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, ProjectConfiguration

from ..common.folder import flat
from ..common.options import choose
from .config import Training

PROJECT = "lrpe-md"
FOLDER = "tensorboard"  # name of the subfolder in a run's folder


def choose_trackers(config: Training) -> list[str]:
    """Return the names of a run's trackers.

    Raises:
        typer.BadParameter: if a tracker is unknown, or its package is not installed.
    """
    names = [name.strip() for name in config.log_with.split(",") if name.strip()]
    if not names:
        return ["tensorboard"] if config.tensorboard and importlib.util.find_spec("tensorboard") else []
    choose("--log-with", names, [each.value for each in LoggerType if each.value != "all"])
    missing = set(names) - {str(each) for each in get_available_trackers()}
    if missing:
        raise typer.BadParameter(
            f"--log-with {config.log_with}: these trackers are not installed: "
            f"{', '.join(sorted(missing))}; install them with pip"
        )
    return list(dict.fromkeys(names))


def locate_logs(config: Training) -> ProjectConfiguration:
    """Return the log folders."""
    return ProjectConfiguration(project_dir=str(config.out), logging_dir=str(config.out / FOLDER))


def start_trackers(accelerator: Accelerator, config: Training, settings: dict[str, Any]) -> None:
    """Start the trackers with the run's settings. A resumed run continues its wandb run."""
    if not accelerator.log_with:
        return
    config.out.mkdir(parents=True, exist_ok=True)
    name = config.out.resolve()
    wandb = {"name": name.name, "id": f"{zlib.crc32(str(name).encode()):08x}", "resume": "allow", "dir": str(name)}
    values = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in
              flat(settings).items()}  # fmt: skip
    accelerator.init_trackers(PROJECT, config=values, init_kwargs={"wandb": wandb})


def finish_trackers(accelerator: Accelerator) -> None:
    """Flush and close the trackers. ``end_training`` would also end the process group, which evaluations still need."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []
