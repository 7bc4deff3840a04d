"""``python -m scripts.train digits | image | video | diffusion | vae | lm | latents | features | sample``."""

from __future__ import annotations

import typer

from . import latents, sample, text_features
from .config import command
from .tasks import diffusion, digits, image, lm, vae, video

app = typer.Typer(add_completion=False, no_args_is_help=True)
command(app, digits.DigitsTraining, "digits")(digits.run)
command(app, image.ImageTraining, "image")(image.run)
command(app, video.VideoTraining, "video")(video.run)
command(app, diffusion.DiffusionTraining, "diffusion")(diffusion.run)
command(app, vae.VaeTraining, "vae")(vae.run)
command(app, lm.LmTraining, "lm")(lm.run)
app.command("latents")(latents.main)
app.command("features")(text_features.main)
app.command("sample")(sample.main)
