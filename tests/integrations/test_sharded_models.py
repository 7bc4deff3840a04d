"""Adapted models under FSDP1 and FSDP2 with 16-bit parameters, in two processes; the cases are in sharded_models.py."""

import pytest
import torch
import torch.distributed as dist

for _library in ("timm", "diffusers", "transformers"):
    pytest.importorskip(_library)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo")
def test_mixed_precision(tmp_path):
    """One start for all cases: importing the libraries twice takes longer than they do."""
    import sharded_models

    torch.multiprocessing.spawn(sharded_models.run, args=(str(tmp_path),), nprocs=2)
    failed = "".join((tmp_path / f"failed{rank}").read_text() for rank in range(2))
    assert not failed, f"\n{failed}"
