"""Training options: fields of a dataclass, their ranges, and the commands made from them."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import torch
import typer
from accelerate import PartialState
from timm.optim import list_optimizers  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from ..common.devices import choose_device
from ..common.folder import SaveError
from ..common.options import SEEDS, choose
from .encodings import Backbone

C = TypeVar("C", bound="Training")


def describe(
    text: str, *, free: bool = False, least: float | None = None, below: float | None = None, off: bool = False
) -> dict[str, Any]:
    """A field's metadata.

    Args:
        text: its help on the command line.
        free: it does not change the weights.
        least, below: its range, least included, below not.
        off: 0 turns it off, which the error says.
    """
    return {"help": text, "free": free, "least": least, "below": below, "off": off}


def option(default: Any, text: str, **about: Any) -> Any:
    """A field of a configuration and of the command line; about: see :func:`describe`."""
    return field(default=default, metadata=describe(text, **about))


@dataclass(frozen=True)
class Schedule:
    """The learning rate by step: timm's cosine, and a linear warm-up before it.

    Args:
        length: steps of the cosine.
        warmup: steps of the warm-up.
        start: rate that the warm-up begins with.
        end: rate that the cosine ends with.
        behind: whether the cosine begins behind the warm-up; else the warm-up takes the place of its first steps.
        offset: number of the first step.
    """

    length: int
    warmup: int
    start: float
    end: float = 0.0
    behind: bool = False
    offset: int = 0

    def build(self, optimizer: Optimizer) -> CosineLRScheduler:
        scheduler = CosineLRScheduler(
            optimizer, t_initial=self.length, lr_min=self.end, warmup_t=self.warmup, warmup_lr_init=self.start,
            warmup_prefix=self.behind, t_in_epochs=False,
        )  # fmt: skip
        if self.offset:
            scheduler.step_update(self.offset)
        return scheduler


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of every training."""

    backbone: ClassVar[Backbone] = Backbone(frozenset(), 1.0, {})
    out: Path = field(metadata=describe("Folder; a run in it is gone on with.", free=True))
    steps: int = option(1000, "Steps of the optimiser.", least=1)
    seconds: float = option(
        0.0, "Train for so many instead of --steps: a tenth of them tells how many steps that is; 0: --steps.", least=0,
        off=True,
    )  # fmt: skip
    batch: int = option(64, "Samples a step, over all processes and micro-batches.", least=1)
    accumulate: int = option(1, "Micro-batches a step.", least=1)
    opt: str = option("adamw", "One of timm's optimisers.")
    lr: float = option(1e-3, "Learning rate after the warm-up; a cosine takes it to 0.", least=0)
    weight_decay: float = option(0.05, "Not for biases, norms, frequencies.", least=0, off=True)
    warmup: int = option(100, "Steps of the warm-up.", least=0, off=True)
    clip: float = option(1.0, "Largest norm of the gradient; 0: any.", least=0, off=True)
    ema: float = option(0.999, "Decay of the average of the weights that is evaluated; 0: none.", least=0, below=1)
    precision: str = option("no", "no (float32), bf16, fp16, or auto (bf16 on a GPU, else no).")
    compile: bool = option(False, "torch.compile.")
    cuda_graphs: bool = option(
        False, "With --compile: the model's kernels as CUDA graphs, for a host that is slower than the GPU."
    )
    sharding: str = option("ddp", "Of several processes: ddp, or fsdp (FSDP2).")
    workers: int = option(0, "Threads that prepare micro-batches ahead; 0: none.", free=True, least=0, off=True)
    seed: int = option(0, "Of weights, order and draws.", least=0, below=SEEDS)
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda.", free=True)
    log_every: int = option(50, "Steps.", free=True, least=1)
    validate_every: int = option(0, "Steps between two validations; 0: none.", free=True, least=0, off=True)
    save_every: int = option(500, "Steps.", free=True, least=1)
    progress: bool = option(True, "Show a bar.", free=True)
    tensorboard: bool = option(True, "Where it is installed.", free=True)
    turn: Path | None = field(
        default=None,
        metadata=describe("With --seconds: a file; of trainings that name it one at a time runs.", free=True),
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            check_range(f"--{each.name.replace('_', '-')}", getattr(self, each.name), each.metadata)
        choose("--opt", [self.opt], map(str, list_optimizers()))
        choose("--precision", [self.precision], ("no", "bf16", "fp16", "auto"))
        choose("--sharding", [self.sharding], ("ddp", "fsdp"))
        if self.turn is not None and not self.seconds:
            raise typer.BadParameter(f"--turn {self.turn}: expected it with --seconds alone; leave it out")
        if self.turn is not None and (self.turn.is_dir() or not self.turn.parent.is_dir()):
            raise typer.BadParameter(f"--turn {self.turn}: expected a file in a folder that exists; make that first")
        if self.cuda_graphs and not (self.compile and self.accumulate == 1):
            raise typer.BadParameter(
                "--cuda-graphs: expected --compile and --accumulate 1, whose gradients no other step writes over, got "
                f"--{'' if self.compile else 'no-'}compile and --accumulate {self.accumulate}"
            )

    @property
    def mixed_precision(self) -> str:
        """The precision on this machine."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if choose_device(self.device).type == "cuda" else "no"

    def schedule(self) -> Schedule:
        return Schedule(
            length=max(self.steps, 2), warmup=min(self.warmup, self.steps - 1), start=self.lr / (self.warmup + 1)
        )

    def schedule_of(self, steps: int) -> Schedule:
        """The same, stretched to another number of steps."""
        return replace(self, steps=steps, warmup=min(self.warmup, steps // 5)).schedule()

    def check_encoding(self, build: Callable[..., nn.Module], arguments: dict[str, Any]) -> None:
        """Refuse an encoding that the model can't have, before anything is read or written.

        Args:
            build, arguments: make the model, of which one block is built, on the meta device.

        Raises:
            typer.BadParameter: with what the model says.
        """
        named = [name for name in ("encoding", "attention", "dim", "heads") if hasattr(self, name)]
        try:
            with torch.device("meta"):
                build(**{**arguments, "depth": 1})
        except (TypeError, ValueError) as error:
            given = " ".join(f"--{name} {getattr(self, name)}" for name in named)
            raise typer.BadParameter(f"{given}: {error}") from error

    def optimizer_arguments(self, model: nn.Module) -> dict[str, Any]:
        """Return arguments of timm's ``create_optimizer_v2`` besides optimiser, rate and decay."""
        return {}


def check_range(name: str, value: Any, metadata: Any) -> None:
    """Refuse a value of an option outside of its range, or a number that is not finite."""
    least, below = metadata["least"], metadata["below"]
    if value == math.inf and below is None:
        below = math.inf
    if (least is not None and not value >= least) or (below is not None and not value < below):
        wanted = [] if least is None else [f"at least {least}{' (0 is off)' if metadata['off'] else ''}"]
        wanted += [] if below is None else ["finite" if below == math.inf else f"less than {below}"]
        raise typer.BadParameter(f"{name}: expected {' and '.join(wanted)}, got {value}")


def command(app: typer.Typer, config: type[C], name: str) -> Callable[[Callable[[C], Any]], Callable[[C], Any]]:
    """Register run(config) as a command, with an option for each field of the configuration."""

    def register(run: Callable[[C], Any]) -> Callable[[C], Any]:
        def call(**values: Any) -> None:
            try:
                run(config(**values))
            except KeyboardInterrupt:
                print(f"Interrupted; the same command goes on from the last checkpoint in {values['out']}.")
                raise typer.Exit(130) from None
            except SaveError as error:
                typer.echo(f"{error}; make room, and the same command goes on from the last checkpoint", err=True)
                raise typer.Exit(1) from error
            PartialState().destroy_process_group()

        hints, parameters = get_type_hints(config), []
        for f in fields(config):
            hint = Annotated[hints[f.name], typer.Option(help=f.metadata["help"])]
            default = inspect.Parameter.empty if f.default is MISSING else f.default
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(f.name, kind, default=default, annotation=hint))
        call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        call.__doc__ = config.__doc__
        app.command(name)(call)
        return run

    return register


def settings_of(config: Training, **more: Any) -> dict[str, Any]:
    """Return all settings that determine the weights, as JSON values."""
    kept = {f.name for f in fields(config) if not f.metadata["free"]}
    chosen = {name: value for name, value in asdict(config).items() if name in kept}
    return json.loads(json.dumps({**chosen, "precision": config.mixed_precision, **more}, default=str))
