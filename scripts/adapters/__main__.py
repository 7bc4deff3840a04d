"""Commands that try ``adapt_rotary`` on whole libraries.

python -m scripts.adapters table --library timm > scripts/results/adapters/timm.csv
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .trial import LIBRARIES, try_library, write

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Try ``adapt_rotary`` on the models of timm, diffusers and transformers."""


@app.command()
def table(
    library: Annotated[list[str] | None, typer.Option(help="Only this library; may be repeated.")] = None,
) -> None:
    """Try every rotary model that is installed, and write a CSV row for each to stdout."""
    chosen: Any = library or LIBRARIES
    for name in chosen:
        if name not in LIBRARIES:
            raise typer.BadParameter(f"expected one of {', '.join(LIBRARIES)}, got {name!r}", param_hint="--library")
    rows = write(row for name in chosen for row in try_library(name))
    raise typer.Exit(int(any(row.outcome == "wrong" for row in rows)))


if __name__ == "__main__":
    app()
