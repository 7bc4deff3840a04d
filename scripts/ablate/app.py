"""Which positional encoding? The same training with each of them, tested at sizes or lengths that it never saw.

    make ablate                                                            digits, from a fresh checkout
    python -m scripts.ablate run digits                                    8 encodings × softmax and linear attention ×
                                                                           3 seeds, 5 minutes on two CPU cores
    python -m scripts.ablate run digits -e rotate -e dinov3 -e rotate:base=10000         presets, options of encodings
    python -m scripts.ablate run digits --full                             15 encodings, 5 seeds, 100 epochs: an hour
    python -m scripts.ablate run image FASHION_MNIST --out runs/ablate-image                encodings × 3 seeds, one GPU
    CUDA_VISIBLE_DEVICES=1 python -m scripts.ablate run image FASHION_MNIST --out runs/ablate-image --shard 1/4
    python -m scripts.ablate run video bbb.mp4 vtest.avi --out runs/ablate-video
    python -m scripts.ablate run diffusion emoji64.zip --set without=variation -e rotate -e cosine --attention linear
    python -m scripts.ablate run diffusion emoji64.zip --set seconds=10 --set size=64 -e softmax/rotate -e linear/rotate
    python -m scripts.ablate run lm TEXT                                   text, evaluated far beyond the trained length
    python -m scripts.ablate report image --folder runs/ablate-image --baseline rotate

Data as for the trainings, --set for any of their options. A training is on the disk as soon as it ends; the same
command goes on after a stop, from the last checkpoint. The report is results.csv, table.md and plots: mean and spread
over the seeds, paired differences to a baseline, parameters, time and memory. --smoke is a tiny one of everything, for
a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import joblib
import typer
from rich.console import Console

from lrpe_md.presets.registry import REGISTERED

from ..common.devices import choose_device, turn_of
from ..common.folder import missing, open_folder, parse_shard
from ..common.markdown import PAGES
from ..common.options import choose
from ..common.provenance import environment
from .report import folders, task_of, write_pages, write_report
from .tasks import TASKS, Comparison, Task, overrides, train

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(
    task: Annotated[str, typer.Argument(help=f"One of: {', '.join(TASKS)}.")],
    data: Annotated[list[str] | None, typer.Argument(help="The training's --data; for video one or more.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; an unfinished one goes on. [runs/ablate-TASK]")] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option(
            "--encoding", "-e",
            help="Compare this encoding: NAME or NAME:KEY=VALUE,.. as in `train`, or ATTENTION/NAME. Repeatable.",
        ),
    ] = None,
    attention: Annotated[list[str] | None, typer.Option(help="Only softmax or only linear; may be repeated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Trainings of each, seeds 0, 1, .. [3; full: 5]")] = None,
    given: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the training; repeatable.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Digits: more encodings and seeds, longer trainings.")] = False,
    shard: Annotated[str, typer.Option(help="i/n: this process runs every n-th training, from the i-th on.")] = "0/1",
    workers: Annotated[int | None, typer.Option(min=1, help="At a time, in turns if timed. [1; CPU: cores]")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model, a few steps.")] = False,
    baseline: Annotated[str, typer.Option(help="The encoding that others are compared with in the report.")] = "rotate",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
) -> None:  # fmt: skip
    """Train what is missing of encodings × seeds on a task; the last process to end reports."""
    chosen, share = TASKS[choose("TASK", [task], TASKS)[0]], parse_shard(shard)
    if full and chosen.full is None:
        raise typer.BadParameter(f"--full: {task} has no longer comparison; use -e, --seeds and --set")
    where = choose_device(device).type
    comparison = Comparison(
        task=task, encodings=compared(chosen, encoding, attention, full),
        seeds=seeds or (chosen.full.seeds if full and chosen.full else 3), data=check_data(task, chosen, data),
        training=training_of(chosen, given, where, full, smoke), device=where,
    )  # fmt: skip
    out = out or Path("runs") / f"ablate-{task}"
    todo = comparison.jobs(out)
    for job in todo.values():  # each encoding is tried on the model before the first is trained
        comparison.config(out, *job)
    timed = comparison.training.get("seconds", 0)
    workers = workers or (joblib.cpu_count() if where == "cpu" and not timed else 1)
    here = environment(where, "torch", "timm", "accelerate", "scikit-learn")
    open_folder(out, comparison.settings, here)
    console, mine = Console(soft_wrap=True, highlight=False), missing(todo, share)
    workers = min(workers, max(len(mine), 1))
    turn = turn_of(where) if timed else None
    console.print(f"{out}: {where}, {len(mine)} of {len(todo)} trainings to do here, {workers} at a time")
    try:
        for i, result in enumerate(train_all(comparison, mine, workers, turn), 1):
            value = next(iter(next(iter(result["values"].values())).values()))
            console.print(
                f"{i}/{len(mine)} {result['encoding']:<24}{result['attention']:<10}seed {result['seed']}   "
                f"{chosen.measure} {value:.4g}   {result['train_seconds']:.1f} s"
            )
    except KeyboardInterrupt:
        console.print(
            "Interrupted; finished trainings are kept. The same command goes on from the last checkpoint, with "
            f"--out {out}"
        )
        raise typer.Exit(130) from None
    if all(file.exists() for file in todo):
        write_report(out, baseline)
    else:
        console.print("Others are still to come; `report` shows what there is.")


def compared(task: Task, encoding: list[str] | None, attention: list[str] | None, full: bool) -> dict[str, list[str]]:
    """Encodings by attention."""
    known = task.config.backbone.attentions
    pairs = [each.rpartition("/") for each in encoding or []]
    choose("--encoding", [kind for kind, slash, _ in pairs if slash], known)
    for *_, name in pairs:
        task.config.backbone.find(name)
    alone = pairs and all(slash for _, slash, _ in pairs)
    kinds = choose("--attention", attention or ([kind for kind, *_ in pairs] if alone else task.compared), known)
    if not pairs:
        everything = list(task.full.encodings) if full and task.full else []
        return {kind: everything or list(task.compared.get(kind, task.encodings)) for kind in kinds}
    named = {kind: [name for of, _, name in pairs if of in ("", kind)] for kind in kinds}
    return {kind: list(dict.fromkeys(names)) for kind, names in named.items() if names}


def training_of(task: Task, given: list[str] | None, device: str, full: bool, smoke: bool) -> dict[str, Any]:
    """Fields of the training's configuration."""
    longer = task.full.training if full and task.full else {}
    fast, tiny = task.on_gpu if device == "cuda" else {}, task.smoke if smoke else {}
    return {**task.defaults, **fast, **longer, **tiny, **overrides(task.config, given or [])}


def check_data(name: str, task: Task, data: list[str] | None) -> list[str]:
    """What the trainings take as --data."""
    found = data or list(task.data)
    if not found:
        raise typer.BadParameter(f"DATA: expected the data of {name}, see `train {name} --help`, got none")
    for path in found if task.data_is_path else ():
        if not Path(path).exists():
            raise typer.BadParameter(f"DATA {path}: there is no such file or folder")
    return found


def train_all(
    comparison: Comparison, jobs: dict[Path, tuple[str, str, int]], workers: int, turn: Path | None
) -> Iterator[dict[str, Any]]:
    """Results, as soon as each is on the disk."""
    pool: Any = joblib.Parallel(n_jobs=workers, return_as="generator_unordered")
    schemes = {} if workers == 1 else dict(REGISTERED)
    yield from pool(
        joblib.delayed(train)(comparison, file, job, workers == 1, turn, schemes) for file, job in jobs.items()
    )


@app.command()
def report(
    task: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(TASKS)}. [all]")] = None,
    folder: Annotated[Path | None, typer.Option(help="Of `run`, of one task. [those of scripts/results]")] = None,
    baseline: Annotated[str, typer.Option(help="The encoding that others are compared with.")] = "rotate",
    pages: Annotated[Path, typer.Option(help="Without --folder: where the pages go.")] = PAGES,
) -> None:
    """results.csv of the runs that have ended, table.md and plots; without a folder the pages of the documentation."""
    names = choose("TASK", task or TASKS, TASKS)
    if folder is not None and len(task or ()) > 1:
        raise typer.BadParameter(f"--folder: holds one task, got {', '.join(names)}")
    for each in [folder] if folder else [path for path in folders() if task_of(path) in names]:
        write_report(each, baseline)
    if folder is None:
        write_pages(pages)
