"""Shards, Hugging Face datasets and folders that are read sample by sample, and training on them."""

import io
import json
import os
import random
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import typer
import webdataset
from lrpe_md.scripts.train.data import images as image_data
from lrpe_md.scripts.train.data import streams
from lrpe_md.scripts.train.data.augment import build_transform, read_batch, seeded
from lrpe_md.scripts.train.data.images import Images, list_folder, load_images, load_stream
from lrpe_md.scripts.train.data.streamed import open_streamed
from lrpe_md.scripts.train.data.streams import (
    HubSource,
    ShardSource,
    Stream,
    StreamError,
    find_shards,
    index_shard,
    number_classes,
    open_image,
    split_source,
)
from lrpe_md.scripts.train.order import DataError, shuffle
from lrpe_md.scripts.train.tasks import image as train_image
from lrpe_md.scripts.train.tasks.image import ImageTraining
from PIL import Image
from test_train_image import write_folders
from train_commands import die_after, output_of

SMALL = {
    "steps": 5, "batch": 8, "lr": 3e-3, "warmup": 2, "ema": 0.5, "device": "cpu", "log_every": 2, "save_every": 2,
    "tensorboard": False, "progress": False, "size": 8, "test_sizes": "", "patch": 4, "dim": 48, "depth": 1, "heads": 2,
    "shift": 1,
}  # fmt: skip
AUGMENTED = {"augment": "rand-m9-mstd0.5-inc1", "crop": 0.5, "erase": 0.25, "mixup": 0.8, "cutmix": 1.0}


def picture(index: int, mode: str = "RGB") -> Image.Image:
    """Return a noisy image, bright in its top or its bottom half."""
    x = np.random.default_rng(index).integers(0, 60, (12, 10, 3)).astype(np.uint8)
    x[:6] += np.uint8(180 * (index % 2 == 0))
    x[6:] += np.uint8(180 * (index % 2 == 1))
    return Image.fromarray(x).convert(mode)


def encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def write_shards(folder: Path, counts=(20, 15, 5), prefix: str = "train") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    index = 0
    for shard, count in enumerate(counts):
        with webdataset.TarWriter(str(folder / f"{prefix}-{shard:03}.tar")) as writer:
            for _ in range(count):
                writer.write({
                    "__key__": f"{index:05}", "png": encode(picture(index)), "cls": str(index % 2).encode(),
                    "txt": f"picture {index}", "json": {"kind": ("top", "bottom")[index % 2]},
                    "npy": np.arange(index, index + 3),
                })  # fmt: skip
                index += 1
    return folder


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "shards")


@pytest.fixture
def hub(tmp_path):
    features = datasets.Features({
        "image": datasets.Image(), "label": datasets.ClassLabel(names=["top", "bottom"]),
        "text": datasets.Value("string"),
    })  # fmt: skip
    rows = {
        "image": [picture(i) for i in range(40)], "label": [i % 2 for i in range(40)],
        "text": [f"picture {i}" for i in range(40)],
    }  # fmt: skip
    data = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": data.select(range(32)), "test": data.select(range(32, 40))}).save_to_disk(
        str(tmp_path / "hub")
    )
    return tmp_path / "hub"


# --- shards ----------------------------------------------------------------------------------------------------------


def test_samples_of_shards(shards, tmp_path):
    source = ShardSource(find_shards(shards)[0], tmp_path / "cache")
    assert len(source) == 40
    for index in (0, 19, 20, 34, 39):
        sample = source.read(index)
        assert sample["image"].tobytes() == picture(index).tobytes()
        assert (sample["label"], sample["caption"]) == (index % 2, f"picture {index}")
        assert sample["npy"].tolist() == [index, index + 1, index + 2]
        assert sample["kind"] == ("top", "bottom")[index % 2]
        assert f"sample '{index:05}'" in source.locate(index)
    assert "train-001.tar, sample '00020' (1 of 15)" in source.locate(20)
    assert source.list_values("label") == [i % 2 for i in range(40)]
    with pytest.raises(StreamError, match=r"train-000\.tar, sample '00000'.*expected a class in \.cls, or --label"):
        source.list_values("nothing")


def test_index_of_shards_is_cached_until_they_change(shards, tmp_path, monkeypatch):
    path, cache, scans = shards / "train-000.tar", tmp_path / "cache", []
    scan = streams._scan
    monkeypatch.setattr(streams, "_scan", lambda path: scans.append(path) or scan(path))
    first, again = index_shard(path, cache), index_shard(path, cache)
    assert len(scans) == 1
    assert first.keys == again.keys
    assert (first.offsets == again.offsets).all()
    (kept,) = cache.iterdir()
    kept.write_bytes(b"damaged")
    assert index_shard(path, cache).fields == first.fields
    write_shards(shards, (3,))
    assert len(index_shard(path, cache).keys) == 3
    assert len(scans) == 3


@pytest.mark.parametrize("cut", ["data", "header", "end"])
def test_incomplete_shards_are_refused_with_their_last_sample(shards, cut):
    path = shards / "train-001.tar"
    shard = index_shard(path)
    column = shard.fields.index("png")
    size = {
        "data": int(shard.offsets[7, column] + shard.sizes[7, column] // 2),
        "header": int(shard.offsets[7, column]) - 300,
        "end": int(max(shard.offsets[-1] + shard.sizes[-1])) // 512 * 512 + 512,
    }[cut]
    os.truncate(path, size)
    expected = {
        "data": r"train-001\.tar is cut off in sample '00027', after 7 complete samples .*download it again",
        "header": r"train-001\.tar is cut off in sample '00026'|train-001\.tar is cut off in sample '00027'",
        "end": r"train-001\.tar has no end-of-archive marker after sample '00034'",
    }[cut]
    with pytest.raises(StreamError, match=expected):
        ShardSource([shards / "train-000.tar", path])


def test_patterns_and_test_shards(shards):
    write_shards(shards, (4,), prefix="val")
    (shards / "._train-000.tar").touch()  # as written by macOS
    train, tests = find_shards(shards)
    assert [path.name for path in train] == ["train-000.tar", "train-001.tar", "train-002.tar"]
    assert [path.name for path in tests] == ["val-000.tar"]
    assert find_shards(shards / "train-{000..001}.tar")[0] == train[:2]
    assert find_shards(shards / "*train-*.tar")[0] == train
    with pytest.raises(StreamError, match="no such shard"):
        find_shards(shards / "train-{000..009}.tar")
    with pytest.raises(StreamError, match="found none"):
        find_shards(shards / "nothing*.tar")


def test_classes_by_number_and_by_name(shards, hub):
    source = ShardSource(find_shards(shards)[0])
    train, test = split_source(source, None, 4)
    assert sorted([*train.indices, *test.indices]) == list(range(40))
    assert 0 < len(test) < 20
    for label in ("label", "kind"):
        parts = number_classes(train, test, label)
        assert parts[2:] == (2, () if label == "label" else ("bottom", "top"))
        for part in parts[:2]:
            for i in range(len(part)):
                _, found = part[i]
                number = int(part.stream.indices[i]) % 2
                assert found == (number if label == "label" else 1 - number)  # names are sorted
    for data in (load_stream(hub, 8), load_stream(hub, 8, label="label")):
        assert (len(data.train), len(data.test), data.num_classes) == (32, 8, 2)
        assert data.classes == ("top", "bottom")  # in numerical order
        assert data.test.labels.tolist() == [0, 1] * 4


@pytest.mark.parametrize(
    ("names", "differ"),
    [
        (["bottom", "top"], "'top' and 'bottom' for class 0"),
        (["top", "bottom", "left"], "None and 'left' for class 2"),
        (["top"], "'bottom' and None for class 1"),
    ],
)
def test_class_numbers_mean_the_same_in_training_and_test_data(tmp_path, names, differ):
    """ClassLabel numbers the classes of each split separately, for example with class_encode_column."""
    parts = {}
    for split, of in (("train", ["top", "bottom"]), ("test", names)):
        rows = {"image": [picture(i) for i in range(4)], "label": [0] * 4}
        kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=of)}
        parts[split] = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "hub"))
    message = f"expected the same class names .*, got {differ}; cast"
    with pytest.raises(StreamError, match=message):
        load_stream(tmp_path / "hub", 8)
    with pytest.raises(StreamError, match=message):
        open_streamed(tmp_path / "hub", "labels", "")


def test_samples_with_several_images_are_refused(tmp_path):
    """Without an error, the mask would be trained on, in the bucket of the image."""
    for name, mask in (("pairs", "png"), ("masks", "mask.png")):
        (tmp_path / name).mkdir()
        with webdataset.TarWriter(str(tmp_path / name / "train-0.tar")) as writer:
            writer.write({"__key__": "a", "jpg": encode(picture(0)), "cls": "0"})
            writer.write({"__key__": "b", "jpg": encode(picture(1)), mask: encode(picture(2)), "cls": "1"})
    with pytest.raises(StreamError, match=r"sample 'b': expected one image, got \.jpg, \.png; rename the others"):
        streams.open_source(tmp_path / "pairs")
    source, _ = streams.open_source(tmp_path / "masks")
    assert source.read(1)["image"].tobytes() == picture(1).tobytes()


def test_fields_of_json_do_not_replace_files(tmp_path):
    about = {"image": "other.png", "label": 5, "caption": "other"}
    with webdataset.TarWriter(str(tmp_path / "train-0.tar")) as writer:
        writer.write({"__key__": "a", "jpg": encode(picture(0)), "cls": "1", "caption": "one", "json": about})
    sample = streams.open_source(tmp_path)[0].read(0)
    assert sample["image"].tobytes() == picture(0).tobytes()
    assert (sample["label"], sample["caption"]) == (1, "one")


def test_a_field_of_json_can_be_named_label(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "train-0.tar")) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i}", "jpg": encode(picture(i)), "json": {"label": i % 2}})
    assert load_stream(tmp_path, 8, label="label").num_classes == 2
    assert streams.open_source(tmp_path)[0].list_values("label") == [0, 1] * 20


@pytest.mark.parametrize("value", [-1, None, float("nan"), ["top"]])
def test_samples_without_a_class_are_refused(shards, value, monkeypatch):
    """ClassLabel stores -1 or None for a sample without a class."""
    values = [0, value] * 20
    monkeypatch.setattr(ShardSource, "list_values", lambda self, name: values)
    train, test = split_source(ShardSource(find_shards(shards)[0]), None, 4)
    message = rf"--label kind: expected a name or a non-negative number .*, got {re.escape(repr(value))}"
    with pytest.raises(StreamError, match=message):
        number_classes(train, test, "kind")
    with pytest.raises(StreamError, match=message):
        open_streamed(shards, "labels", "kind")


@pytest.mark.parametrize("caption", [None, ["one", "two"]])
def test_captions_that_are_not_text_are_refused(tmp_path, caption):
    rows = {"image": [picture(0), picture(1)], "text": [caption, caption]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "hub"))
    with pytest.raises(StreamError, match=rf"row 0: expected text as the caption, got {re.escape(repr(caption))}"):
        open_streamed(tmp_path / "hub", "captions", "")


def test_samples_without_an_image_are_refused(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "train-0.tar")) as writer:
        writer.write({"__key__": "a", "png": encode(picture(0)), "cls": "0"})
        writer.write({"__key__": "b", "cls": "1"})
    rows = {"image": [picture(0), None], "label": [0, 1]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "hub"))
    for source in (streams.open_source(tmp_path)[0], streams.open_source(tmp_path / "hub")[0]):
        stream = Stream(source, np.arange(2))
        assert stream.open(0).tobytes() == picture(0).tobytes()
        assert stream.measure(0) == (12, 10)
        for read in (stream.open, stream.measure, streams.LabelledStream(stream, np.arange(2)).__getitem__):
            with pytest.raises(DataError, match="expected an image, got none"):
                read(1)


def test_hugging_face_data_sets(hub, tmp_path):
    source, test = streams.open_source(hub)
    assert (len(source), len(test)) == (32, 8)
    sample = source.read(3)
    assert sample["image"].tobytes() == picture(3).tobytes()
    assert (sample["label"], sample["caption"]) == (1, "picture 3")
    assert source.locate(3).endswith("(train), row 3")
    parquet = tmp_path / "parquet"
    parquet.mkdir()
    datasets.load_from_disk(str(hub))["train"].to_parquet(str(parquet / "train.parquet"))
    again, none = streams.open_source(parquet)
    assert none is None
    assert again.read(3)["image"].tobytes() == picture(3).tobytes()
    with pytest.raises(StreamError, match="can't be opened as a dataset"):
        streams.open_source(Path("hf:./nothing"))
    two = datasets.Dataset.from_dict({"text": ["a"], "caption": ["b"]})
    with pytest.raises(StreamError, match="expected at most one column each"):
        HubSource(two, "two")
    plain = HubSource(datasets.Dataset.from_dict({"title": ["a"]}), "plain")
    for name, remedy in (("kind", "use --label to name the column with classes"), ("caption", "rename the column")):
        with pytest.raises(StreamError, match=f"expected a column named '{name}', got title; {remedy}"):
            plain.list_values(name)


def test_transparent_and_rotated_images():
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert open_image(clear).getpixel((0, 0)) == (255, 255, 255)
    assert open_image(encode(picture(1, "L"))).mode == "RGB"


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_16_bit_pixels_are_scaled_to_8_bits(dtype):
    image = Image.fromarray(np.array([[0, 255, 32768, 65535]], dtype))
    assert [open_image(image).getpixel((x, 0)) for x in range(4)] == [(v, v, v) for v in (0, 0, 128, 255)]
    with pytest.raises(ValueError, match="got floats"):
        open_image(image.convert("F"))


def test_unreadable_sample_is_located(shards):
    path = shards / "train-001.tar"
    shard = index_shard(path)
    data = bytearray(path.read_bytes())
    at = int(shard.offsets[4, shard.fields.index("png")])
    data[at : at + 8] = b"no image"
    path.write_bytes(data)
    source = ShardSource(find_shards(shards)[0])
    stream = Stream(source, np.arange(len(source)))
    assert stream[23]["label"] == 1
    with pytest.raises(DataError, match=r"train-001\.tar, sample '00024' \(5 of 15\) can't be read"):
        stream[24]


# --- augmentation ----------------------------------------------------------------------------------------------------


def test_augmentation_depends_on_the_draw_alone():
    data = Images(torch.randint(0, 255, (6, 3, 16, 16), dtype=torch.uint8), torch.arange(6))
    transform = build_transform(8, "rand-m9-mstd0.5-inc1", 0.3)
    indices, draws = np.array([4, 1, 4]), np.array([7, 2**62 + 5, 8])
    random.seed(0)
    torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    x, labels = read_batch(data, transform, indices, draws)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]
    assert x.shape == (3, 3, 8, 8)
    assert x.dtype == torch.uint8
    assert labels.tolist() == [4, 1, 4]
    random.seed(5)
    again, _ = read_batch(data, transform, indices[::-1], draws[::-1])
    assert torch.equal(x, again.flip(0))
    assert not torch.equal(x[0], x[2])
    with seeded(3):
        first = random.random(), np.random.rand(), torch.rand(1).item()
    with seeded(3):
        assert first == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "augmix-m10", "original"])
def test_posterize_to_no_bits_gives_black(policy):
    image, found = Image.new("RGB", (4, 4), (255, 200, 100)), []
    for step in build_transform(4, policy, 1.0).transforms:
        found += [*getattr(step, "ops", []), *(each for part in getattr(step, "policy", []) for each in part)]
    functions = {each.aug_fn for each in found if "osterize" in each.aug_fn.__name__}
    assert len(functions) == 1
    (function,) = functions
    assert [function(image, bits).getpixel((0, 0)) for bits in (0, 1, 8)] == [
        (0, 0, 0), (128, 128, 0), (255, 200, 100)
    ]  # fmt: skip


def test_grey_images_are_augmented_and_stay_grey():
    data = Images(torch.randint(0, 255, (2, 1, 16, 16), dtype=torch.uint8), torch.arange(2))
    x, _ = read_batch(data, build_transform(16, "", 1.0), np.arange(2), np.arange(2))
    assert torch.equal(x, data.images)


def test_unknown_policy_is_refused(tmp_path):
    run = ["image", "--data", tmp_path, "--out", tmp_path / "run", "--size", 8, "--patch", 4, "--augment", "randd-m9"]
    assert "--augment: expected a timm policy" in output_of(*run)


# --- trainings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shards", "folder", "memory"])
def test_mixed_sizes_and_buckets(kind, tmp_path, monkeypatch):
    """All images in a step have the same shape, all shapes occur, and a killed run ends like an uninterrupted one."""
    shapes, loss = [], train_image.loss

    def seen(config, model, images, mix=None):
        shapes.append(tuple(images[0].shape[2:]))
        return loss(config, model, images, mix)

    monkeypatch.setattr(train_image, "loss", seen)
    data = write_shards(tmp_path / "shards") if kind == "shards" else write_wide(tmp_path / "folder")
    options = {**SMALL, "data": data, "mix_sizes": "12", "steps": 16, "save_every": 3}
    options |= {"stream": True, "max_ratio": 2.5, "patch": 2} if kind == "folder" else {}
    whole = ImageTraining(out=tmp_path / "whole", **options)
    train_image.run(whole)
    expected = {(8, 8), (12, 12)}
    expected |= {(6, 10), (8, 16), (10, 6), (16, 8)} if kind == "folder" else set()
    assert set(shapes) == expected
    name, config = "batch" if kind == "memory" else "augmented_batch", ImageTraining(out=tmp_path / "part", **options)
    with monkeypatch.context() as patch:
        patch.setattr(train_image, name, die_after(5, getattr(train_image, name), KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_image.run(config)
    train_image.run(ImageTraining(**{**vars(config), "workers": 2}))
    found = weights_of(config)
    assert all(torch.equal(value, found[name]) for name, value in weights_of(whole).items())


def write_wide(folder: Path) -> Path:
    """Write wide, square and tall images in two classes, and some of them as a test set."""
    for part in ("train", "val"):
        for i in range(24):
            path = folder / part / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(i).resize(((20, 10), (12, 12), (10, 20))[i % 3]).save(path)
    return folder


def test_buckets_of_squares_in_memory_are_refused(tmp_path):
    run = ["image", "--data", write_wide(tmp_path / "data"), "--out", tmp_path / "run", "--size", 8, "--patch", 2]
    assert "--max-ratio 2.0: these images are stored as squares in memory; pass --stream" in output_of(
        *run, "--max-ratio", 2, "--test-sizes", "", "--batch", 4
    )


def run_killed(config: ImageTraining, kill: int, monkeypatch) -> None:
    """Train until ``kill`` micro-batches have been made, in the main process."""
    with monkeypatch.context() as patch:
        patch.setattr(train_image, "augmented_batch", die_after(kill, train_image.augmented_batch, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_image.run(config)


def weights_of(config: ImageTraining) -> dict[str, torch.Tensor]:
    state = torch.load(config.out / "checkpoint.pt")
    return {**{f"model.{k}": v for k, v in state["model"].items()}, **state["average"]}


@pytest.mark.parametrize("kind", ["shards", "hub", "folder"])
def test_resumed_run_equals_uninterrupted_run(kind, shards, hub, tmp_path, monkeypatch):
    """The run uses every augmentation. It is killed in the main process, and then finished by worker processes."""
    data = {"shards": shards, "hub": hub, "folder": write_folders(tmp_path / "folder", "abc")}[kind]
    options = {**SMALL, **AUGMENTED, "data": data, "stream": kind == "folder"}
    whole = ImageTraining(out=tmp_path / "whole", **options)
    train_image.run(whole)
    for kill, workers in ((3, 2), (1, 0)):
        config = ImageTraining(out=tmp_path / f"{kill}", **options)
        run_killed(config, kill, monkeypatch)
        torch.manual_seed(kill)
        train_image.run(ImageTraining(**{**vars(config), "workers": workers}))
        found = weights_of(config)
        assert all(torch.equal(value, found[name]) for name, value in weights_of(whole).items())


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_sample_stops_the_training_and_loses_nothing(shards, tmp_path, workers):
    """The checkpoint is from the last complete step. After a repair, the run ends as if nothing had happened."""
    options = {**SMALL, "data": shards, "save_every": 100, "steps": 6}
    whole = ImageTraining(out=tmp_path / "whole", **options)
    train_image.run(whole)
    config = ImageTraining(out=tmp_path / "run", **options, workers=workers)
    data = load_stream(shards, 8)
    order = [int(i) for step in range(6) for i in next(shuffle(len(data.train), 8, 0, step))[0]]
    index = next(i for i in order[16:] if i not in order[:16])  # first needed after two steps
    broken_at = order.index(index) // 8
    shard, sample = data.train.stream.source._find(int(data.train.stream.indices[index]))
    mended = shard.path.read_bytes()
    stat = shard.path.stat()
    at = int(shard.offsets[sample, shard.fields.index("png")])
    shard.path.write_bytes(mended[:at] + b"no image" + mended[at + 8 :])
    train_image.load.cache_clear()
    with pytest.raises(DataError, match=rf"sample '{shard.keys[sample]}' .*run the same command to resume"):
        train_image.run(config)
    assert torch.load(config.out / "checkpoint.pt")["step"] == broken_at
    shard.path.write_bytes(mended)
    os.utime(shard.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    train_image.run(config)
    found = weights_of(config)
    assert all(torch.equal(value, found[name]) for name, value in weights_of(whole).items())


def test_a_stream_gives_the_samples_of_a_folder_in_memory(tmp_path):
    folder = write_folders(tmp_path / "data", "ab")
    stream, memory = load_stream(folder, 8), load_images(folder, 8)
    x, labels = read_batch(stream.train, build_transform(8, "", 1.0), np.arange(8), np.arange(8))
    assert labels.tolist() == memory.train.labels.tolist()
    assert (x.float() - memory.train.images.float()).abs().max() <= 2
    assert torch.equal(stream.test.images, memory.test.images)


def test_a_folder_of_classes_is_divided(tmp_path):
    for name in "abc":
        for i in range(20):
            path = tmp_path / "flat" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(i).save(path)
    train, test = list_folder(tmp_path / "flat")
    assert len(train) + len(test) == 60
    assert 3 <= len(test) <= 25
    assert not set(train.files) & set(test.files)
    assert list_folder(tmp_path / "flat") == (train, test)
    picture(3).save(tmp_path / "flat" / "a" / "new.png")
    more = list_folder(tmp_path / "flat")
    assert set(test.files) <= set(more[1].files)  # a new image doesn't move any other
    data = load_images(tmp_path / "flat", 8)
    assert (len(data.train), len(data.test), data.num_classes) == (len(more[0]), len(more[1]), 3)


def test_sizes_follow_the_data(tmp_path):
    from test_train_image import write_idx

    idx = ImageTraining(data=write_idx(tmp_path / "idx"), out=tmp_path / "a")
    assert (idx.size, idx.patch, idx.test_sizes) == ("28", 2, "20,40,56,28x40")
    real = ImageTraining(data=tmp_path, out=tmp_path / "a")
    assert (real.size, real.patch, real.test_sizes) == ("224", 16, "160,288,224x288")
    assert ImageTraining(data=tmp_path, out=tmp_path / "a", size=96, patch=8).test_sizes == "64,128,96x128"
    assert ImageTraining(data=tmp_path, out=tmp_path / "a", size=32, patch=8).test_sizes == "64,32x64"
    named = ImageTraining(data=tmp_path, out=tmp_path / "a", model="vit_base_patch32_224")
    assert (named.size, named.patch) == ("224", 32)
    assert ImageTraining(data=tmp_path, out=tmp_path / "a", size="64x96", patch=8).test_sizes == "32x64,96x128,64x128"


def test_too_many_images_name_the_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(image_data, "MEMORY", 100)
    with pytest.raises(image_data.ImageError, match="use --stream"):
        load_images(write_folders(tmp_path), 8)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_models_of_timm(shards, tmp_path, attention):
    options = {name: value for name, value in SMALL.items() if name not in ("patch", "dim", "depth", "heads")}
    options |= {"data": shards, "size": 32, "model": "test_vit", "attention": attention, "steps": 2}
    result = train_image.run(ImageTraining(out=tmp_path / "run", **options))
    assert result["tokens"] == 8 * 4
    state = torch.load(tmp_path / "run" / "checkpoint.pt")
    assert "pos_embed" not in state["model"]
    model = train_image.build(ImageTraining(out=tmp_path / "x", **options), state["settings"]["model"])
    assert model.encoding is not None
    assert model.blocks[0].attn.attention == attention
    again = {**options, "weights": str(tmp_path / "run" / "model.safetensors"), "encoding": "learned"}
    train_image.run(ImageTraining(out=tmp_path / "again", **again))
    assert "pos_embed" in torch.load(tmp_path / "again" / "checkpoint.pt")["model"]


def test_unsuitable_models_of_timm(tmp_path):
    message = r"--model: unknown 'vit_tini_patch16_224' \(did you mean 'vit_tiny_patch16_224'\?\); pass a name.*\(\)$"
    with pytest.raises(typer.BadParameter, match=message):
        ImageTraining(data=tmp_path, out=tmp_path, model="vit_tini_patch16_224")
    with pytest.raises(typer.BadParameter, match=message):
        ImageTraining(data=tmp_path, out=tmp_path, model="vit_tini_patch16_224", patch=8)
    for given in ({"dim": 48}, {"depth": 2}, {"heads": 4}, {"patch": 8}, {"dim": 48, "patch": 8}):
        named = " ".join(f"--{name} {value}" for name, value in given.items())
        message = rf"^{named}: --model vit_tiny_patch16_224 defines --dim, --depth, --heads and --patch \(16\); leave"
        with pytest.raises(typer.BadParameter, match=message):
            ImageTraining(data=tmp_path, out=tmp_path, model="vit_tiny_patch16_224", **given)
    ImageTraining(data=tmp_path, out=tmp_path, model="vit_tiny_patch16_224", patch=16)
    with pytest.raises(typer.BadParameter, match=r"--model vit_tiny_patch16_224\.none: Invalid pretrained tag"):
        ImageTraining(data=tmp_path, out=tmp_path, model="vit_tiny_patch16_224.none")
    with pytest.raises(typer.BadParameter, match=r"expected a plain timm ViT.*family resnet"):
        ImageTraining(data=tmp_path, out=tmp_path, model="resnet18")
    with pytest.raises(typer.BadParameter, match=r"expected a plain timm ViT.*family deit"):
        ImageTraining(data=tmp_path, out=tmp_path, model="deit_tiny_distilled_patch16_224")
    for name in ("vit_tiny_r_s16_p8_224", "vit_small_resnet26d_224"):  # their patch_size is not in pixels
        with pytest.raises(typer.BadParameter, match="got a hybrid model, whose patches come from a convolutional"):
            ImageTraining(data=tmp_path, out=tmp_path, model=name)
    for name in ("vit_small_patch16_rope_mixed_224", "eva02_tiny_patch14_224"):
        message = r"got a model that already uses RoPE; to fine-tune it, use docs/examples/finetune_timm\.py$"
        with pytest.raises(typer.BadParameter, match=message):
            ImageTraining(data=tmp_path, out=tmp_path, model=name)
    with pytest.raises(typer.BadParameter, match="a learned position table"):
        ImageTraining(data=tmp_path, out=tmp_path, model="test_vit", size=32, encoding="sincos")


def test_layer_decay_scales_the_rate_of_each_layer(shards, tmp_path):
    options = {**SMALL, "depth": 3, "data": shards}
    config = ImageTraining(out=tmp_path, layer_decay=0.5, **options)
    from timm.optim import create_optimizer_v2

    model = train_image.build(config, {**train_image.shape_arguments(config), "in_chans": 3, "num_classes": 2})
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, **config.optimizer_arguments(model))
    scale = {name: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]
             for name, q in model.named_parameters() if p is q}  # fmt: skip
    assert scale["head.weight"] == 1
    assert scale["blocks.2.attn.qkv.weight"] == 2 * scale["blocks.1.attn.qkv.weight"]
    assert scale["blocks.1.attn.qkv.weight"] == 2 * scale["blocks.0.attn.qkv.weight"]
    assert ImageTraining(out=tmp_path, **options).optimizer_arguments(model) == {}
    few = {**options, "lr": 0.25, "schedule": "constant", "warmup": 0, "steps": 1}
    train_image.run(ImageTraining(out=tmp_path / "run", layer_decay=0.5, **few))
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert [row["lr"] for row in state["history"]] == [0.25]


def test_mixup_needs_pairs(shards, tmp_path):
    with pytest.raises(
        typer.BadParameter, match=r"--batch 9: expected a multiple of 2 .*, because mixup and cutmix mix pairs"
    ):
        train_image.run(ImageTraining(out=tmp_path / "run", **{**SMALL, "batch": 9, "mixup": 0.5, "data": shards}))
    assert not (tmp_path / "run").exists()


def test_training_on_shards_learns_the_classes(shards, tmp_path):
    options = {**SMALL, "steps": 40, "data": shards, "label": "kind", "workers": 2, "augment": "rand-m3-n1"}
    result = train_image.run(ImageTraining(out=tmp_path / "run", **options))
    history = torch.load(tmp_path / "run" / "checkpoint.pt")["history"]
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    assert result["train_images"] + result["test_images"] == 40
    assert json.loads((tmp_path / "run" / "result.json").read_text())["chance"] == 50
