"""The training benchmark on tiny models: that only the encoding differs, and what a run writes."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from timm.models.eva import Eva
from typer.testing import CliRunner, Result

from lrpe_md import Grid, RotateMd
from scripts import benchmark_training as script

TINY = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
VIT = script.ViT(
    "vit_tiny_patch16_224", "vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224", TINY, batch=2
)
VIDEO = script.Video(shape=(2, 3, 4), prefix=3, num_heads=2, head_dim=16, batch=2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "MODELS", {"vit": VIT, "video": VIDEO})
    monkeypatch.setattr(script, "COMPILE", {"dynamic": False, "backend": "aot_eager"})


def invoke(*args: str) -> Result:
    return CliRunner().invoke(script.app, ["--device", "cpu", *args], env={"COLUMNS": "400", "NO_COLOR": "1"})


@pytest.mark.parametrize("workload", [VIT, VIDEO], ids=["vit", "video"])
def test_only_the_encoding_differs_from_the_baseline(workload):
    added = {"learned": {"pos_embed"}, "timm-mixed": {"rope.freqs"}}
    for encoding, baseline in workload.baselines.items():
        if encoding in ("none", "timm-none"):
            continue
        found = {name: t.shape for name, t in workload.build(encoding).state_dict().items()}
        expected = {name: t.shape for name, t in workload.build(baseline).state_dict().items()}
        new = {name for name in found if name not in expected}
        if encoding == "mixed":
            assert new, encoding
            assert all(name.startswith("encoding.") and name.endswith("omega") for name in new)
        else:
            assert new == added.get(encoding, set()), encoding
        assert expected == {name: shape for name, shape in found.items() if name not in new}, encoding


def test_timm_none_is_timms_rope_model_without_rope():
    models = {name: VIT.build(name) for name in ("timm-none", "timm-axial", "timm-mixed")}
    assert all(type(model) is Eva for model in models.values())
    assert models["timm-none"].rope is None
    assert not models["timm-axial"].rope_mixed
    assert models["timm-mixed"].rope_mixed


@pytest.mark.parametrize("workload", [VIT, VIDEO], ids=["vit", "video"])
def test_every_encoding_changes_the_output(workload):
    outputs = {}
    for encoding in workload.baselines:
        torch.manual_seed(0)
        model = workload.build(encoding).eval()
        state = workload.build(workload.baselines[encoding]).state_dict()
        generator = torch.Generator().manual_seed(0)
        state = {name: torch.randn(t.shape, generator=generator) for name, t in state.items()}
        model.load_state_dict(state, strict=False)
        x, _ = workload.inputs(model, 2, torch.device("cpu"))
        with torch.no_grad():
            outputs[encoding] = model(x)
    for encoding, baseline in workload.baselines.items():
        if encoding not in ("none", "timm-none"):
            assert not torch.allclose(outputs[encoding], outputs[baseline], atol=1e-4), encoding


def test_timm_rotary_is_our_rotation():
    grid = Grid((2, 3, 4), prefix=3)
    ours = RotateMd(16, 3, pairs="interleaved")
    theirs = script.TimmRotary(ours.get_omega(), grid)
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

    again = invoke("--models", "video", "--modes", "eager", "--steps", "50", "--limit", "0", "--out", str(out))
    assert again.exit_code == 0, (again.output, again.exception)
    added = pd.read_csv(out).iloc[len(rows) :]
    assert len(added) == len(VIDEO.default)
    assert (added.rounds == 1).all()


def test_rounds_are_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The ratio of the same round: a slow machine in half of the rounds does not show in it."""
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
    monkeypatch.setattr(script, "attention_backend", lambda trainee: next(kinds))
    args = ["--models", "video", "--modes", "eager", "--encodings", "axial", "--out", str(tmp_path / "training.csv")]
    result = invoke(*args)
    assert isinstance(result.exception, RuntimeError)
    assert "same kernel" in str(result.exception)
    assert not (tmp_path / "training.csv").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--encodings", "rotate"], "unknown 'rotate'"),
        (["--models", "vit_h"], "unknown 'vit_h'"),
        (["--modes", "eager,fast"], "unknown 'fast'"),
        (["--backend", "xformers"], "unknown 'xformers'"),
        (["--backend", "flash,efficient"], "unknown 'flash,efficient'"),
        (["--models", "video", "--encodings", "timm-mixed"], "has none of"),
        (["--profile"], "no GPU"),
    ],
)
def test_refusals(args, message, tmp_path: Path):
    result = invoke(*args, "--out", str(tmp_path / "training.csv"))
    assert result.exit_code == 2
    assert message in result.output
    assert not any(tmp_path.iterdir())
