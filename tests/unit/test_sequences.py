"""Sequences of text and grids, and batches of such sequences: positions, shards and single calls."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lrpe_md import After, Before, Coordinates, Grid, Tokens, compose, cosine, pack, pad, rotate, window_order
from lrpe_md.engine.encode import launch


def rows(layout):
    """Return positions as integers, with None for rows that are not rotated."""
    layout = layout.explicit()
    mask = [True] * layout.num_tokens if layout.rotated is None else layout.rotated.tolist()
    return [tuple(map(int, row)) if here else None for row, here in zip(layout.coords.tolist(), mask, strict=True)]


# --- expected positions ----------------------------------------------------------------------------------


def test_alternating_text_and_images():
    """Qwen2-VL has text on the diagonal, images that follow on all axes, and text after the longest side."""
    found = compose(
        Tokens(2, "diagonal"), After(Grid((1, 2, 3))), Tokens(1, "diagonal"), After(Grid((2, 1, 1))),
        Tokens(2, "diagonal"),
    )  # fmt: skip
    image = [(2, 2 + h, 2 + w) for h in range(2) for w in range(3)]
    video = [(6, 6, 6), (7, 6, 6)]
    assert rows(found) == [(0, 0, 0), (1, 1, 1), *image, (5, 5, 5), *video, (8, 8, 8), (9, 9, 9)]
    assert found.rotated is None


def test_text_on_an_axis():
    """Lumina 2 has text on axis 0, followed by the image. Then come unrotated tokens and tokens at zero."""
    found = compose(
        Tokens(3, "axis", axis=0), After(Grid((1, 1, 2)), axes=(0,)), Tokens(1), Tokens(1, "zero"),
        Tokens(1, "axis", axis=2), After(Grid((1, 2, 1)), axes=()),
    )  # fmt: skip
    text = [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert rows(found) == [*text, (3, 0, 0), (3, 0, 1), None, (0, 0, 0), (0, 0, 4), (0, 0, 0), (0, 1, 0)]


def test_grids_with_offsets():
    """FLUX.1 Kontext and Qwen-Image have grids with offsets and a start position of the text."""
    reference = Grid((1, 1, 2), prefix=1).offset((1, 0, 0))
    found = compose(Tokens(2, "diagonal", start=7), Grid((1, 2, 1)), reference, Tokens(1, "diagonal"))
    assert rows(found) == [(7, 7, 7), (8, 8, 8), (0, 0, 0), (0, 1, 0), None, (1, 0, 0), (1, 0, 1), (9, 9, 9)]


def test_the_running_position_follows_scaled_grids():
    found = compose(After(Grid((3, 2)).rescale((2, -5))), Tokens(1, "diagonal"), After(Grid((0, 4))), Tokens(1, "axis"))
    assert rows(found)[-2:] == [(5, 5), (6, 0)]
    found = compose(After(Grid((2,)).rescale(-3)), Tokens(1, "axis"))
    assert rows(found) == [(0,), (-3,), (1,)]


def test_coordinates_and_empty_sequences():
    table = Grid((2, 2), prefix=1).take(torch.tensor([3, 0]))
    assert rows(compose(table, Tokens(1, "diagonal"), Tokens(0))) == [None, (1, 1), (0, 0), (0, 0)]
    shard = Grid((2, 3), prefix=1, start=3, length=3)
    assert rows(compose(Tokens(1), shard, start=2)) == [(1, 0), (1, 1)]
    assert compose(num_axes=3).coords.shape == (0, 3)
    assert compose(Tokens(2, "zero"), num_axes=2).coords.tolist() == [[0, 0], [0, 0]]
    assert compose(Grid((2,)), dtype=torch.float32).coords.dtype == torch.float32


def test_table_after_other_tokens():
    """Place a reordered grid, and tokens that continue after its largest position."""
    image = Grid((1, 4, 4))
    order = window_order((1, 4, 4), (1, 2, 2))
    found = rows(compose(Tokens(3, "diagonal"), After(image.take(order)), Tokens(1, "diagonal")))
    plain = rows(compose(Tokens(3, "diagonal"), After(image), Tokens(1, "diagonal")))
    assert found == [*plain[:3], *(plain[3 + i] for i in order.tolist()), plain[-1]]
    table = Coordinates(torch.tensor([[9.0, 2], [4, -1]]), prefix=1, rotated=torch.tensor([False, True]))
    assert rows(compose(Tokens(2, "axis"), After(table, (1,)), Tokens(1, "axis"))) == [
        (0, 0), (1, 0), None, None, (4, 1), (2, 0),
    ]  # fmt: skip
    empty = After(Grid((0, 4)).explicit())
    assert rows(compose(Tokens(2, "diagonal"), empty, Tokens(1, "diagonal")))[-1] == (2, 2)
    with pytest.raises(ValueError, match=r"segments: expected coords of shape \(N, K\), got \(2, 1, 2\) at index 0"):
        compose(After(Coordinates(torch.zeros(2, 1, 2))))
    with pytest.raises(TypeError, match=r"grid: expected a Grid or Coordinates, got .*pass Grid"):
        After((2, 3))


def test_far_positions():
    far = Tokens(2, "axis", start=2**40)
    assert compose(far, num_axes=1).coords[:, 0].tolist() == [2**40, 2**40 + 1]


# --- shards ------------------------------------------------------------------------------------------------

text = st.builds(
    Tokens, st.integers(0, 5), st.sampled_from(["skip", "zero", "axis", "diagonal"]), st.integers(0, 2),
    st.none() | st.integers(0, 50),
)  # fmt: skip
shapes = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
grids = st.builds(
    lambda shape, prefix, suffix, by: Grid(shape, prefix, suffix).offset(by).interpolate((None, 6, 6)),
    shapes, st.integers(0, 2), st.integers(0, 2), st.integers(-3, 3),
)  # fmt: skip
followers = st.builds(After, grids, st.none() | st.sampled_from([(0,), (1, 2)]))
tables = grids.map(lambda grid: grid.explicit())
sequences = st.lists(text | grids | followers | tables, max_size=6)


def equal(a, b):
    a, b = a.explicit(), b.explicit()
    torch.testing.assert_close(a.coords, b.coords, rtol=1e-12, atol=1e-12)
    for mask in (a.rotated, b.rotated):
        assert mask is None or mask.dtype == torch.bool
    full = [torch.ones(t.num_tokens, dtype=torch.bool) if t.rotated is None else t.rotated for t in (a, b)]
    assert torch.equal(*full)


@given(sequences, st.data())
@settings(max_examples=150)
def test_composing_then_slicing_equals_slicing_then_composing(segments, data):
    whole = compose(*segments, num_axes=3)
    start = data.draw(st.integers(0, whole.num_tokens))
    length = data.draw(st.integers(0, whole.num_tokens - start))
    equal(compose(*segments, num_axes=3, start=start, length=length), whole.shard(start, length))
    equal(compose(*segments, num_axes=3, start=start), whole.shard(start))
    parts = [compose(*segments, num_axes=3, start=a, length=1) for a in range(whole.num_tokens)]
    if parts:
        equal(pack(parts).positions, whole)


@given(sequences, sequences)
@settings(max_examples=60)
def test_plain_segments_compose_end_to_end(first, second):
    """Composing segments without running positions concatenates them."""
    first, second = ([s for s in part if isinstance(s, (Grid, Coordinates))] for part in (first, second))
    both = compose(*first, *second, num_axes=3)
    equal(both, pack([compose(*first, num_axes=3), compose(*second, num_axes=3)]).positions)


# --- batches -----------------------------------------------------------------------------------------------


def samples():
    """Return samples with three resolutions and two text lengths. One sample has tokens that are not rotated."""
    return [
        compose(Tokens(3, "diagonal"), After(Grid((1, 2, 5)))),
        compose(Tokens(5, "diagonal"), After(Grid((2, 3, 2)).interpolate((None, 4, 4))), Tokens(2)),
        Grid((1, 4, 3), prefix=3).centre((1, 2)),
    ]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("map", [cosine, rotate])
@pytest.mark.parametrize("phase", [False, True])
def test_a_mixed_batch_equals_its_samples(map, impl, phase, monkeypatch):
    layouts = samples()
    channels = 8 if map is cosine else 4
    omega = torch.rand(2, channels, 3, dtype=torch.float64, requires_grad=True)
    kwargs = {"omega": omega, "act": "silu", "impl": impl}
    if phase:
        kwargs["phase"] = torch.rand(2, channels, dtype=torch.float64, requires_grad=True)
    lengths = [layout.num_tokens for layout in layouts]
    xs = [torch.randn(1, 4, n, 8, dtype=torch.float64, requires_grad=True) for n in lengths]
    ys = [map(x, positions=layout, **kwargs) for x, layout in zip(xs, layouts, strict=True)]
    gs = [torch.randn_like(y) for y in ys]
    wanted = [*xs, omega, *([kwargs["phase"]] if phase else [])]
    expected = torch.autograd.grad(ys, wanted, gs)

    launched = []
    run = launch.run_launch
    monkeypatch.setattr(launch, "run_launch", lambda *args: (launched.append(args), run(*args))[1])
    packed, cu_seqlens = pack(layouts)
    assert cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert cu_seqlens.dtype == torch.int32
    y = map(torch.cat(xs, dim=2), positions=packed, **kwargs)
    assert len(launched) == (impl == "triton")
    torch.testing.assert_close(y, torch.cat(ys, dim=2))
    for a, b in zip(torch.autograd.grad(y, wanted, torch.cat(gs, dim=2)), expected, strict=True):
        torch.testing.assert_close(a, b)

    launched.clear()
    padded = pad(layouts, 25)
    pads = [torch.nn.functional.pad(x, (0, 0, 0, 25 - x.shape[2])) for x in xs]
    y = map(torch.cat(pads), positions=padded, **kwargs)
    assert len(launched) == (impl == "triton")
    for i, n in enumerate(lengths):
        torch.testing.assert_close(y[i : i + 1, :, :n], ys[i])
    g = torch.cat([torch.nn.functional.pad(g, (0, 0, 0, 25 - g.shape[2])) for g in gs])
    for a, b in zip(torch.autograd.grad(y, wanted, g), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_padding_is_not_rotated():
    layouts = samples()
    padded = pad(layouts)
    longest = max(layout.num_tokens for layout in layouts)
    assert padded.coords.shape == (3, longest, 3)
    for i, layout in enumerate(layouts):
        table = layout.explicit().explicit() if isinstance(layout, Grid) else layout
        sample = Coordinates(padded.coords[i], rotated=padded.rotated[i])
        equal(sample.shard(0, layout.num_tokens), table)
        assert not padded.rotated[i, layout.num_tokens :].any()
    assert pad([Grid((2, 3)), Grid((3, 2))]).rotated is None
    assert pad([Grid((2,))], 4).rotated.tolist() == [[True, True, False, False]]


def test_tables_are_on_the_given_device():
    assert pack([Grid((2, 2))], device="meta").positions.coords.is_meta
    assert pack([Grid((2, 2)).explicit("meta"), Grid((2, 2))]).positions.coords.is_meta
    assert pack([Grid((2, 2)).explicit("meta")]).cu_seqlens.is_meta
    assert pad([Grid((2, 2))], device="meta").coords.is_meta
    assert compose(Tokens(2), Grid((2, 2)), device="meta").coords.is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("map", [cosine, rotate])
def test_a_mixed_batch_is_one_launch_on_a_gpu(map):
    layouts = samples()
    channels = 32 if map is cosine else 16
    omega, phase = torch.rand(2, channels, 3, device="cuda"), torch.rand(2, channels, device="cuda")
    xs = [torch.randn(1, 4, layout.num_tokens, 32, device="cuda") for layout in layouts]
    expected = [
        map(x, omega=omega, positions=s if isinstance(s, Grid) else s.to("cuda"), impl="triton")
        for x, s in zip(xs, layouts, strict=True)
    ]
    packed, x = pack(layouts, device="cuda").positions, torch.cat(xs, dim=2)
    map(x, omega=omega, positions=packed, impl="triton")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        y = map(x, omega=omega, positions=packed, impl="triton")
        torch.cuda.synchronize()
    events = [
        e.name for e in prof.events() or ()
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]  # fmt: skip
    assert len(events) == 1, events
    torch.testing.assert_close(y, torch.cat(expected, dim=2))
    masked = map(x, omega=omega, phase=phase, positions=packed, impl="triton")
    same = map(x.double().cpu(), omega=omega.double().cpu(), phase=phase.double().cpu(), positions=packed.to("cpu"))
    torch.testing.assert_close(masked.double().cpu(), same, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_layouts_are_made_on_a_gpu():
    for make in (
        lambda device: compose(Tokens(3), After(Grid((2, 3, 4)).centre()), Tokens(2, "diagonal"), device=device),
        lambda device: pad([Grid((2, 3)).cells(), Grid((4, 1))], device=device),
        lambda device: pack([Grid((2, 3)), Grid((4, 1), prefix=2)], device=device).positions,
        lambda device: Grid((4, 6)).interpolate(9).take(torch.tensor([[3, 1], [0, 2]], device=device)),
    ):
        here, there = make("cpu"), make("cuda")
        assert there.coords.is_cuda
        torch.testing.assert_close(there.coords.cpu(), here.coords)
        assert here.rotated is None or torch.equal(there.rotated.cpu(), here.rotated)


# --- errors ------------------------------------------------------------------------------------------------

BAD = {
    "lengths that don't add up": (
        ValueError, r"num_tokens: .*add up to 12, got 3 \+ 8 = 11",
        lambda: compose(Tokens(3), Grid((2, 4)), num_tokens=12),
    ),
    "slice beyond the end": (
        ValueError, r"start, length: .*11 tokens \(3 \+ 8\), got start=5, length=7",
        lambda: compose(Tokens(3), Grid((2, 4)), start=5, length=7),
    ),
    "other number of axes": (
        ValueError, r"segments: expected 2 axes in each segment, got 3 at index 1",
        lambda: compose(Grid((2, 2)), Grid((1, 2, 2))),
    ),
    "no number of axes": (ValueError, r"num_axes: .*None", lambda: compose(Tokens(3))),
    "axis out of range": (
        ValueError, r"axes from 0 to 1, got \(2,\) at index 0", lambda: compose(Tokens(1, "axis", 2), Grid((2, 2))),
    ),
    "axis of a follower": (ValueError, r"axes from 0 to 1, got \(5,\)", lambda: compose(After(Grid((2, 2)), (5,)))),
    "no segment": (TypeError, r"segments: .* at index 1, got \(2, 2\); .*", lambda: compose(Tokens(1), (2, 2))),
    "coordinates by sample": (
        ValueError, r"segments: expected coords of shape \(N, K\), got \(2, 3, 2\)",
        lambda: compose(Coordinates(torch.rand(2, 3, 2))),
    ),
    "negative length": (ValueError, r"length: .*-1", lambda: Tokens(-1)),
    "unknown rule": (ValueError, r"rule: .*'column'", lambda: Tokens(1, "column")),
    "bfloat16": (TypeError, r"dtype: .*bfloat16", lambda: compose(Grid((2,)), dtype=torch.bfloat16)),
    "text beyond float32": (
        ValueError, r"dtype: expected float64 for positions up to 16777217 in segment 0",
        lambda: compose(Tokens(2, "axis", start=2**24), num_axes=1, dtype=torch.float32),
    ),
    "grid beyond float32": (
        ValueError, r"dtype: expected float64 .*segment 1",
        lambda: compose(Grid((3,)), Grid((3,)).rescale(-1e9), dtype=torch.float32),
    ),
    "one layout": (
        TypeError,
        r"samples: expected a list with one layout per sample, got Grid$",
        lambda: pad(Grid((3, 4))),
    ),
    "no samples": (ValueError, r"samples: .*none", lambda: pack([])),
    "sample of a different kind": (TypeError, r"samples: .* at index 0, got Tokens$", lambda: pad([Tokens(3)])),
    "sample of several samples": (
        ValueError, r"samples: .*\(2, 3, 2\)", lambda: pack([Coordinates(torch.rand(2, 3, 2))]),
    ),
    "samples of other axes": (
        ValueError, r"samples: expected 2 axes in each sample, got 1 at index 1",
        lambda: pack([Grid((2, 2)), Grid((2,))]),
    ),
    "padded too short": (ValueError, r"num_tokens: expected at least 4.*got 3", lambda: pad([Grid((2, 2))], 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    kind, message, call = BAD[name]
    with pytest.raises(kind, match=message) as error:
        call()
    assert type(error.value) is kind


def test_float32_holds_positions_up_to_its_limit():
    assert compose(Tokens(1, "axis", start=2**24), num_axes=1, dtype=torch.float32).coords.item() == 2**24
    assert math.prod(compose(Grid((2, 3)), dtype=torch.float32).coords.shape) == 12


@pytest.mark.parametrize(
    "segments",
    [
        (Tokens(2, "axis", start=-(2**24) - 1),),
        (Tokens(2**24, "axis"), After(Coordinates(torch.tensor([[0], [1]])))),
        (Tokens(0, "axis", start=-(2**24)), Before(Coordinates(torch.tensor([[0], [1]])))),
    ],
)
def test_float32_is_refused_for_far_tokens_and_tables(segments):
    with pytest.raises(ValueError, match="dtype: expected float64 for positions up to 1677721"):
        compose(*segments, num_axes=1, dtype=torch.float32)


@pytest.mark.parametrize("other", [torch.float32, torch.uint16])
def test_joined_tables_keep_their_values(other):
    far = 2**24 + 1
    samples = [Coordinates(torch.tensor([[far]])), Coordinates(torch.tensor([[3]]).to(other))]
    for coords in (pad(samples).coords, pack(samples).positions.coords):
        assert coords.flatten().tolist() == [far, 3]


@pytest.mark.slow
def test_compose_compiles_once_for_all_sizes():
    from torch._dynamo.testing import CompileCounter

    def f(x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        grid = Grid(tuple(image.shape)).interpolate((None, 4))
        text = Tokens(x.shape[2] - grid.num_tokens - 1, "diagonal")
        positions = compose(text, After(grid), Tokens(1, "axis"), device=x.device)
        return rotate(x, omega=omega, positions=positions, impl="reference")

    torch._dynamo.reset()
    counter, omega = CompileCounter(), torch.rand(1, 5, 2)
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    for height, width, text in ((4, 6, 3), (5, 7, 8), (8, 3, 2)):
        args = torch.randn(1, 2, text + height * width + 1, 10), torch.empty(height, width)
        torch.testing.assert_close(compiled(*args), f(*args))
    assert counter.frame_count == 1
