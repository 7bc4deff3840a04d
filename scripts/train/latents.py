"""Encode images or videos by a VAE once, as memory-mapped latents.

lrpe-md train latents --vae runs/vae --data FOLDER --size 32 --out latents
lrpe-md train diffusion --data latents --out runs/dit
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.lib.format import open_memmap
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..common.devices import choose_device
from ..common.folder import new_folder
from ..common.options import choose
from .data.footage import find_films, is_footage
from .data.pictures import open_pictures
from .data.records import CONDITIONS, Records, Split
from .data.values import FORMAT, LATENTS, RECORDS
from .data.videos import decode
from .text_features import DTYPES
from .vae import BATCH, Decoder, load_vae


class Options(NamedTuple):
    """Options of stored latents.

    Args:
        size: height and width of the images, in pixels.
        flip: also encode mirrored images.
        sampled: store one sample instead of mean and standard deviation.
        dtype: of the arrays.
    """

    size: int
    flip: bool
    sampled: bool
    dtype: Any


def main(
    vae: Annotated[str, typer.Option(help="AutoencoderKL of diffusers: a folder, a run of `train vae`, or a hub id.")],
    data: Annotated[Path, typer.Option(help="Images (folder, zip, .npz, idx files) or videos (file or folder).")],
    out: Annotated[Path, typer.Option(help="New folder for the latents.")],
    size: Annotated[int, typer.Option(min=1, help="Height and width of the images, in pixels.")] = 256,
    condition: Annotated[
        str, typer.Option(help="captions, labels, none, or auto: captions or labels if the data has them.")
    ] = "auto",
    without: Annotated[
        str, typer.Option(help="Field of the table of captions; rows where it is true are left out.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Number of images or videos to use; 0 uses all.")] = 0,
    flip: Annotated[bool, typer.Option(help="Also encode mirrored images, for `train diffusion --flip`.")] = False,
    sampled: Annotated[
        bool, typer.Option(help="Store one sample of each latent instead of its mean and standard deviation.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Precision of the stored latents: float16 or float32.")] = "float16",
    seed: Annotated[int, typer.Option(min=0, help="Seed of --sampled.")] = 0,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
) -> None:
    """Encode images or videos by a VAE, for `train diffusion`. Frames of videos are encoded one by one."""
    choose("--dtype", [dtype], DTYPES)
    choose("--condition", [condition], CONDITIONS)
    on = choose_device(device)
    coder = Decoder(load_vae(vae), on)
    if size % coder.factor:
        raise typer.BadParameter(f"--size: expected a multiple of {coder.factor}, the VAE's factor, got {size}")
    images = open_images(data, Split(1, limit=limit or None), condition, without, size)
    torch.manual_seed(seed)
    with new_folder(out) as part:
        about = write_latents(part, coder, images, Options(size, flip, sampled, DTYPES[dtype]))
        about |= {"format": FORMAT, "vae": vae, "weights": coder.digest, "lengths": images.lengths}
        (part / RECORDS).write_text(json.dumps(images.records.to_json()), encoding="utf-8")
        (part / LATENTS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    Console(stderr=True).print(f"{out}: {about['shape'][0]} latents of {'×'.join(map(str, about['shape'][2:]))}")


class Images(NamedTuple):
    """Images, or frames of videos, in batches.

    Args:
        batches: uint8 (B, 3, size, size), at most ``BATCH`` of them.
        number: of all images or frames.
        records: of the images, or of the videos.
        lengths: frames of each video; None: images.
    """

    batches: Iterator[Tensor]
    number: int
    records: Records
    lengths: list[int] | None


def open_images(path: Path, split: Split, condition: str, without: str, size: int) -> Images:
    if is_footage(path):
        files, records = find_films(path, split, condition)
        lengths = [len(decode(file, 8)) for file in files]
        return Images(
            (part for file in files for part in decode(file, size).split(BATCH)), sum(lengths), records, lengths
        )
    pictures = open_pictures(path, split, condition=condition, without=without)
    starts = range(0, len(pictures), BATCH)
    batches = (pictures.read(size, range(i, min(i + BATCH, len(pictures)))) for i in starts)
    return Images(batches, len(pictures), pictures.records, None)


def write_latents(folder: Path, coder: Decoder, images: Images, options: Options) -> dict[str, Any]:
    """Write mean.npy and std.npy, (N, 1 or 2 views, C, h, w): as the VAE gives them, neither scaled nor shifted."""
    side = options.size // coder.factor
    shape = images.number, 1 + options.flip, coder.channels, side, side
    names = ("mean",) if options.sampled else ("mean", "std")
    arrays = {name: open_memmap(folder / f"{name}.npy", mode="w+", dtype=options.dtype, shape=shape) for name in names}
    digest, first = hashlib.sha256(repr(images.records.digest).encode()), 0
    total = (images.number + BATCH - 1) // BATCH
    for batch in track(images.batches, "encoding images", total, console=Console(stderr=True)):
        pixels = batch.float() / 127.5 - 1
        rows = slice(first, first + len(batch))
        for view, seen in enumerate((pixels, pixels.flip(-1))[: 1 + options.flip]):
            mean, std = coder.encode(seen)
            if options.sampled:
                mean = mean + std * torch.randn(mean.shape).to(mean.device)
            for name, value in zip(names, (mean, std), strict=False):
                arrays[name][rows, view] = value.cpu().numpy()
        for array in arrays.values():
            if not np.isfinite(array[rows]).all():
                raise typer.BadParameter("--dtype float16: latents are beyond its range; use float32")
            digest.update(array[rows].tobytes())
        first += len(batch)
    for array in arrays.values():
        array.flush()
    return {
        "shape": list(shape), "size": options.size, "scale": coder.scale, "shift": coder.shift, "flip": options.flip,
        "sampled": options.sampled, "digest": digest.hexdigest(),
    }  # fmt: skip
