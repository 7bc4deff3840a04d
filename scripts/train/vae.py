"""Autoencoders from diffusers, to convert pixels to latents and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from .checkpoint import digest_of, first_sentence

BATCH = 64  # number of images to encode or decode at a time


def load_vae(name: str) -> Any:
    """Load a diffusers AutoencoderKL in float32.

    ``name`` is a folder, a run of ``train vae``, the folder of a pipeline, or a Hub ID.

    Raises:
        typer.BadParameter: if there is no such model.
    """
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    folder = Path(name)
    places = [""] if (folder / "config.json").is_file() else ["vae"] if folder.is_dir() else ["", "vae"]
    errors = []
    for subfolder in places:
        try:
            found: Any = AutoencoderKL.from_pretrained(name, subfolder=subfolder or None, torch_dtype=torch.float32)
            return found.requires_grad_(False).eval()
        except Exception as error:  # hub, JSON and safetensors raise various errors
            errors.append(first_sentence(error))
    raise typer.BadParameter(
        f"--vae {name}: expected an AutoencoderKL from diffusers (a folder, a run of `train vae`, or a Hub "
        f"ID), got none ({errors[0]}); pass another path"
    )


def locate_vae(name: str) -> str:
    """Return the absolute path of a folder, so that programs find it from anywhere. Return a Hub ID unchanged."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


class Decoder:
    """Frozen VAE that encodes pixels and decodes latents in batches.

    Args:
        vae: AutoencoderKL from :func:`load_vae`.
        device: device of the VAE.
    """

    def __init__(self, vae: Any, device: torch.device) -> None:
        self.vae = vae.to(device)
        self.device = device
        config: Any = vae.config
        self.scale, self.shift = float(config.scaling_factor), float(config.shift_factor or 0.0)
        self.channels: int = config.latent_channels
        self.factor = 2 ** (len(config.block_out_channels) - 1)

    @property
    def digest(self) -> str:
        """Hash of the weights."""
        return digest_of(self.vae.state_dict())

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pixels (B, 3, H, W) in [-1, 1], and return the unscaled means and standard deviations (B, C, h, w)."""
        found = [self.vae.encode(part.to(self.device)).latent_dist for part in pixels.split(BATCH)]
        return torch.cat([each.mean for each in found]), torch.cat([each.std for each in found])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode scaled and shifted latents (B, C, [frames,] h, w) to pixels (B, 3, [frames,] H, W)."""
        z = latents.float() / self.scale + self.shift
        frames = z.transpose(1, 2).flatten(0, 1) if z.ndim == 5 else z
        x = torch.cat([self.vae.decode(part.to(self.device)).sample for part in frames.split(BATCH)])
        return x.unflatten(0, (len(z), -1)).transpose(1, 2) if z.ndim == 5 else x


def open_decoder(latents: dict[str, Any], vae: str, device: torch.device) -> Decoder:
    """Load the decoder for latents.

    Args:
        latents: content of latents.json.
        vae: folder or Hub ID of a VAE. "auto" loads the VAE that encoded the latents.
        device: device of the VAE.

    Raises:
        typer.BadParameter: if there is no VAE, the number of channels differs, or "auto" finds that the VAE has
            changed.
    """
    found = Decoder(load_vae(latents["vae"] if vae == "auto" else vae), device)
    if found.channels != latents["channels"]:
        raise typer.BadParameter(
            f"--vae: expected a VAE with {latents['channels']} channels, like the latents, got {found.channels}"
        )
    if vae == "auto" and "weights" in latents and latents["weights"] != found.digest:
        raise typer.BadParameter(
            f"--vae: the weights in {latents['vae']} have changed since the latents were encoded; run `train latents` "
            "again, or pass --vae to decode with another VAE"
        )
    found.scale, found.shift = latents["scale"], latents["shift"]
    return found
