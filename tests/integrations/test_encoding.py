"""A backbone's encoding: how it is built, what layers and heads share, its parameter names, and scaled positions."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("timm")

from lrpe_md.models.dit import DiT
from lrpe_md.models.lm import CausalLm, LmConfig
from lrpe_md.models.text import TextEncoder
from lrpe_md.models.video import LrpeVideoTransformer

from lrpe_md import CosineMd, Grid, PresetMd, Rotate1d, RotateMd, adapt, adapt_attention, preset
from lrpe_md.integrations.encoding import Activation, EncodingStack, build_encoding, encoding_options
from lrpe_md.integrations.timm import LrpeVisionTransformer
from lrpe_md.modules.base import FrequencyModule

SIZES: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 2}
LEARNED: dict[str, Any] = {"encoding": "cosine", "encoding_kwargs": {"learnable": True}}


def vit(**kwargs: Any) -> LrpeVisionTransformer:
    return LrpeVisionTransformer(img_size=16, patch_size=4, num_classes=3, **SIZES, **kwargs)


def video(**kwargs: Any) -> LrpeVideoTransformer:
    return LrpeVideoTransformer(img_size=16, patch_size=4, num_frames=4, num_classes=3, **SIZES, **kwargs)


def dit(**kwargs: Any) -> DiT:
    return DiT(**SIZES, **kwargs)


def output(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, DiT):
        return model(torch.randn(2, 3, 8, 12, generator=generator), torch.tensor([0.2, 0.7]))
    frames = (4,) if isinstance(model, LrpeVideoTransformer) else ()
    return model(torch.randn(2, 3, *frames, 16, 16, generator=generator))


BACKBONES = pytest.mark.parametrize("build", [vit, video, dit])


def built(encoding: Any, depth: int = 3, num_axes: int = 2, **kwargs: Any) -> EncodingStack:
    return EncodingStack(build_encoding(encoding, kwargs, 24, 4, depth, num_axes))


# --- what it is made from --------------------------------------------------------------------------------------------


@BACKBONES
@pytest.mark.parametrize("cls", [CosineMd, RotateMd])
def test_a_class_and_a_partial_are_factories(build, cls):
    """The second positional argument of both is num_axes, so they must be called with keywords."""
    torch.manual_seed(0)
    model = build(encoding=partial(cls, learnable=True))
    assert all(isinstance(layer, cls) and layer.learnable and layer.num_heads == 2 for layer in model.encoding)
    assert {layer.num_axes for layer in model.encoding} == {getattr(model, "num_axes", 2)}
    torch.manual_seed(0)
    other = build(encoding=cls, encoding_kwargs={"learnable": True})
    nn.init.ones_(model.head.weight)
    nn.init.ones_(other.head.weight)
    assert torch.equal(output(model), output(other))


def test_what_a_partial_binds_stays_bound():
    stack = built(partial(CosineMd, num_axes=3, num_heads=1, base=7.0))
    first: Any = stack[2]
    assert (first.num_axes, first.num_heads, first.head_dim, first.base) == (3, 1, 24, 7.0)
    positional: Any = built(partial(CosineMd, 12), num_axes=3)[0]
    assert (positional.head_dim, positional.num_axes, positional.num_heads) == (12, 3, 4)


def test_factories_without_our_names_are_called_in_order():
    seen = []

    def plain(width, count):
        seen.append((width, count))
        return nn.Identity()

    def partly(head_dim, count):
        return plain(head_dim, count)

    built(plain)
    built(partly)
    built(lambda *sizes: plain(*sizes))
    assert seen == [(24, 4)] * 9
    one_axis: Any = built(Rotate1d, num_axes=1, base=5.0)[0]  # it has no num_axes
    assert (one_axis.num_heads, one_axis.base) == (4, 5.0)


# --- what is shared --------------------------------------------------------------------------------------------------

SHARED = [
    ("cosine", {}, "model", "shared"),
    ("rotate", {"learnable": True}, "model", "shared"),
    ("rotate", {"frequencies": "mixed"}, "model", "own"),
    ("cosine", {"phase": True}, "layer", "own"),
    ("mixed", {}, "layer", "own"),
    ("rope_vit_mixed", {}, "layer", "own"),
    ("eva02", {}, "model", "shared"),
    (CosineMd, {}, "layer", "own"),
    (lambda head_dim, num_heads: CosineMd(head_dim), {}, "layer", "shared"),
]


def sharing_of(stack):
    return "layer" if stack.by_layer else "model"


def heads_of(stack):
    found = [m for layer in stack.distinct if layer is not None for m in layer.modules()]
    tables = [(m.get_omega(), m.get_phase()) for m in found if isinstance(m, FrequencyModule)]
    is_own = any(omega.shape[0] > 1 or (phase is not None and phase.shape[-2] > 1) for omega, phase in tables)
    return "own" if is_own else "shared"


@pytest.mark.parametrize(("encoding", "kwargs", "sharing", "heads"), SHARED)
def test_what_layers_and_heads_share(encoding, kwargs, sharing, heads):
    stack = built(encoding, **kwargs)
    assert (sharing_of(stack), heads_of(stack)) == (sharing, heads)
    assert len({id(stack[i]) for i in range(3)}) == len(stack.distinct) == (3 if sharing == "layer" else 1)
    for wanted in ("model", "layer"):
        assert sharing_of(built(encoding, sharing=wanted, **kwargs)) == wanted
    if encoding in ("cosine", "rotate", "mixed"):
        for wanted in ("shared", "own"):
            changed: Any = built(encoding, heads=wanted, **kwargs)
            assert (sharing_of(changed), heads_of(changed)) == (sharing, wanted)
            assert changed[0].get_omega().shape[0] in (1, 4)


def test_layers_of_their_own_learn_apart_and_differ_where_they_are_random():
    stack: Any = built("rotate", frequencies="mixed", sharing="layer")
    assert not torch.equal(stack[0].omega, stack[1].omega)
    learned: Any = built("cosine", learnable=True, sharing="layer", heads="own")
    assert learned[0].log_theta is not learned[1].log_theta
    assert learned[0].log_theta.numel() == 4 * 12
    split: Any = built("rotate", learnable=True, split=(1, 2), heads="own")
    assert split[0].get_omega().shape == (4, 12, 2)


def test_no_encoding_and_one_of_the_users():
    none, module = EncodingStack(None), CosineMd(24, 2, learnable=True)
    assert (none[1], sharing_of(none), heads_of(none), none.preset) == (None, "model", "shared", None)
    assert built(module)[2] is module
    assert isinstance(built(None, act="relu")[1], Activation)
    stack = built("eva02")
    assert stack.preset is not None
    assert stack.lay_out((3, 4), 1) == preset("eva02", 24).positions(1, (3, 4))


WRONG = [
    ("cosine", {"sharing": "all"}, "sharing: expected 'model' or 'layer', got 'all'"),
    ("cosine", {"heads": "each"}, "heads: expected 'shared' or 'own', got 'each'"),
    ("cosine", {"heads": "own", "num_heads": 4}, "heads: expected None with num_heads"),
    ("eva02", {"heads": "own"}, "heads: expected None with a preset"),
    (CosineMd(24), {"sharing": "layer"}, "encoding_kwargs: expected no options with a module"),
    (None, {"sharing": "layer"}, "encoding_kwargs: expected only act and dim"),
    ("unregistered", {}, "nn.Module, or None, got 'unregistered'"),
]


@pytest.mark.parametrize(("encoding", "kwargs", "message"), WRONG)
def test_errors(encoding, kwargs, message):
    with pytest.raises(ValueError, match=message):
        built(encoding, **kwargs)


def factory(head_dim: int, num_heads: int, width: int = 3) -> nn.Module:
    return CosineMd(head_dim, num_heads=num_heads)


@pytest.mark.parametrize("encoding", ["cosine", "rotate", "mixed", "eva02", preset("eva02", 24), factory, CosineMd])
def test_unknown_options(encoding):
    options = r"xpected options of .*\(.*\)"
    advice = r"got 'keep_encoded'; pass keep_encoded= to adapt\(\) or the model itself"
    with pytest.raises(TypeError, match=rf"^encoding_kwargs: e{options}, {advice}"):
        built(encoding, keep_encoded=False)
    near, option = ("widt", "width") if encoding is factory else ("leanable", "learnable")
    with pytest.raises(TypeError, match=rf"^encoding_kwargs: unknown {near!r}; did you mean {option!r}\? E{options}$"):
        built(encoding, **{near: 1})


@pytest.mark.parametrize("encoding", [None, CosineMd(24)])
def test_options_of_the_model_without_options_of_the_encoding(encoding):
    with pytest.raises(ValueError, match=r"encoding_kwargs: .*; pass attention= to adapt\(\) or the model itself"):
        built(encoding, attention="linear")


@pytest.mark.parametrize("encoding", ["cosine", "rotate", "mixed", "eva02", preset("eva02", 24), None, "none"])
def test_listed_options_are_accepted(encoding):
    """An option that is listed for an encoding is never rejected as unknown, whatever its value."""
    errors = []
    for name in encoding_options(encoding):
        try:
            built(encoding, **{name: None})
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    assert not [error for error in errors if "expected options" in error or "unexpected keyword" in error]


def test_num_axes_inside_encoding_kwargs():
    message = r"^encoding_kwargs: .*, got 'num_axes'; pass num_axes= to adapt_attention\(\) or the model itself"
    with pytest.raises(TypeError, match=message):
        build_encoding("rotate", {"num_axes": 1}, 24, 4, 1, 2)


def test_option_of_the_encoding_outside_encoding_kwargs():
    import timm

    message = r"base: belongs in encoding_kwargs, not in the arguments of {}; pass encoding_kwargs={{'base': 100}}$"
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=1)
    calls: dict[str, Any] = {
        "adapt": lambda **own: adapt(model, "rotate", **own),
        "adapt_attention": lambda **own: adapt_attention(model, "rotate", Grid((4, 4), prefix=1), **own),
        "LrpeVisionTransformer": lambda **own: vit(encoding="rotate", **own),
        "DiT": lambda **own: dit(encoding="rotate", **own),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=message.format(name)):
            call(base=100)
        if name != "adapt_attention":
            with pytest.raises(TypeError, match=rf"argument of {name}; set model.reference = \(4, 4\) afterwards$"):
                call(reference=(4, 4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bass'"):
        calls["adapt"](bass=100)
    assert type(model) is timm.models.VisionTransformer


# --- names -----------------------------------------------------------------------------------------------------------


def lm(**kwargs: Any) -> CausalLm:
    return CausalLm(LmConfig(vocab_size=11, dim=48, depth=2, num_heads=4, num_kv_heads=2, hidden=32, **kwargs))


NAMES = [
    (lambda: vit(**LEARNED), {"encoding.log_theta"}),
    (lambda: vit(encoding="mixed"), {"encoding.0.omega", "encoding.1.omega"}),
    (
        lambda: vit(encoding="cosine", encoding_kwargs={"learnable": True, "phase": True}),
        {f"encoding.{i}.{name}" for i in range(2) for name in ("log_theta", "phase")},
    ),
    (lambda: vit(encoding="rotate"), set()),
    (lambda: video(**LEARNED), {"encoding.log_theta"}),
    (lambda: video(encoding="mixed"), {"encoding.0.omega", "encoding.1.omega"}),
    (lambda: dit(**LEARNED, text_encoder=TextEncoder(32, 1, 2)), {"encoding.log_theta"}),
    (lambda: dit(encoding="mixed"), {"encoding.0.omega", "encoding.1.omega"}),
    (lambda: lm(learnable=True), {f"blocks.{i}.attn.encoding.log_theta" for i in range(2)}),
    (lambda: lm(encoding="cosine", phase=True), {f"blocks.{i}.attn.encoding.phase" for i in range(2)}),
    (lambda: lm(encoding="none"), set()),
]


@pytest.mark.parametrize(("build", "names"), NAMES)
def test_names_of_what_is_learned(build, names):
    """Names are the same in the state_dict and among the parameters."""
    model = build()
    found = {name for name in model.state_dict() if "encoding." in name}
    assert found == names
    assert {name for name, _ in model.named_parameters() if "encoding." in name} == names
    excluded = model.no_weight_decay()
    assert names <= excluded
    assert excluded <= set(dict(model.named_parameters())) | {"pos_embed", "cls_token", "reg_token", "dist_token"}
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())


def layers(paths: str, ends: tuple[str, ...] = ("weight", "bias")) -> set[str]:
    return {f"{path}.{end}" for path in paths.split() for end in ends}


STREAM = "qkv modulation.1 proj mlp.fc1 mlp.fc2"
IMAGE = layers("patch_embed.proj norm head") | {"cls_token"}
IMAGE |= {f"blocks.{i}.{name}" for i in range(2) for name in layers("norm1 norm2 attn.qkv attn.proj mlp.fc1 mlp.fc2")}
TEXT = layers("attn.qkv attn.proj mlp.fc1 mlp.fc2") | layers("norm1 norm2 attn.q_norm attn.k_norm", ("weight",))
DIFFUSION = layers("embed time.mlp.fc1 time.mlp.fc2 text_embed pooled_embed modulation.1 head")
DIFFUSION |= {"text_encoder.embed.weight", "text_encoder.norm.weight"} | {f"text_encoder.blocks.0.{n}" for n in TEXT}
DIFFUSION |= {f"blocks.{i}.image.{name}" for i in range(2) for name in layers(STREAM)}
DIFFUSION |= {f"blocks.0.text.{name}" for name in layers(STREAM)}
DIFFUSION |= {f"blocks.1.text.{name}" for name in layers("qkv modulation.1")}  # text is unused after the last block
DIFFUSION |= {f"blocks.{i}.{s}.{n}_norm.weight" for i in range(2) for s in ("image", "text") for n in "qk"}
LANGUAGE = {"embed.weight", "norm.weight"}
LANGUAGE |= {
    f"blocks.{i}.{name}.weight"
    for i in range(2)
    for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1_g", "mlp.fc1_x", "mlp.fc2")
}


def test_the_other_names_of_each_backbone():
    """Checkpoints of earlier runs load as long as these names don't change."""
    assert set(vit(encoding="rotate").state_dict()) == IMAGE
    assert set(video(encoding="rotate", absolute="learned").state_dict()) == IMAGE | {"pos_embed"}
    assert set(dit(encoding="rotate", text_encoder=TextEncoder(32, 1, 2)).state_dict()) == DIFFUSION
    assert set(lm().state_dict()) == LANGUAGE


def test_a_custom_module_says_itself_what_must_not_decay():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

        def no_weight_decay(self):
            return {"scale"}

    assert {"encoding.scale"} == {name for name in dit(encoding=Custom()).no_weight_decay() if "encoding" in name}


class Wrapper(nn.Module):
    """Pass on calls and attributes, as the wrappers of PEFT, FSDP1 and torch.compile do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


@BACKBONES
def test_wrapped_presets_keep_their_positions(build):
    """A preset with its own rule, which a plain grid would not follow."""
    model = build(encoding="cosmos" if build is video else "dinov3").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    expected = output(model)
    model.encoding = Wrapper(model.encoding)
    assert torch.equal(output(model), expected)


def test_presets_are_modules():
    assert all(isinstance(layer, PresetMd) for layer in built("rope_vit_mixed").distinct)
