"""Modules that own frequencies: what must survive casting, copying, saving and materialising."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lrpe_md import CosineMd, Grid, Rotate1d, RotateMd, cosine, lrpe_rotate_1d, rotate


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


def test_module_is_the_function(cls, kwargs):
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


def test_meta_device_then_assigned_state_dict(cls, kwargs):
    real = nn.Sequential(nn.Linear(8, 8), cls(8, 2, **kwargs))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), cls(8, 2, **kwargs))
    model.load_state_dict(real.state_dict(), assign=True)
    for name, t in tensors(model).items():
        assert torch.equal(t, tensors(real)[name]), name


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
    # A model with fixed frequencies has the state_dict of a model without an encoding.
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()}


def test_what_learns(cls, kwargs):
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


def test_frequencies_of_your_own(cls):
    module = cls(8, 2, frequencies=own_omega, num_heads=4, seed=1)
    channels = 8 if cls is CosineMd else 4
    assert torch.equal(module.omega, own_omega(channels, 4, 1).float())
    assert "frequencies=own_omega" in repr(module)
    with torch.device("meta"):
        module = cls(8, 2, frequencies=own_omega, num_heads=4, learnable=True)
    assert torch.equal(module.to_empty(device="cpu").get_omega(), own_omega(channels, 4, 0).float())
    with pytest.raises(ValueError, match=rf"expected omega of shape \(1 or 4, {channels}, 3\), got"):
        cls(8, 3, frequencies=own_omega, num_heads=4)
    with pytest.raises(ValueError, match="frequencies: expected 'axial', 'mixed' or a function"):
        cls(8, 2, frequencies="spiral")


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
    with pytest.raises(ValueError, match=r"amplitude: expected a number or \(4,\), got \(3,\)"):
        RotateMd(8, 2, amplitude=torch.ones(3))


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


def test_gradients_survive_a_cast(cls):
    module = cls(8, 2, learnable=True)
    module.log_theta.grad = torch.rand_like(module.log_theta)
    before = module.log_theta.grad.clone()
    module.bfloat16()
    assert torch.equal(module.log_theta.grad, before)


def test_fsdp2(cls, tmp_path):
    """Meta init, sharded, materialised and cast: every shard has the initial values."""
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
