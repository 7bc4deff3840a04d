"""The options --attention (by layer) and --memory of the training commands: models, checkpoints, samples and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from generative_data import CLIPS, write_films
from generative_data import SMALL as GENERATIVE
from lrpe_md.models.lm import CausalLm
from lrpe_md.models.video import LrpeVideoTransformer
from lrpe_md.scripts.ablate.app import app as ablate
from lrpe_md.scripts.ablate.app import select_encodings
from lrpe_md.scripts.ablate.tasks import TASKS
from lrpe_md.scripts.train.encodings import IMAGES, VIDEOS, parse_memory
from lrpe_md.scripts.train.runs import load_run
from lrpe_md.scripts.train.tasks import diffusion, digits, image, lm, video
from lrpe_md.scripts.train.weights import start_from
from test_train_video import SMALL as CLIP_OPTIONS
from test_train_video import brightening, needs_decoder, write_video
from train_commands import Killed, die_after, flags, invoke, output_of, with_options
from typer.testing import CliRunner

from lrpe_md import Memory

HYBRID = "linear,softmax"
LM: dict[str, Any] = {
    "length": 16, "batch": 4, "steps": 4, "warmup": 1, "lr": 1e-2, "size": "tiny", "lengths": "16,32", "log_every": 2,
    "validate_every": 2, "save_every": 2, "device": "cpu", "tensorboard": False, "progress": False,
    "attention": HYBRID, "memory": "decay=retnet,learnable=true",
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.md").write_text("".join(f"{i * i % 7} says that {i % 5} is {i % 3}.\n" for i in range(300)))
    return tmp_path / "text.md"


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> Path:
    return write_films(tmp_path_factory.mktemp("films") / "films")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "checkpoint.pt")["model"]


def test_memories_by_text():
    assert parse_memory("") is None
    assert parse_memory("rule=delta,decay=none") == Memory("delta")
    everything = "rule=delta,decay=lightning,learnable=True,directions=both"
    assert parse_memory(everything) == Memory("delta", "lightning", True, "both")
    for wrong, message in {
        "delta": r"keys from rule, decay, .*, directions, got 'delta' \(did you mean 'rule=delta'\?\)$",
        "rule=delta,retnet": r"got 'rule=delta,retnet' \(did you mean 'decay=retnet'\?\)$",
        "dekay=retnet": r"got 'dekay=retnet' \(did you mean 'decay'\?\)",
        "rule=sub": r"--memory rule=sub: rule: expected one of",
        "learnable=true": r"--memory learnable=true: learnable: expected false without a decay, got true; choose",
        "decay=retnet,learnable=1": r"learnable: expected false or true, got '1'$",
        "rule=delta=1": r"rule: expected one of add, delta, got 'delta=1'$",
        "decay=slow": r"decay: expected retnet, lightning or none, got 'slow'$",
        "rule": r"got 'rule'$",
    }.items():
        with pytest.raises(typer.BadParameter, match=message):
            parse_memory(wrong)


def test_arguments_of_several_kinds():
    """A hybrid gets the arguments that its linear layers need. Each kind of layer is the same as on its own."""
    assert IMAGES.attention_arguments("softmax") == {"attention": "softmax"}
    alone = IMAGES.attention_arguments("linear")
    assert alone == {"attention": "linear", "normalizer": "none", "scale_attn_norm": True}
    assert IMAGES.attention_arguments(HYBRID) == {**alone, "attention": ("linear", "softmax")}
    assert VIDEOS.attention_arguments(HYBRID, "rule=delta")["memory"] == Memory("delta")
    with pytest.raises(typer.BadParameter, match=r"--attention: unknown 'linea'; did you mean 'linear'"):
        IMAGES.attention_arguments("linea,softmax")


def test_a_language_model_resumes_and_samples(text, tmp_path, monkeypatch):
    given = {**LM, "data": text}
    result = lm.run(lm.LmTraining(out=tmp_path / "whole", **given))
    assert result["attention"] == HYBRID
    with monkeypatch.context() as patched:
        patched.setattr(lm, "batch", die_after(3, lm.batch))
        with pytest.raises(Killed):
            lm.run(lm.LmTraining(out=tmp_path / "part", **given))
    lm.run(lm.LmTraining(out=tmp_path / "part", **given))
    whole, part = weights(tmp_path / "whole"), weights(tmp_path / "part")
    assert whole.keys() == part.keys()
    assert all(torch.equal(part[name], value) for name, value in whole.items())
    before = dict(CausalLm(lm.LmTraining(out=tmp_path, **given).model).named_parameters())
    assert not torch.equal(before["blocks.0.attn.decay.logit"], whole["blocks.0.attn.decay.logit"])
    assert "blocks.1.attn.decay.logit" not in whole
    model = load_run(tmp_path / "part")
    assert model.config.kinds == ("linear", "softmax")
    assert model.config.memory == Memory(decay="retnet", learnable=True)
    plain = lm.LmTraining(out=tmp_path / "plain", **{**given, "memory": ""})
    torch.save(CausalLm(plain.model).state_dict(), tmp_path / "plain.pt")
    start_from(model, tmp_path / "plain.pt")  # learned decays that the file lacks don't change
    assert torch.equal(model.state_dict()["blocks.0.attn.decay.logit"], whole["blocks.0.attn.decay.logit"])
    done = invoke("sample", tmp_path / "part", "--prompt", "1 says", "--tokens", 5)
    assert done.exit_code == 0, done.output
    command = ["lm", *flags({**given, "out": tmp_path / "whole"})]
    assert "memory: was decay=retnet,learnable=true, is now decay=retnet" in output_of(
        *with_options(command, "--memory", "decay=retnet")
    )
    assert "attention: was linear,softmax, is now linear" in output_of(*with_options(command, "--attention", "linear"))


@needs_decoder
def test_a_video_model_that_streams(tmp_path):
    footage = write_video(tmp_path / "grey.mp4", brightening(160), "pyav")
    given = {
        **CLIP_OPTIONS, "data": [footage], "depth": 2, "steps": 4, "attention": HYBRID, "causal": True, "window": 2,
        "qk_norm": True, "memory": "rule=delta,decay=retnet,learnable=true", "task": "arrow", "progress": False,
    }  # fmt: skip
    config = video.VideoTraining(out=tmp_path / "out", **given)
    result = video.run(config)
    assert result["attention"] == HYBRID
    model = LrpeVideoTransformer(**video.model_arguments(config)).double().eval()
    model.load_state_dict(weights(tmp_path / "out"))
    assert (model.causal, model.window, model.memory) == ("frames", 2, Memory("delta", "retnet", True))
    x = torch.randn(1, 3, 5, 8, 8, dtype=torch.float64)
    state, found = None, []
    for frame in x.split(1, 2):
        tokens, state = model.stream(frame, state)
        found.append(tokens)
    torch.testing.assert_close(torch.cat(found, 1), model.forward_features(x))
    again = video.run(config)  # only evaluated
    assert again["accuracy"] == result["accuracy"]


@needs_decoder
def test_a_diffusion_model_of_videos(films, tmp_path):
    options = {
        **GENERATIVE, **CLIPS, "data": films, "depth": 2, "attention": HYBRID,
        "memory": "rule=delta,decay=lightning,directions=both",
    }  # fmt: skip
    result = diffusion.run(diffusion.DiffusionTraining(out=tmp_path / "out", **options))
    state = torch.load(tmp_path / "out" / "checkpoint.pt")
    assert state["settings"]["memory"] == options["memory"]
    model = load_run(tmp_path / "out")
    assert model.memory == Memory("delta", "lightning", directions="both")
    assert [block.attention for block in model.blocks] == ["linear", "softmax"]
    assert result["held_out"]
    done = invoke("sample", tmp_path / "out", "--prompt", "light", "--steps", 1, "--device", "cpu", "--images", 1)
    assert done.exit_code == 0, done.output


def test_images_and_digits_by_layer(tmp_path):
    for config, build in (
        (digits.DigitsTraining(out=tmp_path, attention=f"linear,{HYBRID}", limit=32), digits.build),
        (
            image.ImageTraining(out=tmp_path, data=tmp_path, attention=f"linear,{HYBRID}", patch=4, size=8, depth=3),
            lambda config: image.build(config, image.shape_arguments(config)),
        ),
    ):
        assert [block.attn.attention for block in build(config).blocks] == ["linear", "linear", "softmax"]


@pytest.mark.parametrize(("task", "given", "message"), [
    ("image", {"attention": "linear,flash"}, "--attention: unknown 'flash'"),
    ("image", {"attention": "linear,linear,softmax"}, "--attention linear,linear,softmax --dim 192 --heads 3: "
     "attention: expected one value, or a sequence that can be repeated over the 8 layers, got 3 values"),
    ("lm", {"attention": "linear", "memory": "rule=delta"}, "--memory rule=delta: memory: expected rule=add and "
     "directions=forward in a causal language model; for a token-by-token delta rule, use"),
    ("lm", {"memory": "decay=retnet"}, "--memory needs linear attention; use --attention linear"),
    ("video", {"attention": "linear", "memory": "decay=retnet"}, "directions: expected both without --causal; "
     "pass directions=both in --memory, or pass --causal"),
    ("video", {"attention": "linear", "memory": "directions=both", "causal": True}, "directions: expected forward with "
     "--causal; pass directions=forward in --memory, or leave out --causal"),
    ("video", {"attention": "linear", "memory": "rule=delta", "causal": True}, "--qk-norm: required with rule=delta"),
    ("video", {"window": 2}, "--window 2: only works with --causal and softmax attention in some layers"),
    ("video", {"window": 2, "causal": True, "attention": "linear"}, "--window 2: only works with --causal and softmax"),
    ("video", {"causal": True, "space-time": "factorised"}, "--causal: needs --space-time joint, got 'factorised'"),
    ("video", {"attention": "linear", "memory": "directions=both", "space-time": "factorised"}, "memory: must be left "
     "out with --space-time factorised, whose blocks attend within one frame or along time; use --space-time joint"),
    ("video", {"window": 2, "causal": True, "drop": 0.5}, "--window 2: can't be used with --drop 0.5; leave one"),
    ("video", {"causal": True, "motion": True}, "--motion: not supported with --causal"),
    ("diffusion", {"attention": "linear", "memory": "directions=both"}, "memory: must be left out for images, whose "
     "tokens have no order; train on videos"),
])  # fmt: skip
def test_wrong_layers_and_memories(tmp_path, task, given, message):
    (tmp_path / "data").mkdir()
    command = [task, "--data", tmp_path / "data", "--out", tmp_path / "out", *flags(given)]
    assert message in output_of(*command).replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_encodings_are_selected_by_layer():
    chosen = TASKS["image"]
    assert select_encodings(chosen, None, [HYBRID], False) == {HYBRID: list(chosen.compared["linear"])}
    assert select_encodings(chosen, [f"{HYBRID}/cosine-relu"], None, False) == {HYBRID: ["cosine-relu"]}
    assert select_encodings(chosen, ["rotate"], [HYBRID, "linear"], False) == {HYBRID: ["rotate"], "linear": ["rotate"]}
    with pytest.raises(typer.BadParameter, match="--encoding: unknown 'sparse'"):
        select_encodings(chosen, ["linear,sparse/rotate"], None, False)
    with pytest.raises(typer.BadParameter, match="--attention: unknown 'sparse'"):
        select_encodings(chosen, None, ["linear,sparse"], False)


@pytest.mark.slow
def test_compare_by_layer(tmp_path):
    command = ["run", "digits", "--smoke", "--seeds", "1", "--device", "cpu", "-e", "rotate", "--out", tmp_path / "out"]
    command += ["--attention", f"linear,{HYBRID}", "--attention", "softmax"]
    done = CliRunner().invoke(ablate, list(map(str, command)), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    assert names == {"rotate-linear,linear,softmax-0.json", "rotate-softmax-0.json"}
    assert "| linear,linear,softmax |" in (tmp_path / "out" / "table.md").read_text()
