"""Images for generative training, decoded on demand, optionally with captions or class labels."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor

from .buckets import Buckets, Sizes
from .captions import SUFFIXES, TABLES, Read, crop, decode, list_files, measure, pair_up
from .images import IDX, MEMORY, TEST_FOLDERS, Images, Labelled, Size, read_idx
from .records import Records, Split, choose_subset
from .streamed import open_streamed
from .streams import hold_out, is_stream

T = TypeVar("T")
ARRAYS = {"images": ("images", "arr_0", "x"), "labels": ("labels", "arr_1", "y")}  # names of arrays in an .npz


@dataclass(frozen=True)
class Pictures:
    """Images that are decoded on demand, and their records.

    Args:
        records: names and conditions of the images.
        open: function that returns the RGB image with a given index.
        measure: function that returns the height and width of the image with a given index.
        content: hash that identifies the content of a stream.
    """

    records: Records
    open: Callable[[int], Image.Image]
    measure: Callable[[int], tuple[int, int]]
    content: int = 0

    @property
    def digest(self) -> int:
        """Hash of the names, of the captions or classes, and of a stream's content."""
        return zlib.crc32(repr((self.records.names, self.records.digest, self.content)).encode())

    def __len__(self) -> int:
        return len(self.records.names)

    def read(self, size: Size, indices: Sequence[int] | np.ndarray | None = None) -> Tensor:
        """Decode and centre-crop images (default: all), as uint8 (N, 3, height, width).

        ``size`` is the height and width, or one number for both.
        """
        height, width = (size, size) if isinstance(size, int) else size
        chosen = range(len(self)) if indices is None else indices
        if (needed := len(chosen) * 3 * height * width) > MEMORY:
            raise typer.BadParameter(
                f"--data: {len(chosen):,} images of {height}×{width} take {needed / 2**30:.0f} GiB, more than the "
                f"{MEMORY / 2**30:.0f} GiB allowed in memory; use --stream, a smaller --size, --limit, or latents"
            )
        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda i: crop(self.open(int(i)), (height, width)), chosen))
        return torch.from_numpy(np.stack(parts)).permute(0, 3, 1, 2).contiguous()

    def sort(self, sizes: Sizes) -> Buckets:
        """Sort the images into buckets by aspect ratio."""
        if sizes.max_ratio == 1:
            return sizes.sort(np.ones((len(self), 2)))
        with ThreadPoolExecutor(8) as pool:
            return sizes.sort(np.array(list(pool.map(self.measure, range(len(self))))))

    def take(self, indices: np.ndarray) -> Pictures:
        """Return the selected images."""
        if len(indices) == len(self):
            return self
        choose = partial(_choose, indices)
        measure = partial(choose, self.measure)
        return replace(self, records=self.records.take(indices), open=partial(choose, self.open), measure=measure)


def _choose(indices: np.ndarray, function: Callable[[int], T], index: int) -> T:
    return function(int(indices[index]))


def open_pictures(
    path: Path, split: Split, *, condition: str = "auto", without: str = "", label: str = ""
) -> Pictures:  # fmt: skip
    """Open the images in a folder, a zip, an .npz, shards or a Hugging Face dataset.

    Args:
        path: images with captions (see ``REMEDY`` of :mod:`.captions`), CLASS/*.png, train/CLASS/*.png and
            val/CLASS/*.png, idx files as in MNIST, an .npz with images (N, H, W[, 3]) and labels (N,), images without
            captions or labels, or a path for :func:`.streams.open_source`.
        split: how many images to use, and which to hold out.
        condition: one of ``CONDITIONS``. "auto" uses captions if there are any, otherwise classes, and otherwise
            neither.
        without: boolean field of the caption table. Rows in which this field is true are left out.
        label: field of a table or a stream that contains the class.

    Raises:
        typer.BadParameter: if there are no such images.
    """
    if path.suffix == ".npz" and path.is_file():
        found = _from_npz(path)
    elif path.is_dir() and any(path.glob("train-images-idx3-ubyte*")):
        found = _from_idx(path)
    elif is_stream(path):
        found = Pictures(*open_streamed(path, condition, label))
    else:
        found = _from_files(path, condition, without, label)
    found = replace(found, records=found.records.with_condition(condition, path))
    return found.take(choose_subset(len(found), split.limit))


def load_classes(
    path: Path, size: Size, test_size: Size | None = None, *, label: str, parts: int = 5, without: str = "",
    limit: int | None = None,
) -> Labelled:  # fmt: skip
    """Load the images listed in a table into memory. The field ``label`` contains the class.

    ``size`` and ``test_size`` are as in :func:`.images.load_images`. An image is in the test set if a hash of its file
    name is 0 modulo ``parts``.
    """
    found = _from_files(path, "labels", without, label)
    found = found.take(choose_subset(len(found), limit))
    records = found.records
    held_out = hold_out([PurePosixPath(name).name for name in records.names], parts)
    if held_out.all() or not held_out.any():
        raise typer.BadParameter(
            f"--data {path}: {held_out.sum()} of {len(found)} images are held out for tests; add more images"
        )
    labels = torch.from_numpy(records.labels)

    def read(chosen: np.ndarray, side: Size) -> Images:
        return Images(found.read(side, np.flatnonzero(chosen)), labels[chosen])

    read_train, read_test = partial(read, ~held_out), partial(read, held_out)
    train, test = read_train(size), read_test(test_size or size)
    return Labelled(train, test, len(records.classes), records.classes, read_test, read_train)


def _from_files(path: Path, condition: str, without: str, label: str) -> Pictures:
    files = list_files(path)
    images = sorted(name for name in files if PurePosixPath(name).suffix.lower() in SUFFIXES)
    has_captions = any(PurePosixPath(name).name in TABLES for name in files) or any(
        PurePosixPath(name).with_suffix(".txt").as_posix() in files for name in images
    )
    if label:
        pairs = sorted(pair_up(path, files, without, label).items())
        images, classes = [name for name, _ in pairs], tuple(sorted({name for _, name in pairs}))
        records = Records(images, labels=np.array([classes.index(name) for _, name in pairs]), classes=classes)
    elif condition == "captions" or without or not images or (condition == "auto" and has_captions):
        pairs = sorted(pair_up(path, files, without).items())
        images = [name for name, _ in pairs]
        records = Records(images, captions=[caption for _, caption in pairs])
    elif condition == "labels" or (condition == "auto" and len({PurePosixPath(name).parent for name in images}) > 1):
        records = _classes(path, images)
    else:
        records = Records(images)
    read = partial(_read_file, path, images, files)
    return Pictures(records, partial(read, decode), partial(read, measure))


def _read_file(
    path: Path, images: list[str], files: dict[str, Read], function: Callable[[str, Read, Path], T], index: int
) -> T:
    return function(images[index], files[images[index]], path)


def _classes(path: Path, images: list[str]) -> Records:
    parts = [PurePosixPath(name).parts for name in images]
    while len({each[0] for each in parts}) == 1 and min(map(len, parts)) > 2:  # all paths start with the same folder
        parts = [each[1:] for each in parts]
    tests = None
    tops = {each[0] for each in parts}
    if "train" in tops and len(tops) > 1 and tops <= {"train", *TEST_FOLDERS}:
        tests = np.array([each[0] != "train" for each in parts])
        parts = [each[1:] for each in parts]
    outside = [name for name, each in zip(images, parts, strict=True) if len(each) < 2]
    if outside:
        raise typer.BadParameter(
            f"--data {path}: expected each image in a class folder, such as cats/1.png, got {len(outside)} outside any "
            f"class folder: {outside[0]}; move them, or pass --condition none"
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
        raise typer.BadParameter(f"--data {path}: can't be read as an .npz ({error}); create it again") from error
    if arrays["images"] is None:
        raise typer.BadParameter(
            f"--data {path}: expected an array of images named {', '.join(ARRAYS['images'])}, got none; rename the "
            "array"
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
                f"--data {path}: expected non-negative integer labels of shape ({len(images)},), got {labels.dtype} "
                f"{labels.shape}"
            )
        labels, classes = labels.astype(np.int64), tuple(map(str, range(int(labels.max(initial=0)) + 1)))
    records = Records([f"{i:08}" for i in range(len(images))], labels=labels, classes=classes, tests=tests)
    return Pictures(records, partial(_from_array, images), lambda i: images.shape[1:3])


def _from_array(images: np.ndarray, index: int) -> Image.Image:
    return Image.fromarray(images[index]).convert("RGB")
