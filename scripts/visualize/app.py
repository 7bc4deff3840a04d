"""The command line of ``lrpe-md visualize``, which draws encodings."""

from __future__ import annotations

import typer

from . import pictures

app = typer.Typer(add_completion=False)
app.command(epilog="Example: lrpe-md visualize --preset wan --preset dinov3")(pictures.main)
