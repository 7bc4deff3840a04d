r"""The own model tests of diffusers and transformers, on their models and on the same models adapted.

    python -m scripts.host_tests --diffusers CHECKOUT --transformers CHECKOUT [--only NAME] \
        --out scripts/results/adapters/own-tests.csv

A checkout is one of the library's repository, at the version that is installed or one near it. Each file runs twice,
stock and with ``adapt_rotary`` called on every model as soon as it is made (host_plugin.py). A test that passes with
stock models and does not with adapted ones is worse: they are printed, and the exit status is 1. Slow tests and those
of what a machine lacks skip as the libraries have it; ``RUN_SLOW=1`` runs the former.

Their tests need ``pip install pytest parameterized peft httpx``.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from .common.folder import ROOT

DIFFUSERS = "tests/models/transformers/test_models_transformer_{}.py"
TRANSFORMERS = "tests/models/{0}/test_modeling_{0}.py"
TESTS = {
    "diffusers": (DIFFUSERS, ("flux", "flux2", "qwenimage", "wan", "wan_animate", "wan_vace", "ltx", "ltx2")),
    "transformers": (TRANSFORMERS, ("llama", "qwen3", "qwen3_vl", "gemma3")),
}
PLUGIN = "lrpe_md.scripts.host_plugin"
TIMEOUT = 600
app = typer.Typer(add_completion=False)


class HostTestsError(typer.BadParameter):
    """Of what is to be run."""


@dataclass
class Run:
    """What became of each test by its name, the tests that made adapted models, and models that were not adapted."""

    outcomes: dict[str, str] = field(default_factory=dict)
    adapted: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass
class Row:
    """One file of tests."""

    library: str
    installed: str
    tests: str  # their version
    model: str
    file: str
    passed_stock: int
    passed_adapted: int
    of_adapted_models: int  # of the tests that passed adapted, those in which a model was
    failed_both: int
    worse: str  # names, by spaces


def run_tests(checkout: Path, file: str, adapt: bool) -> Run:
    """A file of tests in a process of its own.

    Raises:
        HostTestsError: no test ran.
    """
    with tempfile.TemporaryDirectory(prefix="host-tests-") as folder:
        outcomes, log = Path(folder) / "outcomes.jsonl", Path(folder) / "log"
        command = [
            sys.executable, "-m", "pytest", "-p", PLUGIN, "--outcomes", str(outcomes), *(("--adapt",) if adapt else ()),
            "-q", "-p", "no:cacheprovider", "-W", "ignore", "-o", "log_cli=0", "--tb=short", file,
        ]  # fmt: skip
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with log.open("w", encoding="utf-8") as output:
            try:
                subprocess.run(
                    command, cwd=checkout, env=environment, stdout=output, stderr=output, timeout=TIMEOUT, check=False
                )
            except subprocess.TimeoutExpired:
                typer.echo(f"{file}: not done after {TIMEOUT} s", err=True)
        if not outcomes.is_file():
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            typer.echo(tail, err=True)
            raise HostTestsError(f"{checkout / file}: expected tests that run, got none; what pytest said is above")
        return read_run(outcomes)


def read_run(file: Path) -> Run:
    run = Run()
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        run.outcomes[line["test"]] = line["outcome"]
        run.refused |= line["refused"]
        if line["adapted"]:
            run.adapted.add(line["test"])
    return run


def find_worse(stock: Run, adapted: Run) -> list[str]:
    """Tests that pass with stock models and do not with adapted ones: they fail, skip or never end."""
    passed = [test for test, outcome in stock.outcomes.items() if outcome == "passed"]
    return [test for test in passed if adapted.outcomes.get(test) != "passed"]


def compare(stock: Run, adapted: Run) -> dict[str, Any]:
    """The counts of a :class:`Row`, and the names of those that are worse."""
    passed = {test for test, outcome in adapted.outcomes.items() if outcome == "passed"}
    failed = [test for test, outcome in stock.outcomes.items() if outcome == "failed"]
    return {
        "passed_stock": sum(outcome == "passed" for outcome in stock.outcomes.values()),
        "passed_adapted": len(passed),
        "of_adapted_models": len(passed & adapted.adapted),
        "failed_both": sum(adapted.outcomes.get(test) == "failed" for test in failed),
        "worse": " ".join(test.partition("::")[2] for test in find_worse(stock, adapted)),
    }


def read_version(checkout: Path) -> str:
    """Of a checkout's setup.py."""
    setup = checkout / "setup.py"
    found = re.search(r'version="([^"]+)"', setup.read_text(encoding="utf-8")) if setup.is_file() else None
    return found[1] if found else "unknown"


def write_rows(out: Path, rows: list[Row]) -> None:
    """Rows of the file that were not measured anew stay."""
    names = [each.name for each in fields(Row)]
    new = {(row.library, row.model): [str(value) for value in astuple(row)] for row in rows}
    old: dict[tuple[str, str], list[str]] = {}
    if out.is_file():
        with out.open(encoding="utf-8", newline="") as file:
            old = {(line["library"], line["model"]): [line[name] for name in names] for line in csv.DictReader(file)}
    order = [(library, model) for library, (_, models) in TESTS.items() for model in models]
    found = old | new
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(found[key] for key in order if key in found)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Table that is written; rows of other models stay in it.")],
    diffusers: Annotated[Path | None, typer.Option(help="Checkout of diffusers.", exists=True)] = None,
    transformers: Annotated[Path | None, typer.Option(help="Checkout of transformers.", exists=True)] = None,
    only: Annotated[str | None, typer.Option(help="One model: flux, llama, ..")] = None,
    tests: Annotated[str | None, typer.Option(help="What the checkouts are; default: what setup.py says.")] = None,
) -> None:
    """Run the model tests of diffusers and transformers, stock and adapted."""
    known = [model for _, models in TESTS.values() for model in models]
    if only is not None and only not in known:
        raise HostTestsError(f"--only: expected one of {', '.join(known)}, got {only!r}")
    checkouts = {"diffusers": diffusers, "transformers": transformers}
    jobs = [
        (library, checkout, model)
        for library, checkout in checkouts.items()
        if checkout is not None
        for model in TESTS[library][1]
        if only in (None, model)
    ]
    if not jobs:
        raise HostTestsError("expected --diffusers or --transformers with tests of that model, got none")
    worse: list[str] = []
    for library, checkout, model in jobs:
        path = TESTS[library][0].format(model)
        stock, adapted = (run_tests(checkout, path, adapt) for adapt in (False, True))
        row = Row(library, version(library), tests or read_version(checkout), model, path, **compare(stock, adapted))
        write_rows(out, [row])
        worse += find_worse(stock, adapted)
        typer.echo(
            f"{library} {model}: stock {row.passed_stock} passed, adapted {row.passed_adapted} "
            f"({row.of_adapted_models} with adapted models), {row.failed_both} fail both ways"
        )
        for name, reason in adapted.refused.items():
            typer.echo(f"  not adapted: {name}: {reason}")
    for test in worse:
        typer.echo(f"worse: {test}")
    raise typer.Exit(1 if worse else 0)


if __name__ == "__main__":
    app()
