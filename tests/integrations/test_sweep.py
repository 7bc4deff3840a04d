"""The sweep over modified models: each outcome, for a tiny Llama and for special models."""

import copy
import csv
import dataclasses
import functools
import gc
import tempfile
from pathlib import Path

import pytest
import torch
from lrpe_md.scripts.adapters import app as commands
from lrpe_md.scripts.adapters import sweep, trial
from lrpe_md.scripts.adapters.sweep import COPIES, Change, Original
from lrpe_md.scripts.bench import report
from typer.testing import CliRunner

from lrpe_md import adapt_rotary
from lrpe_md.integrations import plans

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

RESULTS = Path(__file__).parents[2] / "scripts" / "results" / "adapters"
OFFLOADS = ["offloaded to the cpu", "offloaded to disk", "offloaded in parts"]


def build_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
        attn_implementation="eager",
    )  # fmt: skip
    return shake(transformers.LlamaModel(config))


def shake(model):
    """Give a model weights that are large enough for positions to matter."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return model.eval()


def call(model):
    return trial.differentiate(model, [model(input_ids=torch.arange(12)[None]).last_hidden_state])


LLAMA = trial.Candidate("tiny llama", build_llama, call)


def run(change, when="after", candidate=LLAMA):
    model = candidate.build()
    return sweep._try(candidate, Original(model, candidate.call(model)), change, when)


def draw_noise(model):
    model.norm.register_forward_hook(lambda module, args, y: y + torch.rand_like(y))


def double_outputs(model):
    model.norm.register_forward_hook(lambda module, args, y: 2 * y)


def probe():
    """Probe llama's function, as the first forward does. A later test breaks our kernel, so a probe would then fail."""
    assert run(Change(double_outputs)) == ("same", "")


def spoil_rotation(monkeypatch):
    probe()
    rotate = plans.rotate
    monkeypatch.setattr(plans, "rotate", lambda *xs, **kwargs: [y * (1 + 1e-3) for y in rotate(*xs, **kwargs)])


def test_every_change_of_a_llama():
    """No applicable change makes the original raise an error."""
    rows = list(sweep.sweep_model("transformers", LLAMA))
    assert {row.outcome for row in rows} == {"same", "inapplicable"}
    left = {row.change for row in rows if row.outcome == "inapplicable"}
    assert left == {"norms hooked", "norms patched", "offloaded in groups"}
    assert len(rows) == 2 * len(sweep.CHANGES) + len(COPIES) + 1


def test_a_wrong_rotation_is_different(monkeypatch):
    spoil_rotation(monkeypatch)
    outcome, note = run(Change(double_outputs))
    assert outcome == "different"
    assert note.startswith("by ")
    model = build_llama()
    assert sweep._try_copy(LLAMA, Original(model, call(model)), copy.deepcopy)[0] == "different"


def test_an_adapted_model_that_raises_is_an_error(monkeypatch):
    probe()
    monkeypatch.setattr(plans, "rotate", lambda *xs, **kwargs: 1 / 0)
    assert run(Change(double_outputs)) == ("error", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("when", ["before", "after"])
def test_originals_that_differ_from_themselves_are_unstable(when):
    for change in (Change(draw_noise), Change(draw_noise, False), Change(double_outputs, preserves=True)):
        outcome, note = run(change, when)
        assert outcome == "unstable"
        assert note.startswith("the original differs from itself by ")
    assert run(Change(double_outputs), when) == ("same", "")


def test_originals_that_cannot_be_copied():
    """transformers' hooks that record outputs are local functions, which can't be pickled."""
    model = build_llama()
    model.register_forward_hook(lambda module, args, y: None)
    original = Original(model, call(model))
    assert sweep._try_copy(LLAMA, original, copy.deepcopy) == ("same", "")
    for name in ("pickle", "save"):
        outcome, note = sweep._try_copy(LLAMA, original, COPIES[name])
        assert outcome == "inapplicable"
        assert note.startswith("the original raises ")


def test_originals_that_cannot_be_copied_after_a_call():
    """RecurrentGemma keeps the last state, a tensor with a history, which can't be deep-copied."""

    def call_and_keep(model):
        model.state = model.embed_tokens.weight * 1
        return call(model)

    candidate = dataclasses.replace(LLAMA, call=call_and_keep)
    rows = list(sweep.sweep_model("transformers", candidate))
    assert {row.change for row in rows if row.outcome == "inapplicable"} >= {"deepcopy"}
    assert {row.outcome for row in rows if row.change in sweep.CHANGES} == {"same", "inapplicable"}
    assert [row.outcome for row in rows if row.change == "pickle"] == ["same"]


def test_copies_that_lose_the_adaptation():
    model = build_llama()
    outcome = sweep._try_copy(LLAMA, Original(model, call(model)), lambda adapted: copy.deepcopy(model))
    assert outcome == ("different", "the copy is not adapted")


# --- weights that a module reads from its children -------------------------------------------------------------------


@functools.cache
def eva():
    timm = pytest.importorskip("lrpe_md.scripts.adapters.trial_timm")
    name = "eva02_tiny_patch14_224"
    return trial.Candidate(name, functools.partial(timm.build, name, timm.read_shape(name)), timm.call)


@pytest.mark.parametrize("when", ["before", "after"])
def test_offloaded_weights_of_eva(when):
    """Eva's attention reads ``qkv.weight``, which accelerate has not loaded. Some PyTorch versions compute with it."""
    found = {name: run(sweep.CHANGES[name], when, eva())[0] for name in OFFLOADS}
    assert found.pop("offloaded in parts") == "same"
    assert set(found.values()) <= {"unstable", "inapplicable"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_offloaded_whole_attentions_keep_outputs(when):
    """accelerate finds the classes to preload by name, and adapting keeps these names."""
    import accelerate

    candidate = eva()
    model = candidate.build()
    with torch.no_grad():
        expected = candidate.call(model)
        if when == "after":
            adapt_rotary(model)
        accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=["EvaAttention"])
        if when == "before":
            adapt_rotary(model)
        for _ in range(2):
            assert trial.distance(candidate.call(model), expected) <= trial.BOUND


def test_folders_of_offloaded_weights_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = build_llama()
    sweep.offload_to_disk(model)
    assert len(list(tmp_path.iterdir())) == 1
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_rotation_that_is_a_static_method(capsys):
    """RoFormer rotates in a static method of its attention."""
    config = transformers.RoFormerConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
        embedding_size=32,
    )  # fmt: skip
    candidate = trial.Candidate("roformer", lambda: shake(transformers.RoFormerModel(config)), call)
    adapt_rotary(candidate.build(), verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "adapted: encoder.layer.0.attention.self (RoFormerSelfAttention): apply_rotary_position_embeddings"
    ]
    model = candidate.build()
    original = Original(model, call(model))
    assert {sweep._try_copy(candidate, original, make) for make in COPIES.values()} == {("same", "")}


def test_tiny_models_have_no_empty_layers():
    """A quantised layer without input channels returns memory that nothing wrote."""
    diffusers = pytest.importorskip("lrpe_md.scripts.adapters.trial_diffusers")
    model = diffusers.build("NucleusMoEImageTransformer2DModel")
    assert all(p.numel() for p in model.parameters())
    candidate = diffusers.candidate("NucleusMoEImageTransformer2DModel")
    assert run(sweep.CHANGES["quantised linears"], "after", candidate) == ("same", "")


# --- the command and its results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "outcomes"), [([], ["same"]), (["--all"], ["same", "inapplicable"])])
def test_the_command_leaves_out_changes_that_do_not_apply(option, outcomes, monkeypatch):
    rows = [sweep.Outcome("timm", "a", "amplitude", "after", outcome, "") for outcome in ("same", "inapplicable")]
    written = []
    monkeypatch.setattr(commands, "sweep_library", lambda library, names: iter(rows))
    monkeypatch.setattr(commands, "write_outcomes", lambda rows: written.extend(rows) or written)
    done = CliRunner().invoke(commands.app, ["sweep", "--library", "timm", *option])
    assert done.exit_code == 0, done.output
    assert [row.outcome for row in written] == outcomes


def test_a_file_has_a_row_for_each_model(tmp_path):
    outcomes = [
        sweep.Outcome("timm", "a", "low rank", "before", "same", ""),
        sweep.Outcome("timm", "a", "low rank", "after", "unstable", "the original differs, from itself: by 1"),
        sweep.Outcome("timm", "b", "default dtype", "before", "error", "TypeError: no"),
    ]
    with (tmp_path / "changes.csv").open("w") as file:
        assert sweep.write_outcomes(iter(outcomes), file) == outcomes
    lines = list(csv.DictReader((tmp_path / "changes.csv").open(newline="")))
    assert [line["model"] for line in lines] == ["a", "b"]
    assert lines[0]["low rank, before"] == "same"
    assert lines[1]["low rank, before"] == ""
    assert lines[1]["default dtype, before"] == "error: TypeError: no"
    assert sweep.read_outcomes(tmp_path / "changes.csv") == outcomes


def test_the_committed_results():
    """Every adapted model has a row, and none silently gives different results."""
    rows = sweep.read_outcomes(RESULTS / "changes.csv")
    assert {row.outcome for row in rows} <= {"same", "refused", "unstable"}
    assert {row.change for row in rows} == {*sweep.CHANGES, *COPIES, "default dtype"}
    adapted = {
        (name, row.model) for name in trial.LIBRARIES for row in trial.read(RESULTS / f"{name}.csv")
        if row.outcome == "adapted"
    }  # fmt: skip
    assert {(row.library, row.model) for row in rows} == adapted
    assert (RESULTS / "changes.csv").stat().st_size < 100_000


def test_the_report_counts_changes_by_outcome(tmp_path):
    rows = [
        ("a", "low rank", "same"),
        ("a", "save", "unstable"),
        ("b", "low rank", "same"),
        ("c", "low rank", "refused"),
    ]
    with (tmp_path / "changes.csv").open("w") as file:
        sweep.write_outcomes((sweep.Outcome("timm", *row[:2], "after", row[2], "") for row in rows), file)
    lines = report.changes(tmp_path / "changes.csv").splitlines()
    assert "| modification | same | rejected | different | error | unstable |" in lines
    assert "| low rank | 2 | 1 | 0 | 0 | 0 |" in lines
    assert "| save | 0 | 0 | 0 | 0 | 1 |" in lines
    assert report.changes(tmp_path / "none.csv") == ""
