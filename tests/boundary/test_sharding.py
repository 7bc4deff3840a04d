"""DTensor, FSDP2 and sequence parallelism in several processes. The cases are in sharded.py."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

from lrpe_md.engine.core import sharding

GLOO = dist.is_available() and dist.is_gloo_available()
NCCL = dist.is_available() and dist.is_nccl_available()


def in_processes(backend, impl, folder, count=2):
    import sharded

    imported = ["torch.distributed.fsdp", "torch.distributed.tensor", "lrpe_md.testing", "triton"]
    imported = [] if backend == "nccl" else imported
    run_processes(sharded.run, (count, backend, impl, str(folder)), folder, imported, count)


@pytest.mark.skipif(not GLOO, reason="torch is built without gloo")
def test_two_processes(tmp_path):
    """Run all cases in one start, because importing torch twice takes longer than the cases."""
    in_processes("gloo", "triton", tmp_path)


@pytest.mark.skipif(not GLOO, reason="torch is built without gloo")
def test_three_processes(tmp_path):
    in_processes("gloo", "triton", tmp_path, 3)


@pytest.mark.skipif(not GLOO, reason="torch is built without gloo")
@pytest.mark.parametrize("num_tokens", [1, 7, 12])
def test_tokens_of_a_rank(num_tokens):
    """Shard over two axes of a mesh, which gives chunks of chunks."""
    from torch.distributed.tensor import Shard

    for outer, inner in itertools.product(range(2), range(3)):
        part = torch.arange(num_tokens)
        for size, rank in ((2, outer), (3, inner)):
            part = [*part.chunk(size), *[part[:0]] * size][rank]
        mesh = SimpleNamespace(size=(2, 3).__getitem__, get_local_rank=(outer, inner).__getitem__)
        x = SimpleNamespace(
            shape=(1, 1, num_tokens, 8), placements=(Shard(2), Shard(2)), device_mesh=mesh,
            to_local=lambda part=part: part[None, None, :, None],
        )  # fmt: skip
        start, length = sharding.local_part(x, sharding.TOKENS)
        assert list(range(start, start + length)) == part.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not NCCL or not torch.cuda.is_available(), reason="needs a GPU and NCCL")
def test_one_gpu(tmp_path):
    in_processes("nccl", "triton", tmp_path, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not NCCL or torch.cuda.device_count() < 2, reason="needs two GPUs and NCCL")
def test_two_gpus(tmp_path):
    in_processes("nccl", "triton", tmp_path)
