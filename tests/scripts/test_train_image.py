"""Training the image model on synthetic images, and the ViT's positions on a reference grid."""

import gzip
import io
import json
import shutil
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import typer
from lrpe_md.models.vit import lrpe_vit_tiny_patch16_224
from lrpe_md.scripts.train.data import images as image_data
from lrpe_md.scripts.train.data.images import (
    ImageError,
    Images,
    load_images,
    load_stream,
    read_idx,
    resized,
    shifted,
)
from lrpe_md.scripts.train.data.pictures import load_classes
from lrpe_md.scripts.train.data.streams import is_stream, open_image
from lrpe_md.scripts.train.encodings import IMAGES
from lrpe_md.scripts.train.runs import load_run
from lrpe_md.scripts.train.tasks import image as train_image
from lrpe_md.scripts.train.tasks.image import ImageTraining, parse_sizes
from lrpe_md.scripts.train.weights import start_from
from parametrizing import slow_except
from PIL import Image
from torch import nn
from torch.nn import functional as F
from train_commands import die_after, flags, output_of, with_options

from lrpe_md import CosineMd, Grid

SMALL = {
    "steps": 24, "batch": 16, "lr": 3e-3, "warmup": 2, "ema": 0.5, "device": "cpu", "log_every": 4, "save_every": 8,
    "tensorboard": False, "size": 8, "test_sizes": "12,8x12", "patch": 4, "dim": 48, "depth": 1, "heads": 2, "shift": 1,
}  # fmt: skip

SHAPE = ("dim", "depth", "heads", "patch")
TIMM = {**{k: v for k, v in SMALL.items() if k not in SHAPE}, "model": "test_vit2", "size": 32, "test_sizes": ""}


def squares(num: int, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images with a bright top or bottom half, (N, H, W) uint8, and labels."""
    generator = np.random.default_rng(num)
    labels = np.arange(num) % 2
    images = generator.integers(0, 60, (num, side, side))
    images[labels == 0, : side // 2] += 180
    images[labels == 1, side // 2 :] += 180
    return images.astype(np.uint8), labels.astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, train: int = 48, test: int = 20) -> Path:
    folder.mkdir(parents=True)
    for name, num in (("train", train), ("t10k", test)):
        images, labels = squares(num)
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_idx(tmp_path_factory.mktemp("images") / "idx")


def write_flat(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), number: int = 12) -> Path:
    """Write CLASS/*.png, without folders for training and tests."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(number):
            Image.new("RGB", (8, 8), (10 * i, 20, 30)).save(folder / name / f"{i}.png")
    return folder


def write_folders(folder: Path, classes: str = "ab") -> Path:
    for part, num in (("train", 4), ("val", 2)):
        for c, name in enumerate(classes):
            for i in range(num):
                path = folder / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (12, 8), (100 * c, 10 * i, 7)).save(path)
    return folder


# --- data ------------------------------------------------------------------------------------------------------------


def test_idx_files_are_read(data):
    found = load_images(data, 99)
    for part, num in ((found.train, 48), (found.test, 20)):
        images, labels = squares(num)
        assert torch.equal(part.images, torch.from_numpy(images)[:, None])
        assert part.labels.tolist() == labels.tolist()
        assert part.labels.dtype == torch.int64
    assert found.num_classes == 2
    few, again = load_images(data, 8, limit=10), load_images(data, 8, limit=10)
    assert (len(few.train), len(few.test)) == (10, 10)
    assert few.train.digest == again.train.digest != found.train.digest


def test_damaged_idx_files(tmp_path):
    folder = write_idx(tmp_path / "idx")
    images, labels = folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    short = gzip.compress(idx(squares(48)[0])[:-1])
    said = r"expected 3072 bytes of data for the shape \(48, 8, 8\) in its header, got 3071"
    for wrong, reason in ((whole[:100], "can't be read"), (b"no gzip", "can't be read"), (short, said)):
        images.write_bytes(wrong)
        with pytest.raises(ImageError, match=rf"train-images-idx3-ubyte\.gz.*{reason}.*download it again"):
            load_images(folder, 8)
    for wrong in (b"", b"\x00\x00\x0d\x03aaaaaaaaaaaa", b"\x00\x00\x08\x03aaaa"):
        labels.write_bytes(wrong)
        with pytest.raises(ImageError, match="expected an idx file of bytes"):
            read_idx(labels)
    images.write_bytes(whole)
    labels.write_bytes(idx(squares(47)[1]))
    with pytest.raises(ImageError, match=r"got \(48, 8, 8\), \(47,\)"):
        load_images(folder, 8)
    labels.unlink()
    with pytest.raises(ImageError, match=r"train-labels-idx1-ubyte\(\.gz\) is missing"):
        load_images(folder, 8)


@pytest.mark.parametrize("stream", [False, True])
def test_held_out_images_are_counted_by_class(tmp_path, stream, capsys):
    folder = write_flat(tmp_path / "flat")
    config = ImageTraining(data=folder, out=tmp_path / "run", stream=stream, **{**SMALL, "batch": 4})
    train_image.prepare(config, torch.device("cpu"))
    sources = image_data.list_folder(folder)
    cats, dogs = np.bincount(sources[1].labels)
    assert cats
    assert dogs
    said = capsys.readouterr().err
    assert f"Held out {cats + dogs} of 24 images for tests: cat {cats}, dog {dogs}\n" in said
    few = [name for name, number in (("cat", cats), ("dog", dogs)) if number < 3]
    assert few
    assert f"Classes with fewer than 3 test images: {', '.join(few)}. Their accuracy says little; add images\n" in said


@pytest.mark.parametrize("dataset", ["", "folder"])
def test_folders_by_themselves_and_through_timm(tmp_path, dataset):
    found = load_images(write_folders(tmp_path), 8, dataset=dataset)
    assert found.train.images.shape == (8, 3, 8, 8)
    assert found.test.images.shape == (4, 3, 8, 8)
    assert found.train.images.dtype == torch.uint8
    pairs = {(int(x[0, 4, 4]), int(label)) for x, label in zip(found.train.images, found.train.labels, strict=True)}
    assert pairs == {(0, 0), (100, 1)}
    assert len(load_images(tmp_path, 8, dataset=dataset, limit=3).train) == 3


@pytest.mark.parametrize("dataset", ["", "folder", "torch/image_folder"])
def test_splits_with_different_classes_are_refused(tmp_path, dataset):
    """timm numbers the classes of each split separately."""
    write_folders(tmp_path)
    first = min(path.name for path in (tmp_path / "val").iterdir())
    shutil.rmtree(tmp_path / "val" / first)
    with pytest.raises(ImageError, match=f"expected the same classes .*, got these in only one of the two: {first}"):
        load_images(tmp_path, 8, dataset=dataset)


def test_transparent_and_16_bit_images_are_read_alike_with_and_without_streaming(tmp_path):
    pixels = {"a": np.zeros((8, 8, 4), np.uint8), "b": np.full((8, 8), 32768, np.uint16)}  # transparent, and grey
    for part in ("train", "val"):
        for name, values in pixels.items():
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(values).save(tmp_path / part / name / "0.tif")
    loaded, streamed = load_images(tmp_path, 8), load_stream(tmp_path, 8)
    for images in (loaded.train.images, loaded.test.images, streamed.test.images):
        assert images.unique_consecutive().tolist() == [255, 128]
    assert [np.unique(streamed.train[i][0]).tolist() for i in range(2)] == [[255], [128]]


def test_a_transparent_value_of_a_16_bit_image_becomes_white():
    file = io.BytesIO()
    Image.fromarray(np.array([[256, 511], [512, 65535]], np.uint16)).save(file, "PNG", transparency=511)
    assert np.asarray(open_image(file.getvalue()))[..., 0].tolist() == [[1, 255], [2, 255]]


@pytest.mark.parametrize("write", [write_folders, write_flat])
def test_hidden_files_are_ignored(tmp_path, write):
    """Jupyter writes .ipynb_checkpoints into folders, and macOS writes ._NAME next to files."""
    folder = write(tmp_path / "data")
    before = [len(each.files) for each in image_data.list_folder(folder)]
    classes = [path for path in folder.rglob("*") if path.is_dir() and list(path.glob("*.png"))]
    for path in classes:
        (path / "._0.png").write_bytes(b"no image")
    hidden = classes[0].parent / ".ipynb_checkpoints"
    hidden.mkdir()
    shutil.copy(classes[0] / "0.png", hidden)
    (folder / "._shard.tar").write_bytes(b"no shard")
    (hidden / "table.parquet").write_bytes(b"no table")
    assert not is_stream(folder)
    train, test = image_data.list_folder(folder)
    assert [len(train.files), len(test.files)] == before
    assert len(train.classes) == 2
    load_images(folder, 8)


def test_unsuitable_folders(tmp_path, monkeypatch):
    for read in (load_images, load_stream):
        with pytest.raises(
            ImageError, match=r"no such folder; expected class folders \(CLASS/\*\.png with at least two classes, or"
        ):
            read(tmp_path / "nothing", 8)
        with pytest.raises(
            ImageError, match=r"found no images; expected class folders \(CLASS/\*\.png .*, idx files like MNIST's"
        ):
            read(tmp_path, 8)
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    with pytest.raises(
        ImageError, match=r"found 1 image outside any class folder; expected class folders \(CLASS/\*\.png"
    ):
        load_images(tmp_path, 8)
    (tmp_path / "cats").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "cats" / "1.png")
    with pytest.raises(ImageError, match=r"found one class, cats; expected class folders \(CLASS/\*\.png"):
        load_images(tmp_path, 8)
    with pytest.raises(ImageError, match="its train split is not in"):
        load_images(tmp_path, 8, dataset="torch/cifar10")
    folder = write_folders(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(image_data, "MEMORY", 100)
        with pytest.raises(ImageError, match="8 images of 8×8 take 0 GiB"):
            load_images(folder, 8)
    broken = folder / "train" / "a" / "0.png"
    broken.write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"0\.png can't be read as an image"):
        load_images(folder, 8)
    broken.unlink()
    (folder / "val" / "c").mkdir()
    with pytest.raises(ImageError, match="only one of the two: c"):
        load_images(folder, 8)
    empty = tmp_path / "empty"
    for part in ("train", "val"):
        (empty / part / "a").mkdir(parents=True)
    with pytest.raises(ImageError, match="no training images"):
        load_images(empty, 8)


def test_augmentation_follows_its_random_draws():
    x = torch.arange(1, 21, dtype=torch.uint8).reshape(1, 1, 4, 5).expand(18, 2, -1, -1)
    draws = np.arange(18)
    assert torch.equal(shifted(x, draws, shift=0, flip=False), x)
    moved = shifted(x, draws, shift=1, flip=True)
    assert moved.shape == x.shape
    assert moved.is_contiguous()
    found = set()
    for y in moved:
        assert torch.equal(y[0], y[1])
        for mirrored in (False, True):
            image = torch.nn.functional.pad(x[0, 0], (1, 1, 1, 1))
            for down in range(3):
                for right in range(3):
                    part = image[down : down + 4, right : right + 5]
                    if torch.equal(y[0], part.flip(-1) if mirrored else part):
                        found.add((mirrored, down, right))
    assert len(found) == 18
    assert torch.equal(shifted(x[:3], draws[4:7], shift=1, flip=True), moved[4:7])
    assert resized(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), (1, 2)).tolist() == [[[[-1, 1]]]]
    assert resized(x, (8, 3)).shape == (18, 2, 8, 3)


def test_sizes():
    assert parse_sizes("--test-sizes", "20, 28x40,", 2) == [(20, 20), (28, 40)]
    assert parse_sizes("--test-sizes", "", 2) == []
    for wrong in ("21", "20x", "20x30x40", "big", "0"):
        message = f"--size: expected a side or HEIGHTxWIDTH in multiples of 2, got '{wrong}'"
        with pytest.raises(typer.BadParameter, match=message):
            parse_sizes("--size", f"8x6,{wrong}", 2)


def test_images_are_read_at_the_smallest_size_that_is_large_enough():
    assert train_image.enclose([(28, 28), (20, 20), (40, 28)]) == (40, 40)
    assert train_image.enclose([(8, 12)]) == (8, 12)
    assert train_image.enclose([(8, 12), (4, 24)]) == (16, 24)
    assert train_image.enclose([(8, 12), (10, 4)]) == (10, 15)


@pytest.mark.parametrize("stream", [False, True])
def test_images_that_are_not_square(tmp_path, stream):
    """Images are cropped to the aspect ratio of each size, in training and in tests."""
    for part, number in (("train", 8), ("val", 4)):
        for c, name in enumerate("ab"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for i in range(number):
                image = Image.new("RGB", (24, 8), (0, 0, 250 * c))  # a red bar on each side, outside the square
                for x in (*range(6, 9), *range(15, 18)):
                    image.paste((250, 0, 0), (x, 0, x + 1, 8))
                image.save(tmp_path / "data" / part / name / f"{i}.png")
    options = {**SMALL, "batch": 8, "steps": 2, "size": "8x12", "shift": 0, "test_sizes": "16x24,8"}
    config = ImageTraining(data=tmp_path / "data", out=tmp_path / "run", stream=stream, **options)
    work = train_image.prepare(config, torch.device("cpu"))
    x, _ = work.batch(*next(work.steps(0)))
    assert x.shape == (8, 3, 8, 12)
    x = x if x.is_floating_point() else resized(x, (8, 12))
    assert x[:, 0, :, [0, 2, 9, 11]].min() > 0.9  # red
    assert x[:, 0, :, 4:8].max() < -0.9
    result = train_image.run(config)
    assert list(result["accuracy"]["rescaled"]) == ["8x12", "16x24", "8x8"]
    assert result["tokens"] == 8 * 6
    model = load_run(config.out)
    assert model.patch_embed.grid_size == (2, 3)
    larger = {**options, "size": "16x24", "weights": str(config.out), "reference": "8x12", "test_sizes": ""}
    fine = train_image.run(ImageTraining(data=tmp_path / "data", out=tmp_path / "fine", stream=stream, **larger))
    assert (fine["size"], fine["reference"], fine["weights"]) == ("16x24", "8x12", str(config.out))
    assert fine["export"][4:] == ["model.reference = (2, 3)"]
    assert load_run(tmp_path / "fine").reference == (2, 3)


@pytest.mark.parametrize("augmented", [False, True])
def test_mixed_aspect_ratios_are_cropped_from_the_files(tmp_path, augmented):
    """Each training size shows what a test at this size shows, instead of stretched images."""
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(4):
            x = np.zeros((32, 16, 3), np.uint8)
            x[8:24] = np.linspace(0, 255, 16).astype(np.uint8)[:, None, None]
            Image.fromarray(x).save(tmp_path / name / f"{i}.png")
    options = {**SMALL, "batch": 2, "size": "8x16", "mix_sizes": "16,8,16x8", "shift": 0, "flip": False}
    options |= {"test_sizes": "", "augment": "rand-m0-n0" if augmented else ""}
    config = ImageTraining(data=tmp_path, out=tmp_path / "run", **options)
    work = train_image.prepare(config, torch.device("cpu"))
    steps, found = work.steps(0), {}
    for _ in range(16):
        x, _ = work.batch(*next(steps))
        found[tuple(x.shape[2:])] = x if x.is_floating_point() else resized(x, tuple(x.shape[2:]))
    assert set(found) == {(8, 16), (16, 16), (8, 8), (16, 8)}
    for size, x in found.items():
        expected = load_images(tmp_path, size).test.images[:2]
        assert (x - resized(expected, size)).abs().max() < 0.15, size
    counts = [height * width // config.patch**2 for height, width in found]
    assert train_image.patches(config) == config.batch * sum(counts) / 4


def test_non_square_sizes_are_suggested_and_mixed(data, tmp_path, capsys):
    short = {**SMALL, "data": data, "steps": 2, "test_sizes": ""}
    short.pop("size")
    mixed = ImageTraining(out=tmp_path / "first", **short, size="8x12", mix_sizes="8,12x8")
    train_image.run(mixed)
    work = train_image.prepare(mixed, torch.device("cpu"))
    steps = work.steps(0)
    shapes = {work.batch(*next(steps))[0].shape[2:] for _ in range(9)}
    assert shapes == {(8, 12), (8, 8), (12, 8)}
    train_image.run(ImageTraining(out=tmp_path / "second", **short, size=16, weights=str(tmp_path / "first")))
    said = capsys.readouterr().err
    assert "trained with 2×3 patches; this training has 4×4" in said
    assert "pass --reference 8x12\n" in said
    with pytest.raises(typer.BadParameter, match="--max-ratio 2: expected square --size and --mix-sizes, got 8x12;"):
        ImageTraining(out=tmp_path, **short, size="8x12", max_ratio=2)


# --- the script ------------------------------------------------------------------------------------------------------


def test_training_learns_the_classes(data, tmp_path, capsys):
    config = ImageTraining(
        data=data, out=tmp_path / "run", encoding="rotate:base=100", attention="linear", **SMALL
    )  # with 24 channels per head and 24 steps, a higher base learns more slowly
    result = train_image.run(config)
    losses = [row["loss"] for row in torch.load(config.out / "checkpoint.pt")["history"]]
    assert losses[-1] < 0.6 * losses[0]
    assert result["step_ms"] > 0
    assert (result["tokens"], result["train_images"], result["chance"]) == (64, 48, 50)
    assert (result["size"], result["reference"], result["weights"]) == ("8", "", "")
    adapted = {"encoding_kwargs": {"base": 100}, "attention": "linear", "normalizer": "none"}
    assert (
        result["export"][3] == f"model = adapt(model, 'rotate', {', '.join(f'{k}={v!r}' for k, v in adapted.items())})"
    )
    accuracy = result["accuracy"]
    assert list(accuracy["extrapolated"]) == list(accuracy["rescaled"]) == ["8x8", "12x12", "8x12"]
    assert accuracy["extrapolated"]["8x8"] == accuracy["rescaled"]["8x8"] == 100
    assert json.loads((config.out / "result.json").read_text()) == result
    assert {p.name for p in config.out.iterdir()} == {
        "checkpoint.pt",
        "history.csv",
        "model.safetensors",
        "result.json",
    }
    capsys.readouterr()
    assert train_image.run(config) == result  # a finished run is not trained again, and keeps its timings
    assert f"{config.out}: already finished at step 24; evaluating it again" in capsys.readouterr().err
    assert json.loads((config.out / "result.json").read_text()) == result
    (config.out / "result.json").write_text(json.dumps({**result, "steps": 12}))  # as if from a shorter run
    assert train_image.run(config)["train_steps_timed"] == 0


@pytest.mark.parametrize("kind", ["memory", "stream", "table"])
def test_finished_run_is_tested_at_other_sizes(kind, table, tmp_path, capsys):
    """Test sizes affect neither the training images nor the weights."""
    data = {"data": write_flat(tmp_path / "data"), "stream": kind == "stream"}
    if kind == "table":
        data = {"data": table, "label": "kind"}
    config = ImageTraining(out=tmp_path / "run", **data, **{**SMALL, "batch": 4, "steps": 2})
    first = train_image.run(config)
    weights = torch.load(config.out / "checkpoint.pt")["model"]
    capsys.readouterr()
    result = train_image.run(ImageTraining(**{**vars(config), "test_sizes": "16,24x16"}))
    said = capsys.readouterr()
    assert "already finished at step 2; evaluating it again, without training" in said.err
    assert list(result["accuracy"]["extrapolated"]) == ["8x8", "16x16", "24x16"]
    assert "24x16" in said.out
    assert "rescaled positions are mapped onto the training grid.\n" in said.out
    assert {**result, "accuracy": 0} == {**first, "accuracy": 0}
    assert json.loads((config.out / "result.json").read_text()) == result
    elsewhere = ImageTraining(**{**vars(config), "out": tmp_path / "other", "test_sizes": "32"})
    train_image.run(elsewhere)
    other = torch.load(elsewhere.out / "checkpoint.pt")["model"]
    assert all(torch.equal(value, other[name]) for name, value in weights.items())


@pytest.mark.parametrize("kind", ["memory", "stream", "table", "timm"])
def test_each_test_size_has_its_own_images(kind, table, tmp_path, monkeypatch):
    """At each size, the model sees the files as read at that size, whatever the other sizes are."""
    data, seen = {"data": write_flat(tmp_path / "data"), "stream": kind == "stream"}, {}
    if kind == "timm":
        data = {"data": write_folders(tmp_path / "folders"), "dataset": "folder/"}
    elif kind == "table":
        data = {"data": table, "label": "kind"}

    def recorded(model, test, size, autocast):
        seen.setdefault(size, []).append(test.images)
        return test.labels == 0

    monkeypatch.setattr(train_image, "find_right", recorded)
    few = {**SMALL, "batch": 4, "steps": 1, "test_sizes": "4,8x12,16"}
    config = ImageTraining(out=tmp_path / "run", **data, **few)
    train_image.run(config)
    options = (config.dataset, config.limit, config.label, config.without, config.stream)
    for size in config.test_shapes:
        expected = train_image.load(config.data, size, size, *options).test.images
        assert expected.shape[-2:] == size
        assert all(torch.equal(images, expected) for images in seen[size])
    monkeypatch.setattr(image_data, "MEMORY", 3 * 16 * 16)
    with pytest.raises(ImageError, match=r"images of 16×16 take 0 GiB.* smaller --size or --test-sizes"):
        train_image.load(config.data, (2, 2), (2, 2), *options).check_memory([(2, 2), (16, 16)])


def test_validation_during_training(data, tmp_path):
    few = {**SMALL, "steps": 8, "log_every": 3, "save_every": 4}
    plain = train_image.run(ImageTraining(data=data, out=tmp_path / "plain", **few))
    checked = train_image.run(ImageTraining(data=data, out=tmp_path / "checked", validate_every=4, **few))
    assert checked["accuracy"] == plain["accuracy"]
    weights = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("plain", "checked")]
    assert all(torch.equal(value, weights[1]["average"][name]) for name, value in weights[0]["average"].items())
    rows = weights[1]["history"]
    assert [row["step"] for row in rows] == [3, 4, 6, 8]
    assert ["accuracy" in row for row in rows] == [False, True, False, True]
    assert rows[-1]["accuracy"] == plain["accuracy"]["extrapolated"]["8x8"]
    lines = (tmp_path / "checked" / "history.csv").read_text().splitlines()
    assert lines[0] == "step,loss,lr,accuracy"


def test_slow_phases_are_announced(data, tmp_path):
    run = ["image", "--data", data, *flags({**SMALL, "steps": 1})]
    shown = output_of(*run, "--out", tmp_path / "a", code=0)
    silent = output_of(*run, "--out", tmp_path / "b", "--no-progress", code=0)
    for text in ("Reading the data", "Evaluating"):
        assert text in shown
        assert text not in silent


@pytest.mark.parametrize("reference", [0, 8])
def test_each_size_is_evaluated_once_with_extrapolated_and_rescaled_positions(reference, tmp_path, monkeypatch):
    seen = []

    def recorded(model, test, size, autocast):
        seen.append((size, model.reference))
        return (test.labels == 0) if len(seen) == 1 else torch.zeros_like(test.labels)

    monkeypatch.setattr(train_image, "find_right", recorded)
    few = {**SMALL, "steps": 1, "batch": 2, "reference": reference}
    data = write_flat(tmp_path / "data", number=30)
    result = train_image.run(ImageTraining(data=data, out=tmp_path / "run", limit=8, **few))
    sizes = [(8, 8), (12, 12), (8, 12)]
    ways = {"rescaled": (2, 2)} if reference else {"extrapolated": None, "rescaled": (2, 2)}
    assert seen == [(size, reference) for size in sizes for reference in ways.values()]
    assert list(result["accuracy"]) == list(ways)
    assert result["accuracy_by_class"] == {"cat": 100, "dog": 0}  # from the first evaluation
    assert (result["train_images"], result["test_images"]) == (8, 8)


def test_resumed_run_equals_uninterrupted_run(data, tmp_path, monkeypatch):
    few = {**SMALL, "steps": 5, "save_every": 2, "erase": 0.5, "encoding": "cosine-softplus-phase"}
    weights, batch = [], train_image.batch
    for kill in (99, 1, 4):
        config = ImageTraining(data=data, out=tmp_path / f"{kill}", **few)
        monkeypatch.setattr(train_image, "batch", die_after(kill, batch, KeyboardInterrupt))
        if kill < 5:
            with pytest.raises(KeyboardInterrupt):
                train_image.run(config)
            monkeypatch.setattr(train_image, "batch", batch)
            torch.manual_seed(kill)
        train_image.run(config)
        weights.append(torch.load(config.out / "checkpoint.pt")["average"])
    for other in weights[1:]:
        assert all(torch.equal(value, other[name]) for name, value in weights[0].items())


@pytest.mark.parametrize("attention", IMAGES.attentions)
def test_norms_of_q_and_k(attention, data, tmp_path):
    images = load_images(data, 8)
    for qk_norm, kind in ((True, nn.LayerNorm), (False, nn.Identity)):
        config = ImageTraining(data=data, out=tmp_path, attention=attention, qk_norm=qk_norm, **SMALL)
        block: Any = train_image.build(config, train_image.model_arguments(config, images)).blocks[0]
        assert isinstance(block.attn.q_norm, kind)
        assert isinstance(block.attn.k_norm, kind)


@pytest.mark.parametrize("attention", IMAGES.attentions)
def test_every_encoding_learns_positions(attention, data, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 1, 12, 12, dtype=torch.float64)
    swapped = x.clone()
    swapped[..., :4, :4], swapped[..., 4:8, 8:] = x[..., 4:8, 8:], x[..., :4, :4]
    for name in IMAGES.encodings:
        config = ImageTraining(data=data, out=tmp_path, encoding=name, attention=attention, **{**SMALL, "depth": 2})
        arguments = train_image.model_arguments(config, load_images(data, 8))
        json.dumps(arguments)  # checkpoints contain them
        model = train_image.build(config, arguments).eval().double()
        with torch.no_grad():
            change = (model(x) - model(swapped)).abs().max()
        assert (change < 1e-13) == (name == "none"), name
        if "mixed" in name or "phase" in name:  # one per head
            module = model.encoding if isinstance(model.encoding, CosineMd) else model.encoding[1]
            assert module.num_heads == 2


@pytest.mark.parametrize("attention", slow_except(["softmax"], [*IMAGES.attentions, "linear,softmax"]))
def test_lines_in_the_result_build_the_same_model_with_timm(attention, data, tmp_path):
    """This includes learned frequencies and tables, a reference, and timm models with and without their table."""
    torch.manual_seed(0)
    images = load_images(data, 8)
    own, theirs = {**SMALL, "depth": 2, "qk_norm": True, "reference": 8}, {**TIMM, "weights": "vit.pt"}
    cases = [
        *((name, own) for name in IMAGES.encodings),
        ("wan", own),
        ("rotate:base=50,split=1,3", SMALL | {"depth": 2}),
    ]
    cases += [(name, options) for name in ("cosine-silu", "rotate-mixed", "learned") for options in (TIMM, theirs)]
    for name, options in cases:
        if name in ("none", "learned"):
            options = {key: value for key, value in options.items() if key != "reference"}
        config = ImageTraining(data=data, out=tmp_path, encoding=name, attention=attention, **options)
        arguments = train_image.model_arguments(config, images)
        model, keep = train_image.build(config, arguments).eval(), bool(config.weights)
        lines = train_image.list_export_lines(arguments, keep_table=keep)
        if name == "sincos":  # timm has no such table
            assert not lines
            continue
        model.load_state_dict(random_weights(model))
        names: dict = {}
        exec("\n".join(lines), names)
        names["model"].load_state_dict(model.state_dict())
        x = torch.randn(2, 1, 64, 32)
        assert torch.equal(names["model"].eval()(x), model(x)), name


@pytest.mark.parametrize("size", [(32, 32), (32, 48)])
def test_exported_models_state_the_preprocessing_of_the_run(size, tmp_path):
    """This includes timm models with other pretrained statistics, such as DeiT."""
    ramps = np.meshgrid(np.linspace(0, 255, 70), np.linspace(0, 255, 90), [0, 128, 255], indexing="ij")
    Image.fromarray(np.where(ramps[2] == 128, ramps[1], ramps[0]).astype(np.uint8)).save(tmp_path / "0.png")
    arguments = {
        "model": "deit_tiny_patch16_224", "img_size": size, "in_chans": 3, "num_classes": 2, "encoding": "rotate",
    }  # fmt: skip
    names: dict = {}
    exec("\n".join(train_image.list_export_lines(arguments)), names)
    config = timm.data.resolve_model_data_config(names["model"])
    found = timm.data.create_transform(**config)(Image.open(tmp_path / "0.png"))
    expected = resized(image_data.read_image(tmp_path / "0.png", size)[None], size)[0]
    assert found.shape == expected.shape
    assert (found - expected).abs().mean() < 0.05  # timm resizes before it crops


def test_phase_rotates_only_keys():
    module = CosineMd(8, 2, num_heads=2, base=100.0, act="softplus", phase="k")
    q, k = torch.randn(2, 1, 2, 6, 8).unbind(0)
    before = module(q, k, positions=Grid((2, 3)))
    with torch.no_grad():
        module.phase.fill_(0.3)
    after = module(q, k, positions=Grid((2, 3)))
    assert torch.equal(before[0], after[0])
    assert (before[1] - after[1]).abs().max() > 0.1
    (after[0] @ after[1].mT).square().sum().backward()
    assert module.phase.grad.abs().min() > 0


def test_invalid_options(data, tmp_path):
    run = ["image", "--data", str(data), "--out", str(tmp_path / "run"), *flags({**SMALL, "steps": 1})]

    def refused(*options):
        return output_of(*with_options(run, *options))

    assert "unknown 'rope'" in refused("--encoding", "rope")
    said = "expected a side or HEIGHTxWIDTH in multiples of 4, got '8x10'"
    assert f"--size: {said}" in refused("--size", "8x10")
    assert f"--test-sizes: {said}" in refused("--test-sizes", "8x10")
    assert "expected at most 48, the number of training images" in refused("--batch", "64")
    assert "no such folder" in refused("--data", str(tmp_path / "nothing"))
    assert "--erase" in refused("--erase", "1.5")
    assert "--shift" in refused("--shift", "-1")
    wrong = refused("--heads", "5")
    assert "--dim: expected a multiple of 5 (--heads), got 48; pass --dim 40 or 50, or change --heads" in wrong
    assert "--heads 16" in refused("--heads", "16")  # rotation needs an even head_dim
    assert not (tmp_path / "run").exists()  # nothing was written
    output_of(*run, code=0)
    assert "(--encoding: was rotate, is now cosine);" in refused("--encoding", "cosine")
    said = " ".join(refused("--size", "16").replace("│", " ").split())  # the box wraps long lines
    assert "(--size: was 8, is now 16); choose another folder" in said
    assert "To test it at this size, pass --test-sizes 16 instead. To fine-tune it" in said
    assert f"pass --weights {tmp_path / 'run'} --reference 8 and another --out" in said
    other = write_idx(tmp_path / "other", train=32)
    assert "the data has changed" in refused("--data", str(other))


def test_the_summary_of_a_resumed_run_says_which_steps_it_timed(data, tmp_path):
    run = ["image", "--data", data, "--out", tmp_path, *flags(SMALL)]
    assert "training, seconds  " in output_of(*with_options(run, "--steps", 2), code=0)
    assert "training, seconds (last 1 step)" in output_of(*with_options(run, "--steps", 3), code=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "compile"), [("bf16", False), ("bf16", True), ("fp16", False)])
def test_16_bits_on_a_gpu(data, tmp_path, precision, compile):
    from accelerate.state import AcceleratorState

    def losses(config):
        return [row["loss"] for row in torch.load(config.out / "checkpoint.pt", map_location="cpu")["history"]]

    fast = {"device": "cuda", "precision": precision, "compile": compile}
    if precision == "fp16":  # loss scaling skips steps, so runs differ
        fast["erase"] = 0.2
    try:
        for name in ("rotate", "cosine-softplus-phase", "cosine-mixed-learnable"):
            same = {"data": data, "encoding": name, **SMALL, "steps": 48, "accumulate": 2}
            AcceleratorState._reset_state(reset_partial_state=True)
            slow = ImageTraining(out=tmp_path / f"{name}-cpu", **same)
            train_image.run(slow)
            AcceleratorState._reset_state(reset_partial_state=True)
            config = ImageTraining(out=tmp_path / name, **{**same, **fast})
            torch.compiler.reset()
            result = train_image.run(config)
            assert losses(config)[-1] < losses(config)[0]
            if precision == "bf16":
                assert losses(config) == pytest.approx(losses(slow), abs=0.05)
            if name == "rotate" and precision == "bf16":  # other encodings need more steps to learn the task
                assert result["accuracy"]["extrapolated"]["8x8"] > 90
            assert result["peak_mib"] > 1
            assert result["step_ms"] > 0
            assert train_image.run(config)["accuracy"] == result["accuracy"]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


# --- the ViT's reference ---------------------------------------------------------------------------------------------

tiny = partial(
    lrpe_vit_tiny_patch16_224, img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=3,
)  # fmt: skip


@pytest.mark.parametrize("name", ["rotate", "mixed", "cosine", "sincos"])
def test_reference_rescales_positions_to_the_trained_grid(name):
    torch.manual_seed(0)
    arguments = {"absolute": "sincos"} if name == "sincos" else {"encoding": name}
    model = tiny(**arguments).eval().double()
    small, large = torch.randn(1, 3, 16, 16).double(), torch.randn(1, 3, 32, 24).double()
    with torch.no_grad():
        plain, extrapolated = model(small), model(large)
        model.reference = model.patch_embed.grid_size
        assert torch.equal(model(small), plain)
        assert (model(large) - extrapolated).abs().max() > 1e-6
        grid = model._embed(large)[1]
        assert grid.coordinates().amax(0).tolist() == pytest.approx([4 * 7 / 8, 4 * 5 / 6])
        model.reference = None
        assert torch.equal(model(large), extrapolated)


def test_patch_dropout_keeps_rescaled_positions():
    model = tiny(encoding="rotate", patch_drop_rate=0.5).train()
    model.reference = model.patch_embed.grid_size
    _, positions = model._embed(torch.randn(2, 3, 32, 32))
    assert set(positions.coords.flatten().tolist()) <= {i / 2 for i in range(8)}
    assert not set(positions.coords.flatten().tolist()) <= set(range(8))


def test_rescaled_table_equals_timms_resampled_one():
    table, learned = tiny(absolute="sincos").eval(), tiny(absolute="learned").eval()
    learned.load_state_dict(table.state_dict(), strict=False)
    x = torch.randn(1, 3, 24, 32)
    table.reference = (4, 4)
    with torch.no_grad():
        learned.pos_embed.zero_()
        offset = learned.num_prefix_tokens
        learned.pos_embed[0, offset - (learned.pos_embed.shape[1] == 16) :] = table._sincos((4, 4), x)
        torch.testing.assert_close(table(x), learned(x))


def test_reference_is_checked():
    with pytest.raises(ValueError, match="reference: expected a positive size, or None, for each of the 2 axes"):
        tiny().reference = (4, 4, 4)


def test_images_move_to_a_device():
    images = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert images.to(torch.device("meta")).images.is_meta


# --- weights to start from -------------------------------------------------------------------------------------------


def build_model(**options):
    """Return a model built like the command's, and its configuration."""
    config = ImageTraining(**{**SMALL, "data": Path(), "out": Path(), **options})
    images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    part = Images(images, torch.zeros(1, dtype=torch.int64))
    return train_image.build(config, train_image.model_arguments(config, image_data.Labelled(part, part, 2)))


def random_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}


def test_training_starts_from_a_run(data, tmp_path, capsys):
    """Averaged weights are preferred. The identity of the run depends on the weights, and not on their path."""
    options = {**SMALL, "steps": 6}
    train_image.run(ImageTraining(data=data, out=tmp_path / "first", **options))
    start = torch.load(tmp_path / "first" / "checkpoint.pt")["average"]
    still = {**options, "steps": 1, "lr": 0.0, "weight_decay": 0.0}
    for name, weights in (("folder", "first"), ("file", "first/checkpoint.pt")):
        out = tmp_path / name
        train_image.run(ImageTraining(data=data, out=out, weights=str(tmp_path / weights), **still))
        found = torch.load(out / "checkpoint.pt")["model"]
        assert all(torch.equal(found[key], value) for key, value in start.items())
        assert f"Starting from {tmp_path / weights}\n" in capsys.readouterr().err
    again = tmp_path / "elsewhere"
    (tmp_path / "first").rename(again)
    longer = ImageTraining(data=data, out=tmp_path / "folder", weights=str(again), **still)
    train_image.run(longer)  # a finished run that started from the same weights
    for weights in ("", str(tmp_path / "folder")):
        if weights:
            state = torch.load(tmp_path / "folder" / "checkpoint.pt")
            state["average"]["head.bias"] += 1
            (tmp_path / "other").mkdir()
            torch.save(state["average"], tmp_path / "other" / "weights.pt")
            weights = str(tmp_path / "other" / "weights.pt")
        with pytest.raises(typer.BadParameter, match=r"different settings.*weights"):
            train_image.run(ImageTraining(data=data, out=tmp_path / "folder", weights=weights, **still))


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "tar"])
def test_timms_checkpoints(tmp_path, suffix, capsys):
    """If a class token, channels, patches or classes differ, they are resampled or left out, with a message."""
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=48, depth=1, num_heads=2, num_classes=7
    )
    weights = random_weights(theirs)
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        safetensors.torch.save_file(weights, path)
    else:
        torch.save({"state_dict_ema": weights, "epoch": 3} if suffix == "tar" else weights, path)
    model = build_model(encoding="learned", size=16)
    head, before = model.head.weight.clone(), model.state_dict()
    start_from(model, path)
    found = model.state_dict()
    for name, value in weights.items():
        if name.startswith("blocks."):
            assert torch.equal(found[name], value)
    assert torch.equal(found["fc_norm.weight"], weights["norm.weight"])
    assert torch.equal(model.head.weight, head)
    grey = weights["patch_embed.proj.weight"].sum(1, keepdim=True)
    expected = timm.layers.resample_patch_embed(grey, [4, 4])
    torch.testing.assert_close(found["patch_embed.proj.weight"], expected)
    table = timm.layers.resample_abs_pos_embed(weights["pos_embed"][:, 1:], [4, 4], num_prefix_tokens=0)
    torch.testing.assert_close(found["pos_embed"], table)
    assert found.keys() == before.keys()
    assert f"Starting from {path} (new: head; left out: cls_token, head)" in capsys.readouterr().err


@pytest.mark.parametrize(("trained", "size"), [((2, 8), (4, 4)), ((2, 8), (2, 9)), ((3, 5), (3, 5)), ((3, 5), (3, 6))])
@pytest.mark.parametrize("class_token", [False, True])
def test_a_position_table_is_resampled_from_the_grid_of_its_run(tmp_path, trained, size, class_token):
    """(4, 4) has as many patches as (2, 8), and a table with a class token and (3, 5) has a square number of rows."""
    pooling = {"class_token": True, "global_pool": "token"} if class_token else {"class_token": False}
    options = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 2, "absolute": "learned"}
    options |= {"encoding": None, "global_pool": "avg", **pooling}
    first, second = (
        lrpe_vit_tiny_patch16_224(img_size=[4 * side for side in grid], **options) for grid in (trained, size)
    )
    weights = random_weights(first)
    settings = {"settings": json.dumps({"size": "x".join(str(4 * side) for side in trained), "patch": 4})}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors", settings)
    start_from(second, tmp_path / "w.safetensors")
    table = weights["pos_embed"].double()
    patches = table[:, class_token:].mT.unflatten(2, trained)
    expected = F.interpolate(patches, size=size, mode="bicubic", antialias=True).flatten(2).mT
    expected = torch.cat([table[:, :class_token], expected], 1)
    torch.testing.assert_close(second.pos_embed.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_base_patch16_clip_224", "deit3_small_patch16_224"])
def test_timms_weights_are_converted_to_the_pixels_of_the_run(name, tmp_path, capsys):
    """CLIP's patches have no bias, and DeiT-III's position table has no row for the class token."""
    theirs = timm.create_model(name, depth=1, img_size=32, num_classes=3).eval()
    theirs.load_state_dict(random_weights(theirs))
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    arguments = {"model": name, "depth": 1, "img_size": (32, 32), "in_chans": 3, "num_classes": 3, "encoding": None}
    model = train_image.build_model(arguments, keep_table=True).eval()
    start_from(model, tmp_path / "w.pt", {"model": arguments})
    known = timm.get_pretrained_cfg(name)
    assert known is not None
    said = f"patch_embed converted from pixels with mean {tuple(known.mean)} and std {tuple(known.std)})"
    assert said in capsys.readouterr().err
    mean, std = (torch.tensor(each)[:, None, None] for each in (known.mean, known.std))
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(2 * pixels - 1), theirs((pixels - mean) / std), rtol=1e-3, atol=1e-3)

    settings = {"settings": json.dumps({"model": arguments})}
    safetensors.torch.save_file(model.state_dict(), tmp_path / "run.safetensors", settings)
    again = train_image.build_model(arguments, keep_table=True)
    start_from(again, tmp_path / "run.safetensors", {"model": arguments})
    assert torch.equal(again.patch_embed.proj.weight, model.patch_embed.proj.weight)
    assert "converted" not in capsys.readouterr().err


def test_patches_of_another_size_are_announced(tmp_path, capsys):
    """Patches are resampled, which reduces accuracy."""
    weights = random_weights(build_model(patch=4))
    for about in ({"settings": json.dumps({"patch": 4})}, None):  # from a run, and from timm
        safetensors.torch.save_file(weights, tmp_path / "w.safetensors", about)
        start_from(build_model(patch=8, size=16, test_sizes="24"), tmp_path / "w.safetensors", {"patch": 8})
        assert "w.safetensors was trained with --patch 4; this training uses 8" in capsys.readouterr().err


def test_reference_of_weights_is_suggested_and_trained_with(data, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    short = {**SMALL, "data": data, "steps": 1, "test_sizes": "20"}
    train_image.run(ImageTraining(out=first, **short))
    larger = {**short, "size": 16, "weights": str(first)}
    said = "first was trained with 2×2 patches; this training has 4×4. To map their positions onto the trained grid, "
    for encoding, size, expected in (
        ("rotate", 16, True),
        ("sincos", 16, True),
        ("learned", 16, False),
        ("rotate", 8, False),
    ):
        out, options = tmp_path / f"{encoding}-{size}", {**larger, "encoding": encoding, "size": size}
        model = train_image.run(ImageTraining(out=out, **options))
        assert (f"{said}pass --reference 8\n" in capsys.readouterr().err) == expected
        assert list(model["accuracy"]) == ["extrapolated", "rescaled"]
        assert load_run(out).reference is None
    train_image.run(ImageTraining(out=tmp_path / "wrong", **larger, reference=16))
    said = (
        "first was trained with 2×2 patches; --reference 16 maps positions onto 4×4. To map their positions onto the "
    )
    assert f"{said}trained grid, pass --reference 8\n" in capsys.readouterr().err
    result = train_image.run(ImageTraining(out=second, **larger, reference=8))
    assert "--reference" not in capsys.readouterr().err
    assert list(result["accuracy"]) == ["rescaled"]
    model = load_run(second)
    assert model.reference == (2, 2)
    x = torch.randn(2, 1, 16, 16)
    mapped = model(x)
    model.reference = None
    assert not torch.allclose(mapped, model(x))
    train_image.run(ImageTraining(out=tmp_path / "third", **{**larger, "size": 24, "weights": str(second)}))
    assert "2×2 patches; this training has 6×6" in capsys.readouterr().err


@pytest.mark.parametrize("absolute", ["none", "learned"])
@pytest.mark.parametrize("class_token", [False, True])
def test_reference_of_plain_weights_is_suggested(absolute, class_token, data, tmp_path, capsys):
    """Only a position table reveals the grid of weights that don't come from a run."""
    model = lrpe_vit_tiny_patch16_224(
        img_size=12,
        patch_size=4,
        embed_dim=48,
        depth=1,
        num_heads=2,
        class_token=class_token,
        absolute=absolute,
        global_pool="avg",
    )
    torch.save(random_weights(model), tmp_path / "w.pt")
    short = {**SMALL, "data": data, "steps": 1, "test_sizes": "", "weights": str(tmp_path / "w.pt")}
    said = f"{tmp_path / 'w.pt'} does not record its image size. If it was trained at another size, also pass "
    expected = f"{said}--reference SIZE\n"
    if absolute == "learned":
        said = f"{tmp_path / 'w.pt'} was trained with 3×3 patches; this training has 4×4. To map their positions onto "
        expected = f"{said}the trained grid, pass --reference 12\n"
    for encoding, size, reference in (
        ("rotate", 16, ""),
        ("rotate", 12, ""),
        ("rotate", 16, "12"),
        ("learned", 16, ""),
    ):
        out, options = tmp_path / f"{encoding}-{size}-{reference}", {"encoding": encoding, "reference": reference}
        train_image.run(ImageTraining(out=out, **{**short, "size": size, **options}))
        is_known = absolute == "learned" and size == 12
        is_expected = encoding == "rotate" and not reference and not is_known
        assert (expected in capsys.readouterr().err) == is_expected, (encoding, size, reference)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dataset": "torch/cifar10", "label": "kind"},
            "--label kind: does not work with --dataset; leave out --label or",
        ),
        ({"dataset": "torch/cifar10", "stream": True}, "--stream: does not work with --dataset"),
        ({"stream": True, "label": "kind", "without": "bad"}, "--without bad: does not work with streamed data"),
        ({"reference": 10}, "--reference: expected a side or HEIGHTxWIDTH in multiples of 4, got '10'"),
        ({"reference": "4"}, "--reference 4: expected more than one patch, .*; pass the size that --weights were"),
        ({"reference": 8, "encoding": "learned"}, "--encoding learned has no grid positions to interpolate; leave out"),
    ],
)
def test_unsuitable_options(data, tmp_path, options, message):
    with pytest.raises(typer.BadParameter, match=message):
        ImageTraining(data=data, out=tmp_path, **SMALL, **options)


def test_train_without_val(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "a" / "0.png")
    with pytest.raises(
        ImageError, match=r"found train, but none of validation, val.*; add one, or pass --data .*train;"
    ):
        image_data.list_folder(tmp_path)


@pytest.mark.parametrize("attention", ["linear", "linear,softmax"])
def test_norms_of_linear_attention_start_fresh(tmp_path, attention, capsys):
    softmax = build_model(depth=2)
    weights = random_weights(softmax)
    torch.save(weights, tmp_path / "w.pt")
    model = build_model(depth=2, attention=attention)
    start_from(model, tmp_path / "w.pt")
    assert f"Starting from {tmp_path / 'w.pt'} (new: attn.norm)" in capsys.readouterr().err
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert {name.split(".", 2)[2] for name in found.keys() - weights.keys()} == {"attn.norm.weight", "attn.norm.bias"}
    assert (found["blocks.0.attn.norm.weight"] == 1).all()
    del weights["blocks.0.attn.proj.bias"]
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(typer.BadParameter, match=r"\(blocks\.0\.attn\.proj\.bias is only in the model\)"):
        start_from(model, tmp_path / "w.pt")


def test_weights_of_another_size_and_encoding(tmp_path, capsys):
    first = build_model(encoding="rotate-mixed", size=8)
    weights = random_weights(first)
    torch.save(weights, tmp_path / "w.pt")
    same = build_model(encoding="rotate-mixed", size=16)
    start_from(same, tmp_path / "w.pt")
    assert all(torch.equal(same.state_dict()[name], value) for name, value in weights.items())
    other = build_model(encoding="cosine", patch=2)
    start_from(other, tmp_path / "w.pt")
    assert "left out: encoding" in capsys.readouterr().err
    assert torch.equal(other.head.weight, weights["head.weight"])
    grey = build_model()
    model = lrpe_vit_tiny_patch16_224(
        img_size=8, patch_size=4, embed_dim=48, depth=1, num_heads=2, num_classes=2, class_token=False,
        global_pool="avg", encoding="rotate",
    )  # fmt: skip
    torch.save(random_weights(grey), tmp_path / "grey.pt")
    start_from(model, tmp_path / "grey.pt")
    kernel = torch.load(tmp_path / "grey.pt")["patch_embed.proj.weight"]
    torch.testing.assert_close(model.patch_embed.proj.weight.sum(1, keepdim=True), kernel)


@pytest.mark.parametrize("encoding", ["rotate-learnable", "rotate-mixed"])
def test_weights_of_a_version_before_keep_their_learned_frequencies(tmp_path, encoding, capsys):
    """Old weights contain theta and omega in their full shapes. theta is stored directly, with some negative values."""
    first = build_model(encoding=encoding)
    weights = random_weights(first)
    name = next(name for name in weights if name.startswith("encoding."))
    module = first.encoding if encoding == "rotate-learnable" else first.encoding[0]
    (shape,) = module.shapes.values()
    old = torch.linspace(-0.5, 2, shape.numel()).reshape(shape)
    del weights[name]
    weights[name.replace("log_theta", "theta")] = old
    torch.save(weights, tmp_path / "w.pt")
    model = build_model(encoding=encoding)
    start_from(model, tmp_path / "w.pt")
    assert "left out" not in capsys.readouterr().err
    found = model.encoding._theta() if encoding == "rotate-learnable" else model.encoding[0].get_omega()
    torch.testing.assert_close(found, old, rtol=1e-6, atol=0)


def test_the_name_of_a_timm_model_as_weights_explains_how_to_save_them():
    advice = r"torch\.save\(timm\.create_model\('vit_tiny_patch16_224', pretrained=True\)\.state_dict\(\)"
    with pytest.raises(typer.BadParameter, match=f"no such file.*{advice}.* pass --weights vit_tiny_patch16_224.pt"):
        start_from(build_model(), Path("vit_tiny_patch16_224"))


def test_weights_of_another_timm_model(data, tmp_path):
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "w.pt")
    advice = r"w\.pt: pass --model NAME, the architecture of these weights, or leave out --weights\."
    with pytest.raises(typer.BadParameter, match=advice):
        train_image.run(ImageTraining(data=data, out=tmp_path / "run", **TIMM, weights=str(tmp_path / "w.pt")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 24}, r"different architecture \(.* is \(24,.*\) in the file and \(48,.*\) in the model"),
        ({"depth": 2}, r"different architecture \(blocks\.1\..* is only in the file"),
        ({"qk_norm": True}, r"different architecture \(blocks\.0\.attn\..*norm.* is only in the file"),
        ("nothing", "no such file"),
        ("folder", "no checkpoint.pt in the folder"),
        (b"no weights", "expected named tensors.* can't be read"),
        (b"(ccopy\n", "expected named tensors.* can't be read"),
        (b"PK\x03\x04 half of an npz", "expected named tensors.* can't be read"),
        ([1.0], "expected named tensors.* can't be read"),
        ({"epoch": 3}, "expected named tensors"),
        ("video", "different architecture"),
        ("diffusion", r"different architecture \(blocks\.0\..* is only in the model"),
    ],
)
def test_unsuitable_weights(tmp_path, change, message):
    model, path = build_model(), tmp_path / "weights.pt"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if change == "folder":
        path.mkdir()
    elif change == "video":
        torch.save({"patch_embed.proj.weight": torch.zeros(48, 1, 2, 4, 4), "head.weight": torch.zeros(2, 48)}, path)
    elif change == "diffusion":  # a position table without patch_embed.proj.weight
        torch.save({"pos_embed": torch.zeros(1, 4, 48), "x_embedder.proj.weight": torch.zeros(48, 1, 4, 4)}, path)
    elif isinstance(change, bytes):
        path.write_bytes(change)
    elif isinstance(change, list):
        torch.save(change, path)
    elif isinstance(change, dict):
        torch.save(change if "epoch" in change else random_weights(build_model(**change)), path)
    with pytest.raises(typer.BadParameter, match=f"--weights .*{message}"):
        start_from(model, path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_weights_of_a_run_with_other_heads_or_damaged(data, tmp_path):
    train_image.run(ImageTraining(data=data, out=tmp_path / "run", **{**SMALL, "steps": 1}))
    with pytest.raises(typer.BadParameter, match=r"run: pass --heads 2\. The weights are for a different arch"):
        start_from(build_model(heads=4), tmp_path / "run")
    timm = {**TIMM, "steps": 1}
    train_image.run(ImageTraining(data=data, out=tmp_path / "timm", **timm))  # it has 8 heads, but --heads is 3
    start_from(load_run(tmp_path / "timm"), tmp_path / "timm")
    advice = {
        "timm": (SMALL, rf"(?!.*--patch).*--model {TIMM['model']}"),
        "run": (timm, "--model '' --patch 4 --dim 48"),
    }
    for weights, (other, said) in advice.items():  # a timm model defines its patches
        with pytest.raises(typer.BadParameter, match=f"--weights .*: pass {said}"):
            train_image.run(ImageTraining(data=data, out=tmp_path / "x", **other, weights=str(tmp_path / weights)))
    state = torch.load(tmp_path / "run" / "checkpoint.pt")
    state["average"]["head.bias"] += 1
    torch.save(state, tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(typer.BadParameter, match="damaged"):
        start_from(build_model(), tmp_path / "run")


@pytest.fixture
def table(tmp_path):
    """Create images with a table of two classes, some of which are left out."""
    folder = tmp_path / "table"
    folder.mkdir()
    rows = []
    for i in range(40):
        Image.new("RGB", (8, 8), (250 * (i % 2), 0, 0)).save(folder / f"{i}.png")
        row = {"file_name": f"{i}.png", "text": f"{i}", "kind": ("dark", "red")[i % 2], "odd": i > 35}
        rows.append(json.dumps(row))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def test_class_from_a_table_field(table):
    data = load_classes(table, 8, label="kind", without="odd")
    assert data.num_classes == 2
    assert len(data.train) + len(data.test) == 36
    assert 0 < len(data.test) < 18
    for part in (data.train, data.test):
        assert ((part.images[:, 0, 4, 4] > 100) == (part.labels == 1)).all()
    assert load_classes(table, 8, label="kind", without="odd").train.digest == data.train.digest
    with pytest.raises(typer.BadParameter, match="expected file_name and colour"):
        load_classes(table, 8, label="colour")


def test_limit_of_a_table_takes_images_of_all_classes(tmp_path):
    rows = []
    for i in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i:02}.png")
        rows.append(json.dumps({"file_name": f"{i:02}.png", "kind": "dark" if i < 20 else "red"}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    data = load_classes(tmp_path, 8, label="kind", limit=20)
    counts = torch.cat([data.train.labels, data.test.labels]).bincount(minlength=2)
    assert (counts.sum(), (counts > 5).all()) == (20, True)


def test_a_table_or_a_zip_needs_the_field_of_the_class(table, tmp_path):
    with zipfile.ZipFile(tmp_path / "table.zip", "w") as archive:
        for file in table.iterdir():
            archive.write(file, file.name)
    for path in (table, tmp_path / "table.zip"):
        with pytest.raises(ImageError, match=r"--data .*table.*: expected --label .*; pass --label FIELD"):
            train_image.load(path, 8, 8, "", 0, "", "")
        assert train_image.load(path, 8, 8, "", 0, "kind", "odd").num_classes == 2
    with pytest.raises(ImageError, match="no such folder"):
        train_image.load(tmp_path / "missing.zip", 8, 8, "", 0, "", "")


def test_training_on_a_table(table, tmp_path):
    sizes = {"size": 8, "test_sizes": "", "patch": 4, "dim": 24, "depth": 1, "heads": 2, "batch": 8, "steps": 2}
    result = train_image.run(
        ImageTraining(out=tmp_path / "out", data=table, label="kind", device="cpu", tensorboard=False, **sizes)
    )  # fmt: skip
    assert (result["chance"], result["train_images"] + result["test_images"]) == (50, 40)
    with pytest.raises(typer.BadParameter, match="--label"):
        ImageTraining(out=tmp_path / "out", data=table, without="odd")
