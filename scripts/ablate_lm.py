"""Which encoding for text? The same language model, trained with each at one length and evaluated far beyond it.

    python -m scripts.ablate_lm run TEXT --out runs/ablate-lm                  7 encodings × 3 seeds on one GPU
    CUDA_VISIBLE_DEVICES=1 python -m scripts.ablate_lm run TEXT --out runs/ablate-lm --shard 1/4       a quarter of it
    python -m scripts.ablate_lm report runs/ablate-lm                          results.csv, table.md, lengths.png

TEXT as for ``scripts.train_lm``. A training is on the disk as soon as it ends, and the same command goes on after a
stop. --smoke is a tiny one of everything, for a CPU. 9.5 million parameters, 1,000 steps of 64 × 512 bytes: about 2e15
floating-point operations a training, under a minute on an H200 that three or four of them share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from lrpe_md.models.lm import LmConfig
from rich.console import Console

from .common import choose, choose_device, fill, table
from .folder import ROOT, environment, from_root, in_words, missing, open_folder, parse_shard, write
from .lm_data import Text, check_lengths, load_text
from .plots import OKABE_ITO, STYLE, plt
from .train_lm import ENCODINGS, EVAL_BYTES, LENGTHS, SCALINGS, SIZES, Config, fit, measure

SCALED = {"rotate": list(SCALINGS)}  # evaluated with these, too
TRAINING = {"length": 512, "batch": 64, "steps": 1000, "warmup": 100, "lr": 1e-3}
SMOKE = {"length": 16, "batch": 4, "steps": 4, "warmup": 1, "lr": 5e-3}
SMOKE_LENGTHS = (16, 32, 64)
BEGIN, END = "<!-- lm:begin -->", "<!-- lm:end -->"
RESULTS = ROOT / "scripts" / "results" / "ablate-lm"


@dataclass(frozen=True)
class Settings:
    """All that decides a result; a folder holds runs of one Settings."""

    text: str
    encodings: dict[str, dict[str, Any]]
    scaled: dict[str, list[str]]
    seeds: int
    lengths: tuple[int, ...]
    limit: int
    model: dict[str, Any]
    training: dict[str, Any]
    device: str
    precision: str


# --- runs ------------------------------------------------------------------------------------------------------------


def jobs(out: Path, settings: Settings) -> dict[Path, tuple[str, int]]:
    """Each run's file, its encoding and its seed: all encodings of one seed after the other."""
    return {
        out / "runs" / f"{name}-{seed}.json": (name, seed)
        for seed in range(settings.seeds)
        for name in settings.encodings
    }


def run_one(name: str, seed: int, settings: Settings, text: Text, progress: bool = False) -> dict[str, Any]:
    """One training and its evaluations."""
    config = Config(
        text=settings.text, model=LmConfig(**settings.model, **settings.encodings[name]), seed=seed,
        device=settings.device, precision=settings.precision, **settings.training,
    )  # fmt: skip
    start = time.perf_counter()
    accelerator, model, history = fit(
        config, text, every=max(config.steps // 4, 1), limit=settings.limit, progress=progress
    )
    seconds, rows = time.perf_counter() - start, []
    for scaling in (None, *settings.scaled.get(name, ())):
        found = measure(
            accelerator, model, text.validation, config.length, settings.lengths, scaling, settings.limit
        )  # fmt: skip
        rows += [{"scaling": scaling or "none", **row} for row in found]
    return {
        "encoding": name, "seed": seed, "params": sum(p.numel() for p in model.parameters()),
        "train_seconds": round(seconds, 1), "history": history, "rows": rows,
    }  # fmt: skip


def collect(files: Iterable[Path]) -> pd.DataFrame:
    """A row for each encoding, scaling, seed, length, and first and last position."""
    rows = []
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        same = {key: run[key] for key in ("encoding", "seed", "params", "train_seconds")}
        rows += [{**same, **row} for row in run["rows"]]
    return pd.DataFrame(rows)


# --- what is shown ---------------------------------------------------------------------------------------------------


def names(results: pd.DataFrame) -> Any:
    """rotate, rotate + yarn, .."""
    scaled = results.scaling != "none"
    return results.encoding + (" + " + results.scaling).where(scaled, "")


def spread(results: Any, key: str) -> Any:
    """Mean and standard deviation over the seeds, for each name and value of the key."""
    return results.groupby(["name", key])["bits_per_byte"].agg(["mean", "std"]).fillna(0)


def ranking(results: Any) -> list[str]:
    """Best at the longest length first."""
    longest = results[(results["first"] == 0) & (results["last"] == results.length.max())]
    return list(longest.groupby("name")["bits_per_byte"].mean().sort_values(kind="stable").index)


def markdown(results: pd.DataFrame, config: dict[str, Any]) -> str:
    settings = config["settings"]
    trained, seeds = settings["training"]["length"], settings["seeds"]
    results = results.assign(name=names(results))
    whole: Any = results[(results["first"] == 0) & (results["last"] == results.length)]
    stats, fixed = spread(whole, "length"), whole.drop_duplicates("name").set_index("name")
    lengths = sorted(whole.length.unique())
    scheme = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    cell = "{:.3f} ± {:.3f}" if seeds > 1 else "{:.3f}"
    seconds = results.drop_duplicates(["encoding", "seed"]).train_seconds
    lines = [
        f"Bits per byte of held-out text, {scheme}, best at the longest length first. Trained at length {trained} for "
        f"{settings['training']['steps']:,} steps of {settings['training']['batch']} windows, evaluated at each length "
        f"on the same {settings['limit']:,} bytes; + linear, ntk, yarn: stretched by length / {trained} at evaluation, "
        "without training.",
        "",
    ]
    rows = [
        [name, f"{fixed.params[name]:,}", *(cell.format(*stats.loc[(name, n)]) for n in lengths)]
        for name in ranking(results)
    ]
    lines += table(["encoding", "parameters", *(f"{n:,}" for n in lengths)], rows)
    lines += [f"{in_words(config['environments'])}; {seconds.min():.0f} to {seconds.max():.0f} s a training."]
    return "\n".join(lines) + "\n"


def plot(results: pd.DataFrame, trained: int, path: Path) -> None:
    """Bits per byte by length, and by position at the longest length: mean and standard deviation."""
    results = results.assign(name=names(results))
    longest = results.length.max()
    whole = (results["first"] == 0) & (results["last"] == results.length)
    parts: Any = results[(results.length == longest) & ~whole]
    colours = [c for name, c in OKABE_ITO.items() if name != "grey"]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.4), sharey=True, layout="constrained")
        position = f"up to this position, from the one before; length {longest:,}"
        panels = (("length", results[whole], "length"), ("last", parts, position))
        for axis, (key, rows, label) in zip(axes, panels, strict=True):
            stats = spread(rows, key)
            for i, name in enumerate(ranking(results)):
                line = stats.loc[name]
                axis.errorbar(
                    line.index, line["mean"], yerr=line["std"], label=name, capsize=2, elinewidth=0.8, markersize=4,
                    color=colours[i % len(colours)], marker="osD^vPX"[i % 7], linestyle="-" if i < 7 else "--",
                )  # fmt: skip
            axis.axvline(trained, color="black", linestyle=":", linewidth=1)
            ticks = sorted(set(rows[key]))
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{n:,}" for n in ticks])
            axis.set_xlabel(label)
        axes[0].set_yscale("log")  # what lies close together matters, not how far the worst breaks down
        low, high = axes[0].get_ylim()
        shown = [n for n in (1, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16) if low <= n <= high]
        axes[0].set_yticks(shown, [f"{n:g}" for n in shown])
        axes[0].minorticks_off()
        axes[0].set_ylabel(f"bits per byte (dotted: the trained length, {trained})")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def section(folder: Path) -> str:
    """What the README shows of a folder with results.csv and config.json."""
    if not (folder / "results.csv").exists():
        return "(No results yet: `python -m scripts.ablate_lm run TEXT`, then `report`.)\n"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = markdown(pd.read_csv(folder / "results.csv"), config)
    return f"![Bits per byte by length and by position]({from_root(folder)}/lengths.png)\n\n{text}"


# --- command line ----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(
    text: Annotated[Path, typer.Argument(help="A text file, or a folder of .txt and .md files.")],
    out: Annotated[Path, typer.Option(help="Folder; one that is not finished goes on.")] = Path("runs/ablate-lm"),
    encoding: Annotated[list[str] | None, typer.Option("--encoding", "-e", help="Only this; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each, seeds 0, 1, ..")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Of each training. [2000]")] = None,
    shard: Annotated[str, typer.Option(help="i/n: this process runs every n-th training, from the i-th on.")] = "0/1",
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model, 4 steps, short lengths.")] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto (bf16 on a GPU), no (float32), bf16 or fp16.")] = "auto",
) -> None:  # fmt: skip
    """Train what is missing; the last process to end reports."""
    choose("--precision", [precision], ("auto", "no", "bf16", "fp16"))
    share = parse_shard(shard)
    kind, data = choose_device(device).type, load_text(text)
    training = dict(SMOKE if smoke else TRAINING)
    if steps is not None:
        training |= {"steps": steps, "warmup": min(int(training["warmup"]), steps // 10)}
    settings = Settings(
        text=data.digest,
        encodings={name: ENCODINGS[name] for name in choose("--encoding", encoding or ENCODINGS, ENCODINGS)},
        scaled=SCALED, seeds=seeds, lengths=SMOKE_LENGTHS if smoke else LENGTHS, limit=512 if smoke else EVAL_BYTES,
        model=SIZES["tiny" if smoke else "small"], training=training, device=kind,
        precision=("bf16" if kind == "cuda" else "no") if precision == "auto" else precision,
    )  # fmt: skip
    check_lengths(data, int(training["length"]), settings.lengths)
    open_folder(out, asdict(settings), environment(kind, "torch", "timm", "accelerate"))
    console, todo = Console(soft_wrap=True, highlight=False), jobs(out, settings)
    mine = missing(todo, share)
    console.print(f"{out}: {kind}, {len(mine)} of {len(todo)} trainings to do here")
    for i, (file, (name, seed)) in enumerate(mine.items(), 1):
        result = run_one(name, seed, settings, data, console.is_terminal)
        write(file, json.dumps(result))
        end = [row["bits_per_byte"] for row in result["rows"] if row["first"] == 0 and row["last"] == row["length"]]
        console.print(
            f"{i}/{len(mine)} {name:<24}seed {seed}   {end[0]:.3f} bits per byte at {settings.lengths[0]}   "
            f"{result['train_seconds']:.1f} s"
        )
        torch.cuda.empty_cache()
    if all(file.exists() for file in todo):
        report(out)
    else:
        console.print("Others are still to come; `report` shows what there is.")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Of runs, or with a results.csv.")] = RESULTS,
    readme: Annotated[Path | None, typer.Option(help="Fill in the section of this file.")] = None,
) -> None:
    """results.csv of the runs that have ended, table.md and lengths.png; and the README's section."""
    files = sorted(folder.glob("runs/*.json"))
    if files:
        write(folder / "results.csv", collect(files).to_csv(index=False))
    if (folder / "results.csv").exists():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        results = pd.read_csv(folder / "results.csv")
        text = markdown(results, config)
        write(folder / "table.md", text)
        plot(results, config["settings"]["training"]["length"], folder / "lengths.png")
        print(f"\n{text}")
    elif readme is None:
        raise typer.BadParameter(f"FOLDER: expected runs/*.json or results.csv in {folder}, found neither")
    if readme is not None:
        readme.write_text(fill(readme.read_text(encoding="utf-8"), BEGIN, END, section(folder)), encoding="utf-8")
        print(f"{readme}: the language models' section, from {folder}")


if __name__ == "__main__":
    app()
