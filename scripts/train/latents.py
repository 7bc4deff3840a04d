"""Encode images or videos with a VAE once, and store the latents in memory-mapped arrays.

lrpe-md train latents --vae runs/vae --data FOLDER --size 32 --out latents
lrpe-md train diffusion --data latents --out runs/dit
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.lib.format import open_memmap
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from lrpe_md.checks import plural

from ..common.devices import choose_device
from ..common.folder import new_folder
from ..common.options import choose
from .data.buckets import MAX_RATIO, MIX_SIZES, Buckets, Shape, Sizes, parse_mixed
from .data.footage import find_films, is_footage, sort_films
from .data.pictures import Pictures, open_pictures
from .data.records import CONDITIONS, Records, Split
from .data.values import BUCKETS, FORMAT, LATENTS, RECORDS, array_name
from .data.videos import decode
from .text_features import DTYPES
from .vae import BATCH, Decoder, load_vae, locate_vae


class Options(NamedTuple):
    """Options of stored latents.

    Args:
        sizes: sizes of the images.
        flip: whether to also encode mirrored images.
        sampled: whether to store one sample instead of the mean and standard deviation.
        dtype: dtype of the arrays.
    """

    sizes: Sizes
    flip: bool
    sampled: bool
    dtype: Any


def main(
    vae: Annotated[str, typer.Option(help="AutoencoderKL (diffusers): a folder, a run of `train vae`, or a Hub ID.")],
    data: Annotated[Path, typer.Option(help="Images (folder, zip, .npz, idx files) or videos (file or folder).")],
    out: Annotated[Path, typer.Option(help="New folder for the latents.")],
    size: Annotated[int, typer.Option(min=1, help="Height and width of the images, in pixels.")] = 256,
    mix_sizes: Annotated[str, typer.Option(help=MIX_SIZES)] = "",
    max_ratio: Annotated[float, typer.Option(min=1, help=MAX_RATIO)] = 1.0,
    patch: Annotated[
        int, typer.Option(min=1, help="Patch size of the model, which must divide the sides of the latents.")
    ] = 1,
    condition: Annotated[
        str, typer.Option(help="Conditions: captions, labels, none, or auto (captions or labels if the data has them).")
    ] = "auto",
    without: Annotated[
        str, typer.Option(help="Boolean field of the caption table; rows where it is true are left out.")
    ] = "",
    label: Annotated[
        str, typer.Option(help="Field that holds the class, in a table, in .json files of shards, or in a dataset.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Number of images or videos to use; 0 uses all.")] = 0,
    flip: Annotated[bool, typer.Option(help="Also encode mirrored images, for `train diffusion --flip`.")] = False,
    sampled: Annotated[
        bool, typer.Option(help="Store one sample of each latent instead of its mean and standard deviation.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Precision of the stored latents: float16 or float32.")] = "float16",
    seed: Annotated[int, typer.Option(min=0, help="Random seed for --sampled.")] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto (cuda if available).")] = "auto",
) -> None:
    """Encode images or videos with a VAE for `train diffusion`. Videos are encoded frame by frame."""
    choose("--dtype", [dtype], DTYPES)
    choose("--condition", [condition], CONDITIONS)
    on = choose_device(device)
    coder = Decoder(load_vae(vae), on)
    multiple = coder.factor * patch
    if size % multiple:
        raise typer.BadParameter(
            f"--size: expected a multiple of {multiple} (the VAE's factor times --patch), got {size}"
        )  # fmt: skip
    sizes = Sizes(parse_mixed(mix_sizes, size, multiple), multiple=multiple, max_ratio=max_ratio)
    if is_footage(data):
        for option, value in (("--without", without), ("--label", label)):
            if value:
                raise typer.BadParameter(
                    f"{option} {value}: only works with images, and --data contains videos; leave out {option}"
                )
        images = open_films(data, Split(1, limit=limit or None), condition, sizes)
    else:
        images = open_images(
            open_pictures(data, Split(1, limit=limit or None), condition=condition, without=without, label=label), sizes
        )
    torch.manual_seed(seed)
    with new_folder(out) as part:
        about = write_latents(part, coder, images, Options(sizes, flip, sampled, DTYPES[dtype]))
        about |= {"format": FORMAT, "vae": locate_vae(vae), "weights": coder.digest, "lengths": images.lengths}
        (part / RECORDS).write_text(json.dumps(images.records.to_json()), encoding="utf-8")
        (part / LATENTS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shown = ", ".join(f"{h}×{w}" for each in about["shapes"].values() for h, w in each)
    Console(stderr=True).print(f"{out}: latents of {plural(about['number'], 'image')} of {shown} pixels")


class Images(NamedTuple):
    """Images, or frames of videos.

    Args:
        read: function that resizes the images of a bucket to a shape, and yields batches of at most ``BATCH`` images as
            uint8 (B, 3, height, width).
        records: records of the images or videos.
        buckets: aspect-ratio buckets of the images or frames.
        lengths: number of frames of each video, or None for images.
    """

    read: Callable[[int, Shape], Iterator[Tensor]]
    records: Records
    buckets: Buckets
    lengths: list[int] | None


def open_images(pictures: Pictures, sizes: Sizes) -> Images:
    buckets = pictures.sort(sizes)

    def read(bucket: int, shape: Shape) -> Iterator[Tensor]:
        members = buckets.members(bucket)
        return (pictures.read(shape, members[i : i + BATCH]) for i in range(0, len(members), BATCH))

    return Images(read, pictures.records, buckets, None)


def open_films(path: Path, split: Split, condition: str, sizes: Sizes) -> Images:
    files, records = find_films(path, split, condition)
    films, lengths = sort_films(files, sizes), [len(decode(file, 8)) for file in files]

    def read(bucket: int, shape: Shape) -> Iterator[Tensor]:
        return (part for i in films.members(bucket) for part in decode(files[i], shape).split(BATCH))

    return Images(read, records, Buckets(films.shapes, films.of.repeat(lengths)), lengths)


def write_latents(folder: Path, coder: Decoder, images: Images, options: Options) -> dict[str, Any]:
    """Write mean.npy and std.npy (N, 1 or 2 views, C, h, w). The VAE's scaling and shift are not applied.

    If there are several sizes or buckets, each combination has its own files, and buckets.npy assigns images to
    buckets.
    """
    buckets, is_bucketed = images.buckets, sum(map(len, images.buckets.shapes.values())) > 1
    digest = hashlib.sha256(repr((images.records.digest, buckets.shapes, buckets.of.tolist())).encode())
    if is_bucketed:
        np.save(folder / BUCKETS, buckets.of)
    grids = [(size, bucket, shape) for size, each in buckets.shapes.items() for bucket, shape in enumerate(each)]
    progress = Progress(console=Console(stderr=True))
    bar = progress.add_task("encoding images", total=len(buckets.of) * len(buckets.shapes))
    for size, bucket, shape in grids:
        names = [array_name(name, size, bucket, is_bucketed) for name in ("mean", "std")[: 2 - options.sampled]]
        number = len(buckets.members(bucket)), 1 + options.flip, coder.channels, *(n // coder.factor for n in shape)
        arrays = [open_memmap(folder / name, mode="w+", dtype=options.dtype, shape=number) for name in names]
        first = 0
        with progress:
            for batch in images.read(bucket, shape):
                rows = slice(first, first + len(batch))
                encode_batch(coder, batch, options, [array[rows] for array in arrays])
                for array in arrays:
                    digest.update(array[rows].tobytes())
                first += len(batch)
                progress.advance(bar, len(batch))
        for array in arrays:
            array.flush()
    return {
        "number": len(buckets.of), "shapes": buckets.shapes, "factor": coder.factor, "channels": coder.channels,
        "scale": coder.scale, "shift": coder.shift, "flip": options.flip, "sampled": options.sampled,
        "digest": digest.hexdigest(),
    }  # fmt: skip


def encode_batch(coder: Decoder, images: Tensor, options: Options, rows: list[np.ndarray]) -> None:
    """Encode images (B, 3, height, width), and store the latents in rows (B, 1 or 2 views, C, h, w) of the arrays."""
    pixels = images.float() / 127.5 - 1
    for view, seen in enumerate((pixels, pixels.flip(-1))[: 1 + options.flip]):
        mean, std = coder.encode(seen)
        if options.sampled:
            mean = mean + std * torch.randn(mean.shape).to(mean.device)
        for row, value in zip(rows, (mean, std), strict=False):
            row[:, view] = value.cpu().numpy()
    for row in rows:
        if not np.isfinite(row).all():
            raise typer.BadParameter("--dtype float16: latents exceed its range; use float32")
