"""load_run returns the model of every task, with averaged weights or those of the last step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generative_data import CLIPS, PIXELS, write_captions, write_classes, write_films
from generative_data import SMALL as GENERATIVE
from lrpe_md.models.dit import DiT
from lrpe_md.models.lm import CausalLm
from lrpe_md.models.video import LrpeVideoTransformer
from lrpe_md.models.vit import LrpeVisionTransformer
from lrpe_md.scripts.train import work
from lrpe_md.scripts.train.config import Training
from lrpe_md.scripts.train.runs import load_clip, load_run
from lrpe_md.scripts.train.tasks import diffusion, digits, image, lm, recall, vae, video
from test_train_image import SMALL as IMAGES
from test_train_image import TIMM, write_idx
from test_train_video import SMALL as VIDEOS
from test_train_video import needs_decoder
from torch import nn

ALL: dict[str, Any] = {
    "steps": 3, "batch": 4, "warmup": 1, "lr": 1e-2, "ema": 0.5, "device": "cpu", "tensorboard": False,
    "progress": False,
}  # fmt: skip
HYBRID = "linear,softmax"
FORGETTING = "decay=retnet,learnable=true"
MEMORY = f"rule=delta,{FORGETTING}"


def write_text(folder: Path) -> Path:
    (folder / "text.md").write_text("".join(f"{i * i % 7} says that {i % 5} is {i % 3}.\n" for i in range(100)))
    return folder / "text.md"


# Maps a name to (module of the task, function that writes the data, options, class of the model).
RUNS: dict[str, tuple[Any, Callable[[Path], Any], dict[str, Any], type]] = {
    "digits": (digits, lambda folder: "digits", {"encoding": "rotate-learnable"}, LrpeVisionTransformer),
    "image": (image, write_idx, {**IMAGES, "depth": 2, "attention": HYBRID, "qk_norm": True}, LrpeVisionTransformer),
    "timm": (image, write_idx, TIMM, LrpeVisionTransformer),
    "video": (
        video, write_films,
        {
            **VIDEOS, "depth": 2, "attention": HYBRID, "causal": True, "window": 2, "memory": MEMORY, "qk_norm": True,
            "cache": "none", "segment": 18,
        },
        LrpeVideoTransformer,
    ),
    "recall": (recall, lambda folder: "6x3x4", {"attention": "delta,softmax", "test_clips": 2}, LrpeVideoTransformer),
    "lm": (
        lm, write_text,
        {"size": "tiny", "length": 16, "lengths": "16", "attention": HYBRID, "memory": FORGETTING}, CausalLm,
    ),
    "captions": (diffusion, write_captions, {**GENERATIVE, **PIXELS, "encoding": "rotate:base=50"}, DiT),
    "classes": (diffusion, write_classes, {**GENERATIVE, **PIXELS, "model": "", "mlp": "swiglu"}, DiT),
    "clips": (
        diffusion, write_films,
        {**GENERATIVE, **CLIPS, "depth": 2, "attention": HYBRID, "memory": f"{MEMORY},directions=both"}, DiT,
    ),
    "vae": (vae, write_classes, {"size": 8, "widths": "8,16"}, vae.Autoencoder),
}  # fmt: skip
CONFIGS = {
    digits: digits.DigitsTraining, image: image.ImageTraining, video: video.VideoTraining,
    recall: recall.RecallTraining, lm: lm.LmTraining, diffusion: diffusion.DiffusionTraining, vae: vae.VaeTraining,
}  # fmt: skip


def inputs(model: Any) -> tuple[Any, ...]:
    """Return random inputs of a model."""
    torch.manual_seed(0)
    if isinstance(model, CausalLm):
        return (torch.randint(256, (2, 9)),)
    if isinstance(model, LrpeVideoTransformer):
        return (torch.randn(2, model.patch_embed.proj.in_channels, *model.patch_embed.img_size),)
    if isinstance(model, DiT):
        x, t = torch.randn(2, model.in_chans, *(4,) * (model.num_axes - 2), 8, 8), torch.rand(2)
        encoder = type(model.text_encoder).__name__
        text = torch.randint(256, (2, 9)) if encoder == "TextEncoder" else torch.tensor([0, 1])
        return x, t, text
    if isinstance(model, vae.Autoencoder):
        return torch.randn(2, 3, 8, 8), False
    return (torch.randn(2, model.patch_embed.proj.in_channels, *model.patch_embed.img_size),)


@needs_decoder
@pytest.mark.parametrize("name", RUNS)
@torch.no_grad()
def test_the_model_of_each_task(tmp_path, monkeypatch, name):
    module, write, options, kind = RUNS[name]
    data, trainers = write(tmp_path / "data" if module in (diffusion, vae, video, image) else tmp_path), []
    monkeypatch.setattr(work, "write_result", lambda trainer, result: trainers.append(trainer))
    options = {**options, **ALL, "data": [data] if module is video else data}
    with torch.enable_grad():
        module.run(CONFIGS[module](out=tmp_path / "run", **options))
    (trainer,) = trainers
    for average, expected in ((True, trainer.averaged), (False, trainer.raw)):
        found = load_run(tmp_path / "run", average=average)
        assert isinstance(found, kind)
        assert not found.training
        arguments = inputs(found)
        pairs = (model(*arguments) for model in (found, expected.eval()))
        for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in pairs), strict=True):
            assert torch.equal(a, b)
    (tmp_path / "run" / "checkpoint.pt").unlink()
    exported = load_run(tmp_path / "run")
    averaged = trainer.averaged.state_dict()
    assert all(torch.equal(value, averaged[key]) for key, value in exported.state_dict().items())
    with pytest.raises(FileNotFoundError, match=r"expected a run with checkpoint\.pt, because average=False"):
        load_run(tmp_path / "run", average=False)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a run with checkpoint\.pt or model\.safetensors, got"):
        load_run(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=f"got the file .*model.safetensors; pass {tmp_path}$"):
        load_run(tmp_path / "model.safetensors")

    def prepare(config: Training, device: torch.device) -> work.Work:
        steps = lambda start: iter([(np.zeros(1, int), np.zeros(1, int))] * 9)  # noqa: E731
        batch = lambda indices, draws: torch.ones(1, 2)  # noqa: E731
        return work.Work(
            nn.Linear(2, 1), {}, steps, batch, lambda model, x: model(x).mean(), lambda trainer: {}
        )  # fmt: skip

    work.train(prepare, Training(out=tmp_path / "own", **{**ALL, "steps": 1, "batch": 1}))
    with pytest.raises(ValueError, match=r"got .*own, which another script wrote; build its model yourself"):
        load_run(tmp_path / "own")
    with pytest.raises(ValueError, match=r"folder: expected a run of `lrpe-md train video`, got .*own"):
        load_clip(tmp_path / "own", "video.mp4")
