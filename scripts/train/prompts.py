"""Images of prompts of one's own, by the checkpoint of a diffusion training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ...models.dit import DiT
from ...models.flow import sample
from ...models.text import TextEncoder, tokenize
from ..common.folder import save_whole
from ..common.options import choose
from .samples import pixels, write_sheet

BATCH = 16  # images that are drawn together


@dataclass(frozen=True)
class Sheet:
    """Options of a sheet of samples.

    Args:
        size: "HEIGHTxWIDTH" in pixels; None: the trained one.
        scale: of the guidance by the prompt.
        steps: of Heun's method.
        images: of each prompt, each with a noise of its own, which is the same for all prompts.
        positions: "rescaled" or "extrapolated".
        out: the PNG.
        negative: prompt that the guidance steers away from; None: the empty caption.
    """

    size: str | None
    scale: float
    steps: int
    images: int
    positions: str
    out: Path
    negative: str | None = None

    def __post_init__(self) -> None:
        choose("--positions", [self.positions], ("rescaled", "extrapolated"))

    def height_and_width(self, trained: int, patch: int) -> tuple[int, int]:
        """Height and width in pixels."""
        if self.size is None:
            return trained, trained
        found = re.fullmatch(r"(\d+)x(\d+)", self.size)
        if found is None:
            raise typer.BadParameter(f"--size: expected HEIGHTxWIDTH in pixels, as 96x64, got {self.size!r}")
        height, width = int(found[1]), int(found[2])
        if height % patch or width % patch or not height * width:
            raise typer.BadParameter(
                f"--size: expected multiples of {patch}, the model's patch, got {self.size}; the next is "
                f"{max(1, math.ceil(height / patch)) * patch}x{max(1, math.ceil(width / patch)) * patch}"
            )
        return height, width


def check_out(out: Path) -> None:
    """Check the output file before the minutes of sampling."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--out {out} can't be written ({error.strerror}); choose another place") from error
    if out.is_dir():
        raise typer.BadParameter(f"--out {out}: expected a file, as sheet.png, got a folder")


def words_of(captions: Iterable[str]) -> set[str]:
    """Their words in small letters."""
    return {word for caption in captions for word in re.findall(r"\w+", caption.lower())}


def check_prompts(prompts: list[str], length: int, run: Path, console: Console) -> None:
    """Refuse what the model can't read to its end, and say which words no caption of the training had."""
    for prompt in prompts:
        bytes_of = len(prompt.encode())
        if bytes_of > length - 1:
            raise typer.BadParameter(
                f"--prompt: expected at most {length - 1} bytes, as the captions of the training, got {bytes_of}: "
                f"{prompt!r}; shorten it"
            )
    known = run / "words.txt"
    if known.is_file():
        unknown = sorted(words_of(prompts) - set(known.read_text(encoding="utf-8").split()))
        if unknown:
            console.print(
                f"No caption of the training had {', '.join(map(repr, unknown))}: the model reads such words letter by "
                f"letter and has not learned what they look like; {known} has those that it knows"
            )


def load_model(state: dict[str, Any]) -> DiT:
    """The model of a checkpoint, on the CPU."""
    settings = state["settings"]
    encoder = TextEncoder(settings["text_dim"], settings["text_depth"], settings["heads"])
    model = DiT(text_encoder=encoder, **settings["model"])
    model.load_state_dict(state.get("average", state["model"]))
    return model.eval()


def lay_over(trained: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Return a grid with as many patches as in training, in the image's proportions."""
    side = math.sqrt(grid[0] * grid[1])
    height, width = (max(1, round(trained * n / side)) for n in grid)
    return height, width


def draw_noise(sheet: Sheet, size: tuple[int, int], channels: int, seed: int) -> Tensor:
    """(images, C, H, W), the i-th by seed + i: the same whatever the device, and however many there are."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(sheet.images)]
    return torch.stack([torch.randn(channels, *size, generator=generator) for generator in generators])


def draw(
    model: DiT, settings: dict[str, Any], prompts: list[str], noise: Tensor, sheet: Sheet, device: torch.device
) -> Tensor:
    """Images (prompts, images, C, H, W) in [-1, 1], from noise (images, C, H, W)."""
    height, width = noise.shape[-2:]
    trained, patch = settings["size"], settings["patch"]
    if (height, width) != (trained, trained) and sheet.positions == "rescaled":
        model.reference = lay_over(trained // patch, (height // patch, width // patch))
    model = model.to(device)
    tokens = tokenize(prompts, settings["text_length"]).repeat_interleave(len(noise), 0)
    noise = noise.repeat(len(prompts), 1, 1, 1)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings["precision"])
    cast = precision is not None and device.type == "cuda"
    negative = None if sheet.negative is None else tokenize([sheet.negative], settings["text_length"], device)
    batches = list(zip(noise.split(BATCH), tokens.split(BATCH), strict=True))
    found = []
    for z, text in track(batches, "images", console=Console(stderr=True)):
        with torch.autocast("cuda", precision) if cast else nullcontext():
            found.append(
                sample(
                    model, z.to(device), text.to(device), scale=sheet.scale, negative=negative, steps=sheet.steps,
                    method="heun",
                    shift=math.sqrt(height * width) / trained,
                ).float().cpu()
            )  # fmt: skip
    return torch.cat(found).unflatten(0, (len(prompts), -1))


def sample_images(
    run: Path, state: dict[str, Any], prompts: list[str], seed: int, device: torch.device, sheet: Sheet
) -> None:
    """Draw prompts by the model of a checkpoint: a row for each, and a column for each noise, as a PNG."""
    settings, console = state["settings"], Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    size = sheet.height_and_width(settings["size"], settings["patch"])
    check_prompts([*prompts, *([sheet.negative] if sheet.negative else [])], settings["text_length"], run, console)
    check_out(sheet.out)
    model = load_model(state)
    drawn = draw(model, settings, prompts, draw_noise(sheet, size, model.in_chans, seed), sheet, device)
    columns: dict[str, np.ndarray] = {f"seed {seed + i}": pixels(drawn[:, i]) for i in range(sheet.images)}
    save_whole(sheet.out, lambda part: write_sheet(part, prompts, columns))
    console.print(f"{sheet.out}: {len(prompts)} × {sheet.images} images of {size[0]}x{size[1]}, step {state['step']}")
