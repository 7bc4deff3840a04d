"""Fréchet distance between the features of real and generated images, computed by torchmetrics.

Standard FID uses features of a pretrained Inception network. You can pass your own network as ``features``. The default
is a convolutional network with fixed random weights. With these features, the distance falls as a model learns. You can
compare distances between runs on the same data, but not with published FIDs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

WIDTHS = (32, 64, 64)


class RandomFeatures(nn.Module):
    """Convolutional network with fixed random weights that maps uint8 images (B, 3, H, W) to features (B, 64)."""

    num_features = WIDTHS[-1]

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layers: list[nn.Module] = []
        for channels, width in zip((3, *WIDTHS), WIDTHS, strict=False):
            convolution = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
            weight = torch.empty_like(convolution.weight)
            nn.init.kaiming_normal_(weight, generator=generator)
            convolution.weight.data = weight
            layers += [convolution, nn.ReLU()]
        self.layers = nn.Sequential(*layers).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.float() / 127.5 - 1).mean((2, 3))


def frechet_distance(
    real: Iterable[Tensor],
    generated: Iterable[Tensor],
    *,
    features: nn.Module | None = None,
    device: torch.device | str = "cpu",
) -> float:
    """Return the Fréchet distance between two sets of images.

    Args:
        real, generated: batches of uint8 images (B, 3, H, W).
        features: network that maps a batch to features (B, F), where F is the network's ``num_features``. Default:
            :class:`RandomFeatures`.
    """
    metric = FrechetInceptionDistance(feature=features or RandomFeatures(), sync_on_compute=False).to(device)
    for batches, is_real in ((real, True), (generated, False)):
        for batch in batches:
            metric.update(batch.to(device), real=is_real)
    return float(metric.compute())
