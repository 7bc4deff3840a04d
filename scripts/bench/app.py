"""Run a benchmark or write its report: ``lrpe-md bench COMMAND``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch._functorch.config as functorch
import typer

from . import (
    compare,
    compiled,
    counters,
    decode,
    linear,
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

functorch.donated_buffer = False  # a compiled backward is timed many times
app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Benchmark the operators and whole training steps.",
    epilog="Example: lrpe-md bench my-shapes --heads 24 --grid 21x45x80 --head-dim 128",
)  # fmt: skip


class Command(NamedTuple):
    """A benchmark, the panel of the help that lists it, and the arguments of its example."""

    run: Callable[..., Any]
    panel: str
    example: str


YOURS, OPERATORS, STEPS, MAINTENANCE = "Your GPU and sizes", "Operators", "Training steps", "Kernels and results"
COMMANDS = {
    "my-shapes": Command(my_shapes.main, YOURS, "--batch 8 --heads 24 --grid 21x45x80 --head-dim 128"),
    "operators": Command(operators.main, OPERATORS, "--workload video --peers lrpe-md"),
    "linear": Command(linear.main, OPERATORS, "--workload vit224 --map cosine"),
    "norm": Command(norm.main, OPERATORS, "--workload wan --over heads"),
    "tables": Command(tables.main, OPERATORS, "--workload wan"),
    "decode": Command(decode.main, OPERATORS, "--workload decode-1"),
    "compiled": Command(compiled.main, OPERATORS, "--map rotate"),
    "training": Command(training.main, STEPS, "--models vit_b --modes compiled"),
    "train-loop": Command(train_loop.main, STEPS, "--model B/2"),
    "linear-scaling": Command(linear_scaling.main, STEPS, "--backbones vit --tokens 4096,65536"),
    "tune": Command(tune.main, MAINTENANCE, '--only "rotate forward"'),
    "counters": Command(counters.main, MAINTENANCE, "--out counters.csv"),
    "compare": Command(compare.main, MAINTENANCE, "HEAD~10 HEAD"),
    "report": Command(report.main, MAINTENANCE, ""),
}
for name, command in COMMANDS.items():
    example = f"Example: lrpe-md bench {name} {command.example}".rstrip()
    app.command(name, rich_help_panel=command.panel, epilog=example)(command.run)
