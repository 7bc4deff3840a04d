"""Images for generative training, with captions, with class labels, or alone. They are decoded on request."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor

from .captions import SUFFIXES, TABLES, crop_square, decode, list_files, pair_up
from .images import IDX, MEMORY, TEST_FOLDERS, read_idx
from .records import Records, Split

ARRAYS = {"images": ("images", "arr_0", "x"), "labels": ("labels", "arr_1", "y")}  # names in an .npz


@dataclass(frozen=True)
class Pictures:
    """Images and their records.

    Args:
        records: of the images.
        open: returns the image of a number, in RGB.
    """

    records: Records
    open: Callable[[int], Image.Image]

    def __len__(self) -> int:
        return len(self.records.names)

    def read(self, size: int, indices: Sequence[int] | np.ndarray | None = None) -> Tensor:
        """Decode images, all unless told otherwise: uint8 (N, 3, size, size), the central square of each."""
        chosen = range(len(self)) if indices is None else indices
        if (needed := len(chosen) * 3 * size**2) > MEMORY:
            raise typer.BadParameter(
                f"--data: {len(chosen):,} images of {size}×{size} take {needed / 2**30:.0f} GiB, more than the "
                f"{MEMORY / 2**30:.0f} GiB that are kept in memory; use a smaller --size, --limit, or latents"
            )
        with ThreadPoolExecutor(8) as pool:
            squares = list(pool.map(lambda i: crop_square(self.open(int(i)), size), chosen))
        return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous()

    def take(self, indices: np.ndarray) -> Pictures:
        """Return some of the images."""
        if len(indices) == len(self):
            return self
        return Pictures(self.records.take(indices), lambda i: self.open(int(indices[i])))


def open_pictures(path: Path, split: Split, *, condition: str = "auto", without: str = "") -> Pictures:
    """Open the images of a folder, a zip, or an .npz.

    Args:
        path: images with captions (see ``REMEDY`` of :mod:`.captions`); CLASS/*.png, or train/CLASS/*.png and
            val/CLASS/*.png; idx files as MNIST's; an .npz with images (N, H, W[, 3]) and labels (N,); or images alone.
        split: which images to take.
        condition: one of ``CONDITIONS``. "auto": captions if there are any, else classes if there are any.
        without: a field of the table of captions; rows where it is true are left out.

    Raises:
        typer.BadParameter: nothing of the kind there.
    """
    if path.suffix == ".npz" and path.is_file():
        found = _from_npz(path)
    elif path.is_dir() and any(path.glob("train-images-idx3-ubyte*")):
        found = _from_idx(path)
    else:
        found = _from_files(path, condition, without)
    found = Pictures(found.records.with_condition(condition, path), found.open)
    return found.take(split.some(len(found)))


def _from_files(path: Path, condition: str, without: str) -> Pictures:
    files = list_files(path)
    images = sorted(name for name in files if PurePosixPath(name).suffix.lower() in SUFFIXES)
    has_captions = any(PurePosixPath(name).name in TABLES for name in files) or any(
        PurePosixPath(name).with_suffix(".txt").as_posix() in files for name in images
    )
    if condition == "captions" or without or not images or (condition == "auto" and has_captions):
        pairs = sorted(pair_up(path, files, without).items())
        images = [name for name, _ in pairs]
        records = Records(images, captions=[caption for _, caption in pairs])
    elif condition == "labels" or (condition == "auto" and len({PurePosixPath(name).parent for name in images}) > 1):
        records = _classes(path, images)
    else:
        records = Records(images)
    return Pictures(records, lambda i: decode(images[i], files[images[i]], path))


def _classes(path: Path, images: list[str]) -> Records:
    parts = [PurePosixPath(name).parts for name in images]
    while len({each[0] for each in parts}) == 1 and min(map(len, parts)) > 2:  # a folder around all of them
        parts = [each[1:] for each in parts]
    tests = None
    tops = {each[0] for each in parts}
    if "train" in tops and len(tops) > 1 and tops <= {"train", *TEST_FOLDERS}:
        tests = np.array([each[0] != "train" for each in parts])
        parts = [each[1:] for each in parts]
    outside = [name for name, each in zip(images, parts, strict=True) if len(each) < 2]
    if outside:
        raise typer.BadParameter(
            f"--data {path}: expected each image in the folder of its class, as cats/1.png, got {len(outside)} outside "
            f"of one: {outside[0]}; move them, or pass --condition none"
        )
    classes = tuple(sorted({each[0] for each in parts}))
    labels = np.array([classes.index(each[0]) for each in parts], np.int64)
    return Records(images, labels=labels, classes=classes, tests=tests)


def _from_idx(path: Path) -> Pictures:
    arrays: dict[tuple[str, str], np.ndarray] = {}
    for kind, axes in (("images", 3), ("labels", 1)):
        for prefix in IDX.values():
            found = sorted(path.glob(f"{prefix}-{kind}-idx{axes}-ubyte*"))
            if not found:
                raise typer.BadParameter(f"--data {path}: {prefix}-{kind}-idx{axes}-ubyte(.gz) is missing; add it")
            arrays[kind, prefix] = read_idx(found[0])
    images, labels = (np.concatenate([arrays[kind, p] for p in IDX.values()]) for kind in ("images", "labels"))
    return _from_arrays(path, images, labels, np.arange(len(images)) >= len(arrays["images", IDX["train"]]))


def _from_npz(path: Path) -> Pictures:
    arrays: dict[str, Any] = {}
    try:
        with np.load(path) as file:
            for kind, names in ARRAYS.items():
                arrays[kind] = next((file[name] for name in names if name in file.files), None)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise typer.BadParameter(f"--data {path}: can't be read as an .npz ({error}); write it again") from error
    if arrays["images"] is None:
        raise typer.BadParameter(
            f"--data {path}: expected an array of images named {', '.join(ARRAYS['images'])}, got none; rename yours"
        )
    return _from_arrays(path, arrays["images"], arrays["labels"])


def _from_arrays(
    path: Path, images: np.ndarray, labels: np.ndarray | None, tests: np.ndarray | None = None
) -> Pictures:  # fmt: skip
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        raise typer.BadParameter(
            f"--data {path}: expected images as uint8 (N, H, W) or (N, H, W, 3), got {images.dtype} {images.shape}"
        )
    classes: tuple[str, ...] = ()
    if labels is not None:
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
            raise typer.BadParameter(
                f"--data {path}: expected labels from 0 as integers ({len(images)},), got {labels.dtype} {labels.shape}"
            )
        labels, classes = labels.astype(np.int64), tuple(map(str, range(int(labels.max(initial=0)) + 1)))
    records = Records([f"{i:08}" for i in range(len(images))], labels=labels, classes=classes, tests=tests)
    return Pictures(records, lambda i: Image.fromarray(images[i]).convert("RGB"))
