"""Training on labelled videos: frames of a clip, classes by folder, and held-out videos."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from lrpe_md.scripts.train.data.clips import Sampling, load_labelled
from lrpe_md.scripts.train.data.records import average_by_class, describe_few
from lrpe_md.scripts.train.data.streams import hold_out
from lrpe_md.scripts.train.data.videos import VideoError, decode, find_videos
from lrpe_md.scripts.train.runs import load_clip, load_frames, load_run
from lrpe_md.scripts.train.tasks import video as train_video
from lrpe_md.scripts.train.tasks.video import VideoTraining
from PIL import Image
from test_train_video import DECODERS, write_video
from train_commands import die_after, output_of

pytestmark = pytest.mark.skipif(not DECODERS, reason="needs PyAV or OpenCV")

SMALL = {
    "steps": 5, "batch": 6, "lr": 3e-3, "warmup": 2, "ema": 0.5, "device": "cpu", "log_every": 2, "save_every": 2,
    "tensorboard": False, "progress": False, "task": "labels", "motion": False, "frames": 4, "every": 2, "size": 8,
    "test_size": 16, "patch": 4, "dim": 48, "depth": 1, "heads": 2, "parts": 4, "cache": "none",
}  # fmt: skip


def shades(start: int, num: int) -> np.ndarray:
    """Return grey frames (F, 32, 32, 3) that become brighter."""
    return np.tile((start + 4 * np.arange(num)).astype(np.uint8)[:, None, None, None], (1, 32, 32, 3))


def write_classes(folder: Path, parts: tuple[str, ...] = ("",), num: int = 10) -> Path:
    for part in parts:
        for name, start in (("bright", 130), ("dark", 10)):
            (folder / part / name).mkdir(parents=True)
            for i in range(num):
                write_video(folder / part / name / f"{i}.mp4", shades(start, 8 + i), DECODERS[0])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("clips") / "videos")


def test_frames_of_a_clip():
    dense = Sampling("dense", 4, 3)
    lengths = np.array([12, 12, 12, 5, 1])
    frames = dense.choose_frames(lengths, np.array([0.0, 0.5, 0.999, 0.5, 0.5]))
    assert frames.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11], [0, 3, 4, 4], [0, 0, 0, 0]]
    uniform = Sampling("uniform", 4, 3)
    frames = uniform.choose_frames(lengths, np.array([0.0, 0.5, 0.999, 0.5, 0.5]))
    assert frames.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11], [0, 1, 3, 4], [0, 0, 0, 0]]


def test_classes_and_held_out_videos(folder):
    videos = load_labelled([folder], 8, parts=4)
    assert videos.names == ("bright", "dark")
    assert videos.lengths.tolist() == [*range(8, 18)] * 2
    assert 0 < videos.held_out.sum() < 20
    numbers = np.arange(20)
    clips = videos.clips(numbers, np.zeros(20), Sampling("dense", 4, 2), 8)
    assert clips.shape == (20, 3, 4, 8, 8)
    assert (clips[:10].mean((1, 2, 3, 4)) > 0).all()
    assert (clips[10:].mean((1, 2, 3, 4)) < 0).all()
    assert (clips.mean((1, 3, 4)).diff(dim=1) > 0).all()  # in chronological order


def test_folders_for_training_and_tests(tmp_path):
    videos = load_labelled([write_classes(tmp_path / "split", ("train", "val"), 2)], 8, parts=4)
    assert videos.held_out.tolist() == [False] * 4 + [True] * 4
    assert videos.labels.tolist() == [0, 0, 1, 1] * 2


def test_unsuitable_folders(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    videos = len(list((folder / "dark").iterdir()))
    for paths, got in (
        ([tmp_path / "nothing"], "a missing folder"), ([tmp_path / "empty"], "no videos"),
        ([folder, folder], "2 paths"), ([folder / "dark"], f"{videos} videos outside any class folder"),
    ):  # fmt: skip
        with pytest.raises(VideoError, match=rf"expected a folder with CLASS/\*\.mp4 and at least two .*, got {got}$"):
            load_labelled(paths, 8, parts=4)
    with pytest.raises(VideoError, match=r"videos are held out; add videos, choose .*another --parts"):
        load_labelled([folder], 8, parts=1)
    run = ["video", "--data", folder, "--out", tmp_path / "run", "--task", "labels", "--cache", "none"]
    assert "--sampling: unknown 'densee'" in output_of(*run, "--sampling", "densee")
    assert "expected at most" in output_of(*run, "--batch", 64, "--device", "cpu")
    assert not (tmp_path / "run").exists()


def test_classes_without_training_videos_are_refused(tmp_path):
    data = write_classes(tmp_path / "split", ("train", "val"), 1)
    (data / "val" / "grey").mkdir()
    write_video(data / "val" / "grey" / "0.mp4", shades(60, 8), DECODERS[0])
    with pytest.raises(
        VideoError, match=r"expected training videos for every class, got none for grey; add videos to train/"
    ):
        load_labelled([data], 8, parts=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"segment": 30},
            "--segment 30: does not work with --task labels, which tests whole videos; leave out --segment",
        ),
        (
            {"task": "order", "sampling": "uniform"},
            "--sampling uniform: only works with --task labels; leave out --sampling",
        ),
    ],
)
def test_options_of_other_tasks_are_refused(folder, tmp_path, options, message):
    with pytest.raises(typer.BadParameter, match=message):
        VideoTraining(out=tmp_path / "run", **{**SMALL, "data": [folder], **options})


def test_short_videos_are_counted(folder, tmp_path, capsys):
    last, some = "their last frame is repeated", "some of their frames are repeated"
    for sampling, every, frames, messages in (
        ("dense", 3, 4, [
            f"4 of 20 videos are shorter than a clip of 10 frames; {last}",
            f"Test with 8 frames: 2 of 2 test videos are shorter than a clip of 22 frames; {last}",
        ]),
        ("uniform", 3, 9, [
            f"2 of 20 videos are shorter than a clip of 9 frames; {some}",
            f"Test with 18 frames: 2 of 2 test videos are shorter than a clip of 18 frames; {some}",
        ]),
        ("dense", 16, 1, [f"Test with 2 frames: 1 of 2 test videos is shorter than a clip of 17 frames; {last}"]),
        ("dense", 1, 4, []),
        ("uniform", 3, 4, []),
    ):  # fmt: skip
        given = {**SMALL, "data": [folder], "sampling": sampling, "every": every, "frames": frames}
        train_video.prepare(VideoTraining(out=tmp_path / "run", **given), torch.device("cpu"))
        held_out, few, *others = capsys.readouterr().err.splitlines()
        assert held_out == "Held out 2 of 20 videos for tests: bright 0, dark 2"
        assert few == (
            "Classes with fewer than 3 test videos: bright, dark. Their accuracy says little; pass a smaller --parts, "
            "or average runs with --fold 0 to 3"
        )
        assert others == messages


def test_an_empty_fold_names_the_folds_with_videos(tmp_path):
    data = write_classes(tmp_path / "few", ("",), 1)
    names = [p.relative_to(data).as_posix() for p in data.glob("*/*.mp4")]
    usable = [fold for fold in range(9) if hold_out(names, 9, fold).any()]
    empty = next(fold for fold in range(9) if fold not in usable)
    expected = f"choose --fold {' or '.join(map(str, usable))}, or another --parts"
    with pytest.raises(VideoError, match=expected):
        load_labelled([data], 8, parts=9, fold=empty)


def test_folds_of_whole_videos(folder, tmp_path):
    """Each video is held out in one fold, and adding a video doesn't move any other."""
    folds = [load_labelled([folder], 8, parts=4, fold=i).held_out for i in range(4)]
    assert sum(fold.astype(int) for fold in folds).tolist() == [1] * 20
    config = VideoTraining(out=tmp_path / "run", **{**SMALL, "data": [folder], "fold": 2})
    work = train_video.prepare(config, torch.device("cpu"))
    assert len(next(work.steps(0))[0]) == SMALL["batch"]
    assert work.settings["digest"] != load_labelled([folder], 16, parts=4).digest
    split = write_classes(tmp_path / "split", ("train", "val"), 1)
    with pytest.raises(VideoError, match=r"--fold 1: --data .*split has its own test videos in val/; leave out --fold"):
        load_labelled([split], 8, parts=4, fold=1)


def test_many_small_classes_are_named_in_part():
    names, held_out = tuple("abcdefgh"), np.zeros(8, bool)
    found = describe_few("video", held_out, np.arange(8), names, "add videos")
    assert found.startswith("Classes with fewer than 3 test videos: a, b, c, d, e and 3 more. Their accuracy")
    assert describe_few("video", np.ones(6, bool), np.arange(6) % 2, ("a", "b"), "") == ""


def test_folders_of_frames_are_refused_with_advice(tmp_path):
    for name in ("left", "right"):
        (tmp_path / "data" / name / "clip").mkdir(parents=True)
        (tmp_path / "data" / name / "._clip.mp4").touch()
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / name / "clip" / "000.png")
    advice = r"; pictures such as left/clip/000\.png are not read as frames: make a video of each folder of frames"
    with pytest.raises(VideoError, match=f"got no videos{advice}"):
        load_labelled([tmp_path / "data"], 8, parts=4)
    with pytest.raises(VideoError, match=f"in the folder, found none{advice}"):
        find_videos([tmp_path / "data"])


def test_clips_with_classes_are_mirrored_only_on_request(folder, tmp_path):
    videos = load_labelled([folder], 8, parts=4)
    ramp = torch.arange(8, dtype=torch.uint8).expand_as(videos.frames)  # brighter to the right
    videos = replace(videos, frames=ramp)
    numbers, draws = np.arange(8), np.arange(8)
    for given, mirrored in (({}, 0), ({"flip": True}, 4), ({"flip": False}, 0)):
        config = VideoTraining(out=tmp_path / "run", **{**SMALL, "data": [folder], **given})
        x, _ = train_video.labelled_batch(config, videos, numbers, numbers, draws)
        assert (x[..., 0] > x[..., -1]).all((1, 2, 3)).sum() == mirrored
    assert VideoTraining(out=tmp_path / "run", data=[folder], task="order").flip


@pytest.mark.parametrize("sampling", ["dense", "uniform"])
def test_training_learns_the_classes_and_resumes(folder, tmp_path, sampling, monkeypatch):
    options = {**SMALL, "data": [folder], "sampling": sampling, "steps": 20}
    whole = VideoTraining(out=tmp_path / "whole", **options)
    result = train_video.run(whole)
    assert result["accuracy"]["extrapolated"]["4x8x8"] == 100
    assert result["classes"] == ["bright", "dark"]
    assert (result["chance"], result["train_videos"] + result["test_videos"]) == (50, 20)
    config, make = VideoTraining(out=tmp_path / "cut", **options), train_video.labelled_batch
    monkeypatch.setattr(train_video, "labelled_batch", die_after(5, make, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train_video.run(config)
    monkeypatch.setattr(train_video, "labelled_batch", make)
    train_video.run(config)
    states = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "cut")]
    assert all(torch.equal(value, states[1]["average"][name]) for name, value in states[0]["average"].items())


@pytest.mark.parametrize("sampling", ["dense", "uniform"])
def test_a_clip_for_a_loaded_model(tmp_path, sampling):
    data, seen = write_classes(tmp_path / "split", ("train", "val"), 3), []
    options = {**SMALL, "data": [data], "sampling": sampling, "motion": True, "steps": 1}
    config = VideoTraining(out=tmp_path / "run", **options)
    train_video.run(config)
    model = load_run(tmp_path / "run")
    model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[0]))
    train_video.find_right(config, model, load_labelled([data], 8, parts=4), 4, 8, nullcontext)
    found = [load_clip(tmp_path / "run", path) for path in sorted((data / "val").glob("*/*.mp4"))]
    assert torch.equal(torch.cat(found), seen[0])


def test_frames_of_a_whole_video_for_a_stream(tmp_path):
    """If the frames of a clip are streamed, the scores equal those of the clip."""
    data = write_classes(tmp_path / "split", ("train", "val"), 2)
    options = {**SMALL, "data": [data], "steps": 1, "batch": 4, "tubelet": 2, "causal": True}
    train_video.run(VideoTraining(out=tmp_path / "run", **options))
    path, model = data / "val" / "dark" / "1.mp4", load_run(tmp_path / "run")
    frames = load_frames(tmp_path / "run", path)  # 9 frames of the video, every second one, in tubelets of two
    assert frames.shape == (1, 3, 4, 8, 8)
    whole = decode(path, 16)[::2][:4]
    expected = torch.nn.functional.interpolate(whole.float(), (8, 8), mode="bilinear", antialias=True) / 127.5 - 1
    torch.testing.assert_close(frames[0].transpose(0, 1), expected)
    tokens, state = [], None
    for chunk in frames.split(2, dim=2):
        new, state = model.stream(chunk, state)
        tokens.append(new)
    torch.testing.assert_close(model.forward_head(torch.cat(tokens, 1)), model(frames))
    with pytest.raises(VideoError, match=r"missing\.mp4: no such file; pass the path of a video$"):
        load_clip(tmp_path / "run", tmp_path / "missing.mp4")
    write_video(tmp_path / "short.mp4", shades(10, 2), DECODERS[0])
    assert load_frames(tmp_path / "run", tmp_path / "short.mp4").shape == (1, 3, 2, 8, 8)
    train_video.run(VideoTraining(out=tmp_path / "uniform", **{**options, "sampling": "uniform"}))
    with pytest.raises(
        ValueError, match=r"expected a run with --sampling dense, got .*uniform with --sampling uniform"
    ):
        load_frames(tmp_path / "uniform", path)


def test_accuracy_of_each_class(tmp_path, capsys):
    data = write_classes(tmp_path / "split", ("train", "val"), 3)
    config = VideoTraining(out=tmp_path / "run", **{**SMALL, "data": [data], "steps": 20, "test_size": 0})
    result = train_video.run(config)
    assert result["accuracy_by_class"] == {"bright": 100, "dark": 100}
    assert set(result["accuracy"]["rescaled"]) == {"4x8x8", "8x8x8"}  # --test-size 0
    assert re.search(r"accuracy by class bright +100 *$", capsys.readouterr().out, re.MULTILINE)
    videos = load_labelled([data], 8, parts=4)
    right = np.array([True, True, False, False, False, True])
    labels = videos.labels[train_video.find_test_videos(config, videos)]
    found = average_by_class(right, labels, videos.names)
    assert found == pytest.approx({"bright": 200 / 3, "dark": 100 / 3})


def test_the_number_of_test_videos_is_shown(tmp_path, capsys):
    data = write_classes(tmp_path / "split", ("train", "val"), 3)
    options = {**SMALL, "data": [data], "steps": 1, "test_samples": 2}
    result = train_video.run(VideoTraining(out=tmp_path / "run", **options))
    assert (result["train_videos"], result["test_videos"]) == (6, 2)
    assert re.search(r"^ *test videos +2 *$", capsys.readouterr().out, re.MULTILINE)
    config = VideoTraining(out=tmp_path / "other", **options)
    videos = load_labelled([data], 8, parts=4)
    assert set(videos.labels[train_video.find_test_videos(config, videos)]) == {0, 1}
    assert train_video.find_test_videos(replace(config, test_samples=9), videos).tolist() == [6, 7, 8, 9, 10, 11]
