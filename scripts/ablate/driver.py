"""Which positional encoding? The image, video or diffusion training with each of them, at sizes that it never saw.

    python -m scripts.ablate run image FASHION_MNIST --out runs/ablate-image                encodings × 3 seeds, one GPU
    CUDA_VISIBLE_DEVICES=1 python -m scripts.ablate run image FASHION_MNIST --out runs/ablate-image --shard 1/4
    python -m scripts.ablate run video bbb.mp4 vtest.avi --out runs/ablate-video
    python -m scripts.ablate run diffusion emoji64.zip --set without=variation -e rotate -e cosine --attention linear
    python -m scripts.ablate report runs/ablate-image --baseline rotate

Data as for the train scripts, --set for any of their options. A training is on the disk as soon as it ends; the same
command goes on after a stop, from the last checkpoint. The report is results.csv, table.md and sizes.png: mean and
spread over the seeds, paired differences to a baseline, parameters, time and memory. --smoke is a tiny one of
everything, for a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..common.devices import choose_device
from ..common.folder import missing, open_folder, parse_shard, write
from ..common.markdown import fill
from ..common.options import choose
from ..common.provenance import environment
from .report import committed, markers, section, write_report
from .tasks import TASKS, Comparison, overrides, train


def run(
    task: Annotated[str, typer.Argument(help=f"One of: {', '.join(TASKS)}.")],
    data: Annotated[list[Path], typer.Argument(help="The script's --data; for video one or more.")],
    out: Annotated[Path | None, typer.Option(help="Folder; an unfinished one goes on. [runs/ablate-TASK]")] = None,
    encoding: Annotated[list[str] | None, typer.Option("--encoding", "-e", help="Only this; may be repeated.")] = None,
    attention: Annotated[list[str] | None, typer.Option(help="Only softmax or only linear; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each, seeds 0, 1, ..")] = 3,
    given: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the training; repeatable.")] = None,
    shard: Annotated[str, typer.Option(help="i/n: this process runs every n-th training, from the i-th on.")] = "0/1",
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model, 2 steps.")] = False,
    baseline: Annotated[str, typer.Option(help="The encoding that others are compared with in the report.")] = "rotate",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
) -> None:  # fmt: skip
    """Train what is missing of encodings × seeds on a task; the last process to end reports."""
    chosen, share = TASKS[choose("TASK", [task], TASKS)[0]], parse_shard(shard)
    training = {**chosen.defaults, **(chosen.smoke if smoke else {}), **overrides(chosen.config, given or [])}
    kinds = choose("--attention", attention or chosen.compared, chosen.compared)
    named = choose("--encoding", encoding or [], chosen.encodings)
    comparison = Comparison(
        task=task, encodings={kind: named or list(chosen.compared[kind]) for kind in kinds}, seeds=seeds, data=data,
        training=training, device=choose_device(device).type,
    )  # fmt: skip
    for path in data:
        if not path.exists():
            raise typer.BadParameter(f"DATA {path}: there is no such file or folder")
    out = out or Path("runs") / f"ablate-{task}"
    open_folder(out, comparison.settings, environment(comparison.device, "torch", "timm", "accelerate"))
    console, todo = Console(soft_wrap=True, highlight=False), comparison.jobs(out)
    mine = missing(todo, share)
    console.print(f"{out}: {comparison.device}, {len(mine)} of {len(todo)} trainings to do here")
    for i, (file, job) in enumerate(mine.items(), 1):
        try:
            result = train(comparison, file, *job)
        except KeyboardInterrupt:
            console.print("Interrupted; the same command goes on from the last checkpoint.")
            raise typer.Exit(130) from None
        value = next(iter(result["values"]["extrapolated"].values()))
        console.print(
            f"{i}/{len(mine)} {job[0]:<24}{job[1]:<10}seed {job[2]}   {chosen.measure} {value:.4g}   "
            f"{result['train_seconds']:.1f} s"
        )
    if all(file.exists() for file in todo):
        write_report(out, baseline)
    else:
        console.print("Others are still to come; `report` shows what there is.")


def report(
    folder: Annotated[Path | None, typer.Argument(help="Of `run`. [those of scripts/results]")] = None,
    baseline: Annotated[str, typer.Option(help="The encoding that others are compared with.")] = "rotate",
    readme: Annotated[Path | None, typer.Option(help="Fill in the sections of this file.")] = None,
) -> None:
    """results.csv of the runs that have ended, table.md and sizes.png; and the README's sections."""
    for each in [folder] if folder else [path for path in map(committed, TASKS) if path.exists()]:
        write_report(each, baseline)
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        for task in TASKS:
            text = fill(text, *markers(task), section(task, committed(task)))
        write(readme, text)
        print(f"{readme}: the sections of {', '.join(TASKS)}")
