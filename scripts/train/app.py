"""``python -m scripts.train TASK``."""

from __future__ import annotations

import typer

from .loop import command
from .tasks import diffusion, image, lm, video

app = typer.Typer(add_completion=False, no_args_is_help=True)
command(app, image.ImageTraining, "image")(image.run)
command(app, video.VideoTraining, "video")(video.run)
command(app, diffusion.DiffusionTraining, "diffusion")(diffusion.run)
app.command("lm")(lm.train)
app.command("sample")(lm.sample_text)
