"""Train a small video model on associative recall of values, with key lookups and place lookups.

    lrpe-md train recall --out runs/recall --attention delta --encoding rotate
    lrpe-md train recall --out runs/recall --data 16x8x8 --depth 4 --attention delta,delta,delta,softmax

Clips of frames × height × width symbols are generated from the seed (:mod:`..data.recall`), so no dataset is needed.
Every token attends to its own frame and to earlier frames. Loss and accuracy only include tokens that ask. The model is
trained at one size, and tested at the same size, with 2, 4 and 8 times the frames, and with twice the height and width.

- **Key lookups depend on content.** A layer can answer key lookups without positions. In longer videos, the latest
  value for a key must replace older values. "add" blurs all values, "decay" prefers recent values, and "delta"
  overwrites values.
- **Place lookups depend on positions.** Without positions, the answer looks like any other value.

The command writes checkpoint.pt, history.csv and result.json to the run's folder. Run the same command again to resume
an interrupted run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import RUN, Training, changed, check_width, option
from ..data.recall import KINDS, NO_ANSWER, OFFSETS, Symbols, draw_clips, encode_clips
from ..encodings import RECALL, Backbone
from ..loop import Trainer
from ..memory import build_model
from ..order import Chosen
from ..work import Work, train

Size = tuple[int, int, int]
TEST_TOKENS = 2**15  # tokens in an evaluation batch
TEST_SEED = 1  # seed of the test clips, combined with their size; training uses other seeds


def parse_size(name: str, text: str) -> Size:
    """Parse a size such as "8x4x4" into (frames, height, width)."""
    try:
        size = tuple(int(part) for part in text.split("x"))
    except ValueError:
        size = ()
    if len(size) != 3 or min(size) < 1:
        raise typer.BadParameter(f"{name}: expected FRAMESxHEIGHTxWIDTH, such as 8x4x4, got {text!r}")
    return size


@dataclass(frozen=True, kw_only=True)
class RecallTraining(Training):
    """Train a small video model on key lookups and place lookups, and test it on longer and larger clips.

    Command: lrpe-md train recall --out runs/recall --attention delta --encoding rotate

    Cost: 19,000 parameters. 300 steps of 32 clips of 128 tokens take about half a minute on one CPU core.

    Expect: at the training size, an accuracy of 99% or more on key lookups and 52% to 56% on place lookups. At 64
    frames, key lookups reach 83% to 97% (three seeds). Without positions, key lookups reach 100% and place lookups 24%
    (one seed).
    """

    backbone: ClassVar[Backbone] = RECALL
    steps: int = changed("steps", 300)
    batch: int = changed("batch", 32, "Clips per step, over all processes and micro-batches.")
    lr: float = changed("lr", 2e-3)
    weight_decay: float = changed("weight_decay", 0.01)
    warmup: int = changed("warmup", 30)
    ema: float = changed("ema", 0.0)
    data: str = option("8x4x4", "Size of a training clip in tokens: frames x height x width.")
    sizes: str = option(
        "", "Additional sizes to test at, separated by commas. Default: 2, 4 and 8 times the frames, and twice the "
        "height and width.", free=True, panel=RUN,
    )  # fmt: skip
    keys: int = option(8, "Number of different keys.", least=1)
    values: int = option(8, "Number of different values.", least=2)
    writes: int = option(4, "Number of tokens per frame that write a value.", least=1)
    questions: int = option(2, "Number of tokens per frame that ask each kind of question.", least=1)
    encoding: str = option("rotate", RECALL.help)
    attention: str = option(
        "delta",
        "Attention: softmax, or linear attention with the memory add, decay (forgets) or delta (overwrites). Pass "
        "one for all layers, or one per layer, separated by commas and repeated over the depth.",
    )
    dim: int = option(32, "Embedding width.", least=1)
    depth: int = option(2, "Number of blocks.", least=1)
    heads: int = option(2, "Number of attention heads.", least=1)
    test_clips: int = option(128, "Number of clips to test on at each size.", free=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        frames, height, width = parse_size("--data", self.data)
        if frames <= max(t for t, *_ in OFFSETS):
            raise typer.BadParameter(
                f"--data: expected more than {max(t for t, *_ in OFFSETS)} frames, got {self.data}; place lookups "
                "reach that far back"
            )
        if self.writes > self.keys:
            raise typer.BadParameter(f"--writes: expected at most --keys = {self.keys}, got {self.writes}")
        if self.writes + 2 * self.questions > height * width:
            raise typer.BadParameter(
                f"--writes, --questions: expected at most {height * width} tokens per frame in total, got "
                f"{self.writes} + 2 · {self.questions}"
            )
        _ = self.test_sizes
        check_width("--dim", self.dim, self.heads)
        self.check_encoding(build_model, model_arguments(self))

    @property
    def size(self) -> Size:
        return parse_size("--data", self.data)

    @property
    def symbols(self) -> Symbols:
        return Symbols(self.keys, self.values, self.writes, self.questions)

    @property
    def test_sizes(self) -> list[Size]:
        """Test sizes, starting with the training size."""
        frames, height, width = self.size
        longer = [(by * frames, height, width) for by in (2, 4, 8)]
        others = [parse_size("--sizes", part) for part in self.sizes.split(",") if part]
        return [self.size, *(others or [*longer, (frames, 2 * height, 2 * width)])]


def model_arguments(config: RecallTraining) -> dict[str, Any]:
    """Return the arguments for :func:`..memory.build_model`."""
    frames, *image = config.size
    return {
        "img_size": image, "patch_size": 1, "num_frames": frames, "tubelet_size": 1,
        "in_chans": config.symbols.channels, "num_classes": config.values, "embed_dim": config.dim,
        "depth": config.depth, "num_heads": config.heads, "mlp_ratio": 2.0,
        **RECALL.arguments(config.encoding, config.attention),
    }  # fmt: skip


def draw_steps(batch: int, seed: int, start: int = 0) -> Iterator[Chosen]:
    """Yield endless batches from step ``start`` on: unused zeros (B,), and random numbers (B,) for new clips."""
    for step in itertools.count(start):
        yield np.zeros(batch, np.int64), np.random.default_rng((seed, step)).integers(2**63, size=batch)


def batch(
    config: RecallTraining, device: torch.device, indices: np.ndarray, draws: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return clips (B, channels, F, H, W) and labels (B, F H W)."""
    x, labels = encode_clips(config.symbols, draw_clips(config.symbols, config.size, draws))
    return x.to(device), labels.to(device)


def patches(config: RecallTraining) -> int:
    """Return the number of tokens in a step."""
    return config.batch * math.prod(config.size)


def loss(model: nn.Module, clips: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over the clips of the mean cross-entropy of each clip's answers.

    Clips have different numbers of questions. A mean over all questions would weight clips differently if a batch is
    divided among processes or micro-batches.
    """
    x, labels = clips
    losses = F.cross_entropy(model(x).transpose(1, 2), labels, ignore_index=NO_ANSWER, reduction="none")
    return (losses.sum(1) / (labels != NO_ANSWER).sum(1)).mean()


@torch.no_grad()
def accuracy(config: RecallTraining, model: nn.Module, size: Size, device: torch.device, autocast: Any) -> list[float]:
    """Return the accuracy in % for each kind of question, on new clips that are the same for all models.

    Only the last T frames are scored, where T is the length of a training clip. In longer clips, these frames are
    beyond the training length.
    """
    draws = np.random.default_rng((TEST_SEED, *size)).integers(2**63, size=config.test_clips)
    right, asked = np.zeros(len(KINDS)), np.zeros(len(KINDS))
    first = max(0, size[0] - config.size[0])
    for part in np.array_split(draws, math.ceil(len(draws) * math.prod(size) / TEST_TOKENS)):
        if not len(part):
            continue
        clips = draw_clips(config.symbols, size, part)
        x, labels = encode_clips(config.symbols, clips)
        with autocast():
            found = model(x.to(device)).argmax(-1).cpu()
        same = (found == labels).numpy().reshape(len(part), *size)[:, first:]
        for kind in range(len(KINDS)):
            asks = clips.kind(kind)[:, first:]
            right[kind] += same[asks].sum()
            asked[kind] += asks.sum()
    return [100 * r / n if n else math.nan for r, n in zip(right, asked, strict=True)]


def prepare(config: RecallTraining, device: torch.device) -> Work:
    arguments = model_arguments(config)

    def finish(trainer: Trainer) -> dict[str, Any]:
        model, autocast = trainer.averaged, trainer.accelerator.autocast
        found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
        for size in config.test_sizes:
            for kind, value in zip(KINDS, accuracy(config, model, size, device, autocast), strict=True):
                found[kind]["x".join(map(str, size))] = value
        return {
            "encoding": config.encoding, "attention": config.attention, "seed": config.seed, "accuracy": found,
            "chance": 100 / config.values, "tokens": patches(config),
        }  # fmt: skip

    def validate(trainer: Trainer) -> dict[str, float]:
        found = accuracy(config, trainer.averaged, config.size, device, trainer.accelerator.autocast)
        return {f"accuracy {kind}": value for kind, value in zip(KINDS, found, strict=True)}

    settings, steps = {"model": arguments}, partial(draw_steps, config.batch, config.seed)
    return Work(build_model(**arguments), settings, steps, partial(batch, config, device), loss, finish, validate)


run = partial(train, prepare)
