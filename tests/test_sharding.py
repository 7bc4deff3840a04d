"""DTensor, FSDP2 and sequence parallelism in two processes; the cases are in sharded.py."""

import pytest
import torch
import torch.distributed as dist

GLOO = dist.is_available() and dist.is_gloo_available()
NCCL = dist.is_available() and dist.is_nccl_available()


def in_two_processes(backend, impl, folder):
    import sharded

    torch.multiprocessing.spawn(sharded.run, args=(2, backend, impl, str(folder)), nprocs=2)
    failed = "".join((folder / f"failed{rank}").read_text() for rank in range(2))
    assert not failed, f"\n{failed}"


@pytest.mark.skipif(not GLOO, reason="torch is built without gloo")
def test_two_processes(tmp_path):
    """One start for all cases: importing torch twice takes longer than they do."""
    in_two_processes("gloo", "triton", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not NCCL or torch.cuda.device_count() < 2, reason="needs two GPUs and NCCL")
def test_two_gpus(tmp_path):
    in_two_processes("nccl", "triton", tmp_path)
