"""Labelled images for training, from idx files (as in MNIST), class folders, timm datasets or streams."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import typer
from PIL import Image, ImageOps
from timm.data.dataset_factory import create_dataset
from torch import Tensor
from torch.nn import functional as F

from lrpe_md.checks import plural

from ...common.devices import sent
from ...common.folder import list_visible
from .records import choose_subset
from .streams import (
    SUFFIXES,
    FileSource,
    LabelledStream,
    hold_out,
    is_stream,
    number_classes,
    open_image,
    open_source,
    split_source,
)

IDX = {"train": "train", "test": "t10k"}
TEST_FOLDERS = ("validation", "val", "test")
REMEDY = (
    "expected class folders (CLASS/*.png with at least two classes, or train/CLASS/*.png and val/CLASS/*.png), idx "
    "files like MNIST's (train-images-idx3-ubyte, ...), webdataset shards (.tar), a Hugging Face dataset, a table of "
    "classes with --label, or the root of a timm dataset with --dataset"
)
PARTS = 5  # hold out one image in PARTS if a folder has no test set
STREAM_PARTS = 20  # the same for streams
Size: TypeAlias = int | tuple[int, int]  # height and width in pixels, or one number for both
MEMORY = 24 * 2**30  # maximum size of the decoded images in bytes


class ImageError(typer.BadParameter):
    """Error for images that are missing or can't be read."""


@dataclass(frozen=True)
class Images:
    """Images, uint8 (N, C, H, W), and labels, int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> int:
        """Hash of the images and labels."""
        return zlib.crc32(self.labels.numpy().tobytes(), zlib.crc32(self.images.numpy().tobytes()))

    def to(self, device: torch.device) -> Images:
        return Images(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Labelled:
    """Training images (in memory or as a stream), test images, the number of classes, and the class names if known.

    ``read_test`` and ``read_train`` read the images at another size. Both are None for idx files, whose images all have
    one size. ``read_train`` is None for streams.
    """

    train: Images | LabelledStream
    test: Images
    num_classes: int
    classes: tuple[str, ...] = ()
    read_test: Callable[[Size], Images] | None = None
    read_train: Callable[[Size], Images] | None = None

    def test_at(self, size: tuple[int, int]) -> Images:
        """Return the test images for this size. Files are read at exactly this size, regardless of the other sizes."""
        if self.read_test is None or tuple(self.test.images.shape[-2:]) == size:
            return self.test
        return self.read_test(size)

    def check_memory(self, sizes: Iterable[Size]) -> None:
        """Raise an error if the test images do not fit into memory at each of these sizes."""
        for size in sizes if self.read_test else ():
            check_memory(len(self.test), size)

    @property
    def labels(self) -> np.ndarray:
        """Classes (N,) of the training images, followed by the classes of the test images."""
        train = self.train.labels.numpy() if isinstance(self.train, Images) else self.train.classes
        return np.concatenate([train, self.test.labels.numpy()])

    @property
    def channels(self) -> int:
        return self.test.images.shape[1]


def load_images(
    path: Path, size: Size, test_size: Size | None = None, *, dataset: str = "", limit: int | None = None
) -> Labelled:
    """Load the training and test images of ``path`` into memory.

    Args:
        path: folder of images; see ``REMEDY``.
        size: height and width after centre-cropping and resizing. Images in idx files stay unchanged.
        test_size: height and width of the test images. None means ``size``.
        dataset: name for ``timm.data.create_dataset``, such as "torch/cifar10", with ``path`` as its root. The dataset
            must already be downloaded.
        limit: maximum number of training images and of test images. Every call makes the same random choice.

    Raises:
        ImageError: if there are no images, an image can't be read, or images don't fit into memory.
    """
    check_folder(path)
    classes, read, read_test = (), None, None
    if dataset:
        (read, names), (read_test, others) = (_timm(dataset, path, split, limit) for split in ("train", "validation"))
        if names != others:
            raise ImageError(
                f"--dataset {dataset}: expected the same classes in the training and validation splits, got these in "
                f"only one of the two: {', '.join(sorted(names ^ others))}; add or remove these classes"
            )
        train, test = read(size), read_test(test_size or size)
    elif is_idx(path):
        train, test = (_idx(path, prefix, limit) for prefix in IDX.values())
        if train.images.shape[1:] != test.images.shape[1:]:
            shapes = " and ".join(str(tuple(part.images.shape[1:])) for part in (train, test))
            raise ImageError(f"--data {path}: expected training and test images of the same shape, got {shapes}")
    else:
        sources = list_folder(path)
        read, read_test = (_reader(lambda i, part=part: (part.files[i], part.labels[i]), len(part), limit)
                           for part in sources)  # fmt: skip
        train, test, classes = read(size), read_test(test_size or size), sources[0].classes
    for name, part in (("training", train), ("test", test)):
        if not len(part):
            raise ImageError(f"--data {path}: no {name} images; {REMEDY}")
    return Labelled(train, test, int(max(train.labels.max(), test.labels.max())) + 1, classes, read_test, read)


def check_folder(path: Path) -> None:
    """If a folder is missing, raise an error that lists the supported layouts."""
    if not path.is_dir():
        raise ImageError(f"--data {path}: no such folder; {REMEDY}")


def is_idx(path: Path) -> bool:
    """Return whether a folder contains idx files."""
    return bool(_idx_file(path, "train-images-idx3-ubyte", False))


# --- idx files -------------------------------------------------------------------------------------------------------


def _idx_file(folder: Path, name: str, needed: bool = True) -> list[Path]:
    found = [folder / name, folder / f"{name}.gz"]
    found = [file for file in found if file.is_file()]
    if needed and not found:
        raise ImageError(f"--data {folder}: {name}(.gz) is missing; {REMEDY}")
    return found


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of bytes, gzipped or not (http://yann.lecun.com/exdb/mnist).

    The file contains two zeros, the type (8 for uint8), the number of axes, the size of each axis (as a 32-bit
    big-endian integer), and the data.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ImageError(f"{path} can't be read ({error}); download it again") from error
    axes = data[3] if len(data) > 3 else 0
    if data[:3] != b"\x00\x00\x08" or len(data) < 4 + 4 * axes:
        raise ImageError(f"{path}: expected an idx file of bytes, which begins with 00 00 08, got {data[:4].hex(' ')}")
    shape = tuple(np.frombuffer(data, ">u4", axes, 4).tolist())
    num_bytes, found = math.prod(shape), len(data) - 4 - 4 * axes
    if found != num_bytes:
        raise ImageError(
            f"{path}: expected {num_bytes} bytes of data for the shape {shape} in its header, got {found}; "
            "download it again"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _idx(folder: Path, prefix: str, limit: int | None) -> Images:
    images = read_idx(_idx_file(folder, f"{prefix}-images-idx3-ubyte")[0])
    labels = read_idx(_idx_file(folder, f"{prefix}-labels-idx1-ubyte")[0])
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ImageError(
            f"--data {folder}: expected {prefix} images (N, H, W) and labels (N,), got {images.shape}, {labels.shape}"
        )
    chosen = choose_subset(len(images), limit)
    return Images(torch.from_numpy(images[chosen][:, None]), torch.from_numpy(labels[chosen].astype(np.int64)))


# --- folders, and timm's datasets ------------------------------------------------------------------------------------


def list_folder(path: Path) -> tuple[FileSource, FileSource]:
    """Return the training and test files, from train/CLASS and val/CLASS or as a random split of the files in CLASS."""
    check_folder(path)
    tests = [path / name for name in TEST_FOLDERS if (path / name).is_dir()]
    roots = [path / "train", tests[0]] if (path / "train").is_dir() and tests else [path]
    found = [[p for p in list_visible(root, "*/**/*") if p.suffix.lower() in SUFFIXES] for root in roots]
    names = [[p.name for p in list_visible(root, "*") if p.is_dir()] for root in roots]
    if len(roots) == 1:
        names = [sorted({p.relative_to(path).parts[0] for p in found[0]})]
        if len(names[0]) < 2:
            outside = sum(p.suffix.lower() in SUFFIXES for p in list_visible(path, "*"))
            got = f"{plural(outside, 'image')} outside any class folder" if outside else "no images"
            if names[0] == ["train"]:
                got = f"train, but none of {', '.join(TEST_FOLDERS)}; add one, or pass --data {path / 'train'}"
            elif names[0]:
                got = f"one class, {names[0][0]}"
            raise ImageError(f"--data {path}: found {got}; {REMEDY}")
        files = found[0]
        held_out = hold_out([p.relative_to(path).as_posix() for p in files], PARTS)
        found = [[p for p, out in zip(files, held_out, strict=True) if out == part] for part in (False, True)]
        roots = [path, path]
    elif names[0] != names[1]:
        raise ImageError(
            f"--data {path}: expected the same classes in train and {tests[0].name}, got these in only one of the two: "
            f"{', '.join(sorted(set(names[0]) ^ set(names[1])))}"
        )
    number = {name: i for i, name in enumerate(names[0])}
    train, test = (
        FileSource(files, [number[p.relative_to(root).parts[0]] for p in files], root, tuple(names[0]))
        for root, files in zip(roots, found, strict=True)
    )
    return train, test


def load_stream(path: Path, size: Size, *, label: str = "", limit: int | None = None) -> Labelled:
    """Open training images as a stream, and load test images into memory.

    Args:
        path: class folders, shards or a Hugging Face dataset; see :func:`.streams.open_source`.
        size: height and width of the test images, after centre-cropping and resizing.
        limit: see :func:`load_images`.
        label: field that contains the class. The default is .cls in shards, or the ClassLabel column of a dataset.
    """
    source, test = open_source(path) if is_stream(path) else list_folder(path)
    train, test, num_classes, classes = number_classes(*split_source(source, test, STREAM_PARTS), label or "label")
    for name, part in (("training", train), ("test", test)):
        if not len(part):
            raise ImageError(f"--data {path}: no {name} images; {REMEDY}")
    chosen, read_test = choose_subset(len(train), limit), _reader(test.__getitem__, len(test), limit)
    train = LabelledStream(replace(train.stream, indices=train.stream.indices[chosen]), train.classes[chosen])
    return Labelled(train, read_test(size), num_classes, classes, read_test)


def _timm(name: str, root: Path, split: str, limit: int | None) -> tuple[Callable[[Size], Images], set[str]]:
    """Return a function that reads a split, and the names of its classes if they are known."""
    try:
        found: Any = create_dataset(name, root=str(root), split=split)
        names: set[str] = set(getattr(getattr(found, "reader", found), "class_to_idx", None) or [])
        return _reader(found.__getitem__, len(found), limit), names
    except Exception as error:  # the readers of torchvision, hfds and tfds can raise any exception
        raise ImageError(
            f"--dataset {name}: its {split} split is not in {root} ({error}); download it first"
        ) from error


def _reader(
    sample: Callable[[int], tuple[Path | Image.Image, int]], num: int, limit: int | None
) -> Callable[[Size], Images]:
    """Return a function that reads a subset of sample(0) to sample(num - 1) at any size.

    ``sample`` returns (image or path, label).
    """
    return partial(_decoded, sample, choose_subset(num, limit))


def check_memory(num: int, size: Size) -> None:
    """Raise an error if this many RGB images of this size do not fit into memory."""
    height, width = (size, size) if isinstance(size, int) else size
    if (needed := num * 3 * height * width) > MEMORY:
        raise ImageError(
            f"--data: {num:,} images of {height}×{width} take {needed / 2**30:.0f} GiB, more than the "
            f"{MEMORY / 2**30:.0f} GiB allowed in memory; use --stream, --limit, or a smaller --size or --test-sizes"
        )


def _decoded(sample: Callable[[int], tuple[Path | Image.Image, int]], chosen: np.ndarray, size: Size) -> Images:
    num, (height, width) = len(chosen), (size, size) if isinstance(size, int) else size
    check_memory(num, size)
    images, labels = torch.empty(num, 3, height, width, dtype=torch.uint8), torch.empty(num, dtype=torch.int64)

    def decode(i: int) -> None:
        source, label = sample(int(chosen[i]))
        images[i], labels[i] = read_image(source, size), int(label)

    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, range(num)))
    return Images(images, labels)


def read_image(source: Path | Image.Image, size: Size) -> Tensor:
    """Centre-crop an image to the aspect ratio of ``size``, and resize it to uint8 (3, height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    try:
        image = ImageOps.fit(open_image(source), (width, height), Image.Resampling.BICUBIC)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"{source} can't be read as an image ({error}); remove it") from error
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# --- what the model sees ---------------------------------------------------------------------------------------------


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 images (B, C, H, W) bilinearly with antialiasing, and return floats (B, C, *size) in [-1, 1]."""
    x = x.float()
    if tuple(x.shape[-2:]) != size:
        x = F.interpolate(x, size=size, mode="bilinear", antialias=True)
    return x / 127.5 - 1


def shifted(x: Tensor, draws: np.ndarray, *, shift: int, flip: bool) -> Tensor:
    """Shift each image (B, C, H, W) by up to ``shift`` pixels in each direction, and mirror half of the images.

    ``draws`` contains one random number per image to determine shift and mirroring. Uncovered pixels are black.
    """
    height, width, ways = x.shape[-2], x.shape[-1], 2 * shift + 1
    mirrored, draws = draws % 2 == 1, draws // 2
    down, right = draws % ways, draws // ways % ways
    device = x.device
    rows = torch.arange(height, device=device) + sent(down, device)[:, None]
    columns = torch.arange(width, device=device).expand(len(x), -1)
    if flip:
        columns = torch.where(sent(mirrored, device)[:, None], columns.flip(-1), columns)
    columns = columns + sent(right, device)[:, None]
    padded = F.pad(x, (shift,) * 4)
    index = torch.arange(len(x), device=device)[:, None, None]
    return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
