"""The code on the page about several GPUs runs, and FSDP keeps learned frequencies in float32."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lrpe_md import Grid, RotateMd, adapt

PAGE = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text(encoding="utf-8")
DTENSORS, FIND, FSDP2, FSDP1 = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.slow
def test_dtensors(tmp_path):
    (tmp_path / "shard.py").write_text(DTENSORS, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "shard.py"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    shards = sorted(re.findall(r"torch\.Size\(.*?\)", run.stdout))
    norms = re.findall(r"tensor\(([\d.]+)\)", run.stdout)
    assert shards == ["torch.Size([1, 4, 12, 64])", "torch.Size([1, 4, 13, 64])"]
    assert len(norms) == 2
    assert len(set(norms)) == 1


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.rope = nn.Linear(16, 16), RotateMd(16, 2, learnable=True)

    def forward(self, x):
        return self.rope(self.proj(x), positions=Grid((2, 3)))


def vit(encoding, **options):
    timm = pytest.importorskip("timm")
    return adapt(
        timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=2, img_size=32), encoding, **options
    )


CASES = {
    "adapted, shared": (lambda: vit("rotate", encoding_kwargs={"learnable": True}), (1, 3, 32, 32)),
    "adapted, by layer": (lambda: vit("mixed"), (1, 3, 32, 32)),
    "own": (Own, (1, 2, 6, 16)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", [FSDP2, FSDP1], ids=["FSDP2", "FSDP1"])
@pytest.mark.parametrize("case", CASES)
def test_fsdp(case, code, tmp_path):
    build, shape = CASES[case]
    model = build()
    names = {name for name, _ in model.named_parameters() if name.startswith(("encoding", "rope"))}
    find = FIND.replace("model.encoding", "model.rope") if case == "own" else FIND
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        space = {"model": model, "torch": torch}
        for part in (find, code.replace("use_orig_params=True", 'use_orig_params=True, device_id=torch.device("cpu")')):
            exec(part, space)
        outputs = space["model"](torch.randn(shape))
        assert outputs.dtype == torch.bfloat16
        outputs.float().square().sum().backward()
        learned = {name.removeprefix("_fsdp_wrapped_module."): p for name, p in space["model"].named_parameters()}
        assert names
        assert all(learned[name].grad.dtype == torch.float32 for name in names)
    finally:
        dist.destroy_process_group()
