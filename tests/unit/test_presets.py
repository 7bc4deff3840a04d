"""Compare each preset with the original code on random q and k, or with its formula if no package has the code.

Bounds: 1e-6 for originals with float64 angles. For originals with float32 angles, 1e-5 plus the effect of their angle
errors. These come from rounding the exponent, the power, the reciprocal and the product: (3 + ln base) · 2^-24 of each
s_j ω_j.
"""

import copy
import dataclasses
import math
import pickle
from functools import partial

import pytest
import torch
from float64 import Float64
from hypothesis import given, settings
from hypothesis import strategies as st
from original_presets import (
    BATCH,
    CASES,
    HEADS,
    LAYOUTS,
    encode,
    for_heads,
    golden_tables,
    inputs,
    is_golden,
    ltx2,
    on,
    original,
    sized,
    table,
    text2,
)

from lrpe_md import (
    AugmentPositions,
    Axial,
    Coordinates,
    Grid,
    PresetMd,
    Scheme,
    Tokens,
    compose,
    list_presets,
    pack,
    pad,
    preset,
    rotate,
)
from lrpe_md.frequencies import llama3_scaling, longrope_scaling, ntk_scaling, yarn_scaling
from lrpe_md.presets.registry import SCHEMES
from lrpe_md.reference import join_pairs
from lrpe_md.testing import budget_violation, rounded_angles


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{i}-{c.name}" for i, c in enumerate(CASES)])
def test_preset_equals_the_original(number, impl):
    case = CASES[number]
    p = case.preset
    positions = p.positions(*case.segments, **case.options)
    weights = p.omega if case.omega is None else case.omega(p).permute(1, 2, 0)
    q, k = inputs(positions.num_tokens, p.head_dim, max(HEADS, p.num_heads))
    with torch.no_grad():
        expected = case.code(q, k, p, case.segments, case.options)
        phase = None if case.phase is None else case.phase(p)
        found = encode(p, q, k, positions, omega=weights, phase=phase, impl=impl)
        bound = torch.tensor(1e-6)
        if not case.double:
            bound = 1e-5 + rounding(p, positions, weights) * max(q.abs().max(), k.abs().max())
            assert bound.max() < 2e-3 * weights.abs().max().clamp(min=1)
    for a, b, x in zip(found, expected, (q, k), strict=True):
        assert a.shape == b.shape
        assert ((a - b).abs() <= bound).all(), f"{(a - b).abs().max():.2e}"
        assert (b[..., : p.head_dim] - x).abs().max() > 0.1


def rounding(p, positions, weights):
    """Return the effect of float32 angles on each channel of x = 1: (H or 1, N, D), or 2D."""
    base = p.scheme.frequencies.base or 1.0
    cost = (table(positions).abs()[:, None, None, :] * weights.abs()).sum(-1) * (3 + math.log(base)) * 2.0**-24
    cost = cost.permute(1, 0, 2) * (2**0.5 if p.scheme.map == "rotate" else 1)  # (H or 1, N, C)
    if p.scheme.map == "cosine":
        return cost.repeat(1, 1, 2)
    pairs, sections = ("blocks", p.pairs) if isinstance(p.pairs, tuple) else (p.pairs, ())
    both = join_pairs(cost, cost, pairs, sections)
    width = slice(0, p.head_dim) if p.rotary_dim is None else p.rotary_dim
    return torch.nn.functional.pad(both, (width.start, p.head_dim - width.stop))


def test_every_preset_has_a_case():
    assert {c.name for c in CASES} == set(list_presets()) == set(SCHEMES), "add a case to tests/original_presets.py"


def test_every_preset_has_its_published_number_of_pairs():
    missing = set(SCHEMES) - {*PAIRS, *OF_ALL_HEADS}
    assert not missing, f"add the published number of pairs per axis of {sorted(missing)} to PAIRS in {__file__}"


# --- in float64, at three sizes ----------------------------------------------------------------------------

FIRST = {c.name: c for c in reversed(CASES)}


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", FIRST)
def test_in_float64(name, number):
    """Compare values and attention outputs with the original, run with float64 in place of float32."""
    case = FIRST[name]
    if is_golden(case):
        case = [c for c in CASES if c.name == name][number]
    p, segments = case.preset, case.segments if is_golden(case) else sized(case, number)
    positions = p.positions(*segments, **case.options)
    q, k = (x.double() for x in inputs(positions.num_tokens, p.head_dim, max(HEADS, p.num_heads)))
    with torch.no_grad(), Float64():
        expected = case.code(q, k, p, segments, case.options)
        weights = p.omega if case.omega is None else case.omega(p).permute(1, 2, 0)
        phase = None if case.phase is None else case.phase(p)
    found = encode(p, q, k, positions, omega=weights, phase=phase)
    for a, b in zip(found, expected, strict=True):
        assert b.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    scores, others = ((x @ y.mT)[..., -1, 0] for x, y in (found, expected))
    torch.testing.assert_close(scores, others, rtol=0, atol=1e-6)


GOLDEN = [c for c in CASES if is_golden(c)]


@pytest.mark.parametrize(
    "number", range(len(GOLDEN)), ids=[f"{c.code.keywords['name']}-{i}" for i, c in enumerate(GOLDEN)]
)
def test_positions_of_other_repositories(number):
    case = GOLDEN[number]
    expected = golden_tables()[f"{case.code.keywords['name']}/{LAYOUTS.index(case.segments)}/positions"]
    found = table(case.preset.positions(*case.segments, **case.options))
    torch.testing.assert_close(found, expected.double()[:, : found.shape[1]], rtol=0, atol=1e-9)


MODELS = {  # timm models, with the arguments of their rotary embedding
    "eva02_tiny_patch14_224": "eva02",
    "vit_small_patch16_rope_224": "rope_vit_axial",
    "vit_small_patch16_dinov3": "dinov3",
    "vit_pe_core_tiny_patch16_384": "perception_encoder",
}


@pytest.mark.parametrize("model", MODELS)
def test_presets_of_whole_models(model):
    timm = original("timm")
    vit = timm.create_model(model, depth=1, dynamic_img_size=True)
    p = preset(MODELS[model])
    q, k = inputs(vit.num_prefix_tokens + 45, p.head_dim)
    embed, half = vit.rope.get_embed((5, 9)), vit.blocks[0].attn.rotate_half
    expected = on(
        slice(vit.num_prefix_tokens, None), lambda x: timm.layers.apply_rot_embed_cat(x, embed, half=half), q, k
    )
    found = encode(p, q, k, p.positions(vit.num_prefix_tokens, (5, 9)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_attention_between_video_and_audio():
    """LTX-2's queries are video and its keys are audio. Both have positions in seconds."""
    p = preset("ltx2_cross", num_heads=HEADS)
    video, audio = p.positions((3, 2, 4)), p.positions((11,))
    (q, _), (_, k) = (tuple(inputs(positions.num_tokens, p.head_dim)) for positions in (video, audio))
    q, k = q.double(), k.double()
    with Float64():
        (expected_q, _), (_, expected_k) = ltx2(q, q, p, [(3, 2, 4)], {}, axes=1), ltx2(k, k, p, [(11,)], {})
    found = rotate(q, k, omega=p.omega, positions=(video, audio), **p.options)
    torch.testing.assert_close(found[0] @ found[1].mT, expected_q @ expected_k.mT, rtol=0, atol=1e-6)
    seconds = [(positions.coords[[0, -1], 0] + 1) * 10 for positions in (video, audio)]
    assert seconds[0].tolist() == pytest.approx([0.5 / 24, (8 * 2 - 3) / 24])  # the centre of one frame, and of eight
    assert seconds[1].tolist() == pytest.approx([0.005, (4 * 10 - 1) / 100])


# --- properties of every preset ----------------------------------------------------------------------------


SEGMENTS = {name: c.segments for name, c in FIRST.items()}


@pytest.mark.parametrize("name", FIRST)
@given(steps=st.lists(st.floats(-100, 100), min_size=4, max_size=4))
@settings(max_examples=6)
def test_scores_only_depend_on_relative_positions(name, steps):
    """Moving all rotated tokens by the same step does not change the scores."""
    p = for_heads(name)
    positions = p.positions(*SEGMENTS[name])
    rows = positions.explicit().explicit()
    step = torch.tensor(steps[: p.num_axes], dtype=torch.float64) / p.omega.abs().max().clamp(min=10) * 10
    q, k = (x.double() for x in inputs(rows.num_tokens, p.head_dim, p.num_heads))
    scores, moved = (torch.matmul(a, b.mT) for a, b in (encode(p, q, k, at) for at in (rows, rows.offset(step))))
    here = torch.ones(rows.num_tokens, dtype=torch.bool) if rows.rotated is None else rows.rotated
    same = here[:, None] == here[None, :]
    torch.testing.assert_close(scores[..., same], moved[..., same], rtol=1e-9, atol=1e-9)
    unmoved = torch.matmul(*(t if i == 0 else t.mT for i, t in enumerate(encode(p, q, k, rows.rescale(0.0)))))
    assert (scores - unmoved).abs().max() > 1e-2


@pytest.mark.parametrize("name", FIRST)
@given(data=st.data())
@settings(max_examples=6)
def test_a_shard_is_a_slice(name, data):
    p = for_heads(name)
    whole = p.positions(*SEGMENTS[name])
    start = data.draw(st.integers(0, whole.num_tokens))
    for length in (None, data.draw(st.integers(0, whole.num_tokens - start))):
        part = p.positions(*SEGMENTS[name], start=start, length=length)
        expected = whole.explicit().shard(start, length).explicit()
        torch.testing.assert_close(table(part), expected.coords, rtol=1e-12, atol=1e-12)
        mask = part.explicit().explicit().rotated
        full = torch.ones(expected.num_tokens, dtype=torch.bool)
        assert torch.equal(full if mask is None else mask, full if expected.rotated is None else expected.rotated)


PAIRS = {  # published pairs (or channels) per axis, because outputs barely depend on the slowest frequencies
    "eva02": (16, 16), "rope_vit_axial": (16, 16), "rope_vit_mixed": (32, 32), "dinov3": (16, 16),
    "perception_encoder": (16, 16), "pixtral": (16, 16), "qwen2_vl_vision": (20, 20), "qwen2_vl": (16, 24, 24),
    "qwen3_vl": (24, 20, 20), "flux1": (8, 28, 28), "flux2": (16, 16, 16, 16), "lumina2": (16, 16, 16),
    "qwen_image": (8, 28, 28), "cogvideox": (8, 12, 12), "hunyuan_video": (8, 28, 28), "wan": (22, 21, 21),
    "mochi": (64, 64, 64), "cosmos": (22, 21, 21), "transnormer": (128,), "cosformer": (64,), "pope": (64,),
    "gemma4_vision": (16, 16), "llama4_vision": (22, 22), "minimax_m3_vl": (13, 13, 13), "qwen2_5_omni": (16, 24, 24),
    "qwen3_5": (11, 11, 10), "ernie4_5_vl": (20, 22, 22), "glm4v": (16, 24, 24), "z_image": (8, 28, 28),
    "hidream": (32, 16, 16), "cogview4": (32, 32), "glm_image": (32, 32), "hunyuan_image": (32, 32),
    "hunyuan_video15": (8, 28, 28), "allegro": (16, 16, 16), "kandinsky5": (8, 12, 12), "sana_video": (20, 18, 18),
    "chronoedit": (22, 21, 21), "minimax_h3": (16, 16, 16), "rope_1d": (64,), "v2pe": (64,),
    "mrope_interleave": (24, 20, 20), "videorope": (16, 24, 24), "hope": (0, 24, 24), "circle_rope": (16, 24, 24),
    "ilrope": (24, 20, 20), "omnirope": (16, 24, 24), "mm_rope": (16, 24, 24),
}  # fmt: skip
OF_ALL_HEADS = {  # with 32, 32, 32, 32 and 8 heads
    "ltx": (341, 341, 341), "ltx2": (682, 682, 682), "ltx2_audio": (1024,), "ltx2_cross": (1024,),
    "mhrope": (128, 192, 192),
}  # fmt: skip
ROTATED = {"minimax_m3_vl": 78, "qwen3_5": 64, "minimax_h3": 96}  # number of rotated channels, if not all


@pytest.mark.parametrize("name", FIRST)
def test_preset_fields(name):
    p = for_heads(name)
    scheme = p.scheme
    assert p.name == name
    assert p.omega.dtype == torch.float64
    rotated = ROTATED.get(name, p.head_dim)
    assert p.rotary_dim == (None if name not in ROTATED else slice(0, rotated))
    channels = rotated if scheme.map == "cosine" else rotated // 2
    assert p.omega.shape[1:] == (channels, scheme.frequencies.num_axes)
    by_head = {"rope_vit_mixed", "mochi", "transnormer", *OF_ALL_HEADS}
    assert p.omega.shape[0] == (p.num_heads if name in by_head else 1)
    assert p.phase == ((HEADS, channels) if scheme.phase else None)
    part = {"rotary_dim"} if name in ROTATED else set()
    assert set(p.options) == {"act", "amplitude", "pairs" if scheme.map == "rotate" else "order"} | part
    assert p.amplitude == 1
    assert len(scheme.doc.strip().splitlines()) >= 3, "write a first line, an empty line and the details into the doc"
    sources = ("arXiv", "diffusers", "transformers")
    assert any(source in scheme.doc for source in sources), f"name the source in the doc, such as {sources}"
    if name in OF_ALL_HEADS:
        assert tuple((preset(name).omega != 0).sum((0, 1)).tolist()) == OF_ALL_HEADS[name]
        assert ((p.omega != 0).sum(-1) == 1).float().mean() > 0.95
    else:
        assert tuple((p.omega[0] != 0).sum(0).tolist()) == PAIRS[name]
        still = 16 if name == "hope" else 0
        axes = p.num_axes if name in ("rope_vit_mixed", "mochi") else 1
        assert ((p.omega != 0).sum(-1) == axes).sum() == p.omega.shape[0] * (channels - still)
    assert scheme.learned == (name in ("rope_vit_mixed", "mochi", "transnormer"))


def test_no_scheme_is_named_elsewhere():
    """Scheme names don't appear in any code outside presets/registry.py and the adapters."""
    import ast
    from pathlib import Path

    import lrpe_md

    package = Path(lrpe_md.__file__).parent
    for path in sorted({*package.rglob("*.py")} - {*(package / "integrations").rglob("*.py")}):
        strings = [
            node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]  # fmt: skip
        found = [text for text in strings if text in SCHEMES]
        assert sorted(found) == (sorted(SCHEMES) if path.name == "registry.py" else []), path


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIRST)
def test_presets_on_a_gpu(name):
    """The kernels are as close to float64 as the reference, for every preset in float32."""
    p = for_heads(name)
    positions = p.positions(*SEGMENTS[name])
    cuda = positions if isinstance(positions, Grid) else positions.to("cuda")
    q, k = inputs(positions.num_tokens, p.head_dim, p.num_heads)
    exact = encode(p, q.double(), k.double(), positions)
    found = encode(p, q.cuda(), k.cuda(), cuda, omega=p.omega.cuda(), impl="triton")
    with rounded_angles():
        same = encode(p, q, k, positions)
    for a, b, c in zip(found, exact, same, strict=True):
        assert budget_violation(name, a.cpu(), c, b) is None


# --- grids stay grids, and become tables where they must -----------------------------------------------------

GRIDS = {
    "eva02": (5, (4, 6)), "dinov3": (5, (4, 6)), "flux1": (7, (4, 6)), "qwen2_vl": ((2, 4, 6),),
    "hunyuan_video": ((2, 4, 6), 7), "cogvideox": (7, (2, 4, 6)), "wan": ((2, 4, 6),), "mochi": ((2, 4, 6), 7),
    "cosmos": ((2, 4, 6),), "pope": ((9,),), "cosformer": ((9,),), "qwen_image": ((4, 6),), "lumina2": ((4, 6),),
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_needs_no_table(name):
    positions = for_heads(name).positions(*GRIDS[name])
    assert isinstance(positions, Grid)
    numbers = [s if isinstance(s, int) else math.prod(s) for s in GRIDS[name]]
    assert positions.num_tokens == sum(numbers)
    before = 0 if not isinstance(GRIDS[name][0], int) else numbers[0]
    assert (positions.prefix, positions.suffix) == (before, sum(numbers) - before - positions.num_grid_tokens)


def test_segments_are_positions():
    p = preset("flux1")
    grid = Grid((1, 2, 3), start=1, length=3)
    assert torch.equal(table(p.positions(grid)), grid.coordinates())
    assert p.positions(2, Grid((1, 2, 3), prefix=1, suffix=2), 3) == Grid((1, 2, 3), prefix=3, suffix=5)
    found = p.positions(2, (2, 3), Tokens(1, "diagonal", start=5), Grid((1, 1, 2)), [1, 2])
    expected = compose(
        Tokens(2, "zero"), Grid((1, 2, 3)), Tokens(1, "diagonal", start=5), Grid((1, 1, 2)),
        Grid((1, 1, 2)).offset((1, 0, 0)),
    )  # fmt: skip
    assert torch.equal(table(found), table(expected))


def test_a_batch_of_captions_and_sizes():
    """Lumina 2 encodes captions of two lengths and images of three sizes, both padded and packed."""
    p = preset("lumina2", 24)
    layouts = [p.positions(n, shape) for n, shape in ((7, (3, 5)), (4, (6, 2)), (4, (2, 7)))]
    xs = [list(inputs(layout.num_tokens, 24)) for layout in layouts]
    expected = [encode(p, *x, layout) for x, layout in zip(xs, layouts, strict=True)]
    packed = encode(p, *(torch.cat(t, dim=2) for t in zip(*xs, strict=True)), pack(layouts).positions)
    for found, parts in zip(packed, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts, dim=2))
    longest = max(layout.num_tokens for layout in layouts)
    padded = [
        torch.cat([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in t])
        for t in zip(*xs, strict=True)
    ]
    rows = pad(layouts)
    rows = Coordinates(rows.coords.repeat_interleave(BATCH, 0), rotated=rows.rotated.repeat_interleave(BATCH, 0))
    found = encode(p, *padded, rows)[0]
    for i, (q, _) in enumerate(expected):
        torch.testing.assert_close(found[i * BATCH : (i + 1) * BATCH, :, : q.shape[2]], q)


def test_resolution_is_a_position_rule():
    p = preset("rope_vit_axial")
    small, large = p.positions(1, (14, 10)), p.positions(1, (28, 20), reference=(14, 10))
    assert torch.equal(table(small)[1:].reshape(14, 10, 2), table(large)[1:].reshape(28, 20, 2)[::2, ::2])


@pytest.mark.parametrize(("name", "text"), [("flux1", (7,)), ("flux2", (7,)), ("wan", ()), ("qwen_image", (7,))])
def test_reference_of_an_image_in_a_scheme_with_more_axes(name, text):
    """A reference (H, W) belongs to the axes of a shape (H, W), wherever the scheme places them."""
    p = preset(name)
    plain = table(p.positions(*text, (6, 10)))[-60:]
    plain[:, 1:3] /= 2
    torch.testing.assert_close(table(p.positions(*text, (6, 10), reference=(3, 5)))[-60:], plain)
    with pytest.raises(ValueError, match=r"reference: expected a positive size, or None, for each of the \d axes"):
        p.positions(*text, (6, 10), reference=(3,))


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_empty_grids_have_no_tokens(name):
    p = preset(name, num_heads=8)
    for shape in [(0,), (0, 2), (2, 0), (0, 2, 2), (2, 0, 2), (2, 2, 0)]:
        try:
            positions = p.positions(shape)
        except ValueError:  # a shape with the wrong number of axes
            continue
        assert positions.num_tokens == 0


def test_rules_of_empty_grids():
    """Empty shapes follow the scheme's rule, except for rules that would divide by zero."""

    def unit(shape):
        return Grid(shape).rescale([1 / n for n in shape])

    p = preset(Scheme("", 16, Axial((1, 1)), grid=unit, tokens=Tokens(0, "axis"), after=(0,)))
    empty = p.positions(2, (0, 3), 1)
    torch.testing.assert_close(empty.coords, p.positions(3).coords)
    assert p.positions((2, 0)).num_tokens == 0
    marked = preset(Scheme("", 16, Axial((1, 1)), grid=lambda shape: Grid(shape, prefix=2)))
    assert marked.positions((0, 3)).num_tokens == 2
    assert isinstance(preset("qwen2_vl_vision").positions((0, 4)), Coordinates)
    with pytest.raises(ValueError, match=r"shape: eva02 expects a shape with 2 axes, got \(0, 3, 4\)"):
        preset("eva02").positions((0, 3, 4))


@pytest.mark.parametrize("name", ["dinov3", "cosformer", "cogvideox", "mochi"])
def test_positions_that_scale_with_the_size_are_not_rescaled_again(name):
    p = preset(name, num_heads=SCHEMES[name].num_heads)
    shape = (8,) if p.num_axes == 1 else (12, 16)
    reference = (*(None,) * (p.num_axes - len(shape)), *(n // 2 for n in shape))
    assert torch.equal(table(p.positions(shape, reference=reference)), table(p.positions(shape)))
    if p.num_axes == 3:
        video = p.positions((4, *shape), reference=(2, 6, 8))
        expected = table(p.positions((4, *shape))) * torch.tensor([0.5, 1, 1], dtype=torch.float64)
        torch.testing.assert_close(table(video), expected)


def test_a_reference_rescales_a_grid_of_limited_size():
    def limited(shape):
        if max(shape) > 8:
            raise ValueError("shape: too large")
        return Grid(shape).rescale(2.0)

    p = preset(dataclasses.replace(SCHEMES["rope_vit_axial"], grid=limited))
    assert p.positions((8, 8), reference=4) == Grid((8, 8)).rescale(2.0).interpolate(4)


# --- frequencies of presets ----------------------------------------------------------------------------------


def test_rope_mixed_begins_as_the_original():
    """Half of a head's pairs have a random direction. The others are orthogonal to it. Magnitudes are 10^(-4 i / D)."""
    p = preset("rope_vit_mixed", num_heads=40)
    angles = torch.atan2(p.omega[:, 0, 0], p.omega[:, 0, 1])  # (y, x)
    magnitudes = torch.tensor([10.0 ** (-4 * i / 64) for i in range(16)], dtype=torch.float64)
    for half in (0, 1):
        turned = (angles + half * math.pi / 2)[:, None]
        expected = torch.stack([magnitudes * turned.sin(), magnitudes * turned.cos()], dim=-1)
        torch.testing.assert_close(p.omega[:, 16 * half : 16 * half + 16], expected)
    assert angles.min() < -2
    assert angles.max() > 2
    assert torch.equal(p.omega, preset("rope_vit_mixed", num_heads=40).omega)
    assert not torch.equal(p.omega, preset("rope_vit_mixed", num_heads=40, seed=1).omega)


def test_dinov3_trains_with_its_augmentation():
    p = preset("dinov3")
    augment = AugmentPositions(**p.scheme.augment)
    positions = augment(p.positions(5, (4, 6)))
    ratio = positions.coordinates()[5:] / p.positions(5, (4, 6)).coordinates()[5:]
    assert ratio.std() < 1e-12
    assert 0.5 <= ratio[0, 0] <= 2


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (
            partial(yarn_scaling, factor=4.0, original_length=512),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        (
            partial(llama3_scaling, factor=4.0, original_length=512),
            {
                "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        (
            partial(
                longrope_scaling, short=[1.0 + i / 64 for i in range(64)], long=[2.0] * 64, factor=4.0, length=30,
                original_length=512,
            ),
            {
                "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512,
                "short_factor": [1.0 + i / 64 for i in range(64)], "long_factor": [2.0] * 64,
            },
        ),
    ],
    ids=["yarn", "llama3", "longrope"],
)  # fmt: skip
def test_text_side_scalings(scaling, parameters):
    """If Qwen2-VL is stretched, its amplitude changes accordingly."""
    p, segments = preset("qwen2_vl", scaling=scaling), (3, (1, 3, 5), 20)
    positions = p.positions(*segments)
    q, k = inputs(positions.num_tokens, 128)
    expected = text2(q, k, p, segments, {}, scaling=parameters)
    for a, b in zip(encode(p, q, k, positions), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)
    assert (p.amplitude == 1) == (parameters["rope_type"] == "llama3")
    assert not torch.allclose(p.omega, preset("qwen2_vl").omega)


def test_scaling_per_axis():
    """Each axis has a separate series and amplitude, so there is one amplitude per pair."""
    yarn = partial(yarn_scaling, factor=4.0, original_length=64)
    p, plain = preset("wan", scaling=(None, yarn, partial(ntk_scaling, factor=2.0))), preset("wan")
    assert torch.equal(p.omega[..., 0], plain.omega[..., 0])
    t = plain.omega[0, 22:43, 1]
    assert torch.equal(p.omega[0, 22:43, 1], yarn(t)[0])
    assert torch.equal(p.omega[0, 43:, 2], ntk_scaling(plain.omega[0, 43:, 2], 2.0)[0])
    assert p.amplitude.tolist() == [1.0] * 22 + [yarn(t)[1]] * 21 + [1.0] * 21
    q, k = inputs(24, 128)
    ratio = encode(p, q, k, p.positions((2, 3, 4)))[0].square().unflatten(-1, (-1, 2)).sum(-1)
    ratio = ratio / q.square().unflatten(-1, (-1, 2)).sum(-1)
    torch.testing.assert_close(ratio, p.amplitude.square().float().expand_as(ratio), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", FIRST)
def test_copies(name):
    p = for_heads(name)
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert torch.equal(other.omega, p.omega)
        assert torch.equal(table(other.positions(*SEGMENTS[name])), table(p.positions(*SEGMENTS[name])))


def test_an_image_is_one_frame():
    for name in ("cogvideox", "mochi", "cosmos", "hunyuan_video", "wan", "flux1", "qwen_image", "qwen2_vl"):
        p = for_heads(name)
        assert torch.equal(table(p.positions((4, 6))), table(p.positions((1, 4, 6))))


def test_changes():
    p = preset("flux1", 64, base=500.0, split=(2, 3, 3))
    assert (p.omega[0] != 0).sum(0).tolist() == [8, 12, 12]
    torch.testing.assert_close(p.omega[0, 1, 0].item(), 500 ** (-1 / 8))
    assert preset("mochi", num_heads=2, base=2.0).omega.norm(dim=-1).min() >= 0.49


def test_a_split_for_a_head_dim_that_the_default_split_rejects():
    p = preset("flux1", 50, split=(16, 2, 7))
    assert (p.omega[0] != 0).sum(0).tolist() == [16, 2, 7]


def test_decimal_intervals_reach_whole_positions():
    frames = preset("qwen2_5_omni").positions((40, 1, 1), interval=1.16, rate=13)
    expected = [i * 116 * 13 // 100 for i in range(40)]  # 377 for frame 25
    assert table(frames)[:, 0].tolist() == expected


BAD = {
    "unknown name": (r"name: .*got 'flux' \(did you mean 'flux1'", lambda: preset("flux")),
    "head_dim that can't be shared": (
        r"head_dim: flux1 doesn't support 60: .*multiple of 16 for shares 2 : 7 : 7, got 30",
        lambda: preset("flux1", 60),
    ),
    "odd head_dim": (r"head_dim: expected an even number, got 63", lambda: preset("wan", 63)),
    "no head_dim": (r"head_dim: expected a positive integer, got 0", lambda: preset("pope", 0)),
    "no heads": (r"num_heads: .*got 0", lambda: preset("mochi", num_heads=0)),
    "heads of mochi not said": (
        r"num_heads: .* key heads, got None\. Each head of mochi has its own frequencies, so pass num_heads=",
        lambda: preset("mochi"),
    ),
    "heads of rope_vit_mixed": (r"num_heads: .*has its own frequencies", lambda: preset("rope_vit_mixed", 48)),
    "heads of transnormer": (r"num_heads: .*has its own frequencies", lambda: preset("transnormer")),
    "heads of pope": (r"num_heads: .*has its own phase", lambda: PresetMd("pope", head_dim=48)),
    "split of a dense scheme": (
        r"split: expected None, because mochi only accepts base and seed, got \(1, 1, 1\)",
        lambda: preset("mochi", split=(1, 1, 1)),
    ),
    "scaling of a dense scheme": (
        r"scaling: .*mochi only accepts", lambda: preset("mochi", scaling=(None, None, None)),
    ),
    "base of a scheme without": (
        r"base: .*cosformer only accepts scaling, got 500", lambda: preset("cosformer", base=500.0),
    ),
    "split of one axis": (r"split: .*pope only accepts", lambda: preset("pope", split=(1,))),
    "split for other axes": (
        r"split: expected a share for each of wan's 3 axes, got \(1, 1\)", lambda: preset("wan", split=(1, 1)),
    ),
    "seed of what is not random": (
        r"seed: .*eva02 only accepts base, scaling and split", lambda: preset("eva02", seed=3),
    ),
    "crop of a sliver": (
        r"start, stop: the last of 2 positions.*= 8.*start = 14",
        lambda: preset("cogvideox").positions((2, 40)),
    ),
    "scalings of a different length": (
        r"scaling: .*3 axes, got 2", lambda: preset("wan", scaling=(None, partial(ntk_scaling, factor=2.0))),
    ),
    "bad scaling": (r"factor: .*got -1", lambda: preset("wan", scaling=partial(ntk_scaling, factor=-1.0))),
    "text where there is none": (r"segments: wan .*got 5", lambda: preset("wan").positions(5, (2, 3, 4))),
    "shape of other axes": (
        r"shape: eva02 expects a shape with 2 axes.*\(2, 3, 4\)", lambda: preset("eva02").positions((2, 3, 4)),
    ),
    "odd size to merge": (
        r"shape: .*multiples of 2, got \(3, 4\)", lambda: preset("qwen2_vl_vision").positions((3, 4)),
    ),
    "reference of a table": (
        r"reference: expected None with qwen2_vl_vision",
        lambda: preset("qwen2_vl_vision").positions((4, 4), reference=8),
    ),
}  # fmt: skip


TAKES = {name: {"base", "scaling", "split"} for name in SCHEMES}
TAKES |= {"pixtral": {"base", "scaling"}, "rope_vit_mixed": {"base", "seed"}, "mochi": {"base", "seed"}}
TAKES |= {"transnormer": {"base", "scaling"}, "pope": {"base", "scaling"}, "cosformer": {"scaling"}}
TAKES |= {name: {"base", "scaling"} for name in ("rope_1d", "v2pe", "ltx2_audio", "ltx2_cross")}
OPTIONS = {  # options of grids, with a value other than the default
    "dinov3": {"by": "longer"}, "perception_encoder": {"offset": 3}, "qwen2_vl_vision": {"merge": 1},
    "cogvideox": {"size": None}, "mochi": {"area": 9}, "cosmos": {"fps": 7}, "cosformer": {"longest": 99},
    "llama4_vision": {"offset": 3}, "minimax_m3_vl": {"merge": 1}, "qwen2_5_omni": {"interval": 0.3, "rate": 2},
    "cogview4": {"size": 7}, "allegro": {"by": (1, 2, 3)}, "kandinsky5": {"by": (1, 2, 3)}, "chronoedit": {"skip": 5},
    "ltx": {"fps": 7, "steps": (4, 16, 16), "trained": (9, 99, 99)}, "ltx2_audio": {"step": 9, "rate": 7, "trained": 3},
    "ltx2": {"fps": 7, "steps": (4, 16, 16), "trained": (9, 99, 99)}, "ltx2_cross": {"fps": 7}, "v2pe": {"stride": 3},
    "mrope_interleave": {"stride": 3}, "mhrope": {"stride": 3}, "ilrope": {"stride": 3}, "omnirope": {"stride": 3},
    "videorope": {"stride": 3}, "hope": {"stride": 3}, "mm_rope": {"scale": (2, 3, 4)},
    "circle_rope": {"radius": 7, "alpha": 0.1, "mix": 0.4, "stride": 3},
}  # fmt: skip
SHAPES = {
    **{name: (2, 3, 5) for name, scheme in SCHEMES.items() if scheme.frequencies.num_axes == 3},
    "minimax_m3_vl": (2, 4, 6),
}


@pytest.mark.parametrize("name", FIRST)
def test_options_have_an_effect_or_are_refused(name):
    """Options are never silently ignored."""
    plain = for_heads(name)
    shares = (1, *[2] * (plain.num_axes - 1))
    changes = {"base": 77.0, "split": shares, "scaling": partial(ntk_scaling, factor=3.0), "seed": 5}
    for key, value in changes.items():
        if key in TAKES[name]:
            # Sizes that all shares divide.
            size, heads = 26880 if plain.scheme.map == "rotate" else 1680, 40 if name == "mhrope" else HEADS
            changed = preset(name, size, heads, **{key: value})
            if (name, key) != ("cosformer", "scaling"):
                assert not torch.equal(changed.omega, preset(name, size, heads).omega), key
        else:
            with pytest.raises(ValueError, match=rf"{key}: expected None, because {name} only accepts"):
                preset(name, num_heads=plain.num_heads, **{key: value})
    # Grid options.
    shape = SHAPES.get(name) or next(s for s in SEGMENTS[name] if isinstance(s, tuple))
    own = OPTIONS.get(name, {})
    for option, value in own.items():
        assert not torch.equal(table(plain.positions(shape, **{option: value})), table(plain.positions(shape)))
    for option in {o for options in OPTIONS.values() for o in options} | {"prefix", "reach"}:
        if option not in own:
            with pytest.raises(
                TypeError, match=rf"{option}: expected (\w+((, \w+)* or \w+)?|no options) for {name}'s grids, got"
            ):
                plain.positions(shape, **{option: 2})


@pytest.mark.parametrize("name", SCHEMES)
def test_each_head_dim_is_laid_out_or_refused(name):
    """An unsupported head_dim raises an error that names it. With any other, every rotated channel has a frequency."""
    refused, sizes = [], [*range(42), 128, 512]
    for head_dim in sizes:
        try:
            p = preset(name, head_dim, SCHEMES[name].num_heads)
        except ValueError as error:
            refused.append(str(error))
        else:
            width = head_dim if p.rotary_dim is None else p.rotary_dim.stop - p.rotary_dim.start
            assert (p.rotary_dim is None) == (name not in ROTATED or (name == "minimax_m3_vl" and head_dim % 6 == 0))
            assert p.omega.shape[1] == (width if p.scheme.map == "cosine" else width // 2)
            assert p.omega.isfinite().all()
    assert all(message.startswith("head_dim: ") for message in refused)
    assert 1 <= len(refused) < len(sizes)


@pytest.mark.parametrize("name", ["pope", "transnormer"])
def test_sequence_parts_are_consecutive(name):
    """However a sequence on one axis is divided, its parts follow each other."""
    p = for_heads(name)
    whole = torch.arange(10, dtype=torch.float64)[:, None]
    for segments in ((10,), ((10,),), (6, (4,)), ((6,), 4), ((3,), 3, (4,))):
        assert torch.equal(table(p.positions(*segments)), whole)
        assert torch.equal(table(p.positions(*segments, start=2, length=5)), whole[2:7])


def test_a_preset_made_on_the_meta_device_has_values():
    with torch.device("meta"):
        found = [for_heads(name) for name in SCHEMES]
    for p in found:
        assert torch.equal(p.omega, for_heads(p.name).omega)


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    message, call = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
