"""Train a text-conditioned diffusion transformer on captioned images, and sample at the trained and a larger size.

    python -m scripts.train diffusion --data emoji64.zip --out runs/emoji --encoding rotate --precision bf16
    torchrun --nproc-per-node 4 -m scripts.train diffusion --data FOLDER --out runs/mine --size 64 --patch 4

Writes checkpoint.pt, history.csv, result.json, samples.npz, samples.png and words.txt (those of the captions) to the
folder of the run; the same command goes on where it was interrupted. ``scripts.train sample`` draws your own prompts.
Emoji with their names: ``npm pack emoji-datasource-google``, its folder img/google/64 beside a metadata.jsonl with
file_name and text.
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

from ....models.dit import DiT
from ....models.flow import draw_times, flow_matching_loss, sample
from ....models.text import TextEncoder, tokenize
from ...common.devices import sent
from ...common.folder import save_whole, write
from ...common.options import choose
from ..config import Training, describe, option
from ..data.captions import Captioned, load_captioned
from ..encodings import CAPTIONED, Backbone
from ..loop import Trainer
from ..order import shuffle
from ..prompts import words_of
from ..samples import HELD_OUT, keep, pixels, write_sheet
from ..work import Work, train

TIMES = 8  # of the evaluation


@dataclass(frozen=True, kw_only=True)
class DiffusionTraining(Training):
    """Train a diffusion transformer (flow matching) on captioned images.

    Command: python -m scripts.train diffusion --data emoji64.zip --without variation --out runs/emoji --precision bf16

    Cost: 20.9 M parameters, 256 patches an image at 32×32: 2,500 steps are three to five minutes on an H200 that five
    share.

    Expect: a loss of 1 + the images' mean square at first, since the model begins at zero: 1.66 for emoji. At the end
    0.141 to 0.146 on held-out captions (linear attention 0.171 to 0.175, without positions 0.303). The held-out loss is
    at the same times and noise for every encoding.
    """

    backbone: ClassVar[Backbone] = CAPTIONED
    steps: int = option(2500, "Steps of the optimiser.", least=1)
    data: Path = field(metadata=describe("Folder or zip of images and captions.", free=True))
    without: str = option("", "A field of metadata.jsonl: rows where it is true are left out.")
    limit: int = option(0, "Take so many pairs; 0: all.", least=0, off=True)
    parts: int = option(20, "One in so many captions is held out.", least=1)
    fold: int = option(0, "Which of them: 0 to parts - 1.")
    encoding: str = option("rotate", CAPTIONED.help)
    attention: str = option("softmax", f"One of: {', '.join(CAPTIONED.attentions)}.")
    size: int = option(32, "Height and width in training, pixels.")
    test_size: int = option(48, "The larger size to test and sample at.")
    patch: int = option(2, "Pixels.", least=1)
    dim: int = option(256, "Of the embedding.", least=1)
    depth: int = option(8, "Blocks.", least=1)
    heads: int = option(4, "Of attention.", least=1)
    text_dim: int = option(256, "Of the text encoder; as many heads.", least=1)
    text_depth: int = option(3, "Blocks of the text encoder.", least=1)
    text_length: int = option(64, "Bytes of a caption at most.", least=1)
    drop_text: float = option(0.1, "Share of captions that are emptied, for guidance.", least=0, below=1)
    guidance: float = option(3.0, "Scale of the text in sampling; 1: none.", free=True, least=0)
    sample_steps: int = option(50, "Of Heun's method, two calls each.", free=True, least=1)
    samples: int = option(12, "Held-out captions to sample.", free=True, least=1)
    test_samples: int = option(256, "Held-out pairs to test on at most.", free=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("--attention", [self.attention], CAPTIONED.attentions)
        if not 0 <= self.fold < self.parts:
            raise typer.BadParameter(f"--fold: expected 0 to --parts - 1 = {self.parts - 1}, got {self.fold}")
        for name in ("size", "test_size"):
            if getattr(self, name) < 1 or getattr(self, name) % self.patch:
                raise typer.BadParameter(
                    f"--{name.replace('_', '-')}: expected a multiple of {self.patch}, got {getattr(self, name)}"
                )
        self.check_encoding(DiT, model_arguments(self))


def model_arguments(config: DiffusionTraining) -> dict[str, Any]:
    return {
        "patch_size": config.patch, "embed_dim": config.dim, "depth": config.depth, "num_heads": config.heads,
        **CAPTIONED.arguments(config.encoding, config.attention),
    }  # fmt: skip


def build(config: DiffusionTraining) -> DiT:
    return DiT(text_encoder=TextEncoder(config.text_dim, config.text_depth, config.heads), **model_arguments(config))


class Pairs:
    """The data on the device: images (N, 3, H, W) uint8 at both sizes, tokens (N, L), and which are for training."""

    def __init__(self, config: DiffusionTraining, data: Captioned, device: torch.device) -> None:
        self.captions, self.device = data.captions, device
        self.images = {size: _resized(data.images, size).to(device) for size in (config.size, config.test_size)}
        self.tokens = tokenize(data.captions, config.text_length, device)
        self.train = torch.from_numpy(np.flatnonzero(~data.held_out)).to(device)
        self.held_out = torch.from_numpy(np.flatnonzero(data.held_out)).to(device)

    def __call__(self, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """x (B, 3, size, size) in [-1, 1], tokens (B, L)."""
        return self.images[size][indices].float() / 127.5 - 1, self.tokens[indices]


def _resized(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    parts = [F.interpolate(p.float(), size=(size, size), mode="bicubic", antialias=True) for p in images.split(256)]
    return torch.cat([p.round().clamp(0, 255).byte() for p in parts])


def batch(config: DiffusionTraining, pairs: Pairs, indices: np.ndarray, draws: np.ndarray) -> tuple[Tensor, ...]:
    """Return images, tokens, and which of the samples lose their caption."""
    drop = sent(draws / 2**63 < config.drop_text, pairs.device)
    return *pairs(pairs.train[sent(indices, pairs.device)], config.size), drop


def patches(config: DiffusionTraining) -> int:
    """Patches of a step."""
    return config.batch * (config.size // config.patch) ** 2


def loss(model: nn.Module, samples: tuple[Tensor, ...]) -> Tensor:
    x, tokens, drop = samples
    t = draw_times(len(x), device=x.device)
    return flow_matching_loss(model, x, tokens, t, torch.randn_like(x), drop=drop).mean()


@torch.no_grad()
def held_out_loss(model: nn.Module, pairs: Pairs, size: int, limit: int, autocast: Any) -> list[float]:
    """The mean loss at times (i + ½) / TIMES, with the same noise for every model."""
    chosen = pairs.held_out[:limit]
    generator = torch.Generator().manual_seed(0)
    totals = torch.zeros(TIMES, dtype=torch.float64)
    for part in chosen.split(64):
        x, tokens = pairs(part, size)
        for i in range(TIMES):
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            t = torch.full((len(x),), (i + 0.5) / TIMES, device=x.device)
            with autocast():
                totals[i] += flow_matching_loss(model, x, tokens, t, noise).sum().item()
    return (totals / len(chosen)).tolist()


def evaluate(config: DiffusionTraining, pairs: Pairs, trainer: Trainer) -> dict[str, Any]:
    """Held-out loss at both sizes; at the larger one also with the positions laid over the trained grid."""
    model: Any = trainer.averaged
    results: dict[str, Any] = {"test_pairs": min(len(pairs.held_out), config.test_samples)}
    for name, size, model.reference in conditions(config):
        losses = held_out_loss(model, pairs, size, config.test_samples, trainer.accelerator.autocast)
        results[name] = {"loss": sum(losses) / TIMES, "by_time": losses}
    model.reference = None
    return results


def conditions(config: DiffusionTraining) -> list[tuple[str, int, tuple[int, int] | None]]:
    """Name, size in pixels, and the grid that positions are laid over."""
    size, trained = f"{config.test_size}x{config.test_size}", config.size // config.patch
    return [
        (f"{config.size}x{config.size}", config.size, None),
        (f"{size} extrapolated", config.test_size, None),
        (f"{size} rescaled", config.test_size, (trained, trained)),
    ]


@torch.no_grad()
def draw(config: DiffusionTraining, pairs: Pairs, trainer: Trainer) -> tuple[list[str], dict[str, Tensor]]:
    """Held-out captions, and by column their images and samples at each condition, the same noise for each size."""
    model: Any = trainer.averaged
    chosen = pairs.held_out[
        torch.from_numpy(np.linspace(0, len(pairs.held_out) - 1, min(config.samples, len(pairs.held_out))).astype(int))
    ]
    x, tokens = pairs(chosen, config.test_size)
    columns = {HELD_OUT: x}
    for name, size, model.reference in conditions(config):
        noise = torch.randn(len(chosen), 3, size, size, generator=torch.Generator().manual_seed(0)).to(x.device)
        with trainer.accelerator.autocast():
            columns[name] = sample(
                model, noise, tokens, scale=config.guidance, steps=config.sample_steps, method="heun",
                shift=size / config.size,
            )  # fmt: skip
    model.reference = None
    return [pairs.captions[i] for i in chosen.tolist()], columns


def prepare(config: DiffusionTraining, device: torch.device) -> Work:
    model = build(config)
    data = load_captioned(
        config.data, max(config.size, config.test_size), parts=config.parts, fold=config.fold,
        without=config.without, limit=config.limit or None,
    )  # fmt: skip
    if config.batch > (~data.held_out).sum():  # before anything is written
        raise typer.BadParameter(
            f"--batch {config.batch}: there are {(~data.held_out).sum()} pairs to train on; make it smaller"
        )
    pairs = Pairs(config, data, device)
    known = words_of(caption for caption, out in zip(data.captions, data.held_out, strict=True) if not out)

    def finish(trainer: Trainer) -> dict[str, Any]:
        if config.sharding == "fsdp":
            from torch.distributed.fsdp import register_fsdp_forward_method

            for name in ("encode_text", "empty_text"):  # sampling calls them by themselves
                register_fsdp_forward_method(trainer.averaged, name)
        result = {
            "encoding": config.encoding, "attention": config.attention, "seed": config.seed,
            "held_out": evaluate(config, pairs, trainer), "train_pairs": len(pairs.train), "tokens": patches(config),
        }  # fmt: skip
        show(config, trainer, *draw(config, pairs, trainer))
        if trainer.accelerator.is_main_process:
            write(config.out / "words.txt", "".join(f"{word}\n" for word in sorted(known)))
        return result

    def validate(trainer: Trainer) -> dict[str, float]:
        """Evaluate on the held-out pairs, at the trained size."""
        losses = held_out_loss(
            trainer.averaged, pairs, config.size, config.test_samples, trainer.accelerator.autocast
        )  # fmt: skip
        return {"held_out": sum(losses) / TIMES}

    settings = {"model": model_arguments(config), "digest": data.digest}
    steps = partial(shuffle, len(pairs.train), config.batch, config.seed)
    return Work(model, settings, steps, partial(batch, config, pairs), loss, finish, validate)


def show(config: DiffusionTraining, trainer: Trainer, captions: list[str], columns: dict[str, Tensor]) -> None:
    """samples.npz and samples.png, by the first process."""
    if trainer.accelerator.is_main_process:
        images = {name: pixels(column) for name, column in columns.items()}
        save_whole(config.out / "samples.npz", lambda part: keep(part, captions, images))
        save_whole(config.out / "samples.png", lambda part: write_sheet(part, captions, images))


run = partial(train, prepare)
