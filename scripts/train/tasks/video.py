"""Train a video transformer on clips, with classes or self-supervised labels, and test it at other lengths and sizes.

    lrpe-md train video --data FOLDER --out runs/arrow --encoding rotate
    lrpe-md train video --data FOLDER --out runs/actions --task labels --no-motion --sampling uniform
    torchrun --nproc-per-node 4 -m lrpe_md.scripts.train video --data FOLDER --out runs/arrow --precision bf16

With ``--task labels``, FOLDER contains either CLASS/*.mp4, or train/CLASS/*.mp4 and val/CLASS/*.mp4. Without val, about
1/--parts of the videos are held out. The command writes checkpoint.pt, history.csv, result.json and model.safetensors
to the run's folder. Run the same command again to resume an interrupted run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from ....models.video import LrpeVideoTransformer, lrpe_video_tiny_patch16_224
from ...common.devices import sent
from ...common.options import choose
from ..config import MODEL, Training, changed, check_ignored, check_width, describe, option
from ..data.buckets import TEST_SIZE
from ..data.clips import RESOLUTION, SAMPLINGS, LabelledVideos, Sampling, load_labelled
from ..data.records import average_by_class, describe_few, describe_held_out
from ..data.videos import CACHE, TASKS, Footage, decode, find_cache, load_footage, ordered
from ..encodings import MEMORY_HELP, VIDEOS, Backbone, explain_single_patch, has_coordinates, restore_arguments
from ..loop import Trainer
from ..order import shuffle, steps_per_epoch
from ..outcome import placements
from ..work import Work, report, train


@dataclass(frozen=True, kw_only=True)
class VideoTraining(Training):
    """Train a video transformer to predict the direction of time, the order of shuffled chunks of a clip, or classes.

    Command: lrpe-md train video --data FOLDER --out runs/order --task order --precision bf16 --compile

    Cost: each step shows --batch clips, each with two labels. By default, a model with 2.7 M parameters trains for
    1,500 steps of 64 × 288 tokens. Training takes 35 to 70 seconds on an H200 shared with six other runs, and hours on
    a CPU. Decoded frames take 7 kB each at 48×48, and another 12 kB each at the test size, 64×64.

    Expect: with --encoding none or space-only, the model can't see the order of frames. At any length, its accuracy is
    at chance level (50% for arrow, 4.2% for order), up to rounding errors. Cosine without a phase is also at chance
    level for arrow: its q·k is an even function of the distance, so a clip and its reverse look the same. For order,
    other encodings reach 20 to 60% in 3,000 steps, or stay at chance level. The accuracy only starts to improve after
    hundreds to thousands of steps. For arrow, the model memorises eleven minutes of video, and only reaches 43 to 54%
    on other minutes of the same videos. Compression artefacts between key frames can reveal the direction of time just
    as motion does; small sizes hide most of the artefacts.
    """

    backbone: ClassVar[Backbone] = VIDEOS
    steps: int = changed("steps", 1500)
    batch: int = changed(
        "batch",
        32,
        "Clips per step, over all processes and micro-batches; at most the number of training videos or clips.",
    )
    data: list[Path] = field(
        metadata=describe(
            "Video file, or folder of videos; repeatable. With --task labels: one folder with CLASS/*.mp4, or with "
            "train/CLASS/*.mp4 and val/CLASS/*.mp4.",
            free=True,
        )
    )
    task: str = option(
        "arrow",
        "Task, one of: labels (the class, named by the folder); "
        f"{'; '.join(f'{name} ({t.source})' for name, t in TASKS.items())}.",
    )
    encoding: str = option("rotate", VIDEOS.help)
    attention: str = option("softmax", VIDEOS.attention_help)
    memory: str = option("", f"{MEMORY_HELP} Without --causal, only directions=both works.")
    causal: bool = option(False, "Let frames attend only to earlier frames, for a streaming model.", panel=MODEL)
    window: int = option(
        0, "With --causal, number of frames that softmax attention sees; 0 means all.", least=0, off=True, panel=MODEL
    )
    space_time: str = option("joint", "Attention over space and time: joint, or factorised (space first).", panel=MODEL)
    frames: int = option(8, "Frames per clip.", least=1)
    every: int = option(4, "Distance between the frames of a clip, in video frames.", least=1)
    sampling: str = option(
        "dense", "Frames to show with --task labels: dense (--every frames apart), or uniform (over the whole video)."
    )
    size: int = option(48, "Height and width of a clip in training, in pixels.")
    test_size: int = option(
        64, f"Additional test size, in pixels; 0 tests only at --size. {TEST_SIZE}", least=0, off=True, free=True,
    )  # fmt: skip
    test_frames: int | None = option(
        None, "Additional test length, in frames; 0 tests only at --frames. To test a finished run at another length, "
        "repeat its command with a different --test-frames. Default: twice --frames.", least=0, off=True, free=True,
    )  # fmt: skip
    reference: str = option(
        "", "Interpolate positions to the grid of clips of this length and size: FRAMESxSIZE, such as 8x48. To "
        "fine-tune at a different length or size, pass those that --weights were trained at. With --causal, only "
        "positions in space change. Default: neighbouring tokens are one unit apart.",
    )  # fmt: skip
    motion: bool | None = option(
        None,
        "Show only motion: subtract the mean over time, and normalise the deviation. Default: off with --causal, "
        "because the mean includes later frames; on otherwise.",
    )
    flip: bool | None = option(
        None,
        "Mirror half of the clips. Default: off with --task labels, because classes may depend on left and right; on "
        "otherwise.",
    )
    patch: int = option(8, "Height and width of a patch, in pixels.", least=1)
    tubelet: int = option(
        1, "Frames per token. Above 1, tokens show motion even without an encoding.", least=1, panel=MODEL
    )
    dim: int = option(192, "Embedding width.", least=1)
    depth: int = option(6, "Number of blocks.", least=1)
    heads: int = option(4, "Number of attention heads.", least=1)
    qk_norm: bool = option(False, "Normalise q and k before the encoding.")
    drop: float = option(
        0.0, "Fraction of patches to drop in training, at the same places in all frames.", least=0, below=1, panel=MODEL
    )
    segment: int = option(
        240,
        "Length of a video segment, in frames; training and test clips come from different segments. A test segment "
        "needs 2 × --frames × --every frames.",
        least=1,
    )
    parts: int = option(
        5, "Number of parts to split the segments (with --task labels, the videos) into; one is held out.", least=2
    )
    fold: int = option(0, "Index of the part to hold out, from 0 to --parts - 1.")
    test_samples: int = option(
        1024, "Approximate number of held-out (clip, label) pairs to test on.", free=True, least=1
    )
    cache: str = option("auto", CACHE, free=True)

    def __post_init__(self) -> None:
        if self.test_frames is None:
            object.__setattr__(self, "test_frames", 2 * self.frames)  # the dataclass is frozen
        super().__post_init__()
        choose("--task", [self.task], ("labels", *TASKS))
        choose("--sampling", [self.sampling], SAMPLINGS)
        choose("--space-time", [self.space_time], ("joint", "factorised"))
        if self.causal and self.motion:
            raise typer.BadParameter(
                "--motion: not supported with --causal, because it subtracts the mean of earlier and later frames; "
                "leave out one of them"
            )
        for name, default in dependent_defaults(vars(self)).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if not 0 <= self.fold < self.parts:
            raise typer.BadParameter(f"--fold: expected 0 to --parts - 1 = {self.parts - 1}, got {self.fold}")
        for name, by, unit in (("size", self.patch, "patch"), ("frames", self.tubelet, "tubelet")):
            for option_name, least in (
                (name, f", at least {by}"),
                (f"test_{name}", f", or 0 to test only at --{name}"),
            ):
                value = getattr(self, option_name)
                if value % by or (value < 1 and option_name == name):
                    raise typer.BadParameter(
                        f"--{option_name.replace('_', '-')}: expected a multiple of --{unit} {by}{least}, got {value}"
                    )
        if self.task == "labels":
            reason = "does not work with --task labels, which tests whole videos; leave out --segment"
            check_ignored(self, "segment", reason)
        else:
            check_ignored(self, "sampling", "only works with --task labels; leave out --sampling")
        multiple = 1 if self.task == "labels" else TASKS[self.task].multiple
        for name, value in (("--frames", self.frames), ("--test-frames", self.test_frames or 0)):
            if value % multiple:
                raise typer.BadParameter(f"{name}: expected a multiple of {multiple} for {self.task}, got {value}")
        if self.window and self.drop:
            raise typer.BadParameter(f"--window {self.window}: can't be used with --drop {self.drop}; leave one out")
        if self.window and not (self.causal and "softmax" in VIDEOS.split_attention(self.attention)):
            raise typer.BadParameter(
                f"--window {self.window}: only works with --causal and softmax attention in some layers; pass both, or "
                "leave out --window"
            )
        check_width("--dim", self.dim, self.heads)
        self.check_encoding(build_model, model_arguments(self))
        if self.reference and not has_coordinates(model_arguments(self)):
            raise typer.BadParameter(
                f"--reference {self.reference}: --encoding {self.encoding} has no grid positions to map; leave out "
                "--reference"
            )

    @property
    def reference_grid(self) -> tuple[int | None, int, int] | None:
        """Return the grid onto which --reference maps positions, or None."""
        if not self.reference:
            return None
        found = re.fullmatch(r"(\d+)x(\d+)", self.reference)
        frames, size = (int(found[1]), int(found[2])) if found else (0, 0)
        if not frames * size or frames % self.tubelet or size % self.patch:
            raise typer.BadParameter(
                f"--reference: expected FRAMESxSIZE, such as {self.frames}x{self.size}, in multiples of --tubelet "
                f"{self.tubelet} and --patch {self.patch}, got {self.reference}"
            )
        if frames == self.tubelet and size == self.patch:
            raise typer.BadParameter(explain_single_patch(self.reference))
        if self.causal and frames != self.frames:
            raise typer.BadParameter(
                f"--reference {self.reference}: expected the {self.frames} frames of --frames, because a streaming "
                f"model can't rescale time, got {frames}; pass --reference {self.frames}x{size}"
            )
        return None if self.causal else frames // self.tubelet, size // self.patch, size // self.patch


def dependent_defaults(settings: dict[str, Any]) -> dict[str, bool]:
    """Return the defaults of options that depend on --task and --causal."""
    return {"flip": settings["task"] != "labels", "motion": not settings["causal"]}


def model_arguments(config: VideoTraining, num_classes: int = 2) -> dict[str, Any]:
    """Return the model arguments for data with ``num_classes`` classes."""
    classes = num_classes if config.task == "labels" else TASKS[config.task].num_classes
    reference = {"reference": list(config.reference_grid)} if config.reference_grid else {}
    return {
        "img_size": config.size, "patch_size": config.patch, "num_frames": config.frames,
        "tubelet_size": config.tubelet, "embed_dim": config.dim, "depth": config.depth, "num_heads": config.heads,
        "qk_norm": config.qk_norm, "num_classes": classes, "space_time": config.space_time,
        "patch_drop_rate": config.drop, "drop_unit": "tube", "class_token": False, "global_pool": "avg",
        "causal": "frames" if config.causal else None, "window": config.window or None, **reference,
        **VIDEOS.arguments(config.encoding, config.attention, config.memory),
    }  # fmt: skip


def motion(x: Tensor) -> Tensor:
    """Subtract the mean frame from clips (B, 3, T, H, W), and divide by the standard deviation.

    Subtracting the mean emphasises motion, because neighbouring frames only differ by a few percent of the signal. The
    result does not reveal the order of the frames.
    """
    x = x - x.mean(2, keepdim=True)
    return x / (x.square().mean((1, 2, 3, 4), keepdim=True).sqrt() + 0.02)  # avoids amplifying noise in a still clip


def clips(config: VideoTraining, footage: Footage, starts: Tensor, frames: int, size: int) -> Tensor:
    """Return clips (B, 3, frames, size, size) in the form that the model expects."""
    x = footage.clips(starts, frames, config.every, size)
    return motion(x) if config.motion else x


def build_model(**arguments: Any) -> LrpeVideoTransformer:
    """Return the model. arguments: arguments of the model, and ``reference``, which sets the attribute of that name."""
    reference = arguments.pop("reference", None)
    model = lrpe_video_tiny_patch16_224(**restore_arguments(arguments))
    model.reference = reference
    return model


def build(config: VideoTraining) -> LrpeVideoTransformer:
    return build_model(**model_arguments(config))


def explain_no_streaming(config: VideoTraining, model: LrpeVideoTransformer) -> str:
    """Return a message with the reason if a model trained with --causal can't stream, otherwise ""."""
    try:
        if config.causal:
            model.check_stream()
    except ValueError as error:
        return f"--causal: this model can't read a video frame by frame. {error}"
    return ""


def patches(config: VideoTraining) -> int:
    """Return the number of patches in a step. Without classes, each clip is shown with two labels."""
    clips = config.batch if config.task == "labels" else 2 * config.batch
    return clips * (config.frames // config.tubelet) * (config.size // config.patch) ** 2


def batch(
    config: VideoTraining, footage: Footage, starts: Tensor, indices: np.ndarray, draws: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return clips (2B, 3, T, H, W) and labels (2B,). Clips are mirrored randomly.

    Each clip appears with two labels, so the content of a clip does not reveal the label.
    """
    task, device = TASKS[config.task], footage.frames.device
    mirrored, draws = draws % 2 == 1, draws // 2
    first, draws = draws % task.num_classes, draws // task.num_classes
    second = (first + 1 + draws % (task.num_classes - 1)) % task.num_classes
    x = clips(config, footage, starts[sent(indices, device)], config.frames, config.size)
    if config.flip:
        x = torch.where(sent(mirrored, device)[:, None, None, None, None], x.flip(-1), x)
    labels = sent(np.concatenate([first, second]), device)
    return ordered(x.repeat(2, 1, 1, 1, 1), labels, task), labels


def loss(model: nn.Module, clips: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = clips
    return F.cross_entropy(model(x), labels)


@torch.no_grad()
def accuracy(
    config: VideoTraining, model: nn.Module, footage: Footage, starts: np.ndarray, frames: int, size: int,
    autocast: Any,
) -> float:  # fmt: skip
    """Return the accuracy in % on test clips.

    Each clip is tested with every label, so a model that can't see the order is exactly at chance.
    """
    task, device, right = TASKS[config.task], footage.frames.device, 0
    for part in torch.from_numpy(starts).split(32):
        x = clips(config, footage, part.to(device), frames, size)
        for label in range(task.num_classes):
            labels = torch.full((len(x),), label, device=device)
            with autocast():
                right += int((model(ordered(x, labels, task)).argmax(-1) == labels).sum())
    return 100 * right / (len(starts) * task.num_classes)


def held_out_starts(config: VideoTraining, footage: Footage) -> np.ndarray:
    """Return the start frame of each test clip.

    Up to twice --frames, the test length does not change the test clips.

    Raises:
        typer.BadParameter: if no held-out segment is long enough for --test-frames.
    """
    frames = max(2 * config.frames, config.test_frames or 0)
    starts = footage.starts(frames * config.every, held_out=True)
    if not len(starts):
        longest = max(s.stop - s.start for s in footage.segments if s.held_out) // config.every
        raise typer.BadParameter(
            f"--test-frames: expected at most {longest} frames, the most that fit into a held-out segment at --every "
            f"{config.every}, got {config.test_frames}"
        )
    number = max(1, min(len(starts), config.test_samples // TASKS[config.task].num_classes))
    return space_evenly(starts, number)


def space_evenly(values: np.ndarray, number: int) -> np.ndarray:
    """Select ``number`` of the values, evenly spaced from the first to the last."""
    return values[np.linspace(0, len(values) - 1, number).round().astype(int)]


def conditions(config: VideoTraining) -> list[tuple[int, int]]:
    """Return the test lengths and sizes, starting with the training length and size."""
    frames, size = config.frames, config.size
    pairs = [(frames, size), (config.test_frames or frames, size), (frames, config.test_size or size)]
    return list(dict.fromkeys(pairs))


def evaluate(config: VideoTraining, footage: dict[int, Footage], trainer: Trainer) -> dict[str, Any]:
    """Return the accuracies at all test lengths and sizes, measured on the same clips.

    ``footage`` contains the same frames at each size.
    """
    model, starts = trainer.averaged, held_out_starts(config, footage[config.size])
    video: Any = model
    return {
        positions: {
            f"{frames}x{size}x{size}": accuracy(
                config, model, footage[size], starts, frames, size, trainer.accelerator.autocast
            )
            for frames, size in conditions(config)
        }
        for positions in placements(video)
    }


# --- classes ---------------------------------------------------------------------------------------------------------


def labelled_batch(
    config: VideoTraining, videos: LabelledVideos, train: np.ndarray, indices: np.ndarray, draws: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Cut a clip from a random point in each video. Return randomly mirrored clips (B, 3, T, H, W) and classes."""
    mirrored, places = draws % 2 == 1, draws // 2 % RESOLUTION / RESOLUTION
    chosen, device = train[indices], videos.frames.device
    x = videos.clips(chosen, places, Sampling(config.sampling, config.frames, config.every), config.size)
    if config.flip:
        x = torch.where(sent(mirrored, device)[:, None, None, None, None], x.flip(-1), x)
    return motion(x) if config.motion else x, sent(videos.labels[chosen], device)


def find_test_videos(config: VideoTraining, videos: LabelledVideos) -> np.ndarray:
    """Return the indices of at most --test-samples held-out videos, evenly spaced so that they cover all classes."""
    found = np.flatnonzero(videos.held_out)
    return space_evenly(found, min(len(found), config.test_samples))


@torch.no_grad()
def find_right(
    config: VideoTraining, model: nn.Module, videos: LabelledVideos, frames: int, size: int, autocast: Any
) -> np.ndarray:
    """Return a mask of the test videos whose central clip the model classifies correctly."""
    tests, right = find_test_videos(config, videos), []
    sampling = Sampling(config.sampling, frames, config.every)
    for part in np.array_split(tests, math.ceil(len(tests) / 32)):
        x = videos.clips(part, np.full(len(part), 0.5), sampling, size)
        with autocast():
            found = model(motion(x) if config.motion else x).argmax(-1)
        right.append(found.cpu().numpy() == videos.labels[part])
    return np.concatenate(right)


def read_clip(path: Path, settings: dict[str, Any], *, whole: bool = False) -> Tensor:
    """Return a video's central clip (1, 3, frames, size, size), prepared as in tests of a run with these settings.

    whole: whether to return all frames (spaced by --every, in whole tubelets) instead of the central clip.
    """
    read_size = max(settings["size"], settings.get("test_size", 0))  # earlier versions read clips at the largest size
    frames, first = decode(path, read_size), np.zeros(1, np.int64)
    videos = LabelledVideos(frames, first, np.array([len(frames)]), first, np.array([True]), ("",))
    kind = settings["sampling"] if settings["task"] == "labels" else "dense"
    number, tubelet = settings["frames"], settings["tubelet"]
    if whole:
        number = max(math.ceil(len(frames) / settings["every"]) // tubelet, 1) * tubelet
    place, sampling = np.full(1, 0.0 if whole else 0.5), Sampling(kind, number, settings["every"])
    x = videos.clips(first, place, sampling, settings["size"])
    return motion(x) if settings["motion"] else x


def prepare_labelled(config: VideoTraining, device: torch.device) -> Work:
    load = partial(load_labelled, config.data, parts=config.parts, fold=config.fold, cache=find_cache(config.cache))
    videos = load(config.size).to(device)
    by_size = {config.size: videos}
    if config.test_size not in (0, config.size):
        by_size[config.test_size] = load(config.test_size, only_held_out=True).to(device)
    train = np.flatnonzero(~videos.held_out)
    if config.is_new:
        steps_per_epoch(len(train), config.batch)  # check before anything is written
    sampling = Sampling(config.sampling, config.frames, config.every)
    advice = (
        "add videos to the test folder"
        if videos.has_tests
        else f"pass a smaller --parts, or average runs with --fold 0 to {config.parts - 1}"
    )
    report(
        describe_held_out("video", videos.held_out, videos.labels, videos.names),
        describe_few("video", videos.held_out, videos.labels, videos.names, advice),
    )
    tests = find_test_videos(config, videos)
    frames = config.test_frames or config.frames
    short = replace(sampling, frames=frames).describe_short(videos.lengths[tests], "test videos")
    report(
        sampling.describe_short(videos.lengths, "videos"),
        f"Test with {frames} frames: {short}" if short and frames != config.frames else "",
    )
    arguments = model_arguments(config, len(videos.names))

    def find(trainer: Trainer, frames: int, size: int) -> np.ndarray:
        return find_right(config, trainer.averaged, by_size[size], frames, size, trainer.accelerator.autocast)

    def finish(trainer: Trainer) -> dict[str, Any]:
        right = {
            positions: {f"{frames}x{side}x{side}": find(trainer, frames, side) for frames, side in conditions(config)}
            for positions in placements(trainer.averaged)
        }
        found = {name: {size: 100 * each.mean().item() for size, each in of.items()} for name, of in right.items()}
        trained = next(iter(next(iter(right.values())).values()))  # at the training length and size
        labels = videos.labels[tests]
        return {
            "task": config.task, "encoding": config.encoding, "attention": config.attention,
            "space_time": config.space_time, "seed": config.seed, "chance": 100 / len(videos.names),
            "classes": list(videos.names), "train_videos": len(train),
            "test_videos": len(labels), "accuracy": found,
            "accuracy_by_class": average_by_class(trained, labels, videos.names), "tokens": patches(config),
        }  # fmt: skip

    def validate(trainer: Trainer) -> dict[str, float]:
        return {"accuracy": 100 * find(trainer, config.frames, config.size).mean().item()}

    model = build_model(**arguments)
    report(explain_no_streaming(config, model))
    settings = {"model": arguments, "digest": videos.digest}
    steps = partial(shuffle, len(train), config.batch, config.seed)
    batch_of = partial(labelled_batch, config, videos, train)
    return Work(model, settings, steps, batch_of, loss, finish, validate)


def prepare(config: VideoTraining, device: torch.device) -> Work:
    if config.task == "labels":
        return prepare_labelled(config, device)
    model, span = build(config), config.frames * config.every
    load = partial(
        load_footage, config.data, segment=config.segment, parts=config.parts, fold=config.fold, gap=2 * span,
        span=span, device=device, cache=find_cache(config.cache),
    )  # fmt: skip
    by_size = {size: load(size) for _, size in conditions(config)}
    footage = by_size[config.size]
    starts = torch.from_numpy(footage.starts(span, held_out=False)).to(device)
    held_out_starts(config, footage)  # check --test-frames before training
    report(explain_no_streaming(config, model))

    def finish(trainer: Trainer) -> dict[str, Any]:
        return {
            "task": config.task, "encoding": config.encoding, "attention": config.attention,
            "space_time": config.space_time, "seed": config.seed, "chance": 100 / TASKS[config.task].num_classes,
            "classes": list(TASKS[config.task].classes), "test_clips": len(held_out_starts(config, footage)),
            "accuracy": evaluate(config, by_size, trainer), "tokens": patches(config),
        }  # fmt: skip

    def validate(trainer: Trainer) -> dict[str, float]:
        """Evaluate on the held-out clips at the training length and size."""
        found = accuracy(
            config, trainer.averaged, footage, held_out_starts(config, footage), config.frames, config.size,
            trainer.accelerator.autocast,
        )  # fmt: skip
        return {"accuracy": found}

    # Identify the footage by its content, so the files may be moved.
    settings = {"model": model_arguments(config), "digest": footage.digest}
    steps = partial(shuffle, len(starts), config.batch, config.seed)
    return Work(model, settings, steps, partial(batch, config, footage, starts), loss, finish, validate)


run = partial(train, prepare)
