"""adapt_attention adds an encoding to models without one. The results equal those of models with edited forwards."""

import copy
import gc
import inspect
import io
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import plain_models as plain
import pytest
import rotary_functions as rf
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lrpe_md import Coordinates, CosineMd, Grid, RotateMd, adapt
from lrpe_md.integrations import adapt_attention, adapt_rotary, restore_attention, set_positions
from lrpe_md.integrations.attention_adapter import _Adaptation
from lrpe_md.testing import budget_violation

pytest.importorskip("timm")

from timm import create_model
from timm.layers.attention import Attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Style:
    """A model, the model's edited twin, the positions of the tokens, and inputs of a given size."""

    build: Any
    edited: Any
    positions: Any
    inputs: Any
    num_axes: int = 2
    sizes: Any = ((8, 12), (10, 6))
    more: Any = (12, 16)

    def pair(self, encoding="rotate", device="cpu", **kwargs):
        """Return the adapted model and the edited one, with the same weights."""
        torch.manual_seed(0)
        model, twin = self.build().to(device), self.edited().to(device)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * 0.3)
        twin.load_state_dict(model.state_dict())
        self.adapt(model, encoding, **kwargs)
        for name in ("encoding", "decoder_encoding"):
            if hasattr(model, name):
                twin.add_module(name, copy.deepcopy(getattr(model, name)))
        return model, twin

    def adapt(self, model, encoding, **kwargs):
        options = {"encoding_kwargs": kwargs, "num_axes": self.num_axes}
        if not isinstance(model, plain.Mae):
            return adapt_attention(model, encoding, self.positions, **options)
        adapt_attention(model, encoding, None, modules="blocks.*.attn", **options)
        return adapt_attention(
            model, encoding, self.positions, modules="decoder_blocks.*.attn", name="decoder_encoding", **options
        )


STYLES = {
    "dit": Style(plain.Dit, plain.EditedDit, plain.dit_positions, plain.dit_inputs),
    "sit": Style(lambda: plain.sit(False), lambda: plain.sit(True), plain.sit_positions, plain.dit_inputs),
    "uvit": Style(plain.Uvit, plain.EditedUvit, plain.uvit_positions, plain.dit_inputs),
    "mae": Style(
        plain.PlacedMae, plain.EditedMae, plain.mae_positions, lambda size: (torch.randn(2, 3, *size),),
    ),
    "gpt": Style(
        plain.Gpt, plain.EditedGpt, plain.gpt_positions, lambda n: tuple(torch.randint(50, (2, 2, n))), 1, (9, 14), 20
    ),
}  # fmt: skip
ENCODINGS = {
    "rotate": ("rotate", {"learnable": True}),
    "cosine": ("cosine", {"learnable": True, "act": "silu"}),
    "mixed": ("mixed", {}),
}


def to(inputs, device):
    return tuple(x.to(device) for x in inputs)


def tensors(output):
    return [t for t in output if t is not None] if isinstance(output, (tuple, list)) else [output]


def to_double(inputs):
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


def run_all(model, inputs):
    """Run several forward passes before a backward pass."""
    return [y for each in inputs for y in tensors(model(*each))]


def run(call, inputs, model=None):
    """Return outputs and the gradients of all parameters, by name."""
    model = call if model is None else model
    torch.manual_seed(3)  # for the model's random draws
    outputs = tensors(call(*inputs))
    model.zero_grad()
    sum(y.square().sum() for y in outputs).backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_bits(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        assert torch.equal(a, b)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        assert torch.equal(grad, expected[1][name]), name


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", STYLES)
def test_equals_edited_forwards(name, encoding, device):
    style = STYLES[name]
    scheme, kwargs = ENCODINGS[encoding]
    model, twin = style.pair(scheme, device, **kwargs)
    assert any(n.startswith("encoding") for n, _ in model.named_parameters())
    for size in style.sizes:  # the second size differs from the first
        inputs = to(style.inputs(size), device)
        assert_same_bits(run(model, inputs), run(twin, inputs))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", STYLES)
def test_checkpointing(name, reentrant):
    """Each recomputed part uses the positions of its own forward pass, even if several precede a backward pass."""
    style = STYLES[name]
    model, twin = style.pair("rotate", learnable=True)
    model.checkpointing = twin.checkpointing = reentrant
    inputs = [style.inputs(size) for size in style.sizes]
    if name != "gpt":  # the same number of tokens at other positions
        inputs.append(style.inputs((12, 8)))
    found, expected = (run(partial(run_all, m, inputs), (), m) for m in (model, twin))
    assert_same_bits(found, expected)


def assert_within_budget(found, same, exact):
    """Check that outputs and gradients are as close to float64 as the edited model's."""
    pairs = [(str(i), a, b, c) for i, (a, b, c) in enumerate(zip(found[0], same[0], exact[0], strict=True))]
    pairs += [(name, grad, same[1][name], exact[1][name]) for name, grad in found[1].items()]
    violations = [budget_violation(name, a[None], b[None], c[None].double()) for name, a, b, c in pairs]
    assert not any(violations), [str(v) for v in violations if v]


def run_exactly(twin, inputs):
    """Run the same computation in float64, with the same random draws."""
    return run(copy.deepcopy(twin).double(), to_double(inputs))


# --- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reentrant"), [("dit", False), ("uvit", True), ("mae", None), ("gpt", None)])
def test_compiled(name, reentrant):
    """After the first size, there is one graph for all sizes, even with a checkpoint."""
    style = STYLES[name]
    model, twin = style.pair("rotate", learnable=True)
    model.checkpointing = reentrant
    graphs = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for size in style.sizes if name == "mae" else (*style.sizes, style.more):  # MAE's graphs compile slowly
        inputs = style.inputs(size)
        assert_within_budget(run(compiled, inputs, model), run(twin, inputs), run_exactly(twin, inputs))
    assert graphs.frame_count <= 2


def compile_blocks(model):
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(fullgraph=True, backend=graphs)
    return graphs


@pytest.mark.slow
def test_blocks_compiled_one_by_one():
    """Blocks share compiled code, and checkpoints rerun them with their own positions."""
    style = STYLES["dit"]
    model, twin = style.pair("rotate", learnable=True)
    model.checkpointing = False
    torch._dynamo.reset()
    graphs = compile_blocks(model)
    inputs = [style.inputs(size) for size in ((8, 12), (12, 8))]  # the same number of tokens
    found, same = (run(partial(run_all, m, inputs), (), m) for m in (model, twin))
    exact = run(partial(run_all, wide := copy.deepcopy(twin).double(), [to_double(x) for x in inputs]), (), wide)
    assert_within_budget(found, same, exact)
    assert graphs.frame_count <= 3  # one graph per grid, and another because the first block's input is a view
    hidden, condition = model.embed(*inputs[0])
    with pytest.raises(Exception, match=r"positions|Observed exception"):
        model.blocks[0](hidden, condition)  # outside of the model's forward


@pytest.mark.slow
def test_compiled_blocks_are_not_mixed_up():
    """This holds if layers have separate encodings, and if two models share a class."""
    style = STYLES["dit"]
    pairs = [style.pair("mixed"), style.pair("rotate", base=7.0), style.pair("rotate", base=70.0)]
    torch._dynamo.reset()
    inputs = style.inputs((8, 12))
    for model, _ in pairs:
        compile_blocks(model)
    for model, twin in pairs:
        assert_within_budget(run(model, inputs), run(twin, inputs), run_exactly(twin, inputs))


@pytest.mark.slow
def test_what_is_compiled_follows_patches(monkeypatch):
    """If an attention's forward or its globals are patched, the patch takes effect after compiling."""
    style = STYLES["dit"]
    model, twin = style.pair("rotate")
    inputs = style.inputs((8, 12))
    plainly = twin(*inputs)
    assert torch.equal(model(*inputs), plainly)
    monkeypatch.setattr(plain, "shift", lambda x: x + 1)
    torch._dynamo.reset()
    expected = twin(*inputs)
    assert not torch.equal(expected, plainly)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(*inputs), expected)
    assert torch.equal(model(*inputs), expected)
    monkeypatch.setattr(plain.Attention, "forward", lambda self, x: x * 0)
    torch._dynamo.reset()
    for call in (model, torch.compile(model, backend="aot_eager")):
        with pytest.raises(RuntimeError, match=r"blocks\.0\.attn: expected a call to F.scaled_dot_product_attention"):
            call(*inputs)


def test_what_is_compiled_does_not_keep_a_model():
    """This must hold although the name that its copied forward calls is in torch.nn.functional."""
    style = STYLES["dit"]
    model, _ = style.pair("rotate")
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(*style.inputs((8, 12)))
    assert any(name.startswith("_lrpe_scaled_dot_product_attention") for name in vars(F))
    attention = weakref.ref(model.blocks[0].attn)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert attention() is None


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["dit", "gpt"])
def test_exported(name, strict):
    style = STYLES[name]
    model, twin = style.pair("rotate")
    inputs = style.inputs(style.sizes[0])
    program = torch.export.export(model.eval(), inputs, strict=strict)
    for a, b in zip(tensors(program.module()(*inputs)), tensors(twin.eval()(*inputs)), strict=True):
        torch.testing.assert_close(a, b)


# --- whole models of other libraries ---------------------------------------------------------------------------------


def timm_vit():
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, dynamic_img_size=True)
    return model, (torch.randn(2, 3, 32, 48),), model.set_grad_checkpointing


def transformers_vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    model = transformers.ViTModel(config, add_pooling_layer=False)
    return model, (torch.randn(2, 3, 32, 32),), model.gradient_checkpointing_enable


def diffusers_dit():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=2,
    )  # fmt: skip
    inputs = torch.randn(2, 4, 8, 12), torch.tensor([1, 2]), torch.tensor([3, 4])
    return model, inputs, model.enable_gradient_checkpointing


LIBRARIES = {
    "timm": (timm_vit, lambda x: Grid((x.shape[2] // 8, x.shape[3] // 8), prefix=1)),
    "transformers": (transformers_vit, lambda pixel_values, **_: Grid((4, 4), prefix=1)),
    "diffusers": (diffusers_dit, lambda x, *_, **__: Grid((x.shape[2] // 2, x.shape[3] // 2))),
}


@contextmanager
def edited_sdpa(encoding, grid):
    """Encode q and k in every attention, as if all forwards were edited."""
    original = F.scaled_dot_product_attention

    def attend(query, key, value, **kwargs):
        return original(*encoding(query, key, positions=grid), value, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        yield


def build_library(library):
    """Return a model with random weights, its inputs, a function that enables checkpointing, and its positions."""
    build, positions = LIBRARIES[library]
    torch.manual_seed(0)
    model, inputs, checkpoint = build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model, inputs, checkpoint, positions


@pytest.mark.parametrize("library", LIBRARIES)
def test_models_of_libraries(library):
    model, inputs, checkpoint, positions = build_library(library)
    stock = copy.deepcopy(model)
    adapt_attention(model, "rotate", positions)

    def first(m):
        y = m(*inputs)
        return y if isinstance(y, torch.Tensor) else y[0]

    model.eval(), stock.eval()
    with edited_sdpa(model.encoding, positions(*inputs)):
        expected = first(stock)
    assert torch.equal(first(model), expected)
    assert not torch.allclose(first(stock), expected, atol=1e-3)
    model.train()
    expected, grads = run(first, (model,), model)
    checkpoint()
    assert_same_bits(run(first, (model,), model), (expected, grads))


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_models_of_libraries_compile(library):
    model, inputs, _, positions = build_library(library)
    adapt_attention(model.eval(), "rotate", positions)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs)[0], model(*inputs)[0])


# --- around the model ------------------------------------------------------------------------------------------------


def test_copies_and_files():
    """Copies run their own forward methods, with their own frequencies."""
    style = STYLES["dit"]
    model, twin = style.pair("rotate", learnable=True)
    inputs = style.inputs((8, 12))
    expected = run(twin, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.checkpointing = False
        assert_same_bits(run(other, inputs), expected)
        with torch.no_grad():
            other.encoding.log_theta.zero_()
        assert not torch.equal(other(*inputs), expected[0][0])
        assert torch.equal(model(*inputs), expected[0][0])
        restore_attention(other)
        assert torch.equal(model(*inputs), expected[0][0])


def test_only_this_model_changes():
    """The class, other models, PyTorch's function and the names of the weights don't change."""
    style = STYLES["dit"]
    model, stock = style.build(), style.build()
    stock.load_state_dict(model.state_dict())
    inputs, names, function = style.inputs((4, 6)), list(model.state_dict()), F.scaled_dot_product_attention
    forwards = plain.Dit.forward, plain.Attention.forward
    with torch.no_grad():
        expected = model(*inputs)
        assert adapt_attention(model, "rotate", style.positions) is model
        assert not torch.allclose(model(*inputs), expected, atol=1e-5)
        assert torch.equal(stock(*inputs), expected)
        assert type(model) is plain.Dit
        assert (plain.Dit.forward, plain.Attention.forward) == forwards
        assert list(model.state_dict()) == names
        assert function is F.scaled_dot_product_attention
        assert inspect.signature(model.forward) == inspect.signature(stock.forward)
        assert restore_attention(model) is model
        assert torch.equal(model(*inputs), expected)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not hasattr(model, "encoding")
    restore_attention(model)


def test_two_models_and_threads():
    """Each forward pass has its own positions."""
    style = STYLES["dit"]
    models, twins = zip(*(style.pair("rotate", base=base) for base in (10.0, 100.0)), strict=True)
    inputs = [style.inputs(size) for size in ((8, 12), (12, 8), (6, 16), (4, 24))]
    expected = [[twin(*x) for x in inputs] for twin in twins]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            found = [[pool.submit(model, *x) for x in inputs] for model in models]
            for rows in zip(found, expected, strict=True):
                for future, y in zip(*rows, strict=True):
                    assert torch.equal(future.result(), y)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_autocast(reentrant):
    style = STYLES["dit"]
    model, twin = style.pair("cosine", learnable=True)
    model.checkpointing = twin.checkpointing = reentrant
    inputs = style.inputs((8, 12))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(run(model, inputs), run(twin, inputs))


def test_samplers_that_call_forward():
    style = STYLES["dit"]
    model, twin = style.pair()
    inputs = style.inputs((8, 12))
    with torch.inference_mode():
        assert torch.equal(model.forward_with_cfg(*inputs), twin.forward_with_cfg(*inputs))


def test_transforms():
    style = STYLES["dit"]
    model, twin = style.pair("rotate", learnable=True)
    x, *others = style.inputs((8, 12))

    def loss(m, weights, x):
        return torch.func.functional_call(m, weights, (x, *others)).square().sum()

    found, expected = (torch.func.grad(partial(loss, m))(dict(m.named_parameters()), x) for m in (model, twin))
    for name, grad in expected.items():
        assert torch.equal(found[name], grad)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no forward mode
        tangents = [torch.func.jvp(partial(loss, m, dict(m.named_parameters())), (x,), (x,)) for m in (model, twin)]
    assert torch.equal(tangents[0][1], tangents[1][1])


def test_hooks_on_saved_tensors():
    """The caller's hooks see every tensor. In-place changes after the forward pass are detected."""
    style = STYLES["dit"]
    model, twin = style.pair("rotate", learnable=True)
    inputs = style.inputs((8, 12))
    for model.checkpointing in (None, False, True):
        twin.checkpointing, packed = model.checkpointing, []

        def hooked(m, *args, packed=packed):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
                return m(*args)

        assert_same_bits(run(partial(hooked, model), inputs, model), run(twin, inputs))
        expected = len(packed)
        packed.clear()
        run(partial(hooked, twin), inputs, twin)
        assert len(packed) == expected > 0
    model.checkpointing = None
    y = model(*inputs)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_sharded(tmp_path):
    """FSDP2 and DDP work, with checkpoints."""
    style = STYLES["dit"]
    inputs = style.inputs((8, 12))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for reentrant, encoding in ((None, "rotate"), (False, "rotate"), (True, "mixed")):
            model, twin = style.pair(encoding, learnable=True)
            model.checkpointing = twin.checkpointing = reentrant
            expected = run(twin, inputs)
            parallel = copy.deepcopy(model)
            assert_same_bits(run(DistributedDataParallel(parallel), inputs, parallel), expected)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            for part in (*model.encoding, model) if encoding == "mixed" else (model.encoding, model):
                fully_shard(part, mesh=mesh)
            outputs, grads = run(model, inputs)
            assert_same_bits((outputs, {name: grad.full_tensor() for name, grad in grads.items()}), expected)
    finally:
        dist.destroy_process_group()


# --- encodings and positions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["module", "factory", "preset", "cosine"])
def test_encodings(kind):
    encoding = {
        "module": RotateMd(16, 2), "factory": partial(CosineMd, learnable=True), "preset": "rope_vit_axial",
        "cosine": "cosine",
    }[kind]  # fmt: skip
    style = STYLES["uvit"]
    model, twin = style.pair(encoding)
    inputs = style.inputs((8, 12))
    assert_same_bits(run(model, inputs), run(twin, inputs))
    if kind == "module":
        assert model.encoding is encoding
    if kind == "factory":
        assert len(model.encoding) == 3


@pytest.mark.parametrize("form", ["grid", "coordinates", "tensor"])
def test_fixed_positions(form):
    """Fixed positions apply to all inputs, even outside of the model's forward."""
    style = STYLES["dit"]
    grid = Grid((4, 6))
    table = grid.coordinates(dtype=torch.float32)
    positions = {"grid": grid, "coordinates": Coordinates(table), "tensor": table}[form]
    model, twin = style.pair()
    restore_attention(model)
    adapt_attention(model, "rotate", positions)
    for model.checkpointing in (None, False, True):
        inputs = style.inputs((8, 12))
        found, expected = run(model, inputs), run(twin, inputs)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    hidden, condition = model.embed(*inputs)
    assert model.blocks[0](hidden, condition).shape == hidden.shape
    with pytest.raises(ValueError, match="24"):
        model(*style.inputs((8, 8)))


def test_learned_frequencies_are_trained():
    style = STYLES["dit"]
    model, _ = style.pair("rotate", learnable=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model.encoding.log_theta.detach().clone()
    run(model, style.inputs((8, 12)))
    optimizer.step()
    assert (model.encoding.log_theta != before).all()


# --- errors ----------------------------------------------------------------------------------------------------------


def invalid(change=None, encoding="rotate", positions=plain.dit_positions, **options):
    """Call adapt_attention on a DiT with invalid arguments."""
    model = plain.Dit()
    if change is not None:
        change(model)
    names = list(model.state_dict())
    try:
        return adapt_attention(model, encoding, positions, **options)
    except (TypeError, ValueError):
        assert list(model.state_dict()) == names
        assert not any("forward" in vars(module) for module in model.modules())
        raise


INVALID = {
    "modules": ({"modules": "block*.attention"}, r"modules: .* such as blocks\.\*\.attn, got 'block"),
    "name": ({"name": "blocks"}, "name: expected an attribute name that the model does not use, got 'blocks'"),
    "positions": ({"positions": (4, 6)}, r"positions: .*tensor.* got \(4, 6\); .* Grid\(\(4, 6\)\)"),
    "encoding": ({"encoding": "rotary"}, r"encoding: unknown 'rotary'; did you mean 'rotate'\? Expected 'cosine'"),
    "layers": ({"encoding": torch.nn.ModuleList([RotateMd(16, 2)])}, "one module for each of the 2 attention modules"),
    "none": ({"encoding": None}, "encoding: expected an encoding, got None"),
    "head_dim": ({"change": lambda m: delattr(m.blocks[0].attn, "num_heads")}, "expected both as arguments or as"),
    "heads": (
        {"change": lambda m: setattr(m.blocks[0].attn, "head_dim", 8)},
        r"modules: expected attention modules with the same head_dim and num_heads, got \[\(8, 2\), \(16, 2\)\]",
    ),
    "torch": (
        {"change": lambda m: setattr(m.blocks[0], "attn", torch.nn.MultiheadAttention(32, 2))},
        "modules: expected attention modules that call scaled_dot_product_attention, got blocks.0.attn, an nn.Multi",
    ),
}  # fmt: skip


def test_modules_without_a_common_name():
    """The error lists the names of the model's modules, and one of them works."""
    model = plain.Dit()
    for block in model.blocks:
        block.mixer = block.attn
        del block.attn
    with pytest.raises(ValueError, match=r"modules: .* blocks\.\*\.mixer.*, got None, and no module is named attn, "):
        adapt_attention(model, "rotate", plain.dit_positions)
    adapt_attention(model, "rotate", plain.dit_positions, modules="blocks.*.mixer")


@pytest.mark.parametrize("missing", ["head_dim", "num_heads"])
def test_sizes_from_attributes_and_arguments(missing):
    """An argument replaces the attribute that a module lacks. A head_dim is not derived from an argument num_heads."""
    sizes = {"head_dim": 16, "num_heads": 2}
    model = plain.Dit()
    for block in model.blocks:
        vars(block.attn).update(sizes)
        delattr(block.attn, missing)
    other = next(name for name in sizes if name != missing)
    with pytest.raises(ValueError, match=f"head_dim, num_heads: expected both .* {other}={sizes[other]}"):
        adapt_attention(model, "rotate", plain.dit_positions, **{other: sizes[other]})
    adapt_attention(model, "rotate", plain.dit_positions, **{missing: sizes[missing]})
    assert model.encoding.head_dim == 16


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments(name):
    options, message = INVALID[name]
    with pytest.raises((TypeError, ValueError), match=message):
        invalid(**options)


def test_models_that_are_adapted_or_compiled():
    model = invalid()
    for name in ("encoding", "again"):
        with pytest.raises(ValueError, match=r"modules: expected modules that are not adapted, got blocks\.0\.attn"):
            adapt_attention(model, "rotate", plain.dit_positions, name=name)
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module that is not compiled, got OptimizedModule"):
        adapt_attention(torch.compile(plain.Dit()), "rotate", plain.dit_positions)
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        adapt_attention(model.forward, "rotate", plain.dit_positions)


class Rotary(plain.Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        q, k = rf.meta_llama(q, k, torch.ones(24, 8, dtype=torch.complex64))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("switch", [{}, {"rope": True}, {"rope": True, "rotary_emb": None}])
def test_models_that_already_rotate(adapted, switch):
    """Otherwise, q and k would be encoded twice."""
    model = plain.Dit()
    model.blocks[1].attn = Rotary()
    vars(model).update(switch)
    if adapted:
        adapt_rotary(model)
    message = r"modules: .* got blocks\.1\.attn, which already rotates q and k\..* adapt_rotary\(model\)"
    with pytest.raises(ValueError, match=message):
        adapt_attention(model, "rotate", plain.dit_positions)
    adapt_attention(model, "rotate", plain.dit_positions, modules="blocks.0.attn")


@pytest.mark.parametrize("nested", [False, True])
def test_models_with_an_encoding_of_ours(nested):
    """Otherwise, q and k would be encoded twice."""
    vit = create_model("vit_tiny_patch16_224", img_size=32, embed_dim=64, depth=2, num_heads=2)
    adapt(vit, "rotate")
    model, prefix = (torch.nn.Sequential(vit), "0.") if nested else (vit, "")
    for name in ("encoding", "positions"):
        message = rf"modules: expected attention modules without an encoding, got {prefix}blocks\.0\.attn, which"
        with pytest.raises(ValueError, match=message):
            adapt_attention(model, "rotate", Grid((2, 2), prefix=1), name=name)
    adapt(vit, "none")
    adapt_attention(model, "rotate", Grid((2, 2), prefix=1), name="positions")
    with pytest.raises(ValueError, match=r"forward method of their class, got blocks\[0\] .* restore_attention first"):
        adapt(vit, "rotate")
    restore_attention(model)
    adapt(vit, "rotate")


def test_attentions_with_a_replaced_forward():
    """timm's blocks would call it, and the encoding would have no effect."""
    vit, _, _ = timm_vit()
    attention = vit.blocks[1].attn
    attention.forward = lambda x, **unused: Attention.forward(attention, x)
    with pytest.raises(ValueError, match=r"forward method of their class, got blocks\[1\]"):
        adapt(vit, "rotate")
    del attention.forward
    adapt(vit, "rotate")


def test_attentions_that_hold_an_encoding():
    model = plain.Dit()
    model.blocks[1].attn.rotate = RotateMd(8, num_axes=2)
    with pytest.raises(ValueError, match=r"modules: .* got blocks\.1\.attn, which already encodes q and k"):
        adapt_attention(model, "rotate", plain.dit_positions)
    adapt_attention(model, "rotate", plain.dit_positions, modules="blocks.0.attn")


@pytest.mark.parametrize(
    "switch", [{"rope": None}, {"config": SimpleNamespace(use_rotary_positional_embeddings=False)}]
)
def test_rotary_code_that_is_off(switch):
    model = plain.Dit()
    model.blocks[1].attn = Rotary()
    vars(model).update(switch)
    adapt_attention(model, "rotate", plain.dit_positions)


class Manual(plain.Attention):
    """Attention written by hand, without SDPA."""

    def forward(self, x):
        q, k, v = self.split(x)
        weights = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Cross(plain.Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        return self.proj(F.scaled_dot_product_attention(q, k[:, :, :-1], v[:, :, :-1]).transpose(1, 2).flatten(2))


class Flat(plain.Attention):
    """Attention that merges heads and samples into one axis."""

    def forward(self, x):
        q, k, v = (t.flatten(0, 1) for t in self.split(x))
        return self.proj(F.scaled_dot_product_attention(q, k, v).unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


class Inside(plain.Attention):
    """Block with a checkpoint inside."""

    def attend(self, *qkv):
        return F.scaled_dot_product_attention(*qkv)

    def forward(self, x):
        o = checkpoint(self.attend, *self.split(x).unbind(0), use_reentrant=self.reentrant)
        return self.proj(o.transpose(1, 2).flatten(2))


class InsideReentrant(Inside):
    reentrant = True


class InsideNew(Inside):
    reentrant = False


ATTENTIONS = {
    Manual: r"blocks\.0\.attn: expected a call to F.scaled_dot_product_attention(.|\n)*fused_attn = True",
    Cross: r"blocks\.0\.attn: expected self-attention, where .* tokens, got 24 and 23 tokens.*pass use_cache=False",
    Flat: r"blocks\.0\.attn: expected q and k of shape \(B, H, N, D\) in .*, got \(4, 24, 16\)",
    InsideReentrant: r"blocks\.0\.attn: a checkpoint, no_grad or autograd.Function can't be used",
    InsideNew: r"blocks\.0\.attn: a checkpoint, no_grad or autograd.Function can't be used",
}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attentions_that_can_not_be_encoded(attention):
    model = invalid(lambda m: [setattr(block, "attn", attention()) for block in m.blocks])
    with pytest.raises((RuntimeError, ValueError), match=ATTENTIONS[attention]):
        model(*plain.dit_inputs((8, 12)))


def test_attentions_that_a_hook_skips():
    """diffusers' caches replace the forward method, and return an earlier result in some steps."""
    model = plain.Dit()
    model.blocks[0].attn.forward = lambda x: x
    adapt_attention(model, "rotate", plain.dit_positions)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn: .* add the hook after adapting the model"):
        model(*plain.dit_inputs((8, 12)))


@pytest.mark.slow
def test_timm_without_fused_attention():
    model = STYLES["sit"].build()
    adapt_attention(model, "rotate", plain.sit_positions)
    for block in model.blocks:
        block.attn.fused_attn = False
    inputs = plain.dit_inputs((4, 6))
    torch._dynamo.reset()
    for call in (model, torch.compile(model, backend="aot_eager")):
        with pytest.raises(RuntimeError, match="fused_attn = True"):
            call(*inputs)


def test_attentions_whose_forward_is_not_called():
    """The model reads its attention's weights and calls SDPA itself."""

    class Direct(plain.DitBlock):
        def forward(self, x, c):
            q, k, v = self.attn.split(x)
            return x + self.attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def change(model):
        for block in model.blocks:
            block.__class__ = Direct

    with pytest.raises(RuntimeError, match=r"modules: expected attention modules that Dit.forward calls, got"):
        invalid(change)(*plain.dit_inputs((8, 12)))


def test_positions_that_are_not_known():
    style = STYLES["dit"]
    model = invalid(positions=None)
    inputs = style.inputs((8, 12))
    with pytest.raises(RuntimeError, match=r"positions: expected positions for blocks\.0\.attn from the forward pass"):
        model(*inputs)
    with pytest.raises(ValueError, match="model: set_positions needs a model that is adapted with name="):
        set_positions(model, Grid((4, 6)))
    model = invalid(positions=lambda x, t, y: (4, 6))
    with pytest.raises(TypeError, match="positions: expected a Grid, Coordinates, a tensor"):
        model(*inputs)
    model = invalid(positions=lambda x: Grid((4, 6)))
    with pytest.raises(TypeError, match="positions: expected a function that takes the arguments"):
        model(*inputs)
    model = invalid(positions=lambda x, t, y: len(3))
    with pytest.raises(TypeError, match=r"has no len\(\)"):  # the function's own error
        model(*inputs)
    model = invalid()
    model(*inputs).sum().backward()
    hidden, condition = model.embed(*inputs)
    with pytest.raises(RuntimeError, match=r"positions: .*, got none"):  # those of the last forward are not reused
        model.blocks[0](hidden, condition)


def test_checkpoints_inside_checkpoints():
    style = STYLES["dit"]
    model, twin = style.pair("rotate", learnable=True)
    inputs = style.inputs((8, 12))

    def nested(m, reentrant, *args):
        hidden, condition = m.embed(*args)

        def stage(hidden):
            return m.run(m.blocks[1], m.run(m.blocks[0], hidden, condition), condition)

        return m.final(checkpoint(stage, hidden, use_reentrant=reentrant))

    class Nested(plain.Dit):
        reentrant = False

        def forward(self, x, t, y):
            return nested(self, self.reentrant, x, t, y)

    model.__class__, model.checkpointing, expected = Nested, False, run(twin, inputs)
    assert_same_bits(run(model, inputs), expected)
    model.reentrant = True
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run(model, inputs)


def test_restoring_what_was_replaced_since():
    model = invalid()
    attention = model.blocks[1].attn
    own = attention.forward
    attention.forward = lambda *args: own(*args)
    with pytest.raises(ValueError, match=r"got a different one in blocks\.1\.attn"):
        restore_attention(model)
    attention.forward = own
    restore_attention(model)


def test_positional_arguments_of_the_replacement():
    """The replacement takes as many positional arguments as the original, and raises an error for more."""
    for attend in (F.scaled_dot_product_attention, partial(_Adaptation.attend, None, None)):
        with pytest.raises(TypeError, match="positional"):
            attend(*torch.zeros(3, 1, 2, 4, 8), None, 0.0, False, 1.0, False, None)
