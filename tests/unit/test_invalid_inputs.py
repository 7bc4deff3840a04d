"""Unusual inputs and settings, which give a clear error or the correct result."""

import inspect

import numpy as np
import pytest
import torch

from lrpe_md import (
    AugmentPositions,
    Coordinates,
    CosineMd,
    Grid,
    PresetMd,
    Rotate1d,
    RotateMd,
    Tokens,
    axial_omega,
    compose,
    cosine,
    geometric_theta,
    lrpe_cosine_md,
    lrpe_rotate_1d,
    lrpe_rotate_md,
    pack,
    pad,
    preset,
    rotate,
    window_order,
)  # fmt: skip
from lrpe_md import frequencies as f
from lrpe_md.positions.sequences import packed_positions

GRID = Grid((2, 3))
THETA = geometric_theta(8)
OMEGA = axial_omega(THETA, 8, 2)
X = torch.randn(1, 2, 6, 8)


# --- torch.set_default_device ------------------------------------------------------------------------------


def _layouts(device):
    """Return positions and frequencies on an explicit device, or on the device of their arguments."""
    theta, table = geometric_theta(8, device=device), GRID.explicit(device)
    for axis_map in f.AXIS_MAPS:
        yield axial_omega(theta, 8, 2, axis_map=axis_map, sections=(4, 4))
    for options in ({"shift": 1.0}, {"jitter": 2.0}, {"rescale": 2.0}, {"perturb": (0.5, 0.1), "shift": (1.0, 2.0)}):
        for positions in (GRID, Grid((2, 3), start=1), table):
            moved = AugmentPositions(**options)(positions, device)
            yield moved.coords if isinstance(moved, Coordinates) else moved.coordinates(device)
    packed = pack([GRID, table])
    yield from (packed.positions.coords, packed.cu_seqlens, pad([GRID, table]).coords)
    yield compose(Tokens(2, "diagonal"), GRID.take(window_order((2, 3), 2, device)), device=device).coords
    yield packed_positions(packed.cu_seqlens, 12).coords
    yield f.random_directions(4, 2, 3, generator=torch.Generator(device).manual_seed(0))
    yield f.mixed_omega(4, 2, 3, generator=torch.Generator(device).manual_seed(0))
    for module in (RotateMd(8, device=device), CosineMd(8, frequencies="mixed", learnable=True, device=device)):
        yield module.get_omega()


def test_another_default_device():
    """Tensors that were requested on the CPU are on the CPU, with the same values as without a default device."""
    expected = list(_layouts("cpu"))
    with torch.device("meta"):
        found = list(_layouts("cpu"))
    for a, b in zip(found, expected, strict=True):
        assert a.device.type == "cpu"
        assert torch.equal(a, b)


# --- tensors that are not dense ----------------------------------------------------------------------------

NOT_DENSE = {
    "sparse": lambda t: t.to_sparse(),
    "jagged": lambda t: torch.nested.nested_tensor([t[0], t[0]], layout=torch.jagged),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[0]]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_are_not_dense(kind, impl):
    odd = NOT_DENSE[kind]
    given = {"omega": OMEGA, "phase": torch.ones(1, 8), "amplitude": torch.ones(1, 8), "positions": GRID}
    cosine(X, impl=impl, **given)  # fills the cache with a similar call
    with pytest.raises(TypeError, match=r"x: expected a dense tensor"):
        cosine(odd(X), impl=impl, **given)
    for name in ("omega", "phase", "amplitude"):
        with pytest.raises(TypeError, match=f"{name}: expected a dense tensor"):
            cosine(X, impl=impl, **{**given, name: odd(given[name])})
    with pytest.raises(TypeError, match=r"coords: expected a dense tensor"):
        cosine(X, impl=impl, **{**given, "positions": odd(GRID.coordinates())})
    with pytest.raises(TypeError, match=r"scale: expected a dense tensor"):
        Grid((2, 3), scale=odd(torch.ones(2, 1)))
    with pytest.raises(TypeError, match=r"origin: expected a dense tensor"):
        Grid((2, 3), origin=odd(torch.ones(1, 2, dtype=torch.int64)))


# --- lists, and numbers below zero -------------------------------------------------------------------------

LIST = [1.0, 0.5, 0.25, 0.1]
LISTS = {
    "axial_omega": lambda: axial_omega(LIST, 4, 2),
    "axial_omega by axis": lambda: axial_omega([LIST, LIST], 8, 2),
    "sequence_omega": lambda: f.sequence_omega(LIST, 4),
    "dense_omega": lambda: f.dense_omega(LIST, torch.ones(4, 2)),
    "lrpe_rotate_1d": lambda: lrpe_rotate_1d(X, LIST),
    "lrpe_cosine_md": lambda: lrpe_cosine_md(X, LIST, shape=(2, 3)),
    "lrpe_rotate_md": lambda: lrpe_rotate_md(X, LIST, shape=(2, 3)),
    "Rotate1d": lambda: Rotate1d(8, theta=LIST),
    "set_frequencies": lambda: Rotate1d(8).set_frequencies(LIST),
    "linear_scaling": lambda: f.linear_scaling(LIST, 2.0),
    "ntk_scaling": lambda: f.ntk_scaling(LIST, 2.0),
    "dynamic_ntk_scaling": lambda: f.dynamic_ntk_scaling(LIST, 2.0, length=4, original_length=2),
    "yarn_scaling": lambda: f.yarn_scaling(LIST, 2.0, original_length=8),
    "longrope_scaling": lambda: f.longrope_scaling(LIST, LIST, LIST, factor=2.0, length=4, original_length=2),
    "llama3_scaling": lambda: f.llama3_scaling(LIST),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_as_theta(name):
    with pytest.raises(TypeError, match=r"theta: expected a tensor.*, got (list|float)"):
        LISTS[name]()


NEGATIVE = {
    "packed_positions": ("num_tokens", lambda: packed_positions(torch.tensor([0, 3]), -1)),
    "axial_omega": ("num_channels", lambda: axial_omega(THETA, -4, 2)),
    "sequence_omega": ("num_pairs", lambda: f.sequence_omega(THETA, -4)),
    "mixed_omega": ("num_channels", lambda: f.mixed_omega(-4, 2)),
    "head_bands_theta": ("num_heads", lambda: f.head_bands_theta(8, -2)),
    "golden_directions": ("num_channels", lambda: f.golden_directions(-4, 2)),
    "simplex_directions": ("num_channels", lambda: f.simplex_directions(-4, 2)),
    "plane_directions": ("num_channels", lambda: f.plane_directions(-4, torch.ones(1))),
    "split_channels": ("num_channels", lambda: f.split_channels(-4, (1, 1))),
    "window_order": ("shape", lambda: window_order((-2, -3), 2)),
    "compose": ("num_axes", lambda: compose(num_axes=-1)),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_numbers_below_zero(name):
    argument, function = NEGATIVE[name]
    with pytest.raises(
        ValueError, match=rf"{argument}: expected a (positive|non-negative) integer( for each axis)?, got \(?-\d"
    ):
        function()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_no_channels(impl):
    with pytest.raises(ValueError, match=r"x: expected a positive head_dim, got 0"):
        cosine(X[..., :0], omega=OMEGA[:, :0], positions=GRID, impl=impl)


def test_meta():
    x, omega = X.to("meta"), OMEGA.to("meta")
    assert cosine(x, omega=omega, positions=GRID).shape == (1, 2, 6, 16)
    with pytest.raises(ValueError, match=r"impl: 'triton' needs tensors on a GPU .*, got meta"):
        cosine(x, omega=omega, positions=GRID, impl="triton")


# --- grids that 31 bits can't count ------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(2**16, 2**16), (2, 2, 2, 2**15, 2**15)], ids=str)
@pytest.mark.parametrize("start", [0, 3, 2**31 - 2, 2**31 + 5])
def test_a_shard_of_a_huge_grid(impl, shape, start):
    num_axes = len(shape)
    grid = Grid(shape, prefix=4, start=start, length=6)
    omega = torch.rand(1, 4, num_axes, dtype=torch.float64) * 1e-2
    w = omega.clone().requires_grad_()
    x = X.double().requires_grad_()
    phase = torch.rand(1, 4, dtype=torch.float64)
    index = torch.arange(start, start + 6) - 4
    s = torch.stack(torch.unravel_index(index.clamp_min(0), shape), -1).double()
    mask = index >= 0
    table = Coordinates(s, rotated=mask)
    expected = rotate(x, omega=w, phase=phase, positions=table, impl="reference")
    dy = torch.randn_like(expected)
    found = rotate(x, omega=w, phase=phase, positions=grid, impl=impl)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad(found, (x, w), dy), torch.autograd.grad(expected, (x, w), dy), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# --- errors of the modules ---------------------------------------------------------------------------------

MODULES = {
    "CosineMd": lambda **k: CosineMd(8, 2, **k),
    "RotateMd": lambda **k: RotateMd(8, 2, **k),
    "RotateMd by head": lambda **k: RotateMd(8, 2, num_heads=2, frequencies="mixed", learnable=True, **k),
    "PresetMd": lambda **k: PresetMd("eva02", head_dim=8, **k),
}


@pytest.mark.parametrize("name", MODULES)
def test_errors_refer_to_the_module(name):
    module, cube = MODULES[name](), Grid((1, 2, 3))
    module(X, X, positions=GRID)
    for where in (cube, cube.explicit(), cube.coordinates(), (GRID, cube)):
        with pytest.raises(ValueError, match=r"^positions: expected 2 axes for this module, got 3"):
            module(X, X, positions=where)
    wide = torch.zeros(1, 2, 6, 16)
    with pytest.raises(ValueError, match=r"^x: expected head_dim=8, got 16 in a tensor of shape \(1, 2, 6, 16\)"):
        module(wide, positions=GRID)
    with pytest.raises(ValueError, match=r"^q: expected head_dim=8, got 16"):
        module(wide, wide, positions=GRID)
    with pytest.raises(ValueError, match=r"^x: expected a tensor on the module's device cpu, got meta"):
        module(X.to("meta"), positions=GRID)
    # This error is not about the module.
    with pytest.raises(ValueError, match=r"^positions: expected 6 tokens \(x's N\)"):
        module(X, positions=Grid((2, 4)))
    with pytest.raises(TypeError, match=r"^x: expected a dense tensor"):
        module(X.to_sparse(), positions=GRID)


def test_other_heads_than_the_modules():
    module = RotateMd(8, 2, num_heads=2, frequencies="mixed")
    with pytest.raises(
        ValueError, match=r"^k: expected a number of heads divisible by num_heads=2 .*, got 3 .*num_heads=3$"
    ):
        module(X, torch.zeros(1, 3, 6, 8), positions=GRID)
    text = Rotate1d(8, num_heads=2, theta=torch.rand(2, 4))
    with pytest.raises(ValueError, match=r"^x: expected a number of heads divisible by num_heads=2 .*, got 3"):
        text(torch.zeros(1, 3, 6, 8))
    with pytest.raises(ValueError, match=r"^positions: expected 1 axis for this module, got 2; use RotateMd"):
        text(X, positions=GRID)
    with pytest.raises(ValueError, match=r"2 axes for this module, got 1; build the module with num_axes=1$"):
        module(X, positions=Grid((6,)))


@pytest.mark.parametrize("kind", [CosineMd, RotateMd])
def test_sizes_of_a_module(kind):
    for name, arguments in {"head_dim": (0,), "num_axes": (8, 0)}.items():
        with pytest.raises(ValueError, match=f"^{name}: expected a positive integer, got 0"):
            kind(*arguments)


@pytest.mark.parametrize("kind", [CosineMd, RotateMd, Rotate1d, PresetMd])
def test_help_text(kind):
    """The help is the class's documentation, without notes for developers or torch's text."""
    made, called = inspect.getdoc(kind.__init__), inspect.getdoc(kind.forward)
    assert "Called last" not in made
    assert "Initialize internal Module state" not in made
    assert "(B, H, N, D)" in called
    assert "Define the computation" not in called


def test_repr_of_a_preset():
    assert repr(preset("wan")) == "Preset('wan', head_dim=128, num_axes=3, omega=(1, 64, 3))"
    assert repr(preset("rope_vit_mixed", 64, 3)).startswith("Preset('rope_vit_mixed', head_dim=64, num_heads=3, ")


def test_module_from_a_preset_name():
    for by_name, made in (
        (PresetMd("wan"), PresetMd(preset("wan"))),
        (PresetMd("rope_vit_mixed", head_dim=32, num_heads=3), PresetMd(preset("rope_vit_mixed", 32, 3))),
    ):
        assert torch.equal(by_name.get_omega(), made.get_omega())
        assert by_name.head_dim == made.head_dim
    with pytest.raises(
        ValueError, match=r"head_dim, num_heads: expected None with a Preset, which already defines both, got 64, None"
    ):
        PresetMd(preset("wan"), head_dim=64)
    with pytest.raises(ValueError, match=r"name: expected one of .*, got 'wann'"):
        PresetMd("wann")
    with pytest.raises(TypeError, match=r"preset: expected a name, a Scheme or the result of .*, got int"):
        PresetMd(3)


# --- sizes of other types ----------------------------------------------------------------------------------


def test_numpy_integers():
    grid = Grid((np.int64(3), 4), prefix=np.int32(1), start=np.uint8(2), length=torch.tensor(5))
    assert grid == Grid((3, 4), prefix=1, start=2, length=5)
    assert all(type(n) is int for n in (*grid.shape, grid.prefix, grid.start, grid.length))
    assert type(Coordinates(torch.zeros(1, 2), prefix=np.int64(1)).prefix) is int
    for size in (3.0, "3", None, np.float32(3), torch.tensor(3.0), torch.tensor([3, 3])):
        with pytest.raises(ValueError, match="shape: expected a non-negative integer"):
            Grid((size, 4))
        if size is not None:
            with pytest.raises(ValueError, match="prefix: expected a non-negative integer"):
                Grid((3, 4), prefix=size)


class _Image(torch.nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.rope = rope

    def forward(self, x):
        _, _, height, width = x.shape
        return self.rope(x.flatten(2).mT[:, None], positions=Grid((height, width)))


IMAGE = torch.randn(2, 8, 3, 5)
ROPES = {
    "rotate": lambda: RotateMd(8, 2),
    "cosine": lambda: CosineMd(8, 2, learnable=True, act="silu"),
    "phase": lambda: RotateMd(8, 2, phase=True, amplitude=1.5),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("name", ROPES)
def test_traced_at_a_fixed_size(name):
    """Sizes are tensors in a trace, which must not contain values of the first image."""
    model, other = _Image(ROPES[name]()), torch.randn_like(IMAGE)
    traced = torch.jit.trace(model, IMAGE)
    torch.testing.assert_close(traced(other), model(other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROPES)
def test_exported_for_any_size(name):
    """ONNX's exporter doesn't support the remainder by a symbolic size."""
    model = _Image(ROPES[name]())
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (IMAGE,), dynamic_shapes=({2: dynamic, 3: dynamic},)).run_decompositions()
    other = torch.randn(2, 8, 7, 4)
    torch.testing.assert_close(program.module()(other), model(other))
    assert not [node for node in program.graph.nodes if "remainder" in str(node.target)]


# --- frequencies of one head, the inverse, and frequencies for k --------------------------------------------


def test_theta_with_an_axis_of_one_head():
    theta = geometric_theta(4, dtype=torch.float32)
    assert torch.equal(lrpe_rotate_1d(X, theta[None]), lrpe_rotate_1d(X, theta))
    for learnable in (False, True):
        rope = Rotate1d(8, theta=theta[None], num_heads=2, learnable=learnable)
        torch.testing.assert_close(rope(X), lrpe_rotate_1d(X, theta), rtol=0, atol=1e-6 if learnable else 0)
        rope.set_frequencies(2 * theta[None])
        torch.testing.assert_close(rope(X), lrpe_rotate_1d(X, 2 * theta), rtol=0, atol=1e-6 if learnable else 0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_inverse(impl):
    x, k = X.double().requires_grad_(), torch.randn(1, 4, 6, 8, dtype=torch.float64)
    omega, phase = torch.rand(2, 4, 2, dtype=torch.float64, requires_grad=True), torch.rand(2, 4, dtype=torch.float64)
    options = {"omega": omega, "positions": GRID, "impl": impl}
    for phi in (None, phase, (None, phase)):
        turned = rotate(x, k, phase=phi, **options)
        for back, t in zip(rotate(*turned, phase=phi, inverse=True, **options), (x, k), strict=True):
            torch.testing.assert_close(back, t)
    found = rotate(x, phase=phase, amplitude=1.5, act="silu", inverse=True, **options)
    expected = rotate(x, phase=-phase, amplitude=1.5, act="silu", **{**options, "omega": -omega})
    torch.testing.assert_close(found, expected)
    dy = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(y, (x, omega), dy) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_separate_frequencies_for_k_are_refused():
    with pytest.raises(
        TypeError, match=r"omega: expected one tensor for both q and k, got 2; .* encode q and k in separate calls"
    ):
        cosine(X, X, omega=(OMEGA, OMEGA), positions=GRID)
    with pytest.raises(TypeError, match="omega: expected one tensor for both q and k, got 2"):
        rotate(X, X, omega=[OMEGA[:, :4], OMEGA[:, :4]], positions=(GRID, GRID), inverse=True)


@pytest.mark.parametrize(
    "encode",
    [
        RotateMd(8, 2),
        lambda *xs, positions: rotate(*xs, omega=OMEGA[:, :4], positions=positions),
        lambda *xs, positions: cosine(*xs, omega=OMEGA, positions=positions),
        Rotate1d(8, scale_base=512),
    ],
    ids=["module", "rotate", "cosine", "xpos"],
)
def test_packed_tokens_after_heads(encode):
    grid = Grid((6,)) if isinstance(encode, Rotate1d) else GRID
    q, k, packed = torch.zeros(4, 12, 8), torch.zeros(2, 12, 8), pack([grid, grid])
    with pytest.raises(ValueError, match=r"^q: .* \(N, H, D\) with N = 12, got \(4, 12, 8\); .*q\.transpose\(0, 1\)$"):
        encode(q, k, positions=packed)
    with pytest.raises(ValueError, match=r"^k: .* \(N, H, D\) with N = 12, got \(2, 12, 8\); .*k\.transpose\(0, 1\)$"):
        encode(q.transpose(0, 1), k, positions=packed)
    encode(q.transpose(0, 1), k.transpose(0, 1), positions=packed)
