"""Run a benchmark or write its report: ``python -m scripts.bench COMMAND``."""

from __future__ import annotations

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
    training,
    tune,
)

functorch.donated_buffer = False  # a compiled backward is timed many times
app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command("my-shapes")(my_shapes.main)
app.command("compare")(compare.main)
app.command("operators")(operators.main)
app.command("linear")(linear.main)
app.command("linear-scaling")(linear_scaling.main)
app.command("compiled")(compiled.main)
app.command("norm")(norm.main)
app.command("tables")(tables.main)
app.command("decode")(decode.main)
app.command("training")(training.main)
app.command("counters")(counters.main)
app.command("tune")(tune.main)
app.command("report")(report.main)
