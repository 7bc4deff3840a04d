"""Training loop of all tasks, with exact resuming, based on accelerate and timm's optimisers, schedules and EMA.

A task turns its configuration into a :class:`.work.Work`, which contains a model, batches, a loss and an evaluation.

    run = partial(train, prepare)                     # prepare(config, device) → Work
    run(config)                                       # resumes if config.out has a checkpoint

**Exact resuming.** The data of a step and all of its random numbers are functions of (seed, step, process), and never
depend on a generator's history. A checkpoint therefore only contains the weights, the EMA, the state of the optimiser
with the learning rate, and the step. A run that is killed and resumed ends with the same weights as an uninterrupted
run, provided that both use the same number of processes and, on a GPU, deterministic kernels. Checkpoints are written
to a new file and renamed. On SIGINT and SIGTERM, the loop saves a checkpoint after the current step. If you increase
``--steps``, a finished run continues. With a constant schedule, the result is the same as if the run had never stopped.

**Time budgets.** With ``--seconds``, the first steps are not counted, because they include compilation. After a tenth
of the time, the loop measures the time per step, plans as many steps as fit, and sets the schedule to that number. The
loop corrects this plan twice, based on the latest steps: halfway to the end, and halfway through the rest. If several
runs should get the same time on one device, they share a file (``--turn``), so they compile in parallel but train one
at a time.

**Several GPUs.** Run ``torchrun --nproc-per-node 8 -m lrpe_md.scripts.train ...`` or ``accelerate launch``. The loop
uses DDP, or FSDP2 with ``--sharding fsdp``. ``batch`` counts the samples of a step over all processes and
micro-batches. A checkpoint is one file with unsharded tensors, regardless of the number of processes.

**accelerate** starts the processes, places the model, scales, casts, clips, reduces and logs. The loop avoids three of
accelerate's features. ``save_state`` writes a folder with the random states of each process (and a sharded model under
FSDP). Such a folder would tie a run to the number of processes, and a kill between two files would leave the folder
inconsistent. ``skip_first_batches`` draws all earlier batches, whereas this loop computes a batch from its step number.
The FSDP2 plugin can't shard a second model, such as the EMA, in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import torch
import typer
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from filelock import FileLock
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lrpe_md.checks import plural

from ..common.devices import choose_device
from ..common.folder import flat, show_value
from .checkpoint import FORMAT, first_sentence, read_checkpoint, save_checkpoint
from .config import DATA, MODEL, Training, find_panel, parse_betas
from .encodings import find_reference, has_coordinates
from .history import HISTORY, HistoryFile
from .interruption import Interrupted, Interruption
from .order import DataError, Steps, derive_seed, divide, prepare_ahead, prepare_in_processes
from .trackers import FOLDER, choose_trackers, finish_trackers, locate_logs, start_trackers

STARTING, EVERY = 10, 5  # untimed first steps, and steps between time checks for --seconds
PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


# --- the loop --------------------------------------------------------------------------------------------------------


def start(config: Training) -> Accelerator:
    """Set up processes, device and logging, and return the accelerator."""
    cpu = choose_device(config.device).type == "cpu"
    if cpu and config.mixed_precision == "fp16":
        raise typer.BadParameter("--precision fp16 needs a GPU; use 'bf16' or 'no'")
    trackers: Any = choose_trackers(config)
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=config.mixed_precision,
        log_with=trackers or None,
        project_config=locate_logs(config),
    )
    if accelerator.distributed_type not in PLAIN:
        raise typer.BadParameter(
            f"accelerate's {accelerator.distributed_type.value} is not supported; use --sharding fsdp"
        )
    if config.sharding == "fsdp" and accelerator.num_processes == 1:
        raise typer.BadParameter("--sharding fsdp: needs several processes; start the command with torchrun")
    parts = config.accumulate * accelerator.num_processes
    if config.batch % parts:
        raise typer.BadParameter(
            f"--batch {config.batch}: expected a multiple of {parts} (--accumulate {config.accumulate} × "
            f"{accelerator.num_processes} processes)"
        )
    return accelerator


def begin(config: Training) -> Accelerator:
    """Call :func:`start`, and set the seed for building the model."""
    accelerator = start(config)
    set_seed(config.seed)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)  # so that results do not depend on the number of cores
    return accelerator


class Trainer:
    """State of a training run: model, optimiser, schedule, EMA and current step.

    Args:
        config: training options.
        accelerator: result of :func:`start`.
        model: model on any device. If the model has ``blocks``, FSDP2 shards each block as a unit.
        settings: result of :func:`.config.settings_of`. Resuming from a checkpoint with different settings raises an
            error.
    """

    def __init__(self, config: Training, accelerator: Accelerator, model: nn.Module, settings: dict[str, Any]) -> None:
        self.config, self.accelerator, self.settings = config, accelerator, settings
        self.step, self.history, self.path = 0, [], config.out / "checkpoint.pt"
        self.total = torch.zeros((), dtype=torch.float64, device=accelerator.device)  # sum of losses since the last log
        self.since = 0
        self.rate = 0.0  # learning rate of the last step, before a parameter group's own scale
        self.history_file = HistoryFile(config.out / HISTORY)
        self.pace: list[float] = []  # seconds per step, one value for each log of this process
        self.clock: tuple[int, float] | None = None
        self.last = None if config.seconds else config.steps  # last step, or None if it is not known yet
        self.turn = FileLock(config.turn) if config.turn and config.seconds and accelerator.is_main_process else None
        self.counted: tuple[int, float] | None = None  # step and time from which --seconds counts
        self.counted_before: float | None = None  # seconds that earlier processes counted up to the checkpoint
        self.looked = self.counted  # step and time of the last time check
        self.look_at = -1  # step of the next time check
        self.waited = 0.0  # seconds spent waiting for the turn
        self.interruption = Interruption()
        state = self._read()
        self.raw = model.to(accelerator.device)
        # Copy the model before FSDP2 shards it, because sharded modules can't be copied.
        self.average = ModelEmaV3(self.raw, decay=config.ema, use_warmup=True) if config.ema else None
        if config.sharding == "fsdp":
            shard(self.raw)
            if self.average is not None:
                shard(self.average.module)
                self.average.foreach = False
        chosen: dict[str, Any] = {"fused": True} if config.opt == "adamw" else {}  # one kernel instead of dozens
        if config.betas:
            chosen["betas"] = parse_betas(config.betas, config.opt)
        try:
            self.inner = create_optimizer_v2(
                self.raw, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay,
                **{**config.optimizer_arguments(self.raw), **chosen},
            )  # fmt: skip
        except AssertionError as error:  # timm asserts that the packages and the GPU of an optimiser are available
            raise typer.BadParameter(
                f"--opt {config.opt}: not available here ({error}); pass another, such as adamw"
            ) from error
        self.schedule = config.build_schedule()
        self.scheduler = self.schedule.build(self.inner)
        if state is not None:
            self._load(state)
        if config.compile:
            mode = "reduce-overhead" if config.cuda_graphs else None
            self.raw.compile(dynamic=config.dynamic_shapes, mode=mode)
        wrapped = self.raw if config.sharding == "fsdp" else accelerator.prepare_model(self.raw)
        self.model, self.optimizer = wrapped, accelerator.prepare_optimizer(self.inner)

    @property
    def is_finished(self) -> bool:
        """Return whether all steps are done."""
        return self.last is not None and self.step >= self.last

    @property
    def averaged(self) -> nn.Module:
        """Model to evaluate, which is the EMA if there is one."""
        return self.raw if self.average is None else self.average.module

    def whole_weights(self) -> dict[str, Any]:
        """Return the unsharded weights to evaluate, on the first process's CPU. All processes must call this method."""
        return get_model_state_dict(self.averaged, options=WHOLE)

    def fit(
        self,
        steps: Steps,
        batch: Callable[[np.ndarray, np.ndarray], Any],
        loss: Callable[[nn.Module, Any], Tensor],
        validate: Callable[[], dict[str, float]] | None = None,
        after_step: Callable[[], bool] | None = None,
        in_processes: bool = False,
    ) -> None:
        """Train for up to ``config.steps`` steps, or for ``config.seconds`` seconds.

        Args:
            steps: function that yields the samples of each step; see :mod:`.order`.
            batch: function (indices, draws) → micro-batch.
            loss: function (model, micro-batch) → mean over the micro-batch, called under autocast.
            validate: function that is called every ``config.validate_every`` steps and returns extra values for the
                history.
            after_step: function that is called after each step and returns whether it did any work.
            in_processes: whether to use processes instead of threads for the ``config.workers`` workers. Use processes
                if ``batch`` decodes files.
        """
        config, accelerator = self.config, self.accelerator
        if self.is_finished:
            return
        start_trackers(accelerator, config, self.settings)
        if accelerator.is_main_process:
            self.history_file.write(self.history)
        chosen = divide(steps(self.step), config.accumulate, accelerator.process_index, accelerator.num_processes)
        stream = (
            prepare_in_processes(batch, chosen, config.workers, accelerator.device)
            if in_processes
            else prepare_ahead(batch, chosen, config.workers)
        )
        if accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(accelerator.device)
        columns = *Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}")
        hidden = not (accelerator.is_main_process and config.progress)
        with self.interruption.watch(), Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
            bar = progress.add_task("steps", total=self.last, completed=self.step, loss="")
            first = self.step
            while self.last is None or self.step < self.last:
                try:
                    self.total += self._advance(stream, loss)
                except DataError:
                    self._save_alone()
                    raise
                self._take_turn()
                if config.seconds:
                    self._plan(self.step - first)
                progress.update(bar, advance=1, total=self.last)
                check = validate if self._due(config.validate_every) else None
                if check or self._due(config.log_every):
                    progress.update(bar, loss=f"{self._log(check):.4f}")
                worked = after_step is not None and after_step()
                if self._due(config.save_every):
                    self.save()
                    worked = True
                if worked:
                    self.clock = self.clock and (self.step, time.perf_counter())
                self._stop_if_asked()
        finish_trackers(accelerator)

    def _save_alone(self) -> None:
        """Save a checkpoint before a data error ends a single-process run. Other processes would not see the error."""
        if self.accelerator.num_processes == 1 and self.step and self.step % self.config.save_every:
            self.save()

    def _stop_if_asked(self) -> None:
        number = self.interruption.find(self.step)
        if not number or self.step == self.last:
            return
        if self.step % self.config.save_every:
            self.save()
        finish_trackers(self.accelerator)
        raise Interrupted(f"Interrupted at step {self.step}; the checkpoint is saved in {self.config.out}", number)

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.last)

    def _now(self) -> float:
        """Wait for the device, and return the time in seconds."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
        return time.perf_counter()

    def _plan(self, done: int) -> None:
        """Compute the last step that fits into ``config.seconds``, and stretch the schedule to that step.

        ``done`` is the number of steps that this process has run. A resumed process keeps the plan in the checkpoint,
        and only excludes its first step from the time budget.
        """
        if self.counted is None and done == (STARTING if self.last is None else 1):
            now = self._now()
            self.counted = self.step, now - (self.counted_before or 0.0)
            if self.last is not None:
                return
            self.looked = self.step, now
            self.look_at = self.step + EVERY
            return
        if self.counted is None or self.looked is None or self.step != self.look_at:
            return
        (_, begun), (step, looked), now = self.counted, self.looked, self._now()
        times = torch.tensor([now - begun, now - looked], dtype=torch.float64, device=self.accelerator.device)
        mean: Any = self.accelerator.reduce(times, "mean")  # all processes need the same plan
        elapsed, recent = mean.tolist()
        if self.last is None and elapsed < self.config.seconds / 10:
            self.look_at += EVERY
            return
        pace = recent / (self.step - step)
        self._end_at(self.step + max(1, round((self.config.seconds - elapsed) / pace)))
        self.looked = self.step, now

    def _end_at(self, step: int) -> None:
        self.look_at = (self.step + step) // 2
        self.last = step
        self.schedule = self.config.stretch_schedule(step)
        self.scheduler = self.schedule.build(self.inner)
        self.scheduler.step_update(self.step + self.schedule.offset)

    def _take_turn(self) -> None:
        if self.turn is not None and not self.turn.is_locked:
            since = self._now()
            self.turn.acquire()
            self.waited += self._now() - since

    def end_turn(self) -> None:
        if self.turn is not None:
            self.turn.release()

    def counted_seconds(self) -> float | None:
        """Return how much of ``config.seconds`` has been used, or None if nothing has been counted."""
        return self.counted_before if self.counted is None else self._now() - self.counted[1]

    def _advance(self, stream: Iterator[Any], loss: Callable[[nn.Module, Any], Tensor]) -> Tensor:
        config, accelerator = self.config, self.accelerator
        set_seed(derive_seed(config.seed, self.step, accelerator.process_index))
        if not self.raw.training:
            self.model.train()
        total = torch.zeros((), device=accelerator.device)
        for micro in range(config.accumulate):
            last = micro == config.accumulate - 1
            quiet = config.sharding == "fsdp" or last  # FSDP2 accumulates reduced gradients
            with nullcontext() if quiet else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    value = loss(self.model, next(stream)) / config.accumulate
                accelerator.backward(value)
            total += value.detach()
        if config.clip:
            accelerator.clip_grad_norm_(self.raw.parameters(), config.clip)
        self.rate = next(g["lr"] for g in self.inner.param_groups if g.get("lr_scale", 1.0) == 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.scheduler.step_update(self.step + self.schedule.offset)
        if self.average is not None:
            self.average.update(self.raw, step=self.step)
        return total

    def cost(self) -> dict[str, float | None]:
        """Return the median milliseconds per step, excluding the first steps, and the peak GPU memory in MiB.

        Call this before the evaluation. None means that a value was not measured.
        """
        device = self.accelerator.device
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        return {
            "step_ms": round(1000 * float(np.median(self.pace)), 3) if self.pace else None,
            "peak_mib": None if peak is None else round(peak, 1),
        }

    def _log(self, validate: Callable[[], dict[str, float]] | None) -> float:
        """Add a row to the history. Return the mean loss since the last row due to --log-every or --validate-every."""
        loss = self._total() / (self.step - self.since)  # waits for the device
        now = time.perf_counter()
        if self.clock is not None:
            self.pace.append((now - self.clock[1]) / (self.step - self.clock[0]))
        self.clock = self.step, now
        row = {"step": self.step, "loss": loss, "lr": self.rate}
        if validate is not None:
            self.averaged.eval()
            row |= {name: float(value) for name, value in validate().items()}  # torch can't load NumPy numbers
            self.clock = self.step, time.perf_counter()
        self.history.append(row)
        if self.accelerator.is_main_process:
            self.history_file.add(self.history)
        if self._is_regular(self.step):
            self.total.zero_()
            self.since = self.step
        if self.accelerator.log_with:
            self.accelerator.log({name: value for name, value in row.items() if name != "step"}, step=self.step)
        return loss

    def _is_regular(self, step: int) -> bool:
        """Return whether the history of a longer run would also contain a row for this step."""
        config = self.config
        return step % config.log_every == 0 or (config.validate_every > 0 and step % config.validate_every == 0)

    def _total(self) -> float:
        reduced: Any = self.accelerator.reduce(self.total, "mean")
        if not torch.isfinite(reduced):
            raise FloatingPointError(
                f"the loss is {reduced.item()} after {plural(self.step, 'step')} (the last checkpoint is from an "
                "earlier step); try a lower --lr, more --warmup, or --precision bf16 instead of fp16"
            )
        return reduced.item()

    # --- checkpoints

    def save(self) -> None:
        """Save a checkpoint with unsharded tensors in one file. Only the first process writes the file."""
        state = {
            "format": FORMAT,
            "settings": self.settings,
            "step": self.step,
            "last": self.last,
            "counted": self.counted_seconds(),
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
            save_checkpoint(state, self.path, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _read(self) -> dict[str, Any] | None:
        out = self.config.out
        if not self.path.exists():
            others = [p for p in out.iterdir() if p.name not in (FOLDER, "wandb", HISTORY)] if out.is_dir() else []
            others = [p for p in others if not p.name.endswith(".part")]
            if others:
                raise typer.BadParameter(f"--out {out} is not empty and has no checkpoint.pt; choose another folder")
            return None
        state = read_checkpoint(self.path)
        defaults = {f.name: f.default for f in fields(self.config) if f.default is not MISSING}
        here = flat(self.settings)
        # For options that are newer than the checkpoint, the run used the default values.
        there = {**{key: defaults[key] for key in here.keys() & defaults.keys()}, **flat(state["settings"])}
        # In earlier versions, test sizes could affect how the training data was read. The digest shows if they did.
        old = {"test_size", "test_sizes"} & there.keys() - here.keys()
        may_differ = old | {"steps"} if here["steps"] > there["steps"] and not self.config.seconds else old
        differ = [key for key in {**there, **here} if there.get(key) != here.get(key) and key not in may_differ]
        if differ:
            shown = (
                "the data has changed" + ", or an earlier version read it at the test size" * bool(old)
                if key == "digest"
                else f"{self._as_option(key)}: was {show_value(there.get(key))}, is now {show_value(here.get(key))}"
                for key in self._without_effects(differ)
            )
            raise typer.BadParameter(
                f"--out {out} contains a run with different settings ({'; '.join(shown)}); choose another folder, or "
                f"pass the same settings{self._advise_on_size(there)}"
            )
        return state

    def _without_effects(self, differ: list[str]) -> list[str]:
        """Remove settings that differ only because other options differ."""
        panels = {find_panel(f) for f in fields(self.config) if f.name in differ}
        effects = {"digest"} if DATA in panels else set()
        if panels & {DATA, MODEL}:
            effects |= {key for key in differ if key.startswith("model.") and key != "model.model"}
        return [key for key in differ if key not in effects]

    def _advise_on_size(self, there: dict[str, Any]) -> str:
        """If the sizes differ, explain how to test or fine-tune the run with the settings ``there`` at this size."""
        here, out = self.settings, self.config.out
        sizes = [name for name in ("size", "frames") if name in here]
        if not {"reference", *sizes} <= here.keys() & there.keys() or all(here[name] == there[name] for name in sizes):
            return ""
        advice = find_reference(there, here["frames"] if here.get("causal") else 0)
        reference = f" --reference {advice}" if has_coordinates(here["model"]) else ""
        what = "length or size" if "frames" in here else "size"
        flags = {"size": "--test-size" if "frames" in here else "--test-sizes", "frames": "--test-frames"}
        changed = [name for name in sizes if here[name] != there[name]]
        test = ""
        if len(changed) == 1:  # a video run is tested at another size or at another length, not at both
            [name] = changed
            noun = "length" if name == "frames" else "size"
            test = f". To test it at this {noun}, pass {flags[name]} {here[name]} instead"
        return f"{test}. To fine-tune it at a different {what}, pass --weights {out}{reference} and another --out"

    def _as_option(self, setting: str) -> str:
        """Return the option for a setting. Settings of the model and the data have no option."""
        is_option = setting in {f.name for f in fields(self.config)}
        return f"--{setting.replace('_', '-')}" if is_option else setting

    def _continue(self, steps: int) -> None:
        """Extend a run of ``steps`` steps to ``config.steps``. Warn unless one long run has the same learning rates."""
        config = self.config
        before = replace(config, steps=steps).build_schedule().list_rates(config.lr, self.step)
        same = before == self.schedule.list_rates(config.lr, self.step)
        self.scheduler.step_update(self.step + self.schedule.offset)
        if self.history and not self._is_regular(self.history[-1]["step"]):
            self.history.pop()
        if not self.accelerator.is_main_process:
            return
        text = f"Continuing the {steps}-step run from step {self.step} to step {config.steps}."
        if not same:
            text += (
                f" Its {config.schedule} schedule was planned for {plural(steps, 'step')}, so the result differs from "
                f"a single run of {config.steps} steps; --schedule constant avoids this in a new run."
            )
        typer.echo(text, err=True)

    def _load(self, state: dict[str, Any]) -> None:
        try:
            self._take(state)
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise typer.BadParameter(
                f"{self.path} does not fit this model ({first_sentence(error)}); choose another --out"
            ) from error

    def _take(self, state: dict[str, Any]) -> None:
        for part in ("model", *(["average"] if self.average is not None else [])):
            there, here = (
                {f"{name} {tuple(value.shape)}" for name, value in tensors.items()}
                for tensors in (state[part], self.raw.state_dict())
            )
            differ = sorted(there ^ here)  # torch does not report missing entries
            if differ:
                raise KeyError(f"{part}: {', '.join(differ[:3])} missing from the checkpoint or the model")
        set_optimizer_state_dict(self.raw, self.inner, state["optimizer"], options=WHOLE)
        set_model_state_dict(self.raw, state["model"], options=WHOLE)
        if self.average is not None:
            set_model_state_dict(self.average.module, state["average"], options=WHOLE)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.history, self.counted_before = state["step"], state["history"], state.get("counted")
        if state["last"] is not None and self.config.seconds:
            self._end_at(state["last"])
        total, self.since = state["losses"]
        self.total.fill_(total)
        if state["settings"]["steps"] != self.config.steps and not self.config.seconds:
            self._continue(state["settings"]["steps"])
        elif not self.is_finished and self.accelerator.is_main_process:
            typer.echo(f"Resuming from step {self.step}.", err=True)


def shard(model: nn.Module) -> None:
    """Shard a model with FSDP2, with one unit per block."""
    from torch.distributed.fsdp import fully_shard

    blocks: Sequence[nn.Module] = list(getattr(model, "blocks", ()))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
