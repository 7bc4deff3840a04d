"""Models for other runtimes: both ONNX exporters, torch.jit.trace, and the operators in exported programs."""

import operator

import lrpe_md.models.video
import lrpe_md.models.vit  # noqa: F401  timm's entries
import pytest
import timm
import torch
from lrpe_md.models.dit import TrainedGrids
from lrpe_md.models.text import Text
from parametrizing import slow_except

from lrpe_md import Coordinates, Grid, Rotate1d, adapt, adapt_rotary, linear_attention, preset

DYNAMIC = torch.export.Dim.DYNAMIC
SMALL = {"depth": 1, "embed_dim": 64, "num_heads": 2, "num_classes": 5}
MIXED = "vit_small_patch16_rope_mixed_224"


def vit(encoding, **options):
    return timm.create_model("lrpe_vit_tiny_patch16_224", encoding=encoding, **SMALL, **options)


MODELS = {
    "cosine": lambda: vit("cosine"),
    "rotate, laid over a reference": lambda: with_reference(vit("rotate")),
    "mixed, linear": lambda: vit("mixed", attention="linear", encoding_kwargs={"act": "relu"}),
    "a preset, registers": lambda: vit("dinov3", reg_tokens=2),
    "timm's mixed": lambda: adapt_rotary(timm.create_model(MIXED, dynamic_img_size=True, **SMALL)),
    "a timm ViT": lambda: adapt(
        timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **SMALL), "cosine", absolute="drop"
    ),
    "video": lambda: timm.create_model(
        "lrpe_video_tiny_patch16_224", encoding="rotate", num_frames=4, tubelet_size=2, **SMALL
    ),
}


def with_reference(model):
    model.reference = (14, 14)
    return model


def build(name):
    """Build a model with random weights, including those that are initialised with zeros."""
    model, generator = MODELS[name](), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model.eval()


def image(name, batch, height, width):
    frames = (4,) if name == "video" else ()
    generator = torch.Generator().manual_seed(height)
    return torch.randn(batch, 3, *frames, 16 * height, 16 * width, generator=generator)


def any_size(x):
    return ({0: DYNAMIC, x.ndim - 2: DYNAMIC, x.ndim - 1: DYNAMIC},)


OTHER = [(2, 7, 3), (1, 14, 14), (3, 2, 5)]


@pytest.fixture(scope="module", params=slow_except(["a timm ViT"], MODELS))
def exported(request):
    """Return a name, a model, and its program for any size. The export takes as long as all of the tests below."""
    model, x = build(request.param), image(request.param, 2, 4, 6)
    return request.param, model, torch.export.export(model, (x,), dynamic_shapes=any_size(x))


@pytest.mark.slow
def test_exported_for_any_size(exported):
    """There is one program. It only uses torch's operators, and no operator on which ONNX exporters fail."""
    name, model, program = exported
    program = program.run_decompositions()
    for size in OTHER:
        torch.testing.assert_close(program.module()(image(name, *size)), model(image(name, *size)))
    operators = {node.target for node in program.graph.nodes if node.op == "call_function"}
    ours = {op for op in operators if isinstance(op, torch._ops.OpOverload) and op.namespace not in ("aten", "prims")}
    assert not ours
    assert operator.mod not in operators
    assert not {op for op in operators if "remainder" in str(op)}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_traced_at_a_fixed_size(name):
    model, x = build(name), image(name, 2, 4, 6)
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        torch.testing.assert_close(traced(x.flip(0)), model(x.flip(0)))
    # ONNX's older exporter has no such operator.
    assert "aten::mT" not in {node.kind() for node in traced.inlined_graph.nodes()}


@pytest.mark.parametrize("name", ["cosine", "a timm ViT"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_causal_flag_that_is_a_tensor(name, fused):
    """ONNX's older exporter passes a tensor as the flag."""
    attn = build(name).blocks[0].attn
    attn.fused_attn = fused
    x = torch.randn(2, 5, 64)
    for causal in (True, False):
        expected = attn(x, is_causal=causal)
        torch.testing.assert_close(attn(x, is_causal=torch.tensor(causal)), expected)


def run_onnx(path, x):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_onnx(exported, tmp_path):
    """The exported model runs at any height, width and batch size."""
    pytest.importorskip("onnxscript")
    name, model, program = exported
    torch.onnx.export(program, f=tmp_path / "model.onnx", dynamo=True, verbose=False)
    for size in OTHER:
        x = image(name, *size)
        torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", x), model(x).detach(), rtol=1e-5, atol=1e-5)


# The older exporter can't trace the attention of timm's rotary ViTs. Adapting only replaces the rotation in it.
OLDER = [name for name in MODELS if name != "timm's mixed"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("fused", [True, False])
def test_onnx_by_the_older_exporter(name, fused, tmp_path):
    """The older exporter only exports one size."""
    pytest.importorskip("onnx")
    model, x = build(name), image(name, 2, 4, 6)
    for block in model.blocks:
        block.attn.fused_attn = fused
    torch.onnx.export(model, (x,), str(tmp_path / "model.onnx"), dynamo=False)
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", x), model(x).detach(), rtol=1e-5, atol=1e-5)


class Places(torch.nn.Module):
    """Return positions for text and for an image or video of the inputs' sizes."""

    def __init__(self, locate):
        super().__init__()
        self.locate = locate

    def forward(self, text, image):
        where = self.locate(text.shape[0], tuple(image.shape))
        return where.explicit().coords if isinstance(where, Coordinates) else where.coordinates()


def place_tensor(length, shape):
    return Grid(shape, scale=torch.ones(2)).offset((length, shape[0]))


def place_trained(length, shape):
    return Grid(shape).interpolate(TrainedGrids((4, 6))(shape))


PLACES = {
    **{name: preset(name).positions for name in ("cogvideox", "circle_rope", "videorope")},
    "chronoedit": lambda length, shape: preset("chronoedit").positions(shape),
    "a grid with a tensor": place_tensor,
    "trained grids": place_trained,
}


@pytest.mark.parametrize("name", slow_except(["a grid with a tensor", "videorope"], PLACES))
def test_positions_exported_for_any_size(name):
    """Other runtimes, such as ONNX, ignore guards. So the positions may not rely on any."""
    module, video = Places(PLACES[name]), (3,) if name == "chronoedit" else ()
    dynamic = ({0: DYNAMIC}, dict.fromkeys(range(2 + len(video)), DYNAMIC))
    program = torch.export.export(module, (torch.ones(5), torch.ones(*video, 4, 6)), dynamic_shapes=dynamic)
    exported = program.module(check_guards=False)
    for length, *size in ((9, 2, 6, 4), (2, 5, 3, 9), (3, 2, 8, 8), (4, 3, 20, 9)):
        inputs = torch.ones(length), torch.ones(size if video else size[1:])
        torch.testing.assert_close(exported(*inputs), module(*inputs), rtol=0, atol=1e-12)


def test_batch_size_of_text_in_an_export():
    class Sizes(torch.nn.Module):
        def forward(self, features):
            return features.new_ones(Text(features).batch_size)

    program = torch.export.export(Sizes(), (torch.ones(2, 3, 4),), dynamic_shapes=({0: DYNAMIC},))
    assert program.module()(torch.ones(5, 3, 4)).shape == (5,)


def test_window_exported_for_any_number_of_frames():
    model = timm.create_model(
        "lrpe_video_tiny_patch16_224", num_frames=4, tubelet_size=1, causal="frames", window=3, global_pool="avg",
        **SMALL,
    )  # fmt: skip
    x = torch.randn(1, 3, 2, 16, 16)
    with pytest.raises(ValueError, match="window: expected None in a program exported for any number of frames, got 3"):
        torch.export.export(model, (x,), dynamic_shapes=({2: DYNAMIC},))


class FarTokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoding = Rotate1d(16)

    def forward(self, x, places):
        return self.encoding(x, positions=places[..., None])


@pytest.mark.filterwarnings("ignore")
def test_far_positions_in_a_trace():
    """torch.jit.trace merges constants that are almost equal."""
    x, places = torch.randn(1, 2, 5, 16), torch.randint(10**6, (2, 1, 5))
    traced = torch.jit.trace(FarTokens(), (x, places[0]))
    torch.testing.assert_close(traced(x, places[1]), FarTokens()(x, places[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_far_positions_in_onnx(dynamo, tmp_path):
    """The default exporter rounds constants to float32."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    x, places = torch.randn(1, 2, 5, 16), torch.randint(10**6, (1, 5))
    torch.onnx.export(FarTokens(), (x, places), str(tmp_path / "model.onnx"), dynamo=dynamo, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, (x.numpy(), places.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(found), FarTokens()(x, places))


@pytest.mark.parametrize("decay", [None, pytest.param(torch.tensor([0.5, 0.9]), marks=pytest.mark.slow)])
def test_causal_linear_attention_exported_for_any_length(decay):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return linear_attention(q, k, v, map=None, is_causal=True, decay=decay)

    xs = torch.randn(3, 1, 2, 130, 8).unbind()
    program = torch.export.export(Attention(), xs, dynamic_shapes=({2: DYNAMIC},) * 3)
    for num_tokens in (2, 63, 64, 300):
        xs = torch.randn(3, 1, 2, num_tokens, 8).unbind()
        torch.testing.assert_close(program.module()(*xs), Attention()(*xs))
