"""The loop that the train scripts share: accelerate, timm's optimisers, schedule and EMA, checkpoints, exact resuming.

A script gives a :class:`Training` with fields of its own, a model, its batches and a loss:

    trainer = Trainer(config, model, settings)        # goes on where config.out has a checkpoint
    trainer.fit(len(samples), batch, loss)            # batch(indices, draws), loss(model, batch)
    evaluate(trainer.averaged)

**Exact resuming.** The data of a step and every random draw in it are functions of (seed, step, process), never of a
generator's history, so a checkpoint holds weights, optimiser with its learning rate, EMA and the step. A run that was
killed anywhere ends with the weights of one that was not (same number of processes; on a GPU as far as its kernels
repeat themselves). Checkpoints are written aside and renamed.

**Several GPUs.** ``torchrun --nproc-per-node 8 -m scripts.train ..`` or ``accelerate launch``: DDP, or FSDP2 with
``--sharding fsdp``. ``batch`` is that of a step over all processes and micro-batches; a checkpoint is one file with
whole tensors, whatever the number of processes.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np
import torch
import typer
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..common.devices import choose_device
from ..common.folder import flat, save_whole
from ..common.options import choose

FORMAT = 1
PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
C = TypeVar("C", bound="Training")


# --- configuration ---------------------------------------------------------------------------------------------------


def option(default: Any, text: str, *, free: bool = False) -> Any:
    """A field of a configuration and of the command line. free: it does not change the weights."""
    return field(default=default, metadata={"help": text, "free": free})


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every training has."""

    out: Path = field(metadata={"help": "Folder; a run in it is gone on with.", "free": True})
    steps: int = option(1000, "Steps of the optimiser.")
    batch: int = option(64, "Samples a step, over all processes and micro-batches.")
    accumulate: int = option(1, "Micro-batches a step.")
    opt: str = option("adamw", "One of timm's optimisers.")
    lr: float = option(1e-3, "Learning rate after the warm-up; a cosine takes it to 0.")
    weight_decay: float = option(0.05, "Not for biases, norms, frequencies.")
    warmup: int = option(100, "Steps of the warm-up.")
    clip: float = option(1.0, "Largest norm of the gradient; 0: any.")
    ema: float = option(0.999, "Decay of the average of the weights that is evaluated; 0: none.")
    precision: str = option("no", "no (float32), bf16 or fp16.")
    compile: bool = option(False, "torch.compile.")
    sharding: str = option("ddp", "Of several processes: ddp, or fsdp (FSDP2).")
    workers: int = option(0, "Threads that prepare micro-batches ahead; 0: none.", free=True)
    seed: int = option(0, "Of weights, order and draws.")
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda.", free=True)
    log_every: int = option(50, "Steps.", free=True)
    save_every: int = option(500, "Steps.", free=True)
    tensorboard: bool = option(True, "Where it is installed.", free=True)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise typer.BadParameter(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.ema < 1:
            raise typer.BadParameter(f"--ema: expected at least 0 and less than 1, got {self.ema}")
        choose("--precision", [self.precision], ("no", "bf16", "fp16"))
        choose("--sharding", [self.sharding], ("ddp", "fsdp"))


def command(
    app: typer.Typer, config: type[C], name: str | None = None
) -> Callable[[Callable[[C], Any]], Callable[[C], Any]]:
    """Register run(config) as a command, with an option for each field of the configuration."""

    def register(run: Callable[[C], Any]) -> Callable[[C], Any]:
        def call(**values: Any) -> None:
            try:
                run(config(**values))
            except KeyboardInterrupt:
                print(f"Interrupted; the same command goes on from the last checkpoint in {values['out']}.")
                raise typer.Exit(130) from None

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
    """All that decides the weights, as JSON has it."""
    kept = {f.name for f in fields(config) if not f.metadata["free"]}
    chosen = {name: value for name, value in asdict(config).items() if name in kept}
    return json.loads(json.dumps({**chosen, **more}, default=str))


# --- data order ------------------------------------------------------------------------------------------------------


def order(
    num: int, batch: int, *, seed: int, start: int = 0, accumulate: int = 1, rank: int = 0, world: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless micro-batches of shuffled indices for one process, from step ``start`` on, without those before it.

    Every epoch is a permutation of ``num`` samples; what does not fill a step is left out. A step has the same
    ``batch`` samples, and each of them the same draw, however many processes and micro-batches share them.

    Yields:
        indices and draws, (batch / (accumulate · world),) int64 each. A draw is a random number from 0 to 2^63 - 1,
        for the labels and augmentations of its sample, or to seed a generator for them.
    """
    per_epoch = num // batch
    if not per_epoch:
        raise typer.BadParameter(f"--batch {batch}: there are {num} samples; make it smaller, or give more data")
    of = -1
    permutation = draws = np.empty(0, np.int64)
    for step in itertools.count(start):
        epoch, i = divmod(step, per_epoch)
        if epoch != of:
            generator, of = np.random.default_rng((seed, epoch)), epoch
            permutation, draws = generator.permutation(num), generator.integers(2**63, size=num)
        micro = batch // (accumulate * world)
        for part in range(accumulate):
            first = i * batch + (part * world + rank) * micro
            yield permutation[first : first + micro], draws[first : first + micro]


def ahead(batch: Callable[..., Any], chosen: Iterator[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """batch(*each) of each chosen, in their order, some of them made ahead by threads: batch keeps no state."""
    if not workers:
        yield from itertools.starmap(batch, chosen)
        return
    with ThreadPoolExecutor(workers) as pool:
        made = deque(pool.submit(batch, *each) for each in itertools.islice(chosen, 2 * workers))
        while made:
            yield made.popleft().result()
            made.extend(pool.submit(batch, *each) for each in itertools.islice(chosen, 1))


def derive(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# --- the loop --------------------------------------------------------------------------------------------------------


def start(config: Training) -> Accelerator:
    """The processes, the device and the logs."""
    cpu = choose_device(config.device).type == "cpu"
    board = config.tensorboard and importlib.util.find_spec("tensorboard") is not None
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=config.precision,
        log_with="tensorboard" if board else None,
        project_dir=str(config.out),
    )
    if accelerator.distributed_type not in PLAIN:
        raise typer.BadParameter(
            f"accelerate's {accelerator.distributed_type.value}: not used here; --sharding fsdp shards"
        )
    if config.sharding == "fsdp" and accelerator.num_processes == 1:
        raise typer.BadParameter("--sharding fsdp: shards over several processes; start it with torchrun")
    parts = config.accumulate * accelerator.num_processes
    if config.batch % parts:
        raise typer.BadParameter(
            f"--batch {config.batch}: expected a multiple of {parts}, --accumulate {config.accumulate} × "
            f"{accelerator.num_processes} processes"
        )
    return accelerator


def begin(config: Training) -> Accelerator:
    """Start, with the seed that the model is built from."""
    accelerator = start(config)
    set_seed(config.seed)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)  # the same numbers on any number of cores
    return accelerator


class Trainer:
    """A training under way: model, optimiser, schedule, EMA, and the step they are at.

    Args:
        config: of the script.
        accelerator: from :func:`start`.
        model: on any device; its ``blocks``, where it has them, are the units that FSDP2 shards.
        settings: from :func:`settings_of`; a checkpoint with other ones is refused.
    """

    def __init__(self, config: Training, accelerator: Accelerator, model: nn.Module, settings: dict[str, Any]) -> None:
        self.config, self.accelerator, self.settings = config, accelerator, settings
        self.step, self.history, self.path = 0, [], config.out / "checkpoint.pt"
        self.total = torch.zeros((), dtype=torch.float64, device=accelerator.device)  # of losses since the last log
        self.since = 0
        self.pace: list[float] = []  # seconds a step, between two logs of this process
        self.clock: tuple[int, float] | None = None
        state = self._read()
        self.raw = model.to(accelerator.device)
        # Before FSDP2, whose modules can't be copied.
        self.average = ModelEmaV3(self.raw, decay=config.ema, use_warmup=True) if config.ema else None
        if config.sharding == "fsdp":
            shard(self.raw)
            if self.average is not None:
                shard(self.average.module)
                self.average.foreach = False
        fused: Any = {"fused": True} if config.opt == "adamw" else {}  # one kernel instead of dozens a step
        self.inner = create_optimizer_v2(
            self.raw, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, **fused
        )
        self.scheduler = CosineLRScheduler(
            self.inner, t_initial=max(config.steps, 2), warmup_t=min(config.warmup, config.steps - 1),
            warmup_lr_init=config.lr / (config.warmup + 1), t_in_epochs=False,
        )  # fmt: skip
        if state is not None:
            self._load(state)
        if config.compile:
            self.raw.compile(dynamic=False)  # all steps have one size
        wrapped = self.raw if config.sharding == "fsdp" else accelerator.prepare_model(self.raw)
        self.model, self.optimizer = wrapped, accelerator.prepare_optimizer(self.inner)

    @property
    def averaged(self) -> nn.Module:
        """The weights to evaluate: the EMA where there is one."""
        return self.raw if self.average is None else self.average.module

    def fit(
        self, num: int, batch: Callable[[np.ndarray, np.ndarray], Any], loss: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        """Train up to ``config.steps``.

        Args:
            num: of training samples.
            batch: (indices, draws) → a micro-batch; see :func:`order`.
            loss: (model, micro-batch) → the mean over the micro-batch; called under autocast.
        """
        config, accelerator = self.config, self.accelerator
        if self.step >= config.steps:
            return
        if accelerator.log_with:
            accelerator.init_trackers("tensorboard")
        chosen = order(
            num, config.batch, seed=config.seed, start=self.step, accumulate=config.accumulate,
            rank=accelerator.process_index, world=accelerator.num_processes,
        )  # fmt: skip
        stream = ahead(batch, chosen, config.workers)
        if accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(accelerator.device)
        columns = *Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}")
        with Progress(*columns, console=Console(stderr=True), disable=not accelerator.is_main_process) as progress:
            bar = progress.add_task("steps", total=config.steps, completed=self.step, loss="")
            while self.step < config.steps:
                self.total += self._advance(stream, loss)
                progress.advance(bar)
                if self.step % config.log_every == 0 or self.step == config.steps:
                    progress.update(bar, loss=f"{self._log():.4f}")
                if self.step % config.save_every == 0 or self.step == config.steps:
                    self.save()
                    self.clock = self.clock and (self.step, time.perf_counter())
        if accelerator.log_with:
            accelerator.end_training()

    def _advance(self, stream: Iterator[Any], loss: Callable[[nn.Module, Any], Tensor]) -> Tensor:
        config, accelerator = self.config, self.accelerator
        set_seed(derive(config.seed, self.step, accelerator.process_index))
        self.model.train()
        total = torch.zeros((), device=accelerator.device)
        for micro in range(config.accumulate):
            last = micro == config.accumulate - 1
            quiet = config.sharding == "fsdp" or last  # FSDP2 sums what it has reduced
            with nullcontext() if quiet else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    value = loss(self.model, next(stream)) / config.accumulate
                accelerator.backward(value)
            total += value.detach()
        if config.clip:
            accelerator.clip_grad_norm_(self.raw.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.scheduler.step_update(self.step)
        if self.average is not None:
            self.average.update(self.raw, step=self.step)
        return total

    def cost(self) -> dict[str, float | None]:
        """Median milliseconds of a step since this process began, the first steps and those of a checkpoint left out;
        and the most memory of this process's GPU so far, MiB. Call it before the evaluation. None: not measured."""
        device = self.accelerator.device
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        return {
            "step_ms": round(1000 * float(np.median(self.pace)), 3) if self.pace else None,
            "peak_mib": None if peak is None else round(peak, 1),
        }

    def _log(self) -> float:
        """The mean loss since the last call."""
        loss = self._total() / (self.step - self.since)  # waits for the device
        now = time.perf_counter()
        if self.clock is not None:
            self.pace.append((now - self.clock[1]) / (self.step - self.clock[0]))
        self.clock = self.step, now
        row = {"step": self.step, "loss": loss, "lr": self.inner.param_groups[0]["lr"]}
        self.history.append(row)
        self.total.zero_()
        self.since = self.step
        if self.accelerator.log_with:
            self.accelerator.log({"loss": loss, "lr": row["lr"]}, step=self.step)
        return loss

    def _total(self) -> float:
        reduced: Any = self.accelerator.reduce(self.total, "mean")
        if not torch.isfinite(reduced):
            raise FloatingPointError(
                f"the loss is {reduced.item()} after {self.step} steps; the last checkpoint is from before: try a "
                "lower --lr, more --warmup, or --precision bf16 in place of fp16"
            )
        return reduced.item()

    # --- checkpoints

    def save(self) -> None:
        """One file with whole tensors, by the first process; the others wait."""
        state = {
            "format": FORMAT,
            "settings": self.settings,
            "step": self.step,
            "losses": (self._total(), self.since),
            "history": self.history,
            "model": get_model_state_dict(self.raw, options=WHOLE),
            "optimizer": get_optimizer_state_dict(self.raw, self.inner, options=WHOLE),
        }
        if self.average is not None:
            state["average"] = get_model_state_dict(self.average.module, options=WHOLE)
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler.state_dict()
        if self.accelerator.is_main_process:
            save_whole(self.path, lambda part: torch.save(state, part))
        self.accelerator.wait_for_everyone()

    def _read(self) -> dict[str, Any] | None:
        out = self.config.out
        if not self.path.exists():
            others = [p for p in out.iterdir() if p.name != "tensorboard"] if out.is_dir() else []
            others = [p for p in others if not p.name.endswith(".part")]
            if others:
                raise typer.BadParameter(f"--out {out} is not empty and has no checkpoint.pt; choose another folder")
            return None
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise typer.BadParameter(f"{self.path} can't be read ({error}); delete it to start anew") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise typer.BadParameter(f"{self.path} is not a checkpoint of this version; choose another --out")
        there, here = flat(state["settings"]), flat(self.settings)
        keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        differ = [f"{key}: {there.get(key)} there, {here.get(key)} now" for key in keys]
        if differ:
            raise typer.BadParameter(
                f"--out {out} holds a training with other settings ({'; '.join(differ)}); choose another folder, or "
                "give it those"
            )
        return state

    def _load(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.raw, self.inner, state["optimizer"], options=WHOLE)
        set_model_state_dict(self.raw, state["model"], options=WHOLE)
        if self.average is not None:
            set_model_state_dict(self.average.module, state["average"], options=WHOLE)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.history = state["step"], state["history"]
        total, self.since = state["losses"]
        self.total.fill_(total)


def shard(model: nn.Module) -> None:
    """FSDP2, a block a unit."""
    from torch.distributed.fsdp import fully_shard

    blocks: Sequence[nn.Module] = list(getattr(model, "blocks", ()))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
