"""Generate text, images or videos with the checkpoint of a training run.

lrpe-md train sample runs/lm --prompt "**ROMEO**" --tokens 400
lrpe-md train sample runs/emoji --prompt "red heart" --prompt "sleeping cat" --size 48x64 --out sheet.png
lrpe-md train sample runs/fashion --count 5000 --npz samples.npz
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..common.devices import choose_device
from ..common.folder import unused_path
from ..common.options import SEEDS, finite, positive
from .checkpoint import read_checkpoint
from .encodings import check_scheme
from .prompts import Count, Painter, Sheet, sample_images, sample_many
from .runs import task_of
from .samplers import SAMPLERS
from .tasks import diffusion, lm

TEXT, IMAGES = "lm", "diffusion"
SAMPLER: Any = typer.Option(help=f"Images: sampler ({', '.join(SAMPLERS)}). (default: heun)")
# Options that only one kind of run supports, with the default values.
OWN: dict[str, dict[str, Any]] = {
    TEXT: {"tokens": 400, "temperature": 0.8, "top_p": 0.95, "scaling": None},
    IMAGES: {
        "size": None,
        "frames": None,
        "scale": 3.0,
        "negative": None,
        "steps": 50,
        "images": 4,
        "positions": "rescaled",
        "out": None,
        "sampler": "heun",
        "vae": "auto",
        "encoder": None,
        "count": None,
        "npz": None,
    },
}


def read_run(run: Path) -> tuple[str, dict[str, Any]]:
    """Return the task and the checkpoint of a run. Tensors are on the CPU."""
    path = run / "checkpoint.pt"
    if not path.is_file():
        raise typer.BadParameter(
            f"RUN: expected a run's folder with a checkpoint.pt, got {run}; pass the --out of "
            "`train lm` or `train diffusion`"
        )
    state = read_checkpoint(path)
    task = task_of(state["settings"])
    if task not in OWN:
        raise typer.BadParameter(
            f"RUN: {run} was trained for a different task and can't generate anything; expected a run of `train lm` or "
            "`train diffusion`"
        )
    try:
        check_scheme(state["settings"])
    except ValueError as error:
        raise typer.BadParameter(f"RUN {run}: {error}") from None
    return task, state


def own_options(task: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that apply to a kind of run, and reject options for the other kind."""
    wrong = [name for name, value in given.items() if value is not None and name not in OWN[task]]
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        known = ", ".join(f"--{name.replace('_', '-')}" for name in OWN[task])
        raise typer.BadParameter(f"{names}: not supported for a run of `train {task}`, which only accepts {known}")
    return {name: default if given[name] is None else given[name] for name, default in OWN[task].items()}


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `train lm` or `train diffusion`.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue, description of an image, or class (name or number); repeatable."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Text file with one prompt per line.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=SEEDS - 1, help="Random seed for the text, or for the first image.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto (cuda if available).")] = "auto",
    tokens: Annotated[int | None, typer.Option(min=1, help="Text: number of bytes to generate. (default: 400)")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Text: temperature; 0 chooses the most likely byte. (default: 0.8)"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(max=1, callback=positive, help="Text: top-p for nucleus sampling. (default: 0.95)"),
    ] = None,
    scaling: Annotated[str | None, typer.Option(help="Text: length scaling (linear, ntk or yarn).")] = None,
    size: Annotated[
        str | None, typer.Option(help="Images: size in pixels, SIDE or HEIGHTxWIDTH. (default: the training size)")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Videos: number of frames per clip. (default: as in training)")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Images: guidance scale; 1 disables guidance. (default: 3)"),
    ] = None,
    negative: Annotated[
        str | None, typer.Option(help="Images: prompt or class to steer away from. (default: the empty condition)")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Images: number of sampling steps. (default: 50)")] = None,
    sampler: Annotated[str | None, SAMPLER] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Images: number of images per prompt. (default: 4)")] = None,
    positions: Annotated[
        str | None,
        typer.Option(help="Images: positions at other sizes (rescaled or extrapolated). (default: rescaled)"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Images: output file. (default: sheet.png in RUN, then sheet-2.png, ...)")
    ] = None,
    vae: Annotated[
        str | None, typer.Option(help="Images: VAE that decodes latents. (default: the one that encoded them)")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Images: text model that encodes prompts, for runs with --text-features.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Images: number of images to write to --npz, cycling through prompts or classes."),
    ] = None,
    npz: Annotated[
        Path | None,
        typer.Option(
            help="Images: .npz file for --count samples. arr_0 is uint8 (N, [frames,] H, W, 3). arr_1 holds the labels."
        ),
    ] = None,
) -> None:
    """Generate text, images or video clips with a trained model, using averaged weights if the run saved them."""
    on, (task, state) = choose_device(device), read_run(run)
    given = {
        "tokens": tokens, "temperature": temperature, "top_p": top_p, "scaling": scaling, "size": size,
        "frames": frames, "scale": scale, "negative": negative, "steps": steps, "images": images,
        "positions": positions, "out": out, "sampler": sampler, "vae": vae, "encoder": encoder, "count": count,
        "npz": npz,
    }  # fmt: skip
    options = own_options(task, given)
    prompts = [*(prompt or []), *read_prompts(prompt_file)]
    if task == TEXT:
        lm.sample_text(state, prompts or ["\n"], seed, on, **options)
    else:
        check_effects(state["settings"], given)
        _paint(run, state, prompts, seed, on, options)


def _paint(
    run: Path, state: dict[str, Any], prompts: list[str], seed: int, on: torch.device, options: dict[str, Any]
) -> None:
    """Sample from a run of `train diffusion`."""
    vae, encoder, number, npz = (options.pop(name) for name in ("vae", "encoder", "count", "npz"))
    sheet = Sheet(**{**options, "out": options["out"] or unused_path(run / "sheet.png")})
    painter = Painter(state, on, vae=vae or "auto", encoder=encoder)
    if not prompts and (npz is None or painter.condition["kind"] != "labels"):
        check_unconditional(painter.condition)
    if number is None or npz is None:
        sample_images(run, painter, prompts or [""], seed, sheet)
    else:
        sample_many(run, painter, prompts or [""], seed, sheet, Count(number, npz))


def check_unconditional(condition: dict[str, Any]) -> None:
    """Raise an error if the model was trained with a condition and therefore needs a prompt."""
    if condition["kind"] == "none":
        return
    classes = condition.get("classes")
    wanted = f"a class, such as --prompt {shlex.quote(classes[0])}" if classes else "--prompt TEXT"
    raise typer.BadParameter(
        f"--prompt: expected at least one prompt for a run of `train diffusion`, got none; pass {wanted}, or --prompt "
        "'' for images without a prompt"
    )


def check_effects(settings: dict[str, Any], given: dict[str, Any]) -> None:
    """Reject options that have no effect for a run with these settings, or that other options make ineffective."""
    if (given["count"] is None) != (given["npz"] is None):
        raise typer.BadParameter(f"--count, --npz: expected both or neither, got {given['count']} and {given['npz']}")
    is_sheet, condition = given["npz"] is None, settings["condition"]["kind"]
    scale = OWN[IMAGES]["scale"] if given["scale"] is None else given["scale"]
    if condition != "none" and scale != 1 and given["negative"] is None and not diffusion.can_guide(settings):
        raise typer.BadParameter(
            "--scale: expected 1, because this run was trained with --drop-text 0, so it has no empty condition for "
            f"guidance, got {scale:g}; pass --scale 1, or --negative"
        )
    for name, has_effect, reason in (
        ("out", is_sheet, "with --npz, no sheet is written"),
        ("images", is_sheet, "with --npz, --count is the number of images"),
        ("vae", "latents" in settings or given["vae"] == "auto", "this run was trained on pixels"),
        ("encoder", condition == "features", "this run was trained without --text-features"),
        ("scale", condition != "none", "this run was trained without captions or classes to guide to"),
        ("frames", settings["model"].get("num_axes") == 3, "this run was trained on images"),
    ):
        if given[name] is not None and not has_effect:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option}: has no effect, because {reason}; leave out {option}")


def read_prompts(path: Path | None) -> list[str]:
    """Return the non-empty lines of a file."""
    if path is None:
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--prompt-file {path}: can't be read as text ({error}); pass another file") from error
