"""Run ``lrpe-md train`` in this process, as a command line, and stop training in the middle."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from lrpe_md.scripts.train.app import app
from typer.testing import CliRunner, Result

__all__ = ["Killed", "die_after", "flags", "invoke", "output_of"]


class Killed(Exception):
    pass


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


def die_after(calls: int, function: Callable[..., Any], error: type[BaseException] = Killed) -> Callable[..., Any]:
    """Return a function that raises ``error`` instead of a call beyond this number of calls."""
    numbers = count(1)

    def dying(*args: Any) -> Any:
        if next(numbers) > calls:
            raise error
        return function(*args)

    return dying
