"""Training on synthetic videos."""

import json
import os
import re
import struct
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import typer
from lrpe_md.models.video import LrpeVideoTransformer
from lrpe_md.models.vit import LrpeVisionTransformer
from lrpe_md.scripts.train.data import videos as video_data
from lrpe_md.scripts.train.data.videos import TASKS, VideoError, decode, find_videos, measure, ordered, segments
from lrpe_md.scripts.train.encodings import VIDEOS, has_position_table
from lrpe_md.scripts.train.runs import load_run
from lrpe_md.scripts.train.tasks import video as train_video
from lrpe_md.scripts.train.tasks.video import VideoTraining
from lrpe_md.scripts.train.weights import start_from
from torch import nn
from train_commands import flags, output_of, with_options

from lrpe_md import list_presets

DECODERS = [name for name in video_data.DECODERS if video_data.importlib.util.find_spec(video_data.DECODERS[name])]
needs_decoder = pytest.mark.skipif(not DECODERS, reason="needs PyAV or OpenCV")


def brightening(num: int, height: int = 32, width: int = 32) -> np.ndarray:
    """Return grey frames (F, H, W, 3) that become brighter and restart at the maximum."""
    frames = (np.arange(num) * 24 % 240).astype(np.uint8)
    return np.tile(frames[:, None, None, None], (1, height, width, 3))


def write_video(path: Path, frames: np.ndarray, name: str) -> Path:
    if name == "pyav":
        import av

        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=24)
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
            stream.bit_rate = 4_000_000
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
    else:
        import cv2

        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 24, frames.shape[2:0:-1])
        for frame in frames:
            writer.write(frame[..., ::-1].copy())
        writer.release()
    return path


@pytest.fixture(scope="module")
def footage(tmp_path_factory) -> Path:
    return write_video(tmp_path_factory.mktemp("footage") / "grey.mp4", brightening(160), DECODERS[0])


SMALL = {
    "steps": 40, "batch": 16, "lr": 3e-3, "warmup": 2, "ema": 0.5, "device": "cpu", "log_every": 5,
    "tensorboard": False,
    "frames": 4, "every": 1, "size": 8, "test_size": 16, "patch": 4, "dim": 48, "depth": 1, "heads": 2,
    "segment": 40, "parts": 4, "test_samples": 32, "motion": False,
}  # fmt: skip


# --- footage ---------------------------------------------------------------------------------------------------------


@needs_decoder
@pytest.mark.parametrize("name", DECODERS)
def test_decoded_frames_are_the_ones_written(tmp_path, name):
    frames = brightening(5, 32, 48)
    frames[:, :, :8], frames[:, :, 40:] = 255, 0  # wider than tall: the centre is cropped
    frames[:, 16:, :, 2] = 90  # not flipped, and in RGB order
    path = write_video(tmp_path / "wide.mp4", frames, name)
    found = decode(path, 32, name)
    assert found.shape == (5, 3, 32, 32)
    assert found.dtype == torch.uint8
    expected = torch.from_numpy(frames[:, :, 8:40]).permute(0, 3, 1, 2)
    assert (found.float() - expected.float()).abs().mean() < 12
    assert decode(path, 8, name).shape == (5, 3, 8, 8)


def turn_anticlockwise(path: Path, turns: int) -> None:
    """Write the display matrix of a phone held sideways into an .mp4: players rotate its frames by quarter turns."""
    content = bytearray(path.read_bytes())
    start = content.index(b"tkhd") + 44  # version 0 of the track header
    (a, b), one = {0: (1, 0), 1: (0, -1), 2: (-1, 0), 3: (0, 1)}[turns], 1 << 16
    assert content[start : start + 4] == one.to_bytes(4, "big")
    content[start : start + 36] = struct.pack(">9i", a * one, b * one, 0, -b * one, a * one, 0, 0, 0, 1 << 30)
    path.write_bytes(content)


@needs_decoder
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("turns", range(4))
def test_frames_are_rotated_upright(tmp_path, turns, name):
    frames = brightening(5, 32, 48)
    frames[:, :16, :24], frames[:, 16:, 24:] = 255, 0
    path = write_video(tmp_path / "phone.mp4", frames, name)
    turn_anticlockwise(path, turns)
    upright = np.rot90(frames, turns, axes=(1, 2))
    assert measure(path) == upright.shape[1:3]
    height, width = upright.shape[1:3]
    for size in ((height, width), (32, 32)):
        top, left = (height - size[0]) // 2, (width - size[1]) // 2
        cropped = upright[:, top : top + size[0], left : left + size[1]].copy()
        expected = torch.from_numpy(cropped).permute(0, 3, 1, 2)
        found = decode(path, size, name)
        assert found.shape == expected.shape
        assert (found.float() - expected.float()).abs().mean() < 12


def test_missing_and_unreadable_videos(tmp_path):
    with pytest.raises(
        VideoError, match=r"no such file or folder; expected a video \(.*\.mp4.*\) or a folder of videos"
    ):
        find_videos([tmp_path / "nothing"])
    with pytest.raises(VideoError, match="found none"):
        find_videos([tmp_path])
    with pytest.raises(VideoError, match="got none"):
        find_videos([])
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    (tmp_path / "._broken.mp4").touch()
    assert find_videos([tmp_path]) == [broken]
    for name in DECODERS:
        with pytest.raises(VideoError, match=r"broken\.mp4 can't be read"):
            decode(broken, 8, name)


def write_format(path: Path, num: int) -> Path:
    """Write noisy grey frames, so that truncation removes data. An .mp4 has its header first."""
    import av

    options = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    noise = np.random.default_rng(0).integers(0, 255, (num, 32, 32, 3)).astype(np.uint8)
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        for frame in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.skipif("pyav" not in DECODERS, reason="needs PyAV")
@pytest.mark.parametrize("suffix", [".mp4", ".avi", ".mkv"])
@pytest.mark.parametrize("name", DECODERS)
def test_truncated_video_is_refused(tmp_path, suffix, name):
    path = write_format(tmp_path / f"whole{suffix}", 40)
    assert len(decode(path, 8, name)) == 40
    half = tmp_path / f"half{suffix}"
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(VideoError, match=rf"half\{suffix}.*(of 40 frames|can't be read)"):
        decode(half, 8, name)


@needs_decoder
@pytest.mark.parametrize("name", DECODERS)
def test_list_of_files_is_refused(footage, tmp_path, name):
    """An ffconcat file could refer to frames of any file."""
    wrong = tmp_path / "list.mp4"
    wrong.write_text(f"ffconcat version 1.0\nfile {footage.name}\n")
    (tmp_path / footage.name).write_bytes(footage.read_bytes())
    with pytest.raises(VideoError, match=r"list\.mp4 can't be read"):
        decode(wrong, 8, name)


def test_footage_given_twice_is_refused(tmp_path):
    """Otherwise, its frames would be in both the training and the test set."""
    (tmp_path / "a.mp4").touch()
    for again in (tmp_path / "a.mp4", tmp_path / ".." / tmp_path.name):
        with pytest.raises(VideoError, match=r"each video once, got a\.mp4 more than once"):
            find_videos([tmp_path, again])


def test_footage_identifies_a_run():
    frames = torch.zeros(8, 3, 2, 2, dtype=torch.uint8)
    one = video_data.Footage(frames, ())
    assert one.digest == video_data.Footage(frames.clone(), ()).digest
    frames = frames.clone()
    frames[3, 0, 0, 0] = 1
    assert one.digest != video_data.Footage(frames, ()).digest


def test_missing_decoder_gives_the_install_command(monkeypatch):
    monkeypatch.setattr(video_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(VideoError, match="pip install av"):
        decode(Path("any.mp4"), 8)


@pytest.mark.parametrize("fold", [0, 1, 3])
def test_held_out_segments_share_no_frame_with_training(fold):
    lengths, gap, span = (1000, 130, 455), 7, 20
    found = segments(lengths, 100, 4, fold, gap)
    footage = video_data.Footage(torch.zeros(sum(lengths), 3, 1, 1, dtype=torch.uint8), found)
    owners = {}
    for held_out in (False, True):
        frames = {int(f) for s in footage.starts(span, held_out=held_out) for f in range(s, s + span)}
        assert len(frames) > 200
        owners[held_out] = frames
    for a in owners[True]:
        video = np.searchsorted(np.cumsum(lengths), a, side="right")
        near = {b for b in range(a - gap, a + gap + 1) if np.searchsorted(np.cumsum(lengths), b, side="right") == video}
        assert not near & owners[False]
    edges = set(np.cumsum(lengths).tolist())  # clips must not span two videos
    for held_out in (False, True):
        starts = footage.starts(span, held_out=held_out)
        assert not any(s < edge < s + span for s in starts for edge in edges)


@pytest.mark.parametrize(
    ("lengths", "segment", "parts", "gap", "span", "remedy"),
    [
        ((200,), 240, 5, 64, 32, "pass --segment 100"),  # one segment, which is held out
        ((200,), 40, 5, 64, 32, "pass --segment 64"),  # segments shorter than a held-out clip
        ((100, 100), 240, 5, 8, 8, ""),  # one segment for each
        ((80,), 240, 5, 32, 16, "pass --segment 32"),
        ((40, 30), 240, 5, 64, 32, "pass fewer --frames or a smaller --every, or add videos"),
    ],
)
def test_too_little_footage_names_a_segment_that_works(lengths, segment, parts, gap, span, remedy):
    if not remedy:
        video_data.check_segments(lengths, segment, parts, 0, gap, span)
        return
    with pytest.raises(VideoError, match=remedy) as raised:
        video_data.check_segments(lengths, segment, parts, 0, gap, span)
    assert f"clip of {span} frames" in str(raised.value)
    if "--segment" in remedy:
        video_data.check_segments(lengths, int(remedy.split()[-1]), parts, 0, gap, span)


def test_clip_order_matches_its_label():
    x = torch.arange(8.0)[None, None, :, None, None].expand(2, 3, 8, 1, 1)
    shown = ordered(x, torch.tensor([0, 1]), TASKS["arrow"])[:, 0, :, 0, 0]
    assert shown.tolist() == [list(range(8)), list(range(7, -1, -1))]
    every = ordered(x[:1].expand(24, -1, -1, -1, -1), torch.arange(24), TASKS["order"])[:, 0, :, 0, 0]
    assert len({tuple(row.tolist()) for row in every}) == 24
    shown = [",".join(str(1 + number // 2) for number in row[::2]) for row in every.int().tolist()]
    assert TASKS["order"].classes == tuple(shown)
    assert TASKS["arrow"].classes == ("forwards", "backwards")
    assert every[1].tolist() == [0, 1, 2, 3, 6, 7, 4, 5]
    assert ordered(x.expand(2, 3, 8, 2, 5), torch.tensor([0, 1]), TASKS["arrow"]).shape == (2, 3, 8, 2, 5)


# --- the script ------------------------------------------------------------------------------------------------------


def test_a_process_decodes_once_unless_a_file_changes(monkeypatch, tmp_path):
    calls = []

    def decode(path, size):
        calls.append(path.name)
        return torch.full((len(path.read_bytes()), 3, size, size), len(calls), dtype=torch.uint8)

    monkeypatch.setattr(video_data, "decode", decode)
    for name, length in (("a.mp4", 40), ("b.mp4", 50)):
        (tmp_path / name).write_bytes(bytes(length))
    cut = {"segment": 20, "parts": 2, "fold": 0, "gap": 2, "span": 2, "device": torch.device("cpu")}
    first, again = (video_data.load_footage([tmp_path], 4, **cut) for _ in range(2))
    assert calls == ["a.mp4", "b.mp4"]
    assert first.frames[:, 0, 0, 0].tolist() == [1] * 40 + [2] * 50
    assert (again.digest, again.segments) == (first.digest, first.segments)
    (tmp_path / "a.mp4").write_bytes(bytes(30))
    assert video_data.load_footage([tmp_path], 4, **cut).frames[:, 0, 0, 0].tolist() == [3] * 30 + [4] * 50


@pytest.mark.slow
@needs_decoder
def test_training_learns_the_direction_of_time(footage, tmp_path, capsys):
    config = VideoTraining(data=[footage], out=tmp_path / "run", attention="linear", **{**SMALL, "lr": 6e-3})
    result = train_video.run(config)
    said = capsys.readouterr().out
    assert re.search(rf"^ *test clips +{result['test_clips']} *$", said, re.MULTILINE)
    assert "At other sizes, extrapolated positions are one patch apart" in said
    losses = [row["loss"] for row in torch.load(config.out / "checkpoint.pt")["history"]]
    assert losses[-1] < 0.5 * losses[0]
    assert result["accuracy"]["extrapolated"]["4x8x8"] > 90
    assert set(result["accuracy"]) == {"extrapolated", "rescaled"}
    assert set(result["accuracy"]["rescaled"]) == {"4x8x8", "8x8x8", "4x16x16"}
    assert result["classes"] == ["forwards", "backwards"]
    assert json.loads((config.out / "result.json").read_text()) == result
    assert (config.out / "history.csv").read_text().splitlines()[0] == "step,loss,lr"
    assert {p.name for p in config.out.iterdir()} == {
        "checkpoint.pt",
        "history.csv",
        "model.safetensors",
        "result.json",
    }
    # a finished run is not trained again
    assert train_video.run(config)["accuracy"] == result["accuracy"]


def test_every_preset_for_videos_has_a_grid_or_a_table():
    tables = {name for name in list_presets() if has_position_table({"encoding": name, "num_frames": 4})}
    assert {"videorope", "hope", "circle_rope"} <= tables
    assert not tables & {"wan", "mochi", "mhrope", "qwen2_vl"}


@needs_decoder
@pytest.mark.parametrize(
    ("options", "references"),
    [
        ({"encoding": "videorope", "dim": 32}, {"extrapolated": None}),
        ({"causal": True}, {"extrapolated": None, "rescaled": (None, 2, 2)}),
    ],
)
def test_tables_of_positions_and_the_time_of_a_stream_are_not_rescaled(
    footage, tmp_path, monkeypatch, options, references
):
    seen = []
    monkeypatch.setattr(train_video, "accuracy", lambda config, model, *rest: seen.append(model.reference) or 50.0)
    config = VideoTraining(data=[footage], out=tmp_path / "run", **{**SMALL, "steps": 1, "test_size": 0, **options})
    assert set(train_video.run(config)["accuracy"]) == set(references)
    assert set(seen) == set(references.values())


@needs_decoder
@pytest.mark.parametrize("task", ["arrow", "order"])
@pytest.mark.parametrize("encoding", ["none", "space-only"])
def test_model_without_temporal_positions_is_at_chance(footage, tmp_path, encoding, task):
    few = {**SMALL, "steps": 3, "test_samples": 48}
    config = VideoTraining(data=[footage], out=tmp_path / "run", encoding=encoding, task=task, **few)
    result = train_video.run(config)
    for positions in ("extrapolated", "rescaled"):
        for value in result["accuracy"][positions].values():
            assert value == pytest.approx(result["chance"])


@pytest.mark.slow
@needs_decoder
@pytest.mark.parametrize("attention", VIDEOS.attentions)
def test_every_encoding_can_be_built(attention, tmp_path):
    for encoding in [*VIDEOS.encodings, "wan", "rotate:split=1,1,2,base=50"]:
        for qk_norm, kind in ((False, nn.Identity), (True, nn.LayerNorm)):
            config = VideoTraining(
                data=[], out=tmp_path, encoding=encoding, attention=attention, depth=1, qk_norm=qk_norm
            )
            model = train_video.lrpe_video_tiny_patch16_224(**train_video.model_arguments(config))
            assert model.num_classes == 2
            block: Any = model.blocks[0]
            assert isinstance(block.attn.q_norm, kind)
            assert isinstance(block.attn.k_norm, kind)


@needs_decoder
def test_invalid_options(footage, tmp_path):
    run = ["video", "--data", str(footage), "--out", str(tmp_path / "run"), *flags({**SMALL, "steps": 2})]

    def refused(*options):
        return output_of(*with_options(run, *options))

    assert "unknown 'rope'" in refused("--encoding", "rope")
    assert "multiple of --patch 4, at least 4, got 10" in refused("--size", "10")
    assert "--size: expected a multiple of --patch 4, at least 4, got 0" in refused("--size", "0")
    assert "--test-size: expected a multiple of --patch 4, or 0 to test only at --size" in refused("--test-size", "6")
    said = "--reference: expected FRAMESxSIZE, such as 4x8, in multiples of --tubelet 1 and --patch 4, got "
    for wrong in ("8", "4x10", "0x8", "4x8x8"):
        assert said + wrong in refused("--reference", wrong)
    assert "--reference 1x4: expected more than one patch" in refused("--reference", "1x4")
    for name in ("none", "videorope"):
        said = refused("--reference", "4x8", "--encoding", name, "--heads", "3")
        assert f"--encoding {name} has no grid positions to map" in said
    said = "--reference 6x8: expected the 4 frames of --frames, because a streaming model can't rescale time, got 6; "
    assert f"{said}pass --reference 4x8" in refused("--reference", "6x8", "--causal")
    assert "expected a multiple of 3" in refused("--accumulate", "3")
    assert "--parts: expected at least 2, got 1" in refused("--parts", "1")
    assert "no such file" in refused("--data", str(tmp_path / "nothing.mp4"))
    assert "there is no room for a training clip of" in refused("--frames", "64")
    assert "start the command with torchrun" in refused("--sharding", "fsdp")
    assert not (tmp_path / "run").exists()  # nothing was written
    output_of(*run, code=0)
    assert "encoding: was rotate, is now cosine" in refused("--encoding", "cosine")
    assert "--steps: was 2, is now 1" in refused("--steps", "1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    assert "has no checkpoint.pt" in refused("--out", str(tmp_path / "other"))
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"PK torn")
    assert "can't be read" in output_of(*run)


@pytest.mark.parametrize("task", ["arrow", "order"])
def test_clip_appears_with_both_labels(task):
    numbers = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4).contiguous()
    footage = video_data.Footage(numbers, (video_data.Segment(0, 40, False),))
    config = VideoTraining(data=[], out=Path("unused"), task=task, **SMALL)
    draws = np.random.default_rng(0).integers(2**63, size=33)
    starts = torch.from_numpy(footage.starts(4, held_out=False))
    x, labels = train_video.batch(config, footage, starts, np.arange(33), draws)
    assert x.shape == (66, 3, 4, 8, 8)
    assert (labels[:33] != labels[33:]).all()
    classes = TASKS[task].num_classes
    assert len(labels.unique()) > 0.7 * classes
    found = ((x[:, 0, :, 0, 0] + 1) * 127.5).round().long()
    expected = [[i % 33 + f for f in TASKS[task].order(int(label), 4)] for i, label in enumerate(labels)]
    assert found.tolist() == expected


def test_motion_shows_changes_but_not_their_order():
    still = torch.rand(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x = still + 0.1 * torch.randn(2, 3, 6, 4, 4, generator=torch.Generator().manual_seed(1))
    found, permutation = train_video.motion(x), torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.allclose(train_video.motion(x[:, :, permutation]), found[:, :, permutation], atol=1e-6)
    assert found.mean(2).abs().max() < 1e-5
    assert found.std(dim=(1, 2, 3, 4)).tolist() == pytest.approx([1, 1], abs=0.2)
    assert train_video.motion(still.expand(-1, -1, 6, -1, -1)).abs().max() < 1e-4


def test_causal_models_see_no_motion_by_default():
    options = {name: value for name, value in SMALL.items() if name != "motion"}
    for causal in (False, True):
        config = VideoTraining(data=[], out=Path("unused"), causal=causal, **options)
        assert config.motion is not causal


def test_causal_models_that_cannot_stream(monkeypatch):
    monkeypatch.setattr(LrpeVideoTransformer, "_block", None)  # nothing is computed
    options = {**SMALL, "data": [], "out": Path("unused"), "heads": 1}
    for encoding, said in (
        ("learned", "stretched over the whole video"),
        ("videorope", "one with a table of positions"),
        ("rotate", ""),
    ):
        config = VideoTraining(**options, encoding=encoding, causal=True)
        found = train_video.explain_no_streaming(config, train_video.build(config))
        assert said in found if said else not found
        assert found.startswith("--causal: this model can't read a video frame by frame. ") == bool(said)
    config = VideoTraining(**options, encoding="learned")
    assert not train_video.explain_no_streaming(config, train_video.build(config))


def test_clips_as_motion():
    frames = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    footage = video_data.Footage(frames, (video_data.Segment(0, 40, False),))
    plain, moving = (VideoTraining(data=[], out=Path("unused"), **{**SMALL, "motion": m}) for m in (False, True))
    starts, draws = torch.arange(8), np.random.default_rng(0).integers(2**63, size=8)
    (x, _), (y, _) = (train_video.batch(c, footage, starts, np.arange(8), draws) for c in (plain, moving))
    assert torch.allclose(train_video.motion(x), y, atol=1e-6)
    seen = []
    model = nn.Module()
    model.forward = lambda clips: seen.append(clips) or torch.zeros(len(clips), 2)
    for config in (plain, moving):
        train_video.accuracy(config, model, footage, np.arange(4), 4, 8, nullcontext)
    assert torch.allclose(train_video.motion(seen[0]), seen[2], atol=1e-6)


@pytest.mark.gpu
@needs_decoder
@pytest.mark.parametrize("compile", [False, True])
def test_bf16_on_a_gpu(footage, tmp_path, compile):
    from accelerate.state import AcceleratorState

    fast = {"device": "cuda", "precision": "bf16", "compile": compile, "accumulate": 2, "attention": "linear"}
    config = VideoTraining(data=[footage], out=tmp_path / "run", **{**SMALL, "lr": 6e-3, "save_every": 20, **fast})
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        result = train_video.run(config)
        assert train_video.run(config)["accuracy"] == result["accuracy"]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    losses = [row["loss"] for row in torch.load(config.out / "checkpoint.pt", map_location="cpu")["history"]]
    assert losses[-1] < 0.7 * losses[0]


# --- the cache, and validation ---------------------------------------------------------------------------------------


def train_once(footage, out, **options):
    return train_video.run(
        VideoTraining(**{**SMALL, "steps": 4, "log_every": 2, "data": [footage], "out": out, **options})
    )


@pytest.mark.slow
@needs_decoder
def test_footage_is_decoded_once_across_runs(footage, tmp_path, monkeypatch):
    """The cache key is the file's content, the size and the decoder. Damaged or incomplete entries are recomputed."""
    decoded, real = [], video_data.decode
    monkeypatch.setattr(video_data, "decode", lambda *args: decoded.append(args) or real(*args))
    cache = tmp_path / "cache"

    def frames(path=footage, size=8):
        video_data.decode_all.cache_clear()  # simulates another process
        cut = {"segment": 40, "parts": 4, "fold": 0, "gap": 8, "span": 4, "device": torch.device("cpu")}
        return video_data.load_footage([path], size, cache=cache, **cut).frames

    first = frames()
    (kept,) = cache.iterdir()
    assert torch.equal(frames(), first)
    moved = tmp_path / "moved.mp4"
    moved.write_bytes(footage.read_bytes())
    assert torch.equal(frames(moved), first)
    assert len(decoded) == 1
    assert frames(size=16).shape[-1] == 16
    assert len(decoded) == 2

    whole = kept.read_bytes()
    changed = bytearray(whole)
    changed[-100] ^= 1
    for number, damaged in enumerate((bytes(changed), whole[: len(whole) // 2], b"", b"no tensors"), 3):
        kept.write_bytes(damaged)
        assert torch.equal(frames(), first)
        assert len(decoded) == number
        assert torch.equal(safetensors.torch.load_file(kept)["value"], first)
    (other,) = set(cache.iterdir()) - {kept}
    kept.write_bytes(other.read_bytes())  # valid, but with another key
    assert torch.equal(frames(), first)
    assert len(decoded) == 7

    moved.write_bytes(footage.read_bytes() + b"\0")
    frames(moved)
    assert len(decoded) == 8
    monkeypatch.setattr(video_data.importlib.import_module(video_data.DECODERS[DECODERS[0]]), "__version__", "0")
    frames()
    assert len(decoded) == 9


@needs_decoder
def test_damaged_footage_is_not_cached(footage, tmp_path, monkeypatch):
    def fail(*args):
        raise VideoError("damaged")

    monkeypatch.setattr(video_data, "decode", fail)
    with pytest.raises(VideoError):
        train_once(footage, tmp_path / "run", cache=str(tmp_path / "cache"))
    assert not list(tmp_path.glob("cache/*"))


@needs_decoder
def test_read_only_cache_is_reported(footage, tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    video_data.decode_all.cache_clear()
    train_once(footage, tmp_path / "run", cache=str(tmp_path / "file"))
    assert "Nothing is cached for later runs" in capsys.readouterr().err


@pytest.mark.slow
@needs_decoder
def test_location_of_the_cache(footage, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for cache, folder in (("none", None), ("auto", "home/lrpe-md/footage"), (str(tmp_path / "mine"), "mine")):
        video_data.decode_all.cache_clear()
        train_once(footage, tmp_path / f"run-{folder and folder[:4]}", cache=cache)
        assert len([path for path in tmp_path.glob("**/*.safetensors") if path.name != "model.safetensors"]) == {
            "none": 0,
            "auto": 2,  # a file for each size
        }.get(cache, 4)
        assert folder is None or len(list((tmp_path / folder).iterdir())) == 2


def test_incomplete_files_in_the_cache_are_deleted(tmp_path):
    from lrpe_md.scripts.common.cache import kept

    old, new = tmp_path / "a.1.part", tmp_path / "b.2.part"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert kept(tmp_path, ("x",), lambda: torch.ones(2)).tolist() == [1, 1]
    assert kept(tmp_path, ("x",), lambda: torch.zeros(2)).tolist() == [1, 1]
    assert kept(tmp_path, ("y",), lambda: torch.zeros(2)).tolist() == [0, 0]
    assert not old.exists()
    assert new.exists()


@needs_decoder
def test_validation_during_training(footage, tmp_path):
    plain = train_once(footage, tmp_path / "plain")
    checked = train_once(footage, tmp_path / "checked", validate_every=3)
    assert checked["accuracy"] == plain["accuracy"]
    weights = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("plain", "checked")]
    assert all(torch.equal(value, weights[1]["model"][name]) for name, value in weights[0]["model"].items())
    rows = weights[1]["history"]
    assert [(row["step"], "accuracy" in row) for row in rows] == [(2, False), (3, True), (4, True)]
    assert rows[-1]["accuracy"] == checked["accuracy"]["extrapolated"]["4x8x8"]


@needs_decoder
def test_training_starts_from_a_video_run(footage, tmp_path, capsys):
    """A run of two steps with a tiny learning rate ends with its initial weights."""
    train_once(footage, tmp_path / "first")
    start = torch.load(tmp_path / "first" / "checkpoint.pt")["average"]
    train_once(footage, tmp_path / "second", weights=str(tmp_path / "first"), seed=1, lr=1e-12, weight_decay=0.0)
    assert f"Starting from {tmp_path / 'first'}\n" in capsys.readouterr().err
    found = torch.load(tmp_path / "second" / "checkpoint.pt")["model"]
    assert start.keys() == found.keys()
    for name, value in start.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.slow
@needs_decoder
def test_reference_of_video_weights_is_suggested_and_trained_with(footage, tmp_path, capsys):
    first = tmp_path / "first"
    train_once(footage, first)
    longer = {"weights": str(first), "frames": 8, "size": 16}
    train_once(footage, tmp_path / "plain", **longer)
    said = f"{first} was trained with 4×2×2 patches; this training has 8×4×4. To map their positions onto the trained "
    assert f"{said}grid, pass --reference 4x8\n" in capsys.readouterr().err
    assert load_run(tmp_path / "plain").reference is None
    train_once(footage, tmp_path / "swapped", **longer, reference="8x4")
    said = f"{first} was trained with 4×2×2 patches; --reference 8x4 maps positions onto 8×1×1. To map their positions "
    assert f"{said}onto the trained grid, pass --reference 4x8\n" in capsys.readouterr().err
    result = train_once(footage, tmp_path / "mapped", **longer, reference="4x8")
    said = capsys.readouterr()
    assert "--reference" not in said.err
    assert "Rescaled positions are mapped onto the grid of --reference." in said.out
    assert "extrapolated positions" not in said.out
    assert "rescaled" in result["accuracy"]
    assert "extrapolated" not in result["accuracy"]
    model, x = load_run(tmp_path / "mapped"), torch.randn(2, 3, 8, 16, 16)
    assert list(model.reference) == [4, 2, 2]
    mapped, model.reference = model(x), None
    assert not torch.allclose(mapped, model(x))
    # a stream keeps one unit per frame
    train_once(footage, tmp_path / "stream", **{**longer, "causal": True})
    assert "4×4. To map their positions onto the trained grid, pass --reference 8x8\n" in capsys.readouterr().err
    train_once(footage, tmp_path / "mapped stream", **longer, causal=True, reference="8x8")
    model = load_run(tmp_path / "mapped stream")
    assert list(model.reference) == [None, 2, 2]
    tokens, _ = model.stream(x)
    torch.testing.assert_close(model.forward_head(tokens), model(x))
    with pytest.raises(
        typer.BadParameter,
        match=r"To test it at this length, pass --test-frames 8 instead\. "
        rf"To fine-tune it at a different length or size, pass --weights {first} --r",
    ):
        train_once(footage, first, frames=8)
    with pytest.raises(typer.BadParameter) as both:
        train_once(footage, first, frames=8, size=16)
    assert "To test it" not in str(both.value)


@needs_decoder
def test_a_finished_run_is_tested_at_another_size(footage, tmp_path, capsys):
    """The test size affects neither the training clips nor the weights."""
    first = tmp_path / "first"
    trained = train_once(footage, first)
    capsys.readouterr()
    result = train_once(footage, first, test_size=32)
    assert "already finished at step 4; evaluating it again, without training" in capsys.readouterr().err
    assert set(result["accuracy"]["rescaled"]) == {"4x8x8", "8x8x8", "4x32x32"}
    assert {**result, "accuracy": 0} == {**trained, "accuracy": 0}
    assert json.loads((first / "result.json").read_text()) == result
    assert set(train_once(footage, tmp_path / "other", test_size=0)["accuracy"]["rescaled"]) == {"4x8x8", "8x8x8"}
    weights, other = (torch.load(tmp_path / name / "checkpoint.pt")["model"] for name in ("first", "other"))
    assert all(torch.equal(value, other[name]) for name, value in weights.items())
    with pytest.raises(
        typer.BadParameter, match=r"To test it at this size, pass --test-size 16 instead\. To fine-tune"
    ):
        train_once(footage, first, size=16)


@needs_decoder
def test_a_finished_run_is_tested_at_another_length(footage, tmp_path):
    """Up to twice the training length, the test length affects neither the weights nor the test clips."""
    first = tmp_path / "first"
    trained = train_once(footage, first, test_size=0)
    assert set(trained["accuracy"]["rescaled"]) == {"4x8x8", "8x8x8"}
    alone = train_once(footage, first, test_size=0, test_frames=0)
    assert alone["accuracy"]["rescaled"] == {"4x8x8": trained["accuracy"]["rescaled"]["4x8x8"]}
    longer = train_once(footage, first, test_size=0, test_frames=12)
    assert set(longer["accuracy"]["rescaled"]) == {"4x8x8", "12x8x8"}
    assert longer["loss"] == trained["loss"]
    with pytest.raises(
        typer.BadParameter, match=r"--test-frames: expected at most 40 frames, the most that fit .* got 44"
    ):
        train_once(footage, first, test_frames=44)
    with pytest.raises(typer.BadParameter, match=r"--test-frames: expected a multiple of --tubelet 2, or 0 to test"):
        train_once(footage, first, tubelet=2, test_frames=3)


def test_a_dropped_position_table_is_announced(tmp_path, capsys):
    options = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 2}
    torch.save(LrpeVisionTransformer(absolute="learned", **options).state_dict(), tmp_path / "image.pt")
    for absolute, said in (("none", "left out: pos_embed"), ("learned", "image.pt\n")):
        start_from(LrpeVideoTransformer(tubelet_size=2, absolute=absolute, **options), tmp_path / "image.pt")
        assert said in capsys.readouterr().err


def test_a_position_table_of_another_size_names_the_size(tmp_path):
    options = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 2, "absolute": "learned"}
    torch.save(LrpeVisionTransformer(img_size=16, **options).state_dict(), tmp_path / "image.pt")
    message = r"pass the --size that it was trained at.*pos_embed is \(1, 17, 24\) in the file"
    with pytest.raises(typer.BadParameter, match=message):
        start_from(LrpeVideoTransformer(img_size=8, tubelet_size=2, **options), tmp_path / "image.pt")


def test_a_position_table_of_another_grid_of_the_same_size_is_refused(tmp_path):
    options = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 2, "absolute": "learned"}
    options |= {"tubelet_size": 2, "class_token": False, "global_pool": "avg"}
    weights = LrpeVideoTransformer(img_size=16, num_frames=2, **options).state_dict()
    settings = {"size": 16, "frames": 2, "patch": 4, "tubelet": 2}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors", {"settings": json.dumps(settings)})
    start_from(LrpeVideoTransformer(img_size=16, num_frames=2, **options), tmp_path / "w.safetensors")
    longer = LrpeVideoTransformer(img_size=8, num_frames=8, **options)
    assert longer.pos_embed.shape == weights["pos_embed"].shape
    message = "pass --frames 2 --size 16, or .*pos_embed has a grid of 1×4×4 in the file and 4×2×2 in the model"
    with pytest.raises(typer.BadParameter, match=message):
        start_from(longer, tmp_path / "w.safetensors", {**settings, "size": 8, "frames": 8})


@needs_decoder
def test_run_weights_that_do_not_fit_name_a_remedy_that_works(footage, tmp_path, capsys):
    """Save weights with the settings of image runs and video runs, as `train` exports them."""
    options = {"patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 2, "class_token": False, "global_pool": "avg"}
    options["num_classes"] = 2

    def save(vit, **settings):
        about = {"settings": json.dumps(settings)}
        safetensors.torch.save_file(vit.state_dict(), tmp_path / "run.safetensors", about)
        return {"weights": str(tmp_path / "run.safetensors"), "steps": 1, "test_size": 0, "test_frames": 0}

    sizes = {"patch": 4, "dim": 48, "depth": 1, "heads": 2, "qk_norm": False}
    table = LrpeVisionTransformer(img_size=16, absolute="learned", **options)
    start = save(table, size="16", encoding="learned", **sizes)
    with pytest.raises(typer.BadParameter, match="safetensors: pass --size 16, or an --encoding other than learned"):
        train_once(footage, tmp_path / "a", **start, encoding="learned")
    train_once(footage, tmp_path / "a", **start, encoding="learned", size=16)
    capsys.readouterr()
    train_once(footage, tmp_path / "b", **start, encoding="rotate")
    assert "run.safetensors was trained with 4×4 patches; this training has 4×2×2. " in capsys.readouterr().err

    clips = LrpeVideoTransformer(img_size=16, num_frames=8, tubelet_size=1, absolute="learned", **options)
    start = save(clips, size=16, frames=8, tubelet=1, causal=False, reference="", encoding="learned", **sizes)
    with pytest.raises(typer.BadParameter, match="pass --frames 8 --size 16, or an --encoding other than learned"):
        train_once(footage, tmp_path / "c", **start, encoding="learned")
    train_once(footage, tmp_path / "c", **start, encoding="learned", size=16, frames=8)

    narrow = LrpeVisionTransformer(img_size=8, mlp_ratio=2.0, **options)
    start = save(narrow, model={"embed_dim": 48, "num_heads": 2, "mlp_ratio": 2.0})
    message = (
        "leave out --weights, because these weights have an MLP ratio of 2, and this command only builds models with 4"
    )
    with pytest.raises(typer.BadParameter, match=message):
        train_once(footage, tmp_path / "d", **start, heads=3)


def test_image_weights_of_a_run_that_shows_motion(tmp_path, capsys):
    options = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}
    video = LrpeVideoTransformer(num_classes=2, tubelet_size=2, **options)
    for build, motion, expected in (
        (LrpeVisionTransformer, True, True), (LrpeVisionTransformer, False, False),
        (partial(LrpeVideoTransformer, tubelet_size=2), True, False),
    ):  # fmt: skip
        torch.save(build(**options).state_dict(), tmp_path / "first.pt")
        start_from(video, tmp_path / "first.pt", {"motion": motion})
        said = "first.pt was trained on images; this training shows only motion. To train on plain frames, pass "
        assert (f"{said}--no-motion\n" in capsys.readouterr().err) == expected


def test_training_starts_from_an_image_model(tmp_path):
    """Patch kernels are divided among the frames of a tubelet. A head for other classes is left out."""
    options = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2, "absolute": "none"}
    image = LrpeVisionTransformer(num_classes=3, encoding="rotate", encoding_kwargs={"learnable": True}, **options)
    video = LrpeVideoTransformer(
        num_classes=2, encoding="rotate", encoding_kwargs={"learnable": True}, tubelet_size=2, **options
    )
    torch.nn.init.normal_(image.cls_token)
    safetensors.torch.save_file(image.state_dict(), tmp_path / "image.safetensors")
    start_from(video, tmp_path / "image.safetensors")
    kernel = image.patch_embed.proj.weight
    assert torch.equal(video.patch_embed.proj.weight, kernel[:, :, None].repeat(1, 1, 2, 1, 1) / 2)
    assert torch.equal(video.cls_token, image.cls_token)
    assert torch.equal(video.blocks[0].attn.qkv.weight, image.blocks[0].attn.qkv.weight)
