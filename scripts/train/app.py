"""``python -m scripts.train digits | image | video | diffusion | lm | sample``."""

from __future__ import annotations

import typer

from . import sample
from .config import command
from .tasks import diffusion, digits, image, lm, video

app = typer.Typer(add_completion=False, no_args_is_help=True)
command(app, digits.DigitsTraining, "digits")(digits.run)
command(app, image.ImageTraining, "image")(image.run)
command(app, video.VideoTraining, "video")(video.run)
command(app, diffusion.DiffusionTraining, "diffusion")(diffusion.run)
command(app, lm.LmTraining, "lm")(lm.run)
app.command("sample")(sample.main)
