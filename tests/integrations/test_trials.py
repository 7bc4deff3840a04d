"""The table of models that ``adapt_rotary`` supports. Each model is compared with a tiny random stock model."""

import contextlib
import csv
import importlib
import io
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lrpe_md.scripts.adapters import trial
from lrpe_md.scripts.adapters.app import app
from torch import nn
from typer.testing import CliRunner

from lrpe_md import adapt_rotary
from lrpe_md.integrations import __main__ as command
from lrpe_md.integrations import plans, restore_rotary

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "scripts" / "results" / "adapters"
LEAST = {"timm": 83, "transformers": 243, "diffusers": 48}
TYPES = [  # in transformers, one for each variant of rotary code
    "llama", "mixtral", "qwen3_5_text", "gemma3_text", "gemma4_text", "gpt_oss", "llama4_text", "deepseek_v3", "glm4",
    "modernbert", "pixtral", "dinov3_vit", "sam3_vit_model", "ernie4_5", "smollm3", "granitemoehybrid",
    "gemma4_vision", "deepseek_v4", "cohere_compass_text", "moonshine_streaming",
]  # fmt: skip
MODELS = [
    "eva02_tiny_patch14_224", "vit_small_patch16_rope_mixed_224", "qwen3_vit_88m", "vit_base_patch16_sapiens2",
    "gemma4_vit_167m",
]  # fmt: skip


def library(name):
    pytest.importorskip(name)
    return importlib.import_module(f"lrpe_md.scripts.adapters.trial_{name}")


def candidate(name, own):
    """Return a transformers candidate by its type, or a timm candidate by its name."""
    if own == "timm":
        found = library("timm")
        return trial.Candidate(name, partial(found.build, name, found.read_shape(name)), found.call)
    found = library("transformers")
    return trial.Candidate(name, partial(found.build, name), found.call)


@pytest.mark.parametrize(("own", "name"), [*(("transformers", t) for t in TYPES), *(("timm", m) for m in MODELS)])
@pytest.mark.filterwarnings("ignore")
def test_models_are_adapted_whole(own, name):
    assert trial.try_model(own, candidate(name, own)) == (own, name, "adapted", "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vjepa2", "rejected .*rotate_queries_or_keys, which"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_others_are_refused_with_the_reason(name, reason):
    row = trial.try_model("transformers", candidate(name, "transformers"))
    assert row.outcome == "refused"
    assert re.search(reason, row.reason)


@pytest.mark.parametrize("what", ["values", "names", "restore", "error"])
@pytest.mark.filterwarnings("ignore")
def test_a_trial_notices_what_is_wrong(what, monkeypatch):
    rotate = plans.rotate
    trial.try_model("transformers", candidate("llama", "transformers"))  # probed before it is spoiled
    if what == "values":
        monkeypatch.setattr(plans, "rotate", lambda *xs, **kwargs: [y * (1 + 1e-3) for y in rotate(*xs, **kwargs)])
    elif what == "error":
        monkeypatch.setattr(plans, "rotate", lambda *xs, **kwargs: 1 / 0)
    elif what == "restore":
        monkeypatch.setattr(trial, "restore_rotary", lambda model: model)
    else:
        adapt = trial.adapt_rotary
        monkeypatch.setattr(trial, "adapt_rotary", lambda m: adapt(m).register_buffer("another", torch.zeros(1)))
    expected = {
        "values": "differs by", "names": "names of parameters", "restore": "restored", "error": "ZeroDivisionError",
    }[what]  # fmt: skip
    row = trial.try_model("transformers", candidate("llama", "transformers"))
    assert row.outcome == "wrong"
    assert row.reason.startswith(expected)


@pytest.mark.parametrize("name", LEAST)
def test_the_committed_table(name):
    counts = trial.count(trial.read(TABLES / f"{name}.csv"))
    assert counts["adapted"] >= LEAST[name]
    assert "wrong" not in counts


def test_refusals_are_few():
    refused = [row for name in LEAST for row in trial.read(TABLES / f"{name}.csv") if row.outcome == "refused"]
    assert len(refused) <= 25


def test_a_library_that_is_not_known():
    done = CliRunner().invoke(app, ["table", "--library", "keras"])
    assert done.exit_code == 2
    assert "expected one of timm, diffusers, transformers, got 'keras'" in " ".join(
        done.output.replace("│", " ").split()
    )


def test_a_table_is_written_line_by_line():
    file = io.StringIO()
    rows = [trial.Row("timm", "a", "adapted", ""), trial.Row("timm", "b", "refused", 'x, "y"')]
    assert trial.write(iter(rows), file) == rows
    assert [trial.Row(**line) for line in csv.DictReader(io.StringIO(file.getvalue()))] == rows


# --- images ----------------------------------------------------------------------------------------------------------


def dinov3(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DINOv3ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
        num_register_tokens=2, **changes,
    )  # fmt: skip
    return transformers.DINOv3ViTModel(config).eval()


@pytest.mark.parametrize("shape", [(32, 32), (24, 56)])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_patches_of_any_size(shape, scale):
    """Manually changed frequencies take effect."""
    model, x = dinov3(), torch.randn(2, 3, *shape)
    model.rope_embeddings.inv_freq.mul_(scale)
    expected = model(x).last_hidden_state
    found = adapt_rotary(model)(x).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.equal(restore_rotary(model)(x).last_hidden_state, expected)


def test_random_positions_in_training():
    x = torch.randn(1, 3, 32, 32)
    model = adapt_rotary(dinov3(pos_embed_rescale=2.0)).train()
    first, second = (model(x).last_hidden_state for _ in range(2))
    assert not torch.allclose(first, second)
    model = adapt_rotary(dinov3(pos_embed_rescale=None)).train()
    assert torch.equal(model(x).last_hidden_state, model(x).last_hidden_state)


class Shifted(nn.Module):
    """A rotary module for images with shifted patches."""

    def __init__(self, rope):
        super().__init__()
        self.inv_freq, self.config = nn.Buffer(rope.inv_freq.clone()), rope.config

    def forward(self, pixel_values):
        size = [n // self.config.patch_size for n in pixel_values.shape[-2:]]
        places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in size))
        angles = (places[:, :, None] * self.inv_freq).flatten(1).tile(2)
        return angles.cos(), angles.sin()


def test_another_rule_of_positions_is_followed():
    model, x = dinov3(), torch.randn(2, 3, 32, 32)
    before = model(x).last_hidden_state
    model.rope_embeddings = Shifted(model.rope_embeddings)
    expected = model(x).last_hidden_state
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(adapt_rotary(model)(x).last_hidden_state, expected, rtol=0, atol=1e-5)


def test_a_function_that_turns_what_stands_in_front(monkeypatch):
    """The model returns the same outputs before and after it is adapted."""
    model, x = dinov3(), torch.randn(2, 3, 32, 32)
    module = importlib.import_module(type(model).__module__)

    def turn_all(q, k, cos, sin):
        more = q.shape[-2] - cos.shape[-2]
        cos, sin = (torch.cat([t[:1].expand(more, -1), t]) for t in (cos, sin))
        return tuple(x * cos + module.rotate_half(x) * sin for x in (q, k))

    monkeypatch.setattr(module, "apply_rotary_pos_emb", turn_all)
    expected = model(x).last_hidden_state
    with contextlib.suppress(TypeError):
        adapt_rotary(model)
    torch.testing.assert_close(model(x).last_hidden_state, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_decoding_with_keys_that_layers_share():
    """If later layers read the keys of earlier ones, Gemma 4 continues with the last tokens of cos and sin."""
    transformers = pytest.importorskip("transformers")
    tiny = library("transformers")
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": kinds}
    config = tiny.shrink("gemma4_text", own)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model, x = transformers.Gemma4ForCausalLM(config).eval(), torch.randint(5, 20, (2, 9))
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(x, **options)
    found = adapt_rotary(model).generate(x, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)


# --- what is said ----------------------------------------------------------------------------------------------------


def test_a_report(capsys):
    transformers = pytest.importorskip("transformers")
    text = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16,
    }  # fmt: skip
    model = transformers.LlamaModel(transformers.LlamaConfig(**text))
    adapt_rotary(model, verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "adapted: layers.0.self_attn (LlamaAttention): apply_rotary_pos_emb",
    ]


def test_the_command(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("timm")
    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    config.save_pretrained(tmp_path)
    (tmp_path / "of any name.json").write_text((tmp_path / "config.json").read_text())
    for place in (tmp_path, tmp_path / "config.json", tmp_path / "of any name.json"):
        assert command.main([str(place)]) == 0
        assert capsys.readouterr().out == "adapted: layers.0.self_attn (LlamaAttention): apply_rotary_pos_emb\n"
    assert command.main(["eva02_tiny_patch14_224"]) == 0
    assert "adapted: blocks.0.attn (EvaAttention): apply_rot_embed_cat" in capsys.readouterr().out
    assert command.main(["vit_tiny_patch16_224"]) == 1
    assert capsys.readouterr().out.startswith(
        "not supported: model: expected a model that calls a function to rotate q and k"
    )
    assert command.main(["no_such_model"]) == 2
    assert "expected a configuration, or a model from timm.list_models()" in capsys.readouterr().err
    for place in (tmp_path / "none" / "config.json", "owner/config.json"):
        assert command.main([str(place)]) == 2
        assert capsys.readouterr().err == f"{place}: expected a configuration, got a path that does not exist\n"
    for name, content, found in (("text.txt", "To be", "a different kind of file"), ("list.json", "[1]", "list")):
        (tmp_path / name).write_text(content)
        assert command.main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert "expected a configuration" in error
        assert f"JSON object), got {found}" in error
    with pytest.raises(SystemExit):
        command.main([])
