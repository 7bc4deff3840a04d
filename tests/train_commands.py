"""Run ``lrpe-md train`` in this process, as a command line."""

from collections.abc import Mapping
from typing import Any

from lrpe_md.scripts.train.app import app
from typer.testing import CliRunner, Result

__all__ = ["flags", "invoke", "output_of"]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Convert options to command-line arguments."""
    given = []
    for name, value in options.items():
        option = name.replace("_", "-")
        given += (
            [f"--{option if value else f'no-{option}'}"] if isinstance(value, bool) else [f"--{option}", str(value)]
        )
    return given


def invoke(*arguments: Any) -> Result:
    """Run a command; its output is wide and has no colours."""
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "400", "NO_COLOR": "1"})


def output_of(*arguments: Any, code: int = 2) -> str:
    """Return the output of a command, which must end with this code; 2 is a refused option."""
    done = invoke(*arguments)
    assert done.exit_code == code, done.output
    return done.output
