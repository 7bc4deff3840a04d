"""Names, captions and classes of samples, and the choice of held-out samples."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from lrpe_md.checks import plural

CONDITIONS = ("auto", "captions", "labels", "none")
LISTED = 20  # largest number of classes to list
FEW_OF_CLASS, FEW = 3, 10  # minimum numbers of test samples, per class and in total, for meaningful results


@dataclass(frozen=True)
class Split:
    """Choice of samples: at most ``limit`` are used, and the ``fold``-th of ``parts`` parts is held out."""

    parts: int
    fold: int = 0
    limit: int | None = None


def choose_subset(num: int, limit: int | None) -> np.ndarray:
    """Return the sorted indices of randomly chosen samples. Every call makes the same choice."""
    if limit is None or limit >= num:
        return np.arange(num)
    return np.sort(np.random.default_rng(0).permutation(num)[:limit])


def take_subset(indices: np.ndarray, limit: int | None) -> np.ndarray:
    """Choose at most ``limit`` indices at random, because the data may be sorted, for example by class."""
    return indices[choose_subset(len(indices), limit)]


def describe_held_out(noun: str, held_out: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> str:
    """Describe how many samples of each class are held out for tests.

    Args:
        noun: word for a sample, such as "image".
        held_out: mask (N,) of held-out samples.
        labels: class (N,) of each sample.
        classes: names of the classes. Without classes, or with too many to list, only the total is given.
    """
    text = f"Held out {held_out.sum()} of {plural(len(held_out), noun)} for tests"
    if not 0 < len(classes) <= LISTED:
        return text
    counts = np.bincount(labels[held_out], minlength=len(classes))
    return f"{text}: {', '.join(f'{name} {number}' for name, number in zip(classes, counts, strict=True))}"


def average_by_class(right: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """Return the accuracy in % of each class in ``labels`` (N,), where ``right`` (N,) marks correct answers."""
    numbers: list[int] = np.unique(labels).tolist()
    return {classes[i]: 100 * right[labels == i].mean().item() for i in numbers}


def describe_few(noun: str, held_out: np.ndarray, labels: np.ndarray, classes: Sequence[str], advice: str) -> str:
    """Return a warning about classes with too few test samples, or "" if all classes have enough.

    Args:
        noun, held_out, labels, classes: see :func:`describe_held_out`.
        advice: what to do about too few samples.
    """
    if not classes:
        return ""
    counts = np.bincount(labels[held_out], minlength=len(classes))
    few = [name for name, count in zip(classes, counts, strict=True) if count < FEW_OF_CLASS]
    if not few:
        return ""
    more = f" and {len(few) - 5} more" if len(few) > 5 else ""
    return (
        f"Classes with fewer than {FEW_OF_CLASS} test {noun}s: {', '.join(few[:5])}{more}. Their accuracy says little; "
        f"{advice}"
    )


@dataclass(frozen=True)
class Records:
    """Names of samples, with their captions or classes.

    Args:
        names: unique name of each sample.
        captions: caption of each sample, or None if there are none.
        labels: class of each sample, int64 (N,), or None if there are no classes.
        classes: names of the classes.
        tests: mask (N,) of the samples in the data's test set, or None if there is no test set.
    """

    names: list[str]
    captions: list[str] | None = None
    labels: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    tests: np.ndarray | None = None

    def take(self, indices: Sequence[int] | np.ndarray) -> Records:
        """Return the records of the given samples."""
        return replace(
            self,
            names=[self.names[i] for i in indices],
            captions=None if self.captions is None else [self.captions[i] for i in indices],
            labels=None if self.labels is None else self.labels[indices],
            tests=None if self.tests is None else self.tests[indices],
        )

    def with_condition(self, condition: str, path: Path) -> Records:
        """Keep the captions or classes that ``condition`` (one of ``CONDITIONS``) selects. "auto" keeps both."""
        if condition == "auto":
            return self
        if condition != "none" and getattr(self, condition) is None:
            raise typer.BadParameter(
                f"--condition {condition}: --data {path} has no {condition}; choose another condition"
            )
        captions = self.captions if condition == "captions" else None
        labels, classes = (self.labels, self.classes) if condition == "labels" else (None, ())
        return replace(self, captions=captions, labels=labels, classes=classes)

    def held_out(self, path: Path, split: Split) -> np.ndarray:
        """Return a mask (N,) of the held-out samples. If the data has a test set, its samples are held out.

        Otherwise, a sample is held out if a hash of its caption (or of its name, if there are no captions) is ``fold``
        modulo ``parts``. Samples with equal captions are either all held out or all used for training. Equal images
        with different captions may be split between training and testing, and so may captions that only differ after
        the maximum text length. If no sample of a small dataset meets this condition, the sample with the smallest hash
        is held out.

        Raises:
            typer.BadParameter: if all samples are held out, or the data's test set is empty.
        """
        keys = self.names if self.captions is None else self.captions
        found = self.tests
        if found is None:
            hashed = _mix if self.captions is None else zlib.crc32
            hashes = np.array([hashed(key.encode()) for key in keys], np.uint64)
            found = hashes % split.parts == split.fold
            if not found.any():
                found = hashes == hashes.min()
        if found.all() or not found.any():
            different = plural(len(set(keys)), f"different {'name' if self.captions is None else 'caption'}")
            raise typer.BadParameter(
                f"--data {path}: expected both training samples and held-out samples, got {(~found).sum()} and "
                f"{found.sum()} ({different}); add samples, or choose another --parts or --fold"
            )
        return found

    @property
    def digest(self) -> int:
        """Hash of the captions, labels and classes."""
        return zlib.crc32(
            repr((self.captions, None if self.labels is None else self.labels.tolist(), self.classes)).encode()
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values that :meth:`from_json` can read."""
        arrays = {name: None if (a := getattr(self, name)) is None else a.tolist() for name in ("labels", "tests")}
        return {"names": self.names, "captions": self.captions, "classes": self.classes, **arrays}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Records:
        labels, tests = values["labels"], values["tests"]
        return cls(
            values["names"], values["captions"], None if labels is None else np.array(labels, np.int64),
            tuple(values["classes"]), None if tests is None else np.array(tests, bool),
        )  # fmt: skip


def _mix(name: bytes) -> int:
    """Return a hash of a name. A plain CRC is linear, so hashes of numbered names could all end in the same bits."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
