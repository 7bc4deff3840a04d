"""The console command ``lrpe-md PROGRAM ...``. Each program has its own options.

Only the requested program is imported. If the program needs a missing package, the error says what to install.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lrpe_md
from lrpe_md import __version__

from .common.lazy import import_or_explain

__all__ = ["main", "run_program"]

MODELS = {
    "train": "Train a model on digits, images, videos, captioned images, text, or a recall task.",
    "ablate": "Train the same model with each encoding and compare the results.",
    "visualize": "Plot the angles, similarity and wavelengths of encodings.",
}
MACHINE = {
    "info": "Print versions, GPUs, and which implementation runs here.",
    "bench": "Benchmark the operators and whole training steps.",
}
# The README and docs/troubleshooting.md contain the same text.
REPORT_BUGS = (
    "To report a bug, open an issue in the repository that you cloned (see `git remote -v`). Include a minimal "
    "example, the error message, and the output of `lrpe-md info`."
)
DEVELOPMENT = {
    "adapters": "Test adapt_rotary on the models of installed libraries.",
    "fuzz": "Check random configurations against the formula.",
}
OPTIONS = {
    "--import MODULE": "Import a module first, for example to register schemes. All programs accept this option.",
    "--version": "Print the version.",
    "--help": "Print this message.",
}
GROUPS = {"Models and encodings": MODELS, "Your machine": MACHINE, "Development of lrpe-md": DEVELOPMENT}
EVERYTHING = MODELS | MACHINE | DEVELOPMENT
TRAIN = ("digits", "image", "video", "recall", "diffusion", "vae", "lm", "latents", "features", "sample")
PROGRAMS = {name: text for name, text in EVERYTHING.items() if name != "info"}
EXAMPLES = (
    "lrpe-md ablate run digits -e rotate -e sincos -e none --attention softmax --seeds 1", "lrpe-md visualize -p wan",
    "lrpe-md train image --help",
)  # fmt: skip


def is_here(name: str) -> bool:
    """Return whether this installation contains a program. Wheels don't contain benchmarks and developer tools."""
    return importlib.util.find_spec(f"{__package__}.{name}") is not None


def load_program(name: str) -> Any:
    """Return the typer app of a program.

    Raises:
        SystemExit: if a package is not installed, or only a checkout contains the program. The message says what to do.
    """
    if not is_here(name):
        raise SystemExit(f"lrpe-md {name}: only works in a checkout of lrpe-md, but this is an installed wheel")
    return import_or_explain(name, lambda: importlib.import_module(f".{name}.app", __package__).app)


def import_modules(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Import each module passed as ``--import MODULE``, for example to register schemes.

    Modules are also found in the current folder. Return the other arguments, and the names of the modules.

    Raises:
        SystemExit: if a module name is missing, or a module can't be imported.
    """
    others, names, given = [], [], iter(arguments)
    for each in given:
        option, equals, name = each.partition("=")
        if option == "--import":
            names.append(name if equals else next(given, ""))
        else:
            others.append(each)
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # append, so that files in the folder don't hide installed packages
    for name in names:
        if not all(map(str.isidentifier, name.split("."))):
            raise SystemExit(f"--import: expected the name of a module, such as my_schemes, got {name!r}")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            remedy = f"; pass {name.removesuffix('.py')}, without .py" if name.endswith(".py") else ""
            raise SystemExit(
                f"--import: expected an installed module or one in {os.getcwd()}, got {name!r}: {error}{remedy}"
            ) from error
    return others, names


def run_program(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a program. By default, its arguments come from the command line."""
    main([name, *(sys.argv[1:] if arguments is None else arguments)])


def describe_usage() -> str:
    """Return the help text of ``lrpe-md``."""
    lines = ["Usage: lrpe-md PROGRAM [OPTIONS]", "", "Train with position encodings, compare them and plot them."]
    for title, programs in GROUPS.items():
        shown = [f"  {name:<11}{text}" for name, text in programs.items() if is_here(name)]
        lines += ["", f"{title}:", *shown] if shown else []
    lines += ["", "Options:", *(f"  {name:<17}{text}" for name, text in OPTIONS.items())]
    lines += ["", "Examples:", *(f"  {example}" for example in EXAMPLES)]
    return "\n".join([*lines, "", "Run `lrpe-md PROGRAM --help` for the options of a program."])


@contextmanager
def reword_warnings() -> Iterator[None]:
    """Print each library warning once, on one line without source code, and name options instead of arguments."""
    roots = [Path(lrpe_md.__file__).parent, Path(__file__).parent, Path(__file__).parents[1] / "models"]

    def show(message: Any, category: Any, filename: str, *place: Any) -> None:
        if category is not UserWarning or not any(Path(filename).is_relative_to(root) for root in roots):
            shown(message, category, filename, *place)
            return
        from .common.options import in_shell_terms

        if str(message) not in printed:
            printed.add(str(message))
            print(f"Warning: {in_shell_terms(message)}", file=sys.stderr)

    printed: set[str] = set()
    shown, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = shown


def print_text(text: str) -> None:
    """Print ``text``. Exit silently if the reader, such as ``head``, has closed the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit.
        raise SystemExit(1) from None


def run_info(arguments: Sequence[str]) -> None:
    """Run ``lrpe-md info``."""
    if arguments and arguments[0] not in ("-h", "--help"):
        raise SystemExit(f"lrpe-md info: takes no arguments, got {' '.join(arguments)}")
    if arguments:
        print_text(f"Usage: lrpe-md info\n\n{MACHINE['info']}\n{REPORT_BUGS}\n\nExample: lrpe-md info")
        return
    from .info import describe

    print_text(describe())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``lrpe-md PROGRAM ...``. By default, the arguments come from the command line."""
    others, modules = import_modules(sys.argv[1:] if arguments is None else arguments)
    name, *rest = others or ["--help"]
    if name in PROGRAMS:
        with reword_warnings():
            load_program(name)(args=rest, prog_name=f"lrpe-md {name}", obj=modules)
    elif name == "info":
        run_info(rest)
    elif name == "--version":
        print(f"lrpe-md {__version__}")
    elif name in ("-h", "--help"):
        print_text(describe_usage())
    else:
        # Don't use lrpe_md.checks.suggest, which would import torch.
        close = [f"train {name}"] if name in TRAIN else get_close_matches(name, EVERYTHING, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        known = ", ".join(EVERYTHING)
        raise SystemExit(f"lrpe-md: unknown program {name!r}{hint} Expected one of {known}. Run `lrpe-md --help`.")
