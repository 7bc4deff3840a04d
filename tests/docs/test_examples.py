"""docs/examples, the notebook and the code of recipe.md run at small sizes and give the documented results."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm")

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
NOTEBOOK = DOCS / "examples" / "what_an_encoding_does.ipynb"
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


def load(name):
    """Import an example as a separate module."""
    path = DOCS / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_video(path, frames):
    """Write frames (F, H, W, 3) uint8 as an mp4."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def moving_square(num_frames, size, step, seed=0):
    """Return frames of a white square that moves right or left."""
    frames = np.zeros((num_frames, size, size, 3), np.uint8)
    top = np.random.default_rng(seed).integers(0, size - 8)
    for i in range(num_frames):
        left = (i * step) % (size - 8)
        frames[i, top : top + 8, left : left + 8] = 255
    return frames


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_documents_its_command(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert f"python docs/examples/{path.name}" in text.split('"""')[1]


def test_every_example_is_listed_and_has_a_test():
    listed = (DOCS / "examples" / "README.md").read_text(encoding="utf-8")
    assert all(f"[`{path.name}`]({path.name})" in listed for path in [*EXAMPLES, NOTEBOOK])
    assert {path.stem for path in EXAMPLES} == {
        "vit_cosine", "finetune_timm", "video_clips", "text_to_image", "stream_video", "decode_lm", "ablate_own_model",
        "rotary_kernel", "load_trained", "own_rotary",
    }  # fmt: skip


def test_vit_cosine():
    pytest.importorskip("sklearn")
    module = load("vit_cosine")
    accuracy = module.main(["--epochs", "2"])
    assert set(accuracy) == {8, 12}
    assert accuracy[8] > 0.2  # chance is 0.1
    model = module.ViT()
    model(torch.randn(2, 8, 8)).sum().backward()
    grads = model.encoding.omega.grad.reshape(3, 16, 2)  # one per head
    assert grads.abs().amax((1, 2)).min() > 0


def test_finetune_timm(tmp_path, capsys):
    for name, colour in COLOURS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (64, 48), colour).save(tmp_path / "data" / name / f"{i}.png")
    command = ["--data", tmp_path / "data", "--size", "48x80", "--epochs", "2", "--batch", "4", "--lr", "1e-3"]
    command += ["--out", tmp_path / "new" / "out.pt", "--model-kwargs", "depth=1", "embed_dim=32", "num_heads=2"]
    accuracy = load("finetune_timm").main([str(arg) for arg in command])
    assert 0 <= accuracy <= 1
    import timm

    kwargs = {"depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
    plain = timm.create_model("vit_small_patch16_rope_mixed_224", dynamic_img_size=True, **kwargs)
    plain.load_state_dict(torch.load(tmp_path / "new" / "out.pt", weights_only=True))  # this works without this library
    load("finetune_timm").main([str(arg) for arg in [*command, "--size", 64, "--epochs", 1]])
    assert "at 64×64" in capsys.readouterr().out
    reject("finetune_timm", *command, "--size", 50)
    assert "--size: expected multiples of (16, 16), the patch size, got 50" in capsys.readouterr().err
    reject("finetune_timm", *command, "--size", "64x96x3")
    assert "--size: expected a side or HEIGHTxWIDTH, got '64x96x3'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "resnet18"], "--model resnet18: ResNet"),
        (["--model", "vit_tini_patch16_224"], "--model vit_tini_patch16_224: Unknown model"),
        (["--model", "test_vit"], "--model test_vit: model: expected a model that calls a function to rotate q and k"),
        (["--model-kwargs", "height=1"], "unexpected keyword argument 'height'"),
    ],
)
def test_finetune_timm_rejects_unsuitable_models(tmp_path, capsys, options, message):
    (tmp_path / "red").mkdir()
    reject("finetune_timm", "--data", tmp_path, *options)
    said = capsys.readouterr().err.splitlines()[-1]
    assert message in said
    assert said.endswith("; pass a RoPE ViT, or follow docs/recipe.md")


def test_finetune_timm_explains_other_errors_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "red").mkdir()
    for wrong in ("depth", "depth=six", "depth=1=2"):
        reject("finetune_timm", "--data", tmp_path, "--model-kwargs", wrong)
        said = f"error: --model-kwargs: expected NAME=INTEGER, such as depth=6, got {wrong}"
        assert capsys.readouterr().err.splitlines()[-1].endswith(said)
    module = load("finetune_timm")
    monkeypatch.setattr(module.timm, "create_model", Mock(side_effect=FileNotFoundError("no connection")))
    with pytest.raises(SystemExit):
        module.main(["--data", str(tmp_path), "--pretrained"])
    said = "error: --model vit_small_patch16_rope_mixed_224: no connection; leave out --pretrained"
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_finetune_timm_rejects_train_and_val_as_classes(tmp_path, capsys):
    for part in ("train", "val"):
        (tmp_path / part / "red").mkdir(parents=True)
    with pytest.raises(SystemExit):
        load("finetune_timm").main(["--data", str(tmp_path)])
    assert f"got train/ and val/; pass --data {tmp_path / 'train'}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load("finetune_timm").main(["--data", str(tmp_path / "train"), "--size", "large"])
    assert "--size: expected a side or HEIGHTxWIDTH, got 'large'" in capsys.readouterr().err


def test_video_clips(tmp_path):
    for name, step in {"left": -2, "right": 2}.items():
        for i in range(4):
            write_video(tmp_path / "data" / name / f"{i}.mp4", moving_square(9, 32, step, i))
    command = ["--data", str(tmp_path / "data"), "--frames", "4", "--size", "32", "--depth", "1", "--epochs", "1"]
    module = load("video_clips")
    accuracy = module.main(command)
    assert set(accuracy) == {4, 8}
    (tmp_path / "data" / "right" / "9.MP4").write_bytes(b"no video")
    assert "9.MP4 can't be read as a video" in reject("video_clips", *command)
    reject("video_clips", *command, "--size", 40)
    (tmp_path / "data" / "up").mkdir()
    assert "up: expected videos" in reject("video_clips", *command)
    clip = module.read_clip(tmp_path / "data" / "right" / "0.mp4", 5, 32)
    assert clip.shape == (3, 5, 32, 32)
    places = (clip[0] > 0).float().sum(1).argmax(-1)  # column of the square in each frame
    assert places.tolist() == sorted(set(places.tolist()))


def test_text_to_image(tmp_path):
    for name, colour in COLOURS.items():
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"a {name} tile")
    command = ["--data", tmp_path, "--prompt", "red", "--prompt", "blue", "--prompt", "", "--size", "8", "--dim", "64"]
    command += ["--depth", "1", "--steps", "30", "--batch", "8", "--images", "2", "--sample-steps", "1"]
    losses = load("text_to_image").main([str(arg) for arg in [*command, "--out", tmp_path / "sheet.png"]])
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (2 * 8, 3 * 8)
    (tmp_path / "blue.txt").unlink()
    assert "expected NAME.png and NAME.txt, got blue.png without a caption" in reject("text_to_image", *command)


def test_stream_video(tmp_path, capsys):
    module, window = load("stream_video"), 4
    sizes = module.main(["--frames", "1000"])
    assert len(sizes) == 1000
    assert sizes[0] < sizes[window - 1]  # the window fills
    assert set(sizes[window - 2 :]) == {sizes[-1]}
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == [f"after {n} frames" for n in (10, 100, 1000)]
    assert f"the state takes {sizes[9] / 1024:.0f} KiB; keys and values of all frames would take 320 KiB" in printed[0]
    assert f"the state takes {sizes[9] / 1024:.0f} KiB; keys and values of all frames would take 32000" in printed[2]
    # two heads of 32 channels: sums of three layers and their normalisers, then keys and values of 16 patches per frame
    assert sizes[-1] == 4 * (3 * 2 * (32 * 32 + 32) + 2 * 2 * 3 * 16 * 32)

    assert len(module.main(["--frames", "6", "--window", "2", "--rule", "add"])) == 6


def reject(name, *command):
    """Run an example with a mistake, and check that it ends with a usage error."""
    with pytest.raises(SystemExit) as raised:
        load(name).main([str(arg) for arg in command])
    assert raised.value.code not in (0, None)
    return str(raised.value)


def test_stream_video_with_a_trained_model(tmp_path, capsys):
    """The last frame of a clip has the same scores as the clip."""
    from lrpe_md.scripts.train.runs import load_clip, load_run
    from lrpe_md.scripts.train.tasks.video import VideoTraining, run

    for name, step in {"left": -2, "right": 2}.items():
        for i in range(4):
            path = tmp_path / "data" / ("train" if i else "val") / name / f"{i}.mp4"
            write_video(path, moving_square(12, 32, step, i))
    options = {
        "data": [tmp_path / "data"], "task": "labels", "frames": 4, "every": 1, "size": 32, "test_size": 0,
        "batch": 2, "dim": 48, "depth": 1, "heads": 2, "steps": 2, "device": "cpu", "tensorboard": False,
        "cache": "none", "progress": False,
    }  # fmt: skip
    run(VideoTraining(out=tmp_path / "run", causal=True, window=2, **options))
    run(VideoTraining(out=tmp_path / "plain", **options))
    write_video(tmp_path / "clip.mp4", moving_square(4, 32, 2))
    capsys.readouterr()
    command = ["--run", tmp_path / "run", "--video"]
    load("stream_video").main(list(map(str, [*command, tmp_path / "clip.mp4"])))
    printed = capsys.readouterr().out.splitlines()
    index = load_run(tmp_path / "run")(load_clip(tmp_path / "run", tmp_path / "clip.mp4")).argmax()
    assert [line.partition(":")[0] for line in printed] == [f"frame {n}" for n in (1, 2, 3, 4)]
    assert printed[-1] == f"frame 4: {('left', 'right')[index]}"
    for wrong, message in (
        ([*command, "99.mp4"], "99.mp4: no such file"), ([*command, tmp_path], " is a folder; pass"),
        (["--video", tmp_path / "clip.mp4"], "--run, --video: expected both"),
        (["--run", tmp_path / "data", "--video", tmp_path / "clip.mp4"], "folder: expected a run with"),
        (["--run", tmp_path / "plain", "--video", tmp_path / "clip.mp4"], "train it with --causal"),
    ):  # fmt: skip
        reject("stream_video", *wrong)
        assert message in capsys.readouterr().err


def test_decode_lm(capsys):
    pytest.importorskip("transformers")
    theirs, ours = load("decode_lm").main(["--prompt", "A", "--prompt", "A longer one", "--tokens", "5"])
    assert ours.shape == (2, 12 + 5)
    assert torch.equal(theirs, ours)
    assert "A longer one" in capsys.readouterr().out


def test_own_rotary(capsys):
    errors = load("own_rotary").main(["--height", "4", "--width", "6", "--head-dim", "16"])
    assert set(errors) == {"apply_rotary", "drop_in", "rotate"}
    assert max(errors.values()) < 1e-5
    assert (
        "without tables: rotate(x, omega=<(1, 8, 2)>, positions=Grid((4, 6)), pairs='half')" in capsys.readouterr().out
    )


def test_load_trained(tmp_path, capsys):
    from lrpe_md.scripts.train.tasks.digits import DigitsTraining, run

    run(DigitsTraining(out=tmp_path / "run", steps=2, device="cpu", tensorboard=False, encoding="rotate-learnable"))
    logits = load("load_trained").main([str(tmp_path / "run")])
    assert "3 layers, images of 8x8, 10 classes" in capsys.readouterr().out
    assert logits.shape == (1, 10)
    with pytest.raises(SystemExit):
        load("load_trained").main([str(tmp_path / "run"), "--picture", "nope.png"])
    assert "--picture nope.png: no such file" in capsys.readouterr().err
    reject("load_trained", tmp_path / "run", "--picture", __file__)
    assert "--picture: expected a finished run of `lrpe-md train image`, got" in capsys.readouterr().err
    reject("load_trained", tmp_path)
    assert "run: folder: expected a run with checkpoint.pt or model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_load_trained_predicts_one_picture(tmp_path, capsys, stream):
    from lrpe_md.scripts.train.data.images import load_images, resized
    from lrpe_md.scripts.train.runs import load_run
    from lrpe_md.scripts.train.tasks.image import ImageTraining, run

    generator = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        for i in range(10):
            path = tmp_path / "data" / ("val" if i < 2 else "train") / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = generator.integers(-40, 40, (12, 20, 3))
            Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)
    result = run(
        ImageTraining(
            data=tmp_path / "data", out=tmp_path / "run", steps=20, batch=8, lr=3e-3, ema=0, size=8, patch=4, dim=48,
            depth=1, test_sizes="12", device="cpu", tensorboard=False, progress=False, stream=stream,
        )
    )  # fmt: skip
    assert result["classes"] == ["blue", "red"]
    assert result["accuracy_by_class"] == {"blue": 100, "red": 100}
    assert result["accuracy"]["extrapolated"]["8x8"] == 100
    test = load_images(tmp_path / "data", 8).test
    expected = load_run(tmp_path / "run")(resized(test.images, (8, 8)))
    pictures = [tmp_path / "data" / "val" / name / f"{i}.png" for name in sorted(COLOURS) for i in range(2)]
    for i, picture in enumerate(pictures):
        logits = load("load_trained").main([str(tmp_path / "run"), "--picture", str(picture)])
        assert capsys.readouterr().out.splitlines()[-1] == picture.parent.name
        torch.testing.assert_close(logits[0], expected[i])


def test_ablate_own_model(tmp_path):
    pytest.importorskip("sklearn")
    module, out = load("ablate_own_model"), tmp_path / "table.csv"
    command = ["--seeds", "2", "--epochs", "1", "--out", str(out), "--encoding", "none", "--encoding", "rotate"]
    found = module.main(command)
    with out.open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [["encoding", "0", "1"], *([name, *map(str, values)] for name, values in found.items())]
    assert found["none"] == module.main([*command[:-2]])["none"]  # equal seeds repeat the result
    for encoding in ("cosine", "mixed", "dinov3"):
        assert module.Net(encoding)(torch.randn(2, 8, 8)).shape == (2, 10)


def test_ablate_own_model_keeps_its_results(tmp_path, monkeypatch):
    """A wrong name fails before the first training, and each encoding is saved when it is done."""
    pytest.importorskip("sklearn")
    module, out, started = load("ablate_own_model"), tmp_path / "table.csv", []

    def train(encoding, seed, epochs):
        started.append(encoding)
        if encoding == "cosine":
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(module, "train", train)
    command = ["--seeds", "2", "--out", str(out), "--encoding", "rotate", "--encoding"]
    with pytest.raises(ValueError, match=r"encoding: unknown 'non'; did you mean 'none'\?"):
        module.main([*command, "non"])
    assert not started
    with pytest.raises(KeyboardInterrupt):
        module.main([*command, "cosine"])
    assert out.read_text(encoding="utf-8").split() == ["encoding,0,1", "rotate,0.5,0.5"]


def test_the_notebook_runs(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    monkeypatch.setattr(plt, "show", lambda: None)
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert len(plt.get_fignums()) >= 4
    # equal distances give equal scores, as the notebook says
    torch.testing.assert_close(names["here"][:10, :18], names["there"][5:15, 10:28])
    plt.close("all")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Run the code of recipe.md in order, except ONNX, with random weights instead of pretrained ones.

    Yields the folder, the variables, whether pretrained weights were requested, and the remaining blocks.
    """
    import timm

    folder, create, asked = tmp_path_factory.mktemp("recipe"), timm.create_model, []
    blocks = [part.split("```")[0] for part in (DOCS / "recipe.md").read_text("utf-8").split("```python\n")[1:]]
    for i in range(8):
        (folder / "photos" / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 64), (30 * i, 0, 0)).save(folder / "photos" / f"class{i % 2}" / f"{i}.jpg")

    def create_random(name, pretrained=False, **kwargs):
        asked.append(pretrained)
        return create(name, **{"depth": 1, "embed_dim": 48, "num_heads": 3, **kwargs})

    names: dict = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", create_random)
        patch.chdir(folder)
        torch.manual_seed(0)
        for number, block in enumerate(blocks):
            if "onnx" not in block:
                exec(compile(block, f"recipe.md, block {number}", "exec"), names)
        yield folder, names, asked, [block for block in blocks if "onnx" in block]


def test_the_recipe_runs(recipe):
    folder, names, asked, _ = recipe
    assert asked == [True, False]
    assert {"finetuned.pt", "vit.pt2"} <= set(os.listdir(folder))
    model, again = names["model"].eval(), names["again"]
    images = torch.randn(1, 3, names["HEIGHT"], names["WIDTH"])
    assert names["HEIGHT"] != names["WIDTH"]
    torch.testing.assert_close(again(images), model(images))
    targets = {node.target for node in names["program"].graph.nodes if node.op == "call_function"}
    operators = {target for target in targets if isinstance(target, torch._ops.OpOverload)}
    assert {operator.namespace for operator in operators} <= {"aten", "prims"}
    again.reference = None  # without the reference, positions are not rescaled to the training grid
    assert (again(images) - model(images)).abs().max() > 1e-5  # rounding is 100 times smaller
    again.reference = (14, 14)


@pytest.mark.filterwarnings("ignore")  # warnings of the exporter
def test_the_recipe_exports_to_onnx(recipe):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder, names, _, blocks = recipe
    for number, block in enumerate(blocks):
        exec(compile(block, f"recipe.md, ONNX block {number}", "exec"), names)
    assert "vit.onnx" in os.listdir(folder)
