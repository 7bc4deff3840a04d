"""Definitions of the six training tasks of ``ablate``."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import quote

import pandas as pd
import torch
import typer

from lrpe_md import Scheme, register_scheme
from lrpe_md.checks import explain_unknown

from ..cli import reword_warnings
from ..common.folder import read_json, save_whole, write
from ..train.config import Training, settings_of
from ..train.encodings import fingerprint_scheme, split_options
from ..train.tasks import diffusion, digits, image, lm, recall, video
from ..train.weights import EXPORT

Values = dict[str, dict[str, float]]  # values by series (such as positions) and size, training size first
CHOSEN = (
    "out",
    "data",
    "reference",  # results require both kinds of positions
    "encoding",
    "attention",
    "seed",
    "device",
    "tensorboard",
    "log_with",
    "progress",
    "turn",
    "scheme",
)  # set by the driver for each run; fmt: skip

# Options of `ablate run` that replace these fields.
INSTEAD = {
    "out": "--out", "data": "DATA", "encoding": "-e", "attention": "--attention", "seed": "--seeds",
    "device": "--device",
}  # fmt: skip


@dataclass(frozen=True)
class Full:
    """Settings for the longer comparison of a task: more encodings, more seeds and longer training."""

    compared: dict[str, tuple[str, ...]]
    seeds: int
    training: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Definition of a training task.

    Args:
        config, run: configuration class and training function.
        compared: encodings in the default comparison, for each kind of attention.
        smoke: options for a tiny training run on a CPU.
        values: function that extracts the measured values from the result of ``run``.
        measure, higher: name of the measured value, and whether a higher value is better.
        layout: layout of the report, "sizes", "lengths" or "recall"; see :mod:`.report`.
        series: column of results.csv that names each series of values of a training run.
        plots: maps the plot files of a report to the names of the plots.
        defaults, on_gpu: fields that differ from the defaults of the training command, on all devices or on a GPU only.
        by_encoding: fields that only apply to specific encodings.
        full: settings for the longer comparison, or None.
        data: default data.
        kept: files in a run's folder that the report needs.
        notes: maps encodings to sentences that are printed below the tables if the encoding was compared.
        architecture: function that maps the settings of a training run to the depth, heads and dim that they imply.
        dependent_defaults: function that maps settings to the defaults of options that depend on other options.
    """

    config: type[Training]
    run: Callable[..., dict[str, Any]]
    compared: dict[str, tuple[str, ...]]
    smoke: dict[str, Any]
    values: Callable[[dict[str, Any]], Values]
    measure: str
    higher: bool
    layout: str = "sizes"
    series: str = "positions"
    plots: dict[str, str] = field(default_factory=lambda: {"sizes.png": "sizes"})
    defaults: dict[str, Any] = field(default_factory=dict)
    on_gpu: dict[str, Any] = field(default_factory=dict)
    by_encoding: dict[str, dict[str, Any]] = field(default_factory=dict)
    full: Full | None = None
    data: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    architecture: Callable[[dict[str, Any]], dict[str, Any]] = lambda training: {}
    dependent_defaults: Callable[[dict[str, Any]], dict[str, Any]] = lambda settings: {}

    @property
    def encodings(self) -> list[str]:
        return self.config.backbone.encodings

    @property
    def data_is_path(self) -> bool:
        return get_type_hints(self.config)["data"] is not str


def held_out(result: dict[str, Any]) -> Values:
    found: Values = {"extrapolated": {}, "rescaled": {}}
    for name, value in result["held_out"].items():
        if name != "test_pairs":
            size, _, positions = name.partition(" ")
            for each in [positions] if positions else found:  # all positions coincide at the training size
                found[each][size] = value["loss"]
    return found


def accuracy(result: dict[str, Any]) -> Values:
    return result["accuracy"]


def bits(result: dict[str, Any]) -> Values:
    """Return bits per byte by scaling and length, with the longest length also split by position ("8192:512-1024")."""
    found: Values = {}
    for row in result["evaluation"]:
        whole = (row["first"], row["last"]) == (0, row["length"])
        part = "" if whole else f":{row['first']}-{row['last']}"
        found.setdefault(row["scaling"], {})[f"{row['length']}{part}"] = row["bits_per_byte"]
    return found


FAST: dict[str, Any] = {"precision": "bf16", "compile": True}
TINY: dict[str, Any] = {"steps": 2, "batch": 4, "warmup": 1, "dim": 48, "depth": 1, "log_every": 1}
DIGITS = ("none", "learned", "sincos", "rotate", "rotate-mixed", "cosine", "cosine-silu", "cosine-softplus")
MORE_DIGITS = (
    *DIGITS, "rotate:base=100", "rotate-learnable", "cosine-relu", "cosine-learnable", "cosine-mixed",
    "cosine-mixed-learnable", "cosine-softplus-phase",
)  # fmt: skip
MODEL = ("depth", "dim", "heads", "patch", "qk_norm")  # options of models that digits doesn't have
MEMORIES = ("add", "decay", "delta")
TASKS = {
    "digits": Task(
        digits.DigitsTraining, digits.run, dict.fromkeys(("softmax", "linear"), DIGITS),
        {"steps": 2, "limit": 64, "warmup": 1, "log_every": 1}, accuracy, "accuracy, %", True,
        plots={"accuracy.png": "trained", "resolution.png": "sizes"},
        full=Full(dict.fromkeys(("softmax", "linear"), MORE_DIGITS), 5, {"steps": 2100}),
        data=("digits",),
        notes={
            "learned": (
                "Learned position tables are resampled to the image's grid for both kinds of positions, as in timm."
            ),
            "sincos": "The sin-cos table is only resampled for rescaled positions.",
        },
        architecture=lambda training: {**digits.VIT, "dim": digits.VIT["embed_dim"]},
    ),
    "image": Task(
        image.ImageTraining, image.run,
        {
            "softmax": (
                "none", "learned", "sincos", "rotate", "rotate-mixed-fixed", "rotate-mixed", "cosine", "cosine-silu",
                "cosine-softplus", "cosine-softplus-phase", "cosine-learnable", "cosine-softplus-learnable",
            ),
            "linear": ("none", "sincos", "rotate", "cosine-silu", "cosine-softplus"),
        },
        {**TINY, "heads": 2, "size": 28, "patch": 2, "test_sizes": "20,28x40"},
        accuracy, "accuracy, %", True, on_gpu=FAST,
        notes={
            "learned": "Learned position tables are resampled to the image's grid for both kinds of positions.",
            "sincos": "The sin-cos table is only resampled for rescaled positions.",
        },
    ),
    "video": Task(
        video.VideoTraining, video.run,
        {
            "softmax": (
                "none", "space-only", "learned", "sincos", "rotate", "rotate-mixed", "cosine", "cosine-softplus",
                "cosine-softplus-phase",
            ),
            "linear": ("space-only", "rotate", "cosine-softplus", "cosine-softplus-phase"),
        },
        {
            **TINY, "heads": 2, "frames": 4, "every": 1, "size": 8, "test_size": 16, "patch": 4, "segment": 40,
            "parts": 4, "test_samples": 8,
        },
        accuracy, "accuracy, %", True, defaults={"task": "order", "steps": 3000}, on_gpu=FAST,
        dependent_defaults=video.dependent_defaults,
        notes={"learned": "Learned position tables are resampled to the clip's grid for both kinds of positions."},
    ),
    "recall": Task(
        recall.RecallTraining, recall.run,
        {
            "softmax": ("none", "rotate"),
            **dict.fromkeys(MEMORIES, ("none", "rotate", "rotate-numerator")),
        },
        {**TINY, "dim": 16, "keys": 4, "values": 4, "writes": 2, "questions": 1, "test_clips": 2},
        accuracy, "accuracy, %", True, layout="recall", series="question", plots={"frames.png": "recall"},
        data=("8x4x4",),
        full=Full(
            {
                "softmax": ("none", "rotate", "cosine-silu"),
                **dict.fromkeys(
                    (*MEMORIES, *(f"{name},{name},{name},softmax" for name in MEMORIES)),
                    ("none", "rotate", "rotate-numerator", "rotate-both", "cosine-silu"),
                ),
            },
            5,
            {"depth": 4, "dim": 64, "heads": 4, "keys": 16, "values": 16, "batch": 64, "steps": 1000, "warmup": 50},
        ),
    ),
    "diffusion": Task(
        diffusion.DiffusionTraining, diffusion.run,
        {
            "softmax": ("none", "sincos", "rotate", "cosine-softplus"),
            "linear": ("sincos", "rotate", "cosine-softplus"),
        },
        {
            **TINY, "dim": 32, "heads": 2, "size": 8, "test_size": 12, "text_dim": 16, "text_depth": 1, "parts": 4,
            "sample_steps": 1, "samples": 2, "test_samples": 2,
        },
        held_out, "held-out loss", False, on_gpu=FAST, kept=("samples.npz",),
    ),
    "lm": Task(
        lm.LmTraining, lm.run,
        {
            "softmax": (
                "rotate", "rotate-learnable", "cosine-silu", "cosine-silu-phase", "cosine-softplus",
                "cosine-softplus-phase", "none",
            ),
        },
        {
            "length": 16, "batch": 4, "steps": 4, "warmup": 1, "lr": 5e-3, "size": "tiny", "lengths": "16,32,64",
            "test_bytes": 512, "log_every": 1, "validate_every": 2,
        },
        bits, "bits per byte", False, layout="lengths", plots={"lengths.png": "lengths"},
        defaults={"steps": 1000}, by_encoding={"rotate": {"scaling": ",".join(lm.SCALINGS)}},
        architecture=lambda training: lm.SIZES[training["size"]],
    ),
}  # fmt: skip


def _find_other_tasks(config: type[Training], name: str) -> str:
    """Return a sentence to append to an error if other tasks have this option, or "" if none of them has it."""
    others = [task for task, other in TASKS.items() if name in {f.name for f in fields(other.config)} - set(CHOSEN)]
    if not others:
        return ""
    text = f". {name} is an option of {', '.join(others)}"
    if config is digits.DigitsTraining and name in MODEL:
        text += (
            f"; digits has a fixed model ({digits.VIT['depth']} layers of {digits.VIT['embed_dim']} channels). Use "
            "a different task, or your own model as in docs/examples/ablate_own_model.py"
        )
    return text


def overrides(config: type[Training], given: Iterable[str]) -> dict[str, Any]:
    """Parse NAME=VALUE strings into fields of a configuration."""
    hints = get_type_hints(config)
    known = sorted({f.name for f in fields(config)} - set(CHOSEN))
    found: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set: expected NAME=VALUE, got {each!r}")
        name = name.strip().replace("-", "_")
        if name in INSTEAD:
            raise typer.BadParameter(f"--set {name}: this option can't be set; use {INSTEAD[name]} instead")
        if name not in known:
            advice, expected = _find_other_tasks(config, name), f"NAME=VALUE with NAME one of {', '.join(known)}"
            raise typer.BadParameter(explain_unknown("--set", name, () if advice else known, expected) + advice)
        kind = next((part for part in get_args(hints[name]) if part is not NoneType), hints[name])  # the X of X | None
        try:
            found[name] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError) as error:
            expected = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "a different value")
            raise typer.BadParameter(f"--set {name}: expected {expected}, got {text!r}") from error
    return found


@contextlib.contextmanager
def options_as_set(task: Task) -> Iterator[None]:
    """Reword the errors of a training run so that they refer to options as ``--set NAME=VALUE`` and to data as DATA."""
    known = {f.name: f.default for f in fields(task.config) if f.name not in CHOSEN}

    def reword(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2]
        if name == "data":
            return found[0].replace("--data", "DATA")
        positive = name.removeprefix("no_")
        if isinstance(known.get(positive), bool) and found.string[found.end() :][:1] != ":":
            return f"--set {positive}={'true' if positive == name else 'false'}"
        if name not in known:
            return found[0]
        return f"--set {name}" + (f"={value.strip()}" if value else "")

    try:
        yield
    except typer.BadParameter as error:
        text = re.sub(r"(?<!--set )--([a-z][a-z-]*[a-z])( \d[\w.,x]*)?", reword, error.message)
        raise typer.BadParameter(text) from error


@contextlib.contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Yield a list that collects the messages of warnings. The warnings are still shown."""
    texts: list[str] = []
    show = warnings.showwarning

    def record(message: Any, *more: Any) -> None:
        texts.append(str(message))
        show(message, *more)

    warnings.showwarning = record
    try:
        yield texts
    finally:
        warnings.showwarning = show


@contextlib.contextmanager
def hide_warnings(texts: Iterable[str]) -> Iterator[None]:
    """Hide warnings with these messages."""
    hidden, show = set(texts), warnings.showwarning
    warnings.showwarning = lambda message, *more: None if str(message) in hidden else show(message, *more)
    try:
        yield
    finally:
        warnings.showwarning = show


@dataclass(frozen=True)
class Comparison:
    """Settings that determine the results. All runs in a folder share the task, the data and the training options.

    ``schemes`` maps each compared encoding that the user registered to its fingerprint.
    """

    task: str
    encodings: dict[str, list[str]]  # by attention
    seeds: int
    data: list[str]
    training: dict[str, Any]
    device: str
    schemes: dict[str, str] = field(default_factory=dict)

    def config(
        self, out: Path, encoding: str, attention: str, seed: int, progress: bool = True, turn: Path | None = None
    ) -> Training:
        task = TASKS[self.task]
        several = get_origin(get_type_hints(task.config)["data"]) is list
        if not several and len(self.data) != 1:
            raise typer.BadParameter(f"DATA: expected one value for {self.task}, got {len(self.data)}")
        data: Any = [Path(each) if task.data_is_path else each for each in self.data]
        fields_of_one: dict[str, Any] = {
            "data": data if several else data[0], "encoding": encoding, "attention": attention,
            **self.training, **task.by_encoding.get(encoding, {}),
        }  # fmt: skip
        return task.config(
            out=out, seed=seed, device=self.device, tensorboard=False, progress=progress, turn=turn, **fields_of_one
        )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs (attention, encoding), one for each variant."""
        return [(attention, name) for attention, names in self.encodings.items() for name in names]

    @property
    def known(self) -> list[str]:
        return TASKS[self.task].config.backbone.names

    def merge(self, out: Path) -> Comparison:
        """Return a comparison that also includes the encodings, seeds and fingerprints of existing runs in a folder.

        Raises:
            typer.BadParameter: if the definition of a scheme differs in the existing runs.
        """
        schemes = {name: mark for _, name in self.pairs if (mark := fingerprint_scheme(name)) is not None}
        path = out / "config.json"
        found = read_json(path)["settings"] if path.exists() else {}
        if found.get("task") != self.task:
            return replace(self, schemes=schemes)
        compared, before = found["encodings"], found.get("schemes", {})
        trained = {name for names in compared.values() for name in names}
        for name in schemes.keys() & trained:
            if before.get(name) != schemes[name]:
                raise typer.BadParameter(
                    f"--encoding {name}: --out {out} contains runs with a different definition of this scheme; choose "
                    "a different folder, or register the scheme under a different name"
                )
        both = {
            kind: [*compared.get(kind, ()), *self.encodings.get(kind, ())] for kind in {**compared, **self.encodings}
        }
        return replace(
            self, encodings={kind: list(dict.fromkeys(names)) for kind, names in both.items()},
            seeds=max(self.seeds, found["seeds"]), schemes={**before, **schemes},
        )  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """Return the content of config.json: the settings for all runs and tests, without data paths."""
        # A merged comparison may hold schemes that are not registered in this process.
        attention, name = next(pair for pair in self.pairs if split_options(pair[1])[0] in self.known)
        config = self.config(Path("unused"), name, attention, 0)
        tests = {name: value for name, value in vars(config).items() if name.startswith("test_")}
        shared = {name: value for name, value in (settings_of(config) | tests).items() if name not in CHOSEN}
        data = [Path(each).name for each in self.data]
        return {**asdict(self), "data": data, "training": {**self.training, **shared}}

    def jobs(self, out: Path) -> dict[Path, tuple[str, str, int]]:
        """Map each result file to its attention, encoding and seed. The files are sorted by seed."""
        return {
            out / "runs" / f"{name_run(name, attention, seed)}.json": (name, attention, seed)
            for seed in range(self.seeds)
            for attention, names in self.encodings.items()
            for name in names
        }


def name_run(encoding: str, attention: str, seed: int) -> str:
    """Return the name of a run's files. Encodings with different names have different files."""
    return f"{quote(encoding.replace(':', '_', 1), safe='=,')}-{attention}-{seed}"


def check_data_digest(runs: Path, digest: str | None) -> dict[str, str]:
    """Check that the runs in a folder used the same data, and return the result entry that identifies this data.

    Raises:
        typer.BadParameter: if the data differs. Results from earlier versions don't have this entry.
    """
    if digest is None:
        return {}
    if any(read_json(file).get("data_digest", digest) != digest for file in runs.glob("*.json")):
        raise typer.BadParameter(
            f"DATA: expected the same samples as in the runs in {runs}, but they have changed; restore them, or choose "
            "another --out"
        )
    return {"data_digest": digest}


def train(
    comparison: Comparison,
    file: Path,
    job: tuple[str, str, int],
    progress: bool = True,
    turn: Path | None = None,
    schemes: dict[str, Scheme] | None = None,
    shown: Iterable[str] = (),
) -> dict[str, Any]:
    """Start or resume a training run. When the result is saved, delete the checkpoint.

    In a new process, ``schemes`` contains the schemes to register first. ``shown`` contains the warnings that the user
    has already seen.
    """
    for name, scheme in (schemes or {}).items():
        register_scheme(name, scheme, overwrite=True)
    task = TASKS[comparison.task]
    folder = file.parent.parent / "trainings" / file.stem
    if not (folder / "checkpoint.pt").exists():  # a new run, or a finished one whose result was deleted
        shutil.rmtree(folder, ignore_errors=True)
    torch.compiler.reset()  # otherwise many models would exceed the recompilation limit
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()), reword_warnings(), hide_warnings(shown):
        config = comparison.config(folder, *job, progress=progress, turn=turn)
        result = task.run(config, lambda work: found.update(check_data_digest(file.parent, work.data_digest)))
    result = {**result, "values": task.values(result), **found}
    for name in task.kept:
        save_whole(file.with_suffix(f".{name}"), partial(shutil.copy, folder / name))
    write(file, json.dumps(result))
    for weights in ("checkpoint.pt", EXPORT):
        (folder / weights).unlink()
    return result


COLUMNS = (
    "encoding", "attention", "seed", "params", "loss", "loss_rise", "train_seconds", "step_ms", "peak_mib", "tokens",
    "steps", "counted_seconds",
)  # fmt: skip
TESTED = {"test_images": "images", "test_clips": "clips", "test_videos": "videos"}  # test samples, by column
OPTIONAL = ("test_bytes", *TESTED, "data_digest")  # columns that only some results have


def collect(files: Iterable[Path], series: str = "positions") -> pd.DataFrame:
    """Build a table of results, with a row per combination of encoding, attention, seed, series entry and size.

    Raises:
        typer.BadParameter: if two files contain the same run, which would count twice.
    """
    rows, sources = [], {}
    for file in files:
        run = read_json(file)
        first = sources.setdefault((run["encoding"], run["attention"], run["seed"]), file)
        if first != file:
            raise typer.BadParameter(f"{first} and {file} contain the same run; delete one of them")
        same = {key: run[key] for key in (*COLUMNS, *OPTIONAL) if key in run or key in COLUMNS}
        if run.get("train_steps_timed", run["steps"]) != run["steps"]:  # only part of a resumed run was timed
            same["train_seconds"] = None
        for name, values in run["values"].items():
            rows += [{**same, series: name, "size": size, "value": v} for size, v in values.items()]
    return pd.DataFrame(rows)
