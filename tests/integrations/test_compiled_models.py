"""Adapting adds no graph breaks to compiled models. test_rotary_models.py and test_diffusers_models.py test others."""

import copy
from functools import partial

import pytest
import torch
from parametrizing import slow_except
from torch._dynamo.testing import CompileCounter

from lrpe_md import adapt_rotary

OF_TRANSFORMERS = ("qwen3", "dinov3_vit", "qwen3_vl_vision", "gemma4_vision")
NAFLEX = ("axial", "mixed", "dinov3")
IMAGE = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def transformers_model(name):
    pytest.importorskip("transformers")
    from lrpe_md.scripts.adapters import trial_transformers

    model = trial_transformers.build(name)
    given = trial_transformers.inputs(model)
    return model, lambda m: m(**given, return_dict=False)[0]


def naflex(rope_type):
    pytest.importorskip("timm", minversion="1.0.31")
    from lrpe_md.scripts.adapters import trial_timm

    given = trial_timm.patches(3 * 4**2)
    # Learned positions are left out, because timm also makes their tables outside of graphs.
    return trial_timm.build_naflex(rope_type, pos_embed="none"), lambda m: m(given)


CASES = {name: partial(transformers_model, name) for name in OF_TRANSFORMERS}
CASES |= {f"naflexvit, {name}": partial(naflex, name) for name in NAFLEX}


@pytest.mark.parametrize("name", slow_except(["qwen3"], CASES))
@pytest.mark.filterwarnings("ignore")
def test_compiling_breaks_no_graph_that_the_original_keeps(name):
    model, call = CASES[name]()
    counted, found = torch._dynamo.utils.counters, []
    for m in (model, adapt_rotary(copy.deepcopy(model))):
        torch._dynamo.reset()
        counted.clear()
        counter = CompileCounter()
        with torch.no_grad():
            torch.testing.assert_close(call(torch.compile(m, backend=counter)), call(model), rtol=0, atol=1e-5)
        found.append((counter.frame_count, sum(counted["graph_break"].values())))
    stock, adapted = found
    assert 1 <= adapted[0] <= stock[0]
    assert adapted[1] <= stock[1]


def augmented_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    strengths = {"pos_embed_shift": 0.1, "pos_embed_jitter": 1.2, "pos_embed_rescale": 2.0}
    config = transformers.DINOv3ViTConfig(image_size=32, **sizes, **strengths)
    return transformers.DINOv3ViTModel(config), lambda m: m(IMAGE)[0]


def augmented_timm():
    timm = pytest.importorskip("timm", minversion="1.0.31")
    strengths = {"rope_shift_coords": 0.1, "rope_jitter_coords": 1.2, "rope_rescale_coords": 2.0}
    sizes = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "dynamic_img_size": True}
    model = timm.create_model("vit_small_patch16_dinov3", **sizes, **strengths)
    with torch.no_grad():
        for p in model.parameters():  # positions matter
            p.add_(torch.randn_like(p), alpha=0.1)
    return model, lambda m: m(IMAGE)


@pytest.mark.slow
@pytest.mark.parametrize("make", slow_except([augmented_timm], [augmented_transformers, augmented_timm]))
@pytest.mark.filterwarnings("ignore")
def test_nor_where_positions_are_drawn_in_training(make):
    model, call = make()
    counted, breaks = torch._dynamo.utils.counters, []
    for m in (model.train(), adapt_rotary(copy.deepcopy(model)).train()):
        torch._dynamo.reset()
        counted.clear()
        compiled = torch.compile(m, backend="aot_eager")
        outputs = [call(compiled) for _ in range(2)]
        outputs[0].square().sum().backward()
        breaks.append(sum(counted["graph_break"].values()))
    stock, adapted = breaks
    assert adapted <= stock
    assert not torch.equal(*outputs)
