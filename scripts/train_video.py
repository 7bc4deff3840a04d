"""Train a video transformer on footage of your own, with labels for free, and test it at other lengths and sizes.

    python -m scripts.train_video --data FOLDER --out runs/arrow --encoding rotate
    torchrun --nproc-per-node 4 -m scripts.train_video --data FOLDER --out runs/arrow --precision bf16

Writes checkpoint.pt, history.csv and result.json to the folder of the run; the same command goes on where it was
interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from lrpe_md.models.video import LrpeVideoTransformer, lrpe_video_tiny_patch16_224
from torch import Tensor, nn
from torch.nn import functional as F

from .common import choose, sent
from .outcome import placements, timed, write_result
from .training import Trainer, Training, begin, command, option, settings_of
from .video_data import TASKS, Footage, load_footage, ordered

# Name → arguments of the model.
ENCODINGS: dict[str, dict[str, Any]] = {
    "none": {"encoding": None},
    "space-only": {"encoding": "rotate", "encoding_kwargs": {"base": 100.0}, "temporal": False},
    "learned": {"absolute": "learned"},
    "sincos": {"absolute": "sincos"},
    "rotate": {"encoding": "rotate", "encoding_kwargs": {"base": 100.0}},
    "rotate-split": {"encoding": "rotate", "encoding_kwargs": {"base": 100.0, "split": [2, 3, 3]}},
    "rotate-mixed": {"encoding": "mixed"},
    "wan": {"encoding": "wan"},
    "cosine": {"encoding": "cosine", "encoding_kwargs": {"base": 100.0, "act": "none"}},
    "cosine-split": {"encoding": "cosine", "encoding_kwargs": {"base": 100.0, "act": "none", "split": [2, 3, 3]}},
    "cosine-relu": {"encoding": "cosine", "encoding_kwargs": {"base": 100.0, "act": "relu"}},
    "cosine-silu": {"encoding": "cosine", "encoding_kwargs": {"base": 100.0, "act": "silu"}},
    "cosine-softplus": {"encoding": "cosine", "encoding_kwargs": {"base": 100.0, "act": "softplus"}},
    "cosine-softplus-phase": {
        "encoding": "cosine",
        "encoding_kwargs": {"base": 100.0, "act": "softplus", "phase": "k"},
    },
}
# Linear attention as in scripts.ablate: a norm stands for the denominator, so that all activations can be compared.
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {"attention": "linear", "normalizer": "none", "scale_attn_norm": True},
}


@dataclass(frozen=True, kw_only=True)
class VideoTraining(Training):
    """Train a video transformer to tell the arrow of time, or the order of shuffled pieces of a clip.

    Command: python -m scripts.train_video --data FOLDER --out runs/order --task order --precision bf16 --compile

    Cost: a step shows --batch clips under two labels each, 1,500 steps of 64 times 288 tokens with 2.7 M parameters by
    default: 35 to 70 seconds on an H200 that six others share, hours on a CPU; footage takes 12 kB a frame at 64×64.

    Expect: --encoding none and space-only at chance (50% for arrow, 4.2% for order), exactly but for ties, at any
    length, since nothing tells them the order of frames. Cosine without a phase is at chance for arrow, too: its q·k is
    even in the distance, so that a clip and its reverse are the same to it. For order 3,000 steps take the others to
    20 to 60% or leave them at chance, where they stay for some hundred to some thousand steps before they take off.
    Eleven minutes of footage are learned by heart for arrow (43 to 54% on other minutes of them). What compression does
    to frames between key frames can betray the direction as well as motion does; small sizes hide most of it.
    """

    steps: int = option(1500, "Steps of the optimiser.")
    batch: int = option(32, "Clips a step, over all processes and micro-batches.")
    data: list[Path] = field(metadata={"help": "Video file, or folder of them; may be repeated.", "free": True})
    task: str = option("arrow", f"One of: {'; '.join(f'{name} ({t.source})' for name, t in TASKS.items())}.")
    encoding: str = option("rotate", f"One of: {', '.join(ENCODINGS)}.")
    attention: str = option("softmax", f"One of: {', '.join(ATTENTIONS)}.")
    space_time: str = option("joint", "joint, or factorised: space, then time.")
    frames: int = option(8, "Of a clip.")
    every: int = option(4, "Every how many frames of the footage one is taken.")
    size: int = option(48, "Height and width of a clip, pixels.")
    test_size: int = option(64, "The other size to test at; footage is kept at the larger of the two.")
    motion: bool = option(True, "Clips less their mean over time, over their deviation: what moves, not what is seen.")
    patch: int = option(8, "Pixels.")
    tubelet: int = option(1, "Frames a token; above 1, tokens show time without an encoding.")
    dim: int = option(192, "Of the embedding.")
    depth: int = option(6, "Blocks.")
    heads: int = option(4, "Of attention; three eighths of a head's pairs must be whole for a split.")
    qk_norm: bool = option(False, "Norms of q and k before the encoding, timm's.")
    drop: float = option(0.0, "Share of places that is dropped in training, in all frames alike.")
    segment: int = option(240, "Frames of a segment of time; a clip lies in one, training and test clips in different.")
    parts: int = option(5, "Every how many segments one is held out.")
    fold: int = option(0, "Which of them: 0 to parts - 1.")
    test_samples: int = option(1024, "Held-out clips × labels, about.", free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("task", TASKS), ("encoding", ENCODINGS), ("attention", ATTENTIONS)):
            choose(f"--{name}", [getattr(self, name)], known)
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


def model_arguments(config: VideoTraining) -> dict[str, Any]:
    return {
        "img_size": config.size, "patch_size": config.patch, "num_frames": config.frames,
        "tubelet_size": config.tubelet, "embed_dim": config.dim, "depth": config.depth, "num_heads": config.heads,
        "qk_norm": config.qk_norm, "num_classes": TASKS[config.task].num_classes, "space_time": config.space_time,
        "patch_drop_rate": config.drop, "drop_unit": "tube", "class_token": False, "global_pool": "avg",
        **ENCODINGS[config.encoding], **ATTENTIONS[config.attention],
    }  # fmt: skip


def motion(x: Tensor) -> Tensor:
    """What changes in clips (B, 3, T, H, W), in units of its standard deviation; it tells nothing about their order.

    Neighbouring frames are nearly the same, and what differs is a few percent of what is seen.
    """
    x = x - x.mean(2, keepdim=True)
    return x / (x.square().mean((1, 2, 3, 4), keepdim=True).sqrt() + 0.02)  # a still clip stays still


def clips(config: VideoTraining, footage: Footage, starts: Tensor, frames: int, size: int) -> Tensor:
    """As the model is shown them, (B, 3, frames, size, size)."""
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
    """In %, each clip under every label, so that a model that can't see the order is exactly at chance."""
    task, device, right = TASKS[config.task], footage.frames.device, 0
    for part in torch.from_numpy(starts).split(32):
        x = clips(config, footage, part.to(device), frames, size)
        for label in range(task.num_classes):
            labels = torch.full((len(x),), label, device=device)
            with autocast():
                right += int((model(ordered(x, labels, task)).argmax(-1) == labels).sum())
    return 100 * right / (len(starts) * task.num_classes)


def evaluate(config: VideoTraining, footage: Footage, trainer: Trainer) -> dict[str, Any]:
    """Accuracy at the trained length and size, at twice the frames, and at the other size, of the same clips."""
    task, model = TASKS[config.task], trainer.averaged
    video: Any = model
    starts = footage.starts(2 * config.frames * config.every, held_out=True)
    number = max(1, min(len(starts), config.test_samples // task.num_classes))
    starts = starts[np.linspace(0, len(starts) - 1, number).round().astype(int)]
    conditions = ((config.frames, config.size), (2 * config.frames, config.size), (config.frames, config.test_size))
    model.eval()
    results: dict[str, Any] = {"test_clips": number}
    for positions in placements(video):
        results[positions] = {
            f"{frames}x{size}x{size}": accuracy(
                config, model, footage, starts, frames, size, trainer.accelerator.autocast
            )
            for frames, size in conditions
        }
    return results


def run(config: VideoTraining) -> dict[str, Any]:
    """One training and its tests; goes on where ``config.out`` has a checkpoint. Returns what result.json holds."""
    accelerator = begin(config)
    model = build(config)
    gap = 2 * config.frames * config.every
    footage = load_footage(
        config.data, max(config.size, config.test_size), segment=config.segment, parts=config.parts,
        fold=config.fold, gap=gap, device=accelerator.device,
    )  # fmt: skip
    # The footage itself decides what a run is, wherever it lies.
    settings = settings_of(config, model=model_arguments(config), digest=footage.digest)
    trainer = Trainer(config, accelerator, model, settings)
    footage.starts(gap, held_out=True)  # too little footage is said before the training
    starts = torch.from_numpy(footage.starts(config.frames * config.every, held_out=False)).to(accelerator.device)
    fit = partial(trainer.fit, len(starts), partial(batch, config, footage, starts), loss)
    common = timed(trainer, fit)
    result = {
        "task": config.task, "encoding": config.encoding, "attention": config.attention,
        "space_time": config.space_time, "seed": config.seed, "chance": 100 / TASKS[config.task].num_classes,
        "accuracy": evaluate(config, footage, trainer), "tokens": patches(config), **common,
    }  # fmt: skip
    write_result(trainer, result)
    return result


app = typer.Typer(add_completion=False)
command(app, VideoTraining)(run)

if __name__ == "__main__":
    app()
