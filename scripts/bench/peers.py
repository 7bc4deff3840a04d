"""Inputs for ``scripts.bench operators``, calls of lrpe-md's operators, and adapters for other implementations.

All peers compute the same function of the same inputs. For rotate, q and k (B, H, N, D) are slices of a packed
projection (B, N, 3, H, D). With grouped queries, q and k come from separate projections (B, N, H, D). For cosine, x is
contiguous. If a peer needs tables, they are computed once before timing. If a peer needs contiguous tensors, the copies
are timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from lrpe_md import Coordinates, Grid, axial_omega, geometric_theta, reference
from lrpe_md.engine.core.call import Call, Options
from lrpe_md.engine.core.operator import is_direct
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.encode.tables import replace_angles, store_angles
from lrpe_md.engine.encode.validate import validate

from ..common.cases import Case, Inputs, bind, make_tables

Forward = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, ...]]  # (xs, omega) -> ys

OURS = "lrpe-md"
BOTH = "half", "interleaved"


@dataclass(frozen=True)
class Peer:
    build: Callable[[Inputs], Forward]
    maps: tuple[str, ...] = ("cosine", "rotate")
    per_head: bool = True  # supports frequencies per head
    omega_grad: bool = False  # computes the gradient of the frequencies
    compiled: bool = False
    overwrites: Literal["nothing", "grads", "all"] = "nothing"
    adapt: Callable[[Inputs], Inputs] | None = None  # converts the inputs to the nearest supported call
    text: bool = False  # compared only on text
    pairs: tuple[str, ...] = ("half",)  # layouts of pairs that the rotation supports
    note: str = ""


def large_inputs(case: Case, device: torch.device) -> Inputs:
    """Create inputs on the device, with axial shared frequencies (slowest axis first) or dense per-head frequencies."""
    generator = torch.Generator(device).manual_seed(case.seed)
    options: dict[str, Any] = {"generator": generator, "device": device}
    grid = Grid(case.shape, case.prefix)
    batch, heads, num_tokens, num_axes = case.batch, case.heads[0], grid.num_tokens, grid.num_axes
    if case.layout == "packed":
        packed = torch.randn(batch, num_tokens, 3, heads, case.head_dim, dtype=case.dtype, **options)
        xs = list(packed.permute(2, 0, 3, 1, 4).unbind()[: len(case.heads)])
    elif case.layout == "bnhd":
        sizes = [(batch, num_tokens, h, case.head_dim) for h in case.heads]
        xs = [torch.randn(size, dtype=case.dtype, **options).transpose(1, 2) for size in sizes]
    else:
        xs = [torch.randn(batch, heads, num_tokens, case.head_dim, dtype=case.dtype, **options)]
    grads = []
    for x, h in zip(xs, case.heads, strict=True):  # in the memory layout of the outputs
        tokens_first = case.grad_layout == "bnhd"
        size = (batch, num_tokens, h) if tokens_first else (batch, h, num_tokens)
        grad = torch.randn(*size, case.out_dim, dtype=case.dtype, **options)
        grads.append(grad.transpose(1, 2) if tokens_first else grad)
        assert grads[-1].shape[:3] == x.shape[:3]
    if case.omega_heads == 1:
        omega = axial_omega(shared_theta(case), case.channels, num_axes, axis_order="major_first")
        omega = omega.to(device, case.omega_dtype)
    else:
        omega = torch.rand(case.omega_heads, case.channels, num_axes, dtype=case.omega_dtype, **options)
    positions = grid
    if case.coords == "shared":
        positions = Coordinates(Grid(case.shape).coordinates(device, case.coords_dtype), case.prefix)
    tables = make_tables(case, lambda *size: torch.randn(size, **options), device)
    return Inputs(xs, grads, omega, None, positions, case, tables=tables)


def shared_theta(case: Case) -> Tensor:
    return geometric_theta(math.ceil(case.channels / len(case.shape)))


# --- ours ------------------------------------------------------------------------------------------------------------


def kernels(inputs: Inputs) -> Forward:
    """Return a function that calls the kernels or, on a CPU, the reference."""
    return bind(inputs, "triton" if inputs.omega.is_cuda else "reference")


def torch_eager(inputs: Inputs) -> Forward:
    return bind(inputs, "reference")


def make_call(inputs: Inputs, xs: tuple[Tensor, ...], omega: Tensor) -> Call:
    """Build the call description that internal functions expect."""
    case: Any = inputs.case
    options = Options(case.map, case.act, case.dim, case.pairs, case.rotary_dim)
    return validate(options, xs, omega, inputs.positions)


def cached(inputs: Inputs) -> Forward:
    """Return a function that calls the kernels and saves the angles for the backward pass."""

    def forward(xs: tuple[Tensor, ...], omega: Tensor) -> tuple[Tensor, ...]:
        call = make_call(inputs, xs, omega)
        call = replace_angles(call, store_angles(call), xs[0].dtype)
        return ENCODE.run_kernels(call, xs, ENCODE.list_learned(call, ()), is_direct((*xs, omega)))

    return forward


# --- ready-made tables -----------------------------------------------------------------------------------------------


def tables(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return cos Θ and sin Θ (H or 1, N, C), accurate to float32 precision."""
    assert isinstance(inputs.positions, Grid)
    coords = inputs.positions.coordinates(inputs.omega.device)
    theta = reference.angles(coords, inputs.omega.double())  # prefix tokens are at the origin
    return theta.cos().float(), theta.sin().float()


def cosine_with_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    return torch.cat([wide * cos, wide * sin], dim=-1).to(x.dtype)


def rotate_with_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def rotate_neighbours_with_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def torch_tables(inputs: Inputs) -> Forward:
    ready = by_tensor(inputs, *tables(inputs))
    rotate = rotate_with_tables if inputs.case.pairs == "half" else rotate_neighbours_with_tables
    call = cosine_with_tables if inputs.case.map == "cosine" else rotate

    def forward(xs: tuple[Tensor, ...], omega: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(x, *ts) for x, ts in zip(xs, ready, strict=True))

    return forward


def by_tensor(inputs: Inputs, *ts: Tensor) -> list[tuple[Tensor, ...]]:
    """Repeat tables (H, ...), each shared by a group of heads, so that each head of q and of k has its own table."""
    num = [h if inputs.case.omega_heads > 1 else 1 for h in inputs.case.heads]
    return [tuple(t if len(t) == n else t.repeat_interleave(n // len(t), 0) for t in ts) for n in num]


def rotate_half(inputs: Inputs) -> Forward:
    """Rotate as transformers does (x cos + [-x_2, x_1] sin, with tables for all channels), but in float32."""
    ready = by_tensor(inputs, *(torch.cat([t, t], dim=-1) for t in tables(inputs)))

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)

    def forward(xs: tuple[Tensor, ...], omega: Tensor) -> tuple[Tensor, ...]:
        return tuple(turn(x, *ts) for x, ts in zip(xs, ready, strict=True))

    return forward


def compile_forward(build: Callable[[Inputs], Forward]) -> Callable[[Inputs], Forward]:
    def build_compiled(inputs: Inputs) -> Forward:
        backend = "inductor" if inputs.omega.is_cuda else "aot_eager"
        return torch.compile(build(inputs), dynamic=False, fullgraph=True, backend=backend)

    return build_compiled


# --- other libraries -------------------------------------------------------------------------------------------------


def timm(inputs: Inputs) -> Forward:
    """Rotate like timm's attention, which splits off prefix tokens and concatenates them again."""
    from timm.layers import apply_rot_embed_cat  # pyright: ignore[reportPrivateImportUsage]

    cos, sin = tables(inputs)
    prefix, half = inputs.case.prefix, inputs.case.pairs == "half"
    sin, cos = (torch.cat([t, t], dim=-1) if half else t.repeat_interleave(2, -1) for t in (sin, cos))
    embedding = torch.cat([sin, cos], dim=-1)[:, prefix:].contiguous()
    ready = [t[0] if len(t) == 1 else t for (t,) in by_tensor(inputs, embedding)]

    def forward(xs: tuple[Tensor, ...], omega: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.cat(
                [x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], t, half=half)], dim=2
            ).type_as(x)
            for x, t in zip(xs, ready, strict=True)
        )  # fmt: skip

    return forward


def load_file(name: str, root: Path, *places: str) -> Any:
    """Load a module from a file without importing the package, because the package's dependencies may be missing."""
    for place in places:
        if (root / place).exists():
            spec = importlib.util.spec_from_file_location(name, root / place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module
    raise FileNotFoundError(f"none of {', '.join(places)} exists in {root}; pass another folder")


def flash_attn(root: Path) -> dict[str, Peer]:
    rotary = load_file("flash_attn_rotary", root, "flash_attn/ops/triton/rotary.py", "ops/triton/rotary.py")

    class Rotary(torch.autograd.Function):  # the package's own autograd function requires the CUDA extension
        @staticmethod
        def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
            ctx.save_for_backward(cos, sin)
            ctx.interleaved = interleaved
            return rotary.apply_rotary(x, cos, sin, interleaved=interleaved)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            back = rotary.apply_rotary(grads[0], *ctx.saved_tensors, interleaved=ctx.interleaved, conjugate=True)
            return back, None, None, None

    def build(inputs: Inputs) -> Forward:
        cos, sin = (t[0].contiguous() for t in tables(inputs))
        interleaved = inputs.case.pairs == "interleaved"

        def forward(xs: tuple[Tensor, ...], omega: Tensor) -> tuple[Tensor, ...]:
            ys: list[Any] = [Rotary.apply(x.transpose(1, 2), cos, sin, interleaved) for x in xs]
            return tuple(y.transpose(1, 2) for y in ys)

        return forward

    return {
        "flash-attn": Peer(
            build, ("rotate",), per_head=False, pairs=BOTH, note="tables; one launch a tensor"
        )
    }  # fmt: skip


def liger(root: Path) -> dict[str, Peer]:
    rope = load_file(
        "liger_rope", root, "src/liger_kernel/ops/rope.py", "liger_kernel/ops/rope.py", "ops/rope.py"
    )  # fmt: skip

    def build(inputs: Inputs) -> Forward:
        cos, sin = (torch.cat([t, t], dim=-1) for t in tables(inputs))
        return lambda xs, omega: rope.LigerRopeFunction.apply(*xs, cos, sin)

    return {
        "liger": Peer(
            build, ("rotate",), per_head=False, overwrites="grads",
            note="tables; copies q and k out of the projection, overwrites the gradients",
        ),
        "liger, in place": Peer(
            build, ("rotate",), per_head=False, overwrites="all",
            note="tables; contiguous q and k, overwritten; so are the gradients",
        ),
    }  # fmt: skip


def xopes(root: Path) -> dict[str, Peer]:
    # The packages import all of their modules. Empty stand-in packages avoid this, so only three modules are
    # loaded.
    for name in (
        "",
        "ops",
        "ops.lrpe",
        "ops.lrpe.cosine",
        "ops.lrpe.cosine._md",
        "ops.lrpe.rotate",
        "ops.lrpe.rotate._1d",
    ):
        stand_in = ModuleType(f"xopes.{name}".strip("."))
        stand_in.__path__ = [str(Path(root, "xopes", *name.split(".")))]
        sys.modules[stand_in.__name__] = stand_in
    cosine_md: Any = importlib.import_module("xopes.ops.lrpe.cosine._md.lrpe_cosine_md_triton")
    cosine_md_cache: Any = importlib.import_module("xopes.ops.lrpe.cosine._md.lrpe_cosine_md_cache_triton")
    rotate_1d: Any = importlib.import_module("xopes.ops.lrpe.rotate._1d.lrpe_rotate_1d_sp_triton")

    def cosine_by(function: Any) -> Callable[[Inputs], Forward]:
        def build(inputs: Inputs) -> Forward:
            case, device = inputs.case, inputs.omega.device
            theta = shared_theta(case).float().to(device).expand(case.heads[0], -1).contiguous()
            shape = torch.tensor(case.shape, dtype=torch.int32, device=device)
            return lambda xs, omega: tuple(function.apply(x, theta, shape, case.prefix, "none", None) for x in xs)

        return build

    def one_axis(inputs: Inputs) -> Inputs:
        num_tokens = inputs.xs[0].shape[2]
        case = replace(inputs.case, shape=(num_tokens,), prefix=0)
        omega = axial_omega(shared_theta(case), case.channels, 1).to(inputs.omega)
        return replace(inputs, omega=omega, positions=Grid((num_tokens,)), case=case)

    def rotate_by_1d(inputs: Inputs) -> Forward:
        theta = inputs.omega[..., 0].contiguous()

        def forward(xs: tuple[Tensor, ...], omega: Tensor) -> tuple[Tensor, ...]:
            ys = [rotate_1d.LrpeRotate1dSpTriton.apply(x.transpose(1, 2), theta, 0, "none", None) for x in xs]
            return tuple(y.transpose(1, 2) for y in ys)

        return forward

    return {
        "xopes": Peer(cosine_by(cosine_md.LrpeCosineMdTriton), ("cosine",), per_head=False),
        "xopes, cached angles": Peer(cosine_by(cosine_md_cache.LrpeCosineMdCacheTriton), ("cosine",), per_head=False),
        "xopes, one axis": Peer(
            rotate_by_1d, ("rotate",), per_head=False, adapt=one_axis,
            note="one axis over all tokens; copies q and k out of the projection",
        ),
    }  # fmt: skip


# --- all -------------------------------------------------------------------------------------------------------------

PEERS = {
    OURS: Peer(kernels, omega_grad=True, pairs=BOTH),
    "torch.compile, tables": Peer(compile_forward(torch_tables), compiled=True, pairs=BOTH),
    "torch.compile, angles": Peer(compile_forward(torch_eager), compiled=True, omega_grad=True, pairs=BOTH),
    "torch.compile, rotate_half": Peer(
        compile_forward(rotate_half), ("rotate",), compiled=True, text=True, note="tables"
    ),
    "timm, compiled": Peer(compile_forward(timm), ("rotate",), compiled=True, pairs=BOTH, note="tables"),
    "timm, eager": Peer(timm, ("rotate",), pairs=BOTH, note="tables"),
    "torch, eager": Peer(torch_eager, omega_grad=True, pairs=BOTH),
}
LIBRARIES = {"flash-attn": flash_attn, "liger": liger, "xopes": xopes}
CACHED = Peer(cached, ("cosine",), omega_grad=True)
