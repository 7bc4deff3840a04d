"""Other measurements in ``bench operators``: host time, first compile, memory, accuracy and scaling."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lrpe_md
from lrpe_md import CosineMd, RotateMd, reference, rotate
from lrpe_md.engine.core.call import Needs
from lrpe_md.engine.encode.operator import ENCODE

from ..common.cases import Inputs, as_tuple
from .layers import Workload
from .measure import Session, describe, device_events, quantiles, scratch, time_peer
from .peers import CACHED, OURS, PEERS, Peer, kernels, large_inputs, make_call

SMALL = Workload(1, 12, (14, 14), 1, 64)  # a size at which the host is slower than the GPU
HOST_PEERS = ("torch, eager", "flash-attn")
SCALING_PEERS = (OURS, "torch.compile, tables", "torch.compile, angles", "timm, compiled")


def variants(op: str, workload: Workload) -> dict[str, dict[str, Any]]:
    """Return variants of a call, each named after how it differs from the plain call."""
    found: dict[str, dict[str, Any]] = {"coordinates (N, K)": {"coords": "shared"}}
    found |= {f"act {act}": {"act": act} for act in ("relu", "silu", "softplus")}
    found["act softmax"] = {"act": "softmax", "dim": -1}
    found |= {str(dtype).removeprefix("torch."): {"dtype": dtype} for dtype in (torch.float16, torch.float32)}
    found |= {f"head_dim {d}": {"head_dim": d} for d in (64, 72, 80, 128) if d != workload.head_dim}
    return found | ({"interleaved pairs": {"pairs": "interleaved"}} if op == "rotate" else {})


def measure_variants(session: Session, modes: list[str], op: Any, name: str, workload: Workload) -> None:
    """Measure the variants of lrpe-md's operators, with shared frequencies."""
    for variant, changes in variants(op, workload).items():
        with session.attempt(mode="variants", op=op, workload=name, peer=OURS, variant=variant):
            inputs = large_inputs(workload.case(op, **changes), session.device)
            time_peer(session, modes, name, OURS, PEERS[OURS], inputs, variant=variant)
    if op in CACHED.maps and session.device.type == "cuda":
        with session.attempt(mode="variants", op=op, workload=name, peer=OURS, variant="cached angles"):
            time_peer(
                session,
                modes,
                name,
                OURS,
                CACHED,
                large_inputs(workload.case(op), session.device),
                variant="cached angles",
            )


# --- host ------------------------------------------------------------------------------------------------------------


def host_times(
    fns: Sequence[Callable[[], Any]], blocks: int, calls: int, synchronize: Callable[[], Any]
) -> list[list[float]]:
    """Return each function's microseconds per call for each block of calls between two synchronisations.

    The functions take turns, so machine noise affects all of them equally.
    """
    times: list[list[float]] = [[] for _ in fns]
    gc.collect()
    gc.disable()
    try:
        for _ in range(blocks):
            for fn, own in zip(fns, times, strict=True):
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    fn()
                own.append(1e6 * (time.perf_counter() - start) / calls)
    finally:
        gc.enable()
        synchronize()
    return times


def host_time(session: Session, fn: Callable[[], Any], blocks: int) -> dict[str, Any]:
    """Time a function after three warm-up blocks. Blocks are short, so the GPU's queue stays short."""
    calls = 50 if session.device.type == "cuda" else 2
    (times,) = host_times([fn], blocks + 3, calls, session.synchronize)
    return {**quantiles(times[3:]), "unit": "us"}


class Listener:
    """Proxy for a kernel that records the arguments of each launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []
        self.pre_run_hooks = [None]  # with a hook, the launcher calls the kernel at every launch

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((grid, args, kwargs))
            return self.kernel[grid](*args, **kwargs)

        return launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def raw_launch(inputs: Inputs) -> Callable[[], Any]:
    """Return a function that only allocates the outputs and launches the forward kernel with Triton's launcher."""
    from lrpe_md.engine.encode import launch

    kernel = launch.lrpe_kernel
    listener = launch.lrpe_kernel = Listener(kernel)
    try:
        xs = tuple(inputs.xs)
        ys = ENCODE.forward(make_call(inputs, xs, inputs.omega), xs, (), direct=True)
    finally:
        launch.lrpe_kernel = kernel
    if len(listener.calls) != 1:
        raise RuntimeError(f"expected one launch of lrpe_kernel, got {len(listener.calls)}")
    grid, (x, dy, (_, q_strides, _, k_strides), *args), kwargs = listener.calls[0]

    def call() -> list[Tensor]:
        outs = [torch.empty_like(y) for y in ys]
        q_out, k_out = (*outs, None)[:2]
        kernel[grid](x, dy, (q_out, q_strides, k_out, k_strides), *args, **kwargs)
        return outs

    return call


def custom_op(inputs: Inputs) -> Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, ...]]:
    """Wrap the launcher with torch.library.custom_op and register_autograd."""
    checked = make_call(inputs, tuple(inputs.xs), inputs.omega)
    number = len(inputs.xs)
    names = [f"Tensor x{i}" for i in range(number)]
    result = "Tensor" if number == 1 else f"({', '.join(['Tensor'] * number)})"

    def single(ts: Any) -> Any:
        return ts[0] if number == 1 else tuple(ts)

    def forward(*args: Tensor) -> Any:
        xs, omega = args[:number], args[number]
        call = checked._replace(tables=checked.tables._replace(omega=omega))
        return single(ENCODE.forward(call, xs, (), direct=True))

    def backward(*args: Tensor) -> Any:
        grads, omega = args[:number], args[number]
        call = checked._replace(tables=checked.tables._replace(omega=omega))
        return single(ENCODE.backward(call, grads, [], [], Needs(), direct=True))

    def define(name: str, function: Any) -> Any:
        schema = f"({', '.join(names)}, Tensor omega) -> {result}"
        return torch.library.custom_op(f"lrpe_benchmark::{name}", function, mutates_args=(), schema=schema)

    forward_op = define(f"{inputs.case.map}_forward", forward)
    backward_op = define(f"{inputs.case.map}_backward", backward)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[number])

    def differentiate(ctx: Any, *grads: Tensor) -> Any:
        dxs = backward_op(*grads, ctx.saved_tensors[0])
        return (*((dxs,) if number == 1 else dxs), None)

    forward_op.register_autograd(differentiate, setup_context=setup_context)

    def call(xs: tuple[Tensor, ...], omega: Tensor) -> tuple[Tensor, ...]:
        ys = forward_op(*xs, omega)
        return (ys,) if number == 1 else ys

    return call


def measure_host(session: Session, op: Any, peers: dict[str, Peer], blocks: int) -> None:
    """Compare ways to call lrpe-md. The inputs are so small that the GPU waits for the host."""
    inputs = large_inputs(SMALL.case(op), session.device)
    xs, omega = tuple(inputs.xs), inputs.omega
    leaves = tuple(x.detach().requires_grad_() for x in xs)

    def measure(peer: str, variant: str, make: Callable[[], Callable[[], Any]]) -> None:
        with session.attempt(**describe("host", "small", peer, inputs, variant)):
            found = host_time(session, make(), blocks)
            session.add(**describe("host", "small", peer, inputs, variant), **found)

    def three_ways(peer: str, make: Callable[[], Callable[..., Any]]) -> None:
        def both(forward: Callable[..., Any]) -> Any:
            return torch.autograd.grad(forward(leaves, omega), leaves, inputs.grads)

        def bind(run: Callable[[Callable[..., Any]], Any]) -> Callable[[], Callable[[], Any]]:
            def build() -> Callable[[], Any]:
                forward = make()
                return lambda: run(forward)

            return build

        measure(peer, "forward, no gradient", bind(lambda forward: forward(xs, omega)))
        measure(peer, "forward, gradient", bind(lambda forward: forward(leaves, omega)))
        measure(peer, "forward and backward", bind(both))

    def module() -> Callable[..., Any]:
        kind = CosineMd if op == "cosine" else RotateMd
        made = kind(inputs.case.head_dim, len(inputs.case.shape)).to(session.device)
        return lambda xs, omega: as_tuple(made(*xs, positions=inputs.positions))

    if session.device.type == "cuda":
        measure("launch alone", "forward, no gradient", lambda: raw_launch(inputs))
        measure("clone", "forward, no gradient", lambda: lambda: [x.clone() for x in xs])
    three_ways(OURS, lambda: kernels(inputs))
    three_ways(f"{OURS} module", module)
    if session.device.type == "cuda":
        three_ways("custom_op", lambda: custom_op(inputs))
        with session.attempt(**describe("host", "small", OURS, inputs, "kernels")):
            forward = kernels(inputs)
            forward(xs, omega)
            number = len(device_events(lambda: forward(xs, omega)))
            session.add(**describe("host", "small", OURS, inputs, "kernels"), p50=number, unit="kernels")
    for name in HOST_PEERS:
        if name in peers and op in peers[name].maps:
            three_ways(name, lambda peer=peers[name]: peer.build(inputs))


# --- first compile ---------------------------------------------------------------------------------------------------

FIRST_CALLS = """
import sys, time, torch, triton
from lrpe_md import Grid, cosine, linear_attention, rotate
x = torch.randn(1, 4, 197, 64, dtype=torch.bfloat16, device="cuda")
long = torch.randn(1, 4, 1025, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
omega = {"cosine": torch.rand(1, 64, 2, device="cuda"), "rotate": torch.rand(1, 32, 2, device="cuda")}
torch.cuda.synchronize()
start = time.perf_counter()
triton.runtime.driver.active.get_current_target()
print(time.perf_counter() - start)
for op in sys.argv[1:]:
    start = time.perf_counter()
    kind, _, map = op.rpartition(" ")
    if kind == "linear":
        place = {"omega": omega[map], "positions": Grid((32, 32), prefix=1)}
        linear_attention(long, long, long, map=map, **place).sum().backward()
    else:
        (cosine if op == "cosine" else rotate)(x, omega=omega[op], positions=Grid((14, 14), prefix=1))
    torch.cuda.synchronize()
    print(time.perf_counter() - start)
"""


def first_calls(*ops: str) -> list[float]:
    """Return the seconds that Triton's start-up and each operator's first call take with an empty Triton cache.

    An operator is a map, or "linear" and a map, for linear attention with its backward pass.
    """
    root = Path(lrpe_md.__file__).parents[1]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "TRITON_CACHE_DIR": empty, "PYTHONPATH": paths}
        command = [sys.executable, "-c", FIRST_CALLS, *ops]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root, env=env)
    if done.returncode:
        said = done.stderr.strip() or "failed"
        raise RuntimeError(f"{said.splitlines()[-1]}\n{said}")  # the CSV gets only the first line
    return [float(line) for line in done.stdout.split()]


def measure_compile(session: Session, op: str, repeats: int) -> None:
    """Measure a first and a second compile, in new processes with an empty Triton cache."""
    key = {"mode": "compile", "op": op, "peer": OURS, "dtype": "bfloat16", "head_dim": 64}
    if session.device.type != "cuda":
        session.add(**key, note="needs a GPU")
        return
    order = ["cosine", "rotate"] if op == "cosine" else ["rotate", "cosine"]
    first, second = [], []
    with session.attempt(**key):
        for _ in range(repeats):
            start, one, another = first_calls(*order)
            first.append(start + one)
            second.append(another)
        session.add(**key, variant="first kernel", **quantiles(first), unit="s")
        session.add(**{**key, "op": order[1]}, variant="one more kernel", **quantiles(second), unit="s")


# --- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(session: Session, workload: str, name: str, peer: Peer, inputs: Inputs, with_omega: bool) -> None:
    """Measure how much memory calls need beyond their inputs: at the peak, and for tensors saved for the backward pass.

    Outputs don't count as saved. The minimum peak is the size of y and dx, and the minimum of saved memory is zero.
    """
    variant = "with frequencies" if with_omega else ""

    def key(what: str) -> dict[str, Any]:
        return describe("memory", workload, name, inputs, f"{what}{', ' if variant else ''}{variant}")

    with session.attempt(**key("peak")):
        if session.device.type != "cuda":
            session.add(**key("peak"), note="needs a GPU")
            return
        forward = peer.build(inputs)
        mine = scratch(peer, inputs)
        leaves = tuple(x.detach().requires_grad_() for x in mine.xs)
        omega = mine.omega.detach().requires_grad_(with_omega)
        wanted = [*leaves, omega] if with_omega else list(leaves)
        torch.autograd.grad(forward(leaves, omega), wanted, mine.grads)  # warm-up: compiles and tunes
        gc.collect()
        session.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ys = forward(leaves, omega)
        taken = {x.untyped_storage().data_ptr() for x in leaves}
        new = sum(y.numel() * y.element_size() for y in ys if y.untyped_storage().data_ptr() not in taken)
        kept = torch.cuda.memory_allocated() - before - new
        gradients = torch.autograd.grad(ys, wanted, mine.grads)
        session.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        floor = sum(t.numel() * t.element_size() for t in (*ys, *gradients))
        session.add(**key("peak"), p50=peak / 2**20, unit="MiB", floor_bytes=floor, note=peer.note)
        session.add(**key("kept"), p50=kept / 2**20, unit="MiB", floor_bytes=0, note=peer.note)
    if peer.compiled:
        torch.compiler.reset()


# --- accuracy --------------------------------------------------------------------------------------------------------


def measure_accuracy(session: Session, num: int = 4096, channels: int = 32) -> None:
    """Measure the largest error of angles at positions up to 2^20, by rotating (1, 0) in float32."""
    device = session.device
    for num_axes in (1, 2, 3, 4):
        generator = torch.Generator().manual_seed(0)
        coords = torch.randint(0, 2**20, (num, num_axes), generator=generator, dtype=torch.int32)
        coords[0] = 2**20
        omega64 = torch.rand(1, channels, num_axes, generator=generator, dtype=torch.float64)
        coords, omega64 = coords.to(device), omega64.to(device)
        omega32 = omega64.float()
        x = torch.zeros(1, 1, num, 2 * channels, device=device)
        x[..., :channels] = 1

        def ours(omega: Tensor, x: Tensor = x, coords: Tensor = coords) -> tuple[Tensor, Tensor]:
            y = rotate(x, omega=omega, positions=coords, impl="triton" if x.is_cuda else "reference")[0, 0]
            return y[:, :channels], y[:, channels:]

        def tables(theta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return theta.cos().to(dtype), theta.sin().to(dtype)

        exact = {d: reference.angles(coords.double(), w.double())[0] for d, w in ((32, omega32), (64, omega64))}
        contestants: dict[str, tuple[int, Callable[[], tuple[Tensor, Tensor]]]] = {
            f"{OURS}, float64 omega": (64, lambda w=omega64: ours(w)),
            f"{OURS}, float32 omega": (32, lambda w=omega32: ours(w)),
            "float32 tables from float32 angles": (
                32,
                lambda s=coords, w=omega32: tables(
                    reference.angles(s.float(), w, dtype=torch.float32)[0], torch.float32
                ),
            ),
            "bfloat16 tables from exact angles": (64, lambda e=exact[64]: tables(e, torch.bfloat16)),
        }  # fmt: skip
        for name, (bits, make) in contestants.items():
            key = {"mode": "accuracy", "op": "rotate", "peer": name, "num_axes": num_axes, "num_tokens": num}
            with session.attempt(**key):
                cos, sin = (t.double() for t in make())
                error = torch.atan2(sin, cos) - exact[bits]
                error = (error - 2 * math.pi * (error / (2 * math.pi)).round()).abs().max().item()
                session.add(**key, p50=error, unit="rad", note="positions up to 2^20; the largest error")


# --- cost against the number of tokens -------------------------------------------------------------------------------


def measure_scaling(session: Session, op: Any, name: str, peer: Peer, exponents: list[int]) -> None:
    """Time the forward pass of one sample with 8 heads of 64 channels, for N = 2^e tokens on one and on two axes."""
    for num_axes in (1, 2):
        for e in exponents:
            shape = (2**e,) if num_axes == 1 else (2 ** (e // 2), 2 ** (e - e // 2))
            workload = Workload(1, 8, shape, 0, 64)
            where = "1 axis" if num_axes == 1 else "2 axes"
            key = {"mode": "scaling", "op": op, "workload": where, "peer": name, "num_tokens": 2**e}
            with session.attempt(**key):
                inputs = large_inputs(workload.case(op), session.device)
                time_peer(session, ["fwd"], where, name, peer, inputs, label="scaling")
