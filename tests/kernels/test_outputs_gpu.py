"""Outputs passed by the caller, on a GPU: ``pytest -m gpu``."""

import pytest
import torch
from gpu_memory import skip_without
from outputs import COPIED, FORMS, LENGTH, Job

from lrpe_md import Grid, rotate
from lrpe_md.engine.encode import output

pytestmark = pytest.mark.gpu
BOUNDS = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}  # fmt: skip


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_caches(form, dtype, nan_filled, monkeypatch):
    """Write slices, offsets read on the device, and offsets beyond the end."""
    copies, real = [], output._copy_out
    monkeypatch.setattr(output, "_copy_out", lambda *args: (copies.append(args), real(*args)))
    job = Job(form, dtype, "cuda")
    caches = job.caches()
    slices = [None if c is None else c[:, :, 2 : 2 + y.shape[2]] for c, y in zip(caches, job.wanted, strict=True)]
    job.check(job.run("triton", out=job.out(slices)), caches, [2, 2], **BOUNDS[dtype])
    for starts in ([1, 4], [LENGTH - 1, -1], [2**33, -(2**33)]):
        if form in COPIED and starts != [1, 4]:
            continue  # PyTorch's operators raise a device-side assertion
        caches = job.caches()
        start = torch.tensor(starts, device="cuda")
        job.check(job.run("triton", out=job.out(caches), out_start=start), caches, starts, **BOUNDS[dtype])
    assert bool(copies) == (form in COPIED)


def test_out_gives_the_same_bits():
    """Compare with a call without out, at the sizes of a language model."""
    omega = torch.rand(1, 64, 1, device="cuda")
    for n in (1, 7, 2048):
        q, k = (torch.randn(2, h, n, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8))
        wanted = rotate(q, k, omega=omega, positions=Grid((n,)))
        cache = torch.zeros(2, 8, 4096, 128, device="cuda", dtype=torch.bfloat16)
        start = torch.tensor([5, 1000], device="cuda")
        y, _ = rotate(q, k, omega=omega, positions=Grid((n,)), out=(None, cache), out_start=start)
        assert torch.equal(y, wanted[0])
        for i, at in enumerate(start.tolist()):
            assert torch.equal(cache[i, :, at : at + n], wanted[1][i])
            assert not cache[i, :, :at].any()
            assert not cache[i, :, at + n :].any()


def test_replayed_graph_follows_the_offset():
    omega = torch.rand(1, 64, 1, device="cuda")
    q, k = (torch.randn(2, h, 1, 128, device="cuda") for h in (8, 2))
    cache, start = torch.zeros(2, 2, 16, 128, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def step():
        where = Grid((1,), origin=start)
        return rotate(q, k, omega=omega, positions=where, out=(None, cache), out_start=start)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for place in (0, 9, 15):
        cache.zero_()
        start.fill_(place)
        graph.replay()
        wanted = rotate(k, omega=omega, positions=Grid((1,), origin=start), impl="reference")
        torch.testing.assert_close(cache[:, :, place], wanted[:, :, 0], rtol=1e-5, atol=1e-5)
        assert cache.abs().sum(-1).count_nonzero() == 4


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    omega = torch.rand(1, 64, 1, device="cuda")

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def step(q, k, cache, start):
        return rotate(q, k, omega=omega, positions=Grid((q.shape[2],)), out=(None, cache), out_start=start)

    for n in (3, 5):
        q, k = (torch.randn(2, h, n, 128, device="cuda") for h in (8, 2))
        cache = torch.zeros(2, 2, 16, 128, device="cuda")
        wanted = rotate(q, k, omega=omega, positions=Grid((n,)))
        with torch.no_grad():
            y, _ = step(q, k, cache, torch.tensor([4], device="cuda"))
        torch.testing.assert_close(y, wanted[0])
        torch.testing.assert_close(cache[:, :, 4 : 4 + n], wanted[1])


def test_a_cache_beyond_2_31_elements():
    """Offsets are computed in 64 bits."""
    skip_without(10 * 2**30)
    length = 2**22 + 8
    cache = torch.zeros(1, 8, length, 128, device="cuda", dtype=torch.bfloat16)
    assert cache.numel() > 2**31
    k = torch.randn(1, 8, 2, 128, device="cuda", dtype=torch.bfloat16)
    omega, start = torch.rand(1, 64, 1, device="cuda"), torch.tensor(length - 2, device="cuda")
    wanted = rotate(k, omega=omega, positions=Grid((2,)))
    rotate(k, omega=omega, positions=Grid((2,)), out=cache, out_start=start)
    assert torch.equal(cache[:, :, -2:], wanted)
    del cache
    cache = torch.zeros(1, length, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    rotate(k, omega=omega, positions=Grid((2,)), out=cache, out_start=start)
    assert torch.equal(cache[:, :, -2:], wanted)
