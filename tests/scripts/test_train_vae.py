"""Training a VAE, computing latents, and training a diffusion model on the latents."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from generative_data import SMALL, write_classes, write_films
from lrpe_md.scripts.train.conditions import EncoderSize
from lrpe_md.scripts.train.data.buckets import Sizes
from lrpe_md.scripts.train.data.source import Encoding, load_source
from lrpe_md.scripts.train.data.values import Latents
from lrpe_md.scripts.train.tasks import diffusion, vae
from lrpe_md.scripts.train.tasks.vae import VaeTraining
from lrpe_md.scripts.train.vae import load_vae
from PIL import Image
from train_commands import Killed, die_after, invoke

MODEL = {"dim", "depth", "heads", "text_dim", "text_depth", "sample_steps"}


def config(data: Path, out: Path, **changes: Any) -> VaeTraining:
    small = {name: value for name, value in SMALL.items() if name not in MODEL}
    return VaeTraining(data=data, out=out, **{**small, "size": 8, "widths": "8,16", **changes})


@pytest.mark.slow
def test_from_a_vae_to_samples(tmp_path):
    """A trained VAE reconstructs images, its latents have unit scale, and it decodes the diffusion model's samples."""
    data = write_classes(tmp_path / "classes")
    first = vae.run(config(data, tmp_path / "first", steps=1))
    last = vae.run(config(data, tmp_path / "vae", steps=60, batch=16, lr=1e-2, flip=True))
    assert last["held_out"]["mse"] < 0.3 * first["held_out"]["mse"]
    assert last["held_out"]["psnr"] == pytest.approx(10 * np.log10(4 / last["held_out"]["mse"]))
    with Image.open(tmp_path / "vae" / "reconstructions.png") as sheet:
        assert sheet.format == "PNG"
    made = invoke(
        "latents", "--vae", tmp_path / "vae", "--data", data, "--out", tmp_path / "latents", "--size", 8,
        "--device", "cpu",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    latents = Latents(tmp_path / "latents", False, torch.device("cpu"))
    with pytest.raises(typer.BadParameter, match="expected images or videos, got latents; pass the original data"):
        vae.run(config(tmp_path / "latents", tmp_path / "again"))
    values = latents.batch(np.arange(24), 8, np.arange(24))
    assert values.mean().item() == pytest.approx(0, abs=0.25)
    assert values.std().item() == pytest.approx(1, abs=0.25)
    result = diffusion.run(
        diffusion.DiffusionTraining(data=tmp_path / "latents", out=tmp_path / "run", **{**SMALL, "patch": 1})
    )
    assert set(result["held_out"]) == {"test_pairs", "8x8"}


def test_help_of_the_data_leaves_out_latents():
    about = {each.name: each.metadata["help"] for each in fields(vae.VaeTraining)}
    assert not [name for name in ("data", "size", "mix_sizes", "max_ratio") if "atents" in about[name]]
    others = {each.name: each.metadata["help"] for each in fields(diffusion.DiffusionTraining)}
    assert "the output folder of `train latents`" in others["data"]


def test_weights_of_another_architecture(tmp_path):
    data = write_classes(tmp_path / "classes")
    vae.run(config(data, tmp_path / "run", steps=1))
    message = r"run: pass that model's options, or leave out --weights\..* in the model\)$"
    with pytest.raises(typer.BadParameter, match=message):
        vae.run(config(data, tmp_path / "wider", widths="16,16", weights=str(tmp_path / "run")))


def test_a_saved_vae_has_the_averaged_weights(tmp_path):
    vae.run(config(write_classes(tmp_path / "classes"), tmp_path / "run"))
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    saved = load_vae(str(tmp_path / "run")).state_dict()
    assert saved.keys() == {name.removeprefix("vae.") for name in state["average"]}
    assert all(torch.equal(saved[name.removeprefix("vae.")], value) for name, value in state["average"].items())
    about = json.loads((tmp_path / "run" / "result.json").read_text())
    loaded: Any = load_vae(str(tmp_path / "run")).config
    assert loaded.scaling_factor == pytest.approx(1 / about["latent_deviation"])
    assert loaded.shift_factor == pytest.approx(about["latent_mean"])


def test_the_scale_of_latents_comes_from_all_classes(tmp_path, monkeypatch):
    seen, read = [], vae.batches_of
    monkeypatch.setattr(vae, "BATCH", 1)  # the scale is computed from 16 batches
    monkeypatch.setattr(
        vae, "batches_of", lambda source, chosen, device: (seen.append(chosen), read(source, chosen, device))[1]
    )
    vae.run(config(write_classes(tmp_path / "classes", each=20), tmp_path / "run", steps=1))
    assert len(seen[-1]) == 16
    assert set(seen[-1] // 20) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4])
def test_a_killed_training_resumes_bit_equal(tmp_path, monkeypatch, stop):
    """Kill the run one step after the checkpoint, and after the last step but before the VAE is written."""
    data = write_classes(tmp_path / "classes")
    whole = vae.run(config(data, tmp_path / "whole"))

    def dying_late(*args: Any) -> None:
        (tmp_path / "part" / "vae.part").mkdir()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(vae, "loss", die_after(stop, vae.loss))
        patched.setattr(vae, "save_vae", dying_late)
        with pytest.raises(Killed):
            vae.run(config(data, tmp_path / "part"))
    again = vae.run(config(data, tmp_path / "part"))
    assert again["held_out"] == whole["held_out"]
    saved = [load_vae(str(tmp_path / name)).state_dict() for name in ("whole", "part")]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())
    assert not list((tmp_path / "part").glob("*.part"))


def test_frames_of_videos_are_images(tmp_path):
    films = write_films(tmp_path / "films")
    result = vae.run(config(films, tmp_path / "run", segment=12, frames=3))
    assert np.isfinite(result["held_out"]["mse"])


def test_held_out_samples_come_from_all_classes(tmp_path):
    chosen = config(write_classes(tmp_path / "classes", each=24), tmp_path / "run", test_samples=9)
    encoding = Encoding(EncoderSize(1, 1, 1, 1))
    source = load_source(chosen, Sizes((8,), (), 2, 1.0), torch.device("cpu"), encoding)
    assert len(set(source.names(vae.choose_tests(chosen, source)))) == 3


def test_wrong_options_are_refused(tmp_path):
    data = write_classes(tmp_path / "classes")
    for changes, message in (
        ({"widths": "8,16,9"}, "--widths: expected multiples of 8, separated by commas, got '8,16,9'"),
        ({"widths": "big"}, "--widths: expected multiples of 8, separated by commas, got 'big'"),
        ({"size": 9}, "--size: expected a multiple of 2 for --widths 8,16, got 9"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            config(data, tmp_path / "run", **changes)
