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
    """Save columns of images (N, H, W, 3) as a PNG with one row per caption, in which every pixel is visible."""
    dpi, gap = 150, 9
    largest = np.max([images.shape[1:3] for images in columns.values()], axis=0)
    cell = np.ceil(largest * max(210 / largest.max(), 1.0)).astype(int)
    step = cell + gap
    # Matplotlib takes milliseconds for each axes and each image, so it draws a single picture of all images.
    sheet = Image.new("RGB", (len(columns) * step[1] - gap, len(captions) * step[0] - gap), "white")
    for j, images in enumerate(columns.values()):
        height, width = (np.array(images.shape[1:3]) * (cell / images.shape[1:3]).min()).astype(int)
        for i, image in enumerate(images):
            top, left = step * (i, j) + (cell - (height, width)) // 2
            sheet.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST), (left, top))
    figure = plt.figure(figsize=(sheet.width / dpi, sheet.height / dpi), dpi=dpi)
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.imshow(sheet, interpolation="nearest")
    axis.set_xticks(step[1] * np.arange(len(columns)) + cell[1] / 2, list(columns), fontsize=7)
    axis.set_yticks(step[0] * np.arange(len(captions)) + cell[0] / 2, list(map(_short, captions)), fontsize=7)
    axis.tick_params(length=0, labelbottom=False, labeltop=True)
    axis.spines[:].set_visible(False)
    # Captions are outside of the figure. With "tight", savefig would draw it twice.
    figure.savefig(path, format="png", bbox_inches=figure.get_tightbbox().padded(0.1))
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
