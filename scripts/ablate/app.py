"""Compare position encodings: train the same model with each encoding, and test it at unseen sizes or lengths.

    make ablate                                                  digits, from a fresh checkout
    lrpe-md ablate run digits                                    8 encodings × softmax and linear attention ×
                                                                 3 seeds, 5 minutes on two CPU cores
    lrpe-md ablate run digits -e rotate -e dinov3 -e rotate:base=10000         presets, and options of encodings
    lrpe-md ablate run digits --full                             15 encodings, 5 seeds, 100 epochs: an hour
    lrpe-md ablate run image FASHION_MNIST --out runs/ablate-image                encodings × 3 seeds, one GPU
    CUDA_VISIBLE_DEVICES=1 lrpe-md ablate run image FASHION_MNIST --out runs/ablate-image --shard 1/4
    lrpe-md ablate run video bbb.mp4 vtest.avi --out runs/ablate-video
    lrpe-md ablate run diffusion emoji64.zip --set without=variation -e rotate -e cosine --attention linear
    lrpe-md ablate run diffusion emoji64.zip --set seconds=10 --set size=64 -e softmax/rotate -e linear/rotate
    lrpe-md ablate run lm TEXT                                   text, evaluated far beyond the trained length
    lrpe-md ablate run recall                                    memories × positions × 3 seeds, without data
    lrpe-md ablate report image --folder runs/ablate-image --baseline rotate

Pass data as you would to the training commands. Use --set to change any option of those commands. Each result is saved
as soon as its training run ends. After an interruption, run the same command again to resume from the last checkpoint.
The report consists of results.csv, table.md and plots. It shows the mean and standard deviation over the seeds, paired
differences from a baseline, parameters, time and memory. With --smoke, models and data are tiny and run on a CPU.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import joblib
import typer
from rich.console import Console
from typer.core import TyperGroup

from lrpe_md.checks import join_names
from lrpe_md.presets.registry import REGISTERED

from ..common.devices import choose_device, turn_of
from ..common.folder import missing, open_folder, parse_shard, require_checkout, shown
from ..common.markdown import PAGES
from ..common.options import Command, choose, group_options, warn_of_smoke
from ..common.provenance import environment
from ..train.interruption import stop_on_sigterm
from .report import check_task, choose_baseline, folders, task_of, write_pages, write_report
from .tasks import TASKS, Comparison, Task, options_as_set, overrides, record_warnings, train


class Commands(TyperGroup):
    """Command group that explains a missing ``run``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Suggest ``run`` if the user passes a task without a command."""
        if args[0] in TASKS:
            raise typer.BadParameter(f"expected a command before the task, got {args[0]}; try: run {args[0]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True,
    help="Train the same model with each encoding and compare the results.",
    epilog="Example: lrpe-md ablate run digits -e rotate -e sincos --seeds 1",
)  # fmt: skip
PANELS = {
    "What is compared": "encoding attention seeds full baseline", "Training": "assignments smoke device",
    "Process and output": "out shard workers",
}  # fmt: skip
Baseline = Annotated[
    str | None,
    typer.Option(
        help="Baseline of the report: NAME, or ATTENTION/NAME to compare kinds of attention. (default: rotate)"
    ),
]


@app.command(cls=Command, epilog="Example: lrpe-md ablate run image FASHION_MNIST -e rotate -e dinov3 --out runs/image")
@group_options(PANELS)
def run(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help=f"Task, one of: {', '.join(TASKS)}.")],
    data: Annotated[
        list[str] | None, typer.Argument(help="Training data (for video, files or folders).")
    ] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option(
            "--encoding", "-e",
            help="Encoding: NAME, NAME:KEY=VALUE or ATTENTION/NAME; repeatable. NAME can be a "
            "scheme that your module registers (--import MODULE). (default: depends on the task)",
        ),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Kind of attention: softmax, linear, or one kind per layer, such as linear,softmax. For recall: "
            "softmax, add, decay or delta. Repeatable. (default: depends on the task)"
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per encoding, starting from 0. (default: 3, or 5 with --full)")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="For digits and recall: use more encodings and seeds, and train longer.")
    ] = False,
    baseline: Baseline = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="Option to pass to `lrpe-md train TASK`, such as lr=1e-3; repeatable."),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Train tiny models for a few steps.")] = False,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto (cuda if available).")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder; interrupted runs in it are resumed. (default: runs/ablate-TASK[-smoke])"),
    ] = None,
    shard: Annotated[
        str, typer.Option(help="Part of the runs to train, as i/n: every n-th run, starting with run i.")
    ] = "0/1",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of runs to train in parallel. (default: 1, or one per core on a CPU)"),
    ] = None,
) -> None:  # fmt: skip
    """Train each combination of encoding and seed that lacks a result. The last process to finish writes the report."""
    chosen, share = TASKS[choose("TASK", [task], TASKS)[0]], parse_shard(shard)
    if full and chosen.full is None:
        raise typer.BadParameter(f"--full: not available for {task}; use -e, --seeds and --set instead")
    where = choose_device(device).type
    encodings = select_encodings(chosen, encoding, attention, full)
    comparison = Comparison(
        task=task, encodings=encodings, seeds=seeds or (chosen.full.seeds if full and chosen.full else 3),
        data=check_data(task, chosen, data), device=where,
        training=training_fields(chosen, assignments, where, full, smoke, encodings),
    )  # fmt: skip
    out = out or Path("runs") / f"ablate-{task}{'-smoke' if smoke else ''}"
    todo = comparison.jobs(out)
    with options_as_set(chosen), record_warnings() as warned:
        for job in todo.values():  # check that the model supports all encodings before training with the first
            comparison.config(out, *job)
    timed = comparison.training.get("seconds", 0)
    workers = workers or (joblib.cpu_count() if where == "cpu" and not timed else 1)
    open_comparison(out, comparison, baseline)
    console, mine = Console(soft_wrap=True, highlight=False), missing(todo, share)
    workers = min(workers, max(len(mine), 1))
    turn = turn_of(where) if timed else None
    console.print(f"{out}: {where}, {len(mine)} of {len(todo)} runs to train in this process, {workers} in parallel")
    try:
        with options_as_set(chosen), stop_on_sigterm():
            show_results(console, train_all(comparison, mine, workers, turn, warned), len(mine), chosen.measure)
    except KeyboardInterrupt as interrupted:
        console.print(
            "Interrupted. Finished runs are saved; to resume from the last checkpoint, run the same command with "
            f"--out {out}"
        )
        raise typer.Exit(128 + getattr(interrupted, "number", signal.SIGINT)) from None
    report_finished(console, out, baseline, todo)
    if smoke:
        warn_of_smoke(context, "tiny models train for a few steps")


def report_finished(console: Console, out: Path, baseline: str | None, files: Iterable[Path]) -> None:
    """Write the report if every run has finished and saved its result file."""
    if all(file.exists() for file in files):
        write_report(out, baseline)
    else:
        console.print("Other runs are not finished yet; `report` shows the results so far.")


def show_results(console: Console, results: Iterable[dict[str, Any]], total: int, measure: str) -> None:
    """Print a line for each training run when the run ends."""
    for i, result in enumerate(results, 1):
        value = next(iter(next(iter(result["values"].values())).values()))
        console.print(
            f"{i}/{total} {result['encoding']:<23} {result['attention']:<9} seed {result['seed']}   "
            f"{measure} {value:.4g}   {result['train_seconds']:.1f} s"
        )


def open_comparison(out: Path, comparison: Comparison, baseline: str | None) -> None:
    """Check the baseline and write config.json, or extend an existing comparison with the same options."""
    here, whole = environment(comparison.device, "torch", "timm", "accelerate", "scikit-learn"), comparison.merge(out)
    choose_baseline(baseline, whole.pairs)
    open_folder(out, whole.settings, here, extended=("encodings", "seeds", "schemes"))


def select_encodings(
    task: Task, encoding: list[str] | None, attention: list[str] | None, full: bool
) -> dict[str, list[str]]:
    """Return the encodings to compare, for each kind of attention."""
    backbone = task.config.backbone
    pairs = [each.rpartition("/") for each in encoding or []]
    for kind, slash, name in pairs:
        backbone.find(name)
        if slash:
            backbone.split_attention(kind, "--encoding")
        if slash and attention and kind not in attention:
            raise typer.BadParameter(
                f"--encoding {kind}/{name}: expected {join_names(map(repr, attention), 'or')}, as in --attention, "
                f"got {kind!r}; leave out --attention, or add --attention {kind}"
            )
    with_attention = pairs and all(slash for _, slash, _ in pairs)
    compared = task.full.compared if full and task.full else task.compared
    kinds = list(dict.fromkeys(attention or (() if with_attention else compared)))
    for kind in kinds:
        backbone.split_attention(kind)
    if not pairs:
        # Softmax attention supports every encoding that linear attention supports.
        linear = {kind: next((k for k in kind.split(",") if k != "softmax"), kind) for kind in kinds}
        return {kind: list(compared.get(kind) or compared.get(linear[kind], task.encodings)) for kind in kinds}
    named: dict[str, list[str]] = {kind: [] for kind in kinds}
    for kind, _, name in pairs:
        for each in [kind] if kind else kinds:
            named.setdefault(each, []).append(name)
    return {kind: list(dict.fromkeys(names)) for kind, names in named.items() if names}


def training_fields(
    task: Task, assignments: list[str] | None, device: str, full: bool, smoke: bool, attentions: Iterable[str] = ("",)
) -> dict[str, Any]:
    """Return the fields of the training configuration.

    ``attentions`` lists the kinds of attention to compare. With ``smoke``, models are only as deep as these attentions
    require.
    """
    longer = task.full.training if full and task.full else {}
    fast, tiny = task.on_gpu if device == "cuda" else {}, task.smoke if smoke else {}
    layers = max(len(kinds.split(",")) for kinds in attentions)
    tiny = {**tiny, "depth": layers} if "depth" in tiny else tiny
    return {**task.defaults, **fast, **longer, **tiny, **overrides(task.config, assignments or [])}


def check_data(name: str, task: Task, data: list[str] | None) -> list[str]:
    """Validate the DATA arguments and return them."""
    found = data or list(task.data)
    if not found:
        raise typer.BadParameter(f"DATA: expected the data for {name}, got none; see `lrpe-md train {name} --help`")
    for path in found if task.data_is_path else ():
        if not Path(path).exists():
            raise typer.BadParameter(f"DATA: expected an existing file or folder, got {path}")
    return found


def train_all(
    comparison: Comparison, jobs: dict[Path, tuple[str, str, int]], workers: int, turn: Path | None, warned: list[str]
) -> Iterator[dict[str, Any]]:
    """Run all jobs, and yield each result as soon as it is saved. Don't repeat the warnings in ``warned``."""
    pool: Any = joblib.Parallel(n_jobs=workers, return_as="generator_unordered")
    schemes = {} if workers == 1 else dict(REGISTERED)
    yield from pool(
        joblib.delayed(train)(comparison, file, job, workers == 1, turn, schemes, warned) for file, job in jobs.items()
    )


@app.command(cls=Command, epilog="Example: lrpe-md ablate report image --folder runs/image")
def report(
    task: Annotated[
        list[str] | None, typer.Argument(help=f"Tasks to report on: {', '.join(TASKS)}. (default: all)")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Output folder of `run`. (default: report every folder in scripts/results)")
    ] = None,
    baseline: Baseline = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Another output folder of `run` to compare with. Differences are paired by seed."),
    ] = None,
    pages: Annotated[
        Path | None, typer.Option(show_default=shown(PAGES), help="Output folder for the pages (without --folder).")
    ] = None,
) -> None:
    """Write results.csv, table.md and plots for finished runs. Without --folder, write the documentation's pages."""
    names = choose("TASK", task or TASKS, TASKS)
    if folder is None and against is not None:
        raise typer.BadParameter(f"--against {against}: only works with --folder; pass the folder to compare")
    if folder is None:
        require_checkout("--folder")
    if folder is not None and len(task or ()) > 1:
        raise typer.BadParameter(f"--folder: expected at most one task, got {', '.join(names)}")
    if folder is not None and pages is not None:
        raise typer.BadParameter(f"--pages {pages}: can't be used with --folder; leave one of them out")
    if folder is not None and task:
        check_task(folder, names[0])
    for each in [folder] if folder else [path for path in folders() if task_of(path) in names]:
        write_report(each, baseline, against)
    if folder is None:
        write_pages(pages or PAGES)
