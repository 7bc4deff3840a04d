"""transformers' language models give the same results with our encoding, for whole sequences and step by step."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from test_rotary_models import BOUND, TEXT, calls, library, randomize, same  # noqa: F401
from torch import nn

from lrpe_md import CosineMd, HeadDecay, PresetMd, RotateMd, adapt_rotary
from lrpe_md.integrations import restore_rotary

LENGTH = 9
PARTIAL = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8,
    "short_factor": [1.0 + i for i in range(8)], "long_factor": [1.0 + 3.0 * i for i in range(8)],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {  # model, its own configuration
    "llama": ("Llama", {}),
    "llama, another width": ("Llama", {"head_dim": 24}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 6},
    ),
    "llama, longrope": ("Llama", {"rope_parameters": LONG}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "granite": ("Granite", {}),
    "phi": ("Phi", {"rope_parameters": PARTIAL}),
    "phi3": ("Phi3", {"rope_parameters": PARTIAL}),
    "glm": ("Glm", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "glm4": ("Glm4", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", {"layer_types": ["sliding_attention", "sliding_attention"]}),
}  # fmt: skip
FEW = ["llama", "llama, dynamic", "mistral", "glm", "cohere"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def causal_lm(name="llama"):
    model, own = MODELS[name]
    transformers = library("transformers")
    config = getattr(transformers, f"{model}Config")(**{**TEXT, **own})
    return randomize(getattr(transformers, f"{model}ForCausalLM")(config))


def logits(model, x):
    """Compute logits from embeddings, so that there is a gradient to compare."""
    return model(inputs_embeds=x).logits


def embeddings():
    return torch.randn(2, LENGTH, 64, generator=torch.Generator().manual_seed(3))


def padded():
    """Return two samples of 9 and 5 tokens, padded on the left."""
    ids = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids.where(mask.bool(), 0), mask, (mask.cumsum(1) - 1).clamp_min(0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, calls):  # noqa: F811
    model = causal_lm(name)
    adapted = adapt_rotary(copy.deepcopy(model))
    same(model, adapted, logits, embeddings())
    assert calls == [2] * 2  # one call per layer, with q and k together
    with torch.no_grad():
        moved = adapted(inputs_embeds=embeddings(), position_ids=torch.zeros(1, LENGTH, dtype=torch.int64)).logits
    assert (moved - logits(model, embeddings())).abs().max() > 1e-3
    assert list(adapted.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", FEW)
def test_prefill_and_decode_of_unequal_lengths(name, calls):  # noqa: F811
    """With left padding and a cache, each step's logits equal those of the original and of the whole sequence."""
    model = causal_lm(name)
    adapted = adapt_rotary(copy.deepcopy(model))
    ids, mask, positions = padded()
    whole, mine, start = [], [], 5
    with torch.no_grad():
        for m, steps in ((model, whole), (adapted, mine)):
            out = m(ids[:, :start], attention_mask=mask[:, :start], position_ids=positions[:, :start], use_cache=True)
            steps.append(out.logits[:, -1])
            for t in range(start, LENGTH):
                part = slice(t, t + 1)
                out = m(
                    ids[:, part], attention_mask=mask[:, : t + 1], position_ids=positions[:, part],
                    past_key_values=out.past_key_values, use_cache=True,
                )  # fmt: skip
                steps.append(out.logits[:, -1])
        torch.testing.assert_close(torch.stack(mine), torch.stack(whole), rtol=0, atol=BOUND)
        if "dynamic" not in name:  # dynamic frequencies change as the cache grows
            full = adapted(ids, attention_mask=mask, position_ids=positions).logits[:, start - 1 :]
            torch.testing.assert_close(torch.stack(mine, 1), full, rtol=0, atol=BOUND)
    assert calls == [2] * len(calls) != []


@pytest.mark.parametrize("name", ["llama", "glm"])
def test_generation(name):
    model = causal_lm(name)
    adapted = adapt_rotary(copy.deepcopy(model))
    ids, mask, _ = padded()
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, found = (m.generate(ids, attention_mask=mask, **options) for m in (model, adapted))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=BOUND)


def test_made_and_adapted_on_the_meta_device():
    """transformers builds models this way. Probe tensors still have values."""
    model, x = causal_lm(), embeddings()
    expected, state = logits(model, x), model.state_dict()
    with torch.device("meta"):
        made = adapt_rotary(type(model)(model.config))
    made.to_empty(device="cpu").init_weights()
    made.load_state_dict(state)
    torch.testing.assert_close(logits(made, x), expected, rtol=0, atol=BOUND)


def test_frequencies_by_hand_are_kept():
    """The buffer then differs from the configuration."""
    model = causal_lm()
    model.model.rotary_emb.inv_freq.mul_(0.3)
    adapted = adapt_rotary(copy.deepcopy(model))
    same(model, adapted, logits, embeddings())


def reference_rotary(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate like another library."""
    half = q.shape[-1] // 2
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))


def test_a_function_that_another_library_sets_afterwards(monkeypatch, calls):  # noqa: F811
    """Liger patches models this way. Adapted models keep our function until they are adapted again."""
    library("transformers")
    from transformers.models.llama import modeling_llama

    model = causal_lm()
    expected = logits(model, embeddings())
    adapted = adapt_rotary(copy.deepcopy(model))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", reference_rotary)
    for _ in range(2):
        calls.clear()
        torch.testing.assert_close(logits(adapted, embeddings()), expected, rtol=0, atol=BOUND)
        assert calls == [2] * 2
        adapt_rotary(adapted)
    calls.clear()
    torch.testing.assert_close(logits(model, embeddings()), expected, rtol=0, atol=BOUND)
    assert not calls


@pytest.mark.parametrize("bound", ["class", "instance"])
def test_a_function_that_was_imported_by_name(bound, calls):  # noqa: F811
    """The attention comes from another file, as a module or as a replaced forward."""
    library("transformers")
    from types import MethodType, ModuleType

    from transformers.models.llama import modeling_llama

    other = ModuleType("other_attention")
    vars(other).update(vars(modeling_llama), apply_rotary_pos_emb=reference_rotary)
    source = inspect.getsource(modeling_llama.LlamaAttention)
    exec(source[source.index("class LlamaAttention") :], vars(other))
    model = causal_lm()
    expected = logits(model, embeddings())
    for layer in model.model.layers:
        if bound == "class":
            layer.self_attn.__class__ = other.LlamaAttention
        else:
            layer.self_attn.forward = MethodType(other.LlamaAttention.forward, layer.self_attn)
    torch.testing.assert_close(logits(model, embeddings()), expected, rtol=0, atol=BOUND)
    assert not calls
    torch.testing.assert_close(logits(adapt_rotary(model), embeddings()), expected, rtol=0, atol=BOUND)
    assert calls == [2] * 2


def test_restored_and_unadapted_models_are_as_they_were(calls):  # noqa: F811
    model = causal_lm()
    adapted = adapt_rotary(copy.deepcopy(model))
    expected = logits(model, embeddings())
    assert not calls
    logits(adapted, embeddings())
    assert calls
    restored = restore_rotary(adapted)
    calls.clear()
    assert torch.equal(logits(restored, embeddings()), expected)
    assert not calls
    assert [type(part) for part in restored.modules()] == [type(part) for part in model.modules()]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEW)
def test_on_a_gpu(name):
    model = causal_lm(name).cuda()
    adapted = adapt_rotary(copy.deepcopy(model), impl="triton")
    same(model, adapted, logits, embeddings().cuda())


def custom_model(build):
    """Return the class of a user's model that contains the module from ``build``."""
    transformers = library("transformers")

    class Custom(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.linear, self.encoding = nn.Linear(2, 2), build()
            self.post_init()

    return Custom


def own_tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


OWN = {
    "rotate": lambda: RotateMd(16, 2, amplitude=1.5),
    "learned": lambda: CosineMd(16, 2, learnable=True, phase=True),
    "preset": lambda: PresetMd("dinov3", head_dim=16),
    "learned preset": lambda: PresetMd("dinov3", head_dim=16, learnable=True),
    "decay": lambda: HeadDecay(4),
    "learned decay": lambda: HeadDecay(4, learnable=True),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "missing from the checkpoint"])
def test_modules_in_a_model_from_pretrained(name, is_saved, tmp_path):
    """transformers builds a model on the meta device, and replaces tensors outside the checkpoint by empty ones."""
    cls = custom_model(OWN[name])
    model = cls(cls.config_class())
    with torch.no_grad():
        for parameter in model.encoding.parameters():
            parameter.add_(0.1)
    expected = own_tensors(model.encoding if is_saved else OWN[name]())
    saved = {name: t for name, t in model.state_dict().items() if is_saved or name.startswith("linear")}
    model.save_pretrained(tmp_path, state_dict=saved)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = cls.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.linear.weight.dtype == dtype
        found = own_tensors(loaded.encoding)
        assert found.keys() == expected.keys()
        assert all(torch.equal(t, expected[name]) for name, t in found.items())
        assert all(parameter._no_weight_decay for parameter in loaded.encoding.parameters())
