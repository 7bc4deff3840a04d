"""The diffusion transformer, its text encoder, its loss and its samplers (models/dit.py, flow.py, text.py)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from parametrizing import slow_except
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, jvp

from lrpe_md import Coordinates, CosineMd, Grid, LinearAttention, PresetMd, RotateMd, Tokens

pytest.importorskip("timm")

from lrpe_md.models.dit import DiT, TrainedGrids, patchify, unpatchify
from lrpe_md.models.flow import (
    draw_times,
    flow_matching_loss,
    guided,
    integrate,
    mean_flow_loss,
    sample,
    time_grid,
)
from lrpe_md.models.text import (
    PAD,
    START,
    LabelEncoder,
    PretrainedEncoder,
    Text,
    TextEncoder,
    TextFeatures,
    join_texts,
    replace_texts,
    tokenize,
)

RED, DOG = "red", "a green dog"
ENCODINGS = {
    "none": {},
    "sincos": {"absolute": "sincos"},
    "rotate": {"encoding": "rotate"},
    "mixed": {"encoding": "mixed"},
    "cosine": {"encoding": "cosine"},
    "linear": {"encoding": "cosine", "attention": "linear"},
    "linear, norm": {
        "encoding": "cosine", "encoding_kwargs": {"act": "silu"}, "attention": "linear", "normalizer": "none",
    },
    "text on an axis": {"encoding": "rotate", "text_positions": "axis", "image_after": (0,)},
    "diagonal, linear": {"encoding": "rotate", "text_positions": "diagonal", "attention": "linear"},
    "flux1": {"encoding": "flux1"},
    "lumina2": {"encoding": "lumina2", "encoding_kwargs": {"split": (2, 1, 1)}},
    "wan": {"encoding": "wan"},
    "qwen_image": {"encoding": "qwen_image"},
}  # fmt: skip


def dit(text=True, randomized=True, **kwargs):
    torch.manual_seed(0)
    encoder = TextEncoder(16, depth=1, num_heads=2) if text else None
    model = DiT(**{"embed_dim": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 1.0, "text_encoder": encoder, **kwargs})
    if randomized:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def inputs(*size, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, *(size or (8, 12)), generator=generator, dtype=dtype)
    return x, torch.rand(batch, generator=generator, dtype=dtype), tokenize([RED, DOG][:batch])


# --- the backbone ----------------------------------------------------------------------------------------


def assert_blocks_are_the_identity(model, x, t, text, depth):
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append((args[:2], out)))
    assert not model(x, t, text).any()
    assert len(seen) == depth
    for before, after in seen:
        for a, b in zip(before, after, strict=True):
            assert a.std() > 0
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_adaln_zero_begins_as_the_identity():
    model = dit(randomized=False, encoding="rotate", depth=3)
    x, t, text = inputs()
    assert_blocks_are_the_identity(model, x, t, text, 3)
    model(x, t, text).sum().backward()
    assert model.head.weight.grad.abs().max() > 0


@pytest.mark.parametrize("size", [(4, 6), (3, 2, 4)])
def test_patches(size):
    x, patch = torch.randn(2, 5, *size), (1, 2, 2)[-len(size) :]
    shape = tuple(n // p for n, p in zip(size, patch, strict=True))
    patches = patchify(x, patch)
    assert patches.shape == (2, math.prod(shape), 20)
    first = x if len(size) == 2 else x[:, :, 0]
    torch.testing.assert_close(patches[:, 1].view(2, 5, 2, 2), first[:, :, :2, 2:4])
    torch.testing.assert_close(unpatchify(patches, shape, patch), x)


@pytest.mark.parametrize("name", ENCODINGS)
def test_padding_does_not_change_the_output(name):
    model = dit(**ENCODINGS[name])
    x, t, text = inputs()
    y = model(x, t, text)
    assert y.shape == x.shape
    longer = nn.functional.pad(text, (0, 5))
    torch.testing.assert_close(model(x, t, longer), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x[:1], t[:1], tokenize([RED])), y[:1], rtol=1e-4, atol=1e-5)
    assert (model(x, t, tokenize([RED, DOG + "s"])) - y)[1].abs().max() > 1e-3


@pytest.mark.parametrize("name", ENCODINGS)
def test_any_size_frames_text_or_none(name):
    model = dit(num_axes=3, **ENCODINGS[name])
    for frames, height, width in ((1, 4, 4), (3, 8, 6)):
        x, t, text = inputs(frames, height, width)
        assert model(x, t, text).shape == x.shape
        without = model(x, t, text, drop=torch.tensor([True, True]))
        torch.testing.assert_close(model(x[:1], t[:1]), without[:1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(x, t), model(x, t, tokenize(["", ""])), rtol=0, atol=0)
    plain = dit(num_axes=3, text=False, **ENCODINGS[name])
    assert plain(x, t).shape == x.shape


@pytest.mark.parametrize("name", ENCODINGS)
def test_output_depends_on_positions(name):
    """Without an encoding, patches are an unordered set. With an encoding, their order and grid matter."""
    model = dit(**ENCODINGS[name])
    x, t, text = inputs()
    y = model(x, t, text)
    model.reference = (8, 8)
    assert ((model(x, t, text) - y).abs().max() > 1e-4) == (name != "none")
    model.reference = None
    reordered = model(_reorder(x), t, text)
    assert ((reordered - _reorder(y)).abs().max() > 1e-4) == (name != "none")


def _reorder(x):
    """Reverse the columns of patches."""
    return x.unflatten(-1, (-1, 2)).flip(-2).flatten(-2)


def test_absolute_positions_follow_the_grid():
    model = dit(absolute="sincos", depth=1)
    x, t, text = inputs(8, 8)
    y = model(x, t, text)
    model.reference = (4, 4)
    torch.testing.assert_close(model(x, t, text), y)
    model.reference = (8, None)
    assert (model(x, t, text) - y).abs().max() > 1e-4


def test_text_rules():
    def rows(**kwargs):
        return dit(encoding="rotate", **kwargs).positions((2, 2), 2)

    assert dit(encoding="rotate").positions((2, 3), 4) == Grid((2, 3), prefix=4)
    image = [[0, 0], [0, 1], [1, 0], [1, 1]]
    zero = rows(text_positions="zero")
    assert zero.coords.tolist() == [[0, 0], [0, 0], *image]
    assert zero.rotated is None
    assert rows(text_positions="diagonal").coords.tolist() == [[0, 0], [1, 1], *image]
    assert rows(text_positions=Tokens(0, "axis", 1, start=5)).coords.tolist() == [[0, 5], [0, 6], *image]
    behind = rows(text_positions="axis", image_after=(0,))
    assert behind.coords.tolist() == [[0, 0], [1, 0], *([2 + h, w] for h, w in image)]


def test_image_follows_the_text_of_its_sample():
    model = dit(encoding="rotate", text_positions="axis", image_after=(0,))
    mask = torch.tensor([[True, False, False], [True, True, True]])
    placed = model.positions((2, 1), 3, mask=mask)
    assert placed.coords[:, 3:].tolist() == [[[1, 0], [2, 0]], [[3, 0], [4, 0]]]
    assert placed.coords[:, :3, 0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("options", [
    {"encoding": "rotate", "text_positions": "zero", "image_after": (1,)},
    {"encoding": "rotate", "text_positions": "axis", "image_after": (0, 1)},
    {"encoding": "rotate", "text_positions": "diagonal"},
    {"encoding": "lumina2", "embed_dim": 96, "text_attention": "single"},
    {"encoding": "circle_rope", "embed_dim": 96, "reg_tokens": 2, "text_attention": "cross"},
], ids=["zero", "axis", "diagonal", "preset", "cross"])  # fmt: skip
@torch.no_grad()
def test_padding_at_either_end_changes_nothing(options):
    model = dit(text=False, text_width=16, **options).double()
    x, t, _ = inputs(dtype=torch.float64)
    short, long = torch.randn(2, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    expected = torch.cat([model(x[i : i + 1], t[i : i + 1], Text(f[None])) for i, f in enumerate((short, long))])
    pad = torch.ones(3, 16, dtype=torch.float64)
    for parts, mask in (([short, pad], [1, 1, 0, 0, 0]), ([pad, short], [0, 0, 0, 1, 1])):
        text = Text(torch.stack([torch.cat(parts), long]), torch.tensor([mask, [1] * 5]))
        torch.testing.assert_close(model(x, t, text), expected, rtol=1e-6, atol=1e-6)


def test_presets_place_text_and_image():
    flux = dit(encoding="flux1")
    assert isinstance(flux.encoding, PresetMd)
    assert flux.positions((2, 3), 4) == Grid((1, 2, 3), prefix=4)
    assert dit(encoding="wan").positions((2, 3), 4) == Grid((1, 2, 3), prefix=4)
    lumina = dit(**ENCODINGS["lumina2"]).positions((1, 2), 3)
    assert lumina.coords.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [3, 0, 1]]
    assert torch.equal(flux.encoding.get_omega(), flux.preset.omega)
    # one per block, or shared by all
    learned = {"rope_vit_mixed": {"encoding.0.omega", "encoding.1.omega"}, "mochi": {"encoding.omega"}}
    for name, names in learned.items():
        model = dit(encoding=name)
        assert names <= model.no_weight_decay()
        assert names == {n for n, _ in model.named_parameters() if n.startswith("encoding")}


def test_presets_take_a_phase():
    model, (x, t, text) = dit(encoding="flux1", encoding_kwargs={"phase": "k"}), inputs()
    assert model.no_weight_decay() >= {"encoding.0.phase", "encoding.1.phase"}
    model(x, t, text).square().sum().backward()
    assert all(layer.phase.grad.abs().max() > 0 for layer in model.encoding)


def test_interval_and_checkpointing():
    model = dit(encoding="mixed", interval=True)
    x, t, text = inputs()
    torch.testing.assert_close(model(x, t, text), model(x, t, text, r=t))
    assert (model(x, t, text, r=t / 2) - model(x, t, text)).abs().max() > 1e-3
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x, t, text, r=t / 2).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        assert all(grad is not None for grad in grads[-1])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_keeps_frequencies_and_dtype():
    model = dit(encoding="flux1", absolute="sincos").bfloat16()
    assert model.encoding.get_omega().dtype == torch.float64
    x, t, text = inputs()
    assert model(x.bfloat16(), t, text).dtype == torch.bfloat16
    assert dit(encoding="mixed").bfloat16().no_weight_decay() == {
        "encoding.0.omega", "encoding.1.omega", "text_encoder.embed.weight",
    }  # fmt: skip


def test_autocast_keeps_the_residual_and_rounds_q_and_k():
    model, seen = dit(encoding="rotate"), []
    model.encoding.register_forward_pre_hook(lambda _, args: seen.extend(a.dtype for a in args))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.extend((args[0].dtype, args[1].dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs())
    assert seen == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16] * 2


def test_padding_is_a_gate_of_linear_attention():
    q, k, v = torch.randn(3, 2, 1, 6, 4).unbind()
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    for encoding, normalizer in ((CosineMd(4, 1, act="softplus"), "unrotated"), (RotateMd(4, 1), "none")):
        attention = LinearAttention(encoding, normalizer=normalizer)
        y = attention(q, k, v, Grid((6,)), gate=mask[:, None])
        short = attention(*(a[:1, :, :4] for a in (q, k, v)), Grid((4,)))
        torch.testing.assert_close(y[:1, :, :4], short)
        torch.testing.assert_close(y[1:], attention(q, k, v, Grid((6,)))[1:])
    encoding = CosineMd(4, 1, act="softmax", dim=-2)
    with pytest.raises(ValueError, match=r"gate: .*dim=-2"):
        LinearAttention(encoding)(q, k, v, Grid((6,)), gate=mask[:, None])


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["text on an axis", "qwen_image"], ["text on an axis", "diagonal, linear", "flux1", "lumina2", "qwen_image"]
    ),
)
def test_positions_compile_once_for_all_sizes(name):
    def f(image, mask):
        placed = model.positions(image.shape, mask.shape[1], mask=mask)
        return placed.coordinates() if isinstance(placed, Grid) else placed.coords

    torch._dynamo.reset()
    counter, model = CompileCounter(), dit(depth=1, **ENCODINGS[name])
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    for height, width, length in ((4, 6, 5), (10, 7, 3)):
        args = torch.empty(height, width), torch.ones(2, length, dtype=torch.bool)
        torch.testing.assert_close(compiled(*args), f(*args))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_one_graph_for_all_sizes():
    torch._dynamo.reset()
    counter, model = CompileCounter(), dit(depth=1, absolute="sincos", **ENCODINGS["text on an axis"])
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    # torch.compile assumes that sizes that are equal at first stay equal.
    for batch, height, width, length in ((2, 8, 12, 9), (3, 20, 14, 6)):
        x, t = torch.randn(batch, 3, height, width), torch.rand(batch)
        text = tokenize(["x" * length] * batch)
        torch.testing.assert_close(compiled(x, t, text), model(x, t, text), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


BAD = {
    "axes": (r"num_axes: expected 2 \(images\) or 3", lambda: dit(num_axes=4)),
    "patch": (r"patch_size: .*\(1, 2, 2\)", lambda: dit(patch_size=(1, 2, 2))),
    "heads": (r"embed_dim: expected a multiple of .* 10, got 64", lambda: dit(num_heads=5)),
    "encoding": (r"encoding: .*'flux3'", lambda: dit(encoding="flux3")),
    "preset without rotation": (r"encoding: .*'pope'", lambda: dit(encoding="pope")),
    "preset of another order": (r"encoding: .*row-major.*'qwen2_vl_vision'", lambda: dit(encoding="qwen2_vl_vision")),
    "preset of other axes": (r"shape: eva02 expects a shape with 2", lambda: dit(num_axes=3, encoding="eva02")),
    "rules beside a preset": (r"flux1, which defines both", lambda: dit(encoding="flux1", text_positions="zero")),
    "rule": (r"text_positions: .*'left'", lambda: dit(text_positions="left")),
    "axis": (r"axes from 0 to 1, got \(2,\)", lambda: dit(text_positions="axis", image_after=(2,))),
    "absolute": (r"absolute: .*'learned'", lambda: dit(absolute="learned")),
    "attention": (r"attention: .*'flash'", lambda: dit(attention="flash")),
    "normalizer": (r"normalizer: .*act='none'", lambda: dit(attention="linear", encoding=RotateMd(32, 2))),
    "video": (r"x: expected shape \(B, 3, height, width\), got \(2, 3, 1, 8, 8\)", lambda: dit()(*inputs(1, 8, 8))),
    "frames first": (
        r"x: expected shape \(B, 3, frames, height, width\), got \(2, 5, 3, 8, 8\); .*pass x.movedim\(2, 1\)",
        lambda: dit(num_axes=3)(torch.randn(2, 5, 3, 8, 8), torch.rand(2)),
    ),
    "channels last": (r"got \(2, 8, 8, 3\); .*pass x.movedim\(3, 1\)", lambda: dit()(torch.randn(2, 8, 8, 3), None)),
    "odd size": (r"x: expected sizes that are multiples of \(2, 2\), got \(8, 7\)", lambda: dit()(*inputs(8, 7))),
    "no rows": (r"x: expected sizes that are multiples of \(2, 2\), got \(0, 8\)", lambda: dit()(*inputs(0, 8))),
    "time as a number": (r"t: expected a floating-point .*, got 0\.5$", lambda: dit()(inputs()[0], 0.5)),
    "grids": (r"sides: expected positive numbers, such as \(8,\), got 8", lambda: TrainedGrids(8)),
    "empty grids": (r"sides: expected positive numbers, such as \(8,\), got \(\)", lambda: TrainedGrids(())),
    "time": (r"t: expected a floating-point tensor of shape \(2,\)", lambda: dit()(inputs()[0], torch.rand(3))),
    "texts": (
        r"text: expected batch size 2 \(one caption per sample\), got 1",
        lambda: dit()(*inputs()[:2], tokenize([RED])),
    ),
    "texts for guidance": (
        r"text: expected batch size 2 \(one caption per sample\), got 1; repeat your captions",
        lambda: sample(dit(), inputs()[0], tokenize([RED]), scale=3.0, steps=1),
    ),
    "negative texts": (
        r"negative: expected batch size 2 \(one caption per sample\), got 3",
        lambda: sample(dit(), inputs()[0], negative=tokenize([RED] * 3), scale=3.0, steps=1),
    ),
    "text without encoder": (r"text: .*because the model has no text_encoder", lambda: dit(text=False)(*inputs())),
    "text as floats": (r"text: expected integer tokens", lambda: dit()(*inputs()[:2], torch.rand(2, 3))),
    "text as strings": (r"text: expected tokens .* got list; pass tokenize", lambda: dit()(*inputs()[:2], [RED, RED])),
    "interval": (r"r: .*interval=True", lambda: dit()(*inputs(), torch.rand(2))),
    "method": (r"method: .*'rk4'", lambda: integrate(lambda z, t: z, torch.ones(1), time_grid(1), "rk4")),
    "steps": (r"steps, shift: .*0", lambda: time_grid(0)),
    "max_length": (r"captions, max_length: .*0", lambda: tokenize([RED], max_length=0)),
    "width": (r"width: expected a multiple of .*6", lambda: TextEncoder(16, num_heads=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    message, call = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


# --- text ------------------------------------------------------------------------------------------------


def test_tokens():
    tokens = tokenize(["ab", "é", ""], max_length=3)
    assert tokens.tolist() == [[START, 2 + 97, 2 + 98], [START, 2 + 0xC3, 2 + 0xA9], [START, PAD, PAD]]
    assert tokenize([DOG], max_length=3).shape == (1, 3)
    dropped = TextEncoder(16, 1, 2).drop(tokens, torch.tensor([True, False, False]))
    assert dropped.tolist() == [[START, PAD, PAD], *tokens.tolist()[1:]]
    with pytest.raises(TypeError, match=r"captions: .*'red'"):
        tokenize(RED)


def test_the_encoder_sees_the_order_of_bytes():
    encoder = TextEncoder(16, depth=1, num_heads=2).eval()
    pooled = encoder(tokenize(["ab", "ba"])).pooled
    assert (pooled[0] - pooled[1]).abs().max() > 1e-6


# --- conditions other than bytes ---------------------------------------------------------------------------


class Foreign(nn.Module):
    """Encoder of a user who has not read the documentation."""

    width = 16

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 16)

    def forward(self, labels):
        e = self.table(labels)
        return Text(e, None, e[:, 0])


def pretrained(kind):
    """Build a tiny T5 or CLIP with random weights, and a word tokenizer."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "red": 2, "green": 3, "dog": 4, "a": 5}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A <s>", special_tokens=[("<s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<s>")
    torch.manual_seed(3)
    if kind == "t5":
        config = transformers.T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        return PretrainedEncoder(transformers.T5EncoderModel(config), tokenizer)
    config = transformers.CLIPTextConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=1
    )
    return PretrainedEncoder(transformers.CLIPTextModel(config), tokenizer)


def precomputed(length, batch=2, pooled=8):
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1:, length - 1] = 0
    features = torch.randn(batch, length, 16, generator=generator)
    return Text(features, mask, torch.randn(batch, pooled, generator=generator) if pooled else None)


CONDITIONS = {
    "bytes": lambda: ({"text_encoder": TextEncoder(16, 1, 2)}, tokenize([RED, DOG]), tokenize(["blurry"])),
    "labels": lambda: ({"text_encoder": LabelEncoder(10, 24)}, torch.tensor([0, 3]), torch.tensor([7])),
    "t5": lambda: ({"text_encoder": pretrained("t5")}, [RED, DOG], ["a dog"]),
    "clip": lambda: ({"text_encoder": pretrained("clip")}, [RED, DOG], ["a dog"]),
    "features": lambda: ({"text_width": 16, "pooled_width": 8}, precomputed(5), precomputed(3, 1)),
    "features alone": lambda: ({"text_width": 16}, precomputed(5, pooled=0), precomputed(3, 1, pooled=0)),
    "pooled alone": lambda: (
        {"pooled_width": 8}, precomputed(5)._replace(features=None, mask=None), Text(None, None, torch.ones(1, 8)),
    ),
    "features with their empty": lambda: (
        {"text_encoder": TextFeatures(16, 8, Text(torch.ones(1, 2, 16), None, torch.ones(1, 8)))}, precomputed(5),
        precomputed(3, 1),
    ),
}  # fmt: skip


def conditioned(name, **kwargs):
    own, text, negative = CONDITIONS[name]()
    model = dit(text=False, encoding="rotate", **{**own, **kwargs})
    return model, *inputs()[:2], text, negative


@pytest.mark.parametrize("name", CONDITIONS)
@torch.no_grad()
def test_every_condition_says_what_empty_is(name):
    """Guidance, forward(text=None) and training dropout use the same empty condition. A negative text replaces it."""
    model, x, t, text, negative = conditioned(name)
    y, without = model(x, t, text), model(x, t)
    assert (y - without).abs().amax((1, 2, 3)).min() > 1e-3
    one_each = torch.tensor([False, True])
    for given in (text, model.encode_text(text)):
        torch.testing.assert_close(model(x, t, given, drop=one_each)[1], without[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(x, t, given, drop=one_each)[0], y[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(guided(model, given, 3.0)(x, t), without + 3 * (y - without), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(guided(model, given)(x, t), y, rtol=1e-4, atol=1e-5)
    away = torch.cat([model(x[i : i + 1], t[i : i + 1], negative) for i in range(2)])
    torch.testing.assert_close(guided(model, text, 3.0, negative)(x, t), away + 3 * (y - away), rtol=1e-3, atol=1e-4)
    only = guided(model, None, 3.0, model.encode_text(negative))(x[:1], t[:1])
    torch.testing.assert_close(only, away[:1] + 3 * (without - away)[:1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", CONDITIONS)
def test_every_condition_trains(name):
    model, x, t, text, _ = conditioned(name)
    model.train()
    loss = flow_matching_loss(model, x, text, t, torch.randn_like(x), drop=torch.tensor([False, True])).mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    if isinstance(model.text_encoder, PretrainedEncoder):
        assert not model.text_encoder.model.training
        assert not any(p.requires_grad for p in model.text_encoder.model.parameters())
    _, _, _, again, _ = conditioned(name)
    other = dit(text=False, encoding="rotate", **CONDITIONS[name]()[0])
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x, t, again), model.eval()(x, t, text))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels", "features"])
def test_conditions_in_one_compiled_graph(name):
    model, x, t, text, _ = conditioned(name, depth=1)
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    drop = torch.tensor([True, False])
    torch.testing.assert_close(compiled(x, t, text, drop=drop), model(x, t, text, drop=drop))
    assert counter.frame_count == 1


def test_texts_of_different_lengths():
    long, short = precomputed(5), precomputed(3)._replace(mask=None)
    both = join_texts(long, short)
    assert both.features.shape == (4, 5, 16)
    assert both.mask.sum(1).tolist() == [5, 4, 3, 3]
    mixed = replace_texts(short, long, torch.tensor([False, True]))
    assert mixed.mask.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False]]
    assert torch.equal(mixed.pooled, torch.stack([short.pooled[0], long.pooled[1]]))
    plain = Text(torch.ones(1, 2, 4))
    assert join_texts(plain, plain).mask is None
    assert (plain.batch_size, plain.zeros(3).features.shape) == (1, (3, 1, 4))


@torch.no_grad()
def test_an_encoder_that_does_not_say_what_empty_is():
    """The error is clear. Precomputed features become zeros, and a negative text needs no empty condition."""
    model = dit(text=False, encoding="rotate", text_encoder=Foreign())
    x, t, _ = inputs()
    labels = torch.tensor([[1], [2]])
    missing = r"text_encoder: Foreign has no method empty\(batch\).*; add this method"
    for call in (
        lambda: model(x, t), lambda: guided(model, labels, 2.0), lambda: model(x, t, labels, drop=t > 2),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=missing):
            call()
    y, other = model(x, t, labels), model(x, t, labels + 1)
    torch.testing.assert_close(guided(model, labels, 2.0, labels + 1)(x, t), 2 * y - other, rtol=1e-3, atol=1e-4)
    encoded = model.encode_text(labels)
    without = model(x, t, encoded.zeros(2))
    torch.testing.assert_close(guided(model, encoded, 2.0)(x, t), 2 * y - without, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model(x, t, encoded, drop=torch.tensor([True, True])), without)


WRONG_CONDITIONS = {
    "no width": (
        r"text_encoder: expected .* attributes width .* use .*PretrainedEncoder",
        {"text_encoder": nn.Linear(1, 1)},
    ),
    "two widths": (r"text_width, pooled_width: .*leave out both", {"text_encoder": Foreign(), "text_width": 3}),
}


@pytest.mark.parametrize("name", WRONG_CONDITIONS)
def test_encoders_that_do_not_fit(name):
    message, kwargs = WRONG_CONDITIONS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        dit(text=False, **kwargs)


def test_texts_that_do_not_fit():
    model, x, t, text, _ = conditioned("features")
    narrow, labels = Text(torch.ones(2, 1, 3)), LabelEncoder(3)
    for message, call in (
        (r"text: expected features of 16 channels, .*got 3; .*text_width=", lambda: model(x, t, narrow)),
        (r"text: expected pooled of 8 channels, .*got None", lambda: model(x, t, text._replace(pooled=None))),
        (r"text: expected precomputed features as an .*Text\(.*got Tensor", lambda: model(x, t, text.features)),
        (
            r"drop: expected a boolean tensor of shape \(2,\), got torch.int64",
            lambda: model(x, t, text, drop=torch.ones(2).long()),
        ),
        (r"drop: .*no text_encoder", lambda: dit(text=False)(x, t, drop=torch.tensor([True, False]))),
        (r"negative: expected batch size 1, or 2 like text", lambda: guided(model, text, 2.0, precomputed(2, 3))),
        (r"empty: expected a Text with batch size 1 .*, got batch size 2", lambda: TextFeatures(16, 8, text)),
        (
            r"text: expected integer class labels of shape \(B,\), got .*int64 \(2, 1\)",
            lambda: labels(torch.ones(2, 1).long()),
        ),
        (r"text: expected integer class labels of shape \(B,\), got list; pass torch.tensor of", lambda: labels([1])),
        (r"text: expected class labels from 0 to 2, .* got 0 to 4$", lambda: labels(torch.tensor([0, 4]))),
        (r"text: expected class labels from 0 to 2, .* got 4$", lambda: labels(torch.tensor([4]))),
        (r"text: expected a sequence of captions, got 'red'", lambda: pretrained("t5")(RED)),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    wrong = dit(text=False, text_encoder=Foreign())
    wrong.text_encoder.forward = lambda labels: torch.ones(2, 1, 16)
    with pytest.raises(TypeError, match=r"text_encoder: expected an encoder that returns an .*Text\(.*, got Tensor"):
        wrong(x, t, torch.tensor([1, 2]))


# --- flow matching ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rotate", "cosine", "linear, norm", "text on an axis", "qwen_image"])
def test_jvp_equals_finite_differences(name):
    model = dit(interval=True, depth=1, **ENCODINGS[name]).double()
    x, t, text = inputs(4, 6, dtype=torch.float64)
    dx, dt, r = torch.randn_like(x), torch.rand_like(t), t / 3
    y, dy = jvp(lambda x, t: model(x, t, text, r), (x, t), (dx, dt))
    torch.testing.assert_close(y, model(x, t, text, r))
    step = 1e-6
    ends = [model(x + s * step * dx, t + s * step * dt, text, r) for s in (1, -1)]
    torch.testing.assert_close(dy, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-5 * dy.abs().max().item())


def test_a_mean_flow_step():
    """The gradients of all parameters are those of |u - target|² with a fixed target. A step lowers the loss."""
    model = dit(interval=True, depth=1, encoding="rotate").double()
    x, t, text = inputs(4, 6, dtype=torch.float64)
    noise, r = torch.randn_like(x), t / 3
    loss = mean_flow_loss(model, x, text, r, t, noise).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    z, v = (1 - t[:, None, None, None]) * x + t[:, None, None, None] * noise, noise - x
    step = 1e-6
    with torch.no_grad():
        ends = [model(z + s * step * v, t + s * step, text, r) for s in (1, -1)]
        target = v - (t - r)[:, None, None, None] * (ends[0] - ends[1]) / (2 * step)
    expected = (model(z, t, text, r) - target).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for a, b in zip(grads, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(b.abs().max().item(), 1e-3))
    weights = {name: p - 1e-7 * g for (name, p), g in zip(model.named_parameters(), grads, strict=True)}
    again = mean_flow_loss(lambda *a: functional_call(model, weights, a), x, text, r, t, noise).mean()
    assert again < loss


def test_loss_is_zero_for_the_velocity_itself():
    x, t, _ = inputs()
    noise = torch.randn_like(x)
    assert flow_matching_loss(lambda z, t, text: noise - x, x, None, t, noise).tolist() == [0, 0]
    at_ends = []
    flow_matching_loss(lambda z, t, text: at_ends.append(z) or z, x, None, torch.tensor([0.0, 1.0]), noise)
    torch.testing.assert_close(at_ends[0], torch.stack([x[0], noise[1]]))
    times = draw_times(1000, generator=torch.Generator().manual_seed(0))
    assert times.min() > 0
    assert times.max() < 1
    assert abs(times.mean() - 0.5) < 0.03


def test_losses_reject_tensors_that_do_not_fit():
    model = dit(interval=True, encoding="rotate")
    x, t, text = inputs()
    noise = torch.randn_like(x)
    for message, change in (
        (r"noise: expected x's shape \(2, 3, 8, 12\), got \(2, 1, 8, 12\)", {"noise": noise[:, :1]}),
        (r"noise: expected x's shape .*got \(1, 3, 8, 12\)", {"noise": noise[:1]}),
        (r"x: expected a floating-point tensor .*got torch.uint8", {"x": x.byte()}),
        (r"t: expected times from 0 .*to 1 .*got 300; divide timesteps", {"t": torch.tensor([0.5, 300.0])}),
        (r"t: expected times from 0 .*got -0.5$", {"t": t - t - 0.5}),
        (r"t: expected times from 0 .*got nan$", {"t": t * math.nan}),
        (r"t: expected a floating-point tensor of shape \(2,\), .*got torch.float32 \(2, 1\)", {"t": t[:, None]}),
        (r"r: expected a floating-point tensor of shape \(2,\), .*got torch.float32 \(1,\)", {"r": t[:1]}),
        (r"r: expected a floating-point tensor of shape \(2,\), .*got 0.0", {"r": 0.0}),
    ):
        args = {"x": x, "text": text, "t": t, "noise": noise} | change
        with pytest.raises((TypeError, ValueError), match=message):
            mean_flow_loss(model, **{"r": t / 2, **args})
        if "r" not in change:
            with pytest.raises((TypeError, ValueError), match=message):
                flow_matching_loss(model, **args)
    with pytest.raises(
        ValueError, match=r"model: expected an output of x's shape \(2, 3, 8, 12\), got \(2, 1, 8, 12\)"
    ):
        flow_matching_loss(lambda z, t, text: z[:, :1], x, text, t, noise)


def test_the_model_rejects_timesteps():
    model = dit(interval=True, encoding="rotate")
    x, t, text = inputs()
    for message, change in (
        (r"t: expected times from 0 \(image\) to 1 \(noise\), got 981; divide timesteps .*by 1000", {"t": t * 0 + 981}),
        (r"t: expected times .*got nan", {"t": t * math.nan}),
        (r"r: expected times .*got 981", {"r": t * 0 + 981}),
        (r"r: expected a floating-point tensor of shape \(2,\), .*got torch.float32 \(1,\)", {"r": t[:1]}),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{"x": x, "t": t, "text": text, **change})
    assert model(x, t - 2, text).isfinite().all()  # ln(σ) / 4


def test_guidance_rejects_scales_that_are_not_numbers():
    model = dit(encoding="rotate")
    x, _, text = inputs()
    for scale in (math.nan, math.inf, torch.ones(2)):
        with pytest.raises(ValueError, match="scale: expected a finite number, got"):
            sample(model, x, text, scale=scale, steps=1)
    with pytest.warns(UserWarning, match="negative has no effect with scale=1; pass another scale"):
        sample(model, x, text, negative=text, steps=1)


def test_guidance():
    model = dit(encoding="rotate")
    x, t, text = inputs()
    with_text, without = model(x, t, text), model(x, t)
    assert (with_text - without).abs().max() > 1e-2
    for scale in (0.0, 1.0, 3.0):
        found = guided(model, text, scale)(x, t)
        torch.testing.assert_close(found, without + scale * (with_text - without), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(guided(model, None, 3.0)(x, t), without)
    negative = text[:1]
    away = model(x, t, negative.expand(2, -1))
    found = guided(model, None, 3.0, negative)(x, t)
    torch.testing.assert_close(found, away + 3 * (without - away), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["euler", "heun"])
def test_many_steps_in_16_bits_are_accurate(method, dtype):
    """The flow dz/dt = 1/2 from t = 1 to 0 gives z(0) = z(1) - 1/2, although one step is below the precision of z."""
    noise = torch.linspace(-3, 3, 13, dtype=dtype)[:, None]
    found = sample(lambda z, t, text: torch.full_like(z, 0.5), noise, steps=2000, method=method)
    assert found.dtype == dtype
    torch.testing.assert_close(found, noise - 0.5, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2)])
def test_order_of_the_samplers(method, order):
    """The flow dz/dt = t z from t = 1 to 0 gives z(0) = z(1) exp(-1/2). The error falls with steps^-order."""
    z = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    errors = [
        (integrate(lambda z, t: t[:, None] * z, z, time_grid(steps), method) - z * math.exp(-0.5)).abs().max().item()
        for steps in (50, 100, 200)
    ]
    for coarse, fine in pairwise(errors):
        assert abs(math.log2(coarse / fine) - order) < 0.1


def test_sampling_a_straight_path_is_exact():
    x, noise = torch.randn(2, 2, 3, 4, 4).unbind()
    for steps, method in ((1, "euler"), (3, "heun")):
        for shift in (1.0, 3.0):
            found = sample(_Straight(noise - x), noise, None, steps=steps, method=method, shift=shift)
            torch.testing.assert_close(found, x)
    times = time_grid(4, shift=3.0)
    assert (times[0], times[-1]) == (1, 0)
    torch.testing.assert_close(times[2], torch.tensor(0.75, dtype=torch.float64))
    assert torch.get_default_dtype() == torch.float32


class _Straight:
    def __init__(self, velocity):
        self.velocity = velocity

    def __call__(self, z, t, text=None):
        assert t.shape == z.shape[:1]
        return self.velocity


def test_training_lowers_the_loss_and_runs_at_another_size():
    torch.manual_seed(0)
    model = dit(randomized=False, encoding="rotate", depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    colours = torch.tensor([[1.0, -1, -1], [-1, 1, -1]])[:, :, None, None]
    images, captions = colours.expand(-1, -1, 4, 4).repeat(8, 1, 1, 1), tokenize(["red", "green"]).repeat(8, 1)
    losses = []
    for _ in range(60):
        loss = flow_matching_loss(model, images, captions, draw_times(16), torch.randn_like(images)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    found = sample(model, torch.randn(2, 3, 6, 8), captions[:2], steps=8)
    assert found.shape == (2, 3, 6, 8)
    assert found[0, 0].mean() > found[1, 0].mean()
    assert found[1, 1].mean() > found[0, 1].mean()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rotate", "cosine", "linear", "text on an axis"])
def test_on_a_gpu(name):
    """The kernels agree with the CPU's reference, even in forward mode. All gradients exist under 16-bit autocast."""
    model = dit(interval=True, **ENCODINGS[name])
    x, t, text = inputs()
    expected = model(x, t, text)
    tangents = torch.randn_like(x), torch.rand_like(t)
    derivative = jvp(lambda x, t: model(x, t, text), (x, t), tangents)[1]
    model.cuda()
    x, t, text = x.cuda(), t.cuda(), text.cuda()
    torch.testing.assert_close(model(x, t, text).cpu(), expected, rtol=1e-3, atol=1e-3)
    found = jvp(lambda x, t: model(x, t, text), (x, t), tuple(a.cuda() for a in tangents))[1]
    assert (found.cpu() - derivative).abs().max() < 1e-2 * derivative.abs().max()
    seen: list[torch.dtype] = []
    model.encoding.register_forward_pre_hook(lambda _, args: seen.extend(a.dtype for a in args))
    with torch.autocast("cuda", torch.bfloat16):
        loss = flow_matching_loss(model, x, text, t, torch.randn_like(x)).mean()
    assert set(seen) == {torch.bfloat16}
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert sample(model, torch.randn_like(x), text, scale=2.0, steps=2, method="heun").isfinite().all()


def test_positions_follow_the_device():
    placed = dit(encoding="qwen_image").positions((2, 2), 3, device="meta")
    assert isinstance(placed, Coordinates)
    assert placed.coords.is_meta
