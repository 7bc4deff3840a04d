"""Train a VAE (diffusers' AutoencoderKL) on images, for `train latents`.

    lrpe-md train vae --data FOLDER --size 32 --out runs/vae
    lrpe-md train latents --vae runs/vae --data FOLDER --size 32 --out latents

The command writes checkpoint.pt, history.csv, result.json, reconstructions.png and vae/, which diffusers can load, to
the run's folder. Run the same command again to resume an interrupted run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.folder import new_folder, save_whole
from ..conditions import EncoderSize
from ..config import changed, option
from ..data.buckets import Sizes, parse_mixed
from ..data.records import take_subset
from ..data.source import Encoding, GenerativeTraining, Source, load_source
from ..encodings import Backbone
from ..generation import split_by_bucket
from ..loop import Trainer
from ..samples import HELD_OUT, pad_together, pixels, write_sheet
from ..vae import BATCH
from ..work import Work, report, train


@dataclass(frozen=True, kw_only=True)
class VaeTraining(GenerativeTraining):
    """Train a variational autoencoder on images, with mean squared error and a small KL divergence.

    Command: lrpe-md train vae --data FOLDER --size 32 --out runs/vae

    Cost: 1.7 M parameters by default.

    Expect: sharp reconstructions of simple images. For photographs, use a pretrained VAE. Training on photographs
    requires a perceptual loss and a discriminator, which this program doesn't have.
    """

    backbone: ClassVar[Backbone] = Backbone(frozenset(), {})
    steps: int = changed("steps", 2500)
    widths: str = option(
        "32,64,96", "Channels at each scale, separated by commas; each scale after the first halves the size."
    )
    layers: int = option(1, "Residual blocks at each scale.", least=1)
    latent_channels: int = option(4, "Channels of the latents.", least=1)
    kl: float = option(1e-4, "Weight of the KL divergence, averaged over all latent values.", least=0)
    frames: int = option(1, "Frames per clip, for videos; each frame counts as an image.", least=1)
    samples: int = option(12, "Number of held-out images to show.", free=True, least=1)
    test_samples: int = option(256, "Maximum number of held-out images to test on.", free=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % self.factor:
            raise typer.BadParameter(
                f"--size: expected a multiple of {self.factor} for --widths {self.widths}, got {self.size}"
            )
        parse_mixed(self.mix_sizes, self.size, self.factor)

    @property
    def channels(self) -> tuple[int, ...]:
        try:
            found = tuple(int(width) for width in self.widths.split(","))
        except ValueError:
            found = ()
        if not found or min(found) < 1 or any(width % GROUPS for width in found):
            raise typer.BadParameter(
                f"--widths: expected multiples of {GROUPS}, separated by commas, got {self.widths!r}"
            )
        return found

    @property
    def factor(self) -> int:
        """Size of the images divided by the size of the latents."""
        return 2 ** (len(self.channels) - 1)


GROUPS = 8  # number of groups in the group norms


class Autoencoder(nn.Module):
    """Autoencoder that encodes and decodes in a single forward call, as FSDP2 and DDP require.

    Args:
        arguments: arguments of diffusers' AutoencoderKL.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        super().__init__()
        self.vae: Any = AutoencoderKL(**arguments)

    def forward(self, x: Tensor, sampled: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return reconstructed pixels (B, 3, H, W) in [-1, 1], and the mean and log-variance of the latents.

        If ``sampled`` is True, decode a sample of the latents, as in training. Otherwise, decode the mean.
        """
        found = self.vae.encode(x).latent_dist
        z = found.mean + found.std * torch.randn_like(found.mean) if sampled else found.mean
        return self.vae.decode(z).sample, found.mean, found.logvar


def model_arguments(config: VaeTraining) -> dict[str, Any]:
    number = len(config.channels)
    return {
        "block_out_channels": list(config.channels), "layers_per_block": config.layers,
        "down_block_types": ["DownEncoderBlock2D"] * number, "up_block_types": ["UpDecoderBlock2D"] * number,
        "latent_channels": config.latent_channels, "norm_num_groups": GROUPS, "sample_size": config.size,
    }  # fmt: skip


def as_frames(x: Tensor) -> Tensor:
    """Return images (B, 3, H, W) unchanged. Convert clips (B, 3, frames, H, W) to images of their frames."""
    return x.transpose(1, 2).flatten(0, 1) if x.ndim == 5 else x


def batches_of(source: Source, indices: np.ndarray, device: torch.device) -> Iterator[Tensor]:
    """Yield batches (B, 3, H, W) of images at the first size, or of the clips' frames, in [-1, 1]."""
    for part in split_by_bucket(source, indices, BATCH):
        yield as_frames(source.values.batch(part, source.values.sizes[0])).to(device)


def loss(config: VaeTraining, model: nn.Module, x: Tensor) -> Tensor:
    found, mean, logvar = model(x)
    kl = (mean.float().square() + logvar.float().exp() - 1 - logvar.float()).mean() / 2
    return F.mse_loss(found.float(), x) + config.kl * kl


def choose_tests(config: VaeTraining, source: Source) -> np.ndarray:
    """Return at most --test-samples randomly chosen held-out images."""
    return take_subset(source.held_out, config.test_samples)


@torch.no_grad()
def reconstruct(config: VaeTraining, source: Source, trainer: Trainer) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the error on held-out images, and some of the images with their reconstructions."""
    error, shown = 0.0, []
    for x in batches_of(source, choose_tests(config, source), trainer.accelerator.device):
        with trainer.accelerator.autocast():
            found = trainer.averaged(x, sampled=False)[0].float()
        error += (found.clamp(-1, 1) - x).square().mean((1, 2, 3)).sum().item()
        shown.append((x, found))
    mse = error / sum(len(x) for x, _ in shown)
    columns = {
        name: pad_together([x for pair in shown for x in pair[i]][: config.samples])
        for i, name in enumerate((HELD_OUT, "decoded"))
    }
    return {"mse": mse, "psnr": 10 * float(np.log10(4 / mse))}, columns


@torch.no_grad()
def latent_scale(config: VaeTraining, source: Source, trainer: Trainer) -> tuple[float, float]:
    """Encode training images, and return the mean and standard deviation of all latent values."""
    values = take_subset(source.train, 16 * BATCH)
    total, squares, count = 0.0, 0.0, 0
    for x in batches_of(source, values, trainer.accelerator.device):
        with trainer.accelerator.autocast():
            _, mean, logvar = trainer.averaged(x, sampled=False)
        mean, variance = mean.double(), logvar.double().exp()
        total, squares = total + mean.sum().item(), squares + (mean.square() + variance).sum().item()
        count += mean.numel()
    mean = total / count
    return mean, (squares / count - mean**2) ** 0.5


def prepare(config: VaeTraining, device: torch.device) -> Work:
    arguments = model_arguments(config)
    model = Autoencoder(arguments)
    sizes = Sizes(parse_mixed(config.mix_sizes, config.size, config.factor), (), config.factor, config.max_ratio)
    source = load_source(config, sizes, device, Encoding(EncoderSize(1, 1, 1, 1)))
    if source.latents is not None:
        raise typer.BadParameter(
            f"--data {config.data}: expected images or videos, got latents; pass the original data"
        )
    if config.is_new:
        source.check_batch(config.batch)
    report(source.describe_held_out())

    def batch(indices: np.ndarray, draws: np.ndarray) -> Tensor:
        return as_frames(source.train_batch(indices, draws)[0])

    def finish(trainer: Trainer) -> dict[str, Any]:
        found, columns = reconstruct(config, source, trainer)
        shift, deviation = latent_scale(config, source, trainer)
        weights = trainer.whole_weights()
        if trainer.accelerator.is_main_process:
            images = {name: pixels(values) for name, values in columns.items()}
            shown = np.concatenate(split_by_bucket(source, choose_tests(config, source), BATCH))
            shown = shown.repeat(config.frames if len(source.values.shape(config.size)) > 2 else 1)[: config.samples]
            names = source.names(shown)[: len(images[HELD_OUT])]
            save_whole(config.out / "reconstructions.png", lambda part: write_sheet(part, names, images))
            save_vae(config, arguments | {"scaling_factor": 1 / deviation, "shift_factor": shift}, weights)
        return {"held_out": found, "latent_mean": shift, "latent_deviation": deviation, "seed": config.seed}

    def validate(trainer: Trainer) -> dict[str, float]:
        """Evaluate on held-out images."""
        return reconstruct(config, source, trainer)[0]

    settings = {"model": arguments, "digest": source.digest}
    steps = source.order(config.batch, config.seed)
    return Work(
        model, settings, steps, batch, partial(loss, config), finish, validate, in_processes=source.is_streamed
    )  # fmt: skip


def save_vae(config: VaeTraining, arguments: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write vae/ in diffusers' format. An existing vae/ is replaced."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    vae: Any = AutoencoderKL(**arguments)
    vae.load_state_dict({name.removeprefix("vae."): value for name, value in weights.items()})
    shutil.rmtree(config.out / "vae", ignore_errors=True)
    with new_folder(config.out / "vae") as part:
        vae.save_pretrained(part)


run = partial(train, prepare)
