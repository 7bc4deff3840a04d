"""Evaluate a generative training: held-out loss, samples of held-out conditions, and a distance to the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...models.flow import Prediction, flow_matching_loss
from .data.source import Source
from .distance import frechet_distance
from .samplers import Sampling, draw_samples
from .samples import HELD_OUT
from .vae import Decoder

TIMES = 8  # at which the held-out loss is measured
BATCH = 64


class Setting(NamedTuple):
    """Size to evaluate at, in pixels, and the grid that positions are laid over (None: one unit a patch)."""

    name: str
    size: int
    reference: tuple[int, ...] | None


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a model on held-out samples.

    Args:
        source: the data.
        patch_size: of the model, one number an axis.
        decoder: of latents; None: the values are pixels.
        prediction: of the model.
        limit: held-out samples at most.
    """

    source: Source
    patch_size: tuple[int, ...]
    decoder: Decoder | None
    prediction: Prediction
    limit: int

    @property
    def held_out(self) -> np.ndarray:
        return self.source.held_out[: self.limit]

    @property
    def settings(self) -> list[Setting]:
        """The trained size, and a larger one with extrapolated and with rescaled positions, if there is one."""
        trained, *others = self.source.values.sizes
        shape = self.source.values.shape(trained)
        grid = tuple(n // p for n, p in zip(shape, self.patch_size, strict=True))
        found = [Setting(self._name(trained), trained, None)]
        for size in others:
            name = self._name(size)
            found += [Setting(f"{name} extrapolated", size, None), Setting(f"{name} rescaled", size, grid)]
        return found

    def _name(self, size: int) -> str:
        frames = self.source.values.shape(size)[:-2]
        return "x".join(map(str, (*frames, size, size)))

    @torch.no_grad()
    def losses(self, model: nn.Module, size: int, autocast: Any) -> list[float]:
        """Return the mean loss at times (i + ½) / TIMES, with the same noise for every model."""
        generator = torch.Generator().manual_seed(0)
        totals = torch.zeros(TIMES, dtype=torch.float64)
        for part in _batches(self.held_out):
            x, text = self.source.batch(part, size)
            for i in range(TIMES):
                noise = torch.randn(x.shape, generator=generator).to(x.device)
                t = torch.full((len(x),), (i + 0.5) / TIMES, device=x.device)
                with autocast():
                    found = flow_matching_loss(model, x, text, t, noise, prediction=self.prediction)
                totals[i] += found.sum().item()
        return (totals / len(self.held_out)).tolist()

    def evaluate(self, model: Any, autocast: Any) -> dict[str, Any]:
        """Return the held-out loss at each setting."""
        results: dict[str, Any] = {"test_pairs": len(self.held_out)}
        for name, size, model.reference in self.settings:
            losses = self.losses(model, size, autocast)
            results[name] = {"loss": sum(losses) / TIMES, "by_time": losses}
        model.reference = None
        return results

    @torch.no_grad()
    def draw(self, model: Any, sampling: Sampling, num: int, autocast: Any) -> tuple[list[str], dict[str, Tensor]]:
        """Return names of held-out samples, and by column their pixels and those of samples at each setting.

        All settings of a size share their noise.
        """
        held_out = self.source.held_out
        chosen = held_out[np.linspace(0, len(held_out) - 1, min(num, len(held_out))).astype(int)]
        x, text = self.source.batch(chosen, self.source.values.sizes[-1])
        columns = {HELD_OUT: self.pixels(x)}
        for name, size, model.reference in self.settings:
            noise = self._noise(len(chosen), size, 0)
            with autocast():
                found = draw_samples(model, noise, text, sampling, shift=size / self.source.values.sizes[0])
            columns[name] = self.pixels(found)
        model.reference = None
        return self.source.names(chosen), columns

    @torch.no_grad()
    def distance(self, model: Any, sampling: Sampling, num: int, autocast: Any) -> float:
        """Return the Fréchet distance, in random features, of ``num`` training samples and as many drawn for their
        conditions."""
        size = self.source.values.sizes[0]
        order = np.random.default_rng(0).permutation(len(self.source.train))[:num]
        chosen = self.source.train[np.sort(order)]

        def generated() -> Iterator[Tensor]:
            for i, part in enumerate(_batches(chosen)):
                noise = self._noise(len(part), size, i)
                text = self.source.condition.inputs(part, self.source.values.device)
                with autocast():
                    found = draw_samples(model, noise, text, sampling)
                yield as_images(self.pixels(found))

        real = (as_images(self.pixels(self.source.values.batch(part, size))) for part in _batches(chosen))
        return frechet_distance(real, generated(), device=self.source.values.device)

    def _noise(self, num: int, size: int, seed: int) -> Tensor:
        values = self.source.values
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num, values.channels, *values.shape(size), generator=generator).to(values.device)

    def pixels(self, x: Tensor) -> Tensor:
        """Decode values to pixels (B, 3, [frames,] H, W) in [-1, 1]."""
        return x.float() if self.decoder is None else self.decoder.decode(x)


def as_images(pixels: Tensor) -> Tensor:
    """Pixels (B, 3, [frames,] H, W) in [-1, 1] → uint8 (B, 3, H, W), or (B · frames, 3, H, W)."""
    images = pixels.transpose(1, 2).flatten(0, 1) if pixels.ndim == 5 else pixels
    return images.float().nan_to_num().clamp(-1, 1).add(1).mul(127.5).round().byte()


def _batches(indices: np.ndarray) -> list[np.ndarray]:
    return [indices[i : i + BATCH] for i in range(0, len(indices), BATCH)]
