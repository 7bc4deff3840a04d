"""Commands that are imported only when they run, so that a program's help is fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Load = Callable[[], Any]  # imports a command and returns its app
T = TypeVar("T")


def import_or_explain(program: str, load: Callable[[], T]) -> T:
    """Return the result of ``load``, or exit with an explanation if a package is missing.

    Raises:
        SystemExit: if a package is not installed. The message says what to install.
    """
    try:
        return load()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lrpe_md"):
            raise
        raise SystemExit(f"{program} needs {package}, which is not installed: pip install 'lrpe-md[scripts]'") from None


def lazy_app(program: str, commands: Mapping[str, tuple[str, Load]], text: str) -> Any:
    """Return a program with the given commands. Each one has a one-line help text and a function that imports it."""
    import typer
    from typer.core import TyperCommand, TyperGroup

    class Lazy(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """Return a placeholder for a command, with its help text for the list of commands."""
            return TyperCommand(cmd_name, help=commands[cmd_name][0]) if cmd_name in commands else None

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """Import the command that the user called."""
            self.commands = {name: self.get_command(ctx, name) for name in commands}  # for suggestions of similar names
            name, found, rest = super().resolve_command(ctx, args)
            if name is not None and name in commands:
                found = typer.main.get_command(import_or_explain(program, commands[name][1]))
                found.name = name
            return name, found, rest

    app = typer.Typer(cls=Lazy, add_completion=False, no_args_is_help=True, help=text)
    app.callback()(_no_options)
    return app


def _no_options() -> None:
    pass
