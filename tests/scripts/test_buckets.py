"""Buckets by aspect ratio, mixed sizes, and diffusion on images that are decoded on demand."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from generative_data import COLOURS, RATIOS, SMALL, write_captioned_shards, write_hub, write_ratios, write_vae
from lrpe_md.scripts.train.checkpoint import read_checkpoint
from lrpe_md.scripts.train.conditions import EncoderSize
from lrpe_md.scripts.train.data import videos
from lrpe_md.scripts.train.data.buckets import Sizes, parse_mixed
from lrpe_md.scripts.train.data.captions import crop
from lrpe_md.scripts.train.data.pictures import open_pictures
from lrpe_md.scripts.train.data.records import Split
from lrpe_md.scripts.train.data.source import Encoding, load_source
from lrpe_md.scripts.train.data.streams import ShardSource, find_shards, index_shard
from lrpe_md.scripts.train.data.values import Decoded, Latents
from lrpe_md.scripts.train.order import DataError, divide, shuffle_groups
from lrpe_md.scripts.train.prompts import Painter
from lrpe_md.scripts.train.tasks import diffusion
from lrpe_md.scripts.train.tasks.diffusion import DiffusionTraining
from lrpe_md.scripts.train.vae import Decoder, load_vae
from PIL import Image
from train_commands import invoke

CPU = torch.device("cpu")
WIDE = {"size": 8, "test_size": 0, "max_ratio": 2.0}


def config(options: dict[str, Any], out: Path, **changes: Any) -> DiffusionTraining:
    return DiffusionTraining(out=out, **{**SMALL, **options, **changes})


def take(groups: list[np.ndarray], batch: int, steps: int, start: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(itertools.islice(shuffle_groups(groups, batch, 5, start), steps))


# --- order -----------------------------------------------------------------------------------------------------------

GROUPS = [np.arange(0, 50), np.arange(50, 53), np.arange(53, 75), np.arange(75, 76)]


def test_batches_of_groups_come_from_one_group_and_draw_all_samples_equally_often():
    counts, owners = np.zeros(76), np.repeat(np.arange(4), [50, 3, 22, 1])
    for indices, draws in take(GROUPS, 8, 950):  # 100 epochs
        assert indices.shape == draws.shape == (8,)
        assert len(set(owners[indices])) == 1
        np.add.at(counts, indices, 1)
    assert counts.sum() == 8 * 950
    for group in GROUPS:
        assert np.ptp(counts[group]) <= 8 / len(group) + 1
        assert counts[group].mean() == pytest.approx(100, abs=8 / len(group) + 1)


def test_groups_are_shuffled_anew_and_resume_at_any_step():
    whole = take(GROUPS, 8, 60)
    for start in (0, 1, 7, 19, 40, 59):
        for (indices, draws), (again, others) in zip(whole[start:], take(GROUPS, 8, 60 - start, start), strict=True):
            assert np.array_equal(indices, again)
            assert np.array_equal(draws, others)
    first = [indices for indices, _ in whole if indices[0] < 50]
    assert not np.array_equal(np.sort(first[0]), np.arange(8))
    assert len({tuple(draws) for _, draws in whole}) == 60


def test_processes_and_micro_batches_share_a_group():
    for rank in range(2):
        for indices, _ in itertools.islice(divide(shuffle_groups(GROUPS, 8, 0), 2, rank, 2), 40):
            assert len({int(np.searchsorted([50, 53, 75], i, side="right")) for i in indices}) == 1


def test_a_batch_larger_than_all_groups_is_refused():
    with pytest.raises(
        typer.BadParameter, match="--batch 100: expected at most 76, the number of samples; use a smaller batch"
    ):
        take(GROUPS, 100, 1)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "multiple", "ratio"), [(256, 16, 2.0), (1024, 16, 4.0), (32, 2, 1.5), (64, 8, 2.5)])
def test_shapes_have_one_area_and_keep_the_limits(size, multiple, ratio):
    sizes = Sizes((size, 2 * size), (3 * size,), multiple, ratio)
    shapes = sizes.shapes(size)
    assert (size, size) in shapes
    assert 3 <= len(shapes) <= 40
    assert max(h / w for h, w in shapes) > 0.7 * ratio
    for height, width in shapes:
        assert height % multiple == width % multiple == 0
        assert 1 / ratio <= height / width <= ratio
        assert height * width == pytest.approx(size**2, rel=multiple / min(height, width))
    for other in (2 * size, 3 * size):
        assert [(other * h // size, other * w // size) for h, w in shapes] == sizes.shapes(other)
    assert Sizes((size,)).shapes(size) == [(size, size)]


def test_images_go_to_the_closest_bucket():
    sizes = Sizes((64,), (96,), 8, 2.0)
    found = sizes.sort(np.array([[100, 200], [300, 300], [90, 45], [310, 300], [10, 100]]))
    shapes = [found.shapes[64][bucket] for bucket in found.of]
    assert shapes == [(48, 88), (64, 64), (88, 48), (64, 64), (48, 88)]
    assert found.number == 3  # those without an image are left out
    assert [found.shapes[96][bucket] for bucket in found.of[:2]] == [(72, 128), (96, 96)]
    assert found.rows.tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="indices: expected samples from one bucket, got samples from"):
        found.find(np.array([0, 1]))


@pytest.mark.parametrize("wrong", ["9", "a", "0", "12,13"])
def test_wrong_mixed_sizes_are_refused(wrong, tmp_path):
    with pytest.raises(typer.BadParameter, match="--mix-sizes: expected multiples of 2, in pixels"):
        config({"data": tmp_path, **WIDE, "mix_sizes": wrong}, tmp_path / "out")
    assert parse_mixed("24, 32,24", 32, 8) == (32, 24)


# --- images ----------------------------------------------------------------------------------------------------------


def test_buckets_keep_what_a_square_crops_away(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :4] = 255  # outside the central square
    image = Image.fromarray(pixels)
    assert crop(image, (8, 8)).max() == 0
    assert np.array_equal(crop(image, (8, 16)), pixels)
    folder = write_ratios(tmp_path / "ratios")
    source = load_source(config({"data": folder, **WIDE}, tmp_path), Sizes((8,), (), 2, 2.0), CPU, encoding())
    pictures = open_pictures(folder, Split(4))
    shapes = set()
    for i in range(len(pictures)):
        x = source.values.batch(np.array([i]), 8)[0]
        expected = crop(pictures.open(i), (x.shape[1], x.shape[2]))
        assert torch.equal(((x + 1) * 127.5).round().permute(1, 2, 0), torch.from_numpy(expected.copy()).float())
        assert (x.shape[1] > x.shape[2]) == (pictures.open(i).height > pictures.open(i).width)
        shapes.add(tuple(x.shape[1:]))
    assert shapes == {(6, 10), (8, 8), (10, 6)}


def encoding() -> Encoding:
    return Encoding(EncoderSize(16, 1, 2, 32))


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
def test_a_turned_photograph_is_measured_upright(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (16, 8)).save(tmp_path / f"a.{suffix}", exif=exif)
    pictures = open_pictures(tmp_path, Split(4))
    assert pictures.measure(0) == (16, 8)
    assert pictures.open(0).size == (8, 16)


def test_each_step_has_one_shape_and_all_shapes_come(tmp_path, monkeypatch):
    shapes = []

    def seen(chosen: Any, model: Any, samples: Any) -> torch.Tensor:
        shapes.append(tuple(samples[0].shape[2:]))
        assert len(samples[0]) == len(samples[1]) == 4
        return loss(chosen, model, samples)

    loss = diffusion.loss
    monkeypatch.setattr(diffusion, "loss", seen)
    options = {"data": write_ratios(tmp_path / "ratios"), **WIDE, "test_size": 16, "mix_sizes": "12"}
    result = diffusion.run(config(options, tmp_path / "run", steps=30))
    assert set(shapes) == {(6, 10), (8, 8), (10, 6), (8, 16), (12, 12), (16, 8)}
    assert set(result["held_out"]) == {"test_pairs", "8x8", "12x12", "16x16 extrapolated", "16x16 rescaled"}
    assert result["tokens"] == 4 * (4**2 + 6**2) / 2
    losses = [result["held_out"][name]["loss"] for name in ("16x16 extrapolated", "16x16 rescaled")]
    assert losses[0] != losses[1]


def test_rescaled_positions_follow_the_bucket(tmp_path):
    chosen = config({"data": write_ratios(tmp_path / "ratios"), **WIDE, "test_size": 16}, tmp_path / "run")
    source = diffusion.open_source(chosen, CPU)
    evaluation = diffusion.make_evaluation(chosen, source, CPU)
    grids = set()
    model = SimpleNamespace(reference=None)
    for bucket in np.unique(source.values.buckets(source.train)):
        members = source.train[source.values.buckets(source.train) == bucket]
        model.reference = evaluation._reference(evaluation.settings[-1], members)
        shape = source.values.batch(members[:1], 8).shape[2:]
        assert model.reference == tuple(n // 2 for n in shape)
        grids.add(model.reference)
    assert len(grids) == 3


def test_held_out_images_are_shown_at_the_largest_size(tmp_path):
    options = {"data": write_ratios(tmp_path / "ratios"), **WIDE, "mix_sizes": "4"}
    chosen = config(options, tmp_path / "run")
    source = diffusion.open_source(chosen, CPU)
    model, evaluation = diffusion.build(chosen, source), diffusion.make_evaluation(chosen, source, CPU)
    names, columns = evaluation.draw(model, chosen.sampling, 6, nullcontext)
    assert len(names) == 6
    assert columns["held out"].shape == columns["8x8"].shape == (6, 3, 10, 10)  # wide and tall, with white margins
    assert max(columns["4x4"].shape[2:]) < 8
    assert (columns["held out"].amin((1, 3)) == 1).any(1).sum() >= 1  # rows of a margin


def test_positions_of_samples_follow_the_trained_sizes(tmp_path):
    options = {"data": write_ratios(tmp_path / "ratios"), **WIDE, "mix_sizes": "12"}
    diffusion.run(config(options, tmp_path / "run", steps=1))
    painter = Painter(read_checkpoint(tmp_path / "run" / "checkpoint.pt"), CPU)
    grids = painter.grids  # a patch has two pixels
    assert grids((4, 4)) is None
    assert grids((6, 6)) is None
    assert grids((3, 5)) == (3, 5)
    assert grids((4, 6)) == (4, 6)  # between the training sizes
    assert grids((12, 12)) == (6, 6)  # mapped onto the largest one
    assert grids((2, 2)) == (4, 4)  # and onto the smallest one
    given = ["--prompt", "red", "--size", "8x12", "--steps", 1, "--images", 1, "--device", "cpu"]
    done = invoke("sample", tmp_path / "run", *given)
    assert done.exit_code == 0, done.output


def test_latents_of_buckets_equal_those_of_the_vae(tmp_path):
    data, vae = write_ratios(tmp_path / "ratios"), write_vae(tmp_path / "vae")
    done = invoke(
        "latents", "--vae", vae, "--data", data, "--size", 8, "--mix-sizes", 12, "--max-ratio", 2,
        "--device", "cpu", "--dtype", "float32", "--out", tmp_path / "latents",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    latents, pictures = Latents(tmp_path / "latents", False, CPU), open_pictures(data, Split(1))
    coder = Decoder(load_vae(str(vae)), CPU)
    assert latents.sizes == (8, 12)
    shapes = set()
    for i in range(len(pictures)):
        for size in latents.sizes:
            z = latents.batch(np.array([i]), size)
            height, width = (2 * n for n in z.shape[2:])
            pixels = torch.from_numpy(crop(pictures.open(i), (height, width))).permute(2, 0, 1).float() / 127.5 - 1
            mean, _ = coder.encode(pixels[None])
            torch.testing.assert_close(z, (mean - coder.shift) * coder.scale, rtol=1e-4, atol=1e-4)
            shapes.add((size, height, width))
    assert len(shapes) == 6
    assert config({"data": tmp_path / "latents"}, tmp_path / "run", patch=1).dynamic_shapes is None
    with pytest.raises(typer.BadParameter, match=r"--patch 2: expected a divisor of 3, 5.*`train latents --patch`"):
        config({"data": tmp_path / "latents"}, tmp_path / "run", patch=2)
    with pytest.raises(typer.BadParameter, match=r"--max-ratio 2\.0: latents have fixed sizes"):
        config({"data": tmp_path / "latents"}, tmp_path / "run", patch=1, max_ratio=2.0)
    with pytest.raises(typer.BadParameter, match="--cuda-graphs: expected one shape for all steps"):
        config({"data": tmp_path / "latents"}, tmp_path / "run", patch=1, compile=True, cuda_graphs=True)


def test_frames_keep_their_proportions(tmp_path):
    pytest.importorskip("av")
    from test_train_video import write_video

    frames = np.zeros((4, 16, 32, 3), np.uint8)
    frames[:, :, :8] = 250  # outside the central square
    path = write_video(tmp_path / "a.mp4", frames, "pyav") or tmp_path / "a.mp4"
    assert videos.measure(path) == (16, 32)
    assert videos.decode(path, 8).float().mean() < 20
    wide = videos.decode(path, (8, 16))
    assert wide.shape == (4, 3, 8, 16)
    assert wide[..., :3].float().mean() > 200


# --- streams ---------------------------------------------------------------------------------------------------------


def test_streams_have_captions_classes_and_test_parts(tmp_path):
    shards, hub = write_captioned_shards(tmp_path / "shards"), write_hub(tmp_path / "hub")
    found = open_pictures(shards, Split(4))
    assert found.records.captions == [f"a {list(COLOURS)[i % 3]} tile" for i in range(24)]
    assert found.records.labels is None
    assert [found.measure(i) for i in range(3)] == list(RATIOS)
    assert found.open(2).size == RATIOS[2][::-1]
    by_class = open_pictures(shards, Split(4), condition="labels")
    assert by_class.records.classes == ("0", "1", "2")
    named = open_pictures(shards, Split(4), label="colour")
    assert named.records.classes == tuple(sorted(COLOURS))
    assert named.records.labels is not None
    assert [named.records.classes[i] for i in named.records.labels[:3]] == list(COLOURS)
    data = open_pictures(hub, Split(4), condition="labels")
    assert data.records.classes == tuple(sorted(COLOURS))
    assert data.records.held_out(hub, Split(4)).tolist() == [False] * 18 + [True] * 6
    assert [data.measure(i) for i in range(3)] == list(RATIOS)
    (tmp_path / "bare").mkdir()
    write_bare(tmp_path / "bare" / "a.tar")
    with pytest.raises(typer.BadParameter, match=r"sample '00000'.*expected a caption in \.txt"):
        open_pictures(tmp_path / "bare", Split(4), condition="captions")


def test_test_shards_without_images(tmp_path):
    import webdataset

    shards = write_captioned_shards(tmp_path / "shards")
    with webdataset.TarWriter(str(shards / "val-000.tar")) as writer:
        writer.write({"__key__": "00000", "txt": "a red tile"})
    with pytest.raises(typer.BadParameter, match=r"expected samples with images, got only these fields: caption$"):
        open_pictures(shards, Split(4))


def write_bare(path: Path) -> None:
    import io

    import webdataset

    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    with webdataset.TarWriter(str(path)) as writer:
        writer.write({"__key__": "00000", "png": file.getvalue()})


def test_a_streamed_folder_trains_like_one_in_memory(tmp_path):
    data = write_ratios(tmp_path / "ratios")
    results = [
        diffusion.run(config({"data": data, **WIDE, "flip": True, "stream": stream}, tmp_path / str(stream)))
        for stream in (False, True)
    ]
    assert results[0]["held_out"]["8x8"]["loss"] == pytest.approx(results[1]["held_out"]["8x8"]["loss"], rel=1e-5)
    source = load_source(config({"data": data, **WIDE, "stream": True}, tmp_path), Sizes((8,)), CPU, encoding())
    assert isinstance(source.values, Decoded)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_stops_a_diffusion_training_and_loses_nothing(tmp_path, workers):
    """The error names the shard and the sample. After a repair, the weights equal those of an uninterrupted run."""
    shards = write_captioned_shards(tmp_path / "shards")
    options = {"data": shards, **WIDE, "steps": 6, "save_every": 100}
    diffusion.run(config(options, tmp_path / "whole"))
    chosen = config(options, tmp_path / "run", workers=workers)
    source = diffusion.open_source(chosen, CPU)
    steps = [chosen_[0] for chosen_ in itertools.islice(source.order(4, 0)(0), 6)]
    before = {int(i) for indices in steps[:2] for i in indices}
    step, index = next((s, int(i)) for s in range(2, 6) for i in steps[s] if int(i) not in before)
    tars = ShardSource(find_shards(shards)[0])
    shard, sample = tars._find(int(source.train[index]))
    whole, stat = shard.path.read_bytes(), shard.path.stat()
    at = int(shard.offsets[sample, shard.fields.index("png")]) + 41  # compressed pixels, after the size
    shard.path.write_bytes(whole[:at] + bytes(6) + whole[at + 6 :])
    place = rf"{shard.path.name}, sample '{shard.keys[sample]}' .*run the same command to resume"
    with pytest.raises(DataError, match=place):
        diffusion.run(chosen)
    assert torch.load(chosen.out / "checkpoint.pt")["step"] == step
    shard.path.write_bytes(whole)
    os.utime(shard.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    diffusion.run(chosen)
    states = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "run")]
    assert all(torch.equal(value, states[1]["model"][name]) for name, value in states[0]["model"].items())


def test_a_shard_that_breaks_off_is_refused_before_anything_is_written(tmp_path):
    shards = write_captioned_shards(tmp_path / "shards")
    shard = index_shard(shards / "train-001.tar")
    os.truncate(shard.path, int(shard.offsets[5].max()) + 1)
    done = invoke("diffusion", "--data", shards, "--out", tmp_path / "run", "--size", 8, "--device", "cpu")
    assert done.exit_code == 2
    assert "train-001.tar is cut off in sample '00015', after 5 complete samples" in done.output
    assert not (tmp_path / "run").exists()


def test_latents_of_shards(tmp_path):
    shards, vae = write_captioned_shards(tmp_path / "shards"), write_vae(tmp_path / "vae")
    done = invoke(
        "latents", "--vae", vae, "--data", shards, "--size", 8, "--device", "cpu", "--out", tmp_path / "latents"
    )
    assert done.exit_code == 0, done.output
    records = json.loads((tmp_path / "latents" / "records.json").read_text())
    assert records["captions"] == [f"a {list(COLOURS)[i % 3]} tile" for i in range(24)]
