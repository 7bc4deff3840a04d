"""The console command: ``lrpe-md train | ablate | bench | fuzz | visualize``, each with its own options, and ``info``.

Only the requested program is imported. If one of its packages is missing, the error says what to install.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from .common.lazy import import_or_explain

__all__ = ["main", "run_program"]

PROGRAMS = {
    "train": "train a model on digits, images, videos, captioned images or text",
    "ablate": "train the same model with each encoding and compare the results",
    "bench": "benchmark the operators and whole training steps",
    "fuzz": "check random configurations against the formula",
    "visualize": "plot angles, similarity and wavelengths of encodings",
}


def load_program(name: str) -> Any:
    """Return the typer app of a program.

    Raises:
        SystemExit: a package is not installed; the message says what to install.
    """
    return import_or_explain(name, lambda: importlib.import_module(f".{name}.app", __package__).app)


def run_program(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a program with these arguments. The default is the command line's."""
    app = load_program(name)
    program = f"lrpe-md {name}" if arguments is not None else f"python -m scripts.{name}"
    app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name=program)


def main() -> None:
    """Run ``lrpe-md NAME ..``."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in PROGRAMS:
        run_program(name, arguments)
        return
    if name == "--version":
        from lrpe_md import __version__

        print(f"lrpe-md {__version__}")
        return
    if name == "info":
        from .info import describe

        print(describe())
        return
    programs = PROGRAMS | {"info": "print versions, GPUs, and which implementation runs here"}
    usage = "\n".join(["usage: lrpe-md PROGRAM ..", *(f"  {each:<10} {what}" for each, what in programs.items())])
    if name in ("-h", "--help"):
        print(usage)
        return
    close = get_close_matches(name, programs, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise SystemExit(f"lrpe-md: expected one of {', '.join(programs)}, got {name!r}{hint}\n{usage}")
