"""Train a diffusion transformer on images, videos or latents, with captions, labels or neither, and sample from it.

    lrpe-md train diffusion --data emoji64.zip --out runs/emoji --encoding rotate --precision bf16
    torchrun --nproc-per-node 4 -m lrpe_md.scripts.train diffusion --data FOLDER --out runs/mine --size 64 --patch 4

The command writes checkpoint.pt, history.csv, result.json, samples.npz, samples.png and, for captions, words.txt to the
run's folder. Run the same command again to resume an interrupted run. Use `lrpe-md train sample` to generate samples
for your own prompts or classes. docs/diffusion.md shows how to build emoji64.zip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import typer
from torch import Tensor, nn

from ....models.dit import SIZES, DiT
from ....models.flow import Prediction, Times, draw_times, flow_matching_loss
from ...common.devices import sent
from ...common.folder import read_json, save_whole, write
from ...common.options import choose, in_shell_terms
from ..conditions import Captions, EncoderSize, build_encoder
from ..config import (
    MODEL,
    OPTIMISER,
    RUN,
    changed,
    check_ignored,
    check_model_options,
    check_width,
    describe,
    option,
)
from ..data.buckets import MAX_RATIO, MIX_SIZES, TEST_SIZE, Sizes, parse_mixed
from ..data.footage import is_footage
from ..data.source import Encoding, GenerativeTraining, Source, load_source
from ..data.values import LATENTS
from ..encodings import CAPTIONED, MEMORY_HELP, Backbone, has_position_table
from ..generation import TIMES, Evaluation
from ..loop import Trainer
from ..prompts import words_of
from ..samplers import SAMPLERS, Sampling
from ..samples import keep, pixels, write_sheet
from ..vae import Decoder, open_decoder
from ..work import Work, report, train


@dataclass(frozen=True, kw_only=True)
class DiffusionTraining(GenerativeTraining):
    """Train a diffusion transformer (flow matching) on images, videos or latents.

    Command: lrpe-md train diffusion --data emoji64.zip --without variation --out runs/emoji --precision bf16

    Cost: 20.9 M parameters, and 256 patches per image at 32×32. 2,500 steps take three to five minutes on an H200
    shared by five runs.

    Expect: an initial loss of 1 plus the images' mean square (1.66 for emoji), because the model outputs zero at first.
    The final loss on held-out captions is 0.141 to 0.146 (0.171 to 0.175 with linear attention, and 0.303 without
    positions). The held-out loss uses the same times and noise for every encoding. The runs behind these figures read
    images at 48 pixels and resized them to 32, as in earlier versions.
    """

    backbone: ClassVar[Backbone] = CAPTIONED
    data: Path = field(
        metadata=describe(
            "Images (a folder, a zip, an .npz, or idx files), shards (.tar), a Hugging Face dataset (hf:OWNER/NAME), "
            "videos (a file or a folder), or the output folder of `train latents`.",
            free=True,
        )
    )
    steps: int = changed("steps", 2500)
    size: int = option(32, "Height and width in training, in pixels; latents have a fixed size.", least=1)
    mix_sizes: str = option("", f"{MIX_SIZES} Latents keep their own sizes.")
    max_ratio: float = option(1.0, f"{MAX_RATIO} Latents keep their own sizes.", least=1)
    test_size: int = option(
        48, f"Additional size to test and sample at, in pixels; 0 tests only at --size. Not for latents. {TEST_SIZE}",
        least=0, off=True, free=True,
    )  # fmt: skip
    vae: str = option(
        "auto", "VAE that decodes latents: a folder, a Hub ID, or auto (the VAE that encoded them).", free=True
    )
    text_features: Path | None = field(
        default=None,
        metadata=describe(
            "Output folder of `train features`, for training on text features instead of a text encoder.", free=True
        ),
    )
    encoding: str = option("rotate", CAPTIONED.help)
    attention: str = option("softmax", CAPTIONED.attention_help)
    memory: str = option("", f"{MEMORY_HELP} Videos only, with directions=both.")
    model: str = option(
        "", "Published size, such as XL/2, instead of --patch, --dim, --depth and --heads.", panel=MODEL
    )
    patch: int = option(2, "Height and width of a patch, in pixels or latents.", least=1)
    dim: int = option(256, "Embedding width.", least=1)
    depth: int = option(8, "Number of blocks.", least=1)
    heads: int = option(4, "Number of attention heads.", least=1)
    mlp: str = option("gelu", "MLP of the blocks: gelu, gelu_tanh or swiglu.", panel=MODEL)
    modulation: str = option(
        "block",
        "Layers that compute shifts, scales and gates from the time: block (separate for each block) or shared.",
        panel=MODEL,
    )
    reg_tokens: int = option(0, "Number of register tokens.", least=0, off=True, panel=MODEL)
    text_attention: str = option(
        "joint",
        "How patches attend to text: joint (separate weights), single (the same weights) or cross.",
        panel=MODEL,
    )
    checkpointing: bool = option(
        False, "Recompute the blocks in the backward pass, to save memory.", free=True, panel=MODEL
    )
    text_dim: int = option(
        256,
        "Width of the text encoder or of class embeddings. The text encoder has --heads heads, or fewer if the width "
        "is not a multiple of 2 × --heads.",
        least=1,
    )
    text_depth: int = option(3, "Number of blocks of the text encoder.", least=1)
    text_length: int = option(64, "Maximum length of a caption, in bytes.", least=1)
    drop_text: float = option(
        0.1, "Fraction of captions or labels to drop in training, for guidance.", least=0, below=1
    )
    times: str = option("logit-normal", "Distribution of times in training: logit-normal or uniform.", panel=OPTIMISER)
    prediction: str = option("velocity", "What the model predicts: velocity, noise or sample.", panel=OPTIMISER)
    scale: float = option(3.0, "Guidance scale for sampling; 1 disables guidance.", free=True, least=0, panel=RUN)
    sampler: str = option("heun", f"Sampler: one of {', '.join(SAMPLERS)}.", free=True, panel=RUN)
    sample_steps: int = option(
        50, "Number of sampling steps; with heun, each step calls the model twice.", free=True, least=1, panel=RUN
    )
    samples: int = option(12, "Number of held-out conditions to sample.", free=True, least=1, panel=RUN)
    sample_every: int = option(
        0,
        "Number of steps between two sheets of samples; 0 draws a single sheet at the end.",
        free=True,
        least=0,
        off=True,
        panel=RUN,
    )
    test_samples: int = option(256, "Maximum number of held-out samples to test on.", free=True, least=1, panel=RUN)
    distance_samples: int = option(
        0, "Number of samples for the Fréchet distance in random features, at each validation and at the end; 0 "
            "disables it.",
        free=True, least=0, off=True, panel=RUN,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model:
            sizes = size_of(self.model)
            check_model_options(self, {**sizes})
            for name, value in sizes.items():
                object.__setattr__(self, name, value)  # the fields of a configuration are frozen
        choose("--mlp", [self.mlp], ("gelu", "gelu_tanh", "swiglu"))
        choose("--modulation", [self.modulation], ("block", "shared"))
        choose("--text-attention", [self.text_attention], ("joint", "single", "cross"))
        choose("--times", [self.times], ("logit-normal", "uniform"))
        choose("--prediction", [self.prediction], ("velocity", "noise", "sample"))
        choose("--sampler", [self.sampler], SAMPLERS)
        if not can_guide(vars(self)) and self.condition != "none" and self.scale != 1:
            raise typer.BadParameter(
                f"--scale: expected 1 with --drop-text 0, because guidance needs a trained empty condition, got "
                f"{self.scale:g}; pass --scale 1, or a larger --drop-text"
            )
        check_width("--dim", self.dim, self.heads, 2)
        self._check_sizes()
        self.check_encoding(DiT, {**model_arguments(self), "text_attention": "joint"})  # checked before text is loaded

    def _check_sizes(self) -> None:
        if self.latents is None:
            check_ignored(
                self, "vae", "only works with latents; pass the output of `train latents`, or leave out --vae"
            )
            for name, size in (("--size", self.size), ("--test-size", self.test_size)):
                if size % self.patch:
                    raise typer.BadParameter(f"{name}: expected a multiple of --patch {self.patch}, got {size}")
            parse_mixed(self.mix_sizes, self.size, self.patch)
        else:
            sides = {n for shapes in self.latents["shapes"].values() for shape in shapes for n in shape}
            wrong = sorted(n // self.latents["factor"] for n in sides if n // self.latents["factor"] % self.patch)
            if wrong:
                raise typer.BadParameter(
                    f"--patch {self.patch}: expected a divisor of {', '.join(map(str, wrong))}, the sides of the "
                    "latents; recompute the latents with `train latents --patch`"
                )
            sizes = sorted(map(int, self.latents["shapes"]))
            if self.size not in (DiffusionTraining.size, *sizes):
                raise typer.BadParameter(
                    f"--size {self.size}: the latents have a fixed size of {', '.join(map(str, sizes))} pixels; leave "
                    "out --size, or recompute the latents with `train latents --size`"
                )
            check_ignored(
                self, "mix_sizes max_ratio without label",
                "latents have fixed sizes and conditions; pass {option} to `train latents` instead",
            )  # fmt: skip
            if self.test_size not in (0, DiffusionTraining.test_size):
                raise typer.BadParameter(
                    f"--test-size {self.test_size}: latents can only be tested at their own sizes; leave out "
                    "--test-size"
                )

    @property
    def dynamic_shapes(self) -> bool | None:
        if self.latents is None:
            return None if self.max_ratio > 1 or len(self.train_sizes) > 1 else False
        return None if sum(map(len, self.latents["shapes"].values())) > 1 else False

    @cached_property
    def latents(self) -> dict[str, Any] | None:
        """Content of latents.json, or None if the data is not latents."""
        return read_json(self.data / LATENTS) if (self.data / LATENTS).is_file() else None

    @cached_property
    def num_axes(self) -> int:
        """Number of axes, 3 for videos and 2 for images."""
        is_video = is_footage(self.data) if self.latents is None else self.latents["lengths"] is not None
        return 3 if is_video else 2

    @property
    def text_encoder(self) -> EncoderSize:
        heads = math.gcd(self.heads, max(self.text_dim // 2, 1))  # heads of an even width
        return EncoderSize(self.text_dim, self.text_depth, heads, self.text_length)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.sampler, self.sample_steps, self.scale, cast(Prediction, self.prediction))


def can_guide(settings: dict[str, Any]) -> bool:
    """Return whether a run with these settings trains the empty condition, or starts from weights that may have."""
    return settings["drop_text"] > 0 or bool(settings.get("weights"))


def size_of(name: str) -> dict[str, int]:
    """Return the options that define a published size."""
    size, _, patch = name.partition("/")
    choose("--model", [size], SIZES)
    if not patch.isdecimal() or not int(patch):
        raise typer.BadParameter(f"--model: expected SIZE/PATCH, such as XL/2, got {name}")
    sizes = SIZES[size]
    return {"patch": int(patch), "dim": sizes["embed_dim"], "depth": sizes["depth"], "heads": sizes["num_heads"]}


def model_arguments(config: DiffusionTraining) -> dict[str, Any]:
    return {
        "mlp": config.mlp, "modulation": config.modulation, "reg_tokens": config.reg_tokens,
        "text_attention": config.text_attention,
        "num_axes": config.num_axes, "in_chans": 3 if config.latents is None else config.latents["channels"],
        "patch_size": config.patch, "embed_dim": config.dim, "depth": config.depth, "num_heads": config.heads,
        **CAPTIONED.arguments(config.encoding, config.attention, config.memory),
    }  # fmt: skip


def build(config: DiffusionTraining, source: Source | None = None) -> DiT:
    """Build the model for a data source. Without a source, build it for captioned images."""
    if source is None:
        encoder = build_encoder(Captions((), config.text_encoder).settings)
    else:
        if isinstance(source.condition, Captions) and config.text_dim % 2:
            near = f"pass --text-dim {config.text_dim + 1}"
            raise typer.BadParameter(f"--text-dim: expected an even number, got {config.text_dim}; {near}")
        encoder = source.condition.encoder()
    try:
        model = DiT(text_encoder=encoder, **model_arguments(config))
    except ValueError as error:
        raise typer.BadParameter(f"--text-attention {config.text_attention}: {in_shell_terms(error)}") from error
    model.set_grad_checkpointing(config.checkpointing)
    return model


def open_source(config: DiffusionTraining, device: torch.device) -> Source:
    test = (config.test_size,) if config.test_size else ()
    sizes = Sizes(config.train_sizes, test, config.patch, config.max_ratio)
    return load_source(config, sizes, device, Encoding(config.text_encoder, config.text_features))


def batch(config: DiffusionTraining, source: Source, indices: np.ndarray, draws: np.ndarray) -> tuple[Any, ...]:
    """Return values, conditions, and a mask of the samples whose condition is dropped."""
    x, text = source.train_batch(indices, draws)
    return x, text, None if text is None else sent(draws / 2**63 < config.drop_text, source.values.device)


def patches(config: DiffusionTraining) -> int:
    """Return the mean number of patches in a step. All training sizes are used equally often."""
    sizes, by = config.train_sizes, config.patch
    if config.latents is not None:
        sizes, by = tuple(map(int, config.latents["shapes"])), by * config.latents["factor"]
    frames = config.frames if config.num_axes == 3 else 1
    return round(config.batch * frames * sum((size // by) ** 2 for size in sizes) / len(sizes))


def loss(config: DiffusionTraining, model: nn.Module, samples: tuple[Any, ...]) -> Tensor:
    x, text, drop = samples
    t = draw_times(len(x), cast(Times, config.times), device=x.device)
    prediction = cast(Prediction, config.prediction)
    return flow_matching_loss(model, x, text, t, torch.randn_like(x), drop=drop, prediction=prediction).mean()


def make_evaluation(
    config: DiffusionTraining, source: Source, device: torch.device, decoder: Decoder | None = None
) -> Evaluation:
    patch_size = (1,) * (config.num_axes - 2) + (config.patch, config.patch)
    prediction = cast(Prediction, config.prediction)
    can_rescale = not has_position_table(model_arguments(config))
    return Evaluation(source, patch_size, decoder, prediction, config.test_samples, can_rescale, device)


def prepare(config: DiffusionTraining, device: torch.device) -> Work:
    decoder = None if config.latents is None else open_decoder(config.latents, config.vae, device)
    source = open_source(config, device)
    if config.is_new:
        source.check_batch(config.batch)  # check before anything is written
    report(source.describe_held_out())
    if isinstance(source.condition, Captions):
        report(source.condition.describe_cuts(), source.condition.describe_held_out(source.train, source.held_out))
    model = build(config, source)
    evaluation = make_evaluation(config, source, device, decoder)

    def finish(trainer: Trainer) -> dict[str, Any]:
        autocast = trainer.accelerator.autocast
        result = {
            "encoding": config.encoding, "attention": config.attention, "seed": config.seed,
            "held_out": evaluation.evaluate(trainer.averaged, autocast), **measure_distance(trainer),
            "train_pairs": len(source.train), "tokens": patches(config),
        }  # fmt: skip
        show(config, evaluation, trainer, "samples")
        if trainer.accelerator.is_main_process and isinstance(source.condition, Captions):
            known = words_of(source.names(source.train))
            write(config.out / "words.txt", "".join(f"{word}\n" for word in sorted(known)))
        return result

    def measure_distance(trainer: Trainer) -> dict[str, float]:
        if not config.distance_samples:
            return {}
        allow_sampling(config, trainer)
        found = evaluation.distance(
            trainer.averaged, config.sampling, config.distance_samples, trainer.accelerator.autocast
        )  # fmt: skip
        return {"frechet_random_features": found}

    def validate(trainer: Trainer) -> dict[str, float]:
        """Evaluate on the held-out samples, at the training size."""
        losses = evaluation.losses(trainer.averaged, evaluation.settings[0], trainer.accelerator.autocast)
        return {"held_out": sum(losses) / TIMES, **measure_distance(trainer)}

    def after_step(trainer: Trainer) -> bool:
        if not config.sample_every or trainer.step % config.sample_every:
            return False
        if trainer.step < config.save_every:  # a run whose folder contains files but no checkpoint can't be resumed
            trainer.save()
        trainer.averaged.eval()
        show(config, evaluation, trainer, f"samples-{trainer.step:07}")
        return True

    settings = {"model": model_arguments(config), "digest": source.digest, "condition": source.condition.settings}
    settings |= {"size": source.train_sizes[0], "train_sizes": list(source.train_sizes)}
    if source.latents is not None:
        settings |= {"latents": source.latents}
    steps, make = source.order(config.batch, config.seed), partial(batch, config, source)
    return Work(
        model, settings, steps, make, partial(loss, config), finish, validate, after_step, source.is_streamed
    )  # fmt: skip


def allow_sampling(config: DiffusionTraining, trainer: Trainer) -> None:
    """Allow sampling to call a sharded model's methods other than ``forward``."""
    if config.sharding == "fsdp":
        from torch.distributed.fsdp import register_fsdp_forward_method

        for name in {"encode_text", "empty_text"} - vars(trainer.averaged).keys():  # not registered yet
            register_fsdp_forward_method(trainer.averaged, name)


def show(config: DiffusionTraining, evaluation: Evaluation, trainer: Trainer, name: str) -> None:
    """In the first process, write samples to NAME.npz and NAME.png."""
    allow_sampling(config, trainer)
    captions, columns = evaluation.draw(
        trainer.averaged, config.sampling, config.samples, trainer.accelerator.autocast
    )  # fmt: skip
    if trainer.accelerator.is_main_process:
        images = {column: pixels(values) for column, values in columns.items()}
        save_whole(config.out / f"{name}.npz", lambda part: keep(part, captions, images))
        save_whole(config.out / f"{name}.png", lambda part: write_sheet(part, captions, images))


run = partial(train, prepare)
