"""Scaling at run time of models whose own code makes their frequencies."""

import copy
import pickle
from functools import partial

import pytest
import torch

from lrpe_md import adapt_rotary
from lrpe_md.frequencies import linear_scaling, riflex_scaling, yarn_scaling
from lrpe_md.integrations import prepare_scaling, restore_rotary, set_places, set_scaling

pytest.importorskip("diffusers")

from lrpe_md.integrations import diffusers_rule, exchange, tables, trial_diffusers
from lrpe_md.integrations.tables import Block, Table, to_tensor

pytestmark = pytest.mark.filterwarnings("ignore")

BOUND = 1e-5
QWEN, COGVIDEOX = "QwenImageTransformer2DModel", "CogVideoXTransformer3DModel"
RIFLEX = (partial(riflex_scaling, length=8, index=0), None, None)
YARN = partial(yarn_scaling, factor=4.0, original_length=2.0)


def output(model):
    with torch.no_grad():
        return next(iter(trial_diffusers.find_tensors(model(**trial_diffusers.inputs(model)))))


def pipeline_output(pipe):
    with torch.no_grad():
        return trial_diffusers.call_pipeline(pipe).outputs[0]


@pytest.fixture
def qwen():
    model = adapt_rotary(trial_diffusers.build(QWEN))
    output(model)
    return model


MIXED = (None, YARN, partial(linear_scaling, factor=2.0))


@pytest.mark.parametrize("scaling", [RIFLEX, YARN, MIXED], ids=["riflex", "yarn", "mixed"])
@pytest.mark.parametrize("name", ["WanTransformer3DModel", "HunyuanVideoTransformer3DModel"])
def test_as_where_frequencies_are_known(name, scaling):
    """The same model in both ways, with amplitudes that differ by axis."""
    known, made = adapt_rotary(trial_diffusers.build(name)), trial_diffusers.build(name)
    exchange.apply(diffusers_rule.plan_by_rule(made, "auto"))
    before = output(made)
    for model in (known, made):
        set_scaling(model, scaling)
    found = output(made)
    if name.startswith("Wan") or scaling is RIFLEX:  # the text of the other is a prefix there, and keeps amplitude 1
        torch.testing.assert_close(found, output(known), rtol=0, atol=BOUND)
    assert (found - before).abs().max() > 100 * BOUND
    set_scaling(made, None)
    assert torch.equal(output(made), before)


def test_prepared_and_compiled_once(qwen):
    """Scalings change in place: what is compiled before the first step stays."""
    set_scaling(qwen, None)
    scalings = [None, (None, YARN, YARN), (partial(linear_scaling, factor=3.0), None, None)]
    expected = []
    for scaling in scalings:
        set_scaling(qwen, scaling)
        expected.append(output(qwen))
    steps = [prepare_scaling(qwen, scaling) for scaling in scalings]
    compiled = torch.compile(qwen, backend="aot_eager", fullgraph=True)
    given = trial_diffusers.inputs(qwen)
    with torch.no_grad():
        compiled(**given)
        with torch.compiler.set_stance("fail_on_recompile"):
            for step, other in zip(steps, expected, strict=True):
                step.apply()
                torch.testing.assert_close(compiled(**given)[0], other, rtol=0, atol=BOUND)
    assert (expected[0] - expected[1]).abs().max() > 100 * BOUND


def test_gradients_flow(qwen):
    set_scaling(qwen, YARN)
    found = trial_diffusers.call(qwen)
    assert all(g.isfinite().all() for g in found.gradients.values())


def test_copies_have_their_own(qwen):
    set_scaling(qwen, YARN)
    expected = output(qwen)
    for copied in (copy.deepcopy(qwen), pickle.loads(pickle.dumps(qwen))):
        assert torch.equal(output(copied), expected)
        set_scaling(copied, None)
    assert torch.equal(output(qwen), expected)


def test_adapted_anew_they_are_as_trained(qwen):
    before = output(qwen)
    set_scaling(qwen, YARN)
    assert torch.equal(output(adapt_rotary(qwen)), before)
    set_scaling(qwen, YARN)
    stock = trial_diffusers.build(QWEN)
    assert torch.equal(output(restore_rotary(qwen)), output(stock))
    assert not any("scales" in vars(part) for part in exchange.parts(qwen).values())


def test_a_pipeline_that_makes_tables(monkeypatch):
    """Half the frequencies are those of diffusers' own linear_factor."""
    import diffusers.models.embeddings as embeddings

    stock = trial_diffusers.build_pipeline(COGVIDEOX)
    own = embeddings.get_1d_rotary_pos_embed
    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "get_1d_rotary_pos_embed", partial(own, linear_factor=2.0))
        expected = pipeline_output(stock)
    pipe = adapt_rotary(trial_diffusers.build_pipeline(COGVIDEOX))
    before = pipeline_output(pipe)
    set_scaling(pipe, partial(linear_scaling, factor=2.0))
    torch.testing.assert_close(pipeline_output(pipe), expected, rtol=0, atol=BOUND)
    assert (expected - before).abs().max() > 100 * BOUND
    set_scaling(pipe, RIFLEX)
    assert (pipeline_output(pipe) - before).abs().max() > 100 * BOUND
    set_scaling(pipe, None)
    assert torch.equal(pipeline_output(pipe), before)


def test_tensors_of_scaled_tables():
    coords, omega = torch.rand(5, 1), torch.rand(4, 1)
    blocks = [Block(coords, omega[:2], True, (), ("a",)), Block(coords, omega[2:], True, (), ("b",))]
    made = Table(blocks, "cos", torch.float32)
    ratio, gain = 1 + torch.rand(4, 2), 1 + torch.rand(4)
    scaled = tables.scale(made, ratio, gain, "key")
    turns = coords * (omega[:, 0] * torch.stack([ratio[0, 0], ratio[1, 0], ratio[2, 1], ratio[3, 1]]))
    expected = (turns.cos() * gain).repeat_interleave(2, -1)
    torch.testing.assert_close(to_tensor(scaled), expected)
    torch.testing.assert_close(to_tensor(scaled[1:, 2:6]), expected[1:, 2:6])
    torch.testing.assert_close(tables.read_angles(scaled).gain, gain)
    both = torch.cat([scaled, scaled[:2]])
    torch.testing.assert_close(to_tensor(both), torch.cat([expected, expected[:2]]))
    torch.testing.assert_close(to_tensor(torch.cat([scaled, made])), torch.cat([expected, to_tensor(made)]))
    halves = Table([*made.blocks, *made.blocks], "sin", torch.float32)
    halves = Table([block._replace(repeated=False) for block in halves.blocks], "sin", torch.float32)
    sines = turns.sin() * gain
    torch.testing.assert_close(to_tensor(tables.scale(halves, ratio, gain, "key")), torch.cat([sines, sines], -1))


def test_errors(qwen):
    with pytest.raises(ValueError, match=r"pos_embed: expected a model that was called once since adapt_rotary"):
        set_scaling(adapt_rotary(trial_diffusers.build(QWEN)), None)
    with pytest.raises(ValueError, match=r"scaling: expected one for each of 3 axes \(pos_embed\), got 2"):
        set_scaling(qwen, (None, YARN))
    with pytest.raises(ValueError, match="model: expected encodings on grids, got QwenImageTransformer2DModel, whose"):
        set_places(qwen, 0, torch.arange(3.0))
    mochi = adapt_rotary(trial_diffusers.build("MochiTransformer3DModel"))
    output(mochi)
    with pytest.raises(ValueError, match="expected frequencies of one axis a channel"):
        set_scaling(mochi, YARN)
