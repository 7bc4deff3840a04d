"""Presets as modules: learned parameters, casting, saving and materialising."""

import copy
import math
import pickle
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from lrpe_md import Axial, Grid, PresetMd, RotateMd, Scheme, cosine, geometric_theta, list_presets, preset, rotate
from lrpe_md.frequencies import yarn_scaling

YARN = (None, partial(yarn_scaling, factor=4.0, original_length=64), None)
LEARNED = {"rope_vit_mixed": {"omega"}, "mochi": {"omega"}, "transnormer": {"theta"}, "pope": {"phase"}}
HEADS = {name: 8 if name == "mhrope" else 2 for name in list_presets()}
MADE = {name: partial(preset, name, num_heads=heads) for name, heads in HEADS.items()}
MADE["wan, stretched"] = partial(preset, "wan", 24, scaling=YARN)
SEGMENTS = {1: [(5,)], 2: [(2, 4)], 3: [(2, 2, 4)], 4: [(2, 4)]}


@pytest.fixture(params=MADE)
def made(request):
    return MADE[request.param]()


def on_grid(module):
    """Return q and k, and positions for them."""
    positions = module.positions(*SEGMENTS[module.num_axes])
    generator = torch.Generator().manual_seed(0)
    shape = (1, module.num_heads, positions.num_tokens, module.head_dim)
    return [torch.randn(shape, generator=generator) for _ in range(2)], positions


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def move_parameters(module):
    """Perturb the parameters, with the phase in its bounds."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.sub_(torch.rand_like(p) if name == "phase" else 0.1 * torch.rand_like(p) * p)
    return module


def test_module_equals_the_function(made):
    module = move_parameters(PresetMd(made)) if made.scheme.phase else PresetMd(made)
    xs, positions = on_grid(module)
    assert positions == made.positions(*SEGMENTS[made.num_axes])
    call = rotate if made.scheme.map == "rotate" else cosine
    phase = None if module.phase is None else (None, module.get_phase())
    expected = call(*xs, omega=made.omega.to(module.dtype), positions=positions, phase=phase, **made.options)
    for a, b in zip(module(*xs, positions=positions), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert ((expected[1][..., : made.head_dim] - xs[1]).abs().max() > 0.05).item()


def test_learned_parameters_and_dtypes(made):
    module = PresetMd(made)
    learned = LEARNED.get(made.name, set())
    assert {name for name, _ in module.named_parameters()} == learned == module.no_weight_decay()
    assert all(p.dtype == torch.float32 for p in module.parameters())
    fixed = module.omega if learned <= {"phase"} else None
    assert fixed is None or fixed.dtype == torch.float64
    assert set(module.state_dict()) == learned
    if made.scheme.phase:
        assert module.get_phase().shape == made.phase == (2, made.head_dim)


@pytest.mark.parametrize("name", list_presets())
def test_frequencies_train(name):
    """Learned parameters of any scheme change, and single-axis channels stay on their axis."""
    module = PresetMd(preset(name, num_heads=HEADS[name]), learnable=True)
    xs, positions = on_grid(module)
    before, laid = {n: p.detach().clone() for n, p in module.named_parameters()}, module.get_omega().detach().clone()
    if "log_theta" in before:
        torch.testing.assert_close(laid, module.preset.omega.float(), rtol=1e-6, atol=0)
    else:
        assert torch.equal(laid, module.preset.omega.float())
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    loss = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in module(*xs, positions=positions))
    loss.backward()
    optimizer.step()
    for n, p in module.named_parameters():
        assert not torch.equal(p, before[n]), n
    after = module.get_omega().detach()
    assert not torch.equal(after, laid)
    if module.preset.scheme.frequencies.__class__.__name__ == "Axial":
        assert torch.equal(after != 0, laid != 0)


def test_frequencies_of_zero_stay_in_every_parametrisation():
    """HoPE's temporal frequencies are zero."""
    log, raw = (PresetMd("hope", learnable=kind) for kind in (True, "raw"))
    raw.load_state_dict(log.state_dict())
    torch.testing.assert_close(raw.get_omega(), raw.preset.omega.float(), rtol=1e-6, atol=0)
    with torch.no_grad():
        raw.theta.mul_(1.5)
    log.load_state_dict(raw.state_dict())
    torch.testing.assert_close(log.get_omega(), 1.5 * raw.preset.omega.float(), rtol=1e-6, atol=0)
    assert log.state_dict().keys() == {"log_theta"}


def test_an_original_that_learns_theta_keeps_its_parameter():
    """TransNormer learns theta, as in its checkpoints. learnable=True selects the logarithm instead."""
    assert set(PresetMd("transnormer", num_heads=2).state_dict()) == {"theta"}
    assert set(PresetMd("transnormer", num_heads=2, learnable=True).state_dict()) == {"theta"}
    assert set(PresetMd("wan", learnable=True).state_dict()) == {"log_theta"}
    assert set(PresetMd("wan", learnable="raw").state_dict()) == {"theta"}


def test_dinov3_matches_published_periods():
    """Published weights store the periods in bfloat16, as the docstring says."""
    made = preset("dinov3")
    rounded = replace(made, omega=2 * math.pi / (2 * math.pi / made.omega).bfloat16().double())
    expected = (100 ** (torch.arange(16, dtype=torch.float64) / 16)).bfloat16().double()
    found = PresetMd(rounded).get_omega()
    torch.testing.assert_close(2 * math.pi / found.sum(-1)[0], expected.repeat(2))
    assert torch.equal(found == 0, made.omega == 0)


def test_learnable_defaults_to_the_scheme():
    assert not list(PresetMd(preset("mochi", num_heads=2), learnable=False).parameters())
    assert PresetMd(preset("mochi", num_heads=2), learnable=False).omega.dtype == torch.float64
    assert PresetMd(preset("mochi", num_heads=2), dtype=torch.float64).omega.dtype == torch.float64
    assert PresetMd(preset("wan"), dtype=torch.float32).omega.dtype == torch.float32
    assert PresetMd(preset("pope", num_heads=2), dtype=torch.float64).phase.dtype == torch.float64
    assert PresetMd(preset("transnormer", num_heads=2), act="relu").act == "relu"
    assert PresetMd(preset("transnormer", num_heads=2)).act == "silu"


def test_state_dict_copy_pickle(made):
    module = move_parameters(PresetMd(made))
    other = PresetMd(made)
    other.load_state_dict(module.state_dict())
    xs, positions = on_grid(module)
    expected = module(*xs, positions=positions)
    for copied in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert tensors(copied).keys() == tensors(module).keys()
        for name, t in tensors(copied).items():
            assert torch.equal(t, tensors(module)[name]), name
        for a, b in zip(copied(*xs, positions=positions), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("learnable", [None, True])
def test_casts_and_the_meta_device(made, learnable):
    real = PresetMd(made, learnable=learnable)
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(real)).to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    with torch.device("meta"):
        late = PresetMd(
            MADE["wan, stretched"]() if isinstance(made.amplitude, torch.Tensor) else made, learnable=learnable
        )
        whole = nn.Sequential(nn.Linear(4, 4), PresetMd(made, learnable=learnable))
    assert all(t.is_meta for t in (*tensors(late).values(), *tensors(whole).values()))
    assert late.positions(*SEGMENTS[late.num_axes]).num_tokens > 1
    late.to_empty(device="cpu")
    state = nn.Sequential(nn.Linear(4, 4), real).bfloat16().state_dict()
    whole.load_state_dict({name: t.bfloat16() for name, t in state.items()}, assign=True)
    for module in (model[1], late, whole[1]):
        for name, t in tensors(module).items():
            assert t.dtype == tensors(real)[name].dtype, name
            expected = tensors(real)[name]
            rounded = module is whole[1] and isinstance(t, nn.Parameter)
            assert torch.equal(t, expected.bfloat16().to(t.dtype) if rounded else expected), name
    reset = move_parameters(copy.deepcopy(real))
    reset.reset_parameters()
    for name, t in tensors(reset).items():
        assert torch.equal(t, tensors(real)[name]), name


def test_tables_follow_the_module():
    """Text on the diagonal needs a table. A grid does not."""
    module = PresetMd(preset("qwen2_vl", 16))
    assert module.positions(3, (2, 4)).coords.device.type == "cpu"
    assert module.to("meta").positions(3, (2, 4)).coords.is_meta
    assert module.positions(3, (2, 4), device="cpu").coords.device.type == "cpu"
    eva = PresetMd(preset("eva02"))
    assert eva.positions(1, (8, 4), reference=(8, 8)) == Grid((8, 4), 1).interpolate(8)
    dino = PresetMd(preset("dinov3"))
    assert dino.positions(5, (2, 4), by="longer") == Grid((2, 4), 5).cells("longer")


def test_phase_is_clamped_and_only_on_the_keys():
    module = PresetMd(preset("pope", 8, num_heads=2))
    (q, k), positions = on_grid(module)
    with torch.no_grad():
        module.phase.copy_(torch.linspace(-9, 3, 16))
    made = module.preset
    kept = module.get_phase().detach().clamp(-2 * torch.pi, 0)
    assert not torch.equal(kept, module.get_phase())
    expected = cosine(q, k, omega=made.omega, positions=positions, phase=(None, kept), **made.options)
    for a, b in zip(module(q, k, positions=positions), expected, strict=True):
        torch.testing.assert_close(a, b)
    # A phase out of bounds gets the gradient at the bound.
    (found,) = torch.autograd.grad(module(q, k, positions=positions)[1].square()[..., :8].sum(), module.phase)
    kept.requires_grad_()
    y = cosine(k, omega=made.omega, positions=positions, phase=kept, **made.options)
    torch.testing.assert_close(found, torch.autograd.grad(y.square()[..., :8].sum(), kept)[0].flatten())
    with pytest.raises(ValueError, match="expected both q and k, because only the keys have a phase, got 1 tensor"):
        module(k, positions=positions)


def test_the_kernels_run_it():
    """The cases combine a float64 omega, a float32 phase, an amplitude per pair, and a learned theta."""
    for module in (
        move_parameters(PresetMd(preset("pope", 8, num_heads=2), impl="triton")),
        PresetMd(preset("wan", 24, scaling=YARN), impl="triton"),
        PresetMd(preset("flux2", 16), learnable=True, impl="triton"),
    ):
        xs, positions = on_grid(module)
        found = module(*xs, positions=positions)
        module.impl = "reference"
        for a, b in zip(found, module(*xs, positions=positions), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compiles():
    module = PresetMd(preset("pope", 16, num_heads=2), learnable=True)
    xs, positions = on_grid(module)

    def loss(call):
        return sum((y.square() * torch.linspace(0, 1, y.shape[-1])).sum() for y in call(*xs, positions=positions))

    torch.compiler.reset()
    compiled = torch.compile(
        lambda *xs, positions: module(*xs, positions=positions), fullgraph=True, backend="aot_eager"
    )
    wanted = list(module.parameters())
    for a, b in zip(*(torch.autograd.grad(loss(call), wanted) for call in (compiled, module)), strict=True):
        torch.testing.assert_close(a, b)


def test_num_heads_does_not_separate_learned_frequencies():
    def series(num, base, heads):
        return geometric_theta(num, base).expand(heads, -1)

    with pytest.warns(UserWarning, match=r"num_heads: expected 1, got 2.* frequencies of 'wan'; .* series"):
        assert PresetMd("wan", num_heads=2, learnable=True).log_theta.shape == (64,)
    shared = torch.rand(1, 8, 2)
    with pytest.warns(UserWarning, match=r"num_heads: .* got 2.* of this function; .* return omega \(num_") as found:
        RotateMd(16, num_heads=2, frequencies=lambda channels, heads, seed: shared, learnable=True)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PresetMd("wan", num_heads=2)
        RotateMd(16, num_heads=2, frequencies=lambda channels, heads, seed: shared)
        RotateMd(16, num_heads=2, frequencies=lambda channels, heads, seed: shared.expand(2, -1, -1), learnable=True)
        PresetMd("pope", num_heads=2, learnable=True)
        own = PresetMd(Scheme("", 16, Axial((1, 1), series=series)), num_heads=2, learnable=True)
    assert own.log_theta.shape == (2 * 8,)


def test_repr():
    text = repr(PresetMd(preset("pope", 8, num_heads=2), learnable=True))
    for part in ("'pope'", "head_dim=8", "num_heads=2", "learnable=True", "phase='k'", "act='softplus'"):
        assert part in text
    assert "pairs" not in text
    expected = "PresetMd('wan', head_dim=128, num_axes=3, axis_order='major_first', pairs='interleaved')"
    assert repr(PresetMd("wan")) == expected
    assert "axis_order='minor_first'" in repr(PresetMd("rope_vit_axial"))
    assert "rotary_dim=slice(0, 16" in repr(PresetMd(preset("eva02", 32, rotary_dim=16)))


@pytest.mark.parametrize("name", ["rope_vit_mixed", "rope_1d", "ernie4_5_vl"])
def test_repr_without_an_axis_order(name):
    """Dense frequencies, a single axis and grouped axes have no block order."""
    assert "axis_order" not in repr(PresetMd(name, num_heads=2))


def test_defaults_of_a_scheme_differ_from_those_of_a_module():
    """The docstrings of both modules state these defaults."""
    scheme = Scheme("", 8, Axial((1, 1)))
    module = RotateMd(8, 2, pairs="interleaved", axis_order="major_first", dtype=torch.float64)
    assert torch.equal(PresetMd(scheme).omega, module.omega)
    assert (PresetMd(scheme).pairs, RotateMd(8).pairs) == ("interleaved", "half")
    for text in (PresetMd.__doc__, RotateMd.__doc__):
        assert all(value in text for value in ('"interleaved"', '"half"', '"major_first"', '"minor_first"'))


def test_custom_preset():
    """The test edits the data of a preset by hand."""
    eva = preset("eva02", 8)
    module = PresetMd(replace(eva, omega=eva.omega.flip(-1), scheme=replace(eva.scheme, pairs="half")))
    x, positions = torch.randn(1, 1, 8, 8), module.positions((2, 4))
    expected = rotate(x, omega=eva.omega.flip(-1), positions=positions, pairs="half")
    assert torch.equal(module(x, positions=positions), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wan", "pope", "rope_vit_mixed", "qwen2_vl", "transnormer"])
def test_on_a_gpu(name):
    """Modules move to the GPU with their tables, and train for one step."""
    module = move_parameters(PresetMd(preset(name, num_heads=2)))
    segments = [3, *SEGMENTS[module.num_axes]] if module.preset.scheme.tokens else SEGMENTS[module.num_axes]
    positions = module.positions(*segments)
    xs = [torch.randn(1, 2, positions.num_tokens, module.head_dim) for _ in range(2)]
    expected = module(*xs, positions=positions)
    there = copy.deepcopy(module).cuda()
    cuda = there.positions(*segments)
    found = there(*(x.cuda() for x in xs), positions=cuda)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
    wanted = list(module.parameters())
    if wanted:
        grads = torch.autograd.grad(sum(y.square().mean() * (i + 1) for i, y in enumerate(expected)), wanted)
        same = torch.autograd.grad(
            sum(y.square().mean() * (i + 1) for i, y in enumerate(found)), list(there.parameters())
        )
        for a, b in zip(same, grads, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "warns"),
    [("dinov3", (4, 6), True), ("eva02", (4, 6), True), ("wan", (2, 4, 6), False), ("rope_vit_axial", (4, 6), False)],
)
def test_a_plain_grid_is_not_taken_for_the_positions_of_a_scheme(name, shape, warns, recwarn):
    """Schemes such as DINOv3's, which scales coordinates to [-1, 1], would silently compute something else."""
    module = PresetMd(name, head_dim=64)
    q = torch.randn(1, 2, math.prod(shape), 64)
    own = module(q, positions=module.positions(shape))
    assert not recwarn
    for _ in range(2):
        plain = module(q, positions=Grid(shape))
    messages = [str(each.message) for each in recwarn]
    assert len(messages) == warns
    if warns:
        assert f"pass module.positions({shape})" in messages[0]
    assert torch.equal(plain, own) is not warns
    recwarn.clear()
    module(q, positions=Grid(shape, scale=0.5))
    assert not recwarn


def test_a_plain_grid_with_other_axes_names_the_positions_to_pass(recwarn):
    module = PresetMd("flux1", head_dim=64)
    q = torch.randn(1, 2, 24, 64)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"3 axes for this module, got 2; pass module\.positions\(\(4, 6\)\)"):
            module(q, positions=Grid((4, 6)))
    assert not recwarn
    module(q, positions=module.positions((4, 6)))
