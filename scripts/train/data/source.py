"""Data for generative training, and the options that all generative tasks share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor

from ...common.options import choose
from ..conditions import Captions, Condition, EncoderSize, FeatureFolder, Features, Labels, Unconditional
from ..config import Training, check_ignored, describe, option
from ..order import Steps
from .buckets import MAX_RATIO, MIX_SIZES, Buckets, Sizes, parse_mixed
from .footage import Films, is_footage, open_films
from .pictures import open_pictures
from .records import CONDITIONS, FEW, Records, Split, choose_subset, describe_held_out
from .streams import is_stream
from .values import LATENTS, Clips, Decoded, Latents, Values, add_tests, hash_data, load_pixels
from .videos import CACHE, find_cache


@dataclass(frozen=True, kw_only=True)
class GenerativeTraining(Training):
    """Options for training on images or videos."""

    data: Path = field(
        metadata=describe(
            "Images (a folder, a zip, an .npz, or idx files), shards (.tar), a Hugging Face dataset (hf:OWNER/NAME), "
            "or videos (a file or a folder).",
            free=True,
        )
    )
    condition: str = option(
        "auto", "Conditions: captions, labels, none, or auto (captions or labels if the data has them)."
    )
    without: str = option("", "Boolean field of the caption table; rows where it is true are left out.")
    limit: int = option(0, "Number of images or videos to use; 0 uses all.", least=0, off=True)
    label: str = option("", "Field that holds the class, in .json files of shards or in a Hugging Face dataset.")
    parts: int = option(20, "Number of parts to split the images or video segments into; one is held out.", least=2)
    fold: int = option(0, "Index of the part to hold out, from 0 to --parts - 1.")
    flip: bool = option(False, "Flip half of the training images horizontally.")
    size: int = option(32, "Height and width in training, in pixels.", least=1)
    mix_sizes: str = option("", MIX_SIZES)
    max_ratio: float = option(1.0, MAX_RATIO, least=1)
    stream: bool = option(
        False,
        "Decode images on demand, in the --workers processes, instead of decoding all of them before training. "
        "Webdataset shards and Hugging Face datasets are always streamed.",
    )
    frames: int = option(16, "Frames per clip.", least=1)
    every: int = option(1, "Distance between the frames of a clip, in video frames.", least=1)
    segment: int = option(240, "Length of a video segment, in frames; clips never cross segments.", least=1)
    cache: str = option("auto", CACHE, free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("--condition", [self.condition], CONDITIONS)
        if not 0 <= self.fold < self.parts:
            raise typer.BadParameter(f"--fold: expected 0 to --parts - 1 = {self.parts - 1}, got {self.fold}")

    @property
    def train_sizes(self) -> tuple[int, ...]:
        """Training sizes in pixels. Latents have fixed sizes."""
        return parse_mixed(self.mix_sizes, self.size, 1)

    @property
    def split(self) -> Split:
        return Split(self.parts, self.fold, self.limit or None)


@dataclass(frozen=True)
class Source:
    """Samples of a training run.

    Args:
        values: pixels or latents that the model learns to generate.
        condition: condition of each sample.
        train, held_out: indices of the training and held-out samples.
        digest: hash of the data.
        latents: content of latents.json if the values are latents, or None.
        num_train_sizes: number of training sizes, which come first in the sizes of ``values``.
    """

    values: Values
    condition: Condition
    train: np.ndarray
    held_out: np.ndarray
    digest: Any
    latents: dict[str, Any] | None = None
    num_train_sizes: int = 1

    @property
    def train_sizes(self) -> tuple[int, ...]:
        """Training sizes."""
        return self.values.sizes[: self.num_train_sizes]

    def order(self, batch: int, seed: int) -> Steps:
        """Return the steps for :meth:`train_batch`. Within a step, all samples have the same size and bucket."""
        buckets = Buckets({size: [] for size in self.train_sizes}, self.values.buckets(self.train))
        return buckets.order(batch, seed)

    def train_batch(self, numbers: np.ndarray, draws: np.ndarray) -> tuple[Tensor, Any]:
        """Return the values and conditions of training samples. ``numbers // len(train)`` selects the training size."""
        turn = int(numbers[0]) // len(self.train)
        return self.batch(self.train[numbers % len(self.train)], self.train_sizes[turn], draws)

    @property
    def is_streamed(self) -> bool:
        """Return whether worker processes prepare the batches on the CPU."""
        return isinstance(self.values, Decoded)

    def describe_held_out(self) -> str:
        """Describe how many samples are held out, by class if there are classes, and warn if they are too few."""
        numbers = np.concatenate([self.train, self.held_out])
        held_out = np.arange(len(numbers)) >= len(self.train)
        labels, classes = np.zeros_like(numbers), ()
        if isinstance(self.condition, Labels):
            labels, classes = self.condition.labels[numbers], self.condition.classes
        text = describe_held_out("sample", held_out, labels, classes)
        if len(self.held_out) >= FEW:
            return text
        return (
            f"{text}\nWith fewer than {FEW} test samples, the held-out loss says little; pass a smaller --parts, or "
            "add samples to the test part of --data if it has one"
        )

    def check_batch(self, batch: int) -> None:
        """Raise an error if a batch is larger than the training set."""
        if batch > len(self.train):
            raise typer.BadParameter(
                f"--batch {batch}: expected at most {len(self.train)}, the number of training samples; use a smaller "
                "batch"
            )

    def batch(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> tuple[Tensor, Any]:
        """Return the values and conditions of the given samples; see :meth:`.values.Values.batch`."""
        return self.values.batch(indices, size, draws), self.condition.inputs(indices, self.values.device)

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the text to show next to each sample."""
        names: Any = self.condition.names
        return [names[i] for i in indices]


class Encoding(NamedTuple):
    """Encoders for the conditions.

    Args:
        size: size of the caption encoder, whose width is also the width of class embeddings.
        features: output folder of ``train features``, to use instead of a caption encoder.
    """

    size: EncoderSize
    features: Path | None = None


def make_condition(records: Records, encoding: Encoding) -> Condition:
    """Return the condition for records with captions, with labels, or with neither."""
    size, features = encoding
    if features is not None:
        if records.captions is None:
            raise typer.BadParameter(
                f"--text-features {features}: expected --data with captions, got none; leave out --text-features"
            )
        return Features(records.captions, FeatureFolder(features))
    if records.captions is not None:
        return Captions(records.captions, size)
    if records.labels is not None:
        return Labels(records.labels, records.classes, size.width)
    return Unconditional(records.names)


def load_source(
    config: GenerativeTraining,
    sizes: Sizes,
    device: torch.device,
    encoding: Encoding,
) -> Source:
    """Open the data of a training run.

    Args:
        sizes: sizes of the images.
        encoding: encoders for the conditions.

    Raises:
        typer.BadParameter: if the data can't be used.
    """
    path, split = config.data, config.split
    if (path / LATENTS).is_file():
        check_ignored(config, "stream cache", "latents are read from memory; leave out {option}")
        latents = Latents(path, config.flip, device)
        records = latents.records.with_condition(config.condition, path)
        if latents.lengths is not None:
            return _clips(config, latents, Films(records, latents.lengths), latents.about["digest"], encoding)
        check_ignored(config, "frames every segment", "only works with latents of videos; leave out {option}")
        chosen = choose_subset(len(records.names), split.limit)
        condition = make_condition(records, encoding)
        held_out = records.take(chosen).held_out(path, split)
        return Source(
            latents, condition, chosen[~held_out], chosen[held_out], latents.about["digest"], latents.about,
            len(latents.sizes),
        )  # fmt: skip
    if is_footage(path):
        check_ignored(
            config, "without label stream", "only works with images, and --data contains videos; leave out {option}"
        )
        films, buckets, parts = open_films(path, sizes, split, config.condition, find_cache(config.cache))
        frames = load_pixels(parts, buckets.at_sizes(sizes.train), config.flip, device)
        digest = hash_data(parts, films.records)
        return _clips(config, frames, films, digest, encoding, buckets.at_sizes(sizes.only_test))
    check_ignored(
        config, "frames every segment cache", "only works with videos, and --data contains images; leave out {option}"
    )
    pictures = open_pictures(path, split, condition=config.condition, without=config.without, label=config.label)
    held_out, buckets = pictures.records.held_out(path, split), pictures.sort(sizes)
    if config.stream or is_stream(path):
        values, digest = Decoded(pictures, buckets, config.flip), pictures.digest
    else:
        shapes = buckets.shapes[max(sizes.train)]
        parts = [pictures.read(shape, buckets.members(bucket)) for bucket, shape in enumerate(shapes)]
        values = load_pixels(parts, buckets.at_sizes(sizes.train), config.flip, device)
        digest = hash_data(parts, pictures.records)
        values = add_tests(values, pictures.read, buckets.at_sizes(sizes.only_test), np.flatnonzero(held_out))
    condition, numbers = make_condition(pictures.records, encoding), len(sizes.train)
    return Source(
        values, condition, np.flatnonzero(~held_out), np.flatnonzero(held_out), digest, num_train_sizes=numbers
    )  # fmt: skip


def _clips(
    config: GenerativeTraining, frames: Values, films: Films, digest: Any, encoding: Encoding,
    tests: Buckets | None = None,
) -> Source:  # fmt: skip
    """Cut videos into clips. ``tests`` contains the buckets of all frames at the test sizes."""
    span = (config.frames - 1) * config.every + 1
    starts, owners, held_out = films.clips(span, config.segment, config.split)
    values = Clips(frames, starts, config.frames, config.every)
    if tests is not None:
        test_frames = np.unique(values.locate(np.flatnonzero(held_out)))
        values = replace(values, frames=add_tests(frames, films.read, tests, test_frames))
    about = frames.about if isinstance(frames, Latents) else None
    condition = make_condition(films.records.take(owners), encoding)
    train_sizes = config.train_sizes if about is None else frames.sizes
    return Source(
        values, condition, np.flatnonzero(~held_out), np.flatnonzero(held_out), digest, about, len(train_sizes)
    )  # fmt: skip
