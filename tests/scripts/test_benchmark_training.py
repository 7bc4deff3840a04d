"""The training benchmark on tiny models. Models only differ in their encoding, and results are written."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from lrpe_md.scripts.bench import training as script
from lrpe_md.scripts.bench import training_models
from lrpe_md.scripts.bench import training_report as report
from lrpe_md.scripts.bench.app import app
from lrpe_md.scripts.bench.report import RESULTS
from timm.models.eva import Eva
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner, Result

from lrpe_md import Grid, RotateMd

TINY = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
VIT = training_models.ViT(
    "vit_tiny_patch16_224", "vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224", TINY, batch=2
)
VIDEO = training_models.Video(shape=(2, 3, 4), prefix=3, num_heads=2, head_dim=16, batch=2)
SMALL = {"dim": 32, "depth": 1, "heads": 2, "size": 16, "batch": 3}
BACKBONES = {
    name: replace(training_models.MODELS[name], options={**SMALL, **options})  # pyright: ignore[reportArgumentType]
    for name, options in {
        "image": {"patch": 4},
        "video_model": {"frames": 4, "tubelet": 2},
        "dit": {"text_dim": 32, "text_depth": 1, "text_length": 6},
    }.items()
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "MODELS", {"vit": VIT, "video": VIDEO})
    compiling = {mode: {**kwargs, "backend": "aot_eager"} for mode, kwargs in script.COMPILE.items()}
    monkeypatch.setattr(script, "COMPILE", compiling)


def invoke(*args: str, device: str = "cpu") -> Result:
    return CliRunner().invoke(app, ["training", "--device", device, *args], env={"COLUMNS": "400", "NO_COLOR": "1"})


@pytest.mark.parametrize("workload", [VIT, VIDEO], ids=["vit", "video"])
def test_only_the_encoding_differs_from_the_baseline(workload):
    added = {"learned": {"pos_embed"}, "timm-mixed": {"rope.freqs"}}
    for encoding, baseline in workload.baselines.items():
        if encoding in ("none", "timm-none"):
            continue
        found = {name: t.shape for name, t in workload.build(encoding).state_dict().items()}
        expected = {name: t.shape for name, t in workload.build(baseline).state_dict().items()}
        new = {name for name in found if name not in expected}
        if encoding in ("mixed", "mixed-again"):
            assert new, encoding
            assert all(name.startswith("encoding.") and name.endswith("omega") for name in new)
        else:
            assert new == added.get(encoding, set()), encoding
        assert expected == {name: shape for name, shape in found.items() if name not in new}, encoding


def test_timm_none_equals_timms_rope_model_without_rope():
    models = {name: VIT.build(name) for name in ("timm-none", "timm-axial", "timm-mixed")}
    assert all(type(model) is Eva for model in models.values())
    assert models["timm-none"].rope is None
    assert not models["timm-axial"].rope_mixed
    assert models["timm-mixed"].rope_mixed


@pytest.mark.parametrize("workload", [VIT, VIDEO, *BACKBONES.values()], ids=["vit", "video", *BACKBONES])
def test_every_encoding_changes_the_loss(workload):
    losses = {}
    encodings = workload.default if isinstance(workload, training_models.Backbone) else workload.baselines
    for encoding in encodings:
        torch.manual_seed(0)
        model = workload.build(encoding).eval()
        state = workload.build(workload.baselines[encoding]).state_dict()
        generator = torch.Generator().manual_seed(0)
        state = {name: torch.randn(t.shape, generator=generator) for name, t in state.items()}
        model.load_state_dict(state, strict=False)
        torch.manual_seed(0)
        with torch.no_grad():
            losses[encoding] = workload.loss(model, *workload.inputs(model, 2, CPU))
        assert losses[encoding].isfinite()
    for encoding in encodings:
        if encoding not in ("none", "timm-none"):
            assert not torch.allclose(losses[encoding], losses[workload.baselines[encoding]], atol=1e-4), encoding


def test_timm_rotary_equals_lrpe_md():
    grid = Grid((2, 3, 4), prefix=3)
    ours = RotateMd(16, 3, pairs="interleaved")
    theirs = training_models.TimmRotary(ours.get_omega(), grid)
    q, k = torch.randn(2, 2, 4, 27, 16)
    for a, b in zip(theirs(q, k, positions=grid), ours(q, k, positions=grid), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_run_adds_rows(tmp_path: Path):
    out = tmp_path / "new" / "training.csv"
    args = ["--models", "vit,video", "--modes", "eager,compiled", "--encodings", "timm-mixed,axial", "--steps", "4"]
    result = invoke(*args, "--out", str(out), "--commit", "abc")
    assert result.exit_code == 0, (result.output, result.exception)
    rows = pd.read_csv(out, keep_default_na=False, na_values=[""])
    vit = [(mode, e) for mode in ("eager", "compiled") for e in ("none", "timm-none", "timm-mixed", "axial")]
    video = [(mode, e) for mode in ("eager", "compiled") for e in ("none", "axial")]
    assert list(zip(rows["mode"], rows.encoding, strict=True)) == vit + video
    assert (rows.rounds == 4).all()
    assert [set(rows.tokens[rows.model == name]) for name in ("vit", "video")] == [{2 * 2 * 2}, {2 * 2 * 3 * 4}]
    for name in ("ms", "ratio"):
        assert (rows[f"{name}_p20"] > 0).all()
        assert (rows[f"{name}_p20"] <= rows[f"{name}_p50"]).all()
        assert (rows[f"{name}_p50"] <= rows[f"{name}_p80"]).all()
    itself = rows.encoding == "none"
    assert (rows[itself][["ratio_p20", "ratio_p80"]] == 1).all(axis=None)
    assert not (rows[~itself].ratio_p50 == 1).all()
    assert set(rows.attention) <= {"flash", "math"}
    assert rows.peak_gib.isna().all()  # no GPU
    assert (rows.commit == "abc").all()

    again = invoke("--models", "video", "--modes", "eager", "--steps", "50", "--limit", "1e-9", "--out", str(out))
    assert again.exit_code == 0, (again.output, again.exception)
    added = pd.read_csv(out).iloc[len(rows) :]
    assert len(added) == len(VIDEO.default)
    assert (added.rounds == 1).all()


def test_rounds_are_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If the machine is slow in half of the rounds, the ratios within a round don't change."""
    ms = pd.DataFrame({"none": [10.0, 10.0, 30.0, 30.0], "axial": [11.0, 11.0, 33.0, 33.0]})
    monkeypatch.setattr(script, "time_rounds", lambda *args: ms)
    result = invoke(
        "--models", "video", "--modes", "eager", "--encodings", "axial", "--out", str(tmp_path / "training.csv")
    )
    assert result.exit_code == 0, (result.output, result.exception)
    row = pd.read_csv(tmp_path / "training.csv").set_index("encoding").loc["axial"]
    assert [row.ratio_p20, row.ratio_p50, row.ratio_p80] == [1.1, 1.1, 1.1]


def test_each_round_has_every_model_once(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(script, "time_step", lambda trainee: calls.append(trainee) or (lambda: 1.0))
    trainees = {name: name for name in "abcd"}
    times = script.time_rounds(trainees, torch.device("cpu"), 20, 60.0)  # pyright: ignore[reportArgumentType]
    rounds = [calls[i : i + 4] for i in range(0, 80, 4)]
    assert all(sorted(names) == list("abcd") for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert times.shape == (20, 4)


def test_all_models_must_share_the_attention_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kinds = iter(["flash", "math"])
    monkeypatch.setattr(script, "observed_step", lambda trainee: (next(kinds), math.nan))
    args = ["--models", "video", "--modes", "eager", "--encodings", "axial", "--out", str(tmp_path / "training.csv")]
    result = invoke(*args)
    assert isinstance(result.exception, RuntimeError)
    assert "same kernel" in str(result.exception)
    assert not (tmp_path / "training.csv").exists()


def test_cosine_may_take_another_attention_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "MODELS", BACKBONES)
    kinds = iter(["flash", "efficient", "math"])
    monkeypatch.setattr(script, "observed_step", lambda trainee: (next(kinds), math.nan))
    out = str(tmp_path / "training.csv")
    args = ["--models", "image", "--modes", "eager", "--encodings", "cosine,cosine-softplus", "--steps", "1"]
    result = invoke(*args, "--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    assert list(pd.read_csv(out).attention) == ["flash", "efficient", "math"]


def test_the_second_step_is_observed(monkeypatch: pytest.MonkeyPatch):
    """The first step compiles. From the third step on, CUDA graphs are replayed."""
    taken, before, step, observe = Counter(), [], script.Trainee.step, script.observed_step
    monkeypatch.setattr(script.Trainee, "step", lambda self: taken.update([self]) or step(self))
    monkeypatch.setattr(script, "observed_step", lambda trainee: before.append(taken[trainee]) or observe(trainee))
    script.compare(
        VIDEO, ["none", "axial"], "eager", 2, script.Timing(1, 1.0, "auto", False, CPU, script.Console(quiet=True))
    )
    assert before == [1, 1]
    assert set(taken.values()) == {2 + script.WARMUP_ROUNDS + script.HOST_STEPS + 1 + 1}


@pytest.mark.parametrize("mode", script.MODES)
def test_a_step_leaves_nothing_in_the_graphs_memory(mode, monkeypatch: pytest.MonkeyPatch):
    events = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: events.append("begin"))
    trainee = script.Trainee(VIDEO, "mixed", mode, 2, "auto", CPU)
    trainee.model = lambda x: events.append("forward") or trainee.raw(x)
    losses = [trainee.step(), trainee.step()]
    assert events == (["begin", "forward"] if mode == "graphs" else ["forward"]) * 2
    assert not any(loss.requires_grad for loss in losses)
    assert (losses[0] != losses[1]) == (mode not in script.INFERENCE)
    assert all(x.grad is None for x in (*trainee.raw.parameters(), *trainee.inputs))


# --- the train scripts' models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_have_the_scripts_sizes(name):
    workload = training_models.MODELS[name]
    assert isinstance(workload, training_models.Backbone)
    assert set(workload.default) <= set(workload.baselines)
    params = sum(p.numel() for p in workload.build("none").parameters())
    assert f"{params / 1e6:.1f} M parameters" in (workload.training.__doc__ or "")


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_train(name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "MODELS", BACKBONES)
    out = tmp_path / "backbones.csv"
    result = invoke("--models", name, "--modes", "eager", "--steps", "1", "--out", str(out))
    assert result.exit_code == 0, (result.output, result.exception)
    rows = pd.read_csv(out)
    assert list(rows.encoding) == [e for e in BACKBONES[name].baselines if e in BACKBONES[name].default]
    assert (rows.baseline == "none").all()
    assert (rows.batch == 8 * 3).all()


def test_norms_in_separate_launches():
    """The model is the same, but its encoding has no norm."""
    workload, found = BACKBONES["dit"], {}
    for name in ("rotate", "rotate-norms-first"):
        torch.manual_seed(0)
        model = workload.build(name)
        inputs = workload.inputs(model, 2, CPU)
        asked = []
        hook = {"with_kwargs": True}
        model.encoding.register_forward_pre_hook(
            lambda m, args, kwargs, asked=asked: asked.append("norm" in kwargs), **hook
        )
        torch.manual_seed(1)
        found[name] = workload.loss(model, *inputs).detach()
        assert asked == [name == "rotate"] * len(asked) != []
    torch.testing.assert_close(found["rotate"], found["rotate-norms-first"], rtol=1e-5, atol=0)


def test_graph_breaks_are_counted():
    class Breaking(training_models.Video):
        def loss(self, model, *inputs):
            loss = super().loss(model, *inputs)
            torch._dynamo.graph_break()
            return loss

    def breaks(workload):
        timing = script.Timing(1, 1.0, "auto", False, CPU, script.Console(quiet=True))
        build = script.Trainee.__init__

        def compile_all(self, *args):
            build(self, *args)
            loss = torch.compile(lambda *xs: workload.loss(self.raw, *xs), backend="eager")
            self.workload = SimpleNamespace(loss=lambda model, *xs: loss(*xs))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script.Trainee, "__init__", compile_all)
            rows, _ = script.compare(workload, ["none"], "eager", 2, timing)
        return list(rows.graph_breaks)

    shape = {"shape": (2, 3, 4), "prefix": 3, "num_heads": 2, "head_dim": 16, "batch": 2}
    assert breaks(training_models.Video(**shape)) == [0]
    assert breaks(Breaking(**shape)) == [1]


@pytest.mark.parametrize("workload", [VIT, VIDEO, *BACKBONES.values()], ids=["vit", "video", *BACKBONES])
def test_tokens_equal_the_patches_of_a_step(workload):
    seen = []
    model = workload.build("none")
    layer = model.block if workload is VIDEO else model.blocks[0]
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:2]))
    workload.loss(model, *workload.inputs(model, 2, CPU))
    ((samples, tokens),) = seen
    prefix = VIDEO.prefix if workload is VIDEO else getattr(model, "num_prefix_tokens", 0)
    assert workload.tokens(model, 2) == samples * (tokens - prefix)


# --- the report ------------------------------------------------------------------------------------------------------


def test_another_mode_is_another_column_of_the_report(tmp_path: Path):
    """Results are appended to a file whose rows have no tokens."""
    out = tmp_path / "training.csv"
    old = pd.read_csv(RESULTS / "training.csv").drop(columns="tokens", errors="ignore").assign(commit="first")
    old.loc[old.index[0], "commit"] = None  # no git history
    old[old["mode"] == "eager"].to_csv(out, index=False)
    args = ["--models", "video", "--modes", "graphs", "--encodings", "axial", "--steps", "1", "--commit", "later"]
    result = invoke(*args, "--out", str(out))
    assert result.exit_code == 0, (result.output, result.exception)
    lines = report.training(out).splitlines()
    (measured,) = (line for line in lines if line.startswith("- Measured on"))
    assert "commits first" in measured or "commits unknown, first" in measured
    assert measured.endswith(" and later.")
    rows = [line.split(" | ") for line in lines]
    head, axial = (next(row for row in rows if row[0] == start) for start in ("| ", "| **axial**"))
    assert head[-1] == "video, graphs |"
    assert "%" in axial[-1]


def test_report_of_the_backbones(tmp_path: Path):
    file = tmp_path / "backbones.csv"
    assert report.backbones(file) == ""
    one = {"model": "dit", "baseline": "none", "batch": 64, "tokens": 16384}
    one |= {"gpu": "NVIDIA G 80GB", "versions": "torch 2", "commit": "00123", "rounds": 9}
    one |= {"ratio_p20": 1, "ratio_p80": 1}
    names = ("mode", "encoding", "ms_p50", "ratio_p50", "peak_gib", "memory_ratio", "host_ms")
    rows = [
        ("eager", "none", 20.0, 1, 2, 1, 19),
        ("eager", "rotate", 99, 1, 9, 1, 5),  # replaced by the later row below
        ("eager", "rotate", 16, 0.8, 2.2, 1.1, 5),
        ("compiled", "rotate", 10, 1.25, 1.5, 0.9, 1),
    ]
    pd.DataFrame([{**one, **dict(zip(names, row, strict=True))} for row in rows]).to_csv(file, index=False)
    lines = report.backbones(file).splitlines()
    assert "- Measured on NVIDIA G 80GB, torch 2, commit 00123." in lines
    assert any(line.startswith("- A batch has 64 × 256 tokens (dit)") for line in lines)
    assert lines[2:6] == [
        "|  | eager | compiled |",
        "| --- | ---: | ---: |",
        "| dit, none | 0.82 M/s, 2.00 GiB (host) |  |",
        "| dit, rotate | 1.02 M/s (+25.0 ± 0.0%), 2.20 GiB (+10.0%) | 1.64 M/s (-20.0 ± 0.0%), 1.50 GiB (-10.0%) |",
    ]


def test_report_shows_the_spread_and_the_gpu_of_each_cell(tmp_path: Path):
    file, newer = tmp_path / "linear-training.csv", tmp_path / "training.csv"
    one = {"model": "vit_b", "mode": "eager", "baseline": "none", "batch": 1, "tokens": 4, "versions": "torch 2"}
    names = ("encoding", "gpu", "ratio_p20", "ratio_p50", "ratio_p80", "rounds", "commit")
    usual, other = "NVIDIA H100 80GB HBM3", "NVIDIA H200"

    def write(path: Path, *rows: tuple[Any, ...]) -> None:
        rest = {**one, "ms_p50": 10, "host_ms": 1, "memory_ratio": 1.1}
        pd.DataFrame([{**rest, **dict(zip(names, row, strict=True))} for row in rows]).to_csv(path, index=False)

    write(
        file,
        ("none", usual, 1, 1, 1, 99, "old"),
        ("axial", usual, 1.02, 1.03, 1.04, 30, "old"),
        ("mixed", other, 0.9, 1.04, 1.2, 5, "old"),
    )
    text = report.training(file)
    assert "| **axial** | +3.0 ± 1.0%, +10.0% |" in text
    assert "| **mixed** | +4.0 ± 15.0%, +10.0% (H200) |" in text
    assert "over 5 to 30 rounds" in text
    assert "Steps marked H200 ran on that GPU, and all others on an H100." in text

    write(newer, ("axial", usual, 1.01, 1.02, 1.03, 240, "new"), ("mixed", usual, 1, 2, 3, 240, "new"))
    text = report.training(file, newer)
    assert "| **axial** | +2.0 ± 1.0%, +10.0% |" in text
    assert "| **mixed** | +4.0 ± 15.0%, +10.0% (H200) |" in text, "measured on another GPU"
    assert "commits old and new" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--encodings", "rotate"], "unknown 'rotate'"),
        (["--models", "vit_h"], "unknown 'vit_h'"),
        (["--modes", "eager,fast"], "unknown 'fast'"),
        (["--backend", "xformers"], "unknown 'xformers'"),
        (["--backend", "flash,efficient"], "unknown 'flash,efficient'"),
        (["--models", "video", "--encodings", "timm-mixed"], "supports none of"),
        (["--profile"], "--profile: expected a GPU"),
    ],
)
def test_refusals(args, message, tmp_path: Path):
    result = invoke(*args, "--out", str(tmp_path / "training.csv"))
    assert result.exit_code == 2
    assert message in result.output
    assert not any(tmp_path.iterdir())


@pytest.mark.gpu
def test_models_with_graphs_take_turns(monkeypatch: pytest.MonkeyPatch):
    """Several models share a memory pool and take turns. Their losses equal those in eager mode."""
    monkeypatch.undo()
    device, names = torch.device("cuda"), ("none", "axial", "mixed")
    losses: dict[str, list[torch.Tensor]] = {}
    for mode in ("eager", "graphs"):
        torch.compiler.reset()
        trainees = []
        for seed, name in enumerate(names):
            torch.manual_seed(seed)
            trainees.append(script.Trainee(VIT, name, mode, 16, "auto", device))
        orders = (trainees, trainees[::-1], trainees[1:] + trainees[:1]) * 3
        taken: dict[script.Trainee, list[torch.Tensor]] = {trainee: [] for trainee in trainees}
        for order in orders:
            for trainee in order:
                taken[trainee].append(trainee.step())
        losses[mode] = [torch.stack(taken[trainee]) for trainee in trainees]
        for trainee in trainees:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
                trainee.step()
                torch.cuda.synchronize()
            launched = [event.name for event in prof.events() or ()].count("cudaGraphLaunch")
            assert (launched >= 2) == (mode == "graphs")  # forward and backward
    for name, eager, graphs in zip(names, losses["eager"], losses["graphs"], strict=True):
        assert eager[0] - eager[-1] > 0.1, name
        torch.testing.assert_close(graphs, eager, rtol=2**-8, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
def test_graphs_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(script, "MODELS", {"vit": VIT})
    out = tmp_path / "training.csv"
    args = ["--modes", "eager,graphs", "--encodings", "axial", "--models", "vit", "--batch", "16"]
    result = invoke(*args, "--out", str(out), device="cuda")
    assert result.exit_code == 0, (result.output, result.exception)
    rows = pd.read_csv(out, keep_default_na=False, na_values=[""]).set_index(["mode", "encoding"])
    assert rows.attention.notna().all()
    state = sum(3 * 4 * p.numel() for p in VIT.build("none").parameters())  # weights and Adam's moments
    assert (rows.peak_gib * 2**30 > 1.3 * state).all()  # gradients and activations come on top


@pytest.mark.parametrize(("name", "kind"), [("linear-cosine", "CosineMd"), ("linear-axial", "RotateMd")])
def test_the_vits_have_linear_attention(name, kind):
    small = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 32, "num_classes": 4}
    workload: Any = replace(training_models.MODELS["vit_b_1024"], kwargs=small)  # pyright: ignore
    model = workload.build(name)
    assert model.blocks[0].attn.attention == "linear"
    assert type(model.encoding).__name__ == kind
    workload.loss(model, *workload.inputs(model, 2, torch.device("cpu"))).backward()
    assert workload.baselines[name] == "none"


def test_presets_and_options_of_a_backbone():
    dit = training_models.MODELS["dit"]
    assert script.with_baselines(dit, ["wan:base=50", "cosine:act=relu", "axial"]) == [
        "none", "cosine:act=relu", "wan:base=50",
    ]  # fmt: skip
    assert script.with_baselines(VIT, ["wan"]) == []
    (module,) = (each for name, each in dit.build("wan:base=50").named_modules() if name == "encoding")
    assert module.preset.omega.max() == 1
    assert module.preset.omega[0, 1].max() == pytest.approx(50 ** (-1 / 12))


def test_report_states_the_tokens_of_all_models():
    """Every model in the CSVs of training steps has its tokens, which the report lists."""
    for file in ("training.csv", "linear-training.csv", "adapted-training.csv", "backbones.csv"):
        rows = pd.read_csv(RESULTS / file)
        assert rows.tokens.notna().all(), file


def test_report_states_the_batch_of_each_mode_if_they_differ():
    rows = pd.DataFrame({
        "model": ["vit", "vit", "dit"], "mode": ["eager", "compiled", "eager"], "batch": [128, 64, 8],
        "tokens": [25088, 12544, 2048],
    })  # fmt: skip
    expected = "128 × 196 tokens (vit, eager), 64 × 196 tokens (vit, compiled) and 8 × 256 tokens (dit), not"
    assert report.batches(rows).startswith(f"A batch has {expected}")


def test_report_says_that_inference_is_eager():
    text = report.adapted(RESULTS / "adapted-training.csv")
    assert "|  | eager | compiled | eager inference |" in text
