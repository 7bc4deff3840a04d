"""Adapted models under FSDP1 and FSDP2 with 16-bit parameters, in two processes. sharded_models.py has the cases."""

import pytest
import torch.distributed as dist
from processes import run_processes

LIBRARIES = ("timm", "diffusers", "transformers")
for _library in LIBRARIES:
    pytest.importorskip(_library)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo")
def test_mixed_precision(tmp_path):
    """Run all cases in one start, because importing the libraries twice takes longer than the cases."""
    import sharded_models

    imported = ["torch.distributed.fsdp", *(f"lrpe_md.scripts.adapters.trial_{name}" for name in LIBRARIES)]
    run_processes(sharded_models.run, (str(tmp_path),), tmp_path, imported)
