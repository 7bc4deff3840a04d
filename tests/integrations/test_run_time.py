"""Frequencies, amplitudes and positions that change between steps: RIFLEx, DyPE and ∞-RoPE against their formulas, in
diffusers models, models.dit and models.video, without recompiling or waiting for the device."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lrpe_md.models.dit import DiT
from lrpe_md.models.lm import CausalLm, LmConfig
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from lrpe_md import Coordinates, CosineMd, Grid, PresetMd, Rotate1d, RotateMd, adapt_rotary, preset, rotate
from lrpe_md.frequencies import (
    dype_ntk_scaling,
    dype_yarn_scaling,
    linear_scaling,
    ntk_scaling,
    riflex_scaling,
    yarn_scaling,
)
from lrpe_md.integrations import prepare_scaling, restore_rotary, set_places, set_scaling
from lrpe_md.positions import relative_times

BOUND = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def diffusers():
    return pytest.importorskip("diffusers", minversion="0.42")


def randomize(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval().requires_grad_(False)


def wan():
    model = diffusers().WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2,
    )  # fmt: skip
    return randomize(model)


WAN_X, WAN_TEXT = torch.randn(1, 4, 9, 6, 8), torch.randn(1, 6, 16)


def call_wan(model):
    return model(WAN_X, torch.tensor([3]), WAN_TEXT, return_dict=False)[0]


def set_wan_tables(model, frequencies, times=None):
    """Set the stock model's tables for other temporal frequencies and frame times, in its own layout."""
    rope = model.rope
    rows = torch.arange(len(rope.freqs_cos), dtype=torch.float64)
    if times is not None:
        rows[: len(times)] = torch.tensor(times, dtype=torch.float64)
    angles = (rows[:, None] * torch.tensor(frequencies, dtype=torch.float64)).repeat_interleave(2, 1)
    for table, values in ((rope.freqs_cos, angles.cos()), (rope.freqs_sin, angles.sin())):
        table[:, : rope.t_dim] = values.to(table.dtype)


def series(dim, base=1e4):
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


# --- diffusers -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_riflex_of_wan():
    """Only time changes. Compare with the stock model after replacing one temporal frequency in its table."""
    stock = wan()
    adapted = adapt_rotary(copy.deepcopy(stock))
    before = call_wan(adapted)
    frequencies = series(stock.rope.t_dim)
    frequencies[1] = 0.9 * 2 * math.pi / 60
    set_wan_tables(stock, frequencies)
    set_scaling(adapted, (partial(riflex_scaling, length=60, index=1), None, None))
    after = call_wan(adapted)
    torch.testing.assert_close(after, call_wan(stock), **BOUND)
    assert (after - before).abs().max() > 1e-3
    set_scaling(adapted, None)
    assert torch.equal(call_wan(adapted), before)


@torch.no_grad()
def test_relative_times_of_wan():
    """Shift the frames of a stream. Compare with the stock model after changing the rows of its temporal table."""
    stock = wan()
    adapted = adapt_rotary(copy.deepcopy(stock))
    before = call_wan(adapted)
    times = [0, 0, 0, 0, 0, 1, 2, 3, 4]
    set_wan_tables(stock, series(stock.rope.t_dim), times)
    set_places(adapted, 0, relative_times(9, 5))
    after = call_wan(adapted)
    torch.testing.assert_close(after, call_wan(stock), **BOUND)
    assert (after - before).abs().max() > 1e-3
    set_places(adapted, 0, None)
    assert torch.equal(call_wan(adapted), before)


class DypeTables(nn.Module):
    """FLUX's cos and sin with DY-YaRN, one number at a time. h and w are ``factor`` times the training size."""

    def __init__(self, dims, factor, time, length):
        super().__init__()
        self.dims, self.factor, self.time, self.length = dims, factor, time, length

    def frequency(self, i, dim):
        def weight(most, least):
            place = [
                dim * math.log(self.length / (2 * math.pi * n * self.time**2)) / (2 * math.log(1e4))
                for n in (most, least)
            ]
            begin, end = max(math.floor(place[0]), 0), min(math.ceil(place[1]), dim // 2)
            return min(max((end - i) / (end - begin), 0.0), 1.0)

        plain, ntk = 1e4 ** (-2 * i / dim), (1e4 * self.factor ** (dim / (dim - 2))) ** (-2 * i / dim)
        low, high = weight(1.25, 0.75), weight(16, 2)
        return (1 - high) * ((1 - low) * plain / self.factor + low * ntk) + high * plain

    def forward(self, ids):
        cos, sin = [], []
        for axis, dim in enumerate(self.dims):
            own = [1e4 ** (-2 * i / dim) if axis == 0 else self.frequency(i, dim) for i in range(dim // 2)]
            gain = 1.0 if axis == 0 else 0.1 * math.log(self.factor) + 1
            angles = (ids[:, axis, None].double() * torch.tensor(own, dtype=torch.float64)).repeat_interleave(2, 1)
            cos.append(angles.cos() * gain)
            sin.append(angles.sin() * gain)
        return torch.cat(cos, -1).float(), torch.cat(sin, -1).float()


def flux():
    model = diffusers().FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 14, 14),
    )  # fmt: skip
    return randomize(model)


FLUX_IDS = torch.cartesian_prod(torch.tensor([0]), torch.arange(8), torch.arange(4)).float()
FLUX_INPUTS = torch.randn(1, 32, 4), torch.randn(1, 6, 16), torch.randn(1, 16)


def call_flux(model):
    return model(*FLUX_INPUTS, torch.tensor([0.3]), FLUX_IDS, torch.zeros(6, 3), return_dict=False)[0]


@torch.no_grad()
@pytest.mark.parametrize("time", [1.0, 0.5, 0.2])
def test_dype_of_flux(time):
    """Compare with the stock model with hand-made tables."""
    dims, stock, call = (4, 14, 14), flux(), call_flux
    adapted = adapt_rotary(copy.deepcopy(stock))
    before = call(adapted)
    yarn = partial(dype_yarn_scaling, factor=2.0, time=torch.tensor(time, dtype=torch.float64), original_length=64)
    set_scaling(adapted, (None, yarn, yarn))
    stock.pos_embed = DypeTables(dims, 2.0, time, 64)
    after = call(adapted)
    torch.testing.assert_close(after, call(stock), **BOUND)
    assert (after - before).abs().max() > 1e-3
    set_scaling(adapted, None)
    assert torch.equal(call(adapted), before)
    with pytest.raises(ValueError, match=r"places: expected None for a model that receives coordinates.*img_ids"):
        set_places(adapted, 1, torch.arange(8.0))
    set_places(adapted, 1, None)
    assert torch.equal(call(adapted), before)


@torch.no_grad()
def test_dype_in_a_pipeline():
    """WanPipeline's callback sets each step's frequencies according to its time."""
    model = adapt_rotary(wan())
    pipe = diffusers().WanPipeline(
        None, None, None, diffusers().FlowMatchEulerDiscreteScheduler(), transformer=model
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    seen = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((kwargs["timestep"][0].item() / 1000, model.rope.rotation.omega.clone())),
        with_kwargs=True,
    )

    def scale(time):
        set_scaling(model, (None, partial(dype_ntk_scaling, factor=2.0, time=time), None))

    def follow(pipe, step, timestep, tensors):
        scale(pipe.scheduler.sigmas[step + 1])
        return tensors

    scale(1.0)
    pipe(
        prompt_embeds=WAN_TEXT, negative_prompt_embeds=WAN_TEXT, height=32, width=32, num_frames=5,
        num_inference_steps=3, output_type="latent", callback_on_step_end=follow,
    )  # fmt: skip
    assert len({time for time, _ in seen}) == 3
    trained = preset("wan", 32).omega
    rows = trained[0, :, 1] != 0
    for time, omega in seen:
        dim = 2 * int(rows.sum())
        base = 1e4 * (2.0 ** (dim / (dim - 2))) ** (2 * time**2)
        expected = trained.clone()
        expected[0, rows, 1] = torch.tensor(series(dim, base), dtype=torch.float64)
        torch.testing.assert_close(omega, expected, rtol=1e-6, atol=0)


# --- models of other libraries whose own frequencies are halved ----------------------------------------------------


def timm_vit(name):
    timm = pytest.importorskip("timm")
    size = {"img_size": 64 if "patch16" in name else 56, "dynamic_img_size": True}
    vit = timm.create_model(name, depth=1, embed_dim=64, num_heads=2, num_classes=0, **size)
    x = torch.randn(1, 3, size["img_size"], 2 * size["img_size"])
    return randomize(vit), lambda model: model.forward_features(x)


def tower(name):
    pytest.importorskip("transformers")
    from lrpe_md.scripts.adapters import trial_transformers

    model = trial_transformers.build(name)
    given = trial_transformers.inputs(model)
    return model, lambda model: model(**given).last_hidden_state


HALVED = {  # a model, the name of its rotary module, and a function that halves its frequencies
    "eva02": (partial(timm_vit, "eva02_tiny_patch14_224"), "rope", lambda rope: rope.bands.div_(2)),
    "timm's rope_vit": (partial(timm_vit, "vit_small_patch16_rope_224"), "rope", lambda rope: rope.bands.div_(2)),
    "timm's dinov3": (partial(timm_vit, "vit_small_patch16_dinov3"), "rope", lambda rope: rope.periods.mul_(2)),
    "dinov3": (partial(tower, "dinov3_vit"), "rope_embeddings", lambda rope: rope.inv_freq.div_(2)),
    "qwen3-vl": (partial(tower, "qwen3_vl_vision"), "rotary_pos_emb", lambda rope: rope.inv_freq.div_(2)),
    "qwen2.5-vl": (partial(tower, "qwen2_5_vl_vision"), "rotary_pos_emb", lambda rope: rope.inv_freq.div_(2)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", HALVED)
@pytest.mark.filterwarnings("ignore")
def test_models_of_other_libraries(name):
    build, path, halve = HALVED[name]
    model, call = build()
    before = call(adapt_rotary(model))
    states, places = list(model.state_dict()), None
    set_scaling(model, partial(linear_scaling, factor=2.0))
    found = call(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(call(copied), found)
    set_scaling(model, None)
    assert torch.equal(call(model), before)
    if "qwen" in name:
        with pytest.raises(ValueError, match="places: expected None for a model that receives coordinates"):
            set_places(model, 0, torch.arange(8.0))
    else:
        set_places(model, 0, torch.arange(8.0).flip(0))
        assert (call(model) - before).abs().max() > 1e-3
        set_places(model, 0, places)
        assert torch.equal(call(model), before)
    assert list(model.state_dict()) == states
    restore_rotary(model)
    assert not [name for name, _ in model.named_modules() if name.endswith("rotation")]
    halve(getattr(model, path))
    torch.testing.assert_close(call(model), found, **BOUND)
    assert (found - before).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("rope_type", ["axial", "dinov3"])
@pytest.mark.filterwarnings("ignore")
def test_batches_of_images_of_different_sizes(rope_type):
    """For such a batch, timm cuts the tables of axial RoPE out of the largest grid's table."""
    timm = pytest.importorskip("timm")
    sizes = {"depth": 1, "embed_dim": 64, "num_heads": 2, "num_classes": 0}
    model = randomize(timm.create_model("naflexvit_base_patch16_gap", rope_type=rope_type, **sizes))
    grids = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for h, w in ((4, 5), (2, 6))]
    coords = torch.nn.utils.rnn.pad_sequence(grids, batch_first=True)
    valid = torch.arange(20) < torch.tensor([[20], [12]])
    batch = {"patches": torch.randn(2, 20, 768), "patch_coord": coords, "patch_valid": valid}
    before, tables = model(batch), model.rope.get_batch_embeds([(4, 5), (2, 6)], seq_len=24)
    set_scaling(model, None)
    assert torch.equal(model(batch), before)
    assert torch.equal(model.rope.get_batch_embeds([(4, 5), (2, 6)], seq_len=24), tables)
    set_places(model, 1, torch.arange(6.0).flip(0))
    assert (model(batch) - before).abs().max() > 1e-3
    set_places(model, 1, None)
    set_scaling(model, partial(linear_scaling, factor=2.0))
    found = [call(batch) for call in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]
    restore_rotary(model)
    assert torch.equal(model(batch), before)
    if rope_type == "axial":
        model.rope.bands.div_(2)
    else:
        model.rope.periods.mul_(2)
    for each in found:
        torch.testing.assert_close(each, model(batch), **BOUND)
    assert (found[0] - before).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_random_coordinates_in_training(library):
    """We don't know the coordinates that DINOv3 draws, so changed frequencies would rotate by wrong angles."""
    if library == "timm":
        layers = pytest.importorskip("timm.layers")
        rope = layers.RotaryEmbeddingDinoV3(16, rescale_coords=2.0)
        call = lambda: rope.get_embed([3, 4])  # noqa: E731
    else:
        found = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit")
        config = found.DINOv3ViTConfig(hidden_size=32, num_attention_heads=2, patch_size=16)
        rope = found.DINOv3ViTRopePositionEmbedding(config)
        call = lambda: rope(torch.zeros(1, 3, 48, 64))[0]  # noqa: E731
    expected, scaling = rope.eval() and call(), partial(linear_scaling, factor=2.0)
    set_scaling(rope, scaling)
    assert (call() - expected).abs().max() > 1e-2
    rope.train()
    with pytest.raises(ValueError, match="draws random positions in training, got changed ones"):
        call()
    set_scaling(rope, None)
    torch.manual_seed(0)
    first = call()
    torch.manual_seed(0)
    assert torch.equal(restore_rotary(rope) and call(), first)


@torch.no_grad()
def test_tables_of_ones_own_are_refused():
    """The formula is compared with the tables before it is used."""
    model = wan()
    model.rope.freqs_cos.copy_(model.rope.freqs_cos.flip(0))
    before = call_wan(model)
    with pytest.raises(ValueError, match=r"rope: expected .* got WanRotaryPosEmbed; .* before you load the model"):
        set_scaling(model, None)
    assert torch.equal(call_wan(model), before)
    assert not hasattr(model.rope, "rotation")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_that_were_cast_to_16_bits_and_back(dtype):
    with pytest.raises(ValueError, match=r"rope: expected WanRotaryPosEmbed's tables .* load the model again"):
        set_scaling(wan().to(dtype).float(), None)


@pytest.mark.parametrize("name", ["lumina2", "hunyuan_video_framepack", "qwenimage"])
def test_modules_with_other_arguments_are_refused(name):
    """These modules store their frequencies as FLUX or HunyuanVideo do, but their methods take other arguments."""
    diffusers()
    names = {
        "lumina2": ("Lumina2RotaryPosEmbed", (10000, [4, 6, 6])),
        "hunyuan_video_framepack": ("HunyuanVideoFramepackRotaryPosEmbed", (2, 1, [4, 6, 6])),
        "qwenimage": ("QwenEmbedRope", (10000, [4, 6, 6])),
    }
    cls, args = names[name]
    rope = getattr(importlib.import_module(f"diffusers.models.transformers.transformer_{name}"), cls)(*args)
    with pytest.raises(ValueError, match=f"expected a module whose tables are known, got {cls}"):
        set_scaling(nn.Sequential(rope, nn.Identity()), None)


# --- models.dit ------------------------------------------------------------------------------------------------------


def dit(**kwargs):
    model = DiT(**{"num_axes": 2, "embed_dim": 32, "depth": 2, "num_heads": 2, "encoding": "rotate", **kwargs})
    return randomize(model)


@torch.no_grad()
def test_dype_of_dit():
    """Compare with an encoding whose frequencies follow the paper's formula."""
    model = dit()
    x, t = torch.randn(2, 3, 8, 12), torch.tensor([0.4, 0.4])
    set_scaling(model, partial(dype_ntk_scaling, factor=3.0, time=0.4))
    found, other = model(x, t), dit()
    base = 1e4 * (3.0 ** (8 / 6)) ** (2 * 0.4**2)
    by_hand = torch.zeros(1, 8, 2)
    # minor_first: the first half of the pairs encodes w
    by_hand[0, :4, 1] = by_hand[0, 4:, 0] = torch.tensor(series(8, base))
    other.load_state_dict(model.state_dict())
    other.encoding.omega.copy_(by_hand)
    torch.testing.assert_close(found, other(x, t), **BOUND)


@torch.no_grad()
@pytest.mark.parametrize("change", [{}, {"attention": "linear"}], ids=str)
def test_places_of_dit(change, monkeypatch):
    model, places = dit(num_axes=3, patch_size=(1, 2, 2), **change), torch.tensor([0.0, 0.5, 7.0, 8.0])
    x, t = torch.randn(1, 3, 4, 4, 6), torch.tensor([0.4])
    before = model(x, t)
    set_places(model, 0, places)
    found = model(x, t)
    coords = torch.cartesian_prod(places, torch.arange(2.0), torch.arange(3.0))
    set_places(model, 0, None)
    assert torch.equal(model(x, t), before)
    monkeypatch.setattr(model, "positions", lambda *_: Coordinates(coords))
    torch.testing.assert_close(found, model(x, t), **BOUND)
    assert (found - before).abs().max() > 1e-4


def test_errors_of_places_in_models():
    model = dit(num_axes=3, patch_size=(1, 2, 2))
    set_places(model, 0, torch.arange(4.0))
    model.positions = lambda *_: Coordinates(torch.zeros(8, 3))
    with pytest.raises(ValueError, match=r"places: expected None for axes \[0\], because the positions are not a Grid"):
        model(torch.randn(1, 3, 2, 4, 4), torch.tensor([0.4]))


# --- without a recompile, without waiting ----------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Mode that fails if anything reads a tensor's value or moves it to a different device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select"), name
        assert name != "_to_copy" or (kwargs or {}).get("device") in (None, args[0].device), "to a different device"
        return func(*args, **(kwargs or {}))


def changes():
    """Yield changes between two steps."""
    yield lambda model: set_scaling(model, (partial(riflex_scaling, length=60, index=1), None, None))
    yield lambda model: set_scaling(model, (partial(riflex_scaling, length=90, repeats_at=50), None, None))
    for time in (0.9, 0.4, 0.0):
        t = torch.tensor(time)
        yield lambda model, t=t: set_scaling(model, partial(dype_ntk_scaling, factor=2.0, time=t))
        yield lambda model, t=t: set_scaling(
            model, (None, *(partial(dype_yarn_scaling, factor=2.0, time=t, original_length=64),) * 2)
        )
    for horizon in (3, 5):
        yield lambda model, n=horizon: set_places(model, 0, relative_times(9, n))
    yield lambda model: set_scaling(model, None)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "dit", "learned"])
def test_no_recompile_and_no_wait(name):
    torch._dynamo.reset()
    x, t = torch.randn(1, 3, 9, 4, 6), torch.tensor([0.4])
    if name == "wan":
        model, call = adapt_rotary(wan()), call_wan
    else:
        learned = {"encoding_kwargs": {"learnable": True}} if name == "learned" else {}
        model, call = dit(num_axes=3, patch_size=(1, 2, 2), **learned), lambda model: model(x, t)
    set_scaling(model, lambda theta: (theta, 1.0))  # adds the buffers before compiling
    set_places(model, 0, torch.arange(9.0))
    counter = CompileCounter()
    compiled, seen = torch.compile(model, backend=counter), []
    seen.append(call(compiled))
    torch.testing.assert_close(seen[0], call(model), **BOUND)
    before = counter.frame_count
    with torch.compiler.set_stance("fail_on_recompile"):
        for change in changes():
            with Waits():
                change(model)
            seen.append(call(compiled))
            torch.testing.assert_close(seen[-1], call(model), **BOUND)
    assert counter.frame_count == before > 0
    distinct = {tuple(y.flatten()[:8].tolist()) for y in seen}
    assert len(distinct) >= len(seen) - 2  # all but the two that don't scale: DyPE on NTK at t = 0, and None


def test_the_guard_against_waiting_can_fail():
    model = dit()
    with Waits(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        set_scaling(model, lambda theta: (theta * float(theta.max()), 1.0))
    with Waits(), pytest.raises(AssertionError, match=r"nonzero|_local_scalar_dense"):
        set_scaling(dit(), partial(ntk_scaling, factor=2.0))  # the first call finds the axis of each channel


@torch.no_grad()
def test_prepared_steps_are_copies():
    """Each step is one launch that copies values, no matter what was computed before."""
    model = dit()
    x, t = torch.randn(1, 3, 8, 8), torch.tensor([0.4])
    steps = [prepare_scaling(model, partial(dype_ntk_scaling, factor=2.0, time=time)) for time in (1.0, 0.5)]
    trained = model(x, t)

    class Listed(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    for step, time in zip(steps, (1.0, 0.5), strict=True):
        with Listed() as listed:
            step.apply()
        assert set(listed.names) <= {"_foreach_copy_", "copy_"}
        assert len(listed.names) <= 2
        found = model(x, t)
        set_scaling(model, partial(dype_ntk_scaling, factor=2.0, time=time))
        assert torch.equal(found, model(x, t))
        assert not torch.equal(found, trained)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_on_a_gpu(backend):
    """CUDA itself reports whether anything waits."""
    model = adapt_rotary(wan()).cuda()
    x, text = WAN_X.cuda(), WAN_TEXT.cuda()
    call = torch.compile(model, backend=backend)
    step = torch.tensor([3], device="cuda")
    set_scaling(model, lambda theta: (theta, 1.0))
    set_places(model, 0, torch.arange(9.0, device="cuda"))
    call(x, step, text, return_dict=False)
    time = torch.tensor(0.4, device="cuda")
    times = relative_times(9, 5, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        set_scaling(model, (partial(riflex_scaling, length=60, index=1), None, None))
        set_scaling(model, (None, *(partial(dype_yarn_scaling, factor=2.0, time=time, original_length=64),) * 2))
        set_places(model, 0, times)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = call(x, step, text, return_dict=False)[0]
    torch.testing.assert_close(found, model(x, step, text, return_dict=False)[0], rtol=1e-4, atol=1e-4)
    eager = adapt_rotary(wan()).cuda()
    torch.manual_seed(0)
    eager.load_state_dict(model.state_dict())
    set_scaling(eager, (None, *(partial(dype_yarn_scaling, factor=2.0, time=time, original_length=64),) * 2))
    set_places(eager, 0, times)
    torch.testing.assert_close(found, eager(x, step, text, return_dict=False)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_graph_reads_what_changed():
    model = dit(num_axes=3, patch_size=(1, 2, 2)).cuda()
    x, t = torch.randn(1, 3, 9, 4, 6, device="cuda"), torch.tensor([0.4], device="cuda")
    set_scaling(model, lambda theta: (theta, 1.0))
    set_places(model, 0, torch.arange(9.0, device="cuda"))
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(2):
            model(x, t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x, t)
    found = []
    for factor, horizon in ((2.0, 9), (4.0, 5), (1.0, 9)):
        set_scaling(model, partial(dype_ntk_scaling, factor=factor, time=torch.tensor(0.9, device="cuda")))
        set_places(model, 0, relative_times(9, horizon, device="cuda"))
        graph.replay()
        found.append(y.clone())
        torch.testing.assert_close(found[-1], model(x, t), rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0], found[1])


# --- modules ---------------------------------------------------------------------------------------------------------


MODULES = {
    "fixed": lambda: RotateMd(24, 3),
    "learned": lambda: RotateMd(24, 3, num_heads=2, learnable=True),
    "amplitude": lambda: RotateMd(24, 2, amplitude=1.5),
    "cosine": lambda: CosineMd(12, 2, act="silu"),
    "preset": lambda: PresetMd(preset("wan", 24)),
    "learned preset": lambda: PresetMd(preset("wan", 24), learnable=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_scaled_modules(name):
    """Compare with manual scaling, channel by channel. Learned frequencies get gradients through the ratio."""
    module = MODULES[name]()
    saved = copy.deepcopy(module.state_dict())
    q, k = torch.randn(2, 2, 24, module.head_dim), torch.randn(2, 2, 24, module.head_dim)
    where = Grid((2, 3, 4) if module.num_axes == 3 else (4, 6), prefix=0)
    trained = module.get_omega().detach().clone()
    plain = module(q, k, positions=where)
    yarn = partial(yarn_scaling, factor=4.0, original_length=64)
    set_scaling(module, (yarn, *(None,) * (module.num_axes - 1)))
    omega = trained.clone()
    of_time = trained[0, :, 0] != 0
    scaled, gain = yarn(trained[:, of_time, 0].double())
    omega[:, of_time, 0] = scaled.to(omega.dtype)
    amplitude = torch.where(of_time, gain, 1.0) * (1.5 if name == "amplitude" else 1.0)
    torch.testing.assert_close(module.get_omega().detach(), omega)
    torch.testing.assert_close(module.amplitude[0].double(), amplitude.double())
    found = module(q, k, positions=where)
    if module.map == "rotate":
        expected = rotate(q, k, omega=omega, positions=where, pairs=module.pairs, amplitude=amplitude.float())
        torch.testing.assert_close(found, expected, **BOUND)
    assert (found[0] - plain[0]).abs().max() > 1e-3
    if list(module.parameters()):
        (found[0] ** 3).sum().backward()
        (parameter,) = module.parameters()
        assert (parameter.grad != 0).any()
    assert module.state_dict().keys() == saved.keys()
    module.to(torch.bfloat16)
    torch.testing.assert_close(module.get_omega().detach(), omega)
    twin = copy.deepcopy(module)
    set_scaling(module, None)
    torch.testing.assert_close(module(q, k, positions=where), plain)
    torch.testing.assert_close(twin(q, k, positions=where), found)


def test_frequencies_go_on_learning_while_they_are_scaled():
    module = RotateMd(16, 2, learnable=True)
    set_scaling(module, partial(linear_scaling, factor=2.0))
    with torch.no_grad():
        module.log_theta.add_(1)
    torch.testing.assert_close(module.get_omega(), module._learned() / 2)
    set_scaling(module, None)
    torch.testing.assert_close(module.get_omega(), module._learned())


@torch.no_grad()
def test_replaced_frequencies_are_scaled():
    module, halve = RotateMd(8, 2), partial(linear_scaling, factor=2.0)
    set_scaling(module, halve)
    omega = module.omega.flip(-1) * 3
    module.omega, module.amplitude = omega.clone(), torch.full((1, 4), 3.0)
    set_scaling(module, halve)
    torch.testing.assert_close(module.get_omega(), omega / 2)
    set_scaling(module, None)
    torch.testing.assert_close(module.get_omega(), omega)
    assert (module.amplitude == 3).all()

    module, theta = Rotate1d(8, theta=torch.tensor([1.0, 0.5, 0.0, 0.0])), torch.tensor([1.0, 0.5, 0.25, 0.125])
    set_scaling(module, halve)
    module.set_frequencies(theta)
    set_scaling(module, halve)
    torch.testing.assert_close(module.omega.flatten(), theta / 2)


def test_language_models():
    model = CausalLm(LmConfig(vocab_size=16, dim=32, depth=1, num_heads=2, num_kv_heads=1)).eval()
    tokens = torch.randint(0, 16, (1, 12))
    before = model(tokens)
    set_scaling(model, partial(linear_scaling, factor=2.0))
    after = model(tokens)
    assert not torch.equal(after, before)
    model.rescale(partial(linear_scaling, factor=2.0))
    torch.testing.assert_close(model(tokens), after)
    set_scaling(model, None)
    assert torch.equal(model(tokens), before)


def test_places_of_modules():
    module, places = RotateMd(16, 2), torch.tensor([0.0, 5.0, 5.5])
    x = torch.randn(1, 2, 8, 16)
    grid = Grid((3, 2), prefix=2)
    module.set_places(0, places)
    coords = torch.cartesian_prod(places, torch.arange(2.0))
    expected = rotate(x, omega=module.omega, positions=Coordinates(coords, prefix=2))
    torch.testing.assert_close(module(x, positions=grid), expected)
    q, k = module(x[:, :, 6:], x, positions=(Grid((3, 2), prefix=2, start=6), grid))
    torch.testing.assert_close(k, expected)
    torch.testing.assert_close(q, expected[:, :, 6:])
    for origin, start in (
        (torch.tensor([1, 0]), 4),
        (torch.tensor([[1, 0]]), 4),
        (torch.tensor([2, 0]), 6),
    ):  # decoding
        rows = Grid(((8 - start) // 2, 2), origin=origin)
        torch.testing.assert_close(module(x[:, :, start:], positions=rows), expected[:, :, start:])
    step = Grid((1, 2), prefix=1, origin=torch.tensor([2, 0]))
    torch.testing.assert_close(module(x[:, :, [0, 6, 7]], positions=step), expected[:, :, [0, 6, 7]])
    with pytest.raises(IndexError, match=r"places: expected indices of axis 0, including .* from 0 to 2, got 3$"):
        module(x[:, :, 6:], positions=Grid((1, 2), origin=torch.tensor([3, 0])))
    own = module.places_0
    module.set_places(0, places * 2)
    assert module.places_0 is own  # in place
    assert not torch.equal(module(x, positions=grid), expected)
    module.set_places(0, torch.arange(5.0))  # more places than rows
    torch.testing.assert_close(module(x, positions=grid), rotate(x, omega=module.omega, positions=grid))
    module.set_places(1, torch.tensor([1.0, 0.0]))
    turned = torch.cartesian_prod(torch.arange(3.0), torch.tensor([1.0, 0.0]))
    expected = rotate(x, omega=module.omega, positions=Coordinates(turned, prefix=2))
    torch.testing.assert_close(module(x, positions=grid), expected)
    module.set_places(0, torch.arange(2.0))
    with pytest.raises(
        ValueError, match=r"places: expected a 1-D tensor with at least 3 real numbers, .*axis 0, got .*\(2,\)"
    ):
        module(x, positions=grid)
    for axis in (0, 1):
        module.set_places(axis, None)
    assert not module.moved
    assert not list(module.state_dict())


def test_times_of_a_stream():
    """Check eq. 2 and 3 of the paper with its 1-based indices: blocks of three latent frames, and horizon 21."""
    for newest in (3, 6, 21, 24, 60):
        onset = 21
        block = [newest - 2, newest - 1, newest]
        expected = block if newest <= onset else [onset - 2, onset - 1, onset]
        times = relative_times(newest, onset)
        assert (times[-3:] + 1).tolist() == expected
        assert times.diff().clamp_min(1).eq(1).all()
    assert (relative_times(24, 21)[:6] + 1).tolist() == [1, 1, 1, 1, 2, 3]  # the first block: {1, 1, 1}
    for resident in (1, 2, 6):  # a smaller cache has the same relative times for its frames
        whole = relative_times(21, 21)[-resident:]
        assert torch.equal(relative_times(resident, 21).diff(), whole.diff())
    with pytest.raises(ValueError, match="horizon: expected a positive integer, got 0"):
        relative_times(3, 0)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [None, torch.tensor([1, 0])])
def test_places_of_an_empty_axis(origin):
    table = Grid((0, 3), prefix=2, origin=origin).along({0: torch.zeros(0)})
    assert table == Coordinates(torch.zeros(0, 2, dtype=torch.float64), prefix=2)


def test_errors():
    with pytest.raises(TypeError, match=r"model: expected an nn.Module or a diffusers pipeline, got str"):
        set_scaling("pipe", None)
    with pytest.raises(ValueError, match="model: expected a model with encodings, found none in Linear"):
        set_scaling(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match=r"scaling: expected one value for each of the 2 axes of encoding, got 3"):
        set_scaling(dit(), (None, None, None))
    mixed = RotateMd(16, 2, frequencies="mixed", num_heads=2)
    with pytest.raises(
        ValueError,
        match=r"scaling: .* one axis per channel.*, got mixed frequencies in RotateMd; .*set_places",
    ):
        set_scaling(mixed, partial(linear_scaling, factor=2.0))
    set_places(mixed, 0, torch.arange(4) * 0.5)  # the advice works
    q, k = torch.randn(2, 1, 2, 24, 16)
    assert torch.equal(mixed(q, k, positions=Grid((4, 6)))[0], mixed(q, k, positions=Grid((4, 6), scale=(0.5, 1)))[0])
    by_head = PresetMd(preset("mhrope", num_heads=8))
    with pytest.raises(ValueError, match=r"got axes that differ between heads in PresetMd"):
        set_scaling(by_head, partial(linear_scaling, factor=2.0))
    for scaled, found in ((lambda theta: theta[..., :3], r"\(3,\)"), (lambda theta: theta[:1], r"\(1,\)")):
        with pytest.raises(
            ValueError, match=rf"scaling: expected a function that returns theta of shape \(4,\), got {found}"
        ):
            set_scaling(dit(), lambda theta, scaled=scaled: (scaled(theta), 1.0))
    with pytest.raises(
        ValueError, match=r"scaling: expected a function that returns theta of shape \(2, 8\), got \(1, 8\)"
    ):
        set_scaling(RotateMd(16, 1, num_heads=2, learnable=True), lambda theta: (theta[:1], 1.0))
    with pytest.raises(ValueError, match=r"scaling: .* amplitude .* number or a tensor of shape \(8,\), got \(3,\)"):
        set_scaling(RotateMd(16, 1), lambda theta: (theta, theta[:3]))
    with pytest.raises(
        ValueError, match=r"scaling: expected a function that returns theta of shape \(4,\), got \(8,\)"
    ):
        set_scaling(RotateMd(8, 1), lambda theta: (theta.repeat(2), 1.0))
    for model in (RotateMd(16, 2), dit()):
        for places in (torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.complex64)):
            with pytest.raises(ValueError, match=r"places: expected a 1-D tensor of real numbers.* got torch\.\w+ "):
                set_places(model, 0, places)
    for axis in (True, 0.5):
        with pytest.raises(ValueError, match="axis: expected a number from 0 to 1"):
            RotateMd(16, 2).set_places(axis, torch.ones(4))
    with pytest.raises(ValueError, match=r"axis: expected a number from 0 to 1 for encoding, got 2"):
        set_places(dit(), 2, torch.arange(3.0))
    with pytest.raises(ValueError, match=r"places: expected a 1-D tensor of real numbers, or None, got .*\(2, 2\)"):
        set_places(dit(), 0, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="model: expected a model with image or video encodings, found none"):
        set_places(
            CausalLm(LmConfig(vocab_size=16, dim=32, depth=1, num_heads=2, num_kv_heads=1)), 0, torch.arange(3.0)
        )
    with pytest.raises(ValueError, match=r"ratio: expected a tensor that broadcasts to \(1, 8, 2\), got \(3, 1\)"):
        RotateMd(16, 2).adjust(torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"places: .* axis 1, got torch.float32 \(1, 2\)"):
        Grid((2, 3)).along({1: torch.zeros(1, 2)})
    with pytest.raises(ValueError, match=r"places: expected a 1-D tensor .* axis 1, got torch.bool \(3,\)"):
        Grid((2, 3)).along({1: torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="axes: expected None or numbers from 0 to 1, got"):
        Grid((2, 3)).along({2: torch.zeros(3)})


def test_adapted_language_models_are_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = adapt_rotary(transformers.LlamaModel(config))
    for call in (lambda: set_scaling(model, None), lambda: set_places(model, 0, torch.arange(3.0))):
        with pytest.raises(ValueError, match=r"rotary_emb: expected .* tables are known, got Llama.*rope_parameters"):
            call()


@torch.no_grad()
def test_images():
    """timm's ViT works, even with dropped tokens."""
    timm = pytest.importorskip("timm")
    from lrpe_md import adapt

    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0, depth=2, patch_drop_rate=0.5)
    model, x = adapt(vit, "rotate").eval(), torch.randn(1, 3, 64, 64)
    plain = model.forward_features(x)
    set_places(model, 1, torch.tensor([0.0, 1.0, 2.0, 9.0]))
    found = model.forward_features(x)
    assert (found - plain).abs().max() > 1e-3
    set_places(model, 1, torch.arange(4.0))
    torch.testing.assert_close(model.forward_features(x), plain, **BOUND)
    assert model.train()(x).isfinite().all()


@torch.no_grad()
def test_restored_models_are_stock():
    model = wan()
    wanted = call_wan(model)
    adapt_rotary(model)
    set_scaling(model, (partial(riflex_scaling, length=60, index=1), None, None))
    set_places(model, 0, torch.arange(9.0) * 2)
    restore_rotary(model)
    assert torch.equal(call_wan(model), wanted)


def hook(model, rope):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(rope, hooks.ModelHook())


def hook_and_unhook(model, rope):
    hook(model, rope)
    pytest.importorskip("accelerate.hooks").remove_hook_from_module(rope)


def offload(model, rope):
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("prepare", [hook, hook_and_unhook, offload])
@pytest.mark.parametrize(("build", "call", "path"), [(wan, call_wan, "rope"), (flux, call_flux, "pos_embed")])
def test_models_with_hooks(build, call, path, prepare):
    """accelerate stores a module's forward on the object, where the method of its class has no effect."""
    model, scaling = build(), partial(ntk_scaling, factor=2.0)
    before, other = call(model), copy.deepcopy(model)
    set_scaling(other, scaling)
    wanted, rope = call(other), getattr(model, path)
    assert (wanted - before).abs().max() > 1e-3
    prepare(model, rope)
    set_scaling(model, scaling)
    assert torch.equal(call(model), wanted)
    if prepare is not offload:  # a copy of an offloaded model has no weights
        copied = copy.deepcopy(model)
        set_scaling(copied, None)
        assert torch.equal(call(copied), before)
        assert torch.equal(call(model), wanted)
    pytest.importorskip("accelerate.hooks").remove_hook_from_module(rope)
    assert torch.equal(call(model), wanted)
    assert torch.equal(call(restore_rotary(model)), before)


@torch.no_grad()
def test_adapting_keeps_scalings_and_places():
    model, parts = wan(), nn.ModuleList()
    set_scaling(model, partial(ntk_scaling, factor=2.0))
    set_places(model, 0, torch.arange(9.0) * 2)
    wanted = call_wan(model)
    for _ in range(2):
        torch.testing.assert_close(call_wan(adapt_rotary(model)), wanted, **BOUND)
    parts.append(model.rope)
    with pytest.raises(TypeError, match="model: expected a model that calls a function to rotate"):
        adapt_rotary(parts)
    torch.testing.assert_close(call_wan(model), wanted, **BOUND)
    set_scaling(model, None)
    assert (call_wan(model) - wanted).abs().max() > 1e-3


def replace_forward(rope):
    forward = rope.forward
    rope.forward = lambda x: forward(x)


def add_diffusers_hook(rope):
    hooks = pytest.importorskip("diffusers.hooks")
    hooks.HookRegistry.check_if_exists_or_initialize(rope).register_hook(hooks.ModelHook(), "ours")


@torch.no_grad()
@pytest.mark.parametrize("replace", [replace_forward, add_diffusers_hook])
def test_a_forward_of_ones_own(replace):
    """It works if it is set after the first change, as the error says."""
    model = wan()
    before = call_wan(model)
    set_scaling(model, None)
    replace(model.rope)
    set_scaling(model, partial(ntk_scaling, factor=2.0))
    assert (call_wan(model) - before).abs().max() > 1e-3
    model = wan()
    replace(model.rope)
    with pytest.raises(ValueError, match=r"rope: expected .* the forward method of its class, WanRotaryPosEmbed, got"):
        set_scaling(model, None)
    assert not hasattr(model.rope, "rotation")


def test_buffers_that_were_cast():
    """FSDP1 and DDP cast the data of buffers. Fixed frequencies are rebuilt, and changed ones raise an error."""
    model = adapt_rotary(wan())
    set_scaling(model, (partial(riflex_scaling, length=60, index=1), None, None))
    wanted = call_wan(model)
    for buffer in model.rope.rotation.buffers():  # the model's own tables are cast as in the original
        buffer.data = buffer.data.to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"omega: expected torch.float64, got torch.bfloat16: .* set the frequencies again"
    ):
        call_wan(model)
    set_scaling(model, (partial(riflex_scaling, length=60, index=1), None, None))
    torch.testing.assert_close(call_wan(model), wanted, **BOUND)


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    """The code of docs/runtime.md runs from top to bottom."""
    diffusers()
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 7
    space = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/runtime.md", "exec"), space)
    assert "True [(1, 3, 13, 64)]" in capsys.readouterr().out
    assert space["cache"][0, :, 17].any()
    assert space["cache"][1, :, 300].any()
    assert not space["cache"][:, :, 301:].any()
