"""``python -m scripts.bench operators | linear | norm | training | counters | tune | report``."""

from __future__ import annotations

import typer

from . import counters, linear, norm, operators, report, training, tune

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command("operators")(operators.main)
app.command("linear")(linear.main)
app.command("norm")(norm.main)
app.command("training")(training.main)
app.command("counters")(counters.main)
app.command("tune")(tune.main)
app.command("report")(report.main)
