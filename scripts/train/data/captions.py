"""Read images from folders and zips, with captions and other fields from a table."""

from __future__ import annotations

import csv
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import typer
from PIL import Image

from lrpe_md.checks import plural, suggest

from ...common.folder import is_hidden, list_visible
from .streams import SUFFIXES, measure_image, open_image

TABLES = ("metadata.jsonl", "metadata.csv", "captions.jsonl", "captions.csv")
REMEDY = (
    f"expected a folder or a .zip of images ({', '.join(SUFFIXES)}) with captions (NAME.txt next to NAME.png, or one "
    f"of {', '.join(TABLES)} with file_name and text), with classes (CLASS/NAME.png, or train/CLASS/NAME.png and "
    "val/CLASS/NAME.png), or without either"
)

Read = Callable[[], bytes]
# Errors when reading a file, or a zip member that is encrypted (RuntimeError), damaged or compressed with an unknown
# method.
UNREADABLE = (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def list_files(path: Path) -> dict[str, Read]:
    """Return the visible files in a folder or a zip by name. Names are relative paths with forward slashes."""
    if path.is_dir():
        return {p.relative_to(path).as_posix(): p.read_bytes for p in list_visible(path) if p.is_file()}
    if not path.exists():
        raise typer.BadParameter(f"--data {path}: no such file or folder; {REMEDY}")
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise typer.BadParameter(f"--data {path}: can't be read as a zip ({error}); {REMEDY}") from error
    files: dict[str, Read] = {}
    for info in archive.infolist():
        if is_hidden(PurePosixPath(info.filename)):
            continue
        if info.filename in files:
            raise typer.BadParameter(f"--data {path}: {info.filename} appears twice; remove one")
        if not info.is_dir():
            files[info.filename] = partial(archive.read, info)
    return files


def pair_up(path: Path, files: dict[str, Read], without: str, field: str = "text") -> dict[str, str]:
    """Map each image's name to its caption, or to another field of the table."""
    images = {name for name in files if PurePosixPath(name).suffix.lower() in SUFFIXES}
    if not images:
        raise typer.BadParameter(f"--data {path}: no images among its {len(files)} files; {REMEDY}")
    tables = [name for name in files if PurePosixPath(name).name in TABLES]
    if len(tables) > 1:
        raise typer.BadParameter(f"--data {path}: expected one table of captions, got {', '.join(sorted(tables))}")
    if tables:
        return _from_table(path, tables[0], files, images, without, field)
    if field != "text":
        raise typer.BadParameter(
            f"--label {field}: expected a table such as {TABLES[0]} with this field in --data {path}, found none; add "
            "one, or leave out --label"
        )
    if without:
        raise typer.BadParameter(
            f"--without {without}: expected a table such as {TABLES[0]} with this field in --data {path}, found none; "
            "add one, or leave out --without"
        )
    beside = {name: PurePosixPath(name).with_suffix(".txt").as_posix() for name in sorted(images)}
    alone = [name for name, text in beside.items() if text not in files]
    if alone:
        raise typer.BadParameter(
            f"--data {path}: expected a caption in NAME.txt next to each of the {len(beside)} images, got "
            f"{len(beside) - len(alone)} (none for {_name_some(alone)}); add the missing captions, or pass "
            "--condition none or --condition labels to train without captions"
        )
    texts = {PurePosixPath(name).with_suffix("").as_posix() for name in images}
    captions = (name for name in files if name.endswith(".txt"))
    _refuse(path, "caption", "without an image", (n for n in captions if n.removesuffix(".txt") not in texts))
    return {name: read_text(path, text, files[text]).strip() for name, text in beside.items()}


def _from_table(
    path: Path, table: str, files: dict[str, Read], images: set[str], without: str, field: str
) -> dict[str, str]:  # fmt: skip
    folder, pairs, skipped = PurePosixPath(table).parent, {}, set()
    for line, row in _rows(path, table, read_text(path, table, files[table])):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("file_name", field)):
            close = "" if not isinstance(row, dict) or field in row else suggest(field, row)
            raise typer.BadParameter(f"{path}: {table}, line {line}: expected file_name and {field}, got {row}{close}")
        if not all(_is_text(row[key]) for key in ("file_name", field)):
            raise typer.BadParameter(f"{path}: {table}, line {line}: expected text, got an unpaired surrogate: {row!a}")
        name = (folder / row["file_name"]).as_posix()
        if name in pairs or name in skipped:
            raise typer.BadParameter(f"{path}: {table}, line {line}: {row['file_name']} already has a caption")
        if without and without not in row:
            raise typer.BadParameter(
                f"--without {without}: {table}, line {line} has no such field{suggest(without, row)}; pass one of "
                f"{', '.join(row)}"
            )
        if without and str(row[without]).lower() in ("true", "1", "yes"):
            skipped.add(name)
        else:
            pairs[name] = row[field]
    _refuse(path, "row", f"of {table} without an image", (name for name in pairs if name not in images))
    _refuse(
        path, "image", f"without a row in {table}", (n for n in sorted(images) if n not in pairs and n not in skipped)
    )
    if not pairs:
        raise typer.BadParameter(f"{path}: {table} has no rows" + (f" where {without} is false" if without else ""))
    return pairs


def _rows(path: Path, table: str, text: str) -> Iterable[tuple[int, Any]]:
    if table.endswith(".csv"):
        reader = csv.DictReader(io.StringIO(text))
        try:
            yield from enumerate(reader, start=2)
        except csv.Error as error:
            raise typer.BadParameter(f"{path}: {table}, line {reader.line_num}: {error}") from error
        return
    for i, line in enumerate(text.split("\n"), start=1):  # splitlines() would also split captions at other characters
        if line.strip():
            try:
                yield i, json.loads(line)
            except ValueError as error:
                raise typer.BadParameter(f"{path}: {table}, line {i} is not JSON: {error}") from error
            except RecursionError as error:
                raise typer.BadParameter(f"{path}: {table}, line {i} is nested too deeply to be read") from error


def read_text(path: Path, name: str, read: Read) -> str:
    """Read a UTF-8 text file."""
    try:
        return read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path}: {name} is not UTF-8 ({error})") from error
    except UNREADABLE as error:
        raise typer.BadParameter(f"{path}: {name} can't be read ({error}); repair or remove it") from error


def _is_text(value: str) -> bool:
    return not any("\ud800" <= sign <= "\udfff" for sign in value)


def _refuse(path: Path, noun: str, problem: str, names: Iterable[str]) -> None:
    found = list(names)
    if found:
        raise typer.BadParameter(
            f"--data {path}: {plural(len(found), noun)} {problem}: {_name_some(found)}; every image needs a caption, "
            "and every caption an image"
        )


def _name_some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


@contextmanager
def _refuse_unreadable(name: str, path: Path) -> Iterator[None]:
    """Convert errors raised while reading an image to errors that name the image."""
    try:
        yield
    except (*UNREADABLE, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise typer.BadParameter(f"{path}: {name} can't be read as an image ({error}); repair or remove it") from error


def decode(name: str, read: Read, path: Path) -> Image.Image:
    """Read an image in ``path``; see :func:`.streams.open_image`."""
    with _refuse_unreadable(name, path):
        return open_image(read())


def measure(name: str, read: Read, path: Path) -> tuple[int, int]:
    """Return the height and width of an image in ``path`` after it is rotated upright, without decoding it."""
    with _refuse_unreadable(name, path):
        return measure_image(read())


def crop(image: Image.Image, shape: tuple[int, int]) -> np.ndarray:
    """Centre-crop an image to the aspect ratio of ``shape``, and resize it to (*shape, 3)."""
    (height, width), (across, down) = shape, image.size
    across, down = min(across, round(down * width / height)), min(down, round(across * height / width))
    left, top = (image.size[0] - across) // 2, (image.size[1] - down) // 2
    part = image.crop((left, top, left + max(across, 1), top + max(down, 1)))
    return np.asarray(part.resize((width, height), Image.Resampling.LANCZOS))
