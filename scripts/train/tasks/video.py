"""Train a video transformer on footage of your own, with labels for free, and test it at other lengths and sizes.

    python -m scripts.train video --data FOLDER --out runs/arrow --encoding rotate
    torchrun --nproc-per-node 4 -m scripts.train video --data FOLDER --out runs/arrow --precision bf16

Writes checkpoint.pt, history.csv and result.json to the folder of the run; the same command goes on where it was
interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from ....models.video import LrpeVideoTransformer, lrpe_video_tiny_patch16_224
from ...common.cache import user_cache
from ...common.devices import sent
from ...common.options import choose
from ..config import Training, describe, option
from ..data.videos import TASKS, Footage, load_footage, ordered
from ..encodings import VIDEOS, Backbone
from ..loop import Trainer
from ..order import shuffle
from ..outcome import placements
from ..work import Work, train


@dataclass(frozen=True, kw_only=True)
class VideoTraining(Training):
    """Train a video transformer to tell the arrow of time, or the order of shuffled pieces of a clip.

    Command: python -m scripts.train video --data FOLDER --out runs/order --task order --precision bf16 --compile

    Cost: a step shows --batch clips under two labels each, 1,500 steps of 64 times 288 tokens with 2.7 M parameters by
    default: 35 to 70 seconds on an H200 that six others share, hours on a CPU; footage takes 12 kB a frame at 64×64.

    Expect: --encoding none and space-only at chance (50% for arrow, 4.2% for order), exactly but for ties, at any
    length, since nothing tells them the order of frames. Cosine without a phase is at chance for arrow, too: its q·k is
    even in the distance, so that a clip and its reverse are the same to it. For order 3,000 steps take the others to
    20 to 60% or leave them at chance, where they stay for some hundred to some thousand steps before they take off.
    Eleven minutes of footage are learned by heart for arrow (43 to 54% on other minutes of them). What compression does
    to frames between key frames can betray the direction as well as motion does; small sizes hide most of it.
    """

    backbone: ClassVar[Backbone] = VIDEOS
    steps: int = option(1500, "Steps of the optimiser.", least=1)
    batch: int = option(32, "Clips a step, over all processes and micro-batches.", least=1)
    data: list[Path] = field(metadata=describe("Video file, or folder of them; may be repeated.", free=True))
    task: str = option("arrow", f"One of: {'; '.join(f'{name} ({t.source})' for name, t in TASKS.items())}.")
    encoding: str = option("rotate", VIDEOS.help)
    attention: str = option("softmax", f"One of: {', '.join(VIDEOS.attentions)}.")
    space_time: str = option("joint", "joint, or factorised: space, then time.")
    frames: int = option(8, "Of a clip.", least=1)
    every: int = option(4, "Every how many frames of the footage one is taken.", least=1)
    size: int = option(48, "Height and width of a clip, pixels.")
    test_size: int = option(64, "The other size to test at; footage is kept at the larger of the two.")
    motion: bool = option(True, "Clips less their mean over time, over their deviation: what moves, not what is seen.")
    patch: int = option(8, "Pixels.", least=1)
    tubelet: int = option(1, "Frames a token; above 1, tokens show time without an encoding.", least=1)
    dim: int = option(192, "Of the embedding.", least=1)
    depth: int = option(6, "Blocks.", least=1)
    heads: int = option(4, "Of attention; three eighths of a head's pairs must be whole for a split.", least=1)
    qk_norm: bool = option(False, "Norms of q and k before the encoding, timm's.")
    drop: float = option(0.0, "Share of places that is dropped in training, in all frames alike.", least=0, below=1)
    segment: int = option(
        240, "Frames of a segment of time; a clip lies in one, training and test clips in different.", least=1
    )
    parts: int = option(5, "Every how many segments one is held out.", least=1)
    fold: int = option(0, "Which of them: 0 to parts - 1.")
    test_samples: int = option(1024, "Held-out clips × labels, about.", free=True, least=1)
    cache: str = option(
        "auto", "Folder for decoded frames, which other runs take: auto (the user's cache), none, or one.", free=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("--task", [self.task], TASKS)
        choose("--attention", [self.attention], VIDEOS.attentions)
        choose("--space-time", [self.space_time], ("joint", "factorised"))
        if not 0 <= self.fold < self.parts:
            raise typer.BadParameter(f"--fold: expected 0 to --parts - 1 = {self.parts - 1}, got {self.fold}")
        for name, by in (("size", self.patch), ("test_size", self.patch), ("frames", self.tubelet)):
            if getattr(self, name) < 1 or getattr(self, name) % by:
                raise typer.BadParameter(
                    f"--{name.replace('_', '-')}: expected a multiple of {by}, got {getattr(self, name)}"
                )
        multiple = TASKS[self.task].multiple
        if self.frames % multiple:
            raise typer.BadParameter(f"--frames: expected a multiple of {multiple} for {self.task}, got {self.frames}")
        self.check_encoding(lrpe_video_tiny_patch16_224, model_arguments(self))

    @property
    def cache_folder(self) -> Path | None:
        return {"auto": user_cache() / "footage", "none": None}.get(self.cache, Path(self.cache))


def model_arguments(config: VideoTraining) -> dict[str, Any]:
    return {
        "img_size": config.size, "patch_size": config.patch, "num_frames": config.frames,
        "tubelet_size": config.tubelet, "embed_dim": config.dim, "depth": config.depth, "num_heads": config.heads,
        "qk_norm": config.qk_norm, "num_classes": TASKS[config.task].num_classes, "space_time": config.space_time,
        "patch_drop_rate": config.drop, "drop_unit": "tube", "class_token": False, "global_pool": "avg",
        **VIDEOS.arguments(config.encoding, config.attention),
    }  # fmt: skip


def motion(x: Tensor) -> Tensor:
    """Return the change between frames of clips (B, 3, T, H, W), in units of its standard deviation. It says nothing
    about their order.

    Neighbouring frames are nearly the same, and what differs is a few percent of what is seen.
    """
    x = x - x.mean(2, keepdim=True)
    return x / (x.square().mean((1, 2, 3, 4), keepdim=True).sqrt() + 0.02)  # a still clip stays still


def clips(config: VideoTraining, footage: Footage, starts: Tensor, frames: int, size: int) -> Tensor:
    """Return clips as the model's input, (B, 3, frames, size, size)."""
    x = footage.clips(starts, frames, config.every, size)
    return motion(x) if config.motion else x


def build(config: VideoTraining) -> LrpeVideoTransformer:
    return lrpe_video_tiny_patch16_224(**model_arguments(config))


def patches(config: VideoTraining) -> int:
    """Patches of a step, of each clip under both of its labels."""
    return 2 * config.batch * (config.frames // config.tubelet) * (config.size // config.patch) ** 2


def batch(
    config: VideoTraining, footage: Footage, starts: Tensor, indices: np.ndarray, draws: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Clips (2B, 3, T, H, W) and labels (2B,): each clip, mirrored or not, under two labels, so that what it shows
    tells nothing about them."""
    task, device = TASKS[config.task], footage.frames.device
    mirrored, draws = draws % 2 == 1, draws // 2
    first, draws = draws % task.num_classes, draws // task.num_classes
    second = (first + 1 + draws % (task.num_classes - 1)) % task.num_classes
    x = clips(config, footage, starts[sent(indices, device)], config.frames, config.size)
    x = torch.where(sent(mirrored, device)[:, None, None, None, None], x.flip(-1), x)
    labels = sent(np.concatenate([first, second]), device)
    return ordered(x.repeat(2, 1, 1, 1, 1), labels, task), labels


def loss(model: nn.Module, clips: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = clips
    return F.cross_entropy(model(x), labels)


@torch.no_grad()
def accuracy(
    config: VideoTraining, model: nn.Module, footage: Footage, starts: np.ndarray, frames: int, size: int,
    autocast: Any,
) -> float:  # fmt: skip
    """Return the accuracy in %. Each clip is tested under every label, so that a model blind to order is exactly at
    chance."""
    task, device, right = TASKS[config.task], footage.frames.device, 0
    for part in torch.from_numpy(starts).split(32):
        x = clips(config, footage, part.to(device), frames, size)
        for label in range(task.num_classes):
            labels = torch.full((len(x),), label, device=device)
            with autocast():
                right += int((model(ordered(x, labels, task)).argmax(-1) == labels).sum())
    return 100 * right / (len(starts) * task.num_classes)


def held_out_starts(config: VideoTraining, footage: Footage) -> np.ndarray:
    """First frames of the clips to test on."""
    starts = footage.starts(2 * config.frames * config.every, held_out=True)
    number = max(1, min(len(starts), config.test_samples // TASKS[config.task].num_classes))
    return starts[np.linspace(0, len(starts) - 1, number).round().astype(int)]


def evaluate(config: VideoTraining, footage: Footage, trainer: Trainer) -> dict[str, Any]:
    """Accuracy at the trained length and size, at twice the frames, and at the other size, of the same clips."""
    model, starts = trainer.averaged, held_out_starts(config, footage)
    video: Any = model
    conditions = ((config.frames, config.size), (2 * config.frames, config.size), (config.frames, config.test_size))
    results: dict[str, Any] = {"test_clips": len(starts)}
    for positions in placements(video):
        results[positions] = {
            f"{frames}x{size}x{size}": accuracy(
                config, model, footage, starts, frames, size, trainer.accelerator.autocast
            )
            for frames, size in conditions
        }
    return results


def prepare(config: VideoTraining, device: torch.device) -> Work:
    model, gap = build(config), 2 * config.frames * config.every
    footage = load_footage(
        config.data, max(config.size, config.test_size), segment=config.segment, parts=config.parts,
        fold=config.fold, gap=gap, device=device, cache=config.cache_folder,
    )  # fmt: skip
    footage.starts(gap, held_out=True)  # too little footage is said before the training
    starts = torch.from_numpy(footage.starts(config.frames * config.every, held_out=False)).to(device)

    def finish(trainer: Trainer) -> dict[str, Any]:
        return {
            "task": config.task, "encoding": config.encoding, "attention": config.attention,
            "space_time": config.space_time, "seed": config.seed, "chance": 100 / TASKS[config.task].num_classes,
            "accuracy": evaluate(config, footage, trainer), "tokens": patches(config),
        }  # fmt: skip

    def validate(trainer: Trainer) -> dict[str, float]:
        """Evaluate on the held-out clips, at the trained length and size."""
        found = accuracy(
            config, trainer.averaged, footage, held_out_starts(config, footage), config.frames, config.size,
            trainer.accelerator.autocast,
        )  # fmt: skip
        return {"accuracy": found}

    # The footage itself decides what a run is, wherever it lies.
    settings = {"model": model_arguments(config), "digest": footage.digest}
    steps = partial(shuffle, len(starts), config.batch, config.seed)
    return Work(model, settings, steps, partial(batch, config, footage, starts), loss, finish, validate)


run = partial(train, prepare)
