"""Conditions for a diffusion run: captions, class labels, precomputed text features, or none.

A condition builds the encoder, and returns the encoder's inputs for each sample. Checkpoints store the condition's
``settings``, so :func:`build_encoder` can rebuild the encoder without the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import typer
from torch import Tensor, nn

from lrpe_md.checks import plural

from ...models.text import LabelEncoder, Text, TextEncoder, TextFeatures, tokenize
from ..common.devices import sent
from ..common.folder import read_json

FEATURES = "features.json"
FORMAT = 1  # format version of feature folders


class Condition(Protocol):
    """Interface for conditions.

    Attributes:
        settings: JSON values from which :func:`build_encoder` builds the encoder.
        names: text to show next to each sample.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    def encoder(self) -> nn.Module | None:
        """Build the encoder of the condition, or return None if there is none."""
        ...

    def inputs(self, indices: np.ndarray, device: torch.device) -> Any:
        """Return the encoder's inputs for the given samples, or None if there is no encoder."""
        ...


def build_encoder(settings: dict[str, Any]) -> nn.Module | None:
    """Build a condition's encoder from its settings, without the checkpoint's weights and empty features."""
    kind = settings["kind"]
    if kind == "captions":
        return TextEncoder(settings["width"], settings["depth"], settings["heads"])
    if kind == "labels":
        return LabelEncoder(len(settings["classes"]), settings["width"])
    if kind == "features":
        length, width, pooled = (settings[name] for name in ("empty_length", "width", "pooled_width"))
        return TextFeatures(width, pooled, _empty_features(length, width, pooled))
    return None


def _empty_features(length: int, width: int, pooled: int) -> Text:
    mask = torch.ones(1, length, dtype=torch.bool)
    return Text(torch.zeros(1, length, width), mask, torch.zeros(1, pooled) if pooled else None)


@dataclass(frozen=True)
class Unconditional:
    """No condition, for models without an encoder. ``names`` contains file names."""

    names: Sequence[str]

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "none"}

    def encoder(self) -> None:
        return None

    def inputs(self, indices: np.ndarray, device: torch.device) -> None:
        return None


class EncoderSize(NamedTuple):
    """Size of an encoder that is trained with the model, and the maximum caption length in bytes."""

    width: int
    depth: int
    heads: int
    length: int


@dataclass(frozen=True)
class Captions:
    """Captions as bytes, for a text encoder that is trained with the model."""

    names: Sequence[str]
    size: EncoderSize

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "captions", **self.size._asdict()}

    def encoder(self) -> nn.Module | None:
        return build_encoder(self.settings)

    @cached_property
    def tokens(self) -> Tensor:
        """Tokens (N, L) of the captions on the CPU."""
        return tokenize(self.names, self.size.length)

    def inputs(self, indices: np.ndarray, device: torch.device) -> Tensor:
        return sent(self.tokens.numpy()[indices], device)

    def describe_held_out(self, train: Iterable[int], held_out: Iterable[int]) -> str:
        """Report captions that several held-out samples but no training sample share, or return "" if there are none.

        ``train`` and ``held_out`` contain the indices of the training and held-out samples.
        """
        trained = {self.names[i] for i in train}
        counts = Counter(self.names[i] for i in held_out if self.names[i] not in trained)
        shared = [f"{count} of {name!r}" for name, count in counts.most_common(3) if count > 1]
        if not shared:
            return ""
        return f"Held out all samples of {plural(len(counts), 'caption')} for tests, including {', '.join(shared)}"

    def describe_cuts(self) -> str:
        """Report how many captions :attr:`tokens` truncates, and how to avoid this. Return "" if there are none."""
        lengths = [1 + len(caption.encode()) for caption in self.names]  # one token marks the start
        cut = sum(length > self.size.length for length in lengths)
        if not cut:
            return ""
        return (
            f"{cut} of {len(lengths)} captions are truncated to {self.size.length - 1} bytes; pass --text-length "
            f"{max(lengths)} to keep them whole"
        )


@dataclass(frozen=True)
class Labels:
    """Class labels, for an embedding that is trained with the model.

    Args:
        labels: class of each sample, int64 (N,).
        classes: names of the classes.
        width: number of channels of the embedding.
    """

    labels: np.ndarray
    classes: tuple[str, ...]
    width: int

    @property
    def names(self) -> list[str]:
        return [self.classes[label] for label in self.labels]

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "labels", "classes": list(self.classes), "width": self.width}

    def encoder(self) -> nn.Module | None:
        return build_encoder(self.settings)

    def inputs(self, indices: np.ndarray, device: torch.device) -> Tensor:
        return sent(self.labels[indices], device)


class FeatureFolder:
    """Memory-mapped text features written by ``train features``.

    Raises:
        typer.BadParameter: if the folder has other content or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        about = path / FEATURES
        if not about.is_file():
            raise typer.BadParameter(
                f"--text-features {path}: expected a folder with {FEATURES}, as written by `train features`, got none; "
                "pass the --out of `train features`"
            )
        self.about: dict[str, Any] = read_json(about)
        if self.about.get("format") != FORMAT:
            raise typer.BadParameter(
                f"--text-features {path} was written by a different version; run `train features` again"
            )
        self.rows = {caption: row for row, caption in enumerate(read_json(path / "captions.json"))}
        self.features, self.mask = self._array("features"), self._array("mask")
        self.pooled = self._array("pooled") if self.about["pooled_width"] else None
        expected = (len(self.rows), self.about["length"], self.about["width"])
        if self.features.shape != expected or self.mask.shape != expected[:2]:
            raise typer.BadParameter(
                f"--text-features {path}: expected features of shape {expected}, got {self.features.shape}; run `train "
                "features` again"
            )

    def _array(self, name: str) -> np.ndarray:
        try:
            return np.load(self.path / f"{name}.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise typer.BadParameter(
                f"--text-features {self.path}: {name}.npy can't be read ({error}); run `train features` again"
            ) from error

    def find(self, captions: Sequence[str]) -> np.ndarray:
        """Return the row index of each caption in the arrays."""
        absent = [caption for caption in captions if caption not in self.rows]
        if absent:
            raise typer.BadParameter(
                f"--text-features {self.path}: expected features of all captions in --data, got none for "
                f"{plural(len(absent), 'caption')}, such as {absent[0]!r}; run `train features` on the same data"
            )
        return np.array([self.rows[caption] for caption in captions], np.int64)

    def texts(self, rows: np.ndarray, device: torch.device) -> Text:
        """Return the features in the given rows in float32, padded to a common length."""

        def read(array: np.ndarray) -> Tensor:
            return sent(np.ascontiguousarray(array[rows]), device)

        pooled = None if self.pooled is None else read(self.pooled).float()
        return Text(read(self.features).float(), read(self.mask), pooled)

    @property
    def empty(self) -> Text:
        """Return the features of the empty caption, without padding."""
        row = np.array([self.rows[""]])
        found = self.texts(row, torch.device("cpu"))
        assert found.features is not None
        assert found.mask is not None
        length = int(found.mask.sum())
        return Text(found.features[:, :length], found.mask[:, :length], found.pooled)


@dataclass(frozen=True)
class Features:
    """Precomputed features of captions. The encoder that computed the features is not trained.

    Args:
        names: captions of the samples.
        folder: features of these captions and of the empty caption.
    """

    names: Sequence[str]
    folder: FeatureFolder

    @cached_property
    def rows(self) -> np.ndarray:
        return self.folder.find(self.names)

    @property
    def settings(self) -> dict[str, Any]:
        about = self.folder.about
        return {
            "kind": "features", "empty_length": int(about["empty_length"]), "digest": about["digest"],
            "encoder": about["encoder"], "length": about["length"], "width": about["width"],
            "pooled_width": about["pooled_width"],
        }  # fmt: skip

    def encoder(self) -> nn.Module:
        about = self.folder.about
        return TextFeatures(about["width"], about["pooled_width"], self.folder.empty)

    def inputs(self, indices: np.ndarray, device: torch.device) -> Text:
        return self.folder.texts(self.rows[indices], device)
