"""Attention chosen layer by layer, and linear layers that forget, for images, videos and diffusion."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

timm = pytest.importorskip("timm")

from lrpe_md.models.dit import DiT  # noqa: E402
from lrpe_md.models.text import TextEncoder, tokenize  # noqa: E402
from lrpe_md.models.video import LrpeVideoTransformer  # noqa: E402
from lrpe_md.models.vit import lrpe_vit_tiny_patch16_224  # noqa: E402
from timm.models.vision_transformer import ParallelThingsBlock  # noqa: E402

from lrpe_md import HeadDecay, Memory, linear_attention, parameter_groups  # noqa: E402
from lrpe_md.integrations.attention import Context  # noqa: E402
from lrpe_md.integrations.timm import LrpeAttention, adapt  # noqa: E402

SMALL = {"embed_dim": 64, "depth": 4, "num_heads": 2, "mlp_ratio": 1.0}
IMAGE = {**SMALL, "img_size": 8, "patch_size": 4, "num_classes": 5}
VIDEO = {**IMAGE, "num_frames": 4, "tubelet_size": 1, "class_token": False, "global_pool": "avg", "qk_norm": True}
PATTERN = ("linear", "softmax")
CAUSAL = {"causal": "frames", "encoding": "rotate"}
DELTA = Memory("delta", "retnet", learnable=True)
MEMORIES = {
    "none": None,
    "retnet": Memory(decay="retnet"),
    "lightning, learned": Memory(decay="lightning", learnable=True),
    "delta": Memory("delta"),
    "delta, retnet": Memory("delta", "retnet"),
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def randomize(model: nn.Module) -> nn.Module:
    """Change all weights from their initial values, so that attention is far from uniform."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.startswith("encoding"):
                p.add_(torch.randn_like(p), alpha=0.2)
    return model.double().eval()


def vit(**kwargs):
    return randomize(lrpe_vit_tiny_patch16_224(**{**IMAGE, "encoding": "rotate", **kwargs}))


def video(**kwargs) -> LrpeVideoTransformer:
    return randomize(LrpeVideoTransformer(**{**VIDEO, **kwargs}))


def dit(**kwargs) -> DiT:
    return randomize(DiT(**{**SMALL, "num_axes": 3, "patch_size": (1, 2, 2), "encoding": "rotate", **kwargs}))


def clip(frames=4, size=(8, 12), batch=2):
    return torch.randn(batch, 3, frames, *size, dtype=torch.float64)


def diffuse(model, x):
    return model(x, torch.linspace(0.2, 0.7, len(x), dtype=x.dtype, device=x.device))


def call(model, x):
    return model(x)


def image():
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


BUILT = {
    "image": (vit, image, call),
    "image, learned": (partial(vit, encoding="cosine", encoding_kwargs={"learnable": True}),
                       image, call),
    "no encoding": (partial(vit, encoding=None), image,
                    call),
    "video": (video, clip, call),
    "factorised": (partial(video, encoding="wan", space_time="factorised"), clip, call),
    "parallel blocks": (partial(video, block_fn=ParallelThingsBlock, encoding="mixed"), clip, call),
    "causal": (partial(video, **CAUSAL), clip, call),
    "delta": (partial(video, **CAUSAL, memory=DELTA), clip, call),
    "both directions": (partial(video, encoding="rotate", memory=Memory("delta", "retnet", True, "both")), clip,
                        call),
    "diffusion": (dit, clip, diffuse),
    "diffusion, norm": (partial(dit, normalizer="none", parallel=(False, True)), clip, diffuse),
    "diffusion, delta": (partial(dit, memory=Memory("delta", "lightning", True, "both"), reg_tokens=2), clip, diffuse),
}  # fmt: skip


# --- kinds of attention ----------------------------------------------------------------------------------------------


def listen(model):
    """From now on, record the first input and the first output of each call of each block."""
    heard = [[] for _ in model.blocks]
    for block, calls in zip(model.blocks, heard, strict=True):
        block.register_forward_hook(lambda _, inputs, output, calls=calls: calls.append((inputs[0], first(output))))
    return heard


def first(output):
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
@pytest.mark.parametrize("name", BUILT)
def test_each_layer_equals_that_of_a_uniform_model(name):
    """With the same weights and inputs, block i gives the same output as in a model with only this kind of block."""
    build, make, run = BUILT[name]
    hybrid, x = build(attention=PATTERN), make()
    found = [m.attention for m in hybrid.blocks.modules() if hasattr(m, "attention")]
    assert found == [kind for kind in PATTERN * 2 for _ in range(len(found) // 4)]
    passed = listen(hybrid)
    run(hybrid, x)
    for kind in PATTERN:
        uniform = build(attention=kind, **({"memory": None} if kind == "softmax" else {}))
        uniform.load_state_dict({**uniform.state_dict(), **hybrid.state_dict()}, strict=False)
        for block, calls in zip(uniform.blocks, passed, strict=True):
            given = iter(calls)
            block.register_forward_pre_hook(lambda _, inputs, given=given: (next(given)[0], *inputs[1:]))
        outputs = listen(uniform)
        run(uniform, x)
        for i, (ours, theirs) in enumerate(zip(outputs, passed, strict=True)):
            equal = [torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True)]
            assert all(equal) == (PATTERN[i % 2] == kind), (i, kind)


def test_activations_of_a_hybrid():
    """By default, linear layers use relu, and softmax layers use no activation. Both share frequencies."""
    model = vit(encoding="rotate", encoding_kwargs={"learnable": True}, attention=PATTERN)
    assert model.encoding.act == "none"
    assert [block.attn.feature_act for block in model.blocks] == ["relu"] * 4
    assert [name for name in model.state_dict() if name.startswith("encoding.")] == ["encoding.log_theta"]
    model = vit(encoding="rotate", encoding_kwargs={"act": "softplus"}, attention=PATTERN)
    assert model.encoding.act == "softplus"
    assert {block.attn.feature_act for block in model.blocks} == {None}
    with pytest.raises(ValueError, match=r"normalizer: 'unrotated' .* got act='silu'"):
        vit(encoding="rotate", encoding_kwargs={"act": "silu"}, attention=PATTERN)
    vit(encoding="rotate", encoding_kwargs={"act": "silu"}, attention=PATTERN, normalizer="none")


@torch.no_grad()
def test_timm_models_become_hybrids():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=3).eval()
    weights, x = copy.deepcopy(model.state_dict()), torch.randn(1, 3, 32, 32)
    adapt(model, "rotate", attention=("linear", "linear", "linear", "softmax"))
    assert [block.attn.attention for block in model.blocks] == ["linear"] * 3 + ["softmax"]
    assert model.state_dict().keys() == weights.keys()
    outputs = [model(x), adapt(model, "rotate", attention="linear")(x), adapt(model, "rotate")(x)]
    assert all((a - b).abs().max() > 1e-4 for a, b in pairwise(outputs))
    for message, options in {
        r"attention: expected 'softmax' or 'linear', got 'flash'": {"attention": ("linear", "flash")},
        r"attention: .* over the 4 layers, got 3 values; pass a sequence whose length divides 4": {
            "attention": ("linear",) * 3,
        },
        r"memory: expected None for an image model, whose tokens have no order": {
            "attention": PATTERN, "memory": Memory(decay="retnet"),
        },
        r"memory: expected None without linear attention": {"memory": Memory()},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            adapt(model, "rotate", **options)
    with pytest.raises(TypeError, match=r"memory: expected an lrpe_md.Memory or None, got str; pass Memory\("):
        adapt(model, "rotate", attention="linear", memory="delta")
    dropping = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, attn_drop_rate=0.1)
    adapt(dropping, "rotate")
    with pytest.raises(ValueError, match="attn_drop_rate: expected 0"):
        adapt(dropping, "rotate", attention=PATTERN)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    ({"rule": "sub"}, "rule: expected one of"),
    ({"decay": "mamba"}, "decay: expected 'retnet', 'lightning' or None, got 'mamba'"),
    ({"directions": "back"}, "directions: expected one of"),
    ({"learnable": True}, "learnable: expected False without a decay, got True; choose decay='retnet'"),
    ({"decay": "retnet", "learnable": "yes"}, "learnable: expected False or True, got 'yes'"),
])  # fmt: skip
def test_wrong_memories(change, message):
    with pytest.raises(ValueError, match=message):
        Memory(**change)


@pytest.mark.parametrize(("kwargs", "message"), [
    ({**CAUSAL, "memory": Memory(directions="both")}, "directions: expected 'forward' with causal='frames'"),
    ({"memory": Memory(decay="retnet")}, r"directions: expected 'both' with causal=None, got 'forward'; pass Memory\("),
    ({"space_time": "factorised", "memory": DELTA}, "memory: expected None with space_time='factorised'"),
    ({**CAUSAL, "memory": Memory("delta"), "qk_norm": False}, "qk_norm: expected True with rule='delta'.*got False"),
    ({**CAUSAL, "memory": DELTA, "attention": "softmax"}, "memory: expected None without linear attention"),
    ({"memory": Memory(directions="both"), "patch_drop_rate": 0.5}, "drop_unit: 'token' drops .* a memory need"),
])  # fmt: skip
def test_memories_of_videos_that_have_no_order(kwargs, message):
    with pytest.raises(ValueError, match=message):
        LrpeVideoTransformer(**{**VIDEO, "attention": "linear", **kwargs})


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"num_axes": 2, "patch_size": 2}, "memory: expected None for images, whose tokens have no order"),
    ({"memory": DELTA}, "directions: expected 'both' for a model that denoises all frames at once, got 'forward'"),
    ({"text_width": 8}, "text_attention: expected 'cross' with a memory, .* got 'joint'"),
    ({"text_width": 8, "text_attention": "single"}, "text_attention: expected 'cross' with a memory, .* got 'single'"),
    ({"qk_norm": "none"}, "qk_norm: expected 'head' or 'heads' with rule='delta'"),
    ({"attention": "softmax"}, "memory: expected None without linear attention"),
    ({"attention": ("linear",) * 3}, "attention: .* over the 4 layers, got 3 values"),
])  # fmt: skip
def test_memories_of_diffusion_that_have_no_order(kwargs, message):
    with pytest.raises(ValueError, match=message):
        dit(**{"attention": "linear", "memory": Memory("delta", directions="both"), **kwargs})


@torch.no_grad()
@pytest.mark.parametrize("name", MEMORIES)
def test_a_layer_equals_linear_attention_by_frames(name):
    """Decays depend on the layer, and the delta rule weights keys by 1 / (head_dim · tokens per frame)."""
    memory = MEMORIES[name]
    model, x = video(**CAUSAL, attention="linear", memory=memory, reg_tokens=2), torch.randn(2, 2 + 3 * 6, 64).double()
    grid = model.positions((3, 2, 3))
    for i in (0, 3):
        attn = model.blocks[i].attn
        q, k, v = attn.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        q, k = attn.q_norm(q), attn.k_norm(k)
        options = {"block": 6, "positions": grid, **model.encoding.describe()._asdict()}
        if memory is not None and memory.decay is not None:
            options["decay"] = HeadDecay(2, memory.decay, depth=i / 4, learnable=memory.learnable)()
            if memory.learnable:  # change the decays from their initial values
                assert (attn.decay() / options["decay"] - 1).abs().max() > 1e-2
                options["decay"] = attn.decay()
        if memory is not None and memory.rule == "delta":
            options |= {"rule": "delta", "gate": torch.full((2, 1, 20), 1 / (32 * 6))}
        expected = attn.proj(linear_attention(q, k, v, **options).transpose(1, 2).flatten(2))
        torch.testing.assert_close(attn(x, Context(model.encoding, grid, block=6)), expected)


@torch.no_grad()
@pytest.mark.parametrize("build", ["video", "diffusion"])
def test_both_directions_without_decay_read_all_frames(build):
    """Without decays, a memory's two sums add up to the sum over all frames. Decays give near frames more weight."""
    make = partial(video, encoding="rotate") if build == "video" else dit
    run = (call) if build == "video" else diffuse
    model, x = make(attention="linear"), clip()
    models = [make(attention="linear", memory=Memory(decay=d, directions="both")) for d in (None, "lightning")]
    for other in models:
        other.load_state_dict(model.state_dict())
    expected = run(model, x)
    torch.testing.assert_close(run(models[0], x), expected)
    assert (run(models[1], x) - expected).abs().max() > 1e-4
    for module in models[1].modules():
        if isinstance(module, HeadDecay):
            module.decay.fill_(1.0)
    torch.testing.assert_close(run(models[1], x), expected)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", ("linear", "linear", "linear", "softmax")], ids=str)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_stream_equals_the_whole_video_at_constant_memory(name, attention):
    kwargs = {"window": 2} if attention != "linear" else {}
    for change in ({}, {"reg_tokens": 2}, {"normalizer": "none", "scale_attn_norm": True}):
        model = video(**CAUSAL, attention=attention, memory=MEMORIES[name], **kwargs, **change)
        x = clip(7)
        whole = model.forward_features(x)
        for sizes in ((1,) * 7, (2, 1, 4)):
            state, found, held = None, [], []
            for piece in x.split(sizes, 2):
                tokens, state = model.stream(piece, state)
                found.append(tokens)
                held.append([tuple(t.shape) for layer in state.layers for t in layer if t is not None])
            torch.testing.assert_close(torch.cat(found, 1), whole)
            assert held[-1] == held[-2]


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_a_thousand_frames(rule):
    """If a model forgets, its state stays bounded. A plain sum grows with the number of frames."""
    sizes = {}
    for memory in (None, Memory(rule, "retnet")):
        model = video(**CAUSAL, depth=2, attention=PATTERN, window=3, memory=memory).float()
        state, frame = None, clip(1, (8, 8), batch=1).float()
        for t in range(1000):
            tokens, state = model.stream(frame + 0.1 * torch.randn_like(frame), state)
            if t in (199, 999):
                sizes[memory, t] = state.layers[0][0].abs().max().item()
        assert tokens.isfinite().all()
    assert sizes[None, 999] > 3 * sizes[None, 199]
    assert sizes[memory, 999] < 1.5 * sizes[memory, 199]


@torch.no_grad()
def test_unscaled_keys_would_let_the_state_grow(monkeypatch):
    """With the delta rule, the factor of the keys keeps the state bounded."""
    model = video(**CAUSAL, attention="linear", memory=Memory("delta"), depth=1).float()
    sizes = []
    for scaled in (True, False):
        if not scaled:
            monkeypatch.setattr("lrpe_md.integrations.attention._scale_keys", lambda *_: None)
        state = None
        for _ in range(20):
            _, state = model.stream(clip(1, (8, 8), batch=1).float(), state)
        sizes.append(state.layers[0][0].abs().max().item())
    assert sizes[0] < 10
    assert not sizes[1] < 1e6


# --- training and saving ---------------------------------------------------------------------------------------------

LEARNING = {
    "causal": (partial(video, **CAUSAL, memory=DELTA, attention=PATTERN), call),
    "both": (partial(video, encoding="rotate", memory=Memory("delta", "retnet", True, "both"), attention=PATTERN),
             call),
    "diffusion": (partial(dit, memory=Memory("delta", "retnet", True, "both"), attention=PATTERN), diffuse),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNING)
def test_every_parameter_learns_also_with_checkpointing(name):
    build, run = LEARNING[name]
    model, x = build().train(), clip(2)
    grads = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        run(model, x).sin().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert sum(name.endswith("decay.logit") for name in grads[0]) == 2
    for name, grad in grads[0].items():
        assert grad is not None, name
        torch.testing.assert_close(grads[1][name], grad)
    logits = {name for name in grads[0] if name.endswith("decay.logit")}
    assert all(grads[0][name].abs().max() > 0 for name in logits)
    assert logits <= model.no_weight_decay()
    (decayed,) = (g["params"] for g in parameter_groups(model, 1e-3) if g["name"] == "decay")
    assert not {id(p) for p in decayed} & {id(p) for name, p in model.named_parameters() if name in logits}


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_one_graph(name):
    torch._dynamo.reset()
    (build, run), x, counter = LEARNING[name], clip(2), CompileCounter()
    model = build()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    torch.testing.assert_close(run(compiled, x), run(model, x))
    assert counter.frame_count == 1


@pytest.mark.slow
@torch.no_grad()
def test_a_stream_of_a_hybrid_compiles_once():
    torch._dynamo.reset()
    model, x, counter = video(**CAUSAL, memory=DELTA, attention=PATTERN, window=2), clip(9), CompileCounter()
    stream = torch.compile(model.stream, backend=counter, fullgraph=True)
    whole, found, counts = model.forward_features(x), [], []
    _, state = model.stream(x[:, :, :2])
    for i in range(2, 9):
        tokens, state = stream(x[:, :, i : i + 1], state)
        found.append(tokens)
        counts.append(counter.frame_count)
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 2 * 6 :])
    assert counts[-1] == counts[1] <= 2


@torch.no_grad()
@pytest.mark.parametrize("name", LEARNING)
def test_weights_copies_and_pickles(name):
    build, run = LEARNING[name]
    model, other, x = build(), build(), clip(2)
    expected = run(model, x)
    assert (run(other, x) - expected).abs().max() > 1e-3
    other.load_state_dict(model.state_dict())
    for same in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(run(same, x), expected, rtol=0, atol=0)
    fixed = set(video(**CAUSAL, attention=PATTERN, memory=MEMORIES["delta, retnet"]).state_dict())
    assert not any("decay" in n for n in fixed)


@torch.no_grad()
def test_weights_without_decays_load():
    """Decays that a checkpoint lacks keep their initial values, and adapting again replaces them."""
    plain = LrpeVideoTransformer(**{**VIDEO, **CAUSAL, "attention": PATTERN})
    model = LrpeVideoTransformer(**{**VIDEO, **CAUSAL, "attention": PATTERN, "memory": DELTA})
    with pytest.warns(UserWarning, match=r"state_dict: \*.decay.logit is missing; the decays stay unchanged"):
        model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model.blocks[2].attn.decay(), HeadDecay(2, "retnet", learnable=True)())
    assert model.blocks[1].attn.decay is None
    adapt(model, "rotate", attention=("softmax", "linear"), memory=Memory("delta", "lightning"))
    assert [type(block.attn.decay) for block in model.blocks] == [type(None), HeadDecay] * 2
    adapt(model, "rotate", attention=PATTERN)
    assert not any(isinstance(m, HeadDecay) for m in model.modules())
    assert all(m.memory is None for m in model.modules() if isinstance(m, LrpeAttention))
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.device("meta"):
        empty = LrpeVideoTransformer(**{**VIDEO, **CAUSAL, "attention": PATTERN, "memory": DELTA})
    assert empty.to_empty(device="cpu").blocks[0].attn.decay().max() < 1


@torch.no_grad()
def test_dropped_tubes():
    """Frames with fewer tokens are shorter blocks, whose keys have more weight."""
    model, x = video(**CAUSAL, attention=PATTERN, memory=DELTA, drop_unit="tube"), clip(3, (8, 8))
    keep = torch.tensor([0, 3])
    tokens = model.forward_features(x, keep=keep)
    torch.testing.assert_close(tokens[:, :4], model.forward_features(x[:, :, :2], keep=keep))
    with pytest.raises(ValueError, match=r"keep: dropping single tokens .* a memory need whole tubes; .*'tube'"):
        video(memory=Memory(directions="both"), attention="linear", encoding="rotate").forward_features(x, keep=keep)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LEARNING)
def test_gpu_equals_the_reference(name):
    """The kernels' outputs and gradients, including those of learned decays, equal those on a CPU."""
    build, run = LEARNING[name]
    model, x = build().float(), clip(3, (16, 16)).float()
    found = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        out = run(model, x.to(device))
        out.square().mean().backward()
        gradients = {n: p.grad.to("cpu", copy=True) for n, p in model.named_parameters()}  # before the model is moved
        found.append({"output": out.detach().cpu(), **gradients})
    for name, expected in found[0].items():
        scale = expected.abs().max().clamp_min(1e-3)
        torch.testing.assert_close(found[1][name] / scale, expected / scale, rtol=1e-2, atol=1e-2, msg=name)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("memory", [Memory(decay="retnet"), Memory("delta", "retnet")], ids=str)
def test_a_stream_on_a_gpu(memory):
    model, x = (
        video(**CAUSAL, attention=PATTERN, memory=memory, window=2).float().cuda(),
        clip(6, (16, 16)).float().cuda(),
    )
    whole, state, found = model.forward_features(x), None, []
    for piece in x.split((1, 2, 1, 1, 1), 2):
        tokens, state = model.stream(piece, state)
        found.append(tokens)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-3, atol=1e-3)


# --- layers inside wrappers, such as LoRA ----------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A layer plus a change to its output, without the attribute ``weight``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.change = layer, nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.change


def wrap_layers(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.Linear, nn.Conv2d, nn.Conv3d)):
                setattr(module, name, Wrapper(child))
    return model


WRAPPED = {
    "image": (lambda: vit(qk_norm=True), (torch.randn(2, 3, 8, 12),)),
    "linear attention": (lambda: vit(encoding="cosine", attention="linear"), (torch.randn(2, 3, 8, 12),)),
    "video": (lambda: video(encoding="rotate"), (torch.randn(2, 3, 4, 8, 12),)),
    "diffusion": (
        lambda: randomize(
            DiT(**SMALL, patch_size=4, encoding="rotate", text_encoder=TextEncoder(16, depth=1, num_heads=2))
        ),
        (torch.randn(2, 3, 8, 12), torch.rand(2), tokenize(["a cat", "two dogs"])),
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_layers(name):
    build, inputs = WRAPPED[name]
    model = build()
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        expected = model(*inputs)
        wrapped = wrap_layers(model)
        torch.testing.assert_close(wrapped(*inputs), expected, rtol=1e-10, atol=1e-10)
    wrapped(*inputs).square().sum().backward()
    changes = [p.grad for n, p in wrapped.named_parameters() if n.endswith("change")]
    assert all(grad is not None for grad in changes)  # every wrapper runs


@pytest.mark.parametrize("encoding", ["rotate", "cosine"])
def test_adapting_a_model_before_and_after_its_layers_are_wrapped(encoding):
    plain = randomize(timm.create_model("vit_tiny_patch16_224", **IMAGE, qk_norm=True))
    x = torch.randn(2, 3, 8, 8).double()
    before = wrap_layers(adapt(copy.deepcopy(plain), encoding))
    after = adapt(wrap_layers(copy.deepcopy(plain)), encoding)
    with torch.no_grad():
        expected = adapt(plain, encoding)(x)
        for model in (before, after):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
