"""Sample from the checkpoint of a training: go on with a text, or draw images of prompts.

python -m scripts.train sample runs/lm --prompt "**ROMEO**" --tokens 400
python -m scripts.train sample runs/emoji --prompt "red heart" --prompt "sleeping cat" --size 48x64 --out sheet.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.devices import choose_device
from ..common.options import SEEDS, finite, positive
from .checkpoint import read_checkpoint
from .prompts import Sheet, sample_images
from .tasks import lm

TEXT, IMAGES = "lm", "diffusion"
# The options that only one kind of run takes, with what they are where they are not given.
OWN: dict[str, dict[str, Any]] = {
    TEXT: {"tokens": 400, "temperature": 0.8, "top_p": 0.95, "scaling": None},
    IMAGES: {
        "size": None,
        "scale": 3.0,
        "negative": None,
        "steps": 50,
        "images": 4,
        "positions": "rescaled",
        "out": Path("sheet.png"),
    },
}


def task_of(settings: dict[str, Any]) -> str | None:
    """The command that made a run, of those that can be sampled from."""
    if "drop_text" in settings:
        return IMAGES
    return TEXT if "vocab_size" in settings.get("model", {}) else None


def read_run(run: Path) -> tuple[str, dict[str, Any]]:
    """The task of a training's folder, and its checkpoint on the CPU."""
    path = run / "checkpoint.pt"
    if not path.is_file():
        raise typer.BadParameter(
            f"RUN: expected the folder of a training, with a checkpoint.pt in it, got {run}; give the --out of "
            "`train lm` or `train diffusion`"
        )
    state = read_checkpoint(path)
    task = task_of(state["settings"])
    if task is None:
        raise typer.BadParameter(
            f"RUN: {run} holds a training of another task, whose model makes nothing; expected one that `train lm` "
            "made, or `train diffusion`"
        )
    return task, state


def own_options(task: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of this kind of run; one of another kind is refused."""
    wrong = [name for name, value in given.items() if value is not None and name not in OWN[task]]
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        known = ", ".join(f"--{name.replace('_', '-')}" for name in OWN[task])
        raise typer.BadParameter(f"{names}: not for a run of `train {task}`, which takes {known}; leave it out")
    return {name: default if given[name] is None else given[name] for name, default in OWN[task].items()}


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a training, of `train lm` or `diffusion`.")],
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS - 1, help="Of the draws, of the first image's noise.")] = 0,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    tokens: Annotated[int | None, typer.Option(min=1, help="Text: bytes to add, 400 unless told otherwise.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Text: 0.8; 0 takes the likeliest byte.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(max=1, callback=positive, help="Text: 0.95.")] = None,
    scaling: Annotated[str | None, typer.Option(help="Text: linear, ntk or yarn, to the result's length.")] = None,
    size: Annotated[str | None, typer.Option(help="Images: HEIGHTxWIDTH in pixels; else that of the training.")] = None,
    scale: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Images: guidance by the prompt, 3; 1: none.")
    ] = None,
    negative: Annotated[
        str | None, typer.Option(help="Images: a prompt to steer away from. Default: the empty caption.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Images: steps of Heun's method, 50.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Images of each prompt, 4.")] = None,
    positions: Annotated[
        str | None, typer.Option(help="Images: at another size rescaled (laid over the trained grid) or extrapolated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Images: the sheet, sheet.png.")] = None,
) -> None:
    """Go on with prompts, or draw them, by a model of yours: the averaged weights where the training kept them."""
    on, (task, state) = choose_device(device), read_run(run)
    options = own_options(
        task,
        {
            "tokens": tokens, "temperature": temperature, "top_p": top_p, "scaling": scaling, "size": size,
            "scale": scale, "negative": negative, "steps": steps, "images": images, "positions": positions, "out": out,
        },
    )  # fmt: skip
    if task == TEXT:
        lm.sample_text(state, prompt or ["\n"], seed, on, **options)
    else:
        sample_images(run, state, prompt or [""], seed, on, Sheet(**options))
