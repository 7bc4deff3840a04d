"""Outputs passed by the caller, in Triton's interpreter and the reference: values, untouched memory, errors."""

import itertools

import pytest
import torch
from outputs import COPIED, FORMS, LENGTH, Job
from torch._dynamo.testing import CompileCounterWithBackend

from lrpe_md import Coordinates, Grid, Rotate1d, cosine, lrpe_rotate_1d, pack, rotate
from lrpe_md.engine.encode import dispatch, output


@pytest.fixture(autouse=True)
def fill_with_nan(nan_filled):
    assert torch.empty(3).isnan().all()


@pytest.fixture
def copies(monkeypatch):
    """Count the outputs that are copied to their destination."""
    seen, real = [], output._copy_out

    def write(out, y, start):
        seen.append(out)
        real(out, y, start)

    monkeypatch.setattr(output, "_copy_out", write)
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_slices_of_a_cache(form, impl, copies):
    """Memory around a slice of a strided, NaN-filled cache stays untouched."""
    job = Job(form)
    caches = job.caches()
    lengths = [y.shape[2] for y in job.wanted]
    slices = [None if c is None else c[:, :, 2 : 2 + n] for c, n in zip(caches, lengths, strict=True)]
    found = job.run(impl, out=job.out(slices))
    for y, given in zip(found, slices, strict=True):
        assert given is None or y is given
    job.check(found, caches, [2, 2])
    written = impl == "triton" and form not in COPIED
    assert len(copies) == (0 if written else sum(job.placed))


@pytest.mark.sampled
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_offsets_read_on_the_device(form, impl, copies):
    job = Job(form)
    for starts, dtype in (([3], torch.int64), ([1, 4], torch.int32)):
        caches, start = job.caches(), torch.tensor(starts, dtype=dtype)
        found = job.run(impl, out=job.out(caches), out_start=start)
        job.check(found, caches, starts * (2 // len(starts)))
    assert bool(copies) == (impl == "reference" or form in COPIED)
    caches = job.caches()
    job.check(job.run(impl, out=job.out(caches), out_start=torch.tensor(2)), caches, [2, 2])


@pytest.mark.parametrize("form", ["decode", "prefill", "one tensor", "partial, half", "odd strides"])
def test_offsets_beyond_the_cache_are_not_written(form):
    """A kernel can't raise errors, so it drops these rows. PyTorch's operators raise errors on a CPU."""
    job = Job(form)
    for starts in ([LENGTH - 1, -1], [LENGTH, -LENGTH], [2**33, -(2**33)]):
        caches, start = job.caches(), torch.tensor(starts)
        job.check(job.run("triton", out=job.out(caches), out_start=start), caches, starts)
    for impl, starts in itertools.product(["reference", "auto"], ([LENGTH, 0], [0, -1], [LENGTH], [2**40, 0])):
        caches = job.caches()
        with pytest.raises(IndexError, match=r"out_start: .* rows from 0 to \d, got \[.*: (1 token|[2-9] tokens) must"):
            job.run(impl, out=job.out(caches), out_start=torch.tensor(starts))
        assert all(c is None or c.isnan().all() for c in caches), "the cache was written"


@pytest.mark.parametrize("form", ["decode", "apart", "partial cosine"])
def test_offset_that_fits_only_one_output(form):
    """q's output is longer than k's. Neither of them is written."""
    lengths = (3, 5) if form == "apart" else (3, 3)
    outs = tuple(torch.full((1, 2, LENGTH + n, 32), torch.nan) for n in (4, 0))
    q, k = (torch.randn(1, 2, n, 16) for n in lengths)
    grids = tuple(Grid((n,)) for n in lengths) if form == "apart" else Grid((3,))
    options = {"omega": torch.rand(1, 16, 1), "positions": grids}
    if form == "partial cosine":
        options |= {"omega": torch.rand(1, 4, 1), "rotary_dim": 4}
        outs = tuple(t[..., :20] for t in outs)
    start = torch.tensor([LENGTH - 2])
    with pytest.raises(IndexError, match="out_start: expected rows from 0 to"):
        cosine(q, k, out=outs, out_start=start, **options)
    assert all(t.isnan().all() for t in outs)


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_outputs_of_two_lengths(rotary_dim):
    """Each output is as long as its tensor."""
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 3, 16)
    options = {
        "omega": torch.rand(1, rotary_dim or 16, 1), "positions": (Grid((5,)), Grid((3,))), "rotary_dim": rotary_dim,
    }  # fmt: skip
    wanted = cosine(q, k, **options)
    outs = tuple(torch.full_like(y, torch.nan) for y in wanted)
    found = cosine(q, k, out=outs, **options)
    for y, out, right in zip(found, outs, wanted, strict=True):
        assert y is out
        assert torch.equal(out, right)
    with pytest.raises(ValueError, match=r"out\[1\]: expected shape \(1, 2, 3, "):
        cosine(q, k, out=(None, torch.empty_like(wanted[0])), **options)


def test_ignored_offset_is_detected():
    """This shows that the check in the tests above can fail."""
    job = Job("prefill")
    caches = job.caches()
    found = job.run("triton", out=job.out(caches), out_start=torch.tensor([1, 2]))
    with pytest.raises(AssertionError):
        job.check(found, caches, [2, 1])


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_qkv_and_packed_tokens(impl):
    omega = torch.rand(1, 8, 1)
    qkv = torch.randn(2, 3, 8, 16)
    cache = torch.empty(2, LENGTH, 2, 16)
    options = {"omega": omega, "positions": Grid((3,)), "num_key_heads": 2, "impl": impl}
    wanted = rotate(qkv=qkv, **{**options, "impl": "reference"})
    q, k, _ = rotate(qkv=qkv, out=(None, cache[:, 1:4]), **options)
    torch.testing.assert_close((q, k), wanted[:2])
    torch.testing.assert_close(cache[:, 1:4], wanted[1])
    assert cache[:, 4:].isnan().all()
    assert cache[:, :1].isnan().all()
    x, where = torch.randn(5, 4, 16), pack([Grid((2,)), Grid((3,))])
    out = torch.empty(5, 4, 16)
    assert rotate(x, omega=omega, positions=where, out=out, impl=impl).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, rotate(x, omega=omega, positions=where, impl="reference"))


def test_modules_write_into_a_cache():
    module, cache = Rotate1d(16, theta=torch.rand(8)), torch.empty(2, 2, LENGTH, 16)
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
    at = torch.tensor([3, 5])
    wanted = module(q, k, offset=at)
    y, written = module(q, k, offset=at, out=(None, cache), out_start=at)
    torch.testing.assert_close(y, wanted[0])
    assert written is cache
    for i, place in enumerate(at.tolist()):
        torch.testing.assert_close(cache[i, :, place], wanted[1][i, :, 0])
    with pytest.raises(ValueError, match="out: expected None with scale_base"):
        Rotate1d(16, scale_base=512)(q, k, out=(None, cache), out_start=at)
    with pytest.raises(ValueError, match="out: expected None with attend"):
        module(q, k, out=(None, cache), attend=lambda *xs: xs)


# --- under torch.compile ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("start", [False, True])
def test_compiled(dynamic, start):
    """There is one graph. With dynamic sizes, it serves several lengths."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=dynamic)
    def step(q, k, omega, cache, where):
        into = {"out": (None, cache), "out_start": where} if start else {"out": (None, cache[:, :, 2 : 2 + q.shape[2]])}
        return rotate(q, k, omega=omega, positions=Grid((q.shape[2],)), rotary_dim=8, **into)

    omega, counts = torch.rand(1, 4, 1), []
    for n in (3, 4, 5) if dynamic else (3, 3):
        q, k = torch.randn(2, 4, n, 16), torch.randn(2, 2, n, 16)
        wanted = rotate(q, k, omega=omega, positions=Grid((n,)), rotary_dim=8)
        cache = torch.full((2, 2, LENGTH, 16), torch.nan)
        with torch.no_grad():
            y, written = step(q, k, omega, cache, torch.tensor([2]))
        torch.testing.assert_close(y, wanted[0])
        torch.testing.assert_close(cache[:, :, 2 : 2 + n], wanted[1])
        assert cache[:, :, 2 + n :].isnan().all()
        assert written.shape[2] == (LENGTH if start else n)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


# --- errors, before anything is written ------------------------------------------------------------------------------


def call(q, k, out, **changes):
    return rotate(q, k, **{"omega": torch.rand(1, 8, 1), "positions": Grid((3,)), **changes}, out=out)


Q, K = torch.zeros(2, 4, 3, 16), torch.zeros(2, 2, 3, 16)
ERRORS = {
    "short": (
        lambda: call(Q, K, (None, K.new_zeros(2, 2, 2, 16))),
        r"out\[1\]: expected shape \(2, 2, 3, 16\), got [^;]*$",
    ),
    "long": (
        lambda: call(Q, K, (None, K.new_zeros(2, 2, 4, 16))),
        r"got \(2, 2, 4, 16\); to write to part of a cache, pass out_start=, or a slice of 3 of its rows$",
    ),
    "short for a place": (
        lambda: call(Q, K, (None, K.new_zeros(2, 2, 2, 16)), out_start=torch.tensor(0)),
        r"out\[1\]: expected shape \(2, 2, at least 3, 16\), got \(2, 2, 2, 16\)",
    ),
    "heads": (lambda: call(Q, K, (None, torch.zeros_like(Q))), r"out\[1\]: expected shape"),
    "dtype": (lambda: call(Q, K, (None, K.double())), r"out\[1\]: expected the dtype .* torch.float32 .*float64"),
    "device": (lambda: call(Q, K, (None, K.to("meta"))), r"out\[1\]: expected the dtype and device"),
    "width": (
        lambda: cosine(Q, K, omega=torch.rand(1, 16, 1), positions=Grid((3,)), out=(None, torch.zeros_like(K))),
        r"out\[1\]: expected shape \(2, 2, 3, 32\)",
    ),
    "one for two": (lambda: call(Q, K, torch.zeros_like(K)), r"out: expected a pair \(for q, for k\), .* got 1"),
    "no tensor": (lambda: call(Q, K, "cache"), "out: expected a tensor, or one for q and one for k, got str"),
    "in place": (lambda: call(Q, K, (None, K)), r"out\[1\]: expected memory that doesn't overlap k"),
    "over q": (lambda: call(Q, Q[:, :2], (None, Q[:, 1:3])), r"out\[1\]: expected memory that doesn't overlap q"),
    "over each other": (lambda: over_each_other(), r"out\[1\]: expected memory that doesn't overlap out\[0\]"),
    "over itself": (
        lambda: call(Q, K, (None, torch.zeros(1, 2, 3, 16).expand(2, 2, 3, 16))),
        r"out\[1\]: expected elements that do not overlap in memory",
    ),
    "over omega": (lambda: over_omega(), "out: expected memory that doesn't overlap omega"),
    "over coordinates": (lambda: over_coordinates(), "out: expected memory that doesn't overlap coords"),
    "start alone": (lambda: call(Q, K, None, out_start=torch.tensor(0)), "out_start: expected None without out"),
    "a number": (lambda: call(Q, K, (None, K.clone()), out_start=2), "out_start: expected an integer tensor"),
    "floats": (
        lambda: call(Q, K, (None, K.clone()), out_start=torch.tensor(0.0)), "out_start: expected int32 or int64",
    ),
    "three places": (
        lambda: call(Q, K, (None, K.clone()), out_start=torch.zeros(3, dtype=torch.int64)),
        r"out_start: expected one row index, or one for each of the 2 samples",
    ),
    "a gradient": (lambda: call(Q.clone().requires_grad_(), K, (None, K.clone())), "out: expected gradients"),
    "of omega": (
        lambda: call(Q, K, (None, K.clone()), omega=torch.rand(1, 8, 1, requires_grad=True)), "out: expected gradients",
    ),
    "of out": (
        lambda: call(Q, K, (None, K.clone().requires_grad_())),
        r"out\[1\]: expected a tensor that does not require grad",
    ),
    "vmap": (
        lambda: torch.func.vmap(lambda q: rotate(q[None], omega=torch.ones(1, 8, 1), positions=Grid((3,)), out=Q))(Q),
        "out: expected None under a torch.func transform",
    ),
}  # fmt: skip


def over_each_other():
    both = torch.zeros(2, 5, 3, 16)
    return call(Q, K, (both[:, :4], both[:, 3:]))


def over_omega():
    memory = torch.zeros(2 * 4 * 3 * 16)
    return rotate(Q, omega=memory[:8].view(1, 8, 1), positions=Grid((3,)), out=memory.view(2, 4, 3, 16))


def over_coordinates():
    memory = torch.zeros(2 * 4 * 3 * 16)
    where = Coordinates(memory[:3].view(3, 1))
    return rotate(Q, omega=torch.rand(1, 8, 1), positions=where, out=memory.view(2, 4, 3, 16))


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, impl, monkeypatch):
    """Nothing runs before the error."""
    make, message = ERRORS[name]
    monkeypatch.setattr(dispatch, "run_in_place", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(dispatch.ENCODE, "run", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(dispatch, "use_triton", lambda *_: impl == "triton")
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_interleaved_slices_do_not_overlap():
    """Keys, values and other tokens of one cache interleave in memory."""
    both = torch.zeros(2, 2, LENGTH, 32)
    k = both[:, :, 4:7, :16]
    k.normal_()
    y = rotate(k, omega=torch.rand(1, 8, 1), positions=Grid((3,)), out=both[:, :, 4:7, 16:])
    assert y.abs().sum() > 0
    rotate(k, omega=torch.rand(1, 8, 1), positions=Grid((3,)), out=both[:, :, 1:4, :16])


def test_autograd_sees_that_a_cache_was_written():
    cache = torch.randn(2, 2, 3, 16)
    weight = torch.randn(2, 2, 3, 16, requires_grad=True)
    product = (cache * weight).sum()
    with torch.no_grad():
        rotate(K, omega=torch.rand(1, 8, 1), positions=Grid((3,)), out=cache, impl="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_document_function_has_no_out():
    with pytest.raises(TypeError):
        lrpe_rotate_1d(K, torch.rand(8), out=K.clone())


def test_cache_checks_memory_and_gradients_again():
    """Memory overlap and required gradients are checked at every call."""
    memory = torch.zeros(2, 2, 9, 16)
    x, out = memory[:, :, :3], memory[:, :, 3:6]
    options = {"omega": torch.rand(1, 8, 1), "positions": Grid((3,)), "impl": "triton"}
    for _ in range(2):
        rotate(x, out=out, **options)
        with pytest.raises(ValueError, match="out: expected memory that doesn't overlap x"):
            rotate(x, out=memory[:, :, 2:5], **options)
        with pytest.raises(ValueError, match="out: expected a tensor that does not require grad"):
            rotate(x, out=torch.zeros_like(memory)[:, :, 3:6].requires_grad_(), **options)
    meta = torch.empty(2, 2, 3, 16, device="meta")
    options = {"omega": torch.rand(1, 8, 1, device="meta"), "positions": Grid((3,))}
    assert rotate(meta, out=torch.empty_like(meta), **options).is_meta
