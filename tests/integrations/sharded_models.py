"""Program that test_sharded_models.py runs in two processes: adapted models under FSDP's mixed precision."""

from __future__ import annotations

import copy
import threading
import traceback
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import test_rotary_models as models
import test_text_models as text_models
import torch
import torch.distributed as dist
from lrpe_md.scripts.adapters import trial_diffusers, trial_timm, trial_transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointError

from lrpe_md import Coordinates, Grid, RotateMd, adapt, adapt_rotary, rotate
from lrpe_md.integrations import fused, plans, restore_rotary
from lrpe_md.integrations.rotary import exchanged_names, parts

BY_RULE = {"qwen image": "QwenImageTransformer2DModel", "skyreels": "SkyReelsV2Transformer3DModel"}  # of diffusers
NAMES = ["llama", "Qwen2VL", "wan", "flux", "hunyuan video", "dinov3", "mixed", *BY_RULE]
CHECKPOINTED = ["qwen3", "tower", "wan", "flux", "qwen image", "dinov3", "naflexvit"]  # one for each adapter
BLOCKS = ("blocks", "layers", "layer", "transformer_blocks", "single_transformer_blocks")


def run(rank: int, folder: str) -> None:
    """Test all models in one process, and write a file that lists the failures."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh, failed = init_device_mesh("cpu", (2,)), ""
    cases: list[Any] = [(name, rotary_model, kind) for name in NAMES for kind in (shard_2, shard_1)]
    for name, check, kind in [
        *cases, ("vit", vit, shard_2), ("modules", modules, shard_1),
        *((name, linear, shard_2) for name in ("cosine", "rotate", "mixed")),
        *((name, checkpointed, shard_2) for name in CHECKPOINTED),
    ]:  # fmt: skip
        try:
            check(name, kind, mesh)
        except (Exception, pytest.fail.Exception):
            failed += f"--- {name}, {kind.__name__}, rank {rank}\n{traceback.format_exc()}\n"
    with open(f"{folder}/failed{rank}", "w") as file:
        file.write(failed)
    dist.barrier()  # Gloo can abort a process that exits right after a collective.
    dist.destroy_process_group()


def shard_2(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard with FSDP2, one group per block."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for path, part in model.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and path.split(".")[-1] in BLOCKS:
            for block in part:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def shard_1(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard with FSDP1, which also casts buffers."""
    half = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return FullyShardedDataParallel(model, mixed_precision=half, use_orig_params=True, device_id=torch.device("cpu"))


def by_rule(name: str) -> tuple[Any, Any, Any]:
    def call(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
        return model(**given).sample

    return partial(trial_diffusers.build, name), call, lambda: trial_diffusers.inputs(trial_diffusers.build(name))


def tower() -> tuple[Any, Any, Any]:
    """Build Qwen3-VL's vision tower from transformers."""

    def call(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
        return model(**given).last_hidden_state

    build = partial(trial_transformers.build, "qwen3_vl_vision")
    return build, call, lambda: trial_transformers.inputs(build())


def naflexvit() -> tuple[Any, Any, Any]:
    return partial(trial_timm.build_naflex, "mixed"), lambda m, given: m(given), lambda: trial_timm.patches(3 * 4**2)


def of_name(name: str) -> tuple[Any, Any, Any]:
    """Return a model's builder, its call and its inputs."""
    if name in ("llama", "qwen3"):
        return partial(text_models.causal_lm, name), text_models.logits, text_models.embeddings
    if name == "naflexvit":
        return naflexvit()
    if name == "tower":
        return tower()
    return by_rule(BY_RULE[name]) if name in BY_RULE else models.ALL[name]


def checkpoint(model: Any) -> nn.Module:
    """Enable activation checkpointing with the library's own method."""
    for switch in ("set_grad_checkpointing", "enable_gradient_checkpointing", "gradient_checkpointing_enable"):
        if hasattr(model, switch):
            getattr(model, switch)()
            return model.train()
    raise TypeError(f"model: expected a switch of activation checkpointing, got {type(model).__name__}")


def differentiate(model: nn.Module, call: Any, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the gradients of all parameters, concatenated."""
    y = call(model, x)
    y.float().square().mean().backward()
    given = [p.grad for p in model.parameters() if p.grad is not None]
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in given]
    return y.detach(), torch.cat([g.flatten().float() for g in found])


class Recorded:
    """Recorder of the tables in each call of :func:`lrpe_md.rotate` by a model, without those of probes."""

    def __init__(self) -> None:
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, *xs: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is self.thread:
            self.tables.append(tuple(t.detach().clone() for t in kwargs["tables"]))
        return rotate(*xs, **kwargs)

    def __enter__(self) -> Recorded:
        self.thread = threading.current_thread()
        self.patch = pytest.MonkeyPatch()
        for module in (fused, plans):
            self.patch.setattr(module, "rotate", self)
        return self

    def __exit__(self, *args: object) -> None:
        self.patch.undo()


def is_same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def checkpointed(name: str, shard: Any, mesh: Any) -> None:
    """Check that the backward pass uses the same tables, and that results are as accurate as the original's."""
    build, call, x = of_name(name)
    torch.manual_seed(0)
    model, x = build(), x()
    exact = differentiate(adapt_rotary(copy.deepcopy(model)), call, x)
    with Recorded() as seen:
        found = differentiate(shard(checkpoint(adapt_rotary(copy.deepcopy(model))), mesh), call, x)
    try:
        theirs = differentiate(shard(checkpoint(model), mesh), call, x)
    except CheckpointError:  # in torch 2.11, recomputation doesn't cast everything to 16 bits
        theirs = None
    half = len(seen.tables) // 2
    assert half > 0
    assert len(seen.tables) == 2 * half
    for tables in seen.tables[half:]:
        assert any(is_same(tables, other) for other in seen.tables[:half])
    for ours, stock, right in zip(found, theirs or (), exact, strict=theirs is not None):
        assert (ours - right).norm() < 1.5 * (stock - right).norm()


def rotary_model(name: str, shard: Any, mesh: Any) -> None:
    """Check that a sharded model's outputs are as accurate as the original's, and that it can be restored."""
    build, call, x = of_name(name)
    torch.manual_seed(0)
    model, x = build(), x()
    with Recorded() as plain:
        exact = call(adapt_rotary(copy.deepcopy(model)), x).detach()
    with Recorded() as seen:
        sharded = shard(adapt_rotary(copy.deepcopy(model)), mesh)
        found = call(sharded, x)
        found.float().square().sum().backward()
    theirs = call(shard(model, mesh), x)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() < 1.5 * (theirs - exact).abs().max()
    assert len(seen.tables) == len(plain.tables) > 0
    restore_rotary(sharded)
    assert not any(exchanged_names(part) for part in parts(sharded).values())
    assert torch.equal(call(sharded, x), theirs)


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.proj, self.rope = nn.Linear(16, 16), RotateMd(16, 2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rope(self.proj(x), positions=Grid((2, 3)))


def modules(name: str, shard: Any, mesh: Any) -> None:
    """Check that the error's advice works for our modules under FSDP1, with fixed and learned frequencies."""
    x = torch.randn(1, 2, 6, 16)
    half = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
    for options in ({}, {"learnable": True}, {"amplitude": 1.5}, {"phase": True}):
        torch.manual_seed(0)
        model = _Attention(**options)
        message = r"float32 or float64 .*FSDP1.*buffer_dtype=torch\.float32.*ignored_modules"
        with pytest.raises(TypeError, match=message):
            shard(copy.deepcopy(model), mesh)(x)
        with torch.no_grad():
            expected = model.rope(nn.functional.linear(x.bfloat16(), *(p.bfloat16() for p in model.proj.parameters())),
                                  positions=Grid((2, 3)))  # fmt: skip
        own = [model.rope] if options.keys() & {"learnable", "phase"} else []
        half["buffer_dtype"] = torch.float32
        sharded = FullyShardedDataParallel(
            model, mixed_precision=MixedPrecision(**half), use_orig_params=True, device_id=torch.device("cpu"),
            ignored_modules=own,
        )  # fmt: skip
        found = sharded(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def vit(name: str, shard: Any, mesh: Any) -> None:
    """Test ``adapt`` with tables of positions that 16 bits would round."""
    torch.manual_seed(0)
    model = models.library("timm").create_model(
        "vit_tiny_patch16_224", img_size=(16, 16 * 300), depth=2, embed_dim=64, num_heads=2, patch_drop_rate=0.5
    )
    model = adapt(model, "rotate").train()
    seen: list[Any] = []
    model.encoding.register_forward_pre_hook(lambda m, xs, kwargs: seen.append(kwargs["positions"]), with_kwargs=True)
    shard(model, mesh)(torch.randn(1, 3, 16, 16 * 300)).sum().backward()
    for positions in seen:
        assert isinstance(positions, (Coordinates, Grid))
        columns = positions.coords[..., 1]
        assert columns.dtype == torch.float32
        assert columns.unique().numel() == 150  # every second one, at its original position
    assert len(seen) == 2


def linear(name: str, shard: Any, mesh: Any) -> None:
    """Check that learned frequencies of linear attention are gathered, used and reduced in their own dtype."""
    torch.manual_seed(0)
    model = models.library("timm").create_model(
        "vit_tiny_patch16_224", img_size=(16, 16 * 20), depth=2, embed_dim=64, num_heads=2
    )
    options = {} if name == "mixed" else {"encoding_kwargs": {"learnable": True, "phase": name == "cosine"}}
    model = adapt(model, name, attention="linear", **options)
    x, single = torch.randn(2, 3, 16, 16 * 20), copy.deepcopy(model)
    expected = single(x)
    expected.square().mean().backward()
    for layer in model.encoding if isinstance(model.encoding, nn.ModuleList) else [model.encoding]:
        fully_shard(layer, mesh=mesh)
    found = shard(model, mesh)(x)
    found.float().square().mean().backward()
    assert (found - expected).norm() < 0.02 * expected.norm()
    right = dict(single.encoding.named_parameters())
    for key, parameter in model.encoding.named_parameters():
        gradient = parameter.grad.full_tensor()
        assert gradient.dtype == torch.float32
        assert (gradient - right[key].grad).norm() < 0.1 * right[key].grad.norm(), key
