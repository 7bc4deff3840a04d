"""Save samples from diffusion models as arrays, and show the samples from one or several runs on a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..common.folder import save_whole
from ..common.plots import plt

HELD_OUT = "held out"  # name of the column of real images


def pixels(images: Tensor) -> np.ndarray:
    """Convert images (N, 3, H, W) in [-1, 1] to uint8 (N, H, W, 3). NaN becomes grey.

    Videos (N, 3, frames, H, W) become images (N, H, frames · W, 3), with frames from left to right.
    """
    if images.ndim == 5:
        images = images.transpose(2, 3).flatten(3)
    return images.float().nan_to_num().clamp(-1, 1).add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def pad_together(images: Sequence[Tensor]) -> Tensor:
    """Stack images or videos (3, [frames,] H, W) of different sizes. Smaller images get white margins."""
    height, width = (max(x.shape[axis] for x in images) for axis in (-2, -1))
    padded = []
    for x in images:
        rows, columns = height - x.shape[-2], width - x.shape[-1]
        margins = columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
        padded.append(F.pad(x, margins, value=1.0))
    return torch.stack(padded)


def keep(path: Path, captions: list[str], columns: dict[str, np.ndarray]) -> None:
    """Save captions and columns of images (N, H, W, 3) as an .npz."""
    arrays: Any = {"captions": np.array(captions), **columns}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    """Load captions and columns of images that :func:`keep` saved.

    Raises:
        typer.BadParameter: if the file is damaged or was not written by :func:`keep`.
    """
    try:
        with np.load(path) as file:
            return file["captions"].tolist(), {name: file[name] for name in file.files if name != "captions"}
    except Exception as error:  # zipfile, zlib and NumPy raise various errors for damaged files
        raise typer.BadParameter(
            f"{path}: expected captions and images saved by a training run, got a file that can't be read "
            f"({type(error).__name__}); delete it and train again"
        ) from error


def _short(caption: str, length: int = 28) -> str:
    text = caption if len(caption) < length else f"{caption[: length - 3]}..."
    return text.replace("$", r"\$")  # escape math mode


def write_sheet(path: Path, captions: list[str], columns: dict[str, np.ndarray]) -> None:
    """Save columns of images (N, H, W, 3) as a PNG with one row per caption."""
    shape, dpi = (len(captions), len(columns)), 150
    height, width = np.max([images.shape[1:3] for images in columns.values()], axis=0)
    inches = max(1.4, max(height, width) / dpi)  # large enough to show every pixel
    side = inches * np.array([height, width]) / max(height, width)
    figure, axes = plt.subplots(*shape, figsize=(side[1] * shape[1] + 1.6, side[0] * shape[0] + 0.3), squeeze=False)
    for j, (name, images) in enumerate(columns.items()):
        axes[0, j].set_title(name, fontsize=7)
        for i, image in enumerate(images):
            _show(axes[i, j], image)
    for i, caption in enumerate(captions):
        axes[i, 0].set_ylabel(_short(caption), fontsize=7, rotation=0, ha="right", va="center")
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=dpi, format="png", bbox_inches="tight")  # captions extend beyond the figure
    plt.close(figure)


def write_comparison(path: Path, trainings: dict[str, Path], captions: Sequence[int] = (1, 3, 5, 6)) -> None:
    """Save a 256-colour PNG that compares runs on the captions with the given indices.

    The first row contains the held-out images. Each run has a row below it, with the images for each caption in all
    settings.
    """
    loaded = {name: load(file) for name, file in trainings.items()}
    words, first = next(iter(loaded.values()))
    chosen = [i for i in captions if i < len(words)] or [0]
    conditions = [name for name in first if name != HELD_OUT]
    shape = 1 + len(loaded), len(chosen) * len(conditions)
    figure, axes = plt.subplots(
        *shape, figsize=(0.8 * shape[1] + 1.5, 0.8 * shape[0] + 0.4), squeeze=False, layout="constrained"
    )
    for axis in axes[0]:
        axis.axis("off")
    for block, i in enumerate(chosen):
        left = block * len(conditions)
        top = axes[0, left + len(conditions) // 2]
        top.imshow(first[HELD_OUT][i])
        top.set_title(_short(words[i]), fontsize=8)
        for j, condition in enumerate(conditions, left):
            axes[1, j].set_title(condition.replace(" ", "\n"), fontsize=5)
            for row, (_, columns) in zip(axes[1:, j], loaded.values(), strict=True):
                _show(row, columns[condition][i])
    for row, name in zip(axes[1:, 0], loaded, strict=True):
        row.set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.02, h_pad=0.01, wspace=0, hspace=0)
    canvas: Any = figure.canvas
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    save_whole(path, lambda part: image.quantize(256).save(part, format="PNG", optimize=True))
    plt.close(figure)


def _show(axis: Any, image: np.ndarray) -> None:
    axis.imshow(image, interpolation="nearest")
    axis.set(xticks=[], yticks=[])
