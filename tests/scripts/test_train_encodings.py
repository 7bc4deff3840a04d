"""The option --encoding of the training commands: names in the table, presets, registered schemes, and options."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from lrpe_md.scripts.ablate.app import app as ablate
from lrpe_md.scripts.train.app import app as train
from lrpe_md.scripts.train.checkpoint import digest_of
from lrpe_md.scripts.train.config import settings_of
from lrpe_md.scripts.train.encodings import IMAGES, TEXT, split_list, split_options
from lrpe_md.scripts.train.runs import load_run
from lrpe_md.scripts.train.tasks import diffusion, digits, image, lm, recall, video
from parametrizing import slow_except
from typer.testing import CliRunner

from lrpe_md import Axial, Grid, PresetMd, RotateMd, Scheme, list_presets, register_scheme
from lrpe_md.integrations.encoding import EncodingStack, build_encoding
from lrpe_md.presets import registry
from lrpe_md.reference import ACTIVATIONS

OWN = Scheme("A scheme of one's own.", 16, Axial((1, 1), 30.0))
CONFIGS: dict[str, Any] = {
    "digits": (digits.DigitsTraining, {}),
    "image": (image.ImageTraining, {"data": Path("data")}),
    "video": (video.VideoTraining, {"data": [Path("data")]}),
    "diffusion": (diffusion.DiffusionTraining, {"data": Path("data")}),
    "lm": (lm.LmTraining, {"data": Path("data")}),
    "recall": (recall.RecallTraining, {"attention": "softmax", "dim": 96}),
}
# A preset with the right number of axes for each task.
pytestmark = pytest.mark.usefixtures("few_sizes")
PRESETS = {
    "digits": "dinov3", "image": "rope_vit_mixed", "video": "cogvideox", "diffusion": "hidream", "lm": "pope",
    "recall": "wan",
}  # fmt: skip


@pytest.fixture
def registered():
    register_scheme("ours", OWN)
    yield "ours"
    del registry.REGISTERED["ours"]


def config(task: str, encoding: str, **more: Any) -> Any:
    cls, given = CONFIGS[task]
    return cls(out=Path("out"), encoding=encoding, **given, **more)


def test_base_of_mixed_frequencies():
    """The base of axial frequencies does not apply to mixed ones, and both bases are the modules' defaults."""
    bases = {name: IMAGES.arguments(name, "softmax")["encoding_kwargs"].get("base") for name in IMAGES.encodings}
    mixed = {name: base for name, base in bases.items() if "mixed" in name}
    assert set(mixed.values()) == {None, 10.0}
    assert IMAGES.arguments("rotate", "softmax")["encoding_kwargs"] == {}
    assert digits.build(config("digits", "rotate")).encoding.base == RotateMd(16, 2).base == 10000
    for name in (*mixed, "rotate:frequencies=mixed", "cosine:frequencies=mixed"):
        given = IMAGES.arguments(name, "softmax")
        built: Any = build_encoding(given["encoding"], given["encoding_kwargs"], 8, 1, 1, 2)
        assert EncodingStack(built).distinct[0].base == 10.0
    assert IMAGES.arguments("rotate:frequencies=mixed,base=3", "softmax")["encoding_kwargs"]["base"] == 3


PYTHON = re.compile(r"\b(None|True|False|tuple|dict|NoneType)\b|\(['\d]+,|->|Memory\(|=['\"]|function")
WRONG_OPTIONS = {
    "rotate:act=x": f"act: expected one of {', '.join(ACTIVATIONS)}, got 'x'",
    "rotate:act=softmax": "dim: expected -1 (features) or -2 (sequence) for act=softmax, got none",
    "rotate:dim=3": "dim: must be left out for act=none (only softmax has a dim), got 3",
    "rotate:learnable=maybe": "learnable: expected true, false or raw (learn theta, not its logarithm), got 'maybe'",
    "rotate:phase=yes": "phase: expected true, false or k (only on the keys), got 'yes'",
    "rotate:pairs=x": "pairs: expected one of half, interleaved or the number of pairs in each block, got 'x'",
    "rotate:frequencies=x": "frequencies: expected axial or mixed, got 'x'",
    "rotate:heads=all": "heads: expected shared or own, got 'all'",
    "rotate:split=1,2": "split: expected a share for each of the 3 axes, got 1,2; pass 3 numbers, such as 1,1,1",
    "rotate:amplitude=1,2": "amplitude: expected a number, got 1,2",
    "rotate:remainder=1": "remainder: must be left out without split, got 1; pass split as well",
    "wan:split=1,2": "split: expected a share for each of wan's 3 axes, got 1,2; pass 3 numbers, such as 1,1,1",
    "wan:seed=3": "seed: must be left out, because wan only accepts",
    "wan:scaling=x": "wan has no option 'scaling'",
}


@pytest.mark.parametrize("encoding", WRONG_OPTIONS)
def test_errors_use_the_words_of_a_command_line(encoding):
    with pytest.raises(typer.BadParameter) as found:
        config("video", encoding)
    assert WRONG_OPTIONS[encoding] in found.value.message
    assert not PYTHON.search(found.value.message)


def test_activation_none():
    assert IMAGES.arguments("cosine-relu:act=none", "softmax")["encoding_kwargs"]["act"] == "none"
    config("image", "cosine:act=none")


def test_options_after_the_name():
    assert split_options("rotate") == ("rotate", {})
    assert split_options("rotate:base=1e2,split=2,3,3,phase=k,learnable=true,act=none") == (
        "rotate", {"base": 100.0, "split": (2, 3, 3), "phase": "k", "learnable": True, "act": None},
    )  # fmt: skip
    assert split_list("none,rotate:base=3,split=2,3,3,act=relu,cosine,wan:base=7") == [
        "none", "rotate:base=3,split=2,3,3,act=relu", "cosine", "wan:base=7",
    ]  # fmt: skip


@pytest.mark.parametrize("task", slow_except(["digits", "lm"], CONFIGS))
def test_every_preset_is_taken_or_refused_with_the_models_reason(task):
    taken = set()
    for name in list_presets():
        with suppress(typer.BadParameter):
            config(task, name)
            taken.add(name)
            continue
        with pytest.raises(typer.BadParameter, match=f"^--encoding {name} --attention softmax"):
            config(task, name)
    assert PRESETS[task] in taken
    assert len(taken) > (5 if task == "lm" else 20)


def test_options_reach_the_model():
    model = digits.build(config("digits", "rotate:base=7,axis_order=major_first,learnable=raw"))
    assert isinstance(model.encoding, RotateMd)
    assert (model.encoding.base, model.encoding.axis_order, model.encoding.learnable) == (7, "major_first", "raw")
    assert digits.build(config("digits", "rotate")).encoding.base == 10000
    wan = diffusion.build(config("diffusion", "wan:base=50"))
    assert isinstance(wan.encoding, PresetMd)
    assert wan.encoding.get_omega()[0, 1].max() == pytest.approx(50 ** (-1 / 12))
    own = config("lm", "cosine-softplus-phase:base=500").model
    assert (own.encoding, own.act, own.phase, own.base) == ("cosine", "softplus", True, 500)
    assert config("lm", "pope").model.encoding == "pope"


@pytest.mark.parametrize(
    ("task", "encoding", "message"),
    [
        ("digits", "wann", r"unknown 'wann'; did you mean 'wan'\? .*--import MODULE\. Choose from: none; .*; eva02;"),
        ("digits", "rotat:base=3", r"--encoding: unknown 'rotat'; did you mean 'rotate'\?"),
        ("digits", "rotate:bas=3", r"rotate has no option 'bas' \(did you mean 'base'\?\); it accepts act, amplitude"),
        ("digits", "none:base=3", r"none has no option 'base'; it accepts act, dim"),
        ("digits", "rotate:base", r"expected NAME:KEY=VALUE,KEY=VALUE, got 'rotate:base'"),
        ("digits", "rotate:", r"expected NAME:KEY=VALUE,KEY=VALUE, got 'rotate:'"),
        ("digits", "rope", r"--encoding: unknown 'rope'; did you mean 'rotate'\?"),
        ("image", "mixed", r"--encoding: unknown 'mixed'; did you mean 'rotate-mixed'\?"),
        ("image", "rotate:theta=100", r"rotate has no option 'theta' \(did you mean 'base'\?\)"),
        ("image", "linear", r"expected an encoding, .* got 'linear', a kind of attention; .* --attention linear"),
        ("lm", "rotary", r"--encoding: unknown 'rotary'; did you mean 'rotate'\?"),
        ("digits", "axial:base=3", r"--encoding: unknown 'axial'; did you mean 'rotate'\?"),
        ("digits", "rotate:base=ten", r"^--encoding rotate:base=ten: base: expected a number, got 'ten'$"),
        ("lm", "cosine:base=ten", r"^--encoding cosine:base=ten: base: expected a number, got 'ten'$"),
        ("digits", "rotate:split=3.5", r"split: expected integers separated by commas, such as 2,3,3, got 3.5"),
        ("digits", "rotate-mixed:seed=3.5", r"seed: expected an integer, got 3.5"),
        ("digits", "rotate:base=-1", r"^--encoding rotate:base=-1 --attention softmax: base: expected"),
        ("digits", "cosine:act=gelu", r"act: expected one of .*, got 'gelu'"),
        ("digits", "flux1", r"head_dim: flux1 doesn't support 16"),
        ("image", "qwen2_vl_vision", r"--dim 192 --heads 3: encoding: .*whose tokens are in row-major order"),
        ("lm", "wan", r"encoding: expected a scheme with one axis, got one with 3"),
        ("lm", "rotate:split=1,3", r"rotate has no option 'split'; it accepts act, base, learnable, phase"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(task, encoding, message):
    with pytest.raises(typer.BadParameter, match=message):
        config(task, encoding)


@pytest.mark.parametrize(
    ("task", "encoding", "sizes", "message"),
    [
        ("diffusion", "flux1", {"dim": 96, "heads": 4}, "flux1 doesn't support 24: .*; pass --dim 128, or --heads 3$"),
        ("diffusion", "flux1", {"dim": 192, "heads": 4}, "support 48: .*; pass --dim 128 or 256, or --heads 3 or 6$"),
        ("diffusion", "flux1", {"model": "XL/2"}, "; leave out --model, and pass --heads 16 --dim 1024 or 1536$"),
        ("video", "cogvideox", {"dim": 72, "heads": 3}, "cogvideox doesn't support 24: .*; pass --dim 48 or 96$"),
        (
            "image",
            "rotate",
            {"dim": 9, "heads": 3},
            "head_dim: expected an even number, got 3. Channels .*; pass --dim 6 or 12$",
        ),
        ("image", "rotate:rotary_dim=32", {"dim": 48, "heads": 2}, "; pass --dim 64, or --heads 1$"),
        (
            "lm",
            "rotate",
            {"dim": 18, "heads": 6},
            "even dim / num_heads for a rotation, got 18 / 6 = 3; pass --dim 12 or 24$",
        ),
    ],
)
def test_width_that_an_encoding_does_not_support(task, encoding, sizes, message):
    with pytest.raises(typer.BadParameter, match=message):
        config(task, encoding, **sizes)


def test_suggested_widths_can_be_trained():
    for sizes in ({"dim": 128, "heads": 4}, {"dim": 96, "heads": 3}, {"dim": 1024, "heads": 16, "depth": 28}):
        config("diffusion", "flux1", **sizes)


def test_registered_schemes(registered):
    for task in ("digits", "image", "diffusion"):
        config(task, f"{registered}:base=5")
    model = digits.build(config("digits", registered))
    assert model.encoding.preset.scheme is OWN
    assert registered in IMAGES.names
    assert registered in TEXT.names


@pytest.mark.parametrize("name", ["sincos", "rotate-mixed", "space-only"])
def test_a_scheme_with_the_name_of_an_encoding_is_refused(monkeypatch, name):
    monkeypatch.setitem(registry.REGISTERED, name, OWN)
    for given in (name, f"{name}:base=5"):
        with pytest.raises(typer.BadParameter, match=f"'{name}' names both .* your scheme under another name"):
            config("digits", given)


def invoke(app: Any, *args: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "400", "NO_COLOR": "1"})


def test_help_says_what_it_takes():
    for task in CONFIGS:
        shown = " ".join(invoke(train, task, "--help").output.replace("│", " ").split())
        assert "or a scheme that your module registers" in shown
        assert ("any preset on one axis" in shown) == (task == "lm")
        config(task, re.search(r"for example (rotate:\S+)\.", shown)[1])


def test_ablate_tries_every_encoding_before_it_trains_the_first(tmp_path, monkeypatch):
    run = ("run", "digits", "--out", tmp_path / "out", "--seeds", "1", "--device", "cpu", "--attention", "softmax")
    for wrong, message in (
        ("flux1", "flux1 doesn't support 16"), ("rope", "unknown 'rope'"), ("rotate:bas=3", "did you mean 'base'"),
        ("softmax/cosine:act=gelu", "got 'gelu'"),
    ):  # fmt: skip
        refused = invoke(ablate, *run, "-e", "none", "-e", wrong)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", slow_except([1], [1, 2]))
def test_ablate_compares_presets_options_and_registered_schemes(tmp_path, registered, workers):
    out, given = tmp_path / "out", ["rotate:base=30,split=1,1", "rope_vit_axial", registered, "softmax/none"]
    run = [word for name in given for word in ("-e", name)]
    command = ("run", "digits", "--smoke", "--seeds", "1", "--device", "cpu", "--attention", "softmax")
    done = invoke(ablate, *command, *run, "--workers", workers, "--out", out, "--baseline", "rope_vit_axial")
    assert done.exit_code == 0, done.output
    names = {path.stem for path in (out / "runs").glob("*.json")}
    assert names == {
        "rotate_base=30,split=1,1-softmax-0",
        "rope_vit_axial-softmax-0",
        "ours-softmax-0",
        "none-softmax-0",
    }
    assert "rotate:base=30,split=1,1" in (out / "table.md").read_text()


@pytest.mark.parametrize("encoding", ["rotate-learnable", "cosine-silu-phase"])
def test_an_interrupted_run_of_another_parametrisation_is_refused(tmp_path, encoding):
    """The optimiser's averages are those of other parameters."""
    tiny: dict[str, Any] = {
        "steps": 2, "warmup": 1, "limit": 64, "device": "cpu", "tensorboard": False, "progress": False,
    }  # fmt: skip
    chosen = replace(config("digits", encoding, **tiny), out=tmp_path / "run")
    digits.run(chosen)
    path = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(path)
    name = next(name for name in state["model"] if name.startswith("encoding."))
    value = state["model"].pop(name)
    state["model"][name.replace("log_theta", "theta")] = value[None]
    del state["digest"]
    torch.save({**state, "digest": digest_of(state)}, path)
    with pytest.raises(typer.BadParameter, match=r"does not fit this model .*encoding\."):
        digits.run(chosen)


def test_a_registered_scheme_trains_and_resumes(tmp_path, registered):
    tiny: dict[str, Any] = {
        "steps": 2, "warmup": 1, "limit": 64, "device": "cpu", "tensorboard": False, "progress": False,
    }  # fmt: skip
    chosen = replace(config("digits", f"{registered}:learnable=true", **tiny), out=tmp_path / "run")
    first = digits.run(chosen)
    assert digits.run(chosen)["accuracy"] == first["accuracy"]
    state = torch.load(tmp_path / "run" / "checkpoint.pt")
    assert "encoding.0.log_theta" in state["model"]


def _positions_times(factor: float) -> Any:
    return lambda shape: Grid(shape).rescale(factor)


@pytest.mark.parametrize("own_function", [False, True])
def test_a_run_of_another_definition_of_a_scheme_is_refused(tmp_path, registered, own_function):
    """The scheme's name is the same, so only a fingerprint can tell the difference."""

    def define(number: float) -> None:
        changed = {"grid": _positions_times(number)} if own_function else {"frequencies": Axial((1, 1), number)}
        register_scheme(registered, replace(OWN, **changed), overwrite=True)

    tiny: dict[str, Any] = {
        "steps": 2, "warmup": 1, "limit": 64, "device": "cpu", "tensorboard": False, "progress": False,
    }  # fmt: skip
    chosen = replace(config("digits", registered, **tiny), out=tmp_path / "run")
    define(2.0)
    first = digits.run(chosen)
    define(2.0)
    assert digits.run(chosen)["accuracy"] == first["accuracy"]
    define(3.0)
    with pytest.raises(typer.BadParameter, match=r"different settings \(scheme: was"):
        digits.run(chosen)
    with pytest.warns(UserWarning, match="the definition of 'ours' differs from .*; register the original scheme"):
        load_run(chosen.out)
    define(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_run(chosen.out)
    del registry.REGISTERED[registered]
    with pytest.raises(ValueError, match=r"scheme 'ours' to be registered; first import the module"):
        load_run(chosen.out)
    define(2.0)  # the fixture removes it


def test_only_registered_schemes_have_a_fingerprint(registered):
    assert "scheme" not in settings_of(config("digits", "rotate"))
    assert "scheme" not in settings_of(config("digits", "dinov3"))
    assert settings_of(config("digits", registered)) == settings_of(config("digits", registered))
    described = settings_of(config("digits", registered))["scheme"]
    register_scheme(registered, replace(OWN, doc="Described in other words."), overwrite=True)
    assert settings_of(config("digits", registered))["scheme"] == described


@pytest.mark.slow
def test_ablate_refuses_runs_of_another_definition_of_a_scheme(tmp_path, registered):
    command = ("run", "digits", "--smoke", "--device", "cpu", "--attention", "softmax", "--workers", "1")
    command += ("--out", tmp_path, "--baseline", registered)
    assert invoke(ablate, *command, "-e", registered, "--seeds", "1").exit_code == 0
    again = invoke(ablate, *command, "-e", registered, "--seeds", "1")
    assert "0 of 1 runs to train" in again.output
    register_scheme(registered, replace(OWN, frequencies=Axial((1, 1), 3.0)), overwrite=True)
    refused = invoke(ablate, *command, "-e", registered, "--seeds", "2")
    assert refused.exit_code == 2
    assert f"--encoding {registered}: --out {tmp_path} contains runs with a different definition" in refused.output
    extended = invoke(ablate, *command, "-e", "none", "--seeds", "1")
    assert extended.exit_code == 0, extended.output
