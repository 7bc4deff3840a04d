"""Modules with frequencies: casting, copying, saving and materialising."""

import copy
import io
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn

from lrpe_md import (
    Axial,
    CosineMd,
    Grid,
    HeadDecay,
    PresetMd,
    Rotate1d,
    RotateMd,
    Scheme,
    cosine,
    lrpe_rotate_1d,
    parameter_groups,
    preset,
    rotate,
)
from lrpe_md.integrations.encoding import build_encoding


def own_omega(channels, heads, seed):
    return torch.linspace(1, 0.1, heads * channels * 2, dtype=torch.float64).reshape(heads, channels, 2) + seed


KINDS = [
    {},
    {"learnable": True},
    {"frequencies": "mixed", "base": 10.0, "num_heads": 4},
    {"frequencies": "mixed", "base": 10.0, "num_heads": 4, "learnable": True},
    {"num_heads": 4, "learnable": True, "phase": True},
    {"dtype": torch.float64, "phase": True},
    {"frequencies": own_omega, "num_heads": 4},
    {"frequencies": own_omega, "num_heads": 4, "seed": 2, "learnable": True},
]
GRID = Grid((3, 4), prefix=1)


@pytest.fixture(params=[CosineMd, RotateMd])
def cls(request):
    return request.param


@pytest.fixture(params=KINDS, ids=lambda kind: ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in kind.items()))
def kwargs(request):
    return request.param


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def test_module_equals_the_function(cls, kwargs):
    module, function = cls(8, 2, act="silu", **kwargs), cosine if cls is CosineMd else rotate
    q, k = torch.randn(2, 8, 13, 8), torch.randn(2, 4, 13, 8)
    found = module(q, k, positions=GRID)
    expected = function(q, k, omega=module.get_omega(), phase=module.get_phase(), positions=GRID, act="silu")
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(module(q, positions=GRID), found[0])


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_frequencies_keep_their_precision(cls, kwargs, cast):
    model = nn.Sequential(nn.Linear(8, 8), cls(8, 2, **kwargs))
    before = {name: t.detach().clone() for name, t in tensors(model[1]).items()}
    assert before
    loss = model[1](torch.randn(1, 4, 13, 8), positions=GRID).square().mean()
    if loss.requires_grad:
        loss.backward()
    cast(model)
    assert model[0].weight.dtype != torch.float32
    for name, t in tensors(model[1]).items():
        assert t.dtype == before[name].dtype
        assert torch.equal(t, before[name])
        assert t.grad is None or t.grad.dtype == t.dtype


def test_meta_device(cls, kwargs):
    real = cls(8, 2, **kwargs)
    with torch.device("meta"):
        module = cls(8, 2, **kwargs)
    assert all(t.is_meta for t in tensors(module).values())
    module.to_empty(device="cpu")
    for name, t in tensors(module).items():
        assert torch.equal(t, tensors(real)[name]), name


def test_a_module_that_is_emptied(cls, kwargs):
    model = nn.Sequential(nn.Linear(8, 8), cls(8, 2, **kwargs))
    expected = {name: t.clone() for name, t in tensors(model[1]).items()}
    with torch.no_grad():
        for t in tensors(model[1]).values():
            t.fill_(torch.nan)
    model.to_empty(device="cpu")
    for name, t in tensors(model[1]).items():
        assert torch.equal(t, expected[name]), name


def test_meta_device_then_assigned_state_dict(cls, kwargs):
    real = nn.Sequential(nn.Linear(8, 8), cls(8, 2, **kwargs))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), cls(8, 2, **kwargs))
    model.load_state_dict(real.state_dict(), assign=True)
    for name, t in tensors(model).items():
        assert torch.equal(t, tensors(real)[name]), name


@pytest.mark.parametrize("learnable", [False, True])
def test_decay_of_a_meta_model_then_assigned_state_dict(learnable):
    real = HeadDecay(4, learnable=learnable)
    with torch.device("meta"):
        module = HeadDecay(4, learnable=learnable)
    module.load_state_dict({name: t.bfloat16() for name, t in real.state_dict().items()}, assign=True)
    assert all(t.dtype == torch.float32 for t in tensors(module).values())
    assert all(parameter._no_weight_decay for parameter in module.parameters())
    torch.testing.assert_close(module(), real(), rtol=1e-2, atol=0)


def test_reset_parameters(cls, kwargs):
    module, real = cls(8, 2, **kwargs), cls(8, 2, **kwargs)
    with torch.no_grad():
        for t in tensors(module).values():
            t.fill_(7)
    module.reset_parameters()
    for name, t in tensors(module).items():
        assert torch.equal(t, tensors(real)[name])


def test_state_dict_copy_pickle(cls, kwargs):
    module = cls(8, 2, **kwargs)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1)
    other = cls(8, 2, **kwargs)
    other.load_state_dict(module.state_dict())
    for copied in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for name, t in tensors(copied).items():
            assert torch.equal(t, tensors(module)[name])
    # Fixed frequencies are not in the state_dict.
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()}


def test_learned_parameters(cls, kwargs):
    module = cls(8, 2, **kwargs)
    names = {name for name, _ in module.named_parameters()}
    expected = {"phase"} if kwargs.get("phase") else set()
    if kwargs.get("learnable"):
        expected.add("omega" if "frequencies" in kwargs else "log_theta")
    assert names == expected == module.no_weight_decay()
    if names:
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = torch.randn(2, 4, 13, 8)
        (module(x, positions=GRID) * torch.randn(2, 4, 13, 16 if cls is CosineMd else 8)).sum().backward()
        optimizer.step()
        assert all(not torch.equal(p, before[name]) for name, p in module.named_parameters())
        if kwargs.get("learnable") and "log_theta" in names:  # an axial scheme stays axial
            assert torch.equal(module.get_omega() != 0, cls(8, 2, **kwargs).get_omega() != 0)


# --- in other people's trainers ----------------------------------------------------------------------------


LEARNING = [kind for kind in KINDS if kind.get("learnable") or kind.get("phase")] + [{"learnable": "raw"}]


def flips(module, steps=100):
    """Return the shares of frequencies that change sign under Adam, and that change by more than a factor of 2."""
    torch.manual_seed(0)
    start = module.get_omega().detach().clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        q, k = module(torch.randn(2, 4, 16, 32), torch.randn(2, 4, 16, 32), positions=Grid((4, 4)))
        loss = ((q @ k.mT / 8).softmax(-1) @ torch.randn(2, 4, 16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ratio = module.get_omega().detach()[start != 0] / start[start != 0]
    return (ratio < 0).float().mean(), ((ratio < 0.5) | (ratio > 2)).float().mean()


def test_adam_keeps_the_order_of_frequencies(cls):
    """Check at a usual learning rate, with noise as gradients. A learned theta would lose the order."""
    assert flips(cls(32, 2, num_heads=4, learnable=True)) == (0, 0)
    flipped, moved = flips(cls(32, 2, num_heads=4, learnable="raw"))
    assert flipped > 0
    assert moved > 0.4


@pytest.mark.parametrize("kind", LEARNING)
def test_trainers_that_treat_matrices_differently_leave_it_alone(cls, kind):
    """Parameters are one-dimensional and marked, also in copies and materialised modules."""
    with torch.device("meta"):
        late = cls(8, 2, **kind)
    assigned = copy.deepcopy(late)
    module = cls(8, 2, **kind)
    assigned.load_state_dict(module.state_dict(), assign=True)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module)), late.to_empty(device="cpu"), assigned
    for each in (module, *copies, copy.deepcopy(module).bfloat16()):
        assert [p.ndim for p in each.parameters()] == [1] * len(list(module.parameters()))
        assert all(p._no_weight_decay for p in each.parameters())
    model = nn.Sequential(nn.Linear(8, 8), module)
    timm_optim = pytest.importorskip("timm.optim")
    decayed = timm_optim.param_groups_weight_decay(model, 0.1)
    (decayed,) = ([id(p) for p in group["params"]] for group in decayed if group["weight_decay"])
    assert decayed == [id(model[0].weight)]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for optimizer in (
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1),
        timm_optim.create_optimizer_v2(model, "muon", lr=1e-4, weight_decay=0.1),
    ):
        x = model[0](torch.randn(2, 4, 13, 8))
        module(x, positions=GRID).square().mul(torch.rand(())).sum().backward()
        optimizer.step()
    for name, p in module.named_parameters():  # AdamW's step, not an orthogonalised one
        assert (p - before[name]).abs().max() < 2e-4


def test_parameter_groups(cls):
    module = cls(8, 2, learnable=True, phase=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), module, nn.Linear(8, 8, bias=False).requires_grad_(False))
    decay, keep, frequencies = parameter_groups(model, 1e-3, weight_decay=0.1, frequency_lr=1e-2)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in (decay, keep, frequencies)] == [
        ("decay", 1e-3, 0.1), ("no_decay", 1e-3, 0.0), ("frequencies", 1e-2, 0.0),
    ]  # fmt: skip
    assert decay["params"] == [model[0].weight]
    assert [id(p) for p in frequencies["params"]] == [id(module.log_theta)]
    assert {id(p) for p in keep["params"]} == {id(p) for p in (model[0].bias, *model[1].parameters(), module.phase)}
    torch.optim.AdamW([decay, keep, frequencies])
    assert [g["name"] for g in parameter_groups(nn.Linear(8, 8, bias=False), 1e-3)] == ["decay"]
    assert parameter_groups(model, 1e-3)[2]["lr"] == 1e-3
    model[0].weight._no_weight_decay = True
    model.no_weight_decay = lambda: {"1.weight"}
    assert [g["name"] for g in parameter_groups(model, 1e-3)] == ["no_decay", "frequencies"]
    for name in ("lr", "weight_decay", "frequency_lr"):
        with pytest.raises(ValueError, match=rf"^{name}: expected a finite non-negative number, got -1"):
            parameter_groups(model, **{"lr": 1.0, name: -1})


def test_parameter_groups_of_parametrized_frequencies(cls):
    module = cls(8, 2, learnable=True, phase=True)
    for name in ("log_theta", "phase"):
        nn.utils.parametrize.register_parametrization(module, name, Twice())
    keep, frequencies = parameter_groups(module, 1e-3, frequency_lr=1e-2)
    assert keep["params"] == [module.get_parameter("parametrizations.phase.original")]
    assert frequencies["params"] == [module.get_parameter("parametrizations.log_theta.original")]


def test_parameter_groups_of_wrapped_models():
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1, 4, 8))
            self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
            self.head.weight = self.embed.weight

        def no_weight_decay(self) -> set[str]:
            return {"pos_embed", "head.weight"}  # the second name is that of a tied parameter

    model = Backbone()
    for wrapped in (model, torch.compile(model), nn.DataParallel(model), nn.Sequential(model)):
        assert [g["name"] for g in parameter_groups(wrapped, 1e-3)] == ["no_decay"]


# --- state_dicts of other parametrisations -----------------------------------------------------------------


@pytest.mark.parametrize("learnable", [True, "raw"])
@pytest.mark.parametrize("signs", [1, -1], ids=["positive", "some below 0, one 0"])
def test_state_dicts_of_other_parametrisations(cls, learnable, signs):
    """Convert between theta, shaped tensors (before version 0.3) and logarithms, including signs and zeros."""
    module = cls(8, 2, num_heads=4, learnable=learnable, phase=True)
    num_theta, num_phase = (4, 2) if cls is CosineMd else (2, 1), 8 if cls is CosineMd else 4
    theta = torch.linspace(0.1, 2, 4 * num_theta[0]).reshape(4, -1)
    if signs < 0:
        theta[1], theta[2, 0] = -theta[1], 0
    old = {"theta": theta, "phase": torch.linspace(-1, 1, 4 * num_phase).reshape(4, num_phase)}
    module.load_state_dict(old)
    torch.testing.assert_close(module._theta(), theta, rtol=1e-6, atol=0)
    assert torch.equal(module.get_phase(), old["phase"])
    for other in (learnable, True if learnable == "raw" else "raw"):
        again = cls(8, 2, num_heads=4, learnable=other, phase=True)
        again.load_state_dict(module.state_dict())
        torch.testing.assert_close(again.get_omega(), module.get_omega(), rtol=1e-6, atol=0)
        for copied in (copy.deepcopy(again), copy.deepcopy(again).bfloat16()):
            assert torch.equal(copied.get_omega(), again.get_omega())
    omega = module.get_omega()
    (grad,) = torch.autograd.grad(omega.sum(), next(iter(module.parameters())))
    assert (grad.reshape(theta.shape) != 0).equal(theta != 0) or learnable == "raw"
    fresh = cls(8, 2, num_heads=4, learnable=learnable, phase=True)
    module.load_state_dict(fresh.state_dict())  # all positive again
    assert torch.equal(module.get_omega(), fresh.get_omega())
    assert module.state_dict().keys() == fresh.state_dict().keys()
    with pytest.raises(RuntimeError, match="size mismatch for"):
        module.load_state_dict({**old, "theta": theta[:, 1:]})


@pytest.mark.parametrize("options", [{"learnable": True}, {"frequencies": "mixed", "learnable": True}])
def test_state_dicts_of_the_other_map_are_refused(options):
    """Learned frequencies of both maps may have the same names and sizes."""
    rotated, mapped = nn.Sequential(RotateMd(16, 2, **options)), nn.Sequential(CosineMd(8, 2, **options))
    before = copy.deepcopy(mapped.state_dict())
    saved = io.BytesIO()
    torch.save(rotated.state_dict(), saved)
    saved.seek(0)
    with pytest.raises(
        RuntimeError, match=r"0\.map: expected the frequencies .* with map 'cosine', got .* map 'rotate'"
    ):
        mapped.load_state_dict(torch.load(saved, weights_only=True))
    assert all(torch.equal(value, before[name]) for name, value in mapped.state_dict().items())
    mapped.load_state_dict(dict(rotated.state_dict()))  # without metadata, as from safetensors
    nn.Sequential(CosineMd(8, 2)).load_state_dict(nn.Sequential(RotateMd(16, 2)).state_dict())  # nothing is saved


@pytest.mark.parametrize("options", [{}, {"frequencies": "mixed"}, {"learnable": "raw"}, {"learnable": False}])
def test_state_dicts_of_other_sizes_are_refused(cls, options):
    """Flattened parameters of other sizes may have the same length, as if heads of 16 channels were split in two."""
    few = nn.Sequential(cls(16, 2, num_heads=2, phase=True, **{"learnable": True, **options}))
    many = nn.Sequential(cls(8, 2, num_heads=4, phase=True, **{"learnable": True, **options}))
    saved = io.BytesIO()
    torch.save(few.state_dict(), saved)
    saved.seek(0)
    with pytest.raises(RuntimeError, match=r"0\.\w+: expected values of shape \(4, .* before flattening, got \(2, "):
        many.load_state_dict(torch.load(saved, weights_only=True))
    many.load_state_dict(copy.deepcopy(many).state_dict())


def test_frequencies_with_and_without_an_axis_of_heads():
    given = Rotate1d(8, theta=torch.rand(4), learnable=True)
    module = Rotate1d(8, learnable=True)
    module.load_state_dict(given.state_dict())
    torch.testing.assert_close(module.get_omega(), given.get_omega())


@pytest.mark.parametrize("build", [partial(RotateMd, 8), partial(CosineMd, 8), partial(HeadDecay, 2)])
def test_device_number_zero(build):
    """The number of the first GPU is not the default device."""
    if torch.cuda.is_available():
        assert next(build(device=0).buffers()).device == torch.device("cuda", 0)
    else:
        with pytest.raises((RuntimeError, AssertionError)):
            build(device=0)


def test_shaped_directions_load(cls):
    module = cls(8, 2, num_heads=4, frequencies="mixed", base=10.0, learnable=True)
    omega = torch.rand(module.get_omega().shape)
    module.load_state_dict({"omega": omega})
    assert torch.equal(module.get_omega(), omega)
    inside = nn.Sequential(cls(8, 2, num_heads=4, frequencies="mixed", base=10.0, learnable=True))
    inside.load_state_dict({"0.omega": omega})
    assert torch.equal(inside[0].get_omega(), omega)


def test_how_frequencies_are_learned_is_checked(cls):
    with pytest.raises(ValueError, match=r"learnable: expected True, False or 'raw' .*, got 'log'"):
        cls(8, 2, learnable="log")


def test_fixed_omega_is_built_once(cls):
    module = cls(8, 2)
    assert module.get_omega() is module.omega


def test_seed(cls):
    a, b, c = (cls(8, 2, frequencies="mixed", seed=s).omega for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    before = torch.random.get_rng_state()
    cls(8, 2, frequencies="mixed")
    assert torch.equal(before, torch.random.get_rng_state())


def test_extra_repr(cls):
    text = repr(cls(8, 3, frequencies="mixed", num_heads=2, learnable=True, phase=True, act="silu"))
    for part in ("head_dim=8", "num_axes=3", "'mixed'", "num_heads=2", "learnable=True", "phase=True", "'silu'"):
        assert part in text


@pytest.mark.parametrize("name", ["axis_order", "base", "frequencies", "learnable", "preset", "seed"])
def test_arguments_that_are_only_read_when_a_module_is_built_cannot_change(name):
    module = PresetMd("eva02", head_dim=8) if name == "preset" else RotateMd(8)
    with pytest.raises(AttributeError, match=rf"^{name}: can't be changed .* got 2; build a new module"):
        setattr(module, name, 2)
    module.impl = "reference"
    assert module.impl == "reference"


@pytest.mark.parametrize(
    ("axis_order", "head_dim", "idle"),
    [
        ("minor_first", 8, "(0, 2, 2): positions on axis 0 have"),
        ("major_first", 8, "(2, 2, 0): positions on axis 2 have"),
        ("minor_first", 2, "(0, 0, 1): positions on axes 0 and 1 have"),
    ],
)
def test_axis_without_channels_warns(axis_order, head_dim, idle):
    expected = re.escape(f"expected channels for each of the 3 axes, got {idle} no effect. Use a larger head_dim")
    for make, map_ in ((partial(RotateMd, head_dim), ""), (partial(CosineMd, head_dim // 2), ', map="cosine"')):
        with pytest.warns(UserWarning, match=expected) as found:
            make(3, axis_order=axis_order, learnable=True)
        assert [warning.filename for warning in found] == [__file__]
        assert f"choose each axis's share with PresetMd(Scheme(..., Axial(split){map_}))" in str(found[0].message)
    with pytest.warns(UserWarning, match=expected):
        build_encoding("rotate", {"axis_order": axis_order}, head_dim, 1, 1, 3)


def test_learned_frequencies_of_each_axis():
    """In RotateMd, axes share one series. In a scheme, they have separate frequencies."""
    q, k = torch.randn(2, 1, 2, 12, 16)
    scheme = Scheme("", 16, Axial((1, 1), axis_order="minor_first"), pairs="half")
    fixed, positions = RotateMd(16, 2)(q, k, positions=Grid((3, 4))), Grid((3, 4))
    for module, is_shared in ((RotateMd(16, 2, learnable=True), True), (PresetMd(scheme, learnable=True), False)):
        outs = module(q, k, positions=positions)
        torch.testing.assert_close(outs, fixed)
        (outs[0] @ outs[1].mT).square().sum().backward()
        with torch.no_grad():
            module.log_theta -= 0.1 * module.log_theta.grad / module.log_theta.grad.norm()
        columns, rows = module.get_omega()[0].sum(-1).detach().unflatten(0, (2, 4))
        assert torch.allclose(columns, rows) == is_shared


def test_axis_without_a_share_of_a_tiny_preset_warns():
    with pytest.warns(UserWarning, match=re.escape("got (2, 0, 0): positions on axes 1 and 2")) as found:
        preset("cosmos", 4)
    assert [warning.filename for warning in found] == [__file__]
    assert str(found[0].message).endswith("choose each axis's share with split= in lrpe_md.preset or encoding_kwargs")
    with pytest.warns(UserWarning, match=re.escape("got (2, 0, 0): positions on axes 1 and 2")):
        build_encoding("rotate", {"split": (1, 1, 1), "remainder": 0}, 4, 1, 1, 3)


@pytest.mark.parametrize("head_dim", [6, 10, 64])
def test_axes_with_channels_do_not_warn(head_dim, recwarn):
    RotateMd(head_dim, 3)
    RotateMd(8, 3, frequencies="mixed")
    preset("wan", 16, split=(0, 1, 1))  # meant to have no time
    assert not recwarn.list


def test_default_base(cls):
    """Mixed frequencies have RoPE-ViT's base, 10, wherever they are built."""
    assert (cls(8, 2).base, cls(8, 2, frequencies="mixed").base, cls(8, 2, base=7.0).base) == (1e4, 10.0, 7.0)
    explicit = cls(8, 2, frequencies="mixed", base=10.0, num_heads=2)
    assert torch.equal(cls(8, 2, frequencies="mixed", num_heads=2).omega, explicit.omega)
    assert torch.equal(cls(8, 2).omega, cls(8, 2, base=1e4).omega)


def test_custom_frequencies(cls):
    module = cls(8, 2, frequencies=own_omega, num_heads=4, seed=1)
    channels = 8 if cls is CosineMd else 4
    assert torch.equal(module.omega, own_omega(channels, 4, 1).float())
    assert "frequencies=own_omega" in repr(module)
    with torch.device("meta"):
        module = cls(8, 2, frequencies=own_omega, num_heads=4, learnable=True)
    assert torch.equal(module.to_empty(device="cpu").get_omega(), own_omega(channels, 4, 0).float())
    with pytest.raises(ValueError, match=rf"expected a function .* \(1, {channels}, 3\) or \(4, {channels}, 3\), got"):
        cls(8, 3, frequencies=own_omega, num_heads=4)
    for other in ("spiral", Scheme("Ours.", 8, Axial((1, 1)))):
        with pytest.raises(
            ValueError, match=r"frequencies: expected 'axial', .*; for a preset or a Scheme, use PresetMd"
        ):
            cls(8, 2, frequencies=other)


@pytest.mark.parametrize("amplitude", [1.5, torch.linspace(0.5, 2, 4, dtype=torch.float64)], ids=["number", "a pair"])
def test_amplitude_of_rotate(amplitude):
    with torch.device("meta"):
        late = nn.Sequential(RotateMd(8, 2, amplitude=amplitude))
    q = torch.randn(2, 4, 13, 8)
    for module in (RotateMd(8, 2, amplitude=amplitude).bfloat16(), late.to_empty(device="cpu")[0]):
        expected = rotate(q, omega=module.omega, positions=GRID, amplitude=amplitude)
        torch.testing.assert_close(module(q, positions=GRID), expected)
        assert set(module.state_dict()) == set()
        assert "amplitude=True" in repr(module)
    with pytest.raises(ValueError, match=r"amplitude: expected a number or a tensor of shape \(4,\), got \(3,\)"):
        RotateMd(8, 2, amplitude=torch.ones(3))


def test_repr_of_theta_omits_the_unused_base():
    assert repr(Rotate1d(8, base=7.0)) == "Rotate1d(head_dim=8, num_axes=1, frequencies='axial', base=7, pairs='half')"
    module = Rotate1d(8, theta=torch.rand(4), scale_base=9.0)
    assert repr(module) == "Rotate1d(head_dim=8, num_axes=1, theta=(4,), pairs='half', scale_base=9)"


def test_rotate_1d():
    module = Rotate1d(8, base=100.0)
    x = torch.randn(2, 3, 5, 8)
    theta = module.omega[0, :, 0]
    assert torch.equal(module(x, offset=4), lrpe_rotate_1d(x, theta, offset=4))
    offsets = torch.tensor([4, 0])
    y = module(x, offset=offsets)
    for b in range(2):
        torch.testing.assert_close(y[b : b + 1], module(x[b : b + 1], offset=int(offsets[b])))
    torch.testing.assert_close(module(module(x, offset=3), offset=-3)[:, :, 0], x[:, :, 0])


def test_bfloat16_state_dict_assigned(cls):
    module = cls(8, 2, learnable=True, phase=True)
    state = {name: t.bfloat16() for name, t in module.state_dict().items()}
    other = cls(8, 2, learnable=True, phase=True)
    other.load_state_dict(state, assign=True)
    assert all(p.dtype == torch.float32 for p in other.parameters())
    other(torch.randn(1, 2, 13, 8), positions=GRID)


@pytest.mark.parametrize("kind", ["adjusted", "with signs", "a preset"])
def test_parameters_that_a_library_casts_are_refused(kind):
    """accelerate and FSDP2 cast parameters without the module. Products with buffers must not hide the dtype."""
    module = PresetMd("eva02", head_dim=16, learnable=True) if kind == "a preset" else RotateMd(16, 2, learnable=True)
    if kind == "adjusted":
        module.adjust()
    if kind == "with signs":
        module.load_state_dict({"theta": -torch.ones(4)})
    module._parameters["log_theta"] = nn.Parameter(module.log_theta.detach().bfloat16())
    with pytest.raises(TypeError, match=r"omega: expected float32 or float64 .*, got torch\.bfloat16"):
        module(torch.randn(1, 2, 6, 16), positions=Grid((2, 3)).cells())


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("options", [{}, {"learnable": "raw"}, {"frequencies": "mixed", "base": 10.0}])
def test_functional_calls_and_parametrizations(cls, options):
    module = cls(8, 2, num_heads=4, phase=True, **{"learnable": True, **options})
    with torch.no_grad():
        module.phase.uniform_()
    x, doubled = torch.randn(1, 4, 13, 8), {name: 2 * t.detach() for name, t in module.named_parameters()}
    found = torch.func.functional_call(module, doubled, (x,), {"positions": GRID})
    for name in doubled:
        nn.utils.parametrize.register_parametrization(module, name, Twice())
    assert torch.equal(module.bfloat16()(x, positions=GRID), found)
    module.set_places(0, 2 * torch.arange(3))
    assert torch.equal(module(x, positions=GRID), module(x, positions=GRID.rescale((2, 1))))
    with pytest.raises(ValueError, match="x: expected head_dim=8, got 6"):
        module(x[..., :6], positions=GRID)
    module = cls(8, 2, num_heads=4, phase=True, **{"learnable": True, **options})
    module.load_state_dict(doubled)
    assert torch.equal(module(x, positions=GRID), found)


def test_gradients_survive_a_cast(cls):
    module = cls(8, 2, learnable=True)
    module.log_theta.grad = torch.rand_like(module.log_theta)
    before = module.log_theta.grad.clone()
    module.bfloat16()
    assert torch.equal(module.log_theta.grad, before)


def test_fsdp2(cls, tmp_path):
    """Every shard has its initial values after meta init, sharding, materialising and casting."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        real = cls(8, 2, learnable=True, num_heads=4, phase=True)
        with torch.device("meta"):
            module = cls(8, 2, learnable=True, num_heads=4, phase=True)
        fully_shard(module, mesh=mesh)
        module.to_empty(device="cpu")
        for _ in range(2):
            for name, p in module.named_parameters():
                assert p.to_local().dtype == torch.float32
                assert torch.equal(p.full_tensor(), dict(real.named_parameters())[name]), name
            module.to(torch.bfloat16)
        module.reset_parameters()
        x = torch.randn(1, 4, 13, 8)
        assert torch.equal(module(x, positions=GRID), real(x, positions=GRID))
    finally:
        dist.destroy_process_group()
