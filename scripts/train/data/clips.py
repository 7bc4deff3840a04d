"""Labelled videos in memory, from one folder per class. A random number per clip determines the clip's frames."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_md.checks import plural

from ...common.devices import sent
from ...common.folder import list_visible
from .images import TEST_FOLDERS
from .streams import hold_out
from .videos import SUFFIXES, VideoError, advise_on_pictures, decode_all, describe_files

SAMPLINGS = ("dense", "uniform")
RESOLUTION = 2**20  # number of possible start positions of a clip in a video
REMEDY = "expected a folder with CLASS/*.mp4 and at least two classes, or with train/CLASS/*.mp4 and val/CLASS/*.mp4"


@dataclass(frozen=True)
class Sampling:
    """Rule for choosing a clip's frames.

    Args:
        kind: "dense" uses every ``every``-th frame, starting with a random frame. "uniform" divides the video into
            ``frames`` equal parts, and uses one frame from each part.
        frames: number of frames.
        every: spacing of the frames for "dense".
    """

    kind: str
    frames: int
    every: int

    @property
    def span(self) -> int:
        """Minimum length of a video (in frames) for clips without repeated frames."""
        return self.frames if self.kind == "uniform" else (self.frames - 1) * self.every + 1

    def describe_short(self, lengths: np.ndarray, noun: str) -> str:
        """Report how many videos are shorter than a clip, or return "" if none are. ``noun`` names the videos."""
        short = int((lengths < self.span).sum())
        if not short:
            return ""
        verb = "is" if short == 1 else "are"
        repeated = "some of their frames are" if self.kind == "uniform" else "their last frame is"
        return f"{short} of {len(lengths)} {noun} {verb} shorter than a clip of {self.span} frames; {repeated} repeated"

    def choose_frames(self, lengths: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return frame numbers (B, frames) for videos of the given lengths, from random ``places`` (B,) in [0, 1).

        If a video is too short, "dense" repeats the last frame, and "uniform" repeats several frames.
        """
        steps = np.arange(self.frames)
        if self.kind == "uniform":
            found = np.floor((steps + places[:, None]) * lengths[:, None] / self.frames)
        else:
            first = np.floor(places * (np.maximum(lengths - self.span, 0) + 1))
            found = first[:, None] + self.every * steps
        return np.minimum(found, lengths[:, None] - 1).astype(np.int64)


@dataclass(frozen=True)
class LabelledVideos:
    """Concatenated frames of labelled videos.

    Args:
        frames: all frames, uint8 (F, 3, S, S).
        firsts, lengths: first frame and number of frames of each video, each (V,).
        labels: class (V,) of each video.
        held_out: mask (V,) of the videos that are held out for testing.
        names: names of the classes.
        has_tests: whether the folder has its own test videos.
    """

    frames: Tensor
    firsts: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    held_out: np.ndarray
    names: tuple[str, ...]
    has_tests: bool = False

    @property
    def digest(self) -> int:
        """Hash of the training and test data."""
        value = zlib.crc32(repr(self.names).encode(), zlib.crc32(self.frames.cpu().numpy().tobytes()))
        for each in (self.lengths, self.labels, self.held_out):
            value = zlib.crc32(np.ascontiguousarray(each).tobytes(), value)
        return value

    def clips(self, videos: np.ndarray, places: np.ndarray, sampling: Sampling, size: int) -> Tensor:
        """Return clips (B, 3, frames, size, size) from the given videos, in [-1, 1]."""
        index = self.firsts[videos][:, None] + sampling.choose_frames(self.lengths[videos], places)
        x = self.frames[sent(index.ravel(), self.frames.device)].float()
        if x.shape[-1] != size:
            x = F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)
        return (x / 127.5 - 1).unflatten(0, index.shape).transpose(1, 2)

    def to(self, device: torch.device) -> LabelledVideos:
        return replace(self, frames=self.frames.to(device))


def _describe_folds(files: Sequence[str], parts: int) -> str:
    """List the folds that have both test and training videos, to be inserted into an error."""
    counts = [hold_out(files, parts, fold).sum() for fold in range(parts)]
    folds = [str(fold) for fold, count in enumerate(counts) if 0 < count < len(files)]
    return f"--fold {' or '.join(folds)}, or " if folds else ""


def load_labelled(
    paths: Sequence[Path],
    size: int,
    *,
    parts: int,
    fold: int = 0,
    cache: Path | None = None,
    only_held_out: bool = False,
) -> LabelledVideos:
    """Decode the videos of a folder with one subfolder per class.

    Args:
        paths: a single folder.
        size: height and width after centre-cropping to a square and resizing.
        parts, fold: if there is no test folder, about 1/``parts`` of the videos are held out, by a hash of the name.
        cache: folder for decoded frames, shared by all runs.
        only_held_out: whether to omit the training videos.

    Raises:
        VideoError: if there is no such folder, there are too few classes, a class has no training videos, a video can't
            be read, no videos are held out, or ``fold`` is passed although there is a test folder.
    """
    if len(paths) != 1 or not paths[0].is_dir():
        got = f"{len(paths)} paths" if len(paths) != 1 else "a file" if paths[0].exists() else "a missing folder"
        raise VideoError(f"--data {' '.join(map(str, paths))}: {REMEDY}, got {got}")
    root, test = paths[0], next((paths[0] / name for name in TEST_FOLDERS if (paths[0] / name).is_dir()), None)
    roots = [root / "train", test] if test is not None and (root / "train").is_dir() else [root]
    found = [(p, part) for part in roots for p in list_visible(part, "*/**/*") if p.suffix.lower() in SUFFIXES]
    classes = [p.relative_to(part).parts[0] for p, part in found]
    names = sorted(set(classes))
    if len(names) < 2:
        outside = sum(p.suffix.lower() in SUFFIXES for p in list_visible(root, "*"))
        got = f"{plural(outside, 'video')} outside any class folder" if outside else "no videos"
        got += "" if outside else advise_on_pictures(root)
        raise VideoError(f"--data {root}: {REMEDY}, got {f'one class, {names[0]}' if names else got}")
    files = [p.relative_to(root).as_posix() for p, _ in found]
    if len(roots) == 2:
        if fold:
            raise VideoError(
                f"--fold {fold}: --data {root} has its own test videos in {roots[1].name}/; leave out --fold"
            )
        held_out = np.array([part == test for _, part in found])
    else:
        held_out = hold_out(files, parts, fold)
    if held_out.all() or not held_out.any():
        folds = _describe_folds(files, parts) if len(roots) == 1 else ""
        raise VideoError(
            f"--data {root}: {held_out.sum()} of {len(found)} videos are held out; add videos, choose {folds}"
            "another --parts, or use train/CLASS and val/CLASS"
        )
    trained = {name for name, is_test in zip(classes, held_out, strict=True) if not is_test}
    if len(roots) == 2 and (unseen := set(classes) - trained):
        raise VideoError(
            f"--data {root}: expected training videos for every class, got none for "
            f"{', '.join(sorted(unseen))}; add videos to train/, or remove these classes from {roots[1].name}/"
        )
    chosen = np.flatnonzero(held_out | (not only_held_out))
    frames, lengths = decode_all(describe_files([found[i][0] for i in chosen]), size, cache)
    firsts = np.cumsum([0, *lengths[:-1]])
    labels = np.array([names.index(classes[i]) for i in chosen])
    return LabelledVideos(frames, firsts, np.array(lengths), labels, held_out[chosen], tuple(names), len(roots) == 2)
