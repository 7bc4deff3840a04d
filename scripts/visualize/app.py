"""The command line of ``lrpe-md visualize``, which draws encodings."""

from __future__ import annotations

from typing import Any

import typer

from ..common.options import Command
from . import pictures


class Visualize(Command):
    """The command, which takes presets as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Suggest ``-p NAME`` for a name without -p."""
        ctx.allow_extra_args = True
        others = super().parse_args(ctx, args)
        if others:
            names = " ".join(others)
            ctx.fail(f"Got unexpected extra argument(s) ({names}); to plot it, try: -p {' -p '.join(others)}")
        return others


app = typer.Typer(add_completion=False)
app.command(cls=Visualize, epilog="Example: lrpe-md visualize --preset wan --preset dinov3 --compare")(pictures.main)
