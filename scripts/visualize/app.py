"""``python -m scripts.visualize presets | encoding``."""

from __future__ import annotations

import typer

from . import pictures

app = typer.Typer(add_completion=False)
app.command()(pictures.main)
