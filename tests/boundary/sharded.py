"""Cases that each process of test_sharding.py runs. Each case compares its result with the unsharded computation."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreting import quicken
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lrpe_md import Coordinates, CosineMd, Grid, Norm, Rotate1d, RotateMd, cosine, rotate

CASES: dict[int, dict[str, Callable[[Any, str], None]]] = {1: {}, 2: {}, 3: {}}  # number of processes: cases
GRID = Grid((2, 3), prefix=1)


def case(function: Callable[[Any, str], None], world_size: int = 2) -> Callable[[Any, str], None]:
    CASES[world_size][function.__name__] = function
    return function


def run(rank: int, world_size: int, backend: str, impl: str, folder: str) -> None:
    """Run all cases in one process, and write the failures to a file."""
    import linear_sharded  # noqa: F401 its cases

    torch.set_num_threads(1)
    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    mesh = init_device_mesh(device, (world_size,))
    failed = ""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            quicken(patch)
        for name, function in CASES[world_size].items():
            try:
                function(mesh, impl)
            except (Exception, pytest.fail.Exception):
                failed += f"--- {name}, rank {rank}\n{traceback.format_exc()}\n"
    with open(f"{folder}/failed{rank}", "w") as file:
        file.write(failed)
    dist.barrier()  # Gloo can abort a process that exits right after a collective.
    dist.destroy_process_group()


def close(name: str, actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{name}: {m}")


def normal(mesh: Any, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw the same values on every rank."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(mesh.device_type, dtype)


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def same(mesh: Any, placements: Any, encode: Callable[..., Any], plain: dict[str, Tensor], **others: Any) -> None:
    """Check that outputs and gradients of ``encode(*xs, **frequencies)`` with DTensors equal those of one process.

    plain: frequencies that stay plain tensors, which is equivalent to replicated. others: q, k, and the frequencies
    with their placements.
    """
    xs = [others.pop(name) for name in ("q", "k") if name in others]
    placements = [placements] * len(xs) if isinstance(placements[0], (Shard, Replicate)) else placements
    whole = [leaf(x) for x in xs]
    expected_tables = {name: leaf(t) for name, t in plain.items()} | {name: leaf(t) for name, (t, _) in others.items()}
    expected = encode(*whole, **expected_tables)
    expected = expected if isinstance(expected, tuple) else (expected,)
    grads = [normal(mesh, *y.shape, seed=7 + i) for i, y in enumerate(expected)]
    torch.autograd.backward(expected, grads)

    shards = [distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(xs, placements, strict=True)]
    tables: dict[str, Any] = {name: leaf(t) for name, t in plain.items()}
    tables |= {name: distribute_tensor(t, mesh, p).requires_grad_() for name, (t, p) in others.items()}
    actual = encode(*shards, **tables)
    actual = actual if isinstance(actual, tuple) else (actual,)
    for y, x in zip(actual, shards, strict=True):
        assert y.placements == x.placements
    # We don't call .backward(), because torch 2.11 replicates gradients that it accumulates into uneven shards.
    shard_grads = [distribute_tensor(g, mesh, y.placements) for g, y in zip(grads, actual, strict=True)]
    dshards = torch.autograd.grad(actual, [*shards, *tables.values()], shard_grads)
    for i, (y, right) in enumerate(zip(actual, expected, strict=True)):
        assert y.shape == right.shape
        assert y.stride() == right.stride()
        close(f"y{i}", y.full_tensor(), right)
        assert dshards[i].placements == shards[i].placements
        close(f"dx{i}", dshards[i].full_tensor(), whole[i].grad)
    for (name, t), grad in zip(tables.items(), dshards[len(xs) :], strict=True):
        if isinstance(t, DTensor):
            assert grad.placements == t.placements, name
            grad = grad.full_tensor()
        close("d" + name, grad, expected_tables[name].grad)


@case
def batch(mesh, impl):
    """Shard the batch evenly, unevenly and with an empty rank. Per-sample positions and origins are sharded too."""
    omega, phase = normal(mesh, 2, 4, 2), normal(mesh, 1, 4)
    origin = torch.tensor([[1, 2], [30, 4], [5, 60]], device=mesh.device_type)
    for n in (3, 1):
        q, k = normal(mesh, n, 4, 7, 8), normal(mesh, n, 2, 7, 8)
        for positions in (Grid((2, 3), prefix=1, origin=origin[:n], scale=0.5), normal(mesh, n, 7, 2)):
            same(
                mesh, [Shard(0)], lambda *xs, p=positions, **w: rotate(*xs, positions=p, impl="reference", **w),
                {"omega": omega, "phase": phase}, q=q, k=k,
            )  # fmt: skip
    same(
        mesh, [Shard(0)], lambda x, **w: cosine(x, positions=GRID, act="silu", impl="reference", **w), {},
        q=normal(mesh, 2, 2, 7, 4), omega=(omega, [Replicate()]), phase=(normal(mesh, 2, 4), [Shard(0)]),
    )  # fmt: skip


@case
def kernel(mesh, impl):
    """Run the kernels. A rank without samples launches nothing, but takes part in the all-reduce."""
    for batch, p in ((2, Shard(1)), (1, Shard(0))):
        same(
            mesh, [p], lambda *xs, **w: rotate(*xs, positions=GRID, impl=impl, **w), {}, q=normal(mesh, batch, 4, 7, 8),
            k=normal(mesh, batch, 2, 7, 8), omega=(normal(mesh, 2, 4, 2), [Replicate()]),
        )  # fmt: skip


@case
def tables(mesh, impl):
    """Shard cos and sin like x, or keep them as plain tensors. Only the reference runs with gradients."""

    def encode(*xs, cos, sin, prefix=1, impl="reference", norm=None):
        return rotate(*xs, tables=(cos, sin), prefix=prefix, norm=norm, impl=impl)

    q, k = normal(mesh, 3, 4, 7, 8), normal(mesh, 3, 2, 7, 8)
    for p, size in itertools.product((Shard(0), Shard(1), Shard(2)), ((5, 8), (3, 5, 4), (3, 2, 5, 8), (1, 2, 5, 4))):
        cos, sin = normal(mesh, *size), normal(mesh, *size, seed=1)
        same(mesh, [p], encode, {"cos": cos, "sin": sin}, q=q, k=k)
        whole = rotate(q, k, tables=(cos, sin), prefix=1, norm=Norm("rms"))
        shards = [distribute_tensor(x, mesh, [p]) for x in (q, k)]
        for y, expected in zip(encode(*shards, cos=cos, sin=sin, norm=Norm("rms"), impl=impl), whole, strict=True):
            close("y", y.full_tensor(), expected)
        if len(size) == 4 and size[0] > 1:  # heads and samples share rows without a copy
            table = normal(mesh, 5, 8).expand(3, 2, 5, 8)
            ys = encode(*shards, cos=table, sin=table, impl=impl)
            close("expanded", ys[1].full_tensor(), encode(q, k, cos=table[0, 0], sin=table[0, 0])[1])
    rows = {"cos": (normal(mesh, 3, 1, 7, 8), [Shard(2)]), "sin": (normal(mesh, 3, 1, 7, 8, seed=1), [Shard(2)])}
    same(mesh, [Shard(2)], partial(encode, prefix=0), {}, q=q, k=k, **rows)
    rows = {"cos": (normal(mesh, 5, 8), [Shard(0)]), "sin": (normal(mesh, 5, 8, seed=1), [Replicate()])}
    same(mesh, [Shard(2)], encode, {}, q=q, k=k, **rows)
    x, by_head = distribute_tensor(normal(mesh, 1, 6, 7, 8), mesh, [Shard(1)]), normal(mesh, 1, 3, 7, 8)
    with pytest.raises(ValueError, match=r"tables: expected a number of heads divisible by 2 .* got 3"):
        rotate(x, tables=(by_head, by_head))


@case
def heads(mesh, impl):
    q, k = normal(mesh, 2, 4, 7, 8), normal(mesh, 2, 2, 7, 8)
    amplitude = torch.tensor([[2.0] * 4, [3.0] * 4], device=mesh.device_type)

    def encode(*xs, **w):
        return rotate(*xs, positions=GRID, amplitude=amplitude, impl="reference", **w)

    omega, phase = normal(mesh, 2, 4, 2), normal(mesh, 2, 4)
    same(mesh, [Shard(1)], encode, {"omega": omega}, q=q, k=k, phase=(phase, [Shard(0)]))
    same(mesh, [Shard(1)], encode, {"phase": phase}, q=q, k=k, omega=(omega, [Shard(0)]))
    same(mesh, [Shard(1)], encode, {}, q=q, k=k, omega=(omega[:1], [Shard(1)]), phase=(phase, [Replicate()]))
    # First, every rank has the only key head. Then the ranks don't divide the heads.
    same(mesh, [[Shard(1)], [Replicate()]], encode_shared, {"omega": omega[:1]}, q=q, k=k[:, :1])
    same(mesh, [Shard(1)], encode_shared, {"omega": omega[:1]}, q=q[:, :3], k=k[:, :1])


def encode_shared(*xs, **w):
    return rotate(*xs, positions=GRID, impl="reference", **w)


@case
def norms(mesh, impl):
    """Shard weights by head if they are per head, and sum their gradients over the ranks."""
    q, k, omega = normal(mesh, 2, 4, 7, 8), normal(mesh, 2, 2, 7, 8), normal(mesh, 1, 4, 2)

    def encode(*xs, weight, weight_k, over="head", impl="reference", **w):
        return rotate(*xs, positions=GRID, norm=Norm("rms", (weight, weight_k), over=over), impl=impl, **w)

    shared = {"weight": normal(mesh, 8), "weight_k": normal(mesh, 8, seed=1)}
    by_head = {"weight": normal(mesh, 4, 8), "weight_k": normal(mesh, 2, 8)}
    groups = {"weight": normal(mesh, 3, 4, 8), "weight_k": normal(mesh, 3, 2, 8)}
    for p in (Shard(0), Shard(1), Shard(2)):
        for weights in (shared, by_head, groups):
            same(mesh, [p], encode, {"omega": omega, **weights}, q=q, k=k)
        same(mesh, [p], partial(encode, impl=impl), {"omega": omega, **groups}, q=q, k=k)
    same(
        mesh, [Shard(1)], encode, {"weight_k": by_head["weight_k"]}, q=q, k=k, omega=(omega, [Replicate()]),
        weight=(by_head["weight"], [Shard(0)]),
    )  # fmt: skip
    for p in (Shard(0), Shard(2)):
        same(mesh, [p], partial(encode, over="heads"), {"omega": omega, **groups}, q=q, k=k)
    same(mesh, [Shard(2)], partial(encode, over="heads", impl=impl), {"omega": omega, **groups}, q=q, k=k)
    shard = distribute_tensor(q, mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"norm: over='heads' needs all heads .* x\.redistribute"):
        rotate(shard, omega=omega, positions=GRID, norm=Norm(over="heads"))
    other = init_device_mesh(mesh.device_type, (1, mesh.size()))
    weight = distribute_tensor(normal(mesh, 8), other, [Replicate()] * 2)
    with pytest.raises(ValueError, match=r"norm\.weight, norm\.bias: expected plain tensors, or DTensors on x's mesh"):
        rotate(shard, omega=omega, positions=GRID, norm=Norm(weight=weight))
    table, split = GRID.explicit(q.device), distribute_tensor(q, mesh, [Shard(2)])
    with pytest.raises(ValueError, match=r"norm\.weight: expected one weight for all tokens, because the tokens are"):
        rotate(split, omega=omega, positions=table, norm=Norm(weight=groups["weight"]))


@case
def tokens(mesh, impl):
    """Shard a sequence unevenly. Each token keeps its position."""
    q, k, omega = normal(mesh, 2, 4, 7, 8), normal(mesh, 2, 2, 7, 8), normal(mesh, 2, 4, 2)
    rotated = torch.tensor([True, False, True, True, True], device=mesh.device_type)
    for positions in (
        Grid((2, 3), suffix=1, shift=1.0),
        Grid((3, 4), prefix=2, start=3, length=7),
        Coordinates(normal(mesh, 2, 5, 2), prefix=1, suffix=1),
        Coordinates(normal(mesh, 5, 2), prefix=1, suffix=1, rotated=rotated),
    ):
        same(
            mesh, [Shard(2)], lambda *xs, p=positions, **w: rotate(*xs, positions=p, impl="reference", **w),
            {"omega": omega}, q=q, k=k, phase=(normal(mesh, 2, 4), [Replicate()]),
        )  # fmt: skip
    pair = Grid((4,), origin=torch.tensor([[1], [2]], device=mesh.device_type)), Grid((2, 1)).explicit(q.device).coords
    same(
        mesh, [Shard(2)],
        lambda q, k, **w: cosine(q, k, positions=(pair[0], pair[1][:, :1]), phase=(None, w.pop("phase")), **w),
        {"phase": normal(mesh, 1, 8)}, q=q[:, :, :4], k=k[:, :, :2], omega=(normal(mesh, 1, 8, 1), [Replicate()]),
    )  # fmt: skip


@case
def coordinates_learn(mesh, impl):
    """Differentiate with respect to coordinates, amplitude and scale, which only the reference supports."""
    omega = normal(mesh, 1, 4, 2)
    for p, shape in ((Shard(0), (7, 2)), (Shard(2), (7, 2)), (Shard(2), (2, 7, 2)), (Shard(1), (2, 7, 2))):
        same(
            mesh, [p], lambda x, coords, **w: rotate(x, positions=coords, omega=omega, **w),
            {"coords": normal(mesh, *shape), "amplitude": normal(mesh, 4)}, q=normal(mesh, 2, 2, 7, 8),
        )  # fmt: skip
    same(
        mesh, [Shard(2)], lambda x, scale: rotate(x, positions=Grid((7, 1), scale=scale), omega=omega),
        {"scale": normal(mesh, 2)}, q=normal(mesh, 2, 2, 7, 8),
    )  # fmt: skip


@case
def two_axes_of_a_mesh(mesh, impl):
    square = init_device_mesh(mesh.device_type, (1, mesh.size()))
    for placements in ([Shard(0), Shard(1)], [Shard(2), Shard(2)], [Shard(1), Shard(2)]):
        same(
            square, placements, encode_shared, {"omega": normal(mesh, 2, 4, 2)}, q=normal(mesh, 2, 4, 7, 8),
            k=normal(mesh, 2, 2, 7, 8),
        )  # fmt: skip


@case
def modules(mesh, impl):
    """Use a module's frequencies, plain or distributed over the same mesh, on inputs in (B, N, H, D) layout."""
    from torch.distributed.tensor import distribute_module

    x = normal(mesh, 2, 7, 4, 8).transpose(1, 2)
    for distributed in (False, True):
        module = CosineMd(8, 2, num_heads=4, learnable=True, phase=True, dtype=torch.float64, device=mesh.device_type)
        one = CosineMd(8, 2, num_heads=4, learnable=True, phase=True, dtype=torch.float64, device=mesh.device_type)
        if distributed:
            distribute_module(module, mesh)
        y = module(distribute_tensor(x, mesh, [Shard(1)]), positions=GRID)
        expected = one(x, positions=GRID)
        close("y", y.full_tensor(), expected)
        assert y.stride() == expected.stride()
        assert not y.is_contiguous()
        y.square().sum().backward()
        expected.square().sum().backward()
        # |y|² does not depend on the angles.
        (module(distribute_tensor(x, mesh, [Shard(1)]), positions=GRID)[..., :3] * 2).sum().backward()
        (one(x, positions=GRID)[..., :3] * 2).sum().backward()
        for name, parameter in module.named_parameters():
            grad: Any = parameter.grad
            close(name, grad.full_tensor() if distributed else grad, one.get_parameter(name).grad)
    text = Rotate1d(8, dtype=torch.float64, device=mesh.device_type)
    offset = torch.tensor([4, 9], device=mesh.device_type)
    for placement in (Shard(0), Shard(1), Shard(2)):
        y = text(distribute_tensor(x, mesh, [placement]), offset=offset)
        close("text", y.full_tensor(), text(x, offset=offset))


@case
def composed(mesh, impl):
    """Encode views and compositions of operators: packed projections, partial rotation, xPos."""
    qkv, part, xpos = normal(mesh, 2, 7, 3, 4, 8), CosineMd(8, rotary_dim=4, impl=impl), Rotate1d(8, scale_base=4.0)
    part, xpos, rope = (m.to(mesh.device_type) for m in (part, xpos, RotateMd(8, impl=impl)))
    for dim in (0, 1, 3):
        found = rope(qkv=distribute_tensor(qkv, mesh, [Shard(dim)]), positions=GRID)
        for name, a, b in zip("qkv", found, rope(qkv=qkv, positions=GRID), strict=True):
            close(f"{name} of a projection", a.full_tensor(), b)
    x = normal(mesh, 2, 4, 7, 8)
    for dim in (0, 1, 2):
        cut = distribute_tensor(x, mesh, [Shard(dim)])
        close("a part", part(cut, positions=GRID).full_tensor(), part(x, positions=GRID))
        for name, a, b in zip("qk", xpos(cut, cut, offset=3), xpos(x, x, offset=3), strict=True):
            close(f"{name}, xPos", a.full_tensor(), b)


@case
def compiled(mesh, impl):
    """Compile one graph that sums the frequencies' gradient in its backward pass."""

    def plain(*xs, **w):
        return rotate(*xs, positions=GRID, impl="auto", **w)  # torch.compile can't trace the interpreter

    fast = torch.compile(plain, backend="aot_eager", fullgraph=True)
    same(
        mesh, [Shard(2)], lambda *xs, **w: (fast if isinstance(xs[0], DTensor) else plain)(*xs, **w),
        {"omega": normal(mesh, 2, 4, 2)}, q=normal(mesh, 2, 4, 7, 8), k=normal(mesh, 2, 2, 7, 8),
    )  # fmt: skip


@case
def refused(mesh, impl):
    x, omega = normal(mesh, 2, 4, 7, 8), normal(mesh, 4, 4, 2)
    shard = distribute_tensor(x, mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"x: expected placements .* a sharded head_dim .* x\.redistribute"):
        rotate(distribute_tensor(x, mesh, [Shard(3)]), omega=omega, positions=GRID)
    with pytest.raises(ValueError, match=r"k: expected placements .* Partial.* k\.redistribute"):
        rotate(shard, DTensor.from_local(x, mesh, [Partial()]), omega=omega, positions=GRID)
    with pytest.raises(TypeError, match="k: expected a DTensor, like the other tensors, got a plain tensor"):
        rotate(shard, x, omega=omega, positions=GRID)
    with pytest.raises(TypeError, match="x: expected a DTensor, like the other tensors"):
        rotate(x, omega=distribute_tensor(omega, mesh, [Replicate()]), positions=GRID)
    other = init_device_mesh(mesh.device_type, (1, mesh.size()))
    with pytest.raises(ValueError, match="k: expected a DTensor on q's mesh"):
        rotate(shard, distribute_tensor(x, other, [Replicate(), Shard(1)]), omega=omega, positions=GRID)
    with pytest.raises(ValueError, match="omega, phase: expected plain tensors, or DTensors on x's mesh"):
        rotate(shard, omega=distribute_tensor(omega, other, [Replicate()] * 2), positions=GRID)
    split, table = distribute_tensor(x, mesh, [Shard(2)]), GRID.explicit(x.device)
    with pytest.raises(ValueError, match=r"softmax over the sequence .* with sharded tokens"):
        cosine(split, omega=normal(mesh, 1, 8, 2), positions=table, act="softmax", dim=-2)
    with pytest.raises(ValueError, match="omega: expected a number of heads divisible by 2"):
        rotate(distribute_tensor(x[:, :3], mesh, [Shard(1)]), omega=omega[:3], positions=GRID)
    with pytest.raises(ValueError, match=r"expected 7 tokens \(x's N\)"):
        rotate(distribute_tensor(x, mesh, [Shard(2)]), omega=omega, positions=Grid((2, 3)))
    uneven = DTensor.from_local(
        x[:, :, : 2 + 3 * dist.get_rank()], mesh, [Shard(2)], run_check=False, shape=x.shape, stride=x.stride()
    )
    with pytest.raises(ValueError, match=r"x: expected \d of the 7 tokens on this rank, .* Grid\(start=, length=\)"):
        rotate(uneven, omega=omega, positions=GRID)
    one_and_three = x[:, :1] if dist.get_rank() == 0 else x[:, 1:4]
    cut = DTensor.from_local(
        one_and_three, mesh, [Shard(1)], run_check=False, shape=x[:, :4].shape, stride=x[:, :4].stride()
    )
    by_head = normal(mesh, 4, 4, 2)
    for tables in ({"omega": by_head}, {"omega": by_head[:1], "phase": by_head[..., 0]}):
        with pytest.raises(
            ValueError, match=r"x: expected 2 of the 4 heads on this rank, .* got [13]; .* of its heads"
        ):
            rotate(cut, positions=GRID, **tables)
    with pytest.raises(ValueError, match=r"x: expected 2 of the 4 heads"):  # q's shards are valid, k's are not
        rotate(distribute_tensor(x[:, :4], mesh, [Shard(1)]), cut, omega=by_head, positions=GRID)
    assert rotate(cut, omega=by_head[:1], positions=GRID).to_local().shape == one_and_three.shape  # shared by all
    cut = DTensor.from_local(
        x[: 2 * dist.get_rank()], mesh, [Shard(0)], run_check=False, shape=x[:2].shape, stride=x.stride()
    )
    table = normal(mesh, 2, 7, 2)
    origins = torch.tensor([[0, 0], [5, 5]], device=x.device)
    for where in (table, Grid((2, 3), prefix=1, origin=origins)):
        with pytest.raises(
            ValueError, match=r"x: expected 1 of the 2 samples on this rank, .* got [02]; .* its samples"
        ):
            rotate(cut, omega=omega[:1], positions=where)


@case
def sequence_parallel(mesh, impl):
    """Pass each rank a slice of plain tensors, and sum the frequency gradients by hand."""
    rank, cut = mesh.get_local_rank(), 3
    start, length = (0, cut) if rank == 0 else (cut, 7 - cut)
    q, k = normal(mesh, 2, 4, 7, 8), normal(mesh, 2, 2, 7, 8)
    grads = [normal(mesh, *t.shape, seed=3) for t in (q, k)]
    table = Coordinates(normal(mesh, 2, 6, 2), prefix=1)
    text, offset = Rotate1d(8, dtype=torch.float64, device=mesh.device_type), torch.tensor([5, 70]).to(q.device)
    for whole, part in (
        ({"positions": GRID}, {"positions": Grid((2, 3), prefix=1, start=start, length=length)}),
        ({"positions": table}, {"positions": table.shard(start, length)}),
        ({"offset": 100}, {"offset": 100 + start}),
        ({"offset": offset}, {"offset": offset + start}),
    ):
        found = []
        for local, where in ((slice(None), whole), (slice(start, start + length), part)):
            kind = Rotate1d if "offset" in where else RotateMd
            axes = () if "offset" in where else (2,)
            module = kind(8, *axes, num_heads=2, learnable=True, dtype=torch.float64, device=mesh.device_type)
            ys = module(q[:, :, local], k[:, :, local], **where)
            torch.autograd.backward(ys, [g[:, :, local] for g in grads])
            found.append((ys, module.log_theta.grad))
        (ys, dtheta), (local_ys, local_dtheta) = found
        for y, local_y in zip(ys, local_ys, strict=True):
            close(str(part), local_y, y[:, :, start : start + length])
        dist.all_reduce(local_dtheta)
        close(f"dtheta, {part}", local_dtheta, dtheta)
    assert text(q[:, :, :0], offset=3).shape == (2, 4, 0, 8)


@case
def fsdp2(mesh, impl):
    """Keep frequencies in float32 under bf16, in a separate group. Their gradient is the mean over the ranks."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.proj, self.rope = torch.nn.Linear(8, 8), RotateMd(8, 2, learnable=True, num_heads=2)

        def forward(self, x):
            return self.rope(self.proj(x), positions=GRID)

    def build():
        return Block().to(mesh.device_type)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x = normal(mesh, 2, 2, 7, 8, dtype=torch.float32)
    weight = normal(mesh, 2, 2, 7, 8, seed=1, dtype=torch.float32)
    block, one = build(), build()
    fully_shard(block.rope, mesh=mesh)
    fully_shard(block, mesh=mesh, mp_policy=half)
    rank = mesh.get_local_rank()
    y = block(x[rank : rank + 1])
    assert y.dtype == torch.bfloat16
    (y * weight[rank : rank + 1]).sum().backward()

    linear = one.proj.to(torch.bfloat16)
    right = torch.cat([one.rope(linear(sample), positions=GRID) for sample in x.bfloat16().split(1)])
    torch.testing.assert_close(y, right[rank : rank + 1], rtol=0, atol=0)
    (right * weight).sum().div(2).backward()
    theta = block.rope.log_theta
    assert theta.dtype == theta.grad.dtype == torch.float32
    torch.testing.assert_close(theta.grad.full_tensor(), one.rope.log_theta.grad)

    together = build()
    fully_shard(together, mesh=mesh, mp_policy=half)
    with pytest.raises(TypeError, match=r"omega: expected float32 or float64 .* fully_shard"):
        together(x[:1])
