"""Evaluate a generative run by the held-out loss, samples for held-out conditions, and a distance to the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from ...models.flow import Prediction, flow_matching_loss
from .data.records import take_subset
from .data.source import Source
from .distance import frechet_distance
from .samplers import Sampling, draw_samples
from .samples import HELD_OUT, pad_together
from .vae import Decoder

TIMES = 8  # number of diffusion times t at which the held-out loss is measured
BATCH = 64


class Setting(NamedTuple):
    """Evaluation size in pixels, and whether to rescale positions to the training grid."""

    name: str
    size: int
    is_rescaled: bool = False


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a model on held-out samples.

    Args:
        source: data of the run.
        patch_size: patch size of the model on each axis.
        decoder: decoder of latents, or None if the values are pixels.
        prediction: what the model predicts; see :mod:`models.flow`.
        limit: maximum number of held-out samples.
        can_rescale: whether the model's positions can be rescaled.
        device: device of the model.
    """

    source: Source
    patch_size: tuple[int, ...]
    decoder: Decoder | None
    prediction: Prediction
    limit: int
    can_rescale: bool
    device: torch.device

    @property
    def held_out(self) -> np.ndarray:
        """Randomly chosen held-out samples."""
        return take_subset(self.source.held_out, self.limit)

    @property
    def settings(self) -> list[Setting]:
        """Return the training sizes, and the test size with extrapolated and, if possible, rescaled positions."""
        train_sizes = self.source.train_sizes
        found = [Setting(self._name(size), size) for size in train_sizes]
        for size in self.source.values.sizes[len(train_sizes) :]:
            name = self._name(size)
            found += [Setting(f"{name} extrapolated", size)]
            found += [Setting(f"{name} rescaled", size, True)] * self.can_rescale
        return found

    def _name(self, size: int) -> str:
        frames = self.source.values.shape(size)[:-2]
        return "x".join(map(str, (*frames, size, size)))

    def _reference(self, setting: Setting, indices: np.ndarray) -> tuple[int, ...] | None:
        """Return the grid to which positions are rescaled (the bucket's grid at the training size), or None."""
        if not setting.is_rescaled:
            return None
        shape = self.source.values.shape(self.source.train_sizes[0], self._bucket(indices))
        return tuple(n // p for n, p in zip(shape, self.patch_size, strict=True))

    def _bucket(self, indices: np.ndarray) -> int:
        return int(self.source.values.buckets(indices[:1])[0])

    def _read(self, indices: np.ndarray, size: int, draws: np.ndarray | None = None) -> tuple[Tensor, Any]:
        found: Any = send_to_device(self.source.batch(indices, size, draws), self.device)
        return found

    @torch.no_grad()
    def losses(self, model: Any, setting: Setting, autocast: Any) -> list[float]:
        """Return the mean loss at each time (i + ½) / TIMES. The noise is the same for all models.

        Latents are sampled as in training, but each call uses the same samples.
        """
        generator = torch.Generator().manual_seed(0)
        totals = torch.zeros(TIMES, dtype=torch.float64)
        for part in split_by_bucket(self.source, self.held_out, BATCH):
            x, text = self._read(part, setting.size, 2 * part)  # even random numbers disable mirroring
            model.reference = self._reference(setting, part)
            for i in range(TIMES):
                noise = torch.randn(x.shape, generator=generator).to(x.device)
                t = torch.full((len(x),), (i + 0.5) / TIMES, device=x.device)
                with autocast():
                    found = flow_matching_loss(model, x, text, t, noise, prediction=self.prediction)
                totals[i] += found.sum().item()
        model.reference = None
        return (totals / len(self.held_out)).tolist()

    def evaluate(self, model: Any, autocast: Any) -> dict[str, Any]:
        """Return the held-out losses for all settings."""
        results: dict[str, Any] = {"test_pairs": len(self.held_out)}
        for setting in self.settings:
            losses = self.losses(model, setting, autocast)
            results[setting.name] = {"loss": sum(losses) / TIMES, "by_time": losses}
        return results

    @torch.no_grad()
    def draw(self, model: Any, sampling: Sampling, num: int, autocast: Any) -> tuple[list[str], dict[str, Tensor]]:
        """Draw samples for held-out conditions. Return the names of the conditions, and columns of pixels.

        There is a column with the held-out samples, and one with generated samples for each setting. All settings with
        the same size share the noise.
        """
        held_out = self.source.held_out
        chosen = held_out[np.linspace(0, len(held_out) - 1, min(num, len(held_out))).astype(int)]
        parts = split_by_bucket(self.source, chosen, len(chosen))
        columns: dict[str, list[Tensor]] = {name: [] for name in (HELD_OUT, *(each.name for each in self.settings))}
        for part in parts:
            x, text = self._read(part, max(self.source.values.sizes))
            columns[HELD_OUT] += self.pixels(x)
            for setting in self.settings:
                noise = self._noise(part, setting.size, 0)
                model.reference = self._reference(setting, part)
                with autocast():
                    found = draw_samples(model, noise, text, sampling, shift=setting.size / self.source.train_sizes[0])
                columns[setting.name] += self.pixels(found)
        model.reference = None
        names = self.source.names(np.concatenate(parts))
        return names, {name: pad_together(images) for name, images in columns.items()}

    @torch.no_grad()
    def distance(self, model: Any, sampling: Sampling, num: int, autocast: Any) -> float:
        """Return the Fréchet distance between ``num`` training samples and ``num`` generated samples.

        The distance uses random features. The generated samples have the same conditions as the training samples.
        """
        size = self.source.values.sizes[0]
        chosen = take_subset(self.source.train, num)
        parts = split_by_bucket(self.source, chosen, BATCH)

        def generated() -> Iterator[Tensor]:
            for i, part in enumerate(parts):
                noise = self._noise(part, size, i)
                text = self.source.condition.inputs(part, self.device)
                with autocast():
                    found = draw_samples(model, noise, text, sampling)
                yield as_images(self.pixels(found))

        real = (as_images(self.pixels(self._read(part, size)[0])) for part in parts)
        return frechet_distance(real, generated(), device=self.device)

    def _noise(self, indices: np.ndarray, size: int, seed: int) -> Tensor:
        """Return noise for samples of one bucket."""
        values = self.source.values
        shape = len(indices), values.channels, *values.shape(size, self._bucket(indices))
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def pixels(self, x: Tensor) -> Tensor:
        """Decode values to pixels (B, 3, [frames,] H, W) in [-1, 1]."""
        return x.float() if self.decoder is None else self.decoder.decode(x)


def as_images(pixels: Tensor) -> Tensor:
    """Convert pixels (B, 3, [frames,] H, W) in [-1, 1] to uint8 (B, 3, H, W) or (B · frames, 3, H, W)."""
    images = pixels.transpose(1, 2).flatten(0, 1) if pixels.ndim == 5 else pixels
    return images.float().nan_to_num().clamp(-1, 1).add(1).mul(127.5).round().byte()


def split_by_bucket(source: Source, indices: np.ndarray, size: int) -> list[np.ndarray]:
    """Split samples into batches of at most ``size``. All samples in a batch come from the same bucket."""
    buckets = source.values.buckets(indices)
    groups = [indices[buckets == bucket] for bucket in np.unique(buckets)]
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]
