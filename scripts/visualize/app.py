"""The command line of ``lrpe-md visualize``, which draws encodings."""

from __future__ import annotations

from typing import Any

import typer

from ..common.options import Command
from . import pictures


class Visualize(Command):
    """The command, which takes presets as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Suggest ``-p NAME`` for a name without -p, and ``14x20`` for sizes with spaces."""
        ctx.allow_extra_args = True
        others = super().parse_args(ctx, args)
        if others:
            advice = f"to plot it, try: -p {' -p '.join(others)}"
            if all(each.isdecimal() for each in others):
                advice = "join the sizes of a shape or token with x, as in --shape 14x20"
            ctx.fail(f"Got unexpected extra argument(s) ({' '.join(others)}); {advice}")
        return others


app = typer.Typer(add_completion=False)
app.command(cls=Visualize, epilog="Example: lrpe-md visualize --preset wan --preset dinov3 --compare")(pictures.main)
