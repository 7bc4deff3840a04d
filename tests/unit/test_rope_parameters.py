"""Compare rope_frequencies with transformers' ROPE_INIT_FUNCTIONS, which compute in float32."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from lrpe_md import convert_pairs, geometric_theta, rope_frequencies
from lrpe_md.frequencies.rope_parameters import RULES

LONG = {"short_factor": [1.0 + 0.1 * i for i in range(32)], "long_factor": [1.0 + 2.0 * i for i in range(32)]}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TABLE = {  # fields, and differences from head_dim 64 and a length of 4096
    "linear": ({"rope_type": "linear", "factor": 4.0}, {}),
    "linear, another base": ({"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5}, {}),
    "linear, partial": ({"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.25}, {}),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, {}),
    "dynamic, short": ({"rope_type": "dynamic", "factor": 2.0}, {"seq_len": 100}),
    "dynamic, long": ({"rope_type": "dynamic", "factor": 2.0}, {"seq_len": 10_000}),
    "dynamic, partial": ({"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.5}, {"seq_len": 9000}),
    "yarn": (YARN, {}),
    "yarn, not truncated": ({**YARN, "truncate": False}, {}),
    "yarn, betas": ({**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, {}),
    "yarn, attention factor": ({**YARN, "attention_factor": 0.7}, {}),
    "yarn, mscale": ({**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}, {}),
    "yarn, equal mscales": ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e6}, {}),
    "yarn, mscale alone": ({**YARN, "mscale": 0.707}, {}),
    "yarn, factor by lengths": ({**YARN, "factor": None}, {}),
    "yarn, no original length": ({"rope_type": "yarn", "factor": 4.0}, {}),
    "yarn, not stretched": ({**YARN, "factor": 1.0}, {}),
    "yarn, partial": ({**YARN, "partial_rotary_factor": 0.5}, {"head_dim": 128}),
    "yarn, a short original": ({**YARN, "original_max_position_embeddings": 128}, {}),
    "longrope": ({"rope_type": "longrope", "original_max_position_embeddings": 1024, **LONG}, {}),
    "longrope, at its length": (
        {"rope_type": "longrope", "original_max_position_embeddings": 1024, **LONG}, {"seq_len": 1024},
    ),
    "longrope, beyond": (
        {"rope_type": "longrope", "original_max_position_embeddings": 1024, **LONG}, {"seq_len": 1025},
    ),
    "longrope, factor": ({"rope_type": "longrope", "factor": 16.0, **LONG}, {"seq_len": 5000}),
    "longrope, attention factor": (
        {"rope_type": "longrope", "original_max_position_embeddings": 1024, "attention_factor": 1.1, **LONG}, {},
    ),
    "longrope, partial": (
        {"rope_type": "longrope", "original_max_position_embeddings": 1024, "partial_rotary_factor": 0.5, **LONG},
        {"head_dim": 128, "seq_len": 2000},
    ),
    "llama3": ({**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 2048, "rope_theta": 5e5}, {}),
    "llama3, 3.2": (
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
        {"max_position_embeddings": 131072, "head_dim": 128},
    ),
    "llama3, partial": ({**LLAMA3, "factor": 4.0, "partial_rotary_factor": 0.75}, {}),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, {}),
    "proportional, factor": (
        {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 8.0, "rope_theta": 1e6}, {},
    ),
    "proportional, all": ({"rope_type": "proportional"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_values_equal_transformers(name):
    rope_utils = pytest.importorskip("transformers", minversion="5.23").modeling_rope_utils
    from transformers import LlamaConfig

    fields, changes = copy.deepcopy(TABLE[name])
    head_dim, length = changes.get("head_dim", 64), changes.get("max_position_embeddings", 4096)
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=length,
        rope_parameters={"rope_theta": 10000.0, **fields},
    )  # fmt: skip
    function = rope_utils.ROPE_INIT_FUNCTIONS[fields["rope_type"]]
    expected, factor = function(config, "cpu", seq_len=changes.get("seq_len"))
    # the fields in a user's file, and in transformers' normalised form
    for given in (TABLE[name][0], config.rope_parameters):
        theta, amplitude = rope_frequencies(given, head_dim, length, changes.get("seq_len"), base=1e4)
        assert theta.dtype == torch.float64
        torch.testing.assert_close(theta, expected.double(), rtol=2e-6, atol=0)
        assert amplitude == pytest.approx(factor, rel=1e-12)


def test_the_table_has_every_type():
    rope_utils = pytest.importorskip("transformers", minversion="5.23").modeling_rope_utils
    types = {fields["rope_type"] for fields, _ in TABLE.values()}
    assert types == set(rope_utils.ROPE_INIT_FUNCTIONS) == set(RULES) - {"default", "ntk"}


def test_default():
    for fields in (None, {}, {"rope_type": "default", "rope_theta": 10000.0}):
        theta, amplitude = rope_frequencies(fields, 64, base=1e4)
        assert torch.equal(theta, geometric_theta(32))
        assert amplitude == 1
    assert torch.equal(rope_frequencies({}, 64, base=500.0)[0], geometric_theta(32, 500.0))
    assert torch.equal(rope_frequencies({"rope_theta": 7.0}, 64, base=500.0)[0], geometric_theta(32, 7.0))
    assert len(rope_frequencies({"partial_rotary_factor": 0.25}, 64, base=1e4)[0]) == 8
    assert rope_frequencies(None, 64, base=1e4, dtype=torch.float32)[0].dtype == torch.float32


def test_ntk_and_the_old_name_of_the_type():
    theta, amplitude = rope_frequencies({"type": "ntk", "factor": 4.0}, 64, base=1e4)
    torch.testing.assert_close(theta, geometric_theta(32, 1e4 * 4 ** (64 / 62)))
    assert amplitude == 1
    found = rope_frequencies({"type": "linear", "factor": 4.0}, 64, base=1e4)[0]
    assert torch.equal(found, geometric_theta(32) / 4)


@pytest.mark.parametrize("seq_len", [None, 10_000])
def test_dynamic_with_a_fixed_alpha(seq_len):
    """In HunYuan's configs, alpha multiplies the base at all lengths."""
    fields = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 1e4}
    theta, amplitude = rope_frequencies(fields, 64, 4096, seq_len)
    torch.testing.assert_close(theta, geometric_theta(32, 1e4 * 1000 ** (64 / 62)))
    assert amplitude == 1


def test_dynamic_alpha_of_transformers():
    hunyuan = pytest.importorskip("transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense")
    fields = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 1e4}
    config = hunyuan.HunYuanDenseV1Config(hidden_size=64, head_dim=32, rope_parameters=fields)
    expected = hunyuan.HunYuanDenseV1RotaryEmbedding(config).inv_freq
    found, _ = rope_frequencies(config.rope_parameters, 32, config.max_position_embeddings)
    torch.testing.assert_close(found.float(), expected)


def test_yarn_amplitude():
    assert rope_frequencies(YARN, 64, base=1e4)[1] == pytest.approx(0.1 * math.log(8) + 1)


@pytest.mark.parametrize(
    ("fields", "head_dim", "message"),
    [
        ({"rope_type": "spiral"}, 64, r"rope_type: expected one of \('default', .*got 'spiral'"),
        ({"rope_type": "linear"}, 64, r"a field 'factor' for rope_type 'linear', got the fields \['rope_type'\]"),
        ({"rope_type": "dynamic", "factor": 2.0}, 64, "max_position_embeddings: .*'dynamic', got None"),
        ({"rope_type": "yarn", "factor": 2.0}, 64, "max_position_embeddings: .*'yarn'"),
        ({"rope_type": "yarn"}, 64, "expected a field 'factor' for rope_type 'yarn'"),
        ({"partial_rotary_factor": "0.5"}, 64, "partial_rotary_factor: expected a finite positive number, got '0.5'"),
        ({"partial_rotary_factor": 1.5}, 64, "partial_rotary_factor: expected at most 1, got 1.5"),
        ({"rope_type": "linear", "factor": "4"}, 64, "factor: expected a finite positive number, got '4'"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}, 64, "a field 'factor' for"),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}, 64, "'long_factor'"),
        ({**LLAMA3, "high_freq_factor": None, "factor": 8.0}, 64, "'high_freq_factor'"),
        ({"factor": 4.0}, 64, "rope_type: expected a scaling type that uses 'factor', got None"),
        ({"full_attention": {"rope_theta": 1e6}}, 64, r"config\.rope_parameters\['full_attention'\]"),
        ({"partial_rotary_factor": 0.3}, 10, r"head_dim: expected an even number of rotated channels, got 3 of 10"),
    ],
)
def test_errors(fields, head_dim, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(fields, head_dim, base=1e4)


def test_a_config_instead_of_its_fields():
    with pytest.raises(TypeError, match=r"expected a dict, got SimpleNamespace; .* pass config\.rope_parameters"):
        rope_frequencies(SimpleNamespace(rope_parameters={"rope_theta": 1e4}), 64)


@pytest.mark.parametrize("fields", [None, {"rope_type": "linear", "factor": 4.0}])
def test_a_base_outside_the_fields_is_not_assumed(fields):
    with pytest.raises(ValueError, match=r"base: expected the model's rope_theta, .*pass base=config\.rope_theta"):
        rope_frequencies(fields, 64)


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_equal_lengths_give_no_factor(kind):
    fields = {"rope_type": kind, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    with pytest.raises(ValueError, match=f"rope_parameters: expected a field 'factor' for rope_type '{kind}'"):
        rope_frequencies(fields, 64, 4096, base=1e4)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_frequencies_of_a_model_on_the_meta_device(kind):
    fields = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    expected, _ = rope_frequencies(fields, 8, 64)
    with torch.device("meta"):
        theta, _ = rope_frequencies(fields, 8, 64)
        weight = convert_pairs(torch.ones(8, 2, device="cpu"), "half", "interleaved", head_dim=8)
    assert torch.equal(theta, expected)
    assert weight.device.type == "cpu"


@pytest.mark.filterwarnings("error")
def test_a_misspelt_field_is_reported():
    """Fields of other kinds are ignored silently, such as the sections of multimodal models."""
    fields = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    rope_frequencies(fields, 16)
    with pytest.warns(UserWarning, match="field 'beta_fsat' is ignored; did you mean 'beta_fast'") as caught:
        rope_frequencies({**fields, "beta_fsat": 16.0}, 16)
    assert caught[0].filename == __file__
