"""Videos for generative training, optionally with captions or class labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import typer
from torch import Tensor

from ...common.folder import list_visible
from .buckets import Buckets, Shape, Sizes
from .captions import SUFFIXES as IMAGES
from .captions import read_text
from .records import Records, Split, choose_subset
from .videos import SUFFIXES, Footage, check_segments, decode_cached, find_videos, measure, segments


def is_footage(path: Path) -> bool:
    """Return whether a path is a video or a folder of videos.

    Raises:
        typer.BadParameter: for a folder that contains both videos and images.
    """
    if not path.is_dir():
        return path.suffix.lower() in SUFFIXES
    there = {each.suffix.lower() for each in list_visible(path)}
    if there & set(SUFFIXES) and there & set(IMAGES):
        raise typer.BadParameter(
            f"--data {path}: expected images or videos, got both; pass a folder with only one kind"
        )
    return bool(there & set(SUFFIXES))


@dataclass(frozen=True)
class Films:
    """Records, lengths and paths of videos, and the cache folder for decoded frames.

    Videos whose frames were encoded as latents have no paths.
    """

    records: Records
    lengths: list[int]
    files: Sequence[Path] = ()
    cache: Path | None = None

    def read(self, shape: Shape, indices: np.ndarray) -> Tensor:
        """Decode the frames with these indices, as uint8 (F, 3, height, width). The indices are sorted."""
        ends = np.cumsum(self.lengths)
        owners, firsts = np.searchsorted(ends, indices, side="right"), ends - self.lengths
        chosen = {int(i): torch.from_numpy(indices[owners == i] - firsts[i]) for i in np.unique(owners)}
        return torch.cat([decode_cached(self.files[i], shape, self.cache)[frames] for i, frames in chosen.items()])

    def clips(self, span: int, segment: int, split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the first frame and video of each clip of ``span`` frames, and whether the clip is held out.

        Videos are cut into segments of ``segment`` frames, with a gap between training and held-out segments, as in
        :func:`.videos.segments`.
        """
        check_segments(self.lengths, segment, split.parts, split.fold, span, span)
        cut = segments(self.lengths, segment, split.parts, split.fold, span)
        footage = Footage(torch.empty(0), cut)
        parts = [footage.starts(span, held_out=held_out) for held_out in (False, True)]
        starts = np.concatenate(parts)
        owners = np.searchsorted(np.cumsum(self.lengths), starts, side="right")
        return starts, owners, np.repeat([False, True], [len(part) for part in parts])


def find_films(path: Path, split: Split, condition: str) -> tuple[list[Path], Records]:
    """Find the videos in a file or folder, and return their paths and records.

    The caption of NAME.mp4 is in NAME.txt. If there are no captions but several folders, each folder is a class.
    """
    found = find_videos([path])
    files = [found[i] for i in choose_subset(len(found), split.limit)]
    return files, _records(path, files).with_condition(condition, path)


def sort_films(files: list[Path], sizes: Sizes) -> Buckets:
    """Sort videos into buckets by aspect ratio."""
    return sizes.sort(np.ones((len(files), 2)) if sizes.max_ratio == 1 else np.array([measure(file) for file in files]))


def open_films(
    path: Path, sizes: Sizes, split: Split, condition: str, cache: Path | None
) -> tuple[Films, Buckets, list[Tensor]]:
    """Decode the videos in a file or folder. ``cache`` is a folder for decoded frames, shared by runs.

    Returns:
        the videos, the buckets of all frames, and, for each bucket, the frames at the largest training size, as uint8
        (F, 3, height, width).
    """
    files, records = find_films(path, split, condition)
    films = sort_films(files, sizes)
    shapes = films.shapes[max(sizes.train)]
    frames = [decode_cached(file, shapes[bucket], cache) for file, bucket in zip(files, films.of, strict=True)]
    lengths = [len(each) for each in frames]
    parts = [torch.cat([frames[i] for i in films.members(bucket)]) for bucket in range(films.number)]
    return Films(records, lengths, files, cache), Buckets(films.shapes, films.of.repeat(lengths)), parts


def _records(path: Path, files: list[Path]) -> Records:
    names = [file.name if file == path else file.relative_to(path).as_posix() for file in files]
    texts = [file.with_suffix(".txt") for file in files]
    if all(text.is_file() for text in texts):
        return Records(names, captions=[read_text(path, text.name, text.read_bytes).strip() for text in texts])
    folders = [file.parent.name for file in files]
    classes = tuple(sorted(set(folders)))
    if len(classes) < 2:
        return Records(names)
    return Records(names, labels=np.array([classes.index(each) for each in folders], np.int64), classes=classes)
