"""Phase groups of the cosine map return the concatenated results of the single groups."""

import pytest
import torch
from parametrizing import COMPILERS
from torch.func import jvp

from lrpe_md import CosineMd, Grid, cosine, reference
from lrpe_md.testing import budget_violation, rounded_angles

GRID = Grid((2, 3), prefix=1)
GROUPS = 3


def tensors(*heads, dtype=torch.float64, phase_heads=2):
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(2, h, 7, 4, dtype=dtype, generator=generator) for h in heads]
    omega = torch.rand(2, 4, 2, dtype=dtype, generator=generator)
    return *xs, omega, torch.randn(GROUPS, phase_heads, 4, dtype=dtype, generator=generator)


def formula(x, omega, phase, groups=GROUPS):
    """Compute [silu(x) cos(Θ + φ_1), silu(x) sin(Θ + φ_1), silu(x) cos(Θ + φ_2), ...], Θ = φ = 0 in the prefix."""
    s, on_grid = GRID.coordinates(), torch.arange(7) >= 1
    out = []
    for group in range(groups):
        theta = torch.einsum("nk,hck->hnc", s, omega.double())
        theta = theta + (0 if phase is None else phase[group][:, None])
        theta = torch.where(on_grid[:, None], theta, 0).repeat_interleave(x.shape[1] // theta.shape[0], 0)
        acted = x * x.sigmoid()
        out += [acted * theta.cos(), acted * theta.sin()]
    return torch.cat(out, dim=-1)


def call(x, omega, phase, **kwargs):
    return cosine(x, omega=omega, phase=phase, positions=GRID, act="silu", **kwargs)


@pytest.mark.parametrize(("impl", "phase_heads"), [("reference", 1), ("reference", 2), ("triton", 2)])
def test_groups_are_concatenated(impl, phase_heads):
    """The results agree for one tensor, for q and k in one call, and for q and k with separate positions."""
    q, k, omega, phase = tensors(4, 2, phase_heads=phase_heads)
    expected = formula(q, omega, phase), formula(k, omega, phase)
    kwargs = {"omega": omega, "act": "silu", "impl": impl}
    for found in (
        (call(q, omega, phase, impl=impl), call(k, omega, phase, impl=impl)),
        cosine(q, k, positions=GRID, phase=phase, **kwargs),
        cosine(q, k, positions=(GRID, GRID), phase=(phase, phase), **kwargs),
    ):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_groups_only_on_the_keys():
    """q without groups is repeated, so that q·k sums over the groups."""
    q, k, omega, phase = tensors(2, 2)
    for other in (None, phase[0], phase[:1, :1].expand(GROUPS, -1, -1)):
        found = cosine(q, k, omega=omega, positions=GRID, phase=(other, phase))
        pairs = [
            cosine(
                q, k, omega=omega, positions=GRID, phase=(other if other is None or other.ndim == 2 else other[g], p)
            )
            for g, p in enumerate(phase)
        ]
        assert found[0].shape == found[1].shape == (2, 2, 7, 2 * GROUPS * 4)
        torch.testing.assert_close(found[0] @ found[1].mT, sum(a @ b.mT for a, b in pairs))
    found = cosine(q, k, omega=omega, positions=GRID, phase=(phase, None))
    torch.testing.assert_close(found[1], cosine(k, omega=omega, positions=GRID).repeat(1, 1, 1, GROUPS))


def test_one_group_is_a_phase():
    x, omega, phase = tensors(2)
    assert torch.equal(call(x, omega, phase[:1]), call(x, omega, phase[0]))
    pair = cosine(x, x, omega=omega, positions=GRID, phase=(None, phase[:1]))
    assert pair[0].shape == pair[1].shape == (2, 2, 7, 8)


def test_layout_and_dtype_follow_the_inputs():
    x, omega, phase = tensors(4, dtype=torch.float32)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2).bfloat16()
    found = call(turned, omega, phase)
    assert found.dtype == torch.bfloat16
    assert found.transpose(1, 2).is_contiguous()
    assert call(x, omega, phase).is_contiguous()
    assert torch.equal(found, call(x.bfloat16(), omega, phase))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_gradients(impl):
    args = [t.requires_grad_() for t in tensors(2)]

    def f(x, omega, phase):
        return call(x, omega, phase, impl=impl)

    if impl == "reference":
        assert torch.autograd.gradcheck(f, args, fast_mode=True)
        assert torch.autograd.gradgradcheck(f, args, fast_mode=True)
    g = torch.randn(2, 2, 7, 8 * GROUPS, dtype=torch.float64)
    expected = torch.autograd.grad(formula(*args), args, g)
    for a, b in zip(torch.autograd.grad(f(*args), args, g), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_jvp():
    args = tensors(2)
    tangents = tuple(torch.randn_like(t) for t in args)
    torch.testing.assert_close(jvp(call, args, tangents), jvp(formula, args, tangents))


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILERS)
def test_compile(backend):
    args = [t.requires_grad_() for t in tensors(2, dtype=torch.float32)]
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    found, expected = compiled(*args), call(*args)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), args[1:]) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


BAD = {
    "no group": (r"phase: expected at least one group, got shape \(0, 2, 4\)", lambda x, w, p: call(x, w, p[:0])),
    "another width": (
        r"phase\[0\]: expected shape .*, 8\), got \(2, 4\)",
        lambda x, w, p: call(x.repeat(1, 1, 1, 2), w.repeat(1, 2, 1), p),
    ),
    "other heads": (
        r"phase\[0\]: expected 1 head or the number of key heads", lambda x, w, p: call(x, w, p.repeat(1, 2, 1)[:, :3]),
    ),
    "numbers that differ": (
        r"phase: expected the same number of groups for q and k, got shapes \[\(3, 2, 4\), \(2, 2, 4\)\]",
        lambda x, w, p: cosine(x, x, omega=w, positions=GRID, phase=(p, p[:2])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name, monkeypatch):
    message, f = BAD[name]
    monkeypatch.setattr(reference, "encode", None)  # errors come before anything runs
    with pytest.raises(ValueError, match=message):
        f(*tensors(2))


# --- the module --------------------------------------------------------------------------------------------


def test_module():
    module = CosineMd(4, 2, num_heads=2, phase=True, phase_groups=GROUPS, dtype=torch.float64)
    assert module.get_phase().shape == (GROUPS, 2, 4)
    assert module.state_dict().keys() == {"phase"}
    assert "phase_groups=3" in repr(module)
    x, _, phase = tensors(2)
    with torch.no_grad():
        module.phase.copy_(phase.flatten())
    expected = cosine(x, omega=module.omega, phase=phase, positions=GRID)
    assert torch.equal(module(x, positions=GRID), expected)
    module.reset_parameters()
    # Groups must differ initially, or they would stay equal.
    assert len(module.get_phase().detach()[:, 0, 0].unique()) == GROUPS
    assert module.get_phase().detach()[0].abs().sum() == 0
    with torch.device("meta"):
        other = CosineMd(4, 2, num_heads=2, phase=True, phase_groups=GROUPS, dtype=torch.float64)
    assert torch.equal(other.to_empty(device="cpu").phase, module.phase)


@pytest.mark.parametrize("groups", [1, GROUPS])
def test_module_with_a_phase_on_the_keys(groups):
    q, k, _, phase = tensors(4, 2)
    module = CosineMd(4, 2, num_heads=2, phase="k", phase_groups=groups, dtype=torch.float64)
    phase = phase[:groups] if groups > 1 else phase[0]
    with torch.no_grad():
        module.phase.copy_(phase.flatten())
    expected = cosine(q, k, omega=module.omega, phase=(None, phase), positions=GRID)
    for a, b in zip(module(q, k, positions=GRID), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="expected both q and k, because only the keys have a phase, got 1 tensor"):
        module(k, positions=GRID)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"phase_groups": 2}, "phase_groups: expected 1 without a phase, got 2"),
        ({"phase": True, "phase_groups": 0}, "phase_groups: .*got 0"),
        ({"phase": "q"}, "phase: expected True, False or 'k'.*got 'q'"),
    ],
)
def test_module_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CosineMd(4, 2, **kwargs)


# --- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_on_a_gpu(dtype):
    """Values and gradients are as close to float64 as the reference's."""
    generator = torch.Generator().manual_seed(0)
    grid = Grid((12, 10), prefix=2)
    x = torch.randn(2, 4, 122, 32, generator=generator).to(dtype)
    omega = torch.rand(2, 32, 2, generator=generator)
    phase = torch.randn(GROUPS, 2, 32, generator=generator)
    g = torch.randn(2, 4, 122, 64 * GROUPS, generator=generator).to(dtype)

    def run(device, dtype, frequencies, impl):
        leaves = [t.to(device).requires_grad_() for t in (x.to(dtype), omega.to(frequencies), phase.to(frequencies))]
        y = cosine(leaves[0], omega=leaves[1], phase=leaves[2], positions=grid, act="silu", impl=impl)
        return y, *torch.autograd.grad(y, leaves, g.to(device, dtype))

    exact = run("cpu", torch.float64, torch.float64, "reference")
    with rounded_angles():
        same = run("cpu", dtype, torch.float32, "reference")
    found = run("cuda", dtype, torch.float32, "triton")
    for name, a, b, c in zip(("y", "dx", "domega", "dphase"), found, same, exact, strict=True):
        assert budget_violation(name, a.detach().cpu(), b.detach(), c.detach()) is None
