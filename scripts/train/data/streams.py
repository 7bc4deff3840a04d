"""Samples that are read on demand from webdataset shards, Hugging Face datasets, and folders of files.

Every source knows its number of samples and where each sample is stored. The order of the samples therefore only
depends on (seed, step, process), and a run can resume at any step without reading earlier samples.
"""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import typer
from PIL import ExifTags, Image, ImageOps

from lrpe_md.checks import plural

from ...common.cache import user_cache
from ...common.folder import SaveError, list_visible, save_whole
from ..order import DataError

T = TypeVar("T")
IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bmp")  # of shards
SUFFIXES = (*(f".{field}" for field in IMAGE_FIELDS), ".tif", ".tiff")  # of files in folders
CAPTION_FIELDS = ("txt", "caption")
TEST_NAMES = ("validation", "val", "test")
HUB = "hf:"
INDEX = 1  # version of the cached index of a shard
BLOCK = 512  # block size of a tar in bytes
# Errors for files that are missing, truncated, or not in the format that the file name suggests.
UNREADABLE = (OSError, EOFError, ValueError, SyntaxError, KeyError, Image.DecompressionBombError)


class StreamError(typer.BadParameter):
    """Error for data that can't be opened."""


class Source(Protocol):
    """Samples by index. Each sample is a dict that may contain an image, a label, a caption and other named fields."""

    @property
    def fields(self) -> set[str]:
        """Names of the samples' fields."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]: ...

    def measure(self, index: int) -> tuple[int, int]:
        """Return the height and width of a sample's image, without decoding it."""
        ...

    def locate(self, index: int) -> str:
        """Describe where a sample is stored, for an error message."""
        ...

    def list_keys(self) -> list[str]:
        """Return a name for each sample. Names stay the same when samples are added."""
        ...

    def list_values(self, name: str) -> list[Any]:
        """Return the values of a field for all samples."""
        ...

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Return the names of the class numbers in a field, or None if the names are unknown."""
        ...

    def hash_content(self) -> int:
        """Return a hash of the names and sizes of the samples."""
        ...


@dataclass(frozen=True)
class Stream:
    """Subset of a source's samples.

    Args:
        source: source of the samples.
        indices: indices of the samples in this stream.
    """

    source: Source
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample.

        Raises:
            DataError: if the sample can't be read. The message states where the sample is stored.
        """
        return self._try(self.source.read, index)

    def open(self, index: int) -> Image.Image:
        """Return a sample's image. Raise :class:`.DataError` if it is missing or can't be read."""
        return self._try(lambda number: _require_image(self.source.read(number).get("image")), index)

    def measure(self, index: int) -> tuple[int, int]:
        """Return the height and width of a sample's image."""
        return self._try(self.source.measure, index)

    def _try(self, function: Callable[[int], T], index: int) -> T:
        number = int(self.indices[index])
        try:
            return function(number)
        except UNREADABLE as error:
            raise DataError(
                f"{self.source.locate(number)} can't be read ({type(error).__name__}: {error}); repair or remove it, "
                "then run the same command to resume"
            ) from error

    @property
    def digest(self) -> int:
        """Return a hash of the names and sizes of the samples."""
        return zlib.crc32(self.indices.astype(np.int64).tobytes(), self.source.hash_content())


def _require_image(content: T | None) -> T:
    if content is None:
        raise ValueError("expected an image, got none")
    return content


def open_image(content: bytes | Path | Image.Image) -> Image.Image:
    """Read an image as 8-bit RGB. Rotate it upright, and make transparent pixels white.

    Raises:
        ValueError: if the pixels are floats, whose range is unknown.
    """
    image = content if isinstance(content, Image.Image) else Image.open(
        io.BytesIO(content) if isinstance(content, bytes) else content
    )  # fmt: skip
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("expected integer pixels, got floats; save the image with 8 or 16 bits")
    if image.mode.startswith("I"):  # Pillow would clip 16-bit pixels to 255
        values, transparent = np.asarray(image), image.info.get("transparency", -1)
        pixels = (values.clip(0, 65535) >> 8).astype(np.uint8)
        image = Image.fromarray(np.where(values == transparent, np.uint8(255), pixels))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("RGB")


def measure_image(content: bytes | Path | Image.Image) -> tuple[int, int]:
    """Return the height and width of an image after it is rotated upright, without decoding it."""
    image = content if isinstance(content, Image.Image) else Image.open(
        io.BytesIO(content) if isinstance(content, bytes) else content
    )  # fmt: skip
    width, height = image.size
    # Skip PNGs without EXIF data in the header. Pillow would decode the pixels to look for EXIF data after the pixels.
    exif: Any = {} if image.format == "PNG" and "exif" not in image.info else image.getexif()
    tags: Any = getattr(image, "tag_v2", {})  # of a TIFF, whose size newer versions of Pillow have already turned
    is_turned = exif.get(ExifTags.Base.Orientation, 1) > 4 and tags.get(ExifTags.Base.ImageWidth, width) == width
    return (width, height) if is_turned else (height, width)


# --- shards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """Index of a tar: ``offsets`` and ``sizes`` (samples, fields) in bytes, with -1 where a sample lacks a field."""

    path: Path
    keys: list[str]
    fields: list[str]
    offsets: np.ndarray
    sizes: np.ndarray

    def has(self, sample: int, name: str) -> bool:
        """Return whether a sample of the shard has the given field."""
        return self.offsets[sample, self.fields.index(name)] >= 0

    def read(self, sample: int, name: str, file: Any = None) -> bytes:
        """Return the bytes of a field. If the tar is already open, pass it as ``file``."""
        offset, size = (int(table[sample, self.fields.index(name)]) for table in (self.offsets, self.sizes))
        with nullcontext(file) if file else self.path.open("rb") as opened:
            opened.seek(offset)
            content = opened.read(size)
        if len(content) != size:
            raise EOFError(f"expected {size} bytes of {name}, got {len(content)}")
        return content


def index_shard(path: Path, cache: Path | None = None) -> Shard:
    """Find the samples in a tar. ``cache`` is a folder for indices, shared by all runs.

    Raises:
        StreamError: if the tar is damaged or incomplete. The message names the last complete sample.
    """
    stat = path.stat()
    name = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {INDEX}"
    kept = None if cache is None else cache / f"{zlib.crc32(name.encode()):08x}.npz"
    if kept is not None and kept.is_file():
        try:
            with np.load(kept, allow_pickle=False) as found:
                if str(found["name"]) == name:
                    return Shard(
                        path, found["keys"].tolist(), found["fields"].tolist(), found["offsets"], found["sizes"]
                    )
        except Exception:  # zipfile and NumPy raise various errors for damaged data
            kept.unlink(missing_ok=True)
    shard = _scan(path)
    if kept is not None:
        arrays: Any = {"name": np.array(name), "keys": np.array(shard.keys), "fields": np.array(shard.fields),
                       "offsets": shard.offsets, "sizes": shard.sizes}  # fmt: skip
        try:
            save_whole(kept, partial(_write_index, arrays))
        except SaveError as error:
            typer.echo(f"The index of {path.name} is not cached for later runs ({error})", err=True)
    return shard


def _write_index(arrays: dict[str, np.ndarray], part: Path) -> None:
    with part.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def _scan(path: Path) -> Shard:
    from webdataset.tariterators import base_plus_ext

    rows: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                key, name = base_plus_ext(member.name)
                if not member.isfile() or key is None or name is None:
                    continue
                if not rows or rows[-1][0] != key:
                    rows.append((key, {}))
                rows[-1][1][name.lower()] = (member.offset_data, member.size)
            end = archive.offset
    except (tarfile.TarError, OSError, EOFError) as error:
        raise StreamError(
            f"{path} is cut off in sample {rows[-1][0] if rows else 'number 0'!r}, after "
            f"{plural(max(len(rows) - 1, 0), 'complete sample')} ({error}); download it again, or remove it"
        ) from error
    with path.open("rb") as file:
        file.seek(end)
        if file.read(BLOCK) != bytes(BLOCK):
            raise StreamError(
                f"{path} has no end-of-archive marker after sample {rows[-1][0] if rows else ''!r}, so samples may be "
                "missing; download it again, or remove it"
            )
    fields = sorted({name for _, members in rows for name in members})
    table = np.array([[members.get(name, (-1, -1)) for name in fields] for _, members in rows], np.int64)
    table = table.reshape(len(rows), len(fields), 2)
    return Shard(path, [key for key, _ in rows], fields, table[..., 0], table[..., 1])


def _check_single_images(shard: Shard) -> None:
    """Reject samples with several images, such as a .jpg and a mask in .png."""
    names = [name for name in shard.fields if name in IMAGE_FIELDS]
    found = shard.offsets[:, [shard.fields.index(name) for name in names]] >= 0
    several = np.flatnonzero(found.sum(1) > 1)
    if len(several):
        first = several[0]
        fields = ", ".join(f".{name}" for name, is_there in zip(names, found[first], strict=True) if is_there)
        raise StreamError(
            f"{shard.path}, sample {shard.keys[first]!r}: expected one image, got {fields}; rename the others, for "
            "example from NAME.png to NAME.mask.png"
        )


def _where(name: str) -> str:
    """Describe where shards store a field, for an error message."""
    if name == "caption":
        return "a caption in .txt"
    return "a class in .cls, or --label and that field in .json"


class ShardSource:
    """Samples from webdataset tars. NAME.jpg, NAME.cls, NAME.txt, NAME.json and NAME.npy together form a sample."""

    def __init__(self, paths: Sequence[Path], cache: Path | None = None) -> None:
        self.shards = [index_shard(path, cache) for path in paths]
        self.ends = np.cumsum([len(shard.keys) for shard in self.shards])
        for shard in self.shards:
            _check_single_images(shard)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def _find(self, index: int) -> tuple[Shard, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        shard = self.shards[number]
        return shard, index - int(self.ends[number]) + len(shard.keys)

    def locate(self, index: int) -> str:
        shard, sample = self._find(index)
        return f"{shard.path}, sample {shard.keys[sample]!r} ({sample + 1} of {len(shard.keys)})"

    def list_keys(self) -> list[str]:
        return [f"{shard.path.name}/{key}" for shard in self.shards for key in shard.keys]

    @property
    def fields(self) -> set[str]:
        named = {**dict.fromkeys(IMAGE_FIELDS, "image"), "cls": "label", **dict.fromkeys(CAPTION_FIELDS, "caption")}
        return {named.get(name, name) for shard in self.shards for name in shard.fields}

    def measure(self, index: int) -> tuple[int, int]:
        shard, sample = self._find(index)
        names = (name for name in IMAGE_FIELDS if name in shard.fields and shard.has(sample, name))
        return measure_image(shard.read(sample, _require_image(next(names, None))))

    def list_values(self, name: str) -> list[Any]:
        values, files = [], {"label": ("cls",), "caption": CAPTION_FIELDS}.get(name, ("json",))
        for shard in self.shards:
            # A field of .json can also be named label.
            names = ("json",) if name == "label" and "cls" not in shard.fields else files
            with shard.path.open("rb") as file:
                for sample in range(len(shard.keys)):
                    index = len(values)
                    try:
                        found = self._parse(shard, sample, names, file)
                    except UNREADABLE as error:
                        raise StreamError(f"{self.locate(index)}: its {names[0]} can't be read ({error})") from error
                    if name not in found:
                        raise StreamError(
                            f"{self.locate(index)}: expected {_where(name)}, got "
                            f"{', '.join(f'.{each}' for each in shard.fields)}"
                        )
                    values.append(found[name])
        return values

    def read(self, index: int) -> dict[str, Any]:
        shard, sample = self._find(index)
        return self._parse(shard, sample, shard.fields)

    def _parse(self, shard: Shard, sample: int, names: Sequence[str], file: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in sorted(names, key=lambda name: name != "json"):  # files replace entries of .json
            if name not in shard.fields or not shard.has(sample, name):
                continue
            content = shard.read(sample, name, file)
            if name in IMAGE_FIELDS:
                found["image"] = open_image(content)
            elif name == "cls":
                found["label"] = int(content)
            elif name in CAPTION_FIELDS:
                found["caption"] = content.decode("utf-8")
            elif name == "json":
                found |= json.loads(content)
            elif name.endswith("npy"):
                found[name.removesuffix("npy").rstrip(".") or "npy"] = np.load(io.BytesIO(content), allow_pickle=False)
            else:
                found[name] = content
        return found

    def class_names(self, name: str) -> None:
        return None

    def hash_content(self) -> int:
        value = 0
        for shard in self.shards:
            value = zlib.crc32("\n".join(shard.keys).encode(), value)
            value = zlib.crc32(np.ascontiguousarray(shard.sizes).tobytes(), value)
        return value


def find_shards(path: Path) -> tuple[list[Path], list[Path]]:
    """Find the training and test tars for a folder, a tar, or a pattern such as train-{000..009}.tar.

    In a folder, shards whose names start with val, validation or test are test shards.
    """
    from webdataset.shardlists import expand_urls

    if path.is_dir():
        found = list_visible(path, "*.tar")
    else:
        found = [Path(each) for each in expand_urls(str(path))]
        found = [each for one in found for each in (list_visible(one.parent, one.name) if "*" in one.name else [one])]
    if not found:
        raise StreamError(f"--data {path}: expected shards (.tar), found none")
    for each in found:
        if not each.is_file():
            raise StreamError(f"--data {path}: no such shard: {each}")
    tests = [each for each in found if each.name.startswith(TEST_NAMES)]
    return [each for each in found if each not in tests], tests


# --- Hugging Face datasets, and files --------------------------------------------------------------------------------


class HubSource:
    """Split of a Hugging Face dataset. Image, ClassLabel and "text" columns become the fields of a sample."""

    def __init__(self, data: Any, name: str) -> None:
        from datasets import ClassLabel
        from datasets import Image as ImageColumn

        self.data, self.name = data, name
        columns: list[tuple[str, Any]] = list(data.features.items())
        self.renamed: dict[str, str] = {key: "image" for key, kind in columns if isinstance(kind, ImageColumn)}
        self.renamed |= {key: "label" for key, kind in columns if isinstance(kind, ClassLabel)}
        self.renamed |= {key: "caption" for key in ("text", "caption") if key in data.features}
        if len(set(self.renamed.values())) < len(self.renamed):
            raise StreamError(
                f"--data {name}: expected at most one column each for images, classes and captions, got "
                f"{self.renamed}; drop extra columns with remove_columns"
            )

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.data[index]
        found = {self.renamed.get(key, key): value for key, value in row.items()}
        if "image" in found:
            found["image"] = open_image(_require_image(found["image"]))
        return found

    @property
    def fields(self) -> set[str]:
        columns: list[str] = list(self.data.features)
        return {self.renamed.get(key, key) for key in columns}

    def measure(self, index: int) -> tuple[int, int]:
        import datasets

        column = next(key for key, name in self.renamed.items() if name == "image")
        row = _require_image(self.data.cast_column(column, datasets.Image(decode=False))[index][column])
        return measure_image(row["bytes"] or Path(row["path"]))

    def locate(self, index: int) -> str:
        return f"{self.name}, row {index}"

    def list_keys(self) -> list[str]:
        return [str(index) for index in range(len(self))]

    def list_values(self, name: str) -> list[Any]:
        names = {new: key for key, new in self.renamed.items()}
        column = names.get(name, name)
        if column not in self.data.features:
            is_caption = name == "caption"
            remedy = "rename the column with captions" if is_caption else "use --label to name the column with classes"
            raise StreamError(
                f"--data {self.name}: expected a column named {name!r}, got {', '.join(self.data.features)}; {remedy}"
            )
        return self.data.with_format(None)[column][:]

    def class_names(self, name: str) -> tuple[str, ...] | None:
        column = {new: key for key, new in self.renamed.items()}.get(name, name)
        return tuple(getattr(self.data.features.get(column), "names", None) or ()) or None

    def hash_content(self) -> int:
        return zlib.crc32(repr((len(self), sorted(map(str, self.data.features.items())))).encode())


def open_hub(name: str) -> tuple[Source, Source | None]:
    """Open the training and test splits of a save_to_disk folder, a folder of parquet files, or a hub name."""
    import datasets

    try:
        saved = any((Path(name) / each).is_file() for each in ("dataset_dict.json", "state.json"))
        found = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # the library, its file systems and formats raise various errors
        raise StreamError(f"--data {name} can't be opened as a dataset ({type(error).__name__}: {error})") from error
    if isinstance(found, datasets.Dataset):
        return HubSource(found, name), None
    test = next((split for split in TEST_NAMES if split in found), None)
    train = "train" if "train" in found else next((split for split in found if split != test), None)
    if train is None:
        raise StreamError(f"--data {name}: expected a training split, got {', '.join(map(str, found))}")
    return HubSource(found[train], f"{name} ({train})"), None if test is None else HubSource(
        found[test], f"{name} ({test})"
    )


@dataclass(frozen=True)
class FileSource:
    """Image files, the class number of each file, and the names of all classes."""

    files: list[Path]
    labels: list[int]
    root: Path
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> dict[str, Any]:
        return {"image": open_image(self.files[index]), "label": self.labels[index]}

    @property
    def fields(self) -> set[str]:
        return {"image", "label"}

    def measure(self, index: int) -> tuple[int, int]:
        return measure_image(self.files[index])

    def locate(self, index: int) -> str:
        return str(self.files[index])

    def list_keys(self) -> list[str]:
        return [file.relative_to(self.root).as_posix() for file in self.files]

    def list_values(self, name: str) -> list[Any]:
        if name != "label":
            raise StreamError(f"--label {name}: files have no fields; leave out --label")
        return list(self.labels)

    def class_names(self, name: str) -> tuple[str, ...]:
        return self.classes

    def hash_content(self) -> int:
        rows = [f"{key} {file.stat().st_size}" for key, file in zip(self.list_keys(), self.files, strict=True)]
        return zlib.crc32("\n".join(rows).encode())


# --- classes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledStream:
    """Stream with the class number of each sample, int64 (N,)."""

    stream: Stream
    classes: np.ndarray

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return a sample's image and class."""
        return self.stream.open(index), int(self.classes[index])

    @property
    def digest(self) -> int:
        return zlib.crc32(self.classes.tobytes(), self.stream.digest)


def check_classes(values: Sequence[Any], label: str) -> None:
    """Reject values that can't be classes, such as the -1 or None of a sample without a class."""
    for value in values:
        is_class = isinstance(value, (str, int, float)) and value == value
        if not is_class or (isinstance(value, int) and value < 0):
            raise StreamError(
                f"--label {label}: expected a name or a non-negative number as the class of each sample, got {value!r}"
                "; remove the samples without a class"
            )


def check_class_names(train: Source, test: Source, label: str) -> None:
    """Reject test samples whose class numbers have different names from those of the training samples."""
    ours, theirs = train.class_names(label), test.class_names(label)
    if ours is None or theirs is None or ours == theirs:
        return
    pairs = enumerate(zip_longest(ours, theirs))
    number, (name, other) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    raise StreamError(
        f"--label {label}: expected the same class names in the training and test data, got {name!r} and {other!r} for "
        f"class {number}; cast the classes of the test data to the ClassLabel of the training data"
    )


def number_classes(
    train: Stream, test: Stream, label: str
) -> tuple[LabelledStream, LabelledStream, int, tuple[str, ...]]:
    """Return both streams with classes from a field, the number of classes, and the class names if known.

    Class names are sorted, unless the data assigns numbers to classes.
    """
    check_class_names(train.source, test.source, label)
    values = {id(each.source): each.source.list_values(label) for each in (train, test)}
    found = [values[id(each.source)] for each in (train, test)]
    check_classes([*found[0], *found[1]], label)
    unique = set(found[0]) | set(found[1])
    if all(isinstance(value, int) for value in unique):
        number, total = {value: value for value in unique}, max(unique) + 1
        names = train.source.class_names(label) or ()
    else:
        names = tuple(sorted(set(map(str, unique))))
        number, total = {value: names.index(str(value)) for value in unique}, len(names)
    parts = [
        LabelledStream(each, np.array([number[all_values[i]] for i in each.indices], np.int64))
        for each, all_values in zip((train, test), found, strict=True)
    ]
    return parts[0], parts[1], total, names


def is_stream(path: Path) -> bool:
    """Return whether :func:`open_source` can read a path, that is, whether it has shards or a Hugging Face dataset."""
    if path.is_dir():
        markers = ("dataset_dict.json", "state.json")
        return (
            any((path / each).is_file() for each in markers)
            or bool(list_visible(path, "*.tar"))
            or bool(list_visible(path, "**/*.parquet"))
        )
    return str(path).startswith(HUB) or path.name.endswith(".tar")


def open_source(path: Path) -> tuple[Source, Source | None]:
    """Open the training samples, and the test samples if the data has a separate test set."""
    if str(path).startswith(HUB):
        return open_hub(str(path).removeprefix(HUB))
    if path.is_dir() and not list_visible(path, "*.tar"):
        return open_hub(str(path))
    cache = user_cache() / "shards"
    train, tests = find_shards(path)
    return ShardSource(train, cache), ShardSource(tests, cache) if tests else None


def hold_out(keys: Sequence[str], parts: int, fold: int = 0) -> np.ndarray:
    """Return a mask (N,) of the samples to hold out for testing: those whose hash is ``fold`` modulo ``parts``.

    Existing samples stay in their parts when you add samples, so the held-out fraction may differ between classes.
    """
    return np.array([zlib.crc32(key.encode()) % parts == fold for key in keys], bool)


def split_source(source: Source, test: Source | None, parts: int) -> tuple[Stream, Stream]:
    """Return the training and test streams. Without a test source, about 1/``parts`` of the samples are held out."""
    if test is not None:
        return Stream(source, np.arange(len(source))), Stream(test, np.arange(len(test)))
    held_out = hold_out(source.list_keys(), parts)
    return Stream(source, np.flatnonzero(~held_out)), Stream(source, np.flatnonzero(held_out))
