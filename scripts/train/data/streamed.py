"""Images from webdataset shards and Hugging Face datasets, decoded on demand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from PIL import Image

from .records import Records
from .streams import Source, Stream, StreamError, check_class_names, check_classes, open_source

Streams = Sequence[Stream]


def open_streamed(path: Path, condition: str, label: str) -> tuple[Records, Any, Any, int]:
    """Open a stream. Return records, a function that decodes an image, a function that returns its size, and a hash.

    Args:
        condition: one of :data:`.records.CONDITIONS`. "auto" uses captions if there are any, otherwise classes, and
            otherwise neither.
        label: field that contains the class. The default is .cls in shards, or the ClassLabel of a dataset.

    Raises:
        typer.BadParameter: if there are no images.
    """
    train, test = open_source(path)
    sources = [train] if test is None else [train, test]
    for source in sources:
        if "image" not in source.fields:
            found = ", ".join(sorted(source.fields))
            raise typer.BadParameter(f"--data {path}: expected samples with images, got only these fields: {found}")
    streams = [Stream(source, np.arange(len(source))) for source in sources]
    keys = [source.list_keys() for source in sources]
    names = [*keys[0], *(f"test/{key}" for key in keys[-1] if test is not None)]
    tests = None if test is None else np.arange(len(names)) >= len(train)
    captions, labels, classes = None, None, ()
    has_captions = all("caption" in source.fields for source in sources)
    if condition == "captions" or (condition == "auto" and has_captions and not label):
        captions = [caption for source in sources for caption in _captions(source)]
    elif condition == "labels" or (condition == "auto" and (label or all("label" in s.fields for s in sources))):
        check_class_names(sources[0], sources[-1], label or "label")
        values = [value for source in sources for value in source.list_values(label or "label")]
        check_classes(values, label or "label")
        labels, classes = _number(values)
        classes = train.class_names(label or "label") or classes
    value = 0
    for stream in streams:
        value = zlib.crc32(str(stream.digest).encode(), value)
    return Records(names, captions, labels, classes, tests), partial(_open, streams), partial(_measure, streams), value


def _captions(source: Source) -> list[str]:
    captions = source.list_values("caption")
    wrong = next((index for index, caption in enumerate(captions) if not isinstance(caption, str)), None)
    if wrong is not None:
        raise StreamError(
            f"{source.locate(wrong)}: expected text as the caption, got {captions[wrong]!r}; repair or remove "
            "the sample"
        )
    return captions


def _number(values: list[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class number of each sample, and the sorted class names. Integer classes keep their numbers."""
    unique = set(values)
    if all(isinstance(value, int) for value in unique):
        return np.array(values, np.int64), tuple(map(str, range(max(unique) + 1)))
    names = sorted(set(map(str, unique)))
    number = {name: i for i, name in enumerate(names)}
    return np.array([number[str(value)] for value in values], np.int64), tuple(names)


def _find(streams: Streams, index: int) -> tuple[Stream, int]:
    for stream in streams:
        if index < len(stream):
            return stream, index
        index -= len(stream)
    raise IndexError(index)


def _open(streams: Streams, index: int) -> Image.Image:
    stream, number = _find(streams, index)
    return stream.open(number)


def _measure(streams: Streams, index: int) -> tuple[int, int]:
    stream, number = _find(streams, index)
    return stream.measure(number)
