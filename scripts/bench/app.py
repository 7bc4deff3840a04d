"""The command line of ``lrpe-md bench``, which runs benchmarks and writes their reports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch._functorch.config as functorch
import typer

from ..common.options import Command, is_given, warn_of_smoke
from . import (
    compare,
    compiled,
    counters,
    decode,
    linear,
    linear_counters,
    linear_scaling,
    my_shapes,
    norm,
    operators,
    report,
    tables,
    train_loop,
    training,
    tune,
)

functorch.donated_buffer = False  # a compiled backward pass is timed many times
app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Benchmark the operators and whole training steps.",
    epilog="Example: lrpe-md bench my-shapes --heads 24 --grid 21x45x80 --head-dim 128",
)  # fmt: skip


class Benchmark(NamedTuple):
    """Benchmark, with its panel in --help and the arguments of its example."""

    run: Callable[..., Any]
    panel: str
    example: str


SMOKE = Path("runs/bench-smoke")  # results folder with --smoke
YOURS, OPERATORS, STEPS, MAINTENANCE = "Your GPU and sizes", "Operators", "Training steps", "Kernels and results"
COMMANDS = {
    "my-shapes": Benchmark(my_shapes.main, YOURS, "--batch 8 --heads 24 --grid 21x45x80 --head-dim 128"),
    "operators": Benchmark(operators.main, OPERATORS, "--workload video --peers lrpe-md"),
    "linear": Benchmark(linear.main, OPERATORS, "--workload vit224 --map cosine --out runs/linear.csv"),
    "norm": Benchmark(norm.main, OPERATORS, "--workload wan --over heads --out runs/norm.csv"),
    "tables": Benchmark(tables.main, OPERATORS, "--workload wan --out runs/tables.csv"),
    "decode": Benchmark(decode.main, OPERATORS, "--workload decode-1 --out runs/decode.csv"),
    "compiled": Benchmark(compiled.main, OPERATORS, "--map rotate --out runs/compiled.csv"),
    "training": Benchmark(training.main, STEPS, "--models vit_b --modes compiled"),
    "train-loop": Benchmark(train_loop.main, STEPS, "--model B/2 --out runs/train-loop.csv"),
    "linear-scaling": Benchmark(
        linear_scaling.main, STEPS, "--backbones vit --tokens 4096,65536 --out runs/linear-scaling.csv"
    ),
    "tune": Benchmark(tune.main, MAINTENANCE, '--only "rotate forward"'),
    "counters": Benchmark(counters.main, MAINTENANCE, "--out runs/counters.csv"),
    "linear-counters": Benchmark(
        linear_counters.main, MAINTENANCE, "--workload width72 --map rotate --out runs/counters-linear.csv"
    ),
    "compare": Benchmark(compare.main, MAINTENANCE, "HEAD~10 HEAD"),
    "report": Benchmark(report.main, MAINTENANCE, ""),
}


def with_smoke(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a benchmark so that --smoke writes to another folder and prints the command for a real run."""
    signature = inspect.signature(run)
    if "smoke" not in signature.parameters:
        return run

    def call(context: typer.Context, **values: Any) -> None:
        if values["smoke"] and not is_given(context, "out"):
            values["out"] = SMOKE / f"{name}.csv"
        run(**values)
        if values["smoke"]:
            warn_of_smoke(context, "sizes are tiny and calls are few", ("device",))

    hints: dict[str, Any] = {"context": typer.Context, **get_type_hints(run, include_extras=True)}
    own = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    call.__doc__, call.__annotations__ = run.__doc__, hints
    call.__signature__ = inspect.Signature([context, *own])  # pyright: ignore[reportFunctionMemberAccess]
    return call


for name, command in COMMANDS.items():
    example = f"Example: lrpe-md bench {name} {command.example}".rstrip()
    app.command(name, cls=Command, rich_help_panel=command.panel, epilog=example)(with_smoke(name, command.run))
