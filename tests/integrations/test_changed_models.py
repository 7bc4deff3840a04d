"""Models that are changed before or after adapting give the same results as the original.

A case is a model and a change. Each case is tested in both orders: first change then adapt, and first adapt then
change.
"""

import contextlib
import copy
import functools
import pickle
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lrpe_md
from lrpe_md import adapt_rotary
from lrpe_md.integrations import restore_rotary
from lrpe_md.integrations.rotary import exchanged_names, parts

transformers = pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama  # noqa: E402

IDS = torch.arange(3, 15)[None]
BOUND = 1e-5  # relative to the largest output, and to the largest gradient


def shake(model):
    """Make the weights large enough for positions to matter."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.mul_(3.0) if p.ndim == 2 else p.data.add_(torch.rand_like(p) * 0.5)
    return model.eval()


def tiny(name, **kwargs):
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **heads, **kwargs})
    return shake(transformers.AutoModel.from_config(config))


def is_adapted(model):
    return any(exchanged_names(part) for part in parts(model).values())


def differentiate(model, ids=IDS):
    model.zero_grad()
    y = model(input_ids=ids)[0]
    y.square().mean().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    (y, gradients), (right, others) = found, expected
    assert (y - right).abs().max() <= BOUND * right.abs().max()
    assert gradients.keys() == others.keys()
    largest = max(g.abs().max() for g in others.values())
    for name, gradient in gradients.items():
        assert (gradient - others[name]).abs().max() <= BOUND * largest, name


class Learned(nn.Module):
    """A rotary module whose frequencies have a learned factor."""

    def __init__(self):
        super().__init__()
        self.inv_freq = nn.Buffer(1e4 ** -(torch.arange(0, 16, 2) / 16), persistent=False)
        self.alpha = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq * self.alpha.exp()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class ByLength(Learned):
    """A rotary module whose frequencies depend on the length, which the configuration doesn't mention."""

    def forward(self, x, position_ids):
        if int(position_ids.max()) >= 8:
            self.inv_freq = nn.Buffer(5e4 ** -(torch.arange(0, 16, 2) / 16), persistent=False)
        return super().forward(x, position_ids)


def halve_tables(module, args, tables):
    return tuple(t * 0.5 for t in tables)


def own_forward(norm):
    norm.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), norm)


def each_norm(change):
    def run(model):
        for layer in model.layers:
            change(layer.self_attn.q_norm)
            change(layer.self_attn.k_norm)

    return run


class LowRank(nn.Module):
    """LoRA for a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def add_lora(model):
    torch.manual_seed(5)
    for layer in model.layers:
        for name in ("q_proj", "k_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))


def offload(model):
    accelerate = pytest.importorskip("accelerate")
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


CHANGES = {
    "frequencies in place": lambda model: model.rotary_emb.inv_freq.data.div_(4),
    "other frequencies": lambda model: setattr(model.rotary_emb, "inv_freq", model.rotary_emb.inv_freq * 0.3),
    "amplitude": lambda model: setattr(model.rotary_emb, "attention_scaling", 0.5),
    "learned frequencies": lambda model: setattr(model, "rotary_emb", Learned()),
    "frequencies by length": lambda model: setattr(model, "rotary_emb", ByLength()),
    "a hook on the tables": lambda model: model.rotary_emb.register_forward_hook(halve_tables),
    "a forward of a norm's own": each_norm(own_forward),
    "a hook on a norm": each_norm(lambda norm: norm.register_forward_hook(lambda m, args, y: 2 * y)),
    "another norm": lambda model: setattr(model.layers[0].self_attn, "q_norm", nn.LayerNorm(16)),
    "low rank": add_lora,
    "accelerate's hooks": offload,
    "double": lambda model: model.double(),
}


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name, when):
    stock, model = tiny("Qwen3"), tiny("Qwen3")
    CHANGES[name](stock)
    if when == "before":
        CHANGES[name](model)
    adapt_rotary(model)
    if when == "after":
        CHANGES[name](model)
    assert is_adapted(model)
    assert_same(differentiate(model), differentiate(stock))
    if name == "learned frequencies":
        assert model.rotary_emb.alpha.grad.abs().max() > 0
    plain = tiny("Qwen3")
    if name not in ("low rank", "accelerate's hooks", "double"):
        assert (differentiate(stock)[0] - differentiate(plain)[0]).abs().max() > 1e-3
    restore_rotary(model)
    assert not is_adapted(model)
    assert torch.equal(differentiate(model)[0], differentiate(stock)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_changed_models(copied):
    stock, model = tiny("Qwen3"), tiny("Qwen3")
    for m in (stock, model):
        CHANGES["learned frequencies"](m)
        add_lora(m)
    other = copied(adapt_rotary(model))
    assert is_adapted(other)
    other.rotary_emb.alpha.data.mul_(2)
    stock.rotary_emb.alpha.data.mul_(2)
    assert_same(differentiate(other), differentiate(stock))
    assert (differentiate(model)[0] - differentiate(other)[0]).abs().max() > 1e-4


def test_amplitudes_of_a_model_s_own():
    """PhiMoE's rotary module reads its amplitude from short_mscale and long_mscale."""
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "short_mscale": 1.3, "long_mscale": 1.3}
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 131072}
    model = tiny("Phimoe", **sizes, rope_parameters={**scaled, **factors})
    expected = differentiate(model)
    assert_same(differentiate(adapt_rotary(model)), expected)


def test_adapted_after_a_long_input():
    """After a long input, a model with dynamic frequencies has rewritten its buffer."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    stock = tiny("Llama", max_position_embeddings=64, rope_parameters=dynamic)
    model, long = copy.deepcopy(stock), torch.arange(100)[None] % 99
    for m in (stock, model):
        differentiate(m, long)
    adapt_rotary(model)
    for ids in (IDS, long):
        assert_same(differentiate(model, ids), differentiate(stock, ids))


@pytest.mark.slow
def test_stages_of_a_pipeline():
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = adapt_rotary(shake(transformers.Qwen3ForCausalLM(tiny("Qwen3", num_hidden_layers=2).config)))
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        split = {"model.layers.1": SplitPoint.BEGINNING}
        stages = pipeline(model, mb_args=(IDS,), mb_kwargs={"use_cache": False}, split_spec=split)
        found = stages(IDS, use_cache=False)
    logits = getattr(found, "logits", found[0] if isinstance(found, tuple) else found)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_memory_attention_of_sam2():
    """SAM 2's cross-attention leaves some keys unrotated, and repeats the table."""
    from transformers.models.sam2_video import modeling_sam2_video as sam

    config = transformers.Sam2VideoConfig()
    config.memory_attention_hidden_size = config.memory_attention_feed_forward_hidden_size = 64
    config.memory_attention_rope_feat_sizes = [4, 4]
    torch.manual_seed(0)
    model = sam.Sam2VideoMemoryAttention(config).eval()
    inputs = {
        "current_vision_features": torch.randn(16, 1, 64), "memory": torch.randn(35, 1, 64),
        "current_vision_position_embeddings": torch.randn(16, 1, 64), "num_object_pointer_tokens": 3,
        "memory_posision_embeddings": torch.randn(35, 1, 64),
    }  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs)
        with contextlib.suppress(TypeError):
            adapt_rotary(model)
        torch.testing.assert_close(model(**inputs), expected, rtol=0, atol=1e-5)


def test_a_table_function_that_was_replaced():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_small_patch16_rope_224", depth=1, img_size=64).eval()
    get, x = model.rope.get_embed, torch.randn(1, 3, 64, 64)
    model.rope.get_embed = lambda *args, **kwargs: get(*args, **kwargs) * 0.5
    with torch.no_grad():
        expected = model(x)
        adapt_rotary(model)
        assert is_adapted(model)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_group_offload_of_a_diffusion_model(when, tmp_path):
    pytest.importorskip("diffusers")
    from lrpe_md.scripts.adapters import trial_diffusers

    model = trial_diffusers.build("FluxTransformer2DModel")
    given, cpu = trial_diffusers.inputs(model), torch.device("cpu")

    def offload(model):
        options = {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path)}
        model.enable_group_offload(onload_device=cpu, offload_device=cpu, **options)

    with torch.no_grad():
        expected = model(**given)[0]
        if when == "before":
            offload(model)
        adapt_rotary(model)
        if when == "after":
            offload(model)
        for _ in range(2):
            torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_another_default_dtype_does_not_spoil_the_process():
    """The cache of a function must not depend on the default dtype, so this runs in a separate process."""
    pytest.importorskip("diffusers")
    code = """
import torch
from lrpe_md import adapt_rotary
from lrpe_md.scripts.adapters.trial_diffusers import build, inputs
torch.set_default_dtype(torch.bfloat16)
try:
    adapt_rotary(build("CogView4Transformer2DModel"))
except TypeError:
    pass
torch.set_default_dtype(torch.float32)
model = build("CogView4Transformer2DModel")
given = inputs(model)
with torch.no_grad():
    expected = model(**given)[0]
    found = adapt_rotary(model)(**given)[0]
assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]


# --- how a function is looked up ------------------------------------------------------------------------------------


def attention_that_calls(turn):
    """Build a user's attention with a method that calls the known function."""

    class Attention(modeling_llama.LlamaAttention):
        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            num_samples, num_tokens, _ = hidden_states.shape
            q, k, v = (
                layer(hidden_states).view(num_samples, num_tokens, -1, self.head_dim).transpose(1, 2)
                for layer in (self.q_proj, self.k_proj, self.v_proj)
            )
            q, k = self.turn_both(q, k, *position_embeddings)
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.o_proj(out.transpose(1, 2).reshape(num_samples, num_tokens, -1)), None

    Attention.turn_both = turn
    Attention.static = staticmethod(modeling_llama.apply_rotary_pos_emb)
    return Attention


bound = functools.partial(modeling_llama.apply_rotary_pos_emb)


def import_and_turn(self, q, k, cos, sin):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin)


WAYS = {
    "module": lambda self, q, k, cos, sin: modeling_llama.apply_rotary_pos_emb(q, k, cos, sin),
    "partial": lambda self, q, k, cos, sin: bound(q, k, cos, sin),
    "sliced": lambda self, q, k, cos, sin: modeling_llama.apply_rotary_pos_emb(
        q, k, cos[:, : q.shape[2]], sin[:, : q.shape[2]]
    ),
    "by keyword": lambda self, q, k, cos, sin: modeling_llama.apply_rotary_pos_emb(k=k, q=q, sin=sin, cos=cos),
    "import": import_and_turn,
    "static method": lambda self, q, k, cos, sin: self.static(q, k, cos, sin),
    "attribute": lambda self, q, k, cos, sin: self.attribute(q, k, cos, sin),
    "partial as attribute": lambda self, q, k, cos, sin: self.bound(q, k, cos, sin),
}


@pytest.mark.parametrize("name", WAYS)
def test_ways_to_call_a_function(name):
    model = tiny("Llama")
    attention = attention_that_calls(WAYS[name])(model.config, 0)
    attention.attribute, attention.bound = modeling_llama.apply_rotary_pos_emb, bound
    attention.load_state_dict(model.layers[0].self_attn.state_dict())
    model.layers[0].self_attn = attention
    expected = differentiate(model)
    for adapted in (adapt_rotary(model), copy.deepcopy(model)):
        assert is_adapted(adapted)
        assert_same(differentiate(adapted), expected)
    restore_rotary(model)
    assert attention.attribute is modeling_llama.apply_rotary_pos_emb
    assert torch.equal(differentiate(model)[0], expected[0])


def turn_neighbours(q, k, cos, sin):
    """Rotate neighbouring channels, as GLM does."""
    half = cos.shape[-1] // 2
    cos, sin = (t[:, None, :, :half].repeat_interleave(2, -1) for t in (cos, sin))
    return tuple(x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin for x in (q, k))


@pytest.mark.parametrize("again", [adapt_rotary, restore_rotary])
def test_a_function_that_is_set_afterwards_stays(again):
    model = tiny("Llama")
    attention = attention_that_calls(WAYS["attribute"])(model.config, 0)
    attention.attribute, model.layers[0].self_attn = modeling_llama.apply_rotary_pos_emb, attention
    adapt_rotary(model)
    attention.attribute = turn_neighbours
    expected = differentiate(model)
    assert_same(differentiate(again(model)), expected)
    assert restore_rotary(model).layers[0].self_attn.attribute is turn_neighbours


class Turner:
    """Object that calls a function from an attribute, like a user's attention processor."""

    def __init__(self):
        self.turn = modeling_llama.apply_rotary_pos_emb

    def __call__(self, q, k, cos, sin):
        return self.turn(q, k, cos, sin)


def test_layers_that_share_an_object():
    model, shared = tiny("Llama", num_hidden_layers=2), Turner()
    kind = attention_that_calls(lambda self, *args: self.turner(*args))
    for i, layer in enumerate(model.layers):
        attention = kind(model.config, i)
        attention.load_state_dict(layer.self_attn.state_dict())
        attention.turner, layer.self_attn = shared, attention
    expected = differentiate(model)
    assert_same(differentiate(adapt_rotary(adapt_rotary(model))), expected)
    assert shared.turn is not modeling_llama.apply_rotary_pos_emb
    restore_rotary(model)
    assert shared.turn is modeling_llama.apply_rotary_pos_emb


def test_a_method_that_is_set_afterwards_stays():
    model = tiny("Llama")
    attention = model.layers[0].self_attn
    known = type(attention).forward
    attention.forward = types.MethodType(lambda self, *args, **kwargs: known(self, *args, **kwargs), attention)
    adapt_rotary(model)
    attention.forward = types.MethodType(
        lambda self, *args, **kwargs: (2 * known(self, *args, **kwargs)[0], None), attention
    )
    expected = differentiate(model)
    assert_same(differentiate(adapt_rotary(model)), expected)


@pytest.mark.parametrize("hooked_first", [True, False])
def test_hooks_that_are_removed_after_adapting(hooked_first):
    """accelerate moves the method back that adapt_rotary has replaced."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny("Llama")
    attention, expected = model.layers[0].self_attn, differentiate(model)
    if not hooked_first:
        adapt_rotary(model)
    hooks.add_hook_to_module(attention, hooks.ModelHook())
    if hooked_first:
        adapt_rotary(model)
    hooks.remove_hook_from_module(attention)
    assert_same(differentiate(model), expected)
    restore_rotary(model)
    assert vars(attention)["forward"].__func__ is modeling_llama.LlamaAttention.forward
    assert "_old_forward" not in vars(attention)


def add_diffusers_hook(attention):
    hooks = pytest.importorskip("diffusers.hooks")
    hooks.HookRegistry.check_if_exists_or_initialize(attention).register_hook(hooks.ModelHook(), "ours")


def wrap(attention):
    original = attention.forward
    attention.forward = lambda *args, **kwargs: original(*args, **kwargs)


@pytest.mark.parametrize("change", [add_diffusers_hook, wrap])
def test_forward_methods_that_hold_the_original_are_named(change, capsys):
    """The results are right, but the function around the original method keeps its rotation."""
    model = tiny("Llama")
    expected = differentiate(model)
    change(model.layers[0].self_attn)
    with pytest.warns(UserWarning, match=r"left these functions unchanged: layers\.0\.self_attn\.forward"):
        assert_same(differentiate(adapt_rotary(model)), expected)
    adapt_rotary(model, verbose=True)
    assert "unchanged: layers.0.self_attn.forward, which was set on the object" in capsys.readouterr().out
    restore_rotary(model)
    adapt_rotary(tiny("Llama"), verbose=True)
    assert "unchanged" not in capsys.readouterr().out


@pytest.mark.parametrize("change", [add_diffusers_hook, wrap])
def test_restored_below_a_function_that_holds_the_adapted_method(change):
    model = tiny("Qwen3")
    expected = differentiate(model)
    adapt_rotary(model)
    change(model.layers[0].self_attn)
    assert_same(differentiate(model), expected)
    found = differentiate(restore_rotary(model))
    assert torch.equal(found[0], expected[0])


class Scale(NamedTuple):
    by: float

    def __call__(self, x):
        return self.by * x


class ScaleSlots:
    __slots__ = ("by",)
    __init__, __call__ = (lambda self, by: setattr(self, "by", by)), Scale.__call__


@pytest.mark.parametrize("kind", [Scale, ScaleSlots])
def test_callable_attributes_without_a_dict(kind):
    model = tiny("Llama")
    mlp = model.layers[0].mlp
    del mlp.act_fn  # a module
    mlp.act_fn = kind(0.5)
    expected = differentiate(model)
    assert_same(differentiate(adapt_rotary(model)), expected)
    assert is_adapted(model)


def turn_rotary_wrongly(q, k, cos, sin, unsqueeze_dim=1):
    """Compute something that looks like the known function but is not a rotation, because one sign differs."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = q.shape[-1] // 2
    return tuple(x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin for x in (q, k))


def test_what_is_no_rotation_is_left(monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turn_rotary_wrongly)
    model = tiny("Llama")
    expected = differentiate(model)
    with pytest.raises(TypeError, match=r"got transformers.*LlamaModel; rejected .*turn_rotary_wrongly, which"):
        adapt_rotary(model)
    assert not is_adapted(model)
    assert torch.equal(differentiate(model)[0], expected[0])


def test_a_model_of_which_a_part_is_left():
    """A warning and the report name the part."""
    both = nn.ModuleDict({"one": tiny("Llama"), "two": tiny("Mistral")})
    mistral = sys.modules[type(both["two"]).__module__]
    known = mistral.apply_rotary_pos_emb
    mistral.apply_rotary_pos_emb = turn_rotary_wrongly
    try:
        with pytest.warns(UserWarning, match=r"^adapt_rotary: left these functions unchanged: \S+turn_rotary_wrongly$"):
            adapt_rotary(both)
    finally:
        mistral.apply_rotary_pos_emb = known
    assert is_adapted(both["one"])
    assert not is_adapted(both["two"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapt_rotary(both)
    assert is_adapted(both["two"])


def test_a_part_that_was_sharded_is_named():
    model = adapt_rotary(tiny("Llama"))
    attention = model.layers[0].self_attn
    attention.__class__ = type("FSDPLlamaAttention", (type(attention),), {})
    for call in (adapt_rotary, restore_rotary):
        with pytest.raises(
            ValueError, match=r"layers\.0\.self_attn: .*got its subclass FSDPLlamaAttention; .* before fully_shard"
        ):
            call(model)


def test_everything_else_stays():
    model, other = tiny("Llama"), tiny("Llama")
    before = {name: type(part) for name, part in other.named_modules()}
    state, names = model.state_dict(), set(vars(modeling_llama))
    function, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    adapt_rotary(model)
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    assert type(model) is type(other)
    assert {name: type(part) for name, part in other.named_modules()} == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert isinstance(model.layers[0].self_attn, modeling_llama.LlamaAttention)
    assert all(name.startswith("_lrpe_") for name in set(vars(modeling_llama)) - names)


def count_calls(call, in_package=False):
    """Return how many Python functions are called, in all files or in those of this package."""
    files = []
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(Path(lrpe_md.__file__).parent in Path(file).parents for file in files) if in_package else len(files)


def test_few_calls_in_python():
    """Few Python calls are needed to adapt a model whose functions are cached, and to run it."""
    pytest.importorskip("diffusers")
    from lrpe_md.scripts.adapters import trial_diffusers

    model = trial_diffusers.build("LTXVideoTransformer3DModel")
    adapt_rotary(model)  # functions are probed once
    assert count_calls(lambda: adapt_rotary(model)) <= 1500
    given = trial_diffusers.inputs(model)
    with torch.no_grad():
        model(**given)
        assert 0 < count_calls(lambda: model(**given), in_package=True) <= 150
