"""``lrpe-md train digits | image | video | recall | diffusion | vae | lm | latents | features | sample``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

from ..common.lazy import lazy_app

# Maps a task to its configuration class (in the module named after the task) and a one-line help text.
TRAININGS = {
    "digits": ("DigitsTraining", "Train a small ViT on scikit-learn's digits, in seconds on a CPU."),
    "image": ("ImageTraining", "Train a ViT on labelled images."),
    "video": ("VideoTraining", "Train a video transformer on clips, with or without labels."),
    "recall": ("RecallTraining", "Train a video model to recall symbols from earlier frames."),
    "diffusion": ("DiffusionTraining", "Train a diffusion transformer on images, latents or videos."),
    "vae": ("VaeTraining", "Train an autoencoder to use with `train latents`."),
    "lm": ("LmTraining", "Train a causal language model on text."),
}
OTHERS: dict[str, tuple[str, str]] = {
    "latents": ("latents", "Encode images or videos with a diffusers autoencoder."),
    "features": ("text_features", "Encode captions with a transformers text model."),
    "sample": ("sample", "Generate text or images with a trained model."),
}


def load_training(name: str, config: str) -> typer.Typer:
    """Import a task, and return its command."""
    from .config import command

    module, app = importlib.import_module(f".tasks.{name}", __package__), _new()
    command(app, getattr(module, config), name)(module.run)
    return app


def load_other(name: str, module: str) -> typer.Typer:
    """Import a module, and return its ``main`` function as a command."""
    from ..common.options import Command

    app = _new()
    app.command(name, cls=Command)(importlib.import_module(f".{module}", __package__).main)
    return app


def _new() -> typer.Typer:
    return typer.Typer(add_completion=False)


COMMANDS: dict[str, tuple[str, Callable[[], Any]]] = {
    **{name: (text, partial(load_training, name, config)) for name, (config, text) in TRAININGS.items()},
    **{name: (text, partial(load_other, name, module)) for name, (module, text) in OTHERS.items()},
}
app = lazy_app("train", COMMANDS, "Train a model, or sample from a trained one.")
