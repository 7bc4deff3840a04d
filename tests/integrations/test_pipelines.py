"""In diffusers pipelines, denoisers are adapted, whether they or the pipelines compute the tables."""

import copy
import inspect

import pytest
import torch
from lrpe_md.scripts.adapters import trial

from lrpe_md import adapt_rotary
from lrpe_md.integrations import restore_rotary
from lrpe_md.integrations.rotary import exchanged_names, parts

pytest.importorskip("diffusers")

import diffusers
from lrpe_md.scripts.adapters import trial_diffusers

pytestmark = pytest.mark.filterwarnings("ignore")

BOUND = 1e-5
COGVIDEOX = "CogVideoXTransformer3DModel"
METHOD = "_prepare_rotary_positional_embeddings"


def in_pipeline(cls, model):
    """Build a pipeline that only has its denoiser."""
    names = inspect.signature(cls.__init__).parameters
    return cls(**{**{name: None for name in names if name != "self"}, "transformer": model})


def step(pipe, height=64, width=96, frames=3):
    """Run one denoising step as CogVideoX's pipeline does."""
    generator = torch.Generator().manual_seed(0)
    made = getattr(pipe, METHOD)(height, width, frames, torch.device("cpu"))
    x = torch.randn(2, frames, 4, height // 8, width // 8, generator=generator)
    text = torch.randn(2, 5, 24, generator=generator)
    return pipe.transformer(x, text, torch.tensor([300, 700]), image_rotary_emb=made, return_dict=False)[0]


@pytest.fixture
def pipe():
    return trial_diffusers.build_pipeline(COGVIDEOX)


def is_adapted(model):
    return any(exchanged_names(part) for part in parts(model).values())


@pytest.mark.parametrize("name", list(trial_diffusers.PIPELINES))
def test_outputs_gradients_and_restored(name):
    row = trial.try_model("diffusers", trial_diffusers.candidate(name))
    assert (row.outcome, row.reason) == ("adapted", "")


@pytest.mark.parametrize("sizes", [(64, 96, 4), (64, 64, 2), (48, 112, 6)])
@pytest.mark.parametrize("name", ["", "ImageToVideo", "VideoToVideo"])
def test_sizes_and_both_versions(name, sizes):
    """CogVideoX 1.0 stretches the grid to the training size. 1.5 crops it, and a patch spans several frames."""
    for patch_size_t in (None, 2):
        torch.manual_seed(0)
        config = {**trial_diffusers.build(COGVIDEOX).config, "patch_size_t": patch_size_t}
        config.update(sample_height=16, sample_width=16, patch_bias=patch_size_t is None)
        made = diffusers.CogVideoXTransformer3DModel.from_config(config)
        for p in made.parameters():
            torch.nn.init.normal_(p, std=0.2)
        pipe = in_pipeline(getattr(diffusers, f"CogVideoX{name}Pipeline"), made)
        expected = step(pipe, *sizes)
        torch.testing.assert_close(step(adapt_rotary(pipe), *sizes), expected, rtol=0, atol=BOUND)


def test_positions_are_followed(pipe):
    """Each call uses the positions that the pipeline passes."""
    adapt_rotary(pipe)
    before = step(pipe)
    pipe.transformer.register_to_config(sample_height=32, sample_width=32)
    found = step(pipe)
    assert (found - before).abs().max() > 100 * BOUND
    torch.testing.assert_close(step(restore_rotary(pipe)), found, rtol=0, atol=BOUND)


def test_another_pipeline_of_the_same_models(pipe):
    expected = step(pipe)
    adapt_rotary(pipe)
    other = diffusers.CogVideoXImageToVideoPipeline(**pipe.components)
    assert is_adapted(other)
    torch.testing.assert_close(step(other), expected, rtol=0, atol=BOUND)
    assert torch.equal(step(restore_rotary(other)), expected)


def test_restored_and_copied(pipe):
    names, expected = list(vars(pipe)), step(pipe)
    assert adapt_rotary(adapt_rotary(pipe)) is pipe
    assert is_adapted(pipe)
    found = step(pipe)
    assert torch.equal(step(copy.deepcopy(pipe)), found)
    assert restore_rotary(pipe) is pipe
    assert torch.equal(step(pipe), expected)
    assert list(vars(pipe)) == names
    assert not is_adapted(pipe)


@pytest.mark.slow
def test_compiled_once(pipe):
    """This also holds if the pipeline makes new tables for each video."""
    adapt_rotary(pipe)
    expected, model = step(pipe), pipe.transformer
    with torch.no_grad():
        pipe.transformer = torch.compile(model, backend="aot_eager", fullgraph=True)
        step(pipe)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(step(pipe), expected, rtol=0, atol=BOUND)


def test_denoisers_with_tables_of_their_own(capsys):
    model = trial_diffusers.build("FluxTransformer2DModel")
    pipe = in_pipeline(diffusers.FluxPipeline, model)
    expected = trial_diffusers.call(model)
    adapt_rotary(pipe, verbose=True)
    line = "adapted: transformer.transformer_blocks.0.attn.processor (FluxAttnProcessor): apply_rotary_emb"
    assert line in capsys.readouterr().out.splitlines()
    found = trial_diffusers.call(model)
    assert trial.distance(found, expected) < trial.BOUND
    assert trial.distance(trial_diffusers.call(restore_rotary(pipe).transformer), expected) == 0


def test_of_two_denoisers_both(monkeypatch):
    """Wan 2.2 has one denoiser for noise and one for details."""
    models = [trial_diffusers.build("WanTransformer3DModel") for _ in range(2)]
    pipe = in_pipeline(diffusers.WanPipeline, models[0])
    pipe.register_modules(transformer_2=models[1])
    adapt_rotary(pipe)
    assert all(is_adapted(model) for model in models)


def test_text_encoders_stay():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(vocab_size=8, num_key_value_heads=2, **sizes))
    pipe = in_pipeline(diffusers.FluxPipeline, trial_diffusers.build("FluxTransformer2DModel"))
    pipe.register_modules(text_encoder=encoder)
    adapt_rotary(pipe)
    assert is_adapted(pipe)
    assert not is_adapted(encoder)


def test_refusals():
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(4,), norm_num_groups=2, layers_per_block=1,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"got diffusers.*DDPMPipeline; found no such function"):
        adapt_rotary(diffusers.DDPMPipeline(unet, scheduler=None))


def test_a_denoiser_without_its_pipeline():
    """Tables are an argument, no matter who computes them."""
    model = trial_diffusers.build(COGVIDEOX)
    pipe = in_pipeline(diffusers.CogVideoXPipeline, model)
    expected = step(pipe)
    adapt_rotary(model)
    torch.testing.assert_close(step(pipe), expected, rtol=0, atol=BOUND)
