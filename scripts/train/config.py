"""Training options as dataclass fields with value ranges, and commands that are generated from these fields."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import torch
import typer
from accelerate import PartialState
from timm.optim import get_optimizer_info, list_optimizers  # pyright: ignore[reportPrivateImportUsage]
from timm.optim.adafactor_bv import AdafactorBigVision
from torch import nn

from lrpe_md import Memory

from ..common.devices import choose_device
from ..common.folder import SaveError
from ..common.options import SEEDS, Command, choose, in_shell_terms
from .encodings import Backbone, fingerprint_scheme
from .interruption import Interrupted
from .schedules import SCHEDULES, Schedule

C = TypeVar("C", bound="Training")
WIDTHS = ("head_dim:", "num_channels:", "rotary_dim:", "num_heads:", "dim:")  # prefixes of errors about widths
DATA, MODEL, OPTIMISER, RUN = PANELS = ("Data", "Model", "Optimiser", "Run")  # groups of --help
# Task options that describe the model. Other task options describe the data.
MODEL_OPTIONS = {
    "encoding", "attention", "memory", "patch", "dim", "depth", "heads", "qk_norm", "text_dim", "text_depth",
}  # fmt: skip


def describe(
    text: str, *, free: bool = False, least: float | None = None, below: float | None = None, off: bool = False,
    panel: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the metadata of an option's field.

    Args:
        text: help text of the option.
        free: whether the option does not affect the weights.
        least, below: the value must be at least ``least`` and less than ``below``.
        off: whether 0 disables the option and error messages say so.
        panel: group of the option in --help. By default, it is the group in :class:`Training` for options of that
            class, "Model" for the names in :data:`MODEL_OPTIONS`, and "Data" for all others.
    """
    return {"help": text, "free": free, "least": least, "below": below, "off": off, "panel": panel}


def option(default: Any, text: str, **about: Any) -> Any:
    """Return a configuration field that is also a command-line option; see :func:`describe` for ``about``."""
    return field(default=default, metadata=describe(text, **about))


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options shared by all training commands."""

    backbone: ClassVar[Backbone] = Backbone(frozenset(), {})
    loss_unit: ClassVar[str] = ""  # unit shown in the summary
    out: Path = field(metadata=describe("Output folder. An interrupted run in it is resumed.", free=True, panel=RUN))
    steps: int = option(
        1000, "Number of optimiser steps. A finished run continues if you increase it.", least=1, panel=OPTIMISER
    )
    seconds: float = option(
        0.0, "Time budget in seconds, instead of --steps; 0 trains for --steps.", least=0, off=True, panel=RUN
    )
    batch: int = option(
        64, "Samples per step, over all processes and micro-batches; at most the number of training samples.", least=1,
        panel=OPTIMISER,
    )  # fmt: skip
    accumulate: int = option(1, "Micro-batches per step.", least=1, panel=OPTIMISER)
    opt: str = option(
        "adamw", "Optimiser: the name of a timm optimiser, except adahessian and variants of adafactorbv.",
        panel=OPTIMISER,
    )  # fmt: skip
    lr: float = option(1e-3, "Learning rate after the warm-up.", least=0, panel=OPTIMISER)
    betas: str = option(
        "", "Betas of the optimiser, such as 0.9,0.95. Default: the optimiser's own betas.", panel=OPTIMISER
    )
    weight_decay: float = option(
        0.05, "Weight decay, not applied to biases, norms and frequencies.", least=0, off=True, panel=OPTIMISER
    )
    schedule: str = option(
        "cosine", "Learning rate schedule: cosine, constant, or wsd (warm-up, stable, decay).", panel=OPTIMISER
    )
    warmup: int = option(
        100, "Number of warm-up steps; with cosine, at most a tenth of all steps (a fifth with --seconds).", least=0,
        off=True, panel=OPTIMISER,
    )  # fmt: skip
    cooldown: float = option(
        0.2, "Fraction of the steps in which wsd lowers the learning rate.", least=0, below=1, panel=OPTIMISER
    )
    clip: float = option(1.0, "Gradient clipping norm; 0 disables clipping.", least=0, off=True, panel=OPTIMISER)
    ema: float = option(
        0.999, "EMA decay of the evaluated weights; 0 disables averaging.", least=0, below=1,
        panel=OPTIMISER,
    )  # fmt: skip
    weights: str = option(
        "", "Weights to start from: a run's folder, a checkpoint, or a safetensors file.", free=True, panel=MODEL
    )
    precision: str = option("no", "Precision: no (float32), bf16, fp16, or auto (bf16 on a GPU).", panel=RUN)
    compile: bool = option(False, "Compile the model with torch.compile.", panel=RUN)
    cuda_graphs: bool = option(
        False, "Run the compiled model as CUDA graphs; faster if the CPU is the bottleneck.", panel=RUN
    )
    sharding: str = option("ddp", "Strategy for several processes: ddp, or fsdp (FSDP2).", panel=RUN)
    workers: int = option(
        0, "Number of workers that prepare batches in advance; 0 uses the main process.", free=True, least=0,
        off=True, panel=RUN,
    )  # fmt: skip
    seed: int = option(0, "Random seed (initialisation, data order, noise).", least=0, below=SEEDS, panel=RUN)
    device: str = option("auto", "Device: cpu, cuda, or auto (cuda if available).", free=True, panel=RUN)
    log_every: int = option(50, "Number of steps between two rows of the history.", free=True, least=1, panel=RUN)
    validate_every: int = option(
        0, "Number of steps between two validations; 0 disables validation.", free=True, least=0, off=True, panel=RUN
    )
    save_every: int = option(500, "Number of steps between two checkpoints.", free=True, least=1, panel=RUN)
    keep_checkpoints: int = option(
        1, "Number of checkpoints to keep: checkpoint.pt, and checkpoint-STEP.pt if there are several.", free=True,
        least=1, panel=RUN,
    )  # fmt: skip
    progress: bool = option(True, "Show a progress bar.", free=True, panel=RUN)
    tensorboard: bool = option(
        True, "Log to TensorBoard if it is installed and --log-with is not set.", free=True, panel=RUN
    )
    log_with: str = option(
        "",
        "Trackers to log to, separated by commas: tensorboard, wandb, or any other tracker that accelerate supports.",
        free=True,
        panel=RUN,
    )
    turn: Path | None = field(
        default=None,
        metadata=describe(
            "Lock file for --seconds: runs with the same file take turns on the device.", free=True, panel=RUN
        ),
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            check_range(f"--{each.name.replace('_', '-')}", getattr(self, each.name), each.metadata)
        check_optimizer(self.opt)
        choose("--schedule", [self.schedule], SCHEDULES)
        choose("--precision", [self.precision], ("no", "bf16", "fp16", "auto"))
        choose("--sharding", [self.sharding], ("ddp", "fsdp"))
        parse_betas(self.betas, self.opt)
        if self.turn is not None and not self.seconds:
            raise typer.BadParameter(f"--turn {self.turn}: only works with --seconds; leave out --turn")
        if self.turn is not None and (self.turn.is_dir() or not self.turn.parent.is_dir()):
            raise typer.BadParameter(
                f"--turn {self.turn}: expected a file in an existing folder; create the folder first"
            )
        if self.cuda_graphs and not (self.compile and self.accumulate == 1):
            raise typer.BadParameter(
                "--cuda-graphs: expected --compile and --accumulate 1, because a replay overwrites the gradients, got "
                f"--{'' if self.compile else 'no-'}compile and --accumulate {self.accumulate}"
            )
        if self.cuda_graphs and self.dynamic_shapes is None:
            raise typer.BadParameter(
                "--cuda-graphs: expected one shape for all steps, got several; leave out --cuda-graphs, or --mix-sizes "
                "and --max-ratio"
            )

    @property
    def is_new(self) -> bool:
        """Return whether --out has no checkpoint. If it has one, changed settings are reported first."""
        return not (self.out / "checkpoint.pt").exists()

    @property
    def dynamic_shapes(self) -> bool | None:
        """Argument ``dynamic`` for torch.compile: False if all steps have the same shape, and None otherwise."""
        return False

    @property
    def mixed_precision(self) -> str:
        """Precision of the run. "auto" selects bf16 on a GPU, and no mixed precision on a CPU."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if choose_device(self.device).type == "cuda" else "no"

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps. With a cosine schedule, at most a tenth of the steps are warm-up steps.

        The cosine begins at step 0, so the learning rate would drop after a longer warm-up. With --seconds, the limit
        is a fifth, because the run is planned after a tenth of its time. With a constant schedule, or with wsd if the
        run is longer than the warm-up, the warm-up does not depend on the number of steps, so you can extend the run.
        """
        if self.schedule == "constant" or (self.schedule == "wsd" and self.warmup < self.steps):
            return self.warmup
        return min(self.warmup, self.steps // (5 if self.seconds else 10))

    def build_schedule(self) -> Schedule:
        """Return the learning rate schedule."""
        warmup = self.warmup_steps
        return Schedule(
            length=max(self.steps, 2), warmup=warmup, start=self.lr / (warmup + 1), kind=self.schedule,
            cooldown=self.cooldown,
        )  # fmt: skip

    def stretch_schedule(self, steps: int) -> Schedule:
        """Return the schedule for a different number of steps, as determined by --seconds."""
        return replace(self, steps=steps, warmup=min(self.warmup, steps // 5)).build_schedule()

    def check_encoding(self, build: Callable[..., nn.Module], arguments: dict[str, Any]) -> None:
        """Reject an encoding that the model does not support. The check runs before anything is read or written.

        Args:
            build, arguments: function that builds the model, and the function's arguments. A single block is built on
                the meta device, or all blocks if their kinds of attention differ.

        Raises:
            typer.BadParameter: with the model's error message, and the nearest supported --dim and --heads.
        """
        names = ("encoding", "attention", "memory", "dim", "heads")
        named = [name for name in names if getattr(self, name, "") not in ("", 0)]
        depth = {} if isinstance(arguments.get("attention"), tuple) else {"depth": 1}
        try:
            with torch.device("meta"):
                build(**{**arguments, **depth})
        except (TypeError, ValueError) as error:
            given = " ".join(f"--{name} {getattr(self, name)}" for name in named)
            options = {each.name for each in fields(self)}
            blames_widths = str(error).startswith(WIDTHS) and {"dim", "heads"} <= options
            found = find_widths(build, {**arguments, **depth}) if blames_widths else {}
            near = [f"--{name} {text}" for name, text in found.items()]
            if not near:
                raise typer.BadParameter(f"{given}: {in_shell_terms(error)}") from error
            remedy = f"pass {', or '.join(near)}"
            if vars(self).get("model") and "dim" in found:
                remedy = f"leave out --model, and pass --heads {vars(self)['heads']} {near[0]}"
            raise typer.BadParameter(f"{given}: {in_shell_terms(error).partition('; ')[0]}; {remedy}") from error

    def optimizer_arguments(self, model: nn.Module) -> dict[str, Any]:
        """Return arguments for timm's ``create_optimizer_v2`` other than optimiser, learning rate, betas and decay."""
        return {}


def changed(name: str, default: Any, text: str | None = None, **about: Any) -> Any:
    """Return a common training option with a different default and, optionally, a different help text."""
    (inherited,) = (f.metadata for f in fields(Training) if f.name == name)
    return field(default=default, metadata={**inherited, **about, "help": text or inherited["help"]})


def parse_betas(text: str, opt: str) -> tuple[float, ...]:
    """Parse the betas for an optimiser, such as "0.9,0.95". "" selects the default betas."""
    if not text:
        return ()
    about = get_optimizer_info(opt.lower().split("_")[-1])
    if not about.has_betas:
        raise typer.BadParameter(f"--betas {text}: --opt {opt} has no betas; pass --betas=''")
    try:
        betas = tuple(float(part) for part in text.split(","))
    except ValueError:
        betas = ()
    if len(betas) != about.num_betas or not all(0 <= beta < 1 for beta in betas):
        raise typer.BadParameter(
            f"--betas: expected {about.num_betas} numbers in [0, 1), separated by commas, got {text!r}"
        )
    return betas


def check_optimizer(opt: str) -> None:
    """Reject unknown optimisers, and timm optimisers that the training loop can't run or save."""
    choose("--opt", [opt], map(str, list_optimizers()))
    about = get_optimizer_info(opt)
    reason = ""
    if about.second_order:
        reason = "it needs second derivatives"
    elif about.opt_class is AdafactorBigVision:
        reason = "its settings can't be stored in a checkpoint"
    if reason:
        raise typer.BadParameter(f"--opt {opt}: not supported, because {reason}; pass another, such as adamw")


def check_range(name: str, value: Any, metadata: Any) -> None:
    """Reject an option's value if it is out of range or not finite."""
    least, below = metadata["least"], metadata["below"]
    if value == math.inf and below is None:
        below = math.inf
    if (least is not None and not value >= least) or (below is not None and not value < below):
        wanted = [] if least is None else [f"at least {least}{' (0 disables it)' if metadata['off'] else ''}"]
        wanted += [] if below is None else ["less than infinity" if below == math.inf else f"less than {below}"]
        raise typer.BadParameter(f"{name}: expected {' and '.join(wanted)}, got {value}")


def check_width(option: str, width: int, heads: int, per_head: int = 1) -> None:
    """Reject a width that can't be divided among the heads.

    ``per_head`` must divide the width of each head.

    Raises:
        typer.BadParameter: if the width can't be divided. The message suggests the nearest widths with an even
            head_dim, which rotations need.
    """
    multiple, even = heads * per_head, heads * max(per_head, 2)
    if width % multiple:
        below = width // even * even
        near = " or ".join(str(each) for each in (below, below + even) if each)
        product = f"{heads} (--heads)" if per_head == 1 else f"{per_head} × {heads} (--heads)"
        raise typer.BadParameter(
            f"{option}: expected a multiple of {product}, got {width}; pass {option} {near}, or change --heads"
        )


def check_ignored(config: Any, names: str, reason: str) -> None:
    """Reject options that have no effect.

    Args:
        names: names of the options, separated by spaces.
        reason: why they have no effect, and what to do. "{option}" is replaced by the name of the option.

    Raises:
        typer.BadParameter: if one of the options differs from its default.
    """
    defaults = {f.name: f.default for f in fields(config)}
    for name in names.split():
        if (value := getattr(config, name)) != defaults[name]:
            option, shown = f"--{name.replace('_', '-')}", "" if value is True else f" {value}"
            raise typer.BadParameter(f"{option}{shown}: {reason.format(option=option)}")


def find_widths(build: Callable[..., nn.Module], arguments: dict[str, Any]) -> dict[str, str]:
    """Return values for --dim and --heads that are close to these arguments and with which the model can be built.

    Returns:
        the values by option, such as {"dim": "64 or 128", "heads": "3"}. Options without a suitable value are left out.
    """
    width = next((name for name in ("embed_dim", "dim") if name in arguments), None)
    if width is None:
        return {}
    dim, heads = arguments[width], arguments["num_heads"]
    choices = {
        "dim": (width, dim, range(heads, dim + 128 * heads, heads)),
        "heads": ("num_heads", heads, [number for number in range(1, dim + 1) if dim % number == 0]),
    }

    def fits(name: str, value: int) -> bool:
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                build(**{**arguments, name: value})
        except (TypeError, ValueError):
            return False
        return True

    found = {}
    for option, (name, value, numbers) in choices.items():
        below = next((each for each in reversed(numbers) if each < value and fits(name, each)), None)
        above = next((each for each in numbers if each > value and fits(name, each)), None)
        near = [str(each) for each in (below, above) if each]
        found |= {option: " or ".join(near)} if near else {}
    return found


def check_model_options(config: Any, own: dict[str, int | None]) -> None:
    """Reject options that --model would ignore. A value is accepted if it is the default or the model's own value.

    ``own`` contains the model's value for each option, or None if the value is unknown.
    """
    defaults = {f.name: f.default for f in fields(config)}
    ignored = [name for name, value in own.items() if getattr(config, name) not in (defaults[name], value)]
    if ignored:
        given = " ".join(f"--{name} {getattr(config, name)}" for name in ignored)
        raise typer.BadParameter(
            f"{given}: --model {config.model} defines --dim, --depth, --heads and --patch ({own['patch']}); leave out "
            "these options or --model"
        )


def find_panel(option: Field[Any]) -> str:
    """Return the group of an option in --help."""
    shared = {f.name: f.metadata["panel"] for f in fields(Training)}
    return option.metadata["panel"] or shared.get(option.name) or (MODEL if option.name in MODEL_OPTIONS else DATA)


def list_model_options(config: Training) -> list[str]:
    """Return the names of the options that determine the model."""
    return [f.name for f in fields(config) if find_panel(f) == MODEL and not f.metadata["free"]]


def command(app: typer.Typer, config: type[C], name: str) -> Callable[[Callable[[C], Any]], Callable[[C], Any]]:
    """Return a decorator that registers run(config) as a command, with an option for each field of ``config``."""

    def register(run: Callable[[C], Any]) -> Callable[[C], Any]:
        def call(**values: Any) -> None:
            try:
                run(config(**values))
            except Interrupted as interrupted:
                if PartialState().is_main_process:
                    typer.echo(f"{interrupted}; to resume, run the same command.", err=True)
                raise typer.Exit(128 + interrupted.number) from None
            except KeyboardInterrupt:
                saved = (values["out"] / "checkpoint.pt").exists()
                remedy = "to resume from the last checkpoint" if saved else "nothing was saved; to start again"
                typer.echo(f"Interrupted; {remedy}, run the same command.", err=True)
                raise typer.Exit(130) from None
            except SaveError as error:
                typer.echo(
                    f"{error}; free some disk space, then run the same command to resume from the last checkpoint",
                    err=True,
                )
                raise typer.Exit(1) from error
            PartialState().destroy_process_group()

        hints, parameters = get_type_hints(config), []
        for f in fields(config):
            panel = find_panel(f)
            hint = Annotated[hints[f.name], typer.Option(help=f.metadata["help"], rich_help_panel=panel)]
            default = inspect.Parameter.empty if f.default is MISSING else f.default
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append((PANELS.index(panel), inspect.Parameter(f.name, kind, default=default, annotation=hint)))
        parameters = [each for _, each in sorted(parameters, key=lambda pair: pair[0])]
        call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        paragraphs = inspect.cleandoc(config.__doc__ or "").split("\n\n")
        call.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)  # --help wraps lines itself
        app.command(name, cls=Command)(call)
        return run

    return register


def settings_of(config: Training, **more: Any) -> dict[str, Any]:
    """Return all settings that affect the weights, as JSON values."""
    kept = {f.name for f in fields(config) if not f.metadata["free"]}
    chosen = {name: value for name, value in asdict(config).items() if name in kept}
    scheme = fingerprint_scheme(getattr(config, "encoding", ""))
    chosen |= {} if scheme is None else {"scheme": scheme}
    return json.loads(json.dumps({**chosen, "precision": config.mixed_precision, **more}, default=_as_json))


def _as_json(value: Any) -> Any:
    return asdict(value) if isinstance(value, Memory) else str(value)
