r"""Run the model tests of diffusers and transformers on stock models and on adapted models.

    python -m scripts.host_tests --diffusers CHECKOUT --transformers CHECKOUT [--only NAME] \
        --out scripts/results/adapters/own-tests.csv

Each CHECKOUT is a clone of the library's repository, at or near the installed version. If the tests can't be imported
with the installed version, add CHECKOUT/src to PYTHONPATH. Every test file runs once with unmodified (stock) models,
and once with models that host_plugin.py adapts after construction. A test that passes with stock models but not with
adapted models counts as worse. If any test is worse, the script lists the worse tests and exits with status 1. Slow
tests, and tests that need missing hardware or packages, are skipped as in the libraries' own runs. Set ``RUN_SLOW=1``
to run the slow tests.

The tests need ``pip install pytest parameterized peft httpx datasets``.
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
from pathlib import Path
from typing import Annotated, Any

import typer

from .common.folder import ROOT

DIFFUSERS = "tests/models/transformers/test_models_transformer_{}.py"
TRANSFORMERS = "tests/models/{0}/test_modeling_{0}.py"
DIFFUSERS_MODELS = (
    "flux", "flux2", "chroma", "qwenimage", "wan", "wan_animate", "wan_vace", "skyreels_v2", "chronoedit", "ltx",
    "ltx2", "hunyuan_video", "hunyuan_1_5", "cogvideox", "cogview4", "mochi", "lumina2", "z_image", "bria",
    "longcat_image", "ovis_image",
)  # fmt: skip
TESTS = {
    "diffusers": (DIFFUSERS, DIFFUSERS_MODELS),
    "transformers": (TRANSFORMERS, ("llama", "qwen3", "qwen3_vl", "gemma3")),
}
PLUGIN = "lrpe_md.scripts.host_plugin"
TIMEOUT = 600
app = typer.Typer(add_completion=False)


class HostTestsError(typer.BadParameter):
    """Error for invalid options, or for a test file that ran no tests."""


@dataclass
class Run:
    """Test outcomes, tests that built adapted models, reasons for not adapting models, and library versions."""

    outcomes: dict[str, str] = field(default_factory=dict)
    adapted: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Row:
    """Results of one test file."""

    library: str
    installed: str  # version that the tests imported
    tests: str  # version of the checkout
    model: str
    file: str
    passed_stock: int
    passed_adapted: int
    of_adapted_models: int  # number of tests in passed_adapted that built an adapted model
    failed_both: int
    worse: str  # test names, separated by spaces


def run_tests(checkout: Path, file: str, adapt: bool) -> Run:
    """Run one test file in a subprocess.

    Raises:
        HostTestsError: if no test ran.
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
                typer.echo(f"{file}: stopped after {TIMEOUT} s", err=True)
        if not outcomes.is_file():
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            typer.echo(tail, err=True)
            raise HostTestsError(
                f"{checkout / file}: expected at least one test to run, got none; see pytest's output above"
            )
        return read_run(outcomes)


def read_run(file: Path) -> Run:
    run = Run()
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        run.outcomes[line["test"]] = line["outcome"]
        run.refused |= line["refused"]
        run.versions |= line["versions"]
        if line["adapted"]:
            run.adapted.add(line["test"])
    return run


def find_worse(stock: Run, adapted: Run) -> list[str]:
    """Return the tests that pass with stock models, but fail, are skipped or never finish with adapted models."""
    passed = [test for test, outcome in stock.outcomes.items() if outcome == "passed"]
    return [test for test in passed if adapted.outcomes.get(test) != "passed"]


def compare(stock: Run, adapted: Run) -> dict[str, Any]:
    """Return the counts for a :class:`Row`, and the names of the tests that are worse."""
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
    """Return the version in a checkout's setup.py, or "unknown"."""
    setup = checkout / "setup.py"
    found = re.search(r'version="([^"]+)"', setup.read_text(encoding="utf-8")) if setup.is_file() else None
    return found[1] if found else "unknown"


def write_rows(out: Path, rows: list[Row]) -> None:
    """Add new rows to the CSV, and keep its rows for other models."""
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
    out: Annotated[Path, typer.Option(help="CSV to update; rows of other models are kept.")],
    diffusers: Annotated[Path | None, typer.Option(help="Path to a diffusers checkout.", exists=True)] = None,
    transformers: Annotated[Path | None, typer.Option(help="Path to a transformers checkout.", exists=True)] = None,
    only: Annotated[str | None, typer.Option(help="Run only this model, such as flux or llama.")] = None,
    tests: Annotated[str | None, typer.Option(help="Version to record. (default: the one in setup.py)")] = None,
) -> None:
    """Run diffusers' and transformers' model tests with stock and with adapted models."""
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
        raise HostTestsError(
            "expected --diffusers or --transformers with a checkout that contains tests for the chosen model"
        )
    worse: list[str] = []
    for library, checkout, model in jobs:
        path = TESTS[library][0].format(model)
        stock, adapted = (run_tests(checkout, path, adapt) for adapt in (False, True))
        installed = stock.versions.get(library, "unknown")
        row = Row(library, installed, tests or read_version(checkout), model, path, **compare(stock, adapted))
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
