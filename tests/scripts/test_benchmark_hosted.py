"""Training steps of tiny models from other libraries, stock and adapted."""

import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch
from lrpe_md.scripts.bench import training as script
from lrpe_md.scripts.bench import training_report
from lrpe_md.scripts.bench.app import app
from lrpe_md.scripts.bench.hosted import HOSTED, Hosted, import_checkout
from lrpe_md.scripts.common.folder import ROOT
from typer.testing import CliRunner

import lrpe_md
from lrpe_md.integrations.rotary import exchanged_names, parts

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 16,
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
TINY = {
    "wan": (HEADS | {"attention_head_dim": 12, "ffn_dim": 32, "text_dim": 8, "freq_dim": 16}, (2, 3, 4)),
    "flux": (HEADS | {"in_channels": 8, "joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6)}, (3, 4)),
    "qwen_image": (HEADS | {"in_channels": 8, "joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6)}, (3, 4)),
    "hunyuan_video": (HEADS | {"in_channels": 4, "text_embed_dim": 8, "rope_axes_dim": (4, 6, 6)}, (2, 3, 4)),
    "ltx": (HEADS | {"in_channels": 8, "caption_channels": 8, "cross_attention_dim": 32}, (2, 3, 4)),
    "qwen3": (TEXT | {"head_dim": 8}, (12,)), "llama": (TEXT, (12,)),
    "qwen3_vl": (
        TEXT | {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
        (12,),
    ),
    "qwen3_vl_vision": (
        {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
         "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        (4, 6),
    ),
    "dinov3": ({"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 64}, (3, 4)),
    "eva02": ({"embed_dim": 48, "num_heads": 2, "img_size": (42, 56)}, (3, 4)),
    "rope_mixed": ({"embed_dim": 48, "num_heads": 2, "img_size": (48, 64)}, (3, 4)),
}  # fmt: skip
DEPTH = {"num_layers": 1, "num_single_layers": 1, "num_hidden_layers": 1, "depth": 1}


def tiny(name):
    whole = HOSTED[name]
    pytest.importorskip(whole.library)
    config, size = TINY[name]
    depth = {key: number for key, number in DEPTH.items() if key in whole.config}
    return replace(whole, config=whole.config | config | depth, size=size, batch=2)


@pytest.mark.parametrize("name", HOSTED)
def test_a_step_stock_and_adapted(name):
    """Both have the same weights and inputs, and the adapted model is really adapted."""
    workload, device = tiny(name), torch.device("cpu")
    assert set(TINY) == set(HOSTED)
    losses, with_gradient = {}, {}
    for encoding in workload.default:
        trainee = script.Trainee(workload, encoding, "eager", 2, "auto", device)
        adapted = any(exchanged_names(part) for part in parts(trainee.raw).values())
        assert adapted == (encoding == "adapted")
        loss = workload.loss(
            trainee.model.float(), *(x.float() if x.is_floating_point() else x for x in trainee.inputs)
        )
        loss.backward()
        losses[encoding] = loss.detach()
        with_gradient[encoding] = {name for name, p in trainee.raw.named_parameters() if p.grad is not None}
    torch.testing.assert_close(losses["adapted"], losses["stock"], rtol=1e-4, atol=1e-6)
    assert with_gradient["adapted"] == with_gradient["stock"] != set()
    assert workload.tokens(trainee.raw, 2) == 2 * torch.tensor(workload.size).prod()


def test_another_checkout_runs_in_the_same_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    other = import_checkout(ROOT, "lrpe_md_other")
    assert other.__file__ != lrpe_md.__file__
    assert torch.ops.lrpe_md_other.forward is not torch.ops.lrpe_md.forward
    monkeypatch.setattr(Hosted, "other", other)
    workload = tiny("llama")
    models = [workload.build(encoding).float() for encoding in ("adapted-other", "stock")]
    with torch.no_grad():
        adapted, stock = (workload.loss(m, *workload.inputs(m, 2, torch.device("cpu"))) for m in models)
    torch.testing.assert_close(adapted, stock, rtol=1e-4, atol=1e-6)


def test_wrong_uses_of_another_checkout_are_refused(tmp_path):
    training = ["training", "--models", "llama", "--device", "cpu", "--encodings"]
    for args, message in (
        ([*training, "adapted-other"], "--encodings: adapted-other needs --other"),
        ([*training, "adapted", "--other", str(ROOT)], "--other: only adapted-other uses it"),
        ([*training, "adapted-other", "--other", str(tmp_path)], "--other: expected a checkout"),
        (["linear", "--device", "cpu", "--smoke", "--other", str(tmp_path)], "--other: expected a checkout"),
    ):
        done = CliRunner().invoke(app, args, env={"COLUMNS": "400", "NO_COLOR": "1"})
        assert done.exit_code == 2
        assert message in done.output


def test_the_command_and_its_table(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "MODELS", {"qwen3": tiny("qwen3")})
    out = tmp_path / "adapted.csv"
    options = ["--models", "qwen3", "--modes", "eager,inference", "--steps", "2", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, ["training", *options])
    assert done.exit_code == 0, done.output
    rows = pd.read_csv(out)
    assert list(zip(rows["mode"], rows.encoding, strict=True)) == [
        ("eager", "stock"), ("eager", "adapted"), ("inference", "stock"), ("inference", "adapted"),
    ]  # fmt: skip
    rows["peak_gib"], rows["memory_ratio"], rows["attention"] = 1.0, 0.9, "flash"
    rows.loc[rows.encoding == "adapted", ["ratio_p20", "ratio_p50", "ratio_p80"]] = 0.94, 0.95, 0.97
    rows.to_csv(out, index=False)
    text = training_report.adapted(out)
    assert "| qwen3 | " in text
    assert "(-5.0 ± 1.5%, -10.0%)" in text
