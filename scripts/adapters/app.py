"""Test ``adapt_rotary`` on the models of the installed timm, diffusers and transformers.

lrpe-md adapters table --library timm > scripts/results/adapters/timm.csv
lrpe-md adapters sweep > scripts/results/adapters/changes.csv
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.options import Command
from .sweep import sweep_library, write_outcomes
from .trial import LIBRARIES, try_library, write

app = typer.Typer(
    add_completion=False, no_args_is_help=True,
    help="Test adapt_rotary on models from the installed versions of timm, diffusers and transformers.",
    epilog="Example: lrpe-md adapters table --library timm > timm.csv",
)  # fmt: skip
Library = Annotated[list[str] | None, typer.Option(help="Library to test; repeatable. (default: all installed)")]
Models = Annotated[list[str] | None, typer.Option(help="Model to test; repeatable. (default: all)")]
All = Annotated[bool, typer.Option("--all", help="Also list modifications that do not apply to a model.")]


@app.command(cls=Command, epilog="Example: lrpe-md adapters table --library timm > timm.csv")
def table(library: Library = None) -> None:
    """Test all rotary models, and write one CSV row per model to stdout."""
    rows = write(row for name in _check(library) for row in try_library(name))
    raise typer.Exit(int(any(row.outcome == "wrong" for row in rows)))


@app.command(cls=Command, epilog="Example: lrpe-md adapters sweep --library timm --model eva02_tiny_patch14_224")
def sweep(library: Library = None, model: Models = None, all_rows: All = False) -> None:
    """Modify all models before or after adaptation, and write one CSV row per model to stdout."""
    found = (row for name in _check(library) for row in sweep_library(name, model))
    rows = write_outcomes(row for row in found if all_rows or row.outcome != "inapplicable")
    raise typer.Exit(int(any(row.outcome in ("different", "error") for row in rows)))


def _check(library: list[str] | None) -> list[str]:
    for name in library or ():
        if name not in LIBRARIES:
            raise typer.BadParameter(f"expected one of {', '.join(LIBRARIES)}, got {name!r}", param_hint="--library")
    return library or list(LIBRARIES)
