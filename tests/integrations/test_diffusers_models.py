"""Adapted diffusers models give the same results, with various processors and tables."""

import copy
import importlib
import pickle
from pathlib import Path

import pytest
import torch
from lrpe_md.scripts.adapters import trial

from lrpe_md import adapt_rotary
from lrpe_md.integrations import restore_rotary
from lrpe_md.integrations.rotary import exchanged_names, parts

pytest.importorskip("diffusers")

from lrpe_md.scripts.adapters import trial_diffusers

TABLE = Path(__file__).parents[2] / "scripts" / "results" / "adapters" / "diffusers.csv"
pytestmark = pytest.mark.filterwarnings("ignore")

SPREAD = [  # one model for each variant of rotary code
    "BriaFibo2Transformer2DModel", "ChronoEditTransformer3DModel", "CogView4Transformer2DModel",
    "CosmosTransformer3DModel", "ErnieImageTransformer2DModel", "Flux2Transformer2DModel",
    "HiDreamImageTransformer2DModel", "HunyuanImageTransformer2DModel", "LTXVideoTransformer3DModel",
    "LTX2VideoTransformer3DModel", "Lumina2Transformer2DModel", "MiniMaxH3Transformer3DModel",
    "MochiTransformer3DModel", "PRXTransformer2DModel", "QwenImageControlNetModel", "QwenImage21Transformer2DModel",
    "SanaVideoTransformer3DModel", "StableAudio3DiTModel", "ZImageTransformer2DModel",
]  # fmt: skip
QWEN, WAN = "QwenImageTransformer2DModel", "SkyReelsV2Transformer3DModel"


@pytest.mark.parametrize("name", SPREAD)
def test_models_are_adapted_whole(name):
    assert trial.try_model("diffusers", trial_diffusers.candidate(name)) == ("diffusers", name, "adapted", "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Ideogram4Transformer2DModel", "rejected .*_rotate_half, which"),
    ],
)  # fmt: skip
def test_others_are_refused_with_the_reason(name, reason):
    model = trial_diffusers.build(name)
    with pytest.raises(TypeError, match=reason):
        adapt_rotary(model)
    assert not is_adapted(model)


def is_adapted(model):
    return any(exchanged_names(part) for part in parts(model).values())


def test_the_committed_table():
    counts = trial.count(trial.read(TABLE))
    assert counts["adapted"] >= 46
    assert "wrong" not in counts


# --- whose code or tables are others -----------------------------------------------------------------------------


def compare(model, call=trial_diffusers.call):
    """Check that the adapted model agrees with the stock one, and that restoring undoes the change."""
    stock = call(model)
    found = call(adapt_rotary(model))
    assert is_adapted(model)
    assert trial.distance(found, stock) <= trial.BOUND
    again = call(restore_rotary(model))
    assert trial.distance(again, stock) == 0
    return stock


def test_a_theta_that_is_written_afterwards_is_followed():
    """This also works after the model has been adapted."""
    model = trial_diffusers.build("Flux2Transformer2DModel")
    first = compare(model)
    model.pos_embed.theta = 77
    second = compare(model)
    assert trial.distance(first, second) > 1e-3
    adapt_rotary(model).pos_embed.theta = 33
    found = trial_diffusers.call(model)
    assert trial.distance(found, trial_diffusers.call(restore_rotary(model))) <= trial.BOUND
    assert trial.distance(found, second) > 1e-3


def test_kept_tables_of_another_theta_are_followed():
    first = compare(trial_diffusers.build(QWEN))
    model = trial_diffusers.build(QWEN)  # without cached tables yet
    for name, start in (("pos_freqs", 0), ("neg_freqs", -4096)):
        rows = torch.arange(start, start + 4096, dtype=torch.float64)
        angles = [torch.outer(rows, 500.0 ** -(torch.arange(0, dim, 2).double() / dim)) for dim in (4, 6, 6)]
        table = torch.cat(angles, 1)
        setattr(model.pos_embed, name, torch.polar(torch.ones_like(table), table).to(torch.complex64))
    assert trial.distance(first, compare(model)) > 1e-3


def test_frequencies_that_are_scaled_by_hand_are_followed():
    model = trial_diffusers.build("MiniMaxH3Transformer3DModel")
    first = compare(model)
    model.rope.inv_freq.mul_(0.5)
    assert trial.distance(first, compare(model)) > 1e-3


@pytest.mark.parametrize("power", [1, 2])
def test_a_processor_of_the_users_is_followed(power):
    """The processor's changes to the tables take effect. Here, the processor doubles the angles."""
    model = trial_diffusers.build(QWEN)
    base = type(model.transformer_blocks[0].attn.processor)

    class Own(base):
        def __call__(
            self, attn, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None,
            attention_mask=None, image_rotary_emb=None,
        ):  # fmt: skip
            freqs = tuple(f * f if power == 2 else f for f in image_rotary_emb)
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, attention_mask, freqs
            )

    first = compare(model)
    model.transformer_blocks[0].attn.set_processor(Own())
    second = compare(model)
    assert (trial.distance(first, second) > 1e-3) == (power == 2)


class Reversed(importlib.import_module("diffusers.models.transformers.transformer_flux2").Flux2PosEmbed):
    def forward(self, ids):
        return [torch.flip(t, (0,)) for t in self.forward_of_stock(ids.flip(0))]

    def forward_of_stock(self, ids):
        angles = torch.outer(ids[:, 1].float(), 100.0 ** -(torch.arange(8) / 8))
        return angles.cos().repeat_interleave(2, dim=1), angles.sin().repeat_interleave(2, dim=1)


def test_a_rotary_module_of_the_users_is_followed():
    model = trial_diffusers.build("Flux2Transformer2DModel")
    first = compare(model)
    model.pos_embed.__class__ = Reversed
    assert trial.distance(first, compare(model)) > 1e-3


def test_axes_that_do_not_fill_a_head():
    """The library raises its own error, whether the model is adapted or not."""
    torch.manual_seed(0)
    model = trial_diffusers.build("Flux2Transformer2DModel")
    model.pos_embed.axes_dim = (4, 4, 4, 2)
    with pytest.raises(RuntimeError):
        trial_diffusers.call(model)
    with pytest.raises(RuntimeError):
        trial_diffusers.call(adapt_rotary(model))


# --- as models are used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [QWEN, WAN, "FluxTransformer2DModel"])
def test_processors_that_are_set_afterwards(name):
    """New processors run the library's code until the model is adapted again."""
    model = trial_diffusers.build(name)
    kinds = {path: type(part) for path, part in parts(model).items() if path.endswith("processor")}
    stock = trial_diffusers.call(model)
    adapt_rotary(model)
    adapted = [path for path, kind in kinds.items() if type(parts(model)[path]) is not kind]
    assert adapted
    for path in adapted:
        model.get_submodule(path.rpartition(".")[0]).set_processor(kinds[path]())
    assert not is_adapted(model)
    assert trial.distance(trial_diffusers.call(model), stock) == 0
    assert trial.distance(trial_diffusers.call(adapt_rotary(model)), stock) <= trial.BOUND
    assert is_adapted(model)


@pytest.mark.parametrize("options", [{}, {"skip_attention": False, "skip_attention_scores": True}])
def test_layers_that_are_skipped(options):
    """Guidance with skipped layers looks up a processor's settings by its exact class, also after adapting."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    config = LayerSkipConfig(indices=[1], skip_ff=False, **options)
    model = trial_diffusers.build("CogView4Transformer2DModel")
    adapted, whole = adapt_rotary(copy.deepcopy(model)), trial_diffusers.call(model)
    apply_layer_skip(model, config)
    apply_layer_skip(adapted, config)
    stock = trial_diffusers.call(model)
    assert trial.distance(stock, whole) > trial.BOUND
    assert trial.distance(trial_diffusers.call(adapted), stock) <= trial.BOUND


def test_an_ip_adapter():
    """The IP-Adapter's processor is a module with its own weights."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    torch.manual_seed(0)
    model, images = trial_diffusers.build("FluxTransformer2DModel"), [torch.randn(2, 4, 16)]
    model.transformer_blocks[0].attn.set_processor(FluxIPAdapterAttnProcessor(32, 16))

    def call(model):
        given = trial_diffusers.inputs(model)
        outputs = model(**given, joint_attention_kwargs={"ip_hidden_states": images})
        return trial.differentiate(model, [outputs[0]])

    compare(model, call)
    assert exchanged_names(parts(adapt_rotary(model))["transformer_blocks.0.attn.processor"])


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_fork_in_a_module_of_another_name(where, tmp_path, monkeypatch):
    """The same code is recognised under another module name, as in trainers that vendor it."""
    import diffusers.models.transformers.transformer_flux as flux

    source = Path(flux.__file__).read_text(encoding="utf-8")
    source = source.replace("from ...", "from diffusers.").replace("from ..", "from diffusers.models.")
    (tmp_path / f"fork_{where}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = trial_diffusers.build("FluxTransformer2DModel")
    fork = importlib.import_module(f"fork_{where}").FluxTransformer2DModel(**model.config)
    fork.load_state_dict(model.state_dict())
    if where == "after":
        adapt_rotary(model)
    compare(fork.eval())


def test_other_models_of_the_process_are_left_alone():
    one, other = (trial_diffusers.build(QWEN) for _ in range(2))
    stock = trial_diffusers.call(other)
    kinds = [type(part) for part in parts(other).values()]
    adapt_rotary(one)
    assert type(one) is type(other)
    assert [type(part) for part in parts(other).values()] == kinds
    assert trial.distance(trial_diffusers.call(other), stock) == 0
    assert not is_adapted(trial_diffusers.build(QWEN))


@pytest.mark.parametrize("name", [QWEN, "ZImageTransformer2DModel"])
def test_copies_and_files(name):
    model = trial_diffusers.build(name)
    stock = trial_diffusers.call(model)
    adapt_rotary(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = trial_diffusers.call(made)
        assert trial.distance(found, stock) <= trial.BOUND
        assert trial.distance(trial_diffusers.call(restore_rotary(made)), stock) == 0
    assert trial.distance(trial_diffusers.call(model), stock) <= trial.BOUND


@pytest.mark.parametrize("name", [QWEN, WAN])
def test_checkpointing(name):
    model = trial_diffusers.build(name).train()
    model.enable_gradient_checkpointing()
    compare(model)


@pytest.mark.parametrize("name", [QWEN, WAN])
def test_sixteen_bits(name):
    model = trial_diffusers.build(name).to(torch.bfloat16)
    given = trial_diffusers.inputs(model)
    floats = {k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
    with torch.no_grad():
        stock = model(**floats).sample
        found = adapt_rotary(model)(**floats).sample
    assert found.dtype == torch.bfloat16
    assert (found - stock).float().norm() < 0.02 * stock.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", [QWEN, "LTXVideoTransformer3DModel"])
def test_compiling_breaks_no_graph_that_the_original_keeps(name):
    model = trial_diffusers.build(name)
    given = trial_diffusers.inputs(model)
    stock = model(**given).sample
    torch._dynamo.reset()
    found = torch.compile(adapt_rotary(model), backend="eager", fullgraph=True)(**given).sample
    torch.testing.assert_close(found, stock, rtol=0, atol=1e-5)
