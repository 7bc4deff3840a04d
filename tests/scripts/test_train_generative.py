"""Training diffusion models on classes, latents, text features and videos: data, resuming and samples."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from generative_data import (
    COLOURS,
    KINDS,
    PIXELS,
    SMALL,
    write_all,
    write_captions,
    write_classes,
    write_text_model,
    write_vae,
)
from lrpe_md.models.dit import DiT
from lrpe_md.models.text import Text, TextFeatures
from lrpe_md.scripts.train import generation, latents, text_features
from lrpe_md.scripts.train.checkpoint import read_checkpoint, save_checkpoint
from lrpe_md.scripts.train.conditions import Captions, EncoderSize, FeatureFolder
from lrpe_md.scripts.train.data import videos
from lrpe_md.scripts.train.data.pictures import open_pictures
from lrpe_md.scripts.train.data.records import Split
from lrpe_md.scripts.train.data.values import Clips, Latents, Pixels
from lrpe_md.scripts.train.generation import Evaluation
from lrpe_md.scripts.train.tasks import diffusion
from lrpe_md.scripts.train.tasks.diffusion import DiffusionTraining
from lrpe_md.scripts.train.vae import Decoder, load_vae
from lrpe_md.scripts.train.weights import start_from
from parametrizing import slow_except
from PIL import Image
from safetensors.torch import load_file, save_file
from test_train_image import write_folders, write_idx
from train_commands import Killed, die_after, invoke, output_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return write_all(tmp_path_factory.mktemp("data"))


def config(options: dict[str, Any], out: Path, **changes: Any) -> DiffusionTraining:
    return DiffusionTraining(out=out, **{**SMALL, **options, **changes})


def weights(out: Path) -> dict[str, torch.Tensor]:
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return {**state["model"], **{f"average.{name}": value for name, value in state["average"].items()}}


# --- images with classes ---------------------------------------------------------------------------------------------


def test_classes_of_folders_zips_and_arrays(tmp_path):
    folder = write_classes(tmp_path / "classes")
    found = open_pictures(folder, Split(4))
    assert found.records.classes == ("blue", "green", "red")
    assert len(found) == 24
    pixels = found.read(8)
    assert found.records.labels is not None
    for i, label in enumerate(found.records.labels):
        assert pixels[i, :, 4, 6].tolist() == list(COLOURS[found.records.classes[label]])
    held_out = found.records.held_out(folder, Split(4))
    assert 0 < held_out.sum() < 24
    assert len(set(found.records.labels[held_out])) > 1  # a class is not entirely in one part
    with zipfile.ZipFile(tmp_path / "classes.zip", "w") as archive:
        for path in folder.rglob("*.png"):
            archive.write(path, f"around/{path.relative_to(folder)}")
    np.savez(tmp_path / "classes.npz", arr_0=pixels.permute(0, 2, 3, 1).numpy(), arr_1=found.records.labels)
    for other in ("classes.zip", "classes.npz"):
        again = open_pictures(tmp_path / other, Split(4))
        assert torch.equal(again.read(8), pixels)
        assert np.array_equal(np.asarray(again.records.labels), found.records.labels)
    some = open_pictures(folder, Split(4, limit=12))
    assert len(set(np.asarray(some.records.labels))) == 3


def test_a_test_part_is_held_out(tmp_path):
    folders = open_pictures(write_folders(tmp_path / "folders"), Split(20))
    assert folders.records.classes == ("a", "b")
    held_out = folders.records.held_out(tmp_path, Split(20))
    assert [name.split("/")[0] == "val" for name in folders.records.names] == held_out.tolist()
    idx = open_pictures(write_idx(tmp_path / "idx", train=24, test=8), Split(20))
    assert idx.records.held_out(tmp_path, Split(20)).tolist() == [False] * 24 + [True] * 8
    assert idx.read(8).shape == (32, 3, 8, 8)


def outside(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "stray.png")


def keep_one(folder: Path) -> None:
    for path in sorted(folder.glob("*/*"))[1:]:
        path.unlink()


WRONG = {
    "outside of a class": (outside, {}, "expected each image in a class folder, such as cats/1.png, got 1"),
    "no captions": (lambda folder: None, {"condition": "captions"}, "NAME.txt next to each of the 24 images"),
    "one part": (lambda folder: None, {"parts": 1}, "--parts: expected at least 2, got 1"),
    "one image": (keep_one, {"batch": 1}, r"held-out samples, got (0 and 1|1 and 0) \(1 different name\)"),
    "too large a batch": (lambda folder: None, {"batch": 64}, "--batch 64: expected at most"),
    "features of classes": (
        lambda folder: None, {"text_features": Path("absent")}, "--text-features absent: expected --data with captions",
    ),
    "condition": (lambda folder: None, {"condition": "label"}, "--condition: unknown 'label'"),
    "sampler": (lambda folder: None, {"sampler": "dpm"}, "--sampler: unknown 'dpm'"),
    "prediction": (lambda folder: None, {"prediction": "eps"}, "--prediction: unknown 'eps'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_and_options_are_refused(tmp_path, name):
    prepare, options, message = WRONG[name]
    prepare(folder := write_classes(tmp_path / "classes"))
    with pytest.raises(typer.BadParameter, match=message):
        diffusion.run(config({"data": folder, **PIXELS}, tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "expected an array of images named images, arr_0, x, got none"),
        ({"x": np.zeros((3, 8, 8))}, r"expected images as uint8 .*, got float64 \(3, 8, 8\)"),
        (
            {"x": np.zeros((3, 8, 8), np.uint8), "y": np.array([0, 1])},
            r"expected non-negative integer labels of shape \(3,\), got int64 \(2,\)",
        ),
        ({"x": np.zeros((3, 8, 8), np.uint8), "y": np.array([0, -1, 1])}, "expected non-negative integer labels"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(typer.BadParameter, match=message):
        open_pictures(tmp_path / "data.npz", Split(4))


# --- latents ---------------------------------------------------------------------------------------------------------


def test_latents_equal_those_of_the_vae(tmp_path, monkeypatch):
    classes, vae = write_classes(tmp_path / "classes"), write_vae(tmp_path / "vae")
    monkeypatch.chdir(tmp_path)
    command = ["latents", "--vae", "vae", "--data", classes, "--size", 8, "--flip", "--device", "cpu"]
    done = invoke(*command, "--out", tmp_path / "latents", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    pixels = open_pictures(classes, Split(4)).read(8).float() / 127.5 - 1
    plain, mirrored = (load_vae(str(vae)).encode(x).latent_dist for x in (pixels, pixels.flip(-1)))
    for name in ("mean", "std"):
        found = torch.from_numpy(np.load(tmp_path / "latents" / f"{name}.npy"))
        for view, wanted in enumerate((plain, mirrored)):
            torch.testing.assert_close(found[:, view], getattr(wanted, name), rtol=1e-4, atol=1e-5)
    about = json.loads((tmp_path / "latents" / "latents.json").read_text())
    assert (about["number"], about["channels"], about["factor"], about["shapes"]) == (24, 3, 2, {"8": [[8, 8]]})
    assert (about["scale"], about["shift"], about["vae"]) == (2.0, 0.25, str(vae.resolve()))
    stored = Latents(tmp_path / "latents", True, CPU)
    assert stored.records.classes == ("blue", "green", "red")
    indices = np.array([3, 20])
    torch.testing.assert_close(stored.batch(indices, 8), (plain.mean[indices] - 0.25) * 2, rtol=1e-4, atol=1e-5)
    draws = np.array([4, 5])  # the second one is mirrored
    found = stored.batch(indices, 8, draws)
    noise = (found / 2 + 0.25 - torch.stack([plain.mean[3], mirrored.mean[20]])) / torch.stack(
        [plain.std[3], mirrored.std[20]]
    )
    assert 0.7 < noise.std() < 1.3
    assert torch.equal(found, stored.batch(indices, 8, draws))
    assert not torch.equal(found, stored.batch(indices, 8, draws + 2))
    once = invoke(*command, "--out", tmp_path / "sampled", "--sampled")
    assert once.exit_code == 0, once.output
    sampled = Latents(tmp_path / "sampled", False, CPU)
    assert not (tmp_path / "sampled" / "std.npy").exists()
    found = (sampled.batch(np.arange(24), 8, np.arange(24)) / 2 + 0.25 - plain.mean) / plain.std
    assert 0.9 < found.std() < 1.1


def test_held_out_loss_samples_latents_as_training_does(data, tmp_path, monkeypatch):
    """Each evaluation uses the same samples, and mirrors none of them."""
    seen = []

    def look(model: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(x)
        return torch.zeros(len(x))

    monkeypatch.setattr(generation, "flow_matching_loss", look)
    chosen = config(data["latents"], tmp_path, test_samples=24)
    source = diffusion.open_source(chosen, CPU)
    evaluation, model = diffusion.make_evaluation(chosen, source, CPU), diffusion.build(chosen, source)
    for _ in range(2):
        evaluation.losses(model, evaluation.settings[0], nullcontext)
    assert torch.equal(seen[0], seen[-1])
    latents, held_out = source.values, evaluation.held_out
    assert isinstance(latents, Latents)
    std = torch.from_numpy(latents.arrays[8, 0][1][held_out, 0]).float() * latents.about["scale"]
    assert 0.9 < ((seen[0] - latents.batch(held_out, 8)) / std).std() < 1.1


def test_held_out_loss_uses_all_classes(tmp_path):
    """The held-out samples are sorted by class."""
    folder = write_classes(tmp_path / "classes", each=24)
    chosen = config({"data": folder, "size": 8, "test_size": 0}, tmp_path / "run", test_samples=9)
    source = diffusion.open_source(chosen, CPU)
    held_out = diffusion.make_evaluation(chosen, source, CPU).held_out
    assert len(held_out) == 9
    assert set(held_out) <= set(source.held_out)
    assert len(set(source.names(held_out))) == 3


def test_decoded_latents_equal_the_vae(tmp_path):
    vae = load_vae(str(write_vae(tmp_path / "vae")))
    decoder, z = Decoder(vae, CPU), torch.randn(2, 3, 5, 4, 4)
    found = decoder.decode(z)
    assert found.shape == (2, 3, 5, 8, 8)
    expected = vae.decode(z[1, :, 3][None] / 2 + 0.25).sample[0]
    torch.testing.assert_close(found[1, :, 3], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", ["latents", "features"])
def test_an_interrupted_program_leaves_nothing(tmp_path, monkeypatch, program):
    captions = write_captions(tmp_path / "captions")
    model = write_vae(tmp_path / "model") if program == "latents" else write_text_model(tmp_path / "model")
    option = {"latents": ["--size", 8, "--vae"], "features": ["--batch", 4, "--encoder"]}[program]
    command = [program, "--data", captions, "--out", tmp_path / "out", "--device", "cpu", *option, model]

    def fail(folder: Path, *args: Any) -> None:
        (folder / "mean.npy").write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr({"latents": latents, "features": text_features}[program], f"write_{program}", fail)
        stopped = invoke(*command)
    assert stopped.exit_code != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captions", "model"]
    (tmp_path / "out.part").mkdir()  # left by a killed program
    (tmp_path / "out.part" / "mean.npy").write_text("half")
    assert invoke(*command).exit_code == 0
    assert not (tmp_path / "out.part").exists()
    again = invoke(*command)
    assert again.exit_code == 2
    assert "expected a new or empty folder" in again.output


def test_wrong_latents_are_refused(data, tmp_path):
    folder = tmp_path / "latents"
    shutil.copytree(data["latents"]["data"], folder)
    options = {**data["latents"], "data": folder}
    with pytest.raises(typer.BadParameter, match=r"--patch 3: expected a divisor of 4"):
        config(options, tmp_path / "out", patch=3)
    with pytest.raises(typer.BadParameter, match="--test-size 12: latents can only be tested at their own sizes"):
        config(options, tmp_path / "out", test_size=12)
    config(options, tmp_path / "out", test_size=48)  # the default
    with pytest.raises(
        typer.BadParameter, match=r"--size 16: the latents have a fixed size of 8 pixels; leave out --size"
    ):
        config(options, tmp_path / "out", size=16)
    config(options, tmp_path / "out", size=8)
    for name in ("without", "label"):
        with pytest.raises(
            typer.BadParameter, match=rf"--{name} odd: latents have fixed sizes and conditions; pass --{name}"
        ):
            config(options, tmp_path / "out", **{name: "odd"})
    with pytest.raises(typer.BadParameter, match=r"--vae .*absent: expected an AutoencoderKL from diffusers"):
        diffusion.run(config(options, tmp_path / "out", vae=str(tmp_path / "absent")))
    other = str(write_vae(tmp_path / "wider", channels=4))
    with pytest.raises(typer.BadParameter, match="--vae: expected a VAE with 3 channels, like the latents, got 4"):
        diffusion.run(config(options, tmp_path / "out", vae=other))
    about = json.loads((folder / "latents.json").read_text(encoding="utf-8"))
    (folder / "latents.json").write_text(json.dumps({**about, "weights": "0" * 16}), encoding="utf-8")
    with pytest.raises(
        typer.BadParameter, match=r"--vae: the weights in .* have changed since the latents were encoded"
    ):
        diffusion.run(config(options, tmp_path / "out"))
    (folder / "latents.json").write_text(json.dumps(about), encoding="utf-8")
    std = (folder / "std.npy").read_bytes()
    (folder / "std.npy").write_bytes(std[:-10])
    with pytest.raises(typer.BadParameter, match=r"std\.npy can't be read"):
        diffusion.run(config(options, tmp_path / "out"))
    np.save(folder / "std.npy", np.zeros((3, 2, 3, 4, 4)))
    with pytest.raises(typer.BadParameter, match=r"expected std\.npy of shape \(24, 2, 3, 4, 4\), got \(3, 2, 3"):
        diffusion.run(config(options, tmp_path / "out"))
    with pytest.raises(typer.BadParameter, match="no mirrored latents"):
        diffusion.run(config({**data["film latents"], "flip": True}, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- text features ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t5", "clip"])
def test_features_equal_those_of_the_text_model(tmp_path, kind):
    captions, model = write_captions(tmp_path / "captions"), write_text_model(tmp_path / "model", kind)
    command = ["features", "--encoder", model, "--data", captions, "--device", "cpu", "--batch", 4, "--max-length", 16]
    done = invoke(*command, "--out", tmp_path / "features", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    folder, encoder = FeatureFolder(tmp_path / "features"), text_features.load_encoder(str(model), 16, CPU)
    prompts = ["a red tile", "a blue tile again again", ""]
    found, expected = folder.texts(folder.find(prompts), CPU), encoder(prompts)
    length = expected.mask.shape[1]
    assert found.mask[:, :length].tolist() == expected.mask.tolist()
    assert not found.mask[:, length:].any()
    seen = expected.mask[..., None]
    torch.testing.assert_close(found.features[:, :length], expected.features * seen, rtol=1e-4, atol=1e-5)
    assert not found.features[:, length:].any()
    assert (found.pooled is None) == (kind == "t5")
    if kind == "clip":
        torch.testing.assert_close(found.pooled, expected.pooled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folder.empty.features, encoder([""]).features, rtol=1e-4, atol=1e-5)
    with pytest.raises(typer.BadParameter, match="got none for 1 caption, such as 'a dog'"):
        folder.find(["a red tile", "a dog"])


def test_a_random_pooler_is_not_used(tmp_path):
    """The weights of RoBERTa have no pooler, so transformers would draw a different one in each program."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(vocab_size=9, pad_token_id=0, **sizes)
    for kind, width in ((transformers.BertForMaskedLM, 0), (transformers.BertModel, 16)):
        folder = write_text_model(tmp_path / kind.__name__)
        kind(bert).save_pretrained(folder)
        encoder = text_features.load_encoder(str(folder), 16, CPU)
        assert encoder.pooled_width == width
        assert (encoder(["a tile"]).pooled is None) == (width == 0)
    weights = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(weights).items() if "key.weight" not in name}
    save_file(kept, weights, {"format": "pt"})
    with pytest.raises(typer.BadParameter, match=r"expected all weights of BertModel, got none for encoder\.layer"):
        text_features.load_encoder(str(folder), 16, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("post_processor", "tokenizer: expected at least one token for an empty caption, got none"),
        ("pad_token", "Asking to pad but the tokenizer does not have a padding token"),
    ],
)
def test_tokenizers_without_special_tokens_are_refused(tmp_path, change, message):
    folder = write_text_model(tmp_path)
    file = folder / ("tokenizer.json" if change == "post_processor" else "tokenizer_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), change: None}))
    with pytest.raises(typer.BadParameter, match=f"can't encode the empty caption .*{message}"):
        text_features.load_encoder(str(folder), 16, CPU)


def test_masks_are_requested_from_the_tokenizer(tmp_path):
    """Some tokenizers, such as SigLIP's, return no mask by default."""
    encoder = text_features.load_encoder(str(write_text_model(tmp_path)), 16, CPU)
    expected = encoder(["a tile", "a"])
    encoder.tokenizer.model_input_names = ["input_ids"]
    found = encoder(["a tile", "a"])
    assert found.mask.tolist() == expected.mask.tolist() == [[True, True, True], [True, True, False]]


def test_prompts_need_the_text_model_of_the_training_features(data, tmp_path):
    diffusion.run(config(data["features"], tmp_path / "run", steps=1))
    other = write_text_model(tmp_path / "other")
    torch.manual_seed(2)
    model = text_features.load_encoder(str(other), 16, CPU).model
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(other)
    said = output_of("sample", tmp_path / "run", "--prompt", "a tile", "--encoder", other, "--device", "cpu")
    assert "the text model that computed the training features, got one with other features of" in said


def test_captions_without_any_training_sample_are_named_if_held_out_samples_share_them():
    condition = Captions(("a", "b", "a", "c", "b", "a"), EncoderSize(16, 1, 2, 8))
    said = condition.describe_held_out([1, 4], [0, 2, 3, 5])
    assert said == "Held out all samples of 2 captions for tests, including 3 of 'a'"
    said = condition.describe_held_out([1, 3], [0, 2, 4, 5])  # "b" is also in training
    assert said == "Held out all samples of 1 caption for tests, including 3 of 'a'"
    assert condition.describe_held_out([0, 2, 4, 5], [1, 3]) == ""
    assert condition.describe_held_out([0, 1, 3], [2, 4, 5]) == ""


@pytest.mark.slow
def test_captions_that_are_cut_are_counted(tmp_path, capsys):
    captions, model = write_captions(tmp_path / "captions"), write_text_model(tmp_path / "model")
    lengths = [len(caption) for caption in open_pictures(captions, Split(1)).records.captions or ()]
    longest, cut = max(lengths), sum(length > 12 for length in lengths)
    message = f"{cut} of {len(lengths)} captions are truncated to 12 bytes; pass --text-length {longest + 1} to keep"
    for length in (13, longest + 1):
        diffusion.run(config({"data": captions, **PIXELS}, tmp_path / f"{length}", text_length=length, steps=1))
        assert capsys.readouterr().err.count(message) == (length == 13)
    given = ["--encoder", model, "--device", "cpu"]
    for tokens in (3, 16):
        made = invoke("features", *given, "--data", captions, "--out", tmp_path / f"f{tokens}", "--max-length", tokens)
        assert made.exit_code == 0, made.output
        assert ("captions are truncated to 3 tokens; pass a larger --max-length" in made.output) == (tokens == 3)
    features = {"data": captions, "text_features": tmp_path / "f3", **PIXELS}
    diffusion.run(config(features, tmp_path / "run", steps=1))
    draw = ["sample", tmp_path / "run", *given, "--steps", 1, "--images", 1, "--prompt", "a tile"]
    for prompt in ("a tile", "a red tile"):
        drawn = invoke(*draw, "--prompt", prompt)
        assert drawn.exit_code == 0, drawn.output
        assert ("1 of 2 prompts are truncated to 3 tokens" in drawn.output) == (prompt == "a red tile")


def test_dropped_captions_have_the_features_of_the_empty_one(data, tmp_path):
    chosen = config(data["features"], tmp_path)
    source = diffusion.open_source(chosen, CPU)
    model = diffusion.build(chosen, source).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, text = source.batch(source.train[:4], 8)
    t, everything = torch.rand(4), torch.ones(4, dtype=torch.bool)
    expected = model(x, t)
    torch.testing.assert_close(model(x, t, text, drop=everything), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(x, t, text), expected)
    assert not torch.allclose(model(x, t, text.zeros(4)), expected)


def test_wrong_features_are_refused(data, tmp_path):
    with pytest.raises(typer.BadParameter, match=r"--text-features .*: expected a folder with features\.json"):
        diffusion.run(config({**data["features"], "text_features": tmp_path}, tmp_path / "out"))
    folder = tmp_path / "features"
    shutil.copytree(data["features"]["text_features"], folder)
    (folder / "mask.npy").write_bytes(b"no array")
    with pytest.raises(typer.BadParameter, match=r"mask\.npy can't be read"):
        diffusion.run(config({**data["features"], "text_features": folder}, tmp_path / "out"))
    for encoder in (tmp_path / "absent", data["labels"]["data"]):
        refused = invoke("features", "--encoder", encoder, "--data", data["features"]["data"], "--out", tmp_path / "f")
        assert refused.exit_code == 2
        assert "expected a transformers text model" in refused.output


# --- videos ----------------------------------------------------------------------------------------------------------


def test_clips_of_videos_and_of_their_latents(data, tmp_path):
    sources = [diffusion.open_source(config(data[kind], tmp_path), CPU) for kind in ("clips", "film latents")]
    pixels, coded = (source.values for source in sources)
    assert isinstance(pixels, Clips)
    assert isinstance(coded, Clips)
    assert pixels.shape(8) == (3, 8, 8)
    assert coded.shape(8) == (3, 4, 4)
    for source in sources:
        assert not set(source.train) & set(source.held_out)
        assert source.condition.settings["classes"] == ["dark", "light"]
    first = pixels.batch(sources[0].train[:1], 8)
    brightness = (first[0, 0, :, 4, 4] + 1) * 127.5
    assert all(4 < step < 8 for step in brightness.diff())  # two frames further, 3 brighter each
    light = [source.condition.names.index("light") for source in sources]
    assert pixels.batch(np.array(light[:1]), 8).mean() > first.mean() + 0.3
    coder = Decoder(load_vae(str(data["latents"]["data"].parent / "vae")), CPU)
    mean, _ = coder.encode(first[:, :, 1])
    expected = (mean - coder.shift) * coder.scale
    torch.testing.assert_close(coded.batch(sources[1].train[:1], 8)[:, :, 1], expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", ["clips", "bucketed clips"])
def test_decoded_frames_are_cached(data, tmp_path, monkeypatch, kind):
    given = config(data[kind], tmp_path / "out", cache=str(tmp_path / "cache"), test_size=12)
    first = diffusion.open_source(given, CPU)
    monkeypatch.setattr(videos, "decode", lambda *_: pytest.fail("decoded again"))
    again = diffusion.open_source(given, CPU)
    assert first.digest == again.digest
    for size in (8, 12):
        each = [source.values.batch(source.held_out[:1], size) for source in (first, again)]
        assert torch.equal(*each)


def test_a_clip_is_mirrored_as_a_whole():
    images = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
    images[..., 0] = 255
    clips = Clips(Pixels({4: images}, flip=True), np.array([0, 3]), 3, 1)
    found = clips.batch(np.array([0, 1]), 4, np.array([2, 3]))
    assert (found[0, ..., 0] == 1).all()
    assert (found[1, ..., 3] == 1).all()
    assert (found[1, ..., 0] == -1).all()
    assert torch.equal(clips.batch(np.array([1]), 4), found[:1])


def test_a_folder_of_images_and_videos_is_refused(tmp_path):
    folder = write_classes(tmp_path / "classes")
    (folder / "clip.mp4").touch()
    with pytest.raises(typer.BadParameter, match="expected images or videos, got both"):
        config({"data": folder, **PIXELS}, tmp_path / "out")


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text_attention", ["cross", "single"])
def test_blocks_of_published_models(data, tmp_path, text_attention):
    """Options of the blocks reach the model in training and in sampling. Checkpointing doesn't change any weight."""
    options = {"mlp": "swiglu", "modulation": "shared", "reg_tokens": 2, "text_attention": text_attention}
    options = {**data["features"], **options}
    plain = diffusion.run(config(options, tmp_path / "plain"))
    saving = diffusion.run(config({**options, "checkpointing": True}, tmp_path / "saving"))
    assert saving["held_out"] == plain["held_out"]
    names = weights(tmp_path / "plain").keys()
    assert any("table" in name for name in names)
    assert any("reg_token" in name for name in names)
    assert any("cross" in name for name in names) == (text_attention == "cross")
    encoder = data["latents"]["data"].parent / "text"
    given = ["--prompt", "a red tile", "--encoder", encoder, "--steps", 1, "--device", "cpu", "--images", 1]
    done = invoke("sample", tmp_path / "plain", *given)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def by_class(data, tmp_path_factory) -> Path:
    """Return the folder of a run on class labels."""
    out = tmp_path_factory.mktemp("runs") / "labels"
    diffusion.run(config(data["labels"], out, steps=1))
    return out


OTHERS = {
    "condition": ({"condition": "none"}, "class labels, but this run uses no condition; pass --condition labels"),
    "patch": ({"patch": 4}, r"pass --patch 2\. .*\(32, 12\) in the file and \(32, 48\) in the model\)$"),
    "several": ({"dim": 64, "depth": 2, "heads": 4}, r"pass --dim 32 --depth 1 --heads 2\. The weights are for a dif"),
    "mlp": ({"mlp": "swiglu", "encoding": "none"}, r"pass --mlp gelu\. The weights are for a different architecture"),
}


@pytest.mark.parametrize(("changes", "message"), OTHERS.values(), ids=list(OTHERS))
def test_weights_of_another_model_name_the_options(data, by_class, tmp_path, changes, message):
    with pytest.raises(typer.BadParameter, match=f"--weights .*: (the weights were trained with )?{message}"):
        diffusion.run(config(data["labels"], tmp_path / "out", **{"patch": 2, "weights": str(by_class), **changes}))
    assert not (tmp_path / "out").exists()


def test_weights_keep_the_empty_caption_of_the_new_features(tmp_path):
    first, second = (
        TextFeatures(4, 2, Text(torch.full((1, length, 4), value), None, torch.full((1, 2), value)))
        for length, value in ((1, 1.0), (2, 2.0))
    )
    models = [DiT(depth=1, embed_dim=16, num_heads=1, text_encoder=encoder) for encoder in (first, second)]
    save_file(models[0].state_dict(), tmp_path / "model.safetensors")
    start_from(models[1], tmp_path / "model.safetensors")
    assert second.empty_features.eq(2).all()
    assert second.empty_pooled.eq(2).all()
    assert models[1].text_embed.weight.equal(models[0].text_embed.weight)


def test_weights_of_another_condition(data, by_class, tmp_path):
    message = "were trained with class labels, but this run uses captions; pass --condition labels, and data with cl"
    with pytest.raises(typer.BadParameter, match=message):
        diffusion.run(config({"data": data["features"]["data"], **PIXELS}, tmp_path / "out", weights=str(by_class)))
    fewer = write_classes(tmp_path / "fewer")
    shutil.rmtree(fewer / "red")
    with pytest.raises(typer.BadParameter, match=r": pass data with its 3 classes, or leave out --weights\."):
        diffusion.run(config({"data": fewer, **PIXELS}, tmp_path / "out", weights=str(by_class)))


def published(data: dict[str, Any], out: Path, model: str, **changes: Any) -> DiffusionTraining:
    return DiffusionTraining(out=out, data=data["labels"]["data"], size=16, test_size=0, model=model, **changes)


def test_published_sizes(data, tmp_path):
    found = published(data, tmp_path, "S/4")
    assert (found.patch, found.dim, found.depth, found.heads) == (4, 384, 12, 6)
    for wrong, message in {
        "M/2": "--model: unknown 'M'",
        "XL": "--model: expected SIZE/PATCH",
        "B/0": "got B/0",
    }.items():
        with pytest.raises(typer.BadParameter, match=message):
            published(data, tmp_path, wrong)


@pytest.mark.parametrize("options", [{"patch": 4}, {"dim": 64}, {"depth": 2, "heads": 2}])
def test_model_refuses_the_options_that_it_defines(data, tmp_path, options):
    named = " ".join(f"--{name} {value}" for name, value in options.items())
    message = (
        rf"^{named}: --model S/8 defines --dim, --depth, --heads and --patch \(8\); leave out these options or --model"
    )
    with pytest.raises(typer.BadParameter, match=message):
        published(data, tmp_path, "S/8", **options)
    chosen = published(data, tmp_path, "S/8", dim=384)
    assert replace(chosen, steps=2).patch == 8


def test_labels_have_no_text_to_read(data, tmp_path):
    with pytest.raises(typer.BadParameter, match="--text-attention cross: text_attention: expected joint"):
        diffusion.run(config({**data["labels"], "text_attention": "cross"}, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", slow_except(["latents", "bucketed clips"], KINDS))
def test_a_killed_training_resumes_bit_equal(data, tmp_path, monkeypatch, kind):
    """A run that was killed after its checkpoint ends with the same weights as an uninterrupted one."""
    options = {**data[kind], "accumulate": 2}
    whole = diffusion.run(config(options, tmp_path / "whole"))
    with monkeypatch.context() as patched:
        patched.setattr(diffusion, "loss", die_after(6, diffusion.loss))
        with pytest.raises(Killed):
            diffusion.run(config(options, tmp_path / "part"))
    again = diffusion.run(config(options, tmp_path / "part", workers=2))
    assert again["train_steps_timed"] == 2
    assert again["held_out"] == whole["held_out"]
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "part")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    expected_names = {"checkpoint.pt", "history.csv", "model.safetensors", "result.json", "samples.npz", "samples.png"}
    assert names - {"words.txt"} == expected_names
    assert ("words.txt" in names) == (kind == "shards")


def read_means(latents: Latents, indices: np.ndarray, size: int, draws: Any = None) -> torch.Tensor:
    """Read latents without noise."""
    mean = latents.arrays[size, latents.assignment.find(indices)][0]
    return torch.from_numpy(mean[latents.assignment.rows[indices], 0]).float()


@pytest.mark.parametrize("kind", slow_except(["latents", "bucketed clips"], KINDS))
def test_micro_batches_and_the_whole_batch_agree(data, tmp_path, monkeypatch, kind):
    """Times and noise are drawn for each micro-batch. If they are fixed, the gradients agree."""

    def fixed(config: Any, model: Any, samples: Any) -> torch.Tensor:
        x, text, _ = samples
        t = torch.full((len(x),), 0.5)
        return diffusion.flow_matching_loss(model, x, text, t, torch.ones_like(x)).mean()

    monkeypatch.setattr(diffusion, "loss", fixed)
    monkeypatch.setattr(Evaluation, "evaluate", lambda *args: {})
    monkeypatch.setattr(Latents, "batch", read_means)
    options = {**data[kind], "steps": 2, "samples": 1}
    for name, accumulate in (("whole", 1), ("parts", 2)):
        diffusion.run(config(options, tmp_path / name, accumulate=accumulate))
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)


RETESTED = ["labels", "features", "clips", "buckets", "bucketed clips", "shards"]


@pytest.mark.parametrize("kind", slow_except(["labels", "features"], RETESTED))
def test_finished_run_is_tested_at_another_size(data, tmp_path, capsys, kind):
    """The test size affects neither the training samples nor the weights. Held-out samples are read at that size."""
    chosen = config({**data[kind], "test_size": 0}, tmp_path / "run")
    first = diffusion.run(chosen)
    trained = weights(chosen.out)
    capsys.readouterr()
    larger = replace(chosen, test_size=20)
    result = diffusion.run(larger)
    assert "already finished at step 4; evaluating it again, without training" in capsys.readouterr().err
    added = {name: result["held_out"].pop(name) for name in list(result["held_out"]) if "20x20" in name}
    assert [name.rpartition(" ")[2] for name in added] == ["extrapolated", "rescaled"]
    assert result == first
    diffusion.run(replace(larger, out=tmp_path / "other"))
    assert all(torch.equal(value, trained[name]) for name, value in weights(tmp_path / "other").items())
    source = diffusion.open_source(larger, CPU)
    larger_source = diffusion.open_source(replace(larger, size=20, mix_sizes="", test_size=0), CPU)
    for i in source.held_out[[0, -1]]:
        shape = source.values.shape(20, source.values.buckets(np.array([i]))[0])
        x = source.values.batch(np.array([i]), 20)
        assert x.shape[2:] == shape
        if chosen.max_ratio == 1:
            assert torch.equal(x, larger_source.values.batch(np.array([i]), 20))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels", "clips", "latents", "shards"])
def test_runs_from_before_the_test_size_was_free(data, tmp_path, name):
    """A run whose training data would be the same in this version can be resumed."""
    chosen = config(data[name], tmp_path / "run", steps=2)
    diffusion.run(chosen)
    path = chosen.out / "checkpoint.pt"

    def change(**settings: Any) -> None:
        state = read_checkpoint(path)
        state["settings"] |= settings
        save_checkpoint(state, path, 1)

    change(test_size=48)
    diffusion.run(replace(chosen, steps=4))
    assert torch.load(path)["step"] == 4
    change(test_size=48, digest=0)
    changed = r"\(the data has changed, or an earlier version read it at the test size\); choose"
    with pytest.raises(typer.BadParameter, match=changed):
        diffusion.run(replace(chosen, steps=4))


def test_samples_on_the_way(data, tmp_path, monkeypatch):
    """Sheets don't change the training. A run with sheets but no regular checkpoint can be resumed."""
    options = {**data["labels"], "save_every": 100}
    plain = diffusion.run(config(options, tmp_path / "plain"))
    shown = config(options, tmp_path / "shown", sample_every=2)
    with monkeypatch.context() as patched:
        patched.setattr(diffusion, "loss", die_after(3, diffusion.loss))
        with pytest.raises(Killed):
            diffusion.run(shown)
    assert (tmp_path / "shown" / "samples-0000002.png").exists()
    assert diffusion.run(shown)["held_out"] == plain["held_out"]
    sheets = sorted(path.name for path in (tmp_path / "shown").glob("samples*.png"))
    assert sheets == ["samples-0000002.png", "samples-0000004.png", "samples.png"]
    expected, found = weights(tmp_path / "plain"), weights(tmp_path / "shown")
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.slow
def test_classes_are_learned(tmp_path, capsys):
    """Samples of a class have its colour, and the distance to the data decreases."""
    folder = write_classes(tmp_path / "classes", each=12)
    options = {"data": folder, "size": 8, "test_size": 0, "patch": 4, "batch": 24, "lr": 1e-2, "ema": 0.9}
    before = diffusion.run(config(options, tmp_path / "before", steps=1, distance_samples=24, sample_steps=4))
    after = diffusion.run(config(options, tmp_path / "after", steps=150, distance_samples=24, sample_steps=4))
    assert f"{after['frechet_random_features']:.4g}" in capsys.readouterr().out
    assert after["frechet_random_features"] < 0.5 * before["frechet_random_features"]
    assert after["held_out"]["8x8"]["loss"] < 0.6 * before["held_out"]["8x8"]["loss"]
    npz = tmp_path / "samples.npz"
    done = invoke("sample", tmp_path / "after", "--count", 9, "--npz", npz, "--steps", 8, "--device", "cpu")
    assert done.exit_code == 0, done.output
    with np.load(npz) as file:
        images, labels = file["arr_0"], file["arr_1"]
    assert images.shape == (9, 8, 8, 3)
    assert images.dtype == np.uint8
    assert labels.tolist() == [0, 1, 2] * 3
    brightest = images.astype(int)[:, :, 4:].mean((1, 2)).argmax(1)
    assert brightest.tolist() == [{"blue": 2, "green": 1, "red": 0}[sorted(COLOURS)[label]] for label in labels]


# --- samples ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        diffusion.run(config(data[kind], folder / kind, steps=1))
    return {kind: folder / kind for kind in KINDS}


NUMBERED = ("latents", "film latents", "bucketed clips", "hub")  # kinds of data whose prompt is class number 1
PROMPTS: dict[str, list[Any]] = {
    "labels": ["--prompt", "red", "--prompt", "1", "--negative", "blue"],
    "none": [],
    "latents": ["--prompt", "green"],
    "features": ["--prompt", "a red tile", "--negative", "a tile"],
    "clips": ["--prompt", "dark"],
    "film latents": ["--prompt", "light"],
    "buckets": ["--prompt", "red"],
    "bucketed latents": ["--prompt", "blue"],
    "bucketed clips": ["--prompt", "light"],
    "shards": ["--prompt", "a red tile"],
    "hub": ["--prompt", "green"],
}


@pytest.mark.slow
def test_an_unknown_negative_class_is_named(runs, tmp_path):
    given = ["--prompt", "red", "--negative", "purple", "--steps", 2, "--device", "cpu"]
    refused = invoke("sample", runs["labels"], *given, "--images", 1, "--out", tmp_path / "sheet.png")
    assert refused.exit_code == 2
    assert "--negative: unknown 'purple'" in refused.output


@pytest.mark.parametrize("sampler", ["euler", "dpm++"])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_each_kind(runs, data, tmp_path, kind, sampler):
    given = [*PROMPTS[kind], "--steps", 2, "--device", "cpu", "--sampler", sampler]
    if kind == "features":
        given += ["--encoder", data["latents"]["data"].parent / "text"]
    done = invoke("sample", runs[kind], *given, "--images", 2, "--size", "8x16", "--out", tmp_path / "sheet.png")
    assert done.exit_code == 0, done.output
    what = "clips of 3x8x16" if "clips" in kind or "film" in kind else "images of 8x16"
    assert f"{max(1, given.count('--prompt'))} × 2 {what}, step 1" in done.output
    done = invoke("sample", runs[kind], *given, "--count", 18, "--npz", tmp_path / "samples.npz")
    assert done.exit_code == 0, done.output
    assert f"samples.npz: 18 {what.replace('8x16', '8x8')}, step 1" in done.output
    with np.load(tmp_path / "samples.npz") as file:
        frames = (3,) if kind in ("clips", "film latents", "bucketed clips") else ()
        assert file["arr_0"].shape == (18, *frames, 8, 8, 3)
        assert len(np.unique(file["arr_0"].reshape(18, -1), axis=0)) == 18
        expected = {"labels": [2, 1], "buckets": [2]}.get(kind, [1 if kind in NUMBERED else 0])
        assert file["arr_1"].tolist() == (expected * 18)[:18]


@pytest.mark.parametrize("kind", ["clips", "film latents"])
def test_clips_of_another_length(runs, tmp_path, kind):
    given = [*PROMPTS[kind], "--steps", 1, "--device", "cpu", "--frames", 5]
    done = invoke("sample", runs[kind], *given, "--images", 1, "--out", tmp_path / "sheet.png")
    assert "1 × 1 clips of 5x8x8, step 1" in done.output, done.output
    assert invoke("sample", runs[kind], *given, "--count", 2, "--npz", tmp_path / "samples.npz").exit_code == 0
    with np.load(tmp_path / "samples.npz") as file:
        assert file["arr_0"].shape == (2, 5, 8, 8, 3)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("labels", ["--prompt", "rde"], "--prompt: unknown 'rde'; did you mean 'red'? Choose from: blue; green; red"),
        ("labels", ["--prompt", "3"], "--prompt: unknown '3'"),
        (
            "none",
            ["--prompt", "red"],
            "--prompt: not supported, because the model was trained without captions or classes",
        ),
        ("features", ["--prompt", "a tile"], "--encoder: expected the text model that computed the training features"),
        ("latents", ["--prompt", "green", "--size", "10x8"], ""),
        (
            "latents",
            ["--prompt", "green", "--size", "9x8"],
            "--size: expected multiples of 2, because a patch has 1 latent per side, and each latent covers 2 pixels",
        ),
        (
            "none",
            ["--scale", "2"],
            "--scale: has no effect, because this run was trained without captions or classes",
        ),
        ("labels", ["--count", "3"], "--count, --npz: expected both or neither, got 3 and None"),
        ("labels", ["--prompt", "red", "--sampler", "ddim"], "--sampler: unknown 'ddim'"),
        (
            "labels",
            [],
            "--prompt: expected at least one prompt for a run of `train diffusion`, got none; pass a class, such as",
        ),
        ("labels", ["--prompt-file", "absent.txt"], "--prompt-file absent.txt: can't be read as text"),
    ],
)
def test_wrong_samples_are_refused(runs, tmp_path, kind, given, message):
    done = invoke("sample", runs[kind], *given, "--steps", 1, "--device", "cpu", "--out", tmp_path / "sheet.png")
    assert (done.exit_code == 0) == (message == ""), done.output
    assert message in done.output


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "labels",
            {"frames": 3},
            r"--frames 3: only works with videos, and --data contains images; leave out --frames",
        ),
        ("labels", {"every": 2}, r"--every 2: only works with videos"),
        ("labels", {"cache": "none"}, r"--cache none: only works with videos"),
        ("film latents", {"cache": "none"}, r"--cache none: latents are read from memory; leave out --cache"),
        ("labels", {"vae": "runs/vae"}, r"--vae runs/vae: only works with latents"),
        (
            "clips",
            {"stream": True},
            r"--stream: only works with images, and --data contains videos; leave out --stream",
        ),
        ("clips", {"label": "kind"}, r"--label kind: only works with images"),
        ("latents", {"stream": True}, r"--stream: latents are read from memory; leave out --stream"),
        ("latents", {"segment": 9}, r"--segment 9: only works with latents of videos; leave out --segment"),
    ],
)
def test_options_for_other_data_are_refused(data, tmp_path, kind, options, message):
    with pytest.raises(typer.BadParameter, match=message):
        diffusion.run(config(data[kind], tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--label", "--without"])
def test_latents_of_videos_refuse_options_of_tables(data, tmp_path, option):
    folder = write_vae(tmp_path / "vae")
    command = ("latents", "--vae", folder, "--data", data["clips"]["data"], "--size", 8, "--out", tmp_path / "out")
    assert f"{option} kind: only works with images, and --data contains videos" in output_of(*command, option, "kind")


def test_held_out_samples_are_counted(data, tmp_path, capsys):
    for kind, classes in (("labels", r": blue \d+, green \d+, red \d+"), ("none", "")):
        diffusion.prepare(config(data[kind], tmp_path / "out"), torch.device("cpu"))
        source = diffusion.open_source(config(data[kind], tmp_path / "out"), torch.device("cpu"))
        total = len(source.train) + len(source.held_out)
        assert 0 < len(source.held_out) < 10
        few = "With fewer than 10 test samples, the held-out loss says little; pass a smaller --parts, or add samples"
        said = rf"Held out {len(source.held_out)} of {total} samples for tests{classes}\n{few}"
        assert re.search(said, capsys.readouterr().err)


def test_prompts_of_a_file(runs, tmp_path):
    (tmp_path / "prompts.txt").write_text("red\n\nblue\n", encoding="utf-8")
    given = ["--prompt-file", tmp_path / "prompts.txt", "--steps", 1, "--device", "cpu"]
    done = invoke("sample", runs["labels"], *given, "--count", 4, "--npz", tmp_path / "s.npz")
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "s.npz") as file:
        assert file["arr_1"].tolist() == [2, 0, 2, 0]
