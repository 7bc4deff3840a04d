"""Run ``lrpe-md train`` commands in this process, and interrupt training runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from lrpe_md.scripts.train.app import app
from typer.testing import CliRunner, Result

__all__ = ["Killed", "die_after", "flags", "invoke", "output_of", "with_options"]


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


def with_options(command: Sequence[Any], *options: Any) -> list[Any]:
    """Return a command with more options, which replace its options of the same name and their values."""
    kept = list(command)
    for name in options:
        if str(name).startswith("--") and name in kept:
            first = kept.index(name)
            del kept[first : first + 2]
    return [*kept, *options]


def invoke(*arguments: Any, columns: int = 400) -> Result:
    """Run a command without colours."""
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def output_of(*arguments: Any, code: int = 2) -> str:
    """Run a command, check its exit code (2 for an invalid option), and return its output."""
    done = invoke(*arguments)
    assert done.exit_code == code, done.output
    return done.output


def die_after(calls: int, function: Callable[..., Any], error: type[BaseException] = Killed) -> Callable[..., Any]:
    """Return a function that forwards a number of calls, and raises ``error`` at the next one."""
    numbers = count(1)

    def dying(*args: Any) -> Any:
        if next(numbers) > calls:
            raise error
        return function(*args)

    return dying
