"""Sample from a trained diffusion model with your own prompts or classes. Save a sheet, or many samples in an .npz."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from lrpe_md.checks import plural

from ...models.dit import DiT, TrainedGrids
from ...models.text import Text, tokenize
from ..common.folder import save_whole
from ..common.options import choose
from .checkpoint import restore
from .conditions import build_encoder
from .data.buckets import parse_size
from .encodings import has_position_table, restore_arguments
from .generation import as_images
from .samplers import SAMPLERS, Sampling, draw_samples
from .samples import pixels, write_sheet
from .text_features import count_tokens, is_same_encoder, load_encoder
from .vae import open_decoder

BATCH = 16  # number of images per batch


@dataclass(frozen=True)
class Sheet:
    """Sampling options.

    Args:
        size: side or "HEIGHTxWIDTH" in pixels, or None for the training size.
        scale: guidance scale. 1 means no guidance.
        steps: number of sampling steps.
        images: number of images per prompt. All prompts share the same noise.
        positions: "rescaled" or "extrapolated" positions.
        out: path of the PNG.
        negative: prompt to steer away from, or None for the empty condition.
        sampler: one of :data:`.samplers.SAMPLERS`.
        frames: number of frames of a video, or None for the number in training.
    """

    size: str | None
    scale: float
    steps: int
    images: int
    positions: str
    out: Path
    negative: str | None = None
    sampler: str = "heun"
    frames: int | None = None

    def __post_init__(self) -> None:
        choose("--positions", [self.positions], ("rescaled", "extrapolated"))
        choose("--sampler", [self.sampler], SAMPLERS)
        if self.negative is not None and self.scale == 1:
            raise typer.BadParameter(
                f"--negative {self.negative!r}: has no effect with --scale 1, which disables guidance; "
                "pass another --scale, or leave out --negative"
            )

    def height_and_width(self, trained: int, patch: int, factor: int = 1) -> tuple[int, int]:
        """Return the height and width in pixels.

        Args:
            trained: training size in pixels.
            patch: height and width of a patch, in pixels or latents.
            factor: number of pixels per latent.
        """
        multiple = patch * factor
        if self.size is None:
            return trained, trained
        height, width = parse_size("--size", self.size, 1)
        if height % multiple or width % multiple:
            patches = "the model's patch size"
            if factor > 1:
                patches = (
                    f"because a patch has {plural(patch, 'latent')} per side, and each latent covers {factor} pixels"
                )
            raise typer.BadParameter(
                f"--size: expected multiples of {multiple}, {patches}, got {self.size}; the next valid size is "
                f"{math.ceil(height / multiple) * multiple}x{math.ceil(width / multiple) * multiple}"
            )
        return height, width


def check_out(out: Path, option: str = "--out", example: str = "sheet.png") -> None:
    """Check that the output file can be written, because sampling takes minutes."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{option} {out} can't be written ({error.strerror}); choose another path") from error
    if out.is_dir():
        raise typer.BadParameter(f"{option} {out}: expected a file, such as {example}, got a folder")


def words_of(captions: Iterable[str]) -> set[str]:
    """Return the set of lower-case words in captions."""
    return {word for caption in captions for word in re.findall(r"\w+", caption.lower())}


def check_prompts(prompts: list[str], length: int, run: Path, console: Console) -> None:
    """Reject prompts that are too long, and print words that no training caption contains."""
    for prompt in prompts:
        bytes_of = len(prompt.encode())
        if bytes_of > length - 1:
            raise typer.BadParameter(
                f"--prompt: expected at most {length - 1} bytes, as set by --text-length in training, got {bytes_of}: "
                f"{prompt!r}; shorten the prompt"
            )
    known = run / "words.txt"
    if known.is_file():
        unknown = sorted(words_of(prompts) - set(known.read_text(encoding="utf-8").split()))
        if unknown:
            console.print(
                f"No training caption contains {', '.join(map(repr, unknown))}: the model has not learned what these "
                f"words look like; {known} lists the words that it knows"
            )


def draw_noise(num: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw noise (num, *shape). Sample i uses seed + i, so the noise does not depend on the device or on ``num``."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(num)]
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def build_model(settings: dict[str, Any]) -> DiT:
    """Build the model of a run from its settings. At other sizes, the model rescales positions to the training grid."""
    model = DiT(text_encoder=build_encoder(settings["condition"]), **restore_arguments(settings["model"]))
    multiple = settings["patch"] * settings.get("latents", {}).get("factor", 1)
    if not has_position_table(settings["model"]):
        model.reference = TrainedGrids(tuple(size / multiple for size in settings["train_sizes"]))
    model.prediction = settings["prediction"]
    return model


class Painter:
    """Trained diffusion model that draws samples for prompts.

    Args:
        state: content of the checkpoint.
        device: device of the model.
        vae: VAE for a latent model. "auto" uses the VAE that encoded the latents.
        encoder: for a run with --text-features, the text model that computed the features.
    """

    def __init__(
        self, state: dict[str, Any], device: torch.device, *, vae: str = "auto", encoder: str | None = None
    ) -> None:
        self.settings, self.step, self.device = state["settings"], state["step"], device
        self.condition: dict[str, Any] = self.settings["condition"]
        self.model = restore(build_model(self.settings), state).to(device)
        self.grids = self.model.reference
        latents = self.settings.get("latents")
        self.decoder, self.factor = None, 1
        if latents is not None:
            self.decoder = open_decoder(latents, vae, device)
            self.factor = latents["factor"]
        self.encoder = None
        if self.condition["kind"] == "features" and encoder is not None:
            self.encoder = load_encoder(encoder, self.condition["length"], device)
            known: Any = self.model.text_encoder
            if not is_same_encoder(self.encoder, known.empty(1)):
                raise typer.BadParameter(
                    f"--encoder {encoder}: expected {self.condition['encoder']}, the text model that computed the "
                    "training features, got one with other features of the empty caption; pass the model used then"
                )

    def shape(self, size: tuple[int, int], frames: int | None = None) -> tuple[int, ...]:
        """Return the shape (C, [frames,] height, width) of a sample for an image size in pixels."""
        length = (frames or self.settings["frames"],) if self.model.num_axes == 3 else ()
        return self.model.in_chans, *length, *(n // self.factor for n in size)

    def encode(self, prompts: list[str], option: str = "--prompt") -> Any:
        """Convert prompts (captions, class names or class numbers) to the model's text input.

        option: name of the option for error messages.

        Raises:
            typer.BadParameter: for an unknown class, or a run with text features if no text model is passed.
        """
        kind = self.condition["kind"]
        if kind == "captions":
            return tokenize(prompts, self.condition["length"], self.device)
        if kind == "labels":
            return torch.tensor([self._class(prompt, option) for prompt in prompts], device=self.device)
        if kind == "none":
            if any(prompts):
                raise typer.BadParameter(
                    f"{option}: not supported, because the model was trained without captions or classes; leave out "
                    f"{option}"
                )
            return None
        if self.encoder is None:
            raise typer.BadParameter(
                "--encoder: expected the text model that computed the training features "
                f"({self.condition['encoder']}), got none"
            )
        return Text(*(None if value is None else value.float() for value in self.encoder(prompts)))

    def _class(self, prompt: str, option: str) -> int:
        classes = self.condition["classes"]
        if prompt in classes:
            return classes.index(prompt)
        if prompt.isdecimal() and int(prompt) < len(classes):
            return int(prompt)
        if not prompt:
            return len(classes)  # label of the empty condition
        choose(option, [prompt], classes)
        raise AssertionError(prompt)

    def draw(self, text: Any, noise: Tensor, sheet: Sheet) -> Iterator[Tensor]:
        """Draw samples from noise, and yield batches of pixels (B, 3, [frames,] H, W) in [-1, 1], on the CPU.

        ``text`` is a result of :meth:`encode`, with one condition per sample.
        """
        size = tuple(n * self.factor for n in noise.shape[-2:])
        self.model.reference = self.grids if sheet.positions == "rescaled" else None
        sampling = Sampling(sheet.sampler, sheet.steps, sheet.scale, self.settings["prediction"])
        negative = None if sheet.negative is None else self.encode([sheet.negative], "--negative")
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings["precision"])
        cast = precision is not None and self.device.type == "cuda"
        for first in range(0, len(noise), BATCH):
            rows = slice(first, first + BATCH)
            with torch.autocast("cuda", precision) if cast else nullcontext():
                found = draw_samples(
                    self.model, noise[rows].to(self.device), _rows(text, rows), sampling, negative=negative,
                    shift=math.sqrt(size[0] * size[1]) / self.settings["size"],
                ).float()  # fmt: skip
            yield (found if self.decoder is None else self.decoder.decode(found)).cpu()


def _rows(text: Any, rows: Any) -> Any:
    if isinstance(text, Text):
        return Text(*(None if value is None else value[rows] for value in text))
    return None if text is None else text[rows]


def draw(painter: Painter, prompts: list[str], noise: Tensor, sheet: Sheet) -> Tensor:
    """Draw each prompt from the same noise (images, C, ...). Return (prompts, images, 3, [frames,] H, W) in [-1, 1]."""
    rows = torch.arange(len(prompts)).repeat_interleave(len(noise))
    text = _rows(painter.encode(prompts), rows.to(painter.device))
    noise = noise.repeat(len(prompts), *(1,) * (noise.ndim - 1))
    batches = track(
        painter.draw(text, noise, sheet), "sampling", math.ceil(len(noise) / BATCH), console=Console(stderr=True)
    )
    return torch.cat(list(batches)).unflatten(0, (len(prompts), -1))


def sample_images(run: Path, painter: Painter, prompts: list[str], seed: int, sheet: Sheet) -> None:
    """Draw samples, and save them as a PNG with a row for each prompt and a column for each noise sample."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    size = sheet.height_and_width(painter.settings["size"], painter.settings["patch"], painter.factor)
    _check(run, painter, prompts, sheet, console)
    check_out(sheet.out)
    drawn = draw(painter, prompts, draw_noise(sheet.images, painter.shape(size, sheet.frames), seed), sheet)
    columns: dict[str, np.ndarray] = {f"seed {seed + i}": pixels(drawn[:, i]) for i in range(sheet.images)}
    save_whole(sheet.out, lambda part: write_sheet(part, prompts, columns))
    console.print(f"{sheet.out}: {len(prompts)} × {sheet.images} {_describe(painter, size, sheet.frames)}")


def _describe(painter: Painter, size: tuple[int, int], frames: int | None) -> str:
    length = painter.shape(size, frames)[1:-2]
    return f"{'clips' if length else 'images'} of {'x'.join(map(str, (*length, *size)))}, step {painter.step}"


def _check(run: Path, painter: Painter, prompts: list[str], sheet: Sheet, console: Console) -> None:
    given = [*prompts, *([sheet.negative] if sheet.negative else [])]
    if painter.condition["kind"] == "captions":
        check_prompts(given, painter.condition["length"], run, console)
    elif painter.encoder is not None:
        cut = sum(each > painter.encoder.max_length for each in count_tokens(painter.encoder, given))
        if cut:
            console.print(
                f"{cut} of {len(given)} prompts are truncated to {painter.encoder.max_length} tokens, the length of "
                "the longest training caption; shorten them"
            )


class Count(NamedTuple):
    """Number of samples to draw, and path of the .npz."""

    number: int
    npz: Path


def sample_many(run: Path, painter: Painter, prompts: list[str], seed: int, sheet: Sheet, count: Count) -> None:
    """Draw ``count`` samples, cycling through prompts or classes, and save the samples in a format for FID tools.

    In the .npz, arr_0 contains the samples as uint8 (N, H, W, 3), or (N, frames, H, W, 3) for videos. arr_1 (N,)
    contains the labels or the indices of the prompts.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    check_out(count.npz, "--npz", "samples.npz")
    size = sheet.height_and_width(painter.settings["size"], painter.settings["patch"], painter.factor)
    _check(run, painter, prompts, sheet, console)
    if painter.condition["kind"] == "labels" and not any(prompts):
        prompts = painter.condition["classes"]
    text, shape, found = painter.encode(prompts), painter.shape(size, sheet.frames), []
    numbers = torch.arange(count.number) % len(prompts)
    for part in track(numbers.split(BATCH), "sampling", console=Console(stderr=True)):
        noise = draw_noise(len(part), shape, seed + sum(map(len, found)))
        for drawn in painter.draw(_rows(text, part.to(painter.device)), noise, sheet):
            images = as_images(drawn).permute(0, 2, 3, 1)
            found.append((images.unflatten(0, (len(drawn), -1)) if drawn.ndim == 5 else images).numpy())
    is_label = painter.condition["kind"] == "labels"
    arrays: Any = {"arr_0": np.concatenate(found), "arr_1": (text[numbers].cpu() if is_label else numbers).numpy()}

    def save(part: Path) -> None:
        with part.open("wb") as file:
            np.savez(file, **arrays)

    save_whole(count.npz, save)
    console.print(f"{count.npz}: {count.number} {_describe(painter, size, sheet.frames)}")
