"""The console command, and the same programs as modules of a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lrpe_md.scripts import cli

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "typer", "accelerate", "pandas", "joblib", "torchmetrics", "sklearn", "matplotlib", "rich", "timm", "scipy",
)  # fmt: skip
USERS = {
    "typer": list(cli.PROGRAMS),
    "rich": ["train", "ablate", "bench"],
    "scipy": ["ablate"],
    "matplotlib": ["visualize"],
}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200", **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", cli.PROGRAMS)
@pytest.mark.parametrize("package", ["scripts", "lrpe_md.scripts"])
def test_programs_are_modules_of_a_checkout(package, name):
    shown = python("-m", f"{package}.{name}", "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"scripts.{name}" in shown.stdout


def test_usage_and_an_unknown_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lrpe-md"])
    cli.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.PROGRAMS)
    monkeypatch.setattr(sys, "argv", ["lrpe-md", "fly"])
    with pytest.raises(SystemExit, match="expected one of train, ablate, bench, visualize, got 'fly'"):
        cli.main()


def test_a_program_gets_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lrpe-md", "train", "digits", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "lrpe-md train digits" in shown
    assert "--weight-decay" in shown


WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from lrpe_md.scripts.cli import run_program
run_program(sys.argv[2], ["--help"])
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_and_what_to_install(package):
    """Importing the command itself needs none of them."""
    for name in USERS.get(package, ["train"]):
        said = python("-c", WITHOUT, package, name)
        assert said.returncode == 1
        assert said.stderr.strip() == (
            f"{name} needs {package}, which is not installed: pip install 'lrpe-md[scripts]'"
        )


def test_our_own_mistakes_are_not_taken_for_missing_packages(monkeypatch):
    def broken(name, package):
        raise ModuleNotFoundError("No module named 'lrpe_md.nothing'", name="lrpe_md.nothing")

    monkeypatch.setattr(cli.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match=r"lrpe_md\.nothing"):
        cli.load_program("train")
