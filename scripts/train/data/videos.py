"""Videos for training. Small frames are kept in memory and cut into segments, and labels describe the order of frames.

Training and test clips come from different segments with gaps between the segments, so they share no frames.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F

from ...common.cache import digest_file, kept, user_cache
from ...common.devices import sent
from ...common.folder import list_visible
from .captions import SUFFIXES as IMAGES

SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
# Some other FFmpeg demuxers (concat, hls, dash, ...) also read any file or URL to which the opened file refers.
OPENED_AS = {
    "format_whitelist": "avi,asf,flv,gif,matroska,mov,mp4,mpeg,mpegts,nut,ogg,webm",
    "protocol_whitelist": "file",
}
DECODERS = {"pyav": "av", "opencv": "cv2"}
LAYOUT = 2  # version of cached frames; change it if decode returns different frames
CACHE = "Folder for decoded frames of videos, shared by runs: auto (the user's cache), none, or a folder."


class VideoError(typer.BadParameter):
    """Error for a video that can't be read, or for videos that are too short."""


def find_videos(paths: Sequence[Path]) -> list[Path]:
    """Return the video files in ``paths``, and those in folders in ``paths``, sorted by name."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise VideoError(
                f"--data {path}: no such file or folder; expected a video ({', '.join(SUFFIXES)}) or a folder of videos"
            )
        inside = [p for p in list_visible(path) if p.suffix.lower() in SUFFIXES] if path.is_dir() else [path]
        if not inside:
            raise VideoError(
                f"--data {path}: expected videos ({', '.join(SUFFIXES)}) in the folder, found none"
                f"{advise_on_pictures(path)}"
            )
        found += inside
    again = {p.resolve() for p in found if [q.resolve() for q in found].count(p.resolve()) > 1}
    if again:  # otherwise, training and test clips could contain the same frames
        raise VideoError(
            f"--data: expected each video once, got {', '.join(p.name for p in sorted(again))} more than once"
        )
    if not found:
        raise VideoError("--data: expected video files or folders, got none")
    return found


def advise_on_pictures(folder: Path) -> str:
    """Return advice on training on frames stored as pictures, to append to an error, or "" if there are no pictures."""
    first = next((path for path in list_visible(folder) if path.suffix.lower() in IMAGES), None)
    if first is None:
        return ""
    return (
        f"; pictures such as {first.relative_to(folder)} are not read as frames: make a video of each folder of "
        "frames, for example with ffmpeg -i %03d.png clip.mp4"
    )


def decoder(name: str | None = None) -> str:
    """Return the name of an installed decoder."""
    names = [name] if name else DECODERS
    for each in names:
        if importlib.util.find_spec(DECODERS[each]):
            return each
    raise VideoError(
        f"no video decoder is installed ({', '.join(names)}); run pip install av, or pip install "
        "'lrpe-md[scripts]' for all commands"
    )


def decode(path: Path, size: int | tuple[int, int], with_: str | None = None) -> Tensor:
    """Decode and centre-crop all frames of a file, as RGB in uint8 (F, 3, height, width).

    Frames are rotated upright, as a video player shows them. ``size`` is the height and width, or one number for both.
    """
    shape = (size, size) if isinstance(size, int) else size
    frames = {"pyav": _pyav, "opencv": _opencv}[decoder(with_)](path, shape)
    if not path.is_file():
        problem = " is a folder" if path.is_dir() else ": no such file"
        raise VideoError(f"{path}{problem}; pass the path of a video")
    expected = next(frames)
    squares = [_crop(frame, shape) for frame in frames]
    if not squares:
        raise VideoError(f"{path}: no frame could be decoded; check that it is a complete video (ffprobe {path.name})")
    if len(squares) < 0.95 * expected - 1:  # videos that were cut without re-encoding lack a few frames at the ends
        raise VideoError(
            f"{path}: only {len(squares)} of {expected:.0f} frames could be decoded; the file is damaged, so remove "
            "or re-encode it"
        )
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous()


def find_cache(cache: str) -> Path | None:
    """Return the folder that --cache names, or None."""
    return {"auto": user_cache() / "footage", "none": None}.get(cache, Path(cache))


def decode_cached(path: Path, size: int | tuple[int, int], cache: Path | None) -> Tensor:
    """Call :func:`decode`, or return the frames from a cache folder if an earlier call stored them there."""
    if cache is None or not path.is_file():  # decode explains the error
        return decode(path, size)
    with_, side = decoder(), size[0] if isinstance(size, tuple) and size[0] == size[1] else size
    about = "footage", LAYOUT, side, with_, importlib.import_module(DECODERS[with_]).__version__
    return kept(cache, (*about, digest_file(path)), partial(decode, path, size))


def measure(path: Path) -> tuple[int, int]:
    """Return the height and width of a file's frames after they are rotated upright."""
    frames = {"pyav": _pyav, "opencv": _opencv}[decoder()](path, None)
    next(frames)
    for frame in frames:
        return frame.shape[0], frame.shape[1]
    raise VideoError(f"{path}: no frame could be decoded; check that it is a complete video (ffprobe {path.name})")


def _scaled(height: int, width: int, shape: tuple[int, int] | None) -> tuple[int, int]:
    """Return the smallest size with the same aspect ratio that covers a shape. None keeps the size."""
    if shape is None:
        return height, width
    factor = max(shape[0] / height, shape[1] / width)
    return max(shape[0], round(height * factor)), max(shape[1], round(width * factor))


def _crop(frame: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    top, left = (frame.shape[0] - shape[0]) // 2, (frame.shape[1] - shape[1]) // 2
    return np.ascontiguousarray(frame[top : top + shape[0], left : left + shape[1]])


def _pyav(path: Path, shape: tuple[int, int] | None) -> Iterator[Any]:
    """Yield the number of frames given in the file's header (0 if unknown), and then the frames."""
    import av  # pyright: ignore[reportMissingImports]
    from av.error import FFmpegError  # pyright: ignore[reportMissingImports]

    try:
        with av.open(str(path), options=dict(OPENED_AS)) as container:
            if not container.streams.video:
                raise VideoError(f"{path}: expected a video stream, found none")
            stream = container.streams.video[0]
            seconds = stream.duration and stream.time_base and float(stream.duration * stream.time_base)
            seconds = seconds or (container.duration or 0) / av.time_base
            counts = [stream.frames, seconds * float(stream.average_rate or 0)]  # an edit list can hide frames
            yield min((count for count in counts if count), default=0)
            for frame in container.decode(video=0):
                turns = round(frame.rotation / 90)  # quarter turns anticlockwise that show the frame upright
                stored = (shape[1], shape[0]) if shape and turns % 2 else shape
                height, width = _scaled(frame.height, frame.width, stored)
                resized = frame.reformat(width, height, format="rgb24", interpolation="AREA")
                yield np.rot90(resized.to_ndarray(), turns)
    except (FFmpegError, OSError) as error:
        raise VideoError(f"{path} can't be read as a video ({error}); remove or re-encode it") from error


def _opencv(path: Path, shape: tuple[int, int] | None) -> Iterator[Any]:
    """Like :func:`_pyav`, but decode with OpenCV."""
    import cv2  # pyright: ignore[reportMissingImports]

    before = os.environ.get("OPENCV_FFMPEG_CAPTURE_OPTIONS")
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = "|".join(f"{name};{value}" for name, value in OPENED_AS.items())
    try:
        capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    finally:
        del os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"]
        os.environ.update({} if before is None else {"OPENCV_FFMPEG_CAPTURE_OPTIONS": before})
    if not capture.isOpened():
        raise VideoError(f"{path} can't be read as a video; remove or re-encode it")
    try:
        yield max(capture.get(cv2.CAP_PROP_FRAME_COUNT), 0)
        while True:
            there, frame = capture.read()
            if not there:
                return
            height, width = _scaled(frame.shape[0], frame.shape[1], shape)
            yield cv2.cvtColor(cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2RGB)
    finally:
        capture.release()


@dataclass(frozen=True)
class Segment:
    """Frames from start to stop - 1, either for training or held out."""

    start: int
    stop: int
    held_out: bool


@dataclass(frozen=True)
class Footage:
    """Concatenated videos, with all frames as uint8 (F, 3, S, S)."""

    frames: Tensor
    segments: tuple[Segment, ...]

    @property
    def digest(self) -> int:
        """Hash of the training and test data."""
        return zlib.crc32(repr(self.segments).encode(), zlib.crc32(self.frames.cpu().numpy().tobytes()))

    def starts(self, span: int, *, held_out: bool) -> np.ndarray:
        """Return the start frame of every clip of ``span`` frames that lies within a segment."""
        parts = [np.arange(s.start, s.stop - span + 1) for s in self.segments if s.held_out == held_out]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def clips(self, starts: Tensor, frames: int, every: int, size: int) -> Tensor:
        """Return the clips that begin at ``starts`` (B,), as floats (B, 3, frames, size, size) in [-1, 1]."""
        index = starts[:, None] + every * torch.arange(frames, device=starts.device)
        x = self.frames[index.flatten().to(self.frames.device)].float()
        if x.shape[-1] != size:
            x = F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)
        return (x / 127.5 - 1).unflatten(0, index.shape).transpose(1, 2)


def segments(lengths: Sequence[int], segment: int, parts: int, fold: int, gap: int) -> tuple[Segment, ...]:
    """Cut videos into segments. Every ``parts``-th segment is held out, starting with the ``fold``-th.

    Training segments end ``gap`` frames before a held-out segment, and start again ``gap`` frames after it.
    """
    found, first, number = [], 0, 0
    for length in lengths:
        whole = max(length // segment, 1)
        ends = [first + min(i * segment, length) for i in range(whole)] + [first + length]  # the last gets the rest
        held_out = [(number + i) % parts == fold for i in range(whole)]
        for i in range(whole):
            start, stop = ends[i], ends[i + 1]
            if not held_out[i]:
                start += gap * (i > 0 and held_out[i - 1])
                stop -= gap * (i + 1 < whole and held_out[i + 1])
            if start < stop:
                found.append(Segment(start, stop, held_out[i]))
        first, number = first + length, number + whole
    return tuple(found)


def check_segments(lengths: Sequence[int], segment: int, parts: int, fold: int, gap: int, span: int) -> None:
    """Reject videos whose segments contain no training clip or no held-out clip.

    Args:
        lengths, segment, parts, fold, gap: arguments of :func:`segments`. A held-out clip has ``gap`` frames.
        span: number of frames in a training clip.

    Raises:
        VideoError: if the training clips or the held-out clips are missing. The message suggests the nearest valid
            --segment if there is one.
    """

    def works(segment: int) -> bool:
        fitting = {s.held_out for s in segments(lengths, segment, parts, fold, gap)
                   if s.stop - s.start >= (gap if s.held_out else span)}  # fmt: skip
        return len(fitting) == 2

    if works(segment):
        return
    longest = max(lengths)
    shorter = (n for n in range(min(segment - 1, longest), 0, -1) if works(n))
    longer = (n for n in range(segment + 1, longest + 1) if works(n))
    found = next(itertools.chain(shorter, longer), None)
    remedy = "pass fewer --frames or a smaller --every, or add videos" if found is None else f"pass --segment {found}"
    raise VideoError(
        f"--data: with segments of {segment} frames, there is no room for a training clip of {span} frames or for a "
        f"held-out clip of {gap} frames (the longest video has {longest} frames); {remedy}"
    )


def describe_files(paths: Sequence[Path]) -> tuple[tuple[Path, int, int], ...]:
    """Return the path, size in bytes and modification time of each file."""
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in ((path, path.stat()) for path in paths))


@lru_cache(maxsize=2)  # the sizes in training and in tests
def decode_all(
    videos: tuple[tuple[Path, int, int], ...], size: int, cache: Path | None
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """Return all decoded frames, and the number of frames per video. The result is cached until a file changes.

    ``videos`` is a result of :func:`describe_files`.
    """
    console = Console(stderr=True)
    shown = track(videos, "decoding videos", console=console, transient=True, disable=not console.is_terminal)
    frames = [decode_cached(path, size, cache) for path, *_ in shown]
    return torch.cat(frames), [len(each) for each in frames]


def load_footage(
    paths: Sequence[Path],
    size: int,
    *,
    segment: int,
    parts: int,
    fold: int,
    gap: int,
    span: int,
    device: torch.device,
    cache: Path | None = None,
) -> Footage:
    """Decode all videos and cut them into segments.

    Args:
        segment, parts, fold, gap, span: see :func:`check_segments`.
        cache: folder for decoded frames, shared by runs.
    """
    frames, lengths = decode_all(describe_files(find_videos(paths)), size, cache)
    check_segments(lengths, segment, parts, fold, gap, span)
    return Footage(frames.to(device), segments(lengths, segment, parts, fold, gap))


# --- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Task in which the model predicts the order of a clip's frames.

    Args:
        classes: name of each label.
        order: function (label, frames) that returns the indices of the clip's frames in their new order.
        multiple: number that must divide the number of frames.
        source: description and reference, for the help text.
    """

    classes: tuple[str, ...]
    order: Callable[[int, int], list[int]]
    multiple: int
    source: str

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def _arrow(label: int, frames: int) -> list[int]:
    return list(range(frames))[:: -1 if label else 1]


def _chunks(label: int, frames: int) -> list[int]:
    return np.arange(frames).reshape(4, -1)[list(PERMUTATIONS[label])].ravel().tolist()


PERMUTATIONS = tuple(itertools.permutations(range(4)))  # of the chunks of a clip
TASKS = {
    "arrow": Task(
        ("forwards", "backwards"), _arrow, 1,
        "whether the clip runs forwards or backwards; Wei et al., Learning and Using the Arrow of Time, CVPR 2018",
    ),
    "order": Task(
        tuple(",".join(str(1 + i) for i in permutation) for permutation in PERMUTATIONS), _chunks, 4,
        "the order of four shuffled chunks; after Xu et al., Video Clip Order Prediction, CVPR 2019",
    ),
}  # fmt: skip


def ordered(x: Tensor, labels: Tensor, task: Task) -> Tensor:
    """Reorder the frames of each clip in x (B, 3, T, ...) as specified by the clip's label."""
    table = sent(np.array([task.order(label, x.shape[2]) for label in range(task.num_classes)]), x.device)
    index = table[labels.to(x.device)]
    return x[torch.arange(len(x), device=x.device)[:, None], :, index].transpose(1, 2)
