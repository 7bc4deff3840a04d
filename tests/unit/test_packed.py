"""Packed projections, packed tokens, the cosine map on some channels, xPos, and sharded sequences."""

import re

import pytest
import torch

from lrpe_md import (
    CosineMd,
    Grid,
    LinearAttention,
    PresetMd,
    Rotate1d,
    RotateMd,
    axial_omega,
    compose,
    cosine,
    geometric_theta,
    linear_attention,
    lrpe_rotate_1d,
    lrpe_rotate_md,
    pack,
    rotate,
)
from lrpe_md.modules.xpos import scale_xpos
from lrpe_md.positions import Coordinates, Packed, packed_positions, zigzag
from lrpe_md.reference import activate

GRID = Grid((2, 3), prefix=1)
THETA = geometric_theta(4, 100.0)
OMEGA = axial_omega(THETA, 4, 2)
SEQLENS = torch.tensor([0, 3, 8], dtype=torch.int32)


def projection(*shape):
    return torch.randn(*shape, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def split_by_index(qkv, key_heads=None):
    """Select q, k, v (B, H, N, D) by indices."""
    if qkv.shape[-3] == 3 and key_heads is None:
        parts = [qkv[..., i, :, :] for i in range(3)]
    else:
        heads = qkv.shape[-2] - 2 * key_heads
        parts = [qkv[..., :heads, :], qkv[..., heads:-key_heads, :], qkv[..., -key_heads:, :]]
    return [(t if t.ndim == 4 else t[None]).transpose(1, 2).contiguous() for t in parts]


def as_came(t, ndim):
    t = t.transpose(1, 2)
    return t if ndim == 4 else t[0]


QKV = {  # shape, and key heads if heads are stacked
    "(B, N, 3, H, D)": ((2, 7, 3, 4), None),
    "(N, 3, H, D)": ((7, 3, 4), None),
    "(B, N, H_q + 2 H_k, D)": ((2, 7, 8), 2),
    "(N, H_q + 2 H_k, D)": ((7, 8), 2),
    "(B, N, 3 heads, D)": ((2, 7, 3), 1),
}


@pytest.mark.parametrize("name", QKV)
def test_a_packed_projection(name):
    shape, key_heads = QKV[name]
    qkv, omega = projection(*shape).requires_grad_(), OMEGA.clone().requires_grad_()
    found = rotate(qkv=qkv, num_key_heads=key_heads, omega=omega, positions=GRID)
    *two, v = split_by_index(qkv, key_heads)
    ys = rotate(*two, omega=omega, positions=GRID)
    ndim = 4 if shape[0] == 2 else 3
    expected = [as_came(t, ndim) for t in (*ys, v)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert found[2].data_ptr() == qkv[..., -1, :].data_ptr() if key_heads == 1 else found[2]._is_view()
    assert all(y.is_contiguous() for y in found[:2])  # the layout that flash-attn's functions expect
    dys = [torch.randn_like(t) for t in expected]
    for a, b in zip(*(torch.autograd.grad(t, (qkv, omega), dys) for t in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_packed_projection_of_the_modules():
    qkv = projection(2, 7, 3, 4)
    q, k, v = split_by_index(qkv)
    omega = RotateMd(8).get_omega()
    wide = cosine(q, k, omega=CosineMd(8).get_omega(), positions=GRID)
    for module, ys in (
        (RotateMd(8), rotate(q, k, omega=omega, positions=GRID)),
        (CosineMd(8), wide),
        (RotateMd(8, phase="k"), rotate(q, k, omega=omega, positions=GRID)),
        (PresetMd("rope_vit_axial", head_dim=8), PresetMd("rope_vit_axial", head_dim=8)(q, k, positions=GRID)),
    ):
        for a, b in zip(module(qkv=qkv, positions=GRID), (*ys, v), strict=True):
            torch.testing.assert_close(a, as_came(b, 4), rtol=0, atol=0)
    rope = Rotate1d(8)
    for options in ({"offset": 3}, {"offset": torch.tensor([3, 5])}, {"positions": Grid((7,))}):
        for a, b in zip(rope(qkv=qkv, **options), (*rope(q, k, **options), v), strict=True):
            torch.testing.assert_close(a, as_came(b, 4), rtol=0, atol=0)
    found = rope(qkv=qkv[:1, :, 0], num_key_heads=1, cu_seqlens=torch.tensor([0, 3, 7]))
    heads = (qkv[:1, :, 0, :2], qkv[:1, :, 0, 2:3])
    expected = rope(*(t.transpose(1, 2) for t in heads), cu_seqlens=torch.tensor([0, 3, 7]))
    for a, b in zip(found, (*expected, qkv[:1, :, 0, 3:].transpose(1, 2)), strict=True):
        torch.testing.assert_close(a, as_came(b, 4), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda qkv: rotate(qkv, qkv=qkv, omega=OMEGA, positions=GRID), "qkv: expected either qkv or .*, got both"),
        (lambda qkv: rotate(qkv=qkv[:, :, :2], omega=OMEGA, positions=GRID), r"qkv: .*\[B,\] N, 3, H, D.*2, 4, 8\)"),
        (lambda qkv: rotate(qkv=qkv, num_key_heads=1, omega=OMEGA, positions=GRID), r"qkv: .*H_q \+ 2 H_k.*3, 4, 8\)"),
        (lambda qkv: rotate(qkv=qkv[:, :, 0], num_key_heads=2, omega=OMEGA, positions=GRID), "num_key_heads: .*got 2"),
        (lambda qkv: rotate(qkv=qkv[:, :, 0], num_key_heads=0, omega=OMEGA, positions=GRID), "num_key_heads: .*got 0"),
        (lambda qkv: rotate(qkv=qkv[:, :, 0], num_key_heads=True, omega=OMEGA, positions=GRID), "num_key_.*True"),
        (
            lambda qkv: rotate(qkv=torch.ones(2, 7, 12, 8), num_key_heads=5, omega=OMEGA, positions=GRID),
            r"num_key_heads: expected H_k >= 1 with H_q \+ 2 H_k = 12 heads and H_q a multiple of H_k, got 5",
        ),
        (lambda qkv: rotate(qkv=[qkv], omega=OMEGA, positions=GRID), "qkv: expected a tensor.*list"),
        (lambda qkv: rotate(qkv[:, :, 0], num_key_heads=1, omega=OMEGA, positions=GRID), "num_key_heads: .*out qkv"),
        (lambda qkv: RotateMd(8)(qkv, qkv=qkv, positions=GRID), "qkv: expected either qkv or separate tensors"),
        (lambda qkv: RotateMd(16)(qkv=qkv, positions=GRID), "q: expected head_dim=16, got 8"),
        (lambda qkv: Rotate1d(8)(qkv=qkv, cu_seqlens=SEQLENS), r"cu_seqlens: expected packed sequences in x of shape"),
        (lambda qkv: rotate(qkv[0, :, 0], omega=OMEGA, positions=GRID), r"x: expected shape \(B, H, N, D\).*pack"),
        (lambda qkv: Rotate1d(8)(qkv[0, :, 0]), r"x: expected shape \(B, H, N, D\), got \(7, 4, 8\)"),
        (
            lambda qkv: rotate(qkv[0, :, 0], qkv[:, :, 0], omega=OMEGA, positions=pack([GRID])),
            r"k: expected \(N, H, D\), like q, got \(2, 7, 4, 8\)",
        ),
        (
            lambda qkv: cosine(qkv[0, :, 0], omega=OMEGA, positions=pack([GRID]), act="softmax", dim=-2),
            "dim: softmax over the sequence .* packed",
        ),
    ],
)  # fmt: skip
def test_invalid_projections(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(projection(2, 7, 3, 4))


def test_packed_tokens():
    """Functions, modules and text encode (N, H, D) at the positions of packed samples."""
    packed = pack([GRID, Grid((1, 2))])
    x, k = projection(9, 4), projection(9, 2)
    for call in (
        lambda *xs, **options: rotate(*xs, omega=OMEGA, **options),
        lambda *xs, **options: rotate(*xs, omega=OMEGA, phase=(None, OMEGA[..., 0]), **options),
        lambda *xs, **options: cosine(*xs, omega=torch.cat([OMEGA, OMEGA], 1), **options),
        RotateMd(8),
        RotateMd(8, phase="k"),
        CosineMd(8),
    ):
        views = [t[None].transpose(1, 2).contiguous() for t in (x, k)]
        expected = call(*views, positions=packed.positions)
        for found in (call(x, k, positions=packed), call(*(t[None].transpose(1, 2) for t in (x, k)), positions=packed)):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a if a.ndim == 3 else as_came(a, 3), as_came(b, 3), rtol=0, atol=0)
        found = call(x, k, positions=packed)
        assert all(y.ndim == 3 and y.is_contiguous() for y in found)
    assert rotate(x, omega=OMEGA, positions=packed).shape == x.shape


@pytest.mark.parametrize(
    "call",
    [
        lambda x, positions: rotate(x, omega=OMEGA, positions=positions),
        lambda x, positions: RotateMd(8)(x, positions=positions),
        lambda x, positions: CosineMd(8)(x, positions=positions),
    ],
)
def test_packed_tokens_with_own_coordinates(call):
    x, coords = projection(8, 4), torch.rand(8, 2, dtype=torch.float64)
    found = call(x, Packed(Coordinates(coords), SEQLENS))
    torch.testing.assert_close(found, as_came(call(x[None].transpose(1, 2), coords), 3), rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"positions: expected Coordinates in Packed, got a Tensor; pass Coord"):
        call(x, Packed(coords, SEQLENS))
    for wrong in ([0, 5, 8], SEQLENS.float()):
        with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens: expected .* of shape \(num_seqs \+ 1,\), got"):
            call(x, Packed(Coordinates(coords), wrong))
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected .* got \[3, 5\]; pass 0 followed by the cumulative"):
        call(x, Packed(Coordinates(coords), SEQLENS.diff()))


@pytest.mark.parametrize(
    ("call", "ways"),
    [
        (lambda x, positions: rotate(x, omega=OMEGA, positions=positions), "{pack}"),
        (lambda x, positions: RotateMd(8)(x, x, positions=positions), "{pack}"),
        (lambda x, positions: Rotate1d(8)(x), "cu_seqlens, or {pack}"),
        (lambda x, positions: lrpe_rotate_1d(x, THETA), "cu_seqlens"),
        (
            lambda x, positions: linear_attention(x, x, x, omega=OMEGA, positions=positions),
            "q, k and v as (1, H, N, D), with cu_seqlens or {pack}",
        ),
        (
            lambda x, positions: LinearAttention(RotateMd(8, act="relu"))(x, x, x, positions=positions),
            "q, k and v as (1, H, N, D), with cu_seqlens or {pack}",
        ),
        (
            lambda x, positions: LinearAttention(Rotate1d(8, act="relu", scale_base=512))(x, x, x),
            "q, k and v as (1, H, N, D), with cu_seqlens or {pack}",
        ),
    ],
)
def test_packed_tokens_without_the_whole_pack(call, ways):
    """The error only names what the called function accepts."""
    ways = ways.format(
        pack="the whole result of lrpe_md.pack as positions (not only its first part), or your own coordinates (N, K) "
        "as lrpe_md.positions.Packed(Coordinates(coords), cu_seqlens)"
    )
    with pytest.raises(ValueError, match=re.escape(f"; for packed tokens (N, H, D), pass {ways}") + "$"):
        call(projection(9, 4), pack([GRID, Grid((1, 2))]).positions)


@pytest.mark.parametrize("act", ["none", "silu"])
def test_packed_text(act):
    x, k = projection(8, 4).requires_grad_(), projection(8, 2)
    rope = Rotate1d(8, base=100.0, act=act, dtype=torch.float64)
    views = [t[None].transpose(1, 2) for t in (x, k)]
    expected = [as_came(y, 3) for y in rope(*views, cu_seqlens=SEQLENS, offset=torch.tensor([2, 0]))]
    options = {"cu_seqlens": SEQLENS, "offset": torch.tensor([2, 0])}
    theta = THETA.double()
    positions = packed_positions(SEQLENS, 8, options["offset"])
    for found in (
        rope(x, k, **options),
        rope(x, k, positions=Packed(positions, SEQLENS)),
        lrpe_rotate_1d((x, k), theta, act=act, **options),
        lrpe_rotate_1d(views[0], theta, act=act, **options).transpose(1, 2),
        lrpe_rotate_1d(x, theta, act=act, **options),
    ):
        for a, b in zip(found if isinstance(found, tuple) else (found.reshape(x.shape),), expected, strict=False):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b)
    (dx,) = torch.autograd.grad(rope(x, k, **options)[0].square().sum(), x)
    assert dx.shape == x.shape
    assert dx.abs().min() > 0


def test_packed_tokens_compile_into_one_graph():
    packed, qkv = pack([GRID, Grid((1, 2))]), projection(9, 3, 4)
    compiled = torch.compile(
        lambda qkv, coords, cu: rotate(qkv=qkv, omega=OMEGA, positions=Packed(coords, cu)),
        backend="eager",
        fullgraph=True,
    )
    for a, b in zip(compiled(qkv, *packed), rotate(qkv=qkv, omega=OMEGA, positions=packed), strict=True):
        torch.testing.assert_close(a, b)


# --- the cosine map on some channels ---------------------------------------------------------------------------


@pytest.mark.parametrize("rotary_dim", [5, slice(2, 6), slice(-3, None), 8])
@pytest.mark.parametrize(("act", "dim"), [("none", None), ("silu", None), ("softmax", -1), ("softmax", -2)])
@pytest.mark.parametrize("order", ["cos_sin", "sin_cos"])
def test_cosine_of_some_channels(rotary_dim, act, dim, order):
    start, stop, _ = (rotary_dim if isinstance(rotary_dim, slice) else slice(rotary_dim)).indices(8)
    omega = axial_omega(geometric_theta(4, 100.0), stop - start, 2).requires_grad_()
    x = projection(2, 4, 7).requires_grad_()
    found = cosine(x, omega=omega, positions=GRID, rotary_dim=rotary_dim, act=act, dim=dim, order=order)
    assert found.shape == (2, 4, 7, 8 + stop - start)
    theta = torch.einsum("nk,hck->hnc", GRID.coordinates(), omega.double())
    x_bar = activate(x, act, dim)
    part = x_bar[..., start:stop]
    both = [part * theta.cos(), part * theta.sin()]
    expected = torch.cat([x_bar[..., :start], *(both if order == "cos_sin" else both[::-1]), x_bar[..., stop:]], dim=-1)
    torch.testing.assert_close(found, expected)
    dy = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(y, (x, omega), dy) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_scores_add_both_parts_of_the_channels():
    """Only the part with mapped channels depends on the relative position."""
    q, k = projection(1, 4, 7), projection(1, 4, 7).flip(2)
    module = CosineMd(8, rotary_dim=slice(4, 8), dtype=torch.float64)
    assert module.get_omega().shape == (1, 4, 2)
    a, b = module(q, k, positions=GRID)
    mapped = CosineMd(4, dtype=torch.float64)(q[..., 4:], k[..., 4:], positions=GRID)
    torch.testing.assert_close(a @ b.mT, q[..., :4] @ k[..., :4].mT + mapped[0] @ mapped[1].mT)
    assert "rotary_dim=slice(4, 8" in repr(module)
    assert "rotary_dim" not in repr(CosineMd(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("act", "dim"), [("softplus", None), ("softmax", -1)])
def test_part_of_the_channels_in_16_bits_is_rounded_once(dtype, act, dim):
    x = projection(2, 4, 7).to(dtype).transpose(1, 2)  # memory layout (B, N, H, D)
    omega = axial_omega(geometric_theta(3, 100.0), 5, 2)
    options = {"omega": omega, "positions": Grid((2, 2)), "rotary_dim": 5, "act": act, "dim": dim}
    found = cosine(x, **options)
    torch.testing.assert_close(found, cosine(x.float(), **options).to(dtype), rtol=0, atol=0)
    assert found.transpose(1, 2).is_contiguous() == x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_dim": 9}, "rotary_dim: expected a width from 1 to head_dim = 8, got 9"),
        ({"rotary_dim": 0}, "rotary_dim: expected a width from 1 to head_dim = 8, got 0"),
        ({"rotary_dim": slice(0, 8, 2)}, "rotary_dim: expected a slice with step 1"),
        ({"rotary_dim": 3}, r"omega: expected shape .*3, 2\), got \(1, 4, 2\)"),
        ({"rotary_dim": 4, "act": "square"}, "act: expected one of"),
        ({"rotary_dim": 4, "positions": Grid((3, 3))}, "positions: expected 7 tokens"),
    ],
)
def test_invalid_rotary_dim(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cosine(projection(2, 4, 7), **{"omega": OMEGA, "positions": GRID, **options})
    if message.startswith("rotary_dim"):
        with pytest.raises(ValueError, match=message):
            CosineMd(8, rotary_dim=options["rotary_dim"])


# --- xPos ------------------------------------------------------------------------------------------------------


def original_xpos(t, width, base, longest):
    """Compute flash-attn's scale of q (N, width / 2) at positions t. The scale of k is the inverse."""
    scale = (torch.arange(0, width, 2, dtype=torch.float64) + 0.4 * width) / (1.4 * width)
    return scale ** ((t.double() - longest // 2) / base)[..., None]


@pytest.mark.parametrize("pairs", ["half", "interleaved", (1, 2)])
@pytest.mark.parametrize("offset", [0, 5, torch.tensor([4, 0])])
def test_xpos(pairs, offset):
    rope = Rotate1d(8, pairs=pairs, rotary_dim=slice(2, 8), scale_base=32.0, scale_centre=10, dtype=torch.float64)
    q, k = projection(2, 4, 7).requires_grad_(), projection(2, 2, 7)
    found = rope(q, k, offset=offset)
    plain = Rotate1d(8, pairs=pairs, rotary_dim=slice(2, 8), dtype=torch.float64)(q, k, offset=offset)
    t = torch.arange(7) + torch.as_tensor(offset).reshape(-1, 1)  # (B or 1, N)
    factor = original_xpos(t, 6, 32.0, 20)[:, None]
    z = {"half": torch.cat([factor, factor], -1), "interleaved": factor.repeat_interleave(2, -1)}.get(str(pairs))
    if z is None:
        z = factor[..., [0, 0, 1, 2, 1, 2]]
    z = torch.cat([torch.ones_like(z[..., :2]), z], dim=-1)
    torch.testing.assert_close(found[0], plain[0] * z)
    torch.testing.assert_close(found[1], plain[1] / z)
    (dq,) = torch.autograd.grad(found[0].sum(), q)
    (expected,) = torch.autograd.grad((plain[0] * z).sum(), q)
    torch.testing.assert_close(dq, expected)


def test_xpos_scores_only_depend_on_relative_positions():
    q, k = projection(1, 1, 1).expand(1, 2, 9, 8), projection(1, 1, 1).expand(1, 2, 9, 8)
    for centre in (0, 50):
        rope = Rotate1d(8, scale_base=16.0, scale_centre=centre, dtype=torch.float64)
        scores = [torch.matmul(*(t if i == 0 else t.mT for i, t in enumerate(rope(q, k, offset=n)))) for n in (0, 40)]
        torch.testing.assert_close(*scores)
        torch.testing.assert_close(scores[0][..., 1:, 1:], scores[0][..., :-1, :-1])
    decay = scores[0][0, 0, :, 0].abs()
    assert decay[8] < decay[0]


def test_xpos_with_masks_offsets_and_packing():
    """Unrotated tokens keep their norm, q and k have separate positions, and positions restart in packed sequences."""
    q, k = projection(1, 2, 6), projection(1, 2, 6)
    where = Coordinates(torch.arange(3)[:, None], prefix=2, suffix=1)
    a, b = scale_xpos(q, k, positions=where, scale_base=4.0)
    assert torch.equal(a[:, :, [0, 1, 5]], q[:, :, [0, 1, 5]])
    factor = original_xpos(torch.arange(3), 8, 4.0, 0)
    torch.testing.assert_close(a[:, :, 2:5], q[:, :, 2:5] * torch.cat([factor, factor], -1))
    apart = scale_xpos(q, k[:, :, :3], positions=(where, Grid((3,))), scale_base=4.0)
    torch.testing.assert_close(apart[0], a)
    torch.testing.assert_close(apart[1], b[:, :, 2:5] / k[:, :, 2:5] * k[:, :, :3])
    half = scale_xpos(q.half(), k.half(), positions=where, scale_base=4.0)
    assert half[0].dtype == torch.float16
    torch.testing.assert_close(
        half[0], scale_xpos(q.half().float(), k.float(), positions=where, scale_base=4.0)[0].half()
    )
    packed = Rotate1d(8, scale_base=4.0)(projection(8, 2), projection(8, 2), cu_seqlens=SEQLENS)
    again = Rotate1d(8, scale_base=4.0)(*(projection(8, 2)[None, :3].transpose(1, 2) for _ in range(2)))
    torch.testing.assert_close(packed[1][:3], as_came(again[1], 3))


def test_xpos_follows_set_places():
    module, q, places = Rotate1d(8, scale_base=4.0), projection(1, 2, 3), torch.tensor([0.0, 5.0, 7.0])
    expected = module(q, q, positions=places[:, None])
    module.set_places(0, places)
    for found in (module(q, q), module(q, q, positions=(Grid((3,)), Grid((3,))))):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Rotate1d(8, scale_base=0.0), "scale_base: expected a finite positive number, got 0.0"),
        (lambda x: Rotate1d(8, scale_base="512"), "scale_base: expected a finite positive number, got '512'"),
        (lambda x: Rotate1d(8, scale_base=float("inf")), "scale_base: expected a finite positive number, got inf"),
        (
            lambda x: Rotate1d(8, scale_base=8.0, scale_centre=float("nan")),
            "scale_centre: expected a finite number, got nan",
        ),
        (lambda x: Rotate1d(8, scale_centre=3), "scale_centre: expected None without scale_base"),
        (lambda x: Rotate1d(8, scale_base=512)(x), "xs: expected both q and k, got 1 tensor; xPos"),
        (lambda x: Rotate1d(8, scale_base=512)(x, x, inverse=True), "inverse: expected False with scale_base"),
        (lambda x: scale_xpos(x, x, positions=GRID, scale_base=4.0), "positions: expected one axis, got 2"),
    ],
)  # fmt: skip
def test_invalid_xpos(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(projection(2, 4, 7))


# --- the inverse -----------------------------------------------------------------------------------------------


def test_the_inverse_of_the_modules():
    q, k = projection(2, 4, 7), projection(2, 2, 7)
    for module, options in (
        (RotateMd(8, 2, phase="k"), {"positions": GRID}),
        (RotateMd(8, 2, num_heads=2, frequencies="mixed", base=10.0), {"positions": GRID}),
        (Rotate1d(8), {"offset": torch.tensor([3, 50])}),
        (PresetMd("rope_vit_axial", head_dim=8), {"positions": GRID}),
    ):
        if module.phase is not None:
            torch.nn.init.normal_(module.phase)
        turned = module(q, k, **options)
        for a, b in zip(module(*turned, inverse=True, **options), (q, k), strict=True):
            torch.testing.assert_close(a, b)
    qkv = projection(2, 7, 3, 4)
    turned = RotateMd(8)(qkv=qkv, positions=GRID)
    back = RotateMd(8)(qkv=torch.stack(turned, 2), positions=GRID, inverse=True)
    torch.testing.assert_close(torch.stack(back, 2), qkv)
    for module in (CosineMd(8), PresetMd("cosformer", head_dim=8)):
        with pytest.raises(ValueError, match="inverse: expected False for the cosine map, which has no inverse"):
            module(q, positions=GRID if module.num_axes == 2 else Grid((7,)), inverse=True)


def test_the_inverse_of_the_documents_functions():
    x, theta = projection(2, 4, 7), THETA.double()
    turned = lrpe_rotate_1d(x, theta, offset=5)
    torch.testing.assert_close(lrpe_rotate_1d(turned, theta, offset=5, inverse=True), x)
    assert torch.equal(lrpe_rotate_1d(x, theta, inverse=True), lrpe_rotate_1d(x, -theta))
    turned = lrpe_rotate_md(x, theta, shape=(2, 3), l=1)
    torch.testing.assert_close(lrpe_rotate_md(turned, theta, shape=(2, 3), l=1, inverse=True), x)


# --- context parallelism ---------------------------------------------------------------------------------------


WHOLE = {
    "sequence": Grid((12,)),
    "grid": Grid((2, 4), prefix=3, suffix=1, scale=0.5),
    "origin": Grid((12,), origin=torch.tensor([[3], [70]])),
    "by sample": Coordinates(torch.rand(2, 7, 2, dtype=torch.float64), prefix=5),
    "table": compose(Grid((2, 5)), Grid((2, 2)).take(torch.tensor([3, 0]))),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_zigzag(name, ranks):
    """Each rank computes its part of the result from its two chunks."""
    positions = WHOLE[name]
    x = projection(2, 4, 12)
    omega = OMEGA if positions.num_axes == 2 else THETA[None, :, None]
    whole = rotate(x, omega=omega, positions=positions)
    chunks, ys = x.chunk(2 * ranks, dim=2), whole.chunk(2 * ranks, dim=2)
    for rank in range(ranks):
        local = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=2)
        found = rotate(local, omega=omega, positions=zigzag(positions, rank, ranks))
        torch.testing.assert_close(found, torch.cat([ys[rank], ys[2 * ranks - 1 - rank]], dim=2))


def test_zigzag_equals_torchs_order():
    """Compare with the indices of torch's context parallelism."""
    attention = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    order = attention._HeadTailLoadBalancer(16, 2, torch.device("cpu"))._generate_indices(restore=False)[0]
    found = [zigzag(Grid((16,)), rank, 2).coords[:, 0] for rank in range(2)]
    assert torch.cat(found).long().tolist() == order.tolist()


def test_zigzag_compiles_for_all_sizes():
    def f(x):
        return zigzag(Grid((x.shape[0], 4)), 1, 2).coords

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    for height in (2, 5, 8):
        x = torch.empty(height)
        assert torch.equal(compiled(x), f(x))


def test_zigzag_for_text():
    rope, q = Rotate1d(8), projection(1, 4, 16)
    chunks, ys = q.chunk(4, 2), rope(q).chunk(4, 2)
    for rank in range(2):
        local = torch.cat([chunks[rank], chunks[3 - rank]], 2)
        found = rope(local, positions=zigzag(Grid((16,)), rank, 2, device="cpu"))
        torch.testing.assert_close(found, torch.cat([ys[rank], ys[3 - rank]], 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Grid((7,)), 0, 2), "positions: expected a number of tokens that is a multiple of 2 · 2, got 7; pad"),
        ((Grid((8,)), 2, 2), "rank: expected 0 to 1, got 2"),
        ((Grid((8,)), -1, 2), "rank: expected 0 to 1, got -1"),
        ((Grid((8,)), 0, 0), "num_ranks: expected a positive integer, got 0"),
        ((Grid((8,), start=2), 0, 2), "positions: expected the whole sequence, got a shard"),
        ((torch.zeros(8, 1), 0, 2), "positions: expected a Grid or Coordinates, got a Tensor"),
    ],
)  # fmt: skip
def test_invalid_zigzag(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        zigzag(*arguments)
