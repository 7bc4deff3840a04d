"""The language model: cached decoding, both forms of linear attention, padding, sampling and errors."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lrpe_md.models.lm import CausalLm, Context, LmConfig
from lrpe_md.models.lm_decode import Decoder, generate, left_pad, sample
from parametrizing import slow_except
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lrpe_md import Grid, HeadDecay, Memory, linear_attention
from lrpe_md.frequencies import linear_scaling, ntk_scaling, yarn_scaling
from lrpe_md.integrations.run_time import set_scaling

TINY = LmConfig(vocab_size=11, dim=32, depth=2, num_heads=4, num_kv_heads=2, hidden=24)
ENCODINGS = {
    "rotate": {"encoding": "rotate"},
    "rotate-learned": {"encoding": "rotate", "learnable": True},
    "rotate-phase": {"encoding": "rotate", "phase": True},
    "cosine-silu": {"encoding": "cosine", "act": "silu"},
    "cosine-softplus-phase": {"encoding": "cosine", "act": "softplus", "phase": True},
    "none": {"encoding": "none"},
}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {"attention": "linear"},
    "linear, decay": {"attention": "linear", "memory": Memory(decay="retnet")},
    "hybrid": {"attention": ("linear", "softmax"), "memory": Memory(decay="lightning", learnable=True)},
}
WITH_SOFTMAX = ("softmax", "hybrid")
TRAINED = 4
SCALINGS = {
    "none": None,
    "linear": partial(linear_scaling, factor=3.0),
    "ntk": partial(ntk_scaling, factor=3.0),
    "yarn": partial(yarn_scaling, factor=3.0, original_length=TRAINED),
}
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)


def build(encoding: str = "rotate", attention: str = "softmax", device: str = "cpu") -> CausalLm:
    """Build a float64 model with non-trivial phases and logits."""
    torch.manual_seed(0)
    model = CausalLm(replace(TINY, **ATTENTIONS[attention], **ENCODINGS[encoding])).to(device).double()
    for name, parameter in model.named_parameters():
        if "encoding" not in name:
            nn.init.normal_(parameter, std=0.5)
        elif name.endswith("phase"):
            nn.init.uniform_(parameter, -math.pi, math.pi)
    return model.eval()


def some_tokens(batch: int = 2, length: int = 3 * TRAINED, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY.vocab_size, (batch, length), generator=generator).to(device)


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@every_attention
@every_encoding
@torch.no_grad()
def test_decoding_equals_the_full_forward_at_every_step_and_scaling(encoding: str, attention: str) -> None:
    model, tokens = build(encoding, attention), some_tokens()
    plain = model(tokens)
    for name, scaling in SCALINGS.items():
        model.rescale(scaling)
        expected = model(tokens)
        assert torch.equal(expected, plain) == (name == "none" or encoding == "none")
        cache = model.new_cache(2, tokens.shape[1])
        sizes = [t.shape for layer in cache.layers for t in layer]
        steps = [model(part, cache) for part in (*tokens[:, :5].split([3, 2], 1), *tokens[:, 5:].split(1, 1))]
        torch.testing.assert_close(torch.cat(steps, dim=1), expected)
        assert cache.length == tokens.shape[1]
        assert sizes == [t.shape for layer in cache.layers for t in layer]
    model.rescale(None)
    assert torch.equal(model(tokens), plain)


@every_attention
@every_encoding
def test_later_tokens_change_nothing_and_all_parameters_learn(encoding: str, attention: str) -> None:
    model, tokens = build(encoding, attention), some_tokens()
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % TINY.vocab_size
    difference = (model(changed) - logits).abs().amax((0, 2))
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 1e-4).all()
    logits[:, -1].logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("encoding", ["cosine-softplus-phase", "rotate-phase"])
def test_scores_match_the_formula(encoding: str) -> None:
    """Scores are Σ_c a² |q_c| |k_c| cos((n - m) ω_c - φ_c + the angle between the pairs).

    ω and a come from the scaling.
    """
    config = replace(TINY, **ENCODINGS[encoding])
    module: Any = CausalLm(config).blocks[0].attn.encoding
    assert module.phase is not None
    nn.init.uniform_(module.phase, -math.pi, math.pi)
    scaling = SCALINGS["yarn"]
    assert scaling is not None
    theta = module.trained()[0, :, 0].double()
    set_scaling(module, scaling)
    q, k = (torch.randn(1, heads, 6, config.head_dim, dtype=torch.float64) for heads in (4, 2))
    positions = torch.arange(6)[:, None]
    q_hat, k_hat = module(q, k, positions=positions)
    scores = q_hat @ k_hat.repeat_interleave(2, dim=1).mT

    q, k = q[0], k[0].repeat_interleave(2, dim=0)
    omega, amplitude = scaling(theta)
    apart = (positions - positions.T)[..., None] * omega - module.get_phase().repeat_interleave(2, 0)[:, None, None]
    if config.encoding == "cosine":
        q, k = nn.functional.softplus(q), nn.functional.softplus(k)
        expected = amplitude**2 * torch.einsum("hnc,hmc,hnmc->hnm", q, k, apart.cos())
    else:
        q, k = (torch.complex(*x.chunk(2, dim=-1)) for x in (q, k))
        turn = torch.polar(torch.ones_like(apart), apart)
        expected = amplitude**2 * torch.einsum("hnc,hmc,hnmc->hnm", q, k.conj(), turn).real
    torch.testing.assert_close(scores[0], expected.detach(), rtol=1e-6, atol=1e-6)  # a float32 phase


@every_encoding
@torch.no_grad()
def test_attention_matches_the_formula(encoding: str) -> None:
    """q is scaled by head_dim before the map, and query head h uses key head h // 2."""
    model = build(encoding)
    attn: Any = model.blocks[0].attn
    x = torch.randn(1, 5, TINY.dim, dtype=torch.float64)
    q, k, v = attn.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], dim=1)
    q, k = attn.encoding(q, k, positions=torch.arange(5)[:, None])
    heads = []
    for h in range(4):
        scores = (q[0, h] @ k[0, h // 2].T / math.sqrt(8)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[0, h // 2])
    expected = torch.cat(heads, dim=-1) @ attn.proj.weight.T
    torch.testing.assert_close(attn(x, Context(Grid((5,))))[0], expected)


@every_attention
@every_encoding
@torch.no_grad()
def test_left_padded_batch_equals_single_sequences(encoding: str, attention: str) -> None:
    model, row = build(encoding, attention), some_tokens(1)[0]
    prompts = [row[:5], row[2:4], row[3:10]]
    tokens, padding = left_pad(prompts, value=3)
    assert tokens.shape == (3, 7)
    assert padding.tolist() == [2, 5, 0]
    cache = model.new_cache(3, 9, padding)
    follow = some_tokens(3, 2)
    batch = torch.cat([model(tokens, cache), model(follow[:, :1], cache), model(follow[:, 1:], cache)], dim=1)
    assert batch.isfinite().all()
    for i, prompt in enumerate(prompts):
        expected = model(torch.cat([prompt, follow[i]])[None])
        torch.testing.assert_close(batch[i, padding[i] :], expected[0])
        alone = model.new_cache(1, 9)
        model(torch.cat([prompt, follow[i]])[None], alone)
        if attention in WITH_SOFTMAX:  # keys have the same positions as without padding
            (keys, _), (expected, _) = cache.layers[1], alone.layers[1]
            torch.testing.assert_close(keys[i, :, padding[i] :], expected[0, :, : 9 - padding[i]])
        else:
            torch.testing.assert_close(cache.layers[1][0][i], alone.layers[1][0][0])


@pytest.mark.parametrize("length", [1, 8, 11, 64, 65, 150])
def test_chunked_linear_attention_equals_the_quadratic_form(length: int) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, length, 6, dtype=torch.float64) for heads in (4, 2))
    v, state = torch.randn(2, 2, length, 5, dtype=torch.float64), torch.randn(2, 2, 6, 5, dtype=torch.float64)
    out, (after, _) = linear_attention(
        q, k, v, map=None, act="none", normalizer="none", is_causal=True, state=(state,), return_state=True
    )
    wide_k, wide_v, wide_state = (t.repeat_interleave(2, dim=1) for t in (k, v, state))
    expected = (q @ wide_k.mT).tril() @ wide_v + q @ wide_state
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(after, state + k.mT @ v)


@torch.no_grad()
def test_a_hybrid_layer_equals_that_of_a_uniform_model() -> None:
    hybrid, x = build("cosine-silu", "hybrid"), torch.randn(2, 5, 32, dtype=torch.float64)
    context = Context(Grid((5,)))
    for i, kind in enumerate(("linear", "softmax")):
        memory = hybrid.config.memory if kind == "linear" else None
        uniform = CausalLm(replace(hybrid.config, attention=kind, memory=memory)).double()
        uniform.blocks[i].load_state_dict(hybrid.blocks[i].state_dict())  # the same names
        torch.testing.assert_close(hybrid.blocks[i](x, context), uniform.blocks[i](x, context), rtol=0, atol=0)
        uniform.blocks[1 - i].attn.linear = kind == "softmax"
        with pytest.raises(AssertionError):
            torch.testing.assert_close(uniform.blocks[1 - i](x, context), uniform.blocks[i](x, context))


@torch.no_grad()
def test_decays_of_layers() -> None:
    """Lightning's decays depend on the layer's index in the whole model, and reach the attention."""
    config = replace(TINY, depth=4, attention=("softmax", "linear"), memory=Memory(decay="lightning"))
    model = CausalLm(config).double()
    found = [block.attn.decay for block in model.blocks]
    assert found[0] is found[2] is None
    for i in (1, 3):
        torch.testing.assert_close(found[i](), HeadDecay(2, "lightning", depth=i / 4)())
    assert not any("decay" in name for name in model.state_dict())
    attn, x = model.blocks[1].attn, torch.randn(1, 6, 32, dtype=torch.float64)
    q, k, v = attn.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split([4, 2, 2], 1)
    q, k = attn.encoding(q, k, positions=Grid((6,)))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    distance = torch.arange(6)[:, None] - torch.arange(6)
    weights = found[1]().double().repeat_interleave(2)[:, None, None] ** distance.clamp_min(0)
    expected = ((q @ k.mT * weights).tril() @ v).transpose(1, 2).flatten(2)
    expected = attn.proj(attn.norm(expected))
    torch.testing.assert_close(attn(x, Context(Grid((6,)))), expected)
    found[1].decay.fill_(1.0)
    assert (attn(x, Context(Grid((6,)))) - expected).abs().max() > 1e-4


def test_linear_state_does_not_grow() -> None:
    model = build("cosine-silu", "linear")
    short, long = (model.new_cache(1, length) for length in (8, 8192))
    assert [t.shape for layer in short.layers for t in layer] == [t.shape for layer in long.layers for t in layer]
    assert short.layers[0][0].shape == (1, 2, 16, 8)  # key heads, 2D, D
    assert build("cosine-silu").new_cache(1, 9).layers[0][0].shape == (1, 2, 9, 16)
    hybrid = build("cosine-silu", "hybrid").new_cache(1, 9).layers
    assert [[tuple(t.shape) for t in layer] for layer in hybrid] == [[(1, 2, 16, 8)], [(1, 2, 9, 16), (1, 2, 9, 8)]]


@pytest.mark.parametrize("attention", slow_except(["softmax", "linear"], ATTENTIONS))
@torch.no_grad()
def test_steps_and_scalings_do_not_recompile(attention: str) -> None:
    torch.compiler.reset()
    model, tokens = build("cosine-softplus-phase", attention), some_tokens(length=6)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    cache = model.new_cache(2, 6)
    found = []
    for i in range(6):
        found.append(compiled(tokens[:, i : i + 1], cache))
        assert counter.frame_count == 1
    torch.testing.assert_close(torch.cat(found, dim=1), model(tokens))
    model.rescale(SCALINGS["yarn"])
    cache.reset()
    torch.testing.assert_close(compiled(tokens[:, :1], cache), model(tokens[:, :1]))
    assert counter.frame_count == 1


def test_frequencies_keep_their_dtype_and_materialise() -> None:
    model = build("rotate-learned").to(torch.bfloat16)
    encoding = model.blocks[0].attn.encoding
    assert encoding.log_theta.dtype == torch.float32
    assert encoding.ratio.dtype == encoding.amplitude.dtype == torch.float32
    assert model(some_tokens()).dtype == torch.bfloat16
    with torch.device("meta"):
        empty = CausalLm(replace(TINY, learnable=True))
    empty.to_empty(device="cpu")
    encoding = empty.blocks[1].attn.encoding
    assert (encoding.ratio == 1).all()
    assert (encoding.amplitude == 1).all()
    assert torch.equal(encoding.log_theta, CausalLm(empty.config).blocks[1].attn.encoding.log_theta)


@pytest.mark.parametrize("learnable", [False, True])
def test_weights_assigned_to_a_meta_model(learnable) -> None:
    config = replace(TINY, learnable=learnable)
    model = CausalLm(config)
    with torch.device("meta"):
        empty = CausalLm(config)
    empty.load_state_dict(model.state_dict(), assign=True)
    tokens = some_tokens()
    assert torch.equal(empty(tokens), model(tokens))


def test_zero_frequency_stays_zero() -> None:
    model = build("rotate-learned")
    encoding: Any = model.blocks[0].attn.encoding
    with torch.no_grad():
        encoding.log_theta[-1] = -math.inf
    for scaling in (SCALINGS["yarn"], None):
        model.rescale(scaling)
        assert encoding.ratio.isfinite().all()
    assert (encoding.ratio == 1).all()


def test_parameters_are_tied_and_named() -> None:
    model = CausalLm(replace(TINY, encoding="cosine", phase=True, learnable=True))
    assert sum(p.numel() for p in model.parameters() if TINY.vocab_size in p.shape) == TINY.vocab_size * TINY.dim
    expected = {f"blocks.{i}.attn.encoding.{name}" for i in range(2) for name in ("log_theta", "phase")}
    assert model.no_weight_decay() == expected
    assert expected <= set(dict(model.named_parameters()))
    logits = model(some_tokens())
    config = replace(TINY, attention="linear", memory=Memory(decay="retnet", learnable=True))
    assert CausalLm(config).no_weight_decay() == {f"blocks.{i}.attn.decay.logit" for i in range(2)}
    assert 0.01 < logits.std() < 1  # near uniform before training
    blocks: Any = model.blocks
    assert blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    # two blocks have four residual additions
    assert blocks[1].attn.proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert blocks[1].mlp.fc2.weight.std().item() == pytest.approx(0.01, rel=0.1)


# --- generation ------------------------------------------------------------------------------------------------------


@every_attention
@torch.no_grad()
def test_greedy_generation_equals_the_argmax_of_full_forwards(attention: str) -> None:
    model, tokens = build("rotate", attention), some_tokens(length=3)
    out = generate(model, tokens, 5, temperature=0)
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(out, tokens)
    assert torch.equal(generate(model, tokens, 0), tokens)
    torch.testing.assert_close(generate(model, tokens, 4, top_p=1e-6), generate(model, tokens, 4, temperature=0))


def test_decoding_reads_the_kinds_of_attention_without_deriving_them(monkeypatch) -> None:
    model = build(attention="hybrid")
    monkeypatch.setattr("lrpe_md.models.lm.repeat_over_layers", None)  # a call would fail
    assert model(some_tokens(1, 3), model.new_cache(1, 3)).shape == (1, 3, TINY.vocab_size)


@every_attention
def test_decoder_can_be_reused(attention: str) -> None:
    model, tokens = build("cosine-silu", attention), some_tokens()
    decoder = Decoder(model, 2, 8)
    first, again = ((decoder.prefill(tokens[:, :7]), decoder.step(tokens[:, 7])) for _ in range(2))
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first[1], model(tokens[:, :8])[:, -1].detach())


def test_generation_is_reproducible_with_a_generator() -> None:
    model, tokens = build(), some_tokens(length=2)
    first, again, other = (
        generate(model, tokens, 12, temperature=3.0, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 14)


def test_generation_of_a_padded_batch() -> None:
    model, row = build("cosine-softplus-phase"), some_tokens(1)[0]
    tokens, padding = left_pad([row[:2], row[:6]])
    out = generate(model, tokens, 4, temperature=0, padding=padding)
    for i, prompt in enumerate((row[:2], row[:6])):
        assert torch.equal(out[i, padding[i] :], generate(model, prompt[None], 4, temperature=0)[0])


@pytest.mark.parametrize(("temperature", "top_p", "expected"), [
    (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]),
    (1.0, 0.79, [0.625, 0.375, 0, 0]),
    (1.0, 0.81, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    (0.5, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    (0.0, 0.5, [1, 0, 0, 0]),
])  # fmt: skip
def test_sampling_draws_from_the_distribution(temperature: float, top_p: float, expected: list[float]) -> None:
    order = torch.tensor([2, 0, 3, 1])
    expected_ = torch.tensor(expected)[order]
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[order].expand(20_000, 4)
    drawn = sample(logits, temperature, top_p, torch.Generator().manual_seed(0)).bincount(minlength=4) / 20_000
    assert (drawn[expected_ == 0] == 0).all()
    assert ((drawn - expected_).abs() <= 4 * (expected_ * (1 - expected_) / 20_000).sqrt()).all(), drawn


def test_tiny_temperatures_choose_the_most_likely_token() -> None:
    logits = torch.tensor([-200.0, 1.0, 300.0, 299.0])
    assert [sample(logits, temperature).item() for temperature in (1e-20, 1e-37, 1e-45, 1e-300)] == [2] * 4


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    ({"encoding": "rope"}, "encoding: expected one of"),
    ({"act": "softmax"}, "act: expected one of"),
    ({"attention": "flash"}, "attention: expected 'softmax' or 'linear', got 'flash'"),
    ({"attention": ("linear", "flash")}, "attention: expected 'softmax' or 'linear', got 'flash'"),
    ({"attention": ("linear",) * 3}, "attention: .* repeated over the 2 layers, got 3 values; pass .* divides 2"),
    ({"attention": ()}, "attention: .* repeated over the 2 layers, got 0 values"),
    ({"memory": Memory(decay="retnet")}, "memory: expected None without linear attention, got Memory"),
    ({"attention": "linear", "memory": Memory("delta")}, "memory: expected rule='add' .* flash-linear-attention"),
    ({"attention": "linear", "memory": Memory(directions="both")}, "memory: expected rule='add' and directions='forw"),
    ({"num_heads": 5}, "dim: expected a multiple of num_heads = 5, got 32"),
    ({"num_kv_heads": 3}, "num_heads: expected a multiple of num_kv_heads = 3, got 4"),
    ({"encoding": "none", "phase": True}, "phase, learnable: expected False with encoding='none'"),
    ({"num_kv_heads": 0}, "num_kv_heads: expected a positive integer, got 0"),
    ({"depth": 1.5}, "depth: expected a positive integer, got 1.5"),
    ({"dim": 36}, "dim: expected an even dim / num_heads for a rotation, got 36 / 4"),
])  # fmt: skip
def test_config_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_errors() -> None:
    model, tokens = build(), some_tokens(length=3)
    for message, call in {
        r"prompt: expected an integer tensor of shape \(B, N\)": lambda: generate(model, tokens[0], 2),
        "max_new_tokens: expected a non-negative integer, got -1": lambda: generate(model, tokens, -1),
        "max_new_tokens: expected a non-negative integer, got 1.5": lambda: generate(model, tokens, 1.5),
        r"prompt: expected an integer tensor of shape \(B, N\) with N > 0, got torch.int64 \(2, 0\)": lambda: generate(
            model, tokens[:, :0], 2
        ),
        r"prompt: expected an integer tensor of shape \(B, N\) with N > 0, got torch.bool": lambda: generate(
            model, tokens > 1, 2
        ),
        "temperature: .* got inf": lambda: generate(model, tokens, 2, temperature=math.inf),
        "temperature: expected a finite": lambda: generate(model, tokens, 2, temperature=-1),
        "top_p: expected a number greater than 0": lambda: generate(model, tokens, 2, top_p=0),
        "cuda_graph: expected a model on a GPU": lambda: generate(model, tokens, 2, cuda_graph=True),
        r"padding: expected an integer tensor of shape \(2,\)": lambda: generate(
            model, tokens, 2, padding=torch.zeros(3).long()
        ),
        r"padding: expected 0 to 3 tokens \(the length of the prompts\), got \[4, 0\]; pass": lambda: generate(
            model, tokens, 2, padding=torch.tensor([4, 0])
        ),
        r"padding: .* got \[0, -1\]; pass": lambda: generate(model, tokens, 2, padding=torch.tensor([0, -1])),
        r"prompt: expected tokens from 0 to .*, got values from 3 to 300\. To": lambda: generate(
            model, torch.tensor([[3, 300]]), 2
        ),
        r"prompt: expected tokens from 0 to .*, got values from -1 to -1\. To": lambda: generate(
            model, torch.tensor([[-1]]), 2
        ),
        "prompts: expected at least one prompt": lambda: left_pad([tokens[0], tokens[0, :0]]),
        "scaling: expected a function that returns theta of shape": lambda: model.rescale(
            lambda theta: (theta[..., :1], 1.0)
        ),
        "batch: expected a positive integer, got 0": lambda: model.new_cache(0, 4),
        "max_length: expected a positive integer, got 1.5": lambda: model.new_cache(1, 1.5),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    for message, call in {
        r"prompt: expected an integer tensor of shape \(B, N\), got str\. .*torch.tensor\(\[list": lambda: generate(
            model, "hello", 2
        ),
        r"prompts: expected integer tensors of shape \(N,\), got \['str'\]\. .*torch.tensor\(list\(text": lambda: (
            left_pad(["hello"])
        ),
        r"scaling: expected a function of theta, such as partial\(yarn_scaling, .*got 4.0": lambda: model.rescale(4.0),
        r"scaling: expected a function .* got 'yarn'": lambda: model.rescale("yarn"),
    }.items():
        with pytest.raises(TypeError, match=message):
            call()


@every_attention
@torch.no_grad()
def test_errors_of_a_cache(attention: str) -> None:
    """Errors are raised before anything is written, so that the cache can still be used."""
    model, tokens = build(attention=attention), some_tokens(length=4)
    cache, decoder = model.new_cache(2, 5), Decoder(model, 2, 5)
    model(tokens[:, :3], cache)
    decoder.prefill(tokens[:, :3])
    wrong = {
        r"tokens: expected an integer tensor of shape \(2, N\) with N > 0, got torch.int64 \(1, 1\)": lambda: model(
            tokens[:1, :1], cache
        ),
        r"tokens: expected an integer tensor of shape \(2, N\) with N > 0, got torch.int64 \(2, 0\)": lambda: model(
            tokens[:, :0], cache
        ),
        "tokens: expected an integer tensor .* torch.float32": lambda: model(tokens[:, :1] + 0.7, cache),
        "cache: expected a cache with 2 layers, like this model, got 1": lambda: model(
            tokens, replace(cache, layers=cache.layers[:1])
        ),
        r"token: expected an integer tensor of shape \(2,\), got torch.float32 \(2,\)": lambda: decoder.step(
            tokens[:, 3] + 0.7
        ),
        r"token: expected an integer tensor of shape \(2,\), got torch.int64 \(1,\)": lambda: decoder.step(
            tokens[:1, 3]
        ),
        r"token: expected an integer tensor of shape \(2,\), got torch.int64 \(2, 1\)": lambda: decoder.step(
            tokens[:, 3:]
        ),
        r"prompt: expected an integer tensor of shape \(2, N\) with N > 0, got torch.int64 \(2, 0\)": lambda: (
            decoder.prefill(tokens[:, :0])
        ),
        r"prompt: expected an integer tensor of shape \(2, N\) with N > 0, got torch.int64 \(1, 4\)": lambda: (
            decoder.prefill(tokens[:1])
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    if attention in WITH_SOFTMAX:
        for message, call in {
            r"cache: expected at most 2 more tokens \(max_length is 5\), got 3": lambda: model(tokens[:, :3], cache),
            r"cache: expected at most 5 more tokens \(max_length is 5\), got 6": lambda: decoder.prefill(
                tokens.repeat(1, 2)[:, :6]
            ),
        }.items():
            with pytest.raises(IndexError, match=message):
                call()
    expected = model(tokens)[:, -1]
    torch.testing.assert_close(model(tokens[:, 3:], cache)[:, -1], expected)
    torch.testing.assert_close(decoder.step(tokens[:, 3]), expected)
    decoder.step(tokens[:, 3])
    if attention in WITH_SOFTMAX:
        with pytest.raises(IndexError, match=r"cache: expected at most 0 more tokens \(max_length is 5\), got 1"):
            decoder.step(tokens[:, 3])


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_attention
@every_encoding
@torch.no_grad()
def test_a_replayed_step_equals_the_full_forward_and_never_syncs(encoding: str, attention: str) -> None:
    model, tokens = build(encoding, attention, "cuda"), some_tokens(device="cuda")
    decoder = Decoder(model, 2, tokens.shape[1])
    assert decoder.graph is not None
    for scaling in (None, SCALINGS["yarn"]):  # the captured graph reads the new scaling
        model.rescale(scaling)
        expected = model(tokens)
        columns = tokens.unbind(1)
        logits = [decoder.prefill(tokens[:, :3])]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for token in columns[3:]:
                logits.append(decoder.step(token).clone())
                sample(logits[-1], 0.7, 0.9)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(torch.stack(logits, dim=1), expected[:, 2:])


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("encoding", ["rotate", "cosine-softplus-phase"])
def test_generation_with_a_graph_equals_generation_without(encoding: str, autocast: bool) -> None:
    model = build(encoding, device="cuda").to(torch.float32 if autocast else torch.bfloat16)
    tokens, padding = left_pad([some_tokens(device="cuda")[0, :4], some_tokens(device="cuda")[1, :2]])
    out = []
    for cuda_graph in (True, False):
        generator = torch.Generator("cuda").manual_seed(0)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out.append(
                generate(model, tokens, 20, top_p=0.9, generator=generator, padding=padding, cuda_graph=cuda_graph)
            )
    assert torch.equal(*out)


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_reads_weights_that_training_changed() -> None:
    model, tokens = build(device="cuda"), some_tokens(device="cuda")
    decoder = Decoder(model, 2, 8)
    for parameter in model.parameters():
        parameter.mul_(1.1)
    decoder.prefill(tokens[:, :4])
    torch.testing.assert_close(decoder.step(tokens[:, 4]), model(tokens[:, :5])[:, -1])
