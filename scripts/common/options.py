"""Validation of option values."""

from __future__ import annotations

import copy
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from lrpe_md.checks import find_similar

__all__ = [
    "LIMIT",
    "OUT",
    "SEEDS",
    "Command",
    "choose",
    "describe_command",
    "finite",
    "group_options",
    "in_shell_terms",
    "positive",
    "warn_of_smoke",
]

F = TypeVar("F", bound=Callable[..., Any])
SEEDS = 2**32  # NumPy's seeds are 0 to SEEDS - 1


class Command(TyperCommand):
    """Command that rejects a repeated option unless the option accepts several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            typer.BadParameter: for a repeated option, because click would ignore all but the last value.
        """
        order: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        single = [each for each in order if each.param_type_name == "option" and not (each.multiple or each.is_flag)]
        for option in single:
            if (number := single.count(option)) > 1:
                name = max(option.opts, key=len)
                raise typer.BadParameter(f"{name}: expected one value, got {number}; pass {name} once", ctx=ctx)
        return super().parse_args(ctx, args)


def positive(value: float | None) -> float | None:
    """Reject values that are not positive, but allow infinity."""
    if value is not None and not value > 0:
        raise typer.BadParameter(f"expected a positive number, got {value:g}")
    return value


LIMIT: Any = typer.Option(
    callback=positive, help="Time budget in seconds; once it runs out, no new measurement starts."
)
OUT: Any = typer.Option(help="Output CSV; an existing file is replaced.")


def finite(value: float | None) -> float | None:
    """Reject infinity and NaN, which typer's min and max accept."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def choose(option: str, wanted: Iterable[str], known: Iterable[str], advice: str = "") -> list[str]:
    """Return the selected names without duplicates, and reject unknown names.

    ``advice`` is a sentence to add to the error.
    """
    known, names = list(known), list(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            close = find_similar(name, known)
            hint = f"; did you mean {close!r}?" if close else "."
            more = f"{advice} " if advice else ""
            raise typer.BadParameter(f"{option}: unknown {name!r}{hint} {more}Choose from: {'; '.join(known)}")
    return names


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user passed a parameter on the command line."""
    source: Any = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def describe_command(context: typer.Context, leave_out: Collection[str]) -> str:
    """Return the command as the user typed it, omitting the parameters in ``leave_out``."""
    words = context.command_path.split()
    for parameter in context.command.params:
        name: Any = parameter.name
        if name in leave_out or not is_given(context, name):
            continue
        value = context.params[name]
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if parameter.param_type_name == "argument":
                words.append(str(each))
            elif isinstance(each, bool):
                words.append((parameter.opts if each else parameter.secondary_opts)[0])
            else:
                words += [max(parameter.opts, key=len), str(each)]
    for module in context.obj or []:  # that `lrpe-md --import` has imported
        words += ["--import", module]
    return shlex.join(words)


def warn_of_smoke(context: typer.Context, reason: str, leave_out: Collection[str] = ()) -> None:
    """Warn that the numbers from a run with --smoke are meaningless, and print the command for a real run.

    Args:
        context: context of the command.
        reason: why the numbers are meaningless.
        leave_out: parameters that a real run does not need, in addition to smoke and out.
    """
    command = describe_command(context, {"smoke", "out", *leave_out})
    typer.echo(f"\nThese numbers mean nothing, because with --smoke {reason}. For real ones, run:\n{command}", err=True)


# Patterns in the library's errors, and what to show on a command line instead. They are applied in order.
_SHELL_TERMS = {
    r", got '\w+'; pass Memory\((\w+)='(\w+)'\)": r"; pass \1=\2 in --memory",
    r"memory: expected None without linear attention": "--memory needs linear attention",
    r", got Memory\([^)]*\)": "",
    r", ('\w+') or a function \([^)]*\) -> \w+": r" or \1",
    r"qk_norm: expected True with (.*), got False\. (.*); build the model with qk_norm=True": (
        r"--qk-norm: required with \1. \2"
    ),
    r"^causal: 'frames' needs": "--causal: needs",
    r"with causal=None": "without --causal",
    r"or causal='frames'": "or pass --causal",
    r"or causal=None": "or leave out --causal",
    r"\bcausal='frames'": "--causal",
    r"space_time='(\w+)'": r"--space-time \1",
    r"attention='(\w+)'": r"--attention \1",
    r"use num_axes=3": "train on videos",
    r"encoding_kwargs=\{'(\w+)': \.\.\.\}": r"--encoding NAME:\1=...",
    r"share with .*?(\w+)= in (?:the encoding_kwargs of a model|lrpe_md\.preset or encoding_kwargs)": (
        r"share with --encoding NAME:\1=..."
    ),
    r"\bexpected None\b": "must be left out",
    r"(number),? or None\b": r"\1",
    r"\(('[^']*'(?:, '[^']*')*),?\)": r"\1",
    r"(?<!got )'([^'\s]+)'": r"\1",
    r"\b(None|True|False)\b": lambda found: found[0].lower(),
}


def in_shell_terms(text: Any, separator: str = ",") -> str:
    """Reword a library error for the command line: name options instead of arguments, and show values as typed.

    ``separator`` separates the numbers of a tuple.
    """
    text = str(text)
    for pattern, replacement in _SHELL_TERMS.items():
        text = re.sub(pattern, replacement, text)
    numbers = r"\((-?[\d.]+(?:,|(?:, -?[\d.]+)+))\)"  # a tuple
    return re.sub(numbers, lambda found: found[1].rstrip(",").replace(", ", separator), text)


def group_options(panels: Mapping[str, str]) -> Callable[[F], F]:
    """Return a decorator that groups a command's options into panels in its help.

    Args:
        panels: dictionary from each panel's title to the names of the parameters in the panel, separated by spaces.
    """

    def group(command: F) -> F:
        hints = get_type_hints(command, include_extras=True)
        for title, names in panels.items():
            for name in names.split():
                kind, option = get_args(hints[name])
                option = copy.copy(option)  # some options are shared between commands
                option.rich_help_panel = title
                hints[name] = Annotated[kind, option]
        command.__annotations__ = hints
        return command

    return group
