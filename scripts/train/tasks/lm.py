"""Train a small causal language model on text, byte by byte, with any encoding of q and k.

    lrpe-md train lm --data TEXT --out runs/lm --encoding cosine-softplus-phase
    torchrun --nproc-per-node 4 -m lrpe_md.scripts.train lm --data TEXT --out runs/lm                on four GPUs
    lrpe-md train sample runs/lm --prompt "**ROMEO**"

TEXT is a file, or a folder of .txt and .md files. docs/text.md explains how to get Shakespeare's plays. The command
writes checkpoint.pt, history.csv, result.json and evaluation.csv (bits per byte, including at longer lengths) to the
run's folder. Run the same command again to resume an interrupted run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
import typer
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md import parameter_groups
from lrpe_md.frequencies import linear_scaling, ntk_scaling, yarn_scaling
from lrpe_md.integrations import set_scaling

from ....models.lm import CausalLm, LmConfig, Scaling, build_layers
from ....models.lm_decode import generate, left_pad
from ...common.devices import sent
from ...common.folder import write
from ...common.options import choose
from ..checkpoint import restore
from ..config import MODEL, OPTIMISER, Training, changed, check_width, describe, option
from ..data.text import check_lengths, draw_windows, load_text
from ..encodings import TEXT, Backbone, restore_arguments
from ..loop import Trainer
from ..schedules import Schedule
from ..work import Work, train

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 32, "depth": 2, "num_heads": 4, "num_kv_heads": 2, "hidden": 64},
    "small": {"dim": 384, "depth": 6, "num_heads": 6, "num_kv_heads": 2, "hidden": 1024},
}
# Maps a name to a function (factor, trained length) that returns the argument of CausalLm.rescale.
SCALINGS: dict[str, Callable[[float, int], Scaling]] = {
    "linear": lambda factor, trained: partial(linear_scaling, factor=factor),
    "ntk": lambda factor, trained: partial(ntk_scaling, factor=factor),
    "yarn": lambda factor, trained: partial(yarn_scaling, factor=factor, original_length=trained),
}
UNSCALED = "has no effect, because --encoding none has no frequencies to scale; leave out --scaling"
DEFAULT_LENGTHS = "512,1024,2048,4096,8192"
EVAL_BYTES = 2**18
EVAL_TOKENS = 2**16  # tokens in an evaluation batch, and in the validation text


def parse_lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise typer.BadParameter(f"--lengths: expected positive numbers, separated by commas, got {text!r}")
    return lengths


@dataclass(frozen=True, kw_only=True)
class LmTraining(Training):
    """Train a causal language model on text, byte by byte, and evaluate it at the training length and beyond.

    Command: lrpe-md train lm --data TEXT --out runs/lm --encoding cosine-softplus-phase --precision auto

    On two CPU cores, in two minutes: lrpe-md train lm --data TEXT --out runs/tiny --size tiny
    --length 64 --lengths 64,128 --batch 16 --steps 2000 --lr 1e-2

    Cost: 9.5 M parameters. 1,000 steps with 64 windows of 512 bytes each take 2e15 floating-point operations. The steps
    take less than a minute on an H200 shared with two or three other runs.

    Expect: 1.85 bits per byte on Shakespeare's plays at the training length. For longer sequences, see
    docs/results/ablate-lm.md.
    """

    backbone: ClassVar[Backbone] = TEXT
    loss_unit: ClassVar[str] = "nats per byte"
    steps: int = changed("steps", 2000)
    batch: int = changed("batch", 64, "Windows of text per step, over all processes and micro-batches.")
    lr: float = changed("lr", 1e-3, "Learning rate after the warm-up; cosine and wsd lower it to a tenth.")
    betas: str = changed("betas", "0.9,0.95")
    frequency_lr: float = option(
        1.0, "Learning rate of learned frequencies, as a fraction of --lr.", least=0, off=True, panel=OPTIMISER
    )
    weight_decay: float = changed("weight_decay", 0.1, "Weight decay, applied only to matrices.")
    ema: float = changed("ema", 0.0)
    precision: str = changed("precision", "auto")
    validate_every: int = changed("validate_every", 250)
    save_every: int = changed("save_every", 250)
    data: Path = field(metadata=describe("Text file, or folder of .txt and .md files.", free=True))
    encoding: str = option("rotate", TEXT.help)
    attention: str = option("softmax", TEXT.attention_help)
    memory: str = option(
        "", "How linear attention layers forget, as KEY=VALUE,...: decay (retnet, lightning), learnable (true, false). "
        "By default, these layers forget nothing."
    )  # fmt: skip
    size: str = option("small", "Size of the model: tiny (27,000 parameters) or small (9.5 million).", panel=MODEL)
    dim: int = option(0, "Embedding width; 0 uses the value from --size.", least=0)
    depth: int = option(0, "Number of blocks; 0 uses the value from --size.", least=0)
    heads: int = option(0, "Number of attention heads; 0 uses the value from --size.", least=0)
    length: int = option(512, "Length of a text window, in bytes.", least=1)
    lengths: str = option(
        DEFAULT_LENGTHS,
        "Additional lengths to evaluate at, in bytes. Default lengths that are too long for the held-out text are "
        "skipped.",
        free=True,
    )  # fmt: skip
    scaling: str = option(
        "", f"Additional length scalings to evaluate, separated by commas: {', '.join(SCALINGS)}.", free=True
    )
    test_bytes: int = option(EVAL_BYTES, "Maximum number of bytes of held-out text to evaluate.", free=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("--size", [self.size], SIZES)
        choose("--scaling", self.scalings, SCALINGS)
        parse_lengths(self.lengths)
        check_width("--dim", self.architecture["dim"], self.architecture["num_heads"])
        self.check_encoding(lambda **arguments: CausalLm(LmConfig(**arguments)), self.model_arguments)
        for name in self.scalings:
            encoding: Any = build_layers(replace(self.model, depth=1, attention="softmax", memory=None))[0]
            rescale(encoding, name, 2.0, self.length, self.encoding)
            if name == "yarn" and encoding.learnable == "raw":  # raw frequencies may become negative in training
                raise typer.BadParameter(
                    f"--scaling yarn: needs a decreasing geometric series of frequencies, but --encoding "
                    f"{self.encoding} learns each frequency; leave out yarn"
                )

    @property
    def scalings(self) -> list[str]:
        return [name for name in (part.strip() for part in self.scaling.split(",")) if name]

    @property
    def architecture(self) -> dict[str, int]:
        """Sizes of the model. The MLP width and the number of key heads follow from --dim and --heads."""
        base = SIZES[self.size]
        dim, heads = self.dim or base["dim"], self.heads or base["num_heads"]
        return {
            "dim": dim, "depth": self.depth or base["depth"], "num_heads": heads,
            "num_kv_heads": math.gcd(heads, base["num_kv_heads"]), "hidden": base["hidden"] * dim // base["dim"],
        }  # fmt: skip

    @property
    def model_arguments(self) -> dict[str, Any]:
        chosen = TEXT.find(self.encoding)
        given: dict[str, Any] = {"encoding": chosen.encoding or "none", **chosen.arguments}
        given["phase"] = bool(given.get("phase"))  # the model only has a phase on the keys
        return {**self.architecture, **TEXT.attention_arguments(self.attention, self.memory), **given}

    @property
    def model(self) -> LmConfig:
        return LmConfig(**self.model_arguments)

    def build_schedule(self) -> Schedule:
        warmup = self.warmup_steps
        return Schedule(
            length=max(self.steps - warmup, 1), warmup=warmup, start=0.0, end=0.1 * self.lr, warmup_prefix=True,
            offset=1, kind=self.schedule, cooldown=self.cooldown,
        )  # fmt: skip

    def optimizer_arguments(self, model: nn.Module) -> dict[str, Any]:
        return {"param_group_fn": partial(scaled_groups, config=self)}


def rescale(model: nn.Module, scaling: str, factor: float, trained: int, encoding: str) -> None:
    """Rescale the frequencies of a model or encoding in place.

    Raises:
        typer.BadParameter: if the encoding does not support the scaling.
    """
    if encoding == "none":
        raise typer.BadParameter(f"--scaling {scaling}: {UNSCALED}")
    try:
        set_scaling(model, SCALINGS[scaling](factor, trained))
    except ValueError as error:
        reason = str(error).removeprefix("scaling: ")
        raise typer.BadParameter(
            f"--scaling {scaling}: not supported with --encoding {encoding} ({reason}); leave out {scaling}"
        ) from error


# --- training --------------------------------------------------------------------------------------------------------


def scaled_groups(model: nn.Module, config: LmTraining) -> list[dict[str, Any]]:
    """Return the groups from :func:`lrpe_md.parameter_groups`, with learning rates relative to the schedule."""
    groups = parameter_groups(model, 1.0, weight_decay=config.weight_decay, frequency_lr=config.frequency_lr)
    for group in groups:
        group["lr_scale"] = group.pop("lr")
    return groups


def batch(config: LmTraining, text: Tensor, indices: np.ndarray, draws: np.ndarray) -> Tensor:
    """Return windows of the text, int64 (B, length + 1)."""
    offsets = torch.arange(config.length + 1, device=text.device)
    return text[sent(indices, text.device)[:, None] + offsets].long()


def patches(config: LmTraining) -> int:
    """Return the number of tokens in a step."""
    return config.batch * config.length


def loss(model: nn.Module, window: Tensor) -> Tensor:
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def validate(config: LmTraining, text: Tensor, trainer: Trainer) -> dict[str, float]:
    """Return the bits per byte on held-out text at the training length."""
    model: Any = trainer.averaged
    length, limit = min(config.length, len(text) - 1), min(config.test_bytes, EVAL_TOKENS)
    return {"bits_per_byte": evaluate(trainer.accelerator, model, text, length, limit).mean().item()}


def prepare(config: LmTraining, device: torch.device) -> Work:
    data, others = load_text(config.data), parse_lengths(config.lengths)
    if config.lengths == DEFAULT_LENGTHS:
        others = tuple(length for length in others if length < len(data.validation))
    lengths = tuple(sorted({config.length, *others}))
    check_lengths(data, config.length, lengths)
    model, text = CausalLm(config.model), data.to(device)

    def finish(trainer: Trainer) -> dict[str, Any]:
        rows, trained = [], config.length
        for name in (None, *config.scalings):
            model: Any = trainer.averaged
            found = measure(trainer.accelerator, model, text.validation, trained, lengths, name, config.test_bytes)
            rows += [{"scaling": name or "none", **row} for row in found]
        show(config, trainer, rows)
        return {
            "encoding": config.encoding, "attention": config.attention, "seed": config.seed, "evaluation": rows,
            "tokens": patches(config), "test_bytes": min(config.test_bytes, len(text.validation) - 1),
        }  # fmt: skip

    arguments = {each.name: getattr(config.model, each.name) for each in fields(config.model)}
    settings = {"model": arguments, "digest": data.digest}
    steps = partial(draw_windows, len(text.train) - config.length, config.batch, config.seed)
    check = partial(validate, config, text.validation)
    return Work(model, settings, steps, partial(batch, config, text.train), loss, finish, check)


def show(config: LmTraining, trainer: Trainer, rows: list[dict[str, Any]]) -> None:
    """In the first process, write evaluation.csv and print it as a table."""
    if not trainer.accelerator.is_main_process:
        return
    write(config.out / "evaluation.csv", pd.DataFrame(rows).to_csv(index=False))
    whole = pd.DataFrame(rows).query("first == 0 and last == length")
    print(f"Bits per byte of {config.encoding} by length, trained at {config.length}:")
    print(whole.pivot(index="scaling", columns="length", values="bits_per_byte").to_string(float_format="%.3f"))
    if skipped := skipped_lengths(config.lengths, whole.length):
        print(f"Lengths without results, because they are too long for the held-out text: {skipped}")


def skipped_lengths(requested: str, evaluated: Iterable[int]) -> str:
    """Return the requested lengths that were not evaluated, or ""."""
    return ", ".join(f"{length:,}" for length in sorted({*parse_lengths(requested)} - {*evaluated}))


run = partial(train, prepare)


# --- evaluation ------------------------------------------------------------------------------------------------------


def count_windows(length: int, num_bytes: int) -> int:
    """Return how many adjacent windows are evaluated if ``num_bytes`` bytes are available."""
    return max(num_bytes // length, 1)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: CausalLm, text: Tensor, length: int, limit: int = EVAL_BYTES) -> Tensor:
    """Return the bits (length,) at each position, averaged over adjacent windows of the first ``limit`` bytes.

    All lengths that divide ``limit`` are measured on the same bytes.
    """
    count = count_windows(length, min(limit, len(text) - 1))
    starts = torch.arange(count, device=text.device) * length
    steps = torch.arange(length + 1, device=text.device)
    total = torch.zeros(length, dtype=torch.float64, device=text.device)
    model.eval()
    # FSDP2 gathers weights in every forward pass, so pad to the same number of windows per process. Padding is ignored.
    world, rank = accelerator.num_processes, accelerator.process_index
    padded = F.pad(starts, (0, -count % world), value=-1)[rank::world]
    for part in padded.split(max(EVAL_TOKENS // length, 1)):
        window = text[part.clamp(min=0)[:, None] + steps].long()
        with accelerator.autocast():
            logits = model(window[:, :-1])
        bits = F.cross_entropy(logits.float().mT, window[:, 1:], reduction="none").double()
        total += bits[part >= 0].sum(0)
    summed: Any = accelerator.reduce(total, reduction="sum")
    return summed / count / math.log(2)


def measure(
    accelerator: Accelerator, model: CausalLm, text: Tensor, trained: int, lengths: tuple[int, ...],
    scaling: str | None = None, limit: int = EVAL_BYTES,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the bits per byte at each length. The longest length is also split into ranges of positions.

    In a row for a complete length, first is 0 and last is ``length``. At lengths beyond the training length, a scaling
    uses the factor length / training length.
    """
    rows = []
    text = text.to(accelerator.device)
    for length in lengths:
        stretch = SCALINGS[scaling](length / trained, trained) if scaling and length > trained else None
        model.rescale(stretch)
        bits = evaluate(accelerator, model, text, length, limit)
        ends = [0, *dict.fromkeys(length >> i for i in range(7, 0, -1) if length >> i), length]
        parts = [(0, length), *(itertools.pairwise(ends) if length == max(lengths) else ())]
        rows += [
            {"length": length, "first": a, "last": b, "bits_per_byte": round(bits[a:b].mean().item(), 5)}
            for a, b in parts
        ]
    model.rescale(None)
    return rows


# --- sampling --------------------------------------------------------------------------------------------------------


def build_model(settings: dict[str, Any]) -> CausalLm:
    """Build the model of a run from its settings."""
    return CausalLm(LmConfig(**restore_arguments(settings["model"])))


def sample_text(
    state: dict[str, Any], prompts: list[str], seed: int, device: torch.device, *, tokens: int, temperature: float,
    top_p: float, scaling: str | None,
) -> None:  # fmt: skip
    """Continue prompts with the model in a checkpoint, and print the results."""
    model, trained = restore(build_model(state["settings"]), state), state["settings"]["length"]
    if not all(prompts):
        raise typer.BadParameter(
            "--prompt: expected text to continue, got ''; without --prompt, text starts on a new line"
        )
    batch, padding = left_pad([torch.tensor(list(p.encode())) for p in prompts])
    if scaling:
        choose("--scaling", [scaling], SCALINGS)
        rescale(model, scaling, max((batch.shape[1] + tokens) / trained, 1.0), trained, state["settings"]["encoding"])
    generator = torch.Generator(device).manual_seed(seed)
    made = generate(
        model.to(device),
        batch.to(device),
        tokens,
        temperature=temperature,
        top_p=top_p,
        generator=generator,
        padding=padding,
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for row, pads in zip(made.tolist(), padding.tolist(), strict=True):
        console.print(bytes(row[pads:]).decode(errors="replace"))
