"""Load trained models from run folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .checkpoint import read_checkpoint, restore
from .encodings import check_scheme
from .memory import build_model as build_recall
from .prompts import build_model as build_diffusion
from .tasks import image, lm, vae, video
from .weights import EXPORT

__all__ = ["load_clip", "load_frames", "load_run", "task_of"]


def task_of(settings: dict[str, Any]) -> str | None:
    """Return the task of a run, or None for a run of another program. `digits` uses the same models as `image`."""
    arguments = settings.get("model")
    if not isinstance(arguments, dict):
        return None
    for task, is_it in {
        "diffusion": "condition" in settings and "drop_text" in settings,
        "vae": "latent_channels" in arguments,
        "lm": "vocab_size" in arguments,
        "recall": {"writes", "questions"} <= settings.keys(),
        "video": "num_frames" in arguments,
        "image": "img_size" in arguments,
    }.items():
        if is_it:
            return task
    return None


# Maps a task to the function that builds the model from the settings of a run.
BUILDERS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "diffusion": build_diffusion,
    "vae": lambda settings: vae.Autoencoder(settings["model"]),
    "lm": lm.build_model,
    "recall": lambda settings: build_recall(**settings["model"]),
    "video": lambda settings: video.build_model(**settings["model"]),
    "image": lambda settings: image.build_model(settings["model"], keep_table="weights" in settings),
}


def load_run(folder: str | Path, *, average: bool = True, device: torch.device | str = "cpu") -> Any:
    """Return the trained model of a run of `lrpe-md train`.

    Args:
        folder: output folder of the run. For an interrupted run, the weights come from the last checkpoint.
        average: whether to load the averaged weights (EMA), if there are any, instead of the weights of the last step.
        device: device of the model.

    Returns:
        the model in evaluation mode: an ``LrpeVisionTransformer`` (`digits`, `image`), ``LrpeVideoTransformer``
        (`video`, `recall`), ``CausalLm`` (`lm`), ``DiT`` (`diffusion`) or ``Autoencoder`` (`vae`).

    Raises:
        FileNotFoundError: if the folder has no weights, or is a file.
        ValueError: if the run was not made by `lrpe-md train`, or its scheme is not registered.
    """
    state = _read(Path(folder), average)
    check_scheme(state["settings"])
    task = task_of(state["settings"])
    if task is None:
        raise ValueError(
            f"folder: expected a run of `lrpe-md train`, got {folder}, which another script wrote; build its model "
            f"yourself, and load {EXPORT} with safetensors"
        )
    return restore(BUILDERS[task](state["settings"]), state, average=average).to(device)


def load_clip(folder: str | Path, path: str | Path) -> Tensor:
    """Read the central clip of a video, as `lrpe-md train video` does in its tests.

    Args:
        folder: output folder of the training run. The run's options determine frames, size and motion.
        path: path of the video file.

    Returns:
        the model's input (1, 3, frames, size, size) on the CPU. If the video is too short, frames are repeated.

    Raises:
        FileNotFoundError: if the folder has no weights, or is a file.
        ValueError: if the run was not made by `lrpe-md train video`.
        VideoError: if the video can't be read.
    """
    return video.read_clip(Path(path), _read_video_settings(folder))


def load_frames(folder: str | Path, path: str | Path) -> Tensor:
    """Read a whole video with the frame size and frame spacing of a run of `lrpe-md train video`.

    A model trained with ``--causal`` can process the frames in chunks of whole tubelets, such as ``frames.split(1,
    dim=2)``.

    Args:
        folder: output folder of the training.
        path: video file.

    Returns:
        the frames (1, 3, frames, size, size) on the CPU, without the last frames if they do not fill a tubelet.

    Raises:
        FileNotFoundError: if the folder has no weights, or is a file.
        ValueError: if the run was not made by `lrpe-md train video`, or its clips span the whole video.
        VideoError: if the video can't be read.
    """
    settings = _read_video_settings(folder)
    if settings["task"] == "labels" and settings["sampling"] == "uniform":
        raise ValueError(
            f"folder: expected a run with --sampling dense, got {folder} with --sampling uniform, whose clips span the "
            "whole video; use load_clip"
        )
    return video.read_clip(Path(path), settings, whole=True)


def _read_video_settings(folder: str | Path) -> dict[str, Any]:
    settings = _read(Path(folder), average=True)["settings"]
    if task_of(settings) != "video":
        raise ValueError(f"folder: expected a run of `lrpe-md train video`, got {folder}, which another script wrote")
    return settings


def _read(folder: Path, average: bool) -> dict[str, Any]:
    """Read the checkpoint of a run, or the exported weights if there is no checkpoint."""
    if (folder / "checkpoint.pt").is_file():
        return read_checkpoint(folder / "checkpoint.pt")
    if average and (folder / EXPORT).is_file():
        with safe_open(folder / EXPORT, framework="pt") as file:
            settings = json.loads(file.metadata()["settings"])
            return {"settings": settings, "model": {name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118
    if folder.is_file():
        raise FileNotFoundError(f"folder: expected the folder of a run, got the file {folder}; pass {folder.parent}")
    wanted = f"checkpoint.pt or {EXPORT}" if average else "checkpoint.pt, because average=False"
    raise FileNotFoundError(
        f"folder: expected a run with {wanted}, got {folder}; pass the --out of a run that has saved a checkpoint"
    )
